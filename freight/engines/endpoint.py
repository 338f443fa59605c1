"""Any OpenAI-compatible server that already runs, by its URL."""

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import SplitResult, urlsplit

from freight.core.model import ModelSpec
from freight.core.record import PATHS
from freight.engines.base import Address, EngineLoad, Place, ServerCommand, read_key
from freight.engines.metrics import any_load
from freight.errors import UserError

# Up to 63 characters between dots, or an IPv6 address.
_HOST: Final = re.compile(
    r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_-]{1,63})*\.?|[0-9a-f]*:[0-9a-f:.]+(%\w+)?"
)
# Where the key of a URL typed on the command line is looked for.
KEY_VARIABLE: Final = "FREIGHT_ENDPOINT_API_KEY"


class EndpointEngine:
    """A server that Freight neither starts nor stops."""

    starts_server = False
    staggers = False

    def check(self, spec: ModelSpec, gpus: int) -> None:
        """Let everything pass: it runs already."""

    def command(self, spec: ModelSpec, place: Place) -> ServerCommand | None:
        """Return None: it runs already."""
        return None

    def address(self, spec: ModelSpec, place: Place) -> Address:
        """Return the URL of this worker's source, and the key to use there."""
        entry = spec.entry
        return Address(base_url(place.source), api_key=read_key(entry.api_key_file, entry.api_key_env))

    def slots(self, spec: ModelSpec, concurrency: int) -> int | None:
        """Return None: only the server's owner knows."""
        return None

    def shape(self, spec: ModelSpec, endpoints: frozenset[int], concurrency: int) -> str:
        """Return nothing: its owner started it."""
        return ""

    def tokens_made(self, metrics: str) -> float | None:
        """Return None: a server that Freight did not start is not restarted either."""
        return None

    def load(self, metrics: str) -> EngineLoad | None:
        """Return what the server says, if its metrics have names that are known."""
        return any_load(metrics)

    def why(self, log_tail: Sequence[str]) -> str:
        """Return nothing: its output is not seen."""
        return ""


def base_url(url: str) -> str:
    """Return the URL that endpoint paths are appended to; raise UserError when `url` is none."""
    parts = _split(url)
    if parts is None:
        shown = "…@" + url.rpartition("@")[2] if "@" in url else url
        raise UserError(f"{shown} is not an http or https URL of a server", "write it as http://HOST:PORT")
    if "@" in parts.netloc:
        raise UserError(
            f"the URL of {parts.hostname} holds a password, which would show in process lists",
            f"put the key in the variable {KEY_VARIABLE}, or in a file named by api_key_file in a model entry",
        )
    if parts.query or parts.fragment:
        raise UserError(f"{url} has a query or fragment", "give the server's base URL alone")
    path = parts.path.rstrip("/")
    for endpoint in PATHS.values():
        path = path.removesuffix(endpoint)
    path = path.removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _split(url: str) -> SplitResult | None:
    """Return the parts of an http or https URL; None for anything else."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.hostname or "") and parts.port != 0
        return parts if good else None
    except ValueError:
        return None
