"""Webhooks after the Standard Webhooks specification: what is sent, how it is signed, and when it is sent again.

https://github.com/standard-webhooks/standard-webhooks
"""

import base64
import binascii
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from freight.core.job import State

EVENTS: Final = {
    State.COMPLETED: "batch.completed",
    State.FAILED: "batch.failed",
    State.CANCELLED: "batch.cancelled",
    State.TIMED_OUT: "batch.expired",
}
# What a job's timeline calls it when its receiver will not be told.
GIVEN_UP: Final = "webhook given up"
# After this there is one last attempt.
KEEP_TRYING_S: Final = 3 * 86400.0
FIRST_WAIT_S: Final = 5.0
MOST_WAIT_S: Final = 3600.0

_PREFIX: Final = "whsec_"
_LEAST_SECRET: Final = 24
_MOST_SECRET: Final = 64
_GONE: Final = 410


@dataclass(frozen=True, slots=True)
class Letter:
    """An event of a job, to be sent to `url` at `next_at`; the times are in seconds of the clock of day.

    `receiver` is the part of the URL that names a server. `attempts` have been made already.
    """

    id: str
    job: str
    url: str
    receiver: str
    event: str
    body: str
    attempts: int
    next_at: float
    created_at: float


def letter_of(job: str, epoch: int, state: State, url: str, now: float, api: str = "") -> Letter | None:
    """Return what is sent to `url` when a job has come to `state`; None for a state that is no end.

    A job ends once in each epoch: its letter has the same id however often it is made, and receivers know by that
    what they have had already. It calls the job what the API does that it came by, and nothing in it comes from the
    job's records.
    """
    event = EVENTS.get(state)
    if event is None:
        return None
    identity = f"evt_{job.replace('-', '')}_{epoch}"
    shown = f"batch_{job.replace('-', '')}" if api == "openai" else job
    shape = {"id": identity, "object": "event", "created_at": int(now), "type": event, "data": {"id": shown}}
    body = msgspec.json.encode(shape).decode()
    return Letter(identity, job, url, receiver_of(url), event, body, 0, now, now)


def receiver_of(url: str) -> str:
    """Return the part of a URL that names a server, which may be shown: what follows may be a secret."""
    return "/".join(url.replace("?", "/").split("/", 3)[:3]).lower()


def secrets_of(text: str) -> tuple[bytes, ...]:
    """Return the secrets that a file's text holds, one a line; raise ValueError, without quoting it, for what is none.

    Letters are signed with each, so that a receiver can change from one to the next.
    """
    secrets = tuple(_secret(line.strip()) for line in text.splitlines() if line.strip())
    if not secrets:
        raise ValueError("there is no secret in it")
    return secrets


def _secret(line: str) -> bytes:
    if not line.startswith(_PREFIX):
        raise ValueError(f"a secret begins with {_PREFIX}")
    try:
        secret = base64.b64decode(line.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"what follows {_PREFIX} must be base64") from None
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise ValueError(f"a secret has {_LEAST_SECRET} to {_MOST_SECRET} bytes, not {len(secret)}")
    return secret


def signature(secrets: Sequence[bytes], identity: str, timestamp: int, body: str) -> str:
    """Return the value of the signature header: one signature for each secret."""
    signed = f"{identity}.{timestamp}.{body}".encode()
    digests = (base64.b64encode(hmac.digest(secret, signed, "sha256")).decode() for secret in secrets)
    return " ".join(f"v1,{digest}" for digest in digests)


def headers_of(letter: Letter, secrets: Sequence[bytes], now: float) -> dict[str, str]:
    """Return the headers of one attempt, which is made `now`."""
    timestamp = int(now)
    return {
        "Content-Type": "application/json",
        "User-Agent": "Freight",
        "webhook-id": letter.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secrets, letter.id, timestamp, letter.body),
    }


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one attempt. `status` is None where no answer came; `words` say why it failed.

    `retry_after` is the header as it came.
    """

    status: int | None
    words: str = ""
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has the letter."""


@dataclass(frozen=True, slots=True)
class Again:
    """The letter goes out again at `at`, for the reason in `words`."""

    at: float
    words: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The letter does not go out any more; `words` say why."""

    words: str


Verdict = Delivered | Again | GivenUp


def verdict(letter: Letter, attempt: Attempt, now: float, roll: float) -> Verdict:
    """Return what becomes of a letter after an attempt. `roll` is a random number from 0 to 1.

    The waits double from FIRST_WAIT_S to MOST_WAIT_S, each shortened by up to a quarter so that letters that failed
    together do not come back together; a receiver that asks for more gets it. Nothing is put off past the last
    attempt, KEEP_TRYING_S after the event.
    """
    status, words = attempt.status, attempt.words or f"it answers {attempt.status}"
    if status is not None and 200 <= status < 300:
        return Delivered()
    if status == _GONE:
        return GivenUp("it answers 410, that it is gone for good")
    last = letter.created_at + KEEP_TRYING_S
    if now >= last:
        return GivenUp(f"{words}; attempts: {letter.attempts + 1} in {(now - letter.created_at) / 3600:.0f} h")
    # The exponent is bounded: a float has no room for the two-thousandth power.
    wait_s = min(MOST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(letter.attempts, 32)) * (1 - roll / 4)
    return Again(min(now + max(wait_s, _asked_s(attempt.retry_after, now)), last), words)


def _asked_s(header: str | None, now: float) -> float:
    """Return the seconds that a Retry-After header asks for; 0 without one, or for one that means nothing."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(header).timestamp() - now
    except (ValueError, OverflowError):
        return 0.0
