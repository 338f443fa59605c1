"""A service on TCP for several people, each known by a token."""

import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from freight.client.sync import Client
from freight.errors import FreightError
from tests.harness import PATIENCE_S, model_toml, wait_until
from tests.service import Endpoint, ServiceBox, chats, endpoint, service_box

PEOPLE: Final = {"alice": "user", "bob": "user", "carol": "admin"}
# The model that everybody may run.
MODEL: Final = "shared"
_URL: Final = re.compile(r"^serving on (http\S+)$", re.MULTILINE)


class Town:
    """The service, the people, and their tokens; `bad` ones are those that no longer show anybody."""

    def __init__(self, box: ServiceBox, end: Endpoint) -> None:
        self.box = box
        self.end = end
        self.url = self.found()
        self.tokens = {who: self.token(who, role) for who, role in PEOPLE.items()}
        # To make one takes long.
        self.http = httpx.Client(trust_env=False, timeout=PATIENCE_S)
        self._kept: dict[str, str] = {}
        self.bad = {"bad": "frt_" + "A" * 43, "expired": self.expired(), "revoked": self.revoked()}

    def kept(self, what: str, make: Callable[[], str]) -> str:
        """Return something's id; the first who asks for it has it made."""
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]

    def found(self) -> str:
        """Return where the service is now."""
        return _URL.findall(self.box.data.joinpath("serve.log").read_text())[-1]

    def token(self, user: str, role: str = "user", *options: str) -> str:
        """Return a new token, made on the command line."""
        done = self.box.freight("token", "create", user, "--role", role, *options)
        assert done.status == 0, done.stderr
        return done.stdout.strip()

    def expired(self) -> str:
        """Return a token that has expired."""
        with Client(self.box.server) as client:
            made = client.create_token("alice", expires_s=0.2)
        with self.client(token=made.token) as late:
            wait_until(lambda: self._is_refused(late), "it has expired")
        return made.token

    def revoked(self) -> str:
        """Return a token that was revoked."""
        with Client(self.box.server) as client:
            made = client.create_token("alice", "admin")
            client.revoke_tokens(made.info.id)
        return made.token

    def _is_refused(self, client: Client) -> bool:
        try:
            client.version()
        except FreightError:
            return True
        return False

    def client(self, who: str = "", token: str = "") -> Client:
        """Return somebody's client, on TCP."""
        return Client(self.url, token or self.tokens[who])

    def ask(self, method: str, path: str, token: str | None, **more: Any) -> httpx.Response:
        """Send one request on TCP."""
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        headers |= more.pop("headers", {})
        return self.http.request(method, self.url + path, headers=headers, **more)

    def as_(self, who: str, method: str, path: str, **more: Any) -> httpx.Response:
        """Send one request of somebody's."""
        return self.ask(method, path, self.tokens[who], **more)

    def upload(self, who: str, *texts: str) -> str:
        """Send an input of somebody's; return its id."""
        body = b"".join(json.dumps(record).encode() + b"\n" for record in chats(*(texts or ("a",))))
        answer = self.as_(who, "POST", "/api/uploads", content=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def job(self, who: str, *texts: str, **options: Any) -> str:
        """Make a job of somebody's and wait for its end; return its id."""
        request = {"upload": self.upload(who, *texts), "model": MODEL, **options}
        answer = self.as_(who, "POST", "/api/jobs", json=request)
        assert answer.status_code == 201, answer.text
        job = answer.json()["job"]["id"]
        with self.client(who) as client:
            assert client.wait(job, PATIENCE_S).state == "COMPLETED"
        return job


@contextmanager
def town(folder: Path, toml: str = "") -> Generator[Town]:
    """Run a service on TCP that three people have tokens for."""
    with endpoint() as end:
        model = model_toml(MODEL, engine="endpoint", source=end.url, batch=True)
        listen = '[server]\nlisten = "127.0.0.1:0"\n'
        with service_box(folder / "box", f"{listen}{toml}\n{model}") as box:
            done = box.freight("serve", "--background")
            assert done.status == 0, done.stderr
            made = Town(box, end)
            with made.http:
                yield made
