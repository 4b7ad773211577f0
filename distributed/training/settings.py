"""Read settings from a YAML file and `section.key=value` arguments, and validate them.

    options = parser("A trainer.").parse_intermixed_args()  # --config my.yaml train.steps=100
    settings, batch = for_ranks(options, world=2)

An unknown key, a wrong type or a contradiction raises `ConfigError`; each line names source, key, value and problem.
Paths in the settings are relative to the working directory, not to the file.

Try it: python -m distributed.training.settings --nproc 2 --config config/quickstart.yaml train.learning_rate=3e-4
"""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import math
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distributed.files import version
from distributed.training.fold import DEFAULT_PARTICIPANTS, output_directory, participant_of, participants_in, short
from distributed.trust import MAX_LINES, bounded

DIGITS = 100  # limit for an integer; Python refuses to convert more than 4,300
# Raised by PyYAML for `!!int x`, `!!bool x`, `!!timestamp x`.
CONVERSION_ERRORS = (ValueError, LookupError, AttributeError, TypeError)
LARGEST_FILE = 10**6  # bytes; --config may name a checkpoint by mistake
MOST_VALUES = 20_000  # in a file, where each alias counts as a copy of what it refers to
NOTHING: Mapping[str, Any] = {}
NO_FILE = "settings"  # used in messages in place of a file name if there is no --config
BASE_ONLY, FULL_FINE_TUNING, FROM_SCRATCH = "base_only", "full_fine_tuning", "from_scratch"  # values of data.mode
TWO_PHASES = (BASE_ONLY, FULL_FINE_TUNING, FROM_SCRATCH)


class ConfigError(ValueError):
    """The settings are wrong; each line of the message is one fault."""

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


# ---------------------------------------------------------------- the settings


def _absolute(path: Path) -> Path:
    """Make a path absolute. A relative path starts at the working directory, and ~ is the home directory."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"no home directory of a user {path.parts[0].removeprefix('~')!r} on this machine") from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ValueError(f"cannot access it: {error.strerror}; grant permission, or use another path") from None


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("expected a share, above 0 and at most 1 (a quarter: 0.25)")
    return value


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Share = Annotated[float, AfterValidator(_share)]


class Section(BaseModel):
    """Base of all sections: no unknown keys, immutable, and no booleans as numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_as_number(cls, value: Any, info: Any) -> Any:
        numbers = (int, float, int | None, float | None)
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in numbers:
            raise ValueError("expected a number, not true or false")
        return value


class Model(Section):
    """The GPT. GPT-2 124M is 12 layers, 12 heads, width 768, block 1024, vocabulary 50304."""

    n_layer: int = Field(4, ge=1)
    n_head: int = Field(4, ge=1)
    n_embd: int = Field(128, ge=1)
    block_size: int = Field(128, ge=1)  # tokens per window; the longest context
    vocab_size: int | None = Field(None, ge=2)  # null: 256 for text; must be given for .bin token files
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    bias: bool = False

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Model:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them")
        return self


class Data(Section):
    """Training data. Without a path: the Python language reference that ships with the interpreter."""

    # A participant is a domain of the text; one of them is the target of cross-validation.
    # path: a text file, a directory of text files, a .bin token file, or a directory with train.bin.
    path: AbsolutePath | None = None
    domains: list[str] | None = Field(None, min_length=1)  # names of the participants; null: all domains of the text
    participant: str | None = Field(None, min_length=1)  # the target; null: none
    mode: Literal["heldout", "single", "pooled", "base_only", "full_fine_tuning", "from_scratch"] = "heldout"
    base_participants: list[str] | None = Field(None, min_length=1)  # of the base model; null: all but the target
    target_data_pct: Share = 1.0  # share of the target's training text that is trained on
    target_batch_pct: Share = 1.0  # share of the target's text in each global batch; the rest: base participants
    held_out: float = Field(0.1, gt=0.0, lt=1.0)  # share of each text, at its end, that is for evaluation
    workers: int = Field(0, ge=0)  # data loading processes per rank
    pin_memory: bool = True  # on GPUs, batches are copied from page-locked memory

    @field_validator("path")
    @classmethod
    def _file_or_directory(cls, path: Path | None) -> Path | None:
        if path and not _exists(path):
            raise ValueError(f"no such file or directory (working directory {Path.cwd()})")
        if path and not (path.is_file() or path.is_dir()):
            raise ValueError("neither a file nor a directory")
        if path and path.is_file() and path.stat().st_size == 0:
            raise ValueError("the file is empty: there is nothing to train on")
        return path

    @model_validator(mode="after")
    def _mode_fits(self) -> Data:
        if self.mode not in ("heldout", BASE_ONLY) and self.participant is None:
            raise ValueError(f"mode={self.mode}: no target; set data.participant, or give --fold N")
        if self.mode == BASE_ONLY and self.participant in (self.base_participants or ()):
            raise ValueError(f"base_participants: {self.participant} is the target; remove it")
        for name, share in (("target_data_pct", self.target_data_pct), ("target_batch_pct", self.target_batch_pct)):
            if share != 1 and self.mode not in (FULL_FINE_TUNING, FROM_SCRATCH):
                raise ValueError(
                    f"{name}={share}: no effect in mode {self.mode}; remove it, or set mode={FULL_FINE_TUNING} or "
                    f"mode={FROM_SCRATCH}"
                )
        return self


