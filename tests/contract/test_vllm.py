"""A real vLLM on the CPU: a job on two workers of which one is killed, its names, its usage, its media, its death."""

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Generator
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

import pytest

from freight.control.resolve import started_model
from freight.core.model import EngineName, ModelEntry
from freight.core.record import Endpoint
from freight.engines.base import Place
from freight.engines.registry import engine_of
from tests.faults.runs import Running, command_line, nothing_left
from tests.harness import ROOT, Box, Finished, Json, chat, code, content, model_toml, wait_until

VENV: Final = ROOT / "build" / "vllm"
CHECKPOINT: Final = ROOT / "build" / "checkpoint"
MISSING: Final = "vLLM is not installed: tests/vllm/install build/vllm build/checkpoint"
RECORDS: Final = 200
KILLED_AT: Final = 60
# Two servers that start one after the other, on a machine that may have little to give.
PATIENCE_S: Final = 600
PREFIX: Final = (
    "You are a careful clerk who answers in a few plain words and never adds anything that was not asked. " * 6
)
# Quick to start, small, and without a core of its own: two of them share the machine.
ARGUMENTS: Final = ["--dtype", "bfloat16", "--enforce-eager"]
VARIABLES: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Vouch for a vLLM and a checkpoint."""
    assert (VENV / "bin" / "vllm").is_file(), MISSING
    assert (CHECKPOINT / "model.safetensors").is_file(), MISSING


class Listener:
    """A server on loopback that notes who comes, and answers nothing."""

    def __init__(self) -> None:
        self.visits = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/picture.png"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


@pytest.fixture(scope="module")
def listener() -> Generator[Listener]:
    """A server that must not be visited."""
    listener = Listener()
    yield listener
    listener.close()


class Ended:
    """The run, when it is over: what it was given and said, its results, and what there was when a worker was killed.

    `killed_after` is the number of records that it had answered, `servers` that of servers that ran.
    """

    def __init__(self, box: Box, given: list[Json], finished: Finished, killed_after: int, servers: int) -> None:
        self.given = given
        self.finished = finished
        self.results = box.results()
        self.killed_after = killed_after
        self.servers = servers


def given(listener: Listener) -> list[Json]:
    """Return the records: some name the model in one of its names, and one wants a picture fetched."""
    names: list[dict[str, str]] = [{}, {"model": "gpt-4o-mini"}, {"model": "tiny"}]
    lines = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [
                    {"role": "system", "content": PREFIX},
                    {"role": "user", "content": f"Count upwards from {index}."},
                ],
                "max_tokens": 32,
                "temperature": 0,
                **names[index % 3],
            },
        }
        for index in range(RECORDS)
    ]
    picture = [{"type": "image_url", "image_url": {"url": listener.url}}, {"type": "text", "text": "What is it?"}]
    return [*lines, chat("picture", "") | {"body": {"messages": [{"role": "user", "content": picture}]}}]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, listener: Listener) -> Ended:
    """Run the records on two workers, and kill the one that came first when it has answered some."""
    box = Box(tmp_path_factory.mktemp("vllm"))
    entry = {"source": str(CHECKPOINT), "executable": str(VENV), "context": 1024, "gpus": 0, "aliases": ["gpt-4o-mini"]}
    model = model_toml("tiny", engine="vllm", args=ARGUMENTS, **entry)
    variables = "\n".join(f'{name} = "{value}"' for name, value in VARIABLES.items())
    pools = f'[pools.local]\ndevices = ["{box.device}0", "{box.device}1"]\n'
    box.config.write_text(f"{model}[models.tiny.env]\n{variables}\n{pools}")
    records = given(listener)
    box.write("in.jsonl", records)
    running = Running(box, "in.jsonl", "-o", "out.jsonl", "--model", "tiny")
    try:
        worker, answered = busy_worker(box, running)
        running_then = len(servers(box))
        os.kill(worker, signal.SIGKILL)
        return Ended(box, records, running.end(PATIENCE_S), answered, running_then)
    finally:
        running.give_up()
        nothing_left(box)


def busy_worker(box: Box, running: Running) -> tuple[int, int]:
    """Wait for a worker whose server has answered some records; return its pid and their number."""
    found: list[tuple[int, int]] = []

    def look() -> bool:
        assert running.child.poll() is None, running.said()
        found[:] = [(worker, count) for worker, path in servers(box) if (count := answered_by(path)) >= KILLED_AT]
        return bool(found)

    wait_until(look, f"a server has answered {KILLED_AT} records", PATIENCE_S)
    return found[0]


def servers(box: Box) -> list[tuple[int, str]]:
    """Return, for each vLLM of the box, its worker's pid and the socket that it listens on."""
    found: list[tuple[int, str]] = []
    for process in box.processes():
        words = command_line(process.pid)
        if "--uds" in words:
            found.append((process.ppid(), words[words.index("--uds") + 1]))
    return found


