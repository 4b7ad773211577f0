"""The report of a run has correct content for any content of the run directory.

Values come from the files, lines that a resumed run replaced are left out, slow and failed ranks are named, text is
escaped, the page needs no network, and missing, incomplete or invalid files still give a page.
"""

from __future__ import annotations

import html
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distributed import metrics
from distributed.metrics import FROM_OUTPUT, FROM_TENSORBOARD
from distributed.report import charts, ranks, report
from distributed.report import history as history_module
from distributed.report.history import History, read_metrics
from distributed.transport.commands import quote

KIT = Path(__file__).resolve().parents[2]
HOSTILE = '<script>alert("x")</script>&\'</title><!--'
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}

Json = dict[str, Any]


# ---------------------------------------------------------------- example runs


def step_line(step: int, seconds: Iterable[float] = (0.05, 0.051), **changes: Any) -> Json:
    """What train.py logs at a step."""
    return {
        "step": step,
        "time": 1.7e9 + step,
        "loss": 4.0 - step / 1000,
        "lr": 3e-4,
        "grad_norm": 1.5,
        "tokens_per_second": 12_345.6,
        "step_seconds": 0.081,
        "rank_seconds": list(seconds),
    } | changes


def held_out(step: int, loss: float) -> Json:
    return {"step": step, "time": 1.7e9 + step, "held_out_loss": loss}


def event(step: int, name: Any, **more: Any) -> Json:
    return {"step": step, "time": 1.7e9 + step, "event": name, **more}


def run_json(**changes: Any) -> Json:
    return {
        "run": "train-20250102-030405-9f3a",
        "command": ["train.py", "--config", "my config.yaml"],
        "started": "2025-01-02T03:04:05+01:00",
        "nodes": ["node1"],
        "nproc": 2,
        "cwd": "/home/ada/texts",
        "user": "ada",
        "git": {"commit": "28c5a2e97d1afa83f24f9f17d67c0081ee4e4a8a", "dirty": True},
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
    } | changes


def settings_json(**changes: Any) -> Json:
    return {
        "settings": {
            "model": {"n_layer": 6, "n_embd": 384, "vocab_size": None},
            "data": {"path": None},
            "train": {"steps": 500, "min_learning_rate": 3e-5},
        },
        "world": {"size": 2, "nodes": 1, "strategy": "ddp", "backend": "gloo", "device": "cpu"},
        "machine": {"host": "node1", "cpu": "EPYC", "cores": 64, "memory_bytes": 2**36, "gpus": ["H100", "H100"]},
        "model": {"parameters": 10_795_776},
    } | changes


def write_run(directory: Path, lines: Iterable[Json] = (), tail: str = "", **files: Json | str) -> Path:
    """Write metrics.jsonl (lines, then the text `tail`) and NAME.json for each of `files` to a run directory."""
    metrics = "".join(json.dumps(line) + "\n" for line in lines) + tail
    texts = {f"{name}.json": value if isinstance(value, str) else json.dumps(value) for name, value in files.items()}
    for name, text in (({"metrics.jsonl": metrics} if metrics else {}) | texts).items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


