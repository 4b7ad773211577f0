"""Health checks of one machine. Each check takes the machine's facts and yields findings: ok, warning or fault.

Warnings and faults have a fix, a command or both. An ok finding is dropped if the same check yields a warning or fault.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distributed import terminal
from distributed.host.facts import REPORTED_VARIABLES, Facts, RunProcesses
from distributed.host.gpus import MPS_SERVER, Gpu, visible
from distributed.host.interpreter import Torch
from distributed.host.system import GIB, MIB

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)  # in older versions, a checkpoint can run code: CVE-2025-32434, CVE-2026-24747


@dataclass(frozen=True)
class Finding:
    level: str  # ok, warning, fault
    fact: str
    fix: str = ""  # a sentence
    command: str = ""  # a shell command
    topic: str = ""  # "": the topic of the check in CHECKS


ok, warning, fault = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "fault")
LEVELS = ("ok", "warning", "fault")  # in the order of printing: faults come last, so they stay in view


# ---------------------------------------------------------------- Python and PyTorch


def check_python(facts: Facts) -> Iterator[Finding]:
    python = facts.interpreter
    if numbers(python.version) < OLDEST_PYTHON:
        yield fault(
            f"{python.version} is older than 3.10: {python.path}",
            "install Python 3.10 or newer, or choose another with --python PATH",
        )
    else:
        yield ok(f"{python.version}: {python.path}")


def check_torch(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if not torch.version:
        yield fault("PyTorch is not installed", command=install_command(facts))
        return
    if numbers(torch.version) < OLDEST_TORCH:
        yield fault(
            f"{torch.version} is older than 2.10: loading a checkpoint can run arbitrary code (CVE-2025-32434, "
            "CVE-2026-24747)",
            command=f"{shlex.quote(facts.interpreter.path)} -m pip install --upgrade 'torch>=2.10'",
        )
    if torch.error:
        yield fault(
            f"{torch.version} is installed, but cannot be imported: {torch.error}",
            command=f"{shlex.quote(facts.interpreter.path)} -m pip install --force-reinstall torch",
        )
    elif torch.seconds > 20:
        yield warning(
            f"{torch.version} takes {torch.seconds:.0f} s to import, at every start",
            "if the virtual environment is on a network disk, move it to a local disk",
        )
    else:
        yield ok(f"{torch.version} for {built_for(torch)}, imported in {torch.seconds:.1f} s")


def built_for(torch: Torch) -> str:
    if torch.hip:
        return f"ROCm {torch.hip}"
    if not torch.cuda:
        return "the CPU" + (" with gloo" if torch.gloo else "")
    return f"CUDA {torch.cuda}" + (f" with NCCL {torch.nccl}" if torch.nccl else ", without NCCL")


def check_packages(facts: Facts) -> Iterator[Finding]:
    """The packages in requirements.txt except torch. Only train.py and job lists need them."""
    missing = [package.name for package in facts.packages if not package.installed]
    old = [
        f"{package.name} {package.installed} (needs {package.oldest})"
        for package in facts.packages
        if package.installed and numbers(package.installed) < numbers(package.oldest)
    ]
    if missing:
        fact = f"not installed: {', '.join(missing)}; train.py and job lists need requirements.txt"
        yield warning(fact, command=install_command(facts))
    if old:
        fact = f"older than requirements.txt requires: {', '.join(old)}"
        yield warning(fact, command=install_command(facts))
    yield ok(f"{len(facts.packages)} other packages of requirements.txt installed")


def install_command(facts: Facts) -> str:
    """The pip command. If pip may refuse to change this Python, the command first creates a virtual environment."""
    python, requirements = map(shlex.quote, (facts.interpreter.path, f"{facts.kit}/requirements.txt"))
    if facts.interpreter.isolated:
        return f"{python} -m pip install -r {requirements}"
    return f"{python} -m venv .venv && .venv/bin/python -m pip install -r {requirements}"


def check_cuda(facts: Facts) -> Iterator[Finding]:
    torch, gpus = facts.torch, facts.gpus
    count = terminal.plural(len(gpus.devices), "GPU")
    if not gpus.devices or not torch.version or torch.error:
        return
    if not torch.cuda and not torch.hip:
        yield fault(
            f"torch {torch.version} is built without CUDA, but the machine has {count}",
            "install the build for your driver: https://pytorch.org/get-started/locally",
        )
    elif torch.cuda_available:
        yield from check_architecture(torch)
    elif visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), gpus.devices):
        yield fault(
            f"torch sees none of {count}" + (torch.complaint and f": {torch.complaint}"),
            "if this is a container, start it with --gpus all; otherwise restart the machine or update the driver",
        )


def check_architecture(torch: Torch) -> Iterator[Finding]:
    """If torch has no code for a GPU, the first kernel on it fails with "no kernel image is available"."""
    missing = sorted({gpu for gpu in torch.capabilities if not has_code(torch.archs, gpu)})
    if missing:
        yield fault(
            f"torch {torch.version} has no code for {', '.join(missing)}, only for {', '.join(torch.archs)}",
            "install a build for these GPUs: https://pytorch.org/get-started/locally",
        )


def has_code(archs: Sequence[str], gpu: str) -> bool:
    """Code for sm_XY runs on X.Y and later minor versions, code for compute_XY (PTX) on X.Y and all later versions."""
    _, major, minor = _architecture(gpu)
    for arch in archs:
        kind, arch_major, arch_minor = _architecture(arch)
        if kind == "sm" and arch_major == major and arch_minor <= minor:
            return True
        if kind == "compute" and (arch_major, arch_minor) <= (major, minor):
            return True
    return False


def _architecture(name: str) -> tuple[str, int, int]:
    """Kind, major and minor version of sm_90a; -1 for a name of another form."""
    found = re.match(r"([a-z]+)_([0-9]{1,4})", name)
    return (found[1], *divmod(int(found[2]), 10)) if found else ("", -1, -1)


# ---------------------------------------------------------------- GPUs


def check_gpus(facts: Facts) -> Iterator[Finding]:
    gpus, setting = facts.gpus, facts.environment.get("CUDA_VISIBLE_DEVICES")
    if gpus.error:
        yield fault(
            gpus.error,
            "restart the machine or reinstall NVIDIA's driver; if permission is denied, ask for access to /dev/nvidia* "
            "(ls -l /dev/nvidia*)",
        )
    elif not gpus.devices and gpus.hardware:
        yield warning(
            f"{terminal.plural(gpus.hardware, 'NVIDIA card')}, but no working driver: training runs on the CPU",
            "install NVIDIA's driver (Ubuntu: sudo ubuntu-drivers install), then restart",
        )
    elif not gpus.devices:
        yield ok("none: training runs on the CPU with gloo")
    elif not gpus.driver:
        yield warning(
            f"{len(gpus.devices)}, but nvidia-smi is not on PATH: processes that use them are not shown",
            "install NVIDIA's utilities; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    elif setting is None:
        yield ok(f"{describe(gpus.devices)}, driver {gpus.driver}")
    else:
        yield from check_visible(setting, facts)


def check_visible(setting: str, facts: Facts) -> Iterator[Finding]:
    """CUDA reads CUDA_VISIBLE_DEVICES up to the first unknown entry and silently ignores the rest."""
    gpus = facts.gpus
    count, seen = len(gpus.devices), visible(setting, gpus.devices)
    entries = [entry for entry in setting.split(",") if entry.strip()]
    if not seen:
        yield warning(
            f"CUDA_VISIBLE_DEVICES={shlex.quote(setting)} hides {'the GPU' if count == 1 else f'all {count} GPUs'}: "
            "training runs on the CPU",
            command="unset CUDA_VISIBLE_DEVICES",
        )
    elif len(seen) < len(entries) and not seen[0].mig:  # with MIG, a process sees only one listed GPU
        yield fault(
            f"CUDA_VISIBLE_DEVICES={setting} lists {terminal.plural(len(entries), 'GPU')}, but CUDA uses {len(seen)}: "
            f"it ignores the first unknown GPU and the rest of the list; this machine has GPUs 0 to {count - 1}",
            command="unset CUDA_VISIBLE_DEVICES",
        )
    else:
        use = f"CUDA_VISIBLE_DEVICES={setting}: {len(seen)} of {terminal.plural(count, 'GPU')}"
        yield ok(f"{describe(seen)}, driver {gpus.driver} ({use})")


def describe(gpus: Sequence[Gpu]) -> str:
    names = {gpu.name: [other for other in gpus if other.name == gpu.name] for gpu in gpus}
    memory = {name: f", {size(alike[0].memory)}" if alike[0].memory else "" for name, alike in names.items()}
    return "; ".join(f"{len(alike)} x {name}{memory[name]}" for name, alike in names.items())


def check_gpu_use(facts: Facts) -> Iterator[Finding]:
    seen = visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), facts.gpus.devices)
    idle = [gpu for gpu in facts.gpus.devices if not gpu.busy]
    full = [gpu for gpu in seen if gpu.busy and gpu.memory and (gpu.memory_used or 0) > 0.9 * gpu.memory]
    shared = [gpu for gpu in seen if gpu.busy and gpu not in full]
    runs = {pid: run for run in facts.runs for pid in run.pids}
    fix: tuple[str, ...] = ("no GPU is idle; wait, or ask the users",)
    if idle:  # nvidia-smi numbers GPUs by PCI bus; CUDA numbers them by speed unless CUDA_DEVICE_ORDER is set
        indices = ",".join(str(gpu.index) for gpu in idle)
        fix = ("use the idle GPUs:", f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={indices}")
    for level, gpus in (("warning", shared), ("fault", full)):
        if gpus:
            yield Finding(level, "; ".join(describe_use(gpu, runs) for gpu in gpus), *fix)


def describe_use(gpu: Gpu, runs: Mapping[int, RunProcesses]) -> str:
    """runs: process id -> its run."""
    users = []
    for user in gpu.processes:
        run = f", run {Path(runs[user.pid].directory).name}" if user.pid in runs else ""
        users.append(f"{user.name} of {user.user or 'an unknown user'} (pid {user.pid}{run})")
    by = ", ".join(users) or "a process that is not visible here"
    used = "" if gpu.memory_used is None else f"{size(gpu.memory_used)} of {size(gpu.memory)} "
    return f"GPU {gpu.index}: {used}used by {by}"


def check_gpu_health(facts: Facts) -> Iterator[Finding]:
    for lost in facts.gpus.lost:
        yield fault(lost.reason, "restart the machine; if it recurs, have the card replaced", topic=f"GPU {lost.index}")
    for gpu in visible(facts.environment.get("CUDA_VISIBLE_DEVICES"), facts.gpus.devices):
        if gpu.mig:
            yield warning(
                "MIG is enabled: a process sees one instance, and NCCL connects instances only since version 2.32",
                "to use the whole GPU, stop its processes, then:",
                f"sudo nvidia-smi --id={gpu.index} --multi-instance-gpu=0",
                f"GPU {gpu.index}",
            )
        if (mode := gpu.compute_mode).startswith(("E", "P")) and MPS_SERVER not in {one.name for one in gpu.processes}:
            fact = f"compute mode {mode}, without MPS: {'each' if mode[0] == 'P' else 'a second'} process fails"
            command = f"sudo nvidia-smi --id={gpu.index} --compute-mode=DEFAULT"
            yield warning(fact, "", command, f"GPU {gpu.index}")


# ---------------------------------------------------------------- memory and disk


def check_memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    total = memory.limit or memory.total
    available = min(memory.available, total)
    limit = " (limit of this container or job)" if memory.limit else ""
    fact = f"{size(available)} of {size(total)}{limit} free"
    if available < GIB:
        yield fault(f"{fact}: not enough for two ranks", "find what uses it:", "ps aux --sort=-rss | head")
    elif available < 4 * GIB:
        yield warning(f"{fact}: each rank needs about 0.5 GiB besides the model", "", "ps aux --sort=-rss | head")
    else:
        yield ok(fact)


def check_disks(facts: Facts) -> Iterator[Finding]:
    for disk in facts.disks:
        path, free = shlex.quote(disk.path), f"{disk.purpose}: {size(disk.free)} free in {disk.path}"
        free_space = "free some space:", f"du -xh {path} | sort -h | tail"
        if not disk.writable:
            yield fault(
                f"{disk.purpose}: {disk.path} cannot be written",
                "choose another directory, or change its permissions:",
                f"ls -ld {path}",
            )
        elif not disk.inodes_free:
            yield fault(f"{disk.purpose}: no free inodes in {disk.path}", "", f"df -i {path}")
        elif disk.free < GIB:
            yield fault(free, *free_space)
        elif disk.free < 10 * GIB and disk.purpose != "/tmp":
            yield warning(f"{free}; a checkpoint takes 12 bytes per parameter", *free_space)
    yield ok("free: " + ", ".join(f"{disk.purpose} {size(disk.free)}" for disk in facts.disks))


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Ranks and data loader workers exchange data through /dev/shm. When it is full, they are killed by SIGBUS."""
    shm = facts.shm
    enlarge = ("", "sudo mount -o remount,size=50% /dev/shm")
    if facts.container:
        enlarge = ("start the container with --shm-size=8g or --ipc=host", "")
    if shm.total <= 64 * MIB:
        yield fault(f"only {size(shm.total)}: ranks and data loader workers are killed by SIGBUS", *enlarge)
    elif shm.free < 64 * MIB:
        yield fault(
            f"{size(shm.free)} of {size(shm.total)} free", "remove the files of dead processes:", "ls -lt /dev/shm"
        )
    elif shm.total < GIB:
        yield warning(f"only {size(shm.total)}: may be too small for data loader workers", *enlarge)
    else:
        yield ok(f"{size(shm.free)} of {size(shm.total)} free")


