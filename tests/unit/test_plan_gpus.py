"""Workers on several GPUs, CPU devices apart from GPUs, and what is kept for a job that needs more than is free."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from freight.core.actions import Action, Fail, Join, StartWorker, StopWarm, Suspend, Wait
from freight.core.job import State
from freight.core.plan import plan
from freight.core.snapshot import MOST_STARTS, START_BACKOFF_S, DeviceView, JobView, Need, Snapshot, Trouble
from tests.unit.snapshots import CPU, MODEL, NOW, decide, gpus, job, running, start, warm


@pytest.mark.parametrize(
    ("marks", "count", "workers", "expected"),
    [
        ("....", 1, 1, ("0",)),
        ("....", 2, 1, ("0 1",)),
        ("....", 4, 1, ("0 1 2 3",)),
        (".x..", 2, 1, ("0 2",)),
        ("....", 2, 2, ("0 1", "2 3")),
        ("....", 2, 9, ("0 1", "2 3")),
        (".....", 2, 9, ("0 1", "2 3")),
        ("x......x", 3, 2, ("1 2 3", "4 5 6")),
    ],
)
def test_a_worker_takes_as_many_whole_gpus_as_it_needs(
    marks: str, count: int, workers: int, expected: tuple[str, ...]
) -> None:
    assert decide(marks, job("a", count, workers=workers)) == tuple(start("a", places) for places in expected)


def test_a_job_without_gpus_takes_a_cpu_device_and_no_other_job_does() -> None:
    on_cpu = job("small", 0)
    assert decide("..", on_cpu) == (StartWorker("small", MODEL, ("cpu:0",)),)
    assert plan(Snapshot((on_cpu,), gpus("..")), NOW) == (Wait("small", "there is no device"),)
    assert plan(Snapshot((job("big"),), (CPU,)), NOW) == (Wait("big", "there is no GPU"),)


@pytest.mark.parametrize(
    ("marks", "jobs", "expected"),
    [
        # One GPU is free, the job at the head needs two: nobody behind it takes the one.
        (
            "..",
            (running("now", 0), job("big", 2), job("small")),
            (
                Wait("big", "it needs 2 GPUs; GPU 0 is held by now"),
                Wait("small", "1 job ahead; GPU 0 is held by now; GPU 1 is kept for big"),
            ),
        ),
        # What the job at the head cannot use, and what it does not need, is free for others.
        (
            "....",
            (job("big", 2), job("small"), job("smaller")),
            (start("big", "0 1"), start("small", 2), start("smaller", 3)),
        ),
        # Two that wait: what is left over by the first is kept for the second.
        (
            "......",
            (running("now", 0, 1, 2), job("big", 4), job("other", 4), job("small")),
            (
                Wait("big", "it needs 4 GPUs; GPU 0, GPU 1 and GPU 2 are held by now"),
                Wait(
                    "other",
                    "it needs 4 GPUs; 1 job ahead; GPU 0, GPU 1 and GPU 2 are held by now; "
                    "GPU 3, GPU 4 and GPU 5 are kept for big",
                ),
                Wait(
                    "small",
                    "2 jobs ahead; GPU 0, GPU 1 and GPU 2 are held by now; GPU 3, GPU 4 and GPU 5 are kept for big",
                ),
            ),
        ),
        # A job's further workers keep nothing from others, and take nothing that is kept.
        (
            "..",
            (running("now", 0, workers=9), job("big", 2)),
            (Wait("big", "it needs 2 GPUs; GPU 0 is held by now"),),
        ),
    ],
)
def test_free_gpus_are_kept_for_the_job_at_the_head(
    marks: str, jobs: tuple[JobView, ...], expected: tuple[Action, ...]
) -> None:
    assert decide(marks, *jobs) == expected


def test_further_workers_keep_nothing_from_the_jobs_behind() -> None:
    wide = running("wide", "0 1", workers=2, need=Need(gpus=2))

    assert decide("....", wide, running("slim", 2, workers=2)) == (start("slim", 3),)


@pytest.mark.parametrize(
    ("marks", "held"),
    [
        ("x...", "GPU 0 is held by process x; GPU 1 is held by small"),
        ("xx..", "GPU 0 and GPU 1 are held by process x; GPU 2 is held by small"),
    ],
)
def test_nothing_is_kept_for_a_job_that_strangers_keep_from_starting(marks: str, held: str) -> None:
    assert decide(marks, job("big", 4), job("small")) == (
        Wait("big", f"it needs 4 GPUs; {held}"),
        start("small", marks.index(".")),
    )


def test_nothing_is_kept_for_a_job_that_needs_more_than_there_is() -> None:
    assert decide("..", job("big", 4), job("small")) == (
        Wait("big", "it needs 4 GPUs; there are 2"),
        start("small", 0),
    )
    assert decide(".", job("big", 4)) == (Wait("big", "it needs 4 GPUs; there is 1"),)
    assert decide("", job("big", 4)) == (Wait("big", "it needs 4 GPUs; there are none"),)


def test_a_warm_worker_that_a_job_ahead_needs_gone_later_serves_nobody_behind_it() -> None:
    """Else a stream of small jobs would keep a big one waiting for ever."""
    idle = warm("idle", 1, launch="a")

    actions = decide("..", running("now", 0), job("big", 2, launch="b"), job("small"), warms=(idle,))

    assert actions == (
        Wait("big", "it needs 2 GPUs; GPU 0 is held by now; GPU 1 is held by the warm model a"),
        Wait("small", "1 job ahead; GPU 0 is held by now; GPU 1 is kept for big"),
    )


@pytest.mark.parametrize(
    ("count", "warms", "gone"),
    [
        # The longest idle first, as many as give room, free GPUs counted.
        (1, {"young": "0", "old": "1", "middle": "2 3"}, ("old",)),
        (2, {"young": "0", "old": "1", "middle": "2"}, ("old",)),
        (3, {"young": "0", "old": "1", "middle": "2"}, ("old", "middle")),
        (4, {"young": "0", "old": "1", "middle": "2 3"}, ("old", "middle", "young")),
        # One that holds two makes the older one superfluous.
        (2, {"old": "0", "middle": "1 2", "young": "3"}, ("middle",)),
        # One that holds more than is needed goes whole.
        (1, {"old": "0 1 2 3"}, ("old",)),
    ],
)
def test_the_longest_idle_warm_workers_make_room(count: int, warms: dict[str, str], gone: tuple[str, ...]) -> None:
    idle_s = {"young": 5.0, "middle": 20.0, "old": 50.0}
    there = tuple(warm(name, places, idle_s=idle_s[name]) for name, places in warms.items())

    actions = decide("....", job("a", count), warms=there)

    assert tuple(action.worker for action in actions if isinstance(action, StopWarm)) == gone


def test_no_warm_worker_ends_where_that_gives_no_room_yet() -> None:
    assert [type(action) for action in decide("..", running("now", 0), job("big", 2), warms=(warm("w", 1),))] == [Wait]


def test_room_that_is_made_for_one_job_is_not_counted_for_the_next() -> None:
    going, old, young = warm("going", 0, stopping=True), warm("old", 1, idle_s=50), warm("young", 2)

    actions = decide("...", job("first"), job("second"), warms=(going, old, young))

    assert actions == (
        Wait("first", "all 3 GPUs are held by the warm model b"),
        Wait("second", "1 job ahead; GPU 0 is kept for first; GPU 1 and GPU 2 are held by the warm model b"),
        StopWarm("old"),
    )


def test_what_a_large_warm_worker_leaves_is_shared_by_those_who_wait() -> None:
    actions = decide("..", job("first"), job("second"), warms=(warm("large", "0 1"),))

    assert [action for action in actions if not isinstance(action, Wait)] == [StopWarm("large")]
    assert decide("..", job("first"), job("second"), warms=(warm("large", "0 1", stopping=True),))[2:] == ()


def test_a_warm_worker_on_gpus_is_no_room_for_a_cpu_job_and_the_other_way_round() -> None:
    on_cpu = replace(warm("w", 0), places=("cpu:0",))

    assert decide("x", job("a"), warms=(on_cpu,)) == (Wait("a", "GPU 0 is held by process x"),)
    assert decide(".", job("small", 0), warms=(warm("w", 0),)) == (StartWorker("small", MODEL, ("cpu:0",)),)


def test_a_warm_worker_of_several_gpus_is_joined_whole() -> None:
    assert decide("....", job("big", 2, launch="b"), warms=(warm("w", "2 3"),)) == (Join("big", "w"),)


def test_devices_without_failures_are_preferred() -> None:
    troubles = (Trouble("g0", 2, NOW - 10, "x"), Trouble("g1", 1, NOW - 10, "x"))

    assert decide("....", job("a", 2, troubles=troubles)) == (start("a", "2 3"),)
    assert decide("..x.", job("a", 2, troubles=troubles)) == (start("a", "3 1"),)


def failed(*counts: int, apart_s: float = 10.0, last: float = NOW - 100) -> tuple[Trouble, ...]:
    """Return troubles on GPU 0, GPU 1 …, the last of each so long before that of the next."""
    first = last - apart_s * (len(counts) - 1)
    return tuple(
        Trouble(f"g{n}", count, first + n * apart_s, "out of memory") for n, count in enumerate(counts) if count
    )


@pytest.mark.parametrize(
    ("marks", "count", "counts", "apart_s", "is_over"),
    [
        # One after another on three GPUs of many.
        ("........", 1, (1, 1), 10, False),
        ("........", 1, (1, 1, 1), 10, True),
        # Eight that fail together are one try.
        ("........", 1, (1,) * 8, 0, False),
        ("........", 1, (2,) * 8, 0, False),
        ("........", 1, (3,) * 8, 0, True),
        # Three on one place; a second one is to be tried as well, where there is one.
        (".", 1, (3,), 0, True),
        ("..", 1, (3,), 0, False),
        ("..", 1, (3, 1), 10, True),
        # Several GPUs a worker: twice as many are tried.
        ("........", 2, (2, 2), 0, False),
        ("........", 2, (3, 3), 0, False),
        ("........", 2, (3, 3, 1, 1), 0, True),
        ("..", 2, (3, 3), 0, True),
        ("...", 2, (3, 3), 0, True),
    ],
)
def test_a_model_that_never_came_up_is_tried_three_times_and_not_on_every_gpu(
    marks: str, count: int, counts: tuple[int, ...], apart_s: float, is_over: bool
) -> None:
    never_up = job("a", count, was_ready=False, troubles=failed(*counts, apart_s=apart_s))

    [action] = decide(marks, never_up)

    assert isinstance(action, Suspend if is_over else StartWorker)
    if is_over:
        assert action == Suspend("a", "out of memory")
        assert decide(marks, replace(never_up, state=State.SUSPENDED)) == (Fail("a", "out of memory"),)


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2, 3), (3, 3, 0)])
def test_a_job_that_was_up_once_is_over_only_when_every_place_is_worn_out(counts: tuple[int, ...]) -> None:
    [action] = decide("...", job("a", troubles=failed(*counts)))

    assert isinstance(action, StartWorker)
    assert decide("...", job("a", troubles=failed(3, 3, 3))) == (Suspend("a", "out of memory"),)


def test_those_that_fail_together_are_tried_again_after_the_first_pause() -> None:
    troubles = failed(1, 1, 1, 1, apart_s=0, last=NOW)
    never_up = job("a", workers=4, was_ready=False, troubles=troubles)

    assert decide("....", never_up) == (Wait("a", "starting again 1 s after this: out of memory"),)
    assert len(decide("....", never_up, now=NOW + START_BACKOFF_S[0])) == 4


@pytest.mark.parametrize(
    ("marks", "jobs", "reason"),
    [
        ("..", (running("nightly", 0, 1),), "both GPUs are held by nightly"),
        ("..", (running("nightly", "0 1"),), "both GPUs are held by nightly"),
        (".", (running("nightly", 0),), "GPU 0 is held by nightly"),
        ("...", (running("nightly", 0, 1, 2),), "all 3 GPUs are held by nightly"),
        ("......", (running("nightly", 0, 1, 2, 3), running("daily", "4 5")),
         "4 GPUs are held by nightly; GPU 4 and GPU 5 are held by daily"),
        ("..", (running("nightly", 0), running("daily", 1)), "GPU 0 is held by nightly; GPU 1 is held by daily"),
        ("..", (running("nightly", 0, 1), job("first"), job("second")), "2 jobs ahead; both GPUs are held by nightly"),
        (".x", (running("nightly", 0),), "GPU 0 is held by nightly; GPU 1 is held by process x"),
        (".", (running("", 0),), "GPU 0 is held by another job"),
    ],
)  # fmt: skip
def test_a_reason_names_who_holds_which_gpus(marks: str, jobs: tuple[JobView, ...], reason: str) -> None:
    assert decide(marks, *jobs, job("last"))[-1] == Wait("last", reason)


def test_a_job_on_the_cpu_is_not_behind_one_that_waits_for_gpus() -> None:
    busy = JobView("c", State.RUNNING, (MODEL,), True, 1, running("c", 0).live, left=1, name="slow")
    busy = replace(busy, live=(replace(busy.live[0], devices=("cpu:0",)),))

    _, _, small = decide("x", busy, job("big"), job("bigger"), job("small", 0))

    assert small == Wait("small", "cpu:0 is held by slow")


def test_a_gpu_on_which_a_job_will_not_start_is_said_to_be_that_whoever_has_it_now() -> None:
    worn_out = (Trouble("g0", MOST_STARTS, NOW - 100, "out of memory\n  | a line of the log"),)
    reason = "GPU 1 is held by process x; on GPU 0 it would not start: out of memory"

    assert decide(".x", job("a", troubles=worn_out)) == (Wait("a", reason),)
    assert decide(".x", running("now", 0), job("a", troubles=worn_out)) == (Wait("a", reason),)


def test_a_reason_is_the_same_from_step_to_step() -> None:
    jobs = (running("now", 0), job("big", 2), job("small"))

    first, later = (decide("...", *jobs, now=NOW + at) for at in (0.0, 100.0))

    assert first == later


def test_a_device_without_a_label_is_called_by_its_id() -> None:
    views = (DeviceView("GPU-1234", "process 41 (user bob: python)", True),)

    assert plan(Snapshot((job("a"),), views), NOW) == (Wait("a", "GPU-1234 is held by process 41 (user bob: python)"),)


@pytest.mark.parametrize(
    ("marks", "count", "live", "counts", "goes_on"),
    [
        # Two have failed, the rest still loads: those two are tried again.
        ("........", 1, range(2, 8), (1, 1), True),
        # Often enough in all, on two places: no more, though six are not known to fail yet.
        ("........", 1, range(2, 8), (3, 3), False),
        ("........", 1, range(2, 8), (3, 1), False),
        ("........", 1, range(3, 8), (1, 1, 1), False),
        # On one place alone nothing is known of the model.
        ("........", 1, range(2, 8), (3,), True),
        ("........", 2, ("4 5", "6 7"), (3, 3), True),
        ("........", 2, ("4 5", "6 7"), (3, 3, 3, 3), False),
    ],
)
def test_a_model_that_never_came_up_is_not_started_more_often_because_other_workers_still_load(
    marks: str, count: int, live: Sequence[int | str], counts: tuple[int, ...], goes_on: bool
) -> None:
    loading = running("a", *live, workers=8, need=Need(gpus=count), was_ready=False, troubles=failed(*counts))

    actions = decide(marks, replace(loading, state=State.STARTING))

    assert bool(actions) == goes_on
    assert all(isinstance(action, StartWorker) for action in actions)


def test_a_model_that_was_up_once_is_started_again_while_others_work() -> None:
    working = running("a", *range(3, 8), workers=8, troubles=failed(1, 1, 1))

    assert decide("........", working) == tuple(start("a", number) for number in range(3))
