"""Find the first failure of a run and write verdict.json.

When a rank dies, the others lose their connection to it, and often report that before its agent notices the death.
Failures are therefore ordered by kind, causes before consequences, and then by time:

    a hang for which the launcher stopped the run
    a rank that raised an error, died of a signal or exited by itself; a supervisor or launcher that was killed
    an agent that failed although no rank of its node had failed
    a node to which the connection was lost
    failures that may be causes or consequences: exit code 1 without a message, a lost connection that is not PyTorch's
    a missing rank: it exited with 0 while others waited, another rank names it, or all ranks but this one waited
    a rank that lost its connection to others or timed out waiting for them: the cause was not recorded
    a rank that was stopped on request or terminated

The cause is the earliest failure of the first of these kinds that occurred. If agents have recorded whose report
arrived first in their store, the failures of that node are the earliest. All others are ordered by time. The launcher
knows the clocks of its nodes within a second, and torchrun records whole seconds: if two ranks raised errors within
that time, or on nodes whose clocks are not known, the verdict names both. What only another node reports about ranks of
a lost node is named, but is never the cause.

Try it: python -m distributed.verdict.verdict logs/latest
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from functools import cache, partial
from pathlib import Path

from distributed.attempts import newest
from distributed.exit_codes import STOPPED, TIMED_OUT, UNFIT
from distributed.files import KIT, write_json
from distributed.host.collectives import find_mismatch, read_newest
from distributed.host.replies import NODE_ENV
from distributed.host.signals import signal_name
from distributed.host.ssh_call import LOGIN_SHELL
from distributed.host.system import run_program
from distributed.records import integer, listed, mapping, number, read_object, text
from distributed.trust import GIT, LAYOUT, foreign, git_environment, one_line, printable
from distributed.verdict.failures import SRUN, Evidence, Failure, Json, SentSignal, gather
from distributed.verdict.node_log import FATAL, LoggedException, parse_exception, read_log, split_chain
from distributed.verdict.user_code import is_library, launched_package

INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
CLOCK_TOLERANCE = 1.0  # seconds; the order of two failures on different nodes is unknown within this time
BY_SLURM = "node failure reported by SLURM"  # message of a lost node, after which SLURM ends the job
RESUME = "run the same command again to resume"
SIGNAL_TOLERANCE = 60.0  # seconds in which a signal may have caused a failure
GIT_TIMEOUT = 5.0  # seconds
SHOWN_OTHERS = 3  # other ranks of a hang
MAX_RANKS = 1024  # per node
RECORD_AGE = 120.0  # seconds; PyTorch ends a rank within this time after it has recorded a timeout
SHOWN = 240  # characters of a message in a sentence
SHOWN_LINES = 8  # lines of a message or a log
PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
SHOWN_FRAMES = 3  # frames of a traceback


@dataclass(frozen=True)
class Verdict:
    """Why and how the run ended: the content of verdict.json."""

    outcome: str  # "ok", "stopped" or "failed"
    exit_code: int
    cause: str  # one sentence, one line
    node: str | None = None
    rank: int | None = None
    time: float | None = None  # Unix seconds
    exception: str | None = None
    message: str = ""
    traceback: str = ""
    collateral: tuple[Json, ...] = ()  # the other failures: "node", "rank", "message"
    changes: tuple[str, ...] = ()  # nodes that joined or left, see records.node_changes()
    clocks: Mapping[str, float] = field(default_factory=dict)  # see gather()
    signals: Mapping[str, float] = field(default_factory=dict)  # see judge()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", one_line(self.cause))  # texts of nodes are in it


def decide(run: Path, launcher_code: int | None = None) -> Verdict:
    """Return the verdict on the run in this directory. launcher_code: the launcher's own exit code."""
    return judge(gather(run), launcher_code)


# ---------------------------------------------------------------- causes and consequences


class Kind(IntEnum):
    """The kinds of failures, the likeliest cause first."""

    OWN_ERROR = 1
    AGENT = 2
    LOST_NODE = 3
    UNCLEAR = 4
    MISSING_RANK = 5
    COLLATERAL = 6
    STOPPED = 7
    TERMINATED = 8


