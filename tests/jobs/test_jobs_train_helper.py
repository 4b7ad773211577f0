"""distributed_train_helper.py, and the command `cache` of run_two_phase_training.py.

The helper reports the base models of a job list, the trainings that they avoid, and the differences between two jobs.
`cache` lists, verifies and removes base models. Errors name a remedy. Wrong calls change nothing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import two_phase
from distributed.jobs.lists import bases
from distributed.jobs.lists.bases import Rules, plan_of
from distributed.jobs.lists.config import BaseModels, read_jobs
from distributed.jobs.lists.generator import Settings, grid, named, write
from distributed.jobs.schedule.base_cache import Cache
from distributed.training import base_model
from distributed.training.base_model import CACHE, FILES, WEIGHTS
from distributed.training.fold import DEFAULT_PARTICIPANTS

KIT = Path(__file__).resolve().parents[2]
HELPER = KIT / "scripts/jobs/distributed_train_helper.py"
PROGRAM = KIT / "scripts/jobs/run_two_phase_training.py"
PER_FOLD = {"base": ["fold"], "options": {"_expected_seconds": 1800, "_gpus": 2}, "expected_mb": 42}
Result = tuple[int, str, str]  # exit code, standard output, standard error
Call = Callable[..., Result]


def fifteen_jobs() -> list[Settings]:
    shares = [0.1, 0.29, 0.5, 0.75, 1.0]
    return named(grid(fold=range(3), target_batch_pct=shares, mode="full_fine_tuning"), "batch{target_batch_pct:%}")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").symlink_to(KIT / "train.py")
    write(fifteen_jobs(), "jobs.json")
    return tmp_path


@pytest.fixture
def helper(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the helper."""

    def call(*arguments: str) -> Result:
        code = two_phase.helper(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def cluster(base_models: dict[str, Any], servers: int = 3, name: str = "cluster_config.json") -> None:
    listed = [{"host": f"node{number}"} for number in range(servers)]
    Path(name).write_text(json.dumps({"servers": listed, "base_models": base_models}))


def digests(**section: Any) -> list[str]:
    jobs = read_jobs(Path("jobs.json"), DEFAULT_PARTICIPANTS)
    return list(plan_of(jobs, Rules.of(BaseModels(**section), "train.py")).bases)


def train(digest: str, **facts: Any) -> Path:
    """Put a base model into the cache."""
    output = Path("experiments/base_training", digest[:12])
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (output / name).write_text("x" * 250_000)
    Cache(Path.cwd()).publish(digest, str(output), **facts)
    return Path(CACHE, digest[:12])


def facts(text: str) -> dict[str, str]:
    """The lines before the first empty one."""
    lines = text.split("\n\n")[0].splitlines()
    start = max(len(line.partition("  ")[0]) for line in lines) + 2
    assert all(line[start - 1] == " " and line[start] != " " for line in lines), "values must be aligned"
    return {line[:start].strip(): line[start:] for line in lines}


# ---------------------------------------------------------------- base models of a list, and avoided trainings


def test_fifteen_jobs_on_three_base_models_are_reported(helper: Call) -> None:
    cluster(PER_FOLD)
    names = [digest[:12] for digest in digests(**PER_FOLD)]
    code, out, err = helper("jobs.json")
    assert (code, err) == (0, "")
    assert facts(out) == {
        "script": "train.py; the names of base models depend on this path (--script-path)",
        "jobs": "15; all start from a base model",
        "base models": "3; 0 in the cache, 3 to train",
        "trainings avoided": "12 by sharing (12.0 GPU hours), 0 by the cache",
        "disk": "126.0 MB on this machine, at most 126.0 MB on each server; 42.0 MB per base model",
        "copies": "at most 9, to 3 servers",
        "output collisions": "none",
        "leaks": "none",
    }
    assert out.split("\n\n")[1].splitlines() == [
        "base          cached  jobs  numbers  first job                          settings",
        f"{names[0]}  no      5     0-4      batch10/fold0_special-methods      held-out=special-methods",
        f"{names[1]}  no      5     5-9      batch10/fold1_compound-statements  held-out=compound-statements",
        f"{names[2]}  no      5     10-14    batch10/fold2_simple-statements    held-out=simple-statements",
    ]
    assert "settings of all: base_steps=300 batch_size=16 lr=0.003 model=small participants=" in out


def test_cached_base_models_are_not_counted_as_trainings(helper: Call) -> None:
    cluster(PER_FOLD)
    for digest in digests(**PER_FOLD):
        train(digest)
    _, out, _ = helper("jobs.json")
    assert facts(out)["base models"] == "3; 3 in the cache, 0 to train"
    assert facts(out)["trainings avoided"] == "12 by sharing (12.0 GPU hours), 3 by the cache"
    assert facts(out)["disk"].startswith("3.0 MB on this machine")  # the actual size, not expected_mb
    assert out.count("  yes     5 ") == 3
    Path(CACHE, digests(**PER_FOLD)[0][:12], "manifest.json").unlink()
    assert facts(helper("jobs.json")[1])["base models"] == "3; 2 in the cache, 1 to train"


def test_if_a_number_is_unknown_the_report_names_the_missing_setting(helper: Call) -> None:
    code, out, _ = helper("jobs.json")
    assert code == 0
    known = facts(out)
    assert known["trainings avoided"].startswith("14 by sharing (GPU hours unknown; set _expected_seconds in options")
    assert known["disk"] == "unknown; set expected_mb in base_models"
    assert known["copies"] == "unknown; give --cluster-config"


def test_leaks_are_counted_and_listed_with_the_remedy(helper: Call) -> None:
    code, out, _ = helper("jobs.json")
    name = digests()[0][:12]
    assert code == 0
    assert facts(out)["leaks"] == "15 jobs"
    below = out.split("\n\n")[-1].splitlines()
    assert below[0] == "15 jobs would be evaluated on training data of the base model:"
    assert below[1] == (
        f"  batch10/fold0_special-methods: holds out special-methods, and its base model {name} is trained on it"
    )
    assert below[-2:] == ["  and 11 more", bases.LEAK_REMEDY]
    assert len(below) == two_phase.SHOWN + 3


def test_a_missing_data_path_is_reported_as_not_checked(helper: Call) -> None:
    write([{**job, "data_path": "/no/such"} for job in fifteen_jobs()], "jobs.json")
    code, out, _ = helper("jobs.json")
    assert code == 0
    name = digests()[0][:12]
    assert f"\nnot checked for leaks, participants unknown on this machine: {name}\n" in out


def test_a_list_that_cannot_be_checked_for_leaks_is_refused_only_with_refuse_leaks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("my.sh").touch()
    write([{"mode": "full_fine_tuning", "fold": fold, "prefix": "a"} for fold in range(2)], "jobs.json", "my.sh")
    call = ["--backend", "local", "--slots", "1", "--script", "my.sh", "--jobs-config", "jobs.json", "--plan"]
    assert two_phase.main([*call, "--refuse-leaks"]) == 2
    refused = capsys.readouterr().err
    assert "of 2 jobs, the first a/fold0: its participants are unknown on this machine, cannot check for" in refused
    assert refused.splitlines()[-1].endswith(f"{bases.LEAK_REMEDY}, or run without --refuse-leaks")
    assert two_phase.main(call) == 0
    assert "unknown, see below" in facts(capsys.readouterr().out)["leaks"]


def test_a_plan_contains_no_training_of_cached_base_models(capsys: pytest.CaptureFixture[str]) -> None:
    Path("base.json").write_text(json.dumps({**PER_FOLD, "options": {"_expected_seconds": 60}}))
    first, *others = digests(**PER_FOLD)
    train(first)
    call = ["--backend", "local", "--slots", "1", "--jobs-config", "jobs.json", "--base-models", "base.json", "--plan"]
    assert two_phase.main(call) == 0
    shown = capsys.readouterr().out
    assert f"base_training/{first[:12]}" not in shown
    assert all(f"base_training/{other[:12]}" in shown for other in others)
    assert "17 jobs on 1 slot" in shown


def test_a_list_without_base_models_is_reported(helper: Call) -> None:
    write(grid(fold=range(3), prefix="x"), "jobs.json")
    assert helper("jobs.json") == (
        0,
        "3 jobs; none starts from a base model: its mode is not full_fine_tuning; see modes in base_models\n",
        "",
    )


def test_jobs_without_a_base_model_count_only_in_the_total_number_of_jobs(helper: Call) -> None:
    write([*grid(fold=range(2), prefix="scratch", mode="from_scratch"), *fifteen_jobs()], "jobs.json")
    _, out, _ = helper("jobs.json")
    assert facts(out)["jobs"] == "17; 15 of them start from a base model"
    assert "  15    2-16     batch10/" in out


def test_the_report_of_forty_base_models_has_a_line_for_each(helper: Call) -> None:
    rates = [round(0.001 * number, 3) for number in range(1, 41)]
    write(named(grid(fold=range(8), lr=rates, mode="full_fine_tuning"), "lr{lr}"), "jobs.json")
    _, out, _ = helper("jobs.json")
    rows = out.split("\n\n")[1].splitlines()
    assert len(rows) == 41
    assert rows[1].split()[1:] == [
        "no", "8", "0,40,80,120,160,200,240,280", "lr0.001/fold0_special-methods", "lr=0.001",
    ]  # fmt: skip
    assert max(map(len, rows)) < 120


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 3, 5, 6], "0-1,3,5-6"),
        (range(0, 2000, 2), "0,2,4,6,8,10,12,14,16,18,20,..."),
    ],
)  # fmt: skip
def test_numbers_of_jobs_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert two_phase.short_ranges(numbers) == text


