"""The service's machine: its devices, its workers, and the models that are to be up always."""

from dataclasses import replace
from typing import Final

from freight.config import Config
from freight.control.context import Context
from freight.control.pins import Pin, pin_of
from freight.control.placing import check_place
from freight.control.resolve import entry_name, resolve
from freight.control.rights import may_run
from freight.control.views import OTHERS_JOB, others_worker, worker_status
from freight.control.workerrun import WorkerRun
from freight.core.account import Account
from freight.core.device import Device
from freight.core.messages import Phase
from freight.core.model import EngineName, ModelSpec
from freight.core.paging import ALL, Place, page_of
from freight.core.view import DeviceList, DeviceStatus, PinStatus, WorkerList, WorkerStatus
from freight.errors import FreightError, OperationError, UserError
from freight.launchers.base import Launcher

# A device's state, and by whom, by which process and by which job it is held.
_Held = tuple[str, str, int | None, str | None]
_UP: Final = frozenset({Phase.READY, Phase.IDLE})


class Machine:
    """What can be asked and done about the machine of a service."""

    def __init__(self, context: Context, launcher: Launcher) -> None:
        self._context = context
        self._launcher = launcher

    def workers(self, account: Account, limit: int = ALL, after: str | None = None) -> WorkerList:
        """Return up to `limit` of the workers there are, and the pins; `after` is an earlier page's `next`.

        Of others' jobs it says little more than that they have some.
        """
        roster, config = self._context.plane.roster, self._context.settings()
        workers = list(roster.workers.values())
        pins = [
            PinStatus(
                model=pin.name,
                workers=pin.workers,
                up=sum(w.launch == pin.launch and w.phase in _UP and not w.stopping for w in workers),
                # It may name somebody's job.
                reason=pin.reason if account.is_admin() else "",
            )
            for pin in roster.pins.values()
            if may_run(account, pin.name, config)
        ]
        shown, following = page_of(workers, lambda worker: (worker.started_at, worker.id), limit, after)
        return WorkerList(workers=[self._worker(w, account, config) for w in shown], pins=pins, next=following)

    def _worker(self, worker: WorkerRun, account: Account, config: Config) -> WorkerStatus:
        is_pinned = self._context.plane.roster.is_pinned(worker)
        if account.is_admin() or (worker.job is not None and worker.job.row.user == account.user):
            return worker_status(worker, is_pinned)
        is_public = worker.model in config.models and may_run(account, worker.model, config)
        if worker.job is not None:
            return others_worker(worker, is_pinned, is_public)
        # A warm one may be left of anybody's job.
        status = worker_status(worker, is_pinned)
        place = status.place if worker.devices else ""
        return replace(status, note="", model=status.model if is_public else "", place=place)

    async def devices(self, account: Account, limit: int = ALL, after: str | None = None) -> DeviceList:
        """Return up to `limit` devices, and who has them; others are not named to users.

        `after` is an earlier page's `next`.
        """
        devices, following = page_of(self._launcher.devices(), _place, limit, after)
        return DeviceList(devices=[await self._status(device, account) for device in devices], next=following)

    async def _status(self, device: Device, account: Account) -> DeviceStatus:
        usage = await self._context.in_thread(self._launcher.usage, device)
        state, holder, pid, job = self._shown(self._holder(device), device, account)
        return DeviceStatus(
            id=device.id,
            kind=device.kind,
            name=device.name,
            index=device.index,
            memory=device.memory,
            memory_used=usage.memory_used if usage else None,
            state=state,
            holder=holder,
            pid=pid,
            job=job,
        )

    def _shown(self, held: _Held, device: Device, account: Account) -> _Held:
        """Return what the account may know of who holds a device."""
        state, holder, pid, job = held
        if account.is_admin():
            return held
        if state != "leased":
            return state, {"held": "somebody else", "quarantined": "something that was left"}.get(state, ""), None, None
        users = {
            worker.job.row.user if worker.job is not None else None
            for worker in self._context.plane.roster.workers.values()
            if device.id in worker.devices
        }
        if users == {None}:
            return state, "a warm model", None, None
        return (state, holder, pid, job) if users == {account.user} else (state, OTHERS_JOB, None, None)

    def _holder(self, device: Device) -> _Held:
        """Return a device's state, and by whom, by which process and by which job it is held."""
        kept = self._context.plane.apply.quarantine.rows().get(device.id)
        if kept is not None:
            return "quarantined", kept.words, kept.pid, None
        for worker in self._context.plane.roster.workers.values():
            if device.id in worker.devices:
                job = worker.job.row.name if worker.job is not None else None
                words = f"job {job}" if job else f"the model {worker.model}, warm"
                return "leased", words, worker.process.pid, job
        try:
            # In one step, so that the planner never finds it taken by this.
            taken = self._launcher.take([device])
            if taken is None:
                self._launcher.release([device])
                return "free", "", None, None
        except (OperationError, OSError) as error:
            return "held", f"a lock that cannot be opened ({error})", None, None
        holder = taken[1]
        return "held", holder.what, holder.pid, None

    async def release(self, device: str) -> None:
        """Let a device out of quarantine; raise WrongState for one that is in none, UserError for one there is not."""
        there = [known.id for known in self._launcher.devices()]
        if device not in there:
            raise UserError(f"there is no device {device}", f"devices: {', '.join(there)}")
        await self._context.plane.apply.quarantine.release(device)

    async def take_up_pins(self) -> None:
        """Take up the pins that were set; one whose model cannot run now says so."""
        for name, workers in (await self._context.write(self._context.catalog.pins)).items():
            try:
                pin = await self._pin(name, workers)
            except FreightError as error:
                pin = Pin(name, workers, None, 0, reason=error.message)
            self._context.plane.roster.pins[name] = pin

    async def renew_pins(self) -> None:
        """Have pins follow their models' entries, which may be others by now.

        What is up stays up where an entry cannot run now: its model may only be out of reach for a moment.
        """
        pins = self._context.plane.roster.pins
        for name, pin in list(pins.items()):
            try:
                renewed = await self._pin(name, pin.workers)
            except FreightError as error:
                renewed = Pin(name, pin.workers, None, 0, reason=error.message)
            is_other = renewed.launch != pin.launch if renewed.model is not None else pin.model is None
            # It may have been set anew, or taken away, meanwhile.
            if is_other and pins.get(name) is pin:
                pins[name] = renewed
                self._context.plane.changed()

    async def pin(self, name: str, workers: int) -> None:
        """Have so many workers of a model up always; raise UserError for a model of which that cannot be."""
        pin = await self._pin(name, workers)
        await self._context.write(self._context.catalog.pin, pin.name, workers)
        self._context.plane.roster.pins[pin.name] = pin
        self._context.plane.changed()

    async def _pin(self, name: str, workers: int) -> Pin:
        config: Config = self._context.settings()
        registered = entry_name(name, config)
        if not registered:
            # It is looked up by its name at each start of a service.
            raise UserError(
                f"there is no model {name} in the registry",
                f"models: {', '.join(config.models) or 'none'}; others are registered by freight models add",
            )
        if config.models[registered].engine is EngineName.ENDPOINT:
            raise UserError(
                f"model {registered} is a server that runs already", "only models that are started are pinned"
            )
        model: ModelSpec = await resolve(registered, config, False, _no_patience)
        who, devices = f"the pin of {model.name}", self._context.devices
        gpus = await self._context.in_thread(check_place, who, model, None, devices)
        room = sum(device.is_gpu() == bool(gpus) for device in self._context.devices) // (gpus or 1)
        if workers > room:
            what = f"{gpus} GPUs each" if gpus > 1 else "a GPU each" if gpus else "a CPU device each"
            raise UserError(f"{workers} workers of {model.name} with {what} do not fit; {room} do", "pin fewer")
        return await self._context.in_thread(pin_of, model.name, workers, model, gpus)

    async def unpin(self, name: str) -> None:
        """Let a model's workers go when nobody needs them; raise UserError for one that is not pinned."""
        pins = self._context.plane.roster.pins
        if name not in pins:
            name = entry_name(name, self._context.settings()) or name
        if name not in pins:
            raise UserError(f"model {name} is not pinned", f"pinned: {', '.join(pins) or 'none'}")
        await self._context.write(self._context.catalog.unpin, name)
        pins.pop(name, None)
        self._context.plane.changed()


def _place(device: Device) -> Place:
    """Return where a device is listed: by its number, those without one by that in their id."""
    declared = device.id.rpartition(":")[2]
    number = int(declared) if declared.isdecimal() else 0
    return (number if device.index is None else device.index), device.id


async def _no_patience(problem: str) -> None:
    raise OperationError(f"the model's server does not answer: {problem}", "start it, then try again")
