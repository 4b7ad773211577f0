"""Which variables of the launcher's environment the nodes get."""

from __future__ import annotations

import pytest

from distributed.launch.forwarding import ForwardingError, forwarded


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS"),
        ("APP_*, FLAG", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS APP_A APP_B FLAG"),
        ("-CUDA_HOME,-HF_*", "NCCL_DEBUG OMP_NUM_THREADS"),
        ("-*", ""),
        ("-* NCCL_DEBUG", "NCCL_DEBUG"),
        ("APP_* -APP_B", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS APP_A"),
        ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS CUDA_VISIBLE_DEVICES"),
        ("R* W* M* T*", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS"),
        ("-missing missing", "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS"),
    ],
)
def test_the_last_entry_that_matches_a_variable_decides_whether_it_is_forwarded(setting: str, names: str) -> None:
    exported = (
        "NCCL_DEBUG CUDA_HOME HF_HOME OMP_NUM_THREADS APP_A APP_B FLAG CUDA_VISIBLE_DEVICES RANK WORLD_SIZE "
        "MASTER_PORT MUSTER_NODE TORCHELASTIC_RUN_ID PET_NNODES PATH BASH_FUNC_APP_f%% OMP_BAD%%"
    )
    environment = {name: f"of {name}" for name in exported.split()}
    found = forwarded(environment | {"MUSTER_FORWARD": setting})
    assert sorted(found) == sorted(names.split())
    assert all(found[name] == f"of {name}" for name in found)


@pytest.mark.parametrize("entry", ["*", "A=B", "-", "A**", "*A", "--A", "Ä", "RANK", "MASTER_PORT", "PET_*"])
def test_a_wrong_entry_of_muster_forward_is_refused(entry: str) -> None:
    with pytest.raises(ForwardingError, match=r"^MUSTER_FORWARD"):
        forwarded({"MUSTER_FORWARD": f"GOOD {entry}"})
