"""cluster_config.json and jobs_config.json become checked values.

    cluster = read_cluster(Path("cluster_config.json"))
    jobs = read_jobs(Path("jobs_config.json"), participants=None)

A fault is a ConfigError whose every line names the file, the place, the value and the remedy. Nothing is contacted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from distributed.jobs.job import Job, JobError, Options, job_of
from distributed.training.base_model import HASH

LARGEST_FILE = 50 * 10**6  # bytes: some 100,000 jobs
SHOWN = 60  # characters of a value in a message
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")  # of an environment variable
HOST = re.compile(r"[A-Za-z0-9_.:%\[\]-]+\Z")
RESERVED = ("CUDA_VISIBLE_DEVICES", "MUSTER_")  # set by the dispatcher

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00\n]*$")]


class ConfigError(ValueError):
    """A configuration is wrong; each line of the message is one fault with its remedy."""


class Checked(BaseModel):
    """Nothing unknown, nothing changed later, no conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ServerOptions(Checked):
    """What a server may say, and `defaults` for all servers."""

    user: Text | None = None
    gpus: int = Field(1, ge=0, le=1024)  # 0: no GPU; slots_per_gpu is then the number of slots
    ssh_key: Text | None = None  # private key; without it ssh chooses
    port: int | None = Field(None, ge=1, le=65535)
    workdir: Text | None = None  # default: ~/ml-customization where it is there, else the working directory
    python: Text | None = None  # default: .venv/bin/python of workdir where it is there, else python3
    setup: list[Text] = Field(default_factory=list)  # lines of bash, run before each job
    gpu_ids: list[int] | None = None  # which GPUs, by nvidia-smi's index; default: 0 .. gpus-1
    slots_per_gpu: int = Field(1, ge=1, le=256)
    labels: list[Text] = Field(default_factory=list)

    @field_validator("user")
    @classmethod
    def _no_option(cls, user: str | None) -> str | None:
        if user is not None and (user.startswith("-") or "@" in user or any(map(str.isspace, user))):
            raise ValueError("expected a user name")
        return user

    @field_validator("gpu_ids")
    @classmethod
    def _ids(cls, ids: list[int] | None) -> list[int] | None:
        if ids is not None and (len(set(ids)) < len(ids) or any(number < 0 for number in ids)):
            raise ValueError("expected different non-negative numbers")
        return ids


class Server(ServerOptions):
    """One GPU server."""

    host: Text

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        if host.startswith("-") or not HOST.match(host):
            raise ValueError("expected a host name, an address or a Host of ssh_config")
        return host

    @model_validator(mode="after")
    def _ids_match(self) -> Server:
        if self.gpu_ids is not None and "gpus" in self.model_fields_set and len(self.gpu_ids) != self.gpus:
            raise ValueError(f"gpus={self.gpus}, but gpu_ids has {len(self.gpu_ids)}; give one of the two")
        return self

    @property
    def devices(self) -> list[int]:
        """nvidia-smi's indices of the GPUs to use; empty without GPUs."""
        return list(range(self.gpus)) if self.gpu_ids is None else self.gpu_ids


class BaseModels(Checked):
    """What base models depend on: each key of a job is one of base, experiment and ignored; see bases.py.

    A key that is named here leaves the class that it has by default.
    """

    base: list[Text] = Field(default_factory=list)  # settings that determine the weights of a base model
    experiment: list[Text] = Field(default_factory=list)  # what an experiment does with it
    ignored: list[Text] = Field(default_factory=list)  # what changes no result
    defaults: dict[str, Any] = Field(default_factory=dict)  # values of base keys that a job leaves out
    modes: list[Text] | None = Field(["full_fine_tuning"])  # of the jobs that start from a base model; null: all do
    version: int = 1  # raise it when the script, or the data in data_path, has changed
    options: dict[str, Any] = Field(default_factory=dict)  # of the jobs that train base models, such as _timeout
    expected_mb: float | None = Field(None, gt=0)  # size of a base model, for the plan

    @model_validator(mode="after")
    def _one_class_each(self) -> BaseModels:
        listed = [*self.base, *self.experiment, *self.ignored]
        for key in listed:
            if listed.count(key) > 1:
                raise ValueError(
                    f"{key} is listed {listed.count(key)} times; list it in one of base, experiment, ignored"
                )
        return self

    @field_validator("options")
    @classmethod
    def _of_a_job(cls, options: dict[str, Any]) -> dict[str, Any]:
        if faults := [key for key in options if not key.startswith("_")]:
            raise ValueError(f"{faults[0]}: an option begins with _: did you mean _{faults[0]}?")
        if "_base_model_hash" in options:
            raise ValueError("_base_model_hash: a job that trains a base model starts from none; remove it")
        options_of({key[1:]: value for key, value in options.items()})
        return options


