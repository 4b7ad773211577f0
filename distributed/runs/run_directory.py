"""Where is everything that one run leaves behind?

    logs/train-20250102-030405-9f3a/
        run.json          what was started: command, nodes, commit, versions (written here)
        errors/           what failing ranks and agents say of themselves
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

import contextlib
import os
import sys
import time

from distributed.files import KIT, write_json
from distributed.host.identity import machine, since, user, versions

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would cost milliseconds
    from collections.abc import Sequence
    from typing import Any

GIT_SECONDS = 2.0  # a repository on a slow disk must not hold a launch
PYTHON_SECONDS = 10.0
MAX_NAME = 100  # bytes of the script's name in the name of a run


def create(
    logs: str,
    name: str,
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
    again: str | None = None,
    slurm_job: Sequence[str] = (),
) -> str:
    """Make a new run folder in `logs` and return its absolute path.

    config: None when the script gets none. python: the interpreter that the ranks will run with.
    nproc: processes in all. places: for each node [user@]name:processes, as ssh is called; none when all is on this
    machine. first_rank: the lowest one of the first node; 0, unless other nodes have runs of their own.
    launcher: its process id. grace: seconds that it gives to ranks that are asked to stop.
    again: the folder of the same run before SLURM started it anew, to go on in.
    slurm_job: its number and, of an array's element, its other name, as in 17_3.
    Raises OSError when the folder cannot be written; nothing half-made is left then.
    """
    folder = again or _new_folder(os.path.abspath(logs), name)
    facts = {
        "run": os.path.basename(folder),
        "folder": folder,  # as processes of the run carry it in MUSTER_RUN_DIR
        "command": list(command),
        "started": _iso(time.time()),
        "nodes": list(nodes),
        "places": _places(nodes, nproc, places, first_rank),
        "launcher": _launcher(launcher or os.getppid(), grace),
        "slurm_job": slurm_job[0] if slurm_job else None,
        "nproc": nproc,
        "script": script,
        "config": config,
        "cwd": cwd,
        "python": python,
        "user": user(),
        "versions": versions() if _is_this_python(python) else _versions_of(python),
        "git": _git(cwd),
    }
    try:
        os.makedirs(os.path.join(folder, "errors"), exist_ok=bool(again))
        os.makedirs(os.path.join(folder, "ranks"), exist_ok=bool(again))
        write_json(os.path.join(folder, "run.json"), facts)
    except OSError:
        if not again:
            _unmake(folder)
        raise
    return folder


def point_to(folder: str, nodes: Sequence[str], slurm_job: Sequence[str] = ()) -> list[str]:
    """Move logs/latest, logs/node_<name>.log and logs/slurm-<job> to this run. Returns what stood in the way."""
    logs, run = os.path.split(folder)
    links = {"latest": run} | {f"slurm-{job}": run for job in slurm_job}
    links |= {f"node_{node}.log": os.path.join(run, f"node_{node}.log") for node in nodes}
    return [fault for name, target in links.items() if (fault := _point(os.path.join(logs, name), target))]


def _point(link: str, target: str) -> str | None:
    if os.path.lexists(link) and not os.path.islink(link):
        return f"{link} is not a link of ours: left as it is; move it away to have it point to the newest run"
    beside = f"{link}.{os.urandom(4).hex()}"
    try:
        os.symlink(target, beside)
        os.replace(beside, link)
    except OSError as error:
        _remove(beside)
        return f"{link}: cannot make this link ({error.strerror}); the run is in {target}"
    return None


# ---------------------------------------------------------------- the folder


def _new_folder(logs: str, name: str) -> str:
    """mkdir decides who has a name, so that two launches in the same second get two folders."""
    os.makedirs(logs, exist_ok=True)
    while True:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = os.path.join(logs, f"{_plain(name)}-{stamp}-{os.urandom(2).hex()}")
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue
        return folder


def _plain(name: str) -> str:
    """A name that needs no quotes: letters and digits of any script, and . _ -"""
    words = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".-")
    return words.encode()[:MAX_NAME].decode(errors="ignore") or "run"


def _unmake(folder: str) -> None:
    for path in (os.path.join(folder, "errors"), os.path.join(folder, "ranks"), folder):
        with contextlib.suppress(OSError):  # it was never made: the error before this one is the one to tell
            os.rmdir(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


# ---------------------------------------------------------------- the facts


def _iso(seconds: float) -> str:
    """2025-01-02T03:04:05+01:00"""
    zone = time.strftime("%z", time.localtime(seconds))
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds)) + f"{zone[:3]}:{zone[3:]}"


def _places(nodes: Sequence[str], nproc: int, words: Sequence[str], first_rank: int) -> list[dict[str, object]]:
    """Each node, how to reach it over ssh (None: it is the launcher's own machine), and which ranks it has."""
    parts = [word.rpartition(":") for word in words]
    told = [(address, int(processes)) for address, _, processes in parts]
    reached: Sequence[tuple[str | None, int]] = told or [(None, nproc)] * len(nodes)
    places: list[dict[str, object]] = []
    for node, (address, processes) in zip(nodes, reached, strict=True):
        places.append({"node": node, "address": address, "processes": processes, "first_rank": first_rank})
        first_rank += processes
    return places


def _launcher(pid: int, grace: int) -> dict[str, object]:
    """By which another terminal finds this launcher again, and none that has got its number since."""
    return {"host": os.uname().nodename, "pid": pid, "since": since(pid), "machine": machine(), "grace": grace}


def _is_this_python(python: str) -> bool:
    """Both names in one bin/ and one file behind them. Two environments may link to the same file."""
    names = (os.path.abspath(python), os.path.abspath(sys.executable))
    return len(set(map(os.path.dirname, names))) == 1 and len(set(map(os.path.realpath, names))) == 1


def _versions_of(python: str) -> dict[str, str | None]:
    """Ask another interpreter for its versions(). Unknown when it does not answer."""
    import json
    import subprocess

    words = [python, "-m", "distributed.host.identity"]
    env = _environment_without("PYTHONSAFEPATH")  # with it, -m would not find us in the working folder
    try:
        answer = subprocess.check_output(words, cwd=KIT, env=env, stderr=subprocess.DEVNULL, timeout=PYTHON_SECONDS)
        return dict(json.loads(answer))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"python": None, "torch": None}


