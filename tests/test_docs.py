"""The guides agree with the code.

Commands are run, some with --dry-run. A command that needs special hardware is not run, but its scripts and options
must exist. A printed output has the lines that its command prints today; only names of machines and runs, paths,
process ids, ports and measured values may differ. The sources contain the messages that TROUBLESHOOTING.md explains.
Tables of settings, options, files and exit codes agree with the code. Links have a target. The example script trains
and resumes. The arithmetic in each config is correct.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import test_cluster
import yaml
from conftest import tracked
from pydantic import BaseModel
from test_house import SCRIPTS, modules, name_of, package_of

from distributed.jobs.lists import bases
from distributed.jobs.lists import config as jobs_config
from distributed.launch.forwarding import FORWARDED
from distributed.training import settings as train_settings
from distributed.training.fold import DEFAULT_PARTICIPANTS

KIT = Path(__file__).resolve().parents[1]
GUIDES = ("README.md", "LAUNCH_GUIDE.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
RUN = ("README.md", "LAUNCH_GUIDE.md")  # the guides whose commands are run, see without_effects()
CONFIGS = [path.name for path in tracked("config/*.yaml")]
COMMAND_TIMEOUT = 300  # seconds; a busy machine needs 30 for each training

# Scripts with --dry-run.
LAUNCHERS = (
    "launch_singlenode.sh", "launch_torchrun_auto.sh", "launch_torchrun_multinode.sh", "launch_multinode.sh",
    "launch_pdsh_multinode.sh", "run.sh", "train.sh", "run_ddp.sh", "quickstart.sh", "test_distributed.sh", "doctor.sh",
)  # fmt: skip
SLURM = ("scripts/slurm/slurm_train_single_node.sh", "scripts/slurm/slurm_train.sh")
RUN_TOOLS = tuple(
    f"scripts/{name}.sh" for name in ("status", "stop", "report", "ls", "logs")
)  # run unchanged, on an ended run
TORCHRUN_OPTIONS = ("--standalone", "--nproc-per-node")  # in examples of run.sh
JOBS = "scripts/jobs/run_distributed_training.py"
TWO_PHASE = "scripts/jobs/run_two_phase_training.py"
HELPER = "scripts/jobs/distributed_train_helper.py"
JOB = "4711"  # the job id in the guides
HARMLESS_MODULES = ("checkpoint.directory", "verdict.verdict")  # they start nothing
SYSTEM_PROGRAMS = {
    *("cd", "cp", "df", "env", "export", "find", "free", "git", "ip", "less", "ls", "mkdir", "mpirun", "mv"),
    *("nvidia-smi", "pip", "pipx", "python"),
    *("sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "source", "squeue", "srun"),
    *("scripts/muster", "ss", "ssh", "sudo", "tail", "tensorboard", "torchfrtrace", "torchrun", "unset", "uv", "wandb"),
}
VERBS = {"help": "scripts/muster help"} | {
    found[1]: str(path.relative_to(KIT))
    for path in tracked("scripts/*.sh", "scripts/*/*")
    if (found := re.search(r" muster ([a-z-]+) \.\.\.", path.read_text()))
}


# ---------------------------------------------------------------- read the guides


@dataclass(frozen=True)
class Command:
    """One command of a guide."""

    file: str
    line: int
    text: str
    needs: str = ""  # the comment "# Needs ..." of its block
    exit_code: int = 0
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without variables before them."""
        words = shlex.split(self.text, comments=True)
        return words[len(self.variables) :]

    @property
    def variables(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for word in shlex.split(self.text, comments=True):
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                break
            found[name] = value
        return found

    @property
    def script(self) -> str | None:
        """The script in scripts/ that the command calls, directly or as an argument of another program."""
        paths = (word for word in self.words if word.startswith("scripts/") and not word.startswith("scripts/lib/"))
        return next((word for word in paths if word.endswith((".sh", ".py"))), None)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@cache
def text_of(name: str) -> str:
    return (KIT / name).read_text()


def blocks(name: str, *languages: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the fenced code blocks of a guide: the number of the first line, and the lines."""
    lines, inside = text_of(name).splitlines(), None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if inside is None:
            inside = number
        else:
            if lines[inside - 1][3:] in languages:
                yield inside + 1, lines[inside : number - 1]
            inside = None
    assert inside is None, f"{name}:{inside}: this block is not closed"


def commands(name: str) -> Iterator[Command]:
    for first, lines in blocks(name, "bash"):
        needs = lines[0] if lines[0].startswith("# Needs ") else ""
        for number, line in enumerate(lines, first):
            if line and not line.startswith("#"):
                yield Command(name, number, by_path(line), needs)
    for first, lines in blocks(name, "console"):
        yield from transcript(name, first, lines)


def by_path(command: str) -> str:
    """A command that names a program of Muster by its path in place of its verb."""
    return re.sub(r"^muster (\S+)", lambda found: VERBS.get(found[1], found[0]), command)


def transcript(name: str, first: int, lines: list[str]) -> Iterator[Command]:
    """Yield the commands after $, each with its output, and the exit code if `echo $?` follows."""
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        following = lines[end : end + 2]
        code = int(following[1]) if following[:1] == ["$ echo $?"] else 0
        if lines[start] != "$ echo $?":
            yield Command(name, first + start, by_path(lines[start][2:]), "", code, tuple(lines[start + 1 : end]))


def every_command(*names: str) -> list[Command]:
    """Return the commands of the guides, each once."""
    found = {(one.text, one.output): one for name in reversed(names) for one in commands(name)}
    return sorted(found.values(), key=lambda one: (one.file, one.line))


def table(name: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading, without the table's header."""
    text = text_of(name)
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, f"{name} has no heading {heading!r}"
    rows = re.search(r"(?:^\|.*\n)+", text[start.end() :], re.MULTILINE)
    assert rows, f"{name}: no table below {heading!r}"
    # \| is a | within a cell.
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in rows[0].splitlines()[2:]
    ]


def unquoted(cell: str) -> str:
    return cell.strip("`")


# ---------------------------------------------------------------- run the commands


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's copy of the repository, with the files that the guides mention and one finished run."""
    directory = tmp_path_factory.mktemp("project")
    for name in ("scripts", "config", "distributed", "train.py", "README.md", "requirements-trackers.txt"):
        (directory / name).symlink_to(KIT / name)
    (directory / "my_train.py").write_text(example())
    for name in ("my_old_train.py", "wandb.env"):
        (directory / name).touch()
    (directory / "make_jobs.py").write_text(example("Write my_jobs.json"))
    (directory / "jobs_config.json").write_text('[{"lr": 0.003}]')
    (directory / "cluster_config.json").write_bytes((KIT / "config/cluster_config.json").read_bytes())
    (directory / "my.yaml").write_text("{}\n")
    (directory / "my_hosts").write_text("node1 slots=4\nnode2\n")
    for corpus in ("books", "data/openwebtext", "data/tokens"):
        (directory / corpus).mkdir(parents=True)
    assert call(directory, ["python", "make_jobs.py"]).returncode == 0
    training = "scripts/ssh/launch_singlenode.sh config/quickstart.yaml 2"
    assert training in {one.text for one in every_command("README.md")}
    short = ["train.steps=2", "train.evaluate_windows=8", "logging.sample=0"]
    done = call(directory, [*training.split(), "--", *short])
    assert done.returncode == 0, done.stderr
    return directory


def call(directory: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the virtual environment of this Python active, as on a machine without a GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MUSTER_"))}
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    active = {"VIRTUAL_ENV": sys.prefix, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    active["MUSTER_FORWARD"] = "-*"  # a user of the guides has exported nothing
    env = inherited | active | variables
    return subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False
    )


def without_effects(command: list[str]) -> list[str] | None:
    """Return the command in a form that starts no training and installs nothing, or None if there is none."""
    if JOB in command or "--slurm" in command:
        return None
    unchanged = command[0] in ("scripts/muster", *RUN_TOOLS) or module_of(command) in HARMLESS_MODULES
    if unchanged or command == ["scripts/doctor.sh"]:
        return command
    if Path(command[0]).name in LAUNCHERS and command[0] != "tests/run.sh":
        # The nodes of the guides do not exist.
        no_preflight = ["--no-preflight"] if "--no-preflight" in help_of(command[0]) else []
        return [command[0], "--dry-run", *no_preflight, *command[1:]]
    if HELPER in command or command[:3] == ["python", TWO_PHASE, "cache"]:
        return command
    if {JOBS, TWO_PHASE} & set(command) and "--jobs-config" in command:
        return [*command, "--plan"]
    return None


def jobs_program(command: Command) -> bool:
    """Return whether the command calls the program for job lists."""
    return command.script == JOBS


def module_of(command: list[str]) -> str | None:
    """Return the module of the package that `python -m` runs."""
    starts = command[:2] == ["python", "-m"] and command[2].startswith("distributed.")
    return command[2].removeprefix("distributed.") if starts else None


@cache
def help_of(script: str) -> str:
    """Return the help of a script, with that of the scripts to whose options it refers."""
    program = [sys.executable] if script.endswith(".py") else []
    option = "--help-all" if "  --help-all " in text_of(script) else "--help"
    text = subprocess.run([*program, KIT / script, option], capture_output=True, text=True, check=True).stdout
    if script == TWO_PHASE:
        return text + help_of(JOBS)
    if script.endswith(("run_ddp.sh", "test_distributed.sh")):
        return text + help_of("scripts/ssh/launch_singlenode.sh")
    return text


RUNNABLE = [one for one in every_command(*RUN) if without_effects(one.words)]


@pytest.mark.parametrize("command", RUNNABLE, ids=str)
def test_a_command_has_the_exit_code_and_output_of_the_guide(command: Command, project: Path) -> None:
    words = without_effects(command.words)
    assert words
    if "--dry-run" in command.words:
        words.remove("--dry-run")
    done = call(project, words, **command.variables)
    if words[0] != "scripts/doctor.sh":  # its exit code depends on this machine
        assert done.returncode == 0, done.stderr
    if "--plan" in command.words:
        assert not not_printed(command.output, done.stdout), done.stdout
    elif "--dry-run" in command.words and command.output:
        assert as_in_guide(done.stdout, project).splitlines() == list(command.output)


def as_in_guide(text: str, project: Path) -> str:
    """Replace this machine's names by those of the guide: the repository is /home/ada/muster on node1."""
    text = re.sub(rf"(^|/){re.escape(os.uname().nodename)}\b", r"\1node1", text, flags=re.MULTILINE)
    kit = "/home/ada/muster"
    for path, name in ((sys.prefix, f"{kit}/.venv"), (str(project), kit), (str(KIT), kit)):
        for shown in (path, re.sub(r"([^\w@%+=:,./-])", r"\\\1", path)):  # plain, and quoted by bash
            text = text.replace(shown, name)
    return re.sub(r"/bin/python[\d.]*", "/bin/python", text)


def test_most_commands_of_the_guides_are_run() -> None:
    """A change of the parser above must not silently leave commands out."""
    assert len(RUNNABLE) > 20
    assert {module_of(one.words) for one in RUNNABLE} >= set(HARMLESS_MODULES)
    assert len(RUNNABLE) > 0.45 * len(every_command(*RUN))


@pytest.mark.parametrize("name", RUN)
def test_a_command_that_is_not_run_has_a_reason(name: str) -> None:
    """Its block begins with `# Needs ...`, or it calls a program of Muster, torchrun or a system program."""
    for one in commands(name):
        known = one.script or module_of(one.words) or {"train.py", "torchrun"} & set(one.words)
        assert one.needs or known or one.words[0] in SYSTEM_PROGRAMS, (
            f"{one}: not run; begin the block with `# Needs ...`"
        )


def test_the_results_of_an_example_are_files_that_git_ignores(tmp_path: Path) -> None:
    """An example that is run in the checkout must leave no untracked files there."""
    words = [one.words for one in every_command(*RUN) if "--log-file" in one.words]
    results = {each[each.index("--log-file") + 1] for each in words} | {"results.json"}
    assert len(results) > 3
    shutil.copy(KIT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for name in results:
        for suffix in (".json", ".html", ".journal", ".phase1_base_models.json", ".phase2_experiments.json"):
            (tmp_path / Path(name).with_suffix(suffix)).touch()
    shown = subprocess.check_output(["git", "status", "--porcelain"], cwd=tmp_path, text=True)
    assert shown == "?? .gitignore\n"


@pytest.mark.parametrize("name", GUIDES)
def test_a_command_names_existing_scripts_options_and_modules(name: str) -> None:
    for one in commands(name):
        program = one.words[0]
        known = one.script or program in {*SYSTEM_PROGRAMS, ".venv/bin/python"} or (KIT / program).exists()
        assert known, f"{one}: unknown program"
        if one.script:
            assert os.access(KIT / one.script, os.X_OK), f"{one}: no such script"
            unknown = options_of(one) - options_in(help_of(one.script))
            assert not unknown, f"{one}: {one.script} --help does not list {', '.join(sorted(unknown))}"
        if module := module_of(one.words):
            path = KIT / "distributed" / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{one}: no such module"


def options_of(command: Command) -> set[str]:
    """Return the options that a command gives to its script, without the arguments after -- or of a user's script."""
    words = command.words[command.words.index(str(command.script)) + 1 :]
    words = words[: words.index("--")] if "--" in words else words
    if command.script == "scripts/run.sh" and "my_train.py" in words:
        words = words[: words.index("my_train.py")]
        words = [word for word in words if word.replace("_", "-").partition("=")[0] not in TORCHRUN_OPTIONS]
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


TORCHRUN = [one for one in every_command(*RUN) if one.words[0] == "torchrun" or "train.py" in one.words]


@pytest.mark.parametrize("command", TORCHRUN, ids=str)
def test_a_command_that_calls_train_py_directly_has_valid_settings(
    command: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(project)
    program, *arguments = command.words
    ranks = 1
    if program == "torchrun":
        parsed: argparse.Namespace = get_args_parser().parse_args(arguments)
        ranks = int(parsed.nproc_per_node) * int(parsed.nnodes.split(":")[-1])
        arguments = [parsed.training_script, *parsed.training_script_args]
    arguments = arguments[arguments.index("train.py") + 1 :]
    train_settings.for_ranks(train_settings.parser("").parse_intermixed_args(arguments), ranks)


# ---------------------------------------------------------------- the example script


def example(opening: str = "Learn a line") -> str:
    """Return the Python script in LAUNCH_GUIDE.md whose docstring begins with this text."""
    [lines] = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "python") if lines[0].startswith(f'"""{opening}')]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_example_script_learns_and_resumes(project: Path) -> None:
    script, text = project / "my_train.py", example()
    script.write_text(text.replace("STEPS = 300", "STEPS = 100"))
    launch = "scripts/run.sh -n 2 my_train.py"
    assert launch in {one.text for one in every_command("LAUNCH_GUIDE.md")}
    first = call(project, launch.split())
    script.write_text(text)
    second = call(project, launch.split())
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d00: loss (.+)$", first.stdout + second.stdout, re.MULTILINE)]
    assert len(losses) == 3, "every hundredth step once: 100, then 200 and 300"
    assert losses[2] < 0.5 * losses[0]


# ---------------------------------------------------------------- printed outputs

# Text that may differ between a guide and an output. `...` in a guide stands for any text.
VARYING = (
    r"\.\.\.|\d{8}-\d{6}-[0-9a-f]{4}|(?<=pid )\d+|(?<=pair\.cc:)\d+|(?<=\]:)\d+|(?<=step_)\d{8}"
    r"|\b[0-9a-f]{10}\b|\d+\.\d+ MB|\d{4}-\d\d-\d\dT[\d:+]+|(?<=no output for )\d+|(?<=--hang-timeout )\d+"
)


def not_printed(transcript: Iterable[str], output: str) -> list[str]:
    """Return the lines of a transcript that are not in the output."""
    return [
        line
        for line in transcript
        if not re.search(rf"^{'.*'.join(map(re.escape, re.split(VARYING, line)))}$", output, re.MULTILINE)
    ]


def output_with(text: str) -> list[str]:
    """Return the only output in LAUNCH_GUIDE.md that is printed without its command and contains the text."""
    found = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "console") if text in "\n".join(lines)]
    [lines] = [lines for lines in found if not lines[0].startswith("$ ")]
    return lines


