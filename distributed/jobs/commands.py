"""Run a list of training jobs on GPU servers, on this machine or on SLURM.

usage: run_distributed_training.py --cluster-config FILE --jobs-config FILE [option...]
       run_distributed_training.py status|logs|why|cancel|retry|add|resume|close [--log-file FILE] ...

  --cluster-config FILE  servers (JSON); optional with --backend local
  --jobs-config FILE     jobs (JSON): a list of objects, whose keys are arguments of the script or, with the prefix _,
                         options of the job
  --log-file FILE        results of the list (default: results.json). Beside it are the page results.html and
                         results.journal, from which `resume` continues the list
  --backend NAME         ssh (default), local (this machine, without SSH) or slurm (sbatch arrays)
  --script PATH          script to run (default: script_path of the cluster config; without it, ./train.py or Muster's)
  --slots N              local: concurrent jobs per GPU (default: 1); without GPUs, concurrent jobs in total (default:
                         half the number of cores)
  --sync                 ssh: first copy the working directory to the servers: tracked files, and untracked files that
                         git does not ignore, except those in logs, checkpoints and experiments; outside a git checkout,
                         all files except those in logs, checkpoints, experiments and .venv
  --retries N            retries of a failed job, for jobs without the option _retries (default: 1)
  --max-failures N       start no more jobs after N have failed (the list is then paused)
  --fail-fast            when a job fails, cancel all other jobs of the list
  --notify COMMAND       run COMMAND when the list is paused, at its first failure and at its end, with the event as
                         JSON on its standard input (default: $MUSTER_NOTIFY)
  --gpu-free-mib N       use only GPUs with at least N MiB of free memory (default: GPUs of which other processes use
                         at most 1000 MiB)
  --lost-after SECONDS   ssh: time after which the jobs of an unreachable server are restarted elsewhere (default: 600)
  --grace SECONDS        time between SIGTERM and SIGKILL (default: 30)
  --no-tmux              create no tmux sessions on the servers (they show the output of the jobs)
  --plan                 print where each job would run, in the order of the starts; start nothing
  --help                 show this help; after a subcommand, its own help

  status                 show the state of every job, and where it runs
  logs JOB [--follow]    print the output of the last attempt of a job; --attempt N: that of attempt N
  why JOB [OTHER]        explain the state of a job, and show its attempts; with another job: in which settings the
                         two differ, and their base models
  cancel JOB...|all      stop jobs, and verify that none of their processes remain
  retry failed|JOB...    run failed or cancelled jobs again, at the next `resume` if the list has ended
  add FILE               add the jobs of a file to the list, also while the list runs; the option _after of these jobs
                         may name jobs of the list
  resume                 continue the list
  close                  remove the tmux sessions of the list; otherwise the next list on the same server removes
                         them

JOB is an id, a name, or an unambiguous part of one: the start of an id, or any part of a name. A job with the option
_after starts when the jobs that it names are done. Each start of a job is an attempt.

To continue an interrupted list, run the same command again, or `resume`: running jobs continue, waiting jobs are
started, and done, failed and cancelled jobs are not run again.

Exit codes: 0 all jobs are done; 1 a job failed or was cancelled; 2 wrong call or configuration; 69 a package is
missing; 75 the list was paused; 129 SIGHUP; 130 Ctrl-C; 143 SIGTERM. `resume` continues the list after 75,
129, 130 and 143; after a signal, running jobs continue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from distributed.exit_codes import WRONG_CALL
from distributed.files import version
from distributed.jobs.call import (
    RESULTS,
    TWO_PHASE,
    CallError,
    CommandParser,
    ListOptions,
    did_you_mean,
    journal_of,
    positive,
    program_name,
    results_file,
    with_verbs,
)
from distributed.jobs.journal import journal
from distributed.jobs.journal.journal import JournalError
from distributed.jobs.list_start import run
from distributed.jobs.subcommands import SUBCOMMANDS
from distributed.trust import printable


def list_options(arguments: Sequence[str], two_phase: bool = False) -> ListOptions:
    """The options of a call that runs a list. two_phase: also those of run_two_phase_training.py."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    others = {"two_phase", "base_models", *(() if two_phase else ("skip_phase1", "refuse_leaks"))}
    for each in fields(ListOptions):
        details: dict[str, Any] = {"default": each.default, **each.metadata}
        if each.default is False:
            details["action"] = "store_true"
        if each.name not in others:
            parser.add_argument(f"--{each.name.replace('_', '-')}", **details)
    return ListOptions(two_phase=two_phase, **vars(parser.parse_args(arguments)))


