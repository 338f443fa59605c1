"""Many jobs at once: whose turn it is, which warm worker serves whom, and what a waiting job is told."""

from dataclasses import replace

import pytest

from freight.core.actions import (
    Action,
    Cancelled,
    Fail,
    Finalize,
    Join,
    StartWorker,
    StopWarm,
    StopWorkers,
    Suspend,
    TimeOut,
    Wait,
)
from freight.core.job import State
from freight.core.plan import plan
from freight.core.snapshot import (
    MOST_STARTS,
    START_BACKOFF_S,
    DeviceView,
    JobView,
    Snapshot,
    Trouble,
    WarmView,
    WorkerView,
)

NOW = 1000.0
GGUF = "/models/a.gguf"
LAUNCH, OTHER = "llama a", "llama b"
QUEUED = JobView("job", State.QUEUED, (GGUF,), needs_device=True, workers=1, left=100, launch=LAUNCH)
URLS = ("http://a", "http://b")
ENDPOINT = JobView("job", State.QUEUED, URLS, needs_device=False, workers=2, left=100, launch="endpoint")
WARM = WarmView("warm", LAUNCH, ("gpu0",), "a", idle_since=NOW - 10)
UNFINISHED = [State.QUEUED, State.STARTING, State.RUNNING, State.SUSPENDED]


def devices(marks: str) -> tuple[DeviceView, ...]:
    """Return gpu0, gpu1 …: one for each letter, which names a stranger; "." for none."""
    return tuple(DeviceView(f"gpu{n}", "" if mark == "." else f"process {mark}") for n, mark in enumerate(marks))


def decide(
    *jobs: JobView, there: str = "", warm: tuple[WarmView, ...] = (), keep_warm_s: float = 3600.0, now: float = NOW
) -> tuple[Action, ...]:
    return plan(Snapshot(jobs, devices(there), warm, keep_warm_s), now)


def named(name: str, **fields: object) -> JobView:
    return replace(QUEUED, id=name, name=name, **fields)  # type: ignore[arg-type]


def running(name: str, *places: str, stopping: bool = False, **fields: object) -> JobView:
    live = tuple(WorkerView(f"{name}-{place}", GGUF, (place,), stopping) for place in places)
    return named(name, state=State.RUNNING, live=live, **fields)


def start(job: str, place: str) -> StartWorker:
    return StartWorker(job, GGUF, (place,))


def test_every_waiting_job_gets_its_first_worker_before_a_running_one_gets_more() -> None:
    ahead = running("ahead", "gpu0", workers=4)

    actions = decide(ahead, named("b", workers=3), named("c"), there="....")

    assert actions == (start("b", "gpu1"), start("c", "gpu2"), start("ahead", "gpu3"))


def test_extra_workers_go_to_jobs_in_turn_and_none_to_one_that_has_no_first() -> None:
    jobs = (named("a", workers=2), named("b", workers=2), named("c", workers=2))

    actions = decide(*jobs, there=".....")

    given = [(action.job, *action.devices) for action in actions if isinstance(action, StartWorker)]
    assert given == [("a", "gpu0"), ("b", "gpu1"), ("c", "gpu2"), ("a", "gpu3"), ("b", "gpu4")]
    waiting = decide(*jobs, there="..")
    assert waiting[:2] == (start("a", "gpu0"), start("b", "gpu1"))
    assert [type(action) for action in waiting[2:]] == [Wait]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_the_place_goes_to_whoever_comes_first_in_the_snapshot(order: tuple[str, str]) -> None:
    begun, wait = decide(*(named(name) for name in order), there=".")

    assert begun == start(order[0], "gpu0")
    assert wait == Wait(order[1], f"gpu0 is held by {order[0]}")


def test_a_warm_worker_of_the_same_launch_is_joined_before_a_free_device_is_used() -> None:
    assert decide(QUEUED, there="..", warm=(replace(WARM, places=("gpu1",)),)) == (Join("job", "warm"),)


def test_a_job_that_wants_more_joins_what_is_warm_and_starts_the_rest() -> None:
    warm = (WARM, replace(WARM, id="warm-too", places=("gpu2",)))

    actions = decide(replace(QUEUED, workers=4), there="....", warm=warm)

    assert actions == (Join("job", "warm"), Join("job", "warm-too"), start("job", "gpu1"), start("job", "gpu3"))


def test_a_running_job_takes_a_warm_worker_as_an_extra_one() -> None:
    assert decide(running("a", "gpu0", workers=2), there="..", warm=(replace(WARM, places=("gpu1",)),)) == (
        Join("a", "warm"),
    )


@pytest.mark.parametrize("warm", [replace(WARM, launch=OTHER), replace(WARM, stopping=True)])
def test_a_warm_worker_of_another_launch_or_one_that_ends_is_not_joined(warm: WarmView) -> None:
    assert decide(QUEUED, there="..", warm=(warm,)) == (start("job", "gpu1"),)


def test_a_warm_worker_is_joined_by_one_job_alone() -> None:
    first, second = decide(named("a"), named("b"), there=".", warm=(WARM,))

    assert first == Join("a", "warm")
    assert isinstance(second, Wait)
    assert second.job == "b"


