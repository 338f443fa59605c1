"""Fetching the files of a commit into a hub cache, a few at once; what is there already is not fetched again."""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from freight.errors import OperationError
from freight.store.files import sync_folder
from freight.store.hubcalls import SAME_COMMAND, HubFile, hub_failures, request_headers

AT_ONCE: Final = 4
SHOW_EVERY_S: Final = 0.2
# A hub that answers "later" is asked again after these.
_AGAIN_AFTER_S: Final = (1.0, 2.0, 4.0)
_END_S: Final = 0.5
_PART: Final = ".part"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DAMAGED: Final = "the hub or a proxy on the way changed it; run the same command again"


class _Stopped(Exception):
    """Somebody asked for the end."""


class Fetching:
    """The files of one commit on their way into a repository's folder of a hub cache.

    One process at a time may fetch into a folder. `run` may be ended by KeyboardInterrupt; what was fetched until
    then is kept, and gone on with by the next.
    """

    def __init__(self, folder: Path, repo: str, commit: str, files: Sequence[HubFile]) -> None:
        self._folder, self._repo, self._commit = folder, repo, commit
        self._blobs = folder / "blobs"
        contents: dict[str, list[HubFile]] = {}
        for file in files:
            contents.setdefault(file.digest, []).append(file)
        # The largest content is taken first, from the end; files of the same content are one.
        self._queue = sorted(contents.values(), key=lambda same: same[0].size)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self.total = sum(same[0].size for same in self._queue)
        self.here = sum(max(map(self._bytes_here, same)) for same in self._queue)

    @property
    def left(self) -> int:
        """Bytes that are not here yet."""
        return self.total - self.here

    def check_room(self) -> None:
        """Raise OperationError where the disk has no room for what is left."""
        free = shutil.disk_usage(next(place for place in (self._folder, *self._folder.parents) if place.exists())).free
        if free < self.left:
            raise OperationError(
                f"{self._repo} needs {size_words(self.left)} more; {self._folder.parent} has {size_words(free)} free",
                "make room there, or set FREIGHT_DATA to a folder on a larger disk",
            )

    def run(self, show: Callable[[int], None]) -> None:
        """Fetch what is not here; `show` is called with the bytes that are, now and then."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        # Threads that do not keep the program from ending: a read from a hub that fell silent cannot be broken off.
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(AT_ONCE, len(self._queue)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and self._failure is None:
                    show(self.here)
                    thread.join(SHOW_EVERY_S)
        finally:
            self._stop.set()
            patience = time.monotonic() + _END_S
            for thread in threads:
                thread.join(max(0.0, patience - time.monotonic()))
        if self._failure is not None:
            raise self._failure
        show(self.here)

    def forget_others(self, listed: Sequence[HubFile]) -> None:
        """Remove the beginnings of files that the commit no longer has."""
        kept = {f"{file.digest}{_PART}" for file in listed}
        for part in self._blobs.glob(f"*{_PART}"):
            if part.name not in kept:
                part.unlink(missing_ok=True)

    def _bytes_here(self, file: HubFile) -> int:
        for path in (self._folder / "snapshots" / self._commit / file.path, self._blobs / file.digest):
            with suppress(OSError):
                if path.stat().st_size == file.size:
                    return file.size
        with suppress(OSError):
            begun = self._part(file).stat().st_size
            return begun if begun <= file.size else 0
        return 0

    def _part(self, file: HubFile) -> Path:
        return self._blobs / f"{file.digest}{_PART}"

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._queue:
                    return
                same = self._queue.pop()
            try:
                for file in same:
                    self._bring(file)
            except _Stopped:
                return
            except Exception as error:
                # Whoever runs this raises it; the others end.
                self._failure = self._failure or error
                self._stop.set()

    def _bring(self, file: HubFile) -> None:
        target = self._folder / "snapshots" / self._commit / file.path
        blob = self._blobs / file.digest
        try:
            if _size(target) == file.size:
                return
            if _size(blob) != file.size:
                self._fetch(file)
                self._part(file).rename(blob)
                sync_folder(self._blobs)
            _link(blob, target)
        except OSError as error:
            if error.errno in _FULL:
                raise OperationError(
                    f"the disk of {self._folder.parent} is full", f"make room; then {SAME_COMMAND}"
                ) from error
            raise

    def _fetch(self, file: HubFile) -> None:
        """Bring a file's content, verified and on disk, into its part."""
        part = self._part(file)
        was_begun = (_size(part) or 0) > 0
        self._download(file)
        if file.sha256 is None or self._digest(part) == file.sha256:
            return
        # A crash may have left the beginning damaged: the second time it is all new.
        self._discard(file)
        if was_begun:
            self._download(file)
            if self._digest(part) == file.sha256:
                return
            self._discard(file)
        raise OperationError(f"{file.path} of {self._repo} did not arrive as it was listed", _DAMAGED)

    def _discard(self, file: HubFile) -> None:
        self._part(file).unlink()
        self._moved(-file.size)

    def _download(self, file: HubFile) -> None:
        from huggingface_hub import constants

        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise OperationError(
                f"{file.path} of {self._repo} has {size_words(file.size)}: more than a hub sends in one piece",
                f"use: hf download {self._repo} {file.path}; Freight finds it in the hub's own cache",
            )
        with os.fdopen(os.open(self._part(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as out:
            if out.seek(0, os.SEEK_END) > file.size:
                out.truncate(0)
            for wait_s in (*_AGAIN_AFTER_S, None):
                with hub_failures(self._repo, self._commit):
                    if self._try(file, out, wait_s):
                        break
            out.flush()
            os.fsync(out.fileno())

    def _try(self, file: HubFile, out: BinaryIO, wait_s: float | None) -> bool:
        """Fetch the rest of a file; return False where another try is due, after a wait."""
        import httpx2
        from huggingface_hub import file_download, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError

        begun = out.seek(0, os.SEEK_END)
        try:
            cast(Any, file_download).http_get(
                hf_hub_url(self._repo, file.path, revision=self._commit),
                out,
                resume_size=begun,
                headers=request_headers(),
                expected_size=file.size,
                displayed_filename=file.path,
                tqdm_class=partial(_Meter, self),
            )
            return True
        except HfHubHTTPError as error:
            if error.response.status_code < 500 or wait_s is None:
                raise
        except httpx2.ReadError:
            if wait_s is None:
                raise
        except OSError as error:
            if error.errno is not None:
                raise
            # The library says so when the length is wrong.
            out.truncate(0)
            raise OperationError(f"{file.path} of {self._repo} did not arrive in its length", _DAMAGED) from error
        if self._stop.wait(wait_s):
            raise _Stopped
        return False

    def _digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                if self._stop.is_set():
                    raise _Stopped
                digest.update(piece)
        return digest.hexdigest()

    def _moved(self, count: int) -> None:
        with self._lock:
            self.here += count

    def moved(self, count: int) -> None:
        """Count bytes that arrived; end the thread that brought them where the end was asked for."""
        if self._stop.is_set():
            raise _Stopped
        self._moved(count)


class _Meter:
    """What the hub's library takes for a progress bar."""

    def __init__(self, fetching: Fetching, **_: object) -> None:
        self._fetching = fetching

    def __enter__(self) -> "_Meter":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def update(self, count: float | None = 1) -> None:
        """Count bytes."""
        self._fetching.moved(int(count or 0))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _link(blob: Path, target: Path) -> None:
    """Put a content under its name in a snapshot: by a link that holds wherever the cache is moved to, else itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.symlink_to(os.path.relpath(blob, target.parent))
    except OSError as error:
        if error.errno in _FULL:
            raise
        blob.rename(target)
    sync_folder(target.parent)


def size_words(count: int) -> str:
    """Return a number of bytes in words, as 15.2 GB."""
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
