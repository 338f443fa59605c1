"""How many GPUs a server's own arguments spread a model over."""

from collections.abc import Mapping, Sequence
from math import prod

from freight.engines.arguments import whole_number
from freight.errors import UserError


def check_parallel(name: str, options: Mapping[str, str], sizes: Sequence[str], gpus: int) -> None:
    """Raise UserError when the `sizes` among a model's own options need another number of GPUs than it gets.

    One that gets none runs on the CPU, where they may stand for something else.
    """
    named = {size: options[size] for size in sizes if size in options}
    wanted = prod(whole_number(value) or 1 for value in named.values())
    if named and gpus and wanted != gpus:
        shown = " ".join(f"{size} {value}" for size, value in named.items())
        raise UserError(
            f"the arguments of model {name} ({shown}) need {wanted} GPUs per worker, and it gets {gpus}",
            f"set gpus = {wanted} in its entry (--gpus {wanted}), or leave the arguments out",
        )
