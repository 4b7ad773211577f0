"""What the guides say is so.

People paste from them, and search in them. Held here: commands run (or run dry, or, where they need what not every
machine has, name scripts and options that exist); the messages that TROUBLESHOOTING.md explains stand in the sources;
tables of settings, options, files and exit codes agree with the code; links lead somewhere; the example script trains
and goes on; each config does the arithmetic that it shows.
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
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from test_house import BELOW, modules, name_of, package_of

from distributed import config
from distributed.fold import DEFAULT_PARTICIPANTS
from distributed.jobs import bases
from distributed.jobs import config as jobs_config

KIT = Path(__file__).resolve().parents[1]
GUIDES = ("README.md", "LAUNCH_GUIDE.md", "TROUBLESHOOTING.md", "CONTRIBUTING.md", "CHANGELOG.md")
RUN = ("README.md", "LAUNCH_GUIDE.md")  # their commands are run, as far as any machine can
CONFIGS = sorted(path.name for path in (KIT / "config").glob("*.yaml"))
SECONDS = 120  # after which a command counts as hanging

# They know --dry-run.
STARTERS = (
    "launch_singlenode.sh", "launch_torchrun_auto.sh", "launch_torchrun_multinode.sh", "launch_multinode.sh",
    "launch_pdsh_multinode.sh", "run_ddp.sh", "quickstart.sh", "test_distributed.sh", "doctor.sh",
)  # fmt: skip
SLURM = ("scripts/slurm/slurm_train_single_node.sh", "scripts/slurm/slurm_train.sh")
ASKERS = ("scripts/status.sh", "scripts/stop.sh", "scripts/report.sh")  # of a run that has ended, as they stand
JOBS = "scripts/jobs/run_distributed_training.py"
TWO_PHASE = "scripts/jobs/run_two_phase_training.py"
HELPER = "scripts/jobs/distributed_train_helper.py"
JOB = "4711"  # stands in the guides for the number that sbatch prints
AS_THEY_STAND = ("checkpoint.directory", "runs.verdict")  # modules that start nothing
OTHERS = {
    *("cp", "df", "env", "free", "export", "git", "ip", "less", "ls", "mkdir", "mv", "nvidia-smi", "python", "sacct"),
    *("sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "source", "squeue", "srun", "ss", "ssh", "sudo"),
    *("tail", "tensorboard", "torchfrtrace", "torchrun", "unset", "wandb"),
}


# ---------------------------------------------------------------- reading the guides


@dataclass(frozen=True)
class Command:
    """One command of a guide."""

    file: str
    line: int
    text: str
    needs: str = ""  # what not every machine has
    exit_code: int = 0  # as the guide shows it
    output: tuple[str, ...] = ()  # as the guide shows it

    @property
    def words(self) -> list[str]:
        """Without the variables that stand before the program."""
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
        """Our script that it calls, also behind another program's words."""
        ours = (word for word in self.words if word.startswith("scripts/") and not word.startswith("scripts/lib/"))
        return next((word for word in ours if word.endswith((".sh", ".py"))), None)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@cache
def text_of(name: str) -> str:
    return (KIT / name).read_text()


def blocks(name: str, *languages: str) -> Iterator[tuple[int, list[str]]]:
    """The fenced blocks of a guide: the number of their first line, and their lines."""
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
    assert inside is None, f"{name}:{inside}: this block does not end"


def commands(name: str) -> Iterator[Command]:
    for first, lines in blocks(name, "bash"):
        needs = lines[0] if lines[0].startswith("# Needs ") else ""
        for number, line in enumerate(lines, first):
            if line and not line.startswith("#"):
                yield Command(name, number, line, needs)
    for first, lines in blocks(name, "console"):
        yield from transcript(name, first, lines)


def transcript(name: str, first: int, lines: list[str]) -> Iterator[Command]:
    """The commands behind a $, what they print, and the exit code where `echo $?` follows."""
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        asks = lines[end : end + 2]
        code = int(asks[1]) if asks[:1] == ["$ echo $?"] else 0
        if lines[start] != "$ echo $?":
            yield Command(name, first + start, lines[start][2:], "", code, tuple(lines[start + 1 : end]))


