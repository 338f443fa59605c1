"""Why something waits, in words that stay the same for as long as the reason does."""

from collections.abc import Mapping, Sequence
from typing import Final

from freight.core.snapshot import MOST_STARTS, Need, Trouble, pause_s, tries

_FEW: Final = 3


def starts_again(pause: float, words: str) -> str:
    """Say that a start is tried again after a pause. Not how much of it is left: that changes all the time."""
    return f"starting again {pause:g} s after this: {words}"


def starts_again_after(troubles: Sequence[Trouble]) -> str:
    """Say that a start is tried again after the pause that so much trouble asks for."""
    return starts_again(pause_s(tries(troubles)), _last(troubles).words)


def gives_up(troubles: Sequence[Trouble]) -> str:
    """Say that no start is tried any more."""
    return f"it would not start: {_last(troubles).words}"


def lacks_devices(need: Need, there: int) -> str:
    """Say that there are only `there` devices, which is less than needed."""
    if need.devices == 1:
        return "there is no GPU" if need.gpus else "there is no device"
    return f"it needs {need.gpus} GPUs; there {'is' if there == 1 else 'are'} {there or 'none'}"


def waits(need: Need, ahead: int, obstacles: str) -> str:
    """Say that something waits behind `ahead` jobs, and what else keeps it from its places."""
    words = [f"it needs {need.gpus} GPUs"] if need.gpus > 1 else []
    words += [f"{ahead} job{'s' if ahead > 1 else ''} ahead"] if ahead else []
    return "; ".join([*words, obstacles] if obstacles else words)


def obstacles(are_gpus: bool, places: Mapping[str, str], labels: Mapping[str, str], troubles: Sequence[Trouble]) -> str:
    """Say what keeps something from its places; "" when nothing does.

    `places` says of each place what is there ("held by nightly", "" for nothing), `labels` what the places are called,
    where that is not their id.
    """
    worn_out = [trouble for trouble in troubles if trouble.count >= MOST_STARTS and trouble.place in places]
    useless = {trouble.place for trouble in worn_out}
    taken: dict[str, list[str]] = {}
    for place, what in places.items():
        if what and place not in useless:
            taken.setdefault(what, []).append(labels.get(place, place))
    words = [f"{_listed(of, len(places), are_gpus)} {what}" for what, of in taken.items()]
    words += [f"on {labels.get(t.place, t.place)} it would not start: {_first_line(t.words)}" for t in worn_out]
    return "; ".join(words)


def _last(troubles: Sequence[Trouble]) -> Trouble:
    return max(troubles, key=lambda trouble: trouble.at)


def _first_line(words: str) -> str:
    # A server's last words may be many lines, and more is said after them.
    return words.partition("\n")[0]


def _listed(labels: list[str], of: int, are_gpus: bool) -> str:
    if len(labels) == 1:
        return f"{labels[0]} is"
    if are_gpus and len(labels) == of:
        return "both GPUs are" if of == 2 else f"all {of} GPUs are"
    if len(labels) > _FEW:
        return f"{len(labels)} {'GPUs' if are_gpus else 'places'} are"
    return f"{', '.join(labels[:-1])} and {labels[-1]} are"
