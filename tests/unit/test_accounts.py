"""Tokens, users' turns and limits, and who may see whose jobs."""

import asyncio
import logging
import re
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from freight.api.auth import Authentication
from freight.api.front import TRANSPORT
from freight.control.accounts import Accounts
from freight.control.roster import Roster
from freight.control.streams import StreamBroken
from freight.core.account import Account, Role, is_user_name
from freight.core.bucket import BURST_S, Bucket, Buckets
from freight.core.job import State
from freight.core.view import JobRequest, TokenRequest
from freight.errors import (
    Conflict,
    NoSuchJob,
    NoSuchUpload,
    NotAllowed,
    TooMany,
    Unauthenticated,
    UserError,
)
from freight.store.database import StorageFull
from freight.store.rows import JobRow
from tests.unit.services import MINE, Office

ALICE = Account("alice")
BOB = Account("bob")
ADMIN = Account("root-of-all", Role.ADMIN)


async def make(accounts: Accounts, user: str = "alice", **fields: Any) -> tuple[str, str]:
    """Return a token that was made, and its id."""
    made = await accounts.create(TokenRequest(user=user, **fields))
    return made.token, made.info.id


def test_token_shows_who_asks_until_it_is_revoked(office: Office) -> None:
    async def scenario() -> None:
        accounts = office.service.accounts
        token, number = await make(accounts, label="laptop")
        root, _ = await make(accounts, "carol", role="admin")

        assert re.fullmatch(r"frt_[A-Za-z0-9_-]{43}", token)
        assert await accounts.known(token) == ALICE
        assert await accounts.known(root) == Account("carol", Role.ADMIN)
        assert [(one.id, one.label) for one in accounts.tokens() if one.user == "alice"] == [(number, "laptop")]
        assert [one.id for one in await accounts.revoke(number)] == [number]
        with pytest.raises(Unauthenticated):
            await accounts.known(token)
        assert [one.user for one in accounts.tokens()] == ["carol"]
        with pytest.raises(UserError, match="no token"):
            await accounts.revoke(number)

    office.run(scenario)


def test_all_tokens_of_a_user_are_revoked_together_and_no_others(office: Office) -> None:
    async def scenario() -> None:
        accounts = office.service.accounts
        of_alice = [(await make(accounts))[0] for _ in range(3)]
        of_bob, _ = await make(accounts, "bob")

        assert len(await accounts.revoke("alice")) == 3
        for token in of_alice:
            with pytest.raises(Unauthenticated):
                await accounts.known(token)
        assert await accounts.known(of_bob) == BOB

    office.run(scenario)


def test_tokens_outlive_the_service_and_those_that_are_revoked_stay_so(office: Office) -> None:
    tokens: list[str] = []

    async def before() -> None:
        for user in ("alice", "bob"):
            tokens.append((await make(office.service.accounts, user))[0])
        await office.service.accounts.revoke("bob")

    async def after() -> None:
        assert await office.service.accounts.known(tokens[0]) == ALICE
        with pytest.raises(Unauthenticated):
            await office.service.accounts.known(tokens[1])

    office.run(before, after)
    assert all(office.holds(token) == [] for token in tokens)


