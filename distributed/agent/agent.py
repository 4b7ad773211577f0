"""torchrun's own agent, with warm workers, that ends quickly and says who died.

Options, rendezvous, environment and restarts are torchrun's (`torch.distributed.run`). What differs: workers are
forked from one warm process (`distributed.agent.worker`), every rank that dies is noted with its exit code and time in
errors/node_<name>.json, the others are ended within seconds (torchrun: 30), also on the other nodes (torchrun: not at
all), and the exit code is the first one's (torchrun: always 1).

Try it: python scripts/lib/agent.py --nproc-per-node 2 train.py --config config/quickstart.yaml
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic import multiprocessing as elastic_multiprocessing
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import tail_log
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher

from distributed.agent import failure_records
from distributed.agent.fork_server import ForkServer, ForkServerError, Process, signals
from distributed.agent.membership import End, Membership, RendezvousFailed
from distributed.agent.rendezvous import Rendezvous, say
from distributed.agent.worker import Rank, Script
from distributed.exit_codes import STOPPED

LOOK = 0.1  # seconds between two looks at ranks of which none dies
FAREWELL = 1.0  # seconds that the others get to report after one rank has failed
TERM_GRACE = 3.0  # seconds between TERM and KILL after one rank has failed
STOP_GRACE = 30.0  # seconds that the others get to write their part when one rank has stopped on request
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BLOCK = 1 << 20  # bytes of a rank's output that are read at once


@dataclass(frozen=True)
class Death:
    """A rank that ended, and not well."""

    rank: int
    local_rank: int
    pid: int
    time: float  # unix seconds at which the agent saw it
    exit_code: int  # 128+n for a signal
    ended_by_agent: bool  # TERM or KILL, after another one had failed


@dataclass(frozen=True)
class Handler:
    """A rank's process, as torchrun's SubprocessContext wants it."""

    proc: Process

    def close(self, death_sig: signal.Signals) -> None:
        self.proc.signal(death_sig)


class Ranks(SubprocessContext):
    """torchrun's processes of one attempt, forked instead of started."""

    server: ForkServer
    script: Script

    def _start(self) -> None:
        ranks = [
            Rank(self.script, {**os.environ, **self.envs[n]}, self.stdouts[n], self.stderrs[n])
            for n in range(self.nprocs)
        ]
        signals.defer(STOP_SIGNALS)  # torchrun's handlers raise wherever the agent is
        with signals.held():  # a signal is passed on to the ranks once they are known
            processes = self.server.fork(ranks)
            self.subprocess_handlers = {n: Handler(process) for n, process in enumerate(processes)}  # type: ignore[misc]


