"""Under Muster's agent a script sees what it sees under torchrun, and a launch ends with the exit code of its ranks.

The agent forks ranks from one process that has imported PyTorch. These tests compare a script's state and exit under
the agent with those in a fresh interpreter and under torchrun. Arguments arrive byte for byte. When a rank fails, the
agent must exit with the code of the rank, stop the other ranks and record the failure in errors/.
"""

from __future__ import annotations

import io
import json
import os
import py_compile
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zipapp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.agent import failure_records
from distributed.agent.agent import Agent, RankFailure
from distributed.agent.options import Unsupported, parse
from distributed.agent.rank_output import follow
from distributed.agent.rendezvous import Rendezvous
from distributed.host.resources import Cores
from distributed.host.stacks import MIN_FILE_DESCRIPTOR
from distributed.launch import threads
from distributed.verdict import verdict

KIT = Path(__file__).resolve().parents[2]
AGENT = [sys.executable, str(KIT / "scripts/lib/agent.py"), "--standalone"]
WITHOUT_TORCH = [sys.executable, str(KIT / "tests/lab/agent_without_torch.py"), "--standalone"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Run a script as a rank in an interpreter that has not imported PyTorch. This is fast, and a comparison with a fresh
# interpreter shows every change that Muster's worker code makes.
RANK_MAIN = """
import sys
_, kit, *arguments = sys.argv
path, sys.path[0] = tuple(sys.path[1:]), kit + "/scripts/lib"
import recorded_imports
sys.path[0] = kit
from distributed.agent.preloaded import Preload
from distributed.agent.worker import Script, run_script
recorded_imports.stop()
fresh = recorded_imports.INITIAL_MODULES - {"linecache"}  # imported by -c
is_module = arguments[0] == "-m"
name, *arguments = arguments[1:] if is_module else arguments
run_script(Script(name, tuple(arguments), is_module, path), Preload(fresh, recorded_imports.IMPORTS))
"""
RANK = [sys.executable, "-c", RANK_MAIN, str(KIT)]
FRESH = ["env", "--default-signal=HUP", sys.executable, "-u"]  # a rank handles SIGHUP even if nohup started the tests
TIMEOUT = 120  # seconds until a launch is treated as hanging
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch, tmp_path)


