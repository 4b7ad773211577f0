"""Checks in the shell of a node or server: no other user has made the code that is about to run, or can replace it.

The checks run before any program of that place, so that a planted program cannot take part in them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from itertools import takewhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# For sh in a directory of a node. $owners: who may own the directories above it, and links to them; see owners_above().
# Exits with 69 if another user could replace the directory. In %A, such as drwxrwxrwt, the last two letters are those
# of other users. In a container that maps some user ids only, 65534 stands for the others, root among them.
EXIT_IF_FOREIGN = """[ -O . ] || { echo "$PWD: belongs to another user" >&2; exit 69; }
[ "$(id -u)" = "${owners%% *}" ] || owners="0 $(id -u)"
grep -q " 4294967295$" /proc/self/uid_map || owners="$owners 65534"
for p in "$PWD" "$(pwd -P)"; do while [ "$p" != / ]; do f=$(stat -c '%u %A' -- "$p"); case " $owners " in
*" ${f%% *} "*) case $f in *" d"*w[!tT]) ;; *) p=$(dirname -- "$p"); continue;; esac;; esac
echo "$p: other users own it or can write to it, and could replace $PWD" >&2; exit 69; done; done"""
# A function for bash: planted PATH... prints why code at these absolute paths must not run; nothing if it may. A part
# of a path counts if all users can create entries in its directory. $owners: who may have made it. $open: directories
# without the sticky bit in which all users can replace entries, on the launching machine too. A missing part is
# refused, because another user could make it after this check; the text is that of bash or Python, see
# replies.START_FAILURES.
PLANTED = r"""planted() { local p d facts name parts=() ends; local -A found whole
mapfile -t ends < <(readlink -m -- "$@" 2>/dev/null)
for p in "$@" "${ends[@]}"; do name=$p; while [[ $p ]]; do
parts+=("$p") whole[$p]=${whole[$p]-$name} p=${p%/*}; done; done
while read -r -d '' facts && read -r -d '' name; do found[$name]=$facts
done < <(stat --printf '%u %A\0%n\0' -- / "${parts[@]}" 2>/dev/null)
[[ ${found[/]-} ]] || { echo "stat of GNU coreutils: not found on the PATH, so owners cannot be checked"; return; }
[[ $UID == "${owners%% *}" ]] || owners="0 $UID"
[[ $(</proc/self/uid_map) == *' 4294967295' ]] || owners+=' 65534'
for p in "${parts[@]}"; do d=${p%/*} facts=${found[$p]-}
[[ ${found[${d:-/}]-} == *' d'*w? ]] || continue
if [[ ! $facts ]]; then case ${whole[$p]} in
*.py) echo "can't open file '${whole[$p]}'";; *) echo "bash: line 1: ${whole[$p]}: No such file or directory"; esac
elif [[ " $owners " != *" ${facts%% *} "* ]]; then
echo "$p: belongs to user id ${facts%% *}, who made it in $d, where all users can create files; nothing in it is used"
elif [[ ${found[${d:-/}]} != *[tT] && $open != *":$d:"* ]]; then echo "$d: all users can replace $p there"
else continue; fi
return; done; }"""


def owners_above(directory: str) -> str:
    """User ids: this user, root, and who owns the directories above this one here and may therefore do so on a node.

    On a node where this user has another id, the ids mean other people, and only root counts.
    """
    return _for_shell({0, *(os.lstat(os.path.dirname(part)).st_uid for part in _parts(directory))})


def _parts(path: str) -> Iterator[str]:
    """The path and the directories above it, without /, also of the path to which links lead."""
    for part in (os.path.abspath(path), os.path.realpath(path)):
        while part != "/":
            yield part
            part = os.path.dirname(part)


def _for_shell(owners: Iterable[int]) -> str:
    """User ids as $owners has them: this user first."""
    return " ".join(map(str, [os.geteuid(), *sorted({*owners} - {os.geteuid()})]))


def exit_if_planted(arguments: Sequence[str], cwd: str, code: int) -> str:
    """A line for bash that exits with this code if another user made the code of a command, or could replace it.

    The code is in the working directory `cwd` ("": none), and at the paths among the first arguments.
    """
    first = takewhile(lambda argument: argument.startswith(("/", "-")), arguments)
    paths = [os.path.normpath(path) for path in (cwd, *first) if path.startswith("/") and path != "/"]
    if not paths or not arguments[0].startswith("/"):
        return ""
    owners, replaceable = {0}, set()
    for part in dict.fromkeys(part for path in paths for part in _parts(path)):
        above = os.path.dirname(part)
        with contextlib.suppress(OSError):  # it may be there only
            owners.add(os.lstat(part).st_uid)
            if os.lstat(above).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                replaceable.add(above)
    known = f"owners={shlex.quote(_for_shell(owners))} open={shlex.quote(':'.join(['', *sorted(replaceable), '']))}"
    exit_if = f'[ ! "$planted" ] || {{ echo "$planted" >&2; exit {code}; }}'
    return f"{PLANTED}; {known}; planted=$(planted {shlex.join(paths)}); {exit_if}; "
