"""Metrics are read from lines of output, and written to a file."""

# ruff: noqa: E501 (lines as other programs print them)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.launch.output_metrics import OutputMetrics, Steps, check_expression, parse, plain
from distributed.metrics import FROM_OUTPUT, newest
from distributed.report.history import read_metrics

COLOUR, BOLD, RESET = "\x1b[32m", "\x1b[1m", "\x1b[0m"

LINES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "nanoGPT": [
        ("step 250: train loss 3.1415, val loss 3.2024", {"step": 250, "loss": 3.1415}),
        ("iter 100: loss 2.3100, time 12.05ms, mfu 2.10%", {"step": 100, "loss": 2.31}),
    ],
    "nanochat": [
        (
            "step 00040/01000 (4.00%) | loss: 6.12 | lrm: 1.00 | dt: 123.45ms | tok/sec: 123,456 | mfu: 12.30",
            {"step": 40, "steps": 1000, "loss": 6.12, "tokens_per_second": 123456},
        ),
        (
            "step 7/100 | train loss 5.5 | norm 0.23 | lr 1.20e-04 | (12.45 ms | 9876 tok/s)",
            {"step": 7, "steps": 100, "loss": 5.5, "lr": 1.2e-4, "tokens_per_second": 9876},
        ),
    ],
    "PyTorch's ImageNet example": [
        (
            "Epoch: [2][ 20/391]\tTime  0.12 ( 0.20)\tData  0.00 ( 0.01)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.00 (  0.10)",
            {"step": 20, "steps": 391, "epoch": 2, "loss": 6.9},
        )
    ],
    "PyTorch's MNIST example": [
        (
            "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300123",
            {"epoch": 1 + 640 / 60000, "loss": 2.300123},  # these are samples
        )
    ],
    "PyTorch's language model example": [
        (
            "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 12.21 | loss  7.61 | ppl  2018.22",
            {"step": 200, "steps": 2983, "epoch": 1, "loss": 7.61, "lr": 20},
        )
    ],
    "PyTorch's DDP tutorial": [("[GPU0] Epoch 3 | Batchsize: 32 | Steps: 64", {"epoch": 3})],
    "tutorials": [
        (
            "Epoch [1/5], Step [100/600], Loss: 0.4012",
            {"step": 100, "steps": 600, "epoch": 1, "epochs": 5, "loss": 0.4012},
        ),
        ("Epoch 5: train_loss=0.312 val_loss=0.401", {"epoch": 5, "loss": 0.312}),
        ("step 40", {"step": 40}),
        (
            "[rank 0] batch 12/400, loss is tensor(0.5312, grad_fn=<NllLossBackward0>)",
            {"step": 12, "steps": 400, "loss": 0.5312},
        ),
    ],
    "Hugging Face Trainer": [
        (
            "{'loss': 2.3, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}",
            {"loss": 2.3, "lr": 5e-5, "epoch": 0.1},
        ),
        (" 12%|█▏        | 60/500 [00:10<01:13,  6.00it/s]", {"step": 60, "steps": 500, "steps_per_second": 6}),
    ],
    "timm": [
        (
            "Train: 3 [  50/1251 (  4%)]  Loss: 6.94 (6.95)  Time: 0.30s,  850.0/s  (0.31s,  820.0/s)  LR: 1.000e-05  Data: 0.01",
            {"step": 50, "steps": 1251, "epoch": 3, "loss": 6.94, "lr": 1e-5},
        )
    ],
    "Lightning": [
        (
            "Epoch 4:  12%|█▏        | 47/391 [00:03<00:20, 14.50it/s, v_num=3, train_loss=2.30]",
            {"step": 47, "steps": 391, "epoch": 4, "loss": 2.3, "steps_per_second": 14.5},
        ),
        (
            "Epoch 0/9 ━━╸━━━━━━━━━━━━━ 47/391 0:00:03 • 0:00:24 14.50it/s v_num: 0.000 train_loss: 2.301",
            {"step": 47, "steps": 391, "epoch": 0, "epochs": 9, "loss": 2.301},
        ),
    ],
    "tqdm": [
        (
            "12%|#2  | 12/100 [00:03<00:20, 4.5it/s, loss=2.3]",
            {"step": 12, "steps": 100, "loss": 2.3, "steps_per_second": 4.5},
        ),
        ("training:   1%|          | 1/100 [00:01<?, ?it/s]", {"step": 1, "steps": 100}),
        ("40it [00:80,  2.00s/it, loss=0.1]", {"step": 40, "loss": 0.1, "steps_per_second": 0.5}),
    ],
    "Megatron-LM": [
        (
            " [2024-05-01 10:00:00] iteration      100/  500000 | consumed samples:        25600 | elapsed time per iteration "
            "(ms): 5012.3 | learning rate: 1.000E-06 | global batch size:   256 | lm loss: 1.034E+01 | loss scale: 1.0 |",
            {"step": 100, "steps": 500000, "loss": 10.34, "lr": 1e-6},
        )
    ],
    "DeepSpeed": [
        (
            "[2024-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=40, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]",
            {"step": 40, "lr": 0.001},
        ),
        (
            "steps: 40 loss: 4.1243 iter time (s): 0.512 samples/sec: 62.500",
            {"step": 40, "loss": 4.1243, "samples_per_second": 62.5},
        ),
    ],
    "detectron2": [
        (
            "[05/01 10:00:00 d2.utils.events]:  eta: 1:02:10  iter: 19  total_loss: 1.812  loss_cls: 0.9  loss_box_reg: 0.2  "
            "time: 0.51  data_time: 0.01  lr: 0.00019981  max_mem: 3210M",
            {"step": 19, "loss": 1.812, "lr": 0.00019981},
        )
    ],
    "fairseq": [
        (
            '2024-05-01 10:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.05, "loss": "10.21", "ppl": "1184.5", '
            '"wps": "5021.3", "ups": "2.1", "num_updates": "100", "lr": "1.25e-05"}',
            {"step": 100, "epoch": 1, "loss": 10.21, "lr": 1.25e-5, "tokens_per_second": 5021.3},
        ),
        (
            "epoch 002:    100 / 5000 loss=10.21, ppl=1184.5, wps=5021, num_updates=5100, lr=1.2e-05",
            {"step": 5100, "epoch": 2, "loss": 10.21},
        ),
    ],
    "Keras": [
        (
            " 47/1875 [..............................] - ETA: 5:00 - loss: 2.4012 - accuracy: 0.11",
            {"step": 47, "steps": 1875, "loss": 2.4012},
        ),
        (
            f"{BOLD}  47/1875{RESET} {COLOUR}━━━━━━━{RESET} {BOLD}12s{RESET} 7ms/step - accuracy: 0.11 - loss: 2.4012",
            {"step": 47, "steps": 1875, "loss": 2.4012},
        ),
        ("Epoch 3/10", {"epoch": 3, "epochs": 10}),
    ],
    "MMEngine": [
        (
            "05/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][ 50/196]  lr: 1.0000e-01  eta: 0:10:12  time: 0.21  loss: 2.3",
            {"step": 50, "steps": 196, "epoch": 1, "loss": 2.3, "lr": 0.1},
        ),
        (
            "05/01 10:00:00 - mmengine - INFO - Iter(train) [  100/20000]  lr: 1.0e-02  eta: 1:00:00  loss: 0.91",
            {"step": 100, "steps": 20000, "loss": 0.91, "lr": 0.01},
        ),
    ],
    "litgpt": [
        (
            "Epoch 1 | iter 32 step 8 | loss train: 0.912, val: n/a | iter time: 300.20 ms (step) remaining time: 0:10:12",
            {"step": 32, "epoch": 1, "loss": 0.912},
        )
    ],
    "torchtitan": [
        (
            f"[titan] 2024-05-01 10:00:00,123 - root - INFO - {COLOUR}step: 1,010  {RESET}loss:  8.1234  grad_norm:  1.2  "
            "memory: 47.29GiB(49.79%)  tps: 1,234  tflops: 60.10  mfu: 19.30%",
            {"step": 1010, "loss": 8.1234, "tokens_per_second": 1234},
        )
    ],
    "reinforcement learning": [
        ("Episode 120/500 | reward 34.2 | epsilon 0.1", {"step": 120, "steps": 500}),
        ("update 12: reward=1.25 loss=-0.02", {"step": 12, "loss": -0.02}),
    ],
    "logging": [
        ("INFO:root:step 40 loss 1.2", {"step": 40, "loss": 1.2}),
        ("2024-05-01 10:00:00,123 [INFO] train.py:42 global_step=40 loss=nan", {"step": 40, "loss": float("nan")}),
    ],
    "loguru": [
        (
            f"{COLOUR}2024-05-01 10:00:00.123{RESET} | {BOLD}INFO    {RESET} | test:main:42 - {BOLD}step=40 loss=1.2{RESET}",
            {"step": 40, "loss": 1.2},
        )
    ],
    "JSON lines": [
        ('{"step": 40, "loss": 1.25, "lr": 0.0003}', {"step": 40, "loss": 1.25, "lr": 0.0003}),
        ('{"iteration":40,"loss":1.25}', {"step": 40, "loss": 1.25}),
        ('{"train/loss": 1.25, "trainer/global_step": 40}', {"step": 40, "loss": 1.25}),
    ],
}


