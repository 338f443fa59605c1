"""Listening, announcing the address, and stopping on a signal."""

import asyncio
import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import uvloop

from bench.simengine.engine import Engine
from bench.simengine.options import Options
from bench.simengine.pages import summary_of
from bench.simengine.wire import Connection

BACKLOG: Final = 4096


def serve(options: Options) -> None:
    """Listen and serve until SIGTERM or SIGINT; open requests are then dropped."""
    if options.startup_s:
        time.sleep(options.startup_s / options.speed)
    loop = uvloop.new_event_loop()
    engine = Engine(options, loop)
    server, url = loop.run_until_complete(_listen(options, engine, loop))
    engine.stop_listening = server.close
    for number in (signal.SIGTERM, signal.SIGINT):
        if number is signal.SIGTERM and options.ignore_sigterm:
            loop.add_signal_handler(number, _go_on)
        else:
            loop.add_signal_handler(number, loop.stop)
    if options.port_file is not None:
        _write_whole(Path(options.port_file), url)
    print(f"listening on {url}", flush=True)
    gc.collect()
    gc.freeze()  # What startup made lives until the end; the collector need not look at it again.
    loop.run_forever()
    if options.summary is not None:
        _write_whole(Path(options.summary), json.dumps(summary_of(engine)))
    server.close()
    if options.socket is not None:
        Path(options.socket).unlink(missing_ok=True)


def _go_on() -> None:
    print("told to end; going on", flush=True)


async def _listen(
    options: Options, engine: Engine, loop: asyncio.AbstractEventLoop
) -> tuple[asyncio.AbstractServer, str]:
    """Return the listening server and its URL."""
    if options.socket is not None:
        path = options.socket
        server = await loop.create_unix_server(lambda: Connection(engine), path, backlog=BACKLOG)
        return server, f"unix:{path}"
    server = await loop.create_server(lambda: Connection(engine), options.host, options.port, backlog=BACKLOG)
    port = server.sockets[0].getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    return server, f"http://{host}:{port}"


def _write_whole(path: Path, text: str) -> None:
    """Make `path` hold `text`; a reader sees all of it or the file as it was."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
