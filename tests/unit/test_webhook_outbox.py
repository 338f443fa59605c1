"""The webhooks on disk: with what they tell of, or not at all."""

from collections.abc import Generator
from pathlib import Path

import apsw
import msgspec
import pytest

from freight.core.job import Event, State
from freight.core.webhook import EVENTS, GIVEN_UP, Letter, letter_of
from freight.store.catalog import Catalog
from freight.store.database import Sharing, transaction
from freight.store.folder import Locking
from freight.store.outbox import MOST_OF_A_JOB, Outbox

URL = "https://hooks.lab/in/token"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def catalog(path: Path) -> Generator[Catalog]:
    opened = Catalog(path, Locking.LOCAL, Sharing.WRITER)
    opened.add("a", {}, 3, None, 1.0)
    opened.add("b", {}, 3, None, 1.0)
    yield opened
    opened.close()


@pytest.fixture
def outbox(catalog: Catalog) -> Outbox:
    return Outbox(catalog._connection)


def letter(job: str = "a", now: float = 10.0, epoch: int = 0, url: str = URL) -> Letter:
    made = letter_of(job, epoch, State.COMPLETED, url, now)
    assert made is not None
    return made


def put(catalog: Catalog, outbox: Outbox, *letters: Letter) -> None:
    for each in letters:
        with transaction(catalog._connection):
            outbox.put(each)


def test_a_letter_is_there_after_a_restart_as_it_was_put(catalog: Catalog, outbox: Outbox, path: Path) -> None:
    put(catalog, outbox, letter())
    catalog.close()

    again = Catalog(path, Locking.LOCAL, Sharing.WRITER)
    assert Outbox(again._connection).next() == letter()
    again.close()


def test_a_letter_is_not_there_when_what_it_tells_of_was_not_committed(catalog: Catalog, outbox: Outbox) -> None:
    with pytest.raises(KeyError), transaction(catalog._connection):
        outbox.put(letter())
        raise KeyError

    assert outbox.next() is None


def test_the_next_letter_is_the_one_that_is_due_the_soonest_and_not_left_out(catalog: Catalog, outbox: Outbox) -> None:
    other = "https://other.lab/x"
    first, second, third = letter(now=3.0), letter("b", now=4.0), letter("b", now=5.0, epoch=1, url=other)
    put(catalog, outbox, third, first, second)

    assert outbox.next() == first
    assert outbox.next([first.id]) == second
    assert outbox.next([first.id, second.id, third.id]) is None
    assert outbox.next([], [first.receiver]) == third
    assert outbox.next([], [first.receiver, third.receiver]) is None


def test_an_attempt_that_failed_puts_a_letter_off_and_counts(catalog: Catalog, outbox: Outbox) -> None:
    put(catalog, outbox, letter(), letter("b", 11.0))

    outbox.later(letter().id, 20.0)

    last = outbox.next([letter("b").id])
    assert last is not None
    assert (last.attempts, last.next_at, last.created_at) == (1, 20.0, 10.0)
    assert outbox.next() == letter("b", 11.0)


def test_what_was_delivered_is_forgotten_and_is_no_line_of_the_timeline(catalog: Catalog, outbox: Outbox) -> None:
    put(catalog, outbox, letter())

    outbox.delivered(letter().id)
    outbox.delivered(letter().id)

    assert outbox.next() is None
    assert catalog.events("a") == []


def test_what_was_given_up_is_a_line_of_the_timeline_without_the_urls_path(catalog: Catalog, outbox: Outbox) -> None:
    catalog.happened(catalog.get("a"), Event.REFUSED, 9.0)
    put(catalog, outbox, letter())

    outbox.give_up(letter(), "it answers 500", 99.0)

    assert outbox.next() is None
    row = catalog.events("a")[-1]
    assert (row.at, row.event, row.state) == (99.0, GIVEN_UP, State.FAILED)
    assert row.detail == "batch.completed for https://hooks.lab: it answers 500"


