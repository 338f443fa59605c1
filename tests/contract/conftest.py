"""Tests that wait more than they work, run side by side."""

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.casetable import Runs, selected
from tests.harness import Box, engine, engine_command, model_toml
from tests.hub.pulls import NET
from tests.hub.standin import Hub, running_hub
from tests.service import Endpoint, ServiceBox, endpoint, service_box

AT_ONCE: Final = 4


class Started:
    """All scenarios that were asked for, started together at the first test that waits for one."""

    def __init__(self, items: list[pytest.Function], folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        # One engine a module, so that what one module's prompts did does not matter to another.
        names = {item.module.__name__ for item in items if "sim" in item.function.takes}
        self._sims = {name: stack.enter_context(engine(folder / name, "--count-prompts")) for name in sorted(names)}
        self._pool = ThreadPoolExecutor(AT_ONCE)
        stack.callback(self._pool.shutdown, cancel_futures=True)
        self._futures: dict[str, Future[None]] = {
            item.nodeid: self._pool.submit(self._play, number, item) for number, item in enumerate(items)
        }

    def _play(self, number: int, item: pytest.Function) -> None:
        folder = self._folder / f"{number}"
        (folder / "box").mkdir(parents=True)
        sim = self._sims.get(item.module.__name__)
        given: dict[str, Any] = {"box": Box(folder / "box"), "folder": folder, "sim": sim}
        if hasattr(item, "callspec"):
            given |= item.callspec.params
        item.function.scenario(**{name: given[name] for name in item.function.takes})

    def join(self, nodeid: str) -> None:
        """Wait for a scenario's end; raise what it raised."""
        self._futures[nodeid].result()


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Started]:
    """Run the scenarios, a few at a time."""
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item.function, "scenario")
    ]
    with ExitStack() as stack:
        yield Started(items, tmp_path_factory.mktemp("scenarios"), stack)


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Runs]:
    """Runs of all cases that were asked for, on one engine that writes down what it receives."""
    from tests.contract.test_cases import TABLE

    folder = tmp_path_factory.mktemp("cases")
    with engine(folder / "engine") as running:
        started = Runs(selected(request.session.items, TABLE), folder, running)
        yield started
        started.close()


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServiceBox]:
    """Run a service with one model, "sim", whose server it starts itself."""
    folder = tmp_path_factory.mktemp("service")
    sim = model_toml("sim", engine="command", command=engine_command(folder), aliases=["gpt-4o-mini"])
    with service_box(folder / "box", sim) as box:
        assert box.freight("serve", "--background").status == 0
        yield box


@pytest.fixture
def service(shared_service: ServiceBox) -> Generator[ServiceBox]:
    """Give the service that tests share, without a job."""
    yield shared_service
    shared_service.clear()


@pytest.fixture
def end() -> Generator[Endpoint]:
    """Run an endpoint of the test's own."""
    with endpoint() as ours:
        yield ours


@pytest.fixture
def hub() -> Generator[Hub]:
    """A hub with one model."""
    with running_hub() as running:
        running.repo("org/net", dict(NET))
        yield running
