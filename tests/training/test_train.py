"""train.py is what people copy and trust with weeks of GPU time.

Held here: any number of processes learns the same; a run killed at any step and started again ends with bit for bit
the weights of one never stopped; a stop request ends with a checkpoint and exit code 75; a loss that is not finite
stops all ranks at that step and names the culprit; a full disk costs nothing but the newest checkpoint; and every
wrong setting is refused with 2, one line and no trace.
"""

from __future__ import annotations

import json
import math
import os
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
SECONDS = 240  # after which a test run counts as hanging


@dataclass(frozen=True)
class Done:
    """How a training ended, which all of its ranks do alike."""

    returncode: int
    stdout: str  # of rank 0
    stderr: str  # of all


class Bench:
    """A folder in which trainings are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
        (folder / "tiny.yaml").write_text(TINY + f"data: {{path: {json.dumps(str(folder / 'text.txt'))}}}\n")

    def script(self, *words: str, wrapper: str = "") -> list[str]:
        return [*([wrapper] if wrapper else []), str(KIT / "train.py"), "--config", "tiny.yaml", *words]

    def wrapper(self, text: str) -> str:
        """A script that runs another, with something added."""
        (self.folder / "wrapper.py").write_text(text)
        return str(self.folder / "wrapper.py")

    def run(self, nproc: int, *words: str, wrapper: str = "", **env: str) -> Done:
        with self.start(nproc, *words, wrapper=wrapper, **env) as training:
            return done(training)

    def job(self, *words: str, nproc: int = 1, **env: str) -> Done:
        """As the dispatcher of a job list starts one: without a settings file, and here on the CPU."""
        words = (str(KIT / "train.py"), *words, "--device", "cpu")
        with forked.launched(nproc, forked.script, *words, env=env) as training:
            return done(training)

    def start(self, nproc: int, *words: str, wrapper: str = "", **env: str) -> AbstractContextManager[forked.ForkedRun]:
        """Its ranks as the kit's agent forks them, from a process that has PyTorch already."""
        return forked.launched(nproc, forked.script, *self.script(*words, wrapper=wrapper), env=env)

    def run_by_hand(self, *starter: str | Path) -> subprocess.CompletedProcess[str]:
        """As a person starts it, with nothing of ours around it."""
        words = [sys.executable, *starter, *self.script()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(words, env=env, timeout=SECONDS, text=True, capture_output=True, check=False)

    def losses(self) -> dict[int, float]:
        """The losses that the newest run wrote down, by step."""
        folder = max(self.folder.glob("logs/train-*"), key=lambda path: path.stat().st_mtime_ns)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}


def done(training: forked.ForkedRun) -> Done:
    told = training.results()
    (code,) = {rank.code for rank in told.values()}
    assert code is not None, "it hangs"
    return Done(code, told[0].out, "".join(rank.err for rank in told.values()))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


def found(folder: Path) -> CheckpointInfo:
    checkpoint = newest(folder)
    assert checkpoint is not None
    return checkpoint


def weights(folder: Path) -> bytes:
    """Everything of the newest checkpoint but its random states, as bytes that compare bit for bit."""
    checkpoint = found(folder)
    if checkpoint.sharded:
        return b"".join((checkpoint.path / name).read_bytes() for name in sorted(checkpoint.files) if "distcp" in name)
    state = torch.load(checkpoint.path / "state.pt", weights_only=True)
    return b"".join(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) for tensor in tensors(state))


def content(folder: Path) -> dict[str, str]:
    """The checksum of every file of the newest checkpoint, but of .metadata, which holds paths."""
    return {name: file["sha256"] for name, file in found(folder).files.items() if name != ".metadata"}


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


@pytest.mark.parametrize("words", [(), ("train.accumulation=2",), ("train.gradient_checkpointing=true",)])
def test_two_processes_learn_what_one_learns(bench: Bench, words: tuple[str, ...]) -> None:
    said = ("model.dropout=0", "checkpoint.dir=null", *words)
    assert bench.run(1, *said).returncode == 0
    one = bench.losses()
    assert bench.run(2, *said).returncode == 0
    two = bench.losses()
    assert one.keys() == two.keys() == set(range(1, 13))
    assert one == pytest.approx(two, rel=1e-4)
    assert one[12] < one[1] - 0.3


