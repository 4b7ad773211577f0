"""The agents of one run know of each other: who has joined, whose heartbeats are missing, how the run ended, and why.

Here they are threads of one process with a real TCPStore; tests/launch_torchrun_multinode.bats has real agents on
several nodes.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
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
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distributed.agent import failure_records, membership
from distributed.agent.agent import Agent
from distributed.agent.failure_records import Records
from distributed.agent.membership import Membership, RendezvousFailed, RunEnd, membership_store
from distributed.agent.rendezvous import Rendezvous
from distributed.agent.worker import Script

Join = Callable[..., Membership]
TIMEOUT = 20.0  # seconds that a test waits for what should come at once


@pytest.fixture
def store() -> TCPStore:
    return new_store()


@pytest.fixture
def join(store: TCPStore) -> Iterator[Join]:
    """A function by which a node joins a run of 3."""
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


def at_once(*calls: Callable[[], object]) -> list[Future[object]]:
    """Call them all in threads of their own, and wait for their ends."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def ignore(_: str) -> None:
    pass


def gathered(join: Join, size: int = 3) -> list[Membership]:
    members = [join(rank, size) for rank in range(size)]
    for future in at_once(*(lambda one=one: one.wait_for_all(TIMEOUT, ignore) for one in members)):
        future.result()
    return members


def comes(condition: Callable[[], object]) -> bool:
    """Whether it becomes true in time."""
    tick = threading.Event()
    return any(condition() or tick.wait(0.01) for _ in range(int(TIMEOUT * 100)))


def go_on(members: Sequence[Membership]) -> bool:
    """Whether the run of these nodes goes on to its good end."""
    return [future.result() for future in at_once(*(one.finish for one in members))] == [None] * len(members)


def refused(one: Membership) -> str:
    """Why it was refused."""
    with pytest.raises(RendezvousFailed) as failure:
        one.wait_for_all(TIMEOUT, ignore)
    assert failure.value.exit_code == 69
    return str(failure.value)


# ---------------------------------------------------------------- gathering


def test_all_nodes_gather_and_know_each_others_names(join: Join) -> None:
    for one in gathered(join):
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


def test_every_node_reports_missing_nodes_but_where_one_place_shows_all_lines_the_first_alone(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "REPORT_INTERVAL", 0.1)
    join(0)
    lines: dict[str, list[str]] = {"by hand": [], "from one place": []}
    for how, names in (("by hand", ()), ("from one place", ("ada", "bob", "eve"))):
        one = join(1 if how == "by hand" else 2, names=names)
        with pytest.raises(RendezvousFailed):
            one.wait_for_all(1.0, lines[how].append)
    assert lines["by hand"][-1].startswith("2 of 3 nodes joined, waiting for node rank 2, ")
    assert lines["from one place"] == []


def test_a_node_reports_that_it_does_not_find_the_first_one_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "UNJOINED_REPORT_INTERVAL", 0.1)

    def connect() -> Store:
        raise ConnectionRefusedError

    lines: list[str] = []
    with pytest.raises(RendezvousFailed, match="waiting for the first node at n1:29500; gave up after 1 s") as failure:
        Membership(1, 2, {"node": "node2"}, "n1:29500", connect).wait_for_all(1.0, lines.append)
    assert failure.value.exit_code == 124
    assert lines[-1].startswith("waiting for the first node at n1:29500, ")


