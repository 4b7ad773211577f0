"""Checks in the shell of a node or server: no other user has made the code that is about to run, or can replace it.

The checks run before any program of that place, so that a planted program cannot take part in them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from itertools import takewhile

from distributed.trust import parts_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A function for bash: foreign KIND PATH... prints why these paths must not be used; nothing if they may. It looks at
# each part of a path and, if that is a link, at each part of where it leads. $owners: who may own them, this user
# first. $open: directories without the sticky bit in which all users can replace entries, on the launching machine too.
# KIND:
#   strict   no other user owns a part of the path, or can replace it
#   planted  no other user has made a part of the path in a directory in which all users can create files. A part that
#            is missing there is refused: another user could make it after this check. The text is that of bash or
#            Python, see replies.START_FAILURES
#   script   the same for files of the user
#   below    as planted, but all users may replace entries of the directories
# In %A, such as drwxrwxrwt, the last two letters are those of other users. In a container that maps some user ids only,
# 65534 stands for the others, root among them: it is accepted where not all of them can create files.
FOREIGN = r"""foreign() { local kind=$1 at rest part link links path d facts who others='' parts=()
local -A found whole; shift
for path in "$@"; do
  [[ $path == /* ]] || path=$PWD/$path
  at='' rest=$path links=0
  while [[ $rest ]]; do
    part=${rest%%/*}; rest=${rest:${#part}+1}
    case $part in '' | .) continue ;; ..) at=${at%/*} && continue ;; esac
    part=$at/$part; parts+=("$part") whole[$part]=${whole[$part]-$path}
    [[ -L $part ]] || { at=$part && continue; }
    ((++links <= 40)) || { echo "$path: too many links" && return; }
    IFS= read -r -d '' link < <(readlink -z -- "$part" 2>/dev/null) || link=
    rest=$link/$rest
    [[ $link != /* ]] || at=''
  done
done
while read -r -d '' facts && IFS= read -r -d '' part; do found[$part]=$facts
done < <(stat --printf '%u %A\0%n\0' -- / "${parts[@]}" 2>/dev/null)
[[ ${found[/]-} ]] || { echo "stat of GNU coreutils: not found on the PATH, so owners cannot be checked" && return; }
[[ $UID == "${owners%% *}" ]] || owners="0 $UID"
[[ $(</proc/self/uid_map) == *' 4294967295' ]] || others=' 65534'
for part in "${parts[@]}"; do
  d=${part%/*} d=${d:-/} facts=${found[$part]-} path=${whole[$part]}
  if [[ $kind == strict ]]; then
    who=$owners$others; [[ ${found[$d]-} != *' d'*w? ]] || who=$owners
    [[ " $who " != *" ${facts%% *} "* || $facts == *' d'*w[!tT] ]] || continue
    echo "$part: other users own it or can write to it, and could replace $path"
  elif [[ ${found[$d]-} != *' d'*w? ]]; then
    continue
  elif [[ ! $facts && $kind == script ]]; then
    echo "$path: not found there"
  elif [[ ! $facts && $path == *.py ]]; then
    echo "can't open file '$path'"
  elif [[ ! $facts ]]; then
    echo "bash: line 1: $path: No such file or directory"
  elif [[ " $owners " != *" ${facts%% *} "* ]]; then
    echo "$part: belongs to user id ${facts%% *}, who made it in $d, where all users can create files; it is not used"
  elif [[ $kind != below && ${found[$d]} == *[!tT] && $open != *":$d:"* ]]; then
    echo "$d: all users can replace $part there"
  else
    continue
  fi
  return
done; }"""
# For bash in a directory, after FOREIGN: exits with 69 if it is not this user's, or if `foreign {kind}` refuses it.
EXIT_IF_REFUSED = """[ -O . ] || {{ echo "$PWD: belongs to another user" >&2; exit 69; }}
p=$(foreign {kind} "$PWD"); [ ! "$p" ] || {{ echo "$p" >&2; exit 69; }}"""
EXIT_IF_FOREIGN = EXIT_IF_REFUSED.format(kind="strict")
# For bash, after FOREIGN: make_target PATH makes a directory and enters it. If another user could lead it elsewhere,
# make_target exits with 69 before it makes anything.
MAKE_TARGET = """make_target() { local p=$1 problem
[[ $p == /* ]] || p=$PWD/$p
until [[ -e $p || -L $p || ! $p ]]; do p=${p%/*}; done
if [[ ! -d $1 ]]; then
  problem=$(foreign strict "${p:-/}")
  [[ $problem != *", and could replace $p" ]] || problem=${problem%"$p"}$1
  [[ ! $problem ]] || { echo "$problem" >&2; exit 69; }
  mkdir -p -m 755 -- "$1" || exit
fi
cd -- "$1" || exit; }"""
# For bash, after FOREIGN, in a directory into which rsync copies, and which is no other user's: makes the directories
# that standard input names (relative, each after those above it, "." first, ended by NUL), because another user could
# make those that are missing. Exits with 69 if another user has made one, or a link to it, where all users can create
# files, or if one is still missing there. Directories in which only some can are not looked at by foreign(), which is
# slow for many paths.
MAKE_BELOW = r"""make_below() { local d above p facts pass dirs=() missing check; local -A found
while IFS= read -r -d '' d; do dirs+=("$d"); done
for pass in found made; do
  found=() missing=() check=()
  for ((i = 0; i < ${#dirs[@]}; i += 100)); do
    while read -r -d '' facts && IFS= read -r -d '' d; do found[$d]=$facts
    done < <(stat --printf '%A\0%n\0' -- "${dirs[@]:i:100}" 2>/dev/null)
  done
  [[ ${found[.]-} ]] || { echo "stat of GNU coreutils: failed, so owners cannot be checked" >&2; exit 69; }
  for d in "${dirs[@]}"; do
    facts=${found[$d]-} above=${found[${d%/*}]-}
    [[ $facts ]] || missing+=("$d")
    [[ ! $facts && $pass == found ]] || [[ $facts$above != *l* && $above != d*w? ]] || check+=("$d")
  done
  for ((i = 0; i < ${#check[@]}; i += 50)); do
    p=$(foreign below "${check[@]:i:50}"); [[ ! $p ]] || { echo "$p" >&2; exit 69; }
  done
  [[ $pass == found && ${missing[*]} ]] || return 0
  umask 077 # rsync sets the mode
  for ((i = 0; i < ${#missing[@]}; i += 100)); do mkdir -p -m 700 -- "${missing[@]:i:100}" 2>/dev/null; done
done; }"""


def owners_here(paths: Iterable[str]) -> set[int]:
    """User ids of the owners of these paths on this machine, as far as they exist, and of the directories above."""
    parts = dict.fromkeys(part for path in paths for part in parts_of(path))
    return {os.lstat(part).st_uid for part in parts if os.path.lexists(part)}


def owners_above(directory: str, more: Iterable[int] = ()) -> str:
    """User ids: this user, root, `more`, and who owns the directories above this one here: they may do so on a node.

    On a node where this user has another id, the ids mean other people, and only root counts.
    """
    return _for_shell({0, *more, *(os.lstat(os.path.dirname(part)).st_uid for part in parts_of(directory))})


def _for_shell(owners: Iterable[int]) -> str:
    """User ids as $owners has them: this user first."""
    return " ".join(map(str, [os.geteuid(), *sorted({*owners} - {os.geteuid()})]))


def exit_if_planted(
    arguments: Sequence[str], cwd: str, code: int, files: Sequence[str] = (), recorded: str = ""
) -> str:
    """A line for bash that exits with this code if another user made the code of a command, or could replace it.

    The code is in the working directory `cwd` ("": none), at the paths among the first arguments, and in these files.
    Their owners on this machine are accepted, except those of the path `recorded`, which may have been made since.
    """
    first = takewhile(lambda argument: argument.startswith(("/", "-")), arguments)
    paths = [os.path.normpath(path) for path in (cwd, *first) if path.startswith("/") and path != "/"]
    if not paths or not arguments[0].startswith("/"):
        return ""
    owners, replaceable = {0}, set()
    named = [path for path in (*paths, *files) if path != os.path.normpath(recorded)]
    for part in dict.fromkeys(part for path in named for part in parts_of(path)):
        above = os.path.dirname(part)
        with contextlib.suppress(OSError):  # it may be there only
            owners.add(os.lstat(part).st_uid)
            if os.lstat(above).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                replaceable.add(above)
    known = f"owners={shlex.quote(_for_shell(owners))} open={shlex.quote(':'.join(['', *sorted(replaceable), '']))}"
    exit_if = f'[ ! "$planted" ] || {{ echo "$planted" >&2; exit {code}; }}'
    find = f"foreign planted {shlex.join(paths)}" + f"; foreign script {shlex.join(files)}" * bool(files)
    return f"{FOREIGN}; {known}; planted=$({find}); {exit_if}; "
