"""Whose failure came first?

When one rank dies, the others lose their connection to it, and often report that before anybody has noticed
the death. So causes are told from consequences by what each account says, and only then by time. In order:

    a rank that raised an error of its own, died of a signal, or exited by itself
    an agent that could not go on, though no rank of its node had failed
    a node that left nothing behind while the others did
    what may be a cause or not: exit 1 without a word, a broken connection that is not PyTorch's
    a rank that another one names as missing
    a rank that lost the others or waited for them in vain: then the cause was not recorded
    what stopped on request, what was ended from outside

The earliest of the likeliest kind is first, by the nodes' own clocks. They differ by up to a second or so,
and torchrun writes whole seconds: when two causes are as close as that, the sentence names both.

Try it: python -m distributed.verdict logs/latest
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

STOPPED = 75  # exit code: stopped on request with a checkpoint written, run again to go on
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
CLOCK_DOUBT = 1.0  # seconds
LOG_TAIL = 1 << 20  # bytes at the end of a node's log that are looked at
LAST_LINES = 30  # a traceback with more output of its rank behind it was not the end of the rank
SHOWN = 240  # characters of a message in a sentence
SHOWN_LINES = 8  # of a message or a log
SHOWN_FRAMES = 3

Json = dict[str, Any]


# ---------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Failure:
    """How a rank, an agent or a node ended, as one of them tells it."""

    node: str
    rank: int | None = None  # None: the node's agent, or the node as a whole
    local_rank: int | None = None
    pid: int | None = None
    time: float | None = None  # unix seconds
    exit_code: int | None = None  # 128+n for a signal; None for an agent: it left nothing behind
    exception: str | None = None  # name of its class
    message: str = ""
    traceback: str = ""
    ended_by_agent: bool = False  # it got TERM or KILL, after another one had failed
    witness: str = ""  # who names this rank as missing, and in which words


@dataclass(frozen=True)
class Evidence:
    """All that a run left behind about its end."""

    failures: tuple[Failure, ...] = ()
    exits: Mapping[str, int] = field(default_factory=dict)  # node -> exit status of its agent
    nodes: tuple[str, ...] = ()  # by node rank
    nproc: int = 0  # processes on each node; 0 when not known
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the launcher says and exits with: the content of verdict.json."""

    outcome: str  # "ok", "stopped" or "failed"
    exit_code: int
    cause: str  # one sentence
    node: str | None = None
    rank: int | None = None
    time: float | None = None  # unix seconds
    exception: str | None = None
    message: str = ""
    traceback: str = ""
    collateral: tuple[Json, ...] = ()  # of each other one: "node", "rank", "message"


class Kind(IntEnum):
    """What an account is worth: the lower, the likelier the cause."""

    OWN = 1
    AGENT = 2
    LOST_NODE = 3
    UNSURE = 4
    ACCUSED = 5
    COLLATERAL = 6
    STOPPED = 7
    ENDED = 8


# ---------------------------------------------------------------- causes and consequences

