"""Every route of the service on TCP: how it is asked about something of somebody's, and what each person gets."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.contract.town import MODEL, PEOPLE, Town
from tests.harness import wait_until
from tests.service import chats

Body = dict[str, Any]
Asked = tuple[str, Body]


_BATCHES: Final = "/resource_server/v1/batches"


def settings(folder: Path, limits: str = "") -> str:
    """Return settings by which each person has a folder of their own below the town's, with an input in it."""
    for who in PEOPLE:
        granted = folder / "granted" / who
        granted.mkdir(parents=True)
        _write(granted / "in.jsonl", "a")
    paths = "\n".join(
        f'{who} = {{ read = ["{folder}/granted/{who}"], write = ["{folder}/granted/{who}"] }}' for who in PEOPLE
    )
    return f"[limits]\nactive_jobs = 10_000\n{limits}\n[paths]\n{paths}\n"


def lines(*texts: str) -> bytes:
    """Return the input of a job."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in chats(*texts, model=MODEL))


def _write(path: Path, *texts: str) -> None:
    path.write_bytes(lines(*texts))


@dataclass(frozen=True)
class Row:
    """One route: how it is asked, and the status for another user, for the owner of what it is about, for an admin.

    `asked` makes what the route is about, which is its owner's, and returns path and body. A status of 0: not asked.
    """

    method: str
    route: str
    other: int
    owner: int
    admin: int
    asked: Callable[[Town, str], Asked] = field(default=lambda *_: ("", {}))

    def request(self, place: Town, owner: str = "alice") -> Asked:
        """Return the path and the body."""
        path, body = self.asked(place, owner)
        return path or self.route, body

    def statuses(self) -> dict[str, int]:
        """Return what each person gets."""
        return {"bob": self.other, "alice": self.owner, "carol": self.admin}


def of_job(route: str) -> Callable[[Town, str], Asked]:
    """A route about a job that has ended, which stays as it is."""
    return lambda place, owner: (route.replace("{name}", place.kept(f"job of {owner}", lambda: place.job(owner))), {})


def _new_job(place: Town, owner: str) -> Asked:
    return "", {"json": {"upload": place.upload(owner), "model": MODEL}}


def _device(place: Town, _: str) -> Asked:
    return f"/api/devices/{place.box.device}/release", {}


def _token(place: Town, _: str) -> Asked:
    place.as_("carol", "POST", "/api/tokens", json={"user": "dora"})
    return "/api/tokens/dora", {}


def _pin(*_: object) -> Asked:
    return f"/api/pins/{MODEL}", {}


OWN: Final = (
    Row("GET", "/api/version", 200, 200, 200),
    Row("GET", "/api/models", 200, 200, 200),
    Row("GET", "/api/workers", 200, 200, 200),
    Row("GET", "/api/devices", 200, 200, 200),
    # That of the test's own is in no quarantine.
    Row("POST", "/api/devices/{device}/release", 403, 403, 409, _device),
    # Models that are not started cannot be pinned.
    Row("PUT", "/api/pins/{model}", 403, 403, 400, _pin),
    Row("DELETE", "/api/pins/{model}", 403, 403, 400, _pin),
    Row("GET", "/api/tokens", 403, 403, 200),
    Row("POST", "/api/tokens", 403, 403, 201, lambda *_: ("", {"json": {"user": "dora"}})),
    Row("DELETE", "/api/tokens/{which}", 403, 403, 200, _token),
    Row("POST", "/api/uploads", 201, 201, 201, lambda *_: ("", {"content": b"{}\n"})),
    Row("DELETE", "/api/uploads/{upload}", 404, 204, 204, lambda t, who: (f"/api/uploads/{t.upload(who)}", {})),
    Row("POST", "/api/jobs", 404, 201, 201, _new_job),
    Row("GET", "/api/jobs", 200, 200, 200),
    Row("GET", "/api/names", 200, 200, 200),
    Row("GET", "/api/jobs/{name}", 404, 200, 200, of_job("/api/jobs/{name}")),
    Row("DELETE", "/api/jobs/{name}", 404, 204, 204, lambda t, who: (f"/api/jobs/{t.job(who)}", {})),
    # It is complete.
    Row("POST", "/api/jobs/{name}/cancel", 404, 409, 409, of_job("/api/jobs/{name}/cancel")),
    Row("POST", "/api/jobs/{name}/resume", 404, 409, 409, of_job("/api/jobs/{name}/resume")),
    Row("POST", "/api/jobs/{name}/retry", 404, 409, 409, of_job("/api/jobs/{name}/retry")),
    Row("GET", "/api/jobs/{name}/results", 404, 200, 200, of_job("/api/jobs/{name}/results")),
    Row("GET", "/api/jobs/{name}/logs", 404, 200, 200, of_job("/api/jobs/{name}/logs")),
    # The admin's is the last test of all.
    Row("POST", "/api/stop", 403, 403, 0),
)


def form(*texts: str) -> Body:
    """Return the body of an upload of the OpenAI API."""
    return {"files": {"file": ("in.jsonl", lines(*texts))}, "data": {"purpose": "batch"}}


def file_of(place: Town, owner: str) -> str:
    """Return the id of a new file of the OpenAI API."""
    answer = place.as_(owner, "POST", "/v1/files", **form("a"))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def _batch_request(place: Town, owner: str) -> Body:
    file = file_of(place, owner)
    return {"json": {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}}


def batch_of(place: Town, owner: str) -> str:
    """Return the id of a batch of the OpenAI API that has ended, the same each time."""

    def make() -> str:
        answer = place.as_(owner, "POST", "/v1/batches", **_batch_request(place, owner))
        assert answer.status_code == 200, answer.text
        path = f"/v1/batches/{answer.json()['id']}"
        wait_until(lambda: place.as_(owner, "GET", path).json()["status"] == "completed", "the batch is complete")
        return answer.json()["id"]

    return place.kept(f"batch of {owner}", make)


def _kept_file(place: Town, owner: str) -> str:
    return place.kept(f"file of {owner}", lambda: file_of(place, owner))


# There each has only what is theirs, admins too: a client of theirs lists what it would with another key.
OPENAI: Final = (
    Row("POST", "/v1/files", 200, 200, 200, lambda *_: ("", form("a"))),
    Row("GET", "/v1/files", 200, 200, 200),
    Row("GET", "/v1/files/{file_id}", 404, 200, 404, lambda t, who: (f"/v1/files/{_kept_file(t, who)}", {})),
    Row("DELETE", "/v1/files/{file_id}", 404, 200, 404, lambda t, who: (f"/v1/files/{file_of(t, who)}", {})),
    Row(
        "GET", "/v1/files/{file_id}/content", 404, 200, 404,
        lambda t, who: (f"/v1/files/{_kept_file(t, who)}/content", {}),
    ),
    Row("POST", "/v1/batches", 404, 200, 404, lambda t, who: ("", _batch_request(t, who))),
    Row("GET", "/v1/batches", 200, 200, 200),
    Row("GET", "/v1/batches/{batch}", 404, 200, 404, lambda t, who: (f"/v1/batches/{batch_of(t, who)}", {})),
    # It is complete.
    Row(
        "POST", "/v1/batches/{batch}/cancel", 404, 409, 404,
        lambda t, who: (f"/v1/batches/{batch_of(t, who)}/cancel", {}),
    ),
    Row("GET", "/v1/models", 200, 200, 200),
    Row("GET", "/v1/models/{name}", 200, 200, 200, lambda *_: (f"/v1/models/{MODEL}", {})),
)  # fmt: skip


def _granted(place: Town, owner: str) -> Body:
    folder = place.box.folder.parent / "granted" / owner
    return {"json": {"model": MODEL, "input_file": f"{folder}/in.jsonl", "output_folder_path": str(folder)}}


def facility_batch_of(place: Town, owner: str) -> str:
    """Return the path of a batch of the facility's API that has ended, the same each time."""

    def make() -> str:
        answer = place.as_(owner, "POST", CREATE, **_granted(place, owner))
        assert answer.status_code == 200, answer.text
        path = f"{_BATCHES}/{answer.json()['batch_id']}"
        wait_until(lambda: place.as_(owner, "GET", path).json() == "completed", "the batch is complete")
        return path

    return place.kept(f"facility's batch of {owner}", make)


CREATE: Final = "/resource_server/local/endpoint/v1/batches"
FACILITY: Final = (
    Row(
        "POST", "/resource_server/{cluster}/{framework}/v1/batches", 403, 200, 403,
        lambda t, who: (CREATE, _granted(t, who)),
    ),
    Row("GET", _BATCHES, 200, 200, 200),
    Row("GET", f"{_BATCHES}/{{batch}}", 404, 200, 200, lambda t, who: (facility_batch_of(t, who), {})),
    Row(
        "GET", f"{_BATCHES}/{{batch}}/result", 404, 200, 200,
        lambda t, who: (f"{facility_batch_of(t, who)}/result", {}),
    ),
    # It is complete.
    Row(
        "POST", f"{_BATCHES}/{{batch}}/cancel", 404, 409, 409,
        lambda t, who: (f"{facility_batch_of(t, who)}/cancel", {}),
    ),
    Row("GET", "/resource_server/list-endpoints", 200, 200, 200),
    Row("GET", "/resource_server/{cluster}/jobs", 200, 200, 200, lambda *_: ("/resource_server/local/jobs", {})),
)  # fmt: skip

TABLE: Final = (*OPENAI, *FACILITY, *OWN)
