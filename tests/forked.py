"""Run a function in processes that have PyTorch already: ranks of a world, or one that is to be killed.

They are forked from a server that imported it once, and never from pytest itself, whose threads a fork would
lose. The function must stand at the top of its file.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first fully_shard() brings it.
_context.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "distributed.checkpoint", "distributed.shards"])


def ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, size, *args)` returns on each rank of a gloo world; an error there is one here."""
    end = time.monotonic() + PATIENCE
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
    process = _context.Process(target=function, args=(theirs, *args), daemon=True)
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
