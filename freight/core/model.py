"""What a model is: an entry as users write it, and the same resolved for one job."""

from enum import StrEnum
from typing import Annotated

import msgspec

from freight.core.record import ModelName


class EngineName(StrEnum):
    """The kinds of model server."""

    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    SGLANG = "sglang"
    ENDPOINT = "endpoint"
    COMMAND = "command"


class ModelEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A model as the configuration or the registry has it.

    `context` is in tokens per request; `gpus` per worker. `args` are the engine's own arguments, `executable` its
    program: a file, or the folder of a virtual environment. `api_key_file` and `api_key_env` say where an
    endpoint's key is. `env` holds variables for a server that Freight starts.
    """

    engine: EngineName
    source: str | list[str] = ""
    gpus: Annotated[int, msgspec.Meta(ge=0)] | None = None
    context: Annotated[int, msgspec.Meta(ge=1)] | None = None
    batch: bool = False
    aliases: list[str] = []
    args: list[str] = []
    executable: str | None = None
    prompt_cache: bool = False
    command: list[str] = []
    env: dict[str, str] = {}
    api_key_file: str | None = None
    api_key_env: str | None = None

    def sources(self) -> list[str]:
        """Return the sources as a list; an entry without any has none."""
        if isinstance(self.source, str):
            return [self.source] if self.source else []
        return self.source


class ModelSpec(msgspec.Struct, frozen=True):
    """A model resolved for a job.

    `typed` is what the user wrote. `fits` are the names that a record's own model may have, None when
    any will do. `fill` goes into bodies that need one, `keep` are names that the server knows itself.
    `identity` tells two models apart on resume: what may change the answers, as readable words.
    """

    name: str
    entry: ModelEntry
    typed: str
    fits: frozenset[str] | None
    fill: str | None
    keep: frozenset[str]
    identity: dict[str, str]

    def served_as(self, listed: frozenset[str] | None) -> "ModelSpec":
        """Return this for a started server that lists these ids (None: it lists none): bodies must name one of them."""
        fits = self.fits or frozenset[str]()
        if not listed:
            return msgspec.structs.replace(self, keep=fits)
        fill = self.fill if self.fill in listed else min(listed)
        return msgspec.structs.replace(self, fill=fill, keep=fits & listed)

    def served_names(self) -> list[str]:
        """Return the names that a started server is to answer to: what goes into bodies first, then all that fit."""
        first = self.fill or self.name
        others = {*(self.fits or ()), self.name, self.typed, *self.entry.aliases} - {first}
        # What begins with a dash would be read as an option of the server.
        return [first, *sorted(name for name in others if name and not name.startswith("-"))]

    def model_name(self) -> ModelName:
        """Return what goes into a body's `model`."""
        return ModelName(self.fill, self.keep)
