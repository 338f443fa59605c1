"""`freight.Client` and `freight.AsyncClient`, and the API that they speak."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from freight import AsyncClient, Client
from freight.client.calls import ConnectionLost
from freight.errors import Conflict, NoServer, NoSuchJob, UserError, WrongState
from tests.certificates import made_certificate
from tests.harness import Json, content
from tests.service import Endpoint, ServiceBox, chats, service_box

ROUTES: Final = {
    ("get", "/api/version"), ("get", "/api/models"), ("get", "/api/workers"), ("post", "/api/stop"),
    ("post", "/api/uploads"),
    ("delete", "/api/uploads/{upload}"), ("post", "/api/jobs"), ("get", "/api/jobs"), ("get", "/api/names"),
    ("get", "/api/jobs/{name}"), ("delete", "/api/jobs/{name}"), ("post", "/api/jobs/{name}/cancel"),
    ("post", "/api/jobs/{name}/resume"), ("post", "/api/jobs/{name}/retry"), ("get", "/api/jobs/{name}/results"),
    ("get", "/api/jobs/{name}/logs"), ("get", "/api/devices"), ("post", "/api/devices/{device}/release"),
    ("put", "/api/pins/{model}"), ("delete", "/api/pins/{model}"), ("get", "/api/tokens"), ("post", "/api/tokens"),
    ("delete", "/api/tokens/{which}"),
}  # fmt: skip
# httpx's own way of trying a socket leaves it to the garbage collector where nobody listens.
LEAKY: Final = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


def body_of(*texts: str) -> bytes:
    """Return an input."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in chats(*texts))


def test_client_submits_waits_and_reads(service: ServiceBox, end: Endpoint) -> None:
    path = service.write("in.jsonl", chats("a", "refuse always", "b"))
    seen: list[int] = []
    with Client(service.server) as client:
        assert (client.version().data_folder, client.server) == (str(service.data), str(service.socket))
        made = client.submit(path, model=end.url, name="nightly", priority=2)
        assert (made.is_new, made.job.name, made.job.records, made.job.priority) == (True, "nightly", 3, 2)
        done = client.wait("nightly", on_status=lambda job: seen.append(job.done))
        assert (done.state, done.done, done.failed, seen[-1]) == ("COMPLETED", 3, 1, 3)
        with client.results("nightly") as stream:
            lines = [json.loads(line) for line in stream]
            assert (stream.done, stream.total) == (3, 3)
        assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
        assert [json.loads(line)["custom_id"] for line in client.results("nightly", only="failed")] == ["1"]
        out = service.folder / "out.jsonl"
        assert client.save_results(made.job.id, out) == 3
        assert service.results() == lines
        with pytest.raises(UserError, match="exists already"):
            client.save_results("nightly", out)
        assert client.save_results("nightly", out, only="ok", force=True) == 3
        assert [content(line) for line in service.results()] == ["a, 1", "b, 1"]
        out.unlink()
        assert [job.name for job in client.jobs()] == [job.name for job in client.jobs("completed")] == ["nightly"]
        assert list(client.jobs("active")) == []
        assert client.retry("nightly").state == "QUEUED"
        assert client.wait("nightly").failed == 1
        client.delete("nightly")
        assert list(client.jobs()) == []


