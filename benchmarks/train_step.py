"""How much longer is a step of train.py than one of a hand-written DDP loop for the same model?

Both train the same GPT in one run of two processes, and alternate every few steps. On a machine without GPUs, they use
the CPUs and gloo.
train.py runs its whole loop: schedule, accumulation, clipping, exchange of loss and stop requests, progress lines. The
hand-written loop is that of a tutorial: forward, backward, clip, step. It runs when train.py requests its next batch.

    python benchmarks/train_step.py [--repetitions 12] [--steps 10] [--nproc 2] [--config FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parents[1]
sys.path[0] = str(KIT)  # benchmarks/ comes first otherwise

import torch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import train  # noqa: E402
from distributed.torch import device, process_group  # noqa: E402
from distributed.training import data  # noqa: E402
from distributed.training.dataset import TrainingData  # noqa: E402
from distributed.training.model import GPT  # noqa: E402
from distributed.training.settings import Data, Settings, batch, read  # noqa: E402
from distributed.world import World  # noqa: E402

QUIET = ("train.evaluate_every=0", "checkpoint.every=0", "logging.level=warning", "train.steps=1000000")


class Measured(Exception):
    """Raised after the last repetition to stop train.py."""


def by_hand(settings: Settings, world: World) -> Callable[[], None]:
    """Return a function that does one step of a tutorial's loop."""
    own_device, corpus = device(world), data.load(Data())
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(settings.model, corpus.vocab_size).to(own_device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    windows = data.Windows(corpus.train, settings.model.block_size)
    batch_size = batch(settings, world.size).micro
    generator = torch.Generator().manual_seed(world.rank)

    def step() -> None:
        inputs, targets = windows[torch.randint(len(windows), (batch_size,), generator=generator)]
        loss = model(inputs.to(own_device), targets.to(own_device)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def synchronized_time() -> float:
    """Wait for the device. Returns the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace) -> None:
    """Run the repetitions in this rank; rank 0 prints."""
    settings = read(options.config, [*QUIET, *options.overrides])
    times: dict[str, list[float]] = {"by hand": [], "train.py": []}
    with process_group() as world:
        step = by_hand(settings, world)
        global_batch, batches = batch(settings, world.size), TrainingData.batches

        def interleaved(self: TrainingData, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """Yield train.py's batches; run a repetition of the hand-written loop before each of train.py."""
            source = batches(self, *args, **kwargs)
            for repetition in range(options.repetitions + 1):
                start = synchronized_time()
                for _ in range(options.steps):
                    step()
                by_hand_seconds = synchronized_time() - start
                start = synchronized_time()
                for _ in range(options.steps * global_batch.accumulation):
                    yield next(source)  # train.py requests the next batch after the step
                train_seconds = synchronized_time() - start
                if repetition:  # the first repetition warms up
                    times["by hand"].append(by_hand_seconds / options.steps)
                    times["train.py"].append(train_seconds / options.steps)
            raise Measured

        TrainingData.batches = interleaved  # type: ignore[method-assign]
        with contextlib.suppress(Measured):
            train.train(settings, {}, world, global_batch, threading.Event())
        if world.rank == 0:
            ratios = [own / peer for own, peer in zip(times["train.py"], times["by hand"], strict=True)]
            for name, seconds in times.items():
                print(f"{name:9} {statistics.median(seconds) * 1000:8.2f} ms per step")
            print(f"ratio     {statistics.median(ratios):8.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> int:
    """Start the ranks; in a rank, measure."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repetitions", type=int, default=12, help="number of measured repetitions")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--config", type=Path, default=KIT / "config/quickstart.yaml")
    options.add_argument("--nproc", type=int, default=2)
    options.add_argument("overrides", nargs="*")
    arguments = options.parse_intermixed_args()
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    with tempfile.TemporaryDirectory() as run:
        agent = [str(KIT / "scripts/lib/agent.py"), "--standalone", "--nproc-per-node", str(arguments.nproc), "--"]
        command = [str(Path(__file__).resolve()), *sys.argv[1:], f"checkpoint.dir={run}/checkpoints"]
        env = {**os.environ, "MUSTER_OUTPUT_DIR": run}
        return subprocess.run([sys.executable, *agent, *command], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
