"""`freight run`: one file, one model, no server."""

import gc
import os
import re
import signal
import sys
from contextlib import closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from freight.cli.parameters import job_options, model_option
from freight.cli.settings import settings
from freight.config import Config
from freight.core.model import EngineName
from freight.errors import UserError

if TYPE_CHECKING:
    from freight.launchers.standby import Standby

# A clean stop that takes longer is told about.
_SLOW_STOP_S: Final = 3.0


@click.command()
@click.argument("file")
@click.option("-o", "--output", required=True, metavar="OUT", help="The results file. It appears whole, at the end.")
@model_option("A registered model, a .gguf file, or the URL of a server that runs.")
@job_options(workers="one per device")
@click.option("--fresh", is_flag=True, help="Forget the state of an earlier run and start over.")
@click.option("--force", is_flag=True, help="Replace an output that Freight did not write.")
@click.option("--retry-errors", is_flag=True, help="Run again the records that ended in an error.")
@click.option("--fail-on-errors", is_flag=True, help="Exit with 6 when any record failed.")
def run(file: str, output: str, fail_on_errors: bool, **options: Any) -> None:
    """Run FILE (JSON Lines; - for standard input) through a model and write the results to OUT.

    State is kept in OUT.freight until every record is answered. Killed at any moment, the same command goes on
    where it stopped and runs no finished record again.

    Exit status: 0 done; 1 failed or timed out; 2 refused; 6 records failed and --fail-on-errors; 130 interrupted.
    """
    config = settings()
    standby = _standby(options["model"], config)
    with closing(standby) if standby else nullcontext():
        # Much is imported here, so that --help stays fast; none of it is garbage.
        gc.disable()
        import uvloop

        from freight.api.exchange import ExchangeServer
        from freight.cli.progress import RunConsole
        from freight.control.embedded import EmbeddedRun

        gc.freeze()
        gc.enable()
        console = RunConsole()
        job = EmbeddedRun(_request(file, output, options), config, console, ExchangeServer, standby)
        with console:
            outcome = uvloop.run(_with_signals(job, console))
        console.summary(outcome, output)
    _leave(outcome.exit_status(fail_on_errors))


def _standby(model: str | None, config: Config) -> "Standby | None":
    """Start a worker process before all else where the model is a server that runs: it is what the first request waits
    for. Elsewhere a worker needs a device first, and its model's server takes longer.
    """
    entry = config.models.get(model or "")
    if not re.match("https?://", model or "", re.IGNORECASE) and (not entry or entry.engine is not EngineName.ENDPOINT):
        return None
    from freight.launchers.standby import Standby

    try:
        return Standby()
    except OSError:
        return None  # It is started when it is needed, which then says what is wrong.


def _leave(status: int) -> NoReturn:
    """End this process with all that it said written out: taking it apart would take as long as a small file does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # Nobody reads it.
            stream.flush()
    os._exit(status)


def _request(file: str, output: str, options: dict[str, Any]) -> Any:
    from freight.control.embedded import RunRequest
    from freight.control.jobrun import JobOptions

    if output == "-":
        raise UserError("-o - : results are never printed", "name a file")
    return RunRequest(
        file=file,
        output=output,
        model=options["model"],
        options=JobOptions(
            workers=options["workers"] or 0,
            timeout_s=options["timeout"] or 0.0,
            record_timeout_s=options["record_timeout"] or 0.0,
            concurrency=options["concurrency"],
            order=options["order"],
            dedupe=options["dedupe"],
        ),
        gpus=options["gpus"],
        strict=options["strict"],
        ignore_record_model=options["ignore_record_model"],
        fresh=options["fresh"],
        force=options["force"],
        retry_errors=options["retry_errors"],
    )


async def _with_signals(job: Any, console: Any) -> Any:
    """Run the job; the first signal stops it cleanly, the second at once."""
    import asyncio

    loop = asyncio.get_running_loop()
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            job.kill()
            # The live display had hidden the cursor.
            cursor = b"\x1b[?25h\n" if sys.stderr.isatty() else b""
            with suppress(OSError):
                os.write(2, cursor + b"ended at once; what is done is kept, and the same command goes on\n")
            os._exit(130)
        asked = True
        job.interrupt()
        loop.call_later(
            _SLOW_STOP_S, console.note, "stopping: waiting for the model server to end (Ctrl-C ends it at once)"
        )

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What whoever started us ignores stays ignored: nohup, and background jobs of a shell.
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, stop)
    return await job.run()
