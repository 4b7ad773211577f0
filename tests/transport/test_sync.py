"""--sync: the directories that are copied. sync.bats copies them to nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.files import KIT
from distributed.transport.commands import SshCommands


@pytest.mark.parametrize("cwd", [KIT, f"{KIT}/config", str(Path(KIT).parent), "/tmp"])
def test_the_working_directory_and_muster_are_copied_also_if_one_contains_the_other(cwd: str) -> None:
    assert SshCommands(print, cwd).synced == ([cwd, KIT] if cwd != KIT else [KIT])
