"""The program on a server: one serve process per list, and replies of its child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import pytest

from distributed.files import KIT
from distributed.jobs import host, panes
from distributed.training import base_model


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A serve process that has locked the list `abc` on the server `one`."""
    (tmp_path / "job.py").touch()
    command = [sys.executable, *panes.PLAIN_PYTHON, f"{KIT}/scripts/lib/jobs_host.py", "serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    request = {
        "id": 1, "do": "open", "server": "one", "list": "abc", "workdir": str(tmp_path), "default_workdir": "",
        "script": "job.py", "python": sys.executable, "remote": False, "slots": ["one:0"], "panes": False,
    }  # fmt: skip
    send(process, json.dumps(request).encode() + b"\n")
    output = cast("IO[bytes]", process.stdout)
    assert json.loads(output.readline())["event"] == "hello"
    assert json.loads(output.readline())["directory"] == str(tmp_path / "logs/jobs/abc")
    with process:
        yield process
        process.kill()


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


def test_a_serve_process_that_receives_heartbeats_is_not_killed(
    serve: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CONNECTION_TIMEOUT", 1.0)
    refused = threading.Event()

    def send_heartbeats() -> None:
        with suppress(BrokenPipeError):
            while not refused.wait(0.1):
                send(serve, b"\n")

    thread = threading.Thread(target=send_heartbeats)
    thread.start()
    try:
        with pytest.raises(host.HostError, match="locked by another process"):
            host.lock_list(str(tmp_path / "logs/jobs/abc/servers/one"))
    finally:
        refused.set()
        thread.join()
    assert serve.poll() is None


def test_a_serve_process_that_receives_no_heartbeats_is_killed(
    serve: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CONNECTION_TIMEOUT", 0.2)
    assert host.lock_list(str(tmp_path / "logs/jobs/abc/servers/one")) > 2
    assert serve.wait(10) == -9


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
    assert call(serve, "gpus")["problem"] == host.CHILD_KILLED


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


def nothing(_: Path) -> None:
    pass


def empty_directories(path: Path) -> None:
    (path / "a" / "b").mkdir(parents=True)


def link_to_an_empty_directory(path: Path) -> None:
    (path.parent / "disk").mkdir()
    path.symlink_to("disk")


def files_of_this_job(path: Path) -> None:
    path.mkdir()
    (path / host.OWNER).write_text("mine of train.py\n")
    (path / "result").touch()


def adopted_files(path: Path) -> None:
    path.mkdir()
    (path / host.OWNER).touch()
    (path / "result").touch()


@pytest.mark.parametrize(
    "create", [nothing, Path.mkdir, empty_directories, link_to_an_empty_directory, files_of_this_job, adopted_files]
)
def test_an_output_directory_without_files_of_others_is_claimed(create: Callable[[Path], None], tmp_path: Path) -> None:
    output = tmp_path / "output"
    create(output)
    was_link = output.is_symlink()
    os.close(host.claim_output(str(output), "mine", "train.py"))
    assert (output / host.OWNER).read_text() == "mine of train.py\n"
    assert output.is_symlink() == was_link


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


@pytest.mark.parametrize("create", [one_file, hidden_file_below, link_to_files, dangling_link, Path.touch])
def test_an_output_directory_with_files_that_no_job_wrote_is_refused(
    create: Callable[[Path], None], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    create(output)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(host.JobRefused, match="output exists, but not from a job; move it away, give this job another"):
        host.claim_output(str(output), "mine", "train.py")
    assert sorted(tmp_path.rglob("*")) == before
