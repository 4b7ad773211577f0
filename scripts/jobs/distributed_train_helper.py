#!/usr/bin/env python3
"""Show which jobs of a list share a base model. Imported as a module, it provides functions that generate lists.

See --help, distributed/jobs/two_phase.py and distributed/jobs/lists/generator.py.
"""

import os
import sys

KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

if __name__ == "__main__":
    # Restart Python in UTF-8 mode, which makes paths equal on all servers, and without PYTHONINSPECT, which would keep
    # Python from exiting.
    if sys.getfilesystemencoding() != "utf-8" or os.environ.pop("PYTHONINSPECT", ""):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])
    if os.spawnlp(os.P_WAIT, "bash", "bash", "-pc", '. "$1/scripts/lib/common.bash"; check_kit', sys.argv[0], KIT):
        sys.exit(69)
    del sys.path[0]
sys.path.insert(0, KIT)  # so that Muster's `distributed` is found before that of Dask
try:
    from distributed.jobs.lists.generator import grid, named, percent, product, write
except ModuleNotFoundError as error:
    python = f"{KIT}/.venv/bin/python"
    remedy = f"use {python}" if os.path.exists(python) else f"run {KIT}/scripts/quickstart.sh to install it"
    sys.stderr.write(f"distributed_train_helper.py: {error.name}: not installed for {sys.executable}; {remedy}\n")
    sys.exit(69)
finally:
    sys.path.remove(KIT)  # a module of the user may have the same name as one of Muster, such as train

__all__ = ["grid", "named", "percent", "product", "write"]

if __name__ == "__main__":
    from distributed.jobs.two_phase import helper

    sys.exit(helper(sys.argv[1:]))
