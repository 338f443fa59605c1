"""`freight models pull`: fetching a model from a hub."""

import shlex
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import click

from freight.cli.progress import LINE_EVERY_S, duration
from freight.cli.text import counted, printable
from freight.config import data_folder
from freight.errors import Interrupted, OperationError, refusing

# Imported where it is used: help and completion have no time for it.
if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from freight.core.hubfiles import HubId
    from freight.store.fetching import Fetching
    from freight.store.hub import Pull
    from freight.store.hubcalls import HubFile, Listing

_ASK_EVERY_S: Final = 0.5


@click.command()
@click.argument("model", metavar="ORG/NAME[:FILE]")
@click.option("--revision", default="main", metavar="R", help="A branch, tag or commit. [default: main]")
def pull(model: str, revision: str) -> None:
    """Fetch a model from a hub, to run it without a network.

    Of a repository it takes configuration, tokenizer and weights, the weights once. FILE names one file, as a GGUF, and
    may be a pattern such as '*Q4_K_M*'; the parts of a split GGUF come together. What was fetched before is not
    fetched again. HF_TOKEN is the token for gated and private models, HF_ENDPOINT another hub or a mirror.

    Prints where the model is.
    """
    from freight.core.hubfiles import parse_hub_id
    from freight.store.hub import models_folder, repo_folder

    hub_id = parse_hub_id(model)
    folder = repo_folder(models_folder(data_folder()), hub_id.repo)
    try:
        path = _pull(hub_id, revision, folder)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before anything was fetched", "the same command starts again") from None
    click.echo(str(path))
    _say(f"to use it: freight run FILE -o OUT --model {shlex.quote(str(hub_id))}")


def _pull(hub_id: "HubId", revision: str, folder: Path) -> Path:
    from freight.store.hub import is_commit
    from freight.store.hubcalls import HubUnreachable, list_files

    if is_commit(revision):
        here = _here(hub_id, revision, folder)
        if here is not None:
            return _already(hub_id, *here)
    try:
        listing = list_files(hub_id, revision)
    except HubUnreachable as error:
        here = _here(hub_id, revision, folder)
        if here is None:
            raise
        _say(f"note: {printable(error.message)}; what was fetched on {here[1].pulled_at[:10]} is here")
        return _already(hub_id, *here)
    wanted = _wanted(hub_id, revision, listing)
    with _one_at_a_time(hub_id, folder):
        return _bring(hub_id, wanted, listing, folder)


def _here(hub_id: "HubId", revision: str, folder: Path) -> "tuple[Path, Pull] | None":
    """Return what an earlier pull of the same fetched, with its path, where it is still there."""
    from freight.store.hub import pulled_path, read_pulls

    for old in read_pulls(folder):
        if old.file == hub_id.file and revision in (old.revision, old.commit):
            path = pulled_path(folder, old)
            return (path, old) if path is not None else None
    return None


def _already(hub_id: "HubId", path: Path, pull: "Pull") -> Path:
    _say(f"already here: {hub_id} at commit {pull.commit[:12]}")
    return path


def _wanted(hub_id: "HubId", revision: str, listing: "Listing") -> "Pull":
    from freight.core.hubfiles import choose
    from freight.store.hub import Pull

    sizes = {file.path: file.size for file in listing.files}
    files = {name: sizes[name] for name in choose(hub_id, list(sizes))}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Pull(hub_id.repo, hub_id.file, revision, listing.commit, files, now)


@contextmanager
def _one_at_a_time(hub_id: "HubId", folder: Path) -> Generator[None]:
    """Hold the repository's folder; where another process fetches into it, say so and wait for its end."""
    from freight.store.folder import FolderLock

    with refusing(f"cannot write to {folder}", "set FREIGHT_DATA to a folder of your own"):
        data_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
    said = False
    while True:
        try:
            lock.take(f"{hub_id.repo} in {folder.parent}")
            break
        except OperationError as error:
            if "in use by" not in error.message:
                raise
            if not said:
                _say(f"waiting: {error.message}")
            said = True
            time.sleep(_ASK_EVERY_S)
    try:
        yield
    finally:
        lock.release()