class Reader(HTMLParser):
    """The texts and elements of a page; faults: elements that are not closed correctly."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []  # outside of styles and scripts
        self.feed(page)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes what is not open")

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] not in ("style", "script") and text.strip():
            self.texts.append(text.strip())

    def tiles(self) -> dict[str, tuple[str, str]]:
        """The tiles at the top: name -> (value, note)."""
        names = ("Training loss", "Held-out loss", "Tokens per second", "Steps",
                 "Wall time", "Ranks", "Parameters")  # fmt: skip
        heads = [n for n, text in enumerate(self.texts[: self.texts.index("Training")]) if text in names]
        return {self.texts[n]: (self.texts[n + 1], self.texts[n + 2]) for n in heads}

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def page(run: Path) -> str:
    return report.write(run).read_text(encoding="utf-8")


def parsed(run: Path) -> Reader:
    reader = Reader(page(run))
    assert reader.faults == []
    return reader


# ---------------------------------------------------------------- values


def test_the_tiles_have_the_values_of_the_files(tmp_path: Path) -> None:
    lines = [*(step_line(step) for step in range(10, 501, 10)), held_out(300, 2.9), held_out(500, 3.0)]
    verdict = {"outcome": "ok", "exit_code": 0, "time": None}
    run = write_run(tmp_path, lines, run=run_json(started=None), settings=settings_json(), verdict=verdict)
    reader = parsed(run)
    assert reader.tiles() == {
        "Training loss": ("3.500", "at step 500"),
        "Held-out loss": ("3.000", "best 2.900 at step 300"),
        "Tokens per second": ("12,346", "6,173 per rank"),
        "Steps": ("500", "of 500"),
        "Wall time": ("8 min 10 s", "81 ms per step"),
        "Ranks": ("2", "on 1 node, ddp, gloo, cpu"),
        "Parameters": ("10.8 M", "6 layers, width 384"),
    }
    assert "finished" in reader.texts


def test_all_settings_and_the_machine_are_shown(tmp_path: Path) -> None:
    texts = parsed(write_run(tmp_path, run=run_json(), settings=settings_json())).texts
    pairs = set(pairwise(texts))
    assert pairs >= {
        ("vocab_size", "not set"), ("n_layer", "6"), ("min_learning_rate", "3e-05"), ("cpu", "EPYC"),
        ("memory", "64.0 GiB"), ("gpus", "2 × H100"), ("python", "3.11.2"), ("torch", "2.13.0"),
        ("node names", "node1"), ("backend", "gloo"),
    }  # fmt: skip
    assert "train.py --config 'my config.yaml'" in texts
    assert "commit 28c5a2e97d1afa83f24f9f17d67c0081ee4e4a8a, with uncommitted changes" in texts
    assert "started 2025-01-02 03:04:05 UTC+01:00" in texts


# ---------------------------------------------------------------- outcome


def test_a_failed_run_shows_rank_cause_and_traceback(tmp_path: Path) -> None:
    verdict = {
        "outcome": "failed", "exit_code": 134, "node": "node2", "rank": 11, "time": 1735783445.0,
        "cause": "rank 11 on node2 ran out of memory", "exception": "OutOfMemoryError", "message": "tried 2 GiB",
        "traceback": "Traceback (most recent call last):\n  File \"train.py\"",
        "collateral": [{"node": "node1", "rank": 3, "message": "Connection closed by peer"}],
    }  # fmt: skip
    lines = ["loss <1>", "", *map("\x1b[31mline {}\x1b[0m".format, range(30)), *str(verdict["traceback"]).splitlines()]
    log = "".join(f"[node2:11] {line}\n[node2:12] of another rank\n" for line in lines)
    (tmp_path / "node_node2.log").write_text(f"{log}agent: rank 11 ended with exit code 134\n")
    reader = parsed(write_run(tmp_path, [step_line(10), event(10, "finish")], run=run_json(), verdict=verdict))
    for text in (
        "failed", "rank 11 on node2 ran out of memory", "rank 11", "on node2", "exit code 134",
        "OutOfMemoryError: tried 2 GiB", 'Traceback (most recent call last):\n  File "train.py"',
        "rank 3 on node1: Connection closed by peer",
    ):  # fmt: skip
        assert text in reader.texts
    assert "\n".join(f"line {number}" for number in range(10, 30)) in reader.texts
    page = (tmp_path / "report.html").read_text()
    assert page.count("<details open>") == 2
    assert "<details open><summary>Traceback</summary>" in page


@pytest.mark.parametrize(
    ("verdict", "last", "kind"),
    [
        ({"outcome": "ok"}, "start", "finished"),
        ({"outcome": "stopped"}, "start", "stopped"),
        ({"outcome": "failed"}, "finish", "failed"),
        ({}, "finish", "finished"),
        ({}, "stop", "stopped"),
        ({}, "nonfinite", "failed"),
        ({}, "fail", "failed"),
        ({}, "resume", "open"),
        ({}, "checkpoint", "open"),
    ],
)
def test_the_outcome_is_that_of_the_verdict_or_the_last_event(
    tmp_path: Path, verdict: Json, last: str, kind: str
) -> None:
    run = report.read(write_run(tmp_path, [event(0, "start"), event(9, last)], verdict=verdict))
    assert report.outcome_of(run).kind == kind


def test_a_stopped_run_says_how_to_resume_if_a_checkpoint_was_written(tmp_path: Path) -> None:
    assert "run the same command again to resume" in parsed(write_run(tmp_path, [event(9, "stop")])).text
    cause = "interrupted (Ctrl-C); no rank had failed"
    text = parsed(write_run(tmp_path, verdict={"outcome": "stopped", "exit_code": 130, "cause": cause})).text
    assert cause in text and "checkpoint written" not in text


def test_without_a_verdict_a_nonfinite_event_is_shown_as_the_cause(tmp_path: Path) -> None:
    run = write_run(tmp_path, [step_line(10, loss=None), event(10, "nonfinite", rank=1)])
    assert "Loss not finite at step 10: rank 1" in parsed(run).texts


# ---------------------------------------------------------------- replaced lines


def test_a_lower_step_replaces_the_lines_of_later_steps_even_if_no_resume_event_was_logged(tmp_path: Path) -> None:
    lines = [step_line(10, loss=9.0), step_line(20, loss=9.0), held_out(20, 9.0), step_line(10, loss=1.0)]
    run = report.read(write_run(tmp_path, lines))
    assert run.history.series("loss") == [(10, 1.0)]
    assert run.history.held_out_losses() == []


def test_a_line_with_both_losses_or_a_checkpoint_event_of_an_earlier_step_replaces_nothing(tmp_path: Path) -> None:
    both = step_line(20) | {"held_out_loss": 2.0}
    run = report.read(write_run(tmp_path, [step_line(10), both, event(10, "checkpoint")]))
    assert [step for step, _ in run.history.series("loss")] == [10, 20]
    assert run.history.held_out_losses() == [(20, 2.0)]


def test_a_resumed_run_replaces_the_lines_after_its_checkpoint_and_shows_them_as_an_earlier_attempt(
    tmp_path: Path,
) -> None:
    lines = [*(step_line(step, loss=9.0) for step in (10, 20, 30)), held_out(30, 8.0), event(20, "resume")]
    run = report.read(write_run(tmp_path, [*lines, step_line(30, loss=1.0)]))
    assert run.history.series("loss") == [(10, 9.0), (20, 9.0), (30, 1.0)]
    assert run.history.held_out_losses() == []
    [earlier] = run.history.earlier
    assert earlier.series("loss") == [(20, 9.0), (30, 9.0)], "from the last common step"
    assert earlier.held_out_losses() == [(30, 8.0)]
    text = page(tmp_path)
    assert "dashed: earlier attempts" in text and 'class="line earlier"' in text


def test_a_run_that_resumed_from_another_one_shows_its_history(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("first", "second", "third")]
    for number, directory in enumerate(runs):
        directory.mkdir()
        # the directory of all runs was moved
        before = [event(10 * number, "resume", run=f"/moved/{runs[number - 1].name}")] if number else []
        write_run(
            directory, [*before, step_line(10 * number + 10, loss=number), step_line(10 * number + 20, loss=number)]
        )
    found = report.read(runs[2]).history
    assert [earlier.series("loss") for earlier in found.earlier] == [[(10, 0), (20, 0)], [(20, 1), (30, 1)]]
    write_run(runs[0], [event(5, "resume", run=str(runs[2])), step_line(10)])
    assert len(report.read(runs[2]).history.earlier) == 2, "a cycle ends"


def test_a_line_of_another_metric_at_an_earlier_step_replaces_nothing(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0} for step in (10, 20, 30)]
    lines[2:2] = [{"step": 10, "accuracy": 0.5}, {"step": 20, "accuracy": 0.6}]
    lines += [{"step": 25, "accuracy": 0.7}]
    found = report.read(write_run(tmp_path, lines)).history
    assert [step for step, _ in found.series("loss")] == [10, 20, 30]
    assert found.series("accuracy") == [(10, 0.5), (20, 0.6), (25, 0.7)]
    found.add({"step": 10, "loss": 2.0})  # restarted
    assert (found.series("loss"), found.series("accuracy")) == ([(10, 2.0)], [(10, 0.5)])


def test_metrics_that_a_user_script_logs_have_charts(tmp_path: Path) -> None:
    lines = [{"step": step, "steps": 30, "top-5 <b>": step / 50, "never": None} for step in (10, 20)]
    reader = parsed(write_run(tmp_path, lines))
    assert "top-5 <b>" in reader.texts and "never" not in reader.texts and "Loss" not in reader.texts
    assert "nats a token" not in reader.text and reader.tiles()["Steps"] == ("20", "of 30")
    for outcome, note in (("ok", "done"), ("failed", "so far")):
        run = write_run(tmp_path, [*lines, {"step": 40, "x": 1}], verdict={"outcome": outcome})
        assert parsed(run).tiles()["Steps"] == ("40", note), "never 40 of 30"


def test_invalid_lines_are_counted_except_an_incomplete_last_one(tmp_path: Path) -> None:
    cut = write_run(tmp_path, [step_line(10)], tail='{"step": 20, "lo')
    assert report.read(cut).notes == []
    broken = write_run(tmp_path, tail='nonsense\n[1]\n{"step": "x"}\n' + json.dumps(step_line(10)) + "\n")
    assert report.read(broken).notes == ["metrics.jsonl: ignored 3 invalid lines"]
    assert len(report.read(broken).history.steps) == 1


VALUES = st.sampled_from([1, 2, None])


class SimpleHistory(History):
    """History as it was: each line is compared with all others."""

    def add(self, line: Json) -> None:
        step, keys = line["step"], line.keys() - {"step", "time", "steps", "held_out_loss"}
        if "event" in line or "held_out_loss" in line:
            super().add({key: value for key, value in line.items() if key not in keys - {"event"}})
        if "event" in line or not keys:
            return
        if any(one["step"] > step and not keys.isdisjoint(one) for one in self.steps):
            self._go_back_to(step)
        joined = next((one for one in self.steps if one["step"] == step), None)
        if joined is None:
            self.steps.append(joined := {"step": step})
            self.steps.sort(key=lambda one: float(one["step"]))
        joined |= {key: value for key, value in line.items() if value is not None or key not in joined}

    def _forget(self, lines: Iterable[Json]) -> None:
        pass


@given(
    st.lists(
        st.builds(
            lambda step, keys: {"step": float(step)} | keys,
            st.integers(0, 6),
            st.dictionaries(st.sampled_from(["a", "b", "c", "time", "held_out_loss"]), VALUES, max_size=3)
            | st.just({"event": "resume"}),
        ),
        max_size=25,
    )
)
def test_lines_of_a_step_are_joined_and_an_earlier_step_replaces_later_ones_that_share_a_key(lines: list[Json]) -> None:
    found, expected = History(), SimpleHistory()
    for line in lines:
        found.add(line)
        expected.add(line)
    assert (found.steps, found.held_out_losses()) == (expected.steps, expected.held_out_losses())
    assert [one.steps for one in found.earlier] == [one.steps for one in expected.earlier]


WRITE_SLOWLY = """
import sys, time
from pathlib import Path
from distributed.launch import run
from distributed.report import report
def write(directory, ended):
    print("writing", flush=True)
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # as the report ignores faults of files
            pass
