"""What the guides say of several nodes is so: their commands are run as they are printed, on nodes named as there.

The laboratory is raised for it; tests/test_docs.py reads the commands and runs those that need one machine alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from test_docs import RUN, Command, every_command, example

KIT = Path(__file__).resolve().parents[1]
LAB = KIT / "tests/lab/lab.sh"
SECONDS = 150  # after which a command counts as hanging

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="raising nodes needs root")


def on_nodes(command: Command) -> bool:
    return command.needs.startswith(("# Needs two nodes.", "# Needs three nodes."))


def place(command: Command) -> str:
    """The section that says `On node1:` and `On node2:`, whose commands belong together; else the command alone."""
    return "by hand " + Path(command.words[0]).name if " On " in command.needs else str(command)


COMMANDS = every_command(*RUN)
GROUPS = [list(group) for _, group in groupby(filter(on_nodes, COMMANDS), place)]
LABORATORY = [one for one in COMMANDS if one.needs == "# Needs root."]


def lay_desk(folder: Path) -> Path:
    """The kit's folder as somebody has it who has installed it, with scripts of his own."""
    for name in ("scripts", "distributed", "tests", "train.py"):
        (folder / name).symlink_to(KIT / name)
    lay_configs(folder / "config")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my_train.py").write_text(example())
    (folder / "my_old_train.py").write_text(OLD)
    (folder / "my_hosts").write_text("node1 slots=2\nnode2\n")
    return folder


def lay_configs(folder: Path) -> None:
    """As in the kit, but the first training has a model that two cores compute for many ranks, and comes to no end."""
    shutil.copytree(KIT / "config", folder)
    config = yaml.safe_load((folder / "quickstart.yaml").read_text())
    config["model"] |= {"n_layer": 1, "n_embd": 16}
    config["train"]["steps"] = 1_000_000
    (folder / "quickstart.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With three nodes."""
    folder = lay_desk(tmp_path_factory.mktemp("desk"))
    os.environ["MUSTER_LAB"] = str(folder / "lab")
    subprocess.run([LAB, "up", "3"], check=True)
    yield folder
    subprocess.run([LAB, "down"], check=True)
    del os.environ["MUSTER_LAB"]


# As scripts were when torch.distributed.launch was the way.
OLD = """
import argparse, os
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, required=True)
assert parser.parse_args().local_rank == int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
dist.barrier()
"""


def start(command: Command, desk: Path) -> subprocess.Popen[str]:
    """Type it, on the node on which it is to be typed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "VIRTUAL_ENV"))}
    where = command.needs.partition(" On ")[2].rstrip(":")
    line = f"cd {desk} && {command.text}"
    words = ["ssh", where, line] if where else ["bash", "-c", line]
    return subprocess.Popen(words, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_a_command_for_nodes_does_what_the_guide_says(group: list[Command], desk: Path) -> None:
    started = [start(command, desk) for command in group]
    for command, process in zip(group, started, strict=True):
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == command.exit_code, f"{command}\n{said}"


def test_the_guide_has_commands_for_nodes() -> None:
    """So that a change of the reading above does not silently leave them out."""
    scripts = {Path(command.words[0]).name for group in GROUPS for command in group}
    assert scripts >= {
        f"launch_{name}.sh" for name in ("torchrun_auto", "torchrun_multinode", "multinode", "pdsh_multinode")
    }
    assert scripts >= {"doctor.sh", "test_distributed.sh"}
    assert len(LABORATORY) >= 5


def test_the_laboratory_of_the_guide(desk: Path) -> None:
    """Last, as its last command takes the nodes down."""
    for command in LABORATORY:
        process = start(command, desk)
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{command}\n{said}"
    assert not (desk / "lab").exists()
