"""A worker's side of the protocol, with a real model server, against a control plane that is played by the test."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from freight.api.exchange import ExchangeServer
from freight.core.messages import PROTOCOL, Lease, Order, Orders, Phase, Report, Returned, Setup
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Endpoint
from freight.worker.agent import Agent
from tests.harness import engine_command

PATIENCE_S = 20


def lease(index: int, text: str = "hello") -> Lease:
    body = {"messages": [{"role": "user", "content": text}]}
    line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return Lease(index, 0, msgspec.json.encode(line))


class Script:
    """A control plane whose orders the test sets; `reports` is what it was told."""

    def __init__(self, setup: Setup) -> None:
        self.plane = "first"
        self.reports: list[Report] = []
        self.heard = asyncio.Condition()
        self.deaf = False
        self.order = Order.RUN
        self.setup: Setup | None = setup
        self.leases: list[Lease] = []

    async def exchange(self, encoded: bytes) -> bytes:
        report = msgspec.msgpack.decode(encoded, type=Report)
        async with self.heard:
            self.reports.append(report)
            self.heard.notify_all()
        if self.deaf:
            await asyncio.Event().wait()
        return msgspec.msgpack.encode(self.orders(report))

    def orders(self, report: Report) -> Orders:
        if report.plane not in ("", self.plane):
            return Orders(PROTOCOL, Order.ATTACH, plane=self.plane)
        if self.setup is not None and report.job != self.setup.job and self.order is Order.RUN:
            return Orders(PROTOCOL, Order.RUN, setup=self.setup, plane=self.plane)
        given, self.leases = (self.leases, []) if report.want and self.order is Order.RUN else ([], self.leases)
        return Orders(PROTOCOL, self.order, leases=given, plane=self.plane)

    async def hears(self, condition: Callable[[Report], object], since: int = 0) -> Report:
        """Return the first report from the `since`th on of which a condition holds, once it has come."""

        def found() -> list[Report]:
            return [report for report in self.reports[since:] if condition(report)]

        async with asyncio.timeout(PATIENCE_S), self.heard:
            await self.heard.wait_for(found)
        return found()[0]


def setup(folder: Path, job: str = "a", *options: str) -> Setup:
    entry = ModelEntry(engine=EngineName.COMMAND, command=engine_command(folder, *options))
    model = ModelSpec("m", entry, "m", None, None, frozenset(), {})
    return Setup(job, model, "", [Endpoint.CHAT], 4, 0.0, 60.0, 60.0, 60.0)


def servers(folder: Path) -> list[psutil.Process]:
    """Return the model servers that run with this test's folder: those of other tests are no concern of it."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # What orphans of other tests came here, and have ended.
            if str(folder) in " ".join(child.cmdline()):
                found.append(child)
    return found


class Stage:
    """A worker, and the control plane that it talks to."""

    def __init__(self, folder: Path, work: Path, script: Script, orphan_s: float) -> None:
        self.script = script
        self.work = work
        self.socket = folder / "control.sock"
        self.agent = Agent(str(self.socket), "w", folder, folder / "log", (), orphan_s)
        self.running: asyncio.Task[None] | None = None
        self.server: Any = None

    async def listen(self) -> None:
        self.server = ExchangeServer(self.socket, self.script.exchange)
        await self.server.start()

    async def begin(self) -> None:
        await self.listen()
        self.running = asyncio.create_task(self.agent.run())
        await self.script.hears(lambda report: report.phase is Phase.READY)

    async def ends(self) -> None:
        assert self.running is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.running
        assert servers(self.work) == []


@asynccontextmanager
async def staged(tmp_path: Path, *options: str, orphan_s: float = 60.0) -> AsyncGenerator[Stage]:
    with tempfile.TemporaryDirectory(prefix="fr") as folder:
        stage = Stage(Path(folder), tmp_path, Script(setup(tmp_path, "a", *options)), orphan_s)
        try:
            await stage.begin()
            yield stage
        finally:
            if stage.running is not None and not stage.running.done():
                stage.running.cancel()
                await asyncio.gather(stage.running, return_exceptions=True)
            # As a worker's program does whose starter is gone.
            await stage.agent.end_at_once()
            await stage.server.stop()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that the test itself starts find the simulated engine."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])


