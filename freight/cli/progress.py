"""How a run shows what it does: a live bar on a terminal, a line now and then elsewhere, a summary at the end."""

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

from freight.cli.text import printable
from freight.core.job import State
from freight.core.progress import Outcome, Progress
from freight.core.record import INTAKE_CODES

# Imported where it is used: help and completion have no time for it.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LINE_EVERY_S: Final = 30.0
_BAR_WIDTH: Final = 28
# Variables that have a console draw where there is no terminal.
_TERMINAL_ANYWAY: Final = frozenset({"FORCE_COLOR", "TTY_COMPATIBLE"})
_SAME_COMMAND: Final = "the same command then goes on with the records that are left"


class _Plain:
    """What a file or a pipe gets: lines, and nothing that moves."""

    is_terminal: Final = False
    quiet = False

    def print(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _lasting_console() -> "Console | _Plain":
    """Return a console whose reader may go away, as `2>&1 | head` does: it falls silent, and the run goes on."""
    if not sys.stderr.isatty() and _TERMINAL_ANYWAY.isdisjoint(os.environ):
        return _Plain()
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Lasting(file=sys.stderr, highlight=False, soft_wrap=True, markup=False)


class RunConsole:
    """A run's messages, all on standard error."""

    def __init__(self) -> None:
        self._console = _lasting_console()
        self._live: Live | None = None
        self._line_at = time.monotonic() + LINE_EVERY_S
        self._last_state = ""
        self._last_note = ""
        self._began = time.monotonic()

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def _print(self, text: str) -> None:
        try:
            self._console.print(text)
        except OSError:
            self._console.quiet = True

    def note(self, text: str) -> None:
        """Say one line, once."""
        if text != self._last_note:
            self._print(text)
        self._last_note = text

    def show(self, progress: Progress) -> None:
        """Show how the job stands."""
        if not isinstance(self._console, _Plain) and self._console.is_terminal:
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(_bar(progress))
            return
        # A state that needs the reader's attention is said when it comes, everything else now and then.
        state = f"{progress.state}: {progress.reason}" if progress.reason else progress.state
        news = state != self._last_state and bool(progress.reason)
        self._last_state = state
        if news or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            self._print(line(progress))

    def summary(self, outcome: Outcome, output: str, took_s: float | None = None, mend: str = _SAME_COMMAND) -> None:
        """Say how the run ended; the last line says how many records failed, and why most of them did."""
        took_s = time.monotonic() - self._began if took_s is None else took_s
        for text in summary(outcome, output, took_s, mend):
            self._print(text)


def line(progress: Progress) -> str:
    """Return one line that says how the job stands."""
    parts = [f"{progress.state} {progress.totals.done}/{progress.total}"]
    if progress.totals.failed:
        parts.append(f"{progress.totals.failed} failed")
    if progress.state == State.RUNNING:
        parts.append(f"{progress.input_rate:.0f} tokens/s in, {progress.output_rate:.0f} out")
        eta = progress.eta_s()
        if eta is not None:
            parts.append(f"{duration(eta)} left")
    if progress.reason:
        parts.append(printable(progress.reason.splitlines()[0]))
    return " · ".join(parts)


def _bar(progress: Progress) -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(progress.total, 1), completed=progress.totals.done, width=_BAR_WIDTH)
    grid.add_row(bar, Text(line(progress), overflow="ellipsis", no_wrap=True))
    return grid


def summary(outcome: Outcome, output: str, took_s: float, mend: str = _SAME_COMMAND) -> list[str]:
    """Return the closing lines of a run. `mend` says what goes on once the cause of a failure is mended."""
    totals = outcome.totals
    if outcome.already_done:
        lines = [f"already done: {output} ({outcome.total} records)"]
        if outcome.note:
            lines.append(f"note: {outcome.note}")
        if totals.failed:
            if any(failure.code not in INTAKE_CODES for failure in outcome.failures):
                lines.append("hint: --retry-errors runs those again that failed")
            lines.append(f"{totals.failed} of {outcome.total} failed{_commonest(outcome)}")
        return lines
    lines = [_headline(outcome, output, took_s)]
    if outcome.reason:
        lines += [
            f"error: {printable(outcome.reason)}",
            f"hint: {'' if outcome.state is State.TIMED_OUT else 'mend the cause; '}{mend}",
        ]
    if totals.input_tokens or totals.output_tokens:
        cached = (
            f", {100 * totals.cached_tokens / totals.input_tokens:.0f}% of them cached" if totals.cached_tokens else ""
        )
        lines.append(f"tokens: {totals.input_tokens} in{cached}, {totals.output_tokens} out")
    if totals.cut:
        lines.append(f"{totals.cut} cut off by max_tokens")
    if totals.failed:
        lines += [
            f"  {f.count} × {kind(f.code, f.status)}, for example: {printable(f.example, one_line=True)}"
            for f in outcome.failures[1:]
        ]
        lines.append(f"{totals.failed} of {outcome.total} failed{_commonest(outcome)}")
    return lines


def _headline(outcome: Outcome, output: str, took_s: float) -> str:
    if outcome.state is not State.COMPLETED:
        written = f"; {output} says so for each" if outcome.totals.done > outcome.totals.failed else ""
        left = outcome.total - outcome.totals.done
        if not left:
            return f"{outcome.state}, with all {outcome.total} records done: {output}"
        return f"{outcome.state}: {left} of {outcome.total} records were not reached{written}"
    answered = outcome.total - outcome.totals.failed
    verb = "no record was answered" if not answered else f"{answered} of {outcome.total} records answered"
    return f"{verb} in {duration(took_s)}: {output}"


def _commonest(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    most = outcome.failures[0]
    share = "" if most.count == outcome.totals.failed else f"{most.count} × "
    return f": {share}{kind(most.code, most.status)}: {printable(most.example, one_line=True)}"


def kind(code: str, status: int) -> str:
    """Return a kind of failure in words."""
    return f"{code} ({status})" if status else code


def duration(seconds: float) -> str:
    """Return a duration in words, as 1h02m, 3m05s or 4.2s."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
