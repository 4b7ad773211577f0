"""Tests of node lists.

With wrong names, a launch would start on the wrong machines. Muster numbers the nodes of a job in the order of the
names, and SLURM numbers them too: if the two orders differed, two nodes could get the same node rank. Thousands of
lists are therefore compared with scontrol. The error of an invalid list names the invalid item.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.nodelist import (
    Node,
    NodeListError,
    compact,
    exclude,
    expand,
    parse,
    parse_hostfile,
    requested,
    tasks_per_node,
)

# --- SLURM's lists -------------------------------------------------------------------------------------

SLURM_LISTS = {
    "n1": ["n1"],
    "a,b7": ["a", "b7"],
    "a[3,1-2]": ["a3", "a1", "a2"],
    "n[08-10,12]": ["n08", "n09", "n10", "n12"],
    "n[000-002]": ["n000", "n001", "n002"],
    "n[8-010]": ["n8", "n9", "n10"],
    "n[08-9]": ["n08", "n09"],
    "n[99-101]": ["n99", "n100", "n101"],
    "n[1,1]": ["n1", "n1"],
    "[1-3]": ["1", "2", "3"],
    "10.0.0.[1-2]": ["10.0.0.1", "10.0.0.2"],
    "rack[1-2]-n[08-10],x7": [f"rack{rack}-n{node}" for rack in "12" for node in ("08", "09", "10")] + ["x7"],
    "a[1-2]b[1-2]c[1-2]": [f"a{a}b{b}c{c}" for b in "12" for a in "12" for c in "12"],
}


class Scontrol:
    """The real scontrol: one process expands many lists. It needs no cluster, only a configuration."""

    def __init__(self, directory: Path) -> None:
        self._conf = directory / "slurm.conf"
        self._conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\n")

    def hostnames(self, lists: Iterable[str]) -> list[list[str]]:
        """Output of `scontrol show hostnames` for each list; an invalid list gives no names."""
        commands = "".join(f"show hostnames {text}\nshow hostnames next-list\n" for text in lists)
        result = subprocess.run(
            ["scontrol"],
            input=commands,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "SLURM_CONF": str(self._conf), "TERM": "dumb", "COLUMNS": "100000"},
        )
        lines = (line for line in result.stdout.splitlines() if not line.startswith("scontrol:"))
        names = "\n".join(line for line in lines if not line.startswith("Invalid hostlist"))
        return [part.split() for part in names.split("next-list")[:-1]]


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Scontrol:
    return Scontrol(tmp_path_factory.mktemp("scontrol"))


@pytest.mark.parametrize(("hostlist", "names"), SLURM_LISTS.items())
def test_a_slurm_list_expands_in_order(hostlist: str, names: list[str]) -> None:
    assert expand(hostlist) == names


def test_scontrol_expands_the_table_in_the_same_way(scontrol: Scontrol) -> None:
    assert scontrol.hostnames(SLURM_LISTS) == list(SLURM_LISTS.values())


def random_range(generator: random.Random) -> str:
    low = generator.choice([0, 1, 7, 9, 95, 998])
    high = low + generator.choice([0, 1, 3, 12])
    width = generator.randrange(5)
    padded = f"{low:0{width}d}"
    return padded if high == low else f"{padded}-{high:0{generator.choice([0, len(padded)])}d}"


def random_item(generator: random.Random) -> str:
    """A name with up to four brackets, without text after the last bracket."""
    stems = ["n", "rack", "gpu-", "a.b", "x_", "7", "-", "0"]
    brackets = generator.choices([0, 1, 2, 3, 4], weights=[3, 6, 3, 2, 1])[0]
    item = generator.choice(stems[:4])
    for position in range(brackets):
        inner = ",".join(random_range(generator) for _ in range(generator.randint(1, 3)))
        item += ("" if position == 0 else generator.choice([*stems, ""])) + f"[{inner}]"
    return item


def test_random_lists_expand_as_by_scontrol(scontrol: Scontrol) -> None:
    generator = random.Random(2)
    lists = [",".join(random_item(generator) for _ in range(generator.randint(1, 3))) for _ in range(3000)]
    lists = [text for text in lists if len(expand(text)) <= 300]
    assert len(lists) > 2000
    for text, names in zip(lists, scontrol.hostnames(lists), strict=True):
        assert expand(text) == names, text


def test_accepted_random_strings_expand_as_by_scontrol(scontrol: Scontrol) -> None:
    generator = random.Random(3)
    strings = ["".join(generator.choices("n12[]-,0", k=generator.randint(1, 9))) for _ in range(20_000)]
    accepted = [text for text in strings if not is_refused(text) and not re.search(r"\][^,\[]", text)]
    assert len(accepted) > 1000
    for text, names in zip(accepted, scontrol.hostnames(accepted), strict=True):
        assert expand(text) == names, text


def is_refused(hostlist: str) -> bool:
    try:
        expand(hostlist)
    except NodeListError:
        return True
    return False


@pytest.mark.parametrize(
    ("counts", "tasks"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("8(x2)", [8, 8]), ("3,1(x2),3", [3, 1, 1, 3])],
)
def test_slurms_tasks_per_node_are_expanded(counts: str, tasks: list[int]) -> None:
    assert tasks_per_node(counts) == tasks


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        *((counts, "'' is not a number of tasks") for counts in ("", "2(x3),", ",2")),
        ("2(x3", "'2(x3' is not a number of tasks"),
        ("2,x", "'x' is not a number of tasks"),
        ("-1", "'-1' is not a number of tasks"),
        ("1(x9999999)", "more than 250,000 names"),
        ("1(x" + "9" * 5000, "...' is not a number of tasks"),
    ],
)
def test_invalid_tasks_per_node_are_refused(counts: str, message: str) -> None:
    with pytest.raises(NodeListError, match=re.escape(message)):
        tasks_per_node(counts)


# --- node arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "nodes"),
    [
        ("node1", [Node("node1")]),
        ("user@node1", [Node("node1", user="user")]),
        ("node1:4", [Node("node1", slots=4)]),
        ("u.x@n[1-2]:8", [Node("n1", "u.x", 8), Node("n2", "u.x", 8)]),
        ("node[1-2,10]", [Node("node1"), Node("node2"), Node("node10")]),
        ("gpu[1-2].lab.lan", [Node("gpu1.lab.lan"), Node("gpu2.lab.lan")]),
        ("10.0.0.7:2", [Node("10.0.0.7", slots=2)]),
        ("b,u@a:2", [Node("b"), Node("a", "u", 2)]),
        (["node9", "node[1-2]", "a"], [Node("node9"), Node("node1"), Node("node2"), Node("a")]),
    ],
)
def test_nodes_are_parsed_in_the_order_of_the_arguments(arguments: str | list[str], nodes: list[Node]) -> None:
    assert parse(arguments) == nodes


@pytest.mark.parametrize("argument", ["node1", "user@node1", "node1:4", "user@node1:4"])
def test_str_of_a_node_is_its_argument(argument: str) -> None:
    assert [str(node) for node in parse(argument)] == [argument]


MALFORMED = [  # list, invalid item, part of the message
    ("", "", "a name is missing"),
    (",a", ",a", "a name is missing"),
    ("a,,b", "a,,b", "a name is missing"),
    ("a,", "a,", "a name is missing"),
    *(
        (f"a,{item}", item, "its brackets do not match")
        for item in ("node[1-", "node]", "node[1-2]]", "node[1-[2-3]]", "node[[1]", "[")
    ),
    ("a,node[1-3],b[2", "b[2", "its brackets do not match"),
    ("node[3-1]", "node[3-1]", "write 1-3"),
    ("a,node[1,10-09]", "node[1,10-09]", "runs backwards"),
    ("node[a-b]", "node[a-b]", "'a-b' is not a range"),
    ("node[]", "node[]", "'' is not a range"),
    ("node[1,,2]", "node[1,,2]", "'' is not a range"),
    ("node[1-]", "node[1-]", "'1-' is not a range"),
    ("node[1-2-3]", "node[1-2-3]", "'1-2-3' is not a range"),
    ("node[1, 2]", "node[1, 2]", "' 2' is not a range"),
    ("node[1:3]", "node[1:3]", "'1:3' is not a range"),
    ("node[²]", "node[²]", "'²' is not a range"),
    ("node[1-99999999999]", "node[1-99999999999]", "more than 250,000 names"),
    ("node[1-200000,1-200000]", "node[1-200000,1-200000]", "more than 250,000 names"),
    ("n[1-1000]x[1-1000]", "n[1-1000]x[1-1000]", "more than 250,000 names"),
    ("n[1-" + "9" * 19 + "]", "n[1-" + "9" * 19 + "]", "is not a range"),
    ("n" * 250 + "!", "n" * 80 + "...", "'!' is not allowed"),
    ("a b", "a b", "' ' is not allowed"),
    ("a\nb", "a\nb", "'\\n' is not allowed"),
    ("nod\u00e9", "nod\u00e9", "is not allowed"),
    ("n%s", "n%s", "is not allowed"),
    ("n;reboot", "n;reboot", "is not allowed"),
    ("n{1-2}", "n{1-2}", "is not allowed"),
    ("../n", "../n", "begins with a letter"),
    ("-oProxyCommand=x", "-oProxyCommand=x", "begins with a letter"),
    ("-n", "-n", "begins with a letter"),
    ("user@", "user@", "begins with a letter"),
    ("@node1", "@node1", "'' is not a user name"),
    ("-l@node1", "-l@node1", "'-l' is not a user name"),
    ("user[1-2]@node1", "user[1-2]@node1", "is not a user name"),
    ("a@b@c", "a@b@c", "'@' is not allowed"),
    ("node1:", "node1:", "'' is not a number of processes"),
    ("node1:0", "node1:0", "'0' is not a number of processes"),
    ("node1:four", "node1:four", "'four' is not a number of processes"),
    ("node1:2222", "node1:2222", "an ssh port belongs in ~/.ssh/config"),
    ("[fe80::1]", "[fe80::1]", "IPv6"),
    ("user@fe80::1", "user@fe80::1", "IPv6"),
]


@pytest.mark.parametrize(("text", "item", "message"), MALFORMED)
def test_the_error_of_a_malformed_item_names_it(text: str, item: str, message: str) -> None:
    with pytest.raises(NodeListError, match=re.escape(message)) as error:
        parse(["good", text])
    assert str(error.value).startswith(f"{item!r}: ")


def test_a_message_about_a_long_list_is_one_short_line() -> None:
    long = ",".join(f"n{number}" for number in range(10_000))
    for text, item in ((f"{long},here[\n,{long}", "here[\\n"), (f"{long},,{long}", "n0,n1,n2")):
        with pytest.raises(NodeListError) as error:
            parse(text)
        message = str(error.value)
        assert message.startswith(f"'{item}")
        assert len(message) < 250
        assert len(message.splitlines()) == 1


def test_a_slurm_list_has_neither_users_nor_slots() -> None:
    for item in ("user@node1", "node1:4"):
        with pytest.raises(NodeListError, match="is not allowed in a host name"):
            expand(item)


def test_an_empty_list_of_arguments_is_refused() -> None:
    with pytest.raises(NodeListError, match="no node is named"):
        parse([])


@pytest.mark.parametrize(
    ("arguments", "items"),
    [
        (["a", "b", "a"], ("'a'", "'a'")),
        (["node[1-3],x", "u@node2:4"], ("'node[1-3]'", "'u@node2:4'")),
        (["n[1,1]"], ("'n[1,1]'", "'n[1,1]'")),
    ],
)
def test_the_error_of_a_repeated_node_names_both_items(arguments: list[str], items: tuple[str, str]) -> None:
    with pytest.raises(NodeListError, match="is named twice") as error:
        parse(arguments)
    assert f"in {items[0]} and in {items[1]}" in str(error.value)


def test_a_list_of_100_000_names_is_expanded_completely() -> None:
    assert expand("n[1-100000]") == [f"n{number}" for number in range(1, 100_001)]
    assert expand("n[1-1000]x[1-100]") == [f"n{n}x{x}" for n in range(1, 1001) for x in range(1, 101)]


def test_the_limit_of_names_applies_to_all_items_together() -> None:
    items = [f"n{number}x[1-100000]" for number in range(3)]
    for call in (lambda: parse(items), lambda: expand(",".join(items))):
        with pytest.raises(NodeListError, match="more than 250,000 names"):
            call()


# --- a hostfile ----------------------------------------------------------------------------------------

HOSTFILE = """\
# the machines of the third floor
node1 slots=4
node[2-3]   slots=2  # two GPUs each

