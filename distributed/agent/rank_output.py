"""Files for the output of the ranks of a node, in directories as torchrun's, and their copies on the console."""

from __future__ import annotations

import contextlib
import os
import select
import string
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import TextIO

from distributed.agent.options import Options
from distributed.launch.output_lines import RankLines, with_prefix

INTERVAL = 0.1  # seconds between two reads of a file
BLOCK = 1 << 20  # bytes per read


class RankOutput:
    """The files of an attempt and, with --tee 3, threads that copy them to the console."""

    def __init__(self, options: Options, ranks: Sequence[int]) -> None:
        """Make a directory for each rank. ranks: of this node."""
        log_dir = options.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
        os.makedirs(log_dir, exist_ok=True)
        attempt = os.path.join(tempfile.mkdtemp(prefix=f"{options.rdzv_id}_", dir=log_dir), "attempt_0")
        directories = [os.path.join(attempt, str(local)) for local in range(len(ranks))]
        self.error_files = [os.path.join(directory, "error.json") for directory in directories]  # by local rank
        self.files = [("", "") for _ in ranks]  # stdout and stderr; "" for those of the agent
        self._finished, self._threads = threading.Event(), list[threading.Thread]()
        for local, directory in enumerate(directories):
            os.makedirs(directory)
            if options.tee:
                self.files[local] = (os.path.join(directory, "stdout.log"), os.path.join(directory, "stderr.log"))
                for file, console in zip(self.files[local], (sys.stdout, sys.stderr), strict=True):
                    arguments = (header(local, ranks[local]), file, console, self._finished)
                    self._threads.append(threading.Thread(target=follow, args=arguments, daemon=True, name="output"))
                    self._threads[-1].start()

    def close(self) -> None:
        """Copy the rest. All ranks have exited."""
        self._finished.set()
        for thread in self._threads:
            thread.join()


def header(local_rank: int, rank: int) -> str:
    """What precedes the lines of this rank on the console, see torchrun's documentation."""
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${local_rank}]:")
    return string.Template(template).safe_substitute(role_name="default", rank=rank, local_rank=local_rank)


def follow(header: str, file: str, dst: TextIO, finished: threading.Event, interval: float = INTERVAL) -> None:
    """Copy complete lines of a rank's output to `dst`, each after the header, until finished.

    An update of a progress bar is written with CR LF, see `distributed.launch.output_lines`.
    """
    while not os.path.exists(file):
        if finished.wait(interval) and not os.path.exists(file):  # the rank may have started and exited meanwhile
            return
    lines = RankLines()
    with open(file, "rb") as output, contextlib.suppress(BrokenPipeError):  # the reader of the console has exited
        while True:
            last = finished.is_set()
            block = output.read(BLOCK)
            if not block and not last:
                finished.wait(interval)
                block = output.read(BLOCK)
            ended = last and not block
            _write(with_prefix(header.encode(), lines.feed(block, ended)), dst)
            if ended:
                break


def _write(text: bytes, dst: TextIO) -> None:
    """Write as many lines at once as fit into PIPE_BUF bytes: such a write to a pipe is atomic."""
    start = 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + select.PIPE_BUF) + 1 or text.index(b"\n", start) + 1
        dst.buffer.write(text[start:end])
        dst.buffer.flush()
        start = end