def test_async_client_does_the_same(service: ServiceBox, end: Endpoint) -> None:
    path = service.write("in.jsonl", chats("a", "hold"))
    out = service.folder / "out.jsonl"

    async def flow() -> None:
        async with AsyncClient(service.server) as client:
            assert (await client.version()).data_folder == str(service.data)
            made = await client.submit(path, model=end.url, name="nightly", idempotency_key="k")
            again = await client.submit(path, model=end.url, name="nightly", idempotency_key="k")
            assert (made.is_new, again.is_new, again.job.id) == (True, False, made.job.id)
            with pytest.raises(TimeoutError, match="nightly is"):
                await client.wait("nightly", timeout=0.2)
            with pytest.raises(WrongState):
                await client.results("nightly")
            looking = asyncio.create_task(client.wait("nightly"))
            # Both at once, on one connection's client.
            await client.cancel("nightly")
            assert (await looking).state == "CANCELLED"
            end.let_go.set()
            assert (await client.resume("nightly")).state == "QUEUED"
            assert (await client.wait("nightly")).done == 2
            lines = [json.loads(line) async for line in await client.results("nightly")]
            assert [line["custom_id"] for line in lines] == ["0", "1"]
            assert await client.save_results("nightly", out) == 2
            assert [job.name async for job in client.jobs()] == ["nightly"]
            assert await client.workers() == []
            async with await client.logs("nightly", tail=5) as stream:
                with Client(service.server) as other, other.logs("nightly", tail=5) as same:
                    assert [line async for line in stream] == list(same)
            with pytest.raises(NoSuchJob):
                await client.job("nothing")
            await client.delete("nightly")

    asyncio.run(flow())
    assert [line["custom_id"] for line in service.results()] == ["0", "1"]
    out.unlink()


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        named = {name: each for name, each in vars(kind).items() if name[0] != "_" and callable(each)}
        return {name: list(inspect.signature(each).parameters) for name, each in named.items()}

    assert methods(Client) == methods(AsyncClient)


def test_input_may_be_bytes_a_file_or_pieces(service: ServiceBox, end: Endpoint) -> None:
    body = body_of("a", "b")
    path = service.folder / "in.jsonl"
    path.write_bytes(body)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    with Client(service.server) as client, path.open("rb") as file:
        for source in (path, str(path), body, file, pieces()):
            job = client.submit(source, model=end.url).job
            assert client.wait(job.id).done == 2
            assert (job.bytes, job.records) == (len(body), 2)


def test_what_goes_wrong_has_an_error_of_its_own(service: ServiceBox, end: Endpoint) -> None:
    with Client(service.server) as client:
        client.submit(body_of("hold"), model=end.url, name="held")
        attempts: list[tuple[type[Exception], Callable[[], object]]] = [
            (NoSuchJob, lambda: client.job("nothing")),
            (NoSuchJob, lambda: client.cancel("../held")),
            (WrongState, lambda: client.results("held")),
            (WrongState, lambda: client.delete("held")),
            (WrongState, lambda: client.retry("held")),
            (Conflict, lambda: client.submit(body_of("a"), model=end.url, name="held")),
            (UserError, lambda: client.submit(body_of("a"), model="nope")),
            (UserError, lambda: client.submit(b"[1]\n", model=end.url)),
            (UserError, lambda: client.submit(service.folder / "missing.jsonl", model=end.url)),
            (UserError, lambda: client.submit(b"", model=end.url)),
            (UserError, lambda: list(client.jobs("sleeping"))),
            (UserError, lambda: client.submit(body_of("a"), model=end.url, workers=0)),
            (TimeoutError, lambda: client.wait("held", timeout=0.1)),
        ]
        for kind, attempt in attempts:
            with pytest.raises(kind) as caught:
                attempt()
            assert kind is TimeoutError or str(caught.value)
        # What was refused has left neither a job nor an upload.
        assert [job.name for job in client.jobs()] == ["held"]
        assert list((service.data / "uploads").iterdir()) == []
        assert client.job("held").state in ("STARTING", "RUNNING")


@LEAKY
def test_no_service_is_an_error_of_its_own(tmp_path: Path) -> None:
    server = f"unix://{tmp_path}/api.sock"
    with Client(server) as client, pytest.raises(NoServer, match="no Freight service answers"):
        client.version()

    async def ask() -> None:
        async with AsyncClient(server) as client:
            await client.version()

    with pytest.raises(NoServer):
        asyncio.run(ask())


