"""A word of the user's is never changed on the way to a node: what ssh and pdsh join, and two shells part again.

Thousands of words, of any bytes but NUL, go through the kit's doors to a real node of the laboratory, and by the line
for a login shell through every shell that is installed. Bats holds the few that once were special.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).resolve().parent
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "ksh", "mksh") if shutil.which(shell)]
TELL = 'import os, sys; open(__file__ + ".told", "wb").write(b"".join(os.fsencode(w) + b"\\0" for w in sys.argv))\n'

SPECIAL = [b"", b"-n", b"--", b"--help", b"%n", b"%h%u%%", b"~", b"*", b"=", b"=3D", b"\\", b"a\\\\", b"\\x41", b"'",
           b'"', b"\n", b"\r\n", b"a\n\n", b"$HOME", b"$(id)", b"`id`", b"!!", b"a!b", b"{a,b}", b"&&", b"&", b"\\&",
           b"|", b"<", b"?", b"^", b"[a]", b";exit 3", b"#", b" ", b"\t", b"\x01", b"\x7f\x1b[0m", b"\xc3\xa9",
           b"\xff\x80", b"\xf0\x9f"]  # fmt: skip
words = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.text("'\"\\$`!%=&~*?#;|<>(){}[]^ \n\t-nxé火", max_size=8).map(str.encode),
        st.lists(st.sampled_from(SPECIAL), max_size=3).map(b"".join),
    ).map(lambda word: word.replace(b"\0", b"")),
    min_size=60,
    max_size=120,
)
thousands = settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node of a laboratory of our own."""
    if os.getuid() != 0:
        pytest.skip("raising nodes needs root")
    prefix = "w" + "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    here = os.environ | {"MUSTER_LAB": str(tmp_path_factory.mktemp("lab") / "lab")}
    lab = [str(TESTS / "lab" / "lab.sh")]
    subprocess.run([*lab, "up", "1", "--prefix", prefix], env=here, check=True)
    yield f"{prefix}1"
    subprocess.run([*lab, "down"], env=here, check=True)


def told(folder: Path, door: str, where: str, sent: list[bytes]) -> list[bytes]:
    """The words that arrive."""
    program = folder / "tell it's.py"
    program.write_text(TELL, encoding="utf-8")
    call: list[str | bytes] = [str(TESTS / "run_remote.sh"), door, where, sys.executable, str(program), "--", *sent]
    subprocess.run(call, cwd=folder, check=True, timeout=60)
    _, *arrived = Path(f"{program}.told").read_bytes().split(b"\0")[:-1]
    return arrived[arrived.index(b"--") + 1 :]


@thousands
@given(sent=words)
@example(sent=SPECIAL)
def test_ssh(node: str, tmp_path: Path, sent: list[bytes]) -> None:
    assert told(tmp_path, "ssh", node, sent) == sent


@thousands
@given(sent=words)
@example(sent=SPECIAL)
def test_pdsh(node: str, tmp_path: Path, sent: list[bytes]) -> None:
    assert told(tmp_path, "pdsh", node, sent) == sent


@pytest.mark.parametrize("shell", SHELLS)
@settings(thousands, max_examples=4)
@given(sent=words)
@example(sent=SPECIAL)
def test_any_login_shell(tmp_path: Path, shell: str, sent: list[bytes]) -> None:
    assert told(tmp_path, "login", shell, sent) == sent


def test_a_script_and_its_environment(node: str, tmp_path: Path) -> None:
    some = random.Random(0)
    sent = [*SPECIAL, *(bytes(some.choices(range(1, 256), k=some.randrange(9))) for _ in range(400))]
    script = tmp_path / "tell.py"
    script.write_text(TELL.replace("sys.argv", 'sys.argv + [os.environ["SAID"]]'), encoding="utf-8")
    launcher = str(TESTS.parent / "scripts" / "ssh" / "launch_pdsh_multinode.sh")
    said = b"".join(sent)
    options: list[str | bytes] = ["--no-preflight", "--python", sys.executable, "--env", b"SAID=" + said]
    call = [launcher, *options, "--script", str(script), "-", "1", node, "--", *sent]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(f"{script}.told").read_bytes().split(b"\0")[1:-1] == [*sent, said]
