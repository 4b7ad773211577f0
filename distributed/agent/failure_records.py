"""What the processes of a run write about their end, for the verdict: errors/ in the folder of the run.

rank_<rank>.json is a rank's own record, with its traceback; node_<name>.json is what the agent saw of its ranks.
Without a folder (MUSTER_RUN_DIR is not set) nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Records = Mapping[str, Mapping[str, Any]]  # name of a file in errors/ -> what stands in it


def node_name() -> str:
    """What this node is called in logs and verdicts."""
    return os.environ.get("MUSTER_NODE") or socket.gethostname()


def write_of_rank(code: int, error: BaseException) -> None:
    """This rank's own record: it ends with this exit code because of this error."""
    if not _folder():
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    record = {
        "rank": rank,
        "local_rank": local_rank,
        "node": node_name(),
        "pid": os.getpid(),
        "time": time.time(),
        "exit_code": code,
        "exception": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    _write(f"rank_{rank}.json", record)


def write_of_node(deaths: Sequence[Mapping[str, Any]], ended_well: Sequence[int], lost: str | None = None) -> None:
    """What this node's agent saw: the ranks that failed, those that ended with 0, and the node it could not hear."""
    more = {"ended_well": list(ended_well), "lost": lost}
    record = {"node": node_name(), "deaths": list(deaths)} | {name: value for name, value in more.items() if value}
    _write(f"node_{node_name()}.json", record)


def of_this_node(ranks: Iterable[int]) -> Records:
    """The records that were written here, of the node and of these ranks."""
    names = [f"node_{node_name()}.json", *(f"rank_{rank}.json" for rank in ranks)]
    return {name: record for name in names if (record := _read(name))}


def keep(records: Records) -> None:
    """Write down what other nodes have told. What they have written here themselves, in a shared folder, stays."""
    for name, record in records.items():
        _write(name, record, os.link)


def _folder() -> Path | None:
    run = os.environ.get("MUSTER_RUN_DIR")
    return Path(run, "errors") if run else None


def _read(name: str) -> dict[str, Any]:
    folder = _folder()
    try:
        return json.loads((folder / name).read_bytes()) if folder else {}
    except (OSError, ValueError):
        return {}


def _write(name: str, record: object, put: Callable[[Path, Path], object] = os.replace) -> None:
    """Write beside, then put it into its place: a reader sees the whole or nothing. A full disk is told, no more."""
    folder = _folder()
    if not folder:
        return
    beside = folder / f".{name}.{os.getpid()}"
    try:
        beside.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        put(beside, folder / name)
    except FileExistsError:
        pass
    except OSError as error:
        with contextlib.suppress(OSError):  # a rank's own words may go to that disk too
            sys.stderr.write(f"cannot write {folder / name}: {error.strerror}\n")
    with contextlib.suppress(OSError):
        beside.unlink(missing_ok=True)
