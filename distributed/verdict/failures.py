"""Collect the failures of a run: one Failure for each rank, agent, supervisor, launcher and node that failed.

    errors/rank_<rank>.json        exceptions and exit codes, recorded by ranks
    errors/node_<name>.json        exit codes of ranks, recorded by Muster's agents
    errors/supervisor_<name>.json  a supervisor was killed, or lost its launcher
    errors/connection_<name>.json  the launcher lost the connection to a node
    errors/signal_<name>.json      a signal that SLURM or a user sent to the ranks, a supervisor or the launcher
    hang.json                      the launcher stopped the run because it hung
    node_<name>.exit               exit code of the agent of a node
    node_<name>.log                log of a node
    node_<name>.lost               the launcher lost the connection to a node, or got no heartbeats from it

They are in the directory of the newest attempt, see distributed/attempts.py. Any of them may be missing, incomplete or
damaged.
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from distributed.attempts import newest
from distributed.exit_codes import STOPPED, UNFIT
from distributed.host.replies import NODE_ENV
from distributed.host.resources import write_error
from distributed.records import integer, listed, mapping, node_changes, number, read_object, read_record, text
from distributed.trust import head_and_tail, printable, read_text
from distributed.verdict.node_log import EXCEPTIONS, LoggedException, last_exception, read_log
from distributed.verdict.user_code import launched_package

STOP_CODES = (STOPPED, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # of ranks that were stopped
SRUN = "srun"  # name of the "node" whose files have the output of srun
MAX_FAILURES = 1 << 10  # per node
MAX_RANKS = 1 << 20  # per node; larger numbers in run.json are not valid

Json = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, another program or a node."""

    node: str
    rank: int | None = None  # None: `program` failed, or the node as a whole
    pid: int | None = None
    time: float | None = None  # Unix seconds
    exit_code: int | None = None  # 128+n for a signal; None: not recorded
    exception: str | None = None  # name of its class
    message: str = ""
    traceback: str = ""
    ended_by_agent: bool = False  # the agent sent the rank SIGTERM or SIGKILL after another failure
    witness: str = ""  # if other ranks waited for this rank: what they reported
    program: str = "agent"  # if rank is None: agent, supervisor or launcher
    reported_by: str = ""  # the node that sent the record, if the node of the rank was lost and has sent none

    def __post_init__(self) -> None:
        """Cut long texts, which are searched many times."""
        for name in ("message", "traceback"):
            object.__setattr__(self, name, head_and_tail(getattr(self, name)))


@dataclass(frozen=True)
class SentSignal:
    """A signal that SLURM or a user has sent."""

    name: str  # SIGUSR1
    sender: str  # the sender or the receiver, such as "from SLURM" or "to the launcher"
    time: float | None  # Unix seconds
    node: str = ""  # that has recorded it

    @property
    def stops_a_node(self) -> bool:
        """Whether a supervisor or an agent has received the signal, and stops the ranks of its node."""
        received = self.sender.startswith(("to the supervisor on ", "to the agent on "))
        return received and self.time is not None and self.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

    def __str__(self) -> str:
        return f"{self.name} {self.sender}"


@dataclass(frozen=True)
class Evidence:
    """Everything in a run directory about the end of the run."""

    failures: tuple[Failure, ...] = ()
    exits: Mapping[str, int] = field(default_factory=dict)  # node -> exit code of its agent
    ranks: Mapping[str, range] = field(default_factory=dict)  # node -> its ranks, in the order of node ranks
    warnings: tuple[str, ...] = ()
    succeeded: Mapping[int, str] = field(default_factory=dict)  # rank that exited with 0 -> its node
    hang: Json = field(default_factory=dict)  # hang.json; empty if the run did not hang
    launched: str = ""  # see user_code.launched_package()
    signals: tuple[SentSignal, ...] = ()  # by time
    changes: tuple[str, ...] = ()  # of nodes, see records.node_changes()
    first: str = ""  # the node whose agent was the first to report a failure to the agents' store
    disk: str = ""  # why no file can be written in the run directory
    clocks: Set[str] = frozenset()  # nodes whose times are on the clock of the launching side
    reported: tuple[Failure, ...] = ()  # of lost nodes, as other nodes report them; these may be wrong

    @property
    def signal(self) -> SentSignal | None:
        """The first record of the latest signal: with pdsh, the launcher and each supervisor record the same signal."""
        return next((one for one in self.signals if one.name == self.signals[-1].name), None)