report.write = write
run.REPORT_TIMEOUT = int(sys.argv[2])
launch = run.Launch.__new__(run.Launch)
launch.directory, launch._print = Path(sys.argv[1]), print
launch.write_report()
print("exits")
"""


@pytest.mark.parametrize(("limit", "number"), [(60, signal.SIGTERM), (60, signal.SIGINT), (1, 0)])
def test_a_launcher_exits_without_a_report_after_a_signal_or_a_time(tmp_path: Path, limit: int, number: int) -> None:
    call = [sys.executable, "-c", WRITE_SLOWLY, str(tmp_path), str(limit)]
    with subprocess.Popen(call, cwd=KIT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == "writing\n"
        if number:
            launcher.send_signal(number)
        line, last = launcher.stdout.read().splitlines()
    reason = signal.Signals(number).name if number else "it took 1 s"
    remedy = quote([f"{KIT}/scripts/report.sh", str(tmp_path)])
    assert line == f"report.html: not written: {reason}; to write it: {remedy}"
    assert (last, launcher.returncode, list(tmp_path.iterdir())) == ("exits", 0, [])


@pytest.mark.parametrize(
    "line",
    [
        lambda n: "{}",
        lambda n: f'{{"step":1,"k{n}":1}}',
        lambda n: f'{{"step":{n},"k{n}":1}}',
        lambda n: f'{{"step":1,"k{n % 900}":1}}',
        lambda n: f'{{"step":{n % 2},"a":1}}',
        lambda n: f'{{"step":{n},"{"ab"[n > 15_000]}":1}}'.replace(f"{n},", f"{n % 15_001},"),
    ],
)
def test_a_page_is_read_in_linear_time(tmp_path: Path, line: Callable[[int], str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line(n)}\n" for n in range(30_000)))
    started = time.process_time()
    read_metrics(path, [])
    assert time.process_time() - started < 20  # quadratic: minutes


def test_what_is_left_out_of_large_files_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [{"step": 1, "loss": 2.0} | {f"k{n}": 1 for n in range(2000)}, {"step": 2, "loss": 1.0, "other": 1}]
    run = report.read(write_run(tmp_path, many))
    assert len(run.history.names()) < 1000 and run.history.series("loss") == [(1.0, 2.0), (2.0, 1.0)]
    assert run.notes == ["metrics.jsonl: only the first 1,000 names are read"]
    for module in (metrics, history_module):
        monkeypatch.setattr(module, "MAX_READ", 1 << 20)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 2, "{"k" * 200}": 1}}\n' * 6000)
    first, *others = report.read(tmp_path).notes
    assert first == "metrics.jsonl: only its last 1 MiB are read" and not others


def test_of_many_lines_those_of_a_frequent_kind_are_left_out_evenly_and_no_other(tmp_path: Path) -> None:
    lines: list[Json] = []
    for n in range(50_000):
        lines.append({"step": n, f"loss_{n % 2}": 1 / (n + 1), "time": 1.7e9 + n})
        lines += [{"step": n, "accuracy": 0.5}] if n % 100 == 0 else []
        lines += [event(n, "checkpoint")] if n % 1000 == 0 else []
    run = report.read(write_run(tmp_path, lines))
    history = run.history
    assert len(history.series("accuracy")) == 500 and len(history.events) == 50
    for name in ("loss_0", "loss_1"):
        steps = [step for step, _ in history.series(name)]
        assert 2000 < len(steps) < 20_000 and max(b - a for a, b in pairwise(steps)) < 50
    assert history.series("loss_1")[-1][0] == 49_999
    found = re.fullmatch(r"metrics.jsonl: ([0-9,]+) of 50,550 lines are shown, evenly spaced", " ".join(run.notes))
    assert found and 5000 < int(found[1].replace(",", "")) < 20_100


HOSTILE_LINES = {
    "lists": '{"step": %d, "loss": [' + "[]," * 20_000 + "[]]}",
    "a text": '{"step": %d, "a": "' + "x" * 60_000 + '"}',
    "names": '{"step": %d' + "".join(f', "k{n}": 1' for n in range(990)) + "}",
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES.keys())
def test_hostile_lines_of_metrics_take_little_memory(tmp_path: Path, line: str) -> None:
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for n in range((48 << 20) // len(line)):
            file.write(line % n + "\n")
    program = "import sys, pathlib\nfrom distributed.report import report\nreport.write(pathlib.Path(sys.argv[1]))\n"
    program += "print(pathlib.Path('/proc/self/status').read_text())"  # ru_maxrss would be that of the tests at least
    call = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(call, cwd=KIT, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout.partition("VmHWM:")[2].split()[0]) < 400 << 10  # KiB; it was 1,600 << 10


def test_the_last_earlier_attempts_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path, [step_line(n % 10) for n in range(5000)])
    assert len(report.read(run).history.earlier) == 20
    text = report.write(run).read_text()
    assert "dashed: the last 20 earlier attempts" in text and len(text) < 400_000


def test_events_are_marked(tmp_path: Path) -> None:
    lines = [
        step_line(10),
        event(20, "resume"),
        step_line(30),
        event(30, "checkpoint"),
        event(40, "stop"),
        step_line(50),
    ]
    texts = parsed(write_run(tmp_path, lines)).texts
    assert {"resumed", "stopped", "resumed at step 20", "checkpoint at step 30", "stopped at step 40"} <= set(texts)


# ---------------------------------------------------------------- ranks


def ranks_of(directory: Path, *seconds: float, nodes: Iterable[str] = ("node1",)) -> list[ranks.RankTiming]:
    nodes = list(nodes)
    lines = [step_line(step, seconds) for step in (10, 20, 30)]
    run = report.read(write_run(directory, lines, run=run_json(nodes=nodes, nproc=len(seconds))))
    return ranks.compare(run.history.by_rank("rank_seconds"), run.nodes)


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        ([0.1] * 3 + [0.18] + [0.1] * 4, "Rank 3 (node1) takes 1.8× as long as the median; every step waits for it."),
        ([0.1, 0.14], "Rank 1 (node1) takes 1.4× as long as the median; every step waits for it."),
        ([0.1] * 5 + [0.15, 0.2, 0.1, 0.3], "Ranks 5-6, 8 (node1) take 1.5× to 3.0× as long as the median; "
         "every step waits for rank 8."),
        ([0.1, 0.1, 0.117], "Rank 2 (node1) takes 1.17× as long as the median; every step waits for it."),
        ([0.1, 0.1, 0.11], "No straggler: the slowest, rank 2, takes 1.10× as long as the median."),
        ([0.1, 0.13], "No straggler: the slowest, rank 1, takes 1.3× as long as the median."),
        ([0.1, 0.1], "No straggler: the slowest, rank 0, takes 1.00× as long as the median."),
    ],
)  # fmt: skip
def test_stragglers_are_named(tmp_path: Path, seconds: list[float], sentence: str) -> None:
    assert ranks.comparison(ranks_of(tmp_path, *seconds)) == sentence
    assert sentence in parsed(tmp_path).texts


def test_the_host_of_a_straggler_is_named(tmp_path: Path) -> None:
    found = ranks_of(tmp_path, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, nodes=("a", "b", "c"))
    assert ranks.comparison(found).startswith("Ranks 4-5 (c) take ")
    assert [rank.host for rank in found] == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("size", [1, 2, 8, 16, 17, 256, 1300])
def test_any_number_of_ranks_has_a_chart(tmp_path: Path, size: int) -> None:
    slow = size // 2
    seconds = [0.1 * (1.5 if rank == slow and size > 1 else 1) for rank in range(size)]
    lines = [step_line(step, seconds) for step in range(10, 200, 10)]
    text = page(write_run(tmp_path, lines, run=run_json(nproc=size)))
    reader = Reader(text)
    assert reader.faults == []
    assert f"rank {slow}" in reader.texts
    assert ('class="line slow"' in text) == (size > 1)
    assert ("median of all ranks" in text) == (size > 16)
    assert len(text) < 200_000


def test_after_a_change_of_world_size_only_values_of_the_last_world_size_are_compared(tmp_path: Path) -> None:
    lost: list[Any] = [0.1, None]
    lines = [step_line(10, [0.1, 0.9, 0.1]), step_line(20, [0.1, 0.1]), step_line(30, lost)]
    run = report.read(write_run(tmp_path, lines))
    assert [rank.median for rank in ranks.compare(run.history.by_rank("rank_seconds"), run.nodes)] == [0.1, 0.1]


# ---------------------------------------------------------------- waiting time and resource usage


def test_the_share_of_a_step_that_ranks_wait_is_shown(tmp_path: Path) -> None:
    lines = [step_line(step, wait_share=[0.1, 0.3]) for step in (10, 20)]
    reader = parsed(write_run(tmp_path, lines))
    assert "Waiting for other ranks" in reader.texts
    assert reader.texts[reader.texts.index("Waiting") + 1] == "20%"
    assert "Waiting for other ranks" not in parsed(write_run(tmp_path, [step_line(10, wait_share=[])])).texts


def sample(time: float, *ranks: tuple[float, int, int], gpus: Json | None = None) -> Json:
    """ranks: CPU seconds, bytes of memory and total bytes of output of each."""
    values = {str(rank): dict(zip(("cpu", "memory", "output"), one, strict=True)) for rank, one in enumerate(ranks)}
    return {"time": 1.7e9 + time, "ranks": values} | ({"gpus": gpus} if gpus else {})


def attempt(directory: Path, *samples: Json, node: str = "node2", tail: str = "", processes: int | None = None) -> Path:
    """Write a run directory with the samples of this node. tail: text after the samples."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"node_{node}.samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples) + tail)
    layout = [{"node": "node1", "first_rank": 0}, {"node": "node2", "first_rank": 2, "processes": processes}]
    return write_run(directory, run=run_json(layout=layout))


