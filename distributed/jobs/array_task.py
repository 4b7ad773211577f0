"""One element of an array of SLURM: runs one attempt of a job under its supervisor, on the node that SLURM chose.

usage: array_task.py ARRAY

ARRAY is the directory LIST/array-ID of an array that jobs/slurm.py has submitted, and SLURM_ARRAY_TASK_ID says which
line of its file `attempts` names the attempt. What to run is in the attempt's order, a file with mode 0600, as it holds
the environment of the job:

  LIST/ATTEMPT/order         belongs to no array yet
  LIST/ATTEMPT/order.ID      belongs to this array
  LIST/ATTEMPT/taken.ID      an element has taken it, and has not started the command
  LIST/ATTEMPT/element.json  who has taken it: host, number in SLURM

An order is taken, given back and handed to another array by renaming it, which only one process can do; the command is
started only by the process that has removed taken.ID. So an attempt runs once, however often it is submitted or
requeued. The rest is as on a server: the lock, and the files of the supervisor. That SLURM sent SIGTERM, and why, goes
into the supervisor's record.

Standard library only: it runs on compute nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from distributed.exit_codes import KILLED, UNFIT, WRONG_CALL
from distributed.files import try_lock, write_json
from distributed.host import process_scan
from distributed.jobs import host
from distributed.launch import supervisor
from distributed.training import base_model

SERVER = "slurm"  # the name of the server, and in those of the supervisor's files
ORDER, TAKEN, NEW = "order", "taken", ".order"
ATTEMPTS = "attempts"  # in an array's directory: the names of its attempts, a line for each element
ELEMENT = "element.json"
SETUP = "setup.sh"
LOCK = 2.0  # seconds in which the lock must be free: the dispatcher looks at it, too
ASK = 3.0  # seconds that SLURM has to say why it sent SIGTERM
# Set by SLURM for the node that it chose: never those of the machine that submitted.
PLACES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HOSTNAME")
OF_SLURM = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "MUSTER_", "TMUX")

Facts = dict[str, Any]


# ---------------------------------------------------------------- orders


def order_path(attempt: str, array: str = "") -> str:
    """The order of the attempt in this directory, as long as nobody has taken it."""
    return os.path.join(attempt, f"{ORDER}.{array}" if array else ORDER)


def taken_path(attempt: str, array: str) -> str:
    return os.path.join(attempt, f"{TAKEN}.{array}")


def write_order(attempt: str, order: Facts) -> None:
    """Only for this user, completely or not at all. Raises OSError."""
    new = os.path.join(attempt, NEW)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file, "w") as target:
        json.dump(order, target)
    os.rename(new, order_path(attempt))


def move(source: str, target: str) -> bool:
    """Whether it was this call that has renamed it."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def remove(path: str) -> bool:
    """Whether it was this call that has removed it."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def take_order(attempt: str, array: str) -> Facts | None:
    """The order, when it still belongs to this array."""
    taken = taken_path(attempt, array)
    move(order_path(attempt, array), taken)
    try:
        with open(taken) as file:  # also when an element took it that was ended before it could start anything
            found: Facts = json.load(file)
    except FileNotFoundError:
        return None
    return found


# ---------------------------------------------------------------- the environment


def carried(environment: dict[str, str]) -> dict[str, str]:
    """What of the environment of the call a job gets on its node, as a job of sbatch does."""
    foreign = {os.fsdecode(name) for name in supervisor.STALE_VARIABLES} | set(PLACES)
    prefixes = (*OF_SLURM, *map(os.fsdecode, supervisor.STALE_PREFIXES))
    return {name: value for name, value in environment.items() if name not in foreign and not name.startswith(prefixes)}


def blocks(order: Facts, here: dict[str, str]) -> tuple[bytes, bytes]:
    """Entries for the supervisor: what it gets behind its own environment, and what no line of `setup` changes.

    here: its own environment, as SLURM made it.
    """
    cores = here.get("SLURM_CPUS_PER_TASK") or here.get("SLURM_CPUS_ON_NODE") or "1"
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": cores}
    if order["gpus"]:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as SLURM numbers them
    else:
        defaults["CUDA_VISIBLE_DEVICES"] = ""
    given = {name: value for name, value in {**defaults, **order["call"]}.items() if name not in here}
    return block(given), block(order["env"])


def block(environment: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


# ---------------------------------------------------------------- the supervisor


class SlurmSupervisor(supervisor.Supervisor):
    """The supervisor of a job that SLURM may end."""

    def __init__(self, files: supervisor.Files, *, grace: float, timeout: float, kill_wait: float) -> None:
        """kill_wait: seconds between SIGTERM and SIGKILL of SLURM."""
        super().__init__(files, grace=grace, timeout=timeout)
        self._leave = max(1.0, kill_wait - max(2.0, kill_wait / 5))  # so that the exit code can still be written
        self._signalled = False

    def handle_signal(self, number: int) -> None:
        """SLURM's. It sends SIGKILL itself, also to this process: a second signal does not hasten that."""
        self._signalled = True
        self.stop()
        self._kill_at = min(self._kill_at, time.monotonic() + self._leave)

    def finish(self) -> None:
        """Find out whether SLURM wanted the end, and why, as long as it knows. It signals the command as well, which
        may have ended before this process has got the signal."""
        ended_by_signal = self._signalled or self.code in (128 + signal.SIGTERM, KILLED)
        if ended_by_signal and not os.path.exists(self.files.record):
            cause, message = reason_of_end(number_in_slurm())
            if cause:
                supervisor.write_record(self.files, cause, message)
        super().finish()


