#!/usr/bin/env bats
#
# muster run and muster train on one machine: what follows the script belongs to it, options of torchrun mean what they
# mean there or are refused with what to write instead, and messages name what the user has typed.

bats_require_minimum_version 1.5.0
# shellcheck source=tests/lab/without_torch.bash
source "$BATS_TEST_DIRNAME/lab/without_torch.bash"


setup_file() {
  KIT=$(readlink -f "$BATS_TEST_DIRNAME/..")
  export KIT VIRTUAL_ENV=${VIRTUAL_ENV:-$KIT/.venv}
  use_agent_without_torch
}


setup() {
  MUSTER=$KIT/scripts/muster
  cd "$BATS_TEST_TMPDIR" || return
  write_plain_script <<'END'
assert "MUSTER_VERB" not in os.environ
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
END
}


refused() { # <message, may be a pattern> <argument...>
  run -2 --separate-stderr "$MUSTER" "${@:2}"
  # shellcheck disable=SC2053 # the message is a pattern
  [[ "${stderr_lines[-2]}" == "muster $2: "$1 ]] || { echo "$stderr" && return 1; }
  [ "${stderr_lines[-1]}" = "Try: muster $2 --help" ]
  [ ! -e logs ]
}


# bats test_tags=quick
@test "muster run passes what follows the script to it, and starts one process without GPUs" {
  run -0 --separate-stderr "$MUSTER" run "my script.py" --lr 0.1 -n 3 -- --help ''
  [ "$output" = "rank 0 of 1 ['--lr', '0.1', '-n', '3', '--', '--help', '']" ]
  grep -qx "muster run: 1 process, because no GPU is visible; -n N starts more" <<<"$stderr"
  [[ "$stderr" == *"muster run: run my-script-"*": 1 process on "* ]]
  run -0 --separate-stderr "$MUSTER" run -n 2 -- "my script.py" -- -x
  [ "$output" = "rank 0 of 2 ['-x']" ]
  [[ "$stderr" != *"-n N starts more"* ]]
}


@test "the number of processes is one per GPU that the ranks may see (with a stub of nvidia-smi)" {
  ((!EUID)) || skip "only root can mount stubs of the driver's files"
  run -0 --separate-stderr "$BATS_TEST_DIRNAME/lab/with_gpus.sh" 2 "$MUSTER" run --dry-run "my script.py"
  [[ "$output$stderr" == *"--nproc-per-node 2"* ]]
}


@test "a module runs with -m, and what follows it belongs to it" {
  mv "my script.py" my_module.py
  run -0 --separate-stderr "$MUSTER" run -n 2 -m my_module --config x.yaml 2
  [ "$output" = "rank 0 of 2 ['--config', 'x.yaml', '2']" ]
}


# bats test_tags=quick
@test "a command line of torchrun starts the same ranks" {
  local call
  for call in "--nproc_per_node=2 --standalone" "--standalone --nproc-per-node 2 --nnodes=1:1 --node_rank 0" \
    "--nproc-per-node=2 --rdzv_backend=c10d --rdzv-endpoint=localhost:0 --rdzv_id=7 --nnodes=1" \
    "--nproc-per-node 2 --master_addr localhost --master_port 29471 --max_restarts=0 --tee 3 -r 3"; do
    # shellcheck disable=SC2086 # several arguments
    run -0 --separate-stderr "$MUSTER" run $call "my script.py" --a_b c
    [ "$output" = "rank 0 of 2 ['--a_b', 'c']" ]
  done
  [[ "$stderr" == *"muster run: --tee: the output of all ranks is in the run directory; "* ]]
}


