"""A table that shows how costs grow with the size of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def exponent(sizes: Sequence[int], values: Sequence[float | None]) -> str:
    """The exponent e if values grow as size ** e, from the two largest sizes that have a value; 1.0: linear growth."""
    known = [(size, value) for size, value in zip(sizes, values, strict=True) if value]
    if len(known) < 2:
        return "–"
    (small, low), (large, high) = known[-2:]
    return f"{math.log(high / low) / math.log(large / small):.1f}"


def table(head: str, sizes: Sequence[int], rows: Mapping[str, Sequence[float | None]]) -> str:
    """The rows as text: a value for each size ("–" if it is missing), then the exponent of growth."""
    width = max(map(len, (head, *rows)))
    lines = [f"{head:{width}}" + "".join(f"{size:>10,}" for size in sizes) + "  exponent"]
    for name, values in rows.items():
        cells = ("–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
        lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells) + f"{exponent(sizes, values):>10}")
    return "\n".join(lines)
