#!/usr/bin/env bash
#
# Train with Muster's trainer on this machine, over SSH, or on SLURM.
#
# Usage: train.sh [options] CONFIG [SECTION.KEY=VALUE...]
#        muster train ...
#
#     muster train config/quickstart.yaml
#     muster train -n 2 --on node1,node2 config/quickstart.yaml train.steps=99
#
# Options stand before CONFIG, a settings file. What follows CONFIG changes its
# settings. The trainer is train.py.
#
#   (as run.sh except -m)
#   --help-all           show all options and the exit codes
#
# More options:
#   --sbatch OPTION      with --slurm: pass any option of sbatch on, unchecked; run.sh names those that need no --sbatch
#   (as launch_torchrun_auto.sh except CONFIG NPROC NODE... ARGUMENT... --script -m)
#
set -euo pipefail
# shellcheck source=scripts/lib/launcher.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/lib/launcher.bash"
source "$KIT/scripts/lib/place.bash"


take_config() { # <argument...>
  CONFIG=${1-}
  [[ ! ${2-} =~ ^[1-9][0-9]*$ || $# != 2 ]] ||
    die_usage "$2: expected SECTION.KEY=VALUE; the number of processes is the option -n: $PROGRAM -n $2 $CONFIG"
  [[ ${2-} != -- ]] || set -- "$1" "${@:3}"
  SCRIPT_ARGS=("${@:2}")
}


main() {
  drop_inherited_variables
  accept_unlisted_options
  parse_options_before take_config "$@"
  [[ $CONFIG ]] || die_usage "CONFIG: missing; name a settings file, such as config/quickstart.yaml"
  [[ ! $SCRIPT$MODULE ]] || die_usage "--script and -m: this program runs train.py; call run.sh for another script"
  run_at_place
}

main "$@"
