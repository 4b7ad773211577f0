"""Commands for nodes: temporary directories, their removal, replies. The bats files run commands over a real ssh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distributed.host import process_scan
from distributed.host.replies import Reply
from distributed.runs.lookup import RunNode
from distributed.transport.commands import Calls, SshCommands, TransportError, quote, temporary_directory
from distributed.transport.loop import Client, Loop, SshCommand, inherited_environment

KIT = Path(__file__).resolve().parents[2]
NODES = [RunNode("n1", "", 1, 0), RunNode("n2", "", 1, 1)]


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "1 "])
def test_a_wrong_login_timeout_is_a_wrong_call(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_LOGIN_TIMEOUT", value)
    with pytest.raises(TransportError, match=f"expected a whole number of seconds, 1 or more, got '{value}'") as raised:
        SshCommands(print)
    assert raised.value.code == 2


def test_a_machine_without_ssh_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = SshCommands(print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TransportError, match="ssh: not found on this machine; install the OpenSSH client"):
        ssh.command(RunNode("n1", "ada@n1", 1, 0), ["true"])


def test_the_timeout_of_the_login_shell_is_shorter_than_the_timeout_of_the_reply() -> None:
    """Otherwise, if the login shell is slow, the message would be only that the node did not reply in time."""
    command = SshCommands(print).command(RunNode("n1", "ada@n1", 1, 0), ["true"], timeout=20)
    assert isinstance(command, SshCommand) and command.start_timeout == 19


@pytest.mark.usefixtures("signal_handlers")
def test_replies_are_in_the_order_of_the_nodes_and_missing_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 replies after the message that names only n1 as missing."""
    monkeypatch.setattr("distributed.transport.commands.PROGRESS_INTERVAL", 0.05)
    messages: list[str] = []

    def log(message: str) -> None:
        messages.append(message)
        if "waiting for n1," in message:
            (tmp_path / "go on").touch()

    wait = ["sh", "-c", 'until [ -e "$1" ]; do sleep 0.05; done; echo one', "sh", str(tmp_path / "go on")]
    commands = dict(zip(NODES, (wait, ["sh", "-c", "cat; exit 3"]), strict=True))
    first, second = Calls().call_all(commands, log, sent=b"sent").values()
    assert (first.node, first.out, second.node, second.out, second.code) == ("n1", "one\n", "n2", "sent", 3)
    assert re.fullmatch(r"1 of 2 nodes replied, waiting for n1, \d+ s", messages[-1])


@pytest.mark.usefixtures("signal_handlers")
def test_the_loop_does_not_search_all_clients_when_one_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Client] = []

    def equal(one: Client, other: Client) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Client, "__eq__", equal)
    monkeypatch.setattr(Client, "__hash__", object.__hash__)
    assert len(Calls().call_all({RunNode(f"n{n}", "", 1, n): ["true"] for n in range(20)})) == 20
    assert not compared


def test_a_command_gets_input_before_its_input_is_closed_and_exits_when_its_input_is_closed() -> None:
    calls, printed = Calls(), bytearray()
    replies: list[Reply] = []
    client = calls.call("n1", ["cat"], replies.append, sent=b"a", keep_input=True, on_output=printed.extend)
    while not printed:
        calls.loop.wait()
    assert (bytes(printed), replies) == (b"a", [])
    client.end_input()
    calls.wait()
    assert [reply.code for reply in replies] == [0]


def test_a_killed_command_leaves_no_process_even_in_other_sessions(tmp_path: Path) -> None:
    loop, ended = Loop(lambda number: None, ()), list[Client]()
    script = 'setsid sh -c "echo \\$\\$ >pid.part; mv pid.part pid; sleep 60; true" & sleep 60; true'
    command = ["sh", "-c", f"cd {tmp_path}; {script}"]
    client = Client(loop, command, inherited_environment(), on_exit=ended.append)
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        loop.wait(limit=0.01)
    found = process_scan.descendants(client.process.pid)
    assert int((tmp_path / "pid").read_text()) in found and len(found) >= 3
    client.kill()
    while not ended:
        loop.wait()
    while any(process_scan.start_time(pid) for pid in found):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_program_and_its_commands(number: int) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(KIT)!r})\n"
        "from distributed.transport.commands import Calls\n"
        "calls = Calls()\n"
        "calls.call('n1', ['sh', '-c', 'echo $$ >&2; sleep 1000; true'], errors=None); calls.wait()"
    )
    # nohup, by which these tests may be started, makes a program ignore SIGHUP.
    call = ["env", "--default-signal=HUP", sys.executable, "-I", "-c", program]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        group = int(process.stderr.readline())
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    end = time.monotonic() + 20
    while [stat for stat in process_scan.table().values() if stat.session == group and stat.alive]:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["a b", "it's", "$x", "#a", "a#b"], r"a\ b it\'s \$x \#a a#b"),
        (["", "two\nlines", "grün"], "'' 'two\nlines' grün"),
    ],
)
def test_a_command_line_can_be_pasted_into_bash(arguments: list[str], line: str) -> None:
    assert quote(arguments) == line
    shown = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {line}"])
    assert shown == b"".join(argument.encode() + b"\0" for argument in arguments)


