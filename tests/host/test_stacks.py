"""A rank's stack can be read without a debugger and without side effects.

The signal that requests a stack would kill a process without a handler. In a process that has closed the file for the
stack, the handler could write into another file. Processes of both kinds are not signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest

from distributed.host import stacks
from distributed.host.stacks import Frame
from distributed.verdict.hang_analysis import COLLECTIVE

KIT = Path(__file__).resolve().parents[2]
WAITS = """
import sys, time
def wait():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""
REGISTERS = "from distributed.host import stacks\nstacks.register(sys.argv[1])\n"


@contextmanager
def running(body: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this body; killed when the block is left."""
    command = [sys.executable, "-c", WAITS + body, str(directory)]
    with subprocess.Popen(command, cwd=KIT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_stack_of_a_registered_rank_can_be_read_repeatedly(tmp_path: Path) -> None:
    with running(REGISTERS + "wait()", tmp_path) as process:
        for _ in range(2):
            inner, outer = stacks.stack_of(process.pid, str(tmp_path))
            assert (inner.function, outer.function, outer.file) == ("wait", "<module>", "<string>")
        assert process.poll() is None


def test_a_call_into_c_is_shown_by_its_source_line(tmp_path: Path) -> None:
    """Such a call has no frame of its own: loss.item() is visible only in the source line of the caller."""
    lines = ["import time", "def step():", "    print('ready', flush=True)", "    time.sleep(1000)"]
    (tmp_path / "own.py").write_text("\n".join(lines))
    with running(REGISTERS + "sys.path.insert(0, sys.argv[1])\nimport own\nown.step()", tmp_path) as process:
        end, code = time.monotonic() + 30, ""
        while code != "time.sleep(1000)":  # the process may not have returned from print() yet
            assert time.monotonic() < end, code
            inner, outer = stacks.with_code(stacks.stack_of(process.pid, str(tmp_path)))
            code = inner.code
        assert (inner.function, outer.function, outer.code) == ("step", "<module>", "")
    assert stacks.with_code(()) == ()
    assert stacks.with_code([Frame("/no/such/file.py", 3, "f")]) == (Frame("/no/such/file.py", 3, "f"),)


def test_the_file_of_stacks_is_truncated_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_FILE_BYTES", 10)
    with running(REGISTERS + "wait()", tmp_path) as process:
        sizes = []
        for _ in range(3):
            stacks.stack_of(process.pid, str(tmp_path))
            sizes.append(Path(tmp_path, stacks.FILE).stat().st_size)
    assert sizes[0] == sizes[1] == sizes[2] > 10


def test_an_unregistered_process_is_not_signalled(tmp_path: Path) -> None:
    Path(tmp_path, stacks.FILE).touch()
    with running("wait()", tmp_path) as process:
        assert stacks.stack_of(process.pid, str(tmp_path)) == ()
        assert process.poll() is None


def test_a_process_that_has_closed_the_file_is_not_signalled(tmp_path: Path) -> None:
    closes = "import os\nos.closerange(3, 1024)\nmine = open(sys.argv[1] + '/mine', 'w')\n"
    with running(
        REGISTERS + closes + "os.dup2(mine.fileno(), stacks.MIN_FILE_DESCRIPTOR)\nwait()", tmp_path
    ) as process:
        assert stacks.stack_of(process.pid, str(tmp_path)) == ()
    assert Path(tmp_path, "mine").read_text() == ""


def test_reading_the_stack_of_a_stopped_process_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "STACK_TIMEOUT", 0.1)
    with running(REGISTERS + "wait()", tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert stacks.stack_of(process.pid, str(tmp_path)) == ()


def wait_for_the_other(rank: int, size: int, directory: str) -> None:
    """Rank 1 joins a collective as soon as the stack of rank 0 shows that rank 0 waits in this collective."""
    import torch
    import torch.distributed as dist

    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(1)),
        dist.barrier,
        lambda: dist.broadcast_object_list([1]),
    ]
    for number, call in enumerate(calls):
        if rank == 0:
            stacks.register(directory)
            Path(directory, f"{number} {os.getpid()}").touch()
        else:
            while not (pids := list(Path(directory).glob(f"{number} *"))):
                time.sleep(0.01)
            pid = int(pids[0].name.split()[1])
            while not (frames := stacks.stack_of(pid, directory)) or not COLLECTIVE.fullmatch(frames[0].file):
                time.sleep(0.01)
        call()


def test_the_stack_of_a_rank_in_a_collective_shows_the_collective(tmp_path: Path) -> None:
    forked.ranks(2, wait_for_the_other, str(tmp_path))


A = '  File "/x/a b.py", line 3 in f\n'
B = '  File "/x/b.py", line 4 in <module>\n'
AGENT_FRAMES = '  File "/kit/distributed/agent/worker.py", line 5 in _run\n  File "/kit/agent.py", line 6 in <module>\n'
FIRST, SECOND = Frame("/x/a b.py", 3, "f"), Frame("/x/b.py", 4, "<module>")


@pytest.mark.parametrize(
    ("dump", "frames"),
    [
        ("", ()),
        (f"Stack (most recent call first):\n{A}{B}", (FIRST, SECOND)),
        (f"Stack (most recent call first):\n{A}{B}{AGENT_FRAMES}", (FIRST, SECOND)),
        (f"{B}Stack (most recent call first):\n{A}Stack (most recent call first):\n{B}", (FIRST,)),
        (f'Stack (most recent call first):\n{A}  File "/x/b.p', (FIRST,)),
        (f"Current thread 0x00007f (most recent call first):\n{A}  ...\n", (FIRST,)),
        ("Stack (most recent call first):\n  <no Python frame>\n", ()),
    ],
)
def test_output_of_faulthandler_is_parsed(dump: str, frames: tuple[Frame, ...]) -> None:
    assert stacks.parse_frames(dump) == frames


def test_frames_are_formatted_like_a_traceback_of_python() -> None:
    assert stacks.format_traceback((FIRST, SECOND)).splitlines()[1:] == [
        '  File "/x/b.py", line 4, in <module>',
        '  File "/x/a b.py", line 3, in f',
    ]
    assert stacks.format_traceback(()) == ""
