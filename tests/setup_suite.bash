# shellcheck shell=bash
#
# bats calls setup_suite before the tests of all files.
#
# Sourced by bats.


# The index of runs is not that of the user, see distributed/index.py.
setup_suite() {
  export XDG_STATE_HOME=$BATS_SUITE_TMPDIR/state
}
