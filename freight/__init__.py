"""Freight: batch LLM inference on your own hardware."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freight.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: most commands have no use for an HTTP library.
    if name in ("AsyncClient", "Client"):
        from freight import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
