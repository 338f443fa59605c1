"""Pinned models: so many workers of each are up, whether a job needs them or not."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from freight.control.jobrun import EngineLimits, count_failure, launch_of
from freight.control.placing import need_of
from freight.core.messages import Setup
from freight.core.model import ModelSpec
from freight.core.snapshot import Need, PinView, Trouble

# A pinned model whose starts failed is tried again after this: nobody waits for its failure.
_RETRY_S = 600.0


@dataclass(slots=True)
class Pin:
    """A pinned model. `model` is None where it cannot run now, as `reason` says.

    `endpoints` and `concurrency` are what its servers are started for, where that is known before there is a job.
    """

    name: str
    workers: int
    model: ModelSpec | None
    gpus: int
    endpoints: frozenset[int] = frozenset()
    concurrency: int = 0
    launch: str = ""
    need: Need = field(default_factory=Need)
    reason: str = ""
    troubles: dict[str, Trouble] = field(default_factory=dict[str, Trouble])

    def setup(self, limits: EngineLimits) -> Setup:
        """Return what one of its workers is told to run."""
        assert self.model is not None
        setup = limits.setup(self.model, self.source(), self.gpus)
        return msgspec.structs.replace(setup, endpoints=sorted(self.endpoints), concurrency=self.concurrency)

    def source(self) -> str:
        """Return the source of its workers."""
        assert self.model is not None
        return next(iter(self.model.entry.sources()), "")

    def start_failed(self, places: Iterable[str], words: str, hopeless: bool) -> None:
        """Count a worker that would not start, or ended by itself."""
        count_failure(self.troubles, places, words, hopeless, time.monotonic())

    def view(self, now: float) -> PinView | None:
        """Return it as the planner sees it; None where it cannot run."""
        if self.model is None:
            return None
        if self.troubles and now - max(trouble.at for trouble in self.troubles.values()) >= _RETRY_S:
            self.troubles.clear()
        return PinView(self.name, self.launch, self.workers, self.source(), self.need, tuple(self.troubles.values()))


def pin_of(
    name: str,
    workers: int,
    model: ModelSpec,
    gpus: int,
    endpoints: frozenset[int] = frozenset(),
    concurrency: int = 0,
) -> Pin:
    """Return the pin of a model that can run."""
    launch = launch_of(model, endpoints, concurrency, gpus)
    return Pin(name, workers, model, gpus, endpoints, concurrency, launch, need_of(model, gpus))
