"""Fixtures for the fault tests."""

from collections.abc import Generator

import pytest

from tests.faults.runs import Running


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Generator[None]:
    """End the runs that a failed test left behind, but not those that its module shares."""
    shared = set(Running.alive)
    yield
    for running in Running.alive - shared:
        running.give_up()
