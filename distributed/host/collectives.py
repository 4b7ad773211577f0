"""The collectives of a rank, as recorded by PyTorch's flight recorder.

With NCCL, PyTorch records the last 2,000 collectives of each rank. It writes the record to a file when a collective
times out, and when another process writes to a named pipe of the rank. The content of a file is data from a rank.
Source of names and format: torch/csrc/distributed/c10d/FlightRecorder.hpp and ProcessGroupNCCL.hpp of PyTorch 2.13.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass

from distributed.trust import PRIVATE_DIRECTORY, make_directories, printable, regular_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

PREFIX = "collectives_"  # of the files <PREFIX><rank>, and of the pipes <PREFIX><rank>.pipe
FILE_VARIABLES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the second one is deprecated
PIPE_VARIABLE = b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
MAX_BYTES = 8 << 20  # a longer file is not read
DUMP_TIMEOUT = 3.0  # seconds; PyTorch looks at the pipe once a second
MAX_TOTAL = 32 << 20  # bytes of the files of a run that are read; 2,000 collectives have about 250 KB
OPCODES = {  # of the module pickle, for numbers, text, lists and dictionaries
    *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "BINGET", "LONG_BINGET", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
}
MAX_GROUPS, MAX_NAME = 64, 100
SHOWN = 4  # ranks in a text


@dataclass(frozen=True)
class Collectives:
    """The collectives of one rank in one process group; point-to-point operations are left out."""

    group: str
    called: int  # the number of the last collective that the rank has called; the first one is 1
    pending: int = 0  # the number of the first collective that has not completed; 0: none
    name: str = ""  # of the pending collective, such as all_reduce

    def __post_init__(self) -> None:
        if not 0 <= self.pending <= self.called < 1 << 63:
            raise ValueError("numbers of collectives: expected 0 <= pending <= called")


@dataclass(frozen=True)
class Mismatch:
    """Why a collective does not complete."""

    text: str
    missing: tuple[int, ...] = ()  # the ranks that have not called it


def directory_of(run: str, node: str) -> str:
    """The directory in which the ranks of a node write their records."""
    return os.path.join(run, "ranks", node)


def variables(run: str, node: str, environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The variables that make the ranks of a node write their records there, without those that the user has set."""
    directory, found = directory_of(run, node), {}
    make_directories(directory, PRIVATE_DIRECTORY)
    prefix = os.path.join(directory, PREFIX)
    if not any(name in environment for name in FILE_VARIABLES):
        found[FILE_VARIABLES[0]] = os.fsencode(prefix)
    if PIPE_VARIABLE not in environment:
        with suppress(OSError):  # PyTorch would end a rank whose pipe it cannot create
            os.mkfifo(f"{prefix}pipe", 0o600)
            os.unlink(f"{prefix}pipe")
            found[PIPE_VARIABLE] = os.fsencode(prefix)
    return found


