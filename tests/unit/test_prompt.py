"""A record's text: what an engine reads, found in the line without decoding it, and media by their digest."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest

from freight.control.inputs import InputFile
from freight.control.intake import Index, Limits, Wishes, scan
from freight.control.prompts import Prompts
from freight.core.prompt import LEAST_MEDIA, MOST_MEDIA, NO_BUDGET, Prompt, prompt_of
from freight.core.record import Request, Rules, check_line
from freight.errors import Interrupted, OperationError


def line_of(url: str = "/v1/chat/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "url": url, "body": body}).encode()


def prompt_in(line: bytes) -> Prompt:
    request = check_line(line, Rules())
    assert isinstance(request, Request), request
    return prompt_of(line, request)


def text_in(line: bytes) -> tuple[bytes, bytes]:
    prompt = prompt_in(line)
    return prompt.head, line[prompt.at : prompt.at + prompt.length]


@pytest.mark.parametrize(
    ("line", "head", "rest"),
    [
        (line_of(messages=[{"role": "user"}], tools=[1]), b"[1]", b'[{"role": "user"}]'),
        (line_of("/v1/completions", prompt="p", messages=[]), b"", b'"p"'),
        (line_of("/v1/embeddings", input=["i"], prompt="p"), b"", b'["i"]'),
        (line_of("/v1/responses", input="i", instructions="do", tools=[2]), b'[2]"do"', b'"i"'),
        (line_of("/v1/rerank", query="q", documents=["d"]), b"", b'"q"'),
        (line_of("/v1/score", text_1="t", text_2="u"), b"", b'"t"'),
        (line_of("/v1/chat/completions", prompt="p"), b"", b""),
        (b'{"custom_id":"[1]","body":{"x":[[1],[1 ]],"messages" : [[1],2] ,"y":1}}', b"", b"[[1],2]"),
        (b'{"custom_id":"a","body":{"messages":["\\ud800"]}}', b"", b'["\\ud800"]'),
    ],
)
def test_the_text_of_each_endpoint_is_what_its_templates_begin_with(line: bytes, head: bytes, rest: bytes) -> None:
    assert text_in(line) == (head, rest)


class Searched(bytes):
    """A line that counts how often it is searched, and compared with a token."""

    searches = 0
    compares = 0

    def find(self, *arguments: Any) -> int:
        self.searches += 1
        return super().find(*arguments)

    def startswith(self, *arguments: Any) -> bool:
        self.compares += 1
        return super().startswith(*arguments)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ([[{"role": "user", "content": [1] * 30 + [2]}]] * 300, [{"role": "user", "content": [1] * 40}]),
        # A quote within the string looks like the one before it.
        ('"' * 3000, '"' * 3001),
        ('"' * 3000, '"' * 2000 + "x"),
        ("nothing like it", "said"),
    ],
)
def test_a_text_is_found_by_few_searches_in_a_line_that_begins_like_it_all_over(before: object, said: object) -> None:
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"x": before, "prompt": said}}).encode()
    request = check_line(line, Rules())
    assert isinstance(request, Request), request
    counted = Searched(line)

    prompt = prompt_of(counted, request)

    assert line[prompt.at : prompt.at + prompt.length] == json.dumps(said).encode()
    assert counted.searches + counted.compares < 40


@pytest.mark.parametrize(
    ("body", "budget"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_output_tokens": 9}, 9),
        ({"max_tokens": None}, NO_BUDGET),
        ({"max_tokens": -1}, NO_BUDGET),
        ({"max_tokens": 10**20}, NO_BUDGET),
        ({}, NO_BUDGET),
    ],
)
def test_the_longest_answer_is_what_the_record_allows(body: dict[str, Any], budget: int) -> None:
    assert prompt_in(line_of(messages=[], **body)).budget == budget


def picture(content: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + content}}


def test_media_are_found_where_they_stand_but_for_small_ones_and_more_than_a_few() -> None:
    large, small = "A" * LEAST_MEDIA, "B" * 20
    line = line_of(messages=[{"content": [picture(small), picture(large), {"input_audio": {"data": "C" * 2000}}]}])
    found = prompt_in(line).media
    assert [line[at : at + length][-2000:] for at, length, _ in found] == [
        b"image/png;base64," + large.encode(), b"C" * 2000,
    ]  # fmt: skip
    many = prompt_in(line_of(messages=[{"content": [picture(large)] * 9}])).media
    assert len(many) == MOST_MEDIA
    assert len({digest for _, _, digest in many}) == 1


def scanned(path: Path, lines: list[bytes], wishes: Wishes = Wishes(order=True)) -> Index:  # noqa: B008
    path.write_bytes(b"\n".join(lines))
    file = InputFile(path, "in")
    try:
        return scan(file, Rules(), Limits(100_000), lambda problems: None, wishes=wishes)
    finally:
        file.close()


def numbered(*bodies: dict[str, Any]) -> list[bytes]:
    return [json.dumps({"custom_id": str(n), "body": body}).encode() for n, body in enumerate(bodies)]


@pytest.mark.parametrize("piece", [1 << 16, 16])
def test_questions_on_one_picture_are_neighbours_though_pictures_begin_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("freight.core.order._LONGEST_PIECE", piece)

    def asked(n: int) -> dict[str, Any]:
        question = {"type": "text", "text": f"Question {n}?"}
        more = {"type": "text", "text": "XY"[n // 6] * 100}
        body = {"content": [picture("S" * 5000 + "XYZ"[n % 3] * 10), more, question]}
        return {"messages": [{"role": "user", **body}], "max_tokens": n + 1}

    order = scanned(tmp_path / "in", numbered(*map(asked, range(12)))).order.tolist()

    # By picture, then by the text after it, then the longest answer first.
    assert order == [3, 0, 9, 6, 4, 1, 10, 7, 5, 2, 11, 8]


@pytest.mark.parametrize("media", [1, MOST_MEDIA])
def test_records_with_media_take_little_memory_while_they_are_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, media: int
) -> None:
    # Of the texts themselves as few as may be in memory.
    monkeypatch.setattr("freight.core.order._BATCH", 64)
    content = [picture("S" * LEAST_MEDIA)] * media
    lines = [line_of(messages=[{"content": [*content, {"text": f"Question {n}?"}]}]) for n in range(50)]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    found, records = [prompt_in(line) for line in lines], 20_000
    # Many records, of few lines: where a record's line begins is all that tells where it is.
    begins = numpy.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    offsets = numpy.tile(begins, records // len(lines))
    file = InputFile(tmp_path / "in", "in")
    tracemalloc.start()
    try:
        prompts = Prompts()
        for n in range(records):
            prompts.add(lines[n % 50], found[n % 50]._replace(head=b"%d" % (n // 50)))
        order = prompts.order(file, offsets, numpy.arange(records))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        file.close()

    assert len(order.records) == records
    assert peak < (100 + 20 * media) * records


def test_looking_for_the_order_ends_soon_when_it_is_stopped(tmp_path: Path) -> None:
    lines = numbered(*({"messages": ["AB"[n % 2] * 300 + str(n)]} for n in range(12)))
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(lines))
    file = InputFile(path, "in")
    # Intake asks once for each piece that it reads, and the file is one piece.
    answers = iter([False])

    with pytest.raises(Interrupted, match="order"):
        scan(file, Rules(), Limits(9999), lambda _: None, lambda: next(answers, True), Wishes(order=True))
    file.close()


def test_records_with_the_same_tools_are_neighbours(tmp_path: Path) -> None:
    def asked(n: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"{n}" * 100}], "tools": [f"tool {n % 4}" * 30]}

    order = scanned(tmp_path / "in", numbered(*map(asked, range(12)))).order.tolist()

    assert order == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


def test_bad_lines_have_no_place_in_the_order(tmp_path: Path) -> None:
    good = numbered(*({"messages": ["AB"[n % 2] * 300 + str(n)]} for n in range(12)))
    lines = [b"{bad", *good[:5], b"x" * 100_001, good[0], *good[5:]]

    index = scanned(tmp_path / "in", lines)

    assert sorted(index.order.tolist()) == numpy.flatnonzero(index.endpoints).tolist()
    assert len(index.order) == 12
    assert len(scanned(tmp_path / "in", lines, Wishes()).order) == 0


def test_a_file_without_a_good_record_has_nothing_to_run_once(tmp_path: Path) -> None:
    assert scanned(tmp_path / "in", [b"{bad", b"{}"], Wishes(order=True, dedupe=True)).firsts.tolist() == [0, 1]


def test_an_index_comes_back_as_it_was_kept_and_one_of_an_earlier_version_has_no_order(tmp_path: Path) -> None:
    bodies = [{"messages": ["AB"[n % 2] * 300 + str(n // 4)]} for n in range(12)]
    index = scanned(tmp_path / "in", numbered(*bodies), Wishes(order=True, dedupe=True))
    assert len(index.order) == 12
    assert index.firsts.tolist() == [0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9]

    index.save(tmp_path / "index.npz")
    loaded = Index.load(tmp_path / "index.npz")
    for name in ("offsets", "lengths", "numbers", "endpoints", "order", "shared", "firsts"):
        assert getattr(loaded, name).tolist() == getattr(index, name).tolist()
        assert getattr(loaded, name).dtype == getattr(index, name).dtype

    with (tmp_path / "old.npz").open("wb") as file:
        arrays = {name: getattr(index, name) for name in ("offsets", "lengths", "numbers", "endpoints")}
        numpy.savez(file, sha256=numpy.array(index.sha256), **arrays)
    old = Index.load(tmp_path / "old.npz")
    assert (old.records, len(old.order), len(old.firsts)) == (12, 0, 0)


def test_bodies_are_equal_byte_for_byte_and_for_the_same_endpoint(tmp_path: Path) -> None:
    lines = [
        b'{"custom_id":"0","body":{"prompt":"p"}}',
        b'{"custom_id":"1","body":{"prompt": "p"}}',
        b'{"custom_id":"2","body":{"prompt":"p"},"url":"/v1/completions"}',
        b'{"custom_id":"3","body":{"prompt":"p"},"url":"/v1/embeddings"}',
        b"{bad",
        b"{bad",
        b'{"custom_id":"3","body":{"prompt":"p"}}',
        b'{"custom_id":"4","body":{"prompt": "p"}}',
    ]

    assert scanned(tmp_path / "in", lines, Wishes(dedupe=True)).firsts.tolist() == [0, 1, 0, 3, 4, 5, 6, 1]


def test_a_file_that_changes_before_its_order_is_known_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in"
    lines = numbered(*({"messages": ["AB"[n % 2] * 300 + str(n)]} for n in range(12)))
    path.write_bytes(b"\n".join([*lines, b"{bad"]))
    file, size = InputFile(path, "in"), path.stat().st_size

    with pytest.raises(OperationError, match="changed"):
        scan(file, Rules(), Limits(9999), lambda _: path.write_bytes(b"x" * size), wishes=Wishes(order=True))
    file.close()