def clean(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Change to a directory and remove variables of other launches from the environment."""
    monkeypatch.chdir(directory)
    stale = ("SLURM_", "TORCHELASTIC_", "MUSTER_", *RANK_VARIABLES)
    for name in [name for name in os.environ if name.startswith(stale)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip


# ---------------------------------------------------------------- state that a script sees

INSPECT = '''
"""Record the state that a script sees."""
names = set(globals())
import sys
modules = sorted(sys.modules)
import faulthandler, gc, json, locale, logging, multiprocessing, os, pickle, random, resource, signal, sys, threading
import warnings

class Own:
    """Unpickling must find it by name."""

def same(value):
    return type(pickle.loads(pickle.dumps(value))) is type(value)

process = multiprocessing.current_process()
seen = {
    "argv": sys.argv, "path": sys.path, "__file__": __file__, "__name__": __name__, "__doc__": __doc__,
    "__spec__": __spec__ and __spec__.name, "__package__": __package__, "__cached__": __cached__,
    "__loader__": [
        type(__loader__).__name__, getattr(__loader__, "name", None), getattr(__loader__, "path", None),
        getattr(__loader__, "archive", None),
    ],
    "builtins": type(__builtins__).__name__,
    "names": sorted(names), "cwd": os.getcwd(), "environment": sorted(os.environ),
    "rank": {name: os.environ.get(name) for name in RANK_VARIABLES},
    "main": sys.modules["__main__"].__dict__ is globals() and sys.modules["__mp_main__"] is sys.modules["__main__"],
    "pickled": [same(Own()), Own.__module__],
    "modules": modules, "own": [name for name in sys.modules if name.partition(".")[0] == "distributed"],
    "process": [process.name, process.daemon, process.pid == os.getpid(), process._identity],
    "parent": str(multiprocessing.parent_process()), "children": multiprocessing.active_children(),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "threads": [thread.name for thread in threading.enumerate()],
    "main thread": threading.current_thread() is threading.main_thread() and threading.get_native_id() == os.getpid(),
    "handlers": {
        number.name: str(signal.getsignal(number)).split(" at ")[0]
        for number in signal.valid_signals() if isinstance(number, signal.Signals)
    },
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
    "stdin": sys.stdin.read(),
    "streams": [
        [repr(stream), stream.errors, stream.line_buffering, stream.write_through, stream.newlines,
         repr(stream.buffer).replace("_Output", "_io.FileIO")]  # Python 3.13 shows the name of the subclass
        for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__)
    ],
    "identity": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "command line": [sys.orig_argv, open("/proc/self/cmdline").read(), open("/proc/self/comm").read()],
    "environ": sorted(line.partition("=")[0] for line in open("/proc/self/environ").read().split("\\0")),
    "group": [os.getpid() == os.getpgrp() == os.getsid(0)], "open files": os.listdir("/proc/self/fd"),
    "faulthandler": faulthandler.is_enabled(), "warnings": [str(entry) for entry in warnings.filters],
    "logging": [logging.root.handlers, logging.root.level, logging.root.manager.disable],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
              threading.excepthook is threading.__excepthook__, sys.gettrace(), sys.getprofile()],
    "finders": [str(finder).split(" at ")[0] for finder in [*sys.meta_path, *sys.path_hooks]],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()], "flags": [str(sys.flags), sys.warnoptions],
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)],
    "locale": locale.setlocale(locale.LC_ALL), "umask": os.umask(0o22), "nice": os.nice(0),
}
try:
    import distributed
except ModuleNotFoundError as error:
    seen["distributed"] = error.name
seen["random"] = [random.random()]
if "torch" in sys.argv:
    import numpy, torch, torch.distributed
    seen["random"] += [numpy.random.random(), torch.rand(1).item()]
    seen["torch"] = [torch.get_num_threads(), torch.is_grad_enabled(), torch.cuda.is_initialized()]
    seen["logging of torch"] = {
        name: [logger.level, logger.propagate, str(logger.handlers)]
        for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]
        if isinstance(logger, logging.Logger)
    }
    seen["warnings of torch"] = [str(entry) for entry in warnings.filters]
    seen["modules of torch"] = sorted(sys.modules)
with open(os.environ["SEEN"] + os.environ.get("RANK", "0"), "w") as file:
    json.dump(seen, file)
'''.replace("RANK_VARIABLES", repr(RANK_VARIABLES))

# Known harmless differences.
KNOWN_DIFFERENCES = {
    "path": "at its end, the directory of the package muster",
    "gc": "objects from before the fork are frozen: collections skip them",
    "finders": "an additional one finds PyTorch",
    "open files": "for stacks, and for messages about lost output; with high numbers, not inherited by children",
}


def inspect(prefix: str, *command: str | Path, **env: str) -> dict[str, Any]:
    """Return the state that rank 0 sees, with the random numbers of all ranks in "random"."""
    Path("inspect_state.py").write_text(INSPECT)
    done = run(*command, SEEN=prefix, **env)
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(Path.cwd().glob(f"{prefix}[0-9]"))]
    return {**seen[0], "random": [rank["random"] for rank in seen]}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The state that a script sees under Muster's agent and under torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        clean(patch, tmp_path_factory.mktemp("states"))
        options = ("--nproc-per-node", "2", "--tee", "3", "--log-dir", "output")
        script = ("inspect_state.py", "torch", "a b", "")
        yield inspect("agent", *AGENT, *options, *script), inspect("torchrun", *TORCHRUN, *options, *script)


def test_a_script_sees_the_same_state_as_under_torchrun(states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    agent, torchrun = states
    assert agent.keys() == torchrun.keys()
    if sys.version_info < (3, 11):  # PyTorch does not import these modules, which the agent has imported
        agent["modules of torch"] = [name for name in agent["modules of torch"] if name not in ("ipaddress", "pkgutil")]
    for fact in torchrun.keys() - KNOWN_DIFFERENCES.keys() - {"random"}:
        assert agent[fact] == torchrun[fact], fact


def test_differences_from_torchrun_are_the_known_ones(states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    agent, torchrun = states
    assert (torchrun["gc"][:2], torchrun["gc"][2]) == (agent["gc"][:2], 0)
    assert agent["path"] == [*torchrun["path"], str(KIT / "src")]
    assert agent["finders"] == ["<distributed.agent.preloaded.HiddenModules object", *torchrun["finders"]]
    assert set(agent["open files"]) == {*torchrun["open files"], str(MIN_FILE_DESCRIPTOR), str(MIN_FILE_DESCRIPTOR + 1)}


def test_random_numbers_differ_between_ranks(states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """If a generator of Python, NumPy or PyTorch had equal states, all ranks would train on the same data."""
    for seen in states:
        for generator in zip(*seen["random"], strict=True):
            assert len(set(generator)) == 2, generator
            assert len(generator) == 2


SEEDED = """
import random, sys
import numpy
for generator in (random, numpy.random):
    generator.seed(1)
""" + RANK_MAIN  # fmt: skip


def test_generators_that_were_seeded_before_the_script_are_reseeded() -> None:
    Path("script.py").write_text("import random, numpy\nprint(random.random(), numpy.random.random())\n")
    draws = [run(sys.executable, "-c", SEEDED, str(KIT), "script.py").stdout.split() for _ in range(2)]
    assert [len(set(generator)) for generator in zip(*draws, strict=True)] == [2, 2]


@pytest.mark.parametrize(
    "command",
    [
        ["inspect_state.py"],
        ["sub/../inspect_state.py", "a b", "", "-x"],
        ["linked.py"],
        ["-m", "inspect_state"],
    ],
)
def test_a_script_sees_the_same_state_as_in_a_fresh_interpreter(command: list[str]) -> None:
    Path("sub").mkdir()
    Path("other").mkdir()
    Path("other/inspect_state.py").write_text(INSPECT)
    Path("linked.py").symlink_to("other/inspect_state.py")
    assert_same(inspect("rank", *RANK, *command), inspect("fresh", *FRESH, *command))


def assert_same(rank: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Compare two states. A rank also has the finder HiddenModules. It may lack runpy, which Python itself imports."""
    assert rank["finders"][1:] == fresh["finders"]
    assert set(rank["modules"]) <= set(fresh["modules"])
    assert rank["modules"] == fresh["modules"] or "runpy" in fresh["modules"]
    for fact in fresh.keys() - {"random", "finders", "modules"}:
        assert rank[fact] == fresh[fact], fact


def directory() -> str:
    Path("program").mkdir()
    Path("program/__main__.py").write_text(INSPECT)
    return "program"


def zip_file() -> str:
    zipapp.create_archive(directory(), "program.pyz")
    return "./program.pyz"


def compiled() -> str:
    Path("inspect_state.py").write_text(INSPECT)
    return py_compile.compile("inspect_state.py", "inspect_state.pyc", doraise=True) or ""


@pytest.mark.parametrize("program", [directory, zip_file, compiled])
def test_a_directory_zip_file_or_pyc_sees_the_same_state_as_in_a_fresh_interpreter(program: Callable[[], str]) -> None:
    name = program()
    assert_same(inspect("rank", *RANK, name), inspect("fresh", *FRESH, name))


def test_a_script_may_import_another_package_named_distributed() -> None:
    """Dask's package has that name."""
    Path("distributed").mkdir()
    Path("distributed/__init__.py").write_text("name = 'not Muster'\n")
    Path("script.py").write_text("import distributed\nprint(distributed.name)\n")
    assert run(*RANK, "script.py").stdout == "not Muster\n"


CHANGES_ENVIRONMENT = """
import os
os.environ.update(OMP_NUM_THREADS="3", TORCH_DISTRIBUTED_DEBUG="DETAIL", PYTORCH_JIT="0", NCCL_DEBUG="INFO")
import pprint
import torch
import numpy
print(pprint.name, input())
"""


def test_changes_to_variables_that_pytorch_has_read_are_reported_and_the_scripts_own_pprint_is_imported() -> None:
    Path("pprint.py").write_text("name = 'own'\n")
    Path("script.py").write_text(CHANGES_ENVIRONMENT)
    command = [*AGENT, "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "own typed\n"
    warned = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("warning: ")]
    file = str(Path("pprint.py").absolute())
    assert warned == ["OMP_NUM_THREADS", "PYTORCH_JIT", "TORCH_DISTRIBUTED_DEBUG", file]


# ---------------------------------------------------------------- processes that a script starts

LOADERS = """
import json, os
import torch
from torch.utils.data import DataLoader, Dataset

class Item:
    def __init__(self, value):
        self.value = value

class Items(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return Item(index * index)

def collate(items):
    return Item([item.value for item in items] + [os.environ["RANK"]])

if __name__ == "__main__":
    found = {}
    for method in ("spawn", "fork"):
        loader = DataLoader(Items(), 2, num_workers=1, collate_fn=collate, multiprocessing_context=method)
        found[method] = [batch.value for batch in loader if type(batch) is Item]
    with open("loaded.json", "w") as file:
        json.dump(found, file)
"""


def test_data_loaders_work_with_classes_of_the_script() -> None:
    """In a spawned worker, the script is the module __mp_main__, so the rank must unpickle classes of that module."""
    Path("loaders.py").write_text(LOADERS)
    done = run(*AGENT, "--nproc-per-node", "1", "loaders.py")
    assert done.returncode == 0, done.stderr
    batches = [[0, 1, "0"], [4, 9, "0"]]
    assert json.loads(Path("loaded.json").read_text()) == {"spawn": batches, "fork": batches}


# ---------------------------------------------------------------- arguments

ARGUMENTS: list[bytes] = [
    b"", b" ", b"--", b"-h", b"--help", b"-m", b"--nproc-per-node=3", b"--nnodes", b"${local_rank}", b"${rank}",
    b"`id`", b"$HOME", b"%(prog)s", b"{}", b"{0}", b"@file", b"~", b"*", b"a\nb", b"\r\n", b"\t", b"'", b'"', b"\\",
    b"\\n", "größer".encode(), "🚀".encode(), b"\xff\xfe", b"\x1b[31m", b"a=b", b"#", b"!!", b";", b"&&", b"|",
    b"x" * 10_000,
]  # fmt: skip


@settings(max_examples=300, deadline=None, database=None)
@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def collect(argument: bytes) -> None:
    ARGUMENTS.append(argument.replace(b"\0", b""))


def test_arguments_arrive_byte_for_byte() -> None:
    """Hundreds of strings in one launch of a module."""
    collect()
    Path("echo.py").write_text(
        "import os, sys\n"
        "open('arguments', 'wb').write(b''.join(os.fsencode(argument) + b'\\0' for argument in sys.argv[1:]))\n"
        "open('program', 'w').write(sys.argv[0])\n"
    )  # fmt: skip
    done = run(*WITHOUT_TORCH, "--nproc-per-node", "1", "-m", "echo", *map(os.fsdecode, ARGUMENTS))
    assert done.returncode == 0, done.stderr
    assert Path("arguments").read_bytes().split(b"\0")[:-1] == ARGUMENTS
    assert Path("program").read_text() == str(Path("echo.py").absolute())


# ---------------------------------------------------------------- exit of a script

EXITS = {
    "nothing": "",
    "exit 0": "import sys; sys.exit(0)",
    "exit None": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit True": "import sys; sys.exit(True)",
    "exit text": "import sys; sys.exit('a text')",
    "exit tuple": "raise SystemExit((1, 2))",
    "exit with the smallest number": "import sys; sys.exit(-2**63)",
    "exit with a tuple of a number": "import sys; sys.exit((3,))",
    "exit with an empty tuple": "import sys; sys.exit(())",
    "exit with a tuple is caught": "import sys\n"
    "try:\n    sys.exit((3,))\nexcept SystemExit as e:\n    print(e.code, e.args)",
    "exit with an integer that refuses &": "import sys\n"
    "class Own(int):\n    __and__ = __index__ = __int__ = None\nsys.exit(Own(7))",
    "exit with a mock of an integer": "import sys\n"
    "class Mock:\n    __class__ = int\n    __str__ = lambda self: 'mock'\nsys.exit(Mock())",
    "exit with a code that cannot be read": "class Own(SystemExit):\n"
    "    @property\n    def code(self):\n        1 / 0\nraise Own(3)",
    "exit text with no stderr": "import atexit, sys\natexit.register(print, 'bye')\n"
    "sys.stderr = None\nsys.exit('text')",
    "os._exit": "import os; os._exit(42)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "exception": "def f():\n    raise ValueError('bö')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
    "syntax": "x = (",
    "no module": "import nosuchmodule",
    "own hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', error)\n1 / 0",
    "own hook exits": "import atexit, sys\natexit.register(print, 'bye')\n"
    "def hook(*error):\n    raise SystemExit(5)\nsys.excepthook = hook\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'last')\nprint('main')",
    "atexit after exit": "import atexit, sys\natexit.register(print, 'bye')\nsys.exit(3)",
    "atexit after exception": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "thread": "import threading\ndef late():\n    threading.main_thread().join()\n    print('the thread ends')\n"
    "threading.Thread(target=late).start()\nimport atexit\natexit.register(print, 'atexit')\nprint('main')",
    "thread fails": "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='t')\nthread.start()",
    "unflushed": "import sys; sys.stdout.write('no newline')",
    "stdout closed": "import sys; sys.stdout.close(); sys.exit(3)",
    "stdout gone": "import sys; sys.stdout = None",
    "stderr closed": "import sys; sys.stderr.close()",
    "file on a full disk": "file = open('/dev/full', 'w'); file.write('lost')",
}
EXITS_WITH_OTHER_MESSAGES = {
    "exit with a large number": "import sys; sys.exit(2**70)",
    "exit text with stderr closed": "import atexit, sys\natexit.register(print, 'bye')\nsys.stderr.close()\n"
    "sys.exit('text')",
    "own hook fails": "import atexit, sys\natexit.register(print, 'bye')\nsys.excepthook = None\n1 / 0",
    "no hook": "import atexit, sys\natexit.register(print, 'bye')\ndel sys.excepthook\n1 / 0",
    "atexit exits": "import atexit, sys\natexit.register(print, 'bye')\natexit.register(sys.exit, 3)",
}


@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS.keys())
def test_a_script_exits_as_in_a_fresh_interpreter(body: str) -> None:
    Path("script.py").write_text(body + "\n", encoding="utf-8")
    rank, fresh = run(*RANK, "script.py"), run(sys.executable, "script.py")
    # Since 3.13 Python reports a file that cannot be closed, with the frame in which the object was deleted.
    stderr = re.sub(r'Traceback .*\n  File ".*/distributed/agent/worker.py", .*\n.*\n', "", rank.stderr)
    assert (rank.returncode, rank.stdout, stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_a_script_that_exits_with_a_large_number_is_a_failure() -> None:
    done = launch(1, "import sys\nsys.exit(2**70)")
    assert done.returncode == 255, done.stderr


@pytest.mark.parametrize("body", EXITS_WITH_OTHER_MESSAGES.values(), ids=EXITS_WITH_OTHER_MESSAGES.keys())
def test_a_script_exits_with_the_code_of_a_fresh_interpreter(body: str) -> None:
    Path("script.py").write_text(body + "\n")
    rank, fresh = run(*RANK, "script.py"), run(sys.executable, "script.py")
    assert (rank.returncode, rank.stdout) == (fresh.returncode, fresh.stdout)
    assert ("ZeroDivisionError" in rank.stderr) == ("ZeroDivisionError" in fresh.stderr)


def test_the_first_failure_is_found_if_two_nodes_record_the_same_rank_and_time() -> None:
    failure = {"rank": 1, "time": 5.0, "exit_code": 3, "ended_by_agent": False}
    codes = {"a": 3, "b": 4}
    records = {
        f"node_{name}.json": {"node": name, "failures": [failure | {"exit_code": code}]} for name, code in codes.items()
    }
    assert failure_records.first_failure(records)["exit_code"] == 3
    assert failure_records.first_failure(records, "b")["exit_code"] == 4


def test_an_error_file_that_a_full_disk_has_cut_does_not_hide_the_failure() -> None:
    Path("script.py").write_text(
        "import os, sys\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').close()\nsys.exit(7)\n"
    )
    done = run(*WITHOUT_TORCH, "--nproc-per-node", "1", "script.py")
    assert (done.returncode, "JSONDecodeError" in done.stderr) == (7, False), done.stderr
    assert "rank 0 (pid" in done.stderr


def test_ranks_start_with_few_file_descriptors() -> None:
    Path("script.py").write_text("print('started')\n")
    done = run("bash", "-c", 'ulimit -n 256 && exec "$@"', "bash", *WITHOUT_TORCH, "--nproc-per-node", "1", "script.py")
    assert (done.returncode, "started" in done.stdout + done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize(("end", "code"), [("", 0), ("import sys; sys.exit(3)", 3), ("1 / 0", 1)])
def test_files_left_open_are_flushed(end: str, code: int) -> None:
    """An interpreter closes open files when it exits; a forked process does not exit that way."""
    lines = ["text = open('text', 'w')", "text.write('a line')", "raw = open('raw', 'wb')", "raw.write(b'bytes')"]
    Path("script.py").write_text("\n".join([*lines, "closed = open('closed', 'w')", "closed.close()", end]) + "\n")
    assert run(*RANK, "script.py").returncode == code
    assert (Path("text").read_text(), Path("raw").read_text()) == ("a line", "bytes")


@pytest.mark.parametrize("arguments", [("-m", "trainer.cli"), ("site-packages/trainer/cli.py",)])
def test_files_that_an_installed_trainer_left_open_are_flushed(arguments: tuple[str, ...]) -> None:
    """The package of a launched program is the user's code, even if the package is installed."""
    package = Path("site-packages/trainer")
    package.mkdir(parents=True)
    (package / "helper.py").write_text("file = open('helper', 'w')\nfile.write('a line')\n")
    (package / "cli.py").write_text("import trainer.helper\nfile = open('main', 'w')\nfile.write('a line')\n")
    assert run(*RANK, *arguments, PYTHONPATH=str(package.parent)).returncode == 0
    assert (Path("main").read_text(), Path("helper").read_text()) == ("a line", "a line")


@pytest.mark.parametrize(("printed", "before"), [("\\r 10%\\r 20%", "\r 10%\r 20%\n"), ("100%\\n", "100%\n"), ("", "")])
def test_a_traceback_starts_on_a_new_line_after_a_progress_bar(printed: str, before: str) -> None:
    Path("script.py").write_text(f"import sys\nsys.stderr.write('{printed}')\n1 / 0\n")
    with open("err", "w") as err:  # as under the agent and srun
        subprocess.run([*RANK, "script.py"], stderr=err, timeout=TIMEOUT, check=False)
    assert Path("err").read_bytes().decode().startswith(f"{before}Traceback (most recent call last):\n")


def test_a_script_exits_by_sigint_on_keyboard_interrupt() -> None:
    Path("script.py").write_text("raise KeyboardInterrupt\n")
    assert run(*RANK, "script.py").returncode == run(sys.executable, "script.py").returncode == -signal.SIGINT


def test_an_exception_is_written_to_a_failure_record(tmp_path: Path) -> None:
    """The record is written without PyTorch, because the import of PyTorch may fail."""
    Path("errors").mkdir()
    Path("torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    Path("json.py").write_text("of the script\n")
    Path("script.py").write_text("def f():\n    import torch\nf()\n")
    done = run(*RANK, "script.py", MUSTER_RUN_DIR=str(tmp_path), MUSTER_NODE="n7", RANK="3", LOCAL_RANK="1")
    assert done.returncode == 1
    record = json.loads(Path("errors/rank_3.json").read_text())
    assert (record["rank"], record["local_rank"], record["node"]) == (3, 1, "n7")
    assert (record["exit_code"], record["exception"]) == (1, "ImportError")
    assert record["message"] == "libcudart.so is missing"
    assert record["traceback"] == done.stderr
    assert record.keys() == {
        "rank", "local_rank", "node", "pid", "time", "exit_code", "exception", "message", "traceback",
    }  # fmt: skip


def test_a_task_of_srun_gets_the_environment_that_torchrun_sets(tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "n[08-10]",
        "SLURMD_NODENAME": "n10", "SLURM_GTIDS": "4,5",
    }  # fmt: skip
    expected = {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n08",
        "MASTER_PORT": "20001", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": tmp_path.name, "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torchrun sets 1
    }  # fmt: skip
    Path("script.py").write_text(
        f"import os\nassert {expected}.items() <= os.environ.items()\nraise ValueError('boom')\n"
    )
    task = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "slurm.task"]
    task += ["rank", str(tmp_path), "8", "script.py"]
    env = {**os.environ, "MUSTER_RUN_DIR": str(tmp_path), "MUSTER_NODE": "n10", **step}
    with subprocess.Popen(task, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdin and process.stdout
        while b'"end"' not in process.stdout.readline():
            pass
        process.stdin.close()  # confirms to the task that its final report was received
    assert process.returncode == 1
    assert Path("ranks/n10/slurm/attempt_0/1/stderr.log").read_text().endswith("ValueError: boom\n")
    record = json.loads(Path("errors/rank_5.json").read_text())
    assert (record["rank"], record["local_rank"], record["node"]) == (5, 1, "n10")


# ---------------------------------------------------------------- end of a launch

EQUAL_RANKS = (
    "agent: warning: {} ranks ran, and none joined a process group through MASTER_PORT: they did the same work, unless "
    "the script divides it by RANK\n"
)


def command(ranks: int, body: str, agent: list[str]) -> list[str]:
    """Write the script; return the command line that starts it. The current directory is the run directory."""
    Path("errors").mkdir()
    Path("script.py").write_text("import os, signal, sys\nrank = int(os.environ['RANK'])\n" + body)
    return [*agent, "--nproc-per-node", str(ranks), "--log-dir", "ranks", "--tee", "3", "script.py"]


def launch(ranks: int, body: str, agent: list[str] = WITHOUT_TORCH) -> subprocess.CompletedProcess[str]:
    """Run this script with the agent, on node n7."""
    return run(*command(ranks, body, agent), MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7")


@contextmanager
def started(ranks: int, body: str, agent: list[str] = WITHOUT_TORCH, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running launch. Each rank must write its number to the named pipe `ready` when it is ready."""
    os.mkfifo("ready")
    ready = os.open("ready", os.O_RDWR)
    launch = command(ranks, body, agent)
    with subprocess.Popen(launch, env={**os.environ, **env}, stdin=subprocess.PIPE) as process:
        try:
            for _ in range(ranks):
                os.read(ready, 1)
            yield process
        finally:
            process.kill()
            os.close(ready)


@pytest.mark.parametrize(("set_by_user", "expected"), [({}, "3"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1")])
def test_a_rank_exits_without_cleaning_up_when_a_collective_of_nccl_has_failed(
    set_by_user: dict[str, str], expected: str
) -> None:
    done = run(
        *command(1, "print('mode', os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'])", WITHOUT_TORCH), **set_by_user
    )
    assert f"mode {expected}" in done.stdout


PATCHED_SOURCE = """
import functools, runpy, sys, threading

def first(self, *arguments, **options):
    OWNER.METHOD = method
    ACTION
    return method(self, *arguments, **options)

if __name__ == "__main__":
    sys.path[:0] = [KIT, KIT + "/tests/lab"]
    import agent_without_torch
    from distributed.agent.agent import Agent, ForkServer, Rank
    method = OWNER.METHOD
    OWNER.METHOD = functools.wraps(method)(first)
    del sys.argv[0], sys.path[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def patched_agent(method: str, action: str) -> list[str]:
    """An agent that runs this action before its first call of the method, to control the order of events."""
    owner, _, name = method.partition(".")
    names = {"OWNER": owner, "METHOD": name, "ACTION": action, "KIT": repr(str(KIT))}
    Path("patched_agent.py").write_text(re.sub("[A-Z]{3,}", lambda match: names[match[0]], PATCHED_SOURCE))
    return [AGENT[0], "patched_agent.py", *AGENT[1:]]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failures() -> list[tuple[int, int, bool]]:
    """(rank, exit code, ended by the agent) in the agent's record."""
    written = json.loads(Path("errors/node_n7.json").read_text())
    assert written.keys() == {"node", "failures"}
    assert written["node"] == "n7"
    for failure in written["failures"]:
        assert failure.keys() == {"rank", "local_rank", "pid", "time", "exit_code", "ended_by_agent"}
    return [(failure["rank"], failure["exit_code"], failure["ended_by_agent"]) for failure in written["failures"]]


def test_a_killed_rank_is_recorded_with_its_exit_code() -> None:
    done = launch(1, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 137
    assert failures() == [(0, 137, False)]
    assert f"agent: rank 0 (pid {pid_of(0)}) failed with exit code 137\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_exits_with_0_by_exit_or_exec_is_a_success() -> None:
    exits = ["pass", "os._exit(0)", "os.execlp('true', 'true')"]
    done = launch(3, f"exec({exits}[rank])\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("ranks", "body", "warning"),
    [
        (2, "print('done')", EQUAL_RANKS.format(2)),
        (1, "print('done')", ""),
        (2, "from torch.distributed import *; init_process_group('gloo'); destroy_process_group()", ""),
        (2, "import subprocess; exec(CHILD)", ""),  # a program that the script starts joins the others
    ],
)
def test_ranks_that_never_join_a_process_group_are_named_once(ranks: int, body: str, warning: str) -> None:
    child = "from torch.distributed import *; init_process_group('gloo'); barrier()"
    call = f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = launch(ranks, body.replace("CHILD", repr(call)), AGENT)
    assert (done.returncode, done.stderr) == (0, warning)


def test_a_failed_run_is_not_said_to_have_done_the_same_work_twice() -> None:
    assert "the same work" not in launch(2, "sys.exit(rank)").stderr


def test_output_of_a_rank_that_exits_at_once_is_copied(tmp_path: Path) -> None:
    output, shown = tmp_path / "stdout.log", RecordedWrites()

    class Finished(threading.Event):
        """During wait() the rank starts, prints and exits."""

        def wait(self, timeout: float | None = None) -> bool:
            output.write_text("last line\n")
            self.set()
            return True

    follow("[n1:0] ", str(output), shown.stream, Finished(), 0.1)
    assert shown.getvalue() == b"[n1:0] last line\n"


class RecordedWrites(io.BytesIO):
    """Records the sizes of writes to `stream`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.stream: Any = SimpleNamespace(buffer=self)

    def write(self, text: Any) -> int:
        self.sizes.append(len(text))
        return super().write(text)


def followed(output: bytes, *options: Any) -> RecordedWrites:
    """What follow() copies of this output of a rank that has exited."""
    Path("stdout.log").write_bytes(output)
    shown, finished = RecordedWrites(), threading.Event()
    finished.set()
    follow("[n1:0] ", "stdout.log", shown.stream, finished, 0.1, *options)
    return shown


def test_many_lines_are_copied_in_few_atomic_writes() -> None:
    """A pipe may interleave a write of more than PIPE_BUF bytes with lines of another rank."""
    lines = [f"größe {number}" for number in range(10_000)]
    shown = followed("\n".join(lines).encode())
    assert shown.getvalue().decode() == "".join(f"[n1:0] {line}\n" for line in lines)
    assert max(shown.sizes) <= select.PIPE_BUF
    assert len(shown.sizes) < 100


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (b"", []),
        (b"\r 10%\r 20%\ndone\r", [b" 10%\r", b" 20%", b"done"]),
        (b"caf\xe9 \0", [b"caf\xe9 \0"]),
        (b"x" * 10_000 + b"\ny", [b"x" * 10_000, b"y"]),
    ],
)
def test_the_bytes_of_all_lines_are_copied_and_progress_updates_end_with_cr_lf(
    output: bytes, lines: list[bytes]
) -> None:
    assert followed(output).getvalue() == b"".join(b"[n1:0] " + line + b"\n" for line in lines)


def test_output_may_be_split_at_any_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.agent.rank_output.BLOCK", 1)
    assert followed("ö\r\n\rz\n".encode()).getvalue().decode() == "[n1:0] ö\n[n1:0] z\n"


def test_an_update_of_a_progress_bar_is_copied_while_the_rank_prepares_the_next_one() -> None:
    shown, finished = RecordedWrites(), threading.Event()
    Path("stderr.log").write_bytes(b"\r10%")
    thread = threading.Thread(target=follow, args=("[n1:0] ", "stderr.log", shown.stream, finished, 0.01))
    thread.start()
    end = time.monotonic() + TIMEOUT
    while b"10%" not in shown.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    assert shown.getvalue() == b"[n1:0] 10%\r\n"
    with open("stderr.log", "ab") as output:
        output.write(b"\n")
    finished.set()
    thread.join()
    assert shown.getvalue() == b"[n1:0] 10%\r\n[n1:0] 10%\n"


def pid_of(rank: int) -> int:
    written = json.loads(Path("errors/node_n7.json").read_text())
    pids: dict[int, int] = {failure["rank"]: failure["pid"] for failure in written["failures"]}
    return pids[rank]


SURVIVORS = """
def synchronise(read, write):
    # Rank 1 continues when ranks 0 and 2 have opened their named pipes.
    if rank == 1:
        open(read).read()
    else:
        open(write, "w").close()
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
synchronise("zero", "zero") if rank != 2 else None
synchronise("two", "two") if rank != 0 else None
if rank == 1:
    os._exit(42)
while True:
    signal.pause()
"""


def test_after_a_failure_the_other_ranks_are_stopped_and_all_exit_codes_are_recorded() -> None:
    os.mkfifo("zero")
    os.mkfifo("two")
    done = launch(3, SURVIVORS)
    assert done.returncode == 42
    assert failures() == [(0, 137, True), (1, 42, False), (2, 143, True)]
    assert done.stderr.count("failed with exit code") == 1, "stopped ranks are not reported"
    assert [file.name for file in Path("errors").iterdir()] == ["node_n7.json"]
    assert not [rank for rank in range(3) if alive(pid_of(rank))]


FAILS_AFTER_RANK_1 = """
if rank:
    os._exit(42)
open("now").close()
raise RuntimeError("Connection closed by peer")
"""


def test_a_failure_wakes_the_agent_and_the_other_ranks_have_time_to_write_failure_records() -> None:
    """The grace time is long here; the launch ends as soon as all ranks have exited."""
    os.mkfifo("now")
    agent = patched_agent("Agent._wait", f"open('now', 'w').close(); arguments = ({TIMEOUT},)")
    done = launch(2, FAILS_AFTER_RANK_1, [*agent, "--monitor-interval", "3600"])
    assert done.returncode == 42
    assert failures() == [(0, 1, False), (1, 42, False)]
    assert json.loads(Path("errors/rank_0.json").read_text())["message"] == "Connection closed by peer"
    assert done.stderr.count("RuntimeError: Connection closed by peer") == 1, "torchrun would print it a second time"


EXITS_EARLY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 1:
    os._exit(0)

def train():
    dist.all_reduce(torch.ones(1))

train()
"""


# What keeps a rank alive after its exception or sys.exit().
HOLDS = {
    "thread": "import threading; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "exit handler": "import atexit; atexit.register(time.sleep, 1000)",
    "destructor": "held = type('Held', (), {'__del__': lambda self: time.sleep(1000)})()",
    "native code with the GIL": "import atexit, ctypes; atexit.register(ctypes.PyDLL(None).sleep, 1000)",
    "exception hook": "sys.excepthook = lambda *error: time.sleep(1000)",
    "child process": "import multiprocessing; multiprocessing.Process(target=time.sleep, args=(1000,)).start()",
    "thread that survives SIGTERM": (
        "import threading; signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()"
    ),
}
# Rank 1 fails as soon as rank 0 waits for a signal. Rank 0 writes the time at which it was stopped.
FAILS_AND_REMAINS = """
import time
if rank:
    open("waits").close()
    {}
    open("failed_at", "w").write(str(time.time()))
    {}
def stopped(*_):
    open("stopped_at", "w").write(str(time.time()))
    os._exit(0)
signal.signal(signal.SIGTERM, stopped)
open("waits", "w").close()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("held_by", "run_directory"), [*((name, True) for name in HOLDS), ("thread", False)])
def test_a_rank_that_has_raised_and_does_not_exit_is_a_failure_at_once(held_by: str, run_directory: bool) -> None:
    os.mkfifo("waits")
    body = FAILS_AND_REMAINS.format(HOLDS[held_by], 'raise ValueError("boom")')
    if run_directory:
        done = launch(2, body)
        assert failures() == [(1, 1, False)]
        found = verdict.decide(Path())
        assert (found.exit_code, found.rank, found.exception, found.message) == (1, 1, "ValueError", "boom")
    else:
        done = run(*command(2, body, WITHOUT_TORCH))
    assert done.returncode == 1
    assert float(Path("stopped_at").read_text()) - float(Path("failed_at").read_text()) < 3  # REPORT_GRACE is 1 s
    assert "rank 1 (pid" in done.stderr
    assert "failed and does not exit: a thread, an exit handler or a destructor holds it; killing it\n" in done.stderr


def test_a_rank_that_has_called_sys_exit_and_does_not_exit_is_a_failure_with_its_exit_code() -> None:
    os.mkfifo("waits")
    done = launch(2, FAILS_AND_REMAINS.format(HOLDS["thread"], "print('Traceback', file=sys.stderr); sys.exit(3)"))
    assert (done.returncode, failures()) == (3, [(1, 3, False)])
    assert float(Path("stopped_at").read_text()) - float(Path("failed_at").read_text()) < 3
    assert verdict.decide(Path()).cause == "rank 1 on n7 exited with code 3"


RAISES = "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef f():\n    {}\nf()\n"


def test_the_first_failure_is_written_to_the_error_file_of_the_agent_as_torchrun_does(tmp_path: Path) -> None:
    """torchrun needs @record in the script.

    Only rank 1 fails, because after two failures torchrun might name a rank that torchrun itself has stopped.
    """
    found = []
    Path("errors").mkdir()
    raises = 'if __import__("os").environ["RANK"] == "1": raise ValueError("boom")'
    Path("script.py").write_text(RAISES.format(raises))
    for program in (AGENT, TORCHRUN):
        done = run(*program, "--nproc-per-node", "2", "script.py", TORCHELASTIC_ERROR_FILE="error.json")
        assert done.returncode == 1, done.stderr
        found.append(json.loads(Path("error.json").read_text())["message"])
    assert found[0].keys() == found[1].keys()
    assert found[0]["extraInfo"].keys() == found[1]["extraInfo"].keys()
    for message in found:
        assert (message["message"], message["errorCode"]) == ("ValueError: boom", 1)
        assert 'raise ValueError("boom")' in message["extraInfo"]["py_callstack"]
        assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < TIMEOUT


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 0 failed with exit code 137"),
        ("sys.exit(3)", 3, "rank 0 failed with exit code 3"),
    ],
)
def test_the_error_file_has_an_exit_code_if_there_is_no_exception(body: str, code: int, message: str) -> None:
    done = run(*command(1, body, WITHOUT_TORCH), TORCHELASTIC_ERROR_FILE="error.json")
    assert done.returncode == code
    written = json.loads(Path("error.json").read_text())["message"]
    assert (written["message"], written["errorCode"]) == (message, code)


def test_a_failed_rank_has_time_for_its_exit_handlers() -> None:
    """SIGTERM, which stops the other ranks after a second, would interrupt the handlers."""
    os.mkfifo("waits")
    handler = (
        "import atexit; atexit.register(lambda: (os.path.exists('stopped_at') or time.sleep(2), open('end', 'w')))"
    )
    done = launch(2, FAILS_AND_REMAINS.format(handler, "1 / 0"))
    assert done.returncode == 1
    assert Path("end").exists()
    assert "does not exit" not in done.stderr


def test_a_rank_that_succeeded_and_does_not_exit_is_no_failure() -> None:
    """The agent is stopped when the rank is in its exit handler."""
    body = "import atexit\natexit.register(lambda: (open('ready', 'w').write('x'), signal.pause()))\nsys.exit(0)"
    with started(1, body, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        agent.terminate()
        assert agent.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert failures() == [(0, 143, True)]
    assert not Path("errors/rank_0.json").exists()


def test_a_rank_is_recorded_if_the_stop_request_arrives_while_it_starts() -> None:
    agent = patched_agent("Rank.__init__", "import os; os.kill(os.getpid(), 15)")
    done = launch(1, "signal.pause()", agent)
    assert done.returncode == 128 + signal.SIGTERM
    assert failures() == [(0, 143, True)]


def test_an_exit_code_in_a_failure_record_does_not_hide_an_exception_in_the_log() -> None:
    Path("errors").mkdir()
    record = {"rank": 0, "local_rank": 0, "node": "n7", "pid": 7, "time": 1.0, "exit_code": 1}
    Path("errors/rank_0.json").write_text(json.dumps(record))
    traceback = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: boom"]
    Path("node_n7.log").write_text("".join(f"[n7:0] {line}\n" for line in traceback))
    Path("node_n7.exit").write_text("1\n")
    found = verdict.decide(Path())
    assert (found.exit_code, found.exception, found.message) == (1, "ValueError", "boom")


def test_a_rank_that_exited_with_0_during_a_collective_of_another_is_the_cause_in_the_verdict() -> None:
    done = launch(2, EXITS_EARLY, AGENT)
    assert done.returncode == 1
    record = json.loads(Path("errors/node_n7.json").read_text())
    assert ([failure["rank"] for failure in record["failures"]], record["succeeded"]) == ([0], [1])
    assert verdict.decide(Path()).cause == (
        "rank 1 on n7 ended with exit code 0 while rank 0 on n7 was in a collective at script.py:11 in train()"
    )


def test_a_rank_that_exits_with_0_on_sigterm_is_not_recorded_as_having_exited_early() -> None:
    os.mkfifo("ready")
    done = launch(
        2,
        "if rank:\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n    open('ready', 'w').close()\n"
        "    signal.pause()\nopen('ready').close()\nsys.exit(3)\n",
    )
    assert done.returncode == 3
    assert failures() == [(0, 3, False)]


EXITS_WITH_0 = """
import atexit, time
def wait_for_agent():
    while not os.path.exists("errors/node_n7.json"):
        time.sleep(0.01)
    os._exit(0)
atexit.register(wait_for_agent)
1 / 0
"""


def test_a_rank_that_has_recorded_a_failure_has_not_succeeded_even_if_it_exits_with_0() -> None:
    done = launch(1, EXITS_WITH_0)
    assert done.returncode == 1
    assert failures() == [(0, 1, False)]  # and no rank that succeeded


WAIT_FOR_RANK_1 = "import os; os.waitid(os.P_PID, self.ranks[1].process.pid, os.WEXITED | os.WNOWAIT)"


def test_a_rank_that_fails_just_after_a_check_of_the_ranks_is_recorded() -> None:
    os.mkfifo("go")
    agent = patched_agent("Agent._first_failure", "open('go', 'w').close(); " + WAIT_FOR_RANK_1)
    done = launch(2, "if rank:\n    open('go').close()\n    os._exit(42)\nsignal.pause()\n", agent)
    assert done.returncode == 42
    assert failures() == [(0, 143, True), (1, 42, False)]


def test_a_stop_signal_during_the_exchange_of_records_does_not_change_the_exit_code() -> None:
    agent = patched_agent("Agent.exchange_records", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    done = launch(1, "sys.exit(42)", agent)
    assert done.returncode == 42
    assert "Traceback" not in done.stderr


HANDLES_TERM = """
import time
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
with open("ready", "w") as ready:
    ready.write(str(rank))
if rank == 0:
    sys.exit()
while not received:  # a signal that comes before a pause() would not end it
    time.sleep(0.01)
"""


def is_rank(process: psutil.Process) -> bool:
    """Return whether the process is a running rank."""
    try:
        return "RANK" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_a_run_succeeds_if_all_ranks_exit_with_0_in_spite_of_a_stop_signal() -> None:
    """The agent receives SIGTERM when rank 0 has exited without leaving a process, and rank 1 still runs."""
    with started(2, HANDLES_TERM, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        while sum(map(is_rank, psutil.Process(agent.pid).children())) > 1:
            time.sleep(0.001)
        agent.terminate()
        assert agent.wait(TIMEOUT) == 0, "all ranks ended with 0"


FAILS_THEN_WAITS = """
if rank == 0:
    open("other", "rb").read()  # until rank 1 is ready
with open("ready", "w") as ready:
    ready.write(str(rank))
if rank == 0:
    sys.exit(3)
open("other", "wb").close()
while True:
    signal.pause()
"""


def test_a_signal_while_the_agent_reaps_ranks_does_not_lose_a_failure() -> None:
    wait = "os.waitid(os.P_PID, self.ranks[0].process.pid, os.WEXITED | os.WNOWAIT)"
    patched = patched_agent("Agent.reap_ranks", f"import os, signal; {wait}; os.kill(os.getpid(), signal.SIGTERM)")
    os.mkfifo("other")
    with started(2, FAILS_THEN_WAITS, patched, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        assert agent.wait(TIMEOUT) == 143
    assert failures() == [(0, 3, False), (1, 143, True)]


# Rank 0 exits after rank 1. If the agent sends a second SIGTERM when rank 1 exits, rank 0 records this signal.
STOPPED_ON_REQUEST = """
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGTERM, lambda number, frame: None)
end = open("end", "w" if rank else "r")
with open("ready", "w") as ready:
    ready.write(str(rank))
received = os.read(read, 1)
if not rank:
    end.read()
os.set_blocking(read, False)
try:
    received += os.read(read, 9)
except BlockingIOError:
    pass
with open(f"signals_{rank}", "wb") as file:
    file.write(received)
sys.exit(75)
"""


def test_each_rank_gets_one_sigterm_and_the_agent_exits_with_75_if_all_ranks_exit_with_75() -> None:
    os.mkfifo("end")
    os.mkfifo("started")
    patched = patched_agent("Agent._watch", "open('started', 'w').close()")
    with started(2, STOPPED_ON_REQUEST, patched, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        Path("started").read_text()  # until then, the agent may not know the pids of the ranks
        agent.terminate()
        assert agent.wait(TIMEOUT) == 75
    assert [list(Path(f"signals_{rank}").read_bytes()) for rank in range(2)] == [[signal.SIGTERM]] * 2
    assert {code for _, code, _ in failures()} == {75}


STOPS_ONE_BY_ONE = """
if rank:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(75))
    open("ready", "w").close()
    signal.pause()
open("ready").close()
os._exit(75)
"""


def test_a_stop_request_that_arrives_just_before_the_agent_waits_for_checkpoints_is_passed_on_at_once() -> None:
    os.mkfifo("ready")
    request = f"import os; os.kill(os.getpid(), {signal.SIGTERM.value}); self._server.wakeup.wait(0)"
    patched = patched_agent("Agent._wait", f"{request}; arguments = (3600,)")
    assert launch(2, STOPS_ONE_BY_ONE, patched).returncode == 75
    assert {code for _, code, _ in failures()} == {75}


IGNORES_SIGNALS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(f"pid_{rank}", "w") as file:
    file.write(str(os.getpid()))
with open("ready", "w") as ready:
    ready.write(str(rank))
while True:
    signal.pause()
"""


def test_no_rank_remains_when_the_agent_is_killed() -> None:
    """The agent runs under the supervisor, and the ranks ignore SIGTERM and SIGINT."""
    node = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/module.py"), "launch.supervisor"]
    node += ["run", "--dir", os.getcwd(), "--name", "n7", "--"]
    with started(2, IGNORES_SIGNALS, [*node, *WITHOUT_TORCH]) as launcher:
        pids = [int(Path(f"pid_{rank}").read_text()) for rank in range(2)]
        assert all(map(alive, pids))
        os.kill(json.loads(Path("node_n7.pid").read_text())["command"]["pid"], signal.SIGKILL)
        assert launcher.wait(TIMEOUT) == 137
    while any(map(alive, pids)):  # they have received SIGKILL
        time.sleep(0.01)


# ---------------------------------------------------------------- fallback to torchrun's agent


def test_torchruns_agent_runs_the_script_if_it_has_an_option_that_musters_agent_lacks() -> None:
    """The script has default signal handlers even if the caller ignores signals."""
    Path("script.py").write_text("import signal, sys\nprint(signal.getsignal(signal.SIGUSR2).name, *sys.argv[1:])\n")
    options = ["--role", "other", "--pass-local-rank", "--nproc-per-node", "1"]
    done = run(
        "env", "--ignore-signal=USR1,USR2,ALRM", *WITHOUT_TORCH, *options, "--", "script.py", "--pass-local-rank"
    )
    assert (done.returncode, done.stdout) == (0, "SIG_DFL --local-rank=0 --pass-local-rank\n"), done.stderr
    assert "agent: unrecognized arguments: --role; using --agent torchrun\n" in done.stderr


def test_a_wrong_call_is_refused_by_torchrun() -> None:
    done = run(*WITHOUT_TORCH, "--nprocs", "2", "script.py")
    assert done.returncode == 2
    assert "error: unrecognized arguments: --nprocs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "env", "reason"),
    [
        ("--no-python program", {}, "unrecognized arguments: --no-python"),
        ("--redirects 3 script.py", {}, "unrecognized arguments: --redirects"),
        ("--numa-binding node script.py", {}, "unrecognized arguments: --numa-binding"),
        ("--duplicate-stdout-filters apple script.py", {}, "unrecognized arguments: --duplicate-stdout-filters"),
        ("--nnodes 1:2 script.py", {}, "argument --nnodes: invalid int value: '1:2'"),
        ("--nnodes 0 script.py", {}, "--nnodes 0"),
        ("--nproc-per-node gpu script.py", {}, "argument --nproc-per-node/--nproc_per_node: invalid int value: 'gpu'"),
        ("--nproc-per-node 0 script.py", {}, "--nproc-per-node 0"),
        ("--max-restarts 1 script.py", {}, "argument --max-restarts: invalid choice: '1' (choose from "),
        ("--rdzv-conf join_timeout=5 script.py", {}, "--rdzv-conf join_timeout=5"),
        ("--tee 0:3 script.py", {}, "argument -t/--tee: invalid int value: '0:3'"),
        ("--tee 1 script.py", {}, "--tee 1"),
        ("script.py", {"PET_NNODES": "1"}, "PET_NNODES is set"),
        ("script.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set"),
        (
            "script.py",
            {"PYTHON_EXEC": "/usr/bin/other"},
            f"PYTHON_EXEC=/usr/bin/other differs from the agent's Python {sys.executable}",
        ),
    ],
)
def test_unsupported_options_are_left_to_torchruns_agent(arguments: str, env: dict[str, str], reason: str) -> None:
    with pytest.raises(Unsupported) as found:
        parse(arguments.split(), env)
    assert str(found.value).startswith(reason)


def test_the_options_of_musters_launchers_are_supported() -> None:
    common = "--log-dir ranks/n1 --tee 3 -- script.py --tee 0:3"
    one = parse(
        f"--standalone --local-addr 127.0.0.1 --nproc-per-node 8 {common}".split(), {"PYTHON_EXEC": sys.executable}
    )
    assert (one.nnodes, one.nproc_per_node, one.master_port, one.tee, one.join_timeout) == (1, 8, 0, 3, 600)
    assert (one.training_script, one.training_script_args) == ("script.py", ["--tee", "0:3"])
    several = "--rdzv-conf timeout=30 --rdzv-id run --nnodes 2 --node-rank 1 --nproc_per_node=8 --master-addr node1"
    two = parse(
        f"--pass-local-rank {several} --master-port 20001 --monitor-interval=1 -m module --no-python".split(), {}
    )
    assert (two.nnodes, two.node_rank, two.master_addr, two.master_port) == (2, 1, "node1", 20001)
    assert (two.rdzv_id, two.join_timeout, two.pass_local_rank, two.module) == ("run", 30, True, True)
    assert (two.training_script, two.training_script_args) == ("module", ["--no-python"])


WAITS_THEN_EXITS = """
if "TORCHELASTIC_RESTART_COUNT" in os.environ:
    with open("ready", "w") as ready:
        ready.write(str(rank))
    os.open("end", os.O_RDONLY)
    sys.exit(3)
"""


def server_of(agent: int) -> psutil.Process:
    """The fork server of an agent whose ranks run, once it waits for requests: before, the agent needs its reply."""
    (server,) = (child for child in psutil.Process(agent).children() if "agent" in " ".join(child.cmdline()))
    while server.children() or server.status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    return server


def test_ranks_survive_a_killed_fork_server() -> None:
    os.mkfifo("end")
    with started(1, WAITS_THEN_EXITS) as agent:
        server_of(agent.pid).kill()
        Path("end").write_text("")
        assert agent.wait(TIMEOUT) == 3


def test_a_killed_fork_server_is_reported_if_ranks_have_to_be_started() -> None:
    done = launch(1, "", patched_agent("ForkServer.fork", "import os; os.kill(self.pid, 9)"))
    assert done.returncode == 1
    assert re.fullmatch(r"agent: fork server \(pid \d+\) was killed by signal 9\n", done.stderr), done.stderr


def test_a_stopped_fork_server_does_not_delay_the_end_of_a_run() -> None:
    os.mkfifo("end")
    with started(1, WAITS_THEN_EXITS.replace("sys.exit(3)", "sys.exit(0)")) as agent:
        server_of(agent.pid).suspend()
        Path("end").write_text("")
        assert agent.wait(TIMEOUT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_agents_start_ends_it_without_a_traceback(number: signal.Signals) -> None:
    """The signal arrives after the fork server has started, while the agent imports torchrun."""
    os.mkfifo("started")
    Path("paused_agent.py").write_text(PAUSED_AGENT.replace("KIT", repr(str(KIT))))
    Path("script.py").write_text("")
    command = [AGENT[0], "paused_agent.py", *AGENT[1:], "script.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as agent:
        with open("started") as file:
            server = psutil.Process(int(file.read()))
        os.killpg(agent.pid, number)
        assert agent.communicate(timeout=TIMEOUT)[1] == b""
        assert agent.returncode == -number
        server.wait(TIMEOUT)


PAUSED_AGENT = """
import os, runpy, signal, sys

class PausedImport:
    def find_spec(self, name, path=None, target=None):
        if name == "distributed.agent.agent":
            with open("started", "w") as file:
                file.write(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read())
            signal.pause()

sys.path.insert(0, KIT)
sys.meta_path.insert(0, PausedImport())
del sys.argv[0], sys.path[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# ---------------------------------------------------------------- addresses on which a run listens

LISTEN = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, os.getpid())
names = []
for file in [file for pid in [*ranks, os.getppid()] for file in Path(f"/proc/{pid}/fd").iterdir()]:
    try:
        names.append(os.readlink(file))
    except FileNotFoundError:  # closed meanwhile
        pass
inodes = {name[8:-1] for name in names if name.startswith("socket:[")}
lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/self/net", file).read_text().splitlines()[1:]]
addresses = sorted({fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes})
if dist.get_rank() == 0:
    print(json.dumps([os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_USE_AGENT_STORE"], *addresses]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LOOPBACK = "0100007F"  # as in proc_pid_net(5)


@pytest.mark.parametrize(
    ("options", "address", "listening"),
    [
        (["--standalone"], "127.0.0.1", [LOOPBACK]),
        (["--master-addr", "127.0.0.1"], "127.0.0.1", [LOOPBACK]),
        (["--master-addr", "node1.invalid"], "127.0.0.1", [LOOPBACK]),
        (["--master-addr", "::1"], "127.0.0.1", [LOOPBACK]),
    ],
)
def test_a_run_on_one_node_listens_on_loopback_only(options: list[str], address: str, listening: list[str]) -> None:
    if options != ["--standalone"]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            options = [*options, "--master-port", str(free.getsockname()[1])]
    Path("listen.py").write_text(LISTEN)
    done = run(*AGENT[:2], *options, "--nproc-per-node", "2", "--", "listen.py", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo] ")]  # PyTorch 2.10 prints these
    assert json.loads("".join(printed)) == [address, "True", *listening]


# ---------------------------------------------------------------- without processes


@pytest.mark.parametrize(
    ("failures", "code", "stopped"),
    [
        ([], 1, False),
        ([(1.0, 42, False)], 42, False),
        ([(2.0, 3, False), (1.0, 42, False)], 42, False),
        ([(2.0, 3, False), (1.0, 143, True)], 3, False),
        ([(2.0, 75, False), (1.0, 75, False)], 75, True),
        ([(2.0, 75, False), (1.0, 75, True)], 75, True),
        ([(2.0, 75, False), (1.0, 1, False)], 1, False),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure_not_caused_by_the_agent(
    failures: list[tuple[float, int, bool]], code: int, stopped: bool
) -> None:
    agent = object.__new__(Agent)
    agent.rendezvous = cast(Rendezvous, SimpleNamespace(membership=None))
    agent.failures = {rank: RankFailure(rank, rank, 100 + rank, *failure) for rank, failure in enumerate(failures)}
    agent.records = {}
    assert agent.exchange_records() == code
    assert agent.all_stopped_on_request() == stopped


@pytest.mark.parametrize(
    ("arguments", "before", "after", "printed"),
    [
        (["--nproc-per-node", "4", "script.py"], None, "2", "OMP_NUM_THREADS=2 for each of 4 ranks on 8 cores\n"),
        (["--nproc-per-node", "3", "--", "x.py", "--nproc-per-node", "1"], None, "2",
         "OMP_NUM_THREADS=2 for each of 3 ranks on 8 cores\n"),
        (["--node-rank", "1", "--nproc-per-node", "4", "script.py"], None, "2", ""),
        (["--nproc-per-node", "4", "script.py"], "7", "7", ""),
        (["script.py"], None, "8", "OMP_NUM_THREADS=8 for each of 1 rank on 8 cores\n"),
    ],
)  # fmt: skip
def test_each_rank_gets_its_share_of_the_cores(
    arguments: list[str], before: str | None, after: str | None, printed: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """On a simulated machine with 8 cores."""
    monkeypatch.setattr(threads, "read_cores", lambda: Cores(8, 8))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if before:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    entry = runpy.run_path(str(KIT / "scripts/lib/agent.py"))
    entry["recorded_imports"].stop()
    entry["choose_threads"](parse(arguments))
    assert os.environ.get("OMP_NUM_THREADS") == after
    assert capsys.readouterr().err == printed
