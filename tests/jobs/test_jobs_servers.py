"""Preparing a server over ssh: a fault that only a person can correct makes it unusable, and nothing is left there.

The commands for the server run in real shells on this machine, with their own home directory. jobs_faults.bats tests
the same faults over ssh.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.files import KIT
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists import config
from distributed.jobs.lists.job import GpuId, Options, job_of
from distributed.jobs.schedule.backend import ServerUnusable, Unreachable
from distributed.jobs.servers import host_server, programs, sockets, ssh_server
from distributed.jobs.servers.host_server import ListContext

NO_SPACE = "No space left on device; free space there, or set "


class ServerHere(ssh_server.SshServer):
    """A server whose commands run on this machine."""

    def _ssh(self, line: str) -> list[str]:
        return ["bash", "-c", line]

    def _ssh_to_server(self) -> list[str]:
        return ["bash", "-c", 'eval "$2"', "--", "gpu1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return directory


@pytest.fixture
def small_disk(tmp_path: Path, mount: Callable[[Path, str], None]) -> Path:
    """A disk that is smaller than Muster."""
    mount(tmp_path / "small", "64k")
    return tmp_path / "small"


def server(cwd: Path, sync: bool = False, **settings: Any) -> ServerHere:
    context = ListContext("abc", cwd, "train.py", sync=sync)
    return ServerHere("gpu1", config.Server(host="gpu1", **settings), context)


def stub(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/bash\n{script}\n")
    (directory / name).chmod(0o755)


def fails(prepare: Callable[[], Any]) -> str:
    """The reason why the server is unusable."""
    with pytest.raises(ServerUnusable) as caught:
        asyncio.run(prepare())
    return str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "number", "device", "shown"),
    [([], 1, "cpu", "slot 4"), ([0, 1], 1, "cuda:0", "GPU 0,1"), ([2], 3, "cuda:0", "GPU 2, attempt 3")],
)
def test_a_job_gets_its_device_and_its_arguments(
    home: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[GpuId], number: int, device: str, shown: str
) -> None:
    sent: dict[str, Any] = {}
    one = server(home)

    async def call(verb: str, **facts: Any) -> dict[str, Any]:
        return sent.update(facts, verb=verb) or {"state": "running"}

    monkeypatch.setattr(one, "_call", call)
    job = job_of({"n": 1}, Options())
    asyncio.run(one.start(Attempt(job.id, number, "gpu1", [4], gpus, 0.0), job, ["needed"]))
    assert (sent["verb"], sent["attempt"], sent["slots"]) == ("start", f"{job.id}.{number}", [4])
    assert (sent["arguments"], sent["title"]) == (["--n", "1", "--device", device], f"{job.name} ({shown})")
    assert (sent["env"]["CUDA_VISIBLE_DEVICES"], sent["needs"]) == (",".join(map(str, gpus)), ["needed"])


def test_a_command_without_a_reply_is_killed_with_its_children(tmp_path: Path) -> None:
    """The child of rsync is ssh. The pipe ends when both have exited."""
    os.mkfifo(fifo := tmp_path / "fifo")
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = ["sh", "-c", 'exec 3>"$0"; echo started >&3; sleep 60 & wait', str(fifo)]
    with pytest.raises(Unreachable, match="sh: no reply within 2 s"):
        asyncio.run(programs.run_program(command, seconds=2.0))
    assert os.read(end, 100) == b"started\n"
    assert select.select([end], [], [], 10)[0] and os.read(end, 1) == b""
    os.close(end)


def test_muster_is_copied_once(home: Path) -> None:
    one = server(home)
    asyncio.run(one._upload())
    asyncio.run(one._upload())
    (copy,) = (home / ".cache/muster").iterdir()
    assert copy.name == f"jobs-{one._archive_name}"
    assert (copy / "complete").exists()


def test_an_incomplete_copy_of_muster_is_replaced(home: Path) -> None:
    one = server(home)
    incomplete = home / ".cache/muster" / f"jobs-{one._archive_name}"
    incomplete.mkdir(parents=True)
    (incomplete / "remains").touch()
    asyncio.run(one._upload())
    assert (incomplete / "complete").exists()
    assert not (incomplete / "remains").exists()


def full_home(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small))


def no_inode_left(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", small], check=True)
    monkeypatch.setenv("HOME", str(small))
    (small / "file").touch()


def read_only_home(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    monkeypatch.setenv("HOME", str(small))


def missing_home(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home / "missing"))


def file_as_cache(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")


def cannot_create_cache(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")


def no_tar(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(home / "bin", "tar", "echo 'bash: line 1: tar: command not found' >&2; exit 127")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")


def quota(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(home / "bin", "touch", "echo \"touch: cannot touch '$1': Disk quota exceeded\" >&2; exit 1")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")


def mv_fails(home: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(home / "bin", "mv", "echo 'mv: cannot move: Input/output error' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        (full_home, "tar: ", NO_SPACE + "XDG_CACHE_HOME there"),
        (no_inode_left, "mkdir: ", NO_SPACE + "XDG_CACHE_HOME there"),
        (read_only_home, "mkdir: ", "Read-only file system; make it writable, or set XDG_CACHE_HOME there"),
        (missing_home, "cd: ", "No such file or directory; create the home directory, or set XDG_CACHE_HOME there"),
        (file_as_cache, "mkdir: ", "; remove the file there, or set XDG_CACHE_HOME there"),
        (cannot_create_cache, "'/proc/cache'", "; correct this on the server"),
        (no_tar, "tar: ", "command not found; install it there"),
        (quota, "touch: ", "Disk quota exceeded; free space there, or set XDG_CACHE_HOME there"),
        (mv_fails, "mv: ", "Input/output error; correct this on the server"),
    ],
)
def test_a_server_to_which_muster_cannot_be_copied_is_unusable_and_nothing_is_left_there(
    home: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], cause: str, remedy: str
) -> None:
    fault(home, small_disk, monkeypatch)
    reason = fails(server(home)._upload)
    assert reason.startswith("cannot copy Muster to it: ")
    assert cause in reason
    assert reason.endswith(remedy)
    assert "\n" not in reason
    assert not [path for top in (home, small_disk) for path in top.glob("**/muster/*")]
    assert not (home / "missing").exists()


def test_a_server_is_unreachable_if_ssh_fails_while_muster_is_copied(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerHere, "_ssh", lambda self, line: ["sh", "-c", "echo Connection reset >&2; exit 255"])
    with pytest.raises(Unreachable, match="Connection reset"):
        asyncio.run(server(home)._upload())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory that is larger than the small disk."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "data").write_bytes(os.urandom(1 << 20))
    return directory


def test_a_server_whose_disk_is_too_small_for_the_working_directory_is_unusable(
    home: Path, project: Path, small_disk: Path
) -> None:
    one = server(project, sync=True, workdir=f"{small_disk}/work")
    reason = fails(one._sync)
    assert reason.startswith("cannot copy the working directory to it: rsync: ")
    assert "No space left on device" in reason
    assert reason.endswith("; free space there, or set another workdir")


def test_a_server_on_which_the_working_directory_cannot_be_created_is_unusable(home: Path, project: Path) -> None:
    one = server(project, sync=True, workdir="/proc/work")
    reason = fails(one._sync)
    assert reason.startswith("cannot create workdir /proc/work: mkdir: ")
    assert reason.endswith("; correct this on the server")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
@pytest.mark.parametrize("workdir", ["~/work", None])
def test_the_working_directory_is_not_copied_through_a_link_of_another_user(
    home: Path, project: Path, workdir: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)  # as with ssh
    work = home / (workdir or "ml-customization").removeprefix("~/")
    (project / "open/below").mkdir(parents=True)
    (project / "open/below/file").touch()
    (work / "open").mkdir(parents=True)
    (work / "open").chmod(0o1777)
    (private := home / "private").mkdir()
    (work / "open/below").symlink_to(private)
    one = server(project, sync=True, workdir=workdir)
    asyncio.run(one._sync())
    (private / "file").unlink()
    (work / "open").chmod(0o1777)
    os.lchown(work / "open/below", 65534, 65534)
    assert f"{work}/open/below: belongs to user id 65534, who made it in {work}/open, where" in fails(one._sync)
    assert not [*private.iterdir()]


def test_a_server_that_does_not_reply_before_the_working_directory_is_copied_is_unreachable(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_server, "CONNECT_TIMEOUT", 1.0)
    one = server(project, sync=True, workdir=f"{home}/work")
    monkeypatch.setattr(one, "_ssh", lambda line: ["sleep", "15"])
    with pytest.raises(Unreachable, match="no reply within 1 s"):
        asyncio.run(one._sync())


@pytest.mark.parametrize("name", ['with "quotes"', "line\nbreak", "[brackets] *"])
def test_the_configuration_of_ssh_works_from_any_directory_of_muster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lib = tmp_path / name / "scripts/lib"
    lib.mkdir(parents=True)
    shutil.copy(Path(KIT, "scripts/lib/ssh_config"), lib)
    monkeypatch.setattr(sockets, "KIT", str(tmp_path / name))
    path = tmp_path / "ssh.conf"
    sockets.write_ssh_config(path, config.Server(host="gpu1", port=2222))
    shown = subprocess.run(["ssh", "-G", "-F", path, "gpu1"], capture_output=True, text=True)
    assert {"port 2222", "batchmode yes", "connecttimeout 10"} <= {*shown.stdout.splitlines()}, shown.stderr


# ---------------------------------------------------------------- GPUs


def gpu(index: int | str, **facts: Any) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-{index}{index}", "memory": 80000, "used": 0, "processes": 0, **facts}


WORKS, LOST = gpu(0), {"index": 1, "lost": "GPU is lost; reboot the machine"}
DIVIDED = [gpu(2, instances=["MIG-a", "MIG-b"]), {"index": "MIG-a"}, {"index": "MIG-b"}]
MIG_NOTE = "GPU 2: MIG is on, so a job uses only its first instance; to use all, name them in gpu_ids: MIG-a, MIG-b"


@pytest.mark.parametrize(
    ("ids", "note"),
    [([0], ""), ([0, 1], ""), ([0, 2], MIG_NOTE), (["MIG-b"], "")],
)
def test_gpus_that_exist_are_used(home: Path, ids: list[int | str], note: str) -> None:
    assert server(home, gpu_ids=ids)._check_gpus({"gpus": [WORKS, LOST, *DIVIDED], "problem": ""}) == note


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([1], "GPU 1: GPU is lost; reboot the machine"),
        ([0, 3], "GPU 3: not found: gpu1 has 3 GPUs (0, 1, 2); correct gpus or gpu_ids; gpus 0 gives CPU slots"),
        (["MIG-b", "MIG-c"], "MIG instance MIG-c: not found: gpu1 has MIG-a, MIG-b; correct gpu_ids"),
    ],
)
def test_a_server_without_the_requested_gpus_is_unusable(home: Path, ids: list[int | str], reason: str) -> None:
    with pytest.raises(ServerUnusable) as caught:
        server(home, gpu_ids=ids)._check_gpus({"gpus": [WORKS, LOST, *DIVIDED], "problem": ""})
    assert str(caught.value) == reason


def test_jobs_get_uuids_of_gpus_if_one_is_lost(home: Path) -> None:
    one = server(home, gpu_ids=[0, 2, "MIG-a"])
    one._check_gpus({"gpus": [WORKS, *DIVIDED], "problem": ""})
    assert one._cuda_devices([0, 2, "MIG-a"]) == "0,2,MIG-a"
    one._check_gpus({"gpus": [WORKS, LOST, gpu(2), {"index": "MIG-a"}], "problem": ""})
    assert one._cuda_devices([0, 2, "MIG-a"]) == "GPU-00,GPU-22,MIG-a"


NO_INSTANCES = "MIG is on, but it has no instances; create one (nvidia-smi mig -cgi PROFILE -C), or turn MIG off"
WHOLE = "0, GPU-00, 550.0, 81920, 4, Disabled, Default, Disabled, A100"
UNDIVIDED = "1, GPU-11, 550.0, 81920, 4, Enabled, Default, Disabled, A100"
LOST_ROW = f"2{', [GPU is lost]' * 8}"


@pytest.mark.parametrize(
    ("nvidia_smi", "gpus", "note"),
    [
        (f"[[ $1 != --query-gpu=* ]] || echo '{WHOLE}'", [0], ""),
        (
            f"[[ $1 != --query-gpu=* ]] || printf '%s\n' '{WHOLE}' '{UNDIVIDED}' '{LOST_ROW}'",
            [0],
            f"GPU 1: not used: {NO_INSTANCES}; GPU 2: not used: GPU is lost; reboot the machine",
        ),
        (
            f"[[ $1 != --query-gpu=* ]] || echo '{UNDIVIDED}'",
            [None],
            f"GPU 1: not used: {NO_INSTANCES}; jobs run without GPUs",
        ),
        ("echo 'NVIDIA-SMI has failed'; exit 9", [None], "nvidia-smi: NVIDIA-SMI has failed; jobs run without GPUs"),
        ("echo 'No devices were found'; exit 6", [None], ""),
    ],
)
def test_the_gpus_of_this_machine_that_jobs_cannot_use_are_reported(
    nvidia_smi: str, gpus: list[int | None], note: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(home / "bin", "nvidia-smi", nvidia_smi)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    here = host_server.local_server(ListContext("abc", home, "train.py", panes=False), 1)
    assert [slot.gpu for slot in here.pool.slots] == gpus
    (home / "train.py").touch()
    assert asyncio.run(connection_note(here)) == note


async def connection_note(one: host_server.HostServer) -> str:
    try:
        return await one.connect(lambda _: None)
    finally:
        await one.close()


# ---------------------------------------------------------------- the end of a list


def test_a_session_is_removed_from_a_server_that_can_no_longer_run_jobs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(home / "bin", "nvidia-smi", f"[[ $1 != --query-gpu=* ]] || echo '{WHOLE}'")
    stub(home / "bin", "tmux", "exit 1")
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    here = host_server.local_server(ListContext("abc", home, "removed.py", panes=False), 1)
    stub(home / "bin", "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert fails(lambda: here.connect(lambda _: None)).startswith("script removed.py: not in ")
    assert asyncio.run(here.remove_session()) == ""
