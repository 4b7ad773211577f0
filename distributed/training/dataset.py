"""What the settings of a run train on: its corpus, the windows of it, and their order."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from distributed import config
from distributed.config import Batch, Settings
from distributed.training import data
from distributed.training.collectives import Ranks
from distributed.training.data import Corpus, DataError, Mixture, Windows

log = logging.getLogger("muster")


@dataclass(frozen=True)
class TrainingData:
    """Windows of a corpus, and how many of them make a global batch."""

    corpus: Corpus
    train: Windows
    held_out: Windows
    mixture: Mixture | None  # of the windows to train on and those of the base's participants
    batch: Batch
    target_windows: int  # of a global batch; the others of a mixture are those of the base's participants

    @classmethod
    def open(cls, settings: Settings, batch: Batch, ranks: Ranks, hosts: Sequence[str]) -> TrainingData:
        """Open the corpus of the mode. Collective. hosts: of each rank.

        Ranks that read different data, as they do with two versions of Python, would diverge silently.

        Raises:
            DataError: nothing there to train on, or ranks read different data.
        """
        corpus = _corpus(settings, batch)
        corpora = ranks.all_gather(str(corpus))
        for rank, other in enumerate(corpora):
            if other != corpora[0]:
                raise DataError(
                    f"rank {rank} on {hosts[rank]} reads other data than rank 0 on {hosts[0]}: {other} there, "
                    f"{corpora[0]} here; give all nodes the same files and the same Python"
                )
        block = settings.model.block_size
        train, held_out = Windows(corpus.train, block), Windows(corpus.held_out, block)
        mixture = Mixture(train, Windows(corpus.base, block)) if corpus.base is not None else None
        return cls(corpus, train, held_out, mixture, batch, config.target_windows(settings, batch.size))

    def steps(self, train: config.Train) -> int:
        """Of the whole training."""
        return train.steps or math.ceil((train.epochs or 0) * len(self.train) / self.target_windows)

    def describe(self, steps: int) -> str:
        """Lines for the console: what a step takes from a mixture, and how many steps there are."""
        participant, mix = "", ""
        if self.mixture:
            participant = f" of {self.corpus.participant}"
            of_base = self.batch.size - self.target_windows
            mix = f"mix    {self.target_windows} windows a step{participant}, {of_base} of the base's participants\n"
        epochs = steps * self.target_windows / len(self.train)
        return f"{mix}steps  {steps:,} ({epochs:.1f} epochs of {len(self.train):,} windows{participant})"

    def batches(
        self, ranks: Ranks, start: int, *, seed: int, workers: int, pin_memory: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of this rank, without end. start: the windows that all ranks have trained on so far."""
        log.debug(
            f"data: {len(self.train):,} windows of {self.corpus.name}, order of seed {seed} from position {start:,}"
        )
        size, place = self.batch.size, {"rank": ranks.rank, "size": ranks.size, "micro": self.batch.micro}
        order: Iterable[list[int]]
        if self.mixture:
            order = data.MixedStream(self.mixture, size, self.target_windows, **place, seed=seed, start=start)
        else:
            order = data.Stream(len(self.train), size, **place, seed=seed, start=start)
        windows = self.mixture or self.train
        return iter(data.loader(windows, order, workers=workers, pin_memory=pin_memory, seed=seed))


def _corpus(settings: Settings, batch: Batch) -> Corpus:
    said, vocab_size = settings.data, settings.model.vocab_size
    if said.mode in config.TWO_PHASES:
        return data.load_two_phases(
            said.path, mode=said.mode, domains=said.domains, participant=said.participant,
            base_participants=said.base_participants, target_share=said.target_data_pct,
            mixed=config.target_windows(settings, batch.size) < batch.size, held_out=said.held_out,
            vocab_size=vocab_size,
        )  # fmt: skip
    return data.load(
        said.path, domains=said.domains, participant=said.participant, mode=said.mode, held_out=said.held_out,
        vocab_size=vocab_size,
    )  # fmt: skip
