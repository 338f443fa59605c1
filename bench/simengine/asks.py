"""What a request body asks for: only the fields the simulated engine obeys are read out of it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeGuard, TypeVar, cast

import msgspec

MAX_CHOICES: Final = 128
# Texts longer than this are counted piece by piece, so that no huge list of words is built.
COUNT_PIECE: Final = 1 << 20
# Roles of pieces that are no text: token ids, and what is not text in a message.
IDS: Final = "\0ids"
MEDIA: Final = "\0media"
WORDLESS: Final = frozenset((IDS, MEDIA))


class AskError(Exception):
    """The body is refused with a 400; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """Refuse with `message`."""
        super().__init__(message)
        self.param = param


class Ask(msgspec.Struct):
    """One request, reduced to what an answer depends on.

    `text` is where markers are looked for and what a prompt is counted under; `pieces` are all that is
    read, each with the role it has, in order; `items` are the inputs that each get a vector or a score.
    The tokens are for whoever answers to fill in; an `output_tokens` of None is counted from the answer.
    """

    model: str | None
    text: str
    pieces: list[tuple[str, str]]
    copies: int = 1
    items: list[str] = []
    top_n: int | None = None
    base64: bool = False
    token_ids: int = 0
    tools: Any = None
    max_tokens: Any = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None

    def count_words(self) -> int:
        """Return the words that are read, token ids counting one each."""
        return self.token_ids + sum(count_words(text) for role, text in self.pieces if role not in WORDLESS)


class _Part(msgspec.Struct):
    text: str | None = None
    type: Any = None
    image_url: Any = None
    input_audio: Any = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _Item(msgspec.Struct):
    role: str | None = None
    content: str | list[_Part] | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


B = TypeVar("B", bound=_Body)


class ChatBody(_Body):
    """Body of /v1/chat/completions."""

    messages: list[_Message] = []
    n: int | None = None
    tools: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None


class CompletionBody(_Body):
    """Body of /v1/completions."""

    prompt: str | list[Any] | None = None
    n: int | None = None
    max_tokens: Any = None


class ResponsesBody(_Body):
    """Body of /v1/responses."""

    input: str | list[_Item] | None = None
    instructions: Any = None
    tools: Any = None
    max_output_tokens: Any = None


class EmbeddingBody(_Body):
    """Body of /v1/embeddings."""

    input: str | list[Any] | None = None
    encoding_format: str | None = None


class _Document(msgspec.Struct):
    text: str


class RerankBody(_Body):
    """Body of /v1/rerank."""

    query: str = ""
    documents: list[str | _Document] = []
    top_n: int | None = None


class ScoreBody(_Body):
    """Body of /v1/score."""

    text_1: str | list[str] = []
    text_2: str | list[str] = []


def count_words(text: str) -> int:
    """Return how many whitespace-separated words `text` has."""
    if len(text) <= COUNT_PIECE:
        return len(text.split())
    words = 0
    for start in range(0, len(text), COUNT_PIECE):
        words += len(text[start : start + COUNT_PIECE].split())
        if start and not (text[start - 1].isspace() or text[start].isspace()):
            words -= 1  # One word lies across the cut and was counted on both sides.
    return words


def _text_of(content: str | list[_Part] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or () if part.text is not None)


def _copies(n: int | None) -> int:
    copies = 1 if n is None else n
    if not 1 <= copies <= MAX_CHOICES:
        raise AskError(f"n is {copies}; it must be between 1 and {MAX_CHOICES}", "n")
    return copies


def _ask_chat(body: ChatBody) -> Ask:
    if not body.messages:
        raise AskError("messages must hold at least one message", "messages")
    last, pieces = _read_turns(body.messages)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return Ask(body.model, last, pieces, _copies(body.n), tools=body.tools, max_tokens=most)


