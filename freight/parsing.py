"""How the values of settings are written: each function returns what one means, or raises ValueError."""

import math
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from freight.core.address import is_loopback, parse_address
from freight.core.media import media_host
from freight.core.receivers import receiver

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
    written = str(value).strip()
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhdw])", written)
    if "".join(number + unit for number, unit in parts) != written or not parts:
        raise ValueError("expected a duration such as 90s, 15m, 12h, 1h30m or 30d")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def period(value: Any) -> float:
    """Return the seconds of a duration that is longer than nothing."""
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


def record_size(value: Any) -> int:
    """Return the bytes that a record may have."""
    size = parse_size(value)
    if not 1 <= size <= 10**9:
        raise ValueError("a record may have at most 1GB")
    return size


def count(value: Any) -> int:
    """Return a whole number above 0."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


def flag(value: Any) -> bool:
    """Return true or false, which a variable may also write 1 or 0."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise ValueError("expected true or false")


def text(value: Any) -> str:
    """Return a text as it is."""
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


def name(value: Any) -> str:
    """Return a text that is not empty."""
    if not text(value):
        raise ValueError("expected a name")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of texts; a variable writes them with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list) and all(isinstance(part, str) for part in value):  # pyright: ignore[reportUnknownVariableType]
        return tuple(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise ValueError("expected a list of texts")


def media_hosts(value: Any) -> tuple[str, ...]:
    """Return the names of hosts that media may come from."""
    return tuple(media_host(host) for host in texts(value))


def receivers(value: Any) -> tuple[str, ...]:
    """Return the entries that say who may get webhooks, as they are written."""
    entries = texts(value)
    for entry in entries:
        receiver(entry)
    return entries


def listen(value: Any) -> str:
    """Return HOST:PORT as it is written, "" for nowhere."""
    if text(value):
        parse_address(value)
    return value


def issuer(value: Any) -> str:
    """Return an issuer as it is written; http is for one on this machine alone."""
    if not text(value):
        return ""
    url = urlsplit(text(value))
    if url.scheme == "https" and url.hostname and not url.query and not url.fragment:
        return value
    if url.scheme == "http" and is_loopback(url.hostname or ""):
        return value
    raise ValueError("expected an https URL, as the provider writes it")


def path(value: Any) -> str:
    """Return a file's absolute path, with ~ for the home folder filled in."""
    if value and not Path(text(value)).expanduser().is_absolute():
        raise ValueError("expected a path from / on")
    return str(Path(value).expanduser()) if value else ""


def mode(value: Any) -> str:
    """Return permissions in octal, of four digits."""
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError('expected permissions in octal, as a text such as "0640"')
    return value.zfill(4)


def keep_or_duration(value: Any) -> float | None:
    """Return seconds, or None for "keep"."""
    return None if value == "keep" else parse_duration(value)


def devices(value: Any) -> tuple[str, ...] | None:
    """Return the names of devices; None for "auto", all there are."""
    return None if value == "auto" else texts(value)


def folder(value: Any) -> str:
    """Return a folder's absolute path, with ~ for the home folder filled in."""
    if value and not Path(text(value)).expanduser().is_absolute():
        raise ValueError("expected a folder's path from / on")
    return str(Path(value).expanduser()) if value else ""


def folders(value: Any) -> tuple[str, ...]:
    """Return the paths of folders that are granted; each is a whole one, and leads nowhere but down."""
    paths = texts(value)
    for shown in paths:
        if not shown.startswith("/") or ".." in shown.split("/") or not shown.isprintable():
            raise ValueError(f"{shown!r} is not a folder's whole path, from / on and without ..")
    return paths
