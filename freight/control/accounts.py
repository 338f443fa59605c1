"""Who is known here: the machine's owner, those who have tokens, and those whom an identity provider knows."""

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import pwd
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from freight.config import Config
from freight.control.context import Context
from freight.control.views import when
from freight.core.account import GROUP_RULE, USER_RULE, Account, Role, is_group_name, is_user_name
from freight.core.bucket import Buckets
from freight.core.paging import page_of
from freight.core.view import TokenInfo, TokenList, TokenMade, TokenRequest
from freight.errors import FreightError, TooMany, Unauthenticated, UserError
from freight.store.database import STORAGE_ERRORS
from freight.store.tokens import TokenRow

if TYPE_CHECKING:
    from freight.control.oidc import Provider

log = logging.getLogger("freight.service")

TOKEN_START: Final = "frt_"
_TOKEN: Final = re.compile(r"frt_[A-Za-z0-9_-]{43}")
_TOKEN_BYTES: Final = 32
_PREFIX_BYTES: Final = 8
_MOST_LABEL: Final = 200
_MOST_GROUPS: Final = 100
_YEAR_S: Final = 366 * 86_400.0
# Less than a step of the clock of day would have a token expire when it is made.
_LEAST_S: Final = 0.001
_MOST_S: Final = 100 * _YEAR_S
# What is wrong with one token is told in the log so often, however often it is tried.
_SAID_S: Final = 60.0
_ASK: Final = "ask an administrator of this service for another: freight token create USER"


def _provider(config: Config) -> "Provider | None":
    if not config["oidc.issuer"]:
        return None
    from freight.control.oidc import provider_of  # It takes its time to import.

    return provider_of(config)


