"""The order of dispatch: what shares a prefix is together, and where nothing is shared the file's order stays."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.core import order as module
from freight.core.order import BLOCK_BYTES, FEW_RECORDS, Order, Texts, arrange, dispatch_order, sort_texts
from freight.core.prompt import NO_BUDGET

WORDS = st.sampled_from([b"", b"a", b"b", b"\xff", b"ab" * 40, b"c" * 64, b"d" * 200])
TEXTS = st.lists(WORDS, max_size=6).map(b"".join)
BLOCKS = st.lists(st.sampled_from([b"a" * 64, b"b" * 64, b"c" * 40]), max_size=4).map(b"".join)


@dataclass
class Reading:
    """Texts in memory, and how many bytes of them were read."""

    rests: Sequence[bytes]
    read_bytes: int = 0
    pieces: int = 0
    reads: int = 0

    def read(self, records: numpy.ndarray, starts: numpy.ndarray, length: int) -> list[bytes]:
        places = zip(records.tolist(), starts.tolist(), strict=True)
        pieces = [self.rests[record][start : start + length] for record, start in places]
        self.read_bytes += sum(map(len, pieces))
        self.pieces += len(pieces)
        self.reads += 1
        return pieces

    def texts(self, heads: Sequence[bytes] | None = None, common: int = 0) -> Texts:
        lengths = numpy.array([len(rest) for rest in self.rests], numpy.uint32)
        if heads is None:
            return Texts(lengths, self.read, common=common)
        ranks = {head: rank for rank, head in enumerate(sorted(set(heads)))}
        numbers = numpy.array([ranks[head] for head in heads], numpy.uint32)
        return Texts(lengths, self.read, numbers, numpy.array([len(head) for head in heads], numpy.uint32), common)


def everything(count: int) -> numpy.ndarray:
    return numpy.arange(count, dtype=numpy.int64)


def shared_bytes(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check_sorted(rests: Sequence[bytes], heads: Sequence[bytes] | None = None, common: int = 0) -> None:
    """Compare with a sort of the whole texts."""
    ordered, shared = sort_texts(everything(len(rests)), Reading(rests).texts(heads, common))
    given_heads = heads or [b""] * len(rests)
    expected = sorted(range(len(rests)), key=lambda i: (given_heads[i], rests[i], i))
    assert ordered.tolist() == expected
    for place in range(1, len(rests)):
        one, other = expected[place - 1], expected[place]
        same_head = given_heads[one] == given_heads[other]
        assert shared[place] == (len(given_heads[one]) + shared_bytes(rests[one], rests[other]) if same_head else 0)


def dispatched(rests: Sequence[bytes], budgets: Sequence[int] | None = None) -> Order:
    given_budgets = numpy.array(budgets or [NO_BUDGET] * len(rests), numpy.uint32)
    return dispatch_order(everything(len(rests)), Reading(rests).texts(), given_budgets)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"", b"[]", b"[1]"]), TEXTS), min_size=1))
def test_records_are_sorted_by_their_whole_text(texts: list[tuple[bytes, bytes]]) -> None:
    rests = [rest for _, rest in texts]
    check_sorted(rests)
    check_sorted(rests, [head for head, _ in texts])
    check_sorted([b"always the same" + rest for rest in rests], common=15)


@pytest.mark.parametrize("large", [2, 5])
@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1))
def test_large_ties_are_split_as_small_ones_are(large: int, texts: list[bytes]) -> None:
    before = module._LARGE
    module._LARGE = large  # type: ignore[misc]
    try:
        check_sorted(texts)
        check_sorted([b"head" + text for text in texts], [b"[%d]" % (n % 2) for n in range(len(texts))], common=4)
    finally:
        module._LARGE = before  # type: ignore[misc]


@settings(deadline=None, max_examples=30)
@given(st.randoms(use_true_random=False), st.sampled_from([66, 200, 1500, 20_000]), st.integers(1, 12))
def test_texts_that_leave_one_prompt_anywhere_are_sorted_by_their_whole_text(
    rng: random.Random, size: int, edits: int
) -> None:
    prompt = bytes(rng.choices(b"abcd", k=size))
    texts: list[bytes] = []
    for _ in range(60):
        text = bytearray(prompt)
        for place in rng.choices(range(size), k=rng.randrange(edits)):
            # Some before the prompt and some after it.
            text[place] += rng.choice((-1, 1))
        # Some end soon, and some go on beyond the prompt.
        texts.append(bytes(text)[: rng.choice((size, size, rng.randrange(size)))] + rng.choice((b"", b"a", b"e" * 100)))
    before = module._LARGE
    module._LARGE = 3  # type: ignore[misc]
    try:
        check_sorted(texts)
    finally:
        module._LARGE = before  # type: ignore[misc]


def edited_once(rng: random.Random, edited: int) -> list[bytes]:
    """Return texts that begin with the same 8 kB, but for some that leave it each at another place."""
    prompt = bytes(rng.choices(b"abcdefgh", k=8000))
    places = [number * 8000 // max(1, edited) for number in range(edited)]
    texts = [prompt[:place] + b"#" + prompt[place + 1 :] for place in places] + [prompt] * (9000 - edited)
    rng.shuffle(texts)
    return [text + b" question %d" % (n * 7919 % 9000) for n, text in enumerate(texts)]


def branching(rng: random.Random, edited: int) -> list[bytes]:
    """Return texts that part in two every 40 bytes."""
    return [b"".join(rng.choice((b"a" * 40, b"b" * 40)) for _ in range(100)) for _ in range(9000)]


def nested(rng: random.Random, edited: int) -> list[bytes]:
    """Return texts of which each begins with a part of the same prompt, as long as chance has it."""
    prompt = bytes(rng.choices(b"abcdefgh", k=8000))
    return [prompt[: rng.randrange(8000)] + b"%c" % rng.choice(b"\x01z") + b"x" * 400 for _ in range(9000)]


@pytest.mark.parametrize(
    ("made", "edited"), [(edited_once, 0), (edited_once, 100), (edited_once, 9000), (branching, 0), (nested, 0)]
)
def test_however_a_large_tie_comes_apart_its_texts_are_read_once_and_in_few_pieces(
    made: Callable[[random.Random, int], list[bytes]], edited: int
) -> None:
    rests = made(random.Random(5), edited)
    reading = Reading(rests)

    ordered, _ = sort_texts(everything(len(rests)), reading.texts())

    assert ordered.tolist() == sorted(range(len(rests)), key=lambda i: (rests[i], i))
    assert reading.pieces < 5 * len(rests)
    assert reading.read_bytes < 1.2 * sum(map(len, rests))


def test_many_records_are_sorted_and_little_more_is_read_than_tells_them_apart() -> None:
    random.seed(1)
    prompts = [bytes([65 + n]) * 3000 for n in range(2)]
    rests = [random.choice(prompts) + random.randbytes(4).hex().encode() + b"x" * 2000 for _ in range(9000)]
    reading = Reading(rests)

    ordered, _ = sort_texts(everything(len(rests)), reading.texts())

    assert ordered.tolist() == sorted(range(len(rests)), key=lambda i: (rests[i], i))
    assert reading.read_bytes < 1.2 * 3000 * len(rests)
    # Long prefixes by long pieces.
    assert reading.reads < 60


def test_texts_that_are_equal_for_longer_than_any_context_count_as_equal() -> None:
    same = b"a" * module.MOST_TEXT
    reading = Reading([same + b"c", same + b"b" * 70_000, same])
    ordered, shared = sort_texts(everything(3), reading.texts())

    assert ordered.tolist() == [0, 1, 2]
    assert shared.tolist() == [0, module.MOST_TEXT, module.MOST_TEXT]
    assert reading.read_bytes == 3 * module.MOST_TEXT


def test_where_nothing_is_shared_the_order_is_the_files() -> None:
    random.seed(2)
    rests = [b'[{"role":"user","content":"' + random.randbytes(200).hex().encode() for _ in range(200)]

    assert len(dispatched(rests).records) == 0
    # Nor for a few that are equal.
    assert len(dispatched([*rests, rests[7]]).records) == 0
    # Nor where all have the same long tools, which count as much for what is shared as for what there is.
    heads = [b"t" * 5000] * 201
    texts = Reading([*rests, rests[7]]).texts(heads)
    assert len(dispatch_order(everything(201), texts, numpy.zeros(201, numpy.uint32)).records) == 0
    # Nor does what all have alike make a difference.
    assert len(dispatched([b"You are helpful. " * 300 + rest for rest in rests], list(range(200))).records) == 0


def test_a_few_records_that_are_all_with_the_engine_at_once_stay_as_they_are() -> None:
    rests = [bytes([65 + n % 2]) * 500 + b"%d" % n for n in range(FEW_RECORDS + 1)]
    assert len(dispatched(rests[:-1]).records) == 0
    assert dispatched(rests).records.tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7]


def test_questions_on_one_document_are_neighbours_whatever_prompt_all_have_before_it() -> None:
    random.seed(3)
    prompt = b"p" * 5000
    documents = [random.randbytes(4000).hex().encode() for _ in range(100)]
    asked = [(document, b"question %d" % number) for document in range(100) for number in range(8)]
    random.shuffle(asked)

    found = dispatched([prompt + documents[document] + question for document, question in asked])

    by_document = [asked[record][0] for record in found.records.tolist()]
    assert sorted(found.records.tolist()) == list(range(800))
    assert [by_document[place] for place in range(0, 800, 8)] == list(dict.fromkeys(document for document, _ in asked))
    assert all(len(set(by_document[place : place + 8])) == 1 for place in range(0, 800, 8))
    assert [bool(blocks) for blocks in found.shared.tolist()] == [place % 8 > 0 for place in range(800)]


def test_of_records_that_share_as_much_the_longest_answers_come_first() -> None:
    shared, own = b"s" * 200, [bytes([97 + n]) * 100 for n in range(12)]
    rests = [shared + one if n % 2 else one for n, one in enumerate(own)]
    budgets = [1, 10, 1, 30, 1, 20, 1, NO_BUDGET, 1, 30, 1, 5]

    # Those that share nothing stay where they stand; a record without a budget may have the longest answer of all.
    assert dispatched(rests, budgets).records.tolist() == [0, 7, 3, 9, 5, 1, 11, 2, 4, 6, 8, 10]


def test_a_group_within_a_group_stays_together() -> None:
    outer, inner = b"o" * 128, b"i" * 128
    rests = [outer + (inner if n in (2, 5, 7) else b"") + bytes([65 + n]) * 80 for n in range(9)] + [b"z" * 64] * 2

    found = dispatched(rests, [n + 1 for n in range(11)]).records.tolist()

    assert sorted(found) == list(range(11))
    inside = sorted(found.index(n) for n in (2, 5, 7))
    assert inside[2] - inside[0] == 2
    assert [n for n in found if n in (2, 5, 7)] == [7, 5, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(BLOCKS, st.integers(1, 3)), min_size=2, max_size=40))
def test_arranging_loses_none_of_what_neighbours_share(texts: list[tuple[bytes, int]]) -> None:
    rests = [rest for rest, _ in texts]
    ordered, shared = sort_texts(everything(len(rests)), Reading(rests).texts())

    found = arrange(ordered, shared, numpy.array([budget for _, budget in texts], numpy.uint32))

    if not len(found.records):
        return
    everywhere = min(shared[1:].tolist())
    assert sorted(found.records.tolist()) == list(range(len(rests)))
    blocks = [(int(count) - everywhere) // BLOCK_BYTES for count in shared[1:]]
    assert sorted(found.shared[1:].tolist()) == sorted(blocks)
    arranged = [rests[record] for record in found.records.tolist()]
    for one, other, block in zip(arranged, arranged[1:], found.shared[1:].tolist(), strict=False):
        assert (shared_bytes(one, other) - everywhere) // BLOCK_BYTES >= block
