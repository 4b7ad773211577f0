"""The dispatcher: each job ends in one final state and never runs twice at once, whatever fails.

Servers are simulated; each checks that the requests it gets are in the journal. At the end of every test, the state
read from the journal must equal that of the dispatcher. test_jobs_killed.py kills dispatchers of real jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs.dispatch import connections, endings, events
from distributed.jobs.dispatch.dispatcher import Dispatcher
from distributed.jobs.dispatch.limits import Policy
from distributed.jobs.dispatch.recorder import Recorder, Shown
from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import Journal
from distributed.jobs.journal.state import Attempt, JobState, ListState, classify_end, job_records
from distributed.jobs.lists.job import ALL_GPUS, Job, Options, job_of
from distributed.jobs.schedule.backend import Event, JobServer, NotStarted, ServerLink, ServerUnusable, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.jobs.schedule.placement import Slot, SlotPool, plan

SECONDS = 30.0  # timeout; an idle machine needs milliseconds
UNTIL_ENDED = None  # the outcome of an attempt that runs until the test ends it
Outcome = int | None


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    make_fast(monkeypatch)


def make_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all intervals of dispatchers."""
    for module, name in (
        (events, "POLL_INTERVAL"), (endings, "POLL_INTERVAL"), (connections, "COOLDOWN"), (connections, "GPU_INTERVAL"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 0.01)
    for module in (connections, endings):
        monkeypatch.setattr(module, "RETRY_DELAYS", (0.01,))


# ---------------------------------------------------------------- servers without processes


@dataclasses.dataclass(frozen=True)
class StartRequest:
    """A call of SimulatedServer.start()."""

    attempt: str
    job: Job
    slots: list[int]
    gpus: list[int | str]
    after: str
    needs: Sequence[str]


class SimulatedServer(JobServer):
    """A server on which an attempt ends with the exit code `outcome_of(request)`, or when the test calls end()."""

    def __init__(self, name: str, slots: int = 1, gpus: bool = False, labels: Iterable[str] = ()) -> None:
        self.name, self.watches_gpus, self.queues_dependents = name, gpus, False
        places = tuple(Slot(index, index if gpus else None) for index in range(slots))
        self.pool = SlotPool(name, places, frozenset(labels))
        self.outcome_of: Callable[[StartRequest], Outcome] = lambda request: 0
        self.reachable, self.refusal = True, ""
        self.attempts: dict[str, dict[str, Any]] = {}  # by name: the reply to query()
        self.requests: list[StartRequest] = []
        self.stops: list[tuple[str, bool]] = []
        self.fetched: list[str] = []
        self.left_out: list[str] = []  # returned by fetch_results()
        self.sent: list[str] = []
        self.bases: list[str] = []  # digests of requested base models
        self.removed: list[str] = []  # output directories
        self.fetch_errors: list[Exception] = []  # one per call of fetch_results()
        self.stops_on_request = True
        self.gpu_queries = 0
        self.memory_used: dict[int | str, int | None] = {}  # of each GPU, MiB
        self.desktops: list[int | str] = []  # GPUs of which only a desktop uses memory
        self.processes: list[int | str] = []  # GPUs with a process
        self.lost_gpus: dict[int | str, str] = {}  # with the reasons
        self.run: ListRun | None = None
        self._lost: asyncio.Future[str] | None = None
        self._post: Callable[[Event], None] = lambda event: None

    # ---- called by tests

    def disconnect(self, reason: str = "cable") -> None:
        """Lose the connection until reconnect()."""
        self.reachable = False
        if self._lost and not self._lost.done():
            self._lost.set_result(reason)

    def reconnect(self) -> None:
        self.reachable = True

    def end(self, attempt: str, code: int | None = 0, **facts: Any) -> None:
        """End an attempt, also without a connection."""
        started = self.attempts[attempt]["started"]
        found = {
            "state": "ended",
            "code": code,
            "started": started,
            "ended": started + 60.0,
            "lines": [],
            "metrics": {},
        }
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
        if self.run:
            self.run.notify()

    # ---- backend.JobServer

    async def connect(self, post: Callable[[Event], None]) -> str:
        await asyncio.sleep(0)
        if self.refusal:
            raise ServerUnusable(self.refusal)
        if not self.reachable:
            raise Unreachable("no route to host")
        self._post, self._lost = post, asyncio.get_running_loop().create_future()
        return ""

    async def wait_until_lost(self) -> str:
        assert self._lost
        return await self._lost

    async def query(self, attempts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        self._call()
        return {name: dict(self.attempts.get(name, {"state": "absent"})) for name in attempts}

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> dict[str, Any]:
        self._call()
        assert self.run
        request = StartRequest(attempt.name, job, attempt.slots, attempt.gpus, attempt.queued_after, needs)
        self.run.check_start(self, request)
        self.requests.append(request)
        outcome = self.outcome_of(request)
        self.attempts[request.attempt] = {"state": "running", "pid": 1, "started": 1e9}
        if outcome is not None:
            asyncio.get_running_loop().call_soon(self.end, request.attempt, outcome)
        return dict(self.attempts[request.attempt])

    async def stop(self, attempt: str, kill: bool) -> None:
        self._call()
        self.stops.append((attempt, kill))
        if self.stops_on_request and attempt in self.running():
            self.end(attempt, 137 if kill else 143, stop_requested=True)

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        self._call()
        if self.fetch_errors:
            raise self.fetch_errors.pop(0)
        self.fetched.append(attempt.name)
        return self.left_out

    async def send_results(self, jobs: Sequence[Job]) -> None:
        self._call()
        self.sent += [job.output for job in jobs]

    async def ensure_base(self, digest: str) -> int:
        self._call()
        self.bases.append(digest)
        return 0

    async def remove_output(self, output: str) -> None:
        self._call()
        self.removed.append(output)

    async def query_gpus(self) -> list[dict[str, Any]]:
        self._call()
        self.gpu_queries += 1
        gpus = [slot.gpu for slot in self.pool.slots if slot.gpu is not None]
        found: list[dict[str, Any]] = [{"index": gpu, "lost": reason} for gpu, reason in self.lost_gpus.items()]
        for gpu in [gpu for gpu in gpus if gpu not in self.lost_gpus]:
            used, processes = self.memory_used.get(gpu, 0), int(gpu in self.processes)
            desktop = {"desktop": True} if gpu in self.desktops else {}
            found.append({"index": gpu, "memory": 80000, "used": used, "processes": processes, **desktop})
        return found

    async def close(self) -> None:
        if self._lost and not self._lost.done():
            self._lost.set_result("closed")


def refuse_start(reason: str, kind: str = "server") -> Callable[[StartRequest], Outcome]:
    def outcome(request: StartRequest) -> Outcome:
        raise NotStarted(reason, kind)

    return outcome


def exits(*codes: Outcome) -> Callable[[StartRequest], Outcome]:
    """The outcomes of the first attempts; all later ones succeed."""
    remaining = list(codes)
    return lambda request: remaining.pop(0) if remaining else 0


# ---------------------------------------------------------------- a list and its dispatcher


class ListRun:
    """One job list on simulated servers, and its dispatcher."""

    def __init__(
        self, directory: Path, *servers: SimulatedServer, jobs: Sequence[Job] | int = 1, **policy: Any
    ) -> None:
        self.path = directory / "results.journal"
        self.cache = Cache(directory)
        self.servers = list(servers)
        self.jobs = [job(number) for number in range(jobs)] if isinstance(jobs, int) else list(jobs)
        self.policy = Policy(**policy)
        self.log: list[str] = []
        self.files: dict[str, list[Job]] = {}  # jobs that a request `add` adds, by file
        self._notified = asyncio.Event()
        for server in servers:
            server.run = self

    def notify(self) -> None:
        self._notified.set()

    def _log_line(self, line: str) -> None:
        self.log.append(line)
        self.notify()

    def _read_added(self, listed: list[Job], file: str) -> list[Job]:
        if file not in self.files:
            raise ValueError(f"{file}: refused")
        return [job for job in self.files[file] if job not in listed]

    async def __aenter__(self) -> ListRun:
        """Start or resume the list."""
        for server in self.servers:
            server.pool = SlotPool(server.name, server.pool.slots, server.pool.labels)
        self._opened = contextlib.ExitStack()
        self.journal = self._opened.enter_context(Journal.open(self.path))
        self.state = ListState.of(self.journal.records)
        record = self.journal.add("list", list=self.state.id or "abc", jobs=job_records(self.jobs))
        self.state.apply(record)
        self.journal.commit()
        self.links = {server.name: ServerLink(server) for server in self.servers}
        self.recorder = Recorder(self.journal, self.state, Shown(self._log_line, self.notify))
        self.dispatcher = Dispatcher(
            self.recorder, self.jobs, self.links, self.policy, cache=self.cache, read_added=self._read_added
        )
        self.task = asyncio.ensure_future(self.dispatcher.run())
        self.task.add_done_callback(lambda _: self.notify())
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self.task.done():
            self.dispatcher.interrupt("the test ends")
        await asyncio.wait_for(self.task, SECONDS)
        self._opened.close()
        if error[0] is None:
            assert facts_of(ListState.of(journal.read(self.path)[0])) == facts_of(self.state)

    async def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        end = asyncio.get_running_loop().time() + SECONDS
        while not condition():
            assert not self.task.done() or self.task.exception() is None, self.task.exception()
            left = end - asyncio.get_running_loop().time()
            assert left > 0, (self.log, self.states())
            try:
                await asyncio.wait_for(self._notified.wait(), min(left, 0.05))
            except asyncio.TimeoutError:
                continue
            self._notified.clear()

    async def finished(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.task), SECONDS)

    def check_start(self, server: SimulatedServer, request: StartRequest) -> None:
        """Assert that the start is in the journal, was not requested before, and uses free slots."""
        records = journal.read(self.path)[0]
        assert [each for each in records if each["event"] == "start" and each["attempt"] == request.attempt]
        assert not [each for each in self.servers if request.attempt in [known.attempt for known in each.requests]]
        busy = {slot for each in server.requests if each.attempt in server.running() for slot in each.slots}
        assert not busy & set(request.slots), "a slot is used twice"

    def job_state(self, number: int = 0) -> JobState:
        return self.state.jobs[self.jobs[number].id]

    def states(self) -> list[str]:
        return [each.state for each in self.state.jobs.values()]

    def failures(self, number: int = 0) -> list[str]:
        return [attempt.failure for attempt in self.job_state(number).attempts]

    def request(self, event: str, *jobs: str) -> None:
        """Append a request to the journal, as another process does."""
        journal.request(self.path, event, jobs)


def facts_of(state: ListState) -> dict[str, Any]:
    """The facts of a state, without metrics: those of running jobs are not in the journal."""
    jobs = {name: dataclasses.asdict(each) | {"metrics": {}} for name, each in state.jobs.items()}
    return dict(vars(state)) | {"jobs": jobs, "open": sorted(state.open), "trainers": sorted(state.trainers)}


def job(number: int, **options: Any) -> Job:
    return job_of({"n": number}, Options(**options))


# ---------------------------------------------------------------- jobs that succeed, fail, or are not started


def test_a_list_of_jobs_is_done_and_their_results_are_copied(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one", 2), SimulatedServer("two")
        async with ListRun(tmp_path, one, two, jobs=7) as run:
            await run.finished()
        assert run.states() == ["done"] * 7
        assert sorted(one.fetched + two.fetched) == sorted(f"{job.id}.1" for job in run.jobs)
        assert all(len(each.job.settings) == 1 and len(each.slots) == 1 for each in one.requests)
        assert len(run.job_state().attempts) == 1
        assert run.job_state().attempts[0].seconds == 60.0

    asyncio.run(scenario())


def test_a_job_that_needs_two_gpus_gets_two_gpus_of_a_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = SimulatedServer("one", 3, gpus=True)
        async with ListRun(tmp_path, server, jobs=[job(1, gpus=2)]) as run:
            await run.finished()
        (request,) = server.requests
        assert (request.job, request.gpus) == (run.jobs[0], [0, 1])

    asyncio.run(scenario())


def test_a_failed_job_is_retried_on_another_server_with_its_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.outcome_of = two.outcome_of = exits(1, 0)
        async with ListRun(tmp_path, one, two) as run:
            await run.finished()
        first, second = run.job_state().attempts
        assert (run.job_state().state, first.failure, first.reason) == ("done", "exit code", "exit code 1")
        assert first.server != second.server
        assert {server.name: server.sent for server in (one, two)}[second.server] == [run.jobs[0].output]

    asyncio.run(scenario())


def test_a_failed_job_is_retried_on_the_same_server_if_no_other_can_run_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one", labels=["big"]), SimulatedServer("two")
        one.outcome_of = exits(1, 0)
        async with ListRun(tmp_path, one, two, jobs=[job(0, labels=("big",))]) as run:
            await run.finished()
        assert [attempt.server for attempt in run.job_state().attempts] == ["one", "one"]
        assert run.states() == ["done"]

    asyncio.run(scenario())


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_a_job_fails_after_its_last_retry(tmp_path: Path, retries: int, attempts: int) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = lambda request: 3
        async with ListRun(tmp_path, one, jobs=[job(0, retries=retries)]) as run:
            await run.finished()
        assert (run.states(), run.failures()) == (["failed"], ["exit code"] * attempts)
        assert run.job_state().reason == f"attempt {attempts} on one: exit code 3"
        assert len(one.fetched) == attempts  # results of failed attempts are copied too

    asyncio.run(scenario())


def test_a_job_that_no_server_can_start_fails_and_the_others_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        bad = job(0, retries=3)
        one.outcome_of = lambda request: (
            refuse_start("the directory is taken", "job")(request) if request.job == bad else 0
        )
        async with ListRun(tmp_path, one, jobs=[bad, job(1)]) as run:
            await run.finished()
        assert (run.states(), run.failures()) == (["failed", "done"], ["refused"])
        assert run.job_state().attempts[0].reason == "the directory is taken"
        assert run.links["one"].failed_starts == 0

    asyncio.run(scenario())


def test_a_server_whose_starts_fail_gets_no_new_jobs_and_its_running_jobs_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one", 2), SimulatedServer("two", 0)
        two.reachable = False
        one.outcome_of = lambda request: UNTIL_ENDED
        async with ListRun(tmp_path, one, two, jobs=4, lost_after=0.3) as run:
            await run.wait_until(lambda: len(one.running()) == 2)
            one.outcome_of = refuse_start("No space left on device")
            one.end(one.running()[0])
            await run.wait_until(lambda: one.name in run.state.paused or not run.links["one"].usable)
            await run.wait_until(lambda: run.state.counts["done"] == 1)
            begin = asyncio.get_running_loop().time()
            await run.wait_until(lambda: asyncio.get_running_loop().time() - begin > 0.6)  # longer than lost_after
            one.end(one.running()[0])
            await run.wait_until(lambda: run.state.counts["done"] == 2)
        assert run.states().count("waiting") == 2
        assert [each.failure for known in run.state.jobs.values() for each in known.attempts] == ["", ""]
        assert len(one.fetched) == 2

    asyncio.run(scenario())


def test_a_list_without_usable_servers_is_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.refusal, two.refusal = "workdir: no such directory", "no Python" + " x" * 2000
        async with ListRun(tmp_path, one, two) as run:
            await run.finished()
        assert run.states() == ["waiting"]
        assert run.state.paused == "no usable server for the waiting jobs; see the reasons above"
        assert "one: not used: workdir: no such directory" in run.log
        assert max(map(len, run.log)) < 1100  # a server's text

    asyncio.run(scenario())


def test_a_job_whose_output_directory_is_busy_waits_and_its_server_gets_other_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        first = job(0, retries=0)
        refusals = [refuse_start("another attempt writes there", "busy")] * 9
        one.outcome_of = lambda request: refusals.pop()(request) if request.job == first and refusals else 0
        async with ListRun(tmp_path, one, jobs=[first, job(1)]) as run:
            await run.finished()
        assert (run.states(), run.failures()) == (["done", "done"], [""])
        assert run.links["one"].failed_starts == 0
        assert sum("another attempt writes there" in line for line in run.log) == 1

    asyncio.run(scenario())


def test_a_job_whose_output_directory_is_busy_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = refuse_start("another attempt writes there", "busy")
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: any("another attempt writes there" in line for line in run.log))
            run.request("cancel", run.jobs[0].id)
            await run.finished()
        assert run.states() == ["cancelled"]

    asyncio.run(scenario())


def test_jobs_without_expected_time_start_in_the_planned_order(tmp_path: Path) -> None:
    """The planner uses the mean of the other jobs' expected times for a job that has none."""

    async def scenario() -> None:
        one = SimulatedServer("one")
        expected = (None, 10.0, 2.0, None)
        jobs = [job(number, expected_seconds=seconds) for number, seconds in enumerate(expected)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        pool = SlotPool("one", one.pool.slots, open=True)
        planned = plan(jobs, {"one": pool}, lambda each: each.options.expected_seconds or 6.0)
        assert [each.job.id for each in one.requests] == [each[1] for each in planned]
        assert [each.job for each in one.requests] == [jobs[number] for number in (1, 0, 3, 2)]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        ({"code": 0}, ("", "")),
        ({"code": 1, "lines": ["Traceback", "ValueError: x", ""]}, ("exit code", "exit code 1: ValueError: x")),
        ({"code": 137}, ("signal", "killed by SIGKILL, possibly by the kernel's OOM killer (see dmesg)")),
        ({"code": 139}, ("signal", "killed by SIGSEGV")),
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
        ({"code": 137, "cause": "rebooted"}, ("server restarted", "the server rebooted while the job ran")),
        ({"code": None}, ("exit code", "exit code None")),
    ],
)  # fmt: skip
def test_the_end_of_an_attempt_is_classified(end: dict[str, Any], verdict: tuple[str, str]) -> None:
    assert classify_end(end, cancelled=False) == verdict


