"""A worker's driver against a server that pushes back."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from freight.core.messages import Lease
from freight.core.record import ModelName
from freight.core.window import Window
from freight.engines.base import Address
from freight.engines.client import EngineClient, retry_after_s
from freight.worker.driver import Driver, Policy
from tests.contract.scripted import OK, Scripted, scripted
from tests.httpserver import Reply

PATIENCE_S = 20
BUSY = 429


def leases(count: int) -> list[Lease]:
    """Return records whose texts are their numbers."""
    made: list[Lease] = []
    for index in range(count):
        body = {"messages": [{"role": "user", "content": str(index)}]}
        line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(Lease(index, 0, msgspec.json.encode(line)))
    return made


async def never() -> bool:
    return False


def drive(
    server: Scripted,
    records: list[Lease],
    is_over: Callable[[Driver], object],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Driver:
    """Drive a server until something is so, on a loop of the usual kind or of another."""

    async def scenario() -> Driver:
        async with EngineClient(Address(server.url)) as client:
            driver = Driver(client, Window.fixed(16), Policy(ModelName(None), 0.0, lambda: 1.0), never)
            driver.give(records)
            async with asyncio.timeout(PATIENCE_S):
                while not is_over(driver):
                    assert not driver.trouble
                    await asyncio.sleep(0.005)
            await driver.take_in_flight()
            return driver

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(scenario())


def answered(driver: Driver) -> bool:
    return driver.held() == 0


def test_one_wave_of_refusals_is_one_reason_to_wait_longer() -> None:
    # With a longer wait for each refusal of a wave, the second one would last beyond what the test waits for.
    with scripted(lambda _text, time_no: Reply(BUSY, b"{}") if time_no <= 2 else OK) as server:
        drive(server, leases(16), answered)
        assert {server.times(str(number)) for number in range(16)} == {3}


class Early(asyncio.SelectorEventLoop):
    """A loop whose timers go off before their time, as those that round it down do."""

    def call_later(self, delay: float, *arguments: Any, **more: Any) -> asyncio.TimerHandle:
        return super().call_later(max(0.0, delay - 0.05), *arguments, **more)


def test_a_timer_that_goes_off_early_ends_the_wait_nevertheless() -> None:
    with scripted(lambda _text, time_no: Reply(BUSY, b"{}") if time_no == 1 else OK) as server:
        drive(server, leases(16), answered, Early)
        assert {server.times(str(number)) for number in range(16)} == {2}


def test_a_server_that_is_to_be_asked_at_once_is_not_asked_without_end() -> None:
    until = time.monotonic() + 1.0

    def answer(_text: str, _time_no: int) -> Reply:
        return OK if time.monotonic() > until else Reply(BUSY, b"{}", {"Retry-After": "0"})

    with scripted(answer) as server:
        drive(server, leases(1), answered)
        came = server.arrivals["0"]
    assert min(after - before for before, after in itertools.pairwise(came)) >= 0.1


def test_a_long_wait_that_the_server_asks_for_is_told() -> None:
    with scripted(lambda _text, _time_no: Reply(BUSY, b"{}", {"Retry-After": "300"})) as server:
        driver = drive(server, leases(1), lambda driver: driver.is_pushed_back())
    assert driver.note() in ("the server asks to wait 300 s", "the server asks to wait 299 s")


def test_a_new_server_is_not_bound_by_what_the_one_before_asked_for() -> None:
    async def scenario(old: Scripted, new: Scripted) -> None:
        async with EngineClient(Address(old.url)) as before, EngineClient(Address(new.url)) as after:
            driver = Driver(before, Window.fixed(16), Policy(ModelName(None), 0.0, lambda: 1.0), never)
            driver.give(leases(4))
            async with asyncio.timeout(PATIENCE_S):
                while not driver.note():  # noqa: ASYNC110 - it is polled, as its worker does.
                    await asyncio.sleep(0.005)
                driver.pause()
                await driver.take_in_flight()
                driver.resume(after)
                while driver.held():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    with (
        scripted(lambda _text, _time_no: Reply(BUSY, b"{}", {"Retry-After": "300"})) as old,
        scripted(lambda _text, _time_no: OK) as new,
    ):
        asyncio.run(scenario(old, new))


def test_what_an_attempt_should_not_raise_is_kept_for_the_worker_to_fail_with() -> None:
    with scripted(lambda _text, _time_no: OK) as server:
        no_record = Lease(0, 0, b"no record at all")
        driver = drive(server, [no_record], lambda driver: driver.fault)
    assert driver.fault is not None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("Wed, 21 Oct 2015 07:28:00 +99999999999999999999", None), ("inf", None), ("-3", 0.0), ("99999", 600.0)],
)
def test_a_retry_after_that_makes_no_sense_is_none(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, time.time()) == seconds


def test_a_new_server_is_not_judged_by_a_probe_of_the_one_before() -> None:
    async def scenario(old: Scripted, new: Scripted) -> None:
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ill() -> int:
            loop.call_soon_threadsafe(asked.set)
            over.wait(PATIENCE_S)  # Its answer comes when nobody waits for it any more.
            return 500

        old.health = ill
        async with EngineClient(Address(old.url)) as before, EngineClient(Address(new.url)) as after:
            driver = Driver(before, Window.fixed(16), Policy(ModelName(None), 0.0, lambda: 1.0), never)
            driver.give(leases(1))
            await asked.wait()
            driver.pause()
            taken = await driver.take_in_flight()
            driver.resume(after)
            driver.give(taken)
            async with asyncio.timeout(PATIENCE_S):
                while driver.held():
                    assert driver.trouble is None
                    await asyncio.sleep(0.005)
            over.set()

    over = threading.Event()
    with (
        scripted(lambda _text, _time_no: Reply(500, b"{}")) as old,
        scripted(lambda _text, time_no: Reply(500, b"{}") if time_no == 1 else OK) as new,
    ):
        asyncio.run(scenario(old, new))
