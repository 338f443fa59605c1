"""`--order` and `--dedupe`: what the engine gets, and when; the results are in the file's order all the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from freight.control.intake import Index
from tests.harness import Box, Engine, Json, chat
from tests.service import ServiceBox

DOCUMENTS = 3
QUESTIONS = 4


def questions() -> list[Json]:
    """Return questions on documents, a document's never beside each other."""
    return [chat(f"r{n}", f"{'ABC'[n % DOCUMENTS] * 400} Question {n}?") for n in range(DOCUMENTS * QUESTIONS)]


def asked(engine: Engine) -> list[int]:
    """Return the numbers of the questions, as the engine got them."""
    contents = [json.loads(body)["messages"][-1]["content"] for _, body in engine.received()]
    return [int(content.split("Question ")[1].rstrip("?")) for content in contents]


def check_results(path: Path, ids: list[str]) -> None:
    """Check that every record is answered, in the file's order."""
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == ids
    assert all(line["error"] is None for line in lines)


BY_DOCUMENT = [n for document in range(DOCUMENTS) for n in range(document, DOCUMENTS * QUESTIONS, DOCUMENTS)]
AS_READ = list(range(DOCUMENTS * QUESTIONS))


@pytest.mark.parametrize(("options", "order"), [((), BY_DOCUMENT), (("--order", "input"), AS_READ)])
def test_run_asks_all_questions_on_a_document_before_the_next(
    box: Box, sim: Engine, options: tuple[str, ...], order: list[int]
) -> None:
    box.write("in.jsonl", questions())
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--concurrency", "1", *options)

    assert done.status == 0, done.stderr
    assert asked(sim) == order
    check_results(box.folder / "out.jsonl", [f"r{n}" for n in AS_READ])
    # Nothing as large as the input is left of what it took.
    assert not list((box.folder / "out.jsonl.freight").rglob("*.npz"))


@pytest.mark.parametrize(("options", "order"), [((), BY_DOCUMENT), (("--order", "input"), AS_READ)])
def test_the_service_asks_all_questions_on_a_document_before_the_next(
    service: ServiceBox, sim: Engine, options: tuple[str, ...], order: list[int]
) -> None:
    service.write("in.jsonl", questions())
    arguments = ("in.jsonl", "--model", sim.url, "--name", "job", "--concurrency", "1", "--wait", *options)
    done = service.batch("submit", *arguments)

    assert done.status == 0, done.stderr
    assert asked(sim) == order
    assert service.batch("results", "job", "-o", "in-order.jsonl", "--force").status == 0
    check_results(service.folder / "in-order.jsonl", [f"r{n}" for n in AS_READ])


def test_run_sends_equal_requests_once_with_dedupe(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat(f"r{n}", f"prompt {n % 2}") for n in range(6)])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--dedupe")

    assert done.status == 0, done.stderr
    assert "6 of 6 records answered" in done.stderr
    assert len(sim.received()) == 2
    check_results(box.folder / "out.jsonl", [f"r{n}" for n in range(6)])
    lines = [json.loads(line) for line in (box.folder / "out.jsonl").read_bytes().splitlines()]
    assert lines[0]["response"] == lines[2]["response"] == lines[4]["response"] != lines[1]["response"]


def test_the_service_sends_equal_requests_once_with_dedupe(service: ServiceBox, sim: Engine) -> None:
    service.write("in.jsonl", [chat(f"r{n}", f"prompt {n % 2}") for n in range(6)])
    done = service.batch("submit", "in.jsonl", "--model", sim.url, "--name", "job", "--dedupe", "--wait")

    assert done.status == 0, done.stderr
    assert len(sim.received()) == 2
    status = json.loads(service.batch("status", "job", "--json").stdout)
    assert (status["done"], status["failed"], status["options"]["dedupe"], status["options"]["order"]) == (
        6, 0, True, "auto",
    )  # fmt: skip
    assert service.batch("results", "job", "-o", "in-order.jsonl", "--force").status == 0
    check_results(service.folder / "in-order.jsonl", [f"r{n}" for n in range(6)])


def test_a_run_goes_on_in_another_order_but_not_with_another_idea_of_what_is_equal(box: Box, sim: Engine) -> None:
    records = questions()
    records[-1] = chat("r11", "C" * 400 + " STUB:400-unsupported-param Question 11?")
    box.write("in.jsonl", records)
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--concurrency", "1")
    assert box.freight(*arguments, "--order", "input").status == 0

    refused = box.freight(*arguments, "--dedupe")
    assert refused.status == 2
    assert "--dedupe: False before, True now" in refused.stderr
    assert box.freight(*arguments, "--retry-errors").status == 0
    assert asked(sim) == [*AS_READ, 11]


def test_a_run_goes_on_by_the_index_that_it_kept_and_reads_the_input_anew_where_that_is_damaged(
    box: Box, sim: Engine
) -> None:
    records = [chat(f"r{n}", f"{'ABC'[n % 3] * 400} STUB:400-unsupported-param Question {n}?") for n in AS_READ]
    box.write("in.jsonl", records)
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--concurrency", "1", "--retry-errors")
    assert box.freight(*arguments).status == 0
    [kept] = (box.folder / "out.jsonl.freight").glob("*/index-*.npz")
    index = Index.load(kept)
    replace(index, order=index.order[::-1]).save(kept)
    assert box.freight(*arguments).status == 0
    kept.write_bytes(kept.read_bytes()[:-100])
    assert box.freight(*arguments).status == 0

    assert asked(sim) == [*BY_DOCUMENT, *BY_DOCUMENT[::-1], *BY_DOCUMENT]


def test_an_order_that_is_not_known_is_refused(service: ServiceBox, box: Box) -> None:
    box.write("in.jsonl", questions())
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--order", "best").status == 2
    service.write("in.jsonl", questions())
    done = service.batch("submit", "in.jsonl", "--model", "m", "--order", "best")
    assert (done.status, done.stdout) == (2, "")
