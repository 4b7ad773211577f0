"""Agents of one run join, exchange heartbeats, learn how the run ended, and exchange failure records.

Here the agents are threads of one process with a real TCPStore. tests/launch_torchrun_multinode.bats tests real agents
on several nodes.
"""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import Store, TCPStore

from distributed.agent import agent, failure_records, membership
from distributed.agent.agent import Agent
from distributed.agent.failure_records import Records
from distributed.agent.membership import (
    Membership,
    PublishedRun,
    Ranks,
    RendezvousFailed,
    RunEnd,
    membership_store,
)
from distributed.agent.options import Options
from distributed.agent.rendezvous import Rendezvous
from distributed.agent.worker import Script
from distributed.exit_codes import UNFIT
from distributed.host.clock import RunningClock
from distributed.records import most_bytes
from distributed.trust import head_and_tail

Join = Callable[..., Membership]
TIMEOUT = 20.0  # seconds to wait for an event that should happen at once


@pytest.fixture
def store() -> TCPStore:
    return new_store()


@pytest.fixture
def join(store: TCPStore) -> Iterator[Join]:
    """A function with which a node joins a run of 3 nodes."""
    joined = []

    def join(rank: int, size: int = 3, names: Sequence[str] = (), run: str = "", **facts: str) -> Membership:
        facts = {"node": f"node{rank + 1}", "PyTorch": "2.13.0", "NNODES": str(size), **facts}
        run = run or ("healthy" if rank == 0 else "")
        joined.append(Membership(rank, size, facts, "node1:29500", lambda: store, run, names))
        return joined[-1]

    yield join
    for one in joined:
        one.close()