def test_fsdp_learns_what_ddp_learns(bench: Bench) -> None:
    assert bench.run(2, "model.dropout=0", "checkpoint.dir=null").returncode == 0
    ddp = bench.losses()
    assert bench.run(2, "model.dropout=0", "checkpoint.dir=null", "distributed.strategy=fsdp").returncode == 0
    assert bench.losses() == pytest.approx(ddp, rel=1e-4)


COMPILED = pytest.param(
    "train.compile=true",
    marks=[
        pytest.mark.soak,
        pytest.mark.timeout(600),  # minutes of g++
        pytest.mark.skipif(" " in sys.prefix, reason="PyTorch's compiler for CPUs cannot have a blank in its path"),
    ],
)


@pytest.mark.parametrize("word", ["train.precision=bf16", "train.precision=fp16", COMPILED])
def test_other_precisions_and_compiled_models_learn_too(bench: Bench, word: str) -> None:
    ended = bench.run(1, word, "checkpoint.dir=null", "data.workers=1")
    assert ended.returncode == 0, ended.stderr
    losses = bench.losses()
    assert losses[12] < losses[1] - 0.3


def test_fp16_is_refused_where_one_rank_alone_would_see_an_overflow(bench: Bench) -> None:
    ended = bench.run(1, "train.precision=fp16", "distributed.strategy=fsdp")
    assert ended.returncode == 2
    assert "train.precision=fp16 with distributed.strategy=fsdp" in ended.stderr


# ---------------------------------------------------------------- stopped and started again


STRATEGIES = {"one": (1, "single"), "ddp": (2, "ddp"), "dp": (1, "dp"), "fsdp": (2, "fsdp")}


@pytest.mark.parametrize("name", STRATEGIES)
def test_killed_at_any_step_it_ends_as_if_never_stopped(bench: Bench, name: str) -> None:
    nproc, strategy = STRATEGIES[name]
    said = (f"distributed.strategy={strategy}",)
    assert bench.run(nproc, *said, "checkpoint.dir=whole").returncode == 0
    for victim in (3, 7):
        with bench.start(nproc, *said) as training:
            training.wait_for(f"step {victim:>2}/12")
            training.signal(signal.SIGKILL)
    last = bench.run(nproc, *said)
    assert last.returncode == 0, last.stderr
    assert "resuming from" in last.stdout
    assert found(bench.folder / "checkpoints").step == 12
    assert weights(bench.folder / "checkpoints") == weights(bench.folder / "whole")


