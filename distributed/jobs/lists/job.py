"""A job: its settings, options, arguments and output directory. Pure functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed.training.base_model import hash_of
from distributed.training.fold import output_directory

ID_LENGTH = 10  # hexadecimal digits: 2^40 ids; a list with two equal ids is refused
LONGEST = 131_071  # bytes of an argument or variable in Linux (MAX_ARG_STRLEN without the final NUL)
DEVICE = "device"  # argument that the dispatcher sets
MAX_LEVELS = 30  # of nested objects and lists; results and journal add some, and trust.parse_json() has a limit too
ALL_GPUS = 0  # value of Options.gpus

GpuId = int | str  # nvidia-smi's index, or the UUID of a MIG instance


class JobError(ValueError):
    """An invalid job."""


class JsonFloat(float):
    """A float that becomes an argument as the JSON file spells it: 0.00001, not 1e-05."""

    text: str

    def __new__(cls, text: str) -> JsonFloat:
        """See json.loads(parse_float=...). Raises ValueError for 1e999."""
        self = super().__new__(cls, text)
        if self in (float("inf"), float("-inf")):
            raise ValueError(f"{text[:60]} is not finite; write a finite number")
        self.text = text
        return self


@dataclass(frozen=True)
class Options:
    """Options of a job for the dispatcher: its keys that start with `_`."""

    priority: int = 0  # higher first
    timeout: float | None = None  # seconds, of each attempt
    retries: int = 1  # attempts after the first failure
    gpus: int = 1  # number of GPUs, all on one server; ALL_GPUS: as many as the server has
    labels: tuple[str, ...] = ()  # that a server must have
    env: Mapping[str, str] = field(default_factory=dict)  # values are never written to the journal or the results
    expected_seconds: float | None = None
    base_model_hash: str | None = None  # of the base model that the job starts from
    nested: str | None = None  # how objects and nested lists are passed: json, dotted; None: they are refused
    after: tuple[str, ...] = ()  # jobs that must be done first: their names, which with_predecessors() replaces by ids

    def seconds(self, default: float) -> float:
        """The expected duration in seconds. default: for a job without _expected_seconds."""
        return default if self.expected_seconds is None else self.expected_seconds

    def public(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON; of environment variables, only the names."""
        lists = {"labels": list(self.labels), "env": sorted(self.env), "after": list(self.after)}
        values, default = {**vars(self), **lists, "gpus": self.gpus or "all"}, Options()
        return {name: value for name, value in values.items() if value != getattr(default, name) and value != []}

    @classmethod
    def of_public(cls, public: Mapping[str, Any]) -> Options:
        """The inverse of public(); values of environment variables are empty."""
        env = dict.fromkeys(public.get("env", ()), "")
        gpus = ALL_GPUS if public.get("gpus") == "all" else public.get("gpus", 1)
        several = {name: tuple(public.get(name, ())) for name in ("labels", "after")}
        return cls(**{**public, **several, "gpus": gpus, "env": env})


@dataclass(frozen=True)
class Job:
    """A job. Its settings are the arguments of the script; its id is a hash of the settings only."""

    id: str
    settings: Mapping[str, Any]
    options: Options
    output: str  # directory, relative to the working directory
    base: str = ""  # digest of the base model that it starts from
    trains: str = ""  # digest of the base model that it trains
    leak: str = ""  # why its result is too optimistic: its base model is trained on the held-out participant
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
    """The job with these settings. participants: the script's default for the setting `participants`, if known.

    Raises:
        JobError: a setting cannot be an argument or part of the output directory.
    """
    if DEVICE in settings:
        raise JobError(f"device={settings[DEVICE]!r}: the device is set by the dispatcher; remove it")
    if is_deeper(settings, MAX_LEVELS):
        raise JobError(f"nested too deeply: more than {MAX_LEVELS} levels; write fewer")
    identifier = job_id(settings)
    try:
        output = output_directory(settings, identifier, participants)
    except ValueError as error:
        raise JobError(str(error)) from None
    job = Job(identifier, dict(settings), options, output)
    if too_big(f"MUSTER_JOB={muster_job(job)}"):
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


def too_big(text: str) -> bool:
    """Whether a text is too long for Linux as an argument or as NAME=VALUE. Raises JobError as os_bytes() does."""
    return len(os_bytes(text)) > LONGEST


