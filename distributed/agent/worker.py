"""Run a script in a process that already exists, as `python script.py` would run it in a new one.

The agent forks ranks from a process that has imported PyTorch (`distributed.agent.fork_server`); under srun, each task
becomes a rank itself. `become_main` resets the state of the process; `run_script` runs the script and shuts down as
the interpreter does.

Known differences: PyTorch has read its environment variables before the script starts (`distributed.agent.preloaded`
detects changes), strings have the same hash on all ranks of a node, sys.meta_path has an additional finder, sys.exit is
a function of this module on Python 3.10 and 3.11, and if the output goes to a file, a real-time signal writes the stack
to a file beside it (`distributed.host.stacks`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib.machinery
import importlib.util
import io
import multiprocessing
import os
import pkgutil
import random
import runpy
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from distributed.agent import failure_records
from distributed.agent.preloaded import HiddenModules, Preload
from distributed.host import signals, stacks
from distributed.trust import PRIVATE

IMPORTLIB = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
# A rank whose collective of NCCL has failed exits at once: PyTorch's own default. torchrun sets 1: the rank aborts its
# communicators before. That may hang (ProcessGroupNCCL.hpp, ErrorHandlingMode), and the failure is then not reported.
ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
LOST_OUTPUT = 120  # exit code of an interpreter that could not flush its output
LAUNCH_FRAMES = (__file__, runpy.__file__, "<frozen runpy>", *IMPORTLIB)  # the first frames of a traceback
EXIT_TIMEOUT = 60  # seconds for exit handlers of libraries
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
PR_SET_MM, PR_SET_MM_MAP = 35, 14  # prctl(2)
_builtin_exit = sys.exit


@dataclass(frozen=True)
class Script:
    """The script of a rank and its arguments."""

    name: str  # a path as the user gave it, or the name of a module
    arguments: tuple[str, ...]
    is_module: bool
    path: tuple[str, ...]  # sys.path of a fresh interpreter, without its first entry
    pass_local_rank: bool = False  # as an argument, for scripts written for torch.distributed.launch

    @property
    def file(self) -> str:
        """The file that Python runs: `name` or, if `name` is a directory, its __main__.py."""
        return os.path.join(self.name, "__main__.py") if os.path.isdir(self.name) else self.name

    def command(self, interpreter: Sequence[str]) -> list[str]:
        """The command line that runs the script in a fresh interpreter."""
        local_rank = [f"--local-rank={os.environ['LOCAL_RANK']}"] if self.pass_local_rank else []
        return [*interpreter, *(["-m"] if self.is_module else []), self.name, *local_rank, *self.arguments]


@dataclass(frozen=True)
class RankSpec:
    """How the agent starts a rank."""

    script: Script
    environment: Mapping[str, str]
    stdout: str  # path of a file; "" for the agent's stdout
    stderr: str


def run_rank(preload: Preload, rank: RankSpec) -> NoReturn:
    """Become this rank. The fork server calls this in a new process."""
    with contextlib.suppress(OSError):  # too few file descriptors
        _Output.console = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, stacks.MIN_FILE_DESCRIPTOR + 1)
    for path, number in ((rank.stdout, 1), (rank.stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE)
            os.dup2(file, number)
            os.close(file)
    os.environ.clear()
    os.environ.update(rank.environment)
    run_script(rank.script, preload, os.path.dirname(rank.stdout))


def run_script(script: Script, preload: Preload | None = None, output: str = "") -> NoReturn:
    """Run the script in this process and exit. output: directory of the rank's output files, if any."""
    process, record = os.getpid(), failure_records.RankRecord(os.environ)
    rank, *terminal = os.environ.pop("MUSTER_TERMINAL", "none").split()
    for entry in terminal if rank == os.environ.get("RANK") else ():
        os.environ.setdefault(*entry.split("="))
    inherited = dict(sys.modules)
    _skip_exit_handlers()
    try:
        become_main(script)
        if output:
            stacks.register(output)  # after become_main(), which resets signal handlers
        if preload:
            preload.hide()
        _run(script)
    except SystemExit as request:
        code = _exit_code(request)
        if code and os.getpid() == process:
            _record(record, code)
    except BaseException as error:  # noqa: BLE001 (a script may raise anything)
        code = _report(error, record if os.getpid() == process else None)
    else:
        code = 0
    code = shut_down(code)
    _finalise(inherited)
    _exit(code)


