"""Progress lines on the console of rank 0, and metrics.jsonl."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.report import report
from distributed.training.collectives import Ranks
from distributed.training.settings import Settings
from distributed.training.tracking import Tracker

log = logging.getLogger("muster")


# Dense bf16 TFLOP/s with sums in float32, from NVIDIA's data sheets and, for GeForce and RTX, from its white papers on
# GA102, Ada and RTX Blackwell; where these only have the value "with sparsity", half of it. The keys are expressions.
PEAKS = {
    r"A[18]00(-(SXM4|PCIE)-\d+GB| \d+GB PCIe)": 312.0, "A10": 125.0, "A30": 165.0, "A40": 149.7,
    "L4": 121.0, "L40": 181.0, "L40S": 362.0, "RTX A6000": 154.8, "RTX 6000 Ada Generation": 364.2,
    "H100 80GB HBM3|H200|GH200 480GB": 989.5, "H100 PCIe": 756.5, "H[12]00 NVL": 835.5, "B200": 2250.0, "GB200": 2500.0,
    "GeForce RTX 3090": 71.0, "GeForce RTX 4090": 165.2, "GeForce RTX 5090": 209.5,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak of a GPU for bf16 and fp16 in FLOP/s; 0 for float32, an unknown GPU, a part of one, and a CPU."""
    if device.type != "cuda" or dtype == torch.float32:
        return 0.0
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return 1e12 * next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)), 0.0)


class Stopwatch:
    """Measures one section of each step on this rank: by CUDA events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._start: Any = None

    def begin(self) -> None:
        """Start the section. A second call in a step replaces the first."""
        self._start = self._now()

    def end(self) -> None:
        """End the section: its work is done or, on a GPU, queued."""
        if self._start is not None:
            self._spans.append((self._start, self._now()))

    def reset(self) -> None:
        """Discard the measurements since the last mean()."""
        self._spans.clear()

    def mean(self) -> float:
        """Return the mean seconds per step since the last call; NaN when the section never started."""
        if not self._spans:
            return math.nan
        if self.cuda:
            self._spans[-1][1].synchronize()
            seconds = [start.elapsed_time(end) / 1000 for start, end in self._spans]  # elapsed_time() is in ms
        else:
            seconds = [end - start for start, end in self._spans]
        self.reset()
        return sum(seconds) / len(seconds)

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Progress:
    """Measures steps and reports them on rank 0. Every rank makes the same calls: log_step() is collective."""

    def __init__(
        self, run: Path, settings: Settings, ranks: Ranks, device: torch.device, steps: int, tokens: int,
        token_flops: float, peak: float,
    ) -> None:  # fmt: skip
        """steps: in total. tokens: per step, over all ranks. peak: FLOP/s of all GPUs; 0: do not report the MFU."""
        self._run, self._settings, self._ranks, self._device = run, settings, ranks, device
        self._steps, self._tokens, self._token_flops, self._peak = steps, tokens, token_flops, peak
        self._timed_steps, self._timed_seconds = 0, 0.0
        self._tracker: Tracker | None = None
        self._stack = ExitStack()
        # Measures each step up to its last backward pass. Ranks wait for each other in that pass, so a slow rank can be
        # recognized only by the time before it.
        self.compute = Stopwatch(device)
        # From this rank's last gradient to the end of the all-reduce. Not measured with fsdp, where ranks wait for each
        # other in every layer.
        self.waiting = Stopwatch(device)

    def __enter__(self) -> Progress:
        if self._ranks.rank == 0:
            if str(self._run) != os.environ.get("MUSTER_RUN_DIR"):  # otherwise the launcher writes the report
                self._stack.callback(lambda: log.info(f"report {report.write(self._run)}"))
            self._tracker = self._stack.enter_context(Tracker(self._run, self._settings.model_dump(mode="json")))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def time_waiting(self, model: nn.Module) -> None:
        """In each ddp backward pass, start `waiting` when the gradient of the model's first parameter is ready.

        The backward pass computes this gradient last.
        """
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: self.waiting.begin())

    def restart_clock(self, step: int) -> None:
        """Measure the steps after `step` from now on. The time since the last log_step() is not counted."""
        self._from_step, self._from_time = step, time.perf_counter()
        self.waiting.reset()

    def event(self, step: int, name: str, **values: Any) -> None:
        """Write an event to metrics.jsonl, for the report."""
        if self._tracker:
            self._tracker.log(step, event=name, **values)

    def step_seconds(self, step: int) -> float:
        """Return the mean seconds per step, over all steps that log_step() has reported.

        Before the first report, the mean is over the steps since restart_clock().
        """
        if self._timed_steps:
            return self._timed_seconds / self._timed_steps
        return (time.perf_counter() - self._from_time) / max(step - self._from_step, 1)

    def log_step(self, step: int, loss: float, rate: float, norm: Tensor) -> None:
        """Report the steps since the last call. Collective. rate: the learning rate. norm: of all gradients."""
        rank_seconds = self._gather(self.compute.mean())
        gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        steps = step - self._from_step
        seconds = (time.perf_counter() - self._from_time) / max(steps, 1)
        wait_share = self._gather(self.waiting.mean() / seconds)  # each rank uses its own clock
        self._timed_steps, self._timed_seconds = self._timed_steps + steps, self._timed_seconds + steps * seconds
        speed = self._tokens / seconds
        shown, utilization = f"{speed:,.0f} tokens/s", dict[str, float]()
        if self._peak:
            utilization["mfu"] = speed * self._token_flops / self._peak
            shown += f"  {speed * self._token_flops / 1e12:,.1f} TFLOP/s  MFU {utilization['mfu']:.1%}"
        minutes, rest = divmod(round(seconds * (self._steps - step)), 60)
        log.info(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  lr {rate:.2e}  "
            f"grad {gradient_norm:.2f}  {shown}  {minutes // 60}:{minutes % 60:02}:{rest:02} left"
        )
        if self._tracker:
            self._tracker.log(
                step, loss=loss, lr=rate, grad_norm=gradient_norm,
                tokens_per_second=speed, step_seconds=seconds, rank_seconds=rank_seconds, wait_share=wait_share,
                **utilization,
            )  # fmt: skip
        self.restart_clock(step)

    def log_held_out(self, step: int, loss: float) -> None:
        """Report the held-out loss, in nats per token."""
        log.info(f"held-out loss {loss:.4f} ({loss / math.log(2):.3f} bits per token)")
        if self._tracker:
            self._tracker.log(step, held_out_loss=loss)

    def finish(self, step: int, held_out_loss: float) -> None:
        """Report the end of the training."""
        tokens = self._tokens * self._timed_steps
        speed = f"{tokens / self._timed_seconds:,.0f} tokens/s" if tokens else "nothing left to do"
        log.info(f"finished: {step} steps, held-out loss {held_out_loss:.4f}, {speed}")
        self.event(step, "finish", held_out_loss=held_out_loss)

    def _gather(self, value: float) -> list[float]:
        """Return each rank's value, rounded to six decimals. Collective."""
        values = torch.zeros(self._ranks.size, device=self._device)
        values[self._ranks.rank] = value
        dist.all_reduce(values)
        return [round(each, 6) for each in values.tolist()]
