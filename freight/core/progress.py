"""How a job stands, and how it ended: what the command line shows of a run, here or in a service."""

from dataclasses import dataclass
from typing import Protocol

from freight.core.job import State, Totals


class FailureCount(Protocol):
    """How many records failed in one way, and what one of them says. `status` is 0 where no engine answered."""

    @property
    def code(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def example(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How a job stands, for showing. Rates are tokens a second over the last half minute."""

    state: str
    reason: str
    total: int
    totals: Totals
    input_rate: float
    output_rate: float
    record_rate: float
    in_flight: int

    def eta_s(self) -> float | None:
        """Return the seconds left at the present rate; None when that says nothing."""
        left = self.total - self.totals.done
        return left / self.record_rate if self.record_rate > 0 and left else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the job's state and reason, its counts, and its failures, the commonest first.

    `already_done`: an earlier run had finished it; `note` says what is odd about that.
    """

    state: State
    reason: str
    total: int
    totals: Totals
    failures: tuple[FailureCount, ...] = ()
    already_done: bool = False
    note: str = ""

    def exit_status(self, fail_on_errors: bool) -> int:
        """Return the exit status that the outcome has for a shell."""
        if self.state is not State.COMPLETED:
            return 1
        return 6 if fail_on_errors and self.totals.failed else 0
