"""Many jobs at once, from many threads: each is made once, each record answered once, and memory stays flat."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from freight import Client
from freight.errors import Conflict
from tests.faults.runs import answer, received, records
from tests.faults.services import Served
from tests.faults.together import together
from tests.harness import chat, code, content, engine, parse_lines, wait_until

JOBS: Final = 300
FIRST: Final = 100
RECORDS: Final = 10
THREADS: Final = 16
MOST_GROWTH: Final = 15_000_000


def memory(pid: int) -> int:
    """Return the bytes that a process has resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def input_of(job: int) -> bytes:
    """Return the input of one of many jobs; no two records of all of them are equal."""
    lines = [chat(f"r{job * RECORDS + place}", f"text {job * RECORDS + place}") for place in range(RECORDS)]
    return b"".join(encoded(line) for line in lines)


def encoded(line: object) -> bytes:
    """Return a line of JSON."""
    return json.dumps(line).encode() + b"\n"


@together
def test_three_hundred_jobs_at_once_are_each_made_once_and_answered_once(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest") as fast:
        service.serve()

        def submit(job: int) -> tuple[str, str]:
            with Client(f"unix://{service.socket}") as client:
                made = client.submit([input_of(job)], model=fast.url, idempotency_key=f"key-{job}").job
                return made.id, made.name

        def completed() -> int:
            return sum(job.state == "COMPLETED" for job in service.client.jobs())

        with ThreadPoolExecutor(THREADS) as together:
            made = [*together.map(submit, range(FIRST))]
            wait_until(lambda: completed() == FIRST, "the first jobs are complete")
            early = memory(service.server.pid)
            made += together.map(submit, range(FIRST, JOBS))
            wait_until(lambda: completed() == JOBS, "all jobs are complete")
            late = memory(service.server.pid)
            print(f"memory after {FIRST} jobs {early / 1e6:.1f} MB, after {JOBS} {late / 1e6:.1f} MB")
            again = [*together.map(submit, range(JOBS))]
        assert again == made, "the same key is the same job"
        assert len({id_ for id_, _ in made}) == len({name for _, name in made}) == JOBS
        assert {job.id for job in service.client.jobs()} == {id_ for id_, _ in made}
        assert Counter(received(fast.folder / "record")) == Counter(range(JOBS * RECORDS))
        for job, (id_, _) in enumerate(made):
            check_results(service, id_, job)
        assert service.uploads() == []
        assert late - early < MOST_GROWTH
        assert service.freight("stop").status == 0
    service.nothing_left()


def check_results(service: Served, id_: str, job: int) -> None:
    """Assert that a job's results are the right answers to its own records, in order."""
    with service.client.results(id_) as stream:
        lines = parse_lines(b"".join(stream.chunks()))
    indices = range(job * RECORDS, (job + 1) * RECORDS)
    assert [line["custom_id"] for line in lines] == [f"r{index}" for index in indices]
    assert [(code(line), content(line)) for line in lines] == [(None, answer(index)) for index in indices]


@together
def test_one_name_asked_for_by_many_at_once_makes_one_job(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", record=False) as fast:
        service.write("in.jsonl", records(RECORDS))
        service.serve()

        def submit(_: int) -> bool:
            with Client(f"unix://{service.socket}") as client:
                try:
                    client.submit(service.folder / "in.jsonl", name="wanted", model=fast.url)
                except Conflict:
                    return False
                return True

        with ThreadPoolExecutor(THREADS) as together:
            assert [*together.map(submit, range(THREADS))].count(True) == 1
        service.completes("wanted", RECORDS)
        assert len(list(service.client.jobs())) == 1
        assert len(list((service.data / "batch").iterdir())) == 1
        assert service.uploads() == []


@together
def test_one_key_used_by_many_at_once_makes_one_job(service: Served, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", "--digest", record=False) as fast:
        service.write("in.jsonl", records(RECORDS))
        service.serve()

        def submit(_: int) -> tuple[str, bool]:
            with Client(f"unix://{service.socket}") as client:
                made = client.submit(service.folder / "in.jsonl", model=fast.url, idempotency_key="k")
                return made.job.id, made.is_new

        with ThreadPoolExecutor(THREADS) as together:
            made = [*together.map(submit, range(THREADS))]
        assert len({job for job, _ in made}) == 1
        assert sum(is_new for _, is_new in made) == 1
        assert len(list((service.data / "batch").iterdir())) == 1
        assert service.uploads() == []
