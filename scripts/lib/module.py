"""Run a module of the package from any directory; `python -m distributed.MODULE` works only in Muster's directory.

Usage: python [-I] module.py MODULE [ARGUMENT...]
"""

import importlib
import sys
from pathlib import Path

if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # this directory
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

sys.exit(importlib.import_module(f"distributed.{sys.argv[1]}").main(sys.argv[2:]))