Failures = dict[tuple[str, int], Failure]  # by node and rank
Logs = Mapping[str, Path]  # by node; the lines of all logs of a large run would not fit into memory


def gather(run: Path, clocks: Mapping[str, float] | None = None) -> Evidence:
    """Read all records of the newest attempt of a run. Merge records about the same rank.

    clocks: node -> seconds that its clock is ahead of that of the launching side.
    """
    clocks = clocks or {}
    warnings: list[str] = []
    facts, attempt = read_object(run / "run.json", warnings), Path(newest(run))
    excluded = _nodes_not_in_attempt(facts)
    agents: list[Json] = []  # records of Muster's agents
    reports: list[Json] = []  # what agents of other nodes report about lost nodes
    for path in sorted(attempt.glob("errors/node_*.json")):
        if path.name[5:-5] in excluded:
            continue
        record = read_record(path, warnings)
        source = reports if "reported_by" in record else agents
        source.append(record | {"node": text(record.get("node")) or path.name[5:-5]})
    succeeded = (
        (integer(rank), agent["node"]) for agent in agents for rank in listed(agent.get("succeeded"))[:MAX_FAILURES]
    )
    known = Evidence(
        exits={node: code for node, code in _exit_codes(attempt, warnings).items() if node not in excluded},
        ranks=_ranks_of_nodes(facts),
        succeeded={rank: node for rank, node in succeeded if rank is not None},
        hang=read_object(attempt / "hang.json", warnings),
        launched=launched_package(facts),
        signals=_sent_signals(attempt, warnings, clocks),
        changes=node_changes(facts),
        first=firsts.pop() if len(firsts := {text(one["first"]) for one in agents if "first" in one}) == 1 else "",
        clocks=clocks.keys(),
        disk=write_error(run),
    )
    logs = {path.name[5:-4]: path for path in sorted(attempt.glob("node_*.log")) if path.name[5:-4] not in excluded}
    of_ranks = [read_record(path, warnings) for path in sorted(attempt.glob("errors/rank_*.json"))]
    failures = _of_ranks(known, agents, [one for one in of_ranks if "reported_by" not in one], logs)
    recorded = {(one.node, one.rank) for one in failures}
    of_lost = {report["node"]: logs[report["node"]] for report in reports if report["node"] in logs}
    reported = _of_ranks(known, reports, [one for one in of_ranks if "reported_by" in one], of_lost)
    reported = [one for one in reported if one.node not in excluded and (one.node, one.rank) not in recorded]
    connections = list(_lost_connections(attempt, warnings))
    failures += _supervisor_records(attempt, facts, warnings, {failure.node for failure in connections})
    failures = [replace(one, time=_seconds({"time": one.time}, clocks.get(one.node, 0.0))) for one in failures]
    failures += connections
    failures += _killed_agents(known, {agent["node"] for agent in agents}, failures)
    failures += _failed_agents(known, logs, recorded={failure.node for failure in failures})
    failures += _lost_nodes(attempt, known, failures, agents)
    failures = [failure for failure in failures if failure.node not in excluded]
    return replace(known, failures=tuple(failures), reported=tuple(reported), warnings=tuple(warnings))


