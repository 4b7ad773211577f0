"""A list that is run again, edited, cancelled, or started beside another one: real dispatchers and local jobs.

Finished jobs stay done, corrected jobs run, no result is overwritten, and exit codes are correct.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs.host.host_attempt import NOTHING_WRITTEN
from distributed.jobs.lists.job import job_id

PROGRAM = Path(__file__).resolve().parents[2] / "scripts/jobs/run_distributed_training.py"
SECONDS = 60  # timeout
pytestmark = pytest.mark.slow  # each test runs whole lists
RUN = ("--backend", "local", "--slots", "2", "--no-tmux", "--script", "job.sh", "--jobs-config", "jobs.json")
# Records its start. Each argument then makes it wait for a file, write a file, exit, or run a command.
SCRIPT = """#!/bin/sh
trap '' TERM
echo "start $$" >>starts
while [ $# -gt 1 ]; do
  case "$1" in
  --until) until [ -e "$2" ]; do sleep 0.05; done ;;
  --write) echo "$2" >"$MUSTER_OUTPUT_DIR/written" ;;
  --exit) exit "$2" ;;
  --run) eval "$2" ;;
  esac
  shift
done
"""


class RunningCall:
    """A process of the program, which may still run."""

    def __init__(self, output: Path, arguments: Sequence[str], directory: Path) -> None:
        self.output = output
        with output.open("w") as file:
            command = [sys.executable, *arguments]
            self.process = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def printed(self) -> str:
        return self.output.read_text()

    def interrupt(self) -> int:
        """Send SIGINT; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)


