"""Muster's agent: it starts the ranks of this node, watches them, and stops them after a failure or a stop request.

Ranks find the environment, files and exit that torchrun gives them. Differences from torchrun:

- Ranks are forked from one process that has imported PyTorch (`distributed.agent.worker`).
- errors/node_<name>.json records the exit code and time of every failed rank.
- A failure stops the other ranks within seconds (torchrun: up to 30 s), also on other nodes (torchrun: not at all).
- The exit code is that of the first failed rank (torchrun: always 1).
- The launcher restarts a run: this process then runs the next attempt (`distributed.agent.attempt`).

Try it: python scripts/lib/agent.py --nproc-per-node 2 train.py --config config/quickstart.yaml
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from distributed.agent import failure_records
from distributed.agent.attempt import AttemptPipes
from distributed.agent.fork_server import ForkedProcess, ForkServer, ForkServerError
from distributed.agent.membership import Membership, RendezvousFailed, RunEnd
from distributed.agent.options import Options
from distributed.agent.rank_output import RankOutput
from distributed.agent.rendezvous import Rendezvous, log
from distributed.agent.worker import ERROR_HANDLING, RankSpec, Script
from distributed.exit_codes import STOPPED
from distributed.files import PUBLIC
from distributed.host.clock import RunningClock

POLL_INTERVAL = 0.1  # seconds between two checks of the ranks; a rank that exits is checked at once
REPORT_GRACE = 1.0  # seconds between the first failure and SIGTERM: time for other ranks to write failure records
TERM_GRACE = 3.0  # seconds between SIGTERM and SIGKILL after a failure
STOP_GRACE = 30.0  # seconds for ranks to write a checkpoint, after a stop signal or after one has stopped on request
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
class Rank:
    """A rank that was started."""

    number: int
    process: ForkedProcess
    record: failure_records.RankRecord


class StopRequested(Exception):
    """A stop signal has arrived. Only functions that wait raise this, so that nothing is interrupted."""

    def __init__(self, number: int) -> None:
        self.number = number


class Agent:
    """One attempt on this node."""

    def __init__(self, options: Options, script: Script, server: ForkServer, pipes: AttemptPipes | None) -> None:
        self.failures: dict[int, RankFailure] = {}  # by local rank
        self.records: dict[str, Mapping[str, Any]] = {}  # failure records of this node: file name -> content
        self.succeeded: list[int] = []  # ranks that exited with 0 before the agent stopped others
        self.ranks: list[Rank] = []  # by local rank
        self.rendezvous = Rendezvous(options, script)
        self._options, self._script, self._server, self._pipes = options, script, server, pipes
        self._stop_signal = 0  # that has arrived; 0: none

    @property
    def membership(self) -> Membership | None:
        """None in a run of one node."""
        return self.rendezvous.membership

    def run(self) -> int:
        """Run the attempt. Returns its exit code."""
        try:
            self._run_ranks()
            if not self.failures and not self._finish():
                self._warn_of_equal_ranks()
                return 0
        except StopRequested as request:
            return self.handle_stop_signal(request.number)
        except RendezvousFailed as failure:
            return _report_own_failure(failure, failure.exit_code)
        except ForkServerError as error:
            return self.end_run(_report_own_failure(error, 1), str(error))
        _set_stop_signals(signal.SIG_IGN)  # all ranks have exited, and the exchange of records must be completed
        return self.exchange_records()

    def can_restart(self) -> bool:
        """Whether this process can run another attempt: it can fork, and all ranks of this attempt have exited."""
        _set_stop_signals(signal.SIG_IGN)  # until the next attempt: the supervisor may still be stopping this one
        return not self.has_ranks() and self._server.is_running()

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
        for local_rank, rank in enumerate(self.ranks):
            process, code = rank.process, rank.process.reap()
            if code == 0 or local_rank in self.failures or (code is None and not read_records):
                continue
            record = rank.record.read(process.pid)
            if code is None and not record:
                continue
            exit_code, number = record.get("exit_code") or _shell_code(code or 0), rank.number
            failed_at = record.get("time") or time.time()
            if not ended_by_agent and exit_code != STOPPED:
                sys.stderr.write(f"agent: rank {number} (pid {process.pid}) failed with exit code {exit_code}\n")
            self.failures[local_rank] = RankFailure(
                number, local_rank, process.pid, failed_at, exit_code, ended_by_agent
            )
            if record:
                self.records[f"rank_{number}.json"] = record
        if not ended_by_agent:
            others = [rank for local_rank, rank in enumerate(self.ranks) if local_rank not in self.failures]
            self.succeeded = [rank.number for rank in others if rank.process.returncode == 0]
        if self.failures:
            self._write_record()

    # -------- the attempt

    def _run_ranks(self) -> None:
        """Wait for the other nodes, start the ranks, and wait until they have exited."""
        variables = self.rendezvous.join()
        numbers = [int(env["RANK"]) for env in variables]
        with contextlib.closing(RankOutput(self._options, numbers)) as output:
            tasks = [
                RankSpec(self._script, {**os.environ, **env, "TORCHELASTIC_ERROR_FILE": error_file}, *files)
                for env, error_file, files in zip(variables, output.error_files, output.files, strict=True)
            ]
            _set_stop_signals(self._on_stop_signal)
            processes = self._server.fork(tasks)
            records = [failure_records.RankRecord(task.environment) for task in tasks]
            self.ranks = list(map(Rank, numbers, processes, records))
            try:
                self._watch()
            except StopRequested as request:
                self._forward(request.number)
                raise

    def _watch(self) -> None:
        """Wait until all ranks have exited. Stop them after a failure, or if another node ends the run."""
        while any(rank.process.returncode is None for rank in self.ranks):
            # SIGCHLD ends the wait: failures that are milliseconds apart are recorded in their order.
            woken = bool(self._stop_signal) or self._server.wakeup.wait(POLL_INTERVAL)
            self.reap_ranks(read_records=woken)  # read records only after a wakeup, not ten times per second
            if first := self._first_failure():
                if self.membership:
                    reason = f"rank {first.rank} failed with exit code {first.exit_code}"
                    self.membership.report_end(RunEnd(failure_records.node_name(), first.exit_code, reason))
                return self._stop_ranks(self.all_stopped_on_request())
            if end := self.end_of_run():
                log(f"{end.node}: {end.reason}; stopping the ranks of this node")
                return self._stop_ranks(end.exit_code == STOPPED)
            self._raise_if_stopped()
        return None

    def _finish(self) -> RunEnd | None:
        """Wait until the ranks of all nodes have succeeded. Returns why the run has to stop, or None."""
        return self.end_of_run() or (self.membership.finish(wait=self._pause) if self.membership else None)

    def _warn_of_equal_ranks(self) -> None:
        if self.rendezvous.total > 1 and self.rendezvous.is_store_unused():
            log(f"warning: {self.rendezvous.total} ranks ran, and none joined a process group through MASTER_PORT: "
                "they did the same work, unless the script divides it by RANK")  # fmt: skip

    def _on_stop_signal(self, number: int, _: FrameType | None) -> None:
        if not (self._pipes and self._pipes.pass_on(number)):
            self._stop_signal = number

    def _raise_if_stopped(self) -> None:
        if self._stop_signal:
            _set_stop_signals(signal.SIG_IGN)
            number, self._stop_signal = self._stop_signal, 0
            raise StopRequested(number)

    def _pause(self, seconds: float) -> None:
        self._raise_if_stopped()
        self._server.wakeup.wait(seconds)

    def _all_succeeded(self) -> bool:
        """Whether all ranks, on all nodes, have exited with 0 in spite of the stop request."""
        if not self.ranks or any(rank.process.reap() != 0 for rank in self.ranks):
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
        records: dict[str, Mapping[str, Any]] = {}
        for others in self.membership.records.values() if self.membership else ():
            records |= others
        records |= self.records
        reported = self.membership.first_end if self.membership else None
        first = failure_records.first_failure(records, reported.node if reported else "")
        if end and not first:
            first = {"message": f"{end.node}: {end.reason}", "time": time.time(), "exit_code": end.exit_code}
        if first:
            failure_records.write_error_file(first)

    def has_ranks(self) -> bool:
        """Whether a rank has not exited. After SIGKILL, such a rank is blocked in the kernel."""
        return any(rank.process.reap() is None for rank in self.ranks)

    def _stop_ranks(self, on_request: bool) -> None:
        """Wait for failure records, or for checkpoints if ranks stop on request. Then send SIGTERM, later SIGKILL.

        A rank that has failed but not exited gets only SIGKILL: SIGTERM would interrupt its exit handlers.
        """
        self._wait(STOP_GRACE if on_request else REPORT_GRACE)
        self.reap_ranks()
        for local_rank, rank in enumerate(self.ranks):
            if local_rank not in self.failures:
                rank.process.signal(signal.SIGTERM)
        self._wait(TERM_GRACE)
        for local_rank, rank in enumerate(self.ranks):
            if local_rank in self.failures and rank.process.reap() is None:
                log(f"rank {rank.number} (pid {rank.process.pid}) failed and does not exit: a thread, an exit handler "
                    "or a destructor holds it; killing it")  # fmt: skip
            rank.process.signal(signal.SIGKILL)
        self._wait(TERM_GRACE)
        self.reap_ranks(ended_by_agent=True)

    def _forward(self, number: int) -> None:
        """Send a stop signal to the ranks, SIGHUP and SIGQUIT as SIGTERM, after which ranks may write a checkpoint."""
        number = number if number == signal.SIGINT else signal.SIGTERM
        limit = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # a variable of torchrun
        for sent, seconds in ((number, int(limit) if limit.isdecimal() else STOP_GRACE), (signal.SIGKILL, STOP_GRACE)):
            for rank in self.ranks:
                rank.process.signal(sent)
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        """Wait until all ranks have exited, at most this long. Raises StopRequested."""
        clock = RunningClock()
        end = clock.now() + seconds
        while self.has_ranks() and clock.now() < end:
            self._pause(clock.until(end))


def _shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128+n for a process that signal n ended (returncode -n)."""
    return returncode if returncode >= 0 else 128 - returncode


