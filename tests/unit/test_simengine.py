"""The simulated engine does what its options and markers say, as seen over a real socket."""

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.simengine import EXACT_BODY
from bench.simengine.record import read_record

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
PATIENCE_S = 20

Json = dict[str, Any]


def command(*options: str) -> list[str]:
    """Return the command line that starts a simulated engine with `options`."""
    return [sys.executable, "-m", "bench.simengine", *options]


@dataclass
class Answer:
    """One HTTP answer, read whole."""

    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Json:
        """Return the body parsed."""
        return json.loads(self.body)

    def content(self) -> str:
        """Return the first choice's text."""
        return self.json()["choices"][0]["message"]["content"]


@dataclass
class Engine:
    """A running child process and one kept-alive connection to it."""

    child: subprocess.Popen[str]
    host: str
    port: int
    link: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        """Open nothing yet; http.client connects on the first request."""
        self.link = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request and return its answer; drop the connection when that fails."""
        try:
            self.link.request(method, path, body, headers)
            got = self.link.getresponse()
            return Answer(got.status, got.read(), {name.lower(): value for name, value in got.getheaders()})
        except (OSError, http.client.HTTPException):
            self.link.close()
            raise

    def get(self, path: str, **headers: str) -> Answer:
        """GET `path`."""
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, body: Json) -> Answer:
        """POST `body` as JSON."""
        return self.ask("POST", path, json.dumps(body).encode())

    def chat(self, text: str, **fields: Any) -> Answer:
        """Ask one user message."""
        return self.post(CHAT, chat_body(text, **fields))

    def counts(self) -> Json:
        """Return /sim/counts."""
        return self.get("/sim/counts").json()

    def wait_counts(self, true_of: Callable[[Json], bool]) -> Json:
        """Ask for the counts until `true_of` holds for them, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while not true_of(counts := self.counts()):
            assert time.monotonic() < deadline, counts
        return counts

    def metric(self, name: str) -> float:
        """Return the value of one metric."""
        lines = self.get("/metrics").body.decode().splitlines()
        (line,) = (line for line in lines if line.startswith(f"vllm:{name}{{"))
        return float(line.rpartition(" ")[2])

    def exit_status(self) -> int:
        """Wait for the child to end and return its status."""
        return self.child.wait(PATIENCE_S)


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal (it has none before it gets to set one)."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def chat_body(text: str, **fields: Any) -> Json:
    """Return a chat request with one user message."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@contextmanager
def running(*options: str) -> Generator[Engine]:
    """Yield an engine started with `options` that has said where it listens; end it afterwards."""
    child = subprocess.Popen(command(*options), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine: Engine | None = None
    try:
        line = child.stdout.readline()
        assert line.startswith("listening on http://"), line
        host, _, port = line.strip().rpartition("/")[2].partition(":")
        engine = Engine(child, host, int(port))
        yield engine
    finally:
        if engine is not None:
            engine.link.close()
        child.kill()
        child.wait()
        child.stdout.close()


@contextmanager
def asking(engine: Engine, *texts: str) -> Generator[list[threading.Thread]]:
    """Ask each text on a connection of its own, in the background; failures are expected there."""

    def ask(text: str) -> None:
        other = Engine(engine.child, engine.host, engine.port)
        try:
            other.chat(text)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            other.link.close()

    threads = [threading.Thread(target=ask, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        engine.child.kill()
        for thread in threads:
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Return one plain engine, shared by the tests that leave it as it was."""
    with running("--model", "local-model", "--model", "second", "--count-prompts") as started:
        yield started


# Ordinary answers.


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            CHAT,
            chat_body("two words", n=2),
            {
                "id": "chatcmpl-sim",
                "object": "chat.completion",
                "model": "m",
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": "ok"},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                    for index in (0, 1)
                ],
                "usage": {
                    "prompt_tokens": 2,
                    "completion_tokens": 2,
                    "total_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            },
        ),
        (
            "/v1/completions",
            {"model": "m", "prompt": ["a b", [1, 2, 2**64]]},
            {
                "object": "text_completion",
                "choices": [
                    {"index": index, "text": "ok", "logprobs": None, "finish_reason": "stop"} for index in (0, 1)
                ],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            },
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a b c"}]}]},
            {"object": "response", "status": "completed", "model": "local-model"},
        ),
        (
            "/v1/embeddings",
            {"input": ["a b", "c"]},
            {"object": "list", "usage": {"prompt_tokens": 3, "total_tokens": 3}},
        ),
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}]}, {"usage": {"total_tokens": 4}}),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b", "c"]}, {"object": "list"}),
    ],
)
def test_each_endpoint_answers_in_its_shape(engine: Engine, path: str, body: Json, expected: Json) -> None:
    first, second = engine.post(path, body), engine.post(path, body)
    assert first.status == 200
    assert first.headers["content-type"] == "application/json"
    assert first.body == second.body
    assert {key: first.json()[key] for key in expected} == expected


