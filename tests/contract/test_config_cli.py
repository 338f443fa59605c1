"""Settings: what beats what, where each value came from, and mistakes that are named; and `freight doctor`."""

import json
from pathlib import Path
from typing import Final

import pytest

from tests.contract.scenario import side_by_side
from tests.harness import CASES, Box, chat, finish

# A file with everything in it.
WHOLE: Final = (CASES / "config.toml").read_text(encoding="utf-8")


def shown(box: Box, **variables: str) -> dict[str, dict[str, object]]:
    """Return what `config show --origin --json` prints."""
    done = box.freight("config", "show", "--origin", "--json", **variables)
    assert (done.status, done.stderr) == (0, "")
    return json.loads(done.stdout)


@side_by_side
def test_everything_has_a_default_and_an_empty_file_is_fine(box: Box) -> None:
    box.config.write_text("")
    values = shown(box)
    assert {entry["origin"] for key, entry in values.items() if not key.startswith("models.")} == {"default"}
    assert values["limits.records"]["value"] == 150_000
    assert values["limits.record_bytes"]["value"] == 10_000_000
    assert values["retention"]["value"] is None
    # Without any file it is the same.
    without = shown(box, FREIGHT_CONFIG="", XDG_CONFIG_HOME=str(box.folder))
    assert without.keys() == values.keys()


@side_by_side
def test_variables_beat_the_file_which_beats_the_registry(box: Box) -> None:
    assert box.freight("models", "add", "lab", "--source", "http://127.0.0.1:9").status == 0
    assert box.freight("models", "add", "other", "--source", "http://127.0.0.1:9").status == 0
    box.config.write_text(WHOLE)
    values = shown(box, FREIGHT_LIMITS_RECORDS="77", FREIGHT_RETENTION="keep")
    assert values["limits.records"] == {"value": 77, "origin": "FREIGHT_LIMITS_RECORDS"}
    assert values["retention"] == {"value": None, "origin": "FREIGHT_RETENTION"}
    assert values["limits.active_jobs"] == {"value": 20, "origin": str(box.config)}
    assert values["limits.file_bytes"]["origin"] == "default"
    assert values["models.lab"]["origin"] == str(box.config)
    assert values["models.other"]["origin"] == "registry"
    assert values["models.lab"]["value"]["source"] == ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]  # type: ignore[index]
    for key in ("pools.sophia", "paths.alice", "paths.*", "models.llama-8b", "models.mine"):
        assert values[key]["origin"] == str(box.config)
    plain = box.freight("config", "show", "--origin", FREIGHT_LIMITS_RECORDS="77")
    assert "limits.records = 77  # FREIGHT_LIMITS_RECORDS" in plain.stdout.splitlines()
    assert f'server.listen = "127.0.0.1:8400"  # {box.config}' in plain.stdout.splitlines()
    assert "#" not in box.freight("config", "show").stdout


@side_by_side
def test_flag_beats_variable(box: Box) -> None:
    box.write("in.jsonl", [chat("a")])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "typed", FREIGHT_DEFAULT_MODEL="variable")
    assert (done.status, "there is no model typed" in done.stderr) == (2, True)


_ALIASED: Final = '[models.{}]\nengine = "endpoint"\naliases = ["same"]\n'
# A mistake, the dotted key that names it, and what else is said.
MISTAKES: Final = {
    "key": ("[limits]\nrecord = 5\n", "limits.record", "limits.records"),
    "section": ("[limit]\nrecords = 5\n", "limit.records", "limits.records"),
    "top": ("retain = 5\n", "retain", "retention"),
    "duration": ('retention = "soon"\n', "retention", "soon"),
    "size": ('[limits]\nrecord_bytes = "big"\n', "limits.record_bytes", "big"),
    "count": ("[limits]\nrecords = -1\n", "limits.records", "-1"),
    "flag": ("[openai]\nenforce_window = 3\n", "openai.enforce_window", "3"),
    "engine": ('[models.x]\nengine = "abacus"\n', "models.x.engine", "abacus"),
    "no-engine": ('[models.x]\nsource = "y"\n', "models.x", "engine"),
    "model-key": ('[models.x]\nengine = "endpoint"\nsorce = "y"\n', "models.x.sorce", "source"),
    "model-type": ('[models.x]\nengine = "endpoint"\ngpus = "two"\n', "models.x.gpus", "int"),
    "model-name": ('[models."a/b"]\nengine = "endpoint"\n', "a/b", "letters"),
    "pool-key": ("[pools.local]\ndevice = 1\n", "pools.local.device", "devices"),
    "pool-value": ('[pools.local]\nkeep_warm = "x"\n', "pools.local", "keep_warm"),
    "paths": ("[paths]\nbob = { reed = [] }\n", "paths.bob.reed", "read"),
    "path": ('[paths]\nbob = { write = ["out"] }\n', "paths.bob.write", "'out' is not a folder's whole path"),
    "alias": (f"{_ALIASED.format('x')}{_ALIASED.format('y')}", "models.y.aliases", "an alias of model x"),
    "model-flag": ('[models.x]\nengine = "endpoint"\nbatch = "yes"\n', "models.x.batch", "takes true or false"),
    "table": ("pools = 3\n", "pools", "table"),
    "toml": ("[limits\n", "", "TOML"),
}


