"""Fixtures for the fault tests."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.faults.runs import Running
from tests.faults.services import Served, served


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Generator[None]:
    """End the runs that a failed test left behind, but not those that its module shares."""
    shared = set(Running.alive)
    yield
    for running in Running.alive - shared:
        running.give_up()


@pytest.fixture
def service(tmp_path: Path) -> Generator[Served]:
    """A box for a service, which no test has started yet."""
    with served(tmp_path / "service") as box:
        yield box