def _of_ranks(known: Evidence, agents: Sequence[Json], of_ranks: Sequence[Json], logs: Logs) -> list[Failure]:
    """The failures of ranks in these records of agents and of ranks, and in logs."""
    from_agents = [
        _from_record({**mapping(one), "reported_by": agent.get("reported_by")}, agent["node"])
        for agent in agents
        for one in listed(agent.get("failures"))[: len(known.ranks.get(agent["node"], range(MAX_FAILURES)))]
    ]
    from_ranks = [_from_record(one, "?") for one in of_ranks]
    from_ranks = [one for one in from_ranks if one.rank is None or known.succeeded.get(one.rank) != one.node]
    # A rank that called sys.exit() has recorded no exception; it may have printed one.
    ends = prefer(from_agents, (one for one in from_ranks if not one.exception), _torchrun_summaries(logs))
    causes = prefer((one for one in from_ranks if one.exception), _exceptions_in_logs(logs, ends))
    failures = [_merge(causes[key], ends[key]) for key in sorted(causes.keys() & ends.keys())]
    either = causes | ends
    return failures + [either[key] for key in sorted(causes.keys() ^ ends.keys())]


def _nodes_not_in_attempt(facts: Json) -> set[str]:
    """Unused spare nodes, and lost nodes that left the run. All may still write files. facts: content of run.json."""
    entries = [*map(mapping, listed(facts.get("spares"))), *map(mapping, listed(facts.get("changes")))]
    return {text(entry.get("node")) for entry in entries} - _ranks_of_nodes(facts).keys()


def prefer(*sources: Iterable[Failure]) -> Failures:
    """The failures of ranks, from several sources. For each rank, the first source that has a record of it counts."""
    records = (failure for source in reversed(sources) for failure in source)
    return {(failure.node, failure.rank): failure for failure in records if failure.rank is not None}


def _merge(cause: Failure, end: Failure) -> Failure:
    """Combine the exception that a rank recorded with the exit code that its agent recorded."""
    if cause.pid and end.pid and cause.pid != end.pid:
        return end  # the exception is from an earlier attempt
    code = cause.exit_code
    if code is None:
        # After an exception Python exits with 1. If the code is above 128, a PyTorch thread aborted the process first.
        code = 1 if cause.exception and cause.traceback and (end.exit_code or 0) > 128 else end.exit_code
    return replace(
        cause,
        pid=end.pid,
        time=end.time if cause.time is None else cause.time,
        exit_code=code,
        ended_by_agent=end.ended_by_agent,
        reported_by=end.reported_by or cause.reported_by,
    )


def _ranks_of_nodes(facts: Json) -> dict[str, range]:
    """Return the ranks of each node. facts: the content of run.json."""
    ranks = {}
    for entry in map(mapping, listed(facts.get("layout"))):
        if node := text(entry.get("node")):
            first = integer(entry.get("first_rank")) or 0
            ranks[node] = range(first, first + min(integer(entry.get("processes")) or 0, MAX_RANKS))
    return ranks


def _exit_codes(attempt: Path, warnings: list[str]) -> dict[str, int]:
    codes = {}
    for path in sorted(attempt.glob("node_*.exit")):
        try:
            codes[path.name[5:-5]] = range(256)[int(read_text(path))]
        except (OSError, ValueError, IndexError) as error:
            warnings.append(f"{printable(str(path))}: ignored: no exit code in it ({printable(str(error))[:200]})")
    return codes


def _sent_signals(attempt: Path, warnings: list[str], clocks: Mapping[str, float]) -> tuple[SentSignal, ...]:
    sent = []
    for path in sorted(attempt.glob("errors/signal_*.json")):
        node, _, name = path.stem[len("signal_") :].rpartition("_")
        record = read_record(path, warnings)
        sender = text(record.get("sender"))
        if not re.fullmatch(rf"from SLURM( \(--signal or scancel\))?|to the (\w+ on )?{re.escape(node)}", sender):
            sender = f"to {node}"  # a node speaks for itself only
        if record:
            sent.append(SentSignal(printable(name), printable(sender), _seconds(record, clocks.get(node, 0.0)), node))
    return tuple(sorted(sent, key=lambda one: one.time or 0.0))


