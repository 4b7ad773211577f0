"""The commands in the guides that need several nodes run as printed, on a laboratory with the same node names.

tests/test_docs.py parses the commands, and runs those that need only one machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from test_docs import RUN, Command, every_command, example, not_printed, output_with

KIT = Path(__file__).resolve().parents[1]
LAB = KIT / "tests/lab/lab.sh"
SECONDS = 150  # timeout of a command

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting nodes needs root")


def on_nodes(command: Command) -> bool:
    return command.needs.startswith(("# Needs two nodes.", "# Needs three nodes."))


def group_of(command: Command) -> str:
    """Return the key of a group: commands with `On node1:` or `On node2:` run together, any other command alone."""
    return "by hand " + Path(command.words[0]).name if " On " in command.needs else str(command)


COMMANDS = every_command(*RUN)
GROUPS = [list(group) for _, group in groupby(filter(on_nodes, COMMANDS), group_of)]
LABORATORY = [one for one in COMMANDS if one.needs == "# Needs root."]


def make_project(directory: Path) -> Path:
    """Fill the directory like a user's copy of the repository, with the scripts that the guides mention."""
    for name in ("scripts", "distributed", "tests", "train.py"):
        (directory / name).symlink_to(KIT / name)
    copy_configs(directory / "config")
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "my_train.py").write_text(example().replace("STEPS = 300", "STEPS = 30"))
    (directory / "my_old_train.py").write_text(OLD)
    (directory / "my_hosts").write_text("node1 slots=2\nnode2\n")
    return directory


def copy_configs(directory: Path) -> None:
    """Copy config/. In quickstart.yaml, the model is small enough for many ranks on two cores; training never ends."""
    shutil.copytree(KIT / "config", directory)
    config = yaml.safe_load((directory / "quickstart.yaml").read_text())
    config["model"] |= {"n_layer": 1, "n_embd": 16}
    config["train"]["steps"] = 1_000_000
    (directory / "quickstart.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project directory, and a laboratory with three nodes."""
    directory = make_project(tmp_path_factory.mktemp("project"))
    os.environ["MUSTER_LAB"] = str(directory / "lab")
    subprocess.run([LAB, "up", "3"], check=True)
    yield directory
    subprocess.run([LAB, "down"], check=True)
    del os.environ["MUSTER_LAB"]


# A script for torch.distributed.launch, with --local-rank.
OLD = """
import argparse, os
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, required=True)
assert parser.parse_args().local_rank == int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
dist.barrier()
"""


def shortened(text: str) -> str:
    """The command, except that the smoke test of collectives measures for a shorter time."""
    return re.sub(r"(test_distributed\.sh)( --seconds \d+)?", r"\1 --seconds 0.2 --max-bytes 64K", text)


def start(command: Command, project: Path) -> subprocess.Popen[str]:
    """Start the command in the project directory, on the node that its block names."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "VIRTUAL_ENV"))}
    node = command.needs.partition(" On ")[2].rstrip(":")
    line = f"cd {project} && {shortened(command.text)}"
    program = ["ssh", node] if node else ["bash", "-c"]
    return subprocess.Popen([*program, line], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_a_command_for_nodes_has_the_exit_code_of_the_guide(group: list[Command], project: Path) -> None:
    started = [start(command, project) for command in group]
    for command, process in zip(group, started, strict=True):
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == command.exit_code, f"{command}\n{output}"


def test_the_guide_has_commands_for_nodes() -> None:
    """A change of the parser must not silently leave commands out."""
    scripts = {Path(command.words[0]).name for group in GROUPS for command in group}
    assert scripts >= {
        f"launch_{name}.sh" for name in ("torchrun_auto", "torchrun_multinode", "multinode", "pdsh_multinode")
    }
    assert scripts >= {"doctor.sh", "test_distributed.sh"}
    assert len(LABORATORY) >= 5


def test_the_refusal_of_an_unreachable_node_is_printed_as_in_the_guide(project: Path) -> None:
    [command] = [one for one in COMMANDS if one.exit_code == 69]
    process = start(command, project)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 69, output
    # Without a name server, ssh prints another error.
    output = output.replace("Temporary failure in name resolution", "Name or service not known")
    assert not not_printed(command.output, output), output


def test_a_run_with_a_stopped_rank_is_shown_as_in_the_guide(project: Path) -> None:
    launch = "scripts/ssh/launch_torchrun_auto.sh config/quickstart.yaml 2 node1 node2"
    run = start(Command("", 0, launch), project)
    assert run.stdout
    next(line for line in run.stdout if line.startswith("step "))
    document = subprocess.run(
        [project / "scripts/status.sh", "--json"], cwd=project, capture_output=True, text=True, check=True
    ).stdout
    ranks = [rank for one in json.loads(document)["nodes"] for rank in one["status"]["ranks"]]
    os.kill(next(rank["pid"] for rank in ranks if rank["rank"] == 2), signal.SIGSTOP)
    wide = os.environ | {"COLUMNS": "100"}
    status = subprocess.run([project / "scripts/status.sh"], cwd=project, capture_output=True, text=True, env=wide)
    stop = subprocess.run([project / "scripts/stop.sh", "--now", "latest"], cwd=project, capture_output=True, text=True)
    run.communicate(timeout=SECONDS)
    assert status.returncode == 1, status
    assert stop.returncode == 0, stop
    shown = output_with("is stopped (state T)")
    assert columns_of(status.stdout.splitlines()) == columns_of(shown)


def columns_of(lines: list[str]) -> list[str]:
    """Return the lines with measured values replaced by 0, durations by "0 s", and one blank between columns."""
    text = "\n".join(lines)
    text = re.sub(r"train-\d{8}-\d{6}-[0-9a-f]{4}|quickstart-\S+(?=:)", "RUN", text)
    text = re.sub(r"(?<!rank )(?<!node)\b\d[\d.,]*", "0", text)
    text = re.sub(r"\b0 (ms|s|min|h)( 0 (s|min))?\b", "0 s", re.sub(r"\b0[KMG]\b", "0G", text))
    text = re.sub(r"\b(running|waiting|busy)(?= +0%)", "running", text)
    text = re.sub(r"(?<=step)( +\S+)+", " ...", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_commands_of_the_guide_for_the_laboratory_succeed(project: Path) -> None:
    """This must be the last test of the file, because its last command removes the nodes."""
    for command in LABORATORY:
        process = start(command, project)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{command}\n{output}"
    assert not (project / "lab").exists()