def values_in(text: str) -> dict[str, Any]:
    found = parse(plain(b"[node1:0] " + text.encode()))
    return found[0] if found else {}


@pytest.mark.parametrize(
    ("line", "expected"), [case for cases in LINES.values() for case in cases],
    ids=[f"{name} {n}" for name, cases in LINES.items() for n in range(1, len(cases) + 1)],
)  # fmt: skip
def test_the_values_in_a_line_of_training_output_are_found(line: str, expected: dict[str, Any]) -> None:
    found = values_in(line)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected, nan_ok=True)
    assert ("step" in found) == ("step" in expected)


FORMATS = json.loads(Path(__file__).with_name("output_formats.json").read_text())


def values_of(directory: Path, reads: list[list[str]]) -> dict[str, float]:
    """The newest values in the file, after the output was read in these parts."""
    output = OutputMetrics(str(directory / "metrics.jsonl"), "")
    for lines in reads:
        output.feed(b"".join(f"[node1:0] {line}\n".encode() for line in lines))
        output._due = 0.0
        output.read()
    output.read(last=True)
    return newest(directory / FROM_OUTPUT)


@pytest.mark.parametrize("row", FORMATS, ids=[row["program"] for row in FORMATS])
@pytest.mark.parametrize("size", [1, 1000])
def test_the_values_in_the_output_of_a_program_are_right_and_no_others_are_found(
    row: dict[str, Any], size: int, tmp_path: Path
) -> None:
    lines = row["lines"]
    found = values_of(tmp_path, [lines[n : n + size] for n in range(0, len(lines), size)])
    assert found == pytest.approx(row["expected"])


