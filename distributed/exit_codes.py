"""What the exit codes of launchers and ranks mean; scripts/lib/common.bash names the same.

Any other is the first failing rank's own, 128+n for signal n.
"""

import signal

WRONG_CALL = 2  # or wrong configuration; nothing was changed
UNFIT = 69  # a node cannot be reached, was lost, or is not fit
STOPPED = 75  # stopped on request with a checkpoint written: the same command goes on
TIMED_OUT = 124  # waited too long: for nodes, or for a run that hangs
KILLED = 128 + signal.SIGKILL
