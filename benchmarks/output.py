"""Time for many lines of output: Muster's agent and launcher against torchrun.

Two ranks print 500,000 lines each, started alternately by torchrun, by Muster's agent alone and by
launch_singlenode.sh. The duration of the command is measured, with standard output read through a pipe.

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
    """Returns name -> command line."""
    torchrun = ["--standalone", "--nproc-per-node", str(RANKS), "--tee", "3", "--", str(script), str(lines)]
    launcher = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--quiet", "--python", sys.executable]
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", *torchrun],
        "agent": [sys.executable, str(KIT / "scripts/lib/agent.py"), *torchrun],
        "launcher": [*launcher, "--script", str(script), "-", str(RANKS), "--", str(lines)],
    }


def measure(command: list[str], directory: Path) -> tuple[float, int]:
    """Run the command. Returns its duration in seconds and the number of lines printed."""
    started_at = time.perf_counter()
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        printed = sum(block.count(b"\n") for block in iter(lambda: process.stdout.read(1 << 16), b""))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - started_at, printed


def main() -> int:
    """Print the times of the agent and of the launcher, and their ratios to the times of torchrun."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--lines", type=int, default=500_000)
    arguments = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "lines.py").write_text(SCRIPT)
        sides = commands(directory / "lines.py", arguments.lines)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(arguments.pairs):
            for side, command in sides.items():
                duration, printed = measure(command, directory)
                expected = arguments.lines * (1 if side == "launcher" else RANKS)  # its console shows only rank 0
                if printed < expected and side != "torchrun":  # torchrun of PyTorch 2.14 and earlier loses lines
                    raise SystemExit(f"{side}: {printed} lines arrived, expected {expected}")
                seconds[side].append(duration)
        for side in ("agent", "launcher"):
            print(f"{side:8}  {ratio_of(seconds[side], seconds['torchrun'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
