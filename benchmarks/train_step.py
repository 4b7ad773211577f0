"""How much time does train.py add to a step of a hand-written DDP loop of the same model?

Both train the same GPT with two processes on CPU and gloo, in turns of some steps each, in one run. train.py's turns
are its real loop: schedule, accumulation, clipping, the vote on loss and stop, progress lines. The loop by hand is
what a tutorial shows: forward, backward, clip, step.

    python benchmarks/train_step.py [--turns 12] [--steps 10] [--config FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
sys.path[0] = str(KIT)  # benchmarks/ comes first otherwise

import torch  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import train  # noqa: E402
from distributed.checkpoint.checkpoints import Checkpoints  # noqa: E402
from distributed.config import batch, read  # noqa: E402
from distributed.torch import device, process_group  # noqa: E402
from distributed.training import data  # noqa: E402

QUIET = ("train.evaluate_every=0", "checkpoint.every=0", "logging.level=warning", "train.steps=1000000")


def by_hand(settings: train.Settings, world: train.World, corpus: data.Corpus) -> Callable[[], None]:
    """One step as a tutorial shows it."""
    here = device(world)
    torch.manual_seed(0)
    model = DistributedDataParallel(train.GPT(settings.model, corpus.vocab_size or 256).to(here))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    windows = data.Windows(corpus.train, settings.model.block_size)
    share = batch(settings, world.size).micro
    draw = torch.Generator().manual_seed(world.rank)

    def step() -> None:
        inputs, targets = windows.batch(torch.randint(len(windows), (share,), generator=draw))
        loss = model(inputs.to(here), targets.to(here)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def by_train(settings: train.Settings, world: train.World, corpus: data.Corpus, run: Path) -> Callable[[], None]:
    """One step of train.py's own loop."""
    place = train.Place(world, device(world), ["here"] * world.size, run, threading.Event())
    training = train.Training(settings, batch(settings, world.size), place, corpus)
    batches, progress = training.batches(), train.Progress(training, None)
    checkpoints = Checkpoints(run / "checkpoints", rank=world.rank, size=world.size)
    return lambda: bool(train.advance(training, batches, checkpoints, progress)) and None


def turn(step: Callable[[], None], steps: int) -> float:
    """Seconds a step."""
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def measure(options: argparse.Namespace) -> None:
    """Run the turns in this rank; rank 0 prints."""
    settings = read(options.config, [*QUIET, *options.overrides])
    with process_group() as world:
        corpus = data.load()
        sides = {
            "by hand": by_hand(settings, world, corpus),
            "train.py": by_train(settings, world, corpus, Path(options.run)),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.turns + 1):
            for name in sides if number % 2 else reversed(sides):
                seconds = turn(sides[name], options.steps)
                if number:  # the first turn warms up
                    times[name].append(seconds)
        if world.rank == 0:
            ratios = [ours / theirs for ours, theirs in zip(times["train.py"], times["by hand"], strict=True)]
            for name, seconds in times.items():
                print(f"{name:9} {statistics.median(seconds) * 1000:8.2f} ms a step")
            print(f"ratio     {statistics.median(ratios):8.3f}  ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> int:
    """Start the ranks, or be one."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--config", type=Path, default=KIT / "config/quickstart.yaml")
    options.add_argument("--nproc", type=int, default=2)
    options.add_argument("--run", help=argparse.SUPPRESS)
    options.add_argument("overrides", nargs="*")
    given = options.parse_intermixed_args()
    if "RANK" in os.environ:
        measure(given)
        return 0
    import tempfile

    with tempfile.TemporaryDirectory() as run:
        agent = [str(KIT / "scripts/lib/agent.py"), "--standalone", "--nproc-per-node", str(given.nproc), "--"]
        words = [str(Path(__file__).resolve()), *sys.argv[1:], "--run", run]
        return subprocess.run([sys.executable, *agent, *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
