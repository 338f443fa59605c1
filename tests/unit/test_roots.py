"""Files below a granted folder: which are opened, how they are copied, and where output goes."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import pytest

from freight.errors import FreightError, Interrupted, NotAllowed, OperationError, UserError
from freight.store import beneath, roots
from freight.store.outputfolder import OutputFolder, make_output_below
from freight.store.roots import PUBLIC, Root, copy_out, open_below


@pytest.fixture(params=["kernel", "own walk"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A granted folder, whose files the kernel finds, or, where the kernel cannot, a walk of ours."""
    if request.param == "own walk":
        monkeypatch.setattr(roots, "kernel_walk", lambda *_: None)
    top = tmp_path / "granted"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "deep" / "file.jsonl").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    return Root(top, os.getuid())


def content(fd: int) -> str:
    """Return what an open file holds, and close it."""
    with os.fdopen(fd, "rb") as file:
        return file.read().decode()


def descriptors() -> int:
    """Return how many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


LINKS = {
    "relative": "deep/file.jsonl",
    "up and down": "deep/er/../file.jsonl",
    "through another": "folder/file.jsonl",
    "absolute": "{top}/deep/file.jsonl",
    "absolute through another": "{top}/folder/file.jsonl",
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_link_that_stays_inside_is_followed(root: Root, target: str) -> None:
    (root.path / "folder").symlink_to("deep")
    (root.path / "link").symlink_to(target.format(top=root.path))
    assert content(open_below(root, root.path / "link")) == "inside"


OUTSIDE = {
    "relative": "../secret",
    "out and in again": "../granted/deep/file.jsonl",
    "absolute": "{top}/../secret",
    "to nothing": "{top}/../nothing",
    "to everything": "/",
    "beside": "{top}beside/secret",
    "by proc": "/proc/self/root/{top}/deep/file.jsonl",
}


@pytest.mark.parametrize("target", OUTSIDE.values(), ids=OUTSIDE)
def test_link_that_leads_out_is_refused_in_the_same_words_whatever_is_there(root: Root, target: str) -> None:
    (root.path / "link").symlink_to(target.format(top=root.path))
    with pytest.raises(NotAllowed) as refused:
        open_below(root, root.path / "link")
    assert refused.value.message == f"{root.path}/link leads out of {root.path}"


def test_path_that_is_not_below_the_root_is_refused(root: Root) -> None:
    for path in ("../secret", "deep/../../secret", "\0"):
        with pytest.raises(NotAllowed, match="leads out"):
            open_below(root, root.path / path)
    with pytest.raises(NotAllowed, match="leads out"):
        open_below(root, Path(f"{root.path}beside"))


def test_path_that_no_file_can_have_is_refused(root: Root) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        open_below(root, root.path / "\ud83d")
    with pytest.raises(UserError, match="not valid UTF-8"):
        make_output_below(root, root.path / "\ud83d")
    with pytest.raises(UserError, match="too long"):
        open_below(root, root.path / ("x" * 256))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(path))


def loop(path: Path) -> None:
    path.symlink_to(path.name)


REFUSED: dict[str, tuple[Callable[[Path], object], type[FreightError], str]] = {
    "nothing": (lambda path: None, UserError, "there is no "),
    "folder": (Path.mkdir, UserError, "is a folder"),
    "pipe": (fifo, UserError, "no regular file"),
    "socket": (bound_socket, UserError, "no regular file"),
    "loop of links": (loop, UserError, "cannot follow"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), UserError, "there is no "),
    "link to a file as a folder": (lambda path: path.symlink_to("deep/file.jsonl/"), UserError, "needs a folder"),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_regular_file_is_refused(
    root: Root, make: Callable[[Path], object], error: type[FreightError], words: str
) -> None:
    make(root.path / "it")
    with pytest.raises(error, match=words):
        open_below(root, root.path / "it")


def test_pipe_with_a_writer_is_neither_read_nor_woken(root: Root) -> None:
    os.mkfifo(root.path / "pipe")
    reader = os.open(root.path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(root.path / "pipe", os.O_WRONLY)
    os.write(writer, b"left alone")
    with pytest.raises(UserError, match="no regular file"):
        open_below(root, root.path / "pipe")
    assert os.read(reader, 100) == b"left alone"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/self/root/etc/hostname", "/sys/kernel/uevent_seqnum"])
def test_the_kernels_own_files_are_refused_even_where_granted(path: str) -> None:
    for top in ("/", str(Path(path).parent)):
        with pytest.raises(FreightError, match=r"kernel's own|leads out|cannot follow"):
            open_below(Root(Path(top)), Path(path))


def test_hard_link_to_a_strangers_private_file_is_refused(root: Root, tmp_path: Path) -> None:
    (tmp_path / "secret").chmod(0o640)
    (root.path / "hard").hardlink_to(tmp_path / "secret")
    stranger = Root(root.path, os.getuid() + 1)
    for someone in (stranger, Root(root.path)):
        with pytest.raises(NotAllowed, match="2 names"):
            open_below(someone, root.path / "hard")
    assert content(open_below(root, root.path / "hard")) == "outside"
    (tmp_path / "secret").chmod(0o644)
    assert content(open_below(stranger, root.path / "hard")) == "outside"
    (tmp_path / "secret").chmod(0o640)
    (tmp_path / "secret").unlink()
    assert content(open_below(stranger, root.path / "hard")) == "outside"


def test_path_of_too_many_folders_is_refused_and_leaves_nothing_open(root: Root) -> None:
    deep = root.path.joinpath(*["d"] * 101)
    deep.mkdir(parents=True)
    (deep / "file").write_text("")
    before = descriptors()
    everybody = Root(root.path, is_public=True)
    for folder in (root.path, *(root.path.joinpath(*["d"] * depth) for depth in range(102))):
        folder.chmod(0o755)
    with pytest.raises(UserError, match="100 folders"):
        open_below(everybody, deep / "file")
    assert descriptors() == before


def test_file_stays_open_whatever_its_name_leads_to_later(root: Root, tmp_path: Path) -> None:
    fd = open_below(root, root.path / "deep" / "file.jsonl")
    (root.path / "deep" / "file.jsonl").unlink()
    (root.path / "deep" / "file.jsonl").symlink_to(tmp_path / "secret")
    assert content(fd) == "inside"


def test_root_that_a_user_put_a_link_in_place_of_is_not_opened(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = root.path.with_name("alias")
    alias.symlink_to("granted")
    path = alias / "deep" / "file.jsonl"
    assert content(open_below(Root(alias), path)) == "inside"
    monkeypatch.setattr(roots, "_is_trusted", lambda link: False)
    with pytest.raises(OperationError, match=r"granted folder .*alias: a link that is not followed"):
        open_below(Root(alias), path)


def test_only_links_of_the_administrator_or_of_freight_lead_to_a_root(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x")
    ours = list(os.lstat(tmp_path / "link"))
    for uid, trusted in ((0, True), (os.geteuid(), True), (os.geteuid() + 1, False)):
        ours[4] = uid
        assert roots._is_trusted(os.stat_result(ours)) is trusted


@pytest.fixture
def public(root: Root) -> Root:
    """A folder that everybody may enter, with a file that everybody may read."""
    for path, mode in (("", 0o711), ("deep", 0o711), ("deep/file.jsonl", 0o604)):
        (root.path / path).chmod(mode)
    return Root(root.path, is_public=True)


def test_file_that_everybody_may_read_is_opened_without_a_grant(public: Root) -> None:
    assert content(open_below(public, public.path / "deep" / "file.jsonl")) == "inside"
    os.close(open_below(PUBLIC, Path("/etc/passwd")))


@pytest.mark.parametrize(("path", "mode"), [("", 0o750), ("deep", 0o776), ("deep/file.jsonl", 0o673)])
def test_one_step_closed_to_others_closes_a_file_to_everybody(public: Root, path: str, mode: int) -> None:
    (public.path / path).chmod(mode)
    with pytest.raises(NotAllowed, match="not everybody may"):
        open_below(public, public.path / "deep" / "file.jsonl")


def test_folder_that_a_link_leads_through_must_be_open_to_everybody(public: Root) -> None:
    (public.path / "private").mkdir(mode=0o700)
    (public.path / "private" / "back").symlink_to("../deep/file.jsonl")
    (public.path / "link").symlink_to("private/back")
    with pytest.raises(NotAllowed, match="not everybody may enter"):
        open_below(public, public.path / "link")


@pytest.fixture
def copying(tmp_path: Path) -> Generator[tuple[Path, int, Callable[[], int]]]:
    """A source, a descriptor to copy to, and how to open the source."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    opened: list[int] = []

    def open_source() -> int:
        opened.append(os.open(source, os.O_RDONLY))
        return opened[-1]

    yield source, target, open_source
    for fd in (*opened, target):
        os.close(fd)


