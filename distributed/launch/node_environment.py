"""The environment of the command of a node, as the launcher sends it; see transport.commands.environment_block()."""

from __future__ import annotations

import os

from distributed.exit_codes import UNFIT
from distributed.launch.node_files import Files, SupervisorError
from distributed.trust import foreign, regular_file

BLOCK = 1 << 20  # bytes per read
# Variables that another launch may have left in the environment. PET_* would change torchrun's options.
STALE_VARIABLES = (
    b"RANK", b"WORLD_SIZE", b"LOCAL_RANK", b"LOCAL_WORLD_SIZE", b"GROUP_RANK", b"NODE_RANK", b"MASTER_ADDR",
    b"MASTER_PORT",
)  # fmt: skip
STALE_PREFIXES = (b"PET_", b"TORCHELASTIC_")
ERROR_FILE = b"TORCHELASTIC_ERROR_FILE"  # set by the caller, therefore kept: the agent writes its failure there

Environment = dict[bytes, bytes]


def read_block(source: int, received: bytes = b"") -> tuple[bytes, bytes]:
    """Read an environment block from a file descriptor. Returns it and the bytes read after it.

    received: bytes that were read from the file descriptor before.
    """
    while True:
        if received.startswith(b"\0"):
            return b"", received[1:]
        block, end, rest = received.partition(b"\0\0")
        if end:
            return block + b"\0", rest
        if not (more := os.read(source, BLOCK)):
            raise SupervisorError(UNFIT, "environment block incomplete: connection to the launcher lost")
        received += more


def read_blocks(source: int) -> tuple[bytes, bytes, bytes]:
    """Read both environment blocks from a file descriptor. Returns them and the bytes read after them."""
    inherited, received = read_block(source)
    return inherited, *read_block(source, received)


def read_environment(source: str) -> tuple[bytes, bytes, bytes]:
    """Read both environment blocks. Returns them and the bytes of standard input read after them.

    source: the value of --environment: a file, - for standard input, or empty.
    """
    if source == "-":
        return read_blocks(0)
    return (*(read_block_file(source) if source else (b"", b"")), b"")


def read_block_file(path: str) -> tuple[bytes, bytes]:
    """Read both environment blocks from a file and remove the file."""
    try:
        source = regular_file(path)
        os.unlink(path)
        try:
            if problem := foreign(path, os.fstat(source)):
                raise SupervisorError(UNFIT, f"--environment '{path}': {problem}")
            return read_blocks(source)[:2]
        finally:
            os.close(source)
    except OSError as error:
        raise SupervisorError(UNFIT, f"--environment '{path}': {error.strerror}") from None


def parse_environment(block: bytes) -> Environment:
    parts = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {name: value for name, _, value in parts}


def environment(block: bytes, files: Files) -> Environment:
    """The command's environment: that of the supervisor without stale variables, updated with the block."""
    with open("/proc/self/environ", "rb") as file:  # os.environ may have an LC_CTYPE that Python has set
        env = parse_environment(file.read())
    env = {
        name: value
        for name, value in env.items()
        if name == ERROR_FILE or (name not in STALE_VARIABLES and not name.startswith(STALE_PREFIXES))
    }
    env[b"MUSTER_METRICS"] = os.fsencode(os.path.join(files.directory, "metrics.jsonl"))  # a job's block overrides it
    env |= parse_environment(block)
    env |= parse_environment(b"\0".join(files.environment))
    env[b"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = os.fsencode(f"[{files.name}:${{rank}}] ")
    return env
