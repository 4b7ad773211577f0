"""One job: an id that is a hash of its settings, and arguments that nothing changes on the way to the script.

Guarded here: what the script is given, byte for byte, with real supervisors, with setup lines, in every locale and
through every login shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from dispatchers import DispatcherCall, Dispatchers, dispatchers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from distributed.fold import DEFAULT_PARTICIPANTS
from distributed.jobs import config
from distributed.jobs.dispatcher import Event, StartRequest
from distributed.jobs.job import LONGEST, Job, JobError, Options, arguments, document, job_id, job_of
from distributed.jobs.servers import ListContext, LocalServer, for_any_shell

KIT = Path(__file__).resolve().parents[2]
PROGRAM = KIT / "scripts/jobs/run_distributed_training.py"
SECONDS = 60.0


def made(settings: Mapping[str, Any], **options: Any) -> Job:
    return job_of(settings, Options(**options))


# ---------------------------------------------------------------- the id and the output directory


def test_the_id_is_of_the_settings_alone_whatever_their_order() -> None:
    one, other = made({"a": 1, "b": [1, 2]}), made({"b": [1, 2], "a": 1}, priority=3, env={"A": "1"})
    assert one.id == other.id
    assert len(one.id) == 10
    assert int(one.id, 16) >= 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 64}, {"a": 64.0}),
        ({"a": "64"}, {"a": 64}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {}),
        ({"a": None}, {"a": False}),
        ({"a": [1]}, {"a": 1}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": "é"}, {"a": unicodedata.normalize("NFD", "é")}),
        ({"a": "b"}, {"A": "b"}),
    ],
)
def test_settings_that_differ_in_anything_are_two_jobs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert made(one).id != made(other).id


def test_the_id_stays_what_it_is() -> None:
    """A list that was begun by an older version is found again."""
    assert job_id({"fold": 0, "lr": 3e-4, "model": "médium", "flags": [True, None]}) == "315800652d"


@pytest.mark.parametrize(
    ("said", "output"),
    [
        ({"fold": 1, "prefix": "e"}, "experiments/e/fold1"),
        ({"fold": 1, "prefix": "e", "participants": ["x", "y"]}, "experiments/e/fold1_y"),
        ({"fold": 1, "prefix": "e/f", "participant": "z"}, "experiments/e/f/fold1_z"),
        ({"fold": 1}, "experiments/{id}"),
        ({"prefix": "e"}, "experiments/e/{id}"),
        ({}, "experiments/{id}"),
    ],
)
def test_the_output_directory_follows_from_the_settings(said: dict[str, Any], output: str) -> None:
    job = made(said)
    assert job.output == output.format(id=job.id)
    assert job.name == job.output.removeprefix("experiments/")


def test_participants_that_the_script_knows_itself_name_the_directory() -> None:
    job = job_of({"fold": 1, "prefix": "e"}, Options(), DEFAULT_PARTICIPANTS)
    assert job.output == f"experiments/e/fold1_{DEFAULT_PARTICIPANTS[1]}"


def test_of_the_environment_only_the_names_are_written_down() -> None:
    options = Options(priority=2, timeout=5.0, labels=("x",), env={"TOKEN": "s3cr3t"}, expected_seconds=1.5)
    public = json.loads(json.dumps(options.public()))
    assert public == {"priority": 2, "timeout": 5.0, "labels": ["x"], "env": ["TOKEN"], "expected_seconds": 1.5}
    again = Options.of_public(public)
    assert again.public() == public
    assert (again.timeout, again.labels, again.env) == (5.0, ("x",), {"TOKEN": ""})
    assert Options.of_public(Options().public()) == Options()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("x", ["--a", "x"]),
        ("", ["--a", ""]),
        ("-5", ["--a", "-5"]),
        ("--b", ["--a", "--b"]),
        (0, ["--a", "0"]),
        (-1, ["--a", "-1"]),
        (10**30, ["--a", "1" + "0" * 30]),
        (0.1, ["--a", "0.1"]),
        (3e-4, ["--a", "0.0003"]),
        (1e-7, ["--a", "1e-07"]),
        (64.0, ["--a", "64.0"]),
        (True, ["--a"]),
        (False, []),
        (None, []),
        ([], ["--a"]),
        (["x", 1, ""], ["--a", "x", "1", ""]),
    ],
)
def test_a_value_becomes_words(value: Any, words: list[str]) -> None:
    assert arguments(made({"a": value}), "cpu") == [*words, "--device", "cpu"]


def test_arguments_have_the_order_of_the_settings() -> None:
    assert arguments(made({"b": 1, "a": 2}), "cuda:0") == ["--b", "1", "--a", "2", "--device", "cuda:0"]


def longest(key: str) -> str:
    """The longest value of this key that a job can have."""
    return "x" * (LONGEST - len("MUSTER_JOB=") - len(document(made({key: ""}))))


def test_what_is_too_long_for_linux_is_refused() -> None:
    made({"a": longest("a")})
    with pytest.raises(JobError, match="too long: as JSON it has more than 131,071 bytes"):
        made({"a": longest("a") + "x"})
    with pytest.raises(JobError, match="too long"):
        made({"a": ["x" * 1000] * 140})


# ---------------------------------------------------------------- nothing is changed on the way

HOSTILE = [
    "", " ", "-5", "--x", "-", "--", "'", '"', "''", "\\", "\\'", "$HOME", "$(touch x)", "`id`", "${a}", "a;b", "a&&b",
    "a|b", ">x", "<x", "*", "?", "[a]", "{a,b}", "~", "~/x", "#x", "!x", "!!", "%s", "%n", "^a", "a\nb", "\n", "\n\n",
    "x\n", "\r", "a\r\nb", "\t", "\x01", "\x18", "\x7f", "\x1b[31m", "\u2028", "é", "e\u0301", "日本語", "😀", "\ufeff",
    "=", "a=b", "=41", "\\x41", "x" * 100_000, "é'$\n" * 15_000,
]  # fmt: skip
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # no half characters
TEXT = st.sampled_from(HOSTILE) | st.text(LETTERS, max_size=20)
SCALARS = TEXT | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
# Some keys mean something: they name the output directory.
MEANT = {"fold", "prefix", "participant", "participants", "device", "data_path"}
KEYS = st.sampled_from(["lr", "id", "é", "a.b", "a'b", "$a", "a;b", "x" * 300]) | st.text(
    st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"], exclude_characters="="), min_size=1, max_size=8
).filter(lambda key: key[0] not in "-_" and key not in MEANT)


def fits(said: dict[str, Any]) -> bool:
    """Whether it is short enough; for no other reason may one of these be refused."""
    with contextlib.suppress(JobError):
        made(said)
        return True
    with pytest.raises(JobError, match="too long"):
        made(said)
    return False


SETTINGS = st.dictionaries(KEYS, SCALARS | st.booleans() | st.none() | st.lists(SCALARS, max_size=3), max_size=3)
LISTS = st.lists(SETTINGS.filter(fits), min_size=10, max_size=20, unique_by=lambda said: job_id(said))
# Byte for byte what it was given, in no locale.
SCRIPT = """\
import os, shutil
for name in ("cmdline", "environ"):
    shutil.copy(f"/proc/self/{name}", os.environ["MUSTER_OUTPUT_DIR"])
