"""The HTML page of a job list shows the content of results.json.

Numbers, failures and settings equal those of the files. Every attempt is on the timeline, and labels do not overlap.
All text is escaped. A page of 1,000 jobs is written quickly. Odd settings and metrics never prevent a page.
"""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import HOSTILE, VALUES, Json, Reader

from distributed.jobs.show import entries, job_table, page
from distributed.jobs.show.timeline import Span, Track, draw_tracks
from distributed.report import charts
from distributed.report.history import History

KIT = Path(__file__).resolve().parents[2]
BEGIN = 1_700_000_000.0


# ---------------------------------------------------------------- job lists


def attempt(number: int = 1, start: float = 0, seconds: float | None = 60, **changes: Any) -> Json:
    return {
        "number": number,
        "server": "gpu1",
        "slots": [0],
        "gpus": [0],
        "start": BEGIN + start,
        "end": None if seconds is None else BEGIN + start + seconds,
        "seconds": seconds,
        "exit_code": None if seconds is None else 0,
        "signal": None,
        "peak_memory": 3 * 2**30,
        "failure": "",
        "reason": "",
        "last_lines": [],
    } | changes


def failed(number: int = 1, start: float = 0, seconds: float = 20, **changes: Any) -> Json:
    facts = {"exit_code": 1, "failure": "exit code", "reason": "ValueError: no such fold", "last_lines": ["one", "two"]}
    return attempt(number, start, seconds, **(facts | changes))


def job(n: int, state: str = "done", attempts: Iterable[Json] = (), **changes: Any) -> Json:
    return {
        "id": f"{n:010x}",
        "name": f"exp1/fold{n}_data",
        "settings": {"fold": n, "epochs": 10},
        "options": {},
        "state": state,
        "reason": "",
        "output": f"experiments/exp1/fold{n}_data",
        "metrics": {"step": 100, "steps": 200, "loss": 2.0 + n / 100, "held_out_loss": 2.5 + n / 100},
        "attempts": list(attempts),
    } | changes


def results(jobs: Iterable[Json], slots: int = 2, **changes: Any) -> Json:
    """results.json of a list."""
    jobs = list(jobs)
    attempts = [attempt for job in jobs for attempt in job["attempts"]]
    states = ("done", "failed", "waiting", "running", "cancelled")
    updated = changes.get("updated", BEGIN + 100)
    totals = {state: sum(job["state"] == state for job in jobs) for state in states}
    used = sum((each["seconds"] or updated - each["start"]) * len(each["slots"]) for each in attempts)
    totals |= {"jobs": len(jobs), "attempts": len(attempts), "seconds": updated - BEGIN, "slot_seconds": used}
    return {
        "list": "sweep-3f9a",
        "created": BEGIN,
        "updated": BEGIN + 100,
        "totals": totals,
        "state": "finished",
        "reason": "",
        "script": "train.py",
        "backend": "ssh",
        "servers": {"gpu1": server("gpu1", slots)},
        "jobs": jobs,
    } | changes


def server(name: str, slots: int, **changes: Any) -> Json:
    found = [{"name": f"{name}:{n}", "gpu": n} for n in range(slots)]
    return {"slots": found, "state": "ready", "reason": ""} | changes


