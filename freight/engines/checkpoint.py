"""What a model's files say of its size, without loading it: a checkpoint folder's config.json, a GGUF file's head."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import psutil

from freight.core.device import Device
from freight.core.memory import ModelShape, Need, check_memory, needed, token_bytes
from freight.core.model import EngineName, ModelSpec
from freight.engines import llamaserver, sglang, vllm
from freight.engines.arguments import given, whole_number
from freight.engines.gguf import read_gguf
from freight.engines.llamacpp import DEFAULT_CONTEXT
from freight.errors import UserError, refusing

# Bytes of a number of the cache, as servers keep it unless told otherwise: in single precision they keep half.
_WIDTH: Final = 2
# Arguments of servers with which sizes in files say little about memory.
_RESIZING: Final = frozenset(
    {"--quantization", "--load-format", "--cpu-offload-gb", "--hf-overrides", "--json-model-override-args"}
    | {"--cpu-moe", "-cmoe", "--n-cpu-moe", "-ncmoe", "--override-tensor", "-ot", "--kv-cache-dtype"}
    | {"--cache-type-k", "-ctk", "--cache-type-v", "-ctv", "--gpu-layers", "--model-loader-extra-config"}
)
_CONTEXTS: Final = {
    EngineName.VLLM: ("--max-model-len", vllm.ALIASES),
    EngineName.SGLANG: ("--context-length", sglang.ALIASES),
    EngineName.LLAMACPP: ("--ctx-size", llamaserver.ALIASES),
}
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def check_fits(spec: ModelSpec, gpus: int, devices: Sequence[Device]) -> None:
    """Raise UserError when a worker of the model needs more memory than `gpus` of these devices have (0: the CPU).

    The smallest GPU counts. What is not known refuses nothing.
    """
    need, memory = need_of(spec, gpus), memory_of(gpus, devices)
    if need is not None and memory is not None:
        check_memory(spec.name, need, memory, gpus)


def memory_of(gpus: int, devices: Sequence[Device]) -> int | None:
    """Return the bytes of memory of the smallest GPU, or of the CPU's machine where `gpus` is 0; None if unknown."""
    if not gpus:
        cpu = next((device.memory for device in devices if not device.is_gpu() and device.memory), None)
        return cpu or psutil.virtual_memory().total
    sizes = [device.memory for device in devices if device.is_gpu()]
    known = [size for size in sizes if size]
    return min(known) if known else None


def need_of(spec: ModelSpec, gpus: int) -> Need | None:
    """Return what one worker of the model needs at the least; None when it cannot be told."""
    entry = spec.entry
    if entry.engine not in _CONTEXTS or not entry.sources():
        return None
    option, aliases = _CONTEXTS[entry.engine]
    options = given(entry.args, aliases)
    if options.keys() & _RESIZING:
        return None
    path = Path(entry.sources()[0])
    if not path.exists():
        return None
    shape = gguf_shape(path) if path.suffix == ".gguf" else folder_shape(path)
    return needed(shape, _context(spec, shape, options.get(option)), gpus)


def _context(spec: ModelSpec, shape: ModelShape, argument: str | None) -> int | None:
    if spec.entry.engine is EngineName.LLAMACPP:
        # An argument is for all slots together, and one sequence gets its share.
        return min(spec.entry.context or DEFAULT_CONTEXT, shape.context or 1 << 62)
    if argument is not None:
        return whole_number(argument)
    return spec.entry.context


def gguf_shape(path: Path) -> ModelShape:
    """Return the shape of a GGUF file, with its other parts where it has been split."""
    facts = read_gguf(path)
    weights = sum(file.stat().st_size for file in _parts(path, facts.parts))
    token = 0
    heads = facts.kv_heads or facts.heads
    if facts.layers and heads and not facts.window and not facts.has_state:
        key = facts.key or _divided(facts.width, facts.heads)
        value = facts.value or key
        token = facts.layers * heads * (key + value) * _WIDTH
    return ModelShape(weights, token, context=facts.context)


