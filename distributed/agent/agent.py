"""An agent like torchrun's that forks ranks from a warm process, stops quickly and records which rank failed first.

Options, rendezvous, environment and restarts are torchrun's (`torch.distributed.run`). Differences:

- Ranks are forked from one process that has imported PyTorch (`distributed.agent.worker`).
- errors/node_<name>.json records the exit code and time of every failed rank.
- A failure stops the other ranks within seconds (torchrun: up to 30 s), also on other nodes (torchrun: not at all).
- The exit code is that of the first failed rank (torchrun: always 1).

Try it: python scripts/lib/agent.py --nproc-per-node 2 train.py --config config/quickstart.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
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
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher

from distributed.agent import failure_records
from distributed.agent.attempt import Attempt, AttemptPipes, keep_rendezvous_private, stable_run_id
from distributed.agent.fork_server import ForkedProcess, ForkServer, ForkServerError, signals
from distributed.agent.membership import LOOPBACK, Membership, RendezvousFailed, RunEnd, tcp_store
from distributed.agent.rendezvous import Rendezvous, log
from distributed.agent.worker import ERROR_HANDLING, RankSpec, Script
from distributed.exit_codes import STOPPED
from distributed.host.clock import RunningClock
from distributed.launch.output_lines import RankLines, with_prefix
from distributed.trust import parse_json, read_bytes

POLL_INTERVAL = 0.1  # seconds between two checks of the ranks; a rank that exits is checked at once
REPORT_GRACE = 1.0  # seconds between the first failure and SIGTERM: time for other ranks to write failure records
TERM_GRACE = 3.0  # seconds between SIGTERM and SIGKILL after a failure
STOP_GRACE = 30.0  # seconds for the other ranks to write a checkpoint after one rank has stopped on request
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
BLOCK = 1 << 20  # bytes per read of a rank's output


@dataclass(frozen=True)
class RankFailure:
    """A rank that failed. An entry of "failures" in the agent's record."""

    rank: int
    local_rank: int
    pid: int
    time: float  # Unix seconds of its failure record; without a record, the time at which the agent reaped it
    exit_code: int  # from the record; without a record, that of the process. 128+n for signal n
    ended_by_agent: bool  # the agent stopped this rank after another failure or after a stop request


@dataclass(frozen=True)
class Handler:
    """A rank's process with the interface of torchrun's SubprocessHandler."""

    proc: ForkedProcess
    record: failure_records.RankRecord

    def close(self, death_sig: signal.Signals) -> None:
        """Send death_sig to the rank. SIGTERM replaces SIGHUP and SIGQUIT, so that the rank may write a checkpoint."""
        self.proc.signal(signal.SIGTERM if death_sig in (signal.SIGHUP, signal.SIGQUIT) else death_sig)


class ForkedRanks(SubprocessContext):
    """torchrun's SubprocessContext with forked processes."""

    server: ForkServer
    script: Script
    attempt: Attempt
    run_id: str  # replaces torchrun's run id; "": torchrun's run id stays

    def _start(self) -> None:
        variables = {n: env | self.attempt.variables(env, self.run_id) for n, env in self.envs.items()}
        ranks = [
            RankSpec(self.script, {**os.environ, **variables[n]}, self.stdouts[n], self.stderrs[n])
            for n in range(self.nprocs)
        ]
        signals.make_deferrable(STOP_SIGNALS)  # torchrun's handlers raise an exception at any point of the main thread
        processes = self.server.fork(ranks)
        records = [failure_records.RankRecord(rank.environment) for rank in ranks]
        handlers = map(Handler, processes, records)
        self.subprocess_handlers = dict(enumerate(handlers))  # type: ignore[arg-type]

    def remove_damaged_error_files(self) -> None:
        """Remove the error files of ranks that a full disk has cut: torchrun's code would fail to read them."""
        for path in self.error_files.values():
            with contextlib.suppress(OSError):
                try:
                    parse_json(read_bytes(path))
                except ValueError:
                    os.unlink(path)


