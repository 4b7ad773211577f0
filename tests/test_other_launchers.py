"""docs/other_launchers.md says what muster run does with each option of torchrun and other launchers, and is true."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

KIT = Path(__file__).resolve().parents[1]
PAGE = (KIT / "docs/other_launchers.md").read_text()
FLAGS = ("--standalone", "--quiet")
VALUES = {
    "--nproc-per-node": "1",
    "--max-restarts": "0",
    "--master-port": "29431",
    "--rdzv-endpoint": "localhost:29400",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """(launcher, option and value of a row, what the row says)."""
    for section in PAGE.split("\n## ")[1:]:
        for cells in re.findall(r"^\| (`.+?) \| (.+) \|$", section, re.MULTILINE):
            for option in re.findall(r"`([^`]+)`", cells[0]):
                yield section.split("\n")[0], option, cells[1]


ROWS = list(rows())


def test_the_page_has_every_option_of_the_installed_torchrun() -> None:
    listed = {option.split(" ")[0] for launcher, option, _ in ROWS if launcher == "torchrun"}
    parsed = {name for action in get_args_parser()._actions for name in action.option_strings if "_" not in name}
    assert parsed - {"-h", "--help"} == listed


@pytest.mark.parametrize(("launcher", "option", "answer"), ROWS)
def test_an_option_is_taken_or_refused_with_a_remedy_as_the_page_says(
    launcher: str, option: str, answer: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    name, _, value = option.partition(" ")
    if name in ("-m", "--module"):
        call = [name, "script", "--y"]
    else:
        value = value.replace("HOST", "node1").replace("PORT", "29400")
        value = value or VALUES.get(name.replace("_", "-"), "hosts" if name == "--hostfile" else "1")
        call = [name, *([] if name in FLAGS else [value]), "script.py", "--y"]
    done = subprocess.run(
        [str(KIT / "scripts/muster"), "run", "--dry-run", "-n", "1", "--no-preflight", *call], cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if not answer.startswith("refused: "):
        assert done.returncode == 0, done.stderr
        assert re.search(r"script(\.py)? --y", done.stdout + done.stderr)
        return
    assert done.returncode == 2, done.stderr
    message = done.stderr.splitlines()[0]
    assert re.fullmatch(r"muster run: -[\w-]+( \S+)?: (unknown option; use|(?!unknown)).+", message)
    remedies = set(re.findall(r"--?[a-zA-Z][\w-]+|`Accelerator`|CUDA_VISIBLE_DEVICES|~/.ssh/config", answer))
    assert not remedies or any(each.strip("`") in message for each in remedies | {"--nproc"}), message
