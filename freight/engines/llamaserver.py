"""llama.cpp's own `llama-server` executable, as the user built or installed it."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from freight.core.model import ModelSpec
from freight.core.record import Endpoint
from freight.engines.arguments import given, joined
from freight.engines.base import Address, Place, ServerCommand
from freight.engines.gguf import Gguf, read_gguf
from freight.engines.installed import find_file
from freight.errors import UserError

ALIASES: Final = {
    "-np": "--parallel",
    "-c": "--ctx-size",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-a": "--alias",
    "-to": "--timeout",
    "-cram": "--cache-ram",
    "-kvu": "--kv-unified",
    "-no-kvu": "--kv-unified",
    "--embedding": "--embeddings",
    "--rerank": "--reranking",
    "--webui": "--ui",
    "--no-webui": "--ui",
    "-m": "--model",
    "-mu": "--model-url",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
}
RESERVED: Final = frozenset(
    {"--host", "--port", "--reuse-port", "--api-key", "--api-key-file", "--api-prefix", "--path"}
    | {"--model", "--model-url", "--hf-repo", "--ssl-key-file", "--ssl-cert-file"}
)
_TIMEOUT_S: Final = str(24 * 3600)
_HELP_TIMEOUT_S: Final = 30.0


def server_command(
    spec: ModelSpec, place: Place, slots: int, default_context: int, threads: int, embedding_batch: int
) -> ServerCommand:
    """Return the command of `llama-server` with the settings that llama.cpp has in a worker; the user's beat them.

    It listens on a Unix socket in the worker's folder, where no other user can reach it.
    """
    executable = find_file(spec.name, spec.entry.executable or "llama-server")
    facts = read_gguf(Path(place.source))
    context = min(spec.entry.context or default_context, facts.context or 1 << 62)
    has = _help(executable, executable.stat().st_mtime_ns)
    options = [
        ["--alias", spec.name],
        ["--parallel", str(slots)],
        # Each slot has a context of its own: a shared one lets a long request end the others.
        ["--ctx-size", str(slots * context)],
        ["--threads", str(threads)],
        ["--timeout", _TIMEOUT_S],
        ["--metrics"],
        *_settings(spec, has),
        *_special(place, facts, context, embedding_batch),
    ]
    if place.gpus:
        options.append(["--gpu-layers", "999"])
    argv = [str(executable), "--model", place.source, "--host", place.socket_path()]
    argv += joined(options, spec.entry.args, ALIASES)
    return ServerCommand(argv, dict(spec.entry.env), Address("http://localhost", place.socket_path()))


def own_slots(spec: ModelSpec) -> int | None:
    """Return the number of slots that the entry's own arguments ask for."""
    value = given(spec.entry.args, ALIASES).get("--parallel", "")
    return int(value) if value.isdecimal() and int(value) else None


def _settings(spec: ModelSpec, has: str) -> list[list[str]]:
    """Return the settings that not every version has, as far as this one's help names them."""
    settings: list[list[str]] = []
    if "--no-kv-unified" in has:
        settings.append(["--no-kv-unified"])
    if "--cache-ram" in has:
        settings.append(["--cache-ram", "0"])
    # With the prompt cache on, requests have been answered with an earlier, unrelated prompt.
    if "--no-cache-prompt" in has:
        settings.append(["--cache-prompt" if spec.entry.prompt_cache else "--no-cache-prompt"])
    for ui in ("--no-ui", "--no-webui"):
        if ui + "\n" in has or ui + " " in has or ui + "," in has:
            settings.append([ui])
            break
    if "--offline" in has:
        settings.append(["--offline"])
    return settings


def _special(place: Place, facts: Gguf, context: int, embedding_batch: int) -> list[list[str]]:
    if Endpoint.RERANK in place.endpoints:
        return [["--reranking"]]
    if Endpoint.EMBEDDINGS not in place.endpoints:
        return []
    # A prompt must fit into one physical batch.
    batch = str(min(context, embedding_batch))
    special = [["--embeddings"], ["--batch-size", batch], ["--ubatch-size", batch]]
    # A model made for text has no pooling of its own, and a vector a token is not an embedding.
    return special if facts.pooling is not None else [*special, ["--pooling", "mean"]]


@cache
def _help(executable: Path, modified: int) -> str:
    """Return what the executable says of its options. Asked once for each version of the file."""
    try:
        done = subprocess.run(
            [str(executable), "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_HELP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{executable} cannot be run: {error}", "name a llama-server that runs on this machine"
        ) from error
    text = done.stdout.decode(errors="replace")
    if "--ctx-size" not in text:
        tail = text.strip().splitlines()[-1:] or [f"it ended with status {done.returncode}"]
        raise UserError(f"{executable} is no llama-server: {tail[0][:200]}", "name llama.cpp's llama-server")
    return text
