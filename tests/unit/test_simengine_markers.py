"""A marker in a prompt makes the simulated engine misbehave, as seen over a real socket."""

import http.client
import json
import signal
import time
from pathlib import Path

import pytest

from bench.simengine import EXACT_BODY
from tests.harness import Json
from tests.unit.simengines import CHAT, Engine, running


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
