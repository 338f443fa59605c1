"""The jobs of a control plane, on disk."""

from collections.abc import Generator
from pathlib import Path

import apsw
import pytest

from freight.core.job import Event, IllegalTransition, State
from freight.store.catalog import Catalog
from freight.store.folder import Locking
from freight.store.rows import EventRow, moved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def catalog(path: Path) -> Generator[Catalog]:
    opened = Catalog(path, Locking.LOCAL)
    yield opened
    opened.close()


def test_a_new_job_is_validating_in_its_first_epoch(catalog: Catalog) -> None:
    row = catalog.add("job", {"model": "é", "n": 1}, records=3, outcome=None, now=5.0)

    assert (row.state, row.epoch, row.retried, row.created_at) == (State.VALIDATING, 0, 0, 5.0)
    assert row.spec == {"model": "é", "n": 1}
    assert row.records == 3
    assert row.outcome is None
    assert catalog.get("job") == row


def test_an_unknown_job_is_a_key_error(catalog: Catalog) -> None:
    with pytest.raises(KeyError):
        catalog.get("nothing")


def test_two_jobs_cannot_have_one_id(catalog: Catalog) -> None:
    catalog.add("job", {}, records=3, outcome=None, now=1.0)

    with pytest.raises(apsw.ConstraintError):
        catalog.add("job", {}, records=3, outcome=None, now=2.0)


def test_jobs_are_listed_oldest_first(catalog: Catalog) -> None:
    for name, now in (("b", 2.0), ("c", 1.0), ("a", 2.0)):
        catalog.add(name, {}, 3, None, now)

    assert [row.id for row in catalog.jobs()] == ["c", "a", "b"]


def test_events_move_a_job_and_are_kept_in_order(catalog: Catalog) -> None:
    row = catalog.add("job", {}, records=3, outcome=None, now=1.0)
    for now, event in enumerate((Event.ACCEPTED, Event.WORKER_GRANTED, Event.WORKER_READY), start=2):
        row = catalog.happened(row, event, float(now))
    row = catalog.happened(row, Event.BLOCKED, 5.0, "disk full")

    assert (row.state, row.reason) == (State.SUSPENDED, "disk full")
    assert catalog.get("job") == row
    assert catalog.events("job") == [
        EventRow(2.0, "accepted", "QUEUED", ""),
        EventRow(3.0, "worker granted", "STARTING", ""),
        EventRow(4.0, "worker ready", "RUNNING", ""),
        EventRow(5.0, "blocked", "SUSPENDED", "disk full"),
    ]


def test_an_event_that_the_state_does_not_allow_changes_nothing(catalog: Catalog) -> None:
    row = catalog.add("job", {}, records=3, outcome=None, now=1.0)

    with pytest.raises(IllegalTransition):
        catalog.happened(row, Event.OUTPUT_WRITTEN, 2.0)

    assert catalog.get("job") == row
    assert catalog.events("job") == []


def test_resume_and_retry_raise_the_epoch_and_only_retry_runs_errors_again(catalog: Catalog) -> None:
    row = catalog.add("job", {}, records=3, outcome=None, now=1.0)
    row = catalog.happened(row, Event.REFUSED, 2.0)

    row = catalog.happened(row, Event.CONTINUED, 3.0)
    assert (row.epoch, row.retried) == (1, 0)
    row = catalog.happened(row, Event.CONTROL_STOPPED, 4.0)
    assert (row.epoch, row.retried) == (1, 0)
    row = catalog.happened(row, Event.RETRIED, 5.0)
    assert (row.epoch, row.retried) == (2, 2)
    assert catalog.get("job") == row


def test_what_an_event_does_can_be_known_without_writing_it(catalog: Catalog) -> None:
    row = catalog.add("job", {}, records=3, outcome=None, now=1.0)

    assert moved(row, Event.ACCEPTED, "why") == catalog.happened(row, Event.ACCEPTED, 2.0, "why")


@pytest.mark.parametrize("state", list(State))
def test_every_state_can_be_stored_and_no_other(path: Path, state: State) -> None:
    catalog = Catalog(path, Locking.NETWORK)
    catalog.add("job", {}, records=3, outcome=None, now=1.0)
    catalog.close()
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE job SET state = ?", (state.value,))
    with pytest.raises(apsw.ConstraintError):
        connection.execute("UPDATE job SET state = ?", (state.value.lower(),))
    connection.close()

    again = Catalog(path, Locking.NETWORK)
    assert again.get("job").state is state
    again.close()


def test_records_and_outcome_are_kept_and_can_be_taken_back(catalog: Catalog) -> None:
    catalog.add("job", {}, records=3, outcome=None, now=1.0)

    catalog.set_outcome("job", {"outputs": [{"size": 3}]})
    assert (catalog.get("job").records, catalog.get("job").outcome) == (3, {"outputs": [{"size": 3}]})
    catalog.set_outcome("job", None)
    assert catalog.get("job").outcome is None


def test_workers_count_as_live_until_they_were_seen_to_end_also_after_a_crash(path: Path) -> None:
    catalog = Catalog(path, Locking.LOCAL)
    catalog.add("job", {}, records=3, outcome=None, now=1.0)
    catalog.worker_starts("w2", "job", "src", "/run/w2", now=3.0)
    catalog.worker_starts("w1", "job", "src", "/run/w1", now=2.0)
    del catalog

    again = Catalog(path, Locking.LOCAL)
    assert [(row.id, row.folder) for row in again.live_workers()] == [("w1", "/run/w1"), ("w2", "/run/w2")]
    again.worker_ended("w1", "done", now=4.0)
    assert [row.id for row in again.live_workers()] == ["w2"]
    again.close()


def test_a_worker_that_lives_on_is_known_when_its_job_is_deleted(catalog: Catalog) -> None:
    with pytest.raises(apsw.ConstraintError):
        catalog.worker_starts("w", "nothing", "src", "/run/w", now=2.0)
    row = catalog.add("job", {}, records=3, outcome=None, now=1.0)
    catalog.happened(row, Event.ACCEPTED, 2.0)
    catalog.worker_starts("w", "job", "src", "/run/w", now=2.0)

    catalog.delete("job")

    assert catalog.jobs() == []
    assert [(row.id, row.job) for row in catalog.live_workers()] == [("w", None)]
    assert catalog.events("job") == []
