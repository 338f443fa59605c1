"""Files in the catalog: whose they are, until when they are there, and what batches that end have to give."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.job import Event
from freight.core.openaifile import Part, error_tail, input_id, job_of, made_at, result_id, shown_name
from freight.store.catalog import Catalog
from freight.store.database import Sharing
from freight.store.filetable import FileRow
from freight.store.folder import Locking
from freight.store.rows import JobRow

JOB = "0123abcd-0000-4000-8000-00000000ffff"
HEX = JOB.replace("-", "")
ENDED = {"outputs": [], "done": 3, "failed": 1}
TO_THE_END = (Event.WORKER_GRANTED, Event.WORKER_READY, Event.LAST_RECORD_DONE, Event.OUTPUT_WRITTEN)
NEWEST, OLDEST = (1e12, "~"), (-1.0, "")


@pytest.fixture
def catalog(tmp_path: Path) -> Generator[Catalog]:
    opened = Catalog(tmp_path / "catalog.db", Locking.LOCAL, Sharing.WRITER)
    yield opened
    opened.close()


def kept(file: str, at: float = 1.0, user: str = "alice", **more: Any) -> FileRow:
    return FileRow(file, user, "in.jsonl", 3, "0" * 64, "batch", at, **more)


def ended(catalog: Catalog, outcome: dict[str, Any] | None, records: int | None = 3, **more: Any) -> JobRow:
    """Return a job of the OpenAI API that has come to its end."""
    row = catalog.add(JOB, more.pop("spec", {}), records, outcome, 1.0, user="alice", **{"api": "openai", **more})
    for event in (Event.ACCEPTED, *TO_THE_END):
        row = catalog.happened(row, event, 7.0)
    return row


def given_files(catalog: Catalog, now: float = 8.0) -> list[str]:
    return sorted(file.id for file in catalog.files.of_jobs([JOB], now))


def test_file_is_its_users_alone(catalog: Catalog) -> None:
    catalog.files.add(kept("file-1"))
    catalog.files.add(kept("file-2", user="bob"))

    assert catalog.files.get("alice", "file-1", 2.0) == kept("file-1")
    assert catalog.files.get("alice", "file-2", 2.0) is None
    assert [row.id for row in catalog.files.page("bob", 2.0, 9, NEWEST, None, True)] == ["file-2"]
    assert catalog.files.inputs_of("alice") == ["file-1"]
    assert catalog.files.inputs() == {"file-1", "file-2"}
    assert (catalog.files.delete("file-1"), catalog.files.delete("file-1")) == (True, False)
    assert catalog.files.inputs() == {"file-2"}


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("newest_first", [True, False])
def test_pages_have_each_file_once_also_where_many_came_at_one_time(
    catalog: Catalog, limit: int, newest_first: bool
) -> None:
    for number in range(7):
        catalog.files.add(kept(f"file-{number}", at=float(number // 3)))
    seen: list[str] = []
    after = NEWEST if newest_first else OLDEST

    while page := catalog.files.page("alice", 5.0, limit, after, "batch", newest_first):
        seen += [row.id for row in page]
        after = (page[-1].created_at, page[-1].id)

    expected = [f"file-{number}" for number in range(7)]
    assert seen == (expected[::-1] if newest_first else expected)
    assert catalog.files.page("alice", 5.0, 9, NEWEST, "batch_output", True) == []


def test_file_that_has_expired_is_not_there_though_nobody_removed_it(catalog: Catalog) -> None:
    catalog.files.add(kept("file-1", expires_at=5.0))

    assert catalog.files.get("alice", "file-1", 4.9) is not None
    assert catalog.files.expired(4.9) == []
    assert catalog.files.get("alice", "file-1", 5.0) is None
    assert catalog.files.page("alice", 5.0, 9, NEWEST, None, True) == []
    assert [row.id for row in catalog.files.expired(5.0)] == ["file-1"]


@pytest.mark.parametrize(
    ("outcome", "parts"),
    [
        ({"done": 3, "failed": 1}, ["err", "out"]),
        ({"done": 3, "failed": 0}, ["out"]),
        ({"done": 3, "failed": 3}, ["err"]),
        ({"done": 1, "failed": 0}, ["err", "out"]),
        ({"done": 0, "failed": 0}, ["err"]),
        (None, ["err"]),
    ],
)
def test_batch_that_ends_has_a_file_for_each_part_with_lines(
    catalog: Catalog, outcome: dict[str, Any] | None, parts: list[str]
) -> None:
    ended(catalog, outcome)

    assert given_files(catalog) == [f"file-{part}-{HEX}" for part in parts]
    for row in catalog.files.of_jobs([JOB], 8.0):
        assert (row.user, row.purpose, row.created_at, row.size, row.job) == ("alice", "batch_output", 7.0, None, JOB)
    assert catalog.files.inputs() == set()


def test_only_batches_whose_input_was_good_have_files(catalog: Catalog) -> None:
    row = catalog.add(JOB, {}, None, None, 1.0, user="alice", api="openai")
    catalog.happened(row, Event.REFUSED, 2.0)
    assert given_files(catalog) == []
    catalog.delete(JOB)
    ended(catalog, ENDED, api="facility")
    assert given_files(catalog) == []


@pytest.mark.parametrize("event", [Event.RETRIED, Event.CONTINUED])
def test_batch_that_goes_on_has_no_files_until_it_ends_again(catalog: Catalog, event: Event) -> None:
    row = catalog.add(JOB, {}, 3, ENDED, 1.0, user="alice", api="openai")
    row = catalog.happened(catalog.happened(row, Event.CANCEL_ASKED, 2.0), Event.WORKERS_GONE, 7.0)
    (old,) = [file for file in catalog.files.of_jobs([JOB], 8.0) if file.part == "output"]
    catalog.files.counted(old, 5)
    catalog.files.delete(f"file-err-{HEX}")

    row = catalog.happened(row, event, 9.0)
    assert given_files(catalog) == []
    for each in TO_THE_END:
        row = catalog.happened(row, each, 10.0)

    assert given_files(catalog) == [f"file-err-{HEX}", f"file-out-{HEX}"]
    catalog.files.counted(old, 5)  # Somebody was still counting what it was before.
    assert {file.size for file in catalog.files.of_jobs([JOB], 11.0)} == {None}


def test_files_of_a_batch_go_with_it(catalog: Catalog) -> None:
    ended(catalog, ENDED)

    catalog.delete(JOB)

    assert given_files(catalog) == []


def test_files_of_a_batch_expire_as_it_was_asked(catalog: Catalog) -> None:
    ended(catalog, ENDED, spec={"more": {"output_expires_after": 3600}})

    assert len(given_files(catalog, 3606.9)) == 2
    assert given_files(catalog, 3607.0) == []


def test_an_end_that_is_not_kept_gives_no_files(catalog: Catalog) -> None:
    row = catalog.add(JOB, {}, 3, ENDED, 1.0, user="alice", api="openai")
    catalog.files.add(kept(f"file-out-{HEX}"))  # It stands in the way.

    with pytest.raises(apsw.ConstraintError):
        catalog.happened(catalog.happened(row, Event.CANCEL_ASKED, 2.0), Event.WORKERS_GONE, 7.0)

    assert catalog.get(JOB).state == "CANCELLING"
    assert given_files(catalog) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": ""}, {"filename": ""}, {"filename": "x" * 256}, {"size": None}, {"sha256": None}, {"size": -1},
        {"purpose": "batch_output"}, {"purpose": "vision"}, {"expires_at": 0.5}, {"part": "output"}, {"job": JOB},
    ],
)  # fmt: skip
def test_schema_refuses_what_no_file_can_be(catalog: Catalog, wrong: dict[str, Any]) -> None:
    catalog.add(JOB, {}, 3, None, 1.0, user="alice")
    fields = {"id": "file-1", "user": "alice", "filename": "a", "size": 1, "sha256": "0" * 64, "purpose": "batch"}

    with pytest.raises(apsw.ConstraintError):
        catalog.files.add(FileRow(**{**fields, "created_at": 1.0, **wrong}))


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))
def test_id_of_an_input_tells_when_it_came(at_ms: int, random: bytes) -> None:
    file = input_id(at_ms, random)

    assert len(file) == len("file-") + 32
    assert made_at(file) == at_ms / 1000
    assert job_of(file) is None


@given(st.uuids().map(str), st.sampled_from(Part))
def test_id_of_an_output_tells_its_job(job: str, part: Part) -> None:
    assert job_of(result_id(job, part)) == job
    assert made_at(result_id(job, part)) is None


@given(st.text())
def test_any_name_can_be_shown_on_one_line(name: str) -> None:
    shown = shown_name(name)

    assert 1 <= len(shown) <= 255
    assert shown.isprintable() or all(character.isspace() or character.isprintable() for character in shown)
    assert "/" not in shown and "\\" not in shown and "\n" not in shown


def test_line_of_a_record_that_the_engine_refused_has_its_answer_and_no_error() -> None:
    body = b'{"error":{"message":"\\ud800 no","error":"a"},"n":1.0e5}'
    told = b'"custom_id":"error","response":{"status_code":400,"request_id":"r","body":%s},"error":%s}'

    assert error_tail(told % (body, b'{"code":"InferenceFailed","message":"m"}')) == told % (body, b"null")


def test_line_of_a_record_without_an_answer_keeps_its_error() -> None:
    tail = b'"custom_id":null,"response":null,"error":{"code":"batch_expired","message":"not reached"}}'

    assert error_tail(tail) == tail
