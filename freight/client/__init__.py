"""Talking to a Freight service from Python.

from freight import Client

with Client() as client:
    job = client.submit("requests.jsonl", model="small").job
    client.wait(job.name)
    client.save_results(job.name, "answers.jsonl")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freight.client.aio import AsyncClient
    from freight.client.sync import Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Imported on first use: shell completion and the like have no time for an HTTP library.
    if name == "Client":
        from freight.client.sync import Client

        return Client
    if name == "AsyncClient":
        from freight.client.aio import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
