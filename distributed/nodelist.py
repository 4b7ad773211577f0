"""Which nodes does the run have? One way of naming them for every launcher, and SLURM's own lists.

    node1   user@node1   node1:4   node[1-8,10]   rack[1-2]-n[08-10]   node[1-3].lan:8

`:4` is the node's own number of processes. The order written is the order kept, and becomes the node
rank. Brackets unfold as `scontrol show hostnames` unfolds them; it need not be installed. Two things
are ours: text may follow the last bracket, and what scontrol would guess at (`node[1-`) is refused.

An IPv6 address is refused too, since `:` gives the number of processes: it needs a name of its own.

Try it: python -m distributed.nodelist 'node[1-3],user@node7:4'
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_NODES = 250_000  # names in one list: more is a slip of the finger, and must not fill the memory
MAX_NAME = 253  # characters in a host name (RFC 1035)
MAX_SLOTS = 1024  # processes on one node: more is an ssh port in the wrong place
LARGEST_HOSTFILE = 10**7  # characters: a line for each of MAX_NODES
SHOWN = 80  # characters of a long text in a message

_ITEM = re.compile(r"[^][,]*(?:\[[^][]*\][^][,]*)*")  # what stands between two commas outside brackets
_BRACKET = re.compile(r"\[([^][]*)\]")
_DIGITS = re.compile(r"([0-9]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_TASKS = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")


class NodeListError(ValueError):
    """A list of nodes that cannot be understood: where it is wrong, and what to write instead."""

    def __init__(self, fault: str, text: str | None = None, at: int | None = None, place: str = "") -> None:
        super().__init__(fault)
        self.fault = fault  # what is wrong: what to do
        self.text = text  # the list or the word as it was given
        self.at = at  # index of the fault in text
        self.place = place  # the file and the line that text stands in

    def __str__(self) -> str:
        where = [self.place, _excerpt(self.text, self.at or 0) if self.text is not None else ""]
        if self.at is not None:
            where.append(f"character {self.at + 1}")
        place = ", ".join(filter(None, where))
        return f"{place}: {self.fault}" if place else self.fault


@dataclass(frozen=True)
class Node:
    """One node, as a launcher was told of it."""

    name: str
    user: str | None = None  # who logs in there; None: ssh decides
    slots: int | None = None  # its own number of processes; None: that of the launch

    @property
    def address(self) -> str:
        """As ssh is called: [user@]name."""
        return self.name if self.user is None else f"{self.user}@{self.name}"

    def __str__(self) -> str:
        """The word that names this node and nothing else: user@name:slots."""
        return self.address if self.slots is None else f"{self.address}:{self.slots}"


def parse(words: str | Iterable[str]) -> list[Node]:
    """The nodes that one word or several name, in their order; each word may hold several, with commas.

    Raises NodeListError for what is malformed, for no node at all, and for a node named twice.
    """
    return _each_once(_mentions([words] if isinstance(words, str) else words))


def parse_hostfile(text: str, name: str = "hostfile") -> list[Node]:
    """The nodes of a hostfile, in DeepSpeed's style: lines such as `node1 slots=4`, with # comments.

    name: the file's, for messages. Raises NodeListError as parse does, with the line.
    """
    return _each_once(_hostfile_mentions(text, name), name)


def exclude(nodes: Iterable[Node], hostlist: str) -> list[Node]:
    """The nodes without those whose names hostlist gives.

    Raises NodeListError when one of these is not among the nodes, and when no node is left.
    """
    nodes = list(nodes)
    names = {node.name for node in nodes}
    unwanted = dict.fromkeys(expand(hostlist))
    for stranger in (name for name in unwanted if name not in names):
        raise NodeListError(f"{stranger} cannot be excluded: it is not among {fold(nodes)}: check the name")
    left = [node for node in nodes if node.name not in unwanted]
    if not left:
        raise NodeListError(f"no node is left without {_excerpt(hostlist)}: exclude fewer")
    return left


def requested(words: list[str], hostfile: str | None, unwanted: str | None) -> list[Node]:
    """The nodes of the words or of the hostfile, without the unwanted ones. Raises NodeListError and OSError."""
    if hostfile is None:
        nodes = parse(words)
    elif words:
        raise NodeListError("nodes are given both as words and by --hostfile: leave one out")
    else:
        with open(hostfile, encoding="utf-8-sig", errors="replace") as file:  # a comment may hold anything
            text = file.read(LARGEST_HOSTFILE + 1)
        if len(text) > LARGEST_HOSTFILE:
            raise NodeListError(f"{hostfile}: larger than 10 MB; name a file that lists nodes")
        nodes = parse_hostfile(text, hostfile)
    return nodes if unwanted is None else exclude(nodes, unwanted)


def expand(hostlist: str) -> list[str]:
    """The names that a host list of SLURM stands for, in its order, twice where it has one twice.

    Raises NodeListError for what is malformed, with the place of the fault.
    """
    names: list[str] = []
    for start, end in _items(hostlist):
        names += _names(hostlist, start, end)
        _refuse_too_many(len(names), hostlist, start)
    return names


def tasks_per_node(counts: str) -> list[int]:
    """The tasks on each node of SLURM_TASKS_PER_NODE or SLURM_STEP_TASKS_PER_NODE: 2(x3),1 is 2, 2, 2, 1."""
    tasks: list[int] = []
    start = 0
    for count in counts.split(","):
        match = _TASKS.fullmatch(count)
        if not match:
            raise NodeListError(f"{count!r} is no number of tasks: write it as in 2(x3),1", counts, start)
        times = int(match[2] or 1)
        _refuse_too_many(len(tasks) + times, counts, start)
        tasks += [int(match[1])] * times
        start += len(count) + 1
    return tasks


# --- from text to names ------------------------------------------------------------------------------


def _mentions(words: Iterable[str]) -> Iterator[tuple[str, list[Node]]]:
    """For each item of the words: where it stands, and the nodes it names."""
    for number, word in enumerate(words, start=1):
        for start, end in _items(word):
            yield f"word {number} ({_excerpt(word[start:end])})", _nodes(word, start, end)


def _hostfile_mentions(text: str, name: str) -> Iterator[tuple[str, list[Node]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        place = f"{name}, line {number}"
        try:
            nodes = _hostfile_line(words) if words else []
        except NodeListError as error:
            error.place = place
            raise
        yield place, nodes


def _hostfile_line(words: list[str]) -> list[Node]:
    """The nodes of one line: `NODE` or `NODE slots=N`."""
    nodes = [node for start, end in _items(words[0]) for node in _nodes(words[0], start, end)]
    if len(words) == 1:
        return nodes
    if len(words) > 2 or not words[1].startswith("slots="):
        raise NodeListError("this line is not understood: write it as in node1 slots=4", " ".join(words))
    if any(node.slots for node in nodes):
        raise NodeListError("the number of processes is given twice: leave one out", " ".join(words))
    slots = _slots(words[1], len("slots="), len(words[1]))
    return [Node(node.name, node.user, slots) for node in nodes]


def _each_once(mentions: Iterable[tuple[str, list[Node]]], source: str = "") -> list[Node]:
    """All nodes mentioned, in order; a node mentioned twice is an error that names both places."""
    places: dict[str, str] = {}
    found: list[Node] = []
    for place, nodes in mentions:
        for node in nodes:
            if node.name in places:
                both = f"in {places[node.name]} and in {place}"
                raise NodeListError(f"{node.name} is named twice, {both}: leave one out")
            places[node.name] = place
        found += nodes
        _refuse_too_many(len(found))
    if not found:
        raise NodeListError("no node is named: give at least one, as in node1 or node[1-8]", place=source)
    return found


def _items(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each item of a list: what stands between two commas outside brackets."""
    start = 0
    while True:
        end = _end_of_item(text, start)
        if start == end:
            raise NodeListError("a name is missing: write it as in node1,node2 or node[1-8]", text, start)
        yield start, end
        if end == len(text):
            return
        start = end + 1


