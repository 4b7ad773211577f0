"""What is true of this machine: the facts that the doctor judges, and that nodes can be compared by.

Only looking, no opinion: each function reads one corner of the machine and returns values. What cannot be
read is empty or None, never an exception. The standard library is enough.

Try it: python3 -m distributed.doctor --json
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parents[1]
MIB, GIB = 2**20, 2**30
PROC, SYS = Path("/proc"), Path("/sys")
SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921  # linux/sockios.h: the address of an interface, and its MTU
LOOKUP_LIMIT = 6.0  # seconds; a resolver that drops one packet answers after 5
TORCH_LIMIT = 120.0  # seconds for `import torch`, which a cold network disk makes long
NVIDIA_LIMIT = 20.0  # seconds; a driver without persistence mode takes some for each GPU
# Xid codes that a faulty program causes, not a faulty GPU.
PROGRAM_XIDS = ("13", "31", "43", "45")
PROGRAMS = ("ssh", "rsync", "tmux", "pdsh", "srun")
# What torch, NCCL, gloo, OpenMP and Python's imports listen to, and nothing that could be a secret.
SPEAKING = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|PYTHONPATH"
    r"|(TORCHELASTIC|PET|CUDA|NCCL|TORCH_NCCL|GLOO)_\w+"
)


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: str
    why: str  # which rule picked it
    isolated: bool = True  # a virtual or conda environment: packages can be installed
    unused_conda: str = ""  # an active conda environment that was not picked


@dataclass(frozen=True)
class Torch:
    version: str = ""  # from package metadata; empty: not installed
    error: str = ""  # why it cannot be imported
    seconds: float = 0.0  # that importing took
    file: str = ""
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


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    user: str  # empty: not to be seen from here, as when it runs in another container
    name: str
    memory: int  # bytes


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory: int  # bytes
    memory_used: int  # bytes
    persistence: bool = True
    mig: bool = False
    ecc_errors: int = 0  # uncorrected, since the driver was loaded
    compute_mode: str = "Default"
    processes: tuple[GpuProcess, ...] = ()

    @property
    def busy(self) -> bool:
        return bool(self.processes) or self.memory_used > GIB


@dataclass(frozen=True)
class Gpus:
    driver: str = ""
    error: str = ""  # why nvidia-smi does not answer
    hardware: int = 0  # NVIDIA's cards on the PCI bus, with or without a driver
    devices: tuple[Gpu, ...] = ()
    xids: tuple[str, ...] = ()  # "PCI:0000:3b:00 79", as the kernel reported them


@dataclass(frozen=True)
class Memory:
    total: int  # bytes, as all of these
    available: int
    limit: int | None = None  # of the container or job
    swap_total: int = 0
    swap_free: int = 0


@dataclass(frozen=True)
class Space:
    purpose: str
    path: str
    total: int  # bytes
    free: int  # bytes
    inodes_free: bool = True
    writable: bool = True


@dataclass(frozen=True)
class Cores:
    present: int
    affinity: int  # that this process may run on
    quota: float | None = None  # of the container or job, in cores
    load: float = 0.0  # mean number of running processes in the last minute


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    open_files: int | None
    open_files_hard: int | None
    locked_memory: int | None  # bytes
    processes: int | None
    infiniband: bool = False


@dataclass(frozen=True)
class Port:
    number: int
    free: bool = True
    holder: str = ""  # "pid 12 (python train.py)", where that can be seen
    ephemeral: tuple[int, int] = (32768, 60999)
    loopback_error: str = ""


@dataclass(frozen=True)
class Lookup:
    query: str
    answers: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Names:
    host: str
    outward: str  # the address other machines would see; empty: there is only loopback
    forward: Lookup
    reverse: tuple[Lookup, ...]


@dataclass(frozen=True)
class Clock:
    now: float  # unix seconds
    newest_file: float  # unix seconds; the kit cannot be from the future
    synchronised: bool | None = None  # None: nobody knows


@dataclass(frozen=True)
class Run:
    folder: str
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """Everything the checks judge; as JSON, what two nodes can be compared by."""

    kit: str
    folder: str  # the working folder
    container: bool
    interpreter: Interpreter
    torch: Torch
    packages: tuple[Package, ...]
    gpus: Gpus
    memory: Memory
    disks: tuple[Space, ...]
    shm: Space | None
    cores: Cores
    limits: Limits
    port: Port
    names: Names
    interfaces: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # what speaks to torch, NCCL, gloo, OpenMP
    shadows: tuple[str, ...] = ()  # files that are imported in place of a library
    clock: Clock = Clock(0, 0)
    programs: Mapping[str, str] = field(default_factory=dict)  # name -> path, empty: not here
    runs: tuple[Run, ...] = ()


def gather(folder: Path, logs: Path, port: int, env: Mapping[str, str] = os.environ) -> Facts:
    """All facts of this machine, as a launch from `folder` with logs in `logs` would meet them."""
    return Facts(
        kit=str(KIT),
        folder=str(folder),
        container=in_container(),
        interpreter=which_python(sys.executable, folder, env),
        torch=ask_torch(sys.executable),
        packages=required_packages(KIT / "requirements.txt"),
        gpus=look_at_gpus(),
        memory=look_at_memory(),
        disks=(
            look_at_space("working folder", folder),
            look_at_space("logs", logs),
            look_at_space("/tmp", Path("/tmp")),
        ),
        shm=look_at_space("/dev/shm", Path("/dev/shm")) if os.path.isdir("/dev/shm") else None,
        cores=look_at_cores(),
        limits=look_at_limits(),
        port=Port(port, port_is_free(port), listener(port), ephemeral_range(), loopback_error()),
        names=look_up_names(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment={name: value for name, value in sorted(env.items()) if SPEAKING.fullmatch(name)},
        shadows=find_shadows(folder, env.get("PYTHONPATH", "")),
        clock=Clock(time.time(), Path(__file__).stat().st_mtime, clock_is_synchronised()),
        programs={name: shutil.which(name) or "" for name in PROGRAMS},
        runs=find_runs(),
    )


# ---------------------------------------------------------------- asking


@dataclass(frozen=True)
class Reply:
    code: int | None  # None: the program is not there, or gave no answer in time
    out: str = ""
    error: str = ""


def ask(words: Sequence[str], limit: float) -> Reply:
    """Run a program for at most `limit` seconds.

    One that waits inside a broken driver cannot be killed: it is left alone.
    """
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        return Reply(None, "", f"{words[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return Reply(None, "", f"no answer within {limit:g} s")
    return Reply(process.returncode, out, err)


def read(path: Path) -> str:
    """The text of a file of /proc or /sys, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def in_container() -> bool:
    marks = Path("/.dockerenv"), Path("/run/.containerenv"), Path("/var/run/secrets/kubernetes.io")
    return "container" in os.environ or any(mark.exists() for mark in marks)


