"""What is done with an earlier run's state: a table of what stands on disk, what is asked, and what follows."""

from dataclasses import replace

import pytest

from freight.control.continuation import (
    AlreadyDone,
    Asked,
    Decision,
    Earlier,
    GoOn,
    Standing,
    StartOver,
    WriteAgain,
    decide,
)
from freight.core.job import Event, State
from freight.errors import UserError

SAME = {"input (SHA-256)": "abc", "engine": "endpoint"}
OTHER = {**SAME, "engine": "llamacpp"}
PLAIN = Asked(fresh=False, force=False, retry_errors=False)
FRESH, FORCE, RETRY = replace(PLAIN, fresh=True), replace(PLAIN, force=True), replace(PLAIN, retry_errors=True)
DONE = Earlier(State.COMPLETED, SAME, failed=0, answered=True, has_results=False)
WITH_ERRORS = replace(DONE, failed=2, has_results=True)
STOPPED = Earlier(State.QUEUED, SAME, failed=0, answered=True, has_results=True)


def decided(
    earlier: Earlier | None,
    standing: Standing = Standing.NOTHING,
    asked: Asked = PLAIN,
    same: dict[str, str] = SAME,
) -> Decision:
    return decide(earlier, same, asked, standing, "out.jsonl")


@pytest.mark.parametrize(
    ("earlier", "standing", "asked", "expected"),
    [
        (None, Standing.NOTHING, PLAIN, StartOver()),
        (None, Standing.OTHER, FORCE, StartOver()),
        (DONE, Standing.OURS, PLAIN, AlreadyDone()),
        (DONE, Standing.OURS, RETRY, AlreadyDone()),
        (DONE, Standing.OURS, FRESH, StartOver()),
        (DONE, Standing.OTHER, PLAIN, AlreadyDone("out.jsonl was changed since Freight wrote it")),
        (DONE, Standing.NOTHING, PLAIN, StartOver("out.jsonl was gone; running it again")),
        (DONE, Standing.OTHER, FORCE, StartOver("out.jsonl was changed; running it again")),
        (WITH_ERRORS, Standing.OURS, PLAIN, AlreadyDone()),
        (WITH_ERRORS, Standing.OURS, RETRY, GoOn((Event.RETRIED,))),
        (WITH_ERRORS, Standing.NOTHING, PLAIN, WriteAgain("out.jsonl was gone and is written again")),
        (WITH_ERRORS, Standing.OTHER, FORCE, WriteAgain("out.jsonl was changed and is written again")),
        (STOPPED, Standing.NOTHING, PLAIN, GoOn(())),
        (STOPPED, Standing.NOTHING, RETRY, GoOn((Event.RETRIED,))),
        (replace(STOPPED, state=State.RUNNING), Standing.NOTHING, PLAIN, GoOn((Event.CONTROL_STOPPED,))),
        (replace(STOPPED, state=State.FINALIZING), Standing.OURS, PLAIN, GoOn((Event.CONTROL_STOPPED,))),
        (replace(STOPPED, state=State.TIMED_OUT), Standing.OURS, PLAIN, GoOn((Event.CONTINUED,))),
        (replace(STOPPED, state=State.FAILED), Standing.NOTHING, RETRY, GoOn((Event.RETRIED,))),
        (replace(STOPPED, state=State.VALIDATING, answered=False), Standing.NOTHING, PLAIN, StartOver()),
    ],
)
def test_the_state_and_the_output_decide(
    earlier: Earlier | None, standing: Standing, asked: Asked, expected: Decision
) -> None:
    assert decided(earlier, standing, asked) == expected


@pytest.mark.parametrize("earlier", [None, STOPPED, replace(STOPPED, state=State.TIMED_OUT)])
@pytest.mark.parametrize("asked", [PLAIN, FRESH])
def test_an_output_that_is_not_ours_is_refused_before_anything_is_forgotten(
    earlier: Earlier | None, asked: Asked
) -> None:
    with pytest.raises(UserError) as refused:
        decided(earlier, Standing.OTHER, asked)
    assert "out.jsonl" in refused.value.message
    assert "--force" in str(refused.value.hint)


def test_retrying_errors_into_a_changed_output_is_refused() -> None:
    with pytest.raises(UserError):
        decided(WITH_ERRORS, Standing.OTHER, RETRY)


@pytest.mark.parametrize("earlier", [DONE, WITH_ERRORS, STOPPED])
def test_another_run_is_refused_and_the_difference_named(earlier: Earlier) -> None:
    with pytest.raises(UserError, match="engine: 'endpoint' before, 'llamacpp' now"):
        decided(earlier, Standing.OURS, same=OTHER)


def test_another_run_starts_over_where_there_is_no_answer_to_mix() -> None:
    assert decided(replace(STOPPED, answered=False), same=OTHER) == StartOver()


def test_fresh_takes_no_notice_of_differences() -> None:
    assert decided(STOPPED, Standing.OURS, FRESH, OTHER) == StartOver()
