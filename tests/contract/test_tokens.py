"""Tokens: who is let in, by which route, and what is told to those who are not."""

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import httpx
import pytest

from freight.client.sync import Client
from freight.errors import NotAllowed, Unauthenticated
from tests.contract.town import MODEL, Town, town
from tests.harness import wait_until

CANARY_LABEL: Final = "the laptop"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town")) as made:
        yield made


def test_whether_the_service_answers_may_be_asked_by_anybody(shared: Town) -> None:
    assert (shared.ask("GET", "/healthz", None).status_code, shared.ask("GET", "/healthz", "x").text) == (200, "ok")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/batches", {"message", "type", "param", "code"}),
        ("/resource_server/v1/batches", {"code", "message", "info"}),
        ("/api/jobs", {"code", "message", "hint"}),
    ],
)
def test_refusals_have_the_shape_of_the_routes_family(shared: Town, path: str, fields: set[str]) -> None:
    for token in (None, *shared.bad.values()):
        answer = shared.ask("GET", path, token)
        assert (answer.status_code, set(answer.json()["error"])) == (401, fields)


def test_who_shows_a_token_that_was_good_is_told_what_became_of_it(shared: Town) -> None:
    answers = [shared.ask("GET", "/api/jobs", shared.bad[what]) for what in ("bad", "revoked", "expired")]
    bad, revoked, expired = (answer.json()["error"]["message"] for answer in answers)
    assert (bad, revoked) == ("the token is not good here", "the token was revoked")
    assert re.fullmatch(r"the token has expired: \d{4}-\d\d-\d\dT[\d:.]+Z", expired), expired
    assert len({answer.json()["error"]["code"] for answer in answers}) == 1
    assert len({tuple(k for k in answer.headers if k != "x-request-id") for answer in answers}) == 1


