"""torchrun's own agent, with warm workers, that ends quickly and says who died.

Options, rendezvous, environment and restarts are torchrun's (`torch.distributed.run`). What differs: workers are
forked from one warm process (`distributed.worker`), every rank that dies is noted with its exit code and time in
errors/node_<name>.json, the others are ended within seconds (torchrun: 30), also on the other nodes (torchrun: not at
all), and the exit code is the first one's (torchrun: always 1).

Try it: python scripts/lib/agent.py --nproc-per-node 2 train.py --config config/quickstart.yaml
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from typing import Any, TextIO

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import tail_log
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher

from distributed import accounts
from distributed.meeting import Meeting, say
from distributed.peers import End, NotMet, Peers
from distributed.worker import Script, work

STOPPED = 75  # exit code of a rank that stopped on request with a checkpoint written
LOOK = 0.1  # seconds between two looks at ranks of which none dies
FAREWELL = 1.0  # seconds that the others get to report after one rank has failed
TERM_GRACE = 3.0  # seconds between TERM and KILL after one rank has failed
STOP_GRACE = 30.0  # seconds that the others get to write their part when one rank has stopped on request


@dataclass(frozen=True)
class Death:
    """A rank that ended, and not well."""

    rank: int
    local_rank: int
    pid: int
    time: float  # unix seconds at which the agent saw it
    exit_code: int  # 128+n for a signal
    ended_by_agent: bool  # TERM or KILL, after another one had failed


class Agent(LocalElasticAgent):
    """torchrun's agent, that also notes deaths, does not wait long for those who survive, and knows the other nodes."""

    latest: Agent | None = None  # the one that torchrun made
    script: Script
    meeting: Meeting | None = None  # of several nodes

    def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.deaths: dict[int, Death] = {}
        if isinstance(spec.rdzv_handler, StaticTCPRendezvous) and spec.rdzv_handler.world_size > 1:
            spec.rdzv_handler = self.meeting = Meeting(spec.rdzv_handler, self.script)
        Agent.latest = self

    @property
    def peers(self) -> Peers | None:
        """The agents of the other nodes, once they have met."""
        return self.meeting.peers if self.meeting else None

    def ended(self) -> End | None:
        """Why the run of several nodes cannot go on, here or elsewhere."""
        return self.peers.end() if self.peers else None

    def exit_code(self) -> int:
        """Of the first rank that died by itself, here or elsewhere."""
        if end := self.ended():
            return end.exit_code
        return self._first_death().exit_code if self._own_deaths() else 1

    def failed(self) -> int:
        """Tell the other nodes how it was here, keep what they tell, and return the exit code of it all."""
        if self.peers and (end := self.peers.end()):
            self._write_account(end.node if end.lost else None)
            self.peers.last_words(self._accounts())
            for told in self.peers.accounts.values():
                accounts.keep(told)
        return self.exit_code()

    def stopped_by(self, number: int) -> int:
        """Somebody sent us this signal, and the ranks have ended: the others need not wait. Returns the exit code."""
        self.note_deaths(ended_by_agent=True)
        code = STOPPED if self.all_stopped() else 128 + number
        if self.peers:
            self.peers.tell_end(End(accounts.node_name(), code, f"{signal.Signals(number).name} came"))
            self.peers.leave(self._accounts())
        return code

    def all_stopped(self) -> bool:
        """Whether every rank that ended did so on request, with a checkpoint written."""
        return {death.exit_code for death in self.deaths.values()} == {STOPPED}

    def note_deaths(self, ended_by_agent: bool = False, among: Collection[int] | None = None) -> None:
        """Look which ranks (among these local ones) have died since the last look, and write it down."""
        news = [
            self._death(local_rank, process, ended_by_agent)
            for local_rank, process in enumerate(self._processes())
            if process.exitcode and local_rank not in self.deaths and (among is None or local_rank in among)
        ]
        self.deaths.update((death.local_rank, death) for death in news)
        if news:
            self._write_account()

    # -------- torchrun's own steps

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.deaths.clear()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # A death is seen when it happens: of two that die a moment apart, the first is told from the second.
        connection.wait([process.sentinel for process in self._processes() if process.is_alive()], LOOK)
        self.note_deaths()
        self._take_silence_for_success()
        if self._own_deaths():
            self._tell_of_death()
            self._end_the_others(self.all_stopped())
        elif not self.deaths and (end := self.ended()):
            say(f"{end.node} {'fell silent' if end.lost else f'ends the run ({end.reason})'}: ending here too")
            self._end_the_others(end.exit_code == STOPPED)
        result = super()._monitor_workers(worker_group)
        if result.failures and not self.deaths:
            # One died between our look and torchrun's, which then has ended the others.
            self.note_deaths(among=[failure.local_rank for failure in result.failures.values()])
            self.note_deaths(ended_by_agent=True)
        return result

    def _exit_barrier(self) -> None:
        if self.peers:
            self.peers.part()
        else:
            super()._exit_barrier()

    # -------- ours

    def _own_deaths(self) -> list[Death]:
        return [death for death in self.deaths.values() if not death.ended_by_agent]

    def _first_death(self) -> Death:
        return min(self._own_deaths(), key=lambda death: death.time)

    def _tell_of_death(self) -> None:
        death = self._first_death()
        if self.peers:
            reason = f"rank {death.rank} ended with exit code {death.exit_code}"
            self.peers.tell_end(End(accounts.node_name(), death.exit_code, reason))

    def _accounts(self) -> accounts.Accounts:
        return accounts.of_this_node(death.rank for death in self.deaths.values())

    def _write_account(self, lost: str | None = None) -> None:
        accounts.write_of_node([asdict(death) for _, death in sorted(self.deaths.items())], lost)

    def _take_silence_for_success(self) -> None:
        """torchrun waits for what workers return: one that left by os._exit(0), or became another program, does not."""
        for local_rank, process in enumerate(self._processes()):
            if process.exitcode == 0:
                self._pcontext._return_values.setdefault(local_rank, None)  # type: ignore[union-attr]

    def _processes(self) -> list[Any]:
        context = self._pcontext
        return context._pc.processes if isinstance(context, MultiprocessContext) and context._pc else []

    def _death(self, local_rank: int, process: Any, ended_by_agent: bool) -> Death:
        rank = self._worker_group.workers[local_rank].global_rank
        code = process.exitcode if process.exitcode > 0 else 128 - process.exitcode
        if not ended_by_agent and code != STOPPED:
            sys.stderr.write(f"agent: rank {rank} (pid {process.pid}) ended with exit code {code}\n")
        return Death(rank, local_rank, process.pid, time.time(), code, ended_by_agent)

    def _end_the_others(self, stopping: bool) -> None:
        """Time for a last word, then TERM, then KILL. Ranks that stop on request may still be writing."""
        self._wait(STOP_GRACE if stopping else FAREWELL)
        self.note_deaths()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes():
                if process.is_alive():
                    os.kill(process.pid, number)
            self._wait(TERM_GRACE)
        self.note_deaths(ended_by_agent=True)

    def _wait(self, seconds: float) -> None:
        """Until all have ended, but no longer than that."""
        end = time.monotonic() + seconds
        for process in self._processes():
            process.join(max(0.0, end - time.monotonic()))


