"""Finding what lies below an open folder, without ever leaving it.

Every step is taken on descriptors: what a name led to cannot be swapped between looking at it and opening it.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

LINKS_MOST: Final = 40  # As in the kernel.
# A walk holds a descriptor for each, of which a process has few.
FOLDERS_MOST: Final = 100
FIND: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_OPENAT2: Final = 437
_BENEATH: Final = 0x08
_NO_MAGIC_LINKS: Final = 0x02
# The kernel cannot (too old, or forbidden), or will not where a walk of our own may: an absolute link, a race.
_UNDECIDED: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG, errno.EXDEV, errno.EAGAIN})
# What fstatfs calls the file systems whose files are the kernel's own doings: proc, sysfs, cgroup, cgroup2, debugfs,
# tracefs, securityfs, selinuxfs, smackfs, bpf, devpts, mqueue, configfs, efivarfs, nsfs, pipefs, sockfs, anonymous
# inodes, binfmt_misc, fusectl, hugetlbfs, pstore, rpc_pipefs, nfsd, binderfs, resctrl, secretmem.
_PSEUDO: Final = frozenset(
    {
        0x9FA0, 0x62656572, 0x27E0EB, 0x63677270, 0x64626720, 0x74726163, 0x73636673, 0xF97CFF8C, 0x43415D53,
        0xCAFE4A11, 0x1CD1, 0x19800202, 0x62656570, 0xDE5E81E4, 0x6E736673, 0x50495045, 0x534F434B, 0x09041934,
        0x42494E4D, 0x65735543, 0x958458F6, 0x6165676C, 0x67596969, 0x6E667364, 0x6C6F6F70, 0x7655821, 0x5345434D,
    }
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Why(Enum):
    """Why a walk goes no further."""

    LEAVES = "it leads out"
    LINK = "a link that is not followed"
    PSEUDO = "a file system of the kernel's own"
    PRIVATE = "a folder that not everybody may enter"
    DEEP = "too many folders"


class Astray(Exception):
    """The way ends here, by a rule of ours; the system's own refusals are OSErrors."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.value)
        self.why = why


def _any_link(_: os.stat_result) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rules:
    """What a walk may pass. `is_public`: only through folders that everybody may enter.

    `makes`, given an open folder and a name, makes the folder that is not there; None for no making.
    """

    follows: Callable[[os.stat_result], bool] = _any_link
    is_public: bool = False
    makes: Callable[[int, str], None] | None = None


def kernel_walk(top: int, names: Sequence[str]) -> int | None:
    """Return an O_PATH descriptor of what `names` lead to below `top`; None where only a walk of our own can tell.

    The kernel follows links that stay below `top`. Raises OSError where it says no.
    """
    path = os.fsencode("/".join(names) or ".")
    how = _How(os.O_PATH | os.O_CLOEXEC, 0, _BENEATH | _NO_MAGIC_LINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    fd = _libc.syscall(ctypes.c_long(_OPENAT2), ctypes.c_long(top), path, ctypes.byref(how), size)
    if fd >= 0:
        return fd
    code = ctypes.get_errno()
    if code in _UNDECIDED:
        return None
    raise OSError(code, os.strerror(code))


def walk(top: int, called: str, names: Sequence[str], rules: Rules) -> int:
    """Return an O_PATH descriptor of what `names` lead to below the open folder `top`, whose path is `called`.

    Links are followed as long as they stay below; an absolute one, where it begins with `called`.
    Raises Astray, and OSError where the system says no.
    """
    way = _Way(called, rules)
    try:
        way.enter(os.dup(top))
        return way.to(names)
    finally:
        way.close()


def parts(path: str) -> list[str]:
    """Return the names in a path; ".." among them, "." not."""
    return [part for part in path.split("/") if part not in ("", ".")]


def below(top: str, path: str) -> list[str] | None:
    """Return the names that lead from `top` to `path`, both absolute; None where it does not begin with `top`."""
    ahead, names = parts(top), parts(path)
    return names[len(ahead) :] if names[: len(ahead)] == ahead else None


def is_pseudo(fd: int) -> bool:
    """Return whether what is open lies on a file system whose files are not data."""
    answer = (ctypes.c_long * 64)()  # More than a struct statfs; the type comes first.
    if _libc.fstatfs(ctypes.c_int(fd), answer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer[0] & 0xFFFFFFFF in _PSEUDO


class _Way:
    """The folders from the top to where a walk is, open."""

    def __init__(self, called: str, rules: Rules) -> None:
        self._called = called
        self._rules = rules
        self._folders: list[int] = []
        self._device = -1
        self._links = 0

    def close(self) -> None:
        self._back_to(0)

    def to(self, names: Sequence[str]) -> int:
        todo = list(reversed(names))
        while todo:
            name = todo.pop()
            if name == "..":
                self._up()
            elif name not in ("", "."):
                file = self._down(name, todo)
                if file is not None:
                    return file
        return os.dup(self._folders[-1])

    def enter(self, folder: int) -> None:
        """Go on from an open folder, which is closed with the rest."""
        self._folders.append(folder)
        if len(self._folders) > FOLDERS_MOST:
            raise Astray(Why.DEEP)
        found = os.fstat(folder)
        if found.st_dev != self._device and is_pseudo(folder):
            raise Astray(Why.PSEUDO)
        self._device = found.st_dev
        if self._rules.is_public and not found.st_mode & stat.S_IXOTH:
            raise Astray(Why.PRIVATE)

    def _down(self, name: str, todo: list[str]) -> int | None:
        """Take one step; return the file that ends the walk, None when it goes on."""
        fd = self._open(name)
        try:
            found = os.fstat(fd)
            if stat.S_ISLNK(found.st_mode):
                self._follow(found, os.readlink("", dir_fd=fd), todo)
                return None
            if not stat.S_ISDIR(found.st_mode) and todo:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            result, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)
        if not stat.S_ISDIR(found.st_mode):
            return result
        self.enter(result)
        return None

    def _open(self, name: str) -> int:
        here = self._folders[-1]
        try:
            return os.open(name, FIND, dir_fd=here)
        except FileNotFoundError:
            if self._rules.makes is None:
                raise
        self._rules.makes(here, name)
        return os.open(name, FIND, dir_fd=here)

    def _follow(self, link: os.stat_result, target: str, todo: list[str]) -> None:
        self._links += 1
        if self._links > LINKS_MOST:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if not self._rules.follows(link):
            raise Astray(Why.LINK)
        if target.startswith("/"):
            if below(self._called, target) is None:
                raise Astray(Why.LEAVES)
            target = _after(self._called, target)
            self._back_to(1)
        todo.extend(reversed(target.split("/")))

    def _up(self) -> None:
        # Not by "..", which leads elsewhere once somebody has moved the folder.
        if len(self._folders) > 1:
            self._back_to(len(self._folders) - 1)
        elif self._called != "/":
            raise Astray(Why.LEAVES)

    def _back_to(self, count: int) -> None:
        while len(self._folders) > count:
            os.close(self._folders.pop())
        if self._folders:
            self._device = os.fstat(self._folders[-1]).st_dev


def _after(top: str, path: str) -> str:
    """Return the rest of a path; a slash at its end stays, which lets it name nothing but a folder."""
    rest = "/".join(below(top, path) or ())
    return rest + "/" if path.endswith(("/", "/.")) else rest
