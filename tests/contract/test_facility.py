"""The facility's API: its users' clients run as they are, with the base URL, the paths and the token changed."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import requests

from tests.contract.facility import ALIAS, BASE, BATCHES, CREATE, Site, lines_of, names_in, site
from tests.contract.town import MODEL
from tests.harness import Json, wait_until

ROW_KEYS: Final = ["batch_id", "cluster", "created_at", "framework", "input_file", "status"]
METRICS: Final = ["response_time", "throughput_tokens_per_second", "total_tokens", "num_responses", "lines_processed"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    with site(tmp_path_factory.mktemp("site")) as made:
        yield made


CREATES: Final = """
base_url="{url}{create}"

curl -s -X POST "$base_url" \\
     -H "Authorization: Bearer ${{access_token}}" \\
     -H "Content-Type: application/json" \\
     -d '{{
          "model": "{model}",
          "input_file": "{file}"{more}
        }}'
"""
READS: Final = """
batch_id="{batch}"

curl -s -X GET "{url}/resource_server/v1/batches{path}" \\
     -H "Authorization: Bearer ${{access_token}}"
"""


def curl(here: Site, script: str, **words: str) -> Any:
    """Run a script as the facility's users have them; return what it prints."""
    text = script.format(url=here.town.url, create=CREATE, model=ALIAS, **words)
    environment = {**os.environ, "access_token": here.town.tokens["alice"], "no_proxy": "*"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_scripts_with_curl_run_from_submission_to_metrics(here: Site) -> None:
    path = here.write("curled.jsonl", "a", "b")
    own = here.out / "mine"
    first = curl(here, CREATES, file=str(path), more="")
    more = f',\n          "output_folder_path": "{own}/"\n'
    second = curl(here, CREATES, file=str(path), more=more)
    assert list(second) == ["batch_id", "input_file", "output_folder_path", "task_ids", "status"]
    assert (first["output_folder_path"], second["output_folder_path"]) == (str(here.out), str(own))
    assert first["status"] == "pending" and first["input_file"] == str(path)
    for made, folder in ((first, here.out), (second, own)):
        asks = partial(curl, here, READS, batch=made["batch_id"])
        wait_until(lambda asks=asks: asks(path="/${batch_id}") == "completed", "it is done")
        result = asks(path="/${batch_id}/result")
        assert Path(result["results_file"]).parents[1] == folder
        assert [line["custom_id"] for line in lines_of(result["results_file"])] == ["0", "1"]
    listed = curl(here, READS, batch="", path="")
    done = curl(here, READS, batch="", path="?status=completed")
    assert (
        {first["batch_id"], second["batch_id"]}
        <= {row["batch_id"] for row in done}
        <= {row["batch_id"] for row in listed}
    )


def test_clients_with_requests_run_from_submission_to_metrics(here: Site) -> None:
    headers = {"Authorization": f"Bearer {here.town.tokens['alice']}", "Content-Type": "application/json"}
    path = here.write("asked.v2.jsonl", "a", "refuse always", "c")
    data = {"model": ALIAS, "input_file": str(path), "output_folder_path": f"{here.out}/to/"}
    made = requests.post(here.town.url + CREATE, headers=headers, json=data, timeout=60).json()
    batch = made["batch_id"]
    url = f"{here.town.url}{BATCHES}/{batch}"
    wait_until(lambda: requests.get(url, headers=headers, timeout=60).json() == "completed", "it is done")
    result = requests.get(f"{url}/result", headers=headers, timeout=60).json()
    assert list(result) == ["results_file", "progress_file", "metrics"]
    metrics = result["metrics"]
    assert list(metrics) == METRICS
    assert (metrics["num_responses"], metrics["lines_processed"], metrics["total_tokens"]) == (2, 3, 10)
    assert metrics["throughput_tokens_per_second"] == pytest.approx(10 / metrics["response_time"])
    folder = here.out / "to" / f"asked.v2_meta-llama--Meta-Llama-3.1-8B-Instruct_{batch}"
    name = re.fullmatch(r"(asked\.v2_\d{8}T\d{6}Z)\.results\.jsonl", Path(result["results_file"]).name)
    assert name is not None
    assert result["results_file"] == f"{folder}/{name[1]}.results.jsonl"
    assert result["progress_file"] == f"{folder}/{name[1]}.progress.json"
    assert names_in(folder) == [f"{name[1]}.progress.json", f"{name[1]}.results.jsonl"]
    assert [bool(line["error"]) for line in lines_of(result["results_file"])] == [False, True, False]
    said = json.loads(Path(result["progress_file"]).read_text())
    assert said.pop("updated_at")
    assert said == {
        "batch_id": batch, "status": "completed", "lines_total": 3, "lines_processed": 3, "num_responses": 2,
        "num_failed": 1, "total_tokens": 10,
    }  # fmt: skip
    params = {"status": "completed"}
    listed = requests.get(here.town.url + BATCHES, headers=headers, params=params, timeout=60).json()
    [row] = [row for row in listed if row["batch_id"] == batch]
    assert list(row) == ROW_KEYS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\+00:00", row.pop("created_at"))
    assert row == {
        "batch_id": batch, "cluster": "local", "framework": "endpoint", "input_file": str(path), "status": "completed",
    }  # fmt: skip


def test_records_may_name_the_model_as_the_batch_does_and_bad_lines_are_in_the_results(here: Site) -> None:
    path = here.data / "mixed.jsonl"
    messages = [{"role": "user", "content": "x"}]
    bodies = [{"messages": messages, "model": name} for name in (ALIAS, "llama", "other")]
    lines = [json.dumps({"custom_id": str(number), "body": body}) for number, body in enumerate(bodies)]
    path.write_text("\n".join([*lines, "no json", ""]))
    result = here.ended(here.batch(path))
    codes = [line["error"] and line["error"]["code"] for line in lines_of(result["results_file"])]
    assert codes == [None, None, "model_mismatch", "invalid_json"]


def _input(here: Site, name: str) -> Path:
    """Return the path of an input that is refused."""
    path = here.data / name
    if path.exists() or path.is_symlink():
        return path
    match name:
        case "link.jsonl":
            path.symlink_to(here.write("secret.jsonl", "a", folder=here.outside))
        case "pipe.jsonl":
            os.mkfifo(path)
        case "folder.jsonl":
            path.mkdir()
        case "empty.jsonl":
            path.touch()
        case "good.jsonl":
            here.write(name, "a")
    return path


# What differs from a request that is accepted, the status, and a part of what is said.
REFUSALS: Final[dict[str, tuple[Json, int, str]]] = {
    "link that leads out": ({"input": "link.jsonl"}, 403, "leads out of"),
    "pipe": ({"input": "pipe.jsonl"}, 400, "no regular file"),
    "folder": ({"input": "folder.jsonl"}, 400, "is a folder"),
    "nothing there": ({"input": "nothing.jsonl"}, 400, "there is no"),
    "nothing in it": ({"input": "empty.jsonl"}, 400, "is empty"),
    "relative": ({"input_file": "data/good.jsonl"}, 400, "is not absolute"),
    "outside": ({"input_file": "{outside}/secret.jsonl"}, 403, "neither below a folder granted to you"),
    "of another user": ({"input_file": "{bobs}/x.jsonl"}, 403, "neither below a folder granted to you"),
    "not for everybody": ({"input_file": "/etc/shadow"}, 403, "neither below a folder granted to you"),
    "output outside": ({"output_folder_path": "{outside}"}, 403, "output may lie below {out}"),
    "output where one reads": ({"output_folder_path": "{data}"}, 403, "output may lie below {out}"),
    "output relative": ({"output_folder_path": "out"}, 400, "is not absolute"),
    "output up": ({"output_folder_path": "{out}/../outside"}, 400, "has .. in it"),
    "output through a link": ({"output_folder_path": "{out}/link/x"}, 403, "leads out of"),
    "output below a file": ({"output_folder_path": "{out}/file/x"}, 400, "needs a folder where there is a file"),
    "unknown model": ({"model": "gpt-17"}, 404, "models for batches on endpoint: llama"),
    "odd model": ({"model": "\ud800"}, 404, "there is no model \\ud800"),
    "no model": ({"model": None}, 400, "model"),
    "not for batches": ({"model": "chat-only"}, 400, "models for batches on endpoint: llama"),
    "unknown field": ({"temperature": 1}, 400, "temperature"),
    "unknown cluster": ({"to": f"{BASE}/nowhere/endpoint/v1/batches"}, 404, "clusters: local"),
    "cluster that is not ready": ({"to": f"{BASE}/sophia/endpoint/v1/batches"}, 404, "no cluster can be used yet"),
    "unknown framework": ({"to": f"{BASE}/local/abacus/v1/batches"}, 404, "frameworks: llamacpp, vllm, sglang"),
    "another framework": ({"to": f"{BASE}/local/vllm/v1/batches"}, 400, "does not run on vllm but on endpoint"),
}


@pytest.mark.parametrize(("change", "status", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_is_told_with_the_fix_and_leaves_nothing(
    here: Site, change: Json, status: int, words: str
) -> None:
    folders = {name: str(getattr(here, name)) for name in ("data", "out", "bobs", "outside")}
    if not (here.out / "link").is_symlink():
        (here.out / "link").symlink_to(here.outside)
        (here.out / "file").touch()
    asked = {key: value.format(**folders) if isinstance(value, str) else value for key, value in change.items()}
    path = _input(here, asked.pop("input", "good.jsonl"))
    body = {"model": ALIAS, "input_file": str(path), **asked}
    to = body.pop("to", CREATE)
    before = here.left()
    # As an escape, in which a text can be half a character.
    answer = here.ask("POST", to, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "info"}
    assert words.format(**folders) in f"{error['message']}; {error['info']}"
    assert here.left() == before
    assert names_in(here.outside) in ([], ["secret.jsonl"])


def test_file_that_everybody_may_read_needs_no_grant(here: Site) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = here.write("public.jsonl", "a", folder=Path(folder))
        path.chmod(0o644)
        Path(folder).chmod(0o700)
        assert here.create(path).status_code == 403
        Path(folder).chmod(0o755)
        path.chmod(0o640)
        assert here.create(path).status_code == 403
        path.chmod(0o644)
        batch = here.batch(path)
    # The copy is what is read: the file may go.
    assert len(lines_of(here.ended(batch)["results_file"])) == 1


def _odd_paths(here: Site) -> list[str]:
    data, secret = str(here.data), f"{here.outside}/secret.jsonl"
    up = "../" * 40
    return [
        f"{data}/../outside/secret.jsonl", f"{data}/{up}etc/shadow", f"{data}/./../outside/secret.jsonl",
        f"{data}/..", f"{data}/good.jsonl/..", f"{data}/%2e%2e/outside/secret.jsonl",
        f"{data}//..//outside/secret.jsonl", f"/proc/self/root{secret}", f"/proc/self/cwd/{secret}",
        "/proc/self/environ", "/proc/self/fd/0", "/proc/1/root/etc/shadow", "/proc/self/mem",
        "/dev/zero", "/dev/stdin", "/dev/tty", "/dev/fd/3", "/dev/null", "/sys/kernel/notes",
        f"{data}/good.jsonl\0", f"{data}\0/good.jsonl", "\0", f"{data}/good.jsonl\n", f"{data}/\ud83d",
        "/" * 5000, f"{data}/" + "a" * 256, f"{data}" + "/a" * 2100, f"{data}" + "/b" * 150, "", "/", ".", "..", "~",
        "~root/x",
        f"file://{secret}", f"{data}\\..\\outside\\secret.jsonl", f" {secret}", "-", "--help", "$HOME/x", "`id`", "{}",
        f"{here.town.box.data}/catalog.db", str(here.town.box.config), f"{here.town.box.data}/serve.log",
        f"{here.out}/link/secret.jsonl", f"{data}/link.jsonl",
    ]  # fmt: skip


def test_paths_made_to_lead_out_get_nowhere(here: Site) -> None:
    for name in ("good.jsonl", "link.jsonl"):
        _input(here, name)
    if not (here.out / "link").is_symlink():
        (here.out / "link").symlink_to(here.outside)
    before = here.left()
    for path in _odd_paths(here):
        for key in ("input_file", "output_folder_path"):
            body = {"model": ALIAS, "input_file": str(here.data / "good.jsonl"), key: path}
            answer = here.ask("POST", CREATE, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code in (400, 403), (key, path, answer.text)
            assert answer.json()["error"]["info"]
    assert here.left() == before


def test_what_lies_outside_is_not_even_said_to_exist(here: Site) -> None:
    here.write("secret.jsonl", "a", folder=here.outside)
    there, not_there = (here.create(here.outside / name).text for name in ("secret.jsonl", "absent.jsonl"))
    assert there.replace("secret", "absent") == not_there


def test_list_has_ones_own_batches_by_status_and_page(here: Site) -> None:
    mine = [here.batch(here.write(f"l{number}.jsonl", "a")) for number in range(3)]
    for batch in mine:
        here.ended(batch)
    path = here.write("b.jsonl", "a", folder=here.bobs)
    bobs = here.batch(path, "bob")
    here.ended(bobs, "bob")
    assert [row["batch_id"] for row in here.listed()][:3] == mine[::-1]
    assert [row["batch_id"] for row in here.listed("bob")] == [bobs]
    assert here.listed("carol") == []
    assert here.listed("bob", status="completed") == here.listed("bob")
    for status in ("pending", "running", "failed", "cancelled"):
        assert here.listed("bob", status=status) == []
    wrong = here.ask("GET", BATCHES, params={"status": "done"})
    assert wrong.status_code == 400
    assert "pending, running, completed, failed, cancelled" in wrong.json()["error"]["info"]
    seen, following = [], f"{BATCHES}?limit=2&status=completed"
    while following:
        answer = here.ask("GET", following)
        seen += [row["batch_id"] for row in answer.json()]
        following = answer.links.get("next", {}).get("url", "")
        assert len(answer.json()) == 2 or not following
    assert seen == [row["batch_id"] for row in here.listed(status="completed")]
    assert here.ask("GET", BATCHES, params={"after": "x"}).status_code == 400


def test_batch_is_there_for_nobody_else_and_no_other_job_is_a_batch(here: Site) -> None:
    batch = here.batch(here.write("own.jsonl", "a"))
    here.ended(batch)
    job = here.town.job("alice")
    short = batch[:8]
    for who, asked in (("bob", batch), ("alice", job), ("alice", short), ("alice", "none"), ("alice", "é")):
        for method, path in (("GET", ""), ("GET", "/result"), ("POST", "/cancel")):
            answer = here.ask(method, f"{BATCHES}/{asked}{path}", who)
            assert answer.status_code == 404, (who, asked, path)
            assert set(answer.json()["error"]) == {"code", "message", "info"}
    assert here.ask("GET", f"{BATCHES}/{batch}", "carol").json() == "completed"


def test_same_key_gives_the_same_batch_and_one_folder(here: Site) -> None:
    path = here.write("keyed.jsonl", "a")
    key: Json = {"headers": {"Idempotency-Key": "k-1"}}
    first, again = here.create(path, **key), here.create(path, **key)
    assert again.json()["batch_id"] == first.json()["batch_id"]
    assert len(list(here.out.glob("keyed_*"))) == 1
    assert here.create(path, output_folder_path=str(here.out / "else"), **key).status_code == 409
    here.ended(first.json()["batch_id"])


def test_empty_key_is_refused_by_every_api(here: Site) -> None:
    batch = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    own = {"upload": here.town.upload("alice"), "model": MODEL}
    facility = {"model": ALIAS, "input_file": str(here.write("unkeyed.jsonl", "a"))}
    for path, body in (("/api/jobs", own), ("/v1/batches", batch), (CREATE, facility)):
        answer = here.ask("POST", path, json=body, headers={"Idempotency-Key": ""})
        assert answer.status_code == 400, (path, answer.text)
        assert "Idempotency-Key" in answer.json()["error"]["message"]


def test_limits_of_a_user_hold_here_too(here: Site) -> None:
    path = here.write("limited.jsonl", "a" * 5000)
    for setting, status, words in (
        ("stored_bytes = 4000", 429, "limits.stored_bytes"),
        ("file_bytes = 4000", 400, "limits.file_bytes"),
    ):
        here.configure(f"[limits]\n{setting}")
        before = here.left()
        try:
            answer = here.create(path)
        finally:
            here.configure()
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
        assert here.left() == before
    with here.holding():
        batch = here.batch(here.write("held.jsonl", "hold"))

        def told() -> list[str]:
            found = here.out.glob(f"held_*_{batch}/*.progress.json")
            return [json.loads(path.read_text())["status"] for path in found]

        wait_until(lambda: told() == ["running"], "nothing more is written about it")
        here.configure("[limits]\nactive_jobs = 1")
        before = here.left()
        try:
            answer = here.create(path)
        finally:
            here.configure()
        assert answer.status_code == 429
        assert here.left() == before
    here.ended(batch)


def test_endpoints_tell_what_runs_where_and_what_does_batches(here: Site) -> None:
    answer = here.ask("GET", f"{BASE}/list-endpoints").json()
    local = answer["clusters"]["local"]
    assert local["base_url"] == f"{BASE}/local"
    assert {"llama", "chat-only"} <= set(local["frameworks"]["endpoint"]["models"])
    assert local["frameworks"]["endpoint"]["batch_models"] == ["llama"]
    assert local["frameworks"]["endpoint"]["aliases"] == {ALIAS: "llama"}
    assert local["base_url"] + local["frameworks"]["endpoint"]["endpoints"]["batches"] == CREATE
    assert local["frameworks"]["vllm"]["batch_models"] == ["heavy"]
