"""Submit a batch job on nodes that sinfo lists, and follow it: the program behind scripts/slurm/submit.sh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from distributed.exit_codes import INTERRUPTED, TERMINATED, TIMED_OUT, UNFIT, WRONG_CALL
from distributed.files import KIT, command_of
from distributed.trust import make_own_directory, regular_file, user_name, writable_by_others

BATCH_SCRIPT = Path(KIT, "scripts/slurm/slurm_train.sh")
SINFO = ("sinfo", "--noheader", "--format=%P|%D|%c|%G|%l")  # partition, nodes, cores, GPUs, time limit
INTERVAL = 2.0  # seconds between two queries of the job
REMEDY = "sinfo lists partitions and limits, sacctmgr show associations user=$USER your accounts and qos"
ACTIVE_STATES = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD")
# The exit code for each final state of a job, if SLURM reports 0 as the job's exit code.
CODES = {"COMPLETED": 0, "TIMEOUT": TIMED_OUT, "NODE_FAIL": UNFIT, "CANCELLED": TERMINATED}
TEMPLATE = """\
#!/usr/bin/env bash
{options}
# SLURM starts one process per task. PyTorch reads these variables.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={nproc}
code=0
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' - \\
  {command} || code=$?
[[ $code != 75 ]] || scontrol requeue "$SLURM_JOB_ID" # stopped with a checkpoint, such as before the time limit
exit "$code"\
"""


class SubmitError(Exception):
    """The job cannot be submitted or followed. The message states problem and remedy."""


def choose_nodes(sinfo: str, nproc: int, nnodes: int, given: Sequence[str]) -> list[str]:
    """Return options of sbatch that choose nodes, preferably of the default partition.

    sinfo: the output of SINFO. given: options of the user; options with the same names are not returned. Raises
    SubmitError if no nodes fit.
    """
    names = {option.partition("=")[0] for option in given}
    own_gpus = any(name.startswith(("--gres", "--gpus")) for name in names)
    need = 0 if own_gpus or not re.search(r"\bgpu(:[^:,(|]+)?:[1-9]", sinfo) else nproc  # GPUs on each node
    lines = re.findall(r"^([^|\n]*)\|(\d+)\|(\d+\+?)\|([^|\n]*)\|([^|\n]*)$", sinfo, re.MULTILINE)
    for line in sorted(lines, key=lambda line: not line[0].endswith("*")):
        partition, number, cores_of_node, gres, limit = line
        kinds = re.findall(r"\b(gpu(?::[^:,(]+)?):(\d+)", gres)
        kind, gpus = next((one for one in kinds if int(one[1]) >= need), ("gpu", "0"))
        cores = int(cores_of_node.rstrip("+"))  # 48+: at least 48
        if int(number) >= nnodes and cores >= nproc and int(gpus) >= need:
            break
    else:
        remedy = "request fewer, or another partition" + (", or give --gres=none to train without GPUs" if need else "")
        listed = " ".join("|".join(line[:-1]) for line in lines) or "none"
        raise SubmitError(f"NPROC {nproc}, NNODES {nnodes}: not among the nodes that sinfo lists ({listed}); {remedy}")
    options = {
        "--nodes": nnodes,
        "--ntasks-per-node": nproc,
        "--partition": "" if partition.endswith("*") else partition,
        "--gres": f"{kind}:{nproc}" if need else "none",
        "--cpus-per-task": cores // (int(gpus) if need else nproc),
        # A partition's limit without days is shorter than one day, the --time of BATCH_SCRIPT, and replaces it.
        "--time": limit if re.fullmatch("[0-9:]+", limit) else "",
    }
    return [f"{name}={value}" for name, value in options.items() if value and name not in names]


def template(options: Sequence[str], nproc: str, command: Sequence[str]) -> str:
    """Return a batch script with these options, and the #SBATCH lines of BATCH_SCRIPT that they do not replace."""
    defaults = re.findall(r"^#SBATCH (\S+)", BATCH_SCRIPT.read_text(), re.MULTILINE)
    by_name = {option.partition("=")[0]: f"#SBATCH {shlex.quote(option)}" for option in [*defaults, *options]}
    return TEMPLATE.format(options="\n".join(by_name.values()), nproc=nproc, command=shlex.join(command))