def new_store(port: int = 0) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def run_concurrently(*calls: Callable[[], object]) -> list[Future[object]]:
    """Call all functions in separate threads and wait for them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def ignore(_: str) -> None:
    pass


def joined_members(join: Join, size: int = 3) -> list[Membership]:
    members = [join(rank, size) for rank in range(size)]
    for future in run_concurrently(*(lambda one=one: one.wait_for_all(TIMEOUT, ignore) for one in members)):
        future.result()
    return members


def becomes_true(condition: Callable[[], object]) -> bool:
    """Whether the condition becomes true within TIMEOUT."""
    tick = threading.Event()
    return any(condition() or tick.wait(0.01) for _ in range(int(TIMEOUT * 100)))


def run_succeeds(members: Sequence[Membership]) -> bool:
    """Whether all nodes can finish the run successfully."""
    return [future.result() for future in run_concurrently(*(one.finish for one in members))] == [None] * len(members)


def refusal_of(member: Membership) -> str:
    """Why this node was refused."""
    with pytest.raises(RendezvousFailed) as failure:
        member.wait_for_all(TIMEOUT, ignore)
    assert failure.value.exit_code == 69
    return str(failure.value)


# ---------------------------------------------------------------- joining


def test_ranks_are_numbered_in_the_order_of_node_ranks(join: Join) -> None:
    members = [join(rank, ranks=str(number)) for rank, number in ((2, 3), (0, 2), (1, 1))]
    run_concurrently(*(lambda one=one: one.wait_for_all(TIMEOUT, ignore) for one in members))
    assert [one.ranks for one in members] == [Ranks(3, 6), Ranks(0, 6), Ranks(2, 6)]


def test_all_nodes_join_and_know_each_others_names(join: Join) -> None:
    for one in joined_members(join):
        assert {rank: facts["node"] for rank, facts in one.members.items()} == {0: "node1", 1: "node2", 2: "node3"}


def test_a_node_reports_which_nodes_are_missing_and_gives_up(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "REPORT_INTERVAL", 0.1)
    lines: list[str] = []
    first = join(0, names=["ada", "bob", "eve"])
    join(2)
    with pytest.raises(RendezvousFailed, match="waiting for bob; gave up after 1 s") as failure:
        first.wait_for_all(1.0, lines.append)
    assert failure.value.exit_code == 124
    assert lines[-1].startswith("2 of 3 nodes joined, waiting for bob, ")


def test_all_nodes_report_missing_nodes_but_with_a_launcher_only_the_first_one_does(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "REPORT_INTERVAL", 0.1)
    join(0)
    lines: dict[str, list[str]] = {"by hand": [], "by launcher": []}
    for how, names in (("by hand", ()), ("by launcher", ("ada", "bob", "eve"))):
        one = join(1 if how == "by hand" else 2, names=names)
        with pytest.raises(RendezvousFailed):
            one.wait_for_all(1.0, lines[how].append)
    assert lines["by hand"][-1].startswith("2 of 3 nodes joined, waiting for node rank 2, ")
    assert lines["by launcher"] == []


def test_a_node_that_cannot_connect_to_the_first_one_reports_that_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "UNJOINED_REPORT_INTERVAL", 0.1)

    def connect() -> Store:
        raise ConnectionRefusedError

    lines: list[str] = []
    text = r"waiting for the first node at n1:29500 \(connection refused\); gave up after 1 s"
    with pytest.raises(RendezvousFailed, match=text) as failure:
        Membership(1, 2, {"node": "node2"}, "n1:29500", connect).wait_for_all(1.0, lines.append)
    assert failure.value.exit_code == 124
    assert lines[-1].startswith("waiting for the first node at n1:29500 (connection refused), ")


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(errno.EHOSTUNREACH, "No route to host")])
def test_a_node_gives_up_early_if_a_launched_first_node_does_not_answer(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "UNREACHABLE_TIMEOUT", 0.5)

    def connect() -> Store:
        raise error

    reason = "no answer" if isinstance(error, TimeoutError) else "No route to host"
    text = re.escape(f"node2 cannot connect to the first node at n1:29500 ({reason}): a firewall between them?")
    with pytest.raises(RendezvousFailed, match=text) as failure:
        Membership(1, 2, {"node": "node2"}, "n1:29500", connect, names=["n1", "node2"]).wait_for_all(30.0, print)
    assert failure.value.exit_code == UNFIT
    with pytest.raises(RendezvousFailed, match="gave up after 1 s"):  # started by hand
        Membership(1, 2, {"node": "node2"}, "n1:29500", connect).wait_for_all(1.0, print)


# ---------------------------------------------------------------- refusals: the run continues


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        (
            {"PyTorch": "2.12.0"},
            "PyTorch 2.12.0, but 2.13.0 on node1; make them equal, or choose another --master-port",
        ),
        ({"size": 4}, "NNODES 4, but 3 on node1"),
    ],
)
def test_an_incompatible_node_is_refused_and_the_others_wait_for_a_compatible_one(
    join: Join, difference: dict[str, Any], message: str
) -> None:
    first, third = join(0), join(2)
    assert becomes_true(lambda: 2 in first.members)
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(first.wait_for_all, TIMEOUT, lines.append),
            pool.submit(third.wait_for_all, TIMEOUT, ignore),
        ]
        assert message in refusal_of(join(1, node="node9", **difference))
        assert becomes_true(lambda: lines)
        second = join(1)
        second.wait_for_all(TIMEOUT, ignore)
        for future in waiting:
            future.result()
    assert lines[0].startswith(f"refused node9: {message.partition(';')[0]}; ")
    assert lines[0].endswith("joined, waiting for node rank 1")
    assert run_succeeds([first, second, third])


def test_a_duplicate_node_rank_is_refused_and_the_message_names_the_run_and_its_first_node(join: Join) -> None:
    members = joined_members(join, size=2)
    message = refusal_of(join(1, size=2, node="node9"))
    assert "node1:29500: in use by run healthy (first node node1, started 20" in message
    assert "): NODE_RANK 1 is taken by node2; choose another NODE_RANK to join this run, or another --master" in message
    assert run_succeeds(members)


def test_a_node_of_another_run_is_refused_while_nodes_join_and_after_all_have_joined(join: Join) -> None:
    first = join(0, size=2)
    assert becomes_true(lambda: first.run)
    message = refusal_of(join(1, size=2, run="other", node="node9"))
    assert message.startswith("node1:29500: in use by run healthy (first node node1, started 20")
    assert message.endswith("), not by other; choose another --master-port")
    second = join(1, size=2, run="healthy")
    for future in run_concurrently(
        lambda: first.wait_for_all(TIMEOUT, ignore), lambda: second.wait_for_all(TIMEOUT, ignore)
    ):
        future.result()
    assert "not by other" in refusal_of(join(1, size=2, run="other", node="node9"))
    assert run_succeeds([first, second])


def test_reports_of_a_refused_node_are_ignored(join: Join) -> None:
    members = joined_members(join, size=2)
    stray = join(1, size=2, node="node9")
    stray.report_end(RunEnd("node9", 143, "received SIGTERM"))
    stray.leave()
    assert run_succeeds(members)


def test_a_node_refuses_to_join_at_a_store_without_a_run(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 0.5)
    assert refusal_of(join(1)) == "node1:29500: in use by another program; choose another --master-port"


def test_a_node_waits_for_an_ending_run_to_release_the_port(store: TCPStore) -> None:
    facts, address, stores = {"node": "n"}, "n:1", [store]
    old = Membership(0, 2, facts, address, lambda: store, "old")
    assert becomes_true(lambda: old.run)
    old.report_end(RunEnd("n", 1, "rank 0 ended with exit code 1"))
    assert becomes_true(lambda: membership_store(store, old.run).check(["end"]))  # type: ignore[arg-type]
    second = Membership(1, 2, facts, address, lambda: stores[-1])
    assert becomes_true(lambda: "waiting for run old (first node n, started " in second._status)
    stores.append(new_store())
    new = Membership(0, 2, facts, address, lambda: stores[-1], "new")
    for future in run_concurrently(*(lambda m=m: m.wait_for_all(TIMEOUT, ignore) for m in (new, second))):
        assert isinstance(run := future.result(), PublishedRun) and run.name == "new"
    assert run_succeeds([new, second])
    old.close()


def test_a_restarted_node_waits_for_the_run_of_its_killed_predecessor_to_end(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = joined_members(join, size=2)
    second.close()
    restarted = join(1, size=2)
    assert becomes_true(
        lambda: "started 20" in restarted._status and ") to end: node2 sends no heartbeats" in restarted._status
    )
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 1.0)
    assert becomes_true(first.end)
    assert becomes_true(lambda: restarted._status.endswith(" at node1:29500 to end"))
    assert restarted._refusal is None


JUNK = {"bytes": os.urandom(4096), "HTTP": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n", "nothing": b""}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_a_run_continues_when_another_program_writes_to_its_port(join: Join, store: TCPStore, junk: bytes) -> None:
    members = joined_members(join)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", store.port)) as stranger:
            stranger.sendall(junk)
    assert run_succeeds(members)


# ---------------------------------------------------------------- the port of the first node


def rendezvous(port: int, script: Path, nodes: int = 1) -> Rendezvous:
    script.touch()
    options = Options(nnodes=nodes, master_port=port, rdzv_conf="timeout=10")
    return Rendezvous(options, Script(str(script), (), False, ()))


def forked(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Call target(pipe, *arguments) in a forked process. Returns the process and the other end of the pipe."""
    parent_end, child_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(child_end, *arguments), daemon=True)
    gc.collect()
    gc.freeze()  # the child inherits stores without their threads and must not finalise them
    process.start()
    gc.unfreeze()
    child_end.close()
    return process, parent_end


