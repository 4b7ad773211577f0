"""Run a module of the package from any directory; `python -m distributed.MODULE` works only in Muster's directory.

Usage: python [-I [-S]] module.py MODULE [ARGUMENT...]

With -I -S, Python starts without site packages and variables of the environment, which could slow it down or change it.
"""

import os
import sys

if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # this directory
sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115

try:
    code = __import__(f"distributed.{sys.argv[1]}", fromlist=["main"]).main(sys.argv[2:]) or 0
except SystemExit as error:
    if not isinstance(error.code, int):
        raise
    code = error.code
except BrokenPipeError:  # the terminal was closed, or the output is a pipe to `head`
    code = 141  # as for SIGPIPE
for stream in (sys.stderr, sys.stdout):
    try:
        if stream:
            stream.flush()
    except OSError as error:  # a closed stream does not change the exit code
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            code = code or 1
os._exit(code)  # not sys.exit(): a thread may still read standard input
