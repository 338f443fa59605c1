"""Settings: what there is, where each value comes from, and errors that name the place.

Flags beat FREIGHT_<SECTION>_<KEY> variables, which beat the file, which beats the registry.
"""

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import platformdirs

from freight.core.model import EngineName, ModelEntry
from freight.errors import UserError, refusing

_T = TypeVar("_T")
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZES: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def parse_duration(value: Any) -> float:
    """Return seconds for "90s", "1h30m" or a number of seconds; raise ValueError otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value < math.inf:
            raise ValueError("a duration cannot be negative or without end")
        return float(value)
    text = str(value).strip()
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhdw])", text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ValueError("expected a duration such as 90s, 15m, 12h or 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def _period(value: Any) -> float:
    seconds = parse_duration(value)
    if not seconds:
        raise ValueError("must be longer than nothing")
    return seconds


def parse_size(value: Any) -> int:
    """Return bytes for "10MB", "64KiB" or a number of bytes; raise ValueError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)", str(value).strip().upper())
    if isinstance(value, bool) or match is None:
        raise ValueError("expected a size such as 10MB or 64KiB")
    return int(float(match.group(1)) * _SIZES[match.group(2)])


def _record_size(value: Any) -> int:
    size = parse_size(value)
    if not 1 <= size <= 10**9:
        raise ValueError("a record may have at most 1GB")
    return size


