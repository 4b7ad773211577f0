"""The plan of a list: its checked configuration, its servers, and where its jobs would run."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.files import KIT, removed
from distributed.host import sync_list
from distributed.jobs.call import (
    CallError,
    ListOptions,
    absolute,
    command_line,
    journal_of,
    program_name,
    say,
    show,
)
from distributed.jobs.host import outputs
from distributed.jobs.journal import journal
from distributed.jobs.journal.state import FINAL, JobState, ListState
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
from distributed.jobs.schedule.backend import JobServer
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import SlotPool, mean_seconds, plan
from distributed.jobs.servers import host_server, ssh_server
from distributed.jobs.servers.host_server import ListContext
from distributed.jobs.show.results import phase_files
from distributed.launch import forwarding
from distributed.terminal import plural
from distributed.training.base_model import BaseModelError, hash_of
from distributed.training.fold import default_participants


@dataclass(frozen=True)
class ListConfig:
    """The options of a call, and the checked contents of the configuration files that these options name."""

    options: ListOptions
    cluster: ClusterConfig | None
    script: str
    jobs: list[Job]
    cache: Cache
    list_id: str
    warnings: Sequence[str] = ()  # printed before the list starts


def checked_list(options: ListOptions) -> tuple[ListConfig, list[JobServer]]:
    """The list of a call, and its servers, after all checks that need no journal. Raises ConfigError and CallError."""
    config = read_config(options)
    refuse_log_file(options)
    job_servers = make_servers(config)
    refuse_unplaceable_jobs(config.jobs, job_servers)
    refuse_foreign_outputs(config)
    return config, job_servers


def read_config(options: ListOptions) -> ListConfig:
    """Read both configurations. Raises ConfigError and CallError."""
    if not options.jobs_config:
        raise CallError("--jobs-config: missing; give the JSON file with the jobs")
    if not options.cluster_config and options.backend != "local":
        raise CallError("--cluster-config: missing; give the JSON file with the servers, or use --backend local")
    cluster = read_cluster(Path(options.cluster_config)) if options.cluster_config else None
    if options.slots and options.slots > MAX_SLOTS:
        raise CallError(f"--slots {options.slots}: expected at most {MAX_SLOTS}")
    if options.slots and options.backend != "local":
        raise CallError("--slots: only for --backend local; set slots_per_gpu of the servers")
    if options.sync and options.backend != "ssh":
        raise CallError(f"--sync: only for --backend ssh; with --backend {options.backend} nothing is copied")
    if options.sync:
        try:
            warning = sync_list.secrets_warning(str(Path.cwd()), sync_list.names_of(str(Path.cwd())))
        except sync_list.SyncError as error:
            raise ConfigError(f"--sync: {error}") from None
        if warning:
            sys.stderr.write(f"{program_name()}: warning: --sync: {warning}\n")
    script = script_of(options.script, cluster)
    if options.backend == "local" and not Path(script).is_file():
        raise ConfigError(f"script {script}: no such file in {Path.cwd()}; give its path with --script")
    jobs = read_jobs(Path(options.jobs_config), default_participants(script), options.retries)
    state = state_of(journal_of(options.log_file))
    config = ListConfig(options, cluster, script, jobs, Cache(Path.cwd()), state.id or secrets.token_hex(5))
    return with_bases(config, [*jobs, *previously_added(config, state)])


def with_bases(config: ListConfig, jobs: Sequence[Job]) -> ListConfig:
    """The list with these jobs, each with its base model. In a two-phase list, jobs that train base models come first.

    Raises ConfigError for the same faults as plan_of(), with_base_models() and with_digest(), and with --refuse-leaks
    also for a leak.
    """
    options, cache = config.options, config.cache
    warnings: list[str] = []
    if options.two_phase:
        if options.base_models:  # an earlier version started the list
            raise ConfigError(f"{options.log_file}: start the list again: {removed(['--base-models'])}")
        rules = bases.rules_of(config.cluster, config.script)
        plan = bases.plan_of(jobs, rules)
        warnings = bases.leak_warnings(plan, rules)
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
    rules = bases.rules_of(config.cluster, config.script) if options.two_phase else None
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

    job_servers: servers of the list; one whose number of slots depends on the jobs (SLURM) gets more slots. jobs: all
    jobs of the list.
    """
    listed, known = [job for job in jobs if not job.trains], {job.id for job in jobs}
    in_file = read_jobs(Path(file), default_participants(config.script), config.options.retries, listed)
    new = [replace(job, file=file) for job in in_file if job.id not in known]
    added = [job for job in with_bases(config, [*listed, *new]).jobs if job.id not in known] if new else []
    refuse_foreign_outputs(replace(config, jobs=added))
    for server in job_servers:
        server.make_room(slots_needed([*jobs, *added]))
    refuse_unplaceable_jobs(added, job_servers)
    return added


