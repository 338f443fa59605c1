"""Jobs on their way from the disk into the queue."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freight.control.inputs import InputFile
from freight.control.intake import NO_WISHES, Limits, Wishes, scan
from freight.control.jobrun import JobOptions
from freight.control.servicefolder import ServiceFolder
from freight.control.shelf import Shelf, options_of, spec_of
from freight.core.job import State
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Rules
from freight.core.view import JobRequest
from freight.store.database import Sharing
from freight.store.rows import JobRow

COUNT = 3
MODEL = ModelSpec("m", ModelEntry(engine=EngineName.ENDPOINT, source="http://a"), "m", None, None, frozenset(), {})


def laid_out(tmp_path: Path, wishes: Wishes = NO_WISHES) -> tuple[Shelf, JobRow]:
    """Return a shelf with one job of COUNT records on it."""
    folder = ServiceFolder(tmp_path)
    folder.job("j").mkdir(parents=True)
    folder.input("j").write_text("".join(f'{{"custom_id":"r{n}","body":{{"messages":[]}}}}\n' for n in range(COUNT)))
    file = InputFile(folder.input("j"), "the input")
    scan(file, Rules(), Limits(10_000), lambda problems: None, wishes=wishes).save(folder.index("j"))
    file.close()
    folder.open_results("j", Sharing.WRITER).close()

    async def look(call: Any, *arguments: Any) -> Any:
        return call(*arguments)

    def no_events(_: str) -> list[object]:
        return []

    context: Any = SimpleNamespace(
        folder=folder,
        look=look,
        in_thread=look,
        reader=SimpleNamespace(events=no_events),
        writer=None,
        threads=None,
        devices=(),
    )
    spec = msgspec.json.decode(msgspec.json.encode(spec_of(JobRequest(upload="", name="n"), MODEL, "0", 0)))
    return Shelf(context), JobRow("j", State.QUEUED, "", 0, 0, 1.0, spec, COUNT, None, "n")


def test_a_job_in_the_queue_knows_what_is_left_of_it(tmp_path: Path) -> None:
    shelf, row = laid_out(tmp_path)

    waiting = asyncio.run(shelf.waiting(row))

    assert (waiting.failure, waiting.left, waiting.view().broken) == ("", COUNT, "")


def test_a_job_in_the_queue_knows_how_many_of_its_records_get_the_answer_of_another(tmp_path: Path) -> None:
    shelf, row = laid_out(tmp_path, Wishes(dedupe=True))

    view = asyncio.run(shelf.waiting(row)).view()

    assert (view.left, view.twins) == (COUNT, COUNT - 1)


def test_a_job_is_run_with_every_option_of_its_request(tmp_path: Path) -> None:
    _, row = laid_out(tmp_path)
    asked = JobOptions(3, 4.0, 5.0, 6, 0, "input", dedupe=True)
    row.spec["request"].update(asdict(asked), gpus=None)

    assert options_of(row, MODEL, ()) == asked


@pytest.mark.parametrize("name", ["results.db", "index.npz"])
@pytest.mark.parametrize("content", [None, b"", b"garbage" * 2000])
def test_a_job_whose_files_cannot_be_read_is_put_into_the_queue_to_fail_there(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    shelf, row = laid_out(tmp_path)
    path = tmp_path / "batch" / "j" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    waiting = asyncio.run(shelf.waiting(row))

    assert waiting.view().broken
