"""Checking every line of the input once, and noting where each record stands."""

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy
from numpy.typing import NDArray

from freight.control.inputs import InputFile, PhysicalLine, physical_lines, reason
from freight.control.prompts import Prompts
from freight.core.answer import Line, error_line
from freight.core.order import NO_ORDER
from freight.core.prompt import prompt_of
from freight.core.record import Endpoint, Rejection, Request, Rules, check_line, custom_id_of
from freight.errors import Interrupted, OperationError, UserError

KEY_BYTES: Final = 16
_NO_KEY: Final = bytes(KEY_BYTES)
_BULK: Final = 1000
_ARRAYS: Final = ("offsets", "lengths", "numbers", "endpoints")
# Arrays that are empty where they say nothing. Indexes of earlier versions are without them.
_OPTIONAL: Final = ("order", "shared", "firsts")
_SPLIT: Final = "split the file, or have the limit raised"


class OverLimit(UserError):
    """The file as a whole is larger than is accepted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that is accepted; None for no limit. `record_bytes` counts a line without its line end."""

    record_bytes: int
    records: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What intake is to find out besides: the best order of dispatch, and which bodies are equal."""

    order: bool = False
    dedupe: bool = False


NO_WISHES: Final = Wishes()


@dataclass(frozen=True, slots=True)
class Index:
    """Where each record stands, in arrays of one element a record (blank lines are none).

    `offsets` (int64) and `lengths` (uint32) are in bytes, `numbers` (uint32) are line numbers from 1,
    `endpoints` (uint8) are Endpoint values, 0 for a record that intake rejected. `sha256` is that of the file.

    `order` (uint32): the good records in the order of dispatch, empty for that of the file; `shared` (uint16): the
    blocks of prompt that each of them shares with the one before. `firsts` (uint32): by record, the first that has the
    same body (a rejected record has itself); empty where all are to run.
    """

    sha256: str
    offsets: NDArray[numpy.int64]
    lengths: NDArray[numpy.uint32]
    numbers: NDArray[numpy.uint32]
    endpoints: NDArray[numpy.uint8]
    order: NDArray[numpy.uint32] = field(default_factory=lambda: numpy.empty(0, numpy.uint32))
    shared: NDArray[numpy.uint16] = field(default_factory=lambda: numpy.empty(0, numpy.uint16))
    firsts: NDArray[numpy.uint32] = field(default_factory=lambda: numpy.empty(0, numpy.uint32))

    @property
    def records(self) -> int:
        """The number of records, rejected ones included."""
        return len(self.offsets)

    def save(self, path: Path) -> None:
        """Write the arrays to `path`, on disk when this returns."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            arrays = {name: getattr(self, name) for name in (*_ARRAYS, *_OPTIONAL)}
            numpy.savez(file, sha256=numpy.array(self.sha256), **arrays)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> "Index":
        """Return what was saved at `path`; raise OperationError when it cannot be read."""
        try:
            with numpy.load(path, allow_pickle=False) as saved:
                more = {name: saved[name] for name in _OPTIONAL if name in saved}
                return cls(str(saved["sha256"]), *(saved[name] for name in _ARRAYS), **more)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise OperationError(
                f"the index of the job's input, {path}, is gone or damaged", "submit the input again, as another job"
            ) from error

    def endpoints_used(self) -> frozenset[Endpoint]:
        """Return the endpoints that good records use."""
        return frozenset(endpoint for endpoint in Endpoint if (self.endpoints == endpoint).any())


@dataclass(frozen=True, slots=True)
class Problem:
    """A bad line: the record's index, its line number, and what is wrong."""

    index: int
    number: int
    rejection: Rejection

    def line(self) -> Line:
        """Return the line that the record gets in the results."""
        return error_line(
            self.index, self.rejection.custom_id, self.rejection.code, self.rejection.message, self.number
        )


class _Scan:
    def __init__(self, rules: Rules, on_problems: Callable[[list[Problem]], None], wishes: Wishes) -> None:
        self._rules = rules
        self._on_problems = on_problems
        self._problems: list[Problem] = []
        self.offsets, self.lengths = array("q"), array("I")
        self.numbers, self.endpoints = array("I"), bytearray()
        self.keys = bytearray()
        self.prompts = Prompts() if wishes.order else None
        self.bodies = bytearray() if wishes.dedupe else None

    def add(self, line: PhysicalLine, limit: int) -> None:
        index = len(self.offsets)
        self.offsets.append(line.offset)
        self.lengths.append(min(line.length, 0xFFFFFFFF))
        self.numbers.append(line.number)
        if line.text is None:
            result = Rejection("payload_too_large", f"the line has {line.length} bytes; the limit is {limit}")
        else:
            result = check_line(line.text, self._rules)
        if isinstance(result, Rejection):
            self.endpoints.append(0)
            worded = Rejection(result.code, reason(line, result), result.custom_id, result.column, result.key)
            self.reject(Problem(index, line.number, worded))
        else:
            self.endpoints.append(result.endpoint)
        self.keys += result.key or _NO_KEY
        if self.prompts is not None or self.bodies is not None:
            self._look_further(line.text or b"", result if isinstance(result, Request) else None)

    def _look_further(self, line: bytes, request: Request | None) -> None:
        if self.prompts is not None:
            prompt = prompt_of(line, request) if request else None
            self.prompts.add(line, prompt)
        if self.bodies is not None:
            asked = bytes((request.endpoint,)) + request.raw_body if request else b""
            self.bodies += hashlib.sha256(asked).digest()[:KEY_BYTES]

    def reject(self, problem: Problem) -> None:
        self._problems.append(problem)
        if len(self._problems) >= _BULK:
            self.flush()

    def flush(self) -> None:
        if self._problems:
            self._on_problems(self._problems)
            self._problems = []


