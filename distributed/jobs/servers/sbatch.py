"""Command lines of SLURM's programs, and parsers for their output. Pure functions.

command = sbatch_command(options, ResourceRequest(1, None, ()), name="muster-ab-cd", count=9, ...)
elements = parse_queue(printed, "muster-ab-")   # {("cd", 0): QueueEntry(...), ...}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distributed.jobs.lists.config import ConfigError

# Variables that SLURM's programs get. The variables of jobs are in the job specifications instead, because SLURM shows
# sbatch's environment.
PASSED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "SLURM_CONF", "SLURM_JWT",
    "KRB5CCNAME",
)  # fmt: skip
DROPPED_VARIABLES = ("SBATCH_WAIT", "SBATCH_EXPORT", "SBATCH_GET_USER_ENV", "SBATCH_ARRAY_INX")
# Options that Muster sets itself, or that would conflict with those.
RESERVED_OPTIONS = (
    "--array", "--job-name", "--output", "--error", "--export", "--export-file", "--chdir", "--nodes", "--ntasks",
    "--wrap", "--wait", "--test-only", "--requeue", "--clusters", "--parsable", "--open-mode", "--input",
)  # fmt: skip
RESERVED_LETTERS = ("a", "J", "o", "e", "D", "N", "n", "W", "M", "i")
GPU_COUNT_OPTIONS = ("--gpus", "--gpus-per-node", "--gpus-per-task")
# Errors of sbatch when a limit is reached. The submission is retried later.
QUEUE_FULL = ("MaxSubmit", "Resource temporarily unavailable", "temporarily unable to accept job")
# Errors after which it is unknown whether the array was submitted.
NO_REPLY = (
    "Unable to contact slurm controller", "Socket timed out", "Connection refused", "Connection reset",
    "Communication connection failure", "Zero Bytes were transmitted", "Transport endpoint", "Network is unreachable",
    "No route to host",
)  # fmt: skip
# Errors that affect all jobs of the list until the options are corrected.
WRONG_OPTIONS = (
    "invalid partition", "invalid account", "invalid qos", "invalid wckey", "no partition specified",
    "not permitted to use this partition", "unrecognized option", "invalid option",
)  # fmt: skip
ENDED_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
)  # fmt: skip
WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD")
NORMAL_REASONS = ("None", "Priority", "Resources", "Cleaning", "Prolog", "")  # ordinary reasons to wait; not shown
IN_QUEUE = "in SLURM's queue"
QUEUE_FORMAT = "%F|%K|%T|%r|%N|%j"  # of squeue: job id and index, state, reason, node, name of the array


# ---------------------------------------------------------------- sbatch


@dataclass(frozen=True)
class ResourceRequest:
    """The resources of each element of an array."""

    gpus: int
    minutes: int | None  # of --time; None: SLURM's default
    labels: tuple[str, ...]
    queued_after: str = ""  # SLURM job id of an element that must succeed first

    @property
    def kind_of_refusal(self) -> str:
        """The `kind` of backend.NotStarted if SLURM refuses this request.

        "job" if the request has several GPUs, a time or labels, which may be the cause; otherwise "server".
        """
        return "job" if self.gpus > 1 or self.minutes is not None or self.labels else "server"


def checked_options(options: Sequence[str]) -> list[str]:
    """The options of sbatch in cluster_config.json, each joined with its value. Raises ConfigError."""
    found: list[str] = []
    for option in options:
        name = option.partition("=")[0]
        if not option.startswith("-"):
            if not found or "=" in found[-1]:
                raise ConfigError(f"sbatch: {option!r}: expected an option; write --NAME=VALUE")
            found[-1] += f"={option}" if found[-1].startswith("--") else option
        elif any(map(str.isspace, name)):
            raise ConfigError(f"sbatch: {option!r}: contains a space; write --NAME=VALUE or two strings")
        elif name in RESERVED_OPTIONS or option[1:2] in RESERVED_LETTERS:
            raise ConfigError(f"sbatch: {option!r}: is reserved for Muster; remove it")
        else:
            found.append(option)
    return found


def with_gpus(options: Sequence[str], count: int) -> list[str]:
    """The options with this number of GPUs for one job."""
    present = any(map(requests_gpus, options))
    return [*(with_gpu_count(option, count) for option in options), *([] if present else [f"--gres=gpu:{count}"])]


def requests_gpus(option: str) -> bool:
    """Whether an option of sbatch requests GPUs."""
    name, _, value = option.partition("=")
    parts = value.split(",") if name == "--gres" else []
    return name in GPU_COUNT_OPTIONS or option.startswith("-G") or any(part.split(":")[0] == "gpu" for part in parts)


def with_gpu_count(option: str, count: int) -> str:
    """The option with this number of GPUs, if it requests any; their type is kept."""
    if not requests_gpus(option):
        return option
    name, equals, value = ("-G", "", option[2:]) if option.startswith("-G") else option.partition("=")
    if name != "--gres":
        kind, colon, _ = value.rpartition(":")
        return f"{name}{equals}{kind}{colon}{count}"
    parts = [part.split(":") for part in value.split(",")]
    kinds = [[item for item in part[1:2] if not item.isdecimal()] if part[0] == "gpu" else None for part in parts]
    changed = [part if kind is None else ["gpu", *kind, str(count)] for part, kind in zip(parts, kinds, strict=True)]
    return f"--gres={','.join(':'.join(part) for part in changed)}"


def constraint(options: Sequence[str]) -> list[str]:
    """The value of --constraint, in a list; empty if the option is missing."""
    values = [option.partition("=")[2] for option in options if option.startswith("--constraint=")]
    values += [option[2:] for option in options if option.startswith("-C")]
    return values[-1:]


def sbatch_command(
    options: Sequence[str], resources: ResourceRequest, *, name: str, count: int, directory: str, output: str,
    script: Sequence[str],
) -> list[str]:  # fmt: skip
    """The command that submits an array of `count` elements.

    directory: working directory. output: pattern of the output file of each element.
    """
    command = with_gpus(options, resources.gpus) if resources.gpus else list(options)
    if resources.labels:
        command.append(f"--constraint={'&'.join([*constraint(options), *resources.labels])}")
    if resources.minutes is not None:
        command.append(f"--time={resources.minutes}")
    if resources.queued_after:
        command += [f"--dependency=afterok:{resources.queued_after}", "--kill-on-invalid-dep=yes"]
    return [
        "sbatch", "--parsable", *command, f"--job-name={name}", f"--array=0-{count - 1}", "--nodes=1", "--ntasks=1",
        "--no-requeue", "--export=ALL", f"--chdir={directory}", f"--output={output}", f"--error={output}", *script,
    ]  # fmt: skip


def error_message(text: str) -> str:
    """The last lines of the error output of one of SLURM's programs, joined to one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for start in ("sbatch:", "squeue:", "scancel:", "scontrol:", "error:"):
        lines = [line.removeprefix(start).strip() for line in lines]
    return "; ".join(dict.fromkeys(lines[-3:]))


