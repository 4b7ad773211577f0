"""Which base models the jobs of a list need: found from their settings alone.

Pure, but for the names of the participants in a data_path and the content of a settings file.

    rules = Rules.of(base_models, "train.py")       the section base_models, with its defaults
    plan = plan_of(jobs, rules)                     unique base models, and the jobs that start from each
    leaks(plan, rules)                              jobs whose held-out participant their base was trained on

A base model is identified by a SHA-256 over a canonical form of the settings that determine it. The job that trains it
gets exactly these settings, so nothing else can change the weights.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from distributed.config import JOB_DEFAULTS, Train
from distributed.fold import DEFAULT_PARTICIPANTS, fold_of, participant_of, participants_in
from distributed.jobs.config import BaseModels, options_of, raise_faults
from distributed.jobs.job import DEVICE, Job, Options, arguments, job_id
from distributed.training.base_model import CACHE, TRAINING, hash_of

FORM = 1  # version of the canonical form; part of every digest
BASE_ONLY = {"mode": "base_only"}
LEAK_REMEDY = "list fold under base in base_models, give base_participants, or call with --allow-shared-held-out"
BASE = (
    "participants", "base_participants", "model", "batch_size", "lr", "augmentation", "data_path", "base_steps", "seed",
    "config",
)  # fmt: skip
EXPERIMENT = ("mode", "fold", "participant", "target_data_pct", "target_batch_pct", "steps", "prefix")
UNORDERED = ("participants", "base_participants")  # lists of names
HELD_OUT = ("fold", "participant")
# What train.py takes for arguments that are left out.
TRAIN_DEFAULTS: dict[str, Any] = {
    "participants": list(DEFAULT_PARTICIPANTS),
    "model": "small",
    "batch_size": JOB_DEFAULTS["train"]["batch_size"],
    "lr": JOB_DEFAULTS["train"]["learning_rate"],
    "base_steps": JOB_DEFAULTS["train"]["steps"],
    "seed": Train.model_fields["seed"].default,
}


@dataclass(frozen=True)
class Rules:
    """How the keys of jobs are classified, and what stands for a key that is left out."""

    script: str
    kinds: Mapping[str, str]  # key -> base, experiment or ignored
    defaults: Mapping[str, Any]  # of the section base_models
    script_defaults: Mapping[str, Any]
    modes: Sequence[str] | None
    version: int
    options: Options  # of the jobs that train base models
    own_options: frozenset[str]  # those of them that were given
    expected_mb: float | None

    @classmethod
    def of(cls, said: BaseModels, script: str) -> Rules:
        """The rules of a section base_models, for a script. Raises ConfigError: a default of what is no base key."""
        kinds = dict.fromkeys(BASE, "base") | dict.fromkeys(EXPERIMENT, "experiment")
        for kind in ("base", "experiment", "ignored"):
            kinds |= dict.fromkeys(getattr(said, kind), kind)
        for one, other in (HELD_OUT, HELD_OUT[::-1]):  # two ways to say the same
            if one in said.base and other not in (*said.experiment, *said.ignored):
                kinds[other] = "base"
        raise_faults([
            f"base_models: defaults: {key}: no base key, so a default has no effect; list it under base, or remove it"
            for key in said.defaults if kinds.get(key) != "base"
        ])  # fmt: skip
        known = TRAIN_DEFAULTS if Path(script).name == "train.py" else {}
        given = {key[1:]: value for key, value in said.options.items()}
        return cls(
            str(Path(script)), kinds, said.defaults, known, said.modes, said.version, options_of(given),
            frozenset(given), said.expected_mb,
        )  # fmt: skip

    def needs_base(self, job: Job) -> bool:
        """Whether a job starts from a base model."""
        return self.modes is None or job.settings.get("mode") in self.modes

    def unclassified(self, job: Job) -> list[str]:
        return [key for key in arguments_in(job.settings) if key not in self.kinds]

    def settings(self, job: Job) -> dict[str, Any]:
        """The canonical form of the settings that determine the base model of a job.

        Defaults filled in; what is null or false left out, as it is no argument; 64.0 as 64; participants sorted, and
        fold a number in that order. Raises ValueError where they contradict each other, as fold and participant may.
        """
        laid = self._laid(job.settings)
        found = {key: canonical(value) for key, value in laid.items() if self.kinds.get(key) == "base"}
        for key in found.keys() & set(UNORDERED):
            found[key] = sorted(map(str, listed(laid[key])))
        held_out = participant_of(laid, None)
        if not found.keys() & set(HELD_OUT):
            return found
        if held_out is not None and "participants" in found:
            return without(found, *HELD_OUT) | {"fold": found["participants"].index(held_out)}
        exact = {"fold": fold_of(laid), "participant": held_out}
        return without(found, *HELD_OUT) | {key: exact[key] for key in found.keys() & set(HELD_OUT)}

    def digest(self, settings: Mapping[str, Any]) -> str:
        """SHA-256 of canonical settings, and of what stands in the settings file that they name."""
        form = {"form": FORM, "version": self.version, "script": self.script, "settings": settings}
        if isinstance(path := settings.get("config"), str) and (content := content_at(path)):
            form["config"] = content
        text = json.dumps(form, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def held_out(self, job: Job) -> str | None:
        """The participant that a job holds out; None when not known."""
        laid = self._laid(job.settings)
        known = self._participants(laid)
        return participant_of(laid if known is None else {**laid, "participants": known}, None)

    def trained_on(self, settings: Mapping[str, Any]) -> list[str] | None:
        """The participants that a base model is trained on; None when not known. settings: canonical."""
        if "base_participants" in settings:
            return [str(name) for name in listed(settings["base_participants"])]
        known = self._participants(settings)
        if known is None:
            return None
        held_out = participant_of({**settings, "participants": known}, None)
        return [name for name in known if name != held_out]

    def _participants(self, settings: Mapping[str, Any]) -> list[str] | None:
        if "participants" in settings:
            return [str(name) for name in listed(settings["participants"])]
        if "data_path" in settings:
            return participants_at(Path(str(settings["data_path"])).expanduser().absolute())
        return None

    def _laid(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings over the defaults, without what is no argument."""
        said = {**self.defaults, **arguments_in(settings)}
        own = {} if said.get("config") else self.script_defaults  # a settings file brings its own
        if said.get("data_path"):  # the participants are those in it
            own = without(own, "participants")
        return arguments_in({**own, **said})


