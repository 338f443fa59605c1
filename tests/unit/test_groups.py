"""For whom models and pools are, and what others see of them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from freight.config import Config
from freight.control.jobrun import launch_of
from freight.control.resolve import started_model
from freight.control.rights import check_groups, check_registered, may_run, seen_by
from freight.core.account import Account, Role
from freight.core.job import State
from freight.core.view import JobRequest
from freight.errors import NotAllowed
from tests.unit.services import MINE, Office, open_office

ALICE = Account("alice")
DORA = Account("dora", groups=frozenset({"chem", "other"}))
ADMIN = Account("carol", Role.ADMIN)


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    return open_office(tmp_path, monkeypatch)


def settings(office: Office, entry: str = "", pool: str = "") -> Config:
    office.configure(entry=entry, pool=pool)
    return office.settings()


def test_a_model_without_groups_is_for_everybody_and_what_is_not_registered_for_admins(office: Office) -> None:
    config = settings(office)

    assert may_run(ALICE, MINE, config) and may_run(ADMIN, MINE, config)
    assert may_run(ADMIN, "/a/path", config) and not may_run(DORA, "/a/path", config)


@pytest.mark.parametrize("name", [MINE, "another-name"])
def test_a_model_for_a_group_is_for_its_members_and_admins_by_whichever_name(office: Office, name: str) -> None:
    config = settings(office, 'groups = ["chem", "bio"]\naliases = ["another-name"]')

    assert [may_run(who, name, config) for who in (ALICE, DORA, ADMIN)] == [False, True, True]
    assert [list(seen_by(who, config).models) for who in (ALICE, DORA)] == [[], [MINE]]
    with pytest.raises(NotAllowed, match=name):
        check_registered(ALICE, name, config)


def test_a_pool_for_a_group_is_closed_with_all_models_in_it(office: Office) -> None:
    config = settings(office, pool='groups = ["chem"]')

    assert [may_run(who, MINE, config) for who in (ALICE, DORA, ADMIN)] == [False, True, True]
    with pytest.raises(NotAllowed, match="local"):
        check_groups(ALICE, "a-model-that-is-gone", config)
    check_groups(DORA, "a-model-that-is-gone", config)


def test_workers_and_pins_of_a_model_for_a_group_do_not_name_it_to_others(office: Office) -> None:
    office.configure(entry='groups = ["chem"]')

    async def scenario() -> None:
        machine = office.service.machine
        await machine.pin(MINE, 1)
        await office.say(await office.started(1))

        for who, models in ((ALICE, []), (DORA, [MINE]), (ADMIN, [MINE])):
            seen = machine.workers(who)
            assert [pin.model for pin in seen.pins] == models
            assert [worker.model for worker in seen.workers if worker.model] == models
        await machine.unpin(MINE)

    office.run(scenario)


def test_a_server_that_runs_goes_on_when_its_model_is_for_others(office: Office) -> None:
    entry = settings(office).models[MINE]
    launches = {
        launch_of(started_model(MINE, MINE, msgspec.structs.replace(entry, groups=groups)), (), 0, 0)
        for groups in ([], ["chem"])
    }

    assert len(launches) == 1


def test_a_name_that_another_model_has_by_now_does_not_take_a_job_to_what_is_not_for_its_user(office: Office) -> None:
    async def scenario() -> None:
        office.configure(entry='aliases = ["best"]')
        await office.submit("first")
        upload = await office.upload(ALICE)
        await office.service.submit(ALICE, JobRequest(upload=upload.id, name="a", model="best"), None)
        await office.service.cancel(ALICE, "a")
        while (await office.service.finder.find(ALICE, "a")).state is not State.CANCELLED:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

        other = '[models.big]\nengine = "command"\ncommand = ["big", "{socket}"]\naliases = ["best"]\ngroups = ["chem"]'
        office.configure(other)
        await office.service.resume(ALICE, "a")

        row = await office.service.finder.find(ALICE, "a")
        assert (row.model, row.spec["model"]["name"]) == (MINE, MINE)

    office.run(scenario)
