"""The worker's two halves: talking to the control plane, and keeping a model server in service."""

import asyncio
import logging
import random
import time
import traceback
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

import msgspec

from freight.core.messages import PROTOCOL, Death, Order, Orders, Phase, Report, Returned, Setup
from freight.core.window import Window
from freight.engines.base import Place
from freight.engines.client import EngineClient, Unreachable
from freight.engines.registry import engine_of
from freight.errors import EngineError, FreightError, Interrupted, UserError
from freight.store.staging import staged
from freight.worker.driver import Driver, Policy
from freight.worker.link import ControlLink, ControlPlaneGone
from freight.worker.logfile import keep_short, tail
from freight.worker.looks import InService, Looks
from freight.worker.supervise import STOP_GRACE_S, Exit, ModelServer, StartLimits

log = logging.getLogger("freight.worker")

# The longest silence between two reports, and the pause between them while there is news.
HEARTBEAT_S: Final = 1.0
_PACE_S: Final = 0.02
_NEWS_S: Final = 0.1
# A server may end so often without any answer in between before the worker gives up on it.
MOST_BARREN_DEATHS: Final = 3
# Where records are suspected, more: each may only be blamed after several of them have run.
MOST_BLAMED_DEATHS: Final = 20
# In so many last lines of its output a server's own reason for its end is looked for.
_WHY_LINES: Final = 400
_WATCH_S: Final = 5.0
# An idle worker looks for a new job more often for this long: most come at once.
_RECENTLY_S: Final = 2.0
# Requests to a server that has ended have so long to break.
_BREAKING_S: Final = 0.2
# Without a control plane for this long, or as long as its last start took, a worker ends itself.
ORPHAN_S: Final = 60.0


