"""Tests of metrics.log() and of reading metrics.jsonl.

Each call appends one line of strict JSON, only on rank 0. An invalid call raises on all ranks. A file that cannot be
written is reported once, and does not stop the training. The newest values are found in a file of any size.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from distributed import metrics
from distributed.report.history import read_metrics

KIT = Path(__file__).resolve().parents[1]


class Tensor:
    """The part of torch.Tensor that metrics.log() uses."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.shape = () if len(values) == 1 else (len(values),)

    def item(self) -> Any:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_METRICS", str(tmp_path / "metrics.jsonl"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "metrics.jsonl"


def reject_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_each_call_appends_a_line(file: Path) -> None:
    metrics.log(1, steps=9, loss=2.5)
    metrics.log(step=2, loss=Tensor(math.nan), accuracy=Tensor(0.5))
    first, second = (json.loads(line, parse_constant=reject_constant) for line in file.read_text().splitlines())
    assert isinstance(first.pop("time"), float) and second.pop("time") > 0
    assert (first, second) == ({"step": 1, "steps": 9, "loss": 2.5}, {"step": 2, "loss": None, "accuracy": 0.5})


def test_other_ranks_and_a_script_without_a_launcher_write_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class UnreadTensor:
        def item(self) -> float:
            raise AssertionError("a rank that writes nothing must not wait for its GPU")

    monkeypatch.setenv("RANK", "1")
    metrics.log(1, loss=UnreadTensor())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MUSTER_METRICS")
    metrics.log(1, loss=2.5)
    assert not file.exists()


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (1.5, {"loss": 1.0}, r"step: expected an integer from 0 to 2\*\*53 - 1, got 1.5"),
        (-1, {"loss": 1.0}, r"step: expected an integer from 0 to 2\*\*53 - 1, got -1"),
        (True, {"loss": 1.0}, r"step: expected an integer from 0 to 2\*\*53 - 1, got True"),
        (1, {"loss": "low"}, "loss: expected a number, got str 'low'"),
        (1, {"loss": None}, "loss: expected a number, got NoneType None"),
        (1, {"loss": Tensor(1.0, 2.0, 3.0)}, "loss: expected one number, got 3"),
        (1, {"steps": -5}, r"steps: expected an integer from 0 to 2\*\*53 - 1, got -5"),
        (1, {"time": 3.0}, "time: this name is reserved"),
    ],
)
def test_an_invalid_call_raises_on_every_rank(
    file: Path, monkeypatch: pytest.MonkeyPatch, rank: str, step: Any, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(ValueError, match=message):
        metrics.log(step, **values)
    assert not file.exists()


@pytest.mark.parametrize("value", [Tensor(1.0, 2.0), Tensor("low")])
def test_a_tensor_that_is_not_one_number_is_refused(file: Path, value: Tensor) -> None:
    with pytest.raises(ValueError, match="loss: expected"):
        metrics.log(1, loss=value)


def test_a_file_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MUSTER_METRICS", str(tmp_path / "nowhere" / "metrics.jsonl"))
    metrics.log(1, loss=1.0)
    metrics.log(2, loss=1.0)
    assert capsys.readouterr().err.count("No such file or directory; metrics are lost, the training continues") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")
@pytest.mark.parametrize("link", ["metrics.jsonl", "directory"])
def test_links_of_the_user_are_followed_and_those_of_another_user_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (tmp_path / "own").mkdir()
    target = tmp_path / "own/metrics.jsonl"
    (shared / link).symlink_to(target if link == "metrics.jsonl" else target.parent)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MUSTER_METRICS", str(shared / (link if link == "metrics.jsonl" else f"{link}/metrics.jsonl")))
    metrics.log(1, loss=1.0)
    assert target.read_text().count("\n") == 1
    os.lchown(shared / link, 65534, 65534)
    metrics.log(2, loss=1.0)
    assert target.read_text().count("\n") == 1
    assert "a symbolic link of another user, which is not followed; metrics are lost" in capsys.readouterr().err


def test_status_and_report_join_the_values_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_METRICS", str(path := tmp_path / "metrics.jsonl"))
    metrics.log(4, loss=0.25, lr=0.2)
    metrics.log(5, loss=0.2, lr=0.1)
    metrics.log(5, accuracy=0.9, lr=0.1, loss=math.nan)
    history, newest = read_metrics(path, []), metrics.newest(path)
    assert newest == {"step": 5, "loss": 0.2, "lr": 0.1, "accuracy": 0.9}
    assert {name: history.series(name)[-1] for name in ("loss", "lr", "accuracy")} == {
        name: (5, newest[name]) for name in ("loss", "lr", "accuracy")
    }
    assert history.series("loss") == [(4, 0.25), (5, 0.2)]


def test_newest_reads_the_start_and_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert metrics.newest(path) == {}
    path.write_text('{"step": 1, "steps": 9, "loss": 3.0}\n[1]\n{"step": 2, "loss": null, "x": "y"}\n{"step": 3, "lo')
    assert metrics.newest(path) == {"step": 2, "steps": 9, "loss": "NaN"}
    many = range(3, 20_000)
    path.write_text('{"step": 1, "steps": 9}\n' + "".join(f'{{"step": {n}, "loss": {n / 2}}}\n' for n in many))
    assert metrics.newest(path) == {"step": 19_999, "loss": 19_999 / 2}, "steps is left out, because step exceeds it"
    path.write_text('{"step": 1, "steps": 20000}\n' + "".join(f'{{"step": {n}, "loss": {n / 2}}}\n' for n in many))
    assert metrics.newest(path) == {"step": 19_999, "steps": 20_000, "loss": 19_999 / 2}
    path.write_text('{"step": null, "steps": 9}\n{"steps": null}\n')
    assert metrics.newest(path) == {"steps": 9}


@pytest.mark.parametrize("last", ["null", "NaN", "Infinity", "-Infinity", "1e999", "1e300", "1" * 200])
def test_an_unusable_newest_loss_is_nan_and_an_unusable_number_of_steps_is_ignored(tmp_path: Path, last: str) -> None:
    lines = ['{"step": 1, "steps": 9, "loss": 2.5}', f'{{"step": 2, "steps": {last}, "loss": {last}}}', ""]
    (tmp_path / "m").write_text("\n".join(lines))
    found = metrics.newest(tmp_path / "m")
    assert found == {"step": 2, "steps": 9, "loss": "NaN"}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (None, None),
        ("", None),
        ('{"step": 3}\n{"step": 12}\n{"step": 4}\n', 12),  # the second attempt started from the beginning
        ('{"loss": 1}\n{"step": "x"}\n[1]\n{"step": null}\n', None),
        ('{"step": 7}\n{"step": 8', 7),
        ('{"step": 7}\n' + "[" * 100_000 + '\n{"step": 1e999}\n{"step": ' + "9" * 5000 + "}", 7),
        (b'{"step": 5}\n\xff\xfe{"step": 6}\n', 5),
    ],
)
def test_furthest_is_the_highest_step_of_all_attempts(
    tmp_path: Path, text: str | bytes | None, step: int | None
) -> None:
    file = tmp_path / "metrics.jsonl"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert metrics.furthest(file) == step


def test_the_furthest_step_is_in_the_last_lines_and_one_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n' + '{"step": 3}\n' * 10_000)
    assert metrics.furthest(path) == 3
    path.write_text('{"step": 9}\n' + f'{{"loss": "{"x" * 200_000}"}}\n')
    assert metrics.furthest(path) == 9


def test_only_the_end_of_a_huge_file_is_read_and_a_line_without_an_end_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a sparse file
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 7}\n')
    monkeypatch.setattr(metrics, "MAX_READ", 1 << 20)
    started = time.monotonic()
    assert metrics.furthest(path) == 7
    assert max(map(len, metrics.last_lines(path))) <= metrics.TAIL
    assert time.monotonic() - started < 5


def test_the_newest_position_is_a_number_whatever_the_script_logs(file: Path) -> None:
    metrics.log(3, epoch=1.5, loss=2.0)
    file.write_text(file.read_text() + '{"step": null, "epoch": null, "loss": null}\n')
    assert metrics.newest(file) == {"step": 3, "epoch": 1.5, "loss": "NaN"}