# ---------------------------------------------------------------- start as a fresh interpreter does


def become_main(script: Script) -> None:
    """Make this process look like a fresh interpreter that is about to run the script."""
    sys.argv = script.command([])[script.is_module :]
    sys.orig_argv[:] = script.command([sys.executable, "-u"])  # as torchrun starts it
    _set_command_line(sys.orig_argv, os.environ)
    first = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.name))
    sys.path[:] = [*([] if getattr(sys.flags, "safe_path", False) else [first]), *script.path]
    _remove_own_modules()
    multiprocessing.current_process().authkey = os.urandom(32)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.use_defaults()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.version_info < (3, 12):
        sys.exit = _sys_exit
    _reseed()
    for name, file in (("stdout", 1), ("stderr", 2)):
        if (stream := getattr(sys, name)) is not None:  # None: not open when the interpreter started
            vars(sys)[name] = vars(sys)[f"__{name}__"] = _unbuffered(stream, file)


def _set_command_line(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set the command line and environment in /proc/self, for ps and psutil.

    See prctl(2), PR_SET_MM_MAP. Without CONFIG_CHECKPOINT_RESTORE, the kernel refuses the call, and ps shows
    the command line and environment of the agent.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    argv = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    environ = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    start = libc.malloc(ctypes.c_size_t(len(argv) + len(environ)))  # never freed
    ctypes.memmove(start, argv + environ, len(argv) + len(environ))
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()  # from the third field on
    fields = (26, 27, 28, 45, 46, 47)  # numbered as in proc(5)
    start_code, end_code, start_stack, start_data, end_data, start_brk = (int(stat[number - 3]) for number in fields)
    middle = start + len(argv)
    addresses = (
        start_code, end_code, start_data, end_data, start_brk, libc.sbrk(0), start_stack,
        start, middle, middle, middle + len(environ), 0,
    )  # fmt: skip
    # struct prctl_mm_map: the addresses, no auxiliary vector, unchanged executable.
    layout = (ctypes.c_uint64 * 13)(*addresses, 0xFFFFFFFF << 32)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), ctypes.c_ulong(0))


class _Output(io.FileIO):
    """Standard output or standard error. If it is a file on a full or failing disk, output is dropped, not refused."""

    console = -1  # the standard error of the agent
    lost = 0  # bytes of both streams

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_ERRORS or not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            if not _Output.lost:
                print_on_console(f"{os.readlink(f'/proc/self/fd/{self.fileno()}')}: {error.strerror}: output is lost")
                atexit.register(lambda: print_on_console(f"{_Output.lost:,} bytes of its output are lost"))
            _Output.lost += memoryview(data).nbytes
            return memoryview(data).nbytes


def print_on_console(message: str) -> None:
    """Print a line about this rank on the console, also if the console shows only the output of rank 0."""
    with contextlib.suppress(OSError):
        os.write(_Output.console, f"rank {os.environ.get('RANK')}: {message}\n".encode(errors="replace"))


def _unbuffered(stream: TextIO, number: int) -> TextIO:
    """The stream as opened by `python -u`, which torchrun uses: no output is lost if the process is killed."""
    raw = _Output(number, "wb", closefd=False)
    raw.name = stream.name
    text = io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)
    text.mode = "w"  # type: ignore[misc]
    return text


