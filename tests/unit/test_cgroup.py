"""Control groups: where they can be had, that they hold whatever a worker starts, and that nothing else is touched."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from uuid import uuid4

import pytest

from freight.errors import LauncherError
from freight.launchers.cgroup import (
    Group,
    enter,
    find_group,
    folders_of,
    group_of,
    make_group,
    own_folder,
    own_path,
)
from tests.harness import wait_until

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 master:1 - cgroup2 cgroup2 rw
"""
V1_ONLY = "".join(HYBRID.splitlines(keepends=True)[:2])
UNIFIED = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
PART = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"


def can_have_groups() -> bool:
    """Return whether this machine lets this user have control groups."""
    with some_group() as group:
        return group is not None


@contextmanager
def some_group() -> Generator[Group | None]:
    """A new group for as long as the block takes; None where there is none to be had."""
    group = make_group(f"test-{uuid4().hex[:12]}")
    try:
        yield group
    finally:
        if group is not None:
            group.kill()
            wait_until(group.remove, "the group's folder is gone", 10)


@pytest.fixture
def group() -> Generator[Group]:
    """A new group; the test does not apply where the machine gives none."""
    with some_group() as made:
        if made is None:
            pytest.skip("this machine's control groups are not this user's to divide")
        yield made


@contextmanager
def sleeping(*words: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that sleeps until the end of the block."""
    child = subprocess.Popen([*words, "sleep", "600"])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("membership", "mountinfo", "folder"),
    [
        ("4:memory:/x\n0::/\n", HYBRID, "/sys/fs/cgroup/unified"),
        ("0::/system.slice/a.service\n", HYBRID, "/sys/fs/cgroup/unified/system.slice/a.service"),
        ("0::/a b\n", UNIFIED.replace("/sys/fs/cgroup", r"/mnt/with\040space"), "/mnt/with space/a b"),
        ("0::/docker/abc/own\n", PART, "/sys/fs/cgroup/own"),
        # The mount shows another part of the tree, or the group is outside of this namespace.
        ("0::/docker/other\n", PART, None),
        ("0::/../other\n", UNIFIED, None),
        ("4:memory:/x\n0::/x\n", V1_ONLY, None),
    ],
)
def test_own_group_is_found_where_cgroup_v2_is_mounted(membership: str, mountinfo: str, folder: str | None) -> None:
    path = own_path(membership)
    assert path is not None
    assert list(folders_of(path, mountinfo)) == ([Path(folder)] if folder else [])


def test_process_without_a_group_of_version_two_has_none() -> None:
    assert own_path("4:memory:/x\n1:name=systemd:/y\n") is None
    assert own_path("0::/a:b\n") == PurePosixPath("/a:b")


def test_group_is_below_the_own_one_and_named_for_its_worker(group: Group) -> None:
    assert group.path.parent == own_folder()
    assert group.path.name.startswith("freight-test-")
    assert group.is_empty()
    assert group.pids() == []


def test_process_in_a_group_is_seen_and_keeps_its_folder(group: Group) -> None:
    with sleeping() as child:
        group.add(child.pid)
        assert group.pids() == [child.pid]
        assert [process.pid for process in group.processes()] == [child.pid]
        assert not group.is_empty()
        assert not group.remove()
        assert group.path.is_dir()


def test_kill_ends_what_left_its_session_and_its_environment_too(group: Group) -> None:
    with sleeping("setsid", "env", "-i") as child:
        group.add(child.pid)
        group.kill()
        assert child.wait(10) == -signal.SIGKILL
        wait_until(group.is_empty, "the group is empty", 10)


def test_kill_reaches_groups_below(group: Group) -> None:
    below = Group(group.path / "engine" / "inner")
    below.path.mkdir(parents=True)
    with sleeping() as child, sleeping() as outside:
        below.add(child.pid)
        assert group.pids() == [child.pid]
        assert not group.is_empty()
        group.kill()
        assert child.wait(10) == -signal.SIGKILL
        wait_until(group.is_empty, "the group is empty", 10)
        assert group.remove()
        assert outside.poll() is None
    assert not group.path.exists()


def test_process_moves_itself_in_and_its_children_follow(group: Group) -> None:
    script = (
        "import pathlib, subprocess, sys; from freight.launchers.cgroup import enter;"
        "print(enter(pathlib.Path(sys.argv[1])), flush=True); subprocess.run(['sleep', '600'])"
    )
    words = [sys.executable, "-c", script, str(group.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        wait_until(lambda: len(group.pids()) == 2, "its child is there")
        group.kill()
        assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["freight-gone", "other", "freight-a\0b"])
def test_worker_that_cannot_enter_goes_on(tmp_path: Path, name: str) -> None:
    assert not enter(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_where_there_is_no_group(tmp_path: Path) -> None:
    folder = tmp_path / "freight-w1"
    folder.mkdir()
    assert not enter(folder)
    Group(folder).kill()
    assert not list(folder.iterdir())


def test_group_that_is_gone_is_empty_and_killing_it_does_nothing(group: Group) -> None:
    assert group.remove()
    group.kill()
    assert group.is_empty()
    assert group.pids() == []
    assert group.remove()
    with sleeping() as child, pytest.raises(LauncherError, match=f"cannot move process {child.pid}"):
        group.add(child.pid)


def test_group_is_found_again_by_its_path(group: Group) -> None:
    assert find_group(group.path) == group
    assert find_group(str(group.path)) == group
    group.remove()
    assert find_group(group.path) is None


def test_group_is_found_again_by_its_worker(group: Group) -> None:
    found = group_of(group.path.name.removeprefix("freight-"))

    assert found is not None and found.path == group.path
    assert group_of("nobody") is None


def test_group_with_processes_is_not_made_again(group: Group) -> None:
    worker = group.path.name.removeprefix("freight-")
    assert make_group(worker) == group
    with sleeping() as child:
        group.add(child.pid)
        assert make_group(worker) is None


def test_folder_that_is_no_worker_s_group_is_none_of_ours(group: Group, tmp_path: Path) -> None:
    own = group.path.parent
    foreign = own / f"other-{uuid4().hex}"
    foreign.mkdir()
    try:
        assert find_group(foreign) is None
        assert find_group(group.path / ".." / group.path.name) is None
    finally:
        foreign.rmdir()
    assert find_group(own) is None
    plain = tmp_path / group.path.name
    plain.mkdir()
    (plain / "cgroup.procs").touch()
    (plain / "cgroup.kill").touch()
    assert find_group(plain) is None
    assert find_group(Path(group.path.name)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a group another user's")
def test_group_of_another_user_is_none_of_ours(group: Group) -> None:
    os.chown(group.path, 65534, 65534)
    assert find_group(group.path) is None


@pytest.mark.parametrize("worker", ["", "..", "a/b", "-a", "a.b", "a b", "x" * 200])
def test_worker_that_cannot_name_a_folder_is_refused(worker: str) -> None:
    with pytest.raises(ValueError, match="no control group"):
        make_group(worker)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without groups of its own")
def test_user_without_delegated_groups_has_none() -> None:
    script = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "from freight.launchers.cgroup import make_group; print(make_group('w1'))"
    )
    # Imported first, with root's rights: what another user may read is not the matter here.
    script = "import freight.launchers.cgroup; " + script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("None\n", "")
