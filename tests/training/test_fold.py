"""Tests of the held-out participant and the output directory, which trainer and dispatcher both derive from settings.

An invalid fold, participant or prefix is an error of one line that names the value and the remedy. An output directory
is always below experiments/.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.training.fold import DEFAULT_PARTICIPANTS, output_directory, participant_of, participants_in

KIT = Path(__file__).resolve().parents[2]
ABC = ("a", "b", "c")


@pytest.mark.parametrize(
    ("settings", "default", "expected"),
    [
        ({}, ABC, None),
        ({"participants": ["x", "y"]}, ABC, None),
        ({"fold": 1}, ABC, "b"),
        ({"fold": "1"}, ABC, "b"),
        ({"fold": 0}, None, None),
        ({"fold": 7, "participant": "p"}, None, "p"),
        ({"fold": 1, "participants": ["x", "y"]}, ABC, "y"),
        ({"fold": 1, "participants": ["x", "y"]}, None, "y"),
        ({"fold": 0, "participants": "x"}, None, "x"),
        ({"fold": 1, "participants": [1, 2, 3]}, None, "2"),
        ({"participant": "y", "participants": ["x", "y"]}, ABC, "y"),
        ({"participant": 2, "participants": [1, 2, 3]}, None, "2"),
        ({"fold": 1, "participant": "y", "participants": ["x", "y"]}, None, "y"),
        ({"fold": 0, "participant": "p"}, ABC, "p"),  # p is not in the default list, but the script may accept it
        ({"fold": 1, "data_path": "books"}, ABC, None),
        ({"fold": 1, "data_path": "books", "participants": ["x", "y"]}, ABC, "y"),
        ({"fold": 1, "participant": None, "participants": False, "data_path": None}, ABC, "b"),
        ({"fold": None, "participant": False}, ABC, None),
    ],
)
def test_the_participant_is_the_named_one_or_that_of_the_fold(
    settings: dict[str, Any], default: tuple[str, ...] | None, expected: str | None
) -> None:
    assert participant_of(settings, default) == expected


@pytest.mark.parametrize(
    ("settings", "default", "expected"),
    [
        ({"fold": 1, "prefix": "exp1"}, ABC, "experiments/exp1/fold1_b"),
        ({"fold": "1", "prefix": "exp1", "lr": 0.1}, ABC, "experiments/exp1/fold1_b"),
        ({"fold": 1, "prefix": "exp1"}, None, "experiments/exp1/fold1"),
        ({"fold": 1, "prefix": "exp1", "participant": "p 2"}, None, "experiments/exp1/fold1_p 2"),
        ({"fold": 1, "prefix": "exp1", "participants": ["x", "y"]}, None, "experiments/exp1/fold1_y"),
        ({"fold": 1, "prefix": "exp1", "data_path": "books"}, ABC, "experiments/exp1/fold1"),
        ({"fold": 1, "prefix": "2026/größe/-x"}, ABC, "experiments/2026/größe/-x/fold1_b"),
        ({"fold": 1, "prefix": 7}, ABC, "experiments/7/fold1_b"),
        ({"prefix": "exp1"}, ABC, "experiments/exp1/3fa2b1c09d"),
        ({"prefix": "exp1", "participant": "b"}, ABC, "experiments/exp1/3fa2b1c09d"),
        ({"prefix": "exp1", "fold": None}, ABC, "experiments/exp1/3fa2b1c09d"),
        ({"fold": 1}, ABC, "experiments/3fa2b1c09d"),
        ({"fold": 1, "prefix": False}, ABC, "experiments/3fa2b1c09d"),
        ({}, None, "experiments/3fa2b1c09d"),
    ],
)
def test_the_output_directory_is_named_after_the_fold_or_the_job(
    settings: dict[str, Any], default: tuple[str, ...] | None, expected: str
) -> None:
    assert output_directory(settings, "3fa2b1c09d", default) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fold": 3}, "fold: out of range for 3 participants: got 3; give 0 to 2"),
        ({"fold": 2, "participants": ["x", "y"]}, "fold: out of range for 2 participants: got 2; give 0 to 1"),
        *(
            ({"fold": fold}, f"fold: expected a non-negative integer, got {fold!r}; the first participant is 0")
            for fold in (-1, "-1", 1.0, True, "x", "", "٣", "1e3", [0], "1" * 10)
        ),
        ({"participant": "bb", "participants": list(ABC)},
         "participant: expected one of the participants, got 'bb'; did you mean 'b'? There are a, b, c"),
        ({"participant": "zz", "participants": [f"n{i:02}" for i in range(30)]},
         "participant: expected one of the participants, got 'zz'; there are n00, n01, n02, n03, n04, n05, n06, "
         "n07, n08, n09, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19 and 10 more"),
        ({"fold": 0, "participant": "b", "participants": list(ABC)},
         "participant: contradicts fold 0, which is 'a': got 'b'; set only one of them"),
        ({"fold": 0, "participants": []}, "participants: expected at least one name, got []; leave it out for the "),
        ({"fold": 0, "participants": [None]}, "participants: expected a name, got None; write a string"),
        ({"fold": 0, "participants": {"a": 1}}, "participants: expected a name, got {'a': 1}; write a string"),
        ({"participant": ["a"]}, "participant: expected a name, got ['a']; write a string"),
        ({"prefix": True}, "prefix: expected a name, got True; write a string"),
        ({"prefix": {"x" * 500: 1}}, "prefix: expected a name, got {'xxxx"),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_value_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        output_directory(settings, "3fa2b1c09d", ABC)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


UNSAFE = ["", ".", "..", "a\0b", "a\nb", "\x1b[0m", "\u202ex", "\ud800", "x" * 201, "ß" * 101]


@pytest.mark.parametrize("name", [*UNSAFE, "a/b", "/a", "a/", "../x"])
def test_a_participant_that_cannot_name_a_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="participant: cannot be part of a path: got "):
        output_directory({"fold": 0, "prefix": "p", "participant": name}, "id", None)


@pytest.mark.parametrize("prefix", [*UNSAFE, "/a", "a/", "a//b", "../x", "a/../b", "a/..", "./a"])
def test_a_prefix_outside_experiments_or_that_cannot_be_a_path_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix: cannot be part of a path: got "):
        output_directory({"prefix": prefix}, "id", None)


texts = st.text(max_size=12) | st.lists(st.sampled_from(["a", ".", "..", "/", "\0", "fold0_"]), max_size=6).map("".join)
values = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(texts, max_size=3)


@given(prefix=values, fold=values, participant=values, participants=values, job=texts)
def test_any_output_directory_is_below_experiments(
    prefix: Any, fold: Any, participant: Any, participants: Any, job: str
) -> None:
    settings = {"prefix": prefix, "fold": fold, "participant": participant, "participants": participants}
    try:
        found = output_directory(settings, job, ABC)
    except ValueError:
        return
    assert found.isprintable()
    first, *rest = found.split("/")
    assert first == "experiments"
    assert rest and not {"", ".", ".."} & set(rest)


# ---------------------------------------------------------------- a directory of participants


def test_text_files_and_subdirectories_are_participants(tmp_path: Path) -> None:
    for name in ("s10.txt", "s2.txt", "notes.md", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    for name in ("s1", ".git"):
        (tmp_path / name).mkdir()
    assert participants_in(tmp_path) == {
        "s1": tmp_path / "s1", "s10": tmp_path / "s10.txt", "s2": tmp_path / "s2.txt",
    }  # fmt: skip
    assert list(participants_in(tmp_path)) == ["s1", "s10", "s2"]


def test_a_directory_without_participants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/.*: no participants; expected \*\.txt files or subdirectories"):
        participants_in(tmp_path)
    with pytest.raises(ValueError, match=r"/nowhere: cannot list participants: No such file or directory; give a dir"):
        participants_in(tmp_path / "nowhere")
    (tmp_path / "s1.txt").touch()
    with pytest.raises(ValueError, match=r"/s1.txt: cannot list participants: Not a directory; give a directory"):
        participants_in(tmp_path / "s1.txt")
    (tmp_path / "s1").mkdir()
    with pytest.raises(ValueError, match=r"/.*: two participants named 's1'; rename one of them"):
        participants_in(tmp_path)


def test_the_default_participants_are_known_without_pytorch() -> None:
    code = "import sys, distributed.training.fold as f; print(*f.DOMAINS); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=KIT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == list(DEFAULT_PARTICIPANTS)
    assert DEFAULT_PARTICIPANTS[0] == "special-methods"
