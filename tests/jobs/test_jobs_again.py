"""A list that is called again, edited, cancelled or begun beside another one: real dispatchers and jobs, here.

What is done stays done, what was corrected runs, no result is written over, and an exit code never says too much.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "scripts/jobs/run_distributed_training.py"
SECONDS = 60  # after which something counts as hanging
RUN = ("--backend", "local", "--slots", "2", "--no-tmux", "--script", "job.sh", "--jobs-config", "jobs.json")
# Notes its start, waits for the file that it is told, and ends as it is told.
SCRIPT = """#!/bin/sh
trap '' TERM
echo "start $$" >>starts
while [ $# -gt 1 ]; do
  case "$1" in
  --until) until [ -e "$2" ]; do sleep 0.05; done ;;
  --write) echo "$2" >"$MUSTER_OUTPUT_DIR/written" ;;
  --exit) exit "$2" ;;
  --run) "$2" ;;
  esac
  shift
done
"""


class Running:
    """A call that may not have ended."""

    def __init__(self, output: Path, words: Sequence[str], directory: Path) -> None:
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=directory, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def interrupt(self) -> int:
        """Ctrl-C. Returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)


class List:
    """A directory with a list of jobs, and calls in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.begun: list[Running] = []
        for name in ("job.sh", "other.sh"):
            (directory / name).write_text(SCRIPT)
            (directory / name).chmod(0o755)

    def jobs(self, *jobs: Mapping[str, Any]) -> None:
        (self.directory / "jobs.json").write_text(json.dumps(jobs))

    def begin(self, *words: str) -> Running:
        running = Running(self.directory / f"printed-{len(self.begun)}", [str(PROGRAM), *words], self.directory)
        self.begun.append(running)
        return running

    def call(self, *words: str) -> tuple[int, str]:
        """(exit code, what was printed)."""
        running = self.begin(*words)
        return running.process.wait(SECONDS), running.printed

    def results(self, name: str = "results.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / name).read_text())
        return found

    def starts(self) -> int:
        path = self.directory / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def states(self) -> dict[str, str]:
        return {job["output"].removeprefix("experiments/"): job["state"] for job in self.results()["jobs"]}


@pytest.fixture
def a_list(tmp_path: Path) -> Iterator[List]:
    made = List(tmp_path)
    yield made
    for running in made.begun:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_job_that_was_corrected_runs_and_the_wrong_one_is_not_counted(a_list: List) -> None:
    a_list.jobs({"prefix": "p", "fold": 0, "exit": 3, "_retries": 0}, {"prefix": "p", "fold": 1})
    code, printed = a_list.call(*RUN)
    assert (code, "finished: 1 of 2 done, 1 failed" in printed) == (1, True), printed
    a_list.jobs({"prefix": "p", "fold": 0, "exit": 0}, {"prefix": "p", "fold": 1})
    code, printed = a_list.call("resume")
    assert (code, "finished: 2 of 3 done, 1 cancelled" in printed) == (0, True), printed
    assert a_list.starts() == 3
    code, printed = a_list.call("status")
    assert (code, "no longer in the list" in printed) == (0, True), printed


def test_a_job_that_was_taken_out_and_put_back_runs_anew(a_list: List) -> None:
    a_list.jobs({"n": 1}, {"n": 2, "exit": 3, "_retries": 0})
    assert a_list.call(*RUN)[0] == 1
    a_list.jobs({"n": 1})
    assert a_list.call("resume")[0] == 0
    a_list.jobs({"n": 1}, {"n": 2, "exit": 3, "_retries": 0})
    assert a_list.call("resume")[0] == 1
    assert a_list.starts() == 3, "the second one again, as its second attempt"
    assert [len(job["attempts"]) for job in a_list.results()["jobs"]] == [1, 2]


def test_results_of_one_script_do_not_come_over_those_of_another(a_list: List) -> None:
    a_list.jobs({"write": "first", "prefix": "p", "fold": 0})
    assert a_list.call(*RUN)[0] == 0
    other = [word.replace("job.sh", "other.sh") for word in RUN]
    code, printed = a_list.call(*other)
    assert code == 2
    assert "experiments/p/fold0 holds the results of job " in printed
    assert " of job.sh; move it away, or give this job another prefix" in printed
    a_list.jobs({"write": "first", "prefix": "q", "fold": 0})
    code, printed = a_list.call(*other)
    assert (code, "was started with the script job.sh; use another --log-file" in printed) == (2, True), printed
    assert a_list.starts() == 1


def test_what_a_job_wrote_before_a_command_was_not_found_is_kept_with_the_reason(a_list: List) -> None:
    (a_list.directory / "job.sh").write_text("#!/bin/sh\necho x >$MUSTER_OUTPUT_DIR/x\nno_such_command\n")
    a_list.jobs({"n": 1, "_retries": 0})
    code, printed = a_list.call(*RUN)
    assert code == 1
    assert "exit code 127: " in printed
    assert "no_such_command: not found" in printed


def test_cancel_all_means_also_what_was_to_be_tried_again(a_list: List) -> None:
    a_list.jobs({"n": 1, "exit": 3, "_retries": 0}, {"n": 2})
    assert a_list.call(*RUN)[0] == 1
    code, printed = a_list.call("retry", "failed")
    assert (code, printed.startswith("requeued 1 job; to start: ")) == (0, True), printed
    code, printed = a_list.call("cancel", "all")
    assert (code, "1 of 2 done, 1 cancelled" in printed) == (0, True), printed
    assert a_list.call("resume")[0] == 1
    assert a_list.starts() == 2


@pytest.mark.parametrize("beside", [True, False])
def test_a_cancel_that_was_interrupted_does_not_say_that_all_is_ended(a_list: List, beside: bool) -> None:
    """beside: a dispatcher works on the list, and the call waits for it."""
    a_list.jobs({"until": "go"})
    one = a_list.begin(*RUN, "--grace", "30")
    wait_until(lambda: a_list.starts() == 1)
    if not beside:
        assert one.interrupt() == 128 + signal.SIGINT
    cancel = a_list.begin("cancel", "all")
    journal = a_list.directory / "results.journal"
    wait_until(lambda: any(json.loads(line)["event"] == "asked" for line in journal.read_text().splitlines()))
    assert cancel.interrupt() == 128 + signal.SIGINT
    assert "Traceback" not in cancel.printed
    (a_list.directory / "go").touch()  # its job has got SIGTERM, and ignores it
    assert (one.process.wait(SECONDS) if beside else a_list.call("resume")[0]) in (0, 1), "done or cancelled"


def test_the_plan_of_a_list_that_has_begun_is_what_is_left(a_list: List) -> None:
    a_list.jobs({"n": 1})
    assert a_list.call(*RUN)[0] == 0
    a_list.jobs({"n": 1}, {"n": 2})
    code, printed = a_list.call(*RUN, "--plan")
    assert code == 0
    assert "1 job on 2 slots of 1 server" in printed
    assert "not planned: 1 job, already done, failed or cancelled" in printed
    assert a_list.starts() == 1


def test_status_and_why_name_the_servers_that_get_no_jobs_and_why(a_list: List) -> None:
    a_list.jobs({"n": 1, "until": "go"}, {"n": 2, "_labels": ["x"]}, {"n": 3, "_labels": ["x"], "_priority": 1})
    servers = [{"host": "localhost", "port": 1, "labels": ["x"]}, {"host": "localhost", "port": 2}]
    (a_list.directory / "servers.json").write_text(json.dumps({"servers": servers}))
    words = ["--cluster-config", "servers.json", "--jobs-config", "jobs.json", "--script", "job.sh", "--no-tmux"]
    dispatcher = a_list.begin(*words)
    wait_until(lambda: (a_list.directory / "results.json").exists() and a_list.results()["servers"])
    wait_until(lambda: all(each["reason"] for each in a_list.results()["servers"].values()))
    reason = "localhost-1: unreachable: ssh: connect to host localhost port 1: Connection refused"
    assert reason in a_list.call("status")[1]
    printed = a_list.call("why", a_list.results()["jobs"][0]["id"])[1]
    assert "waits for a free slot, after 1 job of the list" in printed, "the third one has a higher priority"
    assert reason in printed
    printed = a_list.call("why", a_list.results()["jobs"][1]["id"])[1]
    assert "needs a server with the labels x" in printed
    assert dispatcher.interrupt() == 128 + signal.SIGINT


@pytest.mark.parametrize("words", [("status",), ("--help",)])
def test_an_output_that_nobody_reads_to_its_end_is_no_fault(a_list: List, words: Sequence[str]) -> None:
    a_list.jobs(*({"n": number, "exit": 1} for number in range(3)))
    assert a_list.call(*RUN, "--fail-fast")[0] == 1
    source, target = os.pipe()
    os.close(source)
    with subprocess.Popen(
        [sys.executable, PROGRAM, *words], cwd=a_list.directory, stdout=target, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(target)
        assert process.stderr
        assert (process.stderr.read(), process.wait(SECONDS)) == ("", 128 + signal.SIGPIPE)


def test_a_printed_command_can_be_pasted_where_the_kit_is_in_a_directory_with_a_blank(tmp_path: Path) -> None:
    kit = tmp_path / "a kit"
    kit.mkdir()
    for name in ("distributed", "scripts"):
        (kit / name).symlink_to(PROGRAM.parents[2] / name)
    directory = tmp_path / "list"
    directory.mkdir()
    a_list = List(directory)
    a_list.jobs({"exit": 1, "_retries": 0})
    program = kit / PROGRAM.relative_to(PROGRAM.parents[2])
    run = subprocess.run(
        [sys.executable, program, *RUN], cwd=directory, capture_output=True, text=True, timeout=SECONDS
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("show the cause:"))
    pasted = ["bash", "-c", line.partition(":")[2].replace("python", shlex.quote(sys.executable), 1)]
    why = subprocess.run(pasted, cwd=directory, capture_output=True, text=True, timeout=SECONDS)
    assert (why.returncode, "exit code 1" in why.stdout) == (0, True), why