def test_output_collisions_and_unclassified_keys_are_refused(helper: Call) -> None:
    Path("jobs.json").write_text(json.dumps([fifteen_jobs()[0], {**fifteen_jobs()[0], "lr": 0.1}]))
    code, out, err = helper("jobs.json")
    assert (code, out) == (2, "")
    assert (
        "jobs.json: job 1 would write the same directory as job 0: experiments/batch10/fold0_special-methods; " in err
    )
    write([{**job, "dropout": 0.1} for job in fifteen_jobs()], "jobs.json")
    code, out, err = helper("jobs.json")
    assert (code, out) == (2, "")
    assert "key 'dropout' of job batch10/fold0_special-methods and 14 more: not classified; list it in" in err
    Path("own.json").write_text(json.dumps({"base": ["fold"], "ignored": ["dropout"]}))
    assert helper("jobs.json", "--base-models", "own.json")[0] == 0


def test_the_cluster_config_in_the_directory_of_the_list_is_the_default(helper: Call) -> None:
    cluster({"base": ["fold"]})
    cluster({}, servers=1, name="other.json")
    assert facts(helper("jobs.json")[1])["copies"] == "at most 9, to 3 servers"
    assert facts(helper("jobs.json", "--cluster-config", "other.json")[1])["copies"] == "at most 1, to 1 server"


