"""The check of what only GPUs can show: its steps, limits, table and JSON file, without a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KIT = Path(__file__).resolve().parents[1]
PROGRAM = KIT / "benchmarks/gpu_check.py"
NAMES = ["driver", "fork", "cpu run", "start-up", "smoke test", "waiting", "hang", "restart", "equal bits"]
NAMES += ["checkpoint", "fsdp memory", "speed"]
STEPS = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu_check import Figure, Needs, Step

def good(machine):
    Path("a file").touch()  # in a directory of its own
    yield Figure("duration", 0.5, "s", "at most 1 s", True)

def missed(machine):
    yield Figure("speed", 12345.6, "tokens/s", "at least 20,000", False)

def endless(machine):
    yield Figure("the start", 1, "s")
    command = ["sleep", "300"]
    children = [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]
    if not os.fork():  # an orphan: its parent exits
        children.append(subprocess.Popen(command, start_new_session=True).pid)
        Path(os.environ["PIDS"]).write_text(" ".join(map(str, [os.getppid(), *children])))
        os._exit(0)
    os.wait()
    time.sleep(300)

def crash(machine):
    os.kill(os.getpid(), 11)
    yield

def error(machine):
    yield Figure("before the error", "yes")
    raise ValueError("no\\n memory")

def missing(machine):
    import module_that_nobody_has
    yield

def needing(machine):
    yield Figure("first part", 1)
    raise Needs("2 GPUs for the second part")

def last(machine):
    yield Figure("files", len(os.listdir()), "", "0", not os.listdir())

functions = good, missed, endless, crash, error, missing, needing, last
STEPS = [Step(one.__name__, one, 1.5 if one is endless else 30, gpus=0) for one in functions]
STEPS.insert(1, Step("large", good, 30, gpus=99))
"""


def command(directory: Path, *arguments: str, gpus: str = "") -> tuple[list[str], dict[str, str]]:
    """The command of the check, and its environment. gpus: those that it may see."""
    paths = f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    env = os.environ | {"PYTHONPATH": paths, "PIDS": str(directory / "pids"), "CUDA_VISIBLE_DEVICES": gpus}
    return [sys.executable, str(PROGRAM), "--output", str(directory / "result.json"), *arguments], env


def check(directory: Path, *arguments: str, gpus: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run the check. Returns its exit code, its table, and the steps in its JSON file, by name."""
    line, env = command(directory, *arguments, gpus=gpus)
    result = subprocess.run(line, env=env, capture_output=True, text=True, timeout=280, cwd=directory)
    assert "Traceback" not in result.stdout + result.stderr
    report = json.loads((directory / "result.json").read_text())
    return result.returncode, result.stdout, {step["name"]: step for step in report["steps"]}


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    (tmp_path / "stub_steps.py").write_text(STEPS)
    return tmp_path


def test_a_step_that_fails_or_reaches_its_limit_does_not_stop_the_others(stubs: Path) -> None:
    code, table, steps = check(stubs, "--steps", "stub_steps")
    assert code == 1
    names = ["good", "large", "missed", "endless", "crash", "error", "missing", "needing", "last"]
    assert list(dict.fromkeys(line.split()[0] for line in table.splitlines()[1:-1])) == names
    results = [re.sub(" {2,}", "  ", line) for line in table.splitlines()]
    assert results[1:-1] == [
        "good  duration  0.5 s  at most 1 s  met",
        "large  needs 99 GPUs",
        "missed  speed  12,346 tokens/s  at least 20,000  not met",
        "endless  the start  1 s  measured",
        "endless  failed (not done after 2 s)",
        "crash  failed (killed by signal 11)",
        "error  before the error  yes  measured",
        "error  failed (ValueError: no memory)",
        "missing  failed (module_that_nobody_has is not installed)",
        "needing  first part  1  measured",
        "needing  needs 2 GPUs for the second part",
        "last  files  0  0  met",
    ]
    assert re.fullmatch(r"\d+ s; written to .*/result.json", results[-1])
    assert steps.keys() == set(names)
    assert steps["missed"]["figures"] == [
        {"what": "speed", "value": 12345.6, "unit": "tokens/s", "target": "at least 20,000", "met": False,
         "result": "not met"}
    ]  # fmt: skip
    assert "ValueError: no" in steps["error"]["output"][-2]
    assert 1.5 <= steps["endless"]["seconds"] < 20


def test_at_its_limit_all_processes_of_a_step_are_killed(stubs: Path) -> None:
    check(stubs, "--steps", "stub_steps", "--only", "endless")
    pids = [int(pid) for pid in (stubs / "pids").read_text().split()]
    assert len(pids) == 4
    assert not any(map(is_running, pids))


def test_sigterm_kills_the_processes_of_the_current_step(stubs: Path) -> None:
    steps = (stubs / "stub_steps.py").read_text().replace("1.5 if", "300 if")
    (stubs / "stub_steps.py").write_text(steps)
    line, env = command(stubs, "--steps", "stub_steps", "--only", "endless")
    with subprocess.Popen(line, env=env, cwd=stubs) as process:
        while not (stubs / "pids").exists() or len((stubs / "pids").read_text().split()) < 4:
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not any(is_running(int(pid)) for pid in (stubs / "pids").read_text().split())


def test_only_the_chosen_steps_run_and_an_unknown_one_is_refused(stubs: Path) -> None:
    code, _, steps = check(stubs, "--steps", "stub_steps", "--only", "last", "good")
    assert (code, list(steps)) == (0, ["good", "last"])
    line, env = command(stubs, "--only", "nonsense")
    result = subprocess.run(line, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"unknown step nonsense; expected {', '.join(NAMES)}" in result.stderr


def test_without_a_gpu_all_steps_end_at_once_and_say_that_they_need_one(tmp_path: Path) -> None:
    start = time.monotonic()
    code, table, steps = check(tmp_path)
    assert time.monotonic() - start < 30
    assert (code, list(steps)) == (0, NAMES)
    assert {step["needs"] for step in steps.values()} == {"a GPU", "2 GPUs"}
    assert table.count("needs ") == len(NAMES)


def test_the_steps_before_the_last_one_leave_it_a_minute_of_six() -> None:
    code = "from benchmarks import gpu_check as frame, gpu_steps as steps\n"
    code += "print(sum(one.limit for one in steps.STEPS[:-1]), frame.LIMIT)"
    result = subprocess.run([sys.executable, "-c", code], cwd=KIT, capture_output=True, text=True, check=True)
    together, limit = map(float, result.stdout.split())
    assert together + 60 <= limit < 360


NVIDIA_SMI = """#!/bin/sh
case $* in
  *query-gpu*) echo "0, GPU-a, 570.1, 81559, 4, Disabled, Default, Disabled, NVIDIA H100 80GB HBM3" ;;
  *-L*) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)" ;;