class Agent(LocalElasticAgent):
    """torchrun's agent, extended: after a rank failed, it writes records, and stops the other ranks on all nodes."""

    latest: Agent  # the instance that torchrun created
    script: Script
    rendezvous: Rendezvous | None = None

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.failures: dict[int, RankFailure] = {}  # by local rank
        self.records: dict[str, Mapping[str, Any]] = {}  # failure records of this node: file name -> content
        self.succeeded: list[int] = []  # ranks that exited with 0 before the agent stopped others
        if isinstance(spec.rdzv_handler, StaticTCPRendezvous):
            spec.rdzv_handler = self.rendezvous = Rendezvous(spec.rdzv_handler, self.script)
            spec.master_addr = self.rendezvous.master_addr
        Agent.latest = self

    @property
    def membership(self) -> Membership | None:
        """None in a run of one node."""
        return self.rendezvous.membership if self.rendezvous else None

    def end_of_run(self) -> RunEnd | None:
        """Why the run has to stop, as reported by one of its nodes. None if it may continue, or has one node."""
        return self.membership.end() if self.membership else None

    def exchange_records(self) -> int:
        """Exchange failure records with the other nodes, and write them. Returns the exit code of the run."""
        if self.membership and (end := self.end_of_run()):
            lost = end.node if end.lost else None
            self._write_record(lost)
            self.membership.leave(self.records, collect=True)
            if (reported := self.membership.first_end) and not reported.lost:
                self._write_record(lost, reported.node)
            for records in self.membership.records.values():
                failure_records.write_missing(records)
            self._write_error_file(end)
            return end.exit_code
        self._write_error_file()
        first = self._first_failure()
        return first.exit_code if first else 1

    def handle_stop_signal(self, number: int) -> int:
        """Stop the other nodes because of this signal. All ranks of this node have exited. Returns the exit code."""
        self.reap_ranks(ended_by_agent=True)
        if not self.end_of_run() and self._all_succeeded():
            return 0
        if self.end_of_run():  # the run was already ending when the signal came: its exit code stays
            return self.exchange_records()
        code = STOPPED if self.all_stopped_on_request() else 128 + number
        reason = f"received {signal.Signals(number).name}"
        self._write_error_file(RunEnd(failure_records.node_name(), code, reason))
        return self.end_run(code, reason)

    def end_run(self, code: int, reason: str) -> int:
        """End the run on the other nodes without waiting for their records. Returns the exit code."""
        if self.membership:
            self.membership.report_end(RunEnd(failure_records.node_name(), code, reason))
            self.membership.leave(self.records)
        return code

    def all_stopped_on_request(self) -> bool:
        """Whether all failed ranks exited with STOPPED: they stopped on request, after writing a checkpoint."""
        return {failure.exit_code for failure in self.failures.values()} == {STOPPED}

    def reap_ranks(self, ended_by_agent: bool = False, read_records: bool = True) -> None:
        """Reap ranks that have exited, and record failures.

        A rank that has written a failure record counts as failed, even if it has not exited.

        Args:
            ended_by_agent: whether the agent has stopped the ranks.
            read_records: whether to read failure records of running ranks. A rank wakes the agent after writing one.
        """
        for local_rank, handler in enumerate(self._handlers()):
            process, code = handler.proc, handler.proc.reap()
            if code == 0 or local_rank in self.failures or (code is None and not read_records):
                continue
            record = handler.record.read(process.pid)
            if code is None and not record:
                continue
            exit_code = record.get("exit_code") or _shell_code(code or 0)
            rank, failed_at = self._worker_group.workers[local_rank].global_rank, record.get("time") or time.time()
            if not ended_by_agent and exit_code != STOPPED:
                sys.stderr.write(f"agent: rank {rank} (pid {process.pid}) failed with exit code {exit_code}\n")
            self.failures[local_rank] = RankFailure(rank, local_rank, process.pid, failed_at, exit_code, ended_by_agent)
            if record:
                self.records[f"rank_{rank}.json"] = record
        if not ended_by_agent:
            workers = zip(self._worker_group.workers, self._processes(), strict=False)
            self.succeeded = [worker.global_rank for worker, process in workers if process.returncode == 0]
        if self.failures:
            self._write_record()

    # -------- overridden methods of torchrun

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failures.clear()
        self.records.clear()
        if self.rendezvous:
            ForkedRanks.attempt = self.rendezvous.attempt
        with signals.held():  # a handler must not raise before _pcontext is set, or in Thread.start()
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with signals.held():
            # SIGCHLD ends the wait: failures that are milliseconds apart are recorded in their order.
            woken = ForkedRanks.server.wakeup.wait(POLL_INTERVAL)
            self.reap_ranks(read_records=woken)  # read records only after a wakeup, not ten times per second
            if first := self._first_failure():
                if self.membership:
                    reason = f"rank {first.rank} failed with exit code {first.exit_code}"
                    self.membership.report_end(RunEnd(failure_records.node_name(), first.exit_code, reason))
                self._stop_ranks(self.all_stopped_on_request())
            elif not self.failures and (end := self.end_of_run()):
                log(f"{end.node}: {end.reason}; stopping the ranks of this node")
                self._stop_ranks(end.exit_code == STOPPED)
            if self.failures and isinstance(self._pcontext, ForkedRanks):
                self._pcontext.remove_damaged_error_files()
            return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        if self.membership:
            self.membership.finish()
        else:
            super()._exit_barrier()

    # -------- added methods

    def _all_succeeded(self) -> bool:
        """Whether all ranks, on all nodes, have exited with 0 in spite of the stop request."""
        processes = self._processes()
        if not processes or any(process.reap() != 0 for process in processes):
            return False
        try:
            return self.membership is None or self.membership.finish(TERM_GRACE) is None
        except TimeoutError:
            return False

    def _first_failure(self) -> RankFailure | None:
        """The first failed rank of this node that the agent did not stop."""
        failures = [failure for failure in self.failures.values() if not failure.ended_by_agent]
        return min(failures, key=lambda failure: failure.time, default=None)

    def _write_record(self, lost: str | None = None, first: str | None = None) -> None:
        failures = [asdict(failure) for _, failure in sorted(self.failures.items())]
        record = failure_records.node_record(failures, self.succeeded, lost, first)
        self.records |= record
        failure_records.write(record)

    def _write_error_file(self, end: RunEnd | None = None) -> None:
        """Write the first failure of the run or, if no rank has failed, why the run ended."""
        records = dict(self.records)
        for others in self.membership.records.values() if self.membership else ():
            records |= others
        reported = self.membership.first_end if self.membership else None
        first = failure_records.first_failure(records, reported.node if reported else "")
        if end and not first:
            first = {"message": f"{end.node}: {end.reason}", "time": time.time(), "exit_code": end.exit_code}
        if first:
            failure_records.write_error_file(first)

    def _handlers(self) -> list[Handler]:
        context = self._pcontext
        return list(context.subprocess_handlers.values()) if isinstance(context, ForkedRanks) else []  # type: ignore[arg-type]

    def _processes(self) -> list[ForkedProcess]:
        return [handler.proc for handler in self._handlers()]

    def has_ranks(self) -> bool:
        """Whether a rank has not exited. After SIGKILL, such a rank is blocked in the kernel."""
        return any(process.reap() is None for process in self._processes())

    def _stop_ranks(self, on_request: bool) -> None:
        """Wait for failure records, or for checkpoints if ranks stop on request. Then send SIGTERM, later SIGKILL.

        A rank that has failed but not exited gets only SIGKILL: SIGTERM would interrupt its exit handlers.
        """
        self._wait(STOP_GRACE if on_request else REPORT_GRACE)
        self.reap_ranks()
        for local_rank, process in enumerate(self._processes()):
            if local_rank not in self.failures:
                process.signal(signal.SIGTERM)
        self._wait(TERM_GRACE)
        for local_rank, process in enumerate(self._processes()):
            if local_rank in self.failures and process.reap() is None:
                rank = self.failures[local_rank].rank
                log(f"rank {rank} (pid {process.pid}) failed and does not exit: a thread, an exit handler or a "
                    "destructor holds it; killing it")  # fmt: skip
            process.signal(signal.SIGKILL)
        self._wait(TERM_GRACE)
        self.reap_ranks(ended_by_agent=True)

    def _wait(self, seconds: float) -> None:
        """Wait until all ranks have exited, at most this long."""
        clock = RunningClock()
        end = clock.now() + seconds
        while self.has_ranks() and clock.now() < end:
            signals.handle()  # an earlier wait may have consumed the wakeup of a deferred signal
            ForkedRanks.server.wakeup.wait(clock.until(end))