def test_revoking_takes_effect_even_where_the_disk_is_full_and_can_be_tried_again(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("no space left")

    async def scenario() -> None:
        accounts, table = office.service.accounts, office.context.catalog.tokens
        token, number = await make(accounts)
        with monkeypatch.context() as patched, pytest.raises(StorageFull):
            patched.setattr(table, "revoke", full)
            await accounts.revoke(number)
        with pytest.raises(Unauthenticated):
            await accounts.known(token)
        await accounts.revoke(number)
        assert [row.revoked_at is not None for row in table.all()] == [True]

    office.run(scenario)


def test_what_became_of_a_token_is_told_to_the_log_and_to_who_has_it(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1e9]

    async def scenario() -> None:
        accounts = Accounts(office.context, "me", now=lambda: now[0])
        expired, old = await make(accounts, expires_s=60.0)
        revoked, gone = await make(accounts)
        await accounts.revoke(gone)
        assert await accounts.known(expired) == ALICE
        now[0] += 60
        told: dict[str, str | None] = {}
        for token in (expired, revoked, "frt_" + "A" * 43, "frt_short", "", "a.b.c", "\udcff"):
            with pytest.raises(Unauthenticated) as refused:
                await accounts.known(token)
            told[refused.value.message] = refused.value.hint
        assert list(told) == [
            "the token has expired: 2001-09-09T01:47:40.000Z",
            "the token was revoked",
            "the token is not good here",
        ]
        assert len(set(told.values())) == 1
        assert f"token {old} of alice was refused: it has expired" in caplog.messages
        assert f"token {gone} of alice was refused: it was revoked" in caplog.messages
        assert "a token that is not known was refused" in caplog.messages
        assert not any(token in caplog.text for token in (expired, revoked))
        await accounts.join()

    office.run(scenario)


def test_log_does_not_grow_with_every_bad_token(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        for _ in range(50):
            with pytest.raises(Unauthenticated):
                await office.service.accounts.known("frt_" + "A" * 43)

    office.run(scenario)
    assert caplog.messages.count("a token that is not known was refused") == 1


def test_tokens_whose_digests_begin_alike_are_told_apart(office: Office) -> None:
    async def scenario() -> None:
        accounts = office.service.accounts
        tokens = {user: (await make(accounts, user))[0] for user in ("alice", "bob")}
        # As if all began alike.
        every = [number for numbers in accounts._begun.values() for number in numbers]
        accounts._begun = dict.fromkeys(accounts._begun, every)
        assert {user: (await accounts.known(token)).user for user, token in tokens.items()} == {
            "alice": "alice", "bob": "bob",
        }  # fmt: skip

    office.run(scenario)


def test_day_of_the_last_use_is_kept(office: Office) -> None:
    now = [1e9]

    async def scenario() -> None:
        accounts = Accounts(office.context, "me", now=lambda: now[0])
        token, _ = await make(accounts)
        assert accounts.tokens()[0].used_on is None
        await accounts.known(token)
        await accounts.join()
        assert [row.used_on for row in office.context.catalog.tokens.all()] == ["2001-09-09"]
        now[0] += 86_400
        await accounts.known(token)
        await accounts.join()
        assert accounts.tokens()[0].used_on == office.context.catalog.tokens.all()[0].used_on == "2001-09-10"

    office.run(scenario)


def test_tokens_that_have_been_useless_for_a_year_are_forgotten(office: Office) -> None:
    now = [1e9]

    async def scenario() -> None:
        accounts = Accounts(office.context, "me", now=lambda: now[0])
        await make(accounts, "kept")
        await make(accounts, "expired", expires_s=1.0)
        await make(accounts, "revoked")
        await accounts.revoke("revoked")
        now[0] += 367 * 86_400
        await accounts.load()
        assert [row.user for row in office.context.catalog.tokens.all()] == ["kept"]

    office.run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": ""}, {"user": "a/b"}, {"user": "@admins"}, {"user": "*"}, {"user": "a b"}, {"user": "a\n"},
        {"user": "x" * 129}, {"user": "é"}, {"user": "a", "role": "king"}, {"user": "a", "expires_s": 0.0},
        {"user": "a", "expires_s": -1.0}, {"user": "a", "expires_s": 1e12}, {"user": "a", "label": "a\x1b[2J"},
        {"user": "a", "label": "x" * 201}, {"user": "a", "expires_s": float("nan")},
        {"user": "a", "expires_s": 1e-9},
    ],
)  # fmt: skip
def test_token_that_makes_no_sense_is_not_made(office: Office, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError):
            await office.service.accounts.create(TokenRequest(**fields))
        assert office.service.accounts.tokens() == []

    office.run(scenario)


@pytest.mark.parametrize("name", ["alice", "a.b@example.org", "auth0|0123", "_svc", "UPPER-1", "x" * 128])
def test_users_may_be_called_as_providers_call_them(name: str) -> None:
    assert is_user_name(name)


