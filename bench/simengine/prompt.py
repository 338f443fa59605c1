"""What a request is to the physics: its prompt in tokens and blocks, and how long its answer will be.

There is no tokenizer: four bytes are a token. Tools come first, then the messages in order, each after its role, so
that requests that begin alike share blocks.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import msgspec

from bench.simengine.asks import READERS, Ask, AskError
from bench.simengine.blocks import BLOCK_TOKENS
from bench.simengine.physics import Request

TOKEN_BYTES: Final = 4
BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
DIGEST_CHARS: Final = 16
DEFAULT_OUTPUT_TOKENS: Final = 128
GENERATING: Final = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses"))
# What an endless context is to an engine that reads and makes nothing.
NO_LIMIT: Final = 1 << 40

_FILLER: Final = " and so on and on" * 1024
_TOKENS: Final = re.compile(r"STUB:tokens=(\d+)")
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of answers' lengths, in tokens."""

    median: float
    sigma: float

    def draw(self, digest: bytes) -> int:
        """Return the length that belongs to a digest: the same for the same one."""
        uniform = (int.from_bytes(digest[8:14], "big") + 0.5) / (1 << 48)
        return max(1, round(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(uniform))))


class Work(msgspec.Struct):
    """What one request asks of the engine. `was_cut`: the answer ends for want of tokens, not by itself."""

    prompt: bytes
    digest: str
    prompt_tokens: int
    output_tokens: int
    was_cut: bool = False

    def content(self, copies: int) -> str:
        """Return the answer's text: the request's digest, and words up to its length."""
        size = TOKEN_BYTES * self.output_tokens // copies - DIGEST_CHARS
        if size <= 0:
            return self.digest
        filler = _FILLER if size <= len(_FILLER) else _FILLER * -(-size // len(_FILLER))
        return self.digest + filler[:size]

    def request(self, tag: object = None) -> Request:
        """Return it for the physics, with a key for each whole block of the prompt."""
        return Request(self.prompt_tokens, self.output_tokens, chain_of(self.prompt), tag)


def render(ask: Ask) -> bytes:
    """Return all the text that the request has an engine read, in the order in which it is read."""
    parts = [f"{role}\n{text}" for role, text in ask.pieces]
    if ask.tools:
        parts.insert(0, json.dumps(ask.tools))
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def chain_of(prompt: bytes) -> list[int]:
    """Return a key for each whole block of the prompt, which stands for all the text up to its end."""
    key = 0
    chain: list[int] = []
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = hash((key, prompt[start : start + BLOCK_BYTES]))
        chain.append(key)
    return chain


def read_work(path: str, ask: Ask, lengths: Lengths | None = None, context: int = NO_LIMIT) -> Work:
    """Return what a request for `path` asks; raise AskError when its prompt leaves no room in the context.

    The answer's length is what a marker `STUB:tokens=N` in the text says, else drawn from `lengths` and cut at
    max_tokens, else max_tokens. Several copies are one long answer.
    """
    prompt = render(ask)
    digest = hashlib.sha256(prompt).digest()
    tokens = max(1, -(-len(prompt) // TOKEN_BYTES))
    work = Work(prompt, digest.hex()[:DIGEST_CHARS], tokens, 0)
    generates = path in GENERATING
    room = context - tokens
    if room < generates:
        raise AskError(f"prompt of {tokens} tokens; the model's context has {context}", "messages")
    if generates:
        length, work.was_cut = _length_of(ask, digest, lengths)
        work.output_tokens = min(length * ask.copies, room)
        work.was_cut |= work.output_tokens < length * ask.copies
    return work


def _length_of(ask: Ask, digest: bytes, lengths: Lengths | None) -> tuple[int, bool]:
    """Return how many tokens an answer has, and whether it was cut at what was asked for at most."""
    most = ask.max_tokens if isinstance(ask.max_tokens, int) and ask.max_tokens > 0 else None
    if "STUB:tokens=" in ask.text and (mark := _TOKENS.search(ask.text)):
        return max(1, int(mark[1])), False
    if lengths is None:
        return most or DEFAULT_OUTPUT_TOKENS, False
    drawn = lengths.draw(digest)
    return (drawn, False) if most is None or drawn <= most else (most, True)


def expected_content(path: str, body: bytes, lengths: Lengths | None = None, context: int = NO_LIMIT) -> str:
    """Return what an engine with a profile answers to `body`."""
    ask = READERS[path](body)
    return read_work(path, ask, lengths, context).content(ask.copies)
