"""How many tokens per second does train.py process, and what share of the device's peak is that?

The peak is measured in the same run: the speed of a large matrix product of the same dtype. A token takes
6 N + 12 n_layer n_embd block_size floating point operations for N parameters (PaLM, arXiv:2204.02311, appendix B):
attention is counted in full although half of it is masked, and recomputation is not counted.

    python benchmarks/gpt2.py train.batch_size=48 train.accumulation=1     GPT-2 124M, bf16, compiled, on one GPU
    python benchmarks/gpt2.py --config config/quickstart.yaml              the small model, on what there is

Text is read from the embedded corpus: what the tokens are does not change the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

KIT = Path(__file__).resolve().parents[1]
sys.path[0] = str(KIT)  # benchmarks/ comes first otherwise

import torch  # noqa: E402

import train  # noqa: E402
from distributed.config import batch, read  # noqa: E402
from distributed.torch import device, process_group  # noqa: E402

QUIET = (
    *("data.path=null", "train.evaluate_every=0", "train.evaluate_windows=1", "logging.sample=0"),
    *("checkpoint.every=0", "logging.level=warning"),
)


def settle(here: torch.device) -> float:
    """Wait for the device, and return the time."""
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


def measure(config: Path, overrides: list[str], steps: int) -> None:
    """Train some steps, and print the figures of metrics.jsonl but for the first of its two lines."""
    settings = read(config, [*QUIET, f"train.steps={2 * steps}", f"logging.every={steps}", *overrides])
    with process_group() as world:
        cut = batch(settings, world.size)
        train.train(settings, {}, world, cut, threading.Event())
        dtype = train.choose_precision(settings.train.precision, device(world))
        most = ceiling(device(world), dtype) * world.size
        if world.rank == 0:
            run, model = Path(os.environ["MUSTER_OUTPUT_DIR"]), settings.model
            parameters = json.loads((run / "settings.json").read_text())["model"]["parameters"]
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            *_, speed = (line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
            work = 6 * parameters + 12 * model.n_layer * model.n_embd * model.block_size
            print(f"{parameters:,} parameters, {dtype}, compile={settings.train.compile}, "
                  f"{world.size} x {device(world).type}: {cut}")  # fmt: skip
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
        os.environ["MUSTER_OUTPUT_DIR"] = run  # rank 0's counts
        measure(given.config, [*given.overrides, f"checkpoint.dir={run}/checkpoints"], given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
