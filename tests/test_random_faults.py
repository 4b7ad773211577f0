"""Trainings with random faults of a fixed seed; see random_faults.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_faults import MOMENTS, Fault, draw, expected, kinds

DRIVER = Path(__file__).with_name("random_faults.py")
TOPOLOGIES = ("machine", "nodes")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_fault_is_drawn_and_has_an_expected_result(topology: str) -> None:
    drawn = [draw(1, number, topology) for number in range(1000)]
    assert drawn == [draw(1, number, topology) for number in range(1000)]
    everything = {what for group in kinds(topology) for what in group}
    assert {fault.what for case in drawn for fault in case.faults} == everything
    for what in everything:
        for moment in MOMENTS:
            assert expected(Fault(what, 0, 2.0), "n1", topology, moment)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk and starting nodes needs root")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_20_trainings_with_random_faults_end_as_expected(topology: str) -> None:
    command = [sys.executable, str(DRIVER), "--seed", "1", "--count", "20", "--topology", topology]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
