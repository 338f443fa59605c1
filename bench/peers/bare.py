"""A plain aiohttp script with a semaphore, as many write it: nothing is kept safe, nothing is tried again."""

import asyncio
import json
from typing import Any, TextIO

import aiohttp
import uvloop

from bench.peers.arguments import parse, records


async def ask(
    session: aiohttp.ClientSession, slots: asyncio.Semaphore, url: str, record: dict[str, Any], output: TextIO
) -> None:
    """Send one record and write what comes back."""
    line: dict[str, Any] = {"custom_id": record["custom_id"], "response": None, "error": None}
    try:
        async with session.post(url + record["url"], json=record["body"]) as reply:
            reply.raise_for_status()
            line["response"] = {"status_code": reply.status, "body": await reply.json()}
    except (aiohttp.ClientError, TimeoutError) as error:
        line["error"] = {"message": str(error)}
    finally:
        slots.release()
    output.write(json.dumps(line) + "\n")


async def run() -> None:
    """Run the file; by default with as many connections as aiohttp opens, at best with as many as the engine runs."""
    given = parse(__doc__ or "")
    limit = given.window if given.setting == "best" else 100
    slots = asyncio.Semaphore(limit)
    connector = aiohttp.TCPConnector(limit=limit)
    timeout = aiohttp.ClientTimeout(total=None)
    given.output.mkdir(parents=True, exist_ok=True)
    with (given.output / "out.jsonl").open("w") as output:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for record in records(given.input):
                await slots.acquire()
                record["body"]["model"] = given.model
                group.create_task(ask(session, slots, given.url, record, output))


if __name__ == "__main__":
    uvloop.run(run())