def test_a_long_query_of_somebody_unknown_is_looked_through_once(office: Office) -> None:
    """It has three million characters: looked through from each third of them on, it would take hours."""
    scope = {"type": "http", "method": "GET", "path": "/api/jobs", "headers": [], "state": {TRANSPORT: "tcp"}}
    sent: list[Message] = []

    async def app(*_: object) -> None:
        raise AssertionError("let in")

    async def receive() -> Message:
        raise AssertionError("there is no body")

    async def send(message: Message) -> None:
        sent.append(message)

    async def scenario() -> None:
        query = {"query_string": b"after=" + b"eyJ" * 1_000_000}
        await Authentication(app, office.service.accounts)(scope | query, receive, send)

    office.run(scenario)
    assert sent[0]["status"] == 401


def test_a_stream_ends_when_its_token_is_revoked_and_a_good_ones_goes_on(office: Office) -> None:
    async def scenario() -> None:
        accounts = office.service.accounts
        (revoked, number), (good, _) = await make(accounts), await make(accounts, "bob")
        sent: list[str] = []

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await accounts.revoke(number)
            await send({"type": "http.response.body", "body": b"b", "more_body": True})

        async def receive() -> Message:
            raise AssertionError("there is no body")

        async def send(message: Message) -> None:
            sent.append(message.get("body", b"").decode())

        async def ask(token: str) -> None:
            headers = [(b"authorization", f"Bearer {token}".encode())]
            scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "state": {TRANSPORT: "tcp"}}
            await Authentication(app, accounts)(scope, receive, send)

        with pytest.raises(StreamBroken):
            await ask(revoked)
        assert sent == ["", "a"]
        number = (await make(accounts))[1]
        await ask(good)
        assert sent[2:] == ["", "a", "b"]

    office.run(scenario)


# Requests a second.


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


async def put(office: Office, account: Account, name: str, key: str | None = None, **options: Any) -> str:
    """Make a job of a user's; return its id."""
    upload = await office.upload(account)
    request = JobRequest(upload=upload.id, name=name, model=MINE, **options)
    return (await office.service.submit(account, request, key)).job.id


def test_names_and_keys_are_each_users_own(office: Office) -> None:
    async def scenario() -> None:
        first = await put(office, ALICE, "nightly", "k")
        second = await put(office, BOB, "nightly", "k")

        assert first != second
        assert (await office.service.finder.find(ALICE, "nightly")).id == first
        assert (await office.service.finder.find(BOB, "nightly")).id == second
        with pytest.raises(Conflict):
            await put(office, BOB, "nightly")
        assert await put(office, ALICE, "nightly", "k") == first

    office.run(scenario)


def test_others_jobs_are_not_there_whatever_they_are_called_by(office: Office) -> None:
    async def scenario() -> None:
        job = await put(office, ALICE, "nightly")
        service = office.service
        for name in ("nightly", job, job[:8], "alice/nightly", f"alice/{job}", f"alice/{job[:8]}"):
            for ask in (
                service.finder.status, service.cancel, service.resume, service.retry, service.delete,
                lambda account, name: service.streams.results(account, name, None, True),
                lambda account, name: service.streams.logs(account, name, None, None, False),
            ):  # fmt: skip
                with pytest.raises(NoSuchJob) as refused:
                    await ask(BOB, name)
                with pytest.raises(NoSuchJob) as unknown:
                    await ask(BOB, "0000")
                assert refused.value.message.replace(name, "0000") == unknown.value.message
        assert (await service.finder.page(BOB, None, 10, None)).jobs == []
        assert (await service.finder.names(BOB)).names == []
        assert (await service.finder.find(ALICE, "alice/nightly")).id == job
        assert (await service.finder.names(ALICE)).names == ["nightly"]

    office.run(scenario)