esac
"""


def test_if_pytorch_has_no_cuda_each_step_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi shows a GPU, as with PyTorch's build for CPUs. The step of the CPU run succeeds."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    chosen = ["driver", "fork", "cpu run", "hang", "fsdp memory", "speed"]
    code, table, steps = check(tmp_path, "--only", *chosen, gpus="0")
    assert code == 1
    assert [name for name, step in steps.items() if "failed" not in step] == ["driver", "cpu run", "fsdp memory"]
    assert steps["fsdp memory"]["needs"] == "2 GPUs"
    results = {figure["what"]: figure for figure in steps["driver"]["figures"]}
    assert results["driver of NVIDIA H100 80GB HBM3"]["value"] == "570.1"
    assert results["GPUs that PyTorch sees, against those that a launch counts"]["result"] == "not met"
    reasons = [steps[name]["failed"] for name in ("fork", "hang", "speed")]
    assert all(re.search("cuda", reason, re.IGNORECASE) for reason in reasons), table


def test_the_table_of_benchmarks_has_a_row_for_each_step() -> None:
    rows = re.findall(r"gpu_check\.py --only ([^`]+)` \| ", (KIT / "benchmarks/README.md").read_text())
    assert sorted(row.strip('"') for row in rows) == sorted(NAMES)


@pytest.mark.parametrize(("module", "step"), [("torch", "driver"), ("torch", "fork"), ("pydantic", "cpu run")])
def test_a_missing_module_is_the_reason_of_a_failed_step(tmp_path: Path, module: str, step: str) -> None:
    (tmp_path / f"{module}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    )
    code, table, steps = check(tmp_path, "--rehearse", "--only", step)
    assert code == 1
    assert steps[step]["failed"].endswith(f"{module} is not installed")
    assert f"failed ({steps[step]['failed']})" in table


def rehearse(directory: Path, *names: str) -> dict[str, Any]:
    """Run these steps on the CPU. Returns the value of each figure."""
    code, table, steps = check(directory, "--rehearse", "--only", *names)
    assert code == 0, table
    assert "  met" not in table and "not met" not in table
    return {figure["what"]: figure["value"] for step in steps.values() for figure in step["figures"]}


def test_steps_run_on_the_cpu_in_a_rehearsal(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "driver", "fork", "cpu run", "checkpoint")
    assert found["threads of the process that forks the ranks"] == 1
    assert found["CUDA is initialized in a run with device=cpu"] == "False"
    assert found["time that a save stops the training"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("step", sorted(set(NAMES) - {"driver", "fork", "cpu run", "checkpoint"}))
def test_the_longer_steps_run_on_the_cpu_in_a_rehearsal(tmp_path: Path, step: str) -> None:
    found = rehearse(tmp_path, step)
    if step == "equal bits":
        assert found["tensors that differ after a resume from the middle"] == 0
        assert found["step from which this run has resumed"] == 20
    assert found
