"""The catalog of a service: names, keys, pages, times, workers that change jobs, and readers beside the writer."""

import sqlite3
import time
from collections.abc import Generator
from importlib.resources import files
from pathlib import Path
from typing import Any

import apsw
import pytest

from freight.core.job import FINAL, Event, Note, State, running_s
from freight.errors import OperationError
from freight.store import catalog as catalog_module
from freight.store.catalog import Catalog
from freight.store.database import Sharing, transaction
from freight.store.folder import Locking
from freight.store.jobfilter import JobFilter
from freight.store.rows import JobRow, QuarantineRow

MIGRATIONS = files("freight.store").joinpath("catalog_migrations")
FIRST = MIGRATIONS.joinpath("0001_initial.sql")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def catalog(path: Path) -> Generator[Catalog]:
    opened = Catalog(path, Locking.LOCAL, Sharing.WRITER)
    yield opened
    opened.close()


@pytest.fixture
def reader(path: Path, catalog: Catalog) -> Generator[Catalog]:
    opened = Catalog(path, Locking.LOCAL, Sharing.READER)
    yield opened
    opened.close()


def add(catalog: Catalog, job: str, now: float = 1.0, **more: Any) -> JobRow:
    return catalog.add(job, {}, 3, None, now, **more)


def walk(catalog: Catalog, row: JobRow, *events: Event, now: float = 2.0) -> JobRow:
    for event in events:
        row = catalog.happened(row, event, now)
    return row


def old_database(path: Path) -> None:
    """Write a database as the first version left it."""
    connection = sqlite3.connect(path)
    connection.executescript(FIRST.read_text())
    rows = [("é", "COMPLETED", "", 2, 1, 5.5, '{"model": "m"}', 7, '{"outputs": []}'), ("j", "RUNNING", "x", 0, 0, 6.0)]
    connection.execute("INSERT INTO job VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows[0])
    connection.execute("INSERT INTO job VALUES (?, ?, ?, ?, ?, ?, '{}', NULL, NULL)", rows[1])
    connection.execute("INSERT INTO event VALUES ('é', 1, 5.5, 'accepted', 'QUEUED', 'why')")
    connection.executemany(
        "INSERT INTO worker VALUES (?, ?, ?, ?, ?, ?, ?)",
        [("w1", "é", "a.gguf", "/run/w1", 5.6, 5.9, "done"), ("w2", "j", "http://b", "/run/w2", 6.1, None, "")],
    )
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()


def dump(path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    rows = list(connection.execute(query))
    connection.close()
    return rows


def test_a_database_of_the_first_version_loses_nothing(path: Path) -> None:
    old_database(path)

    catalog = Catalog(path, Locking.LOCAL)
    done, going = catalog.jobs()
    assert done == JobRow("é", State.COMPLETED, "", 2, 1, 5.5, {"model": "m"}, 7, {"outputs": []})
    assert going == JobRow("j", State.RUNNING, "x", 0, 0, 6.0, {}, None, None)
    assert [(event.event, event.detail) for event in catalog.events("é")] == [("accepted", "why")]
    [live] = catalog.live_workers()
    assert (live.id, live.job, live.source, live.folder, live.started_at) == ("w2", "j", "http://b", "/run/w2", 6.1)
    assert (live.devices, live.log, live.launch, live.process) == ([], "", {}, None)
    catalog.worker_ended("w2", "gone", 7.0)
    catalog.close()

    ended = dump(path, "SELECT id, job, started_at, ended_at, detail FROM worker ORDER BY id")
    assert ended == [("w1", "é", 5.6, 5.9, "done"), ("w2", None, 6.1, 7.0, "gone")]


def test_a_migrated_database_has_the_schema_of_a_fresh_one(path: Path, tmp_path: Path) -> None:
    old_database(path)
    for each in (path, tmp_path / "fresh.db"):
        Catalog(each, Locking.LOCAL).close()

    schema = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    assert dump(path, schema) == dump(tmp_path / "fresh.db", schema)
    assert dump(path, "PRAGMA user_version") == dump(tmp_path / "fresh.db", "PRAGMA user_version")
    assert dump(path, "PRAGMA integrity_check") == [("ok",)]
    assert dump(path, "PRAGMA foreign_key_check") == []


def test_a_job_is_found_by_its_name_and_by_the_key_that_asked_for_it(catalog: Catalog) -> None:
    row = add(catalog, "a", name="nightly", model="m", priority=3, request_key="k", request_digest="d")

    assert (row.name, row.model, row.priority, row.request_digest) == ("nightly", "m", 3, "d")
    assert catalog.named("", "nightly") == catalog.requested("", "k") == row
    assert catalog.named("", "Nightly") is None
    assert catalog.named("", "a") is None
    assert catalog.requested("", "d") is None


@pytest.mark.parametrize("twice", [{"name": "n"}, {"request_key": "k", "request_digest": "d"}])
def test_names_and_keys_are_had_by_one_job_until_it_is_deleted(catalog: Catalog, twice: dict[str, Any]) -> None:
    add(catalog, "a", **twice)

    with pytest.raises(apsw.ConstraintError):
        add(catalog, "b", **twice)
    assert [row.id for row in catalog.jobs()] == ["a"]
    catalog.delete("a")
    assert add(catalog, "b", **twice).id == "b"


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "x" * 65}, {"request_key": "k"}, {"request_digest": "d"}])
def test_the_schema_refuses_what_no_job_can_be(catalog: Catalog, wrong: dict[str, Any]) -> None:
    with pytest.raises(apsw.ConstraintError):
        add(catalog, "a", **wrong)


