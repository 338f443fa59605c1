"""Records and answers stay where they belong, and what is kept is the owner's alone."""

import os
import re
import stat
import threading
from pathlib import Path
from typing import Final

from tests.harness import Box, chat, code, content, engine, engine_command, finish, model_toml, wait_until

CANARY: Final = "canary-9f1c57-yellow"
# The only places where a record may stand: the input, the output, and within the state folder these.
# The kept bytes of a stream are named by their digest.
ALLOWED: Final = re.compile(r"in\.jsonl|out\.jsonl|results\.db(-wal)?|input-[0-9a-f]{16}\.jsonl")


def seen_in_processes(box: Box, secret: bytes) -> list[str]:
    """Return where in the command lines, names and environments of the box's processes the secret stands."""
    found: list[str] = []
    for process in box.processes():
        for name in ("cmdline", "environ", "comm"):
            try:
                if secret in Path(f"/proc/{process.pid}/{name}").read_bytes():
                    found.append(f"{process.pid}/{name}")
            except OSError:
                continue
    return found


def loose(folder: Path) -> list[tuple[str, str]]:
    """Return what in a folder (itself included) others than its owner may touch."""
    paths = [folder, *folder.rglob("*")]
    modes = {str(path): path.stat(follow_symlinks=False).st_mode for path in paths}
    allowed = {name: 0o700 if stat.S_ISDIR(mode) else 0o600 for name, mode in modes.items()}
    # The folder keeps sockets from others, and the output, which is to have the mode of any file once in its place.
    return [
        (name, oct(mode))
        for name, mode in modes.items()
        if stat.S_IMODE(mode) != allowed[name] and not stat.S_ISSOCK(mode) and not name.endswith("/output.partial")
    ]


def holding(folder: Path, secret: bytes) -> list[Path]:
    """Return the files below a folder in which the secret stands."""
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_records_appear_nowhere_but_where_they_belong(box: Box, tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir(mode=0o700)
    secret = CANARY.encode()
    own = engine_command(tmp_path / "elsewhere", "--latency", "0.3")
    (tmp_path / "elsewhere").mkdir()
    box.configure(model_toml("local-model", engine="command", command=own))
    texts = [f"{CANARY} {n}" for n in range(4)] + [f"STUB:400-unsupported-param {CANARY}", f"STUB:500-always {CANARY}"]
    box.write("in.jsonl", [chat(f"{n}-{CANARY}", text) for n, text in enumerate(texts)])
    run = box.start("run", "in.jsonl", "-o", "out.jsonl", "--concurrency", "2", TMPDIR=str(scratch))
    seen: list[str] = []
    state = box.folder / "out.jsonl.freight"
    wait_until((tmp_path / "elsewhere" / "record").exists, "the engine runs")
    while run.poll() is None:
        seen += seen_in_processes(box, secret)
        try:
            assert loose(state) == []
            assert loose(scratch) == []
        except FileNotFoundError:  # A file that went away while we looked.
            continue
    done = finish(run)
    assert done.status == 0
    assert seen == []
    assert CANARY not in done.stdout + done.stderr
    assert [code(line) for line in box.results()] == [None] * 4 + ["InferenceFailed"] * 2
    assert all(ALLOWED.fullmatch(path.name) for path in holding(box.folder, secret))
    assert holding(scratch, secret) == []
    assert list(scratch.iterdir()) == []
    assert loose(state) == []


def test_state_of_a_killed_run_is_the_owners_alone_whatever_the_umask(box: Box, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with engine(tmp_path / "engine", "--latency", "0.3") as slow:
            text = "\n".join(f'{{"custom_id":"{n}","body":{{"prompt":"{CANARY} {n}"}}}}' for n in range(9))
            run = box.start(
                "run", "-", "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1", stdin=-1, TMPDIR=str(tmp_path)
            )
            thread = threading.Thread(target=run.communicate, args=(text,))
            thread.start()
            wait_until(lambda: slow.counts()["requests"] >= 4, "some answers are on disk")
            run.kill()
            thread.join()
            state = box.folder / "out.jsonl.freight"
            assert any(path.name.startswith("input-") for path in state.rglob("*"))
            assert loose(state) == []
            assert all(ALLOWED.fullmatch(path.name) for path in holding(state, CANARY.encode()))
    finally:
        os.umask(before)


def test_output_of_a_model_server_counts_as_record_data(box: Box, tmp_path: Path) -> None:
    # This server says aloud whatever it is asked, and then does its work.
    (tmp_path / "said").write_text(f"prompt: {CANARY}\n")
    command = ["sh", "-c", f'cat {tmp_path}/said; cat {tmp_path}/said >&2; exec "$@"', "sh", *engine_command(tmp_path)]
    box.configure(model_toml("local-model", engine="command", command=command))
    box.write("in.jsonl", [chat("a", "hello")])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl")
    assert done.status == 0
    assert content(box.results()[0]) == "ok"
    assert CANARY not in done.stdout + done.stderr
    state = box.folder / "out.jsonl.freight"
    logs = holding(state, CANARY.encode())
    assert logs
    for log in logs:
        assert log.parent.name == "workers"
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    # Kept with the job, gone with it.
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--fresh").status == 0
    assert not any(log.exists() for log in logs)


def test_keys_stand_in_no_file_and_no_command_line(box: Box, tmp_path: Path) -> None:
    key = "k-" + CANARY
    with engine(tmp_path / "engine", "--api-key", key, "--latency", "0.5") as locked:
        box.configure(model_toml("lab", engine="endpoint", source=locked.url, api_key_env="LAB_KEY"))
        box.write("in.jsonl", [chat("a"), chat("b")])
        run = box.start("run", "in.jsonl", "-o", "out.jsonl", "--model", "lab", "--concurrency", "1", LAB_KEY=key)
        record = tmp_path / "engine" / "record"
        wait_until(lambda: record.stat().st_size, "a request is under way")
        assert all(where.endswith("environ") for where in seen_in_processes(box, key.encode()))
        done = finish(run)
    assert done.status == 0
    assert holding(box.folder, key.encode()) == []
    assert key not in done.stderr