def commands_with(text: str) -> list[Command]:
    return [one for one in every_command(*RUN) if text in "\n".join(one.output)]


def as_on_node1(done: subprocess.CompletedProcess[str], project: Path) -> str:
    """Return what the command printed, with the names of the guide for this machine and the project."""
    printed = (done.stdout + done.stderr).replace(str(project), "/home/ada/project")
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "node1", printed)


@pytest.fixture
def new_project(tmp_path: Path) -> Path:
    """A user's copy of the repository, without runs and scripts."""
    for name in ("scripts", "config", "train.py"):
        (tmp_path / name).symlink_to(KIT / name)
    return tmp_path


def test_not_printed_returns_the_lines_that_the_output_lacks() -> None:
    printed = "one 1\nverdict: failed: rank 1 (pid 7)\n"
    assert not_printed(["verdict: failed: rank 1 (pid 99)", "one ..."], printed) == []
    assert not_printed(["verdict: failed: rank 2 (pid 99)"], printed) == ["verdict: failed: rank 2 (pid 99)"]


# Raises in line 9, as in the guides.
FAILING = """\
import os

import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 9):
    dist.barrier()
    if os.environ["RANK"] == "1" and step == 5:
        raise ValueError(f"bad sample at step {step}")
"""


@pytest.mark.slow
def test_a_failed_run_has_the_exit_code_and_output_of_the_guides(new_project: Path) -> None:
    (new_project / "my_train.py").write_text(FAILING)
    shown = {one.file: one for one in every_command(*RUN) if "bad sample" in "".join(one.output)}
    assert set(shown) == set(RUN)
    assert len({one.text for one in shown.values()}) == 1
    done = call(new_project, shown["LAUNCH_GUIDE.md"].words, MUSTER_VERB="run")
    assert done.returncode == shown["LAUNCH_GUIDE.md"].exit_code
    printed = as_on_node1(done, new_project)
    assert not [line for one in shown.values() for line in not_printed(one.output, printed)], printed


