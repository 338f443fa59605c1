"""Settings: what there is, where each value comes from, and errors that name the place.

Flags beat FREIGHT_<SECTION>_<KEY> variables, which beat the file, which beats the registry.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import platformdirs

from freight import parsing as read
from freight.core.model import EngineName, ModelEntry
from freight.errors import UserError, refusing

_T = TypeVar("_T")


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
    Setting("retention", None, read.keep_or_duration, 'how long finished jobs\' data is kept ("keep": for ever)'),
    Setting("default_model", "", read.text, "the model of a run that names none"),
    Setting("server.listen", "", read.listen, "HOST:PORT on which the service listens besides its Unix socket"),
    Setting("server.hosts", (), read.texts, "names by which it may be asked (default: the listening host, localhost)"),
    Setting("server.tls_cert", "", read.path, "PEM file of its certificate, which makes it speak https alone"),
    Setting("server.tls_key", "", read.path, "PEM file of the certificate's key (default: in the certificate's file)"),
    Setting("server.max_connections", 2000, read.count, "connections at a time"),
    Setting("server.max_peer_connections", 1000, read.count, "connections at a time from one address"),
    Setting("server.header_timeout", 10.0, read.period, "a request's head that takes longer ends its connection"),
    Setting("server.body_idle_timeout", 30.0, read.period, "a body of which no kilobyte comes this long ends it, too"),
    Setting("server.request_timeout", 30.0, read.period, "a request that is no upload and takes longer, too"),
    Setting("server.keep_alive_timeout", 75.0, read.period, "a connection without a request for this long is closed"),
    Setting("server.send_timeout", 60.0, read.period, "an answer of which nothing is taken for this long is cut"),
    Setting("server.max_body", 1_000_000, read.parse_size, "bytes in a request that is no upload"),
    Setting("limits.records", 150_000, read.count, "records in a job sent over HTTP"),
    Setting("limits.record_bytes", 10_000_000, read.record_size, "bytes in one input line"),
    Setting("limits.file_bytes", 1 << 50, read.parse_size, "bytes in one input file"),
    Setting("limits.active_jobs", 20, read.count, "unfinished jobs of one user"),
    Setting("limits.stored_bytes", 1 << 50, read.parse_size, "bytes of one user here: uploads, inputs and results"),
    Setting("limits.requests", 100, read.count, "requests of one user in a second"),
    Setting("oidc.issuer", "", read.issuer, "URL of the OpenID provider whose tokens (JWT) are accepted, too"),
    Setting("oidc.audience", "", read.text, "for whom its tokens must be made out"),
    Setting("oidc.user_claim", "sub", read.name, "the claim that names the user; one that users cannot change"),
    Setting("oidc.groups_claim", "groups", read.text, "the claim that lists the user's groups"),
    Setting("oidc.admin_group", "", read.text, "the group whose members are admins"),
    Setting("media.hosts", (), read.media_hosts, "hosts from which records may have media fetched over https"),
    Setting("webhooks.hosts", (), read.receivers, "who may be told of jobs' ends: [http://]HOST[:PORT][=ADDRESS]"),
    Setting("webhooks.secret_file", "", read.path, "file of the secrets that webhooks are signed with, one a line"),
    Setting("engines.start_stall", 300.0, read.period, "a loading server that does nothing this long is given up"),
    Setting("engines.start_timeout", 7200.0, read.period, "a model server that is not ready after this is given up"),
    Setting("engines.stall", 300.0, read.period, "a model server that makes no token for this long is restarted"),
    Setting("engines.suspend_after", 900.0, read.period, "a job without any success for this long is suspended"),
    Setting("devices.release_timeout", 60.0, read.period, "a device not free this long after its worker is kept"),
    Setting("devices.quarantine_retry", 30.0, read.period, "how often a device that was kept is looked at again"),
    Setting("facility.output_mode", "0640", read.mode, "permissions of files written for the facility API, in octal"),
    Setting("openai.enforce_window", False, read.flag, "let OpenAI batches expire when their completion window ends"),
)  # fmt: skip
# The keys of each table pools.NAME, and of paths.NAME.
POOL_SETTINGS: Final = (
    Setting("provider", "local", read.text, "who starts its workers; only `local`, this machine, has an effect yet"),
    Setting("devices", "auto", read.devices, 'its devices, such as `["GPU-8f3c…", "cpu:0"]`; `"auto"`: all there are'),
    Setting("keep_warm", 0, read.parse_duration, "how long a worker without a job keeps its model loaded"),
    Setting("max_warm", "24h", read.parse_duration, "the longest that `keep_warm` may be"),
    Setting("max_loads", 4, read.count, "models loaded at a time from one file system"),
    Setting("stage", "", read.folder, "a folder on a local disk into which models are copied before they are loaded"),
    Setting("groups", [], read.texts, "only users in one of these groups may use it; none: all users"),
)
PATH_SETTINGS: Final = (
    Setting("read", [], read.folders, "folders below which the user, `@group` or `*` (all) may have inputs"),
    Setting("write", [], read.folders, "folders below which they may have results written, and inputs, too"),
)
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
    time, each copied into the folder `stage` first ("": not copied). Users must be in one of `groups`, if it has any.
    """

    devices: tuple[str, ...] | None = None
    keep_warm_s: float = 0.0
    provider: str = "local"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    max_loads: int = 4
    stage: str = ""
    groups: tuple[str, ...] = ()
    max_warm_s: float = 86_400.0

    def written(self) -> dict[str, Any]:
        """Return it by the keys that one writes, durations in seconds."""
        values = {
            "provider": self.provider,
            "devices": "auto" if self.devices is None else self.devices,
            "keep_warm": self.keep_warm_s,
            "max_warm": self.max_warm_s,
            "max_loads": self.max_loads,
            "stage": self.stage,
            "groups": self.groups,
        }
        return values | self.options


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
    _check_aliases(models, origins)
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


