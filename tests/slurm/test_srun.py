"""srun's output is split into output and reports; failures of srun have a verdict; tasks report how they end.

tests/slurm_train.bats and tests/slurm_faults.bats test complete steps on a real SLURM.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.exit_codes import UNFIT
from distributed.files import read_json
from distributed.host import process_scan, signals
from distributed.launch.node_reports import ERROR, REPORT, ReportParser
from distributed.launch.srun import JobStep, Srun, StepNode
from distributed.launch.watch import Watch
from distributed.runs.lookup import RunNode
from distributed.runs.run_directory import create
from distributed.slurm.task import DUPLICATE_TIME, TaskFiles, agent_options
from distributed.verdict import verdict

KIT = Path(__file__).resolve().parents[2]

OUTPUT = b"step 1\nstep 2 is split amid " + REPORT + b'{"node": "n2", "end": {"rank": 0, "exit_code": 0}}\n'
OUTPUT += b"its line\n"
OUTPUT += REPORT + b'{"node": "n1"}\n' + REPORT + b"no report\n" + REPORT + b"[1]\n" + b"the end\n"


@given(st.lists(st.integers(1, len(OUTPUT)), max_size=12))
def test_reports_are_found_wherever_the_stream_is_split(splits: list[int]) -> None:
    parser, found = ReportParser(), []
    positions = sorted({0, *splits, len(OUTPUT)})
    for start, end in itertools.pairwise(positions):
        found += list(parser.feed(OUTPUT[start:end]))
    output = b"step 1\nstep 2 is split amid its line\nthe end\n"
    assert b"".join(item for item in found if isinstance(item, bytes)) == output
    assert [item["node"] for item in found if isinstance(item, dict)] == ["n2", "n1"]
    faults = [str(item).partition(":")[0] for item in found if isinstance(item, ValueError)]
    assert faults == ["Expecting value", "report"]


def test_the_exit_code_of_a_node_is_that_of_its_first_failed_task() -> None:
    node = StepNode("n1", tasks=3)
    for code, end_time in ((0, 1.0), (137, 3.0), (1, 2.0)):  # the rank that failed first reports last
        assert not node.ended
        node.ends.append({"exit_code": code, "time": end_time})
    assert node.ended
    assert node.exit_code == 1


RunStep = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run directory of a run on n1."""
    directory = create(
        str(tmp_path), "train", nodes=[RunNode("n1", "n1", 1, 0)], script="train.py", config=None, cwd="/",
        python="python3", command=["x"],
    )  # fmt: skip
    return Path(directory)


@pytest.fixture
def run_step(run: Path, new_watch: Callable[..., Watch]) -> RunStep:
    """Follow a step with a command in place of srun. Returns the exit code of the step."""

    def run_step(*command: str, nodes: int = 1) -> int:
        class Step(Srun):
            def start(self, watch: Watch) -> None:
                names = [f"n{number + 1}" for number in range(nodes)]
                watch.open(replace(watch.run, nodes=tuple(RunNode(name, name, 1, n) for n, name in enumerate(names))))
                self._step = JobStep(watch, [StepNode(name, 1) for name in names])
                self._step.start(list(command), {})

        return new_watch(run, Step((), (), "17", task_per_rank=True)).attempt()

    return run_step


