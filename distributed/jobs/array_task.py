"""One element of a job array: run one attempt under its supervisor, on the node that SLURM chose.

usage: module.py jobs.array_task ARRAY

ARRAY is the directory LIST/array-ID of an array that servers/slurm_server.py submitted. Line SLURM_ARRAY_TASK_ID (from
0) of its file `attempts` names the attempt; host/specification.py describes the file that states what to run. Only the
process that claims this file and then removes taken.ID starts the command. So an attempt runs once, even if it is
submitted or requeued several times. The lock and the files of the supervisor are the same as for jobs on SSH servers.
If SLURM stops the job, the cause is written to the supervisor's record.

Batch scripts that wait in SLURM's queue have the name of this module; do not move it.

Standard library only: it runs on compute nodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from functools import partial
from typing import Any

from distributed.exit_codes import KILLED, UNFIT, WRONG_CALL
from distributed.files import write_json
from distributed.host import signals
from distributed.host.system import run_program
from distributed.jobs.host import host_attempt, outputs
from distributed.jobs.host.specification import ELEMENT, SERVER, Facts, claim_spec, names_in, remove, taken_path
from distributed.launch import node_files, supervisor
from distributed.training import base_model
from distributed.trust import foreign

SCONTROL_TIMEOUT = 3.0  # seconds


def environment_blocks(spec: Facts, node_environment: dict[str, str]) -> tuple[bytes, bytes]:
    """Two blocks of NUL-terminated NAME=VALUE entries for the command: inherited variables, and those of the job.

    The inherited variables are the defaults and the dispatcher's environment. Variables that are also in
    node_environment, the environment of this process, are left out. The variables of the job are set after `setup` has
    run, so `setup` cannot change them.
    """
    cores = node_environment.get("SLURM_CPUS_PER_TASK") or node_environment.get("SLURM_CPUS_ON_NODE") or "1"
    defaults = outputs.default_variables(cores)
    if spec["gpus"]:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # SLURM's numbering
    else:
        defaults["CUDA_VISIBLE_DEVICES"] = ""
    inherited = {name: value for name, value in {**defaults, **spec["call"]}.items() if name not in node_environment}
    return outputs.block_of(inherited), outputs.block_of(spec["env"])


class SlurmSupervisor(supervisor.Supervisor):
    """A supervisor that handles SLURM's SIGTERM."""

    def __init__(self, *args: Any, kill_wait: float) -> None:
        """kill_wait: seconds between the SIGTERM and the SIGKILL of SLURM."""
        super().__init__(*args)
        self._grace_in_slurm = max(1.0, kill_wait - max(2.0, kill_wait / 5))  # leaves time to write the exit code
        self._signalled = False

    def handle_signal(self, number: int) -> None:
        """Stop the command before SLURM sends SIGKILL to this process. Further signals do not shorten the grace.

        Signals in PASSED_ON (such as USR1 of sbatch --signal=B:USR1) are passed on to the command instead.
        """
        if number in signals.PASSED_ON:
            super().handle_signal(number)
            return
        self._signalled = True
        self.stop()
        self._kill_at = min(self._kill_at, self.clock.now() + self._grace_in_slurm)

    def finish(self) -> None:
        """Record the cause if SLURM stopped the job.

        SLURM is asked for the cause if this process was signalled, or if the exit code is that of SIGTERM or SIGKILL:
        SLURM may signal the command before this process.
        """
        ended_by_signal = self._signalled or self.code in (128 + signal.SIGTERM, KILLED)
        if ended_by_signal and not os.path.exists(self.files.record):
            cause, message = reason_of_end(slurm_job_id())
            if cause:
                node_files.write_record(self.files, cause, message)
        super().finish()


def slurm_job_id() -> str:
    """The SLURM job id of this element, such as 123_4.

    SLURM_JOB_ID is not used: in one element of each array, its value is the id of the whole array.
    """
    return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def reason_of_end(job: str) -> tuple[str, str]:
    """(cause, message): why SLURM is stopping a job; both empty if SLURM is not stopping it, or does not reply."""
    if not job.replace("_", "").isdecimal():
        return "", ""
    return reason_in(run_program(["scontrol", "show", "job", "--oneliner", job], SCONTROL_TIMEOUT).out)


