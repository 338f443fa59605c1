"""The input file: its lines, its start, and that it stays as it is."""

import os
import subprocess
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.control import inputs
from freight.control.inputs import BOM, InputFile, PhysicalLine, inspect, is_stream, keep_stream, physical_lines
from freight.errors import Interrupted, OperationError, UserError

GOOD = b'{"custom_id":"a","body":{"messages":[]}}'
PIECES = st.lists(
    st.sampled_from([b"a", b"bc", b"\n", b"\n", b"\r", b"\r\n", BOM, b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\0"]),
    max_size=30,
).map(b"".join)


def opened(path: Path, content: bytes) -> InputFile:
    path.write_bytes(content)
    return InputFile(path, path.name)


def lines_of(content: bytes, limit: int = 1000, chunk_bytes: int = 1 << 20) -> list[PhysicalLine]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "CHUNK_BYTES", chunk_bytes)
        file = opened(Path(folder) / "in", content)
        try:
            return list(physical_lines(file.reader(), limit))
        finally:
            file.close()


def naive(content: bytes, limit: int) -> Iterator[tuple[int, int, bytes | None, bool]]:
    """Number, offset, text and is_last of each line, the simple way; the offset is 0 where the text is not kept."""
    *ended, rest = content.split(b"\n")
    offset = 0
    for number, piece in enumerate([*ended, *([rest] if rest else [])], start=1):
        skipped = len(BOM) if number == 1 and piece.startswith(BOM) else 0
        text = piece[skipped:].removesuffix(b"\r")
        kept = len(text) <= limit
        yield number, offset + skipped if kept else 0, text if kept else None, number > len(ended)
        offset += len(piece) + 1


@given(PIECES, st.integers(1, 12), st.integers(1, 9))
def test_lines_are_what_a_simple_reading_finds_whatever_the_chunks(content: bytes, limit: int, chunk: int) -> None:
    found = lines_of(content, limit, chunk)

    simple = [(f.number, 0 if f.text is None else f.offset, f.text, f.is_last) for f in found]
    assert simple == list(naive(content, limit))
    for line in found:
        if line.text is None:
            assert line.length > limit
        else:
            assert content[line.offset : line.offset + line.length] == line.text


@pytest.mark.parametrize("start", [b"", BOM])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_of_exactly_the_limit_is_kept_and_one_byte_more_is_not(start: bytes, end: bytes) -> None:
    [kept] = lines_of(start + b"x" * 100 + end, limit=100, chunk_bytes=7)
    [over] = lines_of(start + b"x" * 101 + end, limit=100, chunk_bytes=7)

    assert kept.text == b"x" * 100
    assert over.text is None


def test_the_line_after_one_that_is_too_long_is_found() -> None:
    found = lines_of(b"a\n" + b"x" * 10_000 + b"\nb\n", limit=10, chunk_bytes=64)

    assert [(line.number, line.offset, line.text) for line in found][::2] == [(1, 0, b"a"), (3, 10_003, b"b")]
    assert found[1].length == 10_000


def test_only_newlines_end_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\rg".encode()

    assert [line.text for line in lines_of(text + b"\r\n" + text)] == [text, text]


def test_a_byte_order_mark_counts_only_at_the_very_start() -> None:
    assert [line.text for line in lines_of(BOM + b"a\n" + BOM + b"b")] == [b"a", BOM + b"b"]


@pytest.mark.parametrize("text", [b"", b" ", b"\t \r", b"\r"])
def test_lines_of_white_space_are_blank(text: bytes) -> None:
    assert [line.is_blank() for line in lines_of(text + b"\nx\n")] == [True, False]


def test_every_byte_of_the_file_is_shown_once(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    file = opened(tmp_path / "in", content)
    shown: list[bytes] = []

    for _ in physical_lines(file.reader(), 100, shown.append):
        pass

    assert b"".join(shown) == content
    file.close()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\n \n\r\n", "every line is blank"),
        (BOM, "every line is blank"),
        (b'[{"custom_id":"a"}]', "looks like a JSON array. Freight reads JSONL."),
        (b"\n  [\n", "looks like a JSON array. Freight reads JSONL."),
        (BOM + b" [", "looks like a JSON array. Freight reads JSONL."),
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"PK\3\4" + bytes(60), "zip"),
        (b"PAR1" + bytes(60), "Parquet"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (GOOD.decode().encode("utf-16-le"), "UTF-16"),
        (GOOD.decode().encode("utf-16-be"), "UTF-16"),
        (b'{"body":{"messages":[]}}\n' * 30, "custom_id"),
        (b'{"id":"a","body":{}}', "custom_id"),
    ],
)
def test_a_file_that_is_not_worth_starting_on_is_refused_by_name(tmp_path: Path, content: bytes, what: str) -> None:
    file = opened(tmp_path / "in.jsonl", content)

    with pytest.raises(UserError) as caught:
        inspect(file, 1000)

    assert what in caught.value.message
    assert "in.jsonl" in caught.value.message
    file.close()