@pytest.mark.parametrize("names", [("attempts/1", "attempts/2"), ("attempt_1", "")], ids=["now", "version 0.1.0"])
def test_resource_usage_is_drawn_for_all_attempts(tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = (tmp_path / name for name in names)
    attempt(first, sample(0, (1, 8, 0)), sample(2, (4, 9, 100)), sample(4, (5, 9, 100)))
    attempt(second, sample(9, (0, 7, 0), (0, 1, 0)), sample(10, (2, 7, 50), (0, 1, 0)), tail='{"time": 1')
    usage = report.read(tmp_path).usage
    assert (usage.attempts, usage.last) == ({1: 1.7e9, 2: 1.7e9 + 9}, 1.7e9 + 10)
    assert [*usage.of("cpu")] == ["rank 2", "rank 3"]
    cores = [(time - 1.7e9, value) for time, value in usage.of("cpu")["rank 2"]]
    assert [point for point in cores if math.isfinite(point[1])] == [(2, 1.5), (4, 0.5), (10, 2.0)]
    assert [math.isnan(value) for _, value in cores] == [False, False, True, False], "a gap between two attempts"
    assert [value for _, value in usage.of("output")["rank 2"] if value >= 0] == [50, 0, 50]
    reader = parsed(tmp_path)
    assert {"Usage", "CPU", "Memory", "Output", "rank 3"} <= set(reader.texts)
    assert any(text.startswith("attempt 2 after ") for text in reader.texts)
    assert "No metrics were logged, and no step was found in the output." in reader.text


def test_a_node_has_no_samples_of_ranks_on_other_nodes(tmp_path: Path) -> None:
    gpus = {"0": {"use": 9, "memory": 1, "ranks": [0, *[1] * 5_000]}}
    attempt(tmp_path, *(sample(n, (n, 8, 0), (n, 8, 0), gpus=gpus) for n in range(3)), processes=1)
    assert {name for lines in report.read(tmp_path).usage.series.values() for name in lines} == {"rank 2"}


def test_samples_with_huge_lists_are_ignored_and_take_little_time(tmp_path: Path) -> None:
    gpus = {"0": {"use": 9, "memory": 1, "ranks": [1] * 20_000}}
    attempt(tmp_path, *(sample(n, (n, 8, 0), gpus=gpus) for n in range(200)), sample(900, (9, 8, 0)))
    started = time.process_time()
    usage = report.read(tmp_path).usage
    assert time.process_time() - started < 2
    assert [len(lines) for lines in usage.of("memory").values()] == [1]


def test_samples_name_ranks_and_gpus_by_numbers_and_few_samples_are_read(tmp_path: Path) -> None:
    """A node can write any file: other names, and many samples, do not make the report large."""
    values = {"cpu": 1, "memory": 8, "output": 0}
    gpus = {name: {"use": 9, "memory": 1, "ranks": [[], "x" * 999, -1, 10**12, 1]} for name in ("0", "x" * 999)}
    ranks = dict.fromkeys(["1", "x" * 999, "-1", "\u0661", "10000", ""], values)
    attempt(tmp_path, *({"time": 1.7e9 + n, "ranks": ranks, "gpus": gpus} for n in range(3000)))
    usage = report.read(tmp_path).usage
    assert {kind: list(lines) for kind, lines in usage.series.items()} == {
        kind: ["rank 3"] for kind in ("memory", "cpu", "output", "gpu", "gpu_memory")
    }
    assert all(100 < len(usage.of(kind)["rank 3"]) <= 200 for kind in usage.series)


def test_the_usage_of_many_attempts_is_that_of_the_last_ones_with_fewer_samples_of_each(tmp_path: Path) -> None:
    for n in range(1, 61):
        samples = [sample(100 * n + second, (second, 8, second)) for second in range(50)]
        attempt(tmp_path / f"attempt_{n}" if n < 60 else tmp_path, *samples)
    usage = report.read(tmp_path).usage
    assert usage.attempts == {n: 1.7e9 + 100 * n for n in range(11, 61)}
    assert all(100 < len(usage.of(kind)["rank 2"]) <= 250 for kind in usage.series)


def test_metrics_that_were_found_in_the_output_are_marked(tmp_path: Path) -> None:
    lines = [{"step": step, "time": 1.7e9 + step, "loss": 3.0 - step, "steps": 9} for step in range(3)]
    lines.append({"time": 1.7e9, "loss": 0.5, "epoch": 0.1})
    (tmp_path / FROM_OUTPUT).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reader = parsed(tmp_path)
    assert {"from the output, at step 2", "from the output, of 9", "from the output"} <= set(reader.texts)
    assert "ignored" not in reader.text
    target = report.compare([report.read(tmp_path)] * 2, tmp_path / "comparison.html")
    assert "from the output" in target.read_text()
    write_run(tmp_path, [step_line(4)])
    assert "from the output" not in parsed(tmp_path).text


WRITE_EVENTS = """
import sys
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(sys.argv[1]) as writer:
    for step in range(3):
        writer.add_scalar("Loss/train", 2.0 - step, step)
        writer.add_scalar("accuracy", step / 4, step)
"""


def test_scalars_that_a_run_wrote_for_tensorboard_are_in_the_report(tmp_path: Path) -> None:
    started = datetime.now(timezone.utc).isoformat()
    run = tmp_path / "logs" / "train-1"
    run.mkdir(parents=True)
    write_run(run, run=run_json(started=started, cwd=str(tmp_path)))
    old = tmp_path / "events.out.tfevents.1600000000.n1.1.0"
    old.write_bytes(b"damaged")
    subprocess.run([sys.executable, "-c", WRITE_EVENTS, tmp_path / "runs" / "one"], check=True, timeout=120)
    other = tmp_path / "logs" / "train-2"
    other.mkdir()
    write_run(other, [step_line(4)])
    assert report.main([str(other), str(run), "--from", str(tmp_path)]) == 0
    assert "from TensorBoard" in (tmp_path / "logs" / "comparison.html").read_text()
    (run / FROM_TENSORBOARD).unlink()
    assert report.main([str(run)]) == 0
    lines = [json.loads(line) for line in (run / FROM_TENSORBOARD).read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [(0, 2.0), (1, 1.0), (2, 0.0)]
    reader = parsed(run)
    assert {"from TensorBoard, at step 2", "accuracy"} <= set(reader.texts)


def test_event_files_are_not_read_if_another_run_wrote_some_at_the_same_time(tmp_path: Path) -> None:
    started = datetime.now(timezone.utc).isoformat()
    for name in ("one", "two"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        write_run(tmp_path / "logs" / name, run=run_json(started=started, cwd=str(tmp_path)))
    subprocess.run([sys.executable, "-c", WRITE_EVENTS, tmp_path / "runs" / "one"], check=True, timeout=120)
    assert report.main([str(tmp_path / "logs" / "one")]) == 0
    assert not (tmp_path / "logs" / "one" / FROM_TENSORBOARD).exists()


def test_a_damaged_event_file_does_not_prevent_a_report(tmp_path: Path) -> None:
    started = datetime.now(timezone.utc).isoformat()
    write_run(tmp_path, run=run_json(started=started, cwd=str(tmp_path)))
    (tmp_path / f"events.out.tfevents.{time.time():.0f}.n1.1.0").write_bytes(b"damaged")
    assert report.main([str(tmp_path)]) == 0


def test_gpu_use_is_shown_per_rank_but_per_gpu_if_the_ranks_that_use_the_gpus_are_unknown(tmp_path: Path) -> None:
    rank, gpus = (
        (1.0, 8, 0),
        {"3": {"use": 90, "memory": 2**30, "ranks": [0]}, "4": {"use": 0, "memory": 5, "ranks": []}},
    )
    attempt(tmp_path, sample(0, rank, gpus=gpus), sample(1, rank))
    assert report.read(tmp_path).usage.of("gpu") == {"rank 2": [(1.7e9, 0.9)]}
    assert {"GPU use", "GPU memory"} <= set(parsed(tmp_path).texts)
    gpus["3"]["ranks"] = []  # in a container, where nvidia-smi shows other pids
    attempt(tmp_path, sample(0, rank, gpus=gpus))
    assert [*report.read(tmp_path).usage.of("gpu")] == ["node2 GPU 3", "node2 GPU 4"]


@pytest.mark.parametrize("size", [5, 17, 300])
def test_the_usage_of_any_number_of_ranks_makes_a_small_page(tmp_path: Path, size: int) -> None:
    attempt(tmp_path, *(sample(time, *[(time / 2, 2**30, time)] * size) for time in range(500)))
    text = page(tmp_path)
    assert Reader(text).faults == [] and len(text) < 400_000
    assert ("median of all ranks" in text) == (size > 16)


def strange(*keys: str) -> st.SearchStrategy[Any]:
    return VALUES | st.dictionaries(st.sampled_from("01x"), st.dictionaries(st.sampled_from(keys), VALUES) | VALUES)


STRANGE = st.fixed_dictionaries(
    {"time": st.floats(0, 2e9) | VALUES}, optional={"ranks": strange("cpu", "memory"), "gpus": strange("use", "ranks")}
)


@settings(max_examples=30, deadline=None)
@given(st.lists(STRANGE))
def test_any_content_of_the_samples_gives_a_page(samples: list[Json]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        parsed(attempt(Path(directory), *samples))


def test_a_wide_chart_has_a_second_drawing_for_narrow_screens(tmp_path: Path) -> None:
    text = page(write_run(tmp_path, [step_line(10), step_line(20)]))
    drawn = re.findall(r'<svg class="lines( wide| narrow)?" role="img" viewBox="0 0 (\d+) ', text)
    assert {("", "314"), (" wide", "1032"), (" narrow", "340")} == set(drawn)
    kinds = [kind for kind, _ in drawn]
    assert kinds.count(" wide") == kinds.count(" narrow") == 2
    assert "svg.wide.lines { display: none; }" in text and "svg.narrow { display: none; }" in text


# ---------------------------------------------------------------- charts


def test_thinned_points_keep_extremes_ends_and_gaps() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[31_007], points[77_123], points[50_000] = (31_007.0, 99.0), (77_123.0, -99.0), (50_000.0, math.nan)
    kept = charts.thin(points, 300)
    assert len(kept) <= 3 * 300 + 2
    assert {points[0], points[31_007], points[77_123], points[-1]} <= set(kept)
    assert [x for x, y in kept if math.isnan(y)] == [50_000.0]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.lists(st.floats(-1e9, 1e9) | st.just(math.nan), min_size=1, max_size=200), st.integers(1, 20))
def test_thinned_points_are_a_subset(values: list[float], columns: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = charts.thin(points, columns)
    finite, left = ([y for _, y in part if math.isfinite(y)] for part in (points, kept))
    assert all(point in points for point in kept)
    assert (min(finite, default=0), max(finite, default=0)) == (min(left, default=0), max(left, default=0))


def test_a_smoothed_line_has_the_same_ends() -> None:
    points = [(float(x), 5.0 + (x % 2)) for x in range(1, 5001)]
    means = charts.smooth(points)
    assert (means[0][0], means[-1][0]) == (1.0, 5000.0)
    assert all(5.3 < y < 5.7 for _, y in means[10:])


def test_a_huge_value_does_not_change_the_mean_of_other_points() -> None:
    points = [(float(x), 1.0) for x in range(2000)]
    points[100] = (100.0, 1e90)
    assert charts.smooth(points)[-1][1] == 1.0


@given(
    st.lists(st.floats(-1e99, 1e99), min_size=1, max_size=9),
    st.booleans(),
    st.integers(2, 8),
)
def test_an_axis_includes_all_values_and_has_few_ticks(values: list[float], zero: bool, count: int) -> None:
    scale = charts.value_scale(values, 300, 10, zero=zero, count=count)
    ticks = [value for value, _ in scale.ticks()]
    close = max(charts.TINY, 1e-6 * max(map(abs, values)))
    assert scale.low <= min(values) + close and max(values) - close <= scale.high
    assert ticks == sorted(set(ticks)) and 2 <= len(ticks) <= 3 * count + 3
    assert all(10 <= scale(value) <= 300 for value in (*values, *ticks))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 12_000], ["0", "5,000", "10,000", "15,000"]),
        ([0, 3e-4], ["0", "0.0001", "0.0002", "0.0003"]),
        ([1.1, 5.4], ["0", "2", "4", "6"]),
        ([0.9, 2_000_000], ["0", "500,000", "1 M", "1.5 M", "2 M"]),
    ],
)
def test_ticks_are_round(values: list[float], texts: list[str]) -> None:
    scale = charts.value_scale(values, 300, 10, zero=False, count=4)
    assert [text for _, text in scale.ticks()] == texts


