"""`freight gpus`: the devices of this machine, and who holds them."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from freight.cli.parameters import json_option, service_options
from freight.cli.service import Service
from freight.cli.tables import print_json, print_table
from freight.client.address import find_service
from freight.core.view import DeviceStatus
from freight.errors import NoServer, UserError

if TYPE_CHECKING:
    from freight.launchers.devices import Inventory

FREE: Final = "free"
LEASED: Final = "leased"
HELD: Final = "held"
QUARANTINED: Final = "quarantined"


@click.group(invoke_without_command=True)
@json_option
@service_options()
@click.pass_context
def gpus(ctx: click.Context, as_json: bool, service: Service) -> None:
    """Show the devices, how much of their memory is in use, and who holds them.

    The service is asked; where none runs, the machine itself: then GPUs that Freight may not use are shown, too.

    Exit status: 2 the configuration names a device that there is not; 5 the service named by --server does not
    answer.
    """
    if ctx.invoked_subcommand:
        if as_json or service.server:
            raise click.UsageError("options of gpus go after release", ctx)
        return
    try:
        with service.connect() as client:
            _show(client.devices(), as_json)
    except NoServer:
        if find_service(service.server, None).is_named:
            raise
        _look_here(as_json)


@gpus.command()
@click.argument("device")
@service_options()
def release(device: str, service: Service) -> None:
    """Free DEVICE, which is quarantined because something was left on it: do so when you know that it is well.

    DEVICE is its id, a unique beginning of that, or the number of a GPU.

    Exit status: 1 it is not quarantined; 2 there is no such device; 5 no service runs.
    """
    with service.connect() as client:
        chosen = _chosen(device, client.devices())
        client.release_device(chosen.id)
    click.echo(f"{chosen.id}: released", err=True)


def _chosen(text: str, devices: Sequence[DeviceStatus]) -> DeviceStatus:
    """Return the one device that a text means; raise UserError where it is none or several."""
    from freight.launchers.cards import begins_with

    number = re.fullmatch(r"(?:GPU[ :]?)?(\d{1,6})", text.strip(), re.IGNORECASE | re.ASCII)
    ids = [one.id for one in devices if number and one.index == int(number[1])]
    found = ids or begins_with(text, [one.id for one in devices])
    if len(found) == 1:
        return next(one for one in devices if one.id == found[0])
    if found:
        raise UserError(f"{text} fits several devices: {', '.join(found)}", "write more of the id")
    raise UserError(f"there is no device {text}", f"there is: {', '.join(one.id for one in devices) or 'none'}")


def _look_here(as_json: bool) -> None:
    """Show the devices of this machine without a service; raise UserError, after that, for one that is not there."""
    from freight.cli.settings import settings
    from freight.launchers.devices import find_devices, look
    from freight.launchers.locks import lock_folder

    wrong: UserError | None = None
    try:
        inventory = find_devices(settings().local_devices(), os.environ)
    except UserError as error:
        wrong, inventory = error, find_devices(None, os.environ)
    seen = [look(inventory, device, lock_folder()) for device in inventory.all_devices()]
    statuses = [
        DeviceStatus(
            id=one.device.id,
            kind=one.device.kind,
            name=one.device.name,
            index=one.device.index,
            memory=one.device.memory,
            memory_used=one.usage.memory_used if one.usage else None,
            state=HELD if one.holder else FREE,
            holder=one.holder.what if one.holder else "",
            pid=one.holder.pid if one.holder else None,
            job=None,
        )
        for one in seen
    ]
    _show(statuses, as_json, {device.id for device in inventory.devices()})
    _tell(inventory)
    if wrong is not None:
        raise wrong


def _tell(inventory: "Inventory") -> None:
    """Say what the table cannot show: GPUs that do not work, or that there are none."""
    for trouble in inventory.troubles():
        click.echo(f"note: {trouble.what}; {trouble.fix}", err=True)
    if not inventory.troubles() and not any(device.is_gpu() for device in inventory.all_devices()):
        click.echo(f"note: no GPU found ({inventory.drivers()}); the CPU is used", err=True)


def _show(devices: Sequence[DeviceStatus], as_json: bool, usable: set[str] | None = None) -> None:
    """Print the devices; those that are not `usable` (None: all are) are marked in the table."""
    if as_json:
        print_json({"devices": devices})
        return
    rows: list[tuple[str, ...]] = []
    for one in devices:
        number = "-" if one.index is None else str(one.index)
        outside = "" if usable is None or one.id in usable else " (Freight may not use it)"
        rows.append((number, one.id, one.name or "-", _memory(one), f"{_state(one)}{outside}"))
    print_table(("GPU", "DEVICE", "NAME", "MEMORY", "STATE"), rows, shrinks=("NAME", "STATE"))


def _memory(device: DeviceStatus) -> str:
    if device.memory is None:
        return "-"
    # Of a GPU that cannot be read nobody knows.
    known = device.memory_used is not None and device.pid != 0
    return (
        f"{(device.memory_used or 0) / 1e9:.1f}/{device.memory / 1e9:.1f} GB"
        if known
        else f"?/{device.memory / 1e9:.1f} GB"
    )


def _state(device: DeviceStatus) -> str:
    from freight.launchers.devices import held_words

    if device.state == LEASED:
        return f"leased by job {device.job}" if device.job else f"leased: {device.holder}" if device.holder else LEASED
    if device.state == QUARANTINED:
        return f"{QUARANTINED}: {device.holder}; free it by hand: freight gpus release {device.id}"
    return held_words(device.pid, device.holder) if device.state == HELD else device.state
