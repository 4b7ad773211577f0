"""Decide after which steps a checkpoint is saved.

With checkpoint.every=auto, the interval follows from two measurements: the time that a save blocks the training, and
the time of a step. The first two saves are FIRST steps apart; the first one allocates memory and is not measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from distributed.training.collectives import Ranks

log = logging.getLogger(__name__)

FIRST = 10  # steps between saves until the cost of a save is known
RECENT = 5  # the cost is the median of this number of saves
LONGEST = 3600.0  # seconds of training between two saves
CHANGE = 1.5  # factor by which an interval must change to replace the previous one


def best_interval(cost: float, mtbf: float) -> float:
    """Return the interval between saves, in seconds of training, that minimizes the time for saves and repeated steps.

    cost: seconds that a save blocks the training. mtbf: mean time between failures, in seconds.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37. The first square root alone is the formula of J. W. Young, A first order
    approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974).
    """
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


class SaveInterval:
    """Decides after each step whether a save is due. All ranks must make the same calls, and get the same result."""

    def __init__(self, every: int | Literal["auto"], mtbf: float, ranks: Ranks, step: int) -> None:
        """every: steps between saves; 0: never due. mtbf: for auto, in seconds. step: number of completed steps."""
        self._every, self._mtbf, self._ranks = every, mtbf, ranks
        # The step of the last save, the steps between saves, and whether these were computed from measurements.
        self._saved, self._steps, self._chosen = step, FIRST, False

    def is_due(self, step: int, step_seconds: float, blocked: Sequence[float]) -> bool:
        """Return whether the caller must save after this step. With auto, a call is collective when a save may be due.

        step_seconds: duration of a step. blocked: seconds that each save so far has blocked the training. Of both
        arguments, only the values on rank 0 determine the interval.
        """
        if self._every != "auto":
            return self._every > 0 and step % self._every == 0
        if step - self._saved >= self._steps and len(blocked) > 1:
            self._choose(step_seconds, median(blocked[1:][-RECENT:]))
        if step - self._saved < self._steps:
            return False
        self._saved = step
        return True

    def _choose(self, step_seconds: float, cost: float) -> None:
        seconds = min(best_interval(cost, self._mtbf), LONGEST)
        steps = self._ranks.call_on_rank_0(lambda: max(1, round(seconds / step_seconds)))
        if self._chosen and self._steps / CHANGE <= steps <= self._steps * CHANGE:
            return
        self._steps, self._chosen = steps, True
        log.info(
            f"checkpoint every {steps:,} step{'s' * (steps > 1)}: a save takes {cost:.3g} s, a step "
            f"{step_seconds:.3g} s, a failure is expected every {self._mtbf:,.0f} s (checkpoint.mtbf)"
        )
