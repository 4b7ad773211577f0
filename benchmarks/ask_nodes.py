"""Run a command on nodes over ssh as the launchers do, but start no run. benchmarks/fan_out.py times this program.

python -m benchmarks.ask_nodes true NODE...        run `true` on all nodes at once
python -m benchmarks.ask_nodes preflight NODE...   probe them, and compare the replies
"""

from __future__ import annotations

import sys

from distributed.files import KIT
from distributed.launch.preflight import judge
from distributed.runs.lookup import RunNode
from distributed.transport.commands import Calls, SshCommands, environment_block, in_node_env


def main() -> int:
    """Return 1 if a node failed, otherwise 0."""
    verb, *names = sys.argv[1:]
    nodes = [RunNode(name, name, 1, 0) for name in names]
    commands, calls = SshCommands(print), Calls()
    if verb == "true":
        replies = calls.call_all({node: commands.command(node, ["true"], KIT) for node in nodes})
        return any(reply.code for reply in replies.values())
    files = [f"--file={KIT}/train.py"]
    probe = in_node_env(f"{KIT}/config/node_env.sh", sys.executable, "host.probe", *files, "--", *names)
    called = {node: commands.command(node, probe, KIT) for node in nodes}
    replies = calls.call_all(called, sent=environment_block((), ()))
    faults, _, _ = judge(replies, dict.fromkeys(names, 1), None)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