class Train(Section):
    """Length, batch size, optimizer and evaluation."""

    steps: int | None = Field(None, ge=1, le=10**12)
    epochs: float | None = Field(None, gt=0)
    base_steps: int | None = Field(None, ge=1, le=10**12)  # in mode base_only: replaces steps and epochs
    base_model: AbsolutePath | None = None  # directory, for mode full_fine_tuning; null: $MUSTER_BASE_MODEL
    batch_size: int | None = Field(None, ge=1)  # windows per step, over all ranks
    batch_size_per_device: int | None = Field(None, ge=1)  # windows per step and rank
    accumulation: int = Field(1, ge=1)  # micro-batches per step on each rank
    learning_rate: float = Field(3e-4, gt=0)
    min_learning_rate: float = Field(0.0, ge=0)  # end of the cosine
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    grad_clip: float = Field(1.0, ge=0)  # largest norm of all gradients; 0: no clipping
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 where the GPU has it, else fp32
    compile: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False  # on GPUs, the same results in each run, bit for bit; slower
    evaluate_every: int = Field(100, ge=0)  # steps between held-out losses; 0: only at the end
    evaluate_windows: int | None = Field(None, ge=1)  # at most this many; null: all held-out windows
    seed: int = Field(1337, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _no_contradictions(self) -> Train:
        _exactly_one(self, "steps", "epochs")
        _exactly_one(self, "batch_size", "batch_size_per_device")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} is above learning_rate={self.learning_rate}: "
                "the cosine falls from the second to the first"
            )
        return self


class Distributed(Section):
    """Strategy, backend and device of the ranks."""

    strategy: Literal["auto", "single", "dp", "ddp", "fsdp"] = "auto"
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    device: str = "auto"  # cpu, cuda, or cuda:N for GPU N; auto: a GPU if available
    timeout: float = Field(600.0, gt=0, le=1e8)  # seconds, for joining and for each collective
    find_unused_parameters: bool = False
    # fsdp: reduce gradients once per step, not in each micro-batch; each GPU then holds all gradients in float32.
    reduce_once: bool = False

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
            raise ValueError("unknown device; give cpu, cuda, cuda:N or auto")
        return device

    @model_validator(mode="after")
    def _backend_fits_device(self) -> Distributed:
        kind = self.device.partition(":")[0]
        if (kind, self.backend) in (("cpu", "nccl"), ("cuda", "gloo")):
            raise ValueError(f"device={self.device} contradicts backend={self.backend}: leave one of them at auto")
        return self


