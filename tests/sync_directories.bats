#!/usr/bin/env bats
#
# The directories that --sync copies. Without nodes: sync_directory is a stub that prints its argument.

bats_require_minimum_version 1.5.0


@test "--sync copies the working directory and Muster, also if one contains the other or both are the same" {
  # shellcheck source=scripts/lib/common.bash
  source "$BATS_TEST_DIRNAME/../scripts/lib/common.bash"
  # shellcheck source=scripts/lib/sync.bash
  source "$KIT/scripts/lib/sync.bash"
  sync_directory() {
    echo "$1"
  }
  cd "$KIT"
  [ "$(sync_nodes)" = "$KIT" ]
  for directory in "$KIT/config" "${KIT%/*}" "$BATS_TEST_TMPDIR"; do
    cd "$directory"
    [ "$(sync_nodes)" = "$directory"$'\n'"$KIT" ]
  done
}
