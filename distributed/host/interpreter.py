"""Which Python this is, which PyTorch and which packages it has, and what would be imported in their place."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed.host.system import KIT, ProgramOutput, read, run_program

TORCH_LIMIT = 120.0  # seconds for `import torch`, which a cold network disk makes long


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: str
    isolated: bool = True  # a virtual or conda environment: packages can be installed
    unused_conda: str = ""  # an active conda environment that was not picked


@dataclass(frozen=True)
class Torch:
    version: str = ""  # from package metadata; empty: not installed
    error: str = ""  # why it cannot be imported
    seconds: float = 0.0  # that importing took
    cuda: str = ""  # version it was built for; empty: built without
    hip: str = ""
    nccl: str = ""
    gloo: bool = False
    cuda_available: bool = False
    complaint: str = ""  # what torch said when it looked for GPUs
    archs: tuple[str, ...] = ()  # what it has code for, such as sm_90
    capabilities: tuple[str, ...] = ()  # of the GPUs it sees, such as sm_90


@dataclass(frozen=True)
class Package:
    name: str
    oldest: str  # empty: any
    installed: str  # empty: not installed


def which_python(executable: str, env: Mapping[str, str]) -> Interpreter:
    """Which Python this is."""
    conda = env.get("CONDA_PREFIX", "")
    base = env.get("CONDA_DEFAULT_ENV") == "base"  # active in every shell: it counts as python3
    in_conda = Path(sys.prefix, "conda-meta").is_dir()
    return Interpreter(
        path=executable,
        version=".".join(map(str, sys.version_info[:3])),
        isolated=in_conda or sys.prefix != sys.base_prefix,
        unused_conda="" if base or executable.startswith(conda + "/") else conda,
    )


TORCH_PROBE = """
import json, sys, time, warnings
sys.path[:] = [folder for folder in sys.path if folder]
warnings.simplefilter("always")
begin = time.monotonic()
with warnings.catch_warnings(record=True) as said:
    import torch
    seconds = time.monotonic() - begin
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
    "complaint": str(said[-1].message).splitlines()[0] if said else "",
    "archs": torch.cuda.get_arch_list(),
    "capabilities": ["sm_%d%d" % torch.cuda.get_device_capability(gpu) for gpu in gpus],
}))
"""


def probe_torch(python: str, limit: float = TORCH_LIMIT) -> Torch:
    """What PyTorch says of itself, asked in a process of its own: a broken one is a fact, not a crash."""
    version = installed("torch")
    if not version:
        return Torch()
    output = run_program([python, "-c", TORCH_PROBE], limit)
    if output.code != 0:
        return Torch(version, error=import_error(output))
    told: dict[str, Any] = json.loads(output.out.splitlines()[-1])
    told |= {name: tuple(told[name]) for name in ("archs", "capabilities")}
    return Torch(version, **told)


def import_error(output: ProgramOutput) -> str:
    if output.code is not None and output.code < 0:
        return f"Python dies of {signal.Signals(-output.code).name} while importing it"
    return (output.error.strip().splitlines() or [f"Python exits with {output.code}"])[-1]


def installed(package: str) -> str:
    """Its version, from the metadata alone."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def required_packages(requirements: Path) -> tuple[Package, ...]:
    """What requirements.txt names, apart from torch."""
    found = re.findall(r"^([\w.-]+)(?:.*?>=([\w.]+))?", read(requirements), re.MULTILINE)
    return tuple(Package(name, oldest, installed(name)) for name, oldest in found if name not in ("torch", "-r"))


def find_shadows(folder: Path, pythonpath: str) -> tuple[str, ...]:
    """Files that Python may import in place of a library, in the working folder and on PYTHONPATH."""
    names = {"torch", "numpy", "yaml", *sys.stdlib_module_names}
    own = [str(path) for path in folder.glob("*.py") if path.stem in names]
    places = [Path(word) for word in pythonpath.split(os.pathsep) if word]
    foreign = [str(place / "distributed") for place in places if place != KIT and (place / "distributed").is_dir()]
    return tuple(sorted(own) + foreign)