def follow(job: str, outputs: Sequence[str], program: str) -> int:
    """Print the state of a job, and its output and errors, until it has ended; return its exit code."""
    shown, streams, offsets = "", (sys.stdout.buffer, sys.stderr.buffer), [0, 0]
    while True:
        done = subprocess.run(["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True)
        if "Invalid job id" in done.stderr:
            raise SubmitError(f"job {job}: not known to SLURM any more; see {outputs[1]}")
        # The first occurrence counts: SubmitLine, a later field, may contain any text.
        facts = dict(reversed(re.findall(r"(\w+)=(\S+)", done.stdout)))
        state, reason = facts.get("JobState", ""), facts.get("Reason", "None")
        for number, (path, stream) in enumerate(zip(outputs, streams, strict=True)):
            offsets[number] += print_rest(path, offsets[number], stream)
        text = f"{state} ({reason})" if state == "PENDING" and reason != "None" else state or "state unknown"
        if text != shown:
            problem = "" if state else f": scontrol failed, retrying every {INTERVAL:.0f} s: {done.stderr.strip()}"
            sys.stderr.write(f"{program}: job {job}: {text}{problem}\n")
            shown = text
        if state and state not in ACTIVE_STATES:
            code, signal = map(int, facts["ExitCode"].split(":"))
            return code or CODES.get(state, 128 + signal if signal else 1)
        time.sleep(INTERVAL)


def print_rest(path: str, offset: int, stream: IO[bytes]) -> int:
    """Print a file of the job from an offset; return the number of bytes. Raises SubmitError if it must not be read."""
    try:
        descriptor = regular_file(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SubmitError(f"{path}: {error.strerror}; the job continues") from None
    with open(descriptor, "rb") as file:
        if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
            raise SubmitError(f"{path}: belongs to {user_name(owner)}; the job continues")
        file.seek(offset)
        count = stream.write(file.read())
        stream.flush()
    return count


def make_log_directory(log_dir: str) -> None:
    """Make the directory of the output. Raises SubmitError if others could make links there: SLURM follows links."""
    try:
        make_own_directory(log_dir, os.getcwd())
        problem = "other users can create files there, and lead the output of the job to other files"
        problem = f"{log_dir}: {problem}" if writable_by_others(log_dir, os.stat(log_dir)) else ""
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    if problem:
        raise SubmitError(f"{problem}; choose another directory with --log-dir")


def submit(command: Sequence[str], log_dir: str, program: str, following: bool, own: Sequence[str] = ()) -> int:
    """Call sbatch, and print how to watch the job. own: options of the user that change the output or number of jobs.

    Returns the exit code of the job if it is followed, or 130 after Ctrl-C; otherwise 0.
    """
    make_log_directory(log_dir)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SubmitError(f"refused by SLURM, see its message above; {REMEDY}")
    job = done.stdout.strip().partition(";")[0]  # sbatch may print "17;cluster"
    if not job:  # --test-only
        return 0
    outputs = [f"{log_dir}/slurm-{job}.out", f"{log_dir}/slurm-{job}.err"]
    run = [job] if log_dir == "logs" else ["--log-dir", log_dir, job]
    status, stop = (shlex.join([*command_of(verb), *run]) for verb in ("status", "stop"))
    output = f"options: {shlex.join(own)}" if own else f"output: {shlex.join(outputs)}"
    print(f"job: {job}\n{output}\nstatus: {status}", flush=True)
    try:
        return follow(job, outputs, program) if following else 0
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: job {job} continues; to stop it: {stop}\n")
        return INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    program, log_dir, mode, nproc, nnodes, *rest = arguments
    sbatch_options, command, passed = (
        [one.removeprefix(name) for one in rest if one.startswith(name)]
        for name in ("--sbatch=", "--command=", "--argument=")
    )
    sinfo = [*SINFO, *(option for option in sbatch_options if option.startswith("--partition="))]
    try:
        listed = subprocess.run(sinfo, stdout=subprocess.PIPE, text=True)
        if listed.returncode:
            raise SubmitError("sinfo failed, see its message above; call this on a login node of a running cluster")
        options = choose_nodes(listed.stdout, int(nproc), int(nnodes), sbatch_options)
        options += [f"--output={log_dir}/slurm-%j.out", f"--error={log_dir}/slurm-%j.err", *sbatch_options]
        own = [one for one in sbatch_options if one.startswith(("--array", "--output", "--error", "-a", "-o", "-e"))]
        if own and mode == "follow":
            raise SubmitError(f"--follow: cannot follow a job with {shlex.join(own)}; leave one of them out")
        call = ["sbatch", "--parsable", *options, str(BATCH_SCRIPT), *passed]
        if mode in ("submit", "follow"):
            os.umask(0o022 | os.umask(0o022))  # of the job and its output files
            return submit(call, log_dir, program, mode == "follow", own)
        print(template(options, nproc, command) if mode == "template" else shlex.join(call))
        return 0
    except KeyboardInterrupt:  # while sinfo or sbatch waits for a reply
        return INTERRUPTED
    except SubmitError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return WRONG_CALL
