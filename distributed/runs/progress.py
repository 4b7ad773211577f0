"""The furthest step of a run by its metrics.jsonl; prints nothing when there is none.

Try it: python -m distributed.runs.progress logs/latest
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def furthest(run: Path) -> int | None:
    """The highest step that any attempt of this run has logged."""
    steps = []
    with contextlib.suppress(OSError):
        for line in (run / "metrics.jsonl").read_bytes().splitlines():
            # A line that is cut short, or has no step.
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                steps.append(int(json.loads(line)["step"]))
    return max(steps, default=None)


def main(words: Sequence[str]) -> int:
    step = furthest(Path(words[0]))
    print("" if step is None else step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
