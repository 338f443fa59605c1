"""Many people at once: `python -m bench.people [--jobs 2000 --clients 200]`, on the simulated engine.

A service on TCP has finished jobs of eight users, half of them batches of the OpenAI API and of the facility's; nine of
ten were cancelled, as that takes less time. Two jobs run, each on an endpoint that takes 32 records at a time and 0.3 s
for each. Then the clients come, each on a connection of its own with its user's token, and each asks once a second: in
turn for one job and for a list, of each of the three APIs. They come and go twice. Reports the 50th and 99th percentile
of the answers' times, and the records a second of the two jobs while nobody asks, while they do, and the ratio of both.
Answers are checked before they count.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from bench.engines import simulated
from bench.serving import serving
from freight import Client

USERS: Final = tuple(f"user-{number}" for number in range(8))
MODELS: Final = ("one", "two")
RECORDS: Final = 2
# What a model of eight billion weights does on one good card: about a hundred records a second.
LATENCY_S: Final = 0.3
IN_FLIGHT: Final = 32
PHASE_S: Final = 15.0
# One request of each client in this time.
EVERY_S: Final = 1.0
_SETTLE_S: Final = 3.0
_POLL_S: Final = 0.5
_ENDS: Final = ("completed", "COMPLETED", "cancelled", "CANCELLED")
_BATCHES: Final = "/resource_server/v1/batches"


def lines(text: str, count: int) -> bytes:
    """Return an input of so many records."""
    made: list[str] = []
    for place in range(count):
        body = {"messages": [{"role": "user", "content": f"{text} {place}"}], "max_tokens": 16}
        record = {"custom_id": f"row-{place}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(json.dumps(record))
    return "\n".join(made).encode() + b"\n"


@dataclass
class Person:
    """A user, what shows who asks, and the paths of the jobs that are theirs."""

    headers: dict[str, str]
    folder: Path
    polled: list[str] = field(default_factory=list[str])


class Town:
    """The service, seen from afar."""

    def __init__(self, url: str, people: list[Person], session: aiohttp.ClientSession) -> None:
        self.url = url
        self.people = people
        self._session = session

    async def ask(self, person: Person, method: str, path: str, **more: Any) -> Any:
        """Send a request of somebody's, and return the JSON of a good answer."""
        async with self._session.request(method, self.url + path, headers=person.headers, **more) as answer:
            text = await answer.text()
            assert answer.status in (200, 201), f"{method} {path}: {answer.status} {text}"
            return json.loads(text)

    async def job(self, person: Person, content: bytes, model: str, **options: int) -> str:
        """Make a job; return its path."""
        upload = await self.ask(person, "POST", "/api/uploads", data=content)
        made = await self.ask(person, "POST", "/api/jobs", json={"upload": upload["id"], "model": model, **options})
        return f"/api/jobs/{made['job']['id']}"

    async def openai_batch(self, person: Person, content: bytes, model: str) -> str:
        """Make a batch of the OpenAI API; return its path."""
        form = aiohttp.FormData({"purpose": "batch"})
        named = content.replace(b'"messages"', b'"model": "%s", "messages"' % model.encode())
        form.add_field("file", named, filename="in.jsonl")
        file = await self.ask(person, "POST", "/v1/files", data=form)
        request = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return f"/v1/batches/{(await self.ask(person, 'POST', '/v1/batches', json=request))['id']}"

    async def facility_batch(self, person: Person, content: bytes, model: str) -> str:
        """Make a batch of the facility's API; return its path."""
        source = person.folder / "in.jsonl"
        if not source.exists():
            source.write_bytes(content)
        request = {"model": model, "input_file": str(source), "output_folder_path": str(person.folder)}
        made = await self.ask(person, "POST", "/resource_server/local/endpoint/v1/batches", json=request)
        return f"{_BATCHES}/{made['batch_id']}"

    async def cancel(self, person: Person, path: str) -> None:
        """Cancel a job, unless it has ended meanwhile."""
        async with self._session.post(f"{self.url}{path}/cancel", headers=person.headers) as answer:
            assert answer.status in (200, 409), f"{path}/cancel: {answer.status} {await answer.text()}"

    async def ended(self, person: Person, path: str) -> None:
        """Wait until a job has ended."""
        while (status := self.status_of(await self.ask(person, "GET", path))) not in _ENDS:
            assert status not in ("failed", "FAILED"), f"{path} failed"
            await asyncio.sleep(_POLL_S)

    def status_of(self, told: Any) -> str:
        """Return what an answer of any of the APIs says about one job."""
        return told if isinstance(told, str) else told.get("state") or told["status"]


