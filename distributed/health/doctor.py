"""Is this machine fit for training, and what is to be done when it is not?

Facts are gathered first (host.facts), then judged (checks), then told. Nothing is changed. The standard library is
enough, so it runs before anything else.

Try it: scripts/doctor.sh, or python3 -m distributed.health.doctor
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from distributed.health.checks import LEVELS, MASTER_PORT, Line, judge
from distributed.host.facts import gather

COLOURS = {"ok": "32", "warning": "33", "fault": "31;1"}


# ---------------------------------------------------------------- tell


def render(lines: Sequence[Line], host: str, width: int | None = None, colour: bool = False) -> str:
    """A table that ends with what is worst and the counts. Commands are never broken: they are to be pasted.

    Args:
        width: of the terminal, in characters; None does not break lines.
    """
    column = max(len(line.topic) for line in lines) + 2
    good = [line for line in lines if line.level == "ok"]
    bad = sorted((line for line in lines if line not in good), key=lambda line: LEVELS.index(line.level))
    blocks = [
        "\n".join(row for line in block for row in rows(line, column, width, colour)) for block in (good, bad) if block
    ]
    return "\n\n".join([*blocks, summary(lines, host)]) + "\n"


def summary(lines: Sequence[Line], host: str) -> str:
    counts = Counter(line.level for line in lines)
    faults, warnings = counts["fault"], counts["warning"]
    verdict = "not fit for training" if faults else "fit for training"
    return f"{host} is {verdict}: {plural(faults, 'fault')}, {plural(warnings, 'warning')}, {counts['ok']} ok"


def rows(line: Line, column: int, width: int | None, colour: bool) -> Iterator[str]:
    level = f"{line.level:<9}"
    if colour:
        level = f"\033[{COLOURS[line.level]}m{level}\033[0m"
    indent = " " * (9 + column)
    first, *rest = wrap(line.fact, width, len(indent))
    fix = wrap(f"fix: {line.fix}", width, len(indent)) if line.fix else []
    yield f"{level}{line.topic:<{column}}{first}"
    yield from (indent + words for words in (*rest, *fix))
    if line.command:
        yield f"{indent}$ {line.command}"


def wrap(text: str, width: int | None, indent: int) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(20, width - indent), break_long_words=False, break_on_hyphens=False)


def terminal() -> tuple[int | None, bool]:
    """The width of the terminal that we print on, None for a pipe; and whether it wants colours."""
    if not sys.stdout.isatty():
        return None, False
    return shutil.get_terminal_size().columns, not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------- the program


def main(words: Sequence[str] | None = None) -> int:
    """0: fit; 1: a fault; 2: wrong call."""
    call = parse(words)
    facts = gather(call.folder, call.log_dir or call.folder / "logs", call.master_port)
    if call.json:
        print(json.dumps(asdict(facts), indent=2, sort_keys=True))
        return 0
    lines = judge(facts)
    sys.stdout.write(render(lines, facts.names.host, *terminal()))
    return 1 if any(line.level == "fault" for line in lines) else 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry: scripts/doctor.sh --help\n")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="doctor", description="Is this machine fit for training?", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the facts, judge nothing")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="the working folder of the launch")
    parser.add_argument("--log-dir", type=Path, help="default: logs in the working folder")
    parser.add_argument("--master-port", type=port_number, default=MASTER_PORT, help=f"default: {MASTER_PORT}")
    return parser.parse_args(words)


def port_number(word: str) -> int:
    if not word.isdigit() or not 1 <= int(word) <= 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is not a port: give a number from 1 to 65535")
    return int(word)


if __name__ == "__main__":
    sys.exit(main())
