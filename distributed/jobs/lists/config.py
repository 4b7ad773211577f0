"""Read and check cluster_config.json and jobs_config.json.

    cluster = read_cluster(Path("cluster_config.json"))
    jobs = read_jobs(Path("jobs_config.json"), participants=None)

A ConfigError reports one fault per line: its position (file, job, key), often the value, and the remedy. No server is
contacted.
"""

from __future__ import annotations

import difflib
import graphlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from distributed.files import KIT, removed
from distributed.jobs.host.outputs import AFTER
from distributed.jobs.lists.job import (
    ALL_GPUS,
    GpuId,
    Job,
    JobError,
    JsonFloat,
    Options,
    argument_groups,
    job_of,
    matching,
    too_big,
)
from distributed.training.base_model import HASH
from distributed.transport.owners import owners_here
from distributed.trust import bounded, planted

MAX_SLOTS = 256  # per GPU or, without GPUs, of a server
LARGEST_FILE = 50 * 10**6  # bytes; about 100,000 jobs
SHOWN = 60  # maximum number of characters of a value in a message
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]+\Z")
MIG_UUID = re.compile(r"MIG-[A-Za-z0-9/-]+\Z")
RESERVED = ("CUDA_VISIBLE_DEVICES", "MUSTER_")  # prefixes of variables that the dispatcher sets

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00\n]*$")]


class ConfigError(ValueError):
    """An invalid configuration. The message reports one fault per line, with its remedy; see also raise_faults()."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


def _is_gpu_id(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and bool(MIG_UUID.match(value)))


class StrictModel(BaseModel):
    """A model that refuses unknown keys, does not convert types, and is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ServerOptions(StrictModel):
    """The keys of a server other than host. `defaults` has the same keys."""

    user: Text | None = None
    gpus: int = Field(1, ge=0, le=1024)  # 0: no GPU; slots_per_gpu is then the number of slots
    ssh_key: Text | None = None  # path of a private key; default: chosen by ssh
    port: int | None = Field(None, ge=1, le=65535)
    workdir: Text | None = None  # default: ~/ml-customization if it exists, else the path of this working directory
    python: Text | None = None  # default: .venv/bin/python in workdir if it exists, else python3
    setup: list[Text] = Field(default_factory=list)  # lines of bash, run before each job
    gpu_ids: list[GpuId] | None = None  # nvidia-smi's indices, or UUIDs of MIG instances; default: 0 .. gpus-1
    slots_per_gpu: int = Field(1, ge=1, le=MAX_SLOTS)
    labels: list[Text] = Field(default_factory=list)

    @field_validator("user")
    @classmethod
    def _check_user(cls, user: str | None) -> str | None:
        if user is not None and (user.startswith("-") or "@" in user or any(map(str.isspace, user))):
            raise ValueError("expected a user name")
        return user

    @field_validator("gpu_ids", mode="before")
    @classmethod
    def _check_gpu_ids(cls, ids: Any) -> Any:
        if ids is None or (isinstance(ids, list) and all(map(_is_gpu_id, ids)) and len(set(ids)) == len(ids)):
            return ids
        raise ValueError("expected distinct non-negative integers, or UUIDs of MIG instances (MIG-..., nvidia-smi -L)")


class Server(ServerOptions):
    """One GPU server."""

    host: Text

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host.startswith("-") or not HOST.match(host):
            raise ValueError("expected a host name, an IP address or a Host of ssh_config")
        return host

    @model_validator(mode="after")
    def _check_gpus_match(self) -> Server:
        if self.gpu_ids is not None and "gpus" in self.model_fields_set and len(self.gpu_ids) != self.gpus:
            raise ValueError(f"gpus={self.gpus}, but gpu_ids lists {len(self.gpu_ids)}; remove one of the two")
        return self

    @property
    def name(self) -> str:
        """The name in messages and file names: its host, and its port if given."""
        host = self.host.replace(":", "-").strip("[]")
        return f"{host}-{self.port}" if self.port else host

    @property
    def devices(self) -> list[GpuId]:
        """The GPUs and MIG instances to use; empty if the server has no GPU."""
        return list(range(self.gpus)) if self.gpu_ids is None else self.gpu_ids