def _shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128+n for a process that signal n ended (returncode -n)."""
    return returncode if returncode >= 0 else 128 - returncode


# Names inside torchrun that this module replaces or calls: owner, name, required parameters.
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
    (c10d_rendezvous_backend, "_create_tcp_store", {"params"}),
    (dynamic_rendezvous.DynamicRendezvousHandler, "_create_tcp_store_server", {"master_addr", "master_port"}),
]
# Attributes of torchrun's objects that this module uses.
ATTRIBUTES: dict[type, set[str]] = {
    LocalElasticAgent: {"_pcontext", "_worker_group"},
    SubprocessContext: {"nprocs", "envs", "stdouts", "stderrs", "subprocess_handlers", "proc", "close"},
    StaticTCPRendezvous: {"master_addr", "master_port", "rank", "world_size", "run_id", "timeout", "_store"},
}


def unsupported(options: argparse.Namespace) -> str:
    """Why torchrun's agent must run the command instead of this agent; "" if this agent can run it."""
    if options.no_python:
        return "--no-python is not supported"
    if options.numa_binding:
        return "--numa-binding is not supported"
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable:
        return f"PYTHON_EXEC={python} differs from the agent's Python {sys.executable}"
    difference = missing_internal()
    return f"PyTorch {torch.__version__}: {difference}" if difference else ""