@LEAKY
def test_certificate_that_is_not_trusted_and_the_wrong_scheme_are_told_with_the_fix(tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path, "own")
    toml = f'[server]\nlisten = "127.0.0.1:0"\ntls_cert = "{cert}"\ntls_key = "{key}"'
    with service_box(tmp_path / "box", toml) as box:
        assert box.freight("serve", "--background").status == 0
        [url] = re.findall(r"^serving on (https\S+)$", (box.data / "serve.log").read_text(), re.MULTILINE)
        token = box.freight("token", "create", "alice").stdout.strip()
        asked = ("batch", "list", "--server")

        refused = box.freight(*asked, url, FREIGHT_TOKEN=token)
        assert (refused.status, "CERTIFICATE" in refused.stderr) == (5, False)
        assert f"the certificate of the service at {url} is not trusted: self-signed certificate" in refused.stderr
        assert "SSL_CERT_FILE" in refused.last_line()
        assert box.freight(*asked, url, FREIGHT_TOKEN=token, SSL_CERT_FILE=cert).status == 0

        plain = box.freight(*asked, url.replace("https:", "http:"), FREIGHT_TOKEN=token)
        assert (plain.status, "does it speak https?" in plain.last_line()) == (1, True), plain.stderr
        below = box.freight(*asked, f"{url}/v1", FREIGHT_TOKEN=token, SSL_CERT_FILE=cert)
        assert (below.status, below.last_line()) == (
            2, f"hint: leave out /v1, which is for OpenAI's SDK: --server {url}"
        )  # fmt: skip

        async def ask() -> None:
            async with AsyncClient(url, token) as client:
                await client.version()

        with pytest.raises(NoServer, match="is not trusted"):
            asyncio.run(ask())


@LEAKY
def test_client_goes_on_with_the_next_service(service: ServiceBox, end: Endpoint) -> None:
    with Client(service.server) as client:
        client.submit(body_of("a"), model=end.url, name="kept")
        client.wait("kept")
        first = client.version().pid
        service.stop()
        with pytest.raises((NoServer, ConnectionLost)):
            client.version()
        assert service.freight("serve", "--background").status == 0
        assert client.version().pid != first
        assert client.job("kept").state == "COMPLETED"


