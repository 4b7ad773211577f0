"""The agents of one run know of each other: who is there, who fell silent, how it ended, and who tells what of it.

Here they are threads of one process, that speak through a real TCPStore; tests/launch_torchrun_multinode.bats has real
agents on several nodes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from distributed import peers
from distributed.accounts import Accounts
from distributed.peers import End, NotMet, Peers

Join = Callable[..., Peers]
PATIENCE = 20.0  # seconds that a test waits for what should come at once


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def join(store: TCPStore) -> Iterator[Join]:
    """A function by which a node joins a run of 3."""
    joined = []

    def join(rank: int, size: int = 3, names: Sequence[str] = (), **card: str) -> Peers:
        joined.append(Peers(store, rank, size, {"node": f"node{rank + 1}", "PyTorch": "2.13.0", **card}, names))
        return joined[-1]

    yield join
    for one in joined:
        one.close()


def at_once(*calls: Callable[[], object]) -> list[Future[object]]:
    """Call them all in threads of their own, and wait for their ends."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def ignore(_: str) -> None:
    pass


def met(join: Join) -> list[Peers]:
    all_three = [join(rank) for rank in range(3)]
    for future in at_once(*(lambda one=one: one.meet(PATIENCE, ignore) for one in all_three)):
        future.result()
    return all_three


def comes(what: Callable[[], object]) -> bool:
    """Whether it becomes true in time."""
    tick = threading.Event()
    return any(what() or tick.wait(0.01) for _ in range(int(PATIENCE * 100)))


def test_all_nodes_meet_and_know_each_others_names(join: Join) -> None:
    for one in met(join):
        assert {rank: card["node"] for rank, card in one.cards.items()} == {0: "node1", 1: "node2", 2: "node3"}


def test_who_waits_says_for_whom_and_gives_up(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TELL", 0.1)
    said: list[str] = []
    first = join(0, names=["ada", "bob", "eve"])
    join(2)
    with pytest.raises(NotMet, match="waiting for bob: gave up after 1 s") as unmet:
        first.meet(1.0, said.append)
    assert unmet.value.exit_code == 124
    assert said[-1].startswith("2 of 3 nodes joined, waiting for bob, ")


def test_every_node_says_who_is_missing_but_where_one_hears_them_all_the_first_alone(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TELL", 0.1)
    join(0)
    said: dict[str, list[str]] = {"by hand": [], "from one place": []}
    for how, names in (("by hand", ()), ("from one place", ("ada", "bob", "eve"))):
        one = join(1 if how == "by hand" else 2, names=names)
        with pytest.raises(NotMet):
            one.meet(1.0, said[how].append)
    assert said["by hand"][-1].startswith("2 of 3 nodes joined, waiting for node rank 2, ")
    assert said["from one place"] == []


def test_a_node_that_does_not_fit_ends_the_meeting_everywhere_with_both_values(join: Join) -> None:
    first, odd = join(0), join(1, PyTorch="2.12.0")
    for future in at_once(lambda: first.meet(PATIENCE, ignore), lambda: odd.meet(PATIENCE, ignore)):
        with pytest.raises(NotMet, match=r"node2: PyTorch 2.12.0, but 2.13.0 on node1: make them the same") as unmet:
            future.result()
        assert unmet.value.exit_code == 69


def test_two_nodes_of_one_rank_are_refused(join: Join) -> None:
    first, one = join(0), join(1)
    assert comes(lambda: 1 in first.cards)
    again = join(1, node="node9")
    for future in at_once(lambda: first.meet(PATIENCE, ignore), lambda: again.meet(PATIENCE, ignore)):
        with pytest.raises(NotMet, match="node9: NODE_RANK 1 is that of node2 already"):
            future.result()
    assert one.end()


def test_the_first_that_cannot_go_on_is_believed_by_all(join: Join) -> None:
    one, two, three = met(join)
    two.tell_end(End("node2", 42, "rank 1 ended with exit code 42"))
    assert comes(lambda: one.end() and three.end())
    three.tell_end(End("node3", 1, "rank 2 lost its connection"))
    assert [peer.end() and peer.end().exit_code for peer in (one, two, three)] == [42] * 3  # type: ignore[union-attr]


def test_what_each_tells_of_the_end_reaches_all(join: Join) -> None:
    one, two, three = met(join)
    told: list[Accounts] = [{f"node_node{number}.json": {"deaths": []}} for number in (1, 2, 3)]
    two.tell_end(End("node2", 1, "rank 1 ended with exit code 1"))
    assert comes(lambda: one.end() and three.end())
    at_once(*(lambda pair=pair: pair[0].last_words(pair[1]) for pair in zip((one, two, three), told, strict=True)))
    assert one.accounts == {1: told[1], 2: told[2]}
    assert three.accounts == {0: told[0], 1: told[1]}


def test_nobody_parts_before_all_are_done(join: Join, store: TCPStore) -> None:
    one, two, three = met(join)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(one.part), pool.submit(two.part)]
        assert comes(lambda: store.check(["muster/done/0", "muster/done/1"]))
        assert not any(future.done() for future in early)
        assert three.part() is None
        assert [future.result() for future in early] == [None, None]


def test_a_failure_after_others_are_done_is_theirs_too(join: Join) -> None:
    one, two, three = met(join)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(one.part), pool.submit(three.part)]
        two.tell_end(End("node2", 7, "rank 1 ended with exit code 7"))
        assert [future.result().exit_code for future in early] == [7, 7]  # type: ignore[union-attr]


def test_a_node_that_falls_silent_is_given_up_by_all(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = met(join)
    monkeypatch.setattr(peers, "LOST", 2.0)
    two.close()
    assert comes(lambda: one.end() and three.end())
    assert one.end() == three.end() == End("node2", 69, "fell silent", lost=True)


def host(place: Connection) -> None:
    """The first node's agent, as far as the others see it."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    first = Peers(store, 0, 2, {"node": "node1"})
    place.send(store.port)
    first.meet(PATIENCE, ignore)
    signal.pause()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_first_node_is_gone_the_others_know(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOST", 2.0)
    place, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=host, args=(theirs,), daemon=True)
    process.start()
    second = Peers(TCPStore("127.0.0.1", place.recv(), None, wait_for_workers=False), 1, 2, {"node": "node2"})
    second.meet(PATIENCE, ignore)
    os.kill(process.pid or 0, how)
    assert comes(second.end)
    assert second.end() == End("node1", 69, "fell silent", lost=True)
    second.last_words({})  # returns, though nobody hears it
    process.kill()
    process.join()


class GoneAtGoodbye:
    """A store whose node leaves with it as soon as it has heard our goodbye."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)

    def set(self, key: str, value: str) -> None:
        self.__getattr__("set")(key, value)
        self.gone = key.startswith("bye/")


def test_who_has_said_goodbye_asks_no_more() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    second = Peers(store, 1, 2, {"node": "n1"})
    second._store = GoneAtGoodbye(second._store)  # type: ignore[assignment]
    PrefixStore("muster", store).set("all done", "true")
    assert second.part() is None
