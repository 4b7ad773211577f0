"""Processes that belong to a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from distributed.host import process_scan


@pytest.fixture
def child() -> Iterator[int]:
    """A process with MUSTER_TEST=scan in its environment."""
    with subprocess.Popen(["sleep", "60"], env={"MUSTER_TEST": "scan"}) as process:
        yield process.pid
        process.kill()


def test_a_process_of_another_user_with_the_same_environment_is_not_found(child: int) -> None:
    if os.geteuid():
        pytest.skip("only root can read the environment of another user's process")
    with subprocess.Popen(["sleep", "60"], env={"MUSTER_TEST": "scan"}, user=65534) as process:
        try:
            assert b"MUSTER_TEST=scan" in process_scan.environment_of(process.pid)
            assert process_scan.live_processes({b"MUSTER_TEST=scan"}) == [child]
        finally:
            process.kill()


def test_a_set_user_id_program_of_another_user_is_not_found(child: int) -> None:
    """It has the effective user id of its file's owner, and the environment of the user who has started it."""
    if os.geteuid():
        pytest.skip("only root can start a process with the ids of a set-user-ID program")

    def change_ids() -> None:
        os.setresuid(65534, 0, 0)

    command = ["sleep", "60"]
    with subprocess.Popen(command, env={"MUSTER_TEST": "scan"}, preexec_fn=change_ids) as process:
        try:
            assert os.stat(f"/proc/{process.pid}").st_uid == 0
            assert process_scan.live_processes({b"MUSTER_TEST=scan"}) == [child]
        finally:
            process.kill()


def test_a_process_that_was_forked_during_the_scan_is_found(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    all_pids = process_scan.pids()
    listings = [[pid for pid in all_pids if pid != child], all_pids]
    monkeypatch.setattr(process_scan, "pids", lambda: listings.pop(0))
    assert process_scan.live_processes({b"MUSTER_TEST=scan"}) == [child]
