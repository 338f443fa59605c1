"""Fixtures for all tests."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.harness import Box, Engine, engine


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