# Messages of ranks that lost a connection to another rank, or timed out: seen with torch 2.13, or in its source.
_LOST_PEER = re.compile(
    r"""
      [Cc]onnection\ closed\ by\ (remote\ )?peer | [Cc]onnection\ reset\ by\ peer | [Cc]onnection\ refused
    | [Bb]roken\ pipe | Socket\ closed | Socket\ Timeout
    | Timed\ out\ waiting\ \d+\ ?ms\ for\ (send|recv)\ operation | connectFullMesh\ failed
    | failed\ to\ pass\ monitoredBarrier | successfully\ reached\ monitoredBarrier,\ but\ received\ errors
    | (recvValue\w{0,50}|recvVector|recvBytes|sendBytes)\ failed | [Ff]ailed\ to\ recv,\ got\ 0\ bytes
    | client\ socket\ has\ (failed|timed\ out) | connection\ to\ the\ C10d\ store\ has\ failed
    | wait\ timeout\ after\ \d+ms | Timed\ out\ after\ \d+\ seconds\ waiting\ for\ clients
    | [Ww]atchdog\ caught\ collective\ operation\ timeout | NCCL\ timeout | NCCL\ communicator\ was\ aborted
    | remote\ process\ exited\ or\ there\ was\ a\ network\ error
    | killed\ by\ signal:\ Terminated
    """,
    re.VERBOSE,
)
# PyTorch's classes for lost connections. An exception of another class may be about any connection, such as one to a
# file server.
_OF_TORCH = re.compile(r"RuntimeError|Dist\w*Error|Rendezvous\w*Error")
_ALWAYS_COLLATERAL = ("DistStoreError", "PeerFailed", "RendezvousConnectionError", "RendezvousTimeoutError")
_TERMINATED = ("KeyboardInterrupt", "SignalException")
_NAMES_A_RANK = re.compile(
    r"[Rr]anks? \[?(\d{1,9})[\d, ]*\]? (?:failed to pass monitoredBarrier|are the lagging ranks)"
    r"|\[(\d{1,9})[\d, ]*\] finished collective #\d+, but didn't join"
    r"|\brank (\d{1,9}) on .{1,300}? (?:failed at step|is not finite)"
)
_NOISE = re.compile(
    r"\[/\S{1,300}\.(?:cc|cpp|h):\d+\] "
    r"|(?<!\s)\s+(?:This is typically caused by|Original exception:|Exception raised from).*",
    re.DOTALL,
)


def kind_of(failure: Failure) -> Kind:
    """Return the kind, from the exception or message if there is one, otherwise from the exit code."""
    if failure.witness:
        return Kind.MISSING_RANK
    if failure.exit_code == STOPPED:
        return Kind.STOPPED
    if failure.program in ("supervisor", "launcher"):
        return Kind.OWN_ERROR
    if failure.rank is None and failure.exit_code is None:
        return Kind.LOST_NODE
    if not failure.exception and not failure.message:
        if failure.ended_by_agent or failure.exit_code in (128 + signal.SIGHUP, *INTERRUPTED):
            return Kind.TERMINATED
        return Kind.UNCLEAR if failure.rank is None or failure.exit_code == 1 else Kind.OWN_ERROR
    if failure.exception in _TERMINATED:
        return Kind.TERMINATED
    kinds = [_kind_of_exception(raised) for raised in exception_chain(failure)]
    if kinds[0] is not Kind.OWN_ERROR:
        return kinds[0]
    if failure.rank is None:
        return Kind.AGENT if failure.exception or _not_started(failure) else Kind.UNCLEAR
    # The script may have handled the first exception; then a later one, or the agent, ended the rank.
    return Kind.UNCLEAR if failure.ended_by_agent or kinds[-1] is not Kind.OWN_ERROR else Kind.OWN_ERROR


def _kind_of_exception(raised: LoggedException) -> Kind:
    if raised.exception in _ALWAYS_COLLATERAL:
        return Kind.COLLATERAL
    if not _LOST_PEER.search(raised.message):
        return Kind.OWN_ERROR
    of_torch = raised.exception is None or _OF_TORCH.fullmatch(raised.exception)
    return Kind.COLLATERAL if of_torch else Kind.UNCLEAR