# ---------------------------------------------------------------- Python and PyTorch


def which_python(executable: str, folder: Path, env: Mapping[str, str]) -> Interpreter:
    """Which Python this is, and by which of the launchers' rules it was picked."""
    virtual, conda = env.get("VIRTUAL_ENV", ""), env.get("CONDA_PREFIX", "")
    if virtual and executable == f"{virtual}/bin/python":
        why = "the active virtual environment"
    elif executable == f"{folder}/.venv/bin/python":
        why = ".venv of the working folder"
    elif executable == shutil.which("python3", path=env.get("PATH")):
        why = "python3 of PATH"
    else:
        why = "as called"
    in_conda = Path(sys.prefix, "conda-meta").is_dir()
    return Interpreter(
        path=executable,
        version=".".join(map(str, sys.version_info[:3])),
        why=why,
        isolated=in_conda or sys.prefix != sys.base_prefix,
        unused_conda="" if executable.startswith(conda + "/") else conda,
    )


TORCH_QUESTIONS = """
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
    "file": torch.__file__,
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


def ask_torch(python: str, limit: float = TORCH_LIMIT) -> Torch:
    """What PyTorch says of itself, asked in a process of its own: a broken one is a fact, not a crash."""
    version = installed("torch")
    if not version:
        return Torch()
    reply = ask([python, "-c", TORCH_QUESTIONS], limit)
    if reply.code != 0:
        return Torch(version, error=import_error(reply))
    told: dict[str, Any] = json.loads(reply.out.splitlines()[-1])
    told |= {name: tuple(told[name]) for name in ("archs", "capabilities")}
    return Torch(version, **told)


def import_error(reply: Reply) -> str:
    if reply.code is not None and reply.code < 0:
        return f"Python dies of {signal.Signals(-reply.code).name} while importing it"
    return (reply.error.strip().splitlines() or [f"Python exits with {reply.code}"])[-1]


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
    hollow = [str(place / "torch") for place in (folder, *places) if is_hollow_torch(place / "torch")]
    return tuple(sorted(own) + foreign + hollow)


def is_hollow_torch(package: Path) -> bool:
    """A package `torch` without PyTorch's compiled part, as in a checkout of its sources."""
    return (package / "__init__.py").exists() and not any(package.glob("_C.*"))


