"""What happened to jobs, as of many at a time."""

from collections.abc import Sequence
from typing import Final

import msgspec

from freight.core.job import Event, State
from freight.store.database import Database

# Since the last of the events that begin a job anew, if any.
_REACHED: Final = """
WITH since AS (
    SELECT job, max(number) AS number FROM event
    WHERE job IN (SELECT value FROM json_each(?1)) AND event IN (SELECT value FROM json_each(?2)) GROUP BY job
)
SELECT event.job, event.state, min(event.at) FROM event LEFT JOIN since ON since.job = event.job
WHERE event.job IN (SELECT value FROM json_each(?1)) AND event.number >= coalesce(since.number, 0)
GROUP BY event.job, event.state
"""
_ANEW: Final = msgspec.json.encode([Event.ACCEPTED, Event.CONTINUED, Event.RETRIED]).decode()


class Timeline:
    """The events of all jobs. Not for several threads at once."""

    def __init__(self, connection: Database) -> None:
        self._connection = connection

    def reached(self, jobs: Sequence[str]) -> dict[str, dict[State, float]]:
        """Return when each of these jobs first came to each state since it was last submitted, resumed or retried."""
        found: dict[str, dict[State, float]] = {job: {} for job in jobs}
        for job, state, at in self._connection.execute(_REACHED, (msgspec.json.encode(jobs).decode(), _ANEW)):
            found[job][State(state)] = at
        return found
