"""Find a run, perhaps started on another machine, and run commands on its nodes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.exit_codes import KILLED, UNFIT, WRONG_CALL
from distributed.host.replies import Reply
from distributed.runs import node_status
from distributed.runs.lookup import (
    EXITED,
    IN_JOB,
    JOB,
    REMOTE,
    RUNNING,
    Run,
    RunLookupError,
    RunNode,
    find,
    read,
)
from distributed.terminal import cut
from distributed.transport.commands import (
    LIB,
    PLAIN_PYTHON,
    Calls,
    JobCommands,
    LocalCommands,
    Messages,
    SshCommands,
    TransportError,
)
from distributed.trust import bounded, one_line, planted, user_name

SHOWN = 3  # processes listed for a node
STATUS_VALUES = 50_000  # values of the JSON of a status, for each rank
SHOWN_CHARACTERS = 40  # of a command in that list


@dataclass(frozen=True)
class NodeReply:
    """The status that a node replied with, or why it did not reply."""

    node: RunNode
    status: node_status.NodeStatus | None
    error: str = ""

    @property
    def name(self) -> str:
        return self.node.node


def python_of(run: Run, node: RunNode) -> str:
    """The Python for modules that a node runs. For this machine, it is not the recorded one.

    That may have been removed since, and another user may have made a program of its name. A node checks this itself.
    """
    with contextlib.suppress(FileNotFoundError):  # it may be on the nodes only
        if run.job and planted(run.python, (0, os.geteuid())):
            return sys.executable
    return run.python if node.address or run.job else sys.executable


def status_command(run: Run, node: RunNode, options: Sequence[str]) -> list[str]:
    """Return the command that prints the status of a node when it runs there. options: options of node_status.py."""
    module = [python_of(run, node), "-I", f"{LIB}/module.py", "runs.node_status", "--run", run.directory_at_launch]
    rank = ["--count", str(node.processes), "--first-rank", str(node.first_rank)]
    return [*module, "--node", node.node, *rank, *options]


def node_reply(node: RunNode, reply: Reply) -> NodeReply:
    reply = replace(reply, most=STATUS_VALUES * (1 + node.processes))
    status = one_line(reply.value(node_status.NodeStatus), texts=("stack_text",))
    error = "did not reply in time" if reply.code == KILLED else reply.failure_message(node_status.NodeStatus)
    if status:
        own = range(node.first_rank, node.first_rank + node.processes)
        ranks = {one.rank: one for one in status.ranks if one.rank in own}
        status = replace(status, ranks=tuple(ranks.values()))
    return NodeReply(node, status, "" if status else bounded(error))


def remaining_processes(status: node_status.NodeStatus) -> str:
    """The processes on a node as text; programs are shown without their directories."""
    count, shown = len(status.processes), []
    for process in status.processes[:SHOWN]:
        program, blank, arguments = process.command.partition(" ")
        command = cut(f"{os.path.basename(program)}{blank}{arguments}".strip(), SHOWN_CHARACTERS)
        shown.append(f"{process.pid} {command}")
    shown += ["..."] * (count > SHOWN)
    return f"{count} {'process' if count == 1 else 'processes'} of this run: {', '.join(shown)}"


def report_remaining(run: Run, node_replies: Sequence[NodeReply]) -> tuple[list[str], int]:
    """A line for each node, and the exit code: 1 if processes remain, else UNFIT if a node did not reply, else 0."""
    lines = []
    for reply in node_replies:
        if reply.status is None:
            when = "when it is reachable," if run.lease == 0 else "its processes exit when heartbeats time out; then"
            text = reply.error + (f"; {when} check again" if run.launcher.state != RUNNING else "")
        elif reply.status.processes:
            text = f"still has {remaining_processes(reply.status)}"
        else:
            text = "no process of this run remains"
        lines.append(f"{reply.name}: {text}")
    if any(reply.status and reply.status.processes for reply in node_replies):
        return lines, 1
    return lines, UNFIT if any(reply.status is None for reply in node_replies) else 0


# ---------------------------------------------------------------- find a run


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """The parser of a program that finds a run. description: the docstring of its module."""
    parser = argparse.ArgumentParser(prog=program, description=description.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--program", required=True, help="name of the script in messages")
    parser.add_argument("--log-dir", type=Path, required=True, metavar="DIR", help="the directory of all runs")
    parser.add_argument("run", metavar="RUN")
    return parser


def find_run(argument: str, logs: Path, program: str) -> Run:
    """Find a run by its directory, its name in `logs`, or the number of its SLURM job.

    Raises TransportError if there is no such run, or another user owns it or its job. Raises JobWithoutRun for a job
    that has not started its run.
    """
    try:
        return read(find(argument, Path.cwd(), Path.cwd() / logs))
    except RunLookupError as error:
        if not JOB.fullmatch(argument):
            raise TransportError(WRONG_CALL, str(error)) from None
    if owner := job_owner(argument):
        raise TransportError(WRONG_CALL, f"job {argument}: belongs to {owner}")
    # The job may have been submitted in another directory.
    if submitted := re.search(r" WorkDir=(.*) StdErr=", slurm_job(argument)):
        with contextlib.suppress(RunLookupError):
            return read(find(argument, base := Path(submitted[1]), base / logs))
    raise _missing_run(argument, logs, program)


class JobWithoutRun(Exception):
    """A SLURM job has not started its run. state: state and reason from squeue, such as PENDING Resources."""

    def __init__(self, job: str, state: str) -> None:
        super().__init__(f"job {job} ({state}): its run has not started")
        self.job, self.state = job, state


def _missing_run(job: str, logs: Path, program: str) -> Exception:
    """The error for a job without a run directory: JobWithoutRun if its run may still start, else TransportError."""
    subject = f"RUN '{job}': no run of job {job} in {logs}"
    if not shutil.which("scontrol"):
        remedy = f"run {program} where the job was submitted, or name its run directory"
        return TransportError(WRONG_CALL, f"{subject}, and scontrol is not on this machine; {remedy}")
    if state := job_state(job):
        return JobWithoutRun(job, state)
    shown = slurm_job(job)
    if found := re.search(r"JobState=([A-Z_]+).* ExitCode=([0-9]+).* StdErr=(.*) StdIn=", shown):
        state, code, errors = found.groups()
        return TransportError(
            1,
            f"job {job}: ended before its run started ({state}, exit code {code}); see {errors}; "
            "if that file is missing, its directory did not exist",
        )
    reason = f"SLURM has no such job ({(shown.splitlines() or [''])[-1]})"
    return TransportError(WRONG_CALL, f"{subject}, and {reason}; for older jobs: sacct -j {job}")


# ---------------------------------------------------------------- SLURM


def slurm_job(job: str) -> str:
    """The output of scontrol: a line for the job or for each element of a job array, or an error; "" without SLURM."""
    return _printed(["scontrol", "show", "job", "--oneliner", job], errors=subprocess.STDOUT)


def job_state(job: str) -> str:
    """State and reason of a SLURM job, such as PENDING Resources; empty if it has ended or squeue failed."""
    printed = _printed(["squeue", "--noheader", "--jobs", job, "--format", "%T %r"])
    return (printed.splitlines() or [""])[0]


def job_states(jobs: Sequence[str]) -> dict[str, str]:
    """The states of those SLURM jobs that have not ended, such as PENDING, from one call of squeue."""
    squeue = ["squeue", "--noheader", "--array", "--jobs", ",".join(jobs), "--format", "%A %T"]
    lines = (_printed(squeue) if jobs else "").splitlines()
    return dict(line.split() for line in lines if line.count(" ") == 1)


def job_owner(job: str) -> str:
    """The owner of a SLURM job if that is another user, else "": root could stop the jobs of all users."""
    uids = _printed(["squeue", "--noheader", "--jobs", job, "--format", "%U"]).split()
    others = [int(uid) for uid in uids if uid.isdecimal() and int(uid) != os.geteuid()]
    return user_name(others[0]) if others else ""


def job_runs(state: str) -> bool:
    return state.startswith(("RUNNING", "SUSPENDED"))


def _printed(command: Sequence[str], errors: int = subprocess.DEVNULL) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="replace")


# ---------------------------------------------------------------- a run and its nodes


class RunQuery:
    """A run, its SLURM job, and connections to its nodes."""

    def __init__(self, run: Run, messages: Messages) -> None:
        """Raises TransportError."""
        self.run, self._log = run, messages.log
        self.job_state = ""  # see job_state()
        self.calls = Calls()
        self.ssh = SshCommands(messages.print)
        self.ssh.recorded = run.python
        self.update()

    def update(self) -> None:
        """Update the state of the launcher and of the SLURM job. When the job has ended, its launcher has exited too.

        Call this before the nodes are queried. In the other order, the run may end between the two calls; processes
        that were found while it was active would then be reported as processes that remain after its end.
        """
        run = self.run
        launcher = run.launcher
        with contextlib.suppress(RunLookupError):  # the directory was removed
            launcher = read(run.directory).launcher
        if run.job:
            self.job_state = job_state(run.job)
            if not job_runs(self.job_state):
                launcher = replace(launcher, state=EXITED)
            elif launcher.state == REMOTE and launcher.host in {node.node for node in run.nodes}:
                launcher = replace(launcher, state=IN_JOB)
        self.run = replace(run, launcher=launcher)

    @property
    def commands(self) -> LocalCommands:
        """The way to run a command for a node: over ssh or, for a SLURM job, inside the job.

        If the job has ended, the command runs on this machine, which shares the run directory with the node.
        """
        if self.run.job:
            return JobCommands(self.run.job) if job_runs(self.job_state) else LocalCommands()
        return self.ssh

    def call_nodes(self, command: Callable[[RunNode], list[str]], timeout: float) -> dict[RunNode, Reply]:
        """Run a command on each node of the run's newest attempt. timeout: seconds."""
        calls = {node: self.commands.command(node, command(node), "/", timeout=timeout) for node in self.run.nodes}
        replies = self.calls.call_all(calls, self._log, timeout=timeout)
        return {node: replies[node.node] for node in self.run.nodes}

    def query(self, options: Sequence[str], timeout: float) -> list[NodeReply]:
        """The status of each node. options: options of node_status.py."""
        replies = self.call_nodes(lambda node: status_command(self.run, node, options), timeout)
        return [node_reply(node, reply) for node, reply in replies.items()]

    def sweep(self, grace: float, timeout: float) -> None:
        """Stop the processes of the run on all nodes. grace: seconds from the stop request to SIGKILL."""

        def sweep(node: RunNode) -> list[str]:
            supervisor = [python_of(self.run, node), *PLAIN_PYTHON, f"{LIB}/module.py", "launch.supervisor", "sweep"]
            where = ["--dir", self.run.directory_at_launch, "--name", node.node]
            return [*supervisor, *where, "--grace", f"{grace:g}"]

        self.call_nodes(sweep, timeout)