def _parts(path: Path, count: int | None) -> list[Path]:
    match = re.fullmatch(r"(.*-)(\d{5})(-of-\d{5}\.gguf)", path.name)
    if not count or count < 2 or match is None:
        return [path]
    return [file for file in path.parent.glob("*.gguf") if re.fullmatch(_part_pattern(match), file.name)]


def _part_pattern(match: re.Match[str]) -> str:
    return re.escape(match[1]) + r"\d{5}" + re.escape(match[3])


def folder_shape(folder: Path) -> ModelShape:
    """Return the shape of a checkpoint folder. What its config.json does not say takes no memory here."""
    config = read_config(folder)
    inner: Any = config.get("text_config") or config.get("llm_config") or config
    text = cast(dict[str, Any], inner) if isinstance(inner, dict) else config
    files = weight_files(folder)
    weights = sum(file.stat().st_size for file in files) or None
    full, sliding, window = _layers(text)
    token = _token(text)
    context = _number(text, "max_position_embeddings", "n_positions", "seq_length")
    return ModelShape(weights, full * token, sliding * token, window, context)


def _layers(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return how many layers keep every token, how many a window of them, and its length."""
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers") or 0
    window = _number(text, "sliding_window") or 0
    kinds: Any = text.get("layer_types")
    if isinstance(kinds, list):
        named = cast(list[Any], kinds)
        # Layers of other kinds keep a state of one size, whatever the length.
        return named.count("full_attention"), named.count("sliding_attention") if window else 0, window
    if _is_other(text):
        return 0, 0, 0
    if window and text.get("use_sliding_window") is not False:
        return 0, layers, window
    return layers, 0, 0


def _is_other(text: Mapping[str, Any]) -> bool:
    # Models of mixed layers, whose config.json says so in words of their own.
    marks = ("attn_layer_period", "layers_block_type", "hybrid_override_pattern", "full_attention_interval", "ssm_cfg")
    return any(mark in text for mark in (*marks, "state_size", "attn_type_list", "sliding_window_pattern"))


def _token(text: Mapping[str, Any]) -> int:
    """Return what K and V of one token take in one layer, in bytes; 0 where config.json does not say."""
    rank = _number(text, "kv_lora_rank")
    if rank:
        # Latent attention keeps one vector for all heads, and what carries the position.
        return (rank + (_number(text, "qk_rope_head_dim") or 0)) * _WIDTH
    heads = _number(text, "num_attention_heads", "n_head")
    kv_heads = _number(text, "num_key_value_heads") or heads
    head_dim = _number(text, "head_dim") or _divided(_number(text, "hidden_size", "n_embd"), heads)
    return token_bytes(1, kv_heads or 0, head_dim, _WIDTH)


def _number(text: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = text.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _divided(whole: int | None, parts: int | None) -> int:
    return whole // parts if whole and parts else 0


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint's config.json holds; raise UserError when it has none that can be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is no checkpoint: it has no config.json",
            "name the folder of a checkpoint in Hugging Face's format, or a .gguf file",
        )
    with refusing(f"cannot read {path}", "download the checkpoint again"):
        try:
            content: Any = json.loads(path.read_bytes())
        except RecursionError:
            raise ValueError("it nests too deep") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", "download the checkpoint again")
    return cast(dict[str, Any], content)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights, in order: those that the index lists, else all of the best format."""
    indexed = _indexed(folder)
    if indexed:
        return indexed
    for pattern in _WEIGHTS:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        # Some checkpoints hold everything a second time under this name.
        own = [path for path in found if not path.name.startswith("consolidated")]
        if found:
            return own or found
    return []


def _indexed(folder: Path) -> list[Path]:
    try:
        index: Any = json.loads((folder / "model.safetensors.index.json").read_bytes())
        names = sorted(set(cast(dict[str, str], index["weight_map"]).values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [folder / name for name in names if (folder / name).is_file()]


def folder_fingerprint(folder: Path) -> str:
    """Return what tells a checkpoint from another: its config.json, and its weight files' names and sizes."""
    files = weight_files(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update(repr([(file.name, file.stat().st_size) for file in files]).encode())
    return f"{sum(file.stat().st_size for file in files)} bytes, {digest.hexdigest()[:16]}"
