"""The files of the command of a node: its exit code, process ids, log and records.

Jobs of lists and tasks of SLURM have the same files. Those of a job are in one directory, see distributed/attempts.py.
"""

from __future__ import annotations

import contextlib
import os
import time

from distributed import attempts
from distributed.exit_codes import UNFIT
from distributed.files import foreign_directory, read_json, to_json, write_file, write_json
from distributed.host import process_scan, signals
from distributed.trust import read_bytes, regular_file

RESERVED = 1024  # bytes of each file that reserve() allocates


class SupervisorError(Exception):
    """The call is wrong, or the command was not started. args: exit code, reason."""


class Files:
    """The files that a supervisor reads or writes."""

    def __init__(self, directory: str, name: str, stem: str = "", attempt: str = "") -> None:
        """stem: common prefix of the files, relative to the directory (default: node_NAME). attempt: "": the newest."""
        self.directory, self.name, self._stem = os.path.abspath(directory), name, stem or f"node_{name}"
        stem = os.path.join(self.directory, self._stem)
        self.pids, self.request = f"{stem}.pid", f"{stem}.stop"
        self.use(attempts.path_of(self.directory, attempt) if attempt else attempts.newest(self.directory))

    def use(self, attempt: str) -> None:
        """Use the files of an attempt. attempt: its directory."""
        stem = os.path.join(attempt, self._stem)
        self.log, self.exit, self.samples = f"{stem}.log", f"{stem}.exit", f"{stem}.samples.jsonl"
        self.heartbeat, self.usage = f"{stem}.heartbeat", f"{stem}.usage"
        self.record = os.path.join(attempt, "errors", f"supervisor_{self.name}.json")
        self.reserved, self.reserved_record = f"{stem}.reserved", f"{stem}.reserved_record"

    def begin(self, attempt: str) -> None:
        """Use the files of an attempt, and make its directory. Raises OSError."""
        with contextlib.suppress(OSError):  # a request for an earlier attempt, or for this one, which is being handled
            os.unlink(self.request)
        self.use(attempts.path_of(self.directory, attempt))
        attempts.make(self.directory, attempt)

    @property
    def environment(self) -> frozenset[bytes]:
        return process_scan.run_environment(self.directory, self.name)


def read_code(path: str) -> int | None:
    try:
        return int(read_bytes(path))
    except (OSError, ValueError):
        return None


def reserve(files: Files) -> None:
    """Allocate the files of the exit code and of the failure record: the disk may be full later. Raises OSError."""
    for path in (files.reserved, files.reserved_record):
        write_file(path, " " * RESERVED)


def write_reserved(reserved: str, path: str, content: bytes) -> None:
    """Write a file. If the reserved file exists, write into that and rename it. Raises OSError."""
    try:
        with open(reserved, "r+b", opener=regular_file) as file:
            file.write(content)
            file.truncate()
        os.replace(reserved, path)
    except FileNotFoundError:
        write_file(path, content)


def write_code(files: Files, code: int) -> None:
    """Write the exit code. Raises OSError."""
    write_reserved(files.reserved, files.exit, b"%d\n" % code)


def write_record(files: Files, cause: str, message: str, found: bool = False) -> None:
    """Record why the command was stopped without a request. The verdict, printed at the end of a run, shows it.

    found: the supervisor was found dead. With --lease 0, it died within seconds after its last heartbeat.
    """
    facts = {"node": files.name, "host": os.uname().nodename, "cause": cause, "message": message, "time": time.time()}
    with contextlib.suppress(OSError):
        facts |= {"time": os.stat(files.heartbeat).st_mtime} if found else {}
    with contextlib.suppress(OSError):  # stopping the command matters more
        write_reserved(files.reserved_record, files.record, to_json(facts))


def write_signal(files: Files, number: int, sender: str) -> None:
    """Record a signal that Muster has not sent, so that the verdict can name it. sender: such as "from SLURM"."""
    name = signals.name(number)
    path = os.path.join(os.path.dirname(files.record), f"signal_{files.name}_{name}.json")
    with contextlib.suppress(OSError):
        write_json(path, {"signal": name, "sender": sender, "time": time.time()})


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def supervisor_of(files: Files) -> int:
    """The process id of this command's supervisor on this machine; 0 when there is none."""
    facts = read_json(files.pids)
    return process_scan.live_pid(facts.get("supervisor")) if facts.get("boot_id") == boot_id() else 0


def refuse_foreign(files: Files) -> None:
    """Raise SupervisorError if another user has made the run directory, or can write to it."""
    if problem := foreign_directory(files.directory):
        raise SupervisorError(UNFIT, problem)