# ---------------------------------------------------------------- GPUs


GPU_FIELDS = (
    "index,uuid,driver_version,memory.total,memory.used,persistence_mode,mig.mode.current,"
    "ecc.errors.uncorrected.volatile.total,compute_mode,name"
)
APP_FIELDS = "gpu_uuid,pid,used_memory,process_name"


def look_at_gpus(dev: Path = Path("/dev"), sys_folder: Path = SYS) -> Gpus:
    """The GPUs and who uses them, as nvidia-smi tells."""
    hardware = nvidia_cards(sys_folder)
    if not shutil.which("nvidia-smi"):
        return Gpus(hardware=hardware, devices=device_files(dev))
    reply = query("gpu", GPU_FIELDS)
    if reply.code == 6 or "No devices were found" in reply.out:
        return Gpus(hardware=hardware)
    if reply.code != 0:
        return Gpus(hardware=hardware, error="nvidia-smi: " + " ".join((reply.out + reply.error).split()))
    users = gpu_processes(query("compute-apps", APP_FIELDS).out)
    rows = table(reply.out, GPU_FIELDS)
    return Gpus(
        driver=rows[0]["driver_version"] if rows else "",
        hardware=hardware,
        devices=tuple(gpu_from(row, users.get(row["uuid"], ())) for row in rows),
        xids=xids(ask(["dmesg"], 5).out),
    )


def query(what: str, fields: str) -> Reply:
    return ask(["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"], NVIDIA_LIMIT)


