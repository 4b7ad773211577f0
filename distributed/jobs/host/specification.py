"""The job specifications of the elements of a SLURM array.

The job specification of an attempt states what to run. It has mode 0600, as it contains the environment of the job. Its
file name shows its state, and element.json shows the element that claimed it:

  LIST/ATTEMPT/order         not assigned to an array
  LIST/ATTEMPT/order.ID      assigned to this array
  LIST/ATTEMPT/taken.ID      claimed by an element that has not started the command
  LIST/ATTEMPT/element.json  host, time, array and SLURM job id of the element that claimed the specification

A job specification is assigned, released and claimed by renaming its file; only one process can succeed in that."""

from __future__ import annotations

import json
import os
from typing import Any

from distributed.launch import node_environment
from distributed.trust import checked, parse_json, read_bytes, read_text, regular_file

SERVER = "slurm"  # the name of the server, also in the names of the supervisor's files
SPEC, TAKEN, NEW = "order", "taken", ".order"
SPECIFICATION = {  # see trust.checked(), and slurm_server.SlurmServer._spec_of()
    "command": list[str], "script": str, "owner?": str, "workdir": str, "setup": bool, "gpus": int,
    "timeout": float | None, "grace": float, "kill_wait": int, "needs": list[object], "trains?": str, "cache?": str,
    "settings?": dict, "call": dict[str, str], "env": dict[str, str],
}  # fmt: skip
ATTEMPTS = "attempts"  # in an array's directory: the names of its attempts, one per line
ELEMENT = "element.json"
# Variables that SLURM sets on the compute node. Their values on the submitting machine are not passed on.
NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HOSTNAME")
FOREIGN_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "MUSTER_", "TMUX")

Facts = dict[str, Any]


def spec_path(attempt: str, array: str = "") -> str:
    """The unclaimed job specification in the directory of an attempt. array: the array to which it is assigned."""
    return os.path.join(attempt, f"{SPEC}.{array}" if array else SPEC)


def taken_path(attempt: str, array: str) -> str:
    return os.path.join(attempt, f"{TAKEN}.{array}")


def write_spec(attempt: str, spec: Facts) -> None:
    """Write a job specification atomically, readable by this user only. Raises OSError."""
    new = os.path.join(attempt, NEW)
    with open(new, "w", opener=regular_file) as file:
        json.dump(spec, file)
    os.rename(new, spec_path(attempt))


def move(source: str, target: str) -> bool:
    """Rename a file. Returns False if it does not exist."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def remove(path: str) -> bool:
    """Remove a file. Returns False if it does not exist."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def claim_spec(attempt: str, array: str) -> Facts | None:
    """Claim and return the job specification of an attempt; None if it is not assigned to this array."""
    taken = taken_path(attempt, array)
    move(spec_path(attempt, array), taken)
    # The file `taken` may exist already: this element claimed the specification, and SLURM requeued the element before
    # the command was started.
    try:
        return read_spec(taken)
    except FileNotFoundError:
        return None


def read_spec(path: str) -> Facts:
    """Read a job specification. Raises OSError, also if others own it or can write to it, and ValueError."""
    found: Facts = checked(SPECIFICATION, parse_json(read_bytes(path, own=True)), path)
    return found


def dispatcher_environment(environment: dict[str, str]) -> dict[str, str]:
    """The dispatcher's environment for jobs, without variables of the node, SLURM, Muster and earlier launches."""
    foreign = {os.fsdecode(name) for name in node_environment.STALE_VARIABLES} | set(NODE_VARIABLES)
    prefixes = (*FOREIGN_PREFIXES, *map(os.fsdecode, node_environment.STALE_PREFIXES))
    return {name: value for name, value in environment.items() if name not in foreign and not name.startswith(prefixes)}


def names_in(array: str) -> list[str]:
    """The names of the attempts of an array, by index. Raises OSError."""
    return read_text(os.path.join(array, ATTEMPTS)).split()
