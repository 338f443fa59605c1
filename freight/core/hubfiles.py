"""Names of models on a hub, and which of a repository's files a model needs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from freight.errors import UserError

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_REPO: Final = re.compile(rf"({_PART}/{_PART})(?::(.+))?", re.DOTALL)
_FORM: Final = "models of a hub are named ORG/NAME, or ORG/NAME:FILE for one file, as in Qwen/Qwen3-4B-GGUF:*Q4_K_M*"
# A file of several: its set, its number, how many there are, its ending.
_SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)")
# Folders with the same weights in other formats, or with what training left.
_OTHER_FOLDERS: Final = re.compile(
    r"(^|/)(original|metal|onnx|openvino|coreml|gguf|runs|checkpoint[^/]*|\.[^/]*)/", re.I
)
_TEXT_ENDINGS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_BIN: Final = re.compile(r"(?:.*/)?(?:pytorch_model|model|adapter_model)[^/]*\.bin")
_SHOWN: Final = 8


@dataclass(frozen=True)
class HubId:
    """A model of a hub: a repository, and the file in it that is the model, or "" where the whole is."""

    repo: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


def parse_hub_id(typed: str) -> HubId:
    """Return what ORG/NAME or ORG/NAME:FILE names; raise UserError for anything else."""
    found = _REPO.fullmatch(typed)
    if found is None or "--" in found[1] or ".." in found[1]:
        raise UserError(f"{typed!r} is no name of a model on a hub", _FORM)
    return HubId(found[1], found[2] or "")


def choose(hub_id: HubId, names: Sequence[str]) -> list[str]:
    """Return the files that the model needs, of those that its repository has; raise UserError where that is unclear.

    For a whole repository: configuration, tokenizer and weights, those once. For a file: that, and where it is part of
    a set, the other parts, the first one first.
    """
    return _matching(hub_id, names) if hub_id.file else _whole(hub_id, names)


def _matching(hub_id: HubId, names: Sequence[str]) -> list[str]:
    if hub_id.file in names:
        return with_its_set(hub_id.file, names)
    found = [name for name in names if fnmatchcase(name, hub_id.file)]
    found = found or [name for name in names if fnmatchcase(name.lower(), hub_id.file.lower())]
    found = [name for name in found if name.endswith(".gguf")] or found
    if not found:
        raise _no_such_file(hub_id, names)
    whole = with_its_set(min(found), names)
    if set(found) <= set(whole):
        return whole
    raise UserError(f"{len(found)} files of {hub_id.repo} match {hub_id.file!r}", f"name one of: {_some(found)}")


def with_its_set(name: str, names: Iterable[str]) -> list[str]:
    """Return a file of a model in several with the others of its set, in order; any other file alone."""
    return sorted(other for other in names if _set(other) == _set(name)) if _set(name) else [name]


def _set(name: str) -> tuple[str, ...]:
    part = _SPLIT.fullmatch(name)
    return (part[1], part[3], part[4]) if part else ()


def missing_parts(names: Iterable[str]) -> list[str]:
    """Return the files that sets among `names` lack, going by the number of parts in their names."""
    have = set(names)
    sets = {_set(name) for name in have} - {()}
    parts = (
        f"{stem}-{number:05d}-of-{count}{ending}"
        for stem, count, ending in sorted(sets)
        for number in range(1, int(count) + 1)
    )
    return [part for part in parts if part not in have]


def _whole(hub_id: HubId, names: Sequence[str]) -> list[str]:
    inside = [name for name in names if not _OTHER_FOLDERS.search(name)]
    safe = [name for name in inside if name.endswith(".safetensors")]
    # Some repositories have all weights a second time, in one file for another program.
    safe = [name for name in safe if "consolidated" not in name] or safe
    weights = safe or [name for name in inside if _BIN.fullmatch(name)]
    if not weights:
        raise _no_weights(hub_id, names)
    texts = [name for name in inside if name.endswith(_TEXT_ENDINGS) and not _is_foreign_index(name, bool(safe))]
    return sorted({*weights, *texts})


def _is_foreign_index(name: str, is_safe: bool) -> bool:
    return name.endswith(".bin.index.json" if is_safe else ".safetensors.index.json")


def _no_weights(hub_id: HubId, names: Sequence[str]) -> UserError:
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return UserError(
            f"{hub_id.repo} has its weights as GGUF files alone", f"name one, as {hub_id.repo}:FILE: {_some(ggufs)}"
        )
    return UserError(f"{hub_id.repo} has no weights as safetensors or .bin files", f"it has: {_some(names)}")


def _no_such_file(hub_id: HubId, names: Sequence[str]) -> UserError:
    wanted = hub_id.file.strip("*").lower()
    near = [name for name in names if wanted in name.lower()]
    hint = f"these have it in their names: {_some(near)}" if near and wanted else f"it has: {_some(_likely(names))}"
    return UserError(f"{hub_id.repo} has no file {hub_id.file!r}", hint)


def _likely(names: Sequence[str]) -> list[str]:
    models = [name for name in names if name.endswith((".gguf", ".safetensors", ".bin"))]
    return models or list(names)


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no files"
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
