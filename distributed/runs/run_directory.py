"""Create the directory of a run, with run.json, and the links to it.

    logs/train-20250102-030405-9f3a/
        run.json          what was started: command, nodes, commit, versions (written here)
        errors/           failure records of ranks and agents
        ranks/            torchrun's own files
        node_<name>.log   node_<name>.exit   metrics.jsonl   verdict.json   ... (written by the run)
    logs/latest           -> the newest run
    logs/node_<name>.log  -> the node's log in the newest run
    logs/slurm-<job>      -> the run of this job

This runs before every launch, so it imports little, and that late. Standard library only.

Try it: python -m distributed.runs.run_directory create --logs /tmp/logs --name train --nodes "$(hostname)" \
            --nproc 2 --script train.py --config - --cwd "$PWD" --python "$(command -v python3)" -- train.py
"""

from __future__ import annotations

import os
import sys
import time

from distributed.files import KIT, write_json
from distributed.host.identity import machine, user, versions
from distributed.host.process_scan import start_time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost milliseconds
    from collections.abc import Sequence
    from typing import Any

GIT_SECONDS = 2.0  # a repository on a slow disk must not hold a launch
PYTHON_SECONDS = 10.0
MAX_NAME = 100  # bytes of the script's name in the name of a run


def create(logs: str, name: str, *, again: str | None = None, **launch: Any) -> str:
    """Create a run directory in `logs` and return its absolute path.

    again: the directory of the same run before SLURM requeued it, to go on in. launch: the arguments of describe().
    Raises OSError when the directory cannot be written; nothing incomplete is left then.
    """
    directory = again or _create_directory(os.path.abspath(logs), name)
    try:
        for part in ("errors", "ranks"):
            os.makedirs(os.path.join(directory, part), exist_ok=bool(again))
        write_json(os.path.join(directory, "run.json"), describe(directory, **launch))
    except OSError:
        if not again:
            import shutil

            shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _create_directory(logs: str, name: str) -> str:
    """mkdir decides who has a name, so that two launches in the same second get two directories."""
    os.makedirs(logs, exist_ok=True)
    # A name that needs no quotes: letters and digits of any script, and . _ -
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".-")
    plain = plain.encode()[:MAX_NAME].decode(errors="ignore") or "run"
    while True:
        directory = os.path.join(logs, f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}")
        try:
            os.mkdir(directory)
        except FileExistsError:
            continue
        return directory


def describe(
    directory: str,
    *,
    nodes: Sequence[str],
    nproc: int,
    script: str,
    config: str | None,
    cwd: str,
    python: str,
    command: Sequence[str],
    places: Sequence[str] = (),
    first_rank: int = 0,
    launcher: int = 0,
    grace: int = 8,
    slurm_job: Sequence[str] = (),
) -> dict[str, object]:
    """The content of run.json.

    nproc: processes in all. config: None when the script gets none. python: the interpreter that the ranks run with.
    places: for each node [user@]name:processes, as ssh is called; none when all is on this machine. first_rank: the
    lowest rank of the first node; 0, unless other nodes have runs of their own. launcher: its process id; default: the
    parent. grace: seconds that it gives to ranks after a stop request. slurm_job: its number and, of an array's
    element, its other name, as in 17_3.
    """
    pid = launcher or os.getppid()
    zone = time.strftime("%z")
    return {
        "run": os.path.basename(directory),
        "folder": directory,  # as processes of the run carry it in MUSTER_RUN_DIR
        "command": list(command),
        "started": f"{time.strftime('%Y-%m-%dT%H:%M:%S')}{zone[:3]}:{zone[3:]}",
        "nodes": list(nodes),
        "places": _places(nodes, nproc, places, first_rank),
        # By its start and its machine another terminal finds this launcher, and no later process with its number.
        "launcher": {
            "host": os.uname().nodename, "pid": pid, "since": start_time(pid), "machine": machine(), "grace": grace,
        },
        "slurm_job": slurm_job[0] if slurm_job else None,
        "nproc": nproc,
        "script": script,
        "config": config,
        "cwd": cwd,
        "python": python,
        "user": user(),
        "versions": _versions(python),
        "git": _git(cwd),
    }  # fmt: skip


def _places(nodes: Sequence[str], nproc: int, words: Sequence[str], first_rank: int) -> list[dict[str, object]]:
    """Each node, how to reach it over ssh (None: it is the launcher's own machine), and which ranks it has."""
    places: list[dict[str, object]] = []
    for node, word in zip(nodes, words or [f":{nproc}"] * len(nodes), strict=True):
        address, _, processes = word.rpartition(":")
        reached = address if words else None
        places.append({"node": node, "address": reached, "processes": int(processes), "first_rank": first_rank})
        first_rank += int(processes)
    return places


