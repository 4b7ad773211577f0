"""Processes that belong to a run."""

from __future__ import annotations

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


def test_a_process_that_was_forked_during_the_scan_is_found(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    all_pids = process_scan.pids()
    listings = [[pid for pid in all_pids if pid != child], all_pids]
    monkeypatch.setattr(process_scan, "pids", lambda: listings.pop(0))
    assert process_scan.live_processes({b"MUSTER_TEST=scan"}) == [child]
