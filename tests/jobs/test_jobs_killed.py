"""A dispatcher that is killed at any moment, then `resume`: the results are the same, and no job runs twice.

Real dispatchers with --backend local, real jobs. For each record of the journal, the dispatcher is killed with SIGKILL
before, during and after the commit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dispatchers import MOMENTS, DispatcherCall, Dispatchers, dispatchers

from distributed.jobs.journal import journal

AT_ONCE = 13  # concurrent lists, which mostly sleep
# Records its start. A patient job waits for the file "go"; a flaky one fails the first time.
SCRIPT = """#!/bin/sh
echo "start $*" >>"$MUSTER_OUTPUT_DIR/starts"
if [ "$2" = patient ]; then until [ -e go ]; do sleep 0.05; done; fi
sleep 0.2
echo '{"step": 5, "loss": 2.5}' >"$MUSTER_OUTPUT_DIR/metrics.jsonl"
if [ "$2" = flaky ] && [ "$(wc -l <"$MUSTER_OUTPUT_DIR/starts")" = 1 ]; then
  echo "no luck"
  exit 3
fi
"""
JOBS: list[dict[str, Any]] = [{"kind": "steady", "_env": {"TOKEN": "s3cr3t"}}, {"kind": "flaky"}]
RUN = ("--backend", "local", "--slots", "2", "--no-tmux", "--script", "job.sh", "--jobs-config", "jobs.json")


@pytest.fixture(scope="module")
def forked() -> Iterator[Dispatchers]:
    with dispatchers() as server:
        yield server


def prepared(directory: Path, jobs: Sequence[Mapping[str, Any]] = JOBS) -> Path:
    directory.mkdir(parents=True)
    (directory / "jobs.json").write_text(json.dumps(jobs))
    (directory / "job.sh").write_text(SCRIPT)
    (directory / "job.sh").chmod(0o755)
    return directory


def outcome(directory: Path) -> dict[str, Any]:
    """The results without times, and without numbers, slots and processes of attempts."""
    results = json.loads((directory / "results.json").read_text())
    facts = ("failure", "exit_code", "signal", "last_lines", "server")
    for job in results["jobs"]:
        job["attempts"] = [{name: attempt[name] for name in facts} for attempt in job["attempts"]]
        job["starts"] = (directory / job["output"] / "starts").read_text().splitlines()
    totals = {name: value for name, value in results["totals"].items() if not name.endswith("seconds")}
    return {"jobs": results["jobs"], "totals": totals, "state": results["state"], "reason": results["reason"]}


def test_a_list_whose_dispatcher_is_killed_at_any_record_has_the_same_results(
    tmp_path: Path, forked: Dispatchers
) -> None:
    undisturbed = prepared(tmp_path / "undisturbed")
    assert forked.run(DispatcherCall(undisturbed, RUN)) == 0
    expected = outcome(undisturbed)
    assert [len(job["starts"]) for job in expected["jobs"]] == [1, 2]
    assert [job["state"] for job in expected["jobs"]] == ["done", "done"]
    records = len(journal.read(undisturbed / "results.journal")[0])
    fewest = 1 + 3 * 3  # record `list`; for each of three attempts, records `start`, `ended` and `settle`
    assert fewest <= records <= fewest + 3  # an attempt that ends before its start is reported has no record `running`
    kills = [(moment, number) for number in range(1, records + 1) for moment in MOMENTS]
    for first in range(0, len(kills), AT_ONCE):
        killed = {kill: prepared(tmp_path / f"{kill[0]}-{kill[1]}") for kill in kills[first : first + AT_ONCE]}
        chains = [
            [DispatcherCall(path, RUN, kill), DispatcherCall(path, next_call(kill))] for kill, path in killed.items()
        ]
        for kill, codes, (call, _) in zip(killed, forked.run_all(chains), chains, strict=True):
            killed_code = 0 if codes[0] == 0 and kill[1] > fewest else -9
            assert (kill, codes, call.printed) == (kill, [killed_code, 0], call.printed)
            assert (kill, outcome(call.directory)) == (kill, expected)


def next_call(kill: tuple[str, int]) -> tuple[str, ...]:
    """The arguments that continue a killed list: those of the first call if the list was not recorded."""
    return RUN if kill in [("before", 1), ("during", 1)] else ("resume",)


def test_a_running_job_is_found_after_its_dispatcher_was_killed(tmp_path: Path, forked: Dispatchers) -> None:
    # The dispatcher is killed after its third record. The first three are `list`, `start` and `running`.
    call = DispatcherCall(prepared(tmp_path / "list", [{"kind": "patient"}]), RUN, ("after", 3))
    with ThreadPoolExecutor(1) as pool:
        codes = pool.submit(forked.run_all, [[call, DispatcherCall(call.directory, ("resume",))]])
        while " still runs\n" not in call.printed and not codes.done():
            time.sleep(0.02)
        (call.directory / "go").touch()
    assert codes.result() == [[-9, 0]], call.printed
    (job,) = outcome(call.directory)["jobs"]
    assert (job["state"], len(job["attempts"]), len(job["starts"])) == ("done", 1, 1)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_list_whose_dispatcher_was_killed_before_its_first_record_cannot_be_resumed(
    tmp_path: Path, forked: Dispatchers, moment: str
) -> None:
    call = DispatcherCall(prepared(tmp_path / "list"), RUN, (moment, 1))
    assert forked.run(call) == -9
    for command in (("resume",), ("status",), ("cancel", "all"), ("retry", "failed"), ("why", "x"), ("logs", "x")):
        assert forked.run(DispatcherCall(call.directory, command)) == 2
    assert call.printed.count("results.journal: contains no job list; rerun the command that starts the list") == 6


def test_a_list_finishes_after_repeated_kills_of_its_dispatcher(tmp_path: Path, forked: Dispatchers) -> None:
    directory = prepared(tmp_path / "list")
    kills = 0
    while (code := forked.run(DispatcherCall(directory, ("resume",) if kills else RUN, ("before", 2 + kills)))) == -9:
        kills += 1
    assert code == 0
    assert [len(job["starts"]) for job in outcome(directory)["jobs"]] == [1, 2]
    assert kills > 3


def test_jobs_that_are_added_are_neither_lost_nor_run_twice_if_a_dispatcher_is_killed(
    tmp_path: Path, forked: Dispatchers
) -> None:
    """The dispatcher is killed while it adds the jobs. If no dispatcher runs, `add` itself is killed."""
    more = [{"kind": "new", "_env": {"TOKEN": "s3cr3t"}, "_after": "steady"}, {"kind": "other"}]
    jobs = [{"kind": "steady", "prefix": "steady"}, {"kind": "patient"}]
    add = ("add", "more.json")

    def prepared_to_add(name: str) -> Path:
        directory = prepared(tmp_path / name, jobs)
        (directory / "more.json").write_text(json.dumps(more))
        (directory / "go").touch()
        assert forked.run(DispatcherCall(directory, RUN, ("after", 1))) == -9
        return directory

    chains = []
    for number in range(1, 6):  # the records `list` and `added`, and the first records of jobs
        for moment in MOMENTS:
            path = prepared_to_add(f"{moment}-{number}")
            journal.request(path / "results.journal", "add", [str(path / "more.json")])
            chains.append([DispatcherCall(path, ("resume",), (moment, number)), DispatcherCall(path, ("resume",))])
    for moment in MOMENTS:
        path = prepared_to_add(f"add-{moment}")
        chains.append(
            [DispatcherCall(path, add, (moment, 1)), DispatcherCall(path, add), DispatcherCall(path, ("resume",))]
        )
    for first in range(0, len(chains), AT_ONCE):
        codes = forked.run_all(chains[first : first + AT_ONCE])
        for chain, chain_codes in zip(chains[first : first + AT_ONCE], codes, strict=True):
            call = chain[0]
            assert (call, chain_codes, call.printed) == (call, [-9, *[0] * (len(chain) - 1)], call.printed)
            results = outcome(call.directory)["jobs"]
            assert [(job["state"], len(job["starts"])) for job in results] == [("done", 1)] * 4, (call, call.printed)
