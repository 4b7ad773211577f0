"""torchrun's own agent with workers forked from a warm process; it stops fast and records which rank failed first.

Options, rendezvous, environment and restarts are torchrun's (`torch.distributed.run`). What differs: workers are forked
from one process that has imported PyTorch (`distributed.agent.worker`); every rank that fails is recorded with its exit
code and time in errors/node_<name>.json; the other ranks are stopped within seconds (torchrun: 30), also on the other
nodes (torchrun: not at all); and the exit code is that of the first rank that failed (torchrun: always 1).

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
from distributed.agent.fork_server import ForkedProcess, ForkServer, ForkServerError, signals
from distributed.agent.membership import Membership, RendezvousFailed, RunEnd
from distributed.agent.rendezvous import Rendezvous, log
from distributed.agent.worker import RankSpec, Script
from distributed.exit_codes import STOPPED

POLL_INTERVAL = 0.1  # seconds between two checks of the ranks, when none has exited
REPORT_GRACE = 1.0  # seconds between the first failure and SIGTERM, in which other ranks may write their own record
TERM_GRACE = 3.0  # seconds between SIGTERM and SIGKILL after a failure
STOP_GRACE = 30.0  # seconds in which the other ranks may save their state, when one has stopped on request
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BLOCK = 1 << 20  # bytes of a rank's output that are read at once


@dataclass(frozen=True)
class RankFailure:
    """A rank that exited with another code than 0."""

    rank: int
    local_rank: int
    pid: int
    time: float  # unix seconds at which the agent saw it
    exit_code: int  # 128+n for a signal
    ended_by_agent: bool  # by SIGTERM or SIGKILL, after another one had failed


@dataclass(frozen=True)
class Handler:
    """A rank's process with the interface of torchrun's SubprocessHandler."""

    proc: ForkedProcess

    def close(self, death_sig: signal.Signals) -> None:
        self.proc.signal(death_sig)


class ForkedRanks(SubprocessContext):
    """torchrun's processes of one attempt, forked instead of started."""

    server: ForkServer
    script: Script

    def _start(self) -> None:
        ranks = [
            RankSpec(self.script, {**os.environ, **self.envs[n]}, self.stdouts[n], self.stderrs[n])
            for n in range(self.nprocs)
        ]
        signals.defer(STOP_SIGNALS)  # torchrun's handlers raise wherever the agent is
        with signals.held():  # a signal is passed on to the ranks once they are known
            processes = self.server.fork(ranks)
            self.subprocess_handlers = {n: Handler(process) for n, process in enumerate(processes)}  # type: ignore[misc]


