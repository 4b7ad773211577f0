"""The program on a server: one serve process per list, and replies of its child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
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


# ---------------------------------------------------------------- an attempt that writes nothing where it must


def ended(directory: Path, *written: str) -> str:
    """The note of an attempt that exited with 0 after it wrote these files, besides files that count as no results."""
    attempt = host.HostAttempt(str(directory / "logs/jobs/abc/job.1"), "gpu1", str(directory / "experiments/mine"), 0)
    Path(attempt.directory).mkdir(parents=True)
    write(directory, "data/old.txt", "old.txt", "experiments/earlier/model.pt")
    for path in directory.rglob("*.*"):
        os.utime(path, (10**9, 10**9))
    os.close(host.claim_output(attempt.output, "job", "job.py"))
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
        ([], host.NOTHING_WRITTEN),
        (["experiments/x/model.pt", "experiments/x/log.txt"],
         f"{host.NOTHING_WRITTEN}; new files on gpu1, not copied: experiments/x"),
        (["results_mine.csv"], f"{host.NOTHING_WRITTEN}; new files on gpu1, not copied: results_mine.csv"),
        (["experiments/earlier/model.pt"],
         f"{host.NOTHING_WRITTEN}; new files on gpu1, not copied: experiments/earlier"),
    ],
)  # fmt: skip
def test_an_attempt_without_results_has_a_note_with_what_it_wrote_elsewhere(
    written: list[str], note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.HostAttempt, "searches", 0)
    assert ended(tmp_path, *written) == note


def test_only_the_first_attempts_without_results_are_searched_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.HostAttempt, "searches", 0)
    notes = [ended(tmp_path / str(number), "a", "b/c", "d/e", "f/g") for number in range(host.MAX_SEARCHES + 1)]
    assert [note.endswith(", ...") for note in notes] == [True] * host.MAX_SEARCHES + [False]
    assert notes[-1] == host.NOTHING_WRITTEN


def test_a_search_for_files_ends_after_a_number_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_ENTRIES", 100)
    write(tmp_path, "new/model.pt", *(f"old/{number}" for number in range(500)))
    os.utime(tmp_path / "old", (10**9, 10**9))
    assert host.new_files(str(tmp_path), 0)[0] == "new", "the newest directory is searched first"
    write(tmp_path, *(f"many/{number}/model.pt" for number in range(500)))
    assert len(host.new_files(str(tmp_path), 0)) < 100


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