_TYPES: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "str": "a text",
    "array": "a list of texts",
    "object": "a table of texts",
}
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
        raise UserError(f"{where}: {key}: {message[:1].lower() + message[1:]}", _what_it_takes(key, message)) from None


def _check_aliases(models: Mapping[str, ModelEntry], origins: Mapping[str, str]) -> None:
    """Raise UserError for an alias that is the name of another model, or an alias of it, too."""
    owners = dict.fromkeys(models, "")
    for name, entry in models.items():
        for alias in entry.aliases:
            owner = owners.setdefault(alias, name)
            if owner == name or (not owner and alias == name):
                continue
            whose = f"an alias of model {owner}, too" if owner else "the name of another model"
            place = f"{origins[f'models.{name}']}: models.{name}.aliases"
            raise UserError(f"{place} has {alias!r}, which is {whose}", "take it out of one of the two")


def _what_it_takes(key: str, message: str) -> str:
    """Return what goes into a key of a model, by what msgspec says that it expected."""
    expected = re.match(r"Expected `([^`]+)`(?: (>= \d+))?", message)
    words = [_TYPES[kind] for kind in expected[1].split(" | ") if kind in _TYPES] if expected else []
    if not words or key.endswith(".engine"):
        return f"engines: {', '.join(EngineName)}"
    return f"{key} takes {' or '.join(words)}{f', {expected[2]}' if expected and expected[2] else ''}"


def _pool(where: str, name: str, table: Any) -> Pool:
    rest = dict(_table(where, f"pools.{name}", table))
    key = f"{where}: pools.{name}"
    pool = _taken(POOL_SETTINGS, rest, key)
    if pool["provider"] == "local":
        _check_all_known(POOL_SETTINGS, rest, where, f"pools.{name}")
    keep_warm_s, max_warm_s = pool.pop("keep_warm"), pool.pop("max_warm")
    if keep_warm_s > max_warm_s:
        raise UserError(
            f"{key}.keep_warm is longer than {key.split(': ')[1]}.max_warm, {max_warm_s / 3600:g} h",
            "shorten it, raise max_warm, or keep a model up for good: freight models pin NAME",
        )
    return Pool(**pool, keep_warm_s=keep_warm_s, max_warm_s=max_warm_s, options=rest)


def _grant(where: str, name: str, table: Any) -> PathGrant:
    rest = dict(_table(where, f"paths.{name}", table))
    grant = _taken(PATH_SETTINGS, rest, f"{where}: paths.{name}")
    _check_all_known(PATH_SETTINGS, rest, where, f"paths.{name}")
    return PathGrant(**grant)


def _taken(known: Sequence[Setting], rest: dict[str, Any], where: str) -> dict[str, Any]:
    """Take what is known out of a table; return the values, with defaults for what is not there."""
    return {one.key: _parsed(one.parse, rest.pop(one.key, one.default), f"{where}.{one.key}") for one in known}


def _check_all_known(known: Sequence[Setting], rest: dict[str, Any], where: str, table: str) -> None:
    if rest:
        names = ", ".join(sorted(one.key for one in known))
        raise UserError(f"{where}: unknown key {table}.{next(iter(rest))}", f"known: {names}")


def _table(where: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {key} must be a table", _TABLES)
    return value  # pyright: ignore[reportUnknownVariableType]
