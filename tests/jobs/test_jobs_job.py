"""The id, output directory and arguments of a job.

Arguments reach the script byte for byte: through real supervisors, with setup lines, in another locale and through
every login shell.
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
import yaml
from dispatchers import DispatcherCall, Dispatchers, dispatchers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from distributed.host.ssh_call import for_any_shell
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists import config
from distributed.jobs.lists.job import (
    LONGEST,
    Job,
    JobError,
    Options,
    argument_groups,
    arguments,
    job_id,
    job_of,
    matching,
    muster_job,  # fmt: skip
)
from distributed.jobs.schedule.backend import Event
from distributed.jobs.servers.host_server import ListContext, LocalServer
from distributed.training.fold import DEFAULT_PARTICIPANTS

KIT = Path(__file__).resolve().parents[2]
PROGRAM = KIT / "scripts/jobs/run_distributed_training.py"
SECONDS = 60.0


def made(settings: Mapping[str, Any], **options: Any) -> Job:
    return job_of(settings, Options(**options))


# ---------------------------------------------------------------- the id and the output directory


def test_the_id_depends_only_on_the_settings_and_not_on_their_order() -> None:
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
def test_any_difference_of_settings_changes_the_id(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert made(one).id != made(other).id


def test_ids_are_stable_between_versions() -> None:
    """A list started by an older version can be resumed."""
    assert job_id({"fold": 0, "lr": 3e-4, "model": "médium", "flags": [True, None]}) == "315800652d"


@pytest.mark.parametrize(
    ("values", "output"),
    [
        ({"fold": 1, "prefix": "e"}, "experiments/e/fold1"),
        ({"fold": 1, "prefix": "e", "participants": ["x", "y"]}, "experiments/e/fold1_y"),
        ({"fold": 1, "prefix": "e/f", "participant": "z"}, "experiments/e/f/fold1_z"),
        ({"fold": 1}, "experiments/{id}"),
        ({"prefix": "e"}, "experiments/e/{id}"),
        ({}, "experiments/{id}"),
    ],
)
def test_the_output_directory_is_derived_from_the_settings(values: dict[str, Any], output: str) -> None:
    job = made(values)
    assert job.output == output.format(id=job.id)
    assert job.name == job.output.removeprefix("experiments/")


def test_the_output_directory_uses_the_default_participants_of_the_script() -> None:
    job = job_of({"fold": 1, "prefix": "e"}, Options(), DEFAULT_PARTICIPANTS)
    assert job.output == f"experiments/e/fold1_{DEFAULT_PARTICIPANTS[1]}"


def test_a_prefix_selects_its_jobs_even_if_the_id_of_another_job_starts_with_it() -> None:
    other = made({"prefix": "other"})
    start = other.id[:3]
    named = [made({"prefix": start, "fold": fold, "participants": ["x", "y"]}) for fold in (0, 1)]
    assert matching([other, *named], start) == named
    assert matching([other, *named], other.id[:4]) == [other]


def test_options_are_stored_with_the_names_but_without_the_values_of_environment_variables() -> None:
    options = Options(priority=2, timeout=5.0, labels=("x",), env={"TOKEN": "s3cr3t"}, expected_seconds=1.5)
    public = json.loads(json.dumps(options.public()))
    assert public == {"priority": 2, "timeout": 5.0, "labels": ["x"], "env": ["TOKEN"], "expected_seconds": 1.5}
    again = Options.of_public(public)
    assert again.public() == public
    assert (again.timeout, again.labels, again.env) == (5.0, ("x",), {"TOKEN": ""})
    assert Options.of_public(Options().public()) == Options()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("value", "expected"),
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
        (1e-7, ["--a", "1.0e-07"]),
        (-1e16, ["--a", "-1.0e+16"]),
        (1.5e-300, ["--a", "1.5e-300"]),
        (64.0, ["--a", "64.0"]),
        (True, ["--a"]),
        (False, []),
        (None, []),
        (["x", 1, ""], ["--a", "x", "1", ""]),
    ],
)
def test_a_value_is_converted_to_arguments(value: Any, expected: list[str]) -> None:
    assert arguments(made({"a": value}), "cpu") == [*expected, "--device", "cpu"]


@pytest.mark.parametrize("number", ["0.00001", "1e-5", "1E5", "1.10", "-0.0", "6.02e+23", "1" * 400, "0.1" + "0" * 30])
def test_a_number_in_a_job_list_is_passed_as_it_was_written(tmp_path: Path, number: str) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(f'[{{"a": {number}, "b": [{number}]}}, {{"c": {{"d": {number}}}, "_nested": "json"}}]')
    one, other = config.read_jobs(path)
    assert arguments(one, "cpu") == ["--a", number, "--b", number, "--device", "cpu"]
    assert arguments(other, "cpu") == ["--c", f'{{"d": {number}}}', "--device", "cpu"]
    value = json.loads(number)
    assert one.id == job_id({"a": value, "b": [value]})
    assert muster_job(one) == muster_job(made({"a": value, "b": [value]})), "equal values have equal JSON"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_yaml_reads_the_argument_for_a_python_float_as_a_float(number: float) -> None:
    argument = arguments(made({"a": number}), "cpu")[1]
    assert (yaml.safe_load(argument), float(argument), json.loads(argument)) == (number, number, number)
    assert isinstance(yaml.safe_load(argument), float)


NESTED = {"o": {"lr": 1e-7, "b": [1, 2], "on": True, "off": False, "no": None, "m": {"x": "y"}}, "names": ["x", "y"]}


def test_nested_values_are_passed_as_json_or_with_dotted_keys() -> None:
    assert arguments(made(NESTED, nested="dotted"), "cpu") == [
        "--o.lr", "1.0e-07", "--o.b", "1", "2", "--o.on", "--o.m.x", "y", "--names", "x", "y", "--device", "cpu",
    ]  # fmt: skip
    passed = arguments(made({**NESTED, "l": [], "t": [[1], None], "e": {}}, nested="json"), "cpu")
    assert json.loads(passed.pop(1)) == NESTED["o"]
    assert passed == ["--o", "--names", "x", "y", "--l", "[]", "--t", "[[1], null]", "--e", "{}", "--device", "cpu"]
    assert Options.of_public(Options(nested="json").public()).nested == "json"


def test_arguments_have_the_order_of_the_settings() -> None:
    assert arguments(made({"b": 1, "a": 2}), "cuda:0") == ["--b", "1", "--a", "2", "--device", "cuda:0"]


def longest(key: str) -> str:
    """The longest value of this key that a job can have."""
    return "x" * (LONGEST - len("MUSTER_JOB=") - len(muster_job(made({key: ""}))))


def test_a_job_too_long_for_linux_is_refused() -> None:
    made({"a": longest("a")})
    with pytest.raises(JobError, match="too long: more than 131,071 bytes as JSON"):
        made({"a": longest("a") + "x"})
    with pytest.raises(JobError, match="too long"):
        made({"a": ["x" * 1000] * 140})


# ---------------------------------------------------------------- arguments arrive unchanged

HOSTILE = [
    "", " ", "-5", "--x", "-", "--", "'", '"', "''", "\\", "\\'", "$HOME", "$(touch x)", "`id`", "${a}", "a;b", "a&&b",
    "a|b", ">x", "<x", "*", "?", "[a]", "{a,b}", "~", "~/x", "#x", "!x", "!!", "%s", "%n", "^a", "a\nb", "\n", "\n\n",
    "x\n", "\r", "a\r\nb", "\t", "\x01", "\x18", "\x7f", "\x1b[31m", "\u2028", "é", "e\u0301", "日本語", "😀", "\ufeff",
    "=", "a=b", "=41", "\\x41", "x" * 100_000, "é'$\n" * 15_000,
]  # fmt: skip
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # no lone surrogates
TEXT = st.sampled_from(HOSTILE) | st.text(LETTERS, max_size=20)
SCALARS = TEXT | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
# Keys that determine the output directory, the device or the participants.
RESERVED = {"fold", "prefix", "participant", "participants", "device", "data_path"}
KEYS = st.sampled_from(["lr", "id", "é", "a.b", "a'b", "$a", "a;b", "x" * 300]) | st.text(
    st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"], exclude_characters="="), min_size=1, max_size=8
).filter(lambda key: key[0] not in "-_" and key not in RESERVED)


def fits(values: dict[str, Any]) -> bool:
    """Whether a job with these settings is short enough. The test fails if the job is refused for another reason."""
    with contextlib.suppress(JobError):
        made(values)
        return True
    with pytest.raises(JobError, match="too long"):
        made(values)
    return False


SETTINGS = st.dictionaries(
    KEYS, SCALARS | st.booleans() | st.none() | st.lists(SCALARS, min_size=1, max_size=3), max_size=3
)
LISTS = st.lists(
    SETTINGS.filter(fits), min_size=10, max_size=20, unique_by=lambda values: str(sorted(argument_groups(values, None)))
)
# Copies its arguments and environment byte for byte, independent of the locale.
SCRIPT = """\
import os, shutil
for name in ("cmdline", "environ"):
    shutil.copy(f"/proc/self/{name}", os.environ["MUSTER_OUTPUT_DIR"])
