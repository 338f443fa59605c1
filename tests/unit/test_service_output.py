"""A results file of the service while it is written: what goes on beside it, and what may happen to its job then."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freight.control import destination
from freight.control.output import write_aside
from freight.core.job import State
from tests.harness import Json, parse_lines
from tests.unit.planes import COUNT, done
from tests.unit.services import PATIENCE_S, Office


class Writing:
    """Keeps results files from being written beyond their first line until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        monkeypatch.setattr(destination, "write_aside", self._write)

    def _write(self, path: Path, job: str, lines: Iterator[tuple[int, bytes]], records: int) -> Any:
        def slowly() -> Iterator[tuple[int, bytes]]:
            yield next(lines)
            self.begun.set()
            self.free.wait(PATIENCE_S)
            yield from lines

        return write_aside(path, job, slowly(), records)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(monkeypatch)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder for results files."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


async def until_writing(office: Office, writing: Writing, target: Path) -> None:
    """Run a job until its results file is being written."""
    await office.submit("slow", output=str(target))
    worker = await office.serving("slow")
    await office.finish(worker, "slow")
    office.hand.ends[worker].set()
    await office.until(writing.begun.is_set)
    assert [path.suffix for path in files_in(target)] == [".partial"]


def files_in(target: Path) -> list[Path]:
    """Return the files there are, whole or not."""
    return list(target.iterdir())


def written(target: Path) -> list[Json]:
    """Return the lines of the one results file that there is."""
    [path] = files_in(target)
    return parse_lines(path.read_bytes())


def become_a_file(folder: Path) -> None:
    """Put a file in the place of an empty folder."""
    folder.rmdir()
    folder.write_text("mine")


def test_other_jobs_go_on_and_are_cancelled_while_a_results_file_is_written(
    office: Office, writing: Writing, target: Path
) -> None:
    async def scenario() -> None:
        await until_writing(office, writing, target)
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                await office.submit("other")
                worker = await office.serving("other", 2)
                await office.until_state("other", State.RUNNING)
                await office.say(worker, "other", want=2)
                await office.say(worker, "other", done=done(0, 1))
                assert (await office.service.finder.status(office.owner, "other")).done == 2
                assert (await office.service.cancel(office.owner, "other")).state == State.CANCELLING
                office.hand.ends[worker].set()
                await office.until_state("other", State.CANCELLED)
                assert office.state("slow") is State.FINALIZING
        finally:
            writing.free.set()
        await office.until_state("slow", State.COMPLETED)
        assert [line["custom_id"] for line in written(target)] == [str(number) for number in range(COUNT)]

    office.run(scenario)


def test_job_cancelled_while_its_results_file_is_written_ends_with_a_whole_file_or_none(
    office: Office, writing: Writing, target: Path
) -> None:
    async def scenario() -> None:
        await until_writing(office, writing, target)
        try:
            async with asyncio.timeout(PATIENCE_S / 2):
                assert (await office.service.cancel(office.owner, "slow")).state == State.CANCELLING
        finally:
            writing.free.set()
        await office.until_state("slow", State.CANCELLED)
        if files_in(target):
            assert len(written(target)) == COUNT
        assert len(await office.lines("slow")) == COUNT

    office.run(scenario)


def test_job_whose_output_folder_has_become_a_file_fails_alone(office: Office, target: Path) -> None:
    async def scenario() -> None:
        await office.submit("lost", output=str(target))
        worker = await office.serving("lost")
        become_a_file(target)
        await office.finish(worker, "lost")
        office.hand.ends[worker].set()
        await office.until_state("lost", State.FAILED)
        assert len(await office.lines("lost")) == COUNT
        await office.submit("other")
        await office.serving("other", 2)

    office.run(scenario)
    assert target.read_text() == "mine"


def test_disk_that_fails_where_results_go_ends_the_job_alone(
    office: Office, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        await office.submit("lost", output=str(target))
        worker = await office.serving("lost")
        with monkeypatch.context() as patch:
            for part in ("mark", "drop"):
                patch.setattr(destination._AtPath, part, fails)
            await office.finish(worker, "lost")
            office.hand.ends[worker].set()
            await office.until_state("lost", State.FAILED)
        assert len(await office.lines("lost")) == COUNT
        await office.submit("other")
        await office.serving("other", 2)

    office.run(scenario)


def test_stop_while_a_results_file_is_written_leaves_nothing_and_the_next_service_writes_it(
    office: Office, writing: Writing, target: Path
) -> None:
    async def stopped() -> None:
        await until_writing(office, writing, target)
        office.service.stop()
        writing.free.set()

    async def started() -> None:
        await office.until_state("slow", State.COMPLETED)
        assert len(written(target)) == COUNT
        assert not office.hand.places

    office.run(stopped)
    assert files_in(target) == []
    office.run(started)
