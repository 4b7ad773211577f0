"""Run train.py with one rank that fails once, as the file fault.json in the working directory describes.

The file may appear during the run: {"how": HOW, "rank": RANK, "step": STEP}. The rank fails at the first step that is
not below STEP. Steps and the publication of checkpoints take longer than in train.py, so that faults occur during them.
While the file "hold" exists, the first attempt publishes nothing. tests/random_faults.py starts this script.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

KIT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(KIT))
sys.argv[0] = str(KIT / "train.py")

from distributed.checkpoint.checkpointer import Checkpointer  # noqa: E402 - after sys.path is set
from distributed.checkpoint.directory import Owner  # noqa: E402

STEP_SECONDS, PUBLISH_SECONDS = 0.1, 0.3
MEMORY = 512 << 20  # bytes that a rank may allocate before it fails

should_stop, publish = Checkpointer.should_stop, Owner.publish


def fail(how: str) -> None:
    if how == "exits with 0":
        os._exit(0)
    elif how == "hangs":
        time.sleep(1000)
    elif how == "loops":
        while True:
            pass
    elif how == "raises":
        raise ValueError("injected")
    elif how == "allocates":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        blocks = []
        while True:
            blocks.append(bytearray(1 << 24))


def take_fault(step: int) -> str:
    """Return how this rank must fail at this step, or "" if it must not fail. The fault is returned only once."""
    try:
        fault = json.loads(Path("fault.json").read_text())
    except FileNotFoundError:
        return ""
    if os.environ["RANK"] != str(fault["rank"]) or step < fault["step"]:
        return ""
    try:
        Path("fired").touch(exist_ok=False)
    except FileExistsError:
        return ""
    return str(fault["how"])


def slow_should_stop(self: Checkpointer, step: int, loss: Tensor | None = None) -> bool:
    how = take_fault(step)
    fail(how)
    time.sleep(STEP_SECONDS)
    return should_stop(self, step, loss * float("nan") if how == "writes NaN" and loss is not None else loss)


def slow_publish(self: Owner, unpublished: Path, manifest: Mapping[str, Any]) -> None:
    time.sleep(PUBLISH_SECONDS)
    while Path("hold").exists() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.05)
    publish(self, unpublished, manifest)


Checkpointer.should_stop = slow_should_stop  # type: ignore[method-assign]
Owner.publish = slow_publish  # type: ignore[method-assign]
runpy.run_path(sys.argv[0], run_name="__main__")