@pytest.mark.parametrize("code", [None, errno.EXDEV, errno.ENOSYS, 0], ids=str)
@pytest.mark.parametrize("sends", [True, False])
def test_copy_is_whole_whatever_the_kernel_can_do(
    copying: tuple[Path, int, Callable[[], int]], monkeypatch: pytest.MonkeyPatch, code: int | None, sends: bool
) -> None:
    def refuse(*_: object) -> int:
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    source, target, open_source = copying
    if code is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse)
        if not sends:
            monkeypatch.setattr(os, "sendfile", refuse)
    assert copy_out(open_source(), target, "source", 3 << 20) == 3 << 20
    assert os.pread(target, 4 << 20, 0) == source.read_bytes()


def test_file_over_the_limit_is_not_copied(copying: tuple[Path, int, Callable[[], int]]) -> None:
    source, target, open_source = copying
    os.truncate(source, 1 << 40)
    with pytest.raises(UserError, match=f"has {1 << 40} bytes; the limit .* is 1000"):
        copy_out(open_source(), target, "source", 1000)
    assert os.fstat(target).st_size == 0


CHANGES: dict[str, Callable[[Path], object]] = {
    "grown": lambda path: os.truncate(path, 4 << 20),
    "shrunk": lambda path: os.truncate(path, 1 << 20),
    "touched": lambda path: os.utime(path, ns=(0, 0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_file_that_changes_while_it_is_copied_is_refused(
    copying: tuple[Path, int, Callable[[], int]], change: Callable[[Path], object]
) -> None:
    source, target, open_source = copying

    def changing() -> bool:
        change(source)
        return False

    with pytest.raises(OperationError, match="source changed while it was being copied"):
        copy_out(open_source(), target, "source", stopped=changing)


def test_copying_can_be_stopped(copying: tuple[Path, int, Callable[[], int]]) -> None:
    _, target, open_source = copying
    with pytest.raises(Interrupted):
        copy_out(open_source(), target, "source", stopped=lambda: True)


def mode_of(path: Path) -> int:
    """Return a path's mode bits."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mode", "folder"), [(0o640, 0o750), (0o600, 0o700), (0o664, 0o775), (0o660, 0o770)])
def test_output_folder_and_files_take_the_mode(root: Root, mode: int, folder: int) -> None:
    with make_output_below(root, root.path / "deep" / "out" / "batch", mode) as out:
        os.close(out.create("x.results.jsonl"))
        out.replace("x.progress.json", b"{}")
    made = root.path / "deep" / "out"
    assert mode_of(made) == mode_of(made / "batch") == folder
    assert {mode_of(path) for path in (made / "batch").iterdir()} == {mode}


def test_output_takes_the_folders_group_and_setgid_bit(root: Root) -> None:
    group = next((group for group in (*os.getgroups(), *([4242] if os.geteuid() == 0 else []))), os.getgid())
    os.chown(root.path / "deep", -1, group)
    (root.path / "deep").chmod(0o2775)
    with make_output_below(root, root.path / "deep" / "out" / "batch") as out:
        os.close(out.create("results"))
    for path in ("out", "out/batch", "out/batch/results"):
        assert (root.path / "deep" / path).stat().st_gid == group
    assert mode_of(root.path / "deep" / "out" / "batch") == 0o2750


def test_group_that_freight_may_not_give_is_named(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    with make_output_below(root, root.path / "deep") as out:
        monkeypatch.setattr(os, "fstat", _other_group(os.fstat))
        with pytest.raises(NotAllowed, match="may not give files to the folder's group"):
            out.create("results")
    assert not (root.path / "deep" / "results").exists()


def _other_group(fstat: Callable[[int], os.stat_result]) -> Callable[[int], os.stat_result]:
    def look(fd: int) -> os.stat_result:
        found = list(fstat(fd))
        if stat.S_ISDIR(found[0]):
            found[5] += 1
        return os.stat_result(found)

    return look


def test_output_through_links_stays_below_the_root(root: Root, tmp_path: Path) -> None:
    (root.path / "inside").symlink_to("deep")
    (root.path / "outside").symlink_to(tmp_path)
    with make_output_below(root, root.path / "inside" / "out") as out:
        out.replace("file", b"here")
    assert (root.path / "deep" / "out" / "file").read_bytes() == b"here"
    for folder in (root.path / "outside" / "out", root.path / "outside", tmp_path / "out"):
        with pytest.raises(NotAllowed, match="leads out"):
            make_output_below(root, folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["deep/file.jsonl", "deep/file.jsonl/out"])
def test_output_below_a_file_is_refused(root: Root, path: str) -> None:
    with pytest.raises(UserError, match="needs a folder where there is a file"):
        make_output_below(root, root.path / path)


def test_new_output_file_takes_nothings_place(root: Root, tmp_path: Path) -> None:
    (root.path / "deep" / "link").symlink_to(tmp_path / "made")
    with make_output_below(root, root.path / "deep") as out:
        for name in ("file.jsonl", "er", "link"):
            with pytest.raises(OperationError, match="there is something at"):
                out.create(name)
        with pytest.raises(ValueError, match="names no file"):
            out.create("../made")
    assert not (tmp_path / "made").exists()


def test_replacing_takes_a_links_place_and_leaves_what_it_led_to(root: Root, tmp_path: Path) -> None:
    (root.path / "deep" / "progress").symlink_to(tmp_path / "secret")
    with make_output_below(root, root.path / "deep") as out:
        out.replace("progress", b"done")
    assert (tmp_path / "secret").read_text() == "outside"
    assert not (root.path / "deep" / "progress").is_symlink()


def test_replacing_that_fails_leaves_what_was_there(root: Root) -> None:
    def break_off(out: OutputFolder) -> None:
        with out.replacing("file.jsonl") as fd:
            os.write(fd, b"half of")
            raise Interrupted("stop")

    with make_output_below(root, root.path / "deep") as out:
        with pytest.raises(Interrupted):
            break_off(out)
        # A leftover of one that was killed is no hindrance.
        with out.replacing("file.jsonl"):
            aside = next(path for path in (root.path / "deep").iterdir() if path.suffix == ".partial")
            leftover = aside.with_name("kept")
            leftover.hardlink_to(aside)
        leftover.rename(aside)
        out.replace("file.jsonl", b"whole")
    assert sorted(path.name for path in (root.path / "deep").iterdir()) == ["er", "file.jsonl"]
    assert (root.path / "deep" / "file.jsonl").read_bytes() == b"whole"


def test_output_goes_where_the_folder_went(root: Root, tmp_path: Path) -> None:
    with make_output_below(root, root.path / "out") as out:
        (root.path / "out").rename(root.path / "moved")
        (root.path / "out").symlink_to(tmp_path)
        out.replace("file", b"here")
        os.close(out.create("other"))
    assert sorted(path.name for path in (root.path / "moved").iterdir()) == ["file", "other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["granted", "secret"]


def test_old_kernel_says_that_it_cannot_tell(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_OPENAT2", 100_000)
    top = os.open(root.path, os.O_PATH)
    try:
        assert beneath.kernel_walk(top, ["deep"]) is None
    finally:
        os.close(top)