@pytest.mark.parametrize("state", [State.SUSPENDED, State.CANCELLING, State.FINALIZING, State.COMPLETED])
def test_a_job_that_cannot_have_workers_joins_none(state: State) -> None:
    actions = decide(replace(QUEUED, state=state, blocked="full"), there=".", warm=(WARM,))

    assert not [action for action in actions if isinstance(action, (Join, StartWorker))]


def test_the_warm_worker_that_is_idle_for_longest_makes_room_for_another_model() -> None:
    warm = (
        replace(WARM, id="young", places=("gpu0",), idle_since=NOW - 5),
        replace(WARM, id="old", places=("gpu1",), idle_since=NOW - 50),
        replace(WARM, id="middle", places=("gpu2",), idle_since=NOW - 20),
    )

    wait, stop = decide(replace(QUEUED, launch=OTHER), there="...", warm=warm)

    assert isinstance(wait, Wait)
    assert stop == StopWarm("old")


def test_no_second_warm_worker_goes_while_one_is_ending_for_the_job() -> None:
    warm = (
        replace(WARM, id="going", places=("gpu0",), idle_since=NOW - 5, stopping=True),
        replace(WARM, id="old", places=("gpu1",), idle_since=NOW - 50),
    )

    [wait] = decide(replace(QUEUED, launch=OTHER), there="..", warm=warm)

    assert isinstance(wait, Wait)


def test_a_job_that_wants_several_workers_has_one_warm_worker_end_at_a_time() -> None:
    warm = tuple(replace(WARM, id=f"warm{n}", places=(f"gpu{n}",)) for n in (1, 2, 3))

    actions = decide(running("a", "gpu0", workers=4, launch=OTHER), there="....", warm=warm)

    assert actions == (StopWarm("warm1"),)


def test_a_free_device_is_used_and_no_warm_worker_ends_for_the_job() -> None:
    assert decide(replace(QUEUED, launch=OTHER), there="..", warm=(WARM,)) == (start("job", "gpu1"),)


def test_a_warm_worker_that_makes_room_for_the_job_ahead_serves_nobody_behind_it() -> None:
    actions = decide(named("a", launch=OTHER), named("b"), there=".", warm=(WARM,))

    assert [action for action in actions if not isinstance(action, Wait)] == [StopWarm("warm")]
    assert [action.job for action in actions if isinstance(action, Wait)] == ["a", "b"]


def test_no_warm_worker_ends_for_a_job_that_could_not_use_its_place() -> None:
    pausing = (Trouble("gpu0", 1, NOW, "no such file"),)

    assert decide(replace(ENDPOINT, launch=OTHER), there=".", warm=(WARM,)) == (
        StartWorker("job", "http://a", ()),
        StartWorker("job", "http://b", ()),
    )
    [wait] = decide(replace(QUEUED, launch=OTHER, troubles=pausing), there=".", warm=(WARM,))
    assert isinstance(wait, Wait)


@pytest.mark.parametrize(("keep_warm_s", "idle_s", "ends"), [(0, 0, True), (60, 59.9, False), (60, 60, True)])
def test_a_warm_worker_that_nobody_wants_ends_after_its_time(keep_warm_s: float, idle_s: float, ends: bool) -> None:
    warm = replace(WARM, idle_since=NOW - idle_s)

    assert decide(there=".", warm=(warm,), keep_warm_s=keep_warm_s) == ((StopWarm("warm"),) if ends else ())
    assert decide(there=".", warm=(replace(warm, stopping=True),), keep_warm_s=keep_warm_s) == ()


def test_a_warm_worker_whose_time_is_over_still_serves_a_job_that_waits() -> None:
    assert decide(QUEUED, there=".", warm=(WARM,), keep_warm_s=0) == (Join("job", "warm"),)


def test_no_warm_worker_is_ended_twice_at_once() -> None:
    actions = decide(replace(QUEUED, launch=OTHER), there=".", warm=(WARM,), keep_warm_s=0)

    assert [action for action in actions if isinstance(action, StopWarm)] == [StopWarm("warm")]


def test_a_url_that_another_job_is_served_by_is_taken() -> None:
    other = replace(
        ENDPOINT, id="other", name="other", state=State.RUNNING, workers=1, live=(WorkerView("w", "http://a", ()),)
    )

    assert decide(other, ENDPOINT) == (StartWorker("job", "http://b", ()),)
    [wait] = decide(other, replace(ENDPOINT, sources=("http://a",)))
    assert wait == Wait("job", "http://a is held by other")


def test_a_warm_worker_at_a_url_serves_the_next_job_of_that_endpoint() -> None:
    warm = WarmView("warm", "endpoint", ("http://a",), "e", NOW)

    assert decide(ENDPOINT, warm=(warm,)) == (Join("job", "warm"), StartWorker("job", "http://b", ()))


def test_a_reason_counts_the_jobs_ahead_and_names_the_holder() -> None:
    nightly = running("nightly", "gpu0")
    jobs = [named(name) for name in ("a", "b", "c")]

    reasons = [action.reason for action in decide(nightly, *jobs, there=".") if isinstance(action, Wait)]

    held = "gpu0 is held by nightly"
    assert reasons == [held, f"1 job ahead; {held}", f"2 jobs ahead; {held}"]