class Agent(LocalElasticAgent):
    """torchrun's agent, that also notes deaths, does not wait long for those who survive, and knows the other nodes."""

    latest: Agent | None = None  # the one that torchrun made
    script: Script
    rendezvous: Rendezvous | None = None

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.deaths: dict[int, Death] = {}
        self.ended_well: list[int] = []  # ranks that ended with 0, not asked to
        if isinstance(spec.rdzv_handler, StaticTCPRendezvous):
            spec.rdzv_handler = self.rendezvous = Rendezvous(spec.rdzv_handler, self.script)
        Agent.latest = self

    @property
    def membership(self) -> Membership | None:
        """In a run of several nodes."""
        return self.rendezvous.membership if self.rendezvous else None

    def ended(self) -> End | None:
        """Why the run of several nodes cannot go on, here or elsewhere."""
        return self.membership.end() if self.membership else None

    def exit_code(self) -> int:
        """Of the first rank that died by itself, here or elsewhere."""
        if end := self.ended():
            return end.exit_code
        return self._first_death().exit_code if self._own_deaths() else 1

    def failed(self) -> int:
        """Exchange failure records with the other nodes, keep theirs, and return the exit code of the run."""
        if self.membership and (end := self.membership.end()):
            self._write_account(end.node if end.lost else None)
            self.membership.exchange_records(self._records())
            for records in self.membership.records.values():
                failure_records.keep(records)
        return self.exit_code()

    def stopped_by(self, number: int) -> int:
        """The ranks have ended because the agent received this signal: end the other nodes. Returns the exit code."""
        self.note_deaths(ended_by_agent=True)
        if not self.ended() and self._ended_well():
            return 0
        if self.ended():  # the run was ending already, and the launcher stops what is left of it
            return self.failed()
        code = STOPPED if self.all_stopped() else 128 + number
        if self.membership:
            self.membership.report_end(
                End(failure_records.node_name(), code, f"received {signal.Signals(number).name}")
            )
            self.membership.leave(self._records())
        return code

    def cannot_start(self, reason: str) -> int:
        """The ranks cannot be started: the other nodes need not wait. Returns the exit code."""
        if self.membership:
            self.membership.report_end(End(failure_records.node_name(), 1, reason))
            self.membership.leave(self._records())
        return 1

    def all_stopped(self) -> bool:
        """Whether every rank that ended did so on request, with a checkpoint written."""
        return {death.exit_code for death in self.deaths.values()} == {STOPPED}

    def note_deaths(self, ended_by_agent: bool = False) -> None:
        """Reap the ranks that have ended, and record those that failed."""
        news = [
            self._death(local_rank, process, ended_by_agent)
            for local_rank, process in enumerate(self._processes())
            if process.reap() and local_rank not in self.deaths
        ]
        self.deaths.update((death.local_rank, death) for death in news)
        if not ended_by_agent:
            workers = zip(self._worker_group.workers, self._processes(), strict=False)
            self.ended_well = [worker.global_rank for worker, process in workers if process.returncode == 0]
        if self.deaths:
            self._write_account()

    # -------- torchrun's own steps

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.deaths.clear()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with signals.held():
            return self._look_after(worker_group)

    def _look_after(self, worker_group: WorkerGroup) -> RunResult:
        # A death is seen when it happens: of two that die a moment apart, the first is told from the second.
        Ranks.server.wakeup.wait(LOOK)
        self.note_deaths()
        if self._own_deaths():
            self._tell_of_death()
            self._end_the_others(self.all_stopped())
        elif not self.deaths and (end := self.ended()):
            what = f"{end.node}: connection lost" if end.lost else f"{end.node} ends the run ({end.reason})"
            say(f"{what}; stopping the ranks of this node")
            self._end_the_others(end.exit_code == STOPPED)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.membership:
            self.membership.finish()
        else:
            super()._exit_barrier()

    # -------- ours

    def _ended_well(self) -> bool:
        """Whether all ranks of the run have ended with 0, though this node was asked to stop."""
        processes = self._processes()
        if not processes or any(process.reap() != 0 for process in processes):
            return False
        try:
            return self.membership is None or self.membership.finish(TERM_GRACE) is None
        except TimeoutError:
            return False

    def _own_deaths(self) -> list[Death]:
        return [death for death in self.deaths.values() if not death.ended_by_agent]

    def _first_death(self) -> Death:
        return min(self._own_deaths(), key=lambda death: death.time)

    def _tell_of_death(self) -> None:
        death = self._first_death()
        if self.membership:
            reason = f"rank {death.rank} ended with exit code {death.exit_code}"
            self.membership.report_end(End(failure_records.node_name(), death.exit_code, reason))

    def _records(self) -> failure_records.Records:
        return failure_records.of_this_node(death.rank for death in self.deaths.values())

    def _write_account(self, lost: str | None = None) -> None:
        deaths = [asdict(death) for _, death in sorted(self.deaths.items())]
        failure_records.write_of_node(deaths, self.ended_well, lost)

    def _processes(self) -> list[Process]:
        context = self._pcontext
        handlers = context.subprocess_handlers if isinstance(context, Ranks) else {}
        return [handler.proc for handler in handlers.values()]  # type: ignore[misc]

    def _death(self, local_rank: int, process: Process, ended_by_agent: bool) -> Death:
        rank = self._worker_group.workers[local_rank].global_rank
        code = process.returncode or 0
        code = code if code > 0 else 128 - code
        if not ended_by_agent and code != STOPPED:
            sys.stderr.write(f"agent: rank {rank} (pid {process.pid}) ended with exit code {code}\n")
        return Death(rank, local_rank, process.pid, time.time(), code, ended_by_agent)

    def _end_the_others(self, stopping: bool) -> None:
        """Time for a last word, then TERM, then KILL. Ranks that stop on request may still be writing."""
        self._wait(STOP_GRACE if stopping else FAREWELL)
        self.note_deaths()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes():
                process.signal(number)
            self._wait(TERM_GRACE)
        self.note_deaths(ended_by_agent=True)

    def _wait(self, seconds: float) -> None:
        """Until all have ended, but no longer than that."""
        end = time.monotonic() + seconds
        while any(process.reap() is None for process in self._processes()) and (left := end - time.monotonic()) > 0:
            Ranks.server.wakeup.wait(left)
            signals.handle()


