"""scripts/lib/module.py ends with the exit code of the module, whatever happens to its standard streams."""

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = f"'{sys.executable}' -I -S '{Path(__file__).parents[1]}/scripts/lib/module.py'"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("launch.supervisor --help >/dev/null", 0),
        ("launch.supervisor", 2),
        ("launch.supervisor 2>&-", 2),
        ("health.doctor --wrong 2>&-", 2),
        ("host.processes cpu >&-", 0),
        ("host.processes cpu >/dev/full", 1),
        ("host.processes cpu | true", 0),
        ("runs.status --program=p --log-dir=logs --json nix >&- 2>&-", 2),
    ],
)
def test_the_exit_code_is_that_of_the_module(call: str, code: int) -> None:
    result = subprocess.run(["bash", "-o", "pipefail", "-c", f"{MODULE} {call}"], capture_output=True, check=False)
    assert result.returncode == code, result.stderr


def test_an_exception_prints_its_traceback() -> None:
    result = subprocess.run(["bash", "-c", f"{MODULE} no.module"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'distributed.no'\n")
