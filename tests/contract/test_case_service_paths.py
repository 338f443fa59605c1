"""Cases of paths through the service: where the input comes from, where results go, what stands there already."""

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

from freight.client.sync import Client
from freight.core.job import State
from freight.errors import UserError
from tests.contract.scenario import side_by_side
from tests.contract.served import held24, lines_of
from tests.contract.test_case_paths import unreadable_inputs
from tests.contract.test_case_stopping import cancel24, recorded
from tests.harness import CASES, Box, Finished, code, engine_command, finish, model_toml, wait_until
from tests.service import Endpoint, ServiceBox, endpoint, service_box

GOOD: Final = CASES / "inputs" / "00_good3.jsonl"


def refused(done: Finished, *texts: str) -> None:
    """Assert that a command was refused as users see it, for a reason that has these words."""
    assert (done.status, done.stdout) == (2, ""), done.stderr
    assert "error: " in done.stderr
    assert done.last_line().startswith("hint: ")
    for text in texts:
        assert text in done.stderr


def good(box: ServiceBox, name: str) -> bool:
    """Return whether a job has ended with the three good answers."""
    with Client(box.server) as client:
        client.wait(name)
    lines = lines_of(box, name)
    return [line["custom_id"] for line in lines] == ["good-1", "good-2", "good-3"] and not any(map(code, lines))


def written(box: Box, path: str) -> bool:
    """Return whether a file holds the three good answers."""
    lines = box.results(path)
    return [line["custom_id"] for line in lines] == ["good-1", "good-2", "good-3"] and not any(map(code, lines))


@pytest.mark.parametrize("number", [pytest.param(70, id="case-70")])
def test_input_that_cannot_be_read_is_refused_before_any_service_starts(number: int, tmp_path: Path) -> None:
    box = ServiceBox(tmp_path / "box")
    box.configure("")
    for name in unreadable_inputs(box):
        refused(box.batch("submit", name, "--model", "http://127.0.0.1:9"), name)
    assert not box.processes()
    assert not box.data.exists()


