"""What an earlier run left to do: decided from what stands on disk, before anything is touched."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from freight.core.job import FINAL, Event, State
from freight.errors import UserError


class Standing(Enum):
    """What stands at the output: nothing, what the earlier run wrote, or something else."""

    NOTHING = auto()
    OURS = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a run that say how to treat what is there."""

    fresh: bool
    force: bool
    retry_errors: bool


@dataclass(frozen=True, slots=True)
class Earlier:
    """The state folder's job. `same` is what makes two runs the same, by name.

    `answered`: there are answers that a different run would mix with its own. `has_results`: they are still here.
    """

    state: State
    same: dict[str, Any]
    failed: int
    answered: bool
    has_results: bool


@dataclass(frozen=True, slots=True)
class StartOver:
    """Begin anew; `note` says why, where that may surprise."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Go on with the earlier job after these events."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class WriteAgain:
    """All is done; only the output is to be written again, as `note` says."""

    note: str


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """Nothing is to be done; `note` says what is odd about that."""

    note: str = ""


Decision = StartOver | GoOn | WriteAgain | AlreadyDone


def decide(earlier: Earlier | None, same: dict[str, Any], asked: Asked, standing: Standing, shown: str) -> Decision:
    """Return what to do with an earlier run's state; raise UserError where that would mix or destroy something.

    `same` describes the run that is asked for now, `shown` is the output in the user's words.
    """
    if earlier is None or asked.fresh:
        _check_output(asked, standing, shown)
        return StartOver()
    differences = [
        f"{key}: {earlier.same.get(key)!r} before, {value!r} now"
        for key, value in same.items()
        if earlier.same.get(key) != value
    ]
    if differences and earlier.answered:
        raise UserError(
            f"{shown}.freight belongs to another run; what differs:\n  " + "\n  ".join(differences),
            "run the earlier command to go on with it, use --fresh to start over, or choose another output",
        )
    if earlier.state is State.COMPLETED and not differences:
        return _completed(earlier, asked, standing, shown)
    _check_output(asked, standing, shown)
    if differences or earlier.state is State.VALIDATING:
        return StartOver()
    return GoOn(_events(earlier.state, asked))


def _events(state: State, asked: Asked) -> tuple[Event, ...]:
    if state in FINAL:
        return (Event.RETRIED,) if asked.retry_errors else (Event.CONTINUED,)
    stopped = () if state is State.QUEUED else (Event.CONTROL_STOPPED,)
    return (*stopped, Event.RETRIED) if asked.retry_errors else stopped


def _completed(earlier: Earlier, asked: Asked, standing: Standing, shown: str) -> Decision:
    if asked.retry_errors and earlier.failed:
        _check_output(asked, standing, shown)
        return GoOn((Event.RETRIED,))
    if standing is Standing.OURS:
        return AlreadyDone()
    if standing is Standing.OTHER and not asked.force:
        return AlreadyDone(f"{shown} was changed since Freight wrote it")
    gone = f"{shown} was {'gone' if standing is Standing.NOTHING else 'changed'}"
    return WriteAgain(f"{gone} and is written again") if earlier.has_results else StartOver(f"{gone}; running it again")


def _check_output(asked: Asked, standing: Standing, shown: str) -> None:
    if standing is Standing.OTHER and not asked.force:
        raise UserError(
            f"the output {shown} exists and is not Freight's, or was changed since",
            "choose another output, or use --force to replace it",
        )