def test_letters_are_deleted_with_their_job_and_what_comes_of_them_then_is_nothing(
    catalog: Catalog, outbox: Outbox
) -> None:
    put(catalog, outbox, letter(), letter("b"))

    catalog.delete("a")
    outbox.later(letter().id, 20.0)
    outbox.give_up(letter(), "gone", 99.0)

    assert outbox.next() == letter("b")
    assert catalog.events("a") == []
    with pytest.raises(apsw.ConstraintError):
        put(catalog, outbox, letter("never"))


def test_the_same_end_is_told_once(catalog: Catalog, outbox: Outbox) -> None:
    put(catalog, outbox, letter())
    outbox.later(letter().id, 20.0)
    put(catalog, outbox, letter())

    kept = outbox.next()
    assert kept is not None
    assert kept.next_at == 20.0


def test_a_job_that_ends_over_and_over_keeps_its_newest_letters(catalog: Catalog, outbox: Outbox) -> None:
    put(catalog, outbox, letter("b", 0.0))
    put(catalog, outbox, *(letter(now=10.0, epoch=epoch) for epoch in range(MOST_OF_A_JOB + 2)))

    kept: list[str] = []
    while (found := outbox.next(kept)) is not None:
        kept.append(found.id)

    assert set(kept) == {letter("b").id, *(letter(epoch=epoch).id for epoch in range(2, MOST_OF_A_JOB + 2))}
    assert [row.event for row in catalog.events("a")] == [GIVEN_UP, GIVEN_UP]


def test_the_schema_knows_every_event(catalog: Catalog) -> None:
    [(schema,)] = catalog._connection.execute("SELECT sql FROM sqlite_master WHERE name = 'webhook'")
    assert all(f"'{event}'" in schema for event in EVENTS.values())
    assert schema.count("'batch.") == len(EVENTS)


def test_who_waits_for_letters_is_called(catalog: Catalog, outbox: Outbox) -> None:
    calls: list[int] = []
    outbox.on_put = lambda: calls.append(1)

    put(catalog, outbox, letter(), letter("b"))

    assert calls == [1, 1]


def ended(catalog: Catalog, api: str = "", notify: str | None = URL) -> Letter | None:
    """Let a job that came by an API end, and return the letter of that."""
    row = catalog.add("c0-1", {"request": {"notify": notify}}, 3, None, 1.0, user="alice", api=api)
    return catalog.outbox.next() if catalog.happened(row, Event.REFUSED, 10.0) else None


@pytest.mark.parametrize(("api", "shown"), [("", "c0-1"), ("facility", "c0-1"), ("openai", "batch_c01")])
def test_a_job_that_ends_has_its_letter_written_with_that_as_its_api_calls_it(
    catalog: Catalog, api: str, shown: str
) -> None:
    found = ended(catalog, api)

    assert found is not None
    assert (found.event, found.url, found.created_at) == ("batch.failed", URL, 10.0)
    assert msgspec.json.decode(found.body)["data"] == {"id": shown}


def test_a_job_that_nobody_wants_to_hear_of_writes_none(catalog: Catalog) -> None:
    assert ended(catalog, notify=None) is None


def test_what_is_no_end_writes_none(catalog: Catalog) -> None:
    row = catalog.add("c0-1", {"request": {"notify": URL}}, 3, None, 1.0)
    catalog.happened(row, Event.ACCEPTED, 10.0)

    assert catalog.outbox.next() is None


def test_an_end_that_cannot_be_written_leaves_no_letter(catalog: Catalog) -> None:
    row = catalog.add("c0-1", {"request": {"notify": URL}}, 3, None, 1.0)

    def fail() -> None:
        raise KeyError

    catalog.outbox.on_put = fail
    with pytest.raises(KeyError):
        catalog.happened(row, Event.REFUSED, 10.0)

    assert (catalog.outbox.next(), catalog.get("c0-1").state) == (None, State.VALIDATING)
