"""The remote shell of rsync: ssh, without the output of a login shell before the command starts.

usage: rsync_shell.py SSH_CONFIG HOST NAME COMMAND...

NAME, the host name that rsync passes, is ignored: HOST may be an address that rsync cannot parse.
"""

from __future__ import annotations

import os
import subprocess
import sys

BEGIN = b"muster-rsync-begins\n"


def main(config: str, host: str, _: str, *command: str) -> int:
    """Run the command over ssh. Returns the exit code of ssh."""
    line = f"echo {BEGIN.decode().strip()}; exec {' '.join(command)}"
    ssh = subprocess.Popen(["ssh", "-F", config, "--", host, line], stdout=subprocess.PIPE)
    assert ssh.stdout
    source = ssh.stdout.fileno()
    os.set_blocking(1, True)  # rsync's pipes are non-blocking
    received = b""
    while BEGIN not in received and (block := os.read(source, 1 << 16)):
        received += block
    data = received.partition(BEGIN)[2]
    while data or (data := os.read(source, 1 << 18)):
        data = data[os.write(1, data) :]
    code = ssh.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
