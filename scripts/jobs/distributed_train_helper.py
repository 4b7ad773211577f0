#!/usr/bin/env python3
"""What base models the jobs of a list share; also a module for writing such lists.

See --help, distributed/jobs/two_phase.py and distributed/jobs/job_lists.py.
"""

import os
import sys

KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

if __name__ == "__main__":
    if sys.getfilesystemencoding() != "utf-8":  # paths are the same here and on every server
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])
    del sys.path[0]
sys.path.insert(0, KIT)  # before an installed Dask, whose package is named `distributed`, too
try:
    from distributed.jobs.job_lists import grid, named, percent, product, write
except ModuleNotFoundError as error:
    own = f"{KIT}/.venv/bin/python"
    use = f"use {own}" if os.path.exists(own) else f"{KIT}/scripts/quickstart.sh installs what is needed"
    sys.stderr.write(f"distributed_train_helper.py: {error.name}: not installed for {sys.executable}; {use}\n")
    sys.exit(69)
finally:
    sys.path.remove(KIT)  # a module of the user may be named as one of ours, such as train

__all__ = ["grid", "named", "percent", "product", "write"]

if __name__ == "__main__":
    from distributed.jobs.two_phase import helper

    sys.exit(helper(sys.argv[1:]))
