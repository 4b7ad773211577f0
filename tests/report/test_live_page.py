"""The page of a running run says so, is written again while it is open, and hides what is empty."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.host.identity import machine
from distributed.host.process_scan import start_time
from distributed.launch import run as launch_run
from distributed.report import index, report
from distributed.runs import run_directory
from distributed.runs.lookup import RunNode
from distributed.transport.commands import Calls
from distributed.transport.loop import Loop

HOSTILE = '<img src=x onerror="alert(1)">'
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""


def running(logs: Path, name: str = "train") -> Path:
    """The directory of a run whose launcher is this process."""
    made = run_directory.create(
        str(logs), name, nodes=[RunNode("n1", "", 1, 0)], script="train.py", config=None, cwd=str(logs),
        python="/usr/bin/python3", command=["run.sh", "train.py"], launcher=os.getpid(),
    )  # fmt: skip
    return Path(made)


def log_steps(run: Path, last: int) -> None:
    lines = [{"step": step, "time": time.time(), "loss": 100 / (step + 1)} for step in range(last + 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_the_page_of_a_running_run_says_so_reloads_and_hides_what_is_empty(tmp_path: Path) -> None:
    run = running(tmp_path)
    text = report.write(run).read_text()
    assert '<span class="state running">running</span>' in text and "reloaded every 10 s" in text
    assert "<body data-live>" in text and "No metrics were logged" not in text and "<h2>Training</h2>" not in text
    log_steps(run, 3)
    assert "<h2>Training</h2>" in report.write(run).read_text()
    (run / "node_n1.log").unlink()
    (run / "node_n1.log").write_text("one line\n")
    text = report.write(run).read_text()
    assert re.findall(r'<a href="(.*?)">', text) == ["node_n1.log", "attempts"]


def test_the_page_of_an_ended_run_is_not_reloaded(tmp_path: Path) -> None:
    run = running(tmp_path)
    (run / "verdict.json").unlink(missing_ok=True)
    (run / "verdict.json").write_text('{"outcome": "ok", "exit_code": 0}')
    assert "<body>" in report.write(run, ended=True).read_text(), "written by its launcher, which still runs"
    facts = json.loads((run / "run.json").read_text())
    facts["launcher"]["since"] = (start_time(os.getpid()) or 0) - 1
    (run / "run.json").write_text(json.dumps(facts))
    assert facts["launcher"]["machine"] == machine()
    assert "<body>" in report.write(run).read_text()


def test_a_launcher_writes_the_report_again_once_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_run, "REPORT_INTERVAL", 0.0)
    run, loop = running(tmp_path), Loop(lambda number: None, ())
    page, calls = run / "report.html", Calls(loop)
    launch: Any = launch_run.Launch.__new__(launch_run.Launch)
    launch.directory, launch.watch = run, SimpleNamespace(loop=loop, calls=calls)
    launch.update_report()
    for _ in range(3):
        loop.wait()
    assert not page.exists() and not launch.report, "report.sh was not called"
    page.write_text("old")
    while page.read_text() == "old":
        loop.wait()
    assert "state running" in page.read_text()
    first = launch.report
    while launch.report is first:
        loop.wait()
    launch._print = print
    launch.write_report()
    assert launch.report.process.returncode == 0, "it is not writing any more"
    assert "<body>" in page.read_text()


def test_the_page_of_all_runs_has_links_to_reports_and_to_job_lists(tmp_path: Path) -> None:
    logs = tmp_path / "my logs"
    older = running(logs).rename(logs / "a-20260101-000000-0001")
    newer = running(logs).rename(logs / "b-20260102-000000-0001")
    report.write(older)
    log_steps(newer, 3)
    (logs / "damaged").mkdir()
    (logs / "damaged" / "run.json").write_text("[")
    (logs / HOSTILE.replace("/", "")).mkdir()
    for name in ("results.html", "results.journal", "other.html"):
        (tmp_path / name).touch()
    totals = {"jobs": 2, "done": 1, "failed": 1, "seconds": 9.0}
    (tmp_path / "results.json").write_text(json.dumps({"created": 1.7e9, "state": "finished", "totals": totals}))
    (older / "verdict.json").write_text(json.dumps({"outcome": f"failed{HOSTILE}", "exit_code": 1}))
    text = index.write(logs, tmp_path).read_text()
    assert re.findall(r'href="(.*?)"', text) == [
        "../results.html", f"{newer.name}/", f"{older.name}/report.html",
    ]  # fmt: skip
    assert "<h1>2 runs</h1>" in text and "not shown: 1; muster ls shows why" in text and "running" in text
    assert "finished: 1 of 2 done, 1 failed" in text
    assert '<td class="number">3</td><td class="number">25.0000</td>' in text
    assert HOSTILE not in text and "\x1b" not in text


def test_report_all_prints_the_path_of_that_page_and_takes_no_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    running(logs)
    program = str(Path(launch_run.__file__).parents[2] / "scripts/report.sh")
    done = subprocess.run([program, "--all"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{logs}/index.html\n", "")
    done = subprocess.run([program, "--all", "latest"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "--all and RUN cannot be combined" in done.stderr


# ---------------------------------------------------------------- in a browser

DRAG = """
const figure = document.querySelector("figure"), found = [];
const svg = [...figure.querySelectorAll("svg.lines")].find((one) => one.getBoundingClientRect().width > 0);
const box = svg.getBoundingClientRect();
const labels = () => [...svg.querySelectorAll("text.mid")].map((one) => one.textContent).join(" ");
const point = (name, share) => svg.dispatchEvent(
  new PointerEvent(name, { clientX: box.x + share * box.width, clientY: box.y + box.height / 2 }));
