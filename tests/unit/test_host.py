"""What the store asks of the host: file systems, processes, and the registry's one file."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from freight.core.model import EngineName, ModelEntry
from freight.errors import OperationError
from freight.store.filesystem import filesystem_type, is_network
from freight.store.processes import ProcessId, identify, start_ticks, this_process
from freight.store.registry import BUILT_IN, FILE, built_in_models, changing_registry, read_registry

ENTRY = ModelEntry(engine=EngineName.ENDPOINT, source=["http://a", "http://b"], aliases=["é"], batch=True)


def mounts(monkeypatch: pytest.MonkeyPatch, *lines: tuple[Path | str, str], device: Path) -> None:
    """Make the kernel report these mount points and types; those outside of `device` are on other devices."""
    found = device.stat().st_dev
    here = f"{os.major(found)}:{os.minor(found)}"
    text = ""
    for point, kind in lines:
        number = here if device.is_relative_to(str(point)) else "0:9"
        text += f"30 1 {number} / {_escaped(str(point))} rw - {kind} source rw\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\134").replace(" ", "\\040")


def test_the_types_of_the_kernels_own_file_systems_are_known() -> None:
    assert filesystem_type(Path("/proc")) == "proc"
    assert filesystem_type(Path("/proc/self/fd")) == "proc"
    assert filesystem_type(Path("/sys")) == "sysfs"


def test_a_folder_of_this_box_has_a_type_and_is_local(tmp_path: Path) -> None:
    assert filesystem_type(tmp_path)
    assert not is_network(Path("/proc"))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "9p"])
def test_network_file_systems_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    mounts(monkeypatch, ("/", "ext4"), (tmp_path, kind), device=tmp_path)

    assert filesystem_type(tmp_path) == kind
    assert is_network(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"])
def test_local_file_systems_are_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    mounts(monkeypatch, ("/", "nfs4"), (tmp_path, kind), device=tmp_path)

    assert filesystem_type(tmp_path) == kind
    assert not is_network(tmp_path)


@pytest.mark.parametrize("name", ["with space", "données", "back\\slash", "日本"])
def test_mount_points_of_any_name_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "deep"
    folder.mkdir(parents=True)
    mounts(monkeypatch, ("/", "ext4"), (tmp_path / name, "nfs4"), device=folder)

    assert filesystem_type(folder) == "nfs4"


def test_the_innermost_mount_counts_and_a_name_that_only_begins_alike_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    mounts(monkeypatch, ("/", "ext4"), (folder, "nfs4"), (tmp_path, "xfs"), (tmp_path / "dat", "cifs"), device=folder)

    assert filesystem_type(folder) == "nfs4"


def test_a_link_is_followed_to_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")

    assert filesystem_type(tmp_path / "link") == "proc"


def test_a_process_is_known_by_more_than_its_pid() -> None:
    me = this_process()

    assert me.pid == os.getpid()
    assert me.is_local()
    assert me.is_running()
    assert not msgspec.structs.replace(me, started=me.started - 1).is_running()
    assert not msgspec.structs.replace(me, boot="another").is_running()
    assert not ProcessId("another-host", me.boot, me.pid, me.started).is_local()


def test_a_process_that_has_ended_does_not_run_even_before_its_parent_has_looked() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        assert process.is_running()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_running()
        assert start_ticks(child.pid) is None
    assert identify(child.pid).started == 0


def test_a_process_whose_name_looks_like_fields_is_read_right(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 ("
    odd.symlink_to("/bin/cat")
    with subprocess.Popen([str(odd)], stdin=subprocess.PIPE) as child:
        assert identify(child.pid).is_running()
        assert (start_ticks(child.pid) or 0) >= (start_ticks(os.getpid()) or 0)
        child.kill()


def test_a_folder_without_a_registry_has_no_models(tmp_path: Path) -> None:
    assert read_registry(tmp_path) == {}
    assert read_registry(tmp_path / "missing") == {}


def test_what_the_block_changes_is_registered_and_comes_back_equal(tmp_path: Path) -> None:
    with changing_registry(tmp_path / "new" / "data") as models:
        models["lab"] = ENTRY
    with changing_registry(tmp_path / "new" / "data") as models:
        models["other"] = ModelEntry(engine=EngineName.LLAMACPP, source="/a.gguf")
        assert models["lab"] == ENTRY

    assert list(read_registry(tmp_path / "new" / "data")) == ["lab", "other"]
    assert (tmp_path / "new" / "data").stat().st_mode & 0o777 == 0o700


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    with changing_registry(tmp_path) as models:
        models["lab"] = ENTRY
    before = (tmp_path / FILE).read_bytes()

    with pytest.raises(ZeroDivisionError), changing_registry(tmp_path) as models:
        models.clear()
        raise ZeroDivisionError

    assert (tmp_path / FILE).read_bytes() == before


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    def add(number: int) -> None:
        with changing_registry(tmp_path) as models:
            models[f"m{number}"] = ENTRY

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(read_registry(tmp_path)) == {f"m{number}" for number in range(12)}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"a":{}}', b'{"a":{"engine":"x"}}', b'{"a":{"engine":"vllm","b":1}}']
)
def test_a_damaged_registry_is_named_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)

    with pytest.raises(OperationError, match="damaged") as caught, changing_registry(tmp_path) as models:
        models["lab"] = ENTRY

    assert str(tmp_path / FILE) in caught.value.message
    assert (tmp_path / FILE).read_bytes() == content


def test_the_built_in_model_is_a_file_that_exists() -> None:
    [(name, entry)] = built_in_models().items()

    assert name == BUILT_IN
    assert entry.engine is EngineName.LLAMACPP
    assert Path(entry.sources()[0]).is_file()
