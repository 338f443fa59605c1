"""Asking about jobs."""

from pathlib import Path

import pytest

from freight.core.account import Account
from freight.core.job import State
from freight.core.openaibatch import batch_id
from freight.errors import NoSuchJob
from freight.store.results import Failure
from freight.store.rows import JobRow
from tests.unit.services import Office, open_office


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    return open_office(tmp_path, monkeypatch)


def test_results_of_an_ended_job_are_opened_for_one_of_many_questions_and_again_when_it_went_on(office: Office) -> None:
    opened: list[str] = []

    async def scenario() -> None:
        finder = office.service.finder
        failures = finder.failures

        def noted(row: JobRow) -> list[Failure]:
            opened.append(row.id)
            return failures(row)

        await office.submit("one")
        await office.serving("one")
        await office.service.cancel(office.owner, "one")
        for end in office.hand.ends.values():
            end.set()
        await office.until_state("one", State.CANCELLED)
        finder.failures = noted  # type: ignore[method-assign]
        for _ in range(3):
            await finder.status(office.owner, "one")
        assert opened == [office.id_of("one")]
        await office.service.resume(office.owner, "one")
        opened.clear()
        for _ in range(2):
            await finder.status(office.owner, "one")
        assert opened == [office.id_of("one")] * 2

    office.run(scenario)


def test_job_is_found_by_what_openais_sdk_calls_it_and_by_none_is_anothers(office: Office) -> None:
    async def scenario() -> None:
        await office.submit("one")
        batch = batch_id(office.id_of("one"))
        assert (await office.service.finder.find(office.owner, batch)).name == "one"
        for who, name in ((Account("mallory"), batch), (office.owner, batch[:-1]), (office.owner, batch_id("0" * 32))):
            with pytest.raises(NoSuchJob):
                await office.service.finder.find(who, name)

    office.run(scenario)
