"""What a run left behind about its end, read into one account of each rank, agent and node that failed.

The run directory holds, as far as they came: what workers wrote of themselves (errors/rank_<rank>.json), what the kit's
agent saw (errors/node_<name>.json), why a supervisor was killed or lost its launcher (errors/supervisor_<name>.json),
why the launcher ended the run as hung (hang.json), torchrun's error files (ranks/), the exit codes of the nodes and
their logs. Any of them may be missing, cut short or damaged; what can be read counts.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from distributed.exit_codes import STOPPED, UNFIT

STOP_CODES = (STOPPED, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # of ranks that were stopped
NODE_ENV = "config/node_env.sh: "  # before what is wrong with that file, as a node prints it
SRUN = "srun"  # when it could start nothing, it has left what it said as if it were a node
MOST_RANKS = 1 << 20  # of a node: more is no number of processes
LOG_TAIL = 1 << 20  # bytes at the end of a node's log that are looked at
LAST_LINES = 30  # a traceback with more output of its rank behind it was not the end of the rank

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
    witness: str = ""  # for which others waited: what is known of it, and who says so
    program: str = "agent"  # without a rank: agent or supervisor


@dataclass(frozen=True)
class Evidence:
    """All that a run left behind about its end."""

    failures: tuple[Failure, ...] = ()
    exits: Mapping[str, int] = field(default_factory=dict)  # node -> exit status of its agent
    ranks: Mapping[str, range] = field(default_factory=dict)  # of each node, by node rank
    warnings: tuple[str, ...] = ()
    ended_well: Mapping[int, str] = field(default_factory=dict)  # rank -> node, of those that ended with 0
    hang: Json = field(default_factory=dict)  # why the launcher ended it; empty when it did not hang


# ---------------------------------------------------------------- the exceptions of a traceback

_CHAIN = re.compile(
    r"\n+(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n+"
)


class Said(NamedTuple):
    """One exception of those that a traceback chains."""

    exception: str | None
    message: str
    traceback: str


def blocks(traceback: str) -> list[str]:
    """The parts of a traceback, one for each exception that it chains, in the order in which they were raised."""
    return _CHAIN.split(traceback)


def exception_of(block: str) -> Said:
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


# ---------------------------------------------------------------- reading what the run left


def gather(run: Path) -> Evidence:
    """Read all accounts in the folder of a run, and join those about one rank."""
    warnings: list[str] = []
    facts = _read_json(run / "run.json", warnings)
    hang = _read_json(run / "hang.json", warnings)
    seen = [_read_json(path, warnings) | {"file": path.name} for path in sorted(run.glob("errors/node_*.json"))]
    known = Evidence(exits=_exits(run, warnings), ranks=_ranks(facts), ended_well=_ended_well(seen), hang=hang)
    logs = {path.name[5:-4]: read_log(path, path.name[5:-4]) for path in sorted(run.glob("node_*.log"))}
    # Of two accounts the better one stands to the right.
    ends = _by_rank(_summaries(logs)) | _by_rank(_deaths(seen))
    written = _by_rank(_torchrun_accounts(run, ends, known, warnings)) | _by_rank(_rank_accounts(run, warnings))
    told = _by_rank(_log_accounts(logs, ends)) | written
    failures = [_joined(told[key], ends[key]) for key in sorted(told.keys() & ends.keys())]
    failures += [(told | ends)[key] for key in sorted(told.keys() ^ ends.keys())]
    failures += _supervisors(run, facts, warnings)
    failures += _failed_agents(known, logs, failures)
    failures += _lost_nodes(run, known, failures, seen)
    return replace(known, failures=tuple(failures), warnings=tuple(warnings))


def _supervisors(run: Path, facts: Json, warnings: list[str]) -> Iterator[Failure]:
    """errors/supervisor_<name>.json: one that was killed, or has lost its launcher."""
    places = [place for place in _list(facts.get("places")) if isinstance(place, dict)]
    without_ssh = {place.get("node") for place in places if not place.get("address")}
    for path in sorted(run.glob("errors/supervisor_*.json")):
        record = _read_json(path, warnings)
        node, time = path.name[11:-5], _seconds(record.get("time"))
        if record.get("cause") == "killed":
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="supervisor")
        elif record.get("cause") == "launcher lost" and node in without_ssh:  # there is no connection to be lost
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="launcher")
        elif message := _text(record.get("message")):
            yield Failure(node, time=time, message=message)


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


def _deaths(seen: Iterable[Json]) -> Iterator[Failure]:
    """errors/node_<name>.json: the ranks that the kit's agent saw end."""
    for account in seen:
        node = _text(account.get("node")) or account["file"][5:-5]
        for death in _list(account.get("deaths")):
            if isinstance(death, dict) and (failure := _failure(death, node)):
                yield failure


