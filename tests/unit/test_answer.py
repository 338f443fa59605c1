"""What an engine's answer becomes in the results file."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.answer import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
    BATCH_FAILED,
    INFERENCE_FAILED,
    INVALID_RESPONSE,
    REQUEST_TIMEOUT,
    WORKER_CRASHED,
    Answer,
    BadAnswer,
    Line,
    Reply,
    Tally,
    answer_line,
    error_line,
    read_answer,
    refused_line,
    reply_kind,
)
from freight.core.job import Totals
from freight.core.record import Endpoint
from tests.unit.jsontexts import BLANKS, texts

CHOICES = b'"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}]'


def chat(body: bytes) -> Answer:
    return read_answer(body, Endpoint.CHAT)


def totals_of(line: Line) -> Totals:
    tally = Tally()
    tally.add(line)
    return tally.totals()


def bad(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> str:
    with pytest.raises(BadAnswer) as caught:
        read_answer(body, endpoint)
    return str(caught.value)


def shown(line: Line) -> dict[str, Any]:
    """Return a line as it is in the results file; it must be strict JSON on one line."""
    text = b'{"id":"job-0",' + line.tail
    assert b"\n" not in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text.decode(), parse_constant=refuse)


def refused(body: bytes, status: int = 400) -> Line:
    return refused_line(0, b'"a"', status, "req-1", body)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + CHOICES + b"}",
        b"{ " + CHOICES + b' ,\t"seed": 18446744073709551616, "x": 1.10, "y": 1E400, "x": 2 }',
        b'{"z":1,"a":"\\u00e9\\/\\ud83d\\ude00",' + CHOICES + b"}",
        '{"text":"é😀\u2028",'.encode() + CHOICES + b"}",
        b'{"text":"\\ud800",' + CHOICES + b"}",
        b'{"choices":[{"logprob":1e999,"n":' + b"9" * 5000 + b',"text":"\\udfff"}]}',
    ],
)
def test_an_answer_that_is_one_line_of_json_stays_byte_for_byte(body: bytes) -> None:
    assert chat(body).body == body
    assert chat(body + b"\n").body == body


def test_a_pretty_printed_answer_becomes_one_line_of_the_same_value() -> None:
    value = {"choices": [{"text": "a\nb", "logprob": -0.5}], "usage": {"total_tokens": 3}}

    body = chat(json.dumps(value, indent=2).encode()).body

    assert b"\n" not in body
    assert json.loads(body) == value


def test_numbers_that_json_lacks_become_null() -> None:
    body = chat(b'{"choices":[{"logprobs":[-Infinity,NaN,Infinity,-1.50],"text":"NaN, -Infinity"}]}').body

    assert body == b'{"choices":[{"logprobs":[null,null,null,-1.50],"text":"NaN, -Infinity"}]}'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b" \r\n", "empty"),
        (b"<html><body>502 Bad Gateway</body></html>", "not JSON"),
        (b"{" + CHOICES, "not JSON"),
        (b"{" + CHOICES[:-20], "not JSON"),
        (b"{" + CHOICES + b"}\n{" + CHOICES + b"}", "not JSON"),
        (b"{" + CHOICES + b'}{"a":1}', "not JSON"),
        (b"data: {" + CHOICES + b"}\n\n", "not JSON"),
        (b'{"text":"\xff",' + CHOICES + b"}", "not JSON"),
        (b'{"x":[1 2],' + CHOICES + b"}", "not JSON"),
        (b"[" * 600 + b"]" * 600, "not JSON"),
        (b"[]", "not an object"),
        (b'"text"', "not an object"),
        (b"null", "not an object"),
        (b"1e999", "not an object"),
        (b"{}", "without choices"),
        (b'{"choices":[]}', "without choices"),
        (b'{"choices":null}', "without choices"),
        (b'{"choices":{"0":1}}', "without choices"),
        (b'{"error":"out of memory"}', "out of memory"),
        (b'{"error":{"message":"CUDA error","code":500},' + CHOICES + b"}", "CUDA error"),
        (b'{"error":{"code":' + b"9" * 5000 + b"}}", "error"),
        (b'{"error":{"message":"\\ud800 broke"}}', "broke"),
        (b'{"object":"error","message":"no","error":{}}', "error"),
    ],
)
def test_a_200_that_is_no_answer_says_why(body: bytes, words: str) -> None:
    assert words in bad(body)


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.RESPONSES, Endpoint.RERANK, Endpoint.SCORE])
def test_only_completions_must_have_choices(endpoint: Endpoint) -> None:
    assert read_answer(b'{"data":[1]}', endpoint).body == b'{"data":[1]}'
    assert "broken" in bad(b'{"error":"broken"}', endpoint)
    assert "choices" in bad(b'{"data":[1]}', Endpoint.COMPLETIONS)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":3}}', (7, 5, 3)),
        (b'{"input_tokens":7,"output_tokens":5,"input_tokens_details":{"cached_tokens":3}}', (7, 5, 3)),
        (b'{"prompt_tokens":7,"prompt_tokens_details":null}', (7, 0, 0)),
        (b'{"prompt_tokens":-7,"completion_tokens":"5"}', (0, 0, 0)),
        (b'{"prompt_tokens":99999999999999999999,"completion_tokens":1.5}', (0, 0, 0)),
        (b"null", (0, 0, 0)),
        (b"[]", (0, 0, 0)),
    ],
)
def test_tokens_are_counted_where_the_usage_tells_them(usage: bytes, counts: tuple[int, int, int]) -> None:
    answer = chat(b"{" + CHOICES + b',"usage":' + usage + b"}")

    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == counts


@pytest.mark.parametrize(
    ("body", "endpoint", "cut"),
    [
        (b'{"choices":[{"finish_reason":"length"}]}', Endpoint.CHAT, True),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}', Endpoint.COMPLETIONS, True),
        (b'{"choices":[{"finish_reason":"stop"}]}', Endpoint.CHAT, False),
        (b'{"choices":[{"finish_reason":null}]}', Endpoint.CHAT, False),
        (b'{"choices":["length"]}', Endpoint.CHAT, False),
        (b'{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}', Endpoint.RESPONSES, True),
        (b'{"status":"incomplete","incomplete_details":{"reason":"content_filter"}}', Endpoint.RESPONSES, False),
        (b'{"status":"completed","incomplete_details":null}', Endpoint.RESPONSES, False),
    ],
)
def test_an_answer_cut_off_by_its_token_limit_is_known(body: bytes, endpoint: Endpoint, cut: bool) -> None:
    assert read_answer(body, endpoint).cut is cut


def test_an_answer_becomes_a_line_with_its_id_and_body_unchanged() -> None:
    answer = chat(b'{"usage":{"prompt_tokens":3,"completion_tokens":2}, ' + CHOICES + b"}")

    line = answer_line(4, b'"\\u0061\\ud800"', 200, 'req"1', answer)

    assert line.tail == (
        b'"custom_id":"\\u0061\\ud800","response":{"status_code":200,"request_id":"req\\"1","body":'
        + answer.body
        + b'},"error":null}'
    )
    assert (line.index, line.code, line.status) == (4, None, 200)
    assert totals_of(line) == Totals(done=1, input_tokens=3, output_tokens=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too long","type":"invalid_request_error"}}', "too long"),
        (b'{"error":"too long"}', "too long"),
        (b'{"message":"too long"}', "too long"),
        (b'{"detail":[{"loc":["body"]}]}', '{"detail":[{"loc":["body"]}]}'),
        (b"[1,2]", "[1,2]"),
        (b'{"error":{"message":"a \\ud800 b"}}', "a \ufffd b"),
    ],
)
def test_a_refusal_keeps_the_engines_json_and_says_its_message(body: bytes, message: str) -> None:
    line = refused(body)

    result = shown(line)
    assert result["response"] == {"status_code": 400, "request_id": "req-1", "body": json.loads(body)}
    assert result["error"]["code"] == INFERENCE_FAILED
    assert message in line.message
    assert body in line.tail
    assert totals_of(line) == Totals(done=1, failed=1)


@given(texts(BLANKS))
def test_any_json_of_a_refusal_stays_byte_for_byte(body: str) -> None:
    line = refused(body.encode())

    assert b'"body":' + body.encode() + b'},"error":' in line.tail
    shown(line)


@given(st.binary(max_size=60) | st.text().map(str.encode))
def test_any_bytes_of_a_refusal_make_one_line_of_strict_json(body: bytes) -> None:
    result = shown(refused(body, 500))

    assert result["custom_id"] == "a"
    assert result["error"]["code"] == INFERENCE_FAILED
    assert "500" in result["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"<html>" + b"x" * 9_000, "é".encode() * 5_000, b"x" + "😀".encode() * 3_000, b"\xff" * 9_000, b"\x80a" * 6_000],
)
def test_a_refusal_that_is_no_json_is_a_text_of_4_kb_at_most(body: bytes) -> None:
    said = shown(refused(body, 502))["response"]["body"]

    assert isinstance(said, str)
    assert 4_000 < len(said.encode()) <= 4_096
    assert body.decode(errors="replace").startswith(said.rstrip("\ufffd"))


def test_a_short_refusal_that_is_no_json_is_kept_whole() -> None:
    result = shown(refused(b"<h1>\nBad\tGateway</h1>\n", 502))

    assert result["response"]["body"] == "<h1>\nBad\tGateway</h1>\n"
    assert result["error"]["message"] == "the engine answered 502: <h1> Bad Gateway</h1>"


def test_an_empty_refusal_says_so() -> None:
    result = shown(refused(b"", 503))

    assert result["response"]["body"] == ""
    assert "empty" in result["error"]["message"]


def test_a_long_message_is_shortened_and_the_body_is_not() -> None:
    body = json.dumps({"error": {"message": "m" * 100_000}}).encode()

    result = shown(refused(body))

    assert len(result["error"]["message"]) <= 500
    assert result["response"]["body"] == json.loads(body)


CODES = [REQUEST_TIMEOUT, WORKER_CRASHED, INVALID_RESPONSE, BATCH_CANCELLED, BATCH_EXPIRED, BATCH_FAILED]


def test_the_codes_are_those_that_users_were_told() -> None:
    assert [INFERENCE_FAILED, *CODES] == [
        "InferenceFailed", "request_timeout", "worker_crashed", "invalid_engine_response",
        "batch_cancelled", "batch_expired", "batch_failed",
    ]  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_record_without_an_answer_has_no_response(code: str) -> None:
    result = shown(error_line(0, b'"a"', code, 'it "broke"\n'))

    assert result == {
        "id": "job-0",
        "custom_id": "a",
        "response": None,
        "error": {"code": code, "message": 'it "broke"\n'},
    }


def test_an_intake_code_carries_the_line_number_and_null_where_the_id_is_unknown() -> None:
    result = shown(error_line(0, None, "invalid_json", "why", 57))

    assert result["custom_id"] is None
    assert result["error"] == {"code": "invalid_json", "message": "why", "line": 57}


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((200, 201, 204), Reply.ANSWER),
        ((429,), Reply.BUSY),
        ((301, 400, 401, 404, 413, 422, 499, 501), Reply.REFUSED),
        ((500, 502, 503, 504, 599), Reply.BROKEN),
    ],
)
def test_the_status_says_whether_another_try_may_help(statuses: tuple[int, ...], kind: Reply) -> None:
    assert {reply_kind(status) for status in statuses} == {kind}
