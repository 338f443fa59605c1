"""Ending the workers that a killed service left."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from freight.control.leftovers import end_leftovers
from freight.control.servicefolder import ServiceFolder
from freight.control.sockets import RUNTIME_PREFIX
from freight.errors import OperationError
from freight.launchers.local import MARKER
from freight.store.database import Sharing


def leave(data: Path, worker: str, folder: Path) -> None:
    """Leave a folder as a killed service does, with a worker that was not seen to end."""
    folders = ServiceFolder(data)
    folders.claim()
    catalog = folders.open_catalog(Sharing.WRITER)
    catalog.add(f"job-{worker}", {}, 3, None, 1.0)
    catalog.worker_starts(worker, f"job-{worker}", "src", str(folder), 2.0)
    catalog.close()
    folders.release()


def live(data: Path) -> list[str]:
    folders = ServiceFolder(data)
    catalog = folders.open_catalog(Sharing.READER)
    workers = [row.id for row in catalog.live_workers()]
    catalog.close()
    return workers


def test_what_carries_the_mark_of_a_left_worker_ends_and_nothing_else_does(tmp_path: Path) -> None:
    data, sockets = tmp_path / "data", Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX))
    ours, other = f"ours{os.getpid()}", f"other{os.getpid()}"
    leave(data, ours, sockets)
    children = [subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: mark}) for mark in (ours, other)]
    try:
        assert end_leftovers(data) == 1
        assert children[0].wait(10) < 0
        assert children[1].poll() is None
        assert live(data) == []
        assert not sockets.exists()
        assert end_leftovers(data) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_worker_that_is_gone_already_is_noted_and_a_folder_of_others_stays(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    leave(tmp_path / "data", f"gone{os.getpid()}", others)

    end_leftovers(tmp_path / "data")

    assert live(tmp_path / "data") == []
    assert others.exists()


def test_where_no_service_ever_was_nothing_is_made(tmp_path: Path) -> None:
    assert end_leftovers(tmp_path / "data") == 0
    assert list(tmp_path.iterdir()) == []


def test_workers_of_a_service_that_lives_are_left_alone(tmp_path: Path) -> None:
    worker = f"ours{os.getpid()}"
    leave(tmp_path / "data", worker, tmp_path)
    folder = ServiceFolder(tmp_path / "data")
    folder.claim()
    with pytest.raises(OperationError):
        end_leftovers(tmp_path / "data")
    assert live(tmp_path / "data") == [worker]
    folder.release()