class Agent(LocalElasticAgent):
    """torchrun's agent that records failures, stops the other ranks soon, and shares both with the other nodes."""

    latest: Agent  # the one that torchrun made
    script: Script
    rendezvous: Rendezvous | None = None

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.failures: dict[int, RankFailure] = {}  # by local rank
        self.succeeded: list[int] = []  # ranks that exited with 0 before any was asked to stop
        if isinstance(spec.rdzv_handler, StaticTCPRendezvous):
            spec.rdzv_handler = self.rendezvous = Rendezvous(spec.rdzv_handler, self.script)
        Agent.latest = self

    @property
    def membership(self) -> Membership | None:
        """In a run of several nodes."""
        return self.rendezvous.membership if self.rendezvous else None

    def end_of_run(self) -> RunEnd | None:
        """Why the run of several nodes cannot go on, here or elsewhere."""
        return self.membership.end() if self.membership else None

    def exit_code(self) -> int:
        """Of the first rank that failed by itself, here or elsewhere."""
        if end := self.end_of_run():
            return end.exit_code
        first = self._first_failure()
        return first.exit_code if first else 1

    def exchange_records(self) -> int:
        """Exchange failure records with the other nodes, write theirs, and return the exit code of the run."""
        if self.membership and (end := self.membership.end()):
            self._write_record(end.node if end.lost else None)
            self.membership.leave(self._records(), collect=True)
            for records in self.membership.records.values():
                failure_records.write_missing(records)
        return self.exit_code()

    def handle_stop_signal(self, number: int) -> int:
        """The agent received this signal, and its ranks have exited: stop the other nodes. Returns the exit code."""
        self.reap_ranks(ended_by_agent=True)
        if not self.end_of_run() and self._all_succeeded():
            return 0
        if self.end_of_run():  # the run was ending already, and the launcher stops what is left of it
            return self.exchange_records()
        return self.end_run(
            STOPPED if self.all_stopped_on_request() else 128 + number, f"received {signal.Signals(number).name}"
        )

    def end_run(self, code: int, reason: str) -> int:
        """End the run on the other nodes, without waiting for their records. Returns the exit code."""
        if self.membership:
            self.membership.report_end(RunEnd(failure_records.node_name(), code, reason))
            self.membership.leave(self._records())
        return code

    def all_stopped_on_request(self) -> bool:
        """Whether every rank that failed did so on request, with a checkpoint written."""
        return {failure.exit_code for failure in self.failures.values()} == {STOPPED}

    def reap_ranks(self, ended_by_agent: bool = False) -> None:
        """Reap the ranks that have exited, and record those that failed."""
        for local_rank, process in enumerate(self._processes()):
            code = process.reap()
            if not code or local_rank in self.failures:
                continue
            code = code if code > 0 else 128 - code
            rank = self._worker_group.workers[local_rank].global_rank
            if not ended_by_agent and code != STOPPED:
                sys.stderr.write(f"agent: rank {rank} (pid {process.pid}) ended with exit code {code}\n")
            self.failures[local_rank] = RankFailure(rank, local_rank, process.pid, time.time(), code, ended_by_agent)
        if not ended_by_agent:
            workers = zip(self._worker_group.workers, self._processes(), strict=False)
            self.succeeded = [worker.global_rank for worker, process in workers if process.returncode == 0]
        if self.failures:
            self._write_record()

    # -------- torchrun's own steps

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failures.clear()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with signals.held():
            # An exit is seen when it happens: of two failures a moment apart, the first is known.
            ForkedRanks.server.wakeup.wait(POLL_INTERVAL)
            self.reap_ranks()
            if first := self._first_failure():
                if self.membership:
                    reason = f"rank {first.rank} ended with exit code {first.exit_code}"
                    self.membership.report_end(RunEnd(failure_records.node_name(), first.exit_code, reason))
                self._stop_ranks(self.all_stopped_on_request())
            elif not self.failures and (end := self.end_of_run()):
                cause = f"{end.node}: connection lost" if end.lost else f"{end.node} ends the run ({end.reason})"
                log(f"{cause}; stopping the ranks of this node")
                self._stop_ranks(end.exit_code == STOPPED)
            return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.membership:
            self.membership.finish()
        else:
            super()._exit_barrier()

    # -------- ours

    def _all_succeeded(self) -> bool:
        """Whether all ranks of the run have exited with 0, though this node was asked to stop."""
        processes = self._processes()
        if not processes or any(process.reap() != 0 for process in processes):
            return False
        try:
            return self.membership is None or self.membership.finish(TERM_GRACE) is None
        except TimeoutError:
            return False

    def _first_failure(self) -> RankFailure | None:
        own = [failure for failure in self.failures.values() if not failure.ended_by_agent]
        return min(own, key=lambda failure: failure.time, default=None)

    def _records(self) -> failure_records.Records:
        return failure_records.read_own_records(failure.rank for failure in self.failures.values())

    def _write_record(self, lost: str | None = None) -> None:
        failures = [asdict(failure) for _, failure in sorted(self.failures.items())]
        failure_records.write_node_record(failures, self.succeeded, lost)

    def _processes(self) -> list[ForkedProcess]:
        context = self._pcontext
        handlers = context.subprocess_handlers if isinstance(context, ForkedRanks) else {}
        return [handler.proc for handler in handlers.values()]  # type: ignore[misc]

    def _stop_ranks(self, on_request: bool) -> None:
        """Wait for their own records, or for what they save on request, then send SIGTERM, then SIGKILL."""
        self._wait(STOP_GRACE if on_request else REPORT_GRACE)
        self.reap_ranks()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes():
                process.signal(number)
            self._wait(TERM_GRACE)
        self.reap_ranks(ended_by_agent=True)

    def _wait(self, seconds: float) -> None:
        """Until all ranks have exited, but no longer than that."""
        end = time.monotonic() + seconds
        while any(process.reap() is None for process in self._processes()) and (left := end - time.monotonic()) > 0:
            ForkedRanks.server.wakeup.wait(left)
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
    options.monitor_interval = 0.001  # the agent itself waits, and wakes up when a rank exits
    if options.standalone:
        # torchrun waits up to 0.3 s before the rendezvous, so that many nodes do not begin it at the same time.
        dynamic_rendezvous._delay = lambda seconds: None
    if options.max_restarts:
        # With the shared store, recovery seldom works (torch 2.13: 12 of 34 tries; with its own, 23 of 23).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Of sys.path as Python made it, without the first entry, this program's directory: a worker puts its own there.
    arguments, path = tuple(options.training_script_args), tuple(sys.path[1:])
    script = Script(options.training_script, arguments, options.module, path, options.pass_local_rank)
    _replace_in_torchrun(script, server)
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


def _replace_in_torchrun(script: Script, server: ForkServer) -> None:
    """torchrun has no argument for what is launched, by which agent, and how logs are followed: replace these in it."""

    def launch(config: launcher.LaunchConfig, entrypoint: object) -> Any:
        return lambda *words: launcher.launch_agent(config, script.name, [])

    torchrun.elastic_launch = launch  # type: ignore[assignment, misc]
    Agent.script = ForkedRanks.script = script
    ForkedRanks.server = server
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    elastic_multiprocessing.SubprocessContext = ForkedRanks  # type: ignore[misc]
    tail_log.tail_logfile = follow
    # They would print a failed worker's traceback a second time, and that the agent was asked to stop.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def _run(options: argparse.Namespace) -> int:
    try:
        torchrun.run(options)
    except SignalException as error:
        _ignore_stop_signals()
        return Agent.latest.handle_stop_signal(int(error.sigval))
    except RendezvousFailed as failure:
        log(str(failure))
        return failure.exit_code
    except ForkServerError as error:
        log(str(error))
        return Agent.latest.end_run(1, str(error))
    except ChildFailedError:
        pass
    except DistError:  # the store is gone, because the other nodes have ended
        if not Agent.latest.end_of_run():
            raise
    else:
        if not Agent.latest.end_of_run():
            return 0
    _ignore_stop_signals()
    return Agent.latest.exchange_records()


def _ignore_stop_signals() -> None:
    """All ranks have exited: a stop request that comes now must not interrupt the exchange of failure records."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def follow(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy the lines of a rank's output with the header, each when it is complete, until finished.

    A line that a carriage return lets the next one overwrite, as progress bars do, ends with a carriage return and a
    line break: `distributed.launch.console` then shows them in one place.

    torchrun copies also unfinished lines: the line of another rank is then appended to it.
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
    """Many lines in one write, but no more than PIPE_BUF bytes: other processes cannot write in between."""
    text, start = "".join(lines).encode(), 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or text.index(b"\n", start) + 1
        dst.write(text[start:end].decode())
        start = end