def test_an_attempt_of_a_cancelled_job_succeeds_only_with_exit_code_0_and_without_a_stop_request() -> None:
    assert classify_end({"code": 143}, cancelled=True) == ("cancelled", "cancelled on request")
    assert classify_end({"code": 0}, cancelled=True) == ("", "")
    assert classify_end({"code": 0, "stop_requested": True}, cancelled=True) == ("cancelled", "cancelled on request")


def test_infrastructure_failures_do_not_count_as_retries(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        causes = ["killed", "rebooted", "killed"]
        async with ListRun(tmp_path, one, jobs=[job(0, retries=0)]) as run:
            one.outcome_of = lambda request: UNTIL_ENDED
            for cause in causes:
                await run.wait_until(one.running)
                one.end(one.running()[0], 137, cause=cause)
            await run.wait_until(one.running)
            one.end(one.running()[0])
            await run.finished()
        assert run.failures() == ["supervisor killed", "server restarted", "supervisor killed", ""]
        assert run.states() == ["done"]

    asyncio.run(scenario())


def test_a_job_fails_after_five_infrastructure_failures(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = lambda request: UNTIL_ENDED
        async with ListRun(tmp_path, one, jobs=[job(0, retries=0)]) as run:
            for _ in range(5):
                await run.wait_until(one.running)
                one.end(one.running()[0], 137, cause="killed")
            await run.finished()
        assert (run.states(), len(run.failures())) == (["failed"], 5)

    asyncio.run(scenario())


# ---------------------------------------------------------------- jobs that need others, and jobs that are added


def after(number: int, *needed: Job, **options: Any) -> Job:
    return job(number, after=tuple(each.id for each in needed), **options)


def test_a_job_starts_when_the_jobs_that_it_needs_are_done_and_finds_their_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one", 2, labels=["one"]), SimulatedServer("two", labels=["two"])
        one.outcome_of = lambda _: UNTIL_ENDED
        a, b = job(1, labels=("one",)), job(2, labels=("one",))
        c, d = after(3, b, a, labels=("two",)), after(4, a, labels=("one",))
        async with ListRun(tmp_path, one, two, jobs=[d, c, b, a]) as run:
            await run.wait_until(lambda: len(one.running()) == 2)
            assert [run.state.reason_of(run.job_state(number)) for number in (0, 1)] == [
                f"waits for {a.name}: running", f"waits for {b.name}: running"
            ]  # fmt: skip
            one.end(f"{b.id}.1")
            await run.wait_until(lambda: run.job_state(2).state == "done")
            assert run.state.reason_of(run.job_state(1)) == f"waits for {a.name}: running"
            assert not two.requests
            one.end(f"{a.id}.1")
            await run.wait_until(lambda: f"{d.id}.1" in one.running())
            one.end(f"{d.id}.1")
            await run.finished()
        assert run.states() == ["done"] * 4
        assert ([list(each.needs) for each in two.requests], two.sent) == (
            [[b.output, a.output]],
            sorted([a.output, b.output]),
        )
        assert ([list(each.needs) for each in one.requests[2:]], one.sent) == ([[a.output]], [])

    asyncio.run(scenario())


def test_a_job_fails_if_a_job_that_it_needs_failed_or_was_cancelled_and_a_retry_of_either_retries_both(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        a, b, other = job(1, retries=0), job(2), job(9)
        one.outcome_of = lambda request: {a.id: 1, b.id: UNTIL_ENDED}.get(request.job.id, 0)
        c, d = after(3, a), after(5, b, other)
        chain = [after(10, c)]
        for number in range(11, 60):
            chain.append(after(number, chain[-1]))
        run = ListRun(tmp_path, one, jobs=[a, b, c, d, other, *chain])
        async with run:
            await run.wait_until(lambda: f"{b.id}.1" in one.running())
            run.request("cancel", b.id)
            await run.finished()
        assert [run.job_state(number).state for number in range(5)] == [
            "failed",
            "cancelled",
            "failed",
            "failed",
            "done",
        ]
        assert [run.job_state(number).reason for number in (2, 3, 5, -1)] == [
            f"{a.name} failed", f"{b.name} cancelled", f"{c.name} failed", f"{chain[-2].name} failed"
        ]  # fmt: skip
        one.outcome_of = lambda _: 0
        run.request("retry", chain[20].id)
        async with run:
            await run.finished()
        assert [run.job_state(number).state for number in range(5)] == ["done", "cancelled", "done", "failed", "done"]
        assert {each.state for each in run.state.jobs.values() if each.job in chain} == {"done"}
        run.request("retry", b.id)
        async with run:
            await run.finished()
        assert set(run.states()) == {"done"}

    asyncio.run(scenario())


def test_jobs_are_added_while_a_list_runs_and_wait_for_its_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        a, b = job(1), job(2)
        one.outcome_of = lambda request: UNTIL_ENDED if request.job.id == a.id else 0
        run = ListRun(tmp_path, one, jobs=[a])
        run.files = {"more": [a, after(3, a, b), b]}
        async with run:
            await run.wait_until(one.running)
            for file in ("more", "none", "more"):
                handled = len(run.state.handled_requests)
                run.request("add", file)
                await run.wait_until(lambda: len(run.state.handled_requests) > handled)  # noqa: B023
            await run.wait_until(lambda: run.state.jobs[b.id].state == "done")
            one.end(f"{a.id}.1")
            await run.finished()
        assert [each.job.id for each in one.requests] == [a.id, b.id, run.files["more"][1].id]
        assert [each.number for each in run.state.jobs.values()] == [0, 1, 2]
        added = [line for line in run.log if line.startswith(("more", "none"))]
        assert added == ["more: jobs added: 2", "none: not added: none: refused", "more: jobs added: 0"]

    asyncio.run(scenario())


def test_adding_jobs_does_not_end_a_pause_and_a_later_request_is_handled_by_the_next_dispatcher(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 1)
        one.outcome_of = lambda request: 1 if request.job.settings["n"] < 2 else UNTIL_ENDED
        run = ListRun(tmp_path, one, jobs=[job(0, retries=0), job(1, retries=0), job(2)], max_failures=1)
        run.files = {"more": [job(7)], "last": [job(8)]}
        async with run:
            await run.wait_until(lambda: run.state.paused)
            run.request("add", "more")
            await run.finished()
        run.request("add", "last")
        run.jobs += [job(7)]
        one.outcome_of = lambda _: 0
        run.policy = Policy()
        async with run:
            await run.finished()
        assert [each.state for each in run.state.jobs.values()] == ["failed", *["done"] * 4]

    asyncio.run(scenario())


# ---------------------------------------------------------------- connections


def test_a_job_continues_without_a_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        one.outcome_of = exits(UNTIL_ENDED, UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=3) as run:
            await run.wait_until(lambda: len(one.running()) == 2)
            stays, ends = one.running()
            one.disconnect()
            await run.wait_until(lambda: run.links["one"].state == "unreachable")
            one.end(ends)  # without a connection
            assert run.states().count("running") == 2
            one.reconnect()
            await run.wait_until(lambda: run.state.counts["done"] == 2)  # the one that ended, and the one that waited
            assert run.states().count("running") == 1
            one.end(stays)
            await run.finished()
        assert run.states() == ["done"] * 3
        assert all(len(known.attempts) == 1 for known in run.state.jobs.values())

    asyncio.run(scenario())


def test_after_a_reconnect_the_server_is_queried_before_a_start_is_repeated(tmp_path: Path) -> None:
    class LostDuringStart(SimulatedServer):
        """A server that loses the connection before it starts a job, or after it has started the job."""

        lost_before_start = True

        async def start(self, *request: Any) -> dict[str, Any]:
            if len(self.requests) < 1 and not self.lost_before_start:
                await super().start(*request)
            if self.reachable and not self.run.lost:  # type: ignore[union-attr]
                self.run.lost = True  # type: ignore[union-attr]
                self.disconnect()
                self.reconnect()
                raise Unreachable("cable")
            return await super().start(*request)

    async def scenario(lost_before_start: bool) -> tuple[list[str], int]:
        one = LostDuringStart("one")
        one.lost_before_start = lost_before_start
        run = ListRun(tmp_path / str(lost_before_start), one)
        run.path.parent.mkdir()
        run.lost = False  # type: ignore[attr-defined]
        async with run:
            await run.finished()
        return [each.name for each in run.job_state().attempts], len(one.requests)

    names, starts = asyncio.run(scenario(lost_before_start=False))
    assert (len(names), names[0].endswith(".1"), starts) == (1, True, 1)
    names, starts = asyncio.run(scenario(lost_before_start=True))
    assert (len(names), names[0].endswith(".2"), starts) == (1, True, 1)  # no attempt number is used twice


def test_a_pending_start_is_not_repeated_after_a_reconnect(tmp_path: Path) -> None:
    class Slow(SimulatedServer):
        go: asyncio.Event

        async def send_results(self, jobs: Sequence[Job]) -> None:
            await super().send_results(jobs)
            await self.go.wait()

    async def scenario() -> None:
        one, two = SimulatedServer("one"), Slow("two")
        one.outcome_of, two.outcome_of, two.go = exits(1), exits(UNTIL_ENDED), asyncio.Event()
        two.reachable = False
        async with ListRun(tmp_path, one, two) as run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].failure)
            one.refusal = "no more"
            one.disconnect()
            two.reconnect()
            await run.wait_until(lambda: two.sent)
            connections = run.log.count("two: connected")
            two.disconnect()
            two.reconnect()
            await run.wait_until(lambda: run.log.count("two: connected") > connections)
            two.go.set()
            await run.wait_until(two.running)
            two.end(two.running()[0])
            await run.finished()
        assert [request.attempt for request in two.requests] == [run.job_state().attempts[-1].name]
        assert run.states() == ["done"]

    asyncio.run(scenario())


def lost_attempt(one: SimulatedServer, two: SimulatedServer) -> Callable[[ListRun], Coroutine[Any, Any, str]]:
    """A scenario in which `one` becomes unreachable while it runs a job, and the job is done on `two`.

    The scenario returns the name of the lost attempt.
    """

    async def scenario(run: ListRun) -> str:
        one.outcome_of, two.reachable = exits(UNTIL_ENDED), False
        await run.wait_until(lambda: one.running())
        (name,) = one.running()
        two.reconnect()
        one.disconnect()
        await run.wait_until(lambda: run.job_state().state == "done")
        return name

    return scenario


def test_a_job_runs_elsewhere_after_its_server_has_been_unreachable_for_longer_than_lost_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        async with ListRun(tmp_path, one, two, jobs=[job(0, retries=0)], lost_after=0.05) as run:
            await lost_attempt(one, two)(run)
            await run.finished()
        lost, done = run.job_state().attempts
        assert (lost.state, lost.failure, lost.server, done.server) == ("lost", "server lost", "one", "two")
        assert lost.reason.startswith("one could not be reached for ")
        assert run.states() == ["done"]

    asyncio.run(scenario())


def test_jobs_run_elsewhere_if_their_server_is_unusable_when_the_dispatcher_reconnects(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.outcome_of, two.reachable = exits(UNTIL_ENDED), False
        async with ListRun(tmp_path, one, two, jobs=[job(0, retries=0)], lost_after=60.0) as run:
            await run.wait_until(lambda: one.running())
            one.refusal = "Permission denied (publickey)"
            two.reconnect()
            one.disconnect()
            await run.wait_until(lambda: run.links["one"].state == "unusable")
            servers = run.dispatcher.connections
            servers.policy = dataclasses.replace(servers.policy, lost_after=0.05)
            await run.finished()
        reason = run.job_state().attempts[0].reason
        assert reason.startswith("one could not be used for ") and reason.endswith(f" s: {one.refusal}")
        assert run.states() == ["done"]

    asyncio.run(scenario())


def test_a_server_that_hangs_while_it_connects_does_not_keep_a_resumed_list_from_other_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(SimulatedServer):
        hangs = False

        async def connect(self, post: Callable[[Event], None]) -> str:
            while self.hangs:
                await asyncio.sleep(0.01)
            return await super().connect(post)

    async def scenario() -> None:
        monkeypatch.setattr("distributed.jobs.dispatch.connections.FIRST_TIMEOUT", 0.3)
        one = Hanging("one")
        one.outcome_of = exits(UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=2)
        async with run:
            await run.wait_until(lambda: one.running())
        one.hangs = True
        run.servers.append(two := SimulatedServer("two"))
        two.run = run
        async with run:
            await run.wait_until(lambda: run.job_state(1).state == "done")
            assert "one: still connecting after 0 s; using other servers" in run.log
            assert len(two.requests) == 1
            one.hangs = False
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done", "done"]

    asyncio.run(scenario())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_lost_attempt_is_stopped_before_its_slot_is_reused(tmp_path: Path, resumed: bool) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.stops_on_request = False
        run = ListRun(tmp_path, one, two, jobs=[job(0, retries=0), job(1, labels=("one",))], lost_after=0.05)
        one.pool.labels = frozenset({"one"})
        two.pool.labels = frozenset({"two"})
        first = job(0, retries=0)
        assert run.jobs[0] == first
        async with run:
            one.outcome_of, two.reachable = exits(UNTIL_ENDED), False
            await run.wait_until(lambda: one.running())
            (name,) = one.running()
            two.reconnect()
            one.disconnect()
            await run.wait_until(lambda: run.job_state().state == "done")
            if not resumed:
                one.reconnect()
                await run.wait_until(lambda: one.stops == [(name, True)])
                assert run.job_state(1).state == "waiting"  # the lost attempt still has the slot
                one.end(name, 137)
                await run.finished()
        if resumed:
            one.reconnect()
            async with run:
                await run.wait_until(lambda: one.stops == [(name, True)])
                assert run.job_state(1).state == "waiting"
                one.end(name, 137)
                await run.finished()
        assert run.states() == ["done", "done"]
        assert run.job_state().attempts[0].state == "ended"
        assert run.job_state().attempts[0].failure == "server lost"

    asyncio.run(scenario())


@pytest.mark.parametrize("reconnected", [True, False])
def test_a_draining_dispatcher_stops_a_lost_attempt_if_its_server_is_reachable_again(
    tmp_path: Path, reconnected: bool
) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        async with ListRun(tmp_path, one, two, lost_after=0.05) as run:
            name = await lost_attempt(one, two)(run)
            await run.finished()
        assert one.running() == [name]
        if reconnected:
            one.reconnect()
        async with ListRun(tmp_path, one, two, drain=True) as run:
            await run.finished()
        assert one.running() == ([] if reconnected else [name])
        assert run.job_state().attempts[0].state == ("ended" if reconnected else "lost")
        assert run.states() == ["done"]

    asyncio.run(scenario())


def test_a_job_whose_results_were_lost_with_a_server_runs_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.fetch_errors = [Unreachable("cable")] * 1000
        two.reachable, two.outcome_of = False, exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one, two, lost_after=0.1) as run:
            await run.wait_until(lambda: run.job_state().state == "ending")
            two.reconnect()
            one.disconnect()
            await run.wait_until(two.running)
            one.fetch_errors = []
            one.reconnect()
            await run.wait_until(lambda: run.links["one"].state == "ready")
            await run.wait_until(lambda: run.job_state().attempts[0].state == "ended")  # reported by server `one`
            await asyncio.sleep(1.1)  # longer than the delay before copying is retried
            assert run.states() == ["running"]
            two.end(two.running()[0])
            await run.finished()
        assert run.states() == ["done"]
        assert run.failures() == ["server lost", ""]
        assert (one.fetched, two.fetched) == ([], [f"{run.jobs[0].id}.2"])

    asyncio.run(scenario())


def test_copying_results_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.fetch_errors = [OSError("No space left on device"), OSError("No space left on device"), Unreachable("x")]
        async with ListRun(tmp_path, one) as run:
            await run.finished()
        assert (run.states(), one.fetched) == (["done"], [f"{run.jobs[0].id}.1"])
        assert len([line for line in run.log if "cannot copy results: No space left on device" in line]) == 1

    asyncio.run(scenario())


DENIED = [OSError("rsync: big: Permission denied")] * 1000


@pytest.mark.parametrize(
    ("errors", "code", "failures"),
    [
        (DENIED, 0, ["results not copied"]),  # not retried, as the next attempt would have the same fault
        (DENIED[: endings.MAX_FAILED_COPIES], 3, ["exit code", ""]),
        # The server is connected, so copying ends after MAX_LOST_COPIES of these errors.
        ([Unreachable("rsync: not found")] * 1000, 0, ["results not copied"]),
        ([Unreachable("timeout")] * 20, 0, [""]),
        ([OSError("write failed: No space left on device (28)")] * 20, 0, [""]),
        ([OSError("[Errno 122] Disk quota exceeded: '/x'")] * 20, 0, [""]),
    ],
)
def test_a_list_ends_if_results_can_never_be_copied_but_it_waits_for_disk_space_or_a_connection(
    tmp_path: Path, errors: list[Exception], code: int, failures: list[str]
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of, one.fetch_errors = exits(code), list(errors)
        async with ListRun(tmp_path, one) as run:
            await run.finished()
        assert run.failures() == failures
        assert run.states() == ["done" if failures[-1] == "" else "failed"]
        if failures[-1]:
            assert run.job_state().reason == f"attempt 1 on one: results not copied: {errors[0]}"
            assert run.log[-1].endswith(f"on one:0 after 60.0 s: results not copied: {errors[0]}")

    asyncio.run(scenario())


def test_a_cancel_request_ends_a_job_whose_results_can_never_be_copied(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of, one.fetch_errors = lambda request: UNTIL_ENDED, list(DENIED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(one.running)
            run.request("cancel", "all")
            await run.finished()
        assert run.states() == ["cancelled"]
        assert run.job_state().reason == f"cancelled on request; no process remains; results not copied: {DENIED[0]}"

    asyncio.run(scenario())


def test_a_server_reports_only_its_own_attempts_and_files_that_were_not_copied_are_logged(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.outcome_of = two.outcome_of = lambda request: UNTIL_ENDED
        one.left_out = [f"link{number}" for number in range(7)]
        async with ListRun(tmp_path, one, two, jobs=2) as run:
            await run.wait_until(lambda: one.running() and two.running())
            own, other = one.running()[0], two.running()[0]
            forged = {"attempt": own, "code": 0, "metrics": {"loss": 0.0}}
            for kind in ("progress", "ended"):
                two._post(Event(kind, "two", forged))
            one.end(own, 0, metrics={"loss": 1.0})
            two.end(other, 0)
            await run.finished()
        assert run.state.jobs[own.partition(".")[0]].metrics == {"loss": 1.0}
        assert run.state.jobs[own.partition(".")[0]].attempts[0].end == 1e9 + 60
        output = run.state.jobs[own.partition(".")[0]].job.output
        rule = "only files, directories and links inside of it are copied, but none of git"
        assert f"one: not copied to {output}: link0, link1, link2, link3, link4 and 2 more; {rule}" in run.log

    asyncio.run(scenario())


def test_sending_files_of_an_earlier_attempt_is_retried(tmp_path: Path) -> None:
    class Full(SimulatedServer):
        failing = 2

        async def send_results(self, jobs: Sequence[Job]) -> None:
            await super().send_results(jobs)
            self.failing -= 1
            if self.failing >= 0:
                raise Unreachable("rsync: connection unexpectedly closed (code 12)")

    async def scenario() -> None:
        one, two = SimulatedServer("one"), Full("two")
        one.outcome_of, two.reachable = exits(1), False
        async with ListRun(tmp_path, one, two) as run:
            await run.wait_until(lambda: one.fetched)
            one.refusal = "no more"
            one.disconnect()
            one.reconnect()
            two.reconnect()
            await run.finished()
        assert run.states() == ["done"]
        assert len(two.requests) == 1
        assert len(two.sent) == 3

    asyncio.run(scenario())


def test_jobs_on_a_server_that_is_no_longer_configured_run_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = SimulatedServer("one"), SimulatedServer("two")
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: one.running())
        async with ListRun(tmp_path, two, lost_after=0.05) as run:
            await run.finished()
        assert run.states() == ["done"]
        assert [attempt.server for attempt in run.job_state().attempts] == ["one", "two"]

    asyncio.run(scenario())


# ---------------------------------------------------------------- GPUs


def test_a_gpu_in_use_by_another_process_is_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2, gpus=True)
        one.memory_used = {1: 5000}
        one.outcome_of = lambda request: UNTIL_ENDED
        async with ListRun(tmp_path, one, jobs=2) as run:
            await run.wait_until(lambda: one.running() and one.pool.blocked)
            assert [list(request.gpus) for request in one.requests] == [[0]]
            one.memory_used = {}
            await run.wait_until(lambda: len(one.running()) == 2)
            for name in one.running():
                one.end(name)
            await run.finished()
        assert "one: GPU 1: in use by another process; waiting" in run.log
        assert "one: GPU 1: free again" in run.log

    asyncio.run(scenario())


def test_memory_used_by_a_job_of_the_list_does_not_block_its_gpu(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 1, gpus=True)
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=2) as run:
            await run.wait_until(one.running)
            one.memory_used = {0: 70000}
            before = one.gpu_queries
            await run.wait_until(lambda: one.gpu_queries > before + 2)
            one.memory_used = {}
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done", "done"]
        assert not [line for line in run.log if "another process" in line]

    asyncio.run(scenario())


def test_a_job_that_ends_while_the_gpus_are_queried_does_not_block_its_gpu(tmp_path: Path) -> None:
    class Slow(SimulatedServer):
        """The reply to one query shows the processes of jobs that ended during the query."""

        query_ended: asyncio.Event | None = None

        async def query_gpus(self) -> list[dict[str, Any]]:
            found = await super().query_gpus()
            if self.query_ended and not self.query_ended.is_set():
                await self.query_ended.wait()
                found = [gpu | {"used": 70000} for gpu in found]
            return found

    async def scenario() -> None:
        one = Slow("one", 3, gpus=True)
        one.outcome_of = lambda request: UNTIL_ENDED
        async with ListRun(tmp_path, one, jobs=2) as run:
            await run.wait_until(lambda: len(one.running()) == 2)
            one.query_ended, before = asyncio.Event(), one.gpu_queries
            await run.wait_until(lambda: one.gpu_queries > before)
            run.files = {"more": [job(2)]}
            run.request("add", "more")  # this job also starts during the query
            await run.wait_until(lambda: len(one.running()) == 3)
            last = one.running()[1]
            for name in [name for name in one.running() if name != last]:
                one.end(name)
            await run.wait_until(lambda: run.states().count("done") == 2)
            one.query_ended.set()
            await run.wait_until(lambda: one.gpu_queries > before + 1)
            assert not one.pool.blocked
            one.end(last)
            await run.finished()
        assert not [line for line in run.log if "another process" in line]

    asyncio.run(scenario())


def test_no_job_starts_before_the_gpus_are_queried(tmp_path: Path) -> None:
    class Slow(SimulatedServer):
        go: asyncio.Event

        async def query_gpus(self) -> list[dict[str, Any]]:
            await self.go.wait()
            return await super().query_gpus()

    async def scenario() -> None:
        one = Slow("one", 1, gpus=True)
        one.go = asyncio.Event()
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: "one: connected" in run.log)
            assert run.states() == ["waiting"]
            run.request("cancel", "zzz")  # when this is handled, the dispatcher has had time to start a job
            await run.wait_until(lambda: run.state.handled_requests)
            assert run.states() == ["waiting"]
            one.go.set()
            await run.finished()
        assert run.states() == ["done"]

    asyncio.run(scenario())


def test_only_gpus_with_the_required_free_memory_are_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2, gpus=True)
        one.memory_used = {0: 79000, 1: 5000}
        async with ListRun(tmp_path, one, jobs=3, gpu_free_mib=70000) as run:
            await run.finished()
        assert [list(request.gpus) for request in one.requests] == [[1]] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize(("free", "used"), [(None, [[0]]), (79000, [[1]])])