# What an innocent rank says when another one is gone: seen in torch 2.13, or read in its source.
_LOST_THE_OTHERS = re.compile(
    r"""
      [Cc]onnection\ closed\ by\ (remote\ )?peer | [Cc]onnection\ reset\ by\ peer | [Cc]onnection\ refused
    | [Bb]roken\ pipe | Socket\ closed | Socket\ Timeout
    | Timed\ out\ waiting\ \d+\ ?ms\ for\ (send|recv)\ operation | connectFullMesh\ failed
    | failed\ to\ pass\ monitoredBarrier | successfully\ reached\ monitoredBarrier,\ but\ received\ errors
    | (recvValue\w*|recvVector|recvBytes|sendBytes)\ failed | [Ff]ailed\ to\ recv,\ got\ 0\ bytes
    | client\ socket\ has\ (failed|timed\ out) | connection\ to\ the\ C10d\ store\ has\ failed
    | wait\ timeout\ after\ \d+ms | Timed\ out\ after\ \d+\ seconds\ waiting\ for\ clients
    | [Ww]atchdog\ caught\ collective\ operation\ timeout | NCCL\ timeout | NCCL\ communicator\ was\ aborted
    | remote\ process\ exited\ or\ there\ was\ a\ network\ error
    | killed\ by\ signal:\ Terminated
    """,
    re.VERBOSE,
)
# Such words in an error of another class may be about any connection: to a file server, to a hub of models.
_OF_TORCH = re.compile(r"RuntimeError|Dist\w*Error|Rendezvous\w*Error")
_ALWAYS_COLLATERAL = ("DistStoreError", "PeerFailed", "RendezvousConnectionError", "RendezvousTimeoutError")
_FROM_OUTSIDE = ("KeyboardInterrupt", "SignalException")
_NAMES_A_RANK = re.compile(
    r"[Rr]anks? \[?(\d{1,9})[\d, ]*\]? (?:failed to pass monitoredBarrier|are the lagging ranks)"
    r"|\[(\d{1,9})[\d, ]*\] finished collective #\d+, but didn't join"
    r"|\brank (\d{1,9}) on .+? (?:failed at step|is not finite)"
)
_CHATTER = re.compile(
    r"\[/\S+\.(?:cc|cpp|h):\d+\] |\s+(?:This is typically caused by|Original exception:|Exception raised from).*",
    re.DOTALL,
)
_CHAIN = re.compile(
    r"\n+(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n+"
)


class Said(NamedTuple):
    """One exception of those that a traceback chains."""

    exception: str | None
    message: str
    traceback: str


def kind(failure: Failure) -> Kind:
    """What this account is worth."""
    if failure.witness:
        return Kind.ACCUSED
    if failure.exit_code == STOPPED:
        return Kind.STOPPED
    if failure.rank is None and failure.exit_code is None:
        return Kind.LOST_NODE
    if failure.exception or failure.message:
        return _kind_by_words(failure)
    return _kind_by_end(failure)


def _kind_by_words(failure: Failure) -> Kind:
    if failure.exception in _FROM_OUTSIDE:
        return Kind.ENDED
    worth = _worth(chain(failure)[0])
    if worth is not Kind.OWN:
        return worth
    if failure.rank is None:
        return Kind.AGENT if failure.exception else Kind.UNSURE
    # The first error may have been handled when a later one, or the agent, ended the rank.
    handled = failure.ended_by_agent or _worth(chain(failure)[-1]) is not Kind.OWN
    return Kind.UNSURE if handled else Kind.OWN


def _kind_by_end(failure: Failure) -> Kind:
    """Of one that ended without a word."""
    from_outside = [128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]
    if failure.ended_by_agent or failure.exit_code in from_outside:
        return Kind.ENDED
    return Kind.UNSURE if failure.rank is None or failure.exit_code == 1 else Kind.OWN


def _worth(said: Said) -> Kind:
    if said.exception in _ALWAYS_COLLATERAL:
        return Kind.COLLATERAL
    if not _LOST_THE_OTHERS.search(said.message):
        return Kind.OWN
    of_torch = said.exception is None or _OF_TORCH.fullmatch(said.exception)
    return Kind.COLLATERAL if of_torch else Kind.UNSURE


def chain(failure: Failure) -> list[Said]:
    """The exceptions that the traceback chains, in the order in which they were raised."""
    blocks = _CHAIN.split(failure.traceback)
    return [*map(_said, blocks[:-1]), Said(failure.exception, failure.message, blocks[-1])]


def _said(block: str) -> Said:
    """What stands behind the last frame of a traceback: Class: message."""
    lines = block.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] + 1 :] if frames else lines
    while rest and rest[0].startswith("  "):
        del rest[0]
    name, _, message = "\n".join(rest).strip().partition(": ")
    return Said(_class_name(name), message, block)


def _class_name(name: str) -> str:
    """torch.distributed.DistStoreError and c10::DistStoreError are DistStoreError."""
    return re.split(r"\.|::", name)[-1]


