"""train.py end to end.

The losses are the same on any number of processes. A run that is killed and restarted ends bit for bit with the
weights of an uninterrupted run. A stop request ends with a checkpoint and exit code 75. A non-finite loss stops all
ranks, and the error names its rank. A full disk keeps the older checkpoints. A wrong setting exits with 2 and one
line, and creates no file.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from distributed.checkpoint.directory import CheckpointInfo, newest

KIT = Path(__file__).resolve().parents[2]
TINY = """
model: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 32, dropout: 0.1}
train: {steps: 12, batch_size: 8, learning_rate: 1e-2, evaluate_every: 6, warmup_steps: 2}
checkpoint: {dir: checkpoints, every: 1}
logging: {every: 1, sample: 20}
"""
RUN_TIMEOUT = 240  # seconds


@dataclass(frozen=True)
class RunResult:
    """The exit code of a training, which is the same on all ranks, and its output."""

    returncode: int
    stdout: str  # of rank 0
    stderr: str  # of all ranks


class Workdir:
    """A working directory for trainings."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        (directory / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
        (directory / "tiny.yaml").write_text(TINY + f"data: {{path: {json.dumps(str(directory / 'text.txt'))}}}\n")

    def script(self, *arguments: str, wrapper: str = "") -> list[str]:
        return [*([wrapper] if wrapper else []), str(KIT / "train.py"), "--config", "tiny.yaml", *arguments]

    def wrapper(self, text: str) -> str:
        """Write a script that patches train.py and runs it; return its path."""
        (self.path / "wrapper.py").write_text(text)
        return str(self.path / "wrapper.py")

    def run(self, nproc: int, *arguments: str, wrapper: str = "", **env: str) -> RunResult:
        with self.start(nproc, *arguments, wrapper=wrapper, **env) as training:
            return result_of(training)

    def job(self, *arguments: str, nproc: int = 1, **env: str) -> RunResult:
        """Run train.py as a job list does, without a settings file, on the CPU."""
        arguments = (str(KIT / "train.py"), *arguments, "--device", "cpu")
        with forked.launched(nproc, forked.script, *arguments, env=env) as training:
            return result_of(training)

    def start(
        self, nproc: int, *arguments: str, wrapper: str = "", **env: str
    ) -> AbstractContextManager[forked.ForkedRun]:
        """Start the ranks as Muster's agent does, forked from a process that has imported PyTorch."""
        return forked.launched(nproc, forked.script, *self.script(*arguments, wrapper=wrapper), env=env)

    def run_without_launcher(self, *prefix: str | Path) -> subprocess.CompletedProcess[str]:
        """Run train.py with Python alone, or through the script in `prefix`."""
        arguments = [sys.executable, *prefix, *self.script()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(arguments, env=env, timeout=RUN_TIMEOUT, text=True, capture_output=True, check=False)

    def losses(self) -> dict[int, float]:
        """Return the losses in metrics.jsonl of the newest run, by step."""
        directory = max(self.path.glob("logs/train-*"), key=lambda path: path.stat().st_mtime_ns)
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def result_of(training: forked.ForkedRun) -> RunResult:
    results = training.results()
    (code,) = {rank.code for rank in results.values()}
    assert code is not None, "timed out"
    return RunResult(code, results[0].out, "".join(rank.err for rank in results.values()))


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workdir:
    monkeypatch.chdir(tmp_path)
    return Workdir(tmp_path)


def newest_checkpoint(directory: Path) -> CheckpointInfo:
    checkpoint = newest(directory)
    assert checkpoint is not None
    return checkpoint


def weights(directory: Path) -> bytes:
    """Return all tensors of the newest checkpoint, without the random states, as bytes."""
    checkpoint = newest_checkpoint(directory)
    if checkpoint.sharded:
        return b"".join((checkpoint.path / name).read_bytes() for name in sorted(checkpoint.files) if "distcp" in name)
    state = torch.load(checkpoint.path / "state.pt", weights_only=True)
    return b"".join(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) for tensor in tensors(state))


def content(directory: Path) -> dict[str, str]:
    """Return the checksum of each file of the newest checkpoint except .metadata, which contains paths."""
    return {name: file["sha256"] for name, file in newest_checkpoint(directory).files.items() if name != ".metadata"}


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


# ---------------------------------------------------------------- the same on any number of processes


@pytest.mark.parametrize("arguments", [(), ("train.accumulation=2",), ("train.gradient_checkpointing=true",)])
def test_two_processes_learn_what_one_learns(workdir: Workdir, arguments: tuple[str, ...]) -> None:
    options = ("model.dropout=0", "checkpoint.dir=null", *arguments)
    assert workdir.run(1, *options).returncode == 0
    one = workdir.losses()
    assert workdir.run(2, *options).returncode == 0
    two = workdir.losses()
    assert one.keys() == two.keys() == set(range(1, 13))
    assert one == pytest.approx(two, rel=1e-4)
    assert one[12] < one[1] - 0.3


