"""Tokens: who is known by them, for how long, and what is told of them."""

import logging
import re
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from freight.api.auth import Authentication
from freight.api.front import TRANSPORT
from freight.control.accounts import Accounts
from freight.control.streams import StreamBroken
from freight.core.account import Account, Role, is_user_name
from freight.core.view import TokenRequest
from freight.errors import (
    Unauthenticated,
    UserError,
)
from freight.store.database import StorageFull
from tests.unit.services import Office

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
