"""PyTorch's flight recorder shows which rank has not called a collective.

The records are those of gloo, which PyTorch also records. With NCCL, a thread of PyTorch writes the record when another
process writes to a pipe; in these tests, a thread of the script does so.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from distributed.host import collectives
from distributed.host.collectives import Collectives, Mismatch, find_mismatch, query, read, variables
from distributed.trust import checked

RECORDS = """
import os, pickle, torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

def record():
    while not pickle.loads(_dump_fr_trace(True, False, False))["entries"][0]["retired"]:  # by a thread of gloo
        pass
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
        file.write(_dump_fr_trace(True, True, False))

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
record()
os._exit(0)
"""


def of_torch(tmp_path: Path) -> dict[int, tuple[Collectives, ...]]:
    (tmp_path / "script.py").write_text(RECORDS)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2"}
    env |= {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/collectives_", "TORCHELASTIC_USE_AGENT_STORE": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120, capture_output=True)
    return {rank: read(f"{tmp_path}/collectives_{rank}") for rank in range(2)}


def test_a_record_of_pytorch_names_the_rank_that_has_not_called_a_collective(tmp_path: Path) -> None:
    records = of_torch(tmp_path)
    assert records[0] == (Collectives("default_pg", 2, pending=2, name="all_reduce"),)
    assert records[1] == (Collectives("default_pg", 1),)
    text = "rank 1 has not called all_reduce, collective 2 of the group default_pg; rank 0 waits in it"
    assert find_mismatch(records) == Mismatch(text, (1,))


DP, TP = "data", "tensor"


@pytest.mark.parametrize(
    ("records", "text", "missing"),
    [
        ([], "", ()),
        ([[Collectives(DP, 5)], [Collectives(DP, 4)]], "", ()),  # nothing is pending
        ([[Collectives(DP, 5, 5, "all_reduce")], [Collectives(DP, 5, 5, "all_reduce")]], "", ()),  # all wait
        (
            [[Collectives(DP, 7, 5, "all_reduce")], [Collectives(DP, 4)], [Collectives(DP, 5, 5, "all_reduce")],
             [Collectives(DP, 4)]],
            "ranks 1, 3 have not called all_reduce, collective 5 of the group data; ranks 0, 2 wait in it", (1, 3),
        ),
        (
            [[Collectives(DP, 5, 5, "all_reduce")], [Collectives(DP, 5, 5, "broadcast")]],
            "ranks have called different operations as collective 5 of the group data: all_reduce (rank 0), "
            "broadcast (rank 1)", (),
        ),
        # Rank 1 has not called a collective of one group, because it waits for rank 2 in the other one.
        (
            [[Collectives(DP, 5, 5, "all_reduce")], [Collectives(DP, 4), Collectives(TP, 9, 9, "all_gather")],
             [Collectives(TP, 8)]],
            "rank 2 has not called all_gather, collective 9 of the group tensor; rank 1 waits in it", (2,),
        ),
        (
            [[Collectives(DP, 5, 5, "all_reduce")]] * 6 + [[Collectives(DP, 1)]],
            "rank 6 has not called all_reduce, collective 5 of the group data; ranks 0, 1, 2, 3, ... wait in it", (6,),
        ),
    ],
)  # fmt: skip
def test_the_rank_that_others_wait_for_is_named(
    records: list[list[Collectives]], text: str, missing: tuple[int, ...]
) -> None:
    assert find_mismatch(dict(enumerate(records))) == (Mismatch(text, missing) if text else None)


def dumped(value: object) -> bytes:
    """A pickle without references, as PyTorch's own pickler writes it except for texts."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()


def doubled(value: Any, times: int = 60) -> Any:
    """A value that is small in memory and in a pickle, and whose text or hash takes for ever."""
    for _ in range(times):
        value = type(value)((value, value))
    return value


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


ENTRY = {"is_p2p": False, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "retired": False,
         "state": "started", "profiling_name": "nccl:barrier"}  # fmt: skip
RECORD: dict[str, Any] = {"pg_config": {}, "entries": []}


