"""A worker that no service hears any more ends itself."""

import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from freight.api.exchange import ExchangeServer
from freight.core.messages import PROTOCOL, Order, Orders, Setup
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Endpoint
from freight.worker.agent import Agent
from tests.faults.runs import command_line
from tests.harness import engine_command, wait_until


class DeafService:
    """What a worker hears of: a control plane that gives it a job, and never answers again."""

    def __init__(self, folder: Path, *engine: str) -> None:
        self._folder = folder
        self._socket = folder / "control.sock"
        entry = ModelEntry(engine=EngineName.COMMAND, command=engine_command(folder, *engine))
        model = ModelSpec("mine", entry, "mine", None, "mine", frozenset(), {})
        self._setup = Setup("job", model, "", [Endpoint.CHAT], 1, 0.0, 300.0, 300.0, 300.0)

    async def orphan(self) -> float:
        """Start a worker whose service goes away at once; return after how many seconds it has ended."""
        heard = asyncio.Event()

        async def exchange(_: bytes) -> bytes:
            heard.set()
            return msgspec.msgpack.encode(Orders(PROTOCOL, Order.RUN, setup=self._setup, plane="p"))

        server = ExchangeServer(self._socket, exchange)
        await server.start()
        agent = Agent(str(self._socket), "w", self._folder, self._folder / "log", (), orphan_s=1.0)
        running = asyncio.create_task(agent.run())
        await heard.wait()
        await asyncio.to_thread(wait_until, (self._folder / "record").exists, "the engine has started")
        await server.stop()
        began = time.monotonic()
        async with asyncio.timeout(30):
            await running
        return time.monotonic() - began


@pytest.mark.parametrize("loading", ["0", "60"], ids=["ready", "loading"])
def test_worker_that_hears_of_no_service_for_long_ends_itself_and_its_engine(loading: str) -> None:
    # The paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="frt") as folder:
        took = asyncio.run(DeafService(Path(folder), "--loading", loading).orphan())
        assert 0.9 < took < 20
        left = [process.pid for process in psutil.process_iter() if folder in " ".join(command_line(process.pid))]
        assert not left
