"""Job lists on SLURM: what sbatch is told, what SLURM's words mean, and who may carry out an order.

What a real SLURM makes of it is in jobs_slurm.bats. Here the compute node's program runs on this machine, with the
variables that SLURM would set.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.files import write_file, write_json
from distributed.jobs import array_task, element, host
from distributed.jobs.array_task import order_path, taken_path, write_order
from distributed.jobs.config import Cluster, ConfigError
from distributed.jobs.dispatcher import Event, NotStarted, Order, Unreachable
from distributed.jobs.element import Element, assign, job_path
from distributed.jobs.job import Options, job_of
from distributed.jobs.sbatch import (
    LIMITS,
    SILENCE,
    Entry,
    Needs,
    Queue,
    any_of,
    checked_options,
    end_without_code,
    environment_of_programs,
    parse_queue,
    said,
    sbatch_words,
    setting,
    with_gpus,
)
from distributed.jobs.servers import Launch
from distributed.jobs.slurm import AnyLabels, SlurmServer, Start
from distributed.jobs.state import State, judge
from distributed.launch import supervisor

KIT = Path(__file__).resolve().parents[2]
ARRAY = "0a1b2c3d"
CPU = Needs(0, None, ())


# ---------------------------------------------------------------- sbatch


def words(options: list[str], needs: Needs, count: int = 9) -> list[str]:
    return sbatch_words(
        checked_options(options), needs, name="muster-l-a", count=count, directory="/w", output="o/%a.out",
        script=["task.sh", "kit"],
    )  # fmt: skip


def test_one_array_has_an_element_for_each_start_and_is_never_requeued() -> None:
    found = words([], CPU)
    assert "--array=0-8" in found
    assert found[-2:] == ["task.sh", "kit"]
    assert {"--no-requeue", "--export=ALL", "--nodes=1", "--ntasks=1", "--chdir=/w", "--parsable"} <= set(found)
    assert not [word for word in found if word.startswith(("--gres", "--time", "--constraint"))]
    assert "--array=0-0" in words([], CPU, count=1)


def test_what_a_job_needs_stands_behind_the_options_of_the_cluster_as_sbatch_takes_the_last() -> None:
    found = words(["--time=5", "--requeue-not", "-pgpu"], Needs(2, 12, ("a100", "ib")))
    assert found.index("--time=12") > found.index("--time=5")
    assert {"-pgpu", "--gres=gpu:2", "--constraint=a100&ib"} <= set(found)
    assert "--constraint=(a|b)&ib" in words(["--constraint=(a|b)"], Needs(0, None, ("ib",)))
    assert "--constraint=x&ib" in words(["-C", "x"], Needs(0, None, ("ib",)))


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
def test_the_number_of_gpus_is_the_job_s_and_their_type_that_of_the_cluster(
    options: list[str], expected: list[str]
) -> None:
    assert with_gpus(checked_options(options), 4) == expected


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["gpu"], "'gpu': expected an option"),
        (["--partition=gpu", "gpu"], "'gpu': expected an option"),
        (["-p gpu"], "'-p gpu': holds a blank"),
        (["--array=0-3"], "is set for each array"),
        (["-J", "name"], "is set for each array"),
        (["-n4"], "is set for each array"),
        (["--requeue"], "is set for each array"),
    ],
)
def test_options_of_sbatch_that_cannot_be_meant_are_refused(options: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checked_options(options)


def test_options_of_sbatch_may_have_their_values_in_a_string_of_their_own() -> None:
    assert checked_options(["--partition", "gpu", "-A", "me", "--exclusive"]) == [
        "--partition=gpu",
        "-Ame",
        "--exclusive",
    ]
    assert checked_options(["--comment=two words"]) == ["--comment=two words"]


def test_slurm_gets_of_the_environment_only_what_its_programs_need() -> None:
    mine = {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "SBATCH_ACCOUNT": "me", "SLURM_CONF": "/etc/slurm.conf"}
    other = {"WANDB_API_KEY": "secret", "SBATCH_WAIT": "1", "SQUEUE_FORMAT": "%i", "SLURM_JOB_ID": "3", "RANK": "0"}
    assert environment_of_programs(mine | other) == mine


# ---------------------------------------------------------------- what SLURM shows


def test_of_the_queue_only_the_elements_of_this_list_count() -> None:
    text = """\
