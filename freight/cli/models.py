"""`freight models`: the registry."""

import os
import sys
from pathlib import Path
from typing import Any, Final, cast

import click
import msgspec
from rich.console import Console
from rich.table import Table

from freight.cli.pins import pin, unpin
from freight.cli.pull import pull
from freight.cli.servedmodels import list_served, named_server, show_served
from freight.cli.settings import settings
from freight.config import Config, check_entry_name, data_folder, load_config
from freight.core.model import EngineName, ModelEntry
from freight.errors import UserError, refusing

_SERVER: Final = click.option(
    "--server", metavar="URL", help="The service whose models they are. [default: FREIGHT_SERVER, else none]"
)


@click.group()
def models() -> None:
    """List, add, show and remove models.

    A model is a name for how to run it: an engine, a source, and options. Models of the configuration file are
    listed too, and changed there.
    """


models.add_command(pull)
models.add_command(pin)
models.add_command(unpin)


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@_SERVER
def list_(as_json: bool, server: str | None) -> None:
    """List the models that can be named: those here, or those of a service that --server or FREIGHT_SERVER names.

    Of a service, it lists the models that you may run there.
    """
    if (named := named_server(server)) is not None:
        list_served(named, as_json)
        return
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
@_SERVER
def show(name: str, as_json: bool, server: str | None) -> None:
    """Show a model: its entry, the command that starts its server, and the memory that it needs.

    In the command, {port}, {socket} and {api_key} are chosen for each start. Of a service that --server or
    FREIGHT_SERVER names, it shows what that lists.
    """
    from freight.control.resolve import entry_name

    if (named := named_server(server)) is not None:
        show_served(named, name, as_json)
        return
    config = settings()
    found = entry_name(name, config)
    if found is None:
        raise _unknown(name, config)
    entry = config.models[found]
    run = _how_it_runs(found, entry, config)
    if as_json:
        shown = {"name": found, "origin": _origin(found, config), **_entry(entry), "run": run}
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return
    click.echo(f"name: {found}\norigin: {_origin(found, config)}")
    for key, value in _entry(entry).items():
        click.echo(f"{key}: {_words(value)}")
    _print_run(run)


def _how_it_runs(name: str, entry: ModelEntry, config: Config) -> dict[str, Any]:
    """Return what a worker of the model takes here; with `problem` in it where the model cannot run as it is."""
    from freight.control.placing import gpus_of, needs_device
    from freight.control.resolve import started_model
    from freight.engines.checkpoint import memory_of, need_of
    from freight.engines.entry import check_entry
    from freight.engines.registry import check_placement
    from freight.engines.shown import shown_command
    from freight.launchers.devices import find_devices

    run: dict[str, Any] = {}
    try:
        check_entry(name, entry)
        if entry.engine is EngineName.ENDPOINT:
            return run
        spec = started_model(name, name, entry)
        devices = find_devices(config.local_devices(), os.environ).devices()
        gpus = run["gpus"] = gpus_of(spec, None, devices) if needs_device(spec) else 0
        need, memory = need_of(spec, gpus), memory_of(gpus, devices)
        if need is not None:
            run["memory_needed"] = need.total()
        if memory is not None:
            run["memory_there"] = memory * max(1, gpus)
        run["command"] = shown_command(spec, gpus, tuple(config["media.hosts"]))
        check_placement(spec, gpus, devices)
    except UserError as error:
        run["problem"] = error.message
        run["fix"] = error.hint
    return run


def _print_run(run: dict[str, Any]) -> None:
    from freight.core.memory import size

    if "command" in run:
        click.echo(f"command: {run['command']}")
    needed, there = run.get("memory_needed"), run.get("memory_there")
    if needed is not None and there is not None:
        where = f"on {run['gpus']} of this machine's GPUs" if run["gpus"] else "in this machine"
        click.echo(f"memory: {size(needed)} needed for each worker; {size(there)} {where}")
    if "problem" in run:
        click.echo(f"problem: {run['problem']}\nfix: {run['fix']}")


@models.command(context_settings={"ignore_unknown_options": False})
@click.argument("name")
@click.argument("arguments", nargs=-1)
@click.option(
    "--engine",
    type=click.Choice([name.value for name in EngineName]),
    help="The kind of server. [default: by the source]",
)
@click.option(
    "--source", multiple=True, metavar="S", help="A .gguf file, a checkpoint folder, ORG/NAME of a hub, or a URL."
)
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS", help="Tokens per request.")
@click.option("--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs per worker; 0 for the CPU.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME", help="Another name for it (repeatable).")
@click.option("--group", "groups", multiple=True, metavar="G", help="Only for users in this group (repeatable).")
@click.option("--batch", is_flag=True, help="Let the facility API run it.")
@click.option("--prompt-cache", is_flag=True, help="Let llama.cpp reuse the cache of earlier prompts.")
@click.option("--executable", metavar="PATH", help="The server's executable, or the folder of its virtual environment.")
@click.option("--api-key-env", metavar="VARIABLE", help="The variable that holds an endpoint's key.")
@click.option("--api-key-file", metavar="FILE", help="The file that holds an endpoint's key.")
@click.option("--force", is_flag=True, help="Replace a registered model of that name.")
def add(name: str, arguments: tuple[str, ...], force: bool, **options: Any) -> None:
    """Register a model under NAME.

    What follows -- goes to the engine: extra arguments, or for engine "command" the whole command line, with
    {port} or {socket}, {source}, {api_key}, {context} and {gpus} where Freight fills in.
    """
    from freight.store.registry import built_in_models, changing_registry

    check_entry_name(name)
    entry = _checked(name, _from_options(arguments, options))
    with changing_registry(data_folder()) as registry:
        if name in registry and not force:
            raise UserError(f"there is a model {name} already", "use --force to replace it, or another name")
        registry[name] = entry
        # Before it is kept: an alias that another model has would keep every command from working.
        origin = load_config(registry, built_in_models()).origins[f"models.{name}"]
    click.echo(f"added {name} ({entry.engine})", err=True)
    if origin != "registry":
        click.echo(f"note: {origin} has a model {name} too, and comes first", err=True)


@models.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove a registered model; its files stay."""
    from freight.store.registry import changing_registry

    with changing_registry(data_folder()) as registry:
        if name not in registry:
            config = settings()
            if f"models.{name}" not in config.origins:
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
    for key in {"aliases", "groups"} & given.keys():
        given[key] = list(given[key])
    if arguments:
        given["command" if engine == EngineName.COMMAND else "args"] = list(arguments)
    return given


def _absolute(source: str) -> str:
    # A path must mean the same from every folder.
    with refusing(f"cannot look for the source {source}", "name one that you may read"):
        path = Path(source).expanduser()
        return str(path.absolute()) if path.exists() else source


def _guess(sources: list[str], arguments: tuple[str, ...]) -> str:
    from freight.engines.entry import is_hub_id

    if sources and sources[0].startswith(("http://", "https://")):
        return EngineName.ENDPOINT
    if sources and sources[0].endswith(".gguf"):
        return EngineName.LLAMACPP
    if sources and (Path(sources[0]) / "config.json").is_file():
        return EngineName.VLLM
    if sources and is_hub_id(sources[0]):
        return EngineName.VLLM
    if arguments and not sources:
        return EngineName.COMMAND
    raise UserError("cannot tell the engine from the source", f"use --engine: {', '.join(EngineName)}")


def _checked(name: str, values: dict[str, Any]) -> ModelEntry:
    """Return the entry; raise UserError for one that could never run."""
    from freight.engines.entry import check_entry

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