def test_the_page_shows_the_validation_loss_of_the_output_as_a_series_of_its_own(tmp_path: Path) -> None:
    reads = [f"step {n} loss {n / 100}\ndev loss: {n / 50} at step {n}".split("\n") for n in (100, 200)]
    values_of(tmp_path, reads)
    history = read_metrics(tmp_path / FROM_OUTPUT, [])
    assert (history.series("loss"), history.held_out_losses()) == ([(100, 1), (200, 2)], [(100, 2), (200, 4)])


def test_a_resumed_attempt_knows_the_first_epoch_only_if_an_earlier_attempt_showed_it(tmp_path: Path) -> None:
    line = "Epoch: [5][50/100] Loss 1.0"
    assert values_of(tmp_path, [[line]]) == {"epoch": 5, "loss": 1.0}
    (tmp_path / FROM_OUTPUT).write_text('{"epoch": 0.0, "step": 50}\n')
    assert values_of(tmp_path, [[line]]) == {"epoch": 5, "loss": 1.0, "step": 550}


def test_the_table_has_at_least_sixty_programs_with_their_sources() -> None:
    programs = {row["program"].partition(":")[0].partition(",")[0] for row in FORMATS if row["source"]}
    assert len(programs) >= 60


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e4", 10000), ("1_000", 1000), ("12,345", 12345), ("20.5K", 20500), ("3M", 3000000), ("1,5", None),
        ("1.5", None), ("12.5.1", None), ("12:30", None), ("45%", None), ("45 %", None), ("12GB", None), ("7ms", None),
        ("1 000", None), ("1,00,000", None), ("1e4x", None),
    ],
)  # fmt: skip
def test_a_number_is_read_whole_or_not_at_all(text: str, value: float | None) -> None:
    assert values_in(f"step {text} loss 2.5").get("step") == value
    bar = f"10%|#| {text}/90M [00:10<00:10, 1.2kit/s, loss=2.5]"
    assert values_in(bar).get("step") == value
    assert values_in(f"step 1 loss {text}").get("loss") in {value, None, 1.5, 1}


