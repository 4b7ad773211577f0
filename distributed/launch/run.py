"""Run a launch: open the run directory, run the attempts, print the verdict, exit with the code of the run.

A launcher replaces itself by this program after its checks. Standard input has lists (transport.commands.read_lists):

    inherited    NAME=VALUE of the caller's variables that the nodes get
    environment  NAME=VALUE of --env and --env-file
    call         the command line of the launcher
    options      the names of the options in it
    values       their values; empty for a flag
    rest         the other arguments
    before       the beginning of the command line of the agent or of srun; this program appends options to it
    after        the rest of this command line, which follows the appended options
    arguments    those of the user's script, for the report
    notify       the command of --notify; may be empty
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distributed import attempts
from distributed.exit_codes import INTERRUPTED, STOPPED, TERMINATED, UNFIT, WRONG_CALL
from distributed.files import command_of, read_json, write_json
from distributed.host import signals
from distributed.host.identity import machine
from distributed.host.process_scan import start_time
from distributed.launch.hang_check import schedule_hang_check
from distributed.launch.launcher_console import LauncherConsole
from distributed.launch.notify import Notifier
from distributed.launch.transport import Pdsh, Ssh
from distributed.launch.watch import Local, Watch
from distributed.launch.watched_run import STOPPING_SIGNALS, AgentCommand, Options
from distributed.runs import run_directory
from distributed.runs.call import Call, typed
from distributed.runs.lookup import RunNode, read
from distributed.transport.commands import (
    LIB,
    Calls,
    LocalCommands,
    SshCommands,
    TransportError,
    environment_block,
    exit_on_signals,
    in_node_env,
    message_of,
    quote,
    read_lists,
)
from distributed.transport.loop import FOR_SMOKE_TEST
from distributed.trust import PRIVATE_DIRECTORY, foreign, foreign_ancestor, make_directories

if TYPE_CHECKING:
    from distributed.host.replies import Reply
    from distributed.launch.node_logs import NodeLogs
    from distributed.transport.loop import Client, Command

MAX_STALLED = 3  # consecutive restarts without progress before giving up
PROGRESS_SECONDS = 300.0  # an attempt that logs no steps has made progress when it ran this long
REPORT_TIMEOUT, REPORT_INTERVAL = 30, 10.0  # seconds
SPACE_INTERVAL = 1.0  # seconds between attempts to write to a full disk
CONSOLE_LOG = "console.log"  # output of a launcher in the background


class ReportEnded(BaseException):
    """The report is not written. No Exception: the report ignores some of these while it reads files."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("transport", choices=["local", "ssh", "pdsh", "srun"])
    add("--program", required=True, help="name of the launcher in messages")
    add("--node", required=True, nargs=3, action="append", metavar=("NAME", "PROCESSES", "ADDRESS"), dest="nodes")
    add("--spare", nargs=3, action="append", default=[], metavar=("NAME", "PROCESSES", "ADDRESS"), dest="spares")
    add("--min-nodes", type=int, default=0, metavar="N", help="continue with fewer nodes when no spare is left")
    add("--first-rank", type=int, default=0, metavar="N", help="first rank of the first node")
    add("--log-dir", required=True, metavar="DIR", help="the directory of all runs, relative to --cwd")
    add("--cwd", required=True, metavar="DIR", help="working directory of the ranks")
    add("--name", required=True, help="name of the script; date, time and a number are appended")
    add("--script", required=True)
    add("--config", default=None, help="default: none")
    add("--python", required=True, metavar="PATH", help="interpreter of the nodes")
    add("--node-env", required=True, metavar="FILE")
    add("--master", nargs=2, default=("", ""), metavar=("ADDRESS", "PORT"))
    add("--preflight", action="store_true", help="probe the nodes; take address and port from replies")
    add("--file", action="append", default=[], metavar="PATH", help="a file that ranks read; the preflight compares it")
    add("--package", action="append", default=[], metavar="NAME", help="a package that ranks need")
    add("--run-id", action="store_true", help="give torchrun the name of the run")
    add("--sync", action="store_true", help="copy the working directory to the nodes, and follow their logs")
    add("--fetch", action="append", default=[], metavar="PATTERN", help="with --sync: copy new files back at the end")
    add("--grace", type=int, required=True, metavar="SECONDS")
    add("--max-restarts", type=int, default=0, metavar="N")
    add("--hang-timeout", type=float, metavar="SECONDS")
    add("--progress", default="", metavar="REGEX")
    add("--console-rank", default="auto", metavar="RANK", help="the rank whose output is shown, last or auto")
    add("--part", action="store_true", help="other launchers start the other nodes")
    add("--announce", default="", metavar="TEXT", help="print this at the start; {log} is this node's log")
    add("--existing-run", metavar="RUN", help="use the existing directory of this requeued run")
    add("--slurm-job", nargs="+", default=(), metavar="NAME", help="job number and other names")
    add("--task-per-node", action="store_true", help="with srun: one task for all ranks of a node")
    add("--max-requeues", type=int, metavar="N", help="this is a batch job, which may be requeued")
    add("--lease", type=int, metavar="SECONDS", help="lease of the nodes; 0: they continue without this launcher")
    add("--detach", action="store_true")
    add("--dry-run", action="store_true")
    add("--quiet", action="store_true")
    return parser.parse_args(arguments)