def test_an_embedding_is_eight_floats_that_depend_on_the_text(engine: Engine) -> None:
    data = engine.post("/v1/embeddings", {"input": ["a", "b", "a"]}).json()["data"]
    vectors = [item["embedding"] for item in data]
    assert [item["index"] for item in data] == [0, 1, 2]
    assert all(len(vector) == 8 and all(-1 <= number <= 1 for number in vector) for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]


def test_rerank_sorts_by_score_and_obeys_top_n(engine: Engine) -> None:
    results = engine.post("/v1/rerank", {"query": "q", "documents": list("abcdef"), "top_n": 4}).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "content",
    ["the text", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "the text"}]],
)
def test_digest_mode_answers_the_digest_of_the_last_user_message(content: Any) -> None:
    messages = [
        {"role": "user", "content": "earlier"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": None},
    ]
    with running("--digest") as engine:
        answer = engine.post(CHAT, {"messages": messages})
        assert answer.content() == hashlib.sha256(b"the text").hexdigest()[:16]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b'{"messages":[]}', "messages"),
        (CHAT, b'{"messages":"text"}', None),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"n":0}', "n"),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"n":18446744073709551616}', "n"),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"stream":true}', "stream"),
        (CHAT, b'{"messages":[{"role":"user","content":"x"}],"top_p":NaN}', None),
        (CHAT, b'{"messages":' + b"[" * 100_000, None),
        (CHAT, b"not json", None),
        (CHAT, b"", None),
        ("/v1/completions", b"{}", "prompt"),
        ("/v1/embeddings", b'{"input":""}', "input"),
        ("/v1/embeddings", b'{"input":["a",""]}', "input"),
        ("/v1/embeddings", b'{"input":[["a"]]}', "input"),
        ("/v1/rerank", b'{"query":"q"}', "documents"),
        ("/v1/score", b'{"text_1":["a","b"],"text_2":["c"]}', "text_1"),
    ],
)
def test_a_bad_body_gets_a_400_in_openai_shape(engine: Engine, path: str, body: bytes, param: str | None) -> None:
    answer = engine.ask("POST", path, body)
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b'{"seed":18446744073709551616,"messages":[{"role":"user","content":"x","k":[-99999999999999999999]}]}',
        b'{"messages":[{"role":"user","content":"half \\ud835 sign"}]}',
        b'{"tools":["\\ud835"],"seed":18446744073709551616,"messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_integers_past_64_bits_and_lone_surrogates_are_accepted(engine: Engine, body: bytes) -> None:
    assert engine.ask("POST", CHAT, body).content() == "ok"


def test_an_unknown_path_or_method_is_an_error(engine: Engine) -> None:
    assert engine.post("/v1/nothing", {}).status == 404
    assert engine.get("/v1/nothing").status == 404
    assert engine.ask("PUT", "/health").status == 405


def test_pages_show_health_models_and_prompt_counts(engine: Engine) -> None:
    assert engine.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in engine.get("/v1/models").json()["data"]] == ["local-model", "second"]
    before = engine.counts()
    for text in ("counted", "counted", "half \ud835"):
        engine.chat(text)
    after = engine.counts()
    assert after["by_prompt"]["counted"] == 2
    assert after["by_prompt"]["half \ud835"] >= 1
    assert [after[key] - before[key] for key in ("requests", "answered")] == [3, 3]
    assert (after["in_flight_now"], after["in_flight_max"]) == (0, 1)


