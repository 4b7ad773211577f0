"""GPUs, their processes, and the GPUs visible with CUDA_VISIBLE_DEVICES.

nvidia-smi is a stub with the documented output format csv,noheader,nounits.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.host import processes
from distributed.host.gpus import (
    Gpu,
    GpuProcess,
    LostGpu,
    MigInstance,
    count_gpus,
    listed_gpus,
    nvidia_cards,
    owner,
    query_gpus,
    visible,
)
from distributed.host.system import GIB, MIB

A100 = "NVIDIA A100-SXM4-80GB"
GPUS = tuple(Gpu(index, f"GPU-{index}{index}aa-bb", A100, 80 * GIB, 4 * MIB) for index in range(4))


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        ("0,9,1", [0]),
        ("1,1", []),
        (" 2 , 3", [2, 3]),
        ("GPU-11aa-bb,GPU-0", [1, 0]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_by_cuda(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(setting, GPUS)] == indices


def test_a_process_sees_one_instance_with_mig() -> None:
    sliced = tuple(replace(gpu, mig=True) for gpu in GPUS)
    assert len(visible(None, sliced)) == 1
    assert len(visible("MIG-5c89,MIG-77aa", sliced)) == 1
    assert visible("MIG-5c89", GPUS) == ()


STUB_NVIDIA_SMI = """#!/bin/sh
# Stub: prints what nvidia-smi does with --format=csv,noheader,nounits.
case $* in
  *--query-gpu=index,uuid,driver_version,*,name\\ --format=csv,noheader,nounits)
    echo "0, GPU-aa, 550.54.14, 81920, 71680, Disabled, Default, Disabled, NVIDIA A100-SXM4-80GB"
    echo "1, GPU-bb, 550.54.14, 24576, 4, [N/A], Default, Disabled, NVIDIA T4" ;;
  *--query-compute-apps=gpu_uuid,pid,used_memory,process_name\\ --format=csv,noheader,nounits)
    echo "GPU-aa, {pid}, 71000, /usr/bin/python3"
    echo "GPU-aa, 4194305, [N/A], a, b" ;;
  *) echo "Field is not a valid field to query." ; exit 2 ;;
