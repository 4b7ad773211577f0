"""How the ranks, agents and nodes of a run failed: one Failure each, from all records of it.

A run directory has, as far as they were written: failure records of workers (errors/rank_<rank>.json), of the kit's
agents (errors/node_<name>.json) and of supervisors that were killed or lost their launcher
(errors/supervisor_<name>.json); why the launcher ended the run as hung (hang.json); torchrun's error files (ranks/);
the exit codes of the nodes, and their logs. Any of them may be missing, cut short or damaged; what can be read counts.
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed.exit_codes import STOPPED, UNFIT
from distributed.runs.node_log import Log, Raised, last_exception, read_log
from distributed.runs.records import integer, listed, mapping, read_object, text

STOP_CODES = (STOPPED, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # of ranks that were stopped
NODE_ENV = "config/node_env.sh: "  # before what is wrong with that file, as a node prints it
SRUN = "srun"  # when it could start nothing, its output is in files named as those of a node
MOST_RANKS = 1 << 20  # of a node: more is no number of processes

Json = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """How a rank, an agent or a node ended."""

    node: str
    rank: int | None = None  # None: the node's agent, or the node as a whole
    local_rank: int | None = None
    pid: int | None = None
    time: float | None = None  # unix seconds
    exit_code: int | None = None  # 128+n for a signal; None for an agent: it recorded nothing
    exception: str | None = None  # name of its class
    message: str = ""
    traceback: str = ""
    ended_by_agent: bool = False  # it got TERM or KILL, after another one had failed
    witness: str = ""  # others waited for it: what is known of that, and from which rank
    program: str = "agent"  # without a rank: agent, supervisor or launcher


@dataclass(frozen=True)
class Evidence:
    """All that a run directory has about its end."""

    failures: tuple[Failure, ...] = ()
    exits: Mapping[str, int] = field(default_factory=dict)  # node -> exit code of its agent
    ranks: Mapping[str, range] = field(default_factory=dict)  # of each node, by node rank
    warnings: tuple[str, ...] = ()
    ended_well: Mapping[int, str] = field(default_factory=dict)  # rank -> node, of those that ended with 0
    hang: Json = field(default_factory=dict)  # why the launcher ended it; empty when it did not hang


Failures = dict[tuple[str, int], Failure]  # by node and rank
Logs = dict[str, Log]


def gather(run: Path) -> Evidence:
    """Read all records in a run directory, and join those about one rank."""
    warnings: list[str] = []
    facts = read_object(run / "run.json", warnings)
    records = []  # of the kit's agents
    for path in sorted(run.glob("errors/node_*.json")):
        record = read_object(path, warnings)
        records.append(record | {"node": text(record.get("node")) or path.name[5:-5]})
    known = Evidence(
        exits=_exit_codes(run, warnings),
        ranks=_ranks_of_nodes(facts),
        ended_well={
            rank: record["node"]
            for record in records
            for value in listed(record.get("ended_well"))
            if (rank := integer(value)) is not None
        },
        hang=read_object(run / "hang.json", warnings),
    )
    logs = {path.name[5:-4]: read_log(path, path.name[5:-4]) for path in sorted(run.glob("node_*.log"))}
    # Of two records about a rank the better one stands to the right.
    ends = _by_rank(_torchrun_summaries(logs)) | _by_rank(_deaths(records))
    causes = (
        _by_rank(_exceptions_in_logs(logs, ends))
        | _by_rank(_torchrun_records(run, ends, known, warnings))
        | _by_rank(_worker_records(run, warnings))
    )
    failures = [_joined(causes[key], ends[key]) for key in sorted(causes.keys() & ends.keys())]
    failures += [(causes | ends)[key] for key in sorted(causes.keys() ^ ends.keys())]
    failures += _supervisor_records(run, facts, warnings)
    failures += _failed_agents(known, logs, recorded={failure.node for failure in failures})
    failures += _lost_nodes(run, known, failures, records)
    return replace(known, failures=tuple(failures), warnings=tuple(warnings))


def _by_rank(failures: Iterable[Failure]) -> Failures:
    return {(failure.node, failure.rank): failure for failure in failures if failure.rank is not None}


def _joined(cause: Failure, end: Failure) -> Failure:
    """The cause that a rank recorded, with its end as its agent saw it."""
    if cause.pid and end.pid and cause.pid != end.pid:
        return end  # it recorded that before the agent restarted it
    code = cause.exit_code
    if code is None:
        # Python's exit code is 1. That PyTorch's threads then aborted the process is no news.
        code = 1 if cause.exception and cause.traceback and (end.exit_code or 0) > 128 else end.exit_code
    return replace(
        cause,
        local_rank=end.local_rank,
        pid=end.pid,
        time=end.time if cause.time is None else cause.time,
        exit_code=code,
        ended_by_agent=end.ended_by_agent,
    )


# ---------------------------------------------------------------- facts about nodes


def _ranks_of_nodes(facts: Json) -> dict[str, range]:
    """From run.json."""
    ranks = {}
    for place in map(mapping, listed(facts.get("places"))):
        if node := text(place.get("node")):
            first = integer(place.get("first_rank")) or 0
            ranks[node] = range(first, first + min(integer(place.get("processes")) or 0, MOST_RANKS))
    return ranks


def _exit_codes(run: Path, warnings: list[str]) -> dict[str, int]:
    codes = {}
    for path in sorted(run.glob("node_*.exit")):
        try:
            codes[path.name[5:-5]] = range(256)[int(path.read_text())]
        except (OSError, ValueError, IndexError) as error:
            warnings.append(f"{path}: passed over, there is no exit status in it ({error})")
    return codes


# ---------------------------------------------------------------- records about ranks


def _worker_records(run: Path, warnings: list[str]) -> Iterator[Failure]:
    """errors/rank_<rank>.json, which a worker writes."""
    for path in sorted(run.glob("errors/rank_*.json")):
        if failure := _from_record(read_object(path, warnings), node="?"):
            yield failure


def _deaths(records: Iterable[Json]) -> Iterator[Failure]:
    """The ranks that the kit's agents saw end."""
    for record in records:
        for death in listed(record.get("deaths")):
            if failure := _from_record(mapping(death), record["node"]):
                yield failure


