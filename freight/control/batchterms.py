"""What an OpenAI batch keeps in its job, and what its input is refused for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from freight.control.intake import Index, OverLimit, Problem
from freight.core.openaibatch import EMPTY_FILE, ENDPOINTS, FILE_TOO_LARGE
from freight.core.openaifile import OPENAI
from freight.core.record import Rules
from freight.errors import FreightError, UserError
from freight.store.rows import JobRow


class Refusal(msgspec.Struct, frozen=True):
    """Why a batch's input as a whole cannot be run."""

    code: str
    message: str


class BatchTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a batch was asked for with, beyond what every job is; the rest is found when it is made.

    `window_s` is the completion window in seconds; `is_enforced` says that the batch expires at its end. `refusal`
    was found before the input was read, or when that was over.
    """

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: float
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    is_enforced: bool = False
    refusal: Refusal | None = None

    def more(self) -> dict[str, Any]:
        """Return this as a job keeps it."""
        return msgspec.to_builtins(self)


def terms_of(row: JobRow) -> BatchTerms:
    """Return what a batch's job keeps about the batch."""
    return msgspec.convert(row.spec["more"], BatchTerms)


def deadline_of(row: JobRow) -> float | None:
    """Return when a job expires, in seconds of the clock of day; None for one that does not.

    One that was resumed, or whose errors were retried, does no more: somebody wanted it to go on.
    """
    if row.api != OPENAI or row.epoch:
        return None
    terms = terms_of(row)
    return row.created_at + terms.window_s if terms.is_enforced else None


class BatchRefused(UserError):
    """What is wrong with a batch's input as a whole, by the code that the OpenAI API gives it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.code = refusal.code


class LinesRefused(UserError):
    """Lines of a batch's input are bad. Which, and why, is in the job's results."""


@dataclass(slots=True)
class Faults:
    """How many lines are bad, and the first of them."""

    count: int = 0
    first: Problem | None = None

    def add(self, problems: Sequence[Problem]) -> None:
        """Count bad lines, in whichever order they are found."""
        self.count += len(problems)
        self.first = min(problems if self.first is None else [self.first, *problems], key=lambda each: each.number)


def rules_for(row: JobRow, rules: Rules) -> Rules:
    """Return the rules by which a job's lines are checked: each of a batch is for the batch's endpoint."""
    return replace(rules, endpoint=ENDPOINTS[terms_of(row).endpoint]) if row.api == OPENAI else rules


def check_read(row: JobRow, index: Index, faults: Faults) -> None:
    """Raise BatchRefused for a batch without any line, or that was known to be refused, and LinesRefused for bad lines.

    What is known is told only now, so that all that is wrong with a file is told at once.
    """
    if row.api != OPENAI:
        return
    refusal = terms_of(row).refusal if index.records else Refusal(EMPTY_FILE, "the input file has no request in it")
    if refusal is not None:
        raise BatchRefused(refusal)
    if faults.first is not None:
        first = faults.first
        how_many = f"{faults.count} of {index.records} lines are" if faults.count > 1 else "a line is"
        words = f"line {first.number}: {first.rejection.code}: {first.rejection.message}"
        raise LinesRefused(f"{how_many} not valid; {words}", "correct the file, upload it and make a new batch")


def with_refusal(row: JobRow, error: FreightError) -> dict[str, Any] | None:
    """Return the spec of a batch's job with what its input was refused for; None where that need not be kept."""
    if row.api != OPENAI or isinstance(error, LinesRefused):
        return None
    code = FILE_TOO_LARGE if isinstance(error, OverLimit) else error.code
    terms = msgspec.structs.replace(terms_of(row), refusal=Refusal(code, error.message))
    return {**row.spec, "more": terms.more()}