"""


def expected_arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """The expected arguments, independent of arguments()."""
    for key, value in values.items():
        if value is None or value is False:
            continue
        yield f"--{key}"
        for each in [] if value is True else value if isinstance(value, list) else [value]:
            yield each if isinstance(each, str) else json.dumps(each)


def check_arrived(directory: Path, values: Mapping[str, Any]) -> None:
    output = directory / made(values).output
    passed = (output / "cmdline").read_bytes().split(b"\0")[:-1]
    assert passed[-2:] in ([b"--device", b"cpu"], [b"--device", b"cuda:0"])
    assert passed[2:-2] == [each.encode() for each in expected_arguments(values)]
    env = dict(entry.partition(b"=")[::2] for entry in (output / "environ").read_bytes().split(b"\0"))
    assert json.loads(env[b"MUSTER_JOB"]) == {"id": made(values).id, **values}
    assert env[b"MUSTER_OUTPUT_DIR"] == os.fsencode(output)


def prepared(directory: Path, jobs: list[dict[str, Any]]) -> list[str]:
    (directory / "args.py").write_text(SCRIPT)
    (directory / "jobs.json").write_text(json.dumps(jobs))
    return ["--backend", "local", "--slots", "4", "--no-tmux", "--script", "args.py", "--jobs-config", "jobs.json"]


@pytest.fixture(scope="module")
def forked() -> Iterator[Dispatchers]:
    with dispatchers() as server:
        yield server


@given(LISTS)
# Failing examples are not shrunk, as each step would run a list.
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_random_arguments_reach_the_script_unchanged(forked: Dispatchers, jobs: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        call = DispatcherCall(directory, tuple(prepared(directory, jobs)))
        assert forked.run(call) == 0, call.printed
        for values in jobs:
            check_arrived(directory, values)


def test_hostile_values_and_the_longest_value_arrive(forked: Dispatchers, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = [{"all": [value for value in HOSTILE if len(value) < 1000]}, {"a": longest("a")}]
    jobs += [{"long": value} for value in HOSTILE if len(value) > 1000] + [{"id": "mine", "flag": True, "none": None}]
    call = DispatcherCall(tmp_path, tuple(prepared(tmp_path, jobs)))
    assert forked.run(call) == 0, call.printed
    for values in jobs:
        check_arrived(tmp_path, values)


def test_a_retry_passes_a_number_as_it_was_written(forked: Dispatchers, tmp_path: Path) -> None:
    call = prepared(tmp_path, [])
    numbers = ["--lr", "0.00001", "--wd", "1E-5"]
    (tmp_path / "args.py").write_text("import sys; open('seen', 'a').write(' '.join(sys.argv[1:5]) + '\\n'); exit(1)")
    (tmp_path / "jobs.json").write_text('[{"lr": 0.00001, "wd": 1E-5, "_retries": 1}]')
    codes = [forked.run(DispatcherCall(tmp_path, tuple(each))) for each in (call, ["retry", "failed"], ["resume"])]
    assert codes == [1, 0, 1]
    assert (tmp_path / "seen").read_text().splitlines() == [" ".join(numbers)] * 4


def test_an_argument_is_not_changed_by_a_server_with_setup_lines(tmp_path: Path) -> None:
    """bash sources the setup lines and then execs the script."""
    jobs: list[dict[str, Any]] = [{"all": [value for value in HOSTILE if len(value) < 1000]}]
    jobs += [{"a": value} for value in HOSTILE[-3:]]
    secret = "a'\n$x\r é"

    async def run() -> None:
        prepared(tmp_path, jobs)
        context = ListContext("abc", tmp_path, "args.py", grace=5.0, panes=False)
        setup = ["export SETUP='of the server' OMP_NUM_THREADS=37 SECRET=no", "unset NOTHING", "none", "cd /"]
        server = LocalServer("local", config.Server(host="localhost", gpus=0, setup=setup), context)
        ended: asyncio.Queue[Event] = asyncio.Queue()
        await server.connect(lambda event: ended.put_nowait(event) if event.kind == "ended" else None)
        try:
            for values in jobs:
                job = made(values, env={"SECRET": secret})
                assert (await server.query({f"{job.id}.1": job.output}))[f"{job.id}.1"] == {"state": "absent"}
                await server.start(Attempt(job.id, 1, "local", [0], [], 0.0), job, [])
            for _ in jobs:
                event = await asyncio.wait_for(ended.get(), SECONDS)
                assert event.facts["code"] == 0, event.facts
        finally:
            await server.close()

    asyncio.run(run())
    for values in jobs:
        check_arrived(tmp_path, values)
        environ = (tmp_path / made(values).output / "environ").read_bytes().split(b"\0")
        assert f"SECRET={secret}".encode() in environ
        assert {b"SETUP=of the server", b"OMP_NUM_THREADS=37", b"PYTHONUNBUFFERED=1"} <= set(environ)


def test_an_argument_is_not_changed_in_another_locale(tmp_path: Path) -> None:
    locales = tmp_path / "locales"
    locales.mkdir()
    if not shutil.which("localedef"):
        pytest.skip("localedef is not installed")
    compiled = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", locales / "de_DE.ISO-8859-1"], capture_output=True, check=False
    )
    if compiled.returncode:
        pytest.skip("the sources of locales are not installed")
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
    for values in jobs:
        check_arrived(directory, values)


# ---------------------------------------------------------------- login shells

SHELLS = [shell for shell in ("bash", "dash", "fish", "zsh", "tcsh", "ksh") if shutil.which(shell)]
ARGUMENTS = st.lists(TEXT.filter(lambda value: len(value.encode()) < 20_000), min_size=1, max_size=12)


@pytest.mark.parametrize("shell", SHELLS)
@given(ARGUMENTS)
@settings(max_examples=15, deadline=None)
def test_arguments_reach_a_program_through_any_login_shell(shell: str, passed: list[str]) -> None:
    line = "printf '%s\\0' " + shlex.join(passed)
    done = subprocess.run([shell, "-c", for_any_shell(line)], capture_output=True, check=True)
    assert done.stdout == b"".join(each.encode() + b"\0" for each in passed)


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_arguments_reach_a_program_through_any_login_shell(shell: str) -> None:
    passed = [each for each in HOSTILE if len(each) < 20_000]
    done = subprocess.run([shell, "-c", for_any_shell("printf '%s\\0' " + shlex.join(passed))], capture_output=True)
    assert done.stdout == b"".join(each.encode() + b"\0" for each in passed)
