"""Text for a terminal."""

import codecs
from collections.abc import Iterable, Iterator


def printable(text: str, one_line: bool = False) -> str:
    """Return text from elsewhere without characters that steer a terminal; with `one_line`, also without line ends."""
    kept = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return " ".join(kept.split()) if one_line else kept


class TerminalText:
    """Makes a stream of bytes from elsewhere fit for a terminal."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def cleaned(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the text, with spaces for the characters that steer a terminal."""
        for chunk in chunks:
            yield printable(self._decoder.decode(chunk)).encode()


def counted(number: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