STEPS = st.floats(-(2.0**53), 2.0**53) | st.sampled_from([0.0, 0.1, 0.4, 5e-324, 1.0]) | st.integers(0, 9).map(float)


@given(
    st.lists(st.tuples(STEPS, st.floats(-1e100, 1e100) | st.just(math.nan)), max_size=90), st.booleans(), st.booleans()
)
@example([(0.1, 1.0), (0.4, 2.0)], False, False)
@example([(-2.0, 1.0), (-1.0, 2.0)], False, True)
def test_a_chart_of_any_points_is_drawn(points: list[tuple[float, float]], zero: bool, seconds: bool) -> None:
    line = charts.Line("loss", sorted(points, key=lambda point: point[0]), "train", "loss")
    assert charts.lines(charts.smoothed(line), zero=zero, seconds=seconds)


def test_a_value_that_is_not_finite_is_a_gap_with_a_mark() -> None:
    points = [(1.0, 2.0), (2.0, 3.0), (3.0, math.nan), (4.0, 1.0)]
    drawing = charts.lines([charts.Line("loss", points, "train")])
    path = re.search(r'class="line train" d="([^"]*)"', drawing)
    assert path and path[1].count("M") == 1 and path[1].count(",") == 2
    assert drawing.count('class="dot train"') == 2, "in the drawings for wide and for narrow screens"
    assert "loss: not finite" in drawing


