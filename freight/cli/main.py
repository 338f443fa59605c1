"""The `freight` command."""

import os
import sys
from contextlib import suppress
from typing import Any, Final

import click

from freight import __version__
from freight.cli.lazy import LazyGroup
from freight.cli.text import printable
from freight.errors import FreightError, OperationError

COMMANDS: Final = {
    "run": ("freight.cli.run", "Run a file of requests through a model and write the results file."),
    "batch": ("freight.cli.batch", "Submit batch jobs to the service, wait for them, get their results."),
    "ps": ("freight.cli.listing", "Show the jobs and workers that there are now."),
    "logs": ("freight.cli.logs", "Show what a job's model server wrote."),
    "models": ("freight.cli.models", "List, add, show and remove models."),
    "gpus": ("freight.cli.gpus", "Show the devices and who holds them; free one by hand."),
    "config": ("freight.cli.config", "Show the settings in force."),
    "serve": ("freight.cli.serve", "Run the service that queues jobs and runs them."),
    "stop": ("freight.cli.serve", "Stop the service; unfinished jobs go on at its next start."),
    "token": ("freight.cli.token", "Make, list and revoke tokens, by which users of the service are known on TCP."),
    "doctor": ("freight.cli.doctor", "Check this machine and say what is wrong with it."),
    "completion": ("freight.cli.completion", "Print a script that completes commands in your shell."),
    "uninstall": ("freight.cli.uninstall", "Stop the service and remove what it keeps, but for batch data."),
}


class _ReaderGone(Exception):
    """Whoever read our output went away."""


class _Commands(LazyGroup):
    """All commands."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what a broken pipe means is not left to the command line's library."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None


@click.group(
    cls=_Commands,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="freight", message="%(prog)s %(version)s")
def freight() -> None:
    """Batch LLM inference on your own hardware.

    A file of OpenAI-style requests goes in, a results file comes out: one line per record, in the order
    sent. Nothing leaves your machines.
    """


def fail(error: FreightError) -> None:
    """Print an error as users see it: what and where, then the fix."""
    with suppress(BrokenPipeError):  # Nobody reads it; the status still says it.
        click.echo(f"error: {printable(error.message)}", err=True)
        if error.hint:
            click.echo(f"hint: {printable(error.hint)}", err=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit with its status."""
    _open_standard_files()
    try:
        status: Any = freight.main(arguments, prog_name="freight", standalone_mode=False)
    except click.exceptions.Exit as error:
        status = error.exit_code
    except click.UsageError as error:
        _fail_usage(error)
        status = 2
    except click.Abort:
        status = 130
    except FreightError as error:
        fail(error)
        status = error.exit_code
    except _ReaderGone:
        # As `| head` does: nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 0
    except OSError as error:
        fail(OperationError(f"{error.filename or 'output'}: {error.strerror or error}"))
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _open_standard_files() -> None:
    """Open /dev/null for each standard file that is closed, as some daemons start programs."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _fail_usage(error: click.UsageError) -> None:
    with suppress(BrokenPipeError):
        click.echo(f"error: {error.format_message()}", err=True)
        if error.ctx is not None:
            click.echo(f"hint: {error.ctx.command_path} --help", err=True)
