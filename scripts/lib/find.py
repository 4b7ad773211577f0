"""Is there such a module? Searched for as `python -m` would in this folder, and not imported: PyTorch takes a second.

Usage: python find.py MODULE     exit code 0: there is, 1: there is not
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

sys.path[0] = ""
name, *inner = sys.argv[1].split(".")
found = find_spec(name) if name else None
for part in inner:
    name = f"{name}.{part}"
    found = PathFinder.find_spec(name, found.submodule_search_locations or []) if found else None
sys.exit(found is None)