def own_user() -> str:
    """Return the name of the user who runs this."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid-{os.geteuid()}"


class Accounts:
    """Finds out who asks. What a token is known by is in memory, so that its end takes effect at once."""

    def __init__(self, context: Context, owner: str, now: Callable[[], float] = time.time) -> None:
        """Take over the settings; raise UserError for an identity provider that lacks some."""
        config = context.settings()
        self.owner = Account(owner, Role.ADMIN, is_local=True)
        self._context = context
        self._now = now
        self._rows: dict[str, TokenRow] = {}
        # The beginning of a digest -> the ids of the tokens whose digests begin so.
        self._begun: dict[bytes, list[str]] = {}
        self._provider = _provider(config)
        self._buckets = Buckets(config["limits.requests"])
        self._noting: set[asyncio.Task[None]] = set()
        self._said: dict[str, float] = {}
        # Tokens that were revoked here, and not on disk yet.
        self._unsaved: set[str] = set()

    async def load(self) -> None:
        """Take up the tokens that there are; forget those that have been good for nothing for a year."""
        table = self._context.catalog.tokens
        await self._context.write(table.forget, self._now() - _YEAR_S)
        for row in await self._context.write(table.all):
            self._keep(row)

    async def join(self) -> None:
        """Wait until what is to be noted is on disk."""
        await asyncio.gather(*self._noting, return_exceptions=True)
        if self._provider is not None:
            await self._provider.close()

    def _keep(self, row: TokenRow) -> None:
        if row.id not in self._rows:
            self._begun.setdefault(row.digest[:_PREFIX_BYTES], []).append(row.id)
        self._rows[row.id] = row

    async def known(self, token: str) -> Account:
        """Return who shows this token; raise Unauthenticated for one that is not good.

        Who shows one that was good is told what became of it.

        Raises Unavailable where the identity provider that would know does not answer.
        """
        if _TOKEN.fullmatch(token):
            return self._holder(token)
        if self._provider is not None and token.count(".") == 2:
            return await self._provider.account(token)
        raise _unknown()

    def _holder(self, token: str) -> Account:
        row = self._row_of(hashlib.sha256(token.encode()).digest())
        now = self._now()
        if row is None:
            self._say("", "a token that is not known was refused")
            raise _unknown()
        if not row.is_good(now):
            what = "was revoked" if row.revoked_at is not None else "has expired"
            self._say(row.id, f"token {row.id} of {row.user} was refused: it {what}")
            # Only who has the whole token learns this.
            since = f": {when(row.expires_at)}" if row.revoked_at is None else ""
            raise Unauthenticated(f"the token {what}{since}", _ASK)
        day = datetime.fromtimestamp(now, UTC).date().isoformat()
        if row.used_on != day:
            self._keep(msgspec.structs.replace(row, used_on=day))
            task = asyncio.create_task(self._note_use(row.id, day))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)
        return Account(row.user, Role(row.role), frozenset(row.groups))

    def is_revoked(self, token: str) -> bool:
        """Return whether a token of this service, which was good, has been revoked meanwhile."""
        row = self._row_of(hashlib.sha256(token.encode()).digest())
        return row is not None and row.revoked_at is not None

    def _row_of(self, digest: bytes) -> TokenRow | None:
        """Return the token of a digest. Found by its beginning, compared as a whole in a time that tells nothing."""
        found: TokenRow | None = None
        for token in self._begun.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(self._rows[token].digest, digest):
                found = self._rows[token]
        return found

    async def _note_use(self, token: str, day: str) -> None:
        try:
            await self._context.write(self._context.catalog.tokens.used, token, day)
        except (FreightError, *STORAGE_ERRORS) as error:
            log.warning("the use of token %s cannot be noted: %s", token, error)

    def _say(self, key: str, words: str) -> None:
        now = self._now()
        if len(self._said) > 1000:
            self._said.clear()
        if now >= self._said.get(key, float("-inf")) + _SAID_S:
            self._said[key] = now
            log.info("%s", words)

    def admit(self, account: Account) -> None:
        """Count a request; raise TooMany where the user makes more than they may."""
        wait_s = 0.0 if account.is_local else self._buckets.take(account.user, time.monotonic())
        if wait_s:
            raise TooMany(
                f"more than {self._buckets.rate:g} requests a second, the limit (limits.requests) of each user",
                "wait a little between requests",
                wait_s,
            )

    async def create(self, request: TokenRequest) -> TokenMade:
        """Make a token, which is told this once."""
        now = self._now()
        role = _checked(request)
        token = TOKEN_START + base64.urlsafe_b64encode(secrets.token_bytes(_TOKEN_BYTES)).decode().rstrip("=")
        expires_at = now + request.expires_s if request.expires_s is not None else None
        row = TokenRow(
            self._new_id(), hashlib.sha256(token.encode()).digest(), request.user, role, request.label, now, expires_at,
            groups=tuple(dict.fromkeys(request.groups)),
        )  # fmt: skip
        await self._context.write(self._context.catalog.tokens.add, row)
        self._keep(row)
        log.info("token %s was made for %s (%s)", row.id, row.user, row.role)
        return TokenMade(token=token, info=_info(row))

    def _new_id(self) -> str:
        while (made := f"tok-{secrets.token_hex(4)}") in self._rows:
            continue
        return made

    def tokens(self) -> list[TokenInfo]:
        """Return the tokens that were not revoked, the oldest first."""
        return [_info(row) for row in self._rows.values() if row.revoked_at is None]

    def page(self, limit: int, after: str | None) -> TokenList:
        """Return up to `limit` of these; `after` is an earlier page's `next`."""
        there = [row for row in self._rows.values() if row.revoked_at is None]
        rows, following = page_of(there, lambda row: (row.created_at, row.id), limit, after)
        return TokenList(tokens=[_info(row) for row in rows], next=following)

    async def revoke(self, which: str) -> list[TokenInfo]:
        """End a token, or all tokens of a user, at once; raise UserError where there is none."""
        there = [row for row in self._rows.values() if row.revoked_at is None or row.id in self._unsaved]
        rows = [row for row in there if row.id == which] or [row for row in there if row.user == which]
        if not rows:
            raise UserError(f"there is no token {which}, nor a user who has one", "tokens: freight token list")
        now = self._now()
        for row in rows:
            self._keep(msgspec.structs.replace(row, revoked_at=now))
        # What the disk refuses can be tried again: it must not come back with the next service.
        self._unsaved.update(row.id for row in rows)
        for row in rows:
            await self._context.write(self._context.catalog.tokens.revoke, row.id, now)
            self._unsaved.discard(row.id)
            log.info("token %s of %s was revoked", row.id, row.user)
        return [_info(row) for row in rows]


def _checked(request: TokenRequest) -> Role:
    if not is_user_name(request.user):
        raise UserError(f"{request.user!r} cannot be a user's name", f"use {USER_RULE}")
    if request.role not in set(Role):
        raise UserError(f"there is no role {request.role!r}", f"roles: {', '.join(Role)}")
    if request.expires_s is not None and not _LEAST_S <= request.expires_s <= _MOST_S:
        raise UserError(f"a token cannot expire in {request.expires_s:g} s", "give it 1 ms to 100 years, or none")
    if len(request.label) > _MOST_LABEL or not (request.label.isprintable() or not request.label):
        raise UserError("the label cannot be kept", f"use up to {_MOST_LABEL} printable characters")
    if len(request.groups) > _MOST_GROUPS:
        raise UserError(f"a token cannot be in {len(request.groups)} groups", f"name up to {_MOST_GROUPS}")
    for group in request.groups:
        if not is_group_name(group):
            raise UserError(f"{group!r} cannot be a group's name", f"use {GROUP_RULE}")
    return Role(request.role)


def _info(row: TokenRow) -> TokenInfo:
    return TokenInfo(
        id=row.id,
        user=row.user,
        role=row.role,
        label=row.label,
        created_at=when(row.created_at) or "",
        expires_at=when(row.expires_at),
        used_on=row.used_on,
        groups=list(row.groups),
    )


def _unknown() -> Unauthenticated:
    return Unauthenticated("the token is not good here", _ASK)