# ---------------------------------------------------------------- network and shell


def check_port(facts: Facts) -> Iterator[Finding]:
    port = facts.port
    if not port.free:
        yield fault(
            f"{port.number} is in use" + (port.holder and f" by {port.holder}"),
            "choose another with --master-port",
            "" if port.holder else f"sudo ss -ltnp 'sport = :{port.number}'",
        )
    else:
        yield ok(f"{port.number} is free")


def check_names(facts: Facts) -> Iterator[Finding]:
    """The host's own name must resolve to an address that other nodes can use."""
    names, forward = facts.names, facts.names.forward
    entry = f"{names.outward or '127.0.0.1'} {names.host}"
    if forward.error:
        yield warning(
            f"the host's own name {names.host} does not resolve: {forward.error}",
            "add it to /etc/hosts:",
            f"echo {shlex.quote(entry)} | sudo tee -a /etc/hosts",
        )
    elif names.outward and all(address.startswith("127.") or address == "::1" for address in forward.answers):
        yield warning(
            f"{names.host} resolves to {', '.join(forward.answers)}: works on one machine, not across several",
            f"in /etc/hosts, map {names.host} to {names.outward}",
        )
    elif forward.seconds < 0.5:
        yield ok(f"{names.host} resolves to {', '.join(forward.answers)}")


