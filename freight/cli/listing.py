"""`freight batch list` and `freight ps`: jobs and workers in tables."""

from collections.abc import Callable, Sequence
from typing import Final

import click

from freight.cli.parameters import StateName, json_option, service_options
from freight.cli.service import Service
from freight.cli.tables import age, print_json, print_table
from freight.core.job import State
from freight.core.view import JobSummary, WorkerStatus
from freight.errors import UserError

ACTIVE: Final = "active"


@click.command("list")
@click.option(
    "--status",
    type=StateName(),
    metavar="S",
    help=f"Only jobs in this state ({', '.join(State)}), or all that have not ended ({ACTIVE}).",
)
@click.option("--model", metavar="M", help="Only jobs of this model.")
@click.option("--name", metavar="N", help="Only jobs whose name begins so.")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names alone.")
@service_options(starts=True)
def list_jobs(
    status: str | None, model: str | None, name: str | None, as_json: bool, quiet: bool, service: Service
) -> None:
    """List the jobs, the newest first."""
    if as_json and quiet:
        raise UserError("--json and --quiet do not go together", "leave one out")
    with service.connect() as client:
        jobs = list(client.jobs(status, model=model, name=name))
    if as_json:
        print_json(jobs)
    elif quiet:
        shown = naming(jobs)
        for job in jobs:
            click.echo(shown(job))
    elif jobs:
        headings = ("NAME", "STATE", "MODEL", "PROGRESS", "FAILED", "AGE", "REASON")
        shown = naming(jobs)
        rows = [
            (shown(job), job.state, job.model, _progress(job), str(job.failed), age(job.created_at), _reason(job))
            for job in jobs
        ]
        print_table(headings, rows, shrinks=("MODEL", "REASON"))
    else:
        asked = "".join(f"{words} {value}" for words, value in _asked(status, model, name) if value is not None)
        click.echo(f"no jobs{asked}", err=True)


@click.command()
@click.option("-a", "--all", "show_all", is_flag=True, help="Show jobs that have ended, too.")
@json_option
@service_options()
def ps(show_all: bool, as_json: bool, service: Service) -> None:
    """Show the jobs that have not ended, why they wait, and the workers that keep a model warm or pinned.

    Exit status: 5 when no service runs.
    """
    with service.connect() as client:
        jobs = list(client.jobs(None if show_all else ACTIVE))
        machine = client.machine()
    workers = machine.workers
    if as_json:
        print_json({"jobs": jobs, "workers": workers, "pins": machine.pins})
        return
    if jobs:
        headings = ("NAME", "STATE", "MODEL", "PROGRESS", "WORKERS", "AGE", "REASON")
        shown = naming(jobs)
        rows = [
            (
                shown(job),
                job.state,
                job.model,
                _progress(job),
                _workers(job, workers),
                age(job.created_at),
                _reason(job),
            )
            for job in jobs
        ]
        print_table(headings, rows, shrinks=("MODEL", "REASON"))
    else:
        click.echo("no jobs" if show_all else "no jobs that have not ended", err=True)
    warm = [worker for worker in workers if worker.job is None]
    if warm:
        click.echo()
        rows = [(w.model, w.place, _phase(w), age(w.started_at), w.note) for w in warm]
        print_table(("WARM MODEL", "PLACE", "PHASE", "AGE", "NOTE"), rows, shrinks=("WARM MODEL", "NOTE"))
    if machine.pins:
        click.echo()
        rows = [(pin.model, f"{pin.up}/{pin.workers}", pin.reason.partition("\n")[0]) for pin in machine.pins]
        print_table(("PINNED MODEL", "UP", "REASON"), rows, shrinks=("PINNED MODEL", "REASON"))


def _asked(status: str | None, model: str | None, name: str | None) -> tuple[tuple[str, str | None], ...]:
    return (" in state", status), (" of the model", model), (" whose name begins with", name)


def naming(jobs: Sequence[JobSummary]) -> Callable[[JobSummary], str]:
    """Return how jobs are to be called: by their names, or where they are of several users as USER/NAME."""
    if len({job.user for job in jobs}) > 1:
        return lambda job: f"{job.user}/{job.name}"
    return lambda job: job.name


def _phase(worker: WorkerStatus) -> str:
    return f"{worker.phase} (pinned)" if worker.pinned else worker.phase


def _reason(job: JobSummary) -> str:
    # What a model server said last comes below its first line, and is for `status`.
    return job.reason.partition("\n")[0]


def _progress(job: JobSummary) -> str:
    return f"{job.done}/{'?' if job.records is None else job.records}"


def _workers(job: JobSummary, workers: list[WorkerStatus]) -> str:
    return str(sum(worker.job in (job.id, job.name) and worker.user == job.user for worker in workers))
