"""Run a module of the package from any directory; `python -m distributed.MODULE` works only in Muster's directory.

Usage: python module.py MODULE [ARGUMENT...]
"""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

sys.exit(importlib.import_module(f"distributed.{sys.argv[1]}").main(sys.argv[2:]))