def test_admins_find_everybodys_jobs(office: Office) -> None:
    async def scenario() -> None:
        finder = office.service.finder
        first, second = await put(office, ALICE, "nightly"), await put(office, BOB, "nightly")
        alone = await put(office, BOB, "weekly")
        own = await put(office, ADMIN, "own")

        for name, job in (("alice/nightly", first), ("bob/nightly", second), ("weekly", alone), (first, first)):
            assert (await finder.find(ADMIN, name)).id == job
        with pytest.raises(UserError, match="several users") as refused:
            await finder.find(ADMIN, "nightly")
        assert refused.value.hint == "say whose: alice/nightly, bob/nightly"
        assert [(job.user, job.name) for job in (await finder.page(ADMIN, None, 10, None)).jobs] == [
            ("root-of-all", "own"), ("bob", "weekly"), ("bob", "nightly"), ("alice", "nightly"),
        ]  # fmt: skip
        assert (await finder.names(ADMIN)).names == ["alice/nightly", "bob/nightly", "own", "bob/weekly"]
        assert (await finder.find(ADMIN, "own")).id == own
        await office.service.cancel(ADMIN, "alice/nightly")

    office.run(scenario)


def test_nobody_can_call_a_job_so_that_an_admin_takes_it_for_another(office: Office) -> None:
    async def scenario() -> None:
        victim = await put(office, ALICE, "victim")
        await put(office, BOB, victim[:12])
        await put(office, BOB, victim)
        assert (await office.service.finder.find(ADMIN, victim[:12])).id == victim
        assert (await office.service.finder.find(ADMIN, victim)).id == victim

    office.run(scenario)


def test_pages_of_one_user_are_whole(office: Office) -> None:
    async def scenario() -> None:
        for number in range(5):
            await put(office, ALICE, f"a{number}")
            await put(office, BOB, f"b{number}")
        names, after = list[str](), None
        while True:
            page = await office.service.finder.page(BOB, "active", 2, after)
            names += [job.name for job in page.jobs]
            after = page.next
            if after is None:
                break
        assert names == ["b4", "b3", "b2", "b1", "b0"]

    office.run(scenario)


def test_others_uploads_are_not_there(office: Office) -> None:
    async def scenario() -> None:
        upload = await office.upload(ALICE)
        for attempt in (
            lambda: office.service.submit(BOB, JobRequest(upload=upload.id, model=MINE), None),
            lambda: asyncio.to_thread(office.service.drop_upload, BOB, upload.id),
        ):
            with pytest.raises(NoSuchUpload):
                await attempt()
        assert (await office.service.submit(ALICE, JobRequest(upload=upload.id, model=MINE), None)).is_new

    office.run(scenario)


@pytest.mark.parametrize(
    "options", [{"priority": 1}, {"output": "/tmp"}, {"model": "http://127.0.0.1:9"}, {"model": "/etc/passwd"}]
)
def test_what_reaches_beyond_ones_own_things_is_for_admins(office: Office, options: dict[str, Any]) -> None:
    async def scenario() -> None:
        upload = await office.upload(ALICE)
        with pytest.raises(NotAllowed):
            request = JobRequest(**{"upload": upload.id, "model": MINE, **options})
            await office.service.submit(ALICE, request, None)
        assert (await office.service.finder.names(ALICE)).names == []
        await put(office, ADMIN, "first", priority=1)
        await put(office, ALICE, "last", priority=-1)

    office.run(scenario)


