"""Decide from the settings of jobs which base models they need.

    rules = Rules.of(base_models, "train.py")       the section base_models, with its defaults
    plan = plan_of(jobs, rules)                     the base models, and the jobs that start from each
    leaks(plan)                                     jobs whose base model is trained on their held-out participant

A base model is identified by the SHA-256 of the canonical form of the settings that determine it. The job that trains
the base model gets only these settings, so no other setting can change the weights. If the jobs that start from a base
model spell the same path in different ways, the job that trains the base model gets the spelling of the first of them.
Only settings files (config) and the names of the participants in data_path are read from disk.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from distributed.jobs.lists.config import BaseModels, ClusterConfig, options_of, raise_faults
from distributed.jobs.lists.job import DEVICE, Job, Options, arguments, job_id
from distributed.terminal import plural
from distributed.training import fold
from distributed.training.base_model import CACHE, TRAINING, hash_of
from distributed.training.settings import JOB_DEFAULTS, Train

FORM = 1  # version of the canonical form; every digest depends on it
BASE_ONLY = {"mode": "base_only"}
SHOWN = 10  # maximum number of leaks in one message
LEAK_REMEDY = "to avoid leaks, list fold under base in base_models, or set base_participants"
BASE = (
    "participants", "base_participants", "model", "batch_size", "lr", "augmentation", "data_path", "base_steps", "seed",
    "config",
)  # fmt: skip
EXPERIMENT = ("mode", "fold", "participant", "target_data_pct", "target_batch_pct", "steps", "prefix")
UNORDERED = ("participants", "base_participants")  # lists whose order has no effect
HELD_OUT = ("fold", "participant")
# Defaults of train.py.
TRAIN_DEFAULTS: dict[str, Any] = {
    "participants": list(fold.DEFAULT_PARTICIPANTS),
    "model": "small",
    "batch_size": JOB_DEFAULTS["train"]["batch_size"],
    "lr": JOB_DEFAULTS["train"]["learning_rate"],
    "base_steps": JOB_DEFAULTS["train"]["steps"],
    "seed": Train.model_fields["seed"].default,
}


@dataclass(frozen=True)
class Rules:
    """Whether each key of a job is a base or experiment key, and the defaults of missing keys."""

    script: str
    section: BaseModels
    key_classes: Mapping[str, str]  # key -> base or experiment
    script_defaults: Mapping[str, Any]
    options: Options  # of the jobs that train base models

    @classmethod
    def of(cls, section: BaseModels, script: str) -> Rules:
        """The rules of a section base_models for a script. Raises ConfigError for a default of a non-base key."""
        classes = dict.fromkeys(BASE, "base") | dict.fromkeys(EXPERIMENT, "experiment")
        for key_class in ("base", "experiment"):
            classes |= dict.fromkeys(getattr(section, key_class), key_class)
        for one, other in (HELD_OUT, HELD_OUT[::-1]):  # both keys name the held-out participant
            if one in section.base and other not in section.experiment:
                classes[other] = "base"
        raise_faults([
            f"base_models: defaults: {key}: not a base key, its default has no effect; list it under base, or remove it"
            for key in section.defaults if classes.get(key) != "base"
        ])  # fmt: skip
        script_defaults = TRAIN_DEFAULTS if fold.default_participants(script) else {}
        options = options_of({key[1:]: value for key, value in section.options.items()})
        return cls(script_name(script), section, classes, script_defaults, options)

    def needs_base(self, job: Job) -> bool:
        return self.section.modes is None or job.settings.get("mode") in self.section.modes

    def unclassified(self, job: Job) -> list[str]:
        return [key for key in arguments_in(job.settings) if key not in self.key_classes]

    def settings(self, job: Job) -> dict[str, Any]:
        """The canonical form of the settings that determine the base model of a job.

        Defaults are filled in, null and false are left out, 64.0 becomes 64, participants are sorted, and fold is a
        position in the sorted list. Raises ValueError for contradictory settings, such as fold and participant.
        """
        complete = self._with_defaults(job.settings)
        found = {key: canonical(value) for key, value in complete.items() if self.key_classes.get(key) == "base"}
        for key in found.keys() & set(UNORDERED):
            found[key] = sorted(map(str, as_list(complete[key])))
        held_out = fold.participant_of(complete, None)
        if not found.keys() & set(HELD_OUT):
            return found
        if held_out is not None and "participants" in found:
            return without(found, *HELD_OUT) | {"fold": found["participants"].index(held_out)}
        exact = {"fold": fold.fold_of(complete), "participant": held_out}
        return without(found, *HELD_OUT) | {key: exact[key] for key in found.keys() & set(HELD_OUT)}

    def digest(self, settings: Mapping[str, Any]) -> str:
        """The SHA-256 of canonical settings, including the content of the settings file that they name."""
        form = {"form": FORM, "version": self.section.version, "script": self.script}
        form["settings"] = same_spelling(settings)
        if isinstance(path := settings.get("config"), str) and (content_hash := content_hash_at(path)):
            form["config"] = content_hash
        text = json.dumps(form, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def held_out(self, job: Job) -> str | None:
        """The participant that a job holds out; None if there is none, or its name is unknown."""
        complete = self._with_defaults(job.settings)
        names = self._participants(complete)
        return fold.participant_of(complete if names is None else {**complete, "participants": names}, None)

    def trained_on(self, settings: Mapping[str, Any]) -> list[str] | None:
        """The participants that a base model is trained on; None if unknown. settings: canonical."""
        if "base_participants" in settings:
            return [str(name) for name in as_list(settings["base_participants"])]
        participants = self._participants(settings)
        if participants is None:
            return None
        held_out = fold.participant_of({**settings, "participants": participants}, None)
        return [name for name in participants if name != held_out]

    def _participants(self, settings: Mapping[str, Any]) -> list[str] | None:
        if "participants" in settings:
            return [str(name) for name in as_list(settings["participants"])]
        if "data_path" in settings:
            return participants_at(Path(str(settings["data_path"])).expanduser().absolute())
        return None

    def _with_defaults(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the script gets, and the defaults of the others."""
        explicit = {**self.section.defaults, **arguments_in(settings)}
        defaults = {} if explicit.get("config") else self.script_defaults  # a settings file may change defaults
        if explicit.get("data_path"):  # the default participants are those in data_path
            defaults = without(defaults, "participants")
        return arguments_in({**defaults, **explicit})