def exception_chain(failure: Failure) -> list[LoggedException]:
    """The chained exceptions of the traceback, in the order in which they were raised."""
    *earlier, last = split_chain(failure.traceback)
    return [*map(parse_exception, earlier), LoggedException(failure.exception, failure.message, last)]


def decisive_exception(failure: Failure) -> LoggedException:
    """The exception to show: the last of the chain, or the first if the last is only a consequence of it."""
    chain = exception_chain(failure)
    first, last = _kind_of_exception(chain[0]), _kind_of_exception(chain[-1])
    return chain[0] if first is Kind.OWN_ERROR and last is not Kind.OWN_ERROR else chain[-1]


def first_failure(failures: Iterable[Failure], first: str = "") -> Failure:
    """The earliest failure of the likeliest kind. failures: one or more, in any order. first: see Evidence."""
    return min(failures, key=partial(_order, first))


def _order(first: str, failure: Failure) -> tuple[Kind, bool, float, str, int]:
    time, rank = (math.inf if failure.time is None else failure.time), (-1 if failure.rank is None else failure.rank)
    return kind_of(failure), failure.node != first, time, failure.node, rank


def missing_ranks(evidence: Evidence) -> Iterator[Failure]:
    """Yield a failure for each rank that others waited for; its witness is what these others reported."""
    waited = [one for one in evidence.failures if one.rank is not None and kind_of(one) is Kind.COLLATERAL]
    if waited and evidence.succeeded:
        first, rank, more = first_failure(waited, evidence.first), min(evidence.succeeded), len(evidence.succeeded) - 1
        others = f"and {more} more rank{'s' * (more > 1)} " if more else ""
        line = _location(first, evidence.launched)
        witness = f"{others}ended with exit code 0 while {name_of(first)} was in a collective{line}"
        yield replace(first, rank=rank, node=evidence.succeeded[rank], witness=witness)
        return

    @cache  # in a large run, thousands of ranks may name the same one
    def node_of(rank: int) -> str:
        by_failure = (failure.node for failure in evidence.failures if failure.rank == rank)
        by_ranks = (node for node, ranks in evidence.ranks.items() if rank in ranks)
        return next(by_failure, next(by_ranks, "?"))

    def missing(rank: int, reporter: Failure, detail: str) -> Failure:
        witness = f"was missing from a collective{detail}{name_of(reporter)} reports: {_short(describe(reporter))}"
        return replace(reporter, rank=rank, node=node_of(rank), witness=witness)

    for failure in evidence.failures:
        if names := _NAMES_A_RANK.search(failure.message):
            yield missing(int(next(filter(None, names.groups()))), failure, "; ")
    # All ranks but one lost a connection or timed out; the remaining rank recorded nothing.
    active = [one for one in evidence.failures if one.rank is not None and kind_of(one) is not Kind.TERMINATED]
    recorded, size = {one.rank or 0 for one in waited}, sum(map(len, evidence.ranks.values()))
    if waited and active == waited and len(recorded) == size - 1 and max(recorded) < size:
        first = first_failure(waited, evidence.first)
        yield missing(sum(range(size)) - sum(recorded), first, ": only this rank reported nothing; ")