def test_the_memory_of_a_desktop_counts_only_with_a_limit(
    tmp_path: Path, free: int | None, used: list[list[int]]
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2, gpus=True)
        one.memory_used, one.desktops = {0: 1500, 1: 900 if free else 5000}, [0]
        async with ListRun(tmp_path, one, jobs=1, gpu_free_mib=free) as run:
            await run.finished()
        assert [list(request.gpus) for request in one.requests] == used

    asyncio.run(scenario())


@pytest.mark.parametrize("free", [None, 1000])
def test_a_gpu_whose_memory_is_unknown_is_in_use_while_it_has_a_process(tmp_path: Path, free: int | None) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2, gpus=True)
        one.memory_used, one.processes = {0: None, 1: None}, [0]
        one.outcome_of = exits(0, 0, UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=4, gpu_free_mib=free) as run:
            await run.wait_until(lambda: len(one.requests) == 3)
            assert [list(request.gpus) for request in one.requests] == [[1]] * 3
            one.processes = []
            await run.wait_until(lambda: len(one.requests) == 4)
            one.end(one.running()[0])
            await run.finished()
        assert [list(request.gpus) for request in one.requests] == [[1], [1], [1], [0]]
        assert "one: GPU 0: in use by another process; waiting" in run.log

    asyncio.run(scenario())


