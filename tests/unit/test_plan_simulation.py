"""A small world in which jobs come, workers die and devices are taken, planned for step by step from a seed."""

import os

import pytest

from freight.core.job import FINAL, State
from freight.core.plan import plan
from tests.unit.plantruth import Truth, pinned_workers
from tests.unit.planworld import MODELS, Job, World

BIG = bool(os.environ.get("FREIGHT_BIG_TESTS"))
SEEDS = range(500 if BIG else 50)
EVENTS = 2000
MOST_CALM_STEPS = 2000
SMALL = [model for model in MODELS if model.need.gpus == 1 and not model.is_broken and not model.urls]
[HUGE] = [model for model in MODELS if model.need.gpus == 4]


def step(world: World) -> None:
    """Plan, do what was planned, and check it."""
    snapshot = world.snapshot()
    pinned = pinned_workers(world, snapshot)
    actions = plan(snapshot, world.now)
    for action in actions:
        world.do(action)
    Truth(world, snapshot, actions, pinned).check()
    world.follow()


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_right_and_their_reasons_true_whatever_happens_and_every_job_ends_once_faults_stop(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    events = 0
    while events < EVENTS:
        for _ in range(world.dice.randint(1, 8)):
            world.happen()
            events += 1
        world.now += world.dice.choice((0.25, 1.0, 3.0))
        step(world)

    world.calm_down()
    steps = 0
    while world.jobs:
        world.live_all()
        world.now += 1.0
        step(world)
        steps += 1
        assert steps < MOST_CALM_STEPS, world.jobs
    assert world.submitted > 20
    assert world.ends.keys() >= {State.COMPLETED, State.CANCELLED, State.FAILED}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_for_four_gpus_starts_while_small_jobs_keep_coming(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed, gpu_count=world_size(seed))
    world.bad.clear()
    world.calm = True
    huge: Job | None = None
    for number in range(400):
        # More than the box can do, so that a device that comes free is always wanted.
        world.submit(world.dice.choice(SMALL), left=world.dice.choice((5, 20)))
        if number == 20:
            world.jobs.pop(next(name for name in world.jobs if not world.of(name)), None)
            huge = world.submit(HUGE, left=10)
            assert huge is not None
        world.live_all()
        world.now += 1.0
        step(world)
        if huge is not None and (huge.was_ready or huge.state in FINAL):
            return
    raise AssertionError(f"{huge} has not started")


def world_size(seed: int) -> int:
    return 4 + seed % 5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_is_served_before_those_that_came_after_it_have_ended(seed: int) -> None:
    """One device, jobs of many models that keep coming: each begins in its turn."""
    print(f"seed {seed}")
    world = World(seed, gpu_count=1)
    world.bad.clear()
    world.calm = True
    begun: list[str] = []
    came: list[str] = []
    for number in range(200):
        if number % 10 == 0 and (job := world.submit(world.dice.choice(SMALL), left=10)):
            came.append(job.id)
        world.live_all()
        world.now += 1.0
        step(world)
        begun += [name for name, job in world.jobs.items() if job.was_ready and name not in begun]

    assert len(begun) > 5
    assert begun == came[: len(begun)]
