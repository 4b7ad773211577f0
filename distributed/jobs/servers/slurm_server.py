"""The SLURM backend: a cluster is one server, and each attempt is one element of a job array.

The dispatcher runs on a login node. The compute nodes must see the same files under the same paths: the working
directory, Muster, and the Python interpreter. In cluster_config.json:

  servers     the first entry describes a compute node. If `gpus` is 0, jobs get `--device cpu`; otherwise each job
              requests `_gpus` GPUs (--gres=gpu:N). `python` and `setup` are used as over ssh. `host` is not used: SLURM
              chooses node and GPUs. `labels` need not be listed
  sbatch      options of sbatch: partition, account, --cpus-per-task, ...; in --gres or --gpus, the number of GPUs is
              replaced by that of the job, and their type is kept
  max_queued  the maximum number of jobs in SLURM's queue, pending or running

In jobs_config.json, `_timeout` also sets --time, and `_labels` set --constraint.

Attempts that start at the same time with the same resources (GPUs, time, labels) form one array.
host/specification.py describes the files of an attempt; element.py derives the state of an attempt from these files
and SLURM's queue. Elements are submitted with --no-requeue: after the loss of a node, the dispatcher starts a new
attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.jobs.host import checks, outputs, service, specification
from distributed.jobs.host.specification import SERVER
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists.config import ClusterConfig, ConfigError
from distributed.jobs.lists.job import Job, Options, arguments, environment
from distributed.jobs.schedule.backend import Event, JobServer, NotStarted, ServerUnusable, Unreachable
from distributed.jobs.schedule.placement import Slot, SlotPool
from distributed.jobs.servers import sbatch
from distributed.jobs.servers.element import Element, job_path, resources_of, unstarted_end
from distributed.jobs.servers.host_server import ListContext, cached_manifest
from distributed.jobs.servers.programs import run_program
from distributed.jobs.servers.sbatch import ResourceRequest, SlurmQueue
from distributed.jobs.servers.submissions import PendingStart, Submissions, spawn
from distributed.trust import read_text

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
POLL_INTERVAL = 0.5  # seconds between reads of the files of elements
QUEUE_INTERVAL = 2.0  # seconds between calls of squeue
COMMAND_TIMEOUT = 60.0  # seconds for squeue, scancel and scontrol
MAX_QUEUE_FAILURES = 3  # consecutive failures of squeue or scancel after which the connection is treated as lost
CANCEL_INTERVAL = 10.0  # seconds before scancel is repeated
MAX_SCANCEL_JOBS = 200  # elements per call of scancel
TIME_MARGIN = 60.0  # seconds of --time beyond _timeout and grace, as the supervisor enforces _timeout itself

Facts = dict[str, Any]


class AnyLabels(frozenset[str]):
    """A set that contains every label, because SLURM itself refuses a label that is not a feature of any node."""

    def __ge__(self, other: object) -> bool:
        return True


class SlurmServer(JobServer):
    """A SLURM cluster as one server. SLURM allocates the GPUs. JobServer describes the methods."""

    def __init__(self, cluster: ClusterConfig, context: ListContext, slots_needed: int) -> None:
        """slots_needed: the number of slots that all jobs of the list need together. Raises ConfigError."""
        self.name, self.context = SERVER, context
        self.settings, self._has_more_servers = cluster.servers[0], len(cluster.servers) > 1
        options = sbatch.checked_options(cluster.sbatch)
        workdir = self.settings.workdir
        if workdir and os.path.realpath(os.path.expanduser(workdir)) != os.path.realpath(context.cwd):
            raise ConfigError(
                f"workdir {workdir}: with --backend slurm jobs run in the current directory, {context.cwd}; "
                "run the command in workdir, or remove workdir"
            )
        self._max_queued = cluster.max_queued
        # A slot is a queued job with any number of GPUs.
        self.pool = SlotPool(SERVER, self._slots(slots_needed), AnyLabels(), all_gpus=1)
        self.queues_dependents = True
        self.directory = os.path.join(context.cwd, "logs", "jobs", context.list_id)
        self._python: list[str] = []
        self._kill_wait = 30  # seconds
        self._elements: dict[str, Element] = {}  # by attempt; submitted or held elements that have not ended
        self._queue = SlurmQueue()
        self._to_cancel: list[str] = []  # SLURM job ids of elements
        self._queue_requested = False  # whether fetch_results() waits for the next output of squeue
        self._elements_lock = asyncio.Lock()  # held while a thread accesses elements
        self._polling: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        self._ready = False  # whether self._elements is complete
        self._submissions = Submissions(context, self.directory, options, self._elements, self._prepare, self._lose)

    def _slots(self, needed: int) -> tuple[Slot, ...]:
        return tuple(Slot(index, None) for index in range(max(1, min(self._max_queued, needed))))

    def make_room(self, slots: int) -> None:
        self.pool.grow(self._slots(slots))

    # ---- connecting

    async def connect(self, post: Callable[[Event], None]) -> str:
        self._ready = False
        await self._end_tasks()
        for program in PROGRAMS:
            if not shutil.which(program):
                raise ServerUnusable(f"{program}: not found; run this on a login node of the cluster")
        if not os.path.isfile(os.path.join(self.context.cwd, self.context.script)):
            raise ServerUnusable(f"script {self.context.script}: not in {self.context.cwd}; copy it there")
        try:
            self._python = await asyncio.to_thread(self._find_python)
            checks.list_directory(str(self.context.cwd), self.context.list_id)
        except outputs.HostError as error:
            raise ServerUnusable(str(error)) from None
        config = await self._call(["scontrol", "show", "config"])
        max_array = max(1, sbatch.leading_number(sbatch.setting(config, "MaxArraySize"), 1001))
        self._kill_wait = sbatch.leading_number(sbatch.setting(config, "KillWait"), 30)
        self._lost = asyncio.get_running_loop().create_future()
        self._queue = SlurmQueue()
        self._elements.clear()
        self._submissions.open(post, max_array)
        self._polling = spawn(self._poll(), post)
        version = sbatch.setting(config, "SLURM_VERSION")
        more = "; only the first of the servers is used" if self._has_more_servers else ""
        return f"SLURM {version}, up to {len(self.pool.slots)} jobs in its queue; watch: squeue --me{more}"

    def _find_python(self) -> list[str]:
        """The interpreter for scripts; it must have the same path on the compute nodes."""
        has_venv = os.path.exists(os.path.join(self.context.cwd, ".venv", "bin", "python"))
        requested = self.settings.python or ("" if has_venv else sys.executable)
        return checks.find_python(requested, str(self.context.cwd))

    async def wait_until_lost(self) -> str:
        assert self._lost
        return await asyncio.shield(self._lost)

    def _lose(self, reason: str, closing: bool = False) -> None:
        self._ready = False
        if self._lost and not self._lost.done():
            self._lost.set_result(reason)
        self._submissions.disconnect(reason, closing)

    async def close(self) -> None:
        self._lose("closed", closing=True)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        await self._submissions.finish()
        if self._polling:
            self._polling.cancel()
            await asyncio.wait([self._polling])
            self._polling = None

    # ---- SLURM's programs

    async def _call(self, command: Sequence[str]) -> str:
        """Run a command; return its standard output. Raises Unreachable if it fails."""
        code, out, err = await run_program(command, env=self._submissions.environment, seconds=COMMAND_TIMEOUT)
        if code:
            raise Unreachable(f"{command[0]}: {sbatch.error_message(err) or f'exit code {code}'}")
        return out

    async def _query_queue(self) -> SlurmQueue:
        called_at = time.monotonic()
        # With --states=all, squeue also shows elements that ended some minutes ago.
        options = ["--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--format={sbatch.QUEUE_FORMAT}"]
        output = await self._call(["squeue", *options])
        return SlurmQueue(called_at, sbatch.parse_queue(output, self._submissions.prefix))

    # ---- reconnecting

    async def query(self, attempts: Mapping[str, str]) -> dict[str, Facts]:
        queue = await self._query_queue()
        found: dict[str, Facts] = {}
        async with self._elements_lock:
            self._elements.clear()
            self._submissions.forget_held()
            self._queue = queue
            results = await asyncio.to_thread(list, itertools.starmap(self._find, attempts.items()))
        for element, state, facts in results:
            found[element.name] = facts
            if state in ("held", "submitted"):
                self._elements[element.name] = element
            if state == "held":
                self._submissions.hold(PendingStart(element, resources_of(element)))
        self._to_cancel = self._orphaned_elements()
        self._ready = True
        return found

    def _element_of(self, name: str, output: str) -> Element:
        return Element(
            os.path.join(self.directory, name), os.path.join(self.context.cwd, output), float(self.context.grace)
        )

    def _find(self, name: str, output: str) -> tuple[Element, str, Facts]:
        element = self._element_of(name, output)
        state = element.find()
        if state == "absent":
            return element, state, {"state": "absent"}
        facts = {"state": "ended", **element.end()} if state == "ended" else {"state": "running", **element.process()}
        return element, state, facts

    def _orphaned_elements(self) -> list[str]:
        """SLURM job ids of waiting elements that belong to no known attempt, such as a withdrawn one."""
        known = {(each.array, each.index) for each in self._elements.values()}
        return [entry.job for key, entry in self._queue.entries.items() if entry.waits and key not in known]

    # ---- starting

    async def start(self, attempt: Attempt, job: Job, needs: Sequence[str]) -> Facts:
        reply: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
        training = attempt.queued_after
        queued_after = await asyncio.to_thread(self._slurm_id, training) if training else ""
        element, resources = self._element_of(attempt.name, job.output), self._resources_for(job.options, queued_after)
        self._submissions.add(PendingStart(element, resources, job, needs, reply))
        return await reply

    def _slurm_id(self, attempt: str) -> str:
        """The SLURM job id of a submitted attempt, such as 123_4. Raises NotStarted."""
        if (element := self._elements.get(attempt)) and element.array:
            with contextlib.suppress(OSError):
                job = read_text(job_path(self._submissions.array_path(element.array))).strip()
                if job.isdecimal():
                    return f"{job}_{element.index}"
        raise NotStarted("the training of its base model is not in SLURM's queue", "busy")

    def _resources_for(self, options: Options, queued_after: str = "") -> ResourceRequest:
        seconds = None if options.timeout is None else options.timeout + self.context.grace + TIME_MARGIN
        return ResourceRequest(
            (options.gpus or len(self.settings.devices)) if self.settings.devices else 0,
            None if seconds is None else math.ceil(seconds / 60), tuple(sorted(options.labels)), queued_after,
        )  # fmt: skip

    def _spec_of(self, start: PendingStart) -> Facts:
        """The job specification: everything that a compute node needs to run an attempt."""
        job, element, resources = start.job, start.element, start.resources
        assert job
        device = "cuda:0" if resources.gpus else "cpu"
        cwd = str(self.context.cwd)
        base = self.context.cache.path(job.base) if job.base else ""
        return {
            "command": [*checks.program(self._python, self.context.script, cwd), *arguments(job, device)],
            "script": self.context.script_name, "owner": job.owner,
            "workdir": cwd, "setup": bool(self.settings.setup), "gpus": resources.gpus,
            "timeout": None if job.options.timeout is None else max(1, round(job.options.timeout)),
            "grace": float(self.context.grace), "kill_wait": self._kill_wait,
            "needs": [resources.gpus, resources.minutes, list(resources.labels), resources.queued_after],
            "trains": job.trains, "cache": self.context.cache.directory, "settings": dict(job.settings),
            "call": specification.dispatcher_environment(dict(os.environ)),
            "env": environment(job) | outputs.job_variables(element.output, cwd, start.needs, base),
        }  # fmt: skip

    async def ensure_base(self, digest: str) -> int:
        """Verify the base model. Returns 0, because nothing is copied: the compute nodes share the cache."""
        await cached_manifest(self.context.cache, digest)
        return 0

    def _prepare(self, start: PendingStart) -> Exception | None:
        """Write the job specification of an attempt. Returns the error that prevents its start, or None."""
        element, job = start.element, start.job
        assert job
        try:
            os.close(element.create(job.owner, self.context.script_name))
            element.write_setup(self.settings.setup)
            specification.write_spec(element.directory, self._spec_of(start))
        except outputs.HostError as error:
            return NotStarted(str(error), error.kind)
        except OSError as error:
            element.delete_spec()
            return NotStarted(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return None

    # ---- monitoring

    async def _poll(self) -> None:
        """Monitor elements until the connection is lost."""
        failures, queue_at, progress_at = 0, 0.0, 0.0
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            now = time.monotonic()
            self._submissions.submit_held(now)
            try:
                if now >= queue_at and (self._elements or self._queue_requested):
                    queue_at = now + QUEUE_INTERVAL
                    self._queue, self._queue_requested = await self._query_queue(), False
                await self._cancel(now)
                failures = 0
            except (Unreachable, OSError) as error:
                failures += 1
                if failures >= MAX_QUEUE_FAILURES:
                    self._lose(str(error))
                    return
            await self._poll_elements(now, progress=now >= progress_at)
            progress_at = now + service.PROGRESS_INTERVAL if now >= progress_at else progress_at

    async def _poll_elements(self, now: float, progress: bool) -> None:
        queue = self._queue

        def poll(elements: Sequence[Element]) -> list[tuple[Element, str, Facts]]:
            found: list[tuple[Element, str, Facts]] = []
            for each in elements:
                with contextlib.suppress(OSError):  # an error of the file system: poll again later
                    found.extend((each, kind, facts) for kind, facts in each.poll(queue, now, progress))
            return found

        async with self._elements_lock:
            elements = [each for each in self._elements.values() if each.array]
            events = await asyncio.to_thread(poll, elements)
        for element, kind, facts in events:
            if kind == "held":
                self._submissions.hold(PendingStart(element, resources_of(element)))
                continue
            if kind == "ended":
                self._elements.pop(element.name, None)
            self._submissions.post(Event(kind, SERVER, {"attempt": element.name, **facts}))

    async def _cancel(self, now: float) -> None:
        """Call scancel for withdrawn elements, and for elements whose supervisor did not stop in time."""
        due = [
            each for each in self._elements.values() if each.cancel_at <= now and each.entry and not each.entry.ended
        ]
        jobs = [each.entry.job for each in due if each.entry] + self._to_cancel
        for index in range(0, len(jobs), MAX_SCANCEL_JOBS):
            await self._call(["scancel", "--", *jobs[index : index + MAX_SCANCEL_JOBS]])
        self._to_cancel = []
        for each in due:
            each.cancel_at = now + CANCEL_INTERVAL

    async def stop(self, attempt: str, kill: bool) -> None:
        if not self._ready:
            raise Unreachable("not connected")
        element = self._elements.get(attempt)
        if not element:
            return
        async with self._elements_lock:
            await asyncio.to_thread(element.stop, kill)
        if element.cancelled and not element.array:
            self._elements.pop(attempt, None)
            self._submissions.post(Event("ended", SERVER, {"attempt": attempt, **unstarted_end()}))

    # ---- results

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        """Wait up to COMMAND_TIMEOUT until SLURM has ended a cancelled attempt. Copies nothing: files are shared."""
        if attempt.failure != "cancelled":
            return ()
        start, element = time.monotonic(), self._element_of(attempt.name, job.output)
        if not element.locate():
            return ()
        while self._lost and not self._lost.done() and time.monotonic() < start + COMMAND_TIMEOUT:
            entry = self._queue.entries.get((element.array, element.index))
            if self._queue.called_at > start and (entry is None or entry.ended):
                break
            self._queue_requested = True
            await asyncio.sleep(POLL_INTERVAL / 2)
        return ()
