"""What may stand in the way of a service's start: it says what, with the fix, or it just works."""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freight.store.sockets import reachable
from tests.faults.runs import records
from tests.faults.services import Served, refused
from tests.faults.small_disk import small_disk
from tests.faults.together import together
from tests.harness import Finished, finish


@contextmanager
def listening(path: Path) -> Generator[socket.socket]:
    """Be a foreign program that listens on a Unix socket."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(reachable(path))
        listener.listen()
        yield listener


@pytest.mark.parametrize("name", ["api.sock", "control.sock"])
@together
def test_socket_of_a_foreign_program_is_refused_and_left_to_it(service: Served, name: str) -> None:
    path = service.data / "run" / name
    with listening(path):
        done = service.freight("serve")
        refused(done, 1, f"the socket {path} is in use by process {os.getpid()}", "end that process")
        assert path.exists()
        assert not service.processes()
    service.serve()


@pytest.mark.parametrize("name", ["api.sock", "control.sock"])
@together
def test_stale_socket_is_replaced(service: Served, name: str) -> None:
    with listening(service.data / "run" / name):
        pass
    service.serve()


@together
def test_data_folder_of_any_depth_works(service: Served) -> None:
    service.keep_data_in(service.folder / ("x" * 100) / ("y" * 200) / "data")
    service.own_engine()
    service.write("in.jsonl", records(30))
    made = service.freight("batch", "submit", "in.jsonl", "--model", "mine", "--name", "job", "--wait")
    assert made.status == 0, made
    assert service.freight("batch", "results", "job").status == 0
    assert len(service.results("job-results.jsonl")) == 30
    assert service.freight("serve").status == 1
    assert service.freight("stop").status == 0
    service.nothing_left()


@pytest.mark.parametrize("options", [(), ("--background",)], ids=["serve", "serve --background"])
@together
def test_second_service_on_a_folder_is_refused_and_the_first_goes_on(service: Served, options: tuple[str, ...]) -> None:
    first = service.serve()
    second = service.freight("serve", *options)
    refused(second, 1, f"the data folder {service.data} is in use by process {first.pid}", "freight stop")
    assert service.client.version().pid == first.pid
    assert service.freight("batch", "list").status == 0


@together
def test_data_folder_whose_files_cannot_be_locked_is_refused(service: Served) -> None:
    shim = service.folder / "no_flock.so"
    source = Path(__file__).with_name("no_flock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    no_flock = {"LD_PRELOAD": str(shim), "NO_FLOCK_UNDER": str(service.data)}
    for command in (("serve",), ("batch", "list")):
        done = service.freight(*command, **no_flock)
        refused(done, 2, "cannot be locked", "set FREIGHT_DATA")
        assert not service.processes()
    service.serve()


@together
def test_data_folder_on_a_network_file_system_is_refused(service: Served) -> None:
    # The kernel's list of mounts, as it would be where everything is on NFS.
    mounts = service.folder / "mountinfo"
    mounts.write_text("30 1 0:9 / / rw - nfs4 server:/export rw\n")
    script = 'mount --bind "$0" /proc/$$/mountinfo && exec "$@"'
    done = finish(
        subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script, str(mounts), sys.executable, "-m", "freight", "serve"],
            cwd=service.folder,
            env=service.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    )
    refused(done, 2, f"the data folder {service.data} is on a network file system", "set FREIGHT_DATA")


def both_ways(service: Served) -> list[Finished]:
    """Start a service in the foreground, and by a command that needs one; return how that went."""
    return [service.freight("serve"), service.freight("batch", "list")]


@together
def test_read_only_data_folder_is_refused(service: Served) -> None:
    with small_disk(service.folder, writable=False) as disk:
        service.keep_data_in(disk.path / "data")
        serve, batch = both_ways(service)
        refused(serve, 1, f"cannot write to the data folder {service.data}: Read-only", "set FREIGHT_DATA")
        refused(batch, 2, f"cannot write to the data folder {service.data}: Read-only", "set FREIGHT_DATA")
    assert not service.processes()


@together
def test_data_folder_that_became_read_only_is_refused(service: Served) -> None:
    with small_disk(service.folder) as disk:
        service.keep_data_in(disk.path / "data")
        service.serve()
        service.server.terminate()
        assert service.server.wait(20) == 0
        service.disconnect()
        subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
        serve, batch = both_ways(service)
        refused(serve, 1, f"cannot write to the data folder {service.data}: Read-only", "set FREIGHT_DATA")
        refused(batch, 2, f"cannot write to the data folder {service.data}: Read-only", "set FREIGHT_DATA")


@together
def test_full_disk_at_the_start_is_told_and_the_same_command_works_later(service: Served) -> None:
    with small_disk(service.folder) as disk:
        service.keep_data_in(disk.path / "data")
        disk.fill()
        for done in both_ways(service):
            refused(done, 1, "no space left", "free some space")
        assert not service.processes()
        disk.free()
        for command in (("batch", "list"), ("stop",)):
            assert service.freight(*command).status == 0
        service.nothing_left()