@pytest.mark.parametrize("number", [pytest.param(71, id="case-71")])
def test_output_that_cannot_be_written_is_found_at_submit_and_at_results(
    number: int, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    outputs = ("missing/out.jsonl", "folder", "file/out.jsonl", "/proc/out.jsonl")
    for output in ("missing", "file"):
        done = service.batch("submit", str(GOOD), "--model", end.url, "--output", output, cwd=tmp_path)
        refused(done, str(tmp_path / output))
    assert service.names() == []
    assert service.batch("submit", str(GOOD), "--model", end.url, "--name", "a").status == 0
    assert good(service, "a")
    for output in outputs:
        refused(service.batch("results", "a", "-o", output, cwd=tmp_path), output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert good(service, "a")


@pytest.mark.parametrize("number", [pytest.param(71, id="case-71")])
def test_output_folder_that_takes_no_file_is_found_at_submit(number: int, service: ServiceBox, end: Endpoint) -> None:
    # Its permissions say that it may be written to.
    done = service.batch("submit", str(GOOD), "--model", end.url, "--output", "/proc")
    refused(done, "/proc")
    assert service.names() == []


@pytest.mark.parametrize("number", [pytest.param(71, id="case-71")])
def test_output_folder_that_goes_away_costs_no_answer_and_no_count(
    number: int, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    held24(service)
    folder = tmp_path / "out"
    folder.mkdir()
    submit = ("submit", "in.jsonl", "--model", end.url, "--name", "a", "--output", str(folder))
    assert service.batch(*submit).status == 0
    service.until("a", lambda job: job.done == 6, "six are done")
    folder.rmdir()
    end.let_go.set()
    job = service.ended("a")
    assert (job.state, str(folder) in job.reason) == (State.FAILED, True)
    assert [code(line) for line in lines_of(service, "a")] == [None] * 24
    waited = service.batch("wait", "a")
    folder.mkdir()
    assert service.batch("resume", "a").status == 0
    assert service.batch("wait", "a").status == 0
    assert len(service.results(str(folder / "a-results.jsonl"))) == 24
    assert set(end.seen.values()) == {1}
    # What was kept was told as such.
    assert (job.records, job.done, job.failed) == (24, 24, 0)
    assert waited.status == 1
    assert "24 of 24 records were not reached" not in waited.stderr


@pytest.mark.parametrize("number", [pytest.param(73, id="case-73")])
def test_output_of_others_is_kept_unless_forced(
    number: int, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    old = tmp_path / "a-results.jsonl"
    old.write_text("precious\n" * 1000)
    submit = ("submit", str(GOOD), "--model", end.url, "--name", "a")
    # The service's own writing has no --force: it is refused at submit.
    refused(service.batch(*submit, "--output", str(tmp_path)), str(old))
    assert service.batch(*submit).status == 0
    assert good(service, "a")
    for output in ((), ("-o", "a-results.jsonl")):
        refused(service.batch("results", "a", *output, cwd=tmp_path), "a-results.jsonl", "--force")
    with Client(service.server) as client, pytest.raises(UserError, match="exists already"):
        client.save_results("a", old)
    assert old.read_text() == "precious\n" * 1000
    assert service.batch("results", "a", "--force", cwd=tmp_path).status == 0
    assert old.read_bytes() == b"".join(line + b"\n" for line in service.lines("a"))


@pytest.mark.parametrize("number", [pytest.param(74, id="case-74")])
@side_by_side
def test_input_from_a_pipe_is_kept_for_going_on(number: int, folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        submit = ("submit", "--model", end.url, "--name")
        assert box.batch(*submit, "stdin", "-", stdin=GOOD.read_text()).status == 0
        assert good(box, "stdin")
        os.mkfifo(box.folder / "fifo")
        command = box.start("batch", *submit, "fifo", "fifo")
        (box.folder / "fifo").write_bytes(GOOD.read_bytes())
        assert finish(command).status == 0
        assert good(box, "fifo")
        # Its bytes are the service's: it goes on after a stop in the middle.
        text = GOOD.read_text().replace("Reply with the number 3.", "hold")
        assert box.batch(*submit, "later", "-", stdin=text).status == 0
        box.until("later", lambda job: job.done == 2 and job.in_flight, "two are done, and one on its way")
        box.stop()
        end.let_go.set()
        assert box.batch("wait", "later").status == 0
        assert good(box, "later")
        assert end.seen["Reply with the number 1."] == 3
        # An empty pipe is an empty file, and no job.
        refused(box.batch(*submit, "empty", "-", stdin=""), "standard input", "empty")
        assert sorted(box.names()) == ["fifo", "later", "stdin"]


@pytest.mark.parametrize("number", [pytest.param(75, id="case-75")])
@side_by_side
def test_input_that_changes_after_submit_does_not_matter(number: int, folder: Path) -> None:
    entry = model_toml("local-model", engine="command", command=engine_command(folder, "--latency", "0.2"))
    with service_box(folder / "own", entry) as box:
        expected = cancel24(box, 1)
        file = box.folder / "in.jsonl"
        arguments = ("--model", "local-model", "--name", "job", "--concurrency", "4")
        assert box.batch("submit", "in.jsonl", *arguments).status == 0
        file.write_bytes(GOOD.read_bytes())
        wait_until(lambda: recorded(folder) >= 8, "it is under way")
        box.stop()
        file.unlink()
        waited = box.batch("wait", "job")
        assert waited.status == 0
        assert "started a Freight service" in waited.stderr
        lines = lines_of(box, "job")
        assert [line["custom_id"] for line in lines] == expected
        assert not any(map(code, lines))


@pytest.mark.parametrize("number", [pytest.param(76, id="case-76")])
def test_links_and_relative_paths_mean_what_they_mean_to_the_caller(
    number: int, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    inner = tmp_path / "inner"
    (inner / "out").mkdir(parents=True)
    link = inner / "link.jsonl"
    held = tmp_path / "held.jsonl"
    held.write_text(GOOD.read_text().replace("Reply with the number 1.", "hold"))
    link.symlink_to(held)
    submit = ("submit", "link.jsonl", "--model", end.url, "--name", "a", "--output", "out", "--concurrency", "1")
    assert service.batch(*submit, cwd=inner).status == 0
    link.unlink()
    link.symlink_to(CASES / "inputs" / "95_all_fail.jsonl")
    end.let_go.set()
    assert good(service, "a")
    assert written(service, str(inner / "out" / "a-results.jsonl"))
    assert service.batch("results", "a", "-o", "out.jsonl", cwd=inner).status == 0
    assert service.batch("results", "a", cwd=inner).status == 0
    for name in ("out.jsonl", "a-results.jsonl"):
        assert written(service, str(inner / name))
        assert not (service.folder / name).exists()


@pytest.mark.parametrize("number", [pytest.param(80, id="case-80")])
@pytest.mark.parametrize("name", ["requests.json", "requests.txt", "requests"])
def test_any_name_of_the_input_will_do(number: int, name: str, service: ServiceBox, end: Endpoint) -> None:
    path = service.folder / name
    shutil.copy(GOOD, path)
    with Client(service.server) as client:
        assert client.submit(path, model=end.url, name="a").job.file == str(path)
        assert good(service, "a")
        # Bytes have no name at all.
        assert client.submit(GOOD.read_bytes(), model=end.url, name="b").job.file == ""
    assert good(service, "b")
    path.unlink()


@pytest.mark.parametrize("number", [pytest.param(80, id="case-80")])
def test_name_of_the_input_that_looks_like_an_option(number: int, service: ServiceBox, end: Endpoint) -> None:
    shutil.copy(GOOD, service.folder / "-rf")
    assert service.batch("submit", "--model", end.url, "--name", "a", "--", "-rf").status == 0
    assert good(service, "a")
    (service.folder / "-rf").unlink()
