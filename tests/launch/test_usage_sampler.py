"""The resource usage of ranks is sampled into a file of limited size.

Tests the content of a sample, the merging of samples, and that the sampler and a hanging nvidia-smi end with the
supervisor, whichever process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from test_node_status import STUB_NVIDIA_SMI, output_of, process
from test_supervisor import TIMEOUT, SupervisedRun, kill, run, wait_until

from distributed.host import process_scan
from distributed.launch import usage_sampler
from distributed.runs import node_status

__all__ = ["run"]

RANK = 'mkdir -p "$MUSTER_RUN_DIR/ranks/n1/x/attempt_0/1"; exec >"$MUSTER_RUN_DIR/ranks/n1/x/attempt_0/1/stdout.log"'
SCRIPT = f"echo ready; ({RANK}; echo hello; sleep 300; :) & wait"


def test_a_sample_includes_the_children_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, directory = tmp_path / "proc", tmp_path / "run"
    process(proc, 10)  # the agent
    process(proc, 20, parent=10, output=output_of(0), ticks=100)
    process(proc, 21, parent=20, output=output_of(0), ticks=20)
    process(proc, 30, parent=10, output=output_of(1), ticks=7)
    fields = (proc / "20/stat").read_text().split()
    fields[17:19] = ["3", "4"]  # CPU time of exited children; split() makes three fields of the name "(a ) b)"
    (proc / "20/stat").write_text(" ".join(fields))
    monkeypatch.setattr(node_status, "output_files", lambda run, node: {0: [directory, directory / "none"]})
    directory.mkdir()
    found = usage_sampler.take_sample("/x/my logs/train-1", "n1", gpus=False, proc=proc)["ranks"]
    page = os.sysconf("SC_PAGE_SIZE")
    assert found == {
        "0": {"cpu": 127 / node_status.TICK, "memory": 512 * page, "output": directory.stat().st_size},
        "1": {"cpu": 7 / node_status.TICK, "memory": 256 * page, "output": 0},
    }


def test_a_gpu_lists_the_ranks_that_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tmp_path / "proc", 20, output=output_of(0))
    process(tmp_path / "proc", 30, output=output_of(1))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(STUB_NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = usage_sampler.take_sample("/x/my logs/train-1", "n1", gpus=True, proc=tmp_path / "proc")["gpus"]
    assert found["0"] == {"use": 97, "memory": 71000 * 2**20, "ranks": [0]}
    assert found["1"] == {"use": None, "memory": 10 * 2**20, "ranks": []}


def test_merged_pairs_of_samples_keep_the_gpus() -> None:
    gpus = {"0": {"use": 97}}
    samples = [{"time": n, "gpus": gpus} if n in (2, 5) else {"time": n} for n in range(8)]
    assert usage_sampler.merge_pairs(samples) == [
        {"time": 1},
        {"time": 3, "gpus": gpus},
        {"time": 5, "gpus": gpus},
        {"time": 7},
    ]


def test_the_number_of_samples_in_a_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts = [0.0], []

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        file = tmp_path / "node_n1.samples.jsonl"
        counts.append(len(file.read_text().splitlines()) if file.exists() else 0)
        if clock[0] > 100:
            raise TimeoutError

    monkeypatch.setattr(usage_sampler, "MAX_SAMPLES", 10)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(usage_sampler, "take_sample", lambda run, node, gpus: {"time": clock[0], "ranks": {"0": {}}})
    with pytest.raises(TimeoutError):
        usage_sampler.record(str(tmp_path), "n1", str(tmp_path / "node_n1.samples.jsonl"))
    times = [json.loads(line)["time"] for line in (tmp_path / "node_n1.samples.jsonl").read_text().splitlines()]
    assert max(counts) == 9 and len(times) >= 4
    assert times[0] < 20 and times[-1] > 80 and times == sorted(times)


@pytest.mark.parametrize("killed", ["command", "supervisor", "none"])
def test_no_sampler_remains_whichever_process_is_killed(run: SupervisedRun, tmp_path: Path, killed: str) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho $$ $PPID >{tmp_path}/smi; sleep 300 & wait\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    started = run.start(SCRIPT, "--sample-usage", env=os.environ | {"PATH": path})
    wait_until(lambda: (tmp_path / "smi").exists() and (tmp_path / "smi").read_text())
    pids = list(map(int, (tmp_path / "smi").read_text().split()))
    assert os.getpgid(pids[0]) == pids[1], "both are in the process group that is killed"
    if killed == "none":
        run.control.write(b"stop\n")
    else:
        kill(run.pid(killed))
    wait_until(lambda: run.code is not None)
    started.wait(TIMEOUT)
    wait_until(lambda: not any((found := process_scan.process(pid)) and found.alive for pid in pids))


def test_samples_are_written_while_the_command_runs(run: SupervisedRun) -> None:
    run.start(SCRIPT, "--sample-usage")
    file = Path(run.files.directory, "node_n1.samples.jsonl")
    wait_until(lambda: file.exists() and file.read_text().count("\n") > 1)
    first, second = (json.loads(line) for line in file.read_text().splitlines()[:2])
    assert first["time"] < second["time"]
    assert first["ranks"]["1"]["output"] == len("hello\n") and first["ranks"]["1"]["memory"] > 0
    assert first["log"] == os.path.getsize(run.files.log) > 0
    os.kill(run.pid("supervisor"), signal.SIGTERM)
