"""What Freight needs to know of any model server."""

import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from freight.core.model import ModelSpec
from freight.core.record import Endpoint
from freight.errors import UserError, refusing


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: `url` for requests, over the Unix socket `socket_path` where it has one."""

    url: str
    socket_path: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server to start: its command line, the variables to add, and where it will listen."""

    argv: list[str]
    env: dict[str, str]
    address: Address


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker runs its server.

    `folder` is the worker's own (mode 0700, short enough for sockets); `source` its share of the
    model's sources; `endpoints` those that the job uses; `concurrency` the user's, 0 when automatic.
    `gpus` is how many it has, 0 on the CPU; `media_hosts` those from which records may have media fetched.
    `shown`: the command is for reading, with placeholders for what each start chooses.
    """

    folder: Path
    source: str
    endpoints: frozenset[Endpoint]
    concurrency: int
    gpus: int = 0
    media_hosts: tuple[str, ...] = ()
    shown: bool = False

    def port(self) -> str:
        """Return a loopback port that is free now, or its placeholder."""
        return "{port}" if self.shown else str(free_port())

    def key(self) -> str:
        """Return an API key made for one start, or its placeholder."""
        # Hexadecimal: a key that began with "-" would be read as an option.
        return "{api_key}" if self.shown else secrets.token_hex(24)

    def socket_path(self) -> str:
        """Return the path of the server's Unix socket, or its placeholder."""
        return "{socket}" if self.shown else str(self.folder / "engine.sock")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a server is busy with: requests that run and that wait, and how full its cache is (0 to 1), where known.

    `preemptions` counts how often it had to put a request back for want of cache.
    """

    running: int
    waiting: int
    cache_use: float | None = None
    preemptions: int | None = None


class Engine(Protocol):
    """One kind of model server. `starts_server`: Freight starts it, on a device; else it runs already.

    `staggers`: several that start at once on one machine mis-measure its free memory.
    """

    starts_server: bool
    staggers: bool

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Raise UserError when this machine cannot start the model's server on so many GPUs, whatever their size."""
        ...

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return the server to start; None where one already runs."""
        ...

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Return where the server listens that already runs. Only for engines without a command."""
        ...

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return how many requests the server runs at once; None when nothing is known."""
        ...

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return what of a job, beside its model, a server is started by: one server fits jobs of equal shape."""
        ...

    def tokens_made(self, metrics: str) -> float | None:
        """Return a count that grows with every token made, from the server's metrics; None without one."""
        ...

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what the server is busy with, from its metrics; None when they do not say."""
        ...

    def why(self, log_tail: Sequence[str]) -> str:
        """Return why the server ended, from its last output, in words that hold nothing of a record; "" if unknown."""
        ...


# Beyond this a float is no exact number.
_MOST_COUNT: Final = 2.0**53


def metric(text: str, name: str) -> float | None:
    """Return the sum of the samples called `name` in Prometheus text; None when there are none that can be read.

    Neither can a sum below zero or beyond what a count can be.
    """
    values = _samples(text, name)
    total = sum(values)
    return total if values and 0 <= total <= _MOST_COUNT else None


def _samples(text: str, name: str) -> list[float]:
    """Return the samples called `name`, none when one of them is no number. Only their lines are looked at."""
    found: list[float] = []
    text, end = f"\n{text}\n", 0
    while (begin := text.find("\n" + name, end)) >= 0:
        end = text.find("\n", begin + 1)
        line = text[begin + 1 : end]
        if line.startswith((name + " ", name + "{")):
            try:
                found.append(float(line.rsplit(None, 1)[1]))
            except (ValueError, IndexError):
                return []
    return found if all(map(math.isfinite, found)) else []


def load_of(
    text: str, running: str, waiting: str, cache_use: str | None = None, preemptions: str | None = None
) -> EngineLoad | None:
    """Return the load that the metrics of these names tell; None without both counts."""
    counts = metric(text, running), metric(text, waiting)
    if counts[0] is None or counts[1] is None:
        return None
    preempted = metric(text, preemptions) if preemptions else None
    return EngineLoad(
        round(counts[0]),
        round(counts[1]),
        _mean(text, cache_use) if cache_use else None,
        None if preempted is None else round(preempted),
    )


def _mean(text: str, name: str) -> float | None:
    # One sample for each part of a server (a data-parallel rank): shares are averaged, not added up.
    values = _samples(text, name)
    return min(1.0, max(0.0, sum(values) / len(values))) if values else None


def thread_limit() -> int:
    """Return how many threads a server on the CPU may compute with, as its environment says; 0 where it does not."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isascii() and limit.isdigit() else 0


def free_port() -> int:
    """Return a loopback port that is free now; whoever takes it first has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_key(file: str | None, variable: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the API key from `file`, else from the environment variable; None when neither is named.

    Raises UserError when what is named is not there.
    """
    key = None
    if file:
        with refusing(f"cannot read the API key file {file}", "name a text file that holds the key alone"):
            key = Path(file).expanduser().read_text().strip()
    elif variable:
        key = environment.get(variable, "").strip()
        if not key:
            raise UserError(f"the API key variable {variable} is not set", f"export {variable}=…, or use api_key_file")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UserError(f"the API key in {file or variable} has characters that no header can hold", "check it")
    return key
