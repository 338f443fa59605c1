"""A control plane with several jobs and workers that a test plays."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from freight.control.destination import FileAt
from freight.control.dispatcher import Dispatcher
from freight.control.inputs import InputFile
from freight.control.intake import Index, Limits, scan
from freight.control.jobrun import JobOptions, JobRun, launch_of
from freight.control.plane import ControlPlane, Policy
from freight.control.waiting import WaitingJob
from freight.core.job import Event, State, Totals
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Rules
from freight.store.catalog import Catalog
from freight.store.database import Sharing
from freight.store.folder import FolderLock, Locking
from freight.store.results import Results
from tests.unit.planes import COUNT, LIMITS, Played

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
        path = self.folder / f"{waiting.row.id}-out.jsonl"
        output = FileAt(path, path.with_suffix(".partial")) if waiting.row.spec["output"] else None
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


async def cancel(house: House, name: str) -> None:
    async with house.plane.deciding:
        await house.plane.apply.happened(house.in_hand(name), Event.CANCEL_ASKED)
    house.plane.changed()


def completes(house: House, name: str, number: int) -> Callable[[], Awaitable[None]]:
    async def go() -> None:
        worker = await house.serving(name, number)
        await house.finish(worker, name)
        house.hand.ends[worker].set()
        await house.until(lambda: house.state(name) is State.COMPLETED)

    return go
