"""Submit attempts to SLURM as job arrays: those that start at the same time with the same resources form one array."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.files import KIT, write_file
from distributed.jobs.host.specification import SERVER
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, NotStarted, Unreachable
from distributed.jobs.servers import sbatch
from distributed.jobs.servers.element import Element, assign_specs, discard_array, job_path, release_specs
from distributed.jobs.servers.host_server import ListContext
from distributed.jobs.servers.programs import run_program
from distributed.jobs.servers.sbatch import ResourceRequest, sbatch_command

BATCH_DELAY = 0.05  # seconds in which starts are collected into one array
SUBMIT_TIMEOUT = 180.0  # seconds for sbatch, which has its own retries
FULL_QUEUE_DELAY = 15.0  # seconds before a submission that exceeded a limit is retried

Facts = dict[str, Any]


@dataclass(eq=False)
class PendingStart:
    """A job's attempt that waits to be submitted to SLURM."""

    element: Element
    resources: ResourceRequest
    job: Job | None = None  # None: the job specification is already written
    needs: Sequence[str] = ()  # output directories of the jobs that the option _after names
    reply: asyncio.Future[Facts] | None = None  # None: start() no longer waits for it

    def answer(self, found: Facts) -> None:
        """Set the reply, if start() waits for it."""
        if self.reply and not self.reply.done():
            self.reply.set_result(found)
        self.reply = None

    def fail(self, error: Exception) -> bool:
        """Set an exception as the reply; return False if start() does not wait for it."""
        reply, self.reply = self.reply, None
        if reply and not reply.done():
            reply.set_exception(error)
            reply.exception()
        return reply is not None