def test_a_number_may_have_an_exponent_and_a_suffix() -> None:
    assert values_in("step 1 loss 5e1k") == {"step": 1, "loss": 50_000}


def test_an_expression_that_backtracks_stops_within_its_time(tmp_path: Path) -> None:
    lines = ["a" * 60 + "!", "done 7"]
    assert written(tmp_path, lines, expression=r"^(a+)+$|done (?P<step>\d+)") == []
    assert written(tmp_path, lines[1:], expression=r"^(a+)+$|done (?P<step>\d+)") == [{"step": 7}]


WITHOUT_PROGRESS = {
    "dates": "2024-05-01 10:00:00 started\n[05/01 10:00:00] ready\n01/05/2024 step by step\nMay 1 10:00:00 node1 kernel: up",
    "versions": "torch 2.13.0\nCUDA 12.8, cuDNN 9.1\nNCCL version 2.27.3+cuda12.8\nPython 3.10.12",
    "downloads": "Downloading torch-2.13.0.whl (800.1 MB)\n   ━━━━━━━━━━━━━━━━━━ 800.1/800.1 MB 50.0 MB/s eta 0:00:00\n"
    "model.safetensors:  50%|█████     | 1.2G/2.4G [00:10<00:10, 120MB/s]\ntrain.tar.gz:  10%|#  | 10/100 [00:01<00:09, 9.9MB/s]",
    "data preparation": "Map:  50%|█████     | 500/1000 [00:01<00:01, 450.2 examples/s]\n"
    "Tokenizing files:  50%|█████     | 5/10 [00:01<00:01,  4.50it/s]\nLoading checkpoint shards: 100%|███| 2/2 [00:03<00:00,  1.6s/it]\n"
    "Generating train split: 1000 examples [00:00, 9000 examples/s]",
    "a stack trace": 'Traceback (most recent call last):\n  File "/w/train.py", line 120, in train_step\n    loss = step(batch)\n'
    '    step = 100\n  File "/w/step.py", line 12, in step\nValueError: batch 12 is too long: 4097 > 4096',
    "addresses": "listening on 10.0.0.1:29500\nrank 0 at 192.168.1.20, epoch of the store 127.0.0.1\niteration over 10.1.2.3/24",
    "epoch in prose": "The epoch of Unix time is 1970.\nWe train for 90 epochs with 512 samples.\n"
    "In epoch 3 of the project nothing happened\nepoch time will be printed later",
    "steps in prose": "Step 1: install the packages\nStep 2 of 5: download the data\nsteps 3 to 5 are optional\nstep by step guide",
    "a container build": "Step 1/5 : FROM python:3.10\n ---> 9f3a0c1b\nStep 2/5 : RUN pip install torch\n[2/5] RUN pip install",
    "a compiler": "[1/120] Building CXX object a.o\n[ 12%] Linking\nninja: build stopped: 3 steps",
    "pytest": "tests/test_step.py ........ [ 50%]\n12 passed, 1 skipped in 3.21s\ntests/test_train.py::test_loss PASSED [100%]",
    "an evaluation table": "| class | precision | recall | support |\n| cat   | 0.91 | 0.88 | 120/140 |\nAverage Precision (AP) @[ IoU=0.50:0.95 ] = 0.412",
    "an evaluation": "Test: [ 10/98]\tTime  0.10 ( 0.20)\tLoss 6.9e+00 (7.0e+00)\nValidation DataLoader 0:  50%|█████     | 5/10 [00:00<00:00, 20.0it/s]\n"
    "Epoch(val)  [1][ 10/40]  eta: 0:00:12\nval step 12 loss 2.3\nEvaluating:  50%|##| 5/10 [00:00<00:00, 20.0it/s, loss=2.1]\n"
    "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 20.0it/s]",
    "settings": "lr=0.1 batch=32 epochs=10 seed=1\nmax_steps: 1000\nmax step 1000, lr 0.1\nbatch_size: 64\nwarmup_steps=100 lr=3e-4\n"
    "Namespace(steps=1000, batch=8, lr=0.1, epochs=3)\nsave every 50 steps\nnum iterations: 500",
    "a model summary": "Linear(in_features=64, out_features=10)\nparameters: 1,234,567\n| 0 | conv1 | Conv2d | 1.7 K | train",
    "NCCL": "node1:4711:4711 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\nnode1:4711:4720 [0] NCCL INFO Channel 00/02 : 0 1",
    "warnings": "UserWarning: lr_scheduler.step() was called before optimizer.step()\n/w/a.py:12: FutureWarning: step is deprecated since 2.1",
    "checkpoints": "saved checkpoint to ckpt/step_100.pt\nloading weights from epoch_12.pth\nCheckpoint step_00000005 is 10.1 MB",
    "the network": "64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=0.1 ms\n10 packets transmitted, 10 received, 0% packet loss",
    "a process table": "  PID USER   %CPU  TIME+ COMMAND\n 4711 ada    99.0  1:20.3 python train.py\n12:30:01 up 10 days, load 1.2",
    "a shell": "+ python train.py --epochs 10 --step 5\n+ for step in 1 2 3\n$ ls runs/epoch1 runs/epoch2",
    "JSON settings": '{"train": {"steps": 1000, "batch": 32}, "lr": 0.1}\n{"version": 3, "epoch_time": 12.5}',
}


