"""Check settings from any folder: `python -m distributed.config`, where paths stay relative to the caller."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from distributed.config import main  # noqa: E402

sys.exit(main())
