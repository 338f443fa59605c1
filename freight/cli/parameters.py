"""Parameter types that several commands share."""

from typing import Any

import click

from freight.config import parse_duration


class Duration(click.ParamType[float]):
    """A duration such as 90s or 12h, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; fail with what is accepted."""
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r}: must be longer than nothing", param, ctx)
        return seconds


class Concurrency(click.ParamType[int]):
    """A number of requests in flight, or "auto", which is 0."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail with what is accepted."""
        if value in ("auto", 0):
            return 0
        if not (str(value).isascii() and str(value).isdigit()) or not 1 <= int(value) <= 65536:
            self.fail(f"{value!r}: expected auto, or a number from 1 to 65536", param, ctx)
        return int(value)
