"""What the facts of a machine mean for training: findings that are ok, a warning or a fault, with the fix.

Values in, values out: each check takes the facts and yields what it finds.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distributed import terminal
from distributed.host.facts import Facts, RunProcesses
from distributed.host.gpus import Gpu, visible
from distributed.host.interpreter import Torch
from distributed.host.resources import Space
from distributed.host.system import GIB, MIB

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)  # below it a checkpoint can run code: CVE-2025-32434, CVE-2026-24747


@dataclass(frozen=True)
class Finding:
    level: str  # ok, warning, fault
    topic: str
    fact: str
    fix: str = ""  # in words
    command: str = ""  # to paste


ok, warning, fault = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "fault")
LEVELS = ("ok", "warning", "fault")  # the last is what a person sees first: it stands above the prompt


# ---------------------------------------------------------------- judge: Python and PyTorch


def check_python(facts: Facts) -> Iterator[Finding]:
    python = facts.interpreter
    if numbers(python.version) < OLDEST_PYTHON:
        yield fault(
            "python",
            f"{python.version} is older than 3.10: {python.path}",
            "install Python 3.10 or newer, or name another with --python PATH",
        )
    elif python.unused_conda:
        yield warning(
            "python",
            f"{python.version} of {python.path}, not the active conda {python.unused_conda}",
            "if that is not meant:",
            f"scripts/doctor.sh --python {shlex.quote(python.unused_conda + '/bin/python')}",
        )
    else:
        yield ok("python", f"{python.version}: {python.path}")


def check_torch(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if not torch.version:
        yield fault("torch", "PyTorch is not installed", command=install_command(facts))
        return
    if numbers(torch.version) < OLDEST_TORCH:
        yield fault(
            "torch",
            f"{torch.version} is older than 2.10: loading a checkpoint can run foreign code (CVE-2025-32434, "
            "CVE-2026-24747)",
            command=f"{shlex.quote(facts.interpreter.path)} -m pip install --upgrade 'torch>=2.10'",
        )
    if torch.error:
        yield fault(
            "torch",
            f"{torch.version} is installed, but cannot be imported: {torch.error}",
            command=f"{shlex.quote(facts.interpreter.path)} -m pip install --force-reinstall torch",
        )
    elif torch.seconds > 20:
        yield warning(
            "torch",
            f"{torch.version} takes {torch.seconds:.0f} s to import: every start pays that",
            "put the virtual environment on a local disk instead of a network one",
        )
    elif numbers(torch.version) >= OLDEST_TORCH:
        yield ok("torch", f"{torch.version} for {built_for(torch)}, imported in {torch.seconds:.1f} s")


def built_for(torch: Torch) -> str:
    if torch.hip:
        return f"ROCm {torch.hip}"
    if not torch.cuda:
        return "the CPU" + (" with gloo" if torch.gloo else "")
    return f"CUDA {torch.cuda}" + (f" with NCCL {torch.nccl}" if torch.nccl else ", without NCCL")


def check_packages(facts: Facts) -> Iterator[Finding]:
    """The rest of requirements.txt: train.py and job lists need it, a script of one's own does not."""
    missing = [package.name for package in facts.packages if not package.installed]
    old = [
        f"{package.name} {package.installed} (needs {package.oldest})"
        for package in facts.packages
        if package.installed and numbers(package.installed) < numbers(package.oldest)
    ]
    if missing:
        fact = f"not installed: {', '.join(missing)}; train.py and job lists need requirements.txt"
        yield warning("packages", fact, command=install_command(facts))
    if old:
        yield warning("packages", f"older than requirements.txt says: {', '.join(old)}", command=install_command(facts))
    if not missing and not old:
        yield ok("packages", f"all {len(facts.packages)} others of requirements.txt")


def install_command(facts: Facts) -> str:
    """Outside a virtual environment a distribution's Python refuses to install: make one first."""
    requirements = shlex.quote(f"{facts.kit}/requirements.txt")
    if facts.interpreter.isolated:
        return f"{shlex.quote(facts.interpreter.path)} -m pip install -r {requirements}"
    python = shlex.quote(facts.interpreter.path)
    return f"{python} -m venv .venv && .venv/bin/python -m pip install -r {requirements}"