def _from_record(value: object, node: str) -> Failure:
    """Parse the record that a rank or an agent wrote. node: the node of the rank, unless the record names it."""
    record = mapping(value)
    recorded = text(record.get("node"))
    return Failure(
        node=recorded if re.fullmatch(r"[^/]{1,255}", recorded) and recorded.isprintable() else node,
        rank=integer(record.get("rank")),
        pid=integer(record.get("pid")),
        time=_seconds(record),
        exit_code=_exit_code(record.get("exit_code")),
        exception=text(record.get("exception")) or None,
        message=text(record.get("message")),
        traceback=text(record.get("traceback")),
        ended_by_agent=record.get("ended_by_agent") is True,
        reported_by=text(record.get("reported_by")),
    )


_SUMMARY = re.compile(
    r"time +: (\S+)\n.*\n +rank +: (\d{1,9}) \(local_rank: \d{1,9}\)"
    r"\n +exitcode +: (-?\d{1,9}) \(pid: (\d{1,9})\)"
)


def _torchrun_summaries(logs: Logs) -> Iterator[Failure]:
    """Parse the list of failures that PyTorch's own agent (--agent torchrun) prints when it exits."""
    for node, path in logs.items():
        output = "\n".join(line.text for line in read_log(path, node, ("Failures:",)).get(None, []))
        ended = {int(pid) for pid in re.findall(r"Sending process (\d{1,9}) closing signal", output)}
        for when, *numbers in _SUMMARY.findall(output[output.rfind("\nFailures:") :]):
            rank, code, pid = map(int, numbers)
            try:  # 2025-01-02_03:04:05 in the node's time zone, assumed to be the same as here
                time = datetime.fromisoformat(when.replace("_", "T")).timestamp()
            except (ValueError, OverflowError):
                time = None
            yield Failure(node, rank, pid, time, _exit_code(code), ended_by_agent=pid in ended)


def _exceptions_in_logs(logs: Logs, ends: Failures) -> Iterator[Failure]:
    """The last exception in the log of each failed rank that was neither killed nor stopped on request."""
    by_node: dict[str, list[int]] = {}
    for (node, rank), end in ends.items():
        killed = end.exit_code == 128 + signal.SIGKILL and not end.ended_by_agent
        if node in logs and not killed and end.exit_code != STOPPED:
            by_node.setdefault(node, []).append(rank)
    for node, ranks in by_node.items():
        log = read_log(logs[node], node, EXCEPTIONS)
        for rank in ranks:
            if raised := last_exception(log.get(rank, [])):
                yield Failure(node, rank, **raised._asdict())


def _lost_connections(attempt: Path, warnings: list[str]) -> Iterator[Failure]:
    """Read errors/connection_<name>.json, in which the launcher recorded how it lost the connection to a node."""
    for path in sorted(attempt.glob("errors/connection_*.json")):
        record = read_record(path, warnings)
        if message := text(record.get("message")):
            yield Failure(path.name[11:-5], time=_seconds(record), message=message)


def _supervisor_records(attempt: Path, facts: Json, warnings: list[str], disconnected: Set[str]) -> Iterator[Failure]:
    """Read errors/supervisor_<name>.json of supervisors that were killed, lost their launcher or killed their agent.

    disconnected: nodes to which the launcher lost the connection. The launcher's record of the loss says more than the
    message of the supervisor.
    """
    entries = map(mapping, listed(facts.get("layout")))
    without_ssh = {text(entry.get("node")) for entry in entries if not entry.get("address")}
    for path in sorted(attempt.glob("errors/supervisor_*.json")):
        record = read_record(path, warnings)
        node, time = path.name[11:-5], _seconds(record)
        if record.get("cause") == "killed":
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="supervisor")
        elif record.get("cause") == "launcher lost" and node in without_ssh:  # the launcher was killed
            yield Failure(node, time=time, exit_code=128 + signal.SIGKILL, program="launcher")
        elif (message := text(record.get("message"))) and node not in disconnected:
            yield Failure(node, time=time, message=message)


def _killed_agents(known: Evidence, reporting: set[str], failures: Sequence[Failure]) -> Iterator[Failure]:
    """Agents that died of a signal: they have recorded nothing, although ranks have that lost their store.

    reporting: nodes whose agents have recorded how their ranks ended.
    """
    reporting = reporting | {one.node for one in failures if one.rank is None}
    of_ranks = {one.node for one in failures if one.rank is not None}
    for node, code in known.exits.items():
        if code > 128 and code not in STOP_CODES and node in of_ranks - reporting:
            yield Failure(node, exit_code=code)


