"""The channel to the program jobs.host.service on a server: requests, replies and events, checked as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from distributed.host.clock import RunningClock
from distributed.jobs.host.host_attempt import END, PROCESS, checked_facts
from distributed.jobs.host.service import HELLO
from distributed.jobs.schedule.backend import Event, NotStarted, ServerUnusable, Unreachable
from distributed.launch.node_reports import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT
from distributed.trust import MAX_TEXT, checked, parse_json, shown

REPLY_TIMEOUT = 60.0  # seconds; the program exits if a request that is not one of SLOW blocks it for CONNECTION_TIMEOUT
SLOW = ("base", "publish_base", "remove_output")  # they read, copy or remove any number of bytes
MAX_GREETING = 1 << 20  # bytes that a login shell may print before the program starts
# Messages of the program; see trust.checked(). A server may send anything else: then the connection is treated as lost.
STATE: dict[str, Any] = {"state": str, **PROCESS}
MIG_UUID = re.compile(r"MIG-[A-Za-z0-9/-]{1,100}")
GPU = {"index": int, "uuid?": str, "memory": int, "used": int | None, "processes": int, "instances?": [MIG_UUID],
       "desktop?": bool}  # fmt: skip
MIG_INSTANCE = {**GPU, "index": MIG_UUID}
LOST_GPU = {"index": int, "lost": str}
BASE = {"state": str, "reason?": str, "staging?": str, "bytes?": int}
GREETING = {"event": str, "protocol": str, "host": str, "boot_id": str}
EVENTS: dict[str, dict[str, Any]] = {
    "heartbeat": {}, "ended": {"attempt": str, **END}, "progress": {"attempt": str, "metrics": dict},
}  # fmt: skip
MAX_GPUS = 1024  # of a server, with their instances
HOST_ERRORS = re.compile("server|job|busy")  # kinds of NotStarted that a host may report
REPLIES: dict[str, dict[str, Any]] = {
    "open": {"workdir": re.compile("/.*", re.DOTALL), "rsync": bool, "session": str, "note": str, "bases": list[str]},
    "query": {"attempts": dict[str, object]},
    "start": {"state": str} | {f"{name.rstrip('?')}?": kind for name, kind in {**PROCESS, **END}.items()},
    "gpus": {"gpus": list[object], "problem": str, "state?": str, "reason?": str}, "exists": {"exists": bool},
    "base": BASE, "publish_base": {f"{name.rstrip('?')}?": kind for name, kind in BASE.items()},
    "remove_session": {"session": str}, "remove_output": {"state?": str, "reason?": str},
}  # fmt: skip


class Channel:
    """Send requests to the program; receive replies and events."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, post: Callable[[Event], None]) -> None:
        self._process, self._name, self._post = process, name, post
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._clock = RunningClock()
        self._last_received = self._clock.now()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def hello(self) -> dict[str, Any]:
        """Return the first message of the program. Skips the output of a login shell.

        Raises EOFError with the output if it did not start, and ServerUnusable if the output is too long.
        """
        assert self._process.stdout
        printed = ""
        while len(printed) < MAX_GREETING:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit of the stream
                break
            if not line:
                raise EOFError(printed.strip())
            text = line.decode(errors="replace").strip()
            with contextlib.suppress(ValueError):
                message = parse_json(text)
                if isinstance(message, dict) and message.get("protocol") == HELLO:
                    self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._send_heartbeats())]
                    return self._checked(GREETING, message)
            printed += text + "\n"
        raise ServerUnusable(f"prints more than {MAX_GREETING >> 20} MiB before Muster starts; correct its login shell")

    async def call(self, verb: str, **facts: Any) -> dict[str, Any]:
        """Send a request and return the reply. Raises Unreachable and HostReplyError."""
        if self.closed.done():
            raise Unreachable(self.closed.result())
        self._next += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"id": self._next, "do": verb, **facts}).encode() + b"\n")
        try:
            reply = await asyncio.wait_for(future, None if verb in SLOW else REPLY_TIMEOUT)
        except asyncio.TimeoutError:
            self._end(f"no reply to {verb} within {REPLY_TIMEOUT:.0f} s")
            raise Unreachable(self.closed.result()) from None
        if "error" in reply:
            reply = self._checked({"error": str, "kind?": HOST_ERRORS}, reply)
            raise HostReplyError(reply["error"], reply.get("kind", "server"))
        reply = self._checked(REPLIES.get(verb, {}), reply)
        if verb == "query":
            return {"attempts": {name: self._state(each) for name, each in self._requested(reply, facts).items()}}
        if verb == "gpus":
            reply["gpus"] = [self._gpu(each) for each in reply["gpus"][:MAX_GPUS]]
        return reply

    def _gpu(self, value: Any) -> dict[str, Any]:
        facts = value if isinstance(value, dict) else {}
        kind = LOST_GPU if "lost" in facts else MIG_INSTANCE if isinstance(facts.get("index"), str) else GPU
        return self._checked(kind, value)

    def _requested(self, reply: dict[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """The states of attempts in a reply to a query, which are those in the request."""
        return self._checked(dict.fromkeys(facts["attempts"], object), reply["attempts"])

    def _state(self, value: Any) -> dict[str, Any]:
        ended = isinstance(value, dict) and value.get("state") == "ended"
        return self._checked({**STATE, **END} if ended else STATE, value)

    def _checked(self, kind: dict[str, Any], value: Any) -> dict[str, Any]:
        """A message of the declared kind; see trust.checked(). Otherwise, close the connection; raises Unreachable."""
        try:
            found = checked_facts(kind, value)
        except ValueError as error:
            self._end(f"invalid reply ({error})")
            raise Unreachable(self.closed.result()) from None
        return found

    async def _read(self) -> None:
        assert self._process.stdout
        received = bytearray()  # an incomplete line
        try:
            while block := await self._process.stdout.read(1 << 18):
                self._last_received = self._clock.now()
                *lines, rest = block.split(b"\n")
                for line in lines:
                    self._handle(parse_json(received + line))
                    received.clear()
                received += rest
                if len(received) > MAX_TEXT:
                    raise ValueError(f"more than {MAX_TEXT >> 20} MiB without a line break")
        except OSError as error:
            self._end(f"connection failed: {error}")
        except ValueError as error:
            self._end(f"invalid reply ({error})")
        self._end("connection closed")

    def _handle(self, message: Any) -> None:
        """Handle a reply or an event. Raises ValueError if it is invalid."""
        facts: dict[str, Any] = checked(dict, message, "message")
        if "reply" in facts:
            future = self._waiting.pop(checked(int, facts.pop("reply"), "reply"), None)
            if future and not future.done():
                future.set_result(facts)
            return
        kind = checked(str, facts.pop("event", None), "event")
        if kind not in EVENTS:
            raise ValueError(f"unknown event {shown(kind)}")
        facts = checked_facts(EVENTS[kind], facts)
        if kind != "heartbeat":
            self._post(Event(kind, self._name, facts))

    async def _send_heartbeats(self) -> None:
        assert self._process.stdin
        while not self.closed.done():
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"\n")
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            if (elapsed := self._clock.now() - self._last_received) > HEARTBEAT_TIMEOUT:
                self._end(f"no heartbeat for {elapsed:.0f} s")

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable(reason))
                future.exception()
        self._waiting.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Stop the program; running jobs continue."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            await self._process.wait()


class HostReplyError(NotStarted):
    """The program replied with an error."""
