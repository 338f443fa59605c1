"""Damaged files: a service that cannot read its catalog says so; one job's own files fail that job alone."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from freight.core.job import Event
from freight.store.catalog import Catalog
from freight.store.folder import Locking
from tests.faults.runs import records
from tests.faults.services import Served, device_in_use, refused
from tests.faults.together import together
from tests.harness import engine

COUNT = 10
ODD = b"\xa5"


def stop(service: Served) -> None:
    """Stop the service."""
    service.server.terminate()
    assert service.server.wait(20) == 0
    service.disconnect()


def overwritten(start: int, length: int | None = None) -> Callable[[Path], None]:
    """Return what overwrites a file's bytes with ones that mean nothing."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(start)
            file.write(ODD * (length or max(size - start, 100)))

    return damage


def newer(database: Path) -> None:
    """Make a database one of a version to come."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 99")


DAMAGES: Final[dict[str, tuple[str, Callable[[Path], None]]]] = {
    "index-overwritten": ("index.npz", overwritten(0)),
    "index-cut": ("index.npz", lambda path: os.truncate(path, 200)),
    "index-gone": ("index.npz", Path.unlink),
    "input-gone": ("input.jsonl", Path.unlink),
    "input-cut": ("input.jsonl", lambda path: os.truncate(path, 100)),
    "results-overwritten": ("results.db", overwritten(0)),
    "results-pages": ("results.db", overwritten(100)),
    "results-newer": ("results.db", newer),
}


@pytest.mark.parametrize("kind", ["index", "input", "results"])
@together
def test_job_whose_own_files_are_damaged_fails_alone_and_others_complete(service: Served, kind: str) -> None:
    damages = {name: damage for name, damage in DAMAGES.items() if name.startswith(kind)}
    service.own_engine()
    service.write("in.jsonl", records(COUNT))
    with device_in_use(service):
        service.serve()
        names = ["before", *damages, "after"]
        jobs = {name: service.submit("in.jsonl", name).id for name in names}
        assert service.state("after") == "QUEUED"
        stop(service)
        for name, (file, damage) in damages.items():
            damage(service.folder_of(jobs[name]) / file)
        service.serve()
    for name in ("before", "after"):
        service.completes(name, COUNT)
    for name in damages:
        failed = service.wait_state(name, "FAILED")
        assert failed.reason, name
        refused_or_whole(service, name)
    assert {job.name for job in service.client.jobs()} == set(names)
    for name in damages:
        assert service.freight("batch", "delete", "-y", name).status == 0
    assert service.freight("stop").status == 0
    service.nothing_left()


def refused_or_whole(service: Served, name: str, count: int = COUNT) -> None:
    """Fetch the results of a job: a line a record, or words and no file."""
    done = service.freight("batch", "results", name)
    path = service.folder / f"{name}-results.jsonl"
    if done.status == 0:
        assert len(service.results(path.name)) == count
    else:
        refused(done, 1)
        assert not path.exists()


@together
def test_damaged_results_of_a_complete_job_are_refused_and_the_job_is_still_shown(service: Served) -> None:
    service.own_engine()
    service.write("in.jsonl", records(COUNT))
    service.serve()
    job = service.submit("in.jsonl", "job")
    service.completes("job", COUNT)
    stop(service)
    overwritten(100)(service.folder_of(job.id) / "results.db")
    service.serve()
    refused(service.freight("batch", "results", "job"), 1, "damaged")
    assert not (service.folder / "job-results.jsonl").exists()
    shown = service.freight("batch", "status", "job")
    assert shown.status == 0, shown
    assert "COMPLETED" in shown.stdout
    assert service.freight("batch", "delete", "-y", "job").status == 0


@together
def test_results_damaged_while_a_job_runs_are_never_taken_for_whole(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", "--latency", "0.05") as slow:
        service.write("in.jsonl", records(200))
        service.write("few.jsonl", records(COUNT))
        service.serve()
        job = service.submit("in.jsonl", "bad", slow.url, concurrency=4)
        service.wait_state("bad", "RUNNING")
        for log in service.folder_of(job.id).glob("results.db*"):
            overwritten(0)(log)
        # What SQLite has in memory may carry it to its end; what was damaged is then noticed by who asks for it.
        ended = service.wait_state("bad", "FAILED", "COMPLETED")
        assert ended.reason or ended.state == "COMPLETED"
        refused_or_whole(service, "bad", 200)
        service.submit("few.jsonl", "good", slow.url)
        service.completes("good", COUNT)


def refused_by_both(service: Served, *words: str) -> None:
    """Start the service in the foreground, and by a command that needs one: both are refused in words."""
    for command in (("serve",), ("batch", "list")):
        refused(service.freight(*command), 1, *words)
    assert not service.processes()


def some_jobs(service: Served) -> Path:
    """Leave a catalog with a few pages of finished jobs and no service; return its path."""
    folder = service.data / "batch"
    folder.mkdir(parents=True)
    catalog = Catalog(service.data / "catalog.db", Locking.LOCAL)
    for number in range(30):
        row = catalog.add(f"j{number}", {"filler": "x" * 500}, 1, None, 1.0, name=f"job{number}")
        catalog.happened(row, Event.REFUSED, 2.0)
        (folder / row.id).mkdir()
    catalog.close()
    return service.data / "catalog.db"


@together
def test_catalog_of_a_newer_freight_is_refused_and_left_as_it_is(service: Served) -> None:
    catalog = some_jobs(service)
    newer(catalog)
    before = catalog.read_bytes()
    refused_by_both(service, f"{catalog} was written by a newer Freight", "update Freight")
    assert catalog.read_bytes() == before


@pytest.mark.parametrize("start", [0, 100, 4096], ids=["header", "first page", "other pages"])
@together
def test_damaged_catalog_is_refused_in_words(service: Served, start: int) -> None:
    overwritten(start)(some_jobs(service))
    refused_by_both(service, str(service.data), "restore it from a copy")
    assert len(list((service.data / "batch").iterdir())) == 30, "inputs and results are not touched"
