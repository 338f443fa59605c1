"""What a batch of the facility's API writes into its user's folders, while it runs and when it has ended."""

import json
import os
import stat
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.contract.facility import BASE, BATCHES, Site, lines_of, site
from tests.harness import Json, wait_until


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    with site(tmp_path_factory.mktemp("site")) as made:
        yield made


def test_batch_that_runs_has_a_progress_file_that_changes_and_no_result_yet(here: Site) -> None:
    with here.holding():
        batch = here.batch(here.write("slow.jsonl", "a", "hold it"))
        [folder] = here.out.glob(f"slow_*_{batch}")
        here.until(batch, "running")
        early = here.ask("GET", f"{BATCHES}/{batch}/result")
        assert early.status_code == 409
        assert set(early.json()["error"]) == {"code", "message", "info"}

        def said() -> Json:
            found = list(folder.glob("*.progress.json"))
            return json.loads(found[0].read_text()) if found else {}

        wait_until(lambda: said().get("lines_processed") == 1, "one line is told to be done")
        assert (said()["status"], said()["lines_total"], said()["num_responses"]) == ("running", 2, 1)
        assert not list(folder.glob("*.results.jsonl"))
        waiting = here.batch(here.write("after.jsonl", "b"))
        jobs = here.ask("GET", f"{BASE}/local/jobs").json()
        assert jobs["running"] == [{"model": "llama", "framework": "endpoint"}]
        assert jobs["queued"] == [{"model": "llama", "framework": "endpoint"}]
        assert [(job["batch_id"], job["status"]) for job in jobs["jobs"]] == [(waiting, "pending"), (batch, "running")]
        others = here.ask("GET", f"{BASE}/local/jobs", "bob")
        assert others.json() == {"running": jobs["running"], "queued": jobs["queued"], "jobs": []}
        assert {row["batch_id"] for row in here.listed(status="pending")} == {waiting}
        assert {row["batch_id"] for row in here.listed(status="running")} == {batch}
    result = here.ended(batch)
    assert json.loads(Path(result["progress_file"]).read_text())["status"] == "completed"
    here.ended(waiting)
    assert here.ask("GET", f"{BASE}/nowhere/jobs").status_code == 404


def test_cancelled_batch_keeps_what_is_done_and_its_names_when_it_goes_on(here: Site) -> None:
    with here.holding():
        batch = here.batch(here.write("stopped.jsonl", "a", "hold it"))
        here.until(batch, "running")
        wait_until(lambda: here.ask("GET", f"/api/jobs/{batch}").json()["done"] == 1, "one record is done")
        answer = here.ask("POST", f"{BATCHES}/{batch}/cancel")
        assert answer.json() == {"batch_id": batch, "status": "cancelled"}
        wait_until(lambda: here.ask("GET", f"/api/jobs/{batch}").json()["state"] == "CANCELLED", "it is cancelled")
    cancelled = here.ended(batch)
    assert list(cancelled) == ["results_file", "progress_file", "metrics"]
    assert [line["error"] and line["error"]["code"] for line in lines_of(cancelled["results_file"])] == [
        None,
        "batch_cancelled",
    ]
    assert json.loads(Path(cancelled["progress_file"]).read_text())["status"] == "cancelled"
    assert here.ask("POST", f"{BATCHES}/{batch}/cancel").json()["status"] == "cancelled"
    assert here.ask("POST", f"/api/jobs/{batch}/resume").status_code == 200
    here.until(batch, "completed")
    result = here.ended(batch)
    assert (result["results_file"], result["progress_file"]) == (cancelled["results_file"], cancelled["progress_file"])
    assert [line["error"] for line in lines_of(result["results_file"])] == [None, None]
    assert json.loads(Path(result["progress_file"]).read_text())["status"] == "completed"
    assert here.ask("POST", f"{BATCHES}/{batch}/cancel").status_code == 409


def test_failed_batch_tells_why(here: Site) -> None:
    here.configure("[limits]\nrecords = 2")
    try:
        batch = here.batch(here.write("many.jsonl", "a", "b", "c"))
        result = here.ended(batch)
    finally:
        here.configure()
    assert here.status(batch) == "failed"
    assert list(result) == ["error"]
    assert result["error"]["code"] == "batch_failed"
    assert "more than 2 records" in result["error"]["message"]

    def said() -> list[str]:
        found = here.out.glob(f"many_*_{batch}/*.progress.json")
        return [json.loads(path.read_text())["status"] for path in found]

    wait_until(lambda: said() == ["failed"], "its progress file says so")


