"""The model of a batch, which its records name: looked for before the input was read; what is wrong is told later."""

from itertools import islice
from pathlib import Path
from typing import Final

from freight.config import Config
from freight.control.batchterms import Refusal
from freight.control.inputs import SAMPLE_RECORDS, InputFile, physical_lines
from freight.control.resolve import choose_model, entry_name
from freight.control.rights import check_registered, names_in, seen_by
from freight.core.account import Account
from freight.core.jsonbytes import NotJson
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.openaibatch import MODEL_NOT_AVAILABLE, MODEL_NOT_FOUND
from freight.core.record import model_of
from freight.errors import FreightError, NotAllowed, UserError

_MOST_NAME: Final = 200


class NoModel(UserError):
    """What the records name is no model that the user may run."""


def first_model(upload: Path, record_bytes: int) -> str | None:
    """Return the first model that one of a file's first lines names; None where none does. For threads."""
    file = InputFile(upload, "the input file")
    try:
        for line in islice(physical_lines(file.reader(), record_bytes), SAMPLE_RECORDS):
            try:
                name = model_of(line.text) if line.text and not line.is_blank() else None
            except NotJson:
                continue  # It is told of when all lines are checked.
            if name is not None:
                return name
        return None
    finally:
        file.close()


def chosen_model(account: Account, first: str | None, config: Config) -> str:
    """Return the model to run where the first that records name is `first`; raise NoModel where there is none.

    Also for admins it is a registered one: what is in a file must not make the service read paths or ask URLs.
    """
    seen = seen_by(account, config)
    if first is not None and entry_name(first, config) is None:
        raise NoModel(f"there is no model {_shown(first)}", f"models: {', '.join(names_in(seen)) or 'none'}")
    try:
        name = choose_model(None, None, seen)[0] if first is None else first
        check_registered(account, name, config)
    except (UserError, NotAllowed) as error:
        words = "no record names a model, and there is no default" if first is None else error.message
        raise NoModel(words, error.hint) from None
    return name


def refusal_of(error: FreightError) -> Refusal:
    """Return why a batch cannot run with the model that was chosen for it."""
    words = f"{error.message}; {error.hint}" if error.hint else error.message
    return Refusal(MODEL_NOT_FOUND if isinstance(error, NoModel) else MODEL_NOT_AVAILABLE, words)


def no_model(first: str | None) -> ModelSpec:
    """Return what stands for the model of a batch that has none and will be refused."""
    entry = ModelEntry(engine=EngineName.ENDPOINT)
    return ModelSpec(_shown(first or ""), entry, "", None, None, frozenset(), {})


def _shown(name: str) -> str:
    """Return a name that came from a record, as text of bounded length that can be kept."""
    text = name.encode(errors="replace").decode()
    return text if len(text) <= _MOST_NAME else f"{text[: _MOST_NAME - 1]}…"
