"""Failure records: files in errors/ of the run directory, from which the verdict is derived.

A failed rank writes rank_<rank>.json with its traceback; the agent writes node_<name>.json with the exit codes of its
ranks. Without a run directory (MUSTER_RUN_DIR is not set) nothing is written.
"""

from __future__ import annotations

import contextlib
import json  # not inside a function: in a rank, that could import a json.py of the script's directory
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.files import write_file

Records = Mapping[str, Mapping[str, Any]]  # name of a file in errors/ -> its content


def node_name() -> str:
    """The name of this node in logs and reports."""
    return os.environ.get("MUSTER_NODE") or socket.gethostname()


def write_rank_record(code: int, error: BaseException) -> None:
    """Write the record of this rank, which exits with this code because of this error."""
    if not os.environ.get("MUSTER_RUN_DIR"):
        return
    rank = int(os.environ["RANK"])
    record = {
        "rank": rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node": node_name(),
        "pid": os.getpid(),
        "time": time.time(),
        "exit_code": code,
        "exception": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    _write(f"rank_{rank}.json", record)


def write_node_record(failures: Sequence[Mapping[str, Any]], succeeded: Sequence[int], lost: str | None) -> None:
    """Write the record of this node's agent. succeeded: ranks that exited with 0. lost: an unreachable node."""
    record = {"node": node_name(), "failures": failures, "succeeded": succeeded, "lost": lost}
    _write(f"node_{node_name()}.json", {name: value for name, value in record.items() if value or name == "failures"})


def read_own_records(ranks: Iterable[int]) -> Records:
    """Read the records of this node's agent and of these ranks, if they exist."""
    names = [f"node_{node_name()}.json", *(f"rank_{rank}.json" for rank in ranks)]
    return {name: record for name in names if (record := _read(name))}


def write_missing(records: Records) -> None:
    """Write the records of other nodes unless they exist: in a shared directory, those nodes have written them."""
    for name, record in records.items():
        if not _read(name):
            _write(name, record)


def _read(name: str) -> Mapping[str, Any]:
    run = os.environ.get("MUSTER_RUN_DIR")
    try:
        return json.loads(Path(run, "errors", name).read_bytes()) if run else {}
    except (OSError, ValueError):
        return {}


def _write(name: str, record: Mapping[str, Any]) -> None:
    """Write a record. An error, such as a full disk, is printed on stderr: it must not change the rank's exit code."""
    if not (run := os.environ.get("MUSTER_RUN_DIR")):
        return
    try:
        write_file(f"{run}/errors/{name}", json.dumps(record, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):  # stderr may go to the same disk
            sys.stderr.write(f"cannot write {run}/errors/{name}: {error.strerror}\n")
