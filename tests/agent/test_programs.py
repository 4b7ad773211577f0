"""Under Muster's agent and as tasks of srun, unusual programs create the same files and output as under torchrun.

Each program has a few lines. One launch with Muster's agent and one with torchrun run all of them, one per rank, and a
separate interpreter runs each as a task of srun does. The result under torchrun is the expected one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from distributed.host import stacks

KIT = Path(__file__).resolve().parents[2]
TIMEOUT = 240  # seconds until a launch is treated as hanging
AGENTS = {
    "agent": [sys.executable, str(KIT / "scripts/lib/agent.py")],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
TASK = """
import sys
path = tuple(sys.path[1:])
sys.path[0] = KIT
from distributed.agent.worker import Script, run_script
run_script(Script("script.py", (), False, path))
""".replace("KIT", repr(str(KIT)))

PROGRAMS = {
    "a pool by forkserver": """
        import multiprocessing

        def square(number):
            return number * number

        if __name__ == "__main__":
            with multiprocessing.get_context("forkserver").Pool(2) as pool:
                print(pool.map(square, range(5)))
        """,
    "a manager, and its key": """
        import multiprocessing

        if __name__ == "__main__":
            with multiprocessing.Manager() as manager:
                shared = manager.list([1])
                shared.append(2)
                print(list(shared), len(multiprocessing.current_process().authkey))
        """,
    "files left open": """
        import gzip, helper, sys, zipfile
        archive = zipfile.ZipFile("left.zip", "w")
        archive.writestr(zipfile.ZipInfo("member"), "text")
        packed = gzip.GzipFile("left.gz", "wb", mtime=0)
        packed.write(b"bytes")
        text = open("left.txt", "w")
        text.write("a line")
        _first = open("first.txt", "w")
        _first.write("a line")
        sys.stdout = open("printed.txt", "w")
        print("into a file")
        """,
    "a file left open beside a function": """
        def holds_the_globals():
            return text

        text = open("left.txt", "w")
        text.write("a line")
        print("ends")
        """,
    "a file left open beside a function that a library refers to": """
        import copyreg

        class Own:
            pass

        copyreg.pickle(Own, lambda own: (Own, ()))
        text = open("left.txt", "w")
        text.write("a line")
        print("ends")
        """,
    "__del__": """
        class Last:
            def __init__(self, name):
                self.name = name
            def __del__(self):
                print("finalised", self.name, flush=True)

        public, _private = Last("public"), Last("_private")
        cycle = Last("cycle")
        cycle.itself = cycle

        def holds_the_module():
            return public
        """,
    "C: stdio and exit handlers": """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.strdup.restype = libc.fopen.restype = ctypes.c_void_p
        libc.puts(b"a line of C")
        libc.printf(b"no line break")
        file = ctypes.c_void_p(libc.fopen(b"left_by_c", b"w"))
        libc.fputs(b"a line of C", file)
        open("removed_at_exit", "w").close()
        libc.__cxa_atexit(libc.unlink, ctypes.c_void_p(libc.strdup(b"removed_at_exit")), None)
        """,
    "output of a process that ends with os._exit()": """
        import os, sys
        sys.stdout.write("no line break")
        sys.stdout.buffer.write(b", bytes")
        sys.stderr.write("no line break")
        os._exit(0)
        """,
    "closes its file descriptors": """
        import os
        os.closerange(3, 1024)
        print("closed")
        """,
    "signals its process group": """
        import os, signal, time
        received = []
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        os.killpg(os.getpgrp(), signal.SIGTERM)
        while not received:
            time.sleep(0.01)
        print(received, os.getpgrp() == os.getsid(0) == os.getpid())
        """,
    "executes its own command line": """
        import os, sys
        shown = open("/proc/self/cmdline").read().split("\\0")[:-1]
        print(shown[1:], shown == sys.orig_argv, sys.argv)
        if "second" not in sys.argv:
            os.chdir("../..")  # the path of the script is relative to it
            os.execv(sys.executable, [*sys.orig_argv, "second"])
        """,
    "a thread that never ends": """
        import threading, time
        def forever():
            while True:
                time.sleep(0.001)
        threading.Thread(target=forever, daemon=True).start()
        print("ends")
        """,
    "a fork that exits like the program": """
        import atexit, os
        atexit.register(lambda: print("atexit", flush=True))
        if child := os.fork():
            os.waitpid(child, 0)
            print("the program")
        else:
            print("its fork")
        """,
    "exits, and the next program sees that": """
        import os
        with open("../pid", "w") as file:
            file.write(f"{os.getpid()}\\n")
        print("ends")
        """,
    "sees the previous program exit": """
        import os, time
        end = time.monotonic() + 60
        def pid():
            try:
                return open("../pid").read()
            except FileNotFoundError:
                return ""
        while not pid().endswith("\\n"):
            time.sleep(0.01)
        def runs():
            try:
                return open(f"/proc/{int(pid())}/stat").read().rpartition(")")[2].split()[0] != "Z"
            except FileNotFoundError:
                return False
        while runs() and time.monotonic() < end:
            time.sleep(0.01)
        print("still running" if runs() else "exited")
        """,
}
SCRIPT = """
import os
here = os.path.dirname(os.path.realpath(__file__))
number = os.environ["PROGRAM"].split(",")[int(os.environ["LOCAL_RANK"])]
if __name__ == "__main__":
    os.chdir(os.path.join(os.environ["RESULTS"], number))
