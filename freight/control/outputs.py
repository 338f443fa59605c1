"""Whether a job's results could go where its user wants them, before there is a job."""

import os
import tempfile
from pathlib import Path
from typing import Any

from freight.config import Config
from freight.control.below import FileBelow
from freight.control.grants import Grants
from freight.control.shelf import OUTPUT_ROOT
from freight.core.account import Account
from freight.errors import UserError, refusing


def place_output(account: Account, folder: Path, name: str, config: Config) -> dict[str, Any]:
    """Return what is kept of a job about its output folder; raise FreightError where `name` could not go there.

    Admins may name any folder, others one below a root that is granted to them for output.
    """
    if account.is_admin():
        _check_output(folder, name)
        return {}
    root, path = grants_of(config).output_root(account, str(folder))
    place = FileBelow(root.path, path, name, mode=output_mode(config))
    place.check()
    if place.is_taken():
        raise UserError(f"{path / name} exists", "move it away, or choose another folder or name")
    return {OUTPUT_ROOT: str(root.path)}


def check_granted(account: Account, folder: Path, config: Config) -> None:
    """Raise NotAllowed where a folder that was granted for output when a job was made is not so any more."""
    if not account.is_admin():
        grants_of(config).output_root(account, str(folder))


def grants_of(config: Config) -> Grants:
    """Return what is granted to whom now."""
    return Grants(config.paths)


def output_mode(config: Config) -> int:
    """Return the mode of files that are written below granted roots."""
    return int(config["facility.output_mode"], 8)


def _check_output(folder: Path, name: str) -> None:
    """Raise UserError for a folder into which the results file could not go."""
    with refusing(f"cannot write results into {folder}", "choose another folder for --output"):
        if not folder.is_dir():
            raise UserError(f"the output folder {folder} does not exist", f"make it first: mkdir -p {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to the output folder {folder}", "choose another for --output")
        with tempfile.TemporaryFile(dir=folder):
            pass  # Some folders that may be written to take no file all the same.
        if os.path.lexists(folder / name):
            raise UserError(f"{folder / name} exists", "move it away, or choose another folder or name")
