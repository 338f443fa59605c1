"""JSON as bytes, against the standard library."""

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core import jsonbytes
from freight.core.jsonbytes import NotJson
from tests.unit.jsontexts import BLANKS, Pairs, objects, strings, texts, value_of

KEYS = strings(st.sampled_from(["a", "b", "model", "é"])) | strings()


def is_strict_json(text: bytes) -> bool:
    """The standard library's judgement."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        json.loads(text.decode(), parse_constant=refuse, parse_int=str)
    except ValueError:
        return False
    return True


def accepts(text: bytes) -> bool:
    try:
        jsonbytes.check(text)
    except NotJson:
        return False
    return True


def refusal(text: bytes) -> NotJson:
    with pytest.raises(NotJson) as caught:
        jsonbytes.check(text)
    return caught.value


@given(texts())
def test_every_json_text_passes(text: str) -> None:
    jsonbytes.check(text.encode())


@given(texts(), st.data())
def test_a_text_with_one_byte_changed_passes_exactly_if_it_still_is_json(text: str, data: st.DataObject) -> None:
    changed = bytearray(text.encode())
    at = data.draw(st.integers(0, len(changed)))
    new = data.draw(st.sampled_from(list(b'{}[],:"\\ \n\x00019.eE+-tfnuNIa\xff\xc3\xa9')))
    if data.draw(st.booleans()):
        changed.insert(at, new)
    else:
        changed[at : at + 1] = bytes([new])

    assert accepts(bytes(changed)) == is_strict_json(bytes(changed))


@given(st.tuples(objects(texts(), KEYS, BLANKS)).map("".join))
def test_members_are_those_that_a_decoder_finds_in_order_and_duplicates_too(text: str) -> None:
    encoded = text.encode()

    found = list(jsonbytes.members(encoded))

    assert [(m.key, value_of(encoded[m.start : m.end])) for m in found] == value_of(encoded)


@given(objects(texts(), KEYS, st.sampled_from(["", " ", "\n\t"])))
def test_a_member_spans_its_value_without_white_space_around(text: str) -> None:
    encoded = text.encode()

    for member in jsonbytes.members(encoded):
        value = encoded[member.start : member.end]
        assert value == value.strip(b" \t\r\n") != b""


@given(texts())
def test_one_line_is_one_line_of_the_same_value(text: str) -> None:
    line = jsonbytes.one_line(text.encode())

    assert b"\n" not in line
    assert b"\r" not in line
    assert value_of(line) == value_of(text.encode())


@given(texts(spaces=BLANKS))
def test_one_line_returns_the_bytes_of_what_is_one_line_already(text: str) -> None:
    assert jsonbytes.one_line(text.encode()) == text.encode()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES, st.integers(0, 4))
def test_pretty_printed_json_becomes_one_line_of_the_same_value(value: Any, indent: int) -> None:
    line = jsonbytes.one_line(json.dumps(value, indent=indent).encode() + b"\n")

    assert b"\n" not in line
    assert json.loads(line) == value


@given(st.recursive(st.floats(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_numbers_that_json_lacks_become_null_and_nothing_else_changes(value: Any) -> None:
    written = json.dumps(value)

    line = jsonbytes.one_line(written.encode())

    assert json.loads(line) == json.loads(written, parse_constant=lambda name: None)


def test_numbers_keep_their_digits() -> None:
    text = b'{"seed": 18446744073709551616,\n"huge": ' + b"9" * 6000 + b', "f": 1.10, "e": 1E400, "z": -0.0}'

    line = jsonbytes.one_line(text)

    assert [line[m.start : m.end] for m in jsonbytes.members(line)] == [
        b"18446744073709551616", b"9" * 6000, b"1.10", b"1E400", b"-0.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", [b"[1 2]", b"[1\n2]", b'{"a": tr\nue}', b"1 2", b"- 1", b'{"a":1}\n{"a":2}', b"[NaN NaN]"]
)
def test_taking_white_space_out_makes_no_json_of_what_is_none(text: bytes) -> None:
    with pytest.raises(NotJson):
        jsonbytes.one_line(text)


def test_words_inside_strings_stay() -> None:
    text = b'{"NaN":"-Infinity and NaN",\n"Infinity":[NaN,-Infinity,Infinity,"a \\" NaN"]}'

    assert value_of(jsonbytes.one_line(text)) == Pairs(
        [("NaN", "-Infinity and NaN"), ("Infinity", [None, None, None, 'a " NaN'])]
    )


@pytest.mark.parametrize(
    "text", [b"", b"  ", b"<html>", b"{", b'{"a":1}}', b"NaNa", b"-NaN", b"\xff", b'{"a":"\xff"}', b"'a'"]
)
def test_what_has_no_strict_reading_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        jsonbytes.one_line(text)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_newlines_and_carriage_returns_end_a_line(separator: str) -> None:
    text = json.dumps({"a": f"x{separator}y"}, ensure_ascii=separator < " ").encode()

    assert jsonbytes.one_line(text) == text


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_named_with_their_column(name: str) -> None:
    error = refusal(f'{{"é": {name}}}'.encode())

    assert name in error.reason
    assert error.column == 7


@pytest.mark.parametrize(
    ("text", "column"),
    [
        (b'{"a":1,}', 8),
        ('{"é":1 "b":2}'.encode(), 8),
        (b"{'a': 1}", 2),
        (b'{"a":1} {"b":2}', 9),
        (b'{"a": True}', 7),
        ('{"é":"é\n"}'.encode(), 8),
        (b'{"a":"\\x"}', 7),
    ],
)
def test_a_refusal_names_the_column_in_characters_from_one(text: bytes, column: int) -> None:
    assert refusal(text).column == column


def test_bytes_that_are_not_utf8_are_named_with_their_column() -> None:
    error = refusal('{"é":"'.encode() + b'\xff"}')

    assert "0xff" in error.reason
    assert error.column == 7


@pytest.mark.parametrize("bad", [b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80"])
def test_overlong_cut_and_surrogate_encodings_are_not_utf8(bad: bytes) -> None:
    assert "UTF-8" in refusal(b'["' + bad + b'"]').reason


@pytest.mark.parametrize("text", [b"\0", b"\0\0\0\0\0", b"{\0}\0", b"\0{\0}", b'{"a":"\0"}', b"\xef\xbb\xbf{}"])
def test_zero_bytes_and_byte_order_marks_are_refused_like_any_other_fault(text: bytes) -> None:
    assert refusal(text).column is not None


NESTINGS = [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")]


@pytest.mark.parametrize(("left", "right"), NESTINGS)
def test_512_levels_pass_and_513_do_not(left: bytes, right: bytes) -> None:
    times = 512 // (left.count(b"[") + left.count(b"{"))
    deepest = left * times + b"1" + right * times

    jsonbytes.check(deepest)
    assert "512" in refusal(b"[" + deepest + b"]").reason


@pytest.mark.parametrize("count", [600, 5_000, 100_000])
@pytest.mark.parametrize(("left", "right"), NESTINGS)
def test_nesting_that_no_stack_holds_is_refused_and_does_not_crash(left: bytes, right: bytes, count: int) -> None:
    assert "512" in refusal(left * count + b"1" + right * count).reason


def test_brackets_inside_strings_and_side_by_side_are_not_depth() -> None:
    jsonbytes.check(b'["' + b"[" * 1000 + b'\\"{{{"]')
    jsonbytes.check(b"[" + b",".join([b"[[]]"] * 1000) + b"]")


@pytest.mark.parametrize(
    "escape", [b"\\ud800", b"\\uDFFF", b"\\udc00\\ud800", b"\\ud83d\\u0041", b"\\ud800\\ud83d\\ude00"]
)
def test_an_escaped_surrogate_alone_is_legal(escape: bytes) -> None:
    text = b'{"a":"' + escape + b'"}'

    jsonbytes.check(text)
    assert jsonbytes.one_line(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'"\\ud800"', b'"\\ufffd"'),
        (b'"\\udc00\\ud800"', b'"\\ufffd\\ufffd"'),
        (b'"\\ud83d\\ude00"', b'"\\ud83d\\ude00"'),
        (b'"\\ud83d\\ud83d\\ude00"', b'"\\ufffd\\ud83d\\ude00"'),
        (b'"\\\\ud800"', b'"\\\\ud800"'),
        (b'"\\u0041"', b'"\\u0041"'),
    ],
)
def test_only_surrogates_alone_are_replaced_and_the_length_stays(text: bytes, expected: bytes) -> None:
    assert jsonbytes.without_lone_surrogates(text) == expected


@given(st.text(st.characters(), max_size=20))
def test_any_text_is_encoded_as_strict_utf8_with_surrogates_replaced(value: str) -> None:
    encoded = jsonbytes.encode_text(value)

    jsonbytes.check(encoded)
    paired = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(encoded) == paired
