"""The GET pages: health, models, metrics and the simulation's own counts."""

from collections.abc import Callable
from typing import Any, Final

from bench.simengine.answers import CREATED
from bench.simengine.blocks import BLOCK_TOKENS
from bench.simengine.engine import LOADING, Engine
from bench.simengine.physics import Engine as Core
from bench.simengine.reply import TEXT_TYPE, Reply, dump, error_reply


def page(engine: Engine, path: str) -> Reply:
    """Return what GET `path` answers."""
    make = _PAGES.get(path)
    return (make and make(engine)) or error_reply(404, f"no such path: {path}")


def _health(engine: Engine) -> Reply:
    return LOADING if engine.is_loading() else Reply(dump({"status": "ok"}))


def _models(engine: Engine) -> Reply | None:
    if not engine.options.list_models:
        return None
    if engine.is_loading():
        return LOADING
    physics = engine.options.physics
    context = {"max_model_len": physics.max_model_len} if physics else {}
    models: list[dict[str, Any]] = [
        {"id": name, "object": "model", "created": CREATED, "owned_by": "simengine", **context}
        for name in engine.options.models
    ]
    return Reply(dump({"object": "list", "data": models}))


def _metrics(engine: Engine) -> Reply | None:
    if not engine.options.metrics:
        return None
    model = f'engine="0",model_name="{engine.options.models[0]}"'
    running, waiting = engine.load()
    prompt, generation = engine.prompt_tokens, engine.generation_tokens
    if engine.batch is not None:
        totals = engine.batch.core.totals
        prompt, generation = totals.prompt_tokens, totals.generation_tokens
    shown: list[tuple[str, str, str, float]] = [
        ("num_requests_running", "gauge", "Requests being processed.", running),
        ("num_requests_waiting", "gauge", "Requests waiting to be processed.", waiting),
        ("prompt_tokens_total", "counter", "Prompt tokens processed.", prompt),
        ("generation_tokens_total", "counter", "Tokens generated.", generation),
    ]
    if engine.batch is not None:
        shown += _cache_metrics(engine.batch.core)
    lines: list[str] = []
    for name, kind, about, value in shown:
        full = f"vllm:{name}"
        lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full}{{{model}}} {float(value)}"]
    if engine.options.physics is not None:
        about = f'block_size="{BLOCK_TOKENS}",engine="0",num_gpu_blocks="{engine.options.physics.blocks}"'
        name = "vllm:cache_config_info"
        lines += [f"# HELP {name} The cache.", f"# TYPE {name} gauge", f"{name}{{{about}}} 1.0"]
    return Reply("\n".join((*lines, "")).encode(), content_type=TEXT_TYPE)


def _cache_metrics(core: Core) -> list[tuple[str, str, str, float]]:
    totals = core.totals
    return [
        ("kv_cache_usage_perc", "gauge", "Share of the cache in use, from 0 to 1.", core.cache_use),
        ("prefix_cache_queries_total", "counter", "Prompt tokens looked for in the cache.", totals.cache_queries),
        ("prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", totals.cache_hits),
        ("num_preemptions_total", "counter", "Requests preempted.", totals.preemptions),
        ("request_success_total", "counter", "Requests finished.", totals.finished),
    ]


def _counts(engine: Engine) -> Reply:
    counts: dict[str, Any] = {
        "requests": engine.requests,
        "answered": engine.answered,
        "in_flight_now": engine.in_flight,
        "in_flight_max": engine.in_flight_max,
    }
    if engine.options.count_prompts:
        counts["by_prompt"] = engine.by_prompt
    return Reply(dump(counts))


def summary_of(engine: Engine) -> dict[str, float]:
    """Return what an engine has done, and when: seconds of the machine's monotonic clock, not sped up."""
    summary: dict[str, float] = {
        "requests": engine.requests,
        "answered": engine.answered,
        "in_flight_max": engine.in_flight_max,
        "ready_at": engine.ready_at,
        "first_request_at": engine.first_request_at,
        "last_answer_at": engine.last_answer_at,
        "prompt_tokens": engine.prompt_tokens,
        "generation_tokens": engine.generation_tokens,
    }
    if engine.batch is not None:
        totals = engine.batch.core.totals
        summary |= {"cache_queries": totals.cache_queries, "cache_hits": totals.cache_hits}
        summary |= {"preemptions": totals.preemptions, "finished": totals.finished}
    return summary


_PAGES: Final[dict[str, Callable[[Engine], Reply | None]]] = {
    "/health": _health,
    "/v1/models": _models,
    "/metrics": _metrics,
    "/sim/counts": _counts,
}
