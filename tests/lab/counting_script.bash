# shellcheck shell=bash
#
# A script that records how launchers number their restarts, for bats files. Sourced, never run.


# Write "my script.py", a script with the arguments FAILURES and RANKS (the number of ranks). Each rank appends the run
# id, the number of restarts and the maximum number of restarts to seen.<rank>, and waits until all ranks have done so.
# The first FAILURES attempts then fail.
write_counting_script() {
  cat >"my script.py" <<'END'
import os, sys, time
run, count, maximum = (os.environ[f"TORCHELASTIC_{name}"] for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS"))
with open(f"seen.{os.environ['RANK']}", "a") as file:
    print(run, count, maximum, file=file)
def attempts(rank):
    return len(open(f"seen.{rank}").readlines()) if os.path.exists(f"seen.{rank}") else 0
failures, ranks = map(int, sys.argv[1:])
attempt = attempts(os.environ["RANK"])
while min(map(attempts, range(ranks))) < attempt:
    time.sleep(0.05)
if attempt <= failures:
    sys.exit(3)
END
}


# Check that all ranks have seen these attempts with the same run id, and remove the files seen.<rank>. Each attempt is
# one argument: "RESTARTS MAXIMUM". The run id is the name of the newest run directory, unless RUN_ID is set.
all_ranks_saw() { # <number of ranks> <attempt...>
  local rank expected
  expected=$(printf "${RUN_ID:-$(basename "$(readlink -f logs/latest)")} %s\n" "${@:2}")
  for ((rank = 0; rank < $1; rank++)); do
    [ "$(<"seen.$rank")" = "$expected" ] || { head seen.* && return 1; }
  done
  rm seen.*
}
