"""llama.cpp's own server on a port of loopback: `python -m bench.llamacpp MODEL.gguf PORT SLOTS`."""

import os
import signal
import sys
from typing import Any

import xllamacpp

CONTEXT = 2048


def main() -> None:
    """Serve until a signal ends the process."""
    path, port, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.kv_unified = False
    params.n_ctx = slots * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.endpoint_metrics = True
    params.cache_prompt = False
    params.cache_ram_mib = 0
    server: Any = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