def test_others_jobs_that_hold_a_device_are_not_named(office: Office) -> None:
    async def scenario() -> None:
        await put(office, ALICE, "secret-plan")
        await office.serving_of("alice", "secret-plan")
        await put(office, BOB, "waits")
        finder, machine = office.service.finder, office.service.machine

        async def reason(account: Account, name: str) -> str:
            return (await finder.status(account, name)).reason

        while not await reason(BOB, "waits"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert await reason(BOB, "waits") == "cpu:0 is held by another user's job"
        await put(office, ALICE, "next")
        while not await reason(ALICE, "next"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert "cpu:0 is held by secret-plan" in await reason(ALICE, "next")
        [seen] = (await machine.devices(BOB)).devices
        assert (seen.state, seen.holder, seen.job, seen.pid) == ("leased", "another user's job", None, None)
        [own] = (await machine.devices(ALICE)).devices
        assert (own.holder, own.job) == ("job secret-plan", "secret-plan")
        [worker] = machine.workers(BOB).workers
        assert (worker.job, worker.number, worker.note, worker.model) == ("another user's job", None, "", MINE)
        [worker] = machine.workers(ADMIN).workers
        assert (worker.job, worker.user) == ("secret-plan", "alice")

    office.run(scenario)


# Limits.


def test_jobs_that_have_not_ended_are_limited_for_each_user_and_not_for_the_owner(office: Office) -> None:
    office.configure("[limits]\nactive_jobs = 2\n")

    async def scenario() -> None:
        for number in range(2):
            await put(office, ALICE, f"a{number}")
        with pytest.raises(TooMany, match=r"2 jobs that have not ended; the limit \(limits.active_jobs\) is 2") as told:
            await put(office, ALICE, "one-more")
        assert told.value.retry_after_s is None
        await put(office, BOB, "b")
        for number in range(4):
            await office.submit(f"mine{number}")
        await office.service.cancel(ALICE, "a1")
        while (await office.service.finder.find(ALICE, "a1")).state is not State.CANCELLED:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await put(office, ALICE, "one-more")
        with pytest.raises(TooMany):
            await office.service.resume(ALICE, "a1")

    office.run(scenario)


def test_records_of_jobs_from_afar_are_limited(office: Office) -> None:
    office.configure("[limits]\nrecords = 19\n")

    async def scenario() -> None:
        with pytest.raises(UserError, match=r"more than 19 records, the limit \(limits.records\)"):
            await put(office, ALICE, "large")
        await office.submit("mine")

    office.run(scenario)


def test_what_users_store_is_limited_whatever_it_is(office: Office) -> None:
    async def scenario() -> None:
        size = (await office.upload(ALICE)).bytes
        office.configure(f"[limits]\nstored_bytes = {3 * size + size // 2}\n")
        await office.upload(ALICE)
        await office.upload(ALICE)
        with pytest.raises(TooMany, match=r"limits\.stored_bytes"):
            await office.upload(ALICE)
        await office.upload(BOB)
        for _ in range(5):
            await office.upload()

    office.run(scenario)


def test_uploads_at_the_same_time_share_the_room(office: Office) -> None:
    office.configure("[limits]\nstored_bytes = 5000000\n")

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def slow() -> Any:
            yield b"x" * 2_000_000
            await go_on.wait()
            yield b"x" * 2_000_000

        async def send() -> bool:
            try:
                await office.service.receive(ALICE, slow(), None)
            except TooMany:
                return False
            return True

        sending = [asyncio.create_task(send()) for _ in range(2)]
        await office.until(lambda: sum(room.count for room in office.service._quotas._rooms.get("alice", [])) > 3e6)
        go_on.set()
        assert sorted(await asyncio.gather(*sending)) == [False, True]
        assert office.service._quotas._rooms == {}
        assert await office.service._quotas.stored("alice") == 4_000_000

    office.run(scenario)


def test_upload_that_has_ended_takes_room_of_those_that_go_on(office: Office) -> None:
    office.configure("[limits]\nstored_bytes = 5000000\n")

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def pieces(*sizes: int) -> Any:
            for size in sizes:
                yield b"x" * size
                if len(sizes) > 1:
                    await go_on.wait()

        slow = asyncio.create_task(office.service.receive(ALICE, pieces(1_100_000, 2_000_000), None))
        await office.until(lambda: any(room.count for room in office.service._quotas._rooms.get("alice", [])))
        await office.service.receive(ALICE, pieces(3_000_000), None)
        go_on.set()
        with pytest.raises(TooMany):
            await slow

    office.run(scenario)


def test_jobs_of_before_there_were_users_are_the_owners(office: Office) -> None:
    async def before() -> None:
        office.context.catalog._connection.execute("UPDATE job SET user = ''")

    async def scenario() -> None:
        await office.submit("old")
        await before()

    async def after() -> None:
        assert (await office.service.finder.status(office.owner, "old")).user == office.owner.user

    office.run(scenario, after)


def test_files_are_not_called_by_a_users_name(office: Office) -> None:
    async def scenario() -> None:
        await office.upload(Account("a.very.odd|name"))
        assert not [path for path in office.data.rglob("*") if "odd" in path.name]

    office.run(scenario)
