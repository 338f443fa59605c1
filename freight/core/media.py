"""Which media a record may name: data in the record itself, or an allowed host over https.

An engine would otherwise fetch any address, or read any file, that a record names. Names are taken as the most lenient
reader takes them, in any letter case and spelling; addresses as the strictest does.
"""

import base64
import binascii
import re
from typing import Any, Final

from freight.core.jsonbytes import Pairs, decode_any

_THING: Final = r"(?:image|img|picture|photo|audio|video|media|multi[_-]?modal|file|document|pdf)s?"
_ABOUT: Final = r"(?:ur[li]|path|data|file|link|src|source|embed)s?"
# Names of media fields. A document alone is text to be ranked.
_FIELD: Final = rf"(?!(?:document|pdf)s?\Z)(?:(?:input|output|ref(?:erence)?)[_-]?)?{_THING}(?:[_-]?{_ABOUT})?"
# Members of a media object that hold the media itself or its address, beside members called like media fields.
_CARRIER: Final = rf"(?:{_ABOUT}|href|location|base64|b64[_-]?json|file[_-]?ids?)"
# Members that engines read as base64 and never as an address, but for a path; tensors are such wherever they stand.
_INLINE: Final = r"(?:file[_-]?|(?:image|audio|video)[_-]?)?data|base64|b64[_-]?json"
_TENSORS: Final = r"(?:image|audio|video|prompt)[_-]?embeds?|multi[_-]?modal[_-]?data"
_IS_FIELD: Final = re.compile(_FIELD, re.IGNORECASE)
_IS_CARRIER: Final = re.compile(_CARRIER, re.IGNORECASE)
_IS_INLINE: Final = re.compile(_INLINE, re.IGNORECASE)
_IS_TENSOR: Final = re.compile(_TENSORS, re.IGNORECASE)
# Parts of a body that describe or label and from which no engine fetches anything; of tools, those that are functions.
_DESCRIPTIONS: Final = frozenset({"functions", "response_format", "metadata"})
_TOOLS: Final = "tools"
# A quick look, at a body in lower case: without any of these there are no media. A quote after a backslash begins no
# name. Names have letters, digits, "-" and "_", any of which may be an escape. There are two letters outside of ASCII
# that readers which do not mind case take for "k" and "s", as the patterns above do.
_QUOTED: Final = re.compile(
    rb'"(?<!\\")(?=[adfimopv]|ref)(?:%s|%s)"' % (_FIELD.replace(r"\Z", '"').encode(), _TENSORS.encode())
)
_SPELT: Final = re.compile(rb"\\u(?:00(?:2d|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a])|017f|212a)")
_ALIKE: Final = ("\u017f".encode(), "\u212a".encode())

_DATA: Final = re.compile(r"data:[^,/\\]*(?:/[^,/\\]*)?,", re.IGNORECASE | re.ASCII)
# Nothing that one parser of URLs may read otherwise than another: no user, other alphabet, escape, backslash or space.
_HTTPS: Final = re.compile(
    r"https://(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?(?:/[^\\\s\x00-\x1f\x7f]*|[?#][^@\\\s\x00-\x1f\x7f]*)?",
    re.IGNORECASE | re.ASCII,
)
_HOST: Final = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]+")
# No path is longer.
_MOST_PATH: Final = 4096
_JPEG: Final = "/9j/"


def media_host(text: str) -> str:
    """Return a host as `media_problem` takes it; raise ValueError for what is none."""
    host = text.strip().lower().removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} is no host name: write it without scheme, port or path, other alphabets as xn--…")
    return host


def media_problem(body: bytes, hosts: frozenset[str]) -> str | None:
    """Return why a media field of `body` (a valid JSON object) is not allowed, or None.

    Every field at any depth counts, duplicates too. `hosts` are host names as `media_host` returns them.
    """
    if not may_name_media(body):
        return None
    # A stack of its own: values may nest deeper than calls can. What stands first is looked at first.
    todo = [
        _member("", key, _but_functions(value) if key == _TOOLS else value)
        for key, value in reversed(decode_any(body))
        if key not in _DESCRIPTIONS
    ]
    while todo:
        field, value = todo.pop()
        if isinstance(value, Pairs):
            field = field or _kind(value)
            todo += [_member(field, name, inner) for name, inner in reversed(value)]
        elif isinstance(value, list):
            todo += [(field, inner) for inner in reversed(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        elif field and isinstance(value, str) and not _is_allowed(field, value, hosts):
            return _refusal(field, value)
    return None


def _but_functions(tools: Any) -> Any:
    """Return the tools that are no functions, whose parameters may be called like media fields."""
    if isinstance(tools, Pairs) or not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_function(tool)]  # pyright: ignore[reportUnknownVariableType]


def _is_function(tool: Any) -> bool:
    kinds = [value for name, value in tool if name == "type"] if isinstance(tool, Pairs) else []
    return bool(kinds) and all(kind == "function" for kind in kinds)


def may_name_media(body: bytes) -> bool:
    """Return whether `body` could have a media field; a quick look, so that most bodies are not decoded."""
    lower = body.lower()
    if _QUOTED.search(lower) or (not lower.isascii() and any(letter in lower for letter in _ALIKE)):
        return True
    return b"\\" in lower and bool(_SPELT.search(lower))


def _kind(pairs: Pairs) -> str:
    """Return the kind of medium that an object says it is, as {"type": "image", "url": …} does; "" for none."""
    kinds = (value for name, value in pairs if name.lower() == "type" and isinstance(value, str))
    return next((kind for kind in kinds if _IS_FIELD.fullmatch(kind)), "")


def _member(field: str, name: str, value: Any) -> tuple[str, Any]:
    """Return the media field ("" for none) that a member's value belongs to, and the value.

    `field` is the one that the object itself belongs to: its address is in one of the carriers.
    """
    if _IS_FIELD.fullmatch(name) or _IS_TENSOR.fullmatch(name) or (field and _IS_CARRIER.fullmatch(name)):
        return f"{field.partition('.')[0]}.{name}" if field else name, value
    return "", value


def _is_allowed(field: str, value: str, hosts: frozenset[str]) -> bool:
    if _DATA.match(value):
        return True
    url = _HTTPS.fullmatch(value)
    if url is not None:
        return url["host"].lower().strip("[]") in hosts
    outer, _, name = field.rpartition(".")
    is_inline = _IS_TENSOR.fullmatch(name) or (outer and _IS_INLINE.fullmatch(name))
    return bool(is_inline) and _is_base64(value)


def _is_base64(value: str) -> bool:
    """Return whether a text is base64, and cannot be the path of a file from / on."""
    if value[:1] == "/" and len(value) <= _MOST_PATH and not value.startswith(_JPEG):
        return False
    try:
        base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _refusal(key: str, value: str) -> str:
    https = value[:8].lower() == "https://"
    what = "a host that is not allowed" if https else "neither inline data nor an https URL"
    return f"{key} names {what}; use a data: URL, or an https URL of a host listed in media.hosts"