# Rank 1 hangs in line 12, as in the guide.
HANGING = """\
import os
import time

import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        # Such as a lock that is never released.
        time.sleep(600)
    dist.barrier()


main()
"""


@pytest.mark.slow
def test_a_run_that_hangs_prints_the_verdict_of_the_guide(new_project: Path) -> None:
    (new_project / "my_train.py").write_text(HANGING)
    launch = "scripts/ssh/launch_singlenode.sh --hang-timeout 3 --script my_train.py - 2"
    done = call(new_project, launch.split())
    assert done.returncode == 124
    printed = as_on_node1(done, new_project)
    assert not not_printed(output_with("verdict: failed: hung"), printed), printed


@pytest.mark.slow
def test_a_stopped_run_its_resumption_and_its_checkpoints_are_printed_as_in_the_guides(new_project: Path) -> None:
    stopped, resumed = commands_with("run the same command again to resume") + commands_with("\nresuming from")
    assert stopped.words == resumed.words
    with subprocess.Popen(
        [*stopped.words, "--", "train.steps=1000000"], cwd=new_project, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | {"VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": ""},
    ) as running:  # fmt: skip
        assert running.stdout
        before = []
        for line in running.stdout:
            before.append(line)
            if line.startswith("step "):
                break
        running.terminate()  # as Ctrl-C, which a test that runs in the background cannot send
        printed = "".join(before) + running.stdout.read()
    assert running.returncode == stopped.exit_code == 75, printed
    assert not not_printed(stopped.output, printed), printed
    [step] = (path.name for path in new_project.glob("checkpoints/quickstart/step_*"))
    last = f"train.steps={int(step.removeprefix('step_')) + 1}"
    done = call(new_project, [*resumed.words, "--", last, "train.evaluate_windows=8", "logging.sample=0"])
    printed = as_on_node1(done, new_project)
    assert done.returncode == 0, printed
    assert not not_printed(resumed.output, printed), printed
    [listing] = commands_with("  good")
    done = call(new_project, listing.words, PYTHONPATH=str(KIT))
    assert done.returncode == 0
    assert not not_printed(listing.output, done.stdout), done.stdout


