"""What a line of the input must be: every intake code, and what passes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.record import (
    INTAKE_CODES,
    PATHS,
    Endpoint,
    Rejection,
    Request,
    Rules,
    check_line,
    custom_id_of,
    model_of,
)

ANY = Rules()
LLAMA = Rules(models=frozenset({"llama", "llama-alias"}), model="llama")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MISSING = object()


def line(custom_id: Any = "a", body: Any = CHAT, **fields: Any) -> bytes:
    """Return an input line; a field that is MISSING is left out."""
    record = {"custom_id": custom_id, "body": body, **fields}
    return json.dumps({key: value for key, value in record.items() if value is not MISSING}).encode()


def raw(body: bytes) -> bytes:
    return b'{"custom_id":"a","body":' + body + b"}"


def passed(text: bytes, rules: Rules = ANY) -> Request:
    result = check_line(text, rules)
    assert isinstance(result, Request), result
    return result


def rejected(text: bytes, rules: Rules = ANY) -> Rejection:
    result = check_line(text, rules)
    assert isinstance(result, Rejection), result
    return result


DEEP = b"[" * 510 + b"]" * 510

CASES: list[tuple[str, bytes]] = [
    ("invalid_json", b""),
    ("invalid_json", b"\0" * 512),
    ("invalid_json", b"\xef\xbb\xbf" + line()),
    ("invalid_json", b"null"),
    ("invalid_json", b"17"),
    ("invalid_json", b'"text"'),
    ("invalid_json", b'[{"custom_id":"a"}]'),
    ("invalid_json", rb'["\ud800"]'),
    ("invalid_json", b"{"),
    ("invalid_json", line()[:-1]),
    ("invalid_json", line() + b","),
    ("invalid_json", line() + line()),
    ("invalid_json", b"{'custom_id': 'a'}"),
    ("invalid_json", raw(b'{"messages":[],}')),
    ("invalid_json", raw(b'{"messages":[],"temperature":NaN}')),
    ("invalid_json", raw(b'{"messages":[],"temperature":-Infinity}')),
    ("invalid_json", raw(b'{"messages":[],"temperature":.5}')),
    ("invalid_json", raw(b'{"messages":"\xff"}')),
    ("invalid_json", raw(b'{"messages":"a\tb"}')),
    ("invalid_json", b'{"custom_id":"a","other":"\xc3","body":{"messages":[]}}'),
    ("invalid_json", raw(b'{"messages":' + b"[[" + DEEP + b"]]}")),
    ("invalid_json", raw(b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
    ("missing_custom_id", line(MISSING)),
    ("missing_custom_id", b"{}"),
    ("missing_custom_id", b'{"Custom_ID":"a","body":{"messages":[]}}'),
    ("invalid_custom_id", line(17)),
    ("invalid_custom_id", line(True)),
    ("invalid_custom_id", line(["a"])),
    ("invalid_custom_id", line("")),
    ("invalid_custom_id", line("x" * 513)),
    ("invalid_custom_id", line("é" * 513)),
    ("invalid_custom_id", b'{"custom_id":"' + b"\\u0041" * 513 + b'","body":{"messages":[]}}'),
    ("invalid_body", line(body=MISSING)),
    ("invalid_body", line(body=None)),
    ("invalid_body", line(body=[CHAT])),
    ("invalid_body", line(body="text")),
    ("invalid_body", line(body=3)),
    ("invalid_url", line(url="/v1/chat/completion")),
    ("invalid_url", line(url="/v1/chat/completions/")),
    ("invalid_url", line(url="https://api.openai.com/v1/chat/completions")),
    ("invalid_url", line(url="")),
    ("invalid_url", line(url=17)),
    ("invalid_url", line(url=["/v1/chat/completions"])),
    ("invalid_url", raw(b'{"messages":[]},"url":"\\ud800"')),
    ("invalid_url", line(body={"question": "no endpoint fits"})),
    ("invalid_method", line(method="GET")),
    ("invalid_method", line(method="")),
    ("invalid_method", line(method=1)),
    ("invalid_method", raw(b'{"messages":[]},"method":"\\ud800"')),
    ("streaming_unsupported", line(body={**CHAT, "stream": True})),
    ("streaming_unsupported", raw(b'{"messages":[],"str\\u0065am":true}')),
    ("streaming_unsupported", raw(b'{"messages":[],"stream":false,"stream":true}')),
    ("media_not_allowed", line(body={"messages": [{"content": [{"image_url": {"url": "http://a/b.png"}}]}]})),
    ("media_not_allowed", line(body={**CHAT, "input_audio": "/etc/passwd"})),
]


@pytest.mark.parametrize(("code", "text"), CASES)
def test_a_bad_line_gets_its_code(code: str, text: bytes) -> None:
    rejection = rejected(text)

    assert rejection.code == code
    assert rejection.message
    assert code in INTAKE_CODES


@pytest.mark.parametrize(
    ("code", "text"), [case for case in CASES if case[0] not in ("invalid_json", "missing_custom_id")]
)
def test_a_bad_line_keeps_its_custom_id_where_that_could_be_read(code: str, text: bytes) -> None:
    expected = None if code == "invalid_custom_id" else b'"a"'

    assert rejected(text).custom_id == expected


@pytest.mark.parametrize("model", ["other", "LLAMA", "", "llama ", 17, ["llama"]])
def test_a_model_that_the_job_does_not_run_is_a_mismatch(model: Any) -> None:
    rejection = rejected(line(body={**CHAT, "model": model}), LLAMA)

    assert rejection.code == "model_mismatch"
    assert "llama" in rejection.message


@pytest.mark.parametrize("model", ["llama", "llama-alias"])
def test_names_that_fit_and_no_name_pass(model: str) -> None:
    passed(line(body={**CHAT, "model": model}), LLAMA)
    passed(line(body=CHAT), LLAMA)
    passed(raw(b'{"messages":[],"mod\\u0065l":"ll\\u0061ma"}'), LLAMA)


def test_any_model_passes_where_the_job_says_so() -> None:
    passed(line(body={**CHAT, "model": "whatever"}))


@pytest.mark.parametrize("length", [1, 512])
def test_ids_of_1_to_512_characters_pass_whatever_their_bytes(length: int) -> None:
    for character in ("x", "é", "😀"):
        passed(line(character * length))
        passed(json.dumps({"custom_id": character * length, "body": CHAT}, ensure_ascii=False).encode())


def test_a_surrogate_alone_may_stand_anywhere() -> None:
    text = rb'{"custom_id":"\ud800","body":{"messages":[{"content":"\udfff"}],"user":"\ud800"}}'

    assert passed(text).custom_id == rb'"\ud800"'


def test_an_id_is_known_by_its_value_and_not_by_its_spelling() -> None:
    plain, escaped = passed(line("aé")), passed(b'{"custom_id":"\\u0061\xc3\xa9","body":{"messages":[]}}')

    assert plain.key == escaped.key
    assert escaped.custom_id == b'"\\u0061\xc3\xa9"'
    assert plain.key != passed(line("ae")).key


@given(st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=2))
def test_different_ids_have_different_keys(ids: list[str]) -> None:
    one, other = (passed(line(custom_id)) for custom_id in ids)

    assert (one.key == other.key) == (ids[0] == ids[1])


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        ({"messages": []}, Endpoint.CHAT),
        ({"prompt": "x"}, Endpoint.COMPLETIONS),
        ({"input": "x"}, Endpoint.EMBEDDINGS),
        ({"input": "", "prompt": "x", "messages": []}, Endpoint.CHAT),
        ({"input": "", "prompt": "x"}, Endpoint.COMPLETIONS),
    ],
)
@pytest.mark.parametrize("url", [MISSING, None])
def test_without_a_url_the_body_tells_the_endpoint(body: Any, endpoint: Endpoint, url: Any) -> None:
    assert passed(line(body=body, url=url)).endpoint is endpoint


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_every_endpoint_is_accepted_by_its_path_however_spelt(endpoint: Endpoint) -> None:
    path = PATHS[endpoint]

    assert passed(line(body={"x": 1}, url=path)).endpoint is endpoint
    assert passed(raw(b'{},"url":"' + path.replace("/", "\\/").encode() + b'"')).endpoint is endpoint


@pytest.mark.parametrize("method", ["POST", "post", MISSING])
def test_post_is_the_method_and_the_default(method: Any) -> None:
    passed(line(method=method))


@pytest.mark.parametrize("stream", [False, None])
def test_stream_may_be_off(stream: Any) -> None:
    passed(line(body={**CHAT, "stream": stream}))


def test_extra_members_unknown_fields_and_white_space_pass() -> None:
    passed(line(metadata={"a": 1}, body={**CHAT, "unknown": {"deep": [1, 2.5, None]}}))
    passed(b' \t{ "body" : { "messages" : [ ] } , "custom_id" : "a" }\t ')


def test_numbers_of_any_size_pass() -> None:
    numbers = b"18446744073709551616", b"-" + b"9" * 5000, b"1e999", b"0.1" + b"0" * 5000

    for number in numbers:
        passed(raw(b'{"messages":[],"seed":' + number + b"}"))


def test_512_levels_of_the_line_pass() -> None:
    passed(raw(b'{"messages":' + DEEP + b"}"))
    passed(raw(b'{"messages":[],"x":' + b'{"image":' * 510 + b"null" + b"}" * 510 + b"}"))


def test_duplicate_members_are_read_as_decoders_read_them() -> None:
    request = passed(b'{"custom_id":"a","custom_id":"b","body":1,"body":{"messages":[]}}')

    assert request.custom_id == b'"b"'


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_a_completion_budget_below_512_is_noted(key: str) -> None:
    assert passed(line(body={**CHAT, key: 511})).small_budget
    assert passed(line(body={**CHAT, key: 1})).small_budget
    assert not passed(line(body={**CHAT, key: 512})).small_budget
    assert not passed(line(body={**CHAT, key: 100_000})).small_budget
    assert not passed(line()).small_budget


def test_a_key_that_was_nearly_custom_id_is_named() -> None:
    assert "custom_id " in rejected(b'{"custom_id ":"a","body":{}}').message


def test_a_fault_is_placed_by_its_column() -> None:
    assert rejected('{"custom_id":"é","body":{"messages":[],}}'.encode()).column == 40


def test_the_id_and_the_model_of_a_line_can_be_read_by_themselves() -> None:
    assert custom_id_of(line("é")) == b'"\\u00e9"'
    assert custom_id_of(rb'{"custom_id":"\ud800"}') == rb'"\ud800"'
    assert custom_id_of(line(3)) is None
    assert custom_id_of(b"{") is None
    assert model_of(raw(b'{"m\\u006fdel":"\\u0061"}')) == "a"
    assert model_of(raw(b'{"model":null}')) is None
    assert model_of(raw(b"{}")) is None
