"""Any OpenAI-compatible server, started by its command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from freight.core.model import ModelSpec
from freight.engines.base import Address, EngineLoad, Place, ServerCommand
from freight.engines.metrics import any_load, vllm_tokens
from freight.engines.why import reason
from freight.errors import UserError

PLACEHOLDERS: Final = ("source", "port", "socket", "api_key", "context", "gpus")


class CommandEngine:
    """A server described by `command`, with placeholders for what Freight chooses."""

    starts_server = True
    staggers = False

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Let everything pass: nothing is known of the server."""

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return the entry's command line with the placeholders filled in.

        The server listens on `{socket}` where the command names it, else on the loopback `{port}`.
        """
        words = [*spec.entry.command, *spec.entry.args, *spec.entry.env.values()]
        key, socket_path, port = place.key(), place.socket_path(), place.port()
        filled = {
            "source": place.source,
            "port": port,
            "socket": socket_path,
            "api_key": key,
            "context": str(spec.entry.context or ""),
            "gpus": str(place.gpus or spec.entry.gpus or 0),
        }
        uses_socket = any("{socket}" in word for word in words)
        address = Address(
            url="http://localhost" if uses_socket else f"http://127.0.0.1:{port}",
            socket_path=socket_path if uses_socket else None,
            api_key=key if any("{api_key}" in word for word in words) else None,
        )
        argv = [_fill(word, filled) for word in (*spec.entry.command, *spec.entry.args)]
        env = {name: _fill(value, filled) for name, value in spec.entry.env.items()}
        return ServerCommand(argv, env, address)

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Not for this engine: its servers are started."""
        raise AssertionError("a command engine's address comes with its command")

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return None: nothing is known of the server."""
        return None

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return nothing: the command line depends on the entry alone."""
        return ""

    def tokens_made(self, metrics: str) -> float | None:
        """Return vLLM's count, if the server has one of that name."""
        return vllm_tokens(metrics)

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what a server says whose metrics have the names of one that is known."""
        return any_load(metrics)

    def why(self, log_tail: Sequence[str]) -> str:
        """Return a reason that one of the known servers would give."""
        return reason(log_tail)


def _fill(word: str, filled: dict[str, str]) -> str:
    for name, value in filled.items():
        word = word.replace("{" + name + "}", value)
    return word


def check_command(name: str, command: list[str], source: str) -> None:
    """Raise UserError unless `command` can be a server that Freight reaches."""
    if not command:
        raise UserError(f"model {name} has engine 'command' but no command", 'set command = ["my-server", …, "{port}"]')
    if any("\0" in word for word in command):
        raise UserError(f"the command of model {name} has a NUL character in it", "take it out")
    if not any("{port}" in word or "{socket}" in word for word in command):
        raise UserError(
            f"the command of model {name} names neither {{port}} nor {{socket}}: Freight could not reach the server",
            "let the command take one of them, as in --port {port}",
        )
    if source and ("/" in source or source.startswith(".")) and not Path(source).expanduser().exists():
        raise UserError(f"the source of model {name} does not exist: {source}", "correct the source of its entry")