def test_without_a_finite_value_there_is_no_chart() -> None:
    drawing = charts.lines([charts.Line("loss", [(1.0, math.nan)], "train")])
    assert "No finite value was logged." in drawing and "<svg" not in drawing


@given(st.lists(st.floats(0, 500), max_size=20))
def test_labels_do_not_overlap(positions: list[float]) -> None:
    moved = charts.spread(sorted(positions), 14, 0, 500)
    assert all(later - earlier > 13.999 for earlier, later in pairwise(moved))
    assert all(position <= 500 for position in moved)


def test_the_values_shown_at_the_pointer_are_those_of_the_chart() -> None:
    drawing = charts.lines([charts.Line(HOSTILE, [(1.0, 2.0), (2.0, math.nan), (3.0, 2.5)], "train")])
    facts = re.search(r'<script type="application/json">([^<]*)</script>', drawing)
    assert facts
    [line] = json.loads(facts[1])["lines"]
    assert (line["name"], line["style"]) == (HOSTILE, "train")
    assert line["points"] == [[1, 2], [2, None], [3, 2.5]]


# ---------------------------------------------------------------- the page


def test_text_is_escaped(tmp_path: Path) -> None:
    harmless = Reader(page(full(tmp_path, "harmless")))
    hostile = Reader(page(full(tmp_path, HOSTILE)))
    assert hostile.faults == []
    assert hostile.tags == harmless.tags
    assert hostile.text.count(HOSTILE) >= 15


