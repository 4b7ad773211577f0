"""A script must not be able to tell that it was started by the kit's agent, and a launch must end as its ranks did.

The agent forks its workers from one warm process, which saves seconds and could betray itself in a hundred ways. Held
here: against a fresh interpreter and against torchrun itself, a script finds the same; its words arrive byte for
byte; it ends as Python ends; and when a rank dies, its exit code is the agent's, the others are ended, and errors/
says who died of what.
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
import subprocess
import sys
import threading
import time
import zipapp
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from distributed.agent import agent
from distributed.agent.agent import Agent, RankFailure, follow
from distributed.agent.fork_server import ForkedProcess, Wakeup, signals
from distributed.host.resources import Cores
from distributed.host.stacks import MIN_FILE_DESCRIPTOR
from distributed.launch import threads
from distributed.runs import verdict

KIT = Path(__file__).resolve().parents[2]
FAST = [sys.executable, str(KIT / "scripts/lib/agent.py"), "--standalone"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# What each of the agent's forks does, in an interpreter without PyTorch: it is quick, and any trace of ours shows.
WORK = """
import sys
fresh = frozenset(sys.modules) - {"linecache"}  # of -c
_, kit, *words = sys.argv
path, sys.path[0] = tuple(sys.path[1:]), kit
from distributed.agent.preloaded import Preload
from distributed.agent.worker import Script, run_script
is_module = words[0] == "-m"
name, *words = words[1:] if is_module else words
run_script(Script(name, tuple(words), is_module, path), Preload(fresh))
"""
WORKER = [sys.executable, "-c", WORK, str(KIT)]
SECONDS = 120  # after which a launch counts as hanging
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean(monkeypatch, tmp_path)


def clean(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What a launcher gives its agent: a working folder, and the environment of no other launch."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "MUSTER_", *PLACE))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip


# ---------------------------------------------------------------- what a script can see

LOOK = '''
"""What a script sees of the way it was started."""
names = set(globals())
import sys
modules = sorted(sys.modules)
import faulthandler, gc, json, locale, logging, multiprocessing, os, pickle, random, resource, signal, sys, threading
import warnings

class Mine:
    """Is to be found by its name when it is unpickled."""

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
    "place": {name: os.environ.get(name) for name in PLACE},
    "main": sys.modules["__main__"].__dict__ is globals() and sys.modules["__mp_main__"] is sys.modules["__main__"],
    "pickled": [same(Mine()), Mine.__module__],
    "modules": modules, "ours": [name for name in sys.modules if name.partition(".")[0] == "distributed"],
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
        [repr(stream), stream.errors, stream.line_buffering, stream.write_through, stream.newlines, repr(stream.buffer)]
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
'''.replace("PLACE", repr(PLACE))

# What is known to differ, and why nobody minds.
EXPLAINED = {
    "gc": "what was there before the fork is frozen: a collection does not visit it",
    "finders": "one of ours finds PyTorch",
    "open files": "faulthandler writes the stack to one, when it is asked for; its number is high, and no child has it",
}


def look(prefix: str, *words: str | Path, **env: str) -> dict[str, Any]:
    """What rank 0 saw, and in "ranks" what all of them drew at random."""
    Path("look.py").write_text(LOOK)
    done = run(*words, SEEN=prefix, **env)
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(Path.cwd().glob(f"{prefix}[0-9]"))]
    return {**seen[0], "random": [one["random"] for one in seen]}


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What a script saw of the kit's agent, and of torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        clean(patch, tmp_path_factory.mktemp("looked"))
        words = ("--nproc-per-node", "2", "--tee", "3", "--log-dir", "said", "look.py", "torch", "a b", "")
        yield look("fast", *FAST, *words), look("torchrun", *TORCHRUN, *words)


def test_a_script_sees_what_it_sees_under_torchrun(looked: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fast, torchrun = looked
    assert fast.keys() == torchrun.keys()
    for fact in torchrun.keys() - EXPLAINED.keys() - {"random"}:
        assert fast[fact] == torchrun[fact], fact


def test_what_differs_from_torchrun_is_known(looked: tuple[dict[str, Any], dict[str, Any]]) -> None:
    fast, torchrun = looked
    assert (torchrun["gc"][:2], torchrun["gc"][2]) == (fast["gc"][:2], 0)
    assert fast["finders"] == ["<distributed.agent.preloaded.HiddenModules object", *torchrun["finders"]]
    assert set(fast["open files"]) == {*torchrun["open files"], str(MIN_FILE_DESCRIPTOR)}


def test_every_rank_has_random_numbers_of_its_own(looked: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Of Python, NumPy and PyTorch: with equal ones every rank would shuffle alike and train on the same data."""
    for seen in looked:
        for generator in zip(*seen["random"], strict=True):
            assert len(set(generator)) == 2, generator
            assert len(generator) == 2


