"""A command gets standard input only after it has printed READY.

In this file, a shell script replaces ssh. The bats files run the real ssh.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.exit_codes import UNFIT
from distributed.host.ssh_call import BLOCK, LOGIN_SHELL, login_failure
from distributed.transport.loop import NULL, Client, Loop, SshCommand, inherited_environment

MODULE = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "module.py"
PROGRAM = [sys.executable, "-I", "-S", str(MODULE), "host.ssh_call"]
PRINT_READY = r"printf '\nmuster-ready\n'; read -r _ || exit 69; "
SECRET = b"k3pt\0secret\n"


@pytest.fixture(params=["program", "loop"])
def caller(request: pytest.FixtureRequest) -> str:
    """What runs ssh: the program host.ssh_call, or a client of the event loop."""
    request.getfixturevalue("signal_handlers")
    return str(request.param)


def call(
    caller: str, script: str, sent: bytes = SECRET, within: int = 60, log: Path | None = None
) -> tuple[int, bytes, str]:
    """Run a shell script in place of ssh. Return exit code, standard output and standard error.

    within: the timeout for READY, in seconds.
    """
    command = ["bash", "-c", script]
    if caller == "program":
        options = ["--within", f"{within}"]
        done = subprocess.run([*PROGRAM, *options, "node1", *command], input=sent, capture_output=True, timeout=60)
        return done.returncode, done.stdout, done.stderr.decode()
    loop, out, err = Loop(lambda number: None, ()), bytearray(), bytearray()
    ended: list[Client] = []
    client = Client(
        loop, SshCommand(command, "node1", within, str(log or "")), inherited_environment(), sent=sent,
        on_exit=ended.append, on_output=out.extend, on_errors=err.extend, timeout=60,
    )  # fmt: skip
    client.end_input()
    while not ended:
        loop.wait()
    return client.code, bytes(out), err.decode()


def test_standard_input_and_output_arrive_unchanged_and_earlier_output_is_dropped(caller: str) -> None:
    sent = bytes(range(256)) * 10_000  # more than a pipe holds
    assert call(caller, "echo Welcome; echo -n '$ '; sleep 0.2; " + PRINT_READY + "cat; exit 3", sent) == (3, sent, "")


def test_end_of_file_arrives(caller: str) -> None:
    assert call(caller, PRINT_READY + "cat; echo end", b"") == (0, b"end\n", "")


@pytest.mark.parametrize("reader", ["cat >received; exit 5", "read -rn 1 && echo $REPLY >received", "cat >received &"])
def test_a_login_shell_that_does_not_start_the_command_gets_no_input(caller: str, tmp_path: Path, reader: str) -> None:
    code, out, err = call(caller, f"cd '{tmp_path}'; echo Password:; {reader}", within=1, log=tmp_path / "log")
    assert (code, out) == (UNFIT, b"")
    assert err.startswith(f"node1: {LOGIN_SHELL}") and " (it printed: Password:); its start-up file there " in err
    assert caller == "program" or (tmp_path / "log").read_text() == err
    assert not (tmp_path / "received").exists() or not (tmp_path / "received").read_bytes()


def test_a_command_that_starts_too_late_ends_at_once(caller: str, tmp_path: Path) -> None:
    code, _, err = call(caller, f"cd '{tmp_path}'; {{ sleep 2; {PRINT_READY} : >started; }} <&0 & wait", within=1)
    assert code == UNFIT and "has not started Muster's command within 1 s" in err
    assert not (tmp_path / "started").exists()


def test_output_without_end_does_not_delay_the_message(caller: str) -> None:
    code, out, err = call(caller, "yes", within=1)
    assert (code, out) == (UNFIT, b"") and "(it printed: y)" in err


def test_an_error_of_ssh_is_passed_on_unchanged(caller: str) -> None:
    assert call(caller, "echo 'ssh: connect to host node1: no' >&2; exit 255") == (
        255,
        b"",
        "ssh: connect to host node1: no\n",
    )


def test_ready_may_arrive_in_parts_and_after_much_output(caller: str) -> None:
    flood = f"head -c {3 * BLOCK} /dev/zero; "
    script = flood + r"printf '\nmuster-'; sleep 0.2; printf 'ready\n'; sleep 0.2; read -r _; cat"
    assert call(caller, script) == (0, SECRET, "")


@pytest.mark.usefixtures("signal_handlers")
def test_output_goes_to_a_file_of_the_caller_and_no_more_input_than_the_first_line_is_needed(tmp_path: Path) -> None:
    """Without `sent`, the command gets only the line for which it waits, and end of file."""
    loop = Loop(lambda number: None, ())
    ended: list[Client] = []
    with (tmp_path / "out").open("wb") as out:
        command = SshCommand(["bash", "-c", PRINT_READY + "cat; echo end; exit 3"], "node1", 60)
        Client(loop, command, inherited_environment(), on_exit=ended.append, output=out.fileno(), errors=NULL)
    while not ended:
        loop.wait()
    assert (tmp_path / "out").read_text() == "end\n" and ended[0].code == 3


def test_a_closed_standard_output_does_not_stop_the_command(tmp_path: Path) -> None:
    script = f"cd '{tmp_path}'; {PRINT_READY} head -c 1000000 /dev/zero; cat >received"
    subprocess.run(
        ["bash", "-c", '"$@" >&-', "bash", *PROGRAM, "node1", "bash", "-c", script], input=SECRET, timeout=60
    )
    assert (tmp_path / "received").read_bytes() == SECRET


@pytest.mark.parametrize("start", [PRINT_READY, ""])
def test_a_signal_that_kills_ssh_is_distinguished_from_an_exit_code_of_the_command(caller: str, start: str) -> None:
    code, _, err = call(caller, start + "kill -KILL $$")
    assert code == (-9 if caller == "program" else 128 + 9)
    assert re.fullmatch(r"ssh \(process [0-9]+\) was killed by signal 9\n", err)
    assert call(caller, PRINT_READY + "exit 137")[0] == 137


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ("", ""),
        ("Access denied\n", " (standard error: Access denied)"),
        ("Access denied\nfor you\n", " (standard error: Access denied for you)"),
        ("Access denied", " (standard error: Access deniednode1:)"),
    ],
)
def test_a_message_contains_what_the_node_wrote_before(errors: str, said: str) -> None:
    message = f"{LOGIN_SHELL}ended with exit code 1 before it started; its start-up file there may ..."
    expected = message.replace("; its", f"{said}; its")
    assert login_failure(f"{errors}node1: {message}\n") == expected
    assert login_failure(f"{errors}node1: {LOGIN_SHELL}").startswith(LOGIN_SHELL)
