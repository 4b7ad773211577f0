"""Nodes and ranks that lie: their reports, replies, logs and archives are checked, and speak for their senders only.

Local shell scripts replace ssh and the programs of the nodes; tests/across_nodes.bats uses real nodes.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed import trust
from distributed.exit_codes import UNFIT
from distributed.launch import lost_nodes, new_files
from distributed.launch.new_files import NewFiles
from distributed.launch.node_logs import NodeLogs, is_expected
from distributed.launch.node_reports import MAX_REPORT, REPORT, ReportParser, parse_report
from distributed.launch.watch import Local, Watch
from distributed.runs.lookup import RunNode
from distributed.runs.run_directory import create
from distributed.transport import commands
from distributed.transport.commands import Calls, LocalCommands
from distributed.transport.loop import Client
from distributed.verdict.failures import gather
from distributed.verdict.verdict import decide

KIT = Path(__file__).resolve().parents[2]
NewWatch = Callable[..., Watch]
NODES = [RunNode("n1", "", 2, 0), RunNode("n2", "", 2, 2)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The run directory of a run on n1 and n2."""
    return Path(
        create(
            str(tmp_path / "logs"), "train", nodes=NODES, script="train.py", config=None, cwd="/", python="python3",
            command=["x"], launcher=os.getpid(),
        )
    )  # fmt: skip


# ---------------------------------------------------------------- reports

INVALID = [
    b"{", b"[1]", b"5", b'"x"', b"null", b'{"a": 1}', b'{"node": 1}', b'{"node": "n1", "lost": ["x"]}',
    b'{"node": "n1", "exit_code": "0"}', b'{"node": "n1", "exit_code": 256}', b'{"node": "n1", "waiting": 1}',
    b'{"node": "n1", "step": 5}', b'{"node": "n1", "end": {"rank": 0}}', b'{"node": "n1", "tasks": -1}',
    b'{"node": "n1", "signal": 65}', b'{"node": "n1", "signal": 0}',
    b"[" * 200_000, b'{"node": ' * 5000, b"\xff", b'{"node": "n1", "exit_code": 1e999}',
]  # fmt: skip


@pytest.mark.parametrize("line", INVALID, ids=lambda line: line[:30].decode(errors="replace"))
def test_an_invalid_report_is_an_error_that_is_no_output(line: bytes) -> None:
    [found] = ReportParser().feed(REPORT + line + b"\n")
    assert isinstance(found, ValueError)
    assert str(found).isprintable() and len(str(found)) < 200


def test_a_report_without_a_line_break_is_bounded_and_its_time_is_linear() -> None:
    parser, errors = ReportParser(), 0
    started = time.monotonic()
    for block in (REPORT, *([b"x" * (1 << 16)] * 400)):  # 26 MB
        errors += sum(isinstance(item, ValueError) for item in parser.feed(block))
    assert errors == 1 and len(parser._partial) <= MAX_REPORT
    assert time.monotonic() - started < 5


def test_an_unfinished_report_does_not_contain_the_next_one() -> None:
    """With pdsh, which has one stream for all nodes, the next report may be that of another node."""
    own = REPORT + b'{"node": "n2", "exit_code": 3}\n'
    for split in range(len(own)):
        parser = ReportParser()
        found = [*parser.feed(REPORT + b'{"node": "n1", "unlogged": "' + own[:split]), *parser.feed(own[split:])]
        assert isinstance(found[0], ValueError) and found[1:] == [{"node": "n2", "exit_code": 3}]


def test_the_time_for_many_reports_in_one_block_is_linear() -> None:
    block = (REPORT + b"1\n") * 5000 + b"x" * (16 << 20)
    started = time.process_time()
    assert sum(1 for _ in ReportParser().feed(block)) == 5001
    assert time.process_time() - started < 5


class Scripts(Local):
    """Starts a shell script for each node, as if it were the supervisor over ssh."""

    reports = True

    def __init__(self, **scripts: str) -> None:
        super().__init__(LocalCommands())
        self.scripts = scripts

    def start(self, watch: Watch) -> None:
        for node, script in self.scripts.items():
            watch.start_client(node, ["sh", "-c", script], sent=b"")


class OneClient(Scripts):
    """Starts one script for all nodes, as pdsh does; each node has a token."""

    clients_are_nodes = False

    def start(self, watch: Watch) -> None:
        for name in ("n1", "n2"):
            watch.nodes[name].token = f"of {name}"
        watch.start_client("all", ["sh", "-c", self.scripts["all"]], sent=b"")


def says(json: str) -> str:
    return f"printf '\\036%s\\n' '{json}'"


