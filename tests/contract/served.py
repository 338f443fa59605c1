"""Cases that go through the service: the table's own rows, submitted, waited for, and fetched."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from freight.client.sync import Client
from freight.core.job import State
from freight.core.view import JobStatus
from freight.errors import FreightError, NoSuchJob
from tests.contract.casetable import AT_ONCE, Case, Ran, input_of
from tests.harness import CASES, PATIENCE_S, Box, Engine, Finished, Json, parse_lines
from tests.service import ServiceBox

JOB_FILES: Final = {"input.jsonl", "index.npz", "results.db", "workers", "1.log", "2.log"}
_JOB_ID: Final = re.compile(rb'^\{"id":"[^"]*?-(\d+)"', re.MULTILINE)
_REQUEST_ID: Final = re.compile(rb'"request_id":"[^"]*"')


class Desk(Box):
    """A folder of a case's own, from which commands go to a service that all cases share."""

    def __init__(self, folder: Path, service: ServiceBox) -> None:
        self.folder = folder
        self.config = service.config
        self._service = service

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a command: that of the service's own box."""
        return self._service.environment(**extra)


class Served(Ran):
    """A case that goes through the service; it is submitted when this is made, and waited for by `finish`."""

    def __init__(self, case: Case, folder: Path, engine: Engine, service: ServiceBox) -> None:
        folder.mkdir()
        self.case = case
        self.engine = engine
        self.service = service
        self.box = Desk(folder, service)
        self.input = input_of(case.file, folder)
        self.name = f"case-{case.number}"
        self.strict = None
        # The command line where it matters: a refusal as users see it, and an environment of their own.
        self.done = self._submit(self.name) if case.refused or case.env else self._send()

    def _submit(self, name: str, *options: str, file: Path | None = None) -> Finished:
        arguments = ("batch", "submit", str(file or self.input), "--model", self.engine.url, "--name", name)
        return self.box.freight(*arguments, *options, **self.case.env)

    def _send(self) -> Finished:
        with Client(self.service.server) as client:
            made = client.submit(self.input, model=self.engine.url, name=self.name)
        return Finished(0, f"{made.job.name}\n", "".join(f"note: {text}\n" for text in made.notes))

    def run(self, output: str, *options: str, file: Path | None = None) -> Finished:
        """Take the input, or another file, through the service once more."""
        name = f"{self.name}.{output}"
        done = self._submit(name, "--wait", *options, file=file)
        if done.status == 0:
            self._save(name, output)
        return done

    def _wait(self) -> Finished:
        with Client(self.service.server) as client:
            job = client.wait(self.name)
        # The command line where it has something to say.
        if job.failed or job.cut or self.case.env:
            return self.box.freight("batch", "wait", self.name, **self.case.env)
        return Finished(0 if job.state == State.COMPLETED else 1, "", job.reason)

    def _save(self, name: str, output: str) -> None:
        with Client(self.service.server) as client:
            client.save_results(name, self.box.folder / output)

    def finish(self) -> "Served":
        """Wait for the job, fetch its results, and submit it with --strict where it has bad lines."""
        if not self.case.refused:
            submitted = self.done
            assert (submitted.status, submitted.stdout) == (0, f"{self.name}\n"), submitted.stderr
            waited = self._wait()
            self.done = Finished(waited.status, waited.stdout, submitted.stderr + waited.stderr)
            self._save(self.name, "out.jsonl")
        if self.case.bad:
            self.strict = self.run("strict.jsonl", "--strict", *self.case.options)
        return self

    def check(self) -> None:
        """Assert what the table says of a run, and what only the service shows."""
        super().check()
        with Client(self.service.server) as client:
            if self.strict is not None:
                self._check_no_job(client, f"{self.name}.strict.jsonl")
            if self.case.refused:
                self._check_refused_alike(client)
            else:
                self._check_counts(client)

    def _check_no_job(self, client: Client, name: str) -> None:
        with pytest.raises(NoSuchJob):
            client.job(name)

    def _check_refused_alike(self, client: Client) -> None:
        """The service refuses what the command refuses, in the same words, and makes no job either."""
        with pytest.raises(FreightError) as caught:
            client.submit(self.input, model=self.engine.url, name=self.name)
        assert f"error: {caught.value.message}\nhint: {caught.value.hint}\n" == self.done.stderr
        self._check_no_job(client, self.name)

    def _check_counts(self, client: Client) -> None:
        job = client.job(self.name)
        codes = Counter([*self.case.bad.values(), *self.case.failed.values()])
        assert (job.state, job.reason) == (State.COMPLETED, "")
        assert (job.records, job.done, job.failed) == (self.case.records, self.case.records, codes.total())
        counted: Counter[str] = Counter()
        for failure in job.failures:
            counted[failure.code] += failure.count
        assert counted == codes
        for only, count in (("ok", job.done - job.failed), ("failed", job.failed)):
            with client.results(self.name, only) as lines:
                assert len(list(lines)) == count
        self._check_listed(client, job)
        # Nothing that a record says names a file of the service.
        names = {path.name for path in (self.service.data / "batch" / job.id).rglob("*")}
        assert {name.removesuffix("-wal").removesuffix("-shm") for name in names} <= JOB_FILES

    def _check_listed(self, client: Client, job: JobStatus) -> None:
        [listed] = [each for each in client.jobs() if each.name == self.name]
        shown = asdict(job)
        assert asdict(listed) == {key: shown[key] for key in asdict(listed)}


