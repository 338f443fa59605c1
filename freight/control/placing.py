"""What a model's worker takes of a machine, and what is refused because no machine of the pool has it."""

import os
from collections.abc import Sequence

from freight.core.device import Device
from freight.core.model import ModelEntry, ModelSpec
from freight.core.snapshot import Need
from freight.engines.registry import check_placement, engine_of
from freight.errors import UserError


def needs_device(model: ModelSpec) -> bool:
    """Return whether the model's workers start a server of their own."""
    return engine_of(model.entry.engine).starts_server


def gpus_of(model: ModelSpec, asked: int | None, devices: Sequence[Device]) -> int:
    """Return how many GPUs a worker takes: as asked for, else as the model's entry says, else one where there are any.

    0 is a CPU device.
    """
    if not needs_device(model):
        return 0
    if asked is not None:
        return asked
    if model.entry.gpus is not None:
        return model.entry.gpus
    return int(any(device.is_gpu() for device in devices))


def need_of(model: ModelSpec, gpus: int) -> Need:
    """Return what one worker of the model takes."""
    return Need(gpus, _store(model.entry.sources()), engine_of(model.entry.engine).staggers)


def _store(sources: list[str]) -> str:
    """Return the file system that a model's file or folder is on; "" where it is none that can be seen."""
    try:
        return str(os.stat(sources[0]).st_dev) if sources else ""  # noqa: PTH116
    except OSError:
        return ""


def check_gpus(name: str, entry: ModelEntry, asked: int | None) -> None:
    """Raise UserError when GPUs are asked for, for a model whose server runs already."""
    if asked and not engine_of(entry.engine).starts_server:
        raise UserError(f"--gpus {asked} has no effect on model {name}: its server runs already", "leave it out")


def check_place(who: str, model: ModelSpec, asked: int | None, devices: Sequence[Device]) -> int:
    """Return how many GPUs a worker takes; raise UserError for an ask that these devices can never meet.

    `who` is what the error calls the asker, as in "the job".
    """
    if not needs_device(model):
        check_gpus(model.name, model.entry, asked)
        return 0
    gpus = gpus_of(model, asked, devices)
    there = sum(device.is_gpu() for device in devices)
    if gpus > there:
        have = f"the largest machine here has {there}" if there else "this machine's pool has CPU devices only"
        fix = f"use --gpus {there}" if there else "leave out --gpus, or set gpus = 0 in the model's entry for the CPU"
        raise UserError(f"{who} asks for {gpus} GPUs per worker; {have}", f"{fix} (freight gpus shows what there is)")
    if gpus == 0 and there == len(devices):
        raise UserError(
            f"model {model.name} runs on the CPU, and pools.local.devices names GPUs only",
            'add "cpu:0" to it, or set gpus = 1 in the model\'s entry',
        )
    check_placement(model, gpus, devices)
    return gpus
