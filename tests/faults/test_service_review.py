"""Places that are gone or cannot be used under a running service: its other jobs go on, and so do these in the end."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from freight.launchers.locks import lock_folder
from tests.faults.runs import records
from tests.faults.services import Served
from tests.faults.together import together
from tests.harness import Engine, engine, wait_until

COUNT = 10


@contextmanager
def giving_far(_: Served, tmp_path: Path) -> Generator[Engine]:
    """An endpoint that runs already."""
    with engine(tmp_path / "engine", "--digest") as running:
        yield running


@contextmanager
def giving_lock(service: Served, _: Path) -> Generator[Path]:
    """A folder where the lock of the box's device should be."""
    lock = lock_folder() / f"freight-{service.device.replace(':', '-')}.lock"
    lock.mkdir()
    try:
        yield lock
    finally:
        if lock.is_dir():
            lock.rmdir()
        else:
            lock.unlink(missing_ok=True)


@together
def test_job_runs_though_the_folder_for_temporary_files_is_gone(service: Served, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    service.own_engine()
    service.write("in.jsonl", records(COUNT))
    service.serve(TMPDIR=str(scratch))
    service.submit("in.jsonl", "before")
    service.completes("before", COUNT)
    shutil.rmtree(scratch)
    service.submit("in.jsonl", "after")
    done = service.completes("after", COUNT)
    assert [event.event for event in done.events].count("worker granted") == 1
    assert not scratch.exists()


@together
def test_device_whose_lock_cannot_be_opened_is_waited_for_while_other_jobs_go_on(
    service: Served, far: Engine, lock: Path
) -> None:
    service.own_engine()
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "waits")
    wait_until(lambda: "lock" in service.client.job("waits").reason, "it says what it waits for")
    waits = service.client.job("waits")
    assert waits.state == "QUEUED"
    assert f"{service.device} is held by a lock that cannot be opened" in waits.reason
    assert str(lock) in waits.reason
    service.submit("in.jsonl", "far", far.url)
    service.completes("far", COUNT)
    assert service.server.poll() is None
    assert service.state("waits") == "QUEUED"
    lock.rmdir()
    service.completes("waits", COUNT)
