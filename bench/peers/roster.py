"""Who takes part, with which settings, how each is started, and where its answers are."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.checks import batch_answers
from bench.engines import MODEL, ROOT

ENVIRONMENTS: Final = ROOT / "build" / "peers"
DEFAULT: Final = "default"
BEST: Final = "best"
INPUT_ORDER: Final = "order input"
OWN_ENGINE: Final = "own engine"
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD")

Answers = Iterator[tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Task:
    """One run: the file as the peer reads it, the engine, a folder of the run's own, and how it is set."""

    source: Path
    url: str
    folder: Path
    setting: str
    window: int

    @property
    def output(self) -> Path:
        """Return the folder of what the peer writes."""
        return self.folder / "output"


@dataclass(frozen=True, slots=True)
class Peer:
    """One program. `requirement` is what pip installs for it, if anything; `prepare` rewrites the file beforehand."""

    name: str
    requirement: str
    about: Mapping[str, str]
    command: Callable[[Task], list[str]]
    answers: Callable[[Task], Answers]
    prepare: Callable[[Path, Path], None] | None = None

    @property
    def python(self) -> Path:
        """Return the interpreter of its environment."""
        return ENVIRONMENTS / self.name / "bin" / "python" if self.requirement else Path(sys.executable)

    def is_installed(self) -> bool:
        """Return whether its environment was made."""
        return self.python.exists()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of any run: a home of its own, nobody told of it, and little else of this process's own.

    Modules are compiled once, as of whatever is installed.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {
        **kept,
        "HOME": str(folder / "home"),
        "FREIGHT_DATA": str(folder / "home" / "freight"),
        "PYTHONPATH": str(ROOT),
        # The peers' own switches against sending anything to their makers, or fetching from them.
        "TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # curator counts tokens with a vocabulary that it would fetch; a package that it needs brings the same one.
        "TIKTOKEN_CACHE_DIR": _vocabulary(),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def _vocabulary() -> str:
    found = ENVIRONMENTS.glob("curator/lib/*/site-packages/litellm/litellm_core_utils/tokenizers")
    return str(next(found, ""))


def _adapter(name: str, module: str) -> Callable[[Task], list[str]]:
    """Return the command of an adapter that is a program of ours in the peer's environment."""

    def command(task: Task) -> list[str]:
        return [
            str(PEERS[name].python), "-m", f"bench.peers.{module}", "--input", str(task.source), "--url", task.url,
            "--model", MODEL, "--output", str(task.output), "--setting", task.setting, "--window", str(task.window),
        ]  # fmt: skip

    return command


def _freight(task: Task) -> list[str]:
    order = ["--order", "input"] if task.setting == INPUT_ORDER else []
    output = str(batch_file(task))
    return [sys.executable, "-m", "freight", "run", str(task.source), "-o", output, "--model", task.url, *order]


def batch_file(task: Task) -> Path:
    """Return where those that write a batch file's answers put them."""
    return task.output / "out.jsonl"


def _batch_answers(task: Task) -> Answers:
    return batch_answers(batch_file(task))


def _flexllm(task: Task) -> list[str]:
    best = ["-c", str(task.window), "--no-track-cost", "--save-input", "false"] if task.setting == BEST else []
    return [
        str(ENVIRONMENTS / "flexllm" / "bin" / "flexllm"), "batch", str(task.source),
        "-o", str(task.output / "out.jsonl"), "-m", MODEL, "--base-url", f"{task.url}/v1", "--api-key", "none", *best,
    ]  # fmt: skip


def _flexllm_input(source: Path, target: Path) -> None:
    """Write the file in the form that `flexllm batch` reads: messages, and parameters of a record's own."""
    with source.open("rb") as file, target.open("w") as out:
        for raw in file:
            body = json.loads(raw)["body"]
            messages = body.pop("messages")
            out.write(json.dumps({"messages": messages, "params": body}) + "\n")


def _flexllm_answers(task: Task) -> Answers:
    with (task.output / "out.jsonl").open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            yield f"row-{line['index']}", line.get("output") if line.get("status") == "success" else None


def _saturate_answers(task: Task) -> Answers:
    printed = subprocess.run(
        [str(PEERS["saturate"].python), "-m", "bench.peers.saturate_pump", "--collect", str(task.output)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    ).stdout  # fmt: skip
    for raw in printed.splitlines():
        custom_id, content = json.loads(raw)
        yield custom_id, content


def _curator_answers(task: Task) -> Answers:
    for path in sorted(task.output.rglob("responses_*.jsonl")):
        with path.open("rb") as file:
            for raw in file:
                line = json.loads(raw)
                custom_id = line["generic_request"]["original_row"]["custom_id"]
                yield custom_id, None if line.get("response_errors") else line["response_message"]


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer(
            "freight", "",
            {
                DEFAULT: "`freight run IN -o OUT --model URL`, on an engine that is up",
                INPUT_ORDER: "with `--order input`",
                OWN_ENGINE: "`freight run IN -o OUT --model NAME` starts the engine, as it is used; others cannot",
            },
            _freight, _batch_answers,
        ),
        Peer(
            "bare", "",
            {
                DEFAULT: "an aiohttp session, 100 connections, uvloop; not durable, no retries",
                BEST: "with as many requests in flight as the engine runs",
            },
            _adapter("bare", "bare"), _batch_answers,
        ),
        Peer(
            "saturate", "saturate==0.2.0",
            {
                DEFAULT: "`pump(…)`, whose window adapts",
                BEST: "`window=Fixed(N)` with as many as the engine runs, `flush_every=500`",
            },
            _adapter("saturate", "saturate_pump"), _saturate_answers,
        ),
        Peer(
            "flexllm", "flexllm==0.17.10",
            {
                DEFAULT: "`flexllm batch IN -o OUT --base-url URL`, 10 in flight",
                BEST: "`-c N` with as many as the engine runs, `--no-track-cost --save-input false`",
            },
            _flexllm, _flexllm_answers, _flexllm_input,
        ),
        Peer(
            "curator", "bespokelabs-curator==0.1.31",
            {
                DEFAULT: '`curator.LLM(…, backend="openai")`, 200 requests and 100,000 tokens a minute',
                BEST: "`max_concurrent_requests=N` with as many as the engine runs, and no limits a minute",
            },
            _adapter("curator", "curator_llm"), _curator_answers,
        ),
    )
}  # fmt: skip
