"""How many tokens a second does train.py learn, and what share of this device's matrix products is that?

The ceiling is measured in the same run: the speed of a large matrix product of the same type. The work of a token is
counted as 6 N + 12 n_layer n_embd block_size floating point operations for N parameters (PaLM, appendix B), so
attention counts in full though half of it is masked, and recomputation does not count.

    python benchmarks/gpt2.py train.batch_size=48 train.accumulation=1     GPT-2 124M, bf16, compiled, on one GPU
    python benchmarks/gpt2.py --config config/quickstart.yaml              the small model, on what there is

Text is read from the embedded corpus: what the tokens are does not change the speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
sys.path[0] = str(KIT)  # benchmarks/ comes first otherwise

import torch  # noqa: E402

import train  # noqa: E402
from distributed.checkpoint.checkpoints import Checkpoints  # noqa: E402
from distributed.config import batch, read  # noqa: E402
from distributed.torch import device, process_group  # noqa: E402
from distributed.training import data  # noqa: E402

QUIET = (
    *("data.path=null", "train.steps=1000000"),
    *("train.evaluate_every=0", "checkpoint.every=0", "logging.level=warning"),
)
WARM_UP = 5  # steps that compile and allocate


def settle(here: torch.device) -> float:
    """The time when all that was asked of the device is done."""
    if here.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def ceiling(here: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations a second of a large matrix product: the median of ten."""
    size = 8192 if here.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=here, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(13):
        begun = settle(here)
        left @ right
        seconds.append(settle(here) - begun)
    return 2 * size**3 / sorted(seconds[3:])[5]


def measure(config: Path, overrides: list[str], steps: int, run: Path) -> None:
    """Train some steps and print the figures."""
    settings = read(config, [*QUIET, *overrides])
    with process_group() as world:
        here = device(world)
        place = train.Place(world, here, ["here"] * world.size, run, threading.Event())
        training = train.Training(settings, batch(settings, world.size), place, data.load())
        batches, progress = training.batches(), train.Progress(training, None)
        checkpoints = Checkpoints(run / "checkpoints", rank=world.rank, size=world.size)
        for _ in range(WARM_UP):
            train.advance(training, batches, checkpoints, progress)
        begun = settle(here)
        for _ in range(steps):
            train.advance(training, batches, checkpoints, progress)
        speed = steps * training.cut.tokens / (settle(here) - begun)
        model, most = settings.model, ceiling(here, training.dtype) * world.size
        work = 6 * training.parameters + 12 * model.n_layer * model.n_embd * model.block_size
        if world.rank == 0:
            print(f"{training.parameters:,} parameters, {training.dtype}, compile={settings.train.compile}, "
                  f"{world.size} x {here.type}: {training.cut}")  # fmt: skip
            print(f"tokens a second {speed:12,.0f}")
            print(f"of the ceiling  {speed * work / most:12.1%}  ({speed * work:.3g} of {most:.3g} FLOP/s)")


def main() -> int:
    """Measure in this process, or in each that torchrun starts."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--config", type=Path, default=KIT / "config/gpt2_124m.yaml")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("overrides", nargs="*")
    given = options.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as run:
        measure(given.config, given.overrides, given.steps, Path(run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
