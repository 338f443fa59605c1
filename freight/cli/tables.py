"""Tables and times for people, JSON for programs, all on standard output."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from freight.cli.progress import duration
from freight.cli.text import printable

# A table that no terminal shows need not fit one.
_ENDLESS: Final = 1 << 14


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], shrinks: Sequence[str] = ()) -> None:
    """Print a table that fits the terminal; the columns named by `shrinks` give way first, a line stays a line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = None if sys.stdout.isatty() else _ENDLESS
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in shrinks, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(printable(cell, one_line=True), no_wrap=True, overflow="ellipsis") for cell in row))
    with console.capture() as captured:
        console.print(table)
    for text in captured.get().splitlines():
        click.echo(text.rstrip())


def print_json(value: Any) -> None:
    """Print a value of the API as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def moment(text: str | None) -> datetime | None:
    """Return a time of the API; None for none."""
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found and found.tzinfo is None else found


def age(text: str | None) -> str:
    """Return how long ago a time of the API was, in words."""
    when = moment(text)
    if when is None:
        return "-"
    seconds = max(0.0, (datetime.now(UTC) - when).total_seconds())
    days, rest = divmod(int(seconds), 86400)
    return f"{days}d{rest // 3600:02d}h" if days else duration(float(int(seconds))).replace(".0s", "s")


def local_time(text: str | None) -> str:
    """Return a time of the API as the clock on the wall shows it."""
    when = moment(text)
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S") if when else "-"
