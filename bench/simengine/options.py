"""The command line of the simulated engine."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.simengine.faults import FAULTS
from bench.simengine.physics import Physics
from bench.simengine.profiles import INSTANT, PROFILES
from bench.simengine.prompt import Lengths


@dataclass(frozen=True, slots=True)
class Options:
    """What one simulated engine is told to do; zero or None means off."""

    host: str
    port: int
    socket: str | None
    port_file: str | None
    summary: str | None
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
    profile: str | None
    physics: Physics | None
    speed: float
    startup_s: float
    lengths: Lengths | None
    faults: tuple[tuple[str, float], ...]
    slow_s: float
    poison: str | None


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Return the options in `argv`; print usage and exit 2 when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simengine", description="A scripted OpenAI-compatible server for tests and benchmarks."
    )
    _add_serving(parser)
    _add_script(parser)
    _add_physics(parser)
    _add_faults(parser)
    given = parser.parse_args(argv)
    if not 0 <= given.chaos <= 1:
        parser.error(f"--chaos is {given.chaos}; it is a fraction from 0 to 1")
    for flag in ("latency_s", "slots", "loading_s", "hang_at", "die_after", "startup_s", "slow_s"):
        if getattr(given, flag) < 0:
            parser.error(f"--{flag.removesuffix('_s').replace('_', '-')} must not be negative")
    if given.speed <= 0:
        parser.error(f"--speed is {given.speed}; it must be more than 0")
    if sum(share for _, share in given.faults) > 1:
        parser.error("the shares of --fault add up to more than 1")
    values = vars(given)
    values["models"] = tuple(given.models or ["local-model"])
    values["faults"] = tuple(given.faults)
    try:
        values["physics"] = physics_of(given)
    except ValueError as error:
        parser.error(str(error))
    for name in CHANGEABLE:
        del values[name]
    return Options(**values)


# What can be set apart from the profile; each is a field of Physics.
CHANGEABLE = ("max_num_seqs", "max_batched_tokens", "blocks", "max_model_len")


def physics_of(given: argparse.Namespace) -> Physics | None:
    """Return the physics of the profile that was named, with what was set apart; None where nothing takes time.

    Raises ValueError for what makes no sense together.
    """
    changes = {name: value for name in CHANGEABLE if (value := getattr(given, name)) is not None}
    if given.profile is None or given.profile == INSTANT:
        if changes:
            raise ValueError("a profile that takes time is needed to change it; see --profile")
        return None
    physics = PROFILES[given.profile]
    if "blocks" in changes and "max_model_len" not in changes:
        changes["max_model_len"] = min(physics.max_model_len, changes["blocks"] * 16)
    if "max_num_seqs" in changes and "max_batched_tokens" not in changes:
        changes["max_batched_tokens"] = max(physics.max_batched_tokens, changes["max_num_seqs"])
    return replace(physics, **changes)


def lengths_of(text: str) -> Lengths:
    """Return the distribution that MEDIAN,SIGMA names; raise ValueError."""
    median, _, sigma = text.partition(",")
    return Lengths(float(median), float(sigma or 0))


def fault_of(text: str) -> tuple[str, float]:
    """Return the fault and its share that NAME=SHARE names; raise ValueError."""
    name, _, share = text.partition("=")
    if name not in FAULTS or not 0 <= float(share) <= 1:
        raise ValueError(text)
    return name, float(share)


def add_profile(parser: argparse.ArgumentParser, *more: str) -> None:
    """Declare the profile and what can be changed of it; `more` are profiles without physics."""
    add = parser.add_argument
    add("--profile", choices=(*PROFILES, *more), help="take as long as this engine does for each request")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at once")
    add("--max-batched-tokens", type=int, metavar="N", help="tokens that one step takes")
    add("--blocks", type=int, metavar="N", help="blocks of 16 tokens in the cache")
    add("--max-model-len", type=int, metavar="N", help="tokens of a prompt and its answer")
    add("--lengths", type=lengths_of, metavar="MEDIAN,SIGMA", help="answers as long as drawn from a lognormal")


def _add_physics(parser: argparse.ArgumentParser) -> None:
    """Declare what engine it is, and how fast its time passes."""
    add_profile(parser, INSTANT)
    add = parser.add_argument
    add("--speed", type=float, default=1.0, metavar="X", help="the profile's seconds in one real second")
    add("--startup", dest="startup_s", type=float, default=0.0, metavar="S", help="do not listen until then (sped up)")


def _add_faults(parser: argparse.ArgumentParser) -> None:
    """Declare what goes wrong by chance, and what text is fatal."""
    add = parser.add_argument
    names = ", ".join(FAULTS)
    add(
        "--fault", dest="faults", type=fault_of, default=[], action="append", metavar="NAME=SHARE",
        help=f"a share of the requests goes wrong: {names}; repeatable",
    )  # fmt: skip
    add("--slow", dest="slow_s", type=float, default=10.0, metavar="S", help="how late a slow answer is (sped up)")
    add("--poison", metavar="TEXT", help="exit 3 on a request whose text contains this")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    """Declare where it listens, what it shows and what it writes down."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="TCP port; 0 picks a free one")
    add("--socket", metavar="PATH", help="listen on this Unix socket instead of TCP")
    add("--port-file", metavar="FILE", help="write the URL here, atomically, once listening")
    add("--summary", metavar="FILE", help="write what was done, and when, here on SIGTERM, atomically")
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
