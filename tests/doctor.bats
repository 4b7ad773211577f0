#!/usr/bin/env bats
#
# doctor.sh end to end: from any directory, with any Python or none, on a terminal and in a pipe.

setup() {
  DOCTOR=$BATS_TEST_DIRNAME/../scripts/doctor.sh
  PROJECT="$BATS_TEST_TMPDIR/my project"
  STUBS=$BATS_TEST_TMPDIR/stubs
  mkdir -p "$PROJECT" "$STUBS"
  cd "$PROJECT" || return
  unset VIRTUAL_ENV CUDA_VISIBLE_DEVICES
  bats_require_minimum_version 1.5.0
}


stub() { # <name> <text on standard input>
  cat > "$STUBS/$1"
  chmod +x "$STUBS/$1"
}


@test "a wrong argument is named, and the exit code is 2" {
  run -2 "$DOCTOR" 'node[1-'
  [[ $output == *"its brackets do not match"* ]]
  run -2 "$DOCTOR" --exclude node1
  [[ $output == *"--exclude 'node1': requires NODE... or --hostfile"* ]]
  run -2 "$DOCTOR" --python
  [[ $output == *"--python needs a value"* ]]
  run -2 "$DOCTOR" --python /no/python
  [[ $output == *"no Python at '/no/python'"* ]]
  run -2 "$DOCTOR" --master-port 70000
  [[ $output == *"--master-port: expected a port from 1 to 65535, got '70000'"* ]]
}


@test "doctor.sh works through a symlink and in a directory with blanks, and ends with the number of faults" {
  ln -s "$DOCTOR" "$STUBS/link"
  run "$STUBS/link"
  local line faults=0
  for line in "${lines[@]}"; do
    [[ $line =~ ^(ok|warning|fault)\ |^\ {9}|:\ [0-9]+\ faults? ]]
    [[ $line != fault* ]] || faults=$((faults + 1))
  done
  [[ ${lines[-1]} =~ fit\ for\ training:\ $faults\ fault ]]
  ((status == (faults > 0)))
  [[ $output == *"disk "*"working directory"* ]]
}


@test "the Python of .venv in the working directory is used" {
  python3 -m venv --without-pip .venv
  run -1 "$DOCTOR"
  [[ $output == *"python "*": $PROJECT/.venv/bin/python"* ]]
  [[ $output == *"fault    torch"*"PyTorch is not installed"*"$ '$PROJECT/.venv/bin/python' -m pip install -r "* ]]
}


@test "a missing Python and one that is too old are faults with a fix" {
  stub python <<'STUB'
#!/bin/sh
# Stub: an old Python.
echo Python 3.8.10
STUB
  mkdir .venv
  ln -s "$STUBS" .venv/bin
  run -1 "$DOCTOR"
  [[ $output == "fault    python"*"Python 3.8.10, older than 3.10"*"install Python 3.10 or newer"*"1 fault"* ]]
  VIRTUAL_ENV=/gone run -1 "$DOCTOR"
  [[ $output == "fault    python"*"no Python at '/gone/bin/python'"*"1 fault"* ]]
}


@test "--json prints the facts" {
  "$DOCTOR" --json --log-dir runs > facts.json
  run -0 python3 -c 'import json; facts = json.load(open("facts.json")); print(facts["directory"], facts["disks"][1]["path"])'
  [[ $output == "$PROJECT $PROJECT/runs" ]]
}


@test "for a GPU in use, its processes and the idle GPUs are printed" {
  stub nvidia-smi <<STUB
#!/bin/sh
# Stub: prints what nvidia-smi prints with --format=csv,noheader,nounits.
case \$* in
  *query-gpu*)
    echo "0, GPU-aa, 580.65.06, 81920, 81000, Disabled, Default, Disabled, NVIDIA A100-SXM4-80GB"
    echo "1, GPU-bb, 580.65.06, 81920, 4, Disabled, Default, Disabled, NVIDIA A100-SXM4-80GB" ;;
  *query-compute-apps*) echo "GPU-aa, $$, 80000, python" ;;
esac
STUB
  PATH=$STUBS:$PATH run -1 "$DOCTOR"
  [[ $output == *"GPUs "*"2 x NVIDIA A100-SXM4-80GB, 80.0 GiB, driver 580.65.06"* ]]
  [[ $output == *"fault    GPU use"*"GPU 0: 79.1 GiB of 80.0 GiB used by python of $(id -un) (pid $$)"* ]]
  [[ $output == *"$ export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1"* ]]
}


@test "output has colours and fits on a terminal, and is plain in a pipe or with NO_COLOR" {
  local shell=(env TERM=xterm COLUMNS=60 script -qec)
  python3 -m venv --without-pip .venv # a Python without PyTorch is a fault, and saves the time of its import
  "${shell[@]}" "'$DOCTOR'" /dev/null > seen || true
  grep -q $'\e\[' seen
  local line
  while read -r line; do
    ((${#line} <= 60)) || [[ $line == *'$ '* || $line == */*/* ]]  # only commands and paths may be longer
  done < <(sed -E $'s/\e\\[[0-9;]*m//g; s/\r//' seen)
  NO_COLOR=1 "${shell[@]}" "'$DOCTOR'" /dev/null > seen || true
  run -1 grep $'\e\[' seen
  "$DOCTOR" > seen || true
  run -1 grep $'\e\[' seen
}