def _remove_own_modules() -> None:
    """Remove Muster's package `distributed` from sys.modules, and create a new __main__.

    The script may import another package `distributed`: that of Dask, or of another version of Muster.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "distributed"]:
        del sys.modules[name]
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    # Objects that spawned processes send back refer to the script as __mp_main__.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _reseed() -> None:
    """Reseed the global random generators: with the state inherited by fork, all ranks would shuffle alike."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run(script: Script) -> None:
    """Run a module, a file, or a directory or zip file with a __main__, as Python's Modules/main.c does."""
    if script.is_module:
        runpy._run_module_as_main(script.name)  # type: ignore[attr-defined]
        return
    file = os.path.join(os.getcwd(), script.name)
    if pkgutil.get_importer(file) is not None:
        sys.path[:] = [file, *script.path]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    names = sys.modules["__main__"].__dict__
    content = Path(file).read_bytes()
    if file.endswith(".pyc") or content.startswith(importlib.util.MAGIC_NUMBER):
        compiled = importlib.machinery.SourcelessFileLoader("__main__", file)
        names.update(__file__=file, __loader__=compiled, __spec__=None, __cached__=None)
        exec(compiled.get_code("__main__") or "", names)
    else:
        source = importlib.machinery.SourceFileLoader("__main__", file)
        names.update(__file__=file, __loader__=source, __spec__=None, __cached__=None)
        exec(source.source_to_code(content, file), names)


# ---------------------------------------------------------------- shut down as the interpreter does


def _exit_code(request: SystemExit) -> int:
    """The exit code of this request, as Python's handle_system_exit() finds it. Prints a code that is no integer."""
    code: object = request
    with contextlib.suppress(BaseException):  # a property of a subclass
        code = vars(request).get("_tuple", request.code)
    if code is None:
        return 0
    if issubclass(type(code), int):  # isinstance() is true for a mock, too
        number = int.__index__(cast(int, code))
        return number & 0xFF if -(2**63) <= number < 2**63 else 0xFF
    with contextlib.suppress(BaseException):  # stderr is closed, or the code cannot be printed
        print(code, file=getattr(sys, "stderr", None) or sys.__stderr__)
    return 1


def _sys_exit(status: object = None, /) -> NoReturn:
    """sys.exit() of Python 3.10 and 3.11, where a tuple becomes the arguments of SystemExit only if this is caught."""
    try:
        _builtin_exit(cast(Any, status))
    except SystemExit as request:
        if isinstance(status, tuple):
            vars(request)["_tuple"] = status
        raise


def _report(error: BaseException, record: failure_records.RankRecord | None) -> int:
    """Write the failure record, if any, and print the traceback, both without the frames of this package.

    Returns the exit code; -n for signal n.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in LAUNCH_FRAMES:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    interrupted = isinstance(error, KeyboardInterrupt)
    if record:  # written first, because a sys.excepthook of the script may wait, or raise
        _record(record, 128 + signal.SIGINT if interrupted else 1, error)
    _finish_line()
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as request:
        return _exit_code(request)
    except BaseException as failed:  # noqa: BLE001 (of the script's hook; or the script has deleted the hook)
        with contextlib.suppress(BaseException):  # stderr is closed
            sys.stderr.write(f"Error in sys.excepthook: {type(failed).__name__}: {failed}\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
    return -signal.SIGINT if interrupted else 1


def _record(record: failure_records.RankRecord, code: int, error: BaseException | None = None) -> None:
    """Write the failure record. Wake the parent (the agent or, with srun, the supervisor), which stops the other ranks.

    An exit would wake the parent too, but a thread, an exit handler or a destructor may keep this process from exiting.
    """
    if problem := record.write(code, error):
        print_on_console(f"exit code {code}" + (f", {type(error).__name__}: {error}" if error else "") + f"; {problem}")
    with contextlib.suppress(OSError):  # the parent has exited, and the new parent belongs to another user
        os.kill(os.getppid(), signal.SIGCHLD)


def _finish_line() -> None:
    """Write a line break if stderr is a file with an unfinished last line, such as a progress bar.

    Otherwise the traceback would begin on the line of the progress bar.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr closed or removed by the script
        sys.stderr.flush()
        if stat.S_ISREG(os.fstat(2).st_mode):
            with open("/proc/self/fd/2", "rb") as output:
                output.seek(-1, os.SEEK_END)
                if output.read() != b"\n":
                    sys.stderr.write("\n")


