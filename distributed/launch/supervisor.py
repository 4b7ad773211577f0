"""Run one command on this node and leave no process behind.

usage: module.py launch.supervisor run --dir DIR --name NAME [option...] -- COMMAND [ARGUMENT...]
       module.py launch.supervisor stop|kill|fail|end|attempt JSON|signal N --dir DIR --name NAME
       module.py launch.supervisor sweep --dir DIR --name NAME [--grace SECONDS]
       module.py launch.supervisor status --dir DIR --name NAME

run starts COMMAND in a new session and waits until it exits:

  --dir DIR          run directory, created if it does not exist. Files: node_NAME.log (all output), node_NAME.pid
                     (process ids, JSON), node_NAME.exit (exit code, written last), errors/supervisor_NAME.json (why
                     the supervisor stopped COMMAND, or was killed)
  --attempt N        write these files, except node_NAME.pid, to DIR/attempts/N; see distributed/attempts.py
  --name NAME        name of this node
  --source FILE      shell script to source before COMMAND starts
  --environment FROM two blocks of variables for COMMAND, set before and after --source: NAME=VALUE entries, each
                     terminated by a NUL byte, then an empty entry. FROM is - for standard input, or a file, which is
                     removed after reading
  --grace SECONDS    time between SIGTERM and SIGKILL (default: 8)
  --lease SECONDS    stop COMMAND after this time without input from the launcher (default: only at the end of input).
                     0: return when COMMAND has started; it continues without a launcher, see launch/follow.py
  --terminals LIST   numbers of the streams on which a progress bar stays on one line: 1 (standard output), 2 (standard
                     error), or 12 (both streams, if they are the same terminal)
  --console-rank R   the ranks whose lines are shown, see launch/shown_ranks.py (default: 0)
  --timeout SECONDS  stop COMMAND after this time (default: never)
  --report           when no process remains, report the exit code on standard output; see launch/node_reports.py
  --restarts         COMMAND may be an agent that waits for the next attempt; see launch/node_reports.py
  --sample-usage     record the resource usage of each rank in node_NAME.samples.jsonl; see launch/usage_sampler.py

With --lease 0, the supervisor has no control channel and no console. It touches node_NAME.heartbeat every 3 seconds,
and writes the times and peak memory of COMMAND to node_NAME.usage (JSON).

Otherwise, standard input is the control channel. `stop` sends SIGTERM, and SIGKILL after the grace time. `kill` sends
SIGKILL. `signal N` passes signal N on. With --report, `report` asks for a report. An empty line is a heartbeat. At end
of file, the launcher is lost, and COMMAND is stopped. SIGTERM, SIGINT, SIGHUP or SIGQUIT stops COMMAND; a second one
kills it. Other signals are passed on to the ranks with a handler or, if COMMAND starts no ranks, to its processes with
a handler. If no process has a handler, COMMAND is stopped. The verbs stop, kill, fail, end and attempt write their
request to the file node_NAME.stop; signal sends a signal. Lines of shown ranks are copied to the stream to which
COMMAND wrote them. Lines without the prefix of a rank are copied to standard error. Lines of other ranks are dropped.
Errors of a closed or full console are ignored. The exit code is that of COMMAND, 128+n for signal n.

With --restarts, `fail` stops the attempt, after which COMMAND may wait for the next one. When COMMAND has reported the
end of an attempt, and no other process remains, the supervisor writes and reports the exit code. Then `attempt JSON`
starts the next attempt with new files, or `end` lets COMMAND exit.

A second process, the guard, kills COMMAND if the supervisor is killed. When run exits, no process started by COMMAND
remains, in any session. sweep stops COMMAND, ends processes that remain because supervisor and guard were killed, and
waits until all have exited; without --grace it sends only SIGKILL. status prints JSON: the value of "state" is
"absent", "running", "ended" (with "exit_code") or "killed".

Standard library only. The supervisor starts before every command, so it imports few modules, some only on use.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from functools import partial

from distributed.exit_codes import UNFIT, WRONG_CALL
from distributed.files import KIT, write_file, write_json
from distributed.host import collectives, process_scan, signals
from distributed.host.clock import RunningClock
from distributed.launch import usage_sampler
from distributed.launch.command_output import CommandOutput
from distributed.launch.console_stream import CHUNK
from distributed.launch.node_environment import BLOCK, Environment, environment, read_environment
from distributed.launch.node_files import (
    Files,
    SupervisorError,
    boot_id,
    refuse_foreign,
    reserve,
    write_code,
    write_record,
    write_signal,
)
from distributed.launch.node_processes import (
    HANDLED_SIGNALS,
    STOP_SIGNALS,
    UNKILLABLE_TIMEOUT,
    Guard,
    children,
    default_signals,
    exec_command,
    fork,
    isolate,
    kill_all,
    send_signal,
)
from distributed.launch.node_reports import ATTEMPT_PIPES, HEARTBEAT_INTERVAL, REPORT_TOKEN, format_report
from distributed.launch.node_requests import START_TIMEOUT, request, signal_supervisor, status, sweep
from distributed.launch.supervisor_options import SupervisorOptions
from distributed.trust import PRIVATE_DIRECTORY, make_directories, parse_json, read_bytes, regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


POLL_INTERVAL = 0.5  # seconds between checks of the request file
SCAN_INTERVAL = 0.1  # maximum seconds between scans for leftover processes; the exit of a child starts a scan at once
FAIL_GRACE = 3.0  # seconds for ranks to exit when another node has failed
AGENT_GRACE = 8.0  # seconds for an agent, whose ranks were killed, to end its attempt
LEFTOVER_GRACE = 1.0  # seconds between SIGTERM and SIGKILL for leftover processes
WRAPPER = os.path.join(KIT, "scripts", "lib", "in_node_env.sh")


# ---------------------------------------------------------------- the supervisor


class Supervisor:
    """Runs one command until none of its processes remains."""

    IGNORED: Sequence[int] = ()  # signals that the command ignores until it sets a handler

    def __init__(
        self, files: Files, options: SupervisorOptions, received: bytes = b"", output: CommandOutput | None = None
    ) -> None:
        """received: bytes of the control channel that were read after the environment block."""
        self.files, self.options = files, options
        self.output = output or CommandOutput(files, options)
        self._attached = options.lease > 0  # the control channel is open
        self.code: int | None = None  # exit code of the command, or of its last attempt
        self._waits = False  # the command has ended an attempt, and waits for the next one
        self._from_command = self._to_command = -1  # pipes, see node_reports.ATTEMPT_PIPES
        self._from_command_partial = b""
        self._token: dict[str, str] = {}  # part of each report, see NodeState.token
        self._attempt_ended = False  # the exit code of the attempt was written and reported
        self._lost = ""  # node that the command reports as lost
        self._terminated = False  # SIGTERM was sent to the command
        self._ranks_killed = False  # the ranks were killed; the command may wait for the next attempt
        self.ignores_fail_requests = False  # true until the agent of a spare node runs its first attempt
        self.ended = 0.0  # Unix seconds at which the command exited
        self._sampler = 0  # process id; 0: none
        self.stopping = False
        self._received = received
        self._kill_at = self._stop_at = float("inf")
        self._no_process_left = False
        self._leftovers_signalled = False
        self.clock = RunningClock()
        self._received_at = self.clock.now()
        self._poll_at = self._heartbeat_at = self._scan_at = 0.0
        self._interval = POLL_INTERVAL  # maximum seconds between checks of the clock
        self._signals = self._catch_signals()
        self._adopts = process_scan.adopt_orphans()
        self._guard = Guard(files)

    # ---- start

    def start(self, command: list[str], env: Environment, block: bytes, source: str = "") -> None:
        """Start the command. source: shell script to source first. block: environment that overrides the script's."""
        if source:
            command = [WRAPPER, "--exec", source, *command]
        self._source, self._block = source, _memory_file(block + b"\0") if source else os.open(os.devnull, os.O_RDONLY)
        outputs, pipes, parent = self.output.open(env), self._open_attempt_pipes(env), os.getpid()
        if token := env.pop(REPORT_TOKEN.encode(), b""):
            self._token = {"token": token.decode()}
        self._stop_at = self.clock.now() + self.options.timeout
        self._started = time.time()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.setsid()
                process_scan.die_with_parent(parent)
                default_signals(self.IGNORED)
                for number, file in enumerate((self._block, *outputs)):
                    os.dup2(file, number)
                for file in pipes:
                    os.set_inheritable(file, True)
                exec_command(command, env)
            finally:
                os._exit(126)
        for file in {*outputs, *pipes}:
            os.close(file)
        self._report()
        self._start_helpers()

    def _open_attempt_pipes(self, env: Environment) -> list[int]:
        """Open pipes to a command that may be an agent. Adds the command's ends to `env`, and returns them."""
        uses = ["restarts"] * self.options.restarts + ["signals"] * self.options.report
        if not uses:
            return []
        self._from_command, requests = os.pipe()
        replies, self._to_command = os.pipe()
        pipes = [requests, replies]
        names = [f"{file}:{os.fstat(file).st_ino}" for file in pipes]
        env[ATTEMPT_PIPES.encode()] = " ".join(names + uses).encode()
        return pipes

    def _start_helpers(self) -> None:
        if self.options.sample_usage:
            self._sampler = self._start_sampler(os.getpid())
        self._record_processes()

    def _start_sampler(self, parent: int) -> int:
        pid = fork()
        if pid == 0:
            try:
                os.setsid()
                isolate()
                process_scan.die_with_parent(parent)
                os.nice(10)
                usage_sampler.record(self.files.directory, self.files.name, self.files.samples)
            finally:
                os._exit(0)
        return pid

    def _catch_signals(self) -> int:
        """Returns a file descriptor from which signal numbers can be read."""
        source, _ = signals.catch({*HANDLED_SIGNALS, signal.SIGCHLD})
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the parent may have blocked them
        return source

    def _record_processes(self) -> None:
        """Send the process ids to the guard and write them to node_NAME.pid."""
        self._guard.send(f"sessions {self.pid} {self._sampler or ''}")
        processes = {"supervisor": os.getpid(), "guard": self._guard.pid, "command": self.pid}
        facts = {name: process_scan.identity(pid) for name, pid in processes.items()}
        try:
            write_json(self.files.pids, {"boot_id": boot_id(), **facts})
        except OSError as error:
            self.output.print_message(f"cannot write {self.files.pids}: {error.strerror}")

    # ---- watch

    def watch(self) -> int:
        """Watch until the command and all leftover processes have exited. Returns the exit code of the command."""
        self._handle_requests()
        while not (self._no_process_left and self.output.ended):
            self._wait()
            self._check_clock()
            if self._waits and self._no_process_left and not self._attempt_ended:
                self._end_attempt()
        self.finish()
        while self.must_wait():
            self._wait()
            self._check_clock()
        assert self.code is not None
        return self.code

    def must_wait(self) -> bool:
        """Whether watch() has to continue although no process remains."""
        return any(stream.pending for stream in self.output.streams)

    def _wait(self) -> None:
        """Wait for the next event or deadline and handle it."""
        actions: dict[int, Callable[[], None]] = {self._signals: self._read_signals}
        if self._attached:
            actions[0] = self._read_control
        if self._from_command >= 0:
            actions[self._from_command] = self._read_command
        actions |= {pipe: partial(self.output.read, pipe) for pipe in self.output.readable(self._console_may_block)}
        poll = select.poll()
        for file in actions:
            poll.register(file, select.POLLIN)
        for stream in self.output.streams:
            if stream.pending:
                actions[stream.number] = stream.flush
                poll.register(stream.number, select.POLLOUT)
        if self._no_process_left:
            due = float("inf")
        elif self.code is None and self.clock.now() < self._kill_at:
            due = self._kill_at
        else:
            due = self._scan_at
        for file, _ in poll.poll(1000 * max(0.0, min(self._interval, due - self.clock.now()))):
            actions[file]()

    @property
    def _console_may_block(self) -> bool:
        """Whether a slow console makes the command wait: not while the command is stopping, or when it has exited."""
        return not self.stopping and self.code is None

    def _read_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self.handle_signal(number)

    def handle_signal(self, number: int) -> None:
        """Handle one of SIGNALS."""
        self._handle_signal_to("supervisor", number)

    def _handle_signal_to(self, receiver: str, number: int) -> None:
        sender = f"to the {receiver} on {self.files.name}"
        if number in signals.PASSED_ON:
            write_signal(self.files, number, sender)
            self.pass_on(number)
            return
        if self.stopping:
            self.kill()
        else:
            self.stop_after_signal(number)
        write_signal(self.files, number, sender)  # last: a disk may block

    def stop_after_signal(self, number: int) -> None:
        """Report the signal before any rank is stopped: failures of other nodes are its consequences."""
        if self.options.report and self.output.streams:
            self.output.streams[0].put(self.report(signal=number))
        elif self.options.report:  # with --lease 0, a follower reads it
            with contextlib.suppress(OSError):
                write_file(self.files.heartbeat, f"{number}\n".encode())
        self.stop()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            self._scan_at = 0.0  # the process that exited may have been the last one
            self._poll_at = 0.0  # request() sends SIGCHLD when it has written its file
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    if self.code is None:
                        self._record_end(_exit_code(ended[1]) or self._start_failure())
                    self._end_command()
                elif ended[0] == self._sampler:
                    self._sampler = 0
                elif ended[0] == self._guard.pid:
                    self._guard.close()
                    self._guard = Guard(self.files)
                    self._record_processes()

    def _record_end(self, code: int) -> None:
        """Keep the exit code and the end time of the command, or of its attempt, and stop the sampler."""
        self.code, self.ended = code, time.time()
        if self._sampler:
            usage_sampler.stop(self._sampler)

    def _start_failure(self) -> int:
        """UNFIT if the sourced script exited or replaced the wrapper's shell, so that no command started; else 0."""
        # The wrapper sources the script, then reads the block, which moves the file offset that both processes share.
        if os.lseek(self._block, 0, os.SEEK_CUR) == os.fstat(self._block).st_size:
            return 0
        message = "exited with code 0, so nothing was started; it is sourced and must neither exit nor exec a command"
        self.output.print_line(f"{self.files.name}: {self._source}: {message}")
        return UNFIT

    # ---- requests

    def _read_control(self) -> None:
        received = os.read(0, BLOCK)
        self._received_at = self.clock.now()
        self._received += received
        self._handle_requests()
        if not received:
            self._attached = False
            self._launcher_lost("control channel closed: the launcher was killed or its connection lost")

    def _handle_requests(self) -> None:
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            if not (self._waits and line == b"kill"):  # `kill` is for nodes whose attempt has not ended
                self._handle_request(line)

    def _handle_request(self, request: bytes) -> None:
        if request == b"stop":
            self.stop()
        elif request == b"kill":
            self.kill()
        elif request == b"report":
            self._report()
        elif request == b"fail":
            self._stop_attempt()
        elif request == b"end":
            self._end_command()
        elif request.startswith(b"attempt ") and self._waits:
            self._start_attempt(request.partition(b" ")[2])
        elif request.startswith(b"signal "):
            self.pass_on(int(request.split()[1]))

    def _launcher_lost(self, message: str) -> None:
        self._drop_console()
        self._end_command()
        if self.code is None and not self.stopping:
            write_record(self.files, "launcher lost", message)
            self.output.print_message(f"{message}; stopping")
            self.stop()

    def stop(self) -> None:
        """Send SIGTERM; after the grace time, in which the command can write a checkpoint, SIGKILL."""
        self._end_command()  # first: the agent may ignore SIGTERM while it waits
        if not self.stopping:
            self.stopping = True
            self._terminate(self.options.grace)

    def _terminate(self, grace: float) -> None:
        self._kill_at = min(self._kill_at, self.clock.now() + grace)
        if self.code is None and not self._terminated:
            self._terminated = True
            if self._to_command >= 0:
                with contextlib.suppress(OSError):  # an agent then knows who sends the signal
                    os.write(self._to_command, b"\n")
            send_signal(signal.SIGTERM, [self.pid])

    # ---- attempts

    def _stop_attempt(self) -> None:
        """Like stop(), but ranks are killed before the command, which may wait for the next attempt."""
        if self.code is None and not self.stopping and not self.ignores_fail_requests:
            self._terminate(min(self.options.grace, FAIL_GRACE))

    def _read_command(self) -> None:
        """Read the agent's messages that its attempt has ended, or that it has received a signal."""
        if not (received := os.read(self._from_command, CHUNK)):
            os.close(self._from_command)
            self._from_command = -1
        *lines, self._from_command_partial = (self._from_command_partial + received).split(b"\n")
        for line in lines:
            code, _, rest = line.decode(errors="replace").partition(" ")
            if self.code is not None or self._to_command < 0:
                return
            if code == "signal" and rest in map(str, map(int, STOP_SIGNALS)):
                self._handle_signal_to("agent", int(rest))
            if not self.options.restarts or (code and not (code.isdecimal() and len(code) <= 3)):
                continue
            self._lost = rest
            self._waits = True
            self._kill_at, self._scan_at = float("inf"), 0.0
            self._record_end(int(code or 0))
            if not code:  # the agent of a spare node
                self._no_process_left = self._attempt_ended = True
                self.report_end(waiting=True)

    def _end_attempt(self) -> None:
        """Report the exit code of the attempt: its processes have ended, and the command waits."""
        self.output.end_attempt()
        self._attempt_ended = True
        self._write_code()
        self.report_end(waiting=True, **({"lost": self._lost} if self._lost else {}))

    def _start_attempt(self, facts: bytes) -> None:
        """Start the next attempt. facts: JSON, for the command."""
        request = parse_json(facts)
        with contextlib.suppress(OSError):  # a full disk: the output reports it
            self.files.begin(request["attempt"])
            make_directories(os.path.dirname(self.files.exit), PRIVATE_DIRECTORY)
        self.output.begin_attempt()
        guard, self._guard = self._guard, Guard(self.files)
        guard.stop()
        self.options.console_rank = request.get("console_rank", "0")
        self.code, self._kill_at = None, float("inf")
        self._waits = self._attempt_ended = self._no_process_left = False
        self._leftovers_signalled = self._terminated = self._ranks_killed = self.ignores_fail_requests = False
        self._start_helpers()
        with contextlib.suppress(OSError):  # the command was killed
            os.write(self._to_command, facts + b"\n")

    def _end_command(self) -> None:
        """Let the command exit when its attempt has ended; at once if it waits for the next attempt."""
        if self._to_command >= 0:
            os.close(self._to_command)
            self._to_command = -1
        if self._waits:
            self._waits, self._no_process_left, self._scan_at = False, False, 0.0

    def pass_on(self, number: int) -> None:
        """Send a signal once to the ranks that have a handler for it. Without any, stop the command."""
        if self.stopping or self._waits or not process_scan.start_time(self.pid):
            return
        if pids := self.processes_with_handler(number):
            send_signal(number, pids)
        else:
            message = f"{signals.name(number)}: no process has a handler for it; stopping"
            self.output.write_log(f"supervisor: {message}\n".encode())
            self.stop_after_signal(number)

    def processes_with_handler(self, number: int) -> list[int]:
        """The ranks that have a handler for a signal; without ranks, the topmost processes that have one.

        A process below them is left out: it may have inherited its handler, as a worker of a DataLoader does, or have
        one for its own use, as any program written in Go does.
        """
        helpers = [self._guard.pid, self._sampler]
        live = process_scan.live_processes(self.files.environment, [self.pid], exclude=helpers)
        candidates = self._ranks(live) or live
        return process_scan.topmost([pid for pid in candidates if process_scan.handles(pid, number)])

    def _ranks(self, live: list[int]) -> list[int]:
        return process_scan.ranks(live, self.pid)

    def kill(self) -> None:
        """Send SIGKILL and do not wait for a blocked console."""
        self._end_command()
        self.stopping = True
        self._kill_at = min(self._kill_at, self.clock.now())
        self._scan_at = 0.0
        self._drop_console()

    def _drop_console(self) -> None:
        if self.code is not None:
            for stream in self.output.streams:
                stream.close()

    def _check_clock(self) -> None:
        now = self.clock.now()
        if now >= self._poll_at:
            self._poll_at = now + POLL_INTERVAL
            self._handle_request(_requested(self.files))
        limit = self.options.lease
        if self._attached and now - self._received_at > limit and not select.select([0], [], [], 0)[0]:
            self._received_at = float("inf")
            self._launcher_lost(f"no heartbeat from the launcher for {limit:g} s")
        if now >= self._stop_at and self.code is None and not self.stopping:
            message = f"the command has run for {self.options.timeout:g} s (--timeout)"
            write_record(self.files, "timeout", message)
            self.output.print_message(f"{message}; stopping")
            self.stop()
        self.output.read_metrics()
        if not self.options.lease and now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_INTERVAL
            _touch(self.files.heartbeat)
        if not self._no_process_left and (self.code is not None or now >= self._kill_at) and now >= self._scan_at:
            self._end_leftovers(now)

    # ---- end

    def _end_leftovers(self, now: float) -> None:
        """Send SIGTERM, then SIGKILL, to leftover processes. After the grace time of the command, send only SIGKILL."""
        self._scan_at = now + SCAN_INTERVAL
        leftovers = self._find_leftovers()
        if now >= self._kill_at:
            may_wait = self.options.restarts and self._to_command >= 0
            if self.code is None and not self.stopping and not self._ranks_killed and may_wait:
                self._ranks_killed, self._kill_at = True, now + AGENT_GRACE
                leftovers = self._outside_session(leftovers)
            elif self.code is None and self.options.lease and not os.path.exists(self.files.record):
                write_record(self.files, "unresponsive", "its agent did not react to a stop request, and was killed")
            send_signal(signal.SIGKILL, leftovers)
            if self.code is not None and now >= self._kill_at + UNKILLABLE_TIMEOUT:
                self._end_command()
                pids = " ".join(map(str, leftovers))
                self.output.print_message(f"processes {pids} survive SIGKILL (blocked in the kernel)")
                self._no_process_left = self.output.ended = True
        elif leftovers and not self._leftovers_signalled:
            self._leftovers_signalled = True
            send_signal(signal.SIGTERM, leftovers)
            if not self.stopping:
                self._kill_at = now + LEFTOVER_GRACE
        if self.code is not None and not leftovers:
            self._no_process_left = True

    def _find_leftovers(self) -> list[int]:
        helpers = [self._guard.pid, self._sampler]
        if self._waits:
            return self._find_leftovers_of_attempt([*helpers, self.pid])
        if self._adopts and self.code is not None:  # all leftovers are now descendants of this subreaper
            found = children()
            if found is not None and set(found) <= set(helpers):
                return []  # found without a scan of /proc
        return process_scan.live_processes(self.files.environment, [self.pid], os.getpid(), helpers)

    def _find_leftovers_of_attempt(self, staying: list[int]) -> list[int]:
        """Processes of the ended attempt that still run. All are outside the session of the command."""
        found = children() if self._adopts else None
        if found is not None and set(found) <= set(staying):
            return []
        return self._outside_session(
            process_scan.live_processes(self.files.environment, root=os.getpid(), exclude=staying)
        )

    def _outside_session(self, pids: list[int]) -> list[int]:
        """Return the processes that are not in the session of the command. Each rank has a session of its own."""
        processes = process_scan.table()
        return [pid for pid in pids if pid in processes and processes[pid].session != self.pid]

    def finish(self) -> None:
        """Write the remaining files, the exit code last, and stop the helper processes."""
        self.output.read_metrics(last=True)
        with contextlib.suppress(OSError):
            os.unlink(self.files.reserved_record)  # on a full disk, this frees space for the next file
        if not self.options.lease:
            self._write_usage()
        if not self._attempt_ended:
            self._write_code()
        self._guard.stop()
        if self._sampler:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._sampler, 0)
        self.report_end()
        self.output.close()

    def report_end(self, **facts: object) -> None:
        """Report the exit code of the command, or of its attempt."""
        if self.options.report and self.output.streams:
            unlogged = {"unlogged": self.output.unlogged.decode(errors="replace")} if self.output.unlogged else {}
            self.output.streams[0].put(self.report(exit_code=self.code, **unlogged, **facts))

    def _report(self) -> None:
        """Report that this supervisor is running."""
        if self.options.report and self.output.streams:
            self.output.streams[0].put(self.report())

    def report(self, **facts: object) -> bytes:
        """A report of this node, as bytes for the launcher."""
        return format_report(node=self.files.name, **self._token, **facts)

    def _write_code(self) -> None:
        try:
            assert self.code is not None
            write_code(self.files, self.code)
        except OSError as error:
            self.output.print_message(f"cannot write {self.files.exit}: {error.strerror}")

    def _write_usage(self) -> None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # bytes, of the largest process
        with contextlib.suppress(OSError):
            write_json(self.files.usage, {"started": self._started, "ended": self.ended, "peak_memory": peak})


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _memory_file(block: bytes) -> int:
    """An anonymous file that only this process and its children can read."""
    file = os.memfd_create("environment")
    os.write(file, block)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _requested(files: Files) -> bytes:
    try:
        return read_bytes(files.request, own=True).strip()  # another user may have replaced the run directory
    except OSError:
        return b""


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        file = regular_file(path, os.O_WRONLY | os.O_CREAT)
        os.utime(file)
        os.close(file)


