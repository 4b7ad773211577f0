"""Run a list of training jobs over GPU servers.

usage: run_distributed_training.py --cluster-config FILE --jobs-config FILE [option...]
       run_distributed_training.py status|logs|why|cancel|retry|resume [--log-file FILE] ...

  --cluster-config FILE  the servers (JSON); not needed with --backend local
  --jobs-config FILE     the jobs (JSON): a list of objects, each key an argument of the script
  --log-file FILE        the results (default: results.json). Beside it stand the journal of the list (.journal) and a
                         page of the results (.html)
  --backend NAME         ssh (default), local (this machine, no SSH), slurm (one sbatch array)
  --script PATH          script to run, in place of script_path of the cluster config (default: train.py)
  --slots N              local: jobs at once (each GPU, or without GPUs this machine)
  --sync                 ssh: copy the working directory to the servers first
  --retries N            attempts after a first that failed, for jobs without _retries (default: 1)
  --max-failures N       pause the list when N jobs have failed
  --fail-fast            cancel everything when a job has failed
  --gpu-free-mib N       use a GPU when N MiB of its memory are free (default: when others use less than 1000 MiB)
  --lost-after SECONDS   ssh: without a connection for so long, the jobs of a server run elsewhere (default: 600)
  --grace SECONDS        time between SIGTERM and SIGKILL (default: 30)
  --no-tmux              no tmux sessions on the servers
  --plan                 print where and when each job would run, and start nothing
  --help                 show this

The same command again, or `resume`, goes on with a list that was interrupted: jobs that still run are found again,
what is done stays done, jobs that are new in the list are added.

  status                 how the list is: every job, and what runs where
  logs JOB [--follow]    the output of a job's last attempt; --attempt N: of another one
  why JOB                why a job is in the state that it is in
  cancel JOB...|all      stop jobs, and prove that nothing of them is left
  retry failed|JOB...    run jobs again that have failed or were cancelled
  resume                 go on with the list

JOB is an id, the beginning of one, a name, or a part of it that names one job only.

Exit codes: 0 all jobs are done; 1 a job failed or was cancelled; 2 wrong call or configuration; 75 the list is paused
or was interrupted: run it again to go on; 130 Ctrl-C, 143 SIGTERM: jobs go on, and so does `resume`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from distributed import terminal
from distributed.exit_codes import STOPPED, WRONG_CALL
from distributed.fold import DEFAULT_PARTICIPANTS
from distributed.jobs import bases, console, host, journal, servers
from distributed.jobs.base_cache import Cache
from distributed.jobs.config import (
    BaseModels,
    Cluster,
    ConfigError,
    raise_faults,
    read_base_models,
    read_cluster,
    read_jobs,
    server_name,
)
from distributed.jobs.dispatcher import Dispatcher, JobServer, Policy
from distributed.jobs.job import Job
from distributed.jobs.journal import Journal, JournalError
from distributed.jobs.placement import SlotPool, mean_seconds, plan, sort_key
from distributed.jobs.results import Results, phase_files
from distributed.jobs.state import (
    FINAL,
    Attempt,
    JobState,
    ListState,
    find_job,
    job_records,
    select_jobs,
    unhandled_requests,
)
from distributed.runs.page import duration
from distributed.training.base_model import BaseModelError, hash_of

PROGRAM = "run_distributed_training.py"
TWO_PHASE = "run_two_phase_training.py"
PROGRAMS = (PROGRAM, TWO_PHASE, "distributed_train_helper.py")
SUBCOMMANDS = ("status", "logs", "why", "cancel", "retry", "resume")
BACKENDS = ("ssh", "local", "slurm")
SHOWN = 10  # failed jobs at the end
WRITE = 0.5  # seconds between two looks at whether the results are to be written, and two pictures of the table
BASE_OPTIONS = {
    "base_models": None, "skip_phase1": False, "barrier": False, "allow_shared_held_out": False,
    "evict_after_copy": False,
}  # fmt: skip
# What `resume` takes over from the call that began the list.
KEPT = (
    "cluster_config", "jobs_config", "backend", "script", "slots", "sync", "retries", "max_failures", "fail_fast",
    "gpu_free_mib", "lost_after", "grace", "no_tmux", "two_phase", "base_models", "skip_phase1", "barrier",
    "allow_shared_held_out", "evict_after_copy",
)  # fmt: skip


def called(words: str, log_file: Path | None = None) -> str:
    """A call of this program that a person can paste. log_file: of the list that it is about."""
    here = f"python {shlex.quote(sys.argv[0])}" if Path(sys.argv[0]).name in PROGRAMS else PROGRAM
    option = "" if log_file is None or str(log_file) == "results.json" else f" --log-file {shlex.quote(str(log_file))}"
    return f"{here} {words}{option}"


def program() -> str:
    """The name of the running program, for messages."""
    name = Path(sys.argv[0]).name
    return name if name in PROGRAMS else PROGRAM


class CallError(Exception):
    """A wrong call."""


class Parser(argparse.ArgumentParser):
    """Errors as everywhere in the kit."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise CallError(message)


