"""Making a job of an upload: checks before anything is kept, the job's entry, and the reading of its input."""

import asyncio
import hashlib
import logging
import random
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from freight.config import Config
from freight.control.batchterms import BatchTerms
from freight.control.checks import check_models
from freight.control.context import Context
from freight.control.inputs import InputFile, Sample, inspect
from freight.control.namedmodel import chosen_model, first_model, no_model, refusal_of
from freight.control.naming import check_name, readable_name
from freight.control.outputs import place_output
from freight.control.placing import check_place
from freight.control.quotas import Quotas
from freight.control.reading import Reading, outcome_of
from freight.control.resolve import choose_model, resolve
from freight.control.rights import check_allowed, check_registered, seen_by
from freight.control.shelf import kept_model, model_of, request_of, results_name, spec_of
from freight.control.uploads import Uploads
from freight.control.webhooks import Webhooks
from freight.core.account import Account
from freight.core.job import ORDERS
from freight.core.model import ModelSpec
from freight.core.openaifile import OPENAI
from freight.core.view import JobRequest
from freight.errors import (
    Conflict,
    FreightError,
    NoSuchUpload,
    NotAllowed,
    OperationError,
    UserError,
)
from freight.store.database import Sharing, StorageFull, is_full
from freight.store.files import sync_folder
from freight.store.rows import JobRow

log = logging.getLogger("freight.service")

# An endpoint that does not answer is asked this often before a submission is refused.
_ENDPOINT_TRIES: Final = 3
_ENDPOINT_PAUSE_S: Final = 1.0
_SHOWN: Final = frozenset({"file", "typed"})
_RANGES: Final = {
    "workers": (1, 10_000),
    "gpus": (0, 10_000),
    "concurrency": (0, 65_536),
    "timeout_s": (0, 1e9),
    "record_timeout_s": (0, 1e9),
    "priority": (-1000, 1000),
}


@dataclass(frozen=True, slots=True)
class Made:
    """A job that was made, or found by its key, and what is worth saying about it."""

    id: str
    notes: tuple[str, ...] = ()
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """By which API a job comes, "" for Freight's own, and what that keeps about it.

    Other APIs answer before the input was read: what is wrong with it fails the job. `job` is the id of the job to
    make, where there is one already.
    """

    api: str = ""
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    job: str | None = None


