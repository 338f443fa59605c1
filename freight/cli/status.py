"""`freight batch status`: all about one job."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from freight.cli.parameters import job_argument, json_option, service_options
from freight.cli.progress import duration, kind, line
from freight.cli.service import Service
from freight.cli.tables import local_time, print_json
from freight.cli.text import printable
from freight.cli.waiting import follow, progress_of
from freight.core.job import FINAL
from freight.core.view import JobEvent, JobStatus, WorkerStatus
from freight.errors import UserError

if TYPE_CHECKING:
    from freight.client.sync import Client

_BAR: Final = 30
_INDENT: Final = 11


@click.command()
@job_argument
@json_option
@click.option("--watch", is_flag=True, help="Go on showing it until the job has ended.")
@service_options(starts=True)
def status(name: str, as_json: bool, watch: bool, service: Service) -> None:
    """Show all about the job NAME: its state and why, progress, failures, speed, workers and what happened.

    Exit status: 0 whatever the job's state; 3 no such job.
    """
    if as_json and watch:
        raise UserError("--json and --watch do not go together", "leave one out")
    with service.connect() as client:
        if watch:
            _watch(client, name)
        elif as_json:
            print_json(client.job(name))
        else:
            click.echo(view(client.job(name)))


def _watch(client: "Client", name: str) -> None:
    if not sys.stdout.isatty():
        last = ""

        def say(seen: JobStatus) -> None:
            nonlocal last
            mark = f"{seen.state} {seen.reason} {seen.done} {seen.failed}"
            if mark != last:
                click.echo(line(progress_of(seen)))
            last = mark

        follow(client, name, None, say, _note)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    with Live(console=console, auto_refresh=False) as live:
        follow(client, name, None, lambda seen: live.update(Text(view(seen)), refresh=True), console.print)


def _note(text: str) -> None:
    click.echo(text, err=True)


def view(job: JobStatus) -> str:
    """Return a job as text for people."""
    rows = "\n".join(f"{title:<{_INDENT}}{text}" for title, text in _rows(job))
    events = "".join(f"\n  {local_time(e.at)}  {e.state:<10}  {_happening(e)}" for e in job.events)
    return f"{rows}\n\nwhat happened{events}" if events else rows


def _rows(job: JobStatus) -> Iterator[tuple[str, str]]:
    yield "job", f"{job.name} ({job.id})"
    yield "state", f"{job.state}: {_block(job.reason)}" if job.reason else job.state
    yield "model", _clean(job.model)
    yield "input", f"{_clean(job.file) or '-'}, {job.bytes} bytes, SHA-256 {job.sha256[:16]}…"
    if job.output:
        yield "output", _clean(job.output)
    if job.notify:
        yield "notifies", _clean(job.notify)
    if job.priority:
        yield "priority", str(job.priority)
    yield "progress", _progress(job)
    if job.state not in FINAL and job.eta_s is not None:
        yield "time left", f"about {duration(job.eta_s)}"
    for number, failure in enumerate(job.failures):
        words = f"{failure.count} × {kind(failure.code, failure.status)}, for example: {_clean(failure.example)}"
        yield "" if number else "failures", words
    if job.cut:
        yield "cut off", f"{job.cut} by their token limit"
    if job.input_tokens or job.output_tokens:
        yield "tokens", _tokens(job)
    for number, worker in enumerate(job.workers):
        yield "" if number else "workers", _worker(worker)
    yield "times", f"created {local_time(job.created_at)}, {_ran(job)}"


def _progress(job: JobStatus) -> str:
    if job.records is None:
        return "the input is not read yet"
    filled = _BAR * job.done // job.records if job.records else _BAR
    percent = 100 * job.done // job.records if job.records else 100
    failed = f", {job.failed} failed" if job.failed else ""
    flying = f", {job.in_flight} in flight" if job.in_flight else ""
    return f"{'█' * filled}{'░' * (_BAR - filled)} {percent}%  {job.done} of {job.records} records{failed}{flying}"


def _tokens(job: JobStatus) -> str:
    cached = f" ({100 * job.cached_tokens / job.input_tokens:.0f}% cached)" if job.input_tokens else ""
    rates = f"; {job.input_rate:.0f}/s in, {job.output_rate:.0f}/s out" if job.state not in FINAL else ""
    return f"{job.input_tokens} in{cached}, {job.output_tokens} out{rates}"


def _worker(worker: WorkerStatus) -> str:
    note = f" · {_clean(worker.note)}" if worker.note else ""
    return f"{worker.number or '-'}  {_clean(worker.place)}  {worker.phase}, {worker.in_flight} in flight{note}"


def _ran(job: JobStatus) -> str:
    started = f"started {local_time(job.started_at)}" if job.started_at else "not started"
    finished = f", ended {local_time(job.finished_at)}" if job.finished_at else ""
    return f"{started}{finished}; ran {duration(job.ran_s)}"


def _happening(event: JobEvent) -> str:
    return _clean(f"{event.event}: {event.detail}" if event.detail else event.event)


def _clean(text: str) -> str:
    return printable(text, one_line=True)


def _block(text: str) -> str:
    """Return text of several lines, as a server's last words are, below each other."""
    return printable(text).replace("\n", "\n" + " " * _INDENT)
