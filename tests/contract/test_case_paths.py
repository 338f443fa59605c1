"""Cases of paths: where the input comes from, where the output goes, what stands there already."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.contract.casetable import check_refused
from tests.contract.scenario import side_by_side
from tests.harness import CASES, Box, Engine, chat, code, engine, finish, wait_until

GOOD = CASES / "inputs" / "00_good3.jsonl"
# A run on it would wait for it for ever: what is refused is refused before that.
NOWHERE = "http://127.0.0.1:9"


def good(box: Box, output: str = "out.jsonl") -> bool:
    """Return whether an output holds the three good answers."""
    results = box.results(output)
    return [line["custom_id"] for line in results] == ["good-1", "good-2", "good-3"] and not any(map(code, results))


def unreadable_inputs(box: Box) -> list[str]:
    """Put into a box what is no file that can be read, and return the paths of such."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(box.folder / "a.socket"))
    (box.folder / "dangling").symlink_to("nothing")
    unreadable = box.folder / "locked.jsonl"
    shutil.copy(GOOD, unreadable)
    unreadable.chmod(0)
    # The superuser may read everything.
    locked = [] if os.access(unreadable, os.R_OK) else ["locked.jsonl"]
    return ["nope.jsonl", str(box.folder), "dangling", "a.socket", *locked]


@pytest.mark.parametrize("number", [pytest.param(70, id="case-70")])
@side_by_side
def test_input_that_cannot_be_read_is_refused_at_once(number: int, box: Box) -> None:
    for name in unreadable_inputs(box):
        done = box.freight("run", name, "-o", "out.jsonl", "--model", NOWHERE)
        check_refused(box, done, "out.jsonl")
        assert name in done.stderr


@pytest.mark.parametrize("number", [pytest.param(71, id="case-71")])
@side_by_side
def test_output_that_cannot_be_written_is_refused_at_once(number: int, box: Box) -> None:
    (box.folder / "folder").mkdir()
    (box.folder / "file").write_text("")
    for output in ("missing/out.jsonl", "folder", "file/out.jsonl", "/proc/out.jsonl"):
        done = box.freight("run", str(GOOD), "-o", output, "--model", NOWHERE)
        assert (done.status, done.stdout) == (2, "")
        assert output in done.stderr
        assert done.last_line().startswith("hint: ")
    assert sorted(path.name for path in box.folder.iterdir()) == ["config.toml", "file", "folder"]


@pytest.mark.parametrize("number", [pytest.param(73, id="case-73")])
@side_by_side
def test_output_of_others_is_kept_unless_forced(number: int, box: Box, sim: Engine) -> None:
    output = box.folder / "out.jsonl"
    output.write_text("precious\n")
    done = box.freight("run", str(GOOD), "-o", "out.jsonl", "--model", sim.url)
    assert done.status == 2
    assert "hint: " in done.stderr
    assert "--force" in done.stderr
    assert output.read_text() == "precious\n"
    assert box.freight("run", str(GOOD), "-o", "out.jsonl", "--model", sim.url, "--force").status == 0
    assert good(box)


