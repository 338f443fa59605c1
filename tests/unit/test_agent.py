"""A worker's side of the protocol, with a real model server, against a control plane that is played by the test."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from freight.api.exchange import ExchangeServer
from freight.core.messages import PROTOCOL, Lease, Order, Orders, Phase, Report, Returned, Setup
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Endpoint
from freight.engines.command import CommandEngine
from freight.errors import UserError
from freight.store.staging import staged as copy_of
from freight.worker import agent
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
        is_new = report.number == 1 or report.job != (self.setup.job if self.setup else "")
        if self.setup is not None and is_new and self.order is Order.RUN:
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
        assert self.script.setup is not None
        if self.script.setup.job:
            await self.script.hears(lambda report: report.phase is Phase.READY)

    async def ends(self) -> None:
        assert self.running is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.running
        assert servers(self.work) == []


@asynccontextmanager
async def staged(tmp_path: Path, *options: str, job: str = "a", orphan_s: float = 60.0) -> AsyncGenerator[Stage]:
    with tempfile.TemporaryDirectory(prefix="fr") as folder:
        stage = Stage(Path(folder), tmp_path, Script(setup(tmp_path, job, *options)), orphan_s)
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


def test_records_are_asked_for_once_the_server_is_up_however_long_reports_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_NEWS_S", "_PACE_S", "HEARTBEAT_S"):
        monkeypatch.setattr(agent, pause, 600.0)

    async def scenario() -> None:
        async with staged(tmp_path) as stage:
            assert (await stage.script.hears(lambda report: report.phase is Phase.READY)).want

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
            stage.agent._control.orphan_s = 0.3  # A start counts as grace, too.
            await stage.server.stop()
            await stage.ends()

    asyncio.run(scenario())


def test_a_worker_without_a_control_plane_that_is_told_to_end_does_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, orphan_s=0.0) as stage:
            stage.agent._control.orphan_s = 0.5
            await stage.server.stop()
            stage.agent.stopping.set()
            await stage.ends()

    asyncio.run(scenario())


def test_a_worker_without_a_job_has_its_server_up_and_serves_a_job_that_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, job="") as stage:
            script = stage.script
            idle = await script.hears(lambda report: report.phase is Phase.IDLE)
            assert (idle.job, idle.want, idle.note) == ("", 0, "")
            [server] = servers(tmp_path)
            for job, index in (("a", 3), ("b", 4)):
                since = len(script.reports)
                script.setup, script.leases, script.order = setup(tmp_path, job), [lease(index)], Order.RUN
                done = await script.hears(lambda report: report.done, since)
                assert (done.job, done.phase, [line.index for line in done.done]) == (job, Phase.READY, [index])
                script.setup, script.order, since = None, Order.RELEASE, len(script.reports)
                await script.hears(lambda report: report.phase is Phase.IDLE, since)
                script.order = Order.RUN
                await script.hears(lambda report: report.phase is Phase.IDLE and not report.job, since)
            assert servers(tmp_path) == [server]

    asyncio.run(scenario())


def test_a_job_that_comes_while_the_server_loads_is_served_once_it_is_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, "--loading", "1", job="") as stage:
            script = stage.script
            await script.hears(lambda report: report.phase is Phase.LOADING and report.number > 1)
            script.setup, script.leases = setup(tmp_path, "a", "--loading", "1"), [lease(5)]
            loading = await script.hears(lambda report: report.job == "a")
            assert (loading.phase, loading.want) == (Phase.LOADING, 0)
            done = await script.hears(lambda report: report.done)
            assert (done.job, [line.index for line in done.done]) == ("a", [5])
            assert Phase.IDLE not in {report.phase for report in script.reports}
            assert len(servers(tmp_path)) == 1

    asyncio.run(scenario())


def test_a_server_that_ends_while_no_job_needs_it_ends_its_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, job="") as stage:
            await stage.script.hears(lambda report: report.phase is Phase.IDLE)
            for server in servers(tmp_path):
                server.kill()
            failed = await stage.script.hears(lambda report: report.phase is Phase.FAILED)
            assert "while no job needed it" in failed.note
            assert not failed.hopeless
            await stage.ends()

    asyncio.run(scenario())


def test_a_server_that_cannot_start_is_told_though_there_is_no_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with staged(tmp_path, "--fail-start", job="") as stage:
            failed = await stage.script.hears(lambda report: report.phase is Phase.FAILED)
            assert failed.job == ""
            assert "status 7" in failed.note
            await stage.ends()

    asyncio.run(scenario())


def with_stage(tmp_path: Path, stall_s: float = 60.0) -> Setup:
    """Return a setup whose model is a file that is copied to a stage first."""
    (tmp_path / "net.bin").write_bytes(b"weights")
    plain = setup(tmp_path, "")
    return msgspec.structs.replace(
        plain, source=str(tmp_path / "net.bin"), stage=str(tmp_path / "stage"), start_stall_s=stall_s
    )


@contextmanager
def copied_by_another(tmp_path: Path, worker: Setup) -> Generator[None]:
    """Have another process make the copy that a worker needs, and get no further with it."""
    with ThreadPoolExecutor(1) as pool:
        begun, go_on = threading.Event(), threading.Event()

        def hang(_: int) -> None:
            begun.set()
            assert go_on.wait(PATIENCE_S)

        copying = pool.submit(copy_of, Path(worker.source), Path(worker.stage), hang)
        try:
            assert begun.wait(PATIENCE_S)
            yield
        finally:
            go_on.set()
            copying.result()


@asynccontextmanager
async def alone(tmp_path: Path, worker: Setup) -> AsyncGenerator[Stage]:
    """Run a worker of which nothing is expected."""
    with tempfile.TemporaryDirectory(prefix="fr") as folder:
        stage = Stage(Path(folder), tmp_path, Script(worker), 60.0)
        await stage.listen()
        stage.running = asyncio.create_task(stage.agent.run())
        try:
            yield stage
        finally:
            stage.running.cancel()
            await asyncio.gather(stage.running, return_exceptions=True)
            await stage.server.stop()


def test_copy_of_another_that_stands_still_is_a_failed_start_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        worker = with_stage(tmp_path, stall_s=0.3)
        with copied_by_another(tmp_path, worker):
            async with alone(tmp_path, worker) as stage:
                failed = await stage.script.hears(lambda report: report.phase is Phase.FAILED)
                assert "the copy of the model to" in failed.note
                assert "has stood still for 0.3 s" in failed.note
                assert not failed.hopeless

    asyncio.run(scenario())


@pytest.mark.parametrize("told", ["by an order", "by its end"])
def test_worker_that_waits_for_the_copy_of_another_ends_when_it_is_told(tmp_path: Path, told: str) -> None:
    async def scenario() -> None:
        worker = with_stage(tmp_path)
        with copied_by_another(tmp_path, worker):
            async with alone(tmp_path, worker) as stage:
                await stage.script.hears(lambda report: report.note.startswith("copying the model"))
                assert stage.running is not None
                if told == "by an order":
                    stage.script.order = Order.STOP
                    await stage.ends()
                    assert stage.script.reports[-1].phase is Phase.STOPPED
                else:
                    stage.running.cancel()
                    await asyncio.gather(stage.running, return_exceptions=True)
                # No thread of it waits any longer: the loop's end would wait for that.
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(scenario())


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UserError("there is no program serve", "install it")

    monkeypatch.setattr(CommandEngine, "command", refuse)

    async def scenario() -> None:
        async with alone(tmp_path, setup(tmp_path)) as stage:
            failed = await stage.script.hears(lambda report: report.phase is Phase.FAILED)
            assert (failed.note, failed.hopeless) == ("there is no program serve", True)

    asyncio.run(scenario())