def judge(
    evidence: Evidence,
    launcher_code: int | None = None,
    signaled: bool = True,
    stopped_at: float | None = None,
    signals: Mapping[str, float] | None = None,
) -> Verdict:
    """Return the verdict on this evidence.

    launcher_code: the launcher's own exit code. signaled: whether a signal to the launcher may explain that code.
    stopped_at: Unix time at which the launcher stopped the run, if it knew of no failure then; later failures are
    consequences. signals: node -> Unix time at which the launcher received its report of a signal.
    """
    if evidence.hang:  # failures of ranks are ignored: the launcher stopped them
        return _hung(evidence.hang)
    # With --lease 0, the ranks of other nodes may fail before the launcher knows that a supervisor stops its node.
    signals = signals or {}
    if stopped_at is None and launcher_code != 0 and (stop := _stop_of_a_node(evidence, signals)):
        stopped_at, signaled = signals.get(stop.node, stop.time), True
        launcher_code = INTERRUPTED[stop.name != "SIGINT"]
    failures = sorted([*evidence.failures, *missing_ranks(evidence)], key=partial(_order, evidence.first))
    if not failures or (_all_succeeded(evidence) and (not launcher_code or launcher_code in INTERRUPTED)):
        return _nothing_failed(evidence, launcher_code)
    cause, kind = failures[0], kind_of(failures[0])
    if kind is Kind.STOPPED and launcher_code != UNFIT:
        by = f"by {evidence.signal}" if evidence.signal else "on request"
        return Verdict("stopped", STOPPED, _sentence(cause).replace("on request", by, 1))
    seconds = None if stopped_at is None or cause.time is None else cause.time - stopped_at  # after the stop
    inexact = cause.node != os.uname().nodename or (cause.time or 0.0).is_integer()
    is_cause = kind is Kind.OWN_ERROR and (seconds is None or seconds < -CLOCK_TOLERANCE * inexact)
    interrupted = launcher_code in INTERRUPTED and not is_cause and BY_SLURM not in cause.message
    if not signaled:  # the code may be that of a rank, or of a node that lost its launcher
        interrupted = interrupted and cause.exception != "KeyboardInterrupt" and kind is not Kind.LOST_NODE
    if kind is Kind.STOPPED or interrupted:  # the launcher stopped the ranks, and no failure is the reason
        others = _collateral([*failures, *evidence.reported])
        stopped = replace(_nothing_failed(evidence, launcher_code), collateral=others)
        if kind is not Kind.OWN_ERROR or seconds is None:
            return stopped
        when = "afterwards" if seconds > CLOCK_TOLERANCE * inexact else "at about that time"
        return replace(stopped, cause=f"{stopped.cause.partition(';')[0]}; {when}, {_sentence(cause)}")
    return _failed(failures, evidence, launcher_code)


def _stop_of_a_node(evidence: Evidence, signals: Mapping[str, float]) -> SentSignal | None:
    """The first signal for which a supervisor has stopped its node. signals: see judge().

    Without its report, a record of a node does not explain errors on other nodes: both times in it may be wrong.
    """
    errors = {one.node for one in evidence.failures if kind_of(one) < Kind.COLLATERAL}
    stops = (one for one in evidence.signals if one.stops_a_node)
    return next((one for one in stops if one.node in signals or errors <= {one.node}), None)


def _hung(hang: Json) -> Verdict:
    others = [
        {"node": text(one.get("node")), "rank": integer(one.get("rank")), "message": text(one.get("message"))}
        for one in map(mapping, listed(hang.get("others")))
    ]
    time = number(hang.get("time"))
    return Verdict(
        outcome="failed",
        exit_code=TIMED_OUT,
        cause=text(hang.get("cause")) or "hung",
        node=text(hang.get("node")) or None,
        rank=integer(hang.get("rank")),
        time=time if math.isfinite(time) else None,
        traceback=text(hang.get("traceback")),
        collateral=tuple(others),
    )


def _failed(failures: Sequence[Failure], evidence: Evidence, launcher_code: int | None) -> Verdict:
    """The verdict if the first of these failures is the cause."""
    cause, kind = failures[0], kind_of(failures[0])
    codes = [failure.exit_code for failure in failures if failure.exit_code and kind_of(failure) < Kind.STOPPED]
    raised = decisive_exception(cause)
    others = [one for one in failures if (one.node, one.rank) != (cause.node, cause.rank)]
    return Verdict(
        outcome="stopped" if kind is Kind.TERMINATED else "failed",
        exit_code=cause.exit_code or [*([UNFIT] if kind is Kind.LOST_NODE else codes), launcher_code or 1][0],
        cause=_sentence(cause) + _remarks(cause, evidence) + _signal_before(cause, evidence) + _reported(evidence),
        node=cause.node,
        rank=cause.rank,
        time=cause.time,
        exception=raised.exception,
        message=raised.message,
        traceback=cause.traceback,
        collateral=_collateral([*others, *evidence.reported]),
    )


def _all_succeeded(evidence: Evidence) -> bool:
    """Whether every agent exited with 0; then all failures are of earlier attempts."""
    return bool(evidence.exits) and {evidence.exits.get(node) for node in (*evidence.exits, *evidence.ranks)} == {0}


