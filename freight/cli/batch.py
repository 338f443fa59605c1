"""`freight batch`: jobs of the service, from the file to the results."""

from typing import Final

import click

from freight.cli.lazy import LazyGroup

COMMANDS: Final = {
    "validate": ("freight.cli.validate", "Check every line of a file; nothing runs."),
    "submit": ("freight.cli.submit", "Send a file to the service and make a job of it."),
    "wait": ("freight.cli.waiting", "Wait until a job has ended."),
    "status": ("freight.cli.status", "Show all about one job."),
    "list": ("freight.cli.listing:list_jobs", "List the jobs, the newest first."),
    "results": ("freight.cli.results", "Write a job's results to a file."),
    "cancel": ("freight.cli.changes", "Stop a job; its results so far are kept."),
    "resume": ("freight.cli.changes", "Go on with a job that was cancelled, failed or timed out."),
    "retry": ("freight.cli.changes", "Run a job's failed records again."),
    "delete": ("freight.cli.changes", "Delete a finished job with its input and results."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def batch() -> None:
    """Submit batch jobs to the service, wait for them, get their results.

    These talk to the service of this user, and start one in the background where none runs; to another with
    --server or FREIGHT_SERVER, and FREIGHT_TOKEN or FREIGHT_TOKEN_FILE.

    NAME is a job's name, its id, or a unique prefix of its id.

    \b
    Exit status of all of them:
      0    done
      1    the job failed, was cancelled or timed out, or the operation could not be done
      2    wrong usage, or refused input
      3    no such job
      4    not allowed
      5    no service answers
      130  interrupted
    """