class Launch:
    """One launch, from the check of the nodes to the verdict."""

    report: Client | None = None  # the last one that has written the report of the running run

    def __init__(self, options: argparse.Namespace, lists: dict[str, list[bytes]]) -> None:
        self.options = options
        self.console = LauncherConsole(options.program, options.quiet)
        self.inherited, self.environment = tuple(lists["inherited"]), tuple(lists["environment"])
        self.call = call_of(lists).masked()
        self.before = tuple(os.fsdecode(argument) for argument in lists["before"])
        self.after = tuple(os.fsdecode(argument) for argument in lists["after"])
        self.arguments = [os.fsdecode(argument) for argument in lists["arguments"]]
        self.notify = os.fsdecode(lists["notify"][0])
        self.began = time.monotonic()
        self.names = [name for name, *_ in options.nodes]
        all_nodes = [*options.nodes, *options.spares]
        self.processes = {name: count for name, count, _ in all_nodes}
        self.targets = [RunNode(name, address, 0, 0) for name, _, address in all_nodes]  # the spares last
        self.replies: dict[str, Reply] = {}  # to the probe
        self.logs = os.path.join(options.cwd, options.log_dir)
        self.synced: dict[str, str] = {}  # see sync_nodes()
        self.code = 0
        self.seconds = 0.0  # duration of the last attempt
        self.last_step: int | None = None  # highest step that was logged or found in the output; None: no step
        self.step_is_guessed = False  # last_step was found in the output
        self.stalled = 0  # consecutive restarts without progress
        self.detached_log = ""  # see detach()

    # ---- before the nodes start

    def print_commands(self) -> None:
        """Print the command of each node, for --dry-run. Variables are printed without their values."""
        directory = f"{self.options.log_dir}/<run>"
        entries = [f"{os.fsdecode(entry).partition('=')[0]}=..." for entry in (*self.inherited, *self.environment)]
        env = ["env", *entries] if entries else []
        if self.options.transport == "srun":
            self._print_command([*env, *self.before, directory, *self.after])
            return
        address, port = self.options.master
        first = self.names[0]
        agent = self._agent(address or first, port or f"<a free port of {first}>")
        for rank, (name, processes, _) in enumerate(self.options.nodes):
            self._print_command([*env, *agent.on(directory, name, str(rank), processes)], f"{name}: ")

    def _print_command(self, command: Sequence[str], node: str = "") -> None:
        self.console.show(os.fsencode(f"{node}{quote(command)}\n"), 1)

    def connect(self) -> LocalCommands:
        """Open connections to the nodes. Raises TransportError."""
        options = self.options
        if options.transport not in ("ssh", "pdsh"):
            return LocalCommands()
        commands = SshCommands(partial(self.console.print, always=True), options.cwd if options.sync else "")
        files = (os.path.join(options.cwd, name) for name in (options.script, options.config) if name)
        commands.files = [*filter(os.path.isfile, files)]
        self.calls = Calls()
        return commands

    def check_nodes(self, commands: LocalCommands) -> tuple[str, str]:
        """Copy files to the nodes, and check them. Returns the master address and port. Raises TransportError."""
        if self.options.sync and isinstance(commands, SshCommands):
            from distributed.transport.sync import sync_nodes

            self.synced = sync_nodes(self.calls, commands, self.targets, self.console.print)
        if os.environ.get(FOR_SMOKE_TEST) and isinstance(commands, SshCommands):
            self._test_connections(commands)
        if self.options.preflight:
            self.replies = self._probe(commands)
            return self._compare()
        address, port = self.options.master
        return address, port

    def _in_node_env(self, commands: LocalCommands, node: RunNode, module: str, arguments: Sequence[str]) -> Command:
        """The local command that runs a module of the package in the environment of the ranks on a node."""
        command = in_node_env(self.options.node_env, self.options.python, module, *arguments)
        return commands.command(node, command, self.options.cwd)

    def _block(self) -> bytes:
        return environment_block(self.inherited, self.environment)

    def _test_connections(self, commands: LocalCommands) -> None:
        from distributed.launch.connectivity import test_connections

        on_node = partial(self._in_node_env, commands)
        if faults := test_connections(self.calls, on_node, self.targets, self._block(), self.console.print).faults():
            self._refuse_nodes([f"connectivity: {fault}" for fault in faults])
        count = len(self.names)
        self.console.print(f"each of {count} node{'s' * (count != 1)} can connect to every other")

    def _probe(self, commands: LocalCommands) -> dict[str, Reply]:
        """Probe all nodes, and return their replies. Replaces NPROC auto, gpu or cpu by the number of processes."""
        options = self.options
        arguments = ["--port", options.master[1] or "0", *(f"--file={path}" for path in options.file)]
        arguments += [*(f"--package={name}" for name in options.package), f"--log-dir={self.logs}"]
        arguments += [f"--owner={os.geteuid()}:{os.stat(options.cwd).st_uid}", "--", *self.names]
        calls = {node: self._in_node_env(commands, node, "host.probe", arguments) for node in self.targets}
        replies = self.calls.call_all(calls, self.console.print, sent=self._block())
        for name, kind in self.processes.items():
            if not kind.isdigit():
                from distributed.launch.preflight import count_processes

                self.processes[name] = str(count := count_processes(kind, replies[name]))
                if not count:
                    problem = f"NPROC {kind}: no GPU is visible there; give a number, cpu or auto"
                    raise TransportError(UNFIT, f"{name}: {problem}")
        return replies

    def _compare(self) -> tuple[str, str]:
        from distributed.launch import preflight

        processes = {name: int(count) for name, count in self.processes.items()}
        port = self.options.master[1]
        faults, warnings, rendezvous = preflight.judge(self.replies, processes, int(port) if port else None)
        for warning in warnings:
            self._print(f"preflight: warning: {warning}")
        if faults:
            self._refuse_nodes([f"preflight: {fault}" for fault in faults])
        address, port = rendezvous.split()
        return address, port

    def _refuse_nodes(self, faults: Sequence[str]) -> None:
        for fault in faults:
            self._print(fault)
        self.flush()
        sys.exit(UNFIT)

    def _agent(self, address: str, port: str) -> AgentCommand:
        nodes = len(self.options.nodes) if self.options.transport in ("ssh", "pdsh") else 0
        return AgentCommand(self.before, self.after, self.options.run_id or bool(nodes), nodes, address, port)

    def create_run(self) -> Path:
        """Make the run directory and the links to it. Exits with WRONG_CALL if it cannot be written."""
        options = self.options
        known = [replace(target, processes=int(self.processes[target.node])) for target in self.targets]
        nodes = number_ranks(known[: len(self.names)], options.first_rank)
        last = nodes[-1].first_rank + nodes[-1].processes - 1
        if not options.part and options.console_rank.isdigit() and int(options.console_rank) > last:
            self.console.print(f"--console-rank {options.console_rank}: the last rank is {last}", always=True)
            self.flush()
            sys.exit(WRONG_CALL)
        try:
            directory = run_directory.create(
                self.logs, options.name, nodes=nodes, spares=known[len(self.names) :],
                script=options.script, config=options.config, cwd=options.cwd,
                python=options.python, launcher=os.getpid(), grace=options.grace,
                command=self.call.words, options=self.call.options, rest=self.call.rest, arguments=self.arguments,
                slurm_job=options.slurm_job, existing=options.existing_run,
            )  # fmt: skip
        except OSError as error:
            path = error.filename or self.logs
            reason = f"{path}: {error.strerror}; choose another directory with --log-dir"
            self._print(f"run_directory: cannot create a run directory: {reason}")
            sys.exit(WRONG_CALL)
        messages = run_directory.link_to(directory, self.names, options.slurm_job)
        if problem := foreign_ancestor(directory):
            effect = "other users could replace the run directory"
            if foreign(directory, os.stat(directory)):  # on a file system without owners or modes
                effect = "status, stop and report will refuse this run"
            messages.append(f"warning: {problem}; {effect}; choose another --log-dir")
        for message in messages:
            self._print(f"run_directory: {message}")
        return Path(directory)

    def _print_differences(self, earlier: str) -> None:
        """Print what differs from the run whose call is repeated. earlier: its directory."""
        from distributed.runs.rerun import differences

        now = run_directory.software(self.options.cwd, self.options.python)
        for line in differences(read_json(f"{earlier}/run.json"), now):
            self.console.print(f"since {os.path.basename(earlier)}: {line}", always=True)

    def _print(self, line: str) -> None:
        self.console.show_lines(f"{line}\n")

    def detach(self) -> int:
        """Continue in a child process without a terminal, while this process exits.

        Returns, in the child, a file descriptor: the caller writes the path of the run directory to it.
        """
        options, (log, self.detached_log) = self.options, self._create_log()
        source, target = os.pipe()
        child = os.fork()
        if child:
            os.close(target)
            with open(source) as pipe:
                run = pipe.read()
            if not run:
                self.console.show(Path(self.detached_log).read_bytes(), 2)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os._exit(128 - code if code < 0 else code)
            name = os.path.basename(run)
            shown = name if options.log_dir == "logs" else run  # logs is where the programs look for a name
            verbs = [f"  {typed(options.program, verb, shown)}\n" for verb in ("attach", "status", "stop")]
            message = f"run {name} started in the background, process {child}: output in {run}/{CONSOLE_LOG}"
            self.console.print(f"{message}\n{''.join(verbs)}".rstrip())
            self.flush()
            os._exit(0)
        os.setsid()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        return target

    def _create_log(self) -> tuple[int, str]:
        """Create a file detached-XXXXXX.log. Returns it open for writing, and its path. Exits with WRONG_CALL."""
        import tempfile

        try:
            make_directories(self.logs, PRIVATE_DIRECTORY)
            return tempfile.mkstemp(".log", "detached-", self.logs)
        except OSError:
            problem = f"cannot be written (in {self.options.cwd}); choose another directory"
            self.console.print(f"--log-dir '{self.options.log_dir}': {problem}", always=True)
            sys.exit(WRONG_CALL)

    # ---- attempts

    def run(self) -> int:
        """Run attempts until one succeeds or no restart may help. Returns the exit code."""
        options = self.options
        commands = self.connect()
        address, port = self.check_nodes(commands)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # reap the launcher's child, which wrote the lists to standard input
        if earlier := os.environ.get("MUSTER_RERUN_OF"):
            self._print_differences(earlier)
        run_pipe = self.detach() if options.detach else -1
        transport = self._transport(commands)
        watch_options = Options(
            agent=self._agent(address, port), python=options.python, node_env=options.node_env, cwd=options.cwd,
            grace=options.grace, inherited=self.inherited, environment=self.environment,
            hang_timeout=options.hang_timeout, all_ranks_here=not options.part, lease=options.lease,
            progress=options.progress, console_rank=options.console_rank,
        )  # fmt: skip
        watch = Watch(transport, watch_options, self.console, terminals())
        watch.max_restarts = options.max_restarts
        watch.replaces = bool(options.spares or options.min_nodes)
        directory = self.create_run()
        watch.restart_count = attempts.numbers(directory)[-1] - 1
        if watch.lease == 0:
            record_launcher(directory, address, port)
        if path := os.environ.get(FOR_SMOKE_TEST):
            Path(path).write_bytes(os.fsencode(f"{directory}\n"))
        if run_pipe >= 0:
            os.replace(self.detached_log, directory / CONSOLE_LOG)
            os.write(run_pipe, os.fsencode(directory))
            os.close(run_pipe)
        watch.open(read(directory, created=True))
        ranks = sum(node.processes for node in watch.run.nodes)
        processes = f"{ranks} process{'es' * (ranks != 1)} on {' '.join(self.names)}"
        spares = f", spare: {' '.join(one.node for one in watch.spares)}" * bool(watch.spares)
        self.console.record(f"run {directory.name}: {processes}{spares}")
        if options.announce:
            self.console.print(options.announce.replace("{log}", f"{directory}/node_{self.names[0]}.log"))
        self.watch, self.directory = watch, directory
        report = str(directory / "report.html")
        watch.notifier = Notifier(self.notify, self.console.append, directory.name, run=str(directory), report=report)
        self.last_step = self._furthest_step()
        self.update_report()
        self.run_attempts()
        if self.synced:
            from distributed.launch.new_files import NewFiles

            NewFiles(watch, self.synced, options.log_dir, options.fetch).report(self.targets)
        if options.max_requeues is not None:
            from distributed.launch.requeue import EndedRun, requeue_if_stopped

            ended = EndedRun(directory, self.code, watch.stopping.signal, self.made_progress(), self.last_step)
            requeue_if_stopped(ended, options.slurm_job[-1], options.max_requeues, self.console.record)
        self.write_report()
        self._notify("end")
        self.flush()
        watch.notifier.wait()
        return self.code

    def run_attempts(self, restarts: int = 0, start: Callable[[Watch], None] | None = None) -> None:
        """Run attempts, and restart the run if that may help. restarts: number so far. start: see Watch.attempt()."""
        logs = self._node_logs()
        while True:
            started = time.monotonic()
            if logs:
                logs.follow()
            schedule_hang_check(self.watch)
            self.watch.attempt(start)
            start = None
            if logs:
                logs.collect()
                self.watch.record_reported()
            self.seconds = time.monotonic() - started
            self.code = self.report_verdict()
            self.watch.loop.wait(limit=0)  # a stop request may have arrived meanwhile
            if not self._should_restart(restarts):
                self.watch.end_agents()
                return
            if self.watch.replaces and (self.watch.nodes.lost or len(self.watch.run.nodes) < len(self.names)):
                self.watch.wait_for_spares()
            if self.watch.stopping.signal:
                self.watch.end_agents()
                return
            restarts += 1
            count = f"restart {restarts} of {self.options.max_restarts}"
            self._notify("restart", f"{count}: ")
            self.console.record(f"exit code {self.code}: {count}")
            if not self._begin_attempt():
                self.watch.end_agents()
                return

    def _begin_attempt(self) -> bool:
        """Begin the next attempt. Waits while the disk with the logs is full. Returns False after a stop request."""
        waits = False
        while not self.watch.stopping.signal:
            try:
                if self.watch.replaces:
                    self._replace_lost_nodes()
                self.watch.attempt_directory = Path(run_directory.begin_attempt(str(self.directory)))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not waits:
                    problem = f"{os.strerror(error.errno)}: waiting for space for the files of the next attempt"
                    self.console.record(f"{self.directory}: {problem}")
                waits = True
                self.watch.loop.wait(limit=SPACE_INTERVAL)
            else:
                self.watch.restart_count += 1
                return True
        return False

    def _replace_lost_nodes(self) -> None:
        """Change the nodes of the next attempt, and record this in run.json."""
        from distributed.launch.spares import arrange

        watch = self.watch
        ready = [node for node in watch.spares if node.node in watch.nodes.waiting]
        nodes, changes = arrange(watch.run.nodes, watch.nodes.lost, ready, len(self.names), self.options.min_nodes)
        if not changes:
            return
        for change in changes:
            self.console.record(change.message)
        watch.spares = [node for node in watch.spares if node.node not in {one.node for one in nodes}]
        nodes = number_ranks(nodes, self.options.first_rank)
        address, port = self._rendezvous_of(nodes)
        agent = replace(watch.options.agent, nodes=len(nodes), address=address, port=port)
        watch.options = replace(watch.options, agent=agent)
        recorded = [vars(change) | {"message": change.message} for change in changes]
        run_directory.change_nodes(str(self.directory), nodes, watch.spares, recorded)
        watch.open(read(self.directory, created=True))

    def _rendezvous_of(self, nodes: Sequence[RunNode]) -> tuple[str, str]:
        """The address and port of the rendezvous of these nodes."""
        agent, first = self.watch.options.agent, nodes[0].node
        if first == self.watch.run.nodes[0].node:
            return agent.address or first, agent.port
        if not self.replies:
            return first, agent.port
        from distributed.host.replies import NodeFacts
        from distributed.launch.comparison import rendezvous_address

        facts = {node.node: self.replies[node.node].value(NodeFacts) for node in nodes}
        return rendezvous_address(facts) or first, str(facts[first].port)

    def _transport(self, commands: LocalCommands) -> Local:
        options = self.options
        if options.transport == "srun":
            from distributed.launch.srun import Srun

            return Srun(self.before, self.after, options.slurm_job[0], not options.task_per_node)
        if options.transport == "local":
            return Local(commands)
        assert isinstance(commands, SshCommands)
        return (Ssh if options.transport == "ssh" else Pdsh)(commands)

    def _node_logs(self) -> NodeLogs | None:
        if self.options.transport not in ("ssh", "pdsh"):
            return None
        from distributed.launch.node_logs import NodeLogs

        return NodeLogs(self.watch, self.options.sync)

    def report_verdict(self) -> int:
        """Find the first failure, and print the verdict. Returns the exit code of the run."""
        from distributed.verdict.verdict import RESUME, conclude

        stopped, code = self.watch.stopping.signal, self.watch.stopping.status
        if stopped:
            code = INTERRUPTED if stopped == signal.SIGINT else TERMINATED
        resume = RESUME if self.options.max_requeues is None else ""  # requeue.py prints whether the job is requeued
        known = self.watch.stopping.stopped_at, self.watch.nodes.clocks, self.watch.nodes.signals
        code, text = conclude(self.directory, code, bool(stopped), resume, *known)
        self.console.show_lines(text)
        return code

    def update_report(self) -> None:
        """Let another process write report.html at intervals, if it exists: report.sh was called, so it may be open."""
        began = time.monotonic()

        def schedule(reply: Reply | None = None) -> None:
            seconds = max(REPORT_INTERVAL, 50 * (time.monotonic() - began))
            self.watch.loop.call_later(seconds, self.update_report)

        if not (self.directory / "report.html").exists():
            schedule()
            return
        command = [sys.executable, "-I", f"{LIB}/module.py", "report.report", str(self.directory)]
        self.report = self.watch.calls.call("report", command, schedule, timeout=REPORT_TIMEOUT)

    def write_report(self) -> None:
        """Write report.html, and print its path. A signal, or REPORT_TIMEOUT, ends this; the next signal kills."""
        from distributed.report import report

        numbers = [number for number in STOPPING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        remedy = f"to write it: {quote([*command_of('report'), str(self.directory)])}"
        writes = True

        def give_up(received: int, frame: object) -> None:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
            if writes:
                reason = f"it took {REPORT_TIMEOUT} s" if received == signal.SIGALRM else signals.name(received)
                raise ReportEnded(reason)

        try:
            for number in (*numbers, signal.SIGALRM):
                signal.signal(number, give_up)
            signal.alarm(REPORT_TIMEOUT)
            if self.report:
                self.report.process.wait()
            try:
                line = f"report {report.write(self.directory, ended=True)}"
            except Exception as error:  # noqa: BLE001 - the exit code must not depend on the report
                line = f"report.html: not written: {error}; {remedy}"
            writes = False  # from here on, give_up() does not raise
        except ReportEnded as ended:
            line = f"report.html: not written: {ended}; {remedy}"
        signal.alarm(0)
        self._print(line)

    def _notify(self, event: str, message: str = "") -> None:
        """Notify of the verdict on the last attempt. message: the beginning of the text."""
        verdict = read_json(self.watch.attempt_directory / "verdict.json")
        outcome, cause = verdict.get("outcome"), verdict.get("cause", f"exit code {self.code}")
        self.watch.notifier.send(
            event, f"{message}{outcome}: {cause}", verdict=outcome, exit_code=self.code, cause=cause,
            host=verdict.get("node"), rank=verdict.get("rank"), seconds=round(time.monotonic() - self.began),
        )  # fmt: skip

    def _should_restart(self, restarts: int) -> bool:
        """Whether a restart may help: the call was valid, no stop was requested, and no limit of restarts is reached.

        If the launcher passed a signal on to the ranks, exit code 143 means that a stop was requested.
        """
        if self.watch.stopping.signal or self.code in (0, WRONG_CALL, STOPPED):
            return False
        if (self.watch.stopping.passed_signal and self.code == TERMINATED) or restarts >= self.options.max_restarts:
            return False
        progress = self.made_progress()
        self.stalled = 0 if progress or not restarts else self.stalled + 1
        if self.stalled < MAX_STALLED:
            return True
        past = "" if self.last_step is None else f" past step {self.last_step}"
        self.console.record(f"exit code {self.code}: no progress{past} in {self.stalled} restarts; giving up")
        return False

    def made_progress(self) -> bool:
        """Whether the attempt had a new step or, if the run does not log steps itself, ran for PROGRESS_SECONDS."""
        before, self.last_step = self.last_step, self._furthest_step()
        if self.last_step is not None and (before is None or self.last_step > before):
            return True
        return (self.last_step is None or self.step_is_guessed) and self.seconds >= PROGRESS_SECONDS

    def _furthest_step(self) -> int | None:
        """The highest step that the run has logged or, if it logs none, that was found in its output.

        Only the end of the file is read, so the highest step that is known already counts too.
        """
        path = self.directory / "metrics.jsonl"
        before, self.step_is_guessed = self.step_is_guessed, not path.exists()
        if self.step_is_guessed and not (path := self.directory / "metrics_from_output.jsonl").exists():
            return None
        from distributed.metrics import furthest

        known = (furthest(path), self.last_step if before == self.step_is_guessed else None)
        return max((step for step in known if step is not None), default=None)

    def flush(self) -> None:
        """Wait until the console has received everything, or was closed. Until then, a signal ends this process."""
        for number in STOPPING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        while self.console.pending:
            for stream in self.console.pending:
                stream.flush()
            time.sleep(0.01 if self.console.pending else 0.0)


def number_ranks(nodes: Sequence[RunNode], first: int) -> list[RunNode]:
    """Set the first rank of each node. first: the first rank of the first node."""
    numbered: list[RunNode] = []
    for node in nodes:
        numbered.append(replace(node, first_rank=first))
        first += node.processes
    return numbered


def terminals() -> str:
    """The streams that are terminals: "1", "2" or, if both are the same terminal, "12".

    Returns "" if no stream is a terminal, or if the streams are two different terminals.
    """
    found = [stream for stream in (1, 2) if os.isatty(stream)]
    if len(found) == 2 and not os.path.sameopenfile(1, 2):
        return ""
    return "".join(map(str, found))


def call_of(lists: dict[str, list[bytes]]) -> Call:
    """The command line of the launcher."""
    words, names, values, rest = (list(map(os.fsdecode, lists[name])) for name in ("call", "options", "values", "rest"))
    options = ((name, value) if value else (name,) for name, value in zip(names, values, strict=True))
    return Call(tuple(words[: 1 + (words[0] == "sbatch")]), tuple(options), tuple(rest))


def record_launcher(directory: Path, address: str, port: str) -> None:
    """Write into run.json that this process is the launcher, and what attach.sh needs. Raises OSError."""
    facts, pid = read_json(directory / "run.json"), os.getpid()
    launcher = {"host": os.uname().nodename, "pid": pid, "since": start_time(pid), "machine": machine()}
    facts["launcher"] = {**facts["launcher"], **launcher}  # type: ignore[dict-item]
    write_json(directory / "run.json", facts | {"lease": 0, "address": address, "port": port})


def main(arguments: Sequence[str]) -> int:
    return execute(Launch, arguments)


def execute(kind: type[Launch], arguments: Sequence[str]) -> int:
    """Run the launch, and return its exit code.

    This is the exit code of the run, UNFIT if a node is unfit, or WRONG_CALL if the run directory cannot be created.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:  # otherwise a pipe may get the number of a standard stream
        pass
    os.close(file)
    exit_on_signals()
    launch = kind(parse(arguments), read_lists())
    if launch.options.dry_run:
        launch.print_commands()
        launch.flush()
        return 0
    try:
        return launch.run()
    except TransportError as error:
        launch.console.print(message_of(error, launch.options.program), always=True)
        launch.flush()
        return error.code
    except OSError as error:  # such as a full disk; running nodes stop when this process exits
        launch.console.print(f"{error.filename or launch.logs}: {error.strerror}", always=True)
        launch.flush()
        return 1