esac
"""


def stub(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


@pytest.fixture
def path_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first directory on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def test_gpus_and_their_processes_are_read_from_nvidia_smi(path_directory: Path) -> None:
    stub(path_directory, "nvidia-smi", STUB_NVIDIA_SMI.format(pid=os.getpid()))
    found = query_gpus()
    me = owner(os.getpid())
    assert found.driver == "550.54.14"
    users = GpuProcess(os.getpid(), me, "python3", 71000 * MIB), GpuProcess(4194305, "", "a, b", 0)
    assert found.devices == (
        Gpu(0, "GPU-aa", A100, 80 * GIB, 70 * GIB, processes=users),
        Gpu(1, "GPU-bb", "NVIDIA T4", 24 * GIB, 4 * MIB),
    )


@pytest.mark.parametrize(
    "name", [r"\377", r"a\302\205GPU-bb, 7, 9, b", r"a\rGPU-bb, 7, 9, b", r"a\nGPU-zz, 7, 9, b", r"a\n\n,\nGPU-bb, 7"]
)
@pytest.mark.parametrize("memory", ["9", "\u00b2", "9" * 5000])
def test_the_name_of_a_process_neither_breaks_the_query_nor_adds_a_process(
    path_directory: Path, name: str, memory: str
) -> None:
    apps = f"printf 'GPU-aa, 4194305, {memory}, {name}\\n'"
    text = STUB_NVIDIA_SMI.replace('echo "GPU-aa, {pid}, 71000, /usr/bin/python3"', apps)
    stub(path_directory, "nvidia-smi", text)
    first, second = query_gpus().devices
    assert [one.pid for one in first.processes] == [4194305, 4194305]
    assert first.processes[0].memory == (9 * MIB if memory == "9" else 0)
    assert second.processes == ()


def test_memory_that_gpu_and_cpu_share_is_unknown(path_directory: Path) -> None:
    row = "0, GPU-aa, 580.95, [N/A], [N/A], [N/A], Default, Disabled, NVIDIA GB10"
    stub(
        path_directory,
        "nvidia-smi",
        f'#!/bin/sh\ncase $* in *query-gpu*) echo "{row}" ;; *) echo "GPU-aa, 7, 9, a" ;; esac\n',
    )
    (gpu,) = query_gpus().devices
    assert (gpu.memory, gpu.memory_used, gpu.busy) == (0, None, True)


@pytest.mark.parametrize(
    ("display", "apps", "busy"),
    [
        ("Disabled", "", True),
        ("Enabled", "", False),
        ("Enabled", "GPU-aa, 7, 9, python", True),
        ("Enabled", "GPU-aa, 7, 25, /usr/bin/nvidia-cuda-mps-server", False),
    ],
)
def test_neither_a_desktop_nor_the_server_of_mps_makes_a_gpu_busy(
    path_directory: Path, display: str, apps: str, busy: bool
) -> None:
    row = f"0, GPU-aa, 580.95, 24576, 1500, Disabled, Exclusive_Process, {display}, NVIDIA RTX 4090"
    stub(
        path_directory,
        "nvidia-smi",
        f'#!/bin/sh\ncase $* in *query-gpu*) echo "{row}" ;; *) echo "{apps}" ;; esac\n',
    )
    (gpu,) = query_gpus().devices
    assert (gpu.busy, gpu.compute_mode, gpu.fault) == (busy, "Exclusive_Process", "")
    assert "Prohibited" in replace(gpu, compute_mode="Prohibited").fault


LOST = "Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU"
# Stub: fails if it is asked for all GPUs or for GPU 1. There is no GPU 3.
STUB_LOST_GPU = f"""#!/bin/sh
case $* in
  *--query-compute-apps*) echo "GPU-22, 4194305, 500, python" ;;
  *--id=1 | *nounits) echo "{LOST}"; exit 15 ;;
  *--id=3) echo "No devices were found"; exit 6 ;;
  *--id=*) n=${{*##*=}}; echo "$n, GPU-$n$n, 550.0, 81920, 4, Disabled, Default, Disabled, {A100}" ;;
esac
"""


def add_card(sys_directory: Path, name: str, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    card = sys_directory / "bus/pci/devices" / name
    card.mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    (card / "class").write_text(f"{kind}\n")


def test_a_lost_gpu_does_not_hide_the_others(path_directory: Path, tmp_path: Path) -> None:
    stub(path_directory, "nvidia-smi", STUB_LOST_GPU)
    for number in range(4):
        add_card(tmp_path, f"0{number}")
    found = query_gpus(tmp_path)
    assert [(gpu.index, gpu.uuid, gpu.busy) for gpu in found.devices] == [(0, "GPU-00", False), (2, "GPU-22", True)]
    assert found.lost == (LostGpu(1, LOST.replace("  ", " ")),)
    assert (found.error, found.driver) == ("", "550.0")


def test_a_gpu_that_requires_a_reset_is_reported_as_lost(path_directory: Path) -> None:
    rows = f"0, GPU-00, 550.0, 81920, 4, Disabled, Default, Disabled, {A100}\n1, GPU-11{', [GPU requires reset]' * 7}\n"
    stub(path_directory, "nvidia-smi", f"#!/bin/sh\ncase $* in *query-gpu*) printf '{rows}' ;; esac\n")
    found = query_gpus()
    assert [gpu.index for gpu in found.devices] == [0]
    assert found.lost == (LostGpu(1, "GPU requires reset; reboot the machine"),)


@pytest.mark.parametrize("value", ["[GPU is lost]", "[Unknown Error]"])
def test_a_gpu_whose_row_has_only_error_values_is_reported_as_lost(path_directory: Path, value: str) -> None:
    rows = f"0, GPU-00, 550.0, 81920, 4, Disabled, Default, Disabled, {A100}\n1{f', {value}' * 8}\n"
    stub(path_directory, "nvidia-smi", f"#!/bin/sh\ncase $* in *query-gpu*) printf '{rows}' ;; esac\n")
    found = query_gpus()
    assert [gpu.index for gpu in found.devices] == [0]
    assert found.lost == (LostGpu(1, f"{value[1:-1]}; reboot the machine"),)


def test_if_no_gpu_replies_the_error_is_reported_once(path_directory: Path, tmp_path: Path) -> None:
    add_card(tmp_path, "00")
    stub(path_directory, "nvidia-smi", f"#!/bin/sh\necho '{LOST}'; exit 15\n")
    found = query_gpus(tmp_path)
    assert (found.devices, found.lost, found.error) == ((), (), f"nvidia-smi: {LOST.replace('  ', ' ')}")


STUB_MIG = f"""#!/bin/sh
case $* in
  *--query-gpu*) echo "0, GPU-aa, 550.0, 81920, [N/A], Enabled, Default, Disabled, {A100}"
    echo "1, GPU-bb, 550.0, 81920, 4, Disabled, Default, Disabled, {A100}" ;;
  -L) echo "GPU 0: {A100} (UUID: GPU-aa)"
    echo "  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4)"
    echo "  MIG 1g.10gb     Device  1: (UUID: MIG-GPU-aa/5/0)"
    echo "GPU 1: {A100} (UUID: GPU-bb)" ;;
  *) echo "MIG-c6d4, 4194305, [N/A], python" ;;
