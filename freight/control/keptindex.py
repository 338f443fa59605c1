"""The index of a run's input, kept beside its results, so that the run goes on without reading the input anew."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from freight import __version__
from freight.control.intake import Index
from freight.core.order import NO_ORDER
from freight.errors import OperationError

# By whether the best order was looked for. Another release may find other lines good: it has other names.
_NAMES: Final = {True: f"index-{__version__}.npz", False: f"index-as-read-{__version__}.npz"}
_ALL_NAMES: Final = "index*.npz"


def keep_index(folder: Path, index: Index, ordered: bool) -> None:
    """Keep an index and no other; where there is no room for it, the input is read again some day."""
    with suppress(OSError):
        drop_index(folder)
        try:
            index.save(folder / _NAMES[ordered])
        except OSError:
            # A part of one takes room for nothing.
            drop_index(folder)


def drop_index(folder: Path) -> None:
    """Remove what is kept, whichever release kept it."""
    for path in folder.glob(_ALL_NAMES):
        path.unlink(missing_ok=True)


def kept_index(folder: Path, sha256: str, ordered: bool, strict: bool) -> Index | None:
    """Return the index of the input with this digest; None where it must be read again.

    `ordered`: with its best order. `strict`: bad lines are to be told, so that there must be none.
    """
    for name in dict.fromkeys((_NAMES[ordered], _NAMES[True])):
        with suppress(OperationError):
            index = Index.load(folder / name)
            if index.sha256 == sha256 and (index.endpoints.all() or not strict):
                return index if ordered else replace(index, order=NO_ORDER.records, shared=NO_ORDER.shared)
    return None
