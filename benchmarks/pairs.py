"""Statistics of paired measurements.

Muster and its peer, the program that it is compared with, are measured alternately, so a time in which the machine is
slow affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratio_of(muster: Sequence[float], peers: Sequence[float]) -> str:
    """Describe both medians in seconds, and the median and quartiles of the ratios."""
    ratios = [own / peer for own, peer in zip(muster, peers, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"{statistics.median(muster):6.2f} s against {statistics.median(peers):6.2f} s: "
        f"ratio {middle:.2f} (half of the pairs {low:.2f} to {high:.2f}, all {min(ratios):.2f} to {max(ratios):.2f})"
    )