def test_a_lost_gpu_is_named_and_the_others_are_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 3, gpus=True)
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[job(1), job(2, gpus=ALL_GPUS)]) as run:
            await run.wait_until(one.running)
            one.lost_gpus = {1: "GPU is lost; reboot the machine"}
            await run.wait_until(lambda: "one: GPU 1: not used: GPU is lost; reboot the machine" in run.log)
            one.end(one.running()[0])
            await run.finished()
        assert [list(request.gpus) for request in one.requests] == [[0], [0, 2]]
        assert sum("not used" in line for line in run.log) == 1

    asyncio.run(scenario())


def test_a_list_whose_gpus_are_all_lost_is_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 1, gpus=True)
        one.lost_gpus = {0: "GPU is lost; reboot the machine"}
        async with ListRun(tmp_path, one) as run:
            await run.finished()
        assert run.state.paused == "no usable server for the waiting jobs; see the reasons above"

    asyncio.run(scenario())


# ---------------------------------------------------------------- failures that stop the list


def test_five_consecutive_early_failures_pause_the_list(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        run = ListRun(tmp_path, one, jobs=[job(number, retries=0) for number in range(9)])

        def outcome(request: StartRequest) -> Outcome:
            asyncio.get_running_loop().call_soon(lambda: one.end(request.attempt, 1, ended=1e9 + 1))
            return UNTIL_ENDED

        one.outcome_of = outcome
        async with run:
            await run.finished()
        assert run.states() == ["failed"] * 5 + ["waiting"] * 4
        assert run.state.paused.startswith("5 attempts in a row failed within 30 s each; the last: exit code 1; fix")
        one.outcome_of = exits()
        async with run:  # resuming ends the pause
            await run.finished()
        assert run.states() == ["failed"] * 5 + ["done"] * 4

    asyncio.run(scenario())


@pytest.mark.parametrize("fifth", [{"code": 0}, {"code": 1, "ended": 1e9 + 60}], ids=["a success", "a late failure"])
def test_a_success_or_a_late_failure_between_early_failures_keeps_the_list_running(
    fifth: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        early = {"code": 1, "ended": 1e9 + 1}
        ends = iter([*[early] * 4, fifth, *[early] * 4])

        def outcome(request: StartRequest) -> Outcome:
            asyncio.get_running_loop().call_soon(lambda: one.end(request.attempt, **next(ends)))
            return UNTIL_ENDED

        one.outcome_of = outcome
        async with ListRun(tmp_path, one, jobs=[job(number, retries=0) for number in range(9)]) as run:
            await run.finished()
        assert (run.state.counts["waiting"], run.state.paused) == (0, "")

    asyncio.run(scenario())


def test_max_failures_pauses_the_list_and_lets_running_jobs_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        one.outcome_of = exits(UNTIL_ENDED, 1, 1, UNTIL_ENDED)
        jobs = [job(0)] + [job(number, retries=0) for number in range(1, 6)]
        async with ListRun(tmp_path, one, jobs=jobs, max_failures=2) as run:
            await run.wait_until(lambda: run.state.paused)
            assert run.job_state().state == "running"
            while one.running():
                one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done", "failed", "failed", "waiting", "waiting", "waiting"]
        assert run.state.paused == "--max-failures 2: 2 jobs failed"

    asyncio.run(scenario())


def test_fail_fast_cancels_all_jobs_and_records_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        one.outcome_of = exits(UNTIL_ENDED, 1, UNTIL_ENDED)
        jobs = [job(0), job(1, retries=0), job(2), job(3)]
        async with ListRun(tmp_path, one, jobs=jobs, fail_fast=True) as run:
            await run.finished()
        assert run.states() == ["cancelled", "failed", "cancelled", "cancelled"]
        assert one.stops == [(f"{run.jobs[0].id}.1", False)]
        assert len(one.requests) == 2
        handled = [record for record in journal.read(run.path)[0] if record["event"] == "request_handled"]
        assert [(record["what"], len(record["jobs"])) for record in handled] == [("cancel", 3)]

    asyncio.run(scenario())


def test_fail_fast_also_cancels_a_job_whose_retry_is_pending(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        one.fetch_errors = [OSError("No space left on device")] * 1000
        run = ListRun(tmp_path, one, jobs=[job(0, retries=0), job(1)], fail_fast=True)
        one.outcome_of = lambda request: UNTIL_ENDED
        async with run:
            await run.wait_until(lambda: [each.state for each in run.state.open.values()] == ["running"] * 2)
            one.end(f"{run.jobs[1].id}.1", 1)
            await run.wait_until(lambda: run.job_state(1).state == "ending")
            one.end(f"{run.jobs[0].id}.1", 1)
            await run.wait_until(lambda: run.state.paused)
            one.fetch_errors = []
            await run.finished()
        assert run.states() == ["failed", "cancelled"]

    asyncio.run(scenario())


# ---------------------------------------------------------------- cancel and retry


def test_a_waiting_job_is_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=2) as run:
            await run.wait_until(lambda: one.running())
            run.request("cancel", run.jobs[1].id)
            await run.wait_until(lambda: run.job_state(1).state == "cancelled")
            one.end(one.running()[0])
            await run.finished()
        assert (run.states(), len(one.requests)) == (["done", "cancelled"], 1)

    asyncio.run(scenario())


def test_a_running_job_is_cancelled_and_its_cleanup_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 1, gpus=True)
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].state == "running")
            run.request("cancel", "all")
            await run.finished()
        assert (run.states(), run.failures()) == (["cancelled"], ["cancelled"])
        assert run.job_state().reason == "cancelled on request; no process remains; GPU 0: 0 MiB in use"
        assert one.fetched == [f"{run.jobs[0].id}.1"]

    asyncio.run(scenario())


