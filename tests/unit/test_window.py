"""How many requests are kept in flight, on a clock of the test's own."""

import heapq
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.window import OPAQUE_MOST, OPAQUE_START, Window

LATENCY_S = 2.0


class Server:
    """A server that runs `capacity` requests at once, LATENCY_S each; the rest queue."""

    def __init__(self, capacity: int) -> None:
        self.now = 100.0
        self._slots = [0.0] * capacity
        self._in_flight: list[tuple[float, float]] = []

    def serve(self, window: Window, answers: int) -> None:
        """Answer so many requests, with the window kept full."""
        for _ in range(answers):
            while len(self._in_flight) < window.limit:
                ends = max(self.now, heapq.heappop(self._slots)) + LATENCY_S
                heapq.heappush(self._slots, ends)
                heapq.heappush(self._in_flight, (ends, self.now))
            self.now, sent = self._in_flight[0]
            window.succeeded(self.now, self.now - sent, len(self._in_flight))
            heapq.heappop(self._in_flight)


@pytest.mark.parametrize("size", [1, 3, 64, 5000])
def test_a_fixed_window_stays_as_the_user_asked(size: int) -> None:
    window = Window.fixed(size)

    Server(capacity=10_000).serve(window, 20_000)

    assert window.limit == size


@pytest.mark.parametrize("slots", [1, 8, 256])
def test_the_window_of_a_known_engine_holds_a_few_more_than_its_slots_and_stays(slots: int) -> None:
    window = Window.known(slots)
    size = window.limit

    Server(slots).serve(window, 5_000)

    assert slots < size <= slots + max(2, slots // 4)
    assert window.limit == size


def test_an_opaque_window_starts_at_64_and_doubles_with_each_round_of_answers() -> None:
    window = Window.opaque()
    server = Server(capacity=10_000)
    assert window.limit == OPAQUE_START == 64

    for doubled in (128, 256, 512, 1024, OPAQUE_MOST):
        server.serve(window, window.limit)
        assert window.limit == doubled


@pytest.mark.parametrize("capacity", [10, 64, 100, 500, 1500])
def test_an_opaque_window_stops_within_two_doublings_of_what_fills_the_server(capacity: int) -> None:
    window = Window.opaque()
    enough = OPAQUE_START
    while enough < capacity:
        enough *= 2

    Server(capacity).serve(window, 30_000)

    assert enough <= window.limit <= min(4 * enough, OPAQUE_MOST)


def test_a_window_that_is_not_full_does_not_grow() -> None:
    window = Window.opaque()

    for number in range(2000):
        window.succeeded(100.0 + number, LATENCY_S, in_flight=3)

    assert window.limit == OPAQUE_START


def test_rounds_in_which_too_little_could_be_sent_are_not_held_against_a_larger_window() -> None:
    window = Window.opaque()
    for answer in range(64):
        window.succeeded(101.0, LATENCY_S, in_flight=64 - answer // 2)
    assert window.limit == 128

    for second in range(102, 122):
        for answer in range(64):
            window.succeeded(float(second), LATENCY_S, in_flight=64 - answer)
    for _ in range(128):
        window.succeeded(123.0, LATENCY_S, in_flight=window.limit)

    assert window.limit == 256


@pytest.mark.parametrize("window", [Window.fixed(64), Window.known(51), Window.opaque()])
def test_push_back_halves_any_window_once_a_second(window: Window) -> None:
    before = window.limit

    for hundredths in range(100):
        window.pushed_back(50.0 + hundredths / 100)
    assert window.limit == before // 2

    window.pushed_back(51.0)
    assert window.limit == before // 4


@pytest.mark.parametrize("make", [lambda: Window.fixed(64), lambda: Window.known(51), Window.opaque])
def test_after_push_back_a_window_creeps_back_to_where_it_was_and_stays(make: Callable[[], Window]) -> None:
    window = make()
    before = window.limit
    server = Server(capacity=10_000)
    window.pushed_back(server.now)
    sizes = [window.limit]

    for _ in range(120):
        server.serve(window, 5)
        sizes.append(window.limit)

    steps = [after - size for size, after in pairwise(sizes)]
    assert all(0 <= step <= before // 8 for step in steps)
    assert sizes[-1] == before


def test_a_long_burst_of_push_back_does_not_pin_the_window_for_good() -> None:
    window = Window.opaque()
    server = Server(capacity=10_000)
    for second in range(60):
        window.pushed_back(server.now + second)
    assert window.limit == 1

    server.now += 60
    server.serve(window, 600)

    assert window.limit == OPAQUE_START


def test_a_window_that_was_pushed_back_goes_beyond_where_it_was_only_after_a_long_calm() -> None:
    window = Window.opaque()
    server = Server(capacity=10_000)
    server.serve(window, 64 + 128 + 256)
    for _ in range(100):
        window.pushed_back(server.now)

    server.serve(window, 5_000)
    assert window.limit == 512

    server.serve(window, 20_000)
    assert window.limit > 512


def test_a_window_that_was_too_much_again_stays_just_below_from_then_on() -> None:
    window = Window.opaque()
    server = Server(capacity=10_000)
    for _ in range(2):
        while window.limit <= 100:
            server.serve(window, 1)
        for _ in range(50):
            window.pushed_back(server.now)

    server.serve(window, 600)

    assert 80 <= window.limit <= 100


@pytest.mark.parametrize("one_in", [10, 20, 100])
def test_a_few_refusals_among_many_answers_leave_the_window_as_it_is(one_in: int) -> None:
    window = Window.fixed(64)
    server = Server(capacity=64)
    server.serve(window, 64)

    for _ in range(200):
        server.serve(window, one_in)
        window.pushed_back(server.now)

    assert window.limit == 64


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05])
def test_a_few_refusals_leave_the_window_of_a_slow_engine_as_it_is(share: float) -> None:
    random, window, now = Random(1), Window.known(64), 0.0
    whole, sizes = window.limit, list[int]()
    in_flight: list[tuple[float, bool]] = []
    for _ in range(10_000):
        while len(in_flight) < window.limit:
            is_refused = random.random() < share
            heapq.heappush(in_flight, (now + (0.05 if is_refused else random.uniform(10, 60)), is_refused))
        now, is_refused = heapq.heappop(in_flight)
        if is_refused:
            window.pushed_back(now)
        else:
            window.succeeded(now, 30.0, len(in_flight) + 1)
        sizes.append(window.limit)

    assert sum(sizes) >= 0.9 * whole * len(sizes)


@pytest.mark.parametrize("make", [lambda: Window.fixed(64), lambda: Window.known(51)])
def test_a_window_of_a_given_size_has_it_again_after_any_number_of_push_backs_and_a_long_calm(
    make: Callable[[], Window],
) -> None:
    window = make()
    before = window.limit
    server = Server(capacity=10_000)
    for _ in range(4):
        for _ in range(50):
            window.pushed_back(server.now)
        # Back to its top, where that was too much again.
        server.serve(window, 300)
    assert window.limit < before

    server.serve(window, 20_000)

    assert window.limit == before


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_looks_that_show_one_of_several_servers_behind_an_address_do_not_keep_the_window_small(share: float) -> None:
    window = Window.opaque()
    server = Server(capacity=10_000)

    for _ in range(300):
        server.serve(window, 16)
        window.looked(server.now, window.limit, int(window.limit * share), 0)

    assert window.limit == OPAQUE_MOST


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.floats(0, 1000),
        st.integers(0, 3000),
        st.integers(0, 3000),
        st.one_of(st.none(), st.integers(0, 3000)),
        st.sampled_from(["answer", "answer", "answer", "push-back", "look", "look", "resume"]),
    ),
    max_size=400,
)
WINDOWS = st.one_of(
    st.integers(1, 5000).map(Window.fixed), st.integers(1, 5000).map(Window.known), st.builds(Window.opaque)
)


@given(WINDOWS, EVENTS)
def test_a_window_never_falls_below_1_nor_rises_above_its_most(
    window: Window, events: list[tuple[float, float, int, int, int | None, str]]
) -> None:
    now, most = 0.0, window.most
    for passed, latency_s, in_flight, waiting, preemptions, what in events:
        now += passed
        if what == "answer":
            window.succeeded(now, latency_s, in_flight)
        elif what == "push-back":
            window.pushed_back(now)
        elif what == "look":
            window.looked(now, in_flight, max(0, in_flight - waiting), waiting, preemptions)
        else:
            window.resumed(now)
        assert 1 <= window.limit <= most
        assert window.look_s() > 0
