"""Pinned models: what is kept up for them, what they are told, and what never goes."""

from dataclasses import replace

import pytest

from freight.core.actions import Action, Join, PinWaits, StopWarm, Wait
from freight.core.snapshot import MOST_STARTS, JobView, PinView, Trouble, WarmView
from tests.unit.snapshots import NOW, decide, job, pin, running, start, start_pinned, warm

HAS_ALL = PinWaits("b", "")


@pytest.mark.parametrize(
    ("marks", "pins", "warms", "jobs", "expected"),
    [
        # What is lacking is started, and nothing more.
        ("..", (pin("b"),), (), (), (start_pinned("b", 0), HAS_ALL)),
        ("....", (pin("b", 2, count=2),), (), (), (start_pinned("b", "0 1"), start_pinned("b", "2 3"), HAS_ALL)),
        ("..", (pin("b"),), (warm("w", 1),), (), (HAS_ALL,)),
        ("...", (pin("b", 2),), (warm("w", 1),), (), (start_pinned("b", 0), HAS_ALL)),
        # A worker that serves a job is one of them, also while it leaves the job; one that ends is not.
        ("..", (pin("b"),), (), (running("j", 0, launch="b"),), (HAS_ALL,)),
        ("..", (pin("b"),), (), (running("j", 0, launch="b", stopping=True),), (HAS_ALL,)),
        ("..", (pin("b"),), (warm("w", 1, stopping=True),), (), (start_pinned("b", 0), HAS_ALL)),
        # So is the one that a job is given in the same moment.
        ("..", (pin("b"),), (), (job("j", launch="b"),), (start("j", 0), HAS_ALL)),
        ("..", (pin("b"),), (warm("w", 1),), (job("j", launch="b"),), (Join("j", "w"), HAS_ALL)),
        # A waiting job's first worker goes before the pinned model, the pinned model before a job's further ones.
        (".", (pin("b"),), (), (job("j"),), (start("j", 0), PinWaits("b", "GPU 0 is held by j"))),
        ("..", (pin("b"),), (), (job("j", workers=2),), (start("j", 0), start_pinned("b", 1), HAS_ALL)),
        # What it needs is kept for it from those further workers.
        (
            "...",
            (pin("b", count=2),),
            (),
            (running("j", 0, 1, workers=3),),
            (PinWaits("b", "it needs 2 GPUs; GPU 0 and GPU 1 are held by j"),),
        ),
        # Pinned models have their turn in the order of the snapshot.
        (
            ".",
            (pin("b"), pin("c")),
            (),
            (),
            (start_pinned("b", 0), HAS_ALL, PinWaits("c", "GPU 0 is held by the pinned model b")),
        ),
        # Where there is room for some of them only, these are started.
        (
            ".x",
            (pin("b", 2),),
            (),
            (),
            (
                start_pinned("b", 0),
                PinWaits("b", "GPU 0 is held by the pinned model b; GPU 1 is held by process x"),
            ),
        ),
        ("", (pin("b"),), (), (), (PinWaits("b", "there is no GPU"),)),
        ("..", (pin("b", count=4),), (), (), (PinWaits("b", "it needs 4 GPUs; there are 2"),)),
    ],
)
def test_a_pinned_model_has_its_workers_up(
    marks: str,
    pins: tuple[PinView, ...],
    warms: tuple[WarmView, ...],
    jobs: tuple[JobView, ...],
    expected: tuple[Action, ...],
) -> None:
    assert decide(marks, *jobs, warms=warms, pins=pins) == expected


def test_a_pinned_model_leaves_the_next_worker_to_a_job_of_its_own_that_waits() -> None:
    queued = job("j", launch="b")

    actions = decide("..", running("now", 0), queued, warms=(warm("other", 1, launch="c"),), pins=(pin("b"),))

    assert actions == (
        Wait("j", "GPU 0 is held by now; GPU 1 is held by the warm model c"),
        PinWaits("b", "its next worker is for a job that waits"),
        StopWarm("other"),
    )


@pytest.mark.parametrize("keep_warm_s", [0.0, 3600.0])
def test_pinned_workers_never_go_whoever_waits_and_however_long_they_are_idle(keep_warm_s: float) -> None:
    idle = warm("w", 0, idle_s=1e6)

    actions = decide(".", job("j"), warms=(idle,), pins=(pin("b"),), keep_warm_s=keep_warm_s)

    assert actions == (Wait("j", "GPU 0 is held by the pinned model b"), HAS_ALL)


def test_of_a_pinned_model_those_over_the_pinned_number_may_go() -> None:
    old, young = warm("old", 0, idle_s=50), warm("young", 1, idle_s=5)

    actions = decide("..", job("j"), warms=(old, young), pins=(pin("b"),))

    held = "GPU 0 is held by the warm model b; GPU 1 is held by the pinned model b"
    assert actions == (Wait("j", held), HAS_ALL, StopWarm("old"))
    assert decide("..", warms=(old, young), pins=(pin("b"),), keep_warm_s=10) == (HAS_ALL, StopWarm("old"))
    busy = running("busy", 1, launch="b")
    assert decide("..", busy, job("j"), warms=(old,), pins=(pin("b"),))[1:] == (HAS_ALL, StopWarm("old"))


def test_a_model_that_is_pinned_no_longer_ends_like_any_other() -> None:
    assert decide(".", warms=(warm("w", 0, idle_s=50),), keep_warm_s=10) == (StopWarm("w"),)


def test_a_pinned_model_makes_room_for_itself_among_warm_ones_and_not_among_pinned_ones() -> None:
    warms = (warm("w", 0, launch="c"), warm("x", 1, launch="d"))

    actions = decide("..", warms=warms, pins=(pin("b"), pin("d")))

    waits = "GPU 0 is held by the warm model c; GPU 1 is held by the pinned model d"
    assert actions == (PinWaits("b", waits), PinWaits("d", ""), StopWarm("w"))


def test_nothing_is_kept_for_a_job_that_pinned_models_keep_from_starting() -> None:
    """Whether a pinned worker is busy or not: it does not go after its job."""
    big, small = job("big", 2, launch="c"), job("small", launch="c")
    reason = "it needs 2 GPUs; GPU 0 is held by "

    idle = decide("..", big, small, warms=(warm("w", 0),), pins=(pin("b"),))
    busy = decide("..", running("now", 0, launch="b"), big, small, pins=(pin("b"),))

    assert idle == (Wait("big", f"{reason}the pinned model b; GPU 1 is held by small"), start("small", 1), HAS_ALL)
    assert busy == (Wait("big", f"{reason}now; GPU 1 is held by small"), start("small", 1), HAS_ALL)


def test_a_pinned_worker_serves_a_job_of_its_launch_while_a_large_job_waits() -> None:
    actions = decide(
        "...",
        running("now", 1),
        job("big", 2, launch="c"),
        job("j", launch="b"),
        warms=(warm("w", 0),),
        pins=(pin("b"),),
    )

    assert actions == (
        Wait("big", "it needs 2 GPUs; GPU 0 is held by j; GPU 1 is held by now"),
        Join("j", "w"),
        HAS_ALL,
    )


def test_a_pinned_model_that_would_not_start_is_tried_again_after_a_pause_and_given_up_in_the_end() -> None:
    once = replace(pin("b"), troubles=(Trouble("g0", 1, NOW, "out of memory"),))

    assert decide("..", pins=(once,)) == (PinWaits("b", "starting again 1 s after this: out of memory"),)
    assert decide("..", pins=(once,), now=NOW + 1) == (start_pinned("b", 1), HAS_ALL)
    worn_out = replace(once, troubles=(Trouble("g0", MOST_STARTS, NOW - 100, "out of memory"),))
    assert decide(".", pins=(worn_out,)) == (PinWaits("b", "it would not start: out of memory"),)


def test_a_pinned_model_keeps_no_gpu_from_others_while_it_pauses() -> None:
    pausing = replace(pin("b"), troubles=(Trouble("g0", 1, NOW, "out of memory"),))

    assert decide("..", running("j", 0, workers=2), pins=(pausing,)) == (
        PinWaits("b", "starting again 1 s after this: out of memory"),
        start("j", 1),
    )


def test_a_worker_that_leaves_its_job_takes_no_protection_from_one_that_is_up() -> None:
    leaving, idle = running("j", 0, launch="b", stopping=True), warm("up", 1)

    assert decide("..", leaving, job("big"), warms=(idle,), pins=(pin("b"),))[-1] == HAS_ALL
    assert decide("..", leaving, warms=(idle,), pins=(pin("b"),), keep_warm_s=0.0) == (HAS_ALL,)


def test_of_a_pinned_model_one_that_is_up_stays_before_one_that_loads() -> None:
    up, loads = warm("up", 0, idle_s=50), warm("loads", 1, idle_s=1, is_up=False)

    actions = decide("..", job("j"), warms=(up, loads), pins=(pin("b"),))

    assert [action for action in actions if isinstance(action, StopWarm)] == [StopWarm("loads")]


def test_a_worker_that_works_is_one_of_the_pinned_ones_before_one_that_is_idle() -> None:
    actions = decide("..", running("busy", 0, launch="b"), job("j"), warms=(warm("idle", 1),), pins=(pin("b"),))

    assert [action for action in actions if isinstance(action, StopWarm)] == [StopWarm("idle")]


def test_a_worker_that_has_not_been_heard_from_yet_is_one_of_the_pinned_ones_and_is_asked_nothing() -> None:
    unknown = warm("w", 1, is_known=False)

    assert decide("..", warms=(unknown,), pins=(pin("b"),)) == (HAS_ALL,)
    # No job can be given it, and it is not told to end.
    assert decide(".", job("j", launch="b"), warms=(replace(unknown, places=("g0",)),)) == (
        Wait("j", "GPU 0 is held by the warm model b"),
    )
