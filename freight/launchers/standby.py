"""A worker process that is started before anybody knows what it is to do, so that it is ready when that is known."""

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from freight.launchers.processes import KEEPS_MARKER, MARKER

# The one argument of such a process; its others come on its standard input.
STANDBY: Final = "--standby"


class Told(msgspec.Struct, frozen=True):
    """What such a process is told: its arguments, and what comes into its environment."""

    arguments: list[str]
    environment: dict[str, str]


class Standby:
    """A process that can become worker `worker`, and does nothing before it is told to.

    It ends by itself when this process does, however that ends.
    """

    def __init__(self) -> None:
        self.worker = uuid.uuid4().hex[:12]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "freight.worker", STANDBY],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **KEEPS_MARKER, MARKER: self.worker},
        )  # fmt: skip

    def is_waiting(self) -> bool:
        """Return whether it is there and has not been told anything."""
        return self._process is not None and self._process.poll() is None

    def tell(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Have it be a worker and return its process, which is the caller's from now on; None where it is gone."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            with process.stdin:
                process.stdin.write(msgspec.json.encode(Told([*arguments], {**environment})))
        except OSError:
            return None
        self._process = None
        return process

    def close(self) -> None:
        """End it, unless it has become a worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            with suppress(OSError):  # What it was not able to read.
                self._process.stdin.close()
        self._process = None


def wait_to_be_told() -> list[str] | None:
    """In such a process: wait for the arguments and return them; None where nobody needs this worker."""
    text = sys.stdin.buffer.read()
    if not text:
        return None
    told = msgspec.json.decode(text, type=Told)
    os.environ.update(told.environment)
    return told.arguments


def write_to(log: Path) -> None:
    """Have what this process and its children write go to a log, and leave them nothing to read."""
    output = open_log(log)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for number, target in enumerate((nothing, output, output)):
        os.dup2(target, number)
    os.close(nothing)
    os.close(output)


def open_log(log: Path) -> int:
    """Return a descriptor of a worker's log, which all who write to it append to."""
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
