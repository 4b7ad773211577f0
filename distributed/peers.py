"""What the agents of one run tell each other: that they are there, that they live, and how they ended.

torchrun's agents meet once, and then know nothing of each other: when a rank dies on one node, the others wait until
their collectives time out, for 10 to 30 minutes. Here each agent says through the store at which they met that it
lives, and the first that cannot go on says so. The others know within a second; a node that falls silent is given up
after LOST seconds. At the end they exchange their accounts of it, so that each can tell whose failure came first.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from distributed.accounts import Accounts

TURN = 0.5  # seconds between two exchanges with the store
QUICK = 0.05  # the same, while they meet and part; a node whose ranks are done may wait long for the others
LOST = 12.0  # seconds of silence after which a node is given up
TELL = 5.0  # seconds between two words about who is missing
LAST_WORDS = 4.0  # seconds in which all nodes give their accounts
CLOSING = 1.0  # seconds for the thread to end
GOODBYE = 2.0  # seconds that the first node waits for the others to go
UNFIT = 69  # exit code: a node cannot be reached, or is not fit
GAVE_UP = 124  # exit code: gave up waiting

Card = Mapping[str, str]  # what a node shows of itself


@dataclass(frozen=True)
class End:
    """The run cannot go on."""

    node: str  # where, or which is lost
    exit_code: int
    reason: str
    lost: bool = False  # the node fell silent: it gives no account any more


class NotMet(Exception):
    """The nodes did not come together. The exit code of it."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Peers:
    """The agents of all nodes, seen from one of them.

    One thread alone speaks with the store, and the agent only with that thread: a store that does not answer any more
    must not keep the agent from ending its workers.
    """

    def __init__(self, store: Store, rank: int, size: int, card: Card, names: Sequence[str] = ()) -> None:
        """rank: of this node, among size nodes. card: its name under "node", and what must be the same on all.

        names: of all nodes, where they are known before they come.
        """
        self.rank, self.size = rank, size
        self.cards: dict[int, Card] = {}  # of the nodes that have joined, as far as told
        self.accounts: dict[int, Accounts] = {}  # of the others, once the run has ended badly
        self._names = dict(enumerate(names))
        self._absent = list(range(size))  # who has not come, by node rank
        self._card = {**card, "process": uuid.uuid4().hex}
        self._store = PrefixStore("muster", store.clone())  # type: ignore[attr-defined]
        self._host = Host(self._store, size) if rank == 0 else None
        self._end: End | None = None
        self._met = self._all_done = self._leaving = self._gone = self._closed = False
        self._heard = time.monotonic()
        self._outbox: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, daemon=True, name="peers")
        self._thread.start()

    # ---------------------------------------------------------------- what the agent asks

    def meet(self, patience: float, say: Callable[[str], None]) -> None:
        """Return when all nodes are there. Raises NotMet after `patience` seconds, or when they do not fit."""
        told = begun = time.monotonic()
        while not self._met:
            now = time.monotonic()
            if now - begun > patience:
                self.tell_end(End(self._card["node"], GAVE_UP, f"{self._missing()}: gave up after {patience:.0f} s"))
            if end := self.end():
                self.leave()
                raise NotMet(f"{end.node}: {end.reason}", end.exit_code)
            if self._absent and (self._host or not self._names) and now - told >= TELL:  # else somebody hears all of us
                told = now
                say(f"{self._missing()}, {now - begun:.0f} s")
            time.sleep(QUICK)

    def end(self) -> End | None:
        """Why the run cannot go on, if it cannot."""
        if self._end is None and time.monotonic() - self._heard > LOST:
            self._end = lost(self.cards, 0)
        return self._end

    def tell_end(self, end: End) -> None:
        """Say that this node cannot go on. The first to say so is believed."""
        self._end = self._end or end
        self._say("end", asdict(end))

    def part(self) -> End | None:
        """All went well here: wait until it has everywhere, or not."""
        self._say(f"done/{self.rank}", True)
        self._leaving = True
        while not self._all_done and self.end() is None:
            time.sleep(QUICK)
        self.leave()
        return self._end

    def last_words(self, accounts: Accounts) -> None:
        """Give this node's accounts of the end, and collect those of the others. Takes LAST_WORDS seconds at most."""
        self._leaving = True
        self._say(f"accounts/{self.rank}", accounts)
        self._wait(lambda: self._living() <= {self.rank, *self.accounts}, LAST_WORDS)
        self._say_goodbye()

    def leave(self, accounts: Accounts | None = None) -> None:
        """Go without waiting for what the others have to tell. Takes GOODBYE seconds at most."""
        self._leaving = True
        self._say(f"accounts/{self.rank}", accounts or {})
        self._say_goodbye()

    def close(self) -> None:
        """Fall silent. A thread that is in the store's code when Python ends would abort the process."""
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSING)

    # ---------------------------------------------------------------- what the thread does

    def _exchange(self) -> None:
        try:
            self._join()
            while not self._closed:
                self._turn()
                self._heard = time.monotonic()
                self._wake.wait(TURN if self._met and not self._leaving else QUICK)
                self._wake.clear()
        except RuntimeError:  # whatever the store raises: its host is gone
            self._end = self._end or lost(self.cards, 0)

    def _join(self) -> None:
        there = json.loads(self._store.compare_set(f"card/{self.rank}", "", json.dumps(self._card)))
        if there != self._card:
            taken = f"NODE_RANK {self.rank} is that of {there['node']} already: each node has its own"
            self._store.compare_set("end", "", json.dumps(asdict(End(self._card["node"], UNFIT, taken))))

    def _turn(self) -> None:
        while not self._outbox.empty():
            self._deliver(*self._outbox.get())
        if self._gone and not self._host:  # the first node may have left with the store when it heard our goodbye
            self._closed = True
            return
        self._store.set(f"pulse/{self.rank}", str(time.monotonic()))
        if self._host:
            self._host.look_around()
            self.cards = self._host.cards
            self._gone = self._leaving and self._host.is_alone(self._living() - {0})
        if not self._met:
            self._absent = ask(self._store, "absent") or []
        if not self._met and (cards := ask(self._store, "cards")):
            self.cards = {int(rank): card for rank, card in cards.items()}
            self._met = True
        self._end = self._end or read_end(self._store)
        self._all_done = self._all_done or bool(ask(self._store, "all done"))
        if self._end and self._leaving:
            self._collect()
        self._closed = self._closed or (not self._host and bool(ask(self._store, "closing")))  # it would only complain

    def _deliver(self, key: str, value: object) -> None:
        if key == "end":
            self._store.compare_set(key, "", json.dumps(value))
        else:
            self._store.set(key, json.dumps(value))
        self._gone = self._gone or (key == f"bye/{self.rank}" and not self._host)

    def _collect(self) -> None:
        for rank in set(self.cards) - {self.rank, *self.accounts}:
            accounts = ask(self._store, f"accounts/{rank}")
            if accounts is not None:
                self.accounts[rank] = accounts

    # ---------------------------------------------------------------- small words

    def _say(self, key: str, value: object) -> None:
        self._outbox.put((key, value))
        self._wake.set()

    def _say_goodbye(self) -> None:
        """The first node, which has the store, goes last."""
        self._say(f"bye/{self.rank}", True)
        self._wait(lambda: self._gone, GOODBYE)
        if self._host and not self._gone:
            self._say("closing", True)
            self._wait(lambda: False, 2 * TURN)
        self.close()

    def _missing(self) -> str:
        missing = [self._names.get(rank, f"node rank {rank}") for rank in self._absent]
        return f"{self.size - len(missing)} of {self.size} nodes joined, waiting for {', '.join(missing)}"

    def _living(self) -> set[int]:
        silent = self._end.node if self._end and self._end.lost else None
        return {rank for rank, card in self.cards.items() if card["node"] != silent}

    def _wait(self, come: Callable[[], bool], patience: float) -> None:
        until = time.monotonic() + patience
        while not (come() or self._closed) and time.monotonic() < until and time.monotonic() - self._heard < LOST:
            time.sleep(QUICK)