def test_a_new_control_plane_is_told_all_that_is_held_and_what_the_old_one_did_not_acknowledge(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            script = stage.script
            script.leases = [lease(0), lease(1, "STUB:sleep=600"), lease(2, "STUB:sleep=600")]
            done = await script.hears(lambda report: report.done)
            assert [line.index for line in done.done] == [0]
            await script.hears(lambda report: report.in_flight == 2)
            script.deaf = True
            before = len(script.reports)
            lost = await script.hears(lambda report: True, before)
            # The old one is gone in the middle of that report; the next one listens at the same socket.
            await stage.server.stop()
            stage.script = Script(setup(tmp_path))
            stage.script.plane = "second"
            await stage.listen()
            again = await stage.script.hears(lambda report: report.plane == "first")
            assert again == lost
            attached = await stage.script.hears(lambda report: report.plane == "second")
            assert attached.number > lost.number
            assert (attached.job, attached.phase, attached.done) == ("a", Phase.READY, lost.done)
            assert attached.held == [Returned(1, 0), Returned(2, 0)]
            later = await stage.script.hears(lambda report: report.number > attached.number)
            assert later.held == []

    asyncio.run(scenario())


def test_results_that_nobody_acknowledged_come_again_to_the_next_control_plane(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            script = stage.script
            script.leases = [lease(0)]
            await script.hears(lambda report: report.job == "a" and report.want)

            async def swallow(encoded: bytes) -> bytes:
                report = msgspec.msgpack.decode(encoded, type=Report)
                if report.done:
                    script.deaf = True
                return await Script.exchange(script, encoded)

            script.exchange = swallow  # type: ignore[method-assign]
            await stage.server.stop()
            await stage.listen()
            lost = await script.hears(lambda report: report.done)
            await stage.server.stop()
            stage.script = Script(setup(tmp_path))
            stage.script.plane = "second"
            await stage.listen()
            attached = await stage.script.hears(lambda report: report.plane == "second")
            assert attached.done == lost.done
            assert [line.index for line in attached.done] == [0]
            later = await stage.script.hears(lambda report: report.number > attached.number)
            assert later.done == []

    asyncio.run(scenario())


def test_a_released_worker_hands_everything_in_and_serves_another_job_by_the_same_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            script = stage.script
            script.leases = [lease(0), lease(1, "STUB:sleep=600")]
            await script.hears(lambda report: report.in_flight == 1 and any(r.done for r in script.reports))
            [server] = servers(tmp_path)
            script.setup, script.order = None, Order.RELEASE
            last = await script.hears(lambda report: report.phase is Phase.IDLE)
            assert (last.job, last.returned) == ("a", [Returned(1, 0)])
            script.order = Order.RUN
            idle = await script.hears(lambda report: report.phase is Phase.IDLE and not report.job)
            assert (idle.want, idle.returned, idle.done) == (0, [], [])
            script.setup, script.leases = setup(tmp_path, "b"), [lease(7)]
            since = len(script.reports)
            ready = await script.hears(lambda report: report.job == "b", since)
            assert ready.phase is Phase.READY
            done = await script.hears(lambda report: report.done, since)
            assert (done.job, [line.index for line in done.done]) == ("b", [7])
            assert servers(tmp_path) == [server]
            # It never said that it loads again.
            assert {report.phase for report in script.reports[since:]} <= {Phase.IDLE, Phase.READY}

    asyncio.run(scenario())


def test_an_idle_worker_that_is_told_to_stop_ends_its_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            stage.script.setup, stage.script.order = None, Order.RELEASE
            await stage.script.hears(lambda report: report.phase is Phase.IDLE)
            stage.script.order = Order.STOP
            await stage.ends()
            assert stage.script.reports[-1].phase is Phase.STOPPED

    asyncio.run(scenario())


def test_a_worker_without_a_control_plane_ends_with_its_server_after_its_grace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, orphan_s=0.0) as stage:
            stage.agent._orphan_s = 0.3  # A start counts as grace, too.
            await stage.server.stop()
            await stage.ends()

    asyncio.run(scenario())


def test_a_worker_without_a_control_plane_that_is_told_to_end_does_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, orphan_s=0.0) as stage:
            stage.agent._orphan_s = 0.5
            await stage.server.stop()
            stage.agent.stopping.set()
            await stage.ends()

    asyncio.run(scenario())