# What this module replaces or calls inside torchrun: the owner, the name, and the parameters it must have.
INTERNALS: list[tuple[Any, str, set[str]]] = [
    (torchrun, "get_args_parser", set()),
    (torchrun, "run", {"args"}),
    (torchrun, "elastic_launch", {"config", "entrypoint"}),
    (launcher, "launch_agent", {"config", "entrypoint", "args"}),
    (launcher, "LocalElasticAgent", {"spec"}),
    (LocalElasticAgent, "_start_workers", {"worker_group"}),
    (LocalElasticAgent, "_monitor_workers", {"worker_group"}),
    (LocalElasticAgent, "_exit_barrier", set()),
    (elastic_multiprocessing, "SubprocessContext", {"envs"}),
    (SubprocessContext, "_start", set()),
    (tail_log, "tail_logfile", {"header", "file", "dst", "finished", "interval_sec", "log_line_filter"}),
]
# The attributes of its objects that this module uses.
ATTRIBUTES: dict[type, set[str]] = {
    LocalElasticAgent: {"_pcontext", "_worker_group"},
    SubprocessContext: {"nprocs", "envs", "stdouts", "stderrs", "subprocess_handlers", "proc", "close"},
    StaticTCPRendezvous: {"master_addr", "master_port", "rank", "world_size", "run_id", "timeout", "_store"},
}


def unsupported(options: argparse.Namespace) -> str:
    """Why torchrun's own agent is to run this command, or an empty string."""
    if options.no_python:
        return "--no-python runs a program that is not Python"
    if options.numa_binding:
        return "--numa-binding is numactl's work"
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:
        return f"PYTHON_EXEC={python} is another Python than {sys.executable}"
    difference = unexpected()
    return f"PyTorch {torch.__version__}: {difference}" if difference else ""


def unexpected() -> str:
    """What is not inside of torchrun as this module needs it, or an empty string."""
    for owner, name, parameters in INTERNALS:
        where = f"{owner.__name__} has no {name}"
        found = getattr(owner, name, None)
        if found is None:
            return where
        if missing := parameters - inspect.signature(found).parameters.keys():
            return f"{where}({', '.join(sorted(missing))})"
    for kind, names in ATTRIBUTES.items():
        members = [
            inspect.unwrap(member) for base in kind.__mro__ for member in vars(base).values() if callable(member)
        ]
        used = {name for member in members if inspect.isfunction(member) for name in member.__code__.co_names}
        if names - used:
            return f"{kind.__name__} has no {', '.join(sorted(names - used))}"
    return ""


def main(options: argparse.Namespace, server: ForkServer) -> int:
    """Run torchrun's command line. Returns 0, or the exit code of the first rank that failed."""
    options.monitor_interval = 0.001  # the waiting is done by the agent itself, which wakes when a rank dies
    if options.standalone:
        # torchrun waits up to 0.3 s before the rendezvous, so that many nodes do not begin it at the same time.
        dynamic_rendezvous._delay = lambda seconds: None
    if options.max_restarts:
        # With the shared store, recovery seldom works (torch 2.13: 12 of 34 tries; with its own, 23 of 23).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _take_our_place(
        Script(
            options.training_script,
            tuple(options.training_script_args),
            options.module,
            _fresh_path(),
            options.pass_local_rank,
        ),
        server,
    )
    try:
        return _run(options)
    finally:
        server.close()