def full(directory: Path, text: str) -> Path:
    """A run in which every name is this text."""
    lines = [step_line(10), event(10, text), event(15, {text: text}), step_line(20)]
    rank = {"node": text, "rank": text, "message": text}
    verdict = dict.fromkeys(("outcome", "cause", "exception", "traceback"), text) | rank
    sections = {"model": {text: text}, text: {"a": [text], "b": {text: None}}, "loose": text}
    machine = {"host": text, "cpu": text, "cores": text, "gpus": [text], "platform": text, "python": text}
    world = {"size": 2, "nodes": 1, "strategy": text, "backend": text, text: text}
    return write_run(
        directory,
        lines,
        run=run_json(run=text, nodes=[text], user=text, cwd=text, command=[text], git={"commit": text}),
        settings={"settings": sections, "world": world, "machine": machine, "model": {"parameters": text}},
        verdict=verdict | {"collateral": [rank, text]},
    )


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    text = page(full(tmp_path, "harmless")).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//[a-z]|\bsrc=|url\(|@import|<link|<img|<iframe", text)
    assert "default-src 'none'" in text


def test_the_page_has_styles_for_light_and_dark_screens_and_print(tmp_path: Path) -> None:
    text = page(write_run(tmp_path))
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    used, known = (set(re.findall(pattern, text)) for pattern in (r"var\((--[\w-]+)\)", r"(--[\w-]+):"))
    assert used == known


def test_an_empty_directory_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "train-1"
    run.mkdir()
    reader = parsed(run)
    assert "train-1" in reader.texts and "no end recorded" in reader.texts
    assert "No metrics were logged, and no step was found in the output." in reader.text


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "7", "\0", '{"settings": 5, "world": [], "nodes": {}}'])
def test_invalid_files_are_ignored(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path, [step_line(10)], run=text, settings=text, verdict=text)
    assert "3.990" in parsed(run).texts
    assert len(report.read(run).notes) == (0 if text.startswith('{"') else 3)


def test_losses_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    lines = [step_line(10), step_line(20, loss=None), step_line(30, loss=math.inf), held_out(30, math.nan)]
    tiles = parsed(write_run(tmp_path, lines)).tiles()
    assert tiles["Training loss"] == ("not finite", "3.990 at step 10")
    assert tiles["Held-out loss"][0] == "not finite"


@pytest.mark.slow
def test_a_hundred_thousand_lines_make_a_small_page(tmp_path: Path) -> None:
    lines = (step_line(step, loss=3 + math.sin(step), grad_norm=1 + step % 7) for step in range(1, 100_001))
    text = page(write_run(tmp_path, lines))
    assert len(text) < 400_000
    assert Reader(text).tiles()["Steps"][0] == "100,000"


METRICS = st.fixed_dictionaries(
    {"step": st.integers(0, 50) | VALUES},
    optional={
        "event": st.sampled_from(["resume", "stop", "fail"]) | VALUES,
        "loss": st.floats() | VALUES,
        "held_out_loss": st.floats() | VALUES,
        "rank_seconds": st.lists(st.floats(), max_size=3) | VALUES,
        "tokens_per_second": VALUES,
        "time": VALUES,
    },
)
FACTS = {
    "run": ["run", "command", "started", "nodes", "nproc", "cwd", "git", "versions"],
    "settings": ["settings", "world", "machine", "model"],
    "verdict": ["outcome", "exit_code", "node", "rank", "time", "cause", "traceback", "collateral"],
}


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(METRICS, max_size=12), data=st.data())
def test_any_content_of_the_files_gives_a_page(lines: list[Json], data: st.DataObject) -> None:
    files: dict[str, Any] = {
        name: data.draw(st.dictionaries(st.sampled_from(keys), VALUES)) for name, keys in FACTS.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        parsed(write_run(Path(directory), lines, **files))


# ---------------------------------------------------------------- the program


def program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = (str(KIT / "scripts/report.sh"), "--python", sys.executable, *arguments)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [(), ("train-1",), ("logs/train-1",), ("--log-dir", "logs", "17")])
def test_the_program_finds_a_run_and_prints_the_path_of_the_page(tmp_path: Path, arguments: Any) -> None:
    run = tmp_path / "logs" / "train-1"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for name in ("latest", "slurm-17"):
        (tmp_path / "logs" / name).symlink_to("train-1")
    done = program(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.rstrip("\n")).samefile(run / "report.html")
    assert sorted(path.name for path in run.iterdir()) == ["report.html", "run.json"]


def test_the_command_on_the_page_updates_it_from_any_directory(tmp_path: Path) -> None:
    (tmp_path / "a run").mkdir()
    write_run(tmp_path / "a run", [step_line(10)])
    program(str(tmp_path / "a run"), cwd=tmp_path)
    page = tmp_path / "a run" / "report.html"
    [command] = re.findall(r"Update this page: <code>(.*?)</code>", page.read_text())
    page.unlink()
    subprocess.run(html.unescape(command), shell=True, cwd="/", check=True, stdout=subprocess.DEVNULL)
    assert page.exists()