def _nothing_failed(evidence: Evidence, launcher_code: int | None) -> Verdict:
    if launcher_code in INTERRUPTED and _all_succeeded(evidence):
        return Verdict("stopped", 0, "stopped on request; all ranks exited with 0")
    if launcher_code in INTERRUPTED:
        how = "(Ctrl-C)" if launcher_code == 128 + signal.SIGINT else "(SIGTERM)"
        if evidence.signal:
            how = f"by {evidence.signal}"
        return Verdict("stopped", launcher_code, f"interrupted {how}; no rank had failed")
    if launcher_code:
        cause = f"the launcher exited with code {launcher_code}; no rank recorded a failure"
        cause += f", and none can be recorded: {evidence.disk}" if evidence.disk else ""
        return Verdict("failed", launcher_code, cause)
    if launcher_code == 0 or _all_succeeded(evidence):
        return Verdict("ok", 0, "all ranks exited with 0")
    missing = "no exit code and no failure is recorded in this directory; nodes that do not share it may have more"
    return Verdict("failed", 1, missing)


def _collateral(failures: Iterable[Failure]) -> tuple[Json, ...]:
    recorded = (one for one in failures if not one.witness)
    return tuple(
        {"node": one.node, "rank": one.rank, "message": _source(one) + _short(describe(one))} for one in recorded
    )


def _source(failure: Failure) -> str:
    return f"reported by {failure.reported_by}: " if failure.reported_by else ""


# ---------------------------------------------------------------- in one sentence

_AGENT_PREFIX = "agent: "  # prefix of the agent's own lines; the last such line is the reason why it exited


def _sentence(failure: Failure) -> str:
    name, problem = name_of(failure), _short(describe(failure))
    lost = _short(failure.message) or "the node lost power or network, or all its processes were killed"
    how = f"{name} {_short(describe(failure, 'raised '))}"
    unclear = f"{how}; no clearer cause was recorded"
    if failure.rank is None and failure.message.startswith(_AGENT_PREFIX):
        unclear = f"{name} failed: {_short(failure.message.removeprefix(_AGENT_PREFIX))}"
    return {
        Kind.OWN_ERROR: how,
        Kind.AGENT: failure.message if _not_started(failure) else f"{name} failed: {problem}",
        Kind.LOST_NODE: f"{failure.node}: connection lost: {lost}",
        Kind.UNCLEAR: unclear,
        Kind.MISSING_RANK: f"{name} {failure.witness}",
        Kind.COLLATERAL: f"the cause was not recorded; {name} was affected first: {problem}",
        Kind.STOPPED: "stopped on request, checkpoint written",
        Kind.TERMINATED: f"{how}; no rank had failed before",
    }[kind_of(failure)]


def _not_started(failure: Failure) -> bool:
    """Whether the agent was not started, because of node_env.sh or the login shell. The message has the remedy."""
    return failure.rank is None and (NODE_ENV in failure.message or LOGIN_SHELL in failure.message)


def name_of(failure: Failure) -> str:
    """The name of the failed process in messages, such as `rank 3 on node2`."""
    if failure.node == SRUN:
        return SRUN
    name = f"the {failure.program}" if failure.rank is None else f"rank {failure.rank}"
    return f"{name} on {failure.node}"


def describe(failure: Failure, verb: str = "") -> str:
    """The exception or message; if there is neither, the exit code. verb: precedes an exception."""
    raised, code = decisive_exception(failure), failure.exit_code
    if raised.exception:
        return f"{verb}{raised.exception}" + (f": {raised.message}" if raised.message else "")
    if raised.message:
        return f"ended with: {raised.message}" if verb else raised.message
    if code is None:
        return "left no record"
    name = signal_name(code)
    if failure.ended_by_agent:
        return f"was stopped with the others ({name or f'exit code {code}'})"
    return f"died of {name}" if name else f"exited with code {code}"


def _location(failure: Failure, launched: str) -> str:
    """The innermost frame of the user's code in the traceback; empty if there is none. launched: see is_library()."""
    frames = list(_FRAME.finditer(decisive_exception(failure).traceback))
    user_frames = [frame for frame in frames if not is_library(frame[1], launched)] or frames
    if not user_frames:
        return ""
    file, line, function = user_frames[-1].groups()
    return f" at {os.path.basename(file)}:{line}" + ("" if function.startswith("<") else f" in {function}()")