SHOWN_SYNC = """
import runpy, sys
from torch.distributed.fsdp import FSDPModule
sync = FSDPModule.set_requires_gradient_sync
def shown(self, on, **more):
    print("sync", on)
    return sync(self, on, **more)
FSDPModule.set_requires_gradient_sync = shown
sys.path.insert(0, {kit!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("precision", "accuracy"), [("fp32", 1e-4), ("fp16", 1e-2)])
def test_fsdp_learns_what_ddp_learns(workdir: Workdir, precision: str, accuracy: float) -> None:
    options = ("model.dropout=0", "checkpoint.dir=null", "train.accumulation=2", f"train.precision={precision}")
    assert workdir.run(2, *options).returncode == 0
    ddp = workdir.losses()
    wrapper = workdir.wrapper(SHOWN_SYNC.format(kit=str(KIT)))
    for reduce_once in ("false", "true"):
        fsdp = ("distributed.strategy=fsdp", f"distributed.reduce_once={reduce_once}")
        result = workdir.run(2, *options, *fsdp, wrapper=wrapper)
        assert result.returncode == 0, result.stderr
        assert ("sync False" in result.stdout) == (reduce_once == "true")
        assert workdir.losses() == pytest.approx(ddp, rel=accuracy)


COMPILED = pytest.param(
    "train.compile=true",
    marks=[
        pytest.mark.soak,
        pytest.mark.timeout(600),  # minutes of g++
        pytest.mark.skipif(" " in sys.prefix, reason="PyTorch's compiler for CPUs fails if its path contains a blank"),
    ],
)


@pytest.mark.parametrize("setting", ["train.precision=bf16", "train.precision=fp16", COMPILED])
def test_other_precisions_and_compiled_models_learn_too(workdir: Workdir, setting: str) -> None:
    result = workdir.run(1, setting, "checkpoint.dir=null", "data.workers=1")
    assert result.returncode == 0, result.stderr
    losses = workdir.losses()
    assert losses[12] < losses[1] - 0.3


# ---------------------------------------------------------------- stop and resume


STRATEGIES = {"one": (1, "single"), "ddp": (2, "ddp"), "dp": (1, "dp"), "fsdp": (2, "fsdp")}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_killed_twice_ends_with_the_weights_of_an_uninterrupted_run(workdir: Workdir, name: str) -> None:
    nproc, strategy = STRATEGIES[name]
    options = (f"distributed.strategy={strategy}",)
    assert workdir.run(nproc, *options, "checkpoint.dir=whole").returncode == 0
    for step in (3, 7):
        with workdir.start(nproc, *options) as training:
            training.wait_for(f"step {step:>2}/12")
            training.signal(signal.SIGKILL)
    last = workdir.run(nproc, *options)
    assert last.returncode == 0, last.stderr
    assert "resuming from" in last.stdout
    assert newest_checkpoint(workdir.path / "checkpoints").step == 12
    assert weights(workdir.path / "checkpoints") == weights(workdir.path / "whole")


def test_an_automatic_checkpoint_interval_does_not_change_the_weights(workdir: Workdir) -> None:
    options = ("train.steps=60", "train.evaluate_every=0", "logging.sample=0")
    assert workdir.run(2, *options, "checkpoint.every=0", "checkpoint.dir=whole").returncode == 0
    measured = (*options, "checkpoint.every=auto", "checkpoint.mtbf=0.1")
    with workdir.start(2, *measured) as training:
        training.wait_for("step 25/60")
        training.signal(signal.SIGKILL)
    assert newest_checkpoint(workdir.path / "checkpoints").step in (10, 20)
    last = workdir.run(2, *measured)
    assert last.returncode == 0, last.stderr
    assert "checkpoint every" in last.stdout
    assert weights(workdir.path / "checkpoints") == weights(workdir.path / "whole")


RESUMED = [
    pytest.param(3, ("train.accumulation=2",), id="three ranks, ddp, accumulation"),
    pytest.param(4, ("train.gradient_checkpointing=true",), id="four ranks, ddp, gradient checkpointing"),
    pytest.param(3, ("distributed.strategy=fsdp",), id="three ranks, fsdp"),
    pytest.param(8, ("model.n_layer=3",), id="eight ranks, ddp", marks=pytest.mark.soak),
    pytest.param(8, ("distributed.strategy=fsdp",), id="eight ranks, fsdp", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("nproc", "options"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_run(workdir: Workdir, nproc: int, options: tuple[str, ...]) -> None:
    """Three ranks or more, because the floating-point sum of two numbers does not depend on their order."""
    options = ("train.batch_size=24", "train.steps=6", "checkpoint.keep=9", "logging.sample=0", *options)
    assert workdir.run(nproc, *options, "checkpoint.dir=undisturbed").returncode == 0
    undisturbed = workdir.losses()
    shutil.copytree(workdir.path / "undisturbed/step_00000003", workdir.path / "checkpoints/step_00000003")
    resumed = workdir.run(nproc, *options)
    assert resumed.returncode == 0, resumed.stderr
    assert workdir.losses() == {step: undisturbed[step] for step in (4, 5, 6)}
    assert content(workdir.path / "checkpoints") == content(workdir.path / "undisturbed")


SHOWN_BEFORE_JOINING = """
import os, runpy, sys
import torch, torch.distributed
init = torch.distributed.init_process_group
def shown(*arguments, **more):
    print("deterministic", torch.are_deterministic_algorithms_enabled(), os.environ.get("NCCL_ALGO"))
    return init(*arguments, **more)
