"""The server of the workers' one call."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvicorn

from freight.api.exchange import ExchangeServer

REQUEST = b"POST /exchange HTTP/1.1\r\nhost: control\r\ncontent-length: 2\r\n\r\nhi"
PATIENCE_S = 20


async def echo(report: bytes) -> bytes:
    return report


async def served(scenario: Callable[[ExchangeServer, Path], Awaitable[None]]) -> None:
    with tempfile.TemporaryDirectory(prefix="fr") as folder:
        server = ExchangeServer(Path(folder) / "control.sock", echo)
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            await scenario(server, Path(folder) / "control.sock")


async def asked(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection on which a report was answered."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(REQUEST)
    await reader.readuntil(b"\r\n\r\nhi")
    return reader, writer


def test_its_end_waits_for_nothing_when_nobody_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("this takes a tenth of a second")

    monkeypatch.setattr(uvicorn.Server, "shutdown", never)

    async def scenario(server: ExchangeServer, path: Path) -> None:
        await server.stop()
        with pytest.raises(FileNotFoundError):
            await asyncio.open_unix_connection(path)

    asyncio.run(served(scenario))


def test_its_end_closes_the_connections_of_workers_that_live_on() -> None:
    async def scenario(server: ExchangeServer, path: Path) -> None:
        reader, writer = await asked(path)
        await server.stop()
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(FileNotFoundError):
            await asyncio.open_unix_connection(path)

    asyncio.run(served(scenario))


def test_it_can_be_ended_before_it_began(tmp_path: Path) -> None:
    asyncio.run(ExchangeServer(tmp_path / "control.sock", echo).stop())