RESUMED = [
    pytest.param(3, ("train.accumulation=2",), id="three ranks, ddp, accumulation"),
    pytest.param(4, ("train.gradient_checkpointing=true",), id="four ranks, ddp, gradient checkpointing"),
    pytest.param(3, ("distributed.strategy=fsdp",), id="three ranks, fsdp"),
    pytest.param(8, ("model.n_layer=3",), id="eight ranks, ddp", marks=pytest.mark.soak),
    pytest.param(8, ("distributed.strategy=fsdp",), id="eight ranks, fsdp", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("nproc", "options"), RESUMED)
def test_a_resumed_run_is_bit_for_bit_one_never_stopped(bench: Bench, nproc: int, options: tuple[str, ...]) -> None:
    """The sum of two numbers is the same in any order; the sum of three is not."""
    options = ("train.batch_size=24", "train.steps=6", "checkpoint.keep=9", "logging.sample=0", *options)
    assert bench.run(nproc, *options, "checkpoint.dir=undisturbed").returncode == 0
    undisturbed = bench.losses()
    shutil.copytree(bench.folder / "undisturbed/step_00000003", bench.folder / "checkpoints/step_00000003")
    resumed = bench.run(nproc, *options)
    assert resumed.returncode == 0, resumed.stderr
    assert bench.losses() == {step: undisturbed[step] for step in (4, 5, 6)}
    assert content(bench.folder / "checkpoints") == content(bench.folder / "undisturbed")


KILLED_ONCE = """
import os, runpy, signal, sys
from pathlib import Path
sys.path.insert(0, {kit!r})
sys.argv[0] = {kit!r} + "/train.py"
from distributed.training import data
fetch, count = data.Windows.__getitems__, [0]
def killed_once(self, indices):
    count[0] += 1
    if os.environ["RANK"] == "1" and count[0] == 5 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fetch(self, indices)
data.Windows.__getitems__ = killed_once
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.soak
def test_a_run_that_max_restarts_restarted_is_bit_for_bit_one_never_stopped(bench: Bench) -> None:
    options = ("train.batch_size=24", "train.steps=8")
    assert bench.run(3, *options, "checkpoint.dir=undisturbed").returncode == 0
    script = bench.wrapper(KILLED_ONCE.format(kit=str(KIT)))
    launcher = str(KIT / "scripts/ssh/launch_singlenode.sh")
    words = [launcher, "--max-restarts", "1", "--script", script, "tiny.yaml", "3", "--", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=env, timeout=SECONDS, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (bench.folder / "killed").exists()
    assert "resuming from" in ended.stdout
    assert content(bench.folder / "checkpoints") == content(bench.folder / "undisturbed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_request_to_stop_ends_with_a_checkpoint_and_75(bench: Bench, number: signal.Signals) -> None:
    said = ("train.steps=2000", "checkpoint.every=0", "train.evaluate_every=0")
    with bench.start(1, *said) as training:
        training.wait_for("step    3/2000")
        training.signal(number)
        stopped = done(training)
    assert stopped.returncode == 75, stopped
    assert "run the same command to resume" in stopped.stdout
    step = found(bench.folder / "checkpoints").step
    assert 3 <= step < 2000
    again = bench.run(1, "train.steps=2000", f"train.steps={step + 1}")
    assert f"step {step + 1}/{step + 1}" in again.stdout


def test_all_ranks_stop_at_the_same_step_when_one_is_asked(bench: Bench) -> None:
    with bench.start(2, "train.steps=2000", "checkpoint.every=0", "train.evaluate_every=0") as training:
        training.wait_for("step    3/2000")
        training.signal(signal.SIGTERM, 1)
        stopped = done(training)
    assert stopped.returncode == 75, stopped
    assert found(bench.folder / "checkpoints").ranks == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_that_is_stopped_while_it_samples_has_finished(bench: Bench, strategy: str) -> None:
    """All steps are done and the checkpoint is written: there is nothing to resume. Any rank may be the one asked."""
    with bench.start(2, f"distributed.strategy={strategy}", "logging.sample=1000000") as training:
        training.wait_for("step 12/12")
        training.signal(signal.SIGTERM, 1)
        stopped = done(training)
    assert stopped.returncode == 0, stopped
    assert "stop request: all steps are done; sample shortened" in stopped.stdout
    assert "finished: 12 steps" in stopped.stdout
    assert found(bench.folder / "checkpoints").step == 12


IMPATIENT = """
import sys
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
import train

train.sample.__globals__["SAMPLE_SECONDS"] = 0
sys.exit(train.main())
"""


def test_a_sample_that_takes_too_long_is_cut_short(bench: Bench) -> None:
    script = bench.wrapper(IMPATIENT.format(kit=str(KIT)))
    ended = bench.run(2, "train.steps=1", "logging.sample=1000000", wrapper=script)
    assert ended.returncode == 0, ended
    assert "a sample (1 of 1,000,000 tokens, in 0 s):" in ended.stdout, ended.stdout


def test_a_finished_training_stays_finished(bench: Bench) -> None:
    assert bench.run_by_hand().returncode == 0
    before = weights(bench.folder / "checkpoints")
    again = bench.run(1)
    assert again.returncode == 0
    path = found(bench.folder / "checkpoints").path
    assert f"nothing left to do: {path} has 12 of 12 steps; raise train.steps" in again.stdout
    assert weights(bench.folder / "checkpoints") == before


OPTIMIZER = """
import sys
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
import train
step = train.torch.optim.AdamW.step
def shown(self, *words, **more):
    print("groups", [(group["weight_decay"], group["betas"]) for group in self.param_groups])
    return step(self, *words, **more)
train.torch.optim.AdamW.step = shown
sys.exit(train.main())
"""


def test_settings_of_the_optimizer_that_change_hold_after_a_resume(bench: Bench) -> None:
    assert bench.run(1, "train.steps=2").returncode == 0
    script = bench.wrapper(OPTIMIZER.format(kit=str(KIT)))
    words = ("train.steps=3", "train.weight_decay=0.5", "train.beta1=0.5", "train.learning_rate=0.02")
    again = bench.run(1, *words, wrapper=script)
    assert again.returncode == 0, again.stderr
    groups = {line for line in again.stdout.splitlines() if line.startswith("groups ")}
    assert groups == {"groups [(0.5, (0.5, 0.95)), (0.0, (0.5, 0.95))]"}
    for change in ("weight_decay was 0.1 in ", "beta1 was 0.9 in ", "learning_rate was 0.01 in "):
        assert change in again.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_world_size_goes_on_from_the_same_checkpoint(bench: Bench, strategy: str) -> None:
    said = ("model.dropout=0", f"distributed.strategy={strategy}")
    assert bench.run(2, *said, "checkpoint.dir=whole").returncode == 0
    whole = bench.losses()
    assert bench.run(2, *said, "train.steps=6").returncode == 0
    # The learning rate follows the length: only the position in the data and the state are the same.
    more = bench.run(1, *said)
    assert more.returncode == 0, more.stderr
    assert "world was 2" in more.stdout
    assert bench.losses().keys() == set(range(7, 13))
    assert whole[7] == pytest.approx(bench.losses()[7], rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "wrapped"),
    [("ddp", "DistributedDataParallel of"), ("fsdp", "2 FSDP units; ")],
)
def test_debug_shows_what_decides_a_run(bench: Bench, strategy: str, wrapped: str) -> None:
    ended = bench.run(2, "train.steps=1", f"distributed.strategy={strategy}", "--log-level", "DEBUG")
    assert ended.returncode == 0, ended.stderr
    for line in (
        "rendezvous: rank 0 of 2 on ", "  decided by  environment", "  meeting at  127.0.0.1:",
        "rendezvous: 2 ranks met in ", f"strategy: {strategy}, ", ", order of seed 1337 from position 0",
        "data: epoch 0 of 106 windows begins with ", "checkpoint step_00000001: copied in ", " bytes written in ",
        " s, published in ",
    ):  # fmt: skip
        assert line in ended.stdout, line
    assert wrapped in ended.stdout
    assert "rank 1 of 2" not in ended.stdout


# ---------------------------------------------------------------- what goes wrong while it runs


POISON = """
import os, runpy, sys
import torch
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
from distributed.training import data
fetch, count, loss_of = data.Windows.__getitems__, [0], torch.nn.functional.cross_entropy
def poisoned(self, indices):
    count[0] += 1
    if os.environ["RANK"] == {rank!r} and count[0] == 4:
        torch.nn.functional.cross_entropy = lambda *a, **k: loss_of(*a, **k) * {value}
    return fetch(self, indices)
data.Windows.__getitems__ = poisoned
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_culprit(bench: Bench, value: str) -> None:
    (bench.folder / "run/errors").mkdir(parents=True)
    script = bench.wrapper(POISON.format(kit=str(KIT), rank="1", value=value))
    ended = bench.run(2, wrapper=script, MUSTER_RUN_DIR=str(bench.folder / "run"))
    assert ended.returncode == 1
    accounts = {rank: json.loads((bench.folder / f"run/errors/rank_{rank}.json").read_text()) for rank in (0, 1)}
    assert accounts[1]["exception"] == "NonFiniteLoss"
    assert accounts[0]["exception"] == "PeerFailed"
    assert all("rank 1 on" in account["message"] and "step 4" in account["message"] for account in accounts.values())
    assert found(bench.folder / "checkpoints").step == 3  # of the bad step nothing is kept


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem")
def test_a_full_disk_ends_the_run_and_keeps_the_old_checkpoint(
    bench: Bench, mount: Callable[[Path, str], None]
) -> None:
    mount(bench.folder / "checkpoints", "360k")
    ended = bench.run(1, "checkpoint.keep=100", "model.n_embd=32")
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    kept = found(bench.folder / "checkpoints")
    assert 1 <= kept.step < 12
    assert kept.fault() is None


@pytest.fixture
def mount() -> Iterator[Callable[[Path, str], None]]:
    mounted: list[Path] = []

    def mount_here(folder: Path, size: str) -> None:
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        mounted.append(folder)

    yield mount_here
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


# ---------------------------------------------------------------- wrong calls


WRONG = {
    "train.batch_szie=4": "did you mean train.batch_size?",
    "train.steps=many": "train.steps='many'",
    "data.path=nowhere.txt": "nowhere.txt",
    "distributed.strategy=dpp": "distributed.strategy='dpp'",
    "model.block_size=100000": "text.txt",
    "data.held_out=2": "data.held_out=2",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_setting_is_refused_in_one_line(bench: Bench, word: str) -> None:
    ended = bench.run(1, word, "checkpoint.dir=other")
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert WRONG[word] in ended.stderr
    assert not (bench.folder / "other").exists()


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("train.batch_size=7", "train.batch_size=7 does not divide by 2 ranks x"),
        ("distributed.strategy=single", "distributed.strategy=single is for one process, but there are 2"),
    ],
)
def test_what_does_not_fit_the_world_is_refused_by_each_rank(bench: Bench, word: str, fault: str) -> None:
    ended = bench.run(2, word)
    assert ended.returncode == 2
    assert f"train.py: {fault}" in ended.stderr
    assert f"train.py, rank 1: {fault}" in ended.stderr
    assert not (bench.folder / "logs").exists()


