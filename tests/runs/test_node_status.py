"""The status of a run on a node: only processes of this run, their ranks, and their last output.

These tests write the files of /proc and of the run directory, and a stub replaces nvidia-smi. status.bats tests real
runs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from distributed.host.replies import Reply
from distributed.host.stacks import Frame
from distributed.runs import node_status
from distributed.runs.node_status import RunProcess

RUN = "/x/my logs/train-1"


def process(
    proc: Path,
    pid: int,
    *,
    parent: int = 1,
    output: str = "",
    run: str = RUN,
    node: str = "n1",
    state: str = "S",
    ticks: int = 0,
) -> None:
    """Write the files of a process in /proc. output: the target of its standard output."""
    directory = proc / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "environ").write_bytes(f"A=1\0MUSTER_RUN_DIR={run}\0MUSTER_NODE={node}\0".encode())
    (directory / "status").write_text("Name:\ta\nUid:" + f"\t{os.geteuid()}" * 4 + "\n")
    (directory / "cmdline").write_bytes(b"python\0my script.py\0")
    fields = [state, parent, *[0] * 9, ticks, 0, *[0] * 4, 7, 0, 0, 0, 256]
    (directory / "stat").write_text(f"{pid} (a ) b) " + " ".join(map(str, fields)))
    (directory / "fd" / "1").symlink_to(output or "/dev/null")


def output_of(local_rank: int, node: str = "n1") -> str:
    return f"{RUN}/ranks/{node}/abc_def/attempt_0/{local_rank}/stdout.log"


def test_only_processes_of_this_run_on_this_node_are_found(tmp_path: Path) -> None:
    process(tmp_path, 10)
    process(tmp_path, 11, run=RUN + "2")
    process(tmp_path, 12, node="n10")
    (tmp_path / "13").mkdir()  # has just exited
    [found] = node_status.processes_of(RUN, "n1", tmp_path)
    size = 256 * os.sysconf("SC_PAGE_SIZE")
    assert found == RunProcess(10, 1, "S", "python my script.py", 0, size, 7, None)


def test_a_rank_is_identified_by_its_output_file_and_its_children_belong_to_it(tmp_path: Path) -> None:
    process(tmp_path, 10)  # the agent
    process(tmp_path, 20, parent=10, output=output_of(0))
    process(tmp_path, 9, parent=20, output=output_of(0))  # a child with a lower pid than its parent
    process(tmp_path, 30, parent=10, output=output_of(1))
    process(tmp_path, 31, parent=10, output=output_of(0, "n2"))  # of a rank on another node
    found = node_status.processes_by_rank(node_status.processes_of(RUN, "n1", tmp_path))
    assert {rank: [one.pid for one in processes] for rank, processes in found.items()} == {0: [20, 9], 1: [30]}


def test_a_rank_that_redirected_stdout_is_identified_by_stderr(tmp_path: Path) -> None:
    process(tmp_path, 20, output="/tmp/mine.log")
    (tmp_path / "20/fd/2").symlink_to(output_of(3).replace("stdout", "stderr"))
    assert list(node_status.processes_by_rank(node_status.processes_of(RUN, "n1", tmp_path))) == [3]


def test_a_rank_that_redirected_stdout_and_stderr_is_identified_by_its_environment(tmp_path: Path) -> None:
    process(tmp_path, 20, output="/tmp/mine.log")
    with (tmp_path / "20/environ").open("ab") as environ:
        environ.write(b"LOCAL_RANK=2\0")
    assert list(node_status.processes_by_rank(node_status.processes_of(RUN, "n1", tmp_path))) == [2]


def test_cpu_use_counts_only_processes_that_are_in_both_samples(tmp_path: Path) -> None:
    process(tmp_path / "a", 1, ticks=100)
    process(tmp_path / "b", 1, ticks=100 + node_status.TICK)
    process(tmp_path / "b", 2, ticks=5000)
    before, after = (node_status.processes_of(RUN, "n1", tmp_path / name) for name in "ab")
    assert node_status.cores_used(before, after, 2.0) == 0.5


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", ""),
        (b"one\ntwo\n\n", "two"),
        (b"one\ntwo, incomplete", "two, incomplete"),
        (b"10%\r20%\r30%\r", "30%"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07text\x07", "red text"),
        (b"gr\xfc\xc3\xbcn\n", "gr�ün"),
        (b"x" * 50_000 + b"\nlast", "last"),
    ],
)
def test_the_last_line_is_printable_and_not_empty(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "log").write_bytes(content)
    assert node_status.last_line(tmp_path / "log") == line


def test_the_last_output_is_that_of_the_newest_file(tmp_path: Path) -> None:
    for name, line, time in (("stdout.log", "step 1", 1000), ("stderr.log", "warning", 990)):
        (tmp_path / name).write_text(line)
        os.utime(tmp_path / name, (time, time))
    files = sorted(tmp_path.iterdir())
    assert node_status.last_output(files, 1012.0) == (12.0, "step 1")
    assert node_status.last_output(files, 900.0) == (0.0, "step 1"), "the clock of a file server may be ahead"
    assert node_status.last_output([], 0.0) == (None, "")


def test_output_files_are_taken_from_the_newest_attempt(tmp_path: Path) -> None:
    for attempt in (0, 2, 10):
        (tmp_path / f"ranks/n[1]/abc/attempt_{attempt}/0").mkdir(parents=True)
        (tmp_path / f"ranks/n[1]/abc/attempt_{attempt}/0/stdout.log").touch()
    [files] = node_status.output_files(tmp_path, "n[1]").values()
    assert [file.parent.parent.name for file in files] == ["attempt_10"]
    assert node_status.output_files(tmp_path, "n2") == {}


STUB_NVIDIA_SMI = """#!/bin/sh
case $* in
  *utilization.gpu*) echo "0, GPU-aa, 97, 412.37, 71000, 81920, NVIDIA H100"
    echo "1, GPU-bb, [N/A], [N/A], 10, 24576, NVIDIA T4" ;;
  *--query-compute-apps=gpu_uuid,pid*) echo "GPU-aa, 20" ;;
