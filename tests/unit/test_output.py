"""The results file: whole or not at all, and never over a file that is not ours."""

import errno
import hashlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from freight.control.output import Written, put_in_place, rows, write_aside
from freight.core.answer import BATCH_CANCELLED, error_line
from freight.errors import OperationError
from freight.store.database import StorageFull
from freight.store.folder import Locking
from freight.store.results import PAGE_ROWS, Results


@pytest.fixture
def results(tmp_path: Path) -> Generator[Results]:
    opened = Results(tmp_path / "results.db", Locking.NETWORK)
    yield opened
    opened.close()


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    path = tmp_path / "aside"
    path.write_bytes(b"ours")
    return path


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process see a file system without hard links."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


def missing(index: int) -> tuple[bytes | None, str, str]:
    return b'"gone-%d"' % index, BATCH_CANCELLED, "cancelled"


@pytest.mark.parametrize("done", [set(), {0}, {4}, {1, 2}, {0, 1, 2, 3, 4}])
def test_every_record_has_one_row_in_input_order_with_or_without_a_result(results: Results, done: set[int]) -> None:
    results.put([error_line(index, b'"done"', "request_timeout", "slow") for index in reversed(sorted(done))], epoch=0)

    listed = list(rows(results, 5, missing))

    assert [index for index, _ in listed] == [0, 1, 2, 3, 4]
    assert {index for index, tail in listed if b'"done"' in tail} == done
    for index, tail in listed:
        if index not in done:
            assert b'"gone-%d"' % index in tail
            assert b"batch_cancelled" in tail


def test_rows_go_on_over_pages(results: Results) -> None:
    count = 2 * PAGE_ROWS + 7
    results.put([error_line(index, b'"a"', "request_timeout", "slow") for index in range(0, count, 2)], epoch=0)

    assert [index for index, _ in rows(results, count, missing)] == list(range(count))


def test_a_file_without_records_has_no_rows(results: Results) -> None:
    assert list(rows(results, 0, missing)) == []


def test_each_line_is_written_with_its_id_and_the_file_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "aside"

    written = write_aside(path, "job-é", iter([(0, b'"custom_id":"a"}'), (1, b'"custom_id":"%d %s"}')]), records=2)

    expected = '{"id":"job-é-0","custom_id":"a"}\n{"id":"job-é-1","custom_id":"%d %s"}\n'.encode()
    assert path.read_bytes() == expected
    assert written == Written(len(expected), hashlib.sha256(expected).hexdigest())
    assert written.matches(path)


@pytest.mark.parametrize("content", [b"", b"other", b"abcdefgi"])
def test_another_file_or_none_is_not_the_one_that_was_written(tmp_path: Path, content: bytes) -> None:
    written = Written(8, hashlib.sha256(b"abcdefgh").hexdigest())

    assert not written.matches(tmp_path / "missing")
    (tmp_path / "out").write_bytes(content)
    assert not written.matches(tmp_path / "out")


def test_a_full_disk_is_told_and_leaves_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "aside"

    def opened(self: Path, *arguments: object, **options: object) -> object:
        path.touch()
        return open("/dev/full", "wb")  # noqa: PTH123

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(StorageFull):
        write_aside(path, "job", iter([(0, b"x}")]), records=1)

    assert not os.path.lexists(path)


def test_what_is_left_from_before_is_not_written_into(tmp_path: Path) -> None:
    aside, output = tmp_path / "aside", tmp_path / "out"
    output.write_text("published")
    os.link(output, aside)

    write_aside(aside, "job", iter([(0, b"x}")]), records=1)

    assert output.read_text() == "published"


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="cannot write"):
        write_aside(tmp_path / "missing" / "aside", "job", iter([]), records=0)


def test_lines_that_fail_half_way_never_reach_the_output(tmp_path: Path) -> None:
    def failing() -> Generator[tuple[int, bytes]]:
        yield 0, b"x}"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_aside(tmp_path / "aside", "job", failing(), records=2)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("replace", [True, False])
def test_the_output_appears_whole_and_nothing_stays_aside(tmp_path: Path, aside: Path, replace: bool) -> None:
    put_in_place(aside, tmp_path / "out", replace)

    assert (tmp_path / "out").read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("no_links")
def test_a_file_system_without_links_gets_the_output_too(tmp_path: Path, aside: Path) -> None:
    put_in_place(aside, tmp_path / "out", replace=False)

    assert (tmp_path / "out").read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def stand_in_the_way(output: Path, what: str) -> None:
    if what == "file":
        output.write_bytes(b"theirs")
    elif what == "link":
        output.symlink_to("nowhere")
    else:
        output.mkdir()


@pytest.mark.parametrize("what", ["file", "link", "folder"])
@pytest.mark.parametrize("links", [True, False])
def test_what_came_into_being_is_never_replaced_and_the_answers_are_kept(
    tmp_path: Path, aside: Path, request: pytest.FixtureRequest, what: str, links: bool
) -> None:
    if not links:
        request.getfixturevalue("no_links")
    output = tmp_path / "out"
    stand_in_the_way(output, what)
    before = os.lstat(output)

    with pytest.raises(OperationError, match="not Freight's") as caught:
        put_in_place(aside, output, replace=False)

    assert "--force" in (caught.value.hint or "")
    assert os.lstat(output).st_ino == before.st_ino
    assert aside.read_bytes() == b"ours"


def test_a_file_that_may_be_replaced_is_replaced_in_one_step(tmp_path: Path, aside: Path) -> None:
    output = tmp_path / "out"
    output.write_bytes(b"before")
    inode = aside.stat().st_ino

    put_in_place(aside, output, replace=True)

    assert output.read_bytes() == b"ours"
    assert output.stat().st_ino == inode


@pytest.mark.parametrize("replace", [True, False])
def test_a_folder_that_is_gone_is_told_and_the_answers_are_kept(tmp_path: Path, aside: Path, replace: bool) -> None:
    with pytest.raises(OperationError, match="all answers are kept"):
        put_in_place(aside, tmp_path / "missing" / "out", replace)

    assert aside.read_bytes() == b"ours"


def test_another_failure_of_the_link_is_told_and_nothing_is_renamed(
    tmp_path: Path, aside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "link", refuse)

    with pytest.raises(OperationError, match="Permission denied"):
        put_in_place(aside, tmp_path / "out", replace=False)

    assert not (tmp_path / "out").exists()
    assert aside.exists()
