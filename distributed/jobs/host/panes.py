"""A tmux session that shows the output of each slot. Jobs do not depend on it.

The session is named `ml_training`, or `ml_training_2` if the name is in use. Each session belongs to one server of one
job list: the value of its option @muster is the server_directory() of that server. Each pane runs `view`, which reads
the file that show() writes and prints the log of the attempt in its slot. After the list has ended, the session stays,
so that the output can be read, until remove(), the next list or the removal of the list's directory ends it.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from distributed.files import KIT, is_locked, read_json, write_file
from distributed.launch import node_files
from distributed.trust import checked, printable, regular_file

SESSIONS = ("ml_training", "ml_training_2")  # names in order of preference
TMUX_TIMEOUT = 10.0  # seconds
POLL_INTERVAL = 0.3  # seconds between reads of a log
BACKLOG = 64 * 1024  # bytes at the end of an existing log; a view does not print what precedes them
# Ignore the user's Python settings, and use UTF-8 in any locale: arguments must reach jobs unchanged.
PLAIN_PYTHON = ("-I", "-S", "-X", "utf8")
ENTRY = "scripts/lib/module.py"
HOST = "jobs.host.service"
SLOT = {"title": str, "log": str, "end": str}  # the file of a slot; see trust.checked()


class TmuxError(Exception):
    """tmux failed; the message is its error output."""


def tmux(*arguments: str) -> str:
    """Run tmux; return its standard output. Raises TmuxError."""
    env = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    try:
        done = subprocess.run(
            ["tmux", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=env,
            timeout=TMUX_TIMEOUT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TmuxError(str(error)) from None
    if done.returncode:
        raise TmuxError(done.stderr.strip() or f"tmux {arguments[0]}: exit code {done.returncode}")
    return done.stdout


def host_command(*arguments: str) -> list[str]:
    """A command of jobs.host.service on this machine."""
    return [sys.executable, *PLAIN_PYTHON, f"{KIT}/{ENTRY}", HOST, *arguments]


def server_directory(directory: str, server: str) -> str:
    """The directory of one server's files. directory: that of the job list, which several servers may share."""
    return os.path.join(directory, "servers", server)


def ensure(directory: str, slots: list[str]) -> tuple[str, str]:
    """Create the session for these slots, unless it exists. Returns (name, note), or ("", reason) without a session."""
    if not shutil.which("tmux"):
        return "", "tmux is not installed; no live view of its slots; to get one: apt-get install tmux"
    try:
        for name, owner in session_owners(directory):
            if owner == directory and tmux("list-panes", "-s", "-t", f"={name}").count("\n") == len(slots):
                return name, ""
            if owner == directory:
                tmux("kill-session", "-t", f"={name}")
                owner = None
            if owner is None:
                try:
                    create(name, directory, slots)
                except TmuxError as error:
                    if "duplicate session" in str(error):  # another process has created it
                        continue
                    raise
                return name, "" if name == SESSIONS[0] else f"tmux session {SESSIONS[0]} is in use; this one is {name}"
        return "", f"session names {' and '.join(SESSIONS)} are in use; no live view of its slots"
    except TmuxError as error:
        return "", f"tmux: {error}; no live view of its slots"


def session_owners(directory: str) -> list[tuple[str, str | None]]:
    """Kill the sessions of ended lists. Returns all names with session_directory(), that of this list first."""
    owners = {name: session_directory(name) for name in SESSIONS}
    for name, owner in owners.items():
        if owner and owner != directory and abandoned(owner):
            tmux("kill-session", "-t", f"={name}")
            owners[name] = None
    return sorted(owners.items(), key=lambda item: item[1] != directory)


def session_directory(name: str) -> str | None:
    """The directory that a session's option @muster names; "" without the option, None if no session has this name."""
    try:
        tmux("has-session", "-t", f"={name}")
    except TmuxError:
        return None
    with contextlib.suppress(TmuxError):
        return tmux("show-options", "-v", "-t", f"={name}:", "@muster").strip()
    return ""


