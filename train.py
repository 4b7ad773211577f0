#!/usr/bin/env python3
"""Train a GPT on text, in one process or many. Read it top to bottom; copy and change it.

    python train.py --config config/quickstart.yaml                        one process
    scripts/ssh/launch_singlenode.sh config/quickstart.yaml 2              two processes on this machine
    torchrun --nproc-per-node 2 train.py --config config/quickstart.yaml   two processes, started by torchrun
    python train.py --fold 0 --prefix exp1                                 one job of a cross-validation
    python train.py --fold 0 --mode base_only                              a base model for jobs with --fold 0

Arguments such as train.steps=100 model.n_layer=6 override settings of the file. A run with the same checkpoint.dir
resumes from the newest checkpoint. On the same number of ranks, it ends with the weights of an uninterrupted run; on
GPUs only with train.deterministic=true.

Cross-validation divides the text into participants. For the default text, which is Python's language reference, these
are its domains (groups of topics); for a data directory, each text is a participant. --fold N selects one participant
as the target, and --mode selects the training data (see --help). Mode base_only trains, by default, on all participants
except the target. It writes best_base_model.pt and three files about it to the run directory, and mode full_fine_tuning
starts from these weights. The checkpoints of a job are in its output directory: with --fold 0 --prefix exp1, as above,
this is experiments/exp1/fold0_special-methods.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from distributed import compiler_cache
from distributed.checkpoint import compatibility
from distributed.checkpoint.checkpointer import Checkpointer
from distributed.checkpoint.checkpoints import CheckpointError, CheckpointInfo
from distributed.checkpoint.interval import SaveInterval
from distributed.exit_codes import STOPPED
from distributed.files import write_json
from distributed.torch import (
    device,
    gradient_sync,
    leave,
    make_deterministic,
    process_group,
    resolve,
    seed,
    wrap,
)
from distributed.training import base_training, trackers, tracking
from distributed.training.collectives import Ranks
from distributed.training.data import DataError, Windows, held_out_batches
from distributed.training.dataset import TrainingData
from distributed.training.model import GPT, sample
from distributed.training.preemption import NonFiniteLoss, stop_signals
from distributed.training.progress import Progress, peak_flops
from distributed.training.settings import BASE_ONLY, Batch, ConfigError, Settings, for_ranks, job_of, parser
from distributed.world import World, WorldError

log = logging.getLogger("muster")


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW in one fused kernel, with weight decay for matrices and none for norms and biases."""
    train = settings.train
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine from learning_rate to min_learning_rate (arXiv:1608.03983, without restarts).

    step: counted from 0. steps: in total.
    """
    train = settings.train
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, steps - train.warmup_steps)  # 0 .. 1
    decay = (1 + math.cos(math.pi * progress)) / 2  # 1 .. 0
    return train.min_learning_rate + decay * (train.learning_rate - train.min_learning_rate)


def choose_precision(precision: str, own_device: torch.device) -> torch.dtype:
    """The dtype of matrix products: auto is bf16 on a GPU that supports it, otherwise fp32."""
    if precision == "auto":
        has_bf16 = own_device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def describe_save(model: nn.Module, strategy: str) -> str:
    """How much CPU memory a save takes, and on which ranks. Weights and AdamW's two moments have the same size."""
    copied = 3 * sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    ranks = "each rank" if strategy == "fsdp" else "rank 0"
    return f"copies {copied / 1e9:,.2f} GB (weights, AdamW's moments) to CPU memory before it writes them, on {ranks}"