@pytest.mark.parametrize("log", WITHOUT_PROGRESS.values(), ids=WITHOUT_PROGRESS)
def test_no_step_is_found_in_a_log_without_progress(log: str, tmp_path: Path) -> None:
    assert [line for line in log.splitlines() if {"step", "epoch"} & values_in(line).keys()] == []
    assert not any("step" in line for line in written(tmp_path, log.splitlines()))


def test_there_are_at_least_twenty_logs_without_progress() -> None:
    assert len(WITHOUT_PROGRESS) >= 20


PARTS = [
    "epoch",
    "step",
    "[",
    "]",
    "/",
    ":",
    "1",
    "9" * 400,
    "1e999",
    "loss",
    "nan",
    "12%|#|",
    "it/s",
    ",",
    "0",
    ".",
    " ",
    "=",
    "0it [",
    "5e1k",
    "samples/s",
]


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=30).map("".join))
def test_any_line_is_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, line: str) -> None:
    parse(line)
    written(tmp_path_factory.mktemp("run"), [line.replace("\n", " ")], ["Epoch: [2][3/9] loss 1"])


# ---------------------------------------------------------------- the steps of an attempt


def resolve(*lines: str, first_epoch: float | None = None) -> list[tuple[Any, Any]]:
    steps = Steps(first_epoch)
    found = [steps.resolve(*parsed) for line in lines if (parsed := parse(line))]
    return [(values.get("step"), values.get("steps")) for values in found]


def test_a_step_in_a_numbered_epoch_becomes_a_step_of_the_whole_training() -> None:
    lines = [f"Epoch [{epoch}/2], Step [{step}/100], Loss: 0.4" for epoch in (1, 2) for step in (50, 100)]
    assert resolve(*lines) == [(50, 200), (100, 200), (150, 200), (200, 200)]
    assert [step for step, _ in resolve(*(f"Epoch: [{n}][50/100] Loss 1.0" for n in range(3)))] == [50, 150, 250]


