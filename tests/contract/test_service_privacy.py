"""Records and answers stay in their job's folder, and everything of the service's is its owner's alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.contract.scenario import side_by_side
from tests.contract.test_privacy import holding, loose, seen_in_processes
from tests.harness import chat, code, content, engine_command, finish, model_toml, parse_lines, wait_until
from tests.service import ServiceBox, chats, endpoint, service_box

CANARY: Final = "canary-5d20e8-violet"
# Where below the data folder a record may stand.
ALLOWED: Final = re.compile(r"batch/[0-9a-f-]{36}/(input\.jsonl|results\.db(-wal)?)")


def said_by(box: ServiceBox, name: str) -> str:
    """Return all that commands say about jobs which is no result."""
    commands = (
        ("batch", "status", name), ("batch", "status", name, "--json"), ("batch", "list"), ("batch", "list", "--json"),
        ("ps", "--all"), ("ps", "--all", "--json"), ("batch", "wait", name), ("doctor",),
    )  # fmt: skip
    done = [box.freight(*command) for command in commands]
    assert [each.status for each in done] == [0] * len(commands)
    return "".join(each.stdout + each.stderr for each in done)


@side_by_side
def test_records_and_answers_stand_only_in_the_jobs_own_files(folder: Path) -> None:
    secret = CANARY.encode()
    scratch = folder / "tmp"
    scratch.mkdir(mode=0o700)
    engines = folder / "engines"
    engines.mkdir()
    toml = model_toml("sim", engine="command", command=engine_command(engines, "--latency", "0.2"))
    with service_box(folder / "own", toml) as box, endpoint() as end:
        assert box.freight("serve", "--background", TMPDIR=str(scratch)).status == 0
        texts = [f"{CANARY} {n}" for n in range(4)] + [
            f"STUB:400-unsupported-param {CANARY}",
            f"STUB:500-always {CANARY}",
        ]
        records = [chat(f"{n}-{CANARY}", text) for n, text in enumerate(texts)]
        stream = "".join(json.dumps(record) + "\n" for record in [*records, records[0]])
        # By a pipe, so that the first records are kept aside for a look.
        command = ("batch", "submit", "-", "--model", "sim", "--name", "one", "--concurrency", "2", "--wait")
        running = box.start(*command, stdin=subprocess.PIPE, TMPDIR=str(scratch))
        assert running.stdin is not None
        running.stdin.write(stream)
        running.stdin.flush()
        running.stdin.close()
        running.stdin = None
        seen: list[str] = []
        while running.poll() is None:
            seen += seen_in_processes(box, secret)
        done = finish(running)
        assert (done.status, seen) == (0, [])
        assert CANARY not in done.stdout + done.stderr
        # An endpoint's answer quotes the prompt.
        box.put("two", chats(f"quoted {CANARY}"), end.url)
        box.ended("two")
        (box.folder / "two.jsonl").unlink()
        lines = parse_lines(b"\n".join(box.lines("one")) + b"\n")
        assert [code(line) for line in lines] == [None] * 4 + ["InferenceFailed"] * 2 + ["duplicate_custom_id"]
        assert content(json.loads(box.lines("two")[0])) == f"quoted {CANARY}, 1"
        for name in ("one", "two"):
            assert CANARY not in said_by(box, name)
        stray = [str(path.relative_to(box.data)) for path in holding(box.data, secret)]
        assert [path for path in stray if not ALLOWED.fullmatch(path)] == []
        assert {path.rpartition("/")[2] for path in stray} >= {"input.jsonl", "results.db"}
        assert [path for path in (*box.data.rglob("*"), *scratch.rglob("*")) if CANARY in path.name] == []
        assert holding(scratch, secret) == []
        # What is deleted is gone.
        box.clear()
        assert holding(box.data, secret) == []
    assert list(scratch.iterdir()) == []


@side_by_side
def test_files_and_folders_are_the_owners_alone_whatever_the_umask(folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        # Not by os.umask, which is the whole process's.
        command = "umask 0; exec python -m freight serve --background"
        shell = {**box.environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        assert subprocess.run(["sh", "-c", command], env=shell, capture_output=True, check=False).returncode == 0
        box.put("one", chats("a", "hold"), end.url)
        box.until("one", lambda job: job.done == 1, "one is done")
        open_to_others = loose(box.data)
        box.clear()
        assert open_to_others == []


@side_by_side
def test_last_words_of_a_server_go_with_their_job(folder: Path) -> None:
    # This server quotes a prompt when it fails, as some do.
    words = folder / "words"
    words.write_text(f"cannot tokenize: {CANARY}\n")
    command = ["sh", "-c", f"cat {words} >&2; exit 7", "sh", "{socket}"]
    with service_box(folder / "own", model_toml("quotes", engine="command", command=command)) as box:
        assert box.freight("serve", "--background").status == 0
        job = box.put("bad", chats("a"), "quotes")
        assert box.ended("bad").state == "FAILED"
        assert CANARY in box.batch("status", "bad").stdout
        [*logs] = (box.data / "batch" / job.id / "workers").iterdir()
        assert logs
        assert loose(logs[0].parent) == []
        assert CANARY not in (box.data / "serve.log").read_text()
        listed = box.batch("list").stdout + box.freight("ps", "--all").stdout
        assert box.batch("delete", "bad", "-y").status == 0
        wait_until(lambda: not (box.data / "batch" / job.id).exists(), "its folder is gone")
        box.stop()
        assert [path.name for path in holding(box.data, CANARY.encode())] == []
        # Nor do they belong into lists, which people paste and put on screens.
        assert CANARY not in listed
