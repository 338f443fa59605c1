"""Unix sockets, at any length of path."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from freight.errors import OperationError
from freight.store.sockets import MOST_SOCKET_PATH, listen_at, listener_pid, reachable

LISTEN = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("s")
listener.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def folder_of(tmp_path: Path, length: int) -> Path:
    """Return a folder in which the socket "s" has a path of so many bytes."""
    missing = length - len(os.fsencode(tmp_path)) - len("//s")
    assert missing > 0
    folder = tmp_path / ("d" * missing)
    folder.mkdir(parents=True)
    assert len(os.fsencode(folder / "s")) == length
    return folder


@pytest.mark.parametrize("length", [MOST_SOCKET_PATH, MOST_SOCKET_PATH + 1, 250])
def test_a_socket_at_a_path_of_any_length_is_heard_and_reached(tmp_path: Path, length: int) -> None:
    path = folder_of(tmp_path, length) / "s"

    with listen_at(path) as listener, socket.socket(socket.AF_UNIX) as caller:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(reachable(path)) <= MOST_SOCKET_PATH
        caller.connect(reachable(path))
        served, _ = listener.accept()
        with served:
            caller.sendall(b"hello")
            assert served.recv(9) == b"hello"
        assert listener_pid(path) == os.getpid()


@pytest.mark.parametrize("length", [MOST_SOCKET_PATH, 250])
def test_a_folder_that_was_removed_and_made_again_is_found_at_its_path(tmp_path: Path, length: int) -> None:
    path = folder_of(tmp_path, length) / "s"
    listen_at(path).close()
    shutil.rmtree(path.parent)
    path.parent.mkdir()

    with listen_at(path):
        assert path.exists()
        assert listener_pid(path) == os.getpid()


def test_a_socket_that_nobody_listens_on_any_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen_at(path).close()
    assert path.exists()
    assert listener_pid(path) is None

    with listen_at(path):
        assert listener_pid(path) == os.getpid()


@pytest.mark.parametrize("length", [0, 250])
def test_a_socket_that_is_in_use_is_refused_and_its_process_named(tmp_path: Path, length: int) -> None:
    folder = folder_of(tmp_path, length) if length else tmp_path
    child = subprocess.Popen(
        [sys.executable, "-c", LISTEN], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listening\n"
        with pytest.raises(OperationError, match=f"in use by process {child.pid}$"):
            listen_at(folder / "s")
        assert listener_pid(folder / "s") == child.pid
    finally:
        child.communicate()


def test_where_no_socket_can_be_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()

    for path in (tmp_path / "s", tmp_path / "gone" / "s"):
        with pytest.raises(OperationError, match="cannot make the socket"):
            listen_at(path)


def test_nobody_listens_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert listener_pid(tmp_path / "s") is None
    assert listener_pid(tmp_path / "file") is None