def decisive(failure: Failure) -> Said:
    """The exception to show: the last one, unless that only came of the first."""
    said = chain(failure)
    if _worth(said[0]) is Kind.OWN and _worth(said[-1]) is not Kind.OWN:
        return said[0]
    return said[-1]


# ---------------------------------------------------------------- who was first


def first(failures: Iterable[Failure]) -> Failure:
    """The earliest of the likeliest kind. Takes at least one; their order does not matter."""
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[Kind, float, str, int]:
    when = math.inf if failure.time is None else failure.time
    return kind(failure), when, failure.node, -1 if failure.rank is None else failure.rank


def accused(evidence: Evidence) -> Iterator[Failure]:
    """The ranks that others name as missing, though they say nothing of that themselves."""
    for failure in evidence.failures:
        if names := _NAMES_A_RANK.search(failure.message):
            rank = int(next(filter(None, names.groups())))
            witness = f"{who(failure)} says: {_short(what(failure))}"
            yield replace(failure, rank=rank, node=_home(rank, evidence), witness=witness)


def _home(rank: int, evidence: Evidence) -> str:
    """The node of a rank, as far as it is known."""
    for failure in evidence.failures:
        if failure.rank == rank:
            return failure.node
    index = rank // evidence.nproc if evidence.nproc else 0
    return evidence.nodes[index] if index < len(evidence.nodes) else "?"


def judge(evidence: Evidence, launcher: int | None = None) -> Verdict:
    """The verdict on what is known. launcher: the exit code that the launcher would end with by itself."""
    failures = sorted([*evidence.failures, *accused(evidence)], key=_order)
    if not failures or (_all_well(evidence) and not launcher):
        return _nothing_failed(evidence, launcher)
    culprit = first(failures)
    worth = kind(culprit)
    if worth is Kind.STOPPED:
        return Verdict("stopped", STOPPED, _SENTENCES[worth](culprit))
    if launcher in INTERRUPTED and worth is not Kind.OWN:
        return replace(_nothing_failed(evidence, launcher), collateral=_collateral(failures))
    codes = [one.exit_code for one in failures if one.exit_code and kind(one) < Kind.STOPPED]
    said = decisive(culprit)
    return Verdict(
        outcome="stopped" if worth is Kind.ENDED else "failed",
        exit_code=culprit.exit_code or [*codes, launcher or 1][0],
        cause=_SENTENCES[worth](culprit) + _remarks(culprit, evidence),
        node=culprit.node,
        rank=culprit.rank,
        time=culprit.time,
        exception=said.exception,
        message=said.message,
        traceback=culprit.traceback,
        collateral=_collateral([one for one in failures if (one.node, one.rank) != (culprit.node, culprit.rank)]),
    )


def _all_well(evidence: Evidence) -> bool:
    """Every agent ended well: accounts of failures are then those of attempts before the last."""
    return bool(evidence.exits) and {evidence.exits.get(node) for node in (*evidence.exits, *evidence.nodes)} == {0}


def _nothing_failed(evidence: Evidence, launcher: int | None) -> Verdict:
    if launcher in INTERRUPTED:
        return Verdict("stopped", launcher, "interrupted before any rank had failed")
    if launcher:
        return Verdict("failed", launcher, f"no rank recorded a failure; the launcher ended with code {launcher}")
    if launcher == 0 or _all_well(evidence):
        return Verdict("ok", 0, "every rank ended well")
    return Verdict("failed", 1, "the run left neither an exit status nor an error: nothing started, or all is lost")


def _collateral(failures: Iterable[Failure]) -> tuple[Json, ...]:
    told = [one for one in failures if not one.witness]
    return tuple({"node": one.node, "rank": one.rank, "message": _short(what(one))} for one in told)


# ---------------------------------------------------------------- in words