def test_a_step_that_ruins_the_weights_leaves_no_checkpoint_of_them(bench: Bench) -> None:
    assert bench.run(1, "train.steps=2").returncode == 0
    ruined = bench.run(1, "train.learning_rate=1e38", "train.warmup_steps=0")
    assert ruined.returncode == 1
    assert "the weights are not finite (NaN or inf) after step 3" in ruined.stderr
    assert found(bench.folder / "checkpoints").step == 2
    assert bench.run(1).returncode == 0
    assert found(bench.folder / "checkpoints").step == 12


def test_a_backend_without_its_device_is_refused(bench: Bench) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = bench.run(1, "distributed.backend=nccl")
    assert ended.returncode == 2
    assert "backend nccl needs a GPU" in ended.stderr


def test_a_checkpoint_of_another_model_is_refused_with_the_keys_that_differ(bench: Bench) -> None:
    assert bench.run(1, "train.steps=2").returncode == 0
    ended = bench.run(1, "model.n_embd=32")
    assert ended.returncode == 2
    assert "model.n_embd=32 (checkpoint: 16)" in ended.stderr
    assert found(bench.folder / "checkpoints").step == 2


@pytest.mark.parametrize("nproc", [1, 2])
def test_checkpoints_that_cannot_be_used_are_refused_and_stay(bench: Bench, nproc: int) -> None:
    assert bench.run(1, "train.steps=2").returncode == 0
    for step in (1, 2):
        (bench.folder / f"checkpoints/step_{step:08}/state.pt").write_bytes(b"damaged")
    before = {path: path.stat().st_mtime_ns for path in bench.folder.glob("checkpoints/step*/**")}
    refused = bench.run(nproc, "train.steps=2")
    assert refused.returncode == 2
    for rank in range(nproc):
        name = "train.py" if rank == 0 else f"train.py, rank {rank}"
        assert f"{name}: {bench.folder}/checkpoints: checkpoints exist, but none is usable:\n" in refused.stderr
    assert refused.stderr.count("/step_00000002/state.pt: 7 bytes instead of ") == nproc
    assert {path: path.stat().st_mtime_ns for path in bench.folder.glob("checkpoints/step*/**")} == before

    remedy = refused.stderr.splitlines()[-1].partition("move this one: ")[2]
    subprocess.run(remedy, shell=True, check=True)
    anew = bench.run(nproc, "train.steps=2")
    assert anew.returncode == 0
    assert "resuming from" not in anew.stdout


