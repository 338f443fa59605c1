"""What once went wrong with the state folder, the output and the standard files stays right."""

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.scenario import side_by_side
from tests.contract.scripted import OK, Reply, scripted
from tests.faults.runs import Running, free_port
from tests.harness import CASES, Box, Engine, Finished, chat, code, engine, engine_command, finish, model_toml
from tests.harness import wait_until as until

GOOD: Final = str(CASES / "inputs" / "00_good3.jsonl")
OUT: Final = "out.jsonl"
NOWHERE: Final = "http://127.0.0.1:9"
REFUSED: Final = Reply(400, b'{"error":{"message":"no"}}')


def run(box: Box, source: str, model: str, *options: str, stdin: str | None = None) -> Finished:
    """Run an input to OUT."""
    return box.freight("run", source, "-o", OUT, "--model", model, *options, stdin=stdin)


def state(box: Box) -> Path:
    return box.folder / f"{OUT}.freight"


def change(box: Box, statement: str, *values: object) -> None:
    """Change the catalog that a run left, as if it had been killed at another moment."""
    with closing(sqlite3.connect(state(box) / "catalog.db")) as connection, connection:
        assert connection.execute(statement, values).rowcount == 1


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return all files under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(texts: list[str]) -> str:
    """Return records as text, one for each user text, which is its custom_id too."""
    return "".join(json.dumps(chat(text, text)) + "\n" for text in texts)


def partly(box: Box, folder: Path, source: str, stdin: str | None = None) -> tuple[str, int]:
    """Interrupt a run of eight records when five are answered; return its server's URL and port, free by then."""
    port = free_port()
    with engine(folder / "first", "--hang-at", "6", port=port) as first:
        child = box.start(
            "run", source, "-o", OUT, "--model", first.url, "--concurrency", "1",
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        )  # fmt: skip
        if stdin is not None:
            assert child.stdin is not None
            child.stdin.write(stdin)
            child.stdin.close()
            child.stdin = None
        until(lambda: first.counts()["requests"] >= 6, "some are answered")
        child.send_signal(signal.SIGINT)
        stopped = finish(child)
    assert (stopped.status, "interrupted with 5 of 8" in stopped.stderr) == (130, True), stopped
    return first.url, port


EIGHT: Final = [f"text {number}" for number in range(8)]


# A folder that is not Freight's, and one that another run has.


@pytest.mark.parametrize("options", [(), ("--fresh", "--force")])
@side_by_side
def test_folder_with_files_that_look_like_ours_is_refused_and_left_alone(
    box: Box, sim: Engine, options: tuple[str, ...]
) -> None:
    folder = state(box)
    (folder / "job").mkdir(parents=True)
    for name in ("input_data.csv", "input-1.jsonl", "input.new", "input.partial", "runtime", "job/results.db"):
        (folder / name).write_text(f"mine: {name}")
    before = snapshot(folder)
    for source in (GOOD, "-"):
        refused = run(box, source, sim.url, *options, stdin=Path(GOOD).read_text() if source == "-" else None)
        assert (refused.status, "not a Freight state folder" in refused.stderr) == (2, True), refused
    assert snapshot(folder) == before
    assert not (box.folder / OUT).exists()


@side_by_side
def test_refused_second_run_leaves_the_input_that_the_first_is_reading(box: Box, sim: Engine) -> None:
    first = box.start("run", "-", "-o", OUT, "--model", sim.url, stdin=subprocess.PIPE)
    until(lambda: list(state(box).glob("input*")), "it reads standard input")
    before = sorted(path.name for path in state(box).iterdir())
    for options in ((), ("--fresh", "--force")):
        second = run(box, GOOD, sim.url, *options)
        assert (second.status, f"in use by process {first.pid} " in second.stderr) == (1, True), second
        assert sorted(path.name for path in state(box).iterdir()) == before
    done = finish(first, lines(EIGHT))
    assert (done.status, len(box.results())) == (0, 8), done


@side_by_side
def test_mistyped_command_keeps_the_input_of_an_interrupted_stream(box: Box, folder: Path) -> None:
    url, port = partly(box, folder, "-", stdin=lines(EIGHT))
    mistyped = run(box, "typo.jsonl", url)
    assert (mistyped.status, "no input file typo.jsonl" in mistyped.stderr) == (2, True), mistyped
    bad = run(box, "-", url, stdin="not JSON\n")
    assert bad.status == 2, bad
    with engine(folder / "second", port=port) as second:
        done = run(box, "-", url, stdin="")
        assert (done.status, second.counts()["requests"]) == (0, 3), done
    assert [line["custom_id"] for line in box.results()] == EIGHT


