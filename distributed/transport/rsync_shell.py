"""The remote shell of rsync: ssh, but without the output that a login shell prints before rsync starts.

usage: module.py transport.rsync_shell SSH [ARGUMENT...] -- HOST NAME COMMAND...

This program connects to HOST, which may be an address that rsync cannot parse. It ignores NAME, a placeholder that
rsync gets as host name. Nothing is sent to a login shell before it has started rsync; see
distributed/host/ssh_call.py.

rsync 3.5 needs --insecure-links to write through a symbolic link, such as from `logs` to another disk. Older versions
need only --keep-dirlinks, and refuse --insecure-links.
"""

from __future__ import annotations

import sys

from distributed.host.ssh_call import TIMEOUT, NotStarted, SshCall

# A script for sh, in which $0 is `rsync`. Every login shell accepts this script in single quotes.
RUN = '"$0" --insecure-links --version >/dev/null 2>&1 && exec "$0" --insecure-links "$@"; exec "$0" "$@"'


TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run rsync over ssh. Returns the exit code of ssh."""
    end = arguments.index("--") + 2
    ssh, (_, *command) = arguments[:end], arguments[end:]
    try:
        return SshCall([*ssh, f"echo; echo muster-ready; exec sh -c '{RUN}' {' '.join(command)}"], go=b"").run(TIMEOUT)
    except NotStarted as error:
        sys.stderr.write(f"{ssh[-1]}: {error.reason}\n" if error.reason else "")
        return error.code
