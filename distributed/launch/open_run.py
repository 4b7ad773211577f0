"""Open a run: compare the replies of the nodes, then create the run directory. One process for both saves time.

    python -m distributed.launch.open_run [compare ARGUMENT...] [create ARGUMENT...]

The arguments are those of distributed.launch.preflight, which prints the rendezvous address, and of
distributed.runs.run_directory, which prints the path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distributed.launch import preflight
from distributed.runs import run_directory


def main(arguments: Sequence[str]) -> int:
    """Returns 0; UNFIT for incompatible nodes; 2 for a wrong call, or if the run directory cannot be created."""
    end = arguments.index("create") if "create" in arguments else len(arguments)
    if end and (code := preflight.main(arguments[1:end])):
        return code
    sys.stdout.flush()
    return run_directory.main(arguments[end:]) if arguments[end:] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
