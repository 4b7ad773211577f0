"""Record what modules import, from the import of this module on; see distributed/agent/preloaded.py.

It imports no other module: the interpreter itself has imported sys and builtins.
"""

import builtins
import sys

INITIAL_MODULES = frozenset(sys.modules) - {__name__}  # the modules that the interpreter itself has imported
# Module -> name, level, package and fromlist of each of its import statements. Those of PyTorch are left out.
IMPORTS = {}  # type: ignore[var-annotated]
_import = builtins.__import__


def _record(name, globals=None, locals=None, fromlist=(), level=0):  # type: ignore[no-untyped-def]  # noqa: A002
    importer = (globals or {}).get("__name__") or ""
    if importer and not importer.startswith("torch"):  # first, because most imports are those of PyTorch
        package = globals.get("__package__") or ""
        if importer == "importlib._bootstrap":  # it initializes an extension module: args has its spec, or itself
            initialized = (sys._getframe(1).f_locals.get("args") or [""])[0]
            importer = getattr(initialized, "name", "") or getattr(initialized, "__name__", "")
        IMPORTS.setdefault(importer, []).append((name, level, package, fromlist or ()))
    return _import(name, globals, locals, fromlist, level)


def stop() -> None:
    """Record no further imports, and remove this module, which a fresh interpreter does not have."""
    builtins.__import__ = _import
    sys.modules.pop(__name__, None)


builtins.__import__ = _record