def shut_down(code: int) -> int:
    """Wait for threads, call atexit handlers, flush. Returns `code`; LOST_OUTPUT if `code` is 0 and a flush fails."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except OSError:  # a full disk
                code = code or LOST_OUTPUT
    return code


def _finalise(inherited: Mapping[str, ModuleType]) -> None:
    """Remove __main__ and the script's own modules from sys.modules, so that their objects are finalised.

    The interpreter's finalize_modules removes all modules. Here, other installed packages stay: removing PyTorch takes
    a second, and a PyTorch thread that still holds a tensor then aborts even a successful process
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    threading.excepthook = lambda failed: None  # daemon threads, which an interpreter would have ended, print no errors
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    # This finder refers to __main__.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, HiddenModules)]
    # Like the interpreter, collect once while everything is reachable: this puts outer objects before inner ones in the
    # list of the collector. Otherwise the next collection would finalise objects in the order of their creation, and
    # would close a file before it flushes the buffer above the file.
    gc.collect()
    script_packages = _package_of_main()
    script_modules = [
        name for name, module in sys.modules.items()
        if inherited.get(name) is not module
        and (name.partition(".")[0] in script_packages or not _installed(module))
    ]  # fmt: skip
    remaining = [weakref.ref(_ModuleNames(vars(sys.modules.pop(name)))) for name in script_modules]
    gc.collect()
    for reference in reversed(remaining):
        if (found := reference()) is not None:
            _clear(found.names)
    gc.collect()


def _package_of_main() -> set[str]:
    """Return "__main__" and, if the script is in an installed package, its name: both are the user's code."""
    main = sys.modules.get("__main__")
    if main is None or not _installed(main):
        return {"__main__"}
    if spec := getattr(main, "__spec__", None):
        return {"__main__", spec.name.partition(".")[0]}
    return {"__main__", os.path.basename(os.path.dirname(os.path.realpath(main.__file__ or "")))}


class _ModuleNames:
    """Lives as long as a module's __dict__: a weak reference to it shows whether something keeps the dict alive."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        names["_names"] = self


def _installed(module: object) -> bool:
    if not isinstance(module, ModuleType):
        return True
    file = getattr(module, "__file__", None) or ""
    library = os.path.dirname(os.__file__) + os.sep
    return file.startswith(library) or not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))


def _clear(names: dict[str, Any]) -> None:
    """Clear names with one leading underscore first, as the interpreter does."""
    for name in [name for name in names if name.startswith("_") and not name.startswith("__")]:
        names[name] = None
    for name in [name for name in names if name != "__builtins__"]:
        names[name] = None


def _skip_exit_handlers() -> None:
    """Make exit(3) do only this: run the handlers registered from now on, flush C streams, end the process.

    Handlers of libraries that are already loaded are skipped: those of PyTorch take 0.3 s.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # calls _exit(code) before the handlers registered earlier
    libc.__cxa_atexit(libc.fflush, None, None)  # fflush(NULL)


def _exit(code: int) -> NoReturn:
    """End the process with this exit code, or by signal n for -n."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)

    # An exit handler of a library may wait for ever, for a thread that needs the GIL. Meanwhile a signal handler in
    # Python does not run, but one in C does.
    def abandon_handlers(_: int) -> None:
        os.write(2, f"an exit handler of a library has not ended within {EXIT_TIMEOUT} s; abandoned\n".encode())
        os._exit(code)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(abandon_handlers)
    ctypes.CDLL(None).signal(signal.SIGALRM, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.alarm(EXIT_TIMEOUT)
    ctypes.PyDLL(None).exit(code)  # with the GIL: PyTorch's thread-local caches (DTensor) release Python objects
    raise AssertionError
