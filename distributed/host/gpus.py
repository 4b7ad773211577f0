"""The GPUs of this machine, the processes that use them, and the GPUs visible to a process.

nvidia-smi reports GPUs and processes. It may take seconds, so a launch counts the GPUs that the driver lists in /proc.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed.host.system import GIB, MIB, PROC, SYS, ProgramOutput, read, run_program

NVIDIA_LIMIT = 20.0  # seconds for all calls; a driver without persistence mode takes seconds per GPU
GPU_FIELDS = "index,uuid,driver_version,memory.total,memory.used,mig.mode.current,compute_mode,display_active,name"
APP_FIELDS = "gpu_uuid,pid,used_memory,process_name"
RESET = "[GPU requires reset]"
MPS_SERVER = "nvidia-cuda-mps-server"  # computes nothing itself: its clients do
LOST = ("[GPU is lost]", "[Unknown Error]")  # values of a GPU that no longer replies
NO_INSTANCES = "MIG is on, but it has no instances; create one (nvidia-smi mig -cgi PROFILE -C), or turn MIG off"
MIG_INSTANCE = re.compile(r"^(?:GPU .*UUID: (GPU-[^)]+)|\s+MIG .*UUID: (MIG-[^)]+))\)")  # lines of nvidia-smi -L


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    user: str  # "": not visible, for example in another container
    name: str
    memory: int  # bytes


@dataclass(frozen=True)
class MigInstance:
    uuid: str
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class LostGpu:
    """A GPU that no longer replies."""

    index: int
    reason: str


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory: int  # bytes; 0: unknown
    memory_used: int | None  # bytes; None: unknown, for example because GPU and CPU share it
    mig: bool = False
    processes: tuple[GpuProcess, ...] = ()
    instances: tuple[MigInstance, ...] = ()
    compute_mode: str = "Default"  # or Exclusive_Process, Prohibited
    display: bool = False  # a desktop uses it, which is no process here and may take more than a GiB of memory

    @property
    def busy(self) -> bool:
        used = any(process.name != MPS_SERVER for process in self.processes)
        return used or ((self.memory_used or 0) > GIB and not self.display)

    @property
    def fault(self) -> str:
        """Why no process can use the GPU; empty if one can."""
        if self.compute_mode == "Prohibited":
            return "compute mode Prohibited; to allow processes: sudo nvidia-smi --compute-mode=DEFAULT"
        return NO_INSTANCES if self.mig and not self.instances else ""


@dataclass(frozen=True)
class Gpus:
    driver: str = ""
    error: str = ""  # error of nvidia-smi
    hardware: int = 0  # NVIDIA cards on the PCI bus, with or without a driver
    devices: tuple[Gpu, ...] = ()
    lost: tuple[LostGpu, ...] = ()


# ---------------------------------------------------------------- nvidia-smi


def query_gpus(sys_directory: Path = SYS, *, processes: bool = True) -> Gpus:
    """The GPUs and, if requested, their processes, as nvidia-smi reports them; without it, as the driver lists them."""
    hardware = nvidia_cards(sys_directory)
    if not shutil.which("nvidia-smi"):
        return Gpus(hardware=hardware, devices=listed_gpus())
    end = time.monotonic() + NVIDIA_LIMIT
    rows, lost, error = query_rows(GPU_FIELDS, end, sys_directory)
    users = gpu_processes(query("compute-apps", APP_FIELDS, end).out) if rows and processes else {}
    divided = processes and any(row["mig.mode.current"] == "Enabled" for row in rows)
    instances = mig_instances(run_program(["nvidia-smi", "-L"], end - time.monotonic()).out, users) if divided else {}
    return Gpus(
        driver=rows[0]["driver_version"] if rows else "",
        error=error,
        hardware=hardware,
        devices=tuple(gpu_from(row, users.get(row["uuid"], ()), instances.get(row["uuid"], ())) for row in rows),
        lost=lost,
    )


def query_rows(
    fields: str, end: float, sys_directory: Path = SYS
) -> tuple[list[dict[str, str]], tuple[LostGpu, ...], str]:
    """The GPUs that reply, the lost ones, and an error if none replies. fields: must begin with index,uuid.

    nvidia-smi may fail because of one lost GPU: each GPU is then queried separately.
    """
    output = query("gpu", fields, end)
    lost: dict[int, str] = {}
    outputs = {0: output}
    if output.code and not none_found(output):
        cards = max(nvidia_cards(sys_directory), len(listed_gpus()))
        outputs = {index: query("gpu", fields, end, index) for index in range(cards)}
        lost = {index: text_of(one) for index, one in outputs.items() if one.code != 0 and not none_found(one)}
    rows = []
    for first, one in outputs.items():
        for index, row in enumerate(table(one.out, fields), first):
            if row["uuid"] in LOST or RESET in row.values():
                lost[index] = f"{(RESET if RESET in row.values() else row['uuid'])[1:-1]}; reboot the machine"
            elif one.code == 0:
                rows.append(row)
    none_replies = not rows and (output.code != 0 or lost) and not none_found(output)
    error = f"nvidia-smi: {text_of(output)}" if none_replies else ""
    return rows, () if error else tuple(LostGpu(*each) for each in sorted(lost.items())), error


def none_found(output: ProgramOutput) -> bool:
    return output.code == 6 or "No devices were found" in output.out


def text_of(output: ProgramOutput) -> str:
    return " ".join((output.out + output.error).split())


def query(kind: str, fields: str, end: float, index: int | None = None) -> ProgramOutput:
    """Call nvidia-smi. end: when it is killed, as time.monotonic(). index: query only this GPU."""
    one = [] if index is None else [f"--id={index}"]
    command = ["nvidia-smi", f"--query-{kind}={fields}", "--format=csv,noheader,nounits", *one]
    return run_program(command, end - time.monotonic())


def table(csv: str, fields: str) -> list[dict[str, str]]:
    """Parse output of nvidia-smi. It has no quotes, so only the last field may contain a comma.

    Names of processes are those that other users gave them. Of their characters, only a line feed ends a line.
    """
    keys = fields.split(",")
    rows = [line.split(", ", len(keys) - 1) for line in csv.split("\n")]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def gpu_from(row: Mapping[str, str], processes: tuple[GpuProcess, ...], instances: tuple[MigInstance, ...]) -> Gpu:
    return Gpu(
        index=count(row["index"]),
        uuid=row["uuid"],
        name=row["name"],
        memory=mebibytes(row["memory.total"]),
        memory_used=mebibytes(row["memory.used"]) if row["memory.used"].isdecimal() else None,
        mig=row["mig.mode.current"] == "Enabled",
        processes=processes,
        instances=instances,
        compute_mode=row["compute_mode"],
        display=row["display_active"] == "Enabled",
    )


def mig_instances(text: str, processes: Mapping[str, tuple[GpuProcess, ...]]) -> dict[str, tuple[MigInstance, ...]]:
    """Parse output of nvidia-smi -L. Returns GPU uuid -> its instances. processes: by uuid of GPU or instance."""
    found: dict[str, tuple[MigInstance, ...]] = {}
    gpu = ""
    for line in filter(None, map(MIG_INSTANCE.match, text.splitlines())):
        gpu, uuid = line[1] or gpu, line[2]
        if uuid:
            found[gpu] = (*found.get(gpu, ()), MigInstance(uuid, processes.get(uuid, ())))
    return found


def gpu_processes(csv: str) -> dict[str, tuple[GpuProcess, ...]]:
    """Parse output of nvidia-smi. Returns GPU uuid -> processes."""
    found: dict[str, tuple[GpuProcess, ...]] = {}
    for row in table(csv, APP_FIELDS):
        process = GpuProcess(
            pid=count(row["pid"]),
            user=owner(count(row["pid"])),
            name=row["process_name"].rpartition("/")[2],
            memory=mebibytes(row["used_memory"]),
        )
        found[row["gpu_uuid"]] = (*found.get(row["gpu_uuid"], ()), process)
    return found


def count(field: str) -> int:
    """A number in the output of nvidia-smi; 0 for [N/A] and similar."""
    return int(field) if re.fullmatch("[0-9]{1,15}", field) else 0


def mebibytes(field: str) -> int:
    """A number of MiB in the output of nvidia-smi, in bytes."""
    return count(field) * MIB


def owner(pid: int, proc: Path = PROC) -> str:
    """The user of a process; "" if the process is not visible."""
    try:
        uid = (proc / str(pid)).stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---------------------------------------------------------------- the kernel


def nvidia_cards(sys_directory: Path) -> int:
    """The number of NVIDIA display and compute cards on the PCI bus, with or without a driver."""
    devices = sys_directory.glob("bus/pci/devices/*")
    return sum(read(card / "vendor") == "0x10de" and read(card / "class").startswith("0x03") for card in devices)


def listed_gpus(driver: Path = PROC / "driver/nvidia", dev: Path = Path("/dev")) -> tuple[Gpu, ...]:
    """The GPUs that NVIDIA's driver lists, in the order of nvidia-smi; their memory is unknown.

    The driver also lists GPUs that this container or control group may not use: their device files cannot be opened.
    """
    found: list[Gpu] = []
    for path in sorted(driver.glob("gpus/*/information")):
        facts = dict(re.findall(r"^(.+?):[ \t]*(.+)$", read(path), re.MULTILINE))
        minor = facts.get("Device Minor", "")
        if os.access(dev / f"nvidia{minor}", os.R_OK | os.W_OK):
            mig = any(driver.glob(f"capabilities/gpu{minor}/mig/gi*"))
            found.append(Gpu(len(found), facts.get("GPU UUID", ""), facts.get("Model", ""), 0, None, mig))
    return tuple(found)


# ---------------------------------------------------------------- CUDA_VISIBLE_DEVICES


def visible(setting: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that are visible with this value of CUDA_VISIBLE_DEVICES. setting: None if it is not set.

    CUDA reads indices or prefixes of UUIDs up to the first invalid one; a duplicate makes all GPUs invisible. With MIG,
    a process sees one instance on one GPU.
    """
    selected = list(gpus)
    if setting is not None:
        selected, devices = [], [device.strip() for device in setting.split(",")]
        for device in devices:
            if not (named := [gpu for gpu in gpus if is_named(gpu, device)]):
                break
            selected.append(named[0])
        if len(set(devices[: len(selected)])) < len(selected):
            return ()
    divided = [gpu for gpu in selected if gpu.mig]
    return tuple(divided[:1] or selected)


def is_named(gpu: Gpu, device: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES names this GPU."""
    if device.startswith("MIG-"):
        return gpu.mig
    return gpu.uuid.startswith(device) if device.startswith("GPU-") else str(gpu.index) == device


def count_gpus(setting: str | None) -> tuple[int, str]:
    """The number of GPUs that are visible with this value of CUDA_VISIBLE_DEVICES, and an error of nvidia-smi."""
    gpus, error = listed_gpus(), ""  # none in WSL; UUIDs may be unknown until a process uses the GPUs
    if not gpus or ("GPU-" in (setting or "") and any("?" in gpu.uuid for gpu in gpus)):
        found = query_gpus(processes=False)
        gpus, error = found.devices, found.error
    return len(visible(setting, gpus)), error


def count_visible() -> int:
    """The number of GPUs visible to this process. Prints an error of nvidia-smi to standard error."""
    count, error = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    sys.stderr.write(f"{error}\n" * bool(error))
    return count
