"""One record: what an input line must be, and the request that it stands for."""

import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

import msgspec

from freight.core import jsonbytes
from freight.core.jsonbytes import NotJson
from freight.core.media import may_name_media, media_problem

MAX_CUSTOM_ID: Final = 512
SMALL_BUDGET: Final = 512

INTAKE_CODES: Final = (
    "invalid_json",
    "missing_custom_id",
    "invalid_custom_id",
    "duplicate_custom_id",
    "invalid_body",
    "invalid_url",
    "invalid_method",
    "media_not_allowed",
    "model_mismatch",
    "streaming_unsupported",
    "payload_too_large",
)


class Endpoint(IntEnum):
    """An OpenAI-style endpoint; the values are stored one byte a record."""

    CHAT = 1
    COMPLETIONS = 2
    EMBEDDINGS = 3
    RESPONSES = 4
    RERANK = 5
    SCORE = 6


PATHS: Final = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.EMBEDDINGS: "/v1/embeddings",
    Endpoint.RESPONSES: "/v1/responses",
    Endpoint.RERANK: "/v1/rerank",
    Endpoint.SCORE: "/v1/score",
}
_BY_PATH: Final = {f'"{path}"'.encode(): endpoint for endpoint, path in PATHS.items()}


@dataclass(frozen=True, slots=True)
class Rules:
    """What this job's lines must obey.

    `models`: the names a record's own `model` may have; None when any will do.
    `media_hosts`: hosts from which https media may come. `endpoint`: what all are for, None for any.
    """

    models: frozenset[str] | None = None
    media_hosts: frozenset[str] = frozenset()
    model: str = ""
    endpoint: Endpoint | None = None


class Request(msgspec.Struct, frozen=True):
    """A good line. `custom_id` is the JSON token as it stands in the file, `key` a digest of its value.

    `raw_body` is the body as it stands there, `body` what is known of its members; `has_media`: it may name media.
    """

    custom_id: bytes
    key: bytes
    endpoint: Endpoint
    small_budget: bool
    raw_body: bytes
    body: "Body"
    has_media: bool


@dataclass(frozen=True, slots=True)
class Rejection:
    """A bad line: an intake code, why, and the `custom_id` token where it could be read.

    `column` counts characters from 1, where the fault has a place; `key` is a digest of the id's value.
    """

    code: str
    message: str
    custom_id: bytes | None = None
    column: int | None = None
    key: bytes | None = None


class _Refused(Exception):
    def __init__(self, code: str, message: str, column: int | None = None) -> None:
        self.code, self.message, self.column = code, message, column


