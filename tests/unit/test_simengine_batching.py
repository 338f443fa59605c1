"""The simulated engine with a profile: what the physics makes of requests, as seen over a real socket."""

import asyncio
import hashlib
import heapq
import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from itertools import accumulate
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simengine.batching import Batch
from bench.simengine.physics import Engine as Core
from bench.simengine.physics import Physics, Request
from bench.simengine.prompt import Lengths, expected_content
from tests.harness import ROOT, Json
from tests.unit.simengines import CHAT, PATIENCE_S, Engine, asking, chat_body, command, running

# So fast that no test waits, and so slow that nothing ends while it looks.
FAST = ("--profile", "cpu-135m", "--speed", "10000")
STILL = ("--profile", "cpu-135m", "--speed", "0.0001")
LONG_RULES = "Answer in one word, and only where the text says so. " * 8


@pytest.fixture(scope="module")
def fast() -> Generator[Engine]:
    with running(*FAST) as started:
        yield started


def with_rules(text: str, rules: str = LONG_RULES) -> Json:
    """Return a chat request that begins with rules many share."""
    return {"messages": [{"role": "system", "content": rules}, {"role": "user", "content": text}], "max_tokens": 8}


def test_a_shared_beginning_is_cached_and_said_so(fast: Engine) -> None:
    hits = fast.metric("prefix_cache_hits_total")
    first, second = (fast.post(CHAT, with_rules(text)).json()["usage"] for text in ("one", "two"))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 96}
    assert second["prompt_tokens"] == -(-len(f"system\n{LONG_RULES}\nuser\ntwo") // 4)
    assert fast.metric("prefix_cache_hits_total") - hits == 96
    assert fast.metric("kv_cache_usage_perc") == 0


def test_tools_are_read_before_the_messages(fast: Engine) -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{number}"}} for number in range(9)]
    bodies = [chat_body(text, tools=tools) for text in ("what a long question this is", "short")]
    first, second = (fast.post(CHAT, body).json()["usage"] for body in bodies)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= len(json.dumps(tools)) // 64 * 16


@pytest.mark.parametrize("options", [FAST, ("--profile", "instant")])
def test_an_answer_carries_a_digest_of_the_whole_request(options: tuple[str, ...]) -> None:
    bodies = [with_rules("same"), with_rules("same", "other rules"), with_rules("another")]
    with running(*options) as engine:
        answers = [engine.post(CHAT, body) for body in bodies]
    contents = [answer.content() for answer in answers]
    assert contents == [expected_content(CHAT, json.dumps(body).encode()) for body in bodies]
    assert len(set(contents)) == 3
    assert [len(content) for content in contents] == [32] * 3
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [8] * 3


def test_an_answer_is_as_long_as_its_request_says(fast: Engine) -> None:
    def tokens(**fields: object) -> int:
        return fast.chat("x", **fields).json()["usage"]["completion_tokens"]

    assert tokens(max_tokens=5) == tokens(max_completion_tokens=5, max_tokens=9) == 5
    assert tokens() == 128
    assert tokens(max_tokens=5, n=3) == 15
    assert tokens(max_tokens=10**9) == 2048 - 2  # The model's context, less the prompt.
    marked = fast.chat("x STUB:tokens=7", max_tokens=5).json()
    assert marked["usage"]["completion_tokens"] == 7
    assert marked["choices"][0]["finish_reason"] == "stop"


def test_lengths_are_drawn_by_the_request_and_cut_at_max_tokens() -> None:
    lengths = Lengths(40, 0.8)
    drawn: list[list[tuple[int, str]]] = []
    for _ in range(2):
        with running(*FAST, "--lengths", "40,0.8") as engine:
            answers = [engine.chat(f"text {number}", max_tokens=60).json() for number in range(40)]
        drawn.append(
            [(answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) for answer in answers]
        )
    assert drawn[0] == drawn[1]
    assert {reason for tokens, reason in drawn[0] if tokens < 60} == {"stop"}
    assert {reason for tokens, reason in drawn[0] if tokens == 60} == {"length"}
    assert len({tokens for tokens, _ in drawn[0]}) > 15
    many = sorted(lengths.draw(hashlib.sha256(b"%d" % number).digest()) for number in range(2001))
    assert many[1000] == pytest.approx(40, rel=0.1)
    assert many[1682] / many[1000] == pytest.approx(math.exp(0.8), rel=0.15)  # One sigma more.


def test_metrics_show_who_runs_and_who_waits_and_a_client_that_leaves_is_forgotten() -> None:
    with running(*STILL, "--max-num-seqs", "2") as engine:
        body = json.dumps(chat_body("x" * 200)).encode()
        raw = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        with socket.create_connection((engine.host, engine.port)) as leaver:
            leaver.sendall(raw * 3)
            engine.wait_counts(lambda counts: counts["in_flight_now"] == 3)
            with asking(engine, "a", "b"):
                engine.wait_counts(lambda counts: counts["in_flight_now"] == 5)
                # The first began a step alone, and those that came while it lasts wait for the next.
                assert engine.metric("num_requests_running") + engine.metric("num_requests_waiting") == 5
                assert 0 < engine.metric("num_requests_running") <= 2
                assert engine.metric("kv_cache_usage_perc") > 0
                leaver.close()
                engine.wait_counts(lambda counts: counts["in_flight_now"] == 2)
                assert engine.metric("num_requests_running") + engine.metric("num_requests_waiting") == 2


def test_many_at_once_are_all_answered_and_counted() -> None:
    with running("--profile", "cpu-135m", "--speed", "100", "--max-num-seqs", "3", "--blocks", "12") as engine:
        bodies = [json.dumps(chat_body(f"{number} STUB:tokens=90")).encode() for number in range(12)]
        with socket.create_connection((engine.host, engine.port), PATIENCE_S) as link:
            for body in bodies:
                link.sendall(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
            engine.wait_counts(lambda counts: counts["answered"] == 12)
        assert engine.counts()["in_flight_now"] == 0
        assert engine.metric("generation_tokens_total") == 12 * 90
        assert engine.metric("num_preemptions_total") > 0


class LateLoop:
    """A loop whose timers fire late, and a clock that stands still in between."""

    def __init__(self, lateness: list[float]) -> None:
        self.now = 100.0
        self._lateness = lateness
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Callable[[], None]]] = []
        self._made = 0

    def call_later(self, delay_s: float, wake: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(0, wake, (), cast("asyncio.AbstractEventLoop", self))
        late = self._lateness[self._made % len(self._lateness)]
        self._made += 1
        heapq.heappush(self._timers, (self.now + delay_s + late, self._made, handle, wake))
        return handle

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def run_until(self, when: float) -> None:
        """Fire what is due before `when`, and stand there."""
        while self._timers and self._timers[0][0] <= when:
            self.now, _, handle, wake = heapq.heappop(self._timers)
            if not handle.cancelled():
                wake()
        self.now = when if when < math.inf else self.now


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(1, 400)), min_size=1, max_size=15),
    st.lists(st.sampled_from([0.0, 0.0004, 0.02]), min_size=1, max_size=5),
    st.sampled_from([0.5, 1.0, 20.0]),
)
def test_late_timers_change_when_answers_go_out_and_not_when_they_are_made(
    asked: list[tuple[int, int, int]], lateness: list[float], speed: float
) -> None:
    physics = Physics(0.1, 0.002, 0.00001, 0.01, 3, 24, 16, 256)
    requests = [Request(prompt, output) for prompt, output, _ in asked]
    # Seconds of the engine, from one request to the next.
    begins = list(accumulate(gap / 100 for _, _, gap in asked))

    expected = [one.fresh() for one in requests]
    engine, now = Core(physics), 0.0
    left = list(zip(begins, expected, strict=True))
    while left or engine.in_flight:
        now = max(now, left[0][0]) if left and not engine.in_flight else now
        while left and left[0][0] <= now:
            engine.add(left.pop(0)[1])
        now += engine.step(now, left[0][0] if left else math.inf)[0]

    loop = LateLoop(lateness)
    out: list[tuple[Request, float]] = []
    batch = Batch(
        physics,
        speed,
        cast("asyncio.AbstractEventLoop", loop),
        lambda request: out.append((request, (loop.now - 100) * speed)),
        lambda: loop.now,
    )
    for begin, request in zip(begins, requests, strict=True):
        loop.run_until(100 + begin / speed)
        batch.add(request)
    loop.run_until(math.inf)

    assert [one.finished_at for one in requests] == pytest.approx([one.finished_at for one in expected])
    assert len(out) == len(requests)
    for request, at in out:
        assert request.finished_at is not None
        assert -1e-6 <= at - request.finished_at <= (max(lateness) * 2 + 0.0021) * speed


