"""Training and fine-tuning of base models, end to end.

base_only writes the weights with the lowest held-out loss, also if the run was stopped in between. An incomplete set
of files never looks complete. full_fine_tuning verifies every byte of these weights and starts from them, or exits with
2 and one line on each rank. from_scratch trains on the same batches as full_fine_tuning. The losses are the same on any
number of processes, and a resumed run ends bit for bit as an uninterrupted run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from test_train import KIT, RunResult, Workdir, content, events, lines_of, newest_checkpoint, result_of, weights

from distributed.files import write_json
from distributed.training import base_model, base_training
from distributed.training.base_model import CACHE, FILES, MANIFEST, hash_of, manifest_of, publish, stage
from distributed.training.collectives import Ranks
from distributed.training.settings import ConfigError, Settings

DIGEST = "3fa2b1c09d12" + "0" * 52
SMALL = (
    *("--data_path", "texts", "--batch_size", "8", "--lr", "1e-2", "model.n_layer=1", "model.n_embd=16"),
    *("model.block_size=32", "train.warmup_steps=2", "train.evaluate_every=2", "checkpoint.every=1", "logging.every=1"),
    "logging.sample=0",
)
FINE_TUNE = ("--fold", "1", "--mode", "full_fine_tuning", "--steps", "6", *SMALL)
BASE = ("--mode", "base_only", "--fold", "1", "--base_steps", "20", *SMALL)
SENTENCES = {"ada": "the engine weaves algebra ", "bob": "fair copy of the ledger ", "eve": "quiet waves on a wire "}


def write_texts(directory: Path) -> None:
    (directory / "texts").mkdir()
    for name, text in SENTENCES.items():
        (directory / f"texts/{name}.txt").write_text(text * 200)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workdir:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    return Workdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a job that trained a base model without bob."""
    directory, before = tmp_path_factory.mktemp("base"), Path.cwd()
    os.chdir(directory)
    write_texts(directory)
    try:
        result = Workdir(directory).job(*BASE, MUSTER_OUTPUT_DIR="out", MUSTER_BASE_MODEL_DIGEST=DIGEST)
    finally:
        os.chdir(before)
    assert result.returncode == 0, result.stderr
    return directory / "out"


def publish_base(source: Path, digest: str = DIGEST) -> Path:
    """Put a base model into the cache of this working directory."""
    staging = stage(CACHE, str(source), manifest_of(str(source), digest))
    publish(CACHE, digest, staging)
    return Path(CACHE, hash_of(digest)).absolute()


@pytest.fixture
def base(workdir: Workdir, trained: Path) -> Path:
    return publish_base(trained)


def read(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(run) if "loss" in line}


def load_base_model(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(run / "best_base_model.pt", weights_only=True)
    return loaded


# ---------------------------------------------------------------- base_only


def test_a_base_model_is_the_weights_with_the_lowest_held_out_loss(workdir: Workdir) -> None:
    """The learning rate is so high that the loss rises again after a few steps."""
    arguments = ("--mode", "base_only", "--base_steps", "12", *SMALL, "--lr", "1", "train.warmup_steps=8")
    result = workdir.job(*arguments, MUSTER_OUTPUT_DIR="out")
    assert result.returncode == 0, result.stderr
    run = workdir.path / "out"
    held_out = {
        line["step"]: line["held_out_loss"]
        for line in lines_of(run)
        if line.keys() == {"step", "time", "held_out_loss"}
    }
    best = min(held_out, key=lambda step: held_out[step])
    assert best < 12, "the test needs a training whose last step is not its best"
    metrics = read(run, "base_metrics.json")
    assert (metrics["step"], metrics["held_out_loss"], metrics["steps"]) == (best, held_out[best], 12)
    assert metrics["tokens"] == best * 8 * 32
    assert metrics["participants"] == ["ada", "bob", "eve"]
    checkpoint = torch.load(run / f"checkpoints/step_{best:08}/state.pt", weights_only=True)["model"]
    written = load_base_model(run)["model"]
    assert written.keys() == checkpoint.keys()
    assert all(torch.equal(written[name], checkpoint[name]) for name in checkpoint)


def test_the_files_of_a_base_model_have_weights_metrics_losses_and_settings(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} >= {*FILES, "metrics.jsonl", "checkpoints"}
    content = load_base_model(trained)
    assert content.keys() == {"model", "model_settings", "corpus"}
    assert content["model_settings"] == {
        "n_layer": 1, "n_head": 4, "n_embd": 16, "block_size": 32, "vocab_size": 256, "dropout": 0.0, "bias": False,
    }  # fmt: skip
    assert all(tensor.device.type == "cpu" for tensor in content["model"].values())
    assert "domains ada, eve; participant bob, mode base_only" in content["corpus"]
    assert read(trained, "base_metrics.json")["participants"] == ["ada", "eve"]
    curve = read(trained, "base_losses.json")
    assert [entry["step"] for entry in curve["loss"]] == list(range(1, 21))
    assert [entry["step"] for entry in curve["held_out_loss"]] == list(range(2, 21, 2))
    assert min(entry["held_out_loss"] for entry in curve["held_out_loss"]) < math.log(256) - 1
    config = read(trained, "base_config.json")
    assert config["digest"] == DIGEST
    assert config["arguments"]["base_steps"] == "20"
    assert (config["settings"]["train"]["steps"], config["settings"]["data"]["mode"]) == (20, "base_only")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_write_the_same_base_model_as_one_process(workdir: Workdir, trained: Path, strategy: str) -> None:
    result = workdir.job(*BASE, f"distributed.strategy={strategy}", nproc=2, MUSTER_OUTPUT_DIR="out")
    assert result.returncode == 0, result.stderr
    one, two = load_base_model(trained), load_base_model(workdir.path / "out")
    assert one["model_settings"] == two["model_settings"]
    assert one["model"].keys() == two["model"].keys()
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, two["model"][name], rtol=1e-3, atol=1e-4)


