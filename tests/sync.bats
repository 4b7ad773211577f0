#!/usr/bin/env bats
#
# Nodes that share no directory with the launcher: --sync copies the working directory to them and the run directory
# back, even if the run fails, so that the verdict has the first failure.

# bats file_tags=laboratory
bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/nodes.bash
source "$BATS_TEST_DIRNAME/lab/nodes.bash"


setup_file() {
  export APART=$BATS_FILE_TMPDIR/apart LAUNCH=$BATS_TEST_DIRNAME/../scripts/ssh/launch_torchrun_auto.sh
  export LOGS=$BATS_TEST_DIRNAME/../scripts/logs.sh
  mkdir "$APART"
  start_lab 2 --private "$APART"
  # The login shell prints Welcome before Muster's commands, which contain rsync or bash, but not before the tests' own.
  echo 'case $BASH_EXECUTION_STRING in *rsync* | *bash*) echo Welcome ;; esac' >"$BATS_FILE_TMPDIR/bashrc"
  cat "$BATS_FILE_TMPDIR/bashrc" >"$MUSTER_LAB/bashrc"
  use_agent_without_torch
}


setup() {
  WORK="$APART/my 'work' $BATS_TEST_NUMBER"
  enter_workdir
}


teardown() {
  cat "$BATS_FILE_TMPDIR/bashrc" >"$MUSTER_LAB/bashrc"
  sweep_runs
}


@test "the files that git would commit are copied, sparse files stay sparse, and the run directory is copied back" {
  write_script <<'END'
dist.barrier()
open(os.path.join(os.environ["MUSTER_RUN_DIR"], f"of rank {rank}"), "w").write(open("da ta/it").read())
END
  mkdir "da ta"
  echo sample >"da ta/it"
  truncate -s 100M sparse
  git init -q
  printf '%s\n' '*.secret' '!not.secret' >.gitignore
  touch a.secret not.secret forced.secret $'#\na'
  git add -f forced.secret
  export GIT_DIR=/nowhere
  run "$LAUNCH" --script "my script.py" - 1 "$N1" "$N2"
  [ "$status" -eq 69 ]
  [[ "$output" == *"working directory not found ("*"or launch with --sync"* ]]
  with_torch run "$LAUNCH" --sync --script "my script.py" - 1 "$N1" "$N2"
  [ "$status" -eq 0 ]
  [[ "$output" == *"--sync: copying $WORK to $N2"* ]]
  [ "$(cat "logs/latest/of rank 0" "logs/latest/of rank 1")" = $'sample\nsample' ]
  [ "$(cat logs/latest/node_*.exit)" = $'0\n0' ]
  run lab ssh "$N2" ls -A "$WORK"
  [ "$output" = "$(env -C "$WORK" ls -A --ignore=.git --ignore=a.secret)" ]
  [ "$(lab ssh "$N2" du -k "$WORK/sparse" | cut -f 1)" -lt 1000 ]
  run ! compgen -G "$WORK/.muster-*"
}


@test "the log of a node is copied back during the run, and is identical to the node's own at the end" {
  write_plain_script <<'END'
print("one line")
while not os.path.exists(f"go on {rank}"):
    time.sleep(0.05)
print("another line")
if rank == 1:
    time.sleep(300)
raise SystemExit(3)
END
  start out "$LAUNCH" --sync --script "my script.py" - 1 "$N1" "$N2"
  wait_for_log "$N2" "one line"
  lab ssh "$N2" touch "$WORK/go on 1"
  wait_for_log "$N2" "another line"
  lab ssh "$N1" touch "$WORK/go on 0"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 3 ]
  for node in "$N1" "$N2"; do
    cmp "logs/latest/node_$node.log" <(lab ssh "$node" cat "$(readlink -f logs/latest)/newest/node_$node.log")
  done
  run ! pgrep -f "$WORK.*tail -c"
}


