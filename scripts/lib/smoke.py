"""Run the smoke test from any directory; see distributed/smoke/collective_checks.py, or --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distributed.smoke.collective_checks import main
from distributed.torch import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
