"""Progress lines: tokens per second and, on GPUs whose peak is known, model FLOPs and their share of the peak (MFU).

There is no GPU: PyTorch is made to report one.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import forked
import pytest
import torch

import train
from distributed.training.collectives import Ranks
from distributed.training.progress import Progress, peak_flops
from distributed.training.settings import Settings

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA A10G", 0),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 0),
        ("Tesla V100-SXM2-32GB", 0),
        ("AMD Instinct MI300X", 0),
    ],
)
def test_the_peak_is_that_of_the_whole_gpu_or_unknown(
    monkeypatch: pytest.MonkeyPatch, name: str, teraflops: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    for dtype in (torch.bfloat16, torch.float16):
        assert peak_flops(GPU, dtype) == teraflops * 1e12
    assert peak_flops(GPU, torch.float32) == peak_flops(torch.device("cpu"), torch.bfloat16) == 0


def lines_of_a_step(rank: int, size: int, path: Path, peak: float) -> tuple[str, dict[str, float]]:
    """Return the progress line, and the values in metrics.jsonl, of 10 steps of 1e6 tokens."""
    path.mkdir(exist_ok=True)
    settings = Settings.model_validate({"train": {"steps": 10, "batch_size": 1}})
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("muster").addHandler(handler)
    logging.getLogger("muster").setLevel(logging.INFO)
    ranks = Ranks(rank, size)
    with Progress(path, settings, ranks, torch.device("cpu"), 10, 10**6, token_flops=2e9, peak=peak) as progress:
        progress.restart_clock(0)
        progress.log_step(10, loss=1.0, rate=0.1, norm=torch.ones(()))
    return lines[0], json.loads((path / "metrics.jsonl").read_text().splitlines()[0])


def test_model_flops_and_their_share_of_the_peak_are_beside_the_tokens_per_second(tmp_path: Path) -> None:
    [(line, values)] = forked.ranks(1, lines_of_a_step, tmp_path, 1e18)
    flops = values["tokens_per_second"] * 2e9
    assert values["mfu"] == pytest.approx(flops / 1e18)
    assert f" tokens/s  {flops / 1e12:,.1f} TFLOP/s  MFU {flops / 1e18:.1%}  " in line


def test_no_share_is_reported_if_the_peak_is_unknown(tmp_path: Path) -> None:
    [(line, values)] = forked.ranks(1, lines_of_a_step, tmp_path, 0.0)
    assert "tokens/s  0:00:00 left" in line
    assert "mfu" not in values


@pytest.mark.parametrize(
    ("major", "device", "dtype", "text"),
    [
        (8, GPU, torch.float32, "float32 (matrix products in TF32)"),
        (7, GPU, torch.float32, "float32"),
        (8, GPU, torch.bfloat16, "bfloat16"),
        (8, torch.device("cpu"), torch.float32, "float32"),
    ],
)
def test_the_model_line_names_tf32_where_float32_uses_it(
    monkeypatch: pytest.MonkeyPatch, major: int, device: torch.device, dtype: torch.dtype, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    assert train.describe_precision(dtype, device) == text


@pytest.mark.parametrize(("emulated", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_auto_is_bf16_only_where_the_gpu_itself_has_it(
    monkeypatch: pytest.MonkeyPatch, emulated: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert train.choose_precision("auto", GPU) == dtype