@pytest.mark.parametrize(
    ("method", "path", "field", "words"),
    [
        ("POST", "/v1/chat/completions", "message", "only batches are served here, by /v1/files, /v1/batches"),
        ("POST", "/resource_server/v1/batches", "info", "POST /resource_server/{cluster}/{framework}/v1/batches"),
        ("PUT", "/resource_server/v1/batches", "info", "GET /api/openapi.json"),
        ("GET", "/api/nothing", "hint", "GET /api/openapi.json"),
        ("GET", "/api/jobs?limit=x", "hint", "GET /api/openapi.json"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(
    shared: Town, method: str, path: str, field: str, words: str
) -> None:
    answer = shared.as_("alice", method, path)
    assert answer.status_code in (400, 404, 405) and words in answer.json()["error"][field], answer.text


def test_list_of_tokens_marks_those_that_have_expired(shared: Town) -> None:
    rows = shared.box.freight("token", "list").stdout.splitlines()
    assert [row.split()[1] for row in rows if "(expired)" in row] == ["alice"]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Basic {}", "bearer {} {}", "{}", "Bearer {},", "Token {}", "Bearer, Bearer {}"]
)
def test_headers_that_are_no_bearer_token_are_refused(shared: Town, header: str) -> None:
    sent = header.replace("{}", shared.tokens["alice"])
    assert shared.ask("GET", "/api/jobs", None, headers={"Authorization": sent}).status_code == 401


def test_scheme_may_be_written_in_any_case(shared: Town) -> None:
    for scheme in ("bearer", "BEARER"):
        sent = {"Authorization": f"{scheme} {shared.tokens['alice']}"}
        assert shared.ask("GET", "/api/jobs", None, headers=sent).status_code == 200


@pytest.mark.parametrize("query", ["access_token={}", "token={}", "api_key={}", "x={}", "{}=1", "Access_Token=abc"])
def test_token_in_the_url_is_refused_whoever_asks(shared: Town, query: str) -> None:
    path = f"/api/jobs?{query.replace('{}', shared.tokens['alice'])}"
    for token in (None, shared.tokens["alice"]):
        answer = shared.ask("GET", path, token)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert shared.tokens["alice"] not in answer.text


@pytest.mark.parametrize("query", ["x={}", "x=a{}b", "{}=1"])
def test_token_of_an_identity_provider_in_the_url_is_refused_too(shared: Town, query: str) -> None:
    token = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl"
    answer = shared.as_("alice", "GET", f"/api/jobs?{query.replace('{}', token)}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_client_may_name_its_request_as_long_as_the_name_is_sane(shared: Town) -> None:
    insane = ("x" * 65, "a b", "a%0ab", "frt_abc", "my-frt_abc")
    for given, kept in (("abc-1.2:3", True), *((text, False) for text in insane)):
        answer = shared.as_("alice", "GET", "/api/version", headers={"X-Request-Id": given})
        assert (answer.headers["x-request-id"] == given) is kept
        assert len(answer.headers.get_list("x-request-id")) == 1
    assert shared.ask("GET", "/healthz", None, headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    refused = shared.ask("GET", "/api/jobs", None, headers={"X-Request-Id": "seen-in-the-log", "Host": "evil.example"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "seen-in-the-log")


def test_log_tells_which_request_a_line_is_about(shared: Town) -> None:
    token = shared.box.freight("token", "create", "erin", "--expires", "1h", "--json")
    made = json.loads(token.stdout)
    shared.box.freight("token", "revoke", made["info"]["id"])
    answer = shared.ask("GET", "/api/jobs", made["token"], headers={"X-Request-Id": "request-17"})
    assert answer.status_code == 401
    log = (shared.box.data / "serve.log").read_text()
    assert f"[request-17] token {made['info']['id']} of erin was refused: it was revoked" in log


def test_token_is_printed_once_and_listed_without_itself(shared: Town) -> None:
    made = shared.box.freight("token", "create", "frank", "--expires", "30d", "--name", CANARY_LABEL)
    assert re.fullmatch(r"frt_[A-Za-z0-9_-]{43}\n", made.stdout)
    number = made.stderr.partition(":")[0]
    assert f"{number}: a token for frank (user), good until 2" in made.stderr

    listed = shared.box.freight("token", "list")
    [line] = [line for line in listed.stdout.splitlines() if line.startswith(number)]
    assert CANARY_LABEL in line and "frank" in line and line.endswith("never")
    assert made.stdout.strip() not in listed.stdout
    rows = json.loads(shared.box.freight("token", "list", "--json").stdout)
    [row] = [row for row in rows if row["id"] == number]
    assert set(row) == {"id", "user", "role", "label", "created_at", "expires_at", "used_on", "groups"}

    with shared.client(token=made.stdout.strip()) as client:
        client.version()
        revoked = shared.box.freight("token", "revoke", "frank")
        assert (revoked.status, revoked.stdout, revoked.stderr) == (0, "", f"{number}: revoked (frank)\n")
        with pytest.raises(Unauthenticated):
            client.version()
    again = shared.box.freight("token", "revoke", "frank")
    assert again.status == 2 and "there is no token frank" in again.stderr


def test_upload_whose_token_is_revoked_meanwhile_is_refused_and_leaves_nothing(shared: Town) -> None:
    token = json.loads(shared.box.freight("token", "create", "gina", "--json").stdout)
    folder = shared.box.data / "uploads"
    before = sorted(folder.iterdir())

    def body() -> Generator[bytes]:
        yield b"{}\n"
        wait_until(lambda: sorted(folder.iterdir()) != before, "the upload has begun")
        assert shared.as_("carol", "DELETE", f"/api/tokens/{token['info']['id']}").status_code == 200
        yield b"{}\n"

    with httpx.Client(trust_env=False) as client:
        headers = {"Authorization": f"Bearer {token['token']}"}
        answer = client.post(f"{shared.url}/api/uploads", content=body(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert sorted(folder.iterdir()) == before


def test_command_line_takes_the_token_from_the_environment_or_a_file(shared: Town, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(shared.tokens["alice"] + "\n")
    here = {"FREIGHT_SERVER": shared.url}
    for token in ({"FREIGHT_TOKEN": shared.tokens["alice"]}, {"FREIGHT_TOKEN_FILE": str(file)}):
        assert shared.box.freight("batch", "list", **here, **token).status == 0
    refused = shared.box.freight("batch", "list", **here)
    assert refused.status == 4 and "no token" in refused.stderr
    for command in (("token", "list"), ("token", "create", "mallory"), ("token", "revoke", "carol")):
        answer = shared.box.freight(*command, **here, FREIGHT_TOKEN=shared.tokens["alice"])
        assert answer.status == 4 and "only admins" in answer.stderr
    made = shared.box.freight("token", "create", "gina", **here, FREIGHT_TOKEN=shared.tokens["carol"])
    assert made.status == 0 and made.stdout.startswith("frt_")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("create", "a/b"), 2), (("create", ""), 2), (("create", "a", "--role", "king"), 2),
        (("create", "a", "--expires", "soon"), 2), (("revoke", "tok-00000000"), 2), (("create",), 2),
    ],
)  # fmt: skip
def test_token_command_refuses_what_makes_no_sense(shared: Town, arguments: tuple[str, ...], status: int) -> None:
    done = shared.box.freight("token", *arguments)
    assert (done.status, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")


def test_owner_on_the_unix_socket_needs_no_token_and_may_do_everything(shared: Town) -> None:
    with Client(shared.box.server) as client:
        assert {one.user for one in client.tokens()} >= {"alice", "bob", "carol"}
    with Client(shared.box.server, "frt_nonsense") as client:
        client.tokens()


def test_users_clients_say_that_only_admins_may(shared: Town) -> None:
    with shared.client("alice") as client:
        for attempt in (client.stop, client.tokens, lambda: client.pin(MODEL), lambda: client.create_token("mallory")):
            with pytest.raises(NotAllowed):
                attempt()


def test_no_token_is_anywhere_but_with_its_user(shared: Town) -> None:
    secrets = [*shared.tokens.values(), shared.bad["expired"], shared.bad["revoked"]]
    shared.job("alice", "a prompt")
    for token in secrets:
        shared.ask("GET", "/api/jobs/" + token, shared.tokens["alice"])
        shared.ask("POST", "/api/jobs", token, content=b"{")
    needles = [form for token in secrets for form in (token.encode(), token[4:].encode())]
    for path in shared.box.data.rglob("*"):
        if path.is_file():
            kept = path.read_bytes()
            assert not [needle for needle in needles if needle in kept], path
    for process in shared.box.processes():
        for name in ("cmdline", "environ"):
            kept = Path(f"/proc/{process.pid}/{name}").read_bytes()
            assert not [needle for needle in needles if needle in kept], process
