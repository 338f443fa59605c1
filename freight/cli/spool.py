"""A stream's first records, kept so that they can be looked at before the stream is sent."""

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from freight.control.inputs import CHUNK_BYTES, SAMPLE_RECORDS, InputFile
from freight.errors import OperationError

# Twenty records of the usual size are far below this.
MOST_BYTES: Final = 64 << 20


class Spool:
    """A stream, open by its descriptor, that is read up to the end of its twentieth record before it is sent."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._head: list[bytes] = []
        self._is_whole = False
        # How much of the head is whole lines: the rest of a line is not there to be judged.
        self._look_bytes = 0
        self._fill()

    def _fill(self) -> None:
        records, total = 0, 0
        line_has_text = False
        while records < SAMPLE_RECORDS and total < MOST_BYTES:
            chunk = os.read(self._source, CHUNK_BYTES)
            if not chunk:
                self._is_whole = True
                self._look_bytes = total
                return
            *ended, last = chunk.split(b"\n")
            for piece in ended:
                records += line_has_text or bool(piece.strip())
                line_has_text = False
            line_has_text = line_has_text or bool(last.strip())
            if ended:
                self._look_bytes = total + len(chunk) - len(last)
            total += len(chunk)
            self._head.append(chunk)

    @contextmanager
    def sample(self, shown: str) -> Generator[InputFile | None]:
        """Give the head's whole lines as a file of mode 0600, gone after the block; None when there is none."""
        if not self._look_bytes and not self._is_whole:
            yield None
            return
        path = self._write()
        try:
            file = InputFile(path, shown)
            try:
                yield file
            finally:
                file.close()
        finally:
            path.unlink(missing_ok=True)

    def _write(self) -> Path:
        try:
            fd, name = tempfile.mkstemp(prefix="freight-")
            with os.fdopen(fd, "wb") as file:
                left = self._look_bytes
                for chunk in self._head:
                    file.write(chunk[:left])
                    left -= min(left, len(chunk))
            return Path(name)
        except OSError as error:
            raise OperationError(
                f"cannot keep the start of the input in {tempfile.gettempdir()}: {error.strerror}",
                "make room there, or set TMPDIR to another folder",
            ) from error

    def chunks(self) -> Iterator[bytes]:
        """Yield the whole stream, the head first."""
        while self._head:
            yield self._head.pop(0)
        while not self._is_whole and (chunk := os.read(self._source, CHUNK_BYTES)):
            yield chunk
