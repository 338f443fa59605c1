"""Who has which place, while the planner gives places out."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from freight.core.actions import Join, StartPinned, StartWorker, StopWarm
from freight.core.reasons import gives_up, lacks_devices, obstacles, starts_again, starts_again_after, waits
from freight.core.snapshot import (
    MOST_STARTS,
    JobView,
    Need,
    PinView,
    Snapshot,
    Trouble,
    WarmView,
    is_hopeless,
    is_pausing,
)

_NOTHING: Final = Need()


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who has a place: what they are called, and the user who alone may know that (None: everybody may)."""

    called: str
    user: str | None = None

    def told_to(self, user: str | None) -> str:
        """Return what a user is told (None: whoever sees everything)."""
        return self.called if user is None or self.user in (None, user) else "another user's job"


@dataclass(frozen=True, slots=True)
class _Asker:
    """A job or a pinned model that asks for workers: what it is called, and where these can be.

    `has_urls`: its places are the URLs of an endpoint, each with troubles of its own.
    """

    id: str
    called: _Holder
    need: Need
    places: tuple[str, ...]
    troubles: tuple[Trouble, ...]
    was_ready: bool = False
    has_urls: bool = False

    def gives_up(self) -> bool:
        """Return whether enough starts have failed."""
        return not self.has_urls and is_hopeless(self.troubles, self.places, self.need.devices, self.was_ready)