user@node4
node5:8\r
"""


def test_a_hostfile_in_deepspeeds_format_is_parsed() -> None:
    assert parse_hostfile(HOSTFILE) == [
        Node("node1", slots=4),
        Node("node2", slots=2),
        Node("node3", slots=2),
        Node("node4", user="user"),
        Node("node5", slots=8),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb slots=x\n", "hosts, line 2: 'x' is not a number of processes"),
        ("a slots=0", "hosts, line 1: '0' is not a number"),
        (
            "a max_slots=2",
            "hosts, line 1: 'a max_slots=2': this line is not understood: write it as in node1 slots=4",
        ),
        ("a slots=1 b", "hosts, line 1: 'a slots=1 b': this line is not understood"),
        ("a b", "hosts, line 1: 'a b': this line is not understood"),
        ("a:2 slots=2", "hosts, line 1: 'a:2 slots=2': the number of processes is given twice"),
        ("\n\na[1-", "hosts, line 3: 'a[1-': its brackets do not match"),
        ("a[1-2] slots=2\nb\na2", "a2 is named twice, in hosts, line 1 and in hosts, line 3"),
        ("# nobody\n", "hosts: no node is named"),
        ("", "hosts: no node is named"),
    ],
)
def test_the_error_of_a_hostfile_names_the_line(text: str, message: str) -> None:
    with pytest.raises(NodeListError) as error:
        parse_hostfile(text, "hosts")
    assert str(error.value).startswith(message)


# --- excluding nodes -----------------------------------------------------------------------------------


def test_exclude_removes_nodes_and_keeps_the_order() -> None:
    nodes = parse(["u@n3:2", "n[1-2]", "n4"])
    assert exclude(nodes, "n[1,4]") == [Node("n3", "u", 2), Node("n2")]


@pytest.mark.parametrize(
    ("hostlist", "message"),
    [
        ("n9", "n9 cannot be excluded: it is not one of n[1-3]"),
        ("n[1-3]", "no node remains without 'n[1-3]'"),
        ("n[1", "its brackets do not match"),
    ],
)
def test_an_exclusion_of_unknown_or_all_nodes_is_refused(hostlist: str, message: str) -> None:
    with pytest.raises(NodeListError, match=re.escape(message)):
        exclude(parse("n[1-3]"), hostlist)


# --- compact lists -------------------------------------------------------------------------------------

COMPACT = [
    ([], ""),
    (["a"], "a"),
    (["n1", "n2"], "n[1-2]"),
    (["n3", "n1", "n2"], "n[3,1-2]"),
    (["n3", "n2", "n1"], "n[3,2,1]"),
    (["n08", "n09", "n10", "n12"], "n[08-10,12]"),
    (["n08", "n9", "n10"], "n[08,9-10]"),
    (["n9", "n10", "m", "n11"], "n[9-10],m,n11"),
    (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    (["gpu1.lan", "gpu2.lan"], "gpu[1-2].lan"),
    (["r1-n08", "r1-n09", "r2-n08", "r2-n09"], "r1-n[08-09],r2-n[08-09]"),
    (["n1-r1", "n2-r1"], "n1-r1,n2-r1"),
    (["r1-n1", "r1-n2", "r2-n2"], "r1-n[1-2],r2-n2"),
    (["x", "x", "n1", "n1"], "x,x,n[1,1]"),
    (
        [Node("n1", "u", 4), Node("n2", "u", 4), Node("n3", "u"), Node("n4", "u"), "n5"],
        "u@n[1-2]:4,u@n[3-4],n5",
    ),
]


@pytest.mark.parametrize(("nodes", "text"), COMPACT)
def test_consecutive_names_become_a_range(nodes: list[Node | str], text: str) -> None:
    assert compact(nodes) == text


# Few stems and few numbers, so that names are often consecutive.
stems = st.sampled_from(["n", "rack", "-", ".lan", "x_"])
numbers = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["08", "09", "010", "000", "1" * 18, "2" * 19]))
random_names = st.lists(st.one_of(stems, numbers), max_size=5).map(lambda parts: "n" + "".join(parts))
grid_names = st.tuples(*[st.integers(1, 3)] * 3).map("r{0[0]}-n{0[1]}.{0[2]}".format)
names = st.one_of(random_names, grid_names)


@given(st.lists(names, min_size=1, max_size=30))
def test_compact_names_expand_to_the_same_names(names: list[str]) -> None:
    assert expand(compact(names)) == names
    assert len(compact(names).split(",")) <= len(names)


@given(st.integers(0, 20), st.integers(1, 20), st.sampled_from(["n", "r1-"]))
def test_consecutive_numbers_become_one_range(low: int, length: int, stem: str) -> None:
    high = low + length
    names = [f"{stem}{number:03d}" for number in range(low, high + 1)]
    assert compact(names) == f"{stem}[{low:03d}-{high:03d}]"


@given(st.lists(st.builds(Node, names, st.sampled_from([None, "u"]), st.sampled_from([None, 2])), min_size=1))
def test_compact_nodes_are_parsed_to_the_same_nodes(nodes: list[Node]) -> None:
    nodes = list({node.name: node for node in nodes}.values())
    assert parse(compact(nodes)) == nodes


def test_scontrol_expands_compact_names(scontrol: Scontrol) -> None:
    generator = random.Random(4)
    stems = ["n", "gpu0", "rack1-n", "rack2-n"]
    lists = [
        [f"{stem}{number:0{generator.choice([1, 3])}d}" for stem in generator.sample(stems, 3) for number in range(8)]
        for _ in range(500)
    ]
    assert scontrol.hostnames(compact(names) for names in lists) == lists


# --- nodes of a launcher -------------------------------------------------------------------------------


def test_comments_of_a_hostfile_need_not_be_utf_8(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_bytes("\ufeffn1 slots=2 # ".encode() + b"caf\xe9\nn2\n")
    assert requested([], str(hosts), None) == [Node("n1", slots=2), Node("n2")]
    assert requested([], str(hosts), "n1") == [Node("n2")]


@pytest.mark.parametrize(
    ("arguments", "hostfile", "message"),
    [
        ([], None, "no node is named: give at least one, as in node1 or node[1-8]"),
        ([], "/dev/zero", "/dev/zero: larger than 10 MB; name a file that lists nodes"),
        (["a"], "/no", "nodes are given both as arguments and by --hostfile; use one of them"),
    ],
)
def test_missing_nodes_a_huge_hostfile_and_two_sources_of_nodes_are_each_refused(
    arguments: list[str], hostfile: str | None, message: str
) -> None:
    with pytest.raises(NodeListError) as error:
        requested(arguments, hostfile, None)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "node[1-999999999]", "[" * 300_000, "[a" * 300_000, "a" + "[1-250000]" * 2000, "x" * 200_000 + "[1-250000]",
        "a" + "[1]" * 200_000, "1a" * 60_000, "," * 300_000, "x" * 300_000 + "$", "a:" + "9" * 300_000,
        "n[" + "1," * 300_000 + "1]", "a,\x1b[31m" + "x" * 300_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [parse, expand, lambda text: parse_hostfile(f"{text} slots=4")])
@pytest.mark.timeout(10)
def test_a_list_of_any_size_is_refused_at_once_with_a_short_message(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(NodeListError) as refused:
        read(text)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()
