"""Output directories of jobs, each of which belongs to one job, and the variables that name them."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable

from distributed.files import foreign_directory, try_lock
from distributed.trust import PRIVATE, make_own_directory, not_too_deep, read_text, regular_file

AFTER = "MUSTER_AFTER"  # variable with the output directories of the jobs that _after names, one per line
OWNER = ".muster_job"  # file in an output directory with the name of its job; locked while an attempt writes there


class HostError(Exception):
    """A request failed. The message states problem and remedy."""

    kind = "server"  # see backend.NotStarted


class JobRefused(HostError):
    """No server can start the job."""

    kind = "job"


class Busy(HostError):
    """Another attempt writes to the output directory, or the attempt is already running."""

    kind = "busy"


def has_results(output: str) -> bool:
    """Whether an output directory contains more than OWNER. Raises OSError."""
    return bool(set(os.listdir(output)) - {OWNER})


def owner_of(output: str) -> str:
    """The owner_name() of the job whose results are in a directory; empty if there are no results."""
    try:
        owner = read_text(os.path.join(output, OWNER)).strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise not_a_file(error) from None
    return owner if has_results(output) else ""


def not_a_file(error: OSError) -> Exception:
    """The exception for an error of regular_file() on an owner file. A job may have replaced it by a link or FIFO."""
    refused = error.errno in (errno.ELOOP, errno.EINVAL)
    return JobRefused(f"{error.filename}: {error.strerror}; remove it") if refused else error


def owner_name(job: str, script: str) -> str:
    return f"{job} of {os.path.normpath(script)}"


def default_variables(threads: str) -> dict[str, str]:
    """The variables that a job gets if they are not set otherwise."""
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}


def job_variables(output: str, workdir: str, needs: Iterable[str], base: str) -> dict[str, str]:
    """The variables of a job that depend on its server. needs: see JobServer.start(). base: path of its base model."""
    after = "\n".join(os.path.join(workdir, each) for each in needs)
    found = {"MUSTER_OUTPUT_DIR": output, "MUSTER_METRICS": os.path.join(output, "metrics.jsonl")}
    return found | ({AFTER: after} if after else {}) | ({"MUSTER_BASE_MODEL": base} if base else {})


def block_of(environment: dict[str, str]) -> bytes:
    """Variables as NAME=VALUE entries, each terminated by a NUL.

    environment_block() in transport/commands.py also ends each block with an empty entry; this function does not.
    """
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def holds_foreign_files(output: str) -> bool:
    """Whether an output directory contains files or links that no job wrote: a job always writes OWNER first."""
    if os.path.lexists(f"{output}/{OWNER}"):
        return False
    found = not_too_deep(os.walk(output))
    holds = any(files or any(os.path.islink(f"{top}/{name}") for name in below) for top, below, files in found)
    return holds or (os.path.lexists(output) and not os.path.isdir(output))


def refuse_obstacle(output: str) -> None:
    """Raise JobRefused if an output directory cannot be created because a path above it is not a directory."""
    parent = os.path.dirname(output)
    while parent and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if parent and not os.path.isdir(parent):
        raise JobRefused(f"{parent}: not a directory; move it away, or give this job another prefix")


def refuse_foreign_files(output: str) -> None:
    """Raise JobRefused if an output directory holds files that no job wrote."""
    if holds_foreign_files(output):
        raise JobRefused(
            f"{output} contains files that no job wrote; move it away, give this job another prefix, or let the job "
            f"use these files: touch {shlex.quote(os.path.join(output, OWNER))}"
        )


def refuse_other_owner(output: str, job: str, script: str) -> None:
    """Raise JobRefused if a directory holds the results of another job."""
    owner = owner_of(output)
    if owner and owner != owner_name(job, script):
        raise JobRefused(f"{output} holds the results of job {owner}; move it away, or give this job another prefix")


def claim_output(workdir: str, output: str, job: str, script: str) -> int:
    """Lock an output directory in a working directory for an attempt, and write the name of its job to OWNER.

    Returns a file that stays locked as long as any process has it open. Raises JobRefused or Busy.
    """
    refuse_obstacle(output)
    refuse_foreign_files(output)
    try:
        make_own_directory(output, workdir)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        remedy = "use another working directory, or give this job another prefix"
        raise JobRefused(f"{error.filename}: {error.strerror}; {remedy}") from None
    if problem := foreign_directory(output):
        raise JobRefused(f"{problem}, or give this job another prefix")
    try:
        file = regular_file(os.path.join(output, OWNER), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise not_a_file(error) from None
    try:
        os.fchmod(file, PRIVATE)  # otherwise others could lock it; earlier versions created it with mode 0644
        if not try_lock(file):
            raise Busy(f"{output}: another attempt writes there; retrying when it ends")
        refuse_other_owner(output, job, script)
        os.ftruncate(file, os.write(file, f"{owner_name(job, script)}\n".encode()))  # write first: the disk may be full
    except (HostError, OSError):
        os.close(file)
        raise
    return file