def test_a_job_is_cancelled_once_its_pending_start_completes(tmp_path: Path) -> None:
    class Slow(SimulatedServer):
        go: asyncio.Event

        async def start(self, *request: Any) -> dict[str, Any]:
            found = await super().start(*request)
            await self.go.wait()
            return found

    async def scenario() -> None:
        one = Slow("one")
        one.go, one.outcome_of = asyncio.Event(), exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: one.requests)
            run.request("cancel", run.jobs[0].id)
            await run.wait_until(lambda: run.job_state().cancel)
            assert one.stops == []
            one.go.set()
            await run.finished()
        assert run.states() == ["cancelled"]
        assert one.stops == [(f"{run.jobs[0].id}.1", False)]

    asyncio.run(scenario())


def test_a_job_on_an_unreachable_server_is_cancelled_after_the_reconnect(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].state == "running")
            one.disconnect()
            await run.wait_until(lambda: run.links["one"].state == "unreachable")
            run.request("cancel", run.jobs[0].id)
            await run.wait_until(lambda: run.job_state().cancel)
            one.reconnect()
            await run.finished()
        assert (run.states(), one.running()) == (["cancelled"], [])

    asyncio.run(scenario())


def test_a_job_that_is_cancelled_after_its_start_request_was_lost_is_not_started(tmp_path: Path) -> None:
    class Lost(SimulatedServer):
        async def start(self, *request: Any) -> dict[str, Any]:
            self.disconnect()
            raise Unreachable("cable")

    async def scenario() -> None:
        one = Lost("one")
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: run.links["one"].state == "unreachable" and run.job_state().attempts)
            run.request("cancel", run.jobs[0].id)
            await run.wait_until(lambda: run.job_state().cancel)
            one.reconnect()
            await run.finished()
        assert (run.states(), one.attempts) == (["cancelled"], {})
        assert [each["event"] for each in journal.read(run.path)[0]].count("start") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (1, "cancelled")])
