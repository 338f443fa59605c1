"""The GET pages: health, models, metrics and the simulation's own counts."""

from collections.abc import Callable
from typing import Any, Final

from bench.simengine.answers import CREATED
from bench.simengine.engine import LOADING, Engine
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
    models = [
        {"id": name, "object": "model", "created": CREATED, "owned_by": "simengine"} for name in engine.options.models
    ]
    return Reply(dump({"object": "list", "data": models}))


def _metrics(engine: Engine) -> Reply | None:
    if not engine.options.metrics:
        return None
    labels = f'{{engine="0",model_name="{engine.options.models[0]}"}}'
    lines: list[str] = []
    for name, kind, about, value in (
        ("num_requests_running", "gauge", "Requests being processed.", engine.running),
        ("num_requests_waiting", "gauge", "Requests waiting to be processed.", engine.waiting),
        ("prompt_tokens_total", "counter", "Prompt tokens processed.", engine.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", engine.generation_tokens),
    ):
        full = f"vllm:{name}"
        lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}", f"{full}{labels} {float(value)}"]
    return Reply("\n".join((*lines, "")).encode(), content_type=TEXT_TYPE)


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


_PAGES: Final[dict[str, Callable[[Engine], Reply | None]]] = {
    "/health": _health,
    "/v1/models": _models,
    "/metrics": _metrics,
    "/sim/counts": _counts,
}