def slots_needed(jobs: Sequence[Job]) -> int:
    """The number of slots that all jobs need together, if each GPU is a slot."""
    return sum(max(1, job.options.gpus) for job in jobs)


def with_base_models(options: ListOptions, rules: bases.Rules, plan: bases.BasePlan, cache: Cache) -> list[Job]:
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


def make_servers(config: ListConfig) -> list[JobServer]:
    """The servers of a list. Raises ConfigError, also for faults in $MUSTER_FORWARD."""
    options = config.options
    try:
        forwarded = forwarding.forwarded(os.environ)
    except forwarding.ForwardingError as error:
        raise ConfigError(str(error)) from None
    context = ListContext(
        config.list_id, Path.cwd(), config.script, grace=float(options.grace), panes=not options.no_tmux,
        sync=options.sync, cache=config.cache, forwarded=forwarded,
    )  # fmt: skip
    if options.backend == "local":
        return [host_server.local_server(context, options.slots)]
    assert config.cluster
    if not config.cluster.servers:
        raise ConfigError(f"{options.cluster_config}: servers: missing; add it")
    if options.backend == "slurm":
        from distributed.jobs.servers.slurm_server import SlurmServer

        return [SlurmServer(config.cluster, context, slots_needed(config.jobs))]
    for server in config.cluster.servers:
        if server.ssh_key and not Path(server.ssh_key).expanduser().is_file():
            raise ConfigError(f"{options.cluster_config}: {server.host}: ssh_key={server.ssh_key}: no such file")
    return [ssh_server.SshServer(server.name, server, context) for server in config.cluster.servers]


def refuse_unplaceable_jobs(jobs: Sequence[Job], job_servers: Sequence[JobServer]) -> None:
    """Raises ConfigError if no server has the labels of a job and enough GPUs for it."""
    pools = [replace(server.pool, lost=frozenset()) for server in job_servers]  # lost GPUs may work again
    faults = []
    for job in jobs:
        labels = frozenset(job.options.labels)
        if not any(labels <= pool.labels for pool in pools):
            faults.append(f"{job.name}: no server has the labels {', '.join(sorted(labels))}")
        elif not any(labels <= pool.labels and job.options.gpus <= pool.capacity() for pool in pools):
            most = max(pool.capacity() for pool in pools if labels <= pool.labels)
            faults.append(f"{job.name}: _gpus={job.options.gpus}: no matching server has more than {most}")
    raise_faults(faults)


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


def refuse_log_file(options: ListOptions) -> None:
    """Raises CallError if the directory of --log-file is missing, or a file of no list would be overwritten."""
    # If --log-file is a link, this is the directory of the target.
    directory = os.path.dirname(os.path.realpath(options.log_file))
    if not os.path.isdir(directory):
        shown = directory if options.log_file.is_symlink() else options.log_file.parent
        raise CallError(f"--log-file {options.log_file}: no such directory: {shown}; create it")
    journal_path = journal_of(options.log_file)
    phases = phase_files(options.log_file) if options.two_phase else ()
    for path in (options.log_file, options.log_file.with_suffix(".html"), *phases):
        if path.exists() and not journal_path.exists():
            raise CallError(
                f"--log-file {options.log_file}: {path} exists, but not its journal ({journal_path}); move it away, or "
                "give another --log-file"
            )


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


def show_plan(config: ListConfig, job_servers: Sequence[JobServer]) -> int:
    """Print where each unfinished job would run, in the order of the starts."""
    pools: dict[str, SlotPool] = {server.pool.name: server.pool for server in job_servers}
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


def state_of(path: Path) -> ListState:
    """The state of the list in this journal; an empty list if the journal does not exist."""
    return ListState.of(journal.records(path) if path.exists() else [])


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
    options = ListOptions.of_stored(state.list_record["call"], log_file)
    files = (options.cluster_config, options.jobs_config, state.list_record["script"])
    refuse_planted([str(file) for file in files if file], trusted)
    cluster = read_cluster(Path(options.cluster_config)) if options.cluster_config else None
    jobs = [job.job for job in state.jobs.values()]
    return ListConfig(options, cluster, state.list_record["script"], jobs, Cache(Path.cwd()), state.id)
