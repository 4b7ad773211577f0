"""muster run has an answer for each option of the installed torchrun: it takes the option, or says what to write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

KIT = Path(__file__).resolve().parents[1]
OF_MODULE = {"-h", "--help", "-m", "--module"}
OPTIONS = sorted({name for action in get_args_parser()._actions for name in action.option_strings} - OF_MODULE)
VALUES = {  # of options that take only certain values
    "--nnodes": "1", "--nproc-per-node": "1", "--nproc_per_node": "1", "--node-rank": "0", "--node_rank": "0",
    "--max-restarts": "0", "--max_restarts": "0", "--master-port": "29431", "--master_port": "29431",
    "--master-addr": "localhost", "--master_addr": "localhost",
}  # fmt: skip
FLAGS = {"--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--virtual-local-rank"}
FLAGS |= {"--virtual_local_rank"}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_torchrun_is_taken_or_refused_with_a_remedy(option: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    value = [] if option in FLAGS else [VALUES.get(option, "x")]
    call = [str(KIT / "scripts/muster"), "run", "--dry-run", "-n", "1", option, *value, "script.py", "--y"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert done.returncode == 2, done.stderr
        assert "unknown option" not in done.stderr
        assert "leave it out" in done.stderr
    else:
        assert "script.py --y" in done.stdout + done.stderr
