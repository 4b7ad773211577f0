# shellcheck shell=bash
#
# Run job lists over SSH and on SLURM, and read their results. For bats files; sourced after nodes.bash, never run.
#
# A test sets DISPATCH (the dispatcher's command) and STARTED (a file in which each job records its start: "begin NAME
# NODE PID CUDA_VISIBLE_DEVICES").
# shellcheck disable=SC2153,SC2154 # the tests set DISPATCH and STARTED


job_list() { # write jobs.json from JSON objects on standard input, one per line; each gets the variable STARTED
  sed -e "s#^{#{\"_env\": {\"STARTED\": \"$STARTED\"}, #" -e '1s/^/[/' -e '$!s/$/,/' -e '$s/$/]/' >jobs.json
}


list() { # <subcommand> [argument...]
  "${DISPATCH[@]}" "$@" 3>&-
}


# Verify all published base models, on this machine and on these nodes.
all_valid() { # [node...]
  local node program='import sys; sys.path.insert(0, sys.argv[1]); from distributed.training import base_model as base
for path in (f"{base.CACHE}/{name}" for name in base.names_in(base.CACHE)): base.verify(path)'
  run -0 "${DISPATCH[0]}" -c "$program" "$KIT"
  for node; do
    run -0 on "$node" env --chdir "$WORK" "${DISPATCH[0]}" -c "$program" "$KIT"
  done
}


# A Python expression can use r (results.json), job (its jobs by name), last (their last attempts), started (the lines
# of STARTED, each split) and began (the names of started jobs).
holds() { # <Python expression>: succeeds if it is true
  evaluate holds "$1"
}


values() { # <Python expression of several values>: print them
  evaluate values "$1"
}


evaluate() { # <holds or values> <Python expression>
  "$VIRTUAL_ENV/bin/python" -I - "$STARTED" "$@" <<'END'
import json, sys
r = json.load(open("results.json"))
job = {each["settings"].get("name"): each for each in r["jobs"]}
last = {name: each["attempts"][-1] for name, each in job.items() if each["attempts"]}
started = [line.split() for line in open(sys.argv[1])]
began = [words[1] for words in started if words[0] == "begin"]
value = eval(sys.argv[3])
if sys.argv[2] == "values":
    print(*value)
elif not value:
    print(json.dumps(r, indent=1), *map(" ".join, started), f"does not hold: {sys.argv[3]}", sep="\n")
    sys.exit(1)
END
}


eventually() { # <command...>: repeat it until it succeeds, for 90 s at most
  local end=$((SECONDS + 90))
  until "$@" >"$BATS_TEST_TMPDIR/eventually" 2>&1; do
    if ((SECONDS >= end)); then
      echo "not within 90 s: $*" && cat "$BATS_TEST_TMPDIR/eventually"
      tail -n 50 out 2>/dev/null
      [ -z "${SLURM_CONF-}" ] || squeue --array
      return 1
    fi
    sleep 0.1
  done
}


wait_until_started() { # <name>: wait until the job has started
  wait_for_line "$STARTED" "begin $1 "
}


node_of_job() { # <name>: the node of its newest attempt
  awk -v name="$1" '$1 == "begin" && $2 == name { node = $3 } END { print node }' "$STARTED"
}


# No process of any attempt of this test remains.
no_process_left() {
  ! grep -qszF -e "STARTED=$STARTED" /proc/[0-9]*/environ
}