@pytest.mark.slow
def test_a_job_list_with_a_failed_job_prints_the_output_of_the_guide(new_project: Path) -> None:
    """Eight jobs exit immediately. The ninth calls train.py with data that do not exist."""
    train = "os.execv(sys.executable, ['python', 'train.py', *sys.argv[1:]])"
    (new_project / "job.py").write_text(f"import os, sys\nif 'missing' in sys.argv: {train}\n")
    jobs = [{"prefix": f"small{number}", "fold": 0} for number in range(8)]
    failing = {"prefix": "small", "fold": 4, "data_path": "missing"}
    (new_project / "jobs.json").write_text(json.dumps([*jobs, failing]))
    program = "scripts/jobs/run_distributed_training.py"
    run = ["--backend", "local", "--slots", "2", "--no-tmux", "--script", "job.py", "--jobs-config", "jobs.json"]
    done = call(new_project, [sys.executable, program, *run])
    assert done.returncode == 1
    assert not not_printed(output_with("8 of 9 done, 1 failed"), done.stdout), done.stdout


def test_a_finding_of_the_doctor_is_printed_as_in_the_guide() -> None:
    """The facts of three nodes are made up, because this machine has only one version of PyTorch."""
    printed = test_cluster.text_of(test_cluster.cluster(test_cluster.three(torch__version="2.12.0")))
    assert "\n".join(output_with("2.12.0, but 2.13.0")) in printed, printed


