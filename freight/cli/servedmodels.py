"""The models of a service that the user named, in place of this machine's own registry."""

import os
from typing import TYPE_CHECKING

import click

from freight.cli.tables import print_json, print_table
from freight.errors import UserError

if TYPE_CHECKING:
    from freight.core.view import ModelInfo


def named_server(given: str | None) -> str | None:
    """Return the service that the user named, by --server or FREIGHT_SERVER; None where none is."""
    return given or os.environ.get("FREIGHT_SERVER") or None


def list_served(server: str, as_json: bool) -> None:
    """List the models of a service that the user may run."""
    models = _models(server)
    if as_json:
        print_json(models)
    elif models:
        has_groups = any(model.groups is not None for model in models)
        headings = ["NAME", "ENGINE", "ALIASES", "CONTEXT", "GPUS", "BATCH", *(["GROUPS"] if has_groups else [])]
        print_table(headings, [_row(model, has_groups) for model in models], shrinks=("ALIASES", "GROUPS"))
    else:
        click.echo("no models that you may run there", err=True)


def show_served(server: str, name: str, as_json: bool) -> None:
    """Show one of them, by its name or an alias; raise UserError where there is none."""
    models = _models(server)
    found = next((one for one in models if one.name == name), None)
    found = found or next((one for one in models if name in one.aliases), None)
    if found is None:
        raise UserError(
            f"there is no model {name} at {server}", f"models: {', '.join(one.name for one in models) or 'none'}"
        )
    if as_json:
        print_json(found)
        return
    fields = (("name", found.name), ("engine", found.engine), ("aliases", " ".join(found.aliases)),
              ("context", found.context), ("gpus", found.gpus), ("batch", found.batch),
              ("groups", " ".join(found.groups or ())))  # fmt: skip
    for key, value in fields:
        if value not in (None, "", False):
            click.echo(f"{key}: {value}")


def _models(server: str) -> "list[ModelInfo]":
    from freight.cli.local import connect

    with connect(server) as client:
        return client.models()


def _row(model: "ModelInfo", has_groups: bool) -> list[str]:
    row = [
        model.name,
        model.engine,
        ", ".join(model.aliases) or "-",
        "-" if model.context is None else str(model.context),
        "-" if model.gpus is None else str(model.gpus),
        "yes" if model.batch else "no",
    ]
    return [*row, ", ".join(model.groups or ()) or "-"] if has_groups else row