def _bring(hub_id: "HubId", wanted: "Pull", listing: "Listing", folder: Path) -> Path:
    """Fetch what is missing, and return where the model is."""
    from freight.store.fetching import Fetching, size_words
    from freight.store.hub import note_pull, pulled_path

    path = pulled_path(folder, wanted)
    if path is not None:
        # Also where another pull brought the same files: this one is what was asked for last.
        note_pull(folder, wanted)
        return _already(hub_id, path, wanted)
    files = [file for file in listing.files if file.path in wanted.files]
    fetching = Fetching(folder, wanted.repo, wanted.commit, files)
    fetching.check_room()
    begun = f", {size_words(fetching.here)} of them here" if fetching.here else ""
    what = f"{counted(len(files), 'file')}, {size_words(fetching.total)}{begun}"
    _say(f"{hub_id} at commit {wanted.commit[:12]}: {what}")
    began, left = time.monotonic(), fetching.left
    _fetch(hub_id, fetching)
    _keep(folder, wanted, listing.files, fetching)
    _say(f"fetched {size_words(left)} in {duration(time.monotonic() - began)}")
    path = pulled_path(folder, wanted)
    if path is None:
        raise OperationError(f"{hub_id} in {folder} is not as it was fetched", "run the same command again")
    return path


def _fetch(hub_id: "HubId", fetching: "Fetching") -> None:
    from freight.store.fetching import size_words
    from freight.store.hubcalls import SAME_COMMAND, HubUnreachable

    def so_far() -> str:
        return f"{size_words(fetching.here)} of {size_words(fetching.total)} are here"

    try:
        with _Shown(str(hub_id), fetching.here, fetching.total) as shown:
            fetching.run(shown.show)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {so_far()}", SAME_COMMAND) from None
    except HubUnreachable as error:
        raise OperationError(f"{error.message}; {so_far()}", SAME_COMMAND) from error


def _keep(folder: Path, wanted: "Pull", listed: "Sequence[HubFile]", fetching: "Fetching") -> None:
    """Record what was fetched, and let the hub's own tools find it under the branch's or tag's name."""
    from freight.store.hub import is_commit, note_pull

    fetching.forget_others(listed)
    if not is_commit(wanted.revision) and ".." not in wanted.revision:
        name = folder / "refs" / wanted.revision
        with suppress(OSError):  # Freight itself goes by its own record.
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(wanted.commit)
    note_pull(folder, wanted)


def _say(text: str) -> None:
    with suppress(BrokenPipeError):
        click.echo(printable(text), err=True)


class _Shown:
    """How much is here: a bar on a terminal, a line now and then elsewhere. `show` is called with the bytes."""

    def __init__(self, what: str, here: int, total: int) -> None:
        self._what, self._first, self._total = what, here, total
        self._began = time.monotonic()
        self._line_at = self._began + LINE_EVERY_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "_Shown":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(28), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, refresh_per_second=4)
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._first)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def show(self, here: int) -> None:
        """Show that `here` bytes are here."""
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            with suppress(OSError):
                self._bar.update(self._task, completed=here)
        elif now >= self._line_at:
            self._line_at = now + LINE_EVERY_S
            _say(progress_line(self._what, here, self._total, (here - self._first) / (now - self._began)))


def progress_line(what: str, here: int, total: int, rate: float) -> str:
    """Return one line that says how a download stands; `rate` is in bytes a second."""
    from freight.store.fetching import size_words

    share = f" ({100 * here // total}%)" if total else ""
    left = f", {duration((total - here) / rate)} left" if rate > 0 else ""
    return f"{what}: {size_words(here)} of {size_words(total)}{share}, {size_words(int(rate))}/s{left}"