_SENTENCES: dict[Kind, Callable[[Failure], str]] = {
    Kind.OWN: lambda one: f"{who(one)} {_did(one)}",
    Kind.AGENT: lambda one: f"{who(one)} could not go on: {_short(what(one))}",
    Kind.LOST_NODE: lambda one: f"{one.node} left nothing behind: it lost power or network, or was killed whole",
    Kind.UNSURE: lambda one: f"{who(one)} {_did(one)}; nothing clearer was recorded",
    Kind.ACCUSED: lambda one: f"{who(one)} did not come: {one.witness}",
    Kind.COLLATERAL: lambda one: f"the cause was not recorded; {who(one)} lost the others first: {_short(what(one))}",
    Kind.STOPPED: lambda _: "stopped on request, a checkpoint is written: run the same command again to go on",
    Kind.ENDED: lambda one: f"{who(one)} {_did(one)}; no rank had failed before",
}


def who(failure: Failure) -> str:
    name = "the agent" if failure.rank is None else f"rank {failure.rank}"
    return f"{name} on {failure.node}"


def _did(failure: Failure) -> str:
    return _short(what(failure, "raised "))


def what(failure: Failure, verb: str = "") -> str:
    """What it says of its end, or else how it ended."""
    said = decisive(failure)
    if said.exception:
        return f"{verb}{said.exception}: {said.message}" if said.message else f"{verb}{said.exception}"
    if said.message:
        return f"ended with: {said.message}" if verb else said.message
    if failure.exit_code is None:
        return "left nothing behind"
    return _ended(failure.exit_code, failure.ended_by_agent)


def _ended(code: int, by_agent: bool) -> str:
    name = signal_name(code)
    if by_agent:
        return f"was ended by the agent ({name or f'exit code {code}'})"
    return f"died of {name}" if name else f"exited with code {code}"


def signal_name(code: int) -> str | None:
    """SIGKILL for 137, None for what is no signal's exit code."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return None


def _short(text: str) -> str:
    """One line of a sentence's length, without gloo's file names and advice."""
    line = " ".join(_CHATTER.sub("", text).split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def _remarks(culprit: Failure, evidence: Evidence) -> str:
    """Who else it may have been."""
    if kind(culprit) is Kind.COLLATERAL:
        return _silent(evidence)
    others = [one for one in evidence.failures if one != culprit and kind(one) is kind(culprit) is Kind.OWN]
    same = [one for one in others if what(one) == what(culprit)]
    if same:
        return f"; {len(same)} more rank{'s' * (len(same) > 1)} the same"
    close = [one for one in others if _too_close(one, culprit)]
    return f"; too close in time to say which was first: {who(close[0])} {_did(close[0])}" if close else ""


def _too_close(one: Failure, other: Failure) -> bool:
    """Whether these times do not tell which was first."""
    if one.time is None or other.time is None:
        return True
    coarse = one.node != other.node or one.time.is_integer() or other.time.is_integer()
    return abs(one.time - other.time) <= CLOCK_DOUBT * coarse


def _silent(evidence: Evidence) -> str:
    """When all but one have waited in vain, the one is where to look."""
    size = len(evidence.nodes) * evidence.nproc
    told = {one.rank for one in evidence.failures if one.rank is not None and kind(one) is not Kind.ENDED}
    if size < 2 or len(told) != size - 1 or max(told) >= size:
        return ""
    rank = sum(range(size)) - sum(told)
    return f"; rank {rank} on {_home(rank, evidence)} alone reported nothing: look there first"


# ---------------------------------------------------------------- reading what the run left


def decide(run: Path, launcher: int | None = None) -> Verdict:
    """The verdict on the run in this folder. launcher: the exit code that it would end with by itself.

    Reads only. Files that are cut short or damaged are passed over.
    """
    return judge(gather(run), launcher)


def gather(run: Path) -> Evidence:
    """Read all accounts in the folder of a run, and join those about one rank."""
    warnings: list[str] = []
    facts = _read_json(run / "run.json", warnings)
    nodes = tuple(name for name in _list(facts.get("nodes")) if isinstance(name, str))
    known = Evidence(exits=_exits(run, warnings), nodes=nodes, nproc=max(0, _int(facts.get("nproc")) or 0))
    logs = {path.name[5:-4]: read_log(path, path.name[5:-4]) for path in sorted(run.glob("node_*.log"))}
    # Of two accounts the better one stands to the right.
    ends = _by_rank(_summaries(logs)) | _by_rank(_deaths(run, warnings))
    written = _by_rank(_torchrun_accounts(run, ends, known, warnings)) | _by_rank(_rank_accounts(run, warnings))
    told = _by_rank(_log_accounts(logs, ends)) | written
    failures = [_joined(told[key], ends[key]) for key in sorted(told.keys() & ends.keys())]
    failures += [(told | ends)[key] for key in sorted(told.keys() ^ ends.keys())]
    failures += _failed_agents(known.exits, logs, failures)
    failures += _lost_nodes(known, failures)
    return replace(known, failures=tuple(failures), warnings=tuple(warnings))


Ranks = dict[tuple[str, int], Failure]


def _by_rank(failures: Iterable[Failure]) -> Ranks:
    return {(failure.node, failure.rank): failure for failure in failures if failure.rank is not None}


def _joined(told: Failure, end: Failure) -> Failure:
    """What a rank told, with what its agent saw of its end."""
    if told.pid and end.pid and told.pid != end.pid:
        return end  # it told so before the agent started it again
    code = told.exit_code
    if code is None:
        # Python's exit code is 1. That PyTorch's threads then aborted the process is no news.
        code = 1 if told.exception and told.traceback and (end.exit_code or 0) > 128 else end.exit_code
    return replace(
        told,
        local_rank=end.local_rank,
        pid=end.pid,
        time=end.time if told.time is None else told.time,
        exit_code=code,
        ended_by_agent=end.ended_by_agent,
    )


def _rank_accounts(run: Path, warnings: list[str]) -> Iterator[Failure]:
    """errors/rank_<rank>.json: what a worker writes of itself."""
    for path in sorted(run.glob("errors/rank_*.json")):
        if failure := _failure(_read_json(path, warnings), node="?"):
            yield failure


def _deaths(run: Path, warnings: list[str]) -> Iterator[Failure]:
    """errors/node_<name>.json: the ranks that the kit's agent saw end."""
    for path in sorted(run.glob("errors/node_*.json")):
        account = _read_json(path, warnings)
        node = _text(account.get("node")) or path.name[5:-5]
        for death in _list(account.get("deaths")):
            if isinstance(death, dict) and (failure := _failure(death, node)):
                yield failure


