"""A worker that is a fork of one warm process, and cannot be told from a fresh `python script.py`.

Importing PyTorch costs a second of one core, and torchrun pays it once more for every rank. Here it is imported once:
Python's own fork server is a fork of the agent, and each rank a fork of that server. `become_main` undoes what marks
such a process as a child, and `work` ends it as an interpreter ends.

What stays different: PyTorch is already imported when the script begins, so what it reads only then (OMP_NUM_THREADS)
must be in the environment of the launch, not be set by the script.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import io
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from distributed import accounts

PRELOAD = ["torch.distributed.run", "torch.distributed.fsdp", "torch.nn.parallel"]
IMPORTLIB = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
LOST_OUTPUT = 120  # exit code of an interpreter that could not write what was printed
BEFORE_THE_SCRIPT = (__file__, runpy.__file__, "<frozen runpy>", *IMPORTLIB)  # the first frames of a traceback


def warm_up() -> None:
    """Start the server that workers are forked from, as a fork of this process: PyTorch is imported once for all.

    To be called before this process has threads of its own.
    """
    importlib.import_module(PRELOAD[0])  # the caller's as well; the rest the server imports while the caller goes on
    multiprocessing.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # that one is an interpreter of its own
    with _forks_in_place_of_interpreters():
        forkserver.ensure_running()


@contextlib.contextmanager
def _forks_in_place_of_interpreters() -> Iterator[None]:
    """What multiprocessing would run as `python -c SOURCE`, with these files open alone, runs in a fork of ours."""
    fresh = util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        pid = os.fork()
        util.spawnv_passfds = fresh  # on both sides
        if pid == 0:
            _run_source(args[-1], passfds)
        return pid

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = fresh


def _run_source(source: str, passed: Collection[int]) -> NoReturn:
    try:
        _close_all_but({0, 1, 2, *passed})
        exec(source, {"__name__": "__main__"})
    finally:
        os._exit(1)


def _close_all_but(kept: Collection[int]) -> None:
    """Above all the pipe by whose end the server is to learn that its caller is gone."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):  # the one with which the list was read
                os.close(number)


@dataclass(frozen=True)
class Script:
    """What a worker runs, and with which words. Not a string: torchrun would replace ${local_rank} in it."""

    name: str  # a path as the person gave it, or a module
    words: tuple[str, ...]
    is_module: bool
    path: tuple[str, ...]  # sys.path of a fresh interpreter, without its first entry
    pass_local_rank: bool = False  # as a word, for scripts written for torch.distributed.launch


def work(script: Script) -> None:
    """Be `python script words...` in this process, to its end. Returns only when it ended well.

    The caller then leaves by os._exit, as multiprocessing does: nothing is left to be done, and in the teardown of an
    interpreter a thread of gloo that still holds a tensor can abort the process, also one that has ended well
    (https://github.com/pytorch/pytorch/pull/179291 tells how).
    """
    try:
        become_main(script)
        _run(script)
    except SystemExit as leaving:
        code = _exit_code(leaving.code)
    except BaseException as error:  # noqa: BLE001 (whatever a script raises)
        code = _report(error)
    else:
        code = 0
    lost = _shut_down()
    if code or lost:
        os._exit(code or LOST_OUTPUT)


# ---------------------------------------------------------------- begin as a fresh interpreter begins


def become_main(script: Script) -> None:
    """Make this fork look like a fresh interpreter that is about to run the script."""
    told = [f"--local-rank={os.environ['LOCAL_RANK']}"] if script.pass_local_rank else []
    sys.argv = [script.name, *told, *script.words]
    first = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.name))
    sys.path[:] = [*([] if getattr(sys.flags, "safe_path", False) else [first]), *script.path]
    _forget_ours()
    _forget_multiprocessing()
    torch_mp = sys.modules.get("torch.multiprocessing")
    if torch_mp is not None:  # it asked for SIGINT at the death of the agent: that would look like Ctrl-C
        torch_mp._prctl_pr_set_pdeathsig(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "SLURM_JOB_ID" not in os.environ:  # there it means that the time is up, and who does not know it must not die
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_random_numbers()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # one line, one write


def _forget_ours() -> None:
    """The kit's own modules: with `import distributed` a script may mean Dask's, or another version of ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "distributed"]:
        del sys.modules[name]
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    # The second name is what spawned processes call a script by, in what they send back.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main


def _forget_multiprocessing() -> None:
    """That this is a child: its name, its parent, and that a start method was chosen."""
    current = multiprocessing.current_process()
    current._name, current._identity, current._parent_pid = "MainProcess", (), None  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)


def _forget_random_numbers() -> None:
    """A fork inherits every global generator: with the same numbers all ranks would shuffle alike."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _run(script: Script) -> None:
    if script.is_module:
        runpy._run_module_as_main(script.name)  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    file = os.path.join(os.getcwd(), script.name)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    names = sys.modules["__main__"].__dict__
    names.update(__file__=file, __loader__=loader, __spec__=None, __cached__=None)
    exec(loader.source_to_code(Path(file).read_bytes(), file), names)


# ---------------------------------------------------------------- end as an interpreter ends


def _exit_code(code: object) -> int:
    """What the interpreter makes of sys.exit(code)."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _report(error: BaseException) -> int:
    """Show the traceback as the interpreter would, without our frames, and keep it for the verdict."""
    trace = _without_ours(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _keep_for_torchrun(error)
    accounts.write_of_rank(code, error)
    return code


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in BEFORE_THE_SCRIPT:
        trace = trace.tb_next
    return trace


def _keep_for_torchrun(error: BaseException) -> None:
    if isinstance(error, Exception) and "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            get_error_handler().record_exception(error)
        except OSError:  # a full disk; about half a file torchrun's agent would raise an error of its own
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)


def _shut_down() -> bool:
    """What an interpreter does at its end, and a multiprocessing child does not. Whether some output is lost."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    lost = False
    for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
        if stream is not None and not getattr(stream, "closed", False):
            try:
                stream.flush()
            except OSError:  # a full disk
                lost = True
    _flush_what_is_open()
    return lost


def _flush_what_is_open() -> None:
    """An interpreter closes the files that a script has left open. It tells of no failure either."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(OSError, ValueError):  # a full disk; closed
                file.flush()
