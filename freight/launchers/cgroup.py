"""A worker and all that it starts as one control group, which the kernel ends whole: `cgroup.kill` of cgroup v2.

A process leaves its group behind neither by a new session nor by clearing its environment, so that nothing escapes.
Only groups that this program made (or had systemd make) are ever touched; their folders are named for their worker.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

from freight.errors import LauncherError

PREFIX: Final = "freight-"
_WORKER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_OURS: Final = re.compile(r"freight-[A-Za-z0-9][A-Za-z0-9_-]{0,127}(\.scope)?")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one worker, at `path` below a cgroup2 mount."""

    path: Path

    def add(self, pid: int) -> None:
        """Move a process into the group; what it starts from then on is in it, too.

        Raises LauncherError when the kernel refuses, or the process or the group is gone.
        """
        try:
            _write(self.path / "cgroup.procs", pid)
        except OSError as error:
            raise LauncherError(
                f"cannot move process {pid} into the control group {self.path}: {error.strerror}", transient=False
            ) from error

    def kill(self) -> None:
        """End all its processes at once, also those that are being started; without waiting.

        Never raises: who waits for the group to be empty sees what could not be ended.
        """
        with suppress(OSError):
            _write(self.path / "cgroup.kill", 1)

    def pids(self) -> list[int]:
        """Return the processes in the group and in groups below it. Zombies are in none."""
        found: set[int] = set()
        for folder in _folders(self.path):
            with suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
        # The kernel gives processes as 0 that this process cannot see.
        return sorted(found - {0})

    def processes(self) -> list[psutil.Process]:
        """Return the processes in it, each as it is now: a number that becomes another's is noticed when it is used."""
        opened: dict[int, psutil.Process] = {}
        for pid in self.pids():
            with suppress(psutil.Error):
                opened[pid] = psutil.Process(pid)
        # Looked at again: a number may have become another's before its process was opened.
        return [opened[pid] for pid in self.pids() if pid in opened]

    def is_empty(self) -> bool:
        """Return whether no process is left in it or below it; one that is gone is empty."""
        try:
            events = (self.path / "cgroup.events").read_text()
        except OSError:
            return not self.path.is_dir()
        return "populated 0" in events.splitlines()

    def remove(self) -> bool:
        """Remove the folder with those below it; return whether it is gone, which it is not while a process is left.

        A scope's folder is systemd's: it removes it by itself.
        """
        if self.path.suffix != ".scope":
            for folder in reversed(list(_folders(self.path))):
                with suppress(OSError):
                    folder.rmdir()
        return not self.path.exists()


def make_group(worker: str) -> Group | None:
    """Return a new group for a worker, below this process's own; None where groups cannot be had.

    They cannot where there is no cgroup v2, where it is read-only or not delegated to this user, before Linux 5.14,
    and where a group of this name has processes already. Raises ValueError for a worker that cannot name a folder.
    """
    check_name(worker)
    own = own_folder()
    # To be moved from there a process needs the right to write to the group that both are below.
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    path = own / f"{PREFIX}{worker}"
    try:
        path.mkdir()
    except FileExistsError:
        left = find_group(path)
        return left if left is not None and left.is_empty() else None
    except OSError:
        return None
    group = find_group(path)
    if group is None:
        Group(path).remove()
    return group


def group_of(worker: str) -> Group | None:
    """Return the group that `make_group` made for a worker; None where there is none."""
    check_name(worker)
    own = own_folder()
    return None if own is None else find_group(own / f"{PREFIX}{worker}")


def find_group(path: Path | str) -> Group | None:
    """Return a worker's group that an earlier control plane had; None when it is gone or is not this user's.

    A path that no control plane can have written down is none of ours, whatever is there.
    """
    path = Path(path)
    if not _OURS.fullmatch(path.name) or not path.is_absolute() or ".." in path.parts:
        return None
    try:
        if not any(path.is_relative_to(mount) for _, mount in _cgroup2_mounts(_MOUNTS.read_text())):
            return None
        # Root may write to anybody's: whose it is decides.
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            return None
        usable = all(os.access(path / name, os.W_OK) for name in ("cgroup.procs", "cgroup.kill"))
        return Group(path) if usable and (path / "cgroup.type").read_text().strip() == "domain" else None
    except OSError:
        return None


def enter(path: Path) -> bool:
    """Move the calling process into a worker's group; return whether it is there now.

    Never raises: a worker that cannot enter goes on, and is found by the marker in its environment.
    """
    try:
        if not _OURS.fullmatch(path.name):
            return False
        _write(path / "cgroup.procs", 0)
    except (OSError, ValueError):
        return False
    return True


def check_name(worker: str) -> None:
    """Raise ValueError unless `worker` can be part of a group's name."""
    if not _WORKER.fullmatch(worker):
        raise ValueError(f"no control group can be named for the worker {worker!r}")


def own_folder() -> Path | None:
    """Return the folder of this process's own group of cgroup v2; None where it has none that is mounted."""
    try:
        path = own_path(_MEMBERSHIP.read_text())
    except OSError:
        return None
    return None if path is None else folder_of(path)


def own_path(membership: str) -> PurePosixPath | None:
    """Return the path of the cgroup v2 group in the text of /proc/PID/cgroup; None without one."""
    return next((PurePosixPath(line[3:]) for line in membership.splitlines() if line.startswith("0::/")), None)


def folder_of(path: PurePosixPath) -> Path | None:
    """Return the folder of a group of cgroup v2; None where no mount shows it."""
    with suppress(OSError):
        return next((folder for folder in folders_of(path, _MOUNTS.read_text()) if folder.is_dir()), None)
    return None


def folders_of(path: PurePosixPath, mountinfo: str) -> Iterator[Path]:
    """Yield where a group is by the text of /proc/self/mountinfo; a mount may lie hidden below another."""
    if ".." in path.parts:  # It is outside of this process's namespace.
        return
    for root, mount in _cgroup2_mounts(mountinfo):
        if path.is_relative_to(root):
            yield mount / path.relative_to(root)


def _cgroup2_mounts(mountinfo: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield what is mounted and where, of each cgroup2 mount."""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split(" ", 1)[0] == "cgroup2":
            root, mount = (_plain(field) for field in fields.split()[3:5])
            yield PurePosixPath(root), Path(mount)


def _plain(field: str) -> str:
    """Return a path of mountinfo as it is: spaces and the like are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _folders(top: Path) -> Iterator[Path]:
    """Yield a group's folder and all below it, each before those below itself."""
    for folder, _, _ in os.walk(top):
        yield Path(folder)


def _write(file: Path, number: int) -> None:
    # Never with O_CREAT: where the group is gone, or never was one, nothing may come to be.
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d" % number)
    finally:
        os.close(fd)
