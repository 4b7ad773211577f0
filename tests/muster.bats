#!/usr/bin/env bats
#
# scripts/muster: the opening comment of each program names its verb. muster passes arguments, standard input and
# environment unchanged to the program.

bats_require_minimum_version 1.5.0


setup() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  MUSTER=$KIT/scripts/muster
  cd "$BATS_TEST_TMPDIR" || return
}


# Make a copy of Muster with one more program, which has the verb `show`. Sets MUSTER.
copy_with_program() { # <suffix of the program> <its text on standard input>
  mkdir "my kit"
  cp -r "$KIT/scripts" "my kit"
  cat >"my kit/scripts/jobs/do_show.$1"
  chmod +x "my kit/scripts/jobs/do_show.$1"
  MUSTER=$PWD/muster
  ln -s "my kit/scripts/muster" "$MUSTER"
}


@test "help lists each verb with the first sentence of its program" {
  run -0 --separate-stderr "$MUSTER" help
  [ "$(sed -n 's/^  \([a-z-]*\)  *[A-Z].*/\1/p' <<<"$output" | xargs)" = \
    "run train jobs two-phase ls status logs attach report stop rerun doctor test" ]
  if grep -E '.{81}' <<<"$output"; then return 1; fi
  [[ "$output" == *$'\n  stop      Stop a run, and check that none of its processes remains on any node\n'* ]]
  [[ "$output" == *$'\n  jobs      Run a list of training jobs\n'* ]]
  [ "$("$MUSTER" --help)" = "$output" ]
  [ "$("$MUSTER" help help)" = "$output" ]
  run -2 --separate-stderr "$MUSTER"
  [ -z "$output" ]
  [[ "$stderr" == *"  stop  "* ]]
}


@test "help VERB prints the help of the program" {
  local verb
  for verb in $("$MUSTER" --complete '' | grep -vx help) ssh pdsh node submit; do
    run -0 "$MUSTER" help "$verb"
    [[ "$output" == *[Uu]"sage: "*"--help "* ]]
  done
  run -0 "$MUSTER" help node
  [ "${lines[0]}" = "$("$KIT/scripts/ssh/launch_torchrun_multinode.sh" --help | head -n 1)" ]
  [[ "$output" == *"Usage: muster node [options] "* ]]
}


@test "an unknown verb is refused with the verb that is most like it" {
  run -2 --separate-stderr "$MUSTER" rnu
  [ "$stderr" = "muster: VERB 'rnu': unknown; did you mean run?"$'\n'"Try: muster --help" ]
  run -2 "$MUSTER" help rnu
  run -2 --separate-stderr "$MUSTER" ztop -la
  [[ "$stderr" == *"did you mean stop?"* ]]
  run -2 --separate-stderr "$MUSTER" x
  [ "$stderr" = "muster: VERB 'x': unknown"$'\n'"Try: muster --help" ]
}


@test "each message of a job list names what was typed, and the word that is most like a misspelled one" {
  run -2 "$MUSTER" jobs --jobs-confg a.json
  [ "${lines[0]}" = "muster jobs: unrecognized arguments: --jobs-confg a.json; did you mean --jobs-config?" ]
  [ "${lines[1]}" = "Try: muster jobs --help" ]
  run -2 "$MUSTER" two-phase cach list
  [ "${lines[0]}" = "muster two-phase: cach: unknown command; did you mean cache?" ]
  run -2 "$MUSTER" jobs why
  [[ "$output" == "muster jobs: "*$'\n'"Try: muster jobs --help" ]]
  run -0 "$MUSTER" jobs --help
  [[ "$output" == *"usage: muster jobs --cluster-config "* && "$output" != *run_distributed* ]]
  run -0 "$MUSTER" two-phase --help
  [[ "$output" == *"All options of muster jobs are accepted"* && "$output" != *.py* ]]
  printf 'import sys; sys.exit(1)' >fail.py
  printf '[{"prefix": "a"}]' >jobs.json
  run -1 "$MUSTER" jobs --backend local --script fail.py --jobs-config jobs.json --retries 0
  [[ "$output" == *" muster jobs why "* ]]
  run python3 "$KIT/scripts/jobs/run_distributed_training.py" nosuch
  [[ "$output" == "run_distributed_training.py: nosuch: "* ]]
}


