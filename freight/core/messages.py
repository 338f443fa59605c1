"""What a worker and the control plane say to each other: one call, both ways at once.

A worker sends a Report and gets Orders. The encoding is MessagePack; `protocol` goes up with every
change that the other side must know of. `number` counts a worker's reports: a report that comes
again (its answer was lost) gets the same orders again.

A worker may outlive its control plane. The next one gives itself another `plane` id, by which it knows a
report that was meant for its predecessor: it orders ATTACH, and the worker says all over again what it has.
"""

from enum import StrEnum
from typing import Final

import msgspec

from freight.core.answer import Line
from freight.core.model import ModelSpec
from freight.core.record import Endpoint

PROTOCOL: Final = 3
# The most that one exchange hands out: records, and bytes of their lines.
SLICE_RECORDS: Final = 4096
SLICE_BYTES: Final = 8_000_000


class Phase(StrEnum):
    """What a worker is doing."""

    LOADING = "loading"
    READY = "ready"
    IDLE = "idle"  # Its server is up, and it serves no job.
    FAILED = "failed"
    STOPPED = "stopped"


class Order(StrEnum):
    """What a worker is to do.

    RUN: go on. STOP: give back what it holds and end. RELEASE: give back what it holds, and stay with its server
    up, for another job. ATTACH: report again, to this control plane, with all that it holds.
    """

    RUN = "run"
    STOP = "stop"
    RELEASE = "release"
    ATTACH = "attach"


class Lease(msgspec.Struct, array_like=True, frozen=True):
    """A record handed to a worker: its index, the tries already charged to it, its line in the input."""

    index: int
    tries: int
    line: bytes


class Returned(msgspec.Struct, array_like=True, frozen=True):
    """A record that a worker gives back unanswered, and the tries charged to it."""

    index: int
    tries: int


class Death(msgspec.Struct, array_like=True, frozen=True):
    """The model server exited by itself. `charged` is False where no record can be blamed (out of memory).

    `number` counts the deaths that a worker has seen, from 1.
    """

    number: int
    reason: str
    charged: bool
    in_flight: list[int]


class Load(msgspec.Struct, array_like=True, frozen=True):
    """What a server says of itself: requests that run and that wait in it, and the share of its cache in use.

    None where it does not say.
    """

    running: int | None
    waiting: int | None
    cache_use: float | None


class Report(msgspec.Struct, frozen=True):
    """What a worker says. `note` explains the phase or what it waits for.

    `plane` is the control plane that it last heard from ("" for none), `job` the job that it serves (""). `held` are
    the records that it has, told in answer to ATTACH only.
    `log_tail` and `hopeless` (another start would fail as well) go with FAILED. `want` is the number of records that it
    has room for; `pushed_back` says that the engine takes none now. `load` is what its server said of itself last.
    """

    protocol: int
    worker: str
    number: int
    phase: Phase
    note: str = ""
    hopeless: bool = False
    log_tail: list[str] = []
    done: list[Line] = []
    returned: list[Returned] = []
    deaths: list[Death] = []
    want: int = 0
    in_flight: int = 0
    pushed_back: bool = False
    plane: str = ""
    job: str = ""
    held: list[Returned] = []
    load: Load | None = None


class Setup(msgspec.Struct, frozen=True):
    """What a worker runs: sent in the orders that answer its first report, and again for each further job.

    `job` is "" for a worker that is to have its server up for jobs to come. `gpus` is the number of its GPUs,
    `media_hosts` those from which the server may fetch, `stage` a folder of the machine into which the model is
    copied before it is loaded ("": none). `source` is the one of the model's sources that is this worker's,
    `endpoints` those that the job's records use, `concurrency` the window that the user fixed (0: automatic). A
    timeout of 0 is none.
    """

    job: str
    model: ModelSpec
    source: str
    endpoints: list[Endpoint]
    concurrency: int
    record_timeout_s: float
    stall_s: float
    start_stall_s: float
    start_timeout_s: float
    gpus: int = 0
    media_hosts: list[str] = []
    stage: str = ""


class Orders(msgspec.Struct, frozen=True):
    """What the control plane says; `setup` when the worker is to serve another job than before."""

    protocol: int
    order: Order
    leases: list[Lease] = []
    setup: Setup | None = None
    plane: str = ""
