"""How long do many lines of output take: the kit's agent and launcher against plain torchrun?

Two ranks print 500,000 lines each, started alternately by torchrun, by the kit's agent alone and by
launch_singlenode.sh. Time is taken from the command to its end, with standard output read through a pipe.

    python benchmarks/output.py [--pairs 5] [--lines 500000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pairs import ratio_of

KIT = Path(__file__).resolve().parents[1]
RANKS = 2
SCRIPT = """
import sys
for step in range(int(sys.argv[1])):
    print(f"step {step} loss 2.7183")
"""


def commands(script: Path, lines: int) -> dict[str, list[str]]:
    """What is compared: name -> the arguments that start it."""
    torchrun = ["--standalone", "--nproc-per-node", str(RANKS), "--tee", "3", "--", str(script), str(lines)]
    launcher = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *torchrun],
        "agent": [sys.executable, str(KIT / "scripts/lib/agent.py"), *torchrun],
        "launcher": [*launcher, "--script", str(script), "-", str(RANKS), "--", str(lines)],
    }


def seconds(command: list[str], folder: Path) -> tuple[float, int]:
    """How long the command takes, and how many lines it prints."""
    started_at = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        printed = sum(block.count(b"\n") for block in iter(lambda: process.stdout.read(1 << 16), b""))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - started_at, printed


def main() -> int:
    """Print for each side the ratio to torchrun, pair by pair."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--lines", type=int, default=500_000)
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lines.py").write_text(SCRIPT)
        sides = commands(folder / "lines.py", given.lines)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(given.pairs):
            for side, command in sides.items():
                time_taken, printed = seconds(command, folder)
                shown = given.lines * (1 if side == "launcher" else RANKS)  # its console shows rank 0 alone
                if printed < shown and side != "torchrun":  # which loses some up to PyTorch 2.14
                    raise SystemExit(f"{side}: {printed} lines arrived, expected {shown}")
                taken[side].append(time_taken)
        for side in ("agent", "launcher"):
            print(f"{side:8}  {ratio_of(taken[side], taken['torchrun'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
