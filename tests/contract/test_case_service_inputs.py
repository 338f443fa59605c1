"""The rows of the table through one service: all are submitted, then each is waited for and compared with `run`."""

from collections.abc import Generator

import pytest

from freight.client.sync import Client
from tests.contract.casetable import Runs, selected
from tests.contract.served import ServedCases, bare, comparable
from tests.contract.test_cases import TABLE
from tests.harness import engine
from tests.service import service_box


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[ServedCases]:
    """All cases that were asked for, in one service that the first command started, on one engine."""
    folder = tmp_path_factory.mktemp("served")
    with engine(folder / "engine") as running, service_box(folder / "box") as service:
        # A service whose own locale knows ASCII alone.
        first = service.batch("list", LC_ALL="C")
        assert (first.status, first.stderr.count("started a Freight service")) == (0, 1)
        cases = ServedCases(selected(request.session.items, TABLE), folder, running, service)
        yield cases
        cases.close()


@pytest.mark.parametrize("number", [pytest.param(case.number, id=f"case-{case.number}") for case in TABLE])
def test_case_through_the_service(number: int, served: ServedCases) -> None:
    served[number].check()


@pytest.mark.parametrize("number", [pytest.param(case.number, id=f"case-{case.number}") for case in TABLE])
def test_service_gives_what_run_gives(number: int, served: ServedCases, runs: Runs) -> None:
    ours, theirs = served[number], runs[number]
    if ours.case.refused:
        assert bare(ours, ours.done.stderr) == bare(theirs, theirs.done.stderr)
        return
    if ours.case.bad or ours.case.failed:
        assert bare(ours, ours.done.last_line()) == bare(theirs, theirs.done.last_line())
    written = [(ran.box.folder / "out.jsonl").read_bytes() for ran in (ours, theirs)]
    assert comparable(ours, written[0]) == comparable(theirs, written[1])
    if ours.strict is not None and theirs.strict is not None:
        assert bare(ours, ours.strict.stderr) == bare(theirs, theirs.strict.stderr)


@pytest.mark.parametrize("numbers", [pytest.param([c.number for c in TABLE if c.refused or c.bad], id="cases-refused")])
def test_refused_files_leave_nothing_in_the_service(numbers: list[int], served: ServedCases) -> None:
    refused = {each.name for each in served.all() if each.case.number in numbers and each.case.refused}
    data = served.service.data
    with Client(served.service.server) as client:
        jobs = list(client.jobs())
    assert refused.isdisjoint(job.name for job in jobs)
    assert not any(job.name.endswith(".strict.jsonl") for job in jobs)
    assert {path.name for path in (data / "batch").iterdir()} == {job.id for job in jobs}
    assert not list((data / "uploads").iterdir())
