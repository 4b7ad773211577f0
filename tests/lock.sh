#!/usr/bin/env bash
#
# Make the lock files again: requirements.lock for the quickstart, requirements-test.lock for the tests.
#
# Usage: tests/lock.sh [OPTION of `uv pip compile`...]
#
# Call it after a change of a requirements file. Versions that still fit remain; --upgrade replaces them by the newest
# ones. PyTorch and CUDA's libraries are left out: which of its builds a machine needs is not known here. All other
# packages that PyTorch needs are included. uv is installed in a temporary directory.
set -euo pipefail
# shellcheck source=scripts/lib/common.bash
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../scripts/lib/common.bash"


make_lock() { # <lock file> <uv's arguments...>
  local made=$DIRECTORY/$1
  [[ ! -e $1 ]] || cp -- "$1" "$made"
  run "$DIRECTORY/bin/uv" pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header \
    --no-annotate --output-file "$made" "${@:2}"
  {
    echo "# Made by tests/lock.sh: packages, with the SHA-256 of each of their files, for pip --require-hashes."
    awk '/^[^ ]/ { left_out = /^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ } !left_out' "$made"
  } >"$1.new"
  mv -- "$1.new" "$1"
}


main() {
  cd -- "$KIT"
  DIRECTORY=$(mktemp -d)
  trap 'rm -rf -- "$DIRECTORY"' EXIT
  run python3 -m venv "$DIRECTORY"
  run "$DIRECTORY/bin/python" -m pip install --quiet uv
  make_lock requirements.lock requirements.txt "$@"
  make_lock requirements-test.lock --constraint requirements.lock requirements-test.txt requirements-trackers.txt "$@"
}


main "$@"
