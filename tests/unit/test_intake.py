"""Intake: every line is checked once, and each record's place is known."""

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest

from freight.control.inputs import BOM, InputFile
from freight.control.intake import NO_WISHES, Index, Limits, Problem, Wishes, scan, sha256_of
from freight.core.record import Endpoint, Rules
from freight.errors import Interrupted, OperationError, UserError

LIMITS = Limits(record_bytes=1000)


def record(custom_id: str, **body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "body": body or {"messages": []}}).encode()


def scanned(
    path: Path,
    content: bytes,
    rules: Rules = Rules(),  # noqa: B008
    limits: Limits = LIMITS,
    wishes: Wishes = NO_WISHES,
) -> tuple[Index, list[Problem]]:
    path.write_bytes(content)
    file = InputFile(path, "in")
    problems: list[Problem] = []
    try:
        return scan(file, rules, limits, problems.extend, wishes=wishes), problems
    finally:
        file.close()


def codes(problems: list[Problem]) -> list[tuple[int, int, str]]:
    return [(problem.index, problem.number, problem.rejection.code) for problem in problems]


def test_each_record_is_found_where_it_stands(tmp_path: Path) -> None:
    lines = [record("a"), b"", record("b", prompt="x"), b"  ", record("é", input="x"), record("d", messages=[])]
    content = BOM + b"\r\n".join(lines)

    index, problems = scanned(tmp_path / "in", content)

    assert problems == []
    assert index.records == 4
    assert index.numbers.tolist() == [1, 3, 5, 6]
    assert index.endpoints.tolist() == [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, Endpoint.CHAT]
    places = zip(index.offsets.tolist(), index.lengths.tolist(), strict=True)
    assert [content[offset : offset + length] for offset, length in places] == [line for line in lines if line.strip()]
    assert index.sha256 == hashlib.sha256(content).hexdigest()
    assert index.endpoints_used() == {Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS}


def test_a_file_of_blank_lines_has_no_records(tmp_path: Path) -> None:
    index, problems = scanned(tmp_path / "in", b"\n \n")

    assert (index.records, problems, index.endpoints_used()) == (0, [], frozenset())


def test_a_file_without_a_good_record_has_no_equal_ones(tmp_path: Path) -> None:
    index, problems = scanned(tmp_path / "in", b"{bad\n" * 2, wishes=Wishes(order=True, dedupe=True))

    assert len(problems) == 2
    assert index.firsts.tolist() == [0, 1]


def test_a_bad_line_keeps_its_place_and_gets_its_line_in_the_results(tmp_path: Path) -> None:
    content = b"\n".join([record("a"), b"", b"{bad", record("b"), b'{"custom_id":"c"}'])

    index, problems = scanned(tmp_path / "in", content)

    assert index.endpoints.tolist() == [1, 0, 1, 0]
    assert codes(problems) == [(1, 3, "invalid_json"), (3, 5, "invalid_body")]
    line = problems[1].line()
    assert json.loads(b"{" + line.tail) == {
        "custom_id": "c",
        "response": None,
        "error": {"code": "invalid_body", "message": "body is missing", "line": 5},
    }


def test_the_second_and_later_uses_of_an_id_are_rejected_and_name_the_first_line(tmp_path: Path) -> None:
    escaped = b'{"custom_id":"\\u0061","body":{"input":1}}'
    lines = [record("x"), b"", record("a"), record("b"), record("a"), record("x"), escaped]

    index, problems = scanned(tmp_path / "in", b"\n".join(lines))

    assert index.endpoints.tolist() == [1, 1, 1, 0, 0, 0]
    assert sorted(codes(problems)) == [(n, n + 2, "duplicate_custom_id") for n in (3, 4, 5)]
    assert {p.index: p.rejection.message.rsplit(" ", 1)[1] for p in problems} == {3: "3", 4: "1", 5: "3"}
    assert {p.index: p.rejection.custom_id for p in problems} == {3: b'"a"', 4: b'"x"', 5: b'"\\u0061"'}


def test_an_id_that_a_bad_line_used_is_taken(tmp_path: Path) -> None:
    content = b"\n".join([b'{"custom_id":"a"}', record("a"), b'{"custom_id":"a"}'])

    _, problems = scanned(tmp_path / "in", content)

    assert sorted(codes(problems)) == [
        (0, 1, "invalid_body"),
        (1, 2, "duplicate_custom_id"),
        (2, 3, "invalid_body"),
    ]


def test_lines_without_a_readable_id_are_not_each_others_duplicates(tmp_path: Path) -> None:
    content = b"\n".join([b"{", b"{}", b'{"custom_id":1}', b"x" * 1001] * 2)

    _, problems = scanned(tmp_path / "in", content)

    assert "duplicate_custom_id" not in {code for _, _, code in codes(problems)}


