"""Start or continue a list, and run its dispatcher to the end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed import index
from distributed.exit_codes import STOPPED
from distributed.host import signals
from distributed.jobs import list_plan
from distributed.jobs.call import CallError, ListOptions, absolute, command_line, journal_of, program_name
from distributed.jobs.dispatch.dispatcher import Dispatcher
from distributed.jobs.dispatch.limits import Policy
from distributed.jobs.dispatch.recorder import Recorder, Shown
from distributed.jobs.host.host_attempt import NOTHING_WRITTEN
from distributed.jobs.journal.journal import Journal
from distributed.jobs.journal.state import ListState, job_records
from distributed.jobs.list_plan import ListConfig
from distributed.jobs.schedule.backend import JobServer, ServerLink
from distributed.jobs.servers import sockets, ssh_server
from distributed.jobs.show import console
from distributed.jobs.show.results import Results
from distributed.launch import forwarding, node_processes
from distributed.launch.notify import Notifier
from distributed.terminal import plural

SHOWN = 10  # maximum number of failed jobs in the summary
WRITE_INTERVAL = 0.5  # seconds between checks whether to write the results, and between updates of the table


def run(options: ListOptions) -> int:
    """Run or continue a list. Returns the exit code."""
    config, job_servers = list_plan.checked_list(options)
    if options.plan:
        return list_plan.show_plan(config, job_servers)
    for line in config.warnings:
        sys.stderr.write(f"{program_name()}: warning: {line}\n")
    with Journal.open(journal_of(options.log_file)) as list_journal:
        state = ListState.of(list_journal.records)
        list_plan.refuse_other_list(state, config)
        listed = {job.id for job in config.jobs}
        added = any(each.job.file and each.job.id not in listed for each in state.unfinished())
        if added or state.id not in ("", config.list_id):
            raise CallError(f"{options.log_file}: jobs were added while the command started; run it again")
        record = list_journal.add(
            "list", list=config.list_id, cwd=str(Path.cwd()), pid=os.getpid(), host=os.uname().nodename,
            call=options.stored(), backend=options.backend, script=config.script, jobs=job_records(config.jobs),
        )  # fmt: skip
        state.apply(record)
        list_journal.commit()
        index.add(Path.cwd())
        return dispatch(list_journal, state, config, job_servers)


def dispatch(
    list_journal: Journal, state: ListState, config: ListConfig, job_servers: Sequence[JobServer], drain: bool = False
) -> int:  # fmt: skip
    """Run a dispatcher with these servers until it returns. Returns the exit code. drain: see Policy."""
    options, log_file = config.options, config.options.log_file
    # Jobs of a lost SLURM cluster cannot run elsewhere.
    lost_after = float("inf") if options.backend == "slurm" else float(options.lost_after)
    policy = Policy(options.max_failures, options.fail_fast, lost_after, options.gpu_free_mib, drain)
    links = {server.name: ServerLink(server) for server in job_servers}
    screen, results = console.ListConsole(state, links), Results(log_file, state, links)
    command = "" if drain else options.notify or os.environ.get("MUSTER_NOTIFY", "")
    files = {"list": str(absolute(log_file)), "report": str(absolute(log_file.with_suffix(".html")))}
    notifier = Notifier(command, screen.log, str(log_file), **files)
    recorder = Recorder(list_journal, state, Shown(screen.log, results.note_change, notifier.send))
    read_added = functools.partial(list_plan.jobs_to_add, config, job_servers)
    dispatcher = Dispatcher(recorder, config.jobs, links, policy, cache=config.cache, read_added=read_added)
    if names := next((each.context.forwarded for each in job_servers if isinstance(each, ssh_server.SshServer)), None):
        screen.log(f"forwarded to the jobs: {' '.join(names)}; {forwarding.SETTING} changes the list")
    with screen:
        done = f", {state.counts['done']} of them done" if state.counts["done"] else ""
        screen.log(f"{plural(len(state.jobs), 'job')}{done}; results: {log_file}, {log_file.with_suffix('.html')}")
        received = asyncio.run(run_until_stopped(dispatcher, results, screen))
    outcome, code = outcome_of(state, received, policy)
    results.write(outcome, dispatcher.interrupted, last=True)
    print_summary(state, outcome, results, log_file, screen.write_line)
    totals = f"{outcome}: {state.counts['done']} of {len(state.jobs)} done, {state.counts['failed']} failed"
    notifier.send("end", totals, verdict=outcome, exit_code=code, cause=dispatcher.interrupted or state.paused)
    notifier.wait()
    screen.flush()
    sockets.remove_sockets(Path.cwd(), state.id)
    return code


async def run_until_stopped(dispatcher: Dispatcher, results: Results, screen: console.ListConsole) -> list[int]:
    """Run a dispatcher until it returns; a signal interrupts it. Returns the received signals."""
    # asyncio warns of processes that exit and pipes that close; the dispatcher reports these events itself.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        dispatcher.interrupt(f"received {signals.name(number)}")

    for number in node_processes.HANDLED_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    writer = asyncio.ensure_future(write_periodically(results, screen))
    try:
        await dispatcher.run()
    finally:
        writer.cancel()
    return received


async def write_periodically(results: Results, screen: console.ListConsole) -> None:
    while True:
        last_error = results.error
        results.write()
        if results.error and results.error != last_error:
            screen.log(f"{results.error}; retrying")
        screen.refresh()
        await asyncio.sleep(WRITE_INTERVAL)


def outcome_of(state: ListState, received: Sequence[int], policy: Policy) -> tuple[str, int]:
    """(state of the list, exit code)."""
    counts = state.counts
    if received:
        return "interrupted", 128 + received[0]
    if any(True for _ in state.unfinished()):
        return ("paused" if state.paused else "interrupted"), 0 if policy.drain else STOPPED
    if counts["failed"]:
        return "finished", 1
    if any(job.state == "cancelled" and not job.unlisted for job in state.jobs.values()):
        return ("cancelled" if not counts["done"] else "finished"), 0 if policy.drain else 1
    return "finished", 0


def print_summary(state: ListState, outcome: str, results: Results, log_file: Path, put: Callable[[str], None]) -> None:
    counts = state.counts
    parts = [f"{counts['done']} of {len(state.jobs)} done"]
    parts += [f"{counts[name]} {name}" for name in ("failed", "cancelled", "waiting") if counts[name]]
    running = f"; {counts['running']} still running" if counts["running"] else ""
    running += f"; results not copied yet: {plural(counts['ending'], 'job')}" if counts["ending"] else ""
    put(f"{outcome}: {', '.join(parts)}{running}")
    failed = [each for each in state.jobs.values() if each.state == "failed"]
    failed.sort(key=lambda each: not each.attempts)  # the causes first, then the jobs that waited for them
    for job in failed[:SHOWN]:
        put(f"  failed: {job.job.id}  {job.job.name}: {job.reason}")
    if failed[SHOWN:]:
        put(f"  failed: {len(failed) - SHOWN} more; `status` shows all")
    if failed:
        put(f"show the cause:  {command_line(f'why {failed[0].job.id}', log_file)}")
        put(f"run them again:  {command_line('retry failed', log_file)}")
    if without_results := [each for each in state.jobs.values() if each.reason.startswith(NOTHING_WRITTEN)]:
        # Some reasons also name files that the job may have written to other directories. These reasons are longer.
        example = max(without_results, key=lambda each: len(each.reason))
        put(f"done without results: {plural(len(without_results), 'job')}; {example.job.name} {example.reason}")
    for server in sorted({attempt.server for attempt in state.lost_attempts()}):
        stop = command_line("cancel all", log_file)
        put(f"{server}: lost; its jobs may still be running; when it is reachable again: {stop}")
    if outcome in ("paused", "interrupted"):
        put(f"continue:        {command_line('resume', log_file)}")
        put(f"cancel the list: {command_line('cancel all', log_file)}")
    if results.error:
        put(f"  {results.error}: the results are incomplete, the journal is complete")
    put(f"results: {log_file}, {log_file.with_suffix('.html')}")
