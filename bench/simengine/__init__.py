"""A small OpenAI-compatible server that answers by script: no model, no device, known replies.

Run it with `python -m bench.simengine --help`. It is a stand-in for an inference engine in tests and
benchmarks, and imports nothing of the product it helps to test. With `--profile` it takes as long as an engine of
that kind would, by the physics of continuous batching (`physics.py`); `virtual.py` runs the same physics without a
clock, `calibrate.py` shows where a profile's figures come from, and `cost.py` what the simulation itself takes.
"""

from bench.simengine.oddities import EXACT_BODY

__all__ = ["EXACT_BODY"]
