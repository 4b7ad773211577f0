"""Lists of jobs generated in Python: each combination occurs once, and invalid lists are not written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.jobs.lists.config import ConfigError, read_jobs
from distributed.jobs.lists.generator import grid, named, percent, product, write
from distributed.jobs.lists.job import arguments

KIT = Path(__file__).resolve().parents[2]


def test_a_grid_has_each_combination_once_varying_the_last_key_fastest() -> None:
    assert grid(fold=range(2), lr=[0.1, 0.2], mode="x", n=3, flag=None) == [
        {"fold": fold, "lr": lr, "mode": "x", "n": 3, "flag": None} for fold in (0, 1) for lr in (0.1, 0.2)
    ]
    assert grid(participants=[["a", "b"]], of=(str(i) for i in range(2))) == [
        {"participants": ["a", "b"], "of": "0"}, {"participants": ["a", "b"], "of": "1"},
    ]  # fmt: skip
    assert grid(env={"A": 1}) == [{"env": {"A": 1}}]
    assert grid() == [{}]


def test_a_product_merges_jobs_and_refuses_different_values_of_a_setting() -> None:
    assert product(grid(a=[1, 2]), [{"b": 3, "c": 4}, {"b": 5}]) == [
        {"a": 1, "b": 3, "c": 4}, {"a": 1, "b": 5}, {"a": 2, "b": 3, "c": 4}, {"a": 2, "b": 5},
    ]  # fmt: skip
    assert product([{"a": 1}], [{"a": 1}]) == [{"a": 1}]
    with pytest.raises(ValueError, match="a: has the values 1 and 2 in one job; remove one"):
        product(grid(a=[1]), grid(a=[1, 2]))


def test_an_empty_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="lr: has no values, so there would be no job; give values, or leave it out"):
        grid(fold=range(3), lr=iter([]))
    with pytest.raises(ValueError, match=r"list 2 of product\(\) is empty, so there would be no job; leave it out"):
        product(grid(fold=range(3)), [])


ARRAYS: list[tuple[Any, Any]] = [
    (np.linspace(0, 1, 3), [0.0, 0.5, 1.0]),
    (np.float64(0.5), [0.5]),
    (np.int32(3), [3]),
    (np.bool_(True), [True]),
    (np.array(7), [7]),
    (np.str_("x"), ["x"]),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ([np.int64(1), np.array([2, 3])], [1, [2, 3]]),
    (torch.tensor([1, 2]), [1, 2]),
    ((range(2), (3, 4)), [[0, 1], [3, 4]]),
    (Path("a/b"), ["a/b"]),
    ({"x": 1, "y": 2}.keys(), ["x", "y"]),
]


@pytest.mark.parametrize(("value", "expected"), ARRAYS)
def test_arrays_paths_and_iterables_are_accepted_as_values(value: Any, expected: list[Any], tmp_path: Path) -> None:
    jobs = grid(a=value)
    assert [job["a"] for job in jobs] == expected
    assert [[type(job["a"]) for job in jobs]] == [[type(each) for each in expected]]
    write(named(product(jobs, [{"b": value, "_nested": "json"}]), "n{a}"), tmp_path / "jobs.json", script="x.py")
    written = json.loads((tmp_path / "jobs.json").read_text())
    assert [job["a"] for job in written] == expected


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    LOW = 1


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Colour.RED, "Colour"), (Level.LOW, "Level"), (Colour, "Colour"), (Point(1), "Point"), ({1}, "set"),
        (date(2026, 1, 1), "date"), (b"x", "bytes"), (np.array(["2026-01-01"], "M8[D]"), "date"),
        (1j, "complex"), ([{"a": {1}}], "set"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_and_its_key_is_named(value: Any, name: str, tmp_path: Path) -> None:
    message = rf"lr(\.a)?: expected strings, numbers, paths, .*, got {name}; convert it"
    with pytest.raises(ValueError, match=message):
        grid(fold=0, lr=value)
    for function in (product, lambda jobs: named(jobs, "x"), lambda jobs: write(jobs, tmp_path / "jobs.json")):
        with pytest.raises(ValueError, match=message):
            function([{"lr": value}])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="1: expected a string as key, got int"):
        product([{1: 2}])  # type: ignore[dict-item]


def test_floats_are_written_so_that_yaml_reads_them(tmp_path: Path) -> None:
    write(grid(lr=[1e-05, 0.1, 1e16], o={"eps": 1e-08}, _nested="json"), tmp_path / "jobs.json")
    text = (tmp_path / "jobs.json").read_text()
    assert [job["lr"] for job in json.loads(text)] == [1e-05, 0.1, 1e16]
    first, _, last = read_jobs(tmp_path / "jobs.json")
    assert arguments(first, "cpu")[:4] == ["--lr", "1.0e-05", "--o", '{"eps": 1.0e-08}']
    assert arguments(last, "cpu")[:2] == ["--lr", "1.0e+16"]


def test_a_product_does_not_change_its_arguments() -> None:
    one, other = [{"a": 1}], [{"b": 2}]
    product(one, other)[0]["c"] = 3
    assert (one, other) == ([{"a": 1}], [{"b": 2}])


@pytest.mark.parametrize(("share", "expected"), [(0.29, 29), (0.57, 57), (1.0, 100), (0, 0), (0.125, 12), (1.1, 110)])
def test_a_share_is_rounded_to_percent(share: float, expected: int) -> None:
    assert percent(share) == expected


@given(st.integers(0, 1000))
def test_whole_percents_are_exact(number: int) -> None:
    assert percent(number / 100) == number


def test_prefixes_are_made_from_settings() -> None:
    jobs = grid(target_batch_pct=[0.29, 1.0], lr=3e-4, model="small")
    assert [job["prefix"] for job in named(jobs, "{model}/lr{lr:.0e}-batch{target_batch_pct:%}")] == [
        "small/lr3e-04-batch29", "small/lr3e-04-batch100",
    ]  # fmt: skip
    assert "prefix" not in jobs[0]
    with pytest.raises(ValueError, match=r"job 1: no setting 'lr', used in 'x\{lr\}'"):
        named([{"lr": 1}, {}], "x{lr}")


def test_a_written_list_can_be_read(tmp_path: Path) -> None:
    jobs = named(grid(fold=range(3), target_batch_pct=[0.1, 0.29], note="größe"), "batch{target_batch_pct:%}")
    write(jobs, tmp_path / "jobs.json")
    text = (tmp_path / "jobs.json").read_text()
    assert json.loads(text) == jobs
    assert text.count("\n") == len(jobs) + 2
    assert "größe" in text
    assert read_jobs(tmp_path / "jobs.json")[0].name == "batch10/fold0"
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.json"]


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (grid(fold=[0, 0]), "job 1 is the same as job 0; remove one of them"),
        (grid(fold=0, prefix="a", lr=[1, 2]), "job 1 would write the same directory as job 0: experiments/a/fold0_"),
        (named(grid(fold=0, share=[0.29, 0.294]), "s{share:%}"), "job 1 would write the same directory as job 0"),
        (grid(fold=99), "job 0: fold: out of range for 8 participants: got 99"),
        (grid(lr=float("nan")), "job 0: contains a number that is not finite"),
        (grid(_gpu=1), "job 0: _gpu: unknown key; did you mean _gpus?"),
        ([], "contains an empty list; expected a list of jobs"),
    ],
)
def test_an_invalid_list_is_not_written(jobs: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text("before")
    with pytest.raises(ConfigError) as refused:
        write(jobs, path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_list_for_another_script_has_no_default_participants(tmp_path: Path) -> None:
    write(grid(fold=[99], prefix="x"), tmp_path / "jobs.json", script="mine.py")
    assert read_jobs(tmp_path / "jobs.json")[0].name == "x/fold99"


SCRIPT = """
from distributed_train_helper import *
import train, distributed
assert train.OF_THE_USER, "Muster's train.py must not be imported"
jobs = named(grid(fold=range(2), share=[0.1, 0.29]), "s{share:%}")
write(product(jobs, [{"mode": "full_fine_tuning"}]), "my jobs.json")
print(percent(0.29), len(jobs), distributed.__file__)
"""


def test_the_helper_can_be_imported_from_any_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my lists"
    directory.mkdir()
    (directory / "train.py").write_text("OF_THE_USER = True\n")
    (directory / "distributed.py").write_text("raise AssertionError('imported instead of the package of Muster')\n")
    (directory / "make.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(KIT / "scripts/jobs")}
    result = subprocess.run(
        [sys.executable, "make.py"], cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"29 4 {KIT}/distributed/__init__.py\n"
    assert [job.name for job in read_jobs(directory / "my jobs.json")] == [
        "s10/fold0", "s29/fold0", "s10/fold1", "s29/fold1",
    ]  # fmt: skip
