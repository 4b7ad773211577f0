"""A job: its settings, options, arguments and output directory. Pure functions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.fold import output_directory
from distributed.training.base_model import hash_of

ID_LENGTH = 10  # hexadecimal digits: 2^40 ids; a list with two equal ids is refused
LONGEST = 131_071  # bytes of an argument or variable in Linux (MAX_ARG_STRLEN without the final NUL)
DEVICE = "device"  # argument that the dispatcher sets
AFTER = "MUSTER_AFTER"  # variable with the output directories of the jobs that _after names, one per line


class JobError(ValueError):
    """An invalid job."""


@dataclass(frozen=True)
class Options:
    """Options of a job for the dispatcher: its keys that start with `_`."""

    priority: int = 0  # higher first
    timeout: float | None = None  # seconds, of each attempt
    retries: int = 1  # attempts after the first failure
    gpus: int = 1  # number of GPUs, all on one server
    labels: tuple[str, ...] = ()  # that a server must have
    env: Mapping[str, str] = field(default_factory=dict)  # values are never written to the journal or the results
    expected_seconds: float | None = None
    base_model_hash: str | None = None  # of the base model that the job starts from
    after: tuple[str, ...] = ()  # ids of jobs that must be done first; until with_predecessors(), as written

    def seconds(self, usual: float) -> float:
        """The expected duration. usual: the default for a job without _expected_seconds."""
        return usual if self.expected_seconds is None else self.expected_seconds

    def public(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON; only the names of environment variables."""
        found = {
            "priority": self.priority, "timeout": self.timeout, "retries": self.retries, "gpus": self.gpus,
            "labels": list(self.labels), "env": sorted(self.env), "expected_seconds": self.expected_seconds,
            "base_model_hash": self.base_model_hash, "after": list(self.after),
        }  # fmt: skip
        default = Options()
        return {name: value for name, value in found.items() if value != getattr(default, name) and value != []}

    @classmethod
    def of_public(cls, public: Mapping[str, Any]) -> Options:
        """The inverse of public(); values of environment variables are empty."""
        env = dict.fromkeys(public.get("env", ()), "")
        several = {name: tuple(public.get(name, ())) for name in ("labels", "after")}
        return cls(**{**public, **several, "env": env})


@dataclass(frozen=True)
class Job:
    """A job. Its settings are the arguments of the script; its id is a hash of the settings only."""

    id: str
    settings: Mapping[str, Any]
    options: Options
    output: str  # directory, relative to the working directory
    base: str = ""  # digest of the base model that it starts from
    trains: str = ""  # digest of the base model that it trains
    file: str = ""  # the jobs file that `add` has read it from; empty for a job of --jobs-config

    @property
    def name(self) -> str:
        """The name in messages: the output directory without `experiments/`."""
        return self.output.removeprefix("experiments/")

    @property
    def owner(self) -> str:
        """The content of the owner file in its output directory; includes the hash of the base model, if any."""
        return f"{self.id} from base {hash_of(self.base)}" if self.base else self.id


def job_of(settings: Mapping[str, Any], options: Options, participants: Sequence[str] | None = None) -> Job:
    """The job with these settings. participants: the script's default for this setting, if known.

    Raises:
        JobError: a setting cannot be an argument or part of the output directory.
    """
    if DEVICE in settings:
        raise JobError(f"device={settings[DEVICE]!r}: the device is set by the dispatcher; remove it")
    identifier = job_id(settings)
    try:
        output = output_directory(settings, identifier, participants)
    except ValueError as error:
        raise JobError(str(error)) from None
    job = Job(identifier, dict(settings), options, output)
    if len(os_bytes(muster_job(job))) + len("MUSTER_JOB=") > LONGEST:
        raise JobError(f"too long: more than {LONGEST:,} bytes as JSON, the limit of Linux for an environment variable")
    arguments(job, DEVICE)
    return job


def job_id(settings: Mapping[str, Any]) -> str:
    """A hash of the settings as JSON with sorted keys. 64 and 64.0 differ, as they are different arguments."""
    try:
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise JobError("contains a number that is not finite; write a finite number") from None
    return hashlib.sha256(os_bytes(text)).hexdigest()[:ID_LENGTH]


def os_bytes(text: str) -> bytes:
    """Encode as UTF-8. Raises JobError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise JobError(f"{text[:60]!r}: contains a lone surrogate; write complete characters") from None


def matching(jobs: Iterable[Job], selector: str) -> list[Job]:
    """The jobs with this id, name or output directory; else with this start of an id, prefix, or part of a name."""
    jobs = list(jobs)
    tests: tuple[Callable[[Job], bool], ...] = (
        lambda job: selector in (job.id, job.name, job.output.rstrip("/")),
        lambda job: job.id.startswith(selector),
        lambda job: job.name.startswith(f"{selector}/"),
        lambda job: selector in job.name,
    )
    return next(filter(None, ([job for job in jobs if test(job)] for test in tests)), [])


def muster_job(job: Job) -> str:
    """The value of MUSTER_JOB: the settings as JSON, and the id unless a setting has that name."""
    return json.dumps({"id": job.id, **job.settings}, sort_keys=True, ensure_ascii=False)


def arguments(job: Job, device: str) -> list[str]:
    """`--key value` for each setting: a list as several values, true as a flag, false and null omitted.

    Values that start with a dash are passed unchanged. argparse accepts `--lr -5` but refuses `--name -x`; a script
    that needs such a value can read it from MUSTER_JOB.

    Raises:
        JobError: a key or value that cannot be an argument.
    """
    found: list[str] = []
    for key, value in {**job.settings, DEVICE: device}.items():
        if not key or key.startswith("-") or any(letter.isspace() or letter in "=\0" for letter in key):
            raise JobError(f"key {key!r}: not a valid argument name; use letters, digits and _")
        if value is None or value is False:
            continue
        found.append(f"--{key}")
        if value is not True:
            found += [text(key, each) for each in (value if isinstance(value, list) else [value])]
    for argument in found:
        if len(os_bytes(argument)) > LONGEST:
            raise JobError(f"{argument[:60]!r}...: longer than {LONGEST:,} bytes, the limit of Linux for an argument")
    return found


def text(key: str, value: Any) -> str:
    """The argument for one value. Raises JobError."""
    if isinstance(value, bool) or value is None:
        raise JobError(f"{key}: true, false and null are not allowed in a list; write a string")
    if isinstance(value, str):
        if "\0" in value:
            raise JobError(f"{key}: contains a NUL character; remove it")
        return value
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            raise JobError(f"{key}={value}: not finite; write a finite number")
        return json.dumps(value)
    raise JobError(
        f"{key}: expected a string, a number, true, false, null or a list of them, got {type(value).__name__}"
    )
