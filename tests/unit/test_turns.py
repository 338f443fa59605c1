"""Users' turns in the queue, and how many requests they may make."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.control.roster import Roster
from freight.core.account import Account, Role
from freight.core.bucket import BURST_S, Bucket, Buckets
from freight.core.job import State
from freight.errors import (
    TooMany,
)
from freight.store.rows import JobRow
from tests.unit.services import Office

ALICE = Account("alice")
BOB = Account("bob")
ADMIN = Account("root-of-all", Role.ADMIN)


def test_bucket_gives_a_burst_and_then_a_steady_rate() -> None:
    bucket = Bucket(10 * BURST_S, 0.0)
    assert [bucket.take(10, 0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.take(10, 0.0) == pytest.approx(0.1)
    assert bucket.take(10, 0.1) == 0.0
    assert bucket.take(10, 0.1) > 0


@given(st.lists(st.floats(0, 3), max_size=300), st.integers(1, 50))
def test_no_more_than_the_rate_is_let_through(pauses: list[float], rate: int) -> None:
    buckets, now, taken = Buckets(rate), 0.0, 0
    for pause in pauses:
        now += pause
        taken += buckets.take("alice", now) == 0.0
    assert taken <= rate * BURST_S + rate * now + 1e-6


def test_buckets_of_those_who_have_stopped_asking_are_forgotten() -> None:
    buckets = Buckets(1)
    for number in range(5000):
        assert buckets.take(f"user-{number}", float(number)) == 0.0
    assert len(buckets._of) <= 1001


def test_users_requests_are_limited_each_for_themselves_and_the_owners_not(office: Office) -> None:
    office.configure("[limits]\nrequests = 1\n")

    async def scenario() -> None:
        accounts = office.service.accounts
        for _ in range(2):
            accounts.admit(ALICE)
        with pytest.raises(TooMany, match=r"limits\.requests") as refused:
            accounts.admit(ALICE)
        assert refused.value.retry_after_s is not None and 0 < refused.value.retry_after_s <= 1
        accounts.admit(BOB)
        for _ in range(100):
            accounts.admit(accounts.owner)

    office.run(scenario)


# Turns.


def entry(number: int, user: str, priority: int = 0, at: float | None = None) -> Any:
    """Return a job of a roster."""
    created_at = float(number) if at is None else at
    row = JobRow(
        f"{number:05}", State.QUEUED, "", 0, 0, created_at, {}, 1, None, name=f"j{number}", priority=priority, user=user
    )
    return SimpleNamespace(row=row)


def roster(waiting: list[Any], running: list[Any] | None = None) -> Roster:
    made = Roster()
    made.waiting = {job.row.id: job for job in waiting}
    made.open = {job.row.id: job for job in running or []}
    return made


def order(of: Roster) -> list[str]:
    """Return the users of the waiting jobs, in the order in which they have their turns."""
    return [job.row.user for job in of.in_turn() if job.row.id in of.waiting]


def test_one_users_jobs_are_in_the_order_in_which_they_came() -> None:
    jobs = [entry(number, "a", priority=number % 2) for number in range(9)]
    of = roster(jobs[::2][::-1], jobs[1::2])
    assert [job.row.id for job in of.in_turn()] == [f"{n:05}" for n in (1, 3, 5, 7, 0, 2, 4, 6, 8)]


def test_users_take_turns() -> None:
    assert order(roster([entry(n, user) for n, user in enumerate("aaabbc")])) == list("abcaba")


def test_user_with_the_fewest_running_jobs_is_first() -> None:
    waiting = [entry(n, user) for n, user in enumerate("aaabbb")]
    running = [entry(10 + n, user) for n, user in enumerate("aab")]
    assert order(roster(waiting, running)) == list("bababa")
    assert order(roster(waiting, running[:2])) == list("bbbaaa")


def test_priority_goes_before_turns() -> None:
    assert order(roster([entry(0, "a"), entry(1, "a"), entry(2, "b", priority=-1)])) == ["a", "a", "b"]


def test_thousand_jobs_of_one_user_do_not_delay_anothers_first() -> None:
    of = roster([entry(number, "a") for number in range(1000)])
    served: list[str] = []
    for step in range(20):
        if step == 10:
            of.waiting["99999"] = entry(99_999, "b")
        first = next(job for job in of.in_turn() if job.row.id in of.waiting)
        del of.waiting[first.row.id]
        of.open = {first.row.id: first}
        served.append(first.row.user)
        of.in_turn()
        of.open = {}  # It has ended, and all have as few running jobs as the others.
    assert served.index("b") == 10


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_user_starves(counts: list[int], devices: int, chance: Any) -> None:
    of, arriving = Roster(), deque[Any]()
    jobs = [user for user, count in enumerate(counts) for _ in range(count)]
    chance.shuffle(jobs)
    arriving.extend(entry(number, f"u{user}") for number, user in enumerate(jobs))
    passed_by: Counter[str] = Counter()
    while arriving or of.waiting or of.open:
        for _ in range(chance.randint(0, 3)):
            if arriving:
                job = arriving.popleft()
                of.waiting[job.row.id] = job
        if of.open and chance.random() < 0.6:
            del of.open[chance.choice(sorted(of.open))]
        running = Counter(job.row.user for job in of.open.values())
        for job in [job for job in of.in_turn() if job.row.id in of.waiting]:
            if len(of.open) >= devices:
                break
            fewest = min(running[each.row.user] for each in of.waiting.values())
            assert running[job.row.user] == fewest, "somebody with fewer running jobs waits"
            oldest = min(each.row.id for each in of.waiting.values() if each.row.user == job.row.user)
            assert job.row.id == oldest, "a user's jobs are served in order"
            del of.waiting[job.row.id]
            of.open[job.row.id] = job
            running[job.row.user] += 1
            idle = {each.row.user for each in of.waiting.values() if not running[each.row.user]}
            passed_by = Counter({user: passed_by[user] + 1 for user in idle})
            # Who has nothing running waits for one turn of each of the others.
            assert all(count < len(counts) for count in passed_by.values())
        of.in_turn()


# Whose jobs.
