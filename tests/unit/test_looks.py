"""A worker's looks at a real server's metrics, and what its window makes of them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from freight.core.messages import Lease
from freight.core.record import ModelName
from freight.core.window import OPAQUE_START, Window
from freight.engines.base import Address
from freight.engines.client import EngineClient
from freight.engines.endpoint import EndpointEngine
from freight.worker.driver import Driver, Policy
from freight.worker.looks import Looks
from tests import harness

PATIENCE_S = 20
PHYSICS = ("--profile", "b200-30b", "--speed", "15", "--max-num-seqs")


def leases(count: int) -> list[Lease]:
    """Return records of 400 tokens, none like another."""
    made: list[Lease] = []
    for index in range(count):
        body = {"messages": [{"role": "user", "content": f"record {index}"}], "max_tokens": 400}
        line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(Lease(index, 0, msgspec.json.encode(line)))
    return made


async def never() -> bool:
    return False


def until(url: str, window: Window, is_so: Callable[[Looks, Driver], object], count: int = 4_000) -> Looks:
    """Drive a server, looking at it, until something is so; records never run out before."""

    async def scenario() -> Looks:
        async with EngineClient(Address(url)) as client:
            driver = Driver(client, window, Policy(ModelName(None), 0.0, lambda: 1.0), never)
            looks = Looks(lambda: (driver, client, EndpointEngine()))
            looking = asyncio.create_task(looks.run())
            driver.give(leases(count))
            async with asyncio.timeout(PATIENCE_S):
                while not is_so(looks, driver):
                    assert driver.held(), "all was answered before"
                    await asyncio.sleep(0.01)
            looking.cancel()
            await driver.take_in_flight()
            return looks

    return asyncio.run(scenario())


def test_a_window_grows_to_fill_an_engine_that_nothing_is_known_of(tmp_path: Path) -> None:
    with harness.engine(tmp_path, *PHYSICS, "512", record=False) as engine:
        looks = until(
            engine.url, Window.opaque(), lambda looks, _: looks.load is not None and (looks.load.running or 0) > 256
        )

    assert looks.load is not None and looks.load.cache_use is not None


def test_a_window_comes_down_to_what_a_small_engine_runs(tmp_path: Path) -> None:
    window = Window.opaque()

    with harness.engine(tmp_path, *PHYSICS, "8", record=False) as engine:
        until(engine.url, window, lambda _, driver: driver.window.limit <= OPAQUE_START / 2)

    assert window.limit > 8


@pytest.mark.parametrize("window", [Window.fixed(5), Window.known(4)])
def test_a_window_that_the_user_fixed_or_the_settings_tell_does_not_move(tmp_path: Path, window: Window) -> None:
    size = window.limit

    with harness.engine(tmp_path, *PHYSICS, "4", record=False) as engine:
        until(engine.url, window, lambda looks, driver: looks.load is not None and driver.answers > 20)

    assert window.limit == size


def test_a_server_that_shows_no_metrics_has_no_load_and_serves_all_the_same(tmp_path: Path) -> None:
    with harness.engine(tmp_path, *PHYSICS, "64", "--no-metrics", record=False) as engine:
        looks = until(engine.url, Window.opaque(), lambda _, driver: driver.answers > 300)

    assert looks.load is None