def reason_in(shown: str) -> tuple[str, str]:
    """What reason_of_end() returns for this output of `scontrol show job`."""
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


def run(attempt: host_attempt.HostAttempt, spec: Facts) -> int:
    """Run the command of a job specification. Returns its exit code. Raises HostError."""
    attempt.output, attempt.grace = spec["env"]["MUSTER_OUTPUT_DIR"], spec["grace"]
    # The output directory stays locked until this process exits.
    job, workdir = spec.get("owner") or attempt.name.rpartition(".")[0], spec["workdir"]
    outputs.claim_output(workdir, attempt.output, job, spec["script"])
    os.chdir(workdir)
    options = attempt.options(spec["command"], spec["timeout"], spec["setup"])
    create = partial(SlurmSupervisor, kill_wait=spec["kill_wait"])
    code = supervisor.supervise(options, *environment_blocks(spec, dict(os.environ)), create=create)
    if code == 0 and spec.get("trains"):
        publish(spec)
    return code


def publish(spec: Facts) -> None:
    """Publish a trained base model before SLURM starts the jobs that depend on it. Raises HostError."""
    output, cache, digest = spec["env"]["MUSTER_OUTPUT_DIR"], spec["cache"], spec["trains"]
    for retries_left in (2, 1, 0):
        try:
            manifest = base_model.manifest_of(output, digest, settings=spec["settings"], created=time.time())
            base_model.publish(cache, digest, base_model.stage(cache, output, manifest))
            return
        except (base_model.BaseModelError, FileNotFoundError) as error:  # a dispatcher may have cleaned the cache
            if not retries_left:
                raise outputs.HostError(str(error)) from None


def work(array: str) -> int:
    """Run the attempt of this element. Returns the exit code of its command; 0 if there is nothing to do."""
    array = os.path.abspath(array)
    if problem := foreign(os.path.dirname(array), os.stat(os.path.dirname(array))):
        raise outputs.JobRefused(problem)
    index, identifier = int(os.environ["SLURM_ARRAY_TASK_ID"]), os.path.basename(array).removeprefix("array-")
    name = names_in(array)[index]
    attempt = host_attempt.HostAttempt(os.path.join(os.path.dirname(array), name), SERVER, "", 0.0)
    if not os.path.isdir(attempt.directory):
        return nothing_to_do(f"{name}: its directory was removed")
    try:
        # The lock is held until exit. On a file system without locks, the claim alone prevents a second run.
        attempt.take_lock()
    except outputs.Busy as error:
        return nothing_to_do(str(error))
    spec = claim_spec(attempt.directory, identifier)
    if spec is None:
        return nothing_to_do(f"{name}: its job specification was already claimed or withdrawn")
    facts = {"host": os.uname().nodename, "time": time.time(), "array": identifier, "job": slurm_job_id()}
    write_json(os.path.join(attempt.directory, ELEMENT), facts)
    if not remove(taken_path(attempt.directory, identifier)):
        return nothing_to_do(f"{name}: withdrawn by the dispatcher")
    return run(attempt, spec)


def nothing_to_do(message: str) -> int:
    sys.stderr.write(f"array_task: {message}; nothing to do\n")
    return 0


def main(arguments: list[str]) -> int:
    """Run the program. Returns its exit code."""
    if arguments == ["--help"]:
        sys.stdout.write(__doc__ or "")
        return 0
    if len(arguments) != 1:
        sys.stderr.write("array_task: expected one argument, the directory of an array\n")
        return WRONG_CALL
    try:
        return work(arguments[0])
    except node_files.SupervisorError as refused:
        message: object = refused.args[1]
    except outputs.HostError as error:
        message = error
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    except (KeyError, IndexError, ValueError) as error:
        message = f"{type(error).__name__}: {error}: not started as an element of a Muster job array?"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"array_task: {message}\n")
    return UNFIT