def every_command(*names: str) -> list[Command]:
    """Each once, whatever guides it stands in."""
    found = {(one.text, one.output): one for name in reversed(names) for one in commands(name)}
    return sorted(found.values(), key=lambda one: (one.file, one.line))


def table(name: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its own two lines."""
    text = text_of(name)
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, f"{name} has no heading {heading!r}"
    rows = re.search(r"(?:^\|.*\n)+", text[start.end() :], re.MULTILINE)
    assert rows, f"{name}: no table below {heading!r}"
    # A | inside a cell is written \|
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in rows[0].splitlines()[2:]
    ]


def literal(cell: str) -> str:
    return cell.strip("`")


# ---------------------------------------------------------------- commands run


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit's folder as a newcomer has it, with a training behind him and files of his own."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("scripts", "config", "distributed", "train.py", "README.md", "requirements-trackers.txt"):
        (folder / name).symlink_to(KIT / name)
    (folder / "my_train.py").write_text(example())
    for name in ("my_old_train.py", "my_tracked.py", "wandb.env"):
        (folder / name).touch()
    (folder / "make_jobs.py").write_text(example("Write my_jobs.json"))
    (folder / "jobs_config.json").write_text('[{"lr": 0.003}]')
    (folder / "cluster_config.json").write_bytes((KIT / "config/cluster_config.json").read_bytes())
    (folder / "my.yaml").write_text("{}\n")
    (folder / "my_hosts").write_text("node1 slots=4\nnode2\n")
    for corpus in ("books", "data/openwebtext", "data/tokens"):
        (folder / corpus).mkdir(parents=True)
    assert call(folder, ["python", "make_jobs.py"]).returncode == 0
    training = "scripts/ssh/launch_singlenode.sh config/quickstart.yaml 2"
    assert training in {one.text for one in every_command("README.md")}
    little = ["train.steps=2", "train.evaluate_windows=8", "logging.sample=0"]
    done = call(folder, [*training.split(), "--", *little])
    assert done.returncode == 0, done.stderr
    return folder


def call(folder: Path, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody with this Python's environment active, on a machine without a GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MUSTER_"))}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    env = kept | {"VIRTUAL_ENV": sys.prefix, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=env | variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def harmless(words: list[str]) -> list[str] | None:
    """The command so that it starts no training and installs nothing; None when there is no such way."""
    if JOB in words:
        return None
    if words == ["scripts/doctor.sh"] or words[0] in ASKERS or module_of(words) in AS_THEY_STAND:
        return words
    if Path(words[0]).name in STARTERS:
        # The names of nodes that are not there are nothing to look up.
        known = ["--no-preflight"] if "--no-preflight" in help_of(words[0]) else []
        return [words[0], "--dry-run", *known, *words[1:]]
    if HELPER in words or words[:3] == ["python", TWO_PHASE, "cache"]:
        return words
    if {JOBS, TWO_PHASE} & set(words) and "--jobs-config" in words:
        return [*words, "--plan"]
    return None


def jobs_program(command: Command) -> bool:
    """Whether it is about a job list."""
    return command.script == JOBS


def module_of(words: list[str]) -> str | None:
    """Our module that a Python is to run."""
    starts = words[:2] == ["python", "-m"] and words[2].startswith("distributed.")
    return words[2].removeprefix("distributed.") if starts else None


@cache
def help_of(script: str) -> str:
    """The launcher's options are those of run_ddp.sh too, as its help says."""
    program = [sys.executable] if script.endswith(".py") else []
    text = subprocess.run([*program, KIT / script, "--help"], capture_output=True, text=True, check=True).stdout
    return text if script.endswith("launch_singlenode.sh") else text + common(script)


def common(script: str) -> str:
    if script == TWO_PHASE:
        return help_of(JOBS)
    return help_of("scripts/ssh/launch_singlenode.sh") if script.endswith(("run_ddp.sh", "test_distributed.sh")) else ""


RUNNABLE = [one for one in every_command(*RUN) if harmless(one.words)]


@pytest.mark.parametrize("command", RUNNABLE, ids=str)
def test_a_command_does_what_the_guide_says(command: Command, desk: Path) -> None:
    words = harmless(command.words)
    assert words
    if "--dry-run" in command.words:
        words.remove("--dry-run")
    done = call(desk, words, **command.variables)
    if command.exit_code == 2:  # a refusal comes before anything starts, so that it is the same when run dry
        assert done.returncode == 2
        assert done.stderr.splitlines() == list(command.output)
    elif words[0] != "scripts/doctor.sh":  # whose answer is about this machine
        assert done.returncode == 0, done.stderr
    if "--dry-run" in command.words and command.output:
        assert as_ada(done.stdout, desk).splitlines() == list(command.output)


def as_ada(text: str, desk: Path) -> str:
    """What a command prints, as if the kit were in /home/ada/muster of the machine node1."""
    text = re.sub(rf"(^|/){re.escape(os.uname().nodename)}\b", r"\1node1", text, flags=re.MULTILINE)
    kit = "/home/ada/muster"
    for place, name in ((sys.prefix, f"{kit}/.venv"), (str(desk), kit), (str(KIT), kit)):
        for shown in (place, re.sub(r"([^\w@%+=:,./-])", r"\\\1", place)):  # as it is, and as bash quotes it
            text = text.replace(shown, name)
    return re.sub(r"/bin/python[\d.]*", "/bin/python", text)


def test_most_commands_of_the_guides_are_run() -> None:
    """So that a change of the reading above does not silently leave them out."""
    assert len(RUNNABLE) > 20
    assert {module_of(one.words) for one in RUNNABLE} >= set(AS_THEY_STAND)
    assert len(RUNNABLE) > 0.5 * len(every_command(*RUN))


@pytest.mark.parametrize("name", RUN)
def test_what_is_left_out_says_why(name: str) -> None:
    """A block that is only read begins with `# Needs ...`, which tells a person too; or it is a tool of the system."""
    for one in commands(name):
        known = one.script or module_of(one.words) or {"train.py", "torchrun"} & set(one.words)
        assert one.needs or known or one.words[0] in OTHERS, f"{one}: not run, not looked up, and no `# Needs`"


@pytest.mark.parametrize("name", GUIDES)
def test_a_command_names_what_is_there(name: str) -> None:
    for one in commands(name):
        assert one.script or one.words[0] in OTHERS or (KIT / one.words[0]).exists() or is_python(one), f"{one}: what?"
        if one.script:
            assert os.access(KIT / one.script, os.X_OK), f"{one}: no such script"
            unknown = options_of(one) - options_in(help_of(one.script))
            assert not unknown, f"{one}: {one.script} --help knows no {', '.join(sorted(unknown))}"
        if module := module_of(one.words):
            path = KIT / "distributed" / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{one}: no such module"


def is_python(command: Command) -> bool:
    return command.words[0] == ".venv/bin/python"


def options_of(command: Command) -> set[str]:
    """The options that a command gives to our script; the words behind -- are somebody else's."""
    words = command.words[command.words.index(str(command.script)) + 1 :]
    words = words[: words.index("--")] if "--" in words else words
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


TORCHRUN = [one for one in every_command(*RUN) if one.words[0] == "torchrun" or "train.py" in one.words]


@pytest.mark.parametrize("command", TORCHRUN, ids=str)
def test_a_training_without_launchers_is_one_that_could_start(
    command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(desk)
    program, *words = command.words
    nproc = 1
    if program == "torchrun":
        said: argparse.Namespace = get_args_parser().parse_args(words)
        nproc = int(said.nproc_per_node) * int(said.nnodes.split(":")[-1])
        words = [said.training_script, *said.training_script_args]
    words = words[words.index("train.py") :]
    config.for_ranks(config.parser("").parse_intermixed_args(words[1:]), nproc)


# ---------------------------------------------------------------- the example script


def example(opening: str = "Learn a line") -> str:
    """A script that LAUNCH_GUIDE.md shows."""
    [lines] = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "python") if lines[0].startswith(f'"""{opening}')]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_example_script_learns_and_goes_on_where_it_was(desk: Path) -> None:
    script, text = desk / "my_train.py", example()
    script.write_text(text.replace("STEPS = 300", "STEPS = 100"))
    launch = "scripts/ssh/launch_singlenode.sh --script my_train.py - 2"
    assert launch in text_of("LAUNCH_GUIDE.md")
    first = call(desk, launch.split())
    script.write_text(text)
    second = call(desk, launch.split())
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d00: loss (.+)$", first.stdout + second.stdout, re.MULTILINE)]
    assert len(losses) == 3, "each hundredth step once"
    assert losses[2] < 0.5 * losses[0]