def check_cuda(facts: Facts) -> Iterator[Finding]:
    torch, gpus = facts.torch, facts.gpus
    count = terminal.plural(len(gpus.devices), "GPU")
    if not gpus.devices or not torch.version or torch.error:
        return
    if not torch.cuda and not torch.hip:
        yield fault(
            "cuda",
            f"torch {torch.version} is built without CUDA, but the machine has {count}",
            "install the build for your driver: https://pytorch.org/get-started/locally",
        )
    elif torch.cuda_available:
        yield from check_architecture(torch)
    elif visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), gpus.devices):
        yield fault(
            "cuda",
            f"nvidia-smi shows {count}, torch sees none" + (torch.complaint and f": {torch.complaint}"),
            "in a container: start it with --gpus all; else restart the machine, or update the driver",
        )


def check_architecture(torch: Torch) -> Iterator[Finding]:
    """This build has code for these GPUs; else the first kernel fails with "no kernel image is available"."""
    missing = sorted({gpu for gpu in torch.capabilities if not has_code(torch.archs, gpu)})
    if missing:
        yield fault(
            "cuda",
            f"torch {torch.version} has no code for {', '.join(missing)}, only for {', '.join(torch.archs)}",
            "install a build that has it: https://pytorch.org/get-started/locally",
        )
    elif not torch.nccl and not torch.hip:
        yield warning("cuda", f"torch {torch.version} is built without NCCL: GPUs would talk through gloo, slowly")


def has_code(archs: Sequence[str], gpu: str) -> bool:
    """sm_XY runs on the same major version from minor Y up; compute_XY is translated for anything newer."""
    major, minor = divmod(int(gpu.removeprefix("sm_")), 10)
    for arch in archs:
        kind, _, digits = arch.partition("_")
        arch_major, arch_minor = divmod(int(re.sub(r"\D", "", digits)), 10)
        if kind == "sm" and arch_major == major and arch_minor <= minor:
            return True
        if kind == "compute" and (arch_major, arch_minor) <= (major, minor):
            return True
    return False


# ---------------------------------------------------------------- judge: GPUs


