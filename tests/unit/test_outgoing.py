"""What of a record reaches the engine: its own bytes, `model` apart."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freight.core import jsonbytes
from freight.core.record import Endpoint, ModelName, Outgoing, outgoing
from tests.unit.jsontexts import BLANKS, Pairs, objects, strings, texts, value_of

MODEL_KEYS = strings(st.sampled_from(["model"])) | strings(st.sampled_from(["a", "models", "Model", '"model"', "x"]))
MODELS = strings(st.sampled_from(["m", "other", "served", '"model":"m"'])) | st.sampled_from(["null", "1", '["m"]'])
BODIES = objects(MODELS | texts(BLANKS, MODEL_KEYS), MODEL_KEYS, BLANKS)
NAMES = st.sampled_from(["m", "served", 'q"\\', "é😀", "\ud800"])


def sent(body: bytes, model: ModelName) -> Outgoing:
    return outgoing(b'{"custom_id":"a","url":"/v1/chat/completions","body": ' + body + b" }", model)


def without_models(body: bytes) -> bytes:
    """Return a body's bytes but for the values of its own `model` members."""
    pieces, at = [], 0
    for member in jsonbytes.members(body):
        if member.key == "model":
            pieces.append(body[at : member.start])
            at = member.end
    return b"\0".join([*pieces, body[at:]])


def models_in(body: bytes) -> list[Any]:
    return [value for key, value in value_of(body) if key == "model"]


@given(BODIES)
def test_where_no_name_is_written_a_body_stays_byte_for_byte(body: str) -> None:
    assert sent(body.encode(), ModelName(None)).body == body.encode()


@given(BODIES, NAMES)
@example('{"model":"m","x":{"model":"y"}}', "served")
@example('{"a":"\\"model","model":"x"}', "served")
@example('{"model" : "x" , "m\\u006fdel": 1}', "served")
@example("{ }", "served")
def test_only_the_values_of_model_change_and_all_of_them_do(body: str, name: str) -> None:
    encoded = body.encode()
    token = jsonbytes.encode_text(name)

    result = sent(encoded, ModelName(name)).body

    if models_in(encoded):
        assert without_models(result) == without_models(encoded)
        assert set(models_in(result)) == {value_of(token)}
    else:
        comma = b"," if value_of(encoded) else b""
        assert result == b'{"model":' + token + comma + encoded[1:]
    jsonbytes.check(result)


@given(BODIES)
def test_a_name_that_the_server_knows_stays_as_the_record_wrote_it(body: str) -> None:
    encoded = body.encode()
    models = models_in(encoded)

    result = sent(encoded, ModelName("m", frozenset({"served"}))).body

    if models and models[-1] == "served":
        assert set(models_in(result)) == {"served"}
        assert without_models(result) == without_models(encoded)
        assert result == encoded or len(models) > 1
    else:
        assert models_in(result)[-1] == "m"


@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[],"model":"m","seed":18446744073709551616}',
        '{"temperature":1.10,"model":"m","x":1E400,"y":-0.0}',
        '{"z":1,"a":2,"model":"m","z":3}',
        '{"model":"m","text":"\\u00e9\\/\\ud83d\\ude00 é😀 \\ud800"}',
        '{  "model"\t:"m" ,\r "x" : [ ] }',
    ],
)
def test_numbers_key_order_escapes_and_white_space_reach_the_engine_unchanged(body: str) -> None:
    assert sent(body.encode(), ModelName("m")).body == body.encode()
    assert sent(body.encode(), ModelName("n")).body == body.replace('"m"', '"n"').encode()


def test_a_nested_model_is_not_touched() -> None:
    body = b'{"metadata":{"model":"mine"},"tools":[{"model":"x"}]}'

    assert sent(body, ModelName("m")).body == b'{"model":"m",' + body[1:]


def test_an_empty_name_in_the_record_is_replaced_like_any_other() -> None:
    assert sent(b'{"model":""}', ModelName("m")).body == b'{"model":"m"}'
    assert sent(b'{"model":null}', ModelName("m")).body == b'{"model":"m"}'


def test_the_id_goes_along_as_it_stands_in_the_file() -> None:
    request = outgoing(rb'{"body":{"input":"\ud800"},"custom_id":"\u0061\ud800"}', ModelName(None))

    assert request == Outgoing(rb'"\u0061\ud800"', Endpoint.EMBEDDINGS, rb'{"input":"\ud800"}')


def test_a_megabyte_of_text_goes_through_whole() -> None:
    body = json.dumps({"messages": [{"content": 'a"\\\n😀' * 200_000}], "model": "m"}).encode()

    assert sent(body, ModelName("new")).body == body.replace(b'"model": "m"', b'"model": "new"')


def test_pairs_tell_duplicates_apart() -> None:
    assert value_of(b'{"a":1,"a":2}') == Pairs([("a", "1"), ("a", "2")])


def test_duplicate_models_all_become_the_one_that_was_checked() -> None:
    line = b'{"custom_id":"a","body":{"messages":[],"model":"first","model":"served"}}'
    sent = outgoing(line, ModelName("m", frozenset({"served"}))).body
    assert sent == b'{"messages":[],"model":"served","model":"served"}'
