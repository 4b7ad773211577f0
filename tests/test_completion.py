"""`muster` in bash, zsh and fish: it is on PATH after `source scripts/activate`, and Tab completes its arguments.

Each shell runs on a terminal and receives keys. The candidates are also tested without a shell.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed import index
from distributed.jobs.journal.journal import Journal
from distributed.jobs.journal.state import job_records
from distributed.jobs.lists.job import Job, Options

KIT = Path(__file__).resolve().parents[1]
MUSTER = KIT / "scripts/muster"
SHELLS = {
    "bash": (["bash", "--norc", "-i"], "scripts/activate"),
    "zsh": (["zsh", "-f", "-i"], "scripts/activate"),
    "fish": (["fish", "--no-config", "-i"], "scripts/activate.fish"),
}
SECONDS = 60  # timeout of a shell


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working and home directory, with settings, runs, a hostfile, ssh hosts and a job list."""
    for name in ("config", ".ssh", "logs/train-1", "logs/train-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config/tiny.yaml").touch()
    (tmp_path / "my_train.py").touch()
    (tmp_path / "data.csv").write_text("(,\n")
    (tmp_path / ".ssh/config").write_text("Host gpu1 gpu* !gpu3\n  HostName x\nhost=gpu2\nInclude more/*.conf\n")
    (tmp_path / ".ssh/more").mkdir()
    (tmp_path / ".ssh/more/a.conf").write_text("Host gpu4\n")
    (tmp_path / "my_hosts").write_text("rack[1-2] slots=4\n")
    command = ["scripts/ssh/launch_torchrun_auto.sh", "--hostfile", "my_hosts", "-", "2"]
    for number, arguments in enumerate((command, ["scripts/ssh/launch_singlenode.sh"]), 1):
        run = tmp_path / f"logs/train-{number}/run.json"
        run.write_text(json.dumps({"command": arguments, "cwd": str(tmp_path)}, indent=2))
        os.utime(run, (number, number))
    (tmp_path / "logs/latest").symlink_to("train-2")
    (tmp_path / "logs/slurm-17").symlink_to("train-2")
    jobs = [Job(name, {}, Options(), f"experiments/{name}") for name in ("small-0", "large-0")]
    with Journal.open(tmp_path / "results.journal") as journal:
        journal.add("list", list="ab", jobs=job_records(jobs))
        journal.commit()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complete(*words: str) -> list[str]:
    command = ["timeout", "60", str(MUSTER), "--complete", *words]  # also ends what muster has started
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == (not done.stdout)
    return done.stdout.splitlines()


def test_names_that_a_shell_would_run_and_runs_of_others_are_no_candidates(home: Path) -> None:
    for name in ("[[:punct:]]", "x$(touch RAN)", "y`touch RAN`", "z;touch RAN", "-rf $HOME", "--x", "slurm---x", "own"):
        (home / "logs" / name).mkdir()
        (home / "logs" / name / "run.json").write_text("{}")
        (home / f"{name}.yaml").touch()
    for name in ("--script=a.yaml", "--script=sub/b.yaml", "-x/c.yaml"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).touch()
    if os.geteuid() == 0:
        (home / "logs" / "foreign").mkdir()
        (home / "logs" / "foreign" / "run.json").write_text("{}")
        os.chown(home / "logs" / "foreign" / "run.json", 65534, 65534)
        (home / "logs" / "planted").symlink_to("own")
        os.chown(home / "logs" / "planted", 65534, 65534, follow_symlinks=False)
    assert complete("status", "") == ["17", "[[:punct:]]", "latest", "own", "train-1", "train-2"]
    assert complete("submit", "") == ["-", "[[:punct:]].yaml", "config/tiny.yaml", "own.yaml", "slurm---x.yaml"]
    script = f"source {shlex.quote(str(KIT))}/scripts/activate; COMP_WORDS=(muster status ''); COMP_CWORD=2\n"
    script += "touch ';'; _muster; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["17", "[[:punct:]]", "latest", "own", "train-1", "train-2"]
    assert complete("ssh", "-", "2", "gpu") == ["gpu1", "gpu2", "gpu4"]
    assert not (home / "RAN").exists()


