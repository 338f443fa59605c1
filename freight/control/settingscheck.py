"""What is wrong with settings that can be read: they name things that are not there."""

import stat
from collections.abc import Iterator
from pathlib import Path

from freight.config import Config
from freight.errors import UserError


def check_settings(config: Config) -> None:
    """Raise UserError naming the place of a setting with which no service can keep its word."""
    if not config["webhooks.hosts"]:
        return
    from freight.control.webhooks import webhook_settings  # It takes its time to import.

    try:
        webhook_settings(config).secrets()
    except UserError as error:
        key = "webhooks.secret_file" if config["webhooks.secret_file"] else "webhooks.hosts"
        raise UserError(f"{config.origins[key]}: {error.message}", error.hint) from error


def missing_folders(config: Config) -> Iterator[str]:
    """Yield what is wrong with each granted folder that is not there for the service.

    They may be there later on, so that none of this keeps a service from starting.
    """
    for who, grant in config.paths.items():
        for key, folders in (("read", grant.read), ("write", grant.write)):
            for folder in folders:
                if words := _missing(folder):
                    yield f"{config.origins[f'paths.{who}']}: paths.{who}.{key} grants {folder}, {words}"


def _missing(folder: str) -> str:
    try:
        return "" if stat.S_ISDIR(Path(folder).stat().st_mode) else "which is no folder"
    except FileNotFoundError:
        return "which does not exist"
    except OSError as error:
        return f"which cannot be looked at: {error.strerror}"
