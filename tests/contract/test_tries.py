"""What costs a record a try and what does not; when a record has failed; when a job waits for its server."""

import itertools
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from freight.control.jobrun import EngineLimits, JobRun
from tests.contract.scenario import side_by_side
from tests.contract.scripted import OK, Reply, scripted
from tests.harness import Box, Engine, chat, code, engine, finish, model_toml, wait_until

# Prompt: how often it is sent, the error's code, and the status that the results show (0: none).
SIMULATED: Final = {
    "STUB:500-always": (3, "InferenceFailed", 500),
    "STUB:502-html-always": (3, "InferenceFailed", 502),
    "STUB:reset": (3, "InferenceFailed", 0),
    "STUB:200-truncated": (3, "InferenceFailed", 0),
    "STUB:200-html": (3, "invalid_engine_response", 0),
    "STUB:200-empty": (3, "invalid_engine_response", 0),
    "STUB:200-error-body": (3, "invalid_engine_response", 0),
    "STUB:200-no-choices": (3, "invalid_engine_response", 0),
    "STUB:501": (1, "InferenceFailed", 501),
    "STUB:400-unsupported-param": (1, "InferenceFailed", 400),
    "STUB:400-empty-body": (1, "InferenceFailed", 400),
    "STUB:502-html-once": (2, None, 200),
    "STUB:503-once": (2, None, 200),
    "STUB:reset-once": (2, None, 200),
    "STUB:429-once": (2, None, 200),
    "fine": (1, None, 200),
}
STATUSES: Final = {400: 1, 401: 1, 404: 1, 413: 1, 422: 1, 302: 1, 501: 1, 500: 3, 503: 3, 504: 3, 529: 3}


@side_by_side
def test_failures_get_three_tries_and_refusals_one(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat(text, text) for text in SIMULATED])
    with engine(folder / "engine", "--count-prompts") as sim:
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url).status == 0
        asked = sim.counts()["by_prompt"]
    found = {
        line["custom_id"]: (
            asked[line["custom_id"]],
            code(line),
            line["response"]["status_code"] if line["response"] else 0,
        )
        for line in box.results()
    }
    assert found == SIMULATED


@side_by_side
def test_every_status_is_final_or_tried_again(box: Box) -> None:
    box.write("in.jsonl", [chat(f"{status}", f"{status}") for status in STATUSES])
    body = b'{"error":{"message":"no"}}'
    with scripted(lambda text, _: Reply(int(text), body, {"Location": "http://127.0.0.1:9/"})) as server:
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url).status == 0
        assert {int(text): len(times) for text, times in server.arrivals.items()} == STATUSES
    for line in box.results():
        assert line["response"]["status_code"] == int(line["custom_id"])
        assert line["response"]["body"] == {"error": {"message": "no"}}
        assert (code(line), line["error"]["message"]) == (
            "InferenceFailed",
            f"the engine answered {line['custom_id']}: no",
        )


@pytest.mark.parametrize(
    ("retry_after", "busy", "least_s"),
    [("0.2", 6, 0.2), ("2", 1, 2.0), ("a date", 1, 1.5), (None, 3, 0.7)],
    ids=["soon", "later", "date", "unsaid"],
)
@side_by_side
def test_too_many_requests_costs_no_try_and_honours_retry_after(
    retry_after: str | None, busy: int, least_s: float, box: Box
) -> None:
    def answer(_: str, time_no: int) -> Reply:
        said = formatdate(time.time() + 3, usegmt=True) if retry_after == "a date" else retry_after
        return Reply(429, b"{}", {"Retry-After": said} if said else {}) if time_no <= busy else OK

    box.write("in.jsonl", [chat("a", "text")])
    with scripted(answer) as server:
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url).status == 0
        came = server.arrivals["text"]
    assert code(box.results()[0]) is None
    assert len(came) == busy + 1
    assert min(after - before for before, after in itertools.pairwise(came)) >= least_s
    if retry_after is None:
        # Without a word from the server the pauses grow.
        assert came[-1] - came[-2] > came[1] - came[0]


@side_by_side
def test_failures_while_the_health_probe_fails_cost_no_try(box: Box) -> None:
    ill = [False]

    def answer(_: str, time_no: int) -> Reply:
        ill[0] = time_no <= 5
        return Reply(500, b"{}") if ill[0] else OK

    def health() -> int:
        # Well again at the second look.
        ill[0], was = False, ill[0]
        return 503 if was else 200

    box.write("in.jsonl", [chat("a", "text")])
    with scripted(answer) as server:
        server.health = health
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url).status == 0
        assert server.times("text") == 6
    assert code(box.results()[0]) is None