def test_runs_of_other_directories_are_candidates_where_there_are_none(
    home: Path, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add(home / "logs")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert complete("status", "") == ["17", "latest", "train-1", "train-2"]
    monkeypatch.chdir(home)
    (home / "other/run-3").mkdir(parents=True)
    (home / "other/run-3/run.json").write_text("{}")
    index.add(home / "other")
    assert complete("stop", "run-") == [], "runs of this directory come first"
    (state_home / "muster/directories").unlink()
    os.mkfifo(state_home / "muster/directories")
    monkeypatch.chdir(tmp_path / "empty")
    assert complete("status", "") == []


def test_completion_does_not_wait_for_a_fifo_or_terminal_in_place_of_a_file(home: Path) -> None:
    journal, hostfile = home / "results.journal", home / "my_hosts"
    os.mkfifo(home / "fifo")
    for path in (journal, hostfile):
        path.unlink()
        path.symlink_to("fifo")
    (home / "logs/train-3").mkdir()
    os.mkfifo(home / "logs/train-3/run.json")
    assert complete("jobs", "logs", "") == []
    assert complete("ssh", "-", "2", "gpu") == ["gpu1", "gpu2", "gpu4"]
    journal.unlink()
    os.mkfifo(journal)
    assert complete("jobs", "logs", "") == []


@pytest.mark.parametrize(
    ("call", "expected"),
    {
        "sta": ["status"],
        "help st": ["status", "stop"],
        "status --s": ["--stacks"],
        "run --agent ": ["fast", "torchrun"],
        "run ": ["-m", "my_train.py"],
        "run dat": [],  # the shell completes files
        "train ": ["-", "config/tiny.yaml"],
        "submit ": ["-", "config/tiny.yaml"],
        "ssh - 2 -- --s": [],
        "ssh - 2 gpu": ["gpu1", "gpu2", "gpu4"],
        "ssh - 2 rack[": ["rack[1-2]"],
        "doctor --exclude r": ["rack[1-2]"],
        "attach ": ["17", "latest", "train-1", "train-2"],
        "stop lat": ["latest"],
        "logs train-": ["train-1", "train-2"],
        "logs --s": ["--since"],
        "logs --rank ": ["all"],
        "ls --": ["--all", "--help", "--json", "--log-dir", "--python", "--rows"],
        "two-phase --s": ["--script", "--skip-phase1", "--slots", "--sync"],
        "two-phase cache p": ["prune"],
        "jobs res": ["resume"],
        "jobs logs sm": ["small-0"],
        "no-such-verb --s": [],
    }.items(),
)
def test_muster_complete_prints_the_candidates_for_the_last_word(home: Path, call: str, expected: list[str]) -> None:
    assert sorted(complete(*call.split(" "))) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_a_verb_an_option_a_run_and_a_file(home: Path, shell: str) -> None:
    command, script = SHELLS[shell]
    muster = home / "with blank"
    muster.symlink_to(KIT)
    typed = [
        f"source '{muster}/{script}'",
        f"source '{muster}/{script}'",  # a second time changes nothing
        "muster sta\t--help",
        "muster status --sta\t--help",
        "muster stop train-\t2 --log-dir nowhere",
        "muster run data\t --lr 1",
        "exit",
    ]
    printed = on_terminal(command, "".join(f"{line}\r" for line in typed))
    assert printed.count("Usage: muster status [options] [RUN]") == 2, printed
    assert "muster stop: RUN 'train-2': no such run" in printed
    assert "script 'data.csv'" in printed


def on_terminal(command: list[str], keys: str) -> str:
    """Return what a command prints on a terminal that receives these keys."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        os.execvp(command[0], command)
    printed, end = b"", time.monotonic() + SECONDS
    os.write(terminal, keys.encode())
    try:
        while time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                printed += os.read(terminal, 65536)
    except OSError:  # the shell has exited
        pass
    os.close(terminal)
    os.waitpid(pid, 0)
    return printed.decode(errors="replace")
