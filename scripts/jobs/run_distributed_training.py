#!/usr/bin/env python3
"""Run a list of training jobs over GPU servers; see --help, or distributed/jobs/commands.py."""

import os
import sys

KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if __name__ == "__main__":
    if sys.getfilesystemencoding() != "utf-8":  # paths and arguments are the same here and on every server
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])
    sys.path[0] = KIT  # in place of this directory; before an installed Dask, whose package is named `distributed`, too
    try:
        from distributed.jobs.commands import main
    except ModuleNotFoundError as error:
        sys.exit(
            f"run_distributed_training.py: {error.name}: not installed for {sys.executable}; "
            f"install {KIT}/requirements.txt, or use {KIT}/.venv/bin/python"
        )
    sys.exit(main(sys.argv[1:]))