def _failure(account: Json, node: str) -> Failure | None:
    """None when it does not even say which rank it is about."""
    rank = _int(account.get("rank"))
    if rank is None:
        return None
    return Failure(
        node=_text(account.get("node")) or node,
        rank=rank,
        local_rank=_int(account.get("local_rank")),
        pid=_int(account.get("pid")),
        time=_seconds(account.get("time")),
        exit_code=_code(account.get("exit_code")),
        exception=_text(account.get("exception")) or None,
        message=_text(account.get("message")),
        traceback=_text(account.get("traceback")),
        ended_by_agent=account.get("ended_by_agent") is True,
    )


def _torchrun_accounts(run: Path, ends: Ranks, known: Evidence, warnings: list[str]) -> Iterator[Failure]:
    """ranks/<node>/<...>/attempt_<k>/<local rank>/error.json, of each node's last attempt."""
    for folder in sorted(run.glob("ranks/*")):
        attempts = sorted(folder.glob("**/attempt_*"), key=_attempt_order)
        for path in sorted(attempts[-1].glob("*/error.json")) if attempts else []:
            local_rank = int(path.parent.name) if path.parent.name.isdecimal() else 0
            said = _torchrun_said(_read_json(path, warnings))
            if said:
                rank = _rank_at(folder.name, local_rank, ends, known)
                yield replace(said, node=folder.name, rank=rank, local_rank=local_rank)


def _attempt_order(attempt: Path) -> tuple[float, int]:
    """By launch, then by number: attempt_10 comes after attempt_9."""
    number = attempt.name.removeprefix("attempt_")
    return attempt.parent.stat().st_mtime, int(number) if number.isdecimal() else -1


