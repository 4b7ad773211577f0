"""Requests to the supervisor of a command from another process on its machine, and what its files show of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from distributed.exit_codes import KILLED, UNFIT
from distributed.files import read_json, write_file
from distributed.host import process_scan
from distributed.launch.node_files import Files, boot_id, read_code, supervisor_of, write_code, write_record
from distributed.launch.node_processes import KILL_INTERVAL, kill_all, send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

START_TIMEOUT = 30.0  # seconds within which a supervisor with --lease 0 reports that it cannot start its command
UNRESPONSIVE_TIMEOUT = 4.0  # seconds after the grace time until an unresponsive supervisor is killed
GUARD_TIMEOUT = 2.0  # seconds for the guard to write the exit code after the supervisor was killed


def request(files: Files, line: str) -> int:
    """Send a request to the supervisor, if it runs on this machine. line: stop, kill, fail, end or attempt JSON.

    Returns UNFIT for an attempt without a supervisor, else 0.
    """
    if pid := supervisor_of(files):
        try:
            write_file(files.request, line + "\n")
            send_signal(signal.SIGCHLD, [pid])  # makes the supervisor read the file at once
        except OSError:  # probably a full disk
            send_signal(signal.SIGTERM, [pid])
    return UNFIT if line.startswith("attempt") and not pid else 0


def signal_supervisor(files: Files, number: int) -> int:
    """Send a signal to the supervisor, if it runs on this machine, to be passed on."""
    if pid := supervisor_of(files):
        send_signal(number, [pid])
    return 0


def sweep(files: Files, grace: float) -> int:
    """End all processes of a command on this machine. grace: seconds between SIGTERM and SIGKILL; 0: only SIGKILL."""
    if pid := supervisor_of(files):
        request(files, "stop" if grace else "kill")
        send_signal(signal.SIGCONT, [pid])
        if not wait_until(lambda: not supervisor_of(files), grace + UNRESPONSIVE_TIMEOUT):
            send_signal(signal.SIGKILL, [pid])
    if grace and (remaining := process_scan.live_processes(files.environment)):
        # A process whose parent is signalled gets no signal: an agent stops its ranks itself.
        processes = process_scan.table()
        top = [pid for pid in remaining if pid in processes and processes[pid].parent not in remaining]
        send_signal(signal.SIGTERM, top)
        wait_until(lambda: not process_scan.live_processes(files.environment), grace)
    kill_all(lambda: process_scan.live_processes(files.environment))
    # In this attempt; a full disk may have no node_NAME.pid.
    started = (os.path.exists(files.pids) and os.path.exists(files.log)) or os.path.exists(files.reserved)
    if started and not wait_until(lambda: os.path.exists(files.exit), GUARD_TIMEOUT):
        if read_json(files.pids).get("boot_id", boot_id()) == boot_id():
            write_record(files, "killed", "the supervisor and its guard were killed", found=True)
        else:
            write_record(files, "rebooted", "the machine was rebooted", found=True)
        with contextlib.suppress(OSError):
            write_code(files, KILLED)
    return 0


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(KILL_INTERVAL * 2)
    return True


def status(files: Files) -> dict[str, object]:
    """The state of a command according to its files and the processes of this machine."""
    pids, code = read_json(files.pids), read_code(files.exit)
    facts: dict[str, object] = {"name": files.name, "state": "absent"}
    if code is not None:
        facts |= {"state": "ended", "exit_code": code}
    elif pids:
        facts["state"] = "running" if supervisor_of(files) else "killed"
    with contextlib.suppress(OSError):
        facts["log_bytes"] = os.stat(files.log).st_size
        facts["heartbeat"] = os.stat(files.heartbeat).st_mtime
    return facts | pids
