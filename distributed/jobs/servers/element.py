"""One attempt on SLURM, from the dispatcher's side: an element of a job array, observed through its files.

array_task and the supervisor write the files on a compute node, in the shared working directory. The exit code file
decides how an attempt ended. SLURM's state only shows that an element waits or has ended; as long as the supervisor
writes heartbeats, the attempt is treated as running even if SLURM reports its end.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from distributed.exit_codes import KILLED
from distributed.files import read_json, write_file
from distributed.jobs.host import specification
from distributed.jobs.host.host_attempt import HostAttempt, known_facts, last_lines, modification_time, read_metrics
from distributed.jobs.host.specification import ATTEMPTS, ELEMENT, SERVER, SPEC, TAKEN, move, remove, spec_path
from distributed.jobs.servers.sbatch import QueueEntry, ResourceRequest, SlurmQueue, end_without_code
from distributed.launch import node_files, node_requests
from distributed.trust import PRIVATE_DIRECTORY

HEARTBEAT_TIMEOUT = 30.0  # seconds; longer than a file on NFS may take to appear on this machine
LOCKED_TIMEOUT = 180.0  # heartbeat timeout of a supervisor that still holds its lock
EXIT_CODE_DELAY = 6.0  # seconds that an exit code file may take to appear on this machine
CAUSE_TIMEOUT = 10.0  # seconds to wait for SLURM's state after an exit code of SLURM_EXIT_CODES
SLURM_EXIT_CODES = (128 + signal.SIGTERM, KILLED)  # exit codes of a command that SLURM may have stopped
SLURM_CAUSES = ("CANCELLED", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")

Facts = dict[str, Any]
ANY = ""
# What has happened to an attempt: the first row that matches decides.
#   claim: withdrawn (the dispatcher removed the job specification), unclaimed, or claimed. After SLURM has reported the
#     end, alive replaces claimed if a heartbeat was written since the last poll, and silent replaces claimed after the
#     heartbeat timeout
#   code: missing (no exit code file), unexplained (SLURM may report the cause soon), or explained
#   slurm: waits, runs, left (the element has ended, or is not listed), or unsubmitted (SLURM never accepted it)
#   event: overdue means that the supervisor still runs after SLURM has reported the end; it gets a kill request
EVENTS = (
    # claim        code           slurm          event
    ("withdrawn",  ANY,           "left",        "withdrawn"),
    ("withdrawn",  ANY,           ANY,           "nothing"),
    ("unclaimed",  ANY,           "waits",       "waits"),
    (ANY,          "explained",   ANY,           "ended"),
    (ANY,          "unexplained", "left",        "ended"),
    (ANY,          "unexplained", ANY,           "nothing"),
    ("unclaimed",  "missing",     "unsubmitted", "held"),
    ("unclaimed",  "missing",     "left",        "not started"),
    ("silent",     "missing",     "left",        "lost"),
    ("alive",      "missing",     "left",        "overdue"),
    (ANY,          "missing",     ANY,           "running"),
)  # fmt: skip


def event_of(claim: str, code: str, slurm: str) -> str:
    """The event in the first row of EVENTS that matches."""
    rows = (row for row in EVENTS if row[0] in (ANY, claim) and row[1] in (ANY, code) and row[2] in (ANY, slurm))
    return next(rows)[-1]


class Element(HostAttempt):
    """One attempt that is, or will be, an element of a job array."""

    def __init__(self, directory: str, output: str, grace: float) -> None:
        super().__init__(directory, SERVER, output, grace)
        self.array, self.index = "", -1
        self.entry: QueueEntry | None = None
        self.changed_at = math.inf  # when it was submitted or withdrawn: an earlier output of squeue is outdated
        self.claimed = False  # whether an element has claimed the job specification
        self.cancelled = False  # whether the job specification was withdrawn
        self.reported_reason = ""  # the last reported reason why it waits
        self.cancel_at = math.inf  # when scancel is called; monotonic clock
        self._end_seen_at: float | None = None  # when SLURM or the exit code file first showed the end
        self._heartbeat = 0.0  # the modification time of the newest heartbeat, by the clock of the file system
        self._heartbeat_at: float | None = None  # monotonic time at which a poll first found the newest heartbeat
        self._start_reported = False

    # ---- files

    def file_names(self) -> list[str]:
        """The names of its files. Listing the directory lets an NFS client see files that it has cached as missing."""
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def has_ended(self) -> bool:
        return node_files.read_code(self.files.exit) is not None and not self.locked()

    def element(self) -> Facts:
        """The record that an element wrote when it claimed the job specification; empty before."""
        found = read_json(os.path.join(self.directory, ELEMENT))
        kinds: Facts = {"host": str, "array": str, "job": str, "started": float}
        return known_facts(kinds, {"started": found.get("time"), **found})

    def process(self) -> Facts:
        """Process id, start time, boot id and host of its command; empty before the command has started."""
        if not os.path.exists(self.files.pids):
            return {}
        return self.facts() | {"host": self.element().get("host", "")}

    def withdraw(self) -> bool:
        """Remove the job specification, even if it is assigned to an array. False: an element has claimed it."""
        for _ in range(10):  # the file may be renamed meanwhile
            specs = [name for name in self.file_names() if name == SPEC or name.startswith(f"{SPEC}.")]
            if any(remove(os.path.join(self.directory, name)) for name in specs):
                return True
            if not specs:
                return False
        return False

    def delete_spec(self) -> None:
        """Remove the job specification, even if it is claimed, so that no element starts the command."""
        for name in self.file_names():
            if name == specification.NEW or name.startswith((SPEC, TAKEN)):
                remove(os.path.join(self.directory, name))

    def array_path(self) -> str:
        return os.path.join(os.path.dirname(self.directory), f"array-{self.array}")

    def output_of_element(self) -> str:
        return os.path.join(self.array_path(), f"{self.index}.out")

    # ---- polling

    def find(self) -> str:
        """The state when the dispatcher connects: absent, ended, held (not assigned to an array), or submitted."""
        if SPEC in self.file_names():
            return "held"
        known, ended = self.locate(), self.has_ended()
        if ended and (self._cause_known() or not known):
            return "ended"
        if not known:
            self.delete_spec()
            return "absent"
        self.changed_at = -math.inf
        return "submitted"

    def locate(self) -> bool:
        """Set `array` and `index`. Returns False if the attempt belongs to no array."""
        known = [name.partition(".")[2] for name in self.file_names() if name.startswith((f"{SPEC}.", f"{TAKEN}."))]
        array = known[0] if known else self.element().get("array", "")
        self.array = array if array.isalnum() else ""
        self.index = index_in(self.array_path(), self.name)
        return bool(self.array)

    def poll(self, queue: SlurmQueue, now: float, progress: bool) -> Iterator[tuple[str, Facts]]:
        """Yield events and their facts: waits, started, progress, ended, or held (SLURM never accepted its array).

        now: monotonic time. progress: whether to read the metrics, which may lead to the event `progress`.
        """
        event = event_of(*self._observe(queue, now, progress))
        if self.claimed and event in ("running", "overdue", "ended", "lost"):
            yield from self._poll_running(progress and event == "running")
        if event == "waits" and self.entry and self.entry.waiting_reason != self.reported_reason:
            self.reported_reason = self.entry.waiting_reason
            yield "waits", {"reason": self.reported_reason}
        elif event == "withdrawn":
            yield "ended", unstarted_end()
        elif event == "ended":
            yield "ended", self._end_facts()
        elif event == "overdue":
            self._request_stop("kill")
        elif event == "lost":
            self.delete_spec()
            yield "ended", self._without_code(claimed=True)
        elif event == "not started" and self.withdraw():
            yield "ended", self._without_code(claimed=False)
        elif event == "held" and move(spec_path(self.directory, self.array), spec_path(self.directory)):
            self.array, self.index, self.changed_at = "", -1, math.inf
            yield "held", {}

    def _observe(self, queue: SlurmQueue, now: float, progress: bool) -> tuple[str, str, str]:
        """The arguments of event_of()."""
        current = queue.called_at > self.changed_at
        self.entry = queue.entries.get((self.array, self.index)) if current else self.entry
        left = current and (self.entry is None or self.entry.ended)
        slurm = "left" if left else "waits" if self.entry and self.entry.waits else "runs"
        if self.cancelled or (slurm == "waits" and not self.claimed):  # read no files of hundreds of waiting elements
            return "withdrawn" if self.cancelled else "unclaimed", "missing", slurm
        claim = "claimed" if self.claimed else self._find_claim()
        if claim == "unclaimed" and left and not self.entry and not os.path.exists(job_path(self.array_path())):
            slurm = "unsubmitted"
        if claim == "claimed" and (left or progress):
            claim = self._find_heartbeat(now, left)
        code = "missing"
        if self.has_ended():
            code = "explained" if self._cause_known() else "unexplained"
        if code == "missing" and not left:
            self._end_seen_at = None
        elif self._end_seen_at is None:
            self._end_seen_at = now
        elif code == "unexplained" and now - self._end_seen_at > CAUSE_TIMEOUT:
            code = "explained"
        return claim, code, slurm

    def _find_claim(self) -> str:
        """Whether the job specification is claimed or unclaimed, as event_of() expects it."""
        names = self.file_names()
        self.claimed = ELEMENT in names
        return "unclaimed" if not self.claimed and any(name.startswith(f"{SPEC}.") for name in names) else "claimed"

    def _find_heartbeat(self, now: float, left: bool) -> str:
        """claimed, alive or silent; see EVENTS. left: whether the element has ended, or is not listed by SLURM."""
        heartbeat = modification_time(self.files.heartbeat) or 0.0
        is_new, self._heartbeat = heartbeat != self._heartbeat, heartbeat
        if is_new or (left and self._heartbeat_at is None):
            self._heartbeat_at = now
        if not left or self._end_seen_at is None or self._heartbeat_at is None:
            return "claimed"
        timeout = LOCKED_TIMEOUT if self.locked() else HEARTBEAT_TIMEOUT
        silent = now - self._heartbeat_at > timeout and now - self._end_seen_at > EXIT_CODE_DELAY
        return "silent" if silent else "alive" if is_new and self.entry else "claimed"

    def _poll_running(self, progress: bool) -> Iterator[tuple[str, Facts]]:
        if not self._start_reported and (process := self.process()):
            self._start_reported = True
            yield "started", {"state": "running", **process}
        if progress and (metrics := read_metrics(self.output)) != self.metrics:
            self.metrics = metrics
            yield "progress", {"metrics": metrics}

    def _cause_known(self) -> bool:
        """Whether the files of the attempt suffice to explain its end."""
        return node_files.read_code(self.files.exit) not in SLURM_EXIT_CODES or bool(read_json(self.files.record))

    def _end_facts(self) -> Facts:
        with contextlib.suppress(OSError):  # remove the empty output file of the element
            if os.path.getsize(self.output_of_element()) == 0:
                os.unlink(self.output_of_element())
        end = self.end()
        if end["code"] in SLURM_EXIT_CODES and not end["cause"] and self.entry and self.entry.state in SLURM_CAUSES:
            end["cause"], end["message"] = end_without_code(self.entry, claimed=True, started=True)
        return end

    def _without_code(self, claimed: bool) -> Facts:
        printed = last_lines(self.output_of_element())
        started = os.path.exists(self.files.pids)
        cause, message = end_without_code(self.entry, claimed, started, printed[-1] if printed else "")
        now = time.time()
        return {
            "code": None, "started": self.element().get("started", now), "ended": now, "cause": cause,
            "message": message,
            "lines": last_lines(self.files.log) or printed, "metrics": read_metrics(self.output),
        }  # fmt: skip

    # ---- end

    def stop(self, kill: bool) -> None:
        """Withdraw the job specification or, if it is claimed, ask the supervisor to stop. Schedules scancel."""
        if self.withdraw():
            self.cancelled = True
            self.changed_at = time.monotonic()
            self.cancel_at = self.changed_at
        elif not self.has_ended():
            asked = self._request_stop("kill" if kill else "stop")
            wait = (0.0 if kill else self.grace) + 2 * node_requests.UNRESPONSIVE_TIMEOUT if asked else 0.0
            self.cancel_at = min(self.cancel_at, time.monotonic() + wait)

    def _request_stop(self, request: str) -> bool:
        """Write a request to the supervisor. Returns False if that fails; then scancel must stop the job."""
        try:
            write_file(self.files.request, request + "\n")
        except OSError:
            return False
        return True


def unstarted_end() -> Facts:
    now = time.time()
    return {"code": None, "started": now, "ended": now, "lines": []}


def index_in(array: str, name: str) -> int:
    """The index of an attempt in an array; -1 if unknown."""
    try:
        return specification.names_in(array).index(name)
    except (OSError, ValueError):
        return -1


def job_path(array: str) -> str:
    """The file with the SLURM job id of an array, written when SLURM has accepted the array."""
    return os.path.join(array, "job")


# ---------------------------------------------------------------- the files of an array


def assign_specs(path: str, array: str, elements: Sequence[Element]) -> None:
    """Create the directory of an array, and assign to the array all job specifications that were not withdrawn."""
    os.mkdir(path, PRIVATE_DIRECTORY)
    write_file(os.path.join(path, ATTEMPTS), "".join(f"{each.name}\n" for each in elements))
    for each in elements:
        move(spec_path(each.directory), spec_path(each.directory, array))


def release_specs(path: str, array: str, elements: Sequence[Element]) -> None:
    """Remove an array that SLURM did not accept; its job specifications can be submitted again."""
    for each in elements:
        move(spec_path(each.directory, array), spec_path(each.directory))
    shutil.rmtree(path, ignore_errors=True)


def discard_array(path: str, elements: Sequence[Element]) -> None:
    """Remove an array that SLURM will never accept, and its job specifications."""
    for each in elements:
        each.delete_spec()
    shutil.rmtree(path, ignore_errors=True)


def resources_of(element: Element) -> ResourceRequest:
    """The resources of an attempt whose job specification is not assigned to an array."""
    gpus, minutes, labels, *queued_after = specification.read_spec(spec_path(element.directory))["needs"]
    return ResourceRequest(gpus, minutes, tuple(labels), *queued_after)
