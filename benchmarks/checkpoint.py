"""How long does saving a checkpoint stop the training?

Compares Checkpoints.save() with torch.save of the same state to the same directory: alternating, medians. The state is
that of a model and its AdamW, three numbers per parameter. Both write a new file and then remove the previous one, so
that one exists at every moment. sync(2) runs before each measurement; the first saves, which allocate memory, are
discarded.

Expected: torch.save computes a CRC-32 and copies to the page cache with one thread. save() copies the state once in
memory, which takes a tenth to a fifth as long on 2 cores. With until=optimizer, it copies while the next gradients are
computed; the time is then that of save() plus the wait of the optimizer's step. The background write slows concurrent
steps by about its own CPU time when all cores compute.

    python -m benchmarks.checkpoint [--parameters 25] [--turns 15] [--folder FOLDER]

Exit code 1 when saving as train.py does stops the training for more than a tenth of torch.save.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from distributed.checkpoint.checkpoints import Checkpoints
from distributed.checkpoint.directory import final_path

TARGET = 0.1
WARM_UP = 2  # turns: the first save of each allocates
WIDTH = 512


def main() -> int:
    parser = argparse.ArgumentParser(description="How long does saving a checkpoint stop the training?")
    parser.add_argument("--parameters", type=float, default=25, help="of the model, in millions")
    parser.add_argument("--turns", type=int, default=15, help="timings of each")
    parser.add_argument("--folder", type=Path, help="a folder on the disk in question (default: a temporary one)")
    said = parser.parse_args()
    training = Training(said.parameters * 1e6)
    with tempfile.TemporaryDirectory(dir=said.folder) as folder:
        print(f"{training.bytes / 1e6:.0f} MB of state, {torch.get_num_threads()} threads, {folder}")
        with Checkpoints(Path(folder, "ours"), keep=1) as checkpoints:
            ratio = stops(training, checkpoints, Path(folder), said.turns)
            slows(training, checkpoints)
    return 0 if ratio <= TARGET else 1


class Training:
    """A model and an optimizer."""

    def __init__(self, parameters: float) -> None:
        layers = max(1, round(parameters / (8 * WIDTH**2)))
        widths = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * layers
        self.model = nn.Sequential(*(nn.Linear(*pair) for pair in widths))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.inputs = torch.randn(64, WIDTH)
        self.step()
        self.bytes = sum(12 * parameter.numel() for parameter in self.model.parameters())

    def step(self) -> float:
        """Do a training step. Returns the seconds that the optimizer's step waited for the copy."""
        self.model(self.inputs).square().mean().backward()
        before = time.perf_counter()
        begun: list[float] = []
        begins = self.optimizer.register_step_pre_hook(lambda *_: begun.append(time.perf_counter()))
        self.optimizer.step()
        begins.remove()
        self.optimizer.zero_grad()
        return begun[0] - before

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def stops(training: Training, checkpoints: Checkpoints, theirs: Path, turns: int) -> float:
    """Measure how long each way stops the training. Returns the ratio of the medians."""
    state, optimizer, steps = training.state(), training.optimizer, count()

    def until_the_step() -> float:
        return timed(lambda: checkpoints.save(next(steps), state, until=optimizer)) + training.step()

    def at_once() -> float:
        return timed(lambda: checkpoints.save(next(steps), state))

    def torch_save() -> float:
        file = theirs / f"{next(steps)}.pt"
        seconds = timed(lambda: torch.save(state, file))
        for other in theirs.glob("*.pt"):
            if other != file:
                other.unlink()
        return seconds

    ways = {"save(until=optimizer)": until_the_step, "save()": at_once, "torch.save()": torch_save}
    timings = {name: Timings(name) for name in ways}
    for turn in range(turns + WARM_UP):
        for name, way in ways.items() if turn % 2 else reversed(ways.items()):
            os.sync()
            seconds = way()
            checkpoints.wait()
            if turn >= WARM_UP:
                timings[name].seconds.append(seconds)
    until, once, theirs_took = (timing.median for timing in timings.values())
    print(f"stops the training:  {',  '.join(map(str, timings.values()))}")
    print(f"ratio to torch.save: {until / theirs_took:.3f} (target {TARGET} at most), {once / theirs_took:.3f}")
    return until / theirs_took


def slows(training: Training, checkpoints: Checkpoints) -> None:
    """Measure how much longer steps take during a background write."""
    alone, behind, lasted = Timings("a step alone"), Timings("beside the write"), Timings("which lasts")
    extra = Timings("a checkpoint costs the steps beside it")
    for step in range(1000, 1007):
        os.sync()
        usual = [timed(training.step) for _ in range(10)]
        checkpoints.save(step, training.state(), until=training.optimizer)
        start, slowed = time.perf_counter(), []
        while not final_path(checkpoints.path, step).exists():
            slowed.append(timed(training.step))
        lasted.seconds.append(time.perf_counter() - start)
        alone.seconds += usual
        behind.seconds += slowed
        extra.seconds.append(sum(slowed) - len(slowed) * median(usual))
        checkpoints.wait()
    print(f"slows the training:  {alone},  {behind},  {lasted}")
    print(f"{extra} in all")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass
class Timings:
    """Measurements of one kind, in seconds."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    def __str__(self) -> str:
        low, middle, high = (f"{1e3 * of(self.seconds):.1f}" for of in (min, median, max))
        return f"{self.name} {middle} ms ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
