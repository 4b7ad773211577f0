"""Supervise one task of a job step on its node: a rank, or the agent that starts all ranks of the node.

usage: module.py slurm.task rank RUN GRACE SCRIPT|-m MODULE [ARGUMENT...]
       module.py slurm.task agent RUN GRACE COUNTS COMMAND [ARGUMENT...] -- [ARGUMENT...]

RUN is the run directory, GRACE the seconds between SIGTERM and SIGKILL, COUNTS the number of ranks on each node, as in
2,2,1. The -- is replaced with the options of this node's agent. SLURM's variables identify the task.

The task communicates with distributed/launch/srun.py, on the launcher's side, through srun:

    standard output   lines for the console (the byte ERROR precedes a line of standard error), and reports; see
                      distributed/launch/node_reports.py
    standard input    the supervisor's control channel: requests, and an empty line as a heartbeat

The first report of a task means that it has started, the last one has its exit code. The first task of each node also
sends reports as heartbeats. After its command has exited, a task waits until the control channel is closed, because
srun kills the other tasks when one fails. Standard library only. This program starts before every rank, so it imports
few modules, some of them only when needed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time

from distributed.exit_codes import KILLED, UNFIT
from distributed.files import KIT, read_json
from distributed.host import collectives, process_scan, signals
from distributed.launch import node_environment, node_files, node_processes, supervisor
from distributed.launch.command_output import CommandOutput
from distributed.launch.node_reports import ERROR, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, format_report
from distributed.launch.supervisor_options import SupervisorOptions
from distributed.trust import PRIVATE_DIRECTORY, make_directories, regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from distributed.launch.node_environment import Environment
    from distributed.launch.output_lines import RankLines

COPY_INTERVAL = 0.05  # seconds between reads of a rank's output files
REPEAT_INTERVAL = 0.5  # seconds between attempts to repeat a signal
DUPLICATE_TIME = 2.0  # seconds in which SLURM (scancel --full) and the launcher may send the same signal
STOP_EXIT_CODES = (0, 128 + signal.SIGTERM, KILLED)  # of a rank that was stopped and has not saved a checkpoint


class TaskFiles(node_files.Files):
    """The files of one task. The tasks of a node share one log; the other files are beside the ranks' output."""

    def __init__(self, run: str, env: Mapping[str, str]) -> None:
        node = env["SLURMD_NODENAME"]
        tasks = os.path.join("ranks", node, "slurm")
        super().__init__(run, node, stem=os.path.join(tasks, f"task_{env['SLURM_PROCID']}"))
        self.request = ""  # requests arrive only through the control channel
        self.output = os.path.join(run, tasks, "attempt_0", env["SLURM_LOCALID"])  # directory
        self._environment = {name: env[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")}
        self._environment["MUSTER_RUN_DIR"] = self.directory

    def use(self, attempt: str) -> None:
        super().use(attempt)
        self.log = os.path.join(attempt, f"node_{self.name}.log")
        self.samples = os.path.join(attempt, f"node_{self.name}.samples.jsonl")

    @property
    def environment(self) -> frozenset[bytes]:
        return frozenset(os.fsencode(f"{name}={value}") for name, value in self._environment.items())


class TaskOutput(CommandOutput):
    """The output of one task: a rank writes to files, so that a slow console cannot block it.

    An agent opens files for its ranks.
    """

    def __init__(self, files: TaskFiles, options: SupervisorOptions, rank: int | None) -> None:
        super().__init__(files, options)
        self._directory, self._rank = files.output, rank
        self._files: list[tuple[int, RankLines]] = []  # of a rank: standard output, standard error
        self.streams = self.streams[:1]  # the launcher expects only srun's own messages on standard error

    def open(self, env: Environment) -> tuple[int, int]:
        if self._rank is None:
            return super().open(env)
        from distributed.launch.output_lines import RankLines

        self.use(env)
        make_directories(self._directory, PRIVATE_DIRECTORY)
        paths = [os.path.join(self._directory, f"{name}.log") for name in ("stdout", "stderr")]
        stdout, stderr = (regular_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for path in paths)
        self._files = [(regular_file(path), RankLines()) for path in paths]
        return stdout, stderr

    def copy_files(self, last: bool) -> None:
        """Copy new output of the rank to the log of its node and to the console. last: the rank has ended."""
        if not self._files:
            return
        from distributed.launch.output_lines import with_prefix

        self.ended = last
        prefix = f"[{self.files.name}:{self._rank}] ".encode()
        for stream, (file, lines) in enumerate(self._files, start=1):
            output = os.read(file, node_environment.BLOCK)
            while following := os.read(file, node_environment.BLOCK):
                self.log_and_show(with_prefix(prefix, lines.feed(output)), stream)
                output = following
            self.log_and_show(with_prefix(prefix, lines.feed(output, last=last)), stream)

    def show(self, lines: bytes, stream: int) -> None:
        """Send the launcher the lines of rank 0, and lines that belong to no rank."""
        from distributed.launch.output_lines import rank_of, without_marks

        mark = ERROR if stream == 2 else b""
        shown = [mark + line + b"\n" for line in without_marks(lines).split(b"\n")[:-1] if not rank_of(line)]
        self.streams[0].put(b"".join(shown))

    def show_message(self, line: bytes) -> None:
        self.streams[0].put(line)


class Task(supervisor.Supervisor):
    """The supervisor of one task."""

    output: TaskOutput

    def __init__(self, run: str, grace: float, env: Mapping[str, str], is_rank: bool) -> None:
        self.files: TaskFiles = TaskFiles(run, env)
        self.rank = int(env["SLURM_PROCID"]) if is_rank else None
        self.local_rank = int(env["SLURM_LOCALID"])
        self._facts = {
            "node": self.files.name,
            "step": f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}",  # step id for scancel
            "tasks": len(env["SLURM_GTIDS"].split(",")),  # on this node
        }
        self._record = os.path.join(run, "errors", f"rank_{self.rank}.json")
        self._failure: Mapping[str, Any] = {}  # what the rank recorded before it exited
        self._received_signals: dict[int, float] = {}  # signal from SLURM -> self.clock.now() of arrival
        self._passed_on: dict[int, float] = {}  # signal from the launcher -> when to send it
        self._missed: set[int] = set()  # signals that arrived before the command had a handler
        self._repeat_at = 0.0
        # An agent also ignores the signals of PASSED_ON. It restores their default actions in its ranks.
        self.IGNORED = signals.PROTECTED if is_rank else (*signals.PROTECTED, *signals.PASSED_ON)
        self.files.begin(str(1 + int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))))
        make_directories(os.path.dirname(self.files.exit), PRIVATE_DIRECTORY)
        options = SupervisorOptions(["--dir", run, "--name", self.files.name], grace)
        options.lease, options.sample_usage = HEARTBEAT_TIMEOUT, self.local_rank == 0
        options.restarts = not is_rank and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        super().__init__(self.files, options, output=TaskOutput(self.files, options, self.rank))
        if is_rank:
            self._interval = COPY_INTERVAL
        self.ignores_fail_requests = "MUSTER_NODES" in env and self.files.name not in env["MUSTER_NODES"].split()
        os.set_blocking(1, False)

    def start(self, command: list[str], env: dict[bytes, bytes], block: bytes, source: str = "") -> None:
        super().start(command, env, block, source)
        self.output.streams[0].put(self.report())
        if self.local_rank == 0:
            import threading

            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    # ---- a rank that has failed

    def _reap(self) -> None:
        """Report a recorded failure at once: a thread, an exit handler or a destructor may keep the rank alive."""
        super()._reap()
        if self.rank is None or self._failure or self.stopping:
            return
        record = read_json(self._record)
        if record.get("pid") == self.pid and record.get("exit_code") in range(1, 256):
            self._failure = record
            self.output.streams[0].put(self.report(failed=record["exit_code"]))

    def stop(self) -> None:
        """Send SIGTERM, but not to a rank that has failed: that would interrupt its exit handlers."""
        if self._failure and not self.stopping:
            self.stopping = True
            self._kill_at = min(self._kill_at, self.clock.now() + self.options.grace)
        super().stop()

    def kill(self) -> None:
        if self._failure and self.code is None:
            self.output.print_message(
                f"rank {self.rank} (pid {self.pid}) failed and does not exit: a thread, an exit handler or a "
                "destructor holds it; killing it"
            )
        super().kill()

    # ---- reports

    def report(self, **facts: object) -> bytes:
        return format_report(**self._facts, **facts)

    def _send_heartbeats(self) -> None:
        """Send heartbeats. Runs in a thread, because a disk may block the main thread."""
        while True:
            time.sleep(HEARTBEAT_INTERVAL)
            try:
                os.write(1, self.report())
            except BlockingIOError:
                pass  # srun is slow
            except OSError:
                return  # srun has exited

    def finish(self) -> None:
        self.code = self._failure.get("exit_code", self.code)  # the recorded code, even if the rank was killed
        self.ended = self._failure.get("time", self.ended)
        super().finish()
        self._interval = supervisor.POLL_INTERVAL

    def report_end(self, **facts: object) -> None:
        end = {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "pid": self.pid,
            "time": self.ended,
            "exit_code": self.code,
            "ended_by_agent": self.stopping and not self._failure and self.code in STOP_EXIT_CODES,
        }
        self.output.streams[0].put(self.report(end=end, **facts))

    def must_wait(self) -> bool:
        """Whether to continue: a task must not exit before the launcher closes the control channel.

        The launcher closes the channel after it has received the final reports of all tasks. If a failed task exited
        earlier, srun would kill the other tasks.
        """
        in_time = self.clock.now() < self._kill_at + node_processes.UNKILLABLE_TIMEOUT
        return self._attached or (super().must_wait() and in_time)

    def _launcher_lost(self, message: str) -> None:
        self._attached = False
        super()._launcher_lost(message)
        self.stop()

    def _drop_console(self) -> None:
        """Do nothing: the console stream also carries the reports, and srun.py reads it to the end."""

    # ---- signals

    def _ranks(self, live: list[int]) -> list[int]:
        return super()._ranks(live) if self.rank is None else [self.pid]

    def handle_signal(self, number: int) -> None:
        """Handle a signal that SLURM has sent to this process and to all other processes of the task.

        A process with a handler has already received the signal. If there is none, a signal of ANNOUNCEMENTS is
        repeated later, and a signal of STOPPING stops the command.
        """
        if self.rank in (0, None) and number not in (signal.SIGTERM, signal.SIGINT):
            node_files.write_signal(self.files, number, "from SLURM (--signal or scancel)")
        self._received_signals[number] = self.clock.now()
        self._passed_on.pop(number, None)
        if number in signals.PROTECTED and not self._waits and not self.processes_with_handler(number):
            if number in signals.ANNOUNCEMENTS:
                self._missed.add(number)
            elif process_scan.start_time(self.pid):  # the command still runs: no handler has ended it
                self.stop_after_signal(number)

    def pass_on(self, number: int) -> None:
        """Pass a signal on after some time, unless SLURM sends the same signal."""
        now = self.clock.now()
        if now > self._received_signals.get(number, -math.inf) + DUPLICATE_TIME:
            self._passed_on[number] = now + DUPLICATE_TIME / 2

    def _repeat_signals(self) -> None:
        """Repeat a missed signal as soon as the command has a handler. A rank has none while it imports PyTorch."""
        for number in list(self._missed):
            if pids := self.processes_with_handler(number):
                self._missed.remove(number)
                node_processes.send_signal(number, pids)

    def _check_clock(self) -> None:
        super()._check_clock()
        if self.output.can_read(1, self._console_may_block):
            self.output.copy_files(last=self._no_process_left)
        now = self.clock.now()
        for number in [number for number, due in self._passed_on.items() if now >= due]:
            del self._passed_on[number]
            super().pass_on(number)
        if self._missed and now >= self._repeat_at:
            self._repeat_at = now + REPEAT_INTERVAL
            self._repeat_signals()


