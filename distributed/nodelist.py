"""Node lists: the syntax of all launchers, hostfiles, and SLURM's lists.

    node1   user@node1   node1:4   node[1-8,10]   rack[1-2]-n[08-10]   node[1-3].lan:8

`:4` is the node's number of processes. The order of the list is the order of node ranks. Brackets expand as with
`scontrol show hostnames`, which need not be installed, with two differences: text may follow the last bracket, and
malformed brackets (`node[1-`) are refused.

IPv6 addresses are refused, as `:` precedes the number of processes: such a host needs a name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

MAX_NODES = 250_000  # names in one list: a typing error must not fill the memory
MAX_SLOTS = 1024  # processes on one node: a larger number is probably an ssh port
LARGEST_HOSTFILE = 10**7  # characters: enough for MAX_NODES lines
LONGEST_NAME = 255  # characters of a name, without its numbers in brackets
MAX_BRACKETS = 10  # in a name
SHOWN = 80  # characters of a long item in a message

# A comma inside brackets does not end it. An open bracket without its end takes the rest: no character is read twice.
_ITEM = re.compile(r"(?:\[[^]]*(?:\]|\Z)|[^,])+")
_BRACKET = re.compile(r"\[([^][]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_TASKS = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")
_LAST = re.compile(r"(?<![0-9])[0-9]{1,18}(?=[^0-9]*$)")  # the last number of a name, if it is not too long for _RANGE

T = TypeVar("T")


class NodeListError(ValueError):
    """A node list is invalid; the message names the item and the remedy."""


@dataclass(frozen=True)
class Node:
    """One node, as given to a launcher."""

    name: str
    user: str | None = None  # login name; None: ssh's configuration decides
    slots: int | None = None  # number of processes; None: the launcher's options decide
    spare: bool = False  # replaces a lost node

    @property
    def address(self) -> str:
        """The destination for ssh: [user@]name."""
        return self.name if self.user is None else f"{self.user}@{self.name}"

    def __str__(self) -> str:
        return self.address if self.slots is None else f"{self.address}:{self.slots}"


def parse(lists: str | Iterable[str]) -> list[Node]:
    """Return the nodes of one or more lists, in their order.

    Raises NodeListError if an item is malformed, if a node is listed twice, and if there is no node.
    """
    lists = [lists] if isinstance(lists, str) else lists
    return _each_once((repr(item), nodes) for text in lists for item, nodes in _each_item(text, _nodes))


def parse_hostfile(text: str, name: str = "hostfile") -> list[Node]:
    """Return the nodes of a hostfile in DeepSpeed's format: lines such as `node1 slots=4`, with # comments.

    A line that ends in `spare` names spare nodes.

    name: the file's name, for messages. Raises NodeListError like parse(); the message names the file and the line.
    """

    def lines() -> Iterator[tuple[str, list[Node]]]:
        for number, line in enumerate(text.splitlines(), start=1):
            if fields := line.partition("#")[0].split():
                try:
                    yield f"{name}, line {number}", _hostfile_line(fields)
                except NodeListError as error:
                    raise NodeListError(f"{name}, line {number}: {error}") from None

    return _each_once(lines(), f"{name}: ")


def exclude(nodes: Iterable[Node], hostlist: str) -> list[Node]:
    """Return the nodes except those that hostlist names.

    Raises NodeListError when hostlist names a node that is not in `nodes`, and when no node remains.
    """
    nodes = list(nodes)
    names = {node.name for node in nodes}
    unwanted = dict.fromkeys(expand(hostlist))
    if unknown := [name for name in unwanted if name not in names]:
        raise NodeListError(f"{unknown[0]} cannot be excluded: it is not one of {compact(nodes)}; check the name")
    remaining = [node for node in nodes if node.name not in unwanted]
    if not remaining:
        raise NodeListError(f"no node remains without {_shortened(hostlist)}; exclude fewer nodes")
    return remaining


def requested(lists: list[str], hostfile: str | None, excluded: str | None, spares: str | None = None) -> list[Node]:
    """Return the nodes of the lists or of the hostfile, without the excluded nodes, followed by the spares.

    Raises NodeListError and OSError.
    """
    if hostfile is None:
        nodes = parse(lists)
    elif lists:
        raise NodeListError("nodes are given both as arguments and by --hostfile; use one of them")
    else:
        with open(hostfile, encoding="utf-8-sig", errors="replace") as file:  # a comment may contain any bytes
            text = file.read(LARGEST_HOSTFILE + 1)
        if len(text) > LARGEST_HOSTFILE:
            raise NodeListError(f"{hostfile}: larger than 10 MB; name a file that lists nodes")
        nodes = parse_hostfile(text, hostfile)
    nodes = nodes if excluded is None else exclude(nodes, excluded)
    for node in parse(spares) if spares else ():
        if any(node.name == one.name for one in nodes):
            raise NodeListError(f"--spares: {node.name} is already a node of this run; name it only once")
        nodes.append(replace(node, spare=True))
    if all(node.spare for node in nodes):
        raise NodeListError(f"all nodes of {hostfile} are spares; mark fewer")
    return nodes


def expand(hostlist: str) -> list[str]:
    """Expand a host list of SLURM to names, in its order; a name listed twice is returned twice."""
    found: list[str] = []
    for _, names in _each_item(hostlist, _names):
        found += names
        _refuse_too_many(len(found))
    return found


def tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks of each node. For example, 2(x3),1 gives [2, 2, 2, 1].

    counts: the value of SLURM_TASKS_PER_NODE or SLURM_STEP_TASKS_PER_NODE.
    """
    tasks: list[int] = []
    for count in counts.split(","):
        match = _TASKS.fullmatch(count)
        if not match:
            raise NodeListError(f"{_shortened(count)} is not a number of tasks: write it as in 2(x3),1")
        times = int(match[2] or 1)
        _refuse_too_many(len(tasks) + times)
        tasks += [int(match[1])] * times
    return tasks


