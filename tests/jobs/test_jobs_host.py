"""The server's side of a job list (jobs/host).

One serve process per list, replies of its child processes, and the ends of attempts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import pytest

from distributed.files import KIT
from distributed.host import process_scan
from distributed.jobs.host import host_attempt, outputs, panes
from distributed.jobs.host import service as host_service
from distributed.jobs.journal.state import classify_end
from distributed.launch import node_files, node_requests
from distributed.training import base_model

# A serve process with a shorter heartbeat timeout.
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
from distributed.jobs.host import service
service.CONNECTION_TIMEOUT = float(sys.argv[2])
service.main(["serve"])
"""


@contextmanager
def serving(workdir: Path, error: str = "", heartbeat_timeout: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """A serve process that has locked the list `abc` on the server `one`, or has replied with this error."""
    command = [*panes.PLAIN_PYTHON, f"{KIT}/scripts/lib/module.py", "jobs.host.service", "serve"]
    if heartbeat_timeout:
        command = ["-c", SERVE, KIT, str(heartbeat_timeout)]
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    request = {
        "id": 1, "do": "open", "server": "one", "list": "abc", "workdir": str(workdir), "default_workdir": "",
        "owner": 0, "user": 0, "owners": [], "script": "job.sh", "python": sys.executable, "remote": False,
        "slots": ["one:0"], "panes": False,
    }  # fmt: skip
    send(process, json.dumps(request).encode() + b"\n")
    output = cast("IO[bytes]", process.stdout)
    assert json.loads(output.readline())["event"] == "hello"
    opened = json.loads(output.readline())
    assert opened.get("error", "") == error
    assert error or opened["workdir"] == str(workdir)
    with process:
        yield process
        process.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A serve process whose working directory is tmp_path."""
    (tmp_path / "job.sh").touch()
    with serving(tmp_path) as process:
        yield process


def send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin
    process.stdin.write(data)
    process.stdin.flush()


def call(process: subprocess.Popen[bytes], verb: str, **facts: Any) -> dict[str, Any]:
    """Send a request and return the reply."""
    send(process, json.dumps({"id": 2, "do": verb, **facts}).encode() + b"\n")
    reply: dict[str, Any] = json.loads(cast("IO[bytes]", process.stdout).readline())
    assert reply.pop("reply") == 2
    return reply


def test_a_serve_process_that_receives_heartbeats_keeps_its_lock(
    serve: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_service, "CONNECTION_TIMEOUT", 1.0)
    refused = threading.Event()

    def send_heartbeats() -> None:
        with suppress(BrokenPipeError):
            while not refused.wait(0.1):
                send(serve, b"\n")

    thread = threading.Thread(target=send_heartbeats)
    thread.start()
    try:
        with pytest.raises(outputs.HostError, match="locked by another process"):
            host_service.lock_list(str(tmp_path / "logs/jobs/abc/servers/one"))
    finally:
        refused.set()
        thread.join()
    assert serve.poll() is None


def test_a_serve_process_that_receives_no_heartbeats_exits(tmp_path: Path) -> None:
    (tmp_path / "job.sh").touch()
    with serving(tmp_path, heartbeat_timeout=0.5) as process:
        assert process.wait(10) == -signal.SIGALRM


def test_a_blocked_serve_process_without_heartbeats_exits(tmp_path: Path) -> None:
    (tmp_path / "job.sh").touch()
    with serving(tmp_path, heartbeat_timeout=1.0) as process:
        send(process, b"\n" * 10_000)  # more replies than fit into the pipe, which is not read
        assert process.wait(10) == -signal.SIGALRM


def test_a_later_serve_process_waits_until_one_without_heartbeats_has_exited(
    serve: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    thread = threading.Timer(1.0, serve.kill)
    thread.start()
    assert host_service.lock_list(str(tmp_path / "logs/jobs/abc/servers/one")) > 2
    thread.join()


def test_a_start_that_is_repeated_keeps_the_grace_time_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.host.signals.catch", lambda _: (-1, -1))
    monkeypatch.setattr(host_attempt.HostAttempt, "state", lambda _: "running")
    service = host_service.Service()
    service.workdir, service.directory, service.server = str(tmp_path), str(tmp_path / "list"), "one"
    (tmp_path / "list/job.1").mkdir(parents=True)
    reply = service.start({"attempt": "job.1", "output": "out", "grace": 30.0})
    assert reply["state"] == "running"
    assert service.attempts["job.1"].grace == 30.0


# ---------------------------------------------------------------- attempts without results


def note_of_attempt(directory: Path, *written: str) -> str:
    """The note of an attempt that exited with 0 after it wrote these files and files that do not count as results."""
    attempt = host_attempt.HostAttempt(
        str(directory / "logs/jobs/abc/job.1"), "gpu1", str(directory / "experiments/mine"), 0
    )
    Path(attempt.directory).mkdir(parents=True)
    write(directory, "data/old.txt", "old.txt", "experiments/earlier/model.pt")
    for path in directory.rglob("*.*"):
        os.utime(path, (10**9, 10**9))
    os.close(outputs.claim_output(str(directory), attempt.output, "job", "job.py"))
    write(directory, "experiments/other/.muster_job", "experiments/other/sub/model.pt",
          "experiments/base_models/a/x.pt", ".cache/x", ".hidden", "env/pyvenv.cfg", "env/bin/python",
          "__pycache__/a.pyc", "src/__pycache__/a.pyc",
          "results.journal", "results.json", "results.json.1f2e3d4c", "logs/a", "run.log", "nohup.out", "a\nline",
          "phase1_base_models.json", "a.json", "a.journal", "a.phase2_experiments.json", *written)  # fmt: skip
    (directory / "loop").symlink_to(directory)
    Path(attempt.files.exit).write_text("0")
    return str(attempt.end()["note"])


def write(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")


@pytest.mark.parametrize(
    ("written", "note"),
    [
        (["experiments/mine/model.pt"], ""),
        (["experiments/mine/sub/model.pt", "model.pt"], ""),
        ([], host_attempt.NOTHING_WRITTEN),
        (["experiments/x/model.pt", "experiments/x/log.txt"],
         f"{host_attempt.NOTHING_WRITTEN}; new files elsewhere on gpu1: experiments/x"),
        (["results_mine.csv"], f"{host_attempt.NOTHING_WRITTEN}; new files elsewhere on gpu1: results_mine.csv"),
        (["experiments/earlier/model.pt"],
         f"{host_attempt.NOTHING_WRITTEN}; new files elsewhere on gpu1: experiments/earlier"),
    ],
)  # fmt: skip
def test_an_attempt_without_results_has_a_note_with_what_it_wrote_elsewhere(
    written: list[str], note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_attempt.HostAttempt, "searches", 0)
    assert note_of_attempt(tmp_path, *written) == note


def test_the_search_for_new_files_is_limited_to_the_first_attempts_without_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_attempt.HostAttempt, "searches", 0)
    written = ("a", "b/c", "d/e", "f/g")
    notes = [note_of_attempt(tmp_path / str(number), *written) for number in range(host_attempt.MAX_SEARCHES + 1)]
    assert [note.endswith(", ...") for note in notes] == [True] * host_attempt.MAX_SEARCHES + [False]
    assert notes[-1] == host_attempt.NOTHING_WRITTEN


def test_a_search_for_files_ends_after_a_number_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attempt, "MAX_ENTRIES", 100)
    write(tmp_path, "new/model.pt", *(f"old/{number}" for number in range(500)))
    os.utime(tmp_path / "old", (10**9, 10**9))
    assert host_attempt.new_files(str(tmp_path), 0)[0] == "new", "the newest directory is searched first"
    write(tmp_path, *(f"many/{number}/model.pt" for number in range(500)))
    assert len(host_attempt.new_files(str(tmp_path), 0)) < 100


@pytest.fixture
def killing_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that kills the process that calls it."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nkill -9 $PPID\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("killing_nvidia_smi")
def test_a_killed_child_process_is_reported(serve: subprocess.Popen[bytes]) -> None:
    assert call(serve, "gpus")["problem"] == host_service.CHILD_KILLED


@pytest.fixture
def undivided_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that reports one GPU, with MIG and without instances."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    row = "0, GPU-00, 550.0, 81920, 4, Enabled, Default, Disabled, A100"
    program.write_text(f"#!/bin/sh\ncase $* in *query-gpu*) echo '{row}' ;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("undivided_gpu")
def test_a_gpu_with_mig_and_without_instances_cannot_be_used(serve: subprocess.Popen[bytes]) -> None:
    (gpu,) = call(serve, "gpus")["gpus"]
    assert gpu["index"] == 0
    assert gpu["lost"].startswith("MIG is on, but it has no instances; create one")


def test_a_copied_base_model_is_published_unless_it_is_damaged(serve: subprocess.Popen[bytes], tmp_path: Path) -> None:
    source, digest = tmp_path / "source", "d" * 64
    source.mkdir()
    for name in base_model.FILES:
        (source / name).write_text("x" * 10)
    manifest = base_model.manifest_of(str(source), digest)
    base = {"digest": digest, "manifest": manifest, "output": "never_trained", "shared": False}
    damaged = call(serve, "base", **base)
    assert damaged["state"] == "copy"
    reply = call(serve, "publish_base", digest=digest, staging=damaged["staging"], failed=False)
    assert (reply["state"], reply["reason"]) == ("damaged", f"{tmp_path / damaged['staging']}: there is no base model")
    failed = call(serve, "base", **base)["staging"]
    assert call(serve, "publish_base", digest=digest, staging=failed, failed=True) == {}
    assert not (tmp_path / failed).exists()
    large = {**base, "manifest": {"files": {name: {"bytes": 1 << 60} for name in base_model.FILES}}}
    assert "MiB needed" in call(serve, "base", **large)["reason"]
    assert call(serve, "base", **{**base, "output": "source"}) == {"state": "ready"}
    assert call(serve, "base", **base) == {"state": "ready"}


# ---------------------------------------------------------------- ends of attempts


PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; the smallest part of a tmpfs that a file occupies


@pytest.fixture
def disk(tmp_path: Path, mount: Callable[[Path, str], None]) -> Iterator[Path]:
    """A small disk with a job that runs until tmp_path / "go" exists."""
    directory = tmp_path / "disk"
    mount(directory, "1m")
    (directory / "job.sh").write_text(f"#!/bin/sh\nuntil [ -e '{tmp_path}/go' ]; do sleep 0.05; done\n")
    (directory / "job.sh").chmod(0o755)
    yield directory
    node_requests.sweep(files_of(directory), 0)


def fill(disk: Path, pages: int) -> None:
    """Fill a disk except for this number of pages."""
    with open(disk / "ballast", "ab", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(PAGE))
    size = (disk / "ballast").stat().st_size // PAGE * PAGE
    os.truncate(disk / "ballast", size - pages * PAGE)
    assert os.statvfs(disk).f_bavail == pages


def files_of(disk: Path) -> node_files.Files:
    return node_files.Files(str(disk / "logs/jobs/abc/j.1"), "one")


ATTEMPT: dict[str, Any] = {
    "attempt": "j.1", "output": "out", "grace": 1.0, "job": "j", "script": "job.sh", "script_name": "job.sh",
    "env": {}, "arguments": [], "slots": [0], "title": "j",
}  # fmt: skip


def start(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return call(process, "start", **ATTEMPT)


def next_end(process: subprocess.Popen[bytes], cancelled: bool = False) -> tuple[str, str]:
    """Wait until the attempt has ended. Returns (failure, reason)."""
    while True:
        event = json.loads(cast("IO[bytes]", process.stdout).readline())
        if event.get("event") == "ended":
            return classify_end(event, cancelled)


def children(pid: int, processes: dict[int, process_scan.ProcessStat]) -> list[int]:
    return [child for child, stat in processes.items() if stat.parent == pid and stat.alive]


def kill_attempt(process: subprocess.Popen[bytes], guard: bool) -> None:
    """Send SIGKILL to the supervisor that a serve process has started and, if `guard`, to the supervisor's guard."""
    processes = process_scan.table()
    (supervisor_pid,) = children(process.pid, processes)
    guards = [pid for pid in children(supervisor_pid, processes) if processes[pid].session != pid]
    for pid in (*(guards if guard else ()), supervisor_pid):
        os.kill(pid, signal.SIGKILL)


KILLED = "supervisor killed"
NO_SPACE = "No space left on device"


def test_a_list_cannot_be_opened_on_a_full_disk(disk: Path) -> None:
    fill(disk, 0)
    directory = disk / "logs/jobs/abc/servers/one"
    with serving(disk, f"{directory}: {NO_SPACE}; free space there, or set another workdir"):
        pass


@pytest.mark.parametrize("how", ["exits", "is stopped", "supervisor is killed", "supervisor and guard are killed"])
@pytest.mark.parametrize("pages", [0, 1, 2, 3, 5])
def test_an_attempt_that_starts_on_an_almost_full_disk_ends(disk: Path, pages: int, how: str) -> None:
    with serving(disk) as process:
        fill(disk, pages)
        found = start(process)
        if "error" in found:
            assert pages < 3
            assert NO_SPACE in found["error"]
            assert not os.path.exists(files_of(disk).directory)
            return
        assert found["state"] == "running"
        assert pages >= 3  # one page each for the owner file, the exit code and the failure record
        fill(disk, 0)
        if how == "exits":
            (disk.parent / "go").touch()
            assert next_end(process)[0] == ""
        elif how == "is stopped":
            call(process, "stop", attempt="j.1", kill=False)
            assert next_end(process, cancelled=True)[0] == "cancelled"
        else:
            kill_attempt(process, guard="guard" in how)
            failure, reason = next_end(process)
            assert (failure, "killed" in reason) == (KILLED, True)
    assert not process_scan.live_processes(files_of(disk).environment)


def test_the_timeout_of_an_attempt_on_a_full_disk_is_reported(disk: Path) -> None:
    with serving(disk) as process:
        files = files_of(disk)
        assert call(process, "start", **ATTEMPT, timeout=1)["state"] == "running"
        fill(disk, 0)
        assert next_end(process)[0] == "timeout"
        assert sorted(os.listdir(files.directory)) == ["errors", "lock", "node_one.exit", "node_one.heartbeat",
                                                       "node_one.log", "node_one.pid"]  # fmt: skip


def empty_pid_file(files: node_files.Files) -> None:
    os.truncate(files.pids, 0)


def remove_directory(files: node_files.Files) -> None:
    shutil.rmtree(files.directory)


def remove(*names: str) -> Callable[[node_files.Files], None]:
    """A function that removes these files of an attempt."""

    def remove_files(files: node_files.Files) -> None:
        for name in names:
            os.unlink(f"{files.directory}/{name}")

    return remove_files


DAMAGES = {
    "empty pid file": empty_pid_file,
    "no pid file": remove("node_one.pid"),
    "no lock file": remove("lock"),
    "no pid and lock file": remove("node_one.pid", "lock"),
    "only log and lock file": remove("node_one.pid", "node_one.reserved", "node_one.reserved_record"),
    "no directory": remove_directory,
}


@pytest.mark.parametrize(
    ("how", "restart"),
    [("exits", False), ("exits", True), ("supervisor is killed", False), ("supervisor and guard are killed", True)],
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_attempt_whose_files_are_damaged_ends(disk: Path, damage: str, how: str, restart: bool) -> None:
    files = files_of(disk)
    with serving(disk) as process:
        assert start(process)["state"] == "running"
        DAMAGES[damage](files)
        fill(disk, 0)
        if "killed" in how:
            kill_attempt(process, guard="guard" in how)
        if not restart:
            check_end(process, disk, damage, how)
    if restart:
        with serving(disk) as process:
            found = call(process, "query", attempts={"j.1": "out"})["attempts"]["j.1"]
            if found["state"] == "running":
                check_end(process, disk, damage, how)
            elif found["state"] == "ended":
                assert classify_end(found, False)[0] == KILLED
            else:
                assert (damage, "killed" in how) == ("no directory", True)
    assert not process_scan.live_processes(files.environment)


def check_end(process: subprocess.Popen[bytes], disk: Path, damage: str, how: str) -> None:
    if how == "exits" and damage != "no pid and lock file":  # if both files are missing, the attempt counts as ended
        (disk.parent / "go").touch()
    failure, reason = next_end(process)
    if how == "exits" and damage in ("empty pid file", "no pid file", "no lock file"):
        assert failure == ""
    else:
        assert failure == KILLED
        assert ("removed while the job ran" in reason) == (damage == "no directory")


def nothing(_: Path) -> None:
    pass


def empty_directories(path: Path) -> None:
    (path / "a" / "b").mkdir(parents=True)


def link_to_an_empty_directory(path: Path) -> None:
    (path.parent / "disk").mkdir()
    path.symlink_to("disk")


def files_of_this_job(path: Path) -> None:
    path.mkdir()
    (path / outputs.OWNER).write_text("mine of train.py\n")
    (path / "result").touch()


def adopted_files(path: Path) -> None:
    """Files that the job may use, because the user has created an empty owner file."""
    path.mkdir()
    (path / outputs.OWNER).touch()
    (path / "result").touch()


@pytest.mark.parametrize(
    "create", [nothing, Path.mkdir, empty_directories, link_to_an_empty_directory, files_of_this_job, adopted_files]
)
def test_an_output_directory_that_is_empty_or_belongs_to_this_job_is_claimed(
    create: Callable[[Path], None], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    create(output)
    was_link = output.is_symlink()
    os.close(outputs.claim_output(str(tmp_path), str(output), "mine", "train.py"))
    assert (output / outputs.OWNER).read_text() == "mine of train.py\n"
    assert output.is_symlink() == was_link


def test_deeply_nested_directories_stop_no_list(tmp_path: Path, nest: Callable[[Path, str], None]) -> None:
    nest(tmp_path / "output", "0")
    assert not outputs.holds_foreign_files(str(tmp_path / "output"))


def one_file(path: Path) -> None:
    path.mkdir()
    (path / "result").touch()


def hidden_file_below(path: Path) -> None:
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "b" / ".hidden").touch()


def link_to_files(path: Path) -> None:
    one_file(path.parent / "disk")
    path.symlink_to("disk")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def link_to_a_directory_below(path: Path) -> None:
    (path / "a").mkdir(parents=True)
    (path / "a" / "checkpoints").symlink_to(path.parent)


@pytest.mark.parametrize(
    "create", [one_file, hidden_file_below, link_to_files, dangling_link, link_to_a_directory_below, Path.touch]
)
def test_an_output_directory_with_files_that_no_job_wrote_is_refused(
    create: Callable[[Path], None], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    create(output)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(outputs.JobRefused, match="output contains files that no job wrote; move it away, give this"):
        outputs.claim_output(str(tmp_path), str(output), "mine", "train.py")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("create", [dangling_link, Path.touch])
def test_an_output_directory_below_a_file_is_refused(create: Callable[[Path], None], tmp_path: Path) -> None:
    create(tmp_path / "p")
    with pytest.raises(outputs.JobRefused, match="/p: not a directory; move it away, or give this job another prefix"):
        outputs.claim_output(str(tmp_path), str(tmp_path / "p" / "a" / "fold0"), "mine", "train.py")
