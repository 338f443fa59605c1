"""Which media a record may name: data in the record itself, or an allowed host over https.

An engine would otherwise fetch any address, or read any file, that a record names.
"""

import base64
import binascii
import re
from typing import Any, Final
from urllib.parse import urlsplit

from freight.core.jsonbytes import Pairs, decode_any

FIELDS: Final = frozenset(
    {
        "image_url", "input_image", "image", "images",
        "audio_url", "input_audio", "audio",
        "video_url", "input_video", "video",
        "file", "file_url", "file_data", "input_file", "media_url", "document_url",
    }
)  # fmt: skip
# Members of a media object that hold the media itself or its address.
_CARRIERS: Final = frozenset(
    {"url", "uri", "path", "data", "file_data", "file_url", "image_url", "audio_url", "video_url"}
)
# Members that engines read as base64 and never as an address.
_INLINE: Final = frozenset({"data", "file_data"})
# Parts of a body that describe or label and from which no engine fetches anything.
_DESCRIPTIONS: Final = frozenset({"tools", "functions", "response_format", "metadata"})
# How the fields' names end: plain searches for these are many times faster than the pattern.
_ENDINGS: Final = (b'_url"', b'image"', b'images"', b'audio"', b'video"', b'file"', b'_data"', b"\\u00")
# A quick look: none of these and no key that could spell one in escapes means no media.
_MAYBE: Final = re.compile(rb'"(?:' + "|".join(sorted(FIELDS)).encode() + rb')"|\\u00[2-7]')


def media_problem(body: bytes, hosts: frozenset[str]) -> str | None:
    """Return why a media field of `body` (a valid JSON object) is not allowed, or None.

    Every field of FIELDS at any depth counts, duplicates too. `hosts` are lower-case host names.
    """
    if not any(ending in body for ending in _ENDINGS) or not _MAYBE.search(body):
        return None
    # A stack of its own: values may nest deeper than calls can. What stands first is looked at first.
    todo = [_member("", key, value) for key, value in reversed(decode_any(body)) if key not in _DESCRIPTIONS]
    while todo:
        field, value = todo.pop()
        if isinstance(value, Pairs):
            todo += [_member(field, name, inner) for name, inner in reversed(value)]
        elif isinstance(value, list):
            todo += [(field, inner) for inner in reversed(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        elif field and isinstance(value, str) and not _is_allowed(value, hosts):
            return _refusal(field, value)
    return None


def _member(field: str, name: str, value: Any) -> tuple[str, Any]:
    """Return the media field ("" for none) that a member's value belongs to, and the value.

    `field` is the one that the object itself belongs to: its address is in one of the carriers.
    """
    if field and name in _INLINE and isinstance(value, str) and _is_base64(value):
        return "", None
    if field and name in _CARRIERS:
        return f"{field}.{name}", value
    return (name if name in FIELDS else ""), value


def _is_allowed(value: str, hosts: frozenset[str]) -> bool:
    if value[:5].lower() == "data:":
        return True
    return value[:8].lower() == "https://" and _host(value) in hosts


def _host(url: str) -> str | None:
    # Backslashes and white space are read differently by different URL parsers: no host, then.
    if any(c in url for c in "\\ \t\r\n"):
        return None
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_base64(value: str) -> bool:
    try:
        base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _refusal(key: str, value: str) -> str:
    https = value[:8].lower() == "https://"
    what = "a host that is not allowed" if https else "neither inline data nor an https URL"
    return f"{key} names {what}; use a data: URL, or an https URL of a host listed in media.hosts"
