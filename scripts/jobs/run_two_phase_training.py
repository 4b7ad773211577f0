#!/usr/bin/env python3
"""Train shared base models once, then run every experiment; see --help, or distributed/jobs/two_phase.py."""

import os
import sys

KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

if __name__ == "__main__":
    if sys.getfilesystemencoding() != "utf-8":  # paths and arguments are the same here and on every server
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])
    sys.path[0] = KIT  # in place of this directory; before an installed Dask, whose package is named `distributed`, too
    try:
        from distributed.jobs.two_phase import main
    except ModuleNotFoundError as error:
        own = f"{KIT}/.venv/bin/python"
        use = f"use {own}" if os.path.exists(own) else f"{KIT}/scripts/quickstart.sh installs what is needed"
        sys.stderr.write(f"run_two_phase_training.py: {error.name}: not installed for {sys.executable}; {use}\n")
        sys.exit(69)
    sys.exit(main(sys.argv[1:]))
