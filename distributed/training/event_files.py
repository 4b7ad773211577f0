"""Copy the scalars of a run from the TensorBoard files below its working directory to its run directory.

usage: module.py training.event_files RUN
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from distributed.attempts import newest
from distributed.files import read_json, write_file
from distributed.metrics import EVENT_FILE, FROM_TENSORBOARD, RESERVED, finite_or_none
from distributed.trust import not_too_deep, regular_file

MOST = 1000  # maximum number of values that are read per scalar
FILE = re.compile(re.escape(EVENT_FILE) + r"(\d{9,})\.")  # the number is the Unix second of its creation
LOSS = re.compile(r"(?i)(?:train(?:ing)?[/_])?loss(?:[/_]train(?:ing)?)?(?:_step)?")


def find(top: str, first: float, last: float, owner: int) -> Iterator[str]:
    """Event files of a user below a directory that were created between these times, in Unix seconds."""
    for directory, below, files in not_too_deep(os.walk(top)):
        below[:] = [name for name in below if name[0] != "." and name != "site-packages"]
        for name in files:
            if (match := FILE.match(name)) and first <= int(match[1]) <= last:
                try:
                    file = regular_file(path := os.path.join(directory, name))
                except OSError:  # for example a FIFO, which would block
                    continue
                is_own = os.fstat(file).st_uid == owner
                os.close(file)
                if is_own:
                    yield path


def runs(logs: Path) -> Iterator[tuple[Path, str, float, float]]:
    """Run directory, working directory, and start and end in Unix seconds of each run."""
    for path in logs.glob("*/run.json"):
        attempt = Path(newest(path.parent))
        facts, verdict = read_json(path), attempt / "verdict.json"
        with suppress(KeyError, ValueError, OverflowError, OSError):
            started = int(datetime.fromisoformat(str(facts["started"])).timestamp())
            written = [verdict] if verdict.exists() else [*path.parent.iterdir(), *attempt.iterdir()]
            if not path.parent.is_symlink():
                ended = max(file.lstat().st_mtime for file in written)
                yield path.parent.resolve(), str(facts["cwd"]), started, ended


def main(arguments: Sequence[str]) -> int:
    run, lines = Path(arguments[0]).resolve(), []
    times = {directory: (cwd, first, last) for directory, cwd, first, last in runs(run.parent)}
    if run not in times:
        return 0
    cwd, first, last = times.pop(run)
    if not (run / "verdict.json").exists():
        last = time.time()
    if any(other_cwd == cwd and start <= last and first <= end for other_cwd, start, end in times.values()):
        return 0  # it is not known which of these runs has written a file
    for file in find(cwd, first, last, run.stat().st_uid):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(file, {"scalars": MOST}).Reload()
        for tag in set(events.Tags()["scalars"]) - {"step", "steps", *RESERVED}:
            key = "loss" if LOSS.fullmatch(tag) else tag
            for one in events.Scalars(tag):
                lines.append({"step": one.step, "time": one.wall_time, key: finite_or_none(one.value)})
    if lines:
        lines.sort(key=lambda line: line["time"])
        write_file(run / FROM_TENSORBOARD, "".join(f"{json.dumps(line)}\n" for line in lines))
    return 0
