"""The simulated engine's step loop does what continuous batching does, and what it says of itself adds up."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simengine.blocks import BLOCK_TOKENS, BlockCache
from bench.simengine.calibrate import IN_FLIGHT, SHARES, curve, fit, fitted
from bench.simengine.physics import Engine, Physics, Request
from bench.simengine.profiles import PROFILES
from bench.simengine.prompt import chain_of
from bench.simengine.virtual import Machine, best_cached_share, run, shared_queue, static_shards, stretches
from tests.unit.stepwise import Asked, Stepwise

# All times are sums of powers of two: equal means equal, however they were added up.
TOY = Physics(
    base_s=1.0,
    prefill_s=0.5,
    context_s=1 / 1024,
    sequence_s=1 / 16,
    max_num_seqs=4,
    max_batched_tokens=64,
    blocks=64,
    max_model_len=512,
)


def request(prompt: str, output: int, more_tokens: int = 0) -> Request:
    """Return a request whose prompt has a block for each letter, and then some tokens."""
    text = "".join(letter * 64 for letter in prompt).encode()
    return Request(max(1, len(prompt) * BLOCK_TOKENS + more_tokens), output, chain_of(text), prompt)


def finish_all(engine: Engine, now: float = 0.0) -> list[Request]:
    """Run until nothing is left; return who finished, in order."""
    ended: list[Request] = []
    while engine.in_flight:
        seconds, finished = engine.step(now)
        assert seconds > 0
        now += seconds
        ended += finished
    return ended


@st.composite
def physics(draw: st.DrawFn) -> Physics:
    slots = draw(st.integers(1, 5))
    blocks = draw(st.integers(5, 24))
    budget = draw(st.integers(slots, 60))
    context_s = draw(st.sampled_from([0.0, 1 / 1024]))
    return replace(
        TOY,
        max_num_seqs=slots,
        max_batched_tokens=budget,
        blocks=blocks,
        max_model_len=blocks * 16,
        context_s=context_s,
    )


# Prompts that begin alike, up to 80 tokens, and answers that do not fit together in the smaller caches.
prompts = st.tuples(st.text("ab", max_size=4), st.integers(0, 15), st.integers(0, 40) | st.just(1))
arrivals = st.lists(st.tuples(prompts, st.sampled_from([0.0, 0.0, 3.0, 17.5, 90.0])), min_size=1, max_size=12)


@given(physics(), arrivals)
def test_it_does_what_every_step_by_itself_does(
    made_of: Physics, asked: list[tuple[tuple[str, int, int], float]]
) -> None:
    asked.sort(key=lambda one: one[1])
    begins = [begin for _, begin in asked]
    requests = [
        request(prompt, min(output, made_of.max_model_len - len(prompt) * 16 - max(1, more)), more)
        for (prompt, more, output), _ in asked
    ]
    slowly = [Asked(one.prompt_tokens, one.output_tokens, list(one.chain)) for one in requests]

    engine, now = Engine(made_of), 0.0
    left = list(zip(begins, requests, strict=True))
    while left or engine.in_flight:
        if left and not engine.in_flight:
            now = max(now, left[0][0])
        while left and left[0][0] <= now:
            engine.add(left.pop(0)[1])
        seconds, finished = engine.step(now, left[0][0] if left else math.inf)
        now += seconds
        assert all(one.finished_at == now for one in finished)
        assert engine.cache.in_use + engine.cache.kept <= made_of.blocks

    reference, now = Stepwise(made_of), 0.0
    queue = list(zip(begins, slowly, strict=True))
    while queue or reference.waiting or reference.running:
        if queue and not reference.waiting and not reference.running:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            reference.waiting.append(queue.pop(0)[1])
        seconds, done = reference.step()
        now += seconds
        for one in done:
            one.finished_at = now

    assert [one.cached_tokens for one in requests] == [one.cached for one in slowly]
    assert [one.preemptions for one in requests] == [one.preempted for one in slowly]
    assert [one.finished_at for one in requests] == [one.finished_at for one in slowly]
    assert engine.cache.in_use == 0
    assert engine.cache.keys() == {block.key for block in reference.free if block.key is not None}


def test_a_step_takes_what_its_tokens_context_and_requests_cost() -> None:
    engine = Engine(TOY)
    engine.add(request("a", 2, 4))
    reading, _ = engine.step(0.0)
    assert reading == 1.0 + 20 * 0.5 + 1 / 16
    decoding, finished = engine.step(reading)
    assert decoding == 1.0 + 20 / 1024 + 1 / 16
    assert [one.finished_at for one in finished] == [reading + decoding]


def test_a_long_prompt_is_read_in_pieces_while_others_go_on() -> None:
    engine = Engine(replace(TOY, max_batched_tokens=16))
    first, long = request("a", 100), request("bcde", 1)
    engine.add(first)
    now, _ = engine.step(0.0)
    engine.add(long)
    before = engine.totals.generation_tokens
    finished: list[Request] = []
    for _ in range(5):  # 64 tokens, 15 a step: one of the sixteen is the first's.
        seconds, finished = engine.step(now)
        now += seconds
    assert finished == [long]
    assert engine.totals.generation_tokens - before == 5 + 1


def test_nothing_runs_beyond_the_slots_and_the_queue_is_first_come_first_served() -> None:
    engine = Engine(replace(TOY, max_num_seqs=2))
    asked = [request(letter, 10) for letter in "abcde"]
    for one in asked:
        engine.add(one)
    engine.step(0.0)
    assert (engine.running, engine.waiting) == (2, 3)
    assert finish_all(engine) == asked
    times = [one.admitted_at for one in asked]
    assert times == sorted(times, key=lambda time: time or 0.0)


def test_many_equal_steps_are_one_call_and_stop_where_asked() -> None:
    engine = Engine(TOY)
    engine.add(request("a", 400))
    now, _ = engine.step(0.0)
    seconds, finished = engine.step(now, until=now + 10)
    # Nine steps of a little over a second would begin and end before; the tenth begins before.
    assert (10 <= seconds < 12, finished) == (True, [])
    steps = engine.totals.steps
    assert engine.quiet_seconds() == engine.step(now + seconds)[0]
    assert engine.totals.steps == 400 > steps


def test_a_prompt_that_was_read_before_is_cached_up_to_its_last_token() -> None:
    engine = Engine(TOY)
    for prompt, more, cached in (("ab", 0, 0), ("ab", 0, 16), ("ab", 1, 32), ("ac", 0, 16), ("b", 5, 0)):
        one = request(prompt, 1, more)
        engine.add(one)
        finish_all(engine)
        assert one.cached_tokens == cached, (prompt, more)
    assert engine.totals.cache_queries == 32 + 32 + 33 + 32 + 21
    assert engine.totals.cache_hits == 64


def test_requests_of_one_step_share_what_the_first_reads() -> None:
    engine = Engine(replace(TOY, max_batched_tokens=400))
    asked = [request("abc", 5, 3) for _ in range(3)]
    for one in asked:
        engine.add(one)
    engine.step(0.0)
    assert [one.cached_tokens for one in asked] == [0, 48, 48]
    assert engine.cache.in_use == 3 + 3


def test_the_least_recently_used_prompt_is_evicted_and_its_end_first() -> None:
    cache = BlockCache(6)
    abc, abd, e = (
        chain_of(b"".join(letter * 64 for letter in text)) for text in ((b"a", b"b", b"c"), (b"a", b"b", b"d"), (b"e",))
    )
    for chain in (abc, abd, e):
        held = cache.take(chain, cache.match(chain, 9), len(chain))
        assert held is not None and held == len(chain)
        cache.give_back(chain, held, 0)
    assert (cache.kept, cache.in_use) == (5, 0)
    cache.take_private(2)  # One is blank; the other is the end of the oldest.
    assert [cache.match(chain, 9) for chain in (abc, abd, e)] == [2, 3, 1]
    cache.take_private(3)
    assert [cache.match(chain, 9) for chain in (abc, abd, e)] == [0, 0, 1]
    assert cache.take(abc, 0, 3) is None
    assert (cache.kept, cache.in_use) == (1, 5)


def test_the_youngest_is_preempted_when_blocks_run_out_and_reads_all_again() -> None:
    engine = Engine(replace(TOY, blocks=6, max_model_len=96))
    old, young = request("a", 60), request("b", 60)
    engine.add(old)
    engine.add(young)
    assert finish_all(engine) == [old, young]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert engine.totals.preemptions == 1
    # What was made before it was preempted is not made again, and its prompt counts once.
    assert (engine.totals.generation_tokens, engine.totals.prompt_tokens) == (120, 32)


def test_a_request_that_was_dropped_leaves_nothing_behind() -> None:
    engine = Engine(replace(TOY, max_num_seqs=1, max_batched_tokens=8))
    reading, waiting, last = request("abcd", 9), request("e", 9), request("f", 9)
    for one in (reading, waiting, last):
        engine.add(one)
    engine.step(0.0)
    engine.drop(waiting)
    engine.drop(reading)
    engine.drop(reading)
    assert (engine.running, engine.waiting) == (0, 1)
    assert finish_all(engine) == [last]
    assert engine.cache.in_use == 0


def test_requests_that_only_read_make_no_token() -> None:
    engine = Engine(TOY)
    engine.add(request("ab", 0))
    assert len(finish_all(engine)) == 1
    assert (engine.totals.generation_tokens, engine.totals.steps) == (0, 1)


def test_a_request_that_could_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="513 tokens; the engine takes up to 512"):
        Engine(TOY).add(request("", 512))
    with pytest.raises(ValueError, match="cannot hold"):
        replace(TOY, blocks=31)
    with pytest.raises(ValueError, match="tokens a step"):
        replace(TOY, max_batched_tokens=3)


def test_throughput_over_requests_in_flight_follows_the_published_curve() -> None:
    got = curve(PROFILES["b200-30b"])
    assert got == sorted(got)
    assert [abs(one - wanted) <= 4.5 for one, wanted in zip(got, SHARES, strict=True)] == [True] * len(IN_FLIGHT), got


def test_the_profile_is_what_the_fit_says() -> None:
    profile = PROFILES["b200-30b"]
    assert fitted(profile).base_s == pytest.approx(profile.base_s, rel=0.01)
    assert fitted(profile).sequence_s == pytest.approx(profile.sequence_s, rel=0.01)
    exact = tuple(100 * count / (count + 50) / (400 / 450) for count in (10, 100, 400))
    base, each = fit((10, 100, 400), exact)
    assert base / each == pytest.approx(50, rel=0.01)


def test_a_profile_measured_on_two_cores_gives_what_was_measured() -> None:
    profile = PROFILES["cpu-135m"]
    for in_flight, measured in ((1, 35), (8, 177), (32, 260), (64, 283)):
        asked = [Request(20, 48) for _ in range(in_flight * 4)]
        outcome = run([Machine(profile, window=in_flight)], shared_queue(asked))
        assert outcome.output_tokens / outcome.makespan_s == pytest.approx(measured, rel=0.15)


def test_order_gains_in_a_tight_cache_what_it_gained_on_a_real_engine() -> None:
    profile = replace(PROFILES["cpu-135m"], blocks=1280)
    bits = Random(1)
    asked = [
        Request(950, 48, [*shared, *(bits.getrandbits(60) for _ in range(3))])
        for shared in ([bits.getrandbits(60) for _ in range(56)] for _ in range(40))
        for _ in range(6)
    ]
    machine = Machine(profile, window=16)
    in_order = run([machine], shared_queue(asked))
    assert in_order.cached_share == pytest.approx(0.79, abs=0.02)
    assert in_order.makespan_s == pytest.approx(103, rel=0.2)
    for seed in range(3):
        shuffled = Random(seed).sample(asked, len(asked))
        at_random = run([machine], shared_queue(shuffled))
        assert at_random.cached_share == pytest.approx(0.51, abs=0.15)
        assert at_random.makespan_s / in_order.makespan_s == pytest.approx(204 / 103, rel=0.15)


def test_a_shared_queue_ends_sooner_than_shards_of_a_sorted_file() -> None:
    asked = [Request(16, 4 * number + 1) for number in range(60)]
    machines = [Machine(TOY)] * 3
    shared = run(machines, shared_queue(sorted(asked, key=lambda one: -one.output_tokens)))
    shards = run(machines, static_shards(asked, 3))
    assert shards.makespan_s > 1.4 * shared.makespan_s
    assert shards.by_engine == [20, 20, 20]
    assert shared.requests == shards.requests == 60
    stolen = run(machines, stretches(asked, 3))
    assert shared.makespan_s <= stolen.makespan_s < shards.makespan_s
    assert all(one.finished_at is None for one in asked)


def test_an_engine_that_is_slow_or_late_gets_less_of_a_shared_queue() -> None:
    asked = [Request(16, 20) for _ in range(300)]
    outcome = run([Machine(TOY), Machine(TOY, speed=0.5), Machine(TOY, ready_s=1e9)], shared_queue(asked))
    fast, slow, late = outcome.by_engine
    assert fast == pytest.approx(2 * slow, rel=0.1)
    assert (late, fast + slow) == (0, 300)


def test_sorted_prompts_reach_the_best_cached_share_and_scattered_ones_do_not() -> None:
    groups = [
        request(f"{group:04d}"[:4].translate(str.maketrans("0123456789", "abcdefghij")), 5, n % 15)
        for n in range(6)
        for group in range(40)
    ]
    best = best_cached_share(groups)
    machine = Machine(replace(TOY, blocks=32))
    scattered = run([machine], shared_queue(groups))
    together = run([machine], shared_queue(sorted(groups, key=lambda one: str(one.tag))))
    assert together.cached_share >= 0.99 * best
    assert scattered.cached_share < 0.8 * best
    assert together.makespan_s < scattered.makespan_s
