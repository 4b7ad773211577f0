"""What only a machine with GPUs can show: measure it in at most six minutes, on one machine with one or more GPUs.

Prints a table of what each step measured, with its target and whether that is met, and writes it as JSON. Each step
runs in processes of its own, with a time limit: a step that fails or reaches its limit does not stop the others, and
what it has measured until then counts. Without a GPU, each step only says that it needs one. No setting of a GPU is
changed. Close other programs that use the GPUs. The result "measured" means that there is no target.

    python benchmarks/gpu_check.py [--only STEP ...] [--output gpu_check.json]

With --rehearse, the steps run on the CPU with small models, without the time limits: this tests the steps, not Muster.

Exits with 1 when a target is not met or a step has failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(KIT)  # benchmarks/ comes first otherwise
    sys.modules["benchmarks.gpu_check"] = sys.modules["__main__"]  # the classes that the steps import are these

from distributed.files import version, write_json  # noqa: E402
from distributed.host.gpus import count_gpus  # noqa: E402
from distributed.host.process_scan import adopt_orphans, descendants  # noqa: E402

LIMIT = 350.0  # seconds for all steps; with the start and the end of this program less than six minutes
KILL_LIMIT = 10.0  # seconds for the processes of a step to end after SIGKILL
REHEARSAL_RANKS = 2
OUTPUT_LINES = 30  # of a failed step, in the JSON file
MET, NOT_MET, MEASURED, FAILED, REHEARSED = "met", "not met", "measured", "failed", "rehearsed"
WIDTHS = (13, 62, 16, 22)  # of the columns step, measured, value, target


class Needs(Exception):
    """A step needs what this machine does not have; the message names it, such as "2 GPUs"."""


class Failed(Exception):
    """A step cannot go on; the message is the whole reason."""


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    what: str
    value: float | str
    unit: str = ""
    target: str = ""
    met: bool | None = None  # None: there is no target

    @property
    def shown(self) -> str:
        if isinstance(self.value, str):
            return self.value
        number = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.3g}"
        return f"{number} {self.unit}".strip()

    @property
    def result(self) -> str:
        return MEASURED if self.met is None else MET if self.met else NOT_MET


@dataclass(frozen=True)
class Machine:
    """What a step may use."""

    gpus: int
    device: str = "cuda"  # cpu in a rehearsal; `gpus` is then the number of ranks


@dataclass(frozen=True)
class Step:
    """A group of measurements. Works in an empty directory of its own, which is removed afterwards."""

    name: str
    measure: Callable[[Machine], Iterator[Figure]]
    limit: float  # seconds
    gpus: int = 1  # that it needs


# ---------------------------------------------------------------- in the process of a step


def measure(step: Step, machine: Machine, results: Path) -> None:
    """Write a line of JSON for each figure, and one for the reason if the step does not end normally."""
    with results.open("a", buffering=1) as file:
        try:
            for figure in step.measure(machine):
                file.write(json.dumps({"figure": asdict(figure)}) + "\n")
        except Needs as needed:
            file.write(json.dumps({"needs": str(needed)}) + "\n")
        except (Exception, SystemExit) as error:  # noqa: BLE001 (each failure is a reason in the table)
            traceback.print_exc()
            file.write(json.dumps({"failed": _one_line(error)}) + "\n")


def _one_line(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    name = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
    return f"{name}{' '.join(str(error).split())[:300]}"


# ---------------------------------------------------------------- all steps


def run_step(step: Step, machine: Machine, module: str, limit: float) -> dict[str, Any]:
    """Run a step in a new process group, and kill it and all its descendants at the end. Returns its entry in JSON."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as name:
        results, output = Path(name, "results"), Path(name, "output")
        results.touch()
        directory = Path(name, "step")
        directory.mkdir()
        command = [sys.executable, __file__, "--steps", module, "--run", step.name, str(results), str(machine.gpus)]
        env = dict(os.environ)
        if machine.device == "cpu":
            command, env = [*command, "--rehearse"], env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with output.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        reason = ""
        try:
            code = process.wait(limit)
            if code:
                reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit:.0f} s"
        finally:
            kill_all(process.pid)
        return entry(step, start, reason, results.read_text(), output.read_text(errors="replace"))