def sample(servers: int, slots: int, jobs: int, seed: int = 1) -> Json:
    """A list with failed jobs, a lost server, and running and waiting jobs."""
    dice = random.Random(seed)
    free = {(f"gpu{s}", n): 0.0 for s in range(1, servers + 1) for n in range(slots)}
    made = []
    for n in range(jobs):
        attempts: list[Json] = []
        for number in (1, 2):
            name, slot = min(free, key=lambda slot: (free[slot], dice.random()))
            seconds, luck = dice.uniform(100, 500), dice.random()
            start, where = free[name, slot], {"server": name, "slots": [slot], "gpus": [slot]}
            if luck < 0.06:
                attempts.append(failed(number, start, seconds / 9, **where))
            elif luck < 0.09:
                attempts.append(attempt(number, start, seconds / 2, failure="server lost", exit_code=None, **where))
            else:
                attempts.append(attempt(number, start, seconds, **where))
            free[name, slot] = start + attempts[-1]["seconds"] + 2
            if luck >= 0.09:
                break
        bad = bool(attempts[-1]["failure"])
        made.append(job(n, "failed" if bad else "done", attempts, settings={"fold": n % 5, "lr": 1e-3 / (n + 1)}))
    now = max(free.values()) + 200
    for n, (name, slot) in enumerate(list(free)[: len(free) // 2]):
        where = {"server": name, "slots": [slot], "gpus": [slot]}
        made.append(job(jobs + n, "running", [attempt(1, free[name, slot], None, **where)]))
    made += [job(2 * jobs + n, "waiting", metrics={}) for n in range(3)]
    hosts = {f"gpu{s}": server(f"gpu{s}", slots) for s in range(1, servers + 1)}
    return results(made, servers=hosts, state="running", updated=BEGIN + now)


def metrics(steps: int, held_out_every: int = 10, offset: float = 0) -> list[Json]:
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "time": BEGIN + step, "loss": 3 / math.sqrt(step) + offset + math.sin(step) / 20}
        lines.append(
            line | ({"held_out_loss": 3 / math.sqrt(step) + offset + 0.1} if step % held_out_every == 0 else {})
        )
    return lines


def curve(lines: Iterable[Json]) -> History:
    history = History()
    for line in lines:
        history.add(line)
    return history


def curves_of(made: Json, steps: int = 30) -> dict[str, History]:
    return {one["id"]: curve(metrics(steps, offset=n / 50)) for n, one in enumerate(made["jobs"])}


def written(directory: Path, made: Json | str, lines: Iterable[str] = ()) -> Path:
    """Write results.json, and the same metrics.jsonl for each job."""
    text = "".join(line + "\n" for line in lines)
    if text and isinstance(made, dict):
        for one in made["jobs"]:
            (directory / one["output"]).mkdir(parents=True)
            (directory / one["output"] / "metrics.jsonl").write_text(text, encoding="utf-8")
    path = directory / "results.json"
    path.write_text(made if isinstance(made, str) else json.dumps(made), encoding="utf-8")
    return path


def read_page(made: Json, curves: dict[str, History] | None = None) -> Reader:
    reader = Reader(page.page(made, curves or {}))
    assert reader.faults == []
    return reader


def tiles(reader: Reader) -> dict[str, tuple[str, str]]:
    """The tiles: name -> (value, note or empty)."""
    names = ("Done", "Failed", "Waiting", "Wall time", "Slot utilisation", "Slots", "Attempts", "Best held-out loss",
             "Best training loss")  # fmt: skip
    heads = [n for n, text in enumerate(reader.texts) if text in names][:8]
    return {reader.texts[n]: (reader.texts[n + 1], "" if n + 2 in heads else reader.texts[n + 2]) for n in heads}


def rows(text: str) -> list[list[str]]:
    """The cells of the table of jobs as text, header first."""
    table = re.search(r'<table class="jobs">.*?</table>', text, re.DOTALL)
    assert table
    found = re.findall(r"<tr>(.*?)</tr>", table[0])
    return [[re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in found]


# ---------------------------------------------------------------- figures


def test_tiles_show_the_numbers_of_the_results() -> None:
    made = results(
        [
            job(1, attempts=[failed(), attempt(2, 25, 60)]),
            job(2, "failed", [failed()]),
            job(3, "waiting", metrics={}),
            job(4, "running", [attempt(1, 90, None)], metrics={}),
            job(5, "cancelled", metrics={}),
        ]
    )
    reader = read_page(made)
    found = tiles(reader)
    assert found == {
        "Done": ("1", "of 5 jobs"),
        "Failed": ("1", "1 cancelled"),
        "Waiting": ("1", "1 running"),
        "Wall time": ("1 min 40 s", found["Wall time"][1]),
        "Slot utilisation": ("55 %", "1 min 50 s of slots used"),
        "Slots": ("2", "on 1 server"),
        "Attempts": ("4", "1 repeated"),
        "Best held-out loss": ("2.510", "exp1/fold1_data"),
    }
    assert {"results", "list sweep-3f9a", "finished, 1 failed", "train.py", "backend ssh"} <= set(reader.texts)


def test_the_best_loss_is_the_lowest_of_all_steps_and_jobs() -> None:
    made = results([job(n, metrics={}) for n in (1, 2)])
    lines = [{"step": 1, "held_out_loss": 1.5}, {"step": 2, "held_out_loss": 1.7}]
    curves = {made["jobs"][1]["id"]: curve(lines), made["jobs"][0]["id"]: curve([{"step": 1, "held_out_loss": 1.6}])}
    assert tiles(read_page(made, curves))["Best held-out loss"] == ("1.500", "exp1/fold2_data")
    training = {made["jobs"][0]["id"]: curve([{"step": 1, "loss": 4.0}])}
    assert tiles(read_page(made, training))["Best training loss"] == ("4.000", "exp1/fold1_data")


def test_a_running_list_shows_the_time_of_the_results() -> None:
    reader = read_page(sample(2, 2, 6))
    assert "running" in reader.texts
    assert any(text.startswith("As of 2023-11-1") for text in reader.texts)


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("unreachable", "no route to host", "gpu2 unreachable: no route to host"),
        ("unusable", "", "gpu2 unusable"),
        ("ready", "gets no new jobs: no space left", "gpu2: gets no new jobs: no space left"),
        ("ready", "", None),
        ("connecting", "", None),
    ],
)
def test_a_warning_names_a_server_that_gets_no_jobs_and_the_reason(state: str, reason: str, text: str | None) -> None:
    servers = {"gpu1": server("gpu1", 1), "gpu2": server("gpu2", 0, state=state, reason=reason)}
    found = page.page(results([job(1)], servers=servers), {})
    assert re.findall(r'<p class="warning">(.*)</p>', found) == ([text] if text else [])


