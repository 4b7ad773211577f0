"""JSON files of a run that may be missing, cut short or hold anything, and their values. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUGE = 1e100  # beyond it a number is as good as infinite: sums and scales stay finite below it


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The object in a file; empty when there is none, with a note unless the file is missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path}: passed over, it was not written to its end or is damaged ({error})")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path}: passed over, expected a JSON object, got a {type(value).__name__}")
        return {}
    return value


def number(value: object) -> float:
    """A float; NaN for what is no number, infinite, or as good as infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if -HUGE < value < HUGE else math.nan


def integer(value: object) -> int | None:
    """The value where it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str:
    """The value where it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def is_time(value: float) -> bool:
    """Whether a calendar has these Unix seconds."""
    return math.isfinite(value) and 0 < value < 253_000_000_000