def _end_of_item(text: str, start: int) -> int:
    match = _ITEM.match(text, start)
    assert match is not None  # it matches the empty text
    end = match.end()
    if text[end : end + 1] == "]":
        raise NodeListError("this ']' closes nothing: remove it, or write the '[' before the numbers", text, end)
    if text[end : end + 1] == "[":
        raise _unclosed(text, end)
    return end


def _unclosed(text: str, opening: int) -> NodeListError:
    inner = re.compile(r"[][]").search(text, opening + 1)
    if inner:
        return NodeListError("a bracket inside a bracket: write the ranges as in node[1-8,10]", text, inner.start())
    return NodeListError("this '[' is never closed: write it as in node[1-8]", text, opening)


def _nodes(text: str, start: int, end: int) -> list[Node]:
    """The nodes of one item, `user@names:slots` with user and slots optional."""
    colon = text.find(":", start, end)
    if text.count(":", start, end) > 1:
        raise NodeListError(
            "an IPv6 address cannot stand here: give the host a name in ~/.ssh/config or /etc/hosts, "
            "and write that name",
            text,
            colon,
        )
    user, slots = None, None
    at = text.find("@", start, end)
    if at >= 0:
        user, start = _user(text, start, at), at + 1
    if colon > text.rfind("]", start, end):
        slots, end = _slots(text, colon + 1, end), colon
    return [Node(name, user, slots) for name in _names(text, start, end)]


