"""The commands in the guides that need SLURM run as printed, on a laboratory with SLURM.

The test runs the commands in groups. A group is a job, or the shell of salloc, with the commands that refer to it.
Commands that refer to a job run while it is training, with its job id in place of the one in the guides.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from test_docs import JOB, RUN, Command, every_command, unexplained
from test_guide_jobs import Project
from test_guide_on_nodes import KIT, LAB, SECONDS, shortened

WATCHED = (
    "sbatch scripts/slurm/slurm_train.sh config/quickstart.yaml"  # the job that the following commands watch and stop
)
SHELL = "salloc --nodes=2 --ntasks-per-node=1"  # opens the shell for the following commands
STOPPED = "75:0"  # ExitCode of a job that was stopped and wrote a checkpoint

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starting nodes needs root")


def group_of(command: Command) -> str:
    """Return the first command of the group to which this command belongs."""
    if command.needs.endswith("In the shell of salloc:"):
        return SHELL
    if JOB in command.words or command.words[0] == "squeue":
        return WATCHED
    return command.text


def groups(commands: list[Command]) -> list[list[Command]]:
    found: dict[str, list[Command]] = {}
    for one in commands:
        found.setdefault(group_of(one), []).append(one)
    return list(found.values())


COMMANDS = every_command(*RUN)
GROUPS = groups([one for one in COMMANDS if one.needs.startswith("# Needs a SLURM cluster.")])
# The commands that start the laboratory.
UP = [one.text for one in COMMANDS if one.needs == "# Needs root, and the programs of SLURM."]


class Cluster(Project):
    """The laboratory, and the project directory of its user."""

    def output_of(self, job: str, ending: str) -> str:
        """Return the output so far of a job, or of all elements of an array; ending is out or err."""
        return "".join(path.read_text() for path in sorted(self.directory.glob(f"logs/slurm-{job}[._]*{ending}")))

    def is_training(self, job: str, attempt: int) -> bool:
        """Whether the trainer of this attempt has started."""
        return self.output_of(job, "out").count("\nsteps ") == attempt

    def exit_codes(self, job: str) -> set[str]:
        """The exit codes of a job and its elements; empty while it has not ended."""
        printed = self.call(f"scontrol show job {job}")
        unfinished = re.search(r"JobState=(?!COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)", printed)
        return set() if unfinished else set(re.findall(r" ExitCode=(\S+)", printed))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A laboratory that is started with the commands of the guide."""
    cluster = Cluster(tmp_path_factory.mktemp("project"))
    (cluster.directory / "logs").mkdir()
    (cluster.directory / "my_job.sh").write_bytes((KIT / "scripts/slurm/slurm_train.sh").read_bytes())
    (cluster.directory / "my_train.py").write_text("import os; print('rank', os.environ['RANK'])")  # starts fast
    # As in a login shell, OMP_NUM_THREADS is not set, and SHELL names the shell that salloc starts.
    cluster.env["SHELL"] = "/bin/bash"
    cluster.env.pop("OMP_NUM_THREADS", None)
    try:
        cluster.env["SLURM_CONF"] = cluster.call("\n".join(["set -e", *UP, "printenv SLURM_CONF"])).splitlines()[-1]
        yield cluster
    finally:
        subprocess.run([LAB, "down"], env=cluster.env, check=True)


def wait_until(condition: Callable[..., object], cluster: Cluster, job: str, *arguments: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition(cluster, job, *arguments):
        if time.monotonic() > end:
            state = cluster.call(f"scontrol show job {job}; squeue; sinfo; ps -eo pid,ppid,stat,etime,wchan:20,args")
            output = cluster.output_of(job, "out") + cluster.output_of(job, "err")
            pytest.fail(f"{condition.__name__} {arguments}: not within {SECONDS} s\n{state}\n{output}")
        time.sleep(0.2)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: str(group[0]))
def test_a_command_for_slurm_succeeds(group: list[Command], cluster: Cluster) -> None:
    first, *others = group
    if first.words[0] == "sbatch":
        follow_job(first, others, cluster)
    elif first.text == SHELL:
        lines = "\n".join(shortened(one.text) for one in others)
        cluster.call(SHELL, f"(set -e\n{lines}\n) </dev/null\n")  # srun must not read the following lines
    else:
        cluster.call(first.text)


def follow_job(submission: Command, others: list[Command], cluster: Cluster) -> None:
    job = cluster.call(submission.text).split()[-1]
    attempts = 1
    for one in others:
        wait_until(Cluster.is_training, cluster, job, attempts)
        printed = cluster.call(one.text.replace(JOB, job))
        assert one.words[0] == "scancel" or job in printed, f"{one}\n{printed}"
        attempts += "--signal=USR2" in one.words
    wait_until(Cluster.exit_codes, cluster, job)
    errors = cluster.output_of(job, "err")
    stopped = any(one.script == "scripts/stop.sh" for one in others)
    assert cluster.exit_codes(job) == ({STOPPED} if stopped else {"0:0"}), errors
    assert f"verdict: {'stopped' if stopped else 'ok'}" in errors
    assert errors.count(f"requeueing job {job}") == attempts - 1
    assert cluster.output_of(job, "out").count("resuming from") == attempts - 1
    headings = ("Run directory", "Files of an attempt")
    found = unexplained(cluster.directory / f"logs/slurm-{job}", *headings)
    assert not found, "files of a run that the guide does not explain"


def test_the_guide_has_commands_for_slurm() -> None:
    """A change of the parser must not silently leave commands out."""
    assert {WATCHED, SHELL} <= {group[0].text for group in GROUPS}
    programs = {word for group in GROUPS for one in group for word in one.words}
    assert programs >= {"sbatch", "salloc", "srun", "squeue", "scontrol", "scancel"}
    assert programs >= {f"scripts/slurm/slurm_train{kind}.sh" for kind in ("", "_single_node")}
    assert programs >= {f"scripts/{name}.sh" for name in ("run_ddp", "test_distributed", "status", "stop")}
    assert UP