def describe_precision(dtype: torch.dtype, own_device: torch.device) -> str:
    """The name of the dtype; for float32, also that the GPU multiplies matrices in TF32, if it has TF32."""
    has_tf32 = own_device.type == "cuda" and torch.cuda.get_device_capability(own_device) >= (8, 0)
    tf32 = " (matrix products in TF32)" if dtype == torch.float32 and has_tf32 else ""
    return str(dtype).removeprefix("torch.") + tf32


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Windows, count: int, batch: Batch, ranks: Ranks, autocast: torch.autocast
) -> float:
    """Mean held-out loss of the first `count` windows, in nats per token. Collective: ranks split the windows."""
    own_device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=own_device)
    model.eval()
    with autocast:
        for indices, weights in held_out_batches(count, batch.micro, ranks.rank, ranks.size):
            inputs, targets = (tensor.to(own_device) for tensor in windows[indices])
            losses, weights = model(inputs, targets).double(), weights.to(own_device)
            sums += torch.stack([(losses * weights).sum(), weights.sum()])
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def resume(
    checkpointer: Checkpointer, optimizer: torch.optim.Optimizer, settings: Settings, facts: Mapping[str, Any]
) -> CheckpointInfo | None:
    """Restore the newest checkpoint. Returns it, or None when the directory holds none.

    Raises:
        ConfigError, CheckpointError: checkpoints exist and none is usable, or the newest does not fit the settings.
    """
    found = checkpointer.newest()
    if found is None:
        return None
    compatibility.check_resumable(found, settings, facts["model"]["vocab_size"])
    compatibility.check_base_model(found, facts["base_model"])
    for change in compatibility.changes(found, facts):
        log.warning(change)
    configured = [(group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    checkpointer.restore(found)
    for group, (weight_decay, betas) in zip(optimizer.param_groups, configured, strict=True):
        group.update(weight_decay=weight_decay, betas=betas)  # restore() sets those of the checkpoint
    log.info(compatibility.already_complete(found, facts["steps"], settings) or f"resuming from {found.path}")
    return found


def train(  # noqa: C901 (one loop, to be read from top to bottom)
    settings: Settings, job: Mapping[str, Any], world: World, batch: Batch, stop: threading.Event
) -> int:
    """Train until the last step, or until `stop` is set on any rank. Returns the exit code: 0, or 75 when stopped."""
    ranks, first_rank = Ranks(world.rank, world.size), world.rank == 0
    own_device = device(world, settings.distributed.backend, settings.distributed.device)
    torch.set_float32_matmul_precision("high")

    # ---------------------------------------------------------------- data

    hosts = ranks.all_gather(socket.gethostname())
    dataset = TrainingData.open(settings, batch, ranks, hosts)
    base = base_training.find(settings, ranks)  # None except in mode full_fine_tuning
    run = tracking.run_directory(job, world, ranks, __file__)
    steps = dataset.steps(settings.train)
    held_out_windows = min(len(dataset.held_out), settings.train.evaluate_windows or len(dataset.held_out))

    # ---------------------------------------------------------------- model

    seed(settings.train.seed)  # the same on every rank: all ranks start with the same weights
    model_settings = settings.model.model_dump()
    model_settings["vocab_size"] = settings.model.vocab_size or dataset.corpus.vocab_size or 256
    gpt = GPT(settings.model, model_settings["vocab_size"], settings.train.gradient_checkpointing).to(own_device)
    if base:
        base.load_into(gpt, model_settings, ranks)
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    if settings.train.compile:
        gpt.compile()
    dtype = choose_precision(settings.train.precision, own_device)
    strategy = resolve(settings.distributed.strategy, world)
    model = wrap(
        gpt, strategy, world,
        find_unused_parameters=settings.distributed.find_unused_parameters,
        dtype=None if dtype == torch.float32 else dtype,
    )  # fmt: skip
    optimizer = make_optimizer(model, settings)
    autocast = torch.autocast(own_device.type, dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(own_device.type, enabled=dtype == torch.float16)
    seed(settings.train.seed, world.rank)  # different on every rank: each draws its own dropout masks

    # ---------------------------------------------------------------- checkpoint

    facts: dict[str, Any] = {
        "model": model_settings, "corpus": str(dataset.corpus), "base_model": base.digest if base else None,
        **compatibility.experiment_of(settings), **compatibility.changeable(settings),
        "precision": str(dtype).removeprefix("torch."), "batch": batch.size, "world": world.size,
        "seed": settings.train.seed, "steps": steps, "run": str(run),
    }  # fmt: skip
    try:
        checkpointer = Checkpointer(
            settings.checkpoint.dir or run / "checkpoints", model, optimizer,
            keep=settings.checkpoint.keep, stop_requested=stop, scaler=scaler,
        )  # fmt: skip
        found = resume(checkpointer, optimizer, settings, facts)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    step = found.step if found else 0
    windows_seen: int = found.facts["items"] if found else 0  # by all ranks together: the position in the data
    interval = SaveInterval(settings.checkpoint.every, settings.checkpoint.mtbf, ranks, step)

    if first_rank:
        world_facts = {"size": world.size, "nodes": len(set(hosts)), "strategy": strategy,
                       "backend": dist.get_backend(), "device": own_device.type}  # fmt: skip
        try:
            write_json(run / "settings.json", {
                "settings": settings.model_dump(mode="json"), "world": world_facts,
                "machine": tracking.describe_machine(),
                "model": {"parameters": parameters, "precision": facts["precision"]},
            })  # fmt: skip
        except OSError as error:  # a full disk
            log.warning(f"{run}/settings.json: {error.strerror}; the report of this run has no settings")
    log.info(f"model  {parameters:,} parameters, {describe_precision(dtype, own_device)}, {strategy} on {world.size} x "
             f"{own_device.type} ({dist.get_backend()})")  # fmt: skip
    log.info(f"data   {dataset.corpus}")
    if base:
        log.info(f"base   {base}")
        if first_rank and base.trained_on(settings.data.participant):
            log.warning(f"base model: its training data includes the training text of {settings.data.participant}")
    log.info(f"batch  {batch}")
    log.info(f"save   {describe_save(model, strategy)}")
    log.info(dataset.describe(steps))

    # ---------------------------------------------------------------- loop

    # Model FLOPs of a token (arXiv:2204.02311, appendix B): 6 per parameter, and those of attention.
    token_flops = 6 * parameters + 12 * settings.model.n_layer * settings.model.n_embd * settings.model.block_size
    peak = peak_flops(own_device, dtype) * (torch.cuda.device_count() if strategy == "dp" else world.size)
    progress = Progress(run, settings, ranks, own_device, steps, batch.tokens, token_flops, peak)
    with checkpointer, progress:
        if strategy == "ddp":
            progress.time_waiting(gpt)
        if found:
            progress.event(step, "resume", steps=steps, run=found.facts.get("run"))
        else:
            progress.event(step, "start", steps=steps)
        if step < steps:
            batches = dataset.batches(settings, ranks, windows_seen, own_device)
        progress.restart_clock(step)
        first_step, held_out_loss, stopping = step + 1, None, False

        while step < steps and not stopping:
            rate = learning_rate(step, steps, settings)
            for group in optimizer.param_groups:
                group["lr"] = rate

            # Forward and backward. step_loss = sum over micro-batches of loss / accumulation: this rank's mean.
            # Ranks average their gradients during the backward pass of the last micro-batch only. With fsdp, they do it
            # in each micro-batch: otherwise each GPU would hold all gradients of the model.
            progress.compute.begin()
            step_loss = torch.zeros((), device=own_device)
            for micro in range(batch.accumulation):
                last = micro == batch.accumulation - 1
                inputs, targets = (tensor.to(own_device, non_blocking=True) for tensor in next(batches))
                with gradient_sync(model, on=last or (strategy == "fsdp" and not settings.distributed.reduce_once)):
                    with autocast:
                        loss = model(inputs, targets).mean() / batch.accumulation
                    if last:
                        progress.compute.end()
                    scaler.scale(loss).backward()
                    if last:
                        progress.waiting.end()
                step_loss += loss.detach()

            # Clip the gradients and update the weights.
            scaler.unscale_(optimizer)
            gradient_norm = nn.utils.clip_grad_norm_(model.parameters(), settings.train.grad_clip or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            windows_seen += batch.size  # micro x accumulation x ranks, for example 12 x 5 x 8 GPUs = 480

            # Log, evaluate and save at their intervals, and all three after the last step.
            log_due, evaluate_due = (
                step == steps or (every > 0 and step % every == 0)
                for every in (settings.logging.every, settings.train.evaluate_every)
            )
            stopping = checkpointer.should_stop(step, step_loss) and step < steps  # the same decision on every rank
            save_due = step == steps or interval.is_due(step, progress.step_seconds(step), checkpointer.blocked)
            if log_due:
                progress.log_step(step, checkpointer.mean_loss(), rate, gradient_norm)
            held_out_loss = None
            if evaluate_due:
                held_out_loss = evaluate(model, dataset.held_out, held_out_windows, batch, ranks, autocast)
                progress.log_held_out(step, held_out_loss)
            if save_due or stopping:
                score = held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None
                checkpointer.save(step, facts={**facts, "items": windows_seen}, score=score, overlap=True)
                progress.event(step, "checkpoint")
            if evaluate_due or save_due or step == first_step:  # the first step allocates memory and compiles
                progress.restart_clock(step)

        checkpointer.wait()
        if stopping:
            log.info(f"stopped on request at step {step}, checkpoint written; run the same command to resume")
            progress.event(step, "stop")
            return STOPPED

        # ---------------------------------------------------------------- end

        if held_out_loss is None:  # this call resumed from the checkpoint of the last step, and ran no step
            held_out_loss = evaluate(model, dataset.held_out, held_out_windows, batch, ranks, autocast)
            progress.log_held_out(step, held_out_loss)
        text = sample(
            gpt, dataset.corpus, settings.logging.sample,
            runs_model=first_rank or strategy == "fsdp", first_rank=first_rank, stop=stop, autocast=autocast,
        )  # fmt: skip
        if text:
            log.info(text)
        progress.finish(step, held_out_loss)
        if settings.data.mode == BASE_ONLY:
            about = {"steps": steps, "parameters": parameters, "ranks": world.size, "seed": settings.train.seed}
            write_base_model(run, checkpointer, dataset, ranks, about, settings, job)
    return 0


def write_base_model(
    run: Path, checkpointer: Checkpointer, dataset: TrainingData, ranks: Ranks, about: Mapping[str, Any],
    settings: Settings, job: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the weights with the lowest held-out loss, and their metrics, to the run directory. Collective.

    Raises:
        NonFiniteLoss: no held-out loss is finite.
        OSError: the files cannot be written.
    """
    best, corpus, batch = checkpointer.best(), dataset.corpus, dataset.batch
    if best is None or best.score is None:
        raise NonFiniteLoss("base model: no checkpoint has a finite held-out loss; lower the learning rate")
    state = checkpointer.load(best)["model"]
    weights = {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for name, t in state.items()}
    metrics = {
        **about, "held_out_loss": best.score, "step": best.step, "tokens": best.facts["items"] * batch.block,
        "participants": corpus.domains, "held_out_participant": corpus.participant, "corpus": str(corpus),
        "batch_size": batch.size, "block_size": batch.block,
    }  # fmt: skip
    ranks.call_on_rank_0(lambda: base_training.write(run, weights, best.facts["model"], metrics, settings, job))
    log.info(f"base model {run / base_training.WEIGHTS}: held-out loss {best.score:.4f} at step {best.step}")


@record
def main() -> int:
    """Read the settings, join the process group, train. Returns the exit code."""
    options = parser("Train a GPT on text, in one process or many.").parse_intermixed_args()
    try:
        world = World.from_env()
        settings, batch = for_ranks(options, world.size)
        trackers.check(settings.model_dump())
        level = logging.getLevelName(settings.logging.level.upper()) if world.rank == 0 else logging.ERROR
        logging.basicConfig(format="%(message)s", stream=sys.stdout, level=max(level, logging.INFO))
        for name in ("muster", "distributed"):  # level debug applies to these loggers, not to PyTorch's
            logging.getLogger(name).setLevel(level)
        if (problem := compiler_cache.use()) and settings.train.compile:
            log.warning(f"torch.compile keeps no code for later runs: {problem}")
        group = settings.distributed
        if settings.train.deterministic:
            make_deterministic()
        with stop_signals() as stop, process_group(world, group.backend, group.timeout, group.device):
            return train(settings, job_of(options), world, batch, stop)
    except (ConfigError, WorldError, DataError, trackers.TrackerMissing) as error:
        rank = os.environ.get("RANK", "0")
        name = "train.py" if rank == "0" else f"train.py, rank {rank}"
        # One line per fault, on every rank: a file may be missing on one node only.
        sys.stderr.write("".join(f"{name}: {line}\n" for line in str(error).splitlines()))
        return 2


if __name__ == "__main__":
    leave(main())