def _torchrun_said(account: Json) -> Failure | None:
    message = account.get("message")
    if isinstance(message, str):
        return Failure("", message=message, time=_seconds(account.get("timestamp")))
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    name, _, text = _text(message.get("message")).partition(": ")
    trace = _text(extra.get("py_callstack"))
    return Failure("", exception=name, message=text, traceback=trace, time=_seconds(extra.get("timestamp")))


def _rank_at(node: str, local_rank: int, ends: Ranks, known: Evidence) -> int:
    for (name, rank), end in ends.items():
        if name == node and end.local_rank == local_rank:
            return rank
    return (known.nodes.index(node) * known.nproc if node in known.nodes else 0) + local_rank


def _exits(run: Path, warnings: list[str]) -> dict[str, int]:
    exits = {}
    for path in sorted(run.glob("node_*.exit")):
        try:
            exits[path.name[5:-5]] = range(256)[int(path.read_text())]
        except (OSError, ValueError, IndexError) as error:
            warnings.append(f"{path}: passed over, there is no exit status in it ({error})")
    return exits


def _failed_agents(exits: Mapping[str, int], logs: Logs, failures: Sequence[Failure]) -> list[Failure]:
    """Where an agent ended badly and nobody wrote why, its log is all there is."""
    told = {failure.node for failure in failures}
    silent = [node for node, code in exits.items() if code and node not in told]
    return [failure for node in silent for failure in _from_log(node, exits[node], logs.get(node, {}))]


def _from_log(node: str, code: int, log: Log) -> list[Failure]:
    told = [(rank, last_words(lines)) for rank, lines in log.items() if rank is not None]
    ranks = [Failure(node, rank, exit_code=code, **said._asdict()) for rank, said in told if said]
    return ranks or [_agent_failure(node, code, log.get(None, []))]


def _agent_failure(node: str, code: int, lines: Sequence[Line]) -> Failure:
    said = last_words(lines)
    if said is None:
        texts = [line.text for line in lines if line.text.strip()]
        said = Said(None, texts[-1] if texts and code < 128 else "", "")
    return Failure(node, exit_code=code, **said._asdict())


def _lost_nodes(known: Evidence, failures: Sequence[Failure]) -> list[Failure]:
    heard = {*known.exits, *(failure.node for failure in failures)}
    return [Failure(node) for node in known.nodes if known.exits and node not in heard]


def _read_json(path: Path, warnings: list[str]) -> Json:
    """Empty when there is nothing to be had from it."""
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
        warnings.append(f"{path}: passed over, it is not an account of anything")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        warnings.append(f"{path}: passed over, it was not written to its end or is damaged ({error})")
    return {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _code(value: object) -> int | None:
    """An exit code; -9 of a process killed by signal 9 becomes 137."""
    code = _int(value)
    return code if code is None else (128 - code if code < 0 else code) & 0xFF


def _seconds(value: object) -> float | None:
    try:
        seconds = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# ---------------------------------------------------------------- reading a node's log


class Line(NamedTuple):
    """A line of one rank, without the marks in front of it."""

    text: str
    marked: bool  # [rank0]: stood there, which PyTorch puts before each line of an exception


Log = dict[int | None, list[Line]]  # the lines of each rank; under None what nobody marked, the agent's own
Logs = dict[str, Log]

_MARK = re.compile(r"\[rank(\d{1,9})\]: ?")
_SUMMARY = re.compile(
    r"time +: (\S+)\n.*\n +rank +: (\d{1,9}) \(local_rank: (\d{1,9})\)"
    r"\n +exitcode +: (-?\d{1,9}) \(pid: (\d{1,9})\)"
)
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_THROWN = re.compile(r"^terminate called after throwing an instance of '(.+)'\n +what\(\): +(.*)", re.MULTILINE)


def read_log(path: Path, node: str) -> Log:
    """The end of a node's log, by rank."""
    prefix = re.compile(rf"\[{re.escape(node)}:(?:(\d{{1,9}})|[^\]\s]*)\] ?")
    log: Log = {}
    for text in _tail(path):
        rank: int | None = None
        if found := prefix.match(text):
            text, rank = text[found.end() :], int(found[1]) if found[1] else None
        if marked := _MARK.match(text):
            text, rank = text[marked.end() :], int(marked[1]) if rank is None else rank
        log.setdefault(rank, []).append(Line(text.rstrip(), bool(marked)))
    return log


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL))
            return file.read().decode(errors="replace").split("\n")[size > LOG_TAIL :]
    except OSError:
        return []


