"""Start a run again, with the call that its run.json records. scripts/rerun.sh executes this program."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distributed.exit_codes import WRONG_CALL
from distributed.records import listed, mapping, text
from distributed.runs.call import SECRETS
from distributed.runs.lookup import Run
from distributed.runs.query import JobWithoutRun, find_run, parser_of
from distributed.transport.commands import Messages, TransportError, exit_on_signals
from distributed.trust import printable

DRY_RUN = "--dry-run"
SHOWN = 5  # packages


def rerun(run: Run, given: Sequence[str], program: str) -> int:
    """given: options that replace recorded ones. Does not return, except with --dry-run. Raises TransportError."""
    subject = f"run {run.directory.name}"
    if not run.call:
        line = shlex.join(run.command)
        raise TransportError(1, f"{subject}: recorded by an older version of Muster; call: {line} (in {run.cwd})")
    if run.call.program[0] == "sbatch":
        raise TransportError(1, f"{subject}: a batch job, whose options of sbatch are not recorded; submit it again")
    call = run.call.with_options([one for one in given if one != DRY_RUN])
    if missing := [" ".join(one) for one in run.call.options if one[0] in SECRETS and one in call.options]:
        values = "this value is" if len(missing) == 1 else "these values are"
        raise TransportError(WRONG_CALL, f"{subject}: {values} not recorded; give: {' '.join(missing)}")
    if DRY_RUN in given:
        print(printable(f"cd {shlex.quote(run.cwd)} && {shlex.join(call.command)}"))
        return 0
    verb = Path(call.program[0]).stem
    named = {"MUSTER_VERB": verb} if program.startswith("muster ") and verb in ("run", "train") else {}
    return call.repeat(run.cwd, {"MUSTER_RERUN_OF": str(run.directory), **named})


def differences(earlier: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Lines on what differs between the parts of two run.json, see run_directory.software()."""
    git = [mapping(run.get("git")) for run in (earlier, now)]
    commits = [text(one.get("commit"))[:12] or "unknown" for one in git]
    if commits[0] != commits[1]:
        yield f"commit {commits[1]}, was {commits[0]}"
    was, now_is = ("yes" if one.get("dirty") else "no" for one in git)
    if "yes" in (was, now_is):
        yield f"uncommitted changes: {now_is}, were: {was}; only the fact is recorded"
    if earlier.get("python") != now.get("python"):
        yield f"Python {now.get('python')}, was {earlier.get('python')}"
    before, after = (_software(run) for run in (earlier, now))
    changed = [name for name in sorted(before | after) if before.get(name, "") != after.get(name, "")]
    shown = [f"{name} {after.get(name) or 'none'}, was {before.get(name) or 'none'}" for name in changed[:SHOWN]]
    if shown:
        more = f"; {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        yield f"packages: {'; '.join(shown)}{more}"


def _software(run: Mapping[str, object]) -> dict[str, str]:
    """The versions of Python, Muster and packages that a run has recorded."""
    packages = (text(one).rpartition("-") for one in listed(run.get("packages")))
    versions = {name: text(version) for name, version in mapping(run.get("versions")).items()}
    return versions | {name: version for name, _, version in packages}


def main(arguments: Sequence[str]) -> int:
    """Return 0 after --dry-run, 1 if the run cannot be started again, 2 after a wrong call."""
    parser = parser_of("rerun", str(__doc__))
    parser.add_argument("given", nargs="*", metavar="OPTION")
    options = parser.parse_args(arguments)
    messages = Messages(options.program)
    exit_on_signals()
    try:
        return rerun(find_run(options.run, options.log_dir, options.program), options.given, options.program)
    except JobWithoutRun as error:
        return messages.print_error(TransportError(1, str(error)))
    except TransportError as error:
        return messages.print_error(error)
