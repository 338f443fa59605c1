"""Text for a terminal."""


def printable(text: str, one_line: bool = False) -> str:
    """Return text from elsewhere without characters that steer a terminal; with `one_line`, also without line ends."""
    kept = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return " ".join(kept.split()) if one_line else kept