def test_metrics_count_tokens() -> None:
    with running() as engine:
        engine.chat("one two three", n=2)
        assert engine.metric("prompt_tokens_total") == 3
        assert engine.metric("generation_tokens_total") == 2
        assert engine.metric("num_requests_running") == engine.metric("num_requests_waiting") == 0


# Markers.


@pytest.mark.parametrize(
    ("marker", "status", "fragment"),
    [
        ("500-always", 500, b"roles must alternate"),
        ("501", 501, b'"error"'),
        ("502-html-always", 502, b"<html>"),
        ("429-always", 429, b'"error"'),
        ("400-unsupported-param", 400, b"unsupported parameter"),
        ("200-error-body", 200, b'{"error"'),
        ("200-html", 200, b"<html>"),
        ("200-neg-infinity", 200, b'"logprob": -Infinity'),
        ("200-two-lines", 200, b"\n"),
        ("200-no-choices", 200, b'"choices": []'),
        ("reply-lone-surrogate", 200, b"half \\ud835 sign"),
        ("reply-u2028", 200, "first\u2028second".encode()),
        ("reply-nul", 200, b"before\\u0000after"),
        ("reply-crlf-and-quotes", 200, b'line one\\r\\nline \\"two\\"'),
        ("no-such-marker", 400, b"no such marker"),
    ],
)
def test_a_marker_gets_its_reply_every_time(engine: Engine, marker: str, status: int, fragment: bytes) -> None:
    for _ in range(2):
        answer = engine.chat(f"please STUB:{marker} now")
        assert answer.status == status
        assert fragment in answer.body


@pytest.mark.parametrize(("marker", "status"), [("400-empty-body", 400), ("200-empty", 200)])
def test_an_empty_body_marker_sends_no_bytes(engine: Engine, marker: str, status: int) -> None:
    answer = engine.chat(f"STUB:{marker}")
    assert (answer.status, answer.body) == (status, b"")


@pytest.mark.parametrize(
    ("marker", "status", "retry_after"),
    [("400-once", 400, None), ("502-html-once", 502, None), ("429-once", 429, "1"), ("503-once", 503, None)],
)
def test_a_once_marker_misbehaves_once_for_each_prompt(
    engine: Engine, marker: str, status: int, retry_after: str | None
) -> None:
    first = engine.chat(f"STUB:{marker}")
    assert (first.status, first.headers.get("retry-after")) == (status, retry_after)
    assert engine.chat(f"STUB:{marker}").content() == "ok"
    assert engine.chat(f"STUB:{marker} other").status == status


def test_an_answer_cut_off_by_length_is_empty(engine: Engine) -> None:
    (choice,) = engine.chat("STUB:length-empty").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


def test_exact_bytes_come_back_as_the_constant(engine: Engine) -> None:
    assert engine.chat("STUB:bytes-exact").body == EXACT_BODY
    assert b"18446744073709551616" in EXACT_BODY
    assert b"\n" not in EXACT_BODY
    assert json.loads(EXACT_BODY)["choices"][0]["message"]["content"]


def test_a_truncated_answer_ends_before_its_length(engine: Engine) -> None:
    with pytest.raises(http.client.IncompleteRead) as caught:
        engine.chat("STUB:200-truncated")
    assert json.loads(caught.value.partial)["choices"]


def test_a_reset_closes_without_an_answer(engine: Engine) -> None:
    for text in ("STUB:reset", "STUB:reset", "STUB:reset-once"):
        with pytest.raises(ConnectionError):
            engine.chat(text)
    assert engine.chat("STUB:reset-once").content() == "ok"


def test_a_sleep_delays_the_marker_beside_it(engine: Engine) -> None:
    started = time.monotonic()
    assert engine.chat("STUB:sleep=0.05 STUB:sleep=.05 STUB:501").status == 501
    assert time.monotonic() - started >= 0.1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "STUB:501"}),
        ("/v1/embeddings", {"input": ["fine", "STUB:501"]}),
        ("/v1/responses", {"input": "STUB:501"}),
        ("/v1/rerank", {"query": "STUB:501", "documents": ["a"]}),
        ("/v1/score", {"text_1": "a", "text_2": "STUB:501"}),
    ],
)
def test_markers_work_on_every_endpoint(engine: Engine, path: str, body: Json) -> None:
    assert engine.post(path, body).status == 501


