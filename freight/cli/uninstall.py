"""`freight uninstall`: the end of the service and of what it keeps."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from freight.config import data_folder
from freight.errors import OperationError, UserError

# What is Freight's in the data folder, and what of it is the users' data.
_KEPT: Final = ("batch", "files", "catalog.db*")
_OTHER: Final = ("run", "uploads", "workers", "owner", "serve.log", "models.json*", "models")
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class _Found:
    """What of Freight's is in the data folder: paths to remove, batch data, and how much of that there is."""

    other: list[Path]
    batch: list[Path]
    jobs: int
    bytes: int

    def batch_words(self) -> str:
        """Say how much batch data there is."""
        return f"the batch data of {self.jobs} job{'' if self.jobs == 1 else 's'} ({_size(self.bytes)})"


@click.command()
@click.option("--remove-batch-data", is_flag=True, help="Remove the jobs with their inputs and results, too.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def uninstall(remove_batch_data: bool, yes: bool) -> None:
    """Stop the service and remove what it keeps in the data folder. Batch data stays, as it cannot be made again.

    The configuration file stays, and so does whatever in the data folder is not Freight's.

    Exit status: 1 it could not be done, or the answer was no; 2 no -y where nobody can be asked.
    """
    folder = data_folder()
    found = _look(folder)
    doomed = [*found.other, *(found.batch if remove_batch_data else [])]
    if found.batch:
        fate = f"{'remove' if remove_batch_data else 'keep'} {found.batch_words()}"
    else:
        fate = "there is no batch data"
    names = ", ".join(path.name for path in doomed) or "nothing"
    question = f"stop the service and remove from {folder}: {names}; {fate}"
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"to {question}: needs a yes, and there is no terminal to ask on", "use -y")
        if not click.confirm(f"{question}?", err=True):
            raise OperationError("nothing was removed")
    _stop(folder)
    found = _look(folder)  # The service may have finished something, or made another file, in the meantime.
    _remove(folder, [*found.other, *(found.batch if remove_batch_data else [])])
    _say_done(folder, found, remove_batch_data)


def _say_done(folder: Path, found: _Found, removed: bool) -> None:
    if found.batch:
        click.echo(f"{'removed' if removed else 'kept'} {found.batch_words()} in {folder}", err=True)
    if folder.exists():
        click.echo(f"the data folder {folder} stays, as it is not empty", err=True)
    click.echo("to remove the package, too: pip uninstall freight", err=True)


def _look(folder: Path) -> _Found:
    def matching(patterns: tuple[str, ...]) -> list[Path]:
        return [path for pattern in patterns for path in sorted(folder.glob(pattern))]

    jobs, size = 0, 0
    batch = matching(_KEPT)
    for path in batch:
        if path.is_dir() and not path.is_symlink():
            jobs += sum(entry.is_dir() for entry in path.iterdir())
        size += _bytes_in(path)
    return _Found(matching(_OTHER), batch, jobs, size)


def _bytes_in(path: Path) -> int:
    total = 0
    for top, _, names in os.walk(path):
        for name in names:
            try:
                found = Path(top, name).lstat()
                # What several names lead to counts once.
                total += found.st_size // max(1, found.st_nlink)
            except FileNotFoundError:
                continue  # A running job's own coming and going.
    return total if path.is_dir() else path.lstat().st_size


def _stop(folder: Path) -> None:
    from freight.cli.local import own_client
    from freight.cli.serve import ended_leftovers, stop_service

    with own_client() as client:
        info = stop_service(client)
    if info is not None:
        click.echo(f"stopped the service (pid {info.pid})", err=True)
    elif folder.exists() and (left := ended_leftovers(folder)):
        click.echo(left.removeprefix("; "), err=True)


def _remove(folder: Path, paths: list[Path]) -> None:
    try:
        for path in paths:
            # A link goes, what it leads to stays.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise OperationError(
            f"cannot remove {error.filename or folder}: {error.strerror}", "run it as the owner of the data folder"
        ) from error


def _size(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= unit), (1, "bytes"))
    return f"{count / unit:.3g} {name}"
