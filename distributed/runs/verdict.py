"""Whose failure came first?

When one rank dies, the others lose their connection to it, and often report that before the death is noticed. So
causes are distinguished from consequences by what each record says, and only then by time. In order:

    a hang, because of which the launcher ended the run
    a rank that raised an error of its own, died of a signal, or exited by itself; a supervisor or a launcher that was
    killed
    an agent that could not go on, though no rank of its node had failed
    a node to which the connection was lost
    what may be a cause or not: exit 1 without output, a broken connection that is not PyTorch's
    a rank that ended with 0 while others waited for it, that another one names as missing, or that alone recorded
    nothing while all others waited for it
    a rank that lost the others or gave up waiting for them: then the cause was not recorded
    what stopped on request, what was ended from outside

The earliest of the likeliest kind is first, by the nodes' own clocks. They differ by up to a second or so,
and torchrun writes whole seconds: when two causes are as close as that, the sentence names both.

Try it: python -m distributed.runs.verdict logs/latest
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

from distributed.exit_codes import STOPPED, TIMED_OUT, UNFIT
from distributed.files import write_json
from distributed.runs.failures import NODE_ENV, SRUN, Evidence, Failure, Json, gather
from distributed.runs.node_log import FATAL, Raised, blocks, exception_of, read_log

INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
CLOCK_DOUBT = 1.0  # seconds
BY_SLURM = "node failure reported by SLURM"  # and then SLURM itself ends the job
SHOWN_OTHERS = 3  # ranks of a hang
SHOWN = 240  # characters of a message in a sentence
SHOWN_LINES = 8  # of a message or a log
SHOWN_FRAMES = 3


@dataclass(frozen=True)
class Verdict:
    """What the launcher reports and exits with: the content of verdict.json."""

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


def decide(run: Path, launcher: int | None = None) -> Verdict:
    """The verdict on the run in this directory; reads only. launcher: the exit code that it would end with itself."""
    return judge(gather(run), launcher)


# ---------------------------------------------------------------- causes and consequences


class Kind(IntEnum):
    """What a failure is: the lower, the likelier the cause."""

    OWN = 1
    AGENT = 2
    LOST_NODE = 3
    UNSURE = 4
    ACCUSED = 5
    COLLATERAL = 6
    STOPPED = 7
    ENDED = 8


# What an innocent rank records when another one is lost: seen in torch 2.13, or read in its source.
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


def kind(failure: Failure) -> Kind:
    """By what is recorded; without an exception or a message by the exit code."""
    if failure.witness:
        return Kind.ACCUSED
    if failure.exit_code == STOPPED:
        return Kind.STOPPED
    if failure.program in ("supervisor", "launcher"):
        return Kind.OWN
    if failure.rank is None and failure.exit_code is None:
        return Kind.LOST_NODE
    if failure.exception or failure.message:
        return _kind_by_exception(failure)
    if failure.ended_by_agent or failure.exit_code in (128 + signal.SIGHUP, *INTERRUPTED):
        return Kind.ENDED
    return Kind.UNSURE if failure.rank is None or failure.exit_code == 1 else Kind.OWN


def _kind_by_exception(failure: Failure) -> Kind:
    if failure.exception in _FROM_OUTSIDE:
        return Kind.ENDED
    kinds = [_kind_of_exception(raised) for raised in chain(failure)]
    if kinds[0] is not Kind.OWN:
        return kinds[0]
    if failure.rank is None:
        return Kind.AGENT if failure.exception else Kind.UNSURE
    # The first error may have been handled when a later one, or the agent, ended the rank.
    return Kind.UNSURE if failure.ended_by_agent or kinds[-1] is not Kind.OWN else Kind.OWN


def _kind_of_exception(raised: Raised) -> Kind:
    if raised.exception in _ALWAYS_COLLATERAL:
        return Kind.COLLATERAL
    if not _LOST_THE_OTHERS.search(raised.message):
        return Kind.OWN
    of_torch = raised.exception is None or _OF_TORCH.fullmatch(raised.exception)
    return Kind.COLLATERAL if of_torch else Kind.UNSURE


def chain(failure: Failure) -> list[Raised]:
    """The exceptions that the traceback chains, in the order in which they were raised."""
    *earlier, last = blocks(failure.traceback)
    return [*map(exception_of, earlier), Raised(failure.exception, failure.message, last)]


def decisive(failure: Failure) -> Raised:
    """The exception to show: the last one, unless that only came of the first."""
    raised = chain(failure)
    first_is_cause = _kind_of_exception(raised[0]) is Kind.OWN and _kind_of_exception(raised[-1]) is not Kind.OWN
    return raised[0] if first_is_cause else raised[-1]


# ---------------------------------------------------------------- which was first


def first(failures: Iterable[Failure]) -> Failure:
    """The earliest of the likeliest kind. Takes at least one; their order does not matter."""
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[Kind, float, str, int]:
    when = math.inf if failure.time is None else failure.time
    return kind(failure), when, failure.node, -1 if failure.rank is None else failure.rank


def accused(evidence: Evidence) -> Iterator[Failure]:
    """The ranks that others gave up waiting for, though they recorded nothing themselves."""
    waited = [one for one in evidence.failures if one.rank is not None and kind(one) is Kind.COLLATERAL]
    if waited and evidence.ended_well:
        one, rank, more = first(waited), min(evidence.ended_well), len(evidence.ended_well) - 1
        others = f"and {more} more rank{'s' * (more > 1)} " if more else ""
        witness = f"{others}ended with exit code 0 while {name_of(one)} was in a collective{_at(one)}"
        yield replace(one, rank=rank, node=evidence.ended_well[rank], witness=witness)
        return
    for failure in evidence.failures:
        if names := _NAMES_A_RANK.search(failure.message):
            rank = int(next(filter(None, names.groups())))
            witness = f"was missing in a collective: {name_of(failure)} says: {_short(what(failure))}"
            yield replace(failure, rank=rank, node=_node_of(rank, evidence), witness=witness)
    # Only one rank recorded nothing, and all others lost it, or gave up waiting for it.
    kinds = {one.rank: kind(one) for one in evidence.failures if one.rank is not None and kind(one) is not Kind.ENDED}
    size = sum(map(len, evidence.ranks.values()))
    if set(kinds.values()) == {Kind.COLLATERAL} and len(kinds) == size - 1 and max(kinds) < size:
        silent, one = sum(range(size)) - sum(kinds), first(waited)
        witness = f"was missing in a collective: it alone reported nothing; {name_of(one)} says: {_short(what(one))}"
        yield replace(one, rank=silent, node=_node_of(silent, evidence), witness=witness)


def _node_of(rank: int, evidence: Evidence) -> str:
    """The node of a rank, as far as it is known."""
    by_failure = (failure.node for failure in evidence.failures if failure.rank == rank)
    by_place = (node for node, ranks in evidence.ranks.items() if rank in ranks)
    return next(by_failure, next(by_place, "?"))


def judge(evidence: Evidence, launcher: int | None = None) -> Verdict:
    """The verdict on what is known. launcher: the exit code that the launcher would end with by itself."""
    if evidence.hang:
        return _hung(evidence.hang)
    failures = sorted([*evidence.failures, *accused(evidence)], key=_order)
    if not failures or (_all_well(evidence) and (not launcher or launcher in INTERRUPTED)):
        return _nothing_failed(evidence, launcher)
    culprit = first(failures)
    its_kind = kind(culprit)
    if its_kind is Kind.STOPPED and launcher != UNFIT:
        return Verdict("stopped", STOPPED, _sentence(culprit))
    interrupted = launcher in INTERRUPTED and its_kind is not Kind.OWN and BY_SLURM not in culprit.message
    if its_kind is Kind.STOPPED or interrupted:  # ranks that the launcher stopped for a cause of its own
        return replace(_nothing_failed(evidence, launcher), collateral=_collateral(failures))
    codes = [one.exit_code for one in failures if one.exit_code and kind(one) < Kind.STOPPED]
    raised = decisive(culprit)
    return Verdict(
        outcome="stopped" if its_kind is Kind.ENDED else "failed",
        exit_code=culprit.exit_code or [*([UNFIT] if its_kind is Kind.LOST_NODE else codes), launcher or 1][0],
        cause=_sentence(culprit) + _remarks(culprit, evidence),
        node=culprit.node,
        rank=culprit.rank,
        time=culprit.time,
        exception=raised.exception,
        message=raised.message,
        traceback=culprit.traceback,
        collateral=_collateral([one for one in failures if (one.node, one.rank) != (culprit.node, culprit.rank)]),
    )


def _hung(hang: Json) -> Verdict:
    """The ranks ended because the launcher stopped them."""
    others = [{name: one.get(name) for name in ("node", "rank", "message")} for one in hang.get("others", [])]
    return Verdict(
        outcome="failed",
        exit_code=TIMED_OUT,
        cause=hang.get("cause", "hung"),
        node=hang.get("node"),
        rank=hang.get("rank"),
        time=hang.get("time"),
        traceback=hang.get("traceback", ""),
        collateral=tuple(others),
    )


def _all_well(evidence: Evidence) -> bool:
    """Every agent ended well: failures are then those of attempts before the last."""
    return bool(evidence.exits) and {evidence.exits.get(node) for node in (*evidence.exits, *evidence.ranks)} == {0}


def _nothing_failed(evidence: Evidence, launcher: int | None) -> Verdict:
    if launcher in INTERRUPTED and _all_well(evidence):
        return Verdict("stopped", 0, "stopped on request, and every rank ended well")
    if launcher in INTERRUPTED:
        how = "Ctrl-C" if launcher == 128 + signal.SIGINT else "SIGTERM"
        return Verdict("stopped", launcher, f"interrupted ({how}); no rank had failed")
    if launcher:
        return Verdict("failed", launcher, f"no rank recorded a failure; the launcher ended with code {launcher}")
    if launcher == 0 or _all_well(evidence):
        return Verdict("ok", 0, "every rank ended well")
    return Verdict("failed", 1, "the run left neither an exit status nor an error: nothing started, or all is lost")


def _collateral(failures: Iterable[Failure]) -> tuple[Json, ...]:
    return tuple(
        {"node": one.node, "rank": one.rank, "message": _short(what(one))} for one in failures if not one.witness
    )


# ---------------------------------------------------------------- in one sentence

_AGENT_PREFIX = "agent: "  # before each line of the agent's own; its last one is why it ended
_WHY_LOST = "no power or network there, or all its processes were killed"


def _sentence(one: Failure) -> str:
    """What happened, by the kind of failure."""
    name, its_kind = name_of(one), kind(one)
    how = f"{name} {_short(what(one, 'raised '))}"
    if its_kind is Kind.OWN:
        return how
    if its_kind is Kind.AGENT:
        return f"{name} could not go on: {_short(what(one))}"
    if its_kind is Kind.LOST_NODE:
        return f"{one.node}: connection lost: {one.message or _WHY_LOST}"
    if its_kind is Kind.ACCUSED:
        return f"{name} {one.witness}"
    if its_kind is Kind.COLLATERAL:
        return f"the cause was not recorded; {name} lost the others first: {_short(what(one))}"
    if its_kind is Kind.STOPPED:
        return "stopped on request, a checkpoint is written: run the same command again to go on"
    if its_kind is Kind.ENDED:
        return f"{how}; no rank had failed before"
    if one.rank is None and one.message.startswith(_AGENT_PREFIX):
        return f"{name} could not go on: {_short(one.message.removeprefix(_AGENT_PREFIX))}"
    if one.rank is None and NODE_ENV in one.message:  # the agent had not been started yet
        return one.message
    return f"{how}; nothing clearer was recorded"


def name_of(failure: Failure) -> str:
    """rank 3 on node2."""
    if failure.node == SRUN:
        return SRUN
    name = f"the {failure.program}" if failure.rank is None else f"rank {failure.rank}"
    return f"{name} on {failure.node}"


def what(failure: Failure, verb: str = "") -> str:
    """The exception or message, or else how it ended. verb: before an exception, in a sentence."""
    raised, code = decisive(failure), failure.exit_code
    if raised.exception:
        return f"{verb}{raised.exception}" + (f": {raised.message}" if raised.message else "")
    if raised.message:
        return f"ended with: {raised.message}" if verb else raised.message
    if code is None:
        return "left nothing behind"
    name = signal_name(code)
    if failure.ended_by_agent:
        return f"was ended with the others ({name or f'exit code {code}'})"
    return f"died of {name}" if name else f"exited with code {code}"


def _at(failure: Failure) -> str:
    """The last line of the person's own code in its traceback; empty when there is none."""
    frames = list(_FRAME.finditer(decisive(failure).traceback))
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames
    if not own:
        return ""
    file, line, function = own[-1].groups()
    return f" at {os.path.basename(file)}:{line}" + ("" if function.startswith("<") else f" in {function}()")


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
    """Which others may have been first."""
    others = [one for one in evidence.failures if one != culprit and kind(one) is kind(culprit) is Kind.OWN]
    if same := len([one for one in others if what(one) == what(culprit)]):
        return f"; {same} more rank{'s' * (same > 1)} the same"
    for one in others:
        if one.time is not None and culprit.time is not None:
            coarse = one.node != culprit.node or one.time.is_integer() or culprit.time.is_integer()
            if abs(one.time - culprit.time) > CLOCK_DOUBT * coarse:
                continue
        return f"; too close in time to say which was first: {_sentence(one)}"
    return ""


