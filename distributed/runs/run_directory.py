"""Create a run directory with run.json, and the links to it.

    logs/train-20250102-030405-9f3a/
        run.json          command, nodes, commit, versions (written by this module)
        attempts/<n>/     the files of each attempt, with a copy of run.json; see distributed/attempts.py
        metrics.jsonl   launcher.log   ... (written during the run)
    logs/latest           -> the newest run
    logs/node_<name>.log  -> the node's log in the newest run
    logs/slurm-<job>      -> the run of this SLURM job

Every launch runs this module, so it avoids slow imports.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from distributed import attempts, index
from distributed.files import KIT, read_json, version, write_json
from distributed.host.identity import machine, packages, user, versions
from distributed.host.process_scan import start_time
from distributed.trust import (
    GIT,
    PRIVATE_DIRECTORY,
    foreign,
    git_directory,
    git_environment,
    git_obeys_others,
    make_directories,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs milliseconds
    from collections.abc import Sequence

    from distributed.runs.lookup import RunNode

GIT_TIMEOUT = 2.0  # seconds; a repository on a slow disk must not delay a launch
PYTHON_TIMEOUT = 10.0  # seconds
MAX_NAME = 100  # bytes of the script's name in the name of a run


def create(
    logs: str,
    name: str,
    *,
    nodes: Sequence[RunNode],
    spares: Sequence[RunNode] = (),
    script: str,
    config: str | None,
    cwd: str,
    python: str,
    command: Sequence[str],
    options: Sequence[Sequence[str]] = (),
    rest: Sequence[str] = (),
    arguments: Sequence[str] = (),
    launcher: int = 0,
    grace: int = 8,
    slurm_job: Sequence[str] = (),
    existing: str | None = None,
) -> str:
    """Create a run directory in `logs`, write its run.json, and return its absolute path.

    config: None if the script gets no settings file. python: interpreter of the ranks. options, rest: parts of the
    command, see call.Call. arguments: of the script. launcher: its pid; default: the parent process. grace: seconds
    from a stop request to SIGKILL. slurm_job: the job number and, for an element of an array, also ARRAY_INDEX, such
    as 17_3. existing: the directory to use instead of a new one, for a run that SLURM requeued or a job that resumes.

    Raises OSError if the directory cannot be written, or if others can write to an existing one; an incomplete new
    directory is removed.
    """
    if existing:
        make_directories(existing)  # that of a job may be new
        if problem := foreign(existing, os.stat(existing)):
            raise OSError(errno.EPERM, problem.partition(": ")[2], existing)
        if os.path.exists(os.path.join(existing, "run.json")) and not attempts.numbers(existing):
            raise OSError(errno.EINVAL, "a run of an older version of Muster, which cannot be continued", existing)
    pid, zone = launcher or os.getppid(), time.strftime("%z")
    directory = existing or _create_directory(os.path.abspath(logs), name)
    facts = {
        "run": os.path.basename(directory),
        "directory": directory,  # MUSTER_RUN_DIR of its processes
        "command": list(command), "options": options, "rest": rest, "arguments": list(arguments),
        "started": f"{time.strftime('%Y-%m-%dT%H:%M:%S')}{zone[:3]}:{zone[3:]}",
        **_facts_of_nodes(nodes, spares),
        # Start time and machine distinguish this launcher from a later process with the same pid.
        "launcher": {
            "host": os.uname().nodename, "pid": pid, "since": start_time(pid), "machine": machine(), "grace": grace,
        },
        "slurm_job": slurm_job[0] if slurm_job else None,
        "script": script, "config": config, "cwd": cwd, "user": user(), **software(cwd, python),
    }  # fmt: skip
    try:
        write_json(os.path.join(directory, "run.json"), facts)
        begin_attempt(directory)
    except OSError:
        if not existing:
            import shutil

            shutil.rmtree(directory, ignore_errors=True)
        raise
    if not existing:
        index.add(os.path.dirname(directory))
    return directory


def _facts_of_nodes(nodes: Sequence[RunNode], spares: Sequence[RunNode]) -> dict[str, object]:
    """The facts in run.json that change when a lost node is replaced."""

    def described(some: Sequence[RunNode]) -> list[dict[str, object]]:
        return [vars(node) | {"address": node.address or None} for node in some]

    ranks = sum(node.processes for node in nodes)
    return {
        "nodes": [node.node for node in nodes], "layout": described(nodes), "nproc": ranks, "spares": described(spares),
    }  # fmt: skip


def change_nodes(
    directory: str, nodes: Sequence[RunNode], spares: Sequence[RunNode], changes: Sequence[dict[str, object]]
) -> None:
    """Write the nodes of the next attempt to run.json, and append the changes to earlier ones. Raises OSError."""
    path = os.path.join(directory, "run.json")
    facts = read_json(path)
    earlier = facts.get("changes")
    facts |= _facts_of_nodes(nodes, spares) | {"changes": [*(earlier if isinstance(earlier, list) else ()), *changes]}
    write_json(path, facts)


def begin_attempt(directory: str) -> str:
    """Make the directory of the next attempt, with run.json as it is now. Returns its path. Raises OSError."""
    facts = read_json(os.path.join(directory, "run.json"))
    nodes = [str(node["node"]) for key in ("layout", "spares") for node in facts[key]]  # type: ignore[attr-defined]
    names = ["verdict.json", *(f"node_{node}.{kind}" for node in nodes for kind in ("log", "exit"))]
    number = max(attempts.numbers(directory), default=0)
    if number >= attempts.LAST:
        raise OSError(errno.EOVERFLOW, "no further attempt can be numbered", attempts.path_of(directory, str(number)))
    if not number or os.path.exists(os.path.join(attempts.path_of(directory, str(number)), "run.json")):
        number += 1  # otherwise a full disk did not take all of this directory
    attempt = attempts.make(directory, str(number), names)
    try:  # needs no space on a full disk; a new run.json of the run replaces the link, not this file
        os.link(os.path.join(directory, "run.json"), os.path.join(attempt, "run.json"))
    except OSError:  # the file system has no hard links
        write_json(os.path.join(attempt, "run.json"), facts)
    return attempt


def _create_directory(logs: str, name: str) -> str:
    make_directories(logs, PRIVATE_DIRECTORY)
    # Keep letters and digits of all alphabets, and . _ -, so that the name needs no quotes.
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).lstrip(".-")
    plain = plain.encode()[:MAX_NAME].decode(errors="ignore") or "run"
    while True:
        directory = os.path.join(logs, f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}")
        try:
            os.mkdir(directory, PRIVATE_DIRECTORY)
        except FileExistsError:  # created by another launch: two launches never share a directory
            continue
        return directory


def software(cwd: str, python: str) -> dict[str, object]:
    """The part of run.json on the code in `cwd`, and on the ranks' interpreter and its packages."""
    found = _versions_and_packages(python)
    packages = found.pop("packages", [])
    return {"git": _git(cwd), "python": python, "versions": {"muster": version(), **found}, "packages": packages}


