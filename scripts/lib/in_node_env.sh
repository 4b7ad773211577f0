#!/usr/bin/env bash
#
# Run a command in the environment that ranks will have on this node.
#
# Usage: in_node_env.sh NODE_ENV COMMAND [WORD...]
#
#   NODE_ENV   shell script that is sourced before, as node.sh does it
#
set -euo pipefail

NODE_ENV=$1
shift

set +eu # it is not ours
# shellcheck disable=SC1090
source "$NODE_ENV" </dev/null >&2
set -eu
exec "$@"
