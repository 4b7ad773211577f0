"""How many tokens per second does train.py process, and what share of the device's peak is that?

The peak is measured in the same run: the speed of a large matrix product of the same dtype. A token takes
6 N + 12 n_layer n_embd block_size floating point operations for N parameters (PaLM, arXiv:2204.02311, appendix B):
attention is counted in full although half of it is masked, and recomputation is not counted.

    python benchmarks/gpt2.py train.batch_size=48 train.accumulation=1     GPT-2 124M, bf16, compiled, on one GPU
    python benchmarks/gpt2.py --config config/quickstart.yaml              the small model, on a GPU or the CPU

Text is read from the embedded corpus: the tokens do not change the speed.
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
from distributed.torch import device, process_group  # noqa: E402
from distributed.training.settings import batch, read  # noqa: E402

QUIET = (
    *("data.path=null", "train.evaluate_every=0", "train.evaluate_windows=1", "logging.sample=0"),
    *("checkpoint.every=0", "logging.level=warning"),
)


def synchronized_time(target: torch.device) -> float:
    """Wait for the device. Returns the time in seconds."""
    if target.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_flops(target: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations per second of a large matrix product: the median of ten."""
    size = 8192 if target.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=target, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(13):
        start = synchronized_time(target)
        left @ right
        seconds.append(synchronized_time(target) - start)
    return 2 * size**3 / sorted(seconds[3:])[5]


def measure(config: Path, overrides: list[str], steps: int) -> None:
    """Train 2 * steps steps, and print the figures of the second half; the first half warms up."""
    settings = read(config, [*QUIET, f"train.steps={2 * steps}", f"logging.every={steps}", *overrides])
    with process_group() as world:
        global_batch = batch(settings, world.size)
        train.train(settings, {}, world, global_batch, threading.Event())
        dtype = train.choose_precision(settings.train.precision, device(world))
        peak = peak_flops(device(world), dtype) * world.size
        if world.rank == 0:
            run, model = Path(os.environ["MUSTER_OUTPUT_DIR"]), settings.model
            parameters = json.loads((run / "settings.json").read_text())["model"]["parameters"]
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            *_, speed = (line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
            flops_per_token = 6 * parameters + 12 * model.n_layer * model.n_embd * model.block_size
            achieved = speed * flops_per_token
            print(f"{parameters:,} parameters, {dtype}, compile={settings.train.compile}, "
                  f"{world.size} x {device(world).type}: {global_batch}")  # fmt: skip
            print(f"tokens per second {speed:12,.0f}")
            print(f"share of the peak {achieved / peak:12.1%}  ({achieved:.3g} of {peak:.3g} FLOP/s)")


def main() -> int:
    """Measure in this process, or in each process that torchrun starts."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--config", type=Path, default=KIT / "config/gpt2_124m.yaml")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("overrides", nargs="*")
    arguments = options.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as run:
        os.environ["MUSTER_OUTPUT_DIR"] = run  # only rank 0's directory is used
        measure(arguments.config, [*arguments.overrides, f"checkpoint.dir={run}/checkpoints"], arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