# ---------------------------------------------------------------- the call


def run_parser(two_phase: bool = False) -> Parser:
    """Of the call that runs a list. two_phase: with its base models."""
    parser = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.set_defaults(two_phase=two_phase, **BASE_OPTIONS)
    if two_phase:
        parser.add_argument("--base-models", type=Path)
        for name in ("--skip-phase1", "--barrier", "--allow-shared-held-out", "--evict-after-copy"):
            parser.add_argument(name, action="store_true")
    parser.add_argument("--cluster-config", type=Path)
    parser.add_argument("--jobs-config", type=Path)
    parser.add_argument("--log-file", type=results_file, default=Path("results.json"))
    parser.add_argument("--backend", choices=BACKENDS, default="ssh")
    parser.add_argument("--script", "--script-path")
    parser.add_argument("--slots", type=positive)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--retries", type=not_negative)
    parser.add_argument("--max-failures", type=positive)
    parser.add_argument("--fail-fast", action="store_true")
    parser.add_argument("--gpu-free-mib", type=not_negative)
    parser.add_argument("--lost-after", type=not_negative, default=600)
    parser.add_argument("--grace", type=not_negative, default=30)
    parser.add_argument("--no-tmux", action="store_true")
    parser.add_argument("--plan", action="store_true")
    return parser


def list_parser(command: str) -> Parser:
    """Of a call about a list that is there."""
    parser = Parser(prog=f"{PROGRAM} {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--log-file", type=results_file, default=Path("results.json"))
    if command in ("logs", "why"):
        parser.add_argument("job")
    if command in ("cancel", "retry"):
        parser.add_argument("jobs", nargs="+")
    if command == "logs":
        parser.add_argument("--follow", action="store_true")
        parser.add_argument("--attempt", type=positive)
    return parser


def results_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected the name of a file such as results.json, got {text!r}")
    return path


def positive(text: str) -> int:
    return at_least(1, text)


def not_negative(text: str) -> int:
    return at_least(0, text)


