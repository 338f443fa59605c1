"""One job's results: the first answer stays, whatever comes late, twice or out of order."""

import tempfile
from collections.abc import Generator
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.core.answer import Answer, Line, answer_line, error_line, refused_line
from freight.core.job import Totals
from freight.core.record import INTAKE_CODES
from freight.errors import OperationError
from freight.store.database import Sharing
from freight.store.folder import Locking
from freight.store.results import PAGE_ROWS, Failure, Results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.db"


@pytest.fixture
def results(path: Path) -> Generator[Results]:
    opened = Results(path, Locking.LOCAL)
    yield opened
    opened.close()


def answered(index: int, text: str = "x", tokens: int = 5, cut: bool = False) -> Line:
    body = f'{{"choices":["{text}"]}}'.encode()
    return answer_line(index, b'"a"', 200, "r", Answer(body, tokens, 2 * tokens, tokens // 2, cut))


def failed(index: int, code: str = "request_timeout", message: str = "slow") -> Line:
    return error_line(index, b'"a"', code, message)


def totals_of(line: Line) -> Totals:
    return Totals(1, line.code is not None, line.cut, line.input_tokens, line.output_tokens, line.cached_tokens)


def tails(results: Results) -> dict[int, bytes]:
    return {index: tail for page in results.pages() for index, tail, _ in page}


def test_a_result_is_on_disk_once_put_returns(path: Path) -> None:
    results = Results(path, Locking.LOCAL)
    changed = results.put([answered(3), failed(1)], epoch=0)
    # Not closed: a process that is killed closes nothing.
    del results

    again = Results(path, Locking.LOCAL)
    assert tails(again) == {1: failed(1).tail, 3: answered(3).tail}
    assert again.totals() == changed == Totals(2, 1, 0, 5, 10, 2)
    again.close()


@pytest.mark.parametrize("late", [answered(0, "second"), failed(0)])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_answer_is_never_replaced(results: Results, late: Line, epoch: int) -> None:
    results.put([answered(0, "first")], epoch=0)

    assert results.put([late], epoch) == Totals()
    assert tails(results) == {0: answered(0, "first").tail}


@pytest.mark.parametrize("late", [answered(0), failed(0, message="second")])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_error_is_replaced_only_by_a_later_epoch(results: Results, late: Line, epoch: int) -> None:
    results.put([failed(0, message="first")], epoch=1)

    changed = results.put([late], epoch)

    assert tails(results) == {0: late.tail if epoch == 2 else failed(0, message="first").tail}
    assert changed.done == 0
    assert changed.failed == (-1 if epoch == 2 and late.code is None else 0)


def test_the_second_of_two_results_in_one_report_changes_nothing(results: Results) -> None:
    changed = results.put([answered(0, "first"), answered(0, "second"), failed(0)], epoch=0)

    assert changed == totals_of(answered(0))
    assert tails(results) == {0: answered(0, "first").tail}


OPERATIONS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=6
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=12))
def test_after_any_operations_the_totals_are_those_of_a_recount(
    reports: list[list[tuple[int, int, int, bool]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder) / "results.db", Locking.NETWORK)
        expected: dict[int, tuple[int, Line]] = {}
        totals = Totals()
        for number, report in enumerate(reports):
            epoch = min(epoch for _, epoch, _, _ in report)
            lines: list[Line] = []
            for index, _, kind, cut in report:
                text = f"{number}-{len(lines)}"
                line = failed(index, message=text) if kind == 0 else answered(index, text, kind, cut)
                lines.append(line)
                before = expected.get(index)
                if before is None or (before[1].code is not None and before[0] < epoch):
                    expected[index] = (epoch, line)
            totals = totals.plus(results.put(lines, epoch))
            assert results.totals() == totals
        recount = Totals()
        for _, line in expected.values():
            recount = recount.plus(totals_of(line))
        assert results.totals() == recount
        assert tails(results) == {index: line.tail for index, (_, line) in expected.items()}
        results.close()


@pytest.mark.parametrize("count", [0, 1, PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, 3 * PAGE_ROWS])
def test_pages_come_in_index_order_and_whole(results: Results, count: int) -> None:
    indices = [7 * (number * 101 % count) for number in range(count)] if count else []
    results.put([answered(index) for index in dict.fromkeys(indices)], epoch=0)

    pages = list(results.pages())

    listed = [index for page in pages for index, _, _ in page]
    assert listed == sorted(set(indices))
    assert all(page and len(page) <= PAGE_ROWS for page in pages)


def test_pages_of_large_results_are_smaller(results: Results) -> None:
    results.put([answered(index, "x" * 200_000) for index in range(120)], epoch=0)

    sizes = [len(page) for page in results.pages()]

    assert sum(sizes) == 120
    assert all(size <= 40 for size in sizes[1:])


def test_results_that_arrive_while_pages_are_read_do_not_disturb_them(results: Results) -> None:
    results.put([answered(index) for index in range(PAGE_ROWS)], epoch=0)
    pages = results.pages()
    first = next(pages)

    results.put([answered(PAGE_ROWS), answered(0, "late")], epoch=0)

    assert [index for index, _, _ in first] == list(range(PAGE_ROWS))
    assert [page[0][0] for page in pages] == [PAGE_ROWS]


def test_failures_are_grouped_by_code_and_status_with_the_commonest_first(results: Results) -> None:
    refused = [refused_line(index, b'"a"', 400, "r", b'{"error":"too long"}') for index in range(3)]
    broken = refused_line(3, b'"a"', 502, "r", b"<html>")
    results.put([*refused, broken, failed(4), failed(5, message="later"), answered(6)], epoch=0)

    assert results.failures() == [
        Failure("InferenceFailed", 400, 3, refused[0].message),
        Failure("request_timeout", 0, 2, "slow"),
        Failure("InferenceFailed", 502, 1, broken.message),
    ]


def test_settled_are_answers_and_intakes_refusals_and_errors_since_the_retry(results: Results) -> None:
    results.put([answered(0), failed(1, "invalid_json"), failed(2), failed(3)], epoch=0)
    results.put([failed(3, message="again"), failed(4)], epoch=2)

    assert results.settled(6, retried=0).tolist() == [True, True, True, True, True, False]
    assert results.settled(6, retried=2).tolist() == [True, True, False, True, True, False]
    assert results.settled(6, retried=3).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("code", INTAKE_CODES)
def test_no_intake_code_runs_again_or_counts_as_an_answer(results: Results, code: str) -> None:
    results.put([failed(0, code)], epoch=0)

    assert results.settled(1, retried=9).tolist() == [True]
    assert not results.has_answers()


def test_whatever_came_back_from_an_engine_counts_as_an_answer(results: Results) -> None:
    assert not results.has_answers()

    results.put([refused_line(0, b'"a"', 400, "r", b"no")], epoch=0)

    assert results.has_answers()


def test_suspects_and_their_deaths_outlive_the_process(path: Path) -> None:
    results = Results(path, Locking.LOCAL)
    assert results.accuse([7, 3], "w", 1) == {3: 1, 7: 1}
    assert results.accuse([7], "w", 2) == {7: 2}
    del results

    again = Results(path, Locking.LOCAL)
    assert again.suspects() == {3: 1, 7: 2}
    assert again.accuse([7], "w", 3) == {7: 3}
    assert again.accuse([7], "x", 1) == {7: 3}
    again.close()


def test_a_result_clears_its_record_of_suspicion_also_after_a_restart(path: Path) -> None:
    results = Results(path, Locking.LOCAL)
    results.accuse([1, 2], "w", 1)
    results.close()

    again = Results(path, Locking.LOCAL)
    again.put([answered(1)], epoch=0)
    assert again.suspects() == {2: 1}
    again.close()


def test_a_report_that_fails_half_way_leaves_nothing(results: Results) -> None:
    results.put([answered(0)], epoch=0)

    with pytest.raises(apsw.ConstraintError):
        results.put([answered(1), answered(-1)], epoch=0)

    assert tails(results) == {0: answered(0).tail}
    assert results.totals() == totals_of(answered(0))


def test_an_answer_of_ten_megabytes_comes_back_whole(results: Results) -> None:
    line = answered(0, "y" * 10_000_000)

    results.put([line], epoch=0)

    assert tails(results) == {0: line.tail}


def test_a_death_is_charged_once_however_often_it_is_told(path: Path) -> None:
    results = Results(path, Locking.LOCAL)
    for _ in range(3):
        assert results.accuse([3, 7], "w", 1) == {3: 1, 7: 1}
    results.close()

    again = Results(path, Locking.LOCAL)
    assert again.accuse([3, 7], "w", 1) == {3: 1, 7: 1}
    assert again.accuse([3], "other", 1) == {3: 2}
    assert again.accuse([3], "w", 2) == {3: 3}
    assert again.suspects() == {3: 3, 7: 1}
    again.close()


def test_a_death_that_comes_again_accuses_no_record_that_was_cleared_meanwhile(results: Results) -> None:
    results.accuse([3, 7], "w", 1)
    results.put([answered(3)], epoch=0)

    assert results.accuse([3, 7], "w", 1) == {7: 1}


@pytest.fixture
def shared(path: Path) -> Generator[tuple[Results, Results]]:
    writer = Results(path, Locking.LOCAL, Sharing.WRITER)
    reader = Results(path, Locking.LOCAL, Sharing.READER)
    yield writer, reader
    reader.close()
    writer.close()


def test_a_reader_pages_in_order_while_the_writer_goes_on(shared: tuple[Results, Results]) -> None:
    writer, reader = shared
    writer.put([answered(index) for index in range(0, 4 * PAGE_ROWS, 2)], epoch=0)
    seen: list[int] = []
    for page in reader.pages():
        seen += [index for index, _, _ in page]
        # Behind what was read, and after it: the reader sees what comes after its place.
        ahead = [seen[-1] + 1] if seen[-1] < 3 * PAGE_ROWS else []
        writer.put([answered(index) for index in (1, seen[-1] - 1, *ahead)], epoch=0)

    assert seen == sorted(set(seen))
    assert set(seen) > set(range(0, 4 * PAGE_ROWS, 2))
    assert reader.totals() == writer.totals()


def test_a_reader_sees_what_was_committed_and_cannot_write(shared: tuple[Results, Results]) -> None:
    writer, reader = shared
    writer.put([answered(1), failed(2)], epoch=0)

    assert tails(reader) == {1: answered(1).tail, 2: failed(2).tail}
    assert reader.failures() == writer.failures()
    with pytest.raises(OperationError):
        reader.put([answered(3)], epoch=0)
    assert writer.totals().done == 2


def test_a_long_read_does_not_keep_the_writer_waiting(shared: tuple[Results, Results]) -> None:
    writer, reader = shared
    writer.put([answered(index) for index in range(3)], epoch=0)
    pages = reader.pages()
    next(pages)

    assert writer.put([answered(index) for index in range(3, 1000)], epoch=0).done == 997
    assert next(pages)[0][0] == 3