def test_other_endpoints_and_markers_take_their_time_too(fast: Engine) -> None:
    assert len(fast.post("/v1/embeddings", {"input": ["a b", "c"]}).json()["data"]) == 2
    assert fast.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).json()["usage"]["completion_tokens"] == 3
    output = fast.post("/v1/responses", {"input": "a", "instructions": "b", "max_output_tokens": 3}).json()
    assert output["usage"]["output_tokens"] == 3
    assert fast.chat("STUB:reply-nul").content() == "before\x00after"
    assert fast.chat("STUB:503-once").status == 503
    assert fast.chat("STUB:sleep=0.01").status == 200


def test_a_prompt_longer_than_the_context_gets_a_400(fast: Engine) -> None:
    answer = fast.chat("x" * 4 * 2048)
    assert answer.status == 400
    assert "2048" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("fault", "status"), [("429=1", 429), ("503=1", 503), ("slow=1", 200)])
def test_a_share_of_the_requests_gets_a_fault(fault: str, status: int) -> None:
    with running(*FAST, "--fault", fault) as engine:
        assert engine.chat("x").status == status


def test_faults_are_the_same_for_the_same_seed_and_as_often_as_asked() -> None:
    runs: list[list[int]] = []
    for seed in ("5", "5", "6"):
        with running("--profile", "instant", "--fault", "429=0.2", "--fault", "503=0.2", "--seed", seed) as engine:
            runs.append([engine.chat("x").status for _ in range(150)])
    assert runs[0] == runs[1] != runs[2]
    assert all(15 <= runs[0].count(status) <= 45 for status in (429, 503))


