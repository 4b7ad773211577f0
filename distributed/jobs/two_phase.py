"""Train each base model of a job list once, then run the experiments that start from it.

usage: run_two_phase_training.py --cluster-config FILE --jobs-config FILE [option...]
       run_two_phase_training.py cache list|prune [option...]
       run_two_phase_training.py status|logs|why|cancel|retry|add|resume|close ...

  --cluster-config FILE    servers (JSON); its section base_models lists the settings that determine a base model
  --jobs-config FILE       jobs (JSON); those with mode full_fine_tuning are experiments that start from a base model
  --skip-phase1            train no base models; all of them must be in the cache
  --refuse-leaks           refuse a list with an experiment whose held-out participant (a part of the data) is, or may
                           be, in the training data of its base model (default: print a warning, and mark the
                           experiment in the results)
  --plan                   print the base models, and where each job would run; start nothing
  --help                   show this help; after a subcommand, its own help

All options of run_distributed_training.py are accepted; see its --help.

Jobs that agree in the settings that determine the base model share one base model. It is trained by a job with mode
base_only, verified, and published in the cache as experiments/base_models/HASH. HASH is the first 12 digits of a hash
of these settings and of the script's path. An experiment starts when its base model has been copied to its server; each
server gets one copy. If there is no space for it, outputs of finished trainings, of which this machine has copies, are
removed there. The script reads the base model from the directory $MUSTER_BASE_MODEL; $MUSTER_BASE_MODEL_DIGEST
has the full hash.

  cache list               list the base models in the cache; scripts/doctor.sh compares their files with checksums
  cache prune              remove damaged base models and incomplete copies; with --jobs-config JOBS
                           [--cluster-config FILE], also base models that no job of JOBS needs

The results of each phase are also written to phase1_base_models.json and phase2_experiments.json, in the directory of
the results; with --log-file NAME.json, to NAME.phase1_base_models.json and NAME.phase2_experiments.json.

Exit codes: those of run_distributed_training.py; `cache list` exits with 1 if a manifest is damaged.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import terminal
from distributed.jobs import call, commands, list_plan, list_start
from distributed.jobs.call import CallError, CommandParser
from distributed.jobs.host.host_attempt import is_metric
from distributed.jobs.lists import bases
from distributed.jobs.lists.config import read_cluster, read_jobs, refuse_planted, script_of
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule import base_cache
from distributed.jobs.schedule.base_cache import Cached
from distributed.jobs.show import console
from distributed.records import is_time, number
from distributed.training.base_model import CACHE
from distributed.training.fold import default_participants
from distributed.trust import one_line

SHOWN = 4  # maximum number of jobs or base models listed in one message

HELPER_HELP = """Show which jobs of a list share a base model, and what sharing saves.

usage: distributed_train_helper.py JOBS [option...]

  JOBS                   file with the jobs (JSON), such as jobs_config.json
  --cluster-config FILE  file with the section base_models, which lists the settings that determine a base model
                         (default: cluster_config.json in the directory of JOBS, if it exists)
  --script PATH          the script of the jobs (default: script_path of the cluster config, or train.py)
  --help                 show this help

Exit codes: 0 success, 2 wrong call or configuration.

In Python, with scripts/jobs on sys.path: from distributed_train_helper import *
  grid(fold=range(3), lr=[1e-3, 3e-3])   one job per combination of values
  product(jobs, others)                  one job per pair of jobs, with the settings of both
  named(jobs, "lr{lr}-{share:%}")        set the prefix of each job from its other settings; {share:%} prints 0.25 as 25
  write(jobs, "jobs_config.json")        check and write the jobs; script="PATH" names a script other than train.py
