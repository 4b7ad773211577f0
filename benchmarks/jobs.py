"""Measure the time per job of a list of many short jobs, and compare it with GNU parallel over the same connections.

This runs 1,000 jobs of `true` on three servers with 8 slots each, alternately as a job list and by `parallel --sshlogin
8/SERVER,...`. Both use Muster's ssh configuration, in which all sessions with a server share one connection
(ControlMaster). Times include the whole command. The servers share their files, so nothing is copied. With --copied,
each server has its own files, and each job writes a file, which Muster and parallel (by --return) copy back.
Needs root and GNU parallel.

    python -m benchmarks.jobs [--jobs 1000] [--pairs 3] [--copied]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.laboratory import KIT, nodes
from benchmarks.pairs import ratio_of
from distributed.jobs.lists.config import Server
from distributed.jobs.servers.sockets import write_ssh_config

RUN = KIT / "scripts/jobs/run_distributed_training.py"
SLOTS = 8  # of each server
WARM_UP = 24  # jobs of the first round, which is not measured
SCRIPT = """#!/bin/sh
echo result >"${MUSTER_OUTPUT_DIR:-.}/result-$2"
"""


def by_list(names: list[str], script: Path, jobs: int, round_number: int) -> float:
    """Run a job list; return its seconds."""
    files = script.parent / f"list{round_number}"
    files.mkdir()
    servers = [{"host": name, "gpus": 0, "slots_per_gpu": SLOTS, "workdir": str(script.parent)} for name in names]
    cluster = {"servers": servers, "script_path": script.name}
    (files / "cluster.json").write_text(json.dumps(cluster))
    (files / "jobs.json").write_text(json.dumps([{"n": number, "prefix": files.name} for number in range(jobs)]))
    command = [sys.executable, str(RUN), "--cluster-config", f"{files}/cluster.json"]
    command += ["--jobs-config", f"{files}/jobs.json", "--log-file", f"{files}/results.json"]
    start = time.monotonic()
    run(command, script.parent)
    seconds = time.monotonic() - start
    done = json.loads((files / "results.json").read_text())["totals"]["done"]
    if done != jobs:
        sys.exit(f"job list: {done} of {jobs} jobs are done")
    return seconds


def by_parallel(names: list[str], script: Path, copied: bool, jobs: int, round_number: int) -> float:
    """Run GNU parallel; return its seconds."""
    files = script.parent / f"parallel{round_number}"
    files.mkdir(0o700)
    write_ssh_config(files / "ssh", Server(host="any"))
    command = ["parallel", "--will-cite", "--ssh", f"ssh -F {files}/ssh", "--workdir", str(script.parent)]
    command += ["--sshlogin", ",".join(f"{SLOTS}/{name}" for name in names), "--joblog", f"{files}/joblog"]
    command += ["--return", "result-{}"] if copied else []
    start = time.monotonic()
    # Open the shared connections first: simultaneous calls would each open their own.
    for connection in [subprocess.Popen(["ssh", "-F", f"{files}/ssh", name, "true"]) for name in names]:
        connection.wait()
    run([*command, str(script), "--n", "{}", ":::", *map(str, range(jobs))], script.parent)
    seconds = time.monotonic() - start
    codes = [line.split("\t")[6] for line in (files / "joblog").read_text().splitlines()[1:]]
    if codes != ["0"] * jobs:
        sys.exit(f"GNU parallel: {codes.count('0')} of {jobs} jobs are done")
    return seconds


def run(command: list[str], directory: Path) -> None:
    subprocess.run(command, cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@contextmanager
def servers(copied: bool) -> Iterator[tuple[list[str], Path]]:
    """Start three servers; yield their names, and the script of the jobs in their working directory."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "job")
        script.write_text(SCRIPT if copied else "#!/bin/true\n")
        script.chmod(0o755)
        private = ["--private", str(script.parent)] if copied else []
        with nodes(3, *private, prefix="jbench") as (names, directory):
            for server in names if copied else ():
                shutil.copy(script, directory / f"lab/{server}/private{script}")
            yield names, script


def main() -> int:
    """Print milliseconds per job and the ratio, for each pair of runs."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--copied", action="store_true", help="the servers share no files")
    arguments = options.parse_args()
    if not shutil.which("parallel"):
        sys.exit("no program 'parallel': apt-get install parallel")
    pairs: list[tuple[float, float]] = []
    with servers(arguments.copied) as (names, script):
        job_list = partial(by_list, names, script)
        parallel = partial(by_parallel, names, script, arguments.copied)
        for round_number in range(arguments.pairs + 1):
            jobs = arguments.jobs if round_number else WARM_UP
            sides = [job_list, parallel] if round_number % 2 else [parallel, job_list]
            seconds = {side: side(jobs, round_number) for side in sides}
            if round_number:
                pairs.append((seconds[job_list], seconds[parallel]))
                list_ms, parallel_ms = (1000 * side / jobs for side in pairs[-1])
                ratio = list_ms / parallel_ms
                print(
                    f"job list {list_ms:6.1f} ms per job, parallel {parallel_ms:6.1f} ms, ratio {ratio:.2f}", flush=True
                )
    print(f"{arguments.jobs} jobs: {ratio_of(*zip(*pairs, strict=True))} (target: at most 1.0)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
