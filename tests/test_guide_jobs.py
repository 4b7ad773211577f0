"""What the guide says of job lists is so: its worked examples run as they are printed, at a terminal of 100 x 30.

Nine jobs of train.py on this machine, interrupted and resumed; nine on three servers of the laboratory, watched through
tmux; nine on SLURM. The commands are read from the guide; tests/test_docs.py runs each of them with --plan.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_docs import Command, every_command, example, jobs_program
from test_guide_on_nodes import KIT, LAB

GUIDE = "LAUNCH_GUIDE.md"
SECONDS = 800  # after which something counts as hanging; the machine may be busy with other tests
COMMANDS = [one for one in every_command(GUIDE) if jobs_program(one) or "make_jobs.py" in one.text]
HERE = [one for one in COMMANDS if not one.needs]
SERVERS = [one for one in COMMANDS if one.needs.startswith("# Needs three servers")]
[ATTACH] = [one for one in every_command(GUIDE) if "tmux attach" in one.text and one.needs]
pytestmark = pytest.mark.timeout(SECONDS + 100)
CTRL_B, CTRL_C, DOWN = b"\x02", b"\x03", b"\x1b[B"


def the(commands: list[Command], *words: str) -> str:
    """The command that has all these words, and no --plan."""
    [found] = [one.text for one in commands if set(words) <= set(one.words) and "--plan" not in one.words]
    return found


class Terminal:
    """A program at a terminal of 100 x 30: what it shows, without what moves the cursor; and keys for it."""

    def __init__(self, line: str, desk: Path, env: dict[str, str]) -> None:
        self._file, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.line, self._raw = line, b""
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "-c", f"exec {line}"], cwd=desk, env=env | {"TERM": "xterm"},
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Until the program, and whatever else writes to the terminal, has ended."""
        with contextlib.suppress(OSError):
            while block := os.read(self._file, 1 << 16):
                self._raw += block

    @property
    def text(self) -> str:
        """All that it has shown so far."""
        plain = re.sub(rb"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|[=>78])", b"", self._raw)
        return plain.decode(errors="replace").replace("\r", "")

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + SECONDS
        while not re.search(pattern, self.text):
            assert time.monotonic() < end, f"{self.line}: {pattern!r} not within {SECONDS} s\n{self.text}"
            assert self._reader.is_alive(), f"{self.line}: ended without {pattern!r}\n{self.text}"
            time.sleep(0.1)

    def press(self, *keys: bytes) -> None:
        """One after the other, as slowly as a person: tmux takes what comes at once for a paste."""
        for key in keys:
            os.write(self._file, key)
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        code = self._process.wait(timeout=SECONDS)
        self._reader.join(timeout=5)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        os.close(self._file)


class Desk:
    """The working directory of somebody who has installed the kit, with its virtual environment active."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("scripts", "distributed", "tests", "train.py"):
            (folder / name).symlink_to(KIT / name)
        shutil.copytree(KIT / "config", folder / "config")
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "make_jobs.py").write_text(example("Write my_jobs.json"))
        (folder / "tmux").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MUSTER_"))}
        activated = {"VIRTUAL_ENV": f"{folder}/.venv", "PATH": f"{folder}/.venv/bin:{kept['PATH']}"}
        # A session of somebody else on this machine must not give ours another name.
        self.env = kept | activated | {"TMUX_TMPDIR": f"{folder}/tmux", "MUSTER_LAB": f"{folder}/lab"}

    def terminal(self, line: str) -> contextlib.closing[Terminal]:
        return contextlib.closing(Terminal(line, self.folder, self.env))

    def call(self, line: str) -> str:
        """What a command prints that ends well."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.env, timeout=SECONDS, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def results(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        return found


def assert_all_done(results: dict[str, Any], desk: Desk) -> None:
    """Each of nine jobs was trained once, and its results are where the guide says."""
    assert results["state"] == "finished"
    assert (results["totals"]["done"], results["totals"]["attempts"]) == (9, 9), "no job ran twice"
    for job in results["jobs"]:
        assert job["metrics"]["held_out_loss"] < 4.0, "it has learned: 5.5 is a guess among 256"
        assert re.fullmatch(rf"experiments/{job['settings']['prefix']}/fold[012]_[a-z-]+", job["output"])
        assert (desk.folder / job["output"] / "metrics.jsonl").exists()
        [log] = desk.folder.glob(f"logs/jobs/{results['list']}/{job['id']}.1/node_*.log")
        assert "finished: " in log.read_text()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    here = Desk(tmp_path)
    yield here
    for list_ in tmp_path.glob("*.journal"):
        words = ["cancel", "all", "--log-file", str(list_.with_suffix(".json"))]
        program = [sys.executable, str(KIT / "scripts/jobs/run_distributed_training.py")]
        subprocess.run([*program, *words], env=here.env, cwd=tmp_path, capture_output=True, check=False)
    subprocess.run(["tmux", "kill-server"], env=here.env, capture_output=True, check=False)