SEEDED = """
import random, sys
import numpy
for generator in (random, numpy.random):
    generator.seed(1)
""" + WORK  # fmt: skip


def test_generators_that_are_there_before_the_script_start_anew() -> None:
    Path("script.py").write_text("import random, numpy\nprint(random.random(), numpy.random.random())\n")
    draws = [run(sys.executable, "-c", SEEDED, str(KIT), "script.py").stdout.split() for _ in range(2)]
    assert [len(set(generator)) for generator in zip(*draws, strict=True)] == [2, 2]


@pytest.mark.parametrize("words", [["look.py"], ["sub/../look.py", "a b", "", "-x"], ["linked.py"], ["-m", "look"]])
def test_a_script_sees_what_it_sees_in_a_fresh_interpreter(words: list[str]) -> None:
    Path("sub").mkdir()
    Path("elsewhere").mkdir()
    Path("elsewhere/look.py").write_text(LOOK)
    Path("linked.py").symlink_to("elsewhere/look.py")
    worker, fresh = look("worker", *WORKER, *words), look("fresh", sys.executable, "-u", *words)
    assert_same(worker, fresh)


def assert_same(worker: dict[str, Any], fresh: dict[str, Any]) -> None:
    """But for the finder of hidden modules, and for runpy and what that needs where Python itself has imported it."""
    assert worker["finders"][1:] == fresh["finders"]
    assert set(worker["modules"]) <= set(fresh["modules"])
    assert worker["modules"] == fresh["modules"] or "runpy" in fresh["modules"]
    for fact in fresh.keys() - {"random", "finders", "modules"}:
        assert worker[fact] == fresh[fact], fact


def directory() -> str:
    Path("program").mkdir()
    Path("program/__main__.py").write_text(LOOK)
    return "program"


def zip_file() -> str:
    zipapp.create_archive(directory(), "program.pyz")
    return "./program.pyz"


def compiled() -> str:
    Path("look.py").write_text(LOOK)
    return py_compile.compile("look.py", "look.pyc", doraise=True) or ""


@pytest.mark.parametrize("program", [directory, zip_file, compiled])
def test_what_python_runs_besides_files_of_source_sees_what_it_sees_in_a_fresh_interpreter(
    program: Callable[[], str],
) -> None:
    name = program()
    assert_same(look("worker", *WORKER, name), look("fresh", sys.executable, "-u", name))


def test_a_script_may_have_a_distributed_of_its_own() -> None:
    """Dask's package has that name."""
    Path("distributed").mkdir()
    Path("distributed/__init__.py").write_text("name = 'not Muster'\n")
    Path("script.py").write_text("import distributed\nprint(distributed.name)\n")
    assert run(*WORKER, "script.py").stdout == "not Muster\n"


EARLY = """
import os
os.environ.update(OMP_NUM_THREADS="3", TORCH_DISTRIBUTED_DEBUG="DETAIL", PYTORCH_JIT="0", NCCL_DEBUG="INFO")
import pprint
import torch
import numpy
print(pprint.name, input())
"""


