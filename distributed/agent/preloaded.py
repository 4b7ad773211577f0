"""Hide modules that a process imported before its script starts, until the script imports them.

A rank is a fork of a process that has imported PyTorch. Its script must find the state of a fresh interpreter:
sys.modules has only what the script has imported, with what these modules import, and a module in the script's
directory precedes a standard module of the same name. PyTorch reads its environment variables before the script can
change them: changes of these variables are detected and reported. Standard library only.

Known differences: if a module in the script's directory has the name of a standard module, PyTorch uses the standard
module. In a fresh interpreter, PyTorch would use the module of the script. A module that the interpreter itself has
imported, such as importlib, has hidden submodules as attributes already.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.util import resolve_name
from types import ModuleType
from typing import Any, cast

# Variables that native libraries read when loaded, found by recording getenv(3) during `import torch` (2.10, 2.13 and
# 2.15, builds with and without CUDA). The script may set variables that are read later (NCCL_*, CUDA_*, TORCH_NCCL_*).
NATIVE = re.compile(
    "(OMP|GOMP|KMP|OPENBLAS|GOTO|MKLDNN|NPY)_.*"
    "|MKL_(NUM_THREADS|DOMAIN_NUM_THREADS|DYNAMIC|DISABLE_FAST_MM|FAST_MEMORY_LIMIT|NUM_STRIPES)"
    "|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE"
    "|PYTORCH_(ALLOC_CONF|CUDA_ALLOC_CONF|API_USAGE_STDERR)"
    "|TORCH_(ALLOW_TF32_CUBLAS_OVERRIDE|(BLAS|LINALG|ROCM_FA)_PREFER_.*|CPP_LOG_LEVEL|CUSTOM_TERMINATE"
    "|DISTRIBUTED_DEBUG|SHOW_CPP_STACKTRACES|SYMMMEM|VITAL)"
)
READ_ENVIRONMENT_AT_IMPORT = ("torch", "numpy")
Import = tuple[str, int, str, Any]  # an import statement: name, level, package, fromlist


class Preload:
    """What a process has imported on behalf of its forks, and the side effects of these imports."""

    def __init__(self, fresh: Collection[str], imports: Mapping[str, Sequence[Import]]) -> None:
        """fresh: names of the modules that the interpreter itself has imported. imports: what each module imports."""
        self.fresh, self._imports = frozenset(fresh), imports
        self.filters, self.stderr = list(warnings.filters), sys.stderr
        self.read: set[str] = set()  # names of environment variables
        self.set: dict[str, str] = {}  # environment variables

    @contextmanager
    def record_environment_reads(self) -> Iterator[None]:
        """Record which environment variables are read and set inside the block. At its end, they are as before."""
        kind: Any = type(os.environ)
        read = self.read

        class Recorded(kind):  # type: ignore[misc]
            def __getitem__(self, name: str) -> str:
                read.add(name)
                return str(super().__getitem__(name))

        before = dict(os.environ)
        os.environ.__class__ = Recorded
        try:
            yield
        finally:
            os.environ.__class__ = kind
            self.set = {name: value for name, value in os.environ.items() if before.get(name) != value}
            os.environ.clear()
            os.environ.update(before)

    def imports_of(self, module: str) -> Iterator[str]:
        """The names of the modules that a module has imported; some are names of attributes."""
        for name, level, package, members in self._imports.get(module, ()):
            imported = resolve_name("." * level + name, package) if level else name
            parts = imported.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            yield from (f"{imported}.{member}" for member in members)

    def is_read(self, name: str) -> bool:
        """Whether the imports have read this variable. Names without "_", such as HOME, are ignored."""
        if name.startswith("KMP_") and not _has_loaded(r"libi?omp[\w-]*\.so"):  # GNU's OpenMP does not read these
            return False
        return bool(NATIVE.fullmatch(name)) or (name in self.read and "_" in name.strip("_"))

    def hide(self) -> HiddenModules:
        """Reset sys.modules and warnings.filters to those of a fresh interpreter."""
        kept = self.fresh | {"__main__"}
        modules = {
            name: sys.modules.pop(name) for name, module in list(sys.modules.items()) if module and name not in kept
        }
        added = [entry for entry in warnings.filters if entry not in self.filters]
        warnings.filters[:] = self.filters  # type: ignore[index]
        hidden = HiddenModules(self, modules, added)
        sys.meta_path.insert(0, hidden)
        return hidden


class HiddenModules:
    """A finder for sys.meta_path that returns hidden modules on import, in any thread."""

    def __init__(self, preload: Preload, modules: dict[str, ModuleType], filters: Sequence[Any]) -> None:
        self._preload, self._modules, self._filters = preload, modules, filters
        self._shown: set[str] = set()
        # Module -> names that it has added to sys.modules, such as typing.io and importlib._bootstrap.
        self._made: dict[str, list[str]] = {}
        for name, module in modules.items():
            if getattr(getattr(module, "__spec__", None), "name", None) != name:
                parent = "multiprocessing" if name == "__mp_main__" else name.rpartition(".")[0]
                self._made.setdefault(parent, []).append(name)
        self._handlers = getattr(modules.get("logging"), "_handlerList", ())
        self._replaced: dict[str, str] = {}  # hidden module -> file of the script that has its name
        self._environment = dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of the hidden module, unless a fresh interpreter would find another module."""
        module = self._modules.get(name)
        removed = name in self._shown and name not in sys.modules  # by the script, to import it again
        if module is None or removed or target is not None:  # importlib.reload() passes a target
            return None
        found = self._find_with_other_finders(name, path)
        if not _is_same_module(module, found):
            self._forget(name, found)
            return found
        if found is None:  # a package has created the module at run time, so no finder knows the module
            found = ModuleSpec(name, None, is_package=hasattr(module, "__path__"))
        found.loader = HiddenLoader(self, found.loader)  # type: ignore[assignment]
        return found

    def load(self, name: str) -> ModuleType:
        """Return the hidden module to a script that imports it."""
        if name in READ_ENVIRONMENT_AT_IMPORT:
            self._warn_of_changes(name)
        if name == "torch":  # in a fresh interpreter, `import torch` imports all modules that are hidden here
            self.reveal()
        module = self._modules[name]
        self._show(self._with_imports(name))
        return module

    def reveal(self) -> None:
        """Show all hidden modules."""
        for name, module in list(self._modules.items()):
            is_hidden_package = "." not in name and name not in sys.modules
            found = self._find_with_other_finders(name) if is_hidden_package else None
            if not _is_same_module(module, found):
                self._forget(name, found)
        for name, file in self._replaced.items():
            sys.stderr.write(f"warning: {file}: hides the module {name}, which PyTorch imports; rename this file\n")
        self._show(list(self._modules))
        os.environ.update({name: value for name, value in self._preload.set.items() if name not in os.environ})
        warnings.filters[:0] = self._filters  # type: ignore[index]
        for handler in [reference() for reference in self._handlers]:
            if vars(handler).get("stream") is self._preload.stderr:
                handler.stream = sys.stderr

    def _with_imports(self, name: str) -> list[str]:
        """This module, its submodules and what they import: the standard library expects these in sys.modules."""
        found, unvisited = dict.fromkeys(self._with_submodules(name)), self._with_submodules(name)
        same: dict[str, bool] = {}  # top-level module -> whether a fresh interpreter would find it
        while unvisited:
            for one in self._preload.imports_of(unvisited.pop()):
                if one in self._modules and one not in found and one not in self._shown:
                    top = one.partition(".")[0]
                    if top not in same:
                        same[top] = self._is_standard(top)
                    if same[top]:
                        found |= dict.fromkeys([one, *self._made.get(one, ())])
                        unvisited.append(one)
        return list(found)

    def _is_standard(self, name: str) -> bool:
        """Whether Python's own finders find this module. Other finders may import modules themselves."""
        specs = (finder.find_spec(name) for finder in (BuiltinImporter, FrozenImporter, PathFinder))
        module = self._modules.get(name) or sys.modules.get(name)
        return module is not None and _is_same_module(module, next(filter(None, specs), None))

    def _show(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._shown:
                sys.modules.setdefault(name, self._modules[name])
                self._shown.add(name)

    def _find_with_other_finders(self, name: str, path: Any = None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find and (found := find(name, path, None)):
                return cast(ModuleSpec, found)
        return None

    def _forget(self, name: str, found: ModuleSpec | None) -> None:
        self._replaced[name] = str(found and found.origin)
        for member in self._with_submodules(name):
            self._modules.pop(member, None)

    def _with_submodules(self, name: str) -> list[str]:
        """The names of this hidden module and its submodules; __mp_main__ belongs to multiprocessing."""
        extra = "__mp_main__" if name == "multiprocessing" else name
        return [member for member in list(self._modules) if member in (name, extra) or member.startswith(f"{name}.")]

    def _warn_of_changes(self, module: str) -> None:
        before, self._environment = self._environment, dict(os.environ)
        for name in sorted(before.keys() | os.environ.keys()):
            value = os.environ.get(name)
            if value != before.get(name) and self._preload.is_read(name):
                remedy = f"without {name} in the environment" if value is None else f"with --env {name}={value}"
                sys.stderr.write(
                    f"warning: {name}: changed before the script imported {module}, without effect, because the "
                    f"agent had imported {module} already; launch {remedy}, or with --agent torchrun\n"
                )


class HiddenLoader:
    """A loader that returns a hidden module. Other attributes are those of the module's own loader."""

    def __init__(self, hidden: HiddenModules, loader: Any) -> None:
        self._hidden, self._loader = hidden, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._hidden.load(spec.name)
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it


def _has_loaded(library: str) -> bool:
    """Whether this process has loaded a shared library whose file name matches a regular expression."""
    with open("/proc/self/maps", errors="replace") as maps:
        return any(re.match(library, os.path.basename(line.rstrip("\n"))) for line in maps)


def _is_same_module(module: ModuleType, found: ModuleSpec | None) -> bool:
    """Whether `found` is the module's spec. True for None: no finder knows a module that was created at run time."""
    known = getattr(module, "__spec__", None)
    if found is None or known is None or found.origin == known.origin:
        return True
    try:
        return os.path.samefile(found.origin or "", known.origin or "")
    except OSError:
        return False