def missing_internal() -> str:
    """The first thing that this module needs and torchrun's internals lack; "" if nothing is missing."""
    for owner, name, parameters in INTERNALS:
        lacks = f"{owner.__name__} has no {name}"
        found = getattr(owner, name, None)
        if found is None:
            return lacks
        if missing := parameters - inspect.signature(found).parameters.keys():
            return f"{lacks}({', '.join(sorted(missing))})"
    for kind, names in ATTRIBUTES.items():
        members = [
            inspect.unwrap(member) for base in kind.__mro__ for member in vars(base).values() if callable(member)
        ]
        used = {name for member in members if inspect.isfunction(member) for name in member.__code__.co_names}
        if names - used:
            return f"{kind.__name__} has no {', '.join(sorted(names - used))}"
    return ""


def main(options: argparse.Namespace, server: ForkServer, pipes: AttemptPipes | None = None) -> int:
    """Run torchrun's command line, then the attempts that the supervisor requests. Returns the last exit code.

    Like torchrun, writes the first failure to the file that TORCHELASTIC_ERROR_FILE names in the agent's environment.
    """
    options.monitor_interval = 0.001  # _monitor_workers itself waits until a rank exits or fails
    if options.standalone:
        # torchrun's random delay of up to 0.3 s spreads the load of many nodes. A standalone run has one node.
        dynamic_rendezvous._delay = lambda seconds: None
        options.local_addr = LOOPBACK

        def new_store(*_: Any) -> Any:
            return tcp_store(LOOPBACK, 0, 1, True, timedelta(seconds=60))

        keep_rendezvous_private()
        dynamic_rendezvous.DynamicRendezvousHandler._create_tcp_store_server = new_store  # type: ignore[assignment]
    if options.max_restarts:
        # With the shared store, many restarts fail (torch 2.13: 22 of 34; with separate stores, none of 23).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault(*ERROR_HANDLING)
    # sys.path without its first entry, the directory of this program. A rank inserts the directory of its script.
    arguments, path = tuple(options.training_script_args), tuple(sys.path[1:])
    script = Script(options.training_script, arguments, options.module, path, options.pass_local_rank)
    _replace_in_torchrun(script, server)
    ForkedRanks.run_id = stable_run_id(options.standalone)
    if pipes:
        signals.pass_on = pipes.pass_on
    try:
        return _run_attempts(options, pipes)
    finally:
        server.close()


def _run_attempts(options: argparse.Namespace, pipes: AttemptPipes | None) -> int:
    code = 0
    while True:
        outcome = ""
        if not (pipes and pipes.restarts) or is_member(os.environ):
            ForkedRanks.attempt = Attempt.from_env()
            code = _run(copy.copy(options))
            if not (code and pipes and pipes.restarts and _can_restart()):
                return code
            end = Agent.latest.end_of_run()
            outcome = f"{code} {end.node if end and end.lost else ''}"
            # Close the store: agents and ranks of the next attempt must not connect to it.
            del end, Agent.latest
            gc.collect()
        request = pipes.next_attempt(outcome)
        _set_stop_signals(signal.SIG_DFL)
        # The supervisor may have ended the run after the request, while this process ignored SIGTERM.
        if request is None or pipes.is_stopped():
            return code
        apply_request(request, options)


