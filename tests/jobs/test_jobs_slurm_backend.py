"""Job lists on SLURM: the commands for SLURM, the meaning of its output, and the execution of job specifications.

jobs_slurm.bats tests a real SLURM. Here jobs.array_task runs on this machine, with the variables that SLURM would set.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.files import write_file, write_json
from distributed.jobs import array_task, list_plan
from distributed.jobs.call import ListOptions
from distributed.jobs.host import outputs, specification
from distributed.jobs.host.specification import spec_path, taken_path, write_spec
from distributed.jobs.journal.state import ListState, classify_end
from distributed.jobs.lists.config import ClusterConfig, ConfigError
from distributed.jobs.lists.job import ALL_GPUS, Options, job_of
from distributed.jobs.schedule.backend import Event, NotStarted, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.servers import element
from distributed.jobs.servers.element import Element, assign_specs, job_path
from distributed.jobs.servers.host_server import ListContext
from distributed.jobs.servers.sbatch import (
    NO_REPLY,
    QUEUE_FULL,
    QueueEntry,
    ResourceRequest,
    SlurmQueue,
    checked_options,
    contains_any,
    end_without_code,
    error_message,
    parse_queue,
    sbatch_command,
    setting,
    slurm_environment,
    with_gpus,
)
from distributed.jobs.servers.slurm_server import AnyLabels, SlurmServer
from distributed.jobs.servers.submissions import PendingStart
from distributed.launch import node_files

KIT = Path(__file__).resolve().parents[2]
ARRAY = "0a1b2c3d"
CPU = ResourceRequest(0, None, ())


# ---------------------------------------------------------------- sbatch


def command_for(options: list[str], resources: ResourceRequest, count: int = 9) -> list[str]:
    return sbatch_command(
        checked_options(options), resources, name="muster-l-a", count=count, directory="/w", output="o/%a.out",
        script=["task.sh", "kit"],
    )  # fmt: skip


def test_one_array_has_an_element_for_each_attempt_and_is_never_requeued() -> None:
    found = command_for([], CPU)
    assert "--array=0-8" in found
    assert found[-2:] == ["task.sh", "kit"]
    assert {"--no-requeue", "--export=ALL", "--nodes=1", "--ntasks=1", "--chdir=/w", "--parsable"} <= set(found)
    assert not [option for option in found if option.startswith(("--gres", "--time", "--constraint"))]
    assert "--array=0-0" in command_for([], CPU, count=1)


def test_job_options_come_after_cluster_options_because_sbatch_uses_the_last_value() -> None:
    found = command_for(["--time=5", "--requeue-not", "-pgpu"], ResourceRequest(2, 12, ("a100", "ib")))
    assert found.index("--time=12") > found.index("--time=5")
    assert {"-pgpu", "--gres=gpu:2", "--constraint=a100&ib"} <= set(found)
    assert "--constraint=(a|b)&ib" in command_for(["--constraint=(a|b)"], ResourceRequest(0, None, ("ib",)))
    assert "--constraint=x&ib" in command_for(["-C", "x"], ResourceRequest(0, None, ("ib",)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gres=gpu:a100:1"], ["--gres=gpu:a100:4"]),
        (["--gres=gpu"], ["--gres=gpu:4"]),
        (["--gres=gpu:2"], ["--gres=gpu:4"]),
        (["--gres=disk:1,gpu:h100"], ["--gres=disk:1,gpu:h100:4"]),
        (["--gres", "gpu:a100:1"], ["--gres=gpu:a100:4"]),
        (["--gres=disk:1"], ["--gres=disk:1", "--gres=gpu:4"]),
        (["--gpus=h100:1"], ["--gpus=h100:4"]),
        (["--gpus-per-node=1"], ["--gpus-per-node=4"]),
        (["-G", "1"], ["-G4"]),
        (["-G", "a100:1"], ["-Ga100:4"]),
        (["--partition=gpu"], ["--partition=gpu", "--gres=gpu:4"]),
    ],
)
def test_the_number_of_gpus_is_replaced_and_their_type_is_kept(options: list[str], expected: list[str]) -> None:
    assert with_gpus(checked_options(options), 4) == expected


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["gpu"], "'gpu': expected an option"),
        (["--partition=gpu", "gpu"], "'gpu': expected an option"),
        (["-p gpu"], "'-p gpu': contains a space"),
        (["--array=0-3"], "is reserved for Muster"),
        (["-J", "name"], "is reserved for Muster"),
        (["-n4"], "is reserved for Muster"),
        (["--requeue"], "is reserved for Muster"),
    ],
)
def test_invalid_options_of_sbatch_are_rejected(options: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checked_options(options)


def test_options_of_sbatch_may_have_separate_values() -> None:
    assert checked_options(["--partition", "gpu", "-A", "me", "--exclusive"]) == [
        "--partition=gpu",
        "-Ame",
        "--exclusive",
    ]
    assert checked_options(["--comment=two words"]) == ["--comment=two words"]


def test_slurm_s_programs_get_only_the_variables_that_they_need() -> None:
    mine = {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "SBATCH_ACCOUNT": "me", "SLURM_CONF": "/etc/slurm.conf"}
    other = {"WANDB_API_KEY": "secret", "SBATCH_WAIT": "1", "SQUEUE_FORMAT": "%i", "SLURM_JOB_ID": "3", "RANK": "0"}
    assert slurm_environment(mine | other) == mine


# ---------------------------------------------------------------- output of SLURM


def test_only_elements_of_this_list_are_parsed() -> None:
    text = """\