def _versions_and_packages(python: str) -> dict[str, object]:
    """versions() and packages() of an interpreter; every version is None if it fails."""
    own = versions()  # this interpreter (-I) ignores PYTHONPATH and the user's packages, so PyTorch may be missing
    if own["torch"] and os.path.abspath(python) == os.path.abspath(sys.executable):
        return {**own, "packages": packages()}
    import json
    import subprocess

    command = [python, "-m", "distributed.host.identity"]
    env = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }  # which would exclude the working directory from the import path
    try:
        output = subprocess.check_output(command, cwd=KIT, env=env, stderr=subprocess.DEVNULL, timeout=PYTHON_TIMEOUT)
        return dict(json.loads(output))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"python": None, "torch": None, "nccl": None}


def _git(cwd: str) -> dict[str, object] | None:
    """The commit, and whether a tracked file differs from it. None without a commit, or if git fails or is too slow.

    Changes within submodules do not count.
    """
    try:
        found = os.fsdecode(git_directory(os.fsencode(cwd)))  # faster than starting git
    except OSError:
        return None
    if not found or git_obeys_others(found):
        return None
    import subprocess

    # In a submodule, git would run filters of the configuration there.
    options = ("--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
    command = [*GIT, "-C", cwd, "status", *options]
    # A lock on the index could make a concurrent commit fail. git must not go on to a directory above the one found.
    above = os.path.dirname(os.path.dirname(found))
    env = git_environment(GIT_OPTIONAL_LOCKS="0", GIT_CEILING_DIRECTORIES=above)
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    if commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def link_to(directory: str, nodes: Sequence[str], slurm_job: Sequence[str] = ()) -> list[str]:
    """Point logs/latest, logs/node_<name>.log and logs/slurm-<job> to this run. Returns a message for each failure."""
    logs, run = os.path.split(directory)
    targets = {"latest": run} | {f"slurm-{job}": run for job in slurm_job}
    targets |= {f"node_{node}.log": os.path.join(run, f"node_{node}.log") for node in nodes}
    errors = []
    for name, target in targets.items():
        link = os.path.join(logs, name)
        if os.path.lexists(link) and not os.path.islink(link):
            errors.append(f"{link}: not a symbolic link; move it away to let it point to the newest run")
            continue
        try:
            attempts.point(link, target)
        except OSError as error:
            errors.append(f"{link}: cannot create this link to {target}: {error.strerror}")
    return errors