def test_a_stopped_and_resumed_training_writes_the_same_base_model_as_an_uninterrupted_one(workdir: Workdir) -> None:
    assert workdir.job(*BASE, MUSTER_OUTPUT_DIR="whole").returncode == 0
    launched = forked.launched(
        1, forked.script, str(KIT / "train.py"), *BASE, "--device", "cpu", env={"MUSTER_OUTPUT_DIR": "out"}
    )
    with launched as training:
        training.wait_for("step  3/20")
        training.signal(signal.SIGTERM)
        assert result_of(training).returncode == 75
    run, whole = workdir.path / "out", workdir.path / "whole"
    assert not [name for name in FILES if (run / name).exists()]
    for line in ("resuming from", "nothing left to do"):  # the second call starts a finished job
        result = workdir.job(*BASE, MUSTER_OUTPUT_DIR="out")
        assert result.returncode == 0, result.stderr
        assert line in result.stdout
        assert (run / "best_base_model.pt").read_bytes() == (whole / "best_base_model.pt").read_bytes()
        for name in ("base_metrics.json", "base_losses.json"):
            assert read(run, name) == read(whole, name)


def test_files_of_a_killed_process_are_not_a_base_model(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill_after(count: int, write: Callable[..., None]) -> Callable[..., None]:
        def counted(*values: Any) -> None:
            calls.append(values)
            if len(calls) > count:
                raise Killed
            write(*values)

        calls: list[Any] = []
        return counted

    settings = Settings.model_validate({"train": {"steps": 1, "batch_size": 1}})
    model = load_base_model(trained)
    arguments: Any = (tmp_path, model["model"], model["model_settings"], {"corpus": "x"}, settings, {})
    real = write_json
    for count in range(4):
        base_training.write(*arguments)
        manifest_of(str(tmp_path), DIGEST)
        with monkeypatch.context() as patch:
            patch.setattr(base_training, "write_json", kill_after(count, real))
            patch.setattr(torch, "save", kill_after(0, torch.save))
            with pytest.raises(Killed):
                base_training.write(*arguments)
        with pytest.raises(base_model.BaseModelError, match=r"best_base_model\.pt: No such file"):
            manifest_of(str(tmp_path), DIGEST)


# ---------------------------------------------------------------- full_fine_tuning and from_scratch


def test_fine_tuning_starts_from_the_weights_of_the_base_model(workdir: Workdir, base: Path, trained: Path) -> None:
    shown = "experiments/base_models/3fa2b1c09d12"
    result = workdir.job(
        *FINE_TUNE, MUSTER_BASE_MODEL=shown, MUSTER_BASE_MODEL_DIGEST=DIGEST, MUSTER_OUTPUT_DIR="tuned"
    )
    assert result.returncode == 0, result.stderr
    metrics = read(trained, "base_metrics.json")
    loss = f"held-out loss {metrics['held_out_loss']:.3f} at step {metrics['step']}"
    assert f"base   {shown} (digest 3fa2b1c09d12..., {loss})" in result.stdout
    scratch = workdir.job(
        *FINE_TUNE, "--mode", "from_scratch", MUSTER_BASE_MODEL="nowhere", MUSTER_OUTPUT_DIR="scratch"
    )
    assert scratch.returncode == 0, scratch.stderr
    tuned, untuned = losses(workdir.path / "tuned"), losses(workdir.path / "scratch")
    assert untuned[1] == pytest.approx(math.log(256), abs=0.1)
    assert tuned[1] < untuned[1] - 0.5
    assert tuned[6] < tuned[1]
    assert newest_checkpoint(workdir.path / "tuned/checkpoints").facts["base_model"] == DIGEST


def test_a_base_model_trained_on_the_participant_gives_a_warning(workdir: Workdir, base: Path) -> None:
    for participant, warned in (("bob", 0), ("ada", 1)):
        result = workdir.job(
            *FINE_TUNE, "--fold", str(int(participant == "bob")), "--steps", "1", "--base_model", str(base)
        )
        assert result.returncode == 0, result.stderr
        warning = f"base model: its training data includes the training text of {participant}"
        assert result.stdout.count(warning) == warned


MIXED = ("--target_batch_pct", "0.5", "--target_data_pct", "0.5")


@pytest.mark.parametrize("arguments", [(), MIXED])
def test_two_processes_fine_tune_with_the_same_losses_as_one_process(
    workdir: Workdir, base: Path, arguments: tuple[str, ...]
) -> None:
    for nproc in (1, 2):
        out = f"out{nproc}"
        result = workdir.job(*FINE_TUNE, *arguments, "--base_model", str(base), nproc=nproc, MUSTER_OUTPUT_DIR=out)
        assert result.returncode == 0, result.stderr
    one, two = losses(workdir.path / "out1"), losses(workdir.path / "out2")
    assert one.keys() == two.keys() == set(range(1, 7))
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_resumed_fine_tuning_equals_an_uninterrupted_one(workdir: Workdir, base: Path, nproc: int) -> None:
    arguments = (*FINE_TUNE, *MIXED, "--base_model", str(base), "model.dropout=0", "checkpoint.keep=9")
    assert workdir.job(*arguments, nproc=nproc, MUSTER_OUTPUT_DIR="whole").returncode == 0
    whole, out = workdir.path / "whole", workdir.path / "out"
    shutil.copytree(whole / "checkpoints/step_00000003", out / "checkpoints/step_00000003")
    resumed = workdir.job(*arguments, nproc=nproc, MUSTER_OUTPUT_DIR="out")
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in events(out, "start", "resume")] == [3]
    assert losses(out) == {step: losses(whole)[step] for step in (4, 5, 6)}
    assert weights(out / "checkpoints") == weights(whole / "checkpoints")
    assert content(out / "checkpoints") == content(whole / "checkpoints")


