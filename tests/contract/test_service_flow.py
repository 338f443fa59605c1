"""The page that tells people how to use batch jobs, sentence by sentence."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from freight.core.job import State
from tests.harness import Box, chat, code, content, parse_lines, wait_until
from tests.service import HOLDS, SMALL, ServiceBox, chats, endpoint, on_terminal, service_box

FREIGHT: Final = f"{sys.executable} -m freight"


def real_records() -> list[bytes]:
    """Return three records of which no two are alike."""
    texts = ("Say hello.", "Count to three.", "Name a colour.")
    return [json.dumps(record).encode() for record in chats(*texts, max_tokens=8, temperature=0)]


def shell(box: ServiceBox, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell."""
    return subprocess.run(
        command, shell=True, cwd=box.folder, env=box.environment(), capture_output=True, text=True, check=False
    )


def test_whole_flow_answers_each_record_by_its_id_and_in_order(service: ServiceBox) -> None:
    service.write("requests.jsonl", real_records())
    submitted = service.batch("submit", "requests.jsonl", "--model", SMALL, "--name", "nightly")
    assert (submitted.status, submitted.stdout) == (0, "nightly\n")
    waited = service.batch("wait", "nightly")
    assert (waited.status, waited.stdout) == (0, "")
    assert "3 of 3 records answered" in waited.stderr
    fetched = service.batch("results", "nightly", "-o", "answers.jsonl")
    assert (fetched.status, fetched.stdout) == (0, "")
    lines = service.results("answers.jsonl")
    job = service.job("nightly")
    assert [line["id"] for line in lines] == [f"{job.id}-{n}" for n in range(3)]
    assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in lines)
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in lines)
    assert all(content(line) for line in lines)
    assert len({content(line) for line in lines}) == 3
    assert (job.state, job.done, job.failed, job.cut) == ("COMPLETED", 3, 0, 3)


def test_composed_flow_writes_the_file_that_the_job_names(service: ServiceBox) -> None:
    service.write("requests.jsonl", real_records())
    assert service.batch("submit", "requests.jsonl", "--model", SMALL, "--name", "nightly").status == 0
    done = shell(service, f"{FREIGHT} batch wait nightly && {FREIGHT} batch results nightly")
    assert (done.returncode, done.stdout) == (0, "")
    written = service.folder / "nightly-results.jsonl"
    assert [line["custom_id"] for line in parse_lines(written.read_bytes())] == ["0", "1", "2"]
    written.unlink()


def test_composed_flow_writes_nothing_for_a_job_that_did_not_finish(service: ServiceBox) -> None:
    service.put("broken", [chat("a", HOLDS)], "sim")
    service.until_state("broken", State.RUNNING)
    service.cancel("broken")
    done = shell(service, f"{FREIGHT} batch wait broken && {FREIGHT} batch results broken")
    assert done.returncode == 1
    assert not (service.folder / "broken-results.jsonl").exists()


def test_answers_are_printed_only_when_that_is_meant(service: ServiceBox) -> None:
    with endpoint() as end:
        service.put("quiet", chats("whisper"), end.url)
        service.ended("quiet")
        said = [
            service.batch("wait", "quiet"),
            service.batch("status", "quiet"),
            service.batch("status", "quiet", "--json"),
            service.batch("list"),
            service.freight("ps", "--all"),
            service.batch("results", "quiet", "-o", "a.jsonl"),
        ]
        assert all(done.status == 0 and "whisper" not in done.stdout + done.stderr for done in said)
        status, shown = on_terminal(service, "batch", "results", "quiet", "-o", "b.jsonl")
        assert (status, b"whisper" in shown) == (0, False)
        meant = service.batch("results", "quiet", "--stdout")
        assert content(json.loads(meant.stdout)) == "whisper, 1"
        assert (meant.status, meant.stderr) == (0, "")
        assert meant.stdout == (service.folder / "a.jsonl").read_text()
        for name in ("a.jsonl", "b.jsonl"):
            (service.folder / name).unlink()