def _count(value: Any) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise ValueError("expected true or false")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list) and all(isinstance(part, str) for part in value):  # pyright: ignore[reportUnknownVariableType]
        return tuple(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise ValueError("expected a list of texts")


def _keep_or_duration(value: Any) -> float | None:
    return None if value == "keep" else parse_duration(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted key, default, how its value is read, and what it is for."""

    key: str
    default: Any
    parse: Callable[[Any], Any]
    about: str

    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return "FREIGHT_" + self.key.replace(".", "_").upper()


SETTINGS: Final = (
    Setting("retention", None, _keep_or_duration, 'how long finished jobs\' data is kept ("keep": for ever)'),
    Setting("default_model", "", _text, "the model of a run that names none"),
    Setting("server.listen", "", _text, "HOST:PORT on which the service listens besides its Unix socket"),
    Setting("limits.records", 150_000, _count, "records in a job sent over HTTP"),
    Setting("limits.record_bytes", 10_000_000, _record_size, "bytes in one input line"),
    Setting("limits.file_bytes", 1 << 50, parse_size, "bytes in one input file"),
    Setting("limits.active_jobs", 20, _count, "unfinished jobs of one user"),
    Setting("media.hosts", (), _texts, "hosts from which records may have media fetched over https"),
    Setting("engines.start_stall", 300.0, _period, "a loading server that does nothing this long is given up"),
    Setting("engines.start_timeout", 7200.0, _period, "a model server that is not ready after this is given up"),
    Setting("engines.stall", 300.0, _period, "a model server that makes no token for this long is restarted"),
    Setting("engines.suspend_after", 900.0, _period, "a job without any success for this long is suspended"),
    Setting("devices.release_timeout", 60.0, _period, "a device that is not free this long after its worker is kept"),
    Setting("devices.quarantine_retry", 30.0, _period, "how often a device that was kept is looked at again"),
    Setting("openai.enforce_window", False, _flag, "let OpenAI batches expire at the end of their completion window"),
)  # fmt: skip
_BY_KEY: Final = {setting.key: setting for setting in SETTINGS}
# Tables whose keys are names that the user chooses.
_NAMED: Final = ("paths", "pools", "models")
_TABLES: Final = 'write it as a table: [pools.local], and below it devices = "auto"'
# Variables that are not settings of a section.
VARIABLES: Final = {
    "FREIGHT_CONFIG": "the configuration file",
    "FREIGHT_DATA": "the data folder",
    "FREIGHT_SERVER": "the service that commands talk to",
    "FREIGHT_TOKEN": "the token for it",
    "FREIGHT_TOKEN_FILE": "a file that holds the token",
}


@dataclass(frozen=True, slots=True)
class PathGrant:
    """Folders that a user of the service may read and write."""

    read: tuple[str, ...]
    write: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """A place for workers. `devices` is None for all there are; `options` are the provider's own.

    A worker without a job stays for `keep_warm_s`. No more than `max_loads` models are loaded from one file system at a
    time, each copied into the folder `stage` first ("": not copied).
    """

    devices: tuple[str, ...] | None = None
    keep_warm_s: float = 0.0
    provider: str = "local"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    max_loads: int = 4
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, and the origin of each value: "default", a file, a variable or the registry."""

    values: dict[str, Any]
    origins: dict[str, str]
    models: dict[str, ModelEntry]
    pools: dict[str, Pool]
    paths: dict[str, PathGrant]

    def local_devices(self) -> tuple[str, ...] | None:
        """Return the devices declared for this machine; None for all there are."""
        return self.local_pool().devices

    def local_pool(self) -> Pool:
        """Return this machine's pool."""
        return self.pools.get("local") or Pool()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


_NO_HOME: Final = "set HOME, or FREIGHT_CONFIG and FREIGHT_DATA"


def config_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the configuration file in force; None when there is none. Raises UserError when a named one is missing."""
    named = environment.get("FREIGHT_CONFIG")
    hint = "name another with FREIGHT_CONFIG" if named else _NO_HOME
    with refusing(f"cannot read the configuration {named or ''}".rstrip(), hint):
        if named:
            if not Path(named).is_file():
                raise UserError(f"FREIGHT_CONFIG names {named}, which is not a file", "name a TOML file, or unset it")
            return Path(named)
        folder = Path("/etc/freight") if os.geteuid() == 0 else Path(platformdirs.user_config_dir("freight"))
        path = folder / "config.toml"
        return path if path.is_file() else None


def data_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the data folder, which need not exist yet."""
    named = environment.get("FREIGHT_DATA")
    if named:
        return Path(named).absolute()
    with refusing("cannot tell the data folder", _NO_HOME):
        return Path("/var/lib/freight") if os.geteuid() == 0 else Path(platformdirs.user_data_dir("freight"))


def load_config(
    registry: Mapping[str, ModelEntry], built_in: Mapping[str, ModelEntry], environment: Mapping[str, str] = os.environ
) -> Config:
    """Return the settings in force; raise UserError naming the file and dotted key of the first bad one."""
    values = {setting.key: setting.default for setting in SETTINGS}
    origins = dict.fromkeys(values, "default")
    models = {**built_in, **registry}
    for name in models:
        origins[f"models.{name}"] = "registry" if name in registry else "built in"
    path = config_file(environment)
    named: dict[str, dict[str, Any]] = {table: {} for table in _NAMED}
    if path is not None:
        _read_file(path, values, origins, named)
    _read_environment(environment, values, origins)
    where = str(path)
    for name, table in named["models"].items():
        models[name] = _model(where, name, table)
        origins[f"models.{name}"] = where
    pools = {name: _pool(where, name, table) for name, table in named["pools"].items()}
    paths = {name: _grant(where, name, table) for name, table in named["paths"].items()}
    origins.update({f"{table}.{name}": where for table in ("pools", "paths") for name in named[table]})
    return Config(values, origins, models, pools, paths)


def _read_file(path: Path, values: dict[str, Any], origins: dict[str, str], named: dict[str, dict[str, Any]]) -> None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "name another with FREIGHT_CONFIG") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}", "see https://toml.io for the format") from error
    for key, value in _flatten(content):
        section = key.split(".")[0]
        if section in _NAMED:
            if not isinstance(value, dict):
                raise UserError(f"{path}: {key} must be a table", _TABLES)
            named[section] = value
            continue
        setting = _BY_KEY.get(key)
        if setting is None:
            raise UserError(f"{path}: unknown key {key}", _suggestion(key))
        values[key] = _parsed(setting.parse, value, f"{path}: {key}")
        origins[key] = str(path)