INDICES = """
import os, runpy, sys
from pathlib import Path
sys.path.insert(0, {kit!r})
sys.argv = sys.argv[1:]
from distributed.training import data
fetch = data.Mixture.__getitem__
def noted(self, indices):
    with Path(os.environ["MUSTER_OUTPUT_DIR"] + ".indices").open("a") as file:
        file.write(str(indices) + "\\n")
    return fetch(self, indices)
data.Mixture.__getitem__ = noted
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_from_scratch_trains_on_the_batches_of_fine_tuning(workdir: Workdir, base: Path) -> None:
    script = workdir.wrapper(INDICES.format(kit=str(KIT)))
    modes = {"full_fine_tuning": ("--base_model", str(base)), "from_scratch": ()}
    for mode, more in modes.items():
        arguments = (*FINE_TUNE, *MIXED, "--mode", mode, *more, "--device", "cpu")
        env = {"MUSTER_OUTPUT_DIR": mode}
        with forked.launched(1, forked.script, script, str(KIT / "train.py"), *arguments, env=env) as training:
            assert result_of(training).returncode == 0
    tuned, scratch = (Path(f"{mode}.indices").read_text() for mode in modes)
    assert tuned.count("\n") >= 6
    assert tuned == scratch


# ---------------------------------------------------------------- unusable base models


def check_refused(result: RunResult, message: str, nproc: int = 1) -> None:
    assert result.returncode == 2, result
    assert len(result.stderr.splitlines()) == nproc, result.stderr
    assert result.stderr.count(message) == nproc, result.stderr


def flip_a_bit(base: Path) -> None:
    data = bytearray((base / "best_base_model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (base / "best_base_model.pt").write_bytes(data)


def replace_content(name: str, content: bytes) -> Callable[[Path], None]:
    """Replace a file and write a matching manifest."""

    def replace(base: Path) -> None:
        (base / name).write_bytes(content)
        (base / MANIFEST).write_text(json.dumps(manifest_of(str(base), DIGEST)))

    return replace


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def pickled(value: object) -> bytes:
    with Path("pickled").open("wb") as file:
        torch.save(value, file)
    return Path("pickled").read_bytes()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {  # tests/training/test_base_model.py has others
    "flipped bit": (flip_a_bit, "best_base_model.pt: damaged: its checksum is not the one in manifest.json; give"),
    "other content": (
        lambda base: replace_content(FILES[0], pickled([]))(base), "not the weights of a base model of train.py",
    ),
    "code": (
        lambda base: replace_content(FILES[0], pickled(Code()))(base),
        "which no checkpoint needs; do not trust this file",
    ),
    "no pickle": (replace_content(FILES[0], b"no pickle"), "best_base_model.pt: cannot be loaded: "),
}  # fmt: skip


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_base_model_is_refused(workdir: Workdir, base: Path, fault: str) -> None:
    damage, message = DAMAGES[fault]
    damage(base)
    check_refused(workdir.job(*FINE_TUNE, "--base_model", str(base)), message)
    assert not (workdir.path / "ran").exists()


def test_every_rank_reports_a_base_model_that_it_cannot_load(workdir: Workdir, base: Path) -> None:
    flip_a_bit(base)
    result = workdir.job(*FINE_TUNE, "--base_model", str(base), nproc=2)
    check_refused(result, "best_base_model.pt: damaged", nproc=2)
    assert sorted(line.partition(": ")[0] for line in result.stderr.splitlines()) == ["train.py", "train.py, rank 1"]
    check_refused(
        workdir.job(*FINE_TUNE, nproc=2),
        "data.mode=full_fine_tuning: no base model; give --base_model DIR, or r",
        nproc=2,
    )


def test_a_base_model_other_than_the_one_that_the_job_names_is_refused(workdir: Workdir, base: Path) -> None:
    other = DIGEST.replace("3", "4")
    result = workdir.job(*FINE_TUNE, MUSTER_BASE_MODEL=str(base), MUSTER_BASE_MODEL_DIGEST=other)
    check_refused(result, f"holds the base model {DIGEST}, expected {other}")


def test_the_argument_base_model_overrides_the_variable_muster_base_model(workdir: Workdir, base: Path) -> None:
    result = workdir.job(*FINE_TUNE, "--base_model", str(base), MUSTER_BASE_MODEL="nowhere")
    assert result.returncode == 0, result.stderr
    check_refused(
        workdir.job(*FINE_TUNE, "--base_model", "nowhere", MUSTER_BASE_MODEL=str(base)),
        "nowhere: there is no base model; give --base_model DIR",
    )


def test_a_base_model_that_the_user_names_may_be_a_link_and_one_that_muster_names_may_not(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := tmp_path / "link").symlink_to(base.absolute())
    settings: Any = SimpleNamespace(data=SimpleNamespace(mode="full_fine_tuning"), train=SimpleNamespace())
    settings.train.base_model = link
    found = base_training.find(settings, Ranks())
    assert found is not None and found.digest == DIGEST and found.metrics
    settings.train.base_model = None
    monkeypatch.setenv("MUSTER_BASE_MODEL", str(link))
    with pytest.raises(ConfigError, match="is a symbolic link, which is not followed"):
        base_training.find(settings, Ranks())


def test_no_link_that_replaces_a_base_model_after_its_verification_is_followed(base: Path) -> None:
    """As another user can put it there who can write to the cache."""
    found = base_training.Base(base, DIGEST, {})
    base.rename(private := base.with_name("private"))
    base.symlink_to(private.absolute())
    with pytest.raises(ConfigError, match="is a symbolic link, which is not followed"):
        found.load_into(torch.nn.Linear(1, 1), {}, Ranks())


def test_a_base_model_of_another_size_is_refused_with_the_settings_that_differ(workdir: Workdir, base: Path) -> None:
    result = workdir.job(*FINE_TUNE, "--base_model", str(base), "model.n_embd=32", "model.block_size=16")
    check_refused(
        result, "other settings: model.n_embd=32 (base model: 16), model.block_size=16 (base model: 32); use the"
    )


def test_a_resumed_fine_tuning_verifies_its_base_model_and_refuses_another(
    workdir: Workdir, base: Path, trained: Path
) -> None:
    shorter = (*FINE_TUNE, "--steps", "2")
    assert workdir.job(*shorter, "--base_model", str(base), MUSTER_OUTPUT_DIR="out").returncode == 0
    other = publish_base(trained, "4e" * 32)
    message = f"step_00000002 was trained from another base model: now {'4e' * 32}, checkpoint: {DIGEST}"
    check_refused(workdir.job(*FINE_TUNE, "--base_model", str(other), MUSTER_OUTPUT_DIR="out"), message)
    pct = ("--target_batch_pct", "0.5")
    message = "data.target_batch_pct=0.5 (checkpoint: 1.0); set another prefix"
    check_refused(workdir.job(*FINE_TUNE, *pct, "--base_model", str(base), MUSTER_OUTPUT_DIR="out"), message)
    flip_a_bit(base)
    check_refused(
        workdir.job(*FINE_TUNE, "--base_model", str(base), MUSTER_OUTPUT_DIR="out"), "best_base_model.pt: damaged"
    )
    assert newest_checkpoint(workdir.path / "out/checkpoints").step == 2