def test_resume_never_does_not_mix_two_trainings(bench: Bench) -> None:
    assert bench.run(1, "train.steps=2").returncode == 0
    ended = bench.run(1, "checkpoint.resume=never")
    assert ended.returncode == 2
    assert "checkpoint.resume=never" in ended.stderr


def test_two_runs_do_not_write_into_one_folder(bench: Bench) -> None:
    with bench.start(1, "train.steps=2000") as training:
        training.wait_for("step    1/2000")
        second = bench.run(1, "train.steps=2000")
    assert second.returncode == 2
    assert "another run" in second.stderr


# ---------------------------------------------------------------- what it writes down


def test_the_run_directory_says_what_happened(bench: Bench) -> None:
    agent = (KIT / "scripts/lib/agent.py", "--standalone", "--nproc-per-node", "2")
    assert bench.run_by_hand(*agent).returncode == 0
    folder = next(bench.folder.glob("logs/train-*"))
    assert (folder / "report.html").stat().st_size > 1000
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["world"]["size"] == 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["start", *["checkpoint"] * 12, "finish"]
    steps = [line for line in lines if "loss" in line]
    assert all(len(line["rank_seconds"]) == 2 and min(line["rank_seconds"]) > 0 for line in steps)
    assert all(len(line["wait_share"]) == 2 and all(0 < share < 1 for share in line["wait_share"]) for line in steps)
    held_out = [line for line in lines if "held_out_loss" in line and "event" not in line]
    assert [line["step"] for line in held_out] == [6, 12]
    assert all(math.isfinite(line["held_out_loss"]) for line in held_out)