# ---------------------------------------------------------------- commands


def run(options: SupervisorOptions) -> int:
    """Run the command. Returns its exit code; with --lease 0, returns 0 once it has started. Raises SupervisorError."""
    try:
        make_directories(options.files.directory, PRIVATE_DIRECTORY)
        refuse_foreign(options.files)
        inherited, block, received = read_environment(options.environment)
        if options.lease:
            return supervise(options, inherited, block, received)
        reason = supervise_detached(options, inherited, block)
    except OSError as error:
        reason = f"{error.filename or options.files.directory}: {error.strerror}"
    if reason:
        raise SupervisorError(UNFIT, f"the command was not started: {reason}")
    return 0


def supervise(
    options: SupervisorOptions,
    inherited: bytes,
    block: bytes,
    received: bytes = b"",
    started: Callable[[], None] = lambda: None,
    create: Callable[[Files, SupervisorOptions, bytes], Supervisor] = Supervisor,
) -> int:
    """Run the command until it exits; call started() when it has started. Returns the exit code. Raises OSError.

    inherited: environment block that the sourced script may change. block: environment block that overrides it.
    create: makes the supervisor.
    """
    files = options.files
    if options.attempt:
        files.begin(options.attempt)
    make_directories(os.path.dirname(files.record), PRIVATE_DIRECTORY)
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()
    if not options.lease:
        reserve(files)
    if options.restarts:  # on a node that was given up or disconnected, the last attempt may still run
        kill_all(lambda: process_scan.live_processes(files.environment))
    supervisor = create(files, options, received)
    source = os.path.abspath(options.source) if options.source else ""
    env = environment(inherited + block, files)
    if options.sample_usage:  # not for a job of a list
        env |= collectives.variables(files.directory, files.name, env)
    supervisor.start(options.command, env, block, source)
    started()
    return supervisor.watch()