class Board:
    """The places of one snapshot, each with what is there.

    A place is held by who is there, or kept for who waits for more than is free: nobody who comes later gets it, nor
    the warm worker that is on it. Nothing is kept for who could not start even if all jobs ended now, because
    strangers or pinned models have too many of its places.
    """

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self._now = now
        self._snapshot = snapshot
        self._labels = {device.id: device.label or device.id for device in snapshot.devices}
        self._held = {device.id: _Holder(device.held_by) for device in snapshot.devices if device.held_by}
        # Places that are not given back by themselves.
        self._lasting = set(self._held)
        self._pinned = _protected(snapshot)
        # Place -> who it is kept for: the asker's id, and what it is called.
        self._kept: dict[str, tuple[str, _Holder]] = {}
        # Places of warm workers that are ending.
        self._coming: list[str] = []
        self._warm: list[WarmView] = []
        self._there: Counter[str] = Counter()
        self._note_workers()
        self._gpus, self._others = (
            tuple(device.id for device in snapshot.devices if device.is_gpu == is_gpu) for is_gpu in (True, False)
        )
        self._given: Counter[str] = Counter()
        self._evicted: list[WarmView] = []
        self._loading = list(snapshot.pacing.loading)
        self._staggered_at = snapshot.pacing.staggered_at
        # Why somebody got no worker although there was a place.
        self._paced: dict[str, str] = {}
        # When each asked last, counted from 0, and when those did for whom something is kept.
        self._turns: dict[str, int] = {}
        self._asked = 0
        self._keepers: list[int] = []
        # Who waits: how many for the same places, and how many of each launch.
        self._waiting: Counter[tuple[str, ...]] = Counter()
        self._waiting_launches: Counter[str] = Counter()
        self._ahead: dict[str, int] = {}
        self._obstacles: dict[tuple[tuple[str, ...], int, str | None], str] = {}

    def _note_workers(self) -> None:
        for job in self._snapshot.jobs:
            for worker in job.live:
                self._hold(worker.places(), _called(job))
                self._lasting.update(worker.places() if worker.id in self._pinned else ())
            # Also those that leave it: they may stay as warm ones.
            self._there[job.launch] += len(job.live)
        for worker in self._snapshot.warm:
            is_pinned = worker.id in self._pinned
            self._hold(worker.places, _Holder(f"the {'pinned' if is_pinned else 'warm'} model {worker.model}"))
            self._lasting.update(worker.places if is_pinned else ())
            if worker.stopping:
                self._coming += worker.places
            else:
                self._there[worker.launch] += 1
                if worker.is_known:
                    self._warm.append(worker)

    def _hold(self, places: Iterable[str], holder: _Holder) -> None:
        self._held.update(dict.fromkeys(places, holder))

    def given(self, job: JobView) -> int:
        """Return how many workers the job was given."""
        return self._given[job.id]

    def give(self, job: JobView, most: int) -> list[Join | StartWorker]:
        """Give a job up to `most` workers: warm ones that fit it, then new ones on free places."""
        actions: list[Join | StartWorker] = []
        fitting = [worker for worker in self._warm if worker.launch == job.launch and not self._is_kept(worker)]
        for worker in fitting[:most]:
            self._warm.remove(worker)
            self._hold(worker.places, _called(job))
            actions.append(Join(job.id, worker.id))
        # A job's first worker is waited for with the places that there are by now; its further ones are not.
        is_first = not (job.live or self.given(job) or actions)
        asker = self._asker(job)
        found = self._find(asker, most - len(actions), is_first)
        for places in found:
            source, devices = (job.sources[0], places) if job.needs_device else (places[0], ())
            actions.append(StartWorker(job.id, source, devices))
        self._there[job.launch] += len(found)
        self._given[job.id] += len(actions)
        if is_first and not found:
            self._ahead[job.id] = self._count_waiting(asker.places)
            self._waiting[asker.places] += 1
            self._waiting_launches[job.launch] += 1
        return actions

    def _count_waiting(self, wanted: tuple[str, ...]) -> int:
        """Return how many jobs wait by now that want some of the same places."""
        return sum(count for places, count in self._waiting.items() if not set(wanted).isdisjoint(places))

    def keep(self, pin: PinView) -> list[StartPinned]:
        """Start what a pinned model lacks, where there is room for it."""
        asker = self._pin_asker(pin)
        # What its own waiting jobs are given stays with it.
        lacking = pin.workers - self._there[pin.launch] - self._waiting_launches[pin.launch]
        found = self._find(asker, lacking, waits=True)
        self._there[pin.launch] += len(found)
        return [StartPinned(pin.model, pin.source, devices) for devices in found]

    def _asker(self, job: JobView) -> _Asker:
        if job.needs_device:
            return _Asker(job.id, _called(job), job.need, self._fitting(job.need), job.troubles, job.was_ready)
        return _Asker(job.id, _called(job), _NOTHING, job.sources, job.troubles, has_urls=True)

    def _pin_asker(self, pin: PinView) -> _Asker:
        places = self._fitting(pin.need)
        called = _Holder(f"the pinned model {pin.model}")
        return _Asker(f"pin {pin.model}", called, pin.need, places, pin.troubles)

    def _fitting(self, need: Need) -> tuple[str, ...]:
        return self._gpus if need.gpus else self._others

    def _find(self, asker: _Asker, most: int, waits: bool) -> list[tuple[str, ...]]:
        """Return the places of up to `most` new workers, and hold them; make room where there are too few.

        With `waits` what there is by now is kept for the first worker that needs more.
        """
        found: list[tuple[str, ...]] = []
        self._turns[asker.id] = self._asked
        self._asked += 1
        if most <= 0 or asker.gives_up() or (not asker.has_urls and is_pausing(asker.troubles, self._now)):
            return found
        good = self._good(asker)
        while len(found) < most:
            free = [place for place in good if place not in self._held and place not in self._kept]
            chosen = tuple(free[: asker.need.devices])
            if len(chosen) < asker.need.devices:
                self._make_room(asker, good, free, waits and not found)
                break
            if paced := self._pace(asker.need):
                self._paced[asker.id] = paced
                self._keep(chosen, asker)
                break
            self._hold(chosen, asker.called)
            found.append(chosen)
        return found

    def _good(self, asker: _Asker) -> Sequence[str]:
        """Return the places where a worker may be started, those without trouble first."""
        if not asker.troubles:
            return asker.places
        if asker.has_urls:
            troubled = {trouble.place for trouble in asker.troubles if not trouble.is_over(self._now)}
            return [place for place in asker.places if place not in troubled]
        counts = {trouble.place: trouble.count for trouble in asker.troubles}
        good = [place for place in asker.places if counts.get(place, 0) < MOST_STARTS]
        return sorted(good, key=lambda place: counts.get(place, 0))

    def _make_room(self, asker: _Asker, good: Sequence[str], free: list[str], waits: bool) -> None:
        """End warm workers, the longest idle first, where a worker can start once they are gone; no more than that.

        With `waits` keep what there is, and what has to go later.
        """
        coming = [place for place in self._coming if place in good and place not in self._kept]
        missing = asker.need.devices - len(free) - len(coming)
        going = self._cheapest(good, missing)
        room = [place for worker in going for place in worker.places if place in good]
        if len(room) >= missing:
            for worker in going:
                self._warm.remove(worker)
                self._evicted.append(worker)
                self._coming += worker.places
            self._keep([*free, *coming, *room][: asker.need.devices], asker)
        elif waits and len([place for place in good if place not in self._lasting]) >= asker.need.devices:
            self._keep([*free, *coming, *room], asker)

    def _cheapest(self, good: Sequence[str], missing: int) -> list[WarmView]:
        """Return the warm workers that have to go for `missing` more places; all that can where they are too few."""
        chosen: list[tuple[WarmView, int]] = []
        for worker in sorted(self._warm, key=lambda worker: worker.idle_since):
            room = len(set(worker.places).intersection(good))
            if missing > 0 and room and worker.id not in self._pinned and not self._is_kept(worker):
                chosen.append((worker, room))
                missing -= room
        # One that holds several devices may have made others superfluous.
        for worker, room in list(chosen):
            if missing + room <= 0:
                chosen.remove((worker, room))
                missing += room
        return [worker for worker, _ in chosen]

    def _keep(self, places: Sequence[str], asker: _Asker) -> None:
        self._kept.update(dict.fromkeys(places, (asker.id, asker.called)))
        if places:
            self._keepers.append(self._turns[asker.id])

    def _is_kept(self, worker: WarmView) -> bool:
        """Return whether the worker has to make room for somebody, now or later."""
        return not self._kept.keys().isdisjoint(worker.places)

    def _pace(self, need: Need) -> str:
        """Return why a start must wait for other starts; "" when it need not, and then it counts as one."""
        pacing = self._snapshot.pacing
        if need.store and self._loading.count(need.store) >= pacing.most_loads:
            many = f"{pacing.most_loads} models are" if pacing.most_loads > 1 else "another model is"
            return f"{many} being loaded from the same file system"
        if need.staggers and self._now < self._staggered_at + pacing.stagger_s:
            return "another server has just been started on this machine"
        self._loading.append(need.store)
        if need.staggers:
            self._staggered_at = self._now
        return ""

    def stops(self) -> list[StopWarm]:
        """Return the ends of warm workers: those that make room, and those that nobody wanted for long enough."""
        keep_s = self._snapshot.keep_warm_s
        tired = [w for w in self._warm if w.id not in self._pinned and self._now - w.idle_since >= keep_s]
        return [StopWarm(worker.id) for worker in (*self._evicted, *tired)]

    def why(self, job: JobView) -> str:
        """Return why a job was given no worker."""
        return self._why(self._asker(job), self._ahead[job.id])

    def why_pinned(self, pin: PinView) -> str:
        """Return why a pinned model has fewer workers than it is to have; "" when it has all."""
        lacking = pin.workers - self._there[pin.launch]
        if lacking <= 0:
            return ""
        if lacking <= self._waiting_launches[pin.launch]:
            return "its next worker is for a job that waits"
        asker = self._pin_asker(pin)
        if asker.gives_up():
            return gives_up(pin.troubles)
        return self._why(asker, self._count_waiting(asker.places))

    def _why(self, asker: _Asker, ahead: int) -> str:
        if asker.id in self._paced:
            return self._paced[asker.id]
        if pause := self._pause(asker):
            return pause
        if len(asker.places) < asker.need.devices:
            return "there is no server" if asker.has_urls else lacks_devices(asker.need, len(asker.places))
        return waits(asker.need, ahead, self._find_obstacles(asker))

    def _find_obstacles(self, asker: _Asker) -> str:
        """Return what is in the way; it is looked up once for all of a user's who want the same and have kept none."""
        turn = self._turns.get(asker.id, self._asked)
        key = (asker.places, bisect(self._keepers, turn), asker.called.user)
        is_special = bool(asker.troubles) or turn in self._keepers
        if is_special or key not in self._obstacles:
            places = {place: self._what_is_on(place, asker) for place in asker.places}
            words = obstacles(bool(asker.need.gpus), places, self._labels, asker.troubles)
            if is_special:
                return words
            self._obstacles[key] = words
        return self._obstacles[key]

    def _pause(self, asker: _Asker) -> str:
        """Return that a start is tried again after a pause; "" when none is."""
        if not asker.has_urls:
            return starts_again_after(asker.troubles) if is_pausing(asker.troubles, self._now) else ""
        pausing = [t for t in asker.troubles if t.count < MOST_STARTS and not t.is_over(self._now)]
        return starts_again(pausing[0].pause_s(), pausing[0].words) if pausing else ""

    def _what_is_on(self, place: str, asker: _Asker) -> str:
        """Return what keeps a place from somebody; what is kept for himself is not in his way, but what is on it is."""
        kept_for, called = self._kept.get(place, (asker.id, asker.called))
        is_ahead = self._turns.get(kept_for, 0) < self._turns.get(asker.id, 0)
        if kept_for != asker.id and (is_ahead or place not in self._held):
            return f"kept for {called.told_to(asker.called.user)}"
        return f"held by {self._held[place].told_to(asker.called.user)}" if place in self._held else ""


def _called(job: JobView) -> _Holder:
    return _Holder(job.name or "another job", job.user)


def _protected(snapshot: Snapshot) -> frozenset[str]:
    """Return the workers that pins keep, of each pinned launch as many as are pinned: those that serve jobs, then
    those that are up, idle for the shortest time first, then those that load, then those that leave their job.
    """
    kept: set[str] = set()
    for pin in snapshot.pins:
        serving = [worker for job in snapshot.jobs if job.launch == pin.launch for worker in job.live]
        idle = [worker for worker in snapshot.warm if worker.launch == pin.launch and not worker.stopping]
        idle.sort(key=lambda worker: (worker.is_up, worker.idle_since), reverse=True)
        busy = [worker.id for worker in serving if not worker.stopping]
        leaving = [worker.id for worker in serving if worker.stopping]
        kept.update([*busy, *(worker.id for worker in idle), *leaving][: pin.workers])
    return frozenset(kept)
