"""Odd names, paths, permissions and settings: refused with what is wrong and what to do, and never with a traceback."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import pytest

from freight.config import load_config
from freight.engines.endpoint import base_url
from freight.errors import UserError
from tests.contract.scenario import side_by_side
from tests.harness import CASES, ROOT, Box, Engine, Finished, code, finish, model_toml

GOOD: Final = str(CASES / "inputs" / "00_good3.jsonl")
NOWHERE: Final = "http://127.0.0.1:9"
LONG: Final = "n" * 300
NOT_UTF8: Final = os.fsdecode(b"\xff")


def check_refused(done: Finished, *says: str, status: int = 2) -> None:
    """Check that a command was refused in words: what is wrong, with `says` in it, and then what to do."""
    assert (done.status, done.stdout) == (status, ""), done.stderr
    error, _, hint = done.stderr.partition("error: ")[2].rpartition("\nhint: ")
    assert error, done.stderr
    assert hint.strip(), done.stderr
    for words in says:
        assert words in done.stderr


def stand_in_file(path: Path) -> None:
    """Make what the head of a model file looks like, with no facts in it."""
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(16))


# Model examples of the documentation, as someone types them.


def examples() -> list[str]:
    """Return the `freight models` lines of the documentation's consoles."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    consoles = [text for page in pages for text in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)]
    return [line[2:] for text in consoles for line in text.splitlines() if line.startswith("$ freight models ")]


@side_by_side
def test_model_examples_of_the_documentation_run(box: Box) -> None:
    own = box.folder / "models"
    (own / "mine").mkdir(parents=True)
    stand_in_file(own / "chat.gguf")
    lines = examples()
    # One for each engine, in the words that its documentation uses.
    assert {"--engine endpoint", "--engine command", ".gguf"} <= {
        words for line in lines for words in ("--engine endpoint", "--engine command", ".gguf") if words in line
    }
    for line in lines:
        done = box.freight(*shlex.split(line.replace("/models/", f"{own}/"))[1:])
        assert done.status == 0, (line, done.stderr)
    listed = box.freight("models", "list", COLUMNS="200").stdout
    assert {row.split()[0]: row.split()[1] for row in listed.splitlines()}.items() >= {
        "chat": "llamacpp", "lab": "endpoint", "mine": "command",
    }.items()  # fmt: skip


@pytest.mark.parametrize("engine", ["llamacpp", "endpoint", "command"])
@side_by_side
def test_engine_is_named_in_lower_case(engine: str, box: Box) -> None:
    stand_in_file(box.folder / "m.gguf")
    more = {
        "llamacpp": ("--source", "m.gguf"),
        "endpoint": ("--source", NOWHERE),
        "command": ("--", "my-server", "--port", "{port}"),
    }
    done = box.freight("models", "add", "mine", "--engine", engine, *more[engine])
    assert (done.status, done.stderr) == (0, f"added mine ({engine})\n")


@side_by_side
def test_every_form_of_an_endpoints_url_reaches_it(box: Box, sim: Engine) -> None:
    forms = [*(sim.url + path for path in ("/v1", "/v1/", "/v1/chat/completions")), sim.url.replace("http", "HTTP")]
    assert {base_url(form) for form in forms} == {sim.url}
    for number, url in enumerate(forms[-2:]):
        out = f"{number}.jsonl"
        assert box.freight("run", GOOD, "-o", out, "--model", url).status == 0
        assert [code(line) for line in box.results(out)] == [None] * 3


ODD_URLS: Final = {
    "dots": "http://..:80", "space": "http://a b:80", "long": f"http://{LONG}:80", "dot": "http://.:80",
    "empty-part": "http://a..b:80", "dash": "http://-a", "letters": "http://f00..:80",
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_URLS)
def test_a_url_that_can_be_no_servers_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not an http or https URL of a server"):
        base_url(ODD_URLS[name])


@pytest.mark.parametrize("url", ["http://[::1]:80", "http://[fe80::1%eth0]", "http://10.0.0.5:8000", "http://a_b.c-d."])
def test_a_url_of_a_server_by_name_or_address_is_taken(url: str) -> None:
    assert base_url(url) == url


@pytest.mark.parametrize("name", ["dots", "space", "long"])
@side_by_side
def test_url_that_can_be_no_servers_is_not_waited_for(name: str, box: Box) -> None:
    url = ODD_URLS[name]
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", url)
    check_refused(done, f"{url} is not an http or https URL of a server")
    assert "waiting" not in done.stderr


@side_by_side
def test_url_without_its_scheme_is_refused_with_the_whole_one(box: Box) -> None:
    for typed in ("localhost:8000", "127.0.0.1:8000/v1"):
        check_refused(box.freight("run", GOOD, "-o", "out.jsonl", "--model", typed), f"http://{typed}")


