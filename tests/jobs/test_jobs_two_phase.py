"""Base models in a job list: each is trained once, and every experiment starts from its own.

Servers are simulated as in test_jobs_dispatcher.py; the cache of base models is real. The test that kills a dispatcher
at each record of its journal runs real jobs.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dispatchers import MOMENTS, DispatcherCall, Dispatchers, dispatchers
from test_jobs_dispatcher import UNTIL_ENDED, ListRun, Outcome, SimulatedServer, StartRequest, exits, job, make_fast

from distributed.files import KIT
from distributed.jobs.journal import journal
from distributed.jobs.journal.state import Attempt
from distributed.jobs.list_plan import base_conflict
from distributed.jobs.lists.job import Job, Options, job_id
from distributed.jobs.schedule import waiting
from distributed.jobs.schedule.backend import NotStarted, Unreachable
from distributed.jobs.schedule.base_cache import Cache
from distributed.training import base_model
from distributed.training.base_model import CACHE, FILES, TRAINING, hash_of

A, B = "a" * 64, "b" * 64  # digests


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_fast(monkeypatch)
    monkeypatch.setattr(waiting, "LOCK_INTERVAL", 0.01)
    monkeypatch.chdir(tmp_path)


def trainer(digest: str, **options: Any) -> Job:
    settings = {"mode": "base_only", "digest": digest}
    return Job(job_id(settings), settings, Options(**options), f"{TRAINING}/{hash_of(digest)}", trains=digest)


def experiment(number: int, digest: str, **options: Any) -> Job:
    return replace(job(number, **options), base=digest)


class Server(SimulatedServer):
    """A simulated server whose base trainings write `training_files`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.training_files: tuple[str, ...] = FILES
        self.base_errors: list[Exception] = []  # one per call of ensure_base()

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        left_out = await super().fetch_results(attempt, job)
        if job.trains:
            write_files(Path(job.output), self.training_files)
        return left_out

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> dict[str, Any]:
        found = await super().start(attempt, job, needs)
        return {"state": "running"} if attempt.queued_after else found  # without a pid: the attempt waits in the queue

    async def ensure_base(self, digest: str) -> int:
        if self.base_errors:
            raise self.base_errors.pop(0)
        return await super().ensure_base(digest)


def write_files(output: Path, names: tuple[str, ...] = FILES) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for name in names:
        (output / name).write_text(json.dumps({"held_out_loss": 1.5}))


def publish(digest: str) -> None:
    """Publish a base model, as an earlier list would."""
    source = Path("earlier")
    write_files(source)
    base_model.publish(CACHE, digest, base_model.stage(CACHE, str(source), base_model.manifest_of(str(source), digest)))


def trains(outcome: Outcome, otherwise: Outcome = 0) -> Callable[[StartRequest], Outcome]:
    """Return an `outcome_of` function of a server: base trainings have one outcome, and other jobs another."""
    return lambda request: outcome if request.job.trains else otherwise


def started(*servers: SimulatedServer) -> list[str]:
    """The jobs in start order: the letter of a base model, or the number of an experiment."""
    requests = [request for server in servers for request in server.requests]
    return [request.job.trains[:1] or str(request.job.settings["n"]) for request in requests]


# ---------------------------------------------------------------- order of starts