torch.distributed.init_process_group = shown
sys.path.insert(0, {kit!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_deterministic_run_uses_deterministic_algorithms_before_it_joins(workdir: Workdir, nproc: int) -> None:
    wrapper = workdir.wrapper(SHOWN_BEFORE_JOINING.format(kit=str(KIT)))
    options = ("train.batch_size=24", "train.steps=4", "train.deterministic=true", "checkpoint.keep=9")
    whole = workdir.run(nproc, *options, "checkpoint.dir=whole", wrapper=wrapper)
    assert "deterministic True ^NVLS" in whole.stdout, whole.stderr
    shutil.copytree(workdir.path / "whole/step_00000002", workdir.path / "checkpoints/step_00000002")
    assert workdir.run(nproc, *options).returncode == 0
    assert content(workdir.path / "checkpoints") == content(workdir.path / "whole")
    refused = workdir.run(1, *options, NCCL_ALGO="NVLS")
    assert refused.returncode == 2
    assert "train.py: NCCL_ALGO=NVLS: results may differ between runs; unset it" in refused.stderr


KILLED_ONCE = """
import os, runpy, signal, sys
from pathlib import Path
sys.path.insert(0, {kit!r})
sys.argv[0] = {kit!r} + "/train.py"
from distributed.training import data
fetch, count = data.Windows.__getitem__, [0]
def killed_once(self, indices):
    count[0] += 1
    if os.environ["RANK"] == "1" and count[0] == 5 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fetch(self, indices)
data.Windows.__getitem__ = killed_once
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.soak
def test_a_run_restarted_by_max_restarts_equals_an_uninterrupted_run(workdir: Workdir) -> None:
    options = ("train.batch_size=24", "train.steps=8")
    assert workdir.run(3, *options, "checkpoint.dir=undisturbed").returncode == 0
    script = workdir.wrapper(KILLED_ONCE.format(kit=str(KIT)))
    launcher = str(KIT / "scripts/ssh/launch_singlenode.sh")
    arguments = [launcher, "--max-restarts", "1", "--script", script, "tiny.yaml", "3", "--", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(arguments, env=env, timeout=RUN_TIMEOUT, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (workdir.path / "killed").exists()
    assert "resuming from" in result.stdout
    assert content(workdir.path / "checkpoints") == content(workdir.path / "undisturbed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_stop_request_ends_with_a_checkpoint_and_exit_code_75(workdir: Workdir, number: signal.Signals) -> None:
    options = ("train.steps=2000", "checkpoint.every=0", "train.evaluate_every=0")
    with workdir.start(1, *options) as training:
        training.wait_for("step    3/2000")
        training.signal(number)
        stopped = result_of(training)
    assert stopped.returncode == 75, stopped
    assert "run the same command to resume" in stopped.stdout
    step = newest_checkpoint(workdir.path / "checkpoints").step
    assert 3 <= step < 2000
    again = workdir.run(1, "train.steps=2000", f"train.steps={step + 1}")
    assert f"step {step + 1}/{step + 1}" in again.stdout


def test_all_ranks_stop_at_the_same_step_when_one_gets_a_stop_request(workdir: Workdir) -> None:
    with workdir.start(2, "train.steps=2000", "checkpoint.every=0", "train.evaluate_every=0") as training:
        training.wait_for("step    3/2000")
        training.signal(signal.SIGTERM, 1)
        stopped = result_of(training)
    assert stopped.returncode == 75, stopped
    assert newest_checkpoint(workdir.path / "checkpoints").ranks == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_stop_request_during_sampling_exits_with_0(workdir: Workdir, strategy: str) -> None:
    """All steps and the checkpoint are complete. Any rank may receive the signal."""
    with workdir.start(2, f"distributed.strategy={strategy}", "logging.sample=1000000") as training:
        training.wait_for("step 12/12")
        training.signal(signal.SIGTERM, 1)
        stopped = result_of(training)
    assert stopped.returncode == 0, stopped
    assert "stop request: all steps are done; sample shortened" in stopped.stdout
    assert "finished: 12 steps" in stopped.stdout
    assert newest_checkpoint(workdir.path / "checkpoints").step == 12


NO_SAMPLE_TIME = """
import sys
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
import train

train.sample.__globals__["SAMPLE_SECONDS"] = 0
sys.exit(train.main())
"""


def test_sampling_stops_at_its_time_limit(workdir: Workdir) -> None:
    script = workdir.wrapper(NO_SAMPLE_TIME.format(kit=str(KIT)))
    result = workdir.run(2, "train.steps=1", "logging.sample=1000000", wrapper=script)
    assert result.returncode == 0, result
    assert "a sample (1 of 1,000,000 tokens, in 0 s):" in result.stdout, result.stdout


def test_a_finished_training_is_not_continued(workdir: Workdir) -> None:
    assert workdir.run_without_launcher().returncode == 0
    before = weights(workdir.path / "checkpoints")
    again = workdir.run(1)
    assert again.returncode == 0
    path = newest_checkpoint(workdir.path / "checkpoints").path
    assert f"nothing left to do: {path} has 12 of 12 steps; raise train.steps" in again.stdout
    assert weights(workdir.path / "checkpoints") == before


OPTIMIZER = """
import sys
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
import train
step = train.torch.optim.AdamW.step
def shown(self, *arguments, **more):
    print("groups", [(group["weight_decay"], group["betas"]) for group in self.param_groups])
    return step(self, *arguments, **more)
train.torch.optim.AdamW.step = shown
sys.exit(train.main())
"""


def test_changed_optimizer_settings_apply_after_a_resume(workdir: Workdir) -> None:
    assert workdir.run(1, "train.steps=2").returncode == 0
    script = workdir.wrapper(OPTIMIZER.format(kit=str(KIT)))
    arguments = ("train.steps=3", "train.weight_decay=0.5", "train.beta1=0.5", "train.learning_rate=0.02")
    again = workdir.run(1, *arguments, wrapper=script)
    assert again.returncode == 0, again.stderr
    groups = {line for line in again.stdout.splitlines() if line.startswith("groups ")}
    assert groups == {"groups [(0.5, (0.5, 0.95)), (0.0, (0.5, 0.95))]"}
    for change in ("weight_decay was 0.1 in ", "beta1 was 0.9 in ", "learning_rate was 0.01 in "):
        assert change in again.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_resumes_with_another_world_size(workdir: Workdir, strategy: str) -> None:
    options = ("model.dropout=0", f"distributed.strategy={strategy}")
    assert workdir.run(2, *options, "checkpoint.dir=whole").returncode == 0
    whole = workdir.losses()
    assert workdir.run(2, *options, "train.steps=6").returncode == 0
    # The losses of step 7 are only nearly equal, because the learning rate of steps 1 to 6 depends on train.steps.
    more = workdir.run(1, *options)
    assert more.returncode == 0, more.stderr
    assert "world was 2" in more.stdout
    assert workdir.losses().keys() == set(range(7, 13))
    assert whole[7] == pytest.approx(workdir.losses()[7], rel=0.05)


RECORDED = """
import json, os, signal, sys
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
import train
from distributed.training import data
order = data.Stream.__iter__
def recorded(self):
    with open("samples." + os.environ["RANK"], "w", buffering=1) as file:
        for number, windows in enumerate(order(self), 1):
            file.write(json.dumps(windows) + chr(10))
            if os.environ["RANK"] == "0" and number == int(os.environ["STOP_AFTER"]):
                os.kill(os.getpid(), signal.SIGTERM)
            yield windows
data.Stream.__iter__ = recorded
sys.exit(train.main())
"""


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_fewer_or_more_ranks_train_on_the_same_samples_in_each_step(workdir: Workdir, strategy: str) -> None:
    accumulation = 2
    options = (
        "model.dropout=0", "train.batch_size=24", f"train.accumulation={accumulation}", "checkpoint.every=0",
        "train.evaluate_every=0", "logging.sample=0", f"distributed.strategy={strategy}",
    )  # fmt: skip
    script = workdir.wrapper(RECORDED.format(kit=str(KIT)))

    def run(nproc: int, steps: int, checkpoint_dir: str, code: int) -> tuple[list[list[int]], dict[int, float]]:
        """Train for `steps` steps and check the exit code. Return the samples of each step in order, and the losses."""
        stop = {"STOP_AFTER": str(steps * accumulation)}
        result = workdir.run(nproc, *options, f"checkpoint.dir={checkpoint_dir}", wrapper=script, **stop)
        assert result.returncode == code, result
        written = [(workdir.path / f"samples.{rank}").read_text().splitlines() for rank in range(nproc)]
        ranks = [list(map(json.loads, lines)) for lines in written]
        samples = [
            [window for rank in ranks for part in rank[first : first + accumulation] for window in part]
            for first in range(0, len(ranks[0]), accumulation)
        ]
        return samples, workdir.losses()

    samples, losses = run(4, 12, "undisturbed", 0)
    assert len(samples) == 12
    continued: list[list[int]] = []
    for nproc, steps, code in ((4, 4, 75), (2, 3, 75), (3, 5, 0)):
        first = len(continued)
        more_samples, more_losses = run(nproc, steps, "continued", code)
        continued += more_samples
        assert more_losses.keys() == set(range(first + 1, first + steps + 1))
        assert more_losses == pytest.approx({step: losses[step] for step in more_losses}, rel=1e-5)
    assert continued == samples


@pytest.mark.parametrize(
    ("strategy", "where", "file"), [("ddp", "on rank 0", "state.pt"), ("fsdp", "on each rank", "__0_0.distcp")]
)
def test_the_memory_for_copies_of_checkpoints_is_shown_at_the_start(
    workdir: Workdir, strategy: str, where: str, file: str
) -> None:
    options = ("model.n_embd=512", "train.steps=1", "logging.sample=0", "train.evaluate_windows=1")
    result = workdir.run(2, *options, f"distributed.strategy={strategy}")
    assert result.returncode == 0, result.stderr
    start, _, _ = result.stdout.partition("step 1/1")
    shown = re.search(r"save   copies (\S+) GB .* to CPU memory before it writes them, (.*)\n", start)
    assert shown, result.stdout
    assert shown[2] == where
    written = (newest_checkpoint(workdir.path / "checkpoints").path / file).stat().st_size
    assert float(shown[1]) == pytest.approx(written / 1e9, abs=0.006)


@pytest.mark.parametrize(
    ("strategy", "wrapped"),
    [("ddp", "DistributedDataParallel of"), ("fsdp", "2 FSDP units; ")],
)
def test_debug_output_shows_rendezvous_strategy_data_and_checkpoints(
    workdir: Workdir, strategy: str, wrapped: str
) -> None:
    result = workdir.run(2, "train.steps=1", f"distributed.strategy={strategy}", "--log-level", "DEBUG")
    assert result.returncode == 0, result.stderr
    for line in (
        "rendezvous: rank 0 of 2 on ", "  decided by  environment", "  rendezvous  127.0.0.1:",
        "rendezvous: 2 ranks joined in ", f"strategy: {strategy}, ", ", order of seed 1337 from position 0",
        "data: epoch 0 of 106 windows begins with ", "checkpoint step_00000001: copied in ", " bytes written in ",
        " s, published in ",
    ):  # fmt: skip
        assert line in result.stdout, line
    assert wrapped in result.stdout
    assert "rank 1 of 2" not in result.stdout


# ---------------------------------------------------------------- runtime errors


POISON = """
import os, runpy, sys
import torch
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
from distributed.training import data
fetch, count, loss_of = data.Windows.__getitem__, [0], torch.nn.functional.cross_entropy
def poisoned(self, indices):
    count[0] += 1
    if os.environ["RANK"] == {rank!r} and count[0] == 4:
        torch.nn.functional.cross_entropy = lambda *a, **k: loss_of(*a, **k) * {value}
    return fetch(self, indices)
data.Windows.__getitem__ = poisoned
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_non_finite_loss_stops_all_ranks_and_names_its_rank(workdir: Workdir, value: str) -> None:
    (workdir.path / "run/errors").mkdir(parents=True)
    script = workdir.wrapper(POISON.format(kit=str(KIT), rank="1", value=value))
    result = workdir.run(2, wrapper=script, MUSTER_RUN_DIR=str(workdir.path / "run"))
    assert result.returncode == 1
    records = {rank: json.loads((workdir.path / f"run/errors/rank_{rank}.json").read_text()) for rank in (0, 1)}
    assert records[1]["exception"] == "NonFiniteLoss"
    assert records[0]["exception"] == "PeerFailed"
    assert all("rank 1 on" in record["message"] and "step 4" in record["message"] for record in records.values())
    assert newest_checkpoint(workdir.path / "checkpoints").step == 3  # the step with the non-finite loss is not saved


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem")
def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint(
    workdir: Workdir, mount: Callable[[Path, str], None]
) -> None:
    mount(workdir.path / "checkpoints", "360k")
    result = workdir.run(1, "checkpoint.keep=100", "model.n_embd=32")
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    kept = newest_checkpoint(workdir.path / "checkpoints")
    assert 1 <= kept.step < 12
    assert kept.fault() is None


# ---------------------------------------------------------------- wrong settings


WRONG = {
    "train.batch_szie=4": "did you mean train.batch_size?",
    "model.block_size=100000": "text.txt",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_refused_in_one_line(workdir: Workdir, setting: str) -> None:
    result = workdir.run(1, setting, "checkpoint.dir=other")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert WRONG[setting] in result.stderr
    assert not (workdir.path / "other").exists()


def test_a_setting_that_does_not_fit_the_world_size_is_refused_by_each_rank(workdir: Workdir) -> None:
    result = workdir.run(2, "train.batch_size=7")
    assert result.returncode == 2
    for name in ("train.py", "train.py, rank 1"):
        assert f"{name}: train.batch_size=7 is not divisible by 2 ranks x" in result.stderr
    assert not (workdir.path / "logs").exists()


def test_non_finite_weights_are_not_saved(workdir: Workdir) -> None:
    assert workdir.run(1, "train.steps=2").returncode == 0
    ruined = workdir.run(1, "train.learning_rate=1e38", "train.warmup_steps=0")
    assert ruined.returncode == 1
    assert "the weights are not finite (NaN or inf) after step 3" in ruined.stderr
    assert newest_checkpoint(workdir.path / "checkpoints").step == 2
    assert workdir.run(1).returncode == 0
    assert newest_checkpoint(workdir.path / "checkpoints").step == 12


def test_a_checkpoint_of_another_model_is_refused_with_the_keys_that_differ(workdir: Workdir) -> None:
    assert workdir.run(1, "train.steps=2").returncode == 0
    result = workdir.run(1, "model.n_embd=32")
    assert result.returncode == 2
    assert "model.n_embd=32 (checkpoint: 16)" in result.stderr
    assert newest_checkpoint(workdir.path / "checkpoints").step == 2


@pytest.mark.parametrize(("nproc", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_run_resumes_with_another_precision(workdir: Workdir, nproc: int, strategy: str) -> None:
    for steps, precision in enumerate(("fp32", "fp16", "bf16", "fp16"), start=1):
        options = (f"train.steps={steps}", f"train.precision={precision}", f"distributed.strategy={strategy}")
        result = workdir.run(nproc, *options)
        assert result.returncode == 0, result.stderr
        assert newest_checkpoint(workdir.path / "checkpoints").step == steps
        assert ("precision was" in result.stdout) == (steps > 1)
        assert ("scaler starts anew: it was not in use" in result.stdout) == (steps in (2, 4))


def test_a_run_with_another_strategy_is_refused_and_the_checkpoint_is_kept(workdir: Workdir) -> None:
    assert workdir.run(2, "train.steps=1").returncode == 0
    before = content(workdir.path / "checkpoints")
    result = workdir.run(2, "distributed.strategy=fsdp")
    assert result.returncode == 2
    assert "/step_00000001 is unsharded, but this run uses sharded checkpoints" in result.stderr
    assert content(workdir.path / "checkpoints") == before


@pytest.mark.parametrize("nproc", [1, 2])
def test_unusable_checkpoints_are_refused_and_not_changed(workdir: Workdir, nproc: int) -> None:
    assert workdir.run(1, "train.steps=2").returncode == 0
    for step in (1, 2):
        (workdir.path / f"checkpoints/step_{step:08}/state.pt").write_bytes(b"damaged")
    before = {path: path.stat().st_mtime_ns for path in workdir.path.glob("checkpoints/step*/**")}
    refused = workdir.run(nproc, "train.steps=2")
    assert refused.returncode == 2
    for rank in range(nproc):
        name = "train.py" if rank == 0 else f"train.py, rank {rank}"
        assert f"{name}: {workdir.path}/checkpoints: checkpoints exist, but none is usable:\n" in refused.stderr
    assert refused.stderr.count("/step_00000002/state.pt: 7 bytes instead of ") == nproc
    assert {path: path.stat().st_mtime_ns for path in workdir.path.glob("checkpoints/step*/**")} == before

    remedy = refused.stderr.splitlines()[-1].partition("move this one: ")[2]
    subprocess.run(remedy, shell=True, check=True)
    anew = workdir.run(nproc, "train.steps=2")
    assert anew.returncode == 0
    assert "resuming from" not in anew.stdout


def test_a_second_run_with_the_same_checkpoint_directory_is_refused(workdir: Workdir) -> None:
    with workdir.start(1, "train.steps=2000") as training:
        training.wait_for("step    1/2000")
        second = workdir.run(1, "train.steps=2000")
    assert second.returncode == 2
    assert "in use by process" in second.stderr


def test_a_frozen_attempt_writes_no_checkpoint_after_the_run_was_restarted(workdir: Workdir) -> None:
    run = str(workdir.path / "logs/train-1")
    (workdir.path / "logs/train-1").mkdir(parents=True)
    first = workdir.start(1, "train.steps=100000", MUSTER_RUN_DIR=run, TORCHELASTIC_RESTART_COUNT="0")
    later = workdir.start(1, "train.steps=100000", MUSTER_RUN_DIR=run, TORCHELASTIC_RESTART_COUNT="1")
    with first as lost:
        lost.wait_for("step      3/")
        lost.signal(signal.SIGSTOP)
        with later as restarted:
            restarted.wait_for("resuming from")
            restarted.wait_for("step     20/")
            lost.signal(signal.SIGCONT)
            frozen = result_of(lost)
            restarted.signal(signal.SIGTERM)
            stopped = result_of(restarted)
    assert frozen.returncode == 1, frozen
    assert "attempt 2 of run train-1; attempt 1 of run train-1 writes no more checkpoints here" in frozen.stderr
    assert stopped.returncode == 75, stopped
    assert "taken over from process" in stopped.stdout
    (step,) = re.findall(r"stopped on request at step (\d+)", stopped.stdout)
    assert newest_checkpoint(workdir.path / "checkpoints").step == int(step)


# ---------------------------------------------------------------- run directory


def test_the_run_directory_has_report_settings_and_metrics(workdir: Workdir) -> None:
    agent = (KIT / "scripts/lib/agent.py", "--standalone", "--nproc-per-node", "2")
    assert workdir.run_without_launcher(*agent).returncode == 0
    directory = next(workdir.path.glob("logs/train-*"))
    assert (directory / "report.html").stat().st_size > 1000
    settings = json.loads((directory / "settings.json").read_text())
    assert settings["world"]["size"] == 2
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["start", *["checkpoint"] * 12, "finish"]
    steps = [line for line in lines if "loss" in line]
    assert all(len(line["rank_seconds"]) == 2 and min(line["rank_seconds"]) > 0 for line in steps)
    assert all(len(line["wait_share"]) == 2 and all(0 < share < 1 for share in line["wait_share"]) for line in steps)
    held_out = [line for line in lines if "held_out_loss" in line and "event" not in line]
    assert [line["step"] for line in held_out] == [6, 12]
    assert all(math.isfinite(line["held_out_loss"]) for line in held_out)


# ---------------------------------------------------------------- a job of a job list


SMALL = ("--batch_size", "4", "model.n_embd=16", "train.evaluate_windows=8", "checkpoint.every=1", "logging.sample=0")
FOLD = ("--fold", "1", "--prefix", "exp1", *SMALL)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(run) if line.get("event") in names]


def test_a_job_with_two_arguments_trains_with_the_default_settings(workdir: Workdir) -> None:
    result = workdir.job("--fold", "0", "--prefix", "exp1")
    assert result.returncode == 0, result.stderr
    assert "; participant special-methods, mode heldout" in result.stdout
    run = workdir.path / "experiments/exp1/fold0_special-methods"
    assert {"checkpoints", "metrics.jsonl", "report.html", "settings.json"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "settings.json").read_text())["settings"]["data"]["participant"] == "special-methods"
    losses = [line["held_out_loss"] for line in lines_of(run) if "held_out_loss" in line and "event" not in line]
    assert losses[-1] < losses[0] < math.log(256)
    [start], [finish] = events(run, "start"), events(run, "finish")
    assert start["steps"] == finish["step"] == 300
    assert finish["held_out_loss"] == losses[-1]


def test_a_job_resumes_in_its_output_directory(workdir: Workdir) -> None:
    assert workdir.job(*FOLD, "--steps", "2").returncode == 0
    again = workdir.job(*FOLD, "--steps", "4")
    assert again.returncode == 0, again.stderr
    run = workdir.path / "experiments/exp1/fold1_compound-statements"
    assert f"resuming from {run}/checkpoints/step_00000002" in again.stdout
    assert [(line["step"], line["steps"]) for line in events(run, "start", "resume")] == [(0, 2), (2, 4)]
    assert [line["run"] for line in events(run, "resume")] == [str(run)]
    assert not (workdir.path / "logs").exists()


def test_a_job_with_two_ranks_writes_to_its_output_directory(workdir: Workdir) -> None:
    assert workdir.job(*FOLD, "--steps", "2", nproc=2).returncode == 0
    run = workdir.path / "experiments/exp1/fold1_compound-statements"
    assert json.loads((run / "settings.json").read_text())["world"]["size"] == 2


def test_the_output_directory_of_the_dispatcher_overrides_the_prefix(workdir: Workdir) -> None:
    out, run = str(workdir.path / "out/1"), str(workdir.path / "run")
    for steps in ("2", "4"):
        arguments = (*FOLD, "--steps", steps, "--config", "tiny.yaml", "data.path=null")
        result = workdir.job(*arguments, MUSTER_OUTPUT_DIR=out, MUSTER_RUN_DIR=run)
        assert result.returncode == 0, result.stderr
    assert [line["step"] for line in events(workdir.path / "out/1", "start", "resume")] == [0, 2]
    assert not {"experiments", "run", "logs", "checkpoints"} & {path.name for path in workdir.path.iterdir()}


def test_without_a_fold_new_run_directories_are_created_below_the_prefix(workdir: Workdir) -> None:
    for _ in range(2):
        assert workdir.job("--prefix", "a/b", *SMALL, "--steps", "1").returncode == 0
    assert len(list(workdir.path.glob("experiments/a/b/train-*/metrics.jsonl"))) == 2


def test_the_participants_of_a_job_may_be_texts_of_a_directory(workdir: Workdir) -> None:
    (workdir.path / "texts/ada").mkdir(parents=True)
    for name in ("ada/1.md", "ada/2.txt", "bob.txt", "eve.txt"):
        (workdir.path / "texts" / name).write_text(name * 400)
    arguments = ("--data_path", "texts", "--steps", "1", *SMALL)
    result = workdir.job("--fold", "1", "--mode", "pooled", *arguments)
    assert result.returncode == 0, result.stderr
    assert "; domains ada, bob, eve; participant bob, mode pooled" in result.stdout
    one = workdir.job("--participants", "eve", "ada", "--fold", "0", "--prefix", "exp1", *arguments)
    assert one.returncode == 0, one.stderr
    assert "; domains ada, eve; participant eve, mode heldout" in one.stdout
    assert (workdir.path / "experiments/exp1/fold0_eve/metrics.jsonl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_a_job_writes_nothing_below_a_directory_of_another_user(workdir: Workdir) -> None:
    workdir.path.chmod(0o1777)
    subprocess.run(["mkdir", "-m", "777", "experiments"], cwd=workdir.path, user="nobody", extra_groups=[], check=True)
    refused = workdir.job(*FOLD, "--steps", "2")
    assert refused.returncode == 2
    assert "/experiments: cannot make the run directory: belongs to nobody, who made it where all" in refused.stderr
    assert not list((workdir.path / "experiments").iterdir())


def test_a_job_does_not_resume_from_a_checkpoint_with_other_data_settings(workdir: Workdir) -> None:
    """With another mode the checkpoint may have been trained on text that this run holds out."""
    assert workdir.job(*FOLD, "--steps", "2").returncode == 0
    refused = workdir.job(*FOLD, "--steps", "2", "--mode", "single")
    assert refused.returncode == 2
    message = "was written with other data settings: data.mode=single (checkpoint: heldout); set another prefix"
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("--fold 8", "fold: out of range for 8 participants: got 8; give 0 to 7"),
        ("--fold 0 --prefix text.txt/x", "/text.txt: cannot make the run directory: Not a directory; give another"),
    ],
)
def test_a_wrong_argument_of_a_job_is_refused_in_one_line(workdir: Workdir, arguments: str, fault: str) -> None:
    (workdir.path / "experiments").mkdir()
    (workdir.path / "experiments/text.txt").touch()
    result = workdir.job("--prefix", "exp1", *arguments.split())
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert fault in result.stderr
    assert not (workdir.path / "experiments/exp1").exists()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--device", "cuda:99"], "device cuda:99: not available: PyTorch sees "),
        (["distributed.backend=nccl"], "backend nccl needs a GPU"),
    ],
)
def test_a_missing_device_is_refused_in_one_line(workdir: Workdir, arguments: list[str], fault: str) -> None:
    if torch.cuda.is_available() and "nccl" in fault:
        pytest.skip("there is a GPU")
    result = workdir.run(1, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"train.py: {fault}")
    assert len(result.stderr.splitlines()) == 1
    assert not (workdir.path / "logs").exists()


CUDA_STUB = """
import runpy, sys
import torch
def refuse():
    raise AssertionError("CUDA is initialized")
torch.cuda.is_available, torch.cuda.device_count, torch.cuda._lazy_init = lambda: True, lambda: 2, refuse
sys.path.insert(0, {kit!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_on_the_cpu_does_not_initialize_cuda(workdir: Workdir) -> None:
    """PyTorch is made to report two GPUs. An initialization would take memory of GPU 0 for each rank."""
    wrapper = workdir.wrapper(CUDA_STUB.format(kit=str(KIT)))
    for steps in (2, 3):
        result = workdir.run(2, "distributed.device=cpu", f"train.steps={steps}", wrapper=wrapper)
        assert result.returncode == 0, result.stderr
    assert "resuming from" in result.stdout


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks(workdir: Workdir) -> None:
    scores = []
    for nproc in (1, 2, 3):
        result = workdir.run(nproc, "train.steps=1", "train.batch_size=6", "model.dropout=0", "checkpoint.dir=null")
        assert result.returncode == 0, result.stderr
        scores.append(next(line for line in result.stdout.splitlines() if line.startswith("held-out loss")))
    assert scores[0] == scores[1] == scores[2]