# ---------------------------------------------------------------- a job of a job list


LITTLE = ("--batch_size", "4", "model.n_embd=16", "train.evaluate_windows=8", "checkpoint.every=1", "logging.sample=0")
FOLD = ("--fold", "1", "--prefix", "exp1", *LITTLE)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(run) if line.get("event") in names]


def test_a_job_of_two_arguments_trains_on_the_defaults(bench: Bench) -> None:
    ended = bench.job("--fold", "0", "--prefix", "exp1")
    assert ended.returncode == 0, ended.stderr
    assert "; participant special-methods, mode heldout" in ended.stdout
    run = bench.folder / "experiments/exp1/fold0_special-methods"
    assert {"checkpoints", "metrics.jsonl", "report.html", "settings.json"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "settings.json").read_text())["settings"]["data"]["participant"] == "special-methods"
    losses = [line["held_out_loss"] for line in lines_of(run) if "held_out_loss" in line and "event" not in line]
    assert losses[-1] < losses[0] < math.log(256)
    [start], [finish] = events(run, "start"), events(run, "finish")
    assert start["steps"] == finish["step"] == 300
    assert finish["held_out_loss"] == losses[-1]


def test_a_job_resumes_in_its_output_directory(bench: Bench) -> None:
    assert bench.job(*FOLD, "--steps", "2").returncode == 0
    again = bench.job(*FOLD, "--steps", "4")
    assert again.returncode == 0, again.stderr
    run = bench.folder / "experiments/exp1/fold1_compound-statements"
    assert f"resuming from {run}/checkpoints/step_00000002" in again.stdout
    assert [(line["step"], line["steps"]) for line in events(run, "start", "resume")] == [(0, 2), (2, 4)]
    assert [line["run"] for line in events(run, "resume")] == [str(run)]
    assert not (bench.folder / "logs").exists()


def test_two_ranks_have_the_output_directory_of_their_job(bench: Bench) -> None:
    assert bench.job(*FOLD, "--steps", "2", nproc=2).returncode == 0
    run = bench.folder / "experiments/exp1/fold1_compound-statements"
    assert json.loads((run / "settings.json").read_text())["world"]["size"] == 2


