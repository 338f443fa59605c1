"""What a service does beside running jobs: it tidies up, goes on with ended jobs, and keeps its settings' secrets."""

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from freight.control.servicefolder import ServiceFolder
from freight.core.job import FINAL, State
from freight.store.database import StorageFull
from tests.httpserver import MODELS, Reply, http_server
from tests.unit.services import PATIENCE_S, Office

SECRET = "tok-9f31c7-amber"


def test_error_in_clearing_up_is_said_and_the_next_round_goes_on(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.configure('retention = "0.1s"')

    async def scenario() -> None:
        delete = office.context.catalog.delete
        tries: list[str] = []

        def full_once(job: str) -> None:
            tries.append(job)
            if len(tries) == 1:
                raise StorageFull("no space left")
            delete(job)

        office.context.catalog.delete = full_once  # type: ignore[method-assign]
        await office.submit("a")
        job = office.id_of("a")
        await office.complete("a")
        await office.until(lambda: not office.has("a"))
        await office.until(lambda: not (office.data / "batch" / job).exists())
        assert tries == [job, job]

    office.run(scenario)
    assert "clearing up did not succeed, and is tried again: no space left" in caplog.text


def test_upload_that_becomes_a_jobs_while_old_ones_are_cleared_is_no_error(tmp_path: Path) -> None:
    folder = ServiceFolder(tmp_path)
    old = tmp_path / "old.0"
    old.touch()
    os.utime(old, (0, 0))
    there = [tmp_path / "moved.0", old]
    folder.uploads = SimpleNamespace(iterdir=lambda: iter(there))  # type: ignore[assignment]

    folder.tidy_uploads(3600.0)

    assert not old.exists()


@pytest.mark.parametrize("verb", ["resume", "retry"])
def test_going_on_with_a_job_whose_endpoint_is_silent_keeps_no_other_job_waiting(office: Office, verb: str) -> None:
    silent, asked, free = threading.Event(), threading.Event(), threading.Event()

    def models(_: str) -> Reply:
        if silent.is_set():
            asked.set()
            free.wait(PATIENCE_S)
        return Reply(200, MODELS)

    async def scenario(url: str) -> None:
        await office.submit("far", model=url)
        worker = await office.started(1)
        await office.service.cancel(office.owner, "far")
        office.hand.ends[worker].set()
        await office.until_state("far", State.CANCELLED)
        silent.set()
        going = asyncio.create_task(getattr(office.service, verb)(office.owner, "far"))
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await office.until(asked.is_set)
                await office.submit("near")
                worker = await office.started(2)
                await office.service.cancel(office.owner, "near")
                office.hand.ends[worker].set()
                await office.until_state("near", State.CANCELLED)
        finally:
            free.set()
        assert (await going).state not in FINAL

    with http_server(models, lambda _: Reply()) as url:
        office.run(lambda: scenario(url))


def test_variables_of_a_model_are_kept_in_no_file_and_must_be_the_same_when_a_job_goes_on(office: Office) -> None:
    office.configure(token=SECRET)

    async def submitted() -> None:
        await office.submit("a")
        await office.submit("b")
        assert office.holds(SECRET) == []

    async def gone_on() -> None:
        worker = await office.started(1)
        setup = (await office.say(worker)).setup
        assert setup is not None and setup.model.entry.env == {"TOKEN": SECRET}
        assert setup.job == office.id_of("a")
        await office.say(worker, "a")
        await office.finish(worker, "a")
        office.hand.ends[worker].set()
        await office.until_state("a", State.COMPLETED)

    async def changed() -> None:
        await office.until_state("b", State.FAILED)
        status = await office.service.finder.status(office.owner, "b")
        assert "the variables (env) of model mine are not those that the job was submitted with" in status.reason
        assert "other" not in status.reason and SECRET not in status.reason
        assert not office.hand.places

    office.run(submitted, gone_on)
    assert office.holds(SECRET) == []
    office.configure(token="another")
    office.run(changed)
    assert office.holds(SECRET) == office.holds("another") == []
