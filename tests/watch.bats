#!/usr/bin/env bats
#
# scripts/lib/watch.bash, where no launch would show it: what is told of a node's end arrives whole.

bats_require_minimum_version 1.5.0

# shellcheck source=scripts/lib/watch.bash
source "$BATS_TEST_DIRNAME/../scripts/lib/watch.bash"


ended() { # <node> <status>
  echo "$1 ended with $2"
  unset "CLIENT[$1]"
}


@test "the word of a node's end may come in pieces, with time between them" {
  # shellcheck disable=SC2034 # for whom we call
  DEADLINE=''
  open_events
  # shellcheck disable=SC2034
  declare -gA CLIENT=([node1]=$$ [node2]=$$) DEAD=()
  { printf 'no' && sleep 0.7 && printf 'de1 ' && sleep 0.7 && printf '75\nnode2 0\n'; } >&"$EVENTS" 3>&- &
  run -0 wait_for_nodes
  [ "$output" = "node1 ended with 75
node2 ended with 0" ]
}


@test "a client that was killed has said nothing, and is not waited for" {
  # shellcheck disable=SC2034
  DEADLINE=''
  open_events
  sleep 1000 3>&- &
  # shellcheck disable=SC2034
  declare -gA CLIENT=([node1]=$!) DEAD=()
  tell() {
    echo "$@"
  }
  kill -KILL "${CLIENT[node1]}"
  run -0 wait_for_nodes
  [ "$output" = "node1: process ${CLIENT[node1]}, through which we speak to it, was killed
node1 ended with 137" ]
}