def test_a_cancelled_job_whose_results_are_being_copied_is_not_retried(tmp_path: Path, code: int, state: str) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of, one.fetch_errors = exits(code), [OSError("No space left on device")] * 3
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: run.job_state().state == "ending")
            run.request("cancel", run.jobs[0].id)
            await run.finished()
        assert (run.states(), len(one.requests)) == ([state], 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [0, 1])
def test_cancelling_an_ended_job_has_no_effect_and_a_retry_request_reruns_it_only_if_it_failed(
    tmp_path: Path, code: int
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        run = ListRun(tmp_path, one, jobs=[job(0, retries=0), job(1)])
        one.outcome_of = lambda request: code if request.job == run.jobs[0] else UNTIL_ENDED
        async with run:
            await run.wait_until(lambda: run.job_state().state == ("failed" if code else "done"))
            run.request("cancel", run.jobs[0].id)
            await run.wait_until(lambda: len(run.state.handled_requests) == 1)
            one.outcome_of = lambda request: UNTIL_ENDED
            run.request("retry", run.jobs[0].id)
            await run.wait_until(
                lambda: len(run.state.handled_requests) == 2 and len(one.running()) == (2 if code else 1)
            )
            await run.wait_until(lambda: all(each.state == "running" for each in run.state.open.values()))
            for name in one.running():
                one.end(name)
            await run.finished()
        assert (run.states(), one.stops) == (["done", "done"], [])
        assert run.failures() == (["exit code", ""] if code else [""])

    asyncio.run(scenario())


def test_a_retry_request_restores_all_retries(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(1, 1, 1)
        run = ListRun(tmp_path, one)
        async with run:
            await run.finished()
        assert (run.states(), len(run.failures())) == (["failed"], 2)
        run.request("retry", "failed")
        async with run:
            await run.finished()
        assert (run.states(), run.failures()) == (["done"], ["exit code"] * 3 + [""])

    asyncio.run(scenario())


def test_a_handled_request_is_not_handled_by_the_next_dispatcher(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED, UNTIL_ENDED)
        run = ListRun(tmp_path, one)
        async with run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].state == "running")
            run.request("cancel", "all")
            await run.finished()
        run.request("retry", run.jobs[0].id)
        async with run:
            await run.wait_until(
                lambda: run.job_state().attempts[-1].number == 2 and run.job_state().attempts[-1].state == "running"
            )
        async with run:
            await run.wait_until(lambda: "one: connected" in run.log[-2:])
            one.end(one.running()[0])
            await run.finished()
        assert (run.states(), run.failures()) == (["done"], ["cancelled", ""])
        handled = [record["what"] for record in journal.read(run.path)[0] if record["event"] == "request_handled"]
        assert handled == ["cancel", "retry"]

    asyncio.run(scenario())