def test_a_resumed_attempt_continues_the_count_of_epochs() -> None:
    assert resolve("Epoch: [5][50/100] Loss 1.0", first_epoch=0.0) == [(550, None)]
    assert resolve("Epoch: [5][50/100] Loss 1.0", first_epoch=1.0) == [(450, None)]


def test_a_lower_step_belongs_to_the_next_epoch() -> None:
    bars = [f"{step}%|#| {step}/100 [00:01<00:01, 4.5it/s]" for step in (50, 100, 20, 100, 10)]
    assert [step for step, _ in resolve(*bars)] == [50, 100, 120, 200, 210]
    assert [step for step, _ in resolve(*(f"step {n} loss 1.0" for n in (50, 80, 10)))] == [
        50,
        80,
        None,
    ]  # of how many?


def test_lines_that_are_slightly_out_of_order_belong_to_one_epoch() -> None:
    assert [step for step, _ in resolve(*(f"step {n} loss 1.0" for n in (10, 20, 15, 21)))] == [10, 20, 15, 21]


@pytest.mark.parametrize("task", ["Loading train images", "Map (num_proc=4)", "Processing batches"])
def test_a_progress_bar_of_data_preparation_is_not_taken_for_training(task: str) -> None:
    lines = [f"{task}: 100%|#| 50000/50000 [00:01<00:00, 4500.5it/s]", "10%|#| 39/391 [00:01<00:01, 4.5it/s]"]
    assert resolve(*lines) == [(39, 391)]


def test_a_summary_does_not_replace_the_last_loss(tmp_path: Path) -> None:
    lines = ["step 9 loss: 1.0", "best loss: 0.1 at epoch 2", "{'train_runtime': 9.5, 'train_loss': 1.9, 'epoch': 2.0}"]
    assert written(tmp_path, *([line] for line in lines)) == [{"step": 9, "loss": 1.0}]


def test_a_shorter_progress_bar_is_an_evaluation() -> None:
    bars = [f"{n}%|#| {n}/{total} [00:01<00:01, 4.5it/s]" for n, total in ((100, 500), (20, 50), (101, 500))]
    assert resolve(*bars) == [(100, 500), (None, None), (101, 500)]


def test_lines_with_a_loss_are_preferred() -> None:
    lines = ["30%|#| 300/1000 [00:01<00:01, 4.5it/s]", "step 1/50 loss 2.0", "31%|#| 310/1000 [00:01<00:01, 4.5it/s]"]
    assert resolve(*lines) == [(300, 1000), (1, 50), (None, None)]


def test_without_steps_the_epoch_is_the_step() -> None:
    assert resolve("Epoch 1/10", "Epoch 4/10 loss: 0.3") == [(None, None), (4, 10)]
    parts = [f"{{'loss': 2.3, 'learning_rate': 5e-05, 'epoch': {epoch}}}" for epoch in (0.5, 1.0, 1.5)]
    assert resolve(*parts) == [(None, None)] * 3


# ---------------------------------------------------------------- the file


def written(directory: Path, *reads: list[str], expression: str = "", rank: int = 0) -> list[dict[str, Any]]:
    """Return the lines that an attempt with this output writes to the file of metrics.

    reads: for each call of read(), the lines of output that precede it.
    """
    output = OutputMetrics(str(directory / "metrics.jsonl"), expression)
    for lines in reads:
        output.feed(b"".join(f"[node1:{rank}] {line}\n".encode() for line in lines))
        output.read(last=True)
    path = directory / FROM_OUTPUT
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert all(line.pop("time") > 0 for line in found)
    return found


def test_the_newest_values_are_appended(tmp_path: Path) -> None:
    lines = [f"step {n} loss {n / 10}" for n in range(100)]
    assert written(tmp_path, lines, ["no step here"], ["iter 200: loss nan"]) == [
        {"step": 99, "loss": 9.9},
        {"step": 200, "loss": None},
    ]


