"""`freight batch wait`: watching a job until it has ended."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from freight.cli.parameters import Duration, job_argument, service_options
from freight.cli.progress import RunConsole, duration
from freight.cli.service import Service
from freight.client.calls import ConnectionLost, pauses
from freight.core.job import FINAL, State, Totals
from freight.core.progress import Outcome, Progress
from freight.core.view import JobStatus
from freight.errors import FreightError, Interrupted, NoServer, NoSuchJob

if TYPE_CHECKING:
    from freight.client.sync import Client

# So long is a service that went away given to come back.
AWAY_S: Final = 60.0


class WaitedOut(FreightError):
    """The time that was given to wait ran out; the job goes on."""

    exit_code = 124


@click.command()
@job_argument
@click.option("--timeout", type=Duration(), metavar="D", help="Wait no longer than this; the job goes on.")
@click.option("--fail-on-errors", is_flag=True, help="Exit with 6 when any record failed.")
@service_options(starts=True)
def wait(name: str, timeout: float | None, fail_on_errors: bool, service: Service) -> int:
    """Wait until the job NAME has ended, and say how.

    Exit status: 0 completed; 1 failed, cancelled or timed out; 3 no such job; 6 records failed and
    --fail-on-errors; 124 --timeout ran out; 130 interrupted. In the last two cases the job goes on.
    """
    with service.connect() as client:
        return wait_and_report(client, name, timeout, fail_on_errors)


def wait_and_report(client: "Client", name: str, timeout: float | None, fail_on_errors: bool) -> int:
    """Show a job's progress until it has ended and say how it ended; return the exit status."""
    console = RunConsole()
    with console:
        status = follow(client, name, timeout, lambda seen: console.show(progress_of(seen)), console.note)
    outcome = outcome_of(status)
    where = f"freight batch results {status.name}"
    console.summary(outcome, where, status.ran_s, f"freight batch resume {status.name} then runs what is left")
    return outcome.exit_status(fail_on_errors)


def follow(
    client: "Client", name: str, timeout: float | None, show: Callable[[JobStatus], None], note: Callable[[str], None]
) -> JobStatus:
    """Call `show` with each look at a job until it is final; return the last.

    Raises WaitedOut, Interrupted, NoSuchJob when it is deleted meanwhile, and NoServer when the service went away
    and did not come back.
    """
    until = None if timeout is None else time.monotonic() + timeout
    shown = name
    try:
        status = client.job(name)
        shown, watch = status.name, _Watch(client, status, note)
        for pause in pauses():
            show(status)
            if status.state in FINAL:
                return status
            left = pause if until is None else until - time.monotonic()
            if left <= 0:
                raise _waited_out(status, timeout or 0.0)
            time.sleep(min(pause, left))
            status = watch.look()
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; job {shown} goes on", f"freight batch wait {shown}") from None
    raise AssertionError("pauses never end")


class _Watch:
    """Looks at a job, also while the service is away for a while."""

    def __init__(self, client: "Client", status: JobStatus, note: Callable[[str], None]) -> None:
        self._client = client
        self._status = status
        self._note = note
        self._away_since: float | None = None

    def look(self) -> JobStatus:
        """Return how the job stands, as far as is known."""
        name = self._status.name
        try:
            # The name may have gone to another job by now.
            self._status = self._client.job(self._status.id)
        except NoSuchJob:
            raise NoSuchJob(f"job {name} was deleted while it was waited for", "freight batch list") from None
        except (NoServer, ConnectionLost) as error:
            self._stay_away(error)
            return self._status
        if self._away_since is not None:
            self._note("the service is back")
            self._away_since = None
        return self._status

    def _stay_away(self, error: FreightError) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._note(f"the service at {self._client.server} went away; waiting {AWAY_S:g} s for it to come back")
        elif now - self._away_since > AWAY_S:
            name = self._status.name
            start = "see that it runs" if self._client.is_named else "freight serve --background"
            raise NoServer(
                f"no Freight service answers at {self._client.server} any more; job {name} is kept and goes on when "
                "it is started again",
                f"{start}; freight batch wait {name}",
            ) from error


def _waited_out(status: JobStatus, timeout: float) -> WaitedOut:
    done = f"{status.done} of {status.records} records done" if status.records else "no record done"
    return WaitedOut(
        f"job {status.name} is still {status.state} after {duration(timeout)}, {done}; it goes on",
        f"freight batch wait {status.name}",
    )


def progress_of(status: JobStatus) -> Progress:
    """Return how a job stands, as the console shows it."""
    return Progress(
        state=status.state,
        reason=status.reason,
        total=status.records or 0,
        totals=_totals(status),
        input_rate=status.input_rate,
        output_rate=status.output_rate,
        record_rate=status.record_rate,
        in_flight=status.in_flight,
    )


def outcome_of(status: JobStatus) -> Outcome:
    """Return how a job that is final ended."""
    state = State(status.state)
    reason = status.reason if state in (State.FAILED, State.TIMED_OUT) else ""
    return Outcome(state, reason, status.records or 0, _totals(status), tuple(status.failures))


def _totals(status: JobStatus) -> Totals:
    return Totals(
        status.done, status.failed, status.cut, status.input_tokens, status.output_tokens, status.cached_tokens
    )
