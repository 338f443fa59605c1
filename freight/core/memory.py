"""How much memory a model needs on its devices, and whether it can fit."""

from dataclasses import dataclass
from math import ceil
from typing import Final

from freight.errors import UserError

# What a server takes on each device beside weights and cache, at the least: contexts, kernels, activations.
OVERHEAD: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's files say of its size. `weights` in bytes; None where they do not say.

    `token` is what K and V of one token take in all layers that keep every token, in bytes, and `window_token` in
    those that keep the last `window` tokens alone. `context` is the longest the model was made for.
    """

    weights: int | None = None
    token: int = 0
    window_token: int = 0
    window: int = 0
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one worker needs at the least, in bytes, and the tokens that `cache` is for."""

    weights: int
    cache: int
    tokens: int
    overhead: int

    def total(self) -> int:
        """Return all of it together."""
        return self.weights + self.cache + self.overhead


def token_bytes(layers: int, kv_heads: int, head_dim: int, width: int) -> int:
    """Return the bytes that K and V of one token take: 2 * layers * kv_heads * head_dim * width."""
    return 2 * layers * kv_heads * head_dim * width


def cache_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of cache that one sequence of `tokens` tokens takes."""
    return shape.token * tokens + shape.window_token * min(tokens, shape.window)


def needed(shape: ModelShape, tokens: int | None, devices: int) -> Need | None:
    """Return what a worker on so many devices needs for one sequence of `tokens` tokens (None: the model's longest).

    None when the weights' size is not known.
    """
    if shape.weights is None:
        return None
    length = tokens or shape.context or 0
    return Need(shape.weights, cache_bytes(shape, length), length, OVERHEAD * max(1, devices))


def check_memory(name: str, need: Need, memory: int, gpus: int) -> None:
    """Raise UserError when a worker of `gpus` GPUs with `memory` bytes each is too small.

    With 0 GPUs it is the machine's memory. Nothing here depends on the number of workers: each holds all of the model.
    """
    available = memory * max(1, gpus)
    if need.total() <= available:
        return
    parts = f"weights {size(need.weights)}, {need.tokens} tokens of context {size(need.cache)}"
    if gpus:
        there = f"{gpus} GPU of {size(memory)} has" if gpus == 1 else f"{gpus} GPUs of {size(memory)} have"
    else:
        there = "this machine has"
    raise UserError(
        f"model {name} needs {size(need.total())} for each worker ({parts}, and {size(need.overhead)} to run in); "
        f"{there} {size(available)}",
        _fix(need, memory, gpus),
    )


def _fix(need: Need, memory: int, gpus: int) -> str:
    fixes: list[str] = []
    left = memory * max(1, gpus) - need.weights - need.overhead
    if need.cache and left > 0:
        fixes.append(f"fewer tokens of context: up to about {need.tokens * left // need.cache} fit (--context)")
    if gpus and memory > OVERHEAD:
        fixes.append(f"--gpus {ceil((need.weights + need.cache) / (memory - OVERHEAD))}")
    fixes.append("a smaller or more quantized model")
    return "use " + ", or ".join(fixes)


def size(number: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 29 else f"{number / (1 << 20):.0f} MiB"