class Agent:
    """One worker. `control` is the control plane's Unix socket, `folder` the worker's own, `log_file` its output.

    It serves one job at a time, and between two of them keeps its server up while the control plane wants it.
    """

    def __init__(
        self,
        control: str,
        worker: str,
        folder: Path,
        log_file: Path,
        keep_open: tuple[int, ...],
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._log_file = log_file
        self._keep_open = keep_open
        self._control = ControlLink(control, orphan_s)
        self._number = 0
        self._plane = ""
        self._setup: Setup | None = None
        self._listed: frozenset[str] | None = None
        self._is_up = False
        self._idle_since = 0.0
        self._deaths_seen = 0
        self._answers_before = 0  # Those of earlier jobs.
        self._phase = self._told = Phase.LOADING  # What it is, and what the last report said.
        self._put = asyncio.Event()  # Its server has been put in service.
        self._note = ""
        self._looks = Looks(self._in_service)
        self._deaths: list[Death] = []
        self._returned: list[Returned] = []
        self._driver: Driver | None = None
        self._server: ModelServer | None = None
        self._client: EngineClient | None = None
        self._winding_up = False
        self._hopeless = False
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until the control plane says stop (or `stopping` is set), or the server cannot be kept up."""
        async with aclosing(self._control):
            try:
                orders = await self._exchange()
            except ControlPlaneGone as error:
                log.warning("%s", error.message)
                return
            if orders.order is not Order.STOP and orders.setup is not None:
                self._setup = orders.setup
                await self._run_tasks()

    async def _run_tasks(self) -> None:
        serving = asyncio.create_task(self._serve())
        talking = asyncio.create_task(self._talk())
        stopping = asyncio.create_task(self.stopping.wait())
        trimming = asyncio.create_task(keep_short(self._log_file))
        looking = asyncio.create_task(self._looks.run())
        try:
            await asyncio.wait((serving, talking, stopping), return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in (serving, talking) if task.done()), None)
            serving.cancel()
            # Not cancelled: a report under way would be lost, with the results in it.
            self._winding_up = True
            if self._driver is not None:
                self._driver.wake.set()
            await asyncio.gather(serving, talking, return_exceptions=True)
            try:
                if isinstance(failed, ControlPlaneGone):
                    raise failed
                await self._wind_up(failed)
            except ControlPlaneGone as error:
                log.warning("%s", error.message)
                await self.end_at_once()
        finally:
            self._winding_up = True
            # All of them also when this is cancelled itself: left alone, serving would start the next server.
            tasks = (serving, talking, stopping, trimming, looking)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wind_up(self, failed: BaseException | None) -> None:
        """Hand in what is finished, give back the rest, end the server, and say how it went."""
        if self._driver is not None:
            await self._take_all_back(self._driver)
            # What is finished first: ending the server may take a while.
            await self._exchange()
        await self._end_server()
        self._phase = Phase.STOPPED
        if failed is not None:
            if not isinstance(failed, FreightError):
                # Not the error's own text, which might quote a record.
                where = "".join(traceback.format_tb(failed.__traceback__))
                log.error("worker failed: %s\n%s", type(failed).__name__, where)
            self._phase = Phase.FAILED
            bug = f"a bug in the worker: {type(failed).__name__}"
            self._note = failed.message if isinstance(failed, FreightError) else bug
            if isinstance(failed, EngineError) and self._setup is not None:
                why = engine_of(self._setup.model.entry.engine).why(tail(self._log_file, _WHY_LINES))
                self._note = f"{self._note}: {why}" if why else self._note
            self._hopeless = isinstance(failed, UserError) or (isinstance(failed, EngineError) and not failed.transient)
        await self._exchange()

    async def _take_all_back(self, driver: Driver) -> None:
        driver.pause()
        left = await driver.take_in_flight()
        self._returned += [Returned(lease.index, lease.tries) for lease in left]
        self._returned += driver.take_waiting()

    async def end_at_once(self) -> None:
        """The control plane is gone: end the server and everything it started."""
        await self._end_server(grace_s=0.0)

    async def _end_server(self, grace_s: float = STOP_GRACE_S) -> list[int]:
        if self._client is not None:
            await self._client.close()
        return [] if self._server is None else await self._server.stop(grace_s)

    async def _talk(self) -> None:
        """Exchange with the control plane whenever there is news, and at least every HEARTBEAT_S."""
        while not self._winding_up:
            orders = await self._exchange()
            if orders.order is Order.STOP:
                self.stopping.set()
                return
            if orders.order is Order.RELEASE:
                await self._release()
            elif orders.setup is not None and self._driver is None:
                self._setup = orders.setup
                if self._is_up:
                    self._put_in_service()
                    continue  # Its first records can be had at once.
            elif self._driver is not None and orders.leases:
                self._driver.give(orders.leases)
            await self._wait_for_news(bool(orders.leases))
            if self._driver is not None and self._driver.fault is not None:
                raise self._driver.fault

    async def _release(self) -> None:
        """Hand in all that the job's records have come to, and stay for another job."""
        driver = self._driver
        if driver is None or self._phase is not Phase.READY:
            self.stopping.set()  # There is no server that would be worth keeping.
            return
        self._phase = Phase.IDLE
        await self._take_all_back(driver)
        await self._exchange()
        self._answers_before += driver.answers
        self._driver, self._setup = None, None
        self._idle_since = time.monotonic()

    async def _wait_for_news(self, fed: bool) -> None:
        if self._phase is not self._told:
            return  # That is news, and a job whose server is up waits for its first records.
        driver = self._driver
        if driver is None:
            recently = time.monotonic() - self._idle_since < _RECENTLY_S
            slow_s = HEARTBEAT_S / 2 if self._phase is Phase.IDLE else _NEWS_S
            self._put.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PACE_S if self._phase is Phase.IDLE and recently else slow_s):
                    await self._put.wait()
            return
        if driver.is_finished():
            return
        driver.wake.clear()
        # A worker that got nothing asks again soon; one that was fed waits for results or an empty queue.
        pause = _PACE_S if fed else _NEWS_S
        await asyncio.sleep(pause if not driver.in_flight() else 0)
        # Not wait_for, which loses a cancellation that comes together with what it waits for.
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S if driver.held() else HEARTBEAT_S / 4):
                await driver.wake.wait()

    async def _exchange(self) -> Orders:
        """Make one report and return the orders; go on trying until it is answered, so that nothing is lost.

        Raises ControlPlaneGone when no control plane answers for long.
        """
        report = self._report()
        while True:
            orders = await self._control.exchange(report)
            self._plane = orders.plane
            if orders.order is not Order.ATTACH:
                return orders
            # Another control plane: it gets what its predecessor may not have put on disk, and all that is here.
            self._number += 1
            held = self._driver.holdings() if self._driver else []
            report = msgspec.structs.replace(report, number=self._number, plane=orders.plane, held=held)

    def _report(self) -> Report:
        self._number += 1
        self._told = self._phase
        driver = self._driver
        if driver is not None and driver.trouble:
            # Other workers may have a server that answers.
            self._returned += driver.take_waiting()
        deaths, self._deaths = self._deaths, []
        returned, self._returned = self._returned, []
        ready = driver is not None and self._phase is Phase.READY
        return Report(
            protocol=PROTOCOL,
            worker=self._worker,
            number=self._number,
            phase=self._phase,
            note=self._note or (driver.note() if driver else ""),
            hopeless=self._hopeless,
            log_tail=tail(self._log_file) if self._phase is Phase.FAILED else [],
            done=driver.collect() if driver else [],
            returned=returned,
            deaths=deaths,
            want=driver.room() if driver and ready and not self._winding_up else 0,
            in_flight=driver.in_flight() if driver else 0,
            pushed_back=driver.is_pushed_back() if driver else False,
            plane=self._plane,
            job=self._setup.job if self._setup else "",
            load=self._looks.load if ready else None,
        )

    async def _serve(self) -> None:
        """Keep a server in service; raise EngineError when it cannot be."""
        barren, answers = 0, 0
        while True:
            client = await self._bring_up()
            self._put_in_service()
            ended = await self._until_death(client)
            self._is_up = False
            driver = self._driver
            if driver is None or self._phase is Phase.IDLE:
                raise EngineError(f"{ended.reason} while no job needed it", transient=True)
            total = self._answers_before + driver.answers
            barren = barren + 1 if total == answers else 1
            answers = total
            blamed = await self._report_death(driver, ended)
            if barren >= (MOST_BLAMED_DEATHS if blamed else MOST_BARREN_DEATHS):
                raise EngineError(f"{ended.reason}, {barren} times without an answer in between", transient=True)

    async def _bring_up(self) -> EngineClient:
        """Start the server, where it is ours to start, and return a client of it."""
        setup = self._setup
        assert setup is not None
        engine = engine_of(setup.model.entry.engine)
        source = await asyncio.to_thread(self._staged, setup)
        place = Place(
            self._folder, source, frozenset(setup.endpoints), setup.concurrency, setup.gpus, tuple(setup.media_hosts)
        )
        started = engine.command(setup.model, place)
        address = started.address if started else engine.address(setup.model, place)
        self._client = client = EngineClient(address)
        if started:
            began = time.monotonic()
            await self._start(ModelServer(started, self._keep_open), client, setup)
            self._listed = await _listed(client)
            self._control.orphan_s = max(self._control.orphan_s, time.monotonic() - began)
        self._is_up = True
        return client

    def _staged(self, setup: Setup) -> str:
        """Return the model's source, copied to the machine's own disk where there is a folder for that."""
        if not setup.stage or not engine_of(setup.model.entry.engine).starts_server or not Path(setup.source).exists():
            return setup.source
        self._note = f"copying the model to {setup.stage}"
        copied, moved_at = 0, time.monotonic()

        def moved(count: int) -> None:
            nonlocal copied, moved_at
            if self._winding_up:
                raise Interrupted("the worker is ending")
            moved_at = time.monotonic() if count else moved_at
            if time.monotonic() - moved_at > setup.start_stall_s:
                words = f"the copy of the model to {setup.stage} has stood still for {setup.start_stall_s:g} s"
                raise EngineError(words, transient=True)
            copied += count
            self._note = f"copying the model to {setup.stage}: {copied / 1e9:.1f} GB so far"

        return str(staged(Path(setup.source), Path(setup.stage), moved))

    async def _start(self, server: ModelServer, client: EngineClient, setup: Setup) -> None:
        self._server = server
        self._phase, self._note = Phase.LOADING, "loading the model"
        server.start()
        limits = StartLimits(setup.start_stall_s, setup.start_timeout_s)
        await server.wait_ready(client, self._log_file, limits)

    def _put_in_service(self) -> None:
        """Let the server answer the job's records: a new driver for a new job, else the one there is."""
        setup, client = self._setup, self._client
        assert setup is not None and client is not None
        self._put.set()
        if not setup.job:
            self._phase, self._note, self._idle_since = Phase.IDLE, "", time.monotonic()
            return
        if self._driver is None:
            model = setup.model if self._server is None else setup.model.served_as(self._listed)
            policy = Policy(model.model_name(), setup.record_timeout_s, lambda: random.uniform(0.8, 1.2))
            slots = engine_of(setup.model.entry.engine).slots(setup.model, setup.concurrency)
            self._driver = Driver(client, _window(setup, slots), policy, self._dies)
        else:
            self._driver.resume(client)
        self._phase, self._note = Phase.READY, ""

    def _in_service(self) -> InService | None:
        setup, driver, client = self._setup, self._driver, self._client
        if setup is None or driver is None or client is None or self._phase is not Phase.READY:
            return None
        return driver, client, engine_of(setup.model.entry.engine)

    async def _dies(self) -> bool:
        return self._server is not None and await self._server.dies()

    async def _until_death(self, client: EngineClient) -> Exit:
        """Return how the server ended, by itself or because it stood still. An endpoint never does."""
        if self._server is None:
            await asyncio.Event().wait()
        assert self._server is not None
        watch = asyncio.create_task(self._until_stalled(client))
        exited = asyncio.create_task(self._server.exited())
        try:
            await asyncio.wait((watch, exited), return_when=asyncio.FIRST_COMPLETED)
            return exited.result() if exited.done() else watch.result()
        finally:
            watch.cancel()
            exited.cancel()

    async def _until_stalled(self, client: EngineClient) -> Exit:
        """Return once requests have run for `stall_s` in which no token was made and no answer came."""
        moved, seen = time.monotonic(), None
        while True:
            setup, driver = self._setup, self._driver
            if setup is None or driver is None:
                await asyncio.sleep(_WATCH_S)
                moved = time.monotonic()
                continue
            await asyncio.sleep(min(_WATCH_S, setup.stall_s / 4))
            metrics = await client.metrics()
            engine = engine_of(setup.model.entry.engine)
            tokens = engine.tokens_made(metrics) if metrics is not None else None
            # Without a count of tokens only a server that fails its health probe is known to stand still.
            blind = tokens is None and await client.problem() is None
            now, fresh = time.monotonic(), (id(driver), driver.answers, tokens)
            if blind or not driver.in_flight() or fresh != seen:
                moved, seen = now, fresh
            elif now - moved >= setup.stall_s:
                return Exit(f"the model server made no token for {setup.stall_s:g} s", charged=False)

    async def _report_death(self, driver: Driver, ended: Exit) -> bool:
        """Take all records out of the dead server's hands; the control plane decides where they go next.

        Return whether records may be to blame.
        """
        log.warning("%s", ended.reason)
        driver.pause()
        # A dead server's connections break at once: that tells what it had from what came too late for it.
        in_flight = await driver.take_in_flight(_BREAKING_S if ended.charged else 0.0)
        self._returned += driver.take_waiting()
        self._deaths_seen += 1
        self._deaths.append(Death(self._deaths_seen, ended.reason, ended.charged, [lease.index for lease in in_flight]))
        self._phase, self._note = Phase.LOADING, f"restarting: {ended.reason}"
        driver.wake.set()
        if left := await self._end_server(grace_s=0.0):
            # The next would share the device with them.
            pids = ", ".join(map(str, left))
            raise EngineError(f"{ended.reason}, and what it started cannot be ended: process {pids}", transient=True)
        return ended.charged and bool(in_flight)


async def _listed(client: EngineClient) -> frozenset[str] | None:
    """Return the ids that a started server lists; None when it lists none."""
    try:
        return await client.model_ids()
    except Unreachable:
        return None
    except PermissionError as error:
        raise EngineError(f"the model server refuses its own key: {error}", transient=False) from error


def _window(setup: Setup, slots: int | None) -> Window:
    if setup.concurrency:
        return Window.fixed(setup.concurrency)
    return Window.opaque() if slots is None else Window.known(slots)
