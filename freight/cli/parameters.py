"""Parameter types that several commands share."""

import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from freight.core.job import ORDERS, State
from freight.parsing import parse_duration

P = ParamSpec("P")
R = TypeVar("R")


class Duration(click.ParamType[float]):
    """A duration such as 90s or 12h, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; fail with what is accepted."""
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r}: must be longer than nothing", param, ctx)
        return seconds


class Concurrency(click.ParamType[int]):
    """A number of requests in flight, or "auto", which is 0."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail with what is accepted."""
        if value in ("auto", 0):
            return 0
        if not (str(value).isascii() and str(value).isdigit()) or not 1 <= int(value) <= 65536:
            self.fail(f"{value!r}: expected auto, or a number from 1 to 65536", param, ctx)
        return int(value)


def job_argument(command: Callable[P, R]) -> Callable[P, R]:
    """Give a command its NAME, which the shell completes."""
    return click.argument("name", shell_complete=_complete_job)(command)


def _complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from freight.cli.names import job_names

    return [CompletionItem(name) for name in job_names(ctx.params.get("server")) if name.startswith(incomplete)]


def model_option(help_text: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a command --model, which the shell completes from the registry, or as a file."""
    return click.option("--model", metavar="M", shell_complete=_complete_model, help=help_text)


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from freight.cli.names import model_names

    found = [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def job_options(workers: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a command the options of how a job is to be run; `workers` says what their number is by default."""
    options = (
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help=f"Model instances that share the records. [default: {workers}]",
        ),
        click.option(
            "--gpus", type=click.IntRange(min=0), metavar="N", help="GPUs per worker, for a model too big for one."
        ),
        click.option(
            "--timeout", type=Duration(), metavar="D", help="Stop after this much running time. [default: none]"
        ),
        click.option(
            "--record-timeout",
            type=Duration(),
            metavar="D",
            help="Give up a record after this. [default: none; 1h on endpoints]",
        ),
        click.option(
            "--concurrency",
            type=Concurrency(),
            default="auto",
            metavar="N|auto",
            help="Requests in flight per worker. [default: auto]",
        ),
        click.option("--strict", is_flag=True, help="Refuse the whole file if any line is bad."),
        click.option(
            "--ignore-record-model", is_flag=True, help="Run every record on this model, whatever its own says."
        ),
        click.option(
            "--order",
            type=click.Choice(ORDERS),
            default="auto",
            help="auto: records that begin alike run one after the other. [default: auto]",
        ),
        click.option("--dedupe", is_flag=True, help="Run equal requests once; all of them get that answer."),
    )

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def service_options(starts: bool = False) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command --server, and with `starts` --no-start; it is called with the `service` that they mean."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def called(*arguments: Any, server: str | None, no_start: bool = True, **options: Any) -> R:
            from freight.cli.service import Service

            return command(*arguments, service=Service(server, no_start), **options)

        decorated: Callable[..., R] = click.option(
            "--server", metavar="URL", help="The service to talk to. [default: FREIGHT_SERVER, else your own]"
        )(called)
        if starts:
            decorated = click.option(
                "--no-start", is_flag=True, help="Do not start a service in the background where none runs."
            )(decorated)
        return decorated

    return decorate


def json_option(command: Callable[P, R]) -> Callable[P, R]:
    """Give a command --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class StateName(click.ParamType[str]):
    """The name of a job's state, in any case, or "active" for all that are not final."""

    name = "state"
    _CHOICES: Final = (*(state.value for state in State), "active")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as it is written; fail with those there are."""
        found = next((choice for choice in self._CHOICES if choice.lower() == str(value).lower()), None)
        if found is None:
            self.fail(f"{value!r} is no state; expected {', '.join(self._CHOICES)}", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the states that go on from what was typed."""
        return [CompletionItem(choice) for choice in self._CHOICES if choice.lower().startswith(incomplete.lower())]