# --- from text to names ------------------------------------------------------------------------------


def _each_item(text: str, read: Callable[[str], list[T]]) -> Iterator[tuple[str, list[T]]]:
    """Yield each item of a list and the values that `read` returns for it. Errors name the item."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise NodeListError(f"{_shortened(text)}: a name is missing: write it as in node1,node2 or node[1-8]")
    for item in items:
        try:
            yield item, read(item)
        except NodeListError as error:
            raise NodeListError(f"{_shortened(item)}: {error}") from None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _hostfile_line(fields: list[str]) -> list[Node]:
    """Return the nodes of one line: `NODE` or `NODE slots=N`, optionally followed by `spare`."""
    if spare := fields[-1] == "spare" and len(fields) > 1:
        fields = fields[:-1]
    nodes = [replace(node, spare=spare) for _, some in _each_item(fields[0], _nodes) for node in some]
    if len(fields) == 1:
        return nodes
    line = _shortened(" ".join(fields))
    if len(fields) > 2 or not fields[1].startswith("slots="):
        raise NodeListError(f"{line}: this line is not understood: write it as in node1 slots=4")
    if any(node.slots for node in nodes):
        raise NodeListError(f"{line}: the number of processes is given twice: leave one out")
    slots = _slots(fields[1].removeprefix("slots="))
    return [replace(node, slots=slots) for node in nodes]


def _each_once(mentions: Iterable[tuple[str, list[Node]]], source: str = "") -> list[Node]:
    """Return all nodes in order.

    Raises NodeListError if there is no node, and if a node is listed twice; the message then names both locations.
    """
    locations: dict[str, str] = {}
    found: list[Node] = []
    for location, nodes in mentions:
        for node in nodes:
            if node.name in locations:
                both = f"in {locations[node.name]} and in {location}"
                raise NodeListError(f"{node.name} is named twice, {both}: leave one out")
            locations[node.name] = location
        found += nodes
        _refuse_too_many(len(found))
    if not found:
        raise NodeListError(f"{source}no node is named: give at least one, as in node1 or node[1-8]")
    return found


def _nodes(item: str) -> list[Node]:
    """Return the nodes of one item: `user@names:slots`, where user and slots are optional."""
    if item.count(":") > 1:
        raise NodeListError(
            "an IPv6 address is not supported: give the host a name in ~/.ssh/config or /etc/hosts, and write that name"
        )
    user, slots, names = None, None, item
    if "@" in item:
        user, _, names = item.partition("@")
        if not _USER.fullmatch(user):
            raise NodeListError(f"{_shortened(user)} is not a user name: write it as in user@node1")
    if ":" in names.rpartition("]")[2]:
        names, _, number = names.partition(":")
        slots = _slots(number)
    return [Node(name, user, slots) for name in _names(names)]


def _slots(number: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,3}", number) or int(number) > MAX_SLOTS:
        raise NodeListError(
            f"{_shortened(number)} is not a number of processes: write 1 to {MAX_SLOTS}, as in node1:4 "
            "(an ssh port belongs in ~/.ssh/config)"
        )
    return int(number)


def _names(item: str) -> list[str]:
    """Return the names of an item such as rack[1-2]-n[08-10].

    The order is that of scontrol: the number in the last bracket changes fastest, then that in the first bracket, then
    that in the second, and so on.
    """
    if not item or item[0] in "-.":
        raise NodeListError("a host name begins with a letter or a digit: write it as in node1")
    parts = _BRACKET.split(item)  # text, content of a bracket, text, ..., text
    if wrong := _NOT_IN_A_NAME.search("".join(parts[::2])):
        problem = "its brackets do not match" if wrong[0] in "[]" else f"{wrong[0]!r} is not allowed in a host name"
        raise NodeListError(f"{problem}: write it as in node1 or node[1-8,10]")
    if sum(map(len, parts[::2])) > LONGEST_NAME or len(parts) // 2 > MAX_BRACKETS:
        raise NodeListError(f"more than {LONGEST_NAME} characters or {MAX_BRACKETS} brackets: write shorter names")
    numbers = [_numbers(content) for content in parts[1::2]]
    _refuse_too_many(math.prod(map(len, numbers)))
    if not numbers:
        return [item]
    *others, last = numbers
    template = "%s".join(parts[::2])  # a host name has no % of its own
    return [template % (*row[-2::-1], row[-1]) for row in itertools.product(*others[::-1], last)]


def _numbers(content: str) -> list[str]:
    """Return the numbers in a bracket, padded with zeros to the width of the lower end of their range."""
    numbers: list[str] = []
    for piece in content.split(","):
        match = _RANGE.fullmatch(piece)
        if not match:
            raise NodeListError(f"{_shortened(piece)} is not a range of numbers: write it as in node[1-8,10]")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise NodeListError(f"the range {piece} runs backwards: write {high}-{low}")
        _refuse_too_many(len(numbers) + int(high) - int(low) + 1)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _refuse_too_many(count: int) -> None:
    if count > MAX_NODES:
        raise NodeListError(f"more than {MAX_NODES:,} names: write a smaller range")


# --- from names to text ------------------------------------------------------------------------------


def compact(nodes: Iterable[Node | str]) -> str:
    """Return a compact list of nodes or names, in their order: node[1-3],login,node[7,9].

    Adjacent nodes that differ only in their last number share a bracket. parse() reads the list back.
    """
    named = [Node(node) if isinstance(node, str) else node for node in nodes]
    items: list[str] = []
    for pattern, group in itertools.groupby(named, key=lambda node: replace(node, name=_LAST.sub("[]", node.name))):
        alike = list(group)
        if len(alike) > 1 and "[]" in pattern.name:
            numbers = ranges(_LAST.findall(node.name)[0] for node in alike)
            items.append(str(pattern).replace("[]", f"[{numbers}]"))
        else:
            items += map(str, alike)
    return ",".join(items)


def ranges(numbers: Iterable[str]) -> str:
    """Write numbers as ranges, in their order: 8, 9, 10, 3 gives 8-10,3."""
    found: list[tuple[str, str]] = []
    for number in numbers:
        low, high = found[-1] if found else ("", "")
        if found and number == str(int(high) + 1).zfill(len(low)):
            found[-1] = (low, number)
        else:
            found.append((number, number))
    return ",".join(low if low == high else f"{low}-{high}" for low, high in found)