class _Envelope(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class Body(msgspec.Struct):
    """The members of a body that Freight looks at, as they stand in it; empty where they are absent."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()


_S = TypeVar("_S", bound=msgspec.Struct)
_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_BODY: Final = msgspec.json.Decoder(Body)
_ABSENT: Final = (b"", b"null")


def check_line(line: bytes, rules: Rules) -> Request | Rejection:
    """Return the request that `line` (without its line end) makes, or why it makes none."""
    custom_id = key = None
    try:
        envelope = _decode_envelope(line)
        custom_id, key = _check_custom_id(envelope, line)
        _check_method(bytes(envelope.method))
        raw_body = bytes(envelope.body)
        if raw_body[:1] != b"{":
            raise _Refused("invalid_body", "body must be an object" if raw_body else "body is missing")
        body = _decode_body(raw_body)
        endpoint = _endpoint(bytes(envelope.url), body)
        _check_endpoint(endpoint, rules)
        _check_stream(bytes(body.stream))
        _check_model(bytes(body.model), rules)
        has_media = may_name_media(raw_body)
        problem = media_problem(raw_body, rules.media_hosts) if has_media else None
        if problem:
            raise _Refused("media_not_allowed", problem)
        small = _is_small(bytes(body.max_tokens)) or _is_small(bytes(body.max_completion_tokens))
        return Request(custom_id, key, endpoint, small, raw_body, body, has_media)
    except _Refused as refused:
        return Rejection(refused.code, refused.message, custom_id, refused.column, key)
    except NotJson as error:
        return Rejection("invalid_json", error.reason, None, error.column)


def _decode_envelope(line: bytes) -> _Envelope:
    jsonbytes.check_utf8(line)
    try:
        envelope = _ENVELOPE.decode(line)
    except msgspec.ValidationError:
        raise NotJson("a record must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError):
        jsonbytes.explain(line)
        envelope = _decode_slowly(line, _Envelope)
    jsonbytes.check_depth(line)
    return envelope


def _decode_body(raw: bytes) -> Body:
    try:
        return _BODY.decode(raw)
    except msgspec.DecodeError:
        return _decode_slowly(raw, Body)


def _decode_slowly(text: bytes, kind: type[_S]) -> _S:
    """Return what the decoder would, for text whose lone surrogates it refuses."""
    if text.lstrip()[:1] != b"{":
        raise NotJson("a record must be a JSON object")
    found = {m.key: msgspec.Raw(text[m.start : m.end]) for m in jsonbytes.members(text)}
    return kind(**{name: found[name] for name in kind.__struct_fields__ if name in found})


def _check_custom_id(envelope: _Envelope, line: bytes) -> tuple[bytes, bytes]:
    token = bytes(envelope.custom_id)
    if token in _ABSENT:
        raise _Refused("missing_custom_id", "custom_id is missing" + _near_miss(line))
    if token[:1] != b'"':
        raise _Refused("invalid_custom_id", f"custom_id must be a string, not {_shown(token)}")
    value = jsonbytes.text_of(token) if b"\\" in token else token[1:-1].decode()
    if not 1 <= len(value) <= MAX_CUSTOM_ID:
        raise _Refused("invalid_custom_id", f"custom_id has {len(value)} characters; 1 to {MAX_CUSTOM_ID} are allowed")
    return token, hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _near_miss(line: bytes) -> str:
    for member in jsonbytes.members(line):
        if member.key != "custom_id" and member.key.strip().lower() == "custom_id":
            return f"; there is a key {jsonbytes.encode_text(member.key).decode()}"
    return ""


def _check_method(token: bytes) -> None:
    if token in _ABSENT or token == b'"POST"':
        return
    if token[:1] != b'"' or jsonbytes.text_of(token).upper() != "POST":
        raise _Refused("invalid_method", f"method must be POST, not {_shown(token)}")


def _endpoint(token: bytes, body: Body) -> Endpoint:
    if token in _ABSENT:
        if bytes(body.messages):
            return Endpoint.CHAT
        if bytes(body.prompt):
            return Endpoint.COMPLETIONS
        if bytes(body.input):
            return Endpoint.EMBEDDINGS
        raise _Refused("invalid_url", "url is missing, and the body has no messages, prompt or input to tell it by")
    endpoint = _BY_PATH.get(token)
    if endpoint is None and token[:1] == b'"':
        endpoint = _BY_PATH.get(b'"%s"' % jsonbytes.text_of(token).encode("utf-8", "replace"))
    if endpoint is None:
        raise _Refused("invalid_url", f"url is {_shown(token)}; accepted are {', '.join(PATHS.values())}")
    return endpoint


def _check_endpoint(endpoint: Endpoint, rules: Rules) -> None:
    if rules.endpoint is not None and endpoint is not rules.endpoint:
        words = f"the record is for {PATHS[endpoint]}; all of this batch are for {PATHS[rules.endpoint]}"
        raise _Refused("invalid_url", words)


def _check_stream(token: bytes) -> None:
    if token not in _ABSENT and token != b"false":
        raise _Refused("streaming_unsupported", "stream must be false or absent: a batch has no reader to stream to")


def _check_model(token: bytes, rules: Rules) -> None:
    if rules.models is None or token in _ABSENT:
        return
    if token[:1] != b'"' or jsonbytes.text_of(token) not in rules.models:
        raise _Refused("model_mismatch", f"the record asks for model {_shown(token)}; this job runs {rules.model}")


def _is_small(token: bytes) -> bool:
    return len(token) < 4 and token.isdigit() and int(token) < SMALL_BUDGET


def _shown(token: bytes) -> str:
    text = token.decode("utf-8", "replace")
    return text if len(text) <= 80 else text[:77] + "…"


@dataclass(frozen=True, slots=True)
class ModelName:
    """What goes into a body's `model`.

    `fill`: the name to write; None leaves every body as it is. `keep`: names that the server
    itself knows, which stay as the record wrote them.
    """

    fill: str | None
    keep: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request ready to send. `custom_id` is the JSON token as it stands in the file."""

    custom_id: bytes
    endpoint: Endpoint
    body: bytes


def outgoing(line: bytes, model: ModelName) -> Outgoing:
    """Return the request of a line that intake has passed; its body is the line's own bytes, `model` apart."""
    try:
        envelope = _ENVELOPE.decode(line)
    except msgspec.DecodeError:
        envelope = _decode_slowly(line, _Envelope)
    raw = bytes(envelope.body)
    body = _decode_body(raw)
    endpoint = _endpoint(bytes(envelope.url), body)
    return Outgoing(bytes(envelope.custom_id), endpoint, with_model(raw, bytes(body.model), model))


def model_of(line: bytes) -> str | None:
    """Return the `model` that a good line names itself; None where it names none."""
    return model_in(_decode_body(bytes(_decode_envelope(line).body)))


def model_in(body: Body) -> str | None:
    """Return the `model` that a body names; None where it names none."""
    token = bytes(body.model)
    return jsonbytes.text_of(token) if token[:1] == b'"' else None


def custom_id_of(line: bytes) -> bytes | None:
    """Return the `custom_id` token of any line, or None where it cannot be read."""
    try:
        token = bytes(_decode_envelope(line).custom_id)
    except NotJson:
        return None
    return token if token[:1] == b'"' else None


_MODEL_KEY: Final = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*')
# A key could be spelt with escapes of plain ASCII characters.
_ASCII_ESCAPE: Final = re.compile(rb"\\u00[2-7]")


def with_model(body: bytes, current: bytes, model: ModelName) -> bytes:
    """Return `body` with its `model` as `model` says; `current` is the token of the value it has.

    Duplicate keys all get the same value: readers differ in which one they take.
    """
    if model.fill is None:
        return body
    name = jsonbytes.encode_text(model.fill)
    if not current:
        is_empty = body[1:].lstrip(b" \t\r\n") == b"}"
        return b'{"model":' + name + (b"" if is_empty else b",") + body[1:]
    single = body.count(b'"model"') == 1 and not _ASCII_ESCAPE.search(body)
    if current[:1] == b'"' and jsonbytes.text_of(current) in model.keep:
        name = current
    if current == name and single:
        return body
    if single:
        key = _MODEL_KEY.search(body)
        if key is not None:
            return body[: key.end()] + name + body[key.end() + len(current) :]
    return _rewritten(body, name)


def _rewritten(body: bytes, name: bytes) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for member in jsonbytes.members(body):
        if member.key == "model":
            pieces += (body[at : member.start], name)
            at = member.end
    return b"".join((*pieces, body[at:]))