@pytest.mark.slow
def test_nine_jobs_on_this_machine(desk: Desk) -> None:
    with desk.terminal(the(HERE, "--slots")) as first:
        first.wait_for(r"slot +job +step +time +left")
        first.wait_for(r"tmux attach -t ml_training")
        with desk.terminal("tmux attach -t ml_training") as view:
            view.wait_for(r"medium/fold\d_\S+ \(slot \d\)")
            view.press(CTRL_B, b"z")
            view.wait_for(r"slots\*Z")
            view.press(CTRL_B, b"[")
            view.wait_for(r"\[0/\d+\]")
            view.press(b"q", CTRL_B, b"z", CTRL_B, DOWN, CTRL_C, CTRL_B, b"d")
            view.wait_for(r"\[detached")
            assert view.end() == 0
        assert len(desk.call("tmux list-panes -s -t ml_training").splitlines()) == 2, "Ctrl-C in a pane does nothing"
        first.wait_for(r"done: \S+ on local:\d after")
        first.press(CTRL_C)
        assert first.end() == 130
        assert re.search(r"interrupted: \d of 9 done, .* still running", first.text)
    assert re.search(r"(?m)^\w{10} +small/fold0_special-methods ", desk.call(the(HERE, "status")))
    with desk.terminal(the(HERE, "resume")) as second:
        assert second.end() == 0, second.text
        assert second.text.count("still runs") >= 1
        assert "finished: 9 of 9 done" in second.text
    assert_all_done(desk.results("results.json"), desk)
    assert "held-out loss" in desk.call(the(HERE, "logs"))
    assert "small/fold0_special-methods: done" in desk.call(the(HERE, "why"))
    assert "nothing to cancel" in desk.call(the(HERE, "cancel", "all"))
    assert "small/fold0_special-methods" in (desk.folder / "results.html").read_text()


@pytest.fixture
def servers(desk: Desk) -> Iterator[Desk]:
    """Three, each with a tmux of its own, as servers have. The files are this machine's, as with a shared home."""
    try:
        subprocess.run([LAB, "up", "3"], env=desk.env, check=True)
        for number in (1, 2, 3):
            (desk.folder / f"tmux/node{number}").mkdir()
        (desk.folder / "lab/bashrc").write_text(f"export TMUX_TMPDIR={desk.folder}/tmux/$(uname -n)\n")
        yield desk
    finally:
        for number in (1, 2, 3):
            env = desk.env | {"TMUX_TMPDIR": f"{desk.folder}/tmux/node{number}"}
            subprocess.run(["tmux", "kill-server"], env=env, capture_output=True, check=False)
        subprocess.run([LAB, "down"], env=desk.env, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="raising nodes needs root")
def test_nine_jobs_on_three_servers(servers: Desk) -> None:
    desk = servers
    assert desk.call("python make_jobs.py") == "9 jobs\n"
    with desk.terminal(the(SERVERS, "--cluster-config")) as running:
        for number in (1, 2, 3):
            running.wait_for(rf"node{number}: connected; watch: ssh -t node{number} tmux attach -t ml_training")
        with desk.terminal(ATTACH.text) as view:
            view.wait_for(r"lr0\.\d+/fold\d_\S+ \(slot 0")
            view.press(CTRL_B, b"d")
            view.wait_for(r"\[detached")
            assert view.end() == 0
        followed = desk.call(the(SERVERS, "logs"))  # from before it starts to its end
        assert "finished: " in followed
        assert running.end() == 0, running.text
        assert "finished: 9 of 9 done" in running.text
    results = desk.results("servers.json")
    assert_all_done(results, desk)
    assert {attempt["server"] for job in results["jobs"] for attempt in job["attempts"]} == {"node1", "node2", "node3"}
    assert not any((desk.folder / f"tmux/node{number}/tmux-0/default").is_socket() and sessions(desk, number)
                   for number in (1, 2, 3)), "the sessions end with the list"  # fmt: skip


def sessions(desk: Desk, number: int) -> str:
    env = desk.env | {"TMUX_TMPDIR": f"{desk.folder}/tmux/node{number}"}
    return subprocess.run(["tmux", "list-sessions"], env=env, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def slurm(desk: Desk) -> Iterator[Desk]:
    up = subprocess.run([LAB, "up", "2", "--slurm"], env=desk.env, stdout=subprocess.PIPE, text=True, check=True)
    try:
        desk.env["SLURM_CONF"] = up.stdout.strip()
        yield desk
    finally:
        subprocess.run([LAB, "down"], env=desk.env, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="raising nodes needs root")
def test_nine_jobs_on_slurm(slurm: Desk) -> None:
    desk = slurm
    [line] = [one.text for one in COMMANDS if one.needs == "# Needs a SLURM cluster, for job lists."]
    with desk.terminal(line) as running:
        assert running.end() == 0, running.text
        assert "finished: 9 of 9 done" in running.text
    assert_all_done(desk.results("slurm.json"), desk)


def test_the_guide_has_commands_for_job_lists() -> None:
    """So that a change of the reading above does not silently leave them out."""
    words = {word for one in HERE for word in one.words}
    assert words >= {"--backend", "--slots", "--plan", "status", "logs", "why", "cancel", "resume"}
    assert len(SERVERS) == 2