def check_gpus(facts: Facts) -> Iterator[Finding]:
    gpus, setting = facts.gpus, facts.environment.get("CUDA_VISIBLE_DEVICES")
    if gpus.error:
        yield fault(
            "GPUs",
            gpus.error,
            "restart the machine, or reinstall NVIDIA's driver; without permission, ask for access to /dev/nvidia* "
            "(ls -l /dev/nvidia*)",
        )
    elif not gpus.devices and gpus.hardware:
        yield warning(
            "GPUs",
            f"{gpus.hardware} NVIDIA cards are in this machine, but no driver: training runs on the CPU",
            "install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install), then restart",
        )
    elif not gpus.devices:
        yield ok("GPUs", "none: training runs on the CPU with gloo")
    elif not gpus.driver:
        yield warning(
            "GPUs",
            f"{len(gpus.devices)}, but no nvidia-smi on PATH: who uses them cannot be shown",
            "install NVIDIA's utilities; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    elif setting is None:
        yield ok("GPUs", f"{describe(gpus.devices)}, driver {gpus.driver}")
    else:
        yield from check_visible(setting, facts)


def check_visible(setting: str, facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES hides GPUs, and silently stops at the first word it does not know."""
    gpus = facts.gpus
    count, seen = len(gpus.devices), visible(setting, gpus.devices)
    words = [word for word in setting.split(",") if word.strip()]
    named = terminal.plural(len(words), "GPU")
    if not seen:
        yield warning(
            "GPUs",
            f"CUDA_VISIBLE_DEVICES={shlex.quote(setting)} hides {'the GPU' if count == 1 else f'all {count} GPUs'}: "
            "training runs on the CPU",
            command="unset CUDA_VISIBLE_DEVICES",
        )
    elif len(seen) < len(words) and not setting.startswith("MIG-"):
        yield fault(
            "GPUs",
            f"CUDA_VISIBLE_DEVICES={setting} names {named}, of which CUDA takes {len(seen)}: "
            f"there are {count}, 0 to {count - 1}, and it stops at the first that is not",
            command="unset CUDA_VISIBLE_DEVICES",
        )
    else:
        yield ok("GPUs", f"CUDA_VISIBLE_DEVICES={setting} of {count}: {describe(seen)}, driver {gpus.driver}")


def describe(gpus: Sequence[Gpu]) -> str:
    names = {gpu.name: [other for other in gpus if other.name == gpu.name] for gpu in gpus}
    return "; ".join(f"{len(alike)} x {name}, {size(alike[0].memory)}" for name, alike in names.items())


def check_gpu_use(facts: Facts) -> Iterator[Finding]:
    seen = visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), facts.gpus.devices)
    idle = [gpu for gpu in facts.gpus.devices if not gpu.busy]
    full = [gpu for gpu in seen if gpu.busy and gpu.memory_used > 0.9 * gpu.memory]
    shared = [gpu for gpu in seen if gpu.busy and gpu not in full]
    runs = {pid: run for run in facts.runs for pid in run.pids}
    for level, gpus in (("warning", shared), ("fault", full)):
        if gpus:
            fact = "; ".join(describe_use(gpu, runs) for gpu in gpus)
            if idle:  # nvidia-smi counts by PCI bus, CUDA by speed unless CUDA_DEVICE_ORDER is set
                indices = ",".join(str(gpu.index) for gpu in idle)
                take = f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={indices}"
                yield Finding(level, "GPU use", fact, "use the idle ones:", take)
            else:
                yield Finding(level, "GPU use", fact, "no GPU is idle: wait, or ask their users")


def describe_use(gpu: Gpu, runs: Mapping[int, RunProcesses]) -> str:
    """runs: process id -> the run it belongs to."""
    users = []
    for user in gpu.processes:
        run = f", run {Path(runs[user.pid].folder).name}" if user.pid in runs else ""
        users.append(f"{user.name} of {user.user or 'an unknown user'} (pid {user.pid}{run})")
    by = ", ".join(users) or "a process that cannot be seen from here"
    return f"GPU {gpu.index}: {size(gpu.memory_used)} of {size(gpu.memory)} by {by}"


def check_gpu_health(facts: Facts) -> Iterator[Finding]:
    for gpu in visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), facts.gpus.devices):
        topic = f"GPU {gpu.index}"
        if gpu.ecc_errors:
            yield fault(
                topic,
                f"{gpu.ecc_errors} uncorrected memory errors since the driver was loaded",
                "end what runs on it, then reset it; if they come back, have the card replaced",
                f"sudo nvidia-smi --gpu-reset --id={gpu.index}",
            )
        if gpu.mig:
            yield warning(
                topic,
                "MIG is on: a process sees one slice of it, and slices cannot train together over NCCL",
                "to have the whole GPU, end what runs on it, then",
                f"sudo nvidia-smi --id={gpu.index} --multi-instance-gpu=0",
            )


def check_gpu_host(facts: Facts) -> Iterator[Finding]:
    gpus = facts.gpus.devices
    if gpus and not all(gpu.persistence for gpu in gpus):
        yield warning(
            "GPUs",
            "persistence mode is off: the driver is set up anew, for seconds a GPU, at every start",
            command="sudo nvidia-smi --persistence-mode=1",
        )
    if len({gpu.name for gpu in gpus}) > 1:
        yield warning("GPUs", "they are of several kinds: the slowest sets the pace of every step")


# ---------------------------------------------------------------- judge: memory, disk, cores, limits


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Enough for the ranks, each of which is a Python with PyTorch (about 0.5 GiB)."""
    memory = facts.memory
    total = min(memory.total, memory.limit or memory.total)
    available = min(memory.available, total)
    bound = ", the limit of this container or job" if total < memory.total else ""
    fact = f"{size(available)} of {size(total)} free{bound}"
    if available < GIB:
        yield fault("memory", f"{fact}: not enough for two ranks", "what uses it:", "ps aux --sort=-rss | head")
    elif available < 4 * GIB:
        yield warning(
            "memory", f"{fact}: each rank needs about 0.5 GiB before the model", "", "ps aux --sort=-rss | head"
        )
    else:
        yield ok("memory", fact)


def check_disks(facts: Facts) -> Iterator[Finding]:
    problems = [finding for disk in facts.disks for finding in check_disk(disk)]
    yield from problems
    if not problems:
        yield ok("disk", "free: " + ", ".join(f"{disk.purpose} {size(disk.free)}" for disk in facts.disks))


def check_disk(disk: Space) -> Iterator[Finding]:
    path = shlex.quote(disk.path)
    if not disk.writable:
        yield fault(
            "disk",
            f"{disk.purpose}: {disk.path} cannot be written",
            "choose another folder, or change who may write it:",
            f"ls -ld {path}",
        )
    elif not disk.inodes_free:
        yield fault(
            "disk", f"{disk.purpose}: no file can be made in {disk.path}, all inodes are in use", "", f"df -i {path}"
        )
    elif disk.free < GIB:
        yield fault(
            "disk",
            f"{disk.purpose}: {size(disk.free)} free in {disk.path}",
            "make room:",
            f"du -xh {path} | sort -h | tail",
        )
    elif disk.free < 10 * GIB and disk.purpose != "/tmp":
        yield warning(
            "disk",
            f"{disk.purpose}: {size(disk.free)} free in {disk.path}; a checkpoint takes 12 bytes a parameter",
            "make room:",
            f"du -xh {path} | sort -h | tail",
        )


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Data loader workers and NCCL hand data over in /dev/shm; when it is full they die of a bus error."""
    shm = facts.shm
    if facts.container:
        fix, command = "start the container with --shm-size=8g or --ipc=host", ""
    else:
        fix, command = "", "sudo mount -o remount,size=50% /dev/shm"
    if shm.total <= 64 * MIB:
        yield fault(
            "/dev/shm", f"{size(shm.total)} in all: NCCL and data loader workers die of a bus error", fix, command
        )
    elif shm.free < 64 * MIB:
        yield fault(
            "/dev/shm",
            f"{size(shm.free)} of {size(shm.total)} free",
            "remove what dead processes left:",
            "ls -lt /dev/shm",
        )
    elif shm.total < GIB:
        yield warning("/dev/shm", f"{size(shm.total)} in all: little for data loader workers", fix, command)
    else:
        yield ok("/dev/shm", f"{size(shm.free)} of {size(shm.total)} free")


def check_cores(facts: Facts) -> Iterator[Finding]:
    """Cores that are there are not always cores that may be used."""
    cores = facts.cores
    usable = cores.usable
    fact = f"{usable:g} of {cores.present} may be used, load {cores.load:.1f}"
    if usable < cores.affinity:
        yield warning(
            "cores",
            f"{fact}: the quota of this container or job; OpenMP would start {cores.affinity} threads a rank",
            "with N ranks, N times fewer:",
            f"export OMP_NUM_THREADS={max(1, int(usable))}",
        )
    elif cores.load > 1.5 * usable:
        yield warning("cores", f"{fact}: other processes use them", "", "ps aux --sort=-%cpu | head")
    else:
        yield ok("cores", fact)


def check_limits(facts: Facts) -> Iterator[Finding]:
    limits, problems = facts.limits, []
    if limits.open_files is not None and limits.open_files < 1024:
        problems.append(
            warning(
                "limits",
                f"{limits.open_files} open files: ranks and data loader workers run out of them",
                "where this is refused, raise nofile in /etc/security/limits.conf and log in again:",
                "ulimit -n 65536",
            )
        )
    if limits.processes is not None and limits.processes < 2048:
        problems.append(
            warning(
                "limits",
                f"{limits.processes} processes and threads: a rank takes one a core and some more",
                "raise nproc in /etc/security/limits.conf, in a container --pids-limit",
            )
        )
    if limits.infiniband and limits.locked_memory is not None and limits.locked_memory < GIB:
        problems.append(
            warning(
                "limits",
                f"{size(limits.locked_memory)} of locked memory: too little for InfiniBand",
                "set memlock to unlimited in /etc/security/limits.conf, in a container --ulimit memlock=-1",
            )
        )
    yield from problems
    if not problems:
        yield ok(
            "limits", f"{limits.open_files or 'no limit of'} open files, {limits.processes or 'no limit of'} processes"
        )


# ---------------------------------------------------------------- judge: network and shell


def check_port(facts: Facts) -> Iterator[Finding]:
    port, (low, high) = facts.port, facts.port.ephemeral
    if not port.free:
        yield fault(
            "port",
            f"{port.number} is taken" + (port.holder and f" by {port.holder}"),
            "give the launcher --master-port with another",
            "" if port.holder else f"sudo ss -ltnp 'sport = :{port.number}'",
        )
    elif low <= port.number <= high:
        yield warning(
            "port",
            f"{port.number} is free, but in the ephemeral range {low}-{high}: any connection may take it",
            "give the launcher --master-port with one outside, or reserve it:",
            f"sudo sysctl net.ipv4.ip_local_reserved_ports={port.number}",
        )
    else:
        yield ok("port", f"{port.number} is free and outside the ephemeral range {low}-{high}")


def check_names(facts: Facts) -> Iterator[Finding]:
    """The host's own name leads to an address that other nodes can use."""
    names, forward = facts.names, facts.names.forward
    entry = f"{names.outward or '127.0.0.1'} {names.host}"
    if forward.error:
        yield warning(
            "names",
            f"the host's own name {names.host} does not resolve: {forward.error}",
            "add it to /etc/hosts:",
            f"echo {shlex.quote(entry)} | sudo tee -a /etc/hosts",
        )
    elif names.outward and all(address.startswith("127.") or address == "::1" for address in forward.answers):
        yield warning(
            "names",
            f"{names.host} is {', '.join(forward.answers)}: fine for one machine, a trap for several",
            f"in /etc/hosts, name {names.host} beside {names.outward} instead",
        )
    elif forward.seconds < 0.5:
        yield ok("names", f"{names.host} is {', '.join(forward.answers)}")


def check_resolver(facts: Facts) -> Iterator[Finding]:
    """Every connection to the store looks a name up backwards: a slow resolver is paid for many times."""
    slow = [lookup for lookup in (facts.names.forward, *facts.names.reverse) if lookup.seconds >= 0.5]
    if not slow:
        return
    worst = max(slow, key=lambda lookup: lookup.seconds)
    yield Finding(
        "fault" if worst.seconds >= 3 else "warning",
        "resolver",
        "; ".join(f"looking up {lookup.query} takes {lookup.seconds:.1f} s" for lookup in slow)
        + ": each rank waits that long, several times",
        "put all nodes into /etc/hosts, or a resolver that answers into /etc/resolv.conf",
    )


def check_environment(facts: Facts) -> Iterator[Finding]:
    """What an earlier launch, or a profile, left in this shell."""
    problems = [*leftovers(facts), *missing_interfaces(facts), *odd_settings(facts)]
    yield from problems
    if not problems:
        yield ok("shell", "no leftovers of another launch in the environment")


def leftovers(facts: Facts) -> Iterator[Finding]:
    env = facts.environment
    place = [
        name for name in env if re.fullmatch(r"((LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT))", name)
    ]
    agent = [name for name in env if name.startswith(("TORCHELASTIC_", "PET_"))]
    if place == ["MASTER_PORT"]:  # alone it is a setting, which launchers use
        place = []
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield fault(
            "shell",
            "TORCHELASTIC_USE_AGENT_STORE=True: a process started by hand waits for a store that nobody runs",
            command=f"unset {' '.join(place + agent)}",
        )
    elif place or agent:
        yield warning(
            "shell",
            f"left over from a launch: {', '.join(f'{name}={env[name]}' for name in place + agent)}",
            command=f"unset {' '.join(place + agent)}",
        )


def missing_interfaces(facts: Facts) -> Iterator[Finding]:
    """NCCL takes prefixes, `=exact` and `^not`; gloo takes whole names only."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.environment.get(name, "")
        words = [word for word in value.lstrip("=").split(",") if word]
        exact = name.startswith("GLOO") or value.startswith("=")
        found = [word for word in words if any(i == word if exact else i.startswith(word) for i in facts.interfaces)]
        if not value.startswith("^") and words and (not found or (exact and len(found) < len(words))):
            yield fault(
                "shell",
                f"{name}={value}: no such network interface here, only {', '.join(facts.interfaces)}",
                command=f"unset {name}",
            )


def odd_settings(facts: Facts) -> Iterator[Finding]:
    env, cores = facts.environment, facts.cores.affinity
    threads = env.get("OMP_NUM_THREADS", "1").split(",")[0].strip()
    if not threads.isdigit() or not 1 <= int(threads) <= cores:
        yield warning(
            "shell",
            f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} with {cores} cores",
            command="unset OMP_NUM_THREADS",
        )
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if facts.gpus.devices and env.get(name) == "1":
            yield warning("shell", f"{name}=1 makes GPUs talk to each other more slowly", command=f"unset {name}")


def check_shadows(facts: Facts) -> Iterator[Finding]:
    """Files that Python would import in place of a library."""
    for path in facts.shadows:
        name = Path(path).stem
        yield Finding(
            "fault" if name == "torch" else "warning",
            "imports",
            f"{path} may be imported as {name!r}, in place of the real one",
            "rename it" if Path(path).parent == Path(facts.folder) else "take its folder off PYTHONPATH",
        )


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Logs and verdicts of several nodes are put in order by their clocks."""
    clock = facts.clock
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(clock.now))
    if clock.synchronised is False and not facts.container:
        yield warning(
            "clock",
            f"{now}, not synchronised: times in logs of several nodes will differ",
            "",
            "sudo timedatectl set-ntp true",
        )
    else:
        yield ok("clock", now + (", synchronised" if clock.synchronised else ""))


def check_programs(facts: Facts) -> Iterator[Finding]:
    """Needed by some launchers only: never a fault."""
    here = [name for name, path in facts.programs.items() if path]
    absent = [name for name, path in facts.programs.items() if not path]
    yield ok("programs", ", ".join(here) + ("; not here: " + ", ".join(absent) if absent else ""))


def check_runs(facts: Facts) -> Iterator[Finding]:
    """A run that goes on, or that its launcher left behind."""
    for run in facts.runs:
        count = f"{len(run.pids)} process{'es' * (len(run.pids) > 1)}"
        yield warning("runs", f"{run.folder} has {count} of {run.user} here", *how_to_stop(run, facts))
    if not facts.runs:
        yield ok("runs", "none here")


def how_to_stop(run: RunProcesses, facts: Facts) -> tuple[str, str]:
    """Advice, and a command. The run may be training, or another user's: no command here kills it unseen."""
    if run.user != facts.user:
        return f"ask {run.user} whether it is still needed", ""
    if not run.recorded:
        pids = ",".join(map(str, run.pids))
        return "started from another machine, or by a job list: stop it from there; its processes:", f"ps -fp {pids}"
    scripts, folder = f"{facts.kit}/scripts", shlex.quote(run.folder)
    status, stop = (f"{shlex.quote(f'{scripts}/{name}.sh')} {folder}" for name in ("status", "stop"))
    return f"to stop it: {stop}; to see whether it is training:", status


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_packages,
    check_gpus,
    check_cuda,
    check_gpu_use,
    check_gpu_health,
    check_gpu_host,
    check_memory,
    check_disks,
    check_shm,
    check_cores,
    check_limits,
    check_port,
    check_names,
    check_resolver,
    check_environment,
    check_shadows,
    check_clock,
    check_programs,
    check_runs,
)


def judge(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def size(number: int) -> str:
    """Bytes for people: "64 MiB", "23.5 GiB"."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
