"""A run whose log disk is full at a restart waits for space, and continues."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

KIT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    number = 0
    try:
        while True:
            open(f"logs/filler.{number}", "w").close()
            number += 1
    except OSError:
        sys.exit(1)
print("trained")
"""


def test_a_restart_waits_for_space_for_its_directory(tmp_path: Path, mount: Callable[[Path, str], None]) -> None:
    logs = tmp_path / "logs"
    mount(logs, "16m,nr_inodes=300,mode=700")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "c.yaml").write_text("")
    launcher = str(KIT / "scripts/ssh/launch_singlenode.sh")
    call = [launcher, "--max-restarts", "1", "--script", "script.py", "c.yaml", "1"]
    with subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout
        output = ""
        for line in run.stdout:
            output += line
            if "waiting for space" in line:
                for filler in logs.glob("filler.*"):
                    filler.unlink()
    assert output.count("No space left on device: waiting for space for the files of the next attempt") == 1, output
    assert "trained" in output and run.returncode == 0, output
    assert sorted(os.listdir(next(logs.glob("script-*/attempts")))) == ["1", "2"]
