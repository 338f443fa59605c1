"""One job's results: a row a record, committed before it is acknowledged."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from freight.core.answer import Line, Tally
from freight.core.job import Totals
from freight.core.record import INTAKE_CODES
from freight.errors import OperationError
from freight.store.database import Database, Sharing, clear_errors, open_database, transaction
from freight.store.folder import Locking

# A result replaces nothing but an error of an earlier epoch: the first answer stays.
_PUT: Final = """
INSERT INTO result (idx, epoch, code, status, message, input_tokens, output_tokens, cached_tokens, cut, tail)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (idx) DO UPDATE SET
    epoch = excluded.epoch, code = excluded.code, status = excluded.status, message = excluded.message,
    input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens,
    cached_tokens = excluded.cached_tokens, cut = excluded.cut, tail = excluded.tail
WHERE result.code IS NOT NULL AND result.epoch < excluded.epoch
"""
_SIZES: Final = "SELECT length(tail) FROM result WHERE idx > ? AND idx < ? ORDER BY idx LIMIT ?"
_PAGE: Final = "SELECT idx, tail, code IS NOT NULL FROM result WHERE idx > ? ORDER BY idx LIMIT ?"
# The length of a blob stands before it: SQLite does not read what is measured.
_LENGTHS: Final = (
    "SELECT idx, length(tail), code IS NOT NULL FROM result WHERE idx >= ? AND idx < ? ORDER BY idx LIMIT ?"
)
_MEASURE: Final = """
SELECT count(*), count(*) FILTER (WHERE ?3 IS NULL OR (code IS NOT NULL) = ?3),
       coalesce(sum(length(tail) + length(idx)) FILTER (WHERE ?3 IS NULL OR (code IS NOT NULL) = ?3), 0)
FROM result WHERE idx >= ?1 AND idx < ?2
"""
# An error that is to run again is no result yet.
_COUNTED: Final = "(code IS NULL OR epoch >= ?1 OR code IN (SELECT value FROM json_each(?2)))"
_TOTALS: Final = f"""
SELECT count(*), count(code), coalesce(sum(cut), 0), coalesce(sum(input_tokens), 0),
       coalesce(sum(output_tokens), 0), coalesce(sum(cached_tokens), 0)
FROM result WHERE {_COUNTED}
"""
_FAILURES: Final = f"""
SELECT code, status, count(*) AS n, min(idx) FROM result WHERE code IS NOT NULL AND {_COUNTED}
GROUP BY code, status ORDER BY n DESC, code, status
"""
_EPOCH: Final = "SELECT epoch FROM result WHERE idx = ?"
_MESSAGE: Final = "SELECT message FROM result WHERE idx = ?"
_SETTLED: Final = f"SELECT idx FROM result WHERE {_COUNTED}"
_FAULTS: Final = (
    "SELECT code, message, tail FROM result WHERE code IN (SELECT value FROM json_each(?)) ORDER BY idx LIMIT ?"
)
# The end of the line of a record that intake refused: its line number in the input.
_NUMBER: Final = re.compile(rb',"line":(\d+)\}\}$')
_ANSWERED: Final = (
    "SELECT EXISTS (SELECT 1 FROM result WHERE code IS NULL OR code NOT IN (SELECT value FROM json_each(?)))"
)
_SUSPECTS: Final = "SELECT idx, deaths FROM suspect ORDER BY idx"
_ACCUSE: Final = """
INSERT INTO suspect (idx, deaths) VALUES (?, 1)
ON CONFLICT (idx) DO UPDATE SET deaths = min(3, deaths + 1)
"""
_DEATH: Final = "INSERT INTO death (worker, number) VALUES (?, ?) ON CONFLICT DO NOTHING"
_CLEAR: Final = "DELETE FROM suspect WHERE idx = ?"

# The name of the file, in its job's folder.
RESULTS_DB: Final = "results.db"
PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 8_000_000
_NO_END: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Failure:
    """How many records failed in one way, and what one of them says. `status` is 0 where no engine answered."""

    code: str
    status: int
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A line of the input that intake refused: its number from 1, and what is wrong with it."""

    line: int | None
    code: str
    message: str


