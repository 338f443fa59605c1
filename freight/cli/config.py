"""`freight config`: the settings in force."""

from typing import Any

import click
import msgspec

from freight.cli.settings import settings
from freight.config import Config


@click.group()
def config() -> None:
    """Show the settings in force."""


@config.command()
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(origin: bool, as_json: bool) -> None:
    """Print every setting and its value."""
    found = settings()
    rows = _rows(found)
    if as_json:
        shown: dict[str, Any] = {k: {"value": v, "origin": found.origins[k]} if origin else v for k, v in rows.items()}
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return
    for key, value in rows.items():
        text = f"{key} = {msgspec.json.encode(value).decode()}"
        click.echo(f"{text}  # {found.origins[key]}" if origin else text)


def _rows(found: Config) -> dict[str, Any]:
    tables: tuple[tuple[str, dict[str, Any]], ...] = (
        ("models", found.models),
        ("pools", {name: pool.written() for name, pool in found.pools.items()}),
        ("paths", found.paths),
    )
    named = {
        f"{table}.{name}": msgspec.to_builtins(entry) for table, entries in tables for name, entry in entries.items()
    }
    return {**found.values, **named}
