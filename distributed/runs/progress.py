"""How far has a run come? Prints the furthest step of its metrics.jsonl, and nothing when it writes none.

Try it: python -m distributed.runs.progress logs/latest
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def furthest(run: Path) -> int | None:
    """The highest step that any try of this run has logged."""
    return max(steps(run / "metrics.jsonl"), default=None)


def steps(metrics: Path) -> Iterator[int]:
    """The steps of the lines that can be read."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(
            ValueError, TypeError, KeyError, OverflowError, RecursionError
        ):  # cut short, or about something else
            yield int(json.loads(line)["step"])


def main(words: Sequence[str]) -> int:
    step = furthest(Path(words[0]))
    print("" if step is None else step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