# ---------------------------------------------------------------- failures


def test_failures_show_location_reason_and_last_lines() -> None:
    killed = failed(1, failure="signal", signal="SIGKILL", exit_code=137, server="gpu2", gpus=[0, 1, 2], reason="oom")
    made = results(
        [
            job(1, "failed", [failed(), failed(2, 30)]),
            job(2, "failed", [killed]),
            job(3, "failed", reason="no server has 8 GPUs"),
            job(4, "done", [failed(failure="timeout", reason=""), attempt(2, 30)]),
        ]
    )
    texts = read_page(made).texts
    start = texts.index("Failures")
    assert texts[start + 1] == "3 jobs failed. exit code 1: 1, SIGKILL: 1. gpu1: 1, gpu2: 1."
    for part in (
        ["exp1/fold1_data", "attempt 2 of 2", "gpu1:0", "exit code 1", "after 20 s", "ValueError: no such fold",
         "Last lines", "one\ntwo"],
        ["exp1/fold2_data", "attempt 1", "gpu2:0-2", "SIGKILL", "after 20 s", "oom"],
        ["exp1/fold3_data", "never started", "no server has 8 GPUs"],
        ["2 other attempts that failed",
         "exp1/fold1_data, attempt 1 of 2 on gpu1:0: exit code 1: ValueError: no such fold\n"
         "exp1/fold4_data, attempt 1 of 2 on gpu1:0: timeout"],
    ):  # fmt: skip
        at = texts.index(part[0], start)
        assert texts[at : at + len(part)] == part


def test_a_page_without_failures_has_no_failures_section() -> None:
    assert "Failures" not in read_page(results([job(1, attempts=[attempt()])])).texts


def test_failures_beyond_the_limit_are_counted() -> None:
    text = page.page(results([job(n, "failed", [failed(last_lines=["x" * 9999] * 999)]) for n in range(120)]), {})
    assert text.count('<aside class="failure">') == page.MAX_FAILURES
    assert f"{120 - page.MAX_FAILURES} more failed jobs" in text
    assert len(text) < 2_000_000


# ---------------------------------------------------------------- timeline


@pytest.mark.parametrize(
    ("facts", "state", "outcome"),
    [
        (attempt(), "done", "done"),
        (failed(), "failed", "failed"),
        (failed(failure="timeout", exit_code=None), "failed", "failed"),
        (attempt(failure="server lost", exit_code=None), "waiting", "lost"),
        (attempt(failure="cancelled", exit_code=143), "cancelled", "cancelled"),
        (attempt(seconds=None), "running", "running"),
        (attempt(seconds=None), "waiting", "cancelled"),
    ],
)
def test_an_attempt_is_coloured_by_its_outcome(facts: Json, state: str, outcome: str) -> None:
    text = page.page(results([job(1, state, [facts])]), {})
    assert re.findall(r'<(?:rect|path) class="period (\w+)"', text) == [outcome]
    assert text.count(f'<i class="{outcome}">') == 1


def test_an_attempt_with_several_slots_is_in_the_row_of_each() -> None:
    text = page.page(results([job(1, attempts=[attempt(slots=[0, 1], gpus=[0, 1])])]), {})
    assert text.count("<title>exp1/fold1_data, attempt 1, gpu1:0-1, 1 min 0 s, done</title>") == 2


def test_a_slot_known_only_from_an_attempt_has_a_row() -> None:
    made = results([job(1, attempts=[attempt(server="gpu10", slots=[7])])])
    found = page.tracks(made, entries.jobs_of(made), BEGIN)
    assert [(track.group, track.name, len(track.spans)) for track in found] == [
        ("gpu1", "0", 0), ("gpu1", "1", 0), ("gpu10", "7", 1),
    ]  # fmt: skip