# ---------------------------------------------------------------- explain


def test_explain_shows_the_differences_of_two_jobs(helper: Call) -> None:
    cluster(PER_FOLD)
    first, second, _ = (digest[:12] for digest in digests(**PER_FOLD))
    code, out, _ = helper("jobs.json", "explain", "0", "6")
    assert code == 0
    assert out.splitlines() == [
        f"two base models: {first} and {second}",
        "",
        "differs in        class       batch10/fold0_special-methods  batch29/fold1_compound-statements",
        'held-out          base        "special-methods"              "compound-statements"',
        'prefix            experiment  "batch10"                      "batch29"',
        "target_batch_pct  experiment  0.1                            0.29",
    ]
    assert helper("jobs.json", "explain", "0", "1")[1].startswith(f"one base model: {first}\n\ndiffers in")
    assert helper("jobs.json", "explain", "0", "0")[1] == f"one base model: {first}\n"


@pytest.mark.parametrize("other", ["1", "batch29/fold0_special-methods", "29/fold0"])
def test_explain_finds_a_job_by_number_name_or_part_of_its_name(other: str, helper: Call) -> None:
    code, out, _ = helper("jobs.json", "explain", "0", other)
    assert code == 0
    assert "  batch29/fold0_special-methods\n" in out


def test_explain_finds_a_job_by_its_id(helper: Call) -> None:
    job = read_jobs(Path("jobs.json"), DEFAULT_PARTICIPANTS)[1]
    assert f"  {job.name}\n" in helper("jobs.json", "explain", "0", job.id)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs.json", "explain", "0", "fold1"],
         "fold1: matches 5 jobs (batch10/fold1_compound-statements, "
         "batch29/fold1_compound-statements, batch50/fold1_compound-statements, batch75/fold1_compound-statements, "
         "...); give a longer part of the name, or a number from 0 to 14"),
        (["jobs.json", "explain", "0", "15"], "15: no such job; give a number from 0 to 14, an id, or a part"),
        (["jobs.json", "explain", "0"], "unknown arguments: explain 0; expected explain A B"),
        (["jobs.json", "compare", "0", "1"], "unknown arguments: compare 0 1; expected explain A B"),
        ([], "JOBS: missing; give the JSON file with the jobs"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["none.json"], "none.json: cannot read it (No such file or directory); the working "),
        (["jobs.json", "--cluster-config", "none.json"], "none.json: cannot read it (No such file or directory)"),
        (["jobs.json", "--base-models", "none.json"], "none.json: cannot read it (No such file or directory)"),
        (["jobs.json", "--base-models", "jobs.json"], "jobs.json: contains a list; expected an object with base, "),
    ],
)  # fmt: skip
def test_a_wrong_call_of_the_helper_is_refused_and_has_no_effect(
    arguments: list[str], message: str, helper: Call, directory: Path
) -> None:
    before = sorted(directory.rglob("*"))
    code, out, err = helper(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(directory.rglob("*")) == before


def test_a_number_is_never_matched_with_a_part_of_a_name(helper: Call) -> None:
    """29 is a part of three names: batch29/fold0, batch29/fold1, batch29/fold2."""
    for number in ("29", "15"):
        code, out, err = helper("jobs.json", "explain", "0", number)
        assert (code, out) == (2, "")
        assert f"{number}: no such job; give a number from 0 to 14" in err


def test_explain_reports_a_job_without_a_base_model(helper: Call) -> None:
    write([{"mode": "from_scratch", "prefix": "x", "fold": 0}, *fifteen_jobs()], "jobs.json")
    assert helper("jobs.json", "explain", "1", "0")[1] == (
        "x/fold0_special-methods: uses no base model: its mode is not full_fine_tuning; see modes in base_models\n"
    )


# ---------------------------------------------------------------- the programs themselves


def run_program(program: Path, *arguments: str, cwd: Path) -> Result:
    call = [sys.executable, str(program), *arguments]
    result = subprocess.run(call, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    return result.returncode, result.stdout, result.stderr


def test_the_helper_works_from_another_directory_with_spaces_in_paths(directory: Path) -> None:
    lists, elsewhere = directory / "my lists", directory / "else where"
    lists.mkdir()
    elsewhere.mkdir()
    (elsewhere / "distributed.py").write_text("raise AssertionError")
    Path("jobs.json").rename(lists / "my jobs.json")
    cluster(PER_FOLD, name="my lists/cluster_config.json")
    code, out, err = run_program(HELPER, "../my lists/my jobs.json", cwd=elsewhere)
    assert (code, err) == (0, "")
    assert "\nbase models        3; 0 in the cache, 3 to train\n" in out


def test_the_cache_is_listed_verified_and_pruned(directory: Path) -> None:
    known = {"model": "small", "mode": "base_only"}
    first = train(digests()[0], created=10**9, held_out_loss=1.25, settings={**known, "lr": 0.1})
    second = train("e" * 64, created=10**9, held_out_loss=1.25, settings={**known, "lr": 0.2})
    code, out, _ = run_program(PROGRAM, "cache", "list", cwd=directory)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["base", "size", "trained", "held-out", "loss", "state", "settings"]
    assert sorted((row[0], row[1], row[-3], row[-2], row[-1]) for row in rows[1:-1]) == sorted(
        [(first.name, "1.0", "1.250", "ok", "lr=0.1"), (second.name, "1.0", "1.250", "ok", "lr=0.2")]
    )
    assert out.splitlines()[-1] == "2 base models, 2.0 MB, in experiments/base_models"
    assert run_program(PROGRAM, "cache", "verify", cwd=directory)[0] == 0

    damaged = bytearray((second / WEIGHTS).read_bytes())
    damaged[1000] ^= 4
    (second / WEIGHTS).write_bytes(damaged)
    assert run_program(PROGRAM, "cache", "list", cwd=directory)[0] == 0  # `list` reads no weights
    code, out, _ = run_program(PROGRAM, "cache", "verify", cwd=directory)
    assert code == 1
    assert out.splitlines()[-1].startswith("damaged: ")
    assert out.splitlines()[-1].endswith(
        f"{second.name}/{WEIGHTS}: damaged: its checksum is not the one in manifest.json"
    )

    assert run_program(PROGRAM, "cache", "prune", cwd=directory) == (
        0, f"removed: {second.name}\n1 base model removed, 1 left\n", "",
    )  # fmt: skip
    assert run_program(PROGRAM, "cache", "prune", "--keep-used", "--jobs-config", "jobs.json", cwd=directory) == (
        0, "0 base models removed, 1 left\n", "",
    )  # fmt: skip
    assert first.exists()


@pytest.mark.parametrize("created", [1e300, 1e17, -1e17, math.nan, 10**400, "now", [1], None])
def test_a_manifest_of_another_user_with_any_time_is_listed(created: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train(digests()[0], created=created)
    assert two_phase.main(["cache", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:] == ["MB", "-", "-", "ok"]


def test_prune_removes_and_prints_no_names_of_others_in_place_of_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;own\x07\x1b[1m"
    for made in (name, f".{name}.incomplete-x"):
        Path(CACHE, made).mkdir(parents=True)
    assert two_phase.main(["cache", "prune"]) == 0
    assert capsys.readouterr().out == "0 base models removed, 0 left\n"


def test_prune_removes_unneeded_base_models_unless_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    needed = train(digests()[0])
    used, other = train("d" * 64), train("e" * 64)
    base_model.new_staging(CACHE, digests()[0])
    user = Cache(Path.cwd())
    assert user.claim("d" * 64) == "ready"
    call = ["cache", "prune", "--keep-used", "--jobs-config", "jobs.json"]
    assert two_phase.main(call) == 0
    assert capsys.readouterr().out == (
        f"removed: {other.name}\nkept, in use: {used.name}\n1 base model removed, 2 left\n"
    )
    assert base_model.names_in(CACHE, base_model.STAGED) == []
    assert needed.exists() and used.exists()
    user.release("d" * 64)
    assert two_phase.main(call) == 0
    assert not used.exists()


def test_prune_uses_the_base_models_section_of_the_cluster_config(capsys: pytest.CaptureFixture[str]) -> None:
    cluster({"version": 2}, name="c.json")
    old, new = train(digests()[0]), train(digests(version=2)[0])
    call = ["cache", "prune", "--keep-used", "--jobs-config", "jobs.json", "--cluster-config", "c.json"]
    assert two_phase.main(call) == 0
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("what", ["list", "verify", "prune"])
def test_a_missing_cache_is_empty_and_not_created(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert two_phase.main(["cache", what]) == 0
    expected = "0 base models removed, 0 left" if what == "prune" else f"0 base models, 0.0 MB, in {CACHE}"
    assert capsys.readouterr().out == expected + "\n"
    assert sorted(os.listdir()) == ["jobs.json", "train.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: what"),
        (["clean"], "argument what: invalid choice: 'clean' (choose from "),
        (["prune", "--keep-used"], "--keep-used: needs --jobs-config FILE"),
        (["prune", "--jobs-config", "jobs.json"], "--jobs-config: only with --keep-used"),
        (["prune", "--keep-used", "--jobs-config", "none.json"], "none.json: cannot read it"),
        (["prune", "--keep-used", "--jobs-config", "jobs.json", "--base-models", "jobs.json"], "jobs.json: "),
        (["list", "--verify"], "unrecognized arguments: --verify"),
    ],
)
def test_a_wrong_cache_call_is_refused_and_removes_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = train("d" * 64)
    assert two_phase.main(["cache", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert kept.exists()


def test_unusual_manifests_are_listed_and_invalid_ones_reported_as_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    path = train("d" * 64, created="yesterday", settings=[1])
    train("e" * 64, settings={"participants": ["a"], "fold": 7}, held_out_loss="low")
    assert two_phase.main(["cache", "list"]) == 0
    assert f"{path.name}  1.0 MB  -        -              ok" in capsys.readouterr().out
    (path / "manifest.json").write_text('{"digest": 3, "files": {"a": 1}}')
    assert two_phase.main(["cache", "list"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("damaged: ")
