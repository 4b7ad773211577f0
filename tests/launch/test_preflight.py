"""Before a launch the nodes are compared; each fault is one line with the node, the value and the remedy.

Messages of ssh are those of OpenSSH 9.2. launch_torchrun_auto.bats tests unreachable nodes and ports in use over a real
sshd.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distributed.host.replies import MARKER, NodeFacts, Reply
from distributed.host.system import KIT
from distributed.launch import preflight

GOOD = NodeFacts(
    python="3.11.7", torch="2.13.0", files={"a.py": "11"}, gpus=0, gpu_error="", machine="", addresses=("10.0.0.1",),
    cores=4.0, ssh_address="10.0.0.1", master="10.0.0.1", seconds=0.001, port=23456, holder=None, missing=[],
    directory_error="", log_error="", log_warning="", nccl="2.28.9", muster="01234567",
)  # fmt: skip


def node(number: int, code: int = 0, err: str = "", out: str | None = None, **facts: object) -> Reply:
    """The reply of node1, node2, ... with facts that differ from GOOD."""
    ip = f"10.0.0.{number}"
    found = replace(GOOD, **{"machine": ip, "addresses": (ip,), "ssh_address": ip, **facts})  # type: ignore[arg-type]
    printed = f"Welcome!\n{MARKER}{json.dumps(asdict(found))}\n" if out is None else out
    return Reply(f"node{number}", code, printed, err)


def judge(replies: list[Reply], port: int | None = None) -> tuple[list[str], list[str], str]:
    """Return faults, warnings and the rendezvous address for two processes per node."""
    return preflight.judge({reply.node: reply for reply in replies}, {reply.node: 2 for reply in replies}, port)


def faults(*replies: Reply, port: int | None = None) -> list[str]:
    found, warnings, rendezvous = judge(list(replies), port)
    assert (not rendezvous) == bool(found)
    assert warnings == []
    return found


def test_a_node_that_cannot_write_run_directories_is_named() -> None:
    assert faults(node(1), node(2, log_error="/logs: Read-only file system")) == [
        "node2: no run directory can be written there: /logs: Read-only file system; choose another --log-dir"
    ]


def test_a_node_on_which_others_could_replace_run_directories_is_named_once() -> None:
    problem = "/scratch: belongs to eve, and you are bob"
    found = judge([node(1), node(2, log_warning=problem), node(3, log_warning=problem)])
    warning = f"node3: {problem}; other users could replace the run directory; choose another --log-dir"
    assert found == ([], [warning], "10.0.0.1 23456")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_node_finds_out_who_could_replace_run_directories_that_do_not_exist_yet(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    command = [sys.executable, str(KIT / "scripts/lib/module.py"), "host.probe", f"--log-dir={tmp_path}/a/logs", "n1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.rpartition(MARKER)[2])
    assert facts["log_warning"].startswith(f"{tmp_path}: belongs to nobody, and you are root")


def test_a_node_on_which_another_user_has_made_the_working_directory_is_named() -> None:
    assert faults(node(1), node(2, directory_error="belongs to eve")) == [
        "node2: the working directory belongs to eve there; move it away, or if you trust it: --no-preflight"
    ]


@pytest.mark.parametrize(
    "facts",
    [
        {"addresses": ("a b",)}, {"ssh_address": "--rdzv-conf=x"}, {"master": "a\0b"}, {"port": -5},
        {"gpus": 10**15}, {"gpus": -1}, {"cores": 1e15}, {"cores": -1.0},
    ],
)  # fmt: skip
def test_a_reply_with_an_address_or_a_number_that_is_none_is_invalid(facts: dict[str, object]) -> None:
    out = f"{MARKER}{json.dumps({**asdict(GOOD), **facts})}\n"
    [fault] = faults(Reply("node1", 0, out, ""))
    assert fault.startswith("node1: invalid reply (reply: ") and " is no " in fault


def test_a_node_cannot_begin_a_line_about_another_node() -> None:
    lines = "2.12\nnode3: unplugged\x1b[2J"
    found, warnings, _ = judge([node(1), node(2, torch=lines), node(3, muster=lines)])
    assert len(found) == 1 and "node3: unplugged" in found[0] and "\n" not in found[0] and "\x1b" not in found[0]
    assert len(warnings) == 1 and "\n" not in warnings[0]


@pytest.mark.parametrize("name", ["missing", "files"])
def test_what_a_node_prints_is_limited(name: str) -> None:
    names = {f"n{number}": None for number in range(10_000)}
    out = f"{MARKER}{json.dumps({**asdict(GOOD), name: list(names) if name == 'missing' else names})}\n"
    [fault] = faults(Reply("node1", 0, out, ""), node(2))
    assert fault.startswith("node1: invalid reply (reply: more than 100 packages or files)")
    found, warnings, _ = judge([node(1), node(2, torch="2" * 2000), node(3, muster="3" * 2000)])
    assert [len(line) for line in (*found, *warnings)] == [1000, 1000]
    assert [len(line) for line in faults(node(1), Reply("node2", 1, "", "x" * 2000))] == [1000]


def test_a_node_without_the_package_of_a_tracker_is_named() -> None:
    assert faults(node(1), node(2, missing=("wandb",))) == [
        "node2: the package wandb is not installed, and the settings enable this tracker; install it for that Python: "
        "python -m pip install -r requirements-trackers.txt"
    ]


def test_the_rendezvous_address_is_the_one_that_the_other_nodes_resolve() -> None:
    assert judge([node(1), node(2), node(3)]) == ([], [], "10.0.0.1 23456")


def test_the_rendezvous_address_is_that_of_the_ssh_connection_if_no_node_resolves_a_usable_one() -> None:
    assert judge([node(1, master="127.0.1.1"), node(2, master="")])[2] == "10.0.0.1 23456"
    assert judge([node(1, master="127.0.1.1"), node(2, master="127.0.1.1")])[2] == "10.0.0.1 23456"


def test_a_single_node_needs_no_address_for_others() -> None:
    assert judge([node(1, master="", ssh_address="127.0.0.1")]) == ([], [], "127.0.0.1 23456")


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        ([node(1), node(2), node(3, python="3.12.1")], "node3: Python 3.12, but Python 3.11 elsewhere; use the same"),
        ([node(1), node(2, torch="2.12.0"), node(3)], "node2: PyTorch 2.12.0, but PyTorch 2.13.0 elsewhere; install"),
        (
            [node(1, torch="2.13.0+cu130"), node(2, torch="2.13.0+cu128"), node(3, torch="2.13.0+cu130")],
            "node2: PyTorch 2.13.0+cu128, but PyTorch 2.13.0+cu130 elsewhere; install the same version on all nodes",
        ),
        ([node(1, torch=None), node(2), node(3)], "node1: PyTorch is not installed; install it for that Python"),
        (
            [node(1), node(2, files={"a.py": None})],
            "node2: cannot read file 'a.py'; share its directory between the nodes, or launch with --sync (which "
            "copies tracked files, and others that git does not ignore)",
        ),
        (
            [node(1), node(2), node(3, files={"a.py": "22"})],
            "node3: 'a.py' differs from that on the other nodes; make th",
        ),
        (
            [node(1, gpus=8), node(2, gpus=1), node(3, gpus=8)],
            "node2: 2 processes, but 1 GPU; start fewer there (n",
        ),
        (
            [node(1, gpus=8), node(2, gpus=8), node(3)],
            "node3: no GPU, but GPUs elsewhere; leave out the nodes that differ",
        ),
        (
            [node(1, gpus=8), node(2, gpu_error="nvidia-smi: died")],
            "node2: cannot count its GPUs (nvidia-smi: died)",
        ),
        ([node(1), node(2, machine="10.0.0.1")], "node2: is the same machine as node1; list it once"),
        ([node(1, holder="python (pid 7)"), node(2)], "node1: port 29500: in use by python (pid 7); choose another"),
        ([node(1, holder=""), node(2)], "node1: port 29500: in use; choose another"),
        (
            [node(1, ssh_address=""), node(2, master="127.0.1.1")],
            "node1: no address that all nodes can use ('node1' resolves to 127.0.1.1 on node2; its own addresses:",
        ),
    ],
)
def test_each_incompatibility_is_one_fault(nodes: list[Reply], fault: str) -> None:
    [found] = faults(*nodes, port=29500)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("code", "err", "fault"),
    [
        (
            255,
            "ssh: connect to host node2 port 22: Connection refused",
            "cannot be reached (ssh: connect to host",
        ),
        (255, "Host key verification failed.", "host key unknown; log in once"),
        (255, "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@", "host key has changed, possibly an attack;"),
        (255, "u@node2: Permission denied (publickey,password).", "login without a password refused (u@node2:"),
        (
            69,
            "bash: line 1: cd: /w: No such file or directory",
            "working directory not found (cd: /w: No",
        ),
        (127, "bash: line 1: exec: /x/python: not found", "Python cannot be started (exec: /x"),
        (127, "bash: line 1: /x/python: No such file or directory", "Python cannot be started (/x/python: No"),
        (127, f"{KIT}/scripts/lib/environment.bash: line 8: /x/python: No", "Python cannot be started (/x/python"),
        (127, "bash: line 1: /k/scripts/lib/in_node_env.sh: No such file", "Muster not found (/k/scripts"),
        (
            69,
            "/w/config/node_env.sh: line 1: no\n/w/config/node_env.sh: line 1: 'cd /x' failed with exit code 1",
            "/w/config/node_env.sh: line 1: 'cd /x' failed with exit code 1",
        ),
        (2, "/x/python: can't open file '/k/scripts/lib/module.py': [Errno 2]", "Muster not found (/x/python"),
        (1, "Traceback\n  boom", "Traceback boom"),
        (1, "", "exit code 1"),
    ],
)
def test_the_cause_of_a_missing_reply_is_reported(code: int, err: str, fault: str) -> None:
    [found] = faults(node(1), node(2, code=code, err=err, out="Welcome!\n"))
    assert found.startswith(f"node2: {fault}")


def test_another_nccl_is_a_warning_on_nodes_with_gpus() -> None:
    found, warnings, _ = judge([node(1, gpus=2), node(2, gpus=2, nccl="2.27.5"), node(3, gpus=2)])
    assert (found, warnings) == ([], ["node2: NCCL 2.27.5, but NCCL 2.28.9 elsewhere; install the same version"])
    assert judge([node(1), node(2, nccl="2.27.5"), node(3)])[1] == []


def test_other_files_of_muster_are_a_warning() -> None:
    found, warnings, rendezvous = judge([node(1), node(2, muster="76543210"), node(3)])
    assert (found, bool(rendezvous)) == ([], True)
    assert warnings == [
        "node2: Muster 76543210, but Muster 01234567 elsewhere; use the same files, or launch with --sync"
    ]


def test_nodes_without_a_file_are_at_fault_even_if_they_are_the_majority() -> None:
    lacking = [node(number, files={"a.py": None}) for number in (2, 3)]
    assert [fault.partition(":")[0] for fault in faults(node(1), *lacking)] == ["node2", "node3"]


def test_all_nodes_without_a_reply_are_reported() -> None:
    assert len(faults(*(node(number, code=255, err="ssh: no route", out="") for number in (1, 2, 3)))) == 3


def test_a_slow_resolver_is_a_warning() -> None:
    found, [warning], rendezvous = judge([node(1), node(2, seconds=5.04)])
    assert found == [] and rendezvous
    assert warning.startswith("node2: looking up 'node1' took 5.0 s")


def test_a_long_message_of_a_node_takes_linear_time() -> None:
    started = time.monotonic()
    assert len(Reply("node2", 1, "", "x" * 1_000_000).failure_message()) == 1_000_000
    assert time.monotonic() - started < 5
