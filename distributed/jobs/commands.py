"""Run a list of training jobs on GPU servers, on this machine or on SLURM.

usage: run_distributed_training.py --cluster-config FILE --jobs-config FILE [option...]
       run_distributed_training.py status|logs|why|cancel|retry|add|resume|close [--log-file FILE] ...

  --cluster-config FILE  servers (JSON); optional with --backend local
  --jobs-config FILE     jobs (JSON): a list of objects, whose keys are arguments of the script or, with the prefix _,
                         options of the job
  --log-file FILE        results of the list (default: results.json). Beside it are the page results.html and
                         results.journal, from which `resume` continues the list
  --backend NAME         ssh (default), local (this machine, without SSH) or slurm (sbatch arrays)
  --script PATH          script to run (default: script_path of the cluster config; without it, ./train.py or Muster's)
  --slots N              local: concurrent jobs per GPU (default: 1); without GPUs, concurrent jobs in total (default:
                         half the number of cores)
  --sync                 ssh: first copy the working directory to the servers: tracked files, and untracked files that
                         git does not ignore, except those in logs, checkpoints and experiments; outside a git checkout,
                         all files except those in logs, checkpoints, experiments and .venv
  --retries N            retries of a failed job, for jobs without the option _retries (default: 1)
  --max-failures N       start no more jobs after N have failed (the list is then paused)
  --fail-fast            when a job fails, cancel all other jobs of the list
  --notify COMMAND       run COMMAND when the list is paused, at its first failure and at its end, with the event as
                         JSON on its standard input (default: $MUSTER_NOTIFY)
  --gpu-free-mib N       use only GPUs with at least N MiB of free memory (default: GPUs of which other processes use
                         at most 1000 MiB)
  --lost-after SECONDS   ssh: time after which the jobs of an unreachable server are restarted elsewhere (default: 600)
  --grace SECONDS        time between SIGTERM and SIGKILL (default: 30)
  --no-tmux              create no tmux sessions on the servers (they show the output of the jobs)
  --plan                 print where each job would run, in the order of the starts; start nothing
  --help                 show this help; after a subcommand, its own help

  status                 show the state of every job, and where it runs
  logs JOB [--follow]    print the output of the last attempt of a job; --attempt N: that of attempt N
  why JOB                explain the state of a job, and show its attempts
  cancel JOB...|all      stop jobs, and verify that none of their processes remain
  retry failed|JOB...    run failed or cancelled jobs again, at the next `resume` if the list has ended
  add FILE               add the jobs of a file to the list, also while the list runs; the option _after of these jobs
                         may name jobs of the list
  resume                 continue the list
  close                  remove the tmux sessions of the list; otherwise the next list on the same server removes
                         them

JOB is an id, a name, or an unambiguous part of one: the start of an id, or any part of a name. A job with the option
_after starts when the jobs that it names are done. Each start of a job is an attempt.

To continue an interrupted list, run the same command again, or `resume`: running jobs continue, waiting jobs are
started, and done, failed and cancelled jobs are not run again.

Exit codes: 0 all jobs are done; 1 a job failed or was cancelled; 2 wrong call or configuration; 69 a package is
missing; 75 the list was paused; 129 SIGHUP; 130 Ctrl-C; 143 SIGTERM. `resume` continues the list after 75,
129, 130 and 143; after a signal, running jobs continue.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
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
from distributed.files import KIT, user_file, version
from distributed.host import signals, sync_list
from distributed.jobs.dispatch.dispatcher import Dispatcher
from distributed.jobs.dispatch.limits import Policy
from distributed.jobs.dispatch.recorder import Recorder, Shown
from distributed.jobs.host import outputs, panes
from distributed.jobs.host.host_attempt import NOTHING_WRITTEN
from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import Journal, JournalError, request_id
from distributed.jobs.journal.state import FINAL, Attempt, JobState, ListState, job_records
from distributed.jobs.lists import bases
from distributed.jobs.lists.config import (
    MAX_SLOTS,
    ClusterConfig,
    ConfigError,
    collisions,
    raise_faults,
    read_cluster,
    read_jobs,
    refuse_planted,
    script_of,
)
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import JobServer, ServerLink, ServerUnusable, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import SlotPool, mean_seconds, plan, sort_key
from distributed.jobs.servers import host_server, sockets, ssh_server
from distributed.jobs.servers.context import ListContext
from distributed.jobs.show import console
from distributed.jobs.show.results import Results, phase_files
from distributed.launch import forwarding, supervisor
from distributed.launch.notify import Notifier
from distributed.terminal import duration, plural
from distributed.training.base_model import BaseModelError, hash_of
from distributed.training.fold import default_participants
from distributed.trust import parse_json, printable, read_bytes

PROGRAM = "run_distributed_training.py"
TWO_PHASE = "run_two_phase_training.py"
PROGRAMS = (PROGRAM, TWO_PHASE, "distributed_train_helper.py")
BACKENDS = ("ssh", "local", "slurm")
SHOWN = 10  # maximum number of failed jobs in the summary, and of data leaks (see leak_warnings) in one message
WRITE_INTERVAL = 0.5  # seconds between checks whether to write the results, and between updates of the table
BASE_OPTIONS = {  # options of run_two_phase_training.py, with their defaults
    "base_models": None, "skip_phase1": False, "refuse_leaks": False, "evict_after_copy": False,
}  # fmt: skip
NOT_STORED = ("plan", "log_file")  # all other options of the last call are restored by `resume`


def command_line(arguments: str, log_file: Path) -> str:
    """A command of the running program, ready to paste into a shell."""
    start = f"python {shlex.quote(sys.argv[0])}" if Path(sys.argv[0]).name in PROGRAMS else PROGRAM
    option = "" if str(log_file) == "results.json" else f" --log-file {shlex.quote(str(log_file))}"
    return f"{start} {arguments}{option}"


def program_name() -> str:
    """The name of the running program, for messages."""
    name = Path(sys.argv[0]).name
    return name if name in PROGRAMS else PROGRAM


def say(line: str) -> None:
    """Print a line without control characters, which texts of servers and jobs may contain."""
    print(printable(line), flush=True)


class CallError(Exception):
    """A wrong call."""


class CommandParser(argparse.ArgumentParser):
    """Raises CallError, where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise CallError(message)


