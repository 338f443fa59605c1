"""How a control plane treats its jobs, workers and devices."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from freight.control.jobrun import EngineLimits, JobRun


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one control plane.

    A worker that serves no job stays for `keep_warm_s`. `shared`: there are several jobs, and what breaks one of them
    ends that one alone; `ended` is awaited with each that came to a final state. A device that is not as before
    `release_timeout_s` after its worker goes into quarantine, and is looked at again every `quarantine_retry_s`. No
    more than `most_loads` servers are loaded from one file system at a time. `limits` are those of pinned models.
    """

    limits: EngineLimits
    keep_warm_s: float = 0.0
    shared: bool = False
    ended: Callable[[JobRun], Awaitable[None]] | None = None
    release_timeout_s: float = 60.0
    quarantine_retry_s: float = 30.0
    most_loads: int = 4