@test "logs.sh reads and follows the log of a node that does not share the run directory, and names one it cannot reach" {
  write_plain_script <<'END'
print("begun on", rank)
while not os.path.exists(f"go on {rank}"):
    time.sleep(0.05)
print("ended on", rank)
END
  lab ssh "$N2" mkdir -p "$WORK"
  lab ssh "$N2" tee "$WORK/my script.py" <"my script.py" >/dev/null
  start out "$LAUNCH" --script "my script.py" - 1 "$N2"
  timeout 60 bash -c 'until [[ $("$LOGS" --rank 0 2>/dev/null) == "begun on 0" ]]; do sleep 0.5; done'
  [ ! -s "logs/latest/node_$N2.log" ]
  run -0 "$LOGS" --rank all -n 1
  [ "$output" = "[$N2:0] begun on 0" ]
  "$LOGS" -f --rank 0 >followed 3>&- &
  follower=$!
  lab ssh "$N2" touch "$WORK/go on 0"
  wait_for_exit "$LAUNCHER"
  [ "$status" -eq 0 ]
  wait "$follower"
  [ "$(cat followed)" = $'begun on 0\nended on 0' ]
  rm -f logs/latest/newest/"node_$N2.log" # the copy on this machine
  lab cut "$N2"
  run -69 "$LOGS" --node "$N2"
  lab heal "$N2"
  [[ "$output" == *"$N2: its log cannot be read: "* ]]
}


wait_for_log() { # <node> <text>
  timeout 60 bash -c 'until grep -qF -- "$2" "logs/latest/node_$1.log" 2>/dev/null; do sleep 0.1; done' bash "$@"
}


@test "doctor.sh and test_distributed.sh work without shared files" {
  run "$KIT/scripts/doctor.sh" --sync "$N1" "$N2"
  [[ "$output" == *"--sync: copying $WORK to $N2"* ]]
  [[ "$output" != *"working directory not found"* ]]
  run --separate-stderr with_torch "$KIT/scripts/test_distributed.sh" --sync --quiet --max-bytes 4K --seconds 0.1 1 "$N1" "$N2"
  [ "$status" -eq 0 ]
  [[ "${lines[-1]}" == "verdict: ok, 2 ranks"* ]]
  run -2 "$KIT/scripts/doctor.sh" --sync
  [[ "$output" == *"--sync: requires NODE... or --hostfile"* ]]
}


@test "with pdsh, the exception of a rank is reported, also after a restart, and files of both attempts are copied" {
  write_script <<'END'
run, node = os.environ["MUSTER_RUN_DIR"], os.environ["MUSTER_NODE"]
if rank == 0:
    print('{"step": 1}', file=open(os.environ["MUSTER_METRICS"], "a"))
end = time.monotonic() + 60
while not os.path.exists(f"{run}/newest/node_{node}.samples.jsonl") and time.monotonic() < end:
    time.sleep(0.1)
dist.barrier()
if rank == 1:
    raise ValueError(f"boom {len(os.listdir(os.environ['MUSTER_RUN_DIR'] + '/errors'))}")
time.sleep(300)
END
  with_torch run "${LAUNCH/torchrun_auto/pdsh_multinode}" --sync --max-restarts 1 --script "my script.py" - 1 "$N1" "$N2"
  [ "$status" -eq 1 ]
  [ "$(grep -c "verdict: failed: rank 1 on $N2 raised ValueError: boom 0" <<<"$output")" -eq 2 ]
  [ -e logs/latest/attempts/1/errors/rank_1.json ]
  grep -q boom logs/latest/node_"$N2".log
  [ "$(cat logs/latest/metrics.jsonl)" = $'{"step": 1}\n{"step": 1}' ]
  compgen -G "logs/latest/attempts/1/node_$N2.samples.jsonl" && compgen -G "logs/latest/newest/node_$N2.samples.jsonl"
  grep -q 'attempt 2' logs/latest/report.html
}


@test "a node with another program in place of tar changes no file of the launching side, and speaks only for itself" {
  local programs=$BATS_FILE_TMPDIR/programs
  mkdir "$programs" crafted crafted/errors
  echo keep >precious
  (
    cd crafted
    echo '{"python": "/bin/false", "directory": "/", "launcher": {}, "layout": []}' >run.json
    ln -s "$WORK/precious" launcher.log
    ln -s "$WORK/precious" verdict.json
    ln -s "$WORK/precious" metrics.jsonl
    mkfifo hang.json pipe
    echo 7 >"node_$N1.exit"
    echo 0 >"node_$N2.exit"
    echo '{"rank": 0, "node": "x", "exit_code": 7, "exception": "Forged", "message": "forged"}' >errors/rank_0.json
    cp errors/rank_0.json "errors/node_$N1.json"
    install -m 6777 /dev/null "of $N2"
    tar -cf "$programs/archive" .
  )
  printf '#!/bin/sh\nexec cat "%s"\n' "$programs/archive" >"$programs/tar"
  chmod +x "$programs/tar"
  echo "[[ \$(uname -n) != $N2 ]] || PATH='$programs':\$PATH" >>"$MUSTER_LAB/bashrc"
  write_plain_script <<<''
  run "$LAUNCH" --sync --script "my script.py" - 1 "$N1" "$N2"
  [ "$status" -eq 0 ]
  [[ "$output" == *"$N2: not copied back, as links, special files, files of git or TensorBoard, or files that exist here: "*.json,* ]]
  [[ "$output" != *Forged* && "$output" != *Traceback* ]]
  [ "$(cat precious)" = keep ]
  [ "$(cat logs/latest/node_*.exit)" = $'0\n0' ]
  [ "$(stat -c %a "logs/latest/of $N2")" = 600 ]
  [ -z "$(find logs/latest/ -type p -o -type l ! -lname 'newest/*' ! -lname 'attempts/1')" ]
  run grep -c '"/bin/false"' logs/latest/run.json
  [ "$output" = 0 ]
}