# ---------------------------------------------------------------- refusals: the run goes on


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            {"PyTorch": "2.12.0"},
            "PyTorch 2.12.0, but 2.13.0 on node1; make them equal, or choose another --master-port",
        ),
        ({"size": 4}, "NNODES 4, but 3 on node1"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_others_wait_for_one_that_does(
    join: Join, odd: dict[str, Any], said: str
) -> None:
    first, third = join(0), join(2)
    assert comes(lambda: 2 in first.members)
    lines: list[str] = []
    with ThreadPoolExecutor() as pool:
        gathering = [
            pool.submit(first.wait_for_all, TIMEOUT, lines.append),
            pool.submit(third.wait_for_all, TIMEOUT, ignore),
        ]
        assert said in refused(join(1, node="node9", **odd))
        assert comes(lambda: lines)
        second = join(1)
        second.wait_for_all(TIMEOUT, ignore)
        for future in gathering:
            future.result()
    assert lines[0].startswith(f"refused node9: {said.partition(';')[0]}; ")
    assert lines[0].endswith("joined, waiting for node rank 1")
    assert go_on([first, second, third])


def test_a_node_rank_that_a_living_node_has_is_refused_with_the_run_and_its_first_node(join: Join) -> None:
    members = gathered(join, size=2)
    said = refused(join(1, size=2, node="node9"))
    assert "node1:29500: in use by run healthy (first node node1, started 20" in said
    assert "): NODE_RANK 1 is taken by node2; choose another NODE_RANK to join this run, or another --master" in said
    assert go_on(members)


def test_a_node_of_another_run_is_refused_while_the_nodes_gather_and_later(join: Join) -> None:
    first = join(0, size=2)
    assert comes(lambda: first.run)
    said = refused(join(1, size=2, run="other", node="node9"))
    assert said.startswith("node1:29500: in use by run healthy (first node node1, started 20")
    assert said.endswith("), not by other; choose another --master-port")
    second = join(1, size=2, run="healthy")
    for future in at_once(lambda: first.wait_for_all(TIMEOUT, ignore), lambda: second.wait_for_all(TIMEOUT, ignore)):
        future.result()
    assert "not by other" in refused(join(1, size=2, run="other", node="node9"))
    assert go_on([first, second])


def test_what_a_node_reports_that_has_not_joined_reaches_nobody(join: Join) -> None:
    members = gathered(join, size=2)
    stray = join(1, size=2, node="node9")
    stray.report_end(RunEnd("node9", 143, "received SIGTERM"))
    stray.leave()
    assert go_on(members)


def test_a_store_that_no_agent_has_opened_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 0.5)
    assert refused(join(1)) == "node1:29500: in use by another program; choose another --master-port"


def test_a_node_waits_until_the_run_that_ends_has_left_the_port_to_the_next(store: TCPStore) -> None:
    facts, place, stores = {"node": "n"}, "n:1", [store]
    old = Membership(0, 2, facts, place, lambda: store, "old")
    assert comes(lambda: old.run)
    old.report_end(RunEnd("n", 1, "rank 0 ended with exit code 1"))
    assert comes(lambda: membership_store(store, old.run).check(["end"]))  # type: ignore[arg-type]
    second = Membership(1, 2, facts, place, lambda: stores[-1])
    assert comes(lambda: "waiting for run old (first node n, started " in second._status)
    stores.append(new_store())
    new = Membership(0, 2, facts, place, lambda: stores[-1], "new")
    assert [
        f.result().name for f in at_once(*(lambda m=m: m.wait_for_all(TIMEOUT, ignore) for m in (new, second)))
    ] == [  # type: ignore[attr-defined]
        "new",
        "new",
    ]
    assert go_on([new, second])
    old.close()


def test_a_node_that_was_killed_and_comes_again_is_not_refused_by_its_own_trace(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gathered(join, size=2)
    second.close()
    again = join(1, size=2)
    assert comes(lambda: "started 20" in again._status and "): node2 sends no heartbeat" in again._status)
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 1.0)
    assert comes(first.end)
    assert comes(lambda: again._status.endswith(" at node1:29500 to end"))
    assert again._refusal is None


JUNK = {"bytes": os.urandom(4096), "HTTP": b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n", "nothing": b""}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_a_run_goes_on_when_a_program_that_is_no_member_writes_to_its_port(
    join: Join, store: TCPStore, junk: bytes
) -> None:
    members = gathered(join)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", store.port)) as stranger:
            stranger.sendall(junk)
    assert go_on(members)


