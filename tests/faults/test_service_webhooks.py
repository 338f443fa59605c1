"""Jobs of a real service tell a real receiver of their end, whatever befalls the service meanwhile."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any

import openai
import psutil
import pytest

from freight.client.sync import Client
from tests.harness import PATIENCE_S, Finished, model_toml, wait_until
from tests.httpserver import serving
from tests.service import Endpoint, ServiceBox, chats, endpoint, service_box

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
# The part of the URL that only its receiver may see.
TOKEN = "canary-of-a-hook"


class Receiver:
    """A receiver of webhooks, which keeps what it gets; it answers at once, unless it is told to wait."""

    def __init__(self) -> None:
        self.url = ""
        self.letters: list[tuple[dict[str, str], bytes]] = []
        self.answers = threading.Event()
        self.answers.set()

    def take(self, headers: dict[str, str], body: bytes) -> None:
        """Keep a letter."""
        self.letters.append((headers, body))
        self.answers.wait()

    def next(self, number: int = 1) -> Any:
        """Wait for the `number`th letter and return it as the SDK reads it, its signature checked."""
        wait_until(lambda: len(self.letters) >= number, f"letter {number}")
        headers, body = self.letters[number - 1]
        with closing(openai.OpenAI(api_key="none", webhook_secret=SECRET)) as client:
            return client.webhooks.unwrap(body, headers)


@pytest.fixture(scope="module")
def receiver() -> Generator[Receiver]:
    ours = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ours.take(dict(self.headers), self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with serving(Handler) as ours.url:
        yield ours
        ours.answers.set()


@pytest.fixture(autouse=True)
def no_letters(receiver: Receiver) -> None:
    receiver.letters.clear()
    receiver.answers.set()


@pytest.fixture(scope="module")
def end() -> Generator[Endpoint]:
    with endpoint() as ours:
        yield ours


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, end: Endpoint) -> Generator[ServiceBox]:
    folder = tmp_path_factory.mktemp("hooks")
    secret = folder / "secret"
    secret.write_text(f"{SECRET}\n")
    hooks = f'[webhooks]\nhosts = ["{receiver.url}"]\nsecret_file = "{secret}"\n'
    with service_box(folder / "box", hooks + model_toml("shared", engine="endpoint", source=end.url)) as made:
        start(made)
        yield made


def start(box: ServiceBox) -> None:
    done = box.freight("serve", "--background")
    assert done.status == 0, done.stderr


def submit(box: ServiceBox, name: str, url: str, text: str = "a", *options: str) -> Finished:
    box.write(f"{name}.jsonl", chats(text))
    asked = ("submit", f"{name}.jsonl", "--model", "shared", "--name", name, "--notify", f"{url}/in?key={TOKEN}")
    return box.batch(*asked, *options)


def test_a_jobs_end_is_told_in_a_letter_that_the_sdk_accepts(box: ServiceBox, receiver: Receiver) -> None:
    assert submit(box, "told", receiver.url, "a", "--wait").status == 0

    event = receiver.next()
    assert (event.object, event.type, event.data.id) == ("event", "batch.completed", box.job("told").id)
    wait_until(lambda: "delivered" in (box.data / "serve.log").read_text(), "the log tells of it")
    assert len(receiver.letters) == 1


def test_who_asks_about_the_job_sees_the_receiver_and_not_its_secret(box: ServiceBox, receiver: Receiver) -> None:
    assert submit(box, "shown", receiver.url, "a", "--wait").status == 0

    assert box.job("shown").notify == receiver.url
    told = [box.batch("status", "shown"), box.batch("status", "shown", "--json"), box.batch("list", "--json")]
    assert receiver.url in told[0].stdout
    assert not any(TOKEN in done.stdout + done.stderr for done in told)
    receiver.next()
    assert TOKEN not in (box.data / "serve.log").read_text()


def test_a_job_that_is_cancelled_tells_that(box: ServiceBox, receiver: Receiver) -> None:
    assert submit(box, "dropped", receiver.url, "hold").status == 0
    box.cancel("dropped")

    event = receiver.next()
    assert (event.type, event.data.id) == ("batch.cancelled", box.job("dropped").id)


def test_a_letter_that_a_killed_service_had_not_delivered_is_delivered_by_the_next(
    box: ServiceBox, receiver: Receiver
) -> None:
    receiver.answers.clear()
    assert submit(box, "late", receiver.url, "a", "--wait").status == 0
    receiver.next()
    with Client(box.server) as client:
        pid = client.version().pid
    assert pid is not None
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it is dead")
    receiver.answers.set()

    start(box)

    event = receiver.next(2)
    assert (event.type, event.data.id) == ("batch.completed", box.job("late").id)
    assert receiver.letters[0][1] == receiver.letters[1][1]


@pytest.mark.parametrize("url", ["https://hooks.example.org", "http://127.0.0.1:9", "ftp://127.0.0.1", "x"])
def test_a_receiver_that_is_not_listed_is_refused_before_there_is_a_job(box: ServiceBox, url: str) -> None:
    done = submit(box, "refused", url)

    assert (done.status, done.stdout) == (2, "")
    assert "webhook" in done.stderr
    assert "refused" not in box.names()


def test_resumed_work_that_ends_again_is_told_of_again(box: ServiceBox, receiver: Receiver, end: Endpoint) -> None:
    assert submit(box, "again", receiver.url, "hold").status == 0
    box.cancel("again")
    assert receiver.next().type == "batch.cancelled"
    end.let_go.set()
    with Client(box.server) as client:
        client.wait("again", PATIENCE_S)
        client.resume("again")
    wait_until(lambda: len(receiver.letters) == 2, "it has ended again")
    end.let_go.clear()

    event = receiver.next(2)
    assert (event.type, event.data.id) == ("batch.completed", box.job("again").id)