# ---------------------------------------------------------------- temporary directories


@pytest.mark.parametrize("unusable", ["", "relative", "/tmp/blank here", f"/tmp/{'long' * 8}"])
def test_tmp_is_used_without_a_warning_if_xdg_runtime_dir_is_empty_relative_too_long_or_has_a_blank(
    unusable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
    messages: list[str] = []
    made = temporary_directory(messages.append)
    os.rmdir(made)
    assert made.startswith("/tmp/muster-") and messages == []


@pytest.mark.parametrize("unusable", ["/nowhere", "/etc/passwd", "/proc/self"])
def test_an_xdg_runtime_dir_without_write_access_is_reported(unusable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
    messages: list[str] = []
    os.rmdir(temporary_directory(messages.append))
    [message] = messages
    assert message.startswith(f"warning: XDG_RUNTIME_DIR='{unusable}': cannot create files there (")
    assert "; using /tmp; unset the variable" in message


def test_the_directory_of_xdg_runtime_dir_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev/shm")
    os.rmdir(made := temporary_directory(print))
    assert made.startswith("/dev/shm/muster-")


@pytest.mark.parametrize("kind", ["another user owns a directory above it", "others can write to it"])
def test_a_directory_that_another_user_could_replace_is_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a parent directory could rename the directory, and put in one with a configuration of ssh."""
    above = tempfile.mkdtemp(prefix="t", dir="/tmp")
    os.mkdir(base := f"{above}/a")
    if kind.startswith("others"):
        os.chmod(base, 0o777)
    elif os.geteuid():
        pytest.skip("only root can give a directory to another user")
    else:
        os.chown(above, 65534, -1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    messages: list[str] = []
    os.rmdir(made := temporary_directory(messages.append))
    assert made.startswith("/tmp/muster-") and os.listdir(base) == []
    assert messages[0].startswith(f"warning: XDG_RUNTIME_DIR='{base}': not safe ({above}")
    os.rmdir(base)
    os.rmdir(above)


PROGRAM = f"""
import sys
sys.path.insert(0, {str(KIT)!r})
from distributed.transport.commands import TransportError, temporary_directory
try:
    print(temporary_directory(lambda message: print(message, file=sys.stderr)))
except TransportError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_unusable_and_the_error_names_all_directories_if_none_is_usable() -> None:
    def run_with_mount(mount: str, **variables: str) -> subprocess.CompletedProcess[str]:
        call = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-I", "-c", PROGRAM]
        return subprocess.run(call, env=os.environ | variables, capture_output=True, text=True, check=False)

    full = run_with_mount("mount -t tmpfs -o size=4k none /mnt", XDG_RUNTIME_DIR="/mnt")
    assert full.stdout.startswith("/tmp/muster-")
    assert "XDG_RUNTIME_DIR='/mnt': cannot create files there (No space left on device); using /tmp" in full.stderr
    os.rmdir(full.stdout.strip())
    if str(KIT).startswith("/tmp/"):
        return
    none = run_with_mount("mount -t tmpfs -o ro none /tmp", XDG_RUNTIME_DIR="/nowhere", TMPDIR="/nope")
    assert none.returncode == 1
    first = "XDG_RUNTIME_DIR='/nowhere': cannot create files there (No such file or directory); /tmp: cannot"
    assert none.stderr.startswith(first)
    assert "; TMPDIR='/nope': cannot create files" in none.stderr
    assert none.stderr.strip().endswith("; export TMPDIR=DIRECTORY, with a directory that you can write")


def test_files_are_removed_when_their_process_was_killed(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(KIT)!r})\n"
        "from distributed.transport.commands import SshCommands\n"
        "ssh = SshCommands(print, sys.argv[1]); open(ssh.synced[0] + '/' + ssh.marker, 'w').close()\n"
        "print(ssh.options[1], flush=True); sys.stdin.read()"
    )
    call = [sys.executable, "-I", "-c", program, str(tmp_path)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        directory = Path(process.stdout.readline().strip()).parent
        assert directory.is_dir() and len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGKILL)
        end = time.monotonic() + 20
        while directory.exists() or list(tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.02)