def test_what_pytorch_has_read_before_the_script_is_named_and_what_the_script_shadows_is_its_own() -> None:
    Path("pprint.py").write_text("name = 'mine'\n")
    Path("script.py").write_text(EARLY)
    command = [*FAST, "--nproc-per-node", "1", "script.py"]
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "mine typed\n"
    warned = [line.split(": ")[1] for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warned == ["OMP_NUM_THREADS", "PYTORCH_JIT", "TORCH_DISTRIBUTED_DEBUG"]


# ---------------------------------------------------------------- what a script does with processes

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
    """Also what a spawned worker sends back: there the script is called __mp_main__."""
    Path("loaders.py").write_text(LOADERS)
    done = run(*FAST, "--nproc-per-node", "1", "loaders.py")
    assert done.returncode == 0, done.stderr
    batches = [[0, 1, "0"], [4, 9, "0"]]
    assert json.loads(Path("loaded.json").read_text()) == {"spawn": batches, "fork": batches}


# ---------------------------------------------------------------- words

WORDS: list[bytes] = [
    b"", b" ", b"--", b"-h", b"--help", b"-m", b"--nproc-per-node=3", b"--nnodes", b"${local_rank}", b"${rank}",
    b"`id`", b"$HOME", b"%(prog)s", b"{}", b"{0}", b"@file", b"~", b"*", b"a\nb", b"\r\n", b"\t", b"'", b'"', b"\\",
    b"\\n", "größer".encode(), "🚀".encode(), b"\xff\xfe", b"\x1b[31m", b"a=b", b"#", b"!!", b";", b"&&", b"|",
    b"x" * 10_000,
]  # fmt: skip


@settings(max_examples=300, deadline=None, database=None)
@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def collect(word: bytes) -> None:
    WORDS.append(word.replace(b"\0", b""))


def test_words_arrive_byte_for_byte() -> None:
    """Hundreds of strings in one launch, to a module."""
    collect()
    Path("echo.py").write_text(
        "import os, sys\n"
        "open('words', 'wb').write(b''.join(os.fsencode(word) + b'\\0' for word in sys.argv[1:]))\n"
        "open('zeroth', 'w').write(sys.argv[0])\n"
    )  # fmt: skip
    done = run(*FAST, "--nproc-per-node", "1", "-m", "echo", *map(os.fsdecode, WORDS))
    assert done.returncode == 0, done.stderr
    assert Path("words").read_bytes().split(b"\0")[:-1] == WORDS
    assert Path("zeroth").read_text() == str(Path("echo.py").absolute())


# ---------------------------------------------------------------- ends as Python ends

ENDS = {
    "nothing": "",
    "exit 0": "import sys; sys.exit(0)",
    "exit None": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit True": "import sys; sys.exit(True)",
    "exit text": "import sys; sys.exit('a text')",
    "exit tuple": "raise SystemExit((1, 2))",
    "os._exit": "import os; os._exit(42)",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "exception": "def f():\n    raise ValueError('bö')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
    "syntax": "x = (",
    "no module": "import nosuchmodule",
    "own hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', error)\n1 / 0",
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


@pytest.mark.parametrize("body", ENDS.values(), ids=ENDS.keys())
def test_a_script_ends_as_in_a_fresh_interpreter(body: str) -> None:
    Path("script.py").write_text(body + "\n", encoding="utf-8")
    ours, fresh = run(*WORKER, "script.py"), run(sys.executable, "script.py")
    # Since 3.13 Python reports a file that cannot be closed, with the frame that has removed it.
    stderr = re.sub(r'Traceback .*\n  File ".*/distributed/agent/worker.py", .*\n.*\n', "", ours.stderr)
    assert (ours.returncode, ours.stdout, stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


@pytest.mark.parametrize(("end", "code"), [("", 0), ("import sys; sys.exit(3)", 3), ("1 / 0", 1)])
def test_what_is_written_into_files_that_are_left_open_is_in_them(end: str, code: int) -> None:
    """An interpreter closes them at its end; a fork does not come to that end."""
    lines = ["text = open('text', 'w')", "text.write('a line')", "raw = open('raw', 'wb')", "raw.write(b'bytes')"]
    Path("script.py").write_text("\n".join([*lines, "closed = open('closed', 'w')", "closed.close()", end]) + "\n")
    assert run(*WORKER, "script.py").returncode == code
    assert (Path("text").read_text(), Path("raw").read_text()) == ("a line", "bytes")


@pytest.mark.parametrize(("printed", "before"), [("\\r 10%\\r 20%", "\r 10%\r 20%\n"), ("100%\\n", "100%\n"), ("", "")])
def test_a_traceback_does_not_stand_behind_a_progress_bar(printed: str, before: str) -> None:
    Path("script.py").write_text(f"import sys\nsys.stderr.write('{printed}')\n1 / 0\n")
    with open("err", "w") as err:  # as under the agent and srun
        subprocess.run([*WORKER, "script.py"], stderr=err, timeout=SECONDS, check=False)
    assert Path("err").read_bytes().decode().startswith(f"{before}Traceback (most recent call last):\n")


def test_a_script_that_is_interrupted_ends_by_sigint() -> None:
    Path("script.py").write_text("raise KeyboardInterrupt\n")
    assert run(*WORKER, "script.py").returncode == run(sys.executable, "script.py").returncode == -signal.SIGINT


def test_an_exception_is_kept_for_the_verdict(tmp_path: Path) -> None:
    """Without PyTorch: the exception may be that it cannot be imported."""
    Path("errors").mkdir()
    Path("torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    Path("json.py").write_text("of the script\n")
    Path("script.py").write_text("def f():\n    import torch\nf()\n")
    done = run(*WORKER, "script.py", MUSTER_RUN_DIR=str(tmp_path), MUSTER_NODE="n7", RANK="3", LOCAL_RANK="1")
    assert done.returncode == 1
    record = json.loads(Path("errors/rank_3.json").read_text())
    assert (record["rank"], record["local_rank"], record["node"]) == (3, 1, "n7")
    assert (record["exit_code"], record["exception"]) == (1, "ImportError")
    assert record["message"] == "libcudart.so is missing"
    assert record["traceback"] == done.stderr
    assert record.keys() == {
        "rank", "local_rank", "node", "pid", "time", "exit_code", "exception", "message", "traceback",
    }  # fmt: skip


def test_a_task_of_srun_is_told_its_place_as_torchrun_tells_it(tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "n[08-10]",
        "SLURMD_NODENAME": "n10", "SLURM_GTIDS": "4,5",
    }  # fmt: skip
    place = {
        "RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n08",
        "MASTER_PORT": "20001", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": tmp_path.name, "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    Path("errors").mkdir()
    Path("script.py").write_text(f"import os\nassert {place}.items() <= os.environ.items()\nraise ValueError('boom')\n")
    task = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/srun_task.py"), "rank", str(tmp_path), "8", "script.py"]
    env = {**os.environ, "MUSTER_RUN_DIR": str(tmp_path), "MUSTER_NODE": "n10", **step}
    with subprocess.Popen(task, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as guard:
        assert guard.stdin and guard.stdout
        while b'"end"' not in guard.stdout.readline():
            pass
        guard.stdin.close()  # its end has been heard
    assert guard.returncode == 1
    assert Path("ranks/n10/slurm/attempt_0/1/stderr.log").read_text().endswith("ValueError: boom\n")
    record = json.loads(Path("errors/rank_5.json").read_text())
    assert (record["rank"], record["local_rank"], record["node"]) == (5, 1, "n10")


# ---------------------------------------------------------------- ends of a launch


def command(ranks: int, body: str, agent: list[str]) -> list[str]:
    """The words that start this script in a run folder that is the current one."""
    Path("errors").mkdir()
    Path("script.py").write_text("import os, signal, sys\nrank = int(os.environ['RANK'])\n" + body)
    return [*agent, "--nproc-per-node", str(ranks), "--log-dir", "ranks", "--tee", "3", "script.py"]


def launch(ranks: int, body: str, agent: list[str] = FAST) -> subprocess.CompletedProcess[str]:
    """A launch of this script by the agent, on node n7."""
    return run(*command(ranks, body, agent), MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7")


@contextmanager
def started(ranks: int, body: str, agent: list[str] = FAST, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """The same, while it runs. Each rank is to write its number into the named pipe `ready` when it is at work."""
    os.mkfifo("ready")
    ready = os.open("ready", os.O_RDWR)
    words = command(ranks, body, agent)
    with subprocess.Popen(words, env={**os.environ, **env}, stdin=subprocess.PIPE) as process:
        try:
            for _ in range(ranks):
                os.read(ready, 1)
            yield process
        finally:
            process.kill()
            os.close(ready)


MEDDLED = """
import functools, runpy, sys

def first(self, *words):
    OWNER.METHOD = method
    ACTION
    return method(self, *words)

if __name__ == "__main__":
    sys.path.insert(0, KIT)
    from distributed.agent.agent import Agent, LocalElasticAgent
    method = OWNER.METHOD
    OWNER.METHOD = functools.wraps(method)(first)
    del sys.argv[0], sys.path[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def meddled(method: str, action: str) -> list[str]:
    """The agent, which before its first call of the method does this as well: it makes a moment certain."""
    owner, _, name = method.partition(".")
    names = {"OWNER": owner, "METHOD": name, "ACTION": action, "KIT": repr(str(KIT))}
    Path("meddled.py").write_text(re.sub("[A-Z]{3,}", lambda word: names[word[0]], MEDDLED))
    return [FAST[0], "meddled.py", *FAST[1:]]


def alive(pid: int) -> bool:
    """Whether it runs; nobody may have asked yet how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def deaths() -> list[tuple[int, int, bool]]:
    """(rank, exit code, ended by the agent), as the agent wrote it down."""
    written = json.loads(Path("errors/node_n7.json").read_text())
    assert written.keys() == {"node", "deaths"}
    assert written["node"] == "n7"
    for death in written["deaths"]:
        assert death.keys() == {"rank", "local_rank", "pid", "time", "exit_code", "ended_by_agent"}
    return [(death["rank"], death["exit_code"], death["ended_by_agent"]) for death in written["deaths"]]


def test_a_killed_rank_is_reported_with_its_exit_code() -> None:
    done = launch(1, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 137
    assert deaths() == [(0, 137, False)]
    assert f"agent: rank 0 (pid {pid_of(0)}) ended with exit code 137\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_leaves_without_a_word_has_ended_well() -> None:
    ends = ["pass", "os._exit(0)", "os.execlp('true', 'true')"]
    done = launch(3, f"exec({ends}[rank])\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_rank_said_that_lived_but_a_moment_is_passed_on(tmp_path: Path) -> None:
    output, shown = tmp_path / "stdout.log", io.StringIO()

    class Ended(threading.Event):
        """While somebody waits, the rank begins, speaks, and ends."""

        def wait(self, timeout: float | None = None) -> bool:
            output.write_text("last words\n")
            self.set()
            return True

    follow("[n1:0] ", str(output), shown, Ended(), 0.1)
    assert shown.getvalue() == "[n1:0] last words\n"


class Writes(io.StringIO):
    """Counts the writes, each of which reaches a terminal or pipe by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def write(self, text: str) -> int:
        self.sizes.append(len(text.encode()))
        return super().write(text)


def followed(output: bytes, *options: Any) -> Writes:
    """What the agent shows of this output of a rank that has ended."""
    Path("stdout.log").write_bytes(output)
    shown, ended = Writes(), threading.Event()
    ended.set()
    follow("[n1:0] ", "stdout.log", shown, ended, 0.1, *options)
    return shown


def test_many_lines_are_shown_in_few_writes_that_a_pipe_takes_whole() -> None:
    """Beyond PIPE_BUF bytes the lines of another rank could come in between."""
    lines = [f"größe {number}" for number in range(10_000)]
    shown = followed("\n".join(lines).encode())
    assert shown.getvalue() == "".join(f"[n1:0] {line}\n" for line in lines)
    assert max(shown.sizes) <= select.PIPE_BUF
    assert len(shown.sizes) < 100


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (b"", []),
        (b"\n\n", ["", ""]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\r 10%\r 20%\ndone\r", [" 10%\r", " 20%", "done"]),
        (b"caf\xe9", ["caf\ufffd"]),
        (b"form\x0cfeed \xe2\x80\xa8", ["form\x0cfeed \u2028"]),
        (b"x" * 10_000 + b"\ny", ["x" * 10_000, "y"]),
    ],
)
def test_lines_are_those_that_torchrun_shows_and_updates_of_a_bar_are_marked(output: bytes, lines: list[str]) -> None:
    assert followed(output).getvalue() == "".join(f"[n1:0] {line}\n" for line in lines)


def test_a_block_of_output_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.agent.agent.BLOCK", 1)
    assert followed("ö\r\n\rz\n".encode()).getvalue() == "[n1:0] ö\n[n1:0] z\n"


def test_lines_are_filtered_for_torchruns_option_duplicate_stdout_filters() -> None:
    assert followed(b"apple\npear\n", lambda line: "apple" in line).getvalue() == "[n1:0] apple\n"


def pid_of(rank: int) -> int:
    written = json.loads(Path("errors/node_n7.json").read_text())
    pids: dict[int, int] = {death["rank"]: death["pid"] for death in written["deaths"]}
    return pids[rank]


SURVIVORS = """
def at_work(read, write):
    # Each says so on a pipe with a name; rank 1 goes on when both have.
    if rank == 1:
        open(read).read()
    else:
        open(write, "w").close()
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
at_work("zero", "zero") if rank != 2 else None
at_work("two", "two") if rank != 0 else None
if rank == 1:
    os._exit(42)
while True:
    signal.pause()
"""


def test_when_one_dies_the_others_are_ended_and_it_is_told_who_died_of_what() -> None:
    os.mkfifo("zero")
    os.mkfifo("two")
    done = launch(3, SURVIVORS)
    assert done.returncode == 42
    assert deaths() == [(0, 137, True), (1, 42, False), (2, 143, True)]
    assert done.stderr.count("ended with exit code") == 1, "only who died by itself is told of"
    assert [file.name for file in Path("errors").iterdir()] == ["node_n7.json"]
    assert not [rank for rank in range(3) if alive(pid_of(rank))]


LAST_WORDS = """
if rank:
    os._exit(42)
open("now").close()
raise RuntimeError("Connection closed by peer")
"""


def test_a_death_wakes_the_agent_and_the_others_get_a_moment_to_say_what_became_of_them() -> None:
    """A long one here, and the launch ends as soon as all have spoken."""
    os.mkfifo("now")
    agent = meddled("Agent._wait", f"open('now', 'w').close(); words = ({SECONDS},)")
    done = launch(2, LAST_WORDS, [*agent, "--monitor-interval", "3600"])
    assert done.returncode == 42
    assert deaths() == [(0, 1, False), (1, 42, False)]
    assert json.loads(Path("errors/rank_0.json").read_text())["message"] == "Connection closed by peer"
    assert done.stderr.count("RuntimeError: Connection closed by peer") == 1, "torchrun would print it a second time"


ENDS_EARLY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 1:
    os._exit(0)

def train():
    dist.all_reduce(torch.ones(1))

train()
"""


def test_a_rank_that_ended_with_0_while_another_one_waited_for_it_is_what_the_verdict_names() -> None:
    done = launch(2, ENDS_EARLY)
    assert done.returncode == 1
    record = json.loads(Path("errors/node_n7.json").read_text())
    assert ([death["rank"] for death in record["deaths"]], record["ended_well"]) == ([0], [1])
    assert verdict.decide(Path()).cause == (
        "rank 1 on n7 ended with exit code 0 while rank 0 on n7 was in a collective at script.py:11 in train()"
    )


def test_a_rank_that_ends_with_0_when_it_is_asked_to_has_not_left_the_others() -> None:
    os.mkfifo("ready")
    done = launch(
        2,
        "if rank:\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n    open('ready', 'w').close()\n"
        "    signal.pause()\nopen('ready').close()\nsys.exit(3)\n",
    )
    assert done.returncode == 3
    assert deaths() == [(0, 3, False)]


DEAD = "import os; os.waitid(os.P_PID, self._processes()[1].pid, os.WEXITED | os.WNOWAIT)"


def test_a_rank_that_dies_while_torchrun_looks_is_no_other_case() -> None:
    """The moment is made certain: the rank goes when torchrun's look begins, which ends when the rank has."""
    os.mkfifo("go")
    agent = meddled("LocalElasticAgent._monitor_workers", "open('go', 'w').close(); " + DEAD)
    done = launch(2, "if rank:\n    open('go').close()\n    os._exit(42)\nsignal.pause()\n", agent)
    assert done.returncode == 42
    assert deaths() == [(0, 143, True), (1, 42, False)]


# Rank 1 goes first, and rank 0 when it has gone: were it asked again then, it would count that.
STOPPED_ON_REQUEST = """
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
signal.signal(signal.SIGTERM, lambda number, frame: None)
end = open("end", "w" if rank else "r")
with open("ready", "w") as ready:
    ready.write(str(rank))
asked = os.read(read, 1)
if not rank:
    end.read()
os.set_blocking(read, False)
try:
    asked += os.read(read, 9)
except BlockingIOError:
    pass
with open(f"asked_{rank}", "wb") as file:
    file.write(asked)
sys.exit(75)
"""


def test_who_asks_to_stop_while_the_end_is_told_does_not_change_it() -> None:
    agent = meddled("Agent.exchange_records", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    done = launch(1, "sys.exit(42)", agent)
    assert done.returncode == 42
    assert "SignalException" not in done.stderr


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
    """Whether it runs, and is one."""
    try:
        return "RANK" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_a_stop_request_finds_only_the_ranks_that_still_run() -> None:
    """Rank 0 has ended; its handler, which does not end it, would keep a process that waits for the others."""
    with started(2, HANDLES_TERM, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        while sum(map(is_rank, psutil.Process(agent.pid).children())) > 1:
            time.sleep(0.001)
        agent.terminate()
        assert agent.wait(SECONDS) == 0, "all ranks ended with 0"


FAILS_FIRST = """
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


def test_a_signal_that_comes_while_the_agent_looks_at_the_ranks_loses_no_failure() -> None:
    ended = "os.waitid(os.P_PID, self._processes()[0].pid, os.WEXITED | os.WNOWAIT)"
    words = meddled("Agent.reap_ranks", f"import os, signal; {ended}; os.kill(os.getpid(), signal.SIGTERM)")
    os.mkfifo("other")
    with started(2, FAILS_FIRST, words, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        assert agent.wait(SECONDS) == 143
    assert deaths() == [(0, 3, False), (1, 143, True)]


def test_a_signal_that_comes_while_a_rank_is_reaped_does_not_lose_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(*_: object) -> None:
        raise InterruptedError

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        found = waitpid(pid, options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return found

    waitpid = os.waitpid
    ended = subprocess.Popen(["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    process = ForkedProcess(ended.pid, cast(Wakeup, None))
    before = signal.signal(signal.SIGUSR1, raising)
    signals.defer([signal.SIGUSR1])
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "waitpid", interrupted)
            with pytest.raises(InterruptedError):
                process.reap()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert process.reap() == 3
    ended.returncode = 3  # reaped, and not by itself


def test_a_stop_request_reaches_each_rank_once_and_75_from_all_is_75() -> None:
    os.mkfifo("end")
    os.mkfifo("started")
    words = meddled("Agent._monitor_workers", "open('started', 'w').close()")
    with started(2, STOPPED_ON_REQUEST, words, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        Path("started").read_text()  # while it still starts the ranks, it has none yet to hand a signal to
        agent.terminate()
        assert agent.wait(SECONDS) == 75
    assert [list(Path(f"asked_{rank}").read_bytes()) for rank in range(2)] == [[signal.SIGTERM]] * 2
    assert {code for _, code, _ in deaths()} == {75}


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(f"pid_{rank}", "w") as file:
    file.write(str(os.getpid()))
with open("ready", "w") as ready:
    ready.write(str(rank))
while True:
    signal.pause()
"""


def test_when_the_agent_is_killed_no_rank_is_left() -> None:
    """Under the supervisor, as launchers start it, and with ranks that would not end when asked."""
    node = [sys.executable, "-I", "-S", str(KIT / "scripts/lib/supervisor.py")]
    node += ["run", "--dir", os.getcwd(), "--name", "n7", "--"]
    with started(2, STUBBORN, [*node, *FAST]) as launcher:
        pids = [int(Path(f"pid_{rank}").read_text()) for rank in range(2)]
        assert all(map(alive, pids))
        os.kill(json.loads(Path("node_n7.pid").read_text())["command"]["pid"], signal.SIGKILL)
        assert launcher.wait(SECONDS) == 137
    while any(map(alive, pids)):  # they have been killed
        time.sleep(0.01)


# ---------------------------------------------------------------- torchrun's own agent instead

OTHER_TORCH = """
import runpy, sys
from torch.distributed.elastic.multiprocessing import tail_log
del tail_log.tail_logfile, sys.argv[0], sys.path[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_where_torchrun_is_not_as_expected_its_own_agent_runs_the_script() -> None:
    """Also with the signals of a fresh process, whatever the caller ignores."""
    Path("other_torch.py").write_text(OTHER_TORCH)
    Path("script.py").write_text("import signal, sys\nprint(signal.getsignal(signal.SIGUSR2).name, *sys.argv[1:])\n")
    agent = [FAST[0], "other_torch.py", FAST[1], "--pass-local-rank", "--standalone"]
    ignoring = ["env", "--ignore-signal=USR2"]
    done = run(*ignoring, *agent, "--nproc-per-node", "1", "--", "script.py", "--pass-local-rank")
    assert (done.returncode, done.stdout) == (0, "SIG_DFL --local-rank=0 --pass-local-rank\n"), done.stderr
    reason = f"PyTorch {torch.__version__}: torch.distributed.elastic.multiprocessing.tail_log has no tail_logfile"
    assert f"agent: {reason}; using --agent torchrun\n" in done.stderr


def test_torchrun_is_as_expected() -> None:
    assert agent.unexpected() == ""


@pytest.mark.parametrize(("owner", "name", "parameters"), agent.INTERNALS)
def test_a_name_that_torchrun_has_no_longer_is_seen(
    owner: Any, name: str, parameters: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if parameters:
        monkeypatch.setattr(owner, name, lambda other: None)
        assert agent.unexpected().startswith(f"{owner.__name__} has no {name}(")
    monkeypatch.setattr(owner, name, None)
    assert agent.unexpected() == f"{owner.__name__} has no {name}"


def test_an_attribute_that_torchrun_has_no_longer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(agent.ATTRIBUTES, SubprocessContext, {"envs", "elsewhere"})
    assert agent.unexpected() == "SubprocessContext has no elsewhere"


@pytest.mark.parametrize(
    ("words", "env", "reason"),
    [
        ("script.py", {}, ""),
        ("--nproc-per-node 2 --tee 3 -m module --no-python", {}, ""),
        ("--no-python program", {}, "--no-python is not supported"),
        ("--numa-binding node script.py", {}, "--numa-binding is not supported"),
        ("script.py", {"PYTHON_EXEC": sys.executable}, ""),
        (
            "script.py",
            {"PYTHON_EXEC": "/usr/bin/other"},
            f"PYTHON_EXEC=/usr/bin/other differs from the agent's Python {sys.executable}",
        ),
    ],
)
def test_what_only_torchruns_agent_can_do_is_left_to_it(
    words: str, env: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert agent.unsupported(agent.parse(words.split())) == reason


FIRST_ATTEMPT = """
while "TORCHELASTIC_RESTART_COUNT" in os.environ:
    with open("ready", "w") as ready:
        ready.write(str(rank))
    os.open("end", os.O_RDONLY)
    sys.exit(3)
"""


def server_of(agent: int) -> psutil.Process:
    (server,) = (child for child in psutil.Process(agent).children() if "agent.py" in " ".join(child.cmdline()))
    return server


def test_ranks_do_not_need_the_fork_server_and_a_restart_without_it_says_what_has_become_of_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    os.mkfifo("end")
    words = [*FAST, "--max-restarts", "1"]
    with started(1, FIRST_ATTEMPT, words, MUSTER_RUN_DIR=os.getcwd(), MUSTER_NODE="n7") as agent:
        server = server_of(agent.pid)
        server.kill()
        Path("end").write_text("")
        assert agent.wait(SECONDS) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == f"agent: fork server (pid {server.pid}) was killed by signal 9"
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_agent_starts_ends_it_without_a_traceback(number: signal.Signals) -> None:
    """Before the ranks are there: when the server is, and the agent imports torchrun."""
    os.mkfifo("begun")
    Path("meddled.py").write_text(START.replace("KIT", repr(str(KIT))))
    Path("script.py").write_text("")
    words = [FAST[0], "meddled.py", *FAST[1:], "script.py"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True) as agent:
        with open("begun") as begun:
            server = psutil.Process(int(begun.read()))
        os.killpg(agent.pid, number)
        assert agent.communicate(timeout=SECONDS)[1] == b""
        assert agent.returncode == -number
        server.wait(SECONDS)


START = """
import os, runpy, signal, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "distributed.agent.agent":
            with open("begun", "w") as begun:
                begun.write(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read())
            signal.pause()

sys.path.insert(0, KIT)
sys.meta_path.insert(0, Slow())
del sys.argv[0], sys.path[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# ---------------------------------------------------------------- what is decided without a process


@pytest.mark.parametrize(
    ("told", "code", "stopped"),
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
def test_the_code_of_a_launch_is_that_of_the_first_that_died_by_itself(
    told: list[tuple[float, int, bool]], code: int, stopped: bool
) -> None:
    agent = object.__new__(Agent)
    agent.failures = {rank: RankFailure(rank, rank, 100 + rank, *death) for rank, death in enumerate(told)}
    assert agent.exit_code() == code
    assert agent.all_stopped_on_request() == stopped


@pytest.mark.parametrize(
    ("words", "before", "after", "printed"),
    [
        (["--nproc-per-node", "4", "script.py"], None, "2", "OMP_NUM_THREADS=2 for each of 4 ranks on 8 cores\n"),
        (["--nproc-per-node", "3", "--", "x.py", "--nproc-per-node", "1"], None, "2",
         "OMP_NUM_THREADS=2 for each of 3 ranks on 8 cores\n"),
        (["--node-rank", "1", "--nproc-per-node", "4", "script.py"], None, "2", ""),
        (["--plain", "torch.distributed.run", "--nproc-per-node", "4", "script.py"], None, "2",
         "OMP_NUM_THREADS=2 for each of 4 ranks on 8 cores\n"),
        (["--nproc-per-node", "4", "script.py"], "7", "7", ""),
        (["--nproc-per-node", "gpu", "script.py"], None, None, ""),
        (["script.py"], None, None, ""),
    ],
)  # fmt: skip
def test_each_rank_gets_its_share_of_the_cores(
    words: list[str], before: str | None, after: str | None, printed: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A stub of a machine with 8 cores."""
    monkeypatch.setattr(threads, "read_cores", lambda: Cores(8, 8))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if before:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    entry = runpy.run_path(str(KIT / "scripts/lib/agent.py"))
    entry["choose_threads"](entry["options_of"](words))
    assert os.environ.get("OMP_NUM_THREADS") == after
    assert capsys.readouterr().err == printed
