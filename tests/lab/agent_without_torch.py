"""Run a command line of scripts/lib/agent.py without PyTorch, for tests whose subject is not the agent.

The ranks run by the code of the agent, with the same variables, prefixes of lines, failure records and exit codes.
Differences: all nodes have the same number of ranks; agents do not connect to each other, so only the launcher stops
the other nodes after a failure; no agent stays for the next attempt; and there are no files with the output of a rank,
from which status.sh shows the last line. See tests/lab/without_torch.bash.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PATH = tuple(sys.path[1:])  # of a fresh interpreter, without its first entry
KIT = str(Path(__file__).resolve().parents[2])
sys.path[0] = KIT

from distributed.agent import failure_records  # noqa: E402 - after sys.path is set
from distributed.agent.attempt import COUNT, MAXIMUM, Attempt, AttemptPipes, stable_run_id  # noqa: E402
from distributed.agent.worker import Script, run_script  # noqa: E402
from distributed.exit_codes import STOPPED  # noqa: E402
from distributed.host import signals  # noqa: E402
from distributed.launch.output_lines import RankLines, with_prefix  # noqa: E402
from distributed.launch.threads import share_cores  # noqa: E402

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
REPORT_GRACE, TERM_GRACE = 1.0, 3.0  # seconds, as in distributed.agent.agent


class Rank:
    """A rank and the threads that print its output."""

    def __init__(self, script: Script, variables: dict[str, str]) -> None:
        self.number, self.local = int(variables["RANK"]), int(variables["LOCAL_RANK"])
        self.code: int | None = None  # None: it runs
        self.failure: dict[str, Any] = {}
        self.record = failure_records.RankRecord(os.environ | variables)
        self.pipes = [os.pipe(), os.pipe()]
        self.pid = os.fork()
        if not self.pid:
            for number, (_, end) in enumerate(self.pipes, 1):
                os.dup2(end, number)
            os.closerange(3, 256)  # pipes of other ranks: they must end when those ranks exit
            os.environ.update(variables)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            run_script(script)
        ends = [(out, number) for number, (out, _) in enumerate(self.pipes, 1)]
        self.threads = [threading.Thread(target=self.print_output, args=end, daemon=True) for end in ends]

    def print_output(self, pipe: int, destination: int) -> None:
        header, lines = f"[{failure_records.node_name()}:{self.number}] ".encode(), RankLines()
        while block := os.read(pipe, 1 << 16):
            os.write(destination, with_prefix(header, lines.feed(block)))
        os.write(destination, with_prefix(header, lines.feed(b"", True)))

    def reap(self, ended_by_agent: bool) -> None:
        """Notice that it has exited, or that it has recorded a failure."""
        if self.code is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(found[1])
        record = self.record.read(self.pid) if self.code != 0 else {}
        if self.failure or not (self.code or record):
            return
        code = record.get("exit_code") or (self.code if self.code and self.code > 0 else 128 - (self.code or 0))
        if not ended_by_agent and code != STOPPED:
            sys.stderr.write(f"agent: rank {self.number} (pid {self.pid}) failed with exit code {code}\n")
        self.failure = {
            "rank": self.number, "local_rank": self.local, "pid": self.pid, "time": record.get("time") or time.time(),
            "exit_code": code, "ended_by_agent": ended_by_agent,
        }  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)


def run(ranks: list[Rank]) -> int:
    """Wait for the ranks, and stop them after a signal or a failure. Returns the exit code of the agent."""
    stopped_by, steps = 0, list[tuple[float, signal.Signals]]()
    failed = False
    while any(rank.code is None for rank in ranks):
        woken = signal.sigtimedwait(STOP_SIGNALS | {signal.SIGCHLD}, 0.1)
        if woken and woken.si_signo in STOP_SIGNALS and not stopped_by:
            stopped_by = woken.si_signo
            for rank in ranks:
                rank.send(signal.SIGTERM)
        for rank in ranks:
            rank.reap(ended_by_agent=bool(stopped_by) or (failed and len(steps) < 2))
        write_record(ranks)
        now = time.monotonic()
        if not failed and not stopped_by and any(rank.failure for rank in ranks):
            failed, term_at = True, now + REPORT_GRACE
            steps = [(term_at, signal.SIGTERM), (term_at + TERM_GRACE, signal.SIGKILL)]
        if steps and now >= steps[0][0]:
            _, number = steps.pop(0)
            for rank in ranks:
                rank.send(signal.SIGKILL if rank.failure else number)
    for thread in itertools.chain(*(rank.threads for rank in ranks)):
        thread.join(1)
    failures = sorted((rank.failure for rank in ranks if rank.failure), key=lambda one: one["time"])
    codes = [one["exit_code"] for one in failures]
    if stopped_by and failures:
        return STOPPED if set(codes) == {STOPPED} else 128 + stopped_by
    return codes[0] if codes else 0


def write_record(ranks: list[Rank]) -> None:
    failures = [rank.failure for rank in ranks if rank.failure]
    if failures:
        failure_records.write(failure_records.node_record(failures, [r.number for r in ranks if r.code == 0], None))


def main(arguments: list[str]) -> int:
    end = arguments.index("--")
    options = dict(reversed(list(itertools.pairwise(arguments[:end]))))
    processes, nodes, node = (
        int(options.get(name, default))
        for name, default in (("--nproc-per-node", "1"), ("--nnodes", "1"), ("--node-rank", "0"))
    )
    sys.stderr.write(share_cores(processes) if node == 0 else "")
    signals.ignore()
    AttemptPipes.take()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS | {signal.SIGCHLD})
    script = Script(arguments[end + 1], tuple(arguments[end + 2 :]), "-m" in arguments[:end], PATH)
    standalone = "--standalone" in arguments[:end]
    run_id = stable_run_id(standalone) or options.get("--rdzv-id", "none")
    common = {
        "WORLD_SIZE": nodes * processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": options.get("--master-addr", "127.0.0.1"), "MASTER_PORT": options.get("--master-port", "29500"),
    }  # fmt: skip
    common |= Attempt.from_env().variables({COUNT: "0", MAXIMUM: "0"}, run_id)
    ranks = []
    for local in range(processes):
        own = {"RANK": node * processes + local, "LOCAL_RANK": local}
        ranks.append(Rank(script, {name: str(value) for name, value in (common | own).items()}))
    for rank in ranks:
        for (_, end_of_rank), thread in zip(rank.pipes, rank.threads, strict=True):
            os.close(end_of_rank)
            thread.start()
    with contextlib.suppress(BrokenPipeError):
        return run(ranks)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
