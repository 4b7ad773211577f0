"""Generate lists of jobs.

from distributed_train_helper import *          # with scripts/jobs in PYTHONPATH

jobs = grid(fold=range(3), target_batch_pct=[0.1, 0.29, 0.5, 0.75, 1.0], mode="full_fine_tuning")
jobs = named(jobs, "batch{target_batch_pct:%}")                  # prefix: batch10, batch29, batch50, ...
write(jobs, "jobs_config.json")
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.files import write_file
from distributed.fold import default_participants
from distributed.jobs.config import read_entries

Settings = dict[str, Any]


def grid(**values: Any) -> list[Settings]:
    """One job for each combination of values. An iterable gives several values; a string, number or mapping is one.

    Put a value that is itself a list, such as participants, into a list: participants=[["a", "b"]].
    """
    axes = [list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else [value]
            for value in values.values()]  # fmt: skip
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*axes)]


def product(*lists: Iterable[Mapping[str, Any]]) -> list[Settings]:
    """One job for each combination of one job from each list, with the settings of all jobs in the combination.

    Raises:
        ValueError: the jobs of a combination have different values of a setting.
    """
    found = []
    for parts in itertools.product(*map(list, lists)):
        job: Settings = {}
        for part in parts:
            for key, value in part.items():
                if job.setdefault(key, value) != value:
                    raise ValueError(f"{key}: has the values {job[key]!r} and {value!r} in one job; remove one")
        found.append(job)
    return found


def percent(share: float) -> int:
    """A share in percent, rounded: 0.29 is 29, although int(100 * 0.29) is 28."""
    return round(100 * share)


class PrefixFormatter(string.Formatter):
    """str.format() with percent() for `:%`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """See string.Formatter."""
        return str(percent(value)) if format_spec == "%" else str(super().format_field(value, format_spec))


def named(jobs: Iterable[Mapping[str, Any]], pattern: str) -> list[Settings]:
    """The jobs with a prefix made from their settings: named(jobs, "lr{lr}-batch{target_batch_pct:%}").

    Raises:
        ValueError: a job lacks a setting of the pattern.
    """
    found = []
    for number, job in enumerate(jobs):
        try:
            found.append({**job, "prefix": PrefixFormatter().vformat(pattern, (), job)})
        except KeyError as error:
            raise ValueError(f"job {number}: no setting {error}, used in {pattern!r}") from None
    return found


def write(jobs: Sequence[Mapping[str, Any]], path: str | Path, script: str = "train.py") -> None:
    """Check the jobs and write them, one per line. script: the script that will run them.

    Raises:
        ConfigError: an invalid job, two equal jobs, or two jobs that would write the same directory.
    """
    lines = ",\n".join(f"  {json.dumps(dict(job), ensure_ascii=False)}" for job in jobs)
    text = f"[\n{lines}\n]\n"
    read_entries(json.loads(text), str(path), default_participants(script))
    write_file(str(path), text)
