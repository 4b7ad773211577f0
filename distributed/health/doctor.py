"""Check whether this machine is fit for training, and print how to fix what is not.

Gathers facts (host.facts), judges them (checks) and prints the findings. Changes nothing.

Try it: scripts/doctor.sh, or python3 -m distributed.health.doctor
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from distributed import terminal, trust
from distributed.health.checks import LEVELS, Finding, judge, ok, warning
from distributed.host.facts import gather
from distributed.host.system import KIT
from distributed.training import base_model
from distributed.trust import LONGEST_LINE, one_line, printable

TOPIC = "base models"
COLOURS = {"ok": terminal.GREEN, "warning": terminal.YELLOW, "fault": terminal.RED}


# ---------------------------------------------------------------- text


def render(findings: Sequence[Finding], host: str, width: int | None = None) -> str:
    """The findings that are ok, then the others with the worst last, then the counts.

    Args:
        width: columns of the terminal; None does not break lines.
    """
    good = [finding for finding in findings if finding.level == "ok"]
    bad = [finding for finding in findings if finding.level != "ok"]
    column = max(len(finding.topic) for finding in findings)
    blocks = ["\n".join(render_findings(block, width, column)) for block in (good, bad) if block]
    counts = Counter(finding.level for finding in findings)
    verdict = "not fit for training" if counts["fault"] else "fit for training"
    faults, warnings = terminal.plural(counts["fault"], "fault"), terminal.plural(counts["warning"], "warning")
    return "\n\n".join([*blocks, f"{host} is {verdict}: {faults}, {warnings}, {counts['ok']} ok"]) + "\n"


def render_findings(findings: Sequence[Finding], width: int | None, column: int = 0) -> Iterator[str]:
    """Lines of the findings, the worst last. Commands are not wrapped, and left out if they are too long to be used.

    column: width of the topics; 0: as needed.
    """
    column = column or max(len(finding.topic) for finding in findings)
    indent = " " * (9 + column + 2)
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        fixes = [f"fix: {finding.fix}"] if finding.fix else []
        room = width and max(20, width - len(indent))
        texts = (terminal.cut(printable(text), LONGEST_LINE) for text in (finding.fact, *fixes))
        first, *rest = [line for text in texts for line in terminal.wrap(text, room)]
        yield f"{terminal.paint(f'{finding.level:<9}', COLOURS[finding.level])}{finding.topic:<{column}}  {first}"
        yield from (indent + line for line in rest)
        if finding.command and len(finding.command) <= LONGEST_LINE:
            yield f"{indent}$ {finding.command}"


# ---------------------------------------------------------------- base models


def base_model_findings(directory: Path) -> Iterator[Finding]:
    """Compare all files of the base models in a working directory with their checksums."""
    cache, damaged = directory / base_model.CACHE, False
    try:
        problem = trust.planted(str(cache), (0, os.geteuid(), directory.stat().st_uid)) if cache.exists() else ""
        if problem:  # its files may be of any size
            yield warning(f"base models not checked: {problem}", "call this in a directory of your own", topic=TOPIC)
            return
        names = base_model.names_in(str(cache))
    except OSError as error:
        yield warning(f"{cache}: {error.strerror}", "change its permissions, or move it away", topic=TOPIC)
        return
    for path in (str(cache / name) for name in names):
        try:
            base_model.refuse_other_name(path, base_model.verify(path))
        except base_model.BaseModelError as error:
            damaged = True
            command = f"{shlex.quote(f'{KIT}/scripts/muster')} two-phase cache prune"
            yield warning(str(error), "the next job list that needs it trains it again; to remove it:", command, TOPIC)
    if names and not damaged:
        yield ok(f"{terminal.plural(len(names), 'base model')} of job lists, undamaged", topic=TOPIC)


# ---------------------------------------------------------------- the program


def main(arguments: Sequence[str]) -> int:
    """Return 1 if there is a fault and no --json, otherwise 0. A wrong call exits with 2."""
    parser = argparse.ArgumentParser(prog="doctor", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON, without findings")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="working directory of the launch")
    parser.add_argument("--log-dir", type=Path, help="default: logs in the working directory")
    parser.add_argument("--master-port", type=int, default=29500, help="default: 29500")
    options = parser.parse_args(arguments)
    facts = gather(options.directory, options.log_dir or options.directory / "logs", options.master_port)
    if options.json:
        print(json.dumps(asdict(facts), indent=2, sort_keys=True))
        return 0
    findings = [*judge(one_line(facts)), *base_model_findings(options.directory)]
    terminal.show(render(findings, facts.names.host, terminal.width()))
    return 1 if any(finding.level == "fault" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