class Results:
    """The results of one job. Not for several threads at once."""

    def __init__(self, path: Path, locking: Locking, sharing: Sharing = Sharing.ALONE) -> None:
        self._connection: Database = open_database(path, "results_migrations", locking, sharing)
        with clear_errors(path):
            self._has_suspects = bool(self.suspects())

    def close(self) -> None:
        """Close the database; what was committed is on disk."""
        self._connection.close()

    def put(self, lines: Iterable[Line], epoch: int, retried: int = 0) -> Totals:
        """Commit the lines and return what that changed in `totals(retried)`: late and double ones change nothing."""
        tally = Tally()
        with transaction(self._connection):
            for line in lines:
                self._put_one(line, epoch, retried, tally)
        return tally.totals()

    def _put_one(self, line: Line, epoch: int, retried: int, tally: Tally) -> None:
        before = self._connection.total_changes()
        # In the first epoch there is nothing that a result could replace.
        replaced = self._connection.execute(_EPOCH, (line.index,)).fetchone() if epoch else None
        self._connection.execute(
            _PUT,
            (
                line.index, epoch, line.code, line.status, line.message, line.input_tokens,
                line.output_tokens, line.cached_tokens, int(line.cut), line.tail,
            ),
        )  # fmt: skip
        if self._connection.total_changes() == before:
            return
        tally.add(line)
        if self._has_suspects:
            self._connection.execute(_CLEAR, (line.index,))
        # What was replaced was a failed record: where it was counted, it was so as done and failed.
        if replaced is not None and replaced[0] >= retried:
            tally.took_failed()

    def accuse(self, indices: Sequence[int], worker: str, number: int) -> dict[int, int]:
        """Charge a worker's death number `number` (from 1) to each record, on disk; return how many each has now.

        A death that was charged before is not charged again.
        """
        self._has_suspects = True
        with transaction(self._connection):
            before = self._connection.total_changes()
            self._connection.execute(_DEATH, (worker, number))
            if self._connection.total_changes() > before:
                self._connection.executemany(_ACCUSE, [(index,) for index in indices])
        return {index: deaths for index, deaths in self.suspects().items() if index in set(indices)}

    def suspects(self) -> dict[int, int]:
        """Return the records to which deaths of a model server are charged, and how many."""
        return {index: deaths for index, deaths in self._connection.execute(_SUSPECTS)}

    def totals(self, retried: int = 0) -> Totals:
        """Return the totals over all rows but the errors of epochs before `retried`, which are to run again."""
        row = self._connection.execute(_TOTALS, (retried, _INTAKE_JSON)).fetchone()
        assert row is not None
        return Totals(*row)

    def failures(self, retried: int = 0) -> list[Failure]:
        """Return the failures by kind, the commonest first, but for those of epochs before `retried`."""
        found = list(self._connection.execute(_FAILURES, (retried, _INTAKE_JSON)))
        return [Failure(code, status, count, self._one(_MESSAGE, example)) for code, status, count, example in found]

    def faults(self, most: int) -> list[Fault]:
        """Return the first lines of the input that intake refused, `most` of them at most, in order."""
        found = self._connection.execute(_FAULTS, (_INTAKE_JSON, most))
        return [Fault(_line_number(tail), code, message) for code, message, tail in found]

    def has_answers(self) -> bool:
        """Return whether any record went to an engine and came back."""
        return bool(self._one(_ANSWERED, _INTAKE_JSON))

    def _one(self, statement: str, *bindings: object) -> Any:
        row = self._connection.execute(statement, bindings).fetchone()
        assert row is not None
        return row[0]

    def settled(self, records: int, retried: int) -> NDArray[numpy.bool_]:
        """Return, for each of `records` indices, whether it needs no run.

        Answers, intake's refusals and errors since epoch `retried` are settled; earlier errors are not.
        """
        done = numpy.zeros(records, dtype=numpy.bool_)
        for (index,) in self._connection.execute(_SETTLED, (retried, _INTAKE_JSON)):
            done[index] = True
        return done

    def version(self) -> int:
        """Return a number that is another one once another connection has changed anything."""
        return int(str(self._connection.pragma("data_version")))

    def pages(
        self, begin: int = 0, end: int = _NO_END, version: int | None = None
    ) -> Iterator[list[tuple[int, bytes, int]]]:
        """Yield (index, rest of the line, whether it failed) from `begin` to `end` in order, in pages of bounded size.

        Raises OperationError where the results are not at `version` any more; None reads them as they become.
        """
        last = begin - 1
        while count := self._page_rows(last, end):
            page = list(self._connection.execute(_PAGE, (last, count)))
            if version is not None and self.version() != version:
                raise OperationError("the results changed while they were read")
            yield page
            last = page[-1][0]

    def lengths(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (index, bytes of the rest of the line, whether it failed) from `begin` to `end`, in index order."""
        while page := list(self._connection.execute(_LENGTHS, (begin, end, PAGE_ROWS))):
            yield from page
            begin = page[-1][0] + 1

    def measure(self, begin: int, end: int, failed: bool | None) -> tuple[int, int, int]:
        """Return how many rows there are from `begin` to `end`, how many of them failed or did not (None: all), and
        how many bytes the rests of the lines and the indices of those have.
        """
        row = self._connection.execute(_MEASURE, (begin, end, failed)).fetchone()
        assert row is not None
        return row[0], row[1], row[2]

    def _page_rows(self, last: int, end: int) -> int:
        """Return how many rows after index `last`, before `end`, make the next page: one at least, if there are any."""
        size = count = 0
        for (length,) in self._connection.execute(_SIZES, (last, end, PAGE_ROWS)):
            size += length
            if count and size > PAGE_BYTES:
                break
            count += 1
        return count


def _line_number(tail: bytes) -> int | None:
    found = _NUMBER.search(tail)
    return int(found[1]) if found else None


_INTAKE_JSON: Final = "[" + ",".join(f'"{code}"' for code in INTAKE_CODES) + "]"
