"""Pinned models, in a service whose workers the test plays."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from freight.control import pins
from freight.control.jobrun import launch_of
from freight.control.resolve import started_model
from freight.core.job import State
from freight.core.messages import Order, Phase
from freight.core.model import EngineName, ModelEntry
from freight.core.snapshot import MOST_STARTS
from freight.errors import LauncherError, UserError
from tests.unit.planes import LIMITS
from tests.unit.services import MINE, Office


async def pinned(office: Office, number: int = 1) -> str:
    """Return the `number`th worker, which has a pinned model's server up and was told so."""
    worker = await office.started(number)
    orders = await office.say(worker, phase=Phase.LOADING)
    assert orders.setup is not None
    assert (orders.setup.job, orders.setup.model.name) == ("", MINE)
    await office.say(worker, phase=Phase.IDLE)
    return worker


def shown(office: Office) -> tuple[int, int, str]:
    """Return how many workers of the one pin there are to be and are up, and why there are fewer."""
    [pin] = office.service.machine.workers(office.owner).pins
    return pin.workers, pin.up, pin.reason


def test_pinned_model_is_up_and_serves_its_jobs_one_after_another(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        worker = await pinned(office)
        await office.until(lambda: shown(office) == (1, 1, ""))
        for name in ("a", "b"):
            await office.submit(name)
            await office.until(lambda: office.plane.roster.workers[worker].job is not None)
            orders = await office.say(worker, phase=Phase.IDLE)
            assert orders.setup is not None and orders.setup.job == office.id_of(name)
            await office.say(worker, name)
            assert (await office.finish(worker, name)).order is Order.RELEASE
            await office.say(worker, name, phase=Phase.IDLE)
            await office.until_state(name, State.COMPLETED)
        assert len(office.hand.places) == 1

    office.run(scenario)


def test_worker_that_still_loads_may_be_given_a_job(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        worker = await office.started(1)
        await office.say(worker, phase=Phase.LOADING)
        assert shown(office)[1] == 0
        await office.submit("a")
        await office.until(lambda: office.plane.roster.workers[worker].job is not None)
        orders = await office.say(worker, phase=Phase.LOADING)
        assert orders.setup is not None and orders.setup.job == office.id_of("a")
        await office.say(worker, "a", phase=Phase.LOADING)
        await office.say(worker, "a")
        assert (await office.finish(worker, "a")).order is Order.RELEASE

    office.run(scenario)


def test_pins_are_taken_up_by_the_next_service(office: Office) -> None:
    async def first() -> None:
        await office.service.machine.pin(MINE, 1)
        await pinned(office)

    async def second() -> None:
        assert shown(office)[0] == 1
        await pinned(office)
        await office.service.machine.unpin(MINE)

    async def third() -> None:
        assert office.service.machine.workers(office.owner).pins == []

    office.run(first, second, third)


def test_pin_of_a_model_that_is_gone_says_so_and_can_be_taken_back(office: Office) -> None:
    async def first() -> None:
        await office.service.machine.pin(MINE, 1)
        await pinned(office)

    async def second() -> None:
        assert shown(office) == (1, 0, shown(office)[2])
        assert f"there is no model {MINE}" in shown(office)[2]
        await office.service.machine.unpin(MINE)
        assert office.context.catalog.pins() == {}

    office.run(first)
    config = office.data.parent / "config.toml"
    config.write_text('[pools.local]\ndevices = ["cpu:0"]\n')
    office.run(second)


def test_starts_that_fail_are_counted_told_and_tried_again_later(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freight.core.snapshot.START_BACKOFF_S", (0.0, 0.0))

    async def scenario() -> None:
        office.hand.refusals = [LauncherError("no such luck", transient=True) for _ in range(MOST_STARTS)]
        await office.service.machine.pin(MINE, 1)
        await office.until(lambda: not office.hand.refusals and "no such luck" in shown(office)[2])
        pin = office.plane.roster.pins[MINE]
        assert sum(trouble.count for trouble in pin.troubles.values()) == MOST_STARTS
        assert shown(office)[:2] == (1, 0)
        # It is not tried any more, until it is tried again.
        office.plane.changed()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not office.hand.places
        for place, trouble in list(pin.troubles.items()):
            pin.troubles[place] = replace(trouble, at=trouble.at - pins._RETRY_S)
        office.plane.changed()
        await pinned(office)
        await office.until(lambda: shown(office) == (1, 1, ""))

    office.run(scenario)


def test_worker_that_ends_by_itself_counts_against_its_pin_and_one_that_was_ended_does_not(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        worker = await pinned(office)
        pin = office.plane.roster.pins[MINE]
        office.hand.ends[worker].set()
        await office.until(lambda: pin.troubles)
        [trouble] = pin.troubles.values()
        assert (trouble.count, trouble.words) == (1, "the worker process ended with status 1")
        second = await pinned(office, 2)
        # It can be started after all.
        assert pin.troubles == {}
        await office.service.machine.unpin(MINE)
        await office.until_told(second, Order.STOP, phase=Phase.IDLE)
        office.hand.ends[second].set()
        await office.until(lambda: not office.plane.roster.workers)
        assert pin.troubles == {}

    office.run(scenario)


def test_failures_of_a_start_do_not_harm_a_job_of_another_model(office: Office) -> None:
    async def scenario() -> None:
        office.hand.refusals = [LauncherError("never", transient=False)]
        await office.service.machine.pin(MINE, 1)
        await office.until(lambda: not office.hand.refusals)
        await office.until(lambda: "never" in shown(office)[2])
        await office.submit("a")
        await office.complete("a")

    office.run(scenario)


@pytest.mark.parametrize(
    ("name", "workers", "words"),
    [(MINE, 2, "2 workers of mine"), ("nosuch", 1, "no model nosuch"), ("http://127.0.0.1:9", 1, "in the registry")],
)
def test_pin_that_can_never_be_is_refused_and_changes_nothing(
    office: Office, name: str, workers: int, words: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(UserError, match=words):
            await office.service.machine.pin(name, workers)
        assert office.context.catalog.pins() == office.plane.roster.pins == {}

    office.run(scenario)


def test_pin_without_a_model_takes_no_part_in_the_plan() -> None:
    assert pins.Pin("gone", 1, None, 0, reason="there is no model gone").view(0.0) is None


def test_setup_of_a_pinned_worker_has_no_job(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        setup = office.plane.roster.pins[MINE].setup(LIMITS)
        assert (setup.job, setup.gpus, setup.endpoints, setup.source) == ("", 0, [], "")

    office.run(scenario)


def test_pin_that_is_taken_back_twice_at_once_is_taken_back(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        both = await asyncio.gather(*(office.service.machine.unpin(MINE) for _ in range(2)), return_exceptions=True)
        assert not [error for error in both if isinstance(error, BaseException) and not isinstance(error, UserError)]
        assert office.context.catalog.pins() == office.plane.roster.pins == {}

    office.run(scenario)


def test_job_that_comes_after_its_models_entry_was_changed_gets_a_worker_of_the_new_entry(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        worker = await pinned(office)
        office.configure(entry='args = ["--other"]')
        await office.submit("a")
        await office.until_told(worker, Order.STOP, phase=Phase.IDLE)
        office.hand.ends[worker].set()
        second = await office.started(2)
        orders = await office.say(second, phase=Phase.LOADING)
        assert orders.setup is not None
        assert (orders.setup.job, orders.setup.model.entry.args) == (office.id_of("a"), ["--other"])
        await office.say(second, "a")
        assert (await office.finish(second, "a")).order is Order.RELEASE
        await office.say(second, "a", phase=Phase.IDLE)
        await office.until_state("a", State.COMPLETED)
        await office.until(lambda: shown(office) == (1, 1, ""))

    office.run(scenario)


@pytest.mark.parametrize("by", ["the sweep", "a job"])
def test_pinned_model_that_could_not_run_at_the_start_comes_up_once_it_can(
    office: Office, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    async def first() -> None:
        await office.service.machine.pin(MINE, 1)
        await pinned(office)

    office.run(first)
    office.configure(entry='source = "/nowhere/at/all"')
    if by == "the sweep":
        monkeypatch.setattr("freight.control.service._SWEEP_S", 0.01)

    async def second() -> None:
        assert shown(office)[:2] == (1, 0)
        assert "/nowhere/at/all" in shown(office)[2]
        office.configure(entry='source = "/nowhere/else"')
        await office.service.machine.renew_pins()
        # What it says is of the entry as it is.
        assert "/nowhere/else" in shown(office)[2]
        office.configure()
        if by == "a job":
            await office.submit("a")
            await office.complete("a")
            await pinned(office, 2)
        else:
            await pinned(office)
        await office.until(lambda: shown(office) == (1, 1, ""))

    office.run(second)


def test_worker_for_a_pin_that_never_reports_is_ended_and_counts_against_it(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freight.control.plane.FIRST_REPORT_S", 0.05)

    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        pin = office.plane.roster.pins[MINE]
        await office.until(lambda: pin.troubles)
        [trouble] = pin.troubles.values()
        assert (trouble.count, trouble.words) == (1, "the worker did not report within 0.05 s")
        monkeypatch.setattr("freight.control.plane.FIRST_REPORT_S", 60.0)
        await office.until(lambda: not [one for one in office.plane.roster.workers.values() if one.deadline])
        await pinned(office, len(office.hand.places) if office.plane.roster.workers else len(office.hand.places) + 1)

    office.run(scenario)


def test_model_whose_file_is_another_needs_another_server(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + b"the old weights")
    entry = ModelEntry(engine=EngineName.LLAMACPP, source=str(file))
    before = started_model("m", "m", entry)
    again = started_model("m", "m", entry)
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + b"the new weights")
    after = started_model("m", "m", entry)
    assert launch_of(before, (), 0, 0) == launch_of(again, (), 0, 0) != launch_of(after, (), 0, 0)
    # Other names for it change nothing about its server.
    named = started_model("m", "m", ModelEntry(engine=EngineName.LLAMACPP, source=str(file), aliases=["n"]))
    assert launch_of(named, (), 0, 0) == launch_of(after, (), 0, 0)


def test_pinned_worker_stays_up_while_its_models_entry_cannot_run(office: Office) -> None:
    async def scenario() -> None:
        await office.service.machine.pin(MINE, 1)
        worker = await pinned(office)
        office.configure(entry='source = "/out/of/reach"')
        await office.service.machine.renew_pins()
        office.plane.changed()
        await office.until(lambda: not office.plane._changed.is_set())
        assert (await office.say(worker, phase=Phase.IDLE)).order is Order.RUN
        await office.until(lambda: shown(office) == (1, 1, ""))

    office.run(scenario)
