"""A control plane with several jobs: workers that go from one to the next, jobs that end in every way."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from freight.control import plane as plane_module
from freight.control.apply import Apply
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import Index, Limits, scan
from freight.control.jobrun import JobOptions, JobRun, launch_of
from freight.control.plane import ControlPlane, Policy
from freight.control.waiting import WaitingJob
from freight.control.workerrun import WorkerRun
from freight.core.job import FINAL, Event, State, Totals
from freight.core.messages import Order, Phase, Returned
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Rules
from freight.core.snapshot import MOST_STARTS
from freight.errors import OperationError
from freight.store.catalog import Catalog
from freight.store.database import Sharing
from freight.store.folder import FolderLock, Locking
from freight.store.results import Results
from tests.unit.planes import COUNT, LIMITS, Played, done

URL = "http://127.0.0.1:9"
PATIENCE_S = 8


class House(Played):
    """A shared control plane on real databases."""

    def __init__(self, folder: Path, keep_warm_s: float) -> None:
        super().__init__()
        self.folder = folder
        self.keep_warm_s = keep_warm_s
        self.ended: dict[str, JobRun] = {}
        self.catalog = Catalog(self.folder / "catalog.db", Locking.LOCAL, Sharing.WRITER)
        self.writer, self.reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.lock = FolderLock(self.folder)
        self.lock.take("the folder")
        (self.folder / "sockets").mkdir()
        self.files: list[InputFile] = []
        self.opened: list[Results] = []

    def close(self) -> None:
        self.writer.shutdown()
        self.reader.shutdown()
        for opened in (*self.files, *self.opened):
            with suppress(Exception):
                opened.close()
        self.catalog.close()
        self.lock.release()

    async def note_end(self, job: JobRun) -> None:
        self.ended[job.row.name or ""] = job

    async def open(self, waiting: WaitingJob) -> JobRun:
        folder = self.folder / waiting.row.id
        file = InputFile(folder / "input.jsonl", "the input")
        index = Index.load(folder / "index.npz")
        results = Results(folder / "results.db", Locking.LOCAL, Sharing.WRITER)
        self.files.append(file)
        self.opened.append(results)
        dispatcher = Dispatcher(file, index, results, waiting.row, self.writer, self.reader)
        output = self.folder / f"{waiting.row.id}-out.jsonl" if waiting.row.spec["output"] else None
        return JobRun(
            waiting.row, file, index, results, dispatcher, waiting.model, waiting.options,
            LIMITS, folder, output, False, waiting.ran_s,
        )  # fmt: skip

    def submit(self, name: str, url: str = URL, output: bool = False) -> WaitingJob:
        """Put a job of COUNT records into the queue."""
        folder = self.folder / f"id-{name}"
        folder.mkdir()
        path = folder / "input.jsonl"
        path.write_text("".join(f'{{"custom_id":"r{i}","body":{{"messages":[]}}}}\n' for i in range(COUNT)))
        file = InputFile(path, "the input")
        index = scan(file, Rules(), Limits(10_000), lambda problems: None)
        file.close()
        index.save(folder / "index.npz")
        Results(folder / "results.db", Locking.LOCAL, Sharing.WRITER).close()
        row = self.catalog.add(f"id-{name}", {"output": output}, COUNT, None, time.time(), name=name)
        row = self.catalog.happened(row, Event.ACCEPTED, time.time())
        entry = ModelEntry(engine=EngineName.ENDPOINT, source=url)
        model = ModelSpec(url, entry, url, None, None, frozenset(), {})
        options = JobOptions(workers=1)
        launch = launch_of(model, index.endpoints_used(), 0, 0)
        waiting = WaitingJob(row, model, options, launch, Totals(), COUNT, 0.0, self.open)
        self.plane.roster.waiting[row.id] = waiting
        self.plane.changed()
        return waiting

    def in_hand(self, name: str) -> JobRun | WaitingJob:
        roster = self.plane.roster
        return self.ended.get(name) or roster.open.get(f"id-{name}") or roster.waiting[f"id-{name}"]

    def job_of(self, worker: str) -> str | None:
        """Return the id of the job that a worker serves."""
        job = self.plane.roster.workers[worker].job
        return job.row.id if job else None

    def id_of(self, name: str) -> str:
        return f"id-{name}"

    def state(self, name: str) -> State:
        return self.catalog.get(f"id-{name}").state

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario beside the control plane, which must live until its end."""

        async def play() -> None:
            def places(_: JobRun | None, worker: str) -> tuple[Path, Path]:
                return self.folder / "sockets" / worker, self.folder / f"{worker}.log"

            self.plane = ControlPlane(
                self.catalog, self.hand, self.lock, self.writer, self.hand.listen,  # type: ignore[arg-type]
                self.folder / "sockets" / "control.sock", places,
                Policy(LIMITS, self.keep_warm_s, shared=True, ended=self.note_end),
            )  # fmt: skip
            serving = asyncio.create_task(self.plane.serve())
            playing = asyncio.ensure_future(scenario())
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((serving, playing), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    playing.cancel()
                    await serving
                await playing
                self.plane.stop()
                for end in self.hand.ends.values():
                    end.set()
                await serving

        asyncio.run(play())


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    opened = House(tmp_path, keep_warm_s=0.0)
    yield opened
    opened.close()


def test_a_worker_that_reports_before_the_disk_has_noted_its_process_is_known(house: House) -> None:
    async def scenario() -> None:
        noted, runs = threading.Event(), house.catalog.worker_runs

        def slow(*arguments: Any) -> None:
            noted.wait(PATIENCE_S)
            runs(*arguments)

        house.catalog.worker_runs = slow  # type: ignore[method-assign]
        house.submit("a")
        worker = await house.hand.next_worker(1)
        told = asyncio.create_task(house.say(worker))
        await asyncio.sleep(0)
        noted.set()
        orders = await told
        assert (orders.order, orders.setup is not None) == (Order.RUN, True)

    house.run(scenario)


def test_a_worker_goes_on_to_the_next_job_of_its_launch_and_then_ends(house: House) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        house.submit("b")
        assert (await house.finish(worker, "a")).order is Order.RELEASE
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED and house.job_of(worker) == "id-b")
        orders = await house.say(worker, phase=Phase.IDLE)
        assert (orders.order, orders.setup and orders.setup.job) == (Order.RUN, "id-b")
        await house.say(worker, "b")
        # Nobody waits for it any more.
        assert (await house.finish(worker, "b")).order is Order.STOP
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("b") is State.COMPLETED)
        assert len(house.hand.places) == 1
        assert [stint.number for stint in house.catalog.stints("id-b")] == [1]

    house.run(scenario)


