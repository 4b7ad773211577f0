"""Programs that the dispatcher runs, such as ssh, rsync and sbatch."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence

from distributed.jobs.host import host_attempt
from distributed.jobs.schedule.backend import Unreachable
from distributed.trust import MAX_TEXT


async def run_program(
    command: Sequence[str], data: bytes = b"", env: Mapping[str, str] | None = None, seconds: float | None = None
) -> tuple[int, str, str]:
    """Run a command with this standard input; return (exit code, standard output, standard error).

    Raises Unreachable if it does not exit within `seconds`.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
    except ValueError as error:  # a path of a server has a NUL, or is no valid text
        raise OSError(errno.EINVAL, f"{command[0]}: {error}") from None
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(data)
    process.stdin.close()
    ended = asyncio.gather(read_output(process.stdout), read_output(process.stderr), process.wait())
    try:
        out, err, code = await asyncio.wait_for(ended, seconds)
    except ValueError as error:
        raise Unreachable(f"{command[0]}: {error}") from None
    except asyncio.TimeoutError:
        _kill_group(process)
        with contextlib.suppress(asyncio.TimeoutError):  # a child of it has the pipes
            await asyncio.wait_for(process.communicate(), 1.0)  # closes the pipes
        raise Unreachable(f"{command[0]}: no reply within {seconds:.0f} s") from None
    finally:  # also if the task was cancelled
        _kill_group(process)
    return code, out.decode(errors="replace"), err.decode(errors="replace")


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a process that has not exited, which leads a process group, with its children, such as ssh of rsync."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def read_output(stream: asyncio.StreamReader) -> bytes:
    """The output of a command. Raises ValueError if it is longer than MAX_TEXT."""
    output = bytearray()
    while block := await stream.read(1 << 18):
        output += block
        if len(output) > MAX_TEXT:
            raise ValueError(f"prints more than {MAX_TEXT >> 20} MiB")
    return bytes(output)


async def read_tail(stream: asyncio.StreamReader | None) -> str:
    """The last 8 KiB of a stream."""
    assert stream
    text = b""
    while block := await stream.read(1 << 16):
        text = (text + block)[-8192:]
    return text.decode(errors="replace").strip()


def last_line(text: str) -> str:
    return text.splitlines()[-1][: host_attempt.MAX_TEXT] if text else ""