def kill_all(group: int) -> None:
    """Kill a process group and all descendants of this process: ranks have sessions of their own. Reap them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + KILL_LIMIT
    while (found := descendants(os.getpid())) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def entry(step: Step, start: float, reason: str, results: str, output: str) -> dict[str, Any]:
    """The entry of a step in the JSON file. reason: why its process has failed; results: the lines of measure()."""
    found: dict[str, Any] = {"name": step.name, "limit": step.limit, "seconds": round(time.monotonic() - start, 2)}
    figures, needed = [], ""
    for line in filter(None, results.split("\n")):
        with suppress(ValueError):  # the process was killed while it wrote the last line
            kind, value = next(iter(json.loads(line).items()))
            if kind == "figure":
                figures.append(Figure(**value))
            elif kind == "needs":
                needed = value
            else:
                reason = value
    found["figures"] = [asdict(figure) | {"result": figure.result} for figure in figures]
    if reason:
        found |= {"failed": reason, "output": output.splitlines()[-OUTPUT_LINES:]}
    elif needed:
        found["needs"] = needed
    return found


def rows(found: Mapping[str, Any], rehearsal: bool) -> list[str]:
    """The lines of the table for a step."""
    lines = []
    for values in found["figures"]:
        figure = Figure(**{key: value for key, value in values.items() if key != "result"})
        result = REHEARSED if rehearsal else figure.result
        lines.append(row(found["name"], figure.what, figure.shown, figure.target, result))
    if "failed" in found:
        lines.append(row(found["name"], "", "", "", f"{FAILED} ({found['failed']})"))
    if "needs" in found:
        lines.append(row(found["name"], "", "", "", f"needs {found['needs']}"))
    return lines


def row(*cells: str) -> str:
    *first, last = cells
    return "  ".join([*(f"{cell:{width}}" for cell, width in zip(first, WIDTHS, strict=True)), last])


def run_all(steps: Sequence[Step], machine: Machine, module: str) -> Iterator[dict[str, Any]]:
    """Run the steps in order; yield the entry of each in the JSON file."""
    end = time.monotonic() + LIMIT
    for step in steps:
        left = end - time.monotonic()
        if step.gpus > machine.gpus:
            needed = "a GPU" if step.gpus == 1 else f"{step.gpus} GPUs"
            yield {"name": step.name, "limit": step.limit, "seconds": 0.0, "figures": [], "needs": needed}
        elif machine.device == "cpu":
            yield run_step(step, machine, module, LIMIT)
        elif left < 1:
            reason = f"not started: all steps together have {LIMIT:.0f} s"
            yield {"name": step.name, "limit": step.limit, "seconds": 0.0, "figures": [], "failed": reason}
        else:
            yield run_step(step, machine, module, min(step.limit, left))


def run_and_report(steps: Sequence[Step], machine: Machine, module: str, output: Path) -> int:
    """Print the table and write the JSON file, after each step. Returns the exit code."""
    adopt_orphans()
    rehearsal, start, done = machine.device == "cpu", time.monotonic(), list[dict[str, Any]]()
    report = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"node": os.uname().nodename, "gpus": 0 if rehearsal else machine.gpus},
        "version": version(), "rehearsal": rehearsal, "steps": done,
    }  # fmt: skip
    print(row("step", "measured", "value", "target", "result"), flush=True)
    for found in run_all(steps, machine, module):
        done.append(found)
        print("\n".join(rows(found, rehearsal)), flush=True)
        write_json(output, report | {"seconds": round(time.monotonic() - start, 1)})
    failed = [one["name"] for one in done if "failed" in one]
    missed = [one["name"] for one in done if any(figure["result"] == NOT_MET for figure in one["figures"])]
    print(f"{time.monotonic() - start:.0f} s; written to {output}")
    return 1 if failed or (missed and not rehearsal) else 0


def main() -> int:
    """Run the steps, or, with --run, one step in this process."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs="+", metavar="STEP", help="run these steps (default: all)")
    options.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the JSON file")
    options.add_argument(
        "--rehearse", action="store_true", help=f"test the steps on the CPU, with {REHEARSAL_RANKS} ranks"
    )
    options.add_argument("--steps", default="benchmarks.gpu_steps", help=argparse.SUPPRESS)  # module with STEPS
    options.add_argument("--run", nargs=3, metavar=("STEP", "RESULTS", "GPUS"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    steps: Sequence[Step] = importlib.import_module(arguments.steps).STEPS
    by_name, device = {step.name: step for step in steps}, "cpu" if arguments.rehearse else "cuda"
    if arguments.run:
        name, results, gpus = arguments.run
        measure(by_name[name], Machine(int(gpus), device), Path(results))
        return 0
    if unknown := set(arguments.only or ()) - by_name.keys():
        options.error(f"--only: unknown step {', '.join(sorted(unknown))}; expected {', '.join(by_name)}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that `finally` is executed
    count = REHEARSAL_RANKS if arguments.rehearse else count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    chosen = [step for step in steps if not arguments.only or step.name in arguments.only]
    return run_and_report(chosen, Machine(count, device), arguments.steps, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
