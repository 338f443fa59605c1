"""`freight run`: going on, starting over, what it refuses, what it says and with which status it ends."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.contract.casetable import check_refused
from tests.contract.scenario import side_by_side
from tests.harness import CASES, Box, Engine, chat, code, engine, engine_command, finish, model_toml, wait_until
from tests.service import paused

GOOD: Final = str(CASES / "inputs" / "00_good3.jsonl")
NOWHERE: Final = "http://127.0.0.1:9"
OPTIONS: Final = (
    "-o", "--model", "--workers", "--gpus", "--timeout", "--record-timeout", "--concurrency", "--strict",
    "--ignore-record-model", "--order", "--dedupe", "--fresh", "--force", "--retry-errors", "--fail-on-errors",
)  # fmt: skip


def own_engine(box: Box, folder: Path, *options: str) -> None:
    """Configure a model whose server Freight starts itself."""
    box.configure(model_toml("local-model", engine="command", command=engine_command(folder, *options)))


@side_by_side
def test_needs_no_configuration_and_writes_one_file_and_its_state(box: Box, sim: Engine) -> None:
    box.config.write_text("")
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", sim.url)
    assert (done.status, done.stdout) == (0, "")
    assert "3 of 3 records answered" in done.stderr
    assert sorted(path.name for path in box.folder.iterdir()) == ["config.toml", "out.jsonl", "out.jsonl.freight"]
    assert "\x1b" not in done.stderr


@side_by_side
def test_second_run_of_what_is_done_says_so(box: Box, folder: Path) -> None:
    with engine(folder / "engine") as own:
        arguments = ("run", GOOD, "-o", "out.jsonl", "--model", own.url)
        assert box.freight(*arguments).status == 0
        before = (box.folder / "out.jsonl").read_bytes()
        for more in ((), ("--retry-errors",), ("--concurrency", "3"), ("--timeout", "1h"), ("--fail-on-errors",)):
            done = box.freight(*arguments, *more)
            assert done.status == 0
            assert "already done" in done.stderr
        assert (box.folder / "out.jsonl").read_bytes() == before
        assert own.counts()["requests"] == 3
        # One that was changed since is not Freight's any more; one that is gone comes back.
        (box.folder / "out.jsonl").write_text("mine now\n")
        done = box.freight(*arguments)
        assert (done.status, "was changed" in done.stderr) == (0, True)
        assert (box.folder / "out.jsonl").read_text() == "mine now\n"
        refused = box.freight(*arguments, "--fresh")
        assert (refused.status, "--force" in refused.stderr) == (2, True)
        (box.folder / "out.jsonl").unlink()
        assert box.freight(*arguments).status == 0
        assert [code(line) for line in box.results()] == [None] * 3
        # --fresh runs all of it again.
        seen = own.counts()["requests"]
        assert box.freight(*arguments, "--fresh").status == 0
        assert own.counts()["requests"] == seen + 3


@side_by_side
def test_what_differs_from_the_earlier_run_is_named(box: Box, folder: Path) -> None:
    with engine(folder / "a") as a, engine(folder / "b", "--model", "other-model", "--model", "local-model") as b:
        text = Path(GOOD).read_text()
        (box.folder / "in.jsonl").write_text(text)
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", a.url).status == 0
        before = (box.folder / "out.jsonl").read_bytes()
        (box.folder / "in.jsonl").write_text(text + "\n")
        (box.folder / "same.jsonl").write_text(text)
        for options, name in (
            (("in.jsonl", "--model", a.url), "input (SHA-256)"),
            (("same.jsonl", "--model", b.url), "model"),
            (("same.jsonl", "--model", a.url, "--ignore-record-model"), "--ignore-record-model"),
        ):
            refused = box.freight("run", *options, "-o", "out.jsonl")
            assert refused.status == 2
            assert name in refused.stderr
            assert refused.stderr.count(" before, ") == 1
            assert "--fresh" in refused.last_line()
        assert (box.folder / "out.jsonl").read_bytes() == before
        # The path of the input is not what makes it the same.
        assert "already done" in box.freight("run", "same.jsonl", "-o", "out.jsonl", "--model", a.url).stderr
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", a.url, "--fresh").status == 0
        assert (box.folder / "out.jsonl").read_bytes() != before


@side_by_side
def test_failed_records_change_the_status_only_when_asked(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a", "fine"), chat("b", "STUB:400-unsupported-param"), b"{}"])
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    first = box.freight(*arguments, "--fail-on-errors")
    assert first.status == 6
    assert first.last_line().startswith("2 of 3 failed: 1 × ")
    # The state stays; the same command says so, with the reason, and fails in the same way.
    again = box.freight(*arguments, "--fail-on-errors")
    assert (again.status, "already done" in again.stderr) == (6, True)
    assert again.last_line() == first.last_line()
    assert "--retry-errors" in again.stderr
    assert box.freight(*arguments).status == 0
    assert list((box.folder / "out.jsonl.freight").rglob("results.db"))
    # Bad lines are bad again: only what an engine refused is sent again.
    before = (box.folder / "out.jsonl").read_bytes().splitlines()
    assert box.freight(*arguments, "--retry-errors").status == 0
    after = (box.folder / "out.jsonl").read_bytes().splitlines()
    assert (after[0], after[2]) == (before[0], before[2])
    assert sim.counts()["by_prompt"]["fine"] == 1


@side_by_side
def test_file_of_bad_lines_alone_is_finished_without_any_server(box: Box) -> None:
    box.configure(model_toml("mine", engine="command", command=["/no/such/server", "{port}"]))
    box.write("in.jsonl", [chat("a", stream=True), {"custom_id": "b"}])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "mine")
    assert done.status == 0
    assert "no record was answered" in done.stderr
    assert done.last_line().startswith("2 of 2 failed: ")
    assert [code(line) for line in box.results()] == ["streaming_unsupported", "invalid_body"]


@side_by_side
def test_run_opens_no_port_and_leaves_no_process(box: Box, folder: Path) -> None:
    own_engine(box, folder, "--latency", "0.5")
    run = box.start("run", GOOD, "-o", "out.jsonl", "--concurrency", "1")
    wait_until(lambda: (folder / "record").exists() and (folder / "record").stat().st_size, "a request is under way")
    listening = [
        connection
        for process in box.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == []
    assert not (box.folder / "out.jsonl").exists()
    assert finish(run).status == 0
    assert not box.processes()


@side_by_side
def test_two_runs_on_one_output_refuse_each_other(box: Box, folder: Path) -> None:
    with engine(folder / "engine", "--latency", "0.7") as slow:
        arguments = ("run", GOOD, "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments)
        wait_until(lambda: slow.counts()["requests"], "a request is under way")
        # It must not end before the second has begun, which may take longer than its records do.
        with paused(run):
            second = box.freight(*arguments)
        assert second.status == 1
        assert f"in use by process {run.pid}" in second.stderr
        assert second.last_line().startswith("hint: ")
        assert finish(run).status == 0
        assert slow.counts()["requests"] == 3


@side_by_side
def test_run_waits_for_a_device_and_names_its_holder(box: Box, folder: Path) -> None:
    own_engine(box, folder, "--latency", "0.7")
    first = box.start("run", GOOD, "-o", "first.jsonl", "--concurrency", "1")
    wait_until(lambda: (folder / "record").exists() and (folder / "record").stat().st_size, "the first one runs")
    # Another data folder changes nothing: devices are the host's.
    with paused(first):
        second = box.start("run", GOOD, "-o", "second.jsonl", FREIGHT_DATA=str(folder / "elsewhere"))
        assert second.stderr is not None
        said = ""
        while "held by" not in said:
            said = second.stderr.readline()
            assert said, "it ended without waiting"
    assert box.device in said
    assert "run" in said
    assert "process " in said
    assert finish(first).status == 0
    assert finish(second).status == 0
    assert [code(line) for line in box.results("second.jsonl")] == [None] * 3


@side_by_side
def test_workers_share_the_records_and_more_than_fit_is_no_error(box: Box, folder: Path) -> None:
    devices = f'"{box.device}1", "{box.device}2"'
    box.config.write_text(
        model_toml("local-model", engine="command", command=engine_command(folder, "--latency", "0.3"))
        + f"[pools.local]\ndevices = [{devices}]\n"
    )
    box.write("in.jsonl", [chat(f"{n}") for n in range(12)])
    for workers, servers in ((None, 2), ("1", 1), ("9", 2)):
        more = ("--workers", workers) if workers else ()
        run = box.start("run", "in.jsonl", "-o", f"{workers}.jsonl", "--concurrency", "1", *more)
        wait_until(lambda n=servers: len(simengines(box)) == n, "its servers run")  # type: ignore[misc]
        assert finish(run).status == 0
        assert [line["custom_id"] for line in box.results(f"{workers}.jsonl")] == [f"{n}" for n in range(12)]


@side_by_side
def test_each_url_of_an_endpoint_is_a_worker(box: Box, folder: Path) -> None:
    with engine(folder / "a", "--latency", "0.2") as a, engine(folder / "b", "--latency", "0.2") as b:
        box.configure(model_toml("lab", engine="endpoint", source=[f"{a.url}/v1", b.url]))
        box.write("in.jsonl", [chat(f"{n}") for n in range(16)])
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--concurrency", "2").status == 0
        assert [line["custom_id"] for line in box.results()] == [f"{n}" for n in range(16)]
        asked = [own.counts()["requests"] for own in (a, b)]
        assert sum(asked) == 16
        assert min(asked) >= 4


def simengines(box: Box) -> list[psutil.Process]:
    """Return the model servers that run."""
    return [process for process in box.processes() if "bench.simengine" in process.cmdline()]


@side_by_side
def test_model_is_chosen_in_order_and_said_in_one_line(box: Box, sim: Engine) -> None:
    entries = model_toml("one", engine="endpoint", source=sim.url, aliases=["local-model"]) + model_toml(
        "two", engine="endpoint", source=sim.url, aliases=["zwei"]
    )
    box.write("none.jsonl", [chat("a")])
    box.write("two.jsonl", [chat("a", model="zwei"), chat("b")])
    box.configure(entries)
    named = box.freight("run", "two.jsonl", "-o", "a.jsonl")
    assert (named.status, "using zwei, which the first record names" in named.stderr) == (0, True)
    refused = box.freight("run", "none.jsonl", "-o", "b.jsonl")
    assert refused.status == 2
    assert "one, two" in refused.last_line()
    default = box.freight("run", "none.jsonl", "-o", "b.jsonl", FREIGHT_DEFAULT_MODEL="two")
    assert (default.status, "using two (default_model)" in default.stderr) == (0, True)
    # What is typed comes before all that.
    typed = box.freight("run", "two.jsonl", "-o", "c.jsonl", "--model", "zwei", FREIGHT_DEFAULT_MODEL="one")
    assert (typed.status, "no --model" in typed.stderr) == (0, False)
    for model, says in (("nope", "there is no model nope"), ("org/name", "org/name"), ("x.gguf", "x.gguf")):
        unknown = box.freight("run", GOOD, "-o", "d.jsonl", "--model", model)
        check_refused(box, unknown, "d.jsonl")
        assert says in unknown.stderr


WRONG: Final = {
    "no-output": ("run", GOOD),
    "no-file": ("run", "-o", "out.jsonl"),
    "bad-duration": ("run", GOOD, "-o", "out.jsonl", "--timeout", "soon"),
    "no-duration": ("run", GOOD, "-o", "out.jsonl", "--record-timeout", "0s"),
    "bad-concurrency": ("run", GOOD, "-o", "out.jsonl", "--concurrency", "0"),
    "too-many-gpus": (
        "run",
        GOOD,
        "-o",
        "out.jsonl",
        "--model",
        "smollm2-135m",
        "--ignore-record-model",
        "--gpus",
        "4",
    ),
    "gpus-of-an-endpoint": ("run", GOOD, "-o", "out.jsonl", "--model", NOWHERE, "--gpus", "4"),
    "to-stdout": ("run", GOOD, "-o", "-", "--model", NOWHERE),
    "onto-itself": ("run", "config.toml", "-o", "config.toml", "--model", NOWHERE),
    "url-with-password": ("run", GOOD, "-o", "out.jsonl", "--model", "http://me:hunter2@127.0.0.1:9"),
    "no-effect": ("run", GOOD, "-o", "out.jsonl", "--model", "idle"),
    "no-command": ("runn",),
    "no-subcommand": ("batch", "nope"),
}


@pytest.mark.parametrize("name", WRONG)
@side_by_side
def test_wrong_use_is_an_error_and_a_hint(name: str, box: Box) -> None:
    box.configure(model_toml("idle", engine="endpoint", source=NOWHERE, prompt_cache=True))
    before = box.config.read_bytes()
    done = box.freight(*WRONG[name])
    assert (done.status, done.stdout) == (2, "")
    assert re.search("^error: .+(\n  .+)*\nhint: .+\n$", done.stderr, re.MULTILINE)
    assert "hunter2" not in done.stderr
    if name == "too-many-gpus":
        assert "CPU devices" in done.stderr
    assert [path.name for path in box.folder.iterdir()] == ["config.toml"]
    assert box.config.read_bytes() == before


def test_help_names_every_option_and_goes_to_stdout(box: Box) -> None:
    done = box.freight("run", "--help")
    assert (done.status, done.stderr) == (0, "")
    for option in OPTIONS:
        assert re.search(f" {option}[, ]", done.stdout)
    assert "N|auto" in done.stdout
    whole = box.freight("--help")
    assert (whole.status, "run " in whole.stdout) == (0, True)
    assert re.fullmatch(r"freight \d+\.\d+\.\d+\n", box.freight("--version").stdout)


@side_by_side
def test_folder_that_is_not_freights_is_left_alone(box: Box) -> None:
    strange = box.folder / "out.jsonl.freight"
    strange.mkdir()
    (strange / "thesis.txt").write_text("precious")
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", NOWHERE, "--fresh", "--force")
    assert (done.status, done.last_line().startswith("hint: ")) == (2, True)
    assert (strange / "thesis.txt").read_text() == "precious"


@side_by_side
def test_sigterm_and_walltime_are_like_ctrl_c(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat(f"{n}", f"text {n}") for n in range(6)])
    with engine(folder / "engine", "--latency", "0.4", "--count-prompts") as slow:
        arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        for number in (signal.SIGTERM, signal.SIGHUP):
            seen = slow.counts()["requests"]
            run = box.start(*arguments)
            wait_until(lambda: slow.counts()["requests"] >= seen + 3, "some are done")  # noqa: B023
            run.send_signal(number)
            done = finish(run)
            assert done.status == 130
            assert "done, all of them kept" in done.stderr
            assert not (box.folder / "out.jsonl").exists()
        assert box.freight(*arguments).status == 0
        assert len(box.results()) == 6
        assert slow.counts()["by_prompt"]["text 0"] == 1


@side_by_side
def test_output_that_comes_into_being_meanwhile_is_not_replaced(box: Box, folder: Path) -> None:
    with engine(folder / "engine", "--latency", "0.5") as slow:
        arguments = ("run", GOOD, "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments)
        wait_until(lambda: slow.counts()["requests"] >= 2, "it is under way")
        (box.folder / "out.jsonl").write_text("precious\n")
        done = finish(run)
        assert (done.status, "all answers are kept" in done.stderr) == (1, True)
        assert (box.folder / "out.jsonl").read_text() == "precious\n"
        (box.folder / "out.jsonl").unlink()
        assert box.freight(*arguments).status == 0
        assert slow.counts()["requests"] == 3


def on_terminal(box: Box, *arguments: str, **extra: str) -> bytes:
    """Run a command with its standard error on a terminal and return what appeared there."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "freight", *arguments],
        cwd=box.folder, env=box.environment(TERM="xterm-256color", COLUMNS="100", LINES="30", **extra),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        select.select([ours], [], [], 60)
        try:
            piece = os.read(ours, 65536)
        except OSError:  # The terminal's other side is closed.
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert child.wait(60) == 0
    return shown