def test_the_message_of_an_srun_that_starts_no_task_is_reported(
    run: Path, run_step: RunStep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_step("sh", "-c", "echo srun: error: no such node >&2; exit 3") == 3
    assert "srun: error: no such node" in capfd.readouterr().err
    judged = verdict.decide(run, 3)
    assert (judged.outcome, judged.exit_code) == ("failed", 3)
    assert "srun ended with: srun: error: no such node" in judged.cause


def test_an_srun_that_exits_with_0_before_its_tasks_is_a_failure(run: Path, run_step: RunStep) -> None:
    """This happens when the allocation is revoked."""
    assert run_step("true") == UNFIT
    assert verdict.decide(run, UNFIT).outcome == "failed"


def test_the_node_of_a_task_that_has_not_reported_its_end_is_lost(run: Path, run_step: RunStep) -> None:
    report = (REPORT + b'{"node": "n1", "tasks": 1}\n').decode()
    assert run_step("printf", "%s", report) == UNFIT
    assert (run / "newest/node_n1.lost").read_text() == "srun exited before its tasks\n"


def test_a_task_that_exited_with_0_during_a_collective_is_the_cause_in_the_verdict(
    run: Path, run_step: RunStep
) -> None:
    (run / "errors/rank_0.json").write_text(
        json.dumps(
            {"node": "n1", "rank": 0, "pid": 1, "exception": "RuntimeError", "message": "Connection reset by peer"}
        )
    )
    ends = [{"rank": 1, "exit_code": 0}, {"rank": 0, "exit_code": 1}]
    reports = [
        {"node": f"n{2 - k}", "tasks": 1, "end": {"pid": 1, "time": 1.0 + k, **end}} for k, end in enumerate(ends)
    ]
    output = "".join(f"{REPORT.decode()}{json.dumps(report)}\n" for report in reports)
    assert run_step("printf", "%s", output, nodes=2) == 1
    assert verdict.decide(run, 1).cause == "rank 1 on n2 ended with exit code 0 while rank 0 on n1 was in a collective"


END = (REPORT + b'{"node": "n1", "tasks": 1, "end": {"rank": 0, "exit_code": 0}}\n').decode()


@pytest.mark.parametrize(
    "script",
    [
        'printf %s "$1"; sleep 300 & echo $! >"$2"',  # a child of srun has inherited its output
        'printf %s "$1"; echo $$ >"$2"; exec >&- 2>&-; exec sleep 300',  # srun remains, without output
    ],
)
def test_a_step_ends_when_srun_exits_and_not_when_its_output_ends(
    run: Path, run_step: RunStep, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An srun that does not exit after its tasks is killed."""
    monkeypatch.setattr("distributed.launch.srun.SRUN_GRACE", 0.2)
    begin = time.monotonic()
    try:
        assert run_step("sh", "-c", script, "sh", END, str(tmp_path / "pid")) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - begin < 60
    assert (run / "node_n1.exit").read_text() == "0\n"


def test_a_node_failure_message_may_arrive_in_parts(run: Path, run_step: RunStep) -> None:
    script = "printf 'srun: error: Node fail' >&2; sleep 0.2; echo 'ure on n1' >&2"
    assert run_step("sh", "-c", script) == UNFIT
    assert (run / "newest/node_n1.lost").read_text() == "node failure reported by SLURM\n"


@pytest.mark.parametrize(
    "line", ["srun: error: Node failure on n1[", "x srun: error: Node failure on n1", "Node failure on n1"]
)
def test_another_line_about_a_node_failure_means_nothing(
    run: Path, run_step: RunStep, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    assert run_step("sh", "-c", 'echo "$1" >&2; sleep 0.2; printf %s "$2"', "sh", line, END) == 0
    assert not (run / "newest/node_n1.lost").exists()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("blocked", "lost"), [(60.0, False), (0.0, True)])
def test_a_node_is_not_lost_while_a_disk_blocks_the_launcher(
    run: Path, new_watch: Callable[..., Watch], blocked: float, lost: bool
) -> None:
    """The launcher may not have read the node's reports yet."""
    watch = new_watch(run, Srun((), (), "17", task_per_rank=True))
    clock = watch.loop.clock
    node = StepNode("n1", tasks=1, last_report=clock.now() - (60 - blocked))
    step = JobStep(watch, [node])
    step._client = watch.calls.call("n1", ["true"])
    clock._read_at -= blocked
    step.check_clock()
    watch.calls.wait()
    assert node.lost == lost


# ---------------------------------------------------------------- tasks

ENV = {
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_GTIDS": "2,3",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "20017",
    "OMP_NUM_THREADS": "1",
}
TIMEOUT = 60.0  # seconds for events that take milliseconds on an idle machine


class StartedTask:
    """A task, started as srun does, with pipes to its standard files."""

    def __init__(self, run: Path, script: str, rank: int = 3, grace: int = 8, agent: bool = False) -> None:
        """script: Python code, or bash code if `agent` is true."""
        (run / f"script_{rank}.py").write_text(f"import os, signal, sys, time\n{script}")
        env = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "MUSTER_RUN_DIR": str(run)}
        task = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "slurm.task"]
        task.append("agent" if agent else "rank")
        command = ["2,4", "bash", "-c", script, "bash", "--"] if agent else [str(run / f"script_{rank}.py")]
        self.process: Any = subprocess.Popen(
            [*task, str(run), str(grace), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENV | env | {"MUSTER_NODE": "n2"},
            bufsize=0,
            preexec_fn=signals.ignore,  # as in_node_env.sh --task does
        )
        self.parser = ReportParser()
        self.output = b""
        self.reports: list[Any] = []

    def read_until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert select.select([self.process.stdout], [], [], end - time.monotonic())[0]
            received = os.read(self.process.stdout.fileno(), 65536)
            assert received
            for item in self.parser.feed(received):
                if isinstance(item, bytes):
                    self.output += item
                else:
                    self.reports.append(item)

    def end(self) -> dict[str, Any]:
        """Wait for the final report."""
        self.read_until(lambda: self.reports and "end" in self.reports[-1])
        return dict(self.reports[-1]["end"])

    def close(self) -> int:
        """Close the control channel, as srun.py does after all final reports. Returns the exit code."""
        self.process.stdin.close()
        self.process.stdout.close()
        return int(self.process.wait(TIMEOUT))


Start = Callable[..., StartedTask]


@pytest.fixture
def start(run: Path) -> Iterator[Start]:
    tasks: list[StartedTask] = []

    def start(*arguments: Any, **options: Any) -> StartedTask:
        tasks.append(StartedTask(run, *arguments, **options))
        return tasks[-1]

    yield start
    for task in tasks:
        if task.process.poll() is None and not task.process.stdin.closed:
            task.process.stdin.write(b"kill\n")
        task.close()


READY = "print('ready', flush=True)\ntime.sleep(300)\n"


def test_the_console_shows_rank_0_and_the_log_has_all_ranks(run: Path, start: Start) -> None:
    for rank in (0, 3):
        task = start("print(f'rank {os.environ[\"RANK\"]}')\nsys.stdout.write('last')\nsys.exit(5)\n", rank)
        end = task.end()
        assert (end["rank"], end["exit_code"], end["ended_by_agent"]) == (rank, 5, False)
        assert task.output == (b"[n2:0] rank 0\n[n2:0] last\n" if rank == 0 else b"")
        assert task.process.poll() is None  # otherwise srun would kill the other tasks
        assert task.close() == 5
    assert (run / "newest/node_n2.log").read_text() == "".join(f"[n2:{n}] rank {n}\n[n2:{n}] last\n" for n in (0, 3))
    assert (run / "ranks/n2/slurm/attempt_0/1/stdout.log").read_text() == "rank 3\nlast"


def test_a_long_line_of_a_rank_is_cut_in_a_task(run: Path, start: Start) -> None:
    task = start("for _ in range(20): sys.stdout.write('x' * (1 << 20))\nprint('\\nlast')\n", rank=0)
    task.end()
    assert task.output.endswith(b"x [%d bytes of this line are left out]\n[n2:0] last\n" % (19 << 20))
    assert (run / "newest/node_n2.log").read_bytes() == task.output
    assert task.close() == 0


BAR = r"""
print("result", flush=True)
print("warning", file=sys.stderr, flush=True)
for step in 1, 2:
    sys.stderr.write(f"\rstep {step}")
    sys.stderr.flush()
    while not os.path.exists(f"shown {step}"):
        time.sleep(0.01)
sys.stderr.write("\n")
"""


def test_lines_of_standard_error_are_marked_and_updates_of_a_progress_bar_are_sent_at_once(
    run: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    task = start(BAR, rank=0)
    for step in (1, 2):
        task.read_until(lambda: b"step %d\r\n" % step in task.output)  # noqa: B023 (called in this iteration only)
        Path(f"shown {step}").touch()
    task.end()
    assert task.close() == 0
    errors = [line[1:] for line in task.output.split(b"\n") if line.startswith(ERROR)]
    assert errors == [b"[n2:0] warning", b"[n2:0] step 1\r", b"[n2:0] step 2\r", b"[n2:0] step 2"]
    assert [line for line in task.output.split(b"\n")[:-1] if not line.startswith(ERROR)] == [b"[n2:0] result"]
    assert (run / "newest/node_n2.log").read_text() == "[n2:0] result\n[n2:0] warning\n[n2:0] step 2\n"


def test_the_launcher_shows_marked_lines_on_standard_error(
    run_step: RunStep, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    error = ERROR.decode()
    output = f"[n1:0] a\n{error}[n1:0] b\n[n1:0] {error}c{END}\n{error}[n1:1] d\nagent\n{error}[n1:0] 1%\r\n[n1:0] e"
    assert run_step("printf", "%s", output) == 0
    captured = capfdbinary.readouterr()
    assert captured.out.decode() == "a\nc\ne\n"
    assert captured.err.decode() == "b\nagent\n1%\n"


def test_the_console_shows_rank_0_of_an_agent_and_the_log_has_all_ranks(run: Path, start: Start) -> None:
    task = start(
        r"printf '[n2:0] a\n[n2:1] b\nagent\n[n2:0] 10%%\r\n[n2:0] 20%%\n'; echo $6 $MASTER_ADDR", rank=0, agent=True
    )
    end = task.end()
    assert (end["rank"], end["exit_code"], task.close()) == (None, 0, 0)
    assert task.output == b"[n2:0] a\nagent\n[n2:0] 10%\r\n[n2:0] 20%\n1\n"
    assert (run / "newest/node_n2.log").read_bytes() == b"[n2:0] a\n[n2:1] b\nagent\n[n2:0] 20%\n1\n"
    assert not list(run.glob("ranks/n2/slurm/attempt_*")), "the agent chooses the directory of its ranks' output"


def test_the_first_task_of_a_node_sends_heartbeats(start: Start) -> None:
    task = start(READY, rank=0)
    task.read_until(lambda: len(task.reports) > 1)
    first, second = (report.pop("time") for report in task.reports[:2])
    assert task.reports[:2] == [{"node": "n2", "step": "17.0", "tasks": 2}] * 2
    assert first < second < time.time()
    task.process.stdin.write(b"kill\n")
    task.end()
    task.close()


@pytest.mark.parametrize(
    ("handler", "code", "by_agent"),
    [("", 143, True), ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n", 75, False)],
)
def test_a_stopped_rank_is_recorded_as_ended_by_the_agent_unless_it_saved_a_checkpoint(
    run: Path, start: Start, handler: str, code: int, by_agent: bool
) -> None:
    task = start(handler + READY, rank=0)
    task.read_until(lambda: b"ready" in task.output)
    task.process.stdin.write(b"stop\n")
    end = task.end()
    assert (end["exit_code"], end["ended_by_agent"]) == (code, by_agent)
    assert task.close() == code


def test_a_rank_is_killed_after_the_grace_time(start: Start) -> None:
    task = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY, rank=0, grace=1)
    task.read_until(lambda: b"ready" in task.output)
    task.process.stdin.write(b"stop\n")
    assert (task.end()["exit_code"], task.close()) == (137, 137)


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('boom')", 1), ("sys.exit(3)", 3)])
def test_a_rank_that_has_failed_and_does_not_exit_is_reported_at_once(
    run: Path, start: Start, end: str, code: int
) -> None:
    thread = "import threading; threading.Thread(target=time.sleep, args=(300,)).start()\n"
    task = start(thread + end, rank=0)
    task.read_until(lambda: task.reports and "failed" in task.reports[-1])
    assert task.reports[-1]["failed"] == code
    task.process.stdin.write(b"stop\n")
    task.process.stdin.write(b"kill\n")
    record = task.end()
    assert (record["exit_code"], record["ended_by_agent"]) == (code, False)
    assert record["time"] == read_json(run / "errors/rank_0.json")["time"]
    assert b"failed and does not exit: a thread, an exit handler or a destructor holds it; killing it" in task.output
    assert task.close() == code


def test_a_failed_rank_has_time_for_its_exit_handlers(run: Path, start: Start) -> None:
    """SIGTERM, which stops the other ranks, would interrupt the handlers."""
    handler = f"lambda: (time.sleep(1), open({str(run / 'end')!r}, 'w').close())"
    task = start(f"import atexit; atexit.register({handler})\n1 / 0", rank=0)
    task.read_until(lambda: task.reports and "failed" in task.reports[-1])
    task.process.stdin.write(b"stop\n")
    assert task.end()["exit_code"] == 1
    assert (run / "end").exists()


def test_a_task_that_has_failed_and_not_exited_stops_the_others(run: Path, run_step: RunStep) -> None:
    """The other task ends when it is requested to."""
    other, failed = {"node": "n1"}, {"node": "n1", "failed": 5, "tasks": 2}
    end_1 = {"rank": 1, "local_rank": 1, "pid": 7, "time": 2.0, "exit_code": 143, "ended_by_agent": True}
    end_0 = end_1 | {"rank": 0, "local_rank": 0, "time": 1.0, "exit_code": 5, "ended_by_agent": False}
    reports = [
        f"\\036{json.dumps(report)}\\n" for report in (other, failed, {**other, "end": end_1}, {**other, "end": end_0})
    ]
    script = f"printf '{reports[0]}{reports[1]}'; until read line && [ \"$line\" = stop ]; do :; done; "
    script += f"printf '{reports[2]}{reports[3]}'; exit 9"
    assert run_step("sh", "-c", script) == 5
    assert (run / "node_n1.exit").read_text() == "5\n"


@pytest.mark.parametrize("agent", [False, True])
def test_a_task_writes_nothing_to_a_run_directory_of_another_user(run: Path, start: Start, agent: bool) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory to another user")
    task = start("", agent=agent)  # the test writes the script
    task.process.kill()
    task.close()
    planted = Path(f"{run}-planted")
    planted.mkdir(0o777)
    os.chown(planted, 65534, -1)
    call = [str(planted) if one == str(run) else one for one in task.process.args]
    done = subprocess.run(call, env=os.environ | ENV | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, capture_output=True)
    assert done.returncode == UNFIT
    assert b"not started: " in done.stderr and b"-planted: belongs to " in done.stderr
    assert list(planted.iterdir()) == []


def test_a_task_stops_when_its_launcher_is_lost(start: Start) -> None:
    task = start(READY, rank=0)
    task.read_until(lambda: b"ready" in task.output)
    task.process.stdin.close()
    assert task.end()["exit_code"] == 143
    assert task.close() == 143


@pytest.mark.parametrize("killed", ["supervisor", "command"])
def test_no_process_of_a_killed_task_remains_and_other_tasks_continue(run: Path, start: Start, killed: str) -> None:
    script = "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    task, other = start(script + READY, rank=0), start(READY, rank=3)
    task.read_until(lambda: b"ready" in task.output)
    facts: Any = read_json(run / "ranks/n2/slurm/task_0.pid")
    os.kill(facts[killed]["pid"], signal.SIGKILL)
    if killed == "command":
        assert task.end()["exit_code"] == 137
    else:
        task.process.wait(TIMEOUT)
    entries = TaskFiles(str(run), ENV | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).environment
    end = time.monotonic() + TIMEOUT
    while (remaining := process_scan.live_processes(entries, exclude=[task.process.pid])) and time.monotonic() < end:
        time.sleep(0.01)
    assert not remaining
    assert other.process.poll() is None
    other.process.stdin.write(b"kill\n")
    assert (other.end()["exit_code"], other.close()) == (137, 137)
    task.close()


def signal_task(run: Path, number: int) -> None:
    """Send a signal to all processes of the task of rank 0, as SLURM does."""
    facts: Any = read_json(run / "ranks/n2/slurm/task_0.pid")
    for name in ("supervisor", "guard", "command"):
        os.kill(facts[name]["pid"], number)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_before_its_handler_is_set_is_repeated(run: Path, start: Start, number: int) -> None:
    handler = f"signal.signal({number}, lambda *_: sys.exit(75))\n"
    task = start(f"print('ready', flush=True)\ntime.sleep(1)\n{handler}time.sleep(300)\n", rank=0)
    task.read_until(lambda: b"ready" in task.output)
    signal_task(run, number)
    assert (task.end()["exit_code"], task.close()) == (75, 75)


PRINTS_AT_SIGNAL = "signal.signal({}, lambda *_: print('got it', flush=True))\n" + READY


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGQUIT, signal.SIGRTMIN])
@pytest.mark.parametrize("sender", ["SLURM", "launcher", "SLURM and launcher", "launcher and SLURM"])
def test_a_handler_gets_a_signal_once_whoever_sends_it(run: Path, start: Start, number: int, sender: str) -> None:
    task = start(PRINTS_AT_SIGNAL.format(number), rank=0)
    task.read_until(lambda: b"ready" in task.output)
    for name in sender.split(" and "):
        if name == "SLURM":
            signal_task(run, number)
        else:
            task.process.stdin.write(f"signal {number}\n".encode())
    task.read_until(lambda: b"got it" in task.output)
    time.sleep(DUPLICATE_TIME)
    task.process.stdin.write(b"stop\n")
    assert task.end()["exit_code"] == 143
    assert task.output.count(b"got it") == 1
    task.close()


@pytest.mark.parametrize(
    ("number", "code"),
    [(number, 75) for number in signals.STOPPING] + [(signal.SIGALRM, 128 + signal.SIGALRM), (signal.SIGRTMIN, 162)],
)
def test_a_signal_of_slurm_requests_a_stop_or_kills_the_rank_if_the_rank_has_no_handler(
    run: Path, start: Start, number: int, code: int
) -> None:
    task = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + READY, rank=0)
    task.read_until(lambda: b"ready" in task.output)
    signal_task(run, number)
    assert (task.end()["exit_code"], task.close()) == (code, code)
    assert (
        read_json(run / f"errors/signal_n2_{signals.name(number)}.json")["sender"] == "from SLURM (--signal or scancel)"
    )


def test_without_a_handler_the_launchers_signal_stops_a_rank(start: Start) -> None:
    task = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + READY, rank=0)
    task.read_until(lambda: b"ready" in task.output)
    task.process.stdin.write(b"signal 10\n")
    assert (task.end()["exit_code"], task.close()) == (75, 75)


def test_an_agent_gets_the_options_of_its_node() -> None:
    arguments = agent_options("/logs/train-1", [2, 4], ENV)
    options: dict[str, Any] = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options == {
        "--rdzv-id": "train-1",
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "4",
        "--master-addr": "n1",
        "--master-port": "20017",
        "--log-dir": "/logs/train-1/ranks/n2",
    }
