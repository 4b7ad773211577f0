"""Signals that SLURM or a user may send to any process of a run, and how ranks are protected from them.

SLURM sends a signal (sbatch --signal, scancel --signal) to every process of a job step, and the default action of most
signals ends a process. A rank with a handler gets the signal only once, although SLURM signals its launcher too, which
passes signals on. In a SLURM job, a rank without a handler ignores the signals in PROTECTED, but its supervisor stops
the rank after a signal in STOPPING. Other signals end a rank without a handler: they are not ignored, because programs
also send them to themselves (SIGALRM). Standard library only.
"""

from __future__ import annotations

import os
import signal

ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2)  # announce a time limit; a rank without a handler continues
STOPPING = (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR)
PROTECTED = (*ANNOUNCEMENTS, *STOPPING)
# Four kinds of signals are not passed on: requests to end a launcher or supervisor; signals that do no harm by default;
# signals that cannot be handled or that suspend a process; and signals that report an error in a process.
_STOP_REQUESTS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE, signal.SIGXFSZ}
_FIXED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_ERRORS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
# Passed on to the ranks' handlers. The launchers handle the same signals: PASSED_ON in scripts/lib/common.bash.
PASSED_ON = tuple(sorted(signal.valid_signals() - _STOP_REQUESTS - _HARMLESS - _FIXED - _ERRORS))


def name(number: int) -> str:
    """SIGUSR1 for 10; SIGRTMIN+2 for a real-time signal; "signal 32" for one that the C library uses."""
    if number > signal.SIGRTMIN:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    if number in signal.Signals.__members__.values():
        return signal.Signals(number).name
    return "SIGSTKFLT" if number == 16 else f"signal {number}"  # Python 3.10 does not name SIGSTKFLT


def signal_name(code: int | None) -> str:
    """SIGKILL for exit code 137; "" if the exit code is not 128 + a signal that has a name."""
    try:
        return signal.Signals(code - 128).name if code else ""
    except ValueError:
        return ""


def catch(numbers: set[int]) -> tuple[int, int]:
    """Handle these signals by writing their numbers to a pipe. Returns its two ends, which do not block."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return ends


def ignore(numbers: tuple[int, ...] = PASSED_ON) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def use_defaults() -> None:
    """Undo ignore() in a rank, or before an exec of a program that starts ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PROTECTED)
    for number in {*PASSED_ON, *PROTECTED}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    protect()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def protect() -> None:
    """In a SLURM job, let the kernel ignore those of PROTECTED that have no handler.

    This calls the C function, because after signal.signal(), signal.getsignal() would no longer return SIG_DFL.
    Frameworks (Lightning) install a handler only where signal.getsignal() returns SIG_DFL.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    import ctypes

    set_action = ctypes.CDLL(None).signal
    set_action.argtypes, set_action.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in PROTECTED:
        if signal.getsignal(number) == signal.SIG_DFL:
            set_action(number, ctypes.c_void_p(1))  # SIG_IGN