# ---------------------------------------------------------------- what a person reads

# The likely meaning of what a rank died of: in its message, or the name of its signal.
_MEANINGS = {
    r"SIGKILL|killed by signal: Killed": "often the kernel, when memory is full: `dmesg -T | grep -i oom` on {node} "
    "shows it; fewer ranks per node, a smaller batch or fewer data loader workers need less",
    r"SIGBUS|Bus error": "often a full /dev/shm: `df -h /dev/shm` on {node}; a container needs a larger --shm-size",
    r"SIGSEGV": "native code crashed: an extension, a driver or PyTorch{where}",
    r"SIGABRT": "native code gave up; what it said stands in the log",
    r"(?i:cuda|hip)\b.*out of memory|OutOfMemoryError": "a smaller batch needs less; `nvidia-smi` on {node} shows who "
    "uses a GPU",
    r"\b(_Array)?MemoryError|[Cc]an(no|')t allocate memory|not enough memory": "the main memory of {node}, or the "
    "limit of its container or job, is used up: `free -h` there; fewer ranks per node or a smaller batch need less",
    r"EADDRINUSE|[Aa]ddress already in use": "another process has this port on {node}: --master-port takes another",
    r"No space left on device": "`df -h` on {node} shows which disk is full",
}
_NO_STACK = "; with --env PYTHONFAULTHANDLER=1 the log shows where"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r'File "(<frozen |.*/(site-packages|dist-packages|lib/python3[.\d]*)/)')


