"""How long does a job list take for each of many short jobs, against GNU parallel over the same ssh connections?

1,000 jobs of `true` on three servers of 8 slots each, in turns: a job list, and `parallel --sshlogin 8/SERVER,...`.
Both use the ssh configuration of the kit, in which all sessions with a server share one connection (ControlMaster).
Time is taken from the command to its end. The servers share their files, so neither copies any; with --copied each
server has its own, each job writes a file, and both bring it back: the job list by itself, parallel by --return.
Needs root, and GNU parallel.

    python -m benchmarks.jobs [--jobs 1000] [--pairs 3] [--copied]
"""

from __future__ import annotations

import argparse
import json
import os
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
from distributed.jobs.config import Server
from distributed.jobs.servers import write_ssh_config

RUN = KIT / "scripts/jobs/run_distributed_training.py"
SLOTS = 8  # of each server
WARM_UP = 24  # jobs of the turn that does not count
SCRIPT = """#!/bin/sh
echo result >"${MUSTER_OUTPUT_DIR:-.}/result-$2"
"""


def by_list(names: list[str], script: Path, jobs: int, turn: int) -> float:
    """Seconds of a job list."""
    files = script.parent / f"list{turn}"
    files.mkdir()
    servers = [{"host": name, "gpus": 0, "slots_per_gpu": SLOTS, "workdir": str(script.parent)} for name in names]
    cluster = {"servers": servers, "script_path": script.name}
    (files / "cluster.json").write_text(json.dumps(cluster))
    (files / "jobs.json").write_text(json.dumps([{"n": number, "prefix": files.name} for number in range(jobs)]))
    words = [sys.executable, str(RUN), "--cluster-config", f"{files}/cluster.json"]
    words += ["--jobs-config", f"{files}/jobs.json", "--log-file", f"{files}/results.json"]
    begun = time.monotonic()
    run(words, script.parent)
    taken = time.monotonic() - begun
    done = json.loads((files / "results.json").read_text())["totals"]["done"]
    if done != jobs:
        sys.exit(f"job list: {done} of {jobs} jobs are done")
    return taken


def by_parallel(names: list[str], script: Path, copied: bool, jobs: int, turn: int) -> float:
    """Seconds of GNU parallel."""
    files = script.parent / f"parallel{turn}"
    write_ssh_config(files / "ssh", Server(host="any"))
    words = ["parallel", "--will-cite", "--ssh", f"ssh -F {files}/ssh", "--workdir", str(script.parent)]
    words += ["--sshlogin", ",".join(f"{SLOTS}/{name}" for name in names), "--joblog", f"{files}/joblog"]
    words += ["--return", "result-{}"] if copied else []
    begun = time.monotonic()
    # Of calls that come at once, only the first would make the connection that they are to share.
    for connection in [subprocess.Popen(["ssh", "-F", f"{files}/ssh", name, "true"]) for name in names]:
        connection.wait()
    run([*words, str(script), "--n", "{}", ":::", *map(str, range(jobs))], script.parent)
    taken = time.monotonic() - begun
    codes = [line.split("\t")[6] for line in (files / "joblog").read_text().splitlines()[1:]]
    if codes != ["0"] * jobs:
        sys.exit(f"GNU parallel: {codes.count('0')} of {jobs} jobs are done")
    return taken


def run(words: list[str], directory: Path) -> None:
    subprocess.run(words, cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@contextmanager
def servers(copied: bool) -> Iterator[tuple[list[str], Path]]:
    """The names of three servers, and what the jobs run there, in their working directory."""
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "job")
        script.write_text(SCRIPT if copied else "#!/bin/true\n")
        script.chmod(0o755)
        sockets = Path(f"/tmp/tmux-{os.getuid()}")  # each server has a tmux of its own
        sockets.mkdir(mode=0o700, exist_ok=True)
        own = [sockets, *([script.parent] if copied else [])]
        with nodes(3, *(word for path in own for word in ("--private", str(path))), prefix="jbench") as (names, folder):
            for server in names:
                (folder / f"lab/{server}/private{sockets}").chmod(0o700)
                if copied:
                    shutil.copy(script, folder / f"lab/{server}/private{script}")
            yield names, script


def main() -> int:
    """Print milliseconds per job and the ratio, pair by pair."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--copied", action="store_true", help="the servers share no files")
    given = options.parse_args()
    if not shutil.which("parallel"):
        sys.exit("no program 'parallel': apt-get install parallel")
    pairs: list[tuple[float, float]] = []
    with servers(given.copied) as (names, script):
        ours = partial(by_list, names, script)
        peers = partial(by_parallel, names, script, given.copied)
        for turn in range(given.pairs + 1):
            jobs = given.jobs if turn else WARM_UP
            taken = {side: side(jobs, turn) for side in ([ours, peers] if turn % 2 else [peers, ours])}
            if turn:
                pairs.append((taken[ours], taken[peers]))
                mine, theirs = (1000 * side / jobs for side in pairs[-1])
                print(
                    f"job list {mine:6.1f} ms a job   parallel {theirs:6.1f} ms   ratio {mine / theirs:.2f}", flush=True
                )
    print(f"{given.jobs} jobs: {ratio_of(*zip(*pairs, strict=True))} (wanted: at most 1.0)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
