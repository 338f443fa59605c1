"""Which prompts were seen before, kept in memory and, when asked, in a file."""

import hashlib
import os
from pathlib import Path


class SeenPrompts:
    """Remembers prompts by digest, so that a '-once' marker works once."""

    def __init__(self, path: str | None) -> None:
        """Start with the prompts remembered in `path`, if one is given."""
        self._seen: set[str] = set()
        self._fd: int | None = None
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._seen.update(Path(path).read_text("ascii").split())

    def first_time(self, prompt: str) -> bool:
        """Return whether the exact `prompt` is new, and remember it before returning."""
        key = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
        if key in self._seen:
            return False
        self._seen.add(key)
        if self._fd is not None:
            os.write(self._fd, f"{key}\n".encode())
        return True