def in_words(verdict: Verdict, run: Path) -> str:
    """The verdict for a person: what happened, what it means, where to read on."""
    lines = [f"verdict: {verdict.outcome}: {verdict.cause}"]
    if verdict.outcome == "failed":
        lines += [f"  {line}" for line in _details(verdict, run)]
    return "\n".join(lines) + "\n"


def _details(verdict: Verdict, run: Path) -> Iterator[str]:
    name = signal_name(verdict.exit_code)
    if f"code {verdict.exit_code}" not in verdict.cause:
        yield f"exit code {verdict.exit_code}" + (f" ({name})" if name else "")
    about = f"{name} {verdict.exception} {verdict.message}"
    for pattern, meaning in _MEANINGS.items():
        if verdict.node and re.search(pattern, about):
            yield meaning.format(node=verdict.node, where="" if verdict.traceback else _NO_STACK)
    log = run / f"node_{verdict.node}.log"
    if verdict.traceback:
        yield from _last_frames(verdict)
    elif verdict.rank is not None:  # it may have printed why it ended
        lines = read_log(log, str(verdict.node)).get(verdict.rank, [])
        if last := [line.text for line in lines if line.text.strip()][-SHOWN_LINES:]:
            yield "its last lines:"
            yield from (f"  {line}" for line in last)
    # Of those that only followed the first one, of a hang some others, and how many there are.
    others = [one for one in verdict.collateral if one["rank"] is not None and one["message"] not in verdict.cause]
    hung = verdict.exit_code == TIMED_OUT
    if shown := others[: SHOWN_OTHERS if hung else 1]:
        more = f" ({len(verdict.collateral)} in all, see verdict.json)" if len(others) > len(shown) else ""
        texts = "; ".join(f"rank {one['rank']} on {one['node']}: {one['message']}" for one in shown)
        yield f"{'meanwhile' if hung else 'followed'}: {texts}{more}"
    if hung and (stacks := run / "hang.json").is_file():
        yield f"all stacks: {stacks}"
    if log.is_file():
        yield f"all output of {verdict.node}: {log}"