WAITS = "read -r _; exit 143"
ENDS = ('{"node": "n1", "exit_code": 0}', '{"node": "n2", "exit_code": 0}')


def test_a_node_cannot_report_for_another_one(
    directory: Path, new_watch: NewWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forged = says('{"node": "n2", "exit_code": 0}')
    own = says('{"node": "n1", "exit_code": 3}')
    watch = new_watch(directory, Scripts(n1=f"{forged}; {own}; exit 3", n2=WAITS))
    assert watch.attempt() == 3
    assert "n1: invalid report, ignored (about 'n2')" in capfd.readouterr().err


def test_with_one_client_a_report_needs_the_token_of_its_node(
    directory: Path, new_watch: NewWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reports = [
        '{"node": "n2", "exit_code": 0}',
        '{"node": "n2", "exit_code": 0, "token": "of n1"}',
        '{"node": "n1", "exit_code": 0, "token": "of n1"}',
        '{"node": "n2", "exit_code": 4, "token": "of n2"}',
    ]
    watch = new_watch(directory, OneClient(all="; ".join(map(says, reports))))
    assert watch.attempt() == 4
    assert capfd.readouterr().err.count("invalid report, ignored (about 'n2')") == 2


@pytest.mark.parametrize(("reply", "lost"), [("touch asked", False), ("touch asked; exit 255", True)])
def test_a_node_that_replies_is_not_lost_because_another_one_reports_that(
    directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch, reply: str, lost: bool
) -> None:
    """n1 stops its ranks only after it was asked whether it is alive."""
    monkeypatch.chdir(directory)
    liar = says('{"node": "n2", "exit_code": 69, "waiting": true, "lost": "n1"}')
    own = says('{"node": "n1", "exit_code": 143, "waiting": true}')
    wait = "exec sleep 60" if lost else f"until [ -e asked ]; do sleep 0.02; done; sleep 0.2; {own}"
    watch = new_watch(directory, Scripts(n1=wait, n2=f"{liar}; read -r _"))
    watch.transport.commands = LyingCommands({"n1": reply})
    watch.max_restarts, watch.replaces = 1, True
    assert watch.attempt() == 69
    assert (directory / "asked").exists()
    assert watch.nodes.lost == ({"n1": "n2 received no heartbeat from it"} if lost else {})
    watch.end_agents()


def test_a_node_that_answers_over_its_control_channel_is_not_lost_although_its_login_shell_is_slow(
    directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 stops its ranks only after the time limit for its reply."""
    monkeypatch.setattr(lost_nodes, "REPLY_TIMEOUT", 0.5)
    liar = says('{"node": "n2", "exit_code": 69, "waiting": true, "lost": "n1"}')
    own = says('{"node": "n1", "exit_code": 143, "waiting": true}')
    answer = 'until [ "$line" = report ]; do read -r line || exit; done; ' + says('{"node": "n1"}')
    watch = new_watch(directory, Scripts(n1=f"{answer}; sleep 1; {own}; read -r _", n2=f"{liar}; read -r _"))
    watch.transport.commands = LyingCommands({"n1": "exec sleep 60"})
    watch.max_restarts, watch.replaces = 1, True
    assert watch.attempt() == 69
    assert not watch.nodes.lost and watch.nodes.waiting == {"n1", "n2"}
    watch.end_agents()


def test_a_spare_node_that_reports_an_exit_code_decides_nothing_and_delays_nothing(
    directory: Path, new_watch: NewWatch
) -> None:
    """n3 has no rank. Its client would not exit by itself, then with a code of its own."""
    liar = "; ".join(map(says, ('{"node": "n3", "waiting": true}', '{"node": "n3", "exit_code": 1}')))
    lost = f"grep -qs 'connection to this spare node lost' '{directory}/launcher.log'"
    own = [f"until {lost}; do sleep 0.02; done; {says(report)}" for report in ENDS]
    scripts = Scripts(n1=own[0], n2=own[1], n3=f"{liar}; exec sleep 60")
    watch = new_watch(directory, scripts)
    watch.open(replace(watch.run, spares=(RunNode("n3", "n3", 1, 0),)))
    watch.max_restarts, watch.replaces = 1, True
    started = time.monotonic()
    assert watch.attempt() == 0
    assert not watch.spares and not watch.running and time.monotonic() - started < 30


def test_a_launch_survives_any_reply_and_names_the_node(
    directory: Path, new_watch: NewWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "; ".join(says(line.decode()) for line in INVALID if len(line) < 100 and line.isascii())
    watch = new_watch(directory, Scripts(n1=f"{lines}; exit 3", n2=WAITS))
    assert watch.attempt() == 3
    errors = capfd.readouterr().err
    assert errors.count("n1: invalid report, ignored (") > 10 and "Traceback" not in errors


def test_the_messages_about_invalid_reports_are_limited(
    directory: Path, new_watch: NewWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    many = f"i=0; while [ $i -lt 500 ]; do {says('[1]')}; i=$((i + 1)); done"
    watch = new_watch(directory, Scripts(n1=f"{many}; exit 3", n2=WAITS))
    assert watch.attempt() == 3
    errors = capfd.readouterr().err
    assert errors.count("n1: invalid report, ignored (") == 20
    assert errors.count("; further ones are not recorded") == 1


def test_the_output_of_a_rank_cannot_imitate_a_report(tmp_path: Path) -> None:
    """Whatever a rank prints, the run has failed, with the exit code of the rank."""
    (tmp_path / "forge.py").write_text(
        "import os, sys, time\n"
        "for node in ('localhost', os.environ['MUSTER_NODE'], 'n1'):\n"
        "    for code in (0, 7):\n"
        '        for report in (\'{"node": "%s", "exit_code": %d}\', \'{"node": "%s", "waiting": true}\'):\n'
        "            text = '\\x1e' + (report % ((node, code) if '%d' in report else node)) + '\\n'\n"
        "            for stream in (sys.stdout, sys.stderr):\n"
        "                stream.write(text[:5]); stream.flush(); stream.write(text[5:]); stream.flush()\n"
        "time.sleep(0.3)\n"
        "sys.exit(5)\n"
    )
    launch = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--max-restarts", "1", "--script", "forge.py", "-", "1"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 5, done.stderr
    assert b"verdict: failed" in done.stderr and b"verdict: ok" not in done.stderr
    assert b"\x1e" not in done.stdout + done.stderr and b"restart 1 of 1" in done.stderr


def test_the_token_of_a_node_does_not_reach_its_command(tmp_path: Path) -> None:
    supervisor = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "launch.supervisor", "run"]
    options = ["--dir", str(tmp_path), "--name", "n1", "--report", "--environment", "-", "--", "env"]
    block = b"MUSTER_REPORT_TOKEN=secret\0A=1\0\0\0"
    with subprocess.Popen([*supervisor, *options], stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(block)
        process.stdin.flush()
        output, errors = process.stdout.read(), process.stderr.read()
    assert b"A=1" in errors and b"secret" not in errors
    report = parse_report(output.rpartition(REPORT)[2])
    assert (report["token"], report["exit_code"]) == ("secret", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
@pytest.mark.parametrize("planted", ["directory", "link"])
def test_a_supervisor_refuses_a_run_directory_that_another_user_has_planted(tmp_path: Path, planted: str) -> None:
    directory, own = tmp_path / "run", tmp_path / "own"
    own.mkdir()
    (own / "node_n1.pid").write_text("{}")
    if planted == "link":
        directory.symlink_to(own)
        os.lchown(directory, 65534, 65534)
    else:
        directory.mkdir(0o777)
        os.chown(directory, 65534, 65534)
    supervisor = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "launch.supervisor"]
    place = ["--dir", str(directory), "--name", "n1"]
    for verb in (["run", *place, "--", "touch", str(tmp_path / "started")], ["sweep", *place], ["stop", *place]):
        done = subprocess.run([*supervisor, *verb], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 69
        assert done.stderr.startswith(f"supervisor: {directory}: belongs to nobody, and you are root; ")
    command = ["launch.follow", *place, "--", "touch", str(tmp_path / "started")]
    for module in (command, command[:5], ["runs.node_status", "--run", str(directory), "--node", "n1"]):
        done = subprocess.run([*supervisor[:-1], *module], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode != 0 and f"{directory}: belongs to nobody" in done.stderr
    assert not (tmp_path / "started").exists() and [path.name for path in own.iterdir()] == ["node_n1.pid"]


# ---------------------------------------------------------------- replies


def test_an_endless_reply_is_cut_and_its_command_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_REPLY", 1 << 20)
    replies: list[Any] = []
    calls = Calls()
    calls.call("n1", ["sh", "-c", "yes"], replies.append, most=1 << 20)
    calls.call("n2", ["sh", "-c", "yes >&2"], replies.append, most=1 << 20)
    calls.wait()
    for reply in replies:
        assert (reply.code, reply.out, reply.failure_message()) == (69, "", "its reply has more than 1 MiB")


# ---------------------------------------------------------------- files of a node


class LyingCommands(LocalCommands):
    """Runs a program of its own on each node, whatever was asked for."""

    def __init__(self, programs: Mapping[str, str]) -> None:
        self._programs = programs

    def command(
        self, node: Any, arguments: Sequence[str], cwd: str = "", log: str = "", timeout: float = 0.0
    ) -> list[str]:
        return ["sh", "-c", self._programs.get(node.node, "exit 1")]


def archive(path: Path, *members: tuple[str, bytes | str]) -> str:
    """Write a tar archive; text is the target of a link. Returns the command that prints it.

    Files of an attempt are those of the first attempt.
    """
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as made:
        for name, content in members:
            of_attempt = name.startswith(("errors/", "ranks/", "node_"))
            info = tarfile.TarInfo(f"attempts/1/{name}" if of_attempt else name)
            info.mode, info.mtime = 0o6777, 2**33
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                made.addfile(info)
            else:
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
    return f"cat {path}"


@pytest.fixture
def collect(directory: Path, new_watch: NewWatch) -> Callable[..., Watch]:
    """A function that copies the files of nodes back, from programs that print archives."""

    def collect(lost: Sequence[str] = (), **programs: str) -> Watch:
        watch = new_watch(directory, Local(LyingCommands(programs)))
        for name in lost:
            (watch.attempt_directory / f"node_{name}.lost").touch()
        NodeLogs(watch, sync=False).collect()
        return watch

    return collect


def content(directory: Path) -> dict[str, str]:
    """The files in a directory; those of the first attempt without the name of its directory."""
    files = {path.relative_to(directory): path for path in directory.rglob("*") if not path.is_symlink()}
    (directory / "attempts/1/run.json").unlink(missing_ok=True)
    return {str(name).removeprefix("attempts/1/"): path.read_text() for name, path in files.items() if path.is_file()}


def test_a_node_that_sends_its_archive_but_does_not_end_the_call_does_not_delay_the_end(
    collect: Callable[..., Watch], directory: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    collect(n2=f"{archive(tmp_path / '2.tar', ('own', b'2'), ('stop.lock/x', b''))}; exec sleep 60")
    assert time.monotonic() - started < 30
    assert (directory / "own").exists() and not (directory / "stop.lock").exists()


@pytest.mark.parametrize("program", ["exec sleep 60", "yes"])
def test_a_node_whose_archive_is_refused_does_not_delay_the_end(
    program: str, collect: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trust, "STALLED", 0.2)
    started = time.monotonic()
    collect(n2=program)
    assert time.monotonic() - started < 30
    assert "n2: the copy of its files in" in capfd.readouterr().err


@pytest.mark.parametrize("program", ["exec sleep 60", "printf x; exec sleep 60"])
def test_a_node_whose_log_does_not_end_and_other_calls_do_not_delay_the_end(
    program: str, directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "STALLED", 0.2)
    watch = new_watch(directory, Local(LyingCommands({"n2": program})))
    other = watch.calls.call("n1", ["sleep", "60"])  # such as a call to a lost node
    started = time.monotonic()
    NodeLogs(watch, sync=True).collect()
    assert time.monotonic() - started < 30
    assert other.is_running
    other.kill()
    watch.calls.wait()


def test_a_node_sends_its_own_files_and_no_others(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch], capfd: pytest.CaptureFixture[str]
) -> None:
    (outside := tmp_path / "outside").mkdir()
    before = content(directory)["run.json"]
    launchers = [
        "run.json",
        "launcher.log",
        "verdict.json",
        "report.html",
        "hang.json",
        "attempts/2/node_n2.log",
        "newest",
    ]
    others = [
        "node_n1.log",
        "node_n1.exit",
        "node_n2.lost",
        "ranks/n1/0/stdout.log",
        ".hidden",
        "errors/x.json",
        "out/.git/config",
        "out/HEAD",
    ]
    own = ["node_n2.log", "node_n2.exit", "ranks/n2/x/attempt_0/0/stdout.log", "errors/rank_2.json", "samples/a.txt"]
    collect(
        n1=archive(
            tmp_path / "1.tar", ("node_n1.exit", b"1\n"), ("errors/rank_0.json", b"{}"), ("metrics.jsonl", b"1")
        ),
        n2=archive(
            tmp_path / "2.tar",
            *((name, b"of n2") for name in (*launchers, *others, *own)),
            ("errors/rank_0.json", b'{"forged": 1}'),
            ("errors/node_n1.json", b'{"forged": 1}'),
            ("metrics.jsonl", b"2"),
            ("link", str(outside)),
            ("link/through", b"x"),
            ("verdict.json", "/etc/hostname"),
        ),
    )
    found = content(directory)
    assert found.pop("run.json") == before
    assert found == dict.fromkeys(own, "of n2") | {
        "node_n1.exit": "1\n", "errors/rank_0.json": "{}", "metrics.jsonl": "1", "link/through": "x",
    }  # fmt: skip
    assert not [*outside.iterdir()] and not (directory / "link").is_symlink()
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    modes = {oct(path.stat().st_mode & 0o7777) for path in files}
    assert modes == {"0o600"}
    assert not [*directory.glob(".from_*")]
    errors = capfd.readouterr().err
    assert (
        "n2: not copied back, as links, special files, files of git or TensorBoard, or files that exist here: .hidden, "
        in errors
    )


def test_a_node_replaces_no_file_of_others_in_the_directory_of_the_attempt(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch]
) -> None:
    (directory / "attempts/1/here.csv").write_text("here")
    sent = {name: f"attempts/1/{name}" for name in ("here.csv", "best.json", "own.csv", "metrics.jsonl")}
    collect(
        n1=archive(tmp_path / "1.tar", (sent["best.json"], b"of n1")),
        n2=archive(tmp_path / "2.tar", *((name, b"lie") for name in sent.values())),
    )
    found = content(directory)
    assert {name: found.get(name) for name in sent} == {
        "here.csv": "here", "best.json": "of n1", "own.csv": "lie", "metrics.jsonl": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of_n1", "of_n2"),
    [
        (["metrics_from_output.jsonl"], ["metrics.jsonl", "metrics_from_tensorboard.jsonl", "settings.json"]),
        (["metrics.jsonl", "settings.json"], ["metrics_from_output.jsonl", "settings.json"]),
        (
            ["tb/events.out.tfevents.1700000000.n1.1.0"],
            ["tb/events.out.tfevents.1700000001.n2.1.0", "ranks/n2/events.out.tfevents.1700000001.n2.1.0"],
        ),
        ([], ["metrics_from_output.jsonl"]),  # as in Megatron-LM, where only the last rank prints
    ],
)
def test_a_node_without_rank_0_adds_no_metrics_to_those_of_rank_0(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch], of_n1: list[str], of_n2: list[str]
) -> None:
    collect(**{
        node: archive(tmp_path / f"{node}.tar", *((name, node.encode()) for name in names))
        for node, names in {"n1": of_n1, "n2": of_n2}.items()
    })  # fmt: skip
    found = {name: text for name, text in content(directory).items() if "metrics" in name or "events" in name}
    source, names = ("n1", of_n1) if of_n1 else ("n2", of_n2)
    assert found == {name: source for name in names if name != "settings.json"}


def record(name: str, **facts: object) -> tuple[str, bytes]:
    return f"errors/{name}.json", json.dumps(facts).encode()


# Records of the lost node n2, as the agent of n1 keeps them, and others that no agent keeps.
ABOUT_N2 = [
    record("rank_2", node="n2", rank=2, exception="ValueError", message="bad", time=1.0, exit_code=1, reported_by="n2"),
    record("rank_3", node="n2", rank=3, exception="ValueError", message="worse", time=1.0, exit_code=1),
    record("node_n2", node="n2", failures=[{"rank": 3, "time": 0.0, "exit_code": 7}], succeeded=[2], first="n2"),
    record("signal_n2_SIGTERM", signal="SIGTERM", sender="to the supervisor on n2", time=0.0),
    record("supervisor_n2", cause="killed", time=0.0),
    record("rank_9", node="n2", rank=9),
]


def test_what_another_node_reports_about_a_lost_node_is_named_as_its_report_and_decides_nothing(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch]
) -> None:
    collect(["n2"], n1=archive(tmp_path / "1.tar", *ABOUT_N2))
    kept = {name for name in content(directory) if name.startswith("errors")}
    assert kept == {"errors/rank_3.json", "errors/node_n2.json"}
    verdict = decide(directory, UNFIT)
    assert (verdict.exit_code, verdict.node, verdict.rank) == (UNFIT, "n2", None)
    assert verdict.cause.startswith("n2: connection lost: ")
    assert verdict.cause.endswith("; reported by n1: rank 3 on n2 raised ValueError: worse")
    assert verdict.collateral == ({"node": "n2", "rank": 3, "message": "reported by n1: ValueError: worse"},)


def test_what_another_node_reports_about_a_lost_node_comes_after_records_of_nodes_about_themselves(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch]
) -> None:
    own = record("rank_0", node="n1", rank=0, exception="KeyError", message="mine", time=9.0, exit_code=5)
    collect(["n2"], n1=archive(tmp_path / "1.tar", *ABOUT_N2, own))
    verdict = decide(directory, 5)
    assert (verdict.exit_code, verdict.node, verdict.rank) == (5, "n1", 0)
    assert "; reported by n1: rank 3 on n2 raised ValueError: worse" in verdict.cause


@pytest.mark.parametrize(
    ("name", "record", "counts"),
    [
        ("rank_2", {"node": "n2", "rank": 2, "exception": "ValueError"}, True),
        ("rank_2", {"node": "n1", "rank": 2}, False),
        ("rank_2", {"node": "n2", "rank": 0}, False),
        ("rank_2", {"node": "n2", "rank": "2"}, False),
        ("rank_2", {"node": "n2", "rank": 2, "reported_by": "n1"}, False),
        ("node_n2", {"node": "n2", "failures": [{"rank": 3, "exit_code": 1}], "succeeded": [2], "lost": "n1"}, True),
        ("node_n2", {"node": "n1", "failures": []}, False),
        ("node_n2", {"node": "n2", "failures": [{"rank": 3, "node": "n1"}]}, False),
        ("node_n2", {"node": "n2", "failures": [{"rank": 0, "exit_code": 1}]}, False),
        ("node_n2", {"node": "n2", "failures": [], "succeeded": [0]}, False),
    ],
)
def test_a_failure_record_counts_only_if_it_is_about_the_node_that_sent_it(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch], name: str, record: dict[str, Any], counts: bool
) -> None:
    collect(n2=archive(tmp_path / "2.tar", (f"errors/{name}.json", json.dumps(record).encode())))
    assert (directory / "errors" / f"{name}.json").exists() == counts


@pytest.mark.parametrize(("name", "most"), [("rank_2", 2 << 20), ("node_n2", 2 << 20), ("signal_n2_SIGUSR1", 4096)])
def test_records_that_are_too_large_are_neither_copied_nor_read(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch], name: str, most: int
) -> None:
    record = b'{"x": [' + b"1," * (most // 2) + b"1]}"
    collect(n2=archive(tmp_path / "2.tar", (f"errors/{name}.json", record)))
    assert not [*(directory / "errors").glob("*")]
    (directory / "errors").mkdir(exist_ok=True)
    (directory / "errors" / f"{name}.json").write_bytes(record)
    [warning] = gather(directory).warnings
    assert f"has more than {most >> 10} KiB" in warning


@pytest.mark.parametrize("program", ["exit 1", "head -c 100000 /dev/urandom", "printf x", "true"])
def test_what_is_no_archive_is_a_warning(
    directory: Path, collect: Callable[..., Watch], capfd: pytest.CaptureFixture[str], program: str
) -> None:
    collect(n1=program, n2=program)
    errors = capfd.readouterr().err
    for node in ("n1", "n2"):
        assert f"warning: {node}: the copy of its files in {directory} is incomplete: " in errors
    assert "Traceback" not in errors and set(content(directory)) == {"run.json"}


def test_an_endless_archive_ends_at_the_limit(
    directory: Path, tmp_path: Path, collect: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(trust, "MAX_FILES", 100)
    archive(tmp_path / "1.tar", ("node_n1.exit", b"1"))
    endless = f"while head -c 1024 {tmp_path}/1.tar; do :; done"
    collect(n1=endless, n2=endless)
    assert "incomplete: 101 files with 0 MiB are more than the limits" in capfd.readouterr().err


def test_a_log_that_a_node_sends_without_an_end_is_cut(
    directory: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "MAX_BYTES", 1 << 20)
    watch = new_watch(directory, Local(LyingCommands({"n1": "yes"})))
    clients: list[Client] = []
    call = watch.calls.call

    def recorded(*arguments: Any, **options: Any) -> Client:
        clients.append(call(*arguments, **options))
        return clients[-1]

    monkeypatch.setattr(watch.calls, "call", recorded)
    NodeLogs(watch, sync=True)._append_log(NODES[0], lambda reply: None)  # type: ignore[arg-type]
    watch.calls.wait()
    assert (directory / "node_n1.log").stat().st_size <= 1 << 20
    assert clients[0].process.returncode == -9


def test_a_node_replaces_no_file_that_another_program_wrote_and_its_own_files_are_updated(
    directory: Path, tmp_path: Path, new_watch: NewWatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (directory / "state.pkl").write_text("of rank 0")
    (directory / "model").write_text("of rank 0")
    for number in (1, 2):
        members = [(name, str(number).encode()) for name in ("state.pkl", "model/x", "own", "node_n2.log")]
        program = archive(tmp_path / f"{number}.tar", *members)
        if number == 1:
            logs = NodeLogs(new_watch(directory, Local(LyingCommands({"n2": program}))), sync=False)
        else:
            (tmp_path / "2.tar").rename(tmp_path / "1.tar")
        logs.collect()
        found = content(directory)
        assert {name: found[name] for name in ("own", "node_n2.log")} == dict.fromkeys(
            ["own", "node_n2.log"], str(number)
        )
        assert [found["state.pkl"], found["model"]] == ["of rank 0"] * 2
        assert "files that exist here: model, state.pkl" in capfd.readouterr().err


class LyingAboutNewFiles(LyingCommands):
    """Lists and sends what it likes."""

    def command(
        self, node: Any, arguments: Sequence[str], cwd: str = "", log: str = "", timeout: float = 0.0
    ) -> list[str]:
        return ["sh", "-c", self._programs["list" if arguments[2] == new_files.LIST else "send"]]


# Python runs such files whenever it starts.
IN_ENVIRONMENTS = ["venv/lib/python3.11/site-packages/weights.pth", "lib/dist-packages/x.pth", "new/pyvenv.cfg",
                   "env/lib/x.py", "env/bin/python", "conda/etc/conda/activate.d/x.sh"]  # fmt: skip


def test_a_node_sends_new_files_that_match_and_replaces_nothing_of_the_user(
    directory: Path,
    tmp_path: Path,
    new_watch: NewWatch,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (cwd := tmp_path / "work").mkdir()
    for name in ("own.py", "jobs.json"):
        (cwd / name).write_text("own")
        os.utime(cwd / name, (1, 1))
    subprocess.run(["git", "init", "-q", cwd], check=True)
    (cwd / ".gitignore").write_text("jobs.json\ncheckpoints\n")
    (cwd / "checkpoints").mkdir()
    (cwd / "checkpoints/old").write_text("old")
    for link, target in (("link", "checkpoints"), ("dangling", "nowhere")):
        (cwd / link).symlink_to(target)
    os.utime(cwd / "checkpoints/old", (1, 1))
    refused = ["../up", "/tmp/muster-absolute", ".git/config", "a/.git/hooks/x", "out/HEAD", ".venv/bin/python",
               "logs/r/run.json", "config/node_env.sh", "muster.toml", "own.py", "jobs.json",
               "cluster_config.json", "link/x", "dangling/x", ".bashrc", ".ssh/rc",
               "results.journal", "out/.muster_job", "muster/json.py", "muster/json/__init__.py",
               "muster/scripts/lib/x", "muster/out/x", *IN_ENVIRONMENTS]  # fmt: skip
    for marker in ("env/pyvenv.cfg", "conda/conda-meta/history"):
        (cwd / marker).parent.mkdir(parents=True)
        (cwd / marker).touch()
    monkeypatch.setattr(new_files, "KIT", str(cwd / "muster"))
    taken = ["out/new\nn1: \x1b[2Jforged", "checkpoints/old"]
    listed = tmp_path / "listed"
    listed.write_text("".join(f"{time.time() + 9:.9f} {name}\0" for name in [*refused, *taken]) + "junk\0 \0nan x\0")
    sent = archive(tmp_path / "sent", *((name, b"of n1") for name in [*refused, *taken, "unlisted"]))
    watch = new_watch(directory, Local(LyingAboutNewFiles({"list": f"cat {listed}", "send": sent})))
    watch.options = replace(watch.options, cwd=str(cwd))
    NewFiles(watch, {"n1": "0"}, "logs", ["*", "check*/o*", "checkpoints", "cluster_config.json"]).report([NODES[0]])
    found = {name: text for name, text in content(cwd).items() if text and not name.startswith(".git")}
    assert found == {"own.py": "own", "jobs.json": "own", **dict.fromkeys(taken, "of n1")}
    assert [os.readlink(cwd / name) for name in ("link", "dangling")] == ["checkpoints", "nowhere"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "forged" in line] == [
        "launch.sh: n1: copied 2 files from it: checkpoints/old, out/new n1: forged"
    ]
    assert any("4 new or changed files" in line and "dangling/x, jobs.json, link/x, ..." in line for line in lines), (
        lines
    )
    assert any("; --fetch replaces files only in a directory that a pattern names" in line for line in lines), lines


@pytest.mark.parametrize(
    ("patterns", "replaces"),
    [(["*.json"], False), (["o*/x.json"], False), (["out"], True), (["out/*"], True), (["*", "out/x.json"], True)],
)
def test_a_pattern_replaces_a_file_only_in_a_directory_that_it_names(
    directory: Path, new_watch: NewWatch, patterns: list[str], replaces: bool
) -> None:
    files = NewFiles(new_watch(directory, Local(LocalCommands())), {}, "logs", patterns)
    assert files._matches("out/x.json") and files._matches("out/x.json", exists=True) == replaces


@pytest.mark.parametrize(
    ("cwd", "taken"),
    [
        ("", ["experiments/x", "out.npy"]),
        ("experiments", ["distributed/x", "experiments/x", "out.npy", "scripts/run"]),
        ("../link", ["experiments/x", "out.npy"]),
        ("scripts", []),
    ],
)  # fmt: skip
def test_a_node_sends_no_files_of_muster_if_the_working_directory_is_that_of_muster(
    directory: Path, tmp_path: Path, new_watch: NewWatch, monkeypatch: pytest.MonkeyPatch, cwd: str, taken: list[str]
) -> None:
    for name in ("experiments", "scripts"):
        (tmp_path / "muster" / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("muster")
    monkeypatch.setattr(new_files, "KIT", str(tmp_path / "link"))
    names = ["distributed/x", "distributed/json.py", "experiments/x", "out.npy", "scripts/run", "train.py"]
    listed = "".join(f"{time.time() + 9:.9f} {name}\0" for name in names)
    watch = new_watch(directory, Local(LocalCommands()))
    watch.options = replace(watch.options, cwd=str(tmp_path / "muster" / cwd))
    assert NewFiles(watch, {}, "logs", ["*"])._newer(listed) == taken


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("errors/", True), ("errors", False), ("errors/rank_2.json", True), ("errors/rank_2.json/", False),
        ("errors/rank_1.json", False), ("errors/rank_02x.json", False), ("errors/signal_n2_SIGUSR1.json", True),
        ("errors/signal_n2_SIGRTMIN+2.json", True), ("errors/signal_n2_SIGX1.json", False),
        ("errors/rank_02.json", False), ("errors/rank_\u0662.json", False),
        ("errors/signal_launcher_SIGUSR1.json", False), ("errors/connection_n2.json", False),
        ("errors/supervisor_n2.json", True), ("ranks/", True), ("ranks", False), ("ranks/n2/a/b", True),
        ("ranks/n2b/a", False), ("node_n2.log", True), ("node_n2.log/", False), ("node_n2.b.log", False),
        ("node_n2.lost", False), ("metrics.jsonl", True), ("metrics.jsonl/", False), ("metrics.jsonl/x", False),
        ("settings.json", True), ("run.json", False), ("run.json/", False), (".from_n1-x/", False),
        ("attempts/2/", False), ("newest", False), ("my results/plot.png", True), ("a/run.json", False),
        ("my results/", True), ("checkpoints/", False), ("checkpoints/a", False), ("smoke.json", False),
        ("smoke.json/", False),
    ],
)  # fmt: skip
def test_a_node_may_send_these_files(name: str, expected: bool) -> None:
    assert is_expected(RunNode("n2", "", 2, 2), name) == expected
    assert is_expected(RunNode("n1", "", 2, 0), "smoke.json")


def test_a_rank_that_makes_metrics_a_fifo_does_not_block_the_launch(tmp_path: Path) -> None:
    (tmp_path / "fifo.py").write_text(
        "import os\n"
        "run = os.environ['MUSTER_RUN_DIR']\n"
        "os.mkfifo(os.environ['MUSTER_METRICS'])\n"
        "files = ('metrics_from_output.jsonl', 'settings.json', 'hang.json', 'errors/rank_7.json', 'node_x.exit')\n"
        "for name in files:\n"
        "    os.mkfifo(os.path.join(run, name))\n"
        "print('step 1 loss 2.0', flush=True)\n"
    )
    launch = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--script", "fifo.py", "-", "1"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "verdict: ok" in done.stderr, done.stderr
    [run] = [path for path in (tmp_path / "logs").iterdir() if path.is_dir() and not path.is_symlink()]
    for program in ("status.sh", "report.sh", "stop.sh"):
        call = [str(KIT / "scripts" / program), str(run)]
        found = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert found.returncode == 0 and "Traceback" not in found.stderr, found


def test_control_sequences_in_an_exception_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "escape.py").write_text("raise ValueError('\\x1b]0;owned\\x07 \\x1b[31mred\\x9b \\u202e')\n")
    launch = [str(KIT / "scripts/ssh/launch_singlenode.sh"), "--script", "escape.py", "-", "1"]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    verdict = done.stderr[done.stderr.index("verdict: ") :]
    assert "raised ValueError" in verdict and trust.printable(verdict, trust.LAYOUT) == verdict
    shown = subprocess.run([KIT / "scripts/status.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "ValueError" in shown.stdout and trust.printable(shown.stdout, trust.LAYOUT) == shown.stdout