@test "a rank that dies of a signal, or exits with 255 as ssh does, is not taken for a lost node" {
  local end code
  for end in "os.kill(os.getpid(), 11) 139" "os._exit(255) 255"; do
    code=${end##* }
    write_plain_script <<<"${end% *} if rank else time.sleep(300)"
    run "$LAUNCH" --sync --script "my script.py" - 1 "$N1" "$N2"
    [ "$status" -eq "$code" ] || { echo "$output" && false; }
    [[ "$output" == *"verdict: failed: rank 1 on $N2 "* ]]
    run ! grep "connection to its supervisor lost" logs/latest/launcher.log
  done
}


@test "with --lease 0, a run that failed after its launcher was killed is restarted by a launcher that attaches to it" {
  VIRTUAL_ENV=$WITH_TORCH
  local node call=("$LAUNCH" --sync --lease 0 --max-restarts 1 --script "my script.py" - 1 "$N1" "$N2")
  write_script <<'END'
dist.barrier()
print("at work", flush=True)
while not os.path.exists("go on"):
    time.sleep(0.1)
sys.exit(3 if rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
END
  start out "${call[@]}"
  wait_for_line out "at work"
  kill -KILL -- "-$LAUNCHER"
  wait "$LAUNCHER" || true
  for node in "$N1" "$N2"; do
    lab ssh "$node" touch "$PWD/go on"
  done
  no_processes_within 20
  [ ! -e "logs/latest/node_$N2.exit" ]
  run -0 "$KIT/scripts/attach.sh"
  [[ "$output" == *"verdict: failed: rank 1 on $N2 exited with code 3"*"restart 1 of 1"*"verdict: ok"* ]]
  [[ "$output" != *copying* ]]
  [ "$(cat "logs/latest/attempts/1/node_$N2.exit" "logs/latest/node_$N2.exit")" = $'3\n0' ]
}


@test "--detach copies the directories only once" {
  write_endless_plain_script
  run -0 "$LAUNCH" --sync --detach --script "my script.py" - 1 "$N1" "$N2"
  [[ "$output" == *"--sync: copying $PWD to $N2"* ]]
  wait_for_line logs/latest/console.log "at work"
  run ! grep copying logs/latest/console.log
  run -0 "$KIT/scripts/stop.sh" latest
}


@test "a node without the Python of the launching side is reported by preflight and doctor.sh, with the remedy" {
  local venv=$BATS_FILE_TMPDIR/venv found="Python cannot be started ($BATS_FILE_TMPDIR/venv/bin/python: No such file or directory);"
  found+=" install it there, or choose another: --python PATH"
  mkdir -p "$venv/bin"
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$(readlink -f "$KIT/.venv")/bin/python" >"$venv/bin/python"
  chmod +x "$venv/bin/python"
  on "$N2" mount -t tmpfs tmpfs "$venv"
  echo 'print(1)' >a.py
  run -69 "$LAUNCH" --sync --python "$venv/bin/python" --script a.py - 1 "$N1" "$N2"
  [[ "$output" == *"preflight: $N2: $found"* ]]
  run -69 "$KIT/scripts/doctor.sh" --python "$venv/bin/python" "$N1" "$N2"
  [[ "$output" == *"fault  "*"$found"* ]]
  [[ "$output" != *"line "* ]]
  on "$N2" umount "$venv"
}


@test "a shared directory is not copied" {
  cd "$BATS_TEST_TMPDIR"
  echo 'print("ran")' >plain.py
  run "$LAUNCH" --sync --script plain.py - 1 "$N1"
  [ "$status" -eq 0 ]
  [[ "$output" != *copying* ]]
}


@test "new files that are on a node only are named at the end, and --fetch copies those that match" {
  write_plain_script <<'END'
os.makedirs(f"out put/{rank}", exist_ok=True)
for name in ("one.npy", "two.txt"):
    open(f"out put/{rank}/{name}", "w").write(str(rank))
if rank == 0:
    open("first.npy", "w").write("0")
open("data", "a").write("changed there")
os.symlink("/etc/passwd", f"link{rank}.npy")
END
  echo here >data
  git init -q .
  run -0 "$LAUNCH" --sync --script "my script.py" - 1 "$N1" "$N2"
  [[ "$output" == *"$N1: 4 new or changed files in $WORK on this node only: data, first.npy, out put/0/one.npy, ...; --fetch PATTERN copies "* ]]
  [[ "$output" == *"$N2: 3 new or changed files in $WORK on this node only: data, out put/1/one.npy, "* ]]
  [ ! -e "out put" ]
  sed -i '/symlink/d' "my script.py"
  run -0 "$LAUNCH" --sync --fetch '*.npy' --fetch "out put/1/" --script "my script.py" - 1 "$N1" "$N2"
  [[ "$output" == *"$N1: copied 2 files from it: first.npy, out put/0/one.npy"* ]]
  [[ "$output" == *"$N1: 2 new or changed files in $WORK on this node only: data, out put/0/two.txt; "* ]]
  [[ "$output" == *"$N2: copied 2 files from it: out put/1/one.npy, out put/1/two.txt"* ]]
  [ "$(cat data first.npy "out put"/*/*)" = $'here\n0011' ]
  [[ "$output" == *"$N2: 1 new or changed file in $WORK on this node only: data; "* ]]
  [ "$(find . -name '.muster-*')" = "" ]
  # Files that --sync copies are the user's, and stay. Files that git ignores are results.
  run -0 "$LAUNCH" --sync --fetch data --script "my script.py" - 1 "$N1"
  [[ "$output" == *"$N1: "*" new or changed file"*" on this node only: data"* && "$(<data)" = here ]]
  echo data >.gitignore
  run -0 "$LAUNCH" --sync --fetch data --script "my script.py" - 1 "$N1"
  [[ "$output" == *"$N1: copied 1 file from it: data"* ]]
  grep -q "changed there" data
  run -2 "$LAUNCH" --fetch out --script "my script.py" - 1 "$N1" "$N2"
  [[ "$output" == *"--fetch: nodes share the working directory unless --sync copies it; add --sync"* ]]
}


@test "a directory of another user on a node is refused, and no file is copied there" {
  echo 'print("ran")' >plain.py
  lab ssh "$N2" mkdir "$WORK"
  lab ssh "$N2" chown 65534 "$WORK"
  run -69 "$LAUNCH" --sync --script plain.py - 1 "$N1" "$N2"
  [[ "$output" == *"$WORK: belongs to another user"*"--sync: $WORK could not be copied to $N2; see the messages above"* ]]
  run ! lab ssh "$N2" test -e "$WORK/plain.py"
  [ ! -e logs ]
}


@test "a link of another user below the working directory on a node is refused, and no file is copied there" {
  mkdir -p data/batch2 usual/new
  mkdir -m 750 usual/private
  touch usual/new/file usual/private/file
  echo 'print("ran")' >plain.py
  echo new >data/batch2/settings
  lab ssh "$N2" mkdir -p "$WORK/data" "$APART/home/of user"
  lab ssh "$N2" chmod 1777 "$WORK/data"
  lab ssh "$N2" ln -s "$APART/home/of user" "$WORK/data/batch2"
  run -0 "$LAUNCH" --sync --script plain.py - 1 "$N2" # a link of one's own is followed
  [ "$(lab ssh "$N2" stat -c %a "$WORK/usual" "$WORK/usual/new" "$WORK/usual/private" | xargs)" = "755 755 750" ]
  lab ssh "$N2" rm "$APART/home/of user/settings"
  lab ssh "$N2" chown -h 65534 "$WORK/data/batch2"
  lab ssh "$N2" chmod 1777 "$WORK/data"
  run -69 "$LAUNCH" --sync --script plain.py - 1 "$N2"
  [[ "$output" == *"$WORK/data/batch2: belongs to user id 65534, who made it in $WORK/data, where all users can "* ]]
  [[ "$output" == *"--sync: $WORK could not be copied to $N2; see the messages above"* ]]
  run ! lab ssh "$N2" test -e "$APART/home/of user/settings"
}


@test "a program that another user has planted on a node does not run" {
  echo 'print("ran")' >plain.py
  mkdir -p .venv/bin
  printf '#!/bin/sh\nexec "%s/bin/python" "$@"\n' "$VIRTUAL_ENV" >.venv/bin/python
  chmod +x .venv/bin/python
  printf '#!/bin/sh\ntouch "%s/proof"\n' "$BATS_TEST_TMPDIR" >"$BATS_TEST_TMPDIR/planted"
  lab ssh "$N2" mkdir -p "$WORK/.venv/bin"
  lab ssh "$N2" install -m 755 "$BATS_TEST_TMPDIR/planted" "$WORK/.venv/bin/python"
  lab ssh "$N2" chown -R 65534 "$WORK"
  lab ssh "$N2" chmod 1777 "$APART"
  local reason="$WORK: belongs to user id 65534, who made it in $APART, where all users can create files"
  run -69 "$LAUNCH" --python "$WORK/.venv/bin/python" --script plain.py - 1 "$N2"
  [[ "$output" == *"preflight: $N2: $reason; it is not used"* ]]
  run -69 "$LAUNCH" --no-preflight --python "$WORK/.venv/bin/python" --script plain.py - 1 "$N2"
  [[ "$output" == *"$reason"* ]]
  run -69 "$BATS_TEST_DIRNAME/../scripts/ssh/launch_pdsh_multinode.sh" --no-preflight --python "$WORK/.venv/bin/python" \
    --script plain.py - 1 "$N2"
  [[ "$output" == *"$reason"* ]]
  run -69 "$BATS_TEST_DIRNAME/../scripts/doctor.sh" --python "$WORK/.venv/bin/python" "$N2"
  [[ "$output" == *"$reason"* ]]
  [ ! -e "$BATS_TEST_TMPDIR/proof" ]
  lab ssh "$N2" chmod 755 "$APART"
}


@test "a checkout whose files git cannot list is refused, unless the nodes share it" {
  echo 'print("ran")' >plain.py
  mkdir .git
  run "$LAUNCH" --sync --script plain.py - 1 "$N1" "$N2"
  [ "$status" -eq 69 ]
  [[ "$output" == *"--sync: $WORK/.git: fatal: not a git repository "*"repair or remove it: "* ]]
  [ ! -e logs ]
  run ! lab ssh "$N1" test -e "$WORK/plain.py"
  cd "$BATS_TEST_TMPDIR"
  mkdir .git
  echo 'print("ran")' >plain.py
  run -0 "$LAUNCH" --sync --script plain.py - 1 "$N1"
}


@test "a node on which the working directory cannot be created, or a missing rsync, is reported, and nothing starts" {
  lab ssh "$N2" touch "$APART/in the way"
  mkdir -p "$APART/in the way/work"
  cd "$APART/in the way/work"
  echo 'print("ran")' >plain.py
  run "$LAUNCH" --sync --script plain.py - 1 "$N1" "$N2"
  [ "$status" -eq 69 ]
  [[ "$output" == *"--sync: $PWD could not be copied to $N2; see the messages above"* ]]
  run -69 unshare --mount -- bash -c 'mount --bind /dev/null "$(type -P rsync)" && exec "$@"' bash \
    "$LAUNCH" --sync --script plain.py - 1 "$N1"
  [[ "$output" == *"--sync: rsync: not found on this machine; install it"* ]]
  [ ! -e logs ]
}


@test "the verdict names a file that a node lacks because git ignores it" {
  git init -q .
  echo data >.gitignore
  mkdir data
  echo 1 >data/x.txt
  sleep 1.5 # a file that is younger than the difference between two clocks may have been written after the failure
  echo 'import os; open("data/x.txt") if os.environ["RANK"] == "1" else None' >reads.py
  run -1 timeout 100 "$LAUNCH" --sync --script reads.py - 1 "$N1" "$N2" </dev/null
  echo "$output"
  [[ "$output" == *"rank 1 on $N2 raised FileNotFoundError: "* ]]
  [[ "$output" == *"'data/x.txt' exists on $(uname -n); git ignores it, so --sync does not copy it; copy it to $N2, or share"* ]]
}
