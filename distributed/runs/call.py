"""The call of a launcher, which run.json records so that it can be repeated."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from distributed.files import KIT, command_of
from distributed.transport.commands import TransportError, quote
from distributed.trust import planted

SECRETS = ("--env", "--notify")  # options whose values are not recorded
FILES = ("--python", "--script", "--env-file", "--hostfile", "-c")  # options whose values are paths
PROGRAMS = re.compile(r"(ssh/launch_[a-z_]+|run|train|run_ddp|test_distributed)\.sh")  # that write run.json
SAME = {"--nproc": "-n", "--nproc-per-node": "-n", "--module": "-m"}  # other names of options


@dataclass(frozen=True)
class Call:
    """A command line in three parts."""

    program: tuple[str, ...]  # a program of Muster; sbatch and a batch script
    options: tuple[tuple[str, ...], ...]  # name and, unless the option is a flag, value
    rest: tuple[str, ...]  # other arguments, behind the options

    @property
    def words(self) -> list[str]:
        return [*self.program, *(word for option in self.options for word in option), *self.rest]

    @property
    def command(self) -> list[str]:
        """The same call of the program of this Muster, which may have moved."""
        return [f"{KIT}/scripts/{self.program[0].rpartition('/scripts/')[2]}", *self.words[1:]]

    def value(self, name: str, default: str) -> str:
        """The value of an option."""
        return dict(one for one in self.options if len(one) == 2).get(name, default)

    def masked(self) -> Call:
        """Without the values of SECRETS; the names of variables stay."""
        return replace(self, options=tuple(map(_masked, self.options)))

    def with_options(self, given: Sequence[str], left_out: Sequence[str] = ()) -> Call:
        """With these options, as the user wrote them, in place of those of the same name or variable.

        left_out: names of other options that are left out.
        """
        names = {_name(*word.split("=", 1), value) for word, value in zip(given, [*given[1:], ""], strict=False)}
        kept = [one for one in self.options if _name(*one) not in names and one[0] not in left_out]
        module = [one for one in kept if _name(*one)[0] == "-m"]  # ends the options of run.sh
        return replace(self, options=(*(one for one in kept if one not in module), tuple(given), *module))

    def repeat(self, cwd: str, variables: Mapping[str, str]) -> NoReturn:
        """Replace this process by the program of this Muster. Raises TransportError if that is not possible.

        Refuses a directory, script, Python or other file that another user has made since, in a directory such as /tmp.
        """
        if not PROGRAMS.fullmatch(program := self.program[0].rpartition("/scripts/")[2]):
            raise TransportError(1, f"{program}: not a launcher of Muster")
        named = [one for one in self.options if len(one) == 2]  # not the options that are given now
        paths = [value for name, value in named if name in FILES and (name != "--python" or "/" in value)]
        if not any(_name(*one)[0] == "-m" for one in named) and self.rest[:1] != ("-",):
            paths += self.rest[:1]  # the script, or CONFIG
        try:
            for path in (cwd, *(os.path.join(cwd, path) for path in paths)):
                if problem := planted(path, (0, os.geteuid())):
                    raise TransportError(1, problem)
            os.chdir(cwd)
            os.execve(self.command[0], self.command, {**os.environ, **variables, "PWD": cwd})
        except OSError as error:
            raise TransportError(1, f"{error.filename}: {error.strerror}") from None


def _masked(option: tuple[str, ...]) -> tuple[str, ...]:
    if option[0] not in SECRETS:
        return option
    return option[0], f"{option[1].partition('=')[0]}=..." if option[0] == "--env" else "..."


def _name(option: str, value: str = "", *_: str) -> tuple[str, str]:
    """What distinguishes an option from others: its name and, for --env, the variable."""
    option = option.replace("_", "-")
    return SAME.get(option, option), value.partition("=")[0] if option == "--env" else ""


def typed(program: str, verb: str, *arguments: str) -> str:
    """What a user types to call the program of a verb. program: the name of the running program in messages."""
    return quote([*command_of(verb, program), *arguments])
