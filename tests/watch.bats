#!/usr/bin/env bats
#
# scripts/lib/watch.bash, where no launch would show it: what is told of a node's end arrives whole.

bats_require_minimum_version 1.5.0

# shellcheck source=scripts/lib/watch.bash
source "$BATS_TEST_DIRNAME/../scripts/lib/watch.bash"


tell() { # <what happened>
  echo "$@" >>told
}


# As a try begins, with a client for each node; what is said to the nodes goes nowhere.
setup() {
  cd "$BATS_TEST_TMPDIR" || return
  # shellcheck disable=SC2034 # for wait_for_nodes
  DEADLINE='' ORDER=''
  STATUS=0 RUN=$PWD
  declare -gA CLIENT=() SWITCH=() DEAD=()
  open_events
  true 3>&- &
  CONSOLES=($!)
  : >told
}


give_client() { # <node>
  sleep 1000 3>&- &
  local switch
  CLIENT[$1]=$!
  exec {switch}>/dev/null
  SWITCH[$1]=$switch
}


teardown() {
  kill -KILL "${CLIENT[@]}" 2>/dev/null || true
}


@test "the word of a node's end may come in pieces, with time between them" {
  give_client node1
  give_client node2
  local clients=("${CLIENT[@]}")
  { printf 'no' && sleep 0.7 && printf 'de1 ' && sleep 0.7 && printf '75\nnode2 0\n'; } >&"$EVENTS" 3>&- &
  wait_for_nodes
  kill -KILL "${clients[@]}"
  [ ! -s told ]
  [ "$STATUS" -eq 75 ]
}


@test "a client that was killed has said nothing, and is not waited for" {
  give_client node1
  local client=${CLIENT[node1]}
  kill -KILL "$client"
  wait_for_nodes
  [ "$(<told)" = "node1: process $client, through which we speak to it, was killed" ]
  [ "$STATUS" -eq 137 ]
  [ ${#DEAD[@]} -eq 0 ] # else the next try's client would have no time for its word
}
