"""Facts of this Python: its version, PyTorch, installed packages, and files that shadow libraries or Muster."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed.host.system import KIT, ProgramOutput, read, run_program

TORCH_LIMIT = 120.0  # seconds; `import torch` is slow from a cold network disk


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: str
    isolated: bool = True  # in a virtual or conda environment, so that pip can install packages


@dataclass(frozen=True)
class Torch:
    version: str = ""  # from package metadata; "": not installed
    error: str = ""  # why it cannot be imported
    seconds: float = 0.0  # duration of the import
    cuda: str = ""  # version it was built for; "": built without CUDA
    hip: str = ""
    nccl: str = ""
    gloo: bool = False
    cuda_available: bool = False
    complaint: str = ""  # last warning of `import torch` or torch.cuda.is_available()
    archs: tuple[str, ...] = ()  # architectures it has code for, such as sm_90
    capabilities: tuple[str, ...] = ()  # of the visible GPUs, such as sm_90


@dataclass(frozen=True)
class Package:
    name: str
    oldest: str  # minimum version; "": any
    installed: str  # "": not installed


def this_python(executable: str) -> Interpreter:
    isolated = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()
    return Interpreter(executable, ".".join(map(str, sys.version_info[:3])), isolated)


TORCH_PROBE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json, time, warnings
warnings.simplefilter("always")
start = time.monotonic()
with warnings.catch_warnings(record=True) as caught:
    import torch
    seconds = time.monotonic() - start
    available = torch.cuda.is_available()
dist, nccl = torch.distributed, ()
if available and dist.is_available() and dist.is_nccl_available():
    nccl = torch.cuda.nccl.version()
gpus = range(torch.cuda.device_count()) if available else ()
print(json.dumps({
    "seconds": seconds,
    "cuda": torch.version.cuda or "",
    "hip": torch.version.hip or "",
    "nccl": ".".join(map(str, nccl)),
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "cuda_available": available,
    "complaint": str(caught[-1].message).splitlines()[0] if caught else "",
    "archs": torch.cuda.get_arch_list(),
    "capabilities": ["sm_%d%d" % torch.cuda.get_device_capability(gpu) for gpu in gpus],
}))
"""


def probe_torch(python: str, limit: float = TORCH_LIMIT) -> Torch:
    """Query PyTorch in a separate process: importing a broken installation may crash it."""
    version = installed("torch")
    if not version:
        return Torch()
    output = run_program([python, "-c", TORCH_PROBE], limit)
    if output.code != 0 or not output.out.strip():
        return Torch(version, error=import_error(output))
    found: dict[str, Any] = json.loads(output.out.splitlines()[-1])
    found |= {name: tuple(found[name]) for name in ("archs", "capabilities")}
    return Torch(version, **found)


def import_error(output: ProgramOutput) -> str:
    if output.code is not None and output.code < 0:
        return f"Python was killed by {signal.Signals(-output.code).name} while importing it"
    return (output.error.strip().splitlines() or [f"Python exited with {output.code}"])[-1]


def installed(package: str) -> str:
    """The version in the package metadata; "" if not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def required_packages(requirements: Path) -> tuple[Package, ...]:
    """The packages in requirements.txt, except torch."""
    found = re.findall(r"^([\w.-]+)(?:.*?>=([\w.]+))?", read(requirements), re.MULTILINE)
    return tuple(Package(name, oldest, installed(name)) for name, oldest in found if name not in ("torch", "-r"))


def find_shadows(directory: Path, pythonpath: str) -> tuple[str, ...]:
    """Files in `directory` named like a library, and packages on PYTHONPATH named `distributed`, like Muster's."""
    names = {"torch", "numpy", "yaml", *sys.stdlib_module_names}
    files = [str(path) for path in directory.glob("*.py") if path.stem in names]
    entries = [Path(entry) for entry in pythonpath.split(os.pathsep) if entry]
    packages = [str(entry / "distributed") for entry in entries if entry != KIT and (entry / "distributed").is_dir()]
    return tuple(sorted(files) + packages)