"""


# ---------------------------------------------------------------- run_two_phase_training.py


def main(arguments: Sequence[str]) -> int:
    """Run the program and return its exit code."""
    return commands.main(arguments, execute_command, __doc__, subcommand_parser)


def subcommand_parser(name: str) -> CommandParser | None:
    """See commands.subcommand_parser()."""
    return cache_parser() if name == "cache" else commands.subcommand_parser(name)


def cache_parser() -> CommandParser:
    """The parser of `cache`."""
    parser = CommandParser(prog=f"{call.program_name()} cache", allow_abbrev=False)
    parser.description = "List or prune the base models in the cache of the working directory."
    parser.add_argument("what", choices=("list", "prune"), help="list the base models; remove damaged base models and "
        "incomplete copies")  # fmt: skip
    parser.add_argument("--jobs-config", type=Path, metavar="FILE", help="also prune base models that no job of this "
        "list needs")  # fmt: skip
    parser.add_argument("--cluster-config", type=Path, metavar="FILE", help="file with the section base_models "
        "(default: cluster_config.json in the directory of the jobs, if it exists)")  # fmt: skip
    parser.add_argument("--script", metavar="PATH", help="script of the jobs (default: script_path of the cluster "
        "config, or train.py)")  # fmt: skip
    return parser


def execute_command(arguments: list[str]) -> int:
    if arguments[:1] == ["cache"]:
        return execute_cache_command(arguments[1:])
    if (code := commands.execute_subcommand(arguments)) is not None:
        return code
    options = commands.list_options(arguments, two_phase=True)
    if options.plan:
        config = list_plan.read_config(options)
        rules = bases.rules_of(config.cluster, config.script)
        plan = bases.plan_of([job for job in config.jobs if not job.trains], rules)
        servers = len(config.cluster.servers) if config.cluster and options.backend != "local" else 1
        print("\n".join([*report(plan, rules, cached_by_name(), servers), ""]))
    return list_start.run(options)


def execute_cache_command(arguments: list[str]) -> int:
    """List or prune the cache of the working directory. Returns the exit code."""
    options = cache_parser().parse_args(arguments)
    if options.what == "prune":
        return prune(options)
    models = base_cache.cached(Path.cwd())
    settings = [bases.readable(settings_of(each)) for each in models]
    table = [
        (each.name, megabytes(each.size), trained_at(each), loss_of(each), "damaged" if each.fault else "ok",
         text_of(shown))
        for each, shown in zip(models, without_common(settings), strict=True)
    ]  # fmt: skip
    if table:
        call.show([("base", "size", "trained", "held-out loss", "state", "settings"), *table])
    size = sum(each.size for each in models)
    print(f"{terminal.plural(len(models), 'base model')}, {megabytes(size)}, in {CACHE}")
    for each in models:
        if each.fault:
            print(f"damaged: {each.fault}")
    return 1 if any(each.fault for each in models) else 0


def trained_at(base: Cached) -> str:
    created = number(base.manifest.get("created"))
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if is_time(created) else "-"


def loss_of(base: Cached) -> str:
    loss: Any = base.manifest.get("held_out_loss")
    return console.aligned_number(loss) if is_metric(loss) else "-"


def settings_of(base: Cached) -> dict[str, Any]:
    """The settings of the job that trained a base model, without its mode."""
    settings = one_line(base.manifest.get("settings"))
    return bases.without(settings, *bases.BASE_ONLY) if isinstance(settings, dict) else {}


def prune(options: argparse.Namespace) -> int:
    keep = None
    if options.jobs_config:
        jobs, rules, _ = read(options)
        keep = {base.name for base in bases.plan_of(jobs, rules).bases.values()}
        cached = {each.name for each in base_cache.cached(Path.cwd())}
        if cached and not keep & cached:
            raise CallError(
                f"{options.jobs_config}: needs none of the {len(cached)} base models in the cache; restore "
                f"base_models, or remove {CACHE}"
            )
    removed, in_use = base_cache.prune(Path.cwd(), keep)
    for name in removed:
        print(f"removed: {name}")
    for name in in_use:
        print(f"kept, in use: {name}")
    left = base_cache.cached(Path.cwd())
    print(f"{terminal.plural(len(removed), 'base model')} removed, {len(left)} left")
    return 0


def read(options: argparse.Namespace) -> tuple[list[Job], bases.Rules, int | None]:
    """The jobs, the rules for their base models, and the number of servers; None: unknown. Raises ConfigError."""
    if not options.cluster_config and (default := options.jobs_config.parent / "cluster_config.json").is_file():
        refuse_planted([str(default)], [str(Path.cwd()), str(default.parent)])
        options.cluster_config = default
    cluster = read_cluster(options.cluster_config) if options.cluster_config else None
    script = script_of(options.script, cluster)
    jobs = read_jobs(options.jobs_config, default_participants(script))
    return jobs, bases.rules_of(cluster, script), len(cluster.servers) or None if cluster else None


# ---------------------------------------------------------------- distributed_train_helper.py


def helper(arguments: Sequence[str]) -> int:
    """Run the helper and return its exit code."""
    return commands.main(arguments, execute_helper, HELPER_HELP, lambda _: None)


def execute_helper(arguments: list[str]) -> int:
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.add_argument("jobs_config", type=Path, nargs="?")
    parser.add_argument("--cluster-config", type=Path)
    parser.add_argument("--script")
    options = parser.parse_args(arguments)
    if not options.jobs_config:
        raise CallError("JOBS: missing; give the JSON file with the jobs")
    jobs, rules, servers = read(options)
    plan = bases.plan_of(jobs, rules)
    print("\n".join(report(plan, rules, cached_by_name(), servers)))
    return 0


def cached_by_name() -> dict[str, Cached]:
    """The valid base models in the cache; their weights are not read."""
    return {each.name: each for each in base_cache.cached(Path.cwd()) if not each.fault}


def report(plan: bases.BasePlan, rules: bases.Rules, cached: Mapping[str, Cached], servers: int | None) -> list[str]:
    """The lines of the report. cached: base models by name. servers: the number of servers; None if it is unknown."""
    found, leaks, unknown = list(plan.bases.values()), bases.leaks(plan), bases.not_checked(plan, rules)
    with_base = sum(len(base.jobs) for base in found)
    if not found:
        no_base = f"none starts from a base model: its mode is not {' or '.join(rules.section.modes or ())}"
        return [f"{terminal.plural(len(plan.jobs), 'job')}; {no_base}; see modes in base_models"]
    in_cache = sum(base.name in cached for base in found)
    start = "all start" if with_base == len(plan.jobs) else f"{with_base} of them start"
    copies = sum(min(len(base.jobs), servers or 0) for base in found)  # each server gets a base model at most once
    lines = terminal.table([
        ("script", f"{rules.script}; the names of base models depend on this path (--script)"),
        ("jobs", f"{len(plan.jobs)}; {start} from a base model"),
        ("base models", f"{len(found)}; {in_cache} in the cache, {len(found) - in_cache} to train"),
        ("trainings avoided", f"{with_base - len(found)} by sharing ({saved(found, rules)}), {in_cache} by the cache"),
        ("copies", "unknown; give --cluster-config" if servers is None else
         f"at most {copies}, to {terminal.plural(servers, 'server')}"),
        ("output collisions", "none"),  # read_jobs() refuses lists with collisions
        ("leaks", terminal.plural(len(leaks), "job") if leaks else "unknown, see below" if unknown else "none"),
    ])  # fmt: skip
    lines += ["", *base_table(plan, cached)]
    if unknown:
        names = ", ".join(base.name for base in unknown[:SHOWN]) + (", ..." if unknown[SHOWN:] else "")
        lines += ["", f"not checked for leaks, participants unknown on this machine: {names}"]
    if leaks:
        lines += ["", f"{terminal.plural(len(leaks), 'job')} would be evaluated on training data of the base model:"]
        lines += [f"  {leak}" for leak in leaks[:SHOWN]]
        lines += [f"  and {len(leaks) - SHOWN} more"] if leaks[SHOWN:] else []
        lines.append(bases.LEAK_REMEDY)
    return lines


def saved(found: Sequence[bases.SharedBase], rules: bases.Rules) -> str:
    """The GPU time that sharing saves, as text."""
    seconds = rules.options.expected_seconds
    if seconds is None:
        return "GPU hours unknown; set _expected_seconds in options of base_models"
    gpus = sum((len(base.jobs) - 1) * max(1, bases.training_job(base, rules).options.gpus) for base in found)
    hours = gpus * seconds / 3600
    return f"{hours:,.1f} GPU hours" if hours >= 1 else f"{60 * hours:.1f} GPU minutes"


def base_table(plan: bases.BasePlan, cached: Mapping[str, Cached]) -> list[str]:
    """A table of the base models, their jobs, and the settings in which they differ."""
    found = list(plan.bases.values())
    settings = [bases.readable(base.settings) for base in found]
    table = [("base", "cached", "jobs", "first job", "settings")]
    for base, shown in zip(found, without_common(settings), strict=True):
        is_cached = "yes" if base.name in cached else "no"
        table.append((base.name, is_cached, str(len(base.jobs)), base.jobs[0].name, text_of(shown)))
    if len(found) == 1:
        return [*terminal.table([row[:-1] for row in table]), "", f"settings: {text_of(settings[0])}"]
    common = {key: value for key, value in settings[0].items() if all(each.get(key) == value for each in settings)}
    return [*terminal.table(table), "", f"settings of all: {text_of(common)}"]


def without_common(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The elements without the settings that all of them share; a single element stays unchanged."""
    if len(settings) == 1:
        return [dict(settings[0])]
    return [
        {key: value for key, value in each.items() if any(other.get(key) != value for other in settings)}
        for each in settings
    ]  # fmt: skip


def text_of(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in sorted(settings.items())
    )


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