def test_an_output_directory_of_a_job_has_a_report_too(tmp_path: Path) -> None:
    write_run(tmp_path, [step_line(10)])
    assert program(str(tmp_path), cwd=KIT).stdout == f"{tmp_path}/report.html\n"


@pytest.mark.parametrize("arguments", [["/nowhere/at-all"], ["a", "b"], ["/"], ["--run"], []])
def test_a_wrong_call_exits_with_2(tmp_path: Path, arguments: list[str]) -> None:
    done = program(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("report.sh: ") and done.stderr.endswith("Try: report.sh --help\n")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    (tmp_path / "run.json").write_text("{}")
    done = program(str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1 and "cannot write the report" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run.json"]


# ---------------------------------------------------------------- several runs


def several(logs: Path, **learning_rates: float) -> list[Path]:
    """Runs that differ in a setting; each logs the steps 10 and 20, one second apart."""
    made = []
    for name, rate in learning_rates.items():
        (logs / name).mkdir(parents=True)
        lines = [step_line(step, time=1000.0 + step / 10, loss=rate * step) for step in (10, 20)]
        settings = settings_json(settings={"train": {"lr": rate, "steps": 20}})
        made.append(write_run(logs / name, [*lines, held_out(20, rate)], run=run_json(run=name), settings=settings))
    return made


def test_runs_are_compared_by_outcome_differing_settings_and_curves(tmp_path: Path) -> None:
    runs = several(tmp_path, **{HOSTILE.replace("/", ""): 0.1, "b": 0.2, "c": 0.3})
    write_run(runs[0], verdict={"outcome": "failed", "exit_code": 1, "cause": f"rank 1 raised {HOSTILE}"})
    write_run(runs[1], verdict={"outcome": "ok", "exit_code": 0, "cause": "all"})
    text = report.compare([*map(report.read, runs)], tmp_path / "comparison.html").read_text()
    reader = Reader(text)
    assert reader.faults == [] and HOSTILE not in text
    outcomes, _, rest = reader.text.partition("Settings that differ")
    assert all(word in outcomes for word in ("failed", f"rank 1 raised {HOSTILE}", "finished", "open"))
    assert [one for one in reader.texts if one.startswith("train.")] == ["train.lr"]
    assert "train.lr\n0.1\n0.2\n0.3" in rest
    assert 'href="b/report.html"' in text
    over_steps, over_time = text.split("<h2>Over time</h2>")
    assert [part.count("Training loss</b>") for part in (over_steps, over_time)] == [1, 1]
    assert [part.count("Held-out loss</b>") for part in (over_steps, over_time)] == [1, 1]
    assert '"label":"lr=0.2","raw":false,"points":[[10.0,2.0],[20.0,4.0]]' in over_steps
    assert '"label":"lr=0.2","raw":false,"points":[[0.0,2.0],[1.0,4.0]]' in over_time
    assert "\nok\n" in outcomes, "the verdict of the run that finished"


def test_curves_are_named_by_the_arguments_that_differ_and_these_are_rows(tmp_path: Path) -> None:
    runs = []
    for name, more in (("a", []), ("b", ["--warmup=5"]), ("c", ["--fast"])):
        (tmp_path / name).mkdir()
        arguments = ["--lr", {"a": "-1", "b": "0.2", "c": "0.3"}[name], "x.txt", "y.txt", *more, "model.width=8"]
        facts = run_json(run=name, arguments=arguments, command=[name])
        runs.append(report.read(write_run(tmp_path / name, [step_line(1), step_line(2)], run=facts)))
    assert report.script_arguments(runs[1]) == {
        "lr": "0.2", "argument 1": "x.txt", "argument 2": "y.txt", "warmup": "5", "model.width": "8",
    }  # fmt: skip
    assert report.script_arguments(runs[2])["fast"] == "set"
    reader = Reader(report.compare(runs, tmp_path / "comparison.html").read_text())
    assert {"lr=-1", "lr=0.2", "lr=0.3", "lr", "warmup", "fast"} <= set(reader.texts)
    assert {"run.command", "argument 1", "model.width"}.isdisjoint(reader.texts)
    assert {"arguments of the script", "warmup", "argument 2", "y.txt"} <= set(parsed(tmp_path / "b").texts)


def test_curves_have_the_names_of_their_runs_if_what_differs_is_long(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, [step_line(1)], run=run_json(run=name, arguments=["--data", name * 30]))
    runs = [report.read(tmp_path / name) for name in "ab"]
    assert report.curve_names(runs, [*map(report.all_settings, runs)]) == ["a", "b"]


def test_any_number_of_runs_can_be_compared_even_if_metrics_or_settings_are_missing(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"run{number}").mkdir()
        write_run(tmp_path / f"run{number}", [step_line(1)] * (number % 2), run="[" if number % 3 else {})
    runs = [report.read(tmp_path / f"run{number}") for number in range(20)]
    for some in (runs, runs[:9], runs[:1], runs[:4:2]):
        reader = Reader(report.compare(some, tmp_path / "page.html").read_text())
        assert reader.faults == [] and f"{len(some)} runs" in reader.texts


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("exp-a", "exp-b"), "exp-a exp-b"),
        (("exp-*",), "exp-a exp-b"),
        (("logs/e*a", "other", "exp-a"), "exp-a other"),
        (("--log-dir", "logs", "*"), "exp-a exp-b other"),
    ],
)
def test_runs_are_selected_by_names_paths_and_patterns(tmp_path: Path, arguments: Any, names: str) -> None:
    several(tmp_path / "logs", **{"exp-a": 0.1, "exp-b": 0.2, "other": 0.3})
    (tmp_path / "logs" / "latest").symlink_to("other")
    (tmp_path / "logs" / "exp-file").touch()
    done = program(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{tmp_path}/logs/comparison.html\n")
    reader = Reader((tmp_path / "logs" / "comparison.html").read_text())
    assert set(names.split()) == {one for one in reader.texts if one in ("exp-a", "exp-b", "other")}
    assert f"{len(names.split())} runs" in reader.texts


def test_a_pattern_that_matches_one_run_writes_its_report(tmp_path: Path) -> None:
    several(tmp_path / "logs", **{"exp-a": 0.1})
    assert program("ex*", cwd=tmp_path).stdout == f"{tmp_path}/logs/exp-a/report.html\n"
    done = program("exp-a", "missing*", cwd=tmp_path)
    assert done.returncode == 2 and "RUN 'missing*': no such run" in done.stderr
