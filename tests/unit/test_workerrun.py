"""A worker as the control plane sees it: how long its server loads, and what it takes over from reports."""

from pathlib import Path
from typing import Any

import pytest

from freight.control import workerrun
from freight.control.workerrun import WorkerRun
from freight.core.messages import PROTOCOL, Load, Phase, Report


class Clock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workerrun, "time", made)
    return made


def worker(**fields: Any) -> WorkerRun:
    """Return a worker that was started now."""
    process: Any = None
    known = {"loading_since": workerrun.time.monotonic(), **fields}
    return WorkerRun("w", "src", ("GPU-a", "GPU-b"), Path("f"), Path("log"), process, **known)


def say(run: WorkerRun, phase: Phase, **fields: Any) -> None:
    run.note_report(Report(PROTOCOL, "w", 1, phase, **fields))


@pytest.mark.parametrize("up", [Phase.READY, Phase.IDLE])
def test_loading_ends_once_when_the_server_is_first_seen_to_be_up(clock: Clock, up: Phase) -> None:
    run = worker()
    clock.now = 103.0
    say(run, Phase.LOADING)
    assert run.end_loading() is None
    clock.now = 107.5
    say(run, up)
    assert run.end_loading() == 7.5
    say(run, up)
    assert run.end_loading() is None


def test_a_server_that_is_started_again_loads_again(clock: Clock) -> None:
    run = worker()
    say(run, Phase.READY)
    assert run.end_loading() == 0.0
    clock.now = 200.0
    say(run, Phase.LOADING)
    clock.now = 201.0
    say(run, Phase.LOADING)
    clock.now = 204.0
    say(run, Phase.READY)
    assert run.end_loading() == 4.0


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.STOPPED])
def test_a_server_that_never_came_up_has_not_loaded(clock: Clock, phase: Phase) -> None:
    run = worker()
    say(run, phase)
    assert run.end_loading() is None


def test_an_adopted_worker_whose_server_is_up_tells_of_no_load(clock: Clock) -> None:
    run = worker(loading_since=None, attached=False)
    say(run, Phase.READY)
    assert run.end_loading() is None


def test_the_last_lines_of_a_server_stay_known_and_its_load_is_the_latest(clock: Clock) -> None:
    run = worker()
    say(run, Phase.READY, log_tail=["why"], load=Load(3, 1, 0.5))
    assert (run.log_tail, run.load) == (["why"], Load(3, 1, 0.5))
    say(run, Phase.READY)
    assert (run.log_tail, run.load) == (["why"], None)


def test_a_worker_is_where_its_devices_are_else_at_its_url(clock: Clock) -> None:
    run = worker()
    assert (run.places(), run.place()) == (("GPU-a", "GPU-b"), "GPU-a GPU-b")
    run.devices = ()
    assert (run.places(), run.place()) == (("src",), "src")


def test_an_adopted_worker_that_still_loads_counts_as_loading_from_its_first_report_on(clock: Clock) -> None:
    run = worker(loading_since=None, attached=False)
    clock.now = 103.0
    say(run, Phase.LOADING)
    assert run.loading_since == 103.0
    run.attached = True
    clock.now = 107.5
    say(run, Phase.LOADING)
    say(run, Phase.READY)
    assert run.end_loading() == 4.5


@pytest.mark.parametrize(
    ("phase", "joinable", "is_up"),
    [
        (Phase.LOADING, True, False),
        (Phase.IDLE, True, True),
        (Phase.FAILED, False, False),
        (Phase.STOPPED, False, False),
    ],
)
def test_only_a_worker_that_loads_or_is_up_can_be_joined(
    clock: Clock, phase: Phase, joinable: bool, is_up: bool
) -> None:
    run = worker()
    say(run, phase)
    view = run.warm_view()
    assert (not view.stopping, view.is_up, view.is_known) == (joinable, is_up, True)
    run.stopping = True
    assert run.warm_view().stopping


def test_an_adopted_worker_is_not_known_before_it_has_reported(clock: Clock) -> None:
    view = worker(attached=False).warm_view()
    assert (view.is_known, view.stopping) == (False, False)
