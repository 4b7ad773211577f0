"""cluster_config.json and jobs_config.json: faults are refused before a server is contacted.

Each fault is one line with file, position and value, and shows no secret. Servers override defaults. No two jobs share
a directory.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.jobs.lists.config import (
    LARGEST_FILE,
    ClusterConfig,
    ConfigError,
    Server,
    collisions,
    read_cluster,
    read_jobs,  # fmt: skip
)
from distributed.jobs.lists.job import ALL_GPUS, Job, Options

A = {"host": "a"}
SECRET = "s3cr3t"


def write_json(directory: Path, tree: Any) -> Path:
    """Write a configuration as JSON; a string is written unchanged."""
    path = directory / "config.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def refusal(path: Path, read: Any, **options: Any) -> list[str]:
    """The faults, without the path at the start of each."""
    with pytest.raises(ConfigError) as refused:
        read(path, **options)
    lines = str(refused.value).splitlines()
    assert all(line.startswith((f"{path}: ", f"{path}, line ")) for line in lines), lines
    return [line.removeprefix(f"{path}").removeprefix(": ") for line in lines]


def cluster_of(directory: Path, *servers: Any, **more: Any) -> ClusterConfig:
    return read_cluster(write_json(directory, {"servers": list(servers), **more}))


def jobs_of(directory: Path, *jobs: Any, **options: Any) -> list[Job]:
    return read_jobs(write_json(directory, list(jobs)), **options)


# ---------------------------------------------------------------- invalid files


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ", line 1, column 1: not valid JSON: Expecting value"),
        ('[\n {"a": 1 2}]', ", line 2, column 10: not valid JSON: Expecting ',' delimiter"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice in one object; remove one"),
        ('[{"a": NaN}]', "NaN is not JSON; write a finite number"),
        ("[" * 100_000, "nested too deeply; write a list of flat objects"),
    ],
    ids=["empty", "comma", "twice", "NaN", "deep"],
)
@pytest.mark.parametrize("read", [read_cluster, read_jobs])
def test_invalid_json_is_refused_with_its_position(tmp_path: Path, read: Any, text: str, fault: str) -> None:
    assert refusal(write_json(tmp_path, text), read) == [fault]


@pytest.mark.parametrize("read", [read_cluster, read_jobs])
def test_an_unreadable_file_is_refused(tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remedy = f"the working directory is {tmp_path}"
    assert refusal(tmp_path / "none", read) == [f"cannot read it (No such file or directory); {remedy}"]
    assert refusal(tmp_path, read) == [f"cannot read it (Is a directory); {remedy}"]
    (tmp_path / "latin").write_bytes('[{"a": "é"}]'.encode("latin-1"))
    assert refusal(tmp_path / "latin", read) == ["not UTF-8 text; save it as UTF-8"]
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    assert refusal(tmp_path / "large", read) == ["larger than 50 MB; split the list"]


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert len(read_jobs(write_json(tmp_path, "\ufeff" + '[{"a": 1}]'))) == 1


# ---------------------------------------------------------------- servers


@pytest.mark.parametrize(
    ("tree", "faults"),
    [
        ([], ["contains a list; expected an object with servers"]),
        (None, ["contains null; expected an object with servers"]),
        ({"servers": A}, ["servers: Input should be a valid list"]),
        ({"servers": ["a"]}, ['servers.0="a": Input should be a valid dictionary or instance of Server']),
        ({"servers": [A], "script": "x.py"}, ["script: unknown key; did you mean script_path?"]),
        ({"servers": [A], "script_path": ""}, ['script_path="": String should have at least 1 character']),
        ({"servers": [A], "defaults": []},
         ["defaults: Input should be a valid dictionary or instance of ServerOptions"]),
        (
            {"servers": [A], "defaults": {"host": "b"}},
            ["defaults.host: unknown key; known keys: user, gpus, ssh_key, port, workdir, python, setup, gpu_ids, "
             "slots_per_gpu, labels"],
        ),
        ({"servers": [A], "defaults": {"gpu": 1}}, ["servers.0.gpu: unknown key; did you mean gpus?",
                                                    "defaults.gpu: unknown key; did you mean gpus?"]),
        ({"servers": [A, A]}, ["server a is listed 2 times; list it once, with all its gpus"]),
        ({"servers": [A, {"host": "a", "user": "b"}]}, ["server a is listed 2 times; list it once, with all its gpus"]),
        ({"servers": [{}]}, ["servers.0.host: missing; add it"]),
        ({"servers": [A, {"host": "b", "gpus": -1}]},
         ["servers.1.gpus=-1: Input should be greater than or equal to 0"]),
    ],
)  # fmt: skip
def test_an_invalid_cluster_is_refused(tmp_path: Path, tree: Any, faults: list[str]) -> None:
    assert refusal(write_json(tmp_path, tree), read_cluster) == faults


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"host": "-oProxyCommand=id"}, 'host="-oProxyCommand=id": expected a host name, an IP address or a Host of'),
        ({"host": "a b"}, 'host="a b": expected a host name, an IP address or a Host of ssh_config'),
        ({"host": "u@a"}, 'host="u@a": expected a host name, an IP address or a Host of ssh_config'),
        ({"host": "a\n"}, 'host="a\\n": String should match pattern'),
        ({"user": "-l"}, 'user="-l": expected a user name'),
        ({"user": "a b"}, 'user="a b": expected a user name'),
        ({"user": "a@b"}, 'user="a@b": expected a user name'),
        ({"gpus": "2"}, 'gpus="2": Input should be a valid integer'),
        ({"gpus": True}, "gpus=true: Input should be a valid integer"),
        ({"gpus": 1025}, "gpus=1025: Input should be less than or equal to 1024"),
        ({"gpu_ids": [0, 0]}, "gpu_ids: expected distinct non-negative integers"),
        ({"gpu_ids": [-1]}, "gpu_ids: expected distinct non-negative integers"),
        ({"gpu_ids": [True]}, "gpu_ids: expected distinct non-negative integers"),
        ({"gpu_ids": ["0"]}, "gpu_ids: expected distinct non-negative integers, or UUIDs of MIG instances (MIG-..., "),
        ({"gpu_ids": ["MIG-a", "MIG-a"]}, "gpu_ids: expected distinct non-negative integers"),
        ({"gpu_ids": "MIG-a"}, 'gpu_ids="MIG-a": expected distinct non-negative integers'),
        ({"gpu_ids": [0], "gpus": 2}, "gpus=2, but gpu_ids lists 1; remove one of the two"),
        ({"port": 0}, "port=0: Input should be greater than or equal to 1"),
        ({"port": "22"}, 'port="22": Input should be a valid integer'),
        ({"slots_per_gpu": 0}, "slots_per_gpu=0: Input should be greater than or equal to 1"),
        ({"setup": "module load"}, 'setup="module load": Input should be a valid list'),
        ({"setup": ["a\nb"]}, 'setup.0="a\\nb": String should match pattern'),
        ({"ssh_key": "a\0"}, 'ssh_key="a\\u0000": String should match pattern'),
        ({"workdir": ""}, 'workdir="": String should have at least 1 character'),
        ({"labels": [1]}, "labels.0=1: Input should be a valid string"),
        ({"slots": 2}, "slots: unknown key; known keys: "),
        ({"portt": 22}, "portt: unknown key; did you mean port?"),
    ],
)
def test_an_invalid_server_is_refused(tmp_path: Path, keys: dict[str, Any], fault: str) -> None:
    (line,) = refusal(write_json(tmp_path, {"servers": [{**A, **keys}]}), read_cluster)
    assert line.removeprefix("servers.0").lstrip(".: ").startswith(fault)


def test_keys_of_a_server_override_defaults(tmp_path: Path) -> None:
    defaults = {"user": "me", "gpus": 8, "port": 2222, "labels": ["x"], "setup": ["one"]}
    plain, own = cluster_of(
        tmp_path, A, {"host": "b", "user": "you", "labels": [], "gpus": 2}, defaults=defaults
    ).servers
    assert (plain.user, plain.gpus, plain.port, plain.labels, plain.setup) == ("me", 8, 2222, ["x"], ["one"])
    assert (own.user, own.gpus, own.port, own.labels, own.setup) == ("you", 2, 2222, [], ["one"])
    assert own.name == "b-2222"


def test_gpu_ids_may_name_mig_instances(tmp_path: Path) -> None:
    ids = [2, "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-GPU-5d5b/7/0"]
    (server,) = cluster_of(tmp_path, {**A, "gpu_ids": ids}).servers
    assert server.devices == ids


def test_a_job_may_need_all_gpus_of_a_server(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, {"lr": 1, "_gpus": "all"})
    assert job.options.gpus == ALL_GPUS
    assert job.options.public() == {"gpus": "all"}
    assert Options.of_public({"gpus": "all"}) == job.options


def test_either_gpus_or_gpu_ids_of_a_server_overrides_both_defaults(tmp_path: Path) -> None:
    a, b = cluster_of(tmp_path, {**A, "gpu_ids": [3, 1]}, {"host": "b"}, defaults={"gpus": 4}).servers
    assert (a.devices, b.devices) == ([3, 1], [0, 1, 2, 3])
    a, b = cluster_of(tmp_path, {**A, "gpus": 0}, {"host": "b"}, defaults={"gpu_ids": [5]}).servers
    assert (a.devices, b.devices) == ([], [5])


def test_a_host_with_two_ports_is_two_servers(tmp_path: Path) -> None:
    servers = cluster_of(tmp_path, {**A, "port": 22}, {**A, "port": 23}, {"host": "[::1]"}).servers
    assert [server.name for server in servers] == ["a-22", "a-23", "--1"]


# ---------------------------------------------------------------- jobs


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ({}, "contains an object; expected a list of jobs: [{...}, ...]"),
        ([], "contains an empty list; expected a list of jobs: [{...}, ...]"),
        ("null", "contains null; expected a list of jobs: [{...}, ...]"),
        (3, "contains a number; expected a list of jobs: [{...}, ...]"),
        ('"x"', "contains a string; expected a list of jobs: [{...}, ...]"),
        ([1], "job 0: contains a number; expected an object of arguments"),
        ([[]], "job 0: contains a list; expected an object of arguments"),
        ([{"device": "cuda:1"}], "job 0: device='cuda:1': the device is set by the dispatcher; remove it"),
        ([{"a": 1}, {"b": {}}], 'job 1: b: empty object; leave the key out, or set _nested to "json" to pass {}'),
        ([{"a": []}], 'job 0: a: empty list; leave the key out, or set _nested to "json" to pass []'),
        ([{"a": [], "_nested": "dotted"}],
         'job 0: a: empty list; leave the key out, or set _nested to "json" to pass []'),
        ([{"a": {"b": 1}}],
         'job 0: a: contains an object; set _nested to "dotted" to pass --a.KEY VALUE, or to "json" to pass JSON'),
        ([{"a": {"b": {}}, "_nested": "dotted"}],
         'job 0: a.b: empty object; leave the key out, or set _nested to "json" to pass {}'),
        ([{"a": {"b": 1}, "a.b": 2, "_nested": "dotted"}],
         "job 0: a.b: given by a key with a dot and by an object; remove one of them"),
        ([{"a": {"b": [[1]]}, "_nested": "dotted"}],
         'job 0: a.b: lists and objects are not allowed in a list; write strings, or set _nested to "json"'),
        ([{"a": {"b c": 1}, "_nested": "dotted"}],
         "job 0: key 'b c': not a valid argument name; use letters, digits and _"),
        ([{"a": 1, "_nested": "yaml"}], "job 0: _nested=\"yaml\": Input should be 'json' or 'dotted'"),
        ('[{"_nested": "json", "a": ' + "[" * 60 + "]" * 60 + "}]",
         "job 0: nested too deeply: more than 30 levels; write fewer"),
        ('[{"_nested": "dotted", "a": ' + '{"b": ' * 900 + "1" + "}" * 900 + "}]",
         "job 0: nested too deeply: more than 30 levels; write fewer"),
        ([{"prefix": {"a": "b"}, "_nested": "json"}],
         "job 0: prefix: expected a name, got {'a': 'b'}; write a string"),
        ([{"a": [[1]]}],
         'job 0: a: lists and objects are not allowed in a list; write strings, or set _nested to "json"'),
        ([{"a": [None]}],
         'job 0: a: true, false and null are not allowed in a list; write strings, or set _nested to "json"'),
        ([{"a": "x\0"}], "job 0: a: contains a NUL character; remove it"),
        ('[{"a": 1e999}]', "1e999 is not finite; write a finite number"),
        ('[{"a": "\\ud800"}]',
         "job 0: '{\"a\":\"\\ud800\"}': contains a lone surrogate; write complete characters"),
        ([{"": 1}], "job 0: key '': not a valid argument name; use letters, digits and _"),
        ([{"--a": 1}], "job 0: key '--a': not a valid argument name; use letters, digits and _"),
        ([{"a=b": 1}], "job 0: key 'a=b': not a valid argument name; use letters, digits and _"),
        ([{"a\nb": 1}], "job 0: key 'a\\nb': not a valid argument name; use letters, digits and _"),
        ([{"a": "x" * 140_000}],
         "job 0: too long: more than 131,071 bytes as JSON, the limit of Linux for an environment variable"),
        ([{"prefix": "../a"}],
         "job 0: prefix: cannot be part of a path: got '../a'; use printable characters, at most 200 bytes, without "
         '"." and ".."'),
        ([{"prefix": "a", "fold": -1}],
         "job 0: fold: expected a non-negative integer, got -1; the first participant is 0"),
        ([{"a": 1}, {"a": 1, "_priority": 1}], "job 1 is the same as job 0; remove one of them"),
        ('[{"a": 0.1}, {"a": 0.10}]', "job 1 is the same as job 0; remove one of them"),
        ([{"a": None, "b": 1}, {"b": 1}],
         "job 1 has the same arguments as job 0 (a: null and missing); remove one of them"),
        ([{"a": 1, "b": False}, {"a": "1", "_env": {"A": "s3cr3t"}}],
         'job 1 has the same arguments as job 0 (a: 1 and "1", b: false and missing); remove one of them'),
        ([{"b": 2, "a": [1]}, {"a": 1, "b": 2}],
         "job 1 has the same arguments as job 0 (a: [1] and 1); remove one of them"),
        ([{"a": {"b": 1}, "_nested": "dotted"}, {"a.b": 1}],
         'job 1 has the same arguments as job 0 (a: {"b": 1} and missing, a.b: missing and 1); remove one of them'),
        ([{"prefix": "a", "fold": 0, "lr": 1}, {"prefix": "a", "fold": 0, "lr": 2}],
         "job 1 would write the same directory as job 0: experiments/a/fold0; give one of them another prefix, or "
         "remove fold"),
        ([{"prefix": "a", "fold": 0}, {"prefix": "a/fold0", "fold": 1}],
         "job 1 would write into experiments/a/fold0, the directory of job 0; change prefix"),
        ([{"_prio": 1}], "job 0: _prio: unknown key; did you mean _priority?"),
        ([{"_x": 1}],
         "job 0: _x: unknown key; known keys: _priority, _timeout, _retries, _gpus, _labels, _env, _expected_seconds, "
         "_base_model_hash, _nested, _after"),
        ([{"_timeout": 0}], "job 0: _timeout=0: Input should be greater than 0"),
        ([{"_timeout": "1h"}], 'job 0: _timeout="1h": Input should be a valid number'),
        ([{"_gpus": 0}], 'job 0: _gpus=0: expected a positive integer, or "all"'),
        ([{"_gpus": "al"}], 'job 0: _gpus="al": expected a positive integer, or "all"'),
        ([{"_gpus": True}], 'job 0: _gpus=true: expected a positive integer, or "all"'),
        ([{"_gpus": -1}], 'job 0: _gpus=-1: expected a positive integer, or "all"'),
        ([{"_retries": -1}], "job 0: _retries=-1: Input should be greater than or equal to 0"),
        ([{"_priority": 1.5}], "job 0: _priority=1.5: Input should be a valid integer"),
        ([{"_labels": "a"}], 'job 0: _labels="a": Input should be a valid list'),
        ([{"_expected_seconds": -1}], "job 0: _expected_seconds=-1: Input should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_an_invalid_job_is_refused(tmp_path: Path, tree: Any, fault: str) -> None:
    assert refusal(write_json(tmp_path, tree), read_jobs) == [fault]


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        (f"TOKEN={SECRET}", "_env: Input should be a valid dictionary"),
        ([SECRET], "_env: Input should be a valid dictionary"),
        ({"TOKEN": 31337}, "_env.TOKEN: Input should be a valid string"),
        ({"TOKEN": [SECRET]}, "_env.TOKEN: Input should be a valid string"),
        ({"a b": SECRET}, "_env: 'a b' is not a valid variable name; use letters, digits and _"),
        ({"CUDA_VISIBLE_DEVICES": SECRET}, "_env: CUDA_VISIBLE_DEVICES is set by the dispatcher; remove it"),
        ({"MUSTER_JOB": SECRET}, "_env: MUSTER_JOB is set by the dispatcher; remove it"),
        ({"TOKEN": f"{SECRET}\0"}, "_env: the value of TOKEN contains a NUL character; remove it"),
    ],
)
def test_messages_show_no_values_of_environment_variables(tmp_path: Path, env: Any, fault: str) -> None:
    (line,) = refusal(write_json(tmp_path, [{"_env": env}]), read_jobs)
    assert line == f"job 0: {fault}"
    assert SECRET not in line
    assert "31337" not in line


def test_at_most_twenty_faults_are_reported_at_once(tmp_path: Path) -> None:
    faults = refusal(write_json(tmp_path, [{"a": number, "device": "cpu"} for number in range(30)]), read_jobs)
    assert [line.partition(":")[0] for line in faults[:20]] == [f"job {number}" for number in range(20)]
    assert faults[20:] == ["and 10 more faults"]


def test_keys_with_an_underscore_are_options(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, {"lr": 1, "_timeout": 5, "_labels": ["x"], "_env": {"A": "1"}, "_gpus": 2})
    assert job.settings == {"lr": 1}
    assert job.options == Options(timeout=5.0, labels=("x",), env={"A": "1"}, gpus=2)


def test_jobs_without_the_option_retries_get_the_value_of_the_argument_retries(tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, {"a": 1}, {"a": 2, "_retries": 0}, retries=3)
    assert [job.options.retries for job in jobs] == [3, 0]


def test_the_directory_name_uses_the_participants_of_the_script(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, {"fold": 1, "prefix": "e"}, participants=["x", "y"])
    assert (job.output, job.name) == ("experiments/e/fold1_y", "e/fold1_y")


# ---------------------------------------------------------------- arbitrary content

KEYS = st.sampled_from(
    ["a", "fold", "prefix", "participant", "participants", "device", "id", "_env", "_timeout", "_labels", "_gpus", "_x",
     "servers", "host", "defaults", "gpus", "gpu_ids", "user", "script_path", "", "-", "a b", SECRET]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2000) | st.floats() | st.text(max_size=5) | st.sampled_from(["a", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def read_or_refused(path: Path, read: Any) -> Any:
    """The configuration; None if it was refused with lines that start with the path."""
    try:
        return read(path)
    except ConfigError as refused:
        message = str(refused)
    assert all(line.startswith(f"{path}: ") for line in message.split("\n")), message
    return None


@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=4) | VALUES)
def test_any_list_of_jobs_is_accepted_or_refused_with_lines_that_name_the_file(directory: Path, tree: Any) -> None:
    jobs = read_or_refused(write_json(directory, json.dumps(tree)), read_jobs)
    if jobs is not None:
        assert len({job.id for job in jobs}) == len({job.output for job in jobs}) == len(tree)


@given(st.dictionaries(KEYS, VALUES, max_size=4) | st.lists(st.dictionaries(KEYS, VALUES), max_size=2).map(
    lambda servers: {"servers": servers}
))  # fmt: skip
def test_any_cluster_is_accepted_or_refused_with_lines_that_name_the_file(directory: Path, tree: Any) -> None:
    cluster = read_or_refused(write_json(directory, json.dumps(tree)), read_cluster)
    if cluster is not None:
        assert all(isinstance(server, Server) for server in cluster.servers)


# ---------------------------------------------------------------- jobs that wait for others


def named(name: str, *after: str) -> dict[str, Any]:
    return {"prefix": name, "fold": 0, "_after": list(after)}


@pytest.mark.parametrize(
    ("jobs", "faults"),
    [
        ([{"_after": 3}], ["job 0: _after=3: Input should be a valid list"]),
        ([{"_after": [""]}], ["job 0: _after.0=\"\": String should have at least 1 character"]),
        ([named("train"), named("x", "trian/fold0", "qqq")],
         ["job 1: _after=trian/fold0: no such job in this list; did you mean train/fold0?",
          "job 1: _after=qqq: no such job in this list; give a prefix, or a name that --plan shows"]),
        ([named("a1"), named("a2"), named("x", "a")],
         ["job 2: _after=a: matches 2 jobs (a1/fold0, a2/fold0); give one name"]),
        ([named("a", "a")], ["job 0: _after: a/fold0 waits for itself; remove it"]),
        ([named("x"), named("a", "b"), named("b", "c"), named("c", "a")],
         ["job 1: _after: a/fold0 waits for b/fold0 waits for c/fold0 waits for a/fold0; remove one of them"]),
        ([*({"prefix": f"{number:0190}", "fold": 0} for number in range(700)), {"n": 1, "_after": ["0" * 190]}], None),
        ([*({"prefix": f"{number:0190}", "fold": 0} for number in range(700)),
          {"n": 1, "_after": [f"{number:0190}" for number in range(700)]}],
         ["job 700: _after: MUSTER_AFTER would be too long for Linux with 700 jobs; name fewer"]),
    ],
)  # fmt: skip
def test_an_after_option_that_cannot_be_met_is_refused(
    tmp_path: Path, jobs: list[Any], faults: list[str] | None
) -> None:
    path = write_json(tmp_path, jobs)
    if faults:
        assert refusal(path, read_jobs) == faults
    else:
        read_jobs(path)


def test_the_after_option_takes_a_name_or_directory_or_id_or_prefix_of_a_job_or_a_unique_part(tmp_path: Path) -> None:
    first, second = jobs_of(tmp_path, {"prefix": "prep", "n": 1}, {"prefix": "prep2", "n": 1})
    ways = (first.name, first.output, first.id, first.id[:8], "prep", f"prep/{first.id[:3]}", "ep2/")
    jobs = jobs_of(tmp_path, {"prefix": "prep", "n": 1}, {"prefix": "prep2", "n": 1},
                   *({"m": number, "_after": name} for number, name in enumerate(ways)))  # fmt: skip
    assert [job.options.after for job in jobs[2:]] == [(first.id,)] * 6 + [(second.id,)]
    assert jobs_of(tmp_path, {"m": 0, "_after": "x"}, {"prefix": "x"})[0].id == jobs[2].id, "_after is not a setting"


def test_jobs_of_an_added_file_may_wait_for_listed_jobs_but_not_write_their_directories(tmp_path: Path) -> None:
    listed = jobs_of(tmp_path, named("a"), {"n": 1})
    again, new = jobs_of(tmp_path, named("a"), named("b", "a", listed[1].id), listed=listed)
    assert (again.id, new.options.after) == (listed[0].id, (listed[0].id, listed[1].id))
    assert refusal(write_json(tmp_path, [{**named("a"), "n": 1}]), read_jobs, listed=listed) == [
        f"job 0 would write the same directory as job {listed[0].id}: experiments/a/fold0; "
        "give one of them another prefix, or remove fold"
    ]


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6))
def test_jobs_are_accepted_if_an_order_exists_in_which_each_follows_those_it_needs(
    directory: Path, after: list[set[int]]
) -> None:
    after = [{number % len(after) for number in each} for each in after]
    tree = [named(f"j{number}", *(f"j{other}/fold0" for other in each)) for number, each in enumerate(after)]
    jobs = read_or_refused(write_json(directory, tree), read_jobs)
    possible = any(
        all(set(after[number]) <= set(order[:position]) for position, number in enumerate(order))
        for order in itertools.permutations(range(len(after)))
    )
    assert (jobs is not None) == possible
    if jobs:
        ids = [job.id for job in jobs]
        assert [{ids.index(each) for each in job.options.after} for job in jobs] == after


OUTPUTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join)


@given(st.lists(OUTPUTS, max_size=5))
def test_directories_collide_if_equal_or_nested(outputs: list[str]) -> None:
    jobs = {number: Job(str(number), {"a": number}, Options(), output) for number, output in enumerate(outputs)}
    disjoint = all(
        one != other and not one.startswith(f"{other}/") and not other.startswith(f"{one}/")
        for number, one in enumerate(outputs)
        for other in outputs[:number]
    )
    assert (not list(collisions(jobs))) == disjoint


def read_jobs_in_a_list(path: Path) -> list[Job]:
    path.write_text(f"[{path.read_text()}, {path.read_text()}]")
    return read_jobs(path)


OVERSIZED = {
    "a long key": {"k" * 300_000: 1},
    "many keys": dict.fromkeys(map(str, range(20_000)), 1),
    "a long value": {"servers": [{"host": "a", "port": "9" * 300_000}]},
    "deep lists": {"servers": [{"host": json.loads("[" * 500 + "]" * 500)}]},
    "a key that is given twice, after many others": "{{{}}}".format(
        ", ".join(f'"{k}": 1' for k in [*range(60_000), 0])
    ),
    "a long key that is given twice": '{{"{}": 1, "{}": 1}}'.format("k" * 300_000, "k" * 300_000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tree", OVERSIZED.values(), ids=OVERSIZED)
@pytest.mark.parametrize("read", [read_cluster, read_jobs, read_jobs_in_a_list])
def test_a_file_of_any_size_is_refused_with_a_short_message(tmp_path: Path, read: Any, tree: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        read(write_json(tmp_path, tree))
    assert len(str(refused.value)) < 20_000