OWN_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A request whose model was found, the input that it is about, and who asks."""

    account: Account
    request: JobRequest
    terms: Terms
    model: ModelSpec
    upload: Path
    sha256: str
    notes: tuple[str, ...]


class Submission:
    """Takes jobs in."""

    def __init__(
        self, context: Context, reading: Reading, uploads: Uploads, quotas: Quotas, webhooks: Webhooks
    ) -> None:
        self._context = context
        self._quotas = quotas
        self._webhooks = webhooks
        self._reading = reading
        self._uploads = uploads
        # Held from looking whether a name or key is taken until it is.
        self._entering = asyncio.Lock()

    async def submit(self, account: Account, request: JobRequest, key: str | None, terms: Terms = OWN_TERMS) -> Made:
        """Make a job and return it once its input was checked; with the `key` of an earlier request, return that job.

        On other than Freight's own terms it is returned at once.

        Raises UserError for what is refused, NotAllowed and TooMany for what the user may not; neither leaves a job.
        """
        _check_options(request)
        check_allowed(account, request)
        if request.notify is not None:
            try:
                await self._context.in_thread(self._webhooks.submit_check, request.notify)
            except UserError as error:
                raise error.about("notify") from None
        upload, sha256 = self._uploads.find(account, request.upload)
        digest = _digest(request, sha256, terms)
        earlier = await self._earlier(account, key, digest)
        if earlier is not None:
            return await self._found(account, earlier, request.upload)
        resolved = await self._resolve(account, request, terms, upload, sha256)
        async with self._entering:
            earlier = await self._earlier(account, key, digest)
            row = earlier or await self._enter(resolved, key, digest)
            checking = None if earlier else self._reading.begin(row, bool(terms.api))
        if earlier is not None:
            return await self._found(account, earlier, request.upload)
        assert checking is not None
        if not terms.api:
            await outcome_of(checking)
        return Made(row.id, resolved.notes)

    async def _found(self, account: Account, earlier: JobRow, upload: str) -> Made:
        """Return the job that an earlier request with the same key made, once its input was checked."""
        checking = self._context.checking.get(earlier.id)
        if checking is not None and not earlier.api:
            await outcome_of(checking)
        self._uploads.drop(account, upload)
        return Made(earlier.id, is_new=False)

    async def _earlier(self, account: Account, key: str | None, digest: str) -> JobRow | None:
        row = await self._context.write(self._context.catalog.requested, account.user, key) if key else None
        if row is not None and row.request_digest != digest:
            raise Conflict(
                f"idempotency key {key!r} was used for another request, which made job {row.name}",
                "use a new key for a new request, or send the same one again",
            )
        return row

    async def _resolve(
        self, account: Account, request: JobRequest, terms: Terms, upload: Path, sha256: str
    ) -> _Resolved:
        """Check all that can be checked without reading the whole input."""
        if terms.api == OPENAI:
            return await self._resolve_batch(account, request, terms, upload, sha256)
        config = self._context.settings()
        shown = request.file or "the input"
        sample = None if terms.api else await self._context.in_thread(self._sample, upload, shown, config)
        seen = seen_by(account, config, request.pool)
        name, why = choose_model(request.model, next(iter(sample.models), None) if sample else None, seen)
        check_registered(account, name, config, request.pool)
        model = await self._runnable(name, request, config)
        if sample is not None:
            check_models(shown, model, sample)
        notes = tuple(note for note in (why, sample.budget_note() if sample else None) if note)
        return _Resolved(account, request, terms, model, upload, sha256, notes)

    async def _resolve_batch(
        self, account: Account, request: JobRequest, terms: Terms, upload: Path, sha256: str
    ) -> _Resolved:
        """Find the model that a batch's records name. Where they name none that can run, the batch is there to fail."""
        config, refusal = self._context.settings(), None
        first = await self._context.in_thread(first_model, upload, config["limits.record_bytes"])
        try:
            model = await self._runnable(chosen_model(account, first, config), request, config)
        except (UserError, NotAllowed) as error:
            model, refusal = no_model(first), refusal_of(error)
        found = {"is_enforced": config["openai.enforce_window"], "refusal": refusal}
        more = msgspec.structs.replace(msgspec.convert(terms.more, BatchTerms), **found).more()
        return _Resolved(account, request, replace(terms, more=more), model, upload, sha256, ())

    async def _runnable(self, name: str, request: JobRequest, config: Config) -> ModelSpec:
        """Return the model that `name` stands for; raise UserError for one that no device here is enough for."""
        model = await _model(name, request, config)
        await self._context.in_thread(check_place, "the job", model, request.gpus, self._context.devices)
        return model

    def _sample(self, upload: Path, shown: str, config: Config) -> Sample:
        file = InputFile(upload, shown)
        try:
            return inspect(file, config["limits.record_bytes"])
        finally:
            file.close()

    async def renewed(self, account: Account, row: JobRow) -> dict[str, Any]:
        """Return a job's spec for going on, with its model's entry as it is now, unless that would mix answers.

        Where the entry is gone or not for the user, or now means something that may answer otherwise, a job that has
        answers keeps the entry that it was submitted with.
        """
        request, before, config = request_of(row), model_of(row), self._context.settings()
        name = request.model or before.name
        try:
            # The name may be another model's by now.
            check_registered(account, name, config, request.pool)
            model = await self._runnable(name, request, config)
            if model.identity != before.identity and await self._context.in_thread(self._has_answers, row.id):
                return row.spec
        except FreightError:
            return row.spec
        return {**row.spec, "model": kept_model(model)}

    def _has_answers(self, job: str) -> bool:
        results = self._context.folder.open_results(job, Sharing.READER)
        try:
            return results.has_answers()
        finally:
            results.close()

    async def _enter(self, resolved: _Resolved, key: str | None, digest: str) -> JobRow:
        """Give the job its entry; its input is in its folder before that, so that no entry is without one."""
        context, request, account = self._context, resolved.request, resolved.account
        await self._quotas.check_active(account)
        names = set(await context.write(context.catalog.names_of, account.user))
        name = request.name or readable_name(random.choice, names.__contains__)
        if name in names:
            raise Conflict(
                f"there is a job named {name} already",
                f"choose another name, or delete that one: freight batch delete {name}",
            )
        request = replace(request, name=name)
        more = resolved.terms.more
        if request.output:
            output = Path(request.output)
            more = more | await context.in_thread(place_output, account, output, results_name(name), context.settings())
        job = resolved.terms.job or str(uuid.uuid4())
        try:
            await context.in_thread(self._move_in, job, resolved.upload)
        except OSError as error:
            context.folder.forget(job)
            if is_full(error):
                raise StorageFull(
                    "no space left for the job", "free some space where the service keeps its data"
                ) from error
            raise OperationError(f"the job cannot be kept: {error.strerror}", "see freight doctor") from error
        size = context.folder.input(job).stat().st_size
        spec = spec_of(request, resolved.model, resolved.sha256, size, self._quotas.most_records(account), more)
        try:
            return await context.write(
                lambda: context.catalog.add(
                    job, spec, None, None, time.time(), name=name, model=resolved.model.name,
                    priority=request.priority, request_key=key, request_digest=digest if key else None,
                    user=account.user, api=resolved.terms.api,
                )
            )  # fmt: skip
        except FreightError:
            context.folder.forget(job)
            raise

    def _move_in(self, job: str, upload: Path) -> None:
        target = self._context.folder.input(job)
        if not upload.exists():
            raise NoSuchUpload("the upload was used by another job", "send the input again; one upload makes one job")
        target.parent.mkdir(mode=0o700)
        upload.rename(target)
        sync_folder(target.parent)
        sync_folder(target.parent.parent)


