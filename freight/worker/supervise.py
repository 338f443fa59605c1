"""The model server as a child process: start it, tell loading from hanging, notice its death, end it."""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from freight.engines.base import ServerCommand
from freight.engines.client import EngineClient
from freight.errors import EngineError
from freight.launchers.processes import MARKER, kill

STOP_GRACE_S: Final = 30.0
# How long what was killed may take to be gone: a process with much memory is not at once.
_GONE_S: Final = 10.0
_GONE_POLL_S: Final = 0.02
_POLL_S: Final = 0.1
_SIGNS_S: Final = 0.5
_DEATH_NOTICE_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
# Signals that somebody else sends (the kernel's out-of-memory killer, a person): no record is to blame.
_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Let orphans of this process's children come to it, so that none escapes."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a server ended. `charged`: by itself, so that a record in flight may be to blame."""

    reason: str
    charged: bool


def describe_exit(code: int) -> Exit:
    """Return what an exit status (negative: a signal) says, in words."""
    if code >= 0:
        # A shell around the server reports a signal's number plus 128.
        return Exit(f"the model server exited with status {code}", charged=code - 128 not in _OUTSIDE)
    number = signal.Signals(-code)
    hint = " (out of memory, or killed by hand)" if number == signal.SIGKILL else ""
    return Exit(f"the model server was ended by {number.name}{hint}", number not in _OUTSIDE)


class ModelServer:
    """One child process in a process group of its own. Its output goes where this process's goes."""

    def __init__(self, command: ServerCommand, keep_open: tuple[int, ...] = ()) -> None:
        self.address = command.address
        self._command = command
        self._keep_open = keep_open
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()

    def start(self) -> None:
        """Start the process; raise EngineError when the command cannot be run."""
        socket_path = self._command.address.socket_path
        if socket_path:
            Path(socket_path).unlink(missing_ok=True)
        try:
            self._process = subprocess.Popen(
                self._command.argv,
                env={**os.environ, **self._command.env},
                stdin=subprocess.DEVNULL,
                pass_fds=self._keep_open,
                process_group=0,
                # One system call, in a process of one thread: nothing can hold a lock here.
                preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )
        except OSError as error:
            raise EngineError(
                f"cannot start the model server {self._command.argv[0]!r}: {error.strerror}",
                transient=False,
                hint="check the command and the executable of the model's entry",
            ) from error
        self._watch(self._process)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        # A pidfd becomes readable when the process ends: no polling, and no race with a reused pid.
        fd = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            # The rest of its group, before it is reaped: until then nobody else can have its number.
            self._signal(signal.SIGKILL)
            process.wait()
            self._exited.set()

        loop.add_reader(fd, ended)

    def exit(self) -> Exit | None:
        """Return how the server ended; None while it runs."""
        code = self._process.returncode if self._process else None
        return None if code is None else describe_exit(code)

    async def exited(self) -> Exit:
        """Wait for the server's end and return how it came."""
        await self._exited.wait()
        return self.exit() or Exit("the model server was never started", charged=False)

    async def dies(self) -> bool:
        """Return whether the server ends within a second: a broken connection often comes first."""
        try:
            async with asyncio.timeout(_DEATH_NOTICE_S):
                await self._exited.wait()
        except TimeoutError:
            return False
        return True

    async def wait_ready(self, client: EngineClient, log: Path, limits: "StartLimits") -> None:
        """Wait until the server answers its health probe.

        Raises EngineError when it exits, shows no sign of work for `stall_s`, or takes longer than `most_s`.
        """
        began = moved = looked = time.monotonic()
        signs = self._signs(log, "")
        while True:
            trouble = await client.problem()
            ended = self.exit()
            if ended:
                # Looked at first: where our server could not have its port, somebody else's may answer there.
                raise EngineError(f"{ended.reason} while it was loading", transient=True)
            if trouble is None:
                return
            now = time.monotonic()
            if now < looked + _SIGNS_S:
                await asyncio.sleep(_POLL_S)
                continue
            looked = now
            if (fresh := self._signs(log, trouble)) != signs:
                signs, moved = fresh, now
            if now - moved > limits.stall_s:
                raise EngineError(
                    f"the model server hangs in loading: no output, CPU time or reading for {limits.stall_s:g} s",
                    transient=True,
                )
            if now - began > limits.most_s:
                raise EngineError(f"the model server was not ready after {limits.most_s:g} s", transient=True)
            await asyncio.sleep(_POLL_S)

    def _signs(self, log: Path, trouble: str) -> tuple[object, ...]:
        """Return what changes while a server gets on with loading: its output, its CPU time and what it reads."""
        cpu_s = read = 0.0
        for process in self._tree():
            try:
                times = process.cpu_times()
                cpu_s += times.user + times.system
                read += process.io_counters().read_chars
            except psutil.Error:
                continue
        size = log.stat().st_size if log.exists() else 0
        return size, int(cpu_s), int(read) >> 20, trouble

    def _tree(self) -> list[psutil.Process]:
        """Return the server's processes: all below this one where it is a worker's own, to which orphans come."""
        assert self._process is not None
        try:
            root = psutil.Process() if MARKER in os.environ else psutil.Process(self._process.pid)
            return root.children(recursive=True)
        except psutil.Error:
            return []

    async def stop(self, grace_s: float = STOP_GRACE_S) -> list[int]:
        """End the server and all that it started: SIGTERM, `grace_s`, then SIGKILL. Returns when all are gone.

        Those that cannot be ended are returned, after ten seconds. A server that has ended has no group any more: its
        number may be another's.
        """
        if self._process is None:
            return []
        tree = self._tree()
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._exited.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
        await self._exited.wait()
        return await self._until_gone(tree)

    async def _until_gone(self, tree: list[psutil.Process]) -> list[int]:
        """Kill what is left of the server until nothing is; return what is left in the end.

        Looked for again each time: one that is being ended may just have started another.
        """
        until = time.monotonic() + _GONE_S
        while True:
            left = [process for process in {*tree, *self._tree()} if is_left(process)]
            if not left or time.monotonic() > until:
                return sorted(process.pid for process in left)
            for process in left:
                kill(process)
            await asyncio.sleep(_GONE_POLL_S)

    def _signal(self, signum: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)


@dataclass(frozen=True, slots=True)
class StartLimits:
    """How long a start may show no sign of work, and how long it may take in all. Seconds."""

    stall_s: float
    most_s: float


def is_left(process: psutil.Process) -> bool:
    """Return whether a process is still there; one that has ended is reaped, where it has come to this process."""
    try:
        if not process.is_running():
            return False
        if process.status() != psutil.STATUS_ZOMBIE or process.ppid() != os.getpid():
            return True
        # Not reaped while one of its threads holds on to its memory.
        return os.waitpid(process.pid, os.WNOHANG)[0] == 0
    except (psutil.Error, ChildProcessError):
        return False
