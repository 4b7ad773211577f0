"""torchrun's own agent, with warm workers, that ends quickly and says who died.

Options, rendezvous, environment and restarts are torchrun's (`torch.distributed.run`). What differs: workers are
forked from one warm process (`distributed.worker`), every rank that dies is noted with its exit code and time in
errors/node_<name>.json, the others are ended within seconds (torchrun: 30), and the exit code is the first one's
(torchrun: always 1).

Try it: python scripts/lib/agent.py --nproc-per-node 2 train.py --config config/quickstart.yaml
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import tail_log
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as launcher

from distributed.worker import Script, node_name, work, write_json

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
    """torchrun's agent, that also notes deaths, and does not wait long for those who survive."""

    latest: Agent | None = None  # the one that torchrun made

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.deaths: dict[int, Death] = {}
        Agent.latest = self

    def exit_code(self) -> int:
        """Of the first rank that died by itself."""
        own = [death for death in self.deaths.values() if not death.ended_by_agent]
        return min(own, key=lambda death: death.time).exit_code if own else 1

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
            self._write_deaths()

    # -------- torchrun's own steps

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.deaths.clear()
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # A death is seen when it happens: of two that die a moment apart, the first is told from the second.
        connection.wait([process.sentinel for process in self._processes() if process.is_alive()], LOOK)
        self.note_deaths()
        self._take_silence_for_success()
        if self.deaths:
            self._end_the_others()
        result = super()._monitor_workers(worker_group)
        if result.failures and not self.deaths:
            # One died between our look and torchrun's, which then has ended the others.
            self.note_deaths(among=[failure.local_rank for failure in result.failures.values()])
            self.note_deaths(ended_by_agent=True)
        return result

    # -------- ours

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

    def _write_deaths(self) -> None:
        if run := os.environ.get("MUSTER_RUN_DIR"):
            deaths = [asdict(death) for _, death in sorted(self.deaths.items())]
            write_json(Path(run, "errors", f"node_{node_name()}.json"), {"node": node_name(), "deaths": deaths})

    def _end_the_others(self) -> None:
        """Time for a last word, then TERM, then KILL. Ranks that stop on request may still be writing."""
        self._wait(STOP_GRACE if self.all_stopped() else FAREWELL)
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
    options = torchrun.parse_args(words)
    options.start_method = "forkserver"
    options.monitor_interval = 0.001  # the waiting is done by the agent itself, which wakes when a rank dies
    if options.max_restarts:
        # With the shared store, recovery seldom works (torch 2.13: 12 of 34 tries; with its own, 23 of 23).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    _take_our_place(Script(options.training_script, tuple(options.training_script_args), options.module, _fresh_path()))
    try:
        torchrun.run(options)
    except ChildFailedError:
        return _agent().exit_code()
    except SignalException as error:
        _agent().note_deaths(ended_by_agent=True)
        return STOPPED if _agent().all_stopped() else 128 + int(error.sigval)
    return 0


def _take_our_place(script: Script) -> None:
    """torchrun offers no argument for what is launched, by which agent, and how logs are followed: its names for them
    become ours."""

    def launch(config: launcher.LaunchConfig, entrypoint: object) -> Any:
        return lambda *words: launcher.launch_agent(config, work, [script])

    torchrun.elastic_launch = launch  # type: ignore[assignment, misc]
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
        if finished.wait(interval_sec):
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
