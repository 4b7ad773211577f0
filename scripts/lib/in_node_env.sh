#!/usr/bin/env bash
#
# Run a command in the environment that ranks will have on this node.
#
# Usage: in_node_env.sh NODE_ENV COMMAND [WORD...]
#
#   NODE_ENV   shell script that is sourced before, as node.sh does it; what it leaves in the background ends
#              with the command
#
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/common.bash"


end_background() {
  # shellcheck disable=SC2046,SC2119 # a word each, and all of them
  kill $(left_in_background) 2>/dev/null || true
}


source_node_env "$1" end_background </dev/null >&2
shift
[[ $(jobs -pr) ]] || exec "$@"
trap end_background EXIT
"$@"
