"""The metrics of a training: one JSON object a line, appended to the file that MUSTER_METRICS names.

    from distributed import metrics
    metrics.log(step, steps=1200, loss=loss, accuracy=0.93)

The launchers set MUSTER_METRICS to metrics.jsonl in the run directory, job lists to metrics.jsonl in the output
directory of the job. status.sh, the report, and the decision whether a restart makes progress read that file. A program
that cannot import this module appends such lines itself: {"step": 10, "loss": 2.31}.

Standard library alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

RESERVED = ("time", "event", "rank_seconds", "wait_share")  # keys with a meaning of their own
TAIL = 64 * 1024  # bytes read from either end of a file
HUGE = 1e100  # beyond it a number is as good as infinite
MOST = 2**53  # from here on a float is no longer exact, and a reader may round a step

_warned: set[str] = set()  # files that could not be written


def log(step: int, **values: Any) -> None:
    """Append the values of one step, on rank 0; on other ranks, or without MUSTER_METRICS, nothing is written.

    values: numbers, or what has an item() that returns one, such as a tensor of one element. What is NaN or infinite is
    written as null. `steps` is the number of steps of the whole training. A file that cannot be written is reported
    once on standard error, and the training goes on.

    Raises:
        ValueError: step is no integer from 0 on, a value is no number, or its name is reserved. On all ranks alike.
    """
    step = _step("step", step)
    if "steps" in values:
        values["steps"] = _step("steps", values["steps"])
    for name, value in values.items():
        if name in RESERVED:
            raise ValueError(f"metrics.log: {name}: this name is reserved; give the value another")
        if not _is_number(value) and not hasattr(value, "item"):
            raise ValueError(f"metrics.log: {name}: expected a number, got {type(value).__name__} {value!r:.60}")
        if (count := math.prod(getattr(value, "shape", ()))) != 1:
            raise ValueError(f"metrics.log: {name}: expected one number, got {count}")
    path = os.environ.get("MUSTER_METRICS")
    if path and os.environ.get("RANK", "0") == "0":
        append(path, step, {name: _number(name, value) for name, value in values.items()})


def _step(name: str, step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # also NumPy's integers
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < MOST:
        raise ValueError(f"metrics.log: {name}: expected an integer from 0 on, got {step!r:.60}")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: Any) -> float:
    if _is_number(value):
        return value
    try:
        number = value.item()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"metrics.log: {name}: expected one number: {error}") from None
    if not _is_number(number):
        raise ValueError(f"metrics.log: {name}: expected a number, got {type(number).__name__} {number!r:.60}")
    return number


def append(path: str | os.PathLike[str], step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Append a line in one write, also with values that log() refuses, and return the values as they were written."""
    written = {name: finite_or_none(value) for name, value in values.items()}
    line = json.dumps({"step": step, "time": time.time(), **written}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:
        if os.fspath(path) not in _warned:
            _warned.add(os.fspath(path))
            message = f"metrics: {os.fspath(path)}: {error.strerror}; metrics are lost, the training goes on"
            sys.stderr.write(message + "\n")
    return written


def finite_or_none(value: Any) -> Any:
    """What is NaN or infinite has no JSON."""
    if isinstance(value, list):
        return [finite_or_none(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def newest(path: str | os.PathLike[str]) -> dict[str, float | None]:
    """The newest value of each number in the lines at both ends of a file; None where the newest is not finite.

    The beginning is read as its first line may be the only one with the number of steps.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(TAIL)
            file.seek(max(len(text), os.fstat(file.fileno()).st_size - TAIL))
            text += b"\n" * (file.tell() > len(text)) + file.read()
    except OSError:
        return {}
    found: dict[str, float | None] = {}
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut at its begin or end
        if isinstance(values, dict):
            found.update(
                (key, value)
                for key, value in values.items()
                if value is None or (_is_number(value) and abs(value) < HUGE)
            )
    found.pop("time", None)
    if (found.get("step") or 0) > (found.get("steps") or math.inf):
        del found["steps"]  # the number is not that of all steps
    return found


def furthest(path: str | os.PathLike[str]) -> int | None:
    """The highest step in a file, of all attempts; None: there is none."""
    steps = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            # A line that is cut short, or has no step.
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                steps.append(int(json.loads(line)["step"]))
    return max(steps, default=None)


if __name__ == "__main__":  # for the launcher, which compares it before and after a restart
    found = furthest(sys.argv[1])
    print("" if found is None else found)