class Cluster(Checked):
    """cluster_config.json."""

    servers: list[Server] = Field(min_length=1)
    script_path: Text = "train.py"
    defaults: ServerOptions = Field(default_factory=ServerOptions)
    sbatch: list[Text] = Field(default_factory=list)  # options of sbatch for --backend slurm
    max_queued: int = Field(256, ge=1, le=100_000)  # jobs that may be in SLURM's queue or running at once
    base_models: BaseModels = Field(default_factory=BaseModels)

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, tree: Any) -> Any:
        """Lay each server over the defaults."""
        if not isinstance(tree, dict) or not isinstance(tree.get("servers"), list):
            return tree
        said = tree.get("defaults", {})
        if not isinstance(said, dict):
            return tree
        servers = [_over(said, server) if isinstance(server, dict) else server for server in tree["servers"]]
        return {**tree, "servers": servers}

    @model_validator(mode="after")
    def _different_servers(self) -> Cluster:
        names = [server_name(server) for server in self.servers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"server {name} is listed {names.count(name)} times; list it once, with all its gpus")
        return self


def _over(defaults: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    known = dict(defaults)
    if "gpu_ids" in server:
        known.pop("gpus", None)
    if "gpus" in server:
        known.pop("gpu_ids", None)
    return known | server


def server_name(server: Server) -> str:
    """As people and files call it: the host, with the port where one is given."""
    host = server.host.replace(":", "-").strip("[]")
    return f"{host}-{server.port}" if server.port else host


class JobOptions(Checked):
    """The keys of a job that start with `_`, without it."""

    priority: int = 0
    timeout: float | None = Field(None, gt=0)
    retries: int = Field(1, ge=0, le=1000)
    gpus: int = Field(1, ge=1, le=1024)
    labels: list[Text] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    expected_seconds: float | None = Field(None, ge=0)
    base_model_hash: str | None = None  # of the base model that it starts from

    @field_validator("base_model_hash")
    @classmethod
    def _is_hash(cls, name: str | None) -> str | None:
        if name is not None and not HASH.match(name):
            raise ValueError("expected 12 hexadecimal digits, as the helper writes them")
        return name

    @field_validator("env")
    @classmethod
    def _names(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not NAME.match(name):
                raise ValueError(f"{name[:SHOWN]!r} is no name of a variable")
            if name.startswith(RESERVED):
                raise ValueError(f"{name} is set by the dispatcher; remove it")
            if "\0" in value:
                raise ValueError(f"the value of {name} holds a NUL character; remove it")
        return env


# ---------------------------------------------------------------- reading


def read_cluster(path: Path) -> Cluster:
    """Raises ConfigError."""
    tree = _parse(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {_kind(tree)}; expected an object with servers")
    try:
        return Cluster.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, str(path)))) from None


def read_base_models(path: Path) -> BaseModels:
    """The section base_models in a file of its own. Raises ConfigError."""
    tree = _parse(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {_kind(tree)}; expected an object with {', '.join(BaseModels.model_fields)}")
    try:
        return BaseModels.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, str(path), within="base_models"))) from None


def read_jobs(path: Path, participants: Sequence[str] | None = None, retries: int | None = None) -> list[Job]:
    """The jobs in the order of the file. participants, retries: defaults for jobs that name none.

    Raises:
        ConfigError: also where two jobs are the same, or would write the same directory.
    """
    return read_entries(_parse(path), str(path), participants, retries)


def read_entries(
    tree: Any, path: str, participants: Sequence[str] | None = None, retries: int | None = None
) -> list[Job]:
    """See read_jobs(). tree: what the file holds."""
    if not isinstance(tree, list) or not tree:
        found = "an empty list" if tree == [] else _kind(tree)
        raise ConfigError(f"{path}: holds {found}; expected a list of jobs: [{{...}}, ...]")
    faults: list[str] = []
    jobs: dict[int, Job] = {}
    for number, entry in enumerate(tree):
        try:
            jobs[number] = _job(entry, participants, retries)
        except (JobError, ConfigError) as error:
            faults += [f"{path}: job {number}: {line}" for line in str(error).splitlines()]
    faults += [f"{path}: {fault}" for fault in collisions(jobs)]
    raise_faults(faults, f"{path}: ")
    return list(jobs.values())