def test_jobs_that_have_a_worker_are_not_counted_as_ahead() -> None:
    wait = decide(running("nightly", "gpu0"), named("a"), named("b"), there="..")[1]

    assert wait == Wait("b", "gpu0 is held by nightly; gpu1 is held by a")


def test_a_reason_names_all_places_and_each_holder_once() -> None:
    nightly, daily = running("nightly", "gpu0", "gpu2", workers=2), running("daily", "gpu1")
    warm = replace(WARM, places=("gpu3",), model="qwen", launch=OTHER, stopping=True)

    [wait] = decide(nightly, daily, QUEUED, there="....x", warm=(warm,))

    assert wait == Wait(
        "job",
        "gpu0 and gpu2 are held by nightly; gpu1 is held by daily; gpu3 is held by the warm model qwen; "
        "gpu4 is held by process x",
    )


def test_a_reason_does_not_list_many_places_of_one_holder() -> None:
    [wait] = decide(running("nightly", *(f"gpu{n}" for n in range(8)), workers=8), QUEUED, there="........")

    assert wait == Wait("job", "8 places are held by nightly")


def test_a_reason_calls_some_of_the_devices_not_all() -> None:
    nightly = running("nightly", "gpu0", "gpu1", "gpu2", "gpu3", workers=4)

    [wait] = decide(nightly, running("daily", "gpu4"), QUEUED, there=".....")

    assert isinstance(wait, Wait)
    assert "all of" not in wait.reason


def test_a_device_on_which_a_job_cannot_start_is_not_said_to_be_held() -> None:
    worn = Trouble("gpu0", MOST_STARTS, NOW - 1000, "out of memory")

    [wait] = decide(running("nightly", "gpu1"), named("a", troubles=(worn,)), there="..")

    assert isinstance(wait, Wait)
    assert "gpu1 is held by nightly" in wait.reason
    assert "gpu0 is held" not in wait.reason


def test_a_reason_tells_of_a_pause_in_words_that_do_not_change_with_the_time() -> None:
    job = replace(QUEUED, troubles=(Trouble("gpu0", 1, NOW, "no such file"),))

    first, later = (decide(job, there=".", now=NOW + at) for at in (0.1, START_BACKOFF_S[0] - 0.1))

    assert first == later == (Wait("job", "starting again 1 s after this: no such file"),)


@pytest.mark.parametrize("stopping", [False, True])
def test_a_job_is_cancelled_only_when_nothing_of_it_lives(stopping: bool) -> None:
    cancelling = replace(running("job", "gpu0", stopping=stopping), state=State.CANCELLING)

    assert decide(cancelling, there=".") == (() if stopping else (StopWorkers("job"),))
    assert decide(replace(cancelling, live=()), there=".") == (Cancelled("job"),)


@pytest.mark.parametrize("state", [*UNFINISHED, State.FINALIZING])
def test_a_broken_job_fails_once_its_workers_are_gone(state: State) -> None:
    job = replace(running("job", "gpu0"), state=state, broken="its input changed", blocked="full", left=0)

    assert decide(job, there=".") == (StopWorkers("job"),)
    assert decide(replace(running("job", "gpu0", stopping=True), state=state, broken="x"), there=".") == ()
    assert decide(replace(job, live=()), there=".") == (Fail("job", "its input changed"),)


@pytest.mark.parametrize("state", UNFINISHED)
def test_a_job_out_of_time_ends_so_unless_it_is_broken(state: State) -> None:
    late = replace(QUEUED, state=state, out_of_time=True)

    assert decide(late, there=".") == (TimeOut("job"),)
    assert decide(replace(late, broken="its input changed"), there=".") == (Fail("job", "its input changed"),)


@pytest.mark.parametrize("state", [State.QUEUED, State.STARTING, State.RUNNING])
def test_a_job_with_all_its_records_done_completes_however_late_its_workers_end(state: State) -> None:
    assert decide(replace(QUEUED, state=state, out_of_time=True, left=0), there=".") == (Finalize("job"),)


def test_a_cancelled_job_ends_so_even_when_it_is_broken_and_out_of_time() -> None:
    job = replace(QUEUED, state=State.CANCELLING, out_of_time=True, broken="its input changed")

    assert decide(job, there=".") == (Cancelled("job"),)


def test_a_job_that_cannot_go_on_keeps_no_other_from_its_turn() -> None:
    worn = (Trouble("gpu0", MOST_STARTS, NOW, "out of memory"),)
    stuck, broken = named("stuck", troubles=worn), named("broken", broken="no index")
    ahead = (stuck, broken, named("full", blocked="no space left"), named("gone", state=State.CANCELLING))

    actions = decide(*ahead, QUEUED, there=".")

    assert actions == (
        Suspend("stuck", "out of memory"),
        Fail("broken", "no index"),
        Suspend("full", "no space left"),
        Cancelled("gone"),
        start("job", "gpu0"),
    )