def test_a_request_for_an_unknown_job_is_logged(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED)
        async with ListRun(tmp_path, one) as run:
            await run.wait_until(lambda: one.running())
            run.request("cancel", "zzz")
            await run.wait_until(lambda: run.state.handled_requests)
            one.end(one.running()[0])
            await run.finished()
        assert "job zzz: not in this list; `status` shows all jobs" in run.log
        assert run.states() == ["done"]

    asyncio.run(scenario())


# ---------------------------------------------------------------- full disks, edited lists, ends of dispatchers


def test_no_job_starts_while_the_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one", 2)
        one.outcome_of = exits(UNTIL_ENDED)
        full = False

        def write(file: int, data: bytes) -> int:
            if full and file == run.journal._file:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real_write(file, data)

        real_write = os.write
        async with ListRun(tmp_path, one, jobs=4) as run:
            await run.wait_until(lambda: len(run.log) >= 4)
            monkeypatch.setattr(os, "write", write)
            full = True
            starts = len(one.requests)
            one.end(one.running()[0])
            await run.wait_until(lambda: run.recorder.error)
            await run.wait_until(lambda: "no new jobs start until it is writable" in run.log[-1])
            assert len(one.requests) == starts
            full = False
            await run.finished()
        assert run.states() == ["done"] * 4
        assert all(len(known.attempts) == 1 for known in run.state.jobs.values())
        assert any(line.endswith(": writable again") for line in run.log)

    asyncio.run(scenario())


