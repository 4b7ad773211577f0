"""The program on a server: a new serve process replaces an older one only if that one receives no heartbeats."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import pytest

from distributed.files import KIT
from distributed.jobs import host, panes


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
