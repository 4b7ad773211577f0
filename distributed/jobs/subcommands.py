"""The subcommands of a list, such as status and cancel."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.files import user_file
from distributed.jobs.call import CallError, absolute, command_line, journal_of, program_name, say, show
from distributed.jobs.host import panes
from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import Journal, JournalError, request_id
from distributed.jobs.journal.state import FINAL, Attempt, JobState, ListState, job_records
from distributed.jobs.list_plan import ListConfig, jobs_to_add, make_servers, state_of, stored_config
from distributed.jobs.list_start import dispatch, run
from distributed.jobs.lists import bases
from distributed.jobs.lists.config import ConfigError
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import ServerUnusable, Unreachable
from distributed.jobs.schedule.placement import mean_seconds, sort_key
from distributed.jobs.servers import host_server, sockets, ssh_server
from distributed.jobs.show import console
from distributed.terminal import duration, plural
from distributed.training.base_model import hash_of
from distributed.trust import parse_json, read_bytes


def status(options: argparse.Namespace, path: Path) -> int:
    """Show the state of every job, and where it runs."""
    state, is_running = ListState.of(journal.records(path)), journal.dispatcher_is_running(path)
    read_metrics(state, options.log_file)
    requested = {job: record["event"] for record in state.unhandled_requests() for job in record["jobs"]}
    table: list[Sequence[str]] = [("id", "job", "state", "where", "time", "step", "loss", "held-out")]
    for job in state.jobs.values():
        last = job.last
        took = "" if last is None else console.clock((last.end or time.time()) - last.start)
        location = last.location if last else ""
        table.append((job.job.id, job.job.name, shown_state(job, requested), location, took, *console.measured(job)))
    reasons = [f"            {reason}" if (reason := state.reason_of(job)) else "" for job in state.jobs.values()]
    show(table, ["", *reasons])
    say(console.totals(state))
    if any(True for _ in state.unfinished()) or requested:
        resume = command_line("resume", options.log_file)
        stopped = f"no dispatcher is running; to continue: {resume}"
        say("a dispatcher is running this list" if is_running else stopped)
    for file in (file for file, event in requested.items() if event == "add"):
        say(f"add requested: {file}")
    if state.paused:
        say(f"paused: {state.paused}")
    for line in unusable_servers(options.log_file) if is_running else ():
        say(line)
    return 1 if state.counts["failed"] else 0


def unusable_servers(log_file: Path) -> list[str]:
    """A line for each server that gets no jobs, with the reason that the dispatcher wrote to the results."""
    labels = {"unusable": "not used: ", "unreachable": "unreachable: "}
    try:
        known = parse_json(read_bytes(user_file(log_file)))["servers"]
        found = [(name, labels.get(each["state"], ""), each["reason"]) for name, each in known.items()]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [f"{name}: {state}{reason}" for name, state, reason in found if reason]


def read_metrics(state: ListState, log_file: Path) -> None:
    """Add the metrics of running jobs to the state. They are read from the results, as the journal lacks them."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        for entry in parse_json(read_bytes(user_file(log_file)))["jobs"]:
            job = state.jobs.get(entry["id"])
            if job and job.state == "running":
                job.metrics |= entry["metrics"]


def shown_state(job: JobState, requested: Mapping[str, str]) -> str:
    """The state for `status`. requested: the pending request of each job, by id."""
    if job.job.id in requested:
        return f"{job.state}, {requested[job.job.id]} requested"
    if job.cancel and job.state not in FINAL:
        return "cancelling"
    attempt = f", attempt {job.last.number}" if job.last and job.last.number > 1 else ""
    return {"ending": "copying results"}.get(job.state, job.state) + attempt


def why(options: argparse.Namespace, path: Path) -> int:
    """Explain the state of a job, and show its attempts; or show in which settings two jobs differ."""
    state = state_of(path)
    job = state.find_job(options.job)
    if options.other:
        return show_differences(job.job, state.find_job(options.other).job, stored_config(state, path))
    repeated = any(job.reason.endswith(attempt.failure_text) for attempt in job.attempts if attempt.failure)
    reason = "" if repeated else state.reason_of(job)
    say(f"{job.job.id}  {job.job.name}: {job.state}" + (f": {reason}" if reason else ""))
    say(f"  output: {job.job.output}")
    for attempt in job.attempts:
        say("  " + attempt_line(attempt))
        for line in attempt.lines:
            say(f"      {line}")
    for line in explanation(state, job, options.log_file):
        say(f"  {line}")
    return 0


def show_differences(one: Job, other: Job, config: ListConfig) -> int:
    rows = bases.differences(one, other, bases.rules_of(config.cluster, config.script))
    table: list[Sequence[str]] = [("differs in", "class", one.name, other.name), *rows]
    if config.options.two_phase:
        say(f"base models: {hash_of(one.base) or 'none'} and {hash_of(other.base) or 'none'}")
    else:  # all settings are of one class
        table = [(key, *values) for key, _, *values in table]
    show(table)
    return 0


