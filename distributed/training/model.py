"""The GPT that train.py trains, and text generation."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distributed.training.data import Corpus, decode
from distributed.training.settings import Model

log = logging.getLogger("muster")
SAMPLE_SECONDS = 10.0  # time limit of the sample at the end


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, m: Model) -> None:
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
    """Pre-norm transformer block: attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, m: Model) -> None:
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
    """A GPT-2 language model with tied input and output embeddings."""

    def __init__(self, m: Model, vocab_size: int, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.block_size, self.dropout, self.gradient_checkpointing = m.block_size, m.dropout, gradient_checkpointing
        self.tokens = nn.Embedding(vocab_size, m.n_embd)
        self.positions = nn.Embedding(m.block_size, m.n_embd)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layer))
        self.norm = nn.LayerNorm(m.n_embd, bias=m.bias)
        self.head = nn.Linear(m.n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # As in GPT-2: the residual stream sums 2 n_layer terms, so each is scaled by 1 / sqrt(2 n_layer).
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * m.n_layer) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """inputs, targets: [batch, time]. Returns logits [batch, time, vocabulary].

        With targets, returns the mean loss of each window instead: [batch], in nats per token.
        """
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            recompute = self.gradient_checkpointing and self.training
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(1)


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, block_size: int, temperature: float = 0.8) -> Iterator[Tensor]:
    """Continue a prompt [time]: yield one token [1] at a time, without end."""
    draw = torch.Generator(device=prompt.device).manual_seed(0)
    written = prompt
    while True:
        logits = model(written[None])[0, -1] / temperature
        token = torch.multinomial(logits.float().softmax(0), 1, generator=draw)
        written = torch.cat([written, token])[-block_size:]
        yield token


def sample(
    model: GPT,
    corpus: Corpus,
    length: int,
    *,
    runs_model: bool,
    first_rank: bool,
    stop: threading.Event,
    autocast: torch.autocast,
) -> str:
    """On rank 0, return generated text with a heading; on other ranks, return "". Collective.

    If the corpus consists of token files, rank 0 returns "" too.

    After each token all ranks agree whether to continue: they stop after SAMPLE_SECONDS, or when one has `stop` set.

    Args:
        length: in tokens.
        runs_model: whether this rank runs the model. One rank is enough unless the weights are sharded.
        first_rank: whether this is rank 0.
    """
    if not length or corpus.kind != "bytes":
        return ""
    device = next(model.parameters()).device
    prompt = torch.tensor([ord("\n")], device=device)
    tokens, written = generate(model, prompt, model.block_size), list[Tensor]()
    model.eval()
    start = time.perf_counter()
    with autocast:
        while len(written) < length:
            written.append(next(tokens) if runs_model else prompt)
            timed_out = first_rank and time.perf_counter() - start >= SAMPLE_SECONDS
            flags = torch.tensor([stop.is_set(), timed_out], dtype=torch.float32, device=device)
            dist.all_reduce(flags)
            stopped, timed_out = (total > 0 for total in flags.tolist())
            if stopped or timed_out:
                break
    model.train()
    if stopped:
        log.info("stop request: all steps are done; sample shortened")
    if not first_rank:
        return ""
    shortened = timed_out and len(written) < length
    part = f" ({len(written)} of {length:,} tokens, in {SAMPLE_SECONDS:g} s)" if shortened else ""
    text = decode(torch.cat(written)).strip()
    return f"a sample{part}:\n\n" + "".join(f"    {line}\n" for line in text.splitlines())
