"""The blocks of a simulated KV cache: counted, shared by prefix, and evicted least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCK_TOKENS: Final = 16


def blocks_of(tokens: int) -> int:
    """Return how many blocks `tokens` tokens take."""
    return -(-tokens // BLOCK_TOKENS)


class _Run:
    """Freed blocks that nobody can look up: the tails of prompts and what was generated."""

    __slots__ = ()


class BlockCache:
    """A pool of `capacity` blocks.

    A block of a prompt is known by its key, which stands for all the text up to its end; it stays findable
    after its last user has left, until its place is needed. All other blocks are private: they are only counted.
    """

    def __init__(self, capacity: int) -> None:
        """Make a pool of blank blocks."""
        self.capacity = capacity
        self.in_use = 0
        # The keyed blocks that are there, with how many requests use each.
        self._users: dict[int, int] = {}
        # Those that nobody uses, least recently used first, and how many blocks each entry is.
        self._idle: OrderedDict[int | _Run, int] = OrderedDict()
        self._idle_blocks = 0

    @property
    def free(self) -> int:
        """Blocks that a request could take: blank ones, and those that are only kept."""
        return self.capacity - self.in_use

    @property
    def kept(self) -> int:
        """Blocks that nobody uses and that still hold what they held."""
        return self._idle_blocks

    def keys(self) -> frozenset[int]:
        """Return the keys of all blocks that can be found."""
        return frozenset(self._users)

    def match(self, chain: Sequence[int], most: int) -> int:
        """Return how many of the first `most` keys of `chain` are there, up to the first that is not."""
        users = self._users
        hits = 0
        for key in chain[:most]:
            if key not in users:
                break
            hits += 1
        return hits

    def take(self, chain: Sequence[int], hits: int, blocks: int) -> int | None:
        """Give a request `blocks` blocks, the first `hits` of them by key, and let those it adds be found.

        Returns how many keys of the chain it holds; None, having changed nothing, when there are too few blocks.
        """
        users, idle = self._users, self._idle
        woken = 0
        for key in chain[:hits]:
            woken += not users[key]
        if woken + blocks - hits > self.free:
            return None
        for key in chain[:hits]:
            if not users[key]:
                del idle[key]
            users[key] += 1
        self._idle_blocks -= woken
        self.in_use += woken
        self.take_private(blocks - hits)
        held = hits
        for key in chain[hits:]:
            if key in users:
                break  # Only a prompt's last block, which is always computed anew; the copy is private.
            users[key] = 1
            held += 1
        return held

    def take_private(self, blocks: int) -> None:
        """Take `blocks` blocks, which must be free, evicting what was used least recently."""
        self._evict(blocks - (self.free - self._idle_blocks))
        self.in_use += blocks

    def give_back(self, chain: Sequence[int], held: int, private: int) -> None:
        """Take back what a request had: `held` keys of its chain and `private` other blocks.

        The last block of a prompt goes first, as it is of use to the fewest.
        """
        users, idle = self._users, self._idle
        if private:
            idle[_Run()] = private
        left = 0
        for index in range(held - 1, -1, -1):
            key = chain[index]
            count = users[key] - 1
            users[key] = count
            if not count:
                idle[key] = 1
                left += 1
        self._idle_blocks += private + left
        self.in_use -= private + left

    def _evict(self, blocks: int) -> None:
        idle = self._idle
        while blocks > 0:
            entry, size = idle.popitem(last=False)
            taken = min(size, blocks)
            if size > taken:
                idle[entry] = size - taken
                idle.move_to_end(entry, last=False)
            elif not isinstance(entry, _Run):
                del self._users[entry]
            blocks -= taken
            self._idle_blocks -= taken