def test_a_fault_can_be_a_reset_or_no_answer_at_all() -> None:
    with running("--fault", "reset=1") as engine, pytest.raises(ConnectionError):
        engine.chat("x")
    with running("--fault", "hang=1") as engine, asking(engine, "x"):
        counts = engine.wait_counts(lambda counts: counts["in_flight_now"] == 1)
        assert counts["answered"] == 0
    with running(*FAST, "--fault", "slow=1", "--slow", "1e9") as engine, asking(engine, "x"):
        engine.wait_counts(lambda _: engine.metric("request_success_total") == 1)
        assert engine.counts()["answered"] == 0


def test_a_poisonous_text_ends_the_process() -> None:
    with running("--poison", "arsenic") as engine:
        assert engine.chat("apple").status == 200
        with pytest.raises(ConnectionError):
            engine.chat("some arsenic in it")
        assert engine.exit_status() == 3


def test_it_listens_when_it_has_started_and_can_be_ended_before() -> None:
    with running(*FAST, "--startup", "600") as engine:
        assert engine.get("/health").status == 200
    child = subprocess.Popen(command(*STILL, "--startup", "600"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.communicate(timeout=0.5)
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=PATIENCE_S)[0] == ""
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--max-num-seqs", "4"), "a profile that takes time is needed"),
        (("--profile", "cpu-135m", "--max-model-len", "99999999"), "cannot hold one request"),
        (("--fault", "fire=1"), "--fault"),
        (("--fault", "503=0.6", "--fault", "429=0.6"), "add up to more than 1"),
        (("--speed", "0"), "--speed"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, ...], fragment: str) -> None:
    done = subprocess.run(command(*options), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert fragment in done.stderr


def test_a_file_in_virtual_time_is_what_the_engine_reads_of_it(fast: Engine, tmp_path: Path) -> None:
    bodies = [
        with_rules(f"question {number} STUB:tokens={number + 1}", f"rules {number % 2} " * 40) for number in range(20)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"custom_id": "x", "url": CHAT, "body": body}) + "\n" for body in bodies))
    usages = [fast.post(CHAT, body).json()["usage"] for body in bodies]
    module = [
        sys.executable,
        "-m",
        "bench.simengine.virtual",
        str(path),
        "--profile",
        "cpu-135m",
        "--max-num-seqs",
        "1",
    ]
    outcomes: list[Json] = []
    for more in (
        (),
        ("--engines", "4", "--order", "prefix"),
        ("--engines", "4", "--rule", "shards", "--slower", "0.5"),
    ):
        shown = subprocess.run([*module, *more], cwd=ROOT, capture_output=True, timeout=PATIENCE_S, check=True)
        outcomes.append(json.loads(shown.stdout))
    one, four, slower = outcomes
    assert one["requests"] == four["requests"] == slower["requests"] == 20
    assert one["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert one["output_tokens"] == sum(usage["completion_tokens"] for usage in usages) == 210
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert one["cached_share"] == one["best_cached_share"] == pytest.approx(cached / one["prompt_tokens"])
    assert four["makespan_s"] < slower["makespan_s"] < one["makespan_s"]