@pytest.mark.parametrize(
    "content",
    [b"", b"rubbish", pickle.dumps(Evil()), pickle.dumps(RECORD | {"entries": Evil()}),
     dumped(RECORD | {"entries": [1]}), dumped([]),
     *(dumped(RECORD | {"entries": [ENTRY | {"collective_seq_id": number}]}) for number in ("x", "7", 1.5, -1, 2**63)),
     *(pickle.dumps(RECORD | {"entries": [{**ENTRY, "process_group": ["0", ""], key: doubled([])}]}, protocol)
       for protocol in (2, 4) for key in ("profiling_name", "collective_seq_id", "process_group")),
     b"\x80\x02})" + b"q\0h\0\x86" * 60 + b"K\0s.",  # a key of nested tuples: its hash takes for ever
     b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\0s.",  # its hash overflows the stack
     b"\x80\x02}(" + b"X\1\0\0\0a" * 2 + b"\x86" * 1_000_000 + b"K\0s.",
     dumped(RECORD | {"entries": [ENTRY | {"process_group": ["0", ["x"]]}]}),
     b"\x80\x02]r\xff\xff\xff\x7f.",  # an array of 2 ** 31 references
     b"x" * (collectives.MAX_BYTES + 1)],
)  # fmt: skip
def test_an_invalid_record_is_refused_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "collectives_0").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a record|more than"):
        read(str(tmp_path / "collectives_0"))
    assert not (tmp_path / "ran").exists()


def test_the_time_for_many_groups_of_many_ranks_is_bounded() -> None:
    records = {rank: [Collectives(f"{rank} {n}", 2, 1, "barrier") for n in range(50_000)] for rank in range(20)}
    started = process_time()
    assert find_mismatch(records) is None
    assert process_time() - started < 5


def test_numbers_in_a_reply_that_cannot_be_are_refused() -> None:
    for called, pending in ((-1, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match="expected 0 <= pending <= called"):
            checked(Collectives, {"group": "g", "called": called, "pending": pending})


def test_text_in_a_record_is_bounded_and_printable(tmp_path: Path) -> None:
    entries = [ENTRY | {"process_group": (f"{n}\x1b[31m", "x" * 1000 if n else "undefined")} for n in range(200)]
    (tmp_path / "collectives_0").write_bytes(dumped(RECORD | {"entries": entries}))
    found = read(str(tmp_path / "collectives_0"))
    assert len(found) <= collectives.MAX_GROUPS and "\x1b" not in found[0].group and len(found[1].group) <= 100


def test_a_group_in_which_a_rank_has_called_nothing_is_known(tmp_path: Path) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}, "7": {"name": "7", "desc": "undefined"}}
    (tmp_path / "collectives_0").write_bytes(dumped({"pg_config": config, "entries": [ENTRY]}))
    (tmp_path / "collectives_1").write_bytes(dumped({"pg_config": config, "entries": []}))
    records = {rank: read(str(tmp_path / f"collectives_{rank}")) for rank in range(2)}
    assert records[1] == (Collectives("default_pg", 0), Collectives("7", 0))
    text = "rank 1 has not called barrier, collective 1 of the group default_pg; rank 0 waits in it"
    assert find_mismatch(records) == Mismatch(text, (1,))


def test_a_rank_writes_its_record_on_request(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/collectives_"
    os.mkfifo(f"{prefix}3.pipe")
    reader = os.open(f"{prefix}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "collectives_3").write_bytes(dumped(RECORD))

    def answer() -> None:
        while True:
            try:
                if os.read(reader, 128):
                    break
            except BlockingIOError:
                pass
            time.sleep(0.01)
        (tmp_path / "collectives_3").write_bytes(b"incomplete")
        (tmp_path / "collectives_3").write_bytes(dumped(RECORD | {"entries": [ENTRY]}))

    thread = threading.Thread(target=answer)
    thread.start()
    assert query(str(tmp_path), 3) == (Collectives("default_pg", 1, 1, "barrier"),)
    thread.join()
    os.close(reader)


def test_a_rank_without_a_pipe_or_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "collectives_1.pipe").write_text("kept")
    os.symlink("collectives_1.pipe", tmp_path / "collectives_2.pipe")
    os.mkfifo(tmp_path / "collectives_3.pipe")
    start = time.monotonic()
    assert [query(str(tmp_path), rank) for rank in range(4)] == [()] * 4
    assert time.monotonic() - start < collectives.DUMP_TIMEOUT
    assert (tmp_path / "collectives_1.pipe").read_text() == "kept"


def test_the_variables_of_the_user_stay(tmp_path: Path) -> None:
    run, directory = str(tmp_path), tmp_path / "ranks/n1"
    prefix, pipe = os.fsencode(directory / "collectives_"), b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    both = {b"TORCH_FR_DUMP_TEMP_FILE": prefix, pipe: prefix}
    assert variables(run, "n1", {}) == both
    assert variables(run, "n1", dict.fromkeys(both, b"mine")) == {}
    assert variables(run, "n1", {b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": b"x"}) == {pipe: prefix}
    assert directory.stat().st_mode & 0o777 == 0o700 and os.listdir(directory) == []
    (directory / "collectives_pipe").touch()
    assert variables(run, "n1", {}).keys() == {b"TORCH_FR_DUMP_TEMP_FILE"}  # no pipe can be made there
