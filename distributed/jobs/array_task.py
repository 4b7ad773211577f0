"""One element of a job array: run one attempt under its supervisor, on the node that SLURM chose.

usage: array_task.py ARRAY

ARRAY is the directory LIST/array-ID of an array that jobs/slurm.py submitted. Line SLURM_ARRAY_TASK_ID (from 0) of its
file `attempts` names the attempt. The order of an attempt specifies what to run. It is a file with mode 0600, as it
holds the environment of the job:

  LIST/ATTEMPT/order         not assigned to an array
  LIST/ATTEMPT/order.ID      assigned to this array
  LIST/ATTEMPT/taken.ID      claimed by an element that has not started the command
  LIST/ATTEMPT/element.json  the element that claimed it: host, number in SLURM

An order is assigned, released and claimed by renaming it, which succeeds in one process only, and only the process that
removes taken.ID starts the command. So an attempt runs once, even if it is submitted or requeued several times. The
lock and the files of the supervisor are the same as on a server. If SLURM stops the job, the cause is written to the
supervisor's record.

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

SERVER = "slurm"  # the name of the server, also in the names of the supervisor's files
ORDER, TAKEN, NEW = "order", "taken", ".order"
ATTEMPTS = "attempts"  # in an array's directory: the names of its attempts, one per line
ELEMENT = "element.json"
SETUP = "setup.sh"
LOCK_TIMEOUT = 2.0  # seconds; the dispatcher holds the lock briefly when it checks it
SCONTROL_TIMEOUT = 3.0  # seconds
# Variables that SLURM sets on the compute node; those of the submitting machine are not passed on.
NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "HOSTNAME")
FOREIGN_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "MUSTER_", "TMUX")

Facts = dict[str, Any]


# ---------------------------------------------------------------- orders


def order_path(attempt: str, array: str = "") -> str:
    """The unclaimed order of the attempt in this directory. array: to which it is assigned."""
    return os.path.join(attempt, f"{ORDER}.{array}" if array else ORDER)


def taken_path(attempt: str, array: str) -> str:
    return os.path.join(attempt, f"{TAKEN}.{array}")


def write_order(attempt: str, order: Facts) -> None:
    """Write an order atomically, readable by this user only. Raises OSError."""
    new = os.path.join(attempt, NEW)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(file, "w") as target:
        json.dump(order, target)
    os.rename(new, order_path(attempt))


def move(source: str, target: str) -> bool:
    """Rename a file. False: it does not exist."""
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def remove(path: str) -> bool:
    """Remove a file. False: it does not exist."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def claim_order(attempt: str, array: str) -> Facts | None:
    """Claim the order of an attempt. None: it is not assigned to this array."""
    taken = taken_path(attempt, array)
    move(order_path(attempt, array), taken)
    try:
        with open(taken) as file:  # also if an earlier element claimed it, but was killed before it started the command
            found: Facts = json.load(file)
    except FileNotFoundError:
        return None
    return found


# ---------------------------------------------------------------- the environment


def caller_environment(environment: dict[str, str]) -> dict[str, str]:
    """The part of the dispatcher's environment that jobs get on their nodes, as sbatch passes it on."""
    foreign = {os.fsdecode(name) for name in supervisor.STALE_VARIABLES} | set(NODE_VARIABLES)
    prefixes = (*FOREIGN_PREFIXES, *map(os.fsdecode, supervisor.STALE_PREFIXES))
    return {name: value for name, value in environment.items() if name not in foreign and not name.startswith(prefixes)}


def environment_blocks(order: Facts, here: dict[str, str]) -> tuple[bytes, bytes]:
    """(variables for the supervisor, variables of the job, which `setup` cannot change), as NUL-terminated entries.

    here: the environment set by SLURM; it overrides that of the dispatcher.
    """
    cores = here.get("SLURM_CPUS_PER_TASK") or here.get("SLURM_CPUS_ON_NODE") or "1"
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": cores}
    if order["gpus"]:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # SLURM's order
    else:
        defaults["CUDA_VISIBLE_DEVICES"] = ""
    given = {name: value for name, value in {**defaults, **order["call"]}.items() if name not in here}
    return block(given), block(order["env"])