# An output that is not what Freight wrote.


@side_by_side
def test_fresh_over_a_changed_output_is_refused_and_forgets_nothing(box: Box) -> None:
    with scripted(lambda text, _: REFUSED if text == "bad" else OK) as server:
        box.write("in.jsonl", [chat("good", "good"), chat("bad", "bad")])
        assert run(box, "in.jsonl", server.url).status == 0
        written = (box.folder / OUT).read_bytes()
        (box.folder / OUT).write_text("mine now\n")
        [results] = state(box).glob("*/results.db")
        refused = run(box, "in.jsonl", server.url, "--fresh")
        assert (refused.status, "--force" in refused.stderr) == (2, True), refused
        assert results.exists()
        plain = run(box, "in.jsonl", server.url)
        assert (plain.status, "already done" in plain.stderr, "was changed" in plain.stderr) == (0, True, True), plain
        assert (box.folder / OUT).read_text() == "mine now\n"
        (box.folder / OUT).unlink()
        plain = run(box, "in.jsonl", server.url)
        assert (plain.status, "written again" in plain.stderr) == (0, True), plain
        assert server.times("good") == server.times("bad") == 1
    assert (box.folder / OUT).read_bytes() == written


@side_by_side
def test_fresh_over_another_output_keeps_the_answers_of_an_unfinished_run(box: Box, folder: Path) -> None:
    (box.folder / "in.jsonl").write_text(lines(EIGHT))
    url, port = partly(box, folder, "in.jsonl")
    (box.folder / OUT).write_text("mine\n")
    with engine(folder / "second", port=port) as second:
        for options in ((), ("--fresh",)):
            refused = run(box, "in.jsonl", url, *options)
            assert (refused.status, "--force" in refused.stderr) == (2, True), refused
        (box.folder / OUT).unlink()
        done = run(box, "in.jsonl", url)
        assert (done.status, second.counts()["requests"]) == (0, 3), done
    assert [line["custom_id"] for line in box.results()] == EIGHT


@pytest.mark.parametrize("options", [(), ("--retry-errors",)])
@side_by_side
def test_output_that_is_linked_to_what_lies_aside_is_never_written_into(box: Box, options: tuple[str, ...]) -> None:
    """The run was killed after it had linked the output to its place and before it had removed the other name."""
    with scripted(lambda text, time: OK if text == "good" or time > 2 else REFUSED) as server:
        box.write("in.jsonl", [chat("good", "good"), chat("bad", "bad")])
        assert run(box, "in.jsonl", server.url).status == 0
        published = (box.folder / OUT).read_bytes()
        # A third name, by which its bytes can be seen whatever happens to the other two.
        os.link(box.folder / OUT, box.folder / "seen")
        [job] = [path for path in state(box).iterdir() if path.is_dir()]
        os.link(box.folder / OUT, job / "output.partial")
        change(box, "UPDATE job SET state = 'FINALIZING'")
        done = run(box, "in.jsonl", server.url, *options)
        assert (done.status, server.times("good"), server.times("bad")) == (0, 1, 1 + len(options)), done
    assert (box.folder / "seen").read_bytes() == published
    assert [line["custom_id"] for line in box.results()] == ["good", "bad"]
    assert not (job / "output.partial").exists()


@side_by_side
def test_output_from_before_a_retry_is_known_when_the_run_was_killed_before_replacing_it(box: Box) -> None:
    with scripted(lambda text, time: OK if text == "good" or (text == "late" and time > 1) else REFUSED) as server:
        texts = ["good", "late", "bad"]
        box.write("in.jsonl", [chat(text, text) for text in texts])
        assert run(box, "in.jsonl", server.url).status == 0
        old = (box.folder / OUT).read_bytes()
        assert run(box, "in.jsonl", server.url, "--retry-errors").status == 0
        new = (box.folder / OUT).read_bytes()
        assert old != new
        # The catalog knows of the new output, and the old one still stands.
        (box.folder / OUT).write_bytes(old)
        change(box, "UPDATE job SET state = 'FINALIZING'")
        done = run(box, "in.jsonl", server.url)
        assert (done.status, [server.times(text) for text in texts]) == (0, [1, 2, 2]), done
    assert (box.folder / OUT).read_bytes() == new