def test_a_worker_ends_with_its_job_where_the_next_needs_another_server(house: House) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        house.submit("b", url="http://127.0.0.1:10")
        assert (await house.finish(worker, "a")).order is Order.STOP

    house.run(scenario)


def test_a_warm_worker_stays_until_a_job_of_its_launch_comes(tmp_path: Path) -> None:
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        assert (await house.finish(worker, "a")).order is Order.RELEASE
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED)
        orders = await house.say(worker, phase=Phase.IDLE)
        assert (orders.order, orders.setup) == (Order.RUN, None)
        house.submit("b")
        await house.until(lambda: house.plane.roster.workers[worker].job)
        orders = await house.say(worker, phase=Phase.IDLE)
        assert orders.setup is not None
        assert len(house.hand.places) == 1

    house.run(scenario)
    house.close()


def test_a_warm_worker_that_ends_while_it_is_to_join_a_job_is_replaced(tmp_path: Path) -> None:
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        await house.finish(worker, "a")
        await house.say(worker, "a", phase=Phase.IDLE)
        await house.until(lambda: house.state("a") is State.COMPLETED)
        house.submit("b")
        release = asyncio.Event()
        join = house.catalog.worker_joins
        loop = asyncio.get_running_loop()

        def slow(*arguments: Any) -> int:
            number = join(*arguments)
            loop.call_soon_threadsafe(house.hand.ends[worker].set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(PATIENCE_S)
            return number

        house.catalog.worker_joins = slow  # type: ignore[method-assign]
        await house.until(lambda: worker not in house.plane.roster.workers)
        release.set()
        # The job must not wait for a worker that is gone.
        assert await asyncio.wait_for(house.hand.next_worker(2), 5)

    house.run(scenario)
    house.close()


async def cancel(house: House, name: str) -> None:
    async with house.plane.deciding:
        await house.plane.apply.happened(house.in_hand(name), Event.CANCEL_ASKED)
    house.plane.changed()


@pytest.mark.parametrize("when", ["queued", "starting", "running", "suspended"])
def test_a_cancelled_job_ends_once_its_worker_is_gone(house: House, when: str) -> None:
    async def scenario() -> None:
        house.submit("first")
        worker = await house.serving("first")
        if when == "queued":
            house.submit("a")
            name = "a"
        else:
            name = "first"
            await house.until(lambda: house.state("first") is State.RUNNING)
        if when == "suspended":
            house.plane.roster.open["id-first"].found_full(time.monotonic(), "no space left")
            await house.until(lambda: house.state("first") is State.SUSPENDED)
        if when == "starting":
            house.hand.ends[worker].set()
            second = await house.started(2)
            await house.until(lambda: house.state("first") is State.STARTING)
            worker = second
        await cancel(house, name)
        if name == "first":
            await house.until_told(worker, Order.STOP, "first" if when != "starting" else "")
            assert house.state("first") is State.CANCELLING
            house.plane.roster.open["id-first"]._full_until = 0.0
            house.hand.ends[worker].set()
        await house.until(lambda: house.state(name) is State.CANCELLED)

    house.run(scenario)


def completes(house: House, name: str, number: int) -> Callable[[], Awaitable[None]]:
    async def go() -> None:
        worker = await house.serving(name, number)
        await house.finish(worker, name)
        house.hand.ends[worker].set()
        await house.until(lambda: house.state(name) is State.COMPLETED)

    return go


@pytest.mark.parametrize(
    ("missing", "is_garbage"),
    [("index.npz", False), ("index.npz", True), ("input.jsonl", False), ("results.db", True), ("", False)],
)
def test_a_waiting_job_whose_files_are_gone_fails_alone(house: House, missing: str, is_garbage: bool) -> None:
    async def scenario() -> None:
        house.submit("good")
        worker = await house.serving("good")
        house.submit("bad")
        folder = house.folder / "id-bad"
        for path in [folder / missing] if missing else sorted(folder.iterdir()):
            path.write_bytes(b"garbage" * 1000) if is_garbage else path.unlink()
        if not missing:
            folder.rmdir()
        await house.finish(worker, "good")
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("good") is State.COMPLETED)
        await house.until(lambda: house.state("bad") in FINAL or len(house.hand.places) > 1)
        assert house.state("bad") is State.FAILED
        assert house.catalog.get("id-bad").reason

    house.run(scenario)


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("broken", ["input.jsonl", "results.db"])
def test_a_running_job_whose_files_break_fails_alone(house: House, broken: str, output: bool) -> None:
    async def scenario() -> None:
        house.submit("bad", output=output)
        worker = await house.serving("bad")
        await house.until(lambda: house.state("bad") is State.RUNNING)
        await house.say(worker, "bad", want=2)
        await house.say(worker, "bad", done=done(0))
        path = house.folder / "id-bad" / broken
        if broken == "results.db":
            house.writer.submit(spoil, house.opened[0]).result()
        else:
            path.write_bytes(b"{}\n")
        await house.until_told(worker, Order.STOP, "bad", done=done(1), want=2)
        house.submit("good")
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("bad") in FINAL)
        assert house.state("bad") is State.FAILED
        assert house.catalog.get("id-bad").reason
        await completes(house, "good", 2)()

    house.run(scenario)


