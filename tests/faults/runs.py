"""What the fault tests share: a run that is watched while it goes, and what its state folder holds."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from bench.simengine.answers import digest_text
from bench.simengine.record import read_record
from tests.harness import PATIENCE_S, Box, Finished, Json, chat, code, content, wait_until

OUT = "out.jsonl"


class Running:
    """`freight run` on the way; what it says is read as it comes."""

    alive: ClassVar[set["Running"]] = set()

    def __init__(self, box: Box, *arguments: str, stdin: Any = subprocess.DEVNULL, **extra: str) -> None:
        self.child = box.start("run", *arguments, stdin=stdin, **extra)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.alive.add(self)

    def _read(self) -> None:
        assert self.child.stderr is not None
        self._lines.extend(iter(self.child.stderr.readline, ""))

    def said(self) -> str:
        """Return what it has said so far."""
        return "".join(self._lines)

    def wait_for(self, text: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until it has said `text`; it must not end before."""
        wait_until(lambda: text in self.said() or self.child.poll() is not None, f"it says {text!r}", patience_s)
        assert text in self.said(), self.said()

    def signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does."""
        os.killpg(self.child.pid, number)

    def kill(self) -> None:
        """Kill its process group and wait until it is dead."""
        self.signal(signal.SIGKILL)
        self.end()

    def give_up(self) -> None:
        """Kill it if it still runs, whatever it says."""
        if self in self.alive:
            self.child.kill()
            self._close()

    def end(self, timeout: float = PATIENCE_S) -> Finished:
        """Wait for its end."""
        try:
            self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; it said: {self.said()}") from None
        stdout = self._close() if self in self.alive else ""
        assert "Traceback" not in self.said(), self.said()
        return Finished(self.child.returncode, stdout, self.said())

    def _close(self) -> str:
        self.child.wait()
        self._reader.join()
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        with self.child.stdout as out, self.child.stderr:
            self.alive.discard(self)
            return out.read()

    def ends_within(self, limit_s: float) -> Finished:
        """Wait for its end, which must come within `limit_s`."""
        began = time.monotonic()
        finished = self.end(max(limit_s, 10))
        took = time.monotonic() - began
        assert took <= limit_s, f"took {took:.1f} s to end; it said: {finished.stderr}"
        return finished


def records(count: int) -> list[Json]:
    """Return `count` chat records, each with a text of its own that names its index."""
    return [chat(f"r{index}", f"text {index}") for index in range(count)]


def index_of(body: bytes) -> int:
    """Return the index of one of `records` from the body that an engine received."""
    return int(msgspec.json.decode(body)["messages"][0]["content"].split()[1])


def received(file: Path, since: int = 0) -> list[int]:
    """Return the indices of the records that engines recording to `file` received, from the `since`th on."""
    return [index_of(body) for _, body in read_record(file)[since:]] if file.exists() else []


def check_complete(box: Box, count: int, name: str = OUT) -> None:
    """Assert that the output holds the right answer (of a --digest engine) to each of `records`, in order."""
    results = box.results(name)
    assert [result["custom_id"] for result in results] == [f"r{index}" for index in range(count)]
    wrong = [result for index, result in enumerate(results) if code(result) or content(result) != answer(index)]
    assert not wrong, wrong[:3]


def answer(index: int) -> str:
    """Return what a --digest engine answers to one of `records`."""
    return digest_text(f"text {index}")


def ask(output: Path, query: str, database: str = "results.db") -> list[tuple[object, ...]]:
    """Return the rows of a query on a copy of the state that a run has beside `output`."""
    state = output.with_name(output.name + ".freight")
    rows: list[tuple[object, ...]] = []
    for path in [*state.glob(database), *state.glob(f"*/{database}")]:
        with tempfile.TemporaryDirectory() as copies:
            for file in path.parent.glob(database + "*"):
                shutil.copy(file, copies)
            connection = sqlite3.connect(Path(copies, database))
            try:
                if connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table'").fetchone():
                    rows += connection.execute(query)
            finally:
                connection.close()
    return rows


def committed(output: Path) -> set[int]:
    """Return the indices of the records whose results a run has on disk."""
    return {int(str(index)) for (index,) in ask(output, "SELECT idx FROM result")}


def engines_of(box: Box) -> list[int]:
    """Return the pids of the simulated engines that runs of this box started."""
    return with_words(box, "bench.simengine")


def workers_of(box: Box) -> list[int]:
    """Return the pids of the worker processes that runs of this box started."""
    return with_words(box, "freight.worker")


def with_words(box: Box, word: str) -> list[int]:
    """Return the pids of the box's processes that have `word` in their command line."""
    return [process.pid for process in box.processes() if word in command_line(process.pid)]


def command_line(pid: int) -> Sequence[str]:
    """Return the words of a process's command line; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return ()


def nothing_left(box: Box) -> None:
    """Wait until nothing that runs of this box started runs any more."""
    wait_until(lambda: not box.processes(), "all processes are gone", 10)


def without(indices: Iterable[int], done: set[int]) -> None:
    """Assert that no record of `indices` is one that was `done`."""
    again = sorted(set(indices) & done)
    assert not again, f"records that had their result ran again: {again}"


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
