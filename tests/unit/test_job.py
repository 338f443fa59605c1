"""The table of a job's life."""

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.job import FINAL, NEXT, Event, IllegalTransition, State, Totals, advance, running_s

ALL = [(state, event) for state in State for event in Event]
CONTINUING = {Event.CONTINUED, Event.RETRIED}


def test_every_state_can_be_reached_from_the_first() -> None:
    reached = {State.VALIDATING}
    while more := {after for (before, _), after in NEXT.items() if before in reached} - reached:
        reached |= more

    assert reached == set(State)


def test_every_unfinished_state_can_lead_to_every_final_one_in_some_way() -> None:
    for start in set(State) - FINAL - {State.CANCELLING}:
        reached = {start}
        while more := {after for (before, event), after in NEXT.items() if before in reached - FINAL} - reached:
            reached |= more
        assert reached >= FINAL, start


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair in NEXT])
def test_an_allowed_event_leads_where_the_table_says(state: State, event: Event) -> None:
    assert advance(state, event) is NEXT[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair not in NEXT])
def test_an_event_that_is_not_in_the_table_raises_and_changes_nothing(state: State, event: Event) -> None:
    before = dict(NEXT)

    with pytest.raises(IllegalTransition, match=re.escape(event.value)):
        advance(state, event)

    assert before == NEXT


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_final_state_is_left_only_by_resume_and_retry(state: State) -> None:
    leaving = {event for (before, event) in NEXT if before is state}

    assert leaving <= CONTINUING
    assert Event.RETRIED in leaving


def test_a_completed_job_cannot_be_resumed() -> None:
    assert (State.COMPLETED, Event.CONTINUED) not in NEXT


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.TIMED_OUT])
def test_a_job_that_ended_short_goes_on_from_the_queue(state: State) -> None:
    assert advance(state, Event.CONTINUED) is State.QUEUED


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_any_unfinished_job_can_be_cancelled_and_cancelling_again_changes_nothing(state: State) -> None:
    cancelling = advance(state, Event.CANCEL_ASKED)

    assert cancelling is State.CANCELLING
    assert advance(cancelling, Event.CANCEL_ASKED) is State.CANCELLING
    assert advance(cancelling, Event.WORKERS_GONE) is State.CANCELLED


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_finished_job_cannot_be_cancelled(state: State) -> None:
    with pytest.raises(IllegalTransition):
        advance(state, Event.CANCEL_ASKED)


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_a_control_plane_that_stops_ends_no_job(state: State) -> None:
    after = advance(state, Event.CONTROL_STOPPED)

    assert after in {State.QUEUED, State.VALIDATING, State.CANCELLING}


def test_a_job_fails_for_lack_of_a_start_only_once_it_is_suspended() -> None:
    assert {state for state, event in NEXT if event is Event.STARTS_EXHAUSTED} == {State.SUSPENDED}


def test_the_catalog_accepts_exactly_the_states() -> None:
    folder = files("freight.store").joinpath("catalog_migrations")
    sql = "\n".join(step.read_text() for step in sorted(folder.iterdir(), key=lambda step: step.name))
    [listed] = re.findall(r"CHECK \(state IN \(([^)]*)\)\)", sql)

    assert sorted(re.findall(r"'([^']*)'", listed)) == sorted(State)


COUNTS = st.builds(Totals, *([st.integers(0, 10**12)] * 6))


@given(COUNTS, COUNTS)
def test_totals_add_up_field_by_field(one: Totals, other: Totals) -> None:
    both = one.plus(other)

    assert both == other.plus(one)
    assert one.plus(Totals()) == one
    for field in Totals.__slots__:
        assert getattr(both, field) == getattr(one, field) + getattr(other, field)


@pytest.mark.parametrize("state", sorted(set(State) - FINAL - {State.VALIDATING, State.CANCELLING}))
def test_a_job_whose_files_break_fails_in_whatever_state_it_is(state: State) -> None:
    assert advance(state, Event.BROKE) is State.FAILED


@pytest.mark.parametrize("state", [*sorted(FINAL), State.VALIDATING, State.CANCELLING])
def test_a_job_that_is_ending_or_has_ended_cannot_break(state: State) -> None:
    with pytest.raises(IllegalTransition):
        advance(state, Event.BROKE)


def life(*events: tuple[float, Event]) -> list[tuple[float, Event, State]]:
    """Return the events of a new job with the states that they lead to."""
    told: list[tuple[float, Event, State]] = []
    state = State.VALIDATING
    for at, event in events:
        state = advance(state, event)
        told.append((at, event, state))
    return told


BEGUN = ((0.0, Event.ACCEPTED), (10.0, Event.WORKER_GRANTED), (15.0, Event.WORKER_READY))
DONE = ((25.0, Event.LAST_RECORD_DONE), (30.0, Event.OUTPUT_WRITTEN))


@pytest.mark.parametrize(
    ("more", "until", "expected"),
    [
        ((), 15.0, 5.0),
        ((), 20.0, 10.0),
        (DONE, 99.0, 15.0),
        (((20.0, Event.BLOCKED),), 99.0, 10.0),
        (((20.0, Event.BLOCKED), (50.0, Event.UNBLOCKED)), 99.0, 10.0),
        (((20.0, Event.BLOCKED), (50.0, Event.UNBLOCKED), (60.0, Event.WORKER_GRANTED)), 63.0, 13.0),
        (((20.0, Event.WORKERS_LOST),), 99.0, 10.0),
        (((20.0, Event.CANCEL_ASKED),), 99.0, 10.0),
        # The service was killed at 20 and began again at 80: it notes the end of the run at the last sign of it.
        (((20.0, Event.CONTROL_STOPPED), (90.0, Event.WORKER_GRANTED)), 92.0, 12.0),
        ((*DONE, (100.0, Event.RETRIED)), 200.0, 0.0),
        ((*DONE, (100.0, Event.RETRIED), (110.0, Event.WORKER_GRANTED)), 117.0, 7.0),
        (((20.0, Event.TIME_RAN_OUT), (30.0, Event.CONTINUED), (31.0, Event.WORKER_GRANTED)), 34.0, 3.0),
    ],
)
def test_running_time_counts_from_the_last_submission_and_only_what_runs(
    more: tuple[tuple[float, Event], ...], until: float, expected: float
) -> None:
    assert running_s(life(*BEGUN, *more), until) == expected


def test_a_job_that_never_ran_has_run_for_no_time() -> None:
    assert running_s([], 99.0) == 0.0
    assert running_s(life((0.0, Event.ACCEPTED)), 99.0) == 0.0


def test_a_clock_that_was_set_back_takes_nothing_off_the_running_time() -> None:
    assert running_s(life(*BEGUN, (12.0, Event.LAST_RECORD_DONE)), 99.0) == 5.0
    assert running_s(life(*BEGUN), 3.0) == 5.0
