"""The input file: opening it, looking at its start before anything else happens, and seeing that it stays as it is."""

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from freight.core.record import Rejection, Request, Rules, check_line, model_in
from freight.errors import Interrupted, OperationError, UserError, refusing

SAMPLE_RECORDS: Final = 20
_ONE_OBJECT: Final = 'write one request per line, as in {"custom_id": "req-1", "body": {…}}'
CHUNK_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"
_STREAM_POLL_MS: Final = 200
_BLANK: Final = b" \t\r\n"
_FORMATS: Final = (
    (b"\x1f\x8b", "gzip data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "a Parquet file"),
    (b"\x28\xb5\x2f\xfd", "zstandard data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"{\x00", "UTF-16 text"),
    (b"\x00{", "UTF-16 text"),
)


class InputChanged(OperationError):
    """The input is no longer what it was when it was opened."""


class PhysicalLine(msgspec.Struct, frozen=True):
    """A line of the file: its number from 1, where it stands, its bytes without the line end.

    `text` is None for a line over the limit, whose bytes are not kept. `is_last` says that no newline ends it.
    """

    number: int
    offset: int
    length: int
    text: bytes | None
    is_last: bool = False

    def is_blank(self) -> bool:
        """Return whether there is nothing on the line."""
        return self.text is not None and not self.text.strip(_BLANK)


def physical_lines(
    file: FileIO, limit: int, on_chunk: Callable[[bytes], None] = lambda chunk: None
) -> Iterator[PhysicalLine]:
    r"""Yield the lines of `file`, split at \n only and without a BOM, in memory bounded by `limit`.

    `on_chunk` is called with every piece of the file as it is read.
    """
    number, offset = 1, 0
    held: list[bytes] = []
    held_bytes = 0
    while chunk := file.read(CHUNK_BYTES):
        on_chunk(chunk)
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            piece = chunk[start:end]
            length = held_bytes + len(piece)
            text = b"".join((*held, piece)) if length <= limit + len(BOM) + 1 else None
            yield _line(number, offset, length, text, limit, is_last=False)
            held.clear()
            held_bytes = 0
            number += 1
            offset += length + 1
            start = end + 1
        rest = chunk[start:]
        held_bytes += len(rest)
        if held_bytes <= limit + len(BOM) + 1:
            held.append(rest)
        else:
            held.clear()
    if held_bytes:
        text = b"".join(held) if held_bytes <= limit + len(BOM) + 1 else None
        yield _line(number, offset, held_bytes, text, limit, is_last=True)


def _line(number: int, offset: int, length: int, text: bytes | None, limit: int, is_last: bool) -> PhysicalLine:
    if text is not None:
        if number == 1 and text.startswith(BOM):
            offset, text = offset + len(BOM), text[len(BOM) :]
        text = text.removesuffix(b"\r")
        length = len(text)
    return PhysicalLine(number, offset, length, text if length <= limit else None, is_last)


class InputFile:
    """An open input, read in place. `shown` is its name as the user gave it."""

    def __init__(self, path: Path, shown: str) -> None:
        # The links as they are now: pointing one elsewhere later changes nothing.
        self.path = _resolved(path, shown)
        self.shown = shown
        self._fd = _open(self.path, shown)
        self._stat = os.fstat(self._fd)
        self.size = self._stat.st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def reader(self) -> FileIO:
        """Return the file for reading from its start."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return FileIO(self._fd, "rb", closefd=False)

    def read(self, offset: int, length: int) -> bytes:
        """Return a piece of the file; raise OperationError when the file is no longer what it was."""
        self.check_unchanged()
        return self.read_unchecked(offset, length)

    def read_unchecked(self, offset: int, length: int) -> bytes:
        """Return a piece of a file that is checked before or after; raise OperationError where it ends sooner."""
        pieces: list[bytes] = []
        while length > 0:
            piece = os.pread(self._fd, length, offset)
            if not piece:
                raise self._changed()
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def check_unchanged(self) -> None:
        """Raise OperationError when the file, or what its name leads to, is not what it was."""
        for now in (os.fstat(self._fd), _stat_or_none(self.path)):
            if now is None or _mark(now) != _mark(self._stat):
                raise self._changed()

    def _changed(self) -> OperationError:
        return InputChanged(
            f"{self.shown} changed while it was being read; the run stopped and keeps its state",
            "put the file back as it was to go on, or use --fresh to start over with the new one",
        )


def _resolved(path: Path, shown: str) -> Path:
    with refusing(f"cannot follow the input's path {shown}", "name the file itself"):
        return path.resolve()


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _mark(result: os.stat_result) -> tuple[int, ...]:
    return result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns


def _open(path: Path, shown: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(
            f"there is no input file {shown}", "check the path; it is relative to the current folder"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot read input file {shown}: {error.strerror}", "name a JSON Lines file that you may read"
        ) from error
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"the input {shown} is a folder", "name one JSON Lines file")
    return fd


def open_input(shown: str, keep: Callable[[int], Path]) -> InputFile:
    """Open the input that the user named; "-" is standard input.

    `keep` stores the bytes of a stream, given its descriptor, and returns where.
    """
    if shown == "-":
        return InputFile(keep(sys.stdin.fileno()), "standard input")
    if not shown:
        raise UserError("the input has no name", "name a JSON Lines file, or - for standard input")
    if is_stream(Path(shown)):
        # Not to wait in the call itself for a pipe's writer: reading can be interrupted, opening cannot.
        with refusing(f"cannot read the input {shown}", "name a JSON Lines file, or - for standard input"):
            stream = os.open(shown, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return InputFile(keep(stream), shown)
        finally:
            os.close(stream)
    return InputFile(Path(shown), shown)


def is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe or terminal rather than a file that can be read again."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def keep_stream(source: int, kept: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Copy a stream to a file of mode 0600, whole or not at all, so that a resumed run can read it again.

    `source` is an open descriptor. Raises Interrupted once `stopped` returns True.
    """
    aside = kept.with_suffix(".partial")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            for chunk in _chunks(source, stopped):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(kept)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OperationError(
            f"cannot keep the input's bytes in {kept.parent}: {error.strerror}",
            "free some space, or write the input to a file of its own and name that",
        ) from error


def _chunks(source: int, stopped: Callable[[], bool]) -> Iterator[bytes]:
    poller = select.poll()
    poller.register(source, select.POLLIN | select.POLLHUP)
    while True:
        if stopped():
            raise Interrupted("interrupted while reading the input")
        if not poller.poll(_STREAM_POLL_MS):
            continue
        try:
            chunk = os.read(source, CHUNK_BYTES)
        except BlockingIOError:
            continue
        if not chunk:
            return
        yield chunk


@dataclass(frozen=True, slots=True)
class Sample:
    """What the first records show: how many there are, how many have a small budget; of the good ones, the models
    and the endpoints (Endpoint values).
    """

    records: int
    small_budgets: int
    models: tuple[str | None, ...]
    endpoints: frozenset[int]

    def budget_note(self) -> str:
        """Return advice on records that may spend all they are allowed thinking; "" where there are none."""
        if not self.small_budgets:
            return ""
        return (
            f"note: {self.small_budgets} of the first {self.records} records allow fewer than 512 tokens, "
            "which a reasoning model may spend thinking"
        )


def inspect(file: InputFile, limit: int, stopped: Callable[[], bool] = lambda: False) -> Sample:
    """Return what the first twenty records show; raise UserError for a file that is not worth starting on.

    Refused: other formats, an array, an empty file, a line of the sample that is not JSON, and a sample
    without any custom_id. Raises Interrupted once `stopped` returns True.
    """

    def check_stopped(_: bytes) -> None:
        if stopped():
            raise Interrupted("interrupted while reading the input")

    _check_format(file)
    # A line may have many megabytes: of the good ones nothing is kept.
    models: list[str | None] = []
    endpoints: set[int] = set()
    small = 0
    bad: list[tuple[PhysicalLine, Rejection]] = []
    for line in physical_lines(file.reader(), limit, check_stopped):
        if line.is_blank():
            continue
        result = _checked(line)
        if isinstance(result, Rejection):
            bad.append((line, result))
        else:
            models.append(model_in(result.body))
            endpoints.add(result.endpoint)
            small += result.small_budget
        if len(models) + len(bad) == SAMPLE_RECORDS:
            break
    records = len(models) + len(bad)
    if not records:
        raise UserError(f"{file.shown} holds no records: every line is blank", _ONE_OBJECT)
    _refuse_bad_json(file.shown, bad)
    if not models and all(rejection.code == "missing_custom_id" for _, rejection in bad):
        raise UserError(
            f"{file.shown}: none of the first {records} records has a custom_id",
            'each line needs one, as in {"custom_id": "req-1", "body": {…}}',
        )
    return Sample(records, small, tuple(models), frozenset(endpoints))


def _checked(line: PhysicalLine) -> Request | Rejection:
    if line.text is None:
        return Rejection("payload_too_large", "")
    return check_line(line.text, Rules())


def _check_format(file: InputFile) -> None:
    if file.size == 0:
        raise UserError(f"{file.shown} is empty", _ONE_OBJECT)
    head = file.read(0, min(file.size, 64))
    for magic, what in _FORMATS:
        if head.startswith(magic):
            fix = "save it as UTF-8" if "UTF-16" in what else "unpack or convert it first"
            raise UserError(f"{file.shown} looks like {what}. Freight reads JSONL in UTF-8.", fix)
    if head.removeprefix(BOM).lstrip(_BLANK).startswith(b"["):
        raise UserError(
            f"{file.shown} looks like a JSON array. Freight reads JSONL.",
            "write one object per line, for example with: jq -c '.[]' FILE",
        )


def _refuse_bad_json(shown: str, lines: list[tuple[PhysicalLine, Rejection]]) -> None:
    bad = [(line, r) for line, r in lines if r.code == "invalid_json"]
    if not bad:
        return
    whole = "\n".join(f"{shown}, {where(line, r)}: not a JSON object: {reason(line, r)}" for line, r in bad)
    pretty = bad[0][0].text is not None and bad[0][0].text.strip(_BLANK) == b"{"
    raise UserError(whole, "write one object per line" if pretty else "correct these lines and run the command again")


def where(line: PhysicalLine, rejection: Rejection) -> str:
    """Return the place of a fault in words."""
    column = f", column {rejection.column}" if rejection.column else ""
    return f"line {line.number}{column}"


def reason(line: PhysicalLine, rejection: Rejection) -> str:
    """Return what is wrong with a line, and whether the file ends in the middle of it."""
    cut = line.is_last and rejection.code == "invalid_json" and line.text is not None and not _ends(line.text)
    return rejection.message + (" (the file ends inside this record)" if cut else "")


def _ends(text: bytes) -> bool:
    return text.rstrip(_BLANK).endswith(b"}") and text.count(b"{") == text.count(b"}")
