"""Who starts, stops and waits: snapshots and what is decided from them."""

from dataclasses import replace

import pytest

from freight.core.actions import (
    Action,
    Cancelled,
    Fail,
    Finalize,
    StartWorker,
    StopWorkers,
    Suspend,
    TimeOut,
    Unsuspend,
    Wait,
)
from freight.core.job import FINAL, State
from freight.core.plan import plan
from freight.core.snapshot import MOST_STARTS, START_BACKOFF_S, DeviceView, JobView, Snapshot, Trouble, WorkerView

NOW = 1000.0
GGUF = "/models/a.gguf"
URLS = ("http://a", "http://b", "http://c")
QUEUED = JobView("job", State.QUEUED, (GGUF,), needs_device=True, workers=1, left=100)
ENDPOINT = JobView("job", State.QUEUED, URLS, needs_device=False, workers=3, left=100)
W0, W1 = WorkerView("w0", GGUF, ("gpu0",)), WorkerView("w1", GGUF, ("gpu1",))
STOPPING = replace(W0, stopping=True)
UNFINISHED = [State.QUEUED, State.STARTING, State.RUNNING, State.SUSPENDED]


def decide(*jobs: JobView, devices: str = "", now: float = NOW) -> tuple[Action, ...]:
    """Plan with devices gpu0, gpu1 …: one for each letter, "." for a free one."""
    views = [DeviceView(f"gpu{n}", "" if mark == "." else f"worker {mark}") for n, mark in enumerate(devices)]
    return plan(Snapshot(jobs, tuple(views)), now)


def starts(*devices: str, job: str = "job") -> tuple[StartWorker, ...]:
    return tuple(StartWorker(job, GGUF, (device,)) for device in devices)


@pytest.mark.parametrize(
    ("workers", "left", "live", "devices", "expected"),
    [
        (1, 100, (), ".", starts("gpu0")),
        (1, 100, (), "x.", starts("gpu1")),
        (3, 100, (), "...", starts("gpu0", "gpu1", "gpu2")),
        (3, 100, (), "..", starts("gpu0", "gpu1")),
        (3, 100, (), ".x.", starts("gpu0", "gpu2")),
        (3, 2, (), "...", starts("gpu0", "gpu1")),
        (9, 1, (), "...", starts("gpu0")),
        (2, 100, (W0,), "x.", starts("gpu1")),
        (2, 1, (W0,), "x.", ()),
        (2, 100, (W0, W1), "xx.", ()),
        (1, 100, (W0,), "x.", ()),
        (2, 100, (W0,), "xx", ()),
        (1, 100, (STOPPING,), "x.", ()),
    ],
)
@pytest.mark.parametrize("state", [State.QUEUED, State.STARTING, State.RUNNING])
def test_a_job_starts_the_workers_it_lacks_on_free_devices_and_none_without_records(
    state: State, workers: int, left: int, live: tuple[WorkerView, ...], devices: str, expected: tuple[Action, ...]
) -> None:
    job = replace(QUEUED, state=state, workers=workers, left=left, live=live)

    assert decide(job, devices=devices) == expected


@pytest.mark.parametrize(("twins", "devices"), [(0, 4), (97, 3), (99, 1)])
def test_no_worker_is_started_for_records_that_get_the_answer_of_another(twins: int, devices: int) -> None:
    job = replace(QUEUED, workers=8, twins=twins)

    assert decide(job, devices="....") == starts(*(f"gpu{n}" for n in range(devices)))


def test_a_job_without_any_device_waits_and_names_the_holders() -> None:
    [wait] = decide(QUEUED, devices="xy")

    assert wait == Wait("job", "gpu0 is held by worker x; gpu1 is held by worker y")


def test_a_job_on_a_box_without_devices_waits_and_says_so() -> None:
    assert decide(QUEUED) == (Wait("job", "there is no device"),)


def test_the_job_ahead_gets_the_device_and_the_next_one_waits_for_it() -> None:
    first, second = replace(QUEUED, id="first"), replace(QUEUED, id="second")

    start, wait = decide(first, second, devices=".")

    assert start == StartWorker("first", GGUF, ("gpu0",))
    assert isinstance(wait, Wait)
    assert wait.job == "second"
    assert wait.reason.startswith("gpu0 is held by ")
    assert not wait.reason.endswith("by ")


def test_no_device_is_given_twice() -> None:
    jobs = [replace(QUEUED, id=str(n), workers=2) for n in range(4)]

    actions = decide(*jobs, devices="." * 5)

    given = [device for action in actions if isinstance(action, StartWorker) for device in action.devices]
    assert sorted(given) == [f"gpu{n}" for n in range(5)]
    # The first worker of each goes before the second of any.
    assert [action.job for action in actions if isinstance(action, StartWorker)] == ["0", "1", "2", "3", "0"]


