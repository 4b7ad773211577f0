# shellcheck shell=bash
#
# All parts that launchers share, in one file to source:
#
#   set -euo pipefail
#   # shellcheck source=scripts/lib/launcher.bash
#   source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib/launcher.bash"
#
# Sourced, never run.

# shellcheck source=scripts/lib/common.bash
source "${BASH_SOURCE[0]%/*}/common.bash"
source "$KIT/scripts/lib/options.bash"
source "$KIT/scripts/lib/node_env.bash"
source "$KIT/scripts/lib/launch.bash"
source "$KIT/scripts/lib/by_hand.bash"
source "$KIT/scripts/lib/slurm.bash"