def serve_a_run(pipe: Connection, directory: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MUSTER_RUN_DIR=str(directory / "train-1"), MUSTER_NODE="ada")
    served = rendezvous(port, directory / "train.py")
    served.join()
    pipe.send(port)
    pipe.recv()
    served._connect().set("key", "")
    pipe.send("succeeded")


def serve_a_store_and_publish_later(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    pipe.send(store.port)
    pipe.recv()
    time.sleep(0.2)  # so that the other process waits for the key
    membership.publish(store, "train-1", {"node": "ada"})
    pipe.recv()


def test_a_refusal_names_the_run_that_uses_the_port_even_if_its_name_is_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", TIMEOUT)
    _, other = forked(serve_a_store_and_publish_later)
    port = other.recv()
    connect = Rendezvous._tcp_store

    def connected(self: Rendezvous, is_master: bool) -> TCPStore:
        store = connect(self, is_master)
        other.send("publish")
        return store

    monkeypatch.setattr(Rendezvous, "_tcp_store", connected)
    with pytest.raises(RendezvousFailed, match="in use by run train-1"):
        rendezvous(port, tmp_path / "train.py").join()
    other.send("end")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_launch_on_the_port_of_another_run_fails_with_the_name_of_that_run_and_that_run_continues(
    tmp_path: Path, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", TIMEOUT)
    _, other = forked(serve_a_run, tmp_path)
    port = other.recv()
    with pytest.raises(RendezvousFailed) as failure:
        rendezvous(port, tmp_path / "train.py", nodes).join()
    assert failure.value.exit_code == 69
    message = str(failure.value)
    assert message.startswith(f"port {port}: in use by run train-1 (first node ada, started 20")
    assert message.endswith("); choose another --master-port")
    other.send("continue")
    assert other.recv() == "succeeded"


@pytest.mark.parametrize("ranks", [None, Ranks(-1, 2), Ranks(2, 2)])
def test_ranks_in_the_store_that_cannot_be_right_are_refused(
    tmp_path: Path, ranks: Ranks | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = SimpleNamespace(wait_for_all=lambda *_: PublishedRun("id", "train-1", 0, {}), ranks=ranks)
    monkeypatch.setattr("distributed.agent.rendezvous.Membership", lambda *_: joined)
    monkeypatch.setenv("MUSTER_NODES", "node1 node2")
    with pytest.raises(RendezvousFailed, match=r"invalid data in the store \(ranks/1: "):
        Rendezvous(Options(nnodes=2, node_rank=1), Script("train.py", (), False, ())).join()


def fail_rendezvous(pipe: Connection, port: int, script: Path) -> None:
    with pytest.raises(RendezvousFailed) as failure:
        rendezvous(port, script).join()
    pipe.send(str(failure.value))
    os._exit(0)  # a thread still waits for a reply


def test_a_port_in_use_by_a_program_that_never_replies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", 0.5)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert (
            forked(fail_rendezvous, port, tmp_path / "train.py")[1].recv()
            == f"port {port}: in use by another program; choose another --master-port"
        )


# ---------------------------------------------------------------- end of a run


def test_the_first_report_of_an_end_takes_effect_on_all_nodes(join: Join) -> None:
    one, two, three = joined_members(join)
    two.report_end(RunEnd("node2", 42, "rank 1 ended with exit code 42"))
    assert becomes_true(lambda: one.end() and three.end())
    three.report_end(RunEnd("node3", 1, "rank 2 lost its connection"))
    assert [member.end() and member.end().exit_code for member in (one, two, three)] == [42] * 3  # type: ignore[union-attr]


def test_each_node_receives_the_failure_records_of_the_others(join: Join) -> None:
    one, two, three = joined_members(join)
    records: list[Records] = [{f"node_node{number}.json": {"failures": []}} for number in (1, 2, 3)]
    two.report_end(RunEnd("node2", 1, "rank 1 ended with exit code 1"))
    assert becomes_true(lambda: one.end() and three.end())
    pairs = zip((one, two, three), records, strict=True)
    run_concurrently(*(lambda pair=pair: pair[0].leave(pair[1], collect=True) for pair in pairs))
    assert one.records == {1: records[1], 2: records[2]}
    assert three.records == {0: records[0], 1: records[1]}


def test_the_first_failure_of_all_nodes_is_found_in_their_records() -> None:
    def agent(*failures: tuple[int, float, bool]) -> dict[str, Any]:
        return {"failures": [{"rank": r, "time": t, "exit_code": r + 1, "ended_by_agent": e} for r, t, e in failures]}

    records: dict[str, Any] = {
        "node_n1.json": agent((0, 1.0, True), (1, 3.0, False)),
        "node_n2.json": agent((2, 2.0, False)),
        "rank_2.json": {"exception": "ValueError", "message": "boom"},
    }
    assert failure_records.first_failure(records)["message"] == "boom"
    del records["rank_2.json"], records["node_n2.json"]
    assert failure_records.first_failure(records)["message"] == "rank 1 failed with exit code 2"
    assert failure_records.first_failure({"node_n1.json": agent()}) == {}


def test_records_of_other_nodes_are_written_but_do_not_overwrite_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors/node_n1.json").write_text('{"node": "n1", "lost": "n3"}')
    failure_records.write_missing({"node_n1.json": {"node": "n1"}, "rank_2.json": {"rank": 2}})
    found = {file.name: json.loads(file.read_text()) for file in (tmp_path / "errors").iterdir()}
    assert found == {"node_n1.json": {"node": "n1", "lost": "n3"}, "rank_2.json": {"rank": 2}}


def test_no_node_leaves_before_all_have_finished(join: Join, store: TCPStore) -> None:
    one, two, three = joined_members(join)
    with ThreadPoolExecutor() as pool:
        finishing = [pool.submit(one.finish), pool.submit(two.finish)]
        assert one.run
        keys = membership_store(store, one.run)
        assert becomes_true(lambda: keys.check(["done/0", "done/1"]))
        assert not any(future.done() for future in finishing)
        assert three.finish() is None
        assert [future.result() for future in finishing] == [None, None]


def test_a_node_does_not_leave_the_run_when_its_call_of_finish_times_out(join: Join) -> None:
    one, *_ = joined_members(join)
    with pytest.raises(TimeoutError):
        one.finish(0)
    one.report_end(RunEnd("n1", 143, "received SIGTERM"))
    assert becomes_true(lambda: one.end() is not None)


def test_a_failure_after_other_nodes_have_finished_reaches_them(join: Join) -> None:
    one, two, three = joined_members(join)
    with ThreadPoolExecutor() as pool:
        finishing = [pool.submit(one.finish), pool.submit(three.finish)]
        two.report_end(RunEnd("node2", 7, "rank 1 ended with exit code 7"))
        assert [future.result().exit_code for future in finishing] == [7, 7]  # type: ignore[union-attr]


def test_all_nodes_report_a_node_without_heartbeats_as_lost(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = joined_members(join)
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 4.0)
    two.close()
    assert becomes_true(lambda: one.end() and three.end())
    assert one.end() == three.end() == RunEnd("node2", 69, "connection lost", lost=True)


def test_a_node_that_closes_while_its_thread_reads_the_store_stays_closed(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, two = joined_members(join, size=2)
    closing, read_value = threading.Event(), membership.read_value

    def read_slowly(store: Store, key: str, kind: Any = object) -> Any:
        value = read_value(store, key, kind)
        if key == "closing":
            closing.set()
            assert becomes_true(lambda: two._closed)
        return value

    monkeypatch.setattr(membership, "read_value", read_slowly)
    membership.publish_news(two._store, "test", True)  # type: ignore[arg-type]
    assert closing.wait(TIMEOUT)
    two.close()
    assert becomes_true(lambda: not two._thread.is_alive())


def test_a_stop_signal_after_a_node_was_lost_does_not_change_the_exit_code(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = joined_members(join, size=2)
    agent = Agent.__new__(Agent)
    agent.failures, agent.records, agent.succeeded, agent.ranks = {}, {}, [], []
    agent.rendezvous = SimpleNamespace(membership=one)  # type: ignore[assignment]
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 1.0)
    two.close()
    assert becomes_true(one.end)
    assert agent.handle_stop_signal(signal.SIGTERM) == 69


def first_node(pipe: Connection) -> None:
    """Join as the first node, and wait for a signal. Runs in a forked process."""
    store = new_store()
    first = Membership(0, 2, {"node": "node1"}, "", lambda: store, "run")
    pipe.send(store.port)
    first.wait_for_all(TIMEOUT, ignore)
    signal.pause()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_first_node_is_detected(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 4.0)
    process, pipe = forked(first_node)
    port = pipe.recv()
    second = Membership(1, 2, {"node": "node2"}, "", lambda: TCPStore("127.0.0.1", port, None, wait_for_workers=False))
    second.wait_for_all(TIMEOUT, ignore)
    os.kill(process.pid or 0, number)
    assert becomes_true(second.end)
    assert second.end() == RunEnd("node1", 69, "connection lost", lost=True)
    second.leave(collect=True)  # returns although no node reads the records
    process.kill()
    process.join()


class ClosedAfterLeaving:
    """A store that closes as soon as this node has left."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        if self.closed:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        self.__getattr__("set")(key, value)
        self.closed = key.startswith("left/")


def test_a_node_that_has_left_does_not_use_the_store(join: Join, store: TCPStore) -> None:
    one, two = joined_members(join, size=2)
    two._store = ClosedAfterLeaving(two._store)  # type: ignore[arg-type, assignment]
    assert one.run
    membership.publish_news(membership_store(store, one.run), "all done", True)
    assert two.finish() is None


# ---------------------------------------------------------------- values of unexpected types

DEEP = "[" * 100_000
BAD_RUN = ["5", "[1]", "{}", DEEP, "\udcff", '{"id": "a", "name": 1, "started": 1, "facts": {"node": "n"}}',
           '{"id": "a", "name": "b", "started": 1000000000000000, "facts": {"node": "n"}}',
           '{"id": "a", "name": "b", "started": 1, "facts": {"node": "../n"}}',
           '{"id": "a", "name": "b\\u0000", "started": 1, "facts": {"node": "n"}}',
           '{"id": "a", "name": "\\ud800", "started": 1, "facts": {"node": "n"}}',
           '{"id": "\\ud800", "name": "b", "started": 1, "facts": {"node": "n"}}']  # fmt: skip


@pytest.mark.parametrize("value", BAD_RUN)
def test_a_node_refuses_a_store_with_another_kind_of_run(join: Join, store: TCPStore, value: str) -> None:
    store.set(membership.RUN_KEY, value.encode(errors="surrogateescape"))  # type: ignore[arg-type]
    message = refusal_of(join(1))
    assert message.startswith("node1:29500: invalid data in the store (muster/run: ")
    assert message.endswith("; choose another --master-port") and len(message) < 400


@pytest.mark.parametrize(
    "value",
    [
        "5", '{"process": "x"}', '{"node": 1}', '{"node": "a/b"}', '{"node": "a\\u0000"}', '{"node": "\\ud800"}',
        '{"node": "a\\nb"}', DEEP,
    ],
)  # fmt: skip
def test_a_node_with_invalid_facts_ends_the_run_with_its_rank(join: Join, store: TCPStore, value: str) -> None:
    one = join(0, size=2)
    assert becomes_true(lambda: one.run)
    assert one.run
    membership_store(store, one.run).set("member/1", value)
    with pytest.raises(RendezvousFailed, match=r"node1: invalid data in the store \(member/1: ") as failure:
        one.wait_for_all(TIMEOUT, ignore)
    assert failure.value.exit_code == 69


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("end", '{"lost": ["x"]}'), ("end", '{"node": "n", "exit_code": 256, "reason": "r"}'), ("end", DEEP),
        ("end", '{"node": "n", "exit_code": 0, "reason": "r"}'), ("records", "5"), ("all done", DEEP),
        ("end", '{"node": "\\ud800", "exit_code": 1, "reason": "r"}'),
        ("end", json.dumps({"node": "n" * (2 << 20), "exit_code": 69, "reason": "r", "lost": True})),
    ],
)  # fmt: skip
def test_an_invalid_value_for_all_nodes_ends_the_run_with_a_message(
    join: Join, store: TCPStore, key: str, value: str
) -> None:
    one, two, three = joined_members(join)
    assert one.run
    if key == "records":
        two.report_end(RunEnd("node2", 1, "rank 1 failed with exit code 1"))
        assert becomes_true(lambda: one.end() and three.end())
    keys = membership_store(store, one.run)
    keys.set(key, value)
    keys.add(membership.NEWS, 1)
    assert becomes_true(lambda: one.end() and two.end() and three.end())
    ends = {member.end().reason.partition(" (")[0] for member in (one, two, three)}  # type: ignore[union-attr]
    assert ends <= {"invalid data in the store", "rank 1 failed with exit code 1"}
    run_concurrently(*(lambda one=one: one.leave({}, collect=True) for one in (one, two, three)))


def test_invalid_failure_records_are_reported_with_the_rank_of_their_node_and_ignored(
    join: Join, store: TCPStore, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two, three = joined_members(join)
    assert one.run
    failure = {"rank": 1, "pid": 5, "time": 1.0, "exit_code": 3, "ended_by_agent": False}
    sent: Records = {
        "node_node2.json": {"failures": [failure]}, "node_node1.json": {"failures": []}, "../x": {},
        "rank_1.json": {"rank": 1, "local_rank": 0, "node": "node2", "pid": 5, "time": 1.0, "exit_code": 3},
        "rank_2.json": {"rank": 2},
    }  # fmt: skip
    membership_store(store, one.run).set("records/2", '{"node_node3.json": {"failures": [{"rank": "\x1b[31m"}]}}')
    two.report_end(RunEnd("node2", 3, "rank 1 failed with exit code 3"))
    assert becomes_true(lambda: one.end() and three.end())
    run_concurrently(lambda: one.leave({}, collect=True), lambda: two.leave(sent, collect=True))
    assert one.records[1] == {name: sent[name] for name in ("node_node2.json", "rank_1.json")}
    assert "agent: node3: invalid failure records (" in (printed := capfd.readouterr().err)
    assert "\x1b" not in printed


def forged_records(node: str, rank: int, **of_rank: object) -> dict[str, Any]:
    """Records of an agent and its rank, as the agent sends them."""
    failure = {"rank": rank, "local_rank": 0, "pid": 5, "time": 1.0, "exit_code": 42}
    agent = {"node": node, "failures": [failure | {"ended_by_agent": False}]}
    return {f"node_{node}.json": agent, f"rank_{rank}.json": failure | {"node": node, "exception": "E"} | of_rank}


def test_records_of_ranks_of_another_node_are_refused_by_all_nodes(
    join: Join, store: TCPStore, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ways through the store: the records that a node sends, and those that the first node shares."""
    one, two, three = joined_members(join)
    assert one.run
    keys = membership_store(store, one.run)
    three.report_end(RunEnd("node1", 42, "rank 0 failed with exit code 42"))
    assert becomes_true(lambda: one.end() and two.end())
    own, of_third = forged_records("node2", 1), forged_records("node3", 1)
    keys.set("records/2", json.dumps(of_third))
    run_concurrently(lambda: one.leave({}, collect=True), lambda: two.leave(own, collect=True))
    assert (one.records, two.records) == ({1: own, 2: {}}, {0: {}, 2: {}})
    assert "agent: node3: invalid failure records (rank: expected range(2, 3), got 1)" in capfd.readouterr().err
    forged = {"0": forged_records("node1", 1), "1": forged_records("node2", 0), "2": forged_records("node3", 1)}
    membership.publish_news(keys, "records", {"complete": True, "records": forged})
    for member in (one, two):
        member._read_news(keys)
        assert not any(member.records.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"node_node2.json": {"node": "node1"}}, {"node_node2.json": {"succeeded": [0]}},
        {"node_node2.json": {"lost": "\ud800"}}, {"node_node2.json": {"first": "a\nb"}},
        {"rank_1.json": {"rank": 0}}, {"rank_1.json": {"node": "node1"}},
    ],
)  # fmt: skip
def test_records_that_are_not_about_their_node_or_have_no_valid_names_are_refused(changed: dict[str, Any]) -> None:
    sent = forged_records("node2", 1)
    assert failure_records.records_of("node2", range(1, 2), sent) == sent
    sent = {name: record | changed.get(name, {}) for name, record in sent.items()}
    assert failure_records.records_of("node2", range(1, 2), sent) == {}


def test_records_without_a_process_id_are_refused() -> None:
    """With the id, the verdict sees whether the record of a rank is by the process that the agent has started."""
    for name in ("node_node2.json", "rank_1.json"):
        sent = forged_records("node2", 1)
        (sent[name]["failures"][0] if name.startswith("node") else sent[name]).pop("pid")
        assert failure_records.records_of("node2", range(1, 2), sent) == {}


def test_the_records_of_this_node_are_not_replaced_in_the_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    own, other = forged_records("node1", 0, message="own"), forged_records("node1", 0, message="other")
    joined = SimpleNamespace(records={1: other}, first_end=None)
    Agent._write_error_file(SimpleNamespace(records=own, membership=joined))  # type: ignore[arg-type]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "E: own"


def test_long_texts_in_the_store_are_cut(join: Join, store: TCPStore) -> None:
    one, two = joined_members(join, size=2)
    assert one.run
    keys = membership_store(store, one.run)
    two._missing = membership.Missing(1, range(1000))
    assert len(two._missing_nodes()) < 1000
    keys.set("refused", "x" * (2 << 20))
    assert one._coordinator
    one._coordinator.members.pop(1)
    assert becomes_true(lambda: one._coordinator and one._coordinator.refused)
    membership.publish_end(keys, {"node": "node2", "exit_code": 1, "reason": "x" * (2 << 20)})
    assert becomes_true(lambda: one.end() and two.end())
    assert {len(text) < 2000 for text in (one._coordinator.refused, one.end().reason, two.end().reason)} == {True}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("names", "lost", "outcome"), [("n1 n2", "n2", "69 n2"), ("n1 n2", "n" * (2 << 20), "69 "), ("", "n2", "69 ")]
)
def test_only_a_lost_node_of_the_run_is_reported_to_the_launcher(
    names: str, lost: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = RunEnd(lost, 69, "connection lost", lost=True)
    ended = SimpleNamespace(run=lambda: 69, can_restart=lambda: True, end_of_run=lambda: end)
    outcomes: list[str] = []
    pipes: Any = SimpleNamespace(restarts=True, next_attempt=outcomes.append)
    nothing: Any = None
    monkeypatch.setattr(agent, "Agent", lambda *_: ended)
    monkeypatch.setattr(agent, "_set_stop_signals", lambda _: None)
    monkeypatch.setenv("MUSTER_NODES", names)
    monkeypatch.setenv("MUSTER_NODE", "n1")
    assert agent._run_attempts(nothing, nothing, nothing, pipes) == 69
    assert outcomes == [outcome]


RECORD = {"rank": 0, "local_rank": 0, "node": "n", "pid": 7, "time": 1.0, "exit_code": 3, "message": "m" * 100_000}
BAD_RECORDS = {
    "deep": DEEP, "number": "5", "list": "[]", "text": '"x"', "bytes": "\udcff",
    **{name: json.dumps(RECORD | {name: value}) for name, value in
       {"rank": 1, "exit_code": 0, "time": "x", "node": [], "message": 5, "more": 1}.items()},
}  # fmt: skip


def test_the_largest_record_of_a_rank_is_read_for_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    failure_records.RankRecord({"MUSTER_RUN_DIR": str(tmp_path)}).write(1, ValueError("\U0001f600" * 1_000_000))
    assert (tmp_path / "errors/rank_0.json").stat().st_size <= most_bytes("rank_0.json")


def test_only_valid_failure_records_of_a_rank_are_used(tmp_path: Path) -> None:
    record = failure_records.RankRecord({"MUSTER_RUN_DIR": str(tmp_path)})
    (tmp_path / "errors").mkdir()
    file = tmp_path / "errors/rank_0.json"
    file.write_text(json.dumps(RECORD))
    assert record.read(7) == RECORD | {"message": head_and_tail("m" * 100_000)}
    assert record.read(8) == {}
    for name, content in BAD_RECORDS.items():
        file.write_text(content, errors="surrogateescape")
        assert record.read(7) == {}, name
    file.unlink()
    os.mkfifo(file)
    assert record.read(7) == {}
    file.unlink()
    (tmp_path / "other").write_text(json.dumps(RECORD))
    file.symlink_to(tmp_path / "other")
    assert record.read(7) == {}


# ---------------------------------------------------------------- large runs: operations on the store


class CountingStore:
    """A store that records the operations on it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.operations: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.operations.append(name)
        return getattr(self.store, name)

    def operations_of(self, call: Callable[[], object]) -> list[str]:
        """The operations during a call."""
        self.operations.clear()
        call()
        return self.operations


def coordinator_of(store: TCPStore, size: int) -> tuple[membership.Coordinator, CountingStore]:
    """The coordinator of a run that all nodes have joined."""
    run = membership.publish(store, "large", {"node": "node0"}, size)
    counting = CountingStore(membership_store(store, run))
    for rank in range(size):
        counting.store.set(f"member/{rank}", json.dumps({"node": f"node{rank}"}))
        counting.store.set(f"heartbeat/{rank}", "1.0")
    return membership.Coordinator(counting, size, RunningClock()), counting  # type: ignore[arg-type]


def test_a_node_does_two_store_operations_per_round_if_there_is_no_news_for_all_nodes(join: Join) -> None:
    one, two, three = joined_members(join)
    two.close()
    two._update()
    two._store = counting = CountingStore(two._store)  # type: ignore[arg-type, assignment]
    assert counting.operations_of(two._update) == ["set", "add"]
    three.report_end(RunEnd("node3", 1, "rank 2 ended with exit code 1"))
    assert becomes_true(one.end)
    assert len(counting.operations_of(two._update)) > 2
    assert two.end() == one.end()
    assert counting.operations_of(two._update) == ["set", "add"]


def test_the_first_node_needs_only_a_few_more_store_operations_for_1000_nodes_than_for_100(store: TCPStore) -> None:
    rounds = {}
    for size in (100, 1000):
        coordinator, counting = coordinator_of(store, size)
        joining = len(counting.operations_of(lambda: coordinator.update(None)))  # noqa: B023
        assert len(coordinator.members) == size
        rounds[size] = joining, len(counting.operations_of(lambda: coordinator.update(None)))  # noqa: B023
    assert max(rounds[100]) <= 10
    # The keys of members, and those of heartbeats, are read in blocks of KEYS_PER_CALL, with one operation for each.
    extra = 2 * (1000 // membership.KEYS_PER_CALL + 1)
    assert [large - small <= extra for small, large in zip(*rounds.values(), strict=True)] == [True, True]


def test_in_a_large_run_all_nodes_receive_only_the_records_of_the_first_failures(store: TCPStore) -> None:
    coordinator, counting = coordinator_of(store, 1000)
    coordinator.update(None)
    for rank in range(1000):
        failure = {"rank": rank, "pid": 5, "time": 2000.0 - rank, "exit_code": 1, "ended_by_agent": False}
        counting.store.set(f"records/{rank}", json.dumps({f"node_node{rank}.json": {"failures": [failure]}}))
    end = RunEnd("node7", 1, "rank 7 failed with exit code 1")
    assert len(counting.operations_of(lambda: coordinator.update(end))) <= 12
    shared = json.loads(counting.store.get("records"))
    assert shared["complete"]
    # The highest ranks failed first, see `time` above.
    highest_ranks = range(1000 - membership.SHARED_RECORDS + 1, 1000)
    assert set(map(int, shared["records"])) == {7, *highest_ranks}


def test_the_records_that_have_arrived_are_shared_before_the_nodes_stop_waiting(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "RECORDS_TIMEOUT", 2.0)
    one, two, three = joined_members(join)
    two.report_end(RunEnd("node2", 1, "rank 1 ended with exit code 1"))
    assert becomes_true(lambda: one.end() and three.end())
    records: Records = {"node_node2.json": {"failures": []}}
    two.leave(records)  # node 3 sends heartbeats, but no records
    assert becomes_true(lambda: three.records)
    assert three.records == {0: {}, 1: records}
    assert not three._has_records


def test_a_message_about_many_missing_nodes_shows_the_first_ones(join: Join) -> None:
    first = join(0, size=1000)
    assert becomes_true(lambda: first._missing.count == 999)
    text = first._missing_nodes()
    assert text.startswith("1 of 1000 nodes joined, waiting for node rank 1, node rank 2, ")
    assert text.endswith(", node rank 16 and 983 more")


def test_nodes_of_a_large_run_send_heartbeats_less_often(join: Join) -> None:
    assert join(0, size=100)._interval() == membership.JOIN_INTERVAL
    assert join(0, size=20_000)._interval() == 2.0


def test_the_first_node_raises_its_limit_of_open_files(store: TCPStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        coordinator_of(store, 2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, membership.MAX_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