@pytest.mark.parametrize("name", MISTAKES)
@side_by_side
def test_mistake_is_named_with_file_and_dotted_key(name: str, box: Box) -> None:
    toml, key, also = MISTAKES[name]
    box.config.write_text(toml)
    done = box.freight("config", "show")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {box.config}")
    assert key in done.stderr
    assert also in done.stderr
    assert done.last_line().startswith("hint: ")


@side_by_side
def test_mistake_in_a_variable_is_named(box: Box) -> None:
    for variables, says in (
        ({"FREIGHT_LIMITS_RECORDS": "many"}, "FREIGHT_LIMITS_RECORDS"),
        ({"FREIGHT_LIMITS_RECORD": "5"}, "FREIGHT_LIMITS_RECORD"),
        ({"FREIGHT_CONFIG": "/no/such.toml"}, "/no/such.toml"),
    ):
        done = box.freight("config", "show", **variables)
        assert done.status == 2
        assert says in done.stderr
        assert done.last_line().startswith("hint: ")


@side_by_side
def test_doctor_says_what_is_wrong_and_how_to_mend_it(box: Box) -> None:
    good = box.freight("doctor")
    assert "FAIL configuration" not in good.stdout
    assert {line[5:].partition(":")[0] for line in good.stdout.splitlines() if line.startswith("ok")} >= {
        "Python", "SQLite", "configuration", "device", "data folder", "Unix sockets",
    }  # fmt: skip
    assert good.status == ("FAIL" in good.stdout)
    box.config.write_text("[limits]\nrecord = 5\n")
    bad = box.freight("doctor")
    assert bad.status == 1
    assert f"FAIL configuration: {box.config}: unknown key limits.record" in bad.stdout


@side_by_side
def test_settings_that_name_what_is_not_there_are_found_before_users_find_them(box: Box) -> None:
    hooks = '[webhooks]\nhosts = ["hooks.test"]\n'
    for secret in ("", f'secret_file = "{box.folder}/missing"\n'):
        box.config.write_text(hooks + secret)
        for arguments in (("serve",), ("serve", "--background")):
            refused = box.freight(*arguments)
            assert refused.status == 2
            assert refused.stderr.startswith(f"error: {box.config}: ")
            assert "webhooks.secret_file" in refused.stderr
            assert refused.last_line().startswith("hint: ")
        assert f"FAIL configuration: {box.config}: " in box.freight("doctor").stdout
    box.config.write_text(f'[paths]\nalice = {{ read = ["{box.folder}"], write = ["{box.folder}/none"] }}\n')
    warned = box.freight("doctor").stdout
    assert warned.count("granted folder") == 1
    words = f"{box.config}: paths.alice.write grants {box.folder}/none, which does not exist"
    assert f"warn granted folder: {words}" in warned


@side_by_side
def test_pool_is_shown_by_the_keys_that_one_writes(box: Box) -> None:
    written = {"devices": ["cpu:0"], "keep_warm": 1800, "max_loads": 2, "groups": ["chem"]}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in written.items())
    box.config.write_text(f"[pools.local]\n{lines}[pools.far]\nprovider = 'slurm'\npartition = 'gpu'\n")
    values = shown(box)
    assert values["pools.local"]["value"] == written | {"provider": "local", "max_warm": 86400, "stage": ""}
    far = values["pools.far"]["value"]
    assert isinstance(far, dict)
    assert (far["devices"], far["partition"]) == ("auto", "gpu")


@side_by_side
def test_data_folder_is_chosen_and_made_when_needed(box: Box, folder: Path) -> None:
    chosen = folder / "chosen" / "deep"
    assert box.freight("config", "show", FREIGHT_DATA=str(chosen)).status == 0
    assert not chosen.exists()
    added = box.freight("models", "add", "lab", "--source", "http://127.0.0.1:9", FREIGHT_DATA=str(chosen))
    assert added.status == 0
    assert (chosen / "models.json").exists()
    assert not (box.folder / "data").exists()


@side_by_side
def test_reader_that_goes_away_is_no_error(box: Box) -> None:
    run = box.start("config", "show")
    assert run.stdout is not None
    run.stdout.close()
    run.stdout = None
    assert finish(run).stderr == ""