def _short(text: str) -> str:
    """The text as one line of at most SHOWN characters, without the file names and advice of gloo."""
    line = " ".join(_NOISE.sub("", text).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def _remarks(cause: Failure, evidence: Evidence) -> str:
    """Mention other errors of ranks: the same error, or one so close in time that it may have been first."""
    if kind_of(cause) is not Kind.OWN_ERROR:
        return ""
    others = [one for one in evidence.failures if one != cause and kind_of(one) is Kind.OWN_ERROR]
    if same := [describe(one) for one in others].count(describe(cause)):
        return f"; the same on {same} more rank{'s' * (same > 1)}"
    for other in others:
        if other.node != cause.node and cause.node == evidence.first:
            continue
        why = "too close in time to tell which was first"
        if other.node != cause.node and not {other.node, cause.node} <= evidence.clocks:
            why = "which was first is not known, because the clocks of nodes may differ"
        elif other.time is not None and cause.time is not None:
            inexact = other.node != cause.node or other.time.is_integer() or cause.time.is_integer()
            if abs(other.time - cause.time) > CLOCK_TOLERANCE * inexact:
                continue
        return f"; {why}: {_sentence(other)}"
    return ""


def _reported(evidence: Evidence) -> str:
    """Mention the first failure of a lost node that another node reports. The report may be wrong."""
    found = sorted(evidence.reported, key=partial(_order, ""))
    if not found or kind_of(found[0]) > Kind.UNCLEAR:
        return ""
    return f"; {_source(found[0])}{name_of(found[0])} {_short(describe(found[0], 'raised '))}"


def _signal_before(cause: Failure, evidence: Evidence) -> str:
    """Mention a signal that was sent shortly before the failure: the one that killed the rank, or the latest."""
    name = signal_name(cause.exit_code)
    sent = next((one for one in evidence.signals if one.name == name), evidence.signal)
    if sent and sent.time and cause.time and -CLOCK_TOLERANCE <= cause.time - sent.time <= SIGNAL_TOLERANCE:
        return f"; {sent} was received {max(0.0, cause.time - sent.time):.0f} s before"
    return ""


# ---------------------------------------------------------------- the printed verdict

# Pattern in a message or signal name -> the likely cause and a remedy.
_HINTS = {
    r"SIGKILL|killed by signal: Killed": "often the kernel's OOM killer: check `dmesg -T | grep -i oom` on {node}; use "
    "fewer ranks per node, a smaller batch or fewer data loader workers",
    r"SIGBUS|Bus error": "often a full /dev/shm: check `df -h /dev/shm` on {node}; start a container with a larger "
    "--shm-size",
    r"SIGSEGV": "native code crashed: an extension, a driver or PyTorch{stack}",
    r"SIGABRT": "native code aborted; its message is in the log",
    r"(?i:cuda|hip)\b.{0,300}out of memory|OutOfMemoryError": "use a smaller batch; `nvidia-smi` on {node} shows the "
    "processes that use a GPU",
    r"\b(_Array)?MemoryError|[Cc]an(no|')t allocate memory|not enough memory": "main memory of {node}, or the limit of "
    "its container or job, is exhausted: check `free -h` there; use fewer ranks per node or a smaller batch",
    r"EADDRINUSE|[Aa]ddress already in use": "another process uses this port on {node}; choose another with "
    "--master-port",
    r"No space left on device": "`df -h` on {node} shows the full disk",
}
_NCCL_TIMEOUT = r"SIGABRT|[Ww]atchdog caught collective operation timeout"  # PyTorch then aborts the rank
_NO_STACK = "; --env PYTHONFAULTHANDLER=1 prints its stack to the log"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def render(verdict: Verdict, run: Path, resume: str = RESUME) -> str:
    """The verdict as text: the cause, hints, the traceback, and the path of the log.

    resume: how to resume a run that has written a checkpoint; "" if the launcher prints that itself.
    """
    lines = [f"verdict: {verdict.outcome}: {verdict.cause}"]
    if verdict.exit_code == STOPPED and resume:
        lines[0] += f"; {resume}"
    if verdict.outcome == "failed":
        lines += [f"  {one_line(line)}" for line in _details(verdict, run)]
    lines += [f"  {change}" for change in verdict.changes]
    return "\n".join(lines) + "\n"


def _details(verdict: Verdict, run: Path) -> Iterator[str]:
    name = signal_name(verdict.exit_code)
    if f"code {verdict.exit_code}" not in verdict.cause:
        yield f"exit code {verdict.exit_code}" + (f" ({name})" if name else "")
    searched = f"{name} {verdict.exception} {verdict.message}"
    for pattern, hint in _HINTS.items():
        if verdict.node and re.search(pattern, searched):
            yield hint.format(node=verdict.node, stack="" if verdict.traceback else _NO_STACK)
    facts = read_object(run / "run.json", [])
    yield from _missing_file(verdict, text(facts.get("cwd")))
    yield from _missing_module(verdict, text(facts.get("python")), text(facts.get("cwd")))
    attempt, log = Path(newest(run)), run / f"node_{verdict.node}.log"
    if verdict.traceback:
        yield from _last_frames(verdict, launched_package(facts))
    elif verdict.rank is not None:  # its output may show why it ended
        lines = read_log(attempt / log.name, str(verdict.node)).get(verdict.rank, [])
        if last := [line.text for line in lines if line.text.strip()][-SHOWN_LINES:]:
            yield "last lines of its output:"
            yield from (f"  {line}" for line in last)
    others = [one for one in verdict.collateral if one["rank"] is not None and one["message"] not in verdict.cause]
    yield from _uncalled_collective(verdict, run)
    hung = verdict.exit_code == TIMED_OUT
    if shown := others[: SHOWN_OTHERS if hung else 1]:
        more = f" ({len(verdict.collateral)} in all, see verdict.json)" if len(others) > len(shown) else ""
        texts = "; ".join(f"rank {one['rank']} on {one['node']}: {one['message']}" for one in shown)
        yield f"{'other ranks' if hung else 'followed'}: {texts}{more}"
    if hung and (stacks := attempt / "hang.json").is_file():
        yield f"all stacks: {stacks}"
    if os.path.isfile(log):  # the name of the node may be of any length
        yield f"all output of {verdict.node}: {log}"


def _missing_file(verdict: Verdict, cwd: str) -> Iterator[str]:
    """If a rank on another node did not find a file that existed here: say so, and whether --sync copies it.

    cwd: the working directory of the run. Files outside of it are left out: a node could ask for any.
    """
    missing = re.search(r"No such file or directory: '(.+?)'", verdict.message)
    if not missing or verdict.time is None or verdict.node in (None, os.uname().nodename):
        return
    try:
        if not os.path.realpath(os.path.join(cwd, missing[1])).startswith(f"{os.path.realpath(cwd)}/"):
            return
        if os.stat(os.path.join(cwd, missing[1])).st_ctime > verdict.time - CLOCK_TOLERANCE:
            return  # it may have been written after the rank looked for it
    except (OSError, ValueError):
        return
    command = [*GIT, "-C", cwd, "check-ignore", "--quiet", "--", missing[1]]
    ignored = run_program(command, GIT_TIMEOUT, git_environment()).code == 0
    reason = "; git ignores it, so --sync does not copy it" * ignored
    yield f"'{missing[1]}' exists on {os.uname().nodename}{reason}; copy it to {verdict.node}, or share its directory"


def _missing_module(verdict: Verdict, python: str, cwd: str) -> Iterator[str]:
    """If a module was not found: the Python of the ranks, and another one of this machine in whose directories it is.

    python, cwd: of the run. The others are those of which scripts/lib/common.bash chooses one. Nothing is imported.
    """
    found = re.match(r"No module named '([A-Za-z_]\w*)", verdict.message)
    if not found or verdict.exception != "ModuleNotFoundError" or not python:
        return
    environments = os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX"), f"{cwd}/.venv", f"{KIT}/.venv"
    for other in [*(f"{one}/bin/python" for one in environments if one), shutil.which("python3") or ""]:
        prefix = Path(other).parent.parent
        is_other = os.path.isfile(other) and os.path.realpath(prefix) != os.path.realpath(Path(python).parent.parent)
        files = [path for place in PACKAGES for path in prefix.glob(f"{place}/{found[1]}*")] if is_other else []
        is_known = any(path.name.partition(".")[0] == found[1] and path.suffix in ("", ".py", ".so") for path in files)
        if is_known and not foreign(prefix, prefix.stat(), (0,)):
            yield f"the ranks' Python is {python}; {other} has '{found[1]}': to use that one, add --python {other}"
            return
    yield f"the ranks' Python is {python}; install the module for it, or choose another Python with --python PATH"


def _uncalled_collective(verdict: Verdict, run: Path) -> Iterator[str]:
    """What PyTorch's flight recorder wrote shortly before a failure, such as the timeout of a collective of NCCL."""
    messages = [verdict.message, *(str(one["message"]) for one in verdict.collateral)]
    if verdict.time is None or not re.search(_NCCL_TIMEOUT, " ".join([signal_name(verdict.exit_code), *messages])):
        return  # the record may be of a healthy run: status.sh --stacks also requests it
    ranks: dict[int, str] = {}
    for node in map(mapping, listed(read_object(run / "run.json", []).get("layout"))):
        first, count = (integer(node.get(key)) or 0 for key in ("first_rank", "processes"))
        ranks |= dict.fromkeys(range(first, first + min(count, MAX_RANKS)), text(node.get("node")))
    if found := find_mismatch(read_newest(str(run), ranks, verdict.time - RECORD_AGE)):
        yield f"PyTorch's flight recorder: {found.text}"


def _last_frames(verdict: Verdict, launched: str) -> Iterator[str]:
    """The last frames of the user's code, then the message. launched: see is_library()."""
    if verdict.traceback.startswith(FATAL):  # starts with the innermost frame
        yield from verdict.traceback.splitlines()[:SHOWN_LINES]
        return
    chained = split_chain(verdict.traceback)
    block = next((block for block in chained if parse_exception(block).message == verdict.message), chained[-1])
    frames = re.findall(r'^(  File "(.+)", line \d.*\n?(?:    .*\n)*)', block, re.MULTILINE)
    user_frames = [text for text, file in frames if not is_library(file, launched)] or [text for text, _ in frames]
    yield from "".join(user_frames[-SHOWN_FRAMES:]).splitlines()
    if verdict.exception:
        yield from f"{verdict.exception}: {verdict.message}".splitlines()[:SHOWN_LINES]


def conclude(
    run: Path,
    launcher_code: int | None = None,
    signaled: bool = True,
    resume: str = RESUME,
    stopped_at: float | None = None,
    clocks: Mapping[str, float] | None = None,
    signals: Mapping[str, float] | None = None,
) -> tuple[int, str]:
    """Write verdict.json. Returns the exit code for the launcher, and the text to print.

    launcher_code, signaled, stopped_at, signals: see judge(). resume: see render(). clocks: see gather().
    """
    path = Path(newest(run), "verdict.json")
    if clocks is None or signals is None:  # called again, without the launcher that knows them
        recorded = read_object(path, [])
        clocks, signals = (
            {node: number(one) for node, one in mapping(recorded.get(key)).items()} for key in ("clocks", "signals")
        )
    evidence = gather(run, clocks)
    verdict = judge(evidence, launcher_code, signaled, stopped_at, signals)
    verdict = replace(verdict, changes=evidence.changes, clocks=clocks, signals=signals)
    warnings = list(evidence.warnings)
    try:
        write_json(path, asdict(verdict))
    except OSError as error:
        warnings.insert(0, f"cannot write {path}: {error.strerror}")
    text = "".join(f"verdict: warning: {warning}\n" for warning in warnings)
    return verdict.exit_code, text + render(verdict, run, resume)


def main(arguments: Sequence[str]) -> int:
    """Write verdict.json and print the verdict to stderr. Returns the exit code of the cause."""
    parser = argparse.ArgumentParser(prog="verdict", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    run = parser.parse_args(arguments).run
    if not run.is_dir():
        parser.error(f"'{run}' is not a run directory; choose one in logs/")
    if problem := foreign(run, run.stat()):
        parser.error(problem)
    code, text = conclude(run)
    sys.stderr.write(printable(text, LAYOUT))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