def at_least(least: int, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def main(words: Sequence[str], call: Callable[[list[str]], int] | None = None) -> int:
    """Run the call. Returns the exit code. call: of another program than this one."""
    try:
        code = (call or run_call)(list(words))
        if sys.stdout:  # None where it was closed from the beginning
            sys.stdout.flush()
        return code
    except CallError as error:
        return refuse(f"{error}\nTry: {program()} --help")
    except (ConfigError, JournalError, ValueError) as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        return refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def refuse(message: str) -> int:
    for line in message.splitlines():
        sys.stderr.write(line + "\n" if line.startswith("Try: ") else f"{program()}: {line}\n")
    return WRONG_CALL


def run_call(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        sys.stdout.write(__doc__ or "")
        return 0
    found = list_call(words)
    return run(run_parser().parse_args(words)) if found is None else found


def list_call(words: list[str]) -> int | None:
    """A call about a list that is there; None where it is none."""
    if words and words[0] in SUBCOMMANDS:
        given = list_parser(words[0]).parse_args(words[1:])
        path = journal_of(given.log_file)
        if not path.exists():
            raise CallError(
                f"{given.log_file}: there is no list of jobs ({path} is missing); name its results: --log-file"
            )
        if not journal.has_list(path):
            raise CallError(f"{path}: there is no list of jobs in it; give the call that was to begin it once more")
        verbs = {"status": status, "logs": logs, "why": why, "cancel": cancel, "retry": retry, "resume": resume}
        return verbs[words[0]](given, path)
    if words and not words[0].startswith("-"):
        known = [*SUBCOMMANDS, *(["cache"] if program() == TWO_PHASE else [])]
        raise CallError(f"{words[0]}: unknown command; known are {', '.join(known)}")
    return None


def journal_of(results: Path) -> Path:
    """The journal beside the results."""
    return results.with_suffix(".journal")


# ---------------------------------------------------------------- run a list


@dataclass(frozen=True)
class Call:
    """What a call asks for, checked."""

    given: argparse.Namespace
    cluster: Cluster | None
    jobs: list[Job]
    cache: Cache

    @property
    def script(self) -> str:
        return script_of(self.given, self.cluster)


def script_of(given: argparse.Namespace, cluster: Cluster | None) -> str:
    return str(given.script or (cluster.script_path if cluster else "train.py"))


def checked(given: argparse.Namespace) -> Call:
    """Read both configurations. Raises ConfigError and CallError."""
    if given.jobs_config is None:
        raise CallError("--jobs-config: missing; name the file with the jobs")
    if given.backend == "local":
        cluster = read_cluster(given.cluster_config) if given.cluster_config else None
    elif given.cluster_config is None:
        raise CallError("--cluster-config: missing; name the file with the servers, or use --backend local")
    else:
        cluster = read_cluster(given.cluster_config)
    if given.slots and given.backend != "local":
        raise CallError("--slots: only for --backend local; servers have slots_per_gpu")
    if given.sync and given.backend != "ssh":
        raise CallError(f"--sync: only for --backend ssh; with --backend {given.backend} nothing is copied")
    script = script_of(given, cluster)
    if given.backend == "local" and not Path(script).is_file():
        raise ConfigError(f"script {script}: there is no such file (looked in {Path.cwd()}); name one: --script PATH")
    known = DEFAULT_PARTICIPANTS if Path(script).name == "train.py" else None
    jobs = read_jobs(given.jobs_config, known, given.retries)
    cache = Cache(Path.cwd())
    if given.two_phase:
        jobs = with_base_models(given, base_rules(given, cluster, script), jobs, cache)
    return Call(given, cluster, [with_digest(job, cache) for job in jobs], cache)


def base_rules(given: argparse.Namespace, cluster: Cluster | None, script: str) -> bases.Rules:
    """Which settings determine a base model. Raises ConfigError."""
    said = cluster.base_models if cluster else BaseModels()
    return bases.Rules.of(read_base_models(given.base_models) if given.base_models else said, script)


def with_base_models(given: argparse.Namespace, rules: bases.Rules, jobs: Sequence[Job], cache: Cache) -> list[Job]:
    """The jobs, and before them those that train their base models.

    Raises:
        ConfigError: a job's held-out participant is one that its base model is trained on; with --skip-phase1 also for
            base models that are missing.
    """
    plan = bases.plan_of(jobs, rules)
    if not given.allow_shared_held_out:
        if leaks := bases.leaks(plan, rules):
            more = [f"and {len(leaks) - SHOWN} more jobs"] if leaks[SHOWN:] else []
            raise ConfigError("\n".join([*leaks[:SHOWN], *more, bases.LEAK_REMEDY]))
        raise_faults([
            f"base {base.name} of {console.plural(len(base.jobs), 'job')}, the first {base.jobs[0].name}: its "
            f"participants are not known here, so leaks cannot be found; name participants, or {bases.LEAK_REMEDY}"
            for base in bases.not_checked(plan, rules)
        ])  # fmt: skip
    if not given.skip_phase1:
        return [*(bases.training_job(base, rules, given.retries) for base in plan.bases.values()), *plan.jobs]
    faults = []
    for base in plan.bases.values():
        try:
            cache.verify(base.digest)
        except BaseModelError as error:
            faults.append(
                f"base {base.name} of {console.plural(len(base.jobs), 'job')}, the first {base.jobs[0].name}: {error}; "
                "call without --skip-phase1"
            )
    if faults:  # all of them: each has to be trained
        raise ConfigError("\n".join(faults))
    return list(plan.jobs)


def with_digest(job: Job, cache: Cache) -> Job:
    """A job with _base_model_hash starts from a base model of the cache. Raises ConfigError."""
    name = job.options.base_model_hash
    if name is None or job.base:
        return job
    try:
        return replace(job, base=cache.digest_of(name))
    except BaseModelError as error:
        raise ConfigError(
            f"{job.name}: _base_model_hash={name}: {error}; train it by run_two_phase_training.py"
        ) from None


def make_servers(asked: Call, list_id: str) -> list[JobServer]:
    """The servers of a call. Raises ConfigError."""
    given = asked.given
    context = servers.ListContext(
        list_id, Path.cwd(), asked.script, grace=float(given.grace), panes=not given.no_tmux, sync=given.sync,
        sockets=servers.sockets_directory(list_id), cache=asked.cache,
    )  # fmt: skip
    if given.backend == "local":
        return [servers.local_server(context, given.slots)]
    assert asked.cluster
    if given.backend == "slurm":
        from distributed.jobs.slurm import SlurmServer

        return [SlurmServer(asked.cluster, context, sum(job.options.gpus for job in asked.jobs))]
    for server in asked.cluster.servers:
        if server.ssh_key and not Path(server.ssh_key).expanduser().is_file():
            raise ConfigError(f"{given.cluster_config}: {server.host}: ssh_key={server.ssh_key}: there is no such file")
    return [servers.SshServer(server_name(server), server, context) for server in asked.cluster.servers]


def refuse_homeless(jobs: Sequence[Job], made: Sequence[JobServer]) -> None:
    """Jobs that no server could ever take. Raises ConfigError."""
    pools = [server.pool for server in made]
    faults = []
    for job in jobs:
        labels = frozenset(job.options.labels)
        if not any(labels <= pool.labels for pool in pools):
            faults.append(f"{job.name}: no server has the labels {', '.join(sorted(labels))}")
        elif not any(labels <= pool.labels and job.options.gpus <= pool.capacity() for pool in pools):
            most = max(pool.capacity() for pool in pools if labels <= pool.labels)
            faults.append(f"{job.name}: _gpus={job.options.gpus}, but no server that fits has more than {most}")
    raise_faults(faults)


def run(given: argparse.Namespace) -> int:
    """Run the list of a call, or go on with it."""
    asked = checked(given)
    if not given.log_file.parent.is_dir():
        raise CallError(f"--log-file {given.log_file}: there is no directory {given.log_file.parent}")
    refuse_foreign_file(given)
    refuse_homeless(asked.jobs, make_servers(asked, "new"))  # a refused call leaves nothing behind
    refuse_taken_directories(asked)
    if given.plan:
        return show_plan(asked)
    with Journal.open(journal_of(given.log_file)) as book:
        state = ListState.of(book.records)
        refuse_other_list(state, asked)
        list_id = state.id or secrets.token_hex(5)
        made = make_servers(asked, list_id)
        about = {name: getattr(given, name) for name in KEPT}
        about = {name: str(value) if isinstance(value, Path) else value for name, value in about.items()}
        record = book.add(
            "list", list=list_id, cwd=str(Path.cwd()), pid=os.getpid(), host=os.uname().nodename, call=about,
            backend=given.backend, script=asked.script, jobs=job_records(asked.jobs),
        )  # fmt: skip
        state.apply(record)
        book.commit()
        return dispatch(book, state, asked.jobs, made, policy_of(given), given.log_file, asked.cache)


def policy_of(given: argparse.Namespace, drain: bool = False) -> Policy:
    lost_after = float("inf") if given.backend == "slurm" else float(given.lost_after)  # there is no other SLURM
    return Policy(
        given.max_failures, given.fail_fast, lost_after, given.gpu_free_mib, drain, given.barrier,
        given.evict_after_copy,
    )  # fmt: skip


def refuse_foreign_file(given: argparse.Namespace) -> None:
    """Results and their page are written only over such. Raises CallError."""
    book = journal_of(given.log_file)
    phases = phase_files(given.log_file) if given.two_phase else ()
    for path in (given.log_file, given.log_file.with_suffix(".html"), *phases):
        if path.exists() and not book.exists():
            raise CallError(
                f"--log-file {given.log_file}: {path} is there already, and its journal ({book}) is not: move it "
                "away, or give another --log-file"
            )


def refuse_taken_directories(asked: Call) -> None:
    """Output directories here that hold the results of other jobs. Raises ConfigError."""
    faults = []
    for job in asked.jobs:
        try:
            host.refuse_other_owner(job.output, job.owner, asked.script)
        except host.JobRefused as error:
            faults.append(str(error))
    raise_faults(faults)


def refuse_other_list(state: ListState, asked: Call) -> None:
    """The results of one list never go into those of another. Raises ConfigError."""
    if not state.id:
        return
    remedy = "use another --log-file for another list"
    if state.about["backend"] != asked.given.backend:
        raise ConfigError(f"{asked.given.log_file}: was begun with --backend {state.about['backend']}; {remedy}")
    if state.about["cwd"] != str(Path.cwd()):
        raise ConfigError(f"{asked.given.log_file}: was begun in {state.about['cwd']}; call it from there, or {remedy}")
    if state.about["script"] != asked.script:
        raise ConfigError(f"{asked.given.log_file}: was begun with the script {state.about['script']}; {remedy}")
    if not set(state.jobs) & {job.id for job in asked.jobs}:
        held = console.plural(len(state.jobs), "job")
        raise ConfigError(f"{asked.given.log_file}: holds {held}, none of them in this list; {remedy}")
    raise_faults([fault for job in asked.jobs if (fault := other_base(state.jobs.get(job.id), job))])


def other_base(known: JobState | None, job: Job) -> str:
    """Why a job cannot go on: it has run from another base model than it would now. Empty: it can."""
    if known is None or known.job.base == job.base or known.state not in ("running", "ending", "done"):
        return ""
    was, now = (f"from base {hash_of(base)}" if base else "from no base model" for base in (known.job.base, job.base))
    return f"{job.name}: has run {was}, and would now run {now}; give it another prefix, or base_models as they were"


def dispatch(
    book: Journal, state: ListState, jobs: Sequence[Job], made: Sequence[JobServer], policy: Policy, log_file: Path,
    cache: Cache | None = None,
) -> int:  # fmt: skip
    """Work on the list until its end. Returns the exit code. cache: see Dispatcher."""
    results: Results
    dispatcher = Dispatcher(
        book, state, jobs, made, policy, log=lambda line: screen.say(line),
        on_change=lambda: setattr(results, "changed", True), cache=cache,
    )  # fmt: skip
    results = Results(log_file, state, dispatcher.links)
    screen = console.Screen(state, dispatcher.links)
    began = state.counts["done"]
    caught: list[int] = []
    # It warns of processes and pipes that end while it looks at them: what that means is reported as it concerns jobs.
    logging.getLogger("asyncio").setLevel(logging.ERROR)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
        writing = asyncio.ensure_future(write_now_and_then())
        try:
            await dispatcher.run()
        finally:
            writing.cancel()

    def stop(number: int) -> None:
        caught.append(number)
        dispatcher.interrupt(f"{signal.Signals(number).name} was received")

    async def write_now_and_then() -> None:
        while True:
            before = results.trouble
            results.write()
            if results.trouble and results.trouble != before:
                screen.say(f"{results.trouble}; trying again")
            screen.refresh()
            await asyncio.sleep(WRITE)

    with screen:
        total = len(state.jobs)
        done = f", {began} of them done" if began else ""
        screen.say(f"{console.plural(total, 'job')}{done}; results: {log_file}, {log_file.with_suffix('.html')}")
        asyncio.run(work())
    outcome, code = ending(state, caught, policy)
    results.write(outcome, dispatcher.interrupted, last=True)
    report_end(state, outcome, results, log_file, screen.put)
    screen.end()
    servers.remove_sockets(state.id)
    return code


def ending(state: ListState, caught: Sequence[int], policy: Policy) -> tuple[str, int]:
    """(state of the list, exit code)."""
    counts = state.counts
    if caught:
        return "interrupted", 128 + caught[0]
    if any(True for _ in state.unfinished()):
        return ("paused" if state.paused else "interrupted"), 0 if policy.drain else STOPPED
    if counts["failed"]:
        return "finished", 1
    if any(job.state == "cancelled" and not job.unlisted for job in state.jobs.values()):
        return ("cancelled" if not counts["done"] else "finished"), 0 if policy.drain else 1
    return "finished", 0


def report_end(state: ListState, outcome: str, results: Results, log_file: Path, put: Callable[[str], None]) -> None:
    """The last lines."""
    counts = state.counts
    words = [f"{counts['done']} of {len(state.jobs)} done"]
    words += [f"{counts[name]} {name}" for name in ("failed", "cancelled", "waiting") if counts[name]]
    going = counts["running"] + counts["ending"]
    line = f"{outcome}: {', '.join(words)}"
    if going:
        line += f"; {going} still running, and not disturbed by this"
    put(line)
    failed = [each for each in state.jobs.values() if each.state == "failed"]
    for job in failed[:SHOWN]:
        put(f"  failed: {job.job.id}  {job.job.name}: {job.reason}")
    if failed[SHOWN:]:
        put(f"  failed: {len(failed) - SHOWN} more; `status` shows all")
    if failed:
        put(f"see the output:  {called(f'why {failed[0].job.id}', log_file)}")
        put(f"run them again:  {called('retry failed', log_file)}")
    for server in sorted({attempt.server for attempt in state.lost_attempts()}):
        put(f"{server}: was lost; what ran there may still run. When it is back: {called('cancel all', log_file)}")
    if outcome in ("paused", "interrupted"):
        put(f"to go on:        {called('resume', log_file)}")
        put(f"to end the list: {called('cancel all', log_file)}")
    if results.trouble:
        put(f"  {results.trouble}: the results are not complete; the journal is")
    put(f"results: {log_file}, {log_file.with_suffix('.html')}")


# ---------------------------------------------------------------- --plan


def show_plan(asked: Call) -> int:
    """Where and when each job would run that has not ended yet."""
    pools: dict[str, SlotPool] = {server.pool.name: server.pool for server in make_servers(asked, "plan")}
    for pool in pools.values():
        pool.open = True
    path = journal_of(asked.given.log_file)
    state = state_of(path) if path.exists() else ListState()
    refuse_other_list(state, asked)
    left = [job for job in asked.jobs if job.id not in state.jobs or state.jobs[job.id].state not in FINAL]
    jobs = {job.id: job for job in left if not (job.trains and in_cache(asked.cache, job.trains))}
    usual = mean_seconds(asked.jobs)
    steps = plan(jobs.values(), pools, lambda job: job.options.seconds(usual))
    table = [("start", "expected", "where", "id", "output")]
    for start, job_id, server, slots in steps:
        where = ",".join(str(slot.index if slot.gpu is None else slot.gpu) for slot in slots)
        expected = jobs[job_id].options.expected_seconds
        table.append((
            console.clock(start), "?" if expected is None else console.clock(expected), f"{server}:{where}",
            job_id, jobs[job_id].output,
        ))  # fmt: skip
    unknown = sum(job.options.expected_seconds is None for job in jobs.values())
    show(table if unknown < len(jobs) else [row[2:] for row in table])
    slots_in_all = sum(len(pool.slots) for pool in pools.values())
    print(
        f"{console.plural(len(jobs), 'job')} on {console.plural(slots_in_all, 'slot')} of "
        f"{console.plural(len(pools), 'server')}; no two write the same directory"
    )
    end = max((start + jobs[job_id].options.seconds(usual) for start, job_id, _, _ in steps), default=0.0)
    print(expected_duration(end, unknown, len(jobs)))
    if ended := len(asked.jobs) - len(jobs):
        print(f"{console.plural(ended, 'job')} of the list: already done, failed or cancelled")
    existing = [job.output for job in jobs.values() if host.owner_of(job.output)]
    if existing:
        shown = f"{', '.join(existing[:5])}{' ...' if len(existing) > 5 else ''}"
        print(f"there already: {shown}; their jobs go on from what is there")
    print("nothing was started")
    return 0


def in_cache(cache: Cache, digest: str) -> bool:
    """Whether a base model need not be trained."""
    try:
        cache.verify(digest)
    except BaseModelError:
        return False
    return True


def expected_duration(end: float, unknown: int, jobs: int) -> str:
    """Of a plan. unknown: so many of its jobs do not say how long they take."""
    if unknown == jobs:
        return "expected duration: not known; say _expected_seconds in the jobs"
    counted = f" ({console.plural(unknown, 'job')} without _expected_seconds: counted as the mean)" if unknown else ""
    return f"expected duration: {duration(end)}{counted}"


# ---------------------------------------------------------------- commands about a list


def show(rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> None:
    """The first row holds the headings. below: a line for each row, empty for none."""
    for number, line in enumerate(terminal.table(rows)):
        terminal.show((line if number else terminal.paint(line, terminal.BOLD)) + "\n")
        if below and below[number]:
            print(below[number])


def state_of(path: Path) -> ListState:
    return ListState.of(journal.read(path)[0])


def status(given: argparse.Namespace, path: Path) -> int:
    """Every job in a line, and below it why it is not done."""
    records, lives = journal.read(path)[0], journal.dispatcher_runs(path)
    state = ListState.of(records)
    newest_metrics(state, given.log_file)
    asked = {job: record["event"] for record in unhandled_requests(state, records) for job in record["jobs"]}
    table: list[Sequence[str]] = [("id", "job", "state", "where", "time", "step", "loss", "held-out")]
    for job in state.jobs.values():
        last = job.last
        took = "" if last is None else console.clock((last.end or time.time()) - last.start)
        place = place_of(last) if last else ""
        table.append((job.job.id, job.job.name, shown_state(job, asked), place, took, *console.measured(job)))
    reasons = [f"            {reason}" if (reason := reason_of(state, job)) else "" for job in state.jobs.values()]
    show(table, ["", *reasons])
    print(console.totals(state))
    if any(True for _ in state.unfinished()) or asked:
        resume = called("resume", given.log_file)
        print("a dispatcher works on this list" if lives else f"no dispatcher runs; to go on: {resume}")
    if state.paused:
        print(f"paused: {state.paused}")
    for line in servers_without_jobs(given.log_file) if lives else ():
        print(line)
    return 1 if state.counts["failed"] else 0


def reason_of(state: ListState, job: JobState) -> str:
    """Why a job is in its state."""
    trainer = state.waits_for(job)
    return job.reason or (f"waits for base {hash_of(job.job.base)}: {trainer.state}" if trainer else "")


def servers_without_jobs(log_file: Path) -> list[str]:
    """Servers that get none now, and why, as the dispatcher has written into the results."""
    shown = {"refused": "not used: ", "unreachable": "unreachable: "}
    try:
        known = json.loads(log_file.read_bytes())["servers"]
        found = [(name, shown.get(each["state"], ""), each["reason"]) for name, each in known.items()]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"{name}: {state}{reason}" for name, state, reason in found if reason]


def newest_metrics(state: ListState, log_file: Path) -> None:
    """Of jobs that run: a dispatcher writes them into the results alone."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for entry in json.loads(log_file.read_bytes())["jobs"]:
            job = state.jobs.get(entry["id"])
            if job and job.state == "running":
                job.metrics |= entry["metrics"]


def shown_state(job: JobState, asked: Mapping[str, str]) -> str:
    """With what was asked for and has not happened yet."""
    if job.job.id in asked:
        return f"{job.state}, {asked[job.job.id]} asked for"
    if job.cancel and job.state not in FINAL:
        return "cancelling"
    again = f", attempt {job.last.number}" if job.last and job.last.number > 1 else ""
    return {"ending": "copying results"}.get(job.state, job.state) + again


def place_of(attempt: Attempt) -> str:
    return f"{attempt.server}:{','.join(map(str, attempt.gpus or attempt.slots))}"


def why(given: argparse.Namespace, path: Path) -> int:
    """All that is known of one job."""
    state = state_of(path)
    job = state.jobs[find_job(state, given.job)]
    told = any(job.reason.endswith(attempt.failure_text) for attempt in job.attempts if attempt.failure)
    print(f"{job.job.id}  {job.job.name}: {job.state}" + (f": {job.reason}" if job.reason and not told else ""))
    print(f"  output: {job.job.output}")
    for attempt in job.attempts:
        print("  " + attempt_line(attempt))
        for line in attempt.lines:
            print(f"      {line}")
    for line in explanation(state, job, given.log_file):
        print(f"  {line}")
    return 0


def attempt_line(attempt: Attempt) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.start))
    took = f", {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    end = attempt.state if attempt.open else attempt.failure_text if attempt.failure else "done"
    host = f" ({attempt.process['host']})" if attempt.process.get("host") else ""
    return f"attempt {attempt.number} on {place_of(attempt)}{host}, {began}{took}: {end}"


def explanation(state: ListState, job: JobState, log_file: Path) -> list[str]:
    """Why it is not further."""
    if job.state in FINAL:
        trainer = None if job.state == "done" else state.waits_for(job)
        why_base = [f"its base model: {called(f'why {trainer.job.id}', log_file)}"] if trainer else []
        again = f"to run it again: {called(f'retry {job.job.id}', log_file)}"
        return [] if job.state == "done" else [*why_base, again]
    paused = [f"the list is paused: {state.paused}"] if state.paused and job.state == "waiting" else []
    if not journal.dispatcher_runs(journal_of(log_file)):
        return [*paused, f"no dispatcher runs: nothing is started or noticed until {called('resume', log_file)}"]
    if paused or job.state != "waiting":
        return paused
    if trainer := state.waits_for(job):
        return [f"waits for base {hash_of(job.job.base)}, which {trainer.job.id} trains: {trainer.state}"]
    waiting = [each for each in state.jobs.values() if each.state == "waiting"]
    usual = mean_seconds(each.job for each in state.jobs.values())
    mine = sort_key(job.job, usual, job.number)
    before = sum(sort_key(each.job, usual, each.number) < mine for each in waiting)
    lines = [f"waits for a free slot; {console.plural(before, 'job')} of the list before it"]
    needs = [f"{job.job.options.gpus} GPUs of one server"] if job.job.options.gpus > 1 else []
    needs += [f"a server with the labels {', '.join(job.job.options.labels)}"] if job.job.options.labels else []
    lines += [f"needs {' and '.join(needs)}"] if needs else []
    return lines + servers_without_jobs(log_file)


def logs(given: argparse.Namespace, path: Path) -> int:
    """The output of an attempt."""
    path = path.absolute()
    state = state_of(path)
    job = state.jobs[find_job(state, given.job)]
    attempt = job.last if given.attempt is None else state.attempt(f"{job.job.id}.{given.attempt}")
    if attempt is None:
        known = ", ".join(str(each.number) for each in job.attempts)
        raise ValueError(
            f"{job.job.name}: it has no such attempt; " + (f"there are {known}" if known else "it was never started")
        )
    log = Path(state.about["cwd"], "logs", "jobs", state.id, attempt.name, f"node_{attempt.server}.log")
    if attempt.open or not log.exists():
        asked = stored_call(state)
        server = next((each for each in make_servers(asked, state.id) if each.name == attempt.server), None)
        if server is None:
            raise ValueError(f"{attempt.server}: no longer in the cluster config: its log cannot be read from here")
        command = server.follow_command(attempt)
        if not given.follow:
            command = server.follow_command(attempt, once=True)
        try:
            return 0 if subprocess.call(command) in (0, -signal.SIGINT) else 1
        finally:
            if not journal.dispatcher_runs(path):  # it uses the same files
                servers.remove_sockets(state.id)
    with log.open("rb") as file:
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    return 0


def stored_call(state: ListState) -> Call:
    """The call that began the list, or went on with it last."""
    os.chdir(state.about["cwd"])
    said: dict[str, Any] = {"two_phase": False, **BASE_OPTIONS, **state.about["call"]}
    for name in ("cluster_config", "jobs_config", "base_models"):
        said[name] = Path(said[name]) if said.get(name) else None
    given = argparse.Namespace(**said, plan=False)
    cluster = read_cluster(given.cluster_config) if given.cluster_config else None
    return Call(given, cluster, [job.job for job in state.jobs.values()], Cache(Path.cwd()))


def cancel(given: argparse.Namespace, path: Path) -> int:
    """Ask the dispatcher; where none runs, do its work for these jobs."""
    records = journal.read(path)[0]
    state = ListState.of(records)
    jobs = select_jobs(state, "cancel", given.jobs)
    if "all" in given.jobs:
        retried = (
            job for each in unhandled_requests(state, records) if each["event"] == "retry" for job in each["jobs"]
        )
        jobs = list(dict.fromkeys([*jobs, *retried]))
    if not jobs and not state.lost_attempts():
        print("nothing to cancel: no job is waiting or running")
        return 0
    if jobs:
        journal.request(path, "cancel", jobs)
    if journal.dispatcher_runs(path):
        return wait_until_final(path, jobs)
    here, log_file = Path.cwd(), absolute(given.log_file)
    with Journal.open(journal_of(log_file)) as book:
        state = ListState.of(book.records)
        asked = stored_call(state)
        shown = from_here(log_file) if Path.cwd() == here else log_file
        policy = policy_of(asked.given, drain=True)
        code = dispatch(book, state, asked.jobs, make_servers(asked, state.id), policy, shown, asked.cache)
    return code or all_ended(state, jobs)


def all_ended(state: ListState, jobs: Sequence[str]) -> int:
    """The exit code of `cancel`: 1 when something of these jobs may still run."""
    return 1 if state.lost_attempts() or any(state.jobs[job].state not in FINAL for job in jobs) else 0


def wait_until_final(path: Path, jobs: Sequence[str]) -> int:
    """Until the dispatcher has settled these jobs."""
    told: set[str] = set()
    while True:
        records = journal.read(path)[0]
        state = ListState.of(records)
        asked = {job for each in unhandled_requests(state, records) for job in each["jobs"]}
        for job in map(state.jobs.__getitem__, jobs):
            if job.state not in FINAL or job.job.id in told | asked:
                continue
            told.add(job.job.id)
            print(f"{job.state}: {job.job.name}" + (f": {job.reason}" if job.reason else ""), flush=True)
        if len(told) == len(jobs):
            return all_ended(state, jobs)
        if not journal.dispatcher_runs(path):
            print("the dispatcher has ended before all were cancelled: call `cancel` again", file=sys.stderr)
            return 1
        time.sleep(0.2)


def absolute(path: Path) -> Path:
    """Without `..`, whatever the working directory will be."""
    return path.parent.resolve() / path.name


def from_here(path: Path) -> Path:
    """Relative to the working directory, where it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def retry(given: argparse.Namespace, path: Path) -> int:
    """Ask for another attempt."""
    state = state_of(path)
    jobs = [job for job in select_jobs(state, "retry", given.jobs) if state.jobs[job].state in ("failed", "cancelled")]
    if not jobs:
        print("nothing to retry: no such job has failed or was cancelled")
        return 0
    journal.request(path, "retry", jobs)
    start = "" if journal.dispatcher_runs(path) else f"; to start: {called('resume', given.log_file)}"
    print(f"{console.plural(len(jobs), 'job')} to run again{start}")
    return 0


def resume(given: argparse.Namespace, path: Path) -> int:
    """The call that began the list, once more."""
    here, log_file = Path.cwd(), absolute(given.log_file)
    said = stored_call(state_of(path)).given
    said.log_file = from_here(log_file) if Path.cwd() == here else log_file
    return run(said)
