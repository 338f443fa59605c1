"""Tests that wait more than they work, run side by side."""

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness import Box, engine

AT_ONCE: Final = 5


class Started:
    """The module's scenarios, all started at the first test that asks for one."""

    def __init__(self, items: list[pytest.Function], folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        shares = any("sim" in item.function.takes for item in items)
        self._sim = stack.enter_context(engine(folder / "engine", "--count-prompts")) if shares else None
        self._pool = ThreadPoolExecutor(AT_ONCE)
        stack.callback(self._pool.shutdown, cancel_futures=True)
        self._futures: dict[str, Future[None]] = {
            item.nodeid: self._pool.submit(self._play, number, item) for number, item in enumerate(items)
        }

    def _play(self, number: int, item: pytest.Function) -> None:
        folder = self._folder / f"{number}"
        (folder / "box").mkdir(parents=True)
        given: dict[str, Any] = {"box": Box(folder / "box"), "folder": folder, "sim": self._sim}
        if hasattr(item, "callspec"):
            given |= item.callspec.params
        item.function.scenario(**{name: given[name] for name in item.function.takes})

    def join(self, nodeid: str) -> None:
        """Wait for a scenario's end; raise what it raised."""
        self._futures[nodeid].result()


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Started]:
    """Run this module's scenarios, a few at a time."""
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item.function, "scenario")
    ]
    with ExitStack() as stack:
        yield Started(items, tmp_path_factory.mktemp("scenarios"), stack)