def scan(
    file: InputFile,
    rules: Rules,
    limits: Limits,
    on_problems: Callable[[list[Problem]], None],
    stopped: Callable[[], bool] = lambda: False,
    wishes: Wishes = NO_WISHES,
) -> Index:
    """Check every line and return where the records stand; bad ones go to `on_problems` in bulk.

    Raises OverLimit for a file over a limit, Interrupted once `stopped` returns True, and OperationError
    when the file changes meanwhile.
    """
    if limits.file_bytes is not None and file.size > limits.file_bytes:
        raise OverLimit(
            f"{file.shown} has {file.size} bytes; the limit (limits.file_bytes) is {limits.file_bytes}", _SPLIT
        )
    digest = hashlib.sha256()

    def seen(chunk: bytes) -> None:
        digest.update(chunk)
        # By the piece and not by the line, which may be endless.
        if stopped():
            raise Interrupted("interrupted while checking the input")

    found = _Scan(rules, on_problems, wishes)
    for line in physical_lines(file.reader(), limits.record_bytes, seen):
        if not line.is_blank():
            found.add(line, limits.record_bytes)
        if limits.records is not None and len(found.offsets) > limits.records:
            raise OverLimit(f"{file.shown} has more than {limits.records} records, the limit (limits.records)", _SPLIT)
    file.check_unchanged()
    _reject_duplicates(file, found)
    found.flush()
    found.keys.clear()
    offsets = numpy.frombuffer(found.offsets, dtype=numpy.int64)
    endpoints = numpy.frombuffer(bytes(found.endpoints), dtype=numpy.uint8)
    good = numpy.flatnonzero(endpoints)
    order = found.prompts.order(file, offsets, good, stopped) if found.prompts else NO_ORDER
    more = {} if found.bodies is None else {"firsts": _firsts(_keys(found.bodies), good)}
    return Index(
        digest.hexdigest(),
        offsets,
        numpy.frombuffer(found.lengths, dtype=numpy.uint32),
        numpy.frombuffer(found.numbers, dtype=numpy.uint32),
        endpoints,
        order.records,
        order.shared,
        **more,
    )


def _keys(digests: bytearray) -> NDArray[numpy.uint64]:
    return numpy.frombuffer(bytes(digests), dtype=numpy.uint64).reshape(-1, 2)


def _firsts(keys: NDArray[numpy.uint64], good: NDArray[numpy.int64]) -> NDArray[numpy.uint32]:
    """Return, by record, the first of the `good` ones with the same key; the record itself where it is none of them."""
    firsts = numpy.arange(len(keys), dtype=numpy.uint32)
    keys = keys[good]
    # The sort is stable: the first of a run of equal keys is the first in the file.
    placed = numpy.lexsort((keys[:, 1], keys[:, 0]))
    differs = numpy.any(keys[placed][1:] != keys[placed][:-1], axis=1)
    begins = numpy.flatnonzero(numpy.append(True, differs)[: len(placed)])
    sizes = numpy.diff(begins, append=len(placed))
    firsts[good[placed]] = numpy.repeat(good[placed[begins]], sizes)
    return firsts


def _reject_duplicates(file: InputFile, found: _Scan) -> None:
    """Reject the second and later uses of a custom_id. Digests of 128 bits do not collide by chance."""
    for index, first in _repeats(_keys(found.keys)):
        if not found.endpoints[index]:
            continue  # It is rejected already.
        found.endpoints[index] = 0
        token = custom_id_of(file.read(found.offsets[index], found.lengths[index]))
        message = f"custom_id is also used on line {found.numbers[first]}"
        found.reject(Problem(index, found.numbers[index], Rejection("duplicate_custom_id", message, token)))


def _repeats(keys: NDArray[numpy.uint64]) -> Iterable[tuple[int, int]]:
    """Yield (index, index of the first record with that key) for each later use of a key."""
    order = numpy.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    same = numpy.all(ordered[1:] == ordered[:-1], axis=1) & numpy.any(ordered[1:] != 0, axis=1)
    first = 0
    for position in numpy.flatnonzero(same):
        # The sort is stable: the first of a run of equal keys is the first in the file.
        if position == 0 or not same[position - 1]:
            first = int(order[position])
        yield int(order[position + 1]), first


def sha256_of(file: InputFile, stopped: Callable[[], bool] = lambda: False) -> str:
    """Return the SHA-256 of the whole file."""
    digest = hashlib.sha256()
    reader = file.reader()
    while chunk := reader.read(1 << 20):
        digest.update(chunk)
        if stopped():
            raise Interrupted("interrupted while reading the input")
    return digest.hexdigest()
