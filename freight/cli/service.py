"""The service that a command's options mean. Light: connecting imports what it needs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freight.client.sync import Client


@dataclass(frozen=True, slots=True)
class Service:
    """Where the service is, None for the usual place, and whether one may be started there."""

    server: str | None
    no_start: bool

    def connect(self) -> "Client":
        """Return a client of the service, which answers; start one where that is allowed and needed."""
        from freight.cli.local import connect

        return connect(self.server, no_start=self.no_start)
