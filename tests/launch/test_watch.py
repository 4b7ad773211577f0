"""The reaction of the watch of an attempt to nodes that end, fail or lose their connection.

Local shell scripts replace the clients ssh and pdsh. faults.bats and across_nodes.bats use real nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.exit_codes import UNFIT
from distributed.host import process_scan
from distributed.launch.transport import _PdshErrors
from distributed.launch.watch import Local, Watch
from distributed.runs.lookup import RunNode
from distributed.runs.run_directory import create
from distributed.transport.commands import LocalCommands
from distributed.verdict.verdict import decide

STOPPED_ON_REQUEST = 'while read -r request; do [ "$request" != stop ] || exit 143; done'


class Scripts(Local):
    """Starts a shell script for each node, as if it were the supervisor over ssh."""

    reports = True

    def __init__(self, scripts: dict[str, str], sent: bytes) -> None:
        super().__init__(LocalCommands())
        self.scripts, self.sent = scripts, sent

    def start(self, watch: Watch) -> None:
        for node, script in self.scripts.items():
            watch.start_client(node, ["sh", "-c", script], sent=self.sent)


class OneClient(Scripts):
    """Starts one script for all nodes, as pdsh does."""

    clients_are_nodes = False

    def start(self, watch: Watch) -> None:
        watch.start_client("all", ["sh", "-c", self.scripts["all"]])

    def request(self, watch: Watch, request: str) -> None:
        Path(request).touch()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a run on n1 and n2; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    return Path(
        create(
            str(tmp_path / "logs"), "train", nodes=[RunNode("n1", "", 1, 0), RunNode("n2", "", 1, 1)],
            script="train.py", config=None, cwd="/", python="python3", command=["x"], launcher=os.getpid(),
        )
    )  # fmt: skip


Attempt = Callable[..., int]
NewWatch = Callable[..., Watch]


@pytest.fixture
def attempt(directory: Path, new_watch: NewWatch) -> Attempt:
    """Run the scripts of n1 and n2, or the script of `all`. Returns the exit code of the first node that failed."""

    def attempt(sent: bytes = b"", **scripts: str) -> int:
        kind = OneClient if "all" in scripts else Scripts
        return new_watch(directory, kind(scripts, sent)).attempt()

    return attempt


def report(node: str, code: int) -> str:
    """A command that prints the report of a supervisor."""
    return f'printf "\\036{{\\"node\\": \\"{node}\\", \\"exit_code\\": {code}}}\\n"'


def begin_attempt(watch: Watch) -> None:
    """Nothing is known of the nodes yet."""
    for known in watch.nodes.values():
        known.begin_attempt(runs=True)


def log_of(directory: Path) -> str:
    log = directory / "launcher.log"
    return log.read_text() if log.exists() else ""


def test_the_first_node_that_fails_stops_the_others(directory: Path, attempt: Attempt) -> None:
    assert attempt(n1=f"{report('n1', 3)}; exit 3", n2=STOPPED_ON_REQUEST) == 3


@pytest.mark.parametrize("code", [255, 139])
def test_an_exit_code_of_a_script_is_not_taken_for_a_lost_connection(
    directory: Path, attempt: Attempt, code: int
) -> None:
    """ssh exits with 255 without a connection, and with more than 128 if a signal has ended it."""
    script = f"{report('n1', code)}; exit {code}"
    assert attempt(n1=script, n2=f"{STOPPED_ON_REQUEST}; exit 0") == code
    assert "connection" not in log_of(directory)
    assert not list(directory.glob("*.lost"))


def test_a_client_that_is_killed_is_named_and_its_node_is_lost(directory: Path, attempt: Attempt) -> None:
    assert attempt(n1="kill -KILL $$", n2=STOPPED_ON_REQUEST) == 137
    first, second = [line.split(" ", 2)[2] for line in log_of(directory).splitlines()]
    assert first.startswith("n1: the launcher's client (process ") and first.endswith(") was killed")
    assert second == "n1: connection to its supervisor lost; stopping the run"
    cause = decide(directory, 137).cause
    assert cause.startswith("n1: connection lost: its ssh client on the launching side (process ")
    assert cause.endswith(") was killed by SIGKILL")


def test_a_connection_that_is_lost_ends_the_run(directory: Path, attempt: Attempt) -> None:
    assert attempt(n1="exit 255", n2=STOPPED_ON_REQUEST) == UNFIT
    assert decide(directory, UNFIT).cause == "n1: connection lost: ssh on the launching side exited with code 255"


def test_a_connection_that_is_lost_after_the_exit_code_was_recorded_is_no_failure(
    directory: Path, attempt: Attempt
) -> None:
    assert attempt(n1=f"echo 0 >'{directory}/node_n1.exit'; exit 255", n2=report("n2", 0)) == 0
    assert attempt(n1=f"echo 5 >'{directory}/node_n1.exit'; exit 255", n2=STOPPED_ON_REQUEST) == 5


def test_a_connection_that_is_lost_while_the_run_ends_is_not_recorded(directory: Path, attempt: Attempt) -> None:
    assert attempt(n1=f"{report('n1', 3)}; exit 3", n2="read -r request; exit 255") == 3
    assert not list(directory.glob("errors/connection_*"))


FOLLOWING = r"""printf '\036{"node": "n1", "following": true}\n'"""


class Followed(Scripts):
    """n1 runs without a lease and loses its connection. Each new connection runs the next script of `followers`."""

    lease = 0

    def __init__(self, *followers: str) -> None:
        super().__init__({"n1": f"{FOLLOWING}; exit 255", "n2": report("n2", 0)}, b"")
        self.commands, self.followers = self, list(followers)  # type: ignore[assignment]

    def command(self, node: RunNode, arguments: Sequence[str], cwd: str, log: str = "") -> list[str]:
        return ["sh", "-c", self.followers.pop(0)]


@pytest.mark.parametrize("code", [0, 5, 255])
def test_a_node_without_a_lease_is_followed_again_until_it_reports(
    directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The watch connects again four times: no connection, a failing login shell, a killed client, and success."""
    monkeypatch.setattr("distributed.launch.lost_nodes.RECONNECT_INTERVAL", 0.1)
    transport = Followed("exit 255", "exit 69", "kill -KILL $$", report("n1", code))
    assert new_watch(directory, transport).attempt() == code
    assert not transport.followers
    assert log_of(directory).count("n1: connection to its supervisor lost; it runs on, connecting again\n") == 1


