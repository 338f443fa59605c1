"""The simulated engine answers each endpoint in its shape, refuses bad bodies and counts what it does."""

import hashlib
from typing import Any

import pytest

from tests.harness import Json
from tests.unit.simengines import CHAT, Engine, chat_body, running


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