SAMPLE: Final = {
    "an array": (b'[\n{"custom_id":"a"}\n]\n', "looks like a JSON array. Freight reads JSONL."),
    "not JSON": (b'{"custom_id":"a","body":{"messages":[]}}\n{"custom_id":"b",\n', "in.jsonl, line 2, "),
    "no custom_id": (b'{"body":{"messages":[]}}\n{"body":{"messages":[]}}\n', "custom_id"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_wrong_file_is_refused_before_it_is_sent_and_before_any_service_starts(name: str, box: Box) -> None:
    text, says = SAMPLE[name]
    (box.folder / "in.jsonl").write_bytes(text)
    done = box.freight("batch", "submit", "in.jsonl", "--model", SMALL)
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.last_line().startswith("hint: ")
    assert "started" not in done.stderr
    assert not box.processes()
    assert not (box.folder / "data" / "run").exists()


def test_wrong_file_sends_nothing_to_a_service_that_runs(service: ServiceBox) -> None:
    (service.folder / "in.jsonl").write_bytes(SAMPLE["not JSON"][0])
    assert service.batch("submit", "in.jsonl", "--model", SMALL).status == 2
    assert list((service.data / "uploads").iterdir()) == []
    assert service.names() == []


def test_small_budgets_are_noted_once_and_not_refused(service: ServiceBox) -> None:
    with endpoint() as end:
        service.write("in.jsonl", [chat("a", max_tokens=8), chat("b", max_completion_tokens=511), chat("c")])
        done = service.batch("submit", "in.jsonl", "--model", end.url, "--name", "short")
        assert (done.status, done.stdout) == (0, "short\n")
        assert done.stderr.count("2 of the first 3 records allow fewer than 512 tokens") == 1
        assert service.ended("short").failed == 0
        service.write("in.jsonl", [chat("a", max_tokens=512)])
        assert "512" not in service.batch("submit", "in.jsonl", "--model", end.url).stderr


def test_job_waits_for_the_device_and_starts_by_itself(service: ServiceBox) -> None:
    service.put("first", [chat("a", HOLDS)], "sim")
    service.until_state("first", State.RUNNING)
    service.put("second", chats("b"), "sim")
    seen = service.until("second", lambda job: job.reason, "says why it waits")
    assert (seen.state, seen.reason) == ("QUEUED", f"{service.device} is held by first")
    # Nothing is stopped to make room.
    assert service.job("first").state == "RUNNING"
    shown = {line.split()[0]: line.split()[1] for line in service.freight("ps").stdout.splitlines()[1:]}
    assert shown == {"first": "RUNNING", "second": "QUEUED"}
    service.cancel("first")
    assert service.ended("second").state == "COMPLETED"


def test_ps_shows_what_has_not_ended_and_all_the_rest_too(service: ServiceBox) -> None:
    with endpoint() as end, endpoint() as other:
        service.put("over", chats("a"), end.url)
        service.ended("over")
        service.put("under-way", chats("hold"), other.url)
        service.until_state("under-way", State.RUNNING)

        def named(*command: str) -> list[str]:
            return [line.split()[0] for line in service.freight(*command).stdout.splitlines()[1:]]

        assert named("ps") == ["under-way"]
        assert named("ps", "--all") == named("ps", "-a") == named("batch", "list") == ["under-way", "over"]
        assert service.batch("list", "-q").stdout == "under-way\nover\n"
        assert service.batch("list", "--status", "completed", "-q").stdout == "over\n"


def test_status_tells_how_a_running_job_stands(service: ServiceBox) -> None:
    with endpoint() as end:
        service.put("nightly", chats("a", "refuse always", "hold"), end.url)
        service.until("nightly", lambda job: job.done == 2 and job.in_flight == 1, "only what is held is left")
        text = service.batch("status", "nightly").stdout
        for words in ("nightly (", "RUNNING", end.url, "nightly.jsonl", "2 of 3 records, 1 failed, 1 in flight"):
            assert words in text
        assert "1 × InferenceFailed (400), for example: the engine answered 400: no: 1" in text
        told = json.loads(service.batch("status", "nightly", "--json").stdout)
        assert (told["name"], told["state"], told["records"], told["done"]) == ("nightly", "RUNNING", 3, 2)
        [failure] = told["failures"]
        assert (failure["code"], failure["status"], failure["count"]) == ("InferenceFailed", 400, 1)
        assert [event["state"] for event in told["events"]] == ["QUEUED", "STARTING", "RUNNING"]


def test_logs_are_the_model_servers_own_output(service: ServiceBox) -> None:
    service.put("talks", chats("a"), "sim")
    service.ended("talks")
    done = service.freight("logs", "talks")
    assert (done.status, done.stderr) == (0, "")
    assert "listening on unix:" in done.stdout


def test_cancelled_job_keeps_its_results_and_takes_a_while_to_stop(service: ServiceBox) -> None:
    with endpoint() as end:
        service.put("stopped", chats("a", "b", "hold"), end.url)
        service.until("stopped", lambda job: job.done == 2, "two are done")
        assert service.batch("cancel", "stopped").status == 0
        assert service.ended("stopped").state == "CANCELLED"
        done = service.batch("results", "stopped", "-o", "kept.jsonl")
        assert done.status == 0
        lines = service.results("kept.jsonl")
        assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
        assert [code(line) for line in lines] == [None, None, "batch_cancelled"]
        (service.folder / "kept.jsonl").unlink()


def test_more_workers_than_devices_is_a_request_and_no_demand(service: ServiceBox) -> None:
    service.write("in.jsonl", chats("STUB:sleep=0.3", "b", "c", "d"))
    options = ("--workers", "2", "--concurrency", "1", "--name", "two")
    assert service.batch("submit", "in.jsonl", "--model", "sim", *options).status == 0
    ended = service.ended("two")
    assert (ended.state, ended.done, ended.options["workers"]) == ("COMPLETED", 4, 2)
    assert service.freight("logs", "two").stdout.count("==> worker ") == 1
    assert service.freight("logs", "two", "--worker", "2").status == 2


def test_line_whose_id_cannot_be_read_is_reported_by_its_number(service: ServiceBox) -> None:
    with endpoint() as end:
        # Past the sample, where a broken line is that record's result and the job goes on.
        service.put("holes", [*chats(*("a",) * 21), b'{"custom_id":', chat("last")], end.url)
        service.ended("holes")
        lines = parse_lines(b"\n".join(service.lines("holes")) + b"\n")
        assert [line["custom_id"] for line in lines] == [*map(str, range(21)), None, "last"]
        assert (lines[21]["error"]["code"], lines[21]["error"]["line"]) == ("invalid_json", 22)


def test_records_live_in_the_data_folder_for_their_owner_alone(service: ServiceBox) -> None:
    with endpoint() as end:
        job = service.put("kept", chats("a"), end.url)
        service.ended("kept")
        folder = service.data / "batch" / job.id
        assert {"input.jsonl", "results.db"} <= {path.name for path in folder.iterdir()}
        for path in (service.data, service.data / "batch", folder, *folder.iterdir()):
            mode = path.stat().st_mode
            assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_uninstall_keeps_batch_data_unless_told_to_remove_it(tmp_path: Path) -> None:
    with service_box(tmp_path / "box") as box, endpoint() as end:
        box.write("in.jsonl", chats("a"))
        assert box.batch("submit", "in.jsonl", "--model", end.url, "--name", "kept", "--wait").status == 0
        (box.data / "mine.txt").write_text("mine")
        asked = box.freight("uninstall")
        assert (asked.status, box.is_served()) == (2, True)
        gone = box.freight("uninstall", "-y")
        assert (gone.status, gone.stdout) == (0, "")
        assert "kept the batch data of 1 job" in gone.stderr
        wait_until(lambda: not box.processes(), "nothing of it runs")
        assert sorted(path.name for path in box.data.iterdir()) == ["batch", "catalog.db", "files", "mine.txt"]
        # What was kept is there for the next installation.
        assert box.batch("results", "kept", "-o", "out.jsonl").status == 0
        assert content(box.results()[0]) == "a, 1"
        assert box.freight("uninstall", "-y", "--remove-batch-data").status == 0
        assert tree(box.data) == {"mine.txt": b"mine"}
        assert not box.processes()
        assert content(box.results()[0]) == "a, 1"