def _summaries(logs: Logs) -> Iterator[Failure]:
    """The list of failures that torchrun's agent prints at its end."""
    for node, log in logs.items():
        text = "\n".join(line.text for line in log.get(None, []))
        ended = {int(pid) for pid in re.findall(r"Sending process (\d{1,9}) closing signal", text)}
        for when, *numbers in _SUMMARY.findall(text[text.rfind("\nFailures:") :]):
            rank, local_rank, code, pid = map(int, numbers)
            yield Failure(node, rank, local_rank, pid, _local_time(when), _code(code), ended_by_agent=pid in ended)


def _local_time(text: str) -> float | None:
    """2025-01-02_03:04:05, in the node's time zone, which is taken to be ours."""
    try:
        return datetime.fromisoformat(text.replace("_", "T")).timestamp()
    except (ValueError, OverflowError):
        return None


def _log_accounts(logs: Logs, ends: Ranks) -> Iterator[Failure]:
    """What a rank printed last. Of one that was killed, or stopped on request, that is not why it ended."""
    for (node, rank), end in ends.items():
        killed = end.exit_code == 128 + signal.SIGKILL and not end.ended_by_agent
        said = None if killed or end.exit_code == STOPPED else last_words(logs.get(node, {}).get(rank, []))
        if said:
            yield Failure(node, rank, **said._asdict())


def last_words(lines: Sequence[Line]) -> Said | None:
    """The traceback, or what native code says of its end. None when the lines end with something else."""
    return _python_words(lines) or _native_words(lines)


def _python_words(lines: Sequence[Line]) -> Said | None:
    starts = [number for number, line in enumerate(lines) if line.text == _TRACEBACK]
    if not starts:
        return None
    end = _end_of_traceback(lines, starts[-1])
    if len(lines) - end > LAST_LINES:
        return None
    begin = starts.pop()
    while starts and _CHAIN.search("\n".join(line.text for line in lines[starts[-1] : begin + 1])):
        begin = starts.pop()
    trace = "\n".join(line.text for line in lines[begin:end])
    return _said(_CHAIN.split(trace)[-1])._replace(traceback=trace)


def _end_of_traceback(lines: Sequence[Line], start: int) -> int:
    """Behind the message: where the marks end or, without marks, at an empty line."""
    end = start + 1
    while end < len(lines) and lines[end].marked == lines[start].marked and (lines[end].marked or lines[end].text):
        end += 1
    return end


def _native_words(lines: Sequence[Line]) -> Said | None:
    """Of a C++ exception that nobody caught, or the stack that Python prints when it dies of a signal."""
    text = "\n".join(line.text for line in lines)
    thrown = _THROWN.findall(text)
    if thrown:
        return Said(_class_name(thrown[-1][0]), thrown[-1][1], "")
    fatal = text.rfind(_FATAL)
    return None if fatal < 0 else Said(None, "", text[fatal:])


# ---------------------------------------------------------------- what a person reads

# The likely meaning of what a rank died of: in its words, or the name of its signal.
_MEANINGS = {
    r"SIGKILL|killed by signal: Killed": "often the kernel, when memory is full: `dmesg -T | grep -i oom` on {node}",
    r"SIGBUS|Bus error": "often a full /dev/shm: `df -h /dev/shm` on {node}; a container needs a larger --shm-size",
    r"SIGSEGV": "native code: an extension, a driver, PyTorch; with PYTHONFAULTHANDLER=1 the log shows where",
    r"SIGABRT": "native code gave up; what it said stands in the log",
    r"out of memory|can't allocate memory": "a smaller batch needs less; `nvidia-smi` on {node} shows who uses a GPU",
    r"EADDRINUSE|[Aa]ddress already in use": "another process has this port on {node}: --master-port takes another",
    r"No space left on device": "`df -h` on {node} shows which disk is full",
}
_NOT_THEIRS = re.compile(r'File "(<frozen |.*/(site-packages|dist-packages|lib/python3[.\d]*)/)')


