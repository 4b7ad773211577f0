"""Look around on a node for `distributed.preflight`, from the folder in which the ranks will run."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from distributed.preflight import main  # noqa: E402

sys.exit(main())