def _from_record(record: Mapping[str, Any], node: str) -> Failure | None:
    """None when it does not even have a rank."""
    rank = integer(record.get("rank"))
    if rank is None:
        return None
    return Failure(
        node=text(record.get("node")) or node,
        rank=rank,
        local_rank=integer(record.get("local_rank")),
        pid=integer(record.get("pid")),
        time=_seconds(record.get("time")),
        exit_code=_exit_code(record.get("exit_code")),
        exception=text(record.get("exception")) or None,
        message=text(record.get("message")),
        traceback=text(record.get("traceback")),
        ended_by_agent=record.get("ended_by_agent") is True,
    )


def _torchrun_records(run: Path, ends: Failures, known: Evidence, warnings: list[str]) -> Iterator[Failure]:
    """ranks/<node>/<...>/attempt_<k>/<local rank>/error.json, of each node's last attempt."""
    for directory in sorted(run.glob("ranks/*")):
        node, attempts = directory.name, sorted(directory.glob("**/attempt_*"), key=_attempt_order)
        for path in sorted(attempts[-1].glob("*/error.json")) if attempts else []:
            local_rank = int(path.parent.name) if path.parent.name.isdecimal() else 0
            same = (one.rank for (name, _), one in ends.items() if name == node and one.local_rank == local_rank)
            rank = next(same, known.ranks.get(node, range(0)).start + local_rank)
            record = read_object(path, warnings)
            message = record.get("message")
            if isinstance(message, str):
                yield Failure(node, rank, local_rank, message=message, time=_seconds(record.get("timestamp")))
            elif isinstance(message, dict):
                extra = mapping(message.get("extraInfo"))
                name, _, words = text(message.get("message")).partition(": ")
                raised = Raised(name, words, text(extra.get("py_callstack")))
                yield Failure(node, rank, local_rank, time=_seconds(extra.get("timestamp")), **raised._asdict())


def _attempt_order(attempt: Path) -> tuple[float, int]:
    """By launch, then by number: attempt_10 comes after attempt_9."""
    number = attempt.name.removeprefix("attempt_")
    return attempt.parent.stat().st_mtime, int(number) if number.isdecimal() else -1


_SUMMARY = re.compile(
    r"time +: (\S+)\n.*\n +rank +: (\d{1,9}) \(local_rank: (\d{1,9})\)"
    r"\n +exitcode +: (-?\d{1,9}) \(pid: (\d{1,9})\)"
)


