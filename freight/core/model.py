"""What a model is: an entry as users write it, and the same resolved for one job."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from freight.core.record import ModelName


class EngineName(StrEnum):
    """The kinds of model server."""

    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    SGLANG = "sglang"
    ENDPOINT = "endpoint"
    COMMAND = "command"


class ModelEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A model as the configuration or the registry has it; what each key is for stands beside it."""

    engine: Annotated[EngineName, Meta(description="its server: llamacpp, vllm, sglang, endpoint or command")]
    source: Annotated[str | list[str], Meta(description="a .gguf file, a folder, ORG/NAME of a hub, or URLs")] = ""
    gpus: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="GPUs for each worker; 0 for the CPU")] = None
    context: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="tokens for each request")] = None
    batch: Annotated[bool, Meta(description="whether the facility API may run it")] = False
    aliases: Annotated[list[str], Meta(description="other names for it, which no other model has")] = []
    args: Annotated[list[str], Meta(description="more arguments for its server")] = []
    executable: Annotated[str | None, Meta(description="its server's program, or its virtual environment")] = None
    prompt_cache: Annotated[bool, Meta(description="whether llama.cpp reuses the cache of earlier prompts")] = False
    command: Annotated[list[str], Meta(description="the whole command line of engine command")] = []
    env: Annotated[dict[str, str], Meta(description="variables for a server that Freight starts")] = {}
    api_key_file: Annotated[str | None, Meta(description="the file that holds an endpoint's key")] = None
    api_key_env: Annotated[str | None, Meta(description="the variable that holds an endpoint's key")] = None
    groups: Annotated[list[str], Meta(description="groups whose members alone may run it; none: for all")] = []

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