def is_member(environment: Mapping[str, str]) -> bool:
    """Whether this node runs ranks. A spare node is not in the list of nodes; nodes started by hand have no list."""
    nodes = environment.get("MUSTER_NODES", "").split()
    return not nodes or failure_records.node_name() in nodes


def apply_request(request: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Set the environment and the options for the next attempt. request: see NodeStart.next_attempt()."""
    os.environ.update(request["environment"])
    if nodes := request["processes"]:
        os.environ["MUSTER_NODES"] = " ".join(nodes)
        options.nnodes, options.master_addr, options.master_port = str(len(nodes)), request["address"], request["port"]
        if (name := failure_records.node_name()) in nodes:
            options.node_rank, options.nproc_per_node = list(nodes).index(name), str(nodes[name])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's options and --pass-local-rank."""
    parser = torchrun.get_args_parser()
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="pass --local-rank=N before the script's arguments, as torch.distributed.launch does",
    )
    return parser.parse_args(arguments)


def _replace_in_torchrun(script: Script, server: ForkServer) -> None:
    """Replace the launched program, the agent and the log follower: torchrun has no parameters for them."""

    def launch(config: launcher.LaunchConfig, entrypoint: object) -> Any:
        return lambda *arguments: launcher.launch_agent(config, script.name, [])

    torchrun.elastic_launch = launch  # type: ignore[assignment, misc]
    Agent.script = ForkedRanks.script = script
    ForkedRanks.server = server
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    elastic_multiprocessing.SubprocessContext = ForkedRanks  # type: ignore[misc]
    tail_log.tail_logfile = follow
    # These loggers would repeat the traceback of a failed rank and log the stop request.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def _run(options: argparse.Namespace) -> int:
    try:
        torchrun.run(options)
    except SignalException as error:
        _set_stop_signals(signal.SIG_IGN)
        return Agent.latest.handle_stop_signal(int(error.sigval))
    except RendezvousFailed as failure:
        log(str(failure))
        _record_own_failure(failure, failure.exit_code)
        return failure.exit_code
    except ForkServerError as error:
        log(str(error))
        _record_own_failure(error, 1)
        return Agent.latest.end_run(1, str(error))
    except ChildFailedError:
        pass
    except DistError:  # the store has closed because the other nodes have exited
        if not Agent.latest.end_of_run():
            raise
    else:
        if not Agent.latest.end_of_run():
            return 0
    _set_stop_signals(signal.SIG_IGN)  # all ranks have exited, and the exchange of records must be completed
    return Agent.latest.exchange_records()


def _can_restart() -> bool:
    """Whether this process can run another attempt: it can fork, and all ranks of the last attempt have exited."""
    _set_stop_signals(signal.SIG_IGN)  # until the next attempt: the supervisor may still be stopping this one
    return not Agent.latest.has_ranks() and ForkedRanks.server.is_running()


def _record_own_failure(error: Exception, code: int) -> None:
    failure_records.write_error_file({"message": str(error), "time": time.time(), "exit_code": code})


def _set_stop_signals(action: signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, action)


def follow(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy complete lines of a rank's output to `dst`, each after the header, until finished.

    An update of a progress bar is written with CR LF, see `distributed.launch.output_lines`.

    This replaces torchrun's tail_logfile(), which also copies incomplete lines: it may print the output of two ranks on
    one line.
    """
    while not os.path.exists(file):
        if finished.wait(interval_sec) and not os.path.exists(file):  # the rank may have started and exited meanwhile
            return
    lines = RankLines()
    with open(file, "rb") as output:
        while True:
            last = finished.is_set()
            block = output.read(BLOCK)
            if not block and not last:
                finished.wait(interval_sec)
                block = output.read(BLOCK)
            ended = last and not block
            _write(header, lines.feed(block, ended), dst, log_line_filter)
            if ended:
                break


def _write(header: str, lines: bytes, dst: TextIO, show: Callable[[str], bool] | None) -> None:
    """Write as many lines at once as fit into PIPE_BUF bytes: such a write to a pipe is atomic."""
    if show:
        lines = b"".join([line + b"\n" for line in lines.split(b"\n")[:-1] if show(line.decode(errors="replace"))])
    text, start = with_prefix(header.encode(), lines), 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or text.index(b"\n", start) + 1
        dst.buffer.write(text[start:end])
        dst.buffer.flush()
        start = end