def _ended_well(seen: Iterable[Json]) -> dict[int, str]:
    nodes = ((_text(account.get("node")), account) for account in seen)
    return {
        rank: node
        for node, account in nodes
        for rank in map(_int, _list(account.get("ended_well")))
        if rank is not None
    }


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
    return known.ranks.get(node, range(0)).start + local_rank


def _ranks(facts: Json) -> dict[str, range]:
    """Which ranks each node has, as run.json tells."""
    ranks = {}
    for place in _list(facts.get("places")):
        if isinstance(place, dict) and (node := _text(place.get("node"))):
            first = _int(place.get("first_rank")) or 0
            ranks[node] = range(first, first + min(_int(place.get("processes")) or 0, MOST_RANKS))
    return ranks


def _exits(run: Path, warnings: list[str]) -> dict[str, int]:
    exits = {}
    for path in sorted(run.glob("node_*.exit")):
        try:
            exits[path.name[5:-5]] = range(256)[int(path.read_text())]
        except (OSError, ValueError, IndexError) as error:
            warnings.append(f"{path}: passed over, there is no exit status in it ({error})")
    return exits


def _failed_agents(known: Evidence, logs: Logs, failures: Sequence[Failure]) -> list[Failure]:
    """Where an agent ended badly and nobody wrote why, its log is all there is."""
    told = {*(failure.node for failure in failures), *known.ended_well.values()}
    silent = [node for node, code in known.exits.items() if code and node not in told]
    return [failure for node in silent for failure in _from_log(node, known.exits[node], logs.get(node, {}))]


def _from_log(node: str, code: int, log: Log) -> list[Failure]:
    told = [(rank, last_words(lines)) for rank, lines in log.items() if rank is not None]
    ranks = [Failure(node, rank, exit_code=code, **said._asdict()) for rank, said in told if said]
    return ranks or [_agent_failure(node, code, log.get(None, []))]


def _agent_failure(node: str, code: int, lines: Sequence[Line]) -> Failure:
    said = last_words(lines)
    if said is None:
        texts = [line.text for line in lines if line.text.strip()]
        # srun prints more behind that.
        texts = [text for text in texts if code == UNFIT and NODE_ENV in text] or texts
        said = Said(None, texts[-1] if texts and code < 128 else "", "")
    return Failure(node, exit_code=code, **said._asdict())


def _lost_nodes(run: Path, known: Evidence, failures: Sequence[Failure], seen: Sequence[Json]) -> list[Failure]:
    """The nodes of which nothing is there while there is of others, and those that could not be heard any more."""
    heard = {*known.exits, *(failure.node for failure in failures)}
    begun = known.exits and SRUN not in known.exits
    silent = {node for node in known.ranks if begun and node not in heard}
    told = {path.name[5:-5]: _first_line(path) for path in run.glob("node_*.lost")}  # by the launcher
    cut_off = told.keys() & set(known.ranks)
    return [Failure(node, message=told.get(node, "")) for node in sorted(silent | (cut_off or _not_heard(known, seen)))]


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""


def _not_heard(known: Evidence, seen: Sequence[Json]) -> set[str]:
    """Where a network breaks in two, each side does not hear the other: the larger one is believed, then the first."""
    told = Counter(lost for account in seen if (lost := _text(account.get("lost"))))
    by_rank = {node: rank for rank, node in enumerate(known.ranks)}
    likely = max(told, key=lambda node: (told[node], by_rank.get(node, 0)), default="")
    # A node that is cut off stops its ranks. What ended by something else had ended before it was missed.
    return {likely} if likely and known.exits.get(likely, UNFIT) in (UNFIT, *STOP_CODES) else set()


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
FATAL = "Fatal Python error: "
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
    return exception_of(blocks(trace)[-1])._replace(traceback=trace)


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
    fatal = text.rfind(FATAL)
    return None if fatal < 0 else Said(None, "", text[fatal:])
