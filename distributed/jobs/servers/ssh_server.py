"""A server over ssh.

The channel and rsync share one OpenSSH connection per server. The dispatcher copies jobs.host and the modules that it
imports to ~/.cache/muster/ of each server, so a server needs only ssh, bash, tar, Python 3.10 and, unless it shares
files with this machine, rsync.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import io
import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.files import KIT
from distributed.host import sync_list
from distributed.host.replies import ssh_failure
from distributed.host.ssh_call import LOGIN_SHELL, login_failure
from distributed.jobs.host import checks, host_attempt, outputs
from distributed.jobs.host.panes import ENTRY, HOST, PLAIN_PYTHON
from distributed.jobs.journal.state import Attempt
from distributed.jobs.lists import config
from distributed.jobs.lists.job import Job
from distributed.jobs.schedule.backend import Event, ServerUnusable, Unreachable
from distributed.jobs.servers.channel import Channel
from distributed.jobs.servers.host_server import CONNECT_TIMEOUT, HostServer, ListContext
from distributed.jobs.servers.programs import last_line, read_tail, run_program
from distributed.jobs.servers.sockets import sockets_directory, write_ssh_config
from distributed.transport.commands import VANISHED, call_ssh, rsync_shell
from distributed.transport.owners import (
    EXIT_IF_FOREIGN,
    EXIT_IF_REFUSED,
    FOREIGN,
    MAKE_BELOW,
    MAKE_TARGET,
    owners_above,
)
from distributed.trust import PRIVATE_DIRECTORY, make_own_directory, place

LOGIN_TIMEOUT = 50.0  # seconds within which the login shell must start a command
MAX_RSYNCS = 2  # concurrent rsyncs with a server, in each direction
MAX_ATTEMPTS_PER_RSYNC = 100
NOT_INSTALLED = "muster-upload"  # printed by a server without the files of KIT_FILES
NO_PYTHON = "muster-no-python"  # printed by a server without Python 3.10 or newer
# Exit codes: ~/ml-customization exists; rsync is missing; a command has failed on the server, see reporting_error().
DEFAULT_WORKDIR_EXISTS, NO_RSYNC, FAILED = 3, 4, 5
LOST_CONNECTION = (12, 30, 35, 255)  # exit codes of rsync
# For bash, after FOREIGN, with the directory of Muster's copy in $d: fails if another user could replace it.
# Who owns a directory above ~/.cache is trusted, but ~/.cache may lead to one where all users can create files.
CHECK_CACHE = (
    '(k=strict owners="$(id -u) 0"; [ "${XDG_CACHE_HOME-}" ] || k=planted; '
    f'cd -- "$d" || exit; {EXIT_IF_REFUSED.format(kind="$k")})'
)
# Options of rsync. Results are received in a new directory without links to directories, see SshServer._receive().
SENDING = ("--archive", "--sparse")
RECEIVING = ("--links", "--perms", "--times", "--sparse", "--chmod=Du+rwx,Fu+rw,go-w", f"--exclude={outputs.OWNER}")
FILES_FROM = ("--recursive", "--from0", "--files-from=-")  # the standard input of rsync has the paths, ended by NUL
# The files that jobs.host.service and its supervisors need on a server. The list leaves out distributed/runs/, because
# usage_sampler.py imports it only to take samples, and supervisors of jobs take none.
KIT_FILES = (
    "distributed/__init__.py", "distributed/attempts.py", "distributed/exit_codes.py", "distributed/files.py",
    "distributed/metrics.py", "distributed/trust.py",
    "distributed/host/__init__.py", "distributed/host/clock.py", "distributed/host/collectives.py",
    "distributed/host/gpus.py", "distributed/host/process_scan.py", "distributed/host/signals.py",
    "distributed/host/system.py",
    "distributed/jobs/__init__.py", "distributed/jobs/host/__init__.py", "distributed/jobs/host/checks.py",
    "distributed/jobs/host/host_attempt.py", "distributed/jobs/host/outputs.py", "distributed/jobs/host/panes.py",
    "distributed/jobs/host/service.py",
    "distributed/launch/__init__.py", "distributed/launch/command_output.py", "distributed/launch/console_stream.py",
    "distributed/launch/node_environment.py", "distributed/launch/node_files.py",
    "distributed/launch/node_processes.py", "distributed/launch/node_reports.py",
    "distributed/launch/node_requests.py", "distributed/launch/output_lines.py",
    "distributed/launch/output_metrics.py", "distributed/launch/shown_ranks.py",
    "distributed/launch/supervisor.py", "distributed/launch/supervisor_options.py",
    "distributed/launch/usage_sampler.py",
    "distributed/training/__init__.py", "distributed/training/base_model.py",
    "scripts/lib/module.py", "scripts/lib/in_node_env.sh", "scripts/lib/environment.bash",
    "scripts/lib/common.bash", "scripts/lib/node_env.bash",
)  # fmt: skip


class SshServer(HostServer):
    """A server over ssh."""

    remote = True

    def __init__(self, name: str, server: config.Server, context: ListContext) -> None:
        super().__init__(name, server, context)
        self.shared = False
        self._fetching, self._sending = asyncio.Semaphore(MAX_RSYNCS), asyncio.Semaphore(MAX_RSYNCS)
        # (directories, names of files left out) of each attempt whose results are to be fetched
        self._to_fetch: list[tuple[list[str], asyncio.Future[list[str]]]] = []
        self._fetched_partly: set[str] = set()  # output directories of attempts whose results will be fetched again
        self._synced = not context.sync
        self._archive_name, self._archive = kit_archive()
        self._config = Path()  # of ssh

    def _ssh(self, line: str) -> list[str]:
        """The command that runs a line of bash on the server. Standard input is held back until the line starts."""
        return call_ssh(self._ssh_to_server(), self.settings.host, line, LOGIN_TIMEOUT)

    def _ssh_to_server(self) -> list[str]:
        return ["ssh", "-F", str(self._config), "--", self.settings.host]

    def _write_config(self) -> None:
        self._config = sockets_directory(self.context.cwd, self.context.list_id) / f"{self.name}.conf"
        write_ssh_config(self._config, self.settings)

    async def _prepare(self) -> None:
        self._write_config()
        if not self._synced:
            await self._sync()

    async def _open_channel(self, post: Callable[[Event], None]) -> Channel:
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                *self._ssh(f"cd; {self._host_program('serve')}"), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=1 << 24, start_new_session=True,
            )  # fmt: skip
            channel = Channel(process, self.name, post)
            errors = asyncio.ensure_future(read_tail(process.stderr))
            try:
                self._refuse_same_machine(await channel.hello())
                return channel
            except EOFError as error:
                printed = str(error)
                code = await process.wait()
                stderr = await errors
            except BaseException:  # such as a cancellation after CONNECT_TIMEOUT
                await channel.close()
                raise
            if NOT_INSTALLED in printed:
                await self._upload()
                continue
            if NO_PYTHON in printed:
                setting = f"python {self.settings.python}: " if self.settings.python else ""
                raise ServerUnusable(f"{setting}no Python 3.10 or newer; install it, or set python for this server")
            raise ssh_error(stderr or printed, code, self.settings.host)
        raise ServerUnusable("cannot copy Muster to it: the copy was removed at once; correct this on the server")

    def _host_program(self, arguments: str) -> str:
        """Bash that runs the program, or prints NOT_INSTALLED or NO_PYTHON. To be run in the home directory."""
        python, workdir = self.settings.python or "", self.settings.workdir
        bases = [workdir] if workdir else ["~/ml-customization", str(self.context.cwd)]
        below = [] if python.startswith(("~", "/")) else [f"{base}/{python or '.venv/bin/python'}" for base in bases]
        candidates = [python, *below] if python else [*below, "python3"]
        unnamed = [] if python and workdir else below
        # Another user may have made a directory or link of this name, or could replace it.
        check = f'(cd -- "${{p%/*}}" || exit; {EXIT_IF_FOREIGN}) 2>/dev/null && [ ! "$(foreign planted "$p")" ]'
        names, pythons = "|".join(map(quoted_path, unnamed)), " ".join(map(quoted_path, candidates))
        own = f"case $p in {names}) {check} || continue ;; esac; " if unnamed else ""
        # A setting may name what another user has made where all users can create files. Who owns a workdir is trusted.
        owner = f" $(stat -L -c %u -- {quoted_path(workdir)} 2>/dev/null)" if workdir else ""
        refuse = '[ ! -e "$p" ] || { r=$(foreign planted "$p"); [ ! "$r" ]; } || { echo "$r" >&2; exit 69; }'
        own += f"case $p in */*) {refuse} ;; esac; "
        plain = " ".join(PLAIN_PYTHON)
        newer = shlex.quote("import sys; sys.exit(sys.version_info < (3, 10))")
        return (
            f"{FOREIGN}; open= owners={shlex.quote(owners_above(str(self.context.cwd), self._owners_here))}"
            f'"{owner}"; d="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster/jobs-{self._archive_name}"; '
            f'[ -e "$d/complete" ] || {{ echo {NOT_INSTALLED}; exit 0; }}; '
            f'[ -O "$d" ] || {{ echo "$d belongs to another user" >&2; exit 69; }}; {CHECK_CACHE} || exit; '
            f"for p in {pythons}; do {own}"
            f'if "$p" {plain} -c {newer} 2>/dev/null; then '
            f'exec "$p" {plain} "$d/{ENTRY}" {HOST} {arguments}; fi; done; '
            f"echo {NO_PYTHON}"
        )

    def _upload_line(self) -> str:
        """A line of bash that copies Muster from its standard input to the server."""
        return reporting_error(
            f'{FOREIGN}; d="${{XDG_CACHE_HOME:-$HOME/.cache}}/muster"; n="$d/jobs-{self._archive_name}"; '
            'umask 077; { [ "${XDG_CACHE_HOME-}" ] || cd; } && mkdir -p -- "$d" && '
            f'{CHECK_CACHE} && chmod go-w -- "$d" && '
            't=$(mktemp -d "$d/new-XXXXXX") && { '
            'tar -xf - -C "$t" && touch "$t/complete" && '
            '{ mv -T "$t" "$n" 2>/dev/null || [ -e "$n/complete" ] || { rm -rf "$n" && mv -T "$t" "$n"; }; }; '
            's=$?; rm -rf "$t"; [ "$s" = 0 ]; }'
        )

    async def _upload(self) -> None:
        code, stderr = await self._run(self._ssh(self._upload_line()), self._archive)
        if code == FAILED:
            raise ServerUnusable(f"cannot copy Muster to it: {reported_error(stderr, 'XDG_CACHE_HOME there')}")
        if code:
            raise ssh_error(stderr, code, self.settings.host)

    async def _sync(self) -> None:
        """Copy the files of the working directory to the server; nothing is deleted."""
        try:
            names = await asyncio.to_thread(sync_list.names_of, str(self.context.cwd))
            below = await asyncio.to_thread(sync_list.directory_list, str(self.context.cwd), names)
        except (sync_list.SyncError, OSError) as error:
            raise ServerUnusable(f"--sync: {error}") from None
        target = self.settings.workdir or str(self.context.cwd)
        # Without a setting, an existing ~/ml-customization is used, as by jobs.host.checks.find_workdir().
        enter = f"make_target {quoted_path(target)}; {EXIT_IF_FOREIGN}"
        usual = "[ -d ~/ml-customization ]"
        if not self.settings.workdir:
            enter = f"if {usual}; then cd ~/ml-customization || exit; else {enter}; fi"
        line = f"command -v rsync >/dev/null || exit {NO_RSYNC}; " + reporting_error(
            f"{FOREIGN}; {MAKE_TARGET}; {MAKE_BELOW}; owners={shlex.quote(owners_above(str(self.context.cwd)))}; "
            f"umask 022; {enter}; make_below"
        )
        if not self.settings.workdir:
            line += f"; ! {usual} || exit {DEFAULT_WORKDIR_EXISTS}"
        self._refuse_without_rsync(on_server=True)
        code, stderr = await self._run(self._ssh(line), below, seconds=CONNECT_TIMEOUT)
        self._refuse_without_rsync(on_server=code != NO_RSYNC)
        if code == DEFAULT_WORKDIR_EXISTS:
            target = "ml-customization"
        elif code == FAILED:
            raise ServerUnusable(f"cannot create workdir {target}: {reported_error(stderr, 'another workdir')}")
        elif code:
            raise ssh_error(stderr, code, self.settings.host)
        target = target.removeprefix("~/")
        options = [*FILES_FROM, *write_through_links(), "--ignore-missing-args", "--exclude=.git"]
        arguments = [*options, "--", f"{self.context.cwd}/", f"server:{rsync_literal(target)}/"]
        try:
            await self._rsync(arguments, sync_list.file_list(names))
        except OSError as error:
            reason = checks.with_remedy(str(error), "another workdir")
            raise ServerUnusable(f"cannot copy the working directory to it: {reason}") from None
        self._synced = True

    async def _after_open(self, opened: Mapping[str, Any]) -> None:
        self.shared = await self._shares_files()
        if not self.shared:
            self._refuse_without_rsync(on_server=opened["rsync"])

    def _refuse_without_rsync(self, on_server: bool) -> None:
        if not on_server:
            raise ServerUnusable("rsync is not installed there; install it (apt-get install rsync)")
        if not shutil.which("rsync"):
            raise ServerUnusable("rsync is not installed on this machine; install it (apt-get install rsync)")

    async def _shares_files(self) -> bool:
        """Whether a file created in the working directory here also exists in the server's working directory."""
        try:
            file, path = tempfile.mkstemp(prefix=".muster-", dir=self.context.cwd)
        except OSError:
            return False
        try:
            os.close(file)
            return bool((await self._call("exists", path=os.path.basename(path)))["exists"])
        finally:
            os.unlink(path)

    def _attach_command(self) -> str:
        if not self.session:
            return ""
        user = f"{self.settings.user}@" if self.settings.user else ""
        port = f" -p {self.settings.port}" if self.settings.port else ""
        key = f" -i {shlex.quote(self.settings.ssh_key)}" if self.settings.ssh_key else ""
        return f"watch: ssh -t{port}{key} {user}{self.settings.host} tmux attach -t {self.session}"

    def follow_command(self, attempt: Attempt, once: bool) -> list[str]:
        """The command that prints the log of an attempt until the attempt ends. once: only the current content."""
        self._write_config()
        default = f'w=~/ml-customization; [ -d "$w" ] || w={shlex.quote(str(self.context.cwd))}'
        workdir = f"w={quoted_path(self.settings.workdir)}" if self.settings.workdir else default
        log = f'"$w"/{shlex.quote(f"logs/jobs/{self.context.list_id}/{attempt.name}/node_{self.name}")}'
        end = "/" if once else f"{log}.exit"  # `follow` returns once this path exists
        line = f"cd; {workdir}; {self._host_program(f'follow {log}.log {end}')}"
        return self._ssh(line)

    # ---- results

    async def fetch_results(self, attempt: Attempt, job: Job) -> Sequence[str]:
        if self.shared:
            return ()
        try:
            cwd, script = str(self.context.cwd), self.context.script_name
            os.close(outputs.claim_output(cwd, os.path.join(cwd, job.output), job.owner, script))
        except outputs.HostError as error:
            raise (Unreachable if error.kind == "busy" else OSError)(str(error)) from None
        log = f"logs/jobs/{self.context.list_id}/{attempt.name}"
        fetched: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._to_fetch.append(([job.output, log], fetched))
        async with self._fetching:
            if not fetched.done():
                batch, self._to_fetch = self._to_fetch[:MAX_ATTEMPTS_PER_RSYNC], self._to_fetch[MAX_ATTEMPTS_PER_RSYNC:]
                await self._fetch(batch)
        return await asyncio.shield(fetched)

    async def _fetch(self, batch: Sequence[tuple[list[str], asyncio.Future[list[str]]]]) -> None:
        """Copy the results of several attempts with one rsync: one rsync per attempt is too slow for short jobs."""
        if not batch:
            return
        self._fetched_partly |= {several[0] for several, _ in batch}
        try:
            staging = self._staging()
            await self._receive([directory for several, _ in batch for directory in several], staging)
            left_out = await asyncio.to_thread(self._place, staging, [several for several, _ in batch])
        except (Unreachable, OSError) as error:
            if isinstance(error, OSError) and len(batch) > 1:  # the error may concern only one attempt
                for each in batch:
                    await self._fetch([each])
                return
            for _, fetched in batch:
                fetched.set_exception(error)
        else:
            for (_, fetched), names in zip(batch, left_out, strict=True):
                fetched.set_result(names)
            self._fetched_partly -= {several[0] for several, _ in batch}
            if not self._fetched_partly:  # remove also what the server has sent without a request
                os.rename(staging, unused := f"{staging}.{os.urandom(4).hex()}")
                asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, unused, True)

    def _staging(self) -> str:
        """Create the private directory that receives results, on the disk of the results. Raises OSError.

        An interrupted copy leaves complete files there, which the next one does not copy again.
        """
        parent = os.path.realpath(self.context.cwd / "experiments")
        path = os.path.join(parent, f".muster-{self.context.list_id}-{self.name}")
        checks.make_private(path)
        return path

    async def _receive(self, directories: Sequence[str], staging: str) -> None:
        """Copy directories from the server, except files that are unchanged since an earlier copy."""
        arguments = [*FILES_FROM, f"--compare-dest={self.context.cwd}", "--"]
        arguments += [f"server:{rsync_literal(self.workdir)}/", f"{staging}/"]
        await self._rsync(arguments, names_for_rsync(directories), RECEIVING)

    def _place(self, staging: str, batch: Sequence[Sequence[str]]) -> list[list[str]]:
        """Move the results of attempts to their places. Returns for each attempt what was left out of its output.

        batch: output and log directory of each attempt. The user may have replaced these directories, and those above
        them, by links. Other links are not followed.
        """
        resolved, found = functools.cache(os.path.realpath), []
        for directories in batch:
            left_out = []
            for directory, mask in zip(directories, (0o755, PRIVATE_DIRECTORY), strict=True):
                source, target = os.path.join(staging, directory), os.path.join(self.context.cwd, directory)
                above = os.path.dirname(source)
                if resolved(above) != above or os.path.islink(source):
                    raise OSError(errno.ELOOP, "the server has replaced it by a link", directory)
                if os.path.isdir(source):  # otherwise removed while it was copied
                    target = os.path.join(resolved(os.path.dirname(target)), os.path.basename(target))
                    target = resolved(target) if os.path.islink(target) else target
                    left_out.append(place(source, target, mask, keeps_newer=False))
                    for name in left_out[-1]:
                        is_file = stat.S_ISREG(os.lstat(os.path.join(source, name)).st_mode)
                        if is_file and os.path.isdir(os.path.join(target, name)):
                            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.path.join(target, name))
            found.append(left_out[0] if left_out else [])
        return found

    async def _copy_base(self, digest: str, staging: str) -> dict[str, Any]:
        """Copy a base model to a staging directory on the server, which then verifies the copy and renames it."""
        failed = True
        try:
            async with self._sending:
                target = f"server:{rsync_literal(self.workdir)}/{rsync_literal(staging)}/"
                await self._rsync([*write_through_links(), "--", f"{self.context.cache.path(digest)}/", target])
            failed = False
        except OSError as error:
            return {"state": "failed", "reason": str(error)}
        finally:
            reply = await self._call("publish_base", digest=digest, staging=staging, failed=failed)
        return reply

    async def send_results(self, jobs: Sequence[Job]) -> None:
        present = [job for job in jobs if (self.context.cwd / job.output).is_dir()]
        if self.shared or not present:
            return
        for job in present:
            make_own_directory(str(self.context.cwd / job.output), str(self.context.cwd))
            await self._call("claim", output=job.output, job=job.owner, script=self.context.script_name)
        async with self._sending:
            names = names_for_rsync([job.output for job in present])
            target = f"server:{rsync_literal(self.workdir)}/"
            await self._rsync([*FILES_FROM, *write_through_links(), "--", f"{self.context.cwd}/", target], names)

    async def _rsync(self, arguments: Sequence[str], data: bytes = b"", options: Sequence[str] = SENDING) -> None:
        options = [*options, "--protect-args", "--timeout=60"]
        call = ["rsync", *options, "-e", rsync_shell(self._ssh_to_server()), *arguments]
        code, stderr = await self._run(call, data)
        if code in (0, VANISHED):
            return
        errors = [line for line in stderr.splitlines() if not line.startswith("rsync error:")]  # without the summary
        cause = next((line for line in errors if line.startswith("rsync:")), "".join(errors[-1:]))
        lost = code in LOST_CONNECTION or "connection unexpectedly closed" in cause
        if lost and "No space left on device" not in cause:
            raise Unreachable(last_line(stderr) or f"rsync: exit code {code}")
        raise OSError(cause[: host_attempt.MAX_TEXT] or f"rsync: exit code {code}")

    async def _run(self, command: Sequence[str], data: bytes = b"", seconds: float | None = None) -> tuple[int, str]:
        """Run a command with this standard input; return (exit code, standard error)."""
        code, _, stderr = await run_program(command, data, seconds=seconds)
        return code, stderr.strip()