def test_only_the_last_user_message_is_searched_for_markers(engine: Engine) -> None:
    messages = [{"role": "user", "content": "STUB:501"}, {"role": "user", "content": "plain"}]
    assert engine.post(CHAT, {"messages": messages}).content() == "ok"


@pytest.mark.parametrize(
    ("marker", "status"),
    [("die", 1), ("abort", -signal.SIGABRT), ("sigkill-self", -signal.SIGKILL)],
)
def test_a_deadly_marker_ends_the_process_unanswered(marker: str, status: int) -> None:
    with running() as engine:
        with pytest.raises(ConnectionError):
            engine.chat(f"STUB:{marker}")
        assert engine.exit_status() == status


def test_once_file_remembers_across_restarts(tmp_path: Path) -> None:
    options = ("--once-file", str(tmp_path / "once"))
    with running(*options) as engine:
        assert engine.chat("STUB:503-once").status == 503
    with running(*options) as engine:
        assert engine.chat("STUB:503-once").status == 200
        assert engine.chat("STUB:503-once other").status == 503


# Options.


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    with running("--api-key", "secret") as engine:
        assert engine.get("/health").status == 200
        for path in ("/v1/models", "/metrics", "/sim/counts"):
            assert engine.get(path).status == 401
            assert engine.get(path, Authorization="Bearer secret").status == 200
        body = json.dumps(chat_body("x")).encode()
        assert engine.ask("POST", CHAT, body, Authorization="Bearer other").status == 401
        assert engine.ask("POST", CHAT, body, Authorization="Bearer secret").status == 200


@pytest.mark.parametrize(("option", "path"), [("--no-metrics", "/metrics"), ("--no-models", "/v1/models")])
def test_a_page_can_be_taken_away(option: str, path: str) -> None:
    with running(option) as engine:
        assert engine.get(path).status == 404


def test_while_loading_everything_but_metrics_gets_503() -> None:
    with running("--loading", "600") as engine:
        for answer in (engine.get("/health"), engine.get("/v1/models"), engine.chat("x")):
            assert answer.status == 503
            assert "loading model" in answer.json()["error"]["message"]
        assert engine.get("/metrics").status == 200


def test_loading_ends() -> None:
    with running("--loading", "0.2") as engine:
        deadline = time.monotonic() + PATIENCE_S
        while engine.get("/health").status == 503:
            assert time.monotonic() < deadline
        assert engine.chat("x").content() == "ok"


def test_slots_limit_what_runs_at_once_and_the_rest_waits() -> None:
    with running("--slots", "2", "--latency", "600") as engine, asking(engine, *"abcde"):
        engine.wait_counts(lambda counts: counts["in_flight_now"] == 5)
        assert engine.metric("num_requests_running") == 2
        assert engine.metric("num_requests_waiting") == 3


def test_waiting_requests_are_answered_as_slots_free_up() -> None:
    with running("--slots", "1", "--latency", "0.01") as engine, asking(engine, *"abcde") as threads:
        for thread in threads:
            thread.join(PATIENCE_S)
        counts = engine.counts()
        assert (counts["answered"], counts["in_flight_now"]) == (5, 0)


