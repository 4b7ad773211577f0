"""A diagnosis states whether a run looks hung, which rank the others wait for, and the evidence.

A long step, an evaluation or a checkpoint has no output either, and ranks that hang in NCCL show busy GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed.host.collectives import Collectives
from distributed.host.stacks import Frame
from distributed.verdict.hang_analysis import Activity, diagnose, find_stall, needs_stacks
from distributed.verdict.user_code import launched_package

WORKS = Activity(rank=0, node="n1", pid=100, state="R", cpu=1.0, gpu=None)
SLEEPS = replace(WORKS, state="S", cpu=0.0)
STOPPED = replace(SLEEPS, state="T")
ON_GPU = replace(SLEEPS, gpu=97)
IDLE_GPU = replace(SLEEPS, gpu=0)
DISK = replace(SLEEPS, state="D")


def ranks(*activities: Activity) -> list[Activity]:
    """The activities, with ranks 0, 1, ... on nodes n1, n2, ..."""
    return [
        replace(activity, rank=rank, node=f"n{rank + 1}", pid=100 + rank) for rank, activity in enumerate(activities)
    ]


@pytest.mark.parametrize(
    ("activities", "silent", "text"),
    [
        ([], 1e6, ""),
        ([WORKS, WORKS], 599.0, ""),
        ([WORKS, WORKS], 600.0, "no output for 600 s, but ranks are busy"),
        ([SLEEPS, SLEEPS], 59.0, ""),
        ([SLEEPS, SLEEPS], 60.0, "looks hung: no output for 60 s; no rank used CPU in 1.0 s"),
        ([IDLE_GPU, IDLE_GPU], 61.0, "looks hung: no output for 61 s; no rank used CPU or GPU in 1.0 s"),
        ([ON_GPU, ON_GPU], 300.0, ""),  # both wait for busy GPUs
        ([SLEEPS, DISK], 312.0, "no rank used CPU in 1.0 s; rank 1 on n2 is waiting for a disk or a network file s"),
        ([WORKS, STOPPED], 0.0, "looks hung: rank 1 on n2 is stopped (state T)"),
        ([STOPPED, STOPPED], 0.0, "looks hung: rank 0 on n1, rank 1 on n2 are stopped"),
        ([WORKS, WORKS, SLEEPS], 119.0, ""),
        ([WORKS, WORKS, SLEEPS], 120.0,
         "looks hung: no output for 120 s; rank 2 on n3 uses no CPU, and the 2 others are busy: it waits either "
         "for the others in a collective, or for something else"),
        ([WORKS, SLEEPS], 130.0, "rank 1 on n2 uses no CPU, and rank 0 on n1 is busy: it waits either for the other"),
        ([SLEEPS, WORKS, SLEEPS], 130.0,
         "the 2 others use no CPU, and rank 1 on n2 is busy: they wait either for that rank"),
        ([WORKS, WORKS, SLEEPS, SLEEPS], 130.0, ""),  # no single rank differs
        ([WORKS], 130.0, ""),
        ([SLEEPS], 130.0, "looks hung: no output for 130 s"),
        ([replace(WORKS, cpu=0.1), SLEEPS, SLEEPS], 130.0, ""),  # neither idle nor busy
    ],
)  # fmt: skip
def test_a_run_is_diagnosed_without_stacks(activities: list[Activity], silent: float, text: str) -> None:
    diagnosis = diagnose(ranks(*activities), 1.0, silent)
    assert text in diagnosis.text and bool(text) == bool(diagnosis.text)
    assert diagnosis.hung == diagnosis.text.startswith("looks hung")
    assert diagnosis.hung == (text != "" and "but ranks are busy" not in text)


def test_the_diagnosis_of_stopped_ranks_has_a_command_that_continues_them() -> None:
    assert diagnose(ranks(STOPPED, WORKS, STOPPED), 1.0, 0.0).remedy == "kill -CONT 100 102"


LIBRARY = "/venv/lib/python3.11/site-packages/"
LOOP = (Frame("/home/ada/hang.py", 12, "main"), Frame("/home/ada/hang.py", 20, "<module>"))
LOOP_OF_A_LIBRARY = (Frame("/usr/lib/python3.11/json/decoder.py", 3, "raw_decode"), *LOOP)
CALL = Frame("/home/ada/hang.py", 9, "<module>")
REDUCE = (
    Frame(f"{LIBRARY}torch/distributed/distributed_c10d.py", 3000, "all_reduce"),
    Frame(f"{LIBRARY}torch/distributed/c10d_logger.py", 83, "wrapper"),
    CALL,
)
BARRIER = (replace(REDUCE[0], line=5000, function="barrier"), replace(CALL, line=30))
DDP = (Frame(f"{LIBRARY}torch/nn/parallel/distributed.py", 900, "_sync_buffers"), CALL)
BACKWARD = (Frame(f"{LIBRARY}torch/autograd/graph.py", 800, "_engine_run_backward"), replace(CALL, line=40))
SAVE = (Frame(f"{LIBRARY}torch/distributed/checkpoint/filesystem.py", 7, "write"), replace(CALL, line=50))
WAITS, IN_DDP = replace(SLEEPS, frames=REDUCE), replace(SLEEPS, frames=DDP)
LOOPS, IDLES = replace(WORKS, frames=LOOP), replace(SLEEPS, frames=LOOP)
AT_BARRIER, ON_GPU_IN_LOOP = replace(SLEEPS, frames=BARRIER), replace(ON_GPU, frames=LOOP)
SLOW = replace(WORKS, cpu=0.3)
IN_BACKWARD, SAVES = replace(SLEEPS, frames=BACKWARD), replace(SLEEPS, frames=SAVE)


UNKNOWN_WAIT = (
    "the other in a collective, or for something else, such as a disk, a lock or a download; rank 0 on n1 at "
    "hang.py:12 in main(), rank 1 on n2 at hang.py:12 in main()"
)


@pytest.mark.parametrize(
    ("activities", "suspects", "permanent", "text"),
    [
        ([WAITS, LOOPS], [1], False, "2 is not in a collective, the other waits for it; it is at hang.py:12 in main()"),
        ([LOOPS, IN_DDP], [0], False, "1 is not in a collective, the other waits for it; it is at hang.py:12 in ma"),
        ([WAITS, replace(LOOPS, frames=LOOP_OF_A_LIBRARY)], [1], False, "it is at hang.py:12 in main()"),
        ([WAITS, LOOPS, WAITS], [1], False, "rank 1 on n2 is not in a collective, the others wait for it; it is at"),
        ([WAITS, IDLES], [1], True, "rank 1 on n2 is not in a collective"),
        ([IN_BACKWARD, LOOPS, WAITS], [1], False, "rank 1 on n2 is not in a collective, others wait for it"),
        ([IDLES, WAITS, LOOPS], [0, 2], False, "rank 2 on n3 are not in a collective, the other waits for them"),
        ([WAITS, SAVES], [1], True, "rank 1 on n2 is not in a collective, the other waits for it; it is at hang.py:50"),
        ([WAITS, DISK], [1], True, "rank 1 on n2 is not known to be in a collective (no stack), the other waits for i"),
        ([WAITS, DISK], [1], True, "rank 1 on n2 is waiting for a disk"),
        ([WAITS, ON_GPU_IN_LOOP], [1], False, "is using the GPU, in a computation or in a collective, the other waits"),
        ([WAITS, WAITS], [], True, "both ranks wait in the same collective, at hang.py:9: a connection is lost, or"),
        ([WAITS, AT_BARRIER], [], True, "not at the same line; rank 0 on n1 at hang.py:9, all_reduce(); rank 1 on"),
        ([WAITS, IN_BACKWARD], [], True, "not at the same line; rank 0 on n1 at hang.py:9, all_reduce(); rank 1 on"),
        ([WAITS], [], True, "rank 0 on n1 waits in a collective, at hang.py:9: a connection is lost"),
        ([IDLES, LOOPS], [], False, UNKNOWN_WAIT),
        ([LOOPS, LOOPS], [], False,
         "no rank is in a collective; rank 0 on n1 at hang.py:12 in main(), rank 1 on n2 at"),
        ([SLOW, SLEEPS], [], False, "which rank waits for which: rank 0 on n1 used 30% CPU, rank 1 on n2 used 0% CPU"),
        ([LOOPS], [0], False, "rank 0 on n1, the only rank, is busy; it is at hang.py:12 in main()"),
        ([IDLES], [0], True, "no rank used CPU in 1.0 s; rank 0 on n1 is at hang.py:12 in main()"),
        ([SLEEPS, SLEEPS], [], True, "no rank used CPU in 1.0 s"),
        ([WAITS, replace(STOPPED, frames=LOOP)], [1], False, "rank 1 on n2 is stopped (state T)"),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_named(
    activities: list[Activity], suspects: list[int], permanent: bool, text: str
) -> None:
    stall = find_stall(ranks(*activities), 1.0)
    assert text in stall.text
    assert ([activity.rank for activity in stall.suspects], stall.permanent) == (suspects, permanent)


def test_the_others_wait_for_a_rank_that_has_exited() -> None:
    stall = find_stall(ranks(WAITS, WAITS), 1.0, ["rank 2 on n3"])
    assert stall.text.startswith(
        "rank 2 on n3 ended with exit code 0 while the others wait in a collective; rank 0 on n1 at hang.py:9"
    )
    assert find_stall(ranks(WAITS), 1.0, ["rank 1 on n2"]).text == (
        "rank 1 on n2 ended with exit code 0 while rank 0 on n1 waits in a collective at hang.py:9"
    )
    assert find_stall(ranks(SLEEPS), 1.0, ["rank 2 on n3"]).text.endswith("; rank 2 on n3 ended with exit code 0")


ITEM = (Frame("/home/ada/train.py", 9, "step", "total += loss.item()"), Frame("/home/ada/train.py", 20, "<module>"))
LOADS = (Frame("/home/ada/train.py", 5, "load", "record = file.read()"), *ITEM[1:])
SYNC = (Frame(f"{LIBRARY}torch/cuda/__init__.py", 1085, "synchronize", "return torch._C._cuda_synchronize()"), *ITEM)
GPU_WAITS, GPU_LOADS = replace(ON_GPU, frames=ITEM), replace(IDLE_GPU, frames=LOADS)
UNKNOWN = replace(SLEEPS, gpu_unknown=True)
CALLS_BACKWARD = (Frame(f"{LIBRARY}torch/autograd/graph.py", 825, "_engine_run_backward"), *ITEM)
LAUNCHES = (Frame(f"{LIBRARY}torch/nn/modules/linear.py", 125, "forward", "return F.linear(input, weight)"), *ITEM)


@pytest.mark.parametrize(
    ("function", "code", "gpu", "cpu", "waits"),
    [
        ("step", "total += loss.item()", 100, 1.0, True),
        ("step", "losses.append(loss.detach().cpu())", 100, 0.0, True),
        ("step", "return logits.tolist()", 100, 0.0, True),
        ("step", "ids = best.cpu().numpy()", 100, 0.0, True),
        ("step", "torch.cuda.synchronize()", 100, 0.0, True),
        ("step", "event.synchronize()", 100, 0.0, True),
        ("step", "inputs = batch.to(device)", 100, 0.0, True),
        ("step", "if float(norm) > 1:", 100, 0.0, True),
        ("step", "total += loss.item()", None, 0.0, True),  # a container in which the GPU of a rank is unknown
        ("step", "total += loss.item()", None, 1.0, False),
        ("step", "total += loss.item()", 0, 1.0, False),  # a loop on the CPU: an idle GPU is not waited for
        ("step", "count = int(connection.recv(4))", None, 0.0, False),
        ("step", "loss.backward()", 100, 1.0, False),
        ("step", "", 100, 1.0, False),
        ("synchronize", "", 100, 0.0, False),  # a function of the user, whose source is unknown
    ],
)
def test_a_rank_that_needs_a_result_of_its_gpu_waits_for_it(
    function: str, code: str, gpu: int | None, cpu: float, waits: bool
) -> None:
    frames = (Frame("/home/ada/train.py", 9, function, code), *ITEM)
    assert replace(SLEEPS, gpu=gpu, cpu=cpu, frames=frames).waits_for_gpu == waits


def test_a_function_of_torch_that_synchronizes_is_known_without_its_source() -> None:
    assert replace(ON_GPU, frames=(replace(SYNC[0], code=""), *ITEM)).waits_for_gpu
    assert replace(ON_GPU, frames=SYNC).waits_for_gpu


@pytest.mark.parametrize(
    ("activities", "suspects", "permanent", "hung", "text"),
    [
        ([GPU_WAITS, GPU_LOADS, GPU_WAITS], [1], True, True,
         "rank 1 on n2 is not in a collective and uses no GPU, others wait for their GPUs, which may be "
         "computing, or waiting in a collective for that rank; it is at train.py:5 in load()"),
        ([GPU_WAITS, replace(GPU_LOADS, cpu=1.0)], [1], False, True, "rank 1 on n2 is not in a collective and uses no"),
        # The other rank is in the backward pass, or starts kernels, and its GPU's queue is full.
        ([replace(ON_GPU, cpu=1.0, frames=CALLS_BACKWARD), GPU_LOADS], [1], True, True, "rank 1 on n2 is not in a c"),
        ([replace(ON_GPU, cpu=1.0, frames=LAUNCHES), GPU_LOADS], [1], True, True, "rank 1 on n2 is not in a co"),
        ([replace(ON_GPU, cpu=1.0, frames=LAUNCHES)] * 2, [], False, False, "all ranks use their GPUs or wait for"),
        # In a container, or under MIG, the use of a GPU is not known: a rank that spins is no suspect.
        ([replace(UNKNOWN, cpu=1.0, frames=ITEM), replace(UNKNOWN, frames=LOADS)], [1], False, True,
         "rank 1 on n2 is not in a collective, others wait for their GPUs"),
        ([replace(UNKNOWN, cpu=1.0, frames=ITEM), replace(UNKNOWN, cpu=1.0, frames=LAUNCHES)], [], False, False,
         "no rank is in a collective"),
        ([replace(UNKNOWN, frames=LOADS)] * 2, [], False, True, "no rank used CPU in 1.0 s"),
        ([GPU_LOADS, replace(ON_GPU, frames=SYNC), GPU_LOADS], [0, 2], True, True,
         "rank 0 on n1, rank 2 on n3 are not in a collective and use no GPU, others wait"),
        # No rank is suspected, because a hang cannot be distinguished from a long computation.
        ([GPU_WAITS, GPU_WAITS], [], False, False, "all ranks use their GPUs or wait for them; the GPUs may be in a"),
        ([GPU_WAITS, ON_GPU_IN_LOOP], [], False, False, "all ranks use their GPUs or wait for them; the GPUs may be"),
        ([replace(WAITS, gpu=100), GPU_WAITS, GPU_LOADS], [2], True, True,
         "rank 2 on n3 is not in a collective, the others wait for it; it is at train.py:5 in load()"),
        ([replace(WAITS, gpu=100), GPU_WAITS], [], False, True,
         "all ranks wait: some in a collective, others for their"),
    ],
)  # fmt: skip
def test_under_nccl_a_rank_that_waits_for_its_gpu_is_not_suspected(
    activities: list[Activity], suspects: list[int], permanent: bool, hung: bool, text: str
) -> None:
    """GPUs are stubs here: only their use is given. Stacks are as faulthandler and py-spy show them."""
    stall = find_stall(ranks(*activities), 1.0)
    assert stall.text.startswith(text)
    assert ([activity.rank for activity in stall.suspects], stall.permanent) == (suspects, permanent)
    assert diagnose(ranks(*activities), 1.0, 130.0).hung == hung


def test_ranks_that_only_wait_for_gpus_look_hung_after_ten_minutes() -> None:
    assert diagnose(ranks(GPU_WAITS, GPU_WAITS), 1.0, 600.0).text.startswith(
        "looks hung: no output for 600 s; all ranks use their GPUs or wait for them; the GPUs may be in a computation"
    )


@pytest.mark.parametrize(("activity", "permanent"), [(GPU_LOADS, True), (replace(GPU_LOADS, cpu=1.0), False)])
def test_the_flight_recorder_of_pytorch_names_the_rank_that_others_wait_for(
    activity: Activity, permanent: bool
) -> None:
    waits = replace(GPU_WAITS, collectives=(Collectives("default_pg", 8, 7, "all_reduce"),))
    stall = find_stall(ranks(waits, replace(activity, collectives=(Collectives("default_pg", 6),)), waits), 1.0)
    assert stall.text == (
        "rank 1 has not called all_reduce, collective 7 of the group default_pg; ranks 0, 2 wait in it "
        "(PyTorch's flight recorder); it is at train.py:5 in load()"
    )
    assert ([rank.rank for rank in stall.suspects], stall.permanent, stall.timeout) == ([1], permanent, 120.0)


def test_under_nccl_ranks_that_wait_after_another_has_exited_look_hung() -> None:
    diagnosis = diagnose(ranks(GPU_WAITS, GPU_WAITS), 1.0, 130.0, ["rank 2 on n3"])
    assert diagnosis.text.startswith(
        "looks hung: no output for 130 s; rank 2 on n3 ended with exit code 0; all ranks use their GPUs or wait for"
    )


def test_idle_ranks_at_a_line_that_waits_for_the_gpu_look_hung_like_any_idle_ranks() -> None:
    idle = replace(SLEEPS, frames=ITEM)
    assert find_stall(ranks(idle, idle), 1.0).text.startswith("no rank used CPU in 1.0 s; rank 0 on n1 at train.py:9")


TRAINER = "/venv/lib/python3.11/site-packages/trainer/"


@pytest.mark.parametrize(
    ("run_json", "line"),
    [
        ({"script": "trainer"}, "cli.py:7 in main()"),
        ({"script": "trainer.cli"}, "cli.py:7 in main()"),
        ({"script": f"{TRAINER}cli.py"}, "cli.py:7 in main()"),
        ({"script": "../trainer/cli.py", "cwd": f"{LIBRARY}other"}, "cli.py:7 in main()"),
        ({"script": "/venv/bin/trainer"}, "cli.py:7 in main()"),
        ({"script": "train.py"}, "distributed_c10d.py:3000 in all_reduce()"),
        ({}, "distributed_c10d.py:3000 in all_reduce()"),
    ],
)
def test_what_was_launched_is_the_users_code_wherever_it_is_installed(run_json: dict[str, str], line: str) -> None:
    frames = (*REDUCE[:2], Frame(f"{TRAINER}cli.py", 7, "main"), Frame("<frozen runpy>", 88, "_run_code"))
    waits = replace(SLEEPS, frames=frames, launched=launched_package(run_json))
    at_barrier = replace(waits, frames=(BARRIER[0], replace(frames[2], line=9)))
    library = "" if line.startswith("distributed") else ", all_reduce()"
    assert f"rank 0 on n1 at {line}{library}; rank 1 on n2" in find_stall(ranks(waits, at_barrier), 1.0).text


def test_stacks_do_not_change_the_time_after_which_a_run_looks_hung() -> None:
    activities = ranks(WAITS, LOOPS)
    assert not diagnose(activities, 1.0, 119.0).hung
    assert diagnose(activities, 1.0, 130.0).text.startswith(
        "looks hung: no output for 130 s; rank 1 on n2 is not in a coll"
    )


@pytest.mark.parametrize(
    ("activities", "silent", "needed"),
    [
        ([SLEEPS, SLEEPS], 60.0, True),
        ([SLEEPS, SLEEPS], 59.0, False),
        ([WORKS, SLEEPS], 119.0, False),
        ([WORKS, SLEEPS], 120.0, True),
        ([WORKS], 1.0, False),
    ],
)
def test_stacks_are_needed_after_a_time_without_output(activities: list[Activity], silent: float, needed: bool) -> None:
    assert needs_stacks(ranks(*activities), silent) == needed
