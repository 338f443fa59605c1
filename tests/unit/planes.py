"""What tests of the control plane share: a dispatcher on real files, and a launcher that is played by the test."""

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from freight.control.destination import FileAt
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import NO_WISHES, Index, Limits, Wishes, scan
from freight.control.jobrun import EngineLimits, JobOptions, JobRun
from freight.control.output import ASIDE
from freight.control.plane import ControlPlane
from freight.core.answer import Answer, Line, answer_line
from freight.core.device import Device
from freight.core.job import Event, State, Totals
from freight.core.messages import PROTOCOL, Order, Orders, Phase, Report
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Rules
from freight.launchers.base import Remains, WorkerPlace
from freight.store.catalog import Catalog
from freight.store.folder import Locking
from freight.store.results import Results

COUNT = 20
LIMITS = EngineLimits(60, 60, 60, 60)
PATIENCE_S = 30


def done(*indices: int) -> list[Line]:
    """Return answers to these records."""
    return [answer_line(index, b'"%d"' % index, 200, "r", Answer(b"{}", 1, 1, 0, False)) for index in indices]


@dataclass
class Parts:
    """A dispatcher with a real file and real databases."""

    file: InputFile
    index: Index
    results: Results
    catalog: Catalog
    dispatcher: Dispatcher
    writer: ThreadPoolExecutor
    reader: ThreadPoolExecutor
    numbers: dict[str, int] = field(default_factory=dict[str, int])

    async def lease(self, worker: str, want: int, workers: int = 1) -> list[int]:
        """Return the indices that a worker gets."""
        leases = await self.dispatcher.lease(worker, want, workers)
        assert all(b'"r%d"' % lease.index in lease.line for lease in leases)
        return [lease.index for lease in leases]

    def report(self, worker: str, **fields: Any) -> Report:
        """Return the next report of a worker."""
        self.numbers[worker] = number = self.numbers.get(worker, 0) + 1
        fields.setdefault("job", "job" if number > 1 else "")
        return Report(PROTOCOL, worker, number, fields.pop("phase", Phase.READY), **fields)

    def open_again(self) -> None:
        """Replace the dispatcher by that of a control plane that starts anew."""
        row = self.catalog.get("job")
        self.dispatcher = Dispatcher(self.file, self.index, self.results, row, self.writer, self.reader)

    async def accept(self, worker: str, **fields: Any) -> None:
        """Have the dispatcher take a report of a worker."""
        await self.dispatcher.accept(self.report(worker, **fields))

    @contextmanager
    def writing(self) -> Generator[Callable[[], None]]:
        """Keep the writer busy until what is yielded is called, so that a report is being written for that long."""
        free = threading.Event()
        self.writer.submit(free.wait, PATIENCE_S)
        try:
            yield free.set
        finally:
            free.set()

    @contextmanager
    def putting(self) -> Generator[Callable[[], Awaitable[bool]]]:
        """Keep results from the disk until the block ends; what is yielded waits until some are on their way there."""
        put, there, free = self.results.put, threading.Event(), threading.Event()

        def put_late(*arguments: Any) -> Totals:
            there.set()
            free.wait(PATIENCE_S)
            return put(*arguments)

        with patch.object(self.results, "put", put_late):
            try:
                yield lambda: asyncio.to_thread(there.wait, PATIENCE_S)
            finally:
                free.set()


@contextmanager
def opened_parts(
    tmp_path: Path, bodies: Sequence[str] = ('{"messages":[]}',) * COUNT, wishes: Wishes = NO_WISHES
) -> Generator[Parts]:
    """Give a dispatcher of records with these bodies, none of them done; their ids are r0, r1, …"""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"custom_id":"r{i}","body":{body}}}\n' for i, body in enumerate(bodies)))
    file = InputFile(path, "in.jsonl")
    index = scan(file, Rules(), Limits(10_000_000), lambda problems: None, wishes=wishes)
    results = Results(tmp_path / "results.db", Locking.LOCAL)
    catalog = Catalog(tmp_path / "catalog.db", Locking.LOCAL)
    row = catalog.happened(catalog.add("job", {}, len(bodies), None, 1.0), Event.ACCEPTED, 1.0)
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as reader:
        dispatcher = Dispatcher(file, index, results, row, writer, reader)
        yield Parts(file, index, results, catalog, dispatcher, writer, reader)
    results.close()
    catalog.close()
    file.close()


