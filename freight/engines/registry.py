"""The engines, by name."""

from collections.abc import Sequence
from typing import Final

from freight.core.device import Device
from freight.core.model import EngineName, ModelSpec
from freight.engines.base import Engine
from freight.engines.checkpoint import check_fits
from freight.engines.command import CommandEngine
from freight.engines.endpoint import EndpointEngine
from freight.engines.llamacpp import LlamaCppEngine
from freight.engines.sglang import SglangEngine
from freight.engines.vllm import VllmEngine

_ENGINES: Final[dict[EngineName, Engine]] = {
    EngineName.LLAMACPP: LlamaCppEngine(),
    EngineName.VLLM: VllmEngine(),
    EngineName.SGLANG: SglangEngine(),
    EngineName.ENDPOINT: EndpointEngine(),
    EngineName.COMMAND: CommandEngine(),
}


def engine_of(name: EngineName) -> Engine:
    """Return the engine called `name`."""
    return _ENGINES[name]


def check_placement(spec: ModelSpec, gpus: int, devices: Sequence[Device]) -> None:
    """Raise UserError when a worker of the model can never run on `gpus` of these devices (0: on the CPU)."""
    engine_of(spec.entry.engine).check(spec, gpus)
    check_fits(spec, gpus, devices)