12|3|PENDING|Resources||muster-ab-0a1b2c3d
12|4|RUNNING|None|node2|muster-ab-0a1b2c3d
13|0|COMPLETED|None|node1|muster-ab-ffffffff
14|N/A|RUNNING|None|node1|train|with|bars
15|0|RUNNING|None|node1|muster-other-0a1b2c3d
16|[1-3]|PENDING|Resources||muster-ab-0a1b2c3d

"""
    assert parse_queue(text, "muster-ab-") == {
        ("0a1b2c3d", 3): QueueEntry("12_3", "PENDING", "Resources", ""),
        ("0a1b2c3d", 4): QueueEntry("12_4", "RUNNING", "None", "node2"),
        ("ffffffff", 0): QueueEntry("13_0", "COMPLETED", "None", "node1"),
    }


@given(st.text())
def test_parsers_accept_any_text(text: str) -> None:
    assert isinstance(parse_queue(text, "muster-"), dict)
    assert isinstance(array_task.reason_in(text), tuple)
    assert isinstance(error_message(text), str)


def test_only_unusual_reasons_to_wait_are_shown() -> None:
    assert QueueEntry("1_0", "PENDING", "Priority").waiting_reason == "in SLURM's queue"
    assert QueueEntry("1_0", "PENDING", "PartitionTimeLimit").waiting_reason == "in SLURM's queue: PartitionTimeLimit"
    many = QueueEntry("1_0", "PENDING", "ReqNodeNotAvail, UnavailableNodes:node[1-3]")
    assert many.waiting_reason == "in SLURM's queue: ReqNodeNotAvail"


def test_a_setting_of_slurm_is_found_by_its_full_name() -> None:
    config = "KillOnBadExit           = 0\nKillWait                = 30 sec\nMaxArraySize            = 1001\n"
    assert setting(config, "KillWait") == "30 sec"
    assert setting(config, "Kill") == ""


SBATCH_ERRORS = {
    "limit": "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n",
    "full": "sbatch: error: Batch job submission failed: Resource temporarily unavailable\n",
    "silence": "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
    "slow": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
    "partition": "sbatch: error: invalid partition specified: nosuch\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
    "time": "sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n",
}


def test_errors_of_sbatch_are_distinguished() -> None:
    kinds = {
        name: (contains_any(QUEUE_FULL, text), contains_any(NO_REPLY, text)) for name, text in SBATCH_ERRORS.items()
    }
    assert kinds == {
        "limit": (True, False), "full": (True, False), "silence": (False, True), "slow": (False, True),
        "partition": (False, False), "time": (False, False),
    }  # fmt: skip
    assert error_message(SBATCH_ERRORS["partition"]) == (
        "invalid partition specified: nosuch; Batch job submission failed: Invalid partition name specified"
    )


# ---------------------------------------------------------------- end of an attempt


@pytest.mark.parametrize(
    ("state", "taken", "failure", "reason"),
    [
        ("CANCELLED", False, "cancelled outside", "before it started"),
        ("CANCELLED", True, "cancelled outside", "scancel, not through"),
        ("PREEMPTED", True, "preempted", "higher priority"),
        ("TIMEOUT", True, "timeout", "SLURM's time limit"),
        ("DEADLINE", False, "timeout", "SLURM's time limit"),
        ("OUT_OF_MEMORY", True, "out of memory", "--mem"),
        ("NODE_FAIL", True, "server lost", "SLURM reports that node7 has failed"),
        ("BOOT_FAIL", False, "server lost", "node7"),
        ("FAILED", False, "not started", "FAILED"),
        ("FAILED", True, "supervisor killed", "node7"),
        ("", True, "supervisor killed", "no longer lists it"),
        ("", False, "cancelled outside", "before it started"),
    ],
)
def test_an_attempt_without_an_exit_code_is_classified_by_slurm_s_state(
    state: str, taken: bool, failure: str, reason: str
) -> None:
    entry = QueueEntry("12_3", state, "", "node7") if state else None
    cause, message = end_without_code(entry, taken, started=taken)
    found = classify_end({"code": None, "cause": cause, "message": message}, cancelled=False)
    assert found[0] == failure
    assert reason in found[1]
    assert classify_end({"code": None, "cause": cause, "message": message}, cancelled=True)[0] == "cancelled"


def test_the_reason_of_an_element_that_could_not_start_is_its_output() -> None:
    printed = "array_task.sh: 8: exec: /opt/python: not found"
    for taken in (False, True):
        cause, message = end_without_code(QueueEntry("1_0", "FAILED"), taken, started=False, printed=printed)
        assert classify_end({"cause": cause, "message": message}, cancelled=False) == ("not started", printed)


SHOWN = "JobId=14 ArrayJobId=10 JobState={} Reason={} BatchHost=node7 TimeLimit=00:01:00 PreemptTime={} Requeue=0"


@pytest.mark.parametrize(
    ("state", "reason", "preempted", "cause"),
    [
        ("RUNNING", "None", "None", ""),
        ("COMPLETING", "TimeLimit", "None", "timeout"),
        ("TIMEOUT", "TimeLimit", "None", "timeout"),
        ("RUNNING", "None", "2026-11-23T07:17:33", "preempted"),
        ("NODE_FAIL", "NodeDown", "None", "node failed"),
        ("CANCELLED", "None", "None", "cancelled outside"),
        ("COMPLETING", "None", "None", "cancelled outside"),
    ],
)
def test_the_cause_of_sigterm_is_read_from_scontrol(state: str, reason: str, preempted: str, cause: str) -> None:
    assert array_task.reason_in(SHOWN.format(state, reason, preempted))[0] == cause
    assert array_task.reason_in("slurm_load_jobs error: Invalid job id specified") == ("", "")


def new_state() -> ListState:
    """The state of a list of one job, j."""
    state = ListState()
    job = {"id": "j", "settings": {}, "options": {}, "output": "experiments/j"}
    state.apply({"event": "list", "time": 1.0, "list": "l", "jobs": [job]})
    return state


def add_attempt(state: ListState, number: int, failure: str) -> None:
    name = f"j.{number}"
    state.apply({"event": "start", "time": 2.0, "attempt": name, "server": "slurm", "slots": [0], "gpus": []})
    state.apply({"event": "ended", "time": 3.0, "attempt": name, "failure": failure, "reason": ""})
    state.apply({"event": "settle", "time": 3.0, "job": "j", "state": "waiting", "reason": ""})


def test_preemptions_are_not_counted_as_failures() -> None:
    state = new_state()
    for number in range(1, 20):
        add_attempt(state, number, "preempted")
    assert state.jobs["j"].counted_failures() == []
    assert state.jobs["j"].infrastructure_failures() == []
    add_attempt(state, 20, "server lost")
    assert len(state.jobs["j"].infrastructure_failures()) == 1


def test_the_time_of_an_attempt_excludes_slurm_s_queue() -> None:
    state = new_state()
    state.apply({"event": "start", "time": 10.0, "attempt": "j.1", "server": "slurm", "slots": [0], "gpus": []})
    state.apply({"event": "running", "time": 11.0, "attempt": "j.1", "process": {}})
    state.apply({"event": "waits", "time": 12.0, "attempt": "j.1", "reason": "in SLURM's queue"})
    job = state.jobs["j"]
    assert (job.state, job.reason, job.attempts[0].process) == ("running", "in SLURM's queue", {})
    state.apply({"event": "running", "time": 500.0, "attempt": "j.1", "process": {"pid": 7, "host": "node7"}})
    assert (job.reason, job.attempts[0].start) == ("", 500.0)
    assert job.attempts[0].process["host"] == "node7"


# ---------------------------------------------------------------- job specifications, and the program on compute nodes


@pytest.fixture
def list_directory(tmp_path: Path) -> Path:
    """The directory of a list in a working directory."""
    directory = tmp_path / "logs" / "jobs" / "ab"
    directory.mkdir(parents=True)
    return directory


def make_spec(list_directory: Path, name: str = "j.1", **changes: Any) -> Element:
    """An attempt whose job specification is not assigned to an array."""
    workdir = list_directory.parents[2]
    (list_directory / name).mkdir()
    command = [sys.executable, "-S", "-c", "import os; open('executed', 'a').write(os.environ['MUSTER_JOB'] + '\\n')"]
    spec: dict[str, Any] = {
        "command": command, "workdir": str(workdir), "setup": False, "gpus": 0, "timeout": None, "grace": 1.0,
        "kill_wait": 5, "needs": [0, None, []], "call": {}, "script": "train.py",
    }  # fmt: skip
    env = {"MUSTER_JOB": name, "SECRET": "k3pt"} | changes.pop("env", {})
    env["MUSTER_OUTPUT_DIR"] = str(workdir / "out" / name)
    write_spec(str(list_directory / name), spec | changes | {"env": env})
    return Element(str(list_directory / name), str(workdir / "out" / name), 1.0)


def in_array(list_directory: Path, *elements: Element) -> Path:
    path = list_directory / f"array-{ARRAY}"
    assign_specs(str(path), ARRAY, elements)
    return path


def start_element(array: Path, index: int = 0, **env: str) -> subprocess.Popen[str]:
    """Start what SLURM would start on a node."""
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_JOB_ID": "12", **env}
    command: list[str | Path] = [KIT / "scripts/lib/array_task.sh", KIT, sys.executable, array]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def run_element(array: Path, index: int = 0, **env: str) -> tuple[int, str]:
    """Run an element; return (exit code, standard error)."""
    with start_element(array, index, **env) as task:
        return task.wait(30), task.communicate()[1]


def executed(list_directory: Path) -> list[str]:
    try:
        return (list_directory.parents[2] / "executed").read_text().split()
    except FileNotFoundError:
        return []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
@pytest.mark.parametrize("foreign", ["list", "specification"])
def test_an_element_runs_no_job_specification_of_another_user(list_directory: Path, foreign: str) -> None:
    array = in_array(list_directory, make_spec(list_directory))
    path = list_directory if foreign == "list" else next(list_directory.glob(f"*/order.{ARRAY}"))
    os.chown(path, 65534, 65534)
    code, errors = run_element(array)
    assert code != 0 and "belongs to nobody, and you are root" in errors
    assert executed(list_directory) == []


def test_an_element_runs_its_job_specification_and_writes_the_files_of_a_supervisor(list_directory: Path) -> None:
    attempts = [make_spec(list_directory, "j.1"), make_spec(list_directory, "k.1")]
    assert run_element(in_array(list_directory, *attempts), 1, SLURMD_NODENAME="node7")[0] == 0
    assert executed(list_directory) == ["k.1"]
    end = attempts[1].end()
    assert (end["code"], end["cause"]) == (0, "")
    assert attempts[1].has_ended()
    assert attempts[1].element()["job"] == "12_1"
    assert not attempts[0].has_ended()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 3), (signal.SIGUSR2, 4), (signal.SIGQUIT, 4)])
def test_a_signal_to_an_element_reaches_the_handler_of_its_command_or_stops_it(
    list_directory: Path, number: int, code: int
) -> None:
    """sbatch --signal=B:USR1 reaches only the supervisor."""
    script = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\nopen('executed', 'w').close()\ntime.sleep(300)\n"
    attempt = make_spec(list_directory, command=[sys.executable, "-S", "-c", script], grace=60.0, kill_wait=60)
    with start_element(in_array(list_directory, attempt)) as task:
        end = time.monotonic() + 30
        while not (list_directory.parents[2] / "executed").exists() and time.monotonic() < end:
            time.sleep(0.05)
        task.send_signal(number)
        assert task.wait(30) == code
    assert attempt.end()["code"] == code


def test_a_job_specification_is_private_and_does_not_remain(list_directory: Path) -> None:
    attempt = make_spec(list_directory)
    assert os.stat(spec_path(attempt.directory)).st_mode & 0o777 == 0o600
    path = in_array(list_directory, attempt)
    assert os.stat(spec_path(attempt.directory, ARRAY)).st_mode & 0o777 == 0o600
    assert run_element(path)[0] == 0
    left = [file for file in list_directory.rglob("*") if file.is_file() and b"k3pt" in file.read_bytes()]
    assert not left


def test_an_attempt_that_is_submitted_and_started_many_times_at_once_runs_once(list_directory: Path) -> None:
    path = in_array(list_directory, make_spec(list_directory))
    tasks = [start_element(path) for _ in range(6)]
    printed = [task.communicate(timeout=60)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 6
    assert executed(list_directory) == ["j.1"]
    assert sum("nothing to do" in text for text in printed) == 5


def test_a_withdrawn_job_specification_is_not_executed(list_directory: Path) -> None:
    attempt = make_spec(list_directory)
    path = in_array(list_directory, attempt)
    assert attempt.withdraw()
    code, printed = run_element(path)
    assert "its job specification was already claimed or withdrawn; nothing to do" in printed
    assert (code, executed(list_directory)) == (0, [])
    assert not attempt.withdraw()


def test_a_reassigned_job_specification_is_not_executed_by_the_first_array(list_directory: Path) -> None:
    attempt = make_spec(list_directory)
    path = in_array(list_directory, attempt)
    os.rename(spec_path(attempt.directory, ARRAY), spec_path(attempt.directory))
    other = list_directory / "array-ffffffff"
    assign_specs(str(other), "ffffffff", [attempt])
    assert run_element(path)[0] == 0
    assert executed(list_directory) == []
    assert run_element(other)[0] == 0
    assert executed(list_directory) == ["j.1"]


def test_an_element_that_was_killed_before_its_command_started_may_be_requeued(list_directory: Path) -> None:
    attempt = make_spec(list_directory)
    path = in_array(list_directory, attempt)
    os.rename(spec_path(attempt.directory, ARRAY), taken_path(attempt.directory, ARRAY))
    assert run_element(path)[0] == 0
    assert executed(list_directory) == ["j.1"]
    assert run_element(path)[0] == 0
    assert executed(list_directory) == ["j.1"]


def test_an_attempt_that_is_withdrawn_after_its_element_has_claimed_it_is_not_started(
    list_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_spec(list_directory)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    path = in_array(list_directory, attempt)

    def withdraw_now(*arguments: Any) -> None:
        write_json(*arguments)
        attempt.delete_spec()

    monkeypatch.setattr(array_task, "write_json", withdraw_now)
    assert array_task.main([str(path)]) == 0
    assert executed(list_directory) == []


def test_variables_of_slurm_override_those_of_the_dispatcher(list_directory: Path) -> None:
    show = "import json, os; json.dump(dict(os.environ), open('environment', 'w'))"
    call = specification.dispatcher_environment({
        "CUDA_VISIBLE_DEVICES": "7", "RANK": "3", "PET_NNODES": "2", "SLURM_JOB_ID": "1", "MUSTER_KIT": "x",
        "TMUX": "y", "MODULEPATH": "/modules", "PATH": "/of/the/call", "OMP_NUM_THREADS": "5",
    })  # fmt: skip
    attempt = make_spec(
        list_directory, command=[sys.executable, "-S", "-c", show], call=call, gpus=1,
        env={"MUSTER_JOB": "{}", "MODE": "a b", "MODULEPATH": "of the job"},
    )  # fmt: skip
    assert (
        run_element(
            in_array(list_directory, attempt), CUDA_VISIBLE_DEVICES="1", SLURM_JOB_ID="99", SLURM_CPUS_PER_TASK="3"
        )[0]
        == 0
    )
    environment = json.loads((list_directory.parents[2] / "environment").read_text())
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["SLURM_JOB_ID"]) == ("1", "99")
    assert (environment["MODE"], environment["MODULEPATH"], environment["OMP_NUM_THREADS"]) == (
        "a b",
        "of the job",
        "5",
    )
    assert environment["PATH"] == os.environ["PATH"]
    assert not {"RANK", "PET_NNODES", "MUSTER_KIT", "TMUX"} & set(environment)


def test_setup_lines_override_the_dispatcher_s_variables_but_not_the_job_s(list_directory: Path) -> None:
    show = "import json, os; json.dump(dict(os.environ), open('environment', 'w'))"
    attempt = make_spec(
        list_directory,
        command=[sys.executable, "-S", "-c", show],
        call={"MODULES": "none"},
        env={"MINE": "job"},
        setup=True,
    )
    (list_directory / "j.1" / "setup.sh").write_text("export MODULES=loaded MINE=setup\n")
    assert run_element(in_array(list_directory, attempt))[0] == 0
    environment = json.loads((list_directory.parents[2] / "environment").read_text())
    assert (environment["MODULES"], environment["MINE"], environment["CUDA_VISIBLE_DEVICES"]) == ("loaded", "job", "")


def test_a_job_that_exceeds_its_timeout_ends_with_timeout(list_directory: Path) -> None:
    attempt = make_spec(list_directory, command=["sleep", "60"], timeout=1)
    assert run_element(in_array(list_directory, attempt))[0] == 143
    assert classify_end(attempt.end(), cancelled=False) == ("timeout", "the command has run for 1 s (_timeout)")


def test_a_missing_array_or_index_is_reported(list_directory: Path) -> None:
    program: list[str | Path] = [sys.executable, "-I", "-S", KIT / "scripts/lib/module.py", "jobs.array_task"]
    wrong = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "array_task: expected one argument, the directory of an array\n")
    none = subprocess.run([*program, list_directory], capture_output=True, text=True, check=False, env={})
    assert none.returncode == 69
    assert "SLURM_ARRAY_TASK_ID" in none.stderr


# ---------------------------------------------------------------- elements, on the dispatcher's side


@pytest.mark.parametrize(
    ("claim", "code", "slurm", "expected"),
    [
        ("unclaimed", "missing", "waits", "waits"),
        ("unclaimed", "missing", "runs", "running"),  # SLURM starts the element, or does not list it yet
        ("unclaimed", "missing", "left", "not started"),
        ("unclaimed", "missing", "unsubmitted", "held"),
        ("withdrawn", "missing", "waits", "nothing"),
        ("withdrawn", "missing", "runs", "nothing"),
        ("withdrawn", "missing", "left", "withdrawn"),
        ("claimed", "missing", "runs", "running"),
        ("claimed", "missing", "waits", "running"),  # requeued by an administrator
        ("claimed", "missing", "left", "running"),
        ("alive", "missing", "left", "overdue"),
        ("silent", "missing", "left", "lost"),
        ("claimed", "explained", "runs", "ended"),
        ("claimed", "explained", "waits", "ended"),
        ("silent", "explained", "left", "ended"),
        ("claimed", "unexplained", "runs", "nothing"),
        ("claimed", "unexplained", "waits", "nothing"),
        ("alive", "unexplained", "left", "ended"),
    ],
)
def test_the_event_follows_from_the_claim_the_exit_code_and_the_state_in_slurm(
    claim: str, code: str, slurm: str, expected: str
) -> None:
    assert element.event_of(claim, code, slurm) == expected


def test_every_observation_has_an_event() -> None:
    claims = ("withdrawn", "unclaimed", "claimed", "alive", "silent")
    codes, states = ("missing", "unexplained", "explained"), ("waits", "runs", "left", "unsubmitted")
    for observed in itertools.product(claims, codes, states):
        assert element.event_of(*observed)


def events_of(
    attempt: Element, state: str = "", *, now: float = 0.0, called_at: float | None = None
) -> list[tuple[str, Any]]:
    """Poll an element while SLURM shows this state or, if the state is empty, does not list it."""
    entries = {(ARRAY, 0): QueueEntry("12_0", state, "Resources", "node7")} if state else {}
    queue = SlurmQueue(time.monotonic() if called_at is None else called_at, entries)
    return list(attempt.poll(queue, now, progress=False))


def kinds(events: list[tuple[str, Any]]) -> list[str]:
    return [kind for kind, _ in events]


@pytest.fixture
def submitted(list_directory: Path) -> Element:
    """An element that SLURM has accepted."""
    attempt = make_spec(list_directory)
    path = in_array(list_directory, attempt)
    Path(job_path(str(path))).write_text("12\n")
    attempt.array, attempt.index, attempt.changed_at = ARRAY, 0, time.monotonic()
    return attempt


def test_waiting_is_reported_once_and_the_end_is_reported_with_the_exit_code(submitted: Element) -> None:
    assert events_of(submitted, "PENDING") == [("waits", {"reason": "in SLURM's queue"})]
    assert events_of(submitted, "PENDING") == []
    run_element(Path(submitted.directory).parent / f"array-{ARRAY}")
    found = events_of(submitted, "RUNNING")
    assert kinds(found) == ["started", "ended"]
    assert found[0][1]["host"] == os.uname().nodename
    assert found[1][1]["code"] == 0


def test_an_outdated_queue_is_ignored(submitted: Element) -> None:
    assert events_of(submitted, "", called_at=submitted.changed_at - 1) == []
    assert os.path.exists(spec_path(submitted.directory, ARRAY))


@pytest.mark.parametrize(("state", "cause"), [("CANCELLED", "cancelled outside"), ("", "cancelled outside")])
def test_an_element_that_left_the_queue_unstarted_cannot_start_later(
    submitted: Element, state: str, cause: str
) -> None:
    found = events_of(submitted, state)
    assert kinds(found) == ["ended"]
    assert found[0][1]["cause"] == cause
    assert run_element(Path(submitted.directory).parent / f"array-{ARRAY}")[0] == 0
    assert executed(Path(submitted.directory).parent) == []


def test_a_job_specification_is_released_if_slurm_never_accepted_its_array(submitted: Element) -> None:
    os.unlink(job_path(str(Path(submitted.directory).parent / f"array-{ARRAY}")))  # as if the dispatcher was killed
    assert kinds(events_of(submitted, "")) == ["held"]
    assert os.path.exists(spec_path(submitted.directory))
    assert (submitted.array, submitted.find()) == ("", "held")


def mark_started(attempt: Element) -> None:
    """Write the files of a started element, without processes."""
    attempt.delete_spec()
    write_json(os.path.join(attempt.directory, "element.json"), {"array": ARRAY, "host": "node7", "time": 5})
    write_json(attempt.files.pids, {"boot_id": "other", "command": {"pid": 7, "start_time": 9}})


def test_a_running_element_is_reported_with_its_node_and_process(submitted: Element) -> None:
    mark_started(submitted)
    found = events_of(submitted, "RUNNING")
    facts = {"state": "running", "boot_id": "other", "pid": 7, "start_time": 9, "host": "node7"}
    assert found == [("started", facts)]
    assert events_of(submitted, "RUNNING") == []


def test_an_element_that_slurm_reports_as_ended_is_treated_as_running_until_heartbeats_stop(submitted: Element) -> None:
    mark_started(submitted)
    events_of(submitted, "RUNNING")
    now = 0.0
    for beat in range(1, 30):
        Path(submitted.files.heartbeat).touch()
        os.utime(submitted.files.heartbeat, (beat, beat))
        now += 0.9 * element.HEARTBEAT_TIMEOUT
        assert events_of(submitted, "NODE_FAIL", now=now) == []
    assert Path(submitted.files.request).read_text() == "kill\n"  # in case the supervisor can read it
    found = events_of(submitted, "NODE_FAIL", now=now + 1.1 * element.HEARTBEAT_TIMEOUT)
    assert kinds(found) == ["ended"]
    assert classify_end(found[0][1], cancelled=False) == ("server lost", "SLURM reports that node7 has failed")


@pytest.mark.parametrize(
    ("state", "failure"), [("OUT_OF_MEMORY", "out of memory"), ("NODE_FAIL", "server lost"), ("FAILED", "signal")]
)
def test_a_killed_command_gets_the_cause_from_slurm_s_later_state(submitted: Element, state: str, failure: str) -> None:
    mark_started(submitted)
    write_file(submitted.files.exit, "137\n")
    assert events_of(submitted, "COMPLETING", now=1.0) == []
    found = events_of(submitted, state, now=2.0)
    assert kinds(found) == ["started", "ended"]
    assert classify_end(found[1][1], cancelled=False)[0] == failure


def test_an_end_that_slurm_does_not_explain_is_reported_after_a_timeout(submitted: Element) -> None:
    mark_started(submitted)
    write_file(submitted.files.exit, "143\n")
    assert events_of(submitted, "COMPLETING", now=1.0) == []
    assert kinds(events_of(submitted, "COMPLETING", now=2.0 + element.CAUSE_TIMEOUT)) == ["started", "ended"]


def test_an_end_that_slurm_reports_after_a_heartbeat_timeout_needs_no_second_timeout(submitted: Element) -> None:
    mark_started(submitted)
    Path(submitted.files.heartbeat).touch()
    entries = {(ARRAY, 0): QueueEntry("12_0", "RUNNING")}
    for now in (1.0, 100.0):
        list(submitted.poll(SlurmQueue(time.monotonic(), entries), now, progress=True))
    assert events_of(submitted, "NODE_FAIL", now=101.0) == []
    assert kinds(events_of(submitted, "NODE_FAIL", now=102.0 + element.EXIT_CODE_DELAY)) == ["ended"]


def test_an_element_that_returns_to_the_queue_is_not_treated_as_ended(submitted: Element) -> None:
    mark_started(submitted)
    assert kinds(events_of(submitted, "COMPLETED", now=0.0)) == ["started"]
    assert events_of(submitted, "RUNNING", now=0.9 * element.HEARTBEAT_TIMEOUT) == []
    assert events_of(submitted, "COMPLETED", now=1.8 * element.HEARTBEAT_TIMEOUT) == []
    assert kinds(events_of(submitted, "COMPLETED", now=2.9 * element.HEARTBEAT_TIMEOUT)) == ["ended"]


def test_stopping_a_waiting_element_withdraws_its_job_specification_and_waits_for_slurm(
    submitted: Element,
) -> None:
    submitted.stop(kill=False)
    assert submitted.cancelled
    assert submitted.cancel_at <= time.monotonic()
    assert events_of(submitted, "PENDING") == []
    found = events_of(submitted, "CANCELLED")
    assert kinds(found) == ["ended"]
    assert classify_end(found[0][1], cancelled=True) == ("cancelled", "cancelled on request")
    assert not [name for name in submitted.file_names() if name.startswith(("order", "taken"))]


def test_stopping_a_running_element_sends_a_request_to_its_supervisor(submitted: Element) -> None:
    mark_started(submitted)
    submitted.stop(kill=False)
    assert Path(submitted.files.request).read_text() == "stop\n"
    assert not submitted.cancelled
    assert time.monotonic() < submitted.cancel_at < math.inf  # the time when scancel is called


def test_a_later_dispatcher_finds_the_state_of_an_attempt(list_directory: Path) -> None:
    assert Element(str(list_directory / "none.1"), "", 1.0).find() == "absent"
    (list_directory / "empty.1").mkdir()
    (list_directory / "empty.1" / ".order").write_text("half a specification with a secret")
    assert Element(str(list_directory / "empty.1"), "", 1.0).find() == "absent"
    assert not (list_directory / "empty.1" / ".order").exists()
    held, other = make_spec(list_directory, "held.1"), make_spec(list_directory, "other.1")
    assert held.find() == "held"
    path = in_array(list_directory, other, held)
    assert (held.find(), held.array, held.index) == ("submitted", ARRAY, 1)
    assert run_element(path, 1)[0] == 0
    assert held.find() == "ended"
    mark_started(other)
    assert (other.find(), other.array, other.index) == ("submitted", ARRAY, 0)
    write_file(other.files.exit, "137\n")
    assert other.find() == "submitted"  # SLURM may still report why the command was killed
    os.mkdir(os.path.dirname(other.files.record))
    node_files.write_record(other.files, "killed", "its guard was running")
    assert other.find() == "ended"


# ---------------------------------------------------------------- the server


def slurm_server(tmp_path: Path, slots_needed: int = 9, **cluster: Any) -> SlurmServer:
    tree = {"servers": [{"host": "slurm", "gpus": 2}], **cluster}
    return SlurmServer(ClusterConfig.model_validate(tree), ListContext("ab", tmp_path, "train.py"), slots_needed)


def test_the_number_of_slots_is_limited_by_jobs_and_max_queued(tmp_path: Path) -> None:
    assert len(slurm_server(tmp_path, 9).pool.slots) == 9
    assert len(slurm_server(tmp_path, 10_000).pool.slots) == 256
    assert len(slurm_server(tmp_path, 10_000, max_queued=500).pool.slots) == 500
    assert all(slot.gpu is None for slot in slurm_server(tmp_path).pool.slots)


def test_adding_jobs_to_a_list_adds_slots_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.json").write_text(json.dumps([{"n": 1}, {"n": 2, "_gpus": 4}]))
    server = slurm_server(tmp_path, 1)
    server.pool.free -= {0}
    options = ListOptions(backend="slurm")
    cluster = ClusterConfig.model_validate({"servers": [{"host": "slurm", "gpus": 2}]})
    config = list_plan.ListConfig(options, cluster, "x.py", [job_of({"n": 1}, Options())], Cache(tmp_path), "abc")
    (new,) = list_plan.jobs_to_add(config, [server], config.jobs, str(tmp_path / "more.json"))
    assert (new.settings, new.file) == ({"n": 2}, str(tmp_path / "more.json"))
    assert (len(server.pool.slots), server.pool.free, server.pool.capacity()) == (5, {1, 2, 3, 4}, 5)


def test_any_labels_are_accepted_as_features() -> None:
    assert frozenset({"a100"}) <= AnyLabels()
    assert not frozenset({"a100"}) <= frozenset()


def test_another_working_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workdir /elsewhere: .* run the command in workdir, or remove workdir"):
        slurm_server(tmp_path, servers=[{"host": "slurm", "workdir": "/elsewhere"}])
    slurm_server(tmp_path, servers=[{"host": "slurm", "workdir": str(tmp_path)}])


def submit(server: SlurmServer, count: int, reply: tuple[int, str, str]) -> tuple[list[Any], list[Event]]:
    """Make the server handle a reply of sbatch to `count` starts. Returns the result of each start, and the events."""
    events: list[Event] = []

    async def submit() -> list[Any]:
        server._submissions.open(events.append, 1000)
        server._lost = asyncio.get_running_loop().create_future()
        replies = [asyncio.get_running_loop().create_future() for _ in range(count)]
        elements = [make_spec(Path(server.directory), f"j{number}.1") for number in range(count)]
        starts = [PendingStart(each, CPU, reply=reply) for each, reply in zip(elements, replies, strict=True)]
        assign_specs(server._submissions.array_path(ARRAY), ARRAY, elements)
        await server._submissions._handle_sbatch_reply(CPU, starts, ARRAY, *reply)
        return await asyncio.gather(*replies, return_exceptions=True)

    return asyncio.run(submit()), events


def test_an_accepted_array_is_registered_with_its_job_id(tmp_path: Path) -> None:
    server = slurm_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit(server, 2, (0, "4711;cluster\n", "sbatch: info: be nice\n"))
    assert found == [{"state": "running"}] * 2
    assert Path(job_path(server._submissions.array_path(ARRAY))).read_text() == "4711\n"
    assert [(each.array, each.index) for each in server._elements.values()] == [(ARRAY, 0), (ARRAY, 1)]


def test_a_refusal_of_slurm_is_reported_and_removes_the_job_specifications(tmp_path: Path) -> None:
    server = slurm_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit(server, 2, (1, "", SBATCH_ERRORS["partition"]))
    assert all(isinstance(each, NotStarted) and each.kind != "job" for each in found)
    assert "invalid partition specified: nosuch" in str(found[0])
    assert not list(Path(server.directory).glob("*/order*"))


def test_without_a_reply_of_slurm_the_job_specifications_are_kept(tmp_path: Path) -> None:
    server = slurm_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit(server, 2, (1, "", SBATCH_ERRORS["slow"]))
    assert all(isinstance(each, Unreachable) for each in found)
    assert len(list(Path(server.directory).glob(f"*/order.{ARRAY}"))) == 2


def test_an_attempt_that_exceeds_a_limit_is_held_and_can_be_cancelled(tmp_path: Path) -> None:
    server = slurm_server(tmp_path)
    os.makedirs(server.directory)
    found, events = submit(server, 1, (1, "", SBATCH_ERRORS["limit"]))
    assert found == [{"state": "running"}]
    assert [(each.kind, each.facts["attempt"]) for each in events] == [("waits", "j0.1")]
    assert "not yet in SLURM's queue: QOSMaxSubmitJobPerUserLimit" in events[0].facts["reason"]
    assert list(Path(server.directory).glob("*/order"))
    events.clear()
    with pytest.raises(Unreachable):
        asyncio.run(server.stop("j0.1", kill=False))  # SLURM's queue is not known yet
    server._ready = True
    asyncio.run(server.stop("j0.1", kill=False))
    assert [(each.kind, each.facts["attempt"]) for each in events] == [("ended", "j0.1")]
    assert not list(Path(server.directory).glob("*/order*"))


def test_only_the_job_specification_contains_the_secrets_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("MODULEPATH", "/modules")
    server = slurm_server(tmp_path)
    job = job_of({"name": "it's"}, Options(env={"KEY": "k3pt"}, timeout=100.0, gpus=2, labels=("b", "a")))
    resources = server._resources_for(job.options)
    assert resources == ResourceRequest(2, 4, ("a", "b"))  # 4 minutes: 100 s, 30 s of grace and 60 s, rounded up
    start = PendingStart(server._element_of("j.1", job.output), resources, job)
    written = server._spec_of(start)
    assert written["command"][-4:] == ["--name", "it's", "--device", "cuda:0"]
    assert (written["env"]["KEY"], written["timeout"]) == ("k3pt", 100)
    assert written["env"]["MUSTER_OUTPUT_DIR"] == str(tmp_path / job.output)
    assert written["call"]["MODULEPATH"] == "/modules"
    assert "CUDA_VISIBLE_DEVICES" not in written["call"]
    assert "k3pt" not in json.dumps([written["command"], written["call"]])
    assert "k3pt" not in " ".join(server._submissions._sbatch(resources, ARRAY, 1))


def test_jobs_on_a_cpu_node_get_no_gpu(tmp_path: Path) -> None:
    server = slurm_server(tmp_path, servers=[{"host": "slurm", "gpus": 0}])
    job = job_of({"name": "a"}, Options())
    assert server._resources_for(job.options) == CPU
    spec = server._spec_of(PendingStart(server._element_of("j.1", job.output), CPU, job))
    assert spec["command"][-2:] == ["--device", "cpu"]


def test_an_output_directory_of_another_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiments" / "x").mkdir(parents=True)
    (tmp_path / "experiments" / "x" / "result").touch()
    (tmp_path / "experiments" / "x" / outputs.OWNER).write_text("another\n")
    with pytest.raises(outputs.JobRefused, match="holds the results of job another"):
        outputs.claim_output(str(tmp_path), str(tmp_path / "experiments" / "x"), "mine", "train.py")


def test_a_job_that_requests_all_gpus_gets_those_of_one_node_and_takes_one_slot(tmp_path: Path) -> None:
    server = slurm_server(tmp_path)
    assert server._resources_for(Options(gpus=ALL_GPUS)) == ResourceRequest(2, None, ())
    assert server.pool.count(ALL_GPUS) == 1
