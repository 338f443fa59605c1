"""The service against web pages, odd requests, readers that go away and secrets in its settings, on one service."""

import json
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import psutil
import pytest

from freight.core.job import State
from tests.contract.served import ask
from tests.contract.test_privacy import holding, seen_in_processes
from tests.harness import chat, code, engine_command, model_toml, parse_lines, wait_until
from tests.service import HOLDS, ServiceBox, chats, paused, service_box

SECRET: Final = "tok-5d20e8-violet"
READERS: Final = 50
FEW_FILES: Final = 256


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServiceBox]:
    """Run a service that is allowed few open files, with a model whose server gets a secret in a variable."""
    folder = tmp_path_factory.mktemp("review")
    toml = model_toml("sim", engine="command", command=engine_command(folder, "--latency", "0.2"))
    with service_box(folder / "box", f'{toml}[models.sim.env]\nTOKEN = "{SECRET}"\n') as box:
        command = f"ulimit -S -n {FEW_FILES}; exec {sys.executable} -m freight serve --background"
        done = subprocess.run(["sh", "-c", command], env=box.environment(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        yield box


@pytest.fixture
def service(secretive: ServiceBox) -> Generator[ServiceBox]:
    """Give the service of this module, without a job."""
    yield secretive
    secretive.clear()


def process_of(box: ServiceBox) -> psutil.Process:
    """Return the service's process."""
    return psutil.Process(ask(box, "GET", "/api/version").json()["pid"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8400"},
        {"Host": "localhost.evil.example"},
        {"Host": ""},
    ],
    ids=str,
)
def test_requests_of_web_pages_are_refused(service: ServiceBox, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/api/jobs"), ("POST", "/api/stop"), ("POST", "/api/uploads"), ("GET", "/docs")):
        reply = ask(service, method, path, headers=headers)
        assert reply.status_code == 403
        error = reply.json()["error"]
        assert error["code"] and "no web pages" in error["message"] and error["hint"]
    assert ask(service, "GET", "/api/version").status_code == 200


@pytest.mark.parametrize("host", ["freight", "LOCALHOST", "localhost:8400", "127.0.0.1:8400", "[::1]:8400", "[::1]"])
def test_requests_of_programs_of_the_same_machine_are_answered(service: ServiceBox, host: str) -> None:
    assert ask(service, "GET", "/api/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("field", ["file", "model", "typed", "name", "output"])
def test_half_a_character_in_a_request_is_refused_in_words_and_leaves_no_job(service: ServiceBox, field: str) -> None:
    record = json.dumps(chat("a")) + "\n"
    upload = ask(service, "POST", "/api/uploads", content=record).json()["id"]
    asked = {"upload": upload, "model": "sim", field: "/half \ud835"}
    reply = ask(service, "POST", "/api/jobs", content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert field in reply.json()["error"]["message"]
    assert service.names() == []


def test_service_takes_all_the_open_files_that_the_system_lets_it_have(service: ServiceBox) -> None:
    soft, hard = process_of(service).rlimit(psutil.RLIMIT_NOFILE)
    assert soft > FEW_FILES
    assert hard in (soft, psutil.RLIM_INFINITY)


def test_readers_that_go_away_before_reading_leave_no_files_open(service: ServiceBox) -> None:
    # What was not reached is read from the input, which is a file more.
    service.put("cut", chats(HOLDS), "sim")
    service.until("cut", lambda job: job.in_flight, "it is at work")
    service.cancel("cut")
    assert service.ended("cut").state == State.CANCELLED
    assert [code(line) for line in parse_lines(b"".join(line + b"\n" for line in service.lines("cut")))] == [
        "batch_cancelled"
    ]
    process = process_of(service)
    before = process.num_fds()
    with paused(process):
        for _ in range(READERS):
            with socket.socket(socket.AF_UNIX) as reader:
                reader.connect(str(service.socket))
                reader.sendall(b"GET /api/jobs/cut/results HTTP/1.1\r\nHost: freight\r\n\r\n")
    # Asked for after them, so that they have been seen to.
    assert len(service.lines("cut")) == 1
    wait_until(lambda: process.num_fds() <= before, "all is closed again", 20)


def test_variables_of_a_model_reach_its_server_and_no_file_nor_command_line(service: ServiceBox) -> None:
    service.put("secret", chats("a", "b", "c"), "sim", concurrency=1)
    service.until("secret", lambda job: job.in_flight, "it is at work")
    [server] = service.simengines()
    assert f"TOKEN={SECRET}".encode() in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    assert service.workers()
    assert all(where.endswith("environ") for where in seen_in_processes(service, SECRET.encode()))
    assert service.ended("secret").state == State.COMPLETED
    shown = json.dumps(ask(service, "GET", "/api/jobs/secret").json())
    assert SECRET not in shown
    assert holding(service.data, SECRET.encode()) == []
