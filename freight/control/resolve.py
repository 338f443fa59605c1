"""What `--model` means: from what the user typed to a model that a job can run."""

import hashlib
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from freight.config import Config
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.engines.base import Address, read_key
from freight.engines.client import EngineClient, Unreachable
from freight.engines.command import check_command
from freight.engines.endpoint import KEY_VARIABLE, base_url
from freight.engines.gguf import read_gguf
from freight.engines.registry import engine_of
from freight.errors import UserError, refusing
from freight.store.registry import BUILT_IN

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
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
        if path.is_file() or typed.endswith(".gguf"):
            return path.stem, ModelEntry(engine=EngineName.LLAMACPP, source=str(path.absolute()))
        if path.is_dir():
            return path.name, ModelEntry(engine=EngineName.VLLM, source=str(path.absolute()))
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", typed):
        raise UserError(f"there is no model {typed}", f"for a server's URL write http://{typed}")
    if _HUB_ID.fullmatch(typed):
        raise UserError(
            f"there is no model {typed}; models of a hub cannot be fetched by this version",
            "download it and name the .gguf file, or pass the URL of a server that runs it",
        )
    raise UserError(f"there is no model {typed}", _what_there_is(config))


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
    name, entry = find_entry(typed, config)
    entry = msgspec.structs.replace(entry, source=_expanded(entry))
    check_entry(name, entry)
    if entry.engine is EngineName.ENDPOINT:
        return await _resolve_endpoint(typed, name, entry, ignore_record_model, wait)
    sources = entry.sources()
    if entry.engine is EngineName.LLAMACPP:
        path = Path(sources[0])
        cache = str(entry.prompt_cache).lower()
        identity = {"engine": "llamacpp", "model file": f"{path.name} ({fingerprint(path)})", "prompt_cache": cache}
    else:
        command = " ".join([*entry.command, *entry.args])
        identity = {
            "engine": "command",
            "command": command,
            "model source": " ".join(sources),
            ENV_IDENTITY: env_digest(entry.env),
        }
    names = {typed, name, *entry.aliases, *(Path(source).stem for source in sources)}
    fits = None if ignore_record_model else frozenset(names)
    identity |= {"context": str(entry.context or "default"), "aliases": " ".join(sorted(entry.aliases))}
    return ModelSpec(name, entry, typed, fits, name, frozenset(), identity)


def env_digest(env: dict[str, str]) -> str:
    """Return what tells an entry's variables from others: they may be secrets, so that they themselves are not kept."""
    return hashlib.sha256(repr(sorted(env.items())).encode()).hexdigest()[:16] if env else NO_ENV


# Options of an entry that say nothing to some engines: refused there, never ignored.
_NO_EFFECT: Final = {
    EngineName.LLAMACPP: ("args", "executable", "command", "env", "api_key_file", "api_key_env"),
    EngineName.ENDPOINT: ("args", "executable", "command", "env", "context", "gpus", "prompt_cache"),
    EngineName.COMMAND: ("executable", "prompt_cache", "api_key_file", "api_key_env"),
}


def check_entry(name: str, entry: ModelEntry) -> None:
    """Raise UserError for an entry that could never run, or has options without effect."""
    engine_of(entry.engine)
    for option in _NO_EFFECT[entry.engine]:
        if getattr(entry, option):
            raise UserError(
                f"model {name}: {option} has no effect on engine {entry.engine} in this version", "leave it out"
            )
    for variable, value in entry.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise UserError(f"model {name}: {variable!r} cannot be a variable of env", "correct its entry")
    sources = entry.sources()
    if entry.engine is EngineName.ENDPOINT:
        if not sources:
            raise UserError(f"model {name} has engine endpoint but no source", 'set source = "http://HOST:PORT"')
        for source in sources:
            base_url(source)
    elif entry.engine is EngineName.COMMAND:
        check_command(name, entry.command, sources[0] if sources else "")
    else:
        if len(sources) != 1:
            raise UserError(
                f"model {name} has engine llamacpp and needs one source, a .gguf file", 'set source = "/path/m.gguf"'
            )
        if not Path(sources[0]).is_file():
            raise UserError(f"there is no model file {sources[0]}", "check the path")
        read_gguf(Path(sources[0]))


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
