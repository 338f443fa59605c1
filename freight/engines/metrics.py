"""What the metrics of known servers are called."""

from freight.engines.base import EngineLoad, load_of, metric


def vllm_tokens(metrics: str) -> float | None:
    """Return the tokens read and made so far as vLLM's metrics, and those that follow its names, count them.

    Tokens of prompts count too: reading a long one is progress. They are counted when a prompt has been read.
    """
    return _sum(metrics, "vllm:generation_tokens_total", "vllm:prompt_tokens_total")


def vllm_load(metrics: str) -> EngineLoad | None:
    """Return the load as vLLM's metrics tell it."""
    cache = "vllm:kv_cache_usage_perc"
    if metric(metrics, cache) is None:
        cache = "vllm:gpu_cache_usage_perc"
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", cache, "vllm:num_preemptions_total")
    return load_of(metrics, *names)


def sglang_tokens(metrics: str) -> float | None:
    """Return the tokens read and made so far as SGLang's metrics count them."""
    return _sum(metrics, "sglang:generation_tokens_total", "sglang:prompt_tokens_total")


def sglang_load(metrics: str) -> EngineLoad | None:
    """Return the load as SGLang's metrics tell it."""
    names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")
    return load_of(metrics, *names, "sglang:num_retracted_requests_total")


def llamacpp_steps(metrics: str) -> float | None:
    """Return the number of decoding steps, which grows during a request and not only at its end."""
    return metric(metrics, "llamacpp:n_decode_total")


def llamacpp_load(metrics: str) -> EngineLoad | None:
    """Return the load as llama.cpp's metrics tell it."""
    cache = "llamacpp:kv_cache_usage_ratio"
    return load_of(metrics, "llamacpp:requests_processing", "llamacpp:requests_deferred", cache)


def any_load(metrics: str) -> EngineLoad | None:
    """Return the load of a server whose kind is not known, if one of the known names is there."""
    return vllm_load(metrics) or sglang_load(metrics) or llamacpp_load(metrics)


def _sum(metrics: str, *names: str) -> float | None:
    found = [value for name in names if (value := metric(metrics, name)) is not None]
    return sum(found) if found else None