def check_resolver(facts: Facts) -> Iterator[Finding]:
    """Every connection to the store does a reverse lookup, so a slow resolver delays each of them."""
    slow = [lookup for lookup in (facts.names.forward, *facts.names.reverse) if lookup.seconds >= 0.5]
    if not slow:
        return
    worst = max(slow, key=lambda lookup: lookup.seconds)
    yield Finding(
        "fault" if worst.seconds >= 3 else "warning",
        "; ".join(f"looking up {lookup.query} takes {lookup.seconds:.1f} s" for lookup in slow)
        + ": each rank waits that long several times",
        "add all nodes to /etc/hosts, or a working resolver to /etc/resolv.conf",
    )


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Variables that were set by an earlier launch or by a shell profile."""
    env = {name: value for name, value in facts.environment.items() if REPORTED_VARIABLES.fullmatch(name)}
    of_rank = r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_(ADDR|PORT)"
    left_over = [name for name in env if re.fullmatch(of_rank, name)]
    if left_over == ["MASTER_PORT"]:  # MASTER_PORT alone is an option of the launchers
        left_over = []
    left_over += [name for name in env if name.startswith(("TORCHELASTIC_", "PET_"))]
    if left_over:
        fact = f"left over from a launch: {', '.join(f'{name}={env[name]}' for name in left_over)}"
        yield warning(fact, command=f"unset {' '.join(left_over)}")
    yield from check_interfaces(facts)
    yield ok("no variables of another launch in the environment")


def check_interfaces(facts: Facts) -> Iterator[Finding]:
    """NCCL accepts prefixes, `=name` and `^name`; gloo accepts whole names only."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.environment.get(variable, "")
        names = [name for name in value.lstrip("=").split(",") if name]
        exact = variable.startswith("GLOO") or value.startswith("=")
        found = [name for name in names if any(i == name if exact else i.startswith(name) for i in facts.interfaces)]
        if not value.startswith("^") and names and (not found or (exact and len(found) < len(names))):
            fact = f"{variable}={value}: no such network interface; this machine has {', '.join(facts.interfaces)}"
            yield fault(fact, command=f"unset {variable}")


