"""Clients and services that part in the middle of something: words, an exit status, and nothing left half done."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from freight.errors import OperationError
from tests.faults.runs import check_complete, free_port, records
from tests.faults.services import Served, device_in_use, refused, soon
from tests.faults.together import together
from tests.harness import Engine, engine, finish, wait_until

NOWHERE = "http://127.0.0.1:1"
BIG = 2000


def begun(service: Served) -> "subprocess.Popen[str]":
    """Begin to submit standard input, and return once some of it has arrived."""
    submitting = service.start("batch", "submit", "-", "--model", NOWHERE, stdin=subprocess.PIPE)
    assert submitting.stdin is not None
    submitting.stdin.writelines(json.dumps(record) + "\n" for record in records(40))
    submitting.stdin.flush()
    wait_until(service.uploads, "it is being sent")
    return submitting


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@together
def test_client_that_ends_in_an_upload_leaves_nothing_of_it(service: Served, number: int) -> None:
    service.serve()
    submitting = begun(service)
    submitting.send_signal(number)
    done = finish(submitting)
    assert done.status == (130 if number == signal.SIGINT else -number), done
    wait_until(lambda: service.uploads() == [], "its upload is gone", 10)
    assert not list(service.client.jobs())
    assert service.answers()


@together
def test_service_that_is_stopped_in_an_upload_ends_soon_and_the_client_says_so(service: Served) -> None:
    service.serve()
    submitting = begun(service)
    stopped = service.freight("stop", timeout=20)
    assert stopped.status == 0, stopped
    assert service.uploads() == []
    done = finish(submitting, "{}\n" * 100_000)
    refused(done, 1)
    assert "does not answer as a Freight service" not in done.stderr, done


@pytest.mark.parametrize("change", ["replaced", "appended", "cut"])
@together
def test_input_that_changes_during_its_upload_makes_no_job(service: Served, change: str) -> None:
    service.serve()
    # Much more than can be sent before the service stands still.
    path = service.write("in.jsonl", records(30))
    os.truncate(path, 300_000_000)
    submitting = service.start("batch", "submit", "in.jsonl", "--model", NOWHERE)
    wait_until(lambda: service.uploads() or submitting.poll() is not None, "it is being sent")
    os.kill(service.server.pid, signal.SIGSTOP)
    if change == "replaced":
        shutil.copy(path, service.folder / "new")
        (service.folder / "new").replace(path)
    elif change == "appended":
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, 500_000)
    os.kill(service.server.pid, signal.SIGCONT)
    refused(finish(submitting), 1, "changed while it was sent; nothing was submitted", "submit it again")
    assert not list(service.client.jobs())
    wait_until(lambda: service.uploads() == [], "nothing is left of it", 5)


@together
def test_input_that_changes_under_the_python_client_leaves_no_upload(service: Served) -> None:
    service.serve()
    path = service.write("in.jsonl", records(30))
    touched = path.stat().st_mtime_ns + 10**9
    send = service.client.upload

    def send_and_touch(*arguments: object) -> object:
        upload = send(*arguments)
        os.utime(path, ns=(touched, touched))
        return upload

    service.client.upload = send_and_touch  # The moment between the last byte and the check.
    try:
        with pytest.raises(OperationError, match="changed while it was sent"):
            service.client.submit(path, model=NOWHERE)
    finally:
        del service.client.upload
    assert not list(service.client.jobs())
    assert service.uploads() == []


@contextmanager
def giving_fast(_: Served, tmp_path: Path) -> Generator[Engine]:
    """An engine that answers at once."""
    with engine(tmp_path / "engine", "--digest", record=False) as running:
        yield running


def big_job(service: Served, url: str) -> str:
    """Complete a job with tens of megabytes of results; return its id."""
    service.write("in.jsonl", [record | {"body": record["body"] | {"n": 128}} for record in records(BIG)])
    service.serve()
    job = service.submit("in.jsonl", "job", url)
    service.wait_state("job", "COMPLETED")
    return job.id


@pytest.mark.parametrize("how", ["killed", "stopped"])
@together
def test_service_that_ends_in_a_download_leaves_no_file_and_exit_1(service: Served, fast: Engine, how: str) -> None:
    big_job(service, fast.url)
    target = service.folder / "down"
    target.mkdir()
    fetching = service.start("batch", "results", "job", "-o", "down/out.jsonl")
    soon(lambda: any(path.stat().st_size for path in target.iterdir()), "it is being fetched")
    os.kill(fetching.pid, signal.SIGSTOP)
    assert [path.suffix for path in target.iterdir()] == [".partial"]
    if how == "killed":
        service.kill()
    else:
        assert service.freight("stop", timeout=20).status == 0
    os.kill(fetching.pid, signal.SIGCONT)
    refused(finish(fetching), 1, "the connection to the service", "broke")
    assert not list(target.iterdir())
    service.serve()
    assert service.freight("batch", "results", "job", "-o", "down/out.jsonl").status == 0
    check_complete(service, BIG, "down/out.jsonl")


@together
def test_job_deleted_in_a_download_comes_whole_or_not_at_all(service: Served, fast: Engine) -> None:
    job = big_job(service, fast.url)
    target = service.folder / "down"
    target.mkdir()
    fetching = service.start("batch", "results", "job", "-o", "down/out.jsonl")
    soon(lambda: any(path.stat().st_size for path in target.iterdir()), "it is being fetched")
    os.kill(fetching.pid, signal.SIGSTOP)
    service.client.delete("job")
    assert not service.folder_of(job).exists()
    os.kill(fetching.pid, signal.SIGCONT)
    done = finish(fetching)
    if done.status == 0:
        check_complete(service, BIG, "down/out.jsonl")
    else:
        refused(done, 1)
        assert not list(target.iterdir())
    assert service.answers()


def waiting(service: Served) -> "subprocess.Popen[str]":
    """Start a service, a job, and a command that waits for it; return that once it has seen the job in the queue."""
    service.own_engine()
    service.write("in.jsonl", records(10))
    service.serve()
    service.submit("in.jsonl", "job")
    command = service.start("batch", "wait", "job")
    assert command.stderr is not None
    assert f"{service.device} is held by" in command.stderr.readline()
    return command


@together
def test_wait_outlasts_a_service_that_is_killed_and_started_again(service: Served) -> None:
    with device_in_use(service):
        command = waiting(service)
        service.kill()
        assert command.stderr is not None
        assert "went away; waiting 60 s for it to come back" in command.stderr.readline()
        service.serve()
    done = finish(command)
    assert done.status == 0, done
    assert "the service is back" in done.stderr


@together
def test_job_deleted_while_it_is_waited_for_is_told_with_exit_3(service: Served) -> None:
    with device_in_use(service):
        command = waiting(service)
        os.kill(command.pid, signal.SIGSTOP)
        service.client.cancel("job")
        service.wait_state("job", "CANCELLED")
        service.client.delete("job")
        os.kill(command.pid, signal.SIGCONT)
        refused(finish(command), 3, "job job was deleted while it was waited for", "freight batch list")


class Stranger(BaseHTTPRequestHandler):
    """A web server that is no Freight service."""

    def do_GET(self) -> None:
        """Answer with a page."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Welcome</html>")

    do_POST = do_GET  # noqa: N815 - The name is the library's.

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def giving_stranger(_: Served, __: Path) -> Generator[str]:
    """The URL of a web server that is no Freight service."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@together
def test_server_that_is_none_is_told_and_none_is_started_in_its_place(service: Served, stranger: str) -> None:
    service.write("in.jsonl", records(3))
    gone = f"http://127.0.0.1:{free_port()}"
    nowhere = f"unix://{service.folder}/nowhere/api.sock"
    cases = [
        (gone, 5, "no Freight service answers at"),
        (nowhere, 5, "no Freight service answers at"),
        (f"unix://{service.config}", 5, "no Freight service answers at"),
        (stranger, 1, "does not answer as a Freight service"),
        ("ftp://host", 2, "is no address"),
        ("unix://relative/api.sock", 2, "has no absolute path"),
        ("http://", 2, "is no address"),
    ]
    for server, status, words in cases:
        done = service.freight("batch", "submit", "in.jsonl", "--model", NOWHERE, FREIGHT_SERVER=server, timeout=20)
        refused(done, status, words)
        assert not (service.data / "run").exists(), "a service was started all the same"
    assert not service.processes()


@contextmanager
def rude(path: Path, said: bytes) -> Generator[None]:
    """Be a program on a Unix socket that answers everything with `said`, and hangs up."""
    path.parent.mkdir(parents=True)

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("said", [b"", b"220 mail ESMTP\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"])
@together
def test_foreign_program_on_the_own_socket_is_told_from_a_service(service: Served, said: bytes) -> None:
    with rude(service.socket, said):
        for command in (("batch", "list"), ("serve", "--background"), ("stop",)):
            refused(service.freight(*command, timeout=20), 1, str(service.socket))
    assert not service.processes()