def abandoned(directory: str) -> bool:
    """Whether no serve process and no job of a list runs on a server. directory: see server_directory()."""
    if not os.path.isabs(directory):
        return False
    list_directory, server = os.path.dirname(os.path.dirname(directory)), os.path.basename(directory)
    try:
        with os.scandir(list_directory) as entries:
            attempts = [entry.path for entry in entries if os.path.exists(f"{entry.path}/node_{server}.log")]
        return not any(is_locked(path) for path in (f"{directory}/serve", *(f"{each}/lock" for each in attempts)))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def create(name: str, directory: str, slots: list[str]) -> None:
    """Create a session that has one pane for each slot. Panes have titles and equal sizes."""
    program = host_command("view", directory)
    commands = [[*program, str(number)] for number in range(len(slots))]
    tmux("new-session", "-d", "-s", name, "-x", "240", "-y", "67", "-n", "slots", *commands[0])
    try:
        tmux("set-option", "-t", f"={name}:", "@muster", directory)
        tmux("set-option", "-t", f"={name}:", "status-left-length", "40")  # the default of 10 truncates the name
        tmux("set-option", "-t", f"={name}:", "pane-border-status", "top")
        tmux("set-option", "-t", f"={name}:", "pane-border-format", " #{pane_title} ")
        for command in commands[1:]:
            tmux("split-window", "-d", "-t", f"={name}:.{{bottom-right}}", *command)  # the last pane of a tiled layout
            tmux("select-layout", "-t", f"={name}:", "tiled")
    except TmuxError:
        with contextlib.suppress(TmuxError):
            tmux("kill-session", "-t", f"={name}")
        raise


def remove(directory: str) -> str:
    """Kill the session of this list and server. Returns the name of the session; empty if there was none."""
    with contextlib.suppress(TmuxError):
        for line in tmux("list-sessions", "-F", "#{session_name}").splitlines():
            if line in SESSIONS and session_directory(line) == directory:
                tmux("kill-session", "-t", f"={line}")
                return line
    return ""


# ---------------------------------------------------------------- the program in a pane


def slot_file(directory: str, slot: int) -> str:
    return os.path.join(directory, f"slot_{slot}.json")


def show(directory: str, slot: int, title: str, log: str, exit_file: str) -> None:
    """Let the view of a slot print this log and, as soon as the exit code file exists, the exit code."""
    with contextlib.suppress(OSError):  # jobs do not depend on the view
        write_file(slot_file(directory, slot), json.dumps({"title": title, "log": log, "end": exit_file}))


def view(directory: str, slot: int) -> int:
    """Print the logs of a slot's attempts, one after the other, until the directory of the list is removed."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):  # keys pressed in the pane
        signal.signal(number, signal.SIG_IGN)
    shown: dict[str, str] = {}
    position, end_shown = 0, True
    set_title(f"slot {slot}: idle")
    while os.path.isdir(directory):
        found = {}
        with contextlib.suppress(ValueError):
            found = checked(SLOT, read_json(slot_file(directory, slot)))
        if found and found != shown:
            shown, end_shown = found, False
            set_title(found["title"])
            position = 0
            with contextlib.suppress(OSError):
                position = max(0, os.stat(found["log"]).st_size - BACKLOG)
            write(f"\n--- {printable(found['title'])}\n".encode(errors="replace"))
        ended = bool(shown) and os.path.exists(shown["end"])
        with contextlib.suppress(OSError):
            position = print_new(shown["log"], position) if shown else 0
        if ended and not end_shown:
            end_shown = True
            set_title(f"slot {slot}: idle")
            write(f"--- ended with exit code {node_files.read_code(shown['end'])}\n".encode())
        time.sleep(POLL_INTERVAL)
    return 0


def print_new(log: str, position: int) -> int:
    """Print a log from a position (bytes), if the log exists. Returns the new position. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open(log, "rb", opener=regular_file) as file:
        file.seek(position)
        while block := file.read(1 << 16):
            position += len(block)
            write(block)
    return position


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def set_title(text: str) -> None:
    """Set the title of the pane with an escape sequence."""
    write(f"\033]2;{printable(text)[:120]}\033\\".encode(errors="replace"))