@side_by_side
def test_server_that_goes_away_and_comes_back_costs_no_try(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat(f"{n}", f"text {n}") for n in range(12)])
    with engine(folder / "first", "--latency", "0.3") as first:
        arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", first.url, "--concurrency", "2")
        run = box.start(*arguments)
        wait_until(lambda: first.counts()["requests"] >= 4, "some are under way")
        first.child.kill()
        first.child.wait()
        assert run.stderr is not None
        said = ""
        while "connect" not in said and "refused" not in said:
            said = run.stderr.readline()
        port = int(first.url.rpartition(":")[2])
    with engine(folder / "second", "--count-prompts", port=port) as second:
        done = finish(run)
        assert done.status == 0
        assert set(second.counts()["by_prompt"].values()) == {1}
    assert [code(line) for line in box.results()] == [None] * 12
    # One that is not there when a run begins is waited for, too.
    late = box.start(*arguments[:3], "late.jsonl", *arguments[4:])
    assert late.stderr is not None
    assert late.stderr.readline().startswith(f"waiting for {first.url}: ")
    with engine(folder / "third", port=port):
        assert finish(late).status == 0


@side_by_side
def test_job_without_success_is_suspended_and_goes_on_by_itself(box: Box) -> None:
    box.write("in.jsonl", [chat("a", "text"), chat("b", "other")])

    def answer(_: str, __: int) -> Reply:
        began = min(times[0] for times in server.arrivals.values())
        return OK if time.monotonic() > began + 5 else Reply(429, b"{}", {"Retry-After": "0.5"})

    with scripted(answer) as server:
        done = box.freight(
            "run", "in.jsonl", "-o", "out.jsonl", "--model", server.url, FREIGHT_ENGINES_SUSPEND_AFTER="1s"
        )
    assert done.status == 0
    assert "SUSPENDED 0/2" in done.stderr
    assert "no success for 1 s" in done.stderr
    assert [code(line) for line in box.results()] == [None, None]


@side_by_side
def test_record_timeout_is_per_attempt_and_final(box: Box, sim: Engine) -> None:
    texts = ["STUB:sleep=30 a", "STUB:503-once timed", "quick"]
    box.write("in.jsonl", [chat(text, text) for text in texts])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--record-timeout", "1s")
    assert done.status == 0
    assert [code(line) for line in box.results()] == ["request_timeout", None, None]
    assert box.results()[0]["response"] is None
    assert "1 s" in box.results()[0]["error"]["message"]
    assert [sim.counts()["by_prompt"][text] for text in texts] == [1, 2, 1]
    assert done.last_line().startswith("1 of 3 failed: request_timeout")


def test_only_records_of_endpoints_have_a_timeout_by_default() -> None:
    def setup(engine_name: str, asked: float) -> float:
        entry = SimpleNamespace(engine=engine_name)
        limits = EngineLimits(1.0, 1.0, 1.0, 1.0)
        options = SimpleNamespace(concurrency=0, record_timeout_s=asked, gpus=0)
        index = SimpleNamespace(endpoints_used=frozenset)
        job = SimpleNamespace(model=SimpleNamespace(entry=entry), options=options, limits=limits, index=index)
        job.row = SimpleNamespace(id="job")
        return JobRun.setup(job, "").record_timeout_s  # type: ignore[arg-type]

    assert [setup("endpoint", 0.0), setup("endpoint", 5.0)] == [3600.0, 5.0]
    assert [setup("command", 0.0), setup("command", 5.0)] == [0.0, 5.0]


@side_by_side
def test_keys_go_to_the_server_and_wrong_ones_are_refused(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat("a", "text")])
    with engine(folder / "engine", "--api-key", "s3cret") as locked:
        refused = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", locked.url)
        assert refused.status == 2
        assert "FREIGHT_ENDPOINT_API_KEY" in refused.stderr
        arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", locked.url)
        assert box.freight(*arguments, FREIGHT_ENDPOINT_API_KEY="s3cret").status == 0
        (folder / "key").write_text("s3cret\n")
        box.configure(model_toml("lab", engine="endpoint", source=[locked.url], api_key_file=str(folder / "key")))
        assert box.freight("run", "in.jsonl", "-o", "lab.jsonl", "--model", "lab").status == 0
        assert code(box.results("lab.jsonl")[0]) is None
