"""Train the base models of a job list once, then run every experiment from its own.

usage: run_two_phase_training.py --cluster-config FILE --jobs-config FILE [option...]
       run_two_phase_training.py cache list|verify|prune [option...]
       run_two_phase_training.py status|logs|why|cancel|retry|resume ...

  --cluster-config FILE    the servers (JSON), and in `base_models` which settings determine a base model
  --jobs-config FILE       the jobs (JSON); those with mode full_fine_tuning start from a base model
  --script-path PATH       script to run (default: script_path of the cluster config, or train.py)
  --skip-phase1            train no base model; all must be in the cache
  --barrier                start no experiment before all base models are trained
  --allow-shared-held-out  also where a base model was trained on the participant that an experiment holds out
  --evict-after-copy       remove the output directory of a base training on its server, once the base model is in the
                           cache and on that server
  --base-models FILE       the section base_models in a file of its own
  --plan                   print the base models, and where and when each job would run; start nothing
  --help                   show this

All options of run_distributed_training.py are understood, too; its --help names them.

A job with mode base_only trains each base model; it is published in experiments/base_models/HASH, complete and
verified. An experiment starts as soon as its base model is there, after that was copied once to its server. The script
finds it in $MUSTER_BASE_MODEL, and its whole digest in $MUSTER_BASE_MODEL_DIGEST.

  cache list               the base models in experiments/base_models
  cache verify             compare every byte with the checksums
  cache prune --keep-used --jobs-config FILE [--cluster-config FILE]
                           remove those that no job of the list needs; without --keep-used, only those that are
                           damaged, and what copies that were cut off have left

Beside the results stand phase1_base_models.json and phase2_experiments.json.
Exit codes: those of run_distributed_training.py; `cache list` and `cache verify` end with 1 when a base model is
damaged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import terminal
from distributed.fold import DEFAULT_PARTICIPANTS
from distributed.jobs import base_cache, bases, commands, console
from distributed.jobs.base_cache import Cached
from distributed.jobs.commands import CallError, Parser
from distributed.jobs.config import read_cluster, read_jobs
from distributed.jobs.job import Job
from distributed.training.base_model import CACHE

PROGRAM = "run_two_phase_training.py"
HELPER = "distributed_train_helper.py"
SHOWN = 4  # jobs that are named of those with one fault
NUMBERS = 30  # columns for the numbers of the jobs of a base model

HELPER_HELP = """What base models the jobs of a list share, and what that saves.

usage: distributed_train_helper.py JOBS [option...]
       distributed_train_helper.py JOBS explain A B

  JOBS                   jobs_config.json
  explain A B            which setting makes two jobs need different base models; A and B are numbers in the list,
                         counted from 0, ids, names, or parts of names
  --cluster-config FILE  has the section base_models (default: cluster_config.json beside JOBS, where it is there)
  --base-models FILE     the section base_models in a file of its own
  --script-path PATH     the script of the jobs (default: script_path of the cluster config, or train.py)
  --write FILE           write the jobs with their _base_model_hash
  --help                 show this

Exit codes: 0; 1 a job holds out a participant that its base model is trained on; 2 wrong call or configuration.

In Python, with this directory on sys.path: from distributed_train_helper import *
  grid(fold=range(3), lr=[1e-3, 3e-3])   one job for each combination
  product(jobs, others)                  one job for each combination of jobs
  named(jobs, "lr{lr}-{share:%}")        prefixes made of settings; :% rounds a share to percent
  write(jobs, "jobs_config.json")        check, and write; script="PATH": for another script than train.py
