"""Generate lists of jobs.

from distributed_train_helper import *          # with scripts/jobs in PYTHONPATH

jobs = grid(fold=range(3), target_batch_pct=[0.1, 0.29, 0.5, 0.75, 1.0], mode="full_fine_tuning")
jobs = named(jobs, "batch{target_batch_pct:%}")                  # prefix: batch10, batch29, batch50, ...
write(jobs, "jobs_config.json")
"""

from __future__ import annotations

import itertools
import json
import os
import string
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from distributed.files import user_file, write_file
from distributed.jobs.lists.config import read_entries
from distributed.jobs.lists.job import json_text
from distributed.training.fold import default_participants
from distributed.trust import SHARED

Settings = dict[str, Any]


def grid(**values: Any) -> list[Settings]:
    """One job for each combination of values. An iterable is several values; a string, number or mapping is one value.

    Put a value that is itself a list, such as participants, into a list: participants=[["a", "b"]].

    Raises:
        ValueError: an iterable is empty, or a value cannot be JSON; see plain().
    """
    axes = {key: value if isinstance(value, list) else [value] for key, value in plain_settings(values).items()}
    if empty := [key for key, axis in axes.items() if not axis]:
        raise ValueError(f"{empty[0]}: has no values, so there would be no job; give values, or leave it out")
    return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]


def plain_settings(settings: Mapping[str, Any], within: str = "") -> Settings:
    """Return the settings, with each value converted by plain(). within: prefix of the keys in messages."""
    for key in settings:
        if not isinstance(key, str):
            raise ValueError(f"{within}{key!r}: expected a string as key, got {type(key).__name__}")
    return {key: plain(f"{within}{key}", value) for key, value in settings.items()}


def plain(key: str, value: Any) -> Any:
    """A value in the types of JSON. Arrays, tuples, ranges and other iterables become lists, paths become strings.

    Raises ValueError for other types, and for sets, which have no order.
    """
    if hasattr(value, "tolist"):  # an array or a number of NumPy or PyTorch
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return plain_settings(value, f"{key}.")
    if isinstance(value, str | int | float | None) and not isinstance(value, Enum):
        return value
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | set | frozenset | Enum):
        raise ValueError(
            f"{key}: expected strings, numbers, paths, True, False, None, or lists or mappings of them, got "
            f"{type(value).__name__}; convert it"
        )
    return [plain(key, each) for each in value]


def product(*lists: Iterable[Mapping[str, Any]]) -> list[Settings]:
    """Combine every job of each list with every job of the other lists, as itertools.product() does.

    Each combined job has the settings of all jobs that it is made of.

    Raises:
        ValueError: a list is empty, or the jobs of a combination have different values of a setting.
    """
    axes = [[plain_settings(job) for job in jobs] for jobs in lists]
    if [] in axes:
        raise ValueError(f"list {axes.index([]) + 1} of product() is empty, so there would be no job; leave it out")
    combined = []
    for parts in itertools.product(*axes):
        job: Settings = {}
        for part in parts:
            for key, value in part.items():
                if job.setdefault(key, value) != value:
                    raise ValueError(f"{key}: has the values {job[key]!r} and {value!r} in one job; remove one")
        combined.append(job)
    return combined


def percent(share: float) -> int:
    """A share in percent, rounded: 0.29 is 29, although int(100 * 0.29) is 28."""
    return round(100 * share)


class PrefixFormatter(string.Formatter):
    """Works like str.format(), except that `{share:%}` becomes percent(share)."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return str(percent(value)) if format_spec == "%" else str(super().format_field(value, format_spec))


def named(jobs: Iterable[Mapping[str, Any]], pattern: str) -> list[Settings]:
    """The jobs with a prefix made from their settings: named(jobs, "lr{lr}-batch{target_batch_pct:%}").

    Raises:
        ValueError: a job lacks a setting of the pattern.
    """
    found = []
    for number, job in enumerate(map(plain_settings, jobs)):
        try:
            found.append({**job, "prefix": PrefixFormatter().vformat(pattern, (), job)})
        except KeyError as error:
            raise ValueError(f"job {number}: no setting {error}, used in {pattern!r}") from None
    return found


def write(jobs: Sequence[Mapping[str, Any]], path: str | Path, script: str = "train.py") -> None:
    """Check the jobs and write them to a file, one per line. script: the script that will run them.

    Raises:
        ConfigError: an invalid job, two jobs with equal arguments, or two jobs that would write the same directory.
        ValueError: a value cannot be JSON; see plain().
    """
    lines = ",\n".join(f"  {json_text(plain_settings(job))}" for job in jobs)
    text = f"[\n{lines}\n]\n"
    read_entries(json.loads(text), str(path), default_participants(script))
    write_file(user_file(path), text, SHARED)