def _torchrun_summaries(logs: Logs) -> Iterator[Failure]:
    """The list of failures that torchrun's agent prints at its end."""
    for node, log in logs.items():
        output = "\n".join(line.text for line in log.get(None, []))
        ended = {int(pid) for pid in re.findall(r"Sending process (\d{1,9}) closing signal", output)}
        for when, *numbers in _SUMMARY.findall(output[output.rfind("\nFailures:") :]):
            rank, local_rank, code, pid = map(int, numbers)
            try:  # 2025-01-02_03:04:05, in the node's time zone, which is taken to be ours
                time = datetime.fromisoformat(when.replace("_", "T")).timestamp()
            except (ValueError, OverflowError):
                time = None
            yield Failure(node, rank, local_rank, pid, time, _exit_code(code), ended_by_agent=pid in ended)


def _exceptions_in_logs(logs: Logs, ends: Failures) -> Iterator[Failure]:
    """What a rank printed last. Of one that was killed, or stopped on request, that is not why it ended."""
    for (node, rank), end in ends.items():
        killed = end.exit_code == 128 + signal.SIGKILL and not end.ended_by_agent
        raised = None if killed or end.exit_code == STOPPED else last_exception(logs.get(node, {}).get(rank, []))
        if raised:
            yield Failure(node, rank, **raised._asdict())


# ---------------------------------------------------------------- supervisors, agents and nodes


def _supervisor_records(run: Path, facts: Json, warnings: list[str]) -> Iterator[Failure]:
    """errors/supervisor_<name>.json: one that was killed, or has lost its launcher."""
    places = map(mapping, listed(facts.get("places")))
    without_ssh = {text(place.get("node")) for place in places if not place.get("address")}
    for path in sorted(run.glob("errors/supervisor_*.json")):
        record = read_object(path, warnings)
        node, time = path.name[11:-5], _seconds(record.get("time"))
        if record.get("cause") == "killed":
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="supervisor")
        elif record.get("cause") == "launcher lost" and node in without_ssh:  # there is no connection to be lost
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="launcher")
        elif message := text(record.get("message")):
            yield Failure(node, time=time, message=message)


def _failed_agents(known: Evidence, logs: Logs, recorded: set[str]) -> Iterator[Failure]:
    """Where an agent ended badly and there is no record of the cause, its log is all there is."""
    for node, code in known.exits.items():
        if not code or node in recorded or node in known.ended_well.values():
            continue
        log = logs.get(node, {})
        of_ranks = {rank: last_exception(lines) for rank, lines in log.items() if rank is not None}
        yield from (Failure(node, rank, exit_code=code, **one._asdict()) for rank, one in of_ranks.items() if one)
        if any(of_ranks.values()):
            continue
        lines = log.get(None, [])
        raised = last_exception(lines)
        if raised is None:
            texts = [line.text for line in lines if line.text.strip()]
            # srun prints more behind that.
            texts = [text for text in texts if code == UNFIT and NODE_ENV in text] or texts
            raised = Raised(None, texts[-1] if texts and code < 128 else "", "")
        yield Failure(node, exit_code=code, **raised._asdict())


def _lost_nodes(run: Path, known: Evidence, failures: Sequence[Failure], records: Sequence[Json]) -> list[Failure]:
    """The nodes without any file while others have some, and those whose connection or heartbeats were lost."""
    begun = known.exits and SRUN not in known.exits
    recorded = {*known.exits, *(failure.node for failure in failures)}
    nodes = {node for node in known.ranks if begun and node not in recorded}
    messages = {path.name[5:-5]: _first_line(path) for path in run.glob("node_*.lost")}  # by the launcher
    if cut_off := messages.keys() & set(known.ranks):
        nodes |= cut_off
    else:
        # By the agents. Where a network breaks in two, each side does not hear the other: the larger one is believed,
        # then the first.
        missed = Counter(lost for record in records if (lost := text(record.get("lost"))))
        order = {node: n for n, node in enumerate(known.ranks)}
        likely = max(missed, key=lambda node: (missed[node], order.get(node, 0)), default="")
        # A node that is cut off stops its ranks. What ended by something else had ended before it was missed.
        if likely and known.exits.get(likely, UNFIT) in (UNFIT, *STOP_CODES):
            nodes.add(likely)
    return [Failure(node, message=messages.get(node, "")) for node in sorted(nodes)]


def _first_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""


def _exit_code(value: object) -> int | None:
    """-9 of a process killed by signal 9 becomes 137."""
    code = integer(value)
    return code if code is None else (128 - code if code < 0 else code) & 0xFF


def _seconds(value: object) -> float | None:
    try:
        seconds = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) else None