async def prepare(town: Town, jobs: int, at_once: int = 32) -> None:
    """Have so many jobs made and finished, of all users and by all three APIs."""
    room = asyncio.Semaphore(at_once)
    kinds = itertools.cycle([town.job, town.openai_batch, town.job, town.facility_batch])

    async def one(number: int, make: Callable[[Person, bytes, str], Coroutine[Any, Any, str]]) -> None:
        async with room:
            person = town.people[number // 4 % len(USERS)]
            path = await make(person, lines(f"job {number}", RECORDS), f"quick-{number % 4}")
            if number // 4 % 10:
                await town.cancel(person, path)
            await town.ended(person, path)
            person.polled.append(path)

    await asyncio.gather(*(one(number, next(kinds)) for number in range(jobs)))


class Clients:
    """So many clients, each of which asks once a second.

    `took_s` has how long each kind of question took, `late_s` how late they were asked: by that much the machine, and
    not the service, may have been late with the answers, too.
    """

    def __init__(self, town: Town, count: int) -> None:
        self._town = town
        self._count = count
        self.took_s: dict[str, list[float]] = {"poll": [], "list": []}
        self.late_s: list[float] = []

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        """Have them ask for as long as the block takes, once all are connected."""
        connected = asyncio.Barrier(self._count + 1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._client(number, connected)) for number in range(self._count)]
            await connected.wait()
            yield
            for task in tasks:
                task.cancel()

    async def _client(self, number: int, connected: asyncio.Barrier) -> None:
        person = self._town.people[number % len(USERS)]
        loop = asyncio.get_running_loop()
        chance = random.Random(number)
        # One connection, which is kept.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), trust_env=False) as session:
            own = Town(self._town.url, self._town.people, session)
            await own.ask(person, "GET", "/api/version")
            await connected.wait()
            at = loop.time() + chance.random() * EVERY_S
            for kind, path in _questions(person, chance):
                await asyncio.sleep(at - loop.time())
                self.late_s.append(loop.time() - at)
                asked = time.perf_counter()
                told = await own.ask(person, "GET", path)
                self.took_s[kind].append(time.perf_counter() - asked)
                _check(own, kind, told)
                # One that was late does not hurry.
                at = max(at + EVERY_S, loop.time())


