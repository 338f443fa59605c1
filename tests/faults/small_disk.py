"""A file system of a few megabytes that a test mounts, fills and empties."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import wait_until


class SmallDisk:
    """A mounted tmpfs; `path` is where this process and its children see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leaving: int = 0) -> None:
        """Take all the room there is but `leaving` bytes."""
        piece = bytes(1 << 12)
        with (self.path / "ballast").open("ab", buffering=0) as file:
            while os.statvfs(self.path).f_bavail * 4096 > leaving:
                file.write(piece)

    def free(self) -> None:
        """Give the room back."""
        (self.path / "ballast").unlink()


@contextmanager
def small_disk(folder: Path, size: str = "4m", *, writable: bool = True) -> Generator[SmallDisk]:
    """Mount a tmpfs of `size` under `folder` for as long as the block takes.

    Without root it is mounted in a namespace of its own, and seen by way of the process that holds that open.
    """
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},{'rw' if writable else 'ro'}", "tmpfs", str(place)]
    if os.geteuid() == 0:
        subprocess.run(mount, check=True)
        try:
            yield SmallDisk(place)
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
        return
    script = '"$@" && echo mounted && exec sleep infinity'
    holder = subprocess.Popen(["unshare", "-rm", "sh", "-c", script, "sh", *mount], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        seen = Path(f"/proc/{holder.pid}/root{place}")
        wait_until(seen.exists, "the disk is seen")
        yield SmallDisk(seen)
    finally:
        holder.kill()
        holder.communicate()
