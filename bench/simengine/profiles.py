"""Known engines: what their steps cost. `calibrate.py` shows where the figures come from."""

from typing import Final

from bench.simengine.physics import Physics

# Answers everything at once; it counts tokens and makes answers as the others do.
INSTANT: Final = "instant"

PROFILES: Final[dict[str, Physics]] = {
    # A 30B mixture of experts on one B200, fitted to the published curve of calibrate.py.
    "b200-30b": Physics(
        base_s=7.16e-3,
        prefill_s=16e-6,
        context_s=12.3e-9,
        sequence_s=17.8e-6,
        max_num_seqs=512,
        max_batched_tokens=8192,
        blocks=98_304,
        max_model_len=32_768,
    ),
    # An 8B model at 16 bits on a card of 24 GB and 300 GB/s: what its weights and caches take to read.
    "l4-8b": Physics(
        base_s=53e-3,
        prefill_s=330e-6,
        context_s=0.43e-6,
        sequence_s=100e-6,
        max_num_seqs=128,
        max_batched_tokens=2048,
        blocks=2_560,
        max_model_len=8_192,
    ),
    # A 135M model on two CPU cores, as measured with vLLM: 35, 177, 260 and 283 tokens a second at 1, 8, 32 and 64; and
    # with 1,280 blocks, 40 groups of 6 records that share 900 tokens, 16 in flight: 103 s and 79 % cached in order,
    # 204 s and 51 % shuffled.
    "cpu-135m": Physics(
        base_s=25.4e-3,
        prefill_s=1.2e-3,
        context_s=1.0e-6,
        sequence_s=2.6e-3,
        max_num_seqs=128,
        max_batched_tokens=2048,
        blocks=4_096,
        max_model_len=2_048,
    ),
}
