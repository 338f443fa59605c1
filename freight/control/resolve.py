"""What `--model` means: from what the user typed to a model that a job can run."""

import asyncio
import hashlib
import os
import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from freight.config import Config, data_folder
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.engines.base import Address, read_key
from freight.engines.checkpoint import folder_fingerprint
from freight.engines.client import EngineClient, Unreachable
from freight.engines.endpoint import KEY_VARIABLE, base_url
from freight.engines.entry import check_entry, is_hub_id
from freight.errors import UserError, refusing
from freight.store.hub import find_model
from freight.store.registry import BUILT_IN

# In a model's identity: its entry's variables, or that it has none.
ENV_IDENTITY: Final = "env"
NO_ENV: Final = "none"
_SPAN_BYTES: Final = 1 << 20


def choose_model(typed: str | None, first_model: str | None, config: Config) -> tuple[str, str | None]:
    """Return the model to run and, where the user named none, a line that says which was taken and why.

    Without a name: the first record's model if it is registered, else the default. Raises UserError
    when there is nothing to choose by.
    """
    if typed is not None:
        return typed, None
    if first_model and entry_name(first_model, config):
        return first_model, f"no --model given; using {first_model}, which the first record names"
    if config["default_model"]:
        return config["default_model"], f"no --model given; using {config['default_model']} (default_model)"
    own = [name for name in config.models if config.origins.get(f"models.{name}") != "built in"]
    if len(own) == 1:
        return own[0], f"no --model given; using {own[0]}, the one registered model"
    if not own and BUILT_IN in config.models:
        return BUILT_IN, f"no --model given; using the built-in {BUILT_IN}"
    raise UserError("no --model given, and nothing says which to take", _what_there_is(config))


def entry_name(typed: str, config: Config) -> str | None:
    """Return the registered model that `typed` names, by its name or an alias; None when there is none."""
    if typed in config.models:
        return typed
    return next((name for name, entry in config.models.items() if typed in entry.aliases), None)


def find_entry(typed: str, config: Config) -> tuple[str, ModelEntry]:
    """Return the name and entry that `typed` stands for; raise UserError when it stands for nothing."""
    if re.match(r"https?://", typed, re.IGNORECASE):
        key = KEY_VARIABLE if KEY_VARIABLE in os.environ else None
        return typed, ModelEntry(engine=EngineName.ENDPOINT, source=base_url(typed), api_key_env=key)
    registered = entry_name(typed, config)
    if registered:
        return registered, config.models[registered]
    with refusing(f"cannot look for the model {typed!r}", _what_there_is(config)):
        path = Path(typed).expanduser()
        if path.is_file() or (typed.endswith(".gguf") and not is_hub_id(typed)):
            return path.stem, ModelEntry(engine=EngineName.LLAMACPP, source=str(path.absolute()))
        if path.is_dir():
            return path.absolute().name, ModelEntry(engine=EngineName.VLLM, source=str(path.absolute()))
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", typed):
        raise UserError(f"there is no model {typed}", f"for a server's URL write http://{typed}")
    if is_hub_id(typed):
        engine = EngineName.LLAMACPP if _pulled(typed).suffix == ".gguf" else EngineName.VLLM
        return typed.partition(":")[0].rpartition("/")[2], ModelEntry(engine=engine, source=typed)
    raise UserError(f"there is no model {typed}", _what_there_is(config))


def _pulled(hub_id: str) -> Path:
    """Return where the model of a hub lies on this machine; raise UserError when it was not fetched."""
    found = find_model(data_folder(), hub_id)
    if found is None:
        raise UserError(
            f"there is no model {hub_id} on this machine",
            f"fetch it first: freight models pull {shlex.quote(hub_id)}; or name a .gguf file, a folder or a URL",
        )
    return found


def _what_there_is(config: Config) -> str:
    names = ", ".join(config.models) or "none is registered"
    return f"models: {names}; or a .gguf file, or the URL of a server (freight models add registers one)"


async def resolve(
    typed: str, config: Config, ignore_record_model: bool, wait: Callable[[str], Awaitable[None]]
) -> ModelSpec:
    """Return the model that `typed` stands for, ready to run.

    An endpoint that does not answer is waited for: `wait` is awaited with the reason between tries.
    Raises UserError for what can never run.
    """
    # In a thread, as the model may lie on a disk that is slow, or does not answer.
    name, entry, model = await asyncio.to_thread(_look_up, typed, config, ignore_record_model)
    return model or await _resolve_endpoint(typed, name, entry, ignore_record_model, wait)


def _look_up(typed: str, config: Config, ignore_record_model: bool) -> tuple[str, ModelEntry, ModelSpec | None]:
    """Return the name and entry that `typed` stands for, and the model where its server is to be started."""
    name, entry = find_entry(typed, config)
    entry = msgspec.structs.replace(entry, source=_expanded(entry))
    check_entry(name, entry)
    if entry.engine is EngineName.ENDPOINT:
        return name, entry, None
    with refusing(f"cannot read the source of model {name}", "name one that you may read"):
        return name, entry, started_model(typed, name, entry, ignore_record_model)


