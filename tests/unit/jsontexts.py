"""Random JSON as text: white space, escapes, duplicate keys and numbers as no encoder would write them."""

import json
from typing import Any

from hypothesis import strategies as st

SPACES = st.sampled_from(["", "", "", " ", "\t", "\n", "\r\n", "  \n "])
BLANKS = st.sampled_from(["", "", " ", "\t", "  "])
NUMBERS = st.sampled_from(
    ["0", "-0", "1", "-17", "1.50", "1E+5", "0.1e-7", "18446744073709551616", "3.1415926535897932384626433832", "1e999"]
) | st.integers().map(str)  # fmt: skip


class Pairs(list[tuple[str, Any]]):
    """A JSON object as the list of its members."""


def value_of(text: bytes) -> Any:
    """Return the value of a JSON text: objects as pairs, numbers as they are written."""
    return json.loads(text.decode(), object_pairs_hook=Pairs, parse_int=str, parse_float=str)


@st.composite
def strings(draw: st.DrawFn, values: st.SearchStrategy[str] | None = None) -> str:
    """Draw a JSON string token; each character may be spelt in any way that JSON allows."""
    value = draw(values if values is not None else st.text(st.characters(codec="utf-8"), max_size=6))
    if draw(st.booleans()):
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 0x10000 and draw(st.booleans()) else json.dumps(c)[1:-1] for c in value
    )
    lone = draw(st.sampled_from(["", "", "", "\\ud800", "\\uDFFF", '\\"', "\\\\", "\\/"])) if values is None else ""
    return f'"{escaped}{lone}"'


def objects(
    inner: st.SearchStrategy[str], keys: st.SearchStrategy[str], spaces: st.SearchStrategy[str]
) -> st.SearchStrategy[str]:
    """Return JSON objects with members of `inner`; keys come twice as often as they like."""
    member = st.tuples(spaces, keys, spaces, st.just(":"), spaces, inner, spaces).map("".join)
    return st.tuples(st.lists(member, max_size=5), spaces).map(lambda m: "{" + (",".join(m[0]) or m[1]) + "}")


def texts(
    spaces: st.SearchStrategy[str] = SPACES, keys: st.SearchStrategy[str] | None = None
) -> st.SearchStrategy[str]:
    """Return JSON values of any kind."""
    names = keys if keys is not None else strings(st.sampled_from(["a", "b", "model", "", "é", 'q"'])) | strings()
    scalars = st.sampled_from(["null", "true", "false", '""']) | NUMBERS | strings()

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        item = st.tuples(spaces, inner, spaces).map("".join)
        arrays = st.tuples(st.lists(item, max_size=4), spaces).map(lambda m: "[" + (",".join(m[0]) or m[1]) + "]")
        return arrays | objects(inner, names, spaces)

    return st.recursive(scalars, extend, max_leaves=12)
