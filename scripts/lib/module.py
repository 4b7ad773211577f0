"""Run a module of the package from any folder, in which `python -m distributed.MODULE` would not find it.

Usage: python module.py MODULE [WORD...]
"""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

sys.exit(importlib.import_module(f"distributed.{sys.argv[1]}").main(sys.argv[2:]))
