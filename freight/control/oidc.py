"""Tokens of an OpenID provider: whom they name, checked with the provider's published keys."""

import asyncio
import json
import logging
import re
import ssl
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httpx
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.errors import SecurityWarning as JoseWarning
from joserfc.jwk import ECKey, JWKRegistry, Key, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from freight.config import Config
from freight.core.account import Account, Role, is_user_name
from freight.core.address import is_loopback
from freight.errors import Unauthenticated, Unavailable, UserError

log = logging.getLogger("freight.service")

# Signatures with a private key alone: with a shared secret, whoever can check could sign, too.
_ALGORITHMS: Final[dict[str, type[Key]]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), RSAKey),
    **dict.fromkeys(("ES256", "ES384", "ES512"), ECKey),
    **dict.fromkeys(("EdDSA", "Ed25519"), OKPKey),
}
_TYPES: Final = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
LEEWAY_S: Final = 60
# The provider is asked again so long after it did not answer, and so long after a key was not among its own.
_RETRY_S: Final = 5.0
_ANEW_S: Final = 60.0
_LEAST_S: Final = 60.0
_USUAL_S: Final = 3600.0
_MOST_S: Final = 86_400.0
_TIMEOUT_S: Final = 10.0
# Anybody may send tokens that are not good: why one was refused is told in the log so often.
_SAID_S: Final = 60.0
_MOST_BYTES: Final = 1 << 20
_MOST_KEYS: Final = 100
_MAX_AGE: Final = re.compile(r"max-age=\"?(\d{1,9})")

Document = tuple[dict[str, Any], float]


@dataclass(frozen=True, slots=True)
class Trust:
    """Which provider is believed, for whom its tokens must be made out, and which claims name user and groups."""

    issuer: str
    audience: str
    user_claim: str = "sub"
    groups_claim: str = "groups"
    admin_group: str = ""


def provider_of(config: Config) -> "Provider":
    """Return the provider that the settings name; raise UserError where one is missing."""
    issuer, audience = config["oidc.issuer"], config["oidc.audience"]
    if not audience:
        raise UserError(
            "oidc.issuer is set, and oidc.audience is not",
            "set it to the client that the provider has for this service: tokens for others must not be good here",
        )
    trust = Trust(issuer, audience, config["oidc.user_claim"], config["oidc.groups_claim"], config["oidc.admin_group"])
    return Provider(trust)