def in_words(verdict: Verdict, run: Path) -> str:
    """The verdict for a person: what happened, what it means, where to read on."""
    lines = [f"verdict: {verdict.outcome}: {verdict.cause}"]
    if verdict.outcome == "failed":
        lines += [f"  {line}" for line in _details(verdict, run)]
    return "\n".join(lines) + "\n"


def _details(verdict: Verdict, run: Path) -> Iterator[str]:
    name = signal_name(verdict.exit_code)
    yield f"exit code {verdict.exit_code}" + (f" ({name})" if name else "")
    about = f"{name} {verdict.exception} {verdict.message}"
    for words, meaning in _MEANINGS.items():
        if re.search(words, about):
            yield meaning.format(node=verdict.node)
    log = run / f"node_{verdict.node}.log"
    if verdict.traceback:
        yield from _last_frames(verdict)
    elif verdict.rank is not None:
        yield from _last_lines(read_log(log, str(verdict.node)).get(verdict.rank, []))
    yield from _others(verdict)
    if log.is_file():
        yield f"all output of {verdict.node}: {log}"


def _last_frames(verdict: Verdict) -> Iterator[str]:
    """The last frames of the person's own code, then the message."""
    if verdict.traceback.startswith(_FATAL):  # that one begins with the last frame
        yield from verdict.traceback.splitlines()[:SHOWN_LINES]
        return
    blocks = _CHAIN.split(verdict.traceback)
    block = next((block for block in blocks if _said(block).message == verdict.message), blocks[-1])
    frames = re.findall(r'^  File ".*\n(?:    .*\n)*', block, re.MULTILINE)
    theirs = [frame for frame in frames if not _NOT_THEIRS.search(frame)] or frames
    yield from "".join(theirs[-SHOWN_FRAMES:]).splitlines()
    yield from f"{verdict.exception}: {verdict.message}".splitlines()[:SHOWN_LINES]


def _last_lines(lines: Sequence[Line]) -> Iterator[str]:
    """A rank that left no traceback may have printed why it ended."""
    shown = [line.text for line in lines if line.text.strip()][-SHOWN_LINES:]
    if shown:
        yield "its last lines:"
        yield from (f"  {line}" for line in shown)


def _others(verdict: Verdict) -> Iterator[str]:
    """One of those that only followed, and how many there are."""
    told = [one for one in verdict.collateral if one["rank"] is not None and one["message"] not in verdict.cause]
    if told:
        more = f" ({len(verdict.collateral)} in all, see verdict.json)" if len(told) > 1 else ""
        yield f"followed: rank {told[0]['rank']} on {told[0]['node']}: {told[0]['message']}{more}"


def save(verdict: Verdict, run: Path) -> None:
    """Write verdict.json, whole or not at all."""
    beside = run / f".verdict.json.{os.getpid()}"
    try:
        beside.write_text(json.dumps(asdict(verdict), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        beside.replace(run / "verdict.json")
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def main(words: Sequence[str]) -> int:
    """Judge a run, write verdict.json, say it on standard error. Returns the exit code for the launcher."""
    parser = argparse.ArgumentParser(prog="verdict", description="Whose failure came first?", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--exit-code", type=int, metavar="N", help="what the launcher would end with by itself")
    options = parser.parse_args(words)
    if not options.run.is_dir():
        parser.error(f"'{options.run}' is not the folder of a run: name one of those in logs/")
    evidence = gather(options.run)
    verdict = judge(evidence, options.exit_code)
    try:
        save(verdict, options.run)
    except OSError as error:
        sys.stderr.write(f"verdict: warning: cannot write {options.run}/verdict.json: {error.strerror}\n")
    sys.stderr.write("".join(f"verdict: warning: {warning}\n" for warning in evidence.warnings))
    sys.stderr.write(in_words(verdict, options.run))
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