def _git(cwd: str) -> dict[str, object] | None:
    """Commit, and whether a tracked file differs from it. None without git, commit or a quick answer."""
    if not _in_repository(cwd):
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


def _in_repository(folder: str) -> bool:
    """Whether asking git is worth it: a process costs more than a few looks."""
    folder = os.path.abspath(folder)
    while not os.path.exists(os.path.join(folder, ".git")):
        folder, below = os.path.dirname(folder), folder
        if folder == below:
            return False
    return True


def _environment_without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


# ---------------------------------------------------------------- the program


def main(words: Sequence[str]) -> int:
    """Make a run folder and print its path. Returns 2 when that cannot be."""
    options = _parse(words)
    try:
        folder = create(**options)
    except OSError as error:
        place = error.filename or options["logs"]
        _say(f"cannot make a run folder: {place}: {error.strerror}: name another place with --log-dir")
        return 2
    for fault in point_to(folder, options["nodes"], options["slurm_job"]):
        _say(fault)
    sys.stdout.buffer.write(os.fsencode(folder) + b"\n")
    return 0


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of create()."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="run_directory",
        allow_abbrev=False,
        description="Make the folder of a new run.",
        epilog="Behind -- comes the command as the person gave it.",
    )
    parser.add_argument("create", choices=["create"], help="make a folder, print its path")
    parser.add_argument("--logs", required=True, metavar="DIR", help="where the folders of runs are")
    parser.add_argument("--name", required=True, help="what is run; date, time and a number are added")
    parser.add_argument("--nodes", required=True, nargs="+", metavar="NODE", type=_node)
    parser.add_argument("--nproc", required=True, type=int, metavar="N", help="processes in all")
    parser.add_argument("--first-rank", type=int, metavar="N", default=0, help="of the first node")
    parser.add_argument("--places", nargs="+", metavar="ADDRESS:N", default=(), help="of each node over ssh")
    parser.add_argument("--launcher", type=int, metavar="PID", default=0, help="default: the caller")
    parser.add_argument("--grace", type=int, metavar="SECONDS", default=8)
    parser.add_argument("--again", metavar="RUN", help="go on in this folder, of the same run before")
    parser.add_argument("--slurm-job", nargs="+", metavar="NAME", default=(), help="its number, and its other names")
    parser.add_argument("--script", required=True)
    parser.add_argument("--config", required=True, help="- for none")
    parser.add_argument("--cwd", required=True, metavar="DIR", help="working folder of the ranks")
    parser.add_argument("--python", required=True, metavar="PATH", help="interpreter of the ranks")
    end = words.index("--") if "--" in words else len(words)
    options = vars(parser.parse_args(words[:end])) | {"command": words[end + 1 :]}
    options["config"] = None if options["config"] == "-" else options["config"]
    del options["create"]
    return options


def _node(name: str) -> str:
    """It becomes part of the name of a file."""
    if not name or "/" in name:
        raise ValueError
    return name


def _say(message: str) -> None:
    sys.stderr.write(f"run_directory: {message}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
