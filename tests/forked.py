"""Run functions in forked processes that have imported PyTorch: as ranks, or in one process that a test can kill.

The processes are forked from a server that has imported PyTorch. A fork of pytest would lack pytest's threads.
Functions must be at the top level of their module, to be picklable.
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
# The first fully_shard() imports torch._dynamo.
PRELOADED = ["pytest", "hypothesis", "torch", "torch._dynamo", "train", "distributed.smoke.collective_checks"]
_context.set_forkserver_preload(PRELOADED)


def ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `function(rank, size, *args)` returns on each rank of a gloo world. Raises the first error."""
    deadline = time.monotonic() + TIMEOUT
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        store = Path(directory, "store")
        started = [stack.enter_context(running(_as_rank, rank, size, store, function, args)) for rank in range(size)]
        results = [_receive(rank, pipe, deadline) for rank, (_, pipe) in enumerate(started)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@contextmanager
def running(function: Callable[..., Any], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that calls `function(pipe, *args)`; yield it and its pipe. Kill the process on exit."""
    parent_end, child_end = _context.Pipe()
    process = _context.Process(target=function, args=(child_end, *args))
    process.start()
    child_end.close()
    try:
        yield process, parent_end
    finally:
        process.kill()
        process.join()


def _receive(rank: int, pipe: Connection, deadline: float) -> Any:
    try:
        in_time = pipe.poll(max(0.0, deadline - time.monotonic()))
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
        result = function(rank, size, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(result))  # send() would share a tensor's memory, which this process releases
    except Exception:  # noqa: BLE001  # the test raises it
        pipe.send_bytes(pickle.dumps(AssertionError(f"rank {rank}:\n{traceback.format_exc()}")))


# ---------------------------------------------------------------- ranks as a launcher starts them


@dataclass(frozen=True)
class RankResult:
    """Output and exit code of a rank."""

    code: int | None  # -n after signal n; None while the rank runs
    out: str
    err: str


@dataclass(frozen=True)
class ForkedRun:
    """Started ranks and their output."""

    directory: Path  # contains the output files
    ranks: dict[int, BaseProcess]

    def results(self, *hanging: int) -> dict[int, RankResult]:
        """Wait for all ranks except the hanging ones. Returns the results of all ranks."""
        for rank, process in self.ranks.items():
            if rank not in hanging:
                process.join(150)
        return {
            rank: RankResult(process.exitcode, self.out(rank), self.err(rank)) for rank, process in self.ranks.items()
        }

    def out(self, rank: int = 0) -> str:
        """The standard output of a rank so far."""
        return Path(self.directory, f"{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        return Path(self.directory, f"{rank}.err").read_text()

    def wait_for(self, text: str) -> None:
        """Wait until rank 0 has printed this text."""
        deadline = time.monotonic() + TIMEOUT
        while text not in self.out():
            assert self.ranks[0].is_alive(), f"rank 0 exited without {text!r}: {self.out()}{self.err()}"
            assert time.monotonic() < deadline, f"no {text!r} in {TIMEOUT} s: {self.out()}{self.err()}"
            time.sleep(0.01)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in ranks or self.ranks:
            pid = self.ranks[rank].pid
            assert pid is not None
            os.kill(pid, number)


@contextmanager
def launched(
    size: int, function: Callable[..., None], *args: Any, only: Sequence[int] = (), env: Mapping[str, str] = NOTHING
) -> Iterator[ForkedRun]:
    """Start ranks that call `function(rank, *args)` in the working directory with the variables of torchrun.

    only: start only these ranks. Kills running ranks on exit.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        started = {}
        for rank in only or range(size):
            rank_env = {**_rank_environment(rank, size, port), **env}
            process = running(_as_launched, Path(directory), os.getcwd(), rank_env, function, args)
            started[rank], pipe = stack.enter_context(process)
            assert pipe.recv() == "ready"
        yield ForkedRun(Path(directory), started)


def _as_launched(
    pipe: Connection, output: Path, cwd: str, env: Mapping[str, str], function: Callable[..., None], args: Sequence[Any]
) -> None:
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(output / f"{env['RANK']}.{name}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(env)
    os.chdir(cwd)
    pipe.send("ready")
    function(int(env["RANK"]), *args)


def script(rank: int, name: str, *arguments: str) -> None:
    """For launched(): run `python NAME ARGUMENTS...` as Muster's agent does in a forked process."""
    import torch

    from distributed.agent.worker import Script, run_script

    torch.set_num_threads(1)
    sys.modules.pop("train", None)  # preloaded for its imports; run_script() imports Muster's modules anew
    run_script(Script(name, arguments, is_module=False, path=tuple(sys.path[1:])))


def _rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
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
