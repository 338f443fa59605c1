"""The files that benchmarks run: `python -m bench.workloads W3 FILE [--factor 0.1]`.

Each is made from a seed, line by line, and belongs to an engine of the simulator on which it is run. How long an
answer is stands in the prompt, so that every client is answered alike whatever it sends along. Sizes shrink by a
factor for quick runs.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.simengine.prompt import TOKEN_BYTES

SEED: Final = 20_260
URL: Final = "/v1/chat/completions"
MOST_TOKENS: Final = 4096
_WORD_BYTES: Final = 8
_WORDS: Final = [f"{number:07d}" for number in range(10_000)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one record says, what all of its group say before it, and the tokens of its answer."""

    text: str
    answer_tokens: int
    system: str = ""


Make = Callable[[random.Random, float], Iterator[Prompt]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A file and its engine. `slots` is how many requests that engine runs at once; 0: no limit, it is instant.

    `faults` are the engine's; the client is killed once, and started again, when `kill_at` of the records are answered.
    """

    name: str
    about: str
    make: Make
    engine: tuple[str, ...]
    slots: int
    speed: float
    faults: tuple[str, ...] = ()
    kill_at: float = 0.0

    @property
    def window(self) -> int:
        """Return the requests in flight that a client is best told to keep."""
        return self.slots or 64

    def engine_options(self) -> list[str]:
        """Return the simulator's command line."""
        faults = [word for fault in self.faults for word in ("--fault", fault)]
        return [*self.engine, "--speed", f"{self.speed:g}", *faults]


def text_of(rng: random.Random, tokens: int) -> str:
    """Return a text of about that many tokens, which begins like no other."""
    return " ".join(rng.choices(_WORDS, k=max(1, tokens * TOKEN_BYTES // _WORD_BYTES)))


def lognormal(rng: random.Random, median: float, sigma: float) -> int:
    """Return a length in tokens."""
    return min(MOST_TOKENS, max(1, round(median * math.exp(sigma * rng.gauss(0, 1)))))


def scaled(count: int, factor: float) -> int:
    """Return a number of records for a run of another size, never fewer than eight."""
    return max(min(count, 8), round(count * factor))


def mixed(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Yield prompts and answers of lognormal lengths."""
    for _ in range(count):
        yield Prompt(text_of(rng, lognormal(rng, 240, 0.8)), lognormal(rng, 160, 0.8))


def by_length(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Yield the same, the shortest first."""
    prompts = list(mixed(rng, count))
    prompts.sort(key=lambda prompt: (prompt.answer_tokens, len(prompt.text)))
    yield from prompts


def grouped(rng: random.Random, groups: int, each: int, shared: int, own: int, answer: int) -> Iterator[Prompt]:
    """Yield groups that share a prompt, shuffled."""
    texts = [text_of(rng, shared) for _ in range(groups)]
    places = [group for group in range(groups) for _ in range(each)]
    rng.shuffle(places)
    for place in places:
        yield Prompt(text_of(rng, own), max(1, round(rng.uniform(0.5, 1.5) * answer)), texts[place])


def documents(rng: random.Random, count: int, questions: int) -> Iterator[Prompt]:
    """Yield questions about documents of 8 kB after one prompt of 5 kB, shuffled."""
    system = text_of(rng, 5000 // TOKEN_BYTES)
    texts = [text_of(rng, 8000 // TOKEN_BYTES) for _ in range(count)]
    places = [document for document in range(count) for _ in range(questions)]
    rng.shuffle(places)
    for place in places:
        yield Prompt(f"{texts[place]}\n{text_of(rng, 24)}", round(rng.uniform(16, 48)), system)


def unshared(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Yield prompts that have nothing in common."""
    for _ in range(count):
        yield Prompt(text_of(rng, round(rng.uniform(200, 600))), round(rng.uniform(64, 192)))


def copies(rng: random.Random, count: int, each: int) -> Iterator[Prompt]:
    """Yield each of some short prompts several times, shuffled.

    The answers are what takes time: the prompt of a copy is in the engine's cache, so that it costs less to read again.
    None is so long that it alone takes most of a run.
    """
    prompts = [Prompt(text_of(rng, 40), round(rng.uniform(64, 192))) for _ in range(count // each)]
    places = [place for place in range(len(prompts)) for _ in range(each)]
    rng.shuffle(places)
    for place in places:
        yield prompts[place]


def tiny(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Yield small prompts with small answers."""
    filler = "x" * 160
    for number in range(count):
        yield Prompt(f"Item {number} {rng.randrange(10**9)} {filler}", 16)


_B200: Final = ("--profile", "b200-30b", "--max-num-seqs", "256")
# The same with a cache that holds what runs and little more.
_TIGHT: Final = ("--profile", "b200-30b", "--max-num-seqs", "64", "--blocks", "12288", "--max-model-len", "32768")
_TIGHTER: Final = ("--profile", "b200-30b", "--max-num-seqs", "64", "--blocks", "6144", "--max-model-len", "32768")
_INSTANT: Final = ("--profile", "instant")

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(
            "W1", "20,000 requests of lognormal lengths",
            lambda rng, factor: mixed(rng, scaled(20_000, factor)), _B200, 256, 4,
        ),
        Workload(
            "W2", "the same, sorted by length",
            lambda rng, factor: by_length(rng, scaled(20_000, factor)), _B200, 256, 4,
        ),
        Workload(
            "W3", "400 groups of 30 that share 2,000 tokens, 200 of their own, shuffled",
            lambda rng, factor: grouped(rng, scaled(400, factor), 30, 2000, 200, 32), _TIGHT, 64, 8,
        ),
        Workload(
            "W3b", "8 questions about each of 100 documents of 8 kB, after a prompt of 5 kB, shuffled",
            lambda rng, factor: documents(rng, scaled(100, factor), 8), _TIGHTER, 64, 2,
        ),
        Workload(
            "W4", "10,000 requests with nothing in common",
            lambda rng, factor: unshared(rng, scaled(10_000, factor)), _B200, 256, 4,
        ),
        Workload("W5-24", "24 requests of lognormal lengths", lambda rng, _factor: mixed(rng, 24), _B200, 256, 1),
        Workload("W5-300", "300 requests of lognormal lengths", lambda rng, _factor: mixed(rng, 300), _B200, 256, 1),
        Workload(
            "W6", "150,000 tiny requests, answered at once",
            lambda rng, factor: tiny(rng, scaled(150_000, factor)), _INSTANT, 0, 1,
        ),
        Workload(
            "W6-1M", "1,000,000 tiny requests, answered at once",
            lambda rng, factor: tiny(rng, scaled(1_000_000, factor)), _INSTANT, 0, 1,
        ),
        Workload(
            "W7", "20,000 tiny requests; one in twenty is refused with a 503, and the client is killed once",
            lambda rng, factor: tiny(rng, scaled(20_000, factor)), _INSTANT, 0, 1, ("503=0.05",), 0.3,
        ),
    )
}  # fmt: skip


def body_of(prompt: Prompt) -> dict[str, object]:
    """Return the body of a chat request; the answer's length is in the text."""
    messages = [{"role": "user", "content": f"{prompt.text} STUB:tokens={prompt.answer_tokens}"}]
    if prompt.system:
        messages.insert(0, {"role": "system", "content": prompt.system})
    return {"messages": messages, "max_tokens": MOST_TOKENS}


def write_input(path: Path, prompts: Iterator[Prompt]) -> int:
    """Write a batch file; return how many records it has."""
    number = -1
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            line = {"custom_id": f"row-{number}", "method": "POST", "url": URL, "body": body_of(prompt)}
            file.write(json.dumps(line) + "\n")
    return number + 1


def write_workload(path: Path, workload: Workload, factor: float = 1.0) -> int:
    """Write a workload's file, the same one each time; return how many records it has."""
    return write_input(path, workload.make(random.Random(SEED), factor))


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(prog="python -m bench.workloads", description=__doc__)
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--factor", type=float, default=1.0)
    given = parser.parse_args()
    records = write_workload(given.file, WORKLOADS[given.name], given.factor)
    print(f"{records:,} records, {given.file.stat().st_size / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
