"""What is secret on a shared service stays where it belongs: tokens, records, answers, and where webhooks go."""

import hashlib
import json
import re
from collections.abc import Generator
from typing import Any, Final

import pytest

from tests.contract import routes
from tests.contract.test_privacy import holding, seen_in_processes
from tests.contract.town import MODEL, Town, town
from tests.harness import Json, chat, wait_until
from tests.httpserver import Reply, http_server

PROMPT: Final = "canary-prompt-61fe"
ANSWER: Final = "canary-answer-8b02"
HOOK: Final = "canary-hook-c7d9"
# Sent in requests that are refused.
STRAY: Final = "canary-stray-2ea4"
SECRET: Final = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
# Where below the data folder records and answers may stand: with their jobs, and as files of their users.
KEPT: Final = re.compile(r"batch/[0-9a-f-]{36}/(input\.jsonl|results\.db(-wal)?)|files/[^/]+")
CATALOG: Final = re.compile(r"catalog\.db(-wal)?")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    folder = tmp_path_factory.mktemp("town")
    secret = folder / "secret"
    secret.write_text(f"{SECRET}\n")
    with http_server(lambda _: Reply(200, b""), lambda _: Reply(204, b"")) as hook:
        hooks = f'[webhooks]\nhosts = ["{hook}"]\nsecret_file = "{secret}"\n'
        with town(folder, routes.settings(folder, "requests = 1000") + hooks) as place:
            answer = place.end.answer

            def answered(body: bytes) -> tuple[int, Any]:
                status, value = answer(body)
                if status == 200:
                    value["choices"][0]["message"]["content"] += ANSWER
                return status, value

            place.end.answer = answered  # type: ignore[method-assign]
            run_all(place, f"{hook}/{HOOK}?key={HOOK}")
            yield place


def records(first: str) -> bytes:
    """Return an input with all that becomes of records: answers, an engine's refusal, and the second of two ids."""
    texts = (f"{first} {PROMPT}", f"refuse always {PROMPT}", f"c {PROMPT}")
    made = [chat(f"{number}-{PROMPT}", text, model=MODEL) for number, text in enumerate(texts)]
    return b"".join(json.dumps(each).encode() + b"\n" for each in (*made, made[0]))


class Said:
    """What others than their owner are told of alice's jobs, and where secrets are seen in processes meanwhile."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, str]] = []
        self.to_others: list[tuple[str, str, str]] = []
        self.seen: list[str] = []


SAID: Final = Said()


def run_all(place: Town, hook: str) -> None:
    """Have jobs made by all three APIs and watch the processes while they run; then ask for them as others."""
    folder = place.box.folder.parent / "granted" / "alice"
    (folder / "in.jsonl").write_bytes(records("hold"))
    upload = place.as_("alice", "POST", "/api/uploads", content=records("hold")).json()["id"]
    file = place.as_(
        "alice", "POST", "/v1/files", files={"file": ("in.jsonl", records("hold").replace(b"c ", b"d "))},
        data={"purpose": "batch"},
    ).json()["id"]  # fmt: skip
    asked: list[tuple[str, Json]] = [
        ("/api/jobs", {"upload": upload, "model": MODEL, "name": "secret-plan", "notify": hook}),
        (
            "/v1/batches",
            {
                "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h",
                "metadata": {"notify": hook},
            },
        ),
        (routes.CREATE, {"model": MODEL, "input_file": f"{folder}/in.jsonl", "output_folder_path": str(folder)}),
    ]  # fmt: skip
    for path, body in asked:
        answer = place.as_("alice", "POST", path, json=body, headers={"Idempotency-Key": f"{STRAY}{path}"})
        assert answer.status_code in (200, 201), answer.text
        told = answer.json()
        SAID.jobs.append((path, told.get("batch_id") or told.get("id") or told["job"]["id"]))
    wait_until(lambda: place.end.seen[f"hold {PROMPT}"], "a record is under way")
    watch(place)
    place.end.let_go.set()
    for path, job in SAID.jobs:
        wait_until(lambda path=path, job=job: is_over(place, path, job), f"{path} {job} has ended")


def watch(place: Town) -> None:
    """Look into the processes while a record is with the endpoint, and let others ask for all there is."""
    for _ in range(3):
        for secret in (PROMPT, ANSWER, HOOK, STRAY, *place.tokens.values()):
            SAID.seen.extend(seen_in_processes(place.box, secret.encode()))
    ask_as_others(place)


def is_over(place: Town, path: str, job: str) -> bool:
    """Return whether a job has ended."""
    where = {"/api/jobs": f"/api/jobs/{job}", "/v1/batches": f"/v1/batches/{job}"}
    told = place.as_("alice", "GET", where.get(path, f"/resource_server/v1/batches/{job}")).json()
    return (told if isinstance(told, str) else told.get("state") or told["status"]).lower() in ("completed", "failed")


def ask_as_others(place: Town) -> None:
    """Ask, as bob, for all that there is of alice's; and, as the admin, for all but what her records became."""
    for row in routes.TABLE:
        if row.method != "GET":
            continue
        for _, job in (*SAID.jobs, ("", "secret-plan")):
            path = re.sub(r"\{[^}]*\}", job, row.route)
            SAID.to_others.append(("bob", path, told(place, "bob", path)))
            if not path.endswith(("/results", "/content")):
                SAID.to_others.append(("carol", path, told(place, "carol", path)))


