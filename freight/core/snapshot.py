"""What the planner decides from: jobs, workers, pins and devices as they are at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from freight.core.job import State

# A worker that cannot start is tried this often in a row, with these pauses in between.
MOST_STARTS: Final = 3
START_BACKOFF_S: Final = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A place (a device, or an endpoint's URL) where `count` starts in a row failed, the last at `at` with `words`."""

    place: str
    count: int
    at: float
    words: str

    def is_over(self, now: float) -> bool:
        """Return whether another start may be tried there."""
        return self.count < MOST_STARTS and now >= self.at + self.pause_s()

    def pause_s(self) -> float:
        """Return the pause after the last failure."""
        return pause_s(self.count)


def pause_s(failures: int) -> float:
    """Return the pause after so many failed starts in a row."""
    return START_BACKOFF_S[min(failures, len(START_BACKOFF_S)) - 1]


def tries(troubles: Sequence[Trouble]) -> int:
    """Return how many times in a row starting has failed, wherever that was; what failed together counts as one."""
    ends = sorted(trouble.at for trouble in troubles)
    apart = sum(later - earlier >= START_BACKOFF_S[0] for earlier, later in pairwise(ends))
    return max((trouble.count for trouble in troubles), default=0) + apart


def is_pausing(troubles: Sequence[Trouble], now: float) -> bool:
    """Return whether the pause after the last failed start, wherever that was, is not over yet."""
    return bool(troubles) and now < max(trouble.at for trouble in troubles) + pause_s(tries(troubles))


def is_hopeless(troubles: Sequence[Trouble], places: Sequence[str], needed: int, was_ready: bool) -> bool:
    """Return whether starting has failed often enough on `places`, of which a worker takes `needed`.

    Each place may be tried MOST_STARTS times. What has never been up is not tried on every device of a large machine:
    with so many tries in all, on twice the places that it needs.
    """
    worn_out = {trouble.place for trouble in troubles if trouble.count >= MOST_STARTS} & set(places)
    if not troubles or not places:
        return False
    if worn_out and len(places) - len(worn_out) < needed:
        return True
    return not was_ready and tries(troubles) >= MOST_STARTS and len(troubles) >= min(2 * needed, len(places))


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device of the pool. `held_by` names a holder that is none of the snapshot's workers; "" without one.

    `label` is what people call it ("": its id).
    """

    id: str
    held_by: str = ""
    is_gpu: bool = False
    label: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker takes: `gpus` whole GPUs, or with 0 one CPU device.

    `store` is the file system that the model is loaded from ("": none that would mind). `staggers`: its server must
    not start together with others of its kind.
    """

    gpus: int = 0
    store: str = ""
    staggers: bool = False

    @property
    def devices(self) -> int:
        """How many devices that are."""
        return self.gpus or 1

    def fitting(self, devices: "tuple[DeviceView, ...]") -> tuple[DeviceView, ...]:
        """Return the devices of the kind that it takes."""
        return tuple(device for device in devices if device.is_gpu == bool(self.gpus))


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker of a job. `stopping`: it was told to leave the job and has not yet."""

    id: str
    source: str
    devices: tuple[str, ...]
    stopping: bool = False

    def places(self) -> tuple[str, ...]:
        """Return what it keeps from others: its devices, or its URL."""
        return self.devices or (self.source,)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the planner sees it.

    `workers` is the number asked for, `live` those that it has. `troubles` are the places where its workers would not
    start; `was_ready` says that one did, once. `left` is the number of records not done, `twins` how many of those get
    the answer of another one. `blocked` is why it cannot go on by itself ("" when it can), `out_of_time` whether its
    time has run out, `broken` why it can never go on. `launch` is equal for jobs that one server can serve as it is.
    `need` counts where it `needs_device`. Its name is told to no other user than its own.
    """

    id: str
    state: State
    sources: tuple[str, ...]
    needs_device: bool
    workers: int
    live: tuple[WorkerView, ...] = ()
    left: int = 0
    twins: int = 0
    troubles: tuple[Trouble, ...] = ()
    blocked: str = ""
    out_of_time: bool = False
    broken: str = ""
    name: str = ""
    launch: str = ""
    need: Need = Need()
    was_ready: bool = False
    user: str = ""

    def places(self, devices: tuple[DeviceView, ...]) -> tuple[str, ...]:
        """Return where its workers can be: on devices, or one at each URL of an endpoint."""
        if not self.needs_device:
            return self.sources
        return tuple(device.id for device in self.need.fitting(devices))


@dataclass(frozen=True, slots=True)
class WarmView:
    """A worker that serves no job and keeps its server up, since `idle_since`. `model` is for showing.

    `is_up` is False while its server is still loading; `is_known` is False for one of an earlier control plane that has
    not been heard from yet: it is there, and nothing can be asked of it.
    """

    id: str
    launch: str
    places: tuple[str, ...]
    model: str
    idle_since: float
    stopping: bool = False
    is_up: bool = True
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class PinView:
    """A model of which `workers` are to be up always. `launch` says which those are, as with a job."""

    model: str
    launch: str
    workers: int
    source: str
    need: Need
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True, slots=True)
class Pacing:
    """How starts on one machine are kept apart.

    `loading` are the file systems from which servers are being loaded now, one entry a server: no more than
    `most_loads` of a kind. Servers that must not start together follow one another in `stagger_s`; the last of them
    started at `staggered_at`.
    """

    loading: tuple[str, ...] = ()
    most_loads: int = 4
    staggered_at: float = float("-inf")
    stagger_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the planner decides from; the jobs in the order in which they have their turn.

    A worker that serves no job stays for `keep_warm_s`, and those of `pins` for ever.
    """

    jobs: tuple[JobView, ...]
    devices: tuple[DeviceView, ...]
    warm: tuple[WarmView, ...] = ()
    keep_warm_s: float = 0.0
    pins: tuple[PinView, ...] = ()
    pacing: Pacing = Pacing()
