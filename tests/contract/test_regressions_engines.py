"""Servers that misbehave: what once stopped a run, filled memory or disk, or reached the terminal raw."""

import asyncio
import json
import struct
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil
import pytest

from freight.control.jobrun import JobRun
from freight.core.answer import BadAnswer, read_answer
from freight.core.job import State, Totals
from freight.core.record import Endpoint
from freight.engines.base import Address, ServerCommand
from freight.engines.client import MOST_RETRY_AFTER_S, EngineClient, retry_after_s
from freight.engines.gguf import read_gguf
from freight.errors import EngineError, UserError
from freight.worker import logfile
from freight.worker.supervise import ModelServer, StartLimits, describe_exit
from tests.contract.scenario import side_by_side
from tests.contract.scripted import OK, Reply, scripted
from tests.harness import CASES, Box, chat, code, content, engine_command, finish, model_toml, wait_until
from tests.httpserver import serving

GOOD: Final = str(CASES / "inputs" / "00_good3.jsonl")
STEERING: Final = "\x1b]0;x\x07\x1b[2J\nerror: fake"
MOST_WORKER_BYTES: Final = 400_000_000


@contextmanager
def raw_server(models: bytes, answer: Callable[[str, BaseHTTPRequestHandler], None] | None = None) -> Generator[str]:
    """Run a server whose list of models is these bytes; `answer` writes all of an answer to a user's text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if answer is None:
                self.send(OK.body)
            else:
                answer(body["messages"][-1]["content"], self)

        def send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("then", ["refusals", "timeouts"])
@side_by_side
def test_push_back_before_nothing_but_failures_does_not_stop_the_run(then: str, box: Box) -> None:
    pushed = [0]
    over = threading.Event()

    def answer(_: str, __: int) -> Reply:
        pushed[0] += 1
        if pushed[0] <= 5:
            return Reply(429, b"{}", {"Retry-After": "0.1"})
        if then == "timeouts":
            over.wait(60)
        return Reply(400, b'{"error":{"message":"no"}}')

    box.write("in.jsonl", [chat(f"{n}", f"text {n}") for n in range(200)])
    limit = ("--record-timeout", "300ms") if then == "timeouts" else ()
    try:
        with scripted(answer) as server:
            done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url, *limit)
            over.set()
    finally:
        over.set()
    assert done.status == 0
    expected = "request_timeout" if then == "timeouts" else "InferenceFailed"
    assert [code(line) for line in box.results()] == [expected] * 200
    assert done.last_line().startswith("200 of 200 failed: ")


@side_by_side
def test_odd_counts_and_empty_answers_are_reported_as_they_are(box: Box) -> None:
    usage = {"prompt_tokens": True, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": True}}
    counted = json.dumps({**json.loads(OK.body), "usage": usage}).encode()

    def answer(text: str, _: int) -> Reply:
        return Reply(204, b"") if text == "empty" else Reply(200, counted)

    box.write("in.jsonl", [chat("a", "counted"), chat("b", "empty")])
    with scripted(answer) as server:
        done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url)
    assert done.status == 0
    counted_line, empty_line = box.results()
    assert counted_line["response"]["body"]["usage"] == usage
    assert "tokens: 0 in, 7 out" in done.stderr.splitlines()
    assert code(empty_line) == "invalid_engine_response"
    assert empty_line["error"]["message"] == "the engine answered 204 with an empty body"


def test_a_count_that_is_no_number_is_nothing() -> None:
    for odd in ("true", "-3", '"7"', "1e3", "[5]", "9" * 30):
        body = OK.body[:-1] + b',"usage":{"prompt_tokens":%s,"completion_tokens":2}}' % odd.encode()
        answer = read_answer(body, Endpoint.CHAT)
        assert (type(answer.input_tokens), answer.input_tokens, answer.output_tokens) == (int, 0, 2)
    with pytest.raises(BadAnswer, match="answered 204 with an empty body"):
        read_answer(b"", Endpoint.CHAT, 204)


@side_by_side
def test_answer_without_end_is_cut_off_and_the_other_records_are_answered(box: Box) -> None:
    cut, measured = threading.Semaphore(0), threading.Event()

    def answer(text: str, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        if text == "last":
            measured.wait(60)
        if text.startswith("endless"):
            # Not quite without end: a reader that takes it all must not take the machine with it.
            try:
                handler.wfile.write(b'{"x":"')
                for _ in range(1000):
                    handler.wfile.write(b"x" * 1_000_000)
            except OSError:
                pass
            cut.release()
        else:
            handler.wfile.write(OK.body)

    texts = ["first", "endless 1", "middle", "endless 2", "last"]
    box.write("in.jsonl", [chat(text, text) for text in texts])
    with raw_server(b'{"data":[{"id":"local-model"}]}', answer) as url:
        run = box.start("run", "in.jsonl", "-o", "out.jsonl", "--model", url)
        try:
            assert cut.acquire(timeout=60)
            assert cut.acquire(timeout=60)
            [worker] = [process for process in box.processes() if "freight.worker" in process.cmdline()]
            most = peak_bytes(worker)
        finally:
            measured.set()
        done = finish(run)
    assert done.status == 0
    big = "invalid_engine_response"
    assert [code(line) for line in box.results()] == [None, big, None, big, None]
    assert "more than 64000000 bytes" in box.results()[1]["error"]["message"]
    assert most < MOST_WORKER_BYTES


def peak_bytes(process: psutil.Process) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [peak] = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024


@pytest.mark.parametrize("header", ["601", "1e9", "99999999999", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_server_that_asks_for_years_is_asked_again_after_minutes(header: str) -> None:
    assert retry_after_s(header, 1_700_000_000.0) == MOST_RETRY_AFTER_S == 600.0


# Answers once the others have ended three times, and there was time to take note of that.
PATIENT_SERVER: Final = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(b'{"data":[]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        while open(sys.argv[1]).read().count("ended") < 3:
            time.sleep(0.05)
        time.sleep(1)
        self.say(b'{"choices":[{"message":{"content":"ok"}}]}')

    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@side_by_side
def test_job_completes_with_the_workers_that_start(box: Box, folder: Path) -> None:
    # The first instance has the lock; every other one ends at once, and is given up after three starts.
    script = 'mkdir "$0" 2>/dev/null && exec "$@"; echo ended >>"$1"; exit 7'
    ends = folder / "ends"
    ends.touch()
    (folder / "server.py").write_text(PATIENT_SERVER)
    server = [sys.executable, str(folder / "server.py"), str(ends), "{port}"]
    command = ["sh", "-c", script.replace("$1", str(ends)), str(folder / "lock"), *server]
    devices = [box.device, f"{box.device}1"]
    box.config.write_text(
        model_toml("local-model", engine="command", command=command)
        + f"[pools.local]\ndevices = {json.dumps(devices)}\n"
    )
    done = box.freight("run", GOOD, "-o", "out.jsonl")
    assert (done.status, "FAILED" in done.stderr) == (0, False)
    assert [code(line) for line in box.results()] == [None] * 3
    assert ends.read_text().split() == ["ended"] * 3
    assert not box.processes()


@side_by_side
def test_command_that_does_not_exist_fails_at_once_and_is_named(box: Box) -> None:
    box.configure(model_toml("local-model", engine="command", command=["/no/such/server", "{port}"]))
    done = box.freight("run", GOOD, "-o", "out.jsonl")
    assert done.status == 1
    assert "\nerror: cannot start the model server '/no/such/server': No such file" in done.stderr
    assert "\nhint: " in done.stderr
    assert "starting again" not in done.stderr
    assert len(list((box.folder / "out.jsonl.freight").glob("*/workers/*.log"))) == 1


@side_by_side
def test_server_that_refuses_its_own_list_is_no_bug_of_the_worker(box: Box, folder: Path) -> None:
    box.configure(model_toml("local-model", engine="command", command=engine_command(folder, "--api-key", "other")))
    done = box.freight("run", GOOD, "-o", "out.jsonl")
    assert done.status == 1
    assert "\nerror: the model server refuses its own key: /v1/models answers 401" in done.stderr
    assert "bug in the worker" not in done.stderr
    assert "starting again" not in done.stderr
    assert not box.processes()


def test_a_log_that_grows_without_end_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logfile, "MOST_BYTES", 10_000)
    monkeypatch.setattr(logfile, "_LOOK_S", 0.01)
    path = tmp_path / "worker.log"

    async def trim() -> None:
        trimming = asyncio.create_task(logfile.keep_short(path))
        try:
            # Opened once to append, as a server's output is.
            with path.open("ab", buffering=0) as log:
                for turn in range(3):
                    log.write(b"again and again\n" * 2000 + b"turn %d\n" % turn)
                    await asyncio.to_thread(wait_until, lambda: path.stat().st_size < 10_000, "the log is cut")
                log.write(b"after\n")
        finally:
            trimming.cancel()
            await asyncio.gather(trimming, return_exceptions=True)

    asyncio.run(trim())
    # What was last said is kept: the worker's own log is the same file.
    assert all(f"turn {turn}" in caplog.text for turn in range(3))
    assert path.read_bytes() == b"after\n"


@side_by_side
def test_what_a_server_says_does_not_steer_the_terminal(box: Box) -> None:
    def answer(text: str, _: int) -> Reply:
        return Reply(int(text[:3]), json.dumps({"error": {"message": STEERING}}).encode())

    box.write("in.jsonl", [chat("a", "400 a"), chat("b", "422 b"), chat("c", "422 c")])
    with scripted(answer) as server:
        done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url)
    assert done.status == 0
    assert not {"\x1b", "\x07"} & set(done.stderr)
    assert done.last_line().startswith("3 of 3 failed: 2 × InferenceFailed (422): ")
    assert "error: fake" not in done.stderr.splitlines()
    # In the results it stands as it came.
    assert box.results()[0]["response"]["body"]["error"]["message"] == STEERING


@side_by_side
def test_last_words_of_a_server_do_not_steer_the_terminal(box: Box) -> None:
    script = r'printf "\033]0;x\007\033[2J\nerror: fake\n"; exit 7'
    box.configure(model_toml("local-model", engine="command", command=["sh", "-c", script, "{port}"]))
    done = box.freight("run", GOOD, "-o", "out.jsonl")
    assert done.status == 1
    assert not {"\x1b", "\x07"} & set(done.stderr)
    assert "error: fake" not in done.stderr.splitlines()


@pytest.mark.parametrize(
    "models",
    [b"[" * 100_000 + b"]" * 100_000, b'{"data":[{"id":' + b"[" * 900 + b"]" * 900 + b"}]}"],
    ids=["nested", "nested-id"],
)
@side_by_side
def test_odd_list_of_models_is_as_none(models: bytes, box: Box) -> None:
    box.write("in.jsonl", [chat("a", model="whatever")])
    with raw_server(models) as url:
        done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", url, "--ignore-record-model")
    assert done.status == 0
    assert content(box.results()[0]) == "ok"


def odd_gguf(key: str, kind: int, value: bytes) -> bytes:
    """Return the head of a model file with an architecture and one odd fact."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    named = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + named + text(key) + struct.pack("<I", kind) + value