def test_a_base_model_is_trained_once_for_all_its_experiments(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one", 3)
        jobs = [trainer(A), *(experiment(number, A) for number in range(4))]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        assert run.states() == ["done"] * 5
        assert started(one)[0] == "a"
        assert len(one.requests) == 5
        assert one.bases == [A] * 4
        found = Cache(tmp_path).verify(A)
        assert (found["digest"], found["server"], found["held_out_loss"]) == (A, "one", 1.5)
        assert not [name for name in (tmp_path / CACHE).iterdir() if "incomplete" in name.name]

    asyncio.run(scenario())


def test_an_experiment_waits_for_its_base_model_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one", 3)
        one.outcome_of = lambda request: UNTIL_ENDED if request.job.trains == B else 0
        jobs = [trainer(A), trainer(B), experiment(1, A), experiment(2, B)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.wait_until(lambda: run.job_state(2).state == "done")
            assert run.job_state(3).state == "waiting"
            one.end(f"{jobs[1].id}.1")
            await run.finished()
        assert run.states() == ["done"] * 4
        assert sorted(started(one)[:2]) == ["a", "b"]

    asyncio.run(scenario())


def test_base_trainings_start_before_other_jobs(tmp_path: Path) -> None:
    """Otherwise the experiments that wait for a training would run last, and the list would take longer."""

    async def scenario() -> None:
        one = Server("one", 1)
        one.disconnect()
        async with ListRun(tmp_path, one, jobs=[job(1), job(2), trainer(A), experiment(3, A)]) as run:
            await run.wait_until(lambda: len(run.dispatcher.starts.queue._required) == 3)
            one.reconnect()
            await run.finished()
        assert started(one)[0] == "a"

    asyncio.run(scenario())


def test_a_server_with_the_base_model_is_preferred(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Server("one", 4), Server("two", 4, labels=["x"])
        one.outcome_of = two.outcome_of = trains(0, UNTIL_ENDED)
        jobs = [trainer(A, labels=("x",)), *(experiment(number, A) for number in (1, 2))]
        async with ListRun(tmp_path, one, two, jobs=jobs) as run:
            await run.wait_until(lambda: len(one.running() + two.running()) == 2)
            assert started(two) == ["a", "1", "2"]
            for name in two.running():
                two.end(name)
            await run.finished()

    asyncio.run(scenario())


# ---------------------------------------------------------------- base models that fail


def test_a_failed_base_model_fails_only_its_experiments_until_a_retry(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one", 2)
        one.outcome_of = lambda request: 3 if request.job.trains == A else 0
        jobs = [trainer(A, retries=0), trainer(B), experiment(1, A), experiment(2, A), experiment(3, B)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        assert run.states() == ["failed", "done", "failed", "failed", "done"]
        assert {run.job_state(2).reason, run.job_state(3).reason} == {f"base {hash_of(A)} failed"}
        assert not run.job_state(2).attempts
        one.outcome_of = trains(0)
        for argument in (jobs[0].id, jobs[2].id, "failed"):
            text = run.path.read_text()
            run.request("retry", argument)
            async with run:
                await run.finished()
            assert run.states() == ["done"] * 5, argument
            run.path.write_text(text)
            base_model.remove(CACHE, hash_of(A))
            one.requests.clear()

    asyncio.run(scenario())


def test_experiments_of_a_failed_base_model_count_for_max_failures(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one", 4)
        one.outcome_of = lambda request: 3 if request.job.trains == A else UNTIL_ENDED
        jobs = [trainer(A, retries=0), experiment(1, A), job(2), job(3)]
        async with ListRun(tmp_path, one, jobs=jobs, max_failures=2) as run:
            await run.wait_until(lambda: run.state.paused)
            for name in one.running():
                one.end(name)
            await run.finished()
        assert run.state.paused == "--max-failures 2: 2 jobs failed"
        assert run.states()[:2] == ["failed", "failed"]

    asyncio.run(scenario())


def test_the_owner_file_of_an_output_directory_includes_the_hash_of_the_base_model() -> None:
    owners = {each.owner for each in (experiment(1, A), experiment(1, B), job(1))}
    assert len(owners) == 3


def test_a_failed_base_training_is_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = exits(3, 3, 0)
        async with ListRun(tmp_path, one, jobs=[trainer(A, retries=2), experiment(1, A)]) as run:
            await run.finished()
        assert run.states() == ["done", "done"]
        assert started(one) == ["a", "a", "a", "1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("missing", FILES)
def test_a_base_training_without_its_files_has_failed(tmp_path: Path, missing: str) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.training_files = tuple(name for name in FILES if name != missing)
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.finished()
        assert run.states() == ["failed", "failed"]
        assert run.failures() == ["no base model"] * 2
        assert missing in run.job_state().reason
        assert "base_only" in run.job_state().reason
        assert not base_model.names_in(CACHE)

    asyncio.run(scenario())


def test_a_cancelled_base_training_fails_the_waiting_experiments(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.wait_until(one.running)
            run.request("cancel", run.jobs[0].id)
            await run.finished()
        assert run.states() == ["cancelled", "failed"]
        assert run.job_state(1).reason == f"base {hash_of(A)} cancelled"

    asyncio.run(scenario())


def test_waiting_experiments_can_be_cancelled(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A), experiment(2, A)]) as run:
            await run.wait_until(one.running)
            run.request("cancel", run.jobs[1].id)
            await run.wait_until(lambda: run.job_state(1).state == "cancelled")
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done", "cancelled", "done"]

    asyncio.run(scenario())


# ---------------------------------------------------------------- the cache


def test_a_cached_base_model_is_not_trained(tmp_path: Path) -> None:
    async def scenario() -> None:
        publish(A)
        one = Server("one")
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.finished()
        assert run.states() == ["done", "done"]
        assert started(one) == ["1"]
        assert run.job_state().reason == "its base model was in the cache"

    asyncio.run(scenario())


def test_a_damaged_base_model_is_trained_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        publish(A)
        (tmp_path / CACHE / hash_of(A) / FILES[0]).write_text("{")
        one = Server("one")
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.finished()
        assert started(one) == ["a", "1"]
        assert Cache(tmp_path).verify(A)

    asyncio.run(scenario())


def test_a_base_model_damaged_while_the_list_runs_is_trained_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one", 2)

        def damage(request: StartRequest) -> Outcome:
            if request.job.settings.get("n") == 1:
                (tmp_path / CACHE / hash_of(A) / FILES[0]).write_text("{")
                one.base_errors = [NotStarted("damaged", "base")] * 2
            return 0

        one.outcome_of = damage
        jobs = [trainer(A), experiment(1, A), *(experiment(number, A, priority=-1) for number in (2, 3))]
        one.pool.slots = one.pool.slots[:1]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        assert run.states() == ["done"] * 4
        assert started(one).count("a") == 2
        assert Cache(tmp_path).verify(A)

    asyncio.run(scenario())


def test_a_missing_base_model_that_no_job_trains_fails_its_experiments(tmp_path: Path) -> None:
    """With --skip-phase1, a base model may be removed after the check at the start."""

    async def scenario() -> None:
        one = Server("one")
        async with ListRun(tmp_path, one, jobs=[experiment(1, A), job(2)]) as run:
            await run.finished()
        assert run.states() == ["failed", "done"]
        assert "missing or damaged" in run.job_state().reason

    asyncio.run(scenario())


def test_two_dispatchers_train_a_shared_base_model_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Server("one"), Server("two")
        one.outcome_of = trains(UNTIL_ENDED)
        (tmp_path / "second").mkdir()
        jobs = [trainer(A), experiment(1, A)]
        async with ListRun(tmp_path, one, jobs=jobs) as first:
            await first.wait_until(one.running)
            second = ListRun(tmp_path / "second", two, jobs=jobs)
            second.cache = Cache(tmp_path)
            async with second:
                await second.wait_until(lambda: any("another list" in line for line in second.log))
                assert not two.requests
                one.end(one.running()[0])
                await second.finished()
                await first.finished()
        assert (first.states(), second.states()) == (["done", "done"], ["done", "done"])
        assert (started(one), started(two)) == (["a", "1"], ["1"])

    asyncio.run(scenario())


def test_a_failed_training_of_one_list_is_run_by_another_list(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Server("one"), Server("two")
        one.outcome_of = trains(UNTIL_ENDED)
        (tmp_path / "second").mkdir()
        jobs = [trainer(A, retries=0), experiment(1, A)]
        async with ListRun(tmp_path, one, jobs=jobs) as first:
            await first.wait_until(one.running)
            second = ListRun(tmp_path / "second", two, jobs=jobs)
            second.cache = Cache(tmp_path)
            async with second:
                await second.wait_until(lambda: any("another list" in line for line in second.log))
                one.end(one.running()[0], 3)
                await first.finished()
                await second.finished()
        assert (first.states(), second.states()) == (["failed", "failed"], ["done", "done"])
        assert started(two) == ["a", "1"]

    asyncio.run(scenario())


def test_a_base_model_is_not_published_while_another_list_holds_its_lock(tmp_path: Path) -> None:
    """The first dispatcher was killed; another list has locked the base model to train it again."""

    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)])
        async with run:
            await run.wait_until(one.running)
        run.cache.release(A)  # as the exit of the dispatcher does
        other = Cache(tmp_path)
        assert other.claim(A) == "train"
        one.outcome_of = trains(0)
        async with run:
            await run.wait_until(lambda: any("another list" in line for line in run.log))
            one.end(one.running()[0])
            await run.wait_until(lambda: run.job_state(0).state == "ending")
            await asyncio.sleep(0.1)
            assert not files_except_locks(tmp_path / CACHE)
            other.release(A)
            await run.finished()
        assert run.states() == ["done", "done"]

    asyncio.run(scenario())


def files_except_locks(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


NO_ROOM = f"base {hash_of(B)}: {CACHE}: No space left on device: 1 MiB free, 2 MiB needed"


def test_a_server_without_space_for_a_base_model_removes_the_outputs_of_finished_trainings(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, two = Server("one"), Server("two")
        jobs = [trainer(A), trainer(B), experiment(1, B)]
        for server, count in ((one, 1), (two, 2)):  # each server trains one base model
            async with ListRun(tmp_path, server, jobs=jobs[:count]) as run:
                await run.finished()
        one.base_errors = [NotStarted(NO_ROOM)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        assert run.states() == ["done"] * 3
        assert (one.removed, one.bases) == ([f"{TRAINING}/{hash_of(A)}"], [B])
        assert f"one: {NO_ROOM}; {TRAINING}/{hash_of(A)} is removed there" in run.log

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", [NO_ROOM, "rsync: permission denied"])
def test_nothing_is_removed_if_no_training_ran_there_or_the_error_is_another(reason: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.base_errors = [NotStarted(reason)]
        jobs = [experiment(1, A)] if reason == NO_ROOM else [trainer(A), experiment(1, A)]
        publish(A)
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.finished()
        assert (one.removed, run.states()) == ([], ["done"] * len(jobs))
        assert any("was not started: " + reason in line for line in run.log)

    asyncio.run(scenario())


@pytest.mark.parametrize(("ended", "refused"), [(True, True), (False, False)])
def test_an_experiment_that_has_run_cannot_change_its_base_model(tmp_path: Path, ended: bool, refused: bool) -> None:
    """A change of the section base_models, such as another `version`, gives the job another base model."""

    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(0, 0 if ended else UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A), *([] if ended else [experiment(2, A)])])
        async with run:
            await run.wait_until(lambda: run.job_state(1).state == ("done" if ended else "running"))
        known = run.job_state(1 if ended else 2)
        fault = base_conflict(known, replace(known.job, base=B))
        assert bool(fault) == refused
        assert not refused or f"has run from base {hash_of(A)}, but would now run from base {hash_of(B)}" in fault
        assert not base_conflict(known, known.job)

    asyncio.run(scenario())


def test_the_copy_of_a_base_model_is_repeated_after_a_lost_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.base_errors = [Unreachable("rsync: connection unexpectedly closed")]
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.finished()
        assert run.states() == ["done"] * 2
        assert any("was not started: rsync: connection unexpectedly closed" in line for line in run.log)

    asyncio.run(scenario())


# ---------------------------------------------------------------- a server with a queue


def queue_server(training_outcome: Outcome) -> Server:
    """A server that, like SLURM, accepts experiments whose base model is still being trained."""
    one = Server("one", 8)
    one.queues_dependents = True
    one.outcome_of = trains(training_outcome, UNTIL_ENDED)
    return one


def test_experiments_wait_in_the_queue_of_a_server_for_their_base_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = queue_server(UNTIL_ENDED)
        jobs = [trainer(A), experiment(1, A), experiment(2, A)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.wait_until(lambda: len(one.running()) == 3)
            assert [request.after for request in one.requests] == ["", f"{jobs[0].id}.1", f"{jobs[0].id}.1"]
            for name in one.running():
                one.end(name)
            await run.finished()
        assert run.states() == ["done"] * 3
        assert one.bases == [], "the server copies the base model itself"

    asyncio.run(scenario())


@pytest.mark.parametrize("training_ends", ["first", "last"])
def test_queued_experiments_whose_base_training_has_failed_are_requeued(tmp_path: Path, training_ends: str) -> None:
    async def scenario() -> None:
        one = queue_server(UNTIL_ENDED)
        jobs = [trainer(A), experiment(1, A)]
        async with ListRun(tmp_path, one, jobs=jobs) as run:
            await run.wait_until(lambda: len(one.running()) == 2)
            one.outcome_of = trains(0)
            training, waiting = (f"{job.id}.1" for job in jobs)
            ends = [lambda: one.end(training, 3), lambda: one.end(waiting, None, cause="cancelled outside")]
            for end in ends if training_ends == "first" else ends[::-1]:
                end()
            await run.finished()
        assert run.states() == ["done", "done"]
        assert run.failures() == ["exit code", ""]
        assert [attempt.failure for attempt in run.job_state(1).attempts] == [""]

    asyncio.run(scenario())


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("running_job", ["training", "experiment"])
def test_an_interrupted_list_resumes_without_a_second_training(tmp_path: Path, running_job: str) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(UNTIL_ENDED) if running_job == "training" else trains(0, UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)])
        async with run:
            await run.wait_until(lambda: [name for name in one.running() if (name in run.state.open) and
                                      started(one)[-1] == ("a" if running_job == "training" else "1")])  # fmt: skip
        one.outcome_of = trains(0)
        run.cache.release(A)  # as the exit of the dispatcher does
        async with run:
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done", "done"]
        assert started(one) == ["a", "1"]

    asyncio.run(scenario())


def test_a_base_model_removed_between_two_dispatchers_is_trained_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(0, UNTIL_ENDED)
        run = ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A), experiment(2, A)])
        async with run:
            await run.wait_until(lambda: "1" in started(one))
        base_model.remove(CACHE, hash_of(A))
        run.cache.release(A)  # as the exit of the dispatcher does
        one.outcome_of = trains(0)
        async with run:
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done"] * 3
        assert started(one) == ["a", "1", "a", "2"]
        assert [each["event"] for each in journal.read(run.path)[0]].count("requeued") == 1

    asyncio.run(scenario())


def test_an_added_experiment_may_need_a_base_model_that_is_cached_or_in_training_or_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        publish(A)
        one = Server("one", 1)
        jobs = [experiment(1, A), trainer(B), experiment(2, B)]
        one.outcome_of = lambda request: UNTIL_ENDED if request.job.trains == B else 0
        run = ListRun(tmp_path, one, jobs=jobs)
        run.files = {"more": [trainer(A), trainer("c" * 64), *(experiment(n, "abc"[n - 7] * 64) for n in (7, 8, 9))]}
        async with run:
            await run.wait_until(one.running)
            run.request("add", "more")
            await run.wait_until(lambda: run.state.handled_requests)
            one.end(one.running()[0])
            await run.finished()
        assert run.states() == ["done"] * 8
        assert sorted(started(one)) == ["1", "2", "7", "8", "9", "b", "c"]
        assert run.state.trainers[A].reason == "its base model was in the cache"

    asyncio.run(scenario())


# ---------------------------------------------------------------- a dispatcher that is killed

CONCURRENT = 13  # lists that run at the same time; they mostly sleep
SCRIPT = """#!/bin/sh
echo start >>"$MUSTER_OUTPUT_DIR/starts"
sleep 0.2
if [ -z "$MUSTER_BASE_MODEL" ]; then
  if [ "$(wc -l <"$MUSTER_OUTPUT_DIR/starts")" = 1 ]; then exit 3; fi
  for name in best_base_model.pt base_metrics.json base_losses.json base_config.json; do
    echo '{"held_out_loss": 1.5}' >"$MUSTER_OUTPUT_DIR/$name"
  done
else
  echo "$MUSTER_JOB" >"$MUSTER_OUTPUT_DIR/job.json"
  test -s "$MUSTER_BASE_MODEL/best_base_model.pt"
fi
"""
RUN = ("--backend", "local", "--slots", "2", "--no-tmux", "--script", "job.sh", "--jobs-config", "jobs.json")


@pytest.fixture(scope="module")
def forked() -> Iterator[Dispatchers]:
    with dispatchers() as server:
        yield server


def prepared(directory: Path) -> Path:
    directory.mkdir(parents=True)
    jobs = [{"mode": "full_fine_tuning", "fold": fold, "participants": ["a", "b"], "base_participants": ["c"]}
            for fold in (0, 1)]  # fmt: skip
    (directory / "jobs.json").write_text(json.dumps(jobs))
    (directory / "job.sh").write_text(SCRIPT)
    (directory / "job.sh").chmod(0o755)
    return directory


def outcome(directory: Path) -> list[Any]:
    """The state and the number of starts of each job, the number of valid base models, and incomplete copies."""
    found = json.loads((directory / "results.json").read_text())["jobs"]
    starts = [(directory / job["output"] / "starts").read_text().splitlines() for job in found]
    models = [base_model.verify(str(path)) for path in directory.glob(f"{CACHE}/[!.]*")]
    incomplete = [path.name for path in directory.glob(f"{CACHE}/.*incomplete*")]
    return [[job["state"] for job in found], [len(lines) for lines in starts], len(models), incomplete]


def test_a_dispatcher_killed_at_any_record_trains_its_base_model_once(tmp_path: Path, forked: Dispatchers) -> None:
    undisturbed = prepared(tmp_path / "undisturbed")
    assert forked.run(DispatcherCall(undisturbed, RUN, two_phase=True)) == 0
    expected = [["done"] * 3, [2, 1, 1], 1, []]
    assert outcome(undisturbed) == expected
    records = len(journal.read(undisturbed / "results.journal")[0])
    fewest = 1 + 3 * 4  # one record `list`, and `start`, `ended` and `settle` of each of the four attempts
    assert fewest <= records <= fewest + 4  # `running` is recorded only if a start is reported before the attempt ends
    kills = [(moment, number) for number in range(1, records + 1) for moment in MOMENTS]
    for first in range(0, len(kills), CONCURRENT):
        killed = {kill: prepared(tmp_path / f"{kill[0]}-{kill[1]}") for kill in kills[first : first + CONCURRENT]}
        chains = [[DispatcherCall(path, RUN, kill, two_phase=True), DispatcherCall(path, RUN, two_phase=True)]
                  for kill, path in killed.items()]  # fmt: skip
        for kill, codes, (call, _) in zip(killed, forked.run_all(chains), chains, strict=True):
            # A list may write fewer records than the undisturbed list, and then ends before it is killed.
            killed_code = 0 if codes[0] == 0 and kill[1] > fewest else -9
            assert (kill, codes, call.printed) == (kill, [killed_code, 0], call.printed)
            assert (kill, outcome(call.directory)) == (kill, expected)


def test_added_experiments_use_the_base_models_of_the_list_and_new_ones(tmp_path: Path, forked: Dispatchers) -> None:
    directory = prepared(tmp_path / "list")
    assert forked.run(DispatcherCall(directory, RUN, two_phase=True)) == 0
    add = DispatcherCall(directory, ("add", "more.json"))
    known = json.loads((directory / "jobs.json").read_text())[0]
    leak = {**known, "prefix": "leak", "base_participants": ["a"]}
    more = [{**known, "prefix": "p"}, {**known, "prefix": "q", "base_participants": ["d"], "_after": "p"}]
    (directory / "more.json").write_text(json.dumps([*more, leak]))
    assert forked.run(add) == 0, add.printed
    assert "warning: leak/fold0_a: holds out a, and its base model " in add.printed
    assert "added 3 new jobs and 2 base models to train; to start: " in add.printed
    (directory / "more.json").unlink()
    for arguments in (("resume",), RUN):
        assert forked.run(DispatcherCall(directory, arguments, two_phase=True)) == 0, add.printed
        assert outcome(directory) == [["done"] * 8, [2] * 3 + [1] * 5, 3, []]


def test_run_distributed_training_runs_a_job_that_has_a_base_model_hash(tmp_path: Path, forked: Dispatchers) -> None:
    directory = prepared(tmp_path / "list")
    (directory / "jobs.json").write_text(json.dumps([{"prefix": "p", "fold": 0, "_base_model_hash": hash_of(A)}]))
    call = DispatcherCall(directory, RUN)
    assert forked.run(call) == 2
    assert f"_base_model_hash={hash_of(A)}: " in call.printed
    assert not (directory / "results.journal").exists()
    publish(A)
    (tmp_path / "experiments").rename(directory / "experiments")
    assert forked.run(call) == 0
    assert "finished: 1 of 1 done" in call.printed
    assert json.loads((directory / "experiments/p/fold0/job.json").read_text())["_base_model_hash"] == hash_of(A)


def test_the_state_shows_the_training_that_a_job_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = Server("one")
        one.outcome_of = trains(UNTIL_ENDED)
        async with ListRun(tmp_path, one, jobs=[trainer(A), experiment(1, A)]) as run:
            await run.wait_until(one.running)
            assert run.state.waits_for(run.job_state(1)) is run.job_state(0)

    asyncio.run(scenario())


# ---------------------------------------------------------------- the worked example

NAMES = ["01", "02", "03"]
HELPER_CALL = ("distributed_train_helper.py", "jobs_config.json")
CALL = ("run_two_phase_training.py", "--cluster-config", "cluster_config.json", "--jobs-config", "jobs_config.json",
        "--script", "oct1_train.py", "--backend", "local", "--slots", "4", "--no-tmux")  # fmt: skip


@pytest.fixture
def worked_example(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write a list of five batch compositions times three folds; return a function that calls a program of Muster."""
    jobs = [
        {"prefix": f"batch{round(100 * share)}", "fold": fold, "target_batch_pct": share, "participants": NAMES,
         "mode": "full_fine_tuning"}
        for share in (0.1, 0.25, 0.5, 0.75, 1.0) for fold in range(3)
    ]  # fmt: skip
    (tmp_path / "jobs_config.json").write_text(json.dumps(jobs))
    (tmp_path / "cluster_config.json").write_text(json.dumps({"servers": [{"host": "gpu1"}]}))
    shutil.copy(Path(__file__).with_name("oct1_train.py"), tmp_path)

    def call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, f"{KIT}/scripts/jobs/{program}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)

    return call


def test_the_worked_example_starts_15_experiments_from_one_base_model_and_reports_their_leaks(
    worked_example: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The base model is trained on all participants, also on those that the experiments hold out."""
    shown = worked_example(*HELPER_CALL)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "script             train.py; " in shown.stdout  # the default, without --script
    assert "leaks              15 jobs\n" in shown.stdout
    shown = worked_example(*HELPER_CALL, "--script", str(tmp_path / "oct1_train.py"))
    [name] = re.findall(r"^([0-9a-f]{12})  no      15 ", shown.stdout, re.MULTILINE)

    refused = worked_example(*CALL, "--refuse-leaks")
    assert refused.returncode == 2
    assert f"batch10/fold0_01: holds out 01, and its base model {name} is trained on it\n" in refused.stderr
    assert not (tmp_path / "results.journal").exists()

    done = worked_example(*CALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: batch10/fold0_01: holds out 01, and its base model {name} is trained on it\n" in done.stderr
    assert "warning: and 5 more\n" in done.stderr
    assert "finished: 16 of 16 done" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())["jobs"]
    training, *experiments = results
    assert (training["trains_base_model"], len(training["attempts"]), len(experiments)) == (name, 1, 15)
    assert "leak" not in training
    phase = json.loads((tmp_path / "phase2_experiments.json").read_text())["jobs"]
    page = (tmp_path / "results.html").read_text()
    for found, marked in zip(experiments, phase, strict=True):
        held_out = NAMES[found["settings"]["fold"]]
        leak = f"holds out {held_out}, and its base model {name} is trained on it"
        assert (found["leak"], marked["leak"], leak in page) == (leak, leak, True)
        result = json.loads((tmp_path / found["output"] / "result.json").read_text())
        assert result["job"] == {"id": found["id"], **found["settings"], "_base_model_hash": name}
        assert (result["held_out"], result["weights"]) == (held_out, "trained on 01 02 03")
    again = worked_example(*CALL[:1], "resume")
    assert (again.returncode, again.stderr.count("warning: batch")) == (0, 10)


def test_a_base_training_that_writes_elsewhere_fails_and_names_the_new_files(
    worked_example: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "oct1_train.py"
    (tmp_path / "models").mkdir()
    script.write_text(script.read_text().replace('os.environ["MUSTER_OUTPUT_DIR"]', '"models"'))
    done = worked_example(*CALL, "--retries", "0")
    assert done.returncode == 1
    assert "; wrote nothing to its output directory ($MUSTER_OUTPUT_DIR); new files elsewhere on local: models" in (
        done.stdout
    )


def test_a_list_started_with_an_option_of_an_older_version_is_resumed(
    worked_example: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert worked_example(*CALL).returncode == 0
    path = tmp_path / "results.journal"
    first, rest = path.read_text().split("\n", 1)
    record = json.loads(first)
    del record["call"]["refuse_leaks"]
    record["call"]["allow_shared_held_out"] = True
    path.write_text(f"{json.dumps(record, separators=(',', ':'))}\n{rest}")
    resumed = worked_example(CALL[0], "resume")
    assert (resumed.returncode, "16 of 16 done" in resumed.stdout) == (0, True), resumed.stderr
    refused = worked_example(*CALL, "--allow-shared-held-out")
    assert (refused.returncode, "unrecognized arguments: --allow-shared-held-out" in refused.stderr) == (2, True)
