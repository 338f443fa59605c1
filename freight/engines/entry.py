"""What is wrong with a model's entry before anything is started."""

from pathlib import Path
from typing import Final

from freight.core.hubfiles import parse_hub_id
from freight.core.model import EngineName, ModelEntry
from freight.engines import llamaserver, sglang, vllm
from freight.engines.arguments import given
from freight.engines.checkpoint import read_config
from freight.engines.command import check_command
from freight.engines.endpoint import base_url
from freight.engines.gguf import read_gguf
from freight.errors import UserError, refusing

# Options of an entry that say nothing to some engines: refused there, never ignored.
_NO_EFFECT: Final = {
    EngineName.LLAMACPP: ("command", "api_key_file", "api_key_env"),
    EngineName.VLLM: ("command", "prompt_cache", "api_key_file", "api_key_env"),
    EngineName.SGLANG: ("command", "prompt_cache", "api_key_file", "api_key_env"),
    EngineName.ENDPOINT: ("args", "executable", "command", "env", "context", "gpus", "prompt_cache"),
    EngineName.COMMAND: ("executable", "prompt_cache", "api_key_file", "api_key_env"),
}
# What of llama.cpp goes to an executable alone.
_NEEDS_EXECUTABLE: Final = ("args", "env")
_RESERVED: Final = {
    EngineName.LLAMACPP: (llamaserver.RESERVED, llamaserver.ALIASES),
    EngineName.VLLM: (vllm.RESERVED, vllm.ALIASES),
    EngineName.SGLANG: (sglang.RESERVED, sglang.ALIASES),
}


def is_hub_id(source: str) -> bool:
    """Return whether a source is a model of a hub, ORG/NAME or ORG/NAME:FILE, and no path of this machine."""
    try:
        hub_id = parse_hub_id(source)
    except UserError:
        return False
    # A name that ends so is meant for a file's, also where there is none.
    return not (hub_id.repo.endswith(".gguf") or Path(source).exists())


def check_entry(name: str, entry: ModelEntry) -> None:
    """Raise UserError for an entry that could never run, or has options without effect."""
    _check_options(name, entry)
    _check_arguments(name, entry)
    for variable, value in entry.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise UserError(f"model {name}: {variable!r} cannot be a variable of env", "correct its entry")
    what = f"cannot look for {' '.join(entry.sources())}, the source of model {name}"
    with refusing(what, "name one that you may read"):
        _check_sources(name, entry)


def _check_sources(name: str, entry: ModelEntry) -> None:
    sources = entry.sources()
    if entry.engine is EngineName.ENDPOINT:
        if not sources:
            raise UserError(f"model {name} has engine endpoint but no source", 'set source = "http://HOST:PORT"')
        for source in sources:
            base_url(source)
    elif entry.engine is EngineName.COMMAND:
        check_command(name, entry.command, sources[0] if sources else "")
    elif entry.engine is EngineName.LLAMACPP:
        _check_model_file(name, sources)
    else:
        _check_checkpoint(name, entry.engine, sources)


def _check_options(name: str, entry: ModelEntry) -> None:
    for option in _NO_EFFECT[entry.engine]:
        if getattr(entry, option):
            raise UserError(f"model {name}: {option} has no effect on engine {entry.engine}", "leave it out")
    if entry.engine is not EngineName.LLAMACPP or entry.executable:
        return
    for option in _NEEDS_EXECUTABLE:
        if getattr(entry, option):
            raise UserError(
                f"model {name}: {option} has no effect on llama.cpp without an executable",
                "leave it out, or name a llama-server as executable",
            )
    if entry.gpus:
        raise UserError(
            f"model {name} asks for GPUs, and PyPI's xllamacpp has no GPU backend",
            "name a llama-server built with CUDA as executable (--executable), or set gpus = 0",
        )


def _check_arguments(name: str, entry: ModelEntry) -> None:
    if any("\0" in word for word in entry.args):
        raise UserError(f"an argument of model {name} has a NUL character in it", "take it out")
    if entry.engine not in _RESERVED:
        return
    reserved, aliases = _RESERVED[entry.engine]
    for option in given(entry.args, aliases):
        if option in reserved:
            raise UserError(
                f"model {name}: Freight itself gives {entry.engine} its {option}",
                "leave the argument out; other arguments go into args, and a model into source",
            )


def _check_model_file(name: str, sources: list[str]) -> None:
    if len(sources) != 1:
        raise UserError(
            f"model {name} has engine llamacpp and needs one source, a .gguf file", 'set source = "/path/m.gguf"'
        )
    path = Path(sources[0])
    if is_hub_id(sources[0]):
        return
    if not path.is_file():
        raise UserError(f"there is no model file {sources[0]}", "check the path")
    read_gguf(path)


def _check_checkpoint(name: str, engine: EngineName, sources: list[str]) -> None:
    if len(sources) != 1:
        raise UserError(
            f"model {name} has engine {engine} and needs one source: a checkpoint folder, or ORG/NAME of a hub",
            'set source = "/path/to/checkpoint" (--source)',
        )
    path = Path(sources[0])
    if path.is_dir():
        read_config(path)
    elif path.is_file():
        read_gguf(path)
    elif not is_hub_id(sources[0]):
        raise UserError(f"model {name}: there is no checkpoint folder {sources[0]}", "check the path")
