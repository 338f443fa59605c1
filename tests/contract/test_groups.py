"""Models and pools that are for groups: who may run what, and who sees that it is there."""

import json
from collections.abc import Generator

import pytest

from freight.client.sync import Client
from freight.store.registry import BUILT_IN
from tests.contract.town import MODEL, Town, town
from tests.harness import PATIENCE_S, Json, model_toml

CLOSED = "closed"
GROUP = "chem lab"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    """A town with a model for one group, of which dora is, and alice is not."""
    with town(tmp_path_factory.mktemp("town")) as made:
        closed = model_toml(CLOSED, engine="endpoint", source=made.end.url, groups=[GROUP], aliases=["secret-alias"])
        made.box.config.write_text(f"{made.box.config.read_text()}\n{closed}")
        made.tokens["dora"] = made.token("dora", "user", "--group", GROUP, "--group", "other")
        yield made


def submit(lab: Town, who: str, **options: str) -> tuple[int, Json]:
    answer = lab.as_(who, "POST", "/api/jobs", json={"upload": lab.upload(who), **options})
    return answer.status_code, answer.json()


def test_who_is_in_a_models_group_may_run_it_and_admins_may(lab: Town) -> None:
    for who in ("dora", "carol"):
        status, answer = submit(lab, who, model=CLOSED)
        assert (status, answer["job"]["model"]) == (201, CLOSED)


@pytest.mark.parametrize("name", [CLOSED, "secret-alias"])
def test_who_is_not_is_refused_and_not_told_whose_it_is(lab: Town, name: str) -> None:
    status, answer = submit(lab, "alice", model=name)

    assert (status, answer["error"]["code"]) == (403, "not_allowed")
    assert name in answer["error"]["message"]
    assert MODEL in answer["error"]["hint"]
    assert not any(word in str(answer["error"]) for word in (GROUP, "other", *({CLOSED, "secret-alias"} - {name})))


def test_a_model_that_is_not_there_for_a_user_is_in_no_list_of_theirs(lab: Town) -> None:
    _, answer = submit(lab, "alice", model="no-such-model")

    assert CLOSED not in str(answer)
    assert MODEL in str(answer)


def test_models_of_a_service_that_is_named_are_listed_as_each_may_run_them(lab: Town) -> None:
    def listed(who: str) -> list[Json]:
        done = lab.box.freight("models", "list", "--server", lab.url, "--json", FREIGHT_TOKEN=lab.tokens[who])
        assert (done.status, done.stderr) == (0, "")
        with lab.client(who) as client:
            assert [one.name for one in client.models()] == [row["name"] for row in json.loads(done.stdout)]
        return json.loads(done.stdout)

    assert {row["name"]: row["groups"] for row in listed("alice")} == {MODEL: None, BUILT_IN: None}
    assert {row["name"]: row["groups"] for row in listed("dora")} == {MODEL: None, BUILT_IN: None, CLOSED: None}
    assert {row["name"]: row["groups"] for row in listed("carol")} == {MODEL: [], BUILT_IN: [], CLOSED: [GROUP]}
    [row] = [row for row in listed("dora") if row["name"] == CLOSED]
    assert (row["engine"], row["aliases"], row["batch"]) == ("endpoint", ["secret-alias"], False)


def test_models_of_the_service_in_freight_server_are_shown_in_place_of_those_here(lab: Town) -> None:
    there = {"FREIGHT_SERVER": lab.url, "FREIGHT_TOKEN": lab.tokens["alice"]}
    for command in (("list",), ("show", MODEL)):
        done = lab.box.freight("models", *command, **there)
        assert (done.status, MODEL in done.stdout, CLOSED in done.stdout) == (0, True, False)
    for name in (CLOSED, "secret-alias"):
        refused = lab.box.freight("models", "show", name, **there)
        assert (refused.status, refused.stderr.splitlines()[0]) == (
            2,
            f"error: there is no model {name} at {lab.url}",
        )
        assert CLOSED in lab.box.freight("models", "show", name).stdout
    nobody = lab.box.freight("models", "list", FREIGHT_SERVER=lab.url)
    assert (nobody.status, nobody.stdout) == (4, "")


def test_a_user_of_another_group_whose_job_it_was_does_not_go_on_with_it(lab: Town) -> None:
    lab.tokens["erin"] = lab.token("erin", "user", "--group", GROUP)
    lab.end.let_go.clear()
    answer = lab.as_("erin", "POST", "/api/jobs", json={"upload": lab.upload("erin", "hold"), "model": CLOSED})
    job = answer.json()["job"]["id"]
    with lab.client("erin") as client:
        client.cancel(job)
        client.wait(job, PATIENCE_S)
    lab.tokens["erin"] = lab.token("erin")

    for verb in ("resume", "retry"):
        answer = lab.as_("erin", "POST", f"/api/jobs/{job}/{verb}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")


def test_a_pool_for_a_group_is_closed_to_others_with_all_of_its_models(lab: Town) -> None:
    before = lab.box.config.read_text()
    lab.box.config.write_text(before.replace("[pools.local]\n", f'[pools.local]\ngroups = ["{GROUP}"]\n'))
    try:
        status, answer = submit(lab, "alice", model=MODEL)
        assert (status, MODEL in answer["error"]["message"], GROUP in str(answer)) == (403, True, False)
        assert submit(lab, "dora", model=MODEL)[0] == 201
    finally:
        lab.box.config.write_text(before)


def test_a_tokens_groups_are_shown_to_admins(lab: Town) -> None:
    with Client(lab.box.server) as client:
        [dora] = [token for token in client.tokens() if token.user == "dora"]
    assert dora.groups == [GROUP, "other"]
    assert f"{GROUP}, other" in lab.box.freight("token", "list").stdout


@pytest.mark.parametrize("group", ["", " a", "a ", "a\nb", "x" * 129])
def test_what_can_be_no_group_is_refused(lab: Town, group: str) -> None:
    done = lab.box.freight("token", "create", "frank", "--group", group)

    assert (done.status, done.stdout) == (2, "")
    assert "group" in done.stderr


def test_only_admins_are_told_the_services_process_and_folder(lab: Town) -> None:
    told = lab.as_("carol", "GET", "/api/version").json()
    shown = lab.as_("alice", "GET", "/api/version").json()

    assert told["data_folder"] == str(lab.box.data)
    assert isinstance(told["pid"], int)
    assert (shown["pid"], shown["data_folder"], shown["version"]) == (None, None, told["version"])