def _last_frames(verdict: Verdict) -> Iterator[str]:
    """The last frames of the person's own code, then the message."""
    if verdict.traceback.startswith(FATAL):  # that one begins with the last frame
        yield from verdict.traceback.splitlines()[:SHOWN_LINES]
        return
    chained = blocks(verdict.traceback)
    block = next((block for block in chained if exception_of(block).message == verdict.message), chained[-1])
    frames = re.findall(r'^  File ".*\n(?:    .*\n)*', block, re.MULTILINE)
    own = [frame for frame in frames if not _LIBRARY.search(frame)] or frames
    yield from "".join(own[-SHOWN_FRAMES:]).splitlines()
    if verdict.exception:
        yield from f"{verdict.exception}: {verdict.message}".splitlines()[:SHOWN_LINES]


# ---------------------------------------------------------------- the program


def main(words: Sequence[str]) -> int:
    """Judge a run, write verdict.json, print it on standard error. Returns the exit code for the launcher."""
    parser = argparse.ArgumentParser(prog="verdict", description="Whose failure came first?", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--report", action="store_true", help="also write report.html")
    parser.add_argument("--exit-code", type=int, metavar="N", help="what the launcher would end with by itself")
    options = parser.parse_args(words)
    if not options.run.is_dir():
        parser.error(f"'{options.run}' is not a run directory: name one of those in logs/")
    evidence = gather(options.run)
    verdict = judge(evidence, options.exit_code)
    try:
        write_json(options.run / "verdict.json", asdict(verdict))
    except OSError as error:
        sys.stderr.write(f"verdict: warning: cannot write {options.run}/verdict.json: {error.strerror}\n")
    sys.stderr.write("".join(f"verdict: warning: {warning}\n" for warning in evidence.warnings))
    sys.stderr.write(in_words(verdict, options.run))
    if options.report:
        sys.stderr.write(_write_report(options.run))
    return verdict.exit_code


def _write_report(run: Path) -> str:
    """Write report.html. Returns a line: where it is, or why it cannot be written."""
    from distributed.runs import report  # status imports this module, and draws no report

    try:
        return f"report {report.write(run)}\n"
    except Exception as error:  # noqa: BLE001 - the exit code of a training must not depend on a drawing
        return f"verdict: warning: cannot write {run}/report.html: {error}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