@side_by_side
def test_terminal_shows_a_bar_and_no_colour_is_honoured(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat(f"{n}") for n in range(4)])
    colour = re.compile(rb"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])[0-9;]*m")
    with engine(folder / "engine", "--latency", "0.5") as slow:
        arguments = ("run", "in.jsonl", "--model", slow.url, "--concurrency", "1", "-o")
        shown = on_terminal(box, *arguments, "a.jsonl")
        assert b"RUNNING " in shown
        assert "━".encode() in shown
        plain = on_terminal(box, *arguments, "b.jsonl", NO_COLOR="1")
        assert b"RUNNING " in plain
        assert not colour.search(plain)
    assert colour.search(shown)


@side_by_side
def test_fresh_drops_an_unfinished_run(box: Box, folder: Path) -> None:
    box.write("in.jsonl", [chat(f"{n}", f"text {n}") for n in range(5)])
    with engine(folder / "engine", "--latency", "0.4", "--count-prompts") as slow:
        arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments)
        wait_until(lambda: slow.counts()["requests"] >= 4, "some are done")
        run.kill()
        run.communicate()
        assert box.freight(*arguments, "--fresh").status == 0
        assert slow.counts()["by_prompt"]["text 0"] == 2
        assert len(box.results()) == 5
        # Only one job's state is kept.
        jobs = [path for path in (box.folder / "out.jsonl.freight").iterdir() if path.is_dir()]
        assert len(jobs) == 1


@side_by_side
def test_state_that_was_moved_with_its_output_is_still_its_own(box: Box, sim: Engine) -> None:
    assert box.freight("run", GOOD, "-o", "out.jsonl", "--model", sim.url).status == 0
    for name in ("out.jsonl", "out.jsonl.freight"):
        shutil.move(box.folder / name, box.folder / f"new-{name}")
    done = box.freight("run", GOOD, "-o", "new-out.jsonl", "--model", sim.url)
    assert (done.status, "already done" in done.stderr) == (0, True)


@side_by_side
def test_server_that_cannot_start_fails_the_job_with_its_last_words(box: Box, folder: Path) -> None:
    own_engine(box, folder, "--fail-start")
    done = box.freight("run", GOOD, "-o", "out.jsonl")
    assert done.status == 1
    assert "FAILED: 3 of 3 records were not reached" in done.stderr
    assert "\nerror: the model server exited with status 7" in done.stderr
    assert "no usable device" in done.stderr
    assert "\nhint: " in done.stderr
    # Each pause between its starts is said once, and not by the second.
    assert done.stderr.count("starting again") == 2
    assert not box.processes()
