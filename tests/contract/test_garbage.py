"""What is no request of any client: refused by every route in the shape of its family, and never an error of ours."""

import http.client
import json
import re
from collections.abc import Generator, Iterator
from typing import Any, Final

import pytest

from tests.contract.routes import TABLE, settings
from tests.contract.test_matrix import FIELDS
from tests.contract.town import Town, town
from tests.harness import PATIENCE_S, Json

# In a path or a query: what is no text, no number, no name, and what leads elsewhere.
WORDS: Final = (
    "%00", "%ED%A0%80", "%FF%FE", "%0d%0aX-Evil:%201", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..", "%252e", "a%2Fb", "~",
    "'%3b--", "%F0%9F%9A%80", "x" * 4000, "-1", "0", "1e999", "nan", "NaN~x", "9" * 30, "9" * 5000, "1_0", "%D9%A3",
    "[]", "null", "%",
)  # fmt: skip
_PLACE: Final = re.compile(r"\{[^}]*\}")
DEEP: Final = 50_000
_BODIES: Final[dict[str, bytes]] = {
    "none": b"", "null": b"null", "array": b"[]", "text": b'"x"', "NUL": b"\0", "no UTF-8": b'{"model": "\xff\xfe"}',
    "no JSON": b"{", "NaN": b'{"workers": NaN}',
    "deep": b"[" * DEEP, "deep in": b'{"metadata": ' * DEEP,
    "long number": b'{"workers": ' + b"9" * 10_000 + b"}", "twice": b'{"model": "a", "model": "b"}',
    "UTF-16": "{}".encode("utf-16"),
}  # fmt: skip
_TYPES: Final = (
    "application/json; charset=utf-16", "text/plain", "multipart/form-data",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded", "\xff/\xfe", "",
)  # fmt: skip
# What stands for any value of a good body.
VALUES: Final = (
    "\0", "\ud800", "x" * 10_000, "", "\r\n", 10**30, -(10**30), 2**63, 1.5, -1, True, None, [], {},
    ["\ud800"], {"\ud800": "\0"},
)  # fmt: skip
_HEADERS: Final = (
    {"Idempotency-Key": "\xff"}, {"Idempotency-Key": "k" * 300}, {"Range": "bytes=9-1,x"},
    {"Range": "bytes=0-" + "9" * 400},
    {"Range": "lines=\xff"}, {"If-None-Match": "\xff,\""}, {"If-Match": "x"}, {"If-Range": "\xff"},
    {"Accept": "\xff/*;q=z"},
    {"Accept-Encoding": "\xff"}, {"Cookie": "a=\xff; frt"}, {"X-Request-Id": "\xff"}, {"Last-Event-ID": "9" * 400},
)  # fmt: skip
Sent = tuple[str, bytes, dict[str, str]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    # Nobody is to be told to wait.
    folder = tmp_path_factory.mktemp("town")
    with town(folder, settings(folder, "requests = 100_000")) as made:
        yield made


def garbage(route: str, description: Json, path: str, body: Json | None) -> Iterator[Sent]:
    """Return requests of one route that are wrong in one place each: path, body and headers."""
    for word in WORDS:
        if "{" in route:
            yield _PLACE.sub(word, route), b"", {}
        for parameter in description.get("parameters", []):
            if parameter["in"] == "query":
                yield f"{path}?{parameter['name']}={word}", b"", {}
    yield f"{path}?{'&'.join(['limit=1', 'after=x'] * 400)}", b"", {}
    for headers in _HEADERS:
        yield path, b"", headers
    if "requestBody" not in description:
        return
    for sent in _BODIES.values():
        yield path, sent, {"Content-Type": "application/json"}
    good = json.dumps(body).encode()
    for kind in _TYPES:
        for sent in (good, b"", b"--x\r\n"):
            yield path, sent, {"Content-Type": kind}
    for key in (*body, "metadata", "name", "\ud800") if body else ():
        for value in VALUES:
            yield path, json.dumps({**body, key: value}).encode(), {"Content-Type": "application/json"}


@pytest.mark.parametrize("who", ["alice", "carol"])
def test_garbage_in_any_place_is_refused_as_documented(shared: Town, who: str) -> None:
    described = shared.as_(who, "GET", "/api/openapi.json").json()["paths"]
    host, _, port = shared.url.removeprefix("http://").partition(":")
    wrong: list[tuple[Any, ...]] = []
    for row in TABLE:
        if who == "carol" and (row.owner != 403 or row.route == "/api/stop"):
            continue  # The admin is asked what others may not; and to stop is the end.
        path, body = row.request(shared, who)
        description = described[row.route][row.method.lower()]
        documented = {*map(int, description["responses"]), 404, 405}
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        for target, sent, headers in garbage(row.route, description, path, body.get("json")):
            connection.request(row.method, target, sent, {"Authorization": f"Bearer {shared.tokens[who]}", **headers})
            answer = connection.getresponse()
            said = answer.read()
            if answer.status not in documented or (answer.status >= 400 and not is_refusal(answer, said, row.route)):
                wrong.append((row.method, target[:200], sent[:100], headers, answer.status, said[:300]))
        connection.close()
    assert not wrong, "\n".join(map(str, wrong[:40]))


def is_refusal(answer: http.client.HTTPResponse, said: bytes, route: str) -> bool:
    """Return whether a refusal has its family's shape."""
    return (
        answer.headers["content-type"] == "application/json"
        and set(json.loads(said)["error"]) == FIELDS[route.split("/")[1]]
    )
