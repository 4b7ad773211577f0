"""Nodes that cannot connect to each other are named in a report like the smoke test's, before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.host.replies import framed
from distributed.launch.connectivity import Gap
from distributed.smoke.connections import main, report
from distributed.smoke.report import render
from distributed.terminal import plain

LATE = "no answer within 3 s"


def test_the_report_is_one_of_the_smoke_test() -> None:
    gap = Gap(("node2",), "node3", "10.0.0.3", LATE)
    told = report([gap], {"node1": 2, "node2": 4, "node3": 2})
    assert told["verdict"] == "fault"
    text = plain(render(told))
    assert text.startswith("smoke test: 8 ranks on 3 nodes, nothing started, torch ")
    assert f"  FAULT   reach           {gap}\n          -> open TCP between the nodes" in text


def test_the_exit_code_says_whether_there_is_a_gap_or_a_node_has_not_replied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, dict[str, object]] = {
        "listening": {"node1": ["10.0.0.1", 4000], "node2": ["10.0.0.2", 4000]},
        "trying": {"node1": {"node1": "", "node2": LATE}, "node2": {"node1": "", "node2": ""}},
    }
    for question, replies in said.items():
        (tmp_path / question).mkdir()
        for node, reply in replies.items():
            (tmp_path / question / f"{node}.out").write_text(f"Welcome!\n{framed(reply)}")
    words = ["--report", str(tmp_path / "report"), str(tmp_path), "node1:1", "node2:1"]
    assert main(words) == 1
    assert "node1 cannot connect to node2" in json.loads((tmp_path / "report").read_text())["checks"][0]["summary"]
    (tmp_path / "trying/node1.out").write_text(framed({"node1": "", "node2": ""}))
    assert main(words) == 0
    (tmp_path / "trying/node2.out").write_text("Welcome!\n")
    (tmp_path / "trying/node2.code").write_text("255\n")
    (tmp_path / "trying/node2.err").write_text("Host key verification failed.\n")
    assert main(words) == 69
    assert capsys.readouterr().err.startswith("reach: node2: its host key is not known: log in by hand")
