"""Telling receivers of jobs' ends: at least once, however often the service starts anew meanwhile."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freight.config import Config
from freight.control.posting import Names, Post, Refused
from freight.core.receivers import Receiver, named, receiver, server_of
from freight.core.webhook import Again, Attempt, Delivered, GivenUp, Letter, Verdict, headers_of, secrets_of, verdict
from freight.errors import FreightError, OperationError, UserError, refusing
from freight.store.database import STORAGE_ERRORS
from freight.store.outbox import Outbox

log = logging.getLogger("freight.webhooks")

Write = Callable[..., Awaitable[Any]]

MOST_AT_ONCE: Final = 32
# A silent receiver keeps so many of them busy, and no more.
MOST_OF_A_RECEIVER: Final = 2
# What was not written down, for want of room, is tried again after this.
_STORAGE_RETRY_S: Final = 5.0
# The clock of day may be set meanwhile: it is looked at this often.
_LONGEST_SLEEP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """What the settings say: `webhooks.hosts` and `webhooks.secret_file`."""

    hosts: tuple[str, ...] = ()
    secret_file: str = ""

    def receivers(self) -> tuple[Receiver, ...]:
        """Return who may get webhooks; raise UserError for an entry that means nothing."""
        with refusing("webhooks.hosts", "write HOST, HOST:PORT, http://HOST:PORT, or either with =ADDRESS"):
            return tuple(receiver(entry) for entry in self.hosts)

    def secrets(self) -> tuple[bytes, ...]:
        """Read the secrets that letters are signed with; raise UserError where there are none."""
        if not self.secret_file:
            raise UserError(
                "webhooks are off: webhooks.secret_file names no file",
                "put a secret into a file, whsec_ and the base64 of 32 random bytes, and name it in the configuration",
            )
        what = f"webhooks cannot be signed: webhooks.secret_file {self.secret_file}"
        with refusing(what, "one secret a line: whsec_ and the base64 of 24 to 64 bytes"):
            return secrets_of(Path(self.secret_file).expanduser().read_text(encoding="ascii"))

    def signing(self) -> tuple[bytes, ...]:
        """Return the secrets. Where there are none the log says why; users are told no more than that."""
        try:
            return self.secrets()
        except UserError as error:
            log.warning("%s", error.message)
            raise OperationError(
                "webhooks cannot be signed now: webhooks.secret_file names no file of good secrets",
                "whoever runs the service mends that; its log and freight doctor tell more",
            ) from None


def webhook_settings(config: Config) -> WebhookSettings:
    """Return what the settings say of webhooks."""
    return WebhookSettings(config["webhooks.hosts"], config["webhooks.secret_file"])


class Webhooks:
    """The webhooks of one service. `write` calls the outbox in the thread that writes to the catalog.

    `clock` tells the time of day, `roll` gives random numbers from 0 to 1.
    """

    def __init__(
        self,
        outbox: Outbox,
        write: Write,
        settings: Callable[[], WebhookSettings],
        post: Post | None = None,
        clock: Callable[[], float] = time.time,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self._outbox = outbox
        self._write = write
        self._settings = settings
        self._names = Names()
        self._post = post or Post(self._names.resolve)
        self._clock = clock
        self._roll = roll
        self._wake = asyncio.Event()
        self._going: dict[Letter, asyncio.Task[None]] = {}
        self._failure: Exception | None = None

    def submit_check(self, url: str) -> None:
        """Raise UserError unless events may be sent to `url`, saying which setting keeps them from it.

        Raises OperationError where they cannot be signed, which is no fault of who asks.
        """
        try:
            server = server_of(url)
        except ValueError as error:
            raise UserError(f"the webhook's URL is not one to send to: {error}", "correct it") from None
        settings = self._settings()
        receivers = settings.receivers()
        if not receivers:
            raise UserError(
                "webhooks are off: webhooks.hosts lists no host", "whoever runs the service lists hosts there"
            )
        if not named(server, receivers):
            shown = ", ".join(entry.partition("=")[0] for entry in settings.hosts)
            where = f"{server.scheme}, host {server.host}, port {server.port}"
            raise UserError(f"webhooks.hosts does not list this receiver: {where}", f"it lists {shown}")
        settings.signing()

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver letters until `stopping` is set; those that are on their way then go again at the next start.

        Raises what made it impossible to go on.
        """
        loop = asyncio.get_running_loop()
        self._outbox.on_put = lambda: _call_soon(loop, self._wake.set)
        stopped = asyncio.create_task(stopping.wait())
        stopped.add_done_callback(lambda _: self._wake.set())
        try:
            while not stopping.is_set() and self._failure is None:
                self._wake.clear()
                sleep_s = await self._start_due()
                with suppress(TimeoutError):
                    async with asyncio.timeout(sleep_s):
                        await self._wake.wait()
        finally:
            self._outbox.on_put = None
            going = list(self._going.values())
            for task in (stopped, *going):
                task.cancel()
            await asyncio.gather(stopped, *going, return_exceptions=True)
            self._names.close()
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Look at the clock and the outbox now."""
        self._wake.set()

    async def _start_due(self) -> float:
        """Send what is due and may be sent; return for how long nothing else will be due."""
        while len(self._going) < MOST_AT_ONCE:
            counts = Counter(letter.receiver for letter in self._going)
            busy = [name for name, count in counts.items() if count >= MOST_OF_A_RECEIVER]
            try:
                letter = await self._write(self._outbox.next, [letter.id for letter in self._going], busy)
            except STORAGE_ERRORS as error:
                log.warning("webhooks wait: %s", error)
                return _STORAGE_RETRY_S
            if letter is None:
                break
            if letter.next_at > self._clock():
                return min(letter.next_at - self._clock(), _LONGEST_SLEEP_S)
            task = self._going[letter] = asyncio.create_task(self._deliver(letter))
            task.add_done_callback(lambda _, letter=letter: self._over(letter))
        return _LONGEST_SLEEP_S

    def _over(self, letter: Letter) -> None:
        task = self._going.pop(letter)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failure = error
        self._wake.set()

    async def _deliver(self, letter: Letter) -> None:
        attempt = await self._attempt(letter)
        outcome = verdict(letter, attempt, self._clock(), self._roll())
        # Until that is on disk the letter counts as on its way: a full disk does not have it sent over and over.
        while True:
            try:
                await self._record(letter, outcome)
                return
            except STORAGE_ERRORS as error:
                log.warning("webhook %s: %s", letter.id, error)
                await asyncio.sleep(_STORAGE_RETRY_S)

    async def _attempt(self, letter: Letter) -> Attempt:
        try:
            settings = self._settings()
            secrets = await asyncio.to_thread(settings.signing)
            return await self._post.send(letter, headers_of(letter, secrets, self._clock()), settings.receivers())
        except Refused as error:
            return Attempt(None, str(error))
        except FreightError as error:
            # The settings may be put right before it is given up.
            return Attempt(None, error.message)

    async def _record(self, letter: Letter, outcome: Verdict) -> None:
        about = f"webhook {letter.id}: {letter.event} of job {letter.job} for {letter.receiver}"
        match outcome:
            case Delivered():
                await self._write(self._outbox.delivered, letter.id)
                log.info("%s: delivered", about)
            case Again(at=at, words=words):
                await self._write(self._outbox.later, letter.id, at)
                log.info("%s: %s; again in %.0f s", about, words, at - self._clock())
            case GivenUp(words=words):
                await self._write(self._outbox.give_up, letter, words, self._clock())
                log.warning("%s: given up: %s", about, words)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call from another thread; nothing where the loop is closed, which is no fault of who calls."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
