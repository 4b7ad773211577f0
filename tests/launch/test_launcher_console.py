"""The launcher's own lines are coloured in a terminal; the output of ranks and all other lines are not."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).resolve().parents[2]
SHOW = """
import os
from distributed.launch.launcher_console import LauncherConsole
console = LauncherConsole("run.sh", False)
for outcome in ("ok", "failed", "stopped"):
    console.show_lines(f"verdict: {outcome}: why\\n  details\\n")
console.print("warning: node1: \\x1b[31mdisk\\x1b[0m full")
console.show_lines("preflight: warning: versions differ\\n")
console.print("run started")
console.show(b"verdict: ok: printed by a rank\\n", 2)
"""
WARN = 'PROGRAM=x; source scripts/lib/common.bash; PROGRAM=run.sh; warn "careful"'


def in_terminal(command: list[str], **environment: str) -> str:
    """What a command prints on standard error, which is a terminal."""
    main, terminal = pty.openpty()
    variables = {"PATH": os.environ["PATH"], "TERM": "xterm"} | environment
    done = subprocess.run(command, cwd=KIT, env=variables, stderr=terminal, stdout=subprocess.PIPE, check=True)
    os.close(terminal)
    text = b""
    try:
        while block := os.read(main, 4096):
            text += block
    except OSError:  # the terminal has no other end any more
        pass
    os.close(main)
    assert done.stdout == b""
    return text.decode().replace("\r\n", "\n")


def test_the_verdict_and_warnings_have_colours_in_a_terminal() -> None:
    assert in_terminal([sys.executable, "-c", SHOW]).splitlines() == [
        "\x1b[32mverdict: ok: why\x1b[0m",
        "  details",
        "\x1b[1;31mverdict: failed: why\x1b[0m",
        "  details",
        "\x1b[33mverdict: stopped: why\x1b[0m",
        "  details",
        "\x1b[33mrun.sh: warning: node1: disk full\x1b[0m",
        "\x1b[33mpreflight: warning: versions differ\x1b[0m",
        "run.sh: run started",
        "verdict: ok: printed by a rank",
    ]
    assert in_terminal(["bash", "-c", WARN]) == "\x1b[33mrun.sh: warning: careful\x1b[0m\n"


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_nothing_has_colours_if_the_user_or_the_terminal_does_not_want_them(environment: dict[str, str]) -> None:
    assert "\x1b" not in in_terminal([sys.executable, "-c", SHOW], **environment)
    assert "\x1b" not in in_terminal(["bash", "-c", WARN], **environment)


def test_a_pipe_gets_no_colours() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], cwd=KIT, capture_output=True, text=True, check=True)
    assert "verdict: failed: why" in done.stderr and "\x1b" not in done.stderr
