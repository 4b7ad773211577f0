"""One job: its settings, its options, the command that runs it, and where its output goes. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.fold import output_directory
from distributed.training.base_model import hash_of

ID_LENGTH = 10  # hexadecimal digits: 2^40 ids; two jobs of one list with the same id are refused
LONGEST = 131_071  # bytes of one argument or variable that Linux passes on (MAX_ARG_STRLEN without the final NUL)
DEVICE = "device"  # set by the dispatcher


class JobError(ValueError):
    """A job that cannot be run: subject, problem, value, remedy."""


@dataclass(frozen=True)
class Options:
    """What the dispatcher is told about a job: the keys that start with `_`."""

    priority: int = 0  # higher first
    timeout: float | None = None  # seconds that an attempt may take
    retries: int = 1  # attempts after the first that failed
    gpus: int = 1  # of one server
    labels: tuple[str, ...] = ()  # that a server must have
    env: Mapping[str, str] = field(default_factory=dict)  # never written to a file
    expected_seconds: float | None = None
    base_model_hash: str | None = None  # of the base model that the job starts from

    def seconds(self, usual: float) -> float:
        """How long the job is expected to take. usual: for a job that does not say."""
        return usual if self.expected_seconds is None else self.expected_seconds

    def public(self) -> dict[str, Any]:
        """What may be written down: of the environment only the names."""
        said = {
            "priority": self.priority, "timeout": self.timeout, "retries": self.retries, "gpus": self.gpus,
            "labels": list(self.labels), "env": sorted(self.env), "expected_seconds": self.expected_seconds,
            "base_model_hash": self.base_model_hash,
        }  # fmt: skip
        plain = Options()
        return {name: value for name, value in said.items() if value != getattr(plain, name) and value != []}

    @classmethod
    def of_public(cls, said: Mapping[str, Any]) -> Options:
        """What public() gave; the values of the environment are lost."""
        return cls(**{**said, "labels": tuple(said.get("labels", ())), "env": dict.fromkeys(said.get("env", ()), "")})


@dataclass(frozen=True)
class Job:
    """Settings are arguments of the script. The id is a hash of them alone, without options and place in the list."""

    id: str
    settings: Mapping[str, Any]
    options: Options
    output: str  # directory, relative to the working directory
    base: str = ""  # digest of the base model that it starts from
    trains: str = ""  # digest of the base model that it trains

    @property
    def name(self) -> str:
        """For people: the output directory without `experiments/`."""
        return self.output.removeprefix("experiments/")

    @property
    def owner(self) -> str:
        """How its output directory is marked: results from another base model are those of another job."""
        return f"{self.id} from base {hash_of(self.base)}" if self.base else self.id


def job_of(settings: Mapping[str, Any], options: Options, participants: Sequence[str] | None = None) -> Job:
    """The job with these settings. participants: the script's own default list, where it is known.

    Raises:
        JobError: the settings cannot be arguments, or name no output directory.
    """
    if DEVICE in settings:
        raise JobError(f"device={settings[DEVICE]!r}: the device is set by the dispatcher; remove it")
    identifier = job_id(settings)
    try:
        output = output_directory(settings, identifier, participants)
    except ValueError as error:
        raise JobError(str(error)) from None
    job = Job(identifier, dict(settings), options, output)
    if len(os_bytes(document(job))) + len("MUSTER_JOB=") > LONGEST:
        raise JobError(f"too long: as JSON it has more than {LONGEST:,} bytes, the most that Linux passes to a process")
    arguments(job, DEVICE)
    return job


def job_id(settings: Mapping[str, Any]) -> str:
    """Of the settings as canonical JSON (sorted keys): 64 and 64.0 are two jobs, as they are two arguments."""
    try:
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise JobError("a number that is not finite; write a finite one") from None
    return hashlib.sha256(os_bytes(text)).hexdigest()[:ID_LENGTH]


def os_bytes(text: str) -> bytes:
    """As the kernel gets it; raises JobError for what it cannot get."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise JobError(f"{text[:60]!r}: half a character (a lone surrogate); write whole characters") from None


def document(job: Job) -> str:
    """The job as JSON, for MUSTER_JOB: its settings, and its id where no setting has that name."""
    return json.dumps({"id": job.id, **job.settings}, sort_keys=True, ensure_ascii=False)


def arguments(job: Job, device: str) -> list[str]:
    """`--key value` for each key: a list as several values, true as a flag, false and null not at all.

    A value that begins with a dash is passed as it is, too: argparse takes `--lr -5`, but refuses `--name -x`, which a
    script that must take it finds in MUSTER_JOB.

    Raises:
        JobError: a key or value that cannot be an argument.
    """
    found: list[str] = []
    for key, value in {**job.settings, DEVICE: device}.items():
        if not key or key.startswith("-") or any(letter.isspace() or letter in "=\0" for letter in key):
            raise JobError(f"key {key!r}: cannot be the name of an argument; use letters, digits and _")
        if value is None or value is False:
            continue
        found.append(f"--{key}")
        if value is not True:
            found += [text(key, each) for each in (value if isinstance(value, list) else [value])]
    for argument in found:
        if len(os_bytes(argument)) > LONGEST:
            raise JobError(
                f"{argument[:60]!r}...: longer than {LONGEST:,} bytes, the most that Linux passes to a process"
            )
    return found


def text(key: str, value: Any) -> str:
    """One value as the argument that the script gets."""
    if isinstance(value, bool) or value is None:
        raise JobError(f"{key}: true, false or null inside a list cannot be an argument; write a string")
    if isinstance(value, str):
        if "\0" in value:
            raise JobError(f"{key}: holds a NUL character, which no argument can have; remove it")
        return value
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            raise JobError(f"{key}={value}: not finite; write a finite number")
        return json.dumps(value)
    raise JobError(
        f"{key}: expected a string, a number, true, false, null or a list of them, got {type(value).__name__}"
    )
