"""Write lists of jobs: grids, products, and names that no two jobs share.

from distributed_train_helper import *          # with scripts/jobs on the path of Python

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
from distributed.fold import DEFAULT_PARTICIPANTS
from distributed.jobs.config import read_entries

Settings = dict[str, Any]


def grid(**values: Any) -> list[Settings]:
    """One job for each combination of values. A string or a number stands for itself, an iterable for its values.

    A value that is a list itself, as that of participants, stands in a list: participants=[["a", "b"]].
    """
    axes = [list(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else [value]
            for value in values.values()]  # fmt: skip
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*axes)]


def product(*lists: Iterable[Mapping[str, Any]]) -> list[Settings]:
    """One job for each combination of jobs, whose settings are laid together.

    Raises:
        ValueError: a setting has two values.
    """
    found = []
    for parts in itertools.product(*map(list, lists)):
        job: Settings = {}
        for part in parts:
            for key, value in part.items():
                if job.setdefault(key, value) != value:
                    raise ValueError(f"{key}: has the values {job[key]!r} and {value!r} in one job; leave one out")
        found.append(job)
    return found


def percent(share: float) -> int:
    """A share as a whole number of percent, rounded: 0.29 is 29, where int(100 * 0.29) is 28."""
    return round(100 * share)


class Names(string.Formatter):
    """As str.format(); `:%` gives percent() of a share."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """See string.Formatter."""
        return str(percent(value)) if format_spec == "%" else str(super().format_field(value, format_spec))


def named(jobs: Iterable[Mapping[str, Any]], pattern: str) -> list[Settings]:
    """The jobs with a prefix that is made of their settings: named(jobs, "lr{lr}-batch{target_batch_pct:%}").

    Raises:
        ValueError: a job has no setting that the pattern names.
    """
    found = []
    for number, job in enumerate(jobs):
        try:
            found.append({**job, "prefix": Names().vformat(pattern, (), job)})
        except KeyError as error:
            raise ValueError(f"job {number}: has no setting {error}, which {pattern!r} names") from None
    return found


def write(jobs: Sequence[Mapping[str, Any]], path: str | Path, script: str = "train.py") -> None:
    """Check the jobs and write them, a line each. script: the one that they are for.

    Raises:
        ConfigError: a job cannot be run, or two jobs are the same or would write the same directory.
    """
    lines = ",\n".join(f"  {json.dumps(dict(job), ensure_ascii=False)}" for job in jobs)
    text = f"[\n{lines}\n]\n"
    read_entries(json.loads(text), str(path), DEFAULT_PARTICIPANTS if Path(script).name == "train.py" else None)
    write_file(str(path), text)
