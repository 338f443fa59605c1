"""Snapshots of a box with GPUs, written short, and what is planned for them."""

from dataclasses import replace

from freight.core.actions import Action, StartPinned, StartWorker
from freight.core.job import State
from freight.core.plan import plan
from freight.core.snapshot import DeviceView, JobView, Need, Pacing, PinView, Snapshot, WarmView, WorkerView

NOW = 1000.0
MODEL = "/models/a"
CPU = DeviceView("cpu:0", label="cpu:0")


def gpus(marks: str) -> tuple[DeviceView, ...]:
    """Return GPU 0, GPU 1 …: one for each letter, which names a stranger; "." for none."""
    holders = ["" if mark == "." else f"process {mark}" for mark in marks]
    return tuple(DeviceView(f"g{n}", held_by, True, f"GPU {n}") for n, held_by in enumerate(holders))


def need(count: int = 1, **fields: object) -> Need:
    return replace(Need(gpus=count), **fields)  # type: ignore[arg-type]


def job(name: str, count: int = 1, launch: str = "a", **fields: object) -> JobView:
    """Return a queued job whose workers take `count` GPUs each."""
    view = JobView(
        name, State.QUEUED, (MODEL,), True, 1, left=100, name=name, launch=launch, need=need(count), was_ready=True
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def running(name: str, *places: int | str, stopping: bool = False, **fields: object) -> JobView:
    """Return a running job with a worker on each of `places`: a GPU's number, or several of them as in "0 1"."""
    live = tuple(WorkerView(f"{name}-{n}", MODEL, on(place), stopping) for n, place in enumerate(places))
    view = replace(job(name), state=State.RUNNING, live=live, workers=len(live))
    return replace(view, **fields)  # type: ignore[arg-type]


def warm(name: str, place: int | str, launch: str = "b", idle_s: float = 10.0, **fields: object) -> WarmView:
    view = WarmView(name, launch, on(place), launch, NOW - idle_s)
    return replace(view, **fields)  # type: ignore[arg-type]


def pin(model: str, workers: int = 1, count: int = 1, **fields: object) -> PinView:
    """Return the pin of a model whose launch has its name."""
    return replace(PinView(model, model, workers, MODEL, need(count)), **fields)  # type: ignore[arg-type]


def start(name: str, place: int | str) -> StartWorker:
    return StartWorker(name, MODEL, on(place))


def start_pinned(model: str, place: int | str) -> StartPinned:
    return StartPinned(model, MODEL, on(place))


def on(place: int | str) -> tuple[str, ...]:
    return tuple(f"g{number}" for number in str(place).split())


def decide(
    marks: str,
    *jobs: JobView,
    warms: tuple[WarmView, ...] = (),
    pins: tuple[PinView, ...] = (),
    pacing: Pacing | None = None,
    keep_warm_s: float = 3600.0,
    now: float = NOW,
) -> tuple[Action, ...]:
    """Plan for a box with the GPUs of `marks` and one CPU device."""
    return plan(Snapshot(jobs, (*gpus(marks), CPU), warms, keep_warm_s, pins, pacing or Pacing()), now)
