"""Copies of models on a disk of the machine."""

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from freight.store.staging import staged
from tests.faults.small_disk import small_disk
from tests.harness import ROOT, wait_until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as it lies in a hub cache: a folder of links to contents."""
    snapshot = tmp_path / "cache" / "snapshots" / ("a" * 40)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
        blob = tmp_path / "cache" / "blobs" / name.replace("/", "-")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(name.encode() * 1000)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "local" / "stage"


class Moved:
    """Counts the bytes that were copied."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, count: int) -> None:
        self.count += count


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def size(folder: Path) -> int:
    return sum(map(len, contents(folder).values()))


def test_folder_is_copied_with_the_contents_of_its_links(model: Path, stage: Path) -> None:
    moved = Moved()
    copy = staged(model, stage, moved)
    assert copy.is_relative_to(stage)
    assert copy.name == model.name
    assert contents(copy) == contents(model)
    assert not any(path.is_symlink() for path in copy.rglob("*"))
    assert moved.count == size(model)


def test_copy_is_made_once(model: Path, stage: Path) -> None:
    moved = Moved()
    assert staged(model, stage) == staged(model, stage, moved)
    assert moved.count == 0


def test_file_is_copied_with_the_other_parts_of_its_set(tmp_path: Path, stage: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
        (tmp_path / name).write_text(name)
    copy = staged(tmp_path / "a-00001-of-00002.gguf", stage)
    assert copy.read_text() == copy.name == "a-00001-of-00002.gguf"
    assert copy.with_name("a-00002-of-00002.gguf").read_text() == "a-00002-of-00002.gguf"
    alone = staged(tmp_path / "b.gguf", stage)
    assert sorted(path.name for path in alone.parent.glob("*.gguf")) == ["b.gguf"]


@pytest.mark.parametrize("change", ["content", "time", "more", "less"])
def test_copy_of_an_earlier_state_is_replaced(model: Path, stage: Path, change: str) -> None:
    first = staged(model, stage)
    weights = (model / "model.safetensors").resolve()
    if change == "content":
        weights.write_bytes(b"new")
    elif change == "time":
        os.utime(weights, (1, 1))
    elif change == "more":
        (model / "more.json").write_text("{}")
    else:
        (model / "config.json").unlink()
    moved = Moved()
    assert staged(model, stage, moved) == first
    assert contents(first) == contents(model)
    assert moved.count == size(model)


def test_copy_that_lost_a_file_is_made_again(model: Path, stage: Path) -> None:
    copy = staged(model, stage)
    (copy / "config.json").unlink()
    assert contents(staged(model, stage)) == contents(model)


def test_models_of_one_name_do_not_meet(tmp_path: Path, stage: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.gguf").write_text(folder)
    copies = [staged(tmp_path / folder / "net.gguf", stage) for folder in ("x", "y")]
    assert [copy.read_text() for copy in copies] == ["x", "y"]


def test_copies_are_private(model: Path, stage: Path) -> None:
    assert staged(model, stage).parent.stat().st_mode & 0o077 == 0


def test_what_is_on_the_stage_already_stays_there(stage: Path) -> None:
    stage.mkdir(parents=True)
    (stage / "net.gguf").write_text("x")
    assert staged(stage / "net.gguf", stage) == stage / "net.gguf"


def test_loops_and_hidden_folders_are_left_out(model: Path, stage: Path) -> None:
    (model / "loop").symlink_to(model)
    (model / ".git").mkdir()
    (model / ".git" / "packed").write_text("x")
    (model / "gone.json").symlink_to("nowhere")
    copy = staged(model, stage)
    assert set(contents(copy)) == {"config.json", "model.safetensors", "1_Pooling/config.json"}


def test_several_at_once_copy_once_and_all_see_it_move(model: Path, stage: Path) -> None:
    begun, go_on = Event(), Event()

    def first(_: int) -> None:
        begun.set()
        assert go_on.wait(60)

    seen = [Moved(), Moved(), Moved()]
    with ThreadPoolExecutor(4) as pool:
        copying = pool.submit(staged, model, stage, first)
        assert begun.wait(60)
        waiting = [pool.submit(staged, model, stage, moved) for moved in seen]
        wait_until(lambda: all(moved.count for moved in seen), "those that wait see the first piece")
        go_on.set()
        copies = {copying.result(), *(each.result() for each in waiting)}
    assert len(copies) == 1
    assert contents(copies.pop()) == contents(model)
    assert all(0 < moved.count <= size(model) for moved in seen)


def test_copier_that_is_killed_leaves_no_copy_and_the_next_makes_one(model: Path, stage: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from freight.store.staging import staged\n"
        "def stop(_): print('half', flush=True); time.sleep(600)\n"
        "staged(Path(sys.argv[1]), Path(sys.argv[2]), stop)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(model), str(stage)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout as said:
        assert said.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    copy = staged(model, stage)
    assert contents(copy) == contents(model)
    assert not list(stage.glob("*.new"))


def test_who_counts_may_end_the_copying(model: Path, stage: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staged(model, stage, stop)
    assert [path.suffix for path in stage.iterdir()] == [".lock"]
    assert contents(staged(model, stage)) == contents(model)


def test_model_that_changes_meanwhile_is_used_where_it_is(
    model: Path, stage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(_: int) -> None:
        (model / "late.json").write_text("{}")

    with caplog.at_level(logging.WARNING):
        assert staged(model, stage, change) == model
    assert "changed while it was copied" in caplog.text
    assert staged(model, stage) != model


def test_full_disk_leaves_the_model_where_it_is_and_no_half_copy(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "big.json").write_bytes(bytes(3_000_000))
    with small_disk(tmp_path, "2m") as disk, caplog.at_level(logging.WARNING):
        assert staged(model, disk.path) == model
        assert "No space left on device" in caplog.text
        assert [path.suffix for path in disk.path.iterdir()] == [".lock"]


def test_disk_that_fills_up_meanwhile_does_too(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, "2m") as disk, caplog.at_level(logging.WARNING):
        assert (
            staged(model, disk.path, lambda _: disk.fill() if not (disk.path / "ballast").exists() else None) == model
        )
        assert "No space left on device" in caplog.text
        disk.free()
        assert [path.suffix for path in disk.path.iterdir()] == [".lock"]
        assert staged(model, disk.path) != model


def test_stage_that_cannot_be_written_to_leaves_the_model_where_it_is(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    with caplog.at_level(logging.WARNING):
        assert staged(model, tmp_path / "file") == model
        with small_disk(tmp_path, writable=False) as disk:
            assert staged(model, disk.path / "stage") == model
    assert caplog.text.count("is used where it is") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_copy_that_another_user_made_is_not_trusted(model: Path, stage: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = staged(model, stage)
    os.chown(copy.parent, 12345, 12345)
    with caplog.at_level(logging.WARNING):
        assert staged(model, stage) == model
    assert "another user's" in caplog.text


def test_who_waits_for_the_copy_of_another_may_end_the_waiting_though_nothing_moves(model: Path, stage: Path) -> None:
    begun, go_on = Event(), Event()

    def hang(_: int) -> None:
        begun.set()
        assert go_on.wait(60)

    asked: list[int] = []

    def stop(count: int) -> None:
        asked.append(count)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(staged, model, stage, hang)
        assert begun.wait(60)
        try:
            with pytest.raises(KeyboardInterrupt):
                staged(model, stage, stop)
        finally:
            go_on.set()
        assert contents(copying.result()) == contents(model)
    # The first piece, which was there already, and then that nothing moves.
    assert asked[1:] == [0, 0]
