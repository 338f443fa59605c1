"""Every route, asked with every kind of token: the table of routes.py against the service and its own description."""

import re
from collections.abc import Generator
from typing import Any, Final

import httpx
import pytest

from tests.contract.routes import TABLE, Row, settings
from tests.contract.town import Town, town
from tests.harness import Json, wait_until

FIELDS: Final = {
    "api": {"code", "message", "hint"},
    "v1": {"message", "type", "param", "code"},
    "resource_server": {"code", "message", "info"},
}
_WORD: Final = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]+)*")
METHODS: Final = ("GET", "PUT", "POST", "DELETE", "PATCH")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    folder = tmp_path_factory.mktemp("town")
    with town(folder, settings(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def described(shared: Town) -> Json:
    """Return what the service says of its routes."""
    return shared.as_("alice", "GET", "/api/openapi.json").json()["paths"]


def check_refusal(answer: httpx.Response, route: str) -> Json:
    """Return the error of a refusal, which must have the shape of its family and name no token."""
    assert answer.headers["content-type"] == "application/json", answer.headers
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == FIELDS[route.split("/")[1]], error
    assert isinstance(error["code"], str) and error["code"] and error["message"], error
    assert "frt_" not in answer.text
    return error


def check_answer(answer: httpx.Response, row: Row, status: int, described: Json, who: str) -> None:
    """Check what anybody got: the status, that it is documented, a request id, and the shape of a refusal."""
    assert answer.status_code == status, (who, answer.status_code, answer.text)
    documented = described[row.route][row.method.lower()]["responses"]
    assert str(status) in documented, (status, sorted(documented))
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
    if status >= 400:
        check_refusal(answer, row.route)


def test_table_has_every_route_of_the_description(described: Json) -> None:
    there = {(method.upper(), path) for path, item in described.items() for method in item}
    assert {(row.method, row.route) for row in TABLE} == there
    assert len(TABLE) == len(there)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.method} {row.route}")
def test_route_answers_each_as_it_says(shared: Town, described: Json, row: Row) -> None:
    path, body = row.request(shared)
    for what, token in [("no token", None), *shared.bad.items()]:
        answer = shared.ask(row.method, path, token, **body)
        check_answer(answer, row, 401, described, what)
        assert answer.json()["error"]["code"] == "unauthenticated"
        challenge = "Bearer" if token is None else 'Bearer error="invalid_token"'
        assert answer.headers["www-authenticate"] == challenge
    for who, status in row.statuses().items():
        if status:
            path, body = row.request(shared)
            check_answer(shared.as_(who, row.method, path, **body), row, status, described, who)


@pytest.mark.parametrize("row", [row for row in TABLE if row.other == 404], ids=lambda row: f"{row.method} {row.route}")
def test_what_is_anothers_reads_as_what_is_not_there(shared: Town, row: Row) -> None:
    path, body = row.request(shared)

    def told(path: str, body: Any) -> tuple[int, list[str], str]:
        answer = shared.as_("bob", row.method, path, **body)
        names = [name for name in answer.headers if name not in ("x-request-id", "date", "content-length")]
        return answer.status_code, names, _WORD.sub("ID", answer.text)

    # The same, but for an id that nobody has.
    nowhere = _WORD.sub(_another, path), _replaced(body)
    assert nowhere != (path, body)
    assert told(path, body) == told(*nowhere)


def _another(found: re.Match[str]) -> str:
    """Return an id of the same kind that is nobody's."""
    return re.sub(r"[0-9a-f]", lambda digit: "0123456789abcdef"[15 - int(digit[0], 16)], found[0])


def _replaced(value: Any) -> Any:
    match value:
        case dict():
            return {key: _replaced(each) for key, each in value.items()}
        case str():
            return _WORD.sub(_another, value)
        case _:
            return value


def test_methods_that_a_route_has_not_are_refused_in_its_familys_shape(shared: Town, described: Json) -> None:
    for route, item in described.items():
        for method in METHODS:
            if method.lower() in item:
                continue
            answer = shared.as_("carol", method, re.sub(r"\{[^}]*\}", "x", route))
            # Another route may have the path: one whose name is a word here, as /v1/files/{id} has /v1/files/x.
            assert answer.status_code in (404, 405), (method, route, answer.text)
            check_refusal(answer, route)
            assert shared.ask(method, re.sub(r"\{[^}]*\}", "x", route), None).status_code == 401


@pytest.mark.parametrize("path", ["/api/nothing", "/v1/nothing", "/resource_server/nothing", "/api/jobs/a/b/c"])
def test_what_is_no_route_is_refused_in_its_familys_shape(shared: Town, path: str) -> None:
    for method in METHODS:
        answer = shared.as_("alice", method, path)
        assert answer.status_code == 404
        check_refusal(answer, path)


@pytest.mark.parametrize("path", ["/docs", "/api/openapi.json", "/", "/nothing"])
def test_pages_that_are_no_part_of_the_description_need_a_token_too(shared: Town, path: str) -> None:
    for token in (None, *shared.bad.values()):
        assert shared.ask("GET", path, token).status_code == 401


def test_admin_may_end_the_service_from_afar(shared: Town) -> None:
    assert shared.as_("carol", "POST", "/api/stop").status_code == 202
    wait_until(lambda: not shared.box.processes(), "it has ended")
