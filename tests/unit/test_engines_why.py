"""Why a server ended, read from its last output."""

import pytest

from freight.core.model import EngineName
from freight.engines.registry import engine_of

# Lines as servers wrote them.
LINES = {
    "(EngineCore_DP0 pid=123) ERROR 11-30 08:00:00 [core.py:700] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 12.69 MiB is free.": "CUDA out of memory",
    "(EngineCore pid=1) ERROR 11-30 08:00:00 [core.py:700] ValueError: Free memory on device cuda:0 (3.2/79.1 GiB) on "
    "startup is less than desired GPU memory utilization (0.9, 71.2 GiB).": "Free memory on device cuda:0 (3.2/79.1",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.": "No available",
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (9.83 GiB).": "To serve at least one request",
    "  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
    "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json). To allow": "(99999)",
    "vllm: error: unrecognized arguments: --foo": "unrecognized arguments: --foo",
    "vllm serve: error: argument --max-num-seqs: invalid int value: 'x'": "argument --max-num-seqs: invalid",
    "launch_server.py: error: unrecognized arguments: --bar": "--bar",
    "error: invalid argument: --baz": "--baz",
    "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use":
        "address already in use",
    "OSError: [Errno 98] Address already in use": "Address already in use",
    "OSError: You are trying to access a gated repo.": "gated repo",
    "0.00.123.456 E srv    load_model: failed to load model, '/m.gguf'": "failed to load model, '/m.gguf'",
    "llama_model_load: error loading model: tensor 'a' data is not within the file bounds, model is corrupted or "
    "incomplete": "model is corrupted",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8000.00 MiB on device 0: cudaMalloc failed: out of memory":
        "cudaMalloc failed: out of memory",
    "llama_model_load: error loading model: error loading model architecture: unknown model architecture: 'abc'":
        "unknown model architecture: 'abc'",
    "[2025-07-02 07:41:58 TP0] RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.":
        "Not enough memory",
    "RuntimeError: Failed to infer device type, please set the environment variable": "Failed to infer device type",
    "ModuleNotFoundError: No module named 'flashinfer'": "No module named 'flashinfer'",
    "\x1b[31mRuntimeError: CUDA error: an illegal memory access was encountered\x1b[0m": "illegal memory access",
}  # fmt: skip
AFTER = [
    "(APIServer pid=1) Traceback (most recent call last):",
    '(APIServer pid=1)   File "/venv/lib/python3.11/site-packages/vllm/v1/engine/utils.py", line 783, in wait',
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


@pytest.mark.parametrize("line", LINES)
def test_the_line_that_says_why_is_found_among_others(line: str) -> None:
    why = engine_of(EngineName.VLLM).why(["INFO loading", line, *AFTER])

    assert LINES[line] in why
    assert len(why) <= 400
    assert "\x1b" not in why


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO: Application startup complete.",
        "Received request cmpl-1: prompt: 'CUDA error: my secret', params: SamplingParams(n=1)",
        "the user wrote: ModuleNotFoundError: No module named 'secret'",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "KeyError: 'my secret'",
    ],
)
def test_a_line_that_may_quote_a_record_is_never_repeated(line: str) -> None:
    for name in EngineName:
        assert engine_of(name).why([line]) == ""


def test_the_last_of_several_and_the_surest_is_taken() -> None:
    log = ["CUDA error: first", "CUDA error: second", "vllm: error: unrecognized arguments: --x", "CUDA error: third"]
    assert engine_of(EngineName.SGLANG).why(log) == "vllm: error: unrecognized arguments: --x"
    assert engine_of(EngineName.SGLANG).why(log[:2]) == "CUDA error: second"
    assert engine_of(EngineName.ENDPOINT).why(log) == ""