@side_by_side
def test_marks_of_an_output_that_was_never_put_in_place_do_no_harm(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a", "a mark"), chat("b", "STUB:501 a mark")])
    assert run(box, "in.jsonl", sim.url).status == 0
    content = (box.folder / OUT).read_bytes()
    marks = [
        {"size": 3, "sha256": hashlib.sha256(b"new").hexdigest()},
        {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()},
    ]
    outcome = json.dumps({"outputs": marks, "done": 2, "failed": 1})
    change(box, "UPDATE job SET state = 'RUNNING', outcome = ?", outcome)
    done = run(box, "in.jsonl", sim.url, "--retry-errors")
    assert done.status == 0, done
    # Another file than the two is still not Freight's.
    (box.folder / OUT).write_bytes(content + b"\n")
    change(box, "UPDATE job SET state = 'RUNNING'")
    assert run(box, "in.jsonl", sim.url).status == 2


# A damaged state folder.


def xored(content: bytes, first: int, last: int) -> bytes:
    return content[:first] + bytes(byte ^ 0x5A for byte in content[first:last]) + content[last:]


PAGE: Final = 4096
DAMAGES: Final = {
    "random": lambda content: bytes(hashlib.sha256(content).digest() * (len(content) // 32)),
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "all but the header": lambda content: xored(content, 100, len(content)),
    "jobs": lambda content: xored(content, PAGE, 2 * PAGE),
    "all but jobs": lambda content: xored(content, 2 * PAGE, len(content)),
    "workers": lambda content: xored(content, len(content) - 3 * PAGE, len(content)),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
@side_by_side
def test_damaged_catalog_is_told_and_only_fresh_starts_over(box: Box, sim: Engine, damage: str) -> None:
    box.write("in.jsonl", [chat("a", f"damage {damage}"), chat("b", f"STUB:501 {damage}")])
    assert run(box, "in.jsonl", sim.url).status == 0
    catalog = state(box) / "catalog.db"
    whole = catalog.read_bytes()
    if damage == "gone":
        catalog.unlink()
    else:
        catalog.write_bytes(DAMAGES[damage](whole))
    [results] = state(box).glob("*/results.db")
    told = run(box, "in.jsonl", sim.url)
    assert (told.status, "error: " in told.stderr, "--fresh" in told.stderr) == (1, True, True), told
    assert results.exists()
    assert len(box.results()) == 2
    fresh = run(box, "in.jsonl", sim.url, "--fresh", "--force")
    assert (fresh.status, sim.counts()["by_prompt"][f"damage {damage}"]) == (0, 2), fresh


@side_by_side
def test_damaged_results_are_told_and_only_fresh_starts_over(box: Box, folder: Path) -> None:
    (box.folder / "in.jsonl").write_text(lines(EIGHT))
    url, port = partly(box, folder, "in.jsonl")
    [results] = state(box).glob("*/results.db")
    results.write_bytes(xored(results.read_bytes(), 0, results.stat().st_size))
    with engine(folder / "second", port=port) as second:
        told = run(box, "in.jsonl", url)
        assert (told.status, "error: " in told.stderr, "--fresh" in told.stderr) == (1, True, True), told
        fresh = run(box, "in.jsonl", url, "--fresh")
        assert (fresh.status, second.counts()["requests"]) == (0, 8), fresh


@side_by_side
def test_state_folder_that_is_removed_during_a_run_stops_it(box: Box, folder: Path) -> None:
    with engine(folder / "own") as own:
        box.write("in.jsonl", [chat("a", "quick"), chat("b", "STUB:sleep=50 slow")])
        child = box.start("run", "in.jsonl", "-o", OUT, "--model", own.url)
        until(lambda: own.counts()["requests"] >= 2, "it is at work")
        shutil.rmtree(state(box))
        stopped = finish(child, timeout=20)
    assert (stopped.status, "state folder was removed" in stopped.stderr) == (1, True), stopped
    assert not state(box).exists()
    assert not (box.folder / OUT).exists()
    assert not box.processes()


@side_by_side
def test_state_folder_that_is_replaced_during_a_run_stops_it_and_is_left_alone(box: Box, folder: Path) -> None:
    with engine(folder / "own") as own:
        box.write("in.jsonl", [chat("a", "quick"), chat("b", "STUB:sleep=50 slow")])
        child = box.start("run", "in.jsonl", "-o", OUT, "--model", own.url)
        until(lambda: own.counts()["requests"] >= 2, "it is at work")
        state(box).rename(box.folder / "moved")
        shutil.copytree(box.folder / "moved", state(box))
        stopped = finish(child, timeout=20)
    assert (stopped.status, "state folder was removed" in stopped.stderr) == (1, True), stopped
    assert (state(box) / "catalog.db").exists()


# What a run goes on with, and what it is done with.


@side_by_side
def test_retrying_errors_after_the_time_ran_out_runs_the_failed_records_too(box: Box, folder: Path) -> None:
    port = free_port()
    texts = ["first", "STUB:400-once second", "third", "fourth"]
    (box.folder / "in.jsonl").write_text(lines(texts))
    once = ("--once-file", str(folder / "once"))
    with engine(folder / "first", "--hang-at", "3", *once, port=port) as first:
        ended = run(box, "in.jsonl", first.url, "--concurrency", "1", "--timeout", "3s")
        assert (ended.status, "TIMED_OUT" in ended.stderr) == (1, True), ended
    assert [code(line) for line in box.results()] == [None, "InferenceFailed", "batch_expired", "batch_expired"]
    with engine(folder / "second", *once, "--count-prompts", port=port) as second:
        done = run(box, "in.jsonl", second.url, "--retry-errors")
        assert (done.status, second.counts()["by_prompt"]) == (0, dict.fromkeys(texts[1:], 1)), done
    assert [code(line) for line in box.results()] == [None] * 4


@side_by_side
def test_what_is_done_is_done_without_its_server(box: Box, folder: Path) -> None:
    box.configure(model_toml("other", engine="command", command=engine_command(folder)))
    with engine(folder / "own") as own:
        assert run(box, GOOD, own.url).status == 0
    again = run(box, GOOD, own.url)
    assert (again.status, "already done" in again.stderr, "waiting" in again.stderr) == (0, True, False), again
    other = run(box, GOOD, "other", "--ignore-record-model")
    assert (other.status, "belongs to another run" in other.stderr) == (2, True), other
    waiting = Running(box, GOOD, "-o", OUT, "--model", NOWHERE)
    waiting.wait_for("waiting for")
    waiting.signal(signal.SIGINT)
    stopped = waiting.end()
    assert (stopped.status, "already done" in stopped.stderr) == (130, False), stopped
    assert run(box, GOOD, own.url).status == 0


@pytest.mark.parametrize(
    ("name", "toml", "finished"),
    [
        ("media.hosts", '[media]\nhosts = ["pictures.example"]\n', True),
        ("limits.record_bytes", "[limits]\nrecord_bytes = 5000\n", False),
    ],
)
@side_by_side
def test_setting_that_changes_what_intake_refuses_is_named_as_a_difference(
    box: Box, folder: Path, name: str, toml: str, finished: bool
) -> None:
    (box.folder / "in.jsonl").write_text(lines(EIGHT))
    with engine(folder / "own", "--hang-at", "0" if finished else "6") as own:
        child = box.start("run", "in.jsonl", "-o", OUT, "--model", own.url, "--concurrency", "1")
        if not finished:
            until(lambda: own.counts()["requests"] >= 6, "some are answered")
            child.send_signal(signal.SIGINT)
        assert finish(child).status == (0 if finished else 130)
        box.configure(toml)
        refused = run(box, "in.jsonl", own.url)
        assert (refused.status, "what differs" in refused.stderr, name in refused.stderr) == (2, True, True), refused
        box.configure("")
        if finished:
            assert "already done" in run(box, "in.jsonl", own.url).stderr


# Where the output goes.


@pytest.mark.parametrize("exists", [True, False])
@side_by_side
def test_output_that_is_a_link_is_written_where_it_leads(box: Box, sim: Engine, exists: bool) -> None:
    (box.folder / "elsewhere").mkdir()
    target, link = box.folder / "elsewhere" / "real.jsonl", box.folder / OUT
    link.symlink_to("elsewhere/real.jsonl")
    if exists:
        target.write_text("mine\n")
        refused = run(box, GOOD, sim.url)
        assert (refused.status, target.read_text()) == (2, "mine\n"), refused
    assert run(box, GOOD, sim.url, *(("--force",) if exists else ())).status == 0
    assert link.readlink() == Path("elsewhere/real.jsonl")
    assert len(box.results("elsewhere/real.jsonl")) == 3
    assert "already done" in run(box, GOOD, sim.url).stderr
    done = run(box, GOOD, sim.url, "--fresh")
    assert (done.status, link.is_symlink(), target.is_symlink()) == (0, True, False), done


@pytest.mark.parametrize(
    "output", ["loop", "pipe", "device", "/dev/null", "", "folder", "folder/", "new/", "into", "plain/out.jsonl"]
)
@side_by_side
def test_output_that_could_never_be_written_is_refused_whatever_is_forced(box: Box, output: str) -> None:
    (box.folder / "loop").symlink_to("pool")
    (box.folder / "pool").symlink_to("loop")
    os.mkfifo(box.folder / "pipe")
    (box.folder / "device").symlink_to("/dev/null")
    (box.folder / "folder").mkdir()
    (box.folder / "into").symlink_to("folder")
    (box.folder / "plain").write_text("a file\n")
    before = sorted(str(path) for path in box.folder.rglob("*"))
    refused = box.freight("run", GOOD, "-o", output, "--model", NOWHERE, "--fresh", "--force")
    assert (refused.status, refused.stderr.startswith("error: "), "hint: " in refused.stderr) == (2, True, True)
    assert sorted(str(path) for path in box.folder.rglob("*")) == before
    assert not Path("/dev/null.freight").exists()


# Signals and standard files.


def shell(box: Box, script: str, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    """Start `freight ARGUMENTS` from a shell, in which it is "$@"."""
    return subprocess.Popen(
        ["bash", "-c", script, "bash", sys.executable, "-m", "freight", *arguments],
        cwd=box.folder, env=box.environment(), text=True, start_new_session=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes},
    )  # fmt: skip


@side_by_side
def test_hangup_that_whoever_started_the_run_ignores_stays_ignored(box: Box, folder: Path) -> None:
    box.configure(model_toml("mine", engine="command", command=engine_command(folder, "--latency", "0.2")))
    box.write("in.jsonl", [chat(text, text) for text in EIGHT])
    child = shell(
        box, "trap '' HUP; exec \"$@\"", "run", "in.jsonl", "-o", OUT, "--model", "mine", "--concurrency", "2"
    )
    record = folder / "record"
    until(lambda: record.exists() and record.stat().st_size, "it is at work")
    os.killpg(child.pid, signal.SIGHUP)
    for process in box.processes():
        process.send_signal(signal.SIGHUP)
    done = finish(child)
    assert (done.status, "interrupted" in done.stderr, len(box.results())) == (0, False, 8), done


@side_by_side
def test_reader_of_the_messages_that_goes_away_does_not_end_the_run(box: Box, folder: Path) -> None:
    with engine(folder / "own", "--latency", "0.1") as own:
        box.configure(f'default_model = "mine"\n{model_toml("mine", engine="endpoint", source=own.url)}')
        box.write("in.jsonl", [chat(text, text, max_tokens=9) for text in EIGHT])
        arguments = ("run", "in.jsonl", "-o", OUT, "--concurrency", "2")
        child = shell(box, 'set -o pipefail; "$@" 2>&1 | head -1', *arguments)
        done = finish(child)
    assert (done.status, done.stdout.count("\n")) == (0, 1), done
    assert [line["custom_id"] for line in box.results()] == EIGHT


@pytest.mark.parametrize("name", ["typo.jsonl", GOOD])
@side_by_side
def test_nobody_listening_changes_no_exit_status(box: Box, sim: Engine, name: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = shell(box, 'exec "$@"', "run", name, "-o", OUT, "--model", sim.url, stdout=writer, stderr=writer)
    os.close(writer)
    assert child.wait(60) == (0 if name == GOOD else 2)
    assert (box.folder / OUT).exists() == (name == GOOD)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@side_by_side
def test_closed_standard_files_do_no_harm(box: Box, folder: Path, closed: str) -> None:
    # A server of the run's own, which inherits what is wrong.
    box.configure(model_toml("mine", engine="command", command=engine_command(folder)))
    done = finish(shell(box, f'exec "$@" {closed}', "run", GOOD, "-o", OUT, "--model", "mine", "--ignore-record-model"))
    assert (done.status, [code(line) for line in box.results()]) == (0, [None] * 3), done
    if "2>" not in closed:
        assert "3 of 3 records answered" in done.stderr


@side_by_side
def test_closed_standard_input_is_an_empty_one(box: Box, sim: Engine) -> None:
    done = finish(shell(box, 'exec "$@" <&-', "run", "-", "-o", OUT, "--model", sim.url))
    assert (done.status, "standard input is empty" in done.stderr) == (2, True), done
    assert not state(box).exists()