def spoil(results: Results) -> None:
    """Damage a database under those who have it open: its pages are no SQLite any more."""
    connection: Any = results._connection
    path = Path(connection.filename)
    connection.pragma("wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    connection.pragma("shrink_memory")


def test_an_adopted_worker_that_never_reports_is_ended_and_its_job_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "ATTACH_S", 0.0)

    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job)
        house.plane.roster.open["id-a"] = job
        worker = await house.started(1)
        assert adopted.id not in house.plane.roster.workers
        assert adopted.stopping
        orders = await house.say(worker)
        assert orders.setup is not None

    house.run(scenario)


def test_nobody_gets_records_before_an_adopted_worker_has_said_what_it_holds(house: House) -> None:
    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job, attached=False)
        house.plane.roster.open["id-a"] = job
        job.row = msgspec.structs.replace(job.row, state=State.RUNNING)
        stranger = await house.say(adopted.id, "a", plane="another")
        assert (stranger.order, stranger.leases) == (Order.ATTACH, [])
        assert stranger.plane == house.plane.id
        orders = await house.say(adopted.id, "a", held=[Returned(3, 1)], want=COUNT)
        assert [lease.index for lease in orders.leases] == [i for i in range(COUNT) if i != 3]

    house.run(scenario)


def adopt(house: House, job: JobRun, attached: bool = False) -> WorkerRun:
    """Give the control plane a worker of an earlier one."""
    end = house.hand.ends["old"] = asyncio.Event()

    async def ended() -> None:
        await end.wait()

    async def clear(_: float) -> tuple[()]:
        return ()

    process: Any = SimpleNamespace(pid=1, identity=dict, ended=ended, clear=clear, kill=end.set)
    folder = house.folder / "sockets" / "old"
    worker = WorkerRun(
        "old", URL, (), folder, house.folder / "old.log", process, job, job.launch, "m", 1, attached=attached,
        since=time.monotonic() - 1,
    )  # fmt: skip
    job.workers["old"] = house.plane.roster.workers["old"] = worker
    house.plane.apply.watch(worker)
    return worker


