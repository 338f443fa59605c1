"""Inputs on their way into jobs of the service: checked beside all else, cancelled meanwhile, refused, sent again."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from freight.control import reading, submission
from freight.control.intake import scan
from freight.core.job import State
from freight.core.view import JobRequest
from freight.errors import Conflict, OperationError
from tests.harness import code
from tests.unit.planes import COUNT
from tests.unit.services import MINE, PATIENCE_S, Office

# More than the service has threads for questions.
MANY = 9


def test_many_inputs_being_checked_keep_neither_leases_nor_status_waiting(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def slow(*arguments: Any) -> Any:
        free.wait(PATIENCE_S)
        return scan(*arguments)

    async def scenario() -> None:
        await office.submit("going")
        worker = await office.serving("going")
        await office.until_state("going", State.RUNNING)
        monkeypatch.setattr(reading, "scan", slow)
        checks = [asyncio.create_task(office.submit(f"large-{number}")) for number in range(MANY)]
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await office.until(lambda: len(office.context.checking) == MANY)
                orders = await office.say(worker, "going", want=3)
                assert [lease.index for lease in orders.leases] == [0, 1, 2]
                assert (await office.service.finder.status(office.owner, "large-0")).state == State.VALIDATING
        finally:
            free.set()
        await asyncio.gather(*checks)

    office.run(scenario)


def test_job_cancelled_while_its_input_is_checked_ends_so_at_the_next_start(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def until_stopped(*arguments: Any) -> Any:
        begun.set()
        while not arguments[4]():
            time.sleep(0.005)
        return scan(*arguments)

    async def cancelled() -> None:
        monkeypatch.setattr(reading, "scan", until_stopped)
        submitting = asyncio.create_task(office.submit("a"))
        await office.until(begun.is_set)
        assert (await office.service.cancel(office.owner, "a")).state == State.CANCELLING
        office.service.stop()
        with pytest.raises(OperationError, match="goes on at its next start"):
            await submitting
        monkeypatch.setattr(reading, "scan", scan)

    async def resumed() -> None:
        await office.until_state("a", State.CANCELLED)
        lines = await office.lines("a")
        assert [(line["custom_id"], code(line)) for line in lines] == [
            (f"r{number}", "batch_cancelled") for number in range(COUNT)
        ]
        await office.service.resume(office.owner, "a")
        await office.complete("a")
        assert [code(line) for line in await office.lines("a")] == [None] * COUNT

    office.run(cancelled, resumed)


def test_input_that_cannot_be_moved_into_its_job_is_an_error_in_words_and_leaves_no_job(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(submission, "sync_folder", refuse)
            with pytest.raises(OperationError, match="the job cannot be kept: Too many open files"):
                await office.submit("a")
        assert list((office.data / "batch").iterdir()) == []
        assert not office.has("a")
        await office.submit("a")

    office.run(scenario)


def test_same_request_from_another_place_is_known_by_its_key(office: Office) -> None:
    async def sent(**fields: Any) -> tuple[str, bool]:
        upload = await office.upload()
        made = await office.service.submit(office.owner, JobRequest(upload=upload.id, model=MINE, **fields), "key")
        return made.job.id, made.is_new

    async def scenario() -> None:
        job, is_new = await sent(file="/home/me/in.jsonl", typed=MINE)
        assert is_new
        assert await sent(file="in.jsonl", typed="./mine") == (job, False)
        assert await sent() == (job, False)
        with pytest.raises(Conflict):
            await sent(workers=2)

    office.run(scenario)
