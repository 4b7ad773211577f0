"""Arguments reach a node unchanged: ssh and pdsh join them, and two shells split them again.

Thousands of arguments, which contain any bytes except NUL, are passed through ssh and pdsh to a laboratory node, and
through each installed login shell. The bats files test a few special arguments.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distributed.host.ssh_call import for_any_shell
from distributed.runs.lookup import RunNode
from distributed.transport.commands import Calls, SshCommands
from distributed.transport.loop import Command

TESTS = Path(__file__).resolve().parent
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "ksh", "mksh") if shutil.which(shell)]
RECORDER = (
    'import os, sys; open(__file__ + ".received", "wb").write(b"".join(os.fsencode(a) + b"\\0" for a in sys.argv))\n'
)

SPECIAL = [b"", b"-n", b"--", b"--help", b"%n", b"%h%u%%", b"~", b"*", b"=", b"=3D", b"\\", b"a\\\\", b"\\x41", b"'",
           b'"', b"\n", b"\r\n", b"a\n\n", b"$HOME", b"$(id)", b"`id`", b"!!", b"a!b", b"{a,b}", b"&&", b"&", b"\\&",
           b"|", b"<", b"?", b"^", b"[a]", b";exit 3", b"#", b" ", b"\t", b"\x01", b"\x7f\x1b[0m", b"\xc3\xa9",
           b"\xff\x80", b"\xf0\x9f"]  # fmt: skip
argument_lists = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.text("'\"\\$`!%=&~*?#;|<>(){}[]^ \n\t-nxé火", max_size=8).map(str.encode),
        st.lists(st.sampled_from(SPECIAL), max_size=3).map(b"".join),
    ).map(lambda argument: argument.replace(b"\0", b"")),
    min_size=60,
    max_size=120,
)
few_examples = settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node of a laboratory (tests/lab/lab.sh) that only the tests of this file use."""
    if os.getuid() != 0:
        pytest.skip("starting nodes needs root")
    prefix = "w" + "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    env = os.environ | {"MUSTER_LAB": str(tmp_path_factory.mktemp("lab") / "lab")}
    lab = TESTS / "lab" / "lab.sh"
    subprocess.run([lab, "up", "1", "--prefix", prefix], env=env, check=True)
    yield f"{prefix}1"
    subprocess.run([lab, "down"], env=env, check=True)


def received(directory: Path, on_target: Callable[[list[str]], Command], sent: list[bytes]) -> list[bytes]:
    """Return the arguments that arrive. on_target: returns the local command that runs a command on the target."""
    program = directory / "record it's.py"
    program.write_text(RECORDER, encoding="utf-8")
    command = on_target([sys.executable, str(program), "--", *map(os.fsdecode, sent)])
    reply = Calls().call_all({RunNode("node", "", 1, 0): command}, timeout=60)["node"]
    assert reply.code == 0, reply
    _, *arrived = Path(f"{program}.received").read_bytes().split(b"\0")[:-1]
    return arrived[arrived.index(b"--") + 1 :]


@few_examples
@given(sent=argument_lists)
@example(sent=SPECIAL)
def test_ssh_passes_arguments_unchanged(node: str, tmp_path: Path, sent: list[bytes]) -> None:
    ssh, target = SshCommands(print), RunNode(node, node, 1, 0)
    assert received(tmp_path, lambda command: ssh.command(target, command, str(tmp_path)), sent) == sent


@pytest.mark.parametrize("shell", SHELLS)
@settings(few_examples, max_examples=4)
@given(sent=argument_lists)
@example(sent=SPECIAL)
def test_a_login_shell_passes_arguments_unchanged(tmp_path: Path, shell: str, sent: list[bytes]) -> None:

    def in_shell(command: list[str]) -> list[str]:
        return [shell, "-c", for_any_shell(f"exec {shlex.join(command)}")]

    assert received(tmp_path, in_shell, sent) == sent


@pytest.mark.parametrize("launcher", ["launch_torchrun_auto.sh", "launch_pdsh_multinode.sh"])
def test_a_launched_script_gets_arguments_and_env_unchanged(node: str, tmp_path: Path, launcher: str) -> None:
    generator = random.Random(0)
    sent = [*SPECIAL, *(bytes(generator.choices(range(1, 256), k=generator.randrange(9))) for _ in range(400))]
    script = tmp_path / "record.py"
    script.write_text(RECORDER.replace("sys.argv", 'sys.argv + [os.environ["VALUE"]]'), encoding="utf-8")
    value = b"".join(sent)
    options: list[str | bytes] = ["--no-preflight", "--python", sys.executable, "--env", b"VALUE=" + value]
    command = [f"{TESTS.parent}/scripts/ssh/{launcher}", *options, "--script", str(script), "-", "1", node, "--", *sent]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(f"{script}.received").read_bytes().split(b"\0")[1:-1] == [*sent, value]
