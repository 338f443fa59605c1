"""`freight doctor`: is this machine fit to run?"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from freight.config import config_file, data_folder

if TYPE_CHECKING:
    from freight.control.doctor import Finding

_PATIENCE_S = 5.0


@click.command()
def doctor() -> int:
    """Check this machine and say what is wrong with it.

    Exit status: 0 when everything needed works, 1 when something does not.
    """
    from freight.control.doctor import examine

    failed = False
    for finding in (*examine(config_file(), data_folder()), _service(data_folder())):
        failed = failed or (finding.grave and not finding.good)
        mark = "ok  " if finding.good else "FAIL" if finding.grave else "warn"
        click.echo(f"{mark} {finding.what}: {finding.found}")
        if finding.fix and not finding.good:
            click.echo(f"     {finding.fix}")
    return 1 if failed else 0


def _service(folder: Path) -> "Finding":
    from freight.cli.local import own_client
    from freight.control.doctor import Finding
    from freight.errors import FreightError, NoServer

    with own_client(_PATIENCE_S) as client:
        try:
            info = client.version()
            jobs = sum(1 for _ in client.jobs("active"))
        except NoServer as error:
            owner = _living_owner(folder)
            if owner is None:
                return Finding("service", "not running")
            found = f"process {owner} owns {folder}, and nothing answers: {error.message}"
            return Finding("service", found, False, f"see {folder}/serve.log; kill {owner} ends it and loses nothing")
        except FreightError as error:
            return Finding("service", error.message, False, error.hint or f"see {folder}/serve.log")
    return Finding("service", f"running (pid {info.pid}, Freight {info.version}, {jobs} unfinished jobs)")


def _living_owner(folder: Path) -> int | None:
    """Return the process that owns the data folder, if it lives on this machine."""
    import msgspec

    from freight.store.folder import Owner

    try:
        process = msgspec.json.decode((folder / "owner").read_bytes(), type=Owner).process
    except (OSError, msgspec.DecodeError):
        return None
    return process.pid if process.is_local() and process.is_running() else None