@cache
def content_at(path: str) -> str | None:
    """SHA-256 of a settings file; None when it is not on this machine."""
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except (OSError, ValueError):  # a NUL is in no path
        return None


@cache  # a list of jobs asks for one directory hundreds of times
def participants_at(directory: Path) -> list[str] | None:
    try:
        return list(participants_in(directory))
    except ValueError:
        return None


def arguments_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without null and false, which are no arguments."""
    return {key: value for key, value in settings.items() if value is not None and value is not False}


def without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def canonical(value: Any) -> Any:
    """One number has one form: 64.0 is 64."""
    if isinstance(value, list):
        return [canonical(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Base:
    """One unique base model."""

    digest: str
    settings: Mapping[str, Any]  # canonical
    jobs: tuple[Job, ...]  # that start from it

    @property
    def name(self) -> str:
        """The first characters of the digest."""
        return hash_of(self.digest)


@dataclass(frozen=True)
class Plan:
    """The jobs of a list, each with its base model, and the base models."""

    jobs: tuple[Job, ...]
    bases: Mapping[str, Base] = field(default_factory=dict)  # by digest


def plan_of(jobs: Sequence[Job], rules: Rules) -> Plan:
    """The base models that these jobs need.

    Raises:
        ConfigError: a key that is not classified, or a _base_model_hash that is not that of the job's settings.
    """
    faults: list[str] = []
    planned: list[Job] = []
    settings: dict[str, dict[str, Any]] = {}
    unclassified: dict[str, list[Job]] = {}
    for job in jobs:
        if job.output.startswith((f"{CACHE}/", f"{TRAINING}/")):
            faults.append(f"{job.name}: {job.output} is a directory of base models; give the job another prefix")
        if not rules.needs_base(job):
            planned.append(job)
            continue
        for key in rules.unclassified(job):
            unclassified.setdefault(key, []).append(job)
        try:
            found = rules.settings(job)
            rules.held_out(job)
        except ValueError as error:
            faults.append(f"{job.name}: {error}")
            continue
        digest = rules.digest(found)
        said = job.options.base_model_hash
        if said not in (None, hash_of(digest)):
            faults.append(f"{job.name}: _base_model_hash={said}, but its settings give {hash_of(digest)}; remove it")
        settings[digest] = found
        planned.append(replace(job, base=digest, options=replace(job.options, base_model_hash=hash_of(digest))))
    raise_faults([refusal(key, using, rules) for key, using in unclassified.items()] or faults)
    using: dict[str, list[Job]] = {}
    for job in planned:
        if job.base:
            using.setdefault(job.base, []).append(job)
    return Plan(tuple(planned), {each: Base(each, settings[each], tuple(jobs)) for each, jobs in using.items()})


def refusal(key: str, jobs: Sequence[Job], rules: Rules) -> str:
    """What is said about a key that is not classified."""
    others = f" and {len(jobs) - 1} more" if jobs[1:] else ""
    close = difflib.get_close_matches(key, rules.kinds, 1, 0.8)
    return (
        f"key {key!r} of job {jobs[0].name}{others}: not classified; "
        + (f"did you mean {close[0]!r}? Otherwise " if close else "")
        + "list it in base_models: under base when base models depend on it, else under experiment or ignored"
    )


def training_job(base: Base, rules: Rules, retries: int | None = None) -> Job:
    """The job that trains a base model. GPUs, labels and environment are those of its first job, if not in the rules.

    Raises:
        JobError: a default cannot be an argument.
    """
    first = base.jobs[0].options
    given = rules.options
    options = replace(
        given,
        priority=given.priority if "priority" in rules.own_options else max(j.options.priority for j in base.jobs),
        gpus=given.gpus if "gpus" in rules.own_options else first.gpus,
        labels=given.labels if "labels" in rules.own_options else first.labels,
        env=given.env if "env" in rules.own_options else first.env,
        retries=given.retries if "retries" in rules.own_options or retries is None else retries,
    )
    settings = {**base.settings, **BASE_ONLY}
    name = job_id({**settings, "digest": base.digest})
    job = Job(name, settings, options, f"{TRAINING}/{base.name}", trains=base.digest)
    arguments(job, DEVICE)
    return job


def leaks(plan: Plan, rules: Rules) -> list[str]:
    """Jobs whose held-out participant is in the training data of their base model. A line each."""
    found = []
    for base in plan.bases.values():
        known = rules.trained_on(base.settings)
        for job in base.jobs:
            if known and (held_out := rules.held_out(job)) in known:
                found.append(f"{job.name}: holds out {held_out}, and its base model {base.name} is trained on it")
    return found


def not_checked(plan: Plan, rules: Rules) -> list[Base]:
    """Base models for which leaks() knows no participants, as those in a data_path that is not on this machine.

    One that depends on the held-out participant itself is trained without it.
    """
    return [
        base for base in plan.bases.values()
        if rules.trained_on(base.settings) is None and not base.settings.keys() & set(HELD_OUT)
        and any(arguments_in(job.settings).keys() & set(HELD_OUT) for job in base.jobs)
    ]  # fmt: skip


def differences(one: Job, other: Job, rules: Rules) -> list[tuple[str, str, str, str]]:
    """(key, its class, its value in one job, in the other): first what needs two base models."""
    first, second = readable(rules.settings(one)), readable(rules.settings(other))
    found = [(key, "base", shown(first, key), shown(second, key)) for key in differing(first, second)]
    for key in differing(one.settings, other.settings):
        if (kind := rules.kinds.get(key, "not classified")) != "base":
            found.append((key, kind, shown(one.settings, key), shown(other.settings, key)))
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ."""
    return sorted(key for key in {**one, **other} if shown(one, key) != shown(other, key))


def readable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Canonical settings with the name of the participant in place of the number of the fold."""
    names, fold = settings.get("participants"), settings.get("fold")
    if not isinstance(names, list) or not isinstance(fold, int) or fold not in range(len(names)):
        return dict(settings)
    return without(settings, "fold") | {"held-out": names[fold]}


def shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "-"


# ---------------------------------------------------------------- what is saved


def avoided(plan: Plan) -> int:
    """Base trainings that are not needed, as jobs share them."""
    return sum(len(base.jobs) - 1 for base in plan.bases.values())


def gpu_hours_saved(plan: Plan, rules: Rules) -> float | None:
    """None: `options` of base_models have no _expected_seconds."""
    seconds = rules.options.expected_seconds
    if seconds is None:
        return None
    gpus = sum((len(base.jobs) - 1) * training_job(base, rules).options.gpus for base in plan.bases.values())
    return gpus * seconds / 3600


def copies(found: Iterable[Base], servers: int) -> int:
    """The most copies that so many servers without common files need: each gets a base model once."""
    return sum(min(len(base.jobs), servers) for base in found)