@pytest.mark.parametrize("broken", [False, True])
def test_a_suspended_job_that_breaks_is_told_apart_from_one_whose_starts_are_exhausted(
    house: House, broken: bool
) -> None:
    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        await house.until(lambda: house.state("a") is State.RUNNING)
        job = house.plane.roster.open["id-a"]
        job.found_full(time.monotonic(), "no space left")
        await house.until(lambda: house.state("a") is State.SUSPENDED)
        if broken:
            job.failure = OperationError("its input is another one")
            await house.until_told(worker, Order.STOP, "a")
        else:
            job._full_until = 0.0
            for _ in range(MOST_STARTS):
                job.start_failed((URL,), "no such luck", False, time.monotonic())
        house.hand.ends[worker].set()
        await house.until(lambda: house.state("a") is State.FAILED)
        last = house.catalog.events("id-a")[-1]
        ended = (Event.STARTS_EXHAUSTED, "the worker process ended with status 1")
        expected = (Event.BROKE, "its input is another one") if broken else ended
        assert (last.event, last.detail) == expected

    house.run(scenario)


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.STOPPED])
def test_a_worker_that_says_it_has_ended_and_has_not_is_killed_after_a_grace(
    house: House, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    monkeypatch.setattr(Apply.expect_end, "__defaults__", (0.01,))

    async def scenario() -> None:
        house.submit("a")
        worker = await house.serving("a")
        orders = await house.say(worker, "a", phase=phase, note="no such luck")
        assert orders.order is Order.STOP
        # Its process goes on, and nobody ends it but the control plane.
        second = await house.started(2)
        assert house.hand.ends[worker].is_set()
        assert worker not in house.plane.roster.workers
        [trouble] = house.plane.roster.open["id-a"].troubles.values()
        assert (trouble.count, trouble.words) == (1, "no such luck")
        assert (await house.say(second)).setup is not None

    house.run(scenario)


def test_a_worker_that_never_reports_is_ended_and_counts_as_a_start_that_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 0.05)

    async def scenario() -> None:
        house.submit("a")
        first = await house.started(1)
        second = await house.started(2)
        assert first not in house.plane.roster.workers
        [trouble] = house.plane.roster.open["id-a"].troubles.values()
        assert (trouble.count, trouble.words) == (1, "the worker did not report within 0.05 s")
        # One that has reported may take its time.
        monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 60.0)
        await house.say(second, phase=Phase.LOADING)
        monkeypatch.setattr(plane_module, "FIRST_REPORT_S", 0.0)
        await house.say(second, "a")
        await house.finish(second, "a")

    house.run(scenario)


