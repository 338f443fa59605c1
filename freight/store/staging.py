"""Copies of models on a disk of this machine: each is made once, whole or not at all, and used by all workers here."""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from freight.core.hubfiles import with_its_set
from freight.store.files import sync_folder

log = logging.getLogger("freight.staging")

MANIFEST: Final = "staged.json"
_PIECE_BYTES: Final = 8 << 20
_ASK_EVERY_S: Final = 0.2

Moved = Callable[[int], None]


class _File(msgspec.Struct, frozen=True):
    """A file of the source by what tells it from another: its path in the model, its size, its time."""

    path: str
    size: int
    mtime_ns: int


class _Manifest(msgspec.Struct, frozen=True):
    source: str
    files: list[_File]

    def bytes_in_all(self) -> int:
        return sum(file.size for file in self.files)


def staged(source: Path, stage: Path, moved: Moved = lambda count: None) -> Path:
    """Return a copy of a model's file or folder under `stage`, made now where there is none of the source as it is.

    Links are followed: the copy holds contents. Of a file that is part of a set, the whole set is copied. Who asks
    while another process copies waits for it. `moved` is called with the bytes copied since the last call, whoever
    copies, and with 0 now and then while another does; what it raises ends the copying. Where the copy cannot be made,
    as on a full disk, the log says why and the source itself is returned.
    """
    source, stage = source.absolute(), stage.absolute()
    if source.is_relative_to(stage):
        return source
    home = stage / _key(source)
    try:
        stage.mkdir(parents=True, exist_ok=True)
        lock = _locked(home.with_name(f"{home.name}.lock"), home.with_name(f"{home.name}.new"), moved)
        try:
            return _staged(source, home, moved)
        finally:
            os.close(lock)
    except OSError as error:
        _use_source(source, stage, error.strerror or str(error))
        return source


def _staged(source: Path, home: Path, moved: Moved) -> Path:
    manifest = _identify(source)
    copy = home / source.name
    if _is_current(home, copy, manifest):
        return copy
    aside = home.with_name(f"{home.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        # A copy of an earlier state is of no more use, and its room may be needed.
        _remove(home)
        _check_room(home.parent, manifest.bytes_in_all())
        _copy(source, aside, manifest, moved)
        if _identify(source) != manifest:
            raise OSError(errno.EBUSY, "the model changed while it was copied")
        aside.rename(home)
        sync_folder(home.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return copy


def _key(source: Path) -> str:
    # A copy is private to its user: the folders above the source may be.
    digest = hashlib.sha256(f"{os.geteuid()}:{source}".encode(errors="surrogateescape")).hexdigest()
    return f"{source.name[:80]}-{digest[:16]}"


def _use_source(source: Path, stage: Path, reason: str) -> None:
    log.warning("%s is not copied to %s and is used where it is: %s", source, stage, reason)


def _locked(path: Path, aside: Path, moved: Moved) -> int:
    """Return an open lock; while another process holds it, tell `moved` how far that one gets."""
    flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path, flags, 0o600)
    try:
        seen = 0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                now = sum(_sizes(aside))
                # Also when nothing has moved: who waits may want to end.
                moved(max(0, now - seen))
                seen = now
                time.sleep(_ASK_EVERY_S)
    except BaseException:
        os.close(lock)
        raise


def _sizes(folder: Path) -> Iterator[int]:
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield Path(inside, name).stat().st_size


def _identify(source: Path) -> _Manifest:
    """Return what the model consists of now."""
    if source.is_dir():
        base, paths = source, sorted(_inside(source))
    else:
        base, paths = source.parent, with_its_set(source.name, (entry.name for entry in source.parent.iterdir()))
    files: list[_File] = []
    for path in paths:
        found = (base / path).stat()
        files.append(_File(path, found.st_size, found.st_mtime_ns))
    return _Manifest(str(source), files)


def _inside(source: Path) -> Iterator[str]:
    """Yield the files of a folder by their paths in it, through links, but for hidden folders (a history, a cache)."""
    seen: set[str] = set()
    for inside, folders, names in os.walk(source, followlinks=True):
        real = os.path.realpath(inside)
        folders[:] = [name for name in folders if not name.startswith(".") and real not in seen]
        if real in seen:
            continue
        seen.add(real)
        for name in names:
            path = Path(inside, name)
            if path.is_file():
                yield str(path.relative_to(source))


def _is_current(home: Path, copy: Path, manifest: _Manifest) -> bool:
    """Return whether a copy of this very state is there, whole, and made by this user."""
    base = copy if copy.is_dir() else home
    try:
        if home.lstat().st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{home} is another user's")
        there = msgspec.json.decode((home / MANIFEST).read_bytes(), type=_Manifest)
        return there == manifest and all((base / file.path).stat().st_size == file.size for file in manifest.files)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return False


def _remove(home: Path) -> None:
    """Remove a copy; never half of it under its name."""
    old = home.with_name(f"{home.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        home.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _check_room(stage: Path, needed: int) -> None:
    if shutil.disk_usage(stage).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy(source: Path, aside: Path, manifest: _Manifest, moved: Moved) -> None:
    """Copy the files into `aside`, with their manifest, and put all on disk."""
    aside.mkdir(mode=0o700)
    if source.is_dir():
        base, target = source, aside / source.name
        target.mkdir()
    else:
        base, target = source.parent, aside
    for file in manifest.files:
        copy = target / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(base / file.path, copy, moved)
    with (aside / MANIFEST).open("wb") as out:
        out.write(msgspec.json.encode(manifest))
        out.flush()
        os.fsync(out.fileno())
    for folder, _, _ in os.walk(aside):
        sync_folder(Path(folder))


def _copy_file(source: Path, target: Path, moved: Moved) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    with source.open("rb", buffering=0) as coming, target.open("wb") as going:
        while count := coming.readinto(piece):
            going.write(piece[:count])
            moved(count)
        going.flush()
        os.fsync(going.fileno())
    shutil.copymode(source, target)
