"""Whether what was planned is right, and what is said true: looked up in the world, and not asked of the planner."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from freight.core.actions import Action, Join, PinWaits, StartPinned, StartWorker, StopWarm, Wait
from freight.core.snapshot import MOST_STARTS, START_BACKOFF_S, JobView, Need, Snapshot, Trouble
from tests.unit.planworld import WORKING, World

_AGAIN: Final = re.compile(r"starting again (\d+) s after this: ((?s:.*))")
_TAKEN: Final = re.compile(r"(.+?) (?:is|are) (held by|kept for) (.+)")
_COUNTED: Final = re.compile(r"(\d+) (?:GPUs|places)")


@dataclass
class Seeker:
    """A job without worker, or a pinned model with too few: what it wants, and what it is told."""

    id: str
    called: str
    launch: str
    need: Need
    places: tuple[str, ...]
    troubles: tuple[Trouble, ...]
    reason: str
    is_url: bool = False

    def worn_out(self) -> set[str]:
        return {trouble.place for trouble in self.troubles if trouble.count >= MOST_STARTS}

    def good(self, now: float) -> set[str]:
        """Return where a worker of it could be started now."""
        if not self.is_url:
            return set(self.places) - self.worn_out()
        return set(self.places) - {trouble.place for trouble in self.troubles if not trouble.is_over(now)}


class Truth:
    """One step of a world: before it was planned (`snapshot`), what was decided, and the world after that was done."""

    def __init__(self, world: World, snapshot: Snapshot, actions: tuple[Action, ...], pinned: set[str]) -> None:
        self.world, self.snapshot, self.actions = world, snapshot, actions
        self.now = world.now
        self.pinned = pinned
        self.holders: dict[str, str] = dict(world.strangers)
        self.ending: set[str] = set()
        self.warm: set[str] = set()
        for worker in world.workers.values():
            for place in worker.places():
                kind = "pinned" if worker.id in pinned else "warm"
                self.holders[place] = worker.job or f"the {kind} model {worker.model.name}"
                # Started in this very step for a pin.
                if worker.job is None and not any(worker.id == seen.id for seen in snapshot.warm):
                    self.holders[place] = f"the pinned model {worker.model.name}"
                if worker.job is None and worker.stopping:
                    self.ending.add(place)
                if worker.job is None and worker.id not in pinned:
                    self.warm.add(place)
        self.views = {view.id: view for view in snapshot.jobs}
        self.waits = {action.job: action.reason for action in actions if isinstance(action, Wait)}
        self.seekers = [self._seeker(view) for view in snapshot.jobs if view.id in self.waits]
        self.pin_seekers = self._pin_seekers()

    def _seeker(self, view: JobView) -> Seeker:
        need = view.need if view.needs_device else Need()
        places = view.places(self.snapshot.devices)
        called = self.waits[view.id]
        return Seeker(view.id, view.name, view.launch, need, places, view.troubles, called, not view.needs_device)

    def _pin_seekers(self) -> list[Seeker]:
        reasons = {action.model: action.reason for action in self.actions if isinstance(action, PinWaits)}
        assert list(reasons) == [pin.model for pin in self.snapshot.pins]
        seekers: list[Seeker] = []
        for pin in self.snapshot.pins:
            up = [w for w in self.world.workers.values() if w.model.name == pin.launch and (w.job or not w.stopping)]
            assert bool(reasons[pin.model]) == (len(up) < pin.workers), (pin, up, reasons)
            if reasons[pin.model]:
                places = tuple(device.id for device in pin.need.fitting(self.snapshot.devices))
                called = f"the pinned model {pin.model}"
                seekers.append(Seeker(called, called, pin.launch, pin.need, places, pin.troubles, reasons[pin.model]))
        return seekers

    def check(self) -> None:
        """Assert that all of the step is right."""
        self.check_told()
        self.check_turns()
        self.check_evictions()
        for number, seeker in enumerate(self.seekers):
            self.check_reason(seeker, self.seekers[:number])
        for number, seeker in enumerate(self.pin_seekers):
            self.check_reason(seeker, [*self.seekers, *self.pin_seekers[:number]])

    def check_told(self) -> None:
        """Whatever may have a worker and has none was given one, was suspended or ended, or is told why."""
        told = {getattr(action, "job", "") for action in self.actions}
        for view in self.snapshot.jobs:
            assert view.state not in WORKING or view.live or view.id in told, view
            assert view.id not in self.waits or (view.state in WORKING and not view.live and not view.blocked), view

    def is_pausing(self, seeker: Seeker) -> bool:
        if seeker.is_url:
            return False  # One URL pauses, others need not.
        last = max((trouble.at for trouble in seeker.troubles), default=float("-inf"))
        return seeker.reason.startswith("starting again") and self.now < last + START_BACKOFF_S[-1]

    def is_trying(self, seeker: Seeker) -> bool:
        given_up = seeker.reason.startswith(("it would not start", "its next worker is for"))
        return not (given_up or self.is_pausing(seeker))

    def is_paced(self, seeker: Seeker) -> bool:
        return "same file system" in seeker.reason or "just been started" in seeker.reason

    def check_turns(self) -> None:
        """No free place goes past a job that waits and could be there, if not now then when others have ended."""
        lasting = set(self.world.strangers)
        for worker in self.world.workers.values():
            lasting.update(worker.places() if worker.id in self.pinned else ())
        order = [view.id for view in self.snapshot.jobs]
        served = set[str]()
        for action in self.actions:
            if isinstance(action, StartPinned):
                behind = order
                places = action.devices
            elif isinstance(action, StartWorker):
                is_first = not self.views[action.job].live and action.job not in served
                behind = order[: order.index(action.job)] if is_first else order
                places = action.devices or (action.source,)
            else:
                served.add(action.job if isinstance(action, Join) else "")
                continue
            served.add(action.job if isinstance(action, StartWorker) else "")
            for seeker in self.seekers:
                good = seeker.good(self.now)
                if seeker.id in behind and not self.is_pausing(seeker) and not self.is_paced(seeker):
                    possible = len(good - lasting) >= seeker.need.devices
                    assert not (possible and good.intersection(places)), (seeker, action)

    def check_evictions(self) -> None:
        """Nothing pinned goes; what goes has been idle for long enough, or somebody can start once it is gone."""
        stopped = [action.worker for action in self.actions if isinstance(action, StopWarm)]
        assert len(stopped) == len(set(stopped))
        assert self.pinned.isdisjoint(stopped), stopped
        asking = [s for s in (*self.seekers, *self.pin_seekers, *self.hopers()) if self.is_trying(s)]
        later: set[str] = set()
        for worker in reversed([self.world.workers[name] for name in stopped]):
            places = set(worker.places())
            later |= places
            if self.now - worker.idle_since >= self.world.keep_warm_s:
                continue
            helped = [s for s in asking if places & s.good(self.now) and len(self.room(s)) >= s.need.devices]
            assert helped, (worker, asking)
            # What came free before it is less than all can use who can use any of that.
            room = set[str]().union(*(self.room(s) for s in helped))
            wanting = [s for s in asking if s.good(self.now) & room]
            assert len(room - later) < sum(s.need.devices for s in wanting), (worker, wanting)

    def hopers(self) -> Iterable[Seeker]:
        """Return the running jobs that would like a further worker."""
        for view in self.snapshot.jobs:
            ends = view.blocked or view.broken or view.out_of_time or view.state not in WORKING
            live = self.world.of(view.id)
            if view.id not in self.waits and live and not ends and len(live) < min(view.workers, view.left):
                need = view.need if view.needs_device else Need()
                places = view.places(self.snapshot.devices)
                yield Seeker(view.id, view.name, view.launch, need, places, view.troubles, "", not view.needs_device)

    def room(self, seeker: Seeker) -> set[str]:
        """Return where it could be started once all that is ending has ended."""
        return {place for place in seeker.good(self.now) if place not in self.holders or place in self.ending}

    def check_reason(self, seeker: Seeker, before: list[Seeker]) -> None:
        """Each part of a reason is true, and together they are enough to keep somebody waiting."""
        assert seeker.reason == seeker.reason.strip() and "None" not in seeker.reason
        if seeker.reason.startswith("starting again"):
            self.check_pause(seeker)
        elif self.is_paced(seeker):
            self.check_pacing(seeker)
        elif seeker.reason == "its next worker is for a job that waits":
            assert any(seeker.launch == other.launch for other in before), seeker
        elif seeker.reason.startswith("it would not start: "):
            assert sum(trouble.count for trouble in seeker.troubles) >= MOST_STARTS, seeker
        else:
            self.check_parts(seeker, before)

    def check_pause(self, seeker: Seeker) -> None:
        again = _AGAIN.fullmatch(seeker.reason)
        assert again, seeker
        pause_s, words = float(again[1]), again[2]
        assert pause_s in START_BACKOFF_S
        assert any(t.words == words and self.now < t.at + pause_s for t in seeker.troubles), seeker

    def check_pacing(self, seeker: Seeker) -> None:
        need, world = seeker.need, self.world
        free = [place for place in seeker.good(self.now) if place not in self.holders]
        assert len(free) >= need.devices, seeker
        if "file system" in seeker.reason:
            loading = [w for w in world.workers.values() if w.is_loading and w.model.need.store == need.store]
            assert need.store and len(loading) >= world.most_loads, seeker
            assert seeker.reason.startswith(f"{world.most_loads} models" if world.most_loads > 1 else "another model")
        else:
            assert need.staggers and self.now - world.staggered_at < 2.0

    def check_parts(self, seeker: Seeker, before: list[Seeker]) -> None:
        parts = seeker.reason.split("; ")
        if seeker.need.gpus > 1:
            assert parts.pop(0) == f"it needs {seeker.need.gpus} GPUs", seeker
        # Those before it that want the same kind of place; a pinned model comes after all jobs.
        ahead = [s for s in before if s in self.seekers and set(s.places) & set(seeker.places)]
        if ahead:
            assert parts.pop(0) == f"{len(ahead)} job{'s' if len(ahead) > 1 else ''} ahead", seeker
        worn_out = seeker.worn_out()
        left = len(seeker.good(self.now))
        for part in parts:
            failed = re.fullmatch(r"on (.+?) it would not start: (.+)", part)
            if failed:
                worn_out -= {place for place in worn_out if self.world.label(place) == failed[1]}
                assert "\n" not in part
                continue
            taken = _TAKEN.fullmatch(part)
            assert taken, (part, seeker)
            left -= self.check_taken(seeker, before, taken[1], taken[2], taken[3])
        assert not worn_out, seeker
        assert left < seeker.need.devices, seeker

    def check_taken(self, seeker: Seeker, before: list[Seeker], labels: str, how: str, who: str) -> int:
        """Assert that somebody has the places that he is said to have, and return how many these are."""
        if how == "held by":
            his = {place for place in seeker.good(self.now) if self.holders.get(place) == who}
        else:
            keeper = next(s for s in (*self.seekers, *self.pin_seekers, *self.hopers()) if s.called == who)
            his = seeker.good(self.now) & keeper.good(self.now)
            # Somebody behind may have what is free, where this one could not be in any case.
            may_be_warm = self.warm if keeper in before else set[str]()
            his = {place for place in his if place not in self.holders or place in may_be_warm}
        named = self.named(labels, seeker)
        if isinstance(named, int):
            assert named <= len(his), (labels, who, seeker, his)
            return named
        assert named <= his, (labels, who, seeker, his)
        return len(named)

    def named(self, labels: str, seeker: Seeker) -> set[str] | int:
        if labels == "both GPUs":
            assert len(seeker.places) == 2
            return set(seeker.places)
        if labels == f"all {len(seeker.places)} GPUs":
            return set(seeker.places)
        if counted := _COUNTED.fullmatch(labels):
            return int(counted[1])
        by_label = {self.world.label(place): place for place in seeker.places}
        return {by_label[label] for label in re.split(", | and ", labels)}


def pinned_workers(world: World, snapshot: Snapshot) -> set[str]:
    """Return the workers that pins keep: those that serve first, then idle ones, the longest idle last, then those that
    leave.
    """
    pinned: set[str] = set()
    for pin in snapshot.pins:
        its = [w for w in world.workers.values() if w.model.name == pin.launch]
        idle = sorted((w for w in its if w.job is None and not w.stopping), key=lambda w: -w.idle_since)
        busy = [w for w in its if w.job is not None and not (w.stopping or w.releasing)]
        leaving = [w for w in its if w.job is not None and (w.stopping or w.releasing)]
        pinned.update(w.id for w in [*busy, *idle, *leaving][: pin.workers])
    return pinned