const press = (name) => [...figure.querySelectorAll("button")].find((one) => one.textContent === name).click();
const note = (name) => found.push(`${name}: ${labels()}; ${svg.querySelectorAll("path.line").length}; ` +
  [...svg.querySelectorAll("text.end")].map((one) => one.textContent).join(" "));
note("whole");
press("smooth"); note("raw");
press("log"); note("log");
point("pointerdown", 0.3); point("pointermove", 0.5);
found.push(`selection: ${svg.querySelectorAll("path.selection").length}`);
point("pointerup", 0.5); note("zoomed");
point("pointermove", 0.4);
found.push(`value: ${figure.querySelector("output").textContent}`);
svg.dispatchEvent(new MouseEvent("dblclick")); press("log"); press("smooth"); note("whole");
found.push(`fits: ${document.documentElement.scrollWidth <= innerWidth}, ${svg.getAttribute("class")}`);
document.title = "found " + JSON.stringify(found);
"""


@pytest.mark.skipif(not BROWSER, reason="needs a browser: chromium")
@pytest.mark.parametrize(("width", "kind"), [(1200, "lines wide"), (500, "lines narrow")])
def test_a_drag_zooms_and_buttons_change_axis_and_smoothing(tmp_path: Path, width: int, kind: str) -> None:
    run = running(tmp_path)
    log_steps(run, 300)
    page = report.write(run, ended=True)
    page.write_text(page.read_text().replace("</script>\n</body>", f"{{{DRAG}}}</script>\n</body>"))
    call = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    call += [f"--window-size={width},800", "--dump-dom", f"file://{page}"]
    text = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search("<title>found (.*?)</title>", text)
    assert title, text[-2000:]
    whole, raw, log, selection, zoomed, value, again, fits = json.loads(title[1])
    assert whole == again and "; 2; " in whole and "; 1; " in raw, "without smoothing, only the raw line is drawn"
    assert log.endswith(" 0.5 1 2 5 10 20 50 100") or " 1 2 5 10 20 50 100" in log
    assert selection == "selection: 1"
    steps = [int(step) for step in zoomed.partition(": ")[2].partition(";")[0].split()]
    assert len(steps) > 1 and 30 < min(steps) < max(steps) < 200
    assert re.match(r"value: step 1[0-9][0-9]", value) or re.match(r"value: step [5-9][0-9]\b", value)
    assert fits == f"fits: true, {kind}"
