"""Parts of a results file: the same bytes as of the whole, and no more read than that."""

from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.control import layout as layout_module
from freight.control.layout import Render, Source, measured, part_of
from freight.control.output import Only, whole_lines
from freight.core.answer import Answer, answer_line, error_line
from freight.errors import OperationError
from freight.store import results as results_module
from freight.store.database import Sharing
from freight.store.folder import Locking
from freight.store.results import Results

JOB = "job"
RECORDS = 137


class Reader(Results):
    """Results that count the bytes of the rows that are read."""

    read = 0

    def pages(self, *where: object) -> Generator[list[tuple[int, bytes, int]]]:  # type: ignore[override]
        for page in super().pages(*where):  # type: ignore[arg-type]
            self.read += sum(len(tail) for _, tail, _ in page)
            yield page


@pytest.fixture(params=[0, 3], ids=["all were reached", "some were not"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Reader]:
    """Results of which every fifth failed; of which every third may be missing."""
    writer = Results(tmp_path / "results.db", Locking.LOCAL, Sharing.WRITER)
    lines = [
        error_line(i, b'"r%d"' % i, "request_timeout", "slow")
        if i % 5 == 0
        else answer_line(i, b'"r%d"' % i, 200, "r", Answer(b'"%s"' % (b"x" * (i * 7 % 90)), 1, 1, 0, False))
        for i in range(RECORDS)
        if not request.param or i % request.param
    ]
    writer.put(lines, 0)
    made = Reader(tmp_path / "results.db", Locking.LOCAL, Sharing.READER)
    yield made
    made.close()
    writer.close()


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "BLOCK", 10)
    monkeypatch.setattr(results_module, "PAGE_ROWS", 4)


def missing(index: int) -> tuple[bytes | None, str, str]:
    return b'"r%d"' % index, "batch_cancelled", "not reached"


def longer(tail: bytes) -> bytes:
    return tail.replace(b"slow", b"very slow")


def source_of(reader: Reader, only: Only | None, render: Render | None) -> Source:
    return Source(JOB, RECORDS, reader, missing, only, render)


SHOWN = [(None, None), (Only.OK, None), (Only.FAILED, None), (None, longer), (Only.FAILED, longer)]


@pytest.mark.parametrize(("only", "render"), SHOWN)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.data())
def test_part_has_the_bytes_of_the_whole(
    reader: Reader, only: Only | None, render: Render | None, data: st.DataObject
) -> None:
    source = source_of(reader, only, render)
    whole = b"".join(whole_lines(JOB, source.rests()))
    layout = measured(source)
    assert layout.size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert b"".join(part_of(source, layout, range(start, stop), reader.version())) == whole[start:stop]


@pytest.mark.parametrize("only", [None, Only.OK, Only.FAILED])
def test_what_is_skipped_is_not_read(reader: Reader, only: Only | None) -> None:
    source = source_of(reader, only, None)
    layout = measured(source)
    assert reader.read == 0
    line = b"".join(part_of(source, layout, range(layout.size - 1, layout.size), reader.version()))
    assert line == b"\n"
    # No more than the one page in which it is.
    assert 0 < reader.read < 4 * 200


def test_part_of_what_changed_meanwhile_is_not_given(tmp_path: Path, reader: Reader) -> None:
    source = source_of(reader, None, None)
    layout, version = measured(source), reader.version()
    part = part_of(source, layout, range(layout.size), version)
    assert next(part)
    writer = Results(tmp_path / "results.db", Locking.LOCAL, Sharing.WRITER)
    writer.put([answer_line(5, b'"r5"', 200, "r", Answer(b"{}", 1, 1, 0, False))], 1, 1)
    with pytest.raises(OperationError, match="changed while they were read"):
        list(part)
    writer.close()


def test_job_without_records_has_an_empty_file(reader: Reader) -> None:
    source = Source(JOB, 0, reader, missing, None)
    layout = measured(source)
    assert layout.size == 0
    assert list(part_of(source, layout, range(0), reader.version())) == []
