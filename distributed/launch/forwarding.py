"""The environment variables that a launcher forwards to the nodes without the option --env.

They are set before config/node_env.sh is sourced, which can change them; those of --env are set after it.

Each entry of FORWARDED and MUSTER_FORWARD is a name, or a prefix that ends in `*`. An entry with a leading `-` excludes
the names that match it. The last entry that matches a name decides; those of MUSTER_FORWARD come last.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING = "MUSTER_FORWARD"
FORWARDED = (
    "NCCL_*", "GLOO_*", "TORCH_*", "PYTORCH_*", "CUDA_*", "-CUDA_VISIBLE_DEVICES", "OMP_*", "MKL_*", "TRITON_*",
    "HF_*", "WANDB_*", "TENSORBOARD_*",
)  # fmt: skip
# The launcher sets these on each node.
NEVER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "MUSTER_*", "TORCHELASTIC_*", "PET_*",
)  # fmt: skip
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*", re.ASCII)
ENTRY = re.compile(r"-?[A-Za-z_][A-Za-z_0-9]*\*?|-\*", re.ASCII)


class ForwardingError(ValueError):
    """MUSTER_FORWARD is invalid."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment that are forwarded. Raises ForwardingError."""
    entries = [*FORWARDED, *environment.get(SETTING, "").replace(",", " ").split()]
    for entry in entries:
        if not ENTRY.fullmatch(entry):
            raise ForwardingError(f"{SETTING}: expected NAME, PREFIX*, -NAME or -PREFIX*, got '{entry}'")
        if entry in NEVER:
            raise ForwardingError(f"{SETTING} '{entry}': the launcher sets it; leave it out")
    return {name: value for name, value in environment.items() if NAME.fullmatch(name) and _is_forwarded(name, entries)}


def _is_forwarded(name: str, entries: list[str]) -> bool:
    if any(_matches(name, each) for each in NEVER):
        return False
    last = next((entry for entry in reversed(entries) if _matches(name, entry.removeprefix("-"))), "-")
    return not last.startswith("-")


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