exec(compile(open(os.path.join(here, number + ".py")).read(), number, "exec"))
"""


def program_numbers() -> dict[str, str]:
    return {name: str(number) for number, name in enumerate(PROGRAMS)}


def write(directory: Path) -> None:
    """Write the programs and the script that runs the program of its rank."""
    directory.joinpath("script.py").write_text(SCRIPT)
    directory.joinpath("helper.py").write_text("file = open('helper.txt', 'w')\nfile.write('of a module')\n")
    for name, number in program_numbers().items():
        lines = PROGRAMS[name].strip("\n").split("\n")
        directory.joinpath(f"{number}.py").write_text("".join(line[8:] + "\n" for line in lines))


def run(method: str, programs: list[str], directory: Path) -> Mapping[str, Mapping[str, bytes]]:
    """Run these programs, one per rank. Return program -> file -> content, including stdout and stderr."""
    results = directory / method
    numbers = [program_numbers()[program] for program in programs]
    for number in numbers:
        (results / number).mkdir(parents=True)
    variables = {"PROGRAM": ",".join(numbers), "RESULTS": str(results), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MUSTER_"))} | variables
    options = [
        *("--standalone", "--nproc-per-node", str(len(programs))),
        *("--tee", "3", "--log-dir", f"{method}-logs"),
    ]
    done = subprocess.run(
        [*AGENTS[method], *options, "script.py"], cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = next((directory / f"{method}-logs").glob("*/attempt_0"))
    return {
        program: contents(results / number) | contents(logs / str(rank))
        for rank, (program, number) in enumerate(zip(programs, numbers, strict=True))
    }


def run_as_task(programs: list[str], directory: Path) -> Mapping[str, Mapping[str, bytes]]:
    """Run each program as a task of srun does. Return the same as run()."""
    found = {}
    for program in programs:
        number = program_numbers()[program]
        results = directory / "task" / number
        results.mkdir(parents=True)
        env = {**os.environ, "PROGRAM": number, "RESULTS": str(directory / "task"), "LOCAL_RANK": "0", "RANK": "0"}
        with (results / "stdout.log").open("wb") as out, (results / "stderr.log").open("wb") as err:
            subprocess.run(
                [sys.executable, "-c", TASK], cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                timeout=TIMEOUT, check=True, start_new_session=True,
            )  # fmt: skip
        found[program] = contents(results)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    """Files of a directory, except the one for stacks, which torchrun does not create."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != stacks.FILE}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Mapping[str, bytes]]]:
    """Launch method -> program -> file -> content."""
    directory = tmp_path_factory.mktemp("programs")
    write(directory)
    programs = list(PROGRAMS)
    by_agent = {method: run(method, programs, directory) for method in AGENTS}
    return {**by_agent, "task": run_as_task(programs, directory)}


@pytest.mark.parametrize("method", ["agent", "task"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_creates_the_same_files_as_under_torchrun(
    program: str, method: str, files: Mapping[str, Mapping[str, Mapping[str, bytes]]]
) -> None:
    assert files[method][program] == files["torchrun"][program]
    assert any(files[method][program].values())


@pytest.mark.soak
@pytest.mark.parametrize("program", [name for name in PROGRAMS if "sees" not in name])
def test_a_program_run_alone_creates_the_same_files_as_under_torchrun(program: str, tmp_path: Path) -> None:
    write(tmp_path)
    agent, torchrun = (run(method, [program], tmp_path)[program] for method in AGENTS)
    assert agent == torchrun


# A library whose exit handler waits for a thread that needs the GIL, as a thread that releases a tensor does.
WAITING_LIBRARY = """
#include <Python.h>
#include <atomic>
#include <thread>
std::atomic<bool> ending;
struct Owner {
  std::thread thread{[] {
    while (!ending) std::this_thread::yield();
    if (Py_IsInitialized()) PyGILState_Release(PyGILState_Ensure());
  }};
  ~Owner() { ending = true; thread.join(); }
} owner;
"""


def test_an_exit_handler_that_waits_for_the_gil_does_not_stop_a_rank_from_exiting(tmp_path: Path) -> None:
    (tmp_path / "waits.cpp").write_text(WAITING_LIBRARY)
    compiler = ["g++", "-shared", "-fPIC", "-pthread", f"-I{sysconfig.get_path('include')}", "waits.cpp"]
    subprocess.run([*compiler, "-o", "waits.so"], cwd=tmp_path, check=True)
    exits = "import ctypes; from distributed.agent import worker; worker.EXIT_TIMEOUT = 1; ctypes.CDLL('./waits.so'); "
    env = os.environ | {"PYTHONPATH": str(KIT)}
    done = subprocess.run([sys.executable, "-c", exits + "worker._exit(7)"], cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 7
