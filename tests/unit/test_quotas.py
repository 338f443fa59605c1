"""What counts as stored, while a job runs and after."""

import os
from pathlib import Path

import pytest

from freight.control import quotas
from freight.core.account import Account
from freight.core.messages import PROTOCOL, Phase, Report
from freight.core.view import JobRequest
from freight.errors import TooMany
from tests.unit.planes import done
from tests.unit.services import MINE, Office, open_office

ALICE = Account("alice")


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    return open_office(tmp_path, monkeypatch)


async def run_job(office: Office) -> Path:
    """Have a job of Alice's that runs and has a result; return its folder."""
    upload = await office.upload(ALICE)
    made = await office.service.submit(ALICE, JobRequest(upload=upload.id, name="a", model=MINE), None)
    worker = await office.serving_of("alice", "a")
    for number, more in ((3, {"want": 2}), (4, {"done": done(0)})):
        report = Report(PROTOCOL, worker, number, Phase.READY, job=made.job.id, plane=office.plane.id, **more)
        await office.hand.say(report)
    return office.context.folder.job(made.job.id)


def test_results_of_a_running_job_count_those_of_its_log_too(office: Office) -> None:
    async def scenario() -> None:
        folder = await run_job(office)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}

        assert sizes["results.db-wal"] > 0
        assert {"input.jsonl", "results.db", "results.db-wal"} <= sizes.keys()
        assert await office.service._quotas.stored("alice") == sum(sizes.values())

    office.run(scenario)


def test_what_is_linked_into_several_places_counts_once(office: Office, tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = await run_job(office)
        before = await office.service._quotas.stored("alice")
        size = (folder / "input.jsonl").stat().st_size
        os.link(folder / "input.jsonl", tmp_path / "other")

        assert await office.service._quotas.stored("alice") == before - size + size // 2

    office.run(scenario)


def test_uploads_that_nobody_uses_are_limited_in_number(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MOST_UPLOADS", 2)

    async def scenario() -> None:
        first, _ = [await office.upload(ALICE) for _ in range(2)]
        with pytest.raises(TooMany, match="2 uploads of which no job was made"):
            await office.upload(ALICE)
        await office.upload(Account("bob"))
        for _ in range(3):
            await office.upload()

        office.service.drop_upload(ALICE, first.id)
        used = await office.upload(ALICE)
        await office.service.submit(ALICE, JobRequest(upload=used.id, name="a", model=MINE), None)
        await office.upload(ALICE)

    office.run(scenario)