def matching(jobs: Iterable[Job], selector: str) -> list[Job]:
    """The jobs whose id, name or output directory is the selector.

    If there are none: the jobs in that directory; otherwise those whose id starts with the selector; otherwise those
    whose name contains it.
    """
    jobs = list(jobs)
    tests: tuple[Callable[[Job], bool], ...] = (
        lambda job: selector in (job.id, job.name, job.output.rstrip("/")),
        lambda job: job.name.startswith(f"{selector}/"),
        lambda job: job.id.startswith(selector),
        lambda job: selector in job.name,
    )
    return next(filter(None, ([job for job in jobs if test(job)] for test in tests)), [])


def muster_job(job: Job) -> str:
    """The value of MUSTER_JOB: settings, hash of the base model and, unless a setting is named `id`, the id."""
    base = {"_base_model_hash": job.options.base_model_hash} if job.options.base_model_hash else {}
    return json.dumps({"id": job.id, **job.settings, **base}, sort_keys=True, ensure_ascii=False)


def environment(job: Job) -> dict[str, str]:
    """The variables of a job that do not depend on its server."""
    digest = job.base or job.trains
    variables = {"MUSTER_JOB": muster_job(job)} | ({"MUSTER_BASE_MODEL_DIGEST": digest} if digest else {})
    return {**job.options.env, **variables}


def arguments(job: Job, device: str) -> list[str]:
    """The arguments for all settings and for the device; see argument_groups().

    Values that start with a dash are passed unchanged. argparse accepts `--lr -5` but refuses `--name -x`; a script
    that needs such a value can read it from MUSTER_JOB.

    Raises:
        JobError: a key or value that cannot be an argument.
    """
    groups = argument_groups({**job.settings, DEVICE: device}, job.options.nested)
    result = [argument for group in groups for argument in group]
    for argument in result:
        if too_big(argument):
            raise JobError(f"{argument[:60]!r}...: longer than {LONGEST:,} bytes, the limit of Linux for an argument")
    return result


def argument_groups(settings: Mapping[str, Any], nested: str | None) -> Iterator[list[str]]:
    """Yield `--key value` for each setting: several values for a list, `--key` for true, nothing for false and null.

    nested: see Options. Raises JobError.
    """
    keys: set[str] = set()
    for key, value in flattened(settings, nested == "dotted"):
        if key in keys:
            raise JobError(f"{key}: given by a key with a dot and by an object; remove one of them")
        keys.add(key)
        if value is True:
            yield [f"--{key}"]
        elif value is not None and value is not False:
            yield [f"--{key}", *value_arguments(key, value, nested)]


def flattened(settings: Mapping[str, Any], dotted: bool, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values; if dotted, {"a": {"b": 1}} becomes the key a.b. Raises JobError for an invalid key."""
    for key, value in settings.items():
        if not key or key.startswith("-") or any(letter.isspace() or letter in "=\0" for letter in key):
            raise JobError(f"key {key!r}: not a valid argument name; use letters, digits and _")
        if dotted and isinstance(value, dict) and value:
            yield from flattened(value, dotted, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def value_arguments(key: str, value: Any, nested: str | None) -> list[str]:
    """The arguments for one value. Raises JobError."""
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in items):
        return [text(key, each) for each in items]
    if nested == "json":
        return [json_text(value)]
    if value in ([], {}):
        kind = "list" if value == [] else "object"
        raise JobError(f'{key}: empty {kind}; leave the key out, or set _nested to "json" to pass {value}')
    if isinstance(value, dict):
        raise JobError(
            f'{key}: contains an object; set _nested to "dotted" to pass --{key}.KEY VALUE, or to "json" to pass JSON'
        )
    inside = "lists and objects" if any(isinstance(each, list | dict) for each in items) else "true, false and null"
    raise JobError(f'{key}: {inside} are not allowed in a list; write strings, or set _nested to "json"')


def text(key: str, value: Any) -> str:
    """The argument for a string or number. Raises JobError."""
    if not isinstance(value, str):
        return json_text(value)
    if "\0" in value:
        raise JobError(f"{key}: contains a NUL character; remove it")
    return value


def json_text(value: Any) -> str:
    """A value as JSON. A JsonFloat keeps its spelling; other floats get a point: YAML 1.1 reads 1e-05 as a string."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json_text(key)}: {json_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(json_text, value)) + "]"
    if isinstance(value, JsonFloat):
        return value.text
    encoded = json.dumps(value, ensure_ascii=False)
    return re.sub(r"^(-?\d)e", r"\1.0e", encoded) if isinstance(value, float) else encoded


def is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists in a value are nested more than `levels` deep."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deeper(each, levels - 1) for each in inside)
