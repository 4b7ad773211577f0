#!/usr/bin/env python3
"""Run a list of training jobs. Usage: muster jobs ...; see distributed/jobs/commands.py."""

import os
import sys

KIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

if __name__ == "__main__":
    # UTF-8 makes paths and arguments equal on all servers. With PYTHONINSPECT, Python would not exit.
    if sys.getfilesystemencoding() != "utf-8" or os.environ.pop("PYTHONINSPECT", ""):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.argv])
    if os.spawnlp(os.P_WAIT, "bash", "bash", "-pc", '. "$1/scripts/lib/common.bash"; check_kit', sys.argv[0], KIT):
        sys.exit(69)
    sys.path[0] = KIT  # in place of this directory, so that Muster's `distributed` is found before that of Dask
    try:
        from distributed.jobs.commands import main
    except ModuleNotFoundError as error:
        python = f"{KIT}/.venv/bin/python"
        remedy = f"use {python}" if os.path.exists(python) else f"run {KIT}/scripts/quickstart.sh to install it"
        sys.stderr.write(f"run_distributed_training.py: {error.name}: not installed for {sys.executable}; {remedy}\n")
        sys.exit(69)
    sys.exit(main(sys.argv[1:]))