def query(directory: str, rank: int) -> tuple[Collectives, ...]:
    """Make a rank write its record, and return its collectives; () if the rank has no pipe or does not reply."""
    path = os.path.join(directory, f"{PREFIX}{rank}")
    before = _version(path)
    with suppress(OSError):  # also if no process reads the pipe
        pipe = os.open(f"{path}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
                return ()
            os.write(pipe, b"1")
        finally:
            os.close(pipe)
        end = time.monotonic() + DUMP_TIMEOUT
        while time.monotonic() < end:
            time.sleep(0.05)
            with suppress(ValueError):  # the rank is writing the file
                if _version(path) != before:
                    return read(path)
    return ()


def _version(path: str) -> tuple[int, int] | None:
    """A value that changes when the file is written; None if there is no file."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


def read(path: str) -> tuple[Collectives, ...]:
    """The collectives in a file. Raises OSError, or ValueError for an invalid file."""
    with open(path, "rb", opener=regular_file) as file:
        dump = file.read(MAX_BYTES + 1)
    if len(dump) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    import pickle

    try:
        _check(dump)
        return _collectives(pickle.loads(dump))
    except Exception as error:  # pickle raises exceptions of any class  # noqa: BLE001
        raise ValueError(f"not a record of collectives: {printable(str(error))[:MAX_NAME]}") from None


def _check(dump: bytes) -> None:
    """Raise ValueError unless the pickle has only what PyTorch writes. Then it calls nothing, and its length bounds it.

    Tuples are pairs of texts: as a key, nested tuples can overflow the stack. Lists and dictionaries may nest and occur
    more than once, so that the text of one can have any length.
    """
    import pickletools

    texts: set[Any] = set()  # references to texts
    last = False, False  # whether each of the last two values is a text
    for opcode, argument, _ in pickletools.genops(dump):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT") and (argument or 0) < len(dump):
            (texts.add if last[1] else texts.discard)(argument)
        elif name in OPCODES or (name == "TUPLE2" and all(last)):
            last = last[1], name == "BINUNICODE" or (name in ("BINGET", "LONG_BINGET") and argument in texts)
        else:
            raise ValueError(f"{name}: refused")


def _collectives(record: Mapping[str, Any]) -> tuple[Collectives, ...]:
    # With gloo, PyTorch 2.13 records no names of groups in pg_config.
    groups = [_group(config["name"], config["desc"]) for config in record["pg_config"].values() if config["name"]]
    found = {group: Collectives(group, 0) for group in groups[:MAX_GROUPS]}
    for entry in record["entries"]:  # in the order of the calls
        group, number = _group(*entry["process_group"]), entry["collective_seq_id"]
        if not isinstance(number, int):
            raise ValueError("collective_seq_id: expected a number")
        if entry["is_p2p"] or (group not in found and len(found) == MAX_GROUPS):
            continue
        last = found.get(group, Collectives(group, 0))
        pending, operation = last.pending, last.name
        if not pending and not entry["retired"] and entry["state"] != "completed":
            pending, operation = number, _name(entry["profiling_name"]).partition(":")[2]
        found[group] = Collectives(group, max(last.called, number), pending, operation)
    return tuple(found.values())


def _group(name: object, description: object) -> str:
    return _name(name if description in ("", "undefined") else description)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a name: expected a text")
    return printable(value[:MAX_NAME])


def read_newest(run: str, ranks: Mapping[int, str], since: float) -> dict[int, tuple[Collectives, ...]]:
    """The records of these ranks (rank -> node) that were written since that Unix time, up to MAX_TOTAL bytes."""
    found, left = {}, MAX_TOTAL
    for rank, node in ranks.items():
        path = os.path.join(directory_of(run, node), f"{PREFIX}{rank}")
        with suppress(OSError, ValueError):
            facts = os.stat(path)
            left -= facts.st_size
            if facts.st_mtime >= since and left >= 0:
                found[rank] = read(path)
    return found


def find_mismatch(records: Mapping[int, Sequence[Collectives]]) -> Mismatch | None:
    """Find the collective that some ranks wait in and others have not called, or that differs between ranks.

    records: by rank. If there are several, the collective whose missing ranks wait in no other one.
    """
    waiting = {rank for rank, groups in records.items() if any(one.pending for one in groups)}
    found = sorted(_mismatches(records), key=lambda one: (not one.missing, bool(waiting.intersection(one.missing))))
    return found[0] if found else None


def _mismatches(records: Mapping[int, Sequence[Collectives]]) -> Iterator[Mismatch]:
    of_group: dict[str, dict[int, Collectives]] = {}
    for rank, groups in sorted(records.items()):
        for one in groups[:MAX_GROUPS]:
            of_group.setdefault(one.group, {})[rank] = one
    for group, of_rank in sorted(of_group.items()):
        number = min((one.pending for one in of_rank.values() if one.pending), default=0)
        by_name: dict[str, list[int]] = {}
        for rank, one in of_rank.items():
            if number and one.pending == number:
                by_name.setdefault(one.name, []).append(rank)
        where = f"collective {number} of the group {group}"
        if missing := tuple(rank for rank, one in of_rank.items() if one.called < number):
            name, waiting = next(iter(by_name.items()))
            called, wait = (
                f"ha{'s' if len(missing) == 1 else 've'} not called",
                f"wait{'s' * (len(waiting) == 1)} in it",
            )
            yield Mismatch(f"{_ranks(missing)} {called} {name}, {where}; {_ranks(waiting)} {wait}", missing)
        elif len(by_name) > 1:
            calls = ", ".join(f"{name} ({_ranks(ranks)})" for name, ranks in by_name.items())
            yield Mismatch(f"ranks have called different operations as {where}: {calls}")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join([*map(str, ranks[:SHOWN]), *["..."] * (len(ranks) > SHOWN)])
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