class Submissions:
    """The attempts of a list that wait to be submitted to SLURM, or to be accepted by it."""

    def __init__(
        self, context: ListContext, directory: str, options: Sequence[str], elements: dict[str, Element],
        prepare: Callable[[PendingStart], Exception | None], lose: Callable[[str], None],
    ) -> None:  # fmt: skip
        """directory: of the list. options: of sbatch. elements: submitted and held ones are added to these, by attempt.

        prepare: writes a job specification, or returns the error that prevents the start. lose: called with the reason
        if it is unknown whether attempts were submitted.
        """
        self.post: Callable[[Event], None] = lambda _: None
        self._max_array = 1000
        self.environment = sbatch.slurm_environment(os.environ)
        self.prefix = f"muster-{context.list_id}-"
        self._context, self._directory, self._options, self._elements = context, directory, options, elements
        self._prepare, self._lose = prepare, lose
        self._pending: list[PendingStart] = []
        self._held: list[PendingStart] = []  # not submitted, as SLURM's queue is full
        self._held_until = 0.0
        self._submitting: asyncio.Task[None] | None = None
        self._closing = False
        self._connected = False

    def open(self, post: Callable[[Event], None], max_array: int) -> None:
        """Submit attempts from now on. max_array: the largest number of elements of an array."""
        self.post, self._max_array, self._connected = post, max_array, True
        self._held = []

    def disconnect(self, reason: str, closing: bool = False) -> None:
        """Submit no attempts until open() is called, or no more if closing. The connection is lost for this reason."""
        self._connected, self._closing = False, self._closing or closing
        for start in self._pending:
            start.fail(Unreachable(reason))
        self._pending = []

    async def finish(self) -> None:
        """Wait for sbatch, as the result of a submission must be known."""
        if self._submitting:
            await asyncio.wait([self._submitting])
            self._submitting = None

    def forget_held(self) -> None:
        """Forget the attempts that hold() was called for."""
        self._held = []

    def add(self, start: PendingStart) -> None:
        """Submit an attempt with others that are added within BATCH_DELAY."""
        self._pending.append(start)
        self._submit_soon()

    def _submit_soon(self) -> None:
        if not self._submitting and not self._closing:
            self._submitting = spawn(self._submit_all(), self.post)

    async def _submit_all(self) -> None:
        await asyncio.sleep(BATCH_DELAY)
        try:
            while self._pending:
                starts, self._pending = self._pending, []
                new = [start for start in starts if start.job and start.reply]
                errors = await asyncio.to_thread(list, map(self._prepare, new))
                refused = {id(start): error for start, error in zip(new, errors, strict=True) if error}
                groups: dict[ResourceRequest, list[PendingStart]] = {}
                for start in starts:
                    if error := refused.get(id(start)):
                        self._refuse(start, error)
                    else:
                        groups.setdefault(start.resources, []).append(start)
                for resources, group in groups.items():
                    for index in range(0, len(group), self._max_array):
                        await self._submit(resources, group[index : index + self._max_array])
        finally:
            self._submitting = None

    def _refuse(self, start: PendingStart, error: Exception) -> None:
        self._elements.pop(start.element.name, None)
        if not start.fail(error) and isinstance(error, NotStarted):
            self.post(Event("not_started", SERVER, error.facts(start.element.name)))

    async def _submit(self, resources: ResourceRequest, starts: list[PendingStart]) -> None:
        """Submit attempts as one array, or as several if SLURM has no room for all of them."""
        if not self._connected:
            for start in starts:
                start.fail(Unreachable("connection lost"))
            return
        if time.monotonic() < self._held_until:
            for start in starts:
                self.hold(start)
            return
        array = secrets.token_hex(4)
        path = self.array_path(array)
        try:
            await asyncio.to_thread(assign_specs, path, array, [start.element for start in starts])
        except OSError as error:
            await self._refuse_all(starts, array, NotStarted(f"{error.filename or path}: {error.strerror}"))
            return
        try:
            command = self._sbatch(resources, array, len(starts))
            reply = await run_program(command, env=self.environment, seconds=SUBMIT_TIMEOUT)
        except Unreachable as error:
            self._submission_unknown(starts, str(error))
        else:
            await self._handle_sbatch_reply(resources, starts, array, *reply)

    async def _handle_sbatch_reply(
        self, resources: ResourceRequest, starts: list[PendingStart], array: str, code: int, out: str, err: str
    ) -> None:
        """Handle exit code and output of sbatch."""
        job, message = out.strip().rpartition("\n")[2].partition(";")[0], sbatch.error_message(err)
        if code == 0 and job.isdecimal():
            with contextlib.suppress(OSError):  # the disk is full; the array is also found by its name
                await asyncio.to_thread(write_file, job_path(self.array_path(array)), f"{job}\n")
            self._register(starts, array)
        elif code == 0 or sbatch.contains_any(sbatch.NO_REPLY, err):
            self._submission_unknown(starts, f"sbatch: {message or out.strip()}")
        elif sbatch.contains_any(sbatch.QUEUE_FULL, err):
            await self._submit_fewer(resources, starts, array, message)
        elif sbatch.contains_any(sbatch.WRONG_OPTIONS, err):
            reason = f"sbatch: {message}; correct sbatch in the cluster config, then resume"
            await self._refuse_all(starts, array, NotStarted(reason, "unusable"))
        else:
            await self._refuse_all(starts, array, NotStarted(f"sbatch: {message}", resources.kind_of_refusal))

    async def _refuse_all(self, starts: Sequence[PendingStart], array: str, error: NotStarted) -> None:
        await asyncio.to_thread(discard_array, self.array_path(array), [start.element for start in starts])
        for start in starts:
            self._refuse(start, error)

    def array_path(self, array: str) -> str:
        """The directory of an array."""
        return os.path.join(self._directory, f"array-{array}")

    def _sbatch(self, resources: ResourceRequest, array: str, count: int) -> list[str]:
        relative = os.path.join("logs", "jobs", self._context.list_id, f"array-{array}", "%a.out")
        script = [f"{KIT}/scripts/lib/array_task.sh", KIT, sys.executable, self.array_path(array)]
        return sbatch_command(
            self._options, resources, name=f"{self.prefix}{array}", count=count, directory=str(self._context.cwd),
            output=relative, script=script,
        )  # fmt: skip

    def _register(self, starts: Sequence[PendingStart], array: str) -> None:
        now = time.monotonic()
        for index, start in enumerate(starts):
            element = start.element
            element.array, element.index, element.changed_at = array, index, now
            self._elements[element.name] = element
            start.answer({"state": "running"})

    def _submission_unknown(self, starts: Sequence[PendingStart], reason: str) -> None:
        """Treat the connection as lost; after the reconnect, query() finds out whether the attempts were submitted."""
        for start in starts:
            start.fail(Unreachable(reason))
        self._lose(reason)

    async def _submit_fewer(
        self, resources: ResourceRequest, starts: list[PendingStart], array: str, reason: str
    ) -> None:
        """After a limit of SLURM was exceeded: submit each half of the attempts, or hold a single attempt for later."""
        await asyncio.to_thread(release_specs, self.array_path(array), array, [start.element for start in starts])
        if len(starts) > 1:
            half = len(starts) // 2
            await self._submit(resources, starts[:half])
            await self._submit(resources, starts[half:])
            return
        self._held_until = time.monotonic() + FULL_QUEUE_DELAY
        self.hold(starts[0], reason)

    def hold(self, start: PendingStart, reason: str = "") -> None:
        """Submit an attempt later. It is reported as running. To stop it, its job specification is withdrawn."""
        self._held.append(start)
        self._elements[start.element.name] = start.element
        start.answer({"state": "running"})
        reason = f"not yet {sbatch.IN_QUEUE}" + (f": {reason}" if reason else "")
        if start.element.reported_reason != reason:
            start.element.reported_reason = reason
            self.post(Event("waits", SERVER, {"attempt": start.element.name, "reason": reason}))

    def submit_held(self, now: float) -> None:
        """Submit the attempts that are held, if it is time to try that again."""
        if self._held and now >= self._held_until and not self._submitting and not self._closing:
            self._pending += [start for start in self._held if not start.element.cancelled]
            self._held = []
            self._submit_soon()


def spawn(work: Coroutine[Any, Any, None], post: Callable[[Event], None]) -> asyncio.Task[None]:
    """Start a task whose exception ends the dispatcher."""

    def report(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            post(Event("task_failed", SERVER, {"error": error}))

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task