def table(csv: str, fields: str) -> list[dict[str, str]]:
    """nvidia-smi quotes nothing: the last field is the one that may hold a comma."""
    keys = fields.split(",")
    rows = [line.split(", ", len(keys) - 1) for line in csv.splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def gpu_from(row: Mapping[str, str], processes: tuple[GpuProcess, ...]) -> Gpu:
    return Gpu(
        index=count(row["index"]),
        uuid=row["uuid"],
        name=row["name"],
        memory=mebibytes(row["memory.total"]),
        memory_used=mebibytes(row["memory.used"]),
        persistence=row["persistence_mode"] != "Disabled",
        mig=row["mig.mode.current"] == "Enabled",
        ecc_errors=count(row["ecc.errors.uncorrected.volatile.total"]),
        compute_mode=row["compute_mode"],
        processes=processes,
    )


def gpu_processes(csv: str) -> dict[str, tuple[GpuProcess, ...]]:
    """GPU uuid -> its processes."""
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


def count(word: str) -> int:
    """A number of nvidia-smi; 0 for [N/A] and its like."""
    return int(word) if word.isdigit() else 0


def mebibytes(word: str) -> int:
    return count(word) * MIB


def owner(pid: int, proc: Path = PROC) -> str:
    """The user of a process; empty when it is not to be seen from here."""
    try:
        uid = (proc / str(pid)).stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def nvidia_cards(sys_folder: Path) -> int:
    """NVIDIA's display and compute cards on the PCI bus, whether a driver knows them or not."""
    devices = sys_folder.glob("bus/pci/devices/*")
    return sum(read(card / "vendor") == "0x10de" and read(card / "class").startswith("0x03") for card in devices)


def xids(kernel_log: str) -> tuple[str, ...]:
    """Each kind of GPU error that the kernel reported, once, such as `PCI:0000:3b:00 79`."""
    found = re.findall(r"NVRM: Xid \((PCI:[0-9a-fA-F:.]+)\): (\d+)", kernel_log)
    return tuple(dict.fromkeys(f"{bus} {code}" for bus, code in found if code not in PROGRAM_XIDS))


def device_files(dev: Path) -> tuple[Gpu, ...]:
    """Where there is no nvidia-smi, the kernel's files at least tell how many GPUs there are."""
    numbers = [path.name.removeprefix("nvidia") for path in dev.glob("nvidia*")]
    indices = sorted(int(number) for number in numbers if number.isdigit())
    return tuple(Gpu(index, f"/dev/nvidia{index}", "NVIDIA GPU", 0, 0) for index in indices)


def visible(setting: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; None when it is not set.

    As CUDA reads it: numbers or beginnings of a uuid, up to the first that is no GPU; one named twice leaves
    none.
    Where MIG is on, a process sees one slice of one GPU.
    """
    words = None if setting is None else [word.strip() for word in setting.split(",")]
    seen = list(gpus) if words is None else known(words, gpus)
    if words is not None and len(set(words[: len(seen)])) < len(seen):
        return ()
    sliced = [gpu for gpu in seen if gpu.mig]
    return tuple(sliced[:1] or seen)


def known(words: Sequence[str], gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that these words name, up to the first that names none."""
    found: list[Gpu] = []
    for word in words:
        gpu = named(word, gpus)
        if gpu is None:
            break
        found.append(gpu)
    return found


def named(word: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if word.startswith("MIG-"):
        found = [gpu for gpu in gpus if gpu.mig]
    elif word.startswith("GPU-"):
        found = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
    else:
        found = [gpu for gpu in gpus if str(gpu.index) == word]
    return found[0] if found else None


# ---------------------------------------------------------------- memory, disk, cores, limits


def look_at_memory(proc: Path = PROC, sys_folder: Path = SYS) -> Memory:
    table = {name: int(number) * 1024 for name, number in re.findall(r"(\w+):\s+(\d+) kB", read(proc / "meminfo"))}
    total = table.get("MemTotal", 0)
    limit = cgroup_limit("memory", ("memory.max", "memory.limit_in_bytes"), proc, sys_folder)
    return Memory(
        total=total,
        available=table.get("MemAvailable", 0),
        limit=limit if limit is not None and limit < total else None,
        swap_total=table.get("SwapTotal", 0),
        swap_free=table.get("SwapFree", 0),
    )


def cgroup_folders(controller: str, proc: Path, sys_folder: Path) -> Iterator[Path]:
    """The control groups that bind this process: its own and those above it.

    In /proc/self/cgroup a line is `0::/path` for version 2, `4:memory:/path` for version 1.
    """
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = sys_folder / "fs/cgroup" / (controller if controllers else "")
        own = root / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def cgroup_limit(controller: str, files: Sequence[str], proc: Path, sys_folder: Path) -> int | None:
    """The smallest number in these files; None when all say max or -1, or are not there."""
    texts = [read(folder / name) for folder in cgroup_folders(controller, proc, sys_folder) for name in files]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def cpu_quota(proc: Path, sys_folder: Path) -> float | None:
    """In cores: quota / period, both in microseconds."""
    quotas = []
    for folder in cgroup_folders("cpu", proc, sys_folder):
        text = read(folder / "cpu.max") or f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
        if share := re.fullmatch(r"(\d+) (\d+)", text):
            quotas.append(int(share[1]) / int(share[2]))
    return min(quotas, default=None)


def look_at_space(purpose: str, path: Path) -> Space:
    """Room in a folder, or where it would be made."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    room = os.statvfs(there)
    return Space(
        purpose=purpose,
        path=str(path),
        total=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        inodes_free=room.f_files == 0 or room.f_favail > 0,
        writable=os.access(there, os.W_OK | os.X_OK),
    )


def look_at_cores(proc: Path = PROC, sys_folder: Path = SYS) -> Cores:
    return Cores(
        present=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        quota=cpu_quota(proc, sys_folder),
        load=os.getloadavg()[0],
    )


def look_at_limits(proc: Path = PROC, sys_folder: Path = SYS) -> Limits:
    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_user = bounded(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    of_group = cgroup_limit("pids", ("pids.max",), proc, sys_folder)
    return Limits(
        open_files=bounded(open_files),
        open_files_hard=bounded(open_files_hard),
        locked_memory=bounded(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        processes=min((limit for limit in (of_user, of_group) if limit is not None), default=None),
        infiniband=any(sys_folder.glob("class/infiniband/*")),
    )


def bounded(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


# ---------------------------------------------------------------- network


def port_is_free(port: int) -> bool:
    """Whether a store could listen on it at all addresses, as PyTorch's does."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind((address, port))
                listening.listen()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
    return True


def listener(port: int, proc: Path = PROC) -> str:
    """Who listens on the port, as "pid 12 (python train.py)"; empty when nobody that may be seen."""
    sockets = {
        f"socket:[{columns[9]}]"
        for table in ("net/tcp", "net/tcp6")
        for columns in map(str.split, read(proc / table).splitlines()[1:])
        if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port
    }
    for link in proc.glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if os.readlink(link) in sockets:
                process = link.parents[1]
                return f"pid {process.name} ({read(process / 'cmdline').replace(chr(0), ' ').strip()[:60]})"
    return ""


def ephemeral_range(proc: Path = PROC) -> tuple[int, int]:
    low, high = read(proc / "sys/net/ipv4/ip_local_port_range").split() or (32768, 60999)
    return int(low), int(high)


def loopback_error() -> str:
    """Why two processes of this machine cannot speak over 127.0.0.1; empty when they can."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 2),
        ):
            return ""
    except OSError as error:
        return str(error)


def look_up_names() -> Names:
    """What the host's own name leads to, and what its addresses lead back to, all looked up at once."""
    host, outward = socket.gethostname(), outward_address()
    addresses = dict.fromkeys(address for address in ("127.0.0.1", outward) if address)
    forward, *reverse = look_up(
        {host: lambda: forward_lookup(host)}
        | {address: lambda address=address: reverse_lookup(address) for address in addresses}
    )
    return Names(host, outward, forward, tuple(reverse))


def outward_address() -> str:
    """The address other machines see; 192.0.2.1 is nobody's."""
    return address_towards("192.0.2.1")


def address_towards(host: str) -> str:
    """The IPv4 address of this machine on the way to a host; empty when there is none, or it cannot be told (IPv6)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def interface_to(host: str) -> str:
    """The network interface on the way to a host; empty when there is none, or it cannot be told (IPv6)."""
    own = address_towards(host)
    return next((name for _, name in socket.if_nameindex() if own and address_of_interface(name) == own), "")


def address_of_interface(name: str) -> str:
    """Its IPv4 address; empty when it has none."""
    answer = ask_interface(name, SIOCGIFADDR)
    return socket.inet_ntoa(answer[20:24]) if answer else ""


def mtu_of_interface(name: str) -> int:
    """The most bytes that it sends in a packet; 0 when that is not known."""
    answer = ask_interface(name, SIOCGIFMTU)
    return int(struct.unpack_from("i", answer, 16)[0]) if answer else 0


def ask_interface(name: str, question: int) -> bytes:
    """What the kernel says of it, a struct ifreq; empty when it says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        return fcntl.ioctl(probe.fileno(), question, struct.pack("256s", name.encode()[:15]))
    return b""


def forward_lookup(host: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def reverse_lookup(address: str) -> tuple[str, ...]:
    return (socket.getnameinfo((address, 0), 0)[0],)


def look_up(questions: Mapping[str, Callable[[], tuple[str, ...]]], limit: float = LOOKUP_LIMIT) -> list[Lookup]:
    """Ask everything at once, in threads that are left alone when they take longer than `limit` seconds."""
    done: dict[str, Lookup] = {}

    def answer(query: str, question: Callable[[], tuple[str, ...]]) -> None:
        begin = time.monotonic()
        try:
            answers, error = question(), ""
        except OSError as problem:
            answers, error = (), problem.strerror or str(problem)
        done[query] = Lookup(query, answers, time.monotonic() - begin, error)

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in questions.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {limit:g} s"
    return [done.get(query, Lookup(query, (), limit, late)) for query in questions]


# ---------------------------------------------------------------- clock and processes


def clock_is_synchronised() -> bool | None:
    answer = ask(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 3).out.strip()
    return {"yes": True, "no": False}.get(answer)


def find_runs(proc: Path = PROC) -> tuple[Run, ...]:
    """Processes of runs of this kit: their launchers gave them MUSTER_RUN_DIR. Our own run is not counted."""
    found: dict[str, list[int]] = {}
    for process in proc.glob("[0-9]*"):
        if marker := re.search(r"(?:^|\0)MUSTER_RUN_DIR=([^\0]+)", read(process / "environ")):
            found.setdefault(marker[1], []).append(int(process.name))
    found.pop(os.environ.get("MUSTER_RUN_DIR", ""), None)
    return tuple(Run(folder, tuple(sorted(pids))) for folder, pids in sorted(found.items()))
