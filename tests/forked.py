"""Run things in processes that have PyTorch already: ranks of a world, a training, or one that is to be killed.

They are forked from a server that imported it once, and never from pytest itself, whose threads a fork would
lose. A function must stand at the top of its file.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds
NOTHING: Mapping[str, str] = {}

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first fully_shard() brings it.
_context.set_forkserver_preload(["pytest", "hypothesis", "torch", "torch._dynamo", "train", "distributed.smoke.checks"])


def ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, size, *args)` returns on each rank of a gloo world; an error there is one here."""
    end = time.monotonic() + TIMEOUT
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = Path(folder, "store")
        started = [stack.enter_context(running(_as_rank, rank, size, store, function, args)) for rank in range(size)]
        answers = [_answer(rank, pipe, end) for rank, (_, pipe) in enumerate(started)]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@contextmanager
def running(function: Callable[..., Any], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that calls `function(pipe, *args)`, and our end of the pipe; killed when the block is left."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=function, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def _answer(rank: int, pipe: Connection, end: float) -> Any:
    try:
        in_time = pipe.poll(max(0.0, end - time.monotonic()))
        return pickle.loads(pipe.recv_bytes()) if in_time else AssertionError(f"rank {rank} hangs")
    except EOFError:
        return AssertionError(f"rank {rank} died")


def _as_rank(
    pipe: Connection, rank: int, size: int, store: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        answer = function(rank, size, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))  # send() would lend a tensor's memory, which goes with us
    except Exception:  # noqa: BLE001  # whatever it is, it is the test's to raise
        pipe.send_bytes(pickle.dumps(AssertionError(f"rank {rank}:\n{traceback.format_exc()}")))


# ---------------------------------------------------------------- ranks as a launcher starts them


@dataclass(frozen=True)
class RankResult:
    """What one rank said, and how it ended."""

    code: int | None  # -n for a signal
    out: str
    err: str


@dataclass(frozen=True)
class ForkedRun:
    """Ranks that have been started, and what they say."""

    folder: Path
    ranks: dict[int, BaseProcess]

    def results(self, *but: int) -> dict[int, RankResult]:
        """What all have said; waits for them, but for those that are known never to end."""
        for rank, process in self.ranks.items():
            if rank not in but:
                process.join(150)
        return {
            rank: RankResult(process.exitcode, self.out(rank), self.err(rank)) for rank, process in self.ranks.items()
        }

    def out(self, rank: int = 0) -> str:
        """What a rank has said up to now."""
        return Path(self.folder, f"{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        return Path(self.folder, f"{rank}.err").read_text()

    def wait_for(self, text: str) -> None:
        """Until rank 0 has said that."""
        end = time.monotonic() + TIMEOUT
        while text not in self.out():
            assert self.ranks[0].is_alive(), f"it ended without {text!r}: {self.out()}{self.err()}"
            assert time.monotonic() < end, f"no {text!r} in {TIMEOUT} s: {self.out()}{self.err()}"
            time.sleep(0.01)

    def signal(self, number: int, *some: int) -> None:
        """Send it to these ranks, or to all."""
        for rank in some or self.ranks:
            pid = self.ranks[rank].pid
            assert pid is not None
            os.kill(pid, number)


@contextmanager
def launched(
    size: int, function: Callable[..., None], *args: Any, only: Sequence[int] = (), env: Mapping[str, str] = NOTHING
) -> Iterator[ForkedRun]:
    """Ranks (only these, or all) that call `function(rank, *args)`, in this working folder and with the environment
    that torchrun would give them on one machine. Those that still run are killed when the block is left."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started = {}
        for rank in only or range(size):
            place = {**_place(rank, size, port), **env}
            begun = running(_as_launched, Path(folder), os.getcwd(), place, function, args)
            started[rank], pipe = stack.enter_context(begun)
            assert pipe.recv() == "ready"
        yield ForkedRun(Path(folder), started)


def _as_launched(
    pipe: Connection, folder: Path, cwd: str, env: Mapping[str, str], function: Callable[..., None], args: Sequence[Any]
) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{env['RANK']}.{name}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(env)
    os.chdir(cwd)
    pipe.send("ready")
    function(int(env["RANK"]), *args)


def script(rank: int, name: str, *words: str) -> None:
    """For launched(): be `python NAME WORDS...`, as the kit's agent makes it of a warm process."""
    import torch

    from distributed.agent.worker import Script, run_script

    torch.set_num_threads(1)
    run_script(Script(name, words, is_module=False, path=tuple(sys.path[1:])))


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MUSTER_NODE": f"host{rank}",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