def answered_by(path: str) -> int:
    """Return how many requests the server at a socket says it has answered; 0 before it listens."""
    connection = HTTPConnection("localhost", timeout=5)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(path)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except OSError:
        return 0
    finally:
        connection.close()
    return int(sum(float(n) for n in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)))


def test_every_record_is_answered_once_though_a_worker_was_killed(ended: Ended) -> None:
    assert (ended.servers, KILLED_AT <= ended.killed_after < RECORDS) == (2, True)
    assert ended.finished.status == 0, ended.finished.stderr
    assert [line["custom_id"] for line in ended.results] == [*(f"r{index}" for index in range(RECORDS)), "picture"]
    answered = ended.results[:RECORDS]
    assert [code(line) for line in answered] == [None] * RECORDS
    assert all(content(line) for line in answered)


def test_records_are_answered_under_each_of_the_models_names(ended: Ended) -> None:
    asked = [line["body"].get("model") for line in ended.given[:3]]
    assert asked == [None, "gpt-4o-mini", "tiny"]
    # What a record says is sent as it is, and vLLM answers with the first of its names.
    assert {line["response"]["body"]["model"] for line in ended.results[:RECORDS]} == {"tiny"}


def test_usage_tells_the_tokens_that_came_from_the_cache(ended: Ended) -> None:
    usage = [line["response"]["body"]["usage"] for line in ended.results[:RECORDS]]
    assert all(0 < one["completion_tokens"] <= 32 for one in usage)
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usage]
    # All prompts begin alike, so that most find the beginning there.
    assert sum(count > 0 for count in cached) > RECORDS / 2


def test_a_record_that_names_an_address_has_nothing_fetched(ended: Ended, listener: Listener) -> None:
    assert code(ended.results[-1]) == "media_not_allowed"
    assert listener.visits == 0


def command(folder: Path, context: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a vLLM, and its variables."""
    entry = ModelEntry(
        engine=EngineName.VLLM, source=str(CHECKPOINT), executable=str(VENV), context=context, args=ARGUMENTS
    )
    spec = started_model("tiny", "tiny", entry)
    place = Place(folder, str(CHECKPOINT), frozenset({Endpoint.CHAT}), 0)
    made = engine_of(EngineName.VLLM).command(spec, place)
    assert made is not None
    return made.argv, {**os.environ, **made.env, **VARIABLES}


FETCH: Final = """
import sys
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

url, *domains = sys.argv[1:]
try:
    MediaConnector(allowed_media_domains=domains).load_from_url(url, ImageMediaIO())
except Exception as error:
    print(type(error).__name__, str(error))
"""


def test_vllm_itself_fetches_from_no_host_with_the_domains_that_it_is_given(tmp_path: Path) -> None:
    argv, env = command(tmp_path, 512)
    domain = argv[argv.index("--allowed-media-domains") + 1]
    env["VLLM_MEDIA_FETCH_MAX_RETRIES"] = "1"
    listener = Listener()

    said = [fetch(listener.url, env, domain), listener.visits, fetch(listener.url, env), listener.visits]

    listener.close()
    assert "must be from one of the allowed domains" in str(said[0])
    assert (said[1], said[3]) == (0, 1), "without them it would have come"


def fetch(url: str, env: dict[str, str], *domains: str) -> str:
    """Return what vLLM's own code says when it is to fetch a picture."""
    words = [VENV / "bin" / "python", "-c", FETCH, url, *domains]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout


def test_a_context_that_the_model_does_not_have_is_named_as_the_reason(tmp_path: Path) -> None:
    argv, env = command(tmp_path, 99_999)

    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    assert done.returncode
    why = engine_of(EngineName.VLLM).why(done.stdout.splitlines())
    assert why.startswith("User-specified max_model_len (99999) is greater than the derived max_model_len")