esac
"""


def test_the_instances_of_a_gpu_with_mig_and_their_processes_are_found(path_directory: Path) -> None:
    stub(path_directory, "nvidia-smi", STUB_MIG)
    divided, whole = query_gpus().devices
    user = GpuProcess(4194305, "", "python", 0)
    assert divided.instances == (MigInstance("MIG-c6d4", (user,)), MigInstance("MIG-GPU-aa/5/0"))
    assert (divided.memory_used, whole.instances) == (None, ())


def test_an_error_of_the_driver_is_reported_unchanged(path_directory: Path) -> None:
    stub(
        path_directory,
        "nvidia-smi",
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n",
    )
    assert query_gpus().error == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"


def test_a_machine_without_devices_is_not_an_error(path_directory: Path) -> None:
    stub(path_directory, "nvidia-smi", "#!/bin/sh\necho No devices were found; exit 6\n")
    assert query_gpus().error == ""


def test_cards_without_a_driver_are_found_on_the_pci_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("3b", "0x10de", "0x030200"),
        ("3c", "0x10de", "0x040300"),
        ("00", "0x8086", "0x030000"),
    ):
        add_card(tmp_path, name, vendor, kind)
    assert nvidia_cards(tmp_path) == 1


def test_the_module_host_processes_prints_the_number_of_visible_gpus(
    path_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(path_directory, "nvidia-smi", STUB_NVIDIA_SMI.format(pid=os.getpid()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    processes.main(["gpu"])
    for setting in ("1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        processes.main(["gpu"])
    assert capsys.readouterr() == ("2\n1\n0\n", "")


def test_the_module_host_processes_prints_0_and_the_error_of_the_driver(
    path_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(path_directory, "nvidia-smi", "#!/bin/sh\necho 'GPU is lost'; exit 15\n")
    processes.main(["gpu"])
    assert capsys.readouterr() == ("0\n", "nvidia-smi: GPU is lost\n")


# ---------------------------------------------------------------- the list of the driver


@pytest.fixture
def driver(tmp_path: Path, path_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stub of /proc/driver/nvidia with two GPUs, and of their device files beside it. nvidia-smi sees one GPU."""
    directory = tmp_path / "nvidia"
    for address, minor in (("0000:c1:00.0", 0), ("0000:41:00.0", 1)):
        facts = directory / "gpus" / address / "information"
        facts.parent.mkdir(parents=True)
        facts.write_text(f"Model: \t\t {A100}\nIRQ:   \t\t 35\nGPU UUID: \t GPU-{minor}a\nDevice Minor: \t {minor}\n")
        (tmp_path / f"nvidia{minor}").touch()
    rows = f"0, GPU-0a, 550.0, 81920, 4, Disabled, Default, Disabled, {A100}"
    stub(path_directory, "nvidia-smi", f'#!/bin/sh\ncase $* in *query-gpu*) echo "{rows}" ;; *) exit 9 ;; esac\n')
    monkeypatch.setattr(listed_gpus, "__defaults__", (directory, tmp_path))
    return directory


def test_a_launch_counts_the_gpus_that_the_driver_lists_in_the_order_of_the_bus(driver: Path) -> None:
    assert listed_gpus() == (Gpu(0, "GPU-1a", A100, 0, None), Gpu(1, "GPU-0a", A100, 0, None))
    assert [count_gpus(setting) for setting in (None, "", "1,0", "GPU-1a", "GPU-zz")] == [
        (number, "") for number in (2, 0, 2, 1, 0)
    ]


def test_without_nvidia_smi_the_gpus_are_those_that_the_driver_lists(driver: Path, path_directory: Path) -> None:
    (path_directory / "nvidia-smi").unlink()
    assert query_gpus().devices == listed_gpus()


def test_a_gpu_whose_device_file_is_hidden_from_a_container_is_not_counted(driver: Path) -> None:
    (driver.parent / "nvidia1").unlink()
    assert listed_gpus() == (Gpu(0, "GPU-0a", A100, 0, None),)


def test_a_process_sees_one_instance_of_a_listed_gpu_with_mig(driver: Path) -> None:
    (driver / "capabilities/gpu1/mig/gi7").mkdir(parents=True)
    assert [gpu.mig for gpu in listed_gpus()] == [True, False]
    assert count_gpus(None) == count_gpus("MIG-5c89") == (1, "")


@pytest.mark.parametrize(("setting", "count"), [("GPU-0a,GPU-1a", 1), ("0,1", 2)])
def test_nvidia_smi_is_asked_if_the_driver_does_not_know_a_uuid_yet(driver: Path, setting: str, count: int) -> None:
    """Without persistence mode, the driver knows the UUID only while a process uses the GPU."""
    facts = next(driver.glob("gpus/0000:41*/information"))
    facts.write_text(facts.read_text().replace("GPU-1a", "GPU-????????"))
    assert count_gpus(setting) == (count, "")