def connection(service: ServiceBox) -> httpx.Client:
    """Return a client of the bare API."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(service.socket)), base_url="http://freight")


KINDS: Final = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
    "null": type(None),
}  # fmt: skip


def fits(value: Any, schema: Json, whole: Json) -> str:
    """Return where a value breaks its schema; "" where it does not. Fields that no schema names break it too."""
    if "$ref" in schema:
        return fits(value, whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        found = [fits(value, each, whole) for each in schema["anyOf"]]
        return "" if "" in found else found[0]
    if not isinstance(value, KINDS[schema["type"]]):
        return f"{value!r} is no {schema['type']}"
    inner: list[tuple[Any, Json]] = []
    if schema["type"] == "array":
        inner = [(each, schema["items"]) for each in value]
    elif "properties" in schema:
        strange = (set(value) - set(schema["properties"])) | (set(schema.get("required", ())) - set(value))
        if strange:
            return f"{schema['title']}: {strange}"
        inner = [(each, schema["properties"][key]) for key, each in value.items()]
    return next((words for each, shape in inner if (words := fits(each, shape, whole))), "")


def test_document_of_the_api_lists_every_route_and_answers_are_as_it_says(service: ServiceBox, end: Endpoint) -> None:
    with connection(service) as http:
        whole = http.get("/api/openapi.json").json()
        routes = {(method, path) for path, methods in whole["paths"].items() for method in methods}
        assert {(method, path) for method, path in routes if path.startswith("/api/")} == ROUTES
        assert "text/html" in http.get("/docs").headers["content-type"]

        def checked(method: str, path: str, status: int, name: str = "", **more: Any) -> Any:
            reply = http.request(method, path.replace("{name}", name), **more)
            assert reply.status_code == status, reply.text
            described = whole["paths"][path][method.lower()]["responses"][str(status)]
            schema = described.get("content", {}).get("application/json", {}).get("schema")
            assert schema is not None, (path, status)
            assert fits(reply.json(), schema, whole) == "", (path, status)
            return reply.json()

        checked("GET", "/api/version", 200)
        upload = checked("POST", "/api/uploads", 201, content=body_of("a", "refuse always", "hold"))
        made = checked("POST", "/api/jobs", 201, json={"upload": upload["id"], "model": end.url, "name": "one"})
        assert set(made) == {"job", "notes", "is_new"}
        service.until("one", lambda job: job.failures and job.workers and job.done == 2, "it is under way")
        status = checked("GET", "/api/jobs/{name}", 200, "one")
        assert status["workers"] and status["failures"] and status["events"]
        assert checked("GET", "/api/workers", 200)["workers"]
        assert checked("GET", "/api/devices", 200)["devices"]
        assert checked("GET", "/api/models", 200)["models"]
        assert checked("PUT", "/api/pins/{model}", 400, params={"workers": 1})["error"]["hint"]
        assert checked("DELETE", "/api/pins/{model}", 400)["error"]["hint"]
        assert checked("POST", "/api/devices/{device}/release", 400)["error"]["hint"]
        assert checked("GET", "/api/names", 200) == {"names": ["one"], "next": None}
        checked("GET", "/api/jobs", 200)
        assert checked("GET", "/api/jobs/{name}/results", 409, "one")["error"]["code"] == "wrong_state"
        assert checked("POST", "/api/jobs/{name}/retry", 409, "one")["error"]["hint"]
        checked("POST", "/api/jobs/{name}/cancel", 200, "one")
        service.ended("one")
        checked("POST", "/api/jobs/{name}/resume", 200, "one")
        assert checked("GET", "/api/jobs/{name}", 404, "two")["error"]["code"] == "no_such_job"
        assert checked("POST", "/api/jobs", 404, json={"upload": "nope"})["error"]["code"] == "no_such_upload"
        again = checked("POST", "/api/uploads", 201, content=body_of("a"))
        taken = checked("POST", "/api/jobs", 409, json={"upload": again["id"], "model": end.url, "name": "one"})
        assert taken["error"]["code"] == "conflict"
        assert http.delete(f"/api/uploads/{again['id']}").status_code == 204


def test_every_error_of_the_api_has_one_shape(service: ServiceBox) -> None:
    attempts: tuple[tuple[int, str, str, Json], ...] = (
        (404, "GET", "/api/nothing", {}),
        (405, "PUT", "/api/jobs", {}),
        (400, "GET", "/api/jobs?limit=0", {}),
        (400, "GET", "/api/jobs?limit=x", {}),
        (400, "GET", "/api/jobs?state=asleep", {}),
        (400, "GET", "/api/jobs?after=here", {}),
        (400, "POST", "/api/jobs", {"content": b"{"}),
        (400, "POST", "/api/jobs", {"json": {"upload": "a", "colour": "red"}}),
        (404, "POST", "/api/jobs", {"json": {"upload": "../../etc", "model": "x"}}),
        (404, "POST", "/api/jobs/nothing/cancel", {}),
        (404, "GET", "/api/jobs/nothing/logs", {}),
    )
    with connection(service) as http:
        for status, method, path, more in attempts:
            reply = http.request(method, path, **more)
            assert reply.status_code == status, (path, reply.text)
            assert set(reply.json()) == {"error"}
            assert set(reply.json()["error"]) == {"code", "message", "hint"}
            assert reply.json()["error"]["message"]


def test_pages_of_jobs_lose_none(service: ServiceBox, end: Endpoint) -> None:
    with Client(service.server) as client, connection(service) as http:
        names = [client.submit(body_of("a"), model=end.url, name=f"job-{n}").job.name for n in range(5)]
        seen: list[str] = []
        after: str | None = None
        while True:
            params = {"limit": "2", **({"after": after} if after else {})}
            page = http.get("/api/jobs", params=params).json()
            assert 1 <= len(page["jobs"]) <= 2
            seen += [job["name"] for job in page["jobs"]]
            after = page["next"]
            if after is None:
                break
        assert seen == names[::-1]
