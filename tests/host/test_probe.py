"""The node probe prints the facts that a launch needs, or all facts for the doctor.

test_preflight.py and test_cluster.py test the use of the replies; launch_torchrun_auto.bats and across_nodes.bats test
the probe over a real sshd.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from distributed.health.cluster import facts_of
from distributed.host.facts import FullNodeFacts
from distributed.host.probe import foreign_owner, main, probe
from distributed.host.replies import Reply


def test_a_node_reports_the_facts_that_a_launch_needs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        files = [str(tmp_path / "a.py"), "/nix"]
        packages = ["json", "no_such_package"]
        found = probe(["localhost"], port, files, packages, env={"SSH_CONNECTION": "10.0.0.9 5 10.0.0.1 22"})
    assert found.missing == ["no_such_package"]
    assert found.holder is not None and found.port == port
    assert (found.ssh_address, found.files["/nix"]) == ("10.0.0.1", None)
    assert len(found.files[str(tmp_path / "a.py")] or "") == 64
    assert found.python.startswith("3.") and found.torch


def test_only_the_doctor_collects_all_facts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--file", __file__, "localhost"]) == 0
    quick = Reply("localhost", 0, capsys.readouterr().out, "").value()
    assert "facts" not in quick and list(quick["files"]) == [__file__]
    main(["--directory", str(tmp_path), "--log-dir", str(tmp_path), "--port", "29500", "localhost"])
    reply = Reply("localhost", 0, capsys.readouterr().out, "")
    full = facts_of(reply)
    assert isinstance(full, FullNodeFacts) and full.facts.directory == str(tmp_path)
    assert json.loads(json.dumps(asdict(full))) == reply.value(), "the JSON value is unchanged"
    assert full.python == full.facts.interpreter.version and full.port == 29500
    assert full.kit["train.py"] and full.kit["distributed/torch.py"] and full.kit["scripts/lib/module.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories to other users")
def test_a_working_directory_belongs_to_the_user_to_root_or_to_its_owner_on_the_launching_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert foreign_owner("1000:1000") == ""
    os.chown(tmp_path, 65534, 65534)
    assert [foreign_owner(owner) for owner in ("0:0", "1000:65534")] == ["belongs to nobody"] * 2
    assert foreign_owner("0:65534") == ""