@test "command lines of torchrun from the READMEs of eleven public repositories start the same ranks" {
  local line
  mkdir -p scripts tools vla-scripts torchtitan configs
  # Each rank writes what it got.
  cat >train.py <<'END'
import json, os, sys
with open(f"got-{os.environ['RANK']}", "w") as file:
    json.dump([os.environ["WORLD_SIZE"], os.path.relpath(sys.argv[0]), sys.argv[1:]], file)
END
  for line in train_gpt.py tools/train.py vla-scripts/finetune.py scripts/base_train.py torchtitan/train.py \
    example_chat_completion.py legacy_train.py ubx_bench.py; do
    cp train.py "$line"
  done
  # nanoGPT, nanochat, modded-nanogpt, DiT, RT-DETR (two), llama, OpenVLA, stanford_alpaca, timm, torchtitan, NCCL's ubx
  cat >lines <<'END'
--standalone --nproc_per_node=2 train.py config/train_gpt2.py
--standalone --nproc_per_node=2 -m scripts.base_train -- --depth=12 --run="d12" --model-tag="d12"
--standalone --nproc_per_node=2 train_gpt.py
--nnodes=1 --nproc_per_node=2 train.py --model DiT-XL/2 --data-path /path/to/imagenet/train
--nproc_per_node=2 --master-port=8989 tools/train.py -c path/to/config -r path/to/checkpoint --test-only
--nproc_per_node 1 example_chat_completion.py --ckpt_dir llama-2-7b-chat/ --max_seq_len 512 --max_batch_size 6
--standalone --nnodes 1 --nproc-per-node 2 vla-scripts/finetune.py --vla_path "openvla/openvla-7b" --lora_rank 32
--nproc_per_node=2 --master_port=29471 train.py --bf16 True --fsdp "full_shard auto_wrap" --tf32 True
--nproc_per_node=2 legacy_train.py /data --model resnet50 -b 32 -j 4 --amp
--nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint="localhost:0" --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --job.config_file ./debug_model.toml
--nproc-per-node=2 -m ubx_bench all_reduce -b 1K -e 128M -f 2 --backend ubx,nccl -n 5 -w 2
END
  "$WITH_TORCH/bin/python" - >expected <<'END'
import json, shlex
from torch.distributed.run import parse_args
for line in open("lines"):
    call = parse_args(shlex.split(line))
    name = call.training_script.replace(".", "/") + ".py" if call.module else call.training_script
    print(json.dumps([call.nproc_per_node, name, call.training_script_args]))
END
  while IFS= read -r line; do
    rm -f got-*
    eval "run -0 \"\$MUSTER\" run $line"
    [ "$(sort -u got-*)" = "$(head -n 1 expected)" ] || { cat got-* && head -n 1 expected && return 1; }
    sed -i 1d expected
  done <lines
}


@test "options of torchrun for several machines are refused with the call that starts them" {
  refused "--nnodes 2: this call starts one machine; to name the nodes: --on NODE,NODE...; *: muster node" \
    run --nnodes 2 "my script.py"
  refused "--rdzv-endpoint host:29500: this call starts one machine; *" run --rdzv_endpoint=host:29500 "my script.py"
  refused "--node-rank 1: this call starts one machine; *" run --node-rank 1 "my script.py"
  refused "--no-python: ranks run Python; *" run --no-python "my script.py"
  refused "--shutdown-timeout: leave it out; --grace SECONDS *" run --shutdown-timeout 9 "my script.py"
}


@test "options that the place does not have are refused by name" {
  refused "--sync: only for nodes over SSH; name them with --on or --hostfile" run --sync "my script.py"
  refused "--spares: there is only one machine; *" run --spares n1 --max-restarts 1 "my script.py"
  refused "--time: only for a job of --slurm" run --time 2-0 "my script.py"
  refused "--lease: not in a job of --slurm; leave it out" run --slurm 2 -n 1 --lease 5 "my script.py"
  refused "--slurm and --on: give one of the two" run --slurm 2 --on n1 "my script.py"
  refused "--on and --hostfile: both name the nodes; *" run --on n1 --hostfile h "my script.py"
  refused "-n N: missing; with --slurm, *" run --slurm 2 "my script.py"
}


@test "a call without a script, with an unknown option or a missing file is refused in the words of the call" {
  refused "SCRIPT: missing; name your script, or a module with -m" run
  refused "SCRIPT: missing; name your script, or a module with -m" run -n 2 --
  refused "--max-restart: unknown option; did you mean --max-restarts[?]" run --max-restart 1 "my script.py"
  refused "script 'none.py': no such file (in *" run none.py
  refused "-n: expected a number of processes from 1 to *" run -n 0 "my script.py"
  refused "CONFIG: missing; *" train
  refused "2: expected SECTION.KEY=VALUE; the number of processes is the option -n: muster train -n 2 a.yaml" \
    train a.yaml 2
}


@test "the form with CONFIG and NPROC runs as before" {
  refused "CONFIG 'none.yaml': no such file *" run none.yaml 2
  run -0 --separate-stderr "$MUSTER" run --script "my script.py" - 2 -- --lr 1
  [ "$output" = "rank 0 of 2 ['--lr', '1']" ]
  echo 'a: 1' >my.yaml
  run -0 --separate-stderr "$MUSTER" run --script "my script.py" my.yaml 1
  [ "$output" = "rank 0 of 1 ['--config', 'my.yaml']" ]
}


@test "muster train runs train.py with the settings file, and changes settings" {
  cat >tiny.yaml <<'END'
model: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16}
train: {steps: 2, batch_size: 4, evaluate_windows: 3}
logging: {every: 1, sample: 0}
checkpoint: {dir: null}
END
  run -0 --separate-stderr with_torch "$MUSTER" train -n 2 tiny.yaml train.steps=3
  [[ "$output" == *$'\nstep'*3/3* ]]
  run -2 with_torch "$MUSTER" train -n 2 tiny.yaml train.stps=3
  [[ "$output" == *"train.stps: unknown key; did you mean train.steps?"* ]]
}