def check_nccl(facts: Facts) -> Iterator[Finding]:
    names = facts.environment.get("NCCL_SOCKET_IFNAME") or ", ".join(facts.nccl_interfaces)
    if facts.torch.nccl and names:
        yield ok(f"connects nodes through {'InfiniBand, set up over ' * facts.infiniband}{names}")


def check_shadows(facts: Facts) -> Iterator[Finding]:
    """Files and packages that Python may import in place of a library or Muster's package that has the same name."""
    for path in facts.shadows:
        name = Path(path).stem
        muster = f"{path} shadows Muster's package {name!r}"
        yield Finding(
            "fault" if name == "torch" else "warning",
            muster if name == "distributed" else f"{path} shadows the library {name!r}",
            "rename it" if Path(path).parent == Path(facts.directory) else "remove its directory from PYTHONPATH",
        )


def check_runs(facts: Facts) -> Iterator[Finding]:
    """Runs that have processes on this machine, whether or not their launcher still runs."""
    for run in facts.runs:
        count = f"{len(run.pids)} process{'es' * (len(run.pids) > 1)}"
        yield warning(f"{run.directory} has {count} of {run.user} here", *how_to_stop(run, facts))
    yield ok("none on this machine")


def how_to_stop(run: RunProcesses, facts: Facts) -> tuple[str, str]:
    """A fix and a command. The run may be training, or belong to another user, so the command never kills it."""
    if run.user != facts.user:
        return f"ask {run.user} whether it is still needed", ""
    if not run.recorded:
        pids = ",".join(map(str, run.pids))
        fix = "started from another machine or by a job list; stop it there, or cancel the job; its processes:"
        return fix, f"ps -fp {pids}"
    scripts, directory = f"{facts.kit}/scripts", shlex.quote(run.directory)
    status, stop = (f"{shlex.quote(f'{scripts}/{name}.sh')} {directory}" for name in ("status", "stop"))
    return f"to stop it: {stop}; to see whether it is training:", status


CHECKS: tuple[tuple[str, Callable[[Facts], Iterator[Finding]]], ...] = (
    ("python", check_python),
    ("torch", check_torch),
    ("packages", check_packages),
    ("GPUs", check_gpus),
    ("cuda", check_cuda),
    ("GPU use", check_gpu_use),
    ("GPU", check_gpu_health),
    ("memory", check_memory),
    ("disk", check_disks),
    ("/dev/shm", check_shm),
    ("port", check_port),
    ("names", check_names),
    ("resolver", check_resolver),
    ("shell", check_environment),
    ("NCCL", check_nccl),
    ("imports", check_shadows),
    ("runs", check_runs),
)


def judge(facts: Facts) -> list[Finding]:
    """Run all checks. Return the warnings and faults of each check, or its ok findings if it has none."""
    judged = []
    for topic, check in CHECKS:
        findings = [replace(finding, topic=finding.topic or topic) for finding in check(facts)]
        judged += [finding for finding in findings if finding.level != "ok"] or findings
    return judged


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for "2.13.0+cpu"."""
    found = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def size(number: int) -> str:
    """Bytes as text: "64 MiB", "23.5 GiB"."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
