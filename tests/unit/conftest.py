"""Settings and fixtures of the unit tests."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from tests.unit.houses import House
from tests.unit.services import Office, open_office
from tests.unit.simengines import Engine, running

# No deadline: other work on the machine must not fail a test. A failing example prints how to see it again.
settings.register_profile("unit", deadline=None, max_examples=150, database=None, print_blob=True)
settings.load_profile("unit")


@pytest.fixture(scope="module")
def engine() -> Generator[Engine]:
    """Give one plain simulated engine, shared by the tests of a module that leave it as it was."""
    with running("--model", "local-model", "--model", "second", "--count-prompts") as started:
        yield started


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    """Give a folder on which services run in this process."""
    return open_office(tmp_path, monkeypatch)


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    opened = House(tmp_path, keep_warm_s=0.0)
    yield opened
    opened.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Give what runs a test's coroutine, in each of the event loops that Freight runs in."""
    return asyncio.run if request.param == "asyncio" else uvloop.run
