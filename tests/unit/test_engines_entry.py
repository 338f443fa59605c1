"""What is refused in a model's entry, and what `--model` resolves to where Freight starts the server."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from freight.config import Config, load_config
from freight.control.resolve import find_entry, resolve, started_model
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.engines.entry import check_entry
from freight.errors import UserError


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A data folder of the test's own, and no models of whoever runs it."""
    for name in ("FREIGHT_DATA", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("FREIGHT_CONFIG", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder, with a dot in its name."""
    path = tmp_path / "Llama-3.1-8B"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(10))
    return path


def config(**models: ModelEntry) -> Config:
    return load_config(models, {}, {})


def resolved(typed: str, **models: ModelEntry) -> ModelSpec:
    async def wait(_: str) -> None:
        raise AssertionError("nothing to wait for")

    return asyncio.run(resolve(typed, config(**models), False, wait))


def entry(engine: EngineName = EngineName.VLLM, **values: Any) -> ModelEntry:
    return ModelEntry(engine=engine, **values)


def test_a_checkpoint_folder_is_run_by_vllm(folder: Path) -> None:
    spec = resolved(str(folder))

    assert (spec.name, spec.entry.engine) == ("Llama-3.1-8B", EngineName.VLLM)
    assert spec.fits == {"Llama-3.1-8B", str(folder)}
    assert set(spec.served_names()) == spec.fits
    assert spec.served_names()[0] == "Llama-3.1-8B"


def test_what_may_change_the_answers_is_part_of_a_models_identity(folder: Path) -> None:
    plain = entry(source=str(folder))
    first = resolved("m", m=plain).identity
    assert resolved("m", m=plain).identity == first
    changes: list[dict[str, Any]] = [{"args": ["--dtype", "half"]}, {"context": 100}, {"env": {"A": "secret"}}]
    others = [resolved("m", m=msgspec.structs.replace(plain, **change)).identity for change in changes]
    (folder / "model.safetensors").write_bytes(bytes(11))
    others.append(resolved("m", m=plain).identity)
    assert len({json.dumps(one) for one in [first, *others]}) == 5
    assert "secret" not in json.dumps(others)


def test_a_model_of_a_hub_that_is_not_here_is_named_with_how_to_get_it(folder: Path) -> None:
    for typed, models in (("org/name", {}), ("m", {"m": entry(source="org/name")})):
        with pytest.raises(UserError, match="there is no model org/name on this machine") as caught:
            resolved(typed, **models)
        assert "freight models pull org/name" in (caught.value.hint or "")


def test_a_model_of_a_hub_that_was_fetched_is_run_from_where_it_lies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freight.control.resolve.find_model", lambda _data, _hub_id: folder)
    spec = resolved("org/Name-2.5")
    assert (spec.name, spec.entry.engine, spec.entry.sources()) == ("Name-2.5", EngineName.VLLM, [str(folder)])
    assert spec.fits is not None
    assert {"org/Name-2.5", "Name-2.5"} <= spec.fits
    assert started_model("m", "m", entry(source="org/name", aliases=["x"])).entry.sources() == [str(folder)]
    monkeypatch.setattr("freight.control.resolve.find_model", lambda _data, _hub_id: folder / "m.gguf")
    assert find_entry("org/name:m.gguf", config())[1].engine is EngineName.LLAMACPP


@pytest.mark.parametrize(
    ("engine", "values", "said"),
    [
        (EngineName.VLLM, {"prompt_cache": True}, "prompt_cache has no effect"),
        (EngineName.VLLM, {"command": ["x"]}, "command has no effect"),
        (EngineName.SGLANG, {"api_key_env": "X"}, "api_key_env has no effect"),
        (EngineName.VLLM, {"args": ["--port", "8000"]}, "Freight itself gives vllm its --port"),
        (EngineName.VLLM, {"args": ["--api_key=x"]}, "--api-key"),
        (EngineName.VLLM, {"args": ["--config", "x.yaml"]}, "--config"),
        (EngineName.SGLANG, {"args": ["--config", "x.yaml"]}, "--config"),
        (EngineName.SGLANG, {"args": ["--model", "x"]}, "--model"),
        (EngineName.VLLM, {"args": ["a\0b"]}, "NUL"),
        (EngineName.VLLM, {"source": ["a", "b"]}, "needs one source"),
        (EngineName.VLLM, {"source": "/no/such/folder"}, "model m: there is no checkpoint folder /no/such/folder"),
        (EngineName.VLLM, {"source": ""}, "needs one source"),
        (EngineName.LLAMACPP, {"args": ["--mlock"]}, "args has no effect on llama.cpp without an executable"),
        (EngineName.LLAMACPP, {"env": {"A": "b"}}, "env has no effect on llama.cpp without an executable"),
        (EngineName.LLAMACPP, {"gpus": 1}, "PyPI's xllamacpp has no GPU backend"),
        (EngineName.LLAMACPP, {"executable": "x", "args": ["-m", "other.gguf"]}, "--model"),
        (EngineName.ENDPOINT, {"source": "http://h", "args": ["x"]}, "args has no effect"),
        (EngineName.VLLM, {"env": {"A=B": "c"}}, "cannot be a variable"),
    ],
)
def test_an_entry_that_could_never_run_is_refused(
    folder: Path, engine: EngineName, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_entry("m", entry(engine, **{"source": str(folder), **values}))
    assert said in caught.value.message
    assert "m" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("content", [None, "[]", "{", "[" * 100_000, '"x"'])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "m").mkdir()
    if content is not None:
        (tmp_path / "m" / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        check_entry("m", entry(source=str(tmp_path / "m")))


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A path in a folder that this user may not look into, whoever the user is."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "locked")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    return str(tmp_path / "locked" / "model")


@pytest.mark.parametrize("engine", [EngineName.VLLM, EngineName.SGLANG, EngineName.LLAMACPP, EngineName.COMMAND])
def test_a_source_that_may_not_be_looked_at_is_refused_in_words(locked: str, engine: EngineName) -> None:
    command = ["serve", "{port}"] if engine is EngineName.COMMAND else []
    model = entry(engine, source=locked, command=command)

    for ask in (lambda: check_entry("m", model), lambda: resolved("m", m=model)):
        with pytest.raises(UserError) as caught:
            ask()
        assert "Permission denied" in caught.value.message
        assert "m" in caught.value.message
        assert caught.value.hint == "name one that you may read"


def test_a_path_that_may_not_be_looked_at_is_refused_as_a_model(locked: str) -> None:
    with pytest.raises(UserError, match="Permission denied"):
        resolved(locked)