# ---------------------------------------------------------------- the port of the first node


def rendezvous(port: int, script: Path, nodes: int = 1) -> Rendezvous:
    script.touch()
    return Rendezvous(StaticTCPRendezvous("127.0.0.1", port, 0, nodes, "none", 10), Script(str(script), (), False, ()))


def forked(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Call it in a process of its own, with a pipe to us before the other arguments."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=target, args=(theirs, *arguments), daemon=True)
    gc.collect()
    gc.freeze()  # the process has our stores without their threads, and must not end them
    process.start()
    gc.unfreeze()
    theirs.close()
    return process, ours


def serve_a_run(place: Connection, folder: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MUSTER_RUN_DIR=str(folder / "train-1"), MUSTER_NODE="ada")
    info = rendezvous(port, folder / "train.py").next_rendezvous()
    place.send(port)
    place.recv()
    info.store.set("it goes on", "")
    place.send("ended well")


def serve_a_store_first(place: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    place.send(store.port)
    place.recv()
    time.sleep(0.2)  # the question comes first
    membership.publish(store, "train-1", {"node": "ada"})
    place.recv()


def test_a_run_that_has_its_port_but_not_yet_said_who_it_is_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", TIMEOUT)
    _, other = forked(serve_a_store_first)
    port = other.recv()
    connect = Rendezvous._tcp_store

    def connected(self: Rendezvous, is_master: bool) -> TCPStore:
        store = connect(self, is_master)
        other.send("say who you are")
        return store

    monkeypatch.setattr(Rendezvous, "_tcp_store", connected)
    with pytest.raises(RendezvousFailed, match="in use by run train-1"):
        rendezvous(port, tmp_path / "train.py").next_rendezvous()
    other.send("end")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_that_another_run_has_is_refused_with_its_name_and_that_run_goes_on(
    tmp_path: Path, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", TIMEOUT)
    _, other = forked(serve_a_run, tmp_path)
    port = other.recv()
    with pytest.raises(RendezvousFailed) as failure:
        rendezvous(port, tmp_path / "train.py", nodes).next_rendezvous()
    assert failure.value.exit_code == 69
    said = str(failure.value)
    assert said.startswith(f"port {port}: in use by run train-1 (first node ada, started 20")
    assert said.endswith("); choose another --master-port")
    other.send("go on")
    assert other.recv() == "ended well"


def meet(told: Connection, port: int, script: Path) -> None:
    with pytest.raises(RendezvousFailed) as failure:
        rendezvous(port, script).next_rendezvous()
    told.send(str(failure.value))
    os._exit(0)  # as a thread still asks


def test_a_port_that_another_program_has_is_refused_though_it_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.agent.rendezvous.OWNER_TIMEOUT", 0.5)
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        assert (
            forked(meet, port, tmp_path / "train.py")[1].recv()
            == f"port {port}: in use by another program; choose another --master-port"
        )


# ---------------------------------------------------------------- the end


def test_the_first_report_of_an_end_counts_on_all_nodes(join: Join) -> None:
    one, two, three = gathered(join)
    two.report_end(RunEnd("node2", 42, "rank 1 ended with exit code 42"))
    assert comes(lambda: one.end() and three.end())
    three.report_end(RunEnd("node3", 1, "rank 2 lost its connection"))
    assert [member.end() and member.end().exit_code for member in (one, two, three)] == [42] * 3  # type: ignore[union-attr]


def test_the_failure_records_of_each_node_reach_all(join: Join) -> None:
    one, two, three = gathered(join)
    records: list[Records] = [{f"node_node{number}.json": {"deaths": []}} for number in (1, 2, 3)]
    two.report_end(RunEnd("node2", 1, "rank 1 ended with exit code 1"))
    assert comes(lambda: one.end() and three.end())
    pairs = zip((one, two, three), records, strict=True)
    at_once(*(lambda pair=pair: pair[0].leave(pair[1], collect=True) for pair in pairs))
    assert one.records == {1: records[1], 2: records[2]}
    assert three.records == {0: records[0], 1: records[1]}


def test_records_of_other_nodes_are_kept_but_not_over_those_that_they_wrote_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors/node_n1.json").write_text('{"node": "n1", "lost": "n3"}')
    failure_records.write_missing({"node_n1.json": {"node": "n1"}, "rank_2.json": {"rank": 2}})
    found = {file.name: json.loads(file.read_text()) for file in (tmp_path / "errors").iterdir()}
    assert found == {"node_n1.json": {"node": "n1", "lost": "n3"}, "rank_2.json": {"rank": 2}}


def test_no_node_leaves_before_all_are_done(join: Join, store: TCPStore) -> None:
    one, two, three = gathered(join)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(one.finish), pool.submit(two.finish)]
        assert one.run
        keys = membership_store(store, one.run)
        assert comes(lambda: keys.check(["done/0", "done/1"]))
        assert not any(future.done() for future in early)
        assert three.finish() is None
        assert [future.result() for future in early] == [None, None]


def test_a_node_that_is_asked_to_stop_waits_only_so_long_for_the_others(join: Join) -> None:
    one, *_ = gathered(join)
    with pytest.raises(TimeoutError):
        one.finish(0)
    one.report_end(RunEnd("n1", 143, "received SIGTERM"))
    assert comes(lambda: one.end() is not None)


def test_a_failure_after_others_are_done_is_theirs_too(join: Join) -> None:
    one, two, three = gathered(join)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(one.finish), pool.submit(three.finish)]
        two.report_end(RunEnd("node2", 7, "rank 1 ended with exit code 7"))
        assert [future.result().exit_code for future in early] == [7, 7]  # type: ignore[union-attr]


def test_a_node_without_heartbeats_is_given_up_by_all(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = gathered(join)
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 4.0)
    two.close()
    assert comes(lambda: one.end() and three.end())
    assert one.end() == three.end() == RunEnd("node2", 69, "connection lost", lost=True)


def test_an_agent_that_is_stopped_while_it_ends_with_a_lost_node_ends_by_that_cause(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = gathered(join, size=2)
    agent = Agent.__new__(Agent)
    agent.failures, agent.succeeded, agent._pcontext = {}, [], None
    agent.rendezvous = SimpleNamespace(membership=one)  # type: ignore[assignment]
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 1.0)
    two.close()
    assert comes(one.end)
    assert agent.handle_stop_signal(signal.SIGTERM) == 69


def host(place: Connection) -> None:
    """The first node's agent, as far as the others see it."""
    store = new_store()
    first = Membership(0, 2, {"node": "node1"}, "", lambda: store, "run")
    place.send(store.port)
    first.wait_for_all(TIMEOUT, ignore)
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_first_node_is_gone_the_others_know(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT", 4.0)
    process, place = forked(host)
    port = place.recv()
    second = Membership(1, 2, {"node": "node2"}, "", lambda: TCPStore("127.0.0.1", port, None, wait_for_workers=False))
    second.wait_for_all(TIMEOUT, ignore)
    os.kill(process.pid or 0, how)
    assert comes(second.end)
    assert second.end() == RunEnd("node1", 69, "connection lost", lost=True)
    second.leave(collect=True)  # returns, though no node reads it
    process.kill()
    process.join()


class GoneWhenWeLeave:
    """A store whose node leaves with it as soon as it has seen that we have left."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        self.__getattr__("set")(key, value)
        self.gone = key.startswith("left/")


def test_a_node_that_has_left_asks_no_more(join: Join, store: TCPStore) -> None:
    one, two = gathered(join, size=2)
    two._store = GoneWhenWeLeave(two._store)  # type: ignore[arg-type, assignment]
    assert one.run
    membership_store(store, one.run).set("all done", "true")
    assert two.finish() is None
