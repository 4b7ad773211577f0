"""Tests of the settings.

Values are read as intended: 3e-4 is a number, 2026-11-21 a directory name, ~ the home directory. Each error is one line
that names the key, the value and the remedy, with exit code 2 and without a traceback. The global batch is split
without a remainder, also with each size that an error proposes.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import tracked
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from distributed.training.settings import (
    ALIASES,
    MODELS,
    Batch,
    ConfigError,
    Settings,
    batch,
    for_ranks,
    holds_settings,
    main,
    parser,
    read,
    target_windows,
)

KIT = Path(__file__).resolve().parents[2]
no_deadline = hypothesis_settings(deadline=None)
TRAIN = "train: {steps: 1, batch_size: 4}\n"


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()


def settings(*overrides: str, file: str | bytes = TRAIN) -> Settings:
    """Read a file f.yaml with this content and command-line overrides."""
    Path("f.yaml").write_bytes(file if isinstance(file, bytes) else file.encode())
    return read(Path("f.yaml"), overrides)


def error_message(*overrides: str, file: str | bytes = TRAIN) -> str:
    """Return the message of the ConfigError."""
    with pytest.raises(ConfigError) as error:
        settings(*overrides, file=file)
    return str(error.value)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.learning_rate=3e-4", 3e-4),
        ("train.learning_rate=3E-4", 3e-4),
        ("train.learning_rate=1e3", 1000.0),
        ("train.learning_rate=3E4", 30_000.0),
        ("train.learning_rate=.5", 0.5),
        ("train.learning_rate=+1.5e-2", 0.015),
        ("train.weight_decay=0", 0.0),
        ("train.steps=1e3", 1000),
        ("train.steps=1_000", 1000),
        ("train.steps='7'", 7),
        ("checkpoint.every=1e3", 1000),
        ("checkpoint.every='7'", 7),
        ("checkpoint.every=0", 0),
        ("checkpoint.every=auto", "auto"),
        ("train.compile=yes", True),
        ("train.compile=false", False),
        ("logging.project=my first one", "my first one"),
        ("logging.project=a=b", "a=b"),
        ("logging.project==", "="),
        ("logging.project='null'", "null"),
        ("logging.project=124", "124"),
        ("logging.project=2026-11-21", "2026-11-21"),
        ("logging.project=2026-99-99", "2026-99-99"),
        ("logging.project=a: b: c", "a: b: c"),
        ("logging.project=[", "["),
        ("logging.project=größer", "größer"),
        ("data.domains=[a, 'b c']", ["a", "b c"]),
        ("data.domains=null", None),
        ("data.domains=", None),
    ],
)
def test_overrides_are_parsed_as_intended(override: str, value: object) -> None:
    section, name = override.partition("=")[0].split(".")
    assert getattr(getattr(settings(override), section), name) == value


def test_overrides_take_precedence_over_the_file_and_later_ones_over_earlier_ones() -> None:
    assert settings("train.steps=2", "train.steps=3").train.steps == 3
    assert settings("train.epochs=2", "train.steps=null").train.epochs == 2.0


def test_overrides_without_a_file_are_enough() -> None:
    assert read(None, ["train.steps=1", "train.batch_size=4"]) == settings()


@pytest.mark.parametrize("text", ["checkpoint:\n", "checkpoint: {}\n", "checkpoint: null\n", "# checkpoint:\n"])
def test_an_empty_section_has_its_defaults(text: str) -> None:
    assert settings(file=TRAIN + text) == settings()
    assert settings("checkpoint.every=7", file=TRAIN + text).checkpoint.every == 7


def test_paths_are_relative_to_the_working_directory_or_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/f.yaml").write_text(TRAIN + "data: {path: f.txt}\ncheckpoint: {dir: 2026-11-21}\n")
    (tmp_path / "f.txt").write_text("x")
    found = read(Path("elsewhere/f.yaml"))
    assert found.data.path == tmp_path / "f.txt"
    assert found.checkpoint.dir == tmp_path / "2026-11-21"
    assert settings("checkpoint.dir=~/saved").checkpoint.dir == tmp_path / "home/saved"


def test_settings_are_the_same_after_a_round_trip_through_yaml() -> None:
    first = settings("data.domains=[a]", "checkpoint.dir=x")
    assert settings(file=yaml.safe_dump(first.model_dump(mode="json"))) == first


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stepz=3", "command line: train.stepz: unknown key; did you mean train.steps?"),
        ("trian.steps=3", "command line: trian: unknown key; did you mean train?"),
        ("train.n_layer=3", "command line: train.n_layer: unknown key; did you mean model.n_layer?"),
        ("train.lr=3", "command line: train.lr: unknown key; did you mean train.learning_rate?"),
        ("train.timeout=3", "command line: train.timeout: unknown key; did you mean distributed.timeout?"),
        ("data.every=3", "command line: data.every: unknown key; did you mean checkpoint.every or logging.every?"),
        ("data.batch_size=3",
         "command line: data.batch_size: unknown key; did you mean train.batch_size_per_device (on"),
        ("distributed.world_size=2", "command line: distributed.world_size: unknown key; remove it; the launcher sets"),
        ("zzz.x=3", "command line: zzz: unknown key; known are model, data, train"),
        ("checkpoint.zzzz=3", "command line: checkpoint.zzzz: unknown key; known are dir, every, mtbf, keep"),
        ("train.steps=abc", "command line: train.steps='abc': Input should be a valid integer"),
        ("train.steps=1.5", "command line: train.steps=1.5: Input should be a valid integer"),
        ("train.steps=0", "command line: train.steps=0: Input should be greater than or equal to 1"),
        ("train.steps=true", "command line: train.steps=True: expected a number, not true or false"),
        ("train.epochs=true", "command line: train.epochs=True: expected a number, not true or false"),
        ("train.grad_clip=false", "command line: train.grad_clip=False: expected a number, not true or false"),
        ("train.learning_rate=.nan", "command line: train.learning_rate=nan: "),
        ("train.learning_rate=.inf", "command line: train.learning_rate=inf: Input should be a finite number"),
        ("distributed.timeout=.inf", "command line: distributed.timeout=inf: Input should be a finite number"),
        ("train.compile=maybe", "command line: train.compile='maybe': Input should be a valid boolean"),
        ("logging.level=loud", "command line: logging.level='loud': Input should be 'debug', 'info', 'warning' "),
        ("distributed.strategy=dpp", "command line: distributed.strategy='dpp': Input should be 'auto', 'single', "),
        ("logging.project={a: b}", "command line: logging.project: Input should be a valid string"),
        *(
            (f"checkpoint.every={text}", f"command line: checkpoint.every={value}: expected a number of steps, 0 or")
            for text, value in (("-1", "-1"), ("often", "'often'"), ("2.5", "2.5"), ("true", "True"), ("[1]", "[1]"))
        ),
        ("checkpoint.mtbf=0", "command line: checkpoint.mtbf=0: Input should be greater than 0"),
        ("train.epochs=2", "f.yaml: train: both steps and epochs given; set one"),
        ("train.steps=null", "f.yaml: train: neither steps nor epochs given; set one"),
        ("train.batch_size=null", "f.yaml: train: neither batch_size nor batch_size_per_device given"),
        ("train.batch_size_per_device=2", "f.yaml: train: both batch_size and batch_size_per_device given"),
        ("train.min_learning_rate=1", "f.yaml: train: min_learning_rate=1.0 is above learning_rate=0.0003"),
        ("model.n_head=3", "f.yaml: model: n_embd=128 is not divisible by n_head=3: change one of them"),
        ("data.path=/nix", "command line: data.path='/nix': no such file or directory (working directory "),
        ("data.path=/dev/null", "command line: data.path='/dev/null': neither a file nor a directory"),
        ("data.domains=[]", "command line: data.domains=[]: List should have at least 1 item"),
        ("data.held_out=0", "command line: data.held_out=0: Input should be greater than 0"),
        ("data.held_out=1", "command line: data.held_out=1: Input should be less than 1"),
        ("data.held_out=.nan", "command line: data.held_out=nan: Input should be a finite number"),
        ("checkpoint.dir=empty", "command line: checkpoint.dir='empty': not a directory; name a directory"),
        ("train.seed=99999999999999999999", "command line: train.seed=99999999999999999999: Input should be less than"),
        ("train.steps=99999999999999999999", "command line: train.steps=99999999999999999999: Input should be less"),
        ("distributed.timeout=1e30", "command line: distributed.timeout=1e+30: Input should be less than or equal to"),
        ("data.path=empty", "command line: data.path='empty': the file is empty: there is nothing to train on"),
        ("train.steps=" + "9" * 5000, "command line: train.steps='9999"),
        ("train.steps=0x" + "f" * 5000, "command line: train.steps='0xff"),
        ("train.steps=" + "[" * 5000, "command line: train.steps='[[[["),
        ("train.steps=" + "[" * 90 + "]" * 90, "command line: train.steps=[[["),
        ("train.steps=!!timestamp x", "command line: train.steps='!!timestamp x': Input should be a valid integer"),
        ("x" * 5000, "'xxxxxxx"),
        ("checkpoint.dir=~nobody-here/x", "command line: checkpoint.dir='~nobody-here/x': no home directory of a"),
        *(
            (override, f"{override!r}: not understood; write section.key=value, for example train.steps=100")
            for override in ("train.steps", "steps=3", "=3", "train.=3", ".steps=3", "train.steps.x=3", "", "=")
        ),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_override_is_one_line(override: str, line: str) -> None:
    message = error_message(override)
    assert message.startswith(line)
    assert "\n" not in message
    assert len(message) < 1000


# Each list holds the previous one twice: written out, the last one has 2^40 characters.
DOUBLING = "&b0 [x], " + ", ".join(f"&b{n} [*b{n - 1}, *b{n - 1}]" for n in range(1, 41))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "f.yaml: train: missing; add it (see config/quickstart.yaml)"),
        ("# nothing yet\n", "f.yaml: train: missing"),
        ("train:\n", "f.yaml: train: neither steps nor epochs given"),
        ("train: 5", "f.yaml: train=5: "),
        ("- train\n- model\n", "f.yaml: holds a list; expected sections: model, data, train, distributed"),
        ("just words", "f.yaml: holds a str; expected sections"),
        ("train: [1", "f.yaml, line 1, column 10: invalid YAML: expected ',' or ']'"),
        ("train:\n\tsteps: 1\n", "f.yaml, line 2, column 1: invalid YAML: found character '\\t'"),
        ("train:\n  steps: 1: 2\n", "f.yaml, line 2, column 11: invalid YAML: mapping values are not allowed here"),
        (TRAIN + TRAIN, "f.yaml, line 2, column 1: invalid YAML: key 'train' is given twice"),
        ("train:\n  steps: 1\n  steps: 2\n", "f.yaml, line 3, column 3: invalid YAML: key 'steps' is given twice"),
        (TRAIN + "[a]: b\n", "f.yaml, line 2, column 1: invalid YAML: expected a name as key"),
        (TRAIN + "? {a: b}\n: c\n", "f.yaml, line 2, column 3: invalid YAML: expected a name as key"),
        (TRAIN + "1: 2\n", "f.yaml: 1=1: Keys should be strings"),
        (TRAIN + "---\na: b\n", "f.yaml, line 2, column 1: invalid YAML: but found another document"),
        (TRAIN + "a: !!python/name:os.system\n", "f.yaml, line 2, column 4: invalid YAML: could not determine"),
        ("train: {steps: " + "9" * 5000 + "}", "f.yaml, line 1, column 16: invalid YAML: '9999"),
        ("train: {steps: 0x" + "f" * 5000 + "}", "f.yaml, line 1, column 16: invalid YAML: '0xff"),
        ("train: {steps: !!int x}", "f.yaml, line 1, column 16: invalid YAML: 'x' is not a value of type int"),
        ("train: {steps: !!bool x}", "f.yaml, line 1, column 16: invalid YAML: 'x' is not a value of type bool"),
        ("train: " + "[" * 5000 + "]" * 5000, "f.yaml: nested too deeply; write sections that hold keys"),
        (f"train: [{DOUBLING}]", "f.yaml, line 1, column "),
        ("#" * 2_000_000, "f.yaml: larger than 1 MB; name a YAML file of settings"),
        (b"\xff\xfe\x00", "f.yaml: cannot read it (it is not UTF-8 text); looked in "),
        (b"\x00\x01", "f.yaml: invalid YAML: unacceptable character"),
    ],
)
def test_the_error_of_an_invalid_file_is_one_line(text: str | bytes, line: str) -> None:
    message = error_message(file=text)
    assert message.startswith(line)
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batch_size: 32",
         "batch_size: unknown key; did you mean train.batch_size_per_device (on each GPU) or train.batch_size "
         "(over all GPUs)?"),
        ("learning_rate: 1e-3", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("lr: 1e-3", "lr: unknown key; did you mean train.learning_rate?"),
        ("epochs: 3", "epochs: unknown key; did you mean train.epochs?"),
        ("num_epochs: 3", "num_epochs: unknown key; did you mean train.epochs?"),
        ("timeout: 3", "timeout: unknown key; did you mean distributed.timeout?"),
        ("backend: nccl", "backend: unknown key; did you mean distributed.backend?"),
        ("save_dir: c", "save_dir: unknown key; did you mean checkpoint.dir?"),
        ("log-interval: 3", "log-interval: unknown key; did you mean logging.every?"),
        ("num_workers: 3", "num_workers: unknown key; did you mean data.workers?"),
        ("pin_memory: false", "pin_memory: unknown key; did you mean data.pin_memory?"),
        ("optimizer: {lr: 1e-3, zzz: 1}", "optimizer.lr: unknown key; did you mean train.learning_rate?"),
        ("training: {lr: 1e-3}", "training: unknown key; did you mean train?"),
        ("optimizer: {zzz: 1}", "optimizer: unknown key; known are model, data, train"),
    ],
)  # fmt: skip
def test_the_error_of_a_key_of_another_training_script_names_the_setting(text: str, line: str) -> None:
    message = error_message(file=TRAIN + text)
    assert message.startswith(f"f.yaml: {line}")
    assert "\n" not in message


def test_every_remedy_for_a_key_of_another_training_script_names_existing_settings() -> None:
    keys = {f"{section}.{name}" for section, keys in settings() for name in type(keys).model_fields}
    for other, remedy in ALIASES.items():
        assert {word.rstrip("?") for word in remedy.split() if "." in word} <= keys, other


@pytest.mark.parametrize(
    ("text", "expected"),
    [("lr: 1", False), ("model: {name: x}\ndata: [a]", False), ("train: {stepz: 1, steps: 2}", True), ("", False)],
)
def test_holds_settings_is_false_for_a_file_of_another_program(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "f.yaml").write_text(text)
    assert holds_settings(tmp_path / "f.yaml") is expected


def test_each_error_has_its_own_line() -> None:
    message = error_message("train.steps=x", "model.layers=3", file=TRAIN + "logging: {every: 0}\n")
    expected = ["command line: model.layers", "command line: train.steps", "f.yaml: logging.every"]
    assert re.findall(r"^([\w. ]+: [\w.]+)", message, re.MULTILINE) == expected


def test_a_section_that_holds_no_keys_cannot_be_overridden() -> None:
    assert error_message("data.workers=3", file=TRAIN + "data: [1]\n") == (
        "'data.workers=3': section 'data' of the file holds [1], not keys"
    )


def test_the_error_of_an_unreadable_file_names_reason_and_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^nix.yaml: cannot read it \\(No such file or directory\\).*{tmp_path}"):
        read(Path("nix.yaml"))
    with pytest.raises(ConfigError, match=r"cannot read it \(Is a directory\)"):
        read(tmp_path)


@pytest.mark.parametrize("setting", ["data.path", "checkpoint.dir"])
def test_the_error_of_a_path_without_permission_is_one_line(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stub_of_exists(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", stub_of_exists)
    assert error_message(f"{setting}=/closed/x") == (
        f"command line: {setting}='/closed/x': cannot access it: Permission denied; grant permission, "
        "or use another path"
    )


FRAGMENTS = st.lists(
    st.sampled_from([*"[]{}:,-&*!?|>'\"#%@`\n\t =.~<0a", ": ", "- ", "train", "<<: ", "1e9", "2026-11-31"])
)


@no_deadline
@given(st.one_of(st.binary(max_size=60), FRAGMENTS.map(lambda fragments: "".join(fragments).encode())))
def test_random_content_raises_config_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        read(file)


# ---------------------------------------------------------------- the global batch

numbers = st.integers(1, 300)


def batch_of(world: int, **train: int) -> Batch:
    return batch(Settings.model_validate({"train": {"steps": 1, **train}}), world)


@no_deadline
@given(size=numbers, world=numbers, accumulation=st.integers(1, 20))
def test_the_global_batch_is_split_without_a_remainder(size: int, world: int, accumulation: int) -> None:
    try:
        found = batch_of(world, batch_size=size, accumulation=accumulation)
    except ConfigError as error:
        assert size % (world * accumulation)
        for proposed in proposals(error, f"train.batch_size={size}"):
            assert batch_of(world, batch_size=proposed, accumulation=accumulation).size == proposed
    else:
        assert found.size == size == found.micro * found.accumulation * found.world
        assert (found.world, found.accumulation) == (world, accumulation)


@no_deadline
@given(per_device=numbers, world=numbers, accumulation=st.integers(1, 20))
def test_a_batch_size_per_device_is_split_without_a_remainder(per_device: int, world: int, accumulation: int) -> None:
    try:
        found = batch_of(world, batch_size_per_device=per_device, accumulation=accumulation)
    except ConfigError as error:
        assert per_device % accumulation
        for proposed in proposals(error, f"train.batch_size_per_device={per_device}"):
            assert batch_of(world, batch_size_per_device=proposed, accumulation=accumulation).size == proposed * world
    else:
        assert found.size == per_device * world == found.micro * found.accumulation * found.world


def proposals(error: ConfigError, start: str) -> list[int]:
    """The nearest smaller and larger size that the message proposes."""
    found = re.fullmatch(rf"{re.escape(start)} is not divisible by .*: (\d+) or (\d+) would be(; .*)?", str(error))
    assert found
    return [int(number) for number in found.groups()[:2]]


def test_a_batch_prints_its_arithmetic() -> None:
    assert str(Batch(480, 12, 5, 8, 1024)) == (
        "12 windows x 5 micro-batches x 8 ranks = 480 windows per step x 1024 tokens = 491,520 tokens per step"
    )
    assert str(Batch(4, 4, 1, 1, 128)) == (
        "4 windows x 1 micro-batch x 1 rank = 4 windows per step x 128 tokens = 512 tokens per step"
    )


# ---------------------------------------------------------------- the command line


def options(*arguments: str) -> argparse.Namespace:
    return parser("A trainer.").parse_intermixed_args(arguments)


def from_options(namespace: argparse.Namespace) -> Settings:
    return for_ranks(namespace, 1)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "settings: train: missing; give --config FILE (see config/quickstart.yaml)"),
        (["train.steps=3"], "settings: train: neither batch_size nor batch_size_per_device given; set one"),
    ],
)
def test_without_a_file_the_error_of_a_missing_section_names_option_config(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_options(options(*arguments))
    assert str(refused.value) == message


@pytest.mark.parametrize("option", ["--config", "--config_path", "--config-path"])
def test_the_config_option_has_three_names(option: str) -> None:
    Path("f.yaml").write_text(TRAIN)
    assert from_options(options(option, "f.yaml")) == settings()
    assert from_options(options(f"{option}=f.yaml")) == settings()


def test_options_of_other_trainers_and_launchers_are_accepted() -> None:
    Path("f.yaml").write_text(TRAIN)
    file = ("--config", "f.yaml")
    assert from_options(options(*file, "--distributed-backend", "gloo")).distributed.backend == "gloo"
    assert from_options(options(*file, "--log-level", "WARNING")).logging.level == "warning"
    assert from_options(options(*file, "logging.level=Debug")).logging.level == "debug"
    assert from_options(options(*file, "--local-rank=1")) == settings()
    assert from_options(options(*file, "--local_rank", "1")) == settings()


def test_overrides_and_options_can_be_mixed() -> None:
    Path("f.yaml").write_text(TRAIN)
    found = from_options(options("train.steps=5", "--config", "f.yaml", "logging.every=3", "--log-level=debug"))
    assert (found.train.steps, found.logging.every, found.logging.level) == (5, 3, "debug")


def test_an_option_takes_precedence_over_the_file() -> None:
    Path("f.yaml").write_text(TRAIN + "distributed: {backend: nccl}\n")
    assert from_options(options("--config", "f.yaml", "--distributed-backend", "gloo")).distributed.backend == "gloo"


def test_main_prints_the_complete_settings(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(TRAIN)
    assert main(["--config", "f.yaml", "--nproc", "2", "train.learning_rate=1e-3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# 2 windows x 1 micro-batch x 2 ranks = 4 windows per step")
    assert settings(file=text) == settings("train.learning_rate=1e-3")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nproc", "3"], "train.batch_size=4 is not divisible by 3 ranks x 1 micro-batch "),
        (["--nproc", "0"], "--nproc: expected a number of ranks, 1 or more, got 0"),
        (["--nproc", "-1"], "--nproc: expected a number of ranks, 1 or more, got -1"),
        (["train.stepz=3"], "command line: train.stepz: unknown key; did you mean train.steps?"),
        (["--distributed-backend", "mpi"], "command line: distributed.backend='mpi': Input should be 'auto', 'nccl'"),
        (["--config", "nix.yaml"], "nix.yaml: cannot read it (No such file or directory)"),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("f.yaml").write_text(TRAIN)
    assert main(["--config", "f.yaml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


# ---------------------------------------------------------------- the arguments of a job


def job(*arguments: str) -> Settings:
    return from_options(options(*arguments))


def test_a_job_needs_no_settings_file() -> None:
    found = job("--fold", "2", "--prefix", "exp1")
    assert (found.data.participant, found.data.mode, found.data.domains) == ("simple-statements", "heldout", None)
    assert (found.model.n_layer, found.model.n_head, found.model.n_embd) == (2, 4, 64)
    assert (found.train.steps, found.train.batch_size, found.checkpoint.dir) == (300, 16, None)
    assert job("--device", "cpu").data.participant is None


def test_every_argument_of_a_job_is_a_setting(tmp_path: Path) -> None:
    for name in ("s1", "s2", "s3"):
        Path("texts", name).mkdir(parents=True)
    found = job(
        *("--data_path", "texts", "--participants", "s2", "s3", "--participant", "s3", "--fold", "1"),
        *("--mode", "pooled", "--model", "medium", "--batch_size", "8", "--lr", "1e-2"),
        *("--steps", "7", "--seed", "3", "--device", "cpu"),
    )
    assert found.data.model_dump(include={"path", "domains", "participant", "mode"}) == {
        "path": tmp_path / "texts", "domains": ["s2", "s3"], "participant": "s3", "mode": "pooled",
    }  # fmt: skip
    assert (found.model.n_layer, found.model.n_embd, found.model.block_size) == (4, 128, 64)
    assert (found.train.batch_size, found.train.learning_rate, found.train.steps) == (8, 0.01, 7)
    assert (found.train.seed, found.distributed.device) == (3, "cpu")
    assert job("--data_path", "texts", "--fold", "1").data.participant == "s2"
    assert job("--participants", "1", "null", "--fold", "1").data.participant == "null"


def test_every_argument_of_a_base_model_is_a_setting(tmp_path: Path) -> None:
    found = job(
        *("--fold", "0", "--mode", "full_fine_tuning", "--base_model", "there", "--base_steps", "7"),
        *("--base_participants", "types", "strings", "--target_data_pct", "0.25", "--target_batch_pct", "5e-1"),
    )
    assert found.data.model_dump(include={"mode", "base_participants", "target_data_pct", "target_batch_pct"}) == {
        "mode": "full_fine_tuning", "base_participants": ["types", "strings"], "target_data_pct": 0.25,
        "target_batch_pct": 0.5,
    }  # fmt: skip
    assert (found.train.base_model, found.train.base_steps, found.train.steps) == (tmp_path / "there", 7, 300)
    plain = job("--fold", "0", "--mode", "from_scratch")
    assert (plain.data.target_data_pct, plain.data.target_batch_pct, plain.data.base_participants) == (1, 1, None)
    assert (plain.train.base_model, plain.train.base_steps) == (None, None)


def test_base_steps_override_steps_in_mode_base_only_and_not_in_other_modes() -> None:
    assert job("--mode", "base_only").train.steps == 300
    assert job("--mode", "base_only", "--steps", "5").train.steps == 5
    assert job("--mode", "base_only", "--steps", "5", "--base_steps", "7").train.steps == 7
    assert job("--fold", "0", "--steps", "5", "--base_steps", "7").train.steps == 5
    Path("f.yaml").write_text("train: {epochs: 2, batch_size: 4}\n")
    found = job("--config", "f.yaml", "--mode", "base_only", "--base_steps", "7").train
    assert (found.steps, found.epochs) == (7, None)


@pytest.mark.parametrize(("share", "size", "windows"), [("1", 8, 8), ("0.5", 8, 4), ("0.06", 10, 1), ("0.3", 4, 1)])
def test_target_batch_pct_gives_the_windows_of_the_participant(share: str, size: int, windows: int) -> None:
    found = job("--fold", "0", "--mode", "from_scratch", "--target_batch_pct", share)
    assert target_windows(found, size) == windows


def test_the_base_model_of_an_experiment_may_be_trained_on_the_participant() -> None:
    """Several folds can share a base model. A job list warns of the leak, or refuses it with --refuse-leaks."""
    arguments = ("--fold", "0", "--base_participants", "types", "special-methods", "--mode")
    for mode in ("full_fine_tuning", "from_scratch"):
        assert job(*arguments, mode).data.base_participants == ["types", "special-methods"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_without_a_window_of_the_participant_is_refused_and_the_remedy_is_accepted(world: int) -> None:
    arguments = ("--fold", "0", "--mode", "from_scratch", "--batch_size")
    with pytest.raises(ConfigError) as error:
        for_ranks(options(*arguments, "16", "--target_batch_pct", "0.03"), world)
    assert str(error.value) == (
        "data.target_batch_pct=0.03: less than one of the 16 windows per step; set it to 0.0625 or more, or "
        "train.batch_size to 34 or more"
    )
    for_ranks(options(*arguments, "16", "--target_batch_pct", "0.0625"), world)
    for_ranks(options(*arguments, "34", "--target_batch_pct", "0.03"), world)


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        ("distributed.strategy=single", 2, "distributed.strategy=single is for one process, but there are 2"),
        ("checkpoint.every=auto data.mode=base_only", 1, "checkpoint.every=auto with data.mode=base_only: the base"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(overrides: str, world: int, message: str) -> None:
    Path("f.yaml").write_text(TRAIN)
    with pytest.raises(ConfigError, match=f"^{message}"):
        for_ranks(options("--config", "f.yaml", *overrides.split()), world)


def test_a_base_model_in_a_mode_that_starts_from_random_weights_is_refused() -> None:
    for mode in ("base_only", "from_scratch", "heldout"):
        problem = f"/there: mode {mode} starts from random weights; remove --base_model, or set --mode full_fine_tuning"
        with pytest.raises(ConfigError, match=f"^train.base_model=.*{problem}"):
            for_ranks(options("--fold", "0", "--mode", mode, "--base_model", "there"), 1)


@pytest.mark.parametrize("size", MODELS)
def test_every_model_size_is_valid(size: str) -> None:
    assert job("--model", size).model.model_dump(include=set(MODELS[size])) == MODELS[size]


def test_arguments_take_precedence_over_the_file_and_overrides_over_both() -> None:
    Path("f.yaml").write_text("train: {epochs: 2, batch_size_per_device: 4, beta1: 0}\ncheckpoint: {dir: here}\n")
    file = ("--config", "f.yaml")
    assert job(*file).checkpoint.dir is not None
    found = job(*file, "--steps", "5", "--batch_size", "8", "--lr", "1e-2", "train.learning_rate=1e-3")
    assert (found.train.steps, found.train.epochs) == (5, None)
    assert (found.train.batch_size, found.train.batch_size_per_device) == (8, None)
    assert (found.train.learning_rate, found.train.beta1, found.model.n_embd) == (1e-3, 0, 128)
    assert found.checkpoint.dir is None, "jobs with the same settings file do not share its checkpoints"
    assert job(*file, "--fold", "0", "checkpoint.dir=there").checkpoint.dir == Path.cwd() / "there"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--fold 8", "fold: out of range for 8 participants: got 8; give 0 to 7"),
        ("--fold -1", "fold: expected a non-negative integer, got '-1'"),
        ("--fold 2 --participants a b", "fold: out of range for 2 participants: got 2; give 0 to 1"),
        ("--participant strngs",
         "participant: expected one of the participants, got 'strngs'; did you mean 'strings'? "),
        ("--participant c --participants a b",
         "participant: expected one of the participants, got 'c'; there are a, b"),
        ("--fold 0 --participant types", "participant: contradicts fold 0, which is 'special-methods': got 'types'; "),
        ("--fold 0 data.participant=types", "data.participant=types: contradicts --fold or --participant (special-m"),
        ("--mode single", "settings: data: mode=single: no target; set data.participant, or give "),
        ("--mode heldout", "--mode heldout: no target; add --fold N or --participant NAME"),
        ("--fold 0 --mode each",
         "--mode: data.mode='each': Input should be 'heldout', 'single', 'pooled', 'base_only'"),
        ("--mode full_fine_tuning", "settings: data: mode=full_fine_tuning: no target; set data.parti"),
        ("--mode from_scratch", "settings: data: mode=from_scratch: no target; set data.participant, "),
        ("--fold 0 --mode base_only --base_participants types special-methods",
         "settings: data: base_participants: special-methods is the target; remove it"),
        ("--fold 0 --mode from_scratch --target_data_pct 25",
         "--target_data_pct: data.target_data_pct=25: expected a share, above 0 and at most 1 (a quarter"),
        ("--fold 0 --target_data_pct 0",
         "--target_data_pct: data.target_data_pct=0: expected a share, above 0 and at most 1"),
        ("--fold 0 --target_batch_pct 1e9",
         "--target_batch_pct: data.target_batch_pct=1000000000.0: expected a share, ab"),
        ("--fold 0 --target_batch_pct 25%",
         "--target_batch_pct: data.target_batch_pct='25%': Input should be a valid nu"),
        ("--fold 0 --mode single --target_batch_pct 0.5",
         "settings: data: target_batch_pct=0.5: no effect in mode single; remove it, or set mode=full_fine_"),
        ("--mode base_only --target_data_pct 0.5",
         "settings: data: target_data_pct=0.5: no effect in mode base_only; r"),
        ("--mode base_only --base_steps 0",
         "--base_steps: train.base_steps=0: Input should be greater than or equal to"),
        ("--model huge", "--model: unknown size 'huge'; give small, medium, large"),
        ("--batch_size 0", "--batch_size: train.batch_size=0: Input should be greater than or equal to 1"),
        ("--lr fast", "--lr: train.learning_rate='fast': Input should be a valid number"),
        ("--lr 1 train.learning_rate=fast", "command line: train.learning_rate='fast': Input should be a valid number"),
        ("--steps 1.5", "--steps: train.steps=1.5: Input should be a valid integer"),
        ("--seed -1", "--seed: train.seed=-1: Input should be greater than or equal to 0"),
        ("--device tpu", "--device: distributed.device='tpu': unknown device; give cpu, cuda, cuda:N or auto"),
        ("--device cpu distributed.backend=nccl", "settings: distributed: device=cpu contradicts backend=nccl: leave "),
        ("--device cuda:0 distributed.backend=gloo", "settings: distributed: device=cuda:0 contradicts backend=gloo"),
        ("--data_path nix", "--data_path: data.path='nix': no such file or directory (working directory "),
        ("--data_path ~nobody-here --fold 0", "--data_path: no home directory of a user 'nobody-here' on this machine"),
        ("--prefix ../x", "prefix: cannot be part of a path: got '../x'; use printable characters, at most 200 bytes"),
        ("--fold 0 train.stepz=3", "command line: train.stepz: unknown key; did you mean train.steps?"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_argument_of_a_job_is_one_line(arguments: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        job(*arguments.split())
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_the_error_of_an_unlistable_data_path_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--data_path: {re.escape(str(tmp_path))}/nix: cannot list participants: No"):
        job("--data_path", "nix", "--fold", "0")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(KIT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 0, ""),
        (["--help"], 0, ""),
        (["train.batch=4"], 2, "command line: train.batch: unknown key; did you mean train.batch_size?\n"),
        (["--nproc", "2"], 2, "train.py: error: unrecognized arguments"),
        (["--quiet"], 2, "train.py: error: unrecognized arguments: --quiet; settings are given as section.key=value\n"),
        (["--nodes", "4", "train.steps=2"], 2, "error: unrecognized arguments: --nodes; settings are"),
        (["train.steps=2", "--nodes=4", "train.seed=2"], 2, "error: unrecognized arguments: --nodes; settings are"),
        (["train.steps=2", "--nodes", "4", "--x", "train.seed=2"], 2, "unrecognized arguments: --nodes --x; settings"),
    ],
)
def test_the_call_check_of_the_launchers_accepts_exactly_the_arguments_of_train_py(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "tiny.yaml").write_text("train: {steps: 1, batch_size: 4}")
    check = [str(KIT / "scripts/lib/check_call.py"), "--ranks", "2", "--config", str(tmp_path / "tiny.yaml"), "--"]
    result = run_python(*check, *arguments)
    assert (result.returncode, result.stdout) == (code, "ok\n" * (code == 0))
    assert message in result.stderr


# ---------------------------------------------------------------- config/


@pytest.mark.parametrize("file", tracked("config/*.yaml"), ids=lambda file: file.name)
def test_the_files_in_config_are_valid_for_the_number_of_ranks_in_their_comments(file: Path) -> None:
    text = file.read_text()
    tree: dict[str, Any] = yaml.safe_load(text)
    if "path" in tree.get("data", {}):
        Path(tree["data"]["path"]).mkdir(parents=True)
    ranks = re.search(r"x (\d+) ranks", text) or re.search(rf"{re.escape(file.name)} (\d+)\n", text)
    assert ranks, "the opening comment must state the number of ranks"
    found = batch(read(file), int(ranks[1]))
    assert "windows x" not in text or str(found) in text, "the arithmetic in the opening comment is wrong"


def nested_aliases(levels: int, end: str = "") -> str:
    """A file of a few hundred characters that stands for 9**levels values."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, levels)]
    return "\n".join([*lines, f"{end}*a{levels - 1}"])


OVERSIZED = {
    "aliases": nested_aliases(9, "model: {n_layer: 4}\ndata: "),
    "aliases in a setting": nested_aliases(9, "train: {steps: 1}\nmodel: &model\n  n_layer: "),
    "few aliases": nested_aliases(4, "model: "),
    "an alias of itself": "data: &a {domains: [*a, *a]}\nmodel: &b {n_layer: *b}\n",
    "merged mappings": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)),
    "deep lists": f"data: {'[' * 5000}{']' * 5000}",
    "lists that Python can still read": f"data: {{domains: {'[' * 200}{']' * 200}}}",
    "many keys": "".join(f"k{number}: 1\n" for number in range(5000)),
    "many values": f"data: {{domains: [{'a, ' * 30_000}]}}",
    "a long key": f"? {'k' * 300_000}\n: 1",
    "a long alias": f"data: *{'k' * 300_000}",
    "a long tag": f"data: !{'k' * 300_000} 1",
    "a long value": f"data: {{mode: {'k' * 300_000}}}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", OVERSIZED.values(), ids=OVERSIZED)
def test_a_file_that_stands_for_any_number_of_values_is_refused_with_a_short_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "f.yaml")
    assert len(str(refused.value)) < 10_000
