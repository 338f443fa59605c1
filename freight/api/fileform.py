"""A form with a file in it, read as it comes: the file goes on in pieces, and never lies in memory as a whole."""

import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from freight.api.front import FORM_BYTES
from freight.errors import UserError

_FILE: Final = "file"
_SEND: Final = "send multipart/form-data with one file, in the field 'file'"
# Its warnings quote what was sent; what is wrong is said to the sender.
logging.getLogger(MultipartParser.__module__).setLevel(logging.CRITICAL)


class FileForm:
    """One multipart/form-data body: a file in the field "file", and fields of text before it and after it.

    `known` are the fields that are kept, each at most once; others are read over. `check` is called with the name and
    the text of each that is kept, as soon as it is whole, and raises what is wrong with it.
    """

    def __init__(self, content_type: str | None, known: Collection[str], check: Callable[[str, str], None]) -> None:
        """Raise UserError for a body that is no such form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise UserError("the body is not a form", _SEND)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._known = known
        self._check = check
        self._has_file = self._has_ended = False
        # The part that is being read: its header, its name, and its text where it is a field.
        self._header: tuple[bytearray, bytearray] = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._text = bytearray()
        # What a piece of the body had of the file.
        self._found: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise UserError("the form's boundary is too long", _SEND) from error

    async def file(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the file in pieces, and read the fields; raise UserError for a form that is broken or lacks a file."""
        beside = 0
        async for chunk in body:
            beside += len(chunk)
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise UserError("the form is broken", _SEND) from error
            found, self._found = self._found, []
            for piece in found:
                beside -= len(piece)
                yield piece
            if beside > FORM_BYTES:
                raise UserError(f"the form has more than {FORM_BYTES} bytes beside its file", _SEND)
        if not self._has_ended:
            raise UserError("the form is cut off", _SEND)
        if not self._has_file:
            raise UserError("the form has no file", _SEND).about(_FILE)

    def _begin(self) -> None:
        self._disposition, self._name = b"", ""
        self._text.clear()

    def _end_header(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == _FILE:
            if self._has_file:
                raise UserError("the form has several files", _SEND).about(_FILE)
            self._has_file = True
            self.filename = options.get(b"filename", b"").decode(errors="replace")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._found.append(data[start:end])
        else:
            self._text += data[start:end]

    def _end(self) -> None:
        name = self._name
        if name not in self._known:
            return
        if name in self.fields:
            raise UserError(f"the form has several fields {name}", "send each once").about(name)
        try:
            self.fields[name] = self._text.decode()
        except UnicodeDecodeError:
            raise UserError(f"the field {name} is not UTF-8", "correct it").about(name) from None
        self._check(name, self.fields[name])

    def _finish(self) -> None:
        self._has_ended = True
