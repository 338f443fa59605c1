"""People whom an OpenID provider knows, on a service that listens on TCP."""

import json
import time
from pathlib import Path
from typing import Any

from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.contract.town import MODEL, town
from tests.harness import wait_until
from tests.httpserver import Reply, http_server
from tests.service import service_box


def test_people_log_in_with_their_provider_and_tokens_go_on_while_it_is_down(tmp_path: Path) -> None:
    old, new = (RSAKey.generate_key(2048, {"kid": kid}, private=True) for kid in ("old", "new"))
    published, is_down = [old], list[bool]()

    def get(path: str) -> Reply:
        if is_down:
            return Reply(500)
        if path.endswith("openid-configuration"):
            return Reply(200, json.dumps({"issuer": url, "jwks_uri": f"{url}/keys"}).encode())
        return Reply(200, json.dumps({"keys": [key.as_dict(private=False) for key in published]}).encode())

    def signed(key: RSAKey = old, **claims: Any) -> str:
        whole = {"iss": url, "aud": "freight", "exp": time.time() + 600, "preferred_username": "alice", **claims}
        return jwt.encode({"alg": "RS256", "kid": key.kid}, whole, key)

    with http_server(get, lambda _: Reply()) as url:
        names = 'admin_group = "operators"\nuser_claim = "preferred_username"\n'
        settings = f'[oidc]\nissuer = "{url}"\naudience = "freight"\n{names}'
        with town(tmp_path, settings) as place:
            is_down.append(True)
            down = place.ask("GET", "/api/version", signed())
            assert (down.status_code, down.json()["error"]["code"]) == (503, "unavailable")
            assert down.headers["retry-after"]
            assert place.as_("alice", "GET", "/api/version").status_code == 200
            is_down.clear()
            wait_until(lambda: place.ask("GET", "/api/version", signed()).status_code == 200, "it is asked again")

            # The same person, whichever way they came.
            job = place.job("alice", name="mine")
            assert place.ask("GET", f"/api/jobs/{job}", signed()).json()["user"] == "alice"
            assert place.ask("GET", f"/api/jobs/{job}", signed(preferred_username="erin")).status_code == 404
            assert place.ask("GET", "/api/tokens", signed()).status_code == 403
            assert place.ask("GET", "/api/tokens", signed(groups=["operators"])).status_code == 200

            for wrong in (signed(aud="other"), signed(exp=time.time() - 100), signed(new), signed()[:-3]):
                refused = place.ask("GET", "/api/version", wrong)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthenticated")
                assert refused.headers["www-authenticate"] == 'Bearer error="invalid_token"'
                assert wrong not in (place.box.data / "serve.log").read_text()

            # A service that starts while the provider has another key knows that one alone.
            published[:] = [new]
            place.box.stop()
            again = place.box.freight("serve", "--background")
            assert again.status == 0, again.stderr
            place.url = place.found()
            assert place.ask("GET", "/api/version", signed(new)).status_code == 200
            assert place.ask("GET", "/api/version", signed()).status_code == 401
            assert place.as_("alice", "GET", "/api/jobs/mine").json()["model"] == MODEL


def test_provider_without_an_audience_is_refused_at_the_start(tmp_path: Path) -> None:
    with service_box(tmp_path / "box", '[oidc]\nissuer = "https://login.example.org"\n') as box:
        started = box.freight("serve", "--background")
        assert started.status == 2
        assert "oidc.audience is not" in started.stderr