def _flatten(content: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    sections = {key.split(".")[0] for key in _BY_KEY if "." in key}
    for section, value in content.items():
        # An unknown table without keys is an unknown key itself.
        if isinstance(value, dict) and section not in _NAMED and (value or section in sections):
            found += [(f"{section}.{key}", inner) for key, inner in cast(dict[str, Any], value).items()]
        else:
            found.append((section, cast(Any, value)))
    return found


def _suggestion(key: str) -> str:
    return f"known keys: {', '.join(sorted(_BY_KEY))}; and the tables {', '.join(_NAMED)}"


def _read_environment(environment: Mapping[str, str], values: dict[str, Any], origins: dict[str, str]) -> None:
    by_variable = {setting.variable(): setting for setting in SETTINGS}
    sections = tuple({f"FREIGHT_{key.split('.')[0].upper()}_" for key in _BY_KEY if "." in key})
    for variable, text in environment.items():
        if not text:
            continue  # As good as unset.
        setting = by_variable.get(variable)
        if setting is not None:
            values[setting.key] = _parsed(setting.parse, text, variable)
            origins[setting.key] = variable
        elif variable.startswith(sections) and variable not in VARIABLES:
            raise UserError(f"unknown setting variable {variable}", f"known: {', '.join(sorted(by_variable))}")


def _parsed(parse: Callable[[Any], _T], value: Any, where: str) -> _T:
    try:
        return parse(value)
    except ValueError as error:
        raise UserError(f"{where} is {value!r}: {error}", "correct it, or take it out for the default") from None


_ENTRY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_entry_name(name: str) -> None:
    """Raise UserError unless `name` can name a model."""
    if not _ENTRY_NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a model",
            "use letters, digits, '_', '.' and '-', 64 at most, the first a letter or digit",
        )


def _model(where: str, name: str, table: Any) -> ModelEntry:
    try:
        check_entry_name(name)
    except UserError as error:
        raise UserError(f"{where}: models.{name}: {error.message}", error.hint) from None
    known = ModelEntry.__struct_fields__
    unknown = [key for key in _table(where, f"models.{name}", table) if key not in known]
    if unknown:
        raise UserError(f"{where}: unknown key models.{name}.{unknown[0]}", f"known: {', '.join(known)}")
    try:
        return msgspec.convert(table, ModelEntry)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        key = f"models.{name}{path.rstrip('`')}"
        raise UserError(
            f"{where}: {key}: {message[:1].lower() + message[1:]}", f"engines: {', '.join(EngineName)}"
        ) from None


def _devices(value: Any) -> tuple[str, ...] | None:
    return None if value == "auto" else _texts(value)


def _folder(value: Any) -> str:
    if value and not Path(_text(value)).expanduser().is_absolute():
        raise ValueError("expected a folder's path from / on")
    return str(Path(value).expanduser()) if value else ""


# The options of every pool: key, default, how it is read.
_POOL: Final[tuple[tuple[str, Any, Callable[[Any], Any]], ...]] = (
    ("devices", "auto", _devices),
    ("keep_warm", 0, parse_duration),
    ("max_warm", "24h", parse_duration),
    ("max_loads", 4, _count),
    ("stage", "", _folder),
)


def _pool(where: str, name: str, table: Any) -> Pool:
    rest = dict(_table(where, f"pools.{name}", table))
    key = f"{where}: pools.{name}"
    provider = _parsed(_text, rest.pop("provider", "local"), f"{key}.provider")
    pool: dict[str, Any] = {
        known: _parsed(parse, rest.pop(known, default), f"{key}.{known}") for known, default, parse in _POOL
    }
    if provider == "local" and rest:
        known = ", ".join(sorted([option for option, _, _ in _POOL] + ["provider"]))
        raise UserError(f"{where}: unknown key pools.{name}.{next(iter(rest))}", f"known: {known}")
    keep_warm_s, max_warm_s = pool.pop("keep_warm"), pool.pop("max_warm")
    if keep_warm_s > max_warm_s:
        raise UserError(
            f"{key}.keep_warm is longer than {key.split(': ')[1]}.max_warm, {max_warm_s / 3600:g} h",
            "shorten it, raise max_warm, or keep a model up for good: freight models pin NAME",
        )
    return Pool(**pool, keep_warm_s=keep_warm_s, provider=provider, options=rest)


def _grant(where: str, name: str, table: Any) -> PathGrant:
    rest = dict(_table(where, f"paths.{name}", table))
    read, write = (_parsed(_texts, rest.pop(key, []), f"{where}: paths.{name}.{key}") for key in ("read", "write"))
    if rest:
        raise UserError(f"{where}: unknown key paths.{name}.{next(iter(rest))}", "known: read, write")
    return PathGrant(read, write)


def _table(where: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {key} must be a table", _TABLES)
    return value  # pyright: ignore[reportUnknownVariableType]