class Host:
    """What the first node does for all, as it has the store: sees who comes, who falls silent, and who is done."""

    def __init__(self, store: Store, size: int) -> None:
        self.cards: dict[int, Card] = {}
        self._store, self._size = store, size
        self._pulses: dict[int, tuple[bytes, float]] = {}  # of each node: what it said last, and when that was news

    def look_around(self) -> None:
        """One turn."""
        if len(self.cards) < self._size:
            self._welcome()
        for rank in self._silent_for(LOST):
            self._end_it(lost(self.cards, rank))
        if self._store.check([f"done/{rank}" for rank in range(self._size)]):
            self._store.set("all done", "true")

    def is_alone(self, others: set[int]) -> bool:
        """Whether these have said goodbye."""
        return not others or self._store.check([f"bye/{rank}" for rank in others])

    def _welcome(self) -> None:
        for rank in set(range(self._size)) - set(self.cards):
            if card := ask(self._store, f"card/{rank}"):
                self.cards[rank] = card
                if misfit := self._misfit(card):
                    self._end_it(misfit)
        self._store.set("absent", json.dumps(sorted(set(range(self._size)) - set(self.cards))))
        if len(self.cards) == self._size and not read_end(self._store):
            self._store.set("cards", json.dumps(self.cards))

    def _misfit(self, card: Card) -> End | None:
        """What is not the same there as on the first node."""
        own = self.cards[0]
        odd = [what for what in own if what not in ("node", "process") and card.get(what) != own[what]]
        if not odd:
            return None
        found = ", ".join(f"{what} {card.get(what)}, but {own[what]} on {own['node']}" for what in odd)
        return End(card["node"], UNFIT, f"{found}: make them the same")

    def _silent_for(self, seconds: float) -> list[int]:
        """The nodes whose pulse has not changed for so long."""
        ranks = sorted(set(self.cards) - {0})
        pulses = [self._store.get(f"pulse/{rank}") if self._store.check([f"pulse/{rank}"]) else b"" for rank in ranks]
        now = time.monotonic()
        for rank, pulse in zip(ranks, pulses, strict=True):
            if self._pulses.get(rank, (None, now))[0] != pulse:
                self._pulses[rank] = (pulse, now)
        return [r for r in ranks if now - self._pulses[r][1] > seconds and not self._store.check([f"bye/{r}"])]

    def _end_it(self, end: End) -> None:
        self._store.compare_set("end", "", json.dumps(asdict(end)))


def lost(cards: Mapping[int, Card], rank: int) -> End:
    """The end of a run of which one node is not heard any more."""
    return End(cards[rank]["node"] if rank in cards else f"node rank {rank}", UNFIT, "fell silent", lost=True)


def read_end(store: Store) -> End | None:
    """What was said of the end."""
    told = ask(store, "end")
    return End(**told) if told else None


def ask(store: Store, key: str) -> Any:
    """The value of a key, None when nobody has said it yet."""
    return json.loads(store.get(key)) if store.check([key]) else None
