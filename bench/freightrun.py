"""`freight run` in a folder of its own, on engines of the simulator that run already or that it starts itself."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.checks import Expected, Verdict, batch_answers
from bench.engines import MODEL, ROOT
from bench.measuring import Took, run
from bench.peers.roster import environment


@dataclass(frozen=True, slots=True)
class Span:
    """When engines were busy, by the machine's monotonic clock, and what they did in all."""

    first_request_at: float
    last_answer_at: float
    requests: int
    cached_share: float
    by_engine: list[int]

    @property
    def seconds(self) -> float:
        """Return the time from the first request to the last answer, not sped up."""
        return self.last_answer_at - self.first_request_at


def span_of(summaries: Sequence[dict[str, Any]]) -> Span:
    """Return what several engines did together; those that were asked nothing do not count."""
    asked = [summary for summary in summaries if summary["requests"]]
    return Span(
        first_request_at=min(summary["first_request_at"] for summary in asked),
        last_answer_at=max(summary["last_answer_at"] for summary in asked),
        requests=sum(summary["requests"] for summary in asked),
        cached_share=sum(summary.get("cache_hits", 0) for summary in asked)
        / max(1, sum(summary.get("cache_queries", 0) for summary in asked)),
        by_engine=[summary["answered"] for summary in summaries],
    )


def freight(
    folder: Path,
    source: Path,
    model: str,
    *options: str,
    config: str = "",
    should_kill: Callable[[], bool] | None = None,
) -> Took:
    """Run a file; the output is `folder/out.jsonl`. Where it ends badly, and nobody killed it, its log is shown."""
    (folder / "home").mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    argv = [sys.executable, "-m", "freight", "run", str(source), "-o", str(folder / "out.jsonl"), "--model", model]
    env = {**environment(folder), "FREIGHT_CONFIG": str(folder / "config.toml")}
    took = run([*argv, *options], cwd=folder, env=env, log=folder / "log", should_kill=should_kill)
    if took.status and should_kill is None:
        raise AssertionError(f"freight run ended with {took.status}: {(folder / 'log').read_text()[-2000:]}")
    return took


def check(folder: Path, expected: Expected) -> Verdict:
    """Return how the answers of a run are; raise AssertionError unless all are right and in order."""
    verdict = expected.check(batch_answers(folder / "out.jsonl"))
    assert verdict.problem() is None and not verdict.missing and verdict.in_order, verdict
    return verdict


def own_engines(folder: Path, options: Sequence[Sequence[str]]) -> str:
    """Return a configuration in which model "many" has as many workers as there are `options`, each with its own."""
    (folder / "turns").mkdir(parents=True)
    (folder / "turns" / "plan.json").write_text(json.dumps([list(each) for each in options]))
    command = [sys.executable, "-m", "bench.turns", str(folder / "turns"), "--model", MODEL, "--socket", "{socket}"]
    devices = [f"cpu:{os.getpid()}{number:02d}" for number in range(len(options))]
    env = f'env = {{ PYTHONPATH = "{ROOT}" }}'
    model = f'[models.many]\nengine = "command"\ncommand = {json.dumps(command)}\n{env}\n'
    return f"{model}[pools.local]\ndevices = {json.dumps(devices)}\n"


def summaries_of(folder: Path) -> list[dict[str, Any]]:
    """Return what the engines of `own_engines` did, each with when it was started as `started_at`."""
    found: list[dict[str, Any]] = []
    for path in sorted((folder / "turns").glob("summary-*.json")):
        started = path.with_name(path.name.replace("summary", "started")).read_text()
        found.append({**json.loads(path.read_text()), "started_at": float(started)})
    return found
