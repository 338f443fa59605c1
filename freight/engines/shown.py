"""The command that starts a model's server, for people to read."""

import re
import shlex
from pathlib import Path
from typing import Final

from freight.core.model import ModelSpec
from freight.core.record import Endpoint
from freight.engines.base import Place
from freight.engines.registry import engine_of

_SECRET: Final = re.compile(r"(?i).*(TOKEN|KEY|SECRET|PASSWORD)")
# Words that a shell would take apart, and that are for people here.
_PLACEHOLDER: Final = re.compile(r"'(\{(?:port|socket|api_key|config)\})'")


def shown_command(spec: ModelSpec, gpus: int, media_hosts: tuple[str, ...]) -> str:
    """Return the command line, with its variables before it, that starts the model's server on so many GPUs.

    What each start chooses, and what may be a secret, is a placeholder. "" where Freight starts none.
    """
    sources = spec.entry.sources()
    place = Place(
        folder=Path("{folder}"),
        source=sources[0] if sources else "",
        endpoints=frozenset({Endpoint.CHAT}),
        concurrency=0,
        gpus=gpus,
        media_hosts=media_hosts,
        shown=True,
    )
    command = engine_of(spec.entry.engine).command(spec, place)
    if command is None:
        return ""
    own = spec.entry.env
    variables = [
        f"{name}=…" if name in own and _SECRET.fullmatch(name) else f"{name}={_word(value)}"
        for name, value in command.env.items()
        if name != "PATH" or name in own
    ]
    return " ".join([*variables, *(_word(word) for word in command.argv)])


def _word(word: str) -> str:
    return _PLACEHOLDER.sub(r"\1", shlex.quote(word))