def test_every_output_of_the_guides_is_compared() -> None:
    """An output that is added to the guides needs a test, and an entry with some of its text in this list."""
    compared = {
        "bad sample", "verdict: failed: hung", "resuming from", "good", "where    id", "8 of 9 done",
        "2.12.0, but", "nod2: cannot be reached", "looks hung: rank 2 on node2", "scripts/lib/agent.py",
    }  # fmt: skip
    for name in ("README.md", "LAUNCH_GUIDE.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        for line, lines in blocks(name, "console", "text", ""):
            text = "\n".join(lines)
            assert any(words in text for words in compared), f"{name}:{line}: this output is compared by no test"


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("section", list(train_settings.Settings.model_fields))
def test_the_table_of_settings_agrees_with_the_trainer(section: str) -> None:
    kind = train_settings.Settings.model_fields[section].annotation
    assert kind is not None
    fields = kind.model_fields
    rows = table("LAUNCH_GUIDE.md", section)
    assert [unquoted(key) for key, _, _ in rows] == list(fields)
    for key, default, meaning in rows:
        field = fields[unquoted(key)]
        assert yaml.safe_load(unquoted(default)) == field.default, f"{section}.{key}"
        for choice in getattr(field.annotation, "__args__", ()):
            assert not isinstance(choice, str) or f"`{choice}`" in meaning + default, f"{section}.{key}: {choice}"


def test_the_table_of_arguments_of_a_job_agrees_with_the_trainer() -> None:
    _, heading, explained = train_settings.parser("").format_help().partition("arguments of a job:")
    assert heading
    listed = [unquoted(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "Arguments of a job")]
    assert listed == re.findall(r"^  (--[a-z_]+) [A-Z]", explained, re.MULTILINE)


@pytest.mark.parametrize(
    "script",
    [
        "scripts/ssh/launch_singlenode.sh",
        "scripts/run_ddp.sh",
        "scripts/slurm/submit.sh",
        "scripts/slurm/slurm_train.sh",
        "scripts/status.sh",
        "scripts/ls.sh",
        "scripts/logs.sh",
    ],
)
def test_the_table_of_options_agrees_with_the_help(script: str) -> None:
    listed = [unquoted(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", script)]
    text = subprocess.run([KIT / script, "--help"], capture_output=True, text=True, check=True).stdout
    explained = re.findall(r"^ {2,3}(--?[a-z][\w-]*)", text, re.MULTILINE)
    # The table may leave out options that are in the table of launch_singlenode.sh.
    shared = {unquoted(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "scripts/ssh/launch_singlenode.sh")}
    assert listed == [option for option in explained if option in listed or option not in shared]


def test_the_table_of_verbs_agrees_with_the_programs() -> None:
    rows = table("LAUNCH_GUIDE.md", "scripts/muster")
    assert [[unquoted(verb), *re.findall(r"\[(.+)\]", program)] for verb, program in rows] == [
        [verb, Path(program).name] for verb, program in sorted(VERBS.items()) if verb != "help"
    ]


def test_the_tables_of_the_program_for_job_lists_agree_with_its_help() -> None:
    text = help_of(JOBS)
    listed = [unquoted(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "Options and subcommands")]
    assert listed == re.findall(r"^ {2}(--[a-z][\w-]*)", text, re.MULTILINE)
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| subcommand | what it does |")
    listed = [unquoted(row.split("|")[1].strip()).split()[0] for row in rest.partition("\n\n")[0].splitlines()[2:]]
    assert listed == re.findall(r"^ {2}([a-z]+) .{3,}", text, re.MULTILINE)


SSH_KEYS = ("user", "port", "ssh_key")  # keys of a server that are settings of ssh, and named below the table


@pytest.mark.parametrize(
    ("heading", "first", "kind"),
    [
        ("jobs_config.json", "option", jobs_config.OptionKeys),
        ("cluster_config.json", "key", jobs_config.ClusterConfig),
        ("cluster_config.json", "key of a server", jobs_config.Server),
    ],
)
def test_the_tables_of_configs_for_job_lists_agree_with_the_models(
    heading: str, first: str, kind: type[BaseModel]
) -> None:
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition(f"\n### {heading}\n")
    rows = rest.partition(f"| {first} | default | meaning |\n")[2].partition("\n\n")[0].splitlines()[1:]
    listed = {unquoted(row.split("|")[1].strip()): unquoted(row.split("|")[2].strip()) for row in rows}
    sign = "_" if kind is jobs_config.OptionKeys else ""
    fields = {name: field for name, field in kind.model_fields.items() if name not in SSH_KEYS}
    assert set(listed) == {sign + name for name in fields}
    for name, field in fields.items():
        default = listed[sign + name]
        if default[:1] in '[{"0123456789':  # other defaults are prose
            assert json.loads(default) == field.get_default(call_default_factory=True), name


def test_the_tables_of_base_models_agree_with_the_model() -> None:
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| key of base_models | default | meaning |\n")
    rows = [row.split("|") for row in rest.partition("\n\n")[0].splitlines()[1:]]
    listed = {unquoted(row[1].strip()): unquoted(row[2].strip()) for row in rows}
    assert set(listed) == set(jobs_config.BaseModels.model_fields)
    for name, field in jobs_config.BaseModels.model_fields.items():
        if listed[name] != "none":
            assert json.loads(listed[name]) == field.get_default(call_default_factory=True), name
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| class | built-in keys | what it means |\n")
    rows = [row.split("|") for row in rest.partition("\n\n")[0].splitlines()[1:]]
    classes = {unquoted(row[1].strip()): re.findall(r"`(\w+)`", row[2]) for row in rows}
    assert classes == {"base": list(bases.BASE), "experiment": list(bases.EXPERIMENT)}


def test_the_table_of_the_two_phase_program_agrees_with_its_help() -> None:
    section = text_of("LAUNCH_GUIDE.md").partition("## Base models that many jobs share\n")[2]
    section = section.partition("\n### Options\n")[2]
    listed = re.findall(r"^\| `(--[a-z][\w-]*)", section.partition("\n### ")[0], re.MULTILINE)
    found = {name: re.findall(r"^ {2}(--[a-z][\w-]*)", help_of(name), re.MULTILINE) for name in (TWO_PHASE, JOBS)}
    assert set(listed) == set(found[TWO_PHASE]) - set(found[JOBS])


def test_the_configs_for_job_lists_are_valid(tmp_path: Path) -> None:
    [servers] = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "json") if '"servers"' in " ".join(lines)]
    (tmp_path / "cluster.json").write_text("\n".join(servers))
    assert len(jobs_config.read_cluster(tmp_path / "cluster.json").servers) == 4
    example = jobs_config.read_cluster(KIT / "config/cluster_config.json")
    assert (len(example.servers), example.base_models.base) == (3, ["fold"])
    assert len(jobs_config.read_jobs(KIT / "config/jobs_config.json", DEFAULT_PARTICIPANTS)) == 9


def test_the_example_that_writes_experiments_writes_two_phase_jobs_json(project: Path) -> None:
    (project / "make_experiments.py").write_text(example("Write my_experiments.json"))
    assert call(project, ["python", "make_experiments.py"]).returncode == 0
    assert (project / "my_experiments.json").read_text() == text_of("config/two_phase_jobs.json")


def test_the_table_of_exit_codes_agrees_with_common_bash() -> None:
    listed = {int(row[0]) for row in table("LAUNCH_GUIDE.md", "Exit codes") if row[0].isdigit()}
    codes = re.findall(r"^ +EXIT_\w+=(\d+)", text_of("scripts/lib/common.bash"), re.MULTILINE)
    assert listed == {0, *map(int, codes)}


def files_of_a_run(heading: str) -> dict[str, re.Pattern[str]]:
    """Return the file names of a table of the guide, each with a pattern that matches it."""
    listed = [unquoted(row[0]).rstrip("/") for row in table("LAUNCH_GUIDE.md", heading)]
    return {name: re.compile(re.escape(name).replace("<name>", ".+").replace("/<n>", "")) for name in listed}


def unexplained(directory: Path, *headings: str) -> list[str]:
    """Return the files of a directory that no table below these headings of the guide lists."""
    patterns = [pattern for heading in headings for pattern in files_of_a_run(heading).values()]
    return [path.name for path in directory.iterdir() if not any(pattern.fullmatch(path.name) for pattern in patterns)]


def missing(directory: Path, heading: str) -> set[str]:
    found = [path.name for path in directory.iterdir()]
    return {name for name, pattern in files_of_a_run(heading).items() if not any(map(pattern.fullmatch, found))}


def test_the_tables_of_files_list_the_files_of_a_run(project: Path) -> None:
    run = next(project.glob("logs/train-*"))
    assert not unexplained(run, "Run directory", "Files of an attempt"), (
        "files of a run that the guide does not explain"
    )
    assert not unexplained(run / "newest", "Files of an attempt")
    links = {path.name for path in run.iterdir() if path.is_symlink()}
    assert links == {"newest", *(path.name for path in (run / "newest").iterdir() if path.name in links)}
    optional = {"checkpoints", "smoke.json", "stalled_attempts", "tensorboard", "wandb", "node_<name>.stop"}
    optional |= {"metrics_from_output.jsonl", "metrics_from_tensorboard.jsonl"}
    # A command of the guides may have stopped the run.
    assert missing(run, "Run directory") - {"attach.lock", "console.log", "stop.lock"} == optional
    optional = {f"node_<name>.{kind}" for kind in ("heartbeat", "lost", "usage", "reserved", "reserved_record")}
    # The run may end before the first sample.
    rare = {"hang.json", "node_srun.log", "node_srun.exit"}
    assert missing(run / "newest", "Files of an attempt") - {"node_<name>.samples.jsonl"} == optional | rare


@pytest.mark.parametrize("script", SLURM)
def test_the_table_of_lines_for_sbatch_agrees_with_the_script(script: str) -> None:
    listed = [unquoted(row[0]) for row in table("LAUNCH_GUIDE.md", "#SBATCH lines")]
    assert listed == re.findall(r"^##?SBATCH (--[a-z-]+)", text_of(script), re.MULTILINE)


@pytest.mark.parametrize("script", SLURM)
def test_the_table_of_variables_for_sbatch_agrees_with_the_help(script: str) -> None:
    listed = [unquoted(row[0]) for row in table("LAUNCH_GUIDE.md", "Variables for sbatch")]
    _, _, text = help_of(script).partition("Environment variables:")
    explained = re.findall(r"^ {2}([A-Z_]{2,}) ", text, re.MULTILINE)
    named_in_passing = {"CONFIG", "SCRIPT"}
    assert sorted(listed) == sorted({*explained} | named_in_passing)


def test_the_environment_variables_of_the_guide_occur_in_the_code() -> None:
    code = "".join(path.read_text() for path in sources())
    for variable, _ in table("LAUNCH_GUIDE.md", "Environment variables"):
        assert unquoted(variable) in code, f"no source contains {variable}"


def test_the_table_of_forwarded_variables_agrees_with_the_code() -> None:
    listed = [name for row in table("LAUNCH_GUIDE.md", "Forwarded variables") for name in re.findall("`(.+?)`", row[0])]
    assert sorted(listed) == sorted(entry.removeprefix("-") for entry in FORWARDED)


def test_the_table_of_packages_lists_each_once() -> None:
    listed = [name for row in table("CONTRIBUTING.md", "Architecture") for name in re.findall(r"`([\w.]+)`", row[0])]
    assert sorted(listed) == sorted({package_of(name_of(path)) for path in modules()} - {"__init__"})


def test_the_modules_and_names_in_contributing_md_exist() -> None:
    """A module is written as `launch.watch`, and a name in a module as `launch.watch`: `Watch.node_lost`."""
    names = {name_of(path): path for path in modules()}
    packages = {name.partition(".")[0] for name in names if "." in name}
    names |= {package_of(name): path for name, path in names.items() if name.endswith(".__init__")}
    places = re.findall(r"`(\w+\.[\w.]*\w)`(?:: `([\w.]+)`)?", text_of("CONTRIBUTING.md"))
    places = [place for place in places if re.match(rf"({'|'.join(packages)})\.(?!py$|bash$)", place[0])]
    assert len(places) > 40
    for module, name in places:
        assert module in names, f"no module {module}"
        for part in filter(None, name.split(".")):
            definition = rf"^ *((async )?def|class) {part}\b|^{part}\b.* = "
            assert re.search(definition, names[module].read_text(), re.MULTILINE), (module, part)


def test_a_removed_word_is_no_option_of_a_script_and_is_in_the_changelog() -> None:
    lines = text_of("scripts/lib/removed_words.list").splitlines()[1:]
    options = {name for path in SCRIPTS for name in re.findall(r"^ +(--[a-z-]+)", help_of(str(path)), re.MULTILINE)}
    assert "--script" in options
    for word, separator, remedy in (line.partition(": ") for line in lines):
        assert separator and remedy and word not in options, word
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", text_of("CHANGELOG.md")), word


def test_the_table_of_scripts_lib_lists_all_its_files() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \|$", text_of("CONTRIBUTING.md"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row) if "." in name or name == "ssh_config"]
    assert sorted(listed) == [path.name for path in tracked("scripts/lib/*")]


# ---------------------------------------------------------------- links and names


@pytest.mark.parametrize("name", GUIDES)
def test_links_have_a_target(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        assert (KIT / (file or name)).exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(file or name), f"{name}: no heading {target}"


def anchors(name: str) -> set[str]:
    """Return the anchors that GitHub derives from headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", GUIDES)
def test_files_that_are_named_exist(name: str) -> None:
    directories = r"(?:scripts|config|distributed|tests|benchmarks|\.ci)/"
    for word in re.findall(rf"`({directories}[\w./-]*|[\w.-]+\.(?:md|toml|txt))`", text_of(name)):
        assert (KIT / word).exists() or word in NEVER_PRESENT, f"{name}: there is no {word}"


NEVER_PRESENT = {"launcher.log", "muster.toml", "tests/distributed/__init__.py"}  # made by a run, by users, forbidden


# ---------------------------------------------------------------- messages

GAP = "\0"  # in place of a value
FOREIGN_MESSAGES = "PyTorch, CUDA, NCCL and the shell"  # the section of messages of other programs


def sources() -> list[Path]:
    scripts = (f"scripts/**/*.{suffix}" for suffix in ("py", "sh", "bash"))
    return tracked("train.py", "tests/run.sh", "distributed/**/*.py", *scripts)


@cache
def message_templates() -> tuple[str, ...]:
    """Return all strings in the sources, with a GAP for each value."""
    return tuple(
        text
        for path in sources()
        for text in (_texts_of_python if path.suffix == ".py" else _texts_of_bash)(path.read_text())
    )


def _texts_of_python(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("%s", GAP)


def _texts_of_bash(code: str) -> Iterator[str]:
    code = re.sub(r"\$\([^()]*\)|\$\{[^}]*\}|\$\w+|\$[*#]", GAP, code)
    code = re.sub(r'"\s*\\\n\s*"', " ", code)  # one message on two lines
    yield from (text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\]|\\.)*)"', code))


def match_ratio(template: str, message: str) -> float:
    """Return the share of the message's characters that the template contains; a GAP in either matches any text.

    Negative when the two do not match.
    """
    best = [0.0] * (len(template) + 1)  # the message may begin anywhere in the template
    for letter in message:
        before, best = best, [best[0] + (0.0 if letter == GAP else -math.inf)]
        for index, other in enumerate(template):
            any_text = max(before[index + 1], best[index]) if GAP in (letter, other) else -math.inf
            best.append(max(any_text, before[index] + 1 if letter == other != GAP else -math.inf))
    return best[-1] / len(message.replace(GAP, ""))


@cache
def is_printed(message: str) -> bool:
    """Return whether a string in the sources contains at least half, and at least eight characters, of a message."""
    message = GAP + message.replace("...", GAP)
    similar = (
        text for text in message_templates() if any(len(part) >= 5 and part[:8] in message for part in text.split(GAP))
    )
    least = max(0.5, 8 / len(message))
    return any(match_ratio(GAP + template, message) >= least for template in similar)


def headings() -> list[str]:
    text, foreign, _ = text_of("TROUBLESHOOTING.md").partition(f"## {FOREIGN_MESSAGES}")
    assert foreign
    return re.findall(r"^### `(.+)`$", text, re.MULTILINE)


@pytest.mark.parametrize("heading", headings())
def test_an_explained_message_is_in_the_sources(heading: str) -> None:
    assert is_printed(heading)


@pytest.mark.parametrize(
    "unknown",
    [
        "NPROC ...: this machine has ... GPUs, and each process needs two",
        "train.batch_size=... is divisible by ...",
        "... died of boredom, and nobody knows ...",
    ],
)
def test_an_unknown_message_is_not_found_in_the_sources(unknown: str) -> None:
    assert not is_printed(unknown)


@cache
def expected_by_tests() -> str:
    """Return the text of the tests, without quotes, and with strings on two lines joined."""
    files = tracked("tests/**/test_*.py", "tests/*.bats")
    text = "".join(path.read_text() for path in files if path != Path(__file__))
    return re.sub(r"""["'\\`]""", "", re.sub(r'"\s*\n\s*f?"', "", text))


@pytest.mark.parametrize("heading", headings())
def test_an_explained_message_is_expected_by_a_test(heading: str) -> None:
    """At least ten consecutive characters of the heading occur in a test."""
    parts = [re.sub(r"""["'\\`]""", "", part) for part in heading.split("...")]
    pieces = [part[start : start + 10] for part in parts for start in range(len(part) - 9)]
    assert not pieces or any(piece in expected_by_tests() for piece in pieces)


def test_every_heading_is_a_message_and_unique() -> None:
    every = re.findall(r"^### (.+)$", text_of("TROUBLESHOOTING.md"), re.MULTILINE)
    assert all(heading.startswith("`") and heading.endswith("`") for heading in every)
    assert len(set(every)) == len(every)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_shows_its_command_arithmetic_and_expected_result(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    comment = re.sub(r"^# ?", "", re.match(r"(?:#.*\n)+", text_of(f"config/{name}"))[0], flags=re.MULTILINE)  # type: ignore[index]
    launch = re.search(rf"^  (scripts/.+config/{re.escape(name)}.*)$", comment, re.MULTILINE)
    assert launch, "its opening comment has no launch command"
    command = launch[1].split()
    ranks = int(command[command.index("-n") + 1] if "-n" in command else command[-1])
    settings = train_settings.read(Path("config") / name)
    batch = train_settings.batch(settings, ranks)
    assert f"\n{batch}\n" in comment
    totals = r"^([\d,]+) steps x ([\d,]+) tokens = ([\d,]+) tokens"
    for steps, tokens, total in re.findall(totals, comment, re.MULTILINE):
        assert number(steps) == settings.train.steps
        assert number(tokens) == batch.tokens
        assert number(total) == number(steps) * number(tokens)
    assert re.search(r"^Expect: ", comment, re.MULTILINE)
    assert f"(config/{name})" in text_of("README.md"), "README.md must list it"


def number(text: str) -> int:
    return int(text.replace(",", ""))