def test_every_bad_line_of_the_sample_is_named_by_number_and_column(tmp_path: Path) -> None:
    bad = [GOOD, b"", b'{"custom_id":"b",}', GOOD, b'{"a":NaN}', b"[1]"]
    file = opened(tmp_path / "in", b"\n".join(bad))

    with pytest.raises(UserError) as caught:
        inspect(file, 1000)

    assert "line 3, column 18" in caught.value.message
    assert "line 5, column 6" in caught.value.message
    assert "line 6" in caught.value.message
    assert len(caught.value.message.splitlines()) == 3
    file.close()


def test_a_record_that_the_file_ends_inside_of_is_told_so(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", GOOD + b"\n" + GOOD[:-5])

    with pytest.raises(UserError, match="the file ends inside this record"):
        inspect(file, 1000)
    file.close()


def test_only_the_first_twenty_records_are_looked_at(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", (GOOD + b"\n\n") * 20 + b"not json\n")

    assert inspect(file, 1000).records == 20
    file.close()


def test_of_the_good_records_that_are_looked_at_none_is_kept(tmp_path: Path) -> None:
    record = b'{"custom_id":"a","body":{"messages":"' + b"x" * 1_000_000 + b'"}}'
    file = opened(tmp_path / "in", (record + b"\n") * 20)

    tracemalloc.start()
    assert inspect(file, 2_000_000).records == 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 12_000_000
    file.close()


def test_other_faults_are_left_to_intake_and_the_good_ones_are_described(tmp_path: Path) -> None:
    records = [
        b'{"custom_id":"a","body":{"model":"m","messages":[],"max_tokens":16}}',
        b'{"custom_id":"b","body":{"messages":[],"max_completion_tokens":511}}',
        b'{"custom_id":"c","body":{"model":"n","messages":[],"max_tokens":512}}',
        b'{"custom_id":"d","url":"/v1/nothing","body":{"model":"x"}}',
        b'{"body":{}}',
        b'{"custom_id":"e","body":{"prompt":"' + b"x" * 2000 + b'"}}',
    ]
    file = opened(tmp_path / "in", b"\n".join(records))

    sample = inspect(file, 1000)

    assert (sample.records, sample.small_budgets, sample.models) == (6, 2, ("m", None, "n"))
    file.close()


def test_a_piece_of_the_file_can_be_read_while_it_stays_as_it_was(tmp_path: Path) -> None:
    file = opened(tmp_path / "in", b"0123456789")

    assert (file.read(3, 4), file.read(0, 10), file.read(10, 0)) == (b"3456", b"0123456789", b"")
    with pytest.raises(OperationError):
        file.read(8, 5)
    file.close()


@pytest.mark.parametrize("change", ["append", "rewrite", "replace", "remove", "cut"])
def test_a_file_that_changes_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "in"
    file = opened(path, b"0123456789")
    if change == "append":
        with path.open("ab") as more:
            more.write(b"x")
    elif change == "rewrite":
        path.write_bytes(b"9876543210")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    elif change == "replace":
        (tmp_path / "new").write_bytes(b"0123456789")
        (tmp_path / "new").rename(path)
    elif change == "remove":
        path.unlink()
    else:
        os.truncate(path, 3)

    with pytest.raises(OperationError, match="in changed while"):
        file.read(0, 4)
    file.close()


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no input file nothing"):
        InputFile(tmp_path / "nothing", "nothing")
    with pytest.raises(UserError, match="is a folder"):
        InputFile(tmp_path, "here")


def test_pipes_are_streams_and_files_are_not(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()

    assert is_stream(tmp_path / "pipe")
    assert is_stream(Path("/dev/null"))
    assert not is_stream(tmp_path / "file")
    assert not is_stream(tmp_path / "missing")


def test_a_stream_is_kept_whole_and_for_the_user_alone(tmp_path: Path) -> None:
    content = os.urandom(2_500_000)

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        writer = threading.Thread(target=lambda: (child.stdin.write(content), child.stdin.close()))
        writer.start()
        keep_stream(child.stdout.fileno(), tmp_path / "kept.jsonl")
        writer.join()

    assert (tmp_path / "kept.jsonl").read_bytes() == content
    assert (tmp_path / "kept.jsonl").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kept.jsonl"]


def test_a_stream_whose_reading_is_stopped_leaves_no_kept_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"the beginning")
    answers = iter([False, False, True])

    with pytest.raises(Interrupted):
        keep_stream(reader, tmp_path / "kept.jsonl", stopped=lambda: next(answers))

    assert not (tmp_path / "kept.jsonl").exists()
    os.close(reader)
    os.close(writer)
