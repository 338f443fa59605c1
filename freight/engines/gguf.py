"""The few facts that Freight reads from the head of a GGUF file.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, tensor count,
then key-value pairs; integers are little-endian.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

from freight.errors import UserError

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Gguf:
    """What a model file says of itself. `pooling` is set where the model was made for embeddings.

    `layers`, `heads`, `kv_heads`, `width` (of a token's vector), `key` and `value` (of one head) are None where it
    does not say, or says one for each layer; `window` is that of sliding attention. `parts` is how many files it has.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.architecture: str = str(facts.get("general.architecture", ""))
        self.context = self._of(facts, "context_length")
        self.pooling = self._of(facts, "pooling_type")
        self.layers = self._of(facts, "block_count")
        self.width = self._of(facts, "embedding_length")
        self.heads = self._of(facts, "attention.head_count")
        self.kv_heads = self._of(facts, "attention.head_count_kv")
        self.key = self._of(facts, "attention.key_length")
        self.value = self._of(facts, "attention.value_length")
        self.window = self._of(facts, "attention.sliding_window")
        self.has_state = any(name.startswith(f"{self.architecture}.ssm.") for name in facts)
        self.parts = _count(facts.get("split.count"))

    def _of(self, facts: dict[str, Any], name: str) -> int | None:
        return _count(facts.get(f"{self.architecture}.{name}"))


def _count(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError("a count that is none")
    return value


def read_gguf(path: Path) -> Gguf:
    """Return the facts in the head of the file; raise UserError when it is no readable GGUF file."""
    try:
        with path.open("rb") as file:
            return Gguf(_read_facts(file, path))
    except OSError as error:
        raise UserError(f"cannot read model file {path}: {error.strerror}", "name one that you may read") from error
    except (struct.error, KeyError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} starts like a GGUF file but is damaged or cut off", "download it again") from error


def _read_facts(file: BinaryIO, path: Path) -> dict[str, Any]:
    magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(
            f"{path} is not a GGUF model file (it starts with {magic!r})",
            "--model takes a .gguf file, a name from 'freight models list', or a server's URL",
        )
    version, _tensors, count = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise UserError(
            f"{path} is a GGUF file of version {version}; versions 2 and 3 can be read",
            "convert it with a current llama.cpp",
        )
    facts: dict[str, Any] = {}
    for _ in range(count):
        key = _read_text(file)
        facts[key] = _read_value(file, _unpack(file, "I"))
    return facts


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _read_text(file)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])
    inner, count = _unpack(file, "I"), _unpack(file, "Q")
    if inner == _STRING:
        for _ in range(count):
            file.seek(_unpack(file, "Q"), 1)
    elif inner == _ARRAY:
        for _ in range(count):
            _read_value(file, _ARRAY)
    else:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
    return None


def _read_text(file: BinaryIO) -> str:
    length = _unpack(file, "Q")
    if length > 1 << 24:
        raise struct.error("a string longer than any key or value")
    return file.read(length).decode("utf-8", "replace")


def _unpack(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]
