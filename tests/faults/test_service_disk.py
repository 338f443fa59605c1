"""A full disk: what does not fit is refused in words or waits, and once there is room all goes on."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freight.core.view import JobStatus
from tests.faults.runs import check_complete, records
from tests.faults.services import Served, refused
from tests.faults.small_disk import SmallDisk, small_disk
from tests.faults.together import together
from tests.harness import Engine, engine, wait_until

COUNT = 150
NOWHERE = "http://127.0.0.1:1"
SPACE = b" " * 9_999


@contextmanager
def giving_disk(service: Served, _: Path) -> Generator[SmallDisk]:
    """A disk of four megabytes with the data of a service that runs."""
    with small_disk(service.folder) as mounted:
        service.keep_data_in(mounted.path / "data")
        service.serve()
        try:
            yield mounted
        finally:
            service.end()  # What has files open there goes before the disk.


@contextmanager
def giving_slow(_: Served, tmp_path: Path) -> Generator[Engine]:
    """An engine that takes its time."""
    with engine(tmp_path / "engine", "--digest", "--latency", "0.03") as running:
        yield running


@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
@together
def test_upload_that_does_not_fit_is_refused_and_leaves_the_room_free(
    service: Served, disk: SmallDisk, piped: bool
) -> None:
    path = service.write("in.jsonl", [*records(30), *[SPACE] * 2000])
    before = os.statvfs(disk.path).f_bavail
    if piped:
        # The size of a pipe is not known before its end.
        done = service.freight("batch", "submit", "-", "--model", NOWHERE, stdin=path.read_text())
    else:
        done = service.freight("batch", "submit", "in.jsonl", "--model", NOWHERE)
    refused(done, 1, "no space left for the input", "free some space")
    assert service.uploads() == []
    assert os.statvfs(disk.path).f_bavail >= before - 10
    assert not list(service.client.jobs())


@together
def test_job_that_cannot_be_entered_on_a_full_disk_is_refused_and_can_be_made_later(
    service: Served, disk: SmallDisk, slow: Engine
) -> None:
    service.write("in.jsonl", records(COUNT))
    disk.fill(leaving=40_000)
    refused(service.freight("batch", "submit", "in.jsonl", "--model", slow.url, "--name", "job"), 1, "space")
    assert not list(service.client.jobs())
    assert not list((service.data / "batch").iterdir())
    disk.free()
    service.submit("in.jsonl", "job", slow.url)
    service.completes("job", COUNT)


def suspended(service: Served, name: str = "job") -> None:
    """Wait until a job is SUSPENDED, with the reason."""
    status = service.wait_state(name, "SUSPENDED")
    assert "no space left" in status.reason, status


def suspended_at_work(service: Served, disk: SmallDisk, slow: Engine) -> JobStatus:
    """Fill the disk under a job of COUNT records that is at work, and wait until it is SUSPENDED."""
    service.write("in.jsonl", records(COUNT))
    job = service.submit("in.jsonl", "job", slow.url, concurrency=8)
    wait_until(lambda: slow.counts()["answered"] >= 40, "it is at work")
    disk.fill()
    suspended(service)
    return job


@together
def test_disk_that_fills_up_in_a_job_suspends_it_until_there_is_room(
    service: Served, disk: SmallDisk, slow: Engine
) -> None:
    suspended_at_work(service, disk, slow)
    shown = service.freight("batch", "status", "job")
    assert shown.status == 0, shown
    assert "no space left" in shown.stdout
    disk.free()
    service.completes("job", COUNT)
    assert len(slow.received()) == COUNT


@together
def test_service_killed_on_a_full_disk_goes_on_once_there_is_room(
    service: Served, disk: SmallDisk, slow: Engine
) -> None:
    job = suspended_at_work(service, disk, slow)
    service.kill()
    disk.free()
    assert service.committed(job.id)
    service.serve()
    service.completes("job", COUNT)
    # Its worker lived on, with all that it could not hand in.
    assert len(slow.received()) == COUNT


@together
def test_stop_on_a_full_disk_ends_soon_and_the_next_service_goes_on(
    service: Served, disk: SmallDisk, slow: Engine
) -> None:
    suspended_at_work(service, disk, slow)
    stopped = service.freight("stop", timeout=20)
    assert stopped.status == 0, stopped
    service.nothing_left()
    disk.free()
    service.serve()
    service.completes("job", COUNT)


@together
def test_workers_that_cannot_start_on_a_full_disk_leave_no_folders_and_start_later(
    service: Served, disk: SmallDisk
) -> None:
    service.own_engine("--latency", "1")
    service.disconnect()
    service.server.terminate()
    assert service.server.wait(20) == 0
    service.serve()
    service.write("in.jsonl", records(12))
    service.submit("in.jsonl", "job", concurrency=6)
    wait_until(lambda: len(service.received()) >= 6, "the engine is at work")
    disk.fill()
    [worker] = service.workers()
    os.kill(worker, signal.SIGKILL)
    suspended(service)
    wait_until(lambda: not service.processes()[1:], "only the service is left", 10)
    assert not list(service.runtime.iterdir())
    disk.free()
    service.completes("job", 12)
    assert service.freight("stop").status == 0
    service.nothing_left()


@together
def test_results_that_do_not_fit_where_the_client_wants_them_leave_no_file(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", record=False) as fast, small_disk(tmp_path) as disk:
        service.write("in.jsonl", [record | {"body": record["body"] | {"n": 64}} for record in records(600)])
        service.serve()
        service.submit("in.jsonl", "job", fast.url)
        service.wait_state("job", "COMPLETED")
        target = disk.path / "out.jsonl"
        refused(service.freight("batch", "results", "job", "-o", str(target)), 1, f"cannot write {target}", "make room")
        assert not list(disk.path.iterdir())
        disk.fill()
        refused(service.freight("batch", "results", "job", "-o", str(target)), 1, "No space left", "make room")
        assert [path.name for path in disk.path.iterdir()] == ["ballast"]
        assert service.freight("batch", "results", "job").status == 0
        check_complete(service, 600, "job-results.jsonl")


@together
def test_output_folder_on_another_file_system_gets_the_results(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", record=False) as fast, small_disk(tmp_path) as disk:
        service.write("in.jsonl", records(20))
        service.serve()
        service.submit("in.jsonl", "job", fast.url, output=str(disk.path))
        service.wait_state("job", "COMPLETED")
        check_complete(service, 20, str(disk.path / "job-results.jsonl"))
        assert [path.name for path in disk.path.iterdir()] == ["job-results.jsonl"]


@together
def test_full_output_folder_suspends_the_job_until_there_is_room(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", record=False) as fast, small_disk(tmp_path) as disk:
        disk.fill()
        service.write("in.jsonl", records(20))
        service.serve()
        service.submit("in.jsonl", "job", fast.url, output=str(disk.path))
        suspended(service)
        disk.free()
        service.wait_state("job", "COMPLETED")
        check_complete(service, 20, str(disk.path / "job-results.jsonl"))