ODD_MODELS: Final = {
    "nested": odd_gguf("x", 9, struct.pack("<IQ", 9, 1) * 100_000),
    "text": odd_gguf("llama.context_length", 8, struct.pack("<Q", 3) + b"big"),
    "negative": odd_gguf("llama.context_length", 5, struct.pack("<i", -5)),
    "fraction": odd_gguf("llama.context_length", 6, struct.pack("<f", 1.5)),
}


@pytest.mark.parametrize("name", ODD_MODELS)
def test_a_model_file_with_odd_facts_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(ODD_MODELS[name])
    with pytest.raises(UserError, match="damaged"):
        read_gguf(path)


@side_by_side
def test_model_file_with_odd_facts_is_refused_by_the_command(box: Box) -> None:
    for name, head in ODD_MODELS.items():
        (box.folder / f"{name}.gguf").write_bytes(head)
        done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", f"{name}.gguf")
        assert done.status == 2
        assert f"{name}.gguf starts like a GGUF file but is damaged" in done.stderr
        assert done.last_line().startswith("hint: ")


def test_a_server_that_has_ended_is_not_ready_though_another_answers_in_its_place(tmp_path: Path) -> None:
    async def wait(url: str) -> None:
        server = ModelServer(ServerCommand([sys.executable, "-c", "raise SystemExit(9)"], {}, Address(url)))
        server.start()
        await server.exited()
        async with EngineClient(Address(url)) as client:
            assert await client.problem() is None
            await server.wait_ready(client, tmp_path / "log", StartLimits(5.0, 5.0))

    with scripted(lambda _, __: OK) as stranger, pytest.raises(EngineError, match="exited with status 9"):
        asyncio.run(wait(stranger.url))