def test_an_attempt_without_an_end_is_drawn_until_now() -> None:
    made = results([job(1, "running", [attempt(1, 10, None)])])
    (track, _) = page.tracks(made, entries.jobs_of(made), BEGIN + 100)
    assert [(span.start - BEGIN, span.end - BEGIN, span.ended) for span in track.spans] == [(10, 100, False)]


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        (0.5, ["0"]),
        (50, ["0", "10 s", "20 s", "30 s", "40 s", "50 s"]),
        (100, ["0", "30 s", "1 min", "1 min 30 s"]),
        (3601, ["0", "15 min", "30 min", "45 min", "1 h"]),
        (22_000, ["0", "2 h", "4 h", "6 h"]),
        (86400 * 30, ["0", "5 d", "10 d", "15 d", "20 d", "25 d", "30 d"]),
    ],
)
def test_time_ticks_are_round(seconds: float, texts: list[str]) -> None:
    assert [text for _, text in charts.time_ticks(seconds, 6)] == texts


@given(st.floats(1e-3, 1e12), st.integers(2, 12))
def test_a_time_axis_has_few_even_ticks(seconds: float, count: int) -> None:
    values = [value for value, _ in charts.time_ticks(seconds, count)]
    assert values[0] == 0 and values[-1] <= seconds * (1 + 1e-6) and len(values) <= count + 1
    gaps = [b - a for a, b in pairwise(values)]
    assert not gaps or max(gaps) - min(gaps) <= 1e-6 * max(gaps)


Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def boxes(drawing: str, style: str) -> list[Rectangle]:
    """The bounding box of each text of a class, with the letter width of a common font."""
    found = re.findall(rf'<text x="([-\d.]+)" y="([-\d.]+)" class="{style}">([^<]*)<', drawing)
    out = []
    for x, y, text in found:
        wide = len(text) * charts.LETTER
        left = float(x) - {"mid": wide / 2, "end": wide}.get(style.split()[-1], 0)
        out.append((left, float(y) - 10, left + wide, float(y) + 3))
    return out


def overlaps(found: list[Rectangle]) -> list[tuple[Rectangle, Rectangle]]:
    pairs = ((a, b) for n, a in enumerate(found) for b in found[n + 1 :])
    return [(a, b) for a, b in pairs if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]


