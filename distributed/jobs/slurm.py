"""A cluster with SLURM, from the dispatcher's side: one server, on which a start is one element of an array of sbatch.

The list is called on a login node. The compute nodes see the same files under the same paths: the working directory,
the kit and the Python that runs it. In cluster_config.json

  servers     the first entry describes a compute node: with `gpus` 0 jobs get `--device cpu`, otherwise each job asks
              for as many GPUs as its `_gpus` says (--gres=gpu:N). `python` and `setup` mean what they mean over ssh.
              The host is not connected to: SLURM chooses node and GPUs, and `labels` need not be listed
  sbatch      options of sbatch: partition, account, --cpus-per-task, ...; a --gres or --gpus of them gets the number
              of GPUs that a job needs, and keeps its type
  max_queued  how many jobs may be in SLURM's queue or running at once

and in jobs_config.json `_timeout` becomes --time as well, `_labels` become --constraint.

What is started in one moment goes into one array for each need (GPUs, time, labels). The order of an attempt is a file
that only one process can take; see array_task.py. The exit code that the supervisor writes is the truth about an
attempt; SLURM's queue, asked for all elements in one call, only says that one waits, or that none can write any more.
An element never runs again, as it is submitted with --no-requeue: where SLURM takes its node away, the next attempt is
the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.files import KIT, write_file
from distributed.jobs import array_task, host
from distributed.jobs.array_task import SERVER, SETUP
from distributed.jobs.config import Cluster, ConfigError
from distributed.jobs.dispatcher import Event, NotStarted, Order, Refused, Unreachable
from distributed.jobs.element import Element, assign, discard, job_path, needs_of, never_started, take_back
from distributed.jobs.job import Job, arguments, document
from distributed.jobs.placement import Room, Slot
from distributed.jobs.sbatch import (
    IN_QUEUE,
    LIMITS,
    QUEUE_FORMAT,
    SILENCE,
    WRONG_OPTIONS,
    Needs,
    Queue,
    any_of,
    checked_options,
    environment_of_programs,
    number_in,
    parse_queue,
    said,
    sbatch_words,
    setting,
)
from distributed.jobs.servers import ENTRY, Launch, cached_manifest
from distributed.jobs.state import Attempt

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
TICK = 0.5  # seconds between two looks at the files of running elements
QUEUE = 2.0  # seconds between two calls of squeue
PROGRESS = 2.0  # seconds between two looks at the metrics of running jobs
GATHER = 0.05  # seconds in which starts become one array
ASK = 60.0  # seconds that squeue, scancel and scontrol may take
SUBMIT = 180.0  # seconds that sbatch may take: it tries again by itself
SILENT = 3  # calls of squeue that fail, one after the other, until the connection counts as lost
FULL = 15.0  # seconds before what SLURM did not take is submitted again
CANCEL_AGAIN = 10.0  # seconds
MOST_WORDS = 200  # elements that one scancel names
MARGIN = 60.0  # seconds that SLURM leaves a job beyond its _timeout, which its supervisor watches over

Facts = dict[str, Any]


class AnyLabels(frozenset[str]):
    """SLURM knows the features of its nodes: it refuses what no node has."""

    def __ge__(self, other: object) -> bool:
        return True


@dataclass(eq=False)
class Start:
    """An attempt that is to be submitted."""

    element: Element
    needs: Needs
    order: Order | None = None  # None: it is on the disk already
    reply: asyncio.Future[Facts] | None = None  # None: it has been replied

    def answer(self, found: Facts) -> None:
        if self.reply and not self.reply.done():
            self.reply.set_result(found)
        self.reply = None

    def fail(self, error: Exception) -> bool:
        """Whether somebody waited for the reply."""
        reply, self.reply = self.reply, None
        if reply and not reply.done():
            reply.set_exception(error)
            reply.exception()
        return reply is not None


def grouped(starts: Iterable[Start]) -> list[tuple[Needs, list[Start]]]:
    """Those with the same needs together."""
    groups: dict[Needs, list[Start]] = {}
    for start in starts:
        groups.setdefault(start.needs, []).append(start)
    return list(groups.items())


class SlurmServer:
    """See dispatcher.Server."""

    def __init__(self, cluster: Cluster, launch: Launch, wanted: int) -> None:
        """wanted: slots that the jobs of the list would fill. Raises ConfigError."""
        self.name, self.launch = SERVER, launch
        self.settings, self._has_more_servers = cluster.servers[0], len(cluster.servers) > 1
        self._options = checked_options(cluster.sbatch)
        self._check_workdir()
        slots = tuple(Slot(index, None) for index in range(max(1, min(cluster.max_queued, wanted))))
        self.room = Room(SERVER, slots, AnyLabels())
        self.watches_gpus = False
        self.queues_dependents = True
        self.directory = os.path.join(launch.cwd, "logs", "jobs", launch.list_id)
        self._prefix = f"muster-{launch.list_id}-"
        self._environment = environment_of_programs(os.environ)
        self._post: Callable[[Event], None] = lambda _: None
        self._python: list[str] = []
        self._largest, self._kill_wait = 1000, 30  # elements of an array; seconds
        self._elements: dict[str, Element] = {}  # that have not ended
        self._starts: list[Start] = []
        self._held: list[Start] = []  # which SLURM has not taken, as its queue is full
        self._held_until = 0.0
        self._queue = Queue()
        self._unwanted: list[str] = []  # elements to cancel
        self._asked_for_queue = False  # by bring()
        self._files = asyncio.Lock()  # one thread at a time works on elements
        self._submitting: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[str] | None = None
        self._ready = False  # the elements are known
        self._closing = False

    def _check_workdir(self) -> None:
        asked = self.settings.workdir
        if asked and os.path.realpath(os.path.expanduser(asked)) != os.path.realpath(self.launch.cwd):
            raise ConfigError(
                f"workdir {asked}: with --backend slurm jobs run where the list is called, here {self.launch.cwd}; "
                "call it from there, or remove workdir"
            )

    # ---- connecting

    async def connect(self, post: Callable[[Event], None]) -> str:
        """See dispatcher.Server."""
        self._ready = False
        await self._end_tasks()
        self._post = post
        self._check_programs()
        try:
            self._python = await asyncio.to_thread(self._find_python)
            os.makedirs(self.directory, exist_ok=True)
        except host.HostError as error:
            raise Refused(str(error)) from None
        config = await self._call(["scontrol", "show", "config"])
        self._largest = max(1, number_in(setting(config, "MaxArraySize"), 1001))
        self._kill_wait = number_in(setting(config, "KillWait"), 30)
        self._gone = asyncio.get_running_loop().create_future()
        self._queue, self._elements, self._held = Queue(), {}, []
        self._polling = self._begin(self._poll())
        version = setting(config, "SLURM_VERSION")
        more = "; of servers only the first is used" if self._has_more_servers else ""
        return f"SLURM {version}, up to {len(self.room.slots)} jobs in its queue; watch: squeue --me{more}"

    def _check_programs(self) -> None:
        for program in PROGRAMS:
            if not shutil.which(program):
                raise Refused(f"no program {program!r} here: call it on a login node of the cluster")
        if not os.path.isfile(os.path.join(self.launch.cwd, self.launch.script)):
            raise Refused(f"script {self.launch.script}: not in {self.launch.cwd}; copy it there")

    def _find_python(self) -> list[str]:
        """Of the scripts; like everything, it must be the same file on the compute nodes."""
        own = os.path.exists(os.path.join(self.launch.cwd, ".venv", "bin", "python"))
        asked = self.settings.python or ("" if own else sys.executable)
        return host.find_python(asked, str(self.launch.cwd))

    async def lost(self) -> str:
        """See dispatcher.Server."""
        assert self._gone
        return await asyncio.shield(self._gone)

    def _lose(self, reason: str) -> None:
        self._ready = False
        if self._gone and not self._gone.done():
            self._gone.set_result(reason)
        for start in self._starts:
            start.fail(Unreachable(reason))
        self._starts = []

    async def close(self, finished: bool) -> None:
        """See dispatcher.Server."""
        self._closing = True
        self._lose("closed")
        await self._end_tasks()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the dispatcher."""

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                self._post(Event("broken", SERVER, {"error": error}))

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(look)
        return task

    async def _end_tasks(self) -> None:
        """sbatch is waited for: what it has submitted is to be known."""
        if self._submitting:
            await asyncio.wait([self._submitting])
            self._submitting = None
        if self._polling:
            self._polling.cancel()
            await asyncio.wait([self._polling])
            self._polling = None

    # ---- SLURM's programs

    async def _run(self, words: Sequence[str], limit: float) -> tuple[int, str, str]:
        """(exit code, standard output, standard error). Raises Unreachable."""
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), limit)
        except (asyncio.TimeoutError, asyncio.CancelledError) as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise Unreachable(f"{words[0]}: no answer within {limit:.0f} s") from None
        return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")

    async def _call(self, words: Sequence[str]) -> str:
        """Standard output. Raises Unreachable."""
        code, out, err = await self._run(words, ASK)
        if code:
            raise Unreachable(f"{words[0]}: {said(err) or f'exit code {code}'}")
        return out

    async def _ask_queue(self) -> Queue:
        began = time.monotonic()
        # All states: what has ended is shown for some minutes, with the reason.
        words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--format={QUEUE_FORMAT}"]
        return Queue(began, parse_queue(await self._call(words), self._prefix))

    # ---- looking

    async def look(self, attempts: Mapping[str, str]) -> dict[str, Facts]:
        """See dispatcher.Server."""
        queue = await self._ask_queue()
        found: dict[str, Facts] = {}
        async with self._files:
            self._elements, self._held, self._queue = {}, [], queue
            looks = await asyncio.to_thread(lambda: [self._find(*each) for each in attempts.items()])
        for element, state, facts in looks:
            found[element.name] = facts
            if state in ("held", "there"):
                self._elements[element.name] = element
            if state == "held":
                self._hold(Start(element, needs_of(element)))
        self._unwanted = self._orphans()
        self._ready = True
        return found

    def _element(self, name: str, output: str) -> Element:
        return Element(
            os.path.join(self.directory, name), os.path.join(self.launch.cwd, output), float(self.launch.grace)
        )

    def _find(self, name: str, output: str) -> tuple[Element, str, Facts]:
        element = self._element(name, output)
        state = element.find()
        if state == "ended":
            return element, state, {"state": "ended", **element.end()}
        if state == "absent":
            return element, state, {"state": "absent"}
        facts: Facts = {"state": "running", **element.process()}
        return element, state, facts

    def _orphans(self) -> list[str]:
        """Elements that wait, and would find nothing to do: their orders were taken back."""
        known = {(each.array, each.index) for each in self._elements.values()}
        return [entry.job for place, entry in self._queue.entries.items() if entry.waits and place not in known]

    # ---- starting

    async def start(self, order: Order) -> Facts:
        """See dispatcher.Server."""
        reply: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
        element = self._element(order.attempt, order.job.output)
        needs = self._needs(order, await asyncio.to_thread(self._number, order.after) if order.after else "")
        self._starts.append(Start(element, needs, order, reply))
        self._submit_soon()
        return await reply

    def _number(self, attempt: str) -> str:
        """Of an attempt that was submitted, as SLURM numbers its element. Raises NotStarted."""
        if (element := self._elements.get(attempt)) and element.array:
            with contextlib.suppress(OSError), open(job_path(self._array_path(element.array))) as file:
                return f"{file.read().strip()}_{element.index}"
        raise NotStarted("its base model is not submitted yet, or no longer trained", "busy")

    def _needs(self, order: Order, after: str) -> Needs:
        options = order.job.options
        seconds = None if options.timeout is None else options.timeout + self.launch.grace + MARGIN
        return Needs(
            options.gpus if self.settings.devices else 0, None if seconds is None else math.ceil(seconds / 60),
            tuple(sorted(options.labels)), after,
        )  # fmt: skip

    def _order(self, start: Start) -> Facts:
        """Everything that a compute node has to know."""
        assert start.order
        job, element = start.order.job, start.element
        device = "cuda:0" if start.needs.gpus else "cpu"
        cwd = str(self.launch.cwd)
        return {
            "command": [*host.program(self._python, self.launch.script, cwd), *arguments(job, device)],
            "script": self.launch.script, "owner": job.owner,
            "workdir": cwd, "setup": bool(self.settings.setup), "gpus": start.needs.gpus,
            "timeout": None if job.options.timeout is None else max(1, round(job.options.timeout)),
            "grace": float(self.launch.grace), "kill_wait": self._kill_wait,
            "needs": [start.needs.gpus, start.needs.minutes, list(start.needs.labels), start.needs.after],
            "trains": job.trains, "cache": self.launch.cache.directory, "settings": dict(job.settings),
            "call": array_task.carried(dict(os.environ)),
            "env": {**job.options.env, **self._base_variables(job), "MUSTER_JOB": document(job),
                    "MUSTER_OUTPUT_DIR": element.output,
                    "MUSTER_METRICS": os.path.join(element.output, "metrics.jsonl")},
        }  # fmt: skip

    def _base_variables(self, job: Job) -> dict[str, str]:
        found = {"MUSTER_BASE_MODEL": self.launch.cache.path(job.base)} if job.base else {}
        digest = job.base or job.trains
        return {**found, "MUSTER_BASE_MODEL_DIGEST": digest} if digest else found

    async def have_base(self, digest: str) -> int:
        """See dispatcher.Server: the compute nodes see the cache."""
        await cached_manifest(self.launch.cache, digest)
        return 0

    async def remove_output(self, output: str) -> None:
        """Nothing: the files are ours."""

    def _prepare(self, start: Start) -> Exception | None:
        """Write an order. Returns why it cannot be started."""
        element, order = start.element, start.order
        assert order
        try:
            os.mkdir(element.directory, 0o777)
            os.close(host.claim(element.output, order.job.owner, self.launch.script))
            if self.settings.setup:
                write_file(os.path.join(element.directory, SETUP), "\n".join(["set +e", *self.settings.setup, ""]))
            array_task.write_order(element.directory, self._order(start))
        except host.HostError as error:
            os.rmdir(element.directory)
            return NotStarted(str(error), error.kind)
        except OSError as error:
            element.forget_order()
            return NotStarted(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return None

    def _submit_soon(self) -> None:
        if not self._submitting and not self._closing:
            self._submitting = self._begin(self._submit_all())

    async def _submit_all(self) -> None:
        await asyncio.sleep(GATHER)
        try:
            while self._starts:
                starts, self._starts = self._starts, []
                new = [start for start in starts if start.order and start.reply]
                errors = await asyncio.to_thread(lambda new=new: [self._prepare(start) for start in new])  # type: ignore[misc]
                refused = {id(start): error for start, error in zip(new, errors, strict=True) if error}
                for start in starts:
                    if error := refused.get(id(start)):
                        self._refuse(start, error)
                for needs, group in grouped(start for start in starts if id(start) not in refused):
                    for place in range(0, len(group), self._largest):
                        await self._submit(needs, group[place : place + self._largest])
        finally:
            self._submitting = None

    def _refuse(self, start: Start, error: Exception) -> None:
        self._elements.pop(start.element.name, None)
        if not start.fail(error) and isinstance(error, NotStarted):
            self._post(Event("not_started", SERVER, error.facts(start.element.name)))

    async def _submit(self, needs: Needs, starts: list[Start]) -> None:
        """As one array; as several where SLURM does not take so many."""
        if self._gone is None or self._gone.done():
            for start in starts:
                start.fail(Unreachable("the connection was lost"))
            return
        if time.monotonic() < self._held_until:
            for start in starts:
                self._hold(start)
            return
        array = secrets.token_hex(4)
        path = self._array_path(array)
        try:
            await asyncio.to_thread(assign, path, array, [start.element for start in starts])
        except OSError as error:
            await self._refuse_all(starts, array, NotStarted(f"{error.filename or path}: {error.strerror}"))
            return
        try:
            reply = await self._run(self._sbatch(needs, array, len(starts)), SUBMIT)
        except Unreachable as error:
            self._no_answer(starts, str(error))
        else:
            await self._take_answer(needs, starts, array, *reply)

    async def _take_answer(self, needs: Needs, starts: list[Start], array: str, code: int, out: str, err: str) -> None:
        """Of sbatch."""
        job = out.strip().splitlines()[-1].partition(";")[0] if out.strip() else ""
        if code == 0 and job.isdecimal():
            with contextlib.suppress(OSError):  # a full disk; SLURM knows the array by its name, too
                await asyncio.to_thread(write_file, job_path(self._array_path(array)), f"{job}\n")
            self._watch(starts, array)
        elif code == 0 or any_of(SILENCE, err):
            self._no_answer(starts, f"sbatch: {said(err) or out.strip()}")
        elif any_of(LIMITS, err):
            await self._not_so_many(needs, starts, array, said(err))
        elif any_of(WRONG_OPTIONS, err):
            reason = f"sbatch: {said(err)}; correct sbatch in the cluster config, then resume"
            await self._refuse_all(starts, array, NotStarted(reason, "useless"))
        else:
            await self._refuse_all(starts, array, NotStarted(f"sbatch: {said(err)}", needs.kind_of_refusal))

    async def _refuse_all(self, starts: Sequence[Start], array: str, error: NotStarted) -> None:
        await asyncio.to_thread(discard, self._array_path(array), [start.element for start in starts])
        for start in starts:
            self._refuse(start, error)

    def _array_path(self, array: str) -> str:
        return os.path.join(self.directory, f"array-{array}")

    def _sbatch(self, needs: Needs, array: str, count: int) -> list[str]:
        relative = os.path.join("logs", "jobs", self.launch.list_id, f"array-{array}", "%a.out")
        script = [f"{KIT}/scripts/lib/array_task.sh", KIT, sys.executable, self._array_path(array)]
        return sbatch_words(
            self._options, needs, name=f"{self._prefix}{array}", count=count, directory=str(self.launch.cwd),
            output=relative, script=script,
        )  # fmt: skip

    def _watch(self, starts: Sequence[Start], array: str) -> None:
        now = time.monotonic()
        for index, start in enumerate(starts):
            element = start.element
            element.array, element.index, element.since = array, index, now
            self._elements[element.name] = element
            start.answer({"state": "running"})

    def _no_answer(self, starts: Sequence[Start], reason: str) -> None:
        """Whether they were submitted is not known: look() finds out when SLURM answers again."""
        for start in starts:
            start.fail(Unreachable(reason))
        self._lose(reason)

    async def _not_so_many(self, needs: Needs, starts: list[Start], array: str, reason: str) -> None:
        """SLURM's limit for a user, or for all, is reached: submit fewer, and the others later."""
        await asyncio.to_thread(take_back, self._array_path(array), array, [start.element for start in starts])
        if len(starts) > 1:
            half = len(starts) // 2
            await self._submit(needs, starts[:half])
            await self._submit(needs, starts[half:])
            return
        self._held_until = time.monotonic() + FULL
        self._hold(starts[0], reason)

    def _hold(self, start: Start, reason: str = "") -> None:
        """It counts as started: it can be cancelled, and a later dispatcher finds its order."""
        self._held.append(start)
        self._elements[start.element.name] = start.element
        start.answer({"state": "running"})
        shown = f"not yet {IN_QUEUE}" + (f": {reason}" if reason else "")
        if start.element.shown != shown:
            start.element.shown = shown
            self._post(Event("waits", SERVER, {"attempt": start.element.name, "reason": shown}))

    # ---- watching

    async def _poll(self) -> None:
        """Until the connection is lost."""
        failures, queue_at, progress_at = 0, 0.0, 0.0
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self._submit_held(now)
            try:
                if now >= queue_at and (self._elements or self._asked_for_queue):
                    queue_at = now + QUEUE
                    self._queue, self._asked_for_queue = await self._ask_queue(), False
                await self._cancel(now)
                failures = 0
            except (Unreachable, OSError) as error:
                failures += 1
                if failures >= SILENT:
                    self._lose(str(error))
                    return
            await self._look_at_elements(now, progress=now >= progress_at)
            progress_at = now + PROGRESS if now >= progress_at else progress_at

    def _submit_held(self, now: float) -> None:
        if self._held and now >= self._held_until and not self._submitting and not self._closing:
            self._starts += [start for start in self._held if not start.element.cancelled]
            self._held = []
            self._submit_soon()

    async def _look_at_elements(self, now: float, progress: bool) -> None:
        queue = self._queue

        def look(elements: Sequence[Element]) -> list[tuple[Element, str, Facts]]:
            found: list[tuple[Element, str, Facts]] = []
            for each in elements:
                with contextlib.suppress(OSError):  # the file system is disturbed: the next look
                    found.extend((each, kind, facts) for kind, facts in each.look(queue, now, progress))
            return found

        async with self._files:
            elements = [each for each in self._elements.values() if each.array]
            seen = await asyncio.to_thread(look, elements)
        for element, kind, facts in seen:
            if kind == "held":
                self._hold(Start(element, needs_of(element)))
                continue
            if kind == "ended":
                self._elements.pop(element.name, None)
            self._post(Event(kind, SERVER, {"attempt": element.name, **facts}))

    async def _cancel(self, now: float) -> None:
        """scancel for elements whose order was taken back, and for those whose supervisor does not react."""
        due = [
            each for each in self._elements.values() if each.cancel_at <= now and each.entry and not each.entry.ended
        ]
        jobs = [each.entry.job for each in due if each.entry] + self._unwanted
        for place in range(0, len(jobs), MOST_WORDS):
            await self._call(["scancel", *jobs[place : place + MOST_WORDS]])
        self._unwanted = []
        for each in due:
            each.cancel_at = now + CANCEL_AGAIN

    async def stop(self, attempt: str, kill: bool) -> None:
        """See dispatcher.Server."""
        if not self._ready:
            raise Unreachable("not connected")
        element = self._elements.get(attempt)
        if not element:
            return
        async with self._files:
            await asyncio.to_thread(element.stop, kill)
        if element.cancelled and not element.array:
            self._elements.pop(attempt, None)
            self._post(Event("ended", SERVER, {"attempt": attempt, **never_started()}))

    # ---- results

    async def bring(self, attempt: Attempt, job: Job) -> None:
        """The files are here already. A cancelled job has ended when SLURM shows it no more, either."""
        if attempt.failure != "cancelled":
            return
        began, element = time.monotonic(), self._element(attempt.name, job.output)
        if not element.locate():
            return
        while self._gone and not self._gone.done() and time.monotonic() < began + ASK:
            entry = self._queue.entries.get((element.array, element.index))
            if self._queue.began > began and (entry is None or entry.ended):
                return
            self._asked_for_queue = True
            await asyncio.sleep(TICK / 2)

    async def send(self, output: str) -> None:
        """Nothing: the files are there already."""

    async def gpus(self) -> list[Facts]:
        """SLURM watches over them."""
        return []

    def follow_command(self, attempt: Attempt, once: bool = False) -> list[str]:
        """See dispatcher.Server."""
        stem = os.path.join(self.directory, attempt.name, f"node_{SERVER}")
        return [sys.executable, "-I", "-S", f"{KIT}/{ENTRY}", "follow", f"{stem}.log", "/" if once else f"{stem}.exit"]