def supervise_detached(
    options: SupervisorOptions, inherited: bytes, block: bytes, prepare: Callable[[], None] = lambda: None
) -> str:
    """Call supervise() in a child detached from terminal and connection. Returns why the command was not started.

    Returns an empty text when it has started, or after START_TIMEOUT. prepare: called first in the child.
    """
    source, target = os.pipe()
    if os.fork():
        os.close(target)
        poll = select.poll()
        poll.register(source, select.POLLIN)
        reason = os.read(source, CHUNK) if poll.poll(1000 * START_TIMEOUT) else b""
        os.close(source)
        return os.fsdecode(reason)
    try:
        os.close(source)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        prepare()
        os._exit(supervise(options, inherited, block, started=lambda: os.close(target)))
    except OSError as error:
        os.write(target, os.fsencode(f"{error.filename or options.dir}: {error.strerror}"))
    finally:
        os._exit(UNFIT)


# ---------------------------------------------------------------- command line

VERBS = ("run", "stop", "kill", "fail", "end", "attempt", "signal", "sweep", "status")


def open_standard_files() -> None:
    """Open /dev/null in place of closed standard files: other files would get their numbers."""
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(file)


def main(arguments: Sequence[str]) -> int:
    return report_errors(_main, arguments)


def report_errors(program: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    open_standard_files()
    try:
        return program(arguments)
    except SupervisorError as error:
        code, message = error.args
        text = f"supervisor: {message}\n" + "Try: module.py launch.supervisor --help\n" * (code == WRONG_CALL)
        with contextlib.suppress(OSError):
            os.write(2, os.fsencode(text))
        return int(code)


def _main(arguments: Sequence[str]) -> int:
    if "--help" in arguments[:1]:
        os.write(1, (__doc__ or "").encode())
        return 0
    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        raise SupervisorError(WRONG_CALL, f"expected {', '.join(VERBS[:-1])} or {VERBS[-1]}, got '{verb}'")
    has_value = verb in ("signal", "attempt")
    value = "".join(arguments[1:2] if has_value else ())
    if verb == "signal" and not value.isdecimal():
        raise SupervisorError(WRONG_CALL, "signal: expected a number")
    options = SupervisorOptions(arguments[1 + has_value :], grace=0.0 if verb == "sweep" else 8.0)
    if verb == "run":
        if not options.command:
            raise SupervisorError(WRONG_CALL, "expected a command after --")
        return run(options)
    refuse_foreign(options.files)
    if verb == "signal":
        return signal_supervisor(options.files, int(value))
    if verb == "sweep":
        return sweep(options.files, options.grace)
    if verb == "status":
        import json

        os.write(1, json.dumps(status(options.files), sort_keys=True).encode() + b"\n")
        return 0
    return request(options.files, f"{verb} {value}".rstrip())
