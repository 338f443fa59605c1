"""vLLM's OpenAI-compatible server, started as the user installed it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from freight.core.model import ModelSpec
from freight.engines.arguments import given, joined, whole_number
from freight.engines.base import Address, EngineLoad, Place, ServerCommand, thread_limit
from freight.engines.installed import Installed, Program, find_program
from freight.engines.metrics import vllm_load, vllm_tokens
from freight.engines.parallel import check_parallel
from freight.engines.why import reason

VLLM: Final = Program(
    label="vLLM",
    package="vllm",
    module="vllm.entrypoints.cli.main",
    script="vllm",
    options=("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/launchers/cli_args.py"),
)
# Requests that the server runs at once: vLLM's own default differs by version and by device.
DEFAULT_SEQUENCES: Final = 256
# Gibibytes of memory for the cache on the CPU, where vLLM's own share of the machine may not be free.
CPU_CACHE_GIB: Final = "4"
# A host that can never be: an empty list of domains would allow all of them.
NO_HOST: Final = "none.invalid"
ALIASES: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "--disable-log-requests": "--enable-log-requests",
}
# What Freight chooses for each start, or could not reach a server with.
RESERVED: Final = frozenset(
    {"--host", "--port", "--uds", "--api-key", "--config", "--model", "--headless", "--grpc", "--root-path"}
    | {"--ssl-keyfile", "--ssl-certfile"}
)
_PARALLEL: Final = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


class VllmEngine:
    """`vllm serve` on one checkpoint."""

    starts_server = True
    staggers = True

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Raise UserError when vLLM is not installed, or its arguments want another number of GPUs."""
        find_program(VLLM, spec.name, spec.entry)
        check_parallel(spec.name, given(spec.entry.args, ALIASES), _PARALLEL, gpus)

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return `vllm serve` with what batch work wants; the user's arguments beat ours."""
        installed = find_program(VLLM, spec.name, spec.entry)
        key = place.key()
        if installed.offers("    uds: ", unknown=False):
            address = Address("http://localhost", place.socket_path(), key)
            listen = ["--uds", place.socket_path()]
        else:
            port = place.port()
            address = Address(f"http://127.0.0.1:{port}", None, key)
            listen = ["--host", "127.0.0.1", "--port", port]
        argv = [*installed.argv, "serve", place.source, *listen]
        argv += joined(_options(spec, place, installed), spec.entry.args, ALIASES)
        return ServerCommand(argv, {**_variables(place, installed, key), **spec.entry.env}, address)

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Not for this engine: its servers are started."""
        raise AssertionError("vLLM's address comes with its command")

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return how many requests the server is told to run at once."""
        return whole_number(given(spec.entry.args, ALIASES).get("--max-num-seqs", "")) or DEFAULT_SEQUENCES

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return nothing: a server is started by its entry alone."""
        return ""

    def tokens_made(self, metrics: str) -> float | None:
        """Return the tokens read and made so far."""
        return vllm_tokens(metrics)

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what the server is busy with."""
        return vllm_load(metrics)

    def why(self, log_tail: Sequence[str]) -> str:
        """Return the line that says why vLLM ended."""
        return reason(log_tail)


def _options(spec: ModelSpec, place: Place, installed: Installed) -> list[list[str]]:
    options = [
        ["--served-model-name", *spec.served_names()],
        ["--max-num-seqs", str(DEFAULT_SEQUENCES)],
        ["--enable-prefix-caching"],
        ["--enable-prompt-tokens-details"],
        ["--disable-uvicorn-access-log"],
    ]
    if spec.entry.context:
        options.append(["--max-model-len", str(spec.entry.context)])
    if place.gpus > 1 and not given(spec.entry.args, ALIASES).keys() & set(_PARALLEL):
        options.append(["--tensor-parallel-size", str(place.gpus)])
    if installed.offers("allowed_media_domains", unknown=True):
        options.append(["--allowed-media-domains", *(place.media_hosts or (NO_HOST,))])
    # Before the option that asks for it, requests were logged unless told otherwise, prompts and all.
    if installed.offers("enable-log-requests", unknown=False):
        options.append(["--no-enable-log-requests"])
    elif installed.offers("disable-log-requests", unknown=False):
        options.append(["--disable-log-requests"])
    return options


def _variables(place: Place, installed: Installed, key: str) -> dict[str, str]:
    variables = {
        **installed.variables(),
        "VLLM_API_KEY": key,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Its own sockets go with the worker's folder, however it ends.
        "VLLM_RPC_BASE_PATH": str(place.folder),
        # A redirect would lead out of the allowed hosts.
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }
    if Path(place.source).exists():
        variables["HF_HUB_OFFLINE"] = "1"
    if not place.gpus and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        variables["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    if not place.gpus and thread_limit() and not os.environ.get("VLLM_CPU_OMP_THREADS_BIND"):
        # Bound to cores, all servers of a machine would take the same ones.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables
