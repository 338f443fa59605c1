"""Ways out of a granted folder: thousands that are made up, and links that are swapped meanwhile. None leads out.

A secret lies beside the folder. It is never read, and nothing beside the folder is ever written.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.config import PathGrant
from freight.control.grants import Grants
from freight.core.account import Account
from freight.errors import FreightError
from freight.store import beneath, roots
from freight.store.outputfolder import make_output_below
from freight.store.roots import Root, open_below
from tests.harness import wait_until

ATTACKS: Final = int(os.environ.get("PATH_ATTACKS", "10000"))
OPENS: Final = 2000
MALLORY: Final = Account("mallory")
STRANGER: Final = 65000
_attacking = settings(
    deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck), max_examples=ATTACKS
)


@dataclass
class Ground:
    """A granted folder with much in it that is no good, and a secret beside it."""

    folder: Path
    allowed: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def __post_init__(self) -> None:
        self.top = self.folder / "top"
        self.scratch = self.top / "scratch"
        self.grants = Grants({"mallory": PathGrant((str(self.top),), (str(self.scratch),))}, {"mallory": STRANGER}.get)

    def build(self) -> None:
        """Lay everything out."""
        for folder in ("top/a/b", "top/scratch", "lent", "private"):
            (self.folder / folder).mkdir(parents=True)
        for name in ("secret", "lent/secret", "private/secret", "topper", "top/good", "top/a/good", "top/a/b/good"):
            path = self.folder / name
            path.write_text(name)
            path.chmod(0o640)
            if name.startswith("top/"):
                self.allow(path)
        (self.top / "hard").hardlink_to(self.folder / "private" / "secret")
        os.mkfifo(self.top / "pipe")
        os.mkfifo(self.top / "a" / "pipe")
        with closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(str(self.top / "sock"))
        for name, target in LINKS.items():
            (self.top / name).symlink_to(target.format(top=self.top, folder=self.folder))
        with suppress(PermissionError):  # Only the superuser makes devices.
            os.mknod(self.top / "null", 0o20666, os.makedev(1, 3))
            os.mknod(self.top / "disk", 0o60666, os.makedev(7, 0))

    def allow(self, path: Path) -> None:
        """Let this file be read."""
        found = path.stat()
        self.allowed.add((found.st_dev, found.st_ino))

    def outside(self) -> dict[str, tuple[float, bytes]]:
        """Return all that is beside the granted folder, as it is."""
        return {
            str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for beside in self.folder.iterdir()
            if beside != self.top
            for path in (self.folder, beside, *beside.rglob("*"))
        }


LINKS: Final = {
    "in": "a/b",
    "in_by_name": "{top}/a",
    "out": "..",
    "out_by_name": "{folder}",
    "far_out": "../../../../../../..",
    "to_secret": "../secret",
    "to_secret_by_name": "{folder}/secret",
    "to_nothing": "../nothing",
    "loop": "loop",
    "loop_1": "loop_2/x",
    "loop_2": "loop_1",
    "slash": "/",
    "proc": "/proc/self/root",
    "cwd": "/proc/self/cwd",
    "fds": "/dev/fd",
    "stdin": "/dev/stdin",
    "zero": "/dev/zero",
    "out_and_in": "../top/a",
    "a/up": "../..",
    "a/b/round": "../../a/b/../up",
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ground]:
    """Lay out the ground, with other file systems mounted in it where that is possible."""
    made = Ground(tmp_path_factory.mktemp("ground"))
    made.build()
    mounted: list[Path] = []
    try:
        for name, source in (("mounted_proc", Path("/proc")), ("mounted", made.folder / "lent")):
            (made.top / name).mkdir()
            command = ["mount", "--bind", str(source), str(made.top / name)]
            with suppress(FileNotFoundError):
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    mounted.append(made.top / name)
        # Who mounts a folder means it to be there; what is above it is not.
        (made.folder / "lent" / "lent").write_text("lent")
        made.allow(made.folder / "lent" / "lent")
        made.allow(made.folder / "lent" / "secret")
        yield made
    finally:
        for path in mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


NAMES: Final = [
    "a", "b", "good", "up", "round", "..", "..", ".", "", "top", "secret", "private", "lent", "hard", "pipe", "sock",
    "null", "disk", "mounted", "mounted_proc", "made", "scratch", "self", "root", "cwd", "fd", "0", "1", "mounts",
    "environ", "etc", "passwd", "proc", "dev", "zero", "topper", *LINKS,
]  # fmt: skip
TAME: Final = ["a", "b", "a", "b", "made", "in", "in_by_name", "mounted", "scratch", "a/up", "a/b/round"]
ODD: Final = [
    "\0",
    "\n",
    "\x7f",
    "\udcff",
    "\ud83d",
    "é…",
    "%2e%2e",
    "~",
    "*",
    "$HOME",
    "\\",
    " ",
    "x" * 256,
    "x/" * 2048,
]
# What must not be opened, wherever a path finds it.
BAD: Final = [
    "hard", "secret", "pipe", "sock", "null", "disk", "to_secret", "mounted_proc/version", "mounted_proc/self/environ",
    "mounted_proc/self/root{folder}/secret", "mounted_proc/self/cwd/pyproject.toml", "mounted/../../secret",
]  # fmt: skip
STARTS: Final = ["{top}/", "{folder}/", "/", "", "{top}", "//{top}/", "/proc/self/root{top}/"]
ENDS: Final = ["", "../", "../..", "{top}/", "{folder}/", "/", "/proc/self/fd/", "/dev/fd/"]


def way(recipe: bytes, starts: list[str]) -> str:
    """Return the path that a recipe makes: a byte for each part, so that thousands are quickly drawn."""
    kind, *picks = recipe
    names = NAMES + ODD if kind < 64 else NAMES if kind < 128 else TAME
    start = "{top}/" if kind >= 96 else starts[kind % len(starts)]
    end = ["good"] if kind >= 176 else [BAD[kind % len(BAD)]] if kind >= 128 else []
    return start + "/".join([names[pick % len(names)] for pick in picks] + end)


PATH: Final = st.builds(way, st.binary(min_size=1, max_size=6), st.just(STARTS))
# What a link points to.
TARGET: Final = st.builds(way, st.binary(min_size=1, max_size=5), st.just(ENDS)).filter(
    lambda target: 0 < len(target) < 4000 and target.isprintable()
)


@contextmanager
def link(path: Path, target: str) -> Generator[None]:
    """Have a link there for the time of the block."""
    path.symlink_to(target)
    try:
        yield
    finally:
        path.unlink()


def read(opened: int) -> tuple[int, int]:
    """Return which file is open, and close it."""
    try:
        found = os.fstat(opened)
        return found.st_dev, found.st_ino
    finally:
        os.close(opened)


def ways_in(ground: Ground, path: Path) -> Iterator[tuple[int, int] | None]:
    """Yield which file each way of opening a path gives: the kernel's, that of our own walk, and the grants'."""
    root = Root(ground.top, STRANGER)
    with pytest.MonkeyPatch.context() as patch:
        for finds in (beneath.kernel_walk, lambda *_: None):
            patch.setattr(roots, "kernel_walk", finds)
            try:
                yield read(open_below(root, path))
            except FreightError:
                yield None


def opened(ground: Ground) -> list[str]:
    """Return what of the ground this process has open; other tests play beside this one."""
    found: list[str] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(str(ground.folder)))


def test_no_path_leads_to_a_file_outside(ground: Ground) -> None:
    """Both ways of finding a file agree on each of the attacks, and so do the descriptors before and after."""
    read_good = 0

    @_attacking
    @given(PATH, TARGET)
    def attack(path: str, target: str) -> None:
        nonlocal read_good
        path, target = (text.format(top=ground.top, folder=ground.folder) for text in (path, target))
        with link(ground.top / "made", target):
            (found,) = set(ways_in(ground, Path(path)))
            assert found is None or found in ground.allowed
            read_good += found is not None
            with suppress(FreightError):
                assert read(ground.grants.open_input(MALLORY, path)) in ground.allowed

    before = opened(ground)
    attack()
    assert opened(ground) == before
    # Else the attacks are all too wild to find anything.
    assert read_good > ATTACKS // 100


def test_no_output_goes_outside(ground: Ground) -> None:
    before, written = ground.outside(), 0

    @settings(_attacking, max_examples=max(ATTACKS // 10, 1))
    @given(PATH, TARGET)
    def attack(path: str, target: str) -> None:
        nonlocal written
        path, target = (text.format(top=ground.scratch, folder=ground.top) for text in (path, target))
        with link(ground.scratch / "made", target):
            for name, end in LINKS.items():
                if "/" not in name:
                    (ground.scratch / name).symlink_to(end.format(top=ground.scratch, folder=ground.top))
            try:
                root, folder = ground.grants.output_root(MALLORY, path)
                with make_output_below(root, folder) as out:
                    os.close(out.create("results"))
                    out.replace("made", b"progress")
                    written += 1
            except FreightError:
                pass
        shutil.rmtree(ground.scratch)
        ground.scratch.mkdir()

    kept = {path.name for path in ground.top.iterdir()}
    attack()
    assert ground.outside() == before
    assert {path.name for path in ground.top.iterdir()} == kept
    assert written > ATTACKS // 1000


_SWAPPER: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
here, other = (os.fsencode(path) for path in sys.argv[1:3])
os.write(1, b"on")
while os.getppid() == int(sys.argv[3]):
    # In one step, so that there is always one of the two.
    for _ in range(1000):
        if libc.renameat2(-100, here, -100, other, 2):
            aside = here + b".aside"
            os.rename(here, aside)
            os.rename(other, here)
            os.rename(aside, other)
"""