def _user(text: str, start: int, end: int) -> str:
    if not _USER.fullmatch(text, start, end):
        raise NodeListError(f"{text[start:end]!r} is no user name: write it as in user@node1", text, start)
    return text[start:end]


def _slots(text: str, start: int, end: int) -> int:
    number = text[start:end]
    if not re.fullmatch("[1-9][0-9]{0,3}", number) or int(number) > MAX_SLOTS:
        raise NodeListError(
            f"{number!r} is no number of processes: write 1 to {MAX_SLOTS}, as in node1:4 "
            "(an ssh port belongs in ~/.ssh/config)",
            text,
            start,
        )
    return int(number)


def _names(text: str, start: int, end: int) -> list[str]:
    """The names of text[start:end], such as rack[1-2]-n[08-10].

    Of several brackets the last changes fastest, then the first, then the second: scontrol's order.
    """
    _refuse_bad_start(text, start, end)
    texts: list[str] = []
    numbers: list[list[str]] = []
    at = start
    for bracket in _BRACKET.finditer(text, start, end):
        texts.append(_plain(text, at, bracket.start()))
        numbers.append(_numbers(text, *bracket.span(1)))
        at = bracket.end()
    texts.append(_plain(text, at, end))
    _refuse_too_long(sum(map(len, texts)) + sum(max(map(len, many)) for many in numbers), text, start)
    _refuse_too_many(math.prod(map(len, numbers)), text, start)
    return _product("%s".join(texts), numbers)  # a host name has no % of its own


def _product(template: str, numbers: list[list[str]]) -> list[str]:
    """The template filled with every choice of one number a bracket, in scontrol's order."""
    if not numbers:
        return [template]
    *others, last = numbers
    return [template % (*row[-2::-1], row[-1]) for row in itertools.product(*others[::-1], last)]


def _refuse_bad_start(text: str, start: int, end: int) -> None:
    if start == end or text[start] in "-.":
        raise NodeListError("a host name begins with a letter or a digit: write it as in node1", text, start)


def _plain(text: str, start: int, end: int) -> str:
    """text[start:end], which may only hold what a host name holds."""
    wrong = _NOT_IN_A_NAME.search(text, start, end)
    if wrong:
        raise NodeListError(f"{wrong[0]!r} cannot stand in a host name: write it as in node1", text, wrong.start())
    return text[start:end]


def _numbers(text: str, start: int, end: int) -> list[str]:
    """The numbers of a bracket's content, each with the leading zeros of its range's lower end."""
    numbers: list[str] = []
    for piece in text[start:end].split(","):
        low, high = _range(text, start, piece)
        _refuse_too_many(len(numbers) + int(high) - int(low) + 1, text, start)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        start += len(piece) + 1
    return numbers


def _range(text: str, start: int, piece: str) -> tuple[str, str]:
    """Both ends of `8` or `08-10`, piece of text at start."""
    match = _RANGE.fullmatch(piece)
    if not match:
        raise NodeListError(f"{piece!r} is no range of numbers: write it as in node[1-8,10]", text, start)
    low, high = match[1], match[2] or match[1]
    _refuse_too_long(max(len(low), len(high)), text, start)
    if int(low) > int(high):
        raise NodeListError(f"the range {piece} runs backwards: write {high}-{low}", text, start)
    return low, high


