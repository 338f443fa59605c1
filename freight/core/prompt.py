"""What an engine reads of a record, in the order in which it reads it, and where that stands in the line."""

import hashlib
import re
from typing import Final, NamedTuple

from freight.core.record import Body, Endpoint, Request

# A budget that the record does not name: as large as any.
NO_BUDGET: Final = 0xFFFFFFFF
# Media of at least this many bytes count by their digest, up to so many in one record; others are text like any.
LEAST_MEDIA: Final = 1024
MOST_MEDIA: Final = 4
DIGEST_BYTES: Final = 8
# What stands in a text for a medium: as long as a few blocks of an engine's cache, since media make many tokens.
STAND_IN_BYTES: Final = 256
# How the text of a medium begins: a data URL, or a member that holds base64.
_CARRIER: Final = re.compile(rb'"(?:data:|(?:file_)?data"[ \t]*:[ \t]*")')
_START: Final = 48
# Where so many places only begin as a token does, it is searched for as a whole.
_MOST_PLACES: Final = 16


class Media(NamedTuple):
    """A medium in a line: where its text begins, how many bytes that has, and their digest."""

    at: int
    length: int
    digest: bytes

    def stand_in(self) -> bytes:
        """Return what stands for the medium in its record's text."""
        return self.digest.hex().encode() * (STAND_IN_BYTES // (2 * DIGEST_BYTES))


class Prompt(NamedTuple):
    """A record's text: `head`, which templates put first, then `length` bytes of the line from byte `at` on.

    Both are JSON as it stands in the file, so that texts of one writer share as much as their prompts do. `budget` is
    the most tokens that the answer may have.
    """

    head: bytes
    at: int
    length: int
    budget: int
    media: tuple[Media, ...] = ()


def prompt_of(line: bytes, request: Request) -> Prompt:
    """Return the text of a line that was found good: tools, then what is said before the messages, then those."""
    body = request.body
    head = bytes(body.tools) + bytes(body.instructions)
    token = _main(body, request.endpoint)
    at = _place(line, token)
    return Prompt(head, at, len(token), _budget(body), _media(token, at) if request.has_media else ())


def _main(body: Body, endpoint: Endpoint) -> bytes:
    match endpoint:
        case Endpoint.CHAT:
            return bytes(body.messages)
        case Endpoint.COMPLETIONS:
            return bytes(body.prompt)
        case Endpoint.RERANK:
            return bytes(body.query)
        case Endpoint.SCORE:
            return bytes(body.text_1)
        case Endpoint.EMBEDDINGS | Endpoint.RESPONSES:
            return bytes(body.input) or bytes(body.messages)


def _place(line: bytes, token: bytes) -> int:
    """Return where `token` stands in the line: the first place with these bytes is as good as any."""
    # A search for all of a long token first makes a table of it, and is then linear however the line is made.
    start = token[:_START]
    at = -1
    for _ in range(_MOST_PLACES):
        at = line.find(start, at + 1)
        if line.startswith(token, at):
            return at
    return line.find(token, at)


def _budget(body: Body) -> int:
    for token in (bytes(body.max_completion_tokens), bytes(body.max_tokens), bytes(body.max_output_tokens)):
        if len(token) < 10 and token.isdigit():
            return int(token)
    return NO_BUDGET


def _media(token: bytes, at: int) -> tuple[Media, ...]:
    if len(token) < LEAST_MEDIA:
        return ()
    found: list[Media] = []
    after = 0
    while len(found) < MOST_MEDIA and (carrier := _CARRIER.search(token, after)):
        begin = carrier.end()
        after = token.find(b'"', begin)
        if after < 0:
            break
        if after - begin >= LEAST_MEDIA:
            digest = hashlib.blake2b(token[begin:after], digest_size=DIGEST_BYTES).digest()
            found.append(Media(at + begin, after - begin, digest))
    return tuple(found)
