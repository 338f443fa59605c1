"""STUB markers: a prompt that contains `STUB:name` says how its request shall go wrong."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from bench.simengine.oddities import EXACT_BODY, LOGIN_PAGE, ODD_TEXTS, PROXY_PAGE
from bench.simengine.reply import HTML_TYPE, Reply, error_reply

PREFIX: Final = "STUB:"
# `tokens=` says how long the answer is, which prompt.py reads.
_MARKER: Final = re.compile(r"STUB:(?:sleep=(?P<seconds>\d*\.?\d+)|tokens=\d+|(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*))")

DIE_STATUS: Final = 1
TRUNCATED_BYTES: Final = 100


class Link(Protocol):
    """The connection that a request came in on."""

    def reset(self) -> None:
        """Close the connection at once, answering nothing."""
        ...


# What is done in place of a reply.
Deed = Callable[[Link], None]


class Script(msgspec.Struct):
    """How one marked request goes: after `delay_s`, the deed, or the reply, or a changed answer.

    `content` and `finish` shape the ordinary answer, and `reshape` changes it once made.
    """

    delay_s: float = 0.0
    deed: Deed | None = None
    reply: Reply | None = None
    content: str | None = None
    finish: str = "stop"
    reshape: Callable[[Reply], Reply] | None = None


def _die(_: Link) -> None:
    os._exit(DIE_STATUS)


def _abort(_: Link) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # A core file would litter the working folder.
    os.abort()


def _kill(_: Link) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reset(link: Link) -> None:
    link.reset()


def _spaced(reply: Reply) -> Reply:
    return msgspec.structs.replace(reply, body=json.dumps(json.loads(reply.body), indent=2).encode())


def _truncated(reply: Reply) -> Reply:
    return msgspec.structs.replace(reply, missing_bytes=TRUNCATED_BYTES)


def _without_choices(reply: Reply) -> Reply:
    body = json.loads(reply.body)
    body["choices"] = []
    return msgspec.structs.replace(reply, body=json.dumps(body).encode())


def _with_infinite_logprob(reply: Reply) -> Reply:
    """Put the word `-Infinity`, which is not JSON, where each choice's logprob belongs."""
    body: dict[str, Any] = json.loads(reply.body)
    token = {"token": "ok", "logprob": float("-inf"), "bytes": [111, 107], "top_logprobs": []}
    for choice in body.get("choices", ()):
        choice["logprobs"] = {"content": [token], "refusal": None}
    return msgspec.structs.replace(reply, body=json.dumps(body).encode())


DEEDS: Final[dict[str, Deed]] = {
    "die": _die,
    "abort": _abort,
    "sigkill-self": _kill,
    "reset": _reset,
    "reset-once": _reset,
}

_BAD_GATEWAY: Final = Reply(PROXY_PAGE, status=502, content_type=HTML_TYPE)
_RETRY_AFTER: Final = b"Retry-After: 1\r\n"
_ROLES: Final = "Conversation roles must alternate user/assistant/user/assistant/..."

REPLIES: Final[dict[str, Reply]] = {
    "500-always": error_reply(500, _ROLES),
    "501": error_reply(501, "this model does not support this request"),
    "502-html-always": _BAD_GATEWAY,
    "502-html-once": _BAD_GATEWAY,
    "503-once": error_reply(503, "engine is overloaded"),
    "429-once": error_reply(429, "rate limit reached", headers=_RETRY_AFTER),
    "429-always": error_reply(429, "rate limit reached", headers=_RETRY_AFTER),
    "400-empty-body": Reply(b"", status=400),
    "400-unsupported-param": error_reply(400, "unsupported parameter: logit_bias", param="logit_bias"),
    "400-once": error_reply(400, "refused this once"),
    "200-error-body": Reply(error_reply(500, "engine failed while answering").body),
    "200-html": Reply(LOGIN_PAGE, content_type=HTML_TYPE),
    "200-empty": Reply(b""),
    "bytes-exact": Reply(EXACT_BODY, prompt_tokens=1, completion_tokens=1),
}

RESHAPES: Final[dict[str, Callable[[Reply], Reply]]] = {
    "200-truncated": _truncated,
    "200-two-lines": _spaced,
    "200-no-choices": _without_choices,
    "200-neg-infinity": _with_infinite_logprob,
}

ONCE: Final = frozenset(name for name in (*DEEDS, *REPLIES) if name.endswith("-once"))


def read_script(text: str, first_time: Callable[[str], bool]) -> Script:
    """Return what the markers in `text` ask for; `first_time` says whether a prompt is a new one.

    All `sleep` marks add up, and of the others the first counts. A name that is no marker gets a
    400, so that a misspelt test does not pass by being answered.
    """
    delay_s, name = 0.0, ""
    for mark in _MARKER.finditer(text):
        if mark["seconds"]:
            delay_s += float(mark["seconds"])
        else:
            name = name or mark["name"] or ""
    # Asked only for the markers that need it: asking marks the prompt as seen.
    if not name or (name in ONCE and not first_time(text)):
        return Script(delay_s)
    script = _script_named(name)
    script.delay_s = delay_s
    return script


def _script_named(name: str) -> Script:
    if name in DEEDS:
        return Script(deed=DEEDS[name])
    if name in REPLIES:
        return Script(reply=REPLIES[name])
    if name in ODD_TEXTS:
        return Script(content=ODD_TEXTS[name])
    if name in RESHAPES:
        return Script(reshape=RESHAPES[name])
    if name == "length-empty":
        return Script(content="", finish="length")
    return Script(reply=error_reply(400, f"no such marker: {PREFIX}{name}"))
