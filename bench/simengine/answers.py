"""The ordinary answers: one valid OpenAI shape for each endpoint, the same for the same request."""

import base64
import hashlib
import struct
from collections.abc import Callable
from typing import Any, Final

from bench.simengine.asks import Ask, count_words
from bench.simengine.reply import Reply, dump

CREATED: Final = 1_700_000_000
VECTOR_FLOATS: Final = 8


def digest_text(text: str) -> str:
    """Return the first 16 hex digits of the text's SHA-256."""
    return _sha256(text).hex()[:16]


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _usage(ask: Ask, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": ask.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": ask.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": ask.cached_tokens},
    }


def _tokens(ask: Ask, content: str) -> int:
    """Return the tokens of an answer: as many as were set, else one for each word."""
    return ask.output_tokens if ask.output_tokens is not None else count_words(content) * ask.copies


def _reply(ask: Ask, body: dict[str, Any], completion_tokens: int = 0) -> Reply:
    return Reply(dump(body), prompt_tokens=ask.prompt_tokens, completion_tokens=completion_tokens)


def _chat(ask: Ask, model: str, content: str, finish: str) -> Reply:
    tokens = _tokens(ask, content)
    body = {
        "id": "chatcmpl-sim",
        "object": "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": content},
                "logprobs": None,
                "finish_reason": finish,
            }
            for index in range(ask.copies)
        ],
        "usage": _usage(ask, tokens),
    }
    return _reply(ask, body, tokens)


def _completion(ask: Ask, model: str, content: str, finish: str) -> Reply:
    tokens = _tokens(ask, content)
    body = {
        "id": "cmpl-sim",
        "object": "text_completion",
        "created": CREATED,
        "model": model,
        "choices": [
            {"index": index, "text": content, "logprobs": None, "finish_reason": finish} for index in range(ask.copies)
        ],
        "usage": _usage(ask, tokens),
    }
    return _reply(ask, body, tokens)


def _responses(ask: Ask, model: str, content: str, finish: str) -> Reply:
    tokens = _tokens(ask, content)
    whole = finish == "stop"
    part: dict[str, Any] = {"type": "output_text", "text": content, "annotations": []}
    status = "completed" if whole else "incomplete"
    message = {"type": "message", "id": "msg-sim", "role": "assistant", "status": status}
    body = {
        "id": "resp-sim",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": model,
        "output": [message | {"content": [part]}],
        "usage": {
            "input_tokens": ask.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ask.cached_tokens},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": ask.prompt_tokens + tokens,
        },
    }
    return _reply(ask, body, tokens)


def _listing(name: str, model: str, data: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "list", "created": CREATED, "model": model, "data": data, "usage": usage}


def _vector(text: str) -> list[float]:
    """Return eight floats from -1 to 1, each exact in 32 bits."""
    words = struct.unpack(f"<{VECTOR_FLOATS}i", _sha256(text))
    # Only 24 bits are kept, so that a float32 holds the same number.
    return [(word >> 8) / (1 << 23) for word in words]


def _embedding(ask: Ask, model: str, _content: str, _finish: str) -> Reply:
    data: list[dict[str, Any]] = []
    for index, text in enumerate(ask.items):
        vector: list[float] | str = _vector(text)
        if ask.base64:
            vector = base64.b64encode(struct.pack(f"<{VECTOR_FLOATS}f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    usage = {"prompt_tokens": ask.prompt_tokens, "total_tokens": ask.prompt_tokens}
    return _reply(ask, _listing("embd-sim", model, data, usage))


def _score_of(ask: Ask, text: str) -> float:
    """Return a number from 0 to 1 that depends on the whole request's text and on `text`."""
    return int(digest_text(f"{ask.text}\n\n{text}")[:6], 16) / (1 << 24)


def _rerank(ask: Ask, model: str, _content: str, _finish: str) -> Reply:
    results: list[dict[str, Any]] = [
        {"index": index, "document": {"text": text}, "relevance_score": _score_of(ask, text)}
        for index, text in enumerate(ask.items)
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    kept = results if ask.top_n is None else results[: max(ask.top_n, 0)]
    body = {"id": "rerank-sim", "model": model, "usage": {"total_tokens": ask.prompt_tokens}, "results": kept}
    return _reply(ask, body)


def _score(ask: Ask, model: str, _content: str, _finish: str) -> Reply:
    data = [{"index": index, "object": "score", "score": _score_of(ask, text)} for index, text in enumerate(ask.items)]
    usage = _usage(ask, 0)
    return _reply(ask, _listing("score-sim", model, data, usage))


# Each takes the request, the model's name, the content and the finish reason; the endpoints that
# generate no text ignore the last two.
ANSWERS: Final[dict[str, Callable[[Ask, str, str, str], Reply]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
    "/v1/responses": _responses,
    "/v1/rerank": _rerank,
    "/v1/score": _score,
}
