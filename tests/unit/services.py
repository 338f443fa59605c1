"""A service in the test's own process, on a real data folder: the test plays its workers and its launcher."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from freight.config import Config, load_config
from freight.control import service as service_module
from freight.control.service import Service
from freight.control.servicefolder import ServiceFolder
from freight.core.account import Account
from freight.core.device import Device, DeviceKind
from freight.core.job import State
from freight.core.messages import PROTOCOL, Phase, Report
from freight.core.view import JobRequest, Submitted, Upload
from freight.launchers.base import Remains
from freight.store.database import Sharing
from tests.harness import Json, model_toml, parse_lines
from tests.unit.planes import COUNT, Hand, Played

# The model that an office has, whose server a worker would start on the office's one device.
MINE: Final = "mine"
PATIENCE_S: Final = 30


class Ear:
    """Hears nobody: the test hands reports in itself."""

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""


class DeviceHand(Hand):
    """A launcher with one device. What `refusals` holds is raised, one a start, before any worker starts.

    `left` is what is seen on a device when it is looked at again; `freed` are those that were let go nonetheless.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[Exception] = []
        self.left: dict[str, Remains] = {}
        self.freed: list[str] = []

    def hear(self, _: Path, exchange: Callable[[bytes], Awaitable[bytes]]) -> Ear:
        """Listen to nothing but what the test says."""
        self.exchange = exchange
        return Ear()

    def devices(self) -> tuple[Device, ...]:
        return (Device("cpu:0", DeviceKind.CPU),)

    def usage(self, _: Device) -> None:
        """Nobody can say."""

    def take(self, _: Sequence[Device]) -> None:
        """The devices are free for the planner's purposes."""

    def release(self, _: Sequence[Device]) -> None:
        """Nothing is held."""

    def look_again(self, device: str, _: dict[str, Any]) -> Remains | None:
        return self.left.get(device)

    def let_go(self, device: str, hold: dict[str, Any]) -> None:
        self.freed.append(device)

    def start(self, place: Any) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        return super().start(place)


class Office(Played):
    """A service that starts with each `run`, on one data folder."""

    hand: DeviceHand
    service: Service

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.data = folder / "data"
        self.left_at_start: dict[str, Remains] = {}
        self._config = folder / "config.toml"
        self.configure()

    def configure(self, toml: str = "", pool: str = "", token: str = "", entry: str = "") -> None:
        """Write the settings, with more about the pool and the model's entry, and a variable of the model's server."""
        model = model_toml(MINE, engine="command", command=["serve", "{socket}"])
        env = f'[models.{MINE}.env]\nTOKEN = "{token}"' if token else ""
        self._config.write_text(f'{toml}\n{model}\n{entry}\n{env}\n[pools.local]\ndevices = ["cpu:0"]\n{pool}\n')

    def settings(self) -> Config:
        """Return the settings as they are now."""
        return load_config({}, {}, {"FREIGHT_CONFIG": str(self._config)})

    def run(self, *scenarios: Callable[[], Awaitable[None]]) -> None:
        """Run each scenario beside a service of its own, which must live until it is told to stop."""
        for scenario in scenarios:
            asyncio.run(self._play(scenario))

    async def _play(self, scenario: Callable[[], Awaitable[None]]) -> None:
        folder = ServiceFolder(self.data)
        folder.claim()
        self.hand, self.numbers = DeviceHand(), {}
        self.hand.left = dict(self.left_at_start)
        self.service = service = Service(folder, self.settings, self.hand.hear)
        self.context = service._context
        self.plane = self.context.plane
        self._catalog = folder.open_catalog(Sharing.READER)
        await service.start()
        serving = asyncio.create_task(service.run())
        playing = asyncio.ensure_future(scenario())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((serving, playing), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                await playing
        finally:
            playing.cancel()
            service.stop()
            while not serving.done():
                for end in self.hand.ends.values():
                    end.set()
                await asyncio.wait((serving,), timeout=0.01)
            await asyncio.gather(playing, return_exceptions=True)
            await service.close()
            self._catalog.close()
            folder.release()
        await serving

    @property
    def owner(self) -> Account:
        """Who asks by the Unix socket."""
        return self.service.accounts.owner

    def id_of(self, name: str) -> str:
        row = self._catalog.named(self.owner.user, name)
        assert row is not None
        return row.id

    def state(self, name: str) -> State:
        return self._catalog.get(self.id_of(name)).state

    def has(self, name: str) -> bool:
        """Return whether there is a job of that name."""
        return self._catalog.named(self.owner.user, name) is not None

    async def until_state(self, name: str, state: State) -> None:
        """Wait until a job is in a state, on disk."""
        await self.until(lambda: self.has(name) and self.state(name) is state)

    async def upload(self, account: Account | None = None) -> Upload:
        """Send an input of COUNT records, as the owner or as another."""

        async def chunks() -> AsyncIterator[bytes]:
            for number in range(COUNT):
                yield b'{"custom_id":"r%d","body":{"messages":[]}}\n' % number

        return await self.service.receive(account or self.owner, chunks(), None)

    async def submit(self, name: str, key: str | None = None, model: str = MINE, **options: Any) -> Submitted:
        """Make a job of COUNT records."""
        upload = await self.upload()
        request = JobRequest(upload=upload.id, name=name, model=model, **options)
        return await self.service.submit(self.owner, request, key)

    async def serving_of(self, user: str, name: str) -> str:
        """Return the first worker, which is ready and serves a user's job."""
        row = self._catalog.named(user, name)
        assert row is not None
        worker = await self.started(1)
        await self.say(worker)
        report = Report(PROTOCOL, worker, 2, Phase.READY, job=row.id, plane=self.plane.id)
        self.numbers[worker] = 2
        await self.hand.say(report)
        return worker

    async def complete(self, name: str, number: int = 1) -> None:
        """Let the `number`th worker do all of a job, and end."""
        worker = await self.serving(name, number)
        await self.finish(worker, name)
        self.hand.ends[worker].set()
        await self.until_state(name, State.COMPLETED)

    async def lines(self, name: str) -> list[Json]:
        """Return the lines of a job's results."""
        stream = await self.service.streams.results(self.owner, name, None, False)
        try:
            return parse_lines(b"".join(stream.pieces))
        finally:
            stream.close()

    def holds(self, secret: str) -> list[Path]:
        """Return the files of the data folder that hold a text."""
        needle = json.dumps(secret)[1:-1].encode()
        return [path for path in self.data.rglob("*") if path.is_file() and needle in path.read_bytes()]


def open_office(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    """Return an office whose services start workers by its hand."""
    office = Office(folder)
    monkeypatch.setattr(service_module, "LocalLauncher", lambda *_, **__: office.hand)
    return office