@pytest.mark.parametrize(
    ("workers", "left", "taken", "expected"),
    [
        (3, 100, (), URLS),
        (2, 100, (), URLS[:2]),
        (3, 1, (), URLS[:1]),
        (3, 100, ("http://b",), ("http://a", "http://c")),
        (9, 100, URLS, ()),
        (9, 100, (), URLS),
    ],
)
def test_each_url_of_an_endpoint_gets_one_worker_and_no_device(
    workers: int, left: int, taken: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    live = tuple(WorkerView(f"w-{source}", source, ()) for source in taken)
    job = replace(ENDPOINT, workers=workers, left=left, live=live)

    assert decide(job, devices="xx") == tuple(StartWorker("job", source, ()) for source in expected)


def trouble(place: str = "gpu0", count: int = MOST_STARTS, at: float = NOW, words: str = "out of memory") -> Trouble:
    return Trouble(place, count, at, words)


@pytest.mark.parametrize("failed", range(1, MOST_STARTS))
def test_a_failed_start_is_tried_again_only_after_its_pause(failed: int) -> None:
    pause_s = START_BACKOFF_S[failed - 1]
    job = replace(QUEUED, troubles=(trouble(count=failed, words="no such file"),))
    (wait,) = decide(job, devices=".", now=NOW + pause_s - 0.5)
    assert isinstance(wait, Wait)
    assert "no such file" in wait.reason
    assert decide(job, devices=".", now=NOW + pause_s) == starts("gpu0")


def test_pauses_between_starts_grow() -> None:
    assert list(START_BACKOFF_S) == sorted(set(START_BACKOFF_S))
    assert len(START_BACKOFF_S) == MOST_STARTS - 1


def test_a_place_that_fails_does_not_keep_a_job_from_the_others() -> None:
    job = replace(QUEUED, workers=3, was_ready=True, troubles=(trouble("gpu0", count=1), trouble("gpu1")))
    assert decide(job, devices="...", now=NOW + START_BACKOFF_S[-1]) == starts("gpu2", "gpu0")


def test_a_job_with_a_live_worker_goes_on_when_every_other_place_has_failed() -> None:
    job = replace(QUEUED, state=State.RUNNING, workers=2, live=(W0,), troubles=(trouble("gpu1"),))
    assert decide(job, devices="x.", now=NOW + 1000) == ()


def test_a_job_waits_for_a_device_that_a_stranger_holds_when_its_own_have_failed() -> None:
    (wait,) = decide(replace(QUEUED, troubles=(trouble("gpu0"),)), devices=".x", now=NOW + 1000)
    assert isinstance(wait, Wait)
    assert "gpu1 is held by worker x" in wait.reason


def test_after_the_last_start_the_job_is_suspended_with_its_servers_last_words() -> None:
    job = replace(QUEUED, troubles=(trouble(at=NOW - 1000),))
    assert decide(job, devices=".") == (Suspend("job", "out of memory"),)


def test_a_job_that_cannot_start_fails_only_once_nothing_of_it_is_left() -> None:
    job = replace(QUEUED, state=State.SUSPENDED, troubles=(trouble(),))
    assert decide(replace(job, live=(STOPPING,), blocked="full"), devices="x") == ()
    assert decide(job, devices=".") == (Fail("job", "out of memory"),)


def test_an_endpoint_whose_urls_all_fail_is_suspended_and_then_fails() -> None:
    job = replace(ENDPOINT, troubles=tuple(trouble(url) for url in URLS))
    assert decide(job) == (Suspend("job", "out of memory"),)
    assert decide(replace(job, state=State.SUSPENDED)) == (Fail("job", "out of memory"),)


def test_a_blocked_job_is_suspended_with_the_reason_and_goes_on_when_that_is_over() -> None:
    blocked = replace(QUEUED, state=State.RUNNING, live=(W0,), blocked="no space left")

    assert decide(blocked) == (Suspend("job", "no space left"),)
    assert decide(replace(blocked, state=State.SUSPENDED)) == ()
    assert decide(replace(blocked, state=State.SUSPENDED, blocked="")) == (Unsuspend("job"),)


@pytest.mark.parametrize("state", UNFINISHED)
def test_a_job_out_of_time_stops_its_workers_first(state: State) -> None:
    job = replace(QUEUED, state=state, out_of_time=True, blocked="no space left")

    assert decide(replace(job, live=(W0, W1)), devices=".") == (StopWorkers("job"),)
    assert decide(replace(job, live=(STOPPING,)), devices=".") == ()
    assert decide(job, devices=".") == (TimeOut("job"),)


@pytest.mark.parametrize("state", [State.QUEUED, State.STARTING, State.RUNNING])
def test_a_job_with_all_records_done_is_finalized_once_its_workers_are_gone(state: State) -> None:
    job = replace(QUEUED, state=state, left=0)

    assert decide(replace(job, live=(W0,)), devices=".") == (StopWorkers("job"),)
    assert decide(replace(job, live=(STOPPING,)), devices=".") == ()
    assert decide(job, devices=".") == (Finalize("job"),)


def test_records_that_are_all_done_need_no_start_even_when_starts_failed() -> None:
    assert decide(replace(QUEUED, left=0, troubles=(trouble(),)), devices=".") == (Finalize("job"),)


@pytest.mark.parametrize("state", sorted(set(State) - set(UNFINISHED)))
def test_a_job_that_is_ending_or_has_ended_is_left_alone(state: State) -> None:
    assert state in FINAL | {State.VALIDATING, State.FINALIZING, State.CANCELLING}
    expected = (Cancelled("job"),) if state is State.CANCELLING else ()
    assert decide(replace(QUEUED, state=state, out_of_time=True), devices=".") == expected


def test_a_final_job_takes_no_device_from_the_next() -> None:
    done, waiting = replace(QUEUED, id="done", state=State.COMPLETED), replace(QUEUED, id="next")

    assert decide(done, waiting, devices=".") == starts("gpu0", job="next")


def test_the_same_snapshot_gives_the_same_plan() -> None:
    jobs = (replace(QUEUED, workers=2), replace(ENDPOINT, id="other"))

    assert decide(*jobs, devices=".x.") == decide(*jobs, devices=".x.")