def block(environment: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


# ---------------------------------------------------------------- the supervisor


class SlurmSupervisor(supervisor.Supervisor):
    """A supervisor that handles SLURM's SIGTERM."""

    def __init__(self, options: supervisor.SupervisorOptions, kill_wait: float) -> None:
        """kill_wait: SLURM's seconds between SIGTERM and SIGKILL."""
        super().__init__(options.files, options)
        self._grace_in_slurm = max(1.0, kill_wait - max(2.0, kill_wait / 5))  # leaves time to write the exit code
        self._signalled = False

    def handle_signal(self, number: int) -> None:
        """Stop the command before SLURM sends SIGKILL to this process. Further signals do not shorten the grace."""
        self._signalled = True
        self.stop()
        self._kill_at = min(self._kill_at, time.monotonic() + self._grace_in_slurm)

    def finish(self) -> None:
        """Record the cause if SLURM stopped the job. It signals the command directly, perhaps before this process."""
        ended_by_signal = self._signalled or self.code in (128 + signal.SIGTERM, KILLED)
        if ended_by_signal and not os.path.exists(self.files.record):
            cause, message = reason_of_end(slurm_job_id())
            if cause:
                supervisor.write_record(self.files, cause, message)
        super().finish()


def slurm_job_id() -> str:
    """SLURM's number of this element, such as 123_4. SLURM_JOB_ID is ambiguous: for one element, it is the array's."""
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def reason_of_end(job: str) -> tuple[str, str]:
    """(cause, message): why SLURM is stopping a job; both empty if it is not, or does not reply."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    try:
        shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SCONTROL_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    return reason_in(os.fsdecode(shown.stdout))


def reason_in(shown: str) -> tuple[str, str]:
    """reason_of_end() from the output of `scontrol show job`."""
    facts = {name: value for name, equals, value in (word.partition("=") for word in shown.split()) if equals}
    if facts.get("Reason") == "TimeLimit":
        return "timeout", f"SLURM's time limit ({facts.get('TimeLimit', 'unknown')}) was reached"
    if facts.get("Reason") == "NodeDown" or facts.get("JobState") == "NODE_FAIL":
        return "node failed", f"SLURM marked {facts.get('BatchHost', 'its node')} DOWN"
    if facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"):
        return "preempted", "SLURM gave its node to a job of higher priority"
    if facts.get("JobState", "RUNNING") != "RUNNING":
        return "cancelled outside", "cancelled by scancel, not through this list"
    return "", ""


def run(attempt: str, order: Facts) -> int:
    """Run the command of an order. Returns its exit code. Raises HostError."""
    # The output directory stays locked until this process exits.
    owner = order.get("owner") or os.path.basename(attempt).rpartition(".")[0]
    host.claim_output(order["env"]["MUSTER_OUTPUT_DIR"], owner, order["script"])
    arguments = ["--dir", attempt, "--name", SERVER, "--detach"]
    options = supervisor.SupervisorOptions([*arguments, "--", *order["command"]], order["grace"])
    os.makedirs(os.path.dirname(options.files.record), exist_ok=True)
    os.chdir(order["workdir"])
    given, own = environment_blocks(order, dict(os.environ))
    process_scan.adopt_orphans()
    options.timeout = float("inf") if order["timeout"] is None else float(order["timeout"])
    job = SlurmSupervisor(options, order["kill_wait"])
    setup = os.path.join(attempt, SETUP) if order["setup"] else ""
    job.start(options.command, supervisor.environment(given + own, options.files), own, setup)
    code = job.watch()
    if code == 0 and order.get("trains"):
        publish(order)
    return code


def publish(order: Facts) -> None:
    """Publish a trained base model before SLURM starts the jobs that depend on it. Raises HostError."""
    output, cache, digest = order["env"]["MUSTER_OUTPUT_DIR"], order["cache"], order["trains"]
    for tries_left in (2, 1, 0):
        try:
            manifest = base_model.manifest_of(output, digest, settings=order["settings"], created=time.time())
            base_model.publish(cache, digest, base_model.stage(cache, output, manifest))
            return
        except (base_model.BaseModelError, FileNotFoundError) as error:  # a dispatcher may have cleaned the cache
            if not tries_left:
                raise host.HostError(str(error)) from None


# ---------------------------------------------------------------- the program


def attempt_of(array: str, index: int) -> str:
    """The directory of the attempt at this index of an array."""
    with open(os.path.join(array, ATTEMPTS)) as file:
        names = file.read().split()
    return os.path.join(os.path.dirname(array), names[index])


def take_lock(attempt: str) -> bool:
    """Lock the attempt until this process exits. False: another process holds the lock."""
    file = os.open(host.HostAttempt(attempt, SERVER, "", 0.0).lock, os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + LOCK_TIMEOUT
    while not try_lock(file):  # without support for locks, claiming the order still ensures that it runs once
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def work(array: str) -> int:
    """Run the attempt of this element. Returns the exit code of its command; 0 if there is nothing to do."""
    array = os.path.abspath(array)
    attempt = attempt_of(array, int(os.environ["SLURM_ARRAY_TASK_ID"]))
    name, identifier = os.path.basename(attempt), os.path.basename(array).removeprefix("array-")
    if not os.path.isdir(attempt):
        return nothing_to_do(f"{name}: its directory was removed")
    if not take_lock(attempt):
        return nothing_to_do(f"{name}: already running")
    order = claim_order(attempt, identifier)
    if order is None:
        return nothing_to_do(f"{name}: its order was already executed or withdrawn")
    facts = {"host": os.uname().nodename, "time": time.time(), "array": identifier, "job": slurm_job_id()}
    write_json(os.path.join(attempt, ELEMENT), facts)
    if not remove(taken_path(attempt, identifier)):
        return nothing_to_do(f"{name}: given up by the dispatcher")
    return run(attempt, order)


def nothing_to_do(message: str) -> int:
    sys.stderr.write(f"array_task.py: {message}; nothing to do\n")
    return 0


def main(arguments: list[str]) -> int:
    """Run the program. Returns its exit code."""
    if arguments == ["--help"]:
        sys.stdout.write(__doc__ or "")
        return 0
    if len(arguments) != 1:
        sys.stderr.write("array_task.py: expected one argument, the directory of an array\n")
        return WRONG_CALL
    try:
        return work(arguments[0])
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