@test "a program gets its arguments, standard input and environment, and muster returns its exit code" {
  local entry
  copy_with_program sh <<'END'
#!/bin/sh
#
# Show the call. All of it.
#
# Usage: do_show.sh
#        muster show ...
printf '<%s>\n' "$@" && cat && tr '\0' '\n' </proc/self/environ
exit 7
END
  run -7 --separate-stderr env KIT=mine TMOUT=9 'BASH_FUNC_read%%=() {  echo replaced; }' \
    "$MUSTER" show 'a b' '' -- --x <<<"typed"
  [ "${lines[*]:0:5}" = "<a b> <> <--> <--x> typed" ]
  [ -z "$stderr" ]
  for entry in KIT=mine TMOUT=9; do
    grep -qxF -- "$entry" <<<"$output"
  done
  run -0 "$MUSTER" help
  [[ "$output" != *" show "* ]] # its call is not one of those that a user needs
}


@test "a program that another user owns is not started, by muster or for the form with CONFIG and NPROC" {
  ((!EUID)) || skip "only root can act as another user"
  copy_with_program sh <<<'echo ran as root'
  chown 12345 "my kit/scripts/jobs/do_show.sh" "my kit/scripts/ssh/launch_singlenode.sh"
  printf '#\n#\n# Show. All.\n#\n# Usage: x\n#        muster show ...\necho ran\n' >"my kit/scripts/jobs/do_show.sh"
  run -69 "$MUSTER" show
  [[ "$output" == *"do_show.sh: belongs to "*"(user id 12345)"* ]]
  run -69 "$PWD/my kit/scripts/run.sh" --dry-run c.yaml 2
  [[ "$output" == *"launch_singlenode.sh: belongs to "*"(user id 12345)"* ]]
}


@test "a program in Python runs with the Python of the active environment" {
  copy_with_program py <<'END'
#!/usr/bin/env python3
"""Show the Python. Usage: muster show ..."""
import os, sys
print(sys.prefix, os.environ.pop("MUSTER_VERB"))
END
  python3 -m venv --without-pip mine
  VIRTUAL_ENV=$PWD/mine run -0 "$MUSTER" show
  [ "$output" = "$PWD/mine show" ]
}


@test "a message names another program by its verb if muster is on the PATH, else by its path" {
  VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  local call="import sys; sys.path.insert(0, '$KIT'); from distributed.files import command_of; print(command_of('stop'))"
  run -0 env PATH="$KIT/scripts:$PATH" "$VIRTUAL_ENV/bin/python" -c "$call"
  [ "$output" = "['muster', 'stop']" ]
  mkdir bin && ln -s "$KIT/scripts/muster" bin
  run -0 env PATH="$PWD/bin:$PATH" "$VIRTUAL_ENV/bin/python" -c "$call"
  [ "$output" = "['muster', 'stop']" ]
  printf '#!/bin/sh\n' >other && chmod +x other && mv -f other bin/muster
  run -0 env PATH="$PWD/bin:$PATH" "$VIRTUAL_ENV/bin/python" -c "$call"
  [ "$output" = "['$KIT/scripts/stop.sh']" ]
}


@test "every program prints the version of Muster, and does nothing else" {
  local program
  shopt -s nullglob
  mkdir empty && cd empty
  for program in "$KIT"/scripts/{,jobs/,slurm/,ssh/}*.{sh,py} "$MUSTER" "$KIT/train.py"; do
    [[ $program != *.py ]] || set -- python
    run -0 --separate-stderr "$@" "$program" --version
    [ "$output" = "Muster $(<"$KIT/VERSION")" ]
    [ -z "$stderr" ]
    shift $#
  done
  [ -z "$(ls -A)" ]
}
