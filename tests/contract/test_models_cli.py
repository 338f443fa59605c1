"""`freight models`: naming models, listing them, and leaving the user's own file alone."""

import json
import stat
from pathlib import Path
from typing import Final

import pytest

from freight.store.registry import BUILT_IN, built_in_models
from tests.contract.scenario import side_by_side
from tests.harness import CASES, Box, Engine, chat, code, content, engine_command, model_toml
from tests.unit.installations import VLLM_NOW, environment

GOOD: Final = str(CASES / "inputs" / "00_good3.jsonl")
MODEL_FILE: Final = built_in_models()[BUILT_IN].sources()[0]


@side_by_side
def test_added_model_is_listed_shown_run_and_removed(box: Box, sim: Engine) -> None:
    before = box.config.read_bytes()
    added = box.freight("models", "add", "lab", "--source", sim.url, "--alias", "gpt-4o-mini", "--alias", "two")
    assert (added.status, added.stdout) == (0, "")
    # The engine follows from the source, and the user's own file stays as it is.
    rows = json.loads(box.freight("models", "list", "--json").stdout)
    [row] = [row for row in rows if row["name"] == "lab"]
    assert (row["engine"], row["aliases"], row["origin"]) == ("endpoint", ["gpt-4o-mini", "two"], "registry")
    assert box.config.read_bytes() == before
    registry = box.folder / "data" / "models.json"
    assert json.loads(registry.read_bytes())["lab"]["source"] == sim.url
    assert stat.S_IMODE(registry.parent.stat().st_mode) == 0o700
    for name in ("lab", "two"):
        shown = json.loads(box.freight("models", "show", name, "--json").stdout)
        assert (shown["name"], shown["source"]) == ("lab", sim.url)
    assert f"source: {sim.url}" in box.freight("models", "show", "lab").stdout
    box.write("in.jsonl", [chat("a", model="gpt-4o-mini"), chat("b", model="lab"), chat("c")])
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "two").status == 0
    assert [content(line) for line in box.results()] == ["ok"] * 3
    assert box.freight("models", "remove", "lab").status == 0
    gone = box.freight("models", "show", "lab")
    assert (gone.status, gone.stderr.splitlines()[0]) == (2, "error: there is no model lab")
    assert gone.last_line().startswith("hint: ")


@side_by_side
def test_command_line_of_a_server_follows_two_dashes(box: Box, folder: Path) -> None:
    added = box.freight("models", "add", "mine", "--context", "2048", "--", *engine_command(folder))
    assert added.status == 0
    shown = json.loads(box.freight("models", "show", "mine", "--json").stdout)
    assert (shown["engine"], shown["context"]) == ("command", 2048)
    assert shown["command"] == engine_command(folder)
    assert box.freight("run", GOOD, "-o", "out.jsonl", "--model", "mine", "--ignore-record-model").status == 0
    assert [code(line) for line in box.results()] == [None] * 3


@side_by_side
def test_alias_that_another_model_has_is_refused_before_it_is_kept(box: Box) -> None:
    add = ("models", "add", "--source", "http://127.0.0.1:9")
    assert box.freight(*add, "one", "--alias", "same").status == 0
    for arguments in (("two", "--alias", "same"), ("two", "--alias", "one"), ("same",)):
        refused = box.freight(*add, *arguments)
        assert refused.status == 2
        assert "models.one.aliases" in refused.stderr or "models.two.aliases" in refused.stderr
    assert [row["name"] for row in json.loads(box.freight("models", "list", "--json").stdout)].count("two") == 0
    # One that is there all the same, by hand, can be taken away.
    registry = box.folder / "data" / "models.json"
    entries = json.loads(registry.read_text())
    registry.write_text(json.dumps(entries | {"two": entries["one"]}))
    assert box.freight("models", "list").status == 2
    assert box.freight("models", "remove", "two").status == 0
    assert box.freight("models", "list").status == 0


@side_by_side
def test_list_is_plain_when_piped(box: Box) -> None:
    box.configure(model_toml("mine", engine="endpoint", source="http://127.0.0.1:9", aliases=["other"]))
    listed = box.freight("models", "list", COLUMNS="80")
    assert (listed.status, listed.stderr) == (0, "")
    assert "\x1b" not in listed.stdout
    header, *rows = listed.stdout.splitlines()
    assert header.split() == ["NAME", "ENGINE", "ALIASES", "ORIGIN", "SOURCE"]
    [row] = [row for row in rows if row.startswith("mine ")]
    assert row.split()[1:3] == ["endpoint", "other"]
    assert max(map(len, listed.stdout.splitlines())) <= 80


