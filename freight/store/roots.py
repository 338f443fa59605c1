"""Folders that were granted: opening files below them without ever leaving them, and copying what was opened."""

import errno
import os
import pwd
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freight.errors import FreightError, Interrupted, NotAllowed, OperationError, UserError
from freight.store.beneath import FOLDERS_MOST, Astray, Rules, Why, below, is_pseudo, kernel_walk, walk

_PIECE_BYTES: Final = 64 << 20
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What says that a way of copying is not to be had between these two files.
_NO_COPY: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY}
)
_NAME_IT: Final = "name the file itself, below a folder that is granted to you"


@dataclass(frozen=True, slots=True)
class Root:
    """A folder below which files may be opened, and the UID of the user to whom it is granted (None: no local one).

    `is_public`: what everybody on this machine may read, and only through folders that everybody may enter.
    """

    path: Path
    owner: int | None = None
    is_public: bool = False


PUBLIC: Final = Root(Path("/"), is_public=True)


def open_below(root: Root, path: Path) -> int:
    """Return a descriptor for reading the regular file `path` below `root`, whatever its name leads to later.

    Links are followed as long as they stay below the root. Raises NotAllowed for what leads out or is somebody
    else's, UserError for what is not there or no regular file, OperationError for what the system cannot do now.
    """
    with opened_root(root) as top, explaining(path, root):
        found = _find(top, root, path)
        try:
            return _open_regular(found, root, path)
        finally:
            os.close(found)


@contextmanager
def opened_root(root: Root) -> Generator[int]:
    """Open a granted folder itself, to find others from.

    Links on the way to it are followed only where the system's administrator or Freight's own account made them:
    the owner of a folder higher up must not be able to put another in its place. Raises OperationError.
    """
    slash = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = walk(slash, "/", below("/", str(root.path)) or [], Rules(_is_trusted))
    except (OSError, Astray) as error:
        reason = error.strerror if isinstance(error, OSError) else error.args[0]
        hint = "tell whoever runs the service: see [paths] in its configuration"
        raise OperationError(f"cannot open the granted folder {root.path}: {reason}", hint) from error
    finally:
        os.close(slash)
    try:
        yield top
    finally:
        os.close(top)


def account_name() -> str:
    """Return the name of the account that runs Freight; its number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"UID {os.geteuid()}"


def _is_trusted(link: os.stat_result) -> bool:
    return link.st_uid in (0, os.geteuid())


@contextmanager
def explaining(path: Path, root: Root) -> Generator[None]:
    """Turn what the system or a walk says in the block about `path`, as its user wrote it, into an error of ours."""
    try:
        yield
    except Astray as error:
        raise _strayed(error, path, root) from error
    except OSError as error:
        raise _refused(error, path) from error
    except UnicodeEncodeError:
        raise UserError(f"no file is called {str(path)!a}: it is not valid UTF-8", _NAME_IT) from None


def _strayed(error: Astray, path: Path, root: Root) -> FreightError:
    if error.why is Why.DEEP:
        return UserError(f"{path} lies more than {FOLDERS_MOST} folders deep", "move the file further up")
    if error.why is Why.PSEUDO:
        return NotAllowed(f"{path} is on a file system of the kernel's own", _NAME_IT)
    if error.why is Why.PRIVATE:
        return NotAllowed(f"{path} is in a folder that not everybody may enter", _NAME_IT)
    return NotAllowed(f"{path} leads out of {root.path}", _NAME_IT)


def _refused(error: OSError, path: Path) -> FreightError:
    if error.errno == errno.ENOENT:
        return UserError(f"there is no {path}", "check the path")
    if error.errno == errno.ENOTDIR:
        return UserError(f"{path} needs a folder where there is a file", "check the path")
    if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
        return UserError(f"cannot follow {path}: {error.strerror}", _NAME_IT)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotAllowed(
            f"the account that runs Freight, {account_name()}, may not use {path}: {error.strerror}",
            f"give {account_name()} permission, for example with setfacl",
        )
    if error.errno == errno.EAGAIN:
        return OperationError(f"another program holds {path}", "submit it again once that has ended")
    return OperationError(f"cannot use {path}: {error.strerror}")


def _find(top: int, root: Root, path: Path) -> int:
    """Return an O_PATH descriptor, which opens nothing: no pipe waits or wakes, no device acts."""
    names = below(str(root.path), str(path))
    if names is None or ".." in names or any("\0" in name for name in names):
        raise Astray(Why.LEAVES)
    # Whether everybody may pass can only be asked of every folder, which the kernel does not show.
    found = None if root.is_public else kernel_walk(top, names)
    return walk(top, str(root.path), names, Rules(is_public=root.is_public)) if found is None else found


def _open_regular(found: int, root: Root, path: Path) -> int:
    mode = os.fstat(found).st_mode
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder", "name one file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path} is no regular file", "name one file with data in it, no pipe, socket or device")
    if is_pseudo(found):
        raise Astray(Why.PSEUDO)
    # By the descriptor: what the name leads to by now may be another file.
    fd = os.open(f"/proc/self/fd/{found}", _READ)
    try:
        _check_owner(os.fstat(fd), root, path)
    except FreightError:
        os.close(fd)
        raise
    return fd


def _check_owner(file: os.stat_result, root: Root, path: Path) -> None:
    if file.st_mode & stat.S_IROTH:
        return
    if root.is_public:
        raise NotAllowed(f"not everybody may read {path}", _NAME_IT)
    # Somebody may have linked it here who may not read it where it belongs.
    if file.st_nlink > 1 and file.st_uid != root.owner:
        raise NotAllowed(
            f"{path} has {file.st_nlink} names (hard links) and belongs to somebody else",
            "make a copy of it, or let everybody read it",
        )


def copy_out(
    fd: int, target: int, shown: str, limit: int | None = None, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Copy the file open at `fd`, whole, to the end of where `target` stands; return its bytes.

    By the kernel where it can, without the bytes passing through this process. Raises UserError for a file over
    `limit`, OperationError for one that changes meanwhile, Interrupted once `stopped` returns True, and
    OSError where one cannot be read or written. What was written of it by then is the caller's to remove.
    """
    before = os.fstat(fd)
    if limit is not None and before.st_size > limit:
        raise UserError(
            f"{shown} has {before.st_size} bytes; the limit (limits.file_bytes) is {limit}",
            "split the file, or have the limit raised",
        )
    done = 0
    ways = [_copy_range, os.sendfile, _read_write]
    while done < before.st_size:
        if stopped():
            raise Interrupted("interrupted while copying the input")
        try:
            count = ways[0](target, fd, done, min(_PIECE_BYTES, before.st_size - done))
        except OSError as error:
            if error.errno not in _NO_COPY or len(ways) == 1:
                raise
            count = 0
        done += count
        if not count:
            # Some file systems say so by copying nothing. The last way tells an end from a refusal.
            if len(ways) == 1:
                break
            ways.pop(0)
    after = os.fstat(fd)
    if done != before.st_size or _mark(after) != _mark(before):
        raise OperationError(f"{shown} changed while it was being copied", "submit it again once it is complete")
    return done


def _copy_range(target: int, source: int, offset: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset)


def _read_write(target: int, source: int, offset: int, count: int) -> int:
    piece = os.pread(source, min(count, 1 << 20), offset)
    done = 0
    while done < len(piece):
        done += os.write(target, piece[done:])
    return done


def _mark(file: os.stat_result) -> tuple[int, int]:
    return file.st_size, file.st_mtime_ns