class Hand:
    """A launcher, and the listener, in one: the test says what workers say and when they end."""

    def __init__(self) -> None:
        self.places: list[WorkerPlace] = []
        self.ends: dict[str, asyncio.Event] = {}
        # What is left on the devices of a worker when that has ended.
        self.remains: dict[str, tuple[Remains, ...]] = {}
        self.exchange: Callable[[bytes], Awaitable[bytes]] | None = None

    def listen(self, socket: Path, exchange: Callable[[bytes], Awaitable[bytes]]) -> "Hand":
        self.exchange = exchange
        return self

    async def stop(self) -> None:
        """Nothing to stop."""

    def devices(self) -> tuple[Device, ...]:
        return ()

    def worker_id(self) -> str:
        return uuid.uuid4().hex[:12]

    def start(self, place: WorkerPlace) -> Any:
        self.places.append(place)
        end = self.ends[place.worker] = asyncio.Event()

        async def ended() -> int:
            await end.wait()
            return 1

        async def clear(within_s: float) -> tuple[Remains, ...]:
            return self.remains.pop(place.worker, ())

        return SimpleNamespace(pid=1, identity=dict, ended=ended, clear=clear, kill=end.set)

    async def say(self, report: Report) -> Orders:
        """Send a report and return the orders."""
        assert self.exchange is not None
        return msgspec.msgpack.decode(await self.exchange(msgspec.msgpack.encode(report)), type=Orders)

    async def next_worker(self, number: int) -> str:
        """Return the id of the `number`th worker, once it was started."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.places) < number:  # noqa: ASYNC110 - it is polled, as the harness does with processes.
                await asyncio.sleep(0.01)
        return self.places[number - 1].worker


class Played:
    """The workers of one control plane, `plane`, which the test plays by `hand`."""

    plane: ControlPlane

    def __init__(self) -> None:
        self.hand = Hand()
        self.numbers: dict[str, int] = {}

    def id_of(self, name: str) -> str:
        """Return the id of a job."""
        raise NotImplementedError

    def state(self, name: str) -> State:
        """Return the state of a job as the disk has it."""
        raise NotImplementedError

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - it is polled, as the harness does with processes.
            await asyncio.sleep(0.005)

    async def say(self, worker: str, job: str = "", **fields: Any) -> Orders:
        """Let a worker report that it serves a job."""
        self.numbers[worker] = number = self.numbers.get(worker, 0) + 1
        phase = fields.pop("phase", Phase.READY)
        plane = fields.pop("plane", self.plane.id)
        report = Report(PROTOCOL, worker, number, phase, job=self.id_of(job) if job else "", plane=plane, **fields)
        return await self.hand.say(report)

    async def until_told(self, worker: str, order: Order, job: str = "", **fields: Any) -> None:
        """Let a worker report until it gets an order."""
        while (await self.say(worker, job, **fields)).order is not order:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def started(self, number: int) -> str:
        """Return the `number`th worker, once the control plane knows it."""
        worker = await self.hand.next_worker(number)
        await self.until(lambda: worker in self.plane.roster.workers)
        return worker

    async def serving(self, name: str, number: int = 1) -> str:
        """Return the `number`th worker, which is ready and serves a job."""
        worker = await self.started(number)
        orders = await self.say(worker)
        assert orders.setup is not None and orders.setup.job == self.id_of(name)
        await self.say(worker, name)
        return worker

    async def finish(self, worker: str, name: str) -> Orders:
        """Let a worker do all of a job; return the last orders."""
        await self.until(lambda: self.state(name) is State.RUNNING)
        left = list(range(COUNT))
        orders = await self.say(worker, name, want=COUNT)
        assert sorted(lease.index for lease in orders.leases) == left
        return await self.say(worker, name, done=done(*left))


def job_of(parts: Parts, folder: Path) -> JobRun:
    entry = ModelEntry(engine=EngineName.ENDPOINT, source="http://127.0.0.1:9")
    model = ModelSpec("m", entry, "m", None, None, frozenset(), {})
    return JobRun(
        parts.catalog.get("job"), parts.file, parts.index, parts.results, parts.dispatcher, model, JobOptions(),
        LIMITS, folder, FileAt(folder / "out.jsonl", folder / ASIDE), force=False,
    )  # fmt: skip