def main(words: Sequence[str]) -> int:
    """Run torchrun's command line. Returns 0, or the exit code of the first rank that failed."""
    options = _parse(words)
    options.start_method = "forkserver"
    options.monitor_interval = 0.001  # the waiting is done by the agent itself, which wakes when a rank dies
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
        )
    )
    return _run(options)


def _parse(words: Sequence[str]) -> argparse.Namespace:
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
    except NotMet as unmet:
        say(str(unmet))
        return unmet.exit_code
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
    """All ranks have ended, and so do we: who asks us to stop now must not cut the accounts short."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _take_our_place(script: Script) -> None:
    """torchrun offers no argument for what is launched, by which agent, and how logs are followed: its names for them
    become ours."""

    def launch(config: launcher.LaunchConfig, entrypoint: object) -> Any:
        return lambda *words: launcher.launch_agent(config, work, [script])

    torchrun.elastic_launch = launch  # type: ignore[assignment, misc]
    Agent.script = script
    launcher.LocalElasticAgent = Agent  # type: ignore[misc]
    tail_log.tail_logfile = follow
    # They would print a failed worker's traceback a second time, and that somebody asked us to stop.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def follow(
    header: str, file: str, dst: TextIO, finished: threading.Event, interval_sec: float, *_: object, **__: object
) -> None:
    """Pass on the lines of a rank's output, with the header, until finished: each when it is whole.

    torchrun passes on what is there, and when two ranks have unfinished lines the one becomes the end of the other.
    """
    line = ""
    while not os.path.exists(file):
        if finished.wait(interval_sec) and not os.path.exists(file):  # a short life may have been meanwhile
            return
    with open(file, errors="replace") as output:
        while True:
            last = finished.is_set()
            line += output.readline()
            if line.endswith("\n"):
                dst.write(f"{header}{line}")
                line = ""
            elif last:
                break
            else:
                finished.wait(interval_sec)
    if line:
        dst.write(f"{header}{line}\n")


def _fresh_path() -> tuple[str, ...]:
    """sys.path as Python made it, without the entry's own folder: workers put theirs in its place."""
    return tuple(sys.path[1:])


def _agent() -> Agent:
    assert Agent.latest is not None
    return Agent.latest
