"""The settings of a service that runs: a mistake made in them meanwhile breaks nothing."""

import logging
from collections.abc import Callable

from freight.config import Config
from freight.errors import FreightError

log = logging.getLogger("freight.service")


class LastGood:
    """Reads the settings anew at each call; while they are wrong it returns those that were good last.

    The log tells of each problem once, and when it is over.
    """

    def __init__(self, read: Callable[[], Config]) -> None:
        """Read them for the first time; raise FreightError where they are wrong."""
        self._read = read
        self._good = read()
        self._problem = ""

    def __call__(self) -> Config:
        """Return the settings as they are now, or as they were when they were good."""
        try:
            found = self._read()
        except FreightError as error:
            if error.message != self._problem:
                self._problem = error.message
                log.warning("%s; the settings stay as they were", error.message)
            return self._good
        if self._problem:
            self._problem = ""
            log.info("the settings are good again, and in force")
        self._good = found
        return found