def rules_of(cluster: ClusterConfig | None, script: str) -> Rules:
    """The rules in the cluster config. Raises ConfigError."""
    return Rules.of(cluster.base_models if cluster else BaseModels(), script)


@cache
def content_hash_at(path: str) -> str | None:
    """The SHA-256 of a settings file; None if it is not on this machine."""
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except (OSError, ValueError):  # ValueError: a NUL character
        return None


@cache  # called for every job of a list
def participants_at(directory: Path) -> list[str] | None:
    try:
        return list(fold.participants_in(directory))
    except ValueError:
        return None


def script_name(script: str) -> str:
    """The path of a script in one spelling: relative if it is inside the working directory, otherwise absolute."""
    here, path = Path.cwd(), Path(os.path.abspath(script))
    inside = [each for each in (path, path.parent.resolve() / path.name) if each.is_relative_to(here)]
    return str(inside[0].relative_to(here) if inside else path)


def arguments_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without null and false, which are not passed to the script."""
    return {key: value for key, value in settings.items() if value is not None and value is not False}


def without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def canonical(value: Any) -> Any:
    """The value with whole floats as integers: 64.0 is 64."""
    if isinstance(value, list):
        return [canonical(each) for each in value]
    if isinstance(value, dict):
        return {key: canonical(each) for key, each in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def same_spelling(value: Any) -> Any:
    """The value with each path in one spelling: ./a//b/ becomes a/b. `..` is kept, as it may follow a symbolic link."""
    if isinstance(value, list):
        return [same_spelling(each) for each in value]
    if isinstance(value, Mapping):
        return {key: same_spelling(each) for key, each in value.items()}
    return str(PurePosixPath(value)) if isinstance(value, str) and "/" in value and "://" not in value else value


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class SharedBase:
    """One base model and the jobs that start from it."""

    digest: str
    settings: Mapping[str, Any]  # canonical
    jobs: tuple[Job, ...]

    @property
    def name(self) -> str:
        """The first characters of the digest."""
        return hash_of(self.digest)

    @property
    def subject(self) -> str:
        """A description of the base model for messages."""
        return f"base {self.name} of {plural(len(self.jobs), 'job')}, the first {self.jobs[0].name}"


@dataclass(frozen=True)
class BasePlan:
    """The jobs of a list, each with the digest of its base model, and the base models."""

    jobs: tuple[Job, ...]
    bases: Mapping[str, SharedBase] = field(default_factory=dict)  # by digest