esac
"""


def test_entries_that_a_rank_adds_to_its_output_are_ignored(tmp_path: Path) -> None:
    output = tmp_path / "ranks/n1/x/attempt_3/0"
    output.mkdir(parents=True)
    (output / "stdout.log").touch()
    (output.parent / "\u00b2").mkdir()
    (tmp_path / "ranks/n1/x/attempt_foo").mkdir()
    (tmp_path / "ranks/n1/x/attempt_9").touch()
    assert node_status.output_files(tmp_path, "n1") == {0: [output / "stdout.log"]}


def test_a_rank_has_the_gpus_that_its_processes_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(STUB_NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    process(tmp_path / "proc", 20, output=output_of(0))
    [processes] = node_status.processes_by_rank(node_status.processes_of(RUN, "n1", tmp_path / "proc")).values()
    gpus, users, error = node_status.query_gpus()
    [gpu] = node_status.gpus_of(processes, gpus, users)
    assert (gpu.index, gpu.use, gpu.watts, error) == (0, 97, 412.37, "")
    assert (gpus["GPU-bb"].use, gpus["GPU-bb"].watts) == (None, 0.0)


@pytest.mark.parametrize("hanging", ["*", "*compute-apps*"])
def test_an_nvidia_smi_that_hangs_is_an_error_of_the_node_and_does_not_delay_its_reply(
    hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls together have one limit, here 0.5 s."""
    os.mkfifo(tmp_path / "never")
    stub = STUB_NVIDIA_SMI.replace("case $* in", f"case $* in {hanging}) read -r line <{tmp_path}/never ;;", 1)
    (tmp_path / "nvidia-smi").write_text(stub)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(node_status, "GPU_TIMEOUT", 0.5)
    start = monotonic()
    found = node_status.observe(str(tmp_path), "n1", count=1, first_rank=0, seconds=0.1, stacks=False)
    assert monotonic() - start < node_status.GPU_TIMEOUT + 1
    assert re.fullmatch(r"nvidia-smi: no reply within 0\.[345] s", found.gpu_error)
    assert [gpu.index for gpu in found.gpus] == ([] if hanging == "*" else [0, 1])


def frame(name: str, file: str, line: int) -> dict[str, object]:
    return {"name": name, "filename": file, "short_filename": file, "line": line}


def test_stacks_of_py_spy_are_cut_to_frames_of_the_script() -> None:
    below = [frame("_run", "/kit/distributed/agent/worker.py", 125), frame("main", "/py/fork.py", 274)]
    main = [frame("wait", "/x/a.py", 3), frame("<module>", "/x/my.py", 8), *below]
    dump = [
        {"os_thread_id": 21, "thread_name": "Loader", "active": True, "frames": [frame("get", "/py/queue.py", 1)]},
        {"os_thread_id": 20, "thread_name": "MainThread", "active": False, "frames": main},
    ]
    text, frames = node_status.parse_py_spy(20, json.dumps(dump)) or ("", ())
    assert text.splitlines() == [
        'Thread 20 (idle): "MainThread"',
        "    wait (x/a.py:3)",
        "    <module> (x/my.py:8)",
        'Thread 21 (active): "Loader"',
        "    get (py/queue.py:1)",
    ]
    assert frames == (Frame("/x/a.py", 3, "wait"), Frame("/x/my.py", 8, "<module>"))
    assert (
        node_status.parse_py_spy(20, "Error")
        is node_status.parse_py_spy(20, "[]")
        is node_status.parse_py_spy(20, "[{}]")
        is None
    )


def test_without_py_spy_a_rank_writes_its_own_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the rank writes no stack, the text shows where its threads wait in the kernel."""
    monkeypatch.setattr(node_status, "path_of_py_spy", lambda: None)
    me = RunProcess(os.getpid(), 1, "R", "", 0, 0, 1, 0)
    text, frames = node_status.read_stacks(me, str(tmp_path))
    assert f"main thread {os.getpid()} " in text and not frames
    assert "-m pip install py-spy" in text
    monkeypatch.setattr(node_status, "stack_of", lambda pid, output: (Frame("/x/my.py", pid, output),))
    text, frames = node_status.read_stacks(me, "f")
    assert text.splitlines()[:2] == ["main thread", f"    f (x/my.py:{os.getpid()})"]
    assert frames == (Frame("/x/my.py", os.getpid(), "f"),)
    assert node_status.read_stacks(replace(me, state="T"), "f")[1] == (), "a stopped rank cannot write its stack"


def test_the_status_of_a_node_survives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert node_status.main(["--run", RUN, "--node", "n1", "--count", "2", "--first-rank", "4"]) == 0
    found = Reply("n1", 0, capsys.readouterr().out, "").value(node_status.NodeStatus)
    assert [(rank.rank, rank.local_rank, rank.pid) for rank in found.ranks] == [(4, 0, None), (5, 1, None)]