class BaseModels(StrictModel):
    """Which keys of a job are base or experiment keys, and how base models are trained; see bases.py.

    The default lists in bases.py apply to the keys that are not listed here.
    """

    base: list[Text] = Field(default_factory=list)  # settings that determine the weights of a base model
    experiment: list[Text] = Field(default_factory=list)  # other settings
    defaults: dict[str, Any] = Field(default_factory=dict)  # values of base keys that a job does not set
    modes: list[Text] | None = Field(["full_fine_tuning"])  # jobs with such a `mode` start from a base model; null: all
    version: int = 1  # increment it after a change of the script or of the data in data_path
    options: dict[str, Any] = Field(default_factory=dict)  # such as _timeout, for the jobs that train base models

    @model_validator(mode="after")
    def _check_classes(self) -> BaseModels:
        for key, count in Counter([*self.base, *self.experiment]).items():
            if count > 1:
                raise ValueError(f"{key} is listed {count} times; list it in one of base, experiment")
        return self

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if faults := [key for key in options if not key.startswith("_")]:
            raise ValueError(f"{faults[0]}: unknown key; did you mean _{faults[0]}?")
        for name in ("_base_model_hash", "_after"):
            if name in options:
                raise ValueError(f"{name}: not for jobs that train base models; remove it")
        options_of({key[1:]: value for key, value in options.items()})
        return options


