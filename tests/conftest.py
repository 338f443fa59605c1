"""Fixtures for all tests."""

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.harness import Box, Engine, engine

# A shell that runs the tests in the background may have them ignore Ctrl-C and hang-ups, and so would all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A folder in which commands run as a user of their own would."""
    folder = tmp_path / "box"
    folder.mkdir()
    return Box(folder)


@pytest.fixture
def sim(tmp_path: Path) -> Generator[Engine]:
    """A simulated engine that answers at once."""
    with engine(tmp_path / "engine") as running:
        yield running
