"""Find out why PyTorch cannot use the GPUs of this machine: it would silently train on the CPU."""

from __future__ import annotations

import os
import signal
import sys
import threading

from distributed.host.gpus import count_visible, may_exist
from distributed.host.process_scan import die_with_parent

REMEDIES = {  # part of PyTorch's reason -> remedy
    "not compiled": "install a build of PyTorch for the GPU (https://pytorch.org/get-started/locally)",
    "802": "start NVIDIA's fabric manager (sudo systemctl start nvidia-fabricmanager)",
}


def unusable_gpus(ranks: int) -> str:
    """Return why PyTorch can use no GPU of this machine, with a remedy; "" if it can, or if there are fewer than ranks.

    Initializes CUDA, which no process may do that forks ranks. ranks: those of this machine. SLURM may show each rank
    one GPU only.
    """
    import torch

    gpus = count_visible()
    if gpus < (1 if "SLURM_STEP_GPUS" in os.environ else ranks):
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        remedy = next(
            (REMEDIES[part] for part in REMEDIES if part in reason), "update NVIDIA's driver or restart the machine"
        )
        return f"PyTorch cannot use the GPUs of {os.uname().nodename} ({gpus}): {reason.rstrip('.')}; {remedy}"
    return ""


def warn_of_unusable_gpus(ranks: int) -> None:
    """Print a warning if PyTorch can use no GPU. A new process finds this out, and the ranks do not wait for it."""
    if not may_exist():
        return
    agent = os.getpid()
    if pid := os.fork():
        threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
        return
    try:
        die_with_parent(agent)
        signal.set_wakeup_fd(-1)
        os.closerange(3, 1000)  # pipes of the agent, should this process hang in the driver
        if problem := unusable_gpus(ranks):
            sys.stderr.write(f"warning: {problem}\n")
    finally:
        os._exit(0)