def _questions(person: Person, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Yield what a client asks, without an end."""
    lists = itertools.cycle(["/api/jobs", "/v1/batches", _BATCHES])
    # They do not all begin with the same.
    for _ in range(chance.randrange(3)):
        next(lists)
    if chance.random() < 0.5:
        yield "list", next(lists)
    while True:
        yield "poll", chance.choice(person.polled)
        yield "list", next(lists)


def _check(town: Town, kind: str, told: Any) -> None:
    if kind == "poll":
        assert town.status_of(told) in _ENDS, told
    else:
        rows = told if isinstance(told, list) else told.get("jobs") or told["data"]
        assert len(rows) >= 3, told


async def rate(town: Town, running: list[tuple[Person, str]], pid: int) -> tuple[float, float]:
    """Return the records a second that the running jobs do for a while, and the share of a core the service takes."""

    async def done() -> tuple[float, int]:
        told = [await town.ask(person, "GET", path) for person, path in running]
        assert all(job["state"] == "RUNNING" and not job["failed"] for job in told), told
        return time.perf_counter(), sum(job["done"] for job in told)

    began, before = await done()
    used = cpu_s(pid)
    await asyncio.sleep(PHASE_S)
    used = cpu_s(pid) - used
    ended, after = await done()
    return (after - before) / (ended - began), used / (ended - began)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure(url: str, people: list[Person], pid: int, jobs: int, count: int) -> dict[str, object]:
    """Prepare, run the two jobs, and have the clients come and go."""
    async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=None)) as session:
        town = Town(url, people, session)
        began = time.monotonic()
        await prepare(town, jobs)
        prepared_s = time.monotonic() - began
        running: list[tuple[Person, str]] = []
        for person, model in zip(people[:2], MODELS, strict=True):
            path = await town.job(person, lines(f"running {model}", 60_000), model, concurrency=IN_FLIGHT)
            running.append((person, path))
        for person, path in running:
            while not (await town.ask(person, "GET", path))["done"]:  # noqa: ASYNC110, nothing tells us.
                await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_SETTLE_S)
        clients = Clients(town, count)
        alone, among = list[tuple[float, float]](), list[tuple[float, float]]()
        for _ in range(2):
            alone.append(await rate(town, running, pid))
            async with clients.asking():
                await asyncio.sleep(_SETTLE_S)
                among.append(await rate(town, running, pid))
        for person, path in running:
            await town.ask(person, "POST", f"{path}/cancel")
        return {
            "jobs": jobs,
            "clients": count,
            "requests_per_s": round(count / EVERY_S),
            "prepared_s": round(prepared_s),
            **{kind: percentiles(took) for kind, took in clients.took_s.items()},
            "late": percentiles(clients.late_s),
            "alone": told_of(alone),
            "among": told_of(among),
            "ratio": round(sum(records for records, _ in among) / sum(records for records, _ in alone), 3),
        }


def told_of(measured: list[tuple[float, float]]) -> dict[str, float]:
    """Return the means of records a second, and of the service's share of a core."""
    records, cores = zip(*measured, strict=True)
    return {"records_per_s": round(statistics.mean(records), 1), "service_cores": round(statistics.mean(cores), 2)}


def percentiles(took_s: list[float]) -> dict[str, float]:
    """Return how many there were, and the 50th and 99th percentile and the longest, in milliseconds."""
    cuts = statistics.quantiles(took_s, n=100, method="inclusive")
    named = {"p50_ms": cuts[49], "p99_ms": cuts[98], "most_ms": max(took_s)}
    return {"count": len(took_s)} | {name: round(value * 1000, 1) for name, value in named.items()}


def configure(folder: Path, quick: str, slow: list[str]) -> None:
    """Write the settings: models, limits that do not matter here, and a folder for each user."""
    models = {f"quick-{number}": quick for number in range(4)} | dict(zip(MODELS, slow, strict=True))
    tables = [
        f'[models.{name}]\nengine = "endpoint"\nsource = "{source}"\nbatch = true' for name, source in models.items()
    ]
    paths = [f'{user} = {{ read = ["{folder}/{user}"], write = ["{folder}/{user}"] }}' for user in USERS]
    text = [
        '[server]\nlisten = "127.0.0.1:0"', "[limits]\nactive_jobs = 10000", '[pools.local]\nkeep_warm = "1m"',
        "\n".join(["[paths]", *paths]), *tables,
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(text) + "\n")


def people_of(client: Client, folder: Path) -> list[Person]:
    """Return the users, each with a token and a folder."""
    made: list[Person] = []
    for user in USERS:
        (folder / user).mkdir()
        token = client.create_token(user).token
        made.append(Person({"Authorization": f"Bearer {token}"}, folder / user))
    return made


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        quick = stack.enter_context(simulated(folder / "quick", ["--digest"])).url
        options = ["--digest", "--latency", str(LATENCY_S)]
        slow = [stack.enter_context(simulated(folder / model, options)).url for model in MODELS]
        configure(folder, quick, slow)
        own = {"FREIGHT_DATA": str(folder / "data"), "FREIGHT_CONFIG": str(folder / "config.toml")}
        client = stack.enter_context(serving(folder, {**os.environ, **own}))
        [url] = re.findall(r"serving on (http\S+)", (folder / "log").read_text())
        people = people_of(client, folder)
        pid = client.version().pid
        assert pid is not None
        try:
            print(json.dumps(asyncio.run(measure(url, people, pid, arguments.jobs, arguments.clients))))
        finally:
            said = (folder / "log").read_text()
            assert "Traceback" not in said, said[-20_000:]


if __name__ == "__main__":
    sys.exit(main())
