"""No other program can write to the rendezvous of a run on one machine, whose state torchrun's code unpickles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "scripts/ssh/launch_singlenode.sh"
# Writes the keys of each store on which its agent listens.
SCRIPT = r"""
import os, re
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore

keys = Path(f"keys {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
agent = Path("/proc", str(os.getppid()))
sockets = {os.readlink(file) for file in (agent / "fd").iterdir() if file.exists() or file.is_symlink()}
found = []
for table in ("tcp", "tcp6"):
    for line in (agent / "net" / table).read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            store = TCPStore("127.0.0.1", int(local.split(":")[1], 16), None, False, timedelta(seconds=20), False)
            found.append(repr(store.list_keys()))
keys.write_text("\n".join(found))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("agent", ["fast", "torchrun"])
def test_the_state_of_the_rendezvous_is_in_no_store(tmp_path: Path, agent: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    call = [str(LAUNCH), "--agent", agent, "--max-restarts", "1", "--script", "script.py", "-", "2"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    stores = [path.read_text() for path in sorted(tmp_path.glob("keys *"))]
    assert len(stores) == 4 and all(stores)
    assert not [keys for keys in stores if "rendezvous" in keys]