@side_by_side
def test_key_that_no_header_can_hold_is_refused(box: Box) -> None:
    arguments = ("run", GOOD, "-o", "out.jsonl", "--model")
    done = box.freight(*arguments, NOWHERE, FREIGHT_ENDPOINT_API_KEY="s3cret\nX-Other: 1")
    check_refused(done, "FREIGHT_ENDPOINT_API_KEY")
    assert "s3cret" not in done.stderr
    (box.folder / "key").write_text("s3cret\nX-Other: 1\n")
    box.configure(model_toml("lab", engine="endpoint", source=NOWHERE, api_key_file=str(box.folder / "key")))
    done = box.freight(*arguments, "lab")
    check_refused(done, str(box.folder / "key"))
    assert "s3cret" not in done.stderr


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"command": ["a\0b", "{port}"]}, "NUL"),
        ({"command": ["a", "{port}\0"]}, "NUL"),
        ({"command": ["a", "{port}"], "env": {"A=B": "1"}}, "'A=B'"),
        ({"command": ["a", "{port}"], "env": {"": "1"}}, "''"),
        ({"command": ["a", "{port}"], "env": {"A": "b\0"}}, "'A'"),
    ],
    ids=["nul", "nul-later", "name", "no-name", "value"],
)
@side_by_side
def test_command_that_could_never_start_is_refused(entry: dict[str, object], says: str, box: Box) -> None:
    table = dict(entry)
    env = cast(dict[str, str], table.pop("env", {}))
    pairs = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in env.items())
    box.configure(model_toml("local-model", engine="command", **table) + "[models.local-model.env]\n" + pairs)
    check_refused(box.freight("run", GOOD, "-o", "out.jsonl"), "local-model", says)
    assert not (box.folder / "out.jsonl.freight").exists()


# Names that the system refuses: the input, the output, the model.
ODD_NAMES: Final = {
    "long-output": (GOOD, LONG, NOWHERE),
    "long-model": (GOOD, "out.jsonl", LONG),
    "long-model-file": (GOOD, "out.jsonl", f"{LONG}.gguf"),
    "nobody's-home": (GOOD, "out.jsonl", "~nouser/x.gguf"),
    "loop": ("loop", "out.jsonl", NOWHERE),
    "through-loop": ("loop/in.jsonl", "out.jsonl", NOWHERE),
    "no-utf8-output": (GOOD, f"{NOT_UTF8}.jsonl", NOWHERE),
    "no-utf8-model": (GOOD, "out.jsonl", f"{NOT_UTF8}.gguf"),
    "no-name": ("", "out.jsonl", NOWHERE),
}


@pytest.mark.parametrize("name", ODD_NAMES)
@side_by_side
def test_name_that_the_system_refuses_is_refused_in_words(name: str, box: Box) -> None:
    (box.folder / "loop").symlink_to("loop")
    file, output, model = ODD_NAMES[name]
    check_refused(box.freight("run", file, "-o", output, "--model", model))
    assert not list(box.folder.glob("*.freight"))


@side_by_side
def test_terminal_that_is_not_there_is_refused_as_input(box: Box) -> None:
    # A command of a box has a session of its own, and so no terminal.
    check_refused(box.freight("run", "/dev/tty", "-o", "out.jsonl", "--model", NOWHERE), "/dev/tty")


