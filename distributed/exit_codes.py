"""Exit codes of launchers and ranks. scripts/lib/common.bash has those that launchers use, under EXIT_... names.

A launcher passes on any other exit code of the first failed rank: 128+n for signal n.
"""

import signal

WRONG_CALL = 2  # wrong arguments or settings; nothing was changed
UNFIT = 69  # a node is unreachable, lost, or failed the preflight
STOPPED = 75  # stopped on request with a checkpoint written; the same command resumes
TIMED_OUT = 124  # timeout while waiting for nodes, or the run hung
KILLED = 128 + signal.SIGKILL