def test_a_client_that_leaves_frees_its_slot() -> None:
    with running("--slots", "1") as engine:
        with socket.create_connection((engine.host, engine.port)) as leaver:
            body = json.dumps(chat_body("STUB:sleep=600")).encode()
            leaver.sendall(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
            engine.wait_counts(lambda counts: counts["in_flight_now"] == 1)
        assert engine.chat("next").content() == "ok"


def test_a_hung_engine_takes_requests_and_answers_none() -> None:
    with running("--hang-at", "3") as engine:
        for text in "ab":
            assert engine.chat(text).content() == "ok"
        with asking(engine, "c", "d"):
            counts = engine.wait_counts(lambda counts: counts["requests"] == 4)
            assert (counts["answered"], counts["in_flight_now"]) == (2, 2)
            assert engine.metric("generation_tokens_total") == 2
            assert engine.get("/health").status == 200


def test_die_after_exits_3_on_the_nth_post_having_recorded_it(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with running("--die-after", "2", "--record", str(record)) as engine:
        assert engine.chat("a").content() == "ok"
        with pytest.raises(ConnectionError):
            engine.chat("b")
        assert engine.exit_status() == 3
    assert len(read_record(record)) == 2


def test_chaos_is_the_same_for_the_same_seed() -> None:
    runs: list[list[int]] = []
    for seed in ("5", "5", "6"):
        with running("--chaos", "0.5", "--seed", seed) as engine:
            answers = [engine.chat("x") for _ in range(64)]
        runs.append([answer.status for answer in answers])
        assert all(answer.headers["retry-after"] == "0" for answer in answers if answer.status == 503)
    assert set(runs[0]) == {200, 503}
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0(number: int) -> None:
    with running("--latency", "600") as engine, asking(engine, "x"):
        engine.wait_counts(lambda counts: counts["in_flight_now"] == 1)
        engine.child.send_signal(number)
        assert engine.exit_status() == 0


def test_fail_start_prints_an_error_and_exits_7() -> None:
    done = subprocess.run(
        command("--fail-start"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("error: ")


def test_hang_start_says_nothing_and_stays() -> None:
    child = subprocess.Popen(command("--hang-start"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not catches(child.pid, signal.SIGTERM):
            assert child.poll() is None
            assert time.monotonic() < deadline
        child.terminate()
        assert child.communicate(timeout=PATIENCE_S)[0] == ""
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_senseless_option_is_refused() -> None:
    done = subprocess.run(
        command("--chaos", "2"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "fraction from 0 to 1" in done.stderr


def test_port_file_holds_the_url_and_the_socket_option_serves_there(tmp_path: Path) -> None:
    with running("--port-file", str(tmp_path / "url")) as engine:
        assert (tmp_path / "url").read_text() == f"http://{engine.host}:{engine.port}"
    path = tmp_path / "s"
    child = subprocess.Popen(command("--socket", str(path)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == f"listening on unix:{path}\n"
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert link.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        child.terminate()
        assert child.wait(PATIENCE_S) == 0
        assert not path.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


# Wire and record.


def test_large_bodies_are_answered_and_recorded_whole(tmp_path: Path) -> None:
    record = tmp_path / "record"
    body = json.dumps(chat_body("word " * (64 * 1024 * 1024 // 5))).encode()
    with running("--record", str(record)) as engine:
        answer = engine.ask("POST", CHAT, body, Expect="100-continue")
        assert answer.json()["usage"]["prompt_tokens"] == 64 * 1024 * 1024 // 5
    ((path, kept),) = read_record(record)
    assert path == CHAT
    assert kept == body


def test_pipelined_requests_and_chunked_bodies_are_understood(engine: Engine) -> None:
    body = json.dumps(chat_body("x")).encode()
    head = b"POST %b HTTP/1.1\r\n" % CHAT.encode()
    plain = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    chunk = b"%x\r\n%b\r\n" % (5, body[:5]) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 5, body[5:])
    last = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    with socket.create_connection((engine.host, engine.port)) as link:
        link.sendall(plain * 3 + last)
        received = b"".join(iter(lambda: link.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK\r\n") == received.count(b'"content":"ok"') == 4


def test_what_is_not_http_gets_a_400(engine: Engine) -> None:
    with socket.create_connection((engine.host, engine.port)) as link:
        link.sendall(b"hello there\r\n\r\n")
        received = b"".join(iter(lambda: link.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_torn_tail_is_left_out_and_overwritten(tmp_path: Path, cut: int) -> None:
    record = tmp_path / "record"
    with running("--record", str(record)) as engine:
        engine.ask("POST", "/v1/nothing?query=1", b"\x00\xff not json")
        engine.ask("POST", CHAT, b"torn")
    os.truncate(record, record.stat().st_size - cut)
    assert read_record(record) == [("/v1/nothing", b"\x00\xff not json")]
    with running("--record", str(record)) as engine:
        engine.ask("POST", CHAT, b"next")
    assert read_record(record) == [("/v1/nothing", b"\x00\xff not json"), (CHAT, b"next")]


def test_two_engines_share_a_record_file(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with running("--record", str(record)) as one, running("--record", str(record)) as two:
        for text in (b"1", b"2"):
            one.ask("POST", CHAT, text)
            two.ask("POST", CHAT, text)
    assert read_record(record) == [(CHAT, b"1"), (CHAT, b"1"), (CHAT, b"2"), (CHAT, b"2")]