def number_in_slurm() -> str:
    """123_4: the number of the job of the last element is that of the whole array, too."""
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def reason_of_end(job: str) -> tuple[str, str]:
    """(cause, message): why SLURM ends this job; both empty when it does not, or does not answer."""
    try:
        asked = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job], capture_output=True, timeout=ASK, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return reason_in(os.fsdecode(asked.stdout))


def reason_in(shown: str) -> tuple[str, str]:
    """The same, of what `scontrol show job` has shown of a job that is there."""
    facts = {name: value for name, equals, value in (word.partition("=") for word in shown.split()) if equals}
    if facts.get("Reason") == "TimeLimit":
        return "timeout", f"SLURM's time limit ({facts.get('TimeLimit', 'unknown')}) was reached"
    if facts.get("Reason") == "NodeDown" or facts.get("JobState") == "NODE_FAIL":
        return "node failed", f"SLURM has set {facts.get('BatchHost', 'its node')} down"
    if facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"):
        return "preempted", "SLURM needed its node for a more urgent job"
    if facts.get("JobState", "RUNNING") != "RUNNING":
        return "cancelled outside", "somebody ended it in SLURM (scancel), not through this list"
    return "", ""


def run(attempt: str, order: Facts) -> int:
    """Run the command of an order to its end. Returns its exit code. Raises HostError."""
    # The file stays open, and so locked, until this process ends.
    owner = order.get("owner") or os.path.basename(attempt).rpartition(".")[0]
    host.claim(order["env"]["MUSTER_OUTPUT_DIR"], owner, order["script"])
    words = ["--dir", attempt, "--name", SERVER, "--detach"]
    options = supervisor.SupervisorOptions([*words, "--", *order["command"]])
    os.makedirs(os.path.dirname(options.files.record), exist_ok=True)
    os.chdir(order["workdir"])
    given, own = blocks(order, dict(os.environ))
    process_scan.adopt_orphans()
    timeout = float("inf") if order["timeout"] is None else float(order["timeout"])
    job = SlurmSupervisor(options.files, grace=order["grace"], timeout=timeout, kill_wait=order["kill_wait"])
    setup = os.path.join(attempt, SETUP) if order["setup"] else ""
    job.start(options.command, supervisor.environment(given + own, options.files), own, setup)
    code = job.watch()
    if code == 0 and order.get("trains"):
        publish(order)
    return code


def publish(order: Facts) -> None:
    """Put a base model into the cache before SLURM starts those that wait for it. Raises HostError."""
    output, cache, digest = order["env"]["MUSTER_OUTPUT_DIR"], order["cache"], order["trains"]
    for tries_left in (2, 1, 0):
        try:
            manifest = base_model.manifest_of(output, digest, settings=order["settings"], created=time.time())
            base_model.publish(cache, digest, base_model.stage(cache, output, manifest))
            return
        except (base_model.BaseModelError, FileNotFoundError) as error:  # a dispatcher has just tidied up the cache
            if not tries_left:
                raise host.HostError(str(error)) from None


# ---------------------------------------------------------------- the program


def attempt_of(array: str, index: int) -> str:
    """The directory of the attempt that this element of an array is for."""
    with open(os.path.join(array, ATTEMPTS)) as file:
        names = file.read().split()
    return os.path.join(os.path.dirname(array), names[index])


def take_lock(attempt: str) -> bool:
    """Hold the attempt's lock as long as this process runs. False: another process holds it."""
    file = os.open(host.Attempt(attempt, SERVER, "", 0.0).lock, os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + LOCK
    while not try_lock(file):  # on a file system without locks, the order is taken only once, too
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def work(array: str) -> int:
    """Returns the exit code of the command; 0 where there is nothing to do."""
    array = os.path.abspath(array)
    attempt = attempt_of(array, int(os.environ["SLURM_ARRAY_TASK_ID"]))
    name, identifier = os.path.basename(attempt), os.path.basename(array).removeprefix("array-")
    if not os.path.isdir(attempt):
        return nothing_to_do(f"{name}: its directory is not there any more")
    if not take_lock(attempt):
        return nothing_to_do(f"{name}: runs already")
    order = take_order(attempt, identifier)
    if order is None:
        return nothing_to_do(f"{name}: its order was carried out, or taken back")
    facts = {"host": os.uname().nodename, "time": time.time(), "array": identifier, "job": number_in_slurm()}
    write_json(os.path.join(attempt, ELEMENT), facts)
    if not remove(taken_path(attempt, identifier)):
        return nothing_to_do(f"{name}: was given up")
    return run(attempt, order)


def nothing_to_do(message: str) -> int:
    sys.stderr.write(f"array_task.py: {message}; nothing to do\n")
    return 0


def main(words: list[str]) -> int:
    """The program."""
    if words == ["--help"]:
        sys.stdout.write(__doc__ or "")
        return 0
    if len(words) != 1:
        sys.stderr.write("array_task.py: expected one argument, the directory of an array\n")
        return WRONG_CALL
    try:
        return work(words[0])
    except supervisor.SupervisorError as refused:
        message: object = refused.args[1]
    except host.HostError as error:
        message = error
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    except (KeyError, IndexError, ValueError) as error:
        message = f"{type(error).__name__}: {error}: is this an element of an array of a job list?"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"array_task.py: {message}\n")
    return UNFIT
