"""Where the profile `b200-30b` comes from: `python -m bench.simengine.calibrate`.

The published curve says which share of its peak throughput a 30B model on one B200 reaches with so many requests in
flight, for prompts and answers of about a thousand tokens. In the steady state a step takes base + n * each, so the
throughput is n / (base + n * each): base / each is fitted to the shares, and the peak sets the scale. Of `each`, the
reading of prompts and of context are what the card's speed and the model's cache say; the rest is for the request.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from bench.simengine.physics import Physics, Request
from bench.simengine.profiles import PROFILES
from bench.simengine.virtual import Machine, run, shared_queue

IN_FLIGHT: Final = (8, 32, 64, 128, 256, 512)
SHARES: Final = (10.0, 20.0, 43.0, 61.0, 83.0, 99.6)
PROMPT_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 1024
# Tokens a second at the peak, all requests together.
PEAK: Final = 15_000.0
# 60,000 tokens of prompts a second; 98 kB of cache a token, read at 8 TB/s.
PREFILL_S: Final = 16e-6
CONTEXT_S: Final = 12.3e-9


def fit(in_flight: tuple[int, ...] = IN_FLIGHT, shares: tuple[float, ...] = SHARES) -> tuple[float, float]:
    """Return base and each, in seconds, for which the squared errors of the shares are least."""
    count = np.array(in_flight, dtype=float)
    wanted = np.array(shares)
    ratios = np.geomspace(1.0, 10_000.0, 100_000)[:, np.newaxis]
    shape = count / (count + ratios)
    # The most requests in flight are the peak.
    errors = np.square(100 * shape / shape[:, -1:] - wanted).sum(axis=1)
    ratio = float(ratios[errors.argmin(), 0])
    each = in_flight[-1] / PEAK / (ratio + in_flight[-1])
    return ratio * each, each


def fitted(like: Physics) -> Physics:
    """Return `like` with the times that fit the curve."""
    base, each = fit()
    prefill = PREFILL_S * PROMPT_TOKENS / OUTPUT_TOKENS
    context = CONTEXT_S * (PROMPT_TOKENS + OUTPUT_TOKENS / 2)
    return replace(like, base_s=base, prefill_s=PREFILL_S, context_s=CONTEXT_S, sequence_s=each - prefill - context)


def throughput(physics: Physics, in_flight: int, rounds: int = 12) -> float:
    """Return the output tokens a second that `in_flight` requests at a time come to, in virtual time.

    Their answers begin at different lengths, so that they do not all end at once; nothing is shared.
    """
    requests = [Request(PROMPT_TOKENS, 1 + OUTPUT_TOKENS * (2 * n + 1) // (2 * in_flight)) for n in range(in_flight)]
    requests += [Request(PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range((rounds - 1) * in_flight)]
    outcome = run([Machine(physics, window=in_flight)], shared_queue(requests))
    return outcome.output_tokens / outcome.makespan_s


def curve(physics: Physics, in_flight: tuple[int, ...] = IN_FLIGHT) -> list[float]:
    """Return the share of the peak, in percent, at each number of requests in flight."""
    rates = [throughput(physics, count) for count in in_flight]
    return [100 * rate / max(rates) for rate in rates]


def main() -> None:
    """Print the fitted times, and the curve they give beside the published one."""
    physics = fitted(PROFILES["b200-30b"])
    for name in ("base_s", "prefill_s", "context_s", "sequence_s"):
        print(f"{name}={getattr(physics, name):.4g}, in the profile {getattr(PROFILES['b200-30b'], name):.4g}")
    for count, wanted, got in zip(IN_FLIGHT, SHARES, curve(physics), strict=True):
        print(f"{count:4d} in flight: {got:5.1f} % of the peak; published {wanted:5.1f} %")


if __name__ == "__main__":
    main()