def told(place: Town, who: str, path: str) -> str:
    """Return all of an answer."""
    answer = place.as_(who, "GET", path)
    return f"{dict(answer.headers)} {answer.text}"


def send_what_is_refused(place: Town, token: str) -> None:
    """Send secrets where they do not belong."""
    for secret in (STRAY, token, PROMPT):
        for row in routes.TABLE:
            if row.route in ("/api/stop", "/api/uploads"):
                continue  # An upload may be anything, and is kept for a day.
            path = re.sub(r"\{[^}]*\}", secret, row.route)
            place.ask(row.method, path, token, content=f'{{"{secret}": "{secret}"'.encode())
            place.ask(row.method, path, f"frt_{secret}", json={"upload": secret, "model": secret, secret: secret})
            place.ask(row.method, f"{path}?token={secret}&limit={secret}", token)
            place.ask(row.method, path, None, headers={"X-Request-Id": secret, "User-Agent": secret, "Cookie": secret})
            place.ask(row.method, path, token, headers={"Host": f"{secret}.example", "Origin": f"http://{secret}"})
        place.ask("POST", "/v1/files", token, files={"file": (secret, secret.encode())}, data={"purpose": secret})
        place.ask("POST", "/api/jobs", token, json={"upload": secret, "notify": f"http://{secret}.example/{secret}"})


def test_others_are_told_nothing_of_records_answers_hooks_and_tokens(shared: Town) -> None:
    ask_as_others(shared)
    secrets = (PROMPT, ANSWER, HOOK, STRAY, *shared.tokens.values())
    # What an engine said about a record is part of the answer: bob sees none, and lists show none to anybody.
    found = [(who, path) for who, path, text in SAID.to_others for secret in secrets if secret in text]
    assert found == []
    assert len(SAID.to_others) > 100


def test_bob_is_not_told_that_there_is_anything_of_alices(shared: Town) -> None:
    ask_as_others(shared)
    for who, path, text in SAID.to_others:
        if who == "bob":
            asked = [job for _, job in SAID.jobs] + ["secret-plan"]
            # What he sends he may get back.
            assert not [job for job in asked if job in text and job not in path], (path, text)


def test_processes_show_no_secret_while_jobs_run(shared: Town) -> None:
    assert shared.box.processes()
    assert SAID.seen == []


def test_data_folder_holds_secrets_only_where_they_belong(shared: Town) -> None:
    alices = shared.tokens["alice"]
    send_what_is_refused(shared, alices)
    data = shared.box.data

    def where(secret: str) -> list[str]:
        return [str(path.relative_to(data)) for path in holding(data, secret.encode())]

    for secret in (PROMPT, ANSWER):
        stray = [path for path in where(secret) if not KEPT.fullmatch(path)]
        assert stray == [], (secret, stray)
        assert any(path.startswith("batch/") for path in where(secret))
    assert [path for path in where(HOOK) if not CATALOG.fullmatch(path)] == []
    for token in (*shared.tokens.values(), *shared.bad.values()):
        assert where(token) == where(token[4:]) == []
        assert where(token[4:24]) == []
    # A key by which a request may be repeated is kept with its job.
    assert [path for path in where(STRAY) if not CATALOG.fullmatch(path)] == []
    assert where("serving on ") == ["serve.log"]
    digest = hashlib.sha256(alices.encode()).digest()
    assert {path.name for path in holding(data, digest)} & {"catalog.db", "catalog.db-wal"}
    assert [path for path in data.rglob("*") for secret in (PROMPT, ANSWER, HOOK, STRAY) if secret in path.name] == []


def test_folders_of_users_get_results_alone(shared: Town) -> None:
    granted = shared.box.folder.parent / "granted"
    holders = {path.name.partition(".")[2] for path in holding(granted, PROMPT.encode())}
    assert holders == {"jsonl", "results.jsonl"}
    [progress] = granted.rglob("*.progress.json")
    assert PROMPT not in progress.read_text() and ANSWER not in progress.read_text()


def test_metrics_if_there_are_any_hold_no_secret(shared: Town) -> None:
    answer = shared.as_("carol", "GET", "/metrics")
    assert answer.status_code in (200, 404)
    assert not [secret for secret in (PROMPT, ANSWER, HOOK, STRAY, *shared.tokens.values()) if secret in answer.text]


def test_what_is_deleted_is_gone(shared: Town) -> None:
    for path, job in SAID.jobs:
        if path == "/v1/batches":
            batch = shared.as_("alice", "GET", f"/v1/batches/{job}").json()
            for file in (batch["input_file_id"], batch["output_file_id"], batch["error_file_id"]):
                if file:
                    assert shared.as_("alice", "DELETE", f"/v1/files/{file}").status_code == 200
    for job in shared.as_("alice", "GET", "/api/jobs").json()["jobs"]:
        assert shared.as_("alice", "DELETE", f"/api/jobs/{job['id']}").status_code == 204
    wait_until(lambda: not list((shared.box.data / "batch").iterdir()), "the jobs' folders are gone")
    assert holding(shared.box.data, PROMPT.encode()) == holding(shared.box.data, ANSWER.encode()) == []
