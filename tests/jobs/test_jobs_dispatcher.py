"""The dispatcher: whatever servers, jobs and people do, each job gets one verdict, and none runs twice at once.

Servers are simulated: what happens there is decided by the test, and each one checks that what it is asked to do was in
the journal before. Guarded at the end of every story: the journal, read again, gives the state that the dispatcher had.
A dispatcher that is killed is in test_jobs_killed.py, with real jobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import dispatcher, journal
from distributed.jobs.base_cache import Cache
from distributed.jobs.dispatcher import Dispatcher, Event, NotStarted, Order, Policy, Refused, Unreachable
from distributed.jobs.job import Job, Options, job_of
from distributed.jobs.journal import Journal
from distributed.jobs.placement import Room, Slot, plan
from distributed.jobs.state import Attempt, JobState, State, judge, listed

SECONDS = 30.0  # for what takes milliseconds on a machine that is not busy
STAYS = None  # an attempt that runs until the test ends it
Outcome = int | None


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TICK", "COOLING", "GPU_LOOK"):
        monkeypatch.setattr(dispatcher, name, 0.01)
    monkeypatch.setattr(dispatcher, "BACKOFF", (0.01,))


# ---------------------------------------------------------------- servers without processes


class Simulated:
    """A server on which an attempt ends as its script says: with an exit code, or when the test wants."""

    def __init__(self, name: str, slots: int = 1, gpus: bool = False, labels: Iterable[str] = ()) -> None:
        self.name, self.watches_gpus, self.queues_dependents = name, gpus, False
        places = tuple(Slot(index, index if gpus else None) for index in range(slots))
        self.room = Room(name, places, frozenset(labels))
        self.script: Callable[[Order], Outcome] = lambda order: 0
        self.reachable, self.refusal = True, ""
        self.attempts: dict[str, dict[str, Any]] = {}  # what is there
        self.orders: list[Order] = []
        self.stops: list[tuple[str, bool]] = []
        self.brought: list[str] = []
        self.sent: list[str] = []
        self.bases: list[str] = []  # digests of base models that were asked for
        self.removed: list[str] = []  # output directories
        self.bring_fails: list[Exception] = []  # one a call
        self.obeys = True  # a request to stop
        self.looks = 0  # at the GPUs
        self.used: dict[int, int] = {}  # memory that other people use of GPUs, MiB
        self.story: Story | None = None
        self._lost: asyncio.Future[str] | None = None
        self._post: Callable[[Event], None] = lambda event: None

    # ---- what the test does

    def cut(self, reason: str = "cable") -> None:
        """No connection until mend()."""
        self.reachable = False
        if self._lost and not self._lost.done():
            self._lost.set_result(reason)

    def mend(self) -> None:
        self.reachable = True

    def end(self, attempt: str, code: int | None = 0, **facts: Any) -> None:
        """An attempt ends there, seen or not."""
        begun = self.attempts[attempt]["started"]
        found = {"state": "ended", "code": code, "started": begun, "ended": begun + 60.0, "lines": [], "metrics": {}}
        self.attempts[attempt] = found | facts
        if self._is_connected:
            self._post(Event("ended", self.name, {"attempt": attempt, **self.attempts[attempt]}))

    def running(self) -> list[str]:
        return [name for name, found in self.attempts.items() if found["state"] == "running"]

    @property
    def _is_connected(self) -> bool:
        return self.reachable and self._lost is not None and not self._lost.done()

    def _call(self) -> None:
        if not self._is_connected:
            raise Unreachable("not connected")
        if self.story:
            self.story.notice()

    # ---- dispatcher.Server

    async def connect(self, post: Callable[[Event], None]) -> str:
        await asyncio.sleep(0)
        if self.refusal:
            raise Refused(self.refusal)
        if not self.reachable:
            raise Unreachable("no route to host")
        self._post, self._lost = post, asyncio.get_running_loop().create_future()
        return ""

    async def lost(self) -> str:
        assert self._lost
        return await self._lost

    async def look(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        self._call()
        return {name: dict(self.attempts.get(name, {"state": "absent"})) for name in attempts}

    async def start(self, order: Order) -> dict[str, Any]:
        self._call()
        assert self.story
        self.story.check_order(self, order)
        self.orders.append(order)
        outcome = self.script(order)
        self.attempts[order.attempt] = {"state": "running", "pid": 1, "started": 1e9}
        if outcome is not None:
            asyncio.get_running_loop().call_soon(self.end, order.attempt, outcome)
        return dict(self.attempts[order.attempt])

    async def stop(self, attempt: str, kill: bool) -> None:
        self._call()
        self.stops.append((attempt, kill))
        if self.obeys and attempt in self.running():
            self.end(attempt, 137 if kill else 143, asked=True)

    async def bring(self, attempt: Attempt, job: Job) -> None:
        self._call()
        if self.bring_fails:
            raise self.bring_fails.pop(0)
        self.brought.append(attempt.name)

    async def send(self, output: str) -> None:
        self._call()
        self.sent.append(output)

    async def have_base(self, digest: str) -> int:
        self._call()
        self.bases.append(digest)
        return 0

    async def remove_output(self, output: str) -> None:
        self._call()
        self.removed.append(output)

    async def gpus(self) -> list[dict[str, Any]]:
        self._call()
        self.looks += 1
        gpus = [slot.gpu for slot in self.room.slots if slot.gpu is not None]
        return [{"index": gpu, "memory": 80000, "used": self.used.get(gpu, 0)} for gpu in gpus]

    def follow_command(self, attempt: Attempt, once: bool = False) -> list[str]:
        raise NotImplementedError

    async def close(self, finished: bool) -> None:
        if self._lost and not self._lost.done():
            self._lost.set_result("closed")


def refuse_start(reason: str, kind: str = "server") -> Callable[[Order], Outcome]:
    def script(order: Order) -> Outcome:
        raise NotStarted(reason, kind)

    return script


def exits(*codes: Outcome) -> Callable[[Order], Outcome]:
    """One attempt after the other; all further ones succeed."""
    left = list(codes)
    return lambda order: left.pop(0) if left else 0


# ---------------------------------------------------------------- a list and its dispatcher


class Story:
    """One job list over simulated servers, and what happened."""

    def __init__(self, directory: Path, *servers: Simulated, jobs: Sequence[Job] | int = 1, **policy: Any) -> None:
        self.path = directory / "results.journal"
        self.cache = Cache(directory)
        self.servers = list(servers)
        self.jobs = [job(number) for number in range(jobs)] if isinstance(jobs, int) else list(jobs)
        self.policy = Policy(**policy)
        self.said: list[str] = []
        self._noticed = asyncio.Event()
        for server in servers:
            server.story = self

    def notice(self) -> None:
        self._noticed.set()

    def _say(self, line: str) -> None:
        self.said.append(line)
        self.notice()

    async def __aenter__(self) -> Story:
        """Begin the list, or go on with it."""
        for server in self.servers:
            server.room = Room(server.name, server.room.slots, server.room.labels)
        self.journal = Journal.open(self.path)
        self.state = State.of(self.journal.records)
        record = self.journal.add("list", list=self.state.id or "abc", jobs=listed(self.jobs))
        self.state.apply(record)
        self.journal.commit()
        self.dispatcher = Dispatcher(
            self.journal, self.state, self.jobs, self.servers, self.policy, say=self._say, changed=self.notice,
            cache=self.cache,
        )  # fmt: skip
        self.task = asyncio.ensure_future(self.dispatcher.run())
        self.task.add_done_callback(lambda _: self.notice())
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self.task.done():
            self.dispatcher.interrupt("the test ends")
        await asyncio.wait_for(self.task, SECONDS)
        self.journal.close()
        if error[0] is None:
            assert facts_of(State.of(journal.read(self.path)[0])) == facts_of(self.state)

    async def until(self, condition: Callable[[], object]) -> None:
        """Until it is so. It must become so by an event of this story."""
        end = asyncio.get_running_loop().time() + SECONDS
        while not condition():
            assert not self.task.done() or self.task.exception() is None, self.task.exception()
            left = end - asyncio.get_running_loop().time()
            assert left > 0, (self.said, self.states())
            try:
                await asyncio.wait_for(self._noticed.wait(), min(left, 0.05))
            except asyncio.TimeoutError:
                continue
            self._noticed.clear()

    async def over(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), SECONDS)

    def check_order(self, server: Simulated, order: Order) -> None:
        """It is written down, nobody was ordered this attempt before, and its slots are free."""
        records = journal.read(self.path)[0]
        assert [each for each in records if each["event"] == "start" and each["attempt"] == order.attempt]
        assert not [each for each in self.servers if order.attempt in [known.attempt for known in each.orders]]
        busy = {slot for each in server.orders if each.attempt in server.running() for slot in each.slots}
        assert not busy & set(order.slots), "a slot is used twice"

    def of(self, number: int = 0) -> JobState:
        return self.state.jobs[self.jobs[number].id]

    def states(self) -> list[str]:
        return [each.state for each in self.state.jobs.values()]

    def failures(self, number: int = 0) -> list[str]:
        return [attempt.failure for attempt in self.of(number).attempts]

    def ask(self, event: str, *words: str) -> None:
        """As another process does."""
        journal.request(self.path, event, words)


def facts_of(state: State) -> dict[str, Any]:
    """All that is in it; what a running job reports of its progress is not in the journal."""
    jobs = {name: dataclasses.asdict(each) | {"metrics": {}} for name, each in state.jobs.items()}
    return dict(vars(state)) | {"jobs": jobs, "open": sorted(state.open), "trainers": sorted(state.trainers)}


def job(number: int, **options: Any) -> Job:
    return job_of({"n": number}, Options(**options))


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


# ---------------------------------------------------------------- jobs that succeed, fail, or are not started


def test_a_list_of_jobs_is_done_and_their_results_are_copied(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one", 2), Simulated("two")
        async with Story(tmp_path, one, two, jobs=7) as told:
            await told.over()
        assert told.states() == ["done"] * 7
        assert sorted(one.brought + two.brought) == sorted(f"{job.id}.1" for job in told.jobs)
        assert all(len(each.job.settings) == 1 and len(each.slots) == 1 for each in one.orders)
        assert len(told.of().attempts) == 1
        assert told.of().attempts[0].seconds == 60.0

    play(story())


def test_a_job_gets_its_device_and_its_arguments(tmp_path: Path) -> None:
    async def story() -> None:
        server = Simulated("one", 3, gpus=True)
        async with Story(tmp_path, server, jobs=[job(1, gpus=2)]) as told:
            await told.over()
        (order,) = server.orders
        assert (order.arguments, order.gpus) == (["--n", "1", "--device", "cuda:0"], [0, 1])
        assert order.title == f"{told.jobs[0].id} (GPU 0,1)"

    play(story())


def test_a_job_that_fails_is_tried_again_on_another_server_with_its_files(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        one.script = two.script = exits(1, 0)
        async with Story(tmp_path, one, two) as told:
            await told.over()
        first, second = told.of().attempts
        assert (told.of().state, first.failure, first.reason) == ("done", "exit code", "exit code 1")
        assert first.server != second.server
        assert {server.name: server.sent for server in (one, two)}[second.server] == [told.jobs[0].output]

    play(story())


def test_a_job_that_fails_is_tried_again_on_its_server_where_there_is_no_other(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one", labels=["big"]), Simulated("two")
        one.script = exits(1, 0)
        async with Story(tmp_path, one, two, jobs=[job(0, labels=("big",))]) as told:
            await told.over()
        assert [attempt.server for attempt in told.of().attempts] == ["one", "one"]
        assert told.states() == ["done"]

    play(story())


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_a_job_that_goes_on_failing_has_failed_after_its_retries(tmp_path: Path, retries: int, attempts: int) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = lambda order: 3
        async with Story(tmp_path, one, jobs=[job(0, retries=retries)]) as told:
            await told.over()
        assert (told.states(), told.failures()) == (["failed"], ["exit code"] * attempts)
        assert told.of().reason == f"attempt {attempts} on one: exit code 3"
        assert len(one.brought) == attempts  # a failed one has files too

    play(story())


def test_a_job_that_no_server_would_start_fails_and_the_others_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        bad = job(0, retries=3)
        one.script = lambda order: refuse_start("the directory is taken", "job")(order) if order.job == bad else 0
        async with Story(tmp_path, one, jobs=[bad, job(1)]) as told:
            await told.over()
        assert (told.states(), told.failures()) == (["failed", "done"], ["refused"])
        assert told.of().attempts[0].reason == "the directory is taken"
        assert told.dispatcher.links["one"].strikes == 0

    play(story())


def test_a_server_that_does_not_start_jobs_gets_no_more_and_what_runs_there_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one", 2), Simulated("two", 0)
        two.reachable = False
        one.script = lambda order: STAYS
        async with Story(tmp_path, one, two, jobs=4, lost_after=0.3) as told:
            await told.until(lambda: len(one.running()) == 2)
            one.script = refuse_start("No space left on device")
            one.end(one.running()[0])
            await told.until(lambda: one.name in told.state.paused or not told.dispatcher.links["one"].usable)
            await told.until(lambda: told.state.counts["done"] == 1)
            since = told.dispatcher.links["one"].since
            await told.until(lambda: asyncio.get_running_loop().time() - since > 0.6)  # longer than lost_after
            one.end(one.running()[0])
            await told.until(lambda: told.state.counts["done"] == 2)
        assert told.states().count("waiting") == 2
        assert [each.failure for known in told.state.jobs.values() for each in known.attempts] == ["", ""]
        assert len(one.brought) == 2

    play(story())


def test_a_list_that_no_server_can_take_is_paused(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        one.refusal, two.refusal = "workdir: no such directory", "no Python"
        async with Story(tmp_path, one, two) as told:
            await told.over()
        assert told.states() == ["waiting"]
        assert told.state.paused == "no server can be used for the jobs that wait; see the reasons above"
        assert "one: not used: workdir: no such directory" in told.said

    play(story())


def test_a_job_whose_directory_another_attempt_writes_to_waits_and_its_server_gets_others(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        first = job(0, retries=0)
        refusals = [refuse_start("another attempt writes there", "busy")] * 9
        one.script = lambda order: refusals.pop()(order) if order.job == first and refusals else 0
        async with Story(tmp_path, one, jobs=[first, job(1)]) as told:
            await told.over()
        assert (told.states(), told.failures()) == (["done", "done"], [""])
        assert told.dispatcher.links["one"].strikes == 0
        assert sum("another attempt writes there" in line for line in told.said) == 1

    play(story())


def test_a_job_that_waits_for_another_attempt_can_be_cancelled(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = refuse_start("another attempt writes there", "busy")
        async with Story(tmp_path, one) as told:
            await told.until(lambda: any("another attempt writes there" in line for line in told.said))
            told.ask("cancel", told.jobs[0].id)
            await told.over()
        assert told.states() == ["cancelled"]

    play(story())


def test_jobs_that_say_nothing_start_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """As if they took as long as the others say on average."""

    async def story() -> None:
        one = Simulated("one")
        said = (None, 10.0, 2.0, None)
        jobs = [job(number, expected_seconds=seconds) for number, seconds in enumerate(said)]
        async with Story(tmp_path, one, jobs=jobs) as told:
            await told.over()
        room = Room("one", one.room.slots, open=True)
        planned = plan(jobs, {"one": room}, lambda each: each.options.expected_seconds or 6.0)
        assert [each.job.id for each in one.orders] == [each[1] for each in planned]
        assert [each.job for each in one.orders] == [jobs[number] for number in (1, 0, 3, 2)]

    play(story())


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        ({"code": 0}, ("", "")),
        ({"code": 1, "lines": ["Traceback", "ValueError: x", ""]}, ("exit code", "exit code 1: ValueError: x")),
        ({"code": 137}, ("signal", "ended by SIGKILL; the kernel does that when memory is short (dmesg shows it)")),
        ({"code": 139}, ("signal", "ended by SIGSEGV")),
        ({"code": 255}, ("exit code", "exit code 255")),
        ({"code": 127, "lines": ["train.py: not found"]}, ("exit code", "exit code 127: train.py: not found")),
        ({"code": 1, "lines": ["torch.OutOfMemoryError: CUDA out of memory. Tried", "x"]},
         ("out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried")),
        ({"code": 143, "cause": "timeout", "message": "the command has run for 5 s (--timeout)"},
         ("timeout", "the command has run for 5 s (_timeout)")),
        ({"code": 0, "cause": "timeout", "message": "the command has run for 5 s (--timeout)"},
         ("timeout", "the command has run for 5 s (_timeout)")),
        ({"code": 137, "cause": "killed", "message": "process 7 was killed"},
         ("supervisor killed", "process 7 was killed")),
        ({"code": 137, "cause": "rebooted"}, ("server restarted", "the server was restarted while the job ran")),
        ({"code": None}, ("exit code", "exit code None")),
    ],
)  # fmt: skip
def test_how_an_attempt_ended_is_one_failure_with_one_reason(end: dict[str, Any], verdict: tuple[str, str]) -> None:
    assert judge(end, cancelled=False) == verdict


def test_what_ends_after_a_request_to_cancel_is_cancelled_unless_it_had_succeeded() -> None:
    assert judge({"code": 143}, cancelled=True) == ("cancelled", "cancelled on request")
    assert judge({"code": 0}, cancelled=True) == ("", "")
    assert judge({"code": 0, "asked": True}, cancelled=True) == ("cancelled", "cancelled on request")


def test_what_is_the_servers_fault_does_not_count_against_the_retries_of_a_job(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        causes = ["killed", "rebooted", "killed"]
        async with Story(tmp_path, one, jobs=[job(0, retries=0)]) as told:
            one.script = lambda order: STAYS
            for cause in causes:
                await told.until(one.running)
                one.end(one.running()[0], 137, cause=cause)
            await told.until(one.running)
            one.end(one.running()[0])
            await told.over()
        assert told.failures() == ["supervisor killed", "server restarted", "supervisor killed", ""]
        assert told.states() == ["done"]

    play(story())


def test_a_job_that_takes_server_after_server_down_has_failed(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = lambda order: STAYS
        async with Story(tmp_path, one, jobs=[job(0, retries=0)]) as told:
            for _ in range(5):
                await told.until(one.running)
                one.end(one.running()[0], 137, cause="killed")
            await told.over()
        assert (told.states(), len(told.failures())) == (["failed"], 5)

    play(story())


# ---------------------------------------------------------------- connections


def test_a_connection_that_is_lost_means_unknown_and_the_job_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        one.script = exits(STAYS, STAYS)
        async with Story(tmp_path, one, jobs=3) as told:
            await told.until(lambda: len(one.running()) == 2)
            stays, ends = one.running()
            one.cut()
            await told.until(lambda: told.dispatcher.links["one"].state == "unreachable")
            one.end(ends)  # nobody sees it
            assert told.states().count("running") == 2
            one.mend()
            await told.until(lambda: told.state.counts["done"] == 2)  # the one that ended, and the one that waited
            assert told.states().count("running") == 1
            one.end(stays)
            await told.over()
        assert told.states() == ["done"] * 3
        assert all(len(known.attempts) == 1 for known in told.state.jobs.values())

    play(story())


def test_a_start_that_was_lost_with_the_connection_is_asked_for_before_it_is_repeated(tmp_path: Path) -> None:
    class Deaf(Simulated):
        """The connection is lost while it starts a job: before, or after it has."""

        before = True

        async def start(self, order: Order) -> dict[str, Any]:
            if len(self.orders) < 1 and not self.before:
                await super().start(order)
            if self.reachable and not self.story.lost:  # type: ignore[union-attr]
                self.story.lost = True  # type: ignore[union-attr]
                self.cut()
                self.mend()
                raise Unreachable("cable")
            return await super().start(order)

    async def story(before: bool) -> tuple[list[str], int]:
        one = Deaf("one")
        one.before = before
        told = Story(tmp_path / str(before), one)
        told.path.parent.mkdir()
        told.lost = False  # type: ignore[attr-defined]
        async with told:
            await told.over()
        return [each.name for each in told.of().attempts], len(one.orders)

    names, orders = asyncio.run(story(before=False))
    assert (len(names), names[0].endswith(".1"), orders) == (1, True, 1)
    names, orders = asyncio.run(story(before=True))
    assert (len(names), names[0].endswith(".2"), orders) == (1, True, 1)  # no number twice


def test_a_start_that_takes_longer_than_its_connection_is_not_begun_twice(tmp_path: Path) -> None:
    class Slow(Simulated):
        go: asyncio.Event

        async def send(self, output: str) -> None:
            await super().send(output)
            await self.go.wait()

    async def story() -> None:
        one, two = Simulated("one"), Slow("two")
        one.script, two.script, two.go = exits(1), exits(STAYS), asyncio.Event()
        two.reachable = False
        async with Story(tmp_path, one, two) as told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].failure)
            one.refusal = "no more"
            one.cut()
            two.mend()
            await told.until(lambda: two.sent)
            connections = told.said.count("two: connected")
            two.cut()
            two.mend()
            await told.until(lambda: told.said.count("two: connected") > connections)
            two.go.set()
            await told.until(two.running)
            two.end(two.running()[0])
            await told.over()
        assert [order.attempt for order in two.orders] == [told.of().attempts[-1].name]
        assert told.states() == ["done"]

    play(story())


def lost_attempt(one: Simulated, two: Simulated) -> Callable[[Story], Coroutine[Any, Any, str]]:
    """A job runs on `one`, which is then not there for too long: it runs on `two`."""

    async def story(told: Story) -> str:
        one.script, two.reachable = exits(STAYS), False
        await told.until(lambda: one.running())
        (name,) = one.running()
        two.mend()
        one.cut()
        await told.until(lambda: told.of().state == "done")
        return name

    return story


def test_after_too_long_without_a_connection_a_job_runs_elsewhere(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        async with Story(tmp_path, one, two, jobs=[job(0, retries=0)], lost_after=0.05) as told:
            await lost_attempt(one, two)(told)
            await told.over()
        lost, done = told.of().attempts
        assert (lost.state, lost.failure, lost.server, done.server) == ("lost", "server lost", "one", "two")
        assert lost.reason.startswith("one could not be reached for ")
        assert told.states() == ["done"]

    play(story())


@pytest.mark.parametrize("resumed", [False, True])
def test_an_attempt_that_was_given_up_is_stopped_before_its_slot_is_used_again(tmp_path: Path, resumed: bool) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        one.obeys = False
        told = Story(tmp_path, one, two, jobs=[job(0, retries=0), job(1, labels=("one",))], lost_after=0.05)
        one.room.labels = frozenset({"one"})
        two.room.labels = frozenset({"two"})
        first = job(0, retries=0)
        assert told.jobs[0] == first
        async with told:
            one.script, two.reachable = exits(STAYS), False
            await told.until(lambda: one.running())
            (name,) = one.running()
            two.mend()
            one.cut()
            await told.until(lambda: told.of().state == "done")
            if not resumed:
                one.mend()
                await told.until(lambda: one.stops == [(name, True)])
                assert told.of(1).state == "waiting"  # its slot is not free; check_order() would say so, too
                one.end(name, 137)
                await told.over()
        if resumed:
            one.mend()
            async with told:
                await told.until(lambda: one.stops == [(name, True)])
                assert told.of(1).state == "waiting"
                one.end(name, 137)
                await told.over()
        assert told.states() == ["done", "done"]
        assert told.of().attempts[0].state == "ended"
        assert told.of().attempts[0].failure == "server lost"

    play(story())


@pytest.mark.parametrize("back", [True, False])
def test_what_was_given_up_is_ended_by_a_later_request_to_cancel_when_its_server_is_back(
    tmp_path: Path, back: bool
) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        async with Story(tmp_path, one, two, lost_after=0.05) as told:
            name = await lost_attempt(one, two)(told)
            await told.over()
        assert one.running() == [name]
        if back:
            one.mend()
        async with Story(tmp_path, one, two, drain=True) as told:
            await told.over()
        assert one.running() == ([] if back else [name])
        assert told.of().attempts[0].state == ("ended" if back else "lost")
        assert told.states() == ["done"]

    play(story())


def test_results_on_a_server_that_is_lost_are_made_anew_elsewhere(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        one.bring_fails = [Unreachable("cable")] * 1000
        two.reachable, two.script = False, exits(STAYS)
        async with Story(tmp_path, one, two, lost_after=0.1) as told:
            await told.until(lambda: told.of().state == "ending")
            two.mend()
            one.cut()
            await told.until(two.running)
            one.bring_fails = []
            one.mend()
            await told.until(lambda: told.dispatcher.links["one"].state == "ready")
            await told.until(lambda: told.of().attempts[0].state == "ended")  # nothing of it is on `one`
            await asyncio.sleep(1.1)  # longer than it takes to look whether results can be copied
            assert told.states() == ["running"]
            two.end(two.running()[0])
            await told.over()
        assert told.states() == ["done"]
        assert told.failures() == ["server lost", ""]
        assert (one.brought, two.brought) == ([], [f"{told.jobs[0].id}.2"])

    play(story())


def test_results_that_cannot_be_copied_are_copied_later(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.bring_fails = [OSError("No space left on device"), OSError("No space left on device"), Unreachable("x")]
        async with Story(tmp_path, one) as told:
            await told.over()
        assert (told.states(), one.brought) == (["done"], [f"{told.jobs[0].id}.1"])
        assert len([line for line in told.said if "cannot be copied: No space left on device" in line]) == 1

    play(story())


def test_files_of_an_earlier_attempt_that_cannot_be_sent_let_the_job_start_elsewhere_or_later(tmp_path: Path) -> None:
    class Full(Simulated):
        failing = 2

        async def send(self, output: str) -> None:
            await super().send(output)
            self.failing -= 1
            if self.failing >= 0:
                raise Unreachable("rsync: connection unexpectedly closed (code 12)")

    async def story() -> None:
        one, two = Simulated("one"), Full("two")
        one.script, two.reachable = exits(1), False
        async with Story(tmp_path, one, two) as told:
            await told.until(lambda: one.brought)
            one.refusal = "no more"
            one.cut()
            one.mend()
            two.mend()
            await told.over()
        assert told.states() == ["done"]
        assert len(two.orders) == 1
        assert len(two.sent) == 3

    play(story())


def test_jobs_on_a_server_that_is_no_longer_listed_run_elsewhere(tmp_path: Path) -> None:
    async def story() -> None:
        one, two = Simulated("one"), Simulated("two")
        one.script = exits(STAYS)
        async with Story(tmp_path, one) as told:
            await told.until(lambda: one.running())
        async with Story(tmp_path, two, lost_after=0.05) as told:
            await told.over()
        assert told.states() == ["done"]
        assert [attempt.server for attempt in told.of().attempts] == ["one", "two"]

    play(story())


# ---------------------------------------------------------------- GPUs


def test_a_gpu_that_somebody_else_uses_is_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2, gpus=True)
        one.used = {1: 5000}
        one.script = lambda order: STAYS
        async with Story(tmp_path, one, jobs=2) as told:
            await told.until(lambda: one.running() and one.room.blocked)
            assert [list(order.gpus) for order in one.orders] == [[0]]
            one.used = {}
            await told.until(lambda: len(one.running()) == 2)
            for name in one.running():
                one.end(name)
            await told.over()
        assert "one: GPU 1: used by somebody else; waiting for it" in told.said
        assert "one: GPU 1: free again" in told.said

    play(story())


def test_a_gpu_that_a_job_of_the_list_uses_is_not_taken_for_somebody_elses(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 1, gpus=True)
        one.script = exits(STAYS)
        async with Story(tmp_path, one, jobs=2) as told:
            await told.until(one.running)
            one.used = {0: 70000}
            looks = one.looks
            await told.until(lambda: one.looks > looks + 2)
            one.used = {}
            one.end(one.running()[0])
            await told.over()
        assert told.states() == ["done", "done"]
        assert not [line for line in told.said if "somebody else" in line]

    play(story())


def test_nothing_starts_before_it_is_known_who_uses_the_gpus(tmp_path: Path) -> None:
    class Slow(Simulated):
        go: asyncio.Event

        async def gpus(self) -> list[dict[str, Any]]:
            await self.go.wait()
            return await super().gpus()

    async def story() -> None:
        one = Slow("one", 1, gpus=True)
        one.go = asyncio.Event()
        async with Story(tmp_path, one) as told:
            await told.until(lambda: "one: connected" in told.said)
            assert told.states() == ["waiting"]
            told.ask("cancel", "zzz")  # something else that the dispatcher does before it starts jobs
            await told.until(lambda: told.state.answered)
            assert told.states() == ["waiting"]
            one.go.set()
            await told.over()
        assert told.states() == ["done"]

    play(story())


def test_how_much_of_a_gpu_must_be_free_is_the_persons_choice(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2, gpus=True)
        one.used = {0: 79000, 1: 5000}
        async with Story(tmp_path, one, jobs=3, gpu_free_mib=70000) as told:
            await told.over()
        assert [list(order.gpus) for order in one.orders] == [[1]] * 3

    play(story())


# ---------------------------------------------------------------- failures that stop the list


def test_five_early_failures_in_a_row_pause_the_list(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        told = Story(tmp_path, one, jobs=[job(number, retries=0) for number in range(9)])

        def script(order: Order) -> Outcome:
            asyncio.get_running_loop().call_soon(lambda: one.end(order.attempt, 1, ended=1e9 + 1))
            return STAYS

        one.script = script
        async with told:
            await told.over()
        assert told.states() == ["failed"] * 5 + ["waiting"] * 4
        assert told.state.paused.startswith("5 attempts in a row failed within 30 s, the last: exit code 1; mend")
        one.script = exits()
        async with told:  # to resume is to say that it goes on
            await told.over()
        assert told.states() == ["failed"] * 5 + ["done"] * 4

    play(story())


def test_late_failures_and_failures_between_successes_do_not_pause_the_list(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = lambda order: 1  # after 60 s
        async with Story(tmp_path, one, jobs=[job(number, retries=0) for number in range(7)]) as told:
            await told.over()
        assert told.states() == ["failed"] * 7

    play(story())


def test_max_failures_pauses_the_list_and_lets_running_jobs_end(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        one.script = exits(STAYS, 1, 1, STAYS)
        jobs = [job(0)] + [job(number, retries=0) for number in range(1, 6)]
        async with Story(tmp_path, one, jobs=jobs, max_failures=2) as told:
            await told.until(lambda: told.state.paused)
            assert told.of().state == "running"
            while one.running():
                one.end(one.running()[0])
            await told.over()
        assert told.states() == ["done", "failed", "failed", "waiting", "waiting", "waiting"]
        assert told.state.paused == "--max-failures 2: 2 jobs failed"

    play(story())


def test_fail_fast_cancels_everything_and_a_resumed_list_knows_that(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        one.script = exits(STAYS, 1, STAYS)
        jobs = [job(0), job(1, retries=0), job(2), job(3)]
        async with Story(tmp_path, one, jobs=jobs, fail_fast=True) as told:
            await told.over()
        assert told.states() == ["cancelled", "failed", "cancelled", "cancelled"]
        assert one.stops == [(f"{told.jobs[0].id}.1", False)]
        assert len(one.orders) == 2
        first = [record for record in journal.read(told.path)[0] if record["event"] == "asked"]
        assert [(record["what"], len(record["jobs"])) for record in first] == [("cancel", 3)]

    play(story())


def test_fail_fast_cancels_also_a_job_that_would_be_tried_again_when_its_results_are_here(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        one.bring_fails = [OSError("full")] * 1000
        told = Story(tmp_path, one, jobs=[job(0, retries=0), job(1)], fail_fast=True)
        one.script = lambda order: STAYS
        async with told:
            await told.until(lambda: [each.state for each in told.state.open.values()] == ["running"] * 2)
            one.end(f"{told.jobs[1].id}.1", 1)
            await told.until(lambda: told.of(1).state == "ending")
            one.end(f"{told.jobs[0].id}.1", 1)
            await told.until(lambda: told.state.paused)
            one.bring_fails = []
            await told.over()
        assert told.states() == ["failed", "cancelled"]

    play(story())


# ---------------------------------------------------------------- cancel and retry


def test_a_job_that_waits_is_cancelled_before_it_starts(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS)
        async with Story(tmp_path, one, jobs=2) as told:
            await told.until(lambda: one.running())
            told.ask("cancel", told.jobs[1].id)
            await told.until(lambda: told.of(1).state == "cancelled")
            one.end(one.running()[0])
            await told.over()
        assert (told.states(), len(one.orders)) == (["done", "cancelled"], 1)

    play(story())


def test_a_job_that_runs_is_cancelled_with_the_proof_that_nothing_is_left(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one", 1, gpus=True)
        one.script = exits(STAYS)
        async with Story(tmp_path, one) as told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].state == "running")
            told.ask("cancel", "all")
            await told.over()
        assert (told.states(), told.failures()) == (["cancelled"], ["cancelled"])
        assert told.of().reason == "cancelled on request; no process of it is left; GPU 0: 0 MiB in use"
        assert one.brought == [f"{told.jobs[0].id}.1"]

    play(story())


def test_a_job_that_is_being_started_is_cancelled_when_it_has(tmp_path: Path) -> None:
    class Slow(Simulated):
        go: asyncio.Event

        async def start(self, order: Order) -> dict[str, Any]:
            found = await super().start(order)
            await self.go.wait()
            return found

    async def story() -> None:
        one = Slow("one")
        one.go, one.script = asyncio.Event(), exits(STAYS)
        async with Story(tmp_path, one) as told:
            await told.until(lambda: one.orders)
            told.ask("cancel", told.jobs[0].id)
            await told.until(lambda: told.of().cancel)
            assert one.stops == []
            one.go.set()
            await told.over()
        assert told.states() == ["cancelled"]
        assert one.stops == [(f"{told.jobs[0].id}.1", False)]

    play(story())


def test_a_job_on_a_server_that_cannot_be_reached_is_cancelled_when_it_can(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS)
        async with Story(tmp_path, one) as told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].state == "running")
            one.cut()
            await told.until(lambda: told.dispatcher.links["one"].state == "unreachable")
            told.ask("cancel", told.jobs[0].id)
            await told.until(lambda: told.of().cancel)
            one.mend()
            await told.over()
        assert (told.states(), one.running()) == (["cancelled"], [])

    play(story())


def test_a_job_that_was_cancelled_while_its_start_was_lost_is_not_started_again(tmp_path: Path) -> None:
    class Lost(Simulated):
        async def start(self, order: Order) -> dict[str, Any]:
            self.cut()
            raise Unreachable("cable")

    async def story() -> None:
        one = Lost("one")
        async with Story(tmp_path, one) as told:
            await told.until(lambda: told.dispatcher.links["one"].state == "unreachable" and told.of().attempts)
            told.ask("cancel", told.jobs[0].id)
            await told.until(lambda: told.of().cancel)
            one.mend()
            await told.over()
        assert (told.states(), one.attempts) == (["cancelled"], {})
        assert [each["event"] for each in journal.read(told.path)[0]].count("start") == 1

    play(story())


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (1, "cancelled")])
def test_a_job_whose_results_are_being_copied_is_not_tried_again_once_it_is_cancelled(
    tmp_path: Path, code: int, state: str
) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script, one.bring_fails = exits(code), [OSError("full")] * 3
        async with Story(tmp_path, one) as told:
            await told.until(lambda: told.of().state == "ending")
            told.ask("cancel", told.jobs[0].id)
            await told.over()
        assert (told.states(), len(one.orders)) == ([state], 1)

    play(story())


@pytest.mark.parametrize("code", [0, 1])
def test_to_cancel_a_job_that_has_ended_changes_nothing_and_does_not_forbid_to_retry_it(
    tmp_path: Path, code: int
) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        told = Story(tmp_path, one, jobs=[job(0, retries=0), job(1)])
        one.script = lambda order: code if order.job == told.jobs[0] else STAYS
        async with told:
            await told.until(lambda: told.of().state == ("failed" if code else "done"))
            told.ask("cancel", told.jobs[0].id)
            await told.until(lambda: len(told.state.answered) == 1)
            one.script = lambda order: STAYS
            told.ask("retry", told.jobs[0].id)
            await told.until(lambda: len(told.state.answered) == 2 and len(one.running()) == (2 if code else 1))
            await told.until(lambda: all(each.state == "running" for each in told.state.open.values()))
            for name in one.running():
                one.end(name)
            await told.over()
        assert (told.states(), one.stops) == (["done", "done"], [])
        assert told.failures() == (["exit code", ""] if code else [""])

    play(story())


def test_a_job_that_is_tried_again_on_request_has_all_its_retries(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(1, 1, 1)
        told = Story(tmp_path, one)
        async with told:
            await told.over()
        assert (told.states(), len(told.failures())) == (["failed"], 2)
        told.ask("retry", "failed")
        async with told:
            await told.over()
        assert (told.states(), told.failures()) == (["done"], ["exit code"] * 3 + [""])

    play(story())


def test_a_request_that_was_answered_is_not_answered_again_by_the_next_dispatcher(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS, STAYS)
        told = Story(tmp_path, one)
        async with told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].state == "running")
            told.ask("cancel", "all")
            await told.over()
        told.ask("retry", told.jobs[0].id)
        async with told:
            await told.until(lambda: told.of().attempts[-1].number == 2 and told.of().attempts[-1].state == "running")
        async with told:
            await told.until(lambda: "one: connected" in told.said[-2:])
            one.end(one.running()[0])
            await told.over()
        assert (told.states(), told.failures()) == (["done"], ["cancelled", ""])
        asked = [record["what"] for record in journal.read(told.path)[0] if record["event"] == "asked"]
        assert asked == ["cancel", "retry"]

    play(story())


def test_a_request_that_names_no_job_is_refused_in_a_line(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS)
        async with Story(tmp_path, one) as told:
            await told.until(lambda: one.running())
            told.ask("cancel", "zzz")
            await told.until(lambda: told.state.answered)
            one.end(one.running()[0])
            await told.over()
        assert "job zzz: there is no such job in this list; `status` shows all" in told.said
        assert told.states() == ["done"]

    play(story())


# ---------------------------------------------------------------- the disk, the list, the end


def test_nothing_new_starts_while_the_journal_cannot_be_written_and_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        one = Simulated("one", 2)
        one.script = exits(STAYS)
        full = False

        def write(file: int, data: bytes) -> int:
            if full and file == told.journal._file:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written(file, data)

        written = os.write
        async with Story(tmp_path, one, jobs=4) as told:
            await told.until(lambda: len(told.said) >= 4)
            monkeypatch.setattr(os, "write", write)
            full = True
            orders = len(one.orders)
            one.end(one.running()[0])
            await told.until(lambda: told.dispatcher.trouble)
            await told.until(lambda: "nothing new is started until it can be written" in told.said[-1])
            assert len(one.orders) == orders
            full = False
            await told.over()
        assert told.states() == ["done"] * 4
        assert all(len(known.attempts) == 1 for known in told.state.jobs.values())
        assert any(line.endswith(": written again") for line in told.said)

    play(story())


def test_a_start_that_was_given_back_while_the_journal_could_not_be_written_is_not_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS, STAYS)
        full, written = False, os.write

        def write(file: int, data: bytes) -> int:
            if full and file == told.journal._file:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written(file, data)

        async with Story(tmp_path, one, jobs=2) as told:
            await told.until(one.running)
            monkeypatch.setattr(os, "write", write)
            full = True
            one.end(one.running()[0])
            await told.until(lambda: told.of(1).attempts)  # decided, and not yet written down
            one.cut()
            one.mend()
            await told.until(lambda: told.of(1).next_number == 3)  # it was not on the server: decided again
            full = False
            await told.until(one.running)
            assert one.running() == [f"{told.jobs[1].id}.2"]
            one.end(one.running()[0])
            await told.over()
        assert [order.attempt for order in one.orders] == [f"{told.jobs[0].id}.1", f"{told.jobs[1].id}.2"]
        assert told.states() == ["done", "done"]

    play(story())


def test_a_list_that_was_edited_goes_on_with_new_jobs_and_without_those_that_were_removed(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(0, STAYS)
        async with Story(tmp_path, one, jobs=[job(0), job(1), job(2), job(3)]) as told:
            await told.until(lambda: len(one.orders) == 2)
        edited = Story(tmp_path, one, jobs=[job(9), job(3), job(0)])
        async with edited:
            assert edited.of(2).state == "done"
            await edited.until(lambda: one.running())
            one.end(one.running()[0], 1)  # the one that was removed while it ran
            await edited.over()
        states = {each.job.settings["n"]: each.state for each in edited.state.jobs.values()}
        assert states == {9: "done", 3: "done", 0: "done", 1: "failed"}
        assert [order.job.settings["n"] for order in one.orders] == [0, 1, 9, 3]

    play(story())


def test_a_job_that_was_removed_from_the_list_is_not_started_again_and_does_not_keep_it_from_ending(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = lambda order: 1 if order.job.settings["n"] == 0 else STAYS
        async with Story(tmp_path, one, jobs=[job(0, retries=0), job(1)]) as told:
            await told.until(lambda: told.of().state == "failed" and one.running())
        told.ask("retry", told.jobs[0].id)
        edited = Story(tmp_path, one, jobs=[job(2)])
        async with edited:
            await edited.until(lambda: "one: connected" in edited.said)
            one.script = exits()
            one.end(one.running()[0], 137, cause="killed")  # not the fault of the job, which would run again
            await edited.over()
        states = {each.job.settings["n"]: (each.state, each.reason) for each in edited.state.jobs.values()}
        assert states[0] == states[1] == ("cancelled", "no longer in the list")
        assert states[2] == ("done", "")

    play(story())


def test_a_job_that_is_put_back_into_the_list_runs(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(1, STAYS)
        async with Story(tmp_path, one, jobs=[job(0), job(1)]) as told:
            await told.until(lambda: one.running() and told.states() == ["waiting", "running"])  # for a second attempt
            one.end(one.running()[0])
            one.cut()
        for jobs in ([job(1)], [job(0), job(1)]):
            one.mend()
            async with Story(tmp_path, one, jobs=jobs) as told:
                await told.over()
        assert told.states() == ["done", "done"]

    play(story())


def test_an_interrupted_dispatcher_leaves_jobs_running_and_the_next_one_finds_them(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS)
        told = Story(tmp_path, one)
        async with told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].state == "running")
        assert len(one.running()) == 1
        async with told:
            await told.until(lambda: f"one: {told.jobs[0].id} still runs" in told.said)
            one.end(one.running()[0])
            await told.over()
        assert (told.states(), len(one.orders)) == (["done"], 1)

    play(story())


@pytest.mark.parametrize(("before", "after"), [((0, 0), (0,)), ((0, 1), (1,))])
def test_a_gpu_of_a_running_job_stays_taken_when_the_slots_are_numbered_anew(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """Two jobs run when the cluster config is edited: fewer slots on a GPU, or other GPUs."""

    async def story() -> None:
        one = Simulated("one", gpus=True)
        one.room = Room("one", tuple(map(Slot, range(len(before)), before)))
        one.script = exits(STAYS, STAYS)
        told = Story(tmp_path, one, jobs=3)
        async with told:
            await told.until(lambda: told.states() == ["running", "running", "waiting"])
        one.room = Room("one", tuple(map(Slot, range(len(after)), after)))
        beside: list[list[str]] = []

        def script(order: Order) -> Outcome:
            beside.append(one.running())
            return 0

        one.script = script
        async with told:
            first, second = one.running()
            await told.until(lambda: sum(line.endswith("still runs") for line in told.said) == 2)
            one.end(first)
            await told.until(lambda: told.of(0).state == "done")
            one.end(second)
            await told.over()
        assert (told.states(), beside) == (["done"] * 3, [[]])

    play(story())


def test_a_dispatcher_that_drains_cancels_what_was_asked_for_and_starts_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        one = Simulated("one")
        one.script = exits(STAYS)
        told = Story(tmp_path, one, jobs=3)
        async with told:
            await told.until(lambda: told.of().attempts and told.of().attempts[0].state == "running")
        told.ask("cancel", told.jobs[0].id, told.jobs[1].id)
        drained = Story(tmp_path, one, jobs=3, drain=True)
        async with drained:
            await drained.over()
        assert drained.states() == ["cancelled", "cancelled", "waiting"]
        assert (len(one.orders), one.running()) == (1, [])

    play(story())


def test_a_fault_of_the_program_ends_it_with_its_traceback(tmp_path: Path) -> None:
    class Broken(Simulated):
        async def start(self, order: Order) -> dict[str, Any]:
            raise ZeroDivisionError

    async def story() -> None:
        async with Story(tmp_path, Broken("one")) as told:
            await told.over()

    with pytest.raises(ZeroDivisionError):
        play(story())
