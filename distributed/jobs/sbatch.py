"""What is said to SLURM's programs, and what they show. Pure.

words = sbatch_words(options, Needs(1, None, ()), name="muster-ab-cd", count=9, ...)
elements = parse_queue(printed, "muster-ab-")   # by array and index
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distributed.jobs.config import ConfigError

# The environment of SLURM's programs. That of the jobs is in their orders: SLURM keeps, and shows, what it gets.
KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT",
    "KRB5CCNAME",
)  # fmt: skip
LEFT_OUT = ("SBATCH_WAIT", "SBATCH_EXPORT", "SBATCH_GET_USER_ENV", "SBATCH_ARRAY_INX")
# Options that each array gets.
OURS = (
    "--array", "--job-name", "--output", "--error", "--export", "--export-file", "--chdir", "--nodes", "--ntasks",
    "--wrap", "--wait", "--test-only", "--requeue", "--clusters", "--parsable", "--open-mode", "--input",
)  # fmt: skip
OUR_LETTERS = ("a", "J", "o", "e", "D", "N", "n", "W", "M", "i")
NUMBER_OF_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task")
# What sbatch says when the queue is full: later it takes more.
LIMITS = ("MaxSubmit", "Resource temporarily unavailable", "temporarily unable to accept job")
# What it says when nothing is known of an answer.
SILENCE = (
    "Unable to contact slurm controller", "Socket timed out", "Connection refused", "Connection reset",
    "Communication connection failure", "Zero Bytes were transmitted", "Transport endpoint", "Network is unreachable",
    "No route to host",
)  # fmt: skip
# What it says when no job of the list can be submitted until a person has corrected the options.
WRONG_OPTIONS = (
    "invalid partition", "invalid account", "invalid qos", "invalid wckey", "no partition specified",
    "not permitted to use this partition", "unrecognized option", "invalid option",
)  # fmt: skip
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
)  # fmt: skip
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD")
ORDINARY = ("None", "Priority", "Resources", "Cleaning", "Prolog", "")  # reasons to wait that need nobody's attention
IN_QUEUE = "in SLURM's queue"
QUEUE_FORMAT = "%F|%K|%T|%r|%N|%j"  # of squeue: array, index, state, reason, node, name


# ---------------------------------------------------------------- the call of sbatch


@dataclass(frozen=True)
class Needs:
    """What the elements of one array have in common."""

    gpus: int
    minutes: int | None
    labels: tuple[str, ...]
    after: str = ""  # an element, as SLURM numbers it, that has to succeed first

    @property
    def kind_of_refusal(self) -> str:
        """`kind` of NotStarted when SLURM refuses them: the job's own where it needs more than every job does."""
        return "job" if self.gpus > 1 or self.minutes is not None or self.labels else "server"


def checked_options(options: Sequence[str]) -> list[str]:
    """The options of sbatch in cluster_config.json, each with its value in one word. Raises ConfigError."""
    found: list[str] = []
    for option in options:
        name = option.partition("=")[0]
        if not option.startswith("-"):
            if not found or "=" in found[-1]:
                raise ConfigError(f"sbatch: {option!r}: expected an option; write --NAME=VALUE")
            found[-1] += f"={option}" if found[-1].startswith("--") else option
        elif any(map(str.isspace, name)):
            raise ConfigError(f"sbatch: {option!r}: holds a blank; write --NAME=VALUE, or two strings")
        elif name in OURS or option[1:2] in OUR_LETTERS:
            raise ConfigError(f"sbatch: {option!r}: is set for each array; remove it")
        else:
            found.append(option)
    return found


def with_gpus(options: Sequence[str], count: int) -> list[str]:
    """The options, and GPUs for one job: their number replaces that of an option which is there."""
    asked = any(map(names_gpus, options))
    return [*(of_gpus(option, count) for option in options), *([] if asked else [f"--gres=gpu:{count}"])]


def names_gpus(option: str) -> bool:
    """Whether an option of sbatch asks for GPUs."""
    name, _, value = option.partition("=")
    parts = value.split(",") if name == "--gres" else []
    return name in NUMBER_OF_GPUS or option.startswith("-G") or any(part.split(":")[0] == "gpu" for part in parts)


def of_gpus(option: str, count: int) -> str:
    """The option, with another number where it asks for GPUs; their type stays."""
    if not names_gpus(option):
        return option
    name, equals, value = ("-G", "", option[2:]) if option.startswith("-G") else option.partition("=")
    if name != "--gres":
        kind, colon, _ = value.rpartition(":")
        return f"{name}{equals}{kind}{colon}{count}"
    parts = [part.split(":") for part in value.split(",")]
    kinds = [[word for word in part[1:2] if not word.isdecimal()] if part[0] == "gpu" else None for part in parts]
    changed = [part if kind is None else ["gpu", *kind, str(count)] for part, kind in zip(parts, kinds, strict=True)]
    return f"--gres={','.join(':'.join(part) for part in changed)}"