@pytest.mark.parametrize(("servers", "slots", "jobs"), [(1, 1, 1), (1, 1, 40), (3, 8, 200), (16, 8, 1000), (70, 1, 99)])
def test_labels_of_a_timeline_do_not_overlap(servers: int, slots: int, jobs: int) -> None:
    made = sample(servers, slots, jobs)
    drawing = draw_tracks(page.tracks(made, entries.jobs_of(made), made["updated"]))
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)[0])
    labels = [*boxes(drawing, "label end"), *boxes(drawing, "tick"), *boxes(drawing, "tick mid")]
    inside = boxes(drawing, "inside")
    assert overlaps(labels) == overlaps(inside) == []
    assert all(box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= height for box in labels)
    bars = re.findall(r'<rect class="period \w+" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawing)
    at = [tuple(map(float, bar)) for bar in bars]
    labels_right = max(box[2] for box in [*boxes(drawing, "label end"), *boxes(drawing, "tick")])
    assert all(labels_right < x and x + wide <= width and y + high <= height - 26 for x, y, wide, high in at)
    in_bar = [
        any(x <= box[0] and box[2] <= x + wide for x, y, wide, high in at if y < box[3] < y + high) for box in inside
    ]
    arrows = drawing.count('<path class="period')
    assert in_bar.count(False) <= arrows
    assert len(boxes(drawing, "label end")) == servers
    assert bars or arrows


def test_bars_are_at_the_position_of_their_time() -> None:
    track = Track("gpu1", "0", [Span(100, 150, "done", "a"), Span(150, 200, "failed", "b")])
    drawing = draw_tracks([track])
    (done, wide), (bad, _) = [
        (float(x), float(w))
        for x, w in re.findall(r'<rect class="period \w+" x="([\d.]+)".*?width="([\d.]+)"', drawing)
    ]
    zero, last = (
        float(x) for x in re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="tick mid">(?:0|1 min 40 s)<', drawing)
    )
    assert done == zero and bad == pytest.approx((zero + last) / 2, abs=0.1)
    assert wide == pytest.approx((last - zero) / 2 - 1, abs=0.2)


def test_a_label_is_drawn_only_if_it_fits() -> None:
    spans = [
        Span(0, 80, "done", "", "wide/enough"),
        Span(80, 83, "done", "", "too narrow"),
        Span(83, 100, "done", "", "too long a name for this one/ok"),
    ]
    texts = re.findall(r'class="inside">([^<]*)<', draw_tracks([Track("gpu1", "0", spans)]))
    assert texts == ["wide/enough", "ok"]
    many = [Track("gpu1", str(n), spans) for n in range(128)]
    assert 'class="inside"' not in draw_tracks(many)


def test_a_crowded_timeline_is_small_and_shows_failures() -> None:
    def spans(row: int) -> list[Span]:
        return [Span(n, n + 0.9, "failed" if n % 97 == row % 97 else "done", "title", "name") for n in range(1000)]

    begin = time.process_time()
    drawing = draw_tracks([Track(f"gpu{row // 8}", str(row % 8), spans(row)) for row in range(128)])
    assert time.process_time() - begin < 5
    assert len(drawing) < 400_000
    assert re.findall(r'class="periods (\w+)"', drawing) == ["done", "failed"]  # failures on top
    bad = re.search(r'class="periods failed"[^>]* d="([^"]*)"', drawing)
    assert bad and bad[1].count("M") >= 128 * 10


def test_rare_styles_are_drawn_last() -> None:
    styles = ["done", "failed", "done", "done"]
    drawing = draw_tracks([Track("gpu1", "0", [Span(n, n + 1, style, "") for n, style in enumerate(styles)])])
    assert re.findall(r'class="period (\w+)"', drawing) == ["done", "done", "done", "failed"]


def test_a_sentence_replaces_the_timeline_if_there_are_no_attempts() -> None:
    text = page.page(results([job(1, "waiting")]), {})
    assert "Nothing has started yet." in text and 'svg class="timeline' not in text


# ---------------------------------------------------------------- table


def test_settings_that_differ_are_columns_and_equal_settings_are_listed_in_a_sentence() -> None:
    first, second = job(1, attempts=[attempt()]), job(2, attempts=[failed(), attempt(2, 25, 30)])
    second["settings"] = {"fold": 2, "epochs": 10, "extra": "a"}
    text = page.page(results([first, second]), {})
    assert rows(text) == [
        ["job", "state", "fold", "extra", "attempts", "duration", "loss", "held_out_loss"],
        ["exp1/fold1_data", "done", "1", "–", "1", "1 min 0 s", "2.010", "2.510"],
        ["exp1/fold2_data", "done", "2", "a", "2", "30 s", "2.020", "2.520"],
    ]  # fmt: skip
    assert "Settings of all jobs: epochs 10" in text
    assert "Equal in all jobs: server:GPU gpu1:0, peak memory 3.0 GiB, step 100 of 200." in text


def test_in_the_table_of_one_job_no_column_is_omitted_as_equal_in_all_jobs() -> None:
    [titles, _] = rows(page.page(results([job(1, attempts=[attempt()])]), {}))
    assert titles == ["job", "state", "server:GPU", "attempts", "duration", "peak memory", "step", "loss",
                      "held_out_loss"]  # fmt: skip


def test_a_job_that_is_done_without_results_has_a_note() -> None:
    reason = "wrote nothing to its output directory"
    made = results([job(1, attempts=[attempt()], reason=reason), job(2, attempts=[attempt()])])
    titles, *others = rows(page.page(made, {}))
    assert [row[titles.index("note")] for row in others] == [reason, ""]


def test_a_page_has_the_name_of_its_results_file() -> None:
    text = page.page(results([job(1)]), {}, path=Path("/a/lr sweep.json"), root=Path("/my lists"))
    assert "<title>lr sweep: 1 job</title>" in text and "<h1>lr sweep</h1>" in text
    command = shlex.join(["python3", f"{KIT}/scripts/lib/module.py", "jobs.show.page", "/a/lr sweep.json"])
    command = f"cd '/my lists' && {command}"
    assert f"<code>{escape(command)}</code>" in text


def test_a_metric_with_the_name_of_a_setting_has_its_own_column() -> None:
    made = [job(n, settings={"lr": n, "loss": "mse"}, metrics={"loss": 2.5 * n, "lr": 0.125 * n}) for n in (1, 2)]
    titles, first, _ = rows(page.page(results(made), {}))
    assert titles[2:] == ["lr", "last loss", "last lr"]
    assert (first[2], first[-2:]) == ("1", ["2.500", "0.125"])


def test_metrics_missing_in_the_results_are_read_from_the_curve() -> None:
    made = results([job(1, metrics={})])
    found = rows(
        page.page(
            made,
            {
                made["jobs"][0]["id"]: curve(
                    [{"step": 7, "loss": 1.25, "held_out_loss": 1.5}, {"step": 8, "loss": None}]
                )
            },
        )
    )
    assert [row[-3:] for row in found] == [["step", "loss", "held_out_loss"], ["8", "not finite", "1.500"]]


def test_settings_beyond_the_limit_of_columns_are_listed_in_a_sentence() -> None:
    made = results([job(n, settings={f"key{k}": n for k in range(30)}) for n in (1, 2)])
    text = page.page(made, {})
    assert len([title for title in rows(text)[0] if title.startswith("key")]) == job_table.MAX_COLUMNS
    assert f"Other settings that differ: {', '.join(f'key{k}' for k in range(job_table.MAX_COLUMNS, 30))}." in text


def test_the_style_sheet_hides_the_rows_of_a_long_table_after_the_limit() -> None:
    text = page.page(results([job(n) for n in range(job_table.FOLD + 1)]), {})
    assert f"tr:nth-child(n+{job_table.FOLD + 1}) {{ display: none; }}" in text
    assert f"Show all {job_table.FOLD + 1} jobs, not only {job_table.FOLD}" in text
    assert len(rows(text)) == job_table.FOLD + 2
    assert 'id="all"' not in page.page(results([job(n) for n in range(job_table.FOLD)]), {})


SORT = """
const listeners = {}, attributes = new Map();
const cell = (text, v) => ({ textContent: text, dataset: v === undefined ? {} : { v } });
const rows = JSON.parse(process.argv[1]).map(([text, v]) => ({ cells: [cell(text, v ?? undefined)], text }));
const header = { cellIndex: 0, closest: () => header, getAttribute: (n) => attributes.get(n),
  setAttribute: (n, v) => attributes.set(n, v), removeAttribute: (n) => attributes.delete(n) };
const body = { rows, replaceChildren(...now) { this.rows = now; } };
const table = { tHead: { addEventListener: (n, f) => { listeners[n] = f; }, rows: [{ cells: [] }] }, tBodies: [body] };
globalThis.document = { querySelectorAll: () => [table] };
"""


@pytest.mark.skipif(not shutil.which("node"), reason="needs a JavaScript engine: node")
def test_clicking_a_header_sorts_and_clicking_again_reverses() -> None:
    cells = [["9", "9"], ["", ""], ["100", "100"], ["auto", None], ["20", "20"], ["all", None]]
    script = (
        SORT
        + Path(page.__file__).with_name("page.js").read_text()
        + """
for (let n = 0; n < 2; n++) {
  listeners.click({ target: header });
  console.log(body.rows.map((row) => row.text).join(","));
}
"""
    )
    done = subprocess.run(["node", "-e", script, json.dumps(cells)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["9,20,100,all,auto,", "auto,all,100,20,9,"]


# ---------------------------------------------------------------- loss curves


def test_each_job_has_a_chart_linked_from_its_name() -> None:
    made = results([job(n) for n in (1, 2, 3)])
    curves = curves_of(made)
    del curves[made["jobs"][1]["id"]]
    text = page.page(made, curves)
    assert re.findall(r'<figure class="card" id="(curve-\d+)">', text) == ["curve-1", "curve-3"]
    assert re.findall(r'<td class="text"><a href="#(curve-\d+)">', text) == ["curve-1", "curve-3"]
    assert "held-out loss of 2 jobs" in text


def test_of_many_jobs_only_the_best_have_charts() -> None:
    made = results([job(n) for n in range(70)])
    text = page.page(made, dict(reversed(curves_of(made).items())))
    assert re.findall(r'id="curve-(\d+)"', text) == [str(n) for n in range(1, page.MAX_CHARTS + 1)]
    assert "Of 70 jobs with metrics, the 60 with the lowest last losses have their own chart." in text
    assert text.count('class="line crowd"') == 2 * 69 and text.count('class="label train"') == 2, "wide and narrow"


@pytest.mark.parametrize(
    ("held_out", "training", "unit"),
    [
        ([2, 2, 0], [2, 2, 2], "held-out loss of 2 jobs"),
        ([2, 0, 0], [2, 2, 2], "training loss of 3 jobs"),
        ([1, 1, 1], [2, 2, 2], "training loss of 3 jobs"),  # measured only at the end
        ([1, 1, 1], [2, 2, 1], "training loss of 2 jobs"),
        ([2, 0, 0], [2, 0, 0], None),
        ([1, 1, 1], [1, 1, 1], None),
    ],
)
def test_jobs_are_compared_by_held_out_losses_if_half_of_them_have_a_curve_otherwise_by_training_losses(
    held_out: list[int], training: list[int], unit: str | None
) -> None:
    made = results([job(n) for n in (1, 2, 3)])
    curves = {}
    for one, measured, logged in zip(made["jobs"], held_out, training, strict=True):
        lines: list[Json] = [{"step": 1}, {"step": 2}]
        for line in lines[2 - measured :]:  # the last ones
            line["held_out_loss"] = 2.0
        for line in lines[:logged]:
            line["loss"] = 3.0
        curves[one["id"]] = curve(lines)
    found = [text for text in read_page(made, curves).texts if re.match(r"[a-z-]+ loss of ", text)]
    assert found == ([unit] if unit else [])


@pytest.mark.parametrize("loss", [math.nan, None, "low", [], 1e200, True])  # 1e200 is read as infinity
def test_a_sentence_replaces_the_chart_of_a_loss_that_is_no_finite_number(loss: Any) -> None:
    made = results([job(n, metrics={"loss": loss, "held_out_loss": loss}) for n in (1, 2)])
    lines = [{"step": 1, "loss": loss, "held_out_loss": loss}]
    assert "No finite value was logged." in read_page(made, {one["id"]: curve(lines) for one in made["jobs"]}).texts


def test_a_metric_whose_last_value_is_nan_is_shown_as_nan() -> None:
    made = results([job(n, metrics={"step": 9, "loss": loss}) for n, loss in ((1, "NaN"), (2, 2.5), (3, 1.5))])
    curves = {one["id"]: curve([{"step": 8, "loss": 0.5}, {"step": 9, "loss": math.nan}]) for one in made["jobs"]}
    text = page.page(made, curves)
    assert [row[-1] for row in rows(text)] == ["loss", "NaN", "2.500", "1.500"]
    assert '<td class="number" data-v="">NaN</td>' in text, "sorted after all numbers"
    assert tiles(read_page(made, curves))["Best training loss"][0] == "1.500"


# ---------------------------------------------------------------- files


def test_the_page_is_written_next_to_the_results_with_the_curves_of_its_jobs(tmp_path: Path) -> None:
    made = results([job(n) for n in (1, 2)])
    path = written(tmp_path, made, map(json.dumps, metrics(30)))
    (tmp_path / "lists").mkdir()
    path = path.rename(tmp_path / "lists" / "results.json")
    assert page.write(path) == tmp_path / "lists" / "results.html"
    assert sorted(one.name for one in path.parent.iterdir()) == ["results.html", "results.json"]
    assert Reader(path.with_suffix(".html").read_text()).tags.count("figure") == 4


def test_outputs_are_read_from_the_current_directory_if_no_parent_of_the_results_file_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = results([job(1)])
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    written(tmp_path / "here", made, map(json.dumps, metrics(3)))
    path = written(tmp_path / "there", made)
    assert "curve-1" not in page.write(path).read_text()
    monkeypatch.chdir(tmp_path / "here")
    written_page = page.write(path)
    assert "curve-1" in written_page.read_text()
    [command] = re.findall(r"Update this page: <code>(.*?)</code>", written_page.read_text())
    written_page.unlink()
    subprocess.run(unescape(command), shell=True, cwd="/", check=True, stdout=subprocess.DEVNULL)
    assert "curve-1" in written_page.read_text()


def test_a_note_counts_the_invalid_lines_of_a_metrics_file(tmp_path: Path) -> None:
    path = written(tmp_path, results([job(1)]), ['{"steps": 9}', "nonsense", "\x00\xff", '{"step": 1, "loss": 2}'])
    note = "experiments/exp1/fold1_data/metrics.jsonl: ignored 2 invalid lines"
    assert note in Reader(page.write(path).read_text()).texts


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"jobs": 7}'])
def test_a_file_that_does_not_contain_results_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|not the results"):
        page.write(written(tmp_path, text))


def test_an_empty_list_has_a_page() -> None:
    texts = read_page(results([])).texts
    assert "The list has no jobs." in texts and "of 0 jobs" in texts


def test_text_is_escaped() -> None:
    def made(text: str) -> tuple[Json, dict[str, History]]:
        facts = {"server": text, "failure": text, "reason": text, "last_lines": [text], "signal": text}
        jobs = [
            job(n, state, [attempt() | facts, attempt() | facts], id=f"{text}{n}", name=text, reason=text,
                settings={text: n, "same": text}, metrics={text: text, "loss": n})
            for n, state in enumerate(("failed", "waiting", "done", "failed", "done", "done"))
        ]  # fmt: skip
        servers = {text: server(text, 1, state="unusable", reason=text)}
        named = dict.fromkeys(("list", "reason", "script"), text)
        return results(jobs, servers=servers) | named, {one["id"]: curve(metrics(3, 1)) for one in jobs}

    calm, hostile = (Reader(page.page(*made(text), [text])) for text in ("calm", HOSTILE))
    assert hostile.faults == []
    assert hostile.tags == calm.tags
    assert hostile.text.count(HOSTILE) >= 50


def test_the_page_needs_no_network_and_supports_dark_mode_and_print() -> None:
    made = sample(2, 2, 9)
    text = page.page(made, curves_of(made)).replace("http://www.w3.org/2000/svg", "")  # a namespace, not a link
    assert not re.search(r"https?:|//[a-z]|\bsrc=|url\(|@import|<link|<img|<iframe", text)
    assert "default-src 'none'" in text
    used, known = (set(re.findall(pattern, text)) for pattern in (r"var\((--[\w-]+)\)", r"(--[\w-]+):"))
    assert used == known


@pytest.mark.slow
def test_long_texts_are_truncated() -> None:
    huge = "x" * 10**5
    facts = attempt(server=huge, reason=huge, failure=huge, last_lines=[huge] * 99, signal=huge)
    one = job(1, "done", [facts], name=huge, reason=huge, settings={huge: huge}, metrics={huge: huge})
    many = job(2, "failed", [facts], settings={f"{n}{huge[:999]}": [huge] for n in range(99)}, output=huge)
    servers = {huge: server(huge, 2, state="unusable", reason=huge)}
    made = results([one, many], list=huge, reason=huge, script=huge, servers=servers)
    assert len(page.page(made, {}, [huge] * 99)) < 250_000


@pytest.mark.slow
def test_the_page_of_a_thousand_jobs_is_written_quickly(tmp_path: Path) -> None:
    made = sample(16, 8, 1000)
    path = written(tmp_path, made, map(json.dumps, metrics(200)))
    begin = time.process_time()
    text = page.write(path).read_text()
    assert time.process_time() - begin < 10  # 2 s on an idle core
    assert len(text) < 5_000_000
    assert Reader(text).faults == []


def test_long_metrics_files_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_LINES", 1000)
    lines = [*metrics(5000, held_out_every=100), {"step": 5000, "event": "finish"}]
    path = written(tmp_path, results([job(n, metrics={}) for n in (1, 2)]), map(json.dumps, lines))
    text = page.write(path).read_text()
    shown = re.search("metrics.jsonl: ([0-9]+) of 5,001 lines are shown, evenly spaced", text)
    assert shown and 250 < int(shown[1]) < 510
    assert re.search("Equal in all jobs: .*step 5,000", text)
    assert tiles(Reader(text))["Best held-out loss"][0] == f"{3 / math.sqrt(5000) + 0.1:.3f}"


# ---------------------------------------------------------------- odd values

SETTINGS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
METRICS = st.dictionaries(st.sampled_from(["loss", "step", "steps", "x"]), VALUES)
LINE = st.fixed_dictionaries(
    {"step": st.floats(-1e9, 1e9)}, optional={"loss": VALUES, "held_out_loss": VALUES, "event": VALUES, "time": VALUES}
)


@settings(max_examples=100, deadline=None)
@given(found=st.lists(st.tuples(SETTINGS, METRICS), max_size=5), lines=st.lists(LINE, max_size=6))
def test_any_settings_and_metrics_have_a_page(found: list[tuple[Json, Json]], lines: list[Json]) -> None:
    made = results([job(n, settings=one, metrics=other) for n, (one, other) in enumerate(found)])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "results.json")
        path.write_text(json.dumps(made), encoding="utf-8")
        assert Reader(page.write(path).read_text(encoding="utf-8")).faults == []
    read_page(made, {one["id"]: curve(lines) for one in made["jobs"]})


# ---------------------------------------------------------------- program


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distributed.jobs.show.page", *arguments]
    return subprocess.run(command, cwd=KIT, capture_output=True, text=True, check=False)


def test_the_program_prints_the_path_of_the_page(tmp_path: Path) -> None:
    path = written(tmp_path, results([job(1)]))
    done = program(str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/results.html\n", "")


@pytest.mark.parametrize("arguments", [[], ["/nowhere/results.json"], ["a", "b"], ["README.html"]])
def test_a_wrong_call_exits_2(arguments: list[str]) -> None:
    done = program(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "page: error:" in done.stderr


def test_a_failed_write_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, results([]))
    (tmp_path / "results.html").mkdir()
    done = program(str(path))
    assert done.returncode == 1 and "cannot write the page" in done.stderr


def test_base_models_have_their_own_table_and_are_never_the_best_job() -> None:
    training = job(1, name="base_training/0123456789ab", trains_base_model="0123456789ab",
                   settings={"mode": "base_only", "seed": 1}, metrics={"held_out_loss": 0.1})  # fmt: skip
    experiment = job(2, name="exp/fold0", options={"base_model_hash": "0123456789ab"}, settings={"steps": 50},
                     metrics={"held_out_loss": 2.0})  # fmt: skip
    shown = page.page(results([training, experiment]), {})
    models, _, jobs = shown.partition("<h2>Base models</h2>")[2].partition("<h2>Jobs</h2>")
    assert "base_training/0123456789ab" in models and "exp/fold0" not in models
    assert "exp/fold0" in jobs and "base_training/" not in jobs
    assert "0123456789ab</td>" in jobs, "the base model that it starts from"
    assert "base_only" not in jobs, "settings of base models are not columns of the experiments"
    assert ">2.0" in shown.partition("Best held-out loss")[2][:200]