def parse(words: Sequence[str]) -> argparse.Namespace:
    """torchrun's command line, with one option more."""
    parser = torchrun.get_args_parser()
    parser.add_argument(
        "--pass-local-rank", action="store_true", help="--local-rank=N before the script's own words, as of old"
    )
    return parser.parse_args(words)


def _run(options: argparse.Namespace) -> int:
    try:
        torchrun.run(options)
    except SignalException as error:
        _let_nobody_disturb()
        return _agent().stopped_by(int(error.sigval))
    except RendezvousFailed as failure:
        say(str(failure))
        return failure.exit_code
    except ForkServerError as error:
        say(str(error))
        return _agent().cannot_start(str(error))
    except ChildFailedError:
        pass
    except DistError:  # a store that is gone, because the others have ended
        if not _agent().ended():
            raise
    else:
        if not _agent().ended():
            return 0
    _let_nobody_disturb()
    return _agent().failed()


def _let_nobody_disturb() -> None:
    """All ranks have ended, and so do we: who asks us to stop now must not cut the records short."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _take_our_place(script: Script, server: ForkServer) -> None:
    """torchrun offers no argument for what is launched, by which agent, and how logs are followed: its names for them
    become ours."""

    def launch(config: launcher.LaunchConfig, entrypoint: object) -> Any:
        return lambda *words: launcher.launch_agent(config, script.name, [])

    torchrun.elastic_launch = launch  # type: ignore[assignment, misc]
    Agent.script = Ranks.script = script
    Ranks.server = server
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    elastic_multiprocessing.SubprocessContext = Ranks  # type: ignore[misc]
    tail_log.tail_logfile = follow
    # They would print a failed worker's traceback a second time, and that somebody asked us to stop.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def follow(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Pass on the lines of a rank's output with the header, each when it is complete, until finished.

    A line that a carriage return lets the next one overwrite, as progress bars do, ends with a carriage return and a
    line break: `distributed.launch.console` then shows them in one place.

    torchrun passes on what is there: when two ranks have unfinished lines, the one becomes the end of the other.
    """
    while not os.path.exists(file):
        if finished.wait(interval_sec) and not os.path.exists(file):  # the rank may have begun and ended meanwhile
            return
    show, unfinished = log_line_filter or bool, b""
    with open(file, "rb") as output:
        while True:
            last = finished.is_set()
            block = output.read(BLOCK)
            if not block and last:
                break
            if not block:
                finished.wait(interval_sec)
            lines, unfinished = _complete_lines(unfinished + block)
            _write([f"{header}{line}" for line in lines if show(line)], dst)
    if unfinished:
        _write([f"{header}{line}" for line in _complete_lines(unfinished + b"\n")[0] if show(line)], dst)


def _complete_lines(output: bytes) -> tuple[list[str], bytes]:
    """The complete lines, each with its end, and what follows them. A carriage return ends a line too: with \\r\\n."""
    end = max(output.rfind(b"\n"), output.rfind(b"\r", 0, -1)) + 1  # a \n may follow a \r that comes last
    text = output[:end].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\r\n")
    return [f"{line}\n" for line in text.split("\n")[:-1] if line != "\r"], output[end:]


def _write(lines: list[str], dst: TextIO) -> None:
    """Many lines in one write, but no more than a pipe takes without interruption by others that write to it."""
    text, start = "".join(lines).encode(), 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or text.index(b"\n", start) + 1
        dst.write(text[start:end].decode())
        start = end


def _fresh_path() -> tuple[str, ...]:
    """sys.path as Python made it, without the entry's own folder: workers put theirs in its place."""
    return tuple(sys.path[1:])


def _agent() -> Agent:
    assert Agent.latest is not None
    return Agent.latest