def test_a_node_without_a_lease_that_has_not_started_is_lost(directory: Path, new_watch: NewWatch) -> None:
    transport = Followed("exit 0")
    transport.scripts["n1"] = "exit 255"
    assert new_watch(directory, transport).attempt() == UNFIT
    assert "n1: connection to its supervisor lost; stopping the run" in log_of(directory)


def test_a_node_without_a_lease_is_swept_if_the_run_ends_while_it_is_unreachable(
    directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.launch.lost_nodes.RECONNECT_INTERVAL", 0.1)
    transport = Followed("touch swept")
    transport.scripts["n2"] = report("n2", 3)
    assert new_watch(directory, transport).attempt() == 3
    assert Path("swept").exists()


def test_a_node_that_does_not_read_its_environment_does_not_delay_the_others(directory: Path, attempt: Attempt) -> None:
    """The environment is larger than a pipe."""
    waiting = "until [ -e started ]; do sleep 0.02; done; cat >/dev/null &"
    environment = bytes(1 << 20)
    assert attempt(environment, n1=f"{waiting} {report('n1', 0)}", n2=f"touch started; {report('n2', 0)}") == 0


def test_a_signal_to_one_supervisor_stops_all_nodes_and_the_next_signal_to_the_launcher_does_not_kill_them(
    directory: Path, new_watch: NewWatch
) -> None:
    reported = 'printf "\\036{\\"node\\": \\"n1\\", \\"signal\\": 15}\\n"'
    stopped = f"read -r request; kill -INT {os.getpid()}; sleep 1; read -t 0.1 -r request && exit 9; exit 143"
    watch = new_watch(directory, Scripts({"n1": f"{reported}; {STOPPED_ON_REQUEST}", "n2": ""}, b""))
    watch.transport.scripts["n2"] = f"exec bash -c '{stopped}'"  # type: ignore[attr-defined]
    assert watch.attempt() == 143
    assert watch.stopping.stopped_at and watch.stopping.signal == signal.SIGINT and watch.nodes.signals.keys() == {"n1"}
    first, second = [line.split(" ", 2)[2] for line in log_of(directory).splitlines()]
    assert first.startswith("n1: received SIGTERM; stopping the run; up to ")
    assert second == "SIGINT: the run is stopping already; send the signal again to kill it at once"


def test_the_verdict_names_the_node_that_missed_the_heartbeats_of_a_lost_one(
    directory: Path, new_watch: NewWatch
) -> None:
    watch = new_watch(directory, Local(LocalCommands()))
    watch.lost_nodes.mark_lost("n1", "n2 received no heartbeat from it")
    assert decide(directory, UNFIT).cause == "n1: connection lost: n2 received no heartbeat from it"


def test_a_signal_to_a_node_that_is_not_part_of_the_run_stops_nothing(directory: Path, new_watch: NewWatch) -> None:
    watch = new_watch(directory, Local(LocalCommands()))
    watch.stopping.stop_after_signal(signal.SIGTERM, "n3")
    assert not watch.stopping.signal and not watch.stopping.is_ending


def test_with_one_client_the_first_report_of_a_failure_stops_the_others(directory: Path, attempt: Attempt) -> None:
    """The client prints no exit codes on standard error. pdsh prints them there only if it uses ssh."""
    waiting = f"{report('n1', 5)}; until [ -e stop ]; do sleep 0.02; done; {report('n2', 143)}; exit 143"
    assert attempt(all=waiting) == 5
    assert "connection" not in log_of(directory)


def test_with_one_client_a_node_without_a_report_is_lost(directory: Path, attempt: Attempt) -> None:
    assert attempt(all=f"{report('n1', 0)}; exit 255") == UNFIT
    assert "n2: connection to its supervisor lost" in log_of(directory)
    assert "n1" not in log_of(directory)


def test_exit_codes_in_pdshs_messages_are_those_of_the_named_nodes(directory: Path, new_watch: NewWatch) -> None:
    """pdsh prints a host without its domain."""
    watch = new_watch(directory, Local(LocalCommands()))
    watch.run = replace(
        watch.run, nodes=tuple(replace(node, address=f"ada@{node.node}.lan") for node in watch.run.nodes)
    )
    begin_attempt(watch)
    errors = _PdshErrors(watch)
    errors.feed(b"pdsh@here: other: ssh exited with exit code 9\npdsh@here: n2: ssh exited with ")
    assert (watch.stopping.status, watch.nodes.unended) == (0, {"n1", "n2"})
    errors.feed(b"exit code 3\n")
    assert (watch.stopping.status, watch.nodes.unended) == (3, {"n1"})


def test_a_line_of_a_rank_that_imitates_pdsh_does_not_change_how_a_node_ended(
    directory: Path, new_watch: NewWatch
) -> None:
    """The node has reported its start, so its exit code comes from its supervisor alone."""
    watch = new_watch(directory, Local(LocalCommands()))
    begin_attempt(watch)
    watch.nodes["n2"].clock = 0.0
    _PdshErrors(watch).feed(b"pdsh@here: n2: ssh exited with exit code 0\npdsh@here: n2: ssh exited with exit code 3\n")
    assert (watch.stopping.status, watch.nodes.unended) == (0, {"n1", "n2"})


def test_a_node_whose_report_was_damaged_has_the_exit_code_that_its_supervisor_has_recorded(
    directory: Path, attempt: Attempt
) -> None:
    (directory / "node_n2.exit").write_text("9\n")
    assert attempt(all=f"{report('n1', 0)}; exit 9") == 9
    assert "connection" not in log_of(directory)


def test_a_command_that_does_not_reply_in_time_is_killed_with_its_children(
    directory: Path, new_watch: NewWatch
) -> None:
    watch = new_watch(directory, Local(LocalCommands()))
    [node, *_] = watch.run.nodes
    reply = watch.calls.call_all({node: ["sh", "-c", "echo $$; sleep 1000; echo"]}, timeout=0.5)[node.node]
    assert (reply.code, reply.out.strip().isdecimal()) == (137, True)
    end = time.monotonic() + 20
    while [stat for stat in process_scan.table().values() if stat.session == int(reply.out) and stat.alive]:
        assert time.monotonic() < end
        time.sleep(0.02)
