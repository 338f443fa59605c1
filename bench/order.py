"""What the order of dispatch costs: `python -m bench.order [--records N]`.

Reads one file of each kind twice, with and without the order, and prints the seconds and the memory that the order
adds. Each reading is a process of its own.
"""

import argparse
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.race import note
from freight.control.inputs import InputFile
from freight.control.intake import Limits, Wishes, scan
from freight.core.record import Rules

_WORDS: Final = [f"word{number}" for number in range(5000)]


def _words(rng: random.Random, size: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(size // 8))


def tiny(records: int, rng: random.Random) -> Iterator[str]:
    """Small records that share nothing."""
    return (f"Item {rng.randrange(10**9)} {'x' * 160}" for _ in range(records))


def grouped(records: int, rng: random.Random) -> Iterator[str]:
    """Groups of 30 records that share 1,600 bytes, shuffled."""
    groups = [_words(rng, 1600) for _ in range(max(1, records // 30))]
    return (f"{rng.choice(groups)} {_words(rng, 160)}" for _ in range(records))


def two_prompts(records: int, rng: random.Random) -> Iterator[str]:
    """One of two prompts of 2 kB, and something of its own."""
    prompts = [_words(rng, 2000) for _ in range(2)]
    return (f"{rng.choice(prompts)} {_words(rng, 160)}" for _ in range(records))


def one_prompt(records: int, rng: random.Random) -> Iterator[str]:
    """One prompt of 2 kB, and something of its own."""
    prompt = _words(rng, 2000)
    return (f"{prompt} {_words(rng, 160)}" for _ in range(records))


def documents(records: int, rng: random.Random) -> Iterator[str]:
    """A prompt of 5 kB that all have, one of many documents of 8 kB, and a question; a tenth as many records."""
    prompt, count = _words(rng, 5000), records // 10
    texts = [_words(rng, 8000) for _ in range(max(1, count // 8))]
    return (f"{prompt} {rng.choice(texts)} {_words(rng, 80)}" for _ in range(count))


KINDS: Final[dict[str, Callable[[int, random.Random], Iterator[str]]]] = {
    kind.__name__: kind for kind in (tiny, grouped, two_prompts, one_prompt, documents)
}


def write_input(path: Path, prompts: Iterator[str]) -> None:
    """Write a chat request for each prompt."""
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
            file.write(json.dumps({"custom_id": f"row-{number}", "url": "/v1/chat/completions", "body": body}) + "\n")


def measure(path: Path, wishes: Wishes) -> tuple[float, int, int, int]:
    """Return the CPU seconds of intake, the highest memory in bytes, the records, and how many have a place."""
    before = time.process_time()
    file = InputFile(path, path.name)
    index = scan(file, Rules(), Limits(10_000_000), lambda problems: None, wishes=wishes)
    took = time.process_time() - before
    file.close()
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, index.records, len(index.order)


def main() -> None:
    """Measure every kind of file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=150_000)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in arguments.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "in.jsonl"
            write_input(path, KINDS[name](arguments.records, random.Random(1)))
            figures: list[tuple[float, int, int, int]] = []
            for wishes in (Wishes(), Wishes(order=True)):
                with context.Pool(1) as pool:
                    figures.append(pool.apply(measure, (path, wishes)))
            (plain_s, plain, records, _), (order_s, ordered, _, placed) = figures
            note({"kind": "order", "file": name, "records": records, "added_s": order_s - plain_s})
            print(
                f"{name:12} {records:9,} records {path.stat().st_size / 1e6:8.0f} MB: "
                f"intake {plain_s:6.2f} s, "
                f"with the order {order_s - plain_s:+6.2f} s, {(ordered - plain) / records:+6.1f} bytes a record, "
                f"{placed:,} in an order of their own"
            )


if __name__ == "__main__":
    main()
