#!/usr/bin/env python3
"""Train a GPT on text, on one process or many. Read it top to bottom; copy it and make it yours.

    python train.py --config config/quickstart.yaml                        one process
    scripts/ssh/launch_singlenode.sh config/quickstart.yaml 2              two processes on this machine
    torchrun --nproc-per-node 2 train.py --config config/quickstart.yaml   the same, by hand
    python train.py --fold 0 --prefix exp1                                 a job: hold out one domain of the text
    python train.py --fold 0 --mode base_only                              a base model of the other domains

A participant is a domain of the text, or a text of a directory. --mode says what is trained on: heldout, single and
pooled train one model (see --help). base_only trains a base model on the participants but the one that is held out, and
writes best_base_model.pt and three files about it to the run directory. full_fine_tuning starts from a base model and
trains all its weights on the text of that one participant; from_scratch does the same from random weights. Of each
batch, --target_batch_pct may be text of that participant and the rest text of the base's participants.

Every setting of the file can be said again behind it: train.steps=100 model.n_layer=6. Started again with the same
checkpoint.dir, it goes on where it stopped, and ends with the same weights as if it had never stopped. A job keeps its
checkpoints in its output directory, here experiments/exp1/fold0_special-methods.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from distributed import config
from distributed.checkpoint.checkpoints import CheckpointError, Checkpoints, Found, random_state, set_random_state
from distributed.checkpoint.compatibility import (
    changeable,
    changes,
    complete,
    experiment_of,
    refuse_another_base,
    refuse_misfit,
)
from distributed.config import Batch, ConfigError, Settings, for_ranks, job_of, parser
from distributed.config import Model as ModelSettings
from distributed.exit_codes import STOPPED
from distributed.fold import DEFAULT_PARTICIPANTS, output_directory
from distributed.runs import report
from distributed.runs.run_directory import create as create_run_folder
from distributed.torch import device, gradient_sync, leave, process_group, resolve, seed, unwrap, wrap
from distributed.training import base_training, data, tracking
from distributed.training.collectives import Ranks
from distributed.training.data import DataError
from distributed.training.preemption import Ballots, NonFiniteLoss, Outcome, stop_signals
from distributed.world import World, WorldError

log = logging.getLogger("muster")
SAMPLE_SECONDS = 10.0  # that the sample at the end may take

# ---------------------------------------------------------------- the model


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, m: ModelSettings) -> None:
        super().__init__()
        self.n_head, self.dropout = m.n_head, m.dropout
        self.qkv = nn.Linear(m.n_embd, 3 * m.n_embd, bias=m.bias)
        self.proj = nn.Linear(m.n_embd, m.n_embd, bias=m.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in self.qkv(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(b, t, c)), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each behind a normalisation and beside the residual stream."""

    def __init__(self, m: ModelSettings) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(m.n_embd, bias=m.bias)
        self.attention = Attention(m)
        self.norm2 = nn.LayerNorm(m.n_embd, bias=m.bias)
        self.up = nn.Linear(m.n_embd, 4 * m.n_embd, bias=m.bias)
        self.down = nn.Linear(4 * m.n_embd, m.n_embd, bias=m.bias)
        self.dropout = m.dropout

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A GPT-2 shaped language model with tied input and output embeddings."""

    def __init__(self, m: ModelSettings, vocab_size: int, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.block_size, self.dropout, self.gradient_checkpointing = m.block_size, m.dropout, gradient_checkpointing
        self.tokens = nn.Embedding(vocab_size, m.n_embd)
        self.positions = nn.Embedding(m.block_size, m.n_embd)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layer))
        self.norm = nn.LayerNorm(m.n_embd, bias=m.bias)
        self.head = nn.Linear(m.n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # the residual stream sums 2 n_layer terms: each begins that much smaller (GPT-2)
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * m.n_layer) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocabulary]; with targets, the mean loss of each window [batch] in nats a token."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            again = self.gradient_checkpointing and self.training  # compute it again, in place of keeping it
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(1)


@torch.no_grad()
def sample(model: nn.Module, prompt: Tensor, block_size: int, temperature: float = 0.8) -> Iterator[Tensor]:
    """Write on from a prompt [time], one token [1] after the other, without end."""
    draw = torch.Generator(device=prompt.device).manual_seed(0)
    written = prompt
    while True:
        logits = model(written[None])[0, -1] / temperature
        token = torch.multinomial(logits.float().softmax(0), 1, generator=draw)
        written = torch.cat([written, token])[-block_size:]
        yield token


# ---------------------------------------------------------------- how it learns


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW in one fused kernel; matrices decay, norms and biases do not."""
    train = settings.train
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine from learning_rate down to min_learning_rate at the last step."""
    train = settings.train
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, steps - train.warmup_steps)
    height = train.learning_rate - train.min_learning_rate
    return train.min_learning_rate + height * (1 + math.cos(math.pi * done)) / 2


def choose_precision(asked: str, here: torch.device) -> torch.dtype:
    """The type of the matrix products."""
    if asked == "auto":
        return torch.bfloat16 if here.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[asked]


class Stopwatch:
    """How long a part of each step takes on this rank."""

    def __init__(self, here: torch.device) -> None:
        self.cuda = here.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """The part begins now; of several calls in a step the last one counts."""
        self._begun = self._now()

    def end(self) -> None:
        """What belongs to the part is done (or, on a GPU, queued)."""
        if self._begun is not None:
            self._spans.append((self._begun, self._now()))

    def forget(self) -> None:
        """The steps up to here do not count."""
        self._spans.clear()

    def mean(self) -> float:
        """Mean seconds a step since the last call; NaN where the part never began."""
        if not self._spans:
            return math.nan
        if self.cuda:
            self._spans[-1][1].synchronize()
            seconds = [begun.elapsed_time(ended) / 1000 for begun, ended in self._spans]
        else:
            seconds = [ended - begun for begun, ended in self._spans]
        self.forget()
        return sum(seconds) / len(seconds)

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# ---------------------------------------------------------------- the training


@dataclass(frozen=True)
class Place:
    """Where this training runs: the same on all ranks but for the world."""

    world: World
    here: torch.device
    hosts: list[str]  # of each rank
    run: Path  # the folder of the run
    asked_to_stop: threading.Event

    @property
    def first(self) -> bool:
        """Whether this rank is the one that speaks."""
        return self.world.rank == 0


class Training:
    """The state of a training: model, optimizer, scaler, and how far it has come."""

    def __init__(
        self, settings: Settings, cut: Batch, place: Place, corpus: data.Corpus, base: base_training.Base | None
    ) -> None:
        self.settings, self.cut, self.place, self.corpus, self.base = settings, cut, place, corpus, base
        world, train = place.world, settings.train
        self.base_digest = base.digest if base else None
        self.strategy = resolve(settings.distributed.strategy, world)
        self.dtype = choose_precision(train.precision, place.here)
        self.vocab_size = settings.model.vocab_size or corpus.vocab_size or 256
        self.windows = data.Windows(corpus.train, settings.model.block_size)
        self.held_out = data.Windows(corpus.held_out, settings.model.block_size)
        self.mixture: data.Mixture | None = None
        if corpus.base is not None:
            self.mixture = data.Mixture(self.windows, data.Windows(corpus.base, settings.model.block_size))
        self.of_windows = config.target_windows(settings, cut.size)  # a step; the others of a mixture are the base's
        self.steps = train.steps or math.ceil((train.epochs or 0) * len(self.windows) / self.of_windows)

        seed(train.seed)  # the same on every rank, so that all begin with the same weights
        model = GPT(settings.model, self.vocab_size, train.gradient_checkpointing).to(place.here)
        if base:
            base.load_into(model, self.model_settings(), Ranks(world.rank, world.size))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        if train.compile:
            model.compile()
        self.model = wrap(
            model, self.strategy, world,
            find_unused_parameters=settings.distributed.find_unused_parameters,
            dtype=self.dtype if self.dtype == torch.bfloat16 else None,
        )  # fmt: skip
        self.optimizer = make_optimizer(self.model, settings)
        self.scaler = torch.amp.GradScaler(place.here.type, enabled=self.dtype == torch.float16)
        seed(train.seed, world.rank)  # from here on ranks draw differently

        self.step = 0  # steps done
        self.items = 0  # windows consumed by all ranks: the position in the data
        # Up to where a rank first waits for others: a straggler is seen by it.
        self.own_time = Stopwatch(place.here)
        # From this rank's last gradient to the sum over all ranks. The parameter that is used first gets its gradient
        # last. Under fsdp ranks wait for each other in every layer: that is not measured.
        self.waiting = Stopwatch(place.here)
        if self.strategy == "ddp":
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            first.register_post_accumulate_grad_hook(lambda _: self.waiting.begin())
        self.resumed_from: str | None = None  # directory of the run that wrote the checkpoint
        self.ballots = Ballots(world.rank, world.size, place.here)

    # -------- one step

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of this rank, for ever, from where the training stands."""
        place: dict[str, Any] = {
            "micro": self.cut.micro, "rank": self.place.world.rank, "size": self.place.world.size,
            "seed": self.settings.train.seed, "start": self.items,
        }  # fmt: skip
        log.debug(
            f"data: {len(self.windows):,} windows of {self.corpus.name}, order of seed {place['seed']} from position "
            f"{self.items:,}"
        )
        order: Iterable[list[int]]
        if self.mixture:
            order = data.MixedStream(self.mixture, self.cut.size, self.of_windows, **place)
        else:
            order = data.Stream(len(self.windows), self.cut.size, **place)
        return iter(data.loader(
            self.mixture or self.windows, order, workers=self.settings.data.workers,
            pin_memory=self.place.here.type == "cuda", seed=self.settings.train.seed,
        ))  # fmt: skip

    def autocast(self) -> torch.autocast:
        """Matrix products in the chosen type, what needs float32 in float32."""
        return torch.autocast(self.place.here.type, self.dtype, enabled=self.dtype != torch.float32)

    def learn(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One step: this rank's mean loss and the norm of all gradients, both scalars on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.settings)
        self.own_time.begin()
        total = torch.zeros((), device=self.place.here)
        for micro in range(self.cut.accumulation):
            last = micro == self.cut.accumulation - 1
            inputs, targets = (part.to(self.place.here, non_blocking=True) for part in next(batches))
            with gradient_sync(self.model, on=last):
                with self.autocast():
                    loss = self.model(inputs, targets).mean() / self.cut.accumulation
                if last:
                    self.own_time.end()
                self.scaler.scale(loss).backward()
                if last:
                    self.waiting.end()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        limit = self.settings.train.grad_clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.items += self.cut.size
        return total, norm

    def evaluate(self) -> float:
        """Held-out loss in nats a token: every held-out window counts once, shared out over the ranks. Collective."""
        world = self.place.world
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.here)
        count = min(len(self.held_out), self.settings.train.evaluate_windows or len(self.held_out))
        self.model.eval()
        with torch.no_grad(), self.autocast():
            for indices, weights in data.held_out_batches(count, self.cut.micro, world.rank, world.size):
                inputs, targets = (part.to(self.place.here) for part in self.held_out.batch(indices))
                losses, weights = self.model(inputs, targets).double(), weights.to(self.place.here)
                sums += torch.stack([(losses * weights).sum(), weights.sum()])
        self.model.train()
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    # -------- keep and go on

    def refuse_ruined_weights(self) -> None:
        """The loss of a step is that of the weights before it: what the step made of them nobody has seen yet.

        Raises:
            NonFiniteLoss: on every rank alike; the checkpoints from before stay the newest.
        """
        norm = whole(nn.utils.get_total_norm(self.model.parameters()))
        if not math.isfinite(norm):
            raise NonFiniteLoss(
                f"the weights are not finite (NaN or inf) after step {self.step}: no checkpoint is written of them. "
                "Lower the learning rate; started again, it goes on from the newest checkpoint"
            )

    def state(self) -> dict[str, Any]:
        """All that the rest of the training depends on, but for random states and what `facts` says."""
        model, optimizer = get_state_dict(unwrap(self.model), self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def best_weights(self, best: Found, checkpoints: Checkpoints) -> dict[str, Tensor]:
        """The model's in that checkpoint, whole and on the CPU. Where FSDP shards, our model gets them. Collective."""
        weights = checkpoints.load(best, self.state())["model"]
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for name, t in weights.items()}

    def model_settings(self) -> dict[str, Any]:
        """What the shapes of the weights follow from."""
        return {**self.settings.model.model_dump(), "vocab_size": self.vocab_size}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint is of: readable without loading it."""
        return {
            "model": self.model_settings(),
            "corpus": str(self.corpus),
            **experiment_of(self.settings),
            **changeable(self.settings),
            "precision": str(self.dtype).removeprefix("torch."),
            "base_model": self.base_digest,
            "items": self.items,
            "batch": self.cut.size,
            "world": self.place.world.size,
            "seed": self.settings.train.seed,
            "steps": self.steps,
            "run": str(self.place.run),
        }

    def go_on_from(self, found: Found, checkpoints: Checkpoints) -> None:
        """Take up the state of a checkpoint. Raises CheckpointError when it does not fit."""
        for change in changes(found, self.facts()):
            log.warning(change)
        chosen = [(group["weight_decay"], group["betas"]) for group in self.optimizer.param_groups]
        state = checkpoints.load(found, self.state())
        set_state_dict(
            unwrap(self.model), self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for group, (weight_decay, betas) in zip(self.optimizer.param_groups, chosen, strict=True):
            group.update(weight_decay=weight_decay, betas=betas)  # the checkpoint has those of before
        self.scaler.load_state_dict(state["scaler"])
        if (random_states := checkpoints.load_own(found)) is not None:
            set_random_state(random_states)
        self.step, self.items, self.resumed_from = found.step, found.facts["items"], found.facts.get("run")


# ---------------------------------------------------------------- what rank 0 says


class Progress:
    """Measures, and lets rank 0 speak. Every rank calls it: some figures are gathered from all."""

    def __init__(self, training: Training, tracker: tracking.Tracker | None) -> None:
        self.training, self.tracker = training, tracker
        self.score: float | None = None  # the newest held-out loss
        self.steps, self.seconds = 0, 0.0  # measured so far
        self.restart_clock()
        self.warming_up = True  # the first step allocates and compiles: it does not count

    def restart_clock(self) -> None:
        """What has passed up to here is not the time of steps."""
        self._from_step, self._from_time = self.training.step, time.perf_counter()
        self.training.waiting.forget()
        self.warming_up = False

    def event(self, name: str, **more: Any) -> None:
        """Note for the report that something happened at this step."""
        if self.tracker:
            self.tracker.log(self.training.step, event=name, **more)

    def step(self, outcome: Outcome, norm: Tensor) -> None:
        """A progress line. Collective."""
        training = self.training
        rank_seconds = gather(training.own_time.mean(), training.place)
        gradient_norm = whole(norm)
        steps = training.step - self._from_step
        seconds = (time.perf_counter() - self._from_time) / max(steps, 1)
        wait_share = gather(training.waiting.mean() / seconds, training.place)  # each rank by its own clock
        self.steps, self.seconds = self.steps + steps, self.seconds + steps * seconds
        speed = training.cut.tokens / seconds
        rate = learning_rate(training.step - 1, training.steps, training.settings)
        left = seconds * (training.steps - training.step)
        log.info(
            f"step {training.step:>{len(str(training.steps))}}/{training.steps}  loss {outcome.loss:.4f}  "
            f"lr {rate:.2e}  grad {gradient_norm:.2f}  {speed:,.0f} tokens/s  {clock(left)} left"
        )
        if self.tracker:
            self.tracker.log(
                training.step, loss=outcome.loss, lr=rate, grad_norm=gradient_norm,
                tokens_per_second=speed, step_seconds=seconds, rank_seconds=rank_seconds, wait_share=wait_share,
            )  # fmt: skip
        self.restart_clock()

    def held_out(self) -> float:
        """The held-out loss now. Collective."""
        self.score = self.training.evaluate()
        bits = self.score / math.log(2)
        log.info(f"held-out loss {self.score:.4f} ({bits:.3f} bits a token)")
        if self.tracker:
            self.tracker.log(self.training.step, held_out_loss=self.score)
        return self.score

    def stopped(self) -> int:
        """Asked to stop, with a checkpoint written."""
        log.info(f"stopped on request at step {self.training.step} with a checkpoint written: run again to go on")
        self.event("stop")
        return STOPPED

    def finished(self) -> int:
        """All steps done: the held-out loss, a sample, the speed. Collective."""
        score = self.held_out() if self.score is None else self.score
        if text := write_sample(self.training):
            log.info(text)
        tokens = self.training.cut.tokens * self.steps
        speed = f"{tokens / self.seconds:,.0f} tokens/s" if tokens else "nothing left to do"
        log.info(f"finished: {self.training.step} steps, held-out loss {score:.4f}, {speed}")
        self.event("finish", held_out_loss=score)
        return 0


def whole(norm: Tensor) -> float:
    """The number that a norm is, also one of sharded tensors: then collective."""
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gather(seconds: float, place: Place) -> list[float]:
    """One number of each rank, on every rank. Collective."""
    every = torch.zeros(place.world.size, device=place.here)
    every[place.world.rank] = seconds
    dist.all_reduce(every)
    return [round(each, 6) for each in every.tolist()]


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def write_sample(training: Training) -> str:
    """Text that the model writes, where tokens can be read as text, with a heading. Collective.

    Rank 0 writes alone where it has the whole model; fsdp needs all ranks. All agree after each token whether to go on:
    not for longer than SAMPLE_SECONDS, nor when one of them is asked to stop.
    """
    length, place = training.settings.logging.sample, training.place
    if not length or training.corpus.kind != "bytes":
        return ""
    prompt = training.corpus.encode("\n").to(place.here)
    tokens = sample(unwrap(training.model), prompt, training.settings.model.block_size)
    writes = place.first or training.strategy == "fsdp"
    written: list[Tensor] = []
    training.model.eval()
    start = time.perf_counter()
    with training.autocast():
        while len(written) < length:
            written.append(next(tokens) if writes else prompt)
            late = place.first and time.perf_counter() - start >= SAMPLE_SECONDS
            asked, late = any_rank(place, place.asked_to_stop.is_set(), late)
            if asked or late:
                break
    training.model.train()
    if asked:
        log.info("stop request: all steps are done; no longer sample")
    if not place.first:
        return ""
    part = f" ({len(written)} of {length:,} tokens, in {SAMPLE_SECONDS:g} s)" if late and len(written) < length else ""
    text = training.corpus.decode(torch.cat(written)).strip()
    return f"a sample{part}:\n\n" + "".join(f"    {line}\n" for line in text.splitlines())


def any_rank(place: Place, *flags: bool) -> list[bool]:
    """Each flag: whether it is set on any rank. Collective."""
    sums = torch.tensor(flags, dtype=torch.float32, device=place.here)
    dist.all_reduce(sums)
    return [total > 0 for total in sums.tolist()]


# ---------------------------------------------------------------- from the first step to the last


@dataclass(frozen=True)
class Due:
    """What follows a step."""

    log: bool
    evaluate: bool
    save: bool

    @classmethod
    def after(cls, step: int, steps: int, settings: Settings) -> Due:
        """Everything is due behind the last step."""

        def due(every: int) -> bool:
            return step == steps or (every > 0 and step % every == 0)

        return cls(due(settings.logging.every), due(settings.train.evaluate_every), due(settings.checkpoint.every))

    def anything(self) -> bool:
        """Whether all ranks must know now how the step went."""
        return self.log or self.evaluate or self.save


def run(training: Training, checkpoints: Checkpoints, tracker: tracking.Tracker | None, job: Mapping[str, Any]) -> int:
    """Train to the end, or until asked to stop. Returns the exit code."""
    progress = Progress(training, tracker)
    before = {"run": training.resumed_from} if training.resumed_from else {}
    progress.event("resume" if training.step else "start", steps=training.steps, **before)
    stop = False
    batches = training.batches() if training.step < training.steps else iter(())
    while training.step < training.steps and not stop:
        stop = advance(training, batches, checkpoints, progress)
    checkpoints.wait()
    if stop:
        return progress.stopped()
    code = progress.finished()
    if training.settings.data.mode == config.BASE_ONLY:
        write_base_model(training, checkpoints, job)
    return code


def advance(
    training: Training, batches: Iterator[tuple[Tensor, Tensor]], checkpoints: Checkpoints, progress: Progress
) -> bool:
    """One step, and what is due behind it. Returns whether to stop before the last one."""
    loss, norm = training.learn(batches)
    due = Due.after(training.step, training.steps, training.settings)
    outcomes = vote(training, checkpoints, loss, now=due.anything())
    stop = any(outcome.stop for outcome in outcomes) and training.step < training.steps
    if due.log:
        progress.step(outcomes[-1], norm)
    score = progress.held_out() if due.evaluate else None
    if due.save or stop:
        training.refuse_ruined_weights()
        checkpoints.save(
            training.step, training.state(), own=random_state(), facts=training.facts(),
            score=score if score is not None and math.isfinite(score) else None, until=training.optimizer,
        )  # fmt: skip
        progress.event("checkpoint")
    if due.evaluate or due.save or progress.warming_up:
        progress.restart_clock()
    return stop


def vote(training: Training, checkpoints: Checkpoints, loss: Tensor, now: bool) -> list[Outcome]:
    """How the last steps went on all ranks. When one of them cannot go on, all raise, at the same step."""
    place, broken = training.place, checkpoints.failed()
    training.ballots.cast(training.step, loss, stop=place.asked_to_stop.is_set(), failed=broken is not None)
    outcomes = training.ballots.settle(now)
    if any(outcome.stop for outcome in outcomes):
        outcomes += training.ballots.settle(now=True)
    for outcome in outcomes:
        outcome.raise_for(place.world.rank, broken, place.hosts)
    return outcomes


def write_base_model(training: Training, checkpoints: Checkpoints, job: Mapping[str, Any]) -> None:
    """The weights with the lowest held-out loss, and what is known of them, into the run directory. Collective.

    Raises:
        NonFiniteLoss: no held-out loss is finite.
    """
    best, run, cut = checkpoints.best(), training.place.run, training.cut
    if best is None or best.score is None:
        raise NonFiniteLoss("no checkpoint has a finite held-out loss: there is no base model; lower the learning rate")
    weights = training.best_weights(best, checkpoints)
    metrics = {
        "held_out_loss": best.score, "step": best.step, "steps": training.steps, "parameters": training.parameters,
        "tokens": best.facts["items"] * cut.block, "participants": training.corpus.domains,
        "held_out_participant": training.corpus.participant, "corpus": str(training.corpus), "batch_size": cut.size,
        "block_size": cut.block, "ranks": training.place.world.size, "seed": training.settings.train.seed,
    }  # fmt: skip
    checkpoints.ranks.decide(
        lambda: base_training.write(run, weights, training.model_settings(), metrics, training.settings, job)
    )
    log.info(f"base model {run / base_training.WEIGHTS}: held-out loss {best.score:.4f} at step {best.step}")


def train(settings: Settings, job: Mapping[str, Any], world: World, cut: Batch, asked_to_stop: threading.Event) -> int:
    """Set the stage, take up an earlier checkpoint, and train. Returns the exit code."""
    here = device(world, settings.distributed.backend, settings.distributed.device)
    torch.set_float32_matmul_precision("high")
    corpus = open_corpus(settings, cut)
    base = base_training.find(settings, Ranks(world.rank, world.size))
    place = Place(world, here, share(socket.gethostname(), world), run_folder(job, world), asked_to_stop)
    refuse_other_data(share(str(corpus), world), place.hosts)
    training = Training(settings, cut, place, corpus, base)
    with take_over_checkpoints(training) as checkpoints:
        introduce(training)
        if not place.first:
            return run(training, checkpoints, None, job)
        try:
            with tracking.Tracker(place.run, settings.model_dump(mode="json")) as tracker:
                return run(training, checkpoints, tracker, job)
        finally:
            if str(place.run) != os.environ.get("MUSTER_RUN_DIR"):  # else the launcher writes it, with the verdict
                log.info(f"report {report.write(place.run)}")


def open_corpus(settings: Settings, cut: Batch) -> data.Corpus:
    """The text that the mode trains on and the text that it holds out. Raises DataError."""
    said, vocab_size = settings.data, settings.model.vocab_size
    if said.mode in config.TWO_PHASES:
        return data.load_two_phases(
            said.path, mode=said.mode, domains=said.domains, participant=said.participant,
            base_participants=said.base_participants, target_share=said.target_data_pct,
            mixed=config.target_windows(settings, cut.size) < cut.size, held_out=said.held_out, vocab_size=vocab_size,
        )  # fmt: skip
    return data.load(
        said.path, domains=said.domains, participant=said.participant, mode=said.mode, held_out=said.held_out,
        vocab_size=vocab_size,
    )  # fmt: skip


def refuse_other_data(corpora: list[str], hosts: list[str]) -> None:
    """Ranks that read different data would drift apart without a word, as with two versions of Python they do."""
    for rank, corpus in enumerate(corpora):
        if corpus != corpora[0]:
            raise DataError(
                f"rank {rank} on {hosts[rank]} reads other data than rank 0 on {hosts[0]}: {corpus} there, "
                f"{corpora[0]} here; give all nodes the same files and the same Python"
            )


def take_over_checkpoints(training: Training) -> Checkpoints:
    """The folder of the checkpoints, and the training set to the newest good one.

    Raises:
        ConfigError: another run holds the folder, or what is there does not fit.
    """
    said, place = training.settings.checkpoint, training.place
    folder, sharded = said.dir or place.run / "checkpoints", training.strategy == "fsdp"
    try:
        checkpoints = Checkpoints(folder, keep=said.keep, rank=place.world.rank, size=place.world.size, sharded=sharded)
        found = checkpoints.newest()
        if found:
            refuse_misfit(found, training.settings, training.vocab_size)
            refuse_another_base(found, training.base_digest)
            training.go_on_from(found, checkpoints)
            log.info(complete(found, training.steps, training.settings) or f"going on from {found.path}")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return checkpoints


def introduce(training: Training) -> None:
    """What is about to happen, on the console and in settings.json."""
    place, settings = training.place, training.settings
    world, kind = place.world, str(training.dtype).removeprefix("torch.")
    if not place.first:
        return
    facts = {"size": world.size, "nodes": len(set(place.hosts)), "strategy": training.strategy,
             "backend": dist.get_backend(), "device": str(place.here.type)}  # fmt: skip
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {**tracking.describe_machine(), "torch": torch.__version__, "gpus": gpus}
    tracking.write_settings(
        place.run, settings.model_dump(mode="json"), world=facts, machine=machine,
        model={"parameters": training.parameters, "precision": kind},
    )  # fmt: skip
    log.info(f"model  {training.parameters:,} parameters, {kind}, {training.strategy} on {world.size} "
             f"x {place.here.type} ({facts['backend']})")  # fmt: skip
    log.info(f"data   {training.corpus}")
    if training.base:
        log.info(f"base   {training.base}")
        if training.base.trained_on(settings.data.participant):
            log.warning(f"the base model was trained on text of {settings.data.participant}, too, without its end")
    log.info(f"batch  {training.cut}")
    of_windows, of = training.of_windows, ""
    if training.mixture:
        of = f" of {settings.data.participant}"
        log.info(f"mix    {of_windows} windows a step{of}, {training.cut.size - of_windows} of the base's participants")
    epochs = training.steps * of_windows / len(training.windows)
    log.info(f"steps  {training.steps:,} ({epochs:.1f} epochs of {len(training.windows):,} windows{of})")


def share(value: Any, world: World) -> list[Any]:
    """One object of each rank, on every rank."""
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def run_folder(job: Mapping[str, Any], world: World) -> Path:
    """$MUSTER_OUTPUT_DIR, else the launcher's directory of this run; without a launcher, rank 0 makes one.

    Raises:
        ConfigError: it cannot be made.
    """
    given = os.environ.get("MUSTER_OUTPUT_DIR") or os.environ.get("MUSTER_RUN_DIR")
    if world.rank == 0:
        try:
            given = given or own_run_folder(job, world)
            os.makedirs(given, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot make the run directory: {error.strerror}; "
                "give another prefix, or start in another directory"
            ) from None
    return Path(share(given, world)[0])


def own_run_folder(job: Mapping[str, Any], world: World) -> str:
    """A new one in logs or, with a prefix, in experiments/PREFIX. With a fold too it is always the same: it resumes."""
    output = os.path.abspath(output_directory(job, "job", DEFAULT_PARTICIPANTS))
    return create_run_folder(
        os.path.dirname(output) if "prefix" in job else "logs", "train", nodes=[socket.gethostname()],
        nproc=world.local_size, script=__file__, config=None, cwd=os.getcwd(), python=sys.executable,
        command=sys.argv, again=output if {"prefix", "fold"} <= job.keys() else None,
    )  # fmt: skip


def refuse(error: Exception) -> int:
    """A wrong call: one line a fault. Every rank says its own: a file may be missing on one node. Returns the code."""
    rank = os.environ.get("RANK", "0")
    name = "train.py" if rank == "0" else f"train.py, rank {rank}"
    sys.stderr.write("".join(f"{name}: {line}\n" for line in str(error).splitlines()))
    return 2


@record
def main() -> int:
    """Read the settings, join the others, train. Returns the exit code."""
    options = parser("Train a GPT on text, on one process or many.").parse_intermixed_args()
    try:
        world = World.from_env()
        settings, cut = for_ranks(options, world.size)
        tracking.check(settings.model_dump())
        level = logging.getLevelName(settings.logging.level.upper()) if world.rank == 0 else logging.ERROR
        logging.basicConfig(format="%(message)s", stream=sys.stdout, level=max(level, logging.INFO))
        for name in ("muster", "distributed"):  # debug is not for PyTorch and others
            logging.getLogger(name).setLevel(level)
        said = settings.distributed
        with stop_signals() as asked_to_stop, process_group(world, said.backend, said.timeout, said.device):
            return train(settings, job_of(options), world, cut, asked_to_stop)
    except (ConfigError, WorldError, DataError, tracking.TrackerMissing) as error:
        return refuse(error)


if __name__ == "__main__":
    leave(main())