class Checkpoint(Section):
    """Where and how often checkpoints are written, and whether a run resumes."""

    dir: AbsolutePath | None = None  # null: in the run directory, so that another launch starts over
    # Steps between checkpoints; 0: only at the end and when stopped; auto: see distributed/checkpoint/interval.py.
    every: Annotated[int, Field(ge=0)] | Literal["auto"] = 100
    mtbf: float = Field(86_400.0, gt=0)  # for auto: mean seconds between two failures
    keep: int = Field(3, ge=1)  # number of newest checkpoints to keep, in addition to the best one
    resume: Literal["auto", "never"] = "auto"  # auto: from the newest valid checkpoint in dir, if any

    @field_validator("every", mode="wrap")
    @classmethod
    def _steps_or_auto(cls, value: Any, validate: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            if not isinstance(value, bool):
                return validate(value)
        raise ValueError("expected a number of steps, 0 or more, or auto")

    @field_validator("dir")
    @classmethod
    def _directory(cls, path: Path | None) -> Path | None:
        if path and _exists(path) and not path.is_dir():
            raise ValueError("not a directory; name a directory for checkpoints")
        return path


class Logging(Section):
    """Console output and trackers of rank 0."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    every: int = Field(10, ge=1)  # steps between two progress lines
    sample: int = Field(300, ge=0)  # tokens of text to generate at the end
    tensorboard: bool = False
    wandb: Literal["disabled", "online", "offline"] = "disabled"
    project: str = "muster"  # of wandb

    @field_validator("level", mode="before")
    @classmethod
    def _lower_case_level(cls, level: Any) -> Any:
        return level.lower() if isinstance(level, str) else level


class Settings(Section):
    """All settings of a training run."""

    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    train: Train
    distributed: Distributed = Field(default_factory=Distributed)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    logging: Logging = Field(default_factory=Logging)


def _exactly_one(section: BaseModel, first: str, second: str) -> None:
    given = [name for name in (first, second) if getattr(section, name) is not None]
    if len(given) == 2:
        raise ValueError(f"both {first} and {second} given; set one")
    if not given:
        raise ValueError(f"neither {first} nor {second} given; set one")


# ---------------------------------------------------------------- global batch arithmetic


@dataclass(frozen=True)
class Batch:
    """The global batch: size = micro x accumulation x world, in windows of `block` tokens."""

    size: int
    micro: int
    accumulation: int
    world: int
    block: int

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.size * self.block

    def __str__(self) -> str:
        return (
            f"{self.micro} windows x {self.accumulation} micro-batch{'es' * (self.accumulation > 1)} x "
            f"{self.world} rank{'s' * (self.world > 1)} = {self.size} windows per step "
            f"x {self.block} tokens = {self.tokens:,} tokens per step"
        )


def batch(settings: Settings, world: int) -> Batch:
    """Split the global batch among `world` ranks. Raises ConfigError if it is not divisible by ranks x accumulation."""
    train = settings.train
    size = train.batch_size or (train.batch_size_per_device or 0) * world
    parts = world * train.accumulation
    if size % parts == 0:
        return Batch(size, size // parts, train.accumulation, world, settings.model.block_size)
    key, given, by, remedy = "batch_size_per_device", train.batch_size_per_device or 0, "", ""
    if train.batch_size:
        key, given, by = "batch_size", size, f"{world} rank{'s' * (world > 1)} x "
        remedy = f"; for {size} on each rank: train.batch_size_per_device={size}"
    else:
        parts = train.accumulation
    near = max(given // parts, 1) * parts
    raise ConfigError(
        f"train.{key}={given} is not divisible by {by}{train.accumulation} "
        f"micro-batch{'es' * (train.accumulation > 1)} (train.accumulation): {near} or {near + parts} would be{remedy}"
    )


def check_consistency(settings: Settings, world: int) -> None:
    """Raise ConfigError when settings contradict each other, or do not fit the number of ranks."""
    strategy = settings.distributed.strategy
    if strategy in ("single", "dp") and world > 1:
        raise ConfigError(
            f"distributed.strategy={strategy} is for one process, but there are {world}: "
            "start one process, or set distributed.strategy=ddp"
        )
    if settings.checkpoint.every == "auto" and settings.data.mode == BASE_ONLY:
        raise ConfigError(
            "checkpoint.every=auto with data.mode=base_only: the base model is the best checkpoint, which would depend "
            "on the speed of this machine; give a number of steps"
        )
    if settings.train.base_model and settings.data.mode != FULL_FINE_TUNING:
        raise ConfigError(
            f"train.base_model={settings.train.base_model}: mode {settings.data.mode} starts from random weights; "
            f"remove --base_model, or set --mode {FULL_FINE_TUNING}"
        )


def target_windows(settings: Settings, size: int) -> int:
    """Return how many of the `size` windows of a global batch are the target's text. Raises ConfigError if none is."""
    share = settings.data.target_batch_pct
    if not (windows := round(share * size)):
        raise ConfigError(
            f"data.target_batch_pct={share}: less than one of the {size} windows per step; set it to {1 / size:.3g} or "
            f"more, or train.batch_size to {math.ceil(1 / share)} or more"
        )
    return windows


# ---------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, 2026-11-21 is a string, and a duplicate key is an error.

    A small file whose aliases refer to lists of aliases, or to themselves, can stand for any number of values.
    """

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        count, unvisited = 0, [root] if root else []
        while unvisited:
            node = unvisited.pop()
            if (count := count + 1) + len(unvisited) > MOST_VALUES:
                raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values", problem_mark=node.start_mark)
            if isinstance(node, yaml.SequenceNode):
                unvisited += node.value
            elif isinstance(node, yaml.MappingNode):
                unvisited += (part for pair in node.value for part in pair)
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="expected a name as key", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and abs(value) >= 10**DIGITS:
                raise ValueError
        except CONVERSION_ERRORS:
            problem = f"{short(node.value)} is not a value of type {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read(path: Path | None, overrides: Sequence[str] = (), job: Mapping[str, Any] = NOTHING) -> Settings:
    """Read a YAML file, override it by the arguments of a job, then by `section.key=value` arguments, and validate.

    job: name in JOB_ARGUMENTS -> value.

    Raises ConfigError: each line names the source, the key, the value and the problem.
    """
    tree = _read_file(path) if path else copy.deepcopy(JOB_DEFAULTS) if job else {}
    participant = _participant(job)
    origins = _apply_job(tree, job, participant) if job else {}
    for argument in overrides:
        key, equals, text = argument.partition("=")
        if not equals or not re.fullmatch(r"[^.]+\.[^.]+", key):
            example = "section.key=value, for example train.steps=100"
            raise ConfigError(f"{short(argument)}: not understood; write {example}")
        _put(tree, key, _value(text), repr(argument))
        origins[key] = "command line"
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        lines = itertools.islice(_explain(error, str(path or NO_FILE), origins), MAX_LINES + 1)
        raise ConfigError("\n".join(lines)) from None
    if participant not in (None, settings.data.participant):
        other = settings.data.participant
        raise ConfigError(f"data.participant={other}: contradicts --fold or --participant ({participant}); give one")
    if "mode" in job and settings.data.participant is None and settings.data.mode != BASE_ONLY:
        raise ConfigError(f"--mode {job['mode']}: no target; add --fold N or --participant NAME")
    if settings.data.mode == BASE_ONLY and (steps := settings.train.base_steps):
        train = settings.train.model_copy(update={"steps": steps, "epochs": None})
        settings = settings.model_copy(update={"train": train})
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ConfigError(f"{path}: larger than {LARGEST_FILE // 10**6} MB; name a YAML file of settings")
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot read it ({reason}); looked in {Path.cwd()}") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; write sections that hold keys") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        sections = ", ".join(Settings.model_fields)
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; expected sections: {sections}")
    return {name: {} if section is None else section for name, section in tree.items()}


def holds_settings(path: Path) -> bool:
    """Return whether a file has any key that is a setting. Raises ConfigError as read() does."""
    return any(
        isinstance(keys, Mapping) and name in Settings.model_fields and keys.keys() & _keys_of(name)
        for name, keys in _read_file(path).items()
    )


def _value(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def _put(tree: dict[str, Any], key: str, value: Any, subject: str) -> None:
    section, _, name = key.partition(".")
    inner = tree.setdefault(section, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{subject}: section {section!r} of the file holds {short(inner)}, not keys")
    inner[name] = value


def _explain(error: ValidationError, source: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per fault: the source (file, argument or command line), the key, the problem."""
    overridden_sections = {key.partition(".")[0] for key, origin in origins.items() if origin == "command line"}
    for fault in error.errors():
        path = [str(part) for part in fault["loc"]]
        key = ".".join(path) or "settings"
        unknown = fault["type"] == "extra_forbidden"
        origin = origins.get(key) or ("command line" if unknown and key in overridden_sections else source)
        if unknown:
            yield from (f"{origin}: {name}: unknown key; {remedy}" for name, remedy in _unknown(path, fault["input"]))
        elif fault["type"] == "missing":
            remedy = "give --config FILE" if origin == NO_FILE else "add it"
            yield f"{origin}: {key}: missing; {remedy} (see config/quickstart.yaml)"
        else:
            value = "" if isinstance(fault["input"], (Mapping, BaseModel)) else f"={short(fault['input'])}"
            yield f"{origin}: {key}{value}: {fault['msg'].removeprefix('Value error, ')}"


# Names of settings in other training scripts, with the remedy.
ALIASES = {
    other: f"did you mean {key}?"
    for key, others in {
        "model.n_layer": "n_layers num_layers num_hidden_layers layers",
        "model.n_head": "n_heads num_heads num_attention_heads heads",
        "model.n_embd": "d_model hidden_size hidden_dim embed_dim",
        "model.block_size": "seq_len seq_length sequence_length max_seq_len context_length",
        "data.path": "data_dir data_path data_root dataset dataset_path train_file",
        "data.workers": "num_workers n_workers dataloader_num_workers",
        "train.steps": "max_steps num_steps total_steps train_steps max_iters num_iterations iterations",
        "train.epochs": "num_epochs n_epochs max_epochs total_epochs num_train_epochs",
        "train.batch_size_per_device (on each GPU) or train.batch_size (over all GPUs)": "batch_size train_batch_size",
        "train.batch_size_per_device": "batch_size_per_gpu batch_size_per_rank per_device_train_batch_size",
        "train.batch_size": "global_batch_size total_batch_size",
        "train.accumulation": "gradient_accumulation_steps gradient_accumulation accumulation_steps accum_steps",
        "train.learning_rate": "lr max_lr base_lr",
        "train.min_learning_rate": "min_lr",
        "train.warmup_steps": "warmup warmup_iters num_warmup_steps",
        "train.grad_clip": "clip_grad clip_grad_norm gradient_clip gradient_clipping max_grad_norm",
        "train.precision": "amp bf16 fp16 use_amp dtype mixed_precision",
        "train.evaluate_every": "eval_every eval_interval eval_steps val_interval",
        "train.seed": "random_seed",
        "distributed.backend": "dist_backend distributed_backend",
        "distributed.timeout": "dist_timeout nccl_timeout timeout_seconds",
        "checkpoint.dir": "save_dir save_path output_dir out_dir checkpoint_dir checkpoint_path ckpt_dir",
        "checkpoint.every": "save_every save_interval save_steps save_freq checkpoint_every checkpoint_interval",
        "logging.every": "log_every log_interval log_freq logging_steps print_freq",
        "logging.level": "log_level",
        "logging.project": "wandb_project",
    }.items()
    for other in others.split()
} | dict.fromkeys(
    ["world_size", "rank", "local_rank", "nnodes", "num_nodes", "nproc", "nproc_per_node", "gpus", "num_gpus", "n_gpus",
     "master_addr", "master_port", "init_method", "dist_url"],
    "remove it; the launcher sets it",
)  # fmt: skip


def _unknown(path: Sequence[str], value: Any) -> Iterator[tuple[str, str]]:
    """Yield an unknown key and its remedy.

    For an unknown section, yield instead those of its keys that are settings of another section or of another training
    script, if there are any.
    """
    known = _keys_of(path[0]) if len(path) > 1 and path[0] in Settings.model_fields else [*Settings.model_fields]
    similar = difflib.get_close_matches(path[-1], known, n=1)
    inner = value if isinstance(value, Mapping) and len(path) == 1 and not similar else {}
    found = [(f"{path[0]}.{name}", remedy) for name in inner if (remedy := _remedy_for(str(name)))]
    near = f"did you mean {'.'.join([*path[:-1], *similar])}?" if similar else f"known are {', '.join(known)}"
    yield from found or [(".".join(path), _remedy_for(path[-1]) or near)]


def _remedy_for(name: str) -> str:
    """Return the remedy for a key of another section or another training script; empty for any other key."""
    name = name.lower().replace("-", "_")
    same = [f"{section}.{name}" for section in Settings.model_fields if name in _keys_of(section)]
    return ALIASES.get(name) or (f"did you mean {' or '.join(same)}?" if same else "")


def _keys_of(section: str) -> list[str]:
    kind = Settings.model_fields[section].annotation
    assert isinstance(kind, type) and issubclass(kind, BaseModel)
    return list(kind.model_fields)


# ---------------------------------------------------------------- the arguments of a job

MODELS = {
    "small": {"n_layer": 2, "n_head": 4, "n_embd": 64},
    "medium": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "large": {"n_layer": 6, "n_head": 6, "n_embd": 384},
}
# The settings of a job without a settings file. Such a job takes seconds on one core.
JOB_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {**MODELS["small"], "block_size": 64},
    "train": {"steps": 300, "batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 20},
}
# Each argument with the setting that it gives ("" if none), its metavar and its help.
JOB_ARGUMENTS = {
    "fold": ("", "N", "number of the target in the list of participants, from 0"),
    "participants": ("data.domains", "NAME", f"the participants (default: {' '.join(DEFAULT_PARTICIPANTS)})"),
    "participant": ("", "NAME", "name of the target"),
    "mode": ("data.mode", "MODE", "what to train on: heldout (default): all participants but the target; single: the "
        "target; pooled: all participants; base_only: the base participants, from which a base model is trained; "
        "full_fine_tuning: the target, starting from a base model; from_scratch: the target, starting from random "
        "weights. base_only is evaluated on the base participants, any other mode on the target"),
    "base_participants": ("data.base_participants", "NAME", "participants that the base model is trained on (default: "
        "all but the target)"),
    "base_model": ("train.base_model", "DIR", "directory of the base model for full_fine_tuning (default: "
        "$MUSTER_BASE_MODEL)"),
    "target_data_pct": ("data.target_data_pct", "SHARE", "for full_fine_tuning and from_scratch: share of the target's "
        "training text that is trained on, above 0 and at most 1 (default: 1)"),
    "target_batch_pct": ("data.target_batch_pct", "SHARE", "for full_fine_tuning and from_scratch: share of each "
        "global batch that is text of the target, above 0 and at most 1; the rest is text of the base participants "
        "(default: 1)"),
    "data_path": ("data.path", "DIR", "directory whose *.txt files and subdirectories are the participants"),
    "model": ("", "SIZE", f"size of the model: {', '.join(MODELS)} (default: small)"),
    "batch_size": ("train.batch_size", "N", "windows per step (default: 16)"),
    "lr": ("train.learning_rate", "RATE", "learning rate (default: 3e-3)"),
    "steps": ("train.steps", "N", "total steps (default: 300)"),
    "base_steps": ("train.base_steps", "N", "total steps in mode base_only (default: --steps)"),
    "seed": ("train.seed", "N", "seed of the random numbers (default: 1337)"),
    "prefix": ("", "NAME", "without a launcher: write to experiments/NAME/foldN_PARTICIPANT, and resume there"),
    "device": ("distributed.device", "DEVICE", "cpu, cuda or cuda:N (default: a GPU if there is one)"),
}  # fmt: skip
NUMERIC = ("N", "SHARE", "RATE")  # metavars of numbers, which are read as YAML; other values are taken as they are
# Argument -> the key that it removes from the settings, because the argument sets a key that excludes this one.
REPLACED_KEYS = {"batch_size": "train.batch_size_per_device", "steps": "train.epochs"}


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of a job that were given, without the others."""
    return {name: value for name in JOB_ARGUMENTS if (value := getattr(options, name, None)) is not None}


def _apply_job(tree: dict[str, Any], job: Mapping[str, Any], participant: str | None) -> dict[str, str]:
    """Write the arguments of a job to the tree. Returns the argument that each key comes from."""
    found: dict[str, tuple[str, Any]] = {}  # key -> argument, value
    if (size := job.get("model")) is not None:
        if size not in MODELS:
            raise ConfigError(f"--model: unknown size {size!r}; give {', '.join(MODELS)}")
        found |= {f"model.{key}": ("--model", value) for key, value in MODELS[size].items()}
    found |= {key: (f"--{name}", None) for name, key in REPLACED_KEYS.items() if name in job}
    for name, (key, metavar, _) in JOB_ARGUMENTS.items():
        if key and name in job:
            found[key] = f"--{name}", _value(job[name]) if metavar in NUMERIC else job[name]
    if participant is not None:
        found["data.participant"] = "--fold", participant
    for key, (argument, value) in found.items():
        _put(tree, key, value, argument)
    # Checkpoints are in the run directory: jobs with the same settings file must not have the same checkpoint.dir.
    _put(tree, "checkpoint.dir", None, "a job")
    return {key: argument for key, (argument, _) in found.items()}


def _participant(job: Mapping[str, Any]) -> str | None:
    """Return the job's target, if any. Raises ConfigError for an invalid target or output directory."""
    try:
        output_directory(job, "job", DEFAULT_PARTICIPANTS)
        if "participants" in job or not {"fold", "participant"} & job.keys():
            return participant_of(job, None)
        known = _participants_in(job["data_path"]) if "data_path" in job else DEFAULT_PARTICIPANTS
        return participant_of({**job, "participants": list(known)}, None)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _participants_in(path: str) -> list[str]:
    try:
        return list(participants_in(_absolute(Path(path))))
    except ValueError as error:
        raise ValueError(f"--data_path: {error}") from None


# ---------------------------------------------------------------- command line


class TrainerParser(argparse.ArgumentParser):
    """Reports an unknown option alone; argparse would also report valid settings as unrecognized."""

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_intermixed_args(args, namespace)
        if options := [argument.partition("=")[0] for argument in rest if argument.startswith("-")]:
            self.error(f"unrecognized arguments: {' '.join(options)}; settings are given as section.key=value")
        return parsed, rest


def parser(description: str, program: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of trainer options. program: name in error messages; default: that of the running program."""
    options = TrainerParser(program, description=description, allow_abbrev=False)
    options.add_argument("--config", "--config_path", "--config-path", type=Path, metavar="FILE", help="settings, YAML")
    options.add_argument("--distributed-backend", metavar="NAME", help="the same as distributed.backend=NAME")
    options.add_argument("--log-level", metavar="LEVEL", help="the same as logging.level=LEVEL")
    # torch.distributed.launch passes it; it is ignored, as LOCAL_RANK has the same value.
    options.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    options.add_argument("--version", action="version", version=f"Muster {version()}")
    options.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that override the file")
    group = options.add_argument_group(
        "arguments of a job",
        "For leave-one-out cross-validation: the text is divided into participants (the domains of the default text, "
        "or the texts of a directory), one of which, the target, is selected with --fold or --participant. With any "
        "of these arguments and no --config, all other settings have defaults. These arguments override the file; "
        "section.key=value overrides them.",
    )
    for name, (_, metavar, text) in JOB_ARGUMENTS.items():
        nargs = "+" if name.endswith("participants") else None
        group.add_argument(f"--{name}", nargs=nargs, metavar=metavar, help=text)
    return options


def for_ranks(options: argparse.Namespace, world: int) -> tuple[Settings, Batch]:
    """Return the settings for parsed options of parser(), and the global batch of `world` ranks.

    Raises:
        ConfigError: the settings are invalid, contradict each other, or do not fit the number of ranks.
    """
    overrides = list(options.overrides)
    if options.distributed_backend:
        overrides.append(f"distributed.backend={options.distributed_backend}")
    if options.log_level:
        overrides.append(f"logging.level={options.log_level}")
    settings = read(options.config, overrides, job_of(options))
    check_consistency(settings, world)
    global_batch = batch(settings, world)
    target_windows(settings, global_batch.size)
    return settings, global_batch


def main(arguments: Sequence[str]) -> int:
    """Validate settings without starting anything, and print them with all defaults."""
    options = parser("Validate settings and print them with all defaults.")
    options.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="number of ranks that share the global batch"
    )
    parsed = options.parse_intermixed_args(arguments)
    try:
        if parsed.nproc < 1:
            raise ConfigError(f"--nproc: expected a number of ranks, 1 or more, got {parsed.nproc}")
        settings, global_batch = for_ranks(parsed, parsed.nproc)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    sys.stdout.write(f"# {global_batch}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