def contains_any(patterns: Iterable[str], text: str) -> bool:
    return any(pattern.lower() in text.lower() for pattern in patterns)


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the dispatcher's environment that SLURM's programs get."""
    return {
        name: value for name, value in environment.items()
        if (name in PASSED_VARIABLES or name.startswith(("LC_", "SBATCH_"))) and name not in DROPPED_VARIABLES
    }  # fmt: skip


# ---------------------------------------------------------------- output of SLURM


@dataclass(frozen=True)
class QueueEntry:
    """One element of an array in the output of squeue."""

    job: str  # 123_4
    state: str
    reason: str = ""
    node: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES

    @property
    def waits(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def waiting_reason(self) -> str:
        reason = self.reason.partition(",")[0].strip("() ")
        return IN_QUEUE if reason in NORMAL_REASONS else f"{IN_QUEUE}: {reason}"


@dataclass(frozen=True)
class SlurmQueue:
    """All elements in the output of squeue; see parse_queue() for the keys."""

    called_at: float = -math.inf  # time.monotonic() when squeue was called
    entries: Mapping[tuple[str, int], QueueEntry] = field(default_factory=dict)


def parse_queue(text: str, prefix: str) -> dict[tuple[str, int], QueueEntry]:
    """Parse the output of squeue in QUEUE_FORMAT, for arrays whose names begin with this prefix.

    Each key is the name of an array without the prefix, and the index of an element.
    """
    found = {}
    for line in text.splitlines():
        job, index, state, reason, node, name = (line.strip().split("|", 5) + [""] * 6)[:6]
        if name.startswith(prefix) and index.isdecimal() and job.isdecimal():
            found[name.removeprefix(prefix), int(index)] = QueueEntry(f"{job}_{index}", state, reason, node)
    return found


def setting(config: str, name: str) -> str:
    """A value in the output of `scontrol show config`; empty if it is missing."""
    for line in config.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == name:
            return value.strip()
    return ""


def leading_number(text: str, default: int) -> int:
    """The number at the beginning of a setting such as `30 sec`, or a default."""
    first = text.split()[:1]
    return int(first[0]) if first and first[0].isdecimal() else default


def end_without_code(entry: QueueEntry | None, claimed: bool, started: bool, printed: str = "") -> tuple[str, str]:
    """(cause, message) of an attempt that ended without an exit code.

    claimed: whether an element has claimed the job specification. started: whether the command was started. printed:
    the last line of the element's output.
    """
    state, node = (entry.state, entry.node) if entry else ("", "")
    if state == "CANCELLED" or (not entry and not claimed):
        when = "" if claimed else " before it started"
        return "cancelled outside", f"cancelled by scancel{when}, not through this list"
    if state == "PREEMPTED":
        return "preempted", "SLURM gave its node to a job of higher priority"
    if state in ("TIMEOUT", "DEADLINE"):
        return "timeout", "SLURM's time limit was reached"
    if state == "OUT_OF_MEMORY":
        return "out of memory", "the job used more memory than SLURM gave it (--mem)"
    if state in ("NODE_FAIL", "BOOT_FAIL"):
        return "node failed", f"SLURM reports that {node or 'its node'} has failed"
    if not started and printed:
        return "not started", printed
    if not claimed:
        return "not started", f"SLURM state {state}; check that the compute nodes have the same working directory"
    if state:
        return "killed", f"its supervisor on {node or 'its node'} exited without an exit code; SLURM state {state}"
    return "killed", "its supervisor exited without an exit code, and SLURM no longer lists it"
