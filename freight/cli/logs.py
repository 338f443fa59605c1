"""`freight logs`: what a job's model server wrote."""

import sys
from collections.abc import Iterator

import click

from freight.cli.parameters import job_argument, service_options
from freight.cli.service import Service
from freight.cli.text import TerminalText


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option("--worker", type=click.IntRange(min=1), metavar="K", help="Of the K-th worker. [default: of all]")
@service_options()
def logs(name: str, follow: bool, tail: int | None, worker: int | None, service: Service) -> None:
    """Print what the model server of a worker of the job NAME wrote. It may quote records.

    Exit status: 3 no such job; 5 no service runs.
    """
    with service.connect() as client, client.logs(name, worker, tail, follow) as stream:
        shown: Iterator[bytes] = stream.chunks()
        if sys.stdout.isatty():
            shown = TerminalText().cleaned(shown)
        for chunk in shown:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