def attempt_line(attempt: Attempt) -> str:
    start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.start))
    took = f", {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    end = attempt.state if attempt.open else attempt.failure_text if attempt.failure else "done"
    host = f" ({attempt.process['host']})" if attempt.process.get("host") else ""
    return f"attempt {attempt.number} on {attempt.location}{host}, {start}{took}: {end}"


def explanation(state: ListState, job: JobState, log_file: Path) -> list[str]:
    """What a job waits for, or the command that runs it again."""
    if job.state == "done":
        return []
    if job.state in FINAL:
        needed = state.waits_for(job)
        cause = [f"the cause: {command_line(f'why {needed.job.id}', log_file)}"] if needed else []
        return [*cause, f"to retry: {command_line(f'retry {job.job.id}', log_file)}"]
    paused = [f"the list is paused: {state.paused}"] if state.paused and job.state == "waiting" else []
    if not journal.dispatcher_is_running(journal_of(log_file)):
        return [*paused, f"no dispatcher is running; to continue: {command_line('resume', log_file)}"]
    if paused or job.state != "waiting":
        return paused
    if needed := state.waits_for(job):
        return [f"see also: {command_line(f'why {needed.job.id}', log_file)}"]
    waiting = [each for each in state.jobs.values() if each.state == "waiting" and not state.waits_for(each)]
    usual = mean_seconds(each.job for each in state.jobs.values())
    key = sort_key(job.job, usual, job.number)
    before = sum(sort_key(each.job, usual, each.number) < key for each in waiting)
    lines = [f"waits for a free slot, after {plural(before, 'job')} of the list"]
    needs = [f"{job.job.options.gpus or 'all'} GPUs of one server"] if job.job.options.gpus != 1 else []
    needs += [f"a server with the labels {', '.join(job.job.options.labels)}"] if job.job.options.labels else []
    lines += [f"needs {' and '.join(needs)}"] if needs else []
    return lines + unusable_servers(log_file)


def logs(options: argparse.Namespace, path: Path) -> int:
    """Print the output of an attempt of a job."""
    path = path.absolute()
    state = state_of(path)
    job = state.find_job(options.job)
    attempt = job.last if options.attempt is None else state.attempt(f"{job.job.id}.{options.attempt}")
    if attempt is None:
        if not job.attempts:
            raise ValueError(f"{job.job.name}: never started")
        known = ", ".join(str(each.number) for each in job.attempts)
        raise ValueError(f"{job.job.name}: no attempt {options.attempt}; known attempts: {known}")
    log = Path(state.list_record["cwd"], "logs", "jobs", state.id, attempt.name, f"node_{attempt.server}.log")
    if attempt.open or not log.exists():
        config = stored_config(state, path)
        server = next((each for each in make_servers(config) if each.name == attempt.server), None)
        if server is None:
            raise ValueError(f"{attempt.server}: not in the cluster config; cannot read the log of the attempt")
        if isinstance(server, ssh_server.SshServer):
            command = server.follow_command(attempt, once=not options.follow)
        else:
            command = panes.host_command("follow", str(log), str(log.with_suffix(".exit")) if options.follow else "/")
        try:
            code = subprocess.call(command)
            return 0 if code in (0, -signal.SIGINT) else 1
        finally:
            if not journal.dispatcher_is_running(path):  # a dispatcher uses the same sockets
                sockets.remove_sockets(Path.cwd(), state.id)
    panes.print_new(str(log), 0)
    return 0


def cancel(options: argparse.Namespace, path: Path) -> int:
    """Stop jobs, and verify that none of their processes remain."""
    state = ListState.of(journal.records(path))
    jobs = state.select_jobs("cancel", options.jobs)
    if "all" in options.jobs:
        pending = state.unhandled_requests()
        retried = (job for each in pending if each["event"] == "retry" for job in each["jobs"])
        jobs = list(dict.fromkeys([*jobs, *retried]))
    if not jobs and not state.lost_attempts():
        say("nothing to cancel: no job is waiting or running")
        return 0
    if jobs:
        journal.request(path, "cancel", jobs)
    if journal.dispatcher_is_running(path):
        return wait_until_final(path, jobs)
    with Journal.open(absolute(path)) as list_journal:
        state = ListState.of(list_journal.records)
        config = stored_config(state, path)
        code = dispatch(list_journal, state, config, make_servers(config), drain=True)
    return code or cancel_exit_code(state, jobs)


def cancel_exit_code(state: ListState, jobs: Sequence[str]) -> int:
    """1 if one of these jobs has not ended, or if a lost attempt of any job may still be running; else 0."""
    return 1 if state.lost_attempts() or any(state.jobs[job].state not in FINAL for job in jobs) else 0