# ---------------------------------------------------------------- arguments


def run_parser(two_phase: bool = False) -> CommandParser:
    """The parser of a call that runs a list. two_phase: with the options of run_two_phase_training.py."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.set_defaults(two_phase=two_phase, **BASE_OPTIONS)
    if two_phase:
        parser.add_argument("--base-models", type=Path)
        for name in ("--skip-phase1", "--refuse-leaks", "--evict-after-copy"):
            parser.add_argument(name, action="store_true")
    parser.add_argument("--cluster-config", type=Path)
    parser.add_argument("--jobs-config", type=Path)
    parser.add_argument("--log-file", type=results_file, default=Path("results.json"))
    parser.add_argument("--backend", choices=BACKENDS, default="ssh")
    parser.add_argument("--script", "--script-path")
    parser.add_argument("--slots", type=positive)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--retries", type=non_negative)
    parser.add_argument("--max-failures", type=positive)
    parser.add_argument("--fail-fast", action="store_true")
    parser.add_argument("--notify", default="")
    parser.add_argument("--gpu-free-mib", type=non_negative)
    parser.add_argument("--lost-after", type=non_negative, default=600)
    parser.add_argument("--grace", type=non_negative, default=30)
    parser.add_argument("--no-tmux", action="store_true")
    parser.add_argument("--plan", action="store_true")
    return parser


def subcommand_parser(name: str) -> CommandParser | None:
    """The parser of a subcommand; None if SUBCOMMANDS does not contain this name."""
    if name not in SUBCOMMANDS:
        return None
    parser = CommandParser(prog=f"{program_name()} {name}", description=SUBCOMMANDS[name].__doc__, allow_abbrev=False)
    parser.add_argument("--log-file", type=results_file, default=Path("results.json"), metavar="FILE",
        help="results of the list (default: results.json)")  # fmt: skip
    job = "an id, a name, or an unambiguous part of one: the start of an id, or any part of a name"
    if name in ("logs", "why"):
        parser.add_argument("job", metavar="JOB", help=job)
    if name in ("cancel", "retry"):
        every = "all: every unfinished job" if name == "cancel" else "failed: all failed jobs"
        parser.add_argument("jobs", nargs="+", metavar="JOB", help=f"{job}; {every}")
    if name == "add":
        parser.add_argument("file", type=Path, metavar="FILE",
            help="jobs (JSON); their option _after may name jobs of the list")  # fmt: skip
    if name == "logs":
        parser.add_argument("--follow", action="store_true", help="print new output until the attempt ends")
        parser.add_argument("--attempt", type=positive, metavar="N", help="attempt N (default: the last one)")
    return parser


def results_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file name that ends with .json, got {text!r}")
    return path


def positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def non_negative(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, got {text!r}")
    return int(text)


def main(
    arguments: Sequence[str], execute: Callable[[list[str]], int] | None = None, help_text: str | None = __doc__,
    parser_of: Callable[[str], CommandParser | None] = subcommand_parser,
) -> int:  # fmt: skip
    """Run a program and return its exit code. The defaults are those of run_distributed_training.py.

    parser_of: returns the parser of a subcommand; --help then prints the help of this parser instead of help_text.
    """
    try:
        if "--help" in arguments or "-h" in arguments:
            code = 0
            parser = parser_of(arguments[0])
            sys.stdout.write(parser.format_help() if parser else help_text or "")
        elif "--version" in arguments[:1]:
            code = 0
            print(f"Muster {version()}")
        else:
            code = (execute or execute_command)(list(arguments))
        if sys.stdout:  # None if it was closed before Python started
            sys.stdout.flush()
        return code
    except CallError as error:
        return report_error(f"{error}\nTry: {program_name()} --help")
    except (JournalError, ValueError) as error:
        return report_error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        return report_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def report_error(message: str) -> int:
    for line in message.splitlines():
        start = "" if line.startswith("Try: ") else f"{program_name()}: "
        sys.stderr.write(f"{start}{printable(line)}\n")
    return WRONG_CALL


def execute_command(arguments: list[str]) -> int:
    code = execute_subcommand(arguments)
    return run(run_parser().parse_args(arguments)) if code is None else code


def execute_subcommand(arguments: list[str]) -> int | None:
    """Execute one of SUBCOMMANDS and return its exit code; None if there is no subcommand."""
    if arguments and (parser := subcommand_parser(arguments[0])):
        options = parser.parse_args(arguments[1:])
        path = journal_of(options.log_file)
        if not path.exists():
            raise CallError(f"{options.log_file}: no job list ({path} is missing); give its results with --log-file")
        if not journal.has_list(path):
            raise CallError(f"{path}: contains no job list; rerun the command that starts the list")
        return SUBCOMMANDS[arguments[0]](options, path)
    if arguments and not arguments[0].startswith("-"):
        known = [*SUBCOMMANDS, *(["cache"] if program_name() == TWO_PHASE else [])]
        raise CallError(f"{arguments[0]}: unknown command; known commands: {', '.join(known)}")
    return None


def journal_of(results: Path) -> Path:
    """The path of the journal of a list."""
    return results.with_suffix(".journal")


# ---------------------------------------------------------------- run a list


@dataclass(frozen=True)
class ListConfig:
    """The options of a call, and the checked contents of the configuration files that these options name."""

    options: argparse.Namespace
    cluster: ClusterConfig | None
    script: str
    jobs: list[Job]
    cache: Cache
    warnings: Sequence[str] = ()  # printed before the list starts


def read_config(options: argparse.Namespace) -> ListConfig:
    """Read both configurations. Raises ConfigError and CallError."""
    if options.jobs_config is None:
        raise CallError("--jobs-config: missing; give the JSON file with the jobs")
    if options.cluster_config is None and options.backend != "local":
        raise CallError("--cluster-config: missing; give the JSON file with the servers, or use --backend local")
    cluster = read_cluster(options.cluster_config) if options.cluster_config else None
    if options.slots and options.slots > MAX_SLOTS:
        raise CallError(f"--slots {options.slots}: expected at most {MAX_SLOTS}")
    if options.slots and options.backend != "local":
        raise CallError("--slots: only for --backend local; set slots_per_gpu of the servers")
    if options.sync and options.backend != "ssh":
        raise CallError(f"--sync: only for --backend ssh; with --backend {options.backend} nothing is copied")
    if options.sync:
        try:
            names = sync_list.names_of(str(Path.cwd()))
        except sync_list.SyncError as error:
            raise ConfigError(f"--sync: {error}") from None
        if warning := sync_list.secrets_warning(str(Path.cwd()), names):
            sys.stderr.write(f"{program_name()}: warning: --sync: {warning}\n")
    script = script_of(options.script, cluster)
    if options.backend == "local" and not Path(script).is_file():
        raise ConfigError(f"script {script}: no such file in {Path.cwd()}; give its path with --script")
    jobs = read_jobs(options.jobs_config, default_participants(script), options.retries)
    config = ListConfig(options, cluster, script, jobs, Cache(Path.cwd()))
    return with_bases(config, [*jobs, *previously_added(config, state_of(journal_of(options.log_file)))])


def with_bases(config: ListConfig, jobs: Sequence[Job]) -> ListConfig:
    """The list with these jobs, each with its base model. In a two-phase list, jobs that train base models come first.

    Raises ConfigError for the same faults as plan_of(), with_base_models() and with_digest(), and with --refuse-leaks
    also for a leak.
    """
    options, cache = config.options, config.cache
    warnings: list[str] = []
    if options.two_phase:
        rules = bases.rules_of(options.base_models, config.cluster, config.script)
        plan = bases.plan_of(jobs, rules)
        warnings = leak_warnings(plan, rules)
        if warnings and options.refuse_leaks:
            raise ConfigError("\n".join(warnings) + ", or run without --refuse-leaks")
        jobs = with_base_models(options, rules, plan, cache)
    return replace(config, jobs=[with_digest(job, cache) for job in jobs], warnings=warnings)


def previously_added(config: ListConfig, state: ListState) -> list[Job]:
    """The jobs that `add` has added to a list, from the journal.

    The journal has no values of _env; they are read again from the files that were given to `add`. config: contains
    the jobs of --jobs-config. Raises ConfigError if the _env of an unfinished job, or a job that it waits for, is
    missing, or if two jobs would write the same directory.
    """
    ids = {job.id for job in config.jobs}
    added = {job: each for job, each in state.jobs.items() if each.job.file and job not in ids}
    options = config.options
    rules = bases.rules_of(options.base_models, config.cluster, config.script) if options.two_phase else None
    listed = [*config.jobs, *(each.job for each in added.values())]
    env: dict[str, Mapping[str, str]] = {}
    errors: dict[str, str] = {}
    for file in {each.job.file for each in added.values() if each.job.options.env}:
        try:
            jobs = read_jobs(Path(file), default_participants(config.script), listed=listed)
            env |= {job.id: job.options.env for job in jobs}
        except ConfigError as error:
            errors[file] = f" ({str(error).splitlines()[0]})"
    restored, faults = [], []
    for each in added.values():
        job, remedy = each.job, f"restore it, or run {command_line(f'cancel {each.job.id}', options.log_file)}"
        if job.options.env and job.id not in env:
            if each.state not in FINAL:
                faults.append(f"{job.name}: {job.file} no longer has its _env{errors.get(job.file, '')}; {remedy}")
            if each.state != "done":
                continue
        for needed in job.options.after:
            lost = needed not in ids | added.keys() and (needed not in state.jobs or state.jobs[needed].state != "done")
            if lost and each.state not in FINAL:
                faults.append(f"{job.name}: waits for job {needed}, which is no longer in the list; {remedy}")
        # If the job is in a two-phase list and needs a base model, with_bases() chooses the base model again.
        planned = rules is not None and rules.needs_base(job)
        base_hash = None if planned else job.options.base_model_hash
        job_options = replace(job.options, env=env.get(job.id, job.options.env), base_model_hash=base_hash)
        restored.append(replace(job, options=job_options, base="", leak=""))
    raise_faults([*faults, *collisions({job.id: job for job in [*config.jobs, *restored]})])
    return restored


def jobs_to_add(config: ListConfig, job_servers: Sequence[JobServer], jobs: Sequence[Job], file: str) -> list[Job]:
    """The jobs of a file that are not in the list, and the jobs that train their base models. Raises ConfigError.

    job_servers: servers of the running list; each gets more slots if its number of slots depends on the jobs (SLURM).
    jobs: all jobs of the list.
    """
    listed, known = [job for job in jobs if not job.trains], {job.id for job in jobs}
    in_file = read_jobs(Path(file), default_participants(config.script), config.options.retries, listed)
    new = [replace(job, file=file) for job in in_file if job.id not in known]
    added = [job for job in with_bases(config, [*listed, *new]).jobs if job.id not in known] if new else []
    larger = make_servers(replace(config, jobs=[*jobs, *added]), "new")
    refuse_unplaceable_jobs(added, larger)
    refuse_foreign_outputs(replace(config, jobs=added))
    for server, other in zip(job_servers, larger, strict=False):
        server.pool.grow(other.pool.slots)
    return added


def leak_warnings(plan: bases.BasePlan, rules: bases.Rules) -> list[str]:
    """Lines about jobs whose base model is, or may be, trained on the participant that they hold out."""
    unknown = [
        f"{base.subject}: its participants are unknown on this machine, cannot check for leaks; set participants"
        for base in bases.not_checked(plan, rules)
    ]
    found = [*bases.leaks(plan), *unknown]
    more = [f"and {len(found) - SHOWN} more"] if found[SHOWN:] else []
    return [*found[:SHOWN], *more, bases.LEAK_REMEDY] if found else []


def with_base_models(options: argparse.Namespace, rules: bases.Rules, plan: bases.BasePlan, cache: Cache) -> list[Job]:
    """The jobs that train base models (none with --skip-phase1), then the jobs of the plan.

    Raises ConfigError if, with --skip-phase1, the cache does not contain a valid copy of each base model.
    """
    if not options.skip_phase1:
        return [*(bases.training_job(base, rules, options.retries) for base in plan.bases.values()), *plan.jobs]
    faults = []
    for base in plan.bases.values():
        try:
            cache.verify(base.digest)
        except BaseModelError as error:
            faults.append(f"{base.subject}: {error}; remove --skip-phase1")
    if faults:  # raise_faults() would shorten a long list, but the user must see every missing base model
        raise ConfigError("\n".join(faults))
    return list(plan.jobs)


def with_digest(job: Job, cache: Cache) -> Job:
    """The job with the digest that its _base_model_hash abbreviates. Raises ConfigError if the cache lacks it."""
    name = job.options.base_model_hash
    if name is None or job.base:
        return job
    try:
        return replace(job, base=cache.digest_of(name))
    except BaseModelError as error:
        raise ConfigError(
            f"{job.name}: _base_model_hash={name}: {error}; train it with run_two_phase_training.py"
        ) from None


def make_servers(config: ListConfig, list_id: str) -> list[JobServer]:
    """The servers of a list. Raises ConfigError for a missing ssh_key file, and for faults in $MUSTER_FORWARD."""
    options = config.options
    try:
        forwarded = forwarding.forwarded(os.environ)
    except forwarding.ForwardingError as error:
        raise ConfigError(str(error)) from None
    context = ListContext(
        list_id, Path.cwd(), config.script, grace=float(options.grace), panes=not options.no_tmux, sync=options.sync,
        cache=config.cache, forwarded=forwarded,
    )  # fmt: skip
    if options.backend == "local":
        return [host_server.local_server(context, options.slots)]
    assert config.cluster
    if options.backend == "slurm":
        from distributed.jobs.servers.slurm_server import SlurmServer

        return [SlurmServer(config.cluster, context, sum(max(1, job.options.gpus) for job in config.jobs))]
    for server in config.cluster.servers:
        if server.ssh_key and not Path(server.ssh_key).expanduser().is_file():
            raise ConfigError(f"{options.cluster_config}: {server.host}: ssh_key={server.ssh_key}: no such file")
    return [ssh_server.SshServer(server.name, server, context) for server in config.cluster.servers]


def refuse_unplaceable_jobs(jobs: Sequence[Job], job_servers: Sequence[JobServer]) -> None:
    """Raises ConfigError if no server has the labels of a job and enough GPUs for it."""
    pools = [server.pool for server in job_servers]
    faults = []
    for job in jobs:
        labels = frozenset(job.options.labels)
        if not any(labels <= pool.labels for pool in pools):
            faults.append(f"{job.name}: no server has the labels {', '.join(sorted(labels))}")
        elif not any(labels <= pool.labels and job.options.gpus <= pool.capacity() for pool in pools):
            most = max(pool.capacity() for pool in pools if labels <= pool.labels)
            faults.append(f"{job.name}: _gpus={job.options.gpus}: no matching server has more than {most}")
    raise_faults(faults)


def run(options: argparse.Namespace) -> int:
    """Run or continue a list. Returns the exit code."""
    config = read_config(options)
    # If --log-file is a link, this is the directory of the target.
    directory = os.path.dirname(os.path.realpath(options.log_file))
    if not os.path.isdir(directory):
        shown = directory if options.log_file.is_symlink() else options.log_file.parent
        raise CallError(f"--log-file {options.log_file}: no such directory: {shown}; create it")
    refuse_existing_results(options)
    refuse_unplaceable_jobs(config.jobs, make_servers(config, "new"))
    refuse_foreign_outputs(config)
    if options.plan:
        return show_plan(config)
    for line in config.warnings:
        sys.stderr.write(f"{program_name()}: warning: {line}\n")
    with Journal.open(journal_of(options.log_file)) as list_journal:
        state = ListState.of(list_journal.records)
        refuse_other_list(state, config)
        listed = {job.id for job in config.jobs}
        if any(each.job.file and each.job.id not in listed for each in state.unfinished()):
            raise CallError(f"{options.log_file}: jobs were added while the command started; run it again")
        call_options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items() if name not in NOT_STORED
        }  # fmt: skip
        record = list_journal.add(
            "list", list=state.id or secrets.token_hex(5), cwd=str(Path.cwd()), pid=os.getpid(),
            host=os.uname().nodename, call=call_options, backend=options.backend, script=config.script,
            jobs=job_records(config.jobs),
        )  # fmt: skip
        state.apply(record)
        list_journal.commit()
        return dispatch(list_journal, state, config, make_servers(config, state.id))


def refuse_existing_results(options: argparse.Namespace) -> None:
    """Raises CallError if a file that belongs to no list would be overwritten."""
    journal_path = journal_of(options.log_file)
    phases = phase_files(options.log_file) if options.two_phase else ()
    for path in (options.log_file, options.log_file.with_suffix(".html"), *phases):
        if path.exists() and not journal_path.exists():
            raise CallError(
                f"--log-file {options.log_file}: {path} exists, but not its journal ({journal_path}); move it away, or "
                "give another --log-file"
            )


def refuse_foreign_outputs(config: ListConfig) -> None:
    """Raises ConfigError if an output directory on this machine contains files that do not belong to its job.

    The owner file (.muster_job) names the job of a directory. A directory without this file is accepted for a job that
    this list has started, as a user may have removed the file, and for a job that trains a base model which is already
    in the cache.
    """
    faults = []
    found = (job for job in config.jobs if outputs.holds_foreign_files(job.output))
    foreign = {job.id for job in found if not (job.trains and in_cache(config.cache, job.trains))}
    if foreign:
        known = state_of(journal_of(config.options.log_file)).jobs.values()
        foreign -= {each.job.id for each in known if each.attempts}
    for job in config.jobs:
        try:
            outputs.refuse_obstacle(job.output)
            if job.id in foreign:
                outputs.refuse_foreign_files(job.output)
            outputs.refuse_other_owner(job.output, job.owner, bases.script_name(config.script))
        except outputs.JobRefused as error:
            faults.append(str(error))
    raise_faults(faults)


def refuse_other_list(state: ListState, config: ListConfig) -> None:
    """Raises ConfigError if the journal belongs to another list, or a job has run from another base model."""
    if not state.id:
        return
    log_file, remedy = config.options.log_file, "use another --log-file for another list"
    if state.list_record["backend"] != config.options.backend:
        raise ConfigError(f"{log_file}: was started with --backend {state.list_record['backend']}; {remedy}")
    if state.list_record["cwd"] != str(Path.cwd()):
        raise ConfigError(f"{log_file}: was started in {state.list_record['cwd']}; run the command there, or {remedy}")
    if bases.script_name(state.list_record["script"]) != bases.script_name(config.script):
        raise ConfigError(f"{log_file}: was started with the script {state.list_record['script']}; {remedy}")
    if not set(state.jobs) & {job.id for job in config.jobs if not job.file}:
        raise ConfigError(f"{log_file}: contains {plural(len(state.jobs), 'job')}, none of them in this list; {remedy}")
    raise_faults([fault for job in config.jobs if (fault := base_conflict(state.jobs.get(job.id), job))])


def base_conflict(known: JobState | None, job: Job) -> str:
    """An error message if a job has run from another base model than it would now, else an empty string."""
    if known is None or known.job.base == job.base or known.state not in ("running", "ending", "done"):
        return ""
    was, now = (f"from base {hash_of(base)}" if base else "from no base model" for base in (known.job.base, job.base))
    return f"{job.name}: has run {was}, but would now run {now}; change its prefix, or restore base_models"


def dispatch(
    list_journal: Journal, state: ListState, config: ListConfig, job_servers: Sequence[JobServer], drain: bool = False
) -> int:  # fmt: skip
    """Run a dispatcher with these servers until it returns. Returns the exit code. drain: see Policy."""
    options, log_file = config.options, config.options.log_file
    # Jobs of a lost SLURM cluster cannot run elsewhere.
    lost_after = float("inf") if options.backend == "slurm" else float(options.lost_after)
    policy = Policy(
        options.max_failures, options.fail_fast, lost_after, options.gpu_free_mib, drain, options.evict_after_copy
    )
    links = {server.name: ServerLink(server) for server in job_servers}
    screen, results = console.ListConsole(state, links), Results(log_file, state, links)
    command = "" if drain else options.notify or os.environ.get("MUSTER_NOTIFY", "")
    files = {"list": str(absolute(log_file)), "report": str(absolute(log_file.with_suffix(".html")))}
    notifier = Notifier(command, screen.log, str(log_file), **files)
    recorder = Recorder(list_journal, state, Shown(screen.log, results.note_change, notifier.send))
    read_added = functools.partial(jobs_to_add, config, job_servers)
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

    for number in supervisor.Supervisor.SIGNALS:
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


# ---------------------------------------------------------------- --plan


def show_plan(config: ListConfig) -> int:
    """Print where each unfinished job would run, in the order of the starts."""
    pools: dict[str, SlotPool] = {server.pool.name: server.pool for server in make_servers(config, "plan")}
    for pool in pools.values():
        pool.open = True
    state = state_of(journal_of(config.options.log_file))
    refuse_other_list(state, config)
    unfinished = [job for job in config.jobs if job.id not in state.jobs or state.jobs[job.id].state not in FINAL]
    jobs = {job.id: job for job in unfinished if not (job.trains and in_cache(config.cache, job.trains))}
    usual = mean_seconds(config.jobs)
    steps = plan(jobs.values(), pools, lambda job: job.options.seconds(usual))
    table = [("where", "id", "output")]
    for _, job_id, server, slots in steps:
        where = ",".join(str(slot.index if slot.gpu is None else slot.gpu) for slot in slots)
        table.append((f"{server}:{where}", job_id, jobs[job_id].output))
    show(table)
    capacity = f"{plural(sum(len(pool.slots) for pool in pools.values()), 'slot')} of {plural(len(pools), 'server')}"
    say(f"{plural(len(jobs), 'job')} on {capacity}; no two jobs write the same directory")
    if ended := len(config.jobs) - len(unfinished):
        say(f"not planned: {plural(ended, 'job')}, already done, failed or cancelled")
    if existing := [job.output for job in jobs.values() if outputs.owner_of(job.output)]:
        shown = f"{', '.join(existing[:5])}{' ...' if len(existing) > 5 else ''}"
        say(f"existing output directories, continued by their jobs: {shown}")
    say("nothing was started")
    return 0


def in_cache(cache: Cache, digest: str) -> bool:
    """Whether a valid base model is in the cache."""
    try:
        cache.verify(digest)
    except BaseModelError:
        return False
    return True


# ---------------------------------------------------------------- subcommands


def show(rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> None:
    """Print a table whose first row is the header. below: a line to print under each row, if not empty."""
    for number, line in enumerate(terminal.table(rows)):
        terminal.show((line if number else terminal.paint(line, terminal.BOLD)) + "\n")
        if below and below[number]:
            say(below[number])


def state_of(path: Path) -> ListState:
    """The state of the list in this journal; an empty list if the journal does not exist."""
    return ListState.of(journal.records(path) if path.exists() else [])


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
    """Explain the state of a job, and show its attempts."""
    state = state_of(path)
    job = state.find_job(options.job)
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
        server = next((each for each in make_servers(config, state.id) if each.name == attempt.server), None)
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


def stored_config(state: ListState, path: Path) -> ListConfig:
    """The options of the last call that ran the list, and the jobs of the list.

    Changes the working directory to that of the list. path: of the journal.
    """
    caller_cwd, log_file = Path.cwd(), absolute(path.with_suffix(".json"))
    trusted = (str(caller_cwd), KIT)
    refuse_planted([state.list_record["cwd"]], trusted)
    os.chdir(state.list_record["cwd"])
    if Path.cwd() == caller_cwd and log_file.is_relative_to(caller_cwd):
        log_file = log_file.relative_to(caller_cwd)
    stored: dict[str, Any] = {"two_phase": False, "notify": "", **BASE_OPTIONS, **state.list_record["call"]}
    for name in ("cluster_config", "jobs_config", "base_models"):
        stored[name] = Path(stored[name]) if stored.get(name) else None
    options = argparse.Namespace(**stored, plan=False, log_file=log_file)
    files = (options.cluster_config, options.jobs_config, options.base_models, state.list_record["script"])
    refuse_planted([str(file) for file in files if file], trusted)
    cluster = read_cluster(options.cluster_config) if options.cluster_config else None
    jobs = [job.job for job in state.jobs.values()]
    return ListConfig(options, cluster, state.list_record["script"], jobs, Cache(Path.cwd()))


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
        code = dispatch(list_journal, state, config, make_servers(config, state.id), drain=True)
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


def absolute(path: Path) -> Path:
    """The absolute path, without `..`; a symbolic link in its last component is kept."""
    return path.parent.resolve() / path.name


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
    for job in [each for each in jobs if each.leak][:SHOWN]:
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
    return jobs_to_add(config, [], [job for job in config.jobs if not state.jobs[job.id].unlisted], str(file))


def resume(options: argparse.Namespace, path: Path) -> int:
    """Continue the list with the options of the last call that ran it."""
    return run(stored_config(state_of(path), path).options)


def close(options: argparse.Namespace, path: Path) -> int:
    """Remove the tmux sessions of the list from its servers."""
    with Journal.open(path) as list_journal:
        config = stored_config(state := ListState.of(list_journal.records), path)
        config.options.no_tmux, config.options.sync = True, False
        host_servers = [each for each in make_servers(config, state.id) if isinstance(each, host_server.HostServer)]
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
