"""A corpus, split into windows, in an order that can be resumed.

    corpus = load(Data())                                 # or load(Data(path=Path("books/"), held_out=0.05))
    windows = Windows(corpus.train, block=128)
    order = Stream(len(windows), batch=64, rank=rank, size=size, micro=16, seed=1337, start=consumed)
    for inputs, targets in loader(windows, order, workers=2): ...

Without a path the corpus is Python's language reference, which ships with the interpreter: a third of a megabyte of
English, as bytes, in named domains. A path is a text file, a directory of text files, or nanoGPT's `.bin` token files.

Try it: python -c "from distributed.training.data import Data, load; print(load(Data()))"
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distributed.training.fold import nearest, participants_in
from distributed.training.preemption import STOP_SIGNALS
from distributed.training.settings import BASE_ONLY, TWO_PHASES, Data
from distributed.training.topics import DOMAINS, by_domain, without_repetitions

log = logging.getLogger(__name__)

BYTES = 256  # the vocabulary of text: one token is one byte
GAP = b"\n\n\n"  # between two topics, or two files
HEAD = 8192  # a file with a NUL among its first HEAD bytes is binary, as in git


class DataError(ValueError):
    """There is no training data, or it does not match the settings; the message names file, value and remedy."""


# ---------------------------------------------------------------- corpus


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence of token ids: bytes in memory, or 16-bit numbers mapped from a file."""

    ids: Tensor  # [n], uint8 or uint16
    name: str  # for messages
    vocab_size: int  # exclusive upper bound of ids, checked when a batch is read
    file: Path | None = None  # the mapped file
    first: int = 0  # offset in the mapped file, in tokens
    remedy: str = "change data.held_out"  # in the message for too few tokens

    @classmethod
    def mapped(cls, file: Path, first: int, count: int, name: str, vocab_size: int) -> Tokens:
        """Map tokens of a nanoGPT file (raw uint16, little endian); pages are read on access."""
        whole = torch.from_file(str(file), shared=False, size=first + count, dtype=torch.uint16)
        return cls(whole[first:], name, vocab_size, file, first)

    def __len__(self) -> int:
        return len(self.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a mapped file by name: worker processes map it themselves."""
        if self.file is None:
            return Tokens, (self.ids, self.name, self.vocab_size)
        return Tokens.mapped, (self.file, self.first, len(self), self.name, self.vocab_size)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training text, and held-out text for evaluation, which is never trained on."""

    name: str
    kind: Literal["bytes", "tokens"]
    train: Tokens
    held_out: Tokens
    vocab_size: int
    base: Tokens | None = None  # text of the base participants, mixed into each batch
    domains: tuple[str, ...] = ()  # of Python's language reference, or of a directory
    participant: str | None = None
    mode: str = "heldout"  # selects training and held-out text; see load()
    skipped: int = 0  # hidden, binary, empty or linked entries of a directory

    def __str__(self) -> str:
        """Describe the corpus. Checkpoints record this text."""
        parts = f"{len(self.train):,} {self.kind} to train on, {len(self.held_out):,} held out"
        parts += f", {len(self.base):,} of the base's participants" if self.base else ""
        domains = f"; domains {', '.join(self.domains)}" if self.domains else ""
        if self.participant or self.mode == BASE_ONLY:
            domains += f"; participant {self.participant}, mode" if self.participant else "; mode"
            domains += f" {self.mode}"
        skipped = f"; skipped what is hidden, binary or empty: {self.skipped}" if self.skipped else ""
        return f"{self.name}: {parts}{domains}{skipped}"


def decode(ids: Tensor) -> str:
    """Return the text of bytes; invalid UTF-8, and ids above 255, become U+FFFD."""
    return bytes(ids.clamp(max=255).tolist()).decode(errors="replace")  # 255 is never UTF-8


def load(chosen: Data, mixed: bool = False, vocab_size: int | None = None) -> Corpus:
    """Open the corpus that these settings select. Text is read into memory, token files are mapped.

    The end of every text (a file, or a topic of Python's language reference) and of a token file is for evaluation,
    whichever domains are selected. If a directory has a `val.bin`, all of it is for evaluation, and all of `train.bin`
    for training.

    A participant is a domain of the text; data.participant names one of them, the target. With a target, or with
    base_only, full_fine_tuning or from_scratch, `mode` selects the training text and the held-out text:
        heldout: train on all text of the other domains; hold out all text of the target.
        single: train on the target's text only; hold out its end.
        pooled: train on all domains without their ends; hold out the end of the target's text.
        base_only: train on the base participants (default: all but the target); hold out the ends of their texts.
        full_fine_tuning, from_scratch: as single, but only the first part of each training text is used;
            `target_data_pct` is the share that is used (above 0, up to 1).

    Args:
        mixed: with full_fine_tuning or from_scratch, also read the training text of base_only, as `base` of the corpus.
        vocab_size: required for token files; for text 256 or more (default: 256).

    Raises:
        DataError: there is no training data, or it does not match the arguments.
    """
    path, two_phases = chosen.path, chosen.mode in TWO_PHASES
    whole = path if not two_phases and chosen.domains is None and chosen.participant is None else None
    if whole:
        train = whole / "train.bin" if whole.is_dir() else whole
        if train.suffix == ".bin" and train.is_file():
            return _token_files(whole, train, chosen.held_out, vocab_size)
    version = ".".join(platform.python_version_tuple()[:2])
    name = str(path) if path else f"Python {version} language reference"
    corpus = partial(_byte_corpus, name, BYTES if vocab_size is None else vocab_size)
    if whole:
        texts, skipped = _texts(whole)
        return corpus([split(text, chosen.held_out) for text in texts], skipped=skipped)
    return _two_phases(corpus, chosen, mixed) if two_phases else _one_phase(corpus, chosen)


def _one_phase(corpus: Callable[..., Corpus], chosen: Data) -> Corpus:
    """corpus: a function that makes a corpus from pairs of training text and held-out text."""
    texts, skipped = _texts_of(chosen.path, chosen.domains)
    target, mode = chosen.participant, chosen.mode
    if target is not None:
        _chosen([target], list(texts), "data.participant")
        if mode == "single":
            texts = {target: texts[target]}
        elif len(texts) == 1:
            raise DataError(f"data.mode={mode}: there is no domain but {target}; name more, or use mode single")
    parts = []
    for domain, each in texts.items():
        for text in each:
            trained, kept = split(text, chosen.held_out)
            if target is not None and mode == "heldout":
                trained, kept = (b"", text) if domain == target else (text, b"")
            elif target is not None and domain != target:
                kept = b""
            parts.append((trained, kept))
    return corpus(parts, domains=tuple(texts), participant=target, mode=mode, skipped=skipped)


def _two_phases(corpus: Callable[..., Corpus], chosen: Data, mixed: bool) -> Corpus:
    """corpus: as for _one_phase()."""
    target, mode, named = chosen.participant, chosen.mode, chosen.base_participants
    texts, skipped = ({}, 0) if named and mode == BASE_ONLY else _texts_of(chosen.path, chosen.domains)
    if texts and target is not None:
        _chosen([target], list(texts), "data.participant")
    base: dict[str, list[bytes]] = {}
    if mixed or mode == BASE_ONLY:
        base, more = _texts_of(chosen.path, named, "data.base_participants") if named else (texts, 0)
        skipped = skipped or more
        base = {domain: each for domain, each in base.items() if domain != target}
        if not base:
            raise DataError(f"data.mode={mode}: there is no domain but {target} to train the base on; name more")
    of_base = [split(text, chosen.held_out) for each in base.values() for text in each]
    about: dict[str, Any] = {"participant": target, "mode": mode, "skipped": skipped}
    if mode == BASE_ONLY:
        return corpus(of_base, domains=tuple(base), **about)

    share = chosen.target_data_pct
    of_target = [split(text, chosen.held_out) for text in texts[str(target)]]
    of_target = [(trained[: round(len(trained) * share)], kept) for trained, kept in of_target]
    found = corpus(of_target, domains=tuple(base) if mixed else (target,), **about)
    if share < 1:
        part = f"the first {share:.4g} of the training text of {target}"
        found = replace(found, train=replace(found.train, name=part, remedy="raise data.target_data_pct"))
    if mixed:
        trained = _tensor([trained for trained, _ in of_base])
        name = f"the text of the base participants in {found.name}"
        found = replace(found, base=Tokens(trained, name, found.vocab_size))
    return found


def split(data: bytes, share: float) -> tuple[bytes, bytes]:
    """Return training text and held-out text. The held-out text is the last `share` (0 to 1) of the data."""
    cut = len(data) - int(len(data) * share)
    return data[:cut], data[cut:]


def _byte_corpus(name: str, vocab_size: int, parts: Sequence[tuple[bytes, bytes]], **more: Any) -> Corpus:
    if vocab_size < BYTES:
        raise DataError(f"model.vocab_size={vocab_size}: text is read as bytes and needs {BYTES}; leave it out")
    train = Tokens(_tensor([trained for trained, _ in parts]), name, vocab_size)
    held_out = Tokens(_tensor([kept for _, kept in parts]), f"the held-out part of {name}", vocab_size)
    return Corpus(name, "bytes", train, held_out, vocab_size, **more)


def _tensor(texts: Iterable[bytes]) -> Tensor:
    joined = bytearray(GAP).join(filter(None, texts))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


# ---------------------------------------------------------------- Python's language reference


def read_reference() -> dict[str, list[str]]:
    """Return the texts of each domain, including the held-out part."""
    try:
        from pydoc_data.topics import topics
    except ImportError as missing:
        raise DataError(
            "this Python comes without pydoc_data, the language reference: install "
            "the whole standard library (Debian, Ubuntu: apt-get install python3), or set data.path to a text"
        ) from missing
    return by_domain(without_repetitions(topics))


def _chosen(requested: Sequence[str], known: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the requested domains in the order of `known`. Raises DataError for unknown or repeated names."""
    for domain in requested:
        if domain not in known:
            raise DataError(f"{key}: no domain {domain!r}; {nearest(domain, known)}")
    if len(set(requested)) < len(requested):
        raise DataError(f"{key}={list(requested)}: name some, each once, or leave it out for all")
    return tuple(domain for domain in known if domain in requested)


# ---------------------------------------------------------------- files


def _texts_of(
    path: Path | None, domains: Sequence[str] | None, key: str = "data.domains"
) -> tuple[dict[str, list[bytes]], int]:
    """Return the texts of each domain, and the number of skipped entries. key: the setting that names the domains."""
    if path is None:
        reference = read_reference()
        chosen = DOMAINS if domains is None else _chosen(domains, DOMAINS, key)
        return {domain: [text.encode() for text in reference[domain]] for domain in chosen}, 0
    try:
        known = participants_in(path)
    except ValueError as error:
        raise DataError(str(error)) from None
    names = known if domains is None else _chosen(domains, list(known), key)
    found = {name: _texts(known[name]) for name in names}
    return {name: texts for name, (texts, _) in found.items()}, sum(skipped for _, skipped in found.values())


def _texts(path: Path) -> tuple[list[bytes], int]:
    """Return the text of a file, or of all files below a directory, and the number of skipped entries."""
    files = _files(path) if path.is_dir() else [path]
    texts = [text for file in files if file == path or not file.name.startswith(".") if (text := _text(file))]
    if not texts:
        what = f"no text among {len(files)} entries" if path.is_dir() else "no text in this file"
        raise DataError(
            f"data.path={path}: {what}, only what is hidden, binary or empty; give text, or tokens in files "
            "named train.bin and val.bin; a single token file may have any name that ends in .bin"
        )
    return texts, len(files) - len(texts)


def _files(directory: Path) -> list[Path]:
    """Return all files below the directory, sorted. Hidden and linked directories are listed, but not entered."""

    def refuse(fault: OSError) -> None:
        raise DataError(f"cannot read {fault.filename}: {fault.strerror}") from fault

    found = []
    for parent, directories, files in os.walk(directory, onerror=refuse):
        skipped = [name for name in directories if name.startswith(".") or Path(parent, name).is_symlink()]
        directories[:] = [name for name in directories if name not in skipped]
        found += [Path(parent, name) for name in files + skipped]
    return sorted(found)


def _text(file: Path) -> bytes:
    """Return the bytes of a text file; empty if it is binary or not a regular file (a pipe, a linked directory)."""
    if file.exists() and not file.is_file():
        return b""
    try:
        data = file.read_bytes()
    except OSError as fault:
        raise DataError(f"cannot read {file}: {fault.strerror}") from fault
    return b"" if b"\0" in data[:HEAD] else data


def _token_files(path: Path, train: Path, share: float, vocab_size: int | None) -> Corpus:
    if vocab_size is None:
        raise DataError(
            f"data.path={path} holds token ids, and a token file does not record the vocabulary size: set "
            "model.vocab_size to that of the tokenizer that wrote it (50257 for GPT-2)"
        )
    count, val = _count(train), train.with_name("val.bin")
    if path.is_dir() and val.is_file():
        held_out = Tokens.mapped(val, 0, _count(val), str(val), vocab_size)
    else:
        kept = int(count * share)
        count -= kept
        held_out = Tokens.mapped(train, count, kept, f"the held-out part of {train}", vocab_size)
    trained = Tokens.mapped(train, 0, count, str(train), vocab_size)
    return Corpus(str(path), "tokens", trained, held_out, vocab_size)


def _count(file: Path) -> int:
    """Return the number of 16-bit tokens in a file, at least 1."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
    except OSError as fault:
        raise DataError(f"cannot read {file}: {fault.strerror}") from fault
    if size == 0 or size % 2:
        what = "is empty" if size == 0 else f"has {size} bytes, an odd number"
        raise DataError(f"{file} {what}: a .bin file is uint16 tokens, two bytes each (text: rename it .txt)")
    return size // 2


# ---------------------------------------------------------------- windows

Pair = tuple[Tensor, Tensor]


class Windows(Dataset[Pair]):
    """Consecutive windows of `block` tokens; the targets of a window are its inputs shifted by one token.

    Up to `block` tokens at the end belong to no window.
    """

    def __init__(self, tokens: Tokens, block: int) -> None:
        if len(tokens) <= block:
            raise DataError(
                f"{tokens.name} has {len(tokens)} tokens, too few for one window of {block} and its target: "
                f"lower model.block_size, give more text, or {tokens.remedy}"
            )
        self.tokens, self.block = tokens, block

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, indices: list[int] | Tensor) -> Pair:
        """Return a batch of windows: inputs and targets, LongTensor [n, block] each.

        Raises:
            DataError: a token is outside the vocabulary. Each batch is checked, because a scan of the whole file at the
                start would take longer than many trainings (10 GB).
        """
        rows = self.tokens.ids.unfold(0, self.block + 1, self.block)[indices].long()  # [n, block + 1]
        if rows.max() >= self.tokens.vocab_size:
            row, column = (rows >= self.tokens.vocab_size).nonzero()[0].tolist()
            position = self.tokens.first + int(indices[row]) * self.block + column
            raise DataError(
                f"{self.tokens.name}: token {int(rows[row, column])} at position {position}, but "
                f"model.vocab_size={self.tokens.vocab_size}: set it to that of the tokenizer that wrote the file"
            )
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Mixture(Dataset[Pair]):
    """The windows of a target, followed by those of a base: base windows are numbered from len(target)."""

    def __init__(self, target: Windows, base: Windows) -> None:
        self.target, self.base = target, base

    def __len__(self) -> int:
        return len(self.target) + len(self.base)

    def __getitem__(self, indices: list[int]) -> Pair:
        """Return a batch: inputs and targets, LongTensor [n, block] each, the target's windows first."""
        first = len(self.target)
        of_target = [index for index in indices if index < first]
        of_base = [index - first for index in indices if index >= first]
        parts = [windows[chosen] for windows, chosen in ((self.target, of_target), (self.base, of_base)) if chosen]
        return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


# ---------------------------------------------------------------- order


class Stream:
    """The endless order of windows, as one rank's micro-batches: a batch sampler for a DataLoader.

    The stream is a sequence of epochs, each a permutation of all windows drawn from (seed, epoch). Global batch s is
    stream[s * batch : (s + 1) * batch]. A batch may span two epochs, so no window is dropped or padded, and each epoch
    contains each window exactly once. Each rank takes a contiguous part of the global batch, split into micro-batches,
    so the windows of a global batch do not depend on the number of ranks:

        batch 8, 2 ranks, micro 2:   rank 0 [0 1] [2 3]   rank 1 [4 5] [6 7]

    To resume, also with another batch size or number of ranks, `start` is the number of windows that all ranks
    together have trained on. The number of windows that this sampler has yielded is higher: workers read ahead.

    An epoch's permutation is held in memory, 8 bytes a window: 100 million windows take 0.8 GB and seconds.
    """

    def __init__(
        self,
        windows: int,
        batch: int,
        *,
        rank: int = 0,
        size: int = 1,
        micro: int | None = None,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        if min(windows, batch, size) < 1 or start < 0 or not 0 <= rank < size or batch % size:
            raise ValueError(
                f"no stream of {windows=} {batch=} {rank=} {size=} {start=}: batch must be a multiple of size"
            )
        share = batch // size
        micro = share if micro is None else micro
        if micro < 1 or share % micro:
            raise ValueError(f"{micro=}: a rank's share of {share} windows is not divisible by it")
        self.windows, self.batch, self.share, self.micro = windows, batch, share, micro
        self.seed, self.first = seed, start + rank * share
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from `start` on, endlessly; each new iterator begins at `start`."""
        for first in itertools.count(self.first, self.batch):
            for position in range(first, first + self.share, self.micro):
                yield self._slice(position, self.micro)

    def _slice(self, position: int, count: int) -> list[int]:
        """Return stream[position : position + count]."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), self.windows)
            taken += self._permutation(epoch)[offset : offset + count - len(taken)].tolist()
        return taken

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self.windows, self.seed, epoch)
            log.debug(f"data: epoch {epoch} of {self.windows:,} windows begins with {self._order[:8].tolist()}")
        return self._order


class MixedStream:
    """The endless order of the windows of a Mixture, as one rank's micro-batches.

    Global batch s is the next `of_target` windows of the target's Stream, then the next windows of the base's:

        batch 8, of_target 2, 2 ranks, micro 2:   rank 0 [T T] [B B]   rank 1 [B B] [B B]

    start: the number of windows that all ranks together have trained on, as for Stream; both streams resume.
    options: rank, size and micro, as for Stream.
    """

    def __init__(self, windows: Mixture, batch: int, of_target: int, seed: int, start: int, **options: int) -> None:
        taken = start * of_target // batch  # windows of the target; exact unless the batch size has changed
        self.target = Stream(len(windows.target), of_target, seed=seed, start=taken)
        self.base = Stream(len(windows.base), batch - of_target, seed=seed, start=start - taken)
        # This Stream checks divisibility, and its attributes give this rank's part of a batch. It is never iterated.
        self.part = Stream(batch, batch, **options)
        self.first = len(windows.target)  # the first window of the base

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from `start` on, endlessly; each new iterator begins at `start`."""
        begin, end = self.part.first, self.part.first + self.part.share
        for target, base in zip(self.target, self.base, strict=True):
            whole = target + [self.first + window for window in base]
            for position in range(begin, end, self.part.micro):
                yield whole[position : position + self.part.micro]


def permutation(windows: int, seed: int, epoch: int) -> Tensor:
    """Return all windows in the order of one epoch: LongTensor [windows]."""
    # Hashed: with seed + epoch, the second epoch of seed 0 would equal the first epoch of seed 1.
    mixed = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return torch.randperm(windows, generator=torch.Generator().manual_seed(int.from_bytes(mixed, "big")))


def held_out_batches(windows: int, batch: int, rank: int = 0, size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each window exactly once over all ranks. All batches have the same size; all ranks get the same number.

    Yields (indices, weights), [batch] each: padding has weight 0, every other window 1. The held-out loss is
    sum(weight x loss) / sum(weight), both summed over all ranks.
    """
    for first in range(0, windows, batch * size):
        indices = first + rank + size * torch.arange(batch)
        yield indices.clamp(max=windows - 1), (indices < windows).float()


# ---------------------------------------------------------------- loading


def loader(
    windows: Dataset[Pair], order: Iterable[list[int]], *, workers: int = 0, pin_memory: bool = False, seed: int = 0
) -> DataLoader[Pair]:
    """A DataLoader of (inputs, targets), LongTensor [n, block] each, in the given order.

    It has its own random generator: otherwise each iterator would draw from the global generator, and a resumed run,
    which makes one more iterator, would not be bit-for-bit equal to an uninterrupted one.
    """
    return DataLoader(
        windows,
        sampler=order,  # yields the indices of a whole batch
        batch_size=None,  # the Dataset returns whole batches, so no batch is collated
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        worker_init_fn=_worker_init() if workers else None,
        generator=torch.Generator().manual_seed(seed),
    )


def _worker_init() -> Callable[[int], None]:
    """Return a worker_init_fn that makes workers ignore stop signals until the trainer exits.

    Ctrl-C and SLURM signal workers too, and a trainer that loses a worker fails before its last checkpoint. When the
    trainer exits, multiprocessing sends SIGTERM to workers and waits: then they must exit.
    """
    leaving = RawValue("b", 0)
    Finalize(None, setattr, args=(leaving, "value", 1), exitpriority=0)  # runs before those signals are sent
    return partial(_ignore_stop_signals, leaving)


def _ignore_stop_signals(leaving: Any, worker: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0) if leaving.value else None)