def constraint(options: Sequence[str]) -> list[str]:
    """The value of --constraint, where there is one."""
    values = [option.partition("=")[2] for option in options if option.startswith("--constraint=")]
    values += [option[2:] for option in options if option.startswith("-C")]
    return values[-1:]


def sbatch_words(
    options: Sequence[str], needs: Needs, *, name: str, count: int, directory: str, output: str, script: Sequence[str]
) -> list[str]:
    """The call that submits an array of so many elements. directory: of the jobs. output: of the elements."""
    words = with_gpus(options, needs.gpus) if needs.gpus else list(options)
    if needs.labels:
        words.append(f"--constraint={'&'.join([*constraint(options), *needs.labels])}")
    if needs.minutes is not None:
        words.append(f"--time={needs.minutes}")
    if needs.after:
        words += [f"--dependency=afterok:{needs.after}", "--kill-on-invalid-dep=yes"]
    return [
        "sbatch", "--parsable", *words, f"--job-name={name}", f"--array=0-{count - 1}", "--nodes=1", "--ntasks=1",
        "--no-requeue", "--export=ALL", f"--chdir={directory}", f"--output={output}", f"--error={output}", *script,
    ]  # fmt: skip


def said(text: str) -> str:
    """What a program of SLURM complains about, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for start in ("sbatch:", "squeue:", "scancel:", "scontrol:", "error:"):
        lines = [line.removeprefix(start).strip() for line in lines]
    return "; ".join(dict.fromkeys(lines[-3:]))


def any_of(signs: Iterable[str], text: str) -> bool:
    return any(sign.lower() in text.lower() for sign in signs)


def environment_of_programs(environment: Mapping[str, str]) -> dict[str, str]:
    """For SLURM's programs, and what is left of the caller's environment in SLURM."""
    return {
        name: value for name, value in environment.items()
        if name in KEPT or name.startswith("LC_") or (name.startswith("SBATCH_") and name not in LEFT_OUT)
    }  # fmt: skip


# ---------------------------------------------------------------- what SLURM shows


@dataclass(frozen=True)
class Entry:
    """One element of an array, as SLURM shows it."""

    job: str  # 123_4
    state: str
    reason: str = ""
    node: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def waiting_reason(self) -> str:
        reason = self.reason.partition(",")[0].strip("() ")
        return IN_QUEUE if reason in ORDINARY else f"{IN_QUEUE}: {reason}"


@dataclass(frozen=True)
class Queue:
    """All elements that SLURM knows, by array and index."""

    began: float = -math.inf  # time.monotonic() when it was asked for
    entries: Mapping[tuple[str, int], Entry] = field(default_factory=dict)


def parse_queue(text: str, prefix: str) -> dict[tuple[str, int], Entry]:
    """What squeue has printed in QUEUE_FORMAT, of the arrays whose names begin so."""
    found = {}
    for line in text.splitlines():
        job, index, state, reason, node, name = (line.strip().split("|", 5) + [""] * 6)[:6]
        if name.startswith(prefix) and index.isdecimal():
            found[name.removeprefix(prefix), int(index)] = Entry(f"{job}_{index}", state, reason, node)
    return found


def setting(config: str, name: str) -> str:
    """A value of what `scontrol show config` has printed; empty where it is not there."""
    for line in config.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == name:
            return value.strip()
    return ""


def number_in(text: str, otherwise: int) -> int:
    """The number that a setting such as `30 sec` begins with."""
    first = text.split()[:1]
    return int(first[0]) if first and first[0].isdecimal() else otherwise


def end_without_code(entry: Entry | None, taken: bool, begun: bool = False, printed: str = "") -> tuple[str, str]:
    """(cause, message) of an attempt that has not written an exit code, and cannot any more.

    taken: its element has taken the order. begun: its command was started. printed: the output of the element itself.
    """
    state, node = (entry.state, entry.node) if entry else ("", "")
    if state == "CANCELLED" or (not entry and not taken):
        when = "" if taken else " before it was started"
        return "cancelled outside", f"somebody ended it in SLURM (scancel){when}, not through this list"
    if state == "PREEMPTED":
        return "preempted", "SLURM needed its node for a more urgent job"
    if state in ("TIMEOUT", "DEADLINE"):
        return "timeout", "SLURM's time limit was reached"
    if state == "OUT_OF_MEMORY":
        return "out of memory", "the job used more memory than SLURM gave it (--mem)"
    if state in ("NODE_FAIL", "BOOT_FAIL"):
        return "node failed", f"SLURM says that {node or 'its node'} has failed"
    if not begun and printed:
        return "not started", printed
    if not taken:
        return "not started", f"SLURM says {state}; do the compute nodes have the same working directory?"
    if state:
        return "killed", f"its supervisor on {node or 'its node'} has ended without a word; SLURM says {state}"
    return "killed", "its supervisor has ended without a word, and SLURM does not know it any more"