def test_among_many_records_every_duplicate_is_found(tmp_path: Path) -> None:
    ids = [f"id-{number * number % 4001}" for number in range(5000)]
    first: dict[str, int] = {}
    expected: dict[int, int] = {}
    for number, custom_id in enumerate(ids):
        if custom_id in first:
            expected[number] = first[custom_id] + 1
        first.setdefault(custom_id, number)

    index, problems = scanned(tmp_path / "in", b"\n".join(record(custom_id) for custom_id in ids))

    assert {p.index: int(p.rejection.message.rsplit(" ", 1)[1]) for p in problems} == expected
    assert [n for n, endpoint in enumerate(index.endpoints.tolist()) if not endpoint] == sorted(expected)


def test_a_line_over_the_limit_is_too_large_and_its_id_is_not_read(tmp_path: Path) -> None:
    content = b"\n".join([record("a"), record("b", prompt="x" * 1000), record("c")])

    index, problems = scanned(tmp_path / "in", content)

    assert codes(problems) == [(1, 2, "payload_too_large")]
    assert problems[0].rejection.custom_id is None
    assert "1000" in problems[0].rejection.message
    assert index.endpoints.tolist() == [1, 0, 1]


def test_a_last_line_that_is_cut_off_is_told_so(tmp_path: Path) -> None:
    _, problems = scanned(tmp_path / "in", record("a") + b"\n" + record("b")[:-4])

    assert "the file ends inside this record" in problems[0].rejection.message


def test_the_jobs_rules_hold_for_every_line(tmp_path: Path) -> None:
    content = b"\n".join([record("a", messages=[], model="m"), record("b", messages=[], model="n")])

    _, problems = scanned(tmp_path / "in", content, Rules(models=frozenset({"m"}), model="m"))

    assert codes(problems) == [(1, 2, "model_mismatch")]


@pytest.mark.parametrize(
    ("limits", "name"),
    [(Limits(1000, records=2), "limits.records"), (Limits(1000, file_bytes=10), "limits.file_bytes")],
)
def test_a_file_over_a_limit_is_refused_whole_saying_which(tmp_path: Path, limits: Limits, name: str) -> None:
    content = b"\n".join([record("a"), record("b"), record("c")])

    with pytest.raises(UserError, match=name):
        scanned(tmp_path / "in", content, limits=limits)


def test_a_file_of_exactly_the_limits_passes(tmp_path: Path) -> None:
    content = b"\n\n".join([record("a"), record("b")])

    index, _ = scanned(tmp_path / "in", content, limits=Limits(1000, records=2, file_bytes=len(content)))

    assert index.records == 2


def test_problems_come_in_bulk_and_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"{\n" * 3500)
    file = InputFile(tmp_path / "in", "in")
    bulks: list[int] = []

    scan(file, Rules(), LIMITS, lambda problems: bulks.append(len(problems)))

    assert sum(bulks) == 3500
    assert len(bulks) < 10
    file.close()


def test_a_file_that_changes_during_intake_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"{\n" * 1000 + record("a"))
    file = InputFile(path, "in")

    with pytest.raises(OperationError, match="changed"):
        scan(file, Rules(), LIMITS, lambda problems: path.write_bytes(b"other"))
    file.close()


def test_intake_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(record(str(n)) + b"\n" for n in range(3000)))
    file = InputFile(path, "in")

    with pytest.raises(Interrupted):
        scan(file, Rules(), LIMITS, lambda problems: None, stopped=lambda: True)
    with pytest.raises(Interrupted):
        sha256_of(file, stopped=lambda: True)
    file.close()


def test_the_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = b"x" * 3_000_001
    (tmp_path / "in").write_bytes(content)
    file = InputFile(tmp_path / "in", "in")

    assert sha256_of(file) == hashlib.sha256(content).hexdigest()
    file.close()


def test_a_line_of_a_gigabyte_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as sparse:
        sparse.write(record("a") + b"\n")
        sparse.seek(10**9, 1)
        sparse.write(b"\n" + record("b") + b"\n")
    file = InputFile(path, "in")
    problems: list[Problem] = []

    tracemalloc.start()
    index = scan(file, Rules(), Limits(10_000_000), problems.extend)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert codes(problems) == [(1, 2, "payload_too_large")]
    assert index.numbers.tolist() == [1, 2, 3]
    assert peak < 30_000_000
    file.close()


def test_memory_grows_by_less_than_120_bytes_a_record(tmp_path: Path) -> None:
    records = 50_000
    path = tmp_path / "in"
    path.write_bytes(b"".join(b'{"custom_id":"%d","body":{"messages":[]}}\n' % n for n in range(records)))
    file = InputFile(path, "in")

    tracemalloc.start()
    index = scan(file, Rules(), LIMITS, lambda problems: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert index.records == records
    # A few chunks of the file are there at any size.
    assert peak < 120 * records + 4_000_000
    file.close()
