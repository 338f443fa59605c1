"""NVIDIA cards for tests on machines without any: the driver's library is a stand-in, all above it is real.

    cards = Cards(folder, card("aaaa"), card("bbbb", used_mb=300))
    done = box.freight("gpus", **cards.environment())
    cards.change("GPU-bbbb", used_mb=60_000, processes={os.getpid(): 59_000})

The cards may be changed at any time, also while programs look at them. `python -m tests.nvml.occupy MB -- COMMAND`
runs a command that is on the cards it was given, with so much memory on each, for as long as it lives.
"""

from tests.nvml.cards import Card, Cards, card, instance

__all__ = ["Card", "Cards", "card", "instance"]
