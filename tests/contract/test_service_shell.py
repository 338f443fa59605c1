"""What commands print: where, how wide, in which colour; how quick help is; and what shells complete."""

import json
import re
import subprocess
import sys
from collections.abc import Generator
from typing import Final

import pytest

from freight.core.job import State
from tests.harness import Box, Finished, chat, engine_command, imports, model_toml
from tests.service import HOLDS, ServiceBox, chats, endpoint, on_terminal, service_box

COLOUR: Final = re.compile(rb"\x1b\[[0-9;]*m")
HEAVY: Final = ("aiohttp", "httpx", "fastapi", "numpy", "apsw", "uvicorn", "pydantic", "rich", "asyncio")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServiceBox]:
    """A service with a job that runs, one that waits and one that is over."""
    folder = tmp_path_factory.mktemp("shell")
    name = "a-model-with-quite-a-long-name-indeed"
    sim = model_toml(name, engine="command", command=engine_command(folder), aliases=["mini"])
    with service_box(folder / "box", sim) as box, endpoint() as end:
        assert box.freight("serve", "--background").status == 0
        box.put("over", chats("a", "refuse always"), end.url)
        box.ended("over")
        box.put("front-runner-with-a-long-name", [chat("a", HOLDS)], name)
        box.until_state("front-runner-with-a-long-name", State.RUNNING)
        box.put("back", chats("a"), name)
        box.until("back", lambda job: job.reason, "it says why it waits")
        yield box
        box.clear()


TABLES: Final = (("batch", "list"), ("ps",), ("ps", "--all"))
PLAIN: Final = (("batch", "list"), ("ps", "--all"), ("batch", "status", "over"), ("batch", "wait", "over"))


@pytest.mark.parametrize("command", PLAIN, ids=" ".join)
def test_piped_output_has_no_colour_and_no_escape(command: tuple[str, ...], service: ServiceBox) -> None:
    done = service.freight(*command, TERM="xterm-256color", COLORTERM="truecolor")
    assert done.status == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.strip() if command[1:2] != ("wait",) else done.stderr.strip()


@pytest.mark.parametrize("command", TABLES, ids=" ".join)
def test_tables_fit_the_terminal_and_lose_no_row(command: tuple[str, ...], service: ServiceBox) -> None:
    status, shown = on_terminal(service, *command, COLUMNS="80")
    lines = COLOUR.sub(b"", shown).decode().splitlines()
    assert status == 0
    assert max(map(len, lines)) <= 80
    names = {"front-runner-with-a-long-name", "back", *(["over"] if command != ("ps",) else [])}
    assert {line.split()[0] for line in lines[1:] if line.strip()} == names
    # What no terminal shows is not cut.
    assert f"{service.device} is held by front-runner-with-a-long-name" in service.freight(*command).stdout


def test_no_color_is_honoured_on_a_terminal(service: ServiceBox) -> None:
    for command in (("ps", "--all"), ("batch", "status", "over"), ("batch", "wait", "over")):
        status, shown = on_terminal(service, *command, NO_COLOR="1", COLUMNS="100")
        assert status == 0
        assert not re.search(rb"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])[0-9;]*m", shown)


def test_data_goes_to_standard_output_and_everything_else_does_not(service: ServiceBox) -> None:
    # Each command, and whether it has data to give.
    for command, gives in (
        (("ps",), True), (("batch", "list"), True), (("batch", "list", "-q"), True),
        (("batch", "status", "over"), True), (("logs", "front-runner-with-a-long-name"), True),
        (("batch", "results", "over", "--stdout"), True),
        (("batch", "wait", "over"), False), (("batch", "list", "--status", "FAILED"), False),
        (("batch", "results", "over", "--force"), False),
    ):  # fmt: skip
        done = service.freight(*command)
        assert (done.status, bool(done.stdout), bool(done.stderr)) == (0, gives, not gives), command
    nothing = service.batch("list", "--status", "FAILED", "--json")
    assert (json.loads(nothing.stdout), nothing.stderr) == ([], "")


def test_reader_that_goes_away_is_no_error(service: ServiceBox) -> None:
    line = f"{sys.executable} -m freight batch results over --stdout | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], env=service.environment(), cwd=service.folder, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def imported(box: Box, *arguments: str, **extra: str) -> tuple[Finished, set[str]]:
    """Run a command; return how it ended and which packages it imported."""
    done, names = imports(box, "freight", *arguments, **extra)
    assert "click" in names
    return done, {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("arguments", [("--help",), ("batch", "--help"), ("batch", "submit", "--help"), ("--version",)])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...], box: Box) -> None:
    done, names = imported(box, *arguments)
    assert (done.status, bool(done.stdout)) == (0, True)
    assert names.isdisjoint(HEAVY)


def complete(box: Box, line: str, word: int, **extra: str) -> tuple[list[str], set[str]]:
    """Return what bash is told to complete a line's word by, and what was imported for it."""
    variables = {"_FREIGHT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(word)}
    done, names = imported(box, **variables, **extra)
    assert done.status == 0, done.stderr
    return [text.partition(",")[2] for text in done.stdout.splitlines() if text], names


@pytest.mark.parametrize("command", ["batch wait", "batch results", "logs"])
def test_names_of_jobs_are_completed_without_anything_heavy(command: str, service: ServiceBox) -> None:
    line = f"freight {command} "
    found, names = complete(service, line, len(line.split()))
    assert set(found) == {"over", "back", "front-runner-with-a-long-name"}
    assert names.isdisjoint(HEAVY)
    found, _ = complete(service, f"{line}fr", len(line.split()))
    assert found == ["front-runner-with-a-long-name"]


def test_commands_models_and_states_are_completed(service: ServiceBox) -> None:
    assert complete(service, "freight batch re", 2)[0] == ["results", "resume", "retry"]
    assert complete(service, "freight batch submit in.jsonl --model mi", 5)[0] == ["mini"]
    assert complete(service, "freight batch list --status COMP", 4)[0] == ["COMPLETED"]


def test_completion_is_silent_where_no_service_runs_and_starts_none(box: Box) -> None:
    assert complete(box, "freight batch wait ", 3)[0] == []
    assert complete(box, "freight batch wait ", 3, FREIGHT_SERVER="unix:///nowhere/api.sock")[0] == []
    assert not box.processes()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed_for_each_shell(shell: str, box: Box) -> None:
    done = box.freight("completion", shell)
    assert (done.status, done.stderr) == (0, "")
    assert f"{shell}_complete" in done.stdout
    if shell == "bash":
        checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
