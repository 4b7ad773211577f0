"""Training metrics: one JSON object per line, appended to the file that MUSTER_METRICS names.

    from distributed import metrics
    metrics.log(step, steps=1200, loss=loss, accuracy=0.93)

The launchers set MUSTER_METRICS to metrics.jsonl in the run directory; job lists set it to metrics.jsonl in the output
directory of the job. status.sh and the report read that file; launchers read it to see whether a restart made progress.
A program that cannot import this module may append lines such as {"step": 10, "loss": 2.31} itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.trust import SHARED, regular_file, without_links

FROM_OUTPUT = "metrics_from_output.jsonl"  # beside metrics.jsonl, see distributed/launch/output_metrics.py
FROM_TENSORBOARD = "metrics_from_tensorboard.jsonl"  # in the run directory, see distributed/training/event_files.py
EVENT_FILE = "events.out.tfevents."  # start of the names of TensorBoard's files
ORIGINS = {"metrics.jsonl": "", FROM_TENSORBOARD: "from TensorBoard", FROM_OUTPUT: "from the output"}
RESERVED = ("time", "event", "rank_seconds", "wait_share")  # keys that train.py and append() write
TAIL = 64 * 1024  # bytes read from each end of a file
MAX_TAIL = 1 << 20
MAX_READ = 64 << 20  # bytes read from the end of a file
HUGE = 1e100  # readers treat larger numbers as infinity, so that sums and scales stay finite
STEP_LIMIT = 2**53  # larger integers are not exact as floats
MAX_METRICS = 1000  # of a job in a list
POSITIONS = ("step", "steps", "epoch")  # where the training is: numbers only

_warned: set[str] = set()  # files whose write error was printed


def log(step: int, **values: Any) -> None:
    """On rank 0, append the values of one step. On other ranks, or without MUSTER_METRICS, only check the arguments.

    values: numbers, or objects whose item() returns one, such as a tensor of one element. NaN and infinity are written
    as null. `steps` is the number of steps of the whole training. A write error is printed once on standard error and
    does not stop the training.

    Raises:
        ValueError: a step is not an integer from 0 to 2**53 - 1, a name is reserved, or a value is not
            a number. What item() returns is checked on rank 0 only.
    """
    step = _step("step", step)
    if "steps" in values:
        values["steps"] = _step("steps", values["steps"])
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"metrics.log: {name}: this name is reserved; use another name")
        if not _is_number(value) and not hasattr(value, "item"):
            raise ValueError(f"metrics.log: {name}: expected a number, got {type(value).__name__} {value!r:.60}")
        if (count := math.prod(getattr(value, "shape", ()))) != 1:
            raise ValueError(f"metrics.log: {name}: expected one number, got {count}")
    path = os.environ.get("MUSTER_METRICS")
    if path and os.environ.get("RANK", "0") == "0":
        append(path, step, {name: _number(name, value) for name, value in values.items()}, follow=True)


def _step(name: str, step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # also NumPy's integers
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < STEP_LIMIT:
        raise ValueError(f"metrics.log: {name}: expected an integer from 0 to 2**53 - 1, got {step!r:.60}")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    try:
        number = value if _is_number(value) else value.item()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"metrics.log: {name}: expected one number: {error}") from None
    if not _is_number(number):
        raise ValueError(f"metrics.log: {name}: expected a number, got {type(number).__name__} {number!r:.60}")
    return number


def append(path: str | os.PathLike[str], step: int, values: Mapping[str, Any], follow: bool = False) -> dict[str, Any]:
    """Append a line in one write. Return the values as written. Any JSON values and reserved names are allowed.

    follow: the path may have links, see trust.without_links().
    """
    written = {name: finite_or_none(value) for name, value in values.items()}
    line = json.dumps({"step": step, "time": time.time(), **written}) + "\n"
    try:
        found = without_links(os.fspath(path)) if follow else path
        with open(regular_file(found, os.O_WRONLY | os.O_APPEND | os.O_CREAT, SHARED), "ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        if (name := os.fspath(path)) not in _warned:
            _warned.add(name)
            message = f"metrics: {name}: {error.strerror}; metrics are lost, the training continues"
            sys.stderr.write(message + "\n")
    return written


def finite_or_none(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None, also in lists."""
    if isinstance(value, list):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def find(directory: str | os.PathLike[str]) -> str:
    """Path of the metrics of a run: metrics.jsonl if it exists, otherwise the newest other file of ORIGINS, or ""."""
    logged, *others = (os.path.join(directory, name) for name in ORIGINS)
    others = [path for path in others if os.path.exists(path)]
    return logged if os.path.exists(logged) else max(others, key=os.path.getmtime, default="")


def newest(path: str | os.PathLike[str], tail: int = TAIL) -> dict[str, Any]:
    """Return the newest number of each key in the first and the last `tail` bytes of a file.

    null, NaN and infinity are returned as "NaN", except after a number of the same step; of POSITIONS, they are left
    out. The start is read too, as the first line may be the only one with `steps`. Returns {} if the file cannot be
    read.
    """
    try:
        with open(path, "rb", opener=regular_file) as file:
            text = file.read(tail)
            file.seek(max(len(text), os.fstat(file.fileno()).st_size - tail))
            text += b"\n" * (file.tell() > len(text)) + file.read()
    except OSError:
        return {}
    found: dict[str, Any] = {}
    step_of: dict[str, Any] = {}  # key -> the step of its newest number
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue  # an incomplete line
        for key, value in values.items() if isinstance(values, dict) else ():
            if _is_number(value) and abs(value) < HUGE:
                found[key], step_of[key] = value, values.get("step")
            elif (value is None or _is_number(value)) and key not in POSITIONS:
                if step_of.get(key) == values.get("step", -1):
                    continue
                found[key] = "NaN"  # strict JSON has no NaN
    found.pop("time", None)
    if found.get("step", 0) > found.get("steps", math.inf):
        del found["steps"]  # not the number of steps of the whole training
    return found


def last_lines(path: str | os.PathLike[str], most: int | None = None) -> Iterator[bytes]:
    """The lines in the last `most` bytes of a file (default: MAX_READ). Raises OSError.

    Lines that are longer than TAIL bytes are split.
    """
    most = MAX_READ if most is None else most
    with open(path, "rb", opener=regular_file) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            file.seek(size - most)
            file.readline(TAIL)
        yield from iter(lambda: file.readline(TAIL), b"")


def furthest(path: str | os.PathLike[str]) -> int | None:
    """Return the highest step in the last TAIL bytes of a file or, if these have no step, in more; None: no step."""
    steps: list[int] = []
    for most in (TAIL, MAX_TAIL):
        with contextlib.suppress(OSError):
            for line in () if steps else last_lines(path, most):
                # Skip incomplete lines, and lines without a step.
                with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    steps.append(int(json.loads(line)["step"]))
    return max(steps, default=None)