"""


# ---------------------------------------------------------------- run_two_phase_training.py


def main(words: Sequence[str]) -> int:
    """Run the call. Returns the exit code."""
    return commands.main(words, call)


def call(words: list[str]) -> int:
    if words[:1] == ["cache"]:
        return cache_call(words[1:])
    if "--help" in words or "-h" in words:
        sys.stdout.write(__doc__ or "")
        return 0
    if (found := commands.list_call(words)) is not None:
        return found
    given = commands.run_parser(two_phase=True).parse_args(words)
    if given.plan:
        asked = commands.checked(given)
        rules = commands.base_rules(given, asked.cluster, asked.script)
        plan = bases.plan_of([job for job in asked.jobs if not job.trains], rules)
        servers = len(asked.cluster.servers) if asked.cluster else 1
        print("\n".join([*report(plan, rules, cached_names(), servers), ""]))
    return commands.run(given)


def cache_call(words: list[str]) -> int:
    """What is in the cache of the working directory."""
    parser = Parser(prog=f"{PROGRAM} cache", add_help=False, allow_abbrev=False)
    parser.add_argument("what", choices=("list", "verify", "prune"))
    parser.add_argument("--keep-used", action="store_true")
    for name in ("--jobs-config", "--cluster-config", "--base-models"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--script-path")
    given = parser.parse_args(words)
    if given.what == "prune":
        return prune(given)
    found = base_cache.cached(Path.cwd(), verify=given.what == "verify")
    forms = [bases.readable(settings_in(each)) for each in found]
    table = [
        (each.name, megabytes(each.size), trained_at(each), loss_of(each), "damaged" if each.fault else "ok",
         text_of(form))
        for each, form in zip(found, differing_from_all(forms), strict=True)
    ]  # fmt: skip
    if table:
        commands.show([("base", "size", "trained", "held-out loss", "state", "settings"), *table])
    size = sum(each.size for each in found)
    print(f"{console.plural(len(found), 'base model')}, {megabytes(size)}, in {CACHE}")
    for each in found:
        if each.fault:
            print(f"damaged: {each.fault}")
    return 1 if any(each.fault for each in found) else 0


def trained_at(base: Cached) -> str:
    created = base.manifest.get("created")
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if isinstance(created, int | float) else "-"


def loss_of(base: Cached) -> str:
    loss = base.manifest.get("held_out_loss")
    return console.figure(loss) if isinstance(loss, int | float) else "-"


def settings_in(base: Cached) -> dict[str, Any]:
    """Of the job that has trained it."""
    said = base.manifest.get("settings")
    return bases.without(said, *bases.BASE_ONLY) if isinstance(said, dict) else {}


def prune(given: Any) -> int:
    if given.keep_used and not given.jobs_config:
        raise CallError("--keep-used: needs --jobs-config FILE, whose jobs use base models")
    if given.jobs_config and not given.keep_used:
        raise CallError("--jobs-config: only with --keep-used; add it to remove what the list does not need")
    keep = None
    if given.keep_used:
        jobs, rules = read(given)
        keep = [base.name for base in bases.plan_of(jobs, rules).bases.values()]
        cached = [each.name for each in base_cache.cached(Path.cwd(), verify=False)]
        if cached and not set(keep) & set(cached):
            raise CallError(
                f"{given.jobs_config}: needs none of the {len(cached)} base models in the cache; give base_models as "
                "they were, or remove the directory by hand"
            )
    removed, used = base_cache.prune(Path.cwd(), keep)
    for name in removed:
        print(f"removed: {name}")
    for name in used:
        print(f"in use, kept: {name}")
    left = base_cache.cached(Path.cwd(), verify=False)
    print(f"{console.plural(len(removed), 'base model')} removed, {len(left)} left")
    return 0


def read(given: Any) -> tuple[list[Job], bases.Rules]:
    """The jobs, and the rules of their base models. Raises ConfigError."""
    if not given.cluster_config and (beside := given.jobs_config.parent / "cluster_config.json").is_file():
        given.cluster_config = beside
    cluster = read_cluster(given.cluster_config) if given.cluster_config else None
    script = given.script_path or (cluster.script_path if cluster else "train.py")
    jobs = read_jobs(given.jobs_config, DEFAULT_PARTICIPANTS if Path(script).name == "train.py" else None)
    return jobs, commands.base_rules(given, cluster, script)


# ---------------------------------------------------------------- distributed_train_helper.py


def helper(words: Sequence[str]) -> int:
    """Run the call of the helper. Returns the exit code."""
    return commands.main(words, helper_call)


def helper_call(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        sys.stdout.write(HELPER_HELP)
        return 0
    parser = Parser(prog=HELPER, add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    for name in ("--cluster-config", "--base-models", "--write"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--script-path")
    given = parser.parse_intermixed_args(words)
    if not given.words:
        raise CallError("no list of jobs; name its file, such as jobs_config.json")
    if given.words[1:] and (len(given.words) != 4 or given.words[1] != "explain"):
        raise CallError(f"{' '.join(given.words[1:])}: not understood; expected explain A B")
    given.jobs_config = Path(given.words[0])
    jobs, rules = read(given)
    if given.words[1:]:
        one, other = (job_named(jobs, word) for word in given.words[2:])
        print("\n".join(explain(one, other, rules)))
        return 0
    plan = bases.plan_of(jobs, rules)
    servers = len(read_cluster(given.cluster_config).servers) if given.cluster_config else None
    print("\n".join(report(plan, rules, cached_names(), servers)))
    if given.write:
        write_with_hashes(plan, rules, given.jobs_config, given.write)
        print(f"\nwritten: {given.write}")
    return 1 if bases.leaks(plan, rules) else 0


def job_named(jobs: Sequence[Job], word: str) -> Job:
    """By its number, its id, its name, or a part of it. Raises CallError."""
    numbers = f"a number from 0 to {len(jobs) - 1}"
    found = [job for job in jobs if word in (job.id, job.name)]
    if word.isdecimal():  # a number is never a part of a name
        found = found or list(jobs[int(word) : int(word) + 1])
    else:
        found = found or [job for job in jobs if word in job.name]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CallError(f"{word}: no job has this name; give {numbers}, an id, or a part of a name")
    names = ", ".join(job.name for job in found[:SHOWN]) + (", ..." if found[SHOWN:] else "")
    raise CallError(f"{word}: {len(found)} jobs have this in their names ({names}); give more of it, or {numbers}")


def explain(one: Job, other: Job, rules: bases.Rules) -> list[str]:
    """Whether two jobs need one base model, and in what they differ. Raises ConfigError as plan_of() does."""
    plan = bases.plan_of([one, other], rules)
    if unused := [job.name for job in plan.jobs if not job.base]:
        return [f"{name}: starts from no base model: {no_base(rules)}" for name in unused]
    names = [base.name for base in plan.bases.values()]
    answer = f"one base model: {names[0]}" if len(names) == 1 else f"two base models: {names[0]} and {names[1]}"
    found = bases.differences(one, other, rules)
    table = [("differs in", "class", one.name, other.name), *found]
    return [answer, "", *terminal.table(table)] if found else [answer]


def no_base(rules: bases.Rules) -> str:
    return f"its mode is not {' or '.join(rules.modes or ())}; see modes in base_models"


def cached_names() -> dict[str, Cached]:
    """The base models in the cache that seem to be valid."""
    return {each.name: each for each in base_cache.cached(Path.cwd(), verify=False) if not each.fault}


def report(plan: bases.Plan, rules: bases.Rules, cached: Mapping[str, Cached], servers: int | None) -> list[str]:
    """The plan in lines. servers: how many; None: not known."""
    found, leaks, unknown = list(plan.bases.values()), bases.leaks(plan, rules), bases.not_checked(plan, rules)
    starting = sum(len(base.jobs) for base in found)
    if not found:
        return [f"{console.plural(len(plan.jobs), 'job')}; none starts from a base model: {no_base(rules)}"]
    there = sum(base.name in cached for base in found)
    start = "all start" if starting == len(plan.jobs) else f"{starting} of them start"
    lines = terminal.table([
        ("jobs", f"{len(plan.jobs)}; {start} from a base model"),
        ("base models", f"{len(found)}; {there} in the cache, {len(found) - there} to train"),
        ("trainings avoided", f"{bases.avoided(plan)} by sharing ({saved(plan, rules)}), {there} by the cache"),
        ("disk", disk(found, rules, cached)),
        ("copies", "not known: give --cluster-config" if servers is None else
         f"at most {bases.copies(found, servers)}, to {console.plural(servers, 'server')}"),
        ("output collisions", "none"),  # else the list is refused
        ("leaks", console.plural(len(leaks), "job") if leaks else "not known, see below" if unknown else "none"),
    ])  # fmt: skip
    lines += ["", *base_table(plan, cached)]
    if unknown:
        names = ", ".join(base.name for base in unknown[:SHOWN]) + (", ..." if unknown[SHOWN:] else "")
        lines += ["", f"not checked for leaks, as their participants are not known here: {names}"]
    if leaks:
        lines += ["", f"{console.plural(len(leaks), 'job')} would be evaluated on training data of the base model:"]
        lines += [f"  {leak}" for leak in leaks[:SHOWN]]
        lines += [f"  and {len(leaks) - SHOWN} more"] if leaks[SHOWN:] else []
        lines.append(bases.LEAK_REMEDY)
    return lines


def saved(plan: bases.Plan, rules: bases.Rules) -> str:
    hours = bases.gpu_hours_saved(plan, rules)
    if hours is None:
        return "GPU hours not known: give _expected_seconds in options of base_models"
    return f"{hours:,.1f} GPU hours" if hours >= 1 else f"{60 * hours:.1f} GPU minutes"


def disk(found: Sequence[bases.Base], rules: bases.Rules, cached: Mapping[str, Cached]) -> str:
    """What a cache with these base models takes."""
    sizes = [cached[base.name].size for base in found if base.name in cached]
    size = max(sizes, default=0) or (rules.expected_mb or 0.0) * 1e6
    if not size:
        return "not known: give expected_mb in base_models"
    return f"{megabytes(len(found) * size)} here, and at most as much on each server ({megabytes(size)} a base model)"


def base_table(plan: bases.Plan, cached: Mapping[str, Cached]) -> list[str]:
    """Which jobs share which base model, and in what base models differ."""
    found = list(plan.bases.values())
    numbers = {job.id: number for number, job in enumerate(plan.jobs)}
    forms = [bases.readable(base.settings) for base in found]
    table = [("base", "cached", "jobs", "numbers", "first job", "settings")]
    for base, form in zip(found, differing_from_all(forms), strict=True):
        table.append((
            base.name, "yes" if base.name in cached else "no", str(len(base.jobs)),
            ranges([numbers[job.id] for job in base.jobs]), base.jobs[0].name, text_of(form),
        ))  # fmt: skip
    if len(found) == 1:
        return [*terminal.table([row[:-1] for row in table]), "", f"settings: {text_of(forms[0])}"]
    same = {key: value for key, value in forms[0].items() if all(form.get(key) == value for form in forms)}
    return [*terminal.table(table), "", f"settings of all: {text_of(same)}"]


def differing_from_all(forms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each without what is the same in all; one alone is as it was."""
    if len(forms) == 1:
        return [dict(forms[0])]
    return [
        {key: value for key, value in form.items() if any(other.get(key) != value for other in forms)}
        for form in forms
    ]  # fmt: skip


def ranges(numbers: Sequence[int]) -> str:
    """0-4,7,9-11; cut where it is long."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    text = ",".join("-".join(map(str, each)) for each in found)
    return text if len(text) <= NUMBERS else f"{text[:NUMBERS].rpartition(',')[0]},..."


def text_of(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in sorted(settings.items())
    )


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def write_with_hashes(plan: bases.Plan, rules: bases.Rules, source: Path, target: Path) -> None:
    """The list as it was, each job with its _base_model_hash."""
    from distributed.jobs.job_lists import write

    entries = json.loads(source.read_text(encoding="utf-8-sig"))
    hashes = [job.options.base_model_hash for job in plan.jobs]
    write([entry | ({"_base_model_hash": name} if name else {}) for entry, name in zip(entries, hashes, strict=True)],
          target, rules.script)  # fmt: skip
