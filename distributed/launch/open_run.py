"""Open a run: compare what the nodes have replied, then make the run directory. One process for both.

    python -m distributed.launch.open_run [compare ARGUMENT...] [create ARGUMENT...]

The arguments are those of distributed.launch.preflight, which prints where the ranks meet, and of
distributed.runs.run_directory, which prints the path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distributed.launch import preflight
from distributed.runs import run_directory


def main(words: Sequence[str]) -> int:
    """Returns 0; or UNFIT, when the nodes do not fit together, or 2, and nothing is made."""
    end = words.index("create") if "create" in words else len(words)
    if end and (code := preflight.main(words[1:end])):
        return code
    sys.stdout.flush()
    return run_directory.main(words[end:]) if words[end:] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
