"""Fixtures for the fault tests."""

from collections.abc import Generator

import pytest

from tests.faults.runs import Running
from tests.faults.together import Played


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Generator[None]:
    """End the runs that a failed test left behind, but not those that its module shares."""
    shared = set(Running.alive)
    yield
    for running in Running.alive - shared:
        running.give_up()


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Played]:
    """Run the tests that run side by side, a few at a time."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item.function, "plot")
    ]
    running = Played(items, tmp_path_factory.mktemp("together"))
    yield running
    running.close()
