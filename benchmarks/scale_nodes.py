"""Measure launches with 4 to 64 nodes: the time to start, show the status, stop and report a failure, and the memory.

The nodes are laboratory nodes on one machine, with one rank each. Launcher, ssh, preflight check and supervisors are
the real ones. The agent is replaced by a program that only starts its rank, because 64 processes that import PyTorch
are too many for one machine. The replacement is in a stub package `torch` in the working directory, which
`--agent torchrun` imports instead of PyTorch. scale.py measures agents. Needs root.

    python -m benchmarks.scale_nodes [4 8 16 32 64]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.growth import table
from benchmarks.laboratory import KIT, nodes

LIMIT = 120.0  # seconds for each step
AGENT = """
import os, runpy, sys
arguments = sys.argv[1:]
os.environ["RANK"] = arguments[arguments.index("--node-rank") + 1]
sys.argv = arguments[arguments.index("--") + 1 :]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SCRIPT = """
import os, pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
(directory / "started" / os.environ["RANK"]).touch()
while not (directory / "fail").exists():
    time.sleep(0.2)
if os.environ["RANK"] == "1":
    (directory / "failed").write_text(str(time.time()))
    raise ValueError("bad sample")
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {LIMIT:.0f} s")
        time.sleep(0.01)


def launch(names: list[str], directory: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start a run; return its launcher, and the seconds until all ranks had started."""
    started = directory / "started"
    for path in (*started.glob("*"), directory / "fail"):
        path.unlink(missing_ok=True)
    command = [str(KIT / "scripts/ssh/launch_torchrun_auto.sh"), "--agent", "torchrun", "--python", sys.executable]
    command += ["--script", "wait.py", "-", "1", *names, "--", str(directory)]
    began = time.monotonic()
    with (directory / "output").open("wb") as output:
        launcher = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    wait_until(lambda: len(list(started.iterdir())) == len(names) or launcher.poll() is not None)
    if launcher.poll() is not None:
        sys.exit((directory / "output").read_text())
    return launcher, time.monotonic() - began


def ended(launcher: subprocess.Popen[bytes]) -> float:
    """Wait until the launcher has exited; return the time, in Unix seconds."""
    launcher.wait(LIMIT)
    return time.time()


def resources(launcher: int) -> tuple[int, int, float]:
    """Return the number of processes of the launching side, the launcher's number of open files, and the memory.

    The launching side is the launcher, its descendants, and the processes of the shared ssh connections. The memory is
    the PSS of all these processes, in MB.
    """
    commands, listing = {}, subprocess.run(["ps", "-eo", "pid=,ppid=,args=", "-ww"], check=True, capture_output=True)
    found = {launcher}
    for line in listing.stdout.decode(errors="replace").splitlines():
        pid, parent, command = line.split(maxsplit=2)
        commands[int(pid)] = int(parent), command
    for _ in range(3):  # children, their children, and so on: the ssh clients and the processes that they started
        found |= {pid for pid, (parent, _) in commands.items() if parent in found}
    sockets = {one[1] for pid in found if (one := re.search(r"ControlPath=(\S+/)%C", commands[pid][1]))}
    for pid, (_, command) in commands.items():  # ssh's shared connections are not descendants of the launcher
        if command.startswith("ssh: ") and any(directory in command for directory in sockets):
            found.add(pid)
    memory = 0.0
    for pid in found:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        memory += sum(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3
    return len(found), len(os.listdir(f"/proc/{launcher}/fd")), memory


def measure(names: list[str], directory: Path) -> dict[str, float]:
    """Two runs on these nodes: one is stopped, in the other a rank fails."""
    launcher, start = launch(names, directory)
    count, files, memory = resources(launcher.pid)
    began = time.monotonic()
    shown = subprocess.run(
        [KIT / "scripts/status.sh", "--python", sys.executable, "--json"],
        cwd=directory, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    status = time.monotonic() - began
    if shown.returncode not in (0, 1) or shown.stdout.count(b'"error": ""') != len(names):
        sys.exit(shown.stdout.decode())
    began_at = time.time()
    launcher.send_signal(signal.SIGTERM)
    stop = ended(launcher) - began_at
    launcher, _ = launch(names, directory)
    (directory / "fail").touch()
    verdict = ended(launcher) - float((directory / "failed").read_text())
    if b"ValueError: bad sample" not in (directory / "output").read_bytes():
        sys.exit((directory / "output").read_text())
    return {
        "seconds until all ranks have started": start,
        "seconds until status.sh has answered": status,
        "seconds from SIGTERM to the exit": stop,
        "seconds from a failure to the verdict": verdict,
        "processes of the launching side": count,
        "open files of the launcher": files,
        "memory of the launching side, MB": memory,
    }


def main() -> int:
    """Print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("sizes", type=int, nargs="*", default=[4, 8, 16, 32, 64], help="numbers of nodes")
    sizes = options.parse_args().sizes
    with nodes(max(sizes), prefix="scale") as (names, directory):
        (directory / "torch/distributed").mkdir(parents=True)
        (directory / "started").mkdir()
        for name in ("torch/__init__.py", "torch/distributed/__init__.py"):
            (directory / name).touch()
        (directory / "torch/distributed/run.py").write_text(AGENT)
        (directory / "wait.py").write_text(SCRIPT)
        measure(names[:2], directory)  # warm the page cache
        columns = []
        for size in sizes:
            columns.append(measure(names[:size], directory))
            print(f"{size} nodes: {columns[-1]}", file=sys.stderr)
    print(table("nodes", sizes, {row: [column[row] for column in columns] for row in columns[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