"""


def words_of(said: Mapping[str, Any]) -> Iterator[str]:
    """Written by hand, as the subject is not to be its own judge."""
    for key, value in said.items():
        if value is None or value is False:
            continue
        yield f"--{key}"
        for each in [] if value is True else value if isinstance(value, list) else [value]:
            yield each if isinstance(each, str) else json.dumps(each)


def check_arrived(directory: Path, said: Mapping[str, Any]) -> None:
    output = directory / made(said).output
    words = (output / "cmdline").read_bytes().split(b"\0")[:-1]
    assert words[-2:] in ([b"--device", b"cpu"], [b"--device", b"cuda:0"])
    assert words[2:-2] == [word.encode() for word in words_of(said)]
    env = dict(entry.partition(b"=")[::2] for entry in (output / "environ").read_bytes().split(b"\0"))
    assert json.loads(env[b"MUSTER_JOB"]) == {"id": made(said).id, **said}
    assert env[b"MUSTER_OUTPUT_DIR"] == os.fsencode(output)


def prepared(directory: Path, jobs: list[dict[str, Any]]) -> list[str]:
    (directory / "words.py").write_text(SCRIPT)
    (directory / "jobs.json").write_text(json.dumps(jobs))
    return ["--backend", "local", "--slots", "4", "--no-tmux", "--script", "words.py", "--jobs-config", "jobs.json"]


@pytest.fixture(scope="module")
def forked() -> Iterator[Dispatchers]:
    with dispatchers() as server:
        yield server


@given(LISTS)
# Without making a failing example smaller, which would take a run each time.
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_an_argument_is_not_changed_on_the_way(forked: Dispatchers, jobs: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        call = DispatcherCall(directory, tuple(prepared(directory, jobs)))
        assert forked.run(call) == 0, call.printed
        for said in jobs:
            check_arrived(directory, said)


def test_every_hostile_value_and_the_longest_one_arrive(forked: Dispatchers, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [{"all": [word for word in HOSTILE if len(word) < 1000]}, {"a": longest("a")}]
    jobs += [{"long": word} for word in HOSTILE if len(word) > 1000] + [{"id": "mine", "flag": True, "none": None}]
    call = DispatcherCall(tmp_path, tuple(prepared(tmp_path, jobs)))
    assert forked.run(call) == 0, call.printed
    for said in jobs:
        check_arrived(tmp_path, said)


def test_an_argument_is_not_changed_by_a_server_with_setup_lines(tmp_path: Path) -> None:
    """They are sourced by bash, which then becomes the script."""
    jobs: list[dict[str, Any]] = [{"all": [word for word in HOSTILE if len(word) < 1000]}]
    jobs += [{"a": word} for word in HOSTILE[-3:]]
    secret = "a'\n$x\r é"

    async def run() -> None:
        prepared(tmp_path, jobs)
        context = ListContext("abc", tmp_path, "words.py", grace=5.0, panes=False)
        setup = ["export SETUP='of the server' OMP_NUM_THREADS=37 SECRET=no", "unset NOTHING", "none", "cd /"]
        server = LocalServer("local", config.Server(host="localhost", gpus=0, setup=setup), context)
        ended: asyncio.Queue[Event] = asyncio.Queue()
        await server.connect(lambda event: ended.put_nowait(event) if event.kind == "ended" else None)
        try:
            for said in jobs:
                job = made(said, env={"SECRET": secret})
                assert (await server.query({f"{job.id}.1": job.output}))[f"{job.id}.1"] == {"state": "absent"}
                order = StartRequest(f"{job.id}.1", job, [0], [], arguments(job, "cpu"), "title")
                await server.start(order)
            for _ in jobs:
                event = await asyncio.wait_for(ended.get(), SECONDS)
                assert event.facts["code"] == 0, event.facts
        finally:
            await server.close(finished=True)

    asyncio.run(run())
    for said in jobs:
        check_arrived(tmp_path, said)
        environ = (tmp_path / made(said).output / "environ").read_bytes().split(b"\0")
        assert f"SECRET={secret}".encode() in environ
        assert {b"SETUP=of the server", b"OMP_NUM_THREADS=37", b"PYTHONUNBUFFERED=1"} <= set(environ)


def test_an_argument_is_not_changed_in_another_locale(tmp_path: Path) -> None:
    locales = tmp_path / "locales"
    locales.mkdir()
    if not shutil.which("localedef"):
        pytest.skip("localedef, which makes a locale, is not here")
    made_one = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", locales / "de_DE.ISO-8859-1"], capture_output=True, check=False
    )
    if made_one.returncode:
        pytest.skip("the parts of a locale are not installed here")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    env |= {"LOCPATH": str(locales), "LC_ALL": "de_DE.ISO-8859-1"}
    encoding = [sys.executable, "-c", "import sys; print(sys.getfilesystemencoding())"]
    assert subprocess.run(encoding, env=env, capture_output=True, text=True, check=True).stdout == "iso8859-1\n"
    directory = tmp_path / "é"
    directory.mkdir()
    jobs: list[dict[str, Any]] = [{"a": "é日本"}, {"prefix": "é日", "fold": 0}]
    done = subprocess.run(
        [sys.executable, PROGRAM, *prepared(directory, jobs)], cwd=directory, env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done
    for said in jobs:
        check_arrived(directory, said)


# ---------------------------------------------------------------- login shells

SHELLS = [shell for shell in ("bash", "dash", "fish", "zsh", "tcsh", "ksh") if shutil.which(shell)]
WORDS = st.lists(TEXT.filter(lambda word: len(word.encode()) < 20_000), min_size=1, max_size=12)


@pytest.mark.parametrize("shell", SHELLS)
@given(WORDS)
@settings(max_examples=15, deadline=None)
def test_words_reach_a_program_through_any_login_shell(shell: str, words: list[str]) -> None:
    line = "printf '%s\\0' " + shlex.join(words)
    done = subprocess.run([shell, "-c", for_any_shell(line)], capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_hostile_word_reaches_a_program_through_any_login_shell(shell: str) -> None:
    words = [word for word in HOSTILE if len(word) < 20_000]
    done = subprocess.run([shell, "-c", for_any_shell("printf '%s\\0' " + shlex.join(words))], capture_output=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


@given(WORDS)
@settings(max_examples=15, deadline=None)
def test_the_launchers_in_bash_write_the_same_for_any_shell(words: list[str]) -> None:
    script = 'source "$1/common.bash"; source "$1/ssh.bash"; for line in "${@:2}"; do quote_for_any_shell "$line"; done'
    done = subprocess.run(
        ["bash", "-c", script, "bash", KIT / "scripts/lib", *words], capture_output=True, check=True, text=True
    )
    assert done.stdout == "".join(for_any_shell(word) + "\n" for word in words)