@contextmanager
def open_box() -> Generator[Box]:
    """Make a box that other users can work in, and in it `locked`, which nobody without privileges may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder = Path(made) / "box"
        folder.mkdir()
        folder.chmod(0o777)
        box = Box(folder)
        box.config.chmod(0o644)
        shutil.copy(GOOD, box.folder / "in.jsonl")
        locked = box.folder / "locked"
        locked.mkdir(mode=0)
        try:
            yield box
        finally:
            for path in (locked, folder / "out.jsonl.freight"):
                if path.exists():
                    path.chmod(0o700)


def unprivileged(
    box: Box, *arguments: str, user: int | None = None, without: tuple[str, ...] = (), **extra: str
) -> Finished:
    """Run `freight ARGUMENTS` without privileges: as `user` where we are root and one is given, else as ourselves."""
    drop: list[str] = []
    if os.geteuid() == 0:
        # Without capabilities even root may only do what the mode of a file allows.
        drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
        if user is not None:
            drop += ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
            if subprocess.run(
                [*drop, sys.executable, "-c", "import asyncio"], capture_output=True, check=False
            ).returncode:
                pytest.skip("other users cannot run this interpreter")
    environment = box.environment(PYTHONDONTWRITEBYTECODE="1", **extra)
    child = subprocess.Popen(
        [*drop, sys.executable, "-m", "freight", *arguments],
        cwd=box.folder,
        env={name: value for name, value in environment.items() if name not in without},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return finish(child)


# Where permission is missing.
RUN: Final = ("run", "in.jsonl", "--model", NOWHERE, "-o")
LOCKED: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "output": ((*RUN, "locked/out.jsonl"), {}),
    "output-below": ((*RUN, "locked/deep/out.jsonl"), {}),
    "model": (("run", "in.jsonl", "-o", "out.jsonl", "--model", "locked/m.gguf"), {}),
    "config": (("config", "show"), {"FREIGHT_CONFIG": "locked/config.toml"}),
    "config-run": ((*RUN, "out.jsonl"), {"FREIGHT_CONFIG": "locked/config.toml"}),
}


@pytest.mark.parametrize("name", LOCKED)
@side_by_side
def test_place_without_permission_is_refused_in_words(name: str) -> None:
    arguments, extra = LOCKED[name]
    with open_box() as box:
        check_refused(unprivileged(box, *arguments, **extra), "Permission denied")


@pytest.mark.parametrize(("mode", "status"), [(0o000, 2), (0o555, 1)], ids=["closed", "read-only"])
@side_by_side
def test_state_folder_of_another_user_is_refused_in_words(mode: int, status: int) -> None:
    with open_box() as box:
        state = box.folder / "out.jsonl.freight"
        state.mkdir()
        (state / "catalog.db").touch()
        state.chmod(mode)
        done = unprivileged(box, *RUN, "out.jsonl")
        check_refused(done, "state folder out.jsonl.freight: Permission denied", status=status)


@side_by_side
def test_stream_without_permission_is_refused_in_words() -> None:
    with open_box() as box:
        os.mkfifo(box.folder / "fifo", 0o000)
        for arguments in (("run", "fifo", "-o", "out.jsonl", "--model", NOWHERE), ("batch", "validate", "fifo")):
            check_refused(unprivileged(box, *arguments), "fifo: Permission denied")


@side_by_side
def test_doctor_says_that_the_data_folder_cannot_be_read() -> None:
    with open_box() as box:
        data = str(box.folder / "locked" / "data")
        done = unprivileged(box, "doctor", FREIGHT_DATA=data)
        assert (done.status, done.stderr) == (1, "")
        assert f"FAIL configuration: cannot read the model registry {data}/models.json" in done.stdout
        assert f"FAIL data folder: {data} " in done.stdout


@side_by_side
def test_user_without_a_home_is_told_what_to_set() -> None:
    commands = (
        ("doctor",), ("models", "add", "lab", "--source", NOWHERE), ("run", "in.jsonl", "-o", "out.jsonl"),
    )  # fmt: skip
    unset = ("HOME", "FREIGHT_CONFIG", "FREIGHT_DATA", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    with open_box() as box:
        for arguments in commands:
            # A number that no user has.
            done = unprivileged(box, *arguments, user=2_000_054_321, without=unset)
            # Where we are not root, we are a user with a home: then it is only to work.
            if os.geteuid() == 0:
                check_refused(done, "home directory", "set HOME, or FREIGHT_CONFIG and FREIGHT_DATA")
        if os.geteuid() == 0:
            done = unprivileged(box, "config", "show", user=2_000_054_321, without=("HOME",))
            assert (done.status, done.stderr) == (0, "")


@side_by_side
def test_list_that_cannot_be_printed_is_an_error_and_a_closed_pipe_none(box: Box) -> None:
    command = [sys.executable, "-m", "freight", "models", "list"]
    for more in ([], ["--json"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*command, *more], env=box.environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        child = box.start("models", "list", *more)
        assert child.stdout is not None
        child.stdout.close()
        child.stdout = None
        assert finish(child).stderr == ""


@pytest.mark.parametrize("key", ["stall", "start_stall", "start_timeout", "suspend_after"])
def test_a_limit_of_no_time_is_refused(key: str, tmp_path: Path) -> None:
    variable = f"FREIGHT_ENGINES_{key.upper()}"
    (tmp_path / "empty.toml").touch()
    environment = {"FREIGHT_CONFIG": str(tmp_path / "empty.toml"), variable: "0s"}
    with pytest.raises(UserError, match=f"{variable} is '0s': must be longer than nothing"):
        load_config({}, {}, environment)


@side_by_side
def test_limit_of_no_time_in_the_file_is_refused(box: Box) -> None:
    box.configure('[engines]\nstall = "0s"\n')
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", NOWHERE)
    check_refused(done, f"{box.config}: engines.stall is '0s'")


@side_by_side
def test_empty_variable_is_as_unset(box: Box) -> None:
    shown = box.freight("config", "show", "--origin", FREIGHT_LIMITS_RECORD_BYTES="", FREIGHT_ENGINES_STALL="")
    assert shown.status == 0
    assert "limits.record_bytes = 10000000  # default" in shown.stdout.splitlines()
    assert "engines.stall = 300.0  # default" in shown.stdout.splitlines()


@side_by_side
def test_pool_without_any_device_is_refused(box: Box, sim: Engine) -> None:
    box.config.write_text("[pools.local]\ndevices = []\n")
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", sim.url)
    check_refused(done, "pools.local.devices is empty")


@pytest.mark.parametrize("typed", ["٣", "²"])
@side_by_side
def test_concurrency_is_in_plain_digits(typed: str, box: Box) -> None:
    done = box.freight("run", GOOD, "-o", "out.jsonl", "--model", NOWHERE, "--concurrency", typed)
    check_refused(done, "'--concurrency'", "expected auto, or a number from 1 to 65536")