def test_the_output_directory_that_the_dispatcher_gives_wins(bench: Bench) -> None:
    out, run = str(bench.folder / "out/1"), str(bench.folder / "run")
    for steps in ("2", "4"):
        words = (*FOLD, "--steps", steps, "--config", "tiny.yaml", "data.path=null")
        ended = bench.job(*words, MUSTER_OUTPUT_DIR=out, MUSTER_RUN_DIR=run)
        assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in events(bench.folder / "out/1", "start", "resume")] == [0, 2]
    assert not {"experiments", "run", "logs", "checkpoints"} & {path.name for path in bench.folder.iterdir()}


def test_a_prefix_without_a_fold_is_where_new_run_directories_are_made(bench: Bench) -> None:
    for _ in range(2):
        assert bench.job("--prefix", "a/b", *LITTLE, "--steps", "1").returncode == 0
    assert len(list(bench.folder.glob("experiments/a/b/train-*/metrics.jsonl"))) == 2


def test_the_participants_of_a_job_may_be_texts_of_a_directory(bench: Bench) -> None:
    (bench.folder / "texts/ada").mkdir(parents=True)
    for name in ("ada/1.md", "ada/2.txt", "bob.txt", "eve.txt"):
        (bench.folder / "texts" / name).write_text(name * 400)
    arguments = ("--data_path", "texts", "--steps", "1", *LITTLE)
    ended = bench.job("--fold", "1", "--mode", "pooled", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "; domains ada, bob, eve; participant bob, mode pooled" in ended.stdout
    one = bench.job("--participants", "eve", "ada", "--fold", "0", "--prefix", "exp1", *arguments)
    assert one.returncode == 0, one.stderr
    assert "; domains ada, eve; participant eve, mode heldout" in one.stdout
    assert (bench.folder / "experiments/exp1/fold0_eve/metrics.jsonl").exists()


def test_a_job_does_not_go_on_from_the_checkpoint_of_another_fold(bench: Bench) -> None:
    """What it is to be evaluated on may have been trained on."""
    assert bench.job(*FOLD, "--steps", "2").returncode == 0
    refused = bench.job(*FOLD, "--steps", "2", "--mode", "single")
    assert refused.returncode == 2
    assert "is of another fold: data.mode=single (checkpoint: heldout); set another prefix" in refused.stderr


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--fold 8", "fold: out of range for 8 participants: got 8; give 0 to 7"),
        ("--participants strngs types --fold 1", "data.domains: no domain 'strngs', did you mean 'strings'?"),
        ("--fold 0 --participants types", "there is no domain but types; name more, or use mode single"),
        ("--lr fast", "--lr: train.learning_rate='fast': Input should be a valid number"),
        ("--fold 0 --prefix text.txt/x", "/text.txt/x: cannot make the run directory: Not a directory; give another"),
    ],
)
def test_a_wrong_argument_of_a_job_is_refused_in_one_line(bench: Bench, words: str, fault: str) -> None:
    (bench.folder / "experiments").mkdir()
    (bench.folder / "experiments/text.txt").touch()
    ended = bench.job("--prefix", "exp1", *words.split())
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert fault in ended.stderr
    assert not (bench.folder / "experiments/exp1").exists()


def test_a_device_that_is_not_there_is_refused_in_one_line(bench: Bench) -> None:
    ended = bench.run(1, "--device", "cuda:99")
    assert ended.returncode == 2
    assert ended.stderr.startswith("train.py: device cuda:99: not available: PyTorch sees ")
    assert len(ended.stderr.splitlines()) == 1
    assert not (bench.folder / "logs").exists()


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks(bench: Bench) -> None:
    scores = []
    for nproc in (1, 2, 3):
        ended = bench.run(nproc, "train.steps=1", "train.batch_size=6", "model.dropout=0", "checkpoint.dir=null")
        assert ended.returncode == 0, ended.stderr
        scores.append(next(line for line in ended.stdout.splitlines() if line.startswith("held-out loss")))
    assert scores[0] == scores[1] == scores[2]