def plan_of(jobs: Sequence[Job], rules: Rules) -> BasePlan:
    """The base models that these jobs need.

    Raises:
        ConfigError: an unclassified key, contradictory settings, an output directory inside that of base models, or a
            _base_model_hash that does not match the settings.
    """
    faults: list[str] = []
    planned: list[Job] = []
    settings: dict[str, dict[str, Any]] = {}
    jobs_by_digest: dict[str, list[Job]] = {}
    unclassified: dict[str, list[Job]] = {}
    for job in jobs:
        if job.output.startswith((f"{CACHE}/", f"{TRAINING}/")):
            faults.append(f"{job.name}: {job.output} is reserved for base models; change the prefix of the job")
        if not rules.needs_base(job):
            planned.append(job)
            continue
        for key in rules.unclassified(job):
            unclassified.setdefault(key, []).append(job)
        try:
            base_settings = rules.settings(job)
            held_out, trained_on = rules.held_out(job), rules.trained_on(base_settings) or ()
        except ValueError as error:
            faults.append(f"{job.name}: {error}")
            continue
        digest = rules.digest(base_settings)
        name, requested_name = hash_of(digest), job.options.base_model_hash
        if requested_name not in (None, name):
            faults.append(f"{job.name}: _base_model_hash={requested_name}, but its settings give {name}; remove it")
        settings.setdefault(digest, base_settings)
        leak = f"holds out {held_out}, and its base model {name} is trained on it" if held_out in trained_on else ""
        planned.append(replace(job, base=digest, leak=leak, options=replace(job.options, base_model_hash=name)))
        jobs_by_digest.setdefault(digest, []).append(planned[-1])
    raise_faults([unclassified_fault(key, affected, rules) for key, affected in unclassified.items()] or faults)
    shared = {digest: SharedBase(digest, settings[digest], tuple(jobs)) for digest, jobs in jobs_by_digest.items()}
    return BasePlan(tuple(planned), shared)


def unclassified_fault(key: str, jobs: Sequence[Job], rules: Rules) -> str:
    others = f" and {len(jobs) - 1} more" if jobs[1:] else ""
    close = difflib.get_close_matches(key, rules.key_classes, 1, 0.8)
    return (
        f"key {key!r} of job {jobs[0].name}{others}: not classified; "
        + (f"did you mean {close[0]!r}? Otherwise " if close else "")
        + "list it in base_models: under base if base models depend on it, else under experiment"
    )


def training_job(base: SharedBase, rules: Rules, retries: int | None = None) -> Job:
    """The job that trains a base model. GPUs, labels and environment default to those of the first job in `base`.

    Raises:
        JobError: a default in the section base_models cannot be passed to the script as an argument.
    """
    first = base.jobs[0].options
    defaults = {name: getattr(first, name) for name in ("gpus", "labels", "env", "nested")}
    defaults["priority"] = max(job.options.priority for job in base.jobs)
    if retries is not None:
        defaults["retries"] = retries
    options = replace(rules.options, **without(defaults, *(key[1:] for key in rules.section.options)))
    settings = {**base.settings, **BASE_ONLY}
    name = job_id({**same_spelling(settings), "digest": base.digest})
    job = Job(name, settings, options, f"{TRAINING}/{base.name}", trains=base.digest)
    arguments(job, DEVICE)
    return job


def leaks(plan: BasePlan) -> list[str]:
    """A line for each job whose held-out participant is in the training data of its base model."""
    return [f"{job.name}: {job.leak}" for job in plan.jobs if job.leak]


def not_checked(plan: BasePlan, rules: Rules) -> list[SharedBase]:
    """Base models that leaks() cannot check, because their participants are unknown on this machine.

    A base model whose settings contain fold or participant is trained without that participant and needs no check.
    """
    return [
        base for base in plan.bases.values()
        if rules.trained_on(base.settings) is None and not base.settings.keys() & set(HELD_OUT)
        and any(arguments_in(job.settings).keys() & set(HELD_OUT) for job in base.jobs)
    ]  # fmt: skip


def leak_warnings(plan: BasePlan, rules: Rules) -> list[str]:
    """Lines about jobs whose base model is, or may be, trained on the participant that they hold out."""
    unknown = [
        f"{base.subject}: its participants are unknown on this machine, cannot check for leaks; set participants"
        for base in not_checked(plan, rules)
    ]
    found = [*leaks(plan), *unknown]
    more = [f"and {len(found) - SHOWN} more"] if found[SHOWN:] else []
    return [*found[:SHOWN], *more, LEAK_REMEDY] if found else []


def differences(one: Job, other: Job, rules: Rules) -> list[tuple[str, str, str, str]]:
    """(key, class, value in one job, value in the other job) for each difference; base keys come first."""
    first, second = (readable(same_spelling(rules.settings(each))) for each in (one, other))
    found = [(key, "base", shown(first, key), shown(second, key)) for key in differing(first, second)]
    for key in differing(one.settings, other.settings):
        if (key_class := rules.key_classes.get(key, "not classified")) != "base":
            found.append((key, key_class, shown(one.settings, key), shown(other.settings, key)))
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {**one, **other} if shown(one, key) != shown(other, key))


def readable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical settings with the name of the held-out participant in place of fold."""
    names, position = settings.get("participants"), settings.get("fold")
    if not isinstance(names, list) or not isinstance(position, int) or position not in range(len(names)):
        return dict(settings)
    return without(settings, "fold") | {"held-out": names[position]}


def shown(settings: Mapping[str, Any], key: str) -> str:
    """The value of a key as JSON; "-" if it is missing."""
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "-"