def _failed_agents(known: Evidence, logs: Logs, recorded: set[str]) -> Iterator[Failure]:
    """Read the log of each node that has a non-zero exit code, but no failure record and no rank that succeeded."""
    recorded = recorded.union(known.succeeded.values())
    for node, code in known.exits.items():
        if not code or node in recorded:
            continue
        log = read_log(logs[node], node) if node in logs else {}
        raised = {rank: last_exception(lines) for rank, lines in log.items()}
        of_ranks = {rank: one for rank, one in raised.items() if one and rank is not None}
        for rank, one in of_ranks.items():
            yield Failure(node, rank, exit_code=code, **one._asdict())
        if of_ranks:
            continue
        texts = [line.text for line in log.get(None, []) if line.text.strip()]
        # A message about node_env.sh is the cause, although srun prints more lines after it.
        texts = [text for text in texts if code == UNFIT and NODE_ENV in text] or texts
        last = LoggedException(None, texts[-1] if texts and code < 128 else "", "")
        yield Failure(node, exit_code=code, **(raised.get(None) or last)._asdict())


def _lost_nodes(attempt: Path, known: Evidence, failures: Sequence[Failure], agents: Sequence[Json]) -> list[Failure]:
    """The nodes that the launcher recorded as lost or, if there are none, the node that most agents recorded as lost.

    If any node has an exit code, the result also has the nodes without a record.
    """
    started = known.exits and SRUN not in known.exits
    recorded = {*known.exits, *(failure.node for failure in failures)}
    nodes = {node for node in known.ranks if started and node not in recorded}
    messages = {path.name[5:-5]: _first_line(path) for path in attempt.glob("node_*.lost")}
    if reported := messages.keys() & known.ranks.keys():
        nodes |= reported
    else:
        # An agent records the node whose heartbeats timed out. If the network splits, each side records a node of the
        # other side. The node that most agents recorded is lost. If two nodes were recorded equally often, the one with
        # the higher node rank is lost.
        missed = Counter(filter(None, (text(agent.get("lost")) for agent in agents)))
        if len(known.ranks) > 1:  # otherwise nodes are started by hand, and this launcher knows only its own
            missed = Counter({node: count for node, count in missed.items() if node in known.ranks})
        order = {node: n for n, node in enumerate(known.ranks)}
        most_missed = max(missed, key=lambda node: (missed[node], order.get(node, 0)), default="")
        # A disconnected node stops its ranks and exits with one of these codes. With another code, it failed before.
        code = known.exits.get(most_missed, UNFIT)
        if code in STOP_CODES and missed[most_missed] == 1:  # a single node, which speaks for itself only
            reporter = next(agent["node"] for agent in agents if agent.get("lost") == most_missed)
            messages[reporter] = f"no heartbeats from {most_missed}, whose supervisor was alive"
            nodes.add(reporter)
        elif most_missed and code in (UNFIT, *STOP_CODES):
            nodes.add(most_missed)
    return [Failure(node, message=messages.get(node, "")) for node in sorted(nodes)]


def _first_line(path: Path) -> str:
    try:
        return read_text(path).partition("\n")[0]
    except OSError:
        return ""


def _exit_code(value: object) -> int | None:
    """The exit code as a shell reports it: 137 for a process killed by signal 9, which is -9 in Python."""
    code = integer(value)
    return code if code is None else (128 - code if code < 0 else code) & 0xFF


def _seconds(record: Mapping[str, Any], ahead: float = 0.0) -> float | None:
    """The time of a record. ahead: seconds that the clock of its node is ahead."""
    recorded = number(record.get("time"))
    seconds = round(recorded - ahead, 0) if recorded.is_integer() else recorded - ahead  # torchrun's are whole
    return seconds if math.isfinite(seconds) else None