12|3|PENDING|Resources||muster-ab-0a1b2c3d
12|4|RUNNING|None|node2|muster-ab-0a1b2c3d
13|0|COMPLETED|None|node1|muster-ab-ffffffff
14|N/A|RUNNING|None|node1|train|with|bars
15|0|RUNNING|None|node1|muster-other-0a1b2c3d
16|[1-3]|PENDING|Resources||muster-ab-0a1b2c3d

"""
    assert parse_queue(text, "muster-ab-") == {
        ("0a1b2c3d", 3): Entry("12_3", "PENDING", "Resources", ""),
        ("0a1b2c3d", 4): Entry("12_4", "RUNNING", "None", "node2"),
        ("ffffffff", 0): Entry("13_0", "COMPLETED", "None", "node1"),
    }


@given(st.text())
def test_whatever_squeue_prints_is_no_crash(text: str) -> None:
    assert isinstance(parse_queue(text, "muster-"), dict)
    assert isinstance(array_task.reason_in(text), tuple)
    assert isinstance(said(text), str)


def test_why_an_element_waits_is_shown_where_it_needs_somebody() -> None:
    assert Entry("1_0", "PENDING", "Priority").waiting_reason == "in SLURM's queue"
    assert Entry("1_0", "PENDING", "PartitionTimeLimit").waiting_reason == "in SLURM's queue: PartitionTimeLimit"
    many = Entry("1_0", "PENDING", "ReqNodeNotAvail, UnavailableNodes:node[1-3]")
    assert many.waiting_reason == "in SLURM's queue: ReqNodeNotAvail"


def test_a_setting_of_slurm_is_read_by_its_whole_name() -> None:
    config = "KillOnBadExit           = 0\nKillWait                = 30 sec\nMaxArraySize            = 1001\n"
    assert setting(config, "KillWait") == "30 sec"
    assert setting(config, "Kill") == ""


SBATCH_SAYS = {
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


def test_a_full_queue_a_silent_controller_and_a_refusal_are_three_things() -> None:
    kinds = {name: (any_of(LIMITS, text), any_of(SILENCE, text)) for name, text in SBATCH_SAYS.items()}
    assert kinds == {
        "limit": (True, False), "full": (True, False), "silence": (False, True), "slow": (False, True),
        "partition": (False, False), "time": (False, False),
    }  # fmt: skip
    assert said(SBATCH_SAYS["partition"]) == (
        "invalid partition specified: nosuch; Batch job submission failed: Invalid partition name specified"
    )


# ---------------------------------------------------------------- how an attempt ended


@pytest.mark.parametrize(
    ("state", "taken", "failure", "reason"),
    [
        ("CANCELLED", False, "cancelled outside", "before it was started"),
        ("CANCELLED", True, "cancelled outside", "(scancel), not through"),
        ("PREEMPTED", True, "preempted", "more urgent"),
        ("TIMEOUT", True, "timeout", "SLURM's time limit"),
        ("DEADLINE", False, "timeout", "SLURM's time limit"),
        ("OUT_OF_MEMORY", True, "out of memory", "--mem"),
        ("NODE_FAIL", True, "server lost", "SLURM says that node7 has failed"),
        ("BOOT_FAIL", False, "server lost", "node7"),
        ("FAILED", False, "not started", "FAILED"),
        ("FAILED", True, "supervisor killed", "node7"),
        ("", True, "supervisor killed", "does not know it any more"),
        ("", False, "cancelled outside", "before it was started"),
    ],
)
def test_an_attempt_without_an_exit_code_has_the_class_that_slurm_s_state_means(
    state: str, taken: bool, failure: str, reason: str
) -> None:
    entry = Entry("12_3", state, "", "node7") if state else None
    cause, message = end_without_code(entry, taken, begun=taken)
    found = judge({"code": None, "cause": cause, "message": message}, cancelled=False)
    assert found[0] == failure
    assert reason in found[1]
    assert judge({"code": None, "cause": cause, "message": message}, cancelled=True)[0] == "cancelled"


def test_an_element_that_could_not_begin_says_why() -> None:
    printed = "array_task.sh: 8: exec: /opt/python: not found"
    for taken in (False, True):
        cause, message = end_without_code(Entry("1_0", "FAILED"), taken, begun=False, printed=printed)
        assert judge({"cause": cause, "message": message}, cancelled=False) == ("not started", printed)


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
def test_why_slurm_sends_sigterm_is_what_it_shows_of_the_job(
    state: str, reason: str, preempted: str, cause: str
) -> None:
    assert array_task.reason_in(SHOWN.format(state, reason, preempted))[0] == cause
    assert array_task.reason_in("slurm_load_jobs error: Invalid job id specified") == ("", "")


def a_state() -> State:
    """Of a list of one job, j."""
    state = State()
    job = {"id": "j", "settings": {}, "options": {}, "output": "experiments/j"}
    state.apply({"event": "list", "time": 1.0, "list": "l", "jobs": [job]})
    return state


def attempt_that(state: State, number: int, failure: str) -> None:
    name = f"j.{number}"
    state.apply({"event": "start", "time": 2.0, "attempt": name, "server": "slurm", "slots": [0], "gpus": []})
    state.apply({"event": "ended", "time": 3.0, "attempt": name, "failure": failure, "reason": ""})
    state.apply({"event": "settle", "time": 3.0, "job": "j", "state": "waiting", "reason": ""})


def test_a_job_that_slurm_preempts_again_and_again_neither_fails_nor_counts_as_lost() -> None:
    state = a_state()
    for number in range(1, 20):
        attempt_that(state, number, "preempted")
    assert state.jobs["j"].failures() == []
    assert state.jobs["j"].lost() == []
    attempt_that(state, 20, "server lost")
    assert len(state.jobs["j"].lost()) == 1


def test_the_time_in_slurm_s_queue_is_no_time_of_the_attempt() -> None:
    state = a_state()
    state.apply({"event": "start", "time": 10.0, "attempt": "j.1", "server": "slurm", "slots": [0], "gpus": []})
    state.apply({"event": "running", "time": 11.0, "attempt": "j.1", "process": {}})
    state.apply({"event": "waits", "time": 12.0, "attempt": "j.1", "reason": "in SLURM's queue"})
    job = state.jobs["j"]
    assert (job.state, job.reason, job.attempts[0].process) == ("running", "in SLURM's queue", {})
    state.apply({"event": "running", "time": 500.0, "attempt": "j.1", "process": {"pid": 7, "host": "node7"}})
    assert (job.reason, job.attempts[0].start) == ("", 500.0)
    assert job.attempts[0].process["host"] == "node7"


# ---------------------------------------------------------------- orders: the program of the compute node


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    """The directory of a list, below a working directory."""
    directory = tmp_path / "logs" / "jobs" / "ab"
    directory.mkdir(parents=True)
    return directory


def make_order(listing: Path, name: str = "j.1", **changes: Any) -> Element:
    """An attempt whose order belongs to no array."""
    workdir = listing.parents[2]
    (listing / name).mkdir()
    command = [sys.executable, "-S", "-c", "import os; open('ran', 'a').write(os.environ['MUSTER_JOB'] + '\\n')"]
    order: dict[str, Any] = {
        "command": command, "workdir": str(workdir), "setup": False, "gpus": 0, "timeout": None, "grace": 1.0,
        "kill_wait": 5, "needs": [0, None, []], "call": {}, "script": "train.py",
    }  # fmt: skip
    env = {"MUSTER_JOB": name, "SECRET": "k3pt"} | changes.pop("env", {})
    env["MUSTER_OUTPUT_DIR"] = str(workdir / "out" / name)
    write_order(str(listing / name), order | changes | {"env": env})
    return Element(str(listing / name), str(workdir / "out" / name), 1.0)


def in_array(listing: Path, *elements: Element) -> Path:
    path = listing / f"array-{ARRAY}"
    assign(str(path), ARRAY, elements)
    return path


def start_element(array: Path, index: int = 0, **env: str) -> subprocess.Popen[str]:
    """What SLURM starts on a node."""
    here = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_JOB_ID": "12", **env}
    words: list[str | Path] = [KIT / "scripts/lib/array_task.sh", KIT, sys.executable, array]
    return subprocess.Popen(words, env=here, stderr=subprocess.PIPE, text=True)


def run_element(array: Path, index: int = 0, **env: str) -> tuple[int, str]:
    """(exit code, standard error) of it."""
    with start_element(array, index, **env) as task:
        return task.wait(30), task.communicate()[1]


def ran(listing: Path) -> list[str]:
    try:
        return (listing.parents[2] / "ran").read_text().split()
    except FileNotFoundError:
        return []


def test_an_element_carries_its_order_out_and_leaves_the_files_of_a_supervisor(listing: Path) -> None:
    attempts = [make_order(listing, "j.1"), make_order(listing, "k.1")]
    assert run_element(in_array(listing, *attempts), 1, SLURMD_NODENAME="node7")[0] == 0
    assert ran(listing) == ["k.1"]
    end = attempts[1].end()
    assert (end["code"], end["cause"]) == (0, "")
    assert attempts[1].has_ended()
    assert attempts[1].element()["job"] == "12_1"
    assert not attempts[0].has_ended()


def test_an_order_can_be_read_by_its_user_alone_and_is_gone_when_it_is_carried_out(listing: Path) -> None:
    attempt = make_order(listing)
    assert os.stat(order_path(attempt.directory)).st_mode & 0o777 == 0o600
    path = in_array(listing, attempt)
    assert os.stat(order_path(attempt.directory, ARRAY)).st_mode & 0o777 == 0o600
    assert run_element(path)[0] == 0
    left = [file for file in listing.rglob("*") if file.is_file() and b"k3pt" in file.read_bytes()]
    assert not left


def test_an_attempt_that_is_submitted_and_started_many_times_at_once_runs_once(listing: Path) -> None:
    path = in_array(listing, make_order(listing))
    tasks = [start_element(path) for _ in range(6)]
    printed = [task.communicate(timeout=60)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 6
    assert ran(listing) == ["j.1"]
    assert sum("nothing to do" in text for text in printed) == 5


def test_an_order_that_was_taken_back_is_not_carried_out(listing: Path) -> None:
    attempt = make_order(listing)
    path = in_array(listing, attempt)
    assert attempt.void()
    code, printed = run_element(path)
    assert "its order was carried out, or taken back; nothing to do" in printed
    assert (code, ran(listing)) == (0, [])
    assert not attempt.void()


def test_an_order_that_was_handed_to_another_array_is_not_carried_out_by_the_first(listing: Path) -> None:
    attempt = make_order(listing)
    path = in_array(listing, attempt)
    os.rename(order_path(attempt.directory, ARRAY), order_path(attempt.directory))
    other = listing / "array-ffffffff"
    assign(str(other), "ffffffff", [attempt])
    assert run_element(path)[0] == 0
    assert ran(listing) == []
    assert run_element(other)[0] == 0
    assert ran(listing) == ["j.1"]


def test_an_element_that_was_ended_before_it_could_start_anything_may_be_started_again(listing: Path) -> None:
    attempt = make_order(listing)
    path = in_array(listing, attempt)
    os.rename(order_path(attempt.directory, ARRAY), taken_path(attempt.directory, ARRAY))
    assert run_element(path)[0] == 0
    assert ran(listing) == ["j.1"]
    assert run_element(path)[0] == 0
    assert ran(listing) == ["j.1"]


def test_an_attempt_that_was_given_up_is_not_started_however_late_its_element_comes(
    listing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_order(listing)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    path = in_array(listing, attempt)

    def given_up_now(*arguments: Any) -> None:
        write_json(*arguments)
        attempt.forget_order()

    monkeypatch.setattr(array_task, "write_json", given_up_now)
    assert array_task.main([str(path)]) == 0
    assert ran(listing) == []


def test_the_job_sees_what_slurm_has_set_and_of_the_call_only_the_rest(listing: Path) -> None:
    show = "import json, os; json.dump(dict(os.environ), open('seen', 'w'))"
    call = array_task.carried({
        "CUDA_VISIBLE_DEVICES": "7", "RANK": "3", "PET_NNODES": "2", "SLURM_JOB_ID": "1", "MUSTER_KIT": "x",
        "TMUX": "y", "MODULEPATH": "/modules", "PATH": "/of/the/call", "OMP_NUM_THREADS": "5",
    })  # fmt: skip
    attempt = make_order(
        listing, command=[sys.executable, "-S", "-c", show], call=call, gpus=1,
        env={"MUSTER_JOB": "{}", "MODE": "a b", "MODULEPATH": "of the job"},
    )  # fmt: skip
    assert (
        run_element(in_array(listing, attempt), CUDA_VISIBLE_DEVICES="1", SLURM_JOB_ID="99", SLURM_CPUS_PER_TASK="3")[0]
        == 0
    )
    seen = json.loads((listing.parents[2] / "seen").read_text())
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["SLURM_JOB_ID"]) == ("1", "99")
    assert (seen["MODE"], seen["MODULEPATH"], seen["OMP_NUM_THREADS"]) == ("a b", "of the job", "5")
    assert seen["PATH"] == os.environ["PATH"]
    assert not {"RANK", "PET_NNODES", "MUSTER_KIT", "TMUX"} & set(seen)


def test_setup_lines_change_what_comes_from_the_call_but_not_the_job_s_own_variables(listing: Path) -> None:
    show = "import json, os; json.dump(dict(os.environ), open('seen', 'w'))"
    attempt = make_order(
        listing, command=[sys.executable, "-S", "-c", show], call={"MODULES": "none"}, env={"MINE": "job"}, setup=True
    )
    (listing / "j.1" / "setup.sh").write_text("export MODULES=loaded MINE=setup\n")
    assert run_element(in_array(listing, attempt))[0] == 0
    seen = json.loads((listing.parents[2] / "seen").read_text())
    assert (seen["MODULES"], seen["MINE"], seen["CUDA_VISIBLE_DEVICES"]) == ("loaded", "job", "")


def test_a_job_that_takes_too_long_ends_as_a_timeout(listing: Path) -> None:
    attempt = make_order(listing, command=["sleep", "60"], timeout=1)
    assert run_element(in_array(listing, attempt))[0] == 143
    assert judge(attempt.end(), cancelled=False) == ("timeout", "the command has run for 1 s (_timeout)")


def test_without_an_array_or_an_index_the_program_says_what_is_wrong(listing: Path) -> None:
    program: list[str | Path] = [sys.executable, "-I", "-S", KIT / "scripts/lib/array_task.py"]
    wrong = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (2, "array_task.py: expected one argument, the directory of an array\n")
    none = subprocess.run([*program, listing], capture_output=True, text=True, check=False, env={})
    assert none.returncode == 69
    assert "SLURM_ARRAY_TASK_ID" in none.stderr


# ---------------------------------------------------------------- an element, seen from the dispatcher


def seen(attempt: Element, state: str = "", *, now: float = 0.0, began: float | None = None) -> list[tuple[str, Any]]:
    """What a look at the files finds while SLURM shows this state; without a state SLURM shows nothing of it."""
    entries = {(ARRAY, 0): Entry("12_0", state, "Resources", "node7")} if state else {}
    queue = Queue(time.monotonic() if began is None else began, entries)
    return list(attempt.look(queue, now, progress=False))


def kinds(found: list[tuple[str, Any]]) -> list[str]:
    return [kind for kind, _ in found]


@pytest.fixture
def submitted(listing: Path) -> Element:
    """One that SLURM has accepted."""
    attempt = make_order(listing)
    path = in_array(listing, attempt)
    Path(job_path(str(path))).write_text("12\n")
    attempt.array, attempt.index, attempt.since = ARRAY, 0, time.monotonic()
    return attempt


def test_that_an_element_waits_is_told_once_and_its_end_when_there_is_an_exit_code(submitted: Element) -> None:
    assert seen(submitted, "PENDING") == [("waits", {"reason": "in SLURM's queue"})]
    assert seen(submitted, "PENDING") == []
    run_element(Path(submitted.directory).parent / f"array-{ARRAY}")
    found = seen(submitted, "RUNNING")
    assert kinds(found) == ["started", "ended"]
    assert found[0][1]["host"] == os.uname().nodename
    assert found[1][1]["code"] == 0


def test_a_queue_that_was_asked_for_before_the_submission_says_nothing(submitted: Element) -> None:
    assert seen(submitted, "", began=submitted.since - 1) == []
    assert os.path.exists(order_path(submitted.directory, ARRAY))


@pytest.mark.parametrize(("state", "cause"), [("CANCELLED", "cancelled outside"), ("", "cancelled outside")])
def test_an_element_that_is_gone_from_the_queue_and_never_began_can_never_begin(
    submitted: Element, state: str, cause: str
) -> None:
    found = seen(submitted, state)
    assert kinds(found) == ["ended"]
    assert found[0][1]["cause"] == cause
    assert run_element(Path(submitted.directory).parent / f"array-{ARRAY}")[0] == 0
    assert ran(Path(submitted.directory).parent) == []


def test_an_order_whose_array_slurm_has_never_got_belongs_to_none_again(submitted: Element) -> None:
    os.unlink(job_path(str(Path(submitted.directory).parent / f"array-{ARRAY}")))  # the dispatcher died before
    assert kinds(seen(submitted, "")) == ["held"]
    assert os.path.exists(order_path(submitted.directory))
    assert (submitted.array, submitted.find()) == ("", "held")


def begun(attempt: Element) -> None:
    """As an element leaves it that was killed with all its processes."""
    attempt.forget_order()
    write_json(os.path.join(attempt.directory, "element.json"), {"array": ARRAY, "host": "node7", "time": 5})
    write_json(attempt.files.pids, {"boot_id": "other", "command": {"pid": 7, "start_time": 9}})


def test_a_running_element_is_told_with_its_node_and_process(submitted: Element) -> None:
    begun(submitted)
    found = seen(submitted, "RUNNING")
    facts = {"state": "running", "boot_id": "other", "pid": 7, "start_time": 9, "host": "node7"}
    assert found == [("started", facts)]
    assert seen(submitted, "RUNNING") == []


def test_an_element_that_slurm_gave_up_is_waited_for_as_long_as_its_heartbeat_goes_on(submitted: Element) -> None:
    begun(submitted)
    seen(submitted, "RUNNING")
    now = 0.0
    for beat in range(1, 30):
        Path(submitted.files.heartbeat).touch()
        os.utime(submitted.files.heartbeat, (beat, beat))
        now += 0.9 * element.LATE
        assert seen(submitted, "NODE_FAIL", now=now) == []
    assert Path(submitted.files.request).read_text() == "kill\n"  # so that it comes to an end, where it can be reached
    found = seen(submitted, "NODE_FAIL", now=now + 1.1 * element.LATE)
    assert kinds(found) == ["ended"]
    assert judge(found[0][1], cancelled=False) == ("server lost", "SLURM says that node7 has failed")


@pytest.mark.parametrize(
    ("state", "failure"), [("OUT_OF_MEMORY", "out of memory"), ("NODE_FAIL", "server lost"), ("FAILED", "signal")]
)
def test_a_command_that_was_killed_has_the_cause_that_slurm_names_a_moment_later(
    submitted: Element, state: str, failure: str
) -> None:
    begun(submitted)
    write_file(submitted.files.exit, "137\n")
    assert seen(submitted, "COMPLETING", now=1.0) == []
    found = seen(submitted, state, now=2.0)
    assert kinds(found) == ["started", "ended"]
    assert judge(found[1][1], cancelled=False)[0] == failure


def test_slurm_has_not_for_ever_to_name_a_cause(submitted: Element) -> None:
    begun(submitted)
    write_file(submitted.files.exit, "143\n")
    assert seen(submitted, "COMPLETING", now=1.0) == []
    assert kinds(seen(submitted, "COMPLETING", now=2.0 + element.EXPLAIN)) == ["started", "ended"]


def test_when_the_heartbeat_has_been_silent_for_long_slurm_s_word_is_enough(submitted: Element) -> None:
    begun(submitted)
    Path(submitted.files.heartbeat).touch()
    entries = {(ARRAY, 0): Entry("12_0", "RUNNING")}
    for now in (1.0, 100.0):
        list(submitted.look(Queue(time.monotonic(), entries), now, progress=True))
    assert seen(submitted, "NODE_FAIL", now=101.0) == []
    assert kinds(seen(submitted, "NODE_FAIL", now=102.0 + element.SOON)) == ["ended"]


def test_an_element_that_comes_back_to_the_queue_is_not_given_up(submitted: Element) -> None:
    begun(submitted)
    assert kinds(seen(submitted, "COMPLETED", now=0.0)) == ["started"]
    assert seen(submitted, "RUNNING", now=0.9 * element.LATE) == []
    assert seen(submitted, "COMPLETED", now=1.8 * element.LATE) == []
    assert kinds(seen(submitted, "COMPLETED", now=2.9 * element.LATE)) == ["ended"]


def test_to_stop_a_waiting_element_takes_its_order_back_and_its_end_is_told_when_slurm_has_it_no_more(
    submitted: Element,
) -> None:
    submitted.stop(kill=False)
    assert submitted.cancelled
    assert submitted.cancel_at <= time.monotonic()
    assert seen(submitted, "PENDING") == []
    found = seen(submitted, "CANCELLED")
    assert kinds(found) == ["ended"]
    assert judge(found[0][1], cancelled=True) == ("cancelled", "cancelled on request")
    assert not [name for name in submitted.names() if name.startswith(("order", "taken"))]


def test_to_stop_a_running_element_asks_its_supervisor_wherever_it_is(submitted: Element) -> None:
    begun(submitted)
    submitted.stop(kill=False)
    assert Path(submitted.files.request).read_text() == "stop\n"
    assert not submitted.cancelled
    assert time.monotonic() < submitted.cancel_at < math.inf  # then SLURM does it


def test_what_a_later_dispatcher_finds_of_an_attempt(listing: Path) -> None:
    assert Element(str(listing / "none.1"), "", 1.0).find() == "absent"
    (listing / "empty.1").mkdir()
    (listing / "empty.1" / ".order").write_text("half an order with a secret")
    assert Element(str(listing / "empty.1"), "", 1.0).find() == "absent"
    assert not (listing / "empty.1" / ".order").exists()
    held, other = make_order(listing, "held.1"), make_order(listing, "other.1")
    assert held.find() == "held"
    path = in_array(listing, other, held)
    assert (held.find(), held.array, held.index) == ("there", ARRAY, 1)
    assert run_element(path, 1)[0] == 0
    assert held.find() == "ended"
    begun(other)
    assert (other.find(), other.array, other.index) == ("there", ARRAY, 0)
    write_file(other.files.exit, "137\n")
    assert other.find() == "there"  # SLURM may know why
    os.mkdir(os.path.dirname(other.files.record))
    supervisor.write_record(other.files, "killed", "its guard was there")
    assert other.find() == "ended"


# ---------------------------------------------------------------- the server


def a_server(tmp_path: Path, wanted: int = 9, **cluster: Any) -> SlurmServer:
    tree = {"servers": [{"host": "slurm", "gpus": 2}], **cluster}
    return SlurmServer(Cluster.model_validate(tree), Launch("ab", tmp_path, "train.py"), wanted)


def test_there_are_as_many_slots_as_jobs_and_no_more_than_may_be_queued(tmp_path: Path) -> None:
    assert len(a_server(tmp_path, 9).room.slots) == 9
    assert len(a_server(tmp_path, 10_000).room.slots) == 256
    assert len(a_server(tmp_path, 10_000, max_queued=500).room.slots) == 500
    assert all(slot.gpu is None for slot in a_server(tmp_path).room.slots)


def test_labels_are_features_which_only_slurm_knows() -> None:
    assert frozenset({"a100"}) <= AnyLabels()
    assert not frozenset({"a100"}) <= frozenset()


def test_a_working_directory_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workdir /elsewhere: .* call it from there, or remove workdir"):
        a_server(tmp_path, servers=[{"host": "slurm", "workdir": "/elsewhere"}])
    a_server(tmp_path, servers=[{"host": "slurm", "workdir": str(tmp_path)}])


def submit_and_get(server: SlurmServer, count: int, reply: tuple[int, str, str]) -> tuple[list[Any], list[Event]]:
    """What `count` starts become when sbatch replies this, and the events that follow."""
    events: list[Event] = []

    async def submit() -> list[Any]:
        server._post = events.append
        server._gone = asyncio.get_running_loop().create_future()
        replies = [asyncio.get_running_loop().create_future() for _ in range(count)]
        elements = [make_order(Path(server.directory), f"j{number}.1") for number in range(count)]
        starts = [Start(each, CPU, None, reply) for each, reply in zip(elements, replies, strict=True)]
        assign(server._array_path(ARRAY), ARRAY, elements)
        await server._take_answer(CPU, starts, ARRAY, *reply)
        return await asyncio.gather(*replies, return_exceptions=True)

    return asyncio.run(submit()), events


def test_what_slurm_has_accepted_runs_and_is_found_by_its_number(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit_and_get(server, 2, (0, "4711;cluster\n", "sbatch: info: be nice\n"))
    assert found == [{"state": "running"}] * 2
    assert Path(job_path(server._array_path(ARRAY))).read_text() == "4711\n"
    assert [(each.array, each.index) for each in server._elements.values()] == [(ARRAY, 0), (ARRAY, 1)]


def test_a_refusal_of_slurm_is_told_and_leaves_no_order(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit_and_get(server, 2, (1, "", SBATCH_SAYS["partition"]))
    assert all(isinstance(each, NotStarted) and each.kind != "job" for each in found)
    assert "invalid partition specified: nosuch" in str(found[0])
    assert not list(Path(server.directory).glob("*/order*"))


def test_when_slurm_does_not_answer_nothing_is_known_and_the_orders_stay(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    os.makedirs(server.directory)
    found, _ = submit_and_get(server, 2, (1, "", SBATCH_SAYS["slow"]))
    assert all(isinstance(each, Unreachable) for each in found)
    assert len(list(Path(server.directory).glob(f"*/order.{ARRAY}"))) == 2


def test_what_a_full_queue_does_not_take_waits_and_can_be_cancelled(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    os.makedirs(server.directory)
    found, events = submit_and_get(server, 1, (1, "", SBATCH_SAYS["limit"]))
    assert found == [{"state": "running"}]
    assert [(each.kind, each.facts["attempt"]) for each in events] == [("waits", "j0.1")]
    assert "not yet in SLURM's queue: QOSMaxSubmitJobPerUserLimit" in events[0].facts["reason"]
    assert list(Path(server.directory).glob("*/order"))
    events.clear()
    with pytest.raises(Unreachable):
        asyncio.run(server.stop("j0.1", kill=False))  # what SLURM has is not known yet
    server._ready = True
    asyncio.run(server.stop("j0.1", kill=False))
    assert [(each.kind, each.facts["attempt"]) for each in events] == [("ended", "j0.1")]
    assert not list(Path(server.directory).glob("*/order*"))


def test_an_order_has_the_job_s_arguments_and_its_secrets_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("MODULEPATH", "/modules")
    server = a_server(tmp_path)
    job = job_of({"name": "it's"}, Options(env={"KEY": "k3pt"}, timeout=100.0, gpus=2, labels=("b", "a")))
    order = Order("j.1", job, [0, 1], [], [], "title")
    assert server._needs(order, "") == Needs(2, 4, ("a", "b"))  # 100 s, 30 s to end in, one minute more
    start = Start(server._element("j.1", job.output), server._needs(order, ""), order)
    written = server._order(start)
    assert written["command"][-4:] == ["--name", "it's", "--device", "cuda:0"]
    assert (written["env"]["KEY"], written["timeout"]) == ("k3pt", 100)
    assert written["env"]["MUSTER_OUTPUT_DIR"] == str(tmp_path / job.output)
    assert written["call"]["MODULEPATH"] == "/modules"
    assert "CUDA_VISIBLE_DEVICES" not in written["call"]
    assert "k3pt" not in json.dumps([written["command"], written["call"]])
    assert "k3pt" not in " ".join(server._sbatch(server._needs(order, ""), ARRAY, 1))


def test_a_cpu_node_gives_its_jobs_no_gpu(tmp_path: Path) -> None:
    server = a_server(tmp_path, servers=[{"host": "slurm", "gpus": 0}])
    job = job_of({"name": "a"}, Options())
    order = Order("j.1", job, [0], [], [], "title")
    assert server._needs(order, "") == CPU
    assert server._order(Start(server._element("j.1", job.output), CPU, order))["command"][-2:] == ["--device", "cpu"]


def test_the_owner_of_an_output_directory_is_respected(tmp_path: Path) -> None:
    (tmp_path / "experiments" / "x").mkdir(parents=True)
    (tmp_path / "experiments" / "x" / "result").touch()
    (tmp_path / "experiments" / "x" / host.OWNER).write_text("another\n")
    with pytest.raises(host.JobRefused, match="holds the results of job another"):
        host.claim(str(tmp_path / "experiments" / "x"), "mine", "train.py")
