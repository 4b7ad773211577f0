"""Become the program scripts/muster of this installation: `python -m muster VERB ...`, and the command `muster`."""

import os
import signal
import sys
from typing import NoReturn

from muster import KIT


def main() -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    program = os.path.join(KIT, "scripts", "muster")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