def _versions(python: str) -> dict[str, str | None]:
    """versions() of the ranks' interpreter, which is asked unless it is this one; unknown when it does not answer."""
    # This one: both names in one bin/, and one file behind them. Two environments may link to the same file.
    names = (os.path.abspath(python), os.path.abspath(sys.executable))
    if len({os.path.dirname(name) for name in names}) == len({os.path.realpath(name) for name in names}) == 1:
        return versions()
    import json
    import subprocess

    words = [python, "-m", "distributed.host.identity"]
    env = _environment_without("PYTHONSAFEPATH")  # with it, -m would not find us in the working directory
    try:
        answer = subprocess.check_output(words, cwd=KIT, env=env, stderr=subprocess.DEVNULL, timeout=PYTHON_SECONDS)
        return dict(json.loads(answer))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"python": None, "torch": None}


def _git(cwd: str) -> dict[str, object] | None:
    """Commit, and whether a tracked file differs from it. None without git, commit or a quick answer."""
    above = directory = os.path.abspath(cwd)
    while not os.path.exists(os.path.join(directory, ".git")):  # starting git would take longer
        directory, above = os.path.dirname(directory), directory
        if directory == above:
            return None
    import subprocess

    words = ["git", "-C", cwd, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # In a hook these would name another repository; a status that locks the index could disturb a commit.
    env = _environment_without("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE") | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(words, env=env, capture_output=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    if commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _environment_without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def point_to(directory: str, nodes: Sequence[str], slurm_job: Sequence[str] = ()) -> list[str]:
    """Move logs/latest, logs/node_<name>.log and logs/slurm-<job> to this run. Returns what prevented some of them."""
    logs, run = os.path.split(directory)
    targets = {"latest": run} | {f"slurm-{job}": run for job in slurm_job}
    targets |= {f"node_{node}.log": os.path.join(run, f"node_{node}.log") for node in nodes}
    faults = []
    for name, target in targets.items():
        link = os.path.join(logs, name)
        if os.path.lexists(link) and not os.path.islink(link):
            remedy = "move it away to have it point to the newest run"
            faults.append(f"{link} is not a link of ours: left as it is; {remedy}")
            continue
        beside = f"{link}.{os.urandom(4).hex()}"
        try:
            os.symlink(target, beside)
            os.replace(beside, link)
        except OSError as error:
            if os.path.lexists(beside):
                os.unlink(beside)
            faults.append(f"{link}: cannot make this link ({error.strerror}); the run is in {target}")
    return faults


# ---------------------------------------------------------------- the program


def main(words: Sequence[str]) -> int:
    """Create a run directory and print its path. Returns 2 when it cannot be created."""
    options = _parse(words)
    try:
        directory = create(**options)
    except OSError as error:
        path = error.filename or options["logs"]
        message = f"cannot create a run directory: {path}: {error.strerror}; name another place with --log-dir"
        sys.stderr.write(f"run_directory: {message}\n")
        return 2
    for fault in point_to(directory, options["nodes"], options["slurm_job"]):
        sys.stderr.write(f"run_directory: {fault}\n")
    sys.stdout.buffer.write(os.fsencode(directory) + b"\n")
    return 0


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of create()."""
    import argparse

    def node(name: str) -> str:
        """It becomes part of the name of a file."""
        if not name or "/" in name:
            raise ValueError
        return name

    parser = argparse.ArgumentParser(
        prog="run_directory",
        allow_abbrev=False,
        description="Create the directory of a new run.",
        epilog="After -- comes the command as the person gave it.",
    )
    parser.add_argument("create", choices=["create"], help="create a directory, print its path")
    parser.add_argument("--logs", required=True, metavar="DIR", help="the directory of all runs")
    parser.add_argument("--name", required=True, help="what is run; date, time and a number are added")
    parser.add_argument("--nodes", required=True, nargs="+", metavar="NODE", type=node)
    parser.add_argument("--nproc", required=True, type=int, metavar="N", help="processes in all")
    parser.add_argument("--first-rank", type=int, metavar="N", default=0, help="of the first node")
    parser.add_argument("--places", nargs="+", metavar="ADDRESS:N", default=(), help="of each node over ssh")
    parser.add_argument("--launcher", type=int, metavar="PID", default=0, help="default: the caller")
    parser.add_argument("--grace", type=int, metavar="SECONDS", default=8)
    parser.add_argument("--again", metavar="RUN", help="go on in this directory, of the same run before")
    parser.add_argument("--slurm-job", nargs="+", metavar="NAME", default=(), help="its number, and its other names")
    parser.add_argument("--script", required=True)
    parser.add_argument("--config", required=True, help="- for none")
    parser.add_argument("--cwd", required=True, metavar="DIR", help="working directory of the ranks")
    parser.add_argument("--python", required=True, metavar="PATH", help="interpreter of the ranks")
    end = words.index("--") if "--" in words else len(words)
    options = vars(parser.parse_args(words[:end])) | {"command": words[end + 1 :]}
    options["config"] = None if options["config"] == "-" else options["config"]
    del options["create"]
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
