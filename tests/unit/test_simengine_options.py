"""The simulated engine does what its options say, as seen over a real socket."""

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from bench.simengine.record import read_record
from tests.harness import ROOT
from tests.unit.simengines import CHAT, PATIENCE_S, asking, chat_body, command, running


def catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal (it has none before it gets to set one)."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    with running("--api-key", "secret") as engine:
        assert engine.get("/health").status == 200
        for path in ("/v1/models", "/metrics", "/sim/counts"):
            assert engine.get(path).status == 401
            assert engine.get(path, Authorization="Bearer secret").status == 200
        body = json.dumps(chat_body("x")).encode()
        assert engine.ask("POST", CHAT, body, Authorization="Bearer other").status == 401
        assert engine.ask("POST", CHAT, body, Authorization="Bearer secret").status == 200


@pytest.mark.parametrize(("option", "path"), [("--no-metrics", "/metrics"), ("--no-models", "/v1/models")])
def test_a_page_can_be_taken_away(option: str, path: str) -> None:
    with running(option) as engine:
        assert engine.get(path).status == 404


def test_while_loading_everything_but_metrics_gets_503() -> None:
    with running("--loading", "600") as engine:
        for answer in (engine.get("/health"), engine.get("/v1/models"), engine.chat("x")):
            assert answer.status == 503
            assert "loading model" in answer.json()["error"]["message"]
        assert engine.get("/metrics").status == 200


def test_loading_ends() -> None:
    with running("--loading", "0.2") as engine:
        deadline = time.monotonic() + PATIENCE_S
        while engine.get("/health").status == 503:
            assert time.monotonic() < deadline
        assert engine.chat("x").content() == "ok"


def test_slots_limit_what_runs_at_once_and_the_rest_waits() -> None:
    with running("--slots", "2", "--latency", "600") as engine, asking(engine, *"abcde"):
        engine.wait_counts(lambda counts: counts["in_flight_now"] == 5)
        assert engine.metric("num_requests_running") == 2
        assert engine.metric("num_requests_waiting") == 3


def test_waiting_requests_are_answered_as_slots_free_up() -> None:
    with running("--slots", "1", "--latency", "0.01") as engine, asking(engine, *"abcde") as threads:
        for thread in threads:
            thread.join(PATIENCE_S)
        counts = engine.counts()
        assert (counts["answered"], counts["in_flight_now"]) == (5, 0)


def test_a_client_that_leaves_frees_its_slot() -> None:
    with running("--slots", "1") as engine:
        with socket.create_connection((engine.host, engine.port)) as leaver:
            body = json.dumps(chat_body("STUB:sleep=600")).encode()
            leaver.sendall(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
            engine.wait_counts(lambda counts: counts["in_flight_now"] == 1)
        assert engine.chat("next").content() == "ok"


def test_a_hung_engine_takes_requests_and_answers_none() -> None:
    with running("--hang-at", "3") as engine:
        for text in "ab":
            assert engine.chat(text).content() == "ok"
        with asking(engine, "c", "d"):
            counts = engine.wait_counts(lambda counts: counts["requests"] == 4)
            assert (counts["answered"], counts["in_flight_now"]) == (2, 2)
            assert engine.metric("generation_tokens_total") == 2
            assert engine.get("/health").status == 200


def test_die_after_exits_3_on_the_nth_post_having_recorded_it(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with running("--die-after", "2", "--record", str(record)) as engine:
        assert engine.chat("a").content() == "ok"
        with pytest.raises(ConnectionError):
            engine.chat("b")
        assert engine.exit_status() == 3
    assert len(read_record(record)) == 2


def test_chaos_is_the_same_for_the_same_seed() -> None:
    runs: list[list[int]] = []
    for seed in ("5", "5", "6"):
        with running("--chaos", "0.5", "--seed", seed) as engine:
            answers = [engine.chat("x") for _ in range(64)]
        runs.append([answer.status for answer in answers])
        assert all(answer.headers["retry-after"] == "0" for answer in answers if answer.status == 503)
    assert set(runs[0]) == {200, 503}
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0(number: int) -> None:
    with running("--latency", "600") as engine, asking(engine, "x"):
        engine.wait_counts(lambda counts: counts["in_flight_now"] == 1)
        engine.child.send_signal(number)
        assert engine.exit_status() == 0


def test_fail_start_prints_an_error_and_exits_7() -> None:
    done = subprocess.run(
        command("--fail-start"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("error: ")


def test_hang_start_says_nothing_and_stays() -> None:
    child = subprocess.Popen(command("--hang-start"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not catches(child.pid, signal.SIGTERM):
            assert child.poll() is None
            assert time.monotonic() < deadline
        child.terminate()
        assert child.communicate(timeout=PATIENCE_S)[0] == ""
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_senseless_option_is_refused() -> None:
    done = subprocess.run(
        command("--chaos", "2"), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "fraction from 0 to 1" in done.stderr


def test_port_file_holds_the_url_and_the_socket_option_serves_there(tmp_path: Path) -> None:
    with running("--port-file", str(tmp_path / "url")) as engine:
        assert (tmp_path / "url").read_text() == f"http://{engine.host}:{engine.port}"
    path = tmp_path / "s"
    child = subprocess.Popen(command("--socket", str(path)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == f"listening on unix:{path}\n"
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert link.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
        child.terminate()
        assert child.wait(PATIENCE_S) == 0
        assert not path.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_engine_that_dies_when_ready_answers_its_health_probe_first() -> None:
    with running("--die-when-ready") as engine:
        assert engine.get("/health").status == 200
        assert engine.exit_status() == 3


def test_engine_that_ignores_sigterm_goes_on() -> None:
    with running("--ignore-sigterm") as engine:
        engine.child.send_signal(signal.SIGTERM)
        assert engine.get("/health").status == 200
        assert engine.child.poll() is None
        engine.child.send_signal(signal.SIGINT)
        assert engine.exit_status() == 0


def test_mute_engine_takes_connections_and_says_nothing() -> None:
    with running("--mute") as engine, socket.create_connection((engine.host, engine.port), timeout=0.3) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(TimeoutError):
            link.recv(1)