def wait_until_final(path: Path, jobs: Sequence[str]) -> int:
    """Wait until these jobs have ended, and print how each one ended. Returns the exit code of `cancel`."""
    printed: set[str] = set()
    while True:
        state = ListState.of(journal.records(path))
        requested = {job for each in state.unhandled_requests() for job in each["jobs"]}
        for job in map(state.jobs.__getitem__, jobs):
            if job.state not in FINAL or job.job.id in printed | requested:
                continue
            printed.add(job.job.id)
            say(f"{job.state}: {job.job.name}" + (f": {job.reason}" if job.reason else ""))
        if len(printed) == len(jobs):
            return cancel_exit_code(state, jobs)
        if not journal.dispatcher_is_running(path):
            message = "the dispatcher exited before all jobs were cancelled; run `cancel` again"
            print(f"{program_name()}: {message}", file=sys.stderr)
            return 1
        time.sleep(0.2)


def retry(options: argparse.Namespace, path: Path) -> int:
    """Run failed or cancelled jobs again."""
    state = state_of(path)
    selected = state.select_jobs("retry", options.jobs)
    jobs = [job for job in selected if state.jobs[job].state in ("failed", "cancelled")]
    if not jobs:
        say("nothing to retry: no such job failed or was cancelled")
        return 0
    journal.request(path, "retry", jobs)
    start = "" if journal.dispatcher_is_running(path) else f"; to start: {command_line('resume', options.log_file)}"
    say(f"requeued {plural(len(jobs), 'job')}{start}")
    return 0


def add(options: argparse.Namespace, path: Path) -> int:
    """Add the jobs of a file to the list, also while the list runs."""
    file, path = absolute(options.file), absolute(path)
    if file.exists() and not file.is_file():
        raise CallError(f"{file}: not a regular file; the dispatcher must be able to read the file again")
    jobs = new_jobs(state_of(path), path, file)
    for job in [each for each in jobs if each.leak][: bases.SHOWN]:
        sys.stderr.write(f"{program_name()}: warning: {job.name}: {job.leak}\n")
    if not jobs:
        say(f"nothing to add: all jobs of {file} are in the list")
        return 0
    request = request_id(journal.request(path, "add", [str(file)]))
    while not (replies := [each for each in journal.records(path) if each.get("request") == request]):
        if journal.dispatcher_is_running(path):
            time.sleep(0.2)
            continue
        with contextlib.suppress(JournalError), Journal.open(path) as list_journal:
            jobs = new_jobs(ListState.of(list_journal.records), path, file)
            list_journal.add("added", request=request, jobs=job_records(jobs))
            list_journal.commit()
    if refusal := replies[0].get("refused"):
        raise ConfigError(refusal)
    trained = sum("trains" in each for each in replies[0]["jobs"])
    models = f" and {plural(trained, 'base model')} to train" if trained else ""
    start = "" if journal.dispatcher_is_running(path) else f"; to start: {command_line('resume', options.log_file)}"
    say(f"added {plural(len(replies[0]['jobs']) - trained, 'new job')}{models}{start}")
    return 0


def new_jobs(state: ListState, path: Path, file: Path) -> list[Job]:
    """The jobs that `add` adds for this file; see jobs_to_add(). path: of the journal."""
    config = stored_config(state, path)
    jobs = [job for job in config.jobs if not state.jobs[job.id].unlisted]
    return jobs_to_add(config, make_servers(config), jobs, str(file))


def resume(options: argparse.Namespace, path: Path) -> int:
    """Continue the list with the options of the last call that ran it."""
    return run(stored_config(state_of(path), path).options)


def close(options: argparse.Namespace, path: Path) -> int:
    """Remove the tmux sessions of the list from its servers."""
    with Journal.open(path) as list_journal:
        config = stored_config(state := ListState.of(list_journal.records), path)
        config = replace(config, options=replace(config.options, no_tmux=True, sync=False))
        host_servers = [each for each in make_servers(config) if isinstance(each, host_server.HostServer)]
        try:
            return max(asyncio.run(close_sessions(host_servers)), default=0)
        finally:
            sockets.remove_sockets(Path.cwd(), state.id)


async def close_sessions(host_servers: Sequence[host_server.HostServer]) -> list[int]:
    """Remove the session of each server, and print the outcome. Returns an exit code for each server."""

    async def close_session(server: host_server.HostServer) -> int:
        try:
            session = await server.remove_session()
        except (ServerUnusable, Unreachable) as error:
            say(f"{server.name}: {error}")
            return 1
        say(f"{server.name}: " + (f"removed tmux session {session}" if session else "no tmux session of this list"))
        return 0

    return await asyncio.gather(*map(close_session, host_servers))


SUBCOMMANDS = {command.__name__: command for command in (status, logs, why, cancel, retry, add, resume, close)}
