"""What pairs of measurements say: two sides that took turns, so that whatever slows the machine slows both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratio_of(ours: Sequence[float], peers: Sequence[float]) -> str:
    """Both medians in seconds, and the median of the pairs' ratios with the range of the middle half of them."""
    ratios = [our / peer for our, peer in zip(ours, peers, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"{statistics.median(ours):6.2f} s against {statistics.median(peers):6.2f} s: "
        f"ratio {middle:.2f} (half of the pairs {low:.2f} to {high:.2f}, all {min(ratios):.2f} to {max(ratios):.2f})"
    )
