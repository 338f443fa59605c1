"""What a job has to give: the ends of logs, and a line for each record whatever became of it."""

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freight.control import streams as streams_module
from freight.control.inputs import InputFile
from freight.control.intake import Limits, scan
from freight.control.output import Only
from freight.control.streams import Streams
from freight.core.answer import Answer, answer_line, error_line
from freight.core.job import State
from freight.core.record import Rules
from freight.store.database import Sharing
from freight.store.folder import Locking
from freight.store.results import Results
from freight.store.rows import JobRow

COUNT = 6


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        (b"a\nb\nc\n", 0, b""),
        (b"a\nb\nc\n", 1, b"c\n"),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc\n", 3, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"a\nb\nc\n", None, b"a\nb\nc\n"),
        (b"a\nb\nc", 0, b""),
        (b"a\nb\nc", 1, b"c"),
        (b"a\nb\nc", 3, b"a\nb\nc"),
        (b"a\n\n\n", 1, b"\n"),
        (b"a\n\n\n", 2, b"\n\n"),
        (b"\n", 1, b"\n"),
        (b"", 0, b""),
        (b"", 5, b""),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 3, 1 << 18])
def test_the_last_lines_of_a_log_are_those_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, lines: int | None, expected: bytes, block: int
) -> None:
    monkeypatch.setattr(streams_module, "_PIECE_BYTES", block)
    path = tmp_path / "log"
    path.write_bytes(text)

    assert text[streams_module._tail_start(path, lines) :] == expected


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_lines_longer_than_a_block_are_whole(tmp_path: Path, lines: int) -> None:
    long = b"x" * 700_000 + b"\n"
    path = tmp_path / "log"
    path.write_bytes(long * 3)

    assert streams_module._tail_start(path, lines) == (3 - lines) * len(long)


@pytest.mark.parametrize("lines", [None, 0, 5])
def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path, lines: int | None) -> None:
    assert streams_module._tail_start(tmp_path / "log", lines) == 0
    assert streams_module._read_from(tmp_path / "log", 0) == b""


@pytest.fixture
def streams(tmp_path: Path) -> Generator[Streams]:
    """A job of COUNT records: 1 was answered, 3 failed, and the rest was not reached."""
    path = tmp_path / "input.jsonl"
    path.write_text("".join(f'{{"custom_id":"r{i}","body":{{"messages":[]}}}}\n' for i in range(COUNT)))
    file = InputFile(path, "the input")
    index = scan(file, Rules(), Limits(10_000), lambda problems: None)
    file.close()
    index.save(tmp_path / "index.npz")
    writer = Results(tmp_path / "results.db", Locking.LOCAL, Sharing.WRITER)
    answer = answer_line(1, b'"r1"', 200, "r", Answer(b"{}", 1, 1, 0, False))
    writer.put([answer, error_line(3, b'"r3"', "request_timeout", "slow")], 0)

    def open_results(job: str, sharing: Sharing) -> Results:
        return Results(tmp_path / "results.db", Locking.LOCAL, sharing)

    folder = SimpleNamespace(
        open_results=open_results, input=lambda job: path, index=lambda job: tmp_path / "index.npz"
    )
    context: Any = SimpleNamespace(folder=folder, stopping=asyncio.Event())
    yield Streams(context, SimpleNamespace())  # type: ignore[arg-type]
    writer.close()


def read(streams: Streams, state: State, only: Only | None) -> list[tuple[str, str | None]]:
    """Return the custom_id and the error's code of each line, which must be the record's."""
    row = JobRow("job", state, "", 0, 0, 1.0, {}, COUNT, None)
    lines = [json.loads(line) for line in b"".join(streams._pieces(row, only, streams._open(row, only))).splitlines()]
    assert all(line["id"] == f"job-{line['custom_id'][1:]}" for line in lines)
    return [(line["custom_id"], line["error"]["code"] if line["error"] else None) for line in lines]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State.CANCELLED, "batch_cancelled"),
        (State.TIMED_OUT, "batch_expired"),
        (State.FAILED, "batch_failed"),
        (State.COMPLETED, "batch_failed"),
    ],
)
def test_records_that_were_not_reached_say_how_their_job_ended(streams: Streams, state: State, code: str) -> None:
    reached = {1: None, 3: "request_timeout"}
    whole = [(f"r{i}", reached.get(i, code)) for i in range(COUNT)]

    assert read(streams, state, None) == whole
    assert read(streams, state, Only.OK) == [whole[1]]
    assert read(streams, state, Only.FAILED) == [whole[0], *whole[2:]]


@pytest.mark.parametrize("state", [State.RUNNING, State.QUEUED, State.CANCELLING])
def test_an_unfinished_job_gives_what_is_done_and_no_more(streams: Streams, state: State) -> None:
    assert read(streams, state, None) == [("r1", None), ("r3", "request_timeout")]
    assert read(streams, state, Only.OK) == [("r1", None)]
    assert read(streams, state, Only.FAILED) == [("r3", "request_timeout")]


def test_a_stream_that_is_given_up_closes_what_it_has_open(streams: Streams) -> None:
    row = JobRow("job", State.FAILED, "", 0, 0, 1.0, {}, COUNT, None)
    pieces = streams._pieces(row, None, streams._open(row, None))
    assert next(pieces)

    pieces.close()  # type: ignore[attr-defined]
    assert list(pieces) == []
