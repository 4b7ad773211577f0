"""The examples of LAUNCH_GUIDE.md for job lists run as printed, in a terminal of 100 x 30.

A list on this machine is interrupted and resumed. A list on three laboratory servers is watched in tmux. A list runs on
SLURM. Experiments share base models; an experiment and a base model are trained again by hand, with results that are
bit-identical to those of the list.
Only the soak tests run the lists in full. tests/test_docs.py runs the same commands with --plan.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import TWO_PHASE, Command, every_command, example, jobs_program
from test_guide_on_nodes import KIT, LAB, make_project

from distributed.training.base_model import CACHE, HASH_LENGTH, TRAINING, verify

GUIDE = "LAUNCH_GUIDE.md"
SECONDS = 800  # timeout; the machine may be busy with other tests
COMMANDS = [one for one in every_command(GUIDE) if jobs_program(one) or "make_jobs.py" in one.text]
LOCAL = [one for one in COMMANDS if not one.needs]
SERVERS = [one for one in COMMANDS if one.needs.startswith("# Needs three servers")]
TWO_PHASE_COMMANDS = [one for one in every_command(GUIDE) if one.script == TWO_PHASE and "cache" not in one.words]
[BY_HAND] = [one for one in every_command(GUIDE) if one.needs.startswith("# Needs the base models")]
[ATTACH] = [one for one in every_command(GUIDE) if "tmux attach" in one.text and one.needs]
pytestmark = pytest.mark.timeout(SECONDS + 100)
CTRL_B, CTRL_C, DOWN = b"\x02", b"\x03", b"\x1b[B"


def command_with(commands: list[Command], *arguments: str) -> str:
    """The only command with all these arguments and without --plan."""
    [found] = [one.text for one in commands if set(arguments) <= set(one.words) and "--plan" not in one.words]
    return found


class Terminal:
    """A program in a terminal of 100 x 30, to which keys can be sent."""

    def __init__(self, line: str, project: Path, env: dict[str, str]) -> None:
        self._file, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.line, self._raw = line, b""
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "-c", f"exec {line}"], cwd=project, env=env | {"TERM": "xterm"},
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read until all processes have closed the terminal."""
        with contextlib.suppress(OSError):
            while block := os.read(self._file, 1 << 16):
                self._raw += block

    @property
    def text(self) -> str:
        """The output so far, without escape sequences."""
        plain = re.sub(rb"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|[=>78])", b"", self._raw)
        return plain.decode(errors="replace").replace("\r", "")

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"{self.line}: {pattern!r} not shown within {SECONDS} s\n{self.text}"
            assert self._reader.is_alive(), f"{self.line}: exited without {pattern!r}\n{self.text}"
            time.sleep(0.1)

    def press(self, *keys: bytes) -> None:
        """Send keys slowly; tmux would treat fast input as a paste."""
        for key in keys:
            os.write(self._file, key)
            time.sleep(0.05)

    def wait(self) -> int:
        """Wait until the program exits. Returns its exit code."""
        code = self._process.wait(timeout=SECONDS)
        self._reader.join(timeout=5)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        os.close(self._file)