class Provider:
    """Knows the users of an OpenID provider by their tokens. Its keys are kept for as long as it allows."""

    def __init__(
        self,
        trust: Trust,
        fetch: Callable[[str], Awaitable[Document]] | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trust = trust
        self._http: httpx.AsyncClient | None = None
        self._fetch = fetch or self._get
        self._now = now
        self._clock = clock
        self._fetching = asyncio.Lock()
        self._keys_url, self._keys_url_until = "", float("-inf")
        self._keys: list[Key] = []
        self._keys_until = self._failed_at = self._anew_at = float("-inf")
        self._said: dict[str, float] = {}

    async def close(self) -> None:
        """Close the connections to the provider."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def account(self, token: str) -> Account:
        """Return whom a token names; raise Unauthenticated for one that is not good, Unavailable where none can say."""
        try:
            header = _header(token)
            key = await self._key(header)
            return self._named(_signed(token, key, header["alg"]))
        except (JoseError, _Refused, ValueError, TypeError, KeyError, RecursionError) as error:
            # Not the error's own words: they may quote the token.
            self._say(_words(error))
            raise Unauthenticated("the token is not good here", "log in again, and send a new one") from None

    def _say(self, why: str) -> None:
        now = self._clock()
        if now >= self._said.get(why, float("-inf")) + _SAID_S:
            self._said[why] = now
            log.info("a token of the identity provider was refused: %s", why)

    def _named(self, claims: dict[str, Any]) -> Account:
        """Return whom claims name, once what they are good for is checked."""
        jwt.JWTClaimsRegistry(
            now=lambda: int(self._now()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": self._trust.issuer},
            aud={"essential": True, "value": self._trust.audience},
            exp={"essential": True},
        ).validate(claims)
        user = claims.get(self._trust.user_claim)
        if not isinstance(user, str) or not is_user_name(user):
            raise _Refused(f"its {self._trust.user_claim} names no user that can be one here")
        groups = _groups(claims.get(self._trust.groups_claim))
        is_admin = bool(self._trust.admin_group) and self._trust.admin_group in groups
        return Account(user, Role.ADMIN if is_admin else Role.USER, groups)

    async def _key(self, header: dict[str, Any]) -> Key:
        """Return the key that a token says it was signed with; raise _Refused where the provider has none such."""
        found = _fitting(await self._current(), header)
        if found is None:
            found = _fitting(await self._current(anew=True), header)
        if found is None:
            raise _Refused("the provider has no such key")
        return found

    async def _current(self, anew: bool = False) -> list[Key]:
        """Return the provider's keys, as they were lately or with `anew` as they are now, as far as it may be asked."""
        if not anew and self._clock() < self._keys_until:
            return self._keys
        async with self._fetching:
            at = self._clock()
            if at < self._keys_until and (not anew or at < self._anew_at + _ANEW_S):
                return self._keys
            if at < self._failed_at + _RETRY_S:
                raise _unavailable()
            self._anew_at = at
            try:
                await self._fetch_keys(at)
            except (httpx.HTTPError, httpx.InvalidURL, JoseError, OSError, ValueError, TypeError, KeyError) as error:
                self._failed_at = at
                log.warning("the identity provider %s cannot be asked: %s", self._trust.issuer, error)
                raise _unavailable() from error
            return self._keys

    async def _fetch_keys(self, at: float) -> None:
        issuer = self._trust.issuer
        if at >= self._keys_url_until:
            described, kept_s = await self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
            if described.get("issuer") != issuer:
                raise ValueError("it describes another issuer")
            url = described["jwks_uri"]
            if not isinstance(url, str) or not _is_safe(url, issuer):
                raise ValueError("its keys are not at an https URL")
            self._keys_url, self._keys_url_until = url, at + kept_s
        document, kept_s = await self._fetch(self._keys_url)
        keys = [key for key in map(_imported, document["keys"][:_MOST_KEYS]) if key is not None]
        if not keys:
            raise ValueError("it has no key that can be used")
        self._keys, self._keys_until = keys, at + kept_s

    async def _get(self, url: str) -> Document:
        """Return a JSON document, and for how many seconds it may be kept."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                verify=ssl.create_default_context(), timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False
            )
        async with asyncio.timeout(_TIMEOUT_S), self._http.stream("GET", url) as response:
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise ValueError(f"{url} has more than {_MOST_BYTES} bytes")
        if response.status_code != 200:
            raise ValueError(f"{url} answers {response.status_code}")
        document = json.loads(body)
        if not isinstance(document, dict):
            raise ValueError(f"{url} is no JSON object")
        return cast("dict[str, Any]", document), _kept_s(response.headers.get("cache-control", ""))


class _Refused(Exception):
    """A token is not good, and why; the words may be logged."""


def _words(error: Exception) -> str:
    if isinstance(error, _Refused):
        return str(error)
    if isinstance(error, JoseError):
        return error.error
    return type(error).__name__


def _unavailable() -> Unavailable:
    return Unavailable("the identity provider does not answer", "try again later, or use a token of this service")


class _Rules(JWSRegistry):
    # Some providers name certificates in the header.
    max_header_length = 4096


def _signed(token: str, key: Key, algorithm: str) -> dict[str, Any]:
    """Return what a token claims, once its signature is found to be the key's."""
    with warnings.catch_warnings():
        # "EdDSA" has another name by now, which not every provider uses.
        warnings.simplefilter("ignore", JoseWarning)
        rules = _Rules(algorithms=[algorithm], strict_check_header=False)
        return jwt.decode(token, key, registry=rules).claims


def _header(token: str) -> dict[str, Any]:
    header = jws.extract_compact(token.encode(), registry=_Rules()).headers()
    if header.get("alg") not in _ALGORITHMS:
        raise _Refused("its algorithm is not accepted")
    if str(header.get("typ", "")).lower() not in _TYPES:
        raise _Refused("it is a token for something else")
    return header


def _fitting(keys: list[Key], header: dict[str, Any]) -> Key | None:
    """Return the key that a header names; without a name, the one key for its algorithm."""
    kid, algorithm = header.get("kid"), header["alg"]
    kind = _ALGORITHMS[algorithm]
    fitting = [
        key for key in keys if isinstance(key, kind) and key.get("alg") in (None, algorithm) and kid in (None, key.kid)
    ]
    return fitting[0] if fitting and (kid is not None or len(fitting) == 1) else None


def _imported(published: Any) -> Key | None:
    """Return a key of the provider's, None for one that is not for us: of another kind, or not for signatures."""
    try:
        key = JWKRegistry.import_key(published)
    except (JoseError, ValueError, TypeError, KeyError):
        return None
    is_ours = isinstance(key, (RSAKey, ECKey, OKPKey)) and key.get("use") in (None, "sig")
    return key if is_ours else None


def _is_safe(url: str, issuer: str) -> bool:
    """Return whether keys may come from a URL: over TLS, or from this machine where the issuer is on it, too."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return bool(parts.hostname)
    is_local = is_loopback(parts.hostname or "") and is_loopback(urlsplit(issuer).hostname or "")
    return parts.scheme == "http" and is_local and urlsplit(issuer).scheme == "http"


def _groups(claim: Any) -> frozenset[str]:
    named = [claim] if isinstance(claim, str) else cast("list[Any]", claim) if isinstance(claim, list) else []
    return frozenset(group for group in named if isinstance(group, str))


def _kept_s(cache_control: str) -> float:
    found = _MAX_AGE.search(cache_control.lower())
    if found is None:
        return _LEAST_S if "no-store" in cache_control.lower() or "no-cache" in cache_control.lower() else _USUAL_S
    return min(_MOST_S, max(_LEAST_S, float(found[1])))
