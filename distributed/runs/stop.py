"""Stop a run, and check that none of its processes remains on any node. scripts/stop.sh executes this program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from distributed.exit_codes import UNFIT
from distributed.files import KIT, try_lock
from distributed.host.process_scan import start_time
from distributed.runs.lookup import EXITED, IN_JOB, REMOTE, RUNNING, RunNode
from distributed.runs.query import JobWithoutRun, RunQuery, find_run, job_runs, job_state, parser_of, report_remaining
from distributed.transport.commands import Messages, TransportError, exit_on_signals
from distributed.transport.loop import INHERITED
from distributed.trust import LAYOUT, lock_file, printable

CHECK_TIMEOUT = 15.0  # seconds for a node to report the remaining processes
END_TIMEOUT = 15.0  # seconds after the grace period for the launcher to stop its nodes and write the report
KILL_TIMEOUT = 5.0  # seconds for the launcher to exit when its nodes have been stopped
CANCEL_TIMEOUT = 120.0  # seconds for a job to end after scancel
PROGRESS_INTERVAL = 5.0  # seconds between two messages while waiting
GRACE = 30  # seconds; assumed for a job without a run directory, which would contain its grace period


class Stop:
    """Stops one run."""

    def __init__(self, query: RunQuery, now: bool, messages: Messages) -> None:
        """now: give the ranks no time to write a checkpoint."""
        self._query, self._now, self._messages = query, now, messages
        self._log = messages.log
        run = query.run
        self._launcher, self._name = run.launcher, str(run.directory)
        self._grace = 0 if now else run.launcher.grace

    def run(self, quiet: bool) -> int:
        """Returns the exit code of the program."""
        run, state = self._query.run, self._launcher.state
        if run.job and (state == IN_JOB or not job_runs(self._query.job_state)):
            stop_job(run.job, self._query.job_state, self._launcher.grace, self._now, self._messages)
            return 0
        if state == REMOTE and (code := self._stop_from_launcher_host(quiet)) is not None:
            return code
        # A file of its own: others may have opened run.json, if the run is shared.
        try:
            lock = open(run.directory / "stop.lock", "w", opener=partial(lock_file, directory=run.directory))  # noqa: SIM115
        except OSError as error:
            raise TransportError(UNFIT, f"{error.filename}: {error.strerror}") from None
        with lock as file:
            # A second SIGTERM makes the launcher kill its ranks, so only one stop.sh may send SIGTERM.
            if not try_lock(file.fileno(), required=True):
                self._log(f"another stop.sh is stopping {self._name}: waiting for it")
                limit = self._launcher.grace + END_TIMEOUT + KILL_TIMEOUT + self._grace + CHECK_TIMEOUT
                try_lock(file.fileno(), seconds=limit, required=True)
            if state == EXITED:
                self._log(f"{self._name}: its launcher has already exited")
            self._stop_launcher()
            code = self._stop_nodes()
        if state == REMOTE:
            where = f"{self._launcher.host}: the launcher (process {self._launcher.pid})"
            raise TransportError(
                UNFIT, f"{where} could not be stopped; if it still runs there, it may restart the run (--max-restarts)"
            )
        return code

    # ---- the launcher

    def _stop_from_launcher_host(self, quiet: bool) -> int | None:
        """Run stop.sh on the launcher's host, which shares the run directory.

        Returns the exit code of stop.sh, or None if stop.sh could not be run.
        """
        run, host = self._query.run, self._launcher.host
        options = ["--now"] * self._now + ["--quiet"] * quiet
        command = [f"{KIT}/scripts/stop.sh", "--python", run.python, *options, run.directory_at_launch]
        self._log(f"{self._name}: its launcher is on {host}; running stop.sh there")
        node = RunNode(host, host, 0, 0)
        call = {node: self._query.ssh.command(node, command)}
        reply = self._query.calls.call_all(call, errors=INHERITED)[host]
        print(printable(reply.out, LAYOUT), end="")
        code = reply.code
        if code in (0, 1, UNFIT):
            return code
        why = f"stop.sh cannot be run there (exit code {code})"
        self._messages.print(f"warning: {host}: {why}; stopping the nodes without the launcher")
        return None

    def _stop_launcher(self) -> None:
        pid = self._launcher.pid
        if not self._awaited():
            return
        self._log(f"{self._name}: stopping its launcher, process {pid}; {describe_grace(self._now, self._grace)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a suspended process handles no signal
        if self._now:
            self._sweep(0)
        if wait(self._launcher.grace + END_TIMEOUT, 0.1, self._awaited, self._log):
            return
        self._messages.print(f"warning: the launcher (process {pid}) does not exit; stopping its nodes without it")
        self._sweep(0)
        if not wait(KILL_TIMEOUT, 0.1, self._awaited, self._log):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _awaited(self) -> str:
        """Return the text that wait() logs while the launcher runs, or "" if the launcher does not run.

        The start time is compared because process ids are reused.
        """
        runs = self._launcher.state == RUNNING and start_time(self._launcher.pid) == self._launcher.since
        return f"the launcher (process {self._launcher.pid}) to exit" if runs else ""

    # ---- the nodes

    def _stop_nodes(self) -> int:
        """Stop the remaining processes, and check again. Returns the exit code of report_remaining()."""
        lines, code = self._check()
        if code == 1:
            self._log(f"{self._name}: processes remain on its nodes; {describe_grace(self._now, self._grace)}")
            self._sweep(self._grace)
            lines, code = self._check()
        print(printable("\n".join(lines), LAYOUT))
        return code

    def _check(self) -> tuple[list[str], int]:
        self._query.update()
        return report_remaining(self._query.run, self._query.query([], CHECK_TIMEOUT))

    def _sweep(self, grace: float) -> None:
        """Stop the remaining processes on all nodes. grace: seconds from the stop request to SIGKILL."""
        self._query.sweep(grace, grace + CHECK_TIMEOUT)


def describe_grace(now: bool, grace: float) -> str:
    return "killing its processes immediately" if now else f"up to {grace} s to write a checkpoint"


def stop_job(job: str, state: str, grace: float, now: bool, messages: Messages) -> None:
    """Signal the batch script; cancel the job if it does not end in time. Raises TransportError if it does not end."""

    def awaited() -> str:
        nonlocal state
        state = job_state(job)
        return f"job {job} ({state.partition(' ')[0]}) to end" if state else ""

    if job_runs(state) and not now:
        messages.log(f"stopping job {job}; {describe_grace(now, grace)}")
        subprocess.run(["scancel", "--batch", "--signal=INT", "--", job], check=False)
        if not wait(grace + END_TIMEOUT, 0.5, awaited, messages.log):
            messages.log(f"job {job} does not end; cancelling it")
    if state:
        subprocess.run(["scancel", "--", job], check=False)
    if not wait(CANCEL_TIMEOUT, 0.5, awaited, messages.log):
        problem = f"still {state.partition(' ')[0]} after scancel"
        raise TransportError(1, f"job {job}: {problem}; see scontrol show job {job}")
    print(f"job {job} has ended; SLURM has ended its processes on all nodes")


def wait(seconds: float, interval: float, awaited: Callable[[], str], log: Callable[[str], None]) -> bool:
    """Call awaited() until it returns "". Returns False on timeout.

    awaited: describes the event that has not happened yet, such as "job 7 to end"; returns "" after the event.
    """
    start = reported = time.monotonic()
    while waiting_for := awaited():
        now = time.monotonic()
        if now - start >= seconds:
            return False
        if now - reported >= PROGRESS_INTERVAL:
            reported = now
            log(f"waiting for {waiting_for}: {now - start:.0f} s, at most {seconds:.0f} s")
        time.sleep(interval)
    return True


def main(arguments: Sequence[str]) -> int:
    """Return 0 if no process remains, 1 if one does, 2 if there is no such run, UNFIT if a node was not checked."""
    parser = parser_of("stop", str(__doc__))
    parser.add_argument("--now", action="store_true", help="kill the processes immediately; they write no checkpoint")
    parser.add_argument("--quiet", action="store_true", help="print only the result")
    options = parser.parse_args(arguments)
    exit_on_signals()
    messages = Messages(options.program, options.quiet)
    try:
        try:
            query = RunQuery(find_run(options.run, options.log_dir, options.program), messages)
        except JobWithoutRun as job:
            stop_job(job.job, job.state, GRACE, options.now, messages)
            return 0
        return Stop(query, options.now, messages).run(options.quiet)
    except TransportError as error:
        return messages.print_error(error)
