"""Read the JSON files of a run, which may be missing, incomplete or of any content."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.metrics import HUGE
from distributed.trust import parse_json, printable, read_bytes

MAX_RECORD, MAX_SIGNAL = 2 << 20, 4 << 10  # bytes of a failure record, and of the record of a signal


def most_bytes(name: str) -> int:
    """The largest size of a file with this name in errors/."""
    return MAX_SIGNAL if name.startswith("signal_") else MAX_RECORD


def read_record(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the content of a file in errors/, as read_object() does."""
    return read_object(path, notes, most_bytes(path.name))


def read_object(path: Path, notes: list[str], most: int = 0) -> dict[str, Any]:
    """Return the JSON object in a file; {} if it cannot be read. Appends why to `notes`, unless the file is missing.

    most: bytes; see read_bytes().
    """
    try:
        value = parse_json(read_bytes(path, most=most).decode(errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = printable(str(error))[:200]
        notes.append(f"{printable(str(path))}: ignored: unreadable, incomplete or damaged ({reason})")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{printable(str(path))}: ignored: expected a JSON object, got a {type(value).__name__}")
        return {}
    return value


def number(value: object) -> float:
    """The value as a float; NaN if it is not a number, not finite, or at least HUGE."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if -HUGE < value < HUGE else math.nan


def integer(value: object) -> int | None:
    """The value if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str:
    """The value if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def node_changes(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """When and why nodes joined or left the run, from the content of run.json."""
    changes = [entry for entry in map(mapping, listed(facts.get("changes"))) if text(entry.get("message"))]
    times = [number(entry.get("time")) for entry in changes]
    clocks = [time.strftime("%H:%M:%S ", time.localtime(one)) if is_time(one) else "" for one in times]
    return tuple(clock + entry["message"] for clock, entry in zip(clocks, changes, strict=True))


def is_time(value: float) -> bool:
    """Whether the value is a positive Unix time, in seconds, that datetime can represent."""
    return math.isfinite(value) and 0 < value < 253_000_000_000