def test_any_number_of_jobs_may_have_neither_name_nor_key(catalog: Catalog) -> None:
    add(catalog, "a")
    add(catalog, "b")
    add(catalog, "c", name="n")

    assert catalog.names(None, 9, ("", "")) == [("n", "")]


def test_an_ids_beginning_finds_its_jobs_and_two_at_most(catalog: Catalog) -> None:
    for job in ("ab12", "ab13", "ab14", "b", "aa"):
        add(catalog, job)

    assert [row.id for row in catalog.starting_with("ab12", None)] == ["ab12"]
    assert [row.id for row in catalog.starting_with("aa", None)] == ["aa"]
    assert [row.id for row in catalog.starting_with("ab", None)] == ["ab12", "ab13"]
    assert catalog.starting_with("ab125", None) == []
    assert catalog.starting_with("c", None) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_pages_list_each_job_once_also_where_many_were_made_at_one_time(catalog: Catalog, limit: int) -> None:
    made = [(float(number // 4), f"j{number * 7 % 12:02}") for number in range(12)]
    for at, job in made:
        add(catalog, job, at)

    listed: list[tuple[float, str]] = []
    before = (1e12, "")
    while page := catalog.page(JobFilter(), limit, before):
        assert len(page) <= limit
        listed += [(row.created_at, row.id) for row in page]
        before = listed[-1]

    assert listed == sorted(made, reverse=True)


FILTERS = {
    "all": (JobFilter(), ["d", "c", "b", "a"]),
    "of a user": (JobFilter(user="alice"), ["d", "a"]),
    "of a model": (JobFilter(model="m"), ["c", "a"]),
    "of a name": (JobFilter(name="red"), ["b", "a"]),
    "of a name's beginning": (JobFilter(name="r"), ["d", "b", "a"]),
    "of a name that would be more": (JobFilter(name="red-1-"), []),
    "since": (JobFilter(since=2.0), ["d", "c", "b"]),
    "until": (JobFilter(until=3.0), ["b", "a"]),
    "in no state": (JobFilter(states=()), []),
    "of all": (JobFilter(user="bob", model="n", name="red-", since=1.0, until=3.0, states=(State.VALIDATING,)), ["b"]),
}


@pytest.mark.parametrize("what", FILTERS)
def test_a_page_has_the_jobs_that_are_wanted_and_is_read_by_an_index(catalog: Catalog, what: str) -> None:
    rows = [
        ("a", "alice", "m", "red-1"),
        ("b", "bob", "n", "red-1"),
        ("c", "bob", "m", "blue"),
        ("d", "alice", "n", "r"),
    ]
    for at, (job, user, model, name) in enumerate(rows, 1):
        catalog.add(job, {}, 1, None, float(at), user=user, model=model, name=name)
    wanted, ids = FILTERS[what]

    assert [row.id for row in catalog.page(wanted, 9, (1e12, ""))] == ids
    condition, bindings = wanted.clauses()
    plan = catalog._connection.execute(
        "EXPLAIN QUERY PLAN " + catalog_module._PAGE.format(condition), (1e12, "", *bindings, 9)
    )
    steps = [row[3] for row in plan]
    assert steps[0].startswith("SEARCH job USING INDEX"), steps


def test_a_page_of_names_is_read_by_an_index_in_its_order(catalog: Catalog) -> None:
    for number, (user, name) in enumerate([("bob", "b"), ("alice", "b"), ("bob", "a"), ("alice", "c")]):
        catalog.add(f"j{number}", {}, 1, None, 1.0, user=user, name=name)
    add(catalog, "unnamed")

    assert catalog.names(None, 9, ("", "")) == [("a", "bob"), ("b", "alice"), ("b", "bob"), ("c", "alice")]
    assert catalog.names(None, 2, ("b", "alice")) == [("b", "bob"), ("c", "alice")]
    assert catalog.names("bob", 9, ("a", "zed")) == [("b", "bob")]
    for statement, bindings in ((catalog_module._NAMES, ("", "", 9)), (catalog_module._NAMES_OF, ("bob", "", 9))):
        steps = [row[3] for row in catalog._connection.execute(f"EXPLAIN QUERY PLAN {statement}", bindings)]
        assert len(steps) == 1 and steps[0].startswith("SEARCH job USING COVERING INDEX"), steps


def test_a_page_has_jobs_of_the_states_that_were_asked_for(catalog: Catalog) -> None:
    walk(catalog, add(catalog, "queued"), Event.ACCEPTED)
    walk(catalog, add(catalog, "failed"), Event.REFUSED)
    add(catalog, "new")

    def page(*states: State) -> list[str]:
        return [row.id for row in catalog.page(JobFilter(states=states), 9, (1e12, ""))]

    assert page(State.QUEUED, State.FAILED) == ["queued", "failed"]
    assert page(State.CANCELLED) == page() == []
    assert [row.id for row in catalog.unfinished()] == ["new", "queued"]


def test_a_job_has_begun_with_its_first_worker_and_ended_with_its_last_event(catalog: Catalog) -> None:
    row = walk(catalog, add(catalog, "a"), Event.ACCEPTED, now=2.0)
    assert (row.started_at, row.finished_at) == (None, None)
    row = walk(catalog, row, Event.WORKER_GRANTED, now=3.0)
    row = walk(catalog, row, Event.WORKERS_LOST, Event.WORKER_GRANTED, now=4.0)
    assert (row.started_at, row.finished_at) == (3.0, None)
    row = walk(catalog, row, Event.LAST_RECORD_DONE, Event.OUTPUT_WRITTEN, now=5.0)
    assert (row.started_at, row.finished_at) == (3.0, 5.0)
    assert catalog.get("a") == row
    row = walk(catalog, row, Event.RETRIED, now=6.0)
    assert (row.started_at, row.finished_at) == (3.0, None)
    assert catalog.get("a") == row


def test_jobs_that_ended_long_ago_are_told_the_oldest_first(catalog: Catalog) -> None:
    for job, ended in (("b", 20.0), ("a", 10.0), ("late", 30.0)):
        walk(catalog, add(catalog, job), Event.REFUSED, now=ended)
    walk(catalog, walk(catalog, add(catalog, "again"), Event.REFUSED, now=5.0), Event.RETRIED, now=6.0)
    add(catalog, "going")

    assert catalog.finished_before(30.0) == ["a", "b"]
    assert catalog.finished_before(10.0) == []


def test_a_worker_may_serve_one_job_after_another_and_each_counts_its_own(catalog: Catalog) -> None:
    add(catalog, "a")
    add(catalog, "b")
    assert catalog.worker_starts("w1", "a", "src", "/run/w1", 2.0, ["gpu0", "gpu1"], "/log/w1", {"key": "k"}) == 1
    assert catalog.worker_starts("w2", "a", "src", "/run/w2", 3.0, log="/log/w2") == 2
    catalog.worker_runs("w1", {"pid": 7})
    catalog.worker_leaves("w1", 4.0)
    [first, second] = catalog.live_workers()
    assert (first.job, first.devices, first.launch, first.process) == (None, ["gpu0", "gpu1"], {"key": "k"}, {"pid": 7})
    assert second.job == "a"

    assert catalog.worker_joins("w1", "b", 5.0) == 1
    assert catalog.live_workers()[0].job == "b"
    catalog.worker_leaves("w1", 6.0)
    assert catalog.worker_joins("w1", "a", 7.0) == 3
    catalog.worker_ended("w1", "lost", 8.0)
    catalog.worker_ended("w2", "", 9.0)

    told = [(s.number, s.worker, s.began_at, s.ended_at, s.log) for s in catalog.stints("a")]
    assert told == [
        (1, "w1", 2.0, 4.0, "/log/w1"),
        (2, "w2", 3.0, 9.0, "/log/w2"),
        (3, "w1", 7.0, 8.0, "/log/w1"),
    ]
    assert [(s.number, s.began_at, s.ended_at) for s in catalog.stints("b")] == [(1, 5.0, 6.0)]
    assert catalog.live_workers() == []


def test_a_clock_that_was_set_back_breaks_no_stint(catalog: Catalog) -> None:
    add(catalog, "a")
    catalog.worker_starts("w", "a", "src", "/run/w", 9.0)

    catalog.worker_leaves("w", 3.0)

    assert [(s.began_at, s.ended_at) for s in catalog.stints("a")] == [(9.0, 9.0)]


def test_workers_that_ended_are_forgotten_with_the_last_job_that_they_served(catalog: Catalog, path: Path) -> None:
    add(catalog, "a")
    add(catalog, "b")
    catalog.worker_starts("w", "a", "src", "/run/w", 2.0, log="/log/w")
    catalog.worker_leaves("w", 3.0)
    catalog.worker_joins("w", "b", 4.0)
    catalog.worker_ended("w", "", 5.0)

    catalog.delete("a")
    assert [stint.log for stint in catalog.stints("b")] == ["/log/w"]
    assert catalog.stints("a") == []
    catalog.delete("b")
    assert dump(path, "SELECT id FROM worker") == []


def test_a_reader_sees_what_the_writer_committed_and_no_more(catalog: Catalog, reader: Catalog) -> None:
    row = add(catalog, "a", name="n")
    assert reader.named("", "n") == row
    connection = catalog._connection
    with transaction(connection):
        connection.execute("UPDATE job SET model = 'changed'")
        began = time.monotonic()
        # The write is open all this time: nobody who looks waits for it.
        assert reader.get("a") == row
        assert [each.id for each in reader.page(JobFilter(), 9, (1e12, ""))] == ["a"]
        assert time.monotonic() - began < 2
    assert reader.get("a").model == "changed"


def test_a_reader_cannot_write(catalog: Catalog, reader: Catalog) -> None:
    row = add(catalog, "a")

    with pytest.raises(OperationError):
        reader.happened(row, Event.ACCEPTED, 2.0)
    with pytest.raises(OperationError):
        reader.delete("a")
    assert catalog.get("a") == reader.get("a") == row


def test_every_end_is_a_state_that_the_unfinished_leave_out(catalog: Catalog, path: Path) -> None:
    add(catalog, "a")
    for state in State:
        catalog._connection.execute("UPDATE job SET state = ?", (state,))
        assert bool(catalog.unfinished()) == (state not in FINAL)


def second_database(path: Path) -> None:
    """Write a database as the second version left it: a worker on a device, one that has ended, one on none."""
    connection = sqlite3.connect(path)
    for name in ("0001_initial.sql", "0002_service.sql"):
        connection.executescript(MIGRATIONS.joinpath(name).read_text())
    connection.execute("INSERT INTO job (id, state, reason, epoch, retried, created_at, spec) VALUES "
                       "('j', 'RUNNING', '', 0, 0, 6.0, '{}')")  # fmt: skip
    process = '{"boot":"b","pid":7,"started":9}'
    connection.executemany(
        "INSERT INTO worker (id, job, source, folder, device, log, launch, process, started_at, ended_at) "
        "VALUES (?, ?, 's', '/run/w', ?, '/log/w', '{\"key\":\"k\"}', ?, ?, ?)",
        [
            ("w1", "j", "cpu:0", process, 1.0, None), ("w2", "j", 'GPU-é"', None, 2.0, 3.0),
            ("w3", "j", None, None, 4.0, None),
        ],
    )  # fmt: skip
    connection.execute("INSERT INTO stint VALUES ('j', 1, 'w1', 1.0, NULL)")
    connection.execute("PRAGMA user_version = 2")
    connection.commit()
    connection.close()


def test_a_database_of_the_second_version_keeps_workers_with_their_devices(path: Path, tmp_path: Path) -> None:
    second_database(path)

    catalog = Catalog(path, Locking.LOCAL)
    first, third = catalog.live_workers()
    assert (first.id, first.job, first.devices) == ("w1", "j", ["cpu:0"])
    assert (first.log, first.launch) == ("/log/w", {"key": "k"})
    assert first.process == {"process": {"boot": "b", "pid": 7, "started": 9}}
    assert (third.id, third.devices, third.process) == ("w3", [], None)
    assert [stint.worker for stint in catalog.stints("j")] == ["w1"]
    assert (catalog.quarantined(), catalog.pins()) == ([], {})
    catalog.close()

    assert dump(path, "SELECT json_extract(devices, '$[0]') FROM worker WHERE id = 'w2'") == [('GPU-é"',)]
    Catalog(tmp_path / "fresh.db", Locking.LOCAL).close()
    schema = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    assert dump(path, schema) == dump(tmp_path / "fresh.db", schema)


def test_notes_are_in_the_timeline_and_change_neither_state_nor_running_time(catalog: Catalog) -> None:
    row = walk(catalog, add(catalog, "a"), Event.ACCEPTED, now=1.0)
    assert catalog.worker_starts("w1", "a", "s", "/run/w1", 2.0, ["GPU-a", "GPU-b"]) == 1
    row = walk(catalog, row, Event.WORKER_GRANTED, now=3.0)
    catalog.noted("a", Note.LOADED, 8.0, "worker 1 in 6.0 s")
    row = walk(catalog, row, Event.WORKER_READY, now=8.0)
    catalog.noted("a", Note.LOADED, 10.0, "worker 1 in 1.0 s")
    walk(catalog, row, Event.LAST_RECORD_DONE, now=13.0)

    events = catalog.events("a")
    assert [(event.event, event.state, event.detail) for event in events] == [
        ("accepted", "QUEUED", ""), ("model loading", "QUEUED", "worker 1 on GPU-a, GPU-b"),
        ("worker granted", "STARTING", ""), ("model loaded", "STARTING", "worker 1 in 6.0 s"),
        ("worker ready", "RUNNING", ""), ("model loaded", "RUNNING", "worker 1 in 1.0 s"),
        ("last record done", "FINALIZING", ""),
    ]  # fmt: skip
    assert catalog.get("a").state is State.FINALIZING
    assert running_s([(event.at, event.event, event.state) for event in events], 99.0) == 10.0


def test_a_worker_on_no_device_loads_nothing_and_one_without_a_job_has_no_number(catalog: Catalog) -> None:
    walk(catalog, add(catalog, "a"), Event.ACCEPTED)
    assert catalog.worker_starts("w1", "a", "http://a", "/run/w1", 2.0) == 1
    assert catalog.worker_starts("w2", None, "s", "/run/w2", 3.0, ["GPU-a"]) == 0

    assert [event.event for event in catalog.events("a")] == ["accepted"]
    assert [(row.id, row.job) for row in catalog.live_workers()] == [("w1", "a"), ("w2", None)]
    assert catalog.worker_joins("w2", "a", 4.0) == 2


def test_quarantine_and_pins_are_kept_replaced_and_forgotten(catalog: Catalog) -> None:
    row = QuarantineRow("GPU-a", 1.5, "words", 7, {"worker": "w"})
    catalog.quarantine(row)
    catalog.quarantine(QuarantineRow("GPU-a", 1.5, "other words", None, {"worker": "w"}))
    catalog.quarantine(QuarantineRow("GPU-b", 2.5, "words", None, {}))
    assert [(kept.device, kept.words, kept.pid, kept.hold) for kept in catalog.quarantined()] == [
        ("GPU-a", "other words", None, {"worker": "w"}), ("GPU-b", "words", None, {}),
    ]  # fmt: skip
    catalog.end_quarantine("GPU-a")
    catalog.end_quarantine("GPU-x")
    assert [kept.device for kept in catalog.quarantined()] == ["GPU-b"]

    catalog.pin("m", 1)
    catalog.pin("m", 3)
    catalog.pin("n", 1)
    assert catalog.pins() == {"m": 3, "n": 1}
    catalog.unpin("m")
    assert catalog.pins() == {"n": 1}
    with pytest.raises(apsw.ConstraintError):
        catalog.pin("o", 0)