def test_step_and_loss_may_be_on_different_lines(tmp_path: Path) -> None:
    bar, values = "12%|#| 60/500 [00:10<01:13,  6.00it/s]", "{'loss': 2.3, 'learning_rate': 5e-05, 'epoch': 0.1}"
    line = {"step": 60, "steps": 500, "loss": 2.3, "lr": 5e-5, "epoch": 0.1, "steps_per_second": 6.0}
    assert written(tmp_path, [values, f"{bar}\r"]) == [line]


def test_values_without_a_step_belong_to_the_previous_step(tmp_path: Path) -> None:
    bar, evaluation = "12%|#| 60/500 [00:10<01:13,  6.00it/s]", "10%|#| 2/20 [00:10<01:13,  30.00it/s]"
    assert written(tmp_path, ["loss 3.0"], [bar], ["{'loss': 2.3, 'epoch': 1.0}"], [evaluation], ["loss 2.0"]) == [
        {"step": 60, "steps": 500, "steps_per_second": 6.0},
        {"step": 60, "loss": 2.3, "epoch": 1.0},
        {"step": 60, "loss": 2.0},
    ]


def test_output_is_not_read_before_the_next_line_of_metrics_is_due(tmp_path: Path) -> None:
    output = OutputMetrics(str(tmp_path / "metrics.jsonl"), "")
    output._due = float("inf")
    output.feed(b"[node1:0] step 1 loss 2.0\n")
    output.read()
    assert not (tmp_path / FROM_OUTPUT).exists()
    output._due = 0.0
    output.read()
    assert (tmp_path / FROM_OUTPUT).exists()


def test_only_the_output_of_rank_0_is_read(tmp_path: Path) -> None:
    assert written(tmp_path, ["step 1 loss 2.0"], rank=1) == []


def test_metrics_are_not_guessed_for_a_run_that_logs_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert written(tmp_path, ["step 1 loss 2.0"]) == []


def test_an_expression_replaces_the_guess(tmp_path: Path) -> None:
    lines = ["step 7 loss 2.0", "done 1,200 of 5000 (x=3.5)", "other"]
    expression = r"done (?P<step>[\d,]+) of (?P<steps>\d+) \(x=(?P<loss>.*)\)"
    assert written(tmp_path, lines, expression=expression) == [{"step": 1200, "steps": 5000, "loss": 3.5}]


def test_a_long_output_is_kept_only_in_part(tmp_path: Path) -> None:
    output = OutputMetrics(str(tmp_path / "metrics.jsonl"), "")
    for _ in range(100):
        output.feed(b"[node1:0] " + b"x" * 99_000 + b"\n")
    output.feed(b"[node1:0] step 5 loss 1.0\n")
    assert len(output._unread) < 1 << 20
    output.read(last=True)
    assert json.loads((tmp_path / FROM_OUTPUT).read_text())["step"] == 5


def test_a_missing_directory_is_ignored(tmp_path: Path) -> None:
    assert written(tmp_path / "removed", ["step 1 loss 2.0"]) == []


@pytest.mark.parametrize(
    "line",
    [
        "(" * 2000,
        "epoch " * 400,
        "1," * 1000,
        "%|" * 1000,
        "━ " * 1000,
        "train train_" * 160,
        "epoch" + " " * 1990 + "x",
        "loss step" + "1" * 1900,
    ],
)
def test_a_strange_line_is_read_in_little_time(line: str) -> None:
    assert values_in(line).get("step") is None  # a pattern that backtracks would not end


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        (r"(?P<step>\d+)", ""),
        (r"(?P<epoch>\d+) (?P<lr>.+)", ""),
        ("off", ""),
        ("(", "not a regular expression of Python: missing ), unterminated subpattern at position 0; correct it, or give 'off'"),
        (r"step \d+", "no group with the name step or epoch; mark the number of the step, as in (?P<step>[0-9]+)"),
        (r"(?P<stop>\d+)", "unknown group 'stop'; the names of groups are step, steps, epoch, epochs, loss, held_out_loss, lr, "),
    ],
)  # fmt: skip
def test_the_value_of_the_option_progress_is_checked(expression: str, fault: str) -> None:
    found = check_expression(expression)
    assert found.startswith(fault) and bool(found) == bool(fault)
