"""What a worker's window makes of simulated engines, in virtual time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simengine.physics import Physics, Request
from bench.simengine.profiles import PROFILES
from freight.core.window import OPAQUE_START, Window
from tests.unit.windowworld import DOWN_S, Client, World, fresh, lognormal, peak_s, sized, took

FAST = PROFILES["b200-30b"]
# Few blocks for many slots: the cache is full long before the slots are.
TIGHT: dict[str, tuple[Physics, list[Request]]] = {
    "4,000 blocks": (replace(FAST, blocks=4_000, max_model_len=8_192), lognormal(2_000, 1)),
    "1,500 blocks": (replace(FAST, blocks=1_500, max_model_len=8_192), lognormal(2_000, 2)),
    "long answers": (replace(FAST, blocks=4_000, max_model_len=8_192), lognormal(2_000, 3, prompt=50, output=600)),
    "a small card": (PROFILES["l4-8b"], lognormal(2_000, 4)),
    "a CPU": (replace(PROFILES["cpu-135m"], blocks=1_280), lognormal(800, 5, output=100)),
}
WORK: dict[str, Callable[[int], list[Request]]] = {
    "long": lambda count: [Request(200, 600) for _ in range(count)],
    "short": lambda count: [Request(200, 16) for _ in range(count)],
    "one token": lambda count: [Request(1_000, 1) for _ in range(count)],
    "mixed": lambda count: lognormal(count, seed=1),
    "longest first": lambda count: sorted(lognormal(count, seed=2), key=lambda request: -request.output_tokens),
    "longest last": lambda count: sorted(lognormal(count, seed=3), key=lambda request: request.output_tokens),
}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("slots", [8, 64, 256, 1_024])
def test_a_window_that_sees_the_metrics_reaches_the_peak_of_any_engine(slots: int, work: str) -> None:
    requests = WORK[work](4_000)
    physics = sized(FAST, slots)

    spent_s, client = took(physics, requests, Window.opaque())

    assert peak_s(physics, requests) / spent_s >= 0.985
    # Where few records are left there is nothing that would bring a window down that nobody fills.
    settled = client.sizes[len(client.sizes) // 2]
    assert settled <= max(2 * slots, 2 * OPAQUE_START)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("slots", [8, 64, 256, 1_024])
def test_a_window_that_sees_only_answers_comes_near_the_peak(slots: int, work: str) -> None:
    requests = WORK[work]({256: 8_000, 1_024: 20_000}.get(slots, 2_000))
    physics = sized(FAST, slots)

    spent_s, client = took(physics, requests, Window.opaque(), is_sighted=False)

    assert peak_s(physics, requests) / spent_s >= 0.90
    assert sorted(client.later_half())[len(client.sizes) // 4] <= max(8 * slots, 8 * OPAQUE_START)


@pytest.mark.parametrize("slots", [8, 64, 256, 1_024])
def test_a_file_of_300_is_as_fast_as_if_all_were_sent_at_once(slots: int) -> None:
    requests = lognormal(300, seed=6)
    physics = sized(FAST, slots)

    spent_s, _ = took(physics, requests, Window.opaque())

    assert peak_s(physics, requests) / spent_s >= 0.985


@pytest.mark.parametrize("slots", [8, 64, 256, 1_024])
def test_a_settled_window_holds_what_runs_and_a_small_queue_and_stays(slots: int) -> None:
    requests = lognormal(max(2_000, 12 * slots), seed=7)

    _, client = took(sized(FAST, slots), requests, Window.opaque())

    middle = client.sizes[len(client.sizes) * 2 // 3 : -3]
    assert slots < min(middle)
    assert max(middle) <= slots + max(slots // 2, 8)


@pytest.mark.parametrize("name", TIGHT)
@pytest.mark.parametrize("is_known", [False, True])
def test_an_engine_whose_cache_is_full_runs_what_fits_and_loses_nothing_by_it(name: str, is_known: bool) -> None:
    physics, requests = TIGHT[name]
    window = Window.known(physics.max_num_seqs) if is_known else Window.opaque()
    flooded = World(physics)
    flooded_s = flooded.run([Client(Window.fixed(len(requests)), fresh(requests), is_sighted=False)])

    world = World(physics)
    spent_s = world.run([Client(window, fresh(requests))])

    assert flooded_s / spent_s >= 0.97
    assert world.preemptions <= 0.8 * flooded.preemptions


def test_a_window_rises_again_when_more_fits_in_the_cache() -> None:
    physics = replace(FAST, blocks=6_000, max_model_len=8_192, max_num_seqs=256)
    requests = [*lognormal(1_500, 8, output=600), *lognormal(20_000, 9, prompt=60, output=60)]

    spent_s, client = took(physics, requests, Window.opaque())

    third = len(client.sizes) // 3
    assert max(client.sizes[-third:]) > 1.5 * min(client.sizes[third : 2 * third])
    assert peak_s(physics, requests) / spent_s >= 0.95


@pytest.mark.parametrize("is_sighted", [False, True])
def test_two_workers_on_one_engine_share_its_peak(is_sighted: bool) -> None:
    physics = sized(FAST, 256)
    requests = lognormal(8_000, seed=1)
    clients = [Client(Window.opaque(), fresh(requests[half::2]), is_sighted) for half in (0, 1)]

    spent_s = World(physics).run(clients)

    assert peak_s(physics, requests) / spent_s >= 0.97
    if is_sighted:
        assert all(max(client.later_half()) <= 512 for client in clients)


@pytest.mark.parametrize("is_sighted", [False, True])
def test_a_restart_in_the_middle_costs_no_more_than_it_takes(is_sighted: bool) -> None:
    physics = sized(FAST, 256)
    requests = lognormal(8_000, seed=1)
    world = World(physics, restarts_at=80.0)

    spent_s = world.run([Client(Window.opaque(), fresh(requests), is_sighted)])

    assert world.answered == 8_000
    # What was in flight is made twice: up to 15 s of work.
    assert spent_s <= peak_s(physics, requests) * 1.04 + DOWN_S + 15


@pytest.mark.parametrize("is_sighted", [False, True])
@pytest.mark.parametrize("most", [20, 100, 300])
def test_an_engine_that_refuses_what_is_too_much_is_kept_busy(most: int, is_sighted: bool) -> None:
    physics = sized(FAST, 256)
    requests = lognormal(6_000, seed=1)
    best_s, _ = took(physics, requests, Window.fixed(most), is_sighted=False)

    spent_s = World(physics, most_in_flight=most).run([Client(Window.opaque(), fresh(requests), is_sighted)])

    assert best_s / spent_s >= 0.80


def test_a_look_at_another_engines_metrics_moves_nothing() -> None:
    window = Window.opaque()

    for second in range(100):
        window.looked(float(second), in_flight=64, running=3, waiting=2)
        window.succeeded(float(second), 1.0, in_flight=3)

    assert window.limit == OPAQUE_START


def test_a_known_engine_is_looked_at_seldom_and_an_unknown_one_often_while_its_window_grows() -> None:
    assert Window.known(64).look_s() >= 1.0
    assert Window.opaque().look_s() <= 0.5


@settings(max_examples=15, deadline=None)
@given(
    slots=st.integers(1, 600),
    count=st.integers(1, 1_500),
    prompt=st.integers(1, 1_500),
    output=st.integers(1, 600),
    sigma=st.floats(0, 1.2),
    seed=st.integers(0, 1 << 30),
    is_sighted=st.booleans(),
)
def test_on_any_engine_and_work_all_is_answered_and_what_looks_show_is_enough(
    slots: int, count: int, prompt: int, output: int, sigma: float, seed: int, is_sighted: bool
) -> None:
    physics = sized(FAST, slots)
    requests = lognormal(count, seed, prompt, output, sigma)

    spent_s, client = took(physics, requests, Window.opaque(), is_sighted)

    assert not client.in_flight and not client.sent
    if is_sighted:
        # A look of 0.25 s may be missed at each of a few doublings.
        assert spent_s <= peak_s(physics, requests) * 1.03 + 2.0