@pytest.mark.parametrize(
    ("charged", "statuses"), [(False, (137, 143, 130, 129, -9, -15)), (True, (139, 134, 1, 9, 15, 255, -11))]
)
def test_records_are_not_charged_when_a_wrapped_server_was_killed(charged: bool, statuses: tuple[int, ...]) -> None:
    assert {status: describe_exit(status).charged for status in statuses} == dict.fromkeys(statuses, charged)


def test_a_job_is_no_longer_blocked_once_there_is_room_again() -> None:
    dispatcher = SimpleNamespace(totals=Totals(), blocked="", left=3)
    limits = SimpleNamespace(suspend_after_s=900.0)
    given: Any = (SimpleNamespace(state=State.RUNNING), None, None, None, dispatcher, None, None, limits)
    job = JobRun(*given, Path("folder"), None, False)
    now = job.last_success
    job.found_full(now, "no space left")
    job.tick(now + 1.9)
    assert job.blocked == "no space left"
    job.tick(now + 2.1)
    assert job.blocked == ""
    # What a write of results waits for is as long as it waits, whatever was full before.
    dispatcher.blocked = "no space left for results"
    job.tick(now + 3)
    assert job.blocked == "no space left for results"
    dispatcher.blocked = ""
    job.tick(now + 4)
    assert job.blocked == ""
