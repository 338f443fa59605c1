"""The first reading: what Freight does, in a dozen short tests through the real command."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.harness import ROOT, Box, Engine, chat, code, content, engine, engine_command, model_toml


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Generator[Engine]:
    """One simulated engine for the whole tour; it answers with a digest of what it was asked."""
    with engine(tmp_path_factory.mktemp("engine"), "--digest") as running:
        yield running


def test_a_real_model_answers_a_real_file(box: Box) -> None:
    done = box.freight("run", str(ROOT / "examples" / "mixed.jsonl"), "-o", "out.jsonl")
    results = box.results()
    assert done.status == 0
    assert "using the built-in smollm2-135m" in done.stderr
    assert [r["custom_id"] for r in results[:2]] == ["chat-1", "chat-2"]
    assert all(r["error"] is None and r["response"]["status_code"] == 200 for r in results)
    assert content(results[0])


def test_structured_output_obeys_its_schema(box: Box) -> None:
    done = box.freight("run", str(ROOT / "examples" / "structured.jsonl"), "-o", "out.jsonl")
    assert done.status == 0
    for result in box.results():
        assert '"sentiment"' in content(result)


def test_embeddings_are_vectors_of_one_length(box: Box) -> None:
    done = box.freight("run", str(ROOT / "examples" / "embeddings.jsonl"), "-o", "out.jsonl")
    vectors = [r["response"]["body"]["data"][0]["embedding"] for r in box.results()]
    assert done.status == 0
    assert len(vectors) == 4
    assert {len(vector) for vector in vectors} == {576}


def test_results_come_in_the_order_of_the_file(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat(f"r{n}", f"question {n}") for n in range(500)])
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url).status == 0
    assert [r["custom_id"] for r in box.results()] == [f"r{n}" for n in range(500)]


def test_a_bad_line_is_one_error_line(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a"), chat("b"), {"custom_id": "c", "body": []}, chat("d")])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    assert done.status == 0
    assert [code(r) for r in box.results()] == [None, None, "invalid_body", None]
    assert done.last_line().startswith("1 of 4 failed")


def test_the_same_command_again_is_already_done(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a")])
    first = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    again = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    assert (first.status, again.status) == (0, 0)
    assert "already done" in again.stderr


def test_a_file_that_is_not_freights_is_left_alone(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a")])
    (box.folder / "out.jsonl").write_text("mine")
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    assert done.status == 2
    assert "--force" in done.stderr
    assert (box.folder / "out.jsonl").read_text() == "mine"


def test_failed_records_can_be_run_again(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a"), chat("b", "STUB:400-once in the tour")])
    run = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    box.freight(*run)
    before = (box.folder / "out.jsonl").read_bytes().split(b"\n")
    assert [code(r) for r in box.results()] == [None, "InferenceFailed"]
    box.freight(*run, "--retry-errors")
    assert [code(r) for r in box.results()] == [None, None]
    assert (box.folder / "out.jsonl").read_bytes().split(b"\n")[0] == before[0]


def test_freight_starts_any_server_by_its_command(box: Box, tmp_path: Path) -> None:
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, "--digest")))
    box.write("in.jsonl", [chat(f"r{n}") for n in range(20)])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "mine")
    assert done.status == 0
    assert len(box.results()) == 20
    assert box.processes() == []


def test_validate_lists_every_problem_and_runs_nothing(box: Box) -> None:
    box.write("in.jsonl", [chat("a"), chat("a"), b"{oops}", chat("b", stream=True)])
    done = box.freight("batch", "validate", "in.jsonl")
    assert done.status == 2
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == [
        "duplicate_custom_id",
        "invalid_json",
        "streaming_unsupported",
    ]


def test_doctor_finds_this_machine_fit(box: Box) -> None:
    done = box.freight("doctor")
    assert done.status == 0, done.stdout
    assert "FAIL" not in done.stdout