def _excerpt(text: str, at: int = 0) -> str:
    """The text in quotation marks; of a long one, what stands around at."""
    start = max(0, at - SHOWN // 2)
    return repr(text if len(text) <= SHOWN else f"...{text[start : start + SHOWN]}...")


def _refuse_too_many(count: int, text: str | None = None, at: int | None = None) -> None:
    if count > MAX_NODES:
        raise NodeListError(f"more than {MAX_NODES:,} names: write a smaller range", text, at)


def _refuse_too_long(length: int, text: str, at: int) -> None:
    if length > MAX_NAME:
        raise NodeListError(f"a host name has at most {MAX_NAME} characters: shorten it", text, at)


# --- from names to text ------------------------------------------------------------------------------


def fold(nodes: Iterable[Node | str]) -> str:
    """The shortest readable list of these nodes or names, in their order: node[1-3],login,node[7,9].

    parse reads it back, and expand where it holds names alone. scontrol reads it too as long as no
    text follows a bracket. At most two brackets a name, as in rack[1-2]-n[08-10]: three are a riddle.
    """
    named = (Node(node) if isinstance(node, str) else node for node in nodes)
    groups = itertools.groupby(named, key=lambda node: (node.user, node.slots))
    return ",".join(
        str(Node(pattern, user, slots))
        for (user, slots), group in groups
        for pattern in _folded([node.name for node in group])
    )


def _folded(names: list[str]) -> list[str]:
    """The names in as few patterns as two looks at neighbours find."""
    pieces = [_pieces(name) for name in names]
    return ["".join(pattern) for pattern in _merged(_merged(pieces))]


def _pieces(name: str) -> list[str]:
    """A name cut into text and digits in turn, text first and last: n08 is n, 08 and the empty text."""
    _refuse_bad_start(name, 0, len(name))
    return _DIGITS.split(_plain(name, 0, len(name)))


def _merged(patterns: list[list[str]]) -> list[list[str]]:
    """Patterns with neighbours made one where they differ in a single number."""
    merged: list[list[str]] = []
    run: list[list[str]] = []
    field: int | None = None  # where the patterns of the run differ
    for pattern in patterns:
        difference = _difference(run[-1], pattern) if run else None
        if difference is None or field not in (None, difference):
            merged += _one(run, field)
            run, field = [pattern], None
        else:
            run.append(pattern)
            field = difference
    return merged + _one(run, field)


def _difference(one: list[str], other: list[str]) -> int | None:
    """The field of the only number in which two patterns differ, if no bracket stands before it."""
    fields = [field for field, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    if len(one) != len(other) or len(fields) != 1:
        return None
    field = fields[0]
    is_number = field % 2 == 1
    bracket_before = "[" in "".join([*one[: field + 1], other[field]])
    return field if is_number and not bracket_before else None


def _one(run: list[list[str]], field: int | None) -> list[list[str]]:
    """The run as one pattern, its numbers in a bracket; a run of one stays as it is."""
    if field is None:
        return run
    bracket = f"[{_ranges([pattern[field] for pattern in run])}]"
    return [[*run[0][:field], bracket, *run[0][field + 1 :]]]


def _ranges(numbers: list[str]) -> str:
    """Numbers in their order as ranges: 8, 9, 10, 3 is 8-10,3."""
    ranges: list[tuple[str, str]] = []
    for number in numbers:
        low, high = ranges[-1] if ranges else ("", "")
        if ranges and number == str(int(high) + 1).zfill(len(low)):
            ranges[-1] = (low, number)
        else:
            ranges.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)


# --- the command -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Print the nodes that the words or the hostfile name, one a line; 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m distributed.nodelist",
        description="Print the nodes that the words name, one a line, as user@name:processes.",
        epilog="example: python -m distributed.nodelist 'node[1-3],user@node7:4' --exclude node2",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="such as node1, user@node1, node[1-8,10]:4")
    parser.add_argument("--hostfile", metavar="FILE", help="lines such as `node1 slots=4` instead of words")
    parser.add_argument("--exclude", metavar="NODES", help="names to leave out, such as node[3,5]")
    parser.add_argument("--fold", action="store_true", help="print one line, as short as it can be")
    options = parser.parse_intermixed_args(argv)
    try:
        nodes = requested(options.words, options.hostfile, options.exclude)
        print(fold(nodes) if options.fold else "\n".join(map(str, nodes)))
        return 0
    except NodeListError as error:
        print(f"nodelist: {error}", file=sys.stderr)
    except OSError as error:
        print(f"nodelist: {error.filename}: {error.strerror}: name a hostfile to read", file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head -1` is no fault
    sys.exit(main())
