"""metrics.jsonl and trackers of a run, and the facts of its machine.

Every line of metrics.jsonl is complete and valid JSON, also with NaN. The readers of TensorBoard and Weights & Biases
(offline) return the logged values. A tracker that is not installed is refused before the training starts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.training import event_files
from distributed.training.trackers import TrackerMissing, check
from distributed.training.tracking import Tracker, describe_machine

KIT = Path(__file__).resolve().parents[2]


def logging_settings(**logging: Any) -> dict[str, Any]:
    return {"logging": {"tensorboard": False, "wandb": "disabled", "project": "muster", **logging}}


def parse_strict_json(line: str) -> dict[str, Any]:
    """Parse strict JSON; Python by default accepts NaN too."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    parsed: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return parsed


# ---------------------------------------------------------------- metrics.jsonl


def test_a_line_is_complete_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with Tracker(tmp_path, logging_settings()) as tracker:
        for step in range(3):
            tracker.log(step, loss=step / 2, event="über")
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            assert len(lines) == step + 1
            assert lines[-1].endswith("\n")
            found = parse_strict_json(lines[-1])
            assert (found["step"], found["loss"], found["event"]) == (step, step / 2, "über")
            assert isinstance(found["time"], float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_null(tmp_path: Path, value: float) -> None:
    with Tracker(tmp_path, logging_settings()) as tracker:
        tracker.log(1, loss=value, lr=0.5, rank_seconds=[0.25, value])
    found = parse_strict_json((tmp_path / "metrics.jsonl").read_text())
    assert (found["loss"], found["lr"], found["rank_seconds"]) == (None, 0.5, [0.25, None])


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with Tracker(tmp_path, logging_settings()) as tracker:
            tracker.log(step, loss=1.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [parse_strict_json(line)["step"] for line in lines] == [1, 2]


def test_the_last_event_of_a_failed_run_is_written(tmp_path: Path) -> None:
    def train() -> None:
        with Tracker(tmp_path, logging_settings()) as tracker:
            tracker.log(1, event="fail", ranks=[1])
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        train()
    assert parse_strict_json((tmp_path / "metrics.jsonl").read_text())["event"] == "fail"


# ---------------------------------------------------------------- trackers

WRITE_AND_READ = """
import json, struct, sys
from pathlib import Path
from distributed.training.tracking import Tracker

run = Path(sys.argv[1])
settings = {"logging": {"tensorboard": True, "wandb": "offline", "project": "tests"}, "train": {"steps": 2}}
with Tracker(run, settings) as tracker:
    tracker.log(1, loss=0.5, lr=0.25, rank_seconds=[0.1, 0.2], event="start")
    tracker.log(2, loss=float("nan"), lr=0.125)

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(str(run / "tensorboard")).Reload()
board = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

def records(data):  # of a LevelDB log: blocks of 32 KiB with chunks of checksum, length, type and data
    at, record = 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""

from wandb.proto.wandb_internal_pb2 import Record
(file,) = run.glob("wandb/offline-run-*/*.wandb")
history, name, config = [], "", {}
for data in records(file.read_bytes()):
    record = Record.FromString(data)
    if record.HasField("history"):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        history.append({key: items[key] for key in ("_step", "loss", "lr") if key in items})
    if record.HasField("run"):
        name = record.run.display_name
        config.update((item.key, json.loads(item.value_json)) for item in record.run.config.update)
print(json.dumps({"tensorboard": board, "wandb": history, "name": name, "steps": config["train"]["steps"]}))
"""


@pytest.mark.slow
def test_both_trackers_record_the_logged_values(tmp_path: Path) -> None:
    run = tmp_path / "train-1"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WRITE_AND_READ, run],
        env={**os.environ, "PYTHONPATH": str(KIT), "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
        stdout=subprocess.PIPE, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tensorboard"] == {"loss": [[1, 0.5]], "lr": [[1, 0.25], [2, 0.125]]}
    assert found["wandb"] == [{"_step": 1, "loss": 0.5, "lr": 0.25}, {"_step": 2, "lr": 0.125}]
    assert (found["name"], found["steps"]) == ("train-1", 2)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("package", "logging", "setting"),
    [
        ("tensorboard", {"tensorboard": True}, "logging.tensorboard=true"),
        ("wandb", {"wandb": "offline"}, "logging.wandb=offline"),
        ("wandb", {"wandb": "online"}, "logging.wandb=online"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, package: str, logging: dict[str, Any], setting: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(TrackerMissing) as refused:
        check(logging_settings(**logging))
    assert str(refused.value) == (
        f"{setting}, but the package {package} is not installed: python -m pip install -r requirements-trackers.txt"
    )
    assert f"\n{package}>=" in (KIT / "requirements-trackers.txt").read_text()


def test_a_disabled_tracker_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check(logging_settings())


def test_a_directory_with_the_name_of_a_tracker_is_not_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb writes its files to a directory wandb."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(TrackerMissing):
        check(logging_settings(wandb="offline"))


def test_installed_trackers_are_accepted() -> None:
    check(logging_settings(tensorboard=True, wandb="offline"))


# ---------------------------------------------------------------- the machine


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert set(machine) == {"host", "cpu", "cores", "memory_bytes", "python", "platform", "torch", "gpus"}
    assert machine["cores"] == len(os.sched_getaffinity(0))
    kibibytes = re.search(r"^MemTotal: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert kibibytes
    assert machine["memory_bytes"] == int(kibibytes[1]) * 1024
    assert machine["cpu"]


def test_only_regular_event_files_are_read(tmp_path: Path) -> None:
    """A FIFO would block the report."""
    names = [f"events.out.tfevents.{1_700_000_000 + number}.n1" for number in range(3)]
    (tmp_path / names[0]).touch()
    (tmp_path / names[1]).symlink_to(names[0])
    os.mkfifo(tmp_path / names[2])
    assert list(event_files.find(str(tmp_path), 1e9, 2e9, os.geteuid())) == [str(tmp_path / names[0])]


def test_a_search_for_event_files_survives_deeply_nested_directories(
    tmp_path: Path, nest: Callable[[Path, str], None]
) -> None:
    (tmp_path / (name := "events.out.tfevents.1700000000.host")).write_text("")
    nest(tmp_path / "runs", "0")
    assert list(event_files.find(str(tmp_path), 1e9, 2e9, os.geteuid())) == [str(tmp_path / name)]


def test_event_files_of_another_user_are_not_read(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files to another user")
    for name, owner in (("own", os.geteuid()), ("planted", 65534)):
        (tmp_path / name).mkdir()
        (file := tmp_path / name / "events.out.tfevents.1700000000.n1").write_text("")
        os.chown(file, owner, -1)
    found = event_files.find(str(tmp_path), 1.6e9, 1.8e9, os.geteuid())
    assert [Path(path).parent.name for path in found] == ["own"]
