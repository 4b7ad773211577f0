"""Choose where torch.compile keeps code for later runs: where no other user can have put it before.

PyTorch's own choice is /tmp/torchinductor_USER: it runs what others have left there. TORCHINDUCTOR_CACHE_DIR does not
apply to all files: precompiled headers, for example, are in the default directory in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import tempfile

from distributed.trust import PRIVATE_DIRECTORY, foreign_ancestor, make_directories

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch._dynamo, which each optimizer imports, sets it, and makes the directory


def choose() -> str:
    """Set VARIABLE to the user's cache directory, unless it is set. Returns why this is not possible, or ""."""
    if os.environ.get(VARIABLE):
        return ""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.path.abspath(os.path.join(base, "muster/torchinductor"))
    try:
        make_directories(cache, PRIVATE_DIRECTORY)
    except OSError as error:
        return str(error)
    if not (problem := foreign_ancestor(cache)):
        os.environ[VARIABLE] = cache
    return problem


def use() -> str:
    """Use the directory of choose(); if there is none, a new one for this process. Returns what choose() returns.

    Must be called before torch._dynamo is imported.
    """
    if problem := choose():
        base = "/tmp" if foreign_ancestor(tempfile.gettempdir()) else None
        directory = os.environ[VARIABLE] = tempfile.mkdtemp(dir=base)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    directory = os.path.abspath(os.environ[VARIABLE])
    for name in ("cache_dir_utils", "runtime_utils"):  # of PyTorch 2.13; these functions are private
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"torch._inductor.runtime.{name}")
            vars(module)["default_cache_dir"] = lambda: directory
    return problem
