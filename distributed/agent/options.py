"""The options of Muster's agent: those of torchrun that it has itself. Other options are for torchrun's agent.

Standard library only: the agent reads its options before it imports PyTorch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NoReturn

NO_RUN_ID = "none"  # torchrun's default for --rdzv-id
# Options without an effect on this agent, and the values that are accepted; None: all.
ACCEPTED = {"max-restarts": ["0"], "monitor-interval": None, "local-addr": None, "start-method": None}
# Variables that change what torchrun does; so do those that start with PET_.
OF_TORCHRUN = (
    "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_HEALTH_CHECK_PORT", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)  # fmt: skip


class Unsupported(Exception):
    """A command line for torchrun's agent. The message says why."""


@dataclass
class Options(argparse.Namespace):
    """The values of the options, which have the names of the fields, and the defaults."""

    nnodes: int = 1
    nproc_per_node: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: any free one or, for several nodes, torchrun's default
    rdzv_id: str = NO_RUN_ID
    rdzv_conf: str = "timeout=600"  # seconds for all nodes to join
    log_dir: str = ""
    tee: int = 0  # 3: copy the output of ranks to the console, and keep it in files; 0: it is that of the agent
    standalone: bool = False
    module: bool = False
    pass_local_rank: bool = False
    training_script: str = ""
    training_script_args: list[str] = field(default_factory=list)

    @property
    def join_timeout(self) -> int:
        return int(self.rdzv_conf.removeprefix("timeout="))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Unsupported(message)


def parse(arguments: Sequence[str], env: Mapping[str, str] = os.environ) -> Options:
    """Read torchrun's options and --pass-local-rank. Raises Unsupported, also for a wrong call."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    short = {"module": "-m", "tee": "-t"}
    for option in fields(Options)[:-2]:
        flags = [short.get(option.name), f"--{option.name.replace('_', '-')}", f"--{option.name}"]
        how = {"action": "store_true"} if option.default is False else {"type": type(option.default)}
        parser.add_argument(*dict.fromkeys(filter(None, flags)), **how, default=option.default)
    for name, values in ACCEPTED.items():
        parser.add_argument(f"--{name}", choices=values)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments, Options())
    refuse(options, env)
    return options


def refuse(options: Options, env: Mapping[str, str]) -> None:
    """Raise Unsupported for values and variables that only torchrun's agent handles."""
    changed = sorted(name for name in env if name.startswith("PET_") or name in OF_TORCHRUN)
    python = env.get("PYTHON_EXEC", sys.executable)
    reasons = {
        f"{next(iter(changed), '')} is set": changed,
        f"PYTHON_EXEC={python} differs from the agent's Python {sys.executable}": python != sys.executable,
        f"--nnodes {options.nnodes}": options.nnodes < 1,
        f"--nproc-per-node {options.nproc_per_node}": options.nproc_per_node < 1,
        f"--rdzv-conf {options.rdzv_conf}": not options.rdzv_conf.removeprefix("timeout=").isdecimal(),
        f"--tee {options.tee}": options.tee not in (0, 3),
    }
    for reason, applies in reasons.items():
        if applies:
            raise Unsupported(reason)