@side_by_side
def test_models_of_the_file_come_first_and_are_changed_there(box: Box) -> None:
    box.configure(model_toml("mine", engine="endpoint", source="http://127.0.0.1:9"))
    added = box.freight("models", "add", "mine", "--source", "http://127.0.0.1:8")
    assert added.status == 0
    assert f"note: {box.config} has a model mine too" in added.stderr
    shown = json.loads(box.freight("models", "show", "mine", "--json").stdout)
    assert (shown["source"], shown["origin"]) == ("http://127.0.0.1:9", str(box.config))
    again = box.freight("models", "add", "mine", "--source", "http://127.0.0.1:7")
    assert (again.status, "--force" in again.last_line()) == (2, True)
    assert box.freight("models", "add", "mine", "--source", "http://127.0.0.1:7", "--force").status == 0
    assert box.freight("models", "remove", "mine").status == 0
    refused = box.freight("models", "remove", "mine")
    assert (refused.status, str(box.config) in refused.stderr) == (2, True)


@side_by_side
def test_checkpoint_is_added_with_the_engines_own_arguments_and_its_command_shown(box: Box, folder: Path) -> None:
    model = checkpoint(folder / "model")
    venv = environment(folder / "venv", "vllm", VLLM_NOW, "vllm")
    options = ("--source", str(model), "--executable", str(venv), "--gpus", "0", "--context", "8192", "--batch")
    added = box.freight("models", "add", "big", "--engine", "vllm", *options, "--", "--max-num-seqs", "64")
    assert (added.status, added.stdout) == (0, ""), added.stderr
    shown = json.loads(box.freight("models", "show", "big", "--json").stdout)
    assert (shown["args"], shown["context"], shown["batch"]) == (["--max-num-seqs", "64"], 8192, True)
    run = shown["run"]
    assert f"{venv}/bin/vllm serve {model} --uds {{socket}} --served-model-name big" in run["command"]
    assert run["command"].endswith("--max-num-seqs 64")
    assert "VLLM_API_KEY={api_key}" in run["command"]
    assert (run["gpus"], run["memory_needed"] < run["memory_there"]) == (0, True)
    text = box.freight("models", "show", "big").stdout
    assert f"command: {run['command']}" in text
    assert "memory: " in text
    # The engine of a checkpoint's folder need not be named.
    assert box.freight("models", "add", "same", "--source", str(model)).status == 0
    assert json.loads(box.freight("models", "show", "same", "--json").stdout)["engine"] == "vllm"


@side_by_side
def test_model_that_cannot_run_here_is_shown_with_what_is_wrong(box: Box, folder: Path) -> None:
    model = checkpoint(folder / "model", tera=50)
    venv = environment(folder / "venv", "vllm", VLLM_NOW, "vllm")
    box.freight("models", "add", "big", "--source", str(model), "--executable", str(venv))
    shown = box.freight("models", "show", "big")
    assert shown.status == 0
    assert "problem: model big needs 51" in shown.stdout
    assert "fix: use " in shown.stdout
    box.write("in.jsonl", [chat("a")])
    refused = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "big")
    assert (refused.status, "model big needs 51" in refused.stderr) == (2, True)
    box.freight("models", "add", "far", "--source", "org/name")
    assert "there is no model org/name on this machine" in box.freight("models", "show", "far").stdout


def checkpoint(folder: Path, tera: int = 0) -> Path:
    """Make a checkpoint with a weight file of so many terabytes, which take no disk."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(max(1000, tera << 40) // 4)
    for part in range(1, 4 if tera else 1):
        with (folder / f"model-{part}.safetensors").open("wb") as file:
            file.truncate((tera << 40) // 4)
    return folder


WRONG: Final = {
    "name": ("a/b", "--source", "http://127.0.0.1:9"),
    "dash": ("--", "-x"),
    "nothing": ("mine",),
    "file": ("mine", "--source", "/no/such.gguf"),
    "not-a-model": ("mine", "--engine", "llamacpp", "--source", GOOD),
    "url": ("mine", "--engine", "endpoint", "--source", "ftp://example.com"),
    "password": ("mine", "--source", "http://me:hunter2@127.0.0.1:9"),
    "no-effect": ("mine", "--source", "http://127.0.0.1:9", "--context", "4096"),
    "no-port": ("mine", "--", "my-server", "--fast"),
    "engine": ("mine", "--engine", "abacus", "--source", "http://127.0.0.1:9"),
    "xllamacpp-gpu": ("mine", "--engine", "llamacpp", "--source", MODEL_FILE, "--gpus", "1"),
    "no-checkpoint": ("mine", "--engine", "vllm", "--source", "/no/such/folder"),
    "reserved": ("mine", "--engine", "vllm", "--source", "org/name", "--", "--port", "8000"),
    "context": ("mine", "--source", "http://127.0.0.1:9", "--context", "0"),
}


@pytest.mark.parametrize("name", WRONG)
@side_by_side
def test_entry_that_could_never_run_is_refused(name: str, box: Box) -> None:
    done = box.freight("models", "add", *WRONG[name])
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.last_line().startswith("hint: ")
    assert "hunter2" not in done.stderr
    assert not (box.folder / "data" / "models.json").exists()
