"""Tokens of an OpenID provider: which are believed, and what is asked of the provider when."""

import asyncio
import base64
import hmac
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from freight.config import load_config
from freight.control.oidc import LEEWAY_S, Provider, Trust, provider_of
from freight.core.account import Account, Role
from freight.errors import Unauthenticated, Unavailable, UserError
from tests.httpserver import Reply, http_server

pytestmark = pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")

ISSUER: Final = "https://login.example.org/realms/lab"
TRUST: Final = Trust(ISSUER, "freight", "preferred_username", admin_group="operators")
NOW: Final = 1_000_000.0
RSA: Final = RSAKey.generate_key(2048, {"kid": "rsa"}, private=True)
EC: Final = ECKey.generate_key("P-256", {"kid": "ec"}, private=True)
ED: Final = OKPKey.generate_key("Ed25519", {"kid": "ed"}, private=True)
OTHER: Final = RSAKey.generate_key(2048, {"kid": "rsa"}, private=True)
CLAIMS: Final = {
    "iss": ISSUER, "aud": "freight", "exp": NOW + 300, "nbf": NOW - 5, "iat": NOW - 5, "sub": "0815",
    "preferred_username": "alice", "groups": ["chemistry", "all"],
}  # fmt: skip


def signed(key: Any = RSA, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
    """Return a token; claims that are None are left out."""
    whole = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode({"alg": alg, "kid": key.kid} | (header or {}), whole, key, algorithms=[alg])


class Login:
    """A provider in the test's hands: `now` is its clock, `asked` what was fetched."""

    def __init__(self, trust: Trust = TRUST) -> None:
        self.now = NOW
        self.keys: list[Any] = [RSA, EC, ED]
        self.kept_s = 600.0
        self.is_down = False
        self.asked: list[str] = []
        self.described: dict[str, Any] = {"issuer": trust.issuer, "jwks_uri": "https://login.example.org/keys"}
        self.provider = Provider(trust, self.fetch, lambda: self.now, lambda: self.now)

    async def fetch(self, url: str) -> tuple[dict[str, Any], float]:
        self.asked.append(url.rpartition("/")[2])
        await asyncio.sleep(0)
        if self.is_down:
            raise httpx.ConnectError("nobody there")
        if url.endswith("openid-configuration"):
            return self.described, self.kept_s
        keys = [key.as_dict(private=False) if hasattr(key, "as_dict") else key for key in self.keys]
        return {"keys": keys}, self.kept_s

    def account(self, token: str) -> Account:
        return asyncio.run(self.provider.account(token))


@pytest.fixture
def login() -> Login:
    return Login()


@pytest.mark.parametrize(
    ("key", "alg"),
    [(RSA, "RS256"), (RSA, "RS512"), (RSA, "PS256"), (EC, "ES256"), (ED, "EdDSA"), (ED, "Ed25519")],
)
def test_token_of_the_provider_names_user_and_groups(login: Login, key: Any, alg: str) -> None:
    assert login.account(signed(key, alg)) == Account("alice", Role.USER, frozenset({"chemistry", "all"}))


def test_members_of_the_admin_group_are_admins(login: Login) -> None:
    assert login.account(signed(groups=["operators"])).is_admin()
    assert login.account(signed(groups="operators")).is_admin()
    for groups in (["operators2"], [], None, {"operators": 1}, [["operators"]], 7):
        assert not login.account(signed(groups=groups)).is_admin()
    nobody = Login(Trust(ISSUER, "freight", "preferred_username"))
    assert not nobody.account(signed(groups=["", "operators"])).is_admin()


def test_claims_that_name_the_user_can_be_chosen() -> None:
    # Of itself by what no user can change.
    assert Login(Trust(ISSUER, "freight")).account(signed()).user == "0815"
    mail = Login(Trust(ISSUER, "freight", user_claim="email", groups_claim="roles"))
    account = mail.account(signed(email="a@example.org", roles=["x"]))
    assert (account.user, account.groups) == ("a@example.org", frozenset({"x"}))
    with pytest.raises(Unauthenticated):
        mail.account(signed())


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


def forged(sign: Callable[[bytes], bytes] = lambda _: b"", **header: Any) -> str:
    """Return a token as the library would make none, by default one that nobody signed."""
    head, claims = (encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", **header}, CLAIMS))
    return f"{head}.{claims}.{encoded(sign(f'{head}.{claims}'.encode()))}"


def with_secret() -> str:
    """Return a token signed with the provider's public key as if that were a secret."""
    public = RSA.as_pem(private=False)
    return forged(lambda text: hmac.digest(public, text, "sha256"), alg="HS256", kid="rsa")


def with_header(**header: Any) -> str:
    """Return a token that the provider signed, whatever its header says."""
    return forged(lambda text: JWSRegistry.algorithms["RS256"].sign(text, RSA), alg="RS256", kid="rsa", **header)


BAD: Final[dict[str, Callable[[], str]]] = {
    "no algorithm": lambda: forged(alg="none", kid="rsa"),
    "no algorithm, oddly written": lambda: forged(alg="nOnE", kid="rsa"),
    "no header": forged,
    "a shared secret": with_secret,
    "another's key": lambda: signed(OTHER),
    "another algorithm than the key's": lambda: signed(RSA, "RS256", {"kid": "ec"}),
    "a key that there is not": lambda: signed(OTHER, header={"kid": "new"}),
    "a key of its own": lambda: signed(OTHER, header={"jwk": OTHER.as_dict(private=False), "kid": "x"}),
    "another issuer": lambda: signed(iss="https://evil.example"),
    "another issuer's beginning": lambda: signed(iss=f"{ISSUER}/"),
    "issuers": lambda: signed(iss=[ISSUER]),
    "no issuer": lambda: signed(iss=None),
    "another audience": lambda: signed(aud="other"),
    "other audiences": lambda: signed(aud=["other", "freight2"]),
    "an odd audience": lambda: signed(aud={"freight": 1}),
    "no audience": lambda: signed(aud=None),
    "no end": lambda: signed(exp=None),
    "an odd end": lambda: signed(exp="never"),
    "a true end": lambda: signed(exp=True),
    "expired": lambda: signed(exp=NOW - LEEWAY_S),
    "not yet": lambda: signed(nbf=NOW + LEEWAY_S + 2),
    "made in the future": lambda: signed(iat=NOW + LEEWAY_S + 2),
    "no user": lambda: signed(preferred_username=None, sub=None),
    "an odd user": lambda: signed(preferred_username=7),
    "a user with a slash": lambda: signed(preferred_username="bob/alice"),
    "everybody": lambda: signed(preferred_username="*"),
    "a group as a user": lambda: signed(preferred_username="@operators"),
    "a user of many lines": lambda: signed(preferred_username="a\nb"),
    "a token for something else": lambda: signed(header={"typ": "logout+jwt"}),
    "something critical": lambda: with_header(crit=["odd"], odd=1),
    "cut": lambda: signed()[:-4],
    "changed": lambda: signed()[:-9] + "A" + signed()[-8:],
    "not base64": lambda: "%%%.%%%.%%%",
    "empty": lambda: "..",
    "deep": lambda: base64.urlsafe_b64encode(b"[" * 400).decode() + ".e30.e30",
}


@pytest.mark.parametrize("what", BAD)
def test_token_that_is_not_good_is_refused(login: Login, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    token = BAD[what]()
    with pytest.raises(Unauthenticated) as refused:
        login.account(token)
    assert refused.value.message == "the token is not good here"
    assert "a token of the identity provider was refused" in caplog.text
    assert token[:40] not in caplog.text or len(token) < 5


def test_whoever_sends_bad_tokens_over_and_over_does_not_fill_the_log(
    login: Login, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lines() -> int:
        for token in (forged(alg="none"), forged(alg="none", kid="1"), signed(OTHER), signed(OTHER)):
            with pytest.raises(Unauthenticated):
                login.account(token)
        return caplog.text.count("a token of the identity provider was refused")

    assert [lines(), lines()] == [2, 2]
    login.now += 60
    assert lines() == 4


def test_tokens_made_by_hand_are_good_where_nothing_is_wrong_with_them(login: Login) -> None:
    assert login.account(with_header(x5t="abc", nonce="n")).user == "alice"


def test_clocks_may_differ_a_little(login: Login) -> None:
    late = signed(exp=NOW - LEEWAY_S + 2, nbf=NOW + LEEWAY_S - 2, iat=NOW + LEEWAY_S - 2)
    assert login.account(late).user == "alice"


def test_keys_for_other_uses_are_not_taken() -> None:
    login = Login()
    login.keys = [{**RSA.as_dict(private=False), "use": "enc"}, {"kty": "oct", "k": "c2VjcmV0", "kid": "s"}, 7, EC]
    with pytest.raises(Unauthenticated):
        login.account(signed())
    assert login.account(signed(EC, "ES256")).user == "alice"


def test_provider_is_asked_again_when_its_keys_are_old(login: Login) -> None:
    for _ in range(3):
        login.account(signed())
    assert login.asked == ["openid-configuration", "keys"]
    login.now += 599
    login.account(signed(exp=NOW + 9999))
    assert len(login.asked) == 2
    login.now += 2
    login.account(signed(exp=NOW + 9999))
    assert len(login.asked) == 4


def test_new_key_is_found_at_once_but_not_more_often_than_once_a_minute(login: Login) -> None:
    new = RSAKey.generate_key(2048, {"kid": "new"}, private=True)
    login.account(signed())
    login.now += 60
    login.keys = [new]
    assert login.account(signed(new)).user == "alice"
    assert login.asked == ["openid-configuration", "keys", "keys"]
    unknown = signed(OTHER, header={"kid": "another"})
    for _ in range(20):
        with pytest.raises(Unauthenticated):
            login.account(unknown)
    assert len(login.asked) == 3
    # The old one is no longer good.
    with pytest.raises(Unauthenticated):
        login.account(signed())
    login.now += 60
    with pytest.raises(Unauthenticated):
        login.account(unknown)
    assert len(login.asked) == 4


def test_provider_that_is_down_is_not_asked_all_the_time_and_known_keys_stay_good(login: Login) -> None:
    login.is_down = True
    for _ in range(10):
        with pytest.raises(Unavailable):
            login.account(signed())
    assert len(login.asked) == 1
    login.is_down = False
    login.now += 5
    assert login.account(signed()).user == "alice"
    login.is_down = True
    login.now += 100
    assert login.account(signed()).user == "alice"
    with pytest.raises(Unavailable):
        login.account(signed(OTHER, header={"kid": "another"}))
    assert login.account(signed()).user == "alice"
    login.now += 600
    with pytest.raises(Unavailable):
        login.account(signed(exp=NOW + 9999))


def test_many_at_once_ask_the_provider_once(login: Login) -> None:
    async def many() -> None:
        accounts = await asyncio.gather(*(login.provider.account(signed()) for _ in range(30)))
        assert {account.user for account in accounts} == {"alice"}

    asyncio.run(many())
    assert login.asked == ["openid-configuration", "keys"]


@pytest.mark.parametrize(
    "described",
    [
        {"issuer": "https://evil.example", "jwks_uri": "https://login.example.org/keys"},
        {"issuer": ISSUER, "jwks_uri": "http://login.example.org/keys"},
        {"issuer": ISSUER, "jwks_uri": "http://127.0.0.1/keys"},
        {"issuer": ISSUER, "jwks_uri": "file:///etc/passwd"},
        {"issuer": ISSUER, "jwks_uri": 7},
        {"issuer": ISSUER},
        {},
    ],
)
def test_provider_that_describes_itself_oddly_is_not_believed(login: Login, described: dict[str, Any]) -> None:
    login.described = described
    with pytest.raises(Unavailable):
        login.account(signed())


def test_keys_come_over_http_as_the_provider_lets_them_be_kept() -> None:
    pages: dict[str, Reply] = {}
    asked: list[str] = []

    def get(path: str) -> Reply:
        asked.append(path)
        return pages.get(path, Reply(404, b"{}"))

    async def scenario(url: str) -> None:
        trust = Trust(url, "freight", "preferred_username")
        token = signed(iss=url)
        config, keys = f"{url}/keys", json.dumps({"keys": [RSA.as_dict(private=False)]}).encode()
        described = json.dumps({"issuer": url, "jwks_uri": config}).encode()
        page = "/.well-known/openid-configuration"
        now = [0.0]
        for wrong in (
            {}, {page: Reply(302, b"", {"Location": f"{url}/elsewhere"}), "/elsewhere": Reply(200, described)},
            {page: Reply(200, b"[]")}, {page: Reply(200, b"x" * (1 << 20) + b"x")}, {page: Reply(200, described)},
        ):  # fmt: skip
            pages.clear()
            pages.update(wrong)
            provider = Provider(trust, now=lambda: NOW, clock=lambda: now[0])
            with pytest.raises(Unavailable):
                await provider.account(token)
            await provider.close()
        assert "/elsewhere" not in asked
        pages["/keys"] = Reply(200, keys, {"Cache-Control": "public, max-age=120"})
        provider = Provider(trust, now=lambda: NOW, clock=lambda: now[0])
        for at, count in ((0.0, 1), (119.0, 1), (121.0, 2)):
            now[0] = at
            assert (await provider.account(token)).user == "alice"
            assert asked.count("/keys") == count + 1
        await provider.close()

    with http_server(get, lambda _: Reply()) as url:
        asyncio.run(scenario(url))


def settings(tmp_path: Path, toml: str) -> Any:
    file = tmp_path / "config.toml"
    file.write_text(f"[oidc]\n{toml}\n")
    return load_config({}, {}, {"FREIGHT_CONFIG": str(file)})


def test_issuer_without_an_audience_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"oidc\.audience is not"):
        provider_of(settings(tmp_path, f'issuer = "{ISSUER}"'))
    provider_of(settings(tmp_path, f'issuer = "{ISSUER}"\naudience = "freight"'))


@pytest.mark.parametrize(
    "issuer", ["http://login.example.org", "login.example.org", "ftp://x", "https://", "https://a?b=c"]
)
def test_issuer_must_be_an_https_url(tmp_path: Path, issuer: str) -> None:
    with pytest.raises(UserError, match=r"oidc\.issuer"):
        settings(tmp_path, f'issuer = "{issuer}"')


@pytest.mark.parametrize("issuer", ["http://127.0.0.1:8080/realms/x", "http://localhost:1", "http://[::1]:1", ISSUER])
def test_issuer_on_this_machine_may_be_http(tmp_path: Path, issuer: str) -> None:
    assert settings(tmp_path, f'issuer = "{issuer}"')["oidc.issuer"] == issuer