class Project:
    """A working directory with Muster installed and its virtual environment active."""

    def __init__(self, directory: Path) -> None:
        self.directory = make_project(directory)
        (directory / "make_jobs.py").write_text(example("Write my_jobs.json"))
        (directory / "tmux").mkdir()
        dropped = ("SLURM_", "SBATCH_", "MUSTER_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        activated = {"VIRTUAL_ENV": f"{directory}/.venv", "PATH": f"{directory}/.venv/bin:{inherited['PATH']}"}
        # Separate tmux sockets: an existing session would change the name of the session under test.
        self.env = inherited | activated | {"TMUX_TMPDIR": f"{directory}/tmux", "MUSTER_LAB": f"{directory}/lab"}

    def terminal(self, line: str) -> contextlib.closing[Terminal]:
        return contextlib.closing(Terminal(line, self.directory, self.env))

    def call(self, line: str, stdin: str = "") -> str:
        """Return the output of a command with this standard input; fail if its exit code is not 0."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.directory, env=self.env, timeout=SECONDS, input=stdin,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def keep(self, path: str, kept: Sequence[int]) -> None:
        """Keep only the jobs at these positions of a list."""
        jobs = json.loads((self.directory / path).read_text())
        (self.directory / path).write_text(json.dumps([jobs[position] for position in kept]))

    def results(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / name).read_text())
        return found


def kept_of(*kept: int, full: int) -> pytest.MarkDecorator:
    """Run a test with the jobs at these positions of a list and, as a soak test, with all jobs of the list."""
    return pytest.mark.parametrize("kept", [kept, pytest.param(tuple(range(full)), marks=pytest.mark.soak)], ids=len)


def assert_all_done(results: dict[str, Any], project: Project, jobs: int) -> None:
    """Assert that each of the jobs ran once, and that its results are at the paths of the guide."""
    assert results["state"] == "finished"
    assert (results["totals"]["done"], results["totals"]["attempts"]) == (jobs, jobs), "no job ran twice"
    for job in results["jobs"]:
        assert job["metrics"]["held_out_loss"] < 4.0, "it has learned: random guesses give ln(256) = 5.5"
        assert re.fullmatch(rf"experiments/{job['settings']['prefix']}/fold[012]_[a-z-]+", job["output"])
        assert (project.directory / job["output"] / "metrics.jsonl").exists()
        [log] = project.directory.glob(f"logs/jobs/{results['list']}/{job['id']}.1/node_*.log")
        assert "finished: " in log.read_text()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    for list_ in tmp_path.glob("*.journal"):
        program = [sys.executable, str(KIT / "scripts/jobs/run_distributed_training.py")]
        cancel = [*program, "cancel", "all", "--log-file", str(list_.with_suffix(".json"))]
        subprocess.run(cancel, env=project.env, cwd=tmp_path, capture_output=True, check=False)
    subprocess.run(["tmux", "kill-server"], env=project.env, capture_output=True, check=False)


@pytest.mark.slow
@kept_of(0, 6, 7, full=9)
def test_an_interrupted_list_resumes_and_runs_each_job_once(project: Project, kept: tuple[int, ...]) -> None:
    project.keep("config/jobs_config.json", kept)
    with project.terminal(command_with(LOCAL, "--slots")) as first:
        first.wait_for(r"slot +job +step +time +left")
        first.wait_for(r"tmux attach -t ml_training")
        with project.terminal("tmux attach -t ml_training") as view:
            view.wait_for(r"medium/fold\d_\S+ \(slot \d\)")
            view.press(CTRL_B, b"z")
            view.wait_for(r"slots\*Z")
            view.press(CTRL_B, b"[")
            view.wait_for(r"\[0/\d+\]")
            view.press(b"q", CTRL_B, b"z", CTRL_B, DOWN, CTRL_C, CTRL_B, b"d")
            view.wait_for(r"\[detached")
            assert view.wait() == 0
        panes = project.call("tmux list-panes -s -t ml_training").splitlines()
        assert len(panes) == 2, "Ctrl-C in a pane has no effect"
        first.wait_for(r"done: \S+ on local:\d after")
        first.press(CTRL_C)
        assert first.wait() == 130
        assert re.search(rf"interrupted: \d of {len(kept)} done.*; \d still running", first.text)
    assert re.search(r"(?m)^\w{10} +small/fold0_special-methods ", project.call(command_with(LOCAL, "status")))
    with project.terminal(command_with(LOCAL, "resume")) as second:
        assert second.wait() == 0, second.text
        assert second.text.count("still runs") >= 1
        assert f"finished: {len(kept)} of {len(kept)} done" in second.text
    assert_all_done(project.results("results.json"), project, len(kept))
    assert "held-out loss" in project.call(command_with(LOCAL, "logs"))
    assert "small/fold0_special-methods: done" in project.call(command_with(LOCAL, "why"))
    assert "nothing to cancel" in project.call(command_with(LOCAL, "cancel", "all"))
    assert "small/fold0_special-methods" in (project.directory / "results.html").read_text()


@pytest.fixture
def servers(project: Project) -> Iterator[Project]:
    """Three servers with separate tmux sockets and shared files, as with a shared home directory."""
    try:
        subprocess.run([LAB, "up", "3"], env=project.env, check=True)
        yield project
    finally:
        for number in (1, 2, 3):
            env = project.env | {"TMUX_TMPDIR": f"{project.directory}/lab/node{number}/tmux"}
            subprocess.run(["tmux", "kill-server"], env=env, capture_output=True, check=False)
        subprocess.run([LAB, "down"], env=project.env, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="starting nodes needs root")
@kept_of(0, 3, 6, full=9)
def test_a_list_runs_on_three_servers_and_is_watched_in_tmux(servers: Project, kept: tuple[int, ...]) -> None:
    project = servers
    assert project.call("python make_jobs.py") == "9 jobs\n"
    project.keep("my_jobs.json", kept)
    with project.terminal(command_with(SERVERS, "--cluster-config")) as running:
        for number in (1, 2, 3):
            running.wait_for(rf"node{number}: connected; watch: ssh -t node{number} tmux attach -t ml_training")
        with project.terminal(ATTACH.text) as view:
            view.wait_for(r"lr0\.\d+/fold\d_\S+ \(slot 0")
            view.press(CTRL_B, b"d")
            view.wait_for(r"\[detached")
            assert view.wait() == 0
        followed = project.call(command_with(SERVERS, "logs"))  # follows a job from before its start to its end
        assert "finished: " in followed
        assert running.wait() == 0, running.text
        assert f"finished: {len(kept)} of {len(kept)} done" in running.text
    results = project.results("results_servers.json")
    assert_all_done(results, project, len(kept))
    assert {attempt["server"] for job in results["jobs"] for attempt in job["attempts"]} == {"node1", "node2", "node3"}
    assert all(sessions(project, number).startswith("ml_training: ") for number in (1, 2, 3)), "sessions stay"
    closed = project.call(command_with(SERVERS, "close"))
    assert sorted(closed.splitlines()) == [f"node{number}: removed tmux session ml_training" for number in (1, 2, 3)]
    assert not any(sessions(project, number) for number in (1, 2, 3))


def sessions(project: Project, number: int) -> str:
    env = project.env | {"TMUX_TMPDIR": f"{project.directory}/lab/node{number}/tmux"}
    return subprocess.run(["tmux", "list-sessions"], env=env, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def slurm(project: Project) -> Iterator[Project]:
    up = subprocess.run([LAB, "up", "2", "--slurm"], env=project.env, stdout=subprocess.PIPE, text=True, check=True)
    try:
        project.env["SLURM_CONF"] = up.stdout.strip()
        yield project
    finally:
        subprocess.run([LAB, "down"], env=project.env, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="starting nodes needs root")
@kept_of(0, 3, full=9)
def test_a_list_runs_on_slurm(slurm: Project, kept: tuple[int, ...]) -> None:
    project = slurm
    project.keep("config/jobs_config.json", kept)
    [line] = [one.text for one in COMMANDS if one.needs == "# Needs a SLURM cluster and config/cluster_config.json."]
    with project.terminal(line) as running:
        assert running.wait() == 0, running.text
        assert f"finished: {len(kept)} of {len(kept)} done" in running.text
    assert_all_done(project.results("results_slurm.json"), project, len(kept))


def held_out_loss(run: Path) -> float:
    """The last held-out loss of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line["held_out_loss"] for line in lines if "held_out_loss" in line][-1])


