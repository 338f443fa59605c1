"""What kind of file system a folder is on."""

import os
import re
from pathlib import Path
from typing import Final

# Types, as /proc/self/mountinfo names them, on which locks and shared memory may span hosts or fail.
_NETWORK: Final = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "glusterfs", "afs",
        "panfs", "pvfs2", "orangefs", "9p", "wekafs", "daos", "davfs", "ncpfs", "vboxsf", "coda", "ocfs2", "gfs2",
    }
)  # fmt: skip
# The kernel writes white space and backslashes so.
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def filesystem_type(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, as the kernel names it; "" when unknown."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    resolved = os.path.realpath(folder)
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        mount_point = _OCTAL.sub(lambda escape: chr(int(escape.group(1), 8)), fields[4])
        inside = resolved == mount_point or resolved.startswith(mount_point.rstrip("/") + "/")
        if inside and (fields[2] == wanted or not best) and len(mount_point) >= len(best):
            best, kind = mount_point, after.split()[0]
    return kind


def is_network(folder: Path) -> bool:
    """Return whether `folder` is on a network file system; FUSE file systems count, most being remote."""
    kind = filesystem_type(folder)
    return kind in _NETWORK or kind.startswith("fuse.")
