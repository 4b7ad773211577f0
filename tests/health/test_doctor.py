"""The doctor finds what makes training fail, prints a fix, and finds nothing on a healthy machine.

Facts of machines, and files of /proc and /sys, are made by hand; the last tests check this machine.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_gpus import GPUS

from distributed.health import checks
from distributed.health.checks import Finding, judge, numbers
from distributed.health.doctor import base_model_findings, render
from distributed.host.dns import Lookup, NameLookups
from distributed.host.facts import Facts, Port, RunProcesses, find_runs
from distributed.host.gpus import GpuProcess, Gpus, LostGpu
from distributed.host.identity import user
from distributed.host.interpreter import (
    Interpreter,
    Package,
    Torch,
    find_shadows,
    probe_torch,
    required_packages,
)
from distributed.host.resources import (
    Cores,
    Memory,
    Space,
    read_cores,
    read_memory,
)
from distributed.host.system import GIB, KIT, MIB, run_program
from distributed.terminal import plain
from distributed.training import base_model

HEALTHY = Facts(
    kit="/opt/muster",
    directory="/home/ada/project",
    container=False,
    interpreter=Interpreter("/home/ada/project/.venv/bin/python", "3.11.2"),
    torch=Torch(
        "2.13.0",
        seconds=1.5,
        cuda="13.0",
        nccl="2.29.3",
        gloo=True,
        cuda_available=True,
        archs=("sm_80", "sm_90", "compute_120"),
        capabilities=("sm_80",) * 4,
    ),
    packages=(Package("pydantic", "2.9", "2.11.0"), Package("rich", "13.7", "14.0.0")),
    gpus=Gpus("580.65.06", hardware=4, devices=GPUS),
    memory=Memory(512 * GIB, 500 * GIB),
    disks=(
        Space("working directory", "/home/ada/project", 900 * GIB, 500 * GIB),
        Space("/tmp", "/tmp", 9 * GIB, 5 * GIB),
    ),
    shm=Space("/dev/shm", "/dev/shm", 256 * GIB, 250 * GIB),
    cores=Cores(64, 64),
    infiniband=False,
    port=Port(29500),
    names=NameLookups("node1", "10.0.0.5", Lookup("node1", ("10.0.0.5",)), (Lookup("10.0.0.5", ("node1",)),)),
    interfaces=("lo", "eth0", "ib0"),
    nccl_interfaces=("ib0",),
    user="ada",
)


def change(**paths: Any) -> Facts:
    """HEALTHY with some facts changed; torch__error="..." changes HEALTHY.torch.error."""
    changed = HEALTHY
    for path, value in paths.items():
        part, _, key = path.partition("__")
        changed = replace(changed, **{part: replace(getattr(changed, part), **{key: value}) if key else value})
    return changed


def problems(facts: Facts) -> list[Finding]:
    return [line for line in judge(facts) if line.level != "ok"]


# ---------------------------------------------------------------- checks


def test_a_healthy_machine_gets_no_warning() -> None:
    assert problems(HEALTHY) == []
    assert len(judge(HEALTHY)) == 12


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"nccl_interfaces": ("eth0", "cni0")}, "connects nodes through eth0, cni0"),
        ({"infiniband": True}, "connects nodes through InfiniBand, set up over ib0"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "=eth0"}}, "connects nodes through =eth0"),
    ],
)
def test_the_interfaces_that_nccl_will_take_are_named(changed: dict[str, Any], text: str) -> None:
    assert [line.fact for line in judge(change(**changed)) if line.topic == "NCCL"] == [text]


def test_an_exclusive_gpu_that_is_shared_by_mps_gets_no_warning() -> None:
    mps = GpuProcess(7, "root", "nvidia-cuda-mps-server", 25 * MIB)
    shared = replace(GPUS[0], compute_mode="Exclusive_Process", processes=(mps,))
    assert problems(change(gpus__devices=(shared, *GPUS[1:]))) == []


def test_a_healthy_machine_without_gpus_gets_no_warning() -> None:
    assert problems(change(gpus=Gpus(), torch=Torch("2.13.0+cpu", gloo=True))) == []


BUSY = replace(GPUS[0], memory_used=70 * GIB, processes=(GpuProcess(4711, "bob", "python", 69 * GIB),))
FULL = tuple(replace(gpu, memory_used=79 * GIB, processes=BUSY.processes) for gpu in GPUS)
SLOW = NameLookups("node1", "10.0.0.5", Lookup("node1", ("10.0.0.5",)), (Lookup("10.0.0.5", (), 5.01),))
LOOPBACK = NameLookups("node1", "10.0.0.5", Lookup("node1", ("127.0.1.1",)), ())
NAMELESS = NameLookups("node1", "10.0.0.5", Lookup("node1", error="Name or service not known"), ())
LOGS = Space("logs", "/data/log s", 900 * GIB, 500 * GIB)

# fmt: off
# Name, changed facts, level and topic, part of the fact, part of the fix or command.
BROKEN: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("old python", {"interpreter__version": "3.8.10"},
     "fault python", "3.8.10 is older than 3.10", "--python PATH"),
    ("no torch", {"torch": Torch()},
     "fault torch", "not installed", "-m pip install -r /opt/muster/requirements.txt"),
    ("no torch, and a Python that refuses to install", {"torch": Torch(), "interpreter__isolated": False},
     "fault torch", "not installed", "-m venv .venv && .venv/bin/python -m pip install -r"),
    ("old torch", {"torch__version": "2.9.1"}, "fault torch", "CVE-2025-32434", "--upgrade 'torch>=2.10'"),
    ("broken torch", {"torch__error": "ImportError: libcudnn.so.9"},
     "fault torch", "2.13.0 is installed, but cannot be imported: ImportError: libcudnn.so.9",
     "--force-reinstall torch"),
    ("slow torch", {"torch__seconds": 48.0}, "warning torch", "48 s to import", "local disk"),
    ("package missing", {"packages": (Package("rich", "13.7", ""),)},
     "warning packages", "not installed: rich; train.py and job lists need requirements.txt", "pip install -r"),
    ("package too old", {"packages": (Package("rich", "13.7", "13.6.9"),)},
     "warning packages", "rich 13.6.9 (needs 13.7)", "pip install -r"),
    ("torch without CUDA", {"torch__cuda": "", "torch__cuda_available": False},
     "fault cuda", "built without CUDA, but the machine has 4 GPUs", "install the build"),
    ("torch sees no GPU", {"torch__cuda_available": False, "torch__complaint": "CUDA unknown error"},
     "fault cuda", "torch sees none of 4 GPUs: CUDA unknown error", "--gpus all"),
    ("GPU too old for this torch", {"torch__capabilities": ("sm_70",)},
     "fault cuda", "no code for sm_70", "install a build"),
    ("driver mismatch", {"gpus": Gpus(error="nvidia-smi: Driver/library version mismatch", hardware=4)},
     "fault GPUs", "version mismatch", "restart the machine"),
    ("no driver", {"gpus": Gpus(hardware=2)}, "warning GPUs", "2 NVIDIA cards", "install NVIDIA's driver"),
    ("no nvidia-smi", {"gpus__driver": ""},
     "warning GPUs", "nvidia-smi is not on PATH", "NVIDIA_DRIVER_CAPABILITIES"),
    ("GPUs hidden", {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
     "warning GPUs", "CUDA_VISIBLE_DEVICES='' hides all 4 GPUs", "unset CUDA_VISIBLE_DEVICES"),
    ("unknown GPU", {"environment": {"CUDA_VISIBLE_DEVICES": "0,7,1"}},
     "fault GPUs", "lists 3 GPUs, but CUDA uses 1: it ignores", "unset CUDA_VISIBLE_DEVICES"),
    ("a GPU in use", {"gpus__devices": (BUSY, *GPUS[1:])},
     "warning GPU use", "GPU 0: 70.0 GiB of 80.0 GiB used by python of bob (pid 4711)",
     "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2,3"),
    ("all GPUs full", {"gpus__devices": FULL},
     "fault GPU use", "GPU 3: 79.0 GiB of 80.0 GiB", "no GPU is idle"),
    ("lost GPU", {"gpus__lost": (LostGpu(3, "GPU is lost"),)}, "fault GPU 3", "GPU is lost", "restart the machine"),
    ("GPU of unknown memory",
     {"gpus__devices": (replace(BUSY, memory=0, memory_used=None),)},
     "warning GPU use", "GPU 0: used by python of bob (pid 4711)", "wait"),
    ("MIG", {"gpus__devices": (replace(GPUS[0], mig=True), *GPUS[1:])},
     "warning GPU 0", "MIG is enabled", "--multi-instance-gpu=0"),
    ("exclusive GPU", {"gpus__devices": (replace(GPUS[0], compute_mode="Exclusive_Process"), *GPUS[1:])},
     "warning GPU 0", "Exclusive_Process, without MPS: a second process fails", "--id=0 --compute-mode=DEFAULT"),
    ("no memory", {"memory__available": 400 * MIB}, "fault memory", "400 MiB of 512.0 GiB", "ps aux"),
    ("job's memory limit", {"memory__limit": 2 * GIB},
     "warning memory", "2.0 GiB of 2.0 GiB (limit of this container or job) free", "ps aux"),
    ("full disk", {"disks": (replace(LOGS, free=MIB),)},
     "fault disk", "logs: 1 MiB free", "du -xh '/data/log s'"),
    ("small disk", {"disks": (replace(LOGS, free=5 * GIB),)},
     "warning disk", "5.0 GiB free in /data", "free some space"),
    ("read-only disk", {"disks": (replace(LOGS, writable=False),)},
     "fault disk", "cannot be written", "ls -ld"),
    ("no inodes", {"disks": (replace(LOGS, inodes_free=False),)},
     "fault disk", "inodes", "df -i '/data/log s'"),
    ("docker's shm", {"shm": Space("/dev/shm", "/dev/shm", 64 * MIB, 64 * MIB), "container": True},
     "fault /dev/shm", "only 64 MiB: ranks and data loader workers are killed by SIGBUS", "--shm-size=8g or --ipc="),
    ("small shm without a container", {"shm": Space("/dev/shm", "/dev/shm", 512 * MIB, 512 * MIB)},
     "warning /dev/shm", "only 512 MiB", "mount -o remount,size=50% /dev/shm"),
    ("full shm", {"shm__free": MIB}, "fault /dev/shm", "1 MiB of 256.0 GiB free", "ls -lt /dev/shm"),
    ("port in use", {"port": Port(29500, free=False, holder="pid 12 (python train.py)")},
     "fault port", "29500 is in use by pid 12 (python train.py)", "--master-port"),
    ("port in use by an unknown process", {"port": Port(29500, free=False)},
     "fault port", "29500 is in use", "ss -ltnp"),
    ("name unknown", {"names": NAMELESS},
     "warning names", "node1 does not resolve", "echo '10.0.0.5 node1' | sudo tee"),
    ("name on loopback", {"names": LOOPBACK},
     "warning names", "node1 resolves to 127.0.1.1: works on one", "map node1 to 10.0.0.5"),
    ("slow resolver", {"names": SLOW}, "fault resolver", "looking up 10.0.0.5 takes 5.0 s", "/etc/hosts"),
    ("stale rank", {"environment": {"RANK": "3", "MASTER_ADDR": "n1", "PET_NNODES": "2"}},
     "warning shell", "RANK=3, MASTER_ADDR=n1, PET_NNODES=2", "unset RANK MASTER_ADDR PET_NNODES"),
    ("unknown interface", {"environment": {"NCCL_SOCKET_IFNAME": "ens5"}},
     "fault shell", "NCCL_SOCKET_IFNAME=ens5: no such network interface; this machine has lo, eth0, ib0",
     "unset NCCL_SOCKET_IFNAME"),
    ("prefix for gloo", {"environment": {"GLOO_SOCKET_IFNAME": "eth"}},
     "fault shell", "=eth: no such", "unset GLOO"),
    ("own torch.py", {"shadows": ("/home/ada/project/torch.py",)},
     "fault imports", "project/torch.py shadows the library 'torch'", "rename it"),
    ("Dask on the path", {"shadows": ("/opt/dask/distributed",)},
     "warning imports", "/opt/dask/distributed shadows Muster's package 'distributed'", "PYTHONPATH"),
    ("own run", {"runs": (RunProcesses("/my logs/train-1", (7, 8), "ada"),)},
     "warning runs", "/my logs/train-1 has 2 processes of ada here",
     "to stop it: /opt/muster/scripts/stop.sh '/my logs/train-1'; to see whether it is training: "
     "/opt/muster/scripts/status.sh '/my logs/train-1'"),
    ("own run, started elsewhere", {"runs": (RunProcesses("/logs/train-1", (7, 8), "ada", recorded=False),)},
     "warning runs", "/logs/train-1", "started from another machine or by a job list; stop it there, or cancel "
     "the job; its processes: ps -fp 7,8"),
    ("run of another user", {"runs": (RunProcesses("/logs/train-1", (7,), "bob"),)},
     "warning runs", "/logs/train-1 has 1 process of bob here", "ask bob whether it is still needed"),
    ("no idle GPU, used by a run", {"gpus__devices": FULL, "runs": (RunProcesses("/logs/train-1", (4711,), "bob"),)},
     "fault GPU use", "by python of bob (pid 4711, run train-1)", "no GPU is idle; wait, or ask the users"),
]
# fmt: on


def test_no_fix_or_command_of_a_finding_kills_a_run() -> None:
    findings = [finding for row in BROKEN for finding in problems(change(**row[1]))]
    assert not [finding for finding in findings if re.search(r"\bkill\b", f"{finding.fix} {finding.command}")]


@pytest.mark.parametrize(("broken", "line", "fact", "fix"), [pytest.param(*row[1:], id=row[0]) for row in BROKEN])
def test_a_problem_is_found_with_its_fix(broken: dict[str, Any], line: str, fact: str, fix: str) -> None:
    level, topic = line.split(" ", 1)
    found = [finding for finding in problems(change(**broken)) if (finding.level, finding.topic) == (level, topic)]
    assert any(fact in finding.fact and fix in f"{finding.fix} {finding.command}" for finding in found), found


def test_valid_settings_get_no_finding() -> None:
    for fine in (
        {
            "environment": {
                "NCCL_SOCKET_IFNAME": "eth,ib",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
        },
        {"environment": {"NCCL_SOCKET_IFNAME": "^docker,lo"}},
        {"environment": {"NCCL_SOCKET_IFNAME": "=ib0"}},
        {"environment": {"CUDA_VISIBLE_DEVICES": "2,3"}},
        # sm_89 runs the code for sm_80. The driver compiles compute_120 (PTX) for sm_120 and sm_130.
        {"torch__capabilities": ("sm_89", "sm_120", "sm_130")},
        {"names": replace(LOOPBACK, outward="")},  # a machine without a network
        {"gpus__devices": (BUSY, *GPUS[1:]), "environment": {"CUDA_VISIBLE_DEVICES": "1"}},  # GPU 0 is hidden
    ):
        assert problems(change(**fine)) == [], fine


def test_a_gpu_hidden_by_mig_is_not_reported_as_unknown() -> None:
    sliced = tuple(replace(gpu, mig=True) for gpu in GPUS)
    found = problems(change(gpus__devices=sliced, environment={"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert [(finding.level, finding.topic) for finding in found] == [("warning", "GPU 0")]


def test_a_missing_torch_is_one_fault() -> None:
    faults = [line for line in problems(change(torch=Torch())) if line.level == "fault"]
    assert [line.topic for line in faults] == ["torch"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.10.0a0+git1", (2, 10, 0)),
        ("580.65.06", (580, 65, 6)),
        ("", ()),
        ("rc", ()),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, expected: tuple[int, ...]) -> None:
    assert numbers(version) == expected


# ---------------------------------------------------------------- text


def test_the_worst_finding_is_the_last_one_before_the_summary() -> None:
    lines = [
        checks.fault("is missing", topic="torch"),
        checks.ok("29500", topic="port"),
        checks.warning("few", topic="cores"),
    ]
    assert plain(render(lines, "node1")).splitlines() == [
        "ok       port   29500",
        "",
        "warning  cores  few",
        "fault    torch  is missing",
        "",
        "node1 is not fit for training: 1 fault, 1 warning, 1 ok",
    ]


def test_text_is_wrapped_at_the_width_and_commands_are_not() -> None:
    line = checks.warning("so little room " * 9, "make some " * 9, f"du {'/long' * 30}", "disk")
    *table, command, _, _ = plain(render([line], "node1", width=80)).splitlines()
    assert len(table) > 3
    assert max(map(len, table)) <= 80
    assert command == f"{'':15}$ du {'/long' * 30}"


# ---------------------------------------------------------------- facts


def test_a_program_that_hangs_is_killed_after_the_limit() -> None:
    reply = run_program([sys.executable, "-c", "import sys; sys.stdin = None; __import__('time').sleep(600)"], 0.2)
    assert reply.code is None
    assert "no reply within" in reply.error


def test_a_missing_program_has_no_exit_code() -> None:
    assert run_program(["no-such-program"], 1).code is None


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_with_control_groups_version_2_the_limits_of_all_parent_groups_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self/cgroup": "0::/slurm/job_7/step_0\n",
            "meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapFree: 4 kB",
            "fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
            "fs/cgroup/slurm/job_7/memory.max": f"{8 * GIB}\n",
            "fs/cgroup/slurm/job_7/cpu.max": "250000 100000\n",
            "fs/cgroup/slurm/cpu.max": "max 100000\n",
        },
    )
    assert read_memory(tmp_path, tmp_path) == Memory(64 * GIB, 32 * GIB, 8 * GIB)
    assert read_cores(tmp_path, tmp_path).quota == 2.5


def test_with_control_groups_version_1_the_limits_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n",
            "fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "400000\n",
            "fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000\n",
            "fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "meminfo": "MemTotal:  67108864 kB\n",
        },
    )
    assert read_memory(tmp_path, tmp_path).limit == GIB
    assert read_cores(tmp_path, tmp_path).quota == 4.0


def test_missing_files_of_the_system_give_empty_facts(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert read_memory(nothing, nothing).total == 0
    assert find_runs(nothing) == ()
    assert required_packages(nothing) == ()


def test_files_that_shadow_a_library_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "project/torch.py": "",
            "project/random.py": "",
            "project/train.py": "",
            "site/distributed/__init__.py": "",
        },
    )
    path = f"{tmp_path}/site::{KIT}"
    found = [Path(name).relative_to(tmp_path).as_posix() for name in find_shadows(tmp_path / "project", path)]
    assert found == ["project/random.py", "project/torch.py", "site/distributed"]


@pytest.mark.parametrize(
    ("python", "error"),
    [
        ("echo 'ImportError: libcudnn.so.9: cannot open shared object file' >&2; exit 1", "libcudnn.so.9"),
        ("kill -ILL $$", "Python was killed by SIGILL while importing it"),
        ("exit 3", "Python exited with 3"),
        ("exec sleep 600", "no reply within 1 s"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path, python: str, error: str) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n# Stub: a Python whose torch is broken.\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    assert error in probe_torch(str(tmp_path / "python"), limit=1).error


def test_required_packages_come_from_requirements_txt(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# why\ntorch==2.13.0\nnumpy>=1.26,<3\nno-such-thing\n-r more.txt\n")
    numpy, absent = required_packages(tmp_path / "requirements.txt")
    assert (numpy.name, numpy.oldest, bool(numpy.installed)) == ("numpy", "1.26", True)
    assert absent == Package("no-such-thing", "", "")


def test_runs_are_found_by_the_environment_of_their_processes(tmp_path: Path) -> None:
    environ = "HOME=/root\0MUSTER_RUN_DIR=/logs/train-1\0RANK=0\0"
    write(tmp_path, {"12/environ": environ, "7/environ": environ, "8/environ": "NOT_MUSTER_RUN_DIR=/x\0"})
    assert find_runs(tmp_path) == (RunProcesses("/logs/train-1", (7, 12), user(), recorded=False),)


# ---------------------------------------------------------------- base models


def test_damaged_base_models_of_the_working_directory_are_named_with_a_fix(tmp_path: Path) -> None:
    assert list(base_model_findings(tmp_path)) == []
    cache, source = str(tmp_path / base_model.CACHE), tmp_path / "trained"
    source.mkdir()
    for name in base_model.FILES:
        (source / name).write_text("content")
    for digest in ("1" * 64, "2" * 64):
        manifest = base_model.manifest_of(str(source), digest)
        base_model.publish(cache, digest, base_model.stage(cache, str(source), manifest))
    assert [(each.level, each.fact) for each in base_model_findings(tmp_path)] == [
        ("ok", "2 base models of job lists, undamaged")
    ]
    (tmp_path / base_model.CACHE / ("1" * 12) / base_model.WEIGHTS).write_text("damaged")
    (tmp_path / base_model.CACHE / ("2" * 12)).rename(tmp_path / base_model.CACHE / ("3" * 12))
    damaged, renamed = base_model_findings(tmp_path)
    assert (damaged.level, damaged.topic, renamed.level) == ("warning", "base models", "warning")
    assert damaged.fact.endswith(
        f"{'1' * 12}/{base_model.WEIGHTS}: damaged: its checksum is not the one in manifest.json"
    )
    assert damaged.command.endswith(" two-phase cache prune")
    assert "holds the base model 222222222222" in renamed.fact


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_base_models_of_another_user_where_all_can_create_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / base_model.CACHE / ("1" * 12)).mkdir(parents=True)
    os.chown(tmp_path / "experiments", 12345, 12345)
    tmp_path.chmod(0o1777)
    [found] = base_model_findings(tmp_path)
    assert found.level == "warning"
    assert found.fact.startswith(f"base models not checked: {tmp_path}/experiments: belongs to user id 12345")


def test_a_cache_of_base_models_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "experiments").touch()
    [found] = base_model_findings(tmp_path)
    assert (found.level, found.fact) == ("warning", f"{tmp_path}/experiments/base_models: Not a directory")


# ---------------------------------------------------------------- this machine


def run_doctor(
    *arguments: str, python: tuple[str, ...] = (sys.executable,), **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-m", "distributed.health.doctor", *arguments],
        cwd=KIT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_exit_code_agrees_with_the_findings_of_this_machine(tmp_path: Path) -> None:
    reply = run_doctor("--directory", str(tmp_path))
    levels = [row.split()[0] for row in reply.stdout.splitlines()[:-2] if row[:1].strip()]
    assert reply.stderr == ""
    assert set(levels) <= set(checks.LEVELS)
    assert reply.returncode == (1 if "fault" in levels else 0)
    assert f": {levels.count('fault')} fault" in reply.stdout.splitlines()[-1]
    assert f"{sys.executable}" in reply.stdout


def test_a_python_without_packages_can_run_the_doctor(tmp_path: Path) -> None:
    reply = run_doctor("--directory", str(tmp_path), python=(sys.executable, "-E", "-S"))
    assert "PyTorch is not installed" in reply.stdout, reply.stderr
    assert reply.returncode == 1


def test_json_has_every_fact_and_no_secret_variable(tmp_path: Path) -> None:
    facts = json.loads(run_doctor("--directory", str(tmp_path), "--json", MASTER_ADDR="n1", SECRET_TOKEN="s").stdout)
    assert set(facts) == {part.name for part in fields(Facts)}
    assert facts["torch"]["gloo"] is True
    assert facts["environment"]["MASTER_ADDR"] == "n1"
    assert "SECRET_TOKEN" not in facts["environment"]
    parts = [part.name for part in fields(HEALTHY) if is_dataclass(getattr(HEALTHY, part.name))]
    assert all(set(facts[part]) == {key.name for key in fields(getattr(HEALTHY, part))} for part in parts)


@pytest.mark.parametrize("arguments", [("--master-port", "x"), ("node1",)])
def test_a_wrong_call_is_refused(arguments: tuple[str, ...]) -> None:
    reply = run_doctor(*arguments)
    assert reply.returncode == 2
    assert arguments[-1] in reply.stderr
