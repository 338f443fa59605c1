"""The engines that this version can run, by name."""

from typing import Final

from freight.core.model import EngineName
from freight.engines.base import Engine
from freight.engines.command import CommandEngine
from freight.engines.endpoint import EndpointEngine
from freight.engines.llamacpp import LlamaCppEngine
from freight.errors import UserError

_ENGINES: Final[dict[EngineName, Engine]] = {
    EngineName.LLAMACPP: LlamaCppEngine(),
    EngineName.ENDPOINT: EndpointEngine(),
    EngineName.COMMAND: CommandEngine(),
}


def engine_of(name: EngineName) -> Engine:
    """Return the engine called `name`; raise UserError when this version cannot run it."""
    engine = _ENGINES.get(name)
    if engine is None:
        raise UserError(
            f"engine {name} cannot be started by this version of Freight; it has {', '.join(_ENGINES)}",
            "start the server yourself and pass its URL as --model, or describe it as engine 'command'",
        )
    return engine