class ClusterConfig(StrictModel):
    """cluster_config.json."""

    servers: list[Server] = Field(default_factory=list)  # not needed for --backend local
    script_path: Text = "train.py"
    defaults: ServerOptions = Field(default_factory=ServerOptions)
    sbatch: list[Text] = Field(default_factory=list)  # options of sbatch for --backend slurm
    max_queued: int = Field(256, ge=1, le=100_000)  # maximum number of jobs in SLURM's queue, pending or running
    base_models: BaseModels = Field(default_factory=BaseModels)

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in the defaults of each server."""
        defaults, servers = tree.get("defaults", {}), tree.get("servers")
        if not isinstance(defaults, dict) or not isinstance(servers, list):
            return tree
        filled = [_with_defaults(defaults, each) if isinstance(each, dict) else each for each in servers]
        return {**tree, "servers": filled}

    @model_validator(mode="after")
    def _check_duplicates(self) -> ClusterConfig:
        for name, count in Counter(server.name for server in self.servers).items():
            if count > 1:
                raise ValueError(f"server {name} is listed {count} times; list it once, with all its gpus")
        return self


def _with_defaults(defaults: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    applicable = dict(defaults)
    if "gpu_ids" in server:
        applicable.pop("gpus", None)
    if "gpus" in server:
        applicable.pop("gpu_ids", None)
    return applicable | server


class OptionKeys(StrictModel):
    """The keys of a job that start with `_`, without the `_`."""

    priority: int = 0
    timeout: float | None = Field(None, gt=0)
    retries: int = Field(1, ge=0, le=1000)
    gpus: int = Field(1, ge=0, le=1024)  # ALL_GPUS is written "all"
    labels: list[Text] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    expected_seconds: float | None = Field(None, ge=0)
    base_model_hash: str | None = None  # of the base model that the job starts from
    nested: Literal["json", "dotted"] | None = None  # how objects and nested lists are passed
    after: list[Text] = Field(default_factory=list)  # jobs that must be done first

    @field_validator("gpus", mode="before")
    @classmethod
    def _check_gpus(cls, gpus: Any) -> Any:
        if gpus != "all" and not (type(gpus) is int and gpus > 0):
            raise ValueError('expected a positive integer, or "all"')
        return ALL_GPUS if gpus == "all" else gpus

    @field_validator("after", mode="before")
    @classmethod
    def _make_list(cls, after: Any) -> Any:
        return [after] if isinstance(after, str) else after

    @field_validator("base_model_hash")
    @classmethod
    def _check_hash(cls, name: str | None) -> str | None:
        if name is not None and not HASH.match(name):
            raise ValueError("expected 12 hexadecimal digits, as written by distributed_train_helper.py")
        return name

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not VARIABLE.match(name):
                raise ValueError(f"{name[:SHOWN]!r} is not a valid variable name; use letters, digits and _")
            if name.startswith(RESERVED):
                raise ValueError(f"{name} is set by the dispatcher; remove it")
            if "\0" in value:
                raise ValueError(f"the value of {name} contains a NUL character; remove it")
        return env


# ---------------------------------------------------------------- reading


def script_of(option: str | None, cluster: ClusterConfig | None) -> str:
    """The path of a list's script: Muster's train.py, as for launchers, if nothing names one and none is here."""
    if option or (cluster and "script_path" in cluster.model_fields_set):
        return option or cluster.script_path  # type: ignore[union-attr]
    refuse_planted(["train.py"], [os.getcwd()])
    return "train.py" if cluster or Path("train.py").exists() else f"{KIT}/train.py"


def refuse_planted(paths: Iterable[str], trusted: Iterable[str]) -> None:
    """Raise ConfigError if another user has made a path that no call names where all users can create files.

    trusted: directories; who owns one of them, or one above it, is trusted.
    """
    owners = {0, os.geteuid(), *owners_here(trusted)}
    for path in filter(os.path.exists, paths):
        if problem := planted(path, owners):
            raise ConfigError(f"{problem}; it is not used unless the call names it")


def read_cluster(path: Path) -> ClusterConfig:
    """Read cluster_config.json. Raises ConfigError."""
    tree = _parse(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: contains {_kind(tree)}; expected an object with servers")
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, str(path)))) from None


def read_jobs(
    path: Path, participants: Sequence[str] | None = None, retries: int | None = None, listed: Sequence[Job] = ()
) -> list[Job]:
    """The jobs in the order of the file. participants, retries: defaults for jobs without them.

    listed: the jobs that are already in the list when the command `add` adds this file to it. The file may contain
    these jobs again, and its _after may name them.

    Raises:
        ConfigError: an invalid job, two jobs with equal arguments, two jobs that would write the same directory, or an
            _after that matches no job, several jobs, or a job that waits for this one.
    """
    return read_entries(_parse(path), str(path), participants, retries, listed)


def read_entries(
    tree: Any, path: str, participants: Sequence[str] | None = None, retries: int | None = None,
    listed: Sequence[Job] = (),
) -> list[Job]:  # fmt: skip
    """See read_jobs(). tree: the parsed file. path: only for messages."""
    if not isinstance(tree, list) or not tree:
        found = "an empty list" if tree == [] else _kind(tree)
        raise ConfigError(f"{path}: contains {found}; expected a list of jobs: [{{...}}, ...]")
    faults: list[str] = []
    jobs: dict[int, Job] = {}
    for number, entry in enumerate(tree):
        try:
            jobs[number] = _job(entry, participants, retries)
        except (JobError, ConfigError) as error:
            faults += [f"{path}: job {number}: {line}" for line in str(error).splitlines()]
    ids = {job.id for job in jobs.values()}
    others = {job.id: job for job in listed if job.id not in ids}
    faults += [f"{path}: {fault}" for fault in collisions({**others, **jobs})]
    raise_faults(faults, f"{path}: ")
    jobs, unresolved = with_predecessors(jobs, [*others.values(), *jobs.values()])
    raise_faults([f"{path}: {fault}" for fault in unresolved], f"{path}: ")
    return list(jobs.values())


def with_predecessors(jobs: Mapping[int, Job], listed: Sequence[Job]) -> tuple[dict[int, Job], list[str]]:
    """Replace the names in _after by ids of jobs. Returns the jobs, and a message for each fault.

    jobs: the jobs of the file, by position. listed: these jobs, and those that are in the list already.
    """
    exact = {name: job for job in listed for name in (job.output, job.name, job.id)}
    resolved, faults = dict(jobs), []
    for number, job in jobs.items():
        after = []
        for name in job.options.after:
            matches = [exact[name]] if name in exact else matching(listed, name)
            if len(matches) == 1:
                after.append(matches[0].id)
            elif matches:
                several = ", ".join(each.name for each in matches[:5]) + (", ..." if matches[5:] else "")
                faults.append(f"job {number}: _after={name}: matches {len(matches)} jobs ({several}); give one name")
            else:
                names = [each.name for each in listed] if len(faults) < 20 else []  # a comparison takes time
                close = difflib.get_close_matches(name, names, n=1)
                remedy = f"did you mean {close[0]}?" if close else "give a prefix, or a name that --plan shows"
                faults.append(f"job {number}: _after={name}: no such job in this list; {remedy}")
        resolved[number] = replace(job, options=replace(job.options, after=tuple(dict.fromkeys(after))))
    by_id, workdir = {job.id: job for job in listed}, Path.cwd()
    for number, job in resolved.items():
        outputs = "\n".join(f"{workdir}/{by_id[each].output}" for each in job.options.after)
        if too_big(f"{AFTER}={outputs}"):
            count = len(job.options.after)
            faults.append(f"job {number}: _after: {AFTER} would be too long for Linux with {count} jobs; name fewer")
    try:
        graphlib.TopologicalSorter({job.id: job.options.after for job in resolved.values()}).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1][::-1]  # each job waits for the next one
        number = next(number for number, job in resolved.items() if job.id == cycle[0])
        names = [by_id[each].name for each in cycle]
        problem = f"{names[0]} waits for itself; remove it"
        if cycle[2:]:
            problem = f"{' waits for '.join(names)}; remove one of them"
        faults.append(f"job {number}: _after: {problem}")
    return resolved, faults


def raise_faults(faults: Sequence[str], prefix: str = "") -> None:
    """Raise ConfigError if there are faults.

    The message has the first 20 of them and, if there are more, a line that starts with `prefix` and counts the others.
    """
    if faults:
        more = [f"{prefix}and {len(faults) - 20} more faults"] if len(faults) > 20 else []
        raise ConfigError("\n".join([*faults[:20], *more]))


def _job(entry: Any, participants: Sequence[str] | None, retries: int | None) -> Job:
    if not isinstance(entry, dict):
        raise JobError(f"contains {_kind(entry)}; expected an object of arguments")
    settings = {key: value for key, value in entry.items() if not key.startswith("_")}
    options = {key[1:]: value for key, value in entry.items() if key.startswith("_")}
    if retries is not None:
        options.setdefault("retries", retries)
    return job_of(settings, options_of(options), participants)


def options_of(keys: Mapping[str, Any]) -> Options:
    """Check the options of a job. keys: without the `_`. Raises ConfigError."""
    try:
        checked = OptionKeys.model_validate(keys)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, "", "_"))) from None
    return Options(**checked.model_dump() | {"labels": tuple(checked.labels), "after": tuple(checked.after)})


def collisions(jobs: Mapping[Any, Job]) -> Iterator[str]:
    """Check that no two jobs have the same arguments, and that no output directory equals or contains another one.

    Yields a message for each fault. jobs: by position in the file, or by id.
    """
    by_output: dict[str, Any] = {}
    by_id: dict[str, Any] = {}
    by_arguments: dict[tuple[str, ...], Any] = {}
    for number, job in jobs.items():
        arguments = tuple(chain(*sorted(argument_groups(job.settings, job.options.nested))))
        if job.id in by_id:
            yield f"job {number} is the same as job {by_id[job.id]}; remove one of them"
        elif arguments in by_arguments:
            differing = ", ".join(_differences(jobs[by_arguments[arguments]].settings, job.settings))
            yield (
                f"job {number} has the same arguments as job {by_arguments[arguments]} ({differing}); "
                "remove one of them"
            )
        elif job.output in by_output:
            yield (
                f"job {number} would write the same directory as job {by_output[job.output]}: {job.output}; "
                "give one of them another prefix, or remove fold"
            )
        by_id.setdefault(job.id, number)
        by_arguments.setdefault(arguments, number)
        by_output.setdefault(job.output, number)
    for number, job in jobs.items():
        for parent in map(str, Path(job.output).parents):
            if parent in by_output:
                yield f"job {number} would write into {parent}, the directory of job {by_output[parent]}; change prefix"


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """`KEY: VALUE and VALUE` for each key whose values differ."""
    for key in {**one, **other}:
        first, second = (json.dumps(each[key]) if key in each else "missing" for each in (one, other))
        if first != second:
            yield f"{key}: {first[:SHOWN]} and {second[:SHOWN]}"


def _parse(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); the working directory is {Path.cwd()}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"{path}: larger than {LARGEST_FILE // 10**6} MB; split the list")
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant,
                          parse_float=JsonFloat)  # fmt: skip
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {error.msg}{_json_hint(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; write a list of flat objects") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _json_hint(error: json.JSONDecodeError) -> str:
    """The remedy for a common mistake; empty for other mistakes."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if after.startswith(("//", "/*", "#")):
        return "; JSON allows no comments; remove them"
    if (before.endswith(",") and after.startswith(("]", "}"))) or "trailing comma" in error.msg:
        return "; JSON allows no trailing comma; remove it"
    if after.startswith("'"):
        return '; write strings in double quotes: "..."'
    if after.startswith(("True", "False", "None")):
        return "; write true, false or null"
    return ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {twice!r} is given twice in one object; remove one")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a finite number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _explain(error: ValidationError, source: str, prefix: str = "") -> Iterator[str]:
    """One line per fault. prefix: precedes each key, such as `_`."""
    for fault in error.errors():
        location = [str(part) for part in fault["loc"]]
        key = prefix + ".".join(location)
        start = f"{source}: {key}" if source and key else key or source
        if fault["type"] == "extra_forbidden":
            refusal = removed(location[-1:]).partition(": ")[2]
            yield f"{start}: {refusal or f'unknown key; {_suggestion(location, prefix)}'}"
        elif fault["type"] == "missing":
            yield f"{start}: missing; add it"
        else:
            found = fault["input"]
            secret = prefix and location[:1] == ["env"]
            value = "" if secret or isinstance(found, (dict, list)) else f"={json.dumps(found, default=str)[:SHOWN]}"
            yield f"{start}{value}: {fault['msg'].removeprefix('Value error, ')}"


def _suggestion(location: Sequence[str], prefix: str) -> str:
    sections: dict[str, type[StrictModel]] = {"base_models": BaseModels, "defaults": ServerOptions, "servers": Server}
    model: type[StrictModel] = OptionKeys if prefix else sections[location[0]] if location[1:] else ClusterConfig
    known = list(model.model_fields)
    close = difflib.get_close_matches(location[-1], known, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"known keys: {', '.join(prefix + key for key in known)}"
