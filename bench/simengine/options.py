"""The command line of the simulated engine."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What one simulated engine is told to do; zero or None means off."""

    host: str
    port: int
    socket: str | None
    port_file: str | None
    models: tuple[str, ...]
    api_key: str | None
    metrics: bool
    list_models: bool
    record: str | None
    once_file: str | None
    count_prompts: bool
    digest: bool
    latency_s: float
    slots: int
    loading_s: float
    hang_at: int
    die_after: int
    fail_start: bool
    hang_start: bool
    mute: bool
    die_when_ready: bool
    ignore_sigterm: bool
    seed: int
    chaos: float


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Return the options in `argv`; print usage and exit 2 when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simengine", description="A scripted OpenAI-compatible server for tests."
    )
    _add_serving(parser)
    _add_script(parser)
    given = parser.parse_args(argv)
    if not 0 <= given.chaos <= 1:
        parser.error(f"--chaos is {given.chaos}; it is a fraction from 0 to 1")
    for flag in ("latency_s", "slots", "loading_s", "hang_at", "die_after"):
        if getattr(given, flag) < 0:
            parser.error(f"--{flag.removesuffix('_s').replace('_', '-')} must not be negative")
    values = vars(given)
    values["models"] = tuple(given.models or ["local-model"])
    return Options(**values)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """Declare where it listens, what it shows and what it writes down."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="TCP port; 0 picks a free one")
    add("--socket", metavar="PATH", help="listen on this Unix socket instead of TCP")
    add("--port-file", metavar="FILE", help="write the URL here, atomically, once listening")
    add("--model", dest="models", metavar="NAME", action="append", help="a served model's name; repeatable")
    add("--api-key", metavar="KEY", help="ask for this bearer key everywhere but /health")
    add("--no-metrics", dest="metrics", action="store_false", help="answer 404 on /metrics")
    add("--no-models", dest="list_models", action="store_false", help="answer 404 on /v1/models")
    add("--record", metavar="FILE", help="append every POST body received to this file")
    add("--once-file", metavar="FILE", help="remember which '-once' prompts were seen, across restarts")
    add("--count-prompts", action="store_true", help="count requests by prompt in /sim/counts")


def _add_script(parser: argparse.ArgumentParser) -> None:
    """Declare how it answers, how fast, and how it misbehaves."""
    add = parser.add_argument
    add("--digest", action="store_true", help="answer with a digest of the prompt instead of 'ok'")
    add("--latency", dest="latency_s", type=float, default=0.0, metavar="SECONDS", help="time per request")
    add("--slots", type=int, default=0, metavar="N", help="requests processed at once; 0 is no limit")
    add("--loading", dest="loading_s", type=float, default=0.0, metavar="SECONDS", help="503 until then")
    add("--hang-at", type=int, default=0, metavar="N", help="answer nothing from the Nth POST on")
    add("--die-after", type=int, default=0, metavar="N", help="exit 3 on receiving the Nth POST")
    add("--fail-start", action="store_true", help="print an error and exit 7 before listening")
    add("--hang-start", action="store_true", help="never listen, never exit")
    add("--mute", action="store_true", help="take connections and answer nothing on them, not even /health")
    add("--die-when-ready", action="store_true", help="exit 3 right after /health was answered well once")
    add("--ignore-sigterm", action="store_true", help="go on when told to end; only SIGKILL ends it")
    add("--seed", type=int, default=0, help="seed of --chaos")
    add("--chaos", type=float, default=0.0, metavar="P", help="fraction of requests answered 503")
