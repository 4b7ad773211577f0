"""The training data that the settings select: corpus, windows, and their order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from distributed.training import data
from distributed.training.collectives import Ranks
from distributed.training.data import Corpus, DataError, Mixture, Pair, Windows
from distributed.training.settings import Batch, Settings, Train, target_windows

log = logging.getLogger("muster")


@dataclass(frozen=True)
class TrainingData:
    """The windows of a corpus, and the composition of a global batch.

    Base participants are the participants on whose text the base model was trained.
    """

    corpus: Corpus
    train: Windows
    held_out: Windows
    mixture: Mixture | None  # of the training windows and those of the base participants
    batch: Batch
    target_windows: int  # training windows per global batch; a mixture fills the rest from the base participants

    @classmethod
    def open(cls, settings: Settings, batch: Batch, ranks: Ranks, hosts: Sequence[str]) -> TrainingData:
        """Open the corpus that the settings select. Collective. hosts: the host name of each rank.

        Raises DataError when there is no training data, and when ranks read different data, which nothing else
        would detect. The default text comes with Python, and differs between versions of Python.
        """
        of_target = target_windows(settings, batch.size)
        corpus = data.load(settings.data, mixed=of_target < batch.size, vocab_size=settings.model.vocab_size)
        corpora = ranks.all_gather(str(corpus))
        for rank, other in enumerate(corpora):
            if other != corpora[0]:
                raise DataError(
                    f"rank {rank} on {hosts[rank]} reads other data than rank 0 on {hosts[0]}: {other} instead of "
                    f"{corpora[0]}; give all nodes the same files and the same Python"
                )
        block = settings.model.block_size
        train, held_out = Windows(corpus.train, block), Windows(corpus.held_out, block)
        mixture = Mixture(train, Windows(corpus.base, block)) if corpus.base is not None else None
        return cls(corpus, train, held_out, mixture, batch, of_target)

    def steps(self, train: Train) -> int:
        """Return the total number of steps."""
        return train.steps or math.ceil((train.epochs or 0) * len(self.train) / self.target_windows)

    def describe(self, steps: int) -> str:
        """Return the console lines on the composition of a batch and the number of steps."""
        participant, mix = "", ""
        if self.mixture:
            participant = f" of {self.corpus.participant}"
            of_base = self.batch.size - self.target_windows
            mix = f"mix    {self.target_windows} windows per step{participant}, {of_base} of the base participants\n"
        epochs = steps * self.target_windows / len(self.train)
        return f"{mix}steps  {steps:,} ({epochs:.1f} epochs of {len(self.train):,} windows{participant})"

    def batches(self, settings: Settings, ranks: Ranks, start: int, device: torch.device) -> Iterator[Pair]:
        """Yield this rank's micro-batches without end: inputs and targets, LongTensor [micro, block] each.

        start: number of windows that all ranks together have trained on so far. device: the device that uses the
        micro-batches.
        """
        seed, pin_memory = settings.train.seed, settings.data.pin_memory and device.type == "cuda"
        log.debug(
            f"data: {len(self.train):,} windows of {self.corpus.name}, order of seed {seed} from position {start:,}"
        )
        size, share = self.batch.size, {"rank": ranks.rank, "size": ranks.size, "micro": self.batch.micro}
        order: Iterable[list[int]]
        if self.mixture:
            order = data.MixedStream(self.mixture, size, self.target_windows, **share, seed=seed, start=start)
        else:
            order = data.Stream(len(self.train), size, **share, seed=seed, start=start)
        windows = self.mixture or self.train
        return iter(data.loader(windows, order, workers=settings.data.workers, pin_memory=pin_memory, seed=seed))