async def _model(name: str, request: JobRequest, config: Config) -> ModelSpec:
    """Return the model that `name` stands for now, with the user's own word for it among those that records may use."""
    model = await resolve(name, config, request.ignore_record_model, _Patience())
    if request.typed:
        fits = model.fits if model.fits is None else model.fits | {request.typed}
        model = msgspec.structs.replace(model, typed=request.typed, fits=fits)
    return model


def _digest(request: JobRequest, sha256: str, terms: Terms) -> str:
    """Return what tells a request from another that would make a different job; what is for showing counts not."""
    asked = asdict(request)
    default = asdict(JobRequest(upload=""))
    given = {key: value for key, value in sorted(asked.items()) if value != default[key] and key not in _SHOWN}
    return hashlib.sha256(
        msgspec.json.encode([given | {"upload": sha256}, *([terms.api, terms.more] if terms.api else [])])
    ).hexdigest()


class _Patience:
    """Waits for an endpoint a few times, then gives up."""

    def __init__(self) -> None:
        self._tries = 0

    async def __call__(self, problem: str) -> None:
        self._tries += 1
        if self._tries >= _ENDPOINT_TRIES:
            raise OperationError(f"the model's server does not answer: {problem}", "start it, then submit again")
        await asyncio.sleep(_ENDPOINT_PAUSE_S)


def _check_options(request: JobRequest) -> None:
    for name, value in asdict(request).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UserError(f"{name} is not valid Unicode", "correct the request") from None
    if request.name is not None:
        check_name(request.name)
    if request.output is not None and not Path(request.output).is_absolute():
        raise UserError(f"the output folder {request.output} is not absolute", "name it from / on")
    if request.pool != "local":
        raise UserError(f"there is no pool {request.pool}", "pools: local")
    if request.order not in ORDERS:
        raise UserError(f"order is {request.order}", f"order must be one of {', '.join(ORDERS)}")
    for name, (least, most) in _RANGES.items():
        value = getattr(request, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"{name} is {value}", f"{name} must be from {least:g} to {most:g}")
