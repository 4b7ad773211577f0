"""How long does saving a checkpoint stop the training?

Calls Checkpoints.save() and torch.save alternately, with the same state and directory, and compares their median times.
The state is that of a model and its AdamW, three numbers per parameter. Each measurement writes a new checkpoint and
then removes the previous one, so that one exists at every moment. sync(2) runs before each measurement; the first
saves, which allocate memory, are discarded.

Expected: torch.save computes a CRC-32 and copies to the page cache with one thread. save() copies the state once in
memory; on 2 cores, this takes a tenth to a fifth of the time of torch.save. With overlapped=optimizer, save() copies
while the next gradients are computed. In that case, the measured time includes the wait before the optimizer's step. If
training steps use all cores, the background write slows them by about the CPU time of the write.

    python -m benchmarks.checkpoint [--parameters 25] [--repetitions 15] [--directory DIRECTORY]

Exits with 1 when save(overlapped=...), as in train.py, stops the training for more than a tenth of torch.save's time.
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
WARM_UP = 2  # repetitions that are not measured: the first saves allocate memory
WIDTH = 512


def main() -> int:
    parser = argparse.ArgumentParser(description="How long does saving a checkpoint stop the training?")
    parser.add_argument("--parameters", type=float, default=25, help="parameters of the model, in millions")
    parser.add_argument("--repetitions", type=int, default=15, help="number of measurements of each way of saving")
    parser.add_argument("--directory", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    arguments = parser.parse_args()
    training = Training(arguments.parameters * 1e6)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(f"{training.bytes / 1e6:.0f} MB of state, {torch.get_num_threads()} threads, {directory}")
        with Checkpoints(Path(directory, "muster"), keep=1) as checkpoints:
            ratio = measure_stops(training, checkpoints, Path(directory), arguments.repetitions)
            measure_slowdown(training, checkpoints)
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
        started: list[float] = []
        hook = self.optimizer.register_step_pre_hook(lambda *_: started.append(time.perf_counter()))
        self.optimizer.step()
        hook.remove()
        self.optimizer.zero_grad()
        return started[0] - before

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def measure_stops(training: Training, checkpoints: Checkpoints, directory: Path, repetitions: int) -> float:
    """Measure how long each way of saving stops the training. Returns the ratio of save(overlapped) to torch.save."""
    state, optimizer, steps = training.state(), training.optimizer, count()

    def overlapped() -> float:
        return timed(lambda: checkpoints.save(next(steps), state, overlapped=optimizer)) + training.step()

    def plain() -> float:
        return timed(lambda: checkpoints.save(next(steps), state))

    def torch_save() -> float:
        file = directory / f"{next(steps)}.pt"
        seconds = timed(lambda: torch.save(state, file))
        for other in directory.glob("*.pt"):
            if other != file:
                other.unlink()
        return seconds

    ways = {"save(overlapped=optimizer)": overlapped, "save()": plain, "torch.save()": torch_save}
    timings = {name: Timings(name) for name in ways}
    for repetition in range(repetitions + WARM_UP):
        for name, way in ways.items() if repetition % 2 else reversed(ways.items()):
            os.sync()
            seconds = way()
            checkpoints.wait()
            if repetition >= WARM_UP:
                timings[name].seconds.append(seconds)
    overlapped_median, plain_median, torch_save_median = (timing.median for timing in timings.values())
    print(f"training stopped: {',  '.join(map(str, timings.values()))}")
    ratio, plain_ratio = overlapped_median / torch_save_median, plain_median / torch_save_median
    print(f"ratio to torch.save: {ratio:.3f} (target {TARGET} at most), {plain_ratio:.3f}")
    return ratio


def measure_slowdown(training: Training, checkpoints: Checkpoints) -> None:
    """Measure how much longer steps take during a background write."""
    alone, during, write = Timings("a step alone"), Timings("during a write"), Timings("duration of a write")
    extra = Timings("extra time of all steps during a write")
    for step in range(1000, 1007):
        os.sync()
        usual = [timed(training.step) for _ in range(10)]
        checkpoints.save(step, training.state(), overlapped=training.optimizer)
        start, slowed = time.perf_counter(), []
        while not final_path(checkpoints.path, step).exists():
            slowed.append(timed(training.step))
        write.seconds.append(time.perf_counter() - start)
        alone.seconds += usual
        during.seconds += slowed
        extra.seconds.append(sum(slowed) - len(slowed) * median(usual))
        checkpoints.wait()
    print(f"training slowed: {alone},  {during},  {write}")
    print(extra)


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
        low, middle, high = (f"{1e3 * value(self.seconds):.1f}" for value in (min, median, max))
        return f"{self.name} {middle} ms ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
