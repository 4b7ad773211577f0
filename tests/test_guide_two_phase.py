"""The example of LAUNCH_GUIDE.md for base models runs as printed.

Fifteen experiments of train.py on real text start from three base models, each trained once. Experiments and a base
model trained by hand give bit-identical results.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from test_docs import TWO_PHASE, every_command
from test_guide_jobs import SECONDS, Project

from distributed.training.base_model import CACHE, HASH_LENGTH, TRAINING, verify

COMMANDS = [one for one in every_command("LAUNCH_GUIDE.md") if one.script == TWO_PHASE and "cache" not in one.words]
[BY_HAND] = [one for one in every_command("LAUNCH_GUIDE.md") if one.needs.startswith("# Needs the base models")]


def held_out_loss(run: Path) -> float:
    """The last held-out loss of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([line["held_out_loss"] for line in lines if "held_out_loss" in line][-1])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 100)  # 23 trainings: one minute on an idle machine
def test_fifteen_experiments_train_three_base_models_and_equal_those_by_hand(tmp_path: Path) -> None:
    project = Project(tmp_path)
    [command] = [one.text for one in COMMANDS if not one.needs]
    planned = project.call(f"{command} --plan")
    assert "base models        3; 0 in the cache, 3 to train" in planned
    assert "finished: 18 of 18 done" in project.call(f"{command} --no-tmux")
    results = project.results("results_two_phase.json")
    assert (results["totals"]["done"], results["totals"]["attempts"]) == (18, 18)
    phase1 = project.results("results_two_phase.phase1_base_models.json")
    models = {each["hash"]: each for each in phase1["base_models"]}
    assert [len(each["experiments"]) for each in models.values()] == [5] * 3
    assert all(f"{name}  no" in planned for name in models), "the plan must list them"
    for name, each in models.items():
        verify(str(tmp_path / CACHE / name), each["digest"])
        assert each["digest"][:HASH_LENGTH] == name
    experiments = project.results("results_two_phase.phase2_experiments.json")["jobs"]
    assert len({job["metrics"]["held_out_loss"] for job in experiments}) == 15

    project.env["OMP_NUM_THREADS"] = "1"  # as in a slot; the number of threads changes the rounding of sums
    for fold, share in ((0, 0.25), (1, 0.75), (2, 1.0)):
        [job] = [
            each
            for each in experiments
            if (each["settings"]["fold"], each["settings"]["target_batch_pct"]) == (fold, share)
        ]
        line = BY_HAND.text.replace("--fold 0", f"--fold {fold}").replace("_pct 0.25", f"_pct {share}")
        project.call(re.sub(r"base_models/\w+", f"base_models/{job['options']['base_model_hash']}", line))
        [run] = tmp_path.glob(f"experiments/by-hand/fold{fold}_*")
        assert held_out_loss(run) == job["metrics"]["held_out_loss"]
    # Train a base model by hand, with the arguments of the job that trained it.
    [name] = re.findall(r"base_models/(\w+)", BY_HAND.text)
    settings = json.loads((tmp_path / CACHE / name / "manifest.json").read_text())["settings"]
    arguments = [
        argument for key, value in settings.items()
        for argument in (f"--{key}", *(map(str, value) if isinstance(value, list) else [str(value)]))
    ]  # fmt: skip
    project.call(f"MUSTER_OUTPUT_DIR={tmp_path}/alone python train.py {shlex.join(arguments)}")
    by_hand, by_list = (torch.load(path / "best_base_model.pt", weights_only=True)["model"]
                    for path in (tmp_path / "alone", tmp_path / TRAINING / name))  # fmt: skip
    assert by_hand.keys() == by_list.keys()
    assert all(torch.equal(by_hand[key], by_list[key]) for key in by_hand)