def raise_faults(faults: Sequence[str], start: str = "") -> None:
    """Raises ConfigError where there are faults: each is a line; those after the 20th are counted, behind `start`."""
    if faults:
        more = [f"{start}and {len(faults) - 20} more faults"] if len(faults) > 20 else []
        raise ConfigError("\n".join([*faults[:20], *more]))


def _job(entry: Any, participants: Sequence[str] | None, retries: int | None) -> Job:
    if not isinstance(entry, dict):
        raise JobError(f"holds {_kind(entry)}; expected an object of arguments")
    settings = {key: value for key, value in entry.items() if not key.startswith("_")}
    said = {key[1:]: value for key, value in entry.items() if key.startswith("_")}
    if retries is not None:
        said.setdefault("retries", retries)
    return job_of(settings, options_of(said), participants)


def options_of(said: Mapping[str, Any]) -> Options:
    """Of keys without their `_`. Raises ConfigError."""
    try:
        checked = JobOptions.model_validate(said)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, "", "_"))) from None
    return Options(**checked.model_dump() | {"labels": tuple(checked.labels)})


def collisions(jobs: dict[int, Job]) -> Iterator[str]:
    """Jobs that are the same, or whose output directories are the same or inside one another, by their numbers."""
    seen: dict[str, int] = {}
    ids: dict[str, int] = {}
    for number, job in jobs.items():
        if job.id in ids:
            yield f"job {number} is the same as job {ids[job.id]}; remove one of them"
        elif job.output in seen:
            yield (
                f"job {number} would write the same directory as job {seen[job.output]}: {job.output}; "
                "give one of them another prefix, or leave out fold"
            )
        ids.setdefault(job.id, number)
        seen.setdefault(job.output, number)
    for number, job in jobs.items():
        for above in Path(job.output).parents:
            if str(above) in seen:
                yield f"job {number} would write into {above}, the directory of job {seen[str(above)]}; change prefix"


def _parse(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); looked in {Path.cwd()}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"{path}: larger than {LARGEST_FILE // 10**6} MB; split the list")
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {error.msg}{_habit(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; write a list of flat objects") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _habit(error: json.JSONDecodeError) -> str:
    """What other languages allow and JSON does not."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip()
    if after.startswith(("//", "/*", "#")):
        return "; JSON has no comments: remove it"
    if (before.endswith(",") and after.startswith(("]", "}"))) or "trailing comma" in error.msg:
        return "; JSON has no comma behind the last entry: remove it"
    if after.startswith("'"):
        return '; write strings in double quotes: "..."'
    if after.startswith(("True", "False", "None")):
        return "; write true, false or null"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice in one object; remove one")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a finite number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _explain(error: ValidationError, source: str, sign: str = "", within: str = "") -> Iterator[str]:
    """One line a fault. within: the section that the whole file is."""
    for fault in error.errors():
        place = [str(part) for part in fault["loc"]]
        key = sign + ".".join(place)
        place = [within, *place] if within else place
        start = f"{source}: {key}" if source and key else key or source
        if fault["type"] == "extra_forbidden":
            yield f"{start}: unknown key; {_nearest(place, sign)}"
        elif fault["type"] == "missing":
            yield f"{start}: missing; add it"
        else:
            found = fault["input"]
            secret = sign and place[:1] == ["env"]
            value = "" if secret or isinstance(found, (dict, list)) else f"={json.dumps(found, default=str)[:SHOWN]}"
            yield f"{start}{value}: {fault['msg'].removeprefix('Value error, ')}"


def _nearest(place: Sequence[str], sign: str) -> str:
    if sign:
        kind: type[BaseModel] = JobOptions
    elif len(place) == 1:
        kind = Cluster
    elif place[0] == "base_models":
        kind = BaseModels
    else:
        kind = ServerOptions if place[0] == "defaults" else Server
    known = list(kind.model_fields)
    close = difflib.get_close_matches(place[-1], known, n=1)
    return f"did you mean {sign}{close[0]}?" if close else f"known are {', '.join(sign + name for name in known)}"
