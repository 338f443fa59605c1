"""`freight models`: the registry."""

import sys
from pathlib import Path
from typing import Any, cast

import click
import msgspec
from rich.console import Console
from rich.table import Table

from freight.cli.settings import settings
from freight.config import Config, check_entry_name, data_folder
from freight.core.model import EngineName, ModelEntry
from freight.errors import UserError


@click.group()
def models() -> None:
    """List, add, show and remove models.

    A model is a name for how to run it: an engine, a source, and options. Models of the configuration file are
    listed too, and changed there.
    """


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_(as_json: bool) -> None:
    """List the models that can be named."""
    config = settings()
    if as_json:
        rows = [
            {"name": name, "origin": _origin(name, config), **_entry(entry)} for name, entry in config.models.items()
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("NAME", "ENGINE", "ALIASES", "ORIGIN", "SOURCE"):
        table.add_column(column, overflow="fold")
    for name, entry in config.models.items():
        source = " ".join(entry.sources()) or " ".join(entry.command)
        table.add_row(name, entry.engine, ", ".join(entry.aliases) or "-", _origin(name, config), source)
    Console(file=sys.stdout, highlight=False, markup=False).print(table)


@models.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, as_json: bool) -> None:
    """Show a model: its entry, and the names that a record's own `model` may have."""
    from freight.control.resolve import entry_name

    config = settings()
    found = entry_name(name, config)
    if found is None:
        raise _unknown(name, config)
    entry = config.models[found]
    if as_json:
        shown = {"name": found, "origin": _origin(found, config), **_entry(entry)}
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return
    click.echo(f"name: {found}\norigin: {_origin(found, config)}")
    for key, value in _entry(entry).items():
        click.echo(f"{key}: {_words(value)}")


@models.command(context_settings={"ignore_unknown_options": False})
@click.argument("name")
@click.argument("arguments", nargs=-1)
@click.option(
    "--engine",
    type=click.Choice([name.value for name in EngineName]),
    help="The kind of server. [default: by the source]",
)
@click.option("--source", multiple=True, metavar="S", help="A .gguf file, a checkpoint folder, or a URL (repeatable).")
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens per request.")
@click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs per worker.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME", help="Another name for it (repeatable).")
@click.option("--batch", is_flag=True, help="Mark it for batch use through the service.")
@click.option("--prompt-cache", is_flag=True, help="Let llama.cpp reuse the cache of earlier prompts.")
@click.option("--executable", metavar="PATH", help="The server's executable.")
@click.option("--api-key-env", metavar="VARIABLE", help="The variable that holds an endpoint's key.")
@click.option("--api-key-file", metavar="FILE", help="The file that holds an endpoint's key.")
@click.option("--force", is_flag=True, help="Replace a registered model of that name.")
def add(name: str, arguments: tuple[str, ...], force: bool, **options: Any) -> None:
    """Register a model under NAME.

    What follows -- goes to the engine: extra arguments, or for engine "command" the whole command line, with
    {port} or {socket}, {source}, {api_key}, {context} and {gpus} where Freight fills in.
    """
    from freight.store.registry import changing_registry

    check_entry_name(name)
    entry = _checked(name, _from_options(arguments, options))
    with changing_registry(data_folder()) as registry:
        if name in registry and not force:
            raise UserError(f"there is a model {name} already", "use --force to replace it, or another name")
        registry[name] = entry
    click.echo(f"added {name} ({entry.engine})", err=True)
    origin = settings().origins.get(f"models.{name}")
    if origin != "registry":
        click.echo(f"note: {origin} has a model {name} too, and comes first", err=True)


@models.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove a registered model; its files stay."""
    from freight.store.registry import changing_registry

    config = settings()
    origin = config.origins.get(f"models.{name}")
    with changing_registry(data_folder()) as registry:
        if name not in registry:
            if origin is None:
                raise _unknown(name, config)
            raise UserError(f"model {name} is not registered: it is {_origin(name, config)}", "change it there")
        del registry[name]
    click.echo(f"removed {name}", err=True)


def _from_options(arguments: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value not in (None, False, ())}
    sources = [_absolute(source) for source in given.pop("source", ())]
    engine = given["engine"] = given.get("engine") or _guess(sources, arguments)
    if sources:
        given["source"] = sources[0] if len(sources) == 1 else sources
    if "aliases" in given:
        given["aliases"] = list(given["aliases"])
    if arguments:
        given["command" if engine == EngineName.COMMAND else "args"] = list(arguments)
    return given


def _absolute(source: str) -> str:
    # A path must mean the same from every folder.
    path = Path(source).expanduser()
    return str(path.absolute()) if path.exists() else source


def _guess(sources: list[str], arguments: tuple[str, ...]) -> str:
    if sources and sources[0].startswith(("http://", "https://")):
        return EngineName.ENDPOINT
    if sources and sources[0].endswith(".gguf"):
        return EngineName.LLAMACPP
    if arguments and not sources:
        return EngineName.COMMAND
    raise UserError("cannot tell the engine from the source", f"use --engine: {', '.join(EngineName)}")


def _checked(name: str, values: dict[str, Any]) -> ModelEntry:
    """Return the entry; raise UserError for one that could never run."""
    from freight.control.resolve import check_entry

    entry = msgspec.convert(values, ModelEntry)
    check_entry(name, entry)
    return entry


def _entry(entry: ModelEntry) -> dict[str, Any]:
    return msgspec.to_builtins(entry)


def _words(value: Any) -> str:
    return " ".join(str(part) for part in cast(list[Any], value)) if isinstance(value, list) else str(value)


def _origin(name: str, config: Config) -> str:
    return config.origins.get(f"models.{name}", "")


def _unknown(name: str, config: Config) -> UserError:
    return UserError(f"there is no model {name}", f"models: {', '.join(config.models) or 'none is registered'}")
