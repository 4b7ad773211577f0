"""Find out why PyTorch cannot use the GPUs of this machine. Without this check, ranks would train on the CPU."""

from __future__ import annotations

import os
import shutil
import sys
import threading

from distributed.host.gpus import count_gpus
from distributed.host.process_scan import die_with_parent


def unusable_gpus(ranks: int) -> str:
    """Return why PyTorch can use no GPU here, with the remedies; "" if it can, or if there are fewer GPUs than ranks.

    Initializes CUDA, so no process that forks ranks may call this. With SLURM, each rank may see one GPU only.
    """
    import torch

    gpus, _ = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus < (1 if "SLURM_STEP_GPUS" in os.environ else ranks):
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (
            f"PyTorch cannot use the GPUs of {os.uname().nodename} ({gpus}): {' '.join(str(error).split())}; install a "
            "build with CUDA, update NVIDIA's driver or, after error 802, start nvidia-fabricmanager"
        )
    return ""


def warn_of_unusable_gpus(ranks: int) -> None:
    """Print a warning if PyTorch can use no GPU here. A new process finds this out; the ranks do not wait for it."""
    if not shutil.which("nvidia-smi") and not os.path.exists("/proc/driver/nvidia"):
        return
    agent = os.getpid()
    if pid := os.fork():
        threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()
        return
    try:
        die_with_parent(agent)
        if problem := unusable_gpus(ranks):
            sys.stderr.write(f"warning: {problem}\n")
    finally:
        os._exit(0)
