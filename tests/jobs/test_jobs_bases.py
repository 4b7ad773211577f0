"""Which jobs of a list share a base model, and which base models leak the held-out participant.

Settings that change the weights change the digest, and others do not. Unclassified keys are refused. Leaks are found.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distributed.jobs import two_phase
from distributed.jobs.lists import bases
from distributed.jobs.lists.bases import (
    BASE,
    EXPERIMENT,
    BasePlan,
    Rules,
    SharedBase,
    leaks,
    not_checked,
    plan_of,
    training_job,
)
from distributed.jobs.lists.config import BaseModels, ConfigError, read_cluster, read_entries
from distributed.jobs.lists.job import Job, JobError, Options, arguments
from distributed.jobs.schedule.base_cache import Cached
from distributed.training.fold import DEFAULT_PARTICIPANTS

FULL = {"mode": "full_fine_tuning"}
ABC = ["a", "b", "c"]


def rules(script: str = "train.py", **section: Any) -> Rules:
    return Rules.of(BaseModels(**section), script)


def jobs_of(*entries: dict[str, Any], script: str = "train.py", plain: bool = False) -> list[Job]:
    """Jobs with mode full_fine_tuning, each with its own prefix. plain: without these two settings."""
    known = DEFAULT_PARTICIPANTS if Path(script).name == "train.py" else None
    listed = [each if plain else {"prefix": f"p{number}", **FULL, **each} for number, each in enumerate(entries)]
    return read_entries(listed, "jobs.json", known)


def plan(*entries: dict[str, Any], script: str = "train.py", **section: Any) -> BasePlan:
    return plan_of(jobs_of(*entries, script=script), rules(script, **section))


def digests(*entries: dict[str, Any], script: str = "train.py", **section: Any) -> list[str]:
    return [job.base for job in plan(*entries, script=script, **section).jobs]


def refusal(*entries: dict[str, Any], **section: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        plan(*entries, **section)
    return str(refused.value).splitlines()


# ---------------------------------------------------------------- one base model, or two

SHARED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"participants": ["b", "a"]}, {"participants": ["a", "b"]}, {}),
    ({"base_participants": ["b", "a"]}, {"base_participants": ["a", "b"]}, {}),
    ({"participants": "a"}, {"participants": ["a"]}, {}),
    ({"participants": [1, 2]}, {"participants": ["2", "1"]}, {}),
    ({}, {"participants": list(DEFAULT_PARTICIPANTS)}, {}),
    ({}, {"participants": list(DEFAULT_PARTICIPANTS[::-1])}, {}),
    ({}, {"model": "small"}, {}),
    ({}, {"batch_size": 16, "lr": 3e-3, "base_steps": 300, "seed": 1337}, {}),
    ({"batch_size": 64}, {"batch_size": 64.0}, {}),
    ({"lr": json.loads("3e-4")}, {"lr": json.loads("0.0003")}, {}),
    ({"lr": 1}, {"lr": 1.0}, {}),
    ({}, {"_priority": 5, "_timeout": 7, "_gpus": 2, "_env": {"A": "b"}, "_labels": ["x"]}, {}),
    ({}, {"augmentation": None, "data_path": None, "participants": None, "lr": None}, {}),
    ({}, {"augmentation": False, "config": False}, {}),
    ({}, {"dropout": None}, {}),
    ({"fold": 0}, {"fold": 2}, {}),
    ({"fold": 0}, {"participant": DEFAULT_PARTICIPANTS[3]}, {}),
    ({"target_data_pct": 0.1, "target_batch_pct": 0.5, "steps": 7}, {"target_data_pct": 1.0, "prefix": "x"}, {}),
    ({"lr": 0.1}, {"lr": 0.2}, {"experiment": ["lr"]}),
    ({"a": 1}, {"a": 2}, {"experiment": ["a"]}),
    ({"depth": 4}, {}, {"base": ["depth"], "defaults": {"depth": 4}}),
    ({"lr": 0.5}, {}, {"defaults": {"lr": 0.5}}),
    ({}, {"seed": None}, {"defaults": {"seed": None}}),
    ({"participants": ABC}, {}, {"defaults": {"participants": ["c", "b", "a"]}}),
    ({"data_path": "d", "participants": ABC}, {"data_path": "d"}, {"defaults": {"participants": ABC}}),
    ({"config": "c.yaml", "lr": 0.5}, {"config": "c.yaml"}, {"defaults": {"lr": 0.5}}),
    # fold is a position in the participants of the job.
    ({"fold": 0, "participants": ABC}, {"fold": 2, "participants": ABC[::-1]}, {"base": ["fold"]}),
    ({"fold": 1, "participants": ABC}, {"participant": "b", "participants": ABC[::-1]}, {"base": ["fold"]}),
    ({"fold": 1, "participants": ABC}, {"fold": "1", "participant": "b", "participants": ABC}, {"base": ["fold"]}),
    ({"fold": 1, "participants": ABC}, {"participant": "b", "participants": ABC[::-1]}, {"base": ["participant"]}),
    ({"fold": 2}, {"participant": DEFAULT_PARTICIPANTS[2]}, {"base": ["fold"]}),
    ({"fold": 0, "participants": [1.0, 2.5]}, {"participant": "1.0", "participants": ["2.5", 1.0]}, {"base": ["fold"]}),
    ({"fold": 0, "data_path": "d"}, {"fold": "0", "data_path": "d"}, {"base": ["fold"]}),
    ({"data_path": "data/x"}, {"data_path": "./data//x/"}, {}),
    ({"data_path": "x"}, {"data_path": "./x/"}, {}),
    ({"config": "~/c.yaml"}, {"config": "~/./c.yaml"}, {}),
    ({"texts": ["a/b", "."]}, {"texts": ["a//b/", "./"]}, {"base": ["texts"]}),
    (
        {"o": {"n": 1, "p": "a/b"}, "_nested": "json"},
        {"o": {"n": 1.0, "p": "a/b/"}, "_nested": "dotted"},
        {"base": ["o"]},
    ),
]


@pytest.mark.parametrize(("one", "other", "section"), SHARED)
def test_jobs_share_a_base_model(one: dict[str, Any], other: dict[str, Any], section: dict[str, Any]) -> None:
    first, second = digests(one, other, **section)
    assert first == second


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"participants": ["a", "b"]}, {"participants": ["a", "b", "c"]}, {}),
    ({"participants": ["a", "b"]}, {}, {}),
    ({"participants": [1]}, {"participants": [1.0]}, {}),  # participants are names, here "1" and "1.0"
    ({"base_participants": ["a"]}, {}, {}),
    ({"model": "medium"}, {}, {}),
    ({"batch_size": 64}, {"batch_size": 65}, {}),
    ({"batch_size": 64}, {"batch_size": "64"}, {}),
    ({"lr": 3e-4}, {"lr": 3.0000001e-4}, {}),
    ({"augmentation": True}, {}, {}),
    ({"augmentation": True}, {"augmentation": 1}, {}),
    ({"augmentation": ["flip", "crop"]}, {"augmentation": ["crop", "flip"]}, {}),  # the order may matter
    ({"seed": 1}, {"seed": 2}, {}),
    ({"base_steps": 10}, {}, {}),
    ({"data_path": "d"}, {}, {}),
    ({"data_path": "d"}, {"data_path": "e"}, {}),
    ({"data_path": "d", "participants": ABC}, {"data_path": "d"}, {}),
    ({"config": "c.yaml"}, {}, {}),
    ({"config": "c.yaml"}, {"config": "c.yaml", "lr": 3e-3}, {}),  # the file may set lr
    ({"a": 1}, {"a": 2}, {"base": ["a"]}),
    ({"a": 1}, {}, {"base": ["a"]}),
    ({"steps": 1}, {"steps": 2}, {"base": ["steps"]}),
    ({"lr": 3e-3}, {}, {"defaults": {"lr": 0.5}}),
    ({"fold": 0}, {"fold": 1}, {"base": ["fold"]}),
    ({"fold": 0}, {}, {"base": ["fold"]}),
    ({"fold": 0}, {"fold": 1}, {"base": ["participant"]}),
    ({"fold": 0, "participants": ABC}, {"fold": 0, "participants": ABC[::-1]}, {"base": ["fold"]}),
    ({"fold": 0, "data_path": "d"}, {"fold": 1, "data_path": "d"}, {"base": ["fold"]}),
    ({"participant": "x", "data_path": "d"}, {"participant": "y", "data_path": "d"}, {"base": ["fold"]}),
    ({"data_path": "a/b"}, {"data_path": "/a/b"}, {}),
    ({"data_path": "a/b"}, {"data_path": "a/c/../b"}, {}),  # a/c may be a symbolic link
    ({"data_path": "s3://a/b"}, {"data_path": "s3://a//b"}, {}),
    ({"data_path": "."}, {"data_path": "/"}, {}),
    ({"o": {"n": 1}, "_nested": "json"}, {"o": {"n": 2}, "_nested": "json"}, {"base": ["o"]}),
]


@pytest.mark.parametrize(("one", "other", "section"), DIFFERENT)
def test_jobs_need_different_base_models(one: dict[str, Any], other: dict[str, Any], section: dict[str, Any]) -> None:
    first, second = digests(one, other, **section)
    assert first != second


def test_version_and_script_are_part_of_the_digest() -> None:
    found = [
        *digests({}), *digests({}, version=2), *digests({}, script="other/train.py"), *digests({}, script="mine.py"),
    ]  # fmt: skip
    assert len(set(found)) == 4
    assert digests({}, script="./train.py") == digests({})


def test_a_base_model_does_not_depend_on_the_spelling_of_the_path_of_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project/sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    (tmp_path / "project/outside").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "project")
    inside = ["mine.py", "./mine.py", "sub/../mine.py", "../project/mine.py", str(tmp_path / "project/mine.py"),
              str(tmp_path / "link/mine.py"), "../link/mine.py"]  # fmt: skip
    assert {digest for script in inside for digest in digests({}, script=script)} == {*digests({}, script="mine.py")}
    outside = ["../mine.py", str(tmp_path / "mine.py"), "sub/../../mine.py"]
    assert len({digest for script in [*outside, "mine.py"] for digest in digests({}, script=script)}) == 2
    assert rules("outside/mine.py").script == "outside/mine.py"


def test_the_content_of_a_settings_file_is_part_of_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    found = set()
    for content in ("model: small", "model: medium"):
        path.write_text(content)
        bases.content_hash_at.cache_clear()
        found |= set(digests({"config": str(path)}))
    assert len(found) == 2


def test_a_script_other_than_train_py_has_only_declared_defaults() -> None:
    assert plan({}, script="mine.py").bases[digests({}, script="mine.py")[0]].settings == {}
    made = plan({}, script="mine.py", base=["depth"], defaults={"depth": 4, "config": "x"})
    assert [dict(base.settings) for base in made.bases.values()] == [{"config": "x", "depth": 4}]


def test_a_declared_data_path_replaces_the_default_participants() -> None:
    base = next(iter(plan({}, defaults={"data_path": "d"}).bases.values()))
    assert "participants" not in base.settings
    assert base.settings["data_path"] == "d"


def test_digests_are_stable_between_versions() -> None:
    """If this fails, all users would train their base models again. Increment FORM if the canonical form changed."""
    assert bases.FORM == 1
    assert digests({}, {"fold": 1, "lr": 0.01, "model": "medium"}) == [
        "e5d65e26323121548ba79638dcb8f91417ccb32553261737a024a8fe3860bf82",
        "1d66f8bf60190b7cd0e82e215d5738f4c5b38505ee970b57064dd1a726b95acd",
    ]
    assert digests({"fold": 1}, base=["fold"], version=3) == [
        "397be54a21d2e350e20c4e1bc8201675cead1b444bd79ff9f309308dc553e21a"
    ]
    paths = {
        "data_path": "/data/x",
        "config": "~/no such/c.yaml",
        "model": "org/../model v1/2",
        "augmentation": ["a/b"],
    }
    assert digests(paths) == ["d6ddcd09c8143399c8ba1850d01673dfcc54dfaa50707b508366a2e554c25a52"]


VALUES = st.one_of(
    st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False), st.text("abcß ", max_size=4),
    st.just(True), st.lists(st.one_of(st.integers(0, 9), st.text("xyz", max_size=2)), max_size=3),
)  # fmt: skip
NAMES = st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True)
KEYS = [key for key in BASE if "participants" not in key]
SETTINGS = st.dictionaries(st.sampled_from(KEYS), VALUES)


def digest(settings: dict[str, Any], **section: Any) -> str:
    made = rules(**section)
    return made.digest(made.settings(Job("", {**settings, **FULL}, Options(), "")))


@given(settings=SETTINGS, names=NAMES, data=st.data())
def test_the_order_of_keys_and_participants_has_no_effect(
    settings: dict[str, Any], names: list[str], data: st.DataObject
) -> None:
    permuted = data.draw(st.permutations(names))
    keys = data.draw(st.permutations([*settings, "participants"]))
    other = {**settings, "participants": permuted}
    assert digest({**settings, "participants": names}) == digest({key: other[key] for key in keys})


@given(names=NAMES, data=st.data())
def test_the_digest_depends_on_the_held_out_participant_not_its_position(names: list[str], data: st.DataObject) -> None:
    other = data.draw(st.permutations(names))
    fold, second = (data.draw(st.integers(0, len(names) - 1)) for _ in range(2))
    first = digest({"participants": names, "fold": fold}, base=["fold"])
    assert (first == digest({"participants": other, "fold": second}, base=["fold"])) == (names[fold] == other[second])
    assert first == digest({"participants": other, "participant": names[fold]}, base=["fold"])


@given(settings=SETTINGS, key=st.sampled_from(KEYS), one=VALUES, other=VALUES)
def test_every_value_of_a_base_key_has_its_own_digest(settings: dict[str, Any], key: str, one: Any, other: Any) -> None:
    same_type = type(one) is type(other) or (type(one) in (int, float) and type(other) in (int, float))
    assume(not (same_type and one == other) and [] not in (one, other))
    assert digest({**settings, key: one}) != digest({**settings, key: other})


# ---------------------------------------------------------------- classes of keys


def test_an_unclassified_key_is_refused_with_one_message_for_all_its_jobs() -> None:
    many = [{"fold": fold, "prefix": "x", "dropout": 0.1} for fold in range(8)]
    assert refusal(*many) == [
        f"key 'dropout' of job x/fold0_{DEFAULT_PARTICIPANTS[0]} and 7 more: not classified; list it in base_models: "
        "under base if base models depend on it, else under experiment"
    ]
    assert plan(*many, experiment=["dropout"]).bases
    assert "did you mean 'batch_size'? Otherwise list it in base_models" in refusal({"batchsize": 3})[0]


def test_keys_of_jobs_without_a_base_model_need_no_class() -> None:
    made = plan_of(jobs_of({"dropout": 1}, {"mode": "from_scratch", "dropout": 2}, plain=True), rules())
    assert made.bases == {}
    assert [job.base for job in made.jobs] == ["", ""]
    assert refusal({"dropout": 1}, modes=None)


def test_modes_select_the_jobs_with_a_base_model() -> None:
    listed = jobs_of({"prefix": "a"}, {"prefix": "b", "mode": "tune"}, FULL, plain=True)
    assert [bool(job.base) for job in plan_of(listed, rules()).jobs] == [False, False, True]
    assert [bool(job.base) for job in plan_of(listed, rules(modes=["tune"])).jobs] == [False, True, False]
    assert [bool(job.base) for job in plan_of(listed, rules(modes=None)).jobs] == [True, True, True]


def test_a_listed_key_does_not_keep_its_default_class() -> None:
    assert {rules().key_classes[key] for key in BASE} == {"base"}
    assert {rules().key_classes[key] for key in EXPERIMENT} == {"experiment"}
    made = rules(base=["steps"], experiment=["lr", "name"])
    assert (made.key_classes["steps"], made.key_classes["lr"]) == ("base", "experiment")
    assert made.key_classes["name"] == "experiment"


@pytest.mark.parametrize(("one", "other"), [("fold", "participant"), ("participant", "fold")])
def test_listing_fold_or_participant_under_base_adds_the_other_unless_it_is_listed(one: str, other: str) -> None:
    assert rules(base=[one]).key_classes[other] == "base"
    assert rules(base=[one], experiment=[other]).key_classes[other] == "experiment"
    assert rules(experiment=[one]).key_classes[other] == "experiment"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bases": ["x"]}, "bases: unknown key; did you mean base?"),
        ({"experiments": ["x"]}, "experiments: unknown key; did you mean experiment?"),
        ({"xyz": 1}, "xyz: unknown key; known keys: base, experiment, defaults, modes, version, options"),
        ({"base": ["lr"], "experiment": ["lr"]}, "lr is listed 2 times; list it in one of base, experiment"),
        ({"base": ["lr", "lr"]}, "lr is listed 2 times"),
        ({"base": "lr"}, 'base="lr": Input should be a valid list'),
        ({"version": "2"}, 'version="2": Input should be a valid integer'),
        ({"ignored": ["xyz"]}, "base_models.ignored: list these keys under experiment"),
        ({"options": {"timeout": 5}}, "timeout: unknown key; did you mean _timeout?"),
        ({"options": {"_timeuot": 5}}, "_timeuot: unknown key; did you mean _timeout?"),
        ({"options": {"_gpus": 0}}, '_gpus=0: expected a positive integer, or "all"'),
        ({"options": {"_base_model_hash": "0" * 12}}, "_base_model_hash: not for jobs that train base models"),
    ],
)
def test_an_invalid_section_is_refused(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"servers": [{"host": "a"}], "base_models": section}))
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        read_cluster(cluster)
    assert str(refused.value).startswith(f"{cluster}: base_models")


def test_a_hash_that_does_not_match_the_settings_is_refused() -> None:
    right = digests({})[0][:12]
    assert digests({"_base_model_hash": right}) == digests({})
    assert plan({}).jobs[0].options.base_model_hash == right
    assert refusal({"_base_model_hash": "0" * 12})[0].endswith(
        f": _base_model_hash=000000000000, but its settings give {right}; remove it"
    )


def test_a_job_whose_mode_needs_no_base_model_keeps_the_one_that_it_names() -> None:
    (job,) = jobs_of({"mode": "single"})
    made = plan_of([replace(job, base="f" * 64)], rules())
    assert ([each.base for each in made.jobs], made.bases) == (["f" * 64], {})


def test_contradictory_settings_are_refused_with_the_name_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    message = "p0/fold3: fold: out of range for 1 participants: got 3; give 0 to 0"
    assert refusal({"fold": 3, "data_path": str(tmp_path)}) == [message]
    listed = jobs_of({"fold": 3}, script="mine.py")
    with pytest.raises(ConfigError, match=r"p0/fold3: fold: out of range for 3 participants"):
        plan_of(listed, rules("mine.py", defaults={"participants": ABC}))


# ---------------------------------------------------------------- leaks


def leaking(*entries: dict[str, Any], script: str = "train.py", **section: Any) -> list[str]:
    return leaks(plan(*entries, script=script, **section))


def test_a_held_out_participant_in_the_training_data_is_a_leak() -> None:
    name = next(iter(plan({}).bases.values())).name
    assert leaking({"fold": 1}, {}, {"participant": "types"}) == [
        f"p0/fold1_compound-statements: holds out compound-statements, and its base model {name} is trained on it",
        f"p2/{jobs_of({}, {}, {'participant': 'types'})[2].id}: holds out types, and its base model {name} is trained "
        "on it",
    ]


@pytest.mark.parametrize(
    ("entry", "section", "leak"),
    [
        ({"fold": 0, "participants": ABC}, {}, "a"),
        ({"fold": 0}, {"base": ["fold"]}, None),
        ({"participant": "b", "participants": ABC}, {"base": ["fold"]}, None),
        ({"participant": "b", "participants": ABC}, {"base": ["participant"]}, None),
        ({"participant": "b", "participants": ABC}, {"base": ["fold"], "experiment": ["participant"]}, "b"),
        ({"fold": 0, "participants": ABC, "base_participants": ["b", "c"]}, {}, None),
        ({"fold": 0, "participants": ABC, "base_participants": ["x"]}, {}, None),
        ({"fold": 0, "participants": ABC, "base_participants": "a"}, {}, "a"),
        ({"fold": 1, "participants": ABC, "base_participants": ABC}, {"base": ["fold"]}, "b"),
        ({"participants": ABC}, {}, None),
        ({"fold": 0}, {"defaults": {"participants": ABC}}, "a"),
        ({"fold": 0}, {"defaults": {"participants": ABC, "base_participants": ["b"]}}, None),
    ],
)
def test_a_leak_is_reported_exactly_if_the_base_model_is_trained_on_the_held_out_participant(
    entry: dict[str, Any], section: dict[str, Any], leak: str | None
) -> None:
    found = leaking(entry, script="mine.py", **section)
    assert [line.partition("holds out ")[2].partition(",")[0] for line in found] == ([leak] if leak else [])
    assert not not_checked(plan(entry, script="mine.py", **section), rules("mine.py", **section))


def test_leaks_are_found_in_the_files_of_a_data_path(tmp_path: Path) -> None:
    for name in ("a.txt", "c.txt", ".hidden.txt", "notes.md"):
        (tmp_path / name).touch()
    (tmp_path / "b").mkdir()
    entry = {"data_path": str(tmp_path)}
    found = leaking({**entry, "fold": 1}, {**entry, "participant": "c"}, entry)
    assert [line.partition("holds out ")[2].partition(",")[0] for line in found] == ["b", "c"]
    assert not leaking({**entry, "fold": 1}, {**entry, "participant": "c"}, base=["fold"])
    assert not leaking({**entry, "fold": 1, "base_participants": ["a"]})
    assert leaking({**entry, "fold": 1, "participants": ["a", "c"]})[0].startswith("p0/fold1_c: holds out c")


def test_a_base_model_with_unknown_participants_is_reported_as_not_checked(tmp_path: Path) -> None:
    entry = {"data_path": str(tmp_path / "none"), "fold": 0}
    made = plan(entry)
    assert leaks(made) == []
    assert [base.name for base in not_checked(made, rules())] == [base.name for base in made.bases.values()]
    known = plan({**entry, "participants": ABC})
    assert not not_checked(known, rules())
    assert not_checked(plan({"fold": 0}, script="mine.py"), rules("mine.py"))
    assert not not_checked(plan({"data_path": entry["data_path"]}), rules())  # no held-out participant
    assert not not_checked(plan(entry, base=["fold"]), rules(base=["fold"]))


# ---------------------------------------------------------------- the jobs that train base models


def only(made: BasePlan) -> SharedBase:
    assert len(made.bases) == 1
    return next(iter(made.bases.values()))


def test_a_base_model_is_trained_with_exactly_the_settings_of_its_digest() -> None:
    base = only(plan({"fold": 1, "lr": 0.010, "batch_size": 64.0, "participants": ["b", "a"], "steps": 9}))
    job = training_job(base, rules())
    assert job.settings == {
        "mode": "base_only", "participants": ["a", "b"], "lr": 0.01, "batch_size": 64, "model": "small",
        "base_steps": 300, "seed": 1337,
    }  # fmt: skip
    assert (job.trains, job.base) == (base.digest, "")
    assert job.output == f"experiments/base_training/{base.name}"
    assert job.name == f"base_training/{base.name}"
    again = training_job(only(plan({"lr": 0.010, "batch_size": 64, "participants": ["a", "b"]})), rules())
    assert (again.id, again.output) == (job.id, job.output)
    assert training_job(only(plan({}, version=2)), rules(version=2)).id != training_job(only(plan({})), rules()).id


def test_a_base_training_has_mode_base_only_even_if_mode_is_a_base_key() -> None:
    assert training_job(only(plan({}, base=["mode"])), rules(base=["mode"])).settings["mode"] == "base_only"


def test_a_base_training_defaults_to_gpus_labels_and_env_of_its_first_job_and_the_highest_priority() -> None:
    entries: list[dict[str, Any]] = [
        {"_gpus": 2, "_labels": ["x"], "_env": {"A": "1"}, "_timeout": 5, "_retries": 7, "_priority": -1},
        {"_gpus": 4, "_priority": 3, "_expected_seconds": 9},
    ]
    inherited = training_job(only(plan(*entries)), rules(), retries=2).options
    assert (inherited.gpus, inherited.labels, inherited.env) == (2, ("x",), {"A": "1"})
    assert (inherited.timeout, inherited.retries, inherited.priority) == (None, 2, 3)
    assert (inherited.expected_seconds, inherited.base_model_hash) == (None, None)
    plain = {"_gpus": 1, "_labels": [], "_env": {}, "_timeout": 8, "_retries": 0, "_priority": 0}
    section: dict[str, Any] = {"options": {**plain, "_expected_seconds": 60}}
    own = training_job(only(plan(*entries, **section)), rules(**section), retries=2).options
    assert (own.gpus, own.labels, own.env, own.timeout, own.retries, own.priority) == (1, (), {}, 8, 0, 0)
    assert own.expected_seconds == 60
    assert training_job(only(plan(*entries)), rules()).options.retries == 1


def test_a_base_training_writes_paths_and_nested_values_as_its_first_job_does() -> None:
    spellings = ["./data//x/", "data/x"]
    entries = [{"data_path": path, "o": {"lr": 0.5}, "_nested": "dotted"} for path in spellings]
    one, other = (training_job(only(plan(*each, base=["o"])), rules(base=["o"])) for each in (entries, entries[::-1]))
    assert [one.settings["data_path"], other.settings["data_path"]] == spellings
    assert (one.id, one.output) == (other.id, other.output), "so that the output directory has one owner"
    assert "--o.lr" in arguments(one, "cpu")
    first, second = jobs_of(*entries)
    assert bases.differences(first, second, rules(base=["o"])) == [("prefix", "experiment", '"p0"', '"p1"')]


def test_a_default_that_cannot_be_an_argument_is_refused() -> None:
    section: dict[str, Any] = {"defaults": {"augmentation": {"flip": 1}}}
    with pytest.raises(JobError, match="augmentation: contains an object; set _nested"):
        training_job(only(plan({}, **section)), rules(**section))


# ---------------------------------------------------------------- what jobs differ in, and what sharing saves


def test_differences_list_base_keys_first() -> None:
    one, other = jobs_of({"fold": 0, "lr": 0.1}, {"fold": 1, "batch_size": 16, "steps": 5, "participants": None})
    assert bases.differences(one, other, rules(base=["fold"])) == [
        ("held-out", "base", '"special-methods"', '"compound-statements"'),
        ("lr", "base", "0.1", "0.003"),
        ("prefix", "experiment", '"p0"', '"p1"'),
        ("steps", "experiment", "-", "5"),
    ]
    assert bases.differences(one, one, rules()) == []


def test_the_report_counts_trainings_gpu_hours_and_copies() -> None:
    section: dict[str, Any] = {"options": {"_expected_seconds": 1800}}
    made = plan({"_gpus": 4}, {}, {}, {"lr": 1}, {"lr": 1}, {"lr": 2}, **section)
    assert [len(base.jobs) for base in made.bases.values()] == [3, 2, 1]
    # sharing saves two trainings on 4 GPUs and one on 1 GPU; each takes half an hour
    reports = ["\n".join(two_phase.report(made, rules(**section), {}, servers)) for servers in (1, 2, 9)]
    assert all(" 3 by sharing (4.5 GPU hours), 0 by the cache\n" in each for each in reports)
    assert [re.findall("at most (.), to", each) for each in reports] == [["3"], ["5"], ["6"]]
    assert two_phase.saved(list(made.bases.values()), rules()).startswith("GPU hours unknown")


@pytest.mark.parametrize("prefix", ["base_models", "base_models/3fa2b1c09d12", "base_training/3fa2b1c09d12"])
@pytest.mark.parametrize("mode", ["full_fine_tuning", "single"])
def test_a_job_cannot_write_to_the_directories_of_base_models(prefix: str, mode: str) -> None:
    [line] = refusal({"prefix": prefix, "mode": mode, "fold": 1}, base=["fold"])
    assert line.endswith(" is reserved for base models; change the prefix of the job")


@pytest.mark.parametrize("key", ["lrr", "steps", "_timeout"])
def test_a_default_of_a_non_base_key_is_refused(key: str) -> None:
    [line] = refusal({}, defaults={key: 1})
    assert line.startswith(f"base_models: defaults: {key}: not a base key")


def test_settings_of_a_base_model_have_no_line_breaks_and_no_control_characters() -> None:
    cached = Cached("a" * 12, "", {"settings": {"\x1b]0;x\x07k\n": "\x1b[2Jdamaged:\n" + "x" * 5000}})
    [(name, value)] = two_phase.settings_of(cached).items()
    assert (name, value[:9], len(value)) == ("k ", "damaged: ", 996)
