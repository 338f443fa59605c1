"""Results and progress files below a granted root: whole or not at all, and the latest news last."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freight.control.below import FileBelow
from freight.control.destination import Standing, Writing
from freight.control.output import Written
from freight.core.job import State, Totals
from freight.errors import NotAllowed, OperationError
from freight.store.database import StorageFull
from tests.harness import Json


@pytest.fixture
def place(tmp_path: Path) -> FileBelow:
    """A folder of a job's own."""
    return FileBelow(tmp_path, tmp_path / "out" / "batch", "x.results.jsonl", "x.progress.json")


def lines(*texts: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the rests of lines."""
    return ((number, b'"n":"%s"}' % text) for number, text in enumerate(texts))


def write(place: FileBelow, *texts: bytes, replace: bool = False) -> Written:
    """Write a results file and put it in its place."""
    writing = place.begin()
    try:
        written = writing.write("job", lines(*texts), len(texts))
        writing.put(replace)
    finally:
        writing.drop()
    return written


def names(folder: Path) -> list[str]:
    """Return what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_file_is_there_whole_once_it_is_put_and_leaves_nothing_else(place: FileBelow) -> None:
    writing = place.begin()
    written = writing.write("job", lines(b"a", b"b"), 2)
    assert [Path(name).suffix for name in names(place.folder)] == [".partial"]
    writing.put(False)
    writing.drop()
    assert names(place.folder) == ["x.results.jsonl"]
    path = place.folder / place.name
    assert path.read_bytes() == b'{"id":"job-0","n":"a"}\n{"id":"job-1","n":"b"}\n'
    assert written.matches(path)


def test_file_that_is_dropped_leaves_what_was_there(place: FileBelow) -> None:
    write(place, b"first")
    writing = place.begin()
    writing.write("job", lines(b"second"), 1)
    writing.drop()
    assert names(place.folder) == ["x.results.jsonl"]
    assert b"first" in (place.folder / place.name).read_bytes()


def test_in_a_folder_that_is_not_the_jobs_own_only_what_the_job_wrote_is_replaced(tmp_path: Path) -> None:
    place = FileBelow(tmp_path, tmp_path, "n-results.jsonl")
    written = write(place, b"a")
    outcome: dict[str, Any] = {"outputs": [{"size": written.size, "sha256": written.sha256}]}

    def mark(writing: Writing) -> object:
        try:
            return writing.mark(outcome)
        finally:
            writing.drop()

    assert place.is_taken()
    assert mark(place.begin()) == outcome["outputs"][0]
    write(place, b"b", replace=True)
    assert mark(place.begin()) is None
    with pytest.raises(OperationError, match="there is something at"):
        write(place, b"c")
    assert b'"b"' in (tmp_path / "n-results.jsonl").read_bytes()
    (tmp_path / "n-results.jsonl").unlink()
    (tmp_path / "n-results.jsonl").symlink_to("nowhere")
    assert mark(place.begin()) is None
    with pytest.raises(OperationError, match="there is something at"):
        write(place, b"d")
    assert names(tmp_path) == ["n-results.jsonl"]


def test_two_writers_of_one_name_do_not_get_into_each_others_file(tmp_path: Path) -> None:
    first, second = (FileBelow(tmp_path, tmp_path, "n-results.jsonl", writer=job).begin() for job in ("one", "two"))
    first.write("one", lines(b"a"), 1)
    second.write("two", lines(b"b"), 1)
    first.put(False)
    with pytest.raises(OperationError, match="there is something at"):
        second.put(False)
    first.drop()
    second.drop()
    assert (tmp_path / "n-results.jsonl").read_bytes() == b'{"id":"one-0","n":"a"}\n'
    assert names(tmp_path) == ["n-results.jsonl"]


def _full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename"])
def test_full_disk_is_told_as_such_whenever_it_is_met(
    place: FileBelow, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_full(path: Any, flags: int, *more: Any, **named: Any) -> int:
        return _full() if flags & os.O_CREAT else opened(path, flags, *more, **named)

    monkeypatch.setattr(os, call, open_full if call == "open" else _full)
    with pytest.raises(StorageFull, match="no space left for the results"):
        write(place, b"a")
    monkeypatch.undo()
    assert not place.folder.exists() or names(place.folder) == []
    write(place, b"a")


def test_what_cannot_be_written_is_found_out_before_and_leaves_nothing(place: FileBelow, tmp_path: Path) -> None:
    place.check()
    assert names(place.folder) == []
    (tmp_path / "out" / "link").symlink_to("/var")
    with pytest.raises(NotAllowed, match="leads out"):
        FileBelow(tmp_path, tmp_path / "out" / "link", "x").check()


def standing(at: float, done: int, state: State = State.RUNNING) -> Standing:
    return Standing(state, 3, Totals(done=done, failed=1, input_tokens=5, output_tokens=2), at)


def said(place: FileBelow) -> Json:
    return json.loads((place.folder / "x.progress.json").read_text())


def test_progress_file_has_the_latest_news_whoever_tells_last(place: FileBelow) -> None:
    assert place.tell("job", standing(10.0, 2))
    assert said(place).pop("updated_at")
    assert said(place).items() >= {
        "batch_id": "job", "status": "running", "lines_total": 3, "lines_processed": 2, "num_responses": 1,
        "num_failed": 1, "total_tokens": 7,
    }.items()  # fmt: skip
    assert place.tell("job", standing(12.0, 3, State.COMPLETED))
    assert place.tell("job", standing(11.0, 2))
    assert said(place)["status"] == "completed"


def test_progress_file_is_written_only_where_something_has_changed(place: FileBelow) -> None:
    path = place.folder / "x.progress.json"
    place.tell("job", standing(10.0, 2))
    first = path.stat().st_ino, path.read_text()
    place.tell("job", standing(11.0, 2))
    assert (path.stat().st_ino, path.read_text()) == first
    place.tell("job", standing(12.0, 3))
    assert path.read_text() != first[1]


def test_progress_file_that_cannot_be_written_is_tried_again(place: FileBelow, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    assert not place.tell("job", standing(10.0, 2))
    (tmp_path / "out").unlink()
    assert place.tell("job", standing(10.0, 2))
    assert said(place)["lines_processed"] == 2