class JobList:
    """A project directory with a job list, and calls in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[RunningCall] = []
        for name in ("job.sh", "other.sh"):
            (directory / name).write_text(SCRIPT)
            (directory / name).chmod(0o755)

    def jobs(self, *jobs: Mapping[str, Any]) -> None:
        (self.directory / "jobs.json").write_text(json.dumps(jobs))

    def start_call(self, *arguments: str) -> RunningCall:
        running = RunningCall(self.directory / f"printed-{len(self.calls)}", [str(PROGRAM), *arguments], self.directory)
        self.calls.append(running)
        return running

    def call(self, *arguments: str) -> tuple[int, str]:
        """Return (exit code, output)."""
        running = self.start_call(*arguments)
        return running.process.wait(SECONDS), running.printed

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "results.json").read_text())
        return found

    def starts(self) -> int:
        path = self.directory / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def job_list(tmp_path: Path) -> Iterator[JobList]:
    made = JobList(tmp_path)
    yield made
    for running in made.calls:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_corrected_job_runs_and_the_failed_original_is_not_counted(job_list: JobList) -> None:
    job_list.jobs({"prefix": "p", "fold": 0, "exit": 3, "_retries": 0}, {"prefix": "p", "fold": 1})
    code, printed = job_list.call(*RUN)
    assert (code, "finished: 1 of 2 done, 1 failed" in printed) == (1, True), printed
    job_list.jobs({"prefix": "p", "fold": 0, "exit": 0}, {"prefix": "p", "fold": 1})
    code, printed = job_list.call("resume")
    assert (code, "finished: 2 of 3 done, 1 cancelled" in printed) == (0, True), printed
    assert job_list.starts() == 3
    code, printed = job_list.call("status")
    assert (code, "no longer in the list" in printed) == (0, True), printed


def test_a_job_that_was_removed_and_added_again_runs_again(job_list: JobList) -> None:
    job_list.jobs({"n": 1}, {"n": 2, "exit": 3, "_retries": 0})
    assert job_list.call(*RUN)[0] == 1
    job_list.jobs({"n": 1})
    assert job_list.call("resume")[0] == 0
    job_list.jobs({"n": 1}, {"n": 2, "exit": 3, "_retries": 0})
    assert job_list.call("resume")[0] == 1
    assert job_list.starts() == 3, "the second job ran again, as attempt 2"
    assert [len(job["attempts"]) for job in job_list.results()["jobs"]] == [1, 2]


def test_a_done_job_without_results_is_reported_with_what_it_wrote_elsewhere(job_list: JobList) -> None:
    (job_list.directory / "train.py").write_text(
        "import pathlib, sys\n"
        "options = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "path = pathlib.Path('experiments', options['--prefix'], f\"fold{options['--fold']}_ada\")\n"
        "path.mkdir(parents=True)\n"
        "(path / 'model.pt').write_text('weights')\n"
    )
    job_list.jobs(*({"prefix": "p", "fold": fold} for fold in range(3)))
    run = ("--backend", "local", "--slots", "1", "--no-tmux", "--script", "train.py", "--jobs-config", "jobs.json")
    code, printed = job_list.call(*run)
    note = f"{NOTHING_WRITTEN}; new files elsewhere on local: experiments/p/fold"
    assert (code, "finished: 3 of 3 done\n" in printed) == (0, True), printed
    assert re.search(rf"\ndone without results: 3 jobs; p/fold\d {re.escape(note)}\d_ada", printed), printed
    for fold, job in enumerate(job_list.results()["jobs"]):
        assert job["state"] == "done" and job["reason"].startswith(f"{note}{fold}_ada")
    assert f"            {note}1_ada" in job_list.call("status")[1]
    assert f"  p/fold2: done: {note}2_ada" in job_list.call("why", "p/fold2")[1]


def test_a_list_in_another_directory_runs_the_trainer_of_muster(job_list: JobList) -> None:
    job_list.jobs({"prefix": "p", "fold": 0, "model": "small", "steps": 1})
    code, printed = job_list.call("--backend", "local", "--slots", "1", "--no-tmux", "--jobs-config", "jobs.json")
    assert (code, "finished: 1 of 1 done\n" in printed) == (0, True), printed
    assert (job_list.directory / "experiments/p/fold0_special-methods/checkpoints").is_dir()


def test_results_of_one_script_do_not_overwrite_those_of_another(job_list: JobList) -> None:
    job_list.jobs({"write": "first", "prefix": "p", "fold": 0})
    assert job_list.call(*RUN)[0] == 0
    other = [argument.replace("job.sh", "other.sh") for argument in RUN]
    code, printed = job_list.call(*other)
    assert code == 2
    assert "experiments/p/fold0 holds the results of job " in printed
    assert " of job.sh; move it away, or give this job another prefix" in printed
    job_list.jobs({"write": "first", "prefix": "q", "fold": 0})
    code, printed = job_list.call(*other)
    assert (code, "was started with the script job.sh; use another --log-file" in printed) == (2, True), printed
    assert job_list.starts() == 1


def test_files_that_no_job_wrote_are_overwritten_only_if_the_user_adds_an_owner_file(job_list: JobList) -> None:
    job_list.jobs({"write": "a", "prefix": "p", "fold": 0}, {"write": "b", "prefix": "p", "fold": 1})
    written = job_list.directory / "experiments" / "p" / "fold0" / "written"
    written.parent.mkdir(parents=True)
    written.write_text("by hand\n")
    code, printed = job_list.call(*RUN)
    assert (code, "experiments/p/fold0 contains files that no job wrote; move it away" in printed) == (2, True), printed
    assert (written.read_text(), job_list.starts()) == ("by hand\n", 0)
    (written.parent / ".muster_job").touch()
    assert job_list.call(*RUN)[0] == 0
    assert (written.read_text(), job_list.starts()) == ("a\n", 2)


def test_a_list_continues_although_the_muster_job_file_of_a_done_job_is_missing(job_list: JobList) -> None:
    job_list.jobs({"write": "a", "prefix": "p", "fold": 0}, {"exit": 3, "_retries": 0})
    assert job_list.call(*RUN)[0] == 1
    (job_list.directory / "experiments" / "p" / "fold0" / ".muster_job").unlink()
    code, printed = job_list.call("resume")
    assert (code, "finished: 1 of 2 done, 1 failed" in printed) == (1, True), printed


def test_the_reason_of_a_job_whose_command_was_not_found_includes_its_output(job_list: JobList) -> None:
    (job_list.directory / "job.sh").write_text("#!/bin/sh\necho x >$MUSTER_OUTPUT_DIR/x\nno_such_command\n")
    job_list.jobs({"n": 1, "_retries": 0})
    code, printed = job_list.call(*RUN)
    assert code == 1
    assert "exit code 127: " in printed
    assert "no_such_command: not found" in printed


def test_cancel_all_also_cancels_pending_retries(job_list: JobList) -> None:
    job_list.jobs({"n": 1, "exit": 3, "_retries": 0}, {"n": 2})
    assert job_list.call(*RUN)[0] == 1
    code, printed = job_list.call("retry", "failed")
    assert (code, printed.startswith("requeued 1 job; to start: ")) == (0, True), printed
    code, printed = job_list.call("cancel", "all")
    assert (code, "1 of 2 done, 1 cancelled" in printed) == (0, True), printed
    assert job_list.call("resume")[0] == 1
    assert job_list.starts() == 2


@pytest.mark.parametrize("with_dispatcher", [True, False])
def test_an_interrupted_cancel_does_not_report_success(job_list: JobList, with_dispatcher: bool) -> None:
    """with_dispatcher: a dispatcher still runs the list, and `cancel` waits for it."""
    job_list.jobs({"until": "go"})
    dispatcher = job_list.start_call(*RUN, "--grace", "30")
    wait_until(lambda: job_list.starts() == 1)
    if not with_dispatcher:
        assert dispatcher.interrupt() == 128 + signal.SIGINT
    cancel = job_list.start_call("cancel", "all")
    journal = job_list.directory / "results.journal"
    wait_until(lambda: any(json.loads(line)["event"] == "request_handled" for line in journal.read_text().splitlines()))
    assert cancel.interrupt() == 128 + signal.SIGINT
    assert "Traceback" not in cancel.printed
    (job_list.directory / "go").touch()  # the job ignores SIGTERM
    code = dispatcher.process.wait(SECONDS) if with_dispatcher else job_list.call("resume")[0]
    assert code in (0, 1), "done or cancelled"


def test_the_plan_of_a_started_list_contains_the_remaining_jobs(job_list: JobList) -> None:
    job_list.jobs({"n": 1})
    assert job_list.call(*RUN)[0] == 0
    job_list.jobs({"n": 1}, {"n": 2})
    code, printed = job_list.call(*RUN, "--plan")
    assert code == 0
    assert "1 job on 2 slots of 1 server" in printed
    assert "not planned: 1 job, already done, failed or cancelled" in printed
    assert job_list.starts() == 1


def test_status_and_why_show_unusable_servers_with_reasons(job_list: JobList) -> None:
    job_list.jobs({"n": 1, "until": "go"}, {"n": 2, "_labels": ["x"]}, {"n": 3, "_labels": ["x"], "_priority": 1})
    servers = [{"host": "localhost", "port": 1, "labels": ["x"]}, {"host": "localhost", "port": 2}]
    (job_list.directory / "servers.json").write_text(json.dumps({"servers": servers}))
    arguments = ["--cluster-config", "servers.json", "--jobs-config", "jobs.json", "--script", "job.sh", "--no-tmux"]
    dispatcher = job_list.start_call(*arguments)
    wait_until(lambda: (job_list.directory / "results.json").exists() and job_list.results()["servers"])
    wait_until(lambda: all(each["reason"] for each in job_list.results()["servers"].values()))
    reason = "localhost-1: unreachable: ssh: connect to host localhost port 1: Connection refused"
    assert reason in job_list.call("status")[1]
    printed = job_list.call("why", job_list.results()["jobs"][0]["id"])[1]
    assert "waits for a free slot, after 1 job of the list" in printed, "the third job has a higher priority"
    assert reason in printed
    printed = job_list.call("why", job_list.results()["jobs"][1]["id"])[1]
    assert "needs a server with the labels x" in printed
    assert dispatcher.interrupt() == 128 + signal.SIGINT


@pytest.mark.parametrize("arguments", [("status",), ("--help",)])
def test_a_closed_output_pipe_is_not_an_error(job_list: JobList, arguments: Sequence[str]) -> None:
    job_list.jobs(*({"n": number, "exit": 1} for number in range(3)))
    assert job_list.call(*RUN, "--fail-fast")[0] == 1
    source, target = os.pipe()
    os.close(source)
    with subprocess.Popen(
        [sys.executable, PROGRAM, *arguments], cwd=job_list.directory, stdout=target, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(target)
        assert process.stderr
        assert (process.stderr.read(), process.wait(SECONDS)) == ("", 128 + signal.SIGPIPE)


def test_a_printed_command_can_be_pasted_if_the_installation_path_contains_a_space(tmp_path: Path) -> None:
    kit = tmp_path / "a kit"
    kit.mkdir()
    for name in ("distributed", "scripts"):
        (kit / name).symlink_to(PROGRAM.parents[2] / name)
    directory = tmp_path / "list"
    directory.mkdir()
    job_list = JobList(directory)
    job_list.jobs({"exit": 1, "_retries": 0})
    program = kit / PROGRAM.relative_to(PROGRAM.parents[2])
    run = subprocess.run(
        [sys.executable, program, *RUN], cwd=directory, capture_output=True, text=True, timeout=SECONDS
    )
    line = next(line for line in run.stdout.splitlines() if line.startswith("show the cause:"))
    pasted = ["bash", "-c", line.partition(":")[2].replace("python", shlex.quote(sys.executable), 1)]
    why = subprocess.run(pasted, cwd=directory, capture_output=True, text=True, timeout=SECONDS)
    assert (why.returncode, "exit code 1" in why.stdout) == (0, True), why


# ---------------------------------------------------------------- jobs that need others, and jobs that are added

# The job changes its working directory first: this shows that the paths in MUSTER_AFTER are absolute.
NEEDS = {"prefix": "second", "fold": 0, "run": 'cd /; cat "$MUSTER_AFTER/written" >"$MUSTER_OUTPUT_DIR/found"'}


def write_jobs(path: Path, *jobs: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(jobs))
    return path


def states(job_list: JobList) -> list[str]:
    return [each["state"] for each in job_list.results()["jobs"]]


def test_a_job_is_added_to_a_running_list_and_finds_the_output_of_the_job_that_it_needs(job_list: JobList) -> None:
    job_list.jobs({"prefix": "first", "until": "go", "write": "text", "fold": 0})
    running = job_list.start_call(*RUN)
    wait_until(lambda: job_list.starts() == 1)
    (job_list.directory / "elsewhere").mkdir()
    log_file = ("--log-file", str(job_list.directory / "results.json"))
    more = write_jobs(job_list.directory / "elsewhere/more.json", {**NEEDS, "_after": "first"}, {"n": 3})
    add = RunningCall(job_list.directory / "add", [str(PROGRAM), "add", more.name, *log_file], more.parent)
    assert (add.process.wait(SECONDS), add.printed) == (0, "added 2 new jobs\n")
    assert job_list.call("add", "elsewhere/more.json") == (0, f"nothing to add: all jobs of {more} are in the list\n")
    wait_until(lambda: states(job_list) == ["running", "waiting", "done"])
    code, printed = job_list.call("why", "second")
    assert (code, "second/fold0: waiting: waits for first/fold0: running" in printed) == (0, True), printed
    assert "waits for first/fold0: running" in job_list.call("status")[1]
    (job_list.directory / "go").touch()
    assert running.process.wait(SECONDS) == 0, running.printed
    assert f"{more}: jobs added: 2" in running.printed
    assert (job_list.directory / "experiments/second/fold0/found").read_text() == "text\n"


def test_added_jobs_stay_in_a_list_that_is_run_again_and_get_their_variables(job_list: JobList) -> None:
    """The file given to `add` may be changed later, but must keep the _env of its jobs until they have finished."""
    job_list.jobs({"n": 1})
    assert job_list.call(*RUN)[0] == 0
    secret = {"n": 2, "run": "test ${#TOKEN} = 6 || touch wrong", "_env": {"TOKEN": "s3cr3t"}}
    write_jobs(job_list.directory / "more.json", secret, {"n": 3, "_after": job_list.results()["jobs"][0]["id"]})
    code, printed = job_list.call("add", "more.json")
    assert (code, printed.startswith("added 2 new jobs; to start: ")) == (0, True), printed
    assert "resume" in printed
    assert job_list.call("status")[1].count("waiting") == 3, "two jobs and the total"
    write_jobs(job_list.directory / "more.json", {"n": 4})
    code, printed = job_list.call("resume")
    assert (code, f"{job_list.directory}/more.json no longer has its _env; restore it, or run " in printed) == (2, True)
    write_jobs(job_list.directory / "more.json", {"n": 4}, secret)
    job_list.jobs({"n": 1}, {"n": 5})
    assert job_list.call(*RUN, "--plan")[1].count("experiments/") == 3
    assert job_list.call(*RUN)[0] == 0
    (job_list.directory / "more.json").unlink()
    assert job_list.call("resume")[0] == 0
    assert (states(job_list), job_list.starts()) == (["done"] * 4, 4)
    assert not (job_list.directory / "wrong").exists()
    assert "s3cr3t" not in (job_list.directory / "results.journal").read_text()
    assert "s3cr3t" not in (job_list.directory / "results.json").read_text()


def test_resume_is_refused_until_an_added_job_whose_file_was_deleted_is_cancelled(job_list: JobList) -> None:
    job_list.jobs({"n": 1}, {"n": 2, "prefix": "gone"})
    assert job_list.call(*RUN, "--plan")[0] == 0
    running = job_list.start_call(*RUN, "--max-failures", "1")
    assert running.process.wait(SECONDS) == 0
    write_jobs(job_list.directory / "more.json", {"n": 3, "_env": {"A": "b"}}, {"n": 4, "exit": 3, "_retries": 0})
    assert job_list.call("add", "more.json")[0] == 0
    (job_list.directory / "more.json").unlink()
    job_list.jobs({"n": 1}, {"n": 2, "prefix": job_id({"n": 4, "exit": 3})})
    code, printed = job_list.call("resume")
    assert (code, "No such file" in printed, " would write into " in printed) == (2, True, True), printed
    job_list.jobs({"n": 1}, {"n": 2, "prefix": "gone"})
    remedy = shlex.split(printed.partition("or run ")[2].splitlines()[0])
    assert job_list.call(*remedy[2:])[0] == 0, remedy
    code, printed = job_list.call("resume")
    assert (code, "finished: 2 of 4 done, 1 failed, 1 cancelled" in printed) == (1, True), printed


def test_a_resumed_list_passes_numbers_of_added_jobs_as_they_were_written(job_list: JobList) -> None:
    job_list.jobs({"n": 1})
    assert job_list.call(*RUN)[0] == 0
    (job_list.directory / "more.json").write_text(
        '[{"run": "echo $* >arguments", "a": {"b": 1.50e-5}, "c": [0.000010, 1e3, 2], "_nested": "json"}]'
    )
    assert job_list.call("add", "more.json")[0] == 0
    (job_list.directory / "more.json").unlink()
    code, printed = job_list.call("resume")
    assert code == 0, printed
    passed = (job_list.directory / "arguments").read_text()
    assert '--a {"b": 1.50e-5} --c 0.000010 1e3 2 ' in passed


@pytest.mark.parametrize("script", ["./job.sh", "{}/job.sh"])
def test_a_list_is_continued_with_another_spelling_of_the_path_of_its_script(job_list: JobList, script: str) -> None:
    job_list.jobs({"n": 1, "write": "text"}, {"n": 2, "exit": 1, "_retries": 0})
    assert job_list.call(*RUN)[0] == 1
    job_list.jobs({"n": 1, "write": "text"}, {"n": 3, "write": "text"})
    code, printed = job_list.call(*RUN, "--script", script.format(job_list.directory))
    assert (code, job_list.starts()) == (0, 3), printed
    assert job_list.call(*RUN, "--log-file", "second.json")[0] == 0, "the output directories belong to the same jobs"


FAULTY_FILES: list[tuple[Any, str]] = [
    ([{"n": 2, "_after": "nothing"}], "job 0: _after=nothing: no such job in this list; "),
    ([{"n": 2, "_labels": ["x"]}], ": no server has the labels x"),
    ([{"n": 2, "_gpus": 9}], ": _gpus=9: no matching server has more than 2"),
    ([{"n": 9, "prefix": "p", "fold": 0}], "job 0 would write the same directory as job "),
    ([{"prefix": "other", "fold": 0}], "experiments/other/fold0 holds the results of job "),
    ([], "contains an empty list"),
    ("{", "more.json, line 1, column 2: not valid JSON"),
    (None, "cannot read it (No such file or directory)"),
    ("a pipe", "more.json: not a regular file"),
]


def test_an_added_file_with_a_fault_is_refused_and_changes_nothing(job_list: JobList) -> None:
    other = job_list.directory / "experiments/other/fold0"
    other.mkdir(parents=True)
    (other / ".muster_job").write_text("0123456789 of job.sh\n")
    (other / "result").touch()
    job_list.jobs({"n": 1, "until": "go", "prefix": "p", "fold": 0})
    dispatcher = job_list.start_call(*RUN)
    wait_until(lambda: job_list.starts() == 1)
    before = (job_list.directory / "results.journal").read_bytes()
    more = job_list.directory / "more.json"
    for jobs, fault in FAULTY_FILES:
        more.unlink(missing_ok=True)
        if jobs == "a pipe":
            os.mkfifo(more)
        elif jobs is not None:
            more.write_text(jobs if isinstance(jobs, str) else json.dumps(jobs))
        code, printed = job_list.call("add", "more.json")
        assert (code, fault in printed) == (2, True), printed
    journal = (job_list.directory / "results.journal").read_bytes()
    assert journal.startswith(before) and b'"event":"add' not in journal
    (job_list.directory / "go").touch()
    assert dispatcher.process.wait(SECONDS) == 0
    assert job_list.starts() == 1


def test_jobs_added_while_a_list_ends_are_not_lost(job_list: JobList) -> None:
    """The dispatcher runs each of these jobs, or `add` prints the command that starts it."""
    job_list.jobs({"n": 0})
    running = job_list.start_call(*RUN)
    wait_until(lambda: job_list.starts() == 1)
    printed = ""
    for number in range(1, 6):
        write_jobs(job_list.directory / "more.json", {"n": number})
        code, printed = job_list.call("add", "more.json")
        assert (code, printed[:15]) == (0, "added 1 new job"), printed
    running.process.wait(SECONDS)
    assert ("; to start: " in printed) == ("finished: 6 of 6" not in running.printed), running.printed
    assert job_list.call("resume")[0] == 0
    assert (states(job_list), job_list.starts()) == (["done"] * 6, 6)


def test_a_list_notifies_of_its_pause_its_first_failure_and_its_end(job_list: JobList) -> None:
    job_list.jobs(*({"n": n, "exit": 3, "_retries": 0} for n in range(3)))
    code, printed = job_list.call(*RUN, "--slots", "1", "--max-failures", "2", "--notify", "cat >note.$$")
    assert code == 75, printed
    read = [json.loads(path.read_text()) for path in job_list.directory.glob("note.*")]
    found = sorted(read, key=lambda one: one["time"])
    assert sorted(one["event"] for one in found) == ["end", "first failure", "pause"]
    by_event = {one["event"]: one for one in found}
    assert found[-1]["message"] == "results.json: paused: 0 of 3 done, 2 failed"
    assert (found[-1]["exit_code"], found[-1]["report"]) == (75, str(job_list.directory / "results.html"))
    assert by_event["pause"]["cause"] == "--max-failures 2: 2 jobs failed"
    assert by_event["first failure"]["host"] == "local"
    assert "failed: attempt 1 on local: exit code 3" in by_event["first failure"]["message"]


def test_resume_keeps_the_notify_command_but_cancel_does_not_call_it(job_list: JobList) -> None:
    job_list.jobs({"n": 1, "exit": 3, "_retries": 0}, {"n": 2})
    assert job_list.call(*RUN, "--slots", "1", "--max-failures", "1", "--notify", "cat >note.$$")[0] == 75
    count = len(list(job_list.directory.glob("note.*")))
    assert "cancelled: " in job_list.call("cancel", "all")[1]
    assert len(list(job_list.directory.glob("note.*"))) == count
    assert job_list.call("resume")[0] == 1
    assert len(list(job_list.directory.glob("note.*"))) == count + 1