@pytest.mark.slow
@kept_of(1, 4, full=15)
def test_experiments_share_base_models_and_match_training_by_hand(project: Project, kept: tuple[int, ...]) -> None:
    directory = project.directory
    project.keep("config/two_phase_jobs.json", kept)
    [command] = [one.text for one in TWO_PHASE_COMMANDS if not one.needs]
    planned = project.call(f"{command} --plan")
    bases = len({position // 5 for position in kept})  # five experiments of each fold
    assert f"base models        {bases}; 0 in the cache, {bases} to train" in planned
    done = len(kept) + bases
    assert f"finished: {done} of {done} done" in project.call(f"{command} --no-tmux")
    results = project.results("results_two_phase.json")
    assert (results["totals"]["done"], results["totals"]["attempts"]) == (done, done)
    phase1 = project.results("results_two_phase.phase1_base_models.json")
    models = {each["hash"]: each for each in phase1["base_models"]}
    assert [len(each["experiments"]) for each in models.values()] == [len(kept) // bases] * bases
    assert all(f"{name}  no" in planned for name in models), "the plan must list them"
    for name, each in models.items():
        verify(str(directory / CACHE / name), each["digest"])
        assert each["digest"][:HASH_LENGTH] == name
    experiments = project.results("results_two_phase.phase2_experiments.json")["jobs"]
    assert len({job["metrics"]["held_out_loss"] for job in experiments}) == len(kept)

    project.env["OMP_NUM_THREADS"] = "1"  # as in a slot; the number of threads changes the rounding of sums
    [job] = [
        each for each in experiments
        if (each["settings"]["fold"], each["settings"]["target_batch_pct"]) == (0, 0.25)
    ]  # fmt: skip
    project.call(re.sub(r"base_models/\w+", f"base_models/{job['options']['base_model_hash']}", BY_HAND.text))
    [run] = directory.glob("experiments/by-hand/fold0_*")
    assert held_out_loss(run) == job["metrics"]["held_out_loss"]
    # Train a base model by hand, with the arguments of the job that trained it.
    [name] = re.findall(r"base_models/(\w+)", BY_HAND.text)
    settings = json.loads((directory / CACHE / name / "manifest.json").read_text())["settings"]
    arguments = [
        argument for key, value in settings.items()
        for argument in (f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)]))
    ]  # fmt: skip
    project.call(f"MUSTER_OUTPUT_DIR={directory}/alone python train.py {shlex.join(arguments)}")
    by_hand, by_list = (torch.load(path / "best_base_model.pt", weights_only=True)["model"]
                    for path in (directory / "alone", directory / TRAINING / name))  # fmt: skip
    assert by_hand.keys() == by_list.keys()
    assert all(torch.equal(by_hand[key], by_list[key]) for key in by_hand)


def test_the_guide_has_commands_for_job_lists() -> None:
    """A change of every_command() must not silently omit commands."""
    found = {argument for one in LOCAL for argument in one.words}
    assert found >= {"--backend", "--slots", "--plan", "status", "logs", "why", "cancel", "resume"}
    assert len(SERVERS) == 3
