"""What a webhook says, how it is signed, and when it is sent again."""

import base64
from dataclasses import replace
from email.utils import formatdate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.job import FINAL, State
from freight.core.webhook import (
    EVENTS,
    FIRST_WAIT_S,
    KEEP_TRYING_S,
    MOST_WAIT_S,
    Again,
    Attempt,
    Delivered,
    GivenUp,
    Letter,
    headers_of,
    letter_of,
    receiver_of,
    secrets_of,
    signature,
    verdict,
)

JOB = "6f1c2b1e-8f0a-4f57-9f0e-3f1f6f3c2a11"
URL = "https://Hooks.example.com/in/token?key=secret"
# The specification's own example.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EXAMPLE = ("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, '{"test": 2432232314}')
SIGNED = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def letter(now: float = 1000.5, state: State = State.COMPLETED, epoch: int = 0) -> Letter:
    made = letter_of(JOB, epoch, state, URL, now)
    assert made is not None
    return made


def test_a_letter_has_the_shape_of_an_openai_event_and_nothing_else() -> None:
    assert msgspec.json.decode(letter().body) == {
        "id": f"evt_{JOB.replace('-', '')}_0",
        "object": "event",
        "created_at": 1000,
        "type": "batch.completed",
        "data": {"id": JOB},
    }
    assert (letter().attempts, letter().next_at, letter().job, letter().url) == (0, 1000.5, JOB, URL)


def test_each_end_of_a_job_has_its_event_and_no_other_state_has_one() -> None:
    assert set(EVENTS) == FINAL
    assert {state: letter(state=state).event for state in FINAL} == EVENTS
    assert all(letter_of(JOB, 0, state, URL, 1.0) is None for state in set(State) - FINAL)


def test_the_same_end_has_the_same_id_and_another_end_of_the_same_job_has_not() -> None:
    assert letter(1.0).id == letter(99.0).id
    assert letter(epoch=1).id != letter().id


@pytest.mark.parametrize("url", ["https://h.x:8/a/b", "https://h.x:8", "https://H.x:8?a/b", "https://h.x:8/"])
def test_what_may_be_shown_of_a_url_is_its_server(url: str) -> None:
    assert receiver_of(url) == "https://h.x:8"


def test_the_signature_is_that_of_the_specifications_example() -> None:
    assert signature(secrets_of(SECRET), *EXAMPLE) == SIGNED


def test_a_letter_is_signed_with_each_secret_of_the_file() -> None:
    other = "whsec_" + base64.b64encode(bytes(range(32))).decode()

    both = signature(secrets_of(f"{SECRET}\n\n  {other} \n"), *EXAMPLE).split(" ")

    assert both == [SIGNED, signature(secrets_of(other), *EXAMPLE)]


@pytest.mark.parametrize(
    "text", ["", "\n \n", SECRET.removeprefix("whsec_"), "whsec_", "whsec_*", "whsec_YWJj", "whsec_" + "YWJj" * 22]
)
def test_what_is_no_secret_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        secrets_of(text)
    assert "YWJj" not in str(refused.value)


def test_headers_carry_the_time_of_the_attempt_and_the_id_of_the_letter() -> None:
    secrets = secrets_of(SECRET)

    headers = headers_of(letter(), secrets, 2000.9)

    assert headers["webhook-id"] == letter().id
    assert headers["webhook-timestamp"] == "2000"
    assert headers["webhook-signature"] == signature(secrets, letter().id, 2000, letter().body)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("status", [200, 204, 299])
def test_any_success_ends_it(status: int) -> None:
    assert verdict(letter(), Attempt(status), 1001.0, 0.0) == Delivered()


def test_a_receiver_that_is_gone_is_not_asked_again() -> None:
    assert isinstance(verdict(letter(), Attempt(410), 1001.0, 0.0), GivenUp)


@pytest.mark.parametrize("status", [None, 100, 302, 400, 404, 429, 500, 503])
def test_anything_else_is_tried_again(status: int | None) -> None:
    assert isinstance(verdict(letter(), Attempt(status), 1001.0, 0.0), Again)


def waits(roll: float, retry_after: str | None = None) -> list[float]:
    """Return the waits between the attempts on a letter that fails every time, to the end."""
    now, sent, found = 1000.5, letter(), []
    while isinstance(what := verdict(sent, Attempt(503, "", retry_after), now, roll), Again):
        found.append(what.at - now)
        now, sent = what.at, replace(sent, attempts=sent.attempts + 1, next_at=what.at)
    assert isinstance(what, GivenUp)
    assert f"attempts: {len(found) + 1} in 72 h" in what.words
    assert now == pytest.approx(1000.5 + KEEP_TRYING_S)
    return found


def test_waits_double_from_seconds_to_an_hour_until_three_days_are_over() -> None:
    found = waits(roll=0.0)

    assert found[:4] == pytest.approx([FIRST_WAIT_S, 10.0, 20.0, 40.0])
    assert max(found) == pytest.approx(MOST_WAIT_S)
    assert 75 < len(found) < 90


@given(st.floats(0, 1))
def test_jitter_takes_a_quarter_at_most(roll: float) -> None:
    for wait_s, whole_s in zip(waits(roll)[:12], waits(0.0)[:12], strict=True):
        assert whole_s * 0.75 - 1e-6 <= wait_s <= whole_s + 1e-6


def test_a_receiver_that_asks_for_time_gets_it() -> None:
    def at(retry_after: str) -> float:
        what = verdict(letter(), Attempt(429, "", retry_after), 1000.5, 0.0)
        assert isinstance(what, Again)
        return what.at

    assert at("120") == 1120.5
    assert at("7200") == 8200.5
    assert at(formatdate(1600, usegmt=True)) == 1600.0
    assert at("1") == 1005.5  # Never sooner than without it.
    assert at("9" * 400) == at("inf") == at("nan") == at("soon") == at("-5") == at(formatdate(5)) == 1005.5
    assert at("1e12") == 1000.5 + KEEP_TRYING_S


def test_a_letter_that_waited_out_its_time_has_one_last_attempt() -> None:
    late = 1000.5 + KEEP_TRYING_S + 1

    assert verdict(letter(), Attempt(200), late, 0.0) == Delivered()
    assert isinstance(verdict(letter(), Attempt(500, "it answers 500"), late, 0.0), GivenUp)


@given(st.text(), st.integers(0, 10**6), st.floats(0, 1e10))
def test_no_header_and_no_number_of_attempts_breaks_the_schedule(header: str, attempts: int, now: float) -> None:
    sent = replace(letter(), attempts=attempts)

    what = verdict(sent, Attempt(503, "", header), now, 0.5)

    if isinstance(what, Again):
        assert now < what.at <= sent.created_at + KEEP_TRYING_S
