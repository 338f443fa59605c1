"""Names for jobs: what may be one, and readable ones for jobs that were given none."""

import re
from collections.abc import Callable, Sequence
from typing import Final

from freight.errors import UserError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RULE: Final = "use up to 64 of A-Z, a-z, 0-9, _ . and -, beginning with a letter or digit"
_FIRST: Final = (
    "amber", "ample", "brisk", "bronze", "calm", "clear", "cobalt", "copper", "coral", "crisp", "dawn", "deep",
    "eager", "early", "even", "fair", "fleet", "fresh", "gentle", "golden", "grand", "green", "indigo", "ivory",
    "keen", "late", "lively", "lucid", "maple", "mellow", "misty", "noble", "olive", "pearl", "plain", "proud",
    "quick", "quiet", "rapid", "royal", "ruby", "sandy", "sharp", "silver", "smooth", "solid", "steady", "sunny",
    "swift", "tidy", "velvet", "vivid", "warm", "wide",
)  # fmt: skip
_SECOND: Final = (
    "anchor", "arch", "barge", "bay", "beacon", "bridge", "brook", "canal", "cargo", "cedar", "cliff", "comet",
    "cove", "crane", "creek", "delta", "dock", "dune", "ferry", "field", "fjord", "forge", "garden", "glade",
    "grove", "gull", "harbor", "heron", "hill", "island", "lagoon", "lantern", "ledge", "marsh", "meadow", "mill",
    "orchard", "otter", "pier", "pine", "plain", "pond", "quay", "reef", "ridge", "river", "sail", "shore",
    "spruce", "stone", "tern", "tide", "valley", "willow",
)  # fmt: skip


def check_name(name: str) -> None:
    """Raise UserError for what cannot be a job's name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a job's name", _RULE)


def readable_name(pick: Callable[[Sequence[str]], str], is_taken: Callable[[str], bool]) -> str:
    """Return a name that nobody has, made of words that `pick` chooses."""
    while is_taken(
        name := f"{pick(_FIRST)}-{pick(_SECOND)}-{pick('23456789')}{pick('23456789abcdefghjkmnpqrstuvwxyz')}"
    ):
        continue
    return name