def main(options: Options, server: ForkServer, pipes: AttemptPipes | None = None) -> int:
    """Run the attempt, then those that the supervisor requests. Returns the last exit code.

    Like torchrun, writes the first failure to the file that TORCHELASTIC_ERROR_FILE names in the agent's environment.
    """
    os.environ.setdefault(*ERROR_HANDLING)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in STOP_SIGNALS)  # as torchrun does
    # sys.path without its first entry, the directory of this program. A rank inserts the directory of its script.
    arguments, path = tuple(options.training_script_args), (*sys.path[1:], PUBLIC)
    script = Script(options.training_script, arguments, options.module, path, options.pass_local_rank)
    try:
        return _run_attempts(options, script, server, pipes)
    finally:
        server.close()


def _run_attempts(options: Options, script: Script, server: ForkServer, pipes: AttemptPipes | None) -> int:
    code = 0
    while True:
        outcome = ""
        if not (pipes and pipes.restarts) or is_member(os.environ):
            agent = Agent(options, script, server, pipes)
            code = agent.run()
            if not (code and pipes and pipes.restarts and agent.can_restart()):
                return code
            end = agent.end_of_run()
            lost = end.node if end and end.lost and end.node in os.environ.get("MUSTER_NODES", "").split() else ""
            outcome = f"{code} {lost}"
            # Close the store: agents and ranks of the next attempt must not connect to it.
            del end, agent
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


def apply_request(request: Mapping[str, Any], options: Options) -> None:
    """Set the environment and the options for the next attempt. request: see NodeStart.next_attempt()."""
    os.environ.update(request["environment"])
    if nodes := request["processes"]:
        os.environ["MUSTER_NODES"] = " ".join(nodes)
        options.nnodes, options.master_addr, options.master_port = len(nodes), request["address"], int(request["port"])
        if (name := failure_records.node_name()) in nodes:
            options.node_rank, options.nproc_per_node = list(nodes).index(name), int(nodes[name])


def _report_own_failure(error: Exception, code: int) -> int:
    log(str(error))
    failure_records.write_error_file({"message": str(error), "time": time.time(), "exit_code": code})
    return code


def _set_stop_signals(action: Any) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, action)