@contextmanager
def swapping(here: Path, other: Path) -> Generator[None]:
    """Have another process put the one in the other's place and back, as fast as it can."""
    command = [sys.executable, "-c", _SWAPPER, str(here), str(other), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None
            assert swapper.stdout.read(2) == b"on"
            yield
        finally:
            swapper.kill()


@dataclass
class Race:
    """A granted folder in which a folder and a link to a secret change places."""

    folder: Path

    def __post_init__(self) -> None:
        self.root = Root(self.folder / "top", os.getuid())
        self.folder.chmod(0o755)
        for folder in ("top/a/b", "outside/b"):
            (self.folder / folder).mkdir(parents=True)
        (self.folder / "top" / "a" / "b" / "file").write_text("inside")
        (self.folder / "outside" / "b" / "file").write_text("outside")
        (self.folder / "outside" / "b" / "file").chmod(0o600)
        (self.folder / "top" / "link").symlink_to("../outside")
        for folder in ("top", "top/a", "top/a/b", "outside", "outside/b"):
            (self.folder / folder).chmod(0o755)
        (self.folder / "top" / "a" / "b" / "file").chmod(0o644)

    def open(self, root: Root, path: str) -> str:
        """Return what can be read there; "" for a refusal."""
        try:
            with os.fdopen(open_below(root, self.root.path / path)) as file:
                return file.read()
        except FreightError:
            return ""


@pytest.fixture
def race(tmp_path: Path) -> Race:
    """Give a granted folder for races."""
    return Race(tmp_path)


@pytest.mark.parametrize("way", ["kernel", "own walk", "public"])
@pytest.mark.parametrize("path", ["a/b/file", "a/b/../b/file"])
def test_folder_swapped_for_a_link_is_never_followed_out(
    race: Race, monkeypatch: pytest.MonkeyPatch, way: str, path: str
) -> None:
    if way == "own walk":
        monkeypatch.setattr(roots, "kernel_walk", lambda *_: None)
    # The path's ".." comes by a link: one that is written out is refused anyway.
    (race.root.path / "entry").symlink_to(path)
    root = Root(race.root.path, is_public=True) if way == "public" else race.root
    read: list[str] = []

    def enough() -> bool:
        read.extend(race.open(root, "entry") for _ in range(OPENS // 6))
        return len(read) >= OPENS and len(set(read)) > 1

    with swapping(race.root.path / "a", race.root.path / "link"):
        wait_until(enough, "both the folder and the link were met")
    assert set(read) == {"inside", ""}


def test_folder_moved_out_while_the_walk_is_in_it_leads_nowhere_else(race: Race) -> None:
    (race.folder / "file").write_text("outside")
    (race.root.path / "file").write_text("inside")
    (race.root.path / "a" / "b" / "up").symlink_to("../../file")
    (race.folder / "away").mkdir()
    with swapping(race.root.path / "a", race.folder / "away"):
        read = {race.open(race.root, "a/b/up") for _ in range(OPENS)}
    assert read <= {"inside", ""}


def test_output_into_a_folder_that_is_swapped_for_a_link_stays_inside(race: Race) -> None:
    made = 0
    outside = race.folder / "outside"

    def written(number: int) -> bool:
        try:
            with make_output_below(race.root, race.root.path / "a" / "b" / f"out{number}") as out:
                os.close(out.create("results"))
                out.replace("progress", b"{}")
        except FreightError:
            return False
        return True

    with swapping(race.root.path / "a", race.root.path / "link"):
        made = sum(written(number) for number in range(OPENS // 4))
    assert 0 < made < OPENS // 4
    assert {path.name for path in outside.rglob("*")} == {"b", "file"}
    assert (outside / "b" / "file").read_text() == "outside"
