"""What an engine answered: is it an answer, may the record be tried again, and the line it makes."""

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, cast

import msgspec

from freight.core import jsonbytes
from freight.core.job import Totals
from freight.core.jsonbytes import NotJson
from freight.core.record import Endpoint

MAX_TRIES: Final = 3
MAX_DEATHS: Final = 3
MAX_TEXT_BODY: Final = 4096
MAX_MESSAGE: Final = 500

INFERENCE_FAILED: Final = "InferenceFailed"
REQUEST_TIMEOUT: Final = "request_timeout"
WORKER_CRASHED: Final = "worker_crashed"
INVALID_RESPONSE: Final = "invalid_engine_response"
BATCH_CANCELLED: Final = "batch_cancelled"
BATCH_EXPIRED: Final = "batch_expired"
BATCH_FAILED: Final = "batch_failed"


class Reply(Enum):
    """What a status code says about trying again."""

    ANSWER = auto()
    BUSY = auto()
    REFUSED = auto()
    BROKEN = auto()


def reply_kind(status: int) -> Reply:
    """429 is back-pressure; 501, redirects and other 4xx are final; every other 5xx may go away."""
    if 200 <= status < 300:
        return Reply.ANSWER
    if status == 429:
        return Reply.BUSY
    if status == 501 or status < 500:
        return Reply.REFUSED
    return Reply.BROKEN


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer: its body as one line of strict JSON, and what it counts."""

    body: bytes
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cut: bool


class BadAnswer(Exception):
    """A 200 that is no answer: not JSON, an error object, or nothing chosen. The text says which."""


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Quick(msgspec.Struct):
    """What most answers are; the texts in their choices are not decoded."""

    choices: list[_Choice]
    error: Any = None
    usage: Any = None
    status: Any = None
    incomplete_details: Any = None


class _Body(msgspec.Struct):
    error: Any = None
    choices: Any = None
    usage: Any = None
    status: Any = None
    incomplete_details: Any = None


def read_answer(body: bytes, endpoint: Endpoint, status: int = 200) -> Answer:
    """Return the answer that the `body` of a 200 (or another 2xx) is; raise BadAnswer when it is none."""
    if not body.strip():
        raise BadAnswer(f"the engine answered {status} with an empty body")
    try:
        line = jsonbytes.one_line(body)
    except NotJson as error:
        raise BadAnswer(f"the engine answered 200 with a body that is not JSON: {error.reason}") from None
    decoded = _decode(line)
    if decoded.error is not None:
        raise BadAnswer(f"the engine answered 200 with an error: {_error_text(decoded.error)}")
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS) and not _chosen(decoded):
        raise BadAnswer("the engine answered 200 without choices")
    usage = _object(decoded.usage)
    details = _object(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    return Answer(
        body=line,
        input_tokens=_count(usage, "prompt_tokens") or _count(usage, "input_tokens"),
        output_tokens=_count(usage, "completion_tokens") or _count(usage, "output_tokens"),
        cached_tokens=_count(details, "cached_tokens"),
        cut=_is_cut(decoded),
    )


_QUICK: Final = msgspec.json.Decoder(_Quick)
_LOOSE: Final = msgspec.json.Decoder(_Body)


def _decode(line: bytes) -> _Quick | _Body:
    try:
        return _QUICK.decode(line)
    except msgspec.DecodeError:
        return _decode_loosely(line)


def _decode_loosely(line: bytes) -> _Body:
    try:
        return _LOOSE.decode(line)
    except msgspec.DecodeError:
        if line[:1] != b"{":
            raise BadAnswer("the engine answered 200 with JSON that is not an object") from None
        # Valid JSON that this decoder refuses: it holds a surrogate alone, or a number beyond its range.
        found: dict[str, Any] = json.loads(jsonbytes.without_lone_surrogates(line), parse_int=_whole)
        return _Body(**{name: found[name] for name in _Body.__struct_fields__ if name in found})


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


def _object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _count(source: dict[str, Any], key: str) -> int:
    value = source.get(key)
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


def _chosen(body: _Quick | _Body) -> list[Any]:
    """Return the choices, none where they are no list."""
    choices: Any = body.choices
    return cast(list[Any], choices) if isinstance(choices, list) else []


def _is_cut(body: _Quick | _Body) -> bool:
    for choice in _chosen(body):
        reason = choice.finish_reason if isinstance(choice, _Choice) else _object(choice).get("finish_reason")
        if reason == "length":
            return True
    return body.status == "incomplete" and _object(body.incomplete_details).get("reason") == "max_output_tokens"


def _error_text(error: Any) -> str:
    message = _object(error).get("message")
    if isinstance(message, str):
        return message
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()


class Line(msgspec.Struct, array_like=True, frozen=True):
    """A record's line in the results file, but for its `id`, and what is counted about it.

    `code` is None for an answer. `status` is the HTTP status where the engine answered, else 0.
    `message` is the error's text.
    """

    index: int
    code: str | None
    status: int
    message: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cut: bool
    tail: bytes


class Tally:
    """The totals of lines, while they are added up."""

    __slots__ = ("_cached", "_cut", "_done", "_failed", "_input", "_output")

    def __init__(self) -> None:
        self._done = self._failed = self._cut = self._input = self._output = self._cached = 0

    def add(self, line: Line) -> None:
        """Count a line that is new."""
        self._done += 1
        self._failed += line.code is not None
        self._cut += line.cut
        self._input += line.input_tokens
        self._output += line.output_tokens
        self._cached += line.cached_tokens

    def took_failed(self) -> None:
        """Count off a record that failed: its line was replaced."""
        self._done -= 1
        self._failed -= 1

    def totals(self) -> Totals:
        """Return the sums."""
        return Totals(self._done, self._failed, self._cut, self._input, self._output, self._cached)


def answer_line(index: int, custom_id: bytes, status: int, request_id: str, answer: Answer) -> Line:
    """Return the line of a record that was answered."""
    response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (
        status, jsonbytes.encode_text(request_id), answer.body,
    )  # fmt: skip
    return Line(
        index, None, status, "", answer.input_tokens, answer.output_tokens, answer.cached_tokens, answer.cut,
        b'"custom_id":%s,"response":%s,"error":null}' % (custom_id, response),
    )  # fmt: skip


def twin_line(line: Line, index: int, custom_id: bytes | None) -> Line:
    """Return the line of a record with the same body as that of `line`: the same, but for whose it is and for tokens.

    Those were spent once.
    """
    # No string in JSON holds a quote after a comma: a quote in it is escaped.
    rest = line.tail[line.tail.index(b',"response":') :]
    return msgspec.structs.replace(
        line, index=index, input_tokens=0, output_tokens=0, cached_tokens=0,
        tail=b'"custom_id":%s%s' % (custom_id or b"null", rest),
    )  # fmt: skip


def refused_line(index: int, custom_id: bytes, status: int, request_id: str, body: bytes) -> Line:
    """Return the line of a record that the engine refused, or failed for good, with what it said."""
    said, text = _refusal(body)
    message = f"the engine answered {status}: {text}" if text else f"the engine answered {status} with an empty body"
    response = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, jsonbytes.encode_text(request_id), said)
    return _failed(index, custom_id, INFERENCE_FAILED, message, status, response, None)


def _refusal(body: bytes) -> tuple[bytes, str]:
    """Return the refusal's body for the results file, and its text for a reader."""
    try:
        said = jsonbytes.one_line(body)
        decoded = jsonbytes.decode_any(jsonbytes.without_lone_surrogates(said))
    except NotJson:
        text = body[:MAX_TEXT_BODY].decode(errors="replace")
        while len(encoded := text.encode()) > MAX_TEXT_BODY:
            text = text[: len(text) - (len(encoded) - MAX_TEXT_BODY + 2) // 3]
        return jsonbytes.encode_text(text), " ".join(text.split())
    members = dict(decoded) if isinstance(decoded, jsonbytes.Pairs) else {}
    error = members.get("error", members)
    message = dict(error).get("message") if isinstance(error, jsonbytes.Pairs) else error  # pyright: ignore[reportUnknownVariableType]
    return said, message if isinstance(message, str) else said[:MAX_MESSAGE].decode(errors="replace")


def error_line(index: int, custom_id: bytes | None, code: str, message: str, line: int | None = None) -> Line:
    """Return the line of a record without an answer. `line` is its line number in the input, for intake codes."""
    return _failed(index, custom_id, code, message, 0, b"null", line)


def _failed(
    index: int, custom_id: bytes | None, code: str, message: str, status: int, response: bytes, line: int | None
) -> Line:
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    encoded = jsonbytes.encode_text(message)
    where = b"" if line is None else b',"line":%d' % line
    tail = b'"custom_id":%s,"response":%s,"error":{"code":"%s","message":%s%s}}' % (
        custom_id or b"null", response, code.encode(), encoded, where,
    )  # fmt: skip
    return Line(index, code, status, msgspec.json.decode(encoded, type=str), 0, 0, 0, False, tail)
