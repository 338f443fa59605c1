"""The files that benchmarks run, and the answers that count."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench.checks import Expected, batch_answers
from bench.simengine.prompt import expected_content
from bench.workloads import WORKLOADS, write_workload

SMALL = 0.005


def lines_of(path: Path, name: str, factor: float = SMALL) -> list[dict[str, object]]:
    write_workload(path / "in.jsonl", WORKLOADS[name], factor)
    return [json.loads(line) for line in (path / "in.jsonl").read_bytes().splitlines()]


def written(path: Path, answers: list[tuple[str, str]]) -> Path:
    """Write a results file in OpenAI's shape."""
    with path.open("w") as file:
        for custom_id, text in answers:
            body = {"choices": [{"message": {"content": text}}]}
            file.write(json.dumps({"custom_id": custom_id, "response": {"body": body}, "error": None}) + "\n")
    return path


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_file_each_time(tmp_path: Path, name: str) -> None:
    count = write_workload(tmp_path / "a", WORKLOADS[name], SMALL)
    write_workload(tmp_path / "b", WORKLOADS[name], SMALL)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().count(b"\n") == count >= 8


def test_the_sorted_file_has_the_records_of_the_mixed_one(tmp_path: Path) -> None:
    mixed, by_length = ([line["body"] for line in lines_of(tmp_path, name)] for name in ("W1", "W2"))
    assert mixed != by_length
    assert Counter(map(json.dumps, mixed)) == Counter(map(json.dumps, by_length))


def test_records_of_a_group_share_their_prompt_and_are_apart(tmp_path: Path) -> None:
    systems = [line["body"]["messages"][0]["content"] for line in lines_of(tmp_path, "W3", 0.02)]  # type: ignore[index]
    assert set(Counter(systems).values()) == {30}
    assert sum(a == b for a, b in pairwise(systems)) < len(systems) / 2


def test_a_prompt_says_how_long_its_answer_is(tmp_path: Path) -> None:
    line = lines_of(tmp_path, "W6")[0]
    assert len(expected_content(str(line["url"]), json.dumps(line["body"]).encode())) == 16 * 4


def test_right_answers_in_order_are_whole(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "W1")
    answers = [
        (str(line["custom_id"]), expected_content(str(line["url"]), json.dumps(line["body"]).encode()))
        for line in lines
    ]
    expected = Expected(tmp_path / "in.jsonl")
    whole = expected.check(batch_answers(written(tmp_path / "out", answers)))
    assert (whole.right, whole.missing, whole.problem(), whole.in_order) == (len(lines), 0, None, True)
    assert not expected.check(reversed(answers)).in_order
    few = expected.check(answers[:-3])
    assert (few.right, few.missing, few.problem()) == (len(lines) - 3, 3, None)


def test_wrong_and_repeated_answers_are_problems(tmp_path: Path) -> None:
    lines_of(tmp_path, "W1")
    expected = Expected(tmp_path / "in.jsonl")
    right = [
        (str(line["custom_id"]), expected_content(str(line["url"]), json.dumps(line["body"]).encode()))
        for line in map(json.loads, (tmp_path / "in.jsonl").read_bytes().splitlines())
    ]
    swapped = [(right[0][0], right[1][1]), *right[1:]]
    assert "not the record's" in str(expected.check(swapped).problem())
    assert "several answers" in str(expected.check([*right, right[0]]).problem())
    assert expected.check([("nobody", "text")]).wrong == 1
    # An error is no answer, and does not hide one that comes later.
    assert expected.check([(right[0][0], None), *right]).problem() is None


def test_a_workload_with_faults_tells_the_engine() -> None:
    workload = replace(WORKLOADS["W7"], speed=2.0)
    assert workload.engine_options()[-4:] == ["--speed", "2", "--fault", "503=0.05"]