def test_the_example_with_wandb_tracks_rank_0_and_keeps_the_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "my_tracked.py").write_text(example("Track rank 0"))
    for rank in ("0", "1", "0"):
        done = call(tmp_path, ["python", "my_tracked.py"], RANK=rank, WANDB_MODE="offline", HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
    runs = [path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert runs == [(tmp_path / "checkpoints/tracked/wandb_id").read_text()] * 2


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("section", list(config.Settings.model_fields))
def test_the_table_of_settings_is_what_the_trainer_knows(section: str) -> None:
    kind = config.Settings.model_fields[section].annotation
    assert kind is not None
    fields = kind.model_fields
    rows = table("LAUNCH_GUIDE.md", section)
    assert [literal(key) for key, _, _ in rows] == list(fields)
    for key, default, meaning in rows:
        field = fields[literal(key)]
        assert yaml.safe_load(literal(default)) == field.default, f"{section}.{key}"
        for choice in getattr(field.annotation, "__args__", ()):
            assert not isinstance(choice, str) or f"`{choice}`" in meaning + default, f"{section}.{key}: {choice}"


def test_the_table_of_arguments_of_a_job_is_what_the_trainer_takes() -> None:
    _, found, own = config.parser("").format_help().partition("arguments of a job:")
    assert found
    listed = [literal(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "Arguments of a job")]
    assert listed == re.findall(r"^  (--[a-z_]+) [A-Z]", own, re.MULTILINE)


@pytest.mark.parametrize(
    "script",
    [
        "scripts/ssh/launch_singlenode.sh",
        "scripts/run_ddp.sh",
        *SLURM,
        "scripts/status.sh",
    ],
)
def test_the_table_of_options_is_what_the_script_says_of_itself(script: str) -> None:
    listed = [literal(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", script)]
    own = subprocess.run([KIT / script, "--help"], capture_output=True, text=True, check=True).stdout
    explained = re.findall(r"^ {2,3}(--?[a-z][\w-]*)", own, re.MULTILINE)
    # A chapter may refer to the options of launch_singlenode.sh.
    shared = {literal(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "scripts/ssh/launch_singlenode.sh")}
    assert listed == [option for option in explained if option in listed or option not in shared]


def test_the_tables_of_the_program_for_job_lists_are_what_it_says_of_itself() -> None:
    own = help_of(JOBS)
    listed = [literal(row[0]).split()[0] for row in table("LAUNCH_GUIDE.md", "Options and subcommands")]
    assert listed == re.findall(r"^ {2}(--[a-z][\w-]*)", own, re.MULTILINE)
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| subcommand | what it does |")
    listed = [literal(row.split("|")[1].strip()).split()[0] for row in rest.partition("\n\n")[0].splitlines()[2:]]
    assert listed == re.findall(r"^ {2}([a-z]+) .{3,}", own, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "first", "kind"),
    [
        ("jobs_config.json", "option", jobs_config.OptionKeys),
        ("cluster_config.json", "key", jobs_config.Cluster),
        ("cluster_config.json", "key of a server", jobs_config.Server),
    ],
)
def test_the_tables_of_configs_for_job_lists_are_what_is_read(heading: str, first: str, kind: type[BaseModel]) -> None:
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition(f"\n### {heading}\n")
    rows = rest.partition(f"| {first} | default | meaning |\n")[2].partition("\n\n")[0].splitlines()[1:]
    listed = {literal(row.split("|")[1].strip()): literal(row.split("|")[2].strip()) for row in rows}
    sign = "_" if kind is jobs_config.OptionKeys else ""
    assert set(listed) == {sign + name for name in kind.model_fields}
    for name, field in kind.model_fields.items():
        default = listed[sign + name]
        if default[:1] in '[{"0123456789':  # others are words
            assert json.loads(default) == field.get_default(call_default_factory=True), name


def test_the_tables_of_base_models_are_what_is_read() -> None:
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| key of base_models | default | meaning |\n")
    rows = [row.split("|") for row in rest.partition("\n\n")[0].splitlines()[1:]]
    listed = {literal(row[1].strip()): literal(row[2].strip()) for row in rows}
    assert set(listed) == set(jobs_config.BaseModels.model_fields)
    for name, field in jobs_config.BaseModels.model_fields.items():
        if listed[name] != "none":
            assert json.loads(listed[name]) == field.get_default(call_default_factory=True), name
    _, _, rest = text_of("LAUNCH_GUIDE.md").partition("| class | keys without the section | what it means |\n")
    rows = [row.split("|") for row in rest.partition("\n\n")[0].splitlines()[1:]]
    classes = {literal(row[1].strip()): re.findall(r"`(\w+)`", row[2]) for row in rows}
    assert classes == {"base": list(bases.BASE), "experiment": list(bases.EXPERIMENT), "ignored": []}


def test_the_table_of_the_two_phase_program_is_what_it_says_of_itself() -> None:
    section = text_of("LAUNCH_GUIDE.md").partition("## Base models that many jobs share\n")[2]
    section = section.partition("\n### Options\n")[2]
    listed = re.findall(r"^\| `(--[a-z][\w-]*)", section.partition("\n### ")[0], re.MULTILINE)
    found = {name: re.findall(r"^ {2}(--[a-z][\w-]*)", help_of(name), re.MULTILINE) for name in (TWO_PHASE, JOBS)}
    assert set(listed) == set(found[TWO_PHASE]) - set(found[JOBS])


def test_the_configs_for_job_lists_are_valid(tmp_path: Path) -> None:
    [cluster, servers] = [lines for _, lines in blocks("LAUNCH_GUIDE.md", "json") if '"servers"' in " ".join(lines)]
    assert json.loads("\n".join(cluster)) == json.loads(text_of("config/cluster_config.json"))
    (tmp_path / "cluster.json").write_text("\n".join(servers))
    assert len(jobs_config.read_cluster(tmp_path / "cluster.json").servers) == 4
    assert len(jobs_config.read_cluster(KIT / "config/cluster_config.json").servers) == 3
    assert len(jobs_config.read_jobs(KIT / "config/jobs_config.json", DEFAULT_PARTICIPANTS)) == 9
    assert jobs_config.read_base_models(KIT / "config/base_models.json").base == ["fold"]


def test_the_program_that_writes_experiments_writes_those_of_the_kit(desk: Path) -> None:
    (desk / "make_experiments.py").write_text(example("Write my_experiments.json"))
    assert call(desk, ["python", "make_experiments.py"]).returncode == 0
    assert (desk / "my_experiments.json").read_text() == text_of("config/two_phase_jobs.json")


@pytest.mark.parametrize("words", [[], ["explain", "0", "7"]])
def test_the_helper_prints_what_the_guide_shows(desk: Path, words: list[str]) -> None:
    given = ["config/two_phase_jobs.json", *words, "--base-models", "config/base_models.json"]
    printed = call(desk, ["python", HELPER, *given]).stdout
    assert printed.rstrip() in text_of("LAUNCH_GUIDE.md")


def test_the_table_of_exit_codes_is_the_kit_s() -> None:
    listed = {int(row[0]) for row in table("LAUNCH_GUIDE.md", "Exit codes") if row[0].isdigit()}
    codes = re.findall(r"^ +EXIT_\w+=(\d+)", text_of("scripts/lib/common.bash"), re.MULTILINE)
    assert listed == {0, *map(int, codes)}


def files_of_a_run() -> dict[str, re.Pattern[str]]:
    """The guide's table: names, and what they stand for."""
    listed = [literal(row[0]).rstrip("/") for row in table("LAUNCH_GUIDE.md", "Run directory")]
    return {name: re.compile(re.escape(name).replace("<name>", ".+").replace("<n>", r"\d+")) for name in listed}


def unexplained(run: Path) -> list[str]:
    """What lies in the folder of a run, and is not in that table."""
    patterns = files_of_a_run().values()
    return [path.name for path in run.iterdir() if not any(pattern.fullmatch(path.name) for pattern in patterns)]


def test_the_table_of_files_is_what_a_run_leaves(desk: Path) -> None:
    run = next(desk.glob("logs/train-*"))
    assert not unexplained(run), "files of a run that the guide does not explain"
    found = [path.name for path in run.iterdir()]
    missing = {name for name, pattern in files_of_a_run().items() if not any(map(pattern.fullmatch, found))}
    seldom = {"checkpoints", "hang.json", "node_<name>.lost", "node_<name>.stop", "smoke.json"}
    seldom |= {"tensorboard", "wandb", "try_<n>"}
    of_slurm = {"node_srun.log", "node_srun.exit", "turns_in_vain"}
    assert missing == seldom | of_slurm, "made only when asked for, or when there is a reason"


@pytest.mark.parametrize("script", SLURM)
def test_the_table_of_lines_for_sbatch_is_what_the_script_begins_with(script: str) -> None:
    listed = [literal(row[0]) for row in table("LAUNCH_GUIDE.md", "Lines for sbatch")]
    assert listed == re.findall(r"^##?SBATCH (--[a-z-]+)", text_of(script), re.MULTILINE)


@pytest.mark.parametrize("script", SLURM)
def test_the_table_of_variables_for_sbatch_is_what_the_script_says_of_itself(script: str) -> None:
    listed = [literal(row[0]) for row in table("LAUNCH_GUIDE.md", "Variables for sbatch")]
    _, _, own = help_of(script).partition("From the environment")
    explained = re.findall(r"^ {2}([A-Z_]{2,}) ", own, re.MULTILINE)
    named_in_passing = {"CONFIG", "SCRIPT"}
    assert sorted(listed) == sorted({*explained} | named_in_passing)


def test_the_variables_of_the_guide_are_read_or_written_somewhere() -> None:
    code = "".join(path.read_text() for path in sources())
    for variable, _ in table("LAUNCH_GUIDE.md", "Environment variables"):
        assert literal(variable) in code, f"nothing knows {variable}"


def test_the_map_of_the_house_is_true() -> None:
    """Every package has its row, with its modules and with what it may import."""
    found: dict[str, set[str]] = {}
    for module in (name_of(path) for path in modules() if not path.stem.startswith("__")):
        found.setdefault(package_of(module), set()).add(module.partition(".")[2])
    told: set[str] = set()
    for name, what, knows in table("CONTRIBUTING.md", "The house"):
        names = set(re.findall(r"`(\w+)`", name))
        inside = set().union(*(found[package] for package in names)) - {""}
        below = set().union(*(BELOW.get(package, set()) for package in names))
        assert not inside or set(re.findall(r"`(\w+)`", what)) == inside, f"{name}: its modules are {inside}"
        assert set(re.findall(r"`(\w+)`", knows)) == below, name
        told |= names
    assert told == set(found)


def test_what_the_scripts_share_is_told_file_by_file() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \|$", text_of("CONTRIBUTING.md"), re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`([\w.]+)`", row) if "." in name or name == "ssh_config"]
    assert sorted(told) == sorted(path.name for path in (KIT / "scripts/lib").iterdir() if path.is_file())


# ---------------------------------------------------------------- links and names


@pytest.mark.parametrize("name", GUIDES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        assert (KIT / (file or name)).exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(file or name), f"{name}: no heading {target}"


def anchors(name: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", GUIDES)
def test_files_that_are_named_are_there(name: str) -> None:
    rooms = r"(?:scripts|config|distributed|tests|benchmarks|\.ci)/"
    for word in re.findall(rf"`({rooms}[\w./-]*|[\w.-]+\.(?:md|toml|txt))`", text_of(name)):
        assert (KIT / word).exists() or word in ABSENT, f"{name}: there is no {word}"


ABSENT = {"launcher.log", "tests/distributed/__init__.py"}  # made by a run; never to be made


# ---------------------------------------------------------------- messages

GAP = "\0"  # what differs from case to case
FOREIGN = "PyTorch, CUDA, NCCL and the shell"  # the section of messages that are not ours


def sources() -> list[Path]:
    folders = ("distributed/**/*.py", "scripts/**/*.py", "scripts/**/*.sh", "scripts/**/*.bash")
    return [KIT / "train.py", KIT / "tests/run.sh", *(path for each in folders for path in KIT.glob(each))]


@cache
def templates() -> tuple[str, ...]:
    """All texts of the sources, with a GAP for each value."""
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
    code = re.sub(r'"\s*\\\n\s*"', " ", code)  # words of one message on two lines
    yield from (text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\]|\\.)*)"', code))


def agreement(template: str, message: str) -> float:
    """The share of the message that the template says, letter by letter; a GAP on either side stands for any text.

    Negative when the two contradict each other.
    """
    best = [0.0] * (len(template) + 1)  # before the message, the template may say anything
    for letter in message:
        before, best = best, [best[0] + (0.0 if letter == GAP else -math.inf)]
        for place, other in enumerate(template):
            any_text = max(before[place + 1], best[place]) if GAP in (letter, other) else -math.inf
            best.append(max(any_text, before[place] + 1 if letter == other != GAP else -math.inf))
    return best[-1] / len(message.replace(GAP, ""))


@cache
def is_printed(message: str) -> bool:
    """Whether one of our texts says at least half of it, and eight letters."""
    message = GAP + message.replace("...", GAP)
    alike = (text for text in templates() if any(len(part) >= 5 and part[:8] in message for part in text.split(GAP)))
    least = max(0.5, 8 / len(message))
    return any(agreement(GAP + template, message) >= least for template in alike)


def headings() -> list[str]:
    ours, found, _ = text_of("TROUBLESHOOTING.md").partition(f"## {FOREIGN}")
    assert found
    return re.findall(r"^### `(.+)`$", ours, re.MULTILINE)


@pytest.mark.parametrize("heading", headings())
def test_a_message_that_is_explained_is_one_that_we_print(heading: str) -> None:
    assert is_printed(heading)


@pytest.mark.parametrize(
    "strange",
    [
        "NPROC ...: this machine has ... GPUs, and each process needs two",
        "train.batch_size=... is divisible by ...",
        "... died of boredom, and nobody knows ...",
    ],
)
def test_an_explained_message_that_we_do_not_print_would_be_found(strange: str) -> None:
    assert not is_printed(strange)


@cache
def said_by_tests() -> str:
    """What stands in the tests, without marks of quotation, and texts on two lines joined."""
    files = [*KIT.glob("tests/**/test_*.py"), *KIT.glob("tests/*.bats")]
    text = "".join(path.read_text() for path in files if path != Path(__file__))
    return re.sub(r"""["'\\`]""", "", re.sub(r'"\s*\n\s*f?"', "", text))


@pytest.mark.parametrize("heading", headings())
def test_a_message_that_is_explained_is_one_that_a_test_provokes(heading: str) -> None:
    """At least ten letters of it are expected somewhere: so that no entry explains what never comes."""
    parts = [re.sub(r"""["'\\`]""", "", part) for part in heading.split("...")]
    pieces = [part[start : start + 10] for part in parts for start in range(len(part) - 9)]
    assert not pieces or any(piece in said_by_tests() for piece in pieces)


def test_every_heading_is_a_message_and_stands_once() -> None:
    every = re.findall(r"^### (.+)$", text_of("TROUBLESHOOTING.md"), re.MULTILINE)
    assert all(heading.startswith("`") and heading.endswith("`") for heading in every)
    assert len(set(every)) == len(every)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_shows_its_launch_its_arithmetic_and_what_to_expect(
    name: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    comment = re.sub(r"^# ?", "", re.match(r"(?:#.*\n)+", text_of(f"config/{name}"))[0], flags=re.MULTILINE)  # type: ignore[index]
    launch = re.search(rf"^  (scripts/.+config/{re.escape(name)}.*)$", comment, re.MULTILINE)
    assert launch, "it opens with its launch line"
    words = launch[1].split()
    ranks = int(words[words.index("-n") + 1] if "-n" in words else words[-1])
    settings = config.read(Path("config") / name)
    cut = config.batch(settings, ranks)
    assert f"\n{cut}\n" in comment
    sums = r"^([\d,]+) steps x ([\d,]+) tokens = ([\d,]+) tokens"
    for steps, tokens, total in re.findall(sums, comment, re.MULTILINE):
        assert number(steps) == settings.train.steps
        assert number(tokens) == cut.tokens
        assert number(total) == number(steps) * number(tokens)
    assert re.search(r"^Expect: ", comment, re.MULTILINE)
    assert f"(config/{name})" in text_of("README.md"), "the README lists it"


def number(text: str) -> int:
    return int(text.replace(",", ""))
