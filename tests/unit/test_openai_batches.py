"""Batches of the OpenAI API in a service of the test's own: what survives its end, and the tables behind them."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from freight.control.batchterms import BatchTerms, deadline_of
from freight.control.context import Checking
from freight.control.keptfiles import NewFile
from freight.core.job import FINAL, Event, State, Totals
from freight.core.openaibatch import (
    BATCH_FAILED,
    EMPTY_FILE,
    ENDPOINTS,
    FILE_TOO_LARGE,
    MODEL_NOT_AVAILABLE,
    MODEL_NOT_FOUND,
    PARAMS,
    STATUS,
    Batch,
    BatchRequest,
    batch_id,
    job_of,
    moments,
    request_counts,
)
from freight.core.record import INTAKE_CODES, PATHS
from freight.store.catalog import Catalog
from freight.store.folder import Locking
from freight.store.rows import JobRow
from tests.harness import ROOT
from tests.unit.services import MINE, PATIENCE_S, Office, open_office

GOOD = b'{"custom_id":"r%d","url":"/v1/chat/completions","body":{"model":"mine","messages":[]}}\n'


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    return open_office(tmp_path, monkeypatch)


def test_every_state_is_shown_as_the_contract_says() -> None:
    assert {state: status for state, status in STATUS.items()} == {
        State.VALIDATING: "validating",
        State.QUEUED: "in_progress",
        State.STARTING: "in_progress",
        State.SUSPENDED: "in_progress",
        State.RUNNING: "in_progress",
        State.FINALIZING: "finalizing",
        State.COMPLETED: "completed",
        State.FAILED: "failed",
        State.CANCELLING: "cancelling",
        State.CANCELLED: "cancelled",
        State.TIMED_OUT: "expired",
    }
    assert set(STATUS) == set(State)
    # Each status but the first has a time of its own in a batch.
    assert {f"{status}_at" for status in STATUS.values()} - set(Batch.__dataclass_fields__) == {"validating_at"}


def test_every_intake_code_and_endpoint_is_in_the_tables() -> None:
    assert set(PARAMS) == set(INTAKE_CODES)
    assert {path: endpoint for endpoint, path in PATHS.items()} == ENDPOINTS


def test_a_batch_is_known_by_its_own_id_alone() -> None:
    job = "01234567-89ab-4cde-8f01-23456789abcd"
    assert job_of(batch_id(job)) == job
    for other in (job, batch_id(job)[:-1], batch_id(job) + "0", batch_id(job).upper(), "batch_" + job, "", "batch_\n"):
        assert job_of(other) is None


def test_the_first_time_in_a_status_counts() -> None:
    reached = {State.RUNNING: 12.9, State.QUEUED: 10.5, State.STARTING: 11.0, State.FINALIZING: 20.0}
    assert moments(reached) == {"in_progress": 10, "finalizing": 20}


def test_requests_that_failed_are_not_completed() -> None:
    counts = request_counts(10, Totals(done=7, failed=2))
    assert (counts.total, counts.completed, counts.failed) == (10, 5, 2)
    assert request_counts(None, Totals()).total == 0


def row(api: str = "openai", epoch: int = 0, **terms: Any) -> JobRow:
    kept = BatchTerms("/v1/embeddings", "file", "1h", 3600.0, **terms)
    return JobRow("j", State.QUEUED, "", epoch, 0, 1000.0, {"more": kept.more()}, 1, None, api=api)


def test_a_window_ends_a_batch_only_where_it_is_enforced_and_nobody_wanted_it_to_go_on() -> None:
    assert deadline_of(row(is_enforced=True)) == 4600.0
    assert deadline_of(row()) is None
    assert deadline_of(row(is_enforced=True, epoch=1)) is None
    assert deadline_of(row(is_enforced=True, api="facility")) is None


def test_every_status_and_code_is_documented() -> None:
    page = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    codes = {MODEL_NOT_FOUND, MODEL_NOT_AVAILABLE, EMPTY_FILE, FILE_TOO_LARGE, BATCH_FAILED}
    for word in {*STATUS.values(), *codes, *ENDPOINTS, *State}:
        assert re.search(rf"(?<![\w/]){re.escape(word)}(?![\w/])", page), word


async def file_of(office: Office, content: bytes) -> str:
    async def chunks() -> AsyncIterator[bytes]:
        yield content

    service = office.service
    return (await service.files.receive(office.owner, chunks(), len(content), lambda: NewFile("in.jsonl"))).id


async def batch_of(office: Office, content: bytes, key: str | None = None, window: str = "24h") -> Batch:
    request = BatchRequest(
        input_file_id=await file_of(office, content), endpoint="/v1/chat/completions", completion_window=window
    )
    return await office.service.batches.create(office.owner, request, key)


async def until(office: Office, batch: Batch, status: str) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            now = await office.service.batches.retrieve(office.owner, batch.id)
            if now.status == status:
                return now
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("content", "status", "errors"),
    [
        (GOOD % 0 + GOOD % 1, "in_progress", []),
        (GOOD % 0 + b"{\n" + GOOD % 0, "failed", [("invalid_json", 2), ("duplicate_custom_id", 3)]),
        (GOOD.replace(b"mine", b"yours") % 0 + b"{\n", "failed", [("model_not_found", None), ("invalid_json", 2)]),
        (b"", "failed", [("empty_file", None)]),
    ],
)
def test_a_service_that_ends_before_the_file_was_read_comes_to_the_same_end(
    office: Office, monkeypatch: pytest.MonkeyPatch, content: bytes, status: str, errors: list[Any]
) -> None:
    made: list[Batch] = []

    async def die() -> None:
        # What is not begun is what a dying service leaves.
        monkeypatch.setattr(office.service._reading, "begin", lambda row, _: Checking(row))
        made.append(await batch_of(office, content))
        assert made[0].status == "validating"

    async def live() -> None:
        batch = await until(office, made[0], status)
        found = batch.errors.data if batch.errors else []
        assert [(each.code, each.line) for each in found] == errors
        assert batch.request_counts.total == (0 if errors else 2)

    async def see_again() -> None:
        batch = await office.service.batches.retrieve(office.owner, made[0].id)
        assert batch.status == status
        assert [(each.code, each.line) for each in (batch.errors.data if batch.errors else [])] == errors

    office.run(die, live, see_again)


def test_a_batch_expires_while_it_waits_in_the_queue(office: Office) -> None:
    office.configure("[openai]\nenforce_window = true")

    async def scenario() -> None:
        await office.submit("first")
        await office.started(1)
        batch = await until(office, await batch_of(office, GOOD % 0, window="1ms"), "expired")
        assert (batch.expired_at, batch.output_file_id) != (None, None)
        assert batch.error_file_id is not None
        assert office.state("first") not in FINAL

    office.run(scenario)


def test_a_batch_that_is_cancelled_while_its_file_is_read_never_runs(office: Office) -> None:
    async def scenario() -> None:
        free = threading.Event()
        for _ in range(2):  # All that could read it.
            office.context.scanners.submit(free.wait, PATIENCE_S)
        batch = await batch_of(office, GOOD % 0 + b"{\n")
        asked = await office.service.batches.cancel(office.owner, batch.id)
        assert (batch.status, asked.status) == ("validating", "cancelling")
        free.set()
        batch = await until(office, batch, "cancelled")
        assert batch.cancelling_at and (batch.errors, batch.error_file_id) == (None, None)
        assert await office.service.batches.cancel(office.owner, batch.id) == batch

    office.run(scenario)


def test_a_batch_that_goes_on_has_the_times_of_its_new_life(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.db", Locking.LOCAL)
    ids = [f"{number}" for number in range(3)]
    for number, job in enumerate(ids):
        row = catalog.add(job, {}, 1, None, 1.0)
        for at, event in ((2.0, Event.ACCEPTED), (3.0, Event.WORKER_GRANTED), (4.0, Event.TIME_RAN_OUT)):
            row = catalog.happened(row, event, at + number)
    catalog.happened(row, Event.CONTINUED, 9.0)
    reached = catalog.timeline.reached([*ids[1:], "gone"])
    assert reached == {
        "1": {State.QUEUED: 3.0, State.STARTING: 4.0, State.TIMED_OUT: 5.0},
        "2": {State.QUEUED: 9.0},
        "gone": {},
    }
    catalog.close()


def test_a_batch_tells_who_its_metadata_names_of_its_end(office: Office, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + "A" * 43 + "=\n")
    secret.chmod(0o600)
    office.configure(f'[webhooks]\nhosts = ["hooks.test"]\nsecret_file = "{secret}"')

    async def scenario() -> None:
        asked = BatchRequest(
            input_file_id=await file_of(office, GOOD % 0), endpoint="/v1/chat/completions", completion_window="24h",
            metadata={"notify": "https://hooks.test/a"},
        )  # fmt: skip
        batch = await office.service.batches.create(office.owner, asked, None)
        job = job_of(batch.id) or ""
        assert office._catalog.get(job).spec["request"]["notify"] == "https://hooks.test/a"
        assert batch.metadata == {"notify": "https://hooks.test/a"}

    office.run(scenario)


def test_a_key_finds_its_batch_though_the_settings_have_changed(office: Office) -> None:
    async def scenario() -> None:
        file = await file_of(office, GOOD.replace(b"mine", b"yours") % 0)
        request = BatchRequest(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
        made = await office.service.batches.create(office.owner, request, "key")
        await until(office, made, "failed")
        office.configure("default_model = 'mine'\n[openai]\nenforce_window = true", entry='aliases = ["yours"]')
        again = await office.service.batches.create(office.owner, request, "key")
        assert (again.id, again.status) == (made.id, "failed")

    office.run(scenario)


def test_a_record_that_names_no_model_runs_on_the_default_one(office: Office) -> None:
    async def scenario() -> None:
        nameless = re.sub(rb'"model":"mine",', b"", GOOD) % 0
        assert (await batch_of(office, nameless)).model == MINE

    office.run(scenario)


def test_what_a_record_names_is_kept_short_and_as_text(office: Office) -> None:
    async def scenario() -> None:
        for name in (b"\\ud800", b"n" * 100_000):
            batch = await until(office, await batch_of(office, GOOD.replace(b"mine", name) % 0), "failed")
            assert batch.model and len(batch.model) <= 200
            assert batch.errors and len(batch.errors.data[0].message) < 1000

    office.run(scenario)


def test_a_failed_batch_tells_of_its_first_hundred_bad_lines(office: Office) -> None:
    async def scenario() -> None:
        batch = await until(office, await batch_of(office, GOOD % 0 + b"{\n" * 150), "failed")
        assert batch.errors is not None
        assert [each.line for each in batch.errors.data] == list(range(2, 102))

    office.run(scenario)
