"""SGLang's OpenAI-compatible server, started as the user installed it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from freight.core.model import ModelSpec
from freight.engines.arguments import given, joined, whole_number
from freight.engines.base import Address, EngineLoad, Place, ServerCommand
from freight.engines.installed import Installed, Program, find_program
from freight.engines.metrics import sglang_load, sglang_tokens
from freight.engines.parallel import check_parallel
from freight.engines.vllm import NO_HOST
from freight.engines.why import reason

SGLANG: Final = Program(
    label="SGLang",
    package="sglang",
    module="sglang.launch_server",
    # Its own command, where there is one, has other words than its module.
    script="",
    options=("srt/server_args.py",),
)
DEFAULT_RUNNING: Final = 256
ALIASES: Final = {
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
}
RESERVED: Final = frozenset(
    {"--host", "--port", "--api-key", "--config", "--model-path", "--model", "--grpc-mode", "--smg-grpc-mode"}
    | {"--ssl-keyfile", "--ssl-certfile", "--fastapi-root-path", "--nnodes"}
)
# With attention over data-parallel ranks these share GPUs, so that only these two multiply.
_PARALLEL: Final = ("--tp-size", "--pp-size")


class SglangEngine:
    """`python -m sglang.launch_server` on one checkpoint."""

    starts_server = True
    staggers = True

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Raise UserError when SGLang is not installed, or its arguments want another number of GPUs."""
        find_program(SGLANG, spec.name, spec.entry)
        options = given(spec.entry.args, ALIASES)
        if "--dp-size" not in options:
            check_parallel(spec.name, options, _PARALLEL, gpus)

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return the server's command with what batch work wants; the user's arguments beat ours.

        Its key goes into a file of the worker's folder, which only this user may read: SGLang takes it from an
        argument or from a file of arguments alone.
        """
        installed = find_program(SGLANG, spec.name, spec.entry)
        port, key = place.port(), place.key()
        config = place.folder / "sglang.yaml"
        if not place.shown:
            _write_secret(config, f'api-key: "{key}"\n')
        argv = [*installed.argv, "--model-path", place.source, "--host", "127.0.0.1", "--port", port]
        argv += ["--config", "{config}" if place.shown else str(config)]
        argv += joined(_options(spec, place, installed), spec.entry.args, ALIASES)
        variables = installed.variables()
        if Path(place.source).exists():
            variables["HF_HUB_OFFLINE"] = "1"
        return ServerCommand(argv, {**variables, **spec.entry.env}, Address(f"http://127.0.0.1:{port}", None, key))

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Not for this engine: its servers are started."""
        raise AssertionError("SGLang's address comes with its command")

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return how many requests the server is told to run at once."""
        return whole_number(given(spec.entry.args, ALIASES).get("--max-running-requests", "")) or DEFAULT_RUNNING

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return nothing: a server is started by its entry alone."""
        return ""

    def tokens_made(self, metrics: str) -> float | None:
        """Return the tokens read and made so far."""
        return sglang_tokens(metrics)

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what the server is busy with."""
        return sglang_load(metrics)

    def why(self, log_tail: Sequence[str]) -> str:
        """Return the line that says why SGLang ended."""
        return reason(log_tail)


def _options(spec: ModelSpec, place: Place, installed: Installed) -> list[list[str]]:
    options = [
        # One name alone: bodies that have another are given this one.
        ["--served-model-name", spec.served_names()[0]],
        ["--max-running-requests", str(DEFAULT_RUNNING)],
        ["--enable-metrics"],
        ["--enable-cache-report"],
        ["--log-level-http", "warning"],
    ]
    if spec.entry.context:
        options.append(["--context-length", str(spec.entry.context)])
    if not place.gpus:
        options.append(["--device", "cpu"])
    elif place.gpus > 1 and not given(spec.entry.args, ALIASES).keys() & {*_PARALLEL, "--dp-size"}:
        options.append(["--tp-size", str(place.gpus)])
    if installed.offers("allowed_media_domains", unknown=False):
        options.append(["--allowed-media-domains", *(place.media_hosts or (NO_HOST,))])
    return options


def _write_secret(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
