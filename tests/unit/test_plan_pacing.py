"""Starts that wait for other starts: loads from one file system, and servers that must not start together."""

from freight.core.actions import PinWaits, StopWarm, Wait
from freight.core.snapshot import Need, Pacing, Trouble
from tests.unit.snapshots import NOW, decide, job, need, pin, running, start, start_pinned, warm

DISK = need(store="disk")
SLOW = need(staggers=True)
LOADING = "2 models are being loaded from the same file system"
STARTED = "another server has just been started on this machine"


def test_no_more_models_load_from_one_file_system_than_it_can_bear() -> None:
    jobs = [job(name, need=DISK) for name in ("a", "b", "c")]

    actions = decide("....", *jobs, pacing=Pacing(("disk",), most_loads=2))

    assert actions == (start("a", 0), Wait("b", LOADING), Wait("c", LOADING))


def test_loads_from_other_file_systems_and_from_none_go_on() -> None:
    jobs = (job("a", need=DISK), job("b", need=need(store="other")), job("c", need=need()))

    actions = decide("....", *jobs, pacing=Pacing(("disk", "disk"), most_loads=2))

    # The place of the one that waits stays its own.
    assert actions == (Wait("a", LOADING), start("b", 1), start("c", 2))


def test_a_place_is_kept_for_a_job_whose_start_waits_for_others() -> None:
    loading = running("now", 0, need=DISK)

    actions = decide("..", loading, job("a", need=DISK), job("b"), pacing=Pacing(("disk",), most_loads=1))

    assert actions == (
        Wait("a", "another model is being loaded from the same file system"),
        Wait("b", "1 job ahead; GPU 0 is held by now; GPU 1 is kept for a"),
    )


def test_further_workers_load_one_after_the_other_too() -> None:
    actions = decide("....", job("a", workers=4, need=DISK), pacing=Pacing(most_loads=2))

    assert actions == (start("a", 0), start("a", 1))
    assert decide("....", running("a", 0, 1, workers=4, need=DISK), pacing=Pacing(("disk", "disk"), most_loads=2)) == ()


def test_a_warm_worker_needs_no_load_so_it_is_joined_at_once() -> None:
    [join] = decide(
        "..", job("a", need=DISK), warms=(warm("w", 0, launch="a"),), pacing=Pacing(("disk",), most_loads=1)
    )

    assert not isinstance(join, Wait)


def test_servers_that_mind_are_started_one_after_another() -> None:
    jobs = (job("a", need=SLOW), job("b", need=SLOW), job("c"))

    first = decide("...", *jobs, pacing=Pacing(staggered_at=NOW - 10.0, stagger_s=10.0))
    before = decide("...", *jobs, pacing=Pacing(staggered_at=NOW - 9.9, stagger_s=10.0))

    assert first == (start("a", 0), Wait("b", STARTED), start("c", 2))
    assert before == (Wait("a", STARTED), Wait("b", STARTED), start("c", 2))


def test_pinned_models_are_paced_like_jobs_and_after_them() -> None:
    slow = pin("b", 2, need=SLOW)

    assert decide("...", pins=(slow,)) == (start_pinned("b", 0), PinWaits("b", STARTED))
    actions = decide("..", job("a", workers=2, need=SLOW), pins=(pin("b", need=SLOW),))
    # Its place is kept from the job's further workers.
    assert actions == (start("a", 0), PinWaits("b", STARTED))
    assert decide("..", running("j", 0, workers=2), pins=(slow,), pacing=Pacing(staggered_at=NOW)) == (
        PinWaits("b", STARTED),
    )


def test_a_start_that_has_no_place_takes_nobodys_turn() -> None:
    actions = decide(".", running("now", 0), job("a", need=SLOW), job("b", need=Need(gpus=0, staggers=True)))

    assert actions[0] == Wait("a", "GPU 0 is held by now")
    assert type(actions[1]).__name__ == "StartWorker"


def test_a_failed_start_pauses_before_it_is_paced() -> None:
    failed = job("a", need=DISK, troubles=(Trouble("g0", 1, NOW, "no such file"),))

    [wait] = decide("..", failed, pacing=Pacing(("disk",), most_loads=1))

    assert wait == Wait("a", "starting again 1 s after this: no such file")


def test_no_warm_worker_ends_for_a_start_that_waits_for_others() -> None:
    actions = decide("..", job("a", need=DISK), warms=(warm("w", 0),), pacing=Pacing(("disk",), most_loads=1))

    assert not [action for action in actions if isinstance(action, StopWarm)]