def agent_options(run: str, counts: Sequence[int], env: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for this node. counts: ranks on each node."""
    number, name = int(env["SLURM_NODEID"]), env["SLURMD_NODENAME"]
    members = env["MUSTER_NODES"].split() if "MUSTER_NODES" in env else counts  # MUSTER_NODES lists no spare nodes
    node_rank = members.index(name) if name in members else number
    return [
        *("--rdzv-id", os.path.basename(run), "--nnodes", str(len(members)), "--node-rank", str(node_rank)),
        *("--nproc-per-node", str(counts[number])),
        *("--master-addr", env["MASTER_ADDR"], "--master-port", env["MASTER_PORT"]),
        *("--log-dir", os.path.join(run, "ranks", env["SLURMD_NODENAME"])),
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the task. Returns the exit code of its command, or UNFIT if the command was not started."""
    kind, run, grace, *arguments = arguments
    env = os.environ
    with open("/proc/self/environ", "rb") as file:  # os.environ has changes by Python
        block = file.read()
    try:
        node_files.refuse_foreign(TaskFiles(run, env))
        task = Task(run, float(grace), env, is_rank=kind == "rank")
        environment = node_environment.environment(block, task.files)
        environment |= collectives.variables(run, task.files.name, environment)
        if kind == "rank":
            command = [sys.executable, os.path.join(KIT, "scripts", "lib", "rank.py"), task.files.output, *arguments]
        else:
            end = arguments.index("--")
            counts = [int(count) for count in arguments[0].split(",")]
            command = [*arguments[1:end], *agent_options(run, counts, env), *arguments[end + 1 :]]
            del environment[b"MASTER_ADDR"], environment[b"MASTER_PORT"]
        task.start(command, environment, b"")
    except (OSError, node_files.SupervisorError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error.args[1]
        os.write(2, os.fsencode(f"slurm.task: {env['SLURMD_NODENAME']}: {kind} not started: {reason}\n"))
        return UNFIT
    return task.watch()
