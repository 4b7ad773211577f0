"""Each printed output in the guides has the lines that its command prints today.

Each test runs the command, or causes the event of the text before the output, and compares line by line. Only what
differs from run to run may differ: names of machines and runs, paths, process ids, ports, measured values.
tests/test_docs.py compares the outputs of dry runs, wrong calls and the helper of two-phase lists;
tests/test_guide_on_nodes.py those that need nodes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from test_cluster import cluster, node, text_of
from test_docs import KIT, RUN, Command, blocks, call, every_command

# Text that may differ between a guide and an output. `...` in a guide stands for any text.
VARYING = (
    r"\.\.\.|\d{8}-\d{6}-[0-9a-f]{4}|(?<=pid )\d+|(?<=pair\.cc:)\d+|(?<=\]:)\d+|(?<=step_)\d{8}"
    r"|\b[0-9a-f]{10}\b|\d+\.\d+ MB|\d{4}-\d\d-\d\dT[\d:+]+|(?<=no output for )\d+|(?<=--hang-timeout )\d+"
)


def not_printed(transcript: Iterable[str], output: str) -> list[str]:
    """Return the lines of a transcript that are not in the output."""
    return [
        line
        for line in transcript
        if not re.search(rf"^{'.*'.join(map(re.escape, re.split(VARYING, line)))}$", output, re.MULTILINE)
    ]


def output_with(text: str) -> list[str]:
    """Return the only output without a command in LAUNCH_GUIDE.md that contains the text."""
    found = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "console") if text in "\n".join(lines)]
    [lines] = [lines for lines in found if not lines[0].startswith("$ ")]
    return lines


def commands_with(text: str) -> list[Command]:
    return [one for one in every_command(*RUN) if text in "\n".join(one.output)]


def as_on_node1(done: subprocess.CompletedProcess[str], project: Path) -> str:
    """Return what the command printed, with the names of the guide for this machine and the project."""
    printed = (done.stdout + done.stderr).replace(str(project), "/home/ada/project")
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "node1", printed)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("scripts", "config", "train.py"):
        (tmp_path / name).symlink_to(KIT / name)
    return tmp_path


def test_a_changed_line_is_found() -> None:
    printed = "one 1\nverdict: failed: rank 1 (pid 7)\n"
    assert not_printed(["verdict: failed: rank 1 (pid 99)", "one ..."], printed) == []
    assert not_printed(["verdict: failed: rank 2 (pid 99)"], printed) == ["verdict: failed: rank 2 (pid 99)"]


# In line 9, as in the guides.
FAILING = """\
import os

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 9):
    dist.barrier()
    if os.environ["RANK"] == "1" and step == 5:
        raise ValueError(f"bad sample at step {step}")
"""


@pytest.mark.slow
def test_a_failed_run(project: Path) -> None:
    (project / "my_train.py").write_text(FAILING)
    shown = {one.file: one for one in every_command(*RUN) if "bad sample" in "".join(one.output)}
    assert set(shown) == set(RUN)
    assert len({one.text for one in shown.values()}) == 1
    done = call(project, shown["LAUNCH_GUIDE.md"].words)
    assert done.returncode == shown["LAUNCH_GUIDE.md"].exit_code
    printed = as_on_node1(done, project)
    assert not [line for one in shown.values() for line in not_printed(one.output, printed)], printed


# In line 12, as in the guide.
HANGING = """\
import os
import time

import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        # Such as a lock that is never released.
        time.sleep(600)
    dist.barrier()


main()
"""


@pytest.mark.slow
def test_the_verdict_of_a_hang(project: Path) -> None:
    (project / "my_train.py").write_text(HANGING)
    launch = "scripts/ssh/launch_singlenode.sh --hang-timeout 3 --script my_train.py - 2"
    done = call(project, launch.split())
    assert done.returncode == 124
    printed = as_on_node1(done, project)
    assert not not_printed(output_with("verdict: failed: hung"), printed), printed


@pytest.mark.slow
def test_stop_resume_and_the_list_of_checkpoints(project: Path) -> None:
    stopped, resumed = commands_with("run the same command again to resume") + commands_with("\nresuming from")
    assert stopped.words == resumed.words
    with subprocess.Popen(
        [*stopped.words, "--", "train.steps=1000000"], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""},
    ) as running:  # fmt: skip
        assert running.stdout
        before = []
        for line in running.stdout:
            before.append(line)
            if line.startswith("step "):
                break
        running.terminate()  # as Ctrl-C, which a test that runs in the background cannot send
        printed = "".join(before) + running.stdout.read()
    assert running.returncode == stopped.exit_code == 75, printed
    assert not not_printed(stopped.output, printed), printed
    [step] = (path.name for path in project.glob("checkpoints/quickstart/step_*"))
    last = f"train.steps={int(step.removeprefix('step_')) + 1}"
    done = call(project, [*resumed.words, "--", last, "train.evaluate_windows=8", "logging.sample=0"])
    printed = as_on_node1(done, project)
    assert done.returncode == 0, printed
    assert not not_printed(resumed.output, printed), printed
    [listing] = commands_with("  good")
    done = call(project, listing.words, PYTHONPATH=str(KIT))
    assert done.returncode == 0
    assert not not_printed(listing.output, done.stdout), done.stdout


def test_a_plan_of_a_job_list(project: Path) -> None:
    plans = [one for one in every_command("LAUNCH_GUIDE.md") if "--plan" in one.words and one.output]
    assert plans
    for one in plans:
        done = call(project, one.words)
        assert not not_printed(one.output, done.stdout), done.stdout


@pytest.mark.slow
def test_the_end_of_a_job_list_with_a_failed_job(project: Path) -> None:
    """Eight jobs train for one step; the data of the ninth do not exist."""
    job = {"prefix": "small", "model": "small", "steps": 1, "batch_size": 1}
    jobs = [job | {"prefix": f"small{number}", "fold": 0} for number in range(8)]
    (project / "jobs.json").write_text(json.dumps([*jobs, job | {"fold": 4, "data_path": "missing"}]))
    program = "scripts/jobs/run_distributed_training.py"
    run = ["--backend", "local", "--slots", "2", "--no-tmux", "--jobs-config", "jobs.json"]
    done = call(project, [sys.executable, program, *run])
    assert done.returncode == 1
    assert not not_printed(output_with("8 of 9 done, 1 failed"), done.stdout), done.stdout


def test_a_finding_of_the_doctor() -> None:
    """Facts of three nodes made by hand: one machine has no second version of PyTorch."""
    nodes = {f"node{number}": node(number) for number in (1, 2)} | {"node3": node(3, torch__version="2.12.0")}
    printed = text_of(cluster(nodes))
    assert "\n".join(output_with("2.12.0, but 2.13.0")) in printed, printed


def test_every_output_of_the_guides_is_compared() -> None:
    """An output added to the guides needs a test, and here some words of it."""
    compared = {
        "bad sample", "verdict: failed: hung", "resuming from", "good", "where    id", "8 of 9 done",
        "2.12.0, but", "nod2: cannot be reached", "looks hung: rank 2 on node2", "leaks", "two base models",
        "unknown key; did you mean", "scripts/lib/agent.py",
        "it is not stopped automatically",  # tests/launch_singlenode.bats
    }  # fmt: skip
    for name in ("README.md", "LAUNCH_GUIDE.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        for line, lines in blocks(name, "console", "text", ""):
            text = "\n".join(lines)
            assert any(words in text for words in compared), f"{name}:{line}: this output is compared by no test"
