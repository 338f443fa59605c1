"""Input and output that change, vanish or cannot be used."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.runs import OUT, Running, check_complete, committed, nothing_left, received, records, without
from tests.faults.small_disk import small_disk
from tests.harness import Box, engine, wait_until

COUNT = 150
SLOW = ("--digest", "--latency", "0.03")


def change_in_place(path: Path) -> None:
    """Change one byte, which keeps the file's length."""
    with path.open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"X")


def append(path: Path) -> None:
    """Add a line."""
    with path.open("ab") as file:
        file.write(b'{"custom_id":"late","body":{"messages":[]}}\n')


def cut_off(path: Path) -> None:
    """Cut off the second half."""
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    """Put another file in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"text 149", b"text 148"))
    other.rename(path)


@pytest.mark.parametrize("trouble", [change_in_place, append, cut_off, replace, Path.unlink])
def test_input_that_changes_stops_the_run_and_the_same_bytes_go_on(
    box: Box, tmp_path: Path, trouble: Callable[[Path], None]
) -> None:
    path = box.write("in.jsonl", records(COUNT))
    kept = shutil.copyfile(path, tmp_path / "kept")
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        running = Running(box, *arguments)
        wait_until(lambda: endpoint.counts()["answered"] >= 40, "it is at work")
        trouble(path)
        stopped = running.ends_within(5)
        assert stopped.status == 1, stopped
        assert "in.jsonl changed" in stopped.stderr
        assert not (box.folder / OUT).exists()
        nothing_left(box)
        done, sent = committed(box.folder / OUT), len(endpoint.received())
        assert done
        path.unlink(missing_ok=True)
        shutil.copyfile(kept, path)
        assert Running(box, *arguments).end().status == 0
        without(received(endpoint.folder / "record", sent), done)
    check_complete(box, COUNT)


def test_input_that_was_changed_between_runs_is_refused_by_name(box: Box, tmp_path: Path) -> None:
    path = box.write("in.jsonl", records(COUNT))
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        running = Running(box, *arguments)
        wait_until(lambda: endpoint.counts()["answered"] >= 40, "it is at work")
        running.kill()
        sent = len(endpoint.received())
        change_in_place(path)
        refused = Running(box, *arguments).end()
        assert refused.status == 2, refused
        assert "input (SHA-256)" in refused.stderr
        assert "--fresh" in refused.stderr
        assert len(endpoint.received()) == sent


def refused_output(box: Box, output: str, url: str) -> str:
    """Return what a run says that is refused because of its output, having asked the engine nothing."""
    finished = Running(box, "in.jsonl", "-o", output, "--model", url).end()
    assert finished.status == 2, finished
    assert not box.processes()
    return finished.stderr


def test_outputs_that_cannot_be_written_are_refused_at_once(box: Box, tmp_path: Path) -> None:
    path = box.write("in.jsonl", records(3))
    content = path.read_bytes()
    (box.folder / "link.jsonl").symlink_to(path)
    (box.folder / "hard.jsonl").hardlink_to(path)
    (box.folder / "folder").mkdir()
    with engine(tmp_path / "engine") as endpoint, small_disk(tmp_path, writable=False) as read_only:
        assert "does not exist" in refused_output(box, "nowhere/out.jsonl", endpoint.url)
        assert "is a folder" in refused_output(box, "folder", endpoint.url)
        for same in ("in.jsonl", str(path), "link.jsonl", "hard.jsonl"):
            finished = Running(box, "in.jsonl", "-o", same, "--model", endpoint.url, "--force").end()
            assert finished.status == 2, finished
            assert "is the input file itself" in finished.stderr
        assert "cannot write to the folder" in refused_output(box, str(read_only.path / OUT), endpoint.url)
        assert not endpoint.received()
    assert path.read_bytes() == content
    assert not list(box.folder.glob("*.freight"))


def test_output_made_by_somebody_else_during_the_run_is_not_touched(box: Box, tmp_path: Path) -> None:
    box.write("in.jsonl", records(COUNT))
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        running = Running(box, *arguments)
        wait_until(lambda: endpoint.counts()["answered"] >= 40, "it is at work")
        (box.folder / OUT).write_text("theirs")
        finished = running.end()
        assert finished.status == 1, finished
        assert OUT in finished.stderr
        assert "--force" in finished.stderr
        assert (box.folder / OUT).read_text() == "theirs"
        nothing_left(box)
        refused = Running(box, *arguments).end()
        assert refused.status == 2, refused
        assert (box.folder / OUT).read_text() == "theirs"
        assert Running(box, *arguments, "--force").end().status == 0
        assert len(endpoint.received()) == COUNT
    check_complete(box, COUNT)