def test_end_that_a_killed_service_did_not_tell_is_told_by_the_next(here: Site) -> None:
    told, taken = (here.batch(here.write(f"{name}.jsonl", "a")) for name in ("told", "taken"))
    files = [Path(here.ended(batch)["progress_file"]) for batch in (told, taken)]
    here.town.box.stop()
    # As it is where the service ends between a job's end and the next look at it.
    files[0].write_text(files[0].read_text().replace("completed", "pending"))
    files[1].unlink()
    assert here.town.box.freight("serve", "--background").status == 0
    here.town.url = here.town.found()
    wait_until(lambda: json.loads(files[0].read_text())["status"] == "completed", "its progress file says so")
    assert not files[1].exists()


def test_output_folder_that_was_swapped_for_a_link_leads_nowhere(here: Site, tmp_path: Path) -> None:
    folder = here.out / "swapped"
    with here.holding():
        batch = here.batch(here.write("swap.jsonl", "hold it"), output_folder_path=str(folder))
        here.until(batch, "running")
        folder.rename(here.out / "moved")
        folder.symlink_to(tmp_path)
    result = here.ended(batch)
    assert here.status(batch) == "failed"
    assert "leads out of" in result["error"]["message"]
    assert list(tmp_path.iterdir()) == []
    folder.unlink()
    (here.out / "moved").rename(folder)
    assert here.ask("POST", f"/api/jobs/{batch}/resume").status_code == 200
    here.until(batch, "completed")
    assert len(lines_of(here.ended(batch)["results_file"])) == 1


def test_job_goes_on_only_while_its_output_folder_is_granted(here: Site) -> None:
    batch = here.batch(here.write("granted.jsonl", "refuse always"))
    here.ended(batch)
    settings = here.town.box.config.read_text()
    here.town.box.config.write_text(settings.replace(f'write = ["{here.out}"]', f'write = ["{here.outside}"]'))
    try:
        for verb in ("retry", "resume"):
            answer = here.ask("POST", f"/api/jobs/{batch}/{verb}")
            assert answer.status_code == 403, answer.text
            assert str(here.outside) in answer.json()["error"]["hint"]
        assert here.status(batch) == "completed"
        assert here.ask("POST", f"/api/jobs/{batch}/retry", "carol").status_code == 200
        here.until(batch, "completed")
    finally:
        here.town.box.config.write_text(settings)


def test_files_take_the_folders_group_and_the_mode_of_the_settings(here: Site) -> None:
    shared = here.out / "shared"
    shared.mkdir()
    group = next((group for group in (*os.getgroups(), *([4242] if os.geteuid() == 0 else []))), os.getgid())
    os.chown(shared, -1, group)
    here.configure('[facility]\noutput_mode = "0664"')
    try:
        result = here.ended(here.batch(here.write("moded.jsonl", "a"), output_folder_path=str(shared)))
    finally:
        here.configure()
    for key in ("results_file", "progress_file"):
        found = Path(result[key]).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o664, group)
    assert stat.S_IMODE(Path(result["results_file"]).parent.stat().st_mode) == 0o775


def test_jobs_of_freights_own_api_are_written_below_granted_roots_too(here: Site) -> None:
    folder = here.out / "jobs"
    job = here.town.job("alice", name="placed", model="llama", output=str(folder))
    assert len(lines_of(folder / "placed-results.jsonl")) == 1
    assert here.ask("GET", f"/api/jobs/{job}").json()["output"] == f"{folder}/placed-results.jsonl"
    (folder / "taken-results.jsonl").write_text("theirs")
    for name, output, status in (
        ("taken", folder, 400), ("far", here.outside, 403), ("far", here.data, 403), ("far", here.out / "jobs/..", 400),
    ):  # fmt: skip
        request = {"upload": here.town.upload("alice"), "model": "llama", "name": name, "output": str(output)}
        answer = here.ask("POST", "/api/jobs", json=request)
        assert answer.status_code == status, answer.text
        here.ask("DELETE", f"/api/uploads/{request['upload']}")
    assert (folder / "taken-results.jsonl").read_text() == "theirs"
    with here.holding():
        late = {"upload": here.town.upload("alice", "hold"), "model": "llama", "name": "late", "output": str(folder)}
        job = here.ask("POST", "/api/jobs", json=late).json()["job"]["id"]
        wait_until(lambda: here.ask("GET", f"/api/jobs/{job}").json()["state"] == "RUNNING", "it runs")
        (folder / "late-results.jsonl").write_text("theirs")
    wait_until(lambda: here.ask("GET", f"/api/jobs/{job}").json()["state"] == "FAILED", "it does not replace it")
    assert (folder / "late-results.jsonl").read_text() == "theirs"
    (folder / "late-results.jsonl").unlink()
    assert here.ask("POST", f"/api/jobs/{job}/resume").status_code == 200
    wait_until(lambda: here.ask("GET", f"/api/jobs/{job}").json()["state"] == "COMPLETED", "there is room now")
    # What is the job's own is replaced.
    assert here.ask("POST", f"/api/jobs/{job}/retry").status_code in (200, 409)
    assert len(lines_of(folder / "late-results.jsonl")) == 1
