"""Failure records: files in errors/ of the run directory, from which the verdict is derived.

A rank that fails writes rank_<rank>.json, with its traceback, before it waits for threads, exit handlers and
destructors; the agent writes node_<name>.json with the exit codes of its ranks. Without MUSTER_RUN_DIR, an agent writes
no file; RankRecord describes where a rank writes its file in this case.
"""

from __future__ import annotations

import contextlib
import json  # not inside a function: in a rank, that could import a json.py of the script's directory
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.files import write_file
from distributed.trust import checked, head_and_tail, parse_json, printable, read_bytes

# Kinds for trust.checked(): records of an agent, and its failures, see agent.RankFailure; and of a rank.
NAME = re.compile(r"[ -.0-~]{1,255}")  # of a node, in ASCII; files are named after nodes
EXIT_CODES = range(1, 256)
FAILURE: Any = {"rank": int, "local_rank?": int, "pid": int, "time": float, "exit_code": EXIT_CODES}
OF_RANK: Any = FAILURE | {"node": NAME, **dict.fromkeys(("exception?", "message?", "traceback?"), str)}

Records = Mapping[str, Mapping[str, Any]]  # name of a file in errors/ -> its content


def node_name() -> str:
    """The name of this node in logs and reports."""
    return os.environ.get("MUSTER_NODE") or socket.gethostname()


class RankRecord:
    """The failure record of the rank with this environment. The rank counts as failed as soon as the file exists.

    Without a run directory, the file is beside TORCHELASTIC_ERROR_FILE; if that is not set either, there is no file.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        """Reads `env` now: the script may change the environment."""
        run, error_file = env.get("MUSTER_RUN_DIR"), env.get("TORCHELASTIC_ERROR_FILE")
        self._rank, self._local_rank = int(env.get("RANK") or 0), int(env.get("LOCAL_RANK") or 0)
        self._path = f"{run}/errors/rank_{self._rank}.json" if run else ""
        if error_file and not run:
            self._path = os.path.join(os.path.dirname(error_file), "failure.json")

    def write(self, code: int, error: BaseException | None = None) -> str:
        """Record that this process exits with this code, because of this error if there is one.

        Returns why the record cannot be written; "" if it was written, or if there is no file.
        """
        record: dict[str, Any] = {
            "rank": self._rank,
            "local_rank": self._local_rank,
            "node": node_name(),
            "pid": os.getpid(),
            "time": time.time(),
            "exit_code": code,
        }
        if error:
            record |= {
                "exception": type(error).__name__,
                "message": head_and_tail(str(error)),
                "traceback": head_and_tail("".join(traceback.format_exception(error))),
            }
        return _write(self._path, record)

    def read(self, pid: int) -> Mapping[str, Any]:
        """The record that the process with this id has written; {} if it has written no valid one."""
        with contextlib.suppress(ValueError):
            record = _checked_record(_read(self._path))
            return record if (record.get("pid"), record["rank"]) == (pid, self._rank) else {}
        return {}


def node_record(
    failures: Sequence[Mapping[str, Any]], succeeded: Sequence[int], lost: str | None, first: str | None = None
) -> Records:
    """The record of this node's agent.

    succeeded: ranks that exited with 0. lost: an unreachable node. first: the node that was the first to report a
    failure to the store of the run.
    """
    record = {"node": node_name(), "failures": failures, "succeeded": succeeded, "lost": lost, "first": first}
    content = {name: value for name, value in record.items() if value or name == "failures"}
    return {f"node_{node_name()}.json": content}


def write(records: Records) -> None:
    """Write these records."""
    for name, record in records.items():
        if problem := _write(_path(name), record):
            sys.stderr.write(f"agent: {problem}\n")


def write_error_file(record: Mapping[str, Any]) -> None:
    """Write the failure record of a rank or of the agent to TORCHELASTIC_ERROR_FILE, if set, in torchrun's format."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    message = f"{record['exception']}: {record['message']}" if record.get("exception") else record["message"]
    extra = {"py_callstack": record.get("traceback", ""), "timestamp": str(int(record["time"]))}
    if problem := _write(path, {"message": {"message": message, "extraInfo": extra, "errorCode": record["exit_code"]}}):
        sys.stderr.write(f"agent: {problem}\n")


def first_failure(records: Records, first: str = "") -> Mapping[str, Any]:
    """The record of the first rank that failed and was not stopped by its agent; {} if there is none.

    records: of all nodes. first: the node that was the first to report a failure. If the rank itself has not written a
    record, the message has only its exit code.
    """
    agents = [record for name, record in records.items() if name.startswith("node_")]
    failures = [
        ((agent.get("node") != first, failure["time"]), failure)
        for agent in agents
        for failure in agent["failures"]
        if not failure["ended_by_agent"]
    ]
    if not failures:
        return {}
    _, failure = min(failures, key=lambda ordered: ordered[0])
    message = f"rank {failure['rank']} failed with exit code {failure['exit_code']}"
    return {"message": message} | failure | records.get(f"rank_{failure['rank']}.json", {})


def write_missing(records: Records) -> None:
    """Write the records of other nodes unless they exist: in a shared directory, those nodes have written them."""
    write({name: record for name, record in records.items() if not _read(_path(name))})


def records_of(node: str, ranks: range, sent: Any) -> Records:
    """The records that another node has sent; none, with a message, if one is invalid, or about another node or rank.

    ranks: those that the node can have. sent: JSON or its value.
    """
    own, name = {"node": re.compile(re.escape(node)), "rank": ranks}, f"node_{node}.json"
    failure = FAILURE | {"rank": ranks, "ended_by_agent": bool}
    of_agent = {"node?": own["node"], "failures": [failure], "succeeded?": [ranks], "lost?": NAME, "first?": NAME}
    try:
        sent = checked(Mapping[str, object], parse_json(sent) if isinstance(sent, bytes) else sent)
        if name not in sent:
            return {}
        agent = checked(of_agent, sent[name], name)
        names = {f"rank_{failure['rank']}.json" for failure in agent["failures"]}
        return {name: agent} | {one: _checked_record(sent[one], OF_RANK | own) for one in sorted(names & sent.keys())}
    except ValueError as error:
        sys.stderr.write(printable(f"agent: {node}: invalid failure records ({error})") + "\n")
        return {}


def _checked_record(value: object, kind: Any = OF_RANK) -> Mapping[str, Any]:
    record = checked(kind, value, "record")
    # The store through which the agents exchange the records refuses values of 8 MiB.
    return {key: head_and_tail(one) if isinstance(one, str) else one for key, one in record.items()}


def _path(name: str) -> str:
    run = os.environ.get("MUSTER_RUN_DIR")
    return f"{run}/errors/{name}" if run else ""


def _read(path: str) -> Mapping[str, Any]:
    try:
        record = parse_json(read_bytes(path)) if path else {}
        return record if isinstance(record, dict) else {}
    except (OSError, ValueError):
        return {}


def _write(path: str, record: Mapping[str, Any]) -> str:
    """Write a record. Returns why it cannot be written, such as a full disk, which must not change the exit code."""
    try:
        if path:
            write_file(path, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""