def subcommand_parser(name: str) -> CommandParser | None:
    """The parser of a subcommand; None if SUBCOMMANDS does not contain this name."""
    if name not in SUBCOMMANDS:
        return None
    parser = CommandParser(prog=f"{program_name()} {name}", description=SUBCOMMANDS[name].__doc__, allow_abbrev=False)
    parser.add_argument("--log-file", type=results_file, default=RESULTS, metavar="FILE",
        help="results of the list (default: results.json)")  # fmt: skip
    job = "an id, a name, or an unambiguous part of one: the start of an id, or any part of a name"
    if name in ("logs", "why"):
        parser.add_argument("job", metavar="JOB", help=job)
    if name == "why":
        parser.add_argument("other", nargs="?", metavar="OTHER", help="another job, to compare the settings of both")
    if name in ("cancel", "retry"):
        every = "all: every unfinished job" if name == "cancel" else "failed: all failed jobs"
        parser.add_argument("jobs", nargs="+", metavar="JOB", help=f"{job}; {every}")
    if name == "add":
        parser.add_argument("file", type=Path, metavar="FILE",
            help="jobs (JSON); their option _after may name jobs of the list")  # fmt: skip
    if name == "logs":
        parser.add_argument("--follow", action="store_true", help="print new output until the attempt ends")
        parser.add_argument("--attempt", type=positive, metavar="N", help="attempt N (default: the last one)")
    return parser


def main(
    arguments: Sequence[str], execute: Callable[[list[str]], int] | None = None, help_text: str | None = __doc__,
    parser_of: Callable[[str], CommandParser | None] = subcommand_parser,
) -> int:  # fmt: skip
    """Run a program and return its exit code. The defaults are those of run_distributed_training.py.

    parser_of: returns the parser of a subcommand; --help then prints the help of this parser instead of help_text.
    """
    try:
        if "--help" in arguments or "-h" in arguments:
            code = 0
            parser = parser_of(arguments[0])
            sys.stdout.write(parser.format_help() if parser else with_verbs(help_text or ""))
        elif "--version" in arguments[:1]:
            code = 0
            print(f"Muster {version()}")
        else:
            code = (execute or execute_command)(list(arguments))
        if sys.stdout:  # None if it was closed before Python started
            sys.stdout.flush()
        return code
    except CallError as error:
        return report_error(f"{error}\nTry: {program_name()} --help")
    except (JournalError, ValueError) as error:
        return report_error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        return report_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def report_error(message: str) -> int:
    for line in message.splitlines():
        start = "" if line.startswith("Try: ") else f"{program_name()}: "
        sys.stderr.write(f"{start}{printable(line)}\n")
    return WRONG_CALL


def execute_command(arguments: list[str]) -> int:
    code = execute_subcommand(arguments)
    return run(list_options(arguments)) if code is None else code


def execute_subcommand(arguments: list[str]) -> int | None:
    """Execute one of SUBCOMMANDS and return its exit code; None if there is no subcommand."""
    if arguments and (parser := subcommand_parser(arguments[0])):
        options = parser.parse_args(arguments[1:])
        path = journal_of(options.log_file)
        if not path.exists():
            raise CallError(f"{options.log_file}: no job list ({path} is missing); give its results with --log-file")
        if not journal.has_list(path):
            raise CallError(f"{path}: contains no job list; rerun the command that starts the list")
        return SUBCOMMANDS[arguments[0]](options, path)
    if arguments and not arguments[0].startswith("-"):
        known = [*SUBCOMMANDS, *(["cache"] if Path(sys.argv[0]).name == TWO_PHASE else [])]
        hint = did_you_mean(arguments[0], known) or f"; known commands: {', '.join(known)}"
        raise CallError(f"{arguments[0]}: unknown command{hint}")
    return None
