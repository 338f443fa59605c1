"""The child process that runs llama.cpp's HTTP server: `python -m freight.engines.llamacpp_server CONFIG`."""

import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import xllamacpp as _untyped  # pyright: ignore[reportMissingTypeStubs]

from freight.engines.gguf import read_gguf
from freight.engines.llamacpp import DEFAULT_CONTEXT, EMBEDDING_BATCH, LlamaCppConfig

# A compiled module without type hints.
xllamacpp: Any = _untyped


def parameters(config: LlamaCppConfig) -> Any:
    """Return llama.cpp's parameters for `config`."""
    facts = read_gguf(Path(config.model))
    context = min(config.context or DEFAULT_CONTEXT, facts.context or sys.maxsize)
    params = xllamacpp.CommonParams()
    params.model.path = config.model
    params.model_alias = {config.alias}
    params.hostnames = [config.socket]
    params.n_parallel = config.slots
    # Each slot has a context of its own: a shared one lets a long request end the others.
    params.kv_unified = False
    params.n_ctx = config.slots * context
    params.cpuparams.n_threads = config.threads
    params.cpuparams_batch.n_threads = config.threads
    params.endpoint_metrics = True
    params.ui = False
    # With the prompt cache on, requests have been answered with an earlier, unrelated prompt.
    params.cache_prompt = config.prompt_cache
    params.cache_ram_mib = 0
    params.timeout_read = params.timeout_write = 24 * 3600
    if config.embeddings:
        params.embedding = True
        params.n_ubatch = params.n_batch = min(context, EMBEDDING_BATCH)
        # A model made for text has no pooling of its own, and a vector a token is not an embedding.
        if facts.pooling is None:
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    if config.reranking:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    return params


def main() -> None:
    """Serve until a signal ends the process."""
    config = msgspec.json.decode(sys.argv[1], type=LlamaCppConfig)
    server = xllamacpp.Server(parameters(config))
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
