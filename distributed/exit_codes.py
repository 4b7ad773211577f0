"""Exit codes of Muster's programs and ranks. The copies for shell scripts are EXIT_... in scripts/lib/common.bash.

Any other exit code of a launcher is the exit code of the first failed rank; 128+n means signal n.
"""

import signal

WRONG_CALL = 2  # wrong arguments or settings; nothing was changed
UNFIT = 69  # a node is unreachable, lost or unfit, or a program could not be started on it
STOPPED = 75  # stopped on request with a checkpoint written; the same command resumes
TIMED_OUT = 124  # timeout while waiting for nodes, or the run hung
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
KILLED = 128 + signal.SIGKILL