def started_model(typed: str, name: str, entry: ModelEntry, ignore_record_model: bool = False) -> ModelSpec:
    """Return the model of an entry whose server Freight starts; its sources are then on this machine."""
    named = entry.sources()
    entry = _on_this_machine(name, entry)
    names = {typed, name, *entry.aliases, *(_stem(source) for source in named)}
    fits = None if ignore_record_model else frozenset(names)
    identity = _identity(entry, named)
    identity |= {"context": str(entry.context or "default"), "aliases": " ".join(sorted(entry.aliases))}
    return ModelSpec(name, entry, typed, fits, name, frozenset(), identity)


def _stem(source: str) -> str:
    """Return what people call a source: a file without its ending, a folder with all of its name."""
    path = Path(source)
    return path.stem if path.suffix == ".gguf" or path.is_file() else path.name


def _on_this_machine(name: str, entry: ModelEntry) -> ModelEntry:
    """Return the entry with models of a hub as the paths where they lie; raise UserError for one that is not here."""
    if entry.engine is EngineName.COMMAND:
        return entry
    paths = [str(_pulled(source)) if is_hub_id(source) else source for source in entry.sources()]
    entry = msgspec.structs.replace(entry, source=paths)
    check_entry(name, entry)
    return entry


def _identity(entry: ModelEntry, named: list[str]) -> dict[str, str]:
    if entry.engine is EngineName.COMMAND:
        command = " ".join([*entry.command, *entry.args])
        about = {"engine": "command", "command": command, "model source": " ".join(named)}
        return about | {ENV_IDENTITY: env_digest(entry.env)}
    path = Path(entry.sources()[0])
    about = {"engine": entry.engine.value}
    if path.is_dir():
        about["checkpoint"] = f"{_stem(named[0])} ({folder_fingerprint(path)})"
    else:
        about["model file"] = f"{path.name} ({fingerprint(path)})"
    if entry.engine is EngineName.LLAMACPP:
        about["prompt_cache"] = str(entry.prompt_cache).lower()
    # Said only where there are any, so that what was resolved before there could be is still the same.
    if entry.args:
        about["arguments"] = " ".join(entry.args)
    if entry.env:
        about[ENV_IDENTITY] = env_digest(entry.env)
    return about


def env_digest(env: dict[str, str]) -> str:
    """Return what tells an entry's variables from others: they may be secrets, so that they themselves are not kept."""
    return hashlib.sha256(repr(sorted(env.items())).encode()).hexdigest()[:16] if env else NO_ENV


def _expanded(entry: ModelEntry) -> list[str]:
    return [str(Path(source).expanduser()) if source.startswith("~") else source for source in entry.sources()]


def fingerprint(path: Path) -> str:
    """Return what tells a large file from another of the same name: its size, and a digest of its two ends.

    Reading all of a model of many gigabytes at every start would cost more than it protects from.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_SPAN_BYTES))
        file.seek(max(0, size - _SPAN_BYTES))
        digest.update(file.read(_SPAN_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


async def _resolve_endpoint(
    typed: str, name: str, entry: ModelEntry, ignore_record_model: bool, wait: Callable[[str], Awaitable[None]]
) -> ModelSpec:
    sources = [base_url(source) for source in entry.sources()]
    key = read_key(entry.api_key_file, entry.api_key_env)
    listed = await _listed(sources, key, wait)
    known = {typed, name, *entry.aliases}
    if listed is None:
        # The server does not say what it serves: records keep their own model, and it decides.
        return ModelSpec(name, entry, typed, None, None, frozenset(), {"engine": "endpoint", "url": " ".join(sources)})
    fill = next(iter(sorted(listed & known)), None) or (next(iter(listed)) if len(listed) == 1 else None)
    identity = {"engine": "endpoint", "served model": fill or " ".join(sorted(listed))}
    if ignore_record_model:
        if fill is None:
            raise UserError(
                f"{sources[0]} serves several models ({', '.join(sorted(listed))}), so --ignore-record-model "
                "cannot tell which to use",
                "register it under the served name: freight models add SERVED-NAME --engine endpoint --source URL",
            )
        return ModelSpec(name, entry, typed, None, fill, frozenset(), identity)
    return ModelSpec(name, entry, typed, frozenset(known | listed), fill, listed, identity)


async def _listed(sources: list[str], key: str | None, wait: Callable[[str], Awaitable[None]]) -> frozenset[str] | None:
    while True:
        problem = ""
        for source in sources:
            async with EngineClient(Address(source, api_key=key)) as client:
                try:
                    return await client.model_ids()
                except Unreachable as error:
                    problem = f"{source}: {error}"
                except PermissionError as error:
                    raise UserError(
                        f"{source} refuses the request: {error}",
                        f"put its key in {KEY_VARIABLE}, or name api_key_env or api_key_file in a model entry",
                    ) from None
        await wait(problem)