def comparable(ran: Ran, text: bytes) -> bytes:
    """Return results without what differs between two runs: ids of job and requests, and the engine's address."""
    without = _REQUEST_ID.sub(b'"request_id":"R"', _JOB_ID.sub(rb'{"id":"J-\1"', text))
    return without.replace(ran.engine.url.encode(), b"URL")


def bare(ran: Ran, text: str) -> str:
    """Return a message without what differs between two runs: the case's folder and the engine's address."""
    return text.replace(str(ran.box.folder), "FOLDER").replace(ran.engine.url, "URL")


class ServedCases:
    """All cases in one service: first each is submitted, then each is waited for, a few at a time."""

    def __init__(self, cases: Iterable[Case], folder: Path, engine: Engine, service: ServiceBox) -> None:
        self.service = service
        self._pool = ThreadPoolExecutor(AT_ONCE)
        served = list(self._pool.map(lambda case: Served(case, folder / str(case.number), engine, service), cases))
        self._finished: dict[int, Future[Served]] = {
            each.case.number: self._pool.submit(each.finish) for each in served
        }

    def __getitem__(self, number: int) -> Served:
        return self._finished[number].result()

    def all(self) -> list[Served]:
        """Return all cases, each finished."""
        return [future.result() for future in self._finished.values()]

    def close(self) -> None:
        """Wait for those that go on; what has not begun does not."""
        self._pool.shutdown(cancel_futures=True)


def held24(box: Box) -> list[str]:
    """Write in.jsonl, 6 records answered at once and 18 that an `Endpoint` holds; return their custom_ids."""
    text = (CASES / "inputs" / "87_cancel24.jsonl").read_text().replace("STUB:sleep=5 ", "hold ")
    (box.folder / "in.jsonl").write_text(text)
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def lines_of(service: ServiceBox, name: str, partial: bool = False) -> list[Json]:
    """Return a job's result lines, of which each must be strict JSON."""
    return parse_lines(b"".join(line + b"\n" for line in service.lines(name, partial=partial)))


def ask(service: ServiceBox, method: str, path: str, **more: Any) -> httpx.Response:
    """Ask the service's API without Freight's own client."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(service.socket)), base_url="http://freight") as client:
        return client.request(method, path, timeout=PATIENCE_S, **more)
