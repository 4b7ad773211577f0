"""Leave-one-out cross-validation: the target and the output directory of a job.

The data has one text per participant: a domain of Python's language reference, or a file or subdirectory of a data
directory. The target is one of the participants, usually the one whose text is used for evaluation.

    participant_of({"fold": 1, "participants": ["a", "b"]}, None)   -> "b"
    output_directory({"fold": 1, "prefix": "exp1"}, "3fa2b1c09d", DEFAULT_PARTICIPANTS)
                                                                    -> "experiments/exp1/fold1_compound-statements"

train.py and the dispatcher of job lists both use this module, so that they agree. Settings are the arguments of a job
as JSON values; null and false mean that the argument is not given. Standard library only.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.files import KIT
from distributed.training.topics import DOMAINS
from distributed.trust import shown

DEFAULT_PARTICIPANTS = DOMAINS  # for train.py: groups of topics in Python's language reference
LONGEST = 200  # maximum bytes of a name in a path; file systems allow 255, and fold<N>_ may precede the name
SHOWN = 20  # names in a message
short = functools.partial(shown, length=200)  # a value in a message


def default_participants(script: str) -> Sequence[str] | None:
    """Return DEFAULT_PARTICIPANTS if a script is Muster's train.py or a link to it, and None for any other script.

    The script of a user may also be named train.py; its defaults are unknown.
    """
    try:
        return DEFAULT_PARTICIPANTS if os.path.samefile(script, os.path.join(KIT, "train.py")) else None
    except (OSError, ValueError):  # it does not exist on this machine; ValueError: a NUL character
        return None


def participant_of(settings: Mapping[str, Any], default: Sequence[str] | None) -> str | None:
    """Return the target of a job: its `participant` or, without one, participants[fold]; None when unknown.

    Args:
        default: the participants of a job that lists none; None when the script has no such list. Not used for a job
            with a `data_path`, whose participants are the files of that directory.

    Raises:
        ValueError: the fold or participant is not in the list, or the two contradict each other.
    """
    chosen, fold, listed = _name(settings, "participant"), fold_of(settings), _listed(settings)
    if chosen is None and listed is None and default and _given(settings, "data_path") is None:
        listed = list(default)
    if listed is None or (chosen is None and fold is None):
        return chosen
    if chosen is not None and chosen not in listed:
        raise ValueError(
            f"participant: expected one of the participants, got {short(chosen)}; {nearest(chosen, listed)}"
        )
    if fold is None:
        return chosen
    if fold >= len(listed):
        raise ValueError(f"fold: out of range for {len(listed)} participants: got {fold}; give 0 to {len(listed) - 1}")
    if chosen not in (None, listed[fold]):
        raise ValueError(
            f"participant: contradicts fold {fold}, which is {short(listed[fold])}: got {short(chosen)}; "
            "set only one of them"
        )
    return listed[fold]


def output_directory(settings: Mapping[str, Any], job_id: str, default_participants: Sequence[str] | None) -> str:
    """Return the output directory of a job, relative to the working directory.

    With `prefix` and `fold`: experiments/{prefix}/fold{N}_{participant}; if the participant is not known, without
    _{participant}. With `prefix` alone: experiments/{prefix}/{job id}. Otherwise: experiments/{job id}.

    Raises:
        ValueError: see participant_of(); also for a prefix or participant that cannot be part of a path.
    """
    prefix, fold = _name(settings, "prefix"), fold_of(settings)
    participant = participant_of(settings, default_participants)
    parts = [] if prefix is None else [_component("prefix", part, prefix) for part in prefix.split("/")]
    if prefix is None or fold is None:
        last = _component("job id", job_id)
    else:
        last = f"fold{fold}" if participant is None else f"fold{fold}_{_component('participant', participant)}"
    return "/".join(["experiments", *parts, last])


def fold_of(settings: Mapping[str, Any]) -> int | None:
    """Return the number of the fold; None when not given.

    Raises ValueError unless the fold is an integer from 0 to 999,999,999, or a string of its digits.
    """
    fold = _given(settings, "fold")
    if fold is None:
        return None
    if isinstance(fold, bool) or not isinstance(fold, int | str) or not re.fullmatch(r"[0-9]{1,9}", str(fold)):
        raise ValueError(f"fold: expected a non-negative integer, got {short(fold)}; the first participant is 0")
    return int(fold)


def participants_in(directory: Path) -> dict[str, Path]:
    """Return the participants of a directory by name: each *.txt file and subdirectory, except hidden ones.

    Raises ValueError when there are none, two have the same name, or the directory cannot be read.
    """
    found: dict[str, Path] = {}
    try:
        entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise ValueError(f"{directory}: cannot list participants: {error.strerror}; give a directory") from None
    for entry in entries:
        if entry.is_dir() or entry.suffix == ".txt":
            name = entry.name if entry.is_dir() else entry.stem
            if name in found:
                raise ValueError(f"{directory}: two participants named {name!r}; rename one of them")
            found[name] = entry
    if not found:
        raise ValueError(f"{directory}: no participants; expected *.txt files or subdirectories")
    return dict(sorted(found.items()))


def _given(settings: Mapping[str, Any], name: str) -> Any:
    value = settings.get(name)
    return None if value is False else value


def _name(settings: Mapping[str, Any], name: str) -> str | None:
    value = _given(settings, name)
    return None if value is None else _text(name, value)


def _text(subject: str, value: Any) -> str:
    """Convert a name to text: numbers are names too."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{subject}: expected a name, got {short(value)}; write a string")
    return str(value)


def _listed(settings: Mapping[str, Any]) -> list[str] | None:
    value = _given(settings, "participants")
    if value is None:
        return None
    names = [_text("participants", each) for each in (value if isinstance(value, list | tuple) else [value])]
    if not names:
        raise ValueError("participants: expected at least one name, got []; leave it out for the default list")
    return names


def _component(subject: str, part: str, whole: str | None = None) -> str:
    """Return `part` unchanged. Raises ValueError when it cannot be the name of a directory.

    whole: the value that contains the part, for the message; None: the part is the value.
    """
    if part in ("", ".", "..") or "/" in part or not part.isprintable() or len(part.encode()) > LONGEST:
        raise ValueError(
            f"{subject}: cannot be part of a path: got {short(part if whole is None else whole)}; use printable "
            f'characters, at most {LONGEST} bytes, without "." and ".."' + (' and without "/"' if whole is None else "")
        )
    return part


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, if any, and a list of names.

    The list has the first SHOWN known names and, if there are more, the number of the others.
    """
    near = difflib.get_close_matches(name, known, 1, 0.4)
    listed = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
    return (f"did you mean {near[0]!r}? There are " if near else "there are ") + listed
