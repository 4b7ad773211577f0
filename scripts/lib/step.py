"""Run srun and watch over its tasks; see distributed/step.py.

Usage: python step.py --run DIR --nodes NODE:TASKS... -- SRUN [WORD...]
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from distributed.step import main  # noqa: E402

sys.exit(main())