def test_a_worker_of_a_job_that_is_gone_is_told_to_stop_and_killed_when_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Apply.stop_worker, "__defaults__", (0.01,))
    house = House(tmp_path, keep_warm_s=3600)

    async def scenario() -> None:
        waiting = house.submit("a")
        del house.plane.roster.waiting["id-a"]
        job = await house.open(waiting)
        adopted = adopt(house, job)
        adopted.job = None
        adopted.since = time.monotonic()
        assert (await house.say(adopted.id, "a", plane="another")).order is Order.ATTACH
        assert (await house.say(adopted.id, "a")).order is Order.STOP
        await house.until(house.hand.ends["old"].is_set)
        await house.until(lambda: not house.plane.roster.workers)

    house.run(scenario)
    house.close()


def test_nothing_is_planned_for_a_moment_in_which_adopted_workers_may_say_that_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second worker would be started for a job that the first can take."""
    house = House(tmp_path, keep_warm_s=3600)
    hear, hearing = ControlPlane._hear_adopted, asyncio.Event()

    async def with_one(plane: ControlPlane) -> None:
        # At another place than the job's own, which is free.
        job = await house.open(house.submit("a", url="http://127.0.0.1:10"))
        adopted = adopt(house, job)
        job.workers.clear()
        adopted.job, adopted.since = None, time.monotonic()
        hearing.set()
        await hear(plane)

    monkeypatch.setattr(ControlPlane, "_hear_adopted", with_one)
    monkeypatch.setattr(plane_module, "ADOPTED_S", PATIENCE_S)

    async def scenario() -> None:
        await hearing.wait()
        house.plane.changed()
        await house.until(lambda: not house.plane._changed.is_set())
        assert not house.hand.places
        await house.say("old", phase=Phase.IDLE)
        await house.until(lambda: house.job_of("old") == "id-a")
        orders = await house.say("old", phase=Phase.IDLE)
        assert orders.setup is not None
        await house.say("old", "a")
        await house.finish("old", "a")
        assert not house.hand.places

    house.run(scenario)
    house.close()


@pytest.mark.parametrize(("hopeless", "starts"), [(True, 1), (False, MOST_STARTS)])
def test_a_start_of_which_no_other_would_go_better_is_not_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, hopeless: bool, starts: int
) -> None:
    monkeypatch.setattr("freight.core.snapshot.START_BACKOFF_S", (0.0, 0.0))

    async def scenario() -> None:
        house.submit("a")
        for number in range(1, starts + 1):
            worker = await house.started(number)
            await house.say(worker)
            await house.say(worker, "a", phase=Phase.FAILED, note="there is no program serve", hopeless=hopeless)
            house.hand.ends[worker].set()
        await house.until(lambda: house.state("a") is State.FAILED)
        assert house.catalog.get("id-a").reason == "there is no program serve"
        assert len(house.hand.places) == starts

    house.run(scenario)
