"""A tmux session that shows the output of each slot. A view only: jobs do not depend on it.

The session is `ml_training`. It belongs to the job list and the server whose directory (own_directory()) its option
@muster names; a session of that name that belongs to somebody else is left alone, and another name is used. Each pane
runs `view`, which reads what show() writes and prints the log of the attempt that its slot runs.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from distributed.files import KIT, read_json, write_file
from distributed.launch import supervisor

SESSION = "ml_training"
NAMES = 100  # names tried: ml_training, ml_training_2, ...
LIMIT = 10.0  # seconds that tmux may take
REFRESH = 0.3  # seconds between two looks of a view
BACKLOG = 64 * 1024  # bytes of a log that a view shows from before it began
# Nothing of the user's environment, and UTF-8 whatever the locale: words reach a job as the list has them.
PLAIN_PYTHON = ("-I", "-S", "-X", "utf8")
ENTRY = os.path.join(KIT, "scripts", "lib", "jobs_host.py")


class TmuxError(Exception):
    """What tmux said."""


def tmux(*words: str) -> str:
    """Its standard output; raises TmuxError."""
    env = {name: value for name, value in os.environ.items() if name not in ("TMUX", "TMUX_PANE")}
    try:
        done = subprocess.run(
            ["tmux", *words], capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, env=env,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TmuxError(str(error)) from None
    if done.returncode:
        raise TmuxError(done.stderr.strip() or f"tmux {words[0]}: exit code {done.returncode}")
    return done.stdout


def own_directory(directory: str, server: str) -> str:
    """What belongs to one server of a job list: its servers may share their files."""
    return os.path.join(directory, "servers", server)


def ensure(directory: str, slots: list[str]) -> tuple[str, str]:
    """The name of the session that shows these slots, made where it is not there; or why there is none."""
    if not shutil.which("tmux"):
        return "", "tmux is not installed: no live view of the slots there; install it (apt-get install tmux)"
    try:
        for number in range(1, NAMES):
            name = SESSION if number == 1 else f"{SESSION}_{number}"
            owner = owner_of(name)
            if owner == directory and panes_of(name) == len(slots):
                return name, ""
            if owner == directory or (owner and abandoned(owner)):
                tmux("kill-session", "-t", f"={name}")
                owner = None
            if owner is None:
                try:
                    create(name, directory, slots)
                except TmuxError as error:
                    if "duplicate session" in str(error):  # somebody else was quicker
                        continue
                    raise
                other = "" if number == 1 else f"a tmux session {SESSION} of somebody else is there: this one is {name}"
                return name, other
        return "", f"{NAMES} tmux sessions are called {SESSION}: no live view of the slots there"
    except TmuxError as error:
        return "", f"tmux: {error}: no live view of the slots there"


def owner_of(name: str) -> str | None:
    """The directory of the job list that the session belongs to; "" for one of somebody else, None for no session."""
    try:
        tmux("has-session", "-t", f"={name}")
    except TmuxError:
        return None
    with contextlib.suppress(TmuxError):
        return tmux("show-options", "-v", "-t", f"={name}:", "@muster").strip()
    return ""


def panes_of(name: str) -> int:
    return len(tmux("list-panes", "-s", "-t", f"={name}").splitlines())


def abandoned(directory: str) -> bool:
    """Whether no dispatcher works on that list here, and none of its jobs runs."""
    if not os.path.isabs(directory):
        return False
    above, server = os.path.dirname(os.path.dirname(directory)), os.path.basename(directory)
    try:
        with os.scandir(above) as entries:
            here = [entry.path for entry in entries if os.path.exists(f"{entry.path}/node_{server}.pid")]
        return not any(held(path) for path in (f"{directory}/serve", *(f"{attempt}/lock" for attempt in here)))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def held(path: str) -> bool:
    """Whether a process has locked this file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def create(name: str, directory: str, slots: list[str]) -> None:
    """A pane for each slot, all of one size, each with its title."""
    commands = [view_command(directory, number) for number in range(len(slots))]
    tmux("new-session", "-d", "-s", name, "-x", "240", "-y", "67", "-n", "slots", *commands[0])
    try:
        tmux("set-option", "-t", f"={name}:", "@muster", directory)
        tmux("set-option", "-t", f"={name}:", "status-left-length", "40")  # more than the default of 10: its whole name
        tmux("set-option", "-t", f"={name}:", "pane-border-status", "top")
        tmux("set-option", "-t", f"={name}:", "pane-border-format", " #{pane_title} ")
        for command in commands[1:]:
            tmux("split-window", "-d", "-t", f"={name}:.{{bottom-right}}", *command)  # the last one in a tiled layout
            tmux("select-layout", "-t", f"={name}:", "tiled")
    except TmuxError:
        with contextlib.suppress(TmuxError):
            tmux("kill-session", "-t", f"={name}")
        raise


def view_command(directory: str, slot: int) -> list[str]:
    return [sys.executable, *PLAIN_PYTHON, ENTRY, "view", directory, str(slot)]


def remove(directory: str) -> None:
    """End the session of this list."""
    with contextlib.suppress(TmuxError):
        for line in tmux("list-sessions", "-F", "#{session_name}").splitlines():
            if line.startswith(SESSION) and owner_of(line) == directory:
                tmux("kill-session", "-t", f"={line}")


# ---------------------------------------------------------------- what a pane shows


def slot_file(directory: str, slot: int) -> str:
    return os.path.join(directory, f"slot_{slot}.json")


def show(directory: str, slot: int, title: str, log: str, end: str) -> None:
    """From now on the slot shows this log, until the file `end` exists."""
    with contextlib.suppress(OSError):  # a view only
        write_file(slot_file(directory, slot), json.dumps({"title": title, "log": log, "end": end}))


def view(directory: str, slot: int) -> int:
    """What a pane runs, for as long as it is there."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):  # keys pressed in the pane would end the view
        signal.signal(number, signal.SIG_IGN)
    shown: dict[str, object] = {}
    position, ended = 0, True
    title(f"slot {slot}: idle")
    while True:
        found = read_json(slot_file(directory, slot))
        if found and found != shown:
            shown, ended = found, False
            title(str(found["title"]))
            position = begin(str(found["log"]))
            out(f"\n--- {found['title']}\n".encode())
        over = bool(shown) and os.path.exists(str(shown["end"]))
        position = copy(str(shown["log"]), position) if shown else 0
        if over and not ended:
            ended = True
            title(f"slot {slot}: idle")
            out(f"--- ended with exit code {supervisor.read_code(str(shown['end']))}\n".encode())
        time.sleep(REFRESH)


def begin(log: str) -> int:
    """Where a view of this log begins, bytes."""
    try:
        return max(0, os.stat(log).st_size - BACKLOG)
    except OSError:
        return 0


def copy(log: str, position: int) -> int:
    """Print what was added to the log. Returns the new position, bytes."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(position)
        while block := file.read(1 << 16):
            position += len(block)
            out(block)
    return position


def out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def title(text: str) -> None:
    """tmux takes it for the title of the pane."""
    plain = "".join(letter for letter in text if letter.isprintable())
    out(f"\033]2;{plain[:120]}\033\\".encode())
