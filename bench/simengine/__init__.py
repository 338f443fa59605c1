"""A small OpenAI-compatible server that answers by script: no model, no device, known replies.

Run it with `python -m bench.simengine --help`. It is a stand-in for an inference engine in tests and
benchmarks, and imports nothing of the product it helps to test.
"""

from bench.simengine.oddities import EXACT_BODY

__all__ = ["EXACT_BODY"]
