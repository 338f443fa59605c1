"""`freight models pin` and `unpin`: models that are up always."""

import click

from freight.cli.parameters import service_options
from freight.cli.service import Service
from freight.cli.text import counted


@click.command()
@click.argument("name")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, metavar="N", help="How many of it are to be up. [default: 1]"
)
@service_options(starts=True)
def pin(name: str, workers: int, service: Service) -> None:
    """Have model NAME up always, so that its jobs begin at once.

    Its workers start when there are free devices, stay when their jobs have ended, and never make room for another
    model. Also after a restart of the service, until `freight models unpin`.

    Exit status: 2 the model cannot run here, or so many of it do not fit.
    """
    with service.connect() as client:
        client.pin(name, workers)
    click.echo(f"{name} is pinned: {counted(workers, 'worker')} (see freight ps)", err=True)


@click.command()
@click.argument("name")
@service_options()
def unpin(name: str, service: Service) -> None:
    """Let the workers of model NAME go when no job needs them.

    Exit status: 2 it is not pinned; 5 no service runs.
    """
    with service.connect() as client:
        client.unpin(name)
    click.echo(f"{name} is pinned no more", err=True)
