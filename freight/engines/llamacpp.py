"""llama.cpp: through xllamacpp in a child process of its own, or by a `llama-server` executable; on a Unix socket."""

import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from freight.core.model import ModelSpec
from freight.core.record import Endpoint
from freight.engines.base import Address, EngineLoad, Place, ServerCommand, thread_limit
from freight.engines.installed import find_file
from freight.engines.llamaserver import own_slots, server_command
from freight.engines.metrics import llamacpp_load, llamacpp_steps
from freight.engines.why import reason
from freight.errors import UserError

# More slots than this gained nothing on a CPU, and each takes memory for a whole context.
DEFAULT_SLOTS: Final = 8
DEFAULT_CONTEXT: Final = 4096
# An embedding's prompt must fit into one physical batch.
EMBEDDING_BATCH: Final = 2048


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
    staggers = False

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Raise UserError for GPUs without an executable that could use them, and for one that is not there."""
        if spec.entry.executable:
            find_file(spec.name, spec.entry.executable)
        elif gpus:
            raise UserError(
                f"model {spec.name} cannot run on a GPU: PyPI's xllamacpp has no GPU backend",
                "run it on the CPU with --gpus 0 (gpus = 0 in an entry), or register it with a llama-server that has "
                "been built for GPUs: freight models add … --executable",
            )

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return the command of `llama-server`, or of our child process, which reads its settings from its argument."""
        self.check(spec, place.gpus)
        slots = self.slots(spec, place.concurrency) or DEFAULT_SLOTS
        threads = thread_limit() or len(os.sched_getaffinity(0))
        if spec.entry.executable:
            return server_command(spec, place, slots, DEFAULT_CONTEXT, threads, EMBEDDING_BATCH)
        config = LlamaCppConfig(
            model=place.source,
            alias=spec.name,
            socket=place.socket_path(),
            slots=slots,
            context=spec.entry.context or 0,
            threads=threads,
            embeddings=Endpoint.EMBEDDINGS in place.endpoints,
            reranking=Endpoint.RERANK in place.endpoints,
            prompt_cache=spec.entry.prompt_cache,
        )
        argv = [sys.executable, "-m", "freight.engines.llamacpp_server", msgspec.json.encode(config).decode()]
        return ServerCommand(argv, {}, Address("http://localhost", config.socket))

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Not for this engine: its servers are started."""
        raise AssertionError("llama.cpp's address comes with its command")

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return the number of slots that the server is started with."""
        return own_slots(spec) or concurrency or DEFAULT_SLOTS

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return the slots, and what the server is set up for."""
        special = sorted(endpoints & {Endpoint.EMBEDDINGS, Endpoint.RERANK})
        return f"{self.slots(spec, concurrency)} slots, endpoints {special}"

    def tokens_made(self, metrics: str) -> float | None:
        """Return the number of decoding steps, which grows during a request and not only at its end."""
        return llamacpp_steps(metrics)

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what the server is busy with."""
        return llamacpp_load(metrics)

    def why(self, log_tail: Sequence[str]) -> str:
        """Return the line that says why llama.cpp ended."""
        return reason(log_tail)
