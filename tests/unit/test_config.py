"""Settings: what there is, where each comes from, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.config import (
    SETTINGS,
    VARIABLES,
    Config,
    PathGrant,
    Pool,
    config_file,
    data_folder,
    load_config,
)
from freight.control.lastgood import LastGood
from freight.core.model import EngineName, ModelEntry
from freight.errors import UserError
from freight.parsing import parse_duration, parse_size
from tests.harness import CASES

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a configuration file with this content, and environment variables."""

    def loaded(toml: str = "", registry: dict[str, ModelEntry] | None = None, **environment: str) -> Config:
        (tmp_path / "config.toml").write_text(toml)
        return load_config(registry or {}, {}, {"FREIGHT_CONFIG": str(tmp_path / "config.toml"), **environment})

    return loaded


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("90s", 90), ("15m", 900), ("12h", 43200), ("1h30m", 5400), ("1.5h", 5400), ("30d", 2592000), ("2w", 1209600),
        ("500ms", 0.5), ("0s", 0), (0, 0), (5, 5), (2.5, 2.5), (" 90s ", 90),
    ],
)  # fmt: skip
def test_durations(value: Any, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "90", "s", "-1s", "1x", "1h 30m", "1S", "h1", "1h30", "1..5h", "1e3s", "inf", "nan", "forever",
        -1, -0.5, float("nan"), float("inf"), True, None, [], {},
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(value)


def test_who_writes_no_duration_is_shown_days_too() -> None:
    with pytest.raises(ValueError, match=r"such as 90s, 15m, 12h, 1h30m or 30d"):
        parse_duration("tomorrow")


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_durations_of_several_units_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("10MB", 10_000_000), ("64KiB", 65536), ("1GiB", 1 << 30), ("1.5GB", 1_500_000_000), ("10 mb", 10_000_000),
        ("7", 7), ("7B", 7), (7, 7), ("0", 0), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_sizes(value: Any, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize("value", ["", "MB", "-1", "10M", "1e3", "10 000", "ten", -1, True, None, [], "10MBs", "nan"])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(value)


# What users were promised, setting by setting.
EXAMPLE = (CASES / "config.toml").read_text(encoding="utf-8")


def test_the_documented_example_loads(load: Load) -> None:
    config = load(EXAMPLE)

    assert config["retention"] == 30 * 86400
    assert config["server.listen"] == "127.0.0.1:8400"
    assert config["limits.record_bytes"] == 10_000_000
    assert config.paths == {
        "*": PathGrant(("/data/public",), ()),
        "alice": PathGrant(("/data/genomes",), ("/data/genomes/out",)),
    }
    assert config.pools["local"] == Pool(None, 0.0, "local", {})
    assert config.pools["local"].written()["devices"] == "auto"
    assert config.pools["sophia"].provider == "slurm"
    assert config.pools["sophia"].options == {"partition": "gpu", "walltime": "04:00:00", "max_workers": 8}
    assert config.models["llama-8b"].aliases == ["gpt-4o-mini"]
    assert config.models["lab"].sources() == ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]
    assert {entry.engine for entry in config.models.values()} == set(EngineName) - {EngineName.SGLANG}


@pytest.mark.parametrize("toml", ["", "# nothing\n", "[limits]\n", "[pools]\n[models]\n[paths]\n"])
def test_everything_has_a_default_and_an_empty_file_is_fine(load: Load, toml: str) -> None:
    config = load(toml)

    assert config.values == {setting.key: setting.default for setting in SETTINGS}
    assert set(config.origins.values()) == {"default"}


def test_the_defaults_are_those_that_users_were_told(load: Load) -> None:
    config = load()

    assert (config["retention"], config["server.listen"]) == (None, "")
    assert (config["limits.records"], config["limits.record_bytes"]) == (150_000, 10_000_000)
    assert config["engines.stall"] == 300
    assert config["engines.suspend_after"] == 900
    assert config["openai.enforce_window"] is False


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = [setting.variable() for setting in SETTINGS]

    assert len(set(variables)) == len(SETTINGS)
    assert not set(variables) & set(VARIABLES)
    assert all(setting.variable() == f"FREIGHT_{setting.key.replace('.', '_').upper()}" for setting in SETTINGS)


VALUES = {
    "retention": "2d", "default_model": "m", "server.listen": "h:1", "limits.records": "7",
    "limits.record_bytes": "1KB", "limits.file_bytes": "1GB", "limits.active_jobs": "3", "media.hosts": "a, b",
    "limits.stored_bytes": "1KB", "limits.requests": "9", "oidc.issuer": "https://login.example.org",
    "oidc.audience": "a", "oidc.user_claim": "b", "oidc.groups_claim": "c", "oidc.admin_group": "d",
    "openai.enforce_window": "true", "server.hosts": "a, b", "server.tls_cert": "/a.pem", "server.tls_key": "/a.key",
    "facility.output_mode": "0660", "webhooks.hosts": "a, http://b:9=10.0.0.0/8", "webhooks.secret_file": "/etc/secret",
    "server.max_connections": "9", "server.max_peer_connections": "3", "server.max_body": "1KB",
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_can_be_set_by_its_variable_which_beats_the_file(load: Load, setting: Any) -> None:
    text = VALUES.get(setting.key, "77s")
    section, _, key = setting.key.rpartition(".")
    table = f"[{section}]\n" if section else ""
    written = text if (text.isdigit() and text[0] != "0") or text == "true" else f'"{text}"'

    by_file = load(f"{table}{key} = {written}\n")
    by_variable = load(f"{table}{key} = {written}\n", **{setting.variable(): VALUES.get(setting.key, "78s")})

    assert by_file[setting.key] != setting.default
    assert by_file.origins[setting.key].endswith("config.toml")
    assert by_variable.origins[setting.key] == setting.variable()
    if setting.key not in VALUES:
        assert (by_file[setting.key], by_variable[setting.key]) == (77.0, 78.0)


def test_retention_may_be_for_ever(load: Load) -> None:
    assert load('retention = "1d"', FREIGHT_RETENTION="keep")["retention"] is None


def test_a_model_of_the_file_beats_one_of_the_registry(load: Load) -> None:
    registry = {"a": ModelEntry(EngineName.VLLM, "registered"), "b": ModelEntry(EngineName.VLLM, "registered")}

    config = load('[models.a]\nengine = "vllm"\nsource = "file"', registry)

    assert config.models["a"].source == "file"
    assert config.models["b"].source == "registered"
    assert config.origins["models.a"].endswith("config.toml")
    assert config.origins["models.b"] == "registry"


NO_FOLDERS = ("data", "~/data", "", "/data/../etc", r"/da\tta", r"/da\u0000ta")


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("colour = 1", "colour"),
        ("server = 1", "server"),
        ("[server]\nport = 1", "server.port"),
        ("[sever]\nlisten = 'x'", "sever.listen"),
        ("[sever]\n", "sever"),
        ("retention = 'never'", "retention"),
        ("retention = nan", "retention"),
        ("retention = {}", "retention"),
        ("[limits]\nrecords = 'many'", "limits.records"),
        ("[limits]\nrecords = 0", "limits.records"),
        ("[limits]\nrecords = true", "limits.records"),
        ("[limits.records]\nx = 1", "limits.records"),
        ("[limits]\nrecord_bytes = '10 apples'", "limits.record_bytes"),
        ("[limits]\nrecord_bytes = '2GB'", "limits.record_bytes"),
        ("[limits]\nfile_bytes = -1", "limits.file_bytes"),
        ("[media]\nhosts = [1]", "media.hosts"),
        ("[server]\nlisten = 8400", "server.listen"),
        ("[server]\nlisten = '8400'", "server.listen"),
        ("[server]\ntls_cert = 'own.pem'", "server.tls_cert"),
        ("[server]\nmax_connections = 0", "server.max_connections"),
        ("[server]\nheader_timeout = '0s'", "server.header_timeout"),
        ("[openai]\nenforce_window = 'maybe'", "openai.enforce_window"),
        ("[models.a]\nengine = 'vlm'", "models.a.engine"),
        ("[models.a]\nengine = 'vllm'\ngpu = 1", "models.a.gpu"),
        ("[models.a]\nengine = 'vllm'\ngpus = '1'", "models.a.gpus"),
        ("[models.a]\nengine = 'vllm'\naliases = 'x'", "models.a.aliases"),
        ("[models.a]\nsource = 'x'", "models.a"),
        ("[models]\na = 1", "models.a"),
        ("models = 1", "models"),
        ("[models.'a b']\nengine = 'vllm'", "models.a b"),
        ("[pools.local]\nkeep_warm = 'long'", "pools.local.keep_warm"),
        ("[pools.local]\ndevices = 1", "pools.local.devices"),
        ("[pools.local]\ndevice = 'auto'", "pools.local.device"),
        ("[pools.x]\nprovider = 1", "pools.x.provider"),
        ("[pools]\nlocal = 'auto'", "pools.local"),
        ("[paths.alice]\nread = 1", "paths.alice.read"),
        ("[paths.alice]\nwrite = [1]", "paths.alice.write"),
        ("[paths.alice]\nexecute = []", "paths.alice.execute"),
        ("[paths]\nalice = ['/data']", "paths.alice"),
        *((f'[paths.dan]\nwrite = ["{folder}"]', "paths.dan.write") for folder in NO_FOLDERS),
    ],
)
def test_an_unknown_key_or_bad_value_is_named_by_file_and_dotted_key(load: Load, toml: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        load(toml)

    assert "config.toml" in caught.value.message
    assert key in caught.value.message


ALIASED = '[models.{0}]\nengine = "vllm"\naliases = ["{1}"]\n'


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (
            ALIASED.format("a", "b") + ALIASED.format("b", "x"),
            r"models\.a\.aliases has 'b', .* the name of another",
        ),
        (
            ALIASED.format("b", "x") + ALIASED.format("a", "x"),
            r"models\.a\.aliases has 'x', .* of model b, too",
        ),
        (ALIASED.format("b", "old"), r"models\.b\.aliases has 'old', .* the name of another"),
    ],
)
def test_an_alias_stands_for_one_model_alone(load: Load, toml: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(toml, {"old": ModelEntry(EngineName.VLLM)})


def test_a_model_may_repeat_its_own_name_and_aliases(load: Load) -> None:
    config = load('[models.a]\nengine = "vllm"\naliases = ["a", "b", "b"]')
    assert config.models["a"].aliases == ["a", "b", "b"]


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("batch = 'yes'", "models.a.batch takes true or false"),
        ("gpus = -1", "models.a.gpus takes a whole number, >= 0"),
        ("aliases = [1]", "models.a.aliases[0] takes a text"),
        ("source = 1", "models.a.source takes a text or a list of texts"),
        ("env = ['x']", "models.a.env takes a table of texts"),
    ],
)
def test_the_hint_about_a_models_key_says_what_it_takes(load: Load, entry: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load(f"[models.a]\nengine = 'vllm'\n{entry}")
    assert caught.value.hint == hint


def test_a_running_service_keeps_the_last_good_settings_and_tells_of_each_problem_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    settings = LastGood(lambda: load_config({}, {}, {"FREIGHT_CONFIG": str(file)}))
    caplog.set_level("INFO", "freight.service")
    seen: list[int] = []
    for value in ("7", "", "", "0", "8"):
        file.write_text(f"limits.records = {value}")
        seen.append(settings()["limits.records"])

    assert seen == [7, 7, 7, 7, 8]
    bad, worse, over = caplog.messages
    assert f"{file} is not valid TOML" in bad
    assert f"{file}: limits.records is 0" in worse
    assert over == "the settings are good again, and in force"


def test_settings_that_were_never_good_are_refused(load: Load) -> None:
    with pytest.raises(UserError, match="colour"):
        LastGood(lambda: load("colour = 1"))


@pytest.mark.parametrize("toml", ["retention", "a = 1\na = 2", "[x"])
def test_what_is_no_toml_is_named_by_its_file(load: Load, toml: str) -> None:
    with pytest.raises(UserError, match=r"config\.toml is not valid TOML"):
        load(toml)


def test_a_bad_variable_is_named(load: Load) -> None:
    with pytest.raises(UserError, match="FREIGHT_LIMITS_RECORDS"):
        load(FREIGHT_LIMITS_RECORDS="many")
    with pytest.raises(UserError, match=r"FREIGHT_LIMITS_RECORD\b"):
        load(FREIGHT_LIMITS_RECORD="1")


def test_variables_that_are_not_settings_are_left_alone(load: Load) -> None:
    config = load(**dict.fromkeys(set(VARIABLES) - {"FREIGHT_CONFIG"}, "x"), FREIGHT_ENDPOINT_API_KEY="k", HOME="/")

    assert set(config.origins.values()) == {"default"}


def test_a_configuration_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="FREIGHT_CONFIG"):
        config_file({"FREIGHT_CONFIG": str(tmp_path / "missing.toml")})


def test_the_data_folder_can_be_chosen() -> None:
    assert data_folder({"FREIGHT_DATA": "/srv/freight"}) == Path("/srv/freight")
    assert data_folder({}).is_absolute()