def _read_turns(turns: Sequence[_Message | _Item]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of the last turn of the user, and the pieces of all."""
    last = ""
    pieces: list[tuple[str, str]] = []
    for turn in turns:
        text = _text_of(turn.content)
        pieces.append((turn.role or "", text))
        if isinstance(turn.content, list):
            pieces += [(MEDIA, _media_digest(part)) for part in turn.content if part.text is None]
        if turn.role == "user":
            last = text
    return last, pieces


def _media_digest(part: _Part) -> str:
    """Return what stands for a part that is no text: equal parts, equal digests."""
    shown = json.dumps([part.type, part.image_url, part.input_audio], sort_keys=True)
    return hashlib.sha256(shown.encode()).hexdigest()


def _is_token_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and set(map(type, cast("list[Any]", value))) == {int}


def _tokens_or_texts(value: str | list[Any] | None, param: str) -> tuple[list[tuple[str, str]], int]:
    """Return the inputs as pieces, and how many token ids they have; these become the text of their list."""
    if value is None or value == []:
        raise AskError(f"{param} is required and must not be empty", param)
    if isinstance(value, str):
        return [("", value)], 0
    given: list[Any] = [value] if isinstance(value[0], int) else value
    pieces: list[tuple[str, str]] = []
    ids = 0
    for item in given:
        if isinstance(item, str):
            pieces.append(("", item))
        elif _is_token_ids(item):
            pieces.append((IDS, str(item)))
            ids += len(item)
        else:
            raise AskError(f"{param} must be text, token ids, or a list of these", param)
    return pieces, ids


def _ask_completion(body: CompletionBody) -> Ask:
    pieces, ids = _tokens_or_texts(body.prompt, "prompt")
    text = "\n".join(text for _, text in pieces)
    copies = _copies(body.n) * len(pieces)
    return Ask(body.model, text, pieces, copies, token_ids=ids, max_tokens=body.max_tokens)


def _ask_embedding(body: EmbeddingBody) -> Ask:
    pieces, ids = _tokens_or_texts(body.input, "input")
    texts = [text for _, text in pieces]
    if "" in texts:
        raise AskError("input must not be an empty string", "input")
    as_base64 = body.encoding_format == "base64"
    return Ask(body.model, "\n".join(texts), pieces, items=texts, base64=as_base64, token_ids=ids)


def _ask_responses(body: ResponsesBody) -> Ask:
    if not body.input:
        raise AskError("input is required and must not be empty", "input")
    if isinstance(body.input, str):
        last, pieces = body.input, [("user", body.input)]
    else:
        last, pieces = _read_turns(body.input)
    if isinstance(body.instructions, str):
        pieces.insert(0, (MEDIA, body.instructions))  # Read, and not counted in words.
    return Ask(body.model, last, pieces, tools=body.tools, max_tokens=body.max_output_tokens)


def _ask_rerank(body: RerankBody) -> Ask:
    if not body.query or not body.documents:
        raise AskError("query and documents are required", "documents" if body.query else "query")
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    pieces = [piece for text in texts for piece in (("query", body.query), ("document", text))]
    return Ask(body.model, "\n".join((body.query, *texts)), pieces, items=texts, top_n=body.top_n)


def _ask_score(body: ScoreBody) -> Ask:
    lefts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    rights = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not lefts or not rights or len(lefts) not in (1, len(rights)):
        raise AskError("text_1 must hold one text, or as many as text_2", "text_1")
    if len(lefts) == 1:
        lefts = lefts * len(rights)
    pairs = [f"{left}\n{right}" for left, right in zip(lefts, rights, strict=True)]
    return Ask(body.model, "\n".join(pairs), [("pair", pair) for pair in pairs], items=pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _decode_leniently(body: bytes, shape: type[B]) -> B:
    """Decode what the fast decoder cannot, such as half of a surrogate pair."""
    try:
        return msgspec.convert(json.loads(body, parse_constant=_refuse_constant), shape)
    except msgspec.ValidationError:
        raise
    except (ValueError, RecursionError) as error:
        raise AskError(f"body is not valid JSON: {error}") from error


def _reader(shape: type[B], ask: Callable[[B], Ask]) -> Callable[[bytes], Ask]:
    """Return a function that reads one endpoint's bodies; it raises AskError, and nothing else."""
    decode = msgspec.json.Decoder(shape).decode

    def read(raw: bytes) -> Ask:
        try:
            try:
                body = decode(raw)
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, RecursionError):
                body = _decode_leniently(raw, shape)
        except msgspec.ValidationError as error:
            raise AskError(str(error)) from error
        if body.stream:
            raise AskError("streaming is not available here", "stream")
        return ask(body)

    return read


READERS: Final[dict[str, Callable[[bytes], Ask]]] = {
    "/v1/chat/completions": _reader(ChatBody, _ask_chat),
    "/v1/completions": _reader(CompletionBody, _ask_completion),
    "/v1/embeddings": _reader(EmbeddingBody, _ask_embedding),
    "/v1/responses": _reader(ResponsesBody, _ask_responses),
    "/v1/rerank": _reader(RerankBody, _ask_rerank),
    "/v1/score": _reader(ScoreBody, _ask_score),
}
