"""Which jobs a list shows, as SQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from freight.core.job import State

# Which jobs, and which of the bindings that has. Letters of names sort below '~'.
_CLAUSES: Final = {
    "user": "user = ?",
    "model": "model = ?",
    "name": "name >= ? AND name < ?",
    "since": "created_at >= ?",
    "until": "created_at < ?",
    "states": "state IN (SELECT value FROM json_each(?))",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs: of whom, in which states, of which model, whose name begins so, created since and until when.

    None, wherever it is, means any.
    """

    user: str | None = None
    states: Sequence[State] | None = None
    model: str | None = None
    name: str | None = None
    since: float | None = None
    until: float | None = None

    def clauses(self) -> tuple[str, list[object]]:
        """Return the condition for a WHERE, and its bindings."""
        states = None if self.states is None else msgspec.json.encode(self.states).decode()
        given: dict[str, tuple[object, ...]] = {
            "user": (self.user,),
            "model": (self.model,),
            "name": (self.name, f"{self.name}~") if self.name is not None else (None,),
            "since": (self.since,),
            "until": (self.until,),
            "states": (states,),
        }
        used = [key for key, values in given.items() if values[0] is not None]
        return " AND ".join(_CLAUSES[key] for key in used) or "true", [value for key in used for value in given[key]]
