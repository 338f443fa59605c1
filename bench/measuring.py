"""Running one program and saying what it took: wall time, CPU of all its processes, memory of each."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SAMPLE_S: Final = 0.1
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Took:
    """What a program and all below it took. Times of `began_at` and `ended_at` are the monotonic clock's.

    `status` is -9 for a program that was ended for its time, or killed on purpose.
    """

    status: int
    began_at: float
    ended_at: float
    cpu_s: float
    peak_mb: float
    total_peak_mb: float

    @property
    def seconds(self) -> float:
        """Return the wall time."""
        return self.ended_at - self.began_at


def absolute_folder(text: str) -> Path:
    """Return a folder that was named on a command line: programs are run in others."""
    return Path(text).absolute()


class Watch(threading.Thread):
    """Looks at a process and all below it, until it is told to stop."""

    def __init__(self, pid: int) -> None:
        """Watch process `pid`."""
        super().__init__(daemon=True)
        self._top = psutil.Process(pid)
        self._stop_asked = threading.Event()
        self._peaks: dict[int, int] = {}
        self._cpu: dict[int, float] = {}
        self._total = 0

    def run(self) -> None:
        """Sample until asked to stop."""
        while True:
            self.look()
            if self._stop_asked.wait(_SAMPLE_S):
                return

    def look(self) -> list[psutil.Process]:
        """Note where each process stands; return them."""
        processes: list[psutil.Process] = []
        with suppress(psutil.Error):
            processes = [self._top, *self._top.children(recursive=True)]
        total = 0
        for process in processes:
            with suppress(psutil.Error, OSError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
                total += int(status.split("VmRSS:")[1].split()[0]) * 1024
                self._peaks[process.pid] = max(peak, self._peaks.get(process.pid, 0))
                times = process.cpu_times()
                self._cpu[process.pid] = times.user + times.system
        self._total = max(self._total, total)
        return processes

    def finish(self) -> None:
        """Stop."""
        self._stop_asked.set()
        self.join()

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds that were seen; the last moments of a process are missing."""
        return sum(self._cpu.values())

    @property
    def peak_mb(self) -> float:
        """Return the highest memory of any process."""
        return max(self._peaks.values(), default=0) / 1e6

    @property
    def total_peak_mb(self) -> float:
        """Return the highest memory of all at once."""
        return self._total / 1e6


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    limit_s: float = 0.0,
    should_kill: Callable[[], bool] | None = None,
) -> Took:
    """Run a program to its end; kill it and all below it after `limit_s`, or when `should_kill` says so.

    What it prints is appended to `log`.
    """
    with log.open("ab") as output:
        began_at = time.monotonic()
        child = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    watch = Watch(child.pid)
    watch.start()
    ended: list[tuple[int, float, float]] = []
    waiter = threading.Thread(target=_wait, args=(child, ended), daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(0.02 if limit_s or should_kill else None)
        is_late = bool(limit_s) and time.monotonic() - began_at > limit_s
        if waiter.is_alive() and (is_late or (should_kill is not None and should_kill())):
            _kill_all(watch)
            waiter.join()
    watch.finish()
    status, ended_at, cpu_s = ended[0]
    cpu_s = max(cpu_s, watch.cpu_s)  # Who was killed reaped nobody.
    return Took(status, began_at, ended_at, cpu_s, watch.peak_mb, watch.total_peak_mb)


def _wait(child: subprocess.Popen[bytes], ended: list[tuple[int, float, float]]) -> None:
    """Reap the program; its CPU time has that of all whom it reaped itself."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    ended.append((child.returncode, time.monotonic(), usage.ru_utime + usage.ru_stime))


def _kill_all(watch: Watch) -> None:
    """Kill them all, and wait until those below the program are gone; the program itself is for its waiter."""
    processes = watch.look()
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes[1:], timeout=_PATIENCE_S)