@functools.cache
def write_through_links() -> tuple[str, ...]:
    """The options with which rsync writes through a symbolic link to a directory; see transport/rsync_shell.py."""
    known = subprocess.run(["rsync", "--insecure-links", "--version"], stdin=subprocess.DEVNULL, capture_output=True)
    return ("--keep-dirlinks", *(["--insecure-links"] if known.returncode == 0 else []))


def names_for_rsync(directories: Sequence[str]) -> bytes:
    """The standard input of rsync with FILES_FROM, for whole directories."""
    return b"".join(os.fsencode(f"{name}/") + b"\0" for name in directories)


def ssh_error(stderr: str, code: int, name: str) -> Exception:
    """The exception for a failed ssh command: ServerUnusable if a retry is useless, otherwise Unreachable."""
    if "Temporary failure in name resolution" in stderr:  # this machine may have no network: retry
        return Unreachable(last_line(stderr))
    if LOGIN_SHELL in stderr:
        return ServerUnusable(login_failure(stderr))
    if error := ssh_failure(" ".join(stderr.split()), name):
        return ServerUnusable(error)
    return Unreachable(last_line(stderr) or f"ssh: exit code {code}")


def reporting_error(line: str) -> str:
    """A line of bash that runs `line`; on failure, it prints the errors in one line and exits with FAILED."""
    report = f"printf '%s\\n' \"${{e//$'\\n'/$'\\t'}}\" >&2; exit {FAILED}"
    return f"export LC_ALL=C; e=$({{ {line}; }} 2>&1) || {{ {report}; }}"


def reported_error(stderr: str, setting: str) -> str:
    """An error that reporting_error() has printed, and its remedy. setting: a setting that avoids the error."""
    return checks.with_remedy(last_line(stderr).replace("\t", "\n"), setting)


def quoted_path(path: str) -> str:
    """Quote a path for bash; a leading ~/ remains the home directory."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else "~" if path == "~" else shlex.quote(path)


def rsync_literal(path: str) -> str:
    """Escape a remote path for rsync if it contains wildcards; rsync does not unescape a path without them."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if set("*?[") & set(path) else path


@functools.cache
def kit_archive() -> tuple[str, bytes]:
    """(name, tar archive) of KIT_FILES; the name is a hash of the contents."""
    buffer = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in KIT_FILES:
            path = Path(KIT, name)
            digest.update(name.encode() + b"\0" + path.read_bytes())
            archive.add(path, name)
    return digest.hexdigest()[:12], buffer.getvalue()
