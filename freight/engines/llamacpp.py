"""llama.cpp by way of xllamacpp: its own HTTP server, in a child process of its own, on a Unix socket."""

import os
import sys
from typing import Final

import msgspec

from freight.core.model import ModelSpec
from freight.core.record import Endpoint
from freight.engines.base import Address, Place, ServerCommand, metric

# More slots than this gained nothing on a CPU, and each takes memory for a whole context.
DEFAULT_SLOTS: Final = 8
DEFAULT_CONTEXT: Final = 4096


class LlamaCppConfig(msgspec.Struct, frozen=True):
    """What the child process is told. `context` is in tokens per request, 0 for the default."""

    model: str
    alias: str
    socket: str
    slots: int
    context: int
    threads: int
    embeddings: bool
    reranking: bool
    prompt_cache: bool


class LlamaCppEngine:
    """llama.cpp's server on one model file."""

    starts_server = True

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return the command of the child process, which reads its settings from its one argument."""
        socket_path = str(place.folder / "engine.sock")
        config = LlamaCppConfig(
            model=place.source,
            alias=spec.name,
            socket=socket_path,
            slots=self.slots(spec, place.concurrency) or DEFAULT_SLOTS,
            context=spec.entry.context or 0,
            threads=len(os.sched_getaffinity(0)),
            embeddings=Endpoint.EMBEDDINGS in place.endpoints,
            reranking=Endpoint.RERANK in place.endpoints,
            prompt_cache=spec.entry.prompt_cache,
        )
        argv = [sys.executable, "-m", "freight.engines.llamacpp_server", msgspec.json.encode(config).decode()]
        return ServerCommand(argv, {}, Address("http://localhost", socket_path))

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Not for this engine: its servers are started."""
        raise AssertionError("llama.cpp's address comes with its command")

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return the number of slots that the server is started with."""
        return concurrency or DEFAULT_SLOTS

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return the slots, and what the server is set up for."""
        special = sorted(endpoints & {Endpoint.EMBEDDINGS, Endpoint.RERANK})
        return f"{self.slots(spec, concurrency)} slots, endpoints {special}"

    def tokens_made(self, metrics: str) -> float | None:
        """Return the number of decoding steps, which grows during a request and not only at its end."""
        return metric(metrics, "llamacpp:n_decode_total")