@pytest.mark.parametrize("number", [pytest.param(74, id="case-74")])
@side_by_side
def test_input_from_a_pipe_is_kept_for_going_on(number: int, box: Box, folder: Path, sim: Engine) -> None:
    done = box.freight("run", "-", "-o", "out.jsonl", "--model", sim.url, stdin=GOOD.read_text())
    assert done.status == 0
    assert good(box)
    os.mkfifo(box.folder / "fifo")
    run = box.start("run", "fifo", "-o", "fifo.jsonl", "--model", sim.url)
    (box.folder / "fifo").write_bytes(GOOD.read_bytes())
    assert finish(run).status == 0
    assert good(box, "fifo.jsonl")
    # Killed, it goes on from the bytes that it kept.
    with engine(folder / "engine", "--latency", "0.4") as slow:
        arguments = ("run", "-", "-o", "later.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments, stdin=subprocess.PIPE)
        assert run.stdin is not None
        run.stdin.write(GOOD.read_text())
        run.stdin.close()
        run.stdin = None
        wait_until(lambda: slow.counts()["requests"] >= 3, "two records are done")
        run.kill()
        run.communicate()
        assert box.freight(*arguments).status == 0
        assert good(box, "later.jsonl")
        assert slow.counts()["requests"] <= 5
    # An empty pipe is an empty file, and no job.
    check_refused(box, box.freight("run", "-", "-o", "empty.jsonl", "--model", sim.url, stdin=""), "empty.jsonl")


@pytest.mark.parametrize("number", [pytest.param(75, id="case-75")])
@pytest.mark.parametrize("how", ["overwritten", "deleted", "grown"])
@side_by_side
def test_input_that_changes_stops_the_run_and_costs_nothing(number: int, how: str, box: Box, folder: Path) -> None:
    file = box.write("in.jsonl", [chat(f"r{n}", f"{how} {n}") for n in range(6)])
    before = file.read_bytes()
    with engine(folder / "engine", "--latency", "0.5", "--count-prompts") as slow:
        arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments)
        wait_until(lambda: slow.counts()["requests"] >= 3, "two records are done")
        if how == "deleted":
            file.unlink()
        elif how == "overwritten":
            file.write_bytes(GOOD.read_bytes())
        else:
            file.write_bytes(before + b"\n")
        done = finish(run)
        assert done.status == 1
        assert "error: in.jsonl changed" in done.stderr
        assert not (box.folder / "out.jsonl").exists()
        if how == "overwritten":
            # Another input is refused by name, and the run is still there.
            other = box.freight(*arguments)
            assert other.status == 2
            assert "input (SHA-256)" in other.stderr
            assert "--fresh" in other.stderr
        file.write_bytes(before)
        assert box.freight(*arguments).status == 0
        assert [line["custom_id"] for line in box.results()] == [f"r{n}" for n in range(6)]
        assert slow.counts()["by_prompt"][f"{how} 0"] == 1
        assert slow.counts()["requests"] <= 8


@pytest.mark.parametrize("number", [pytest.param(76, id="case-76")])
@side_by_side
def test_links_and_relative_paths_mean_what_they_mean_to_the_caller(number: int, box: Box, sim: Engine) -> None:
    inner = box.folder / "inner"
    inner.mkdir()
    (inner / "link.jsonl").symlink_to(GOOD)
    done = box.freight("run", "link.jsonl", "-o", "out.jsonl", "--model", sim.url, cwd=inner)
    assert done.status == 0
    assert good(box, "inner/out.jsonl")
    assert not (box.folder / "out.jsonl").exists()
    again = box.freight("run", "inner/../inner/link.jsonl", "-o", "inner/out.jsonl", "--model", sim.url)
    assert (again.status, "already done" in again.stderr) == (0, True)


@pytest.mark.parametrize("number", [pytest.param(80, id="case-80")])
@pytest.mark.parametrize("name", ["requests.json", "requests.txt", "requests"])
@side_by_side
def test_any_name_of_the_input_will_do(number: int, name: str, box: Box, sim: Engine) -> None:
    shutil.copy(GOOD, box.folder / name)
    assert box.freight("run", name, "-o", "out.jsonl", "--model", sim.url).status == 0
    assert good(box)


@pytest.mark.parametrize("number", [pytest.param(81, id="case-81")])
@side_by_side
def test_settings_have_their_effect_or_are_refused(number: int, box: Box, folder: Path) -> None:
    for flag in (("--no-such-flag",), ("--temperature", "1"), ("--concurrency", "many"), ("--workers", "0")):
        done = box.freight("run", str(GOOD), "-o", "out.jsonl", "--model", NOWHERE, *flag)
        assert done.status == 2
        assert flag[0] in done.stderr
        assert done.last_line() == "hint: freight run --help"
    box.write("in.jsonl", [chat(f"r{n}", f"text {n}", temperature=n) for n in range(8)])
    for concurrency, most in (("2", 2), ("auto", 8)):
        with engine(folder / concurrency, "--latency", "0.6") as slow:
            output = f"{concurrency}.jsonl"
            run = box.freight("run", "in.jsonl", "-o", output, "--model", slow.url, "--concurrency", concurrency)
            assert run.status == 0
            assert slow.counts()["in_flight_max"] == most
            # What a record's body says is what counts.
            sent = sorted(body.rpartition(b'"temperature":')[2] for _, body in slow.received())
            assert sent == [b"%d}" % n for n in range(8)]