def test_a_start_that_was_withdrawn_while_the_journal_was_not_writable_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED, UNTIL_ENDED)
        full, real_write = False, os.write

        def write(file: int, data: bytes) -> int:
            if full and file == run.journal._file:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real_write(file, data)

        async with ListRun(tmp_path, one, jobs=2) as run:
            await run.wait_until(one.running)
            monkeypatch.setattr(os, "write", write)
            full = True
            one.end(one.running()[0])
            await run.wait_until(lambda: run.job_state(1).attempts)  # the start is not in the journal
            one.disconnect()
            one.reconnect()
            # Attempt 1 is not on the server, so the job is placed again, as attempt 2.
            await run.wait_until(lambda: run.job_state(1).next_number == 3)
            full = False
            await run.wait_until(one.running)
            assert one.running() == [f"{run.jobs[1].id}.2"]
            one.end(one.running()[0])
            await run.finished()
        assert [request.attempt for request in one.requests] == [f"{run.jobs[0].id}.1", f"{run.jobs[1].id}.2"]
        assert run.states() == ["done", "done"]

    asyncio.run(scenario())


def test_added_jobs_of_an_edited_list_run_and_removed_jobs_do_not_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(0, UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[job(0), job(1), job(2), job(3)]) as run:
            await run.wait_until(lambda: len(one.requests) == 2)
        edited = ListRun(tmp_path, one, jobs=[job(9), job(3), job(0)])
        async with edited:
            assert edited.job_state(2).state == "done"
            await edited.wait_until(lambda: one.running())
            one.end(one.running()[0], 1)  # the job that was removed while it ran
            await edited.finished()
        states = {each.job.settings["n"]: each.state for each in edited.state.jobs.values()}
        assert states == {9: "done", 3: "done", 0: "done", 1: "failed"}
        assert [request.job.settings["n"] for request in one.requests] == [0, 1, 9, 3]

    asyncio.run(scenario())


def test_a_removed_job_is_not_retried_and_the_list_ends(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = lambda request: 1 if request.job.settings["n"] == 0 else UNTIL_ENDED
        async with ListRun(tmp_path, one, jobs=[job(0, retries=0), job(1)]) as run:
            await run.wait_until(lambda: run.job_state().state == "failed" and one.running())
        run.request("retry", run.jobs[0].id)
        edited = ListRun(tmp_path, one, jobs=[job(2)])
        async with edited:
            await edited.wait_until(lambda: "one: connected" in edited.log)
            one.outcome_of = exits()
            one.end(one.running()[0], 137, cause="killed")  # a job in the list would be retried
            await edited.finished()
        states = {each.job.settings["n"]: (each.state, each.reason) for each in edited.state.jobs.values()}
        assert states[0] == states[1] == ("cancelled", "no longer in the list")
        assert states[2] == ("done", "")

    asyncio.run(scenario())


def test_a_job_that_is_added_again_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(1, UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[job(0), job(1)]) as run:
            # Job 0 waits for its second attempt.
            await run.wait_until(lambda: one.running() and run.states() == ["waiting", "running"])
            one.end(one.running()[0])
            one.disconnect()
        for jobs in ([job(1)], [job(0), job(1)]):
            one.reconnect()
            async with ListRun(tmp_path, one, jobs=jobs) as run:
                await run.finished()
        assert run.states() == ["done", "done"]

    asyncio.run(scenario())


def test_an_interrupted_dispatcher_leaves_jobs_running_for_the_next_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED)
        run = ListRun(tmp_path, one)
        async with run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].state == "running")
        assert len(one.running()) == 1
        async with run:
            await run.wait_until(lambda: f"one: {run.jobs[0].id} still runs" in run.log)
            one.end(one.running()[0])
            await run.finished()
        assert (run.states(), len(one.requests)) == (["done"], 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(("gpus", "edited_gpus"), [((0, 0), (0,)), ((0, 1), (1,))])
def test_a_gpu_of_a_running_job_stays_occupied_when_slots_are_renumbered(
    tmp_path: Path, gpus: tuple[int, ...], edited_gpus: tuple[int, ...]
) -> None:
    """The cluster config is edited while two jobs run: a GPU gets fewer slots, or is no longer listed."""

    async def scenario() -> None:
        one = SimulatedServer("one", gpus=True)
        one.pool = SlotPool("one", tuple(map(Slot, range(len(gpus)), gpus)))
        one.outcome_of = exits(UNTIL_ENDED, UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=3)
        async with run:
            await run.wait_until(lambda: run.states() == ["running", "running", "waiting"])
        one.pool = SlotPool("one", tuple(map(Slot, range(len(edited_gpus)), edited_gpus)))
        still_running: list[list[str]] = []

        def outcome(request: StartRequest) -> Outcome:
            still_running.append(one.running())
            return 0

        one.outcome_of = outcome
        async with run:
            first, second = one.running()
            await run.wait_until(lambda: sum(line.endswith("still runs") for line in run.log) == 2)
            one.end(first)
            await run.wait_until(lambda: run.job_state(0).state == "done")
            one.end(second)
            await run.finished()
        assert (run.states(), still_running) == (["done"] * 3, [[]])

    asyncio.run(scenario())


def test_a_draining_dispatcher_cancels_jobs_and_starts_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = SimulatedServer("one")
        one.outcome_of = exits(UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=3)
        async with run:
            await run.wait_until(lambda: run.job_state().attempts and run.job_state().attempts[0].state == "running")
        run.request("cancel", run.jobs[0].id, run.jobs[1].id)
        drained = ListRun(tmp_path, one, jobs=3, drain=True)
        async with drained:
            await drained.finished()
        assert drained.states() == ["cancelled", "cancelled", "waiting"]
        assert (len(one.requests), one.running()) == (1, [])

    asyncio.run(scenario())


def test_an_unexpected_exception_ends_the_dispatcher(tmp_path: Path) -> None:
    class Broken(SimulatedServer):
        async def start(self, *request: Any) -> dict[str, Any]:
            raise ZeroDivisionError

    async def scenario() -> None:
        async with ListRun(tmp_path, Broken("one")) as run:
            await run.finished()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