# bats test_tags=quick
@test "each help fits a terminal with 80 columns and 45 lines; --help-all has every option of the launchers" {
  local verb option all
  for verb in run train; do
    run -0 "$MUSTER" "$verb" --help
    ((${#lines[@]} <= 45))
    [ -z "$(awk 'length > 80' <<<"$output")" ]
    [[ "${lines[1]}" == "Usage: muster $verb [options] "* ]]
    [[ "$output" != *"More options"* && "$output" == *"--help-all"* ]]
    all=$("$MUSTER" "$verb" --help-all)
    [ "$(grep -oE "^  --?[a-z-]+" <<<"$all" | sort | uniq -d | grep -cvx "  --help")" = 0 ]
    for option in $("$KIT/scripts/ssh/launch_torchrun_auto.sh" --help | grep -oE '^  --[a-z-]+'); do
      [[ $option == --script || "$all" == *$'\n'"  $option"* ]]
    done
  done
  for verb in ls status logs attach stop rerun report doctor test; do
    run -0 "$MUSTER" "$verb" --help
    ((${#lines[@]} <= 45))
    [ -z "$(awk 'length > 80' <<<"$output")" ]
    [[ "$output" == *$'\n'"Usage: muster $verb [options]"*$'\n'"    muster $verb"* ]]
  done
}


@test "muster rerun repeats the call from any directory, with options changed, and names values that are missing" {
  local work=$PWD
  mkdir "my old" && cd "my old"
  run -0 "$MUSTER" run -n 2 --env TOKEN=s3cret "$work/my script.py" --env TOKEN=own -- 'a b'
  cd /
  run -2 "$MUSTER" rerun "$work/my old/logs/latest"
  [[ "$output" == *": this value is not recorded; give: --env TOKEN=..."* ]]
  run -0 --separate-stderr "$MUSTER" rerun "$work/my old/logs/latest" -n 1 --env TOKEN=new
  [ "$output" = "rank 0 of 1 ['--env', 'TOKEN=own', '--', 'a b']" ]
  run -0 "$MUSTER" rerun --dry-run --log-dir "$work/my old/logs" latest --nproc-per-node=3 --env TOKEN=new
  # shellcheck disable=SC1003
  program=$("$VIRTUAL_ENV/bin/python" -c 'import shlex, sys; print(shlex.quote(sys.argv[1]))' "$KIT/scripts/run.sh")
  [ "$output" = "cd '$work/my old' && $program --nproc-per-node=3 --env TOKEN=new '$work/my script.py' --env TOKEN=own -- 'a b'" ]
  cd "$work/my old"
  run -0 --separate-stderr bash -c "${output/ --nproc-per-node=3/}"
  [ "$output" = "rank 0 of 1 ['--env', 'TOKEN=own', '--', 'a b']" ]
  refused_rerun "RUN: missing; for the newest run use: muster rerun latest"
  refused_rerun "'-- x': expected options of the launcher; arguments of the script cannot be changed" latest -- x
  refused_rerun "'4': expected options of the launcher; *" latest 4
  rm -r "$work/my old/logs/latest"/run.json
  refused_rerun "RUN 'latest': no such run*" latest
}


refused_rerun() { # <message, may be a pattern> <argument...>
  run -2 --separate-stderr "$MUSTER" rerun "${@:2}"
  # shellcheck disable=SC2053 # the message is a pattern
  [[ "${stderr_lines[-2]}" == "muster rerun: "$1 ]] || { echo "$stderr" && return 1; }
}


@test "muster rerun repeats calls of the earlier form, and of train, and prints what differs" {
  run -0 "$KIT/scripts/ssh/launch_singlenode.sh" --script "my script.py" - 2 -- --x -- y
  run -0 --separate-stderr "$MUSTER" rerun latest
  [ "$output" = "rank 0 of 2 ['--x', '--', 'y']" ]
  run -0 "$MUSTER" run --script "my script.py" - 1
  run -0 --separate-stderr "$MUSTER" rerun latest --max-restarts=1
  [ "$output" = "rank 0 of 1 []" ]
  sed -i 's/"muster": ".*"/"muster": "0.0"/' logs/latest/run.json
  earlier=$(readlink -f logs/latest)
  run -0 --separate-stderr "$MUSTER" rerun latest
  [[ "$stderr" == *": since ${earlier##*/}: packages: muster $(<"$KIT/VERSION"), was 0.0"* ]]
  run -0 "$MUSTER" train --dry-run -n 1 "$KIT/config/quickstart.yaml" train.steps=1
}
