"""The command lines of vLLM, SGLang and llama-server: ours, the user's, and what each start chooses."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.core.record import Endpoint
from freight.engines.base import EngineLoad, Place, ServerCommand
from freight.engines.registry import engine_of
from freight.engines.sglang import SglangEngine
from freight.engines.vllm import VllmEngine
from freight.errors import UserError
from tests.unit.installations import SGLANG_NOW, VLLM_NOW, VLLM_OLD, environment, executable

Start = Callable[..., ServerCommand]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings of whoever runs the tests."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def model(engine: EngineName, **entry: object) -> ModelSpec:
    made = ModelEntry(engine=engine, **entry)  # pyright: ignore[reportArgumentType]
    return ModelSpec("m", made, "m", frozenset({"m"}), "m", frozenset(), {})


@pytest.fixture
def start(tmp_path: Path, checkpoint: Path) -> Start:
    """Return the command of a model's server; the place may be set."""

    def make(spec: ModelSpec, **place: object) -> ServerCommand:
        folder = tmp_path / "worker"
        folder.mkdir(exist_ok=True)
        values = {"source": str(checkpoint), "endpoints": frozenset({Endpoint.CHAT}), "concurrency": 0, **place}
        made = engine_of(spec.entry.engine).command(spec, Place(folder, **values))  # type: ignore[arg-type]
        assert made is not None
        return made

    return make


def value(argv: list[str], option: str) -> str:
    """Return the value behind an option that must be there once."""
    assert argv.count(option) == 1
    return argv[argv.index(option) + 1]


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """A current vLLM in a virtual environment."""
    return str(environment(tmp_path / "vllm", "vllm", VLLM_NOW, "vllm"))


def test_vllm_listens_on_a_socket_and_does_what_batch_work_wants(tmp_path: Path, vllm: str, start: Start) -> None:
    made = start(model(EngineName.VLLM, executable=vllm, context=8192, aliases=["gpt"]), gpus=2)

    assert made.argv[:2] == [f"{vllm}/bin/vllm", "serve"]
    assert value(made.argv, "--uds") == str(tmp_path / "worker" / "engine.sock") == made.address.socket_path
    assert "--port" not in made.argv
    assert value(made.argv, "--max-model-len") == "8192"
    assert value(made.argv, "--tensor-parallel-size") == "2"
    assert value(made.argv, "--max-num-seqs") == "256"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"} < {*made.argv}
    assert "--no-enable-log-requests" in made.argv
    names = made.argv[made.argv.index("--served-model-name") + 1 :]
    assert names[:2] == ["m", "gpt"]
    assert made.env["HF_HUB_OFFLINE"] == made.env["VLLM_NO_USAGE_STATS"] == "1"
    assert made.env["PATH"].startswith(f"{vllm}/bin{os.pathsep}")
    assert "VLLM_CPU_KVCACHE_SPACE" not in made.env


def test_vllm_on_the_cpu_gets_some_memory_for_its_cache(
    vllm: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = model(EngineName.VLLM, executable=vllm)
    assert start(spec).env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    own = start(model(EngineName.VLLM, executable=vllm, env={"VLLM_CPU_KVCACHE_SPACE": "9"}))
    assert own.env["VLLM_CPU_KVCACHE_SPACE"] == "9"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert "VLLM_CPU_KVCACHE_SPACE" not in start(spec).env


def test_vllm_fetches_media_from_named_hosts_alone(vllm: str, start: Start) -> None:
    spec = model(EngineName.VLLM, executable=vllm)
    made = start(spec)
    # An empty list would let all pass.
    assert value(made.argv, "--allowed-media-domains") == "none.invalid"
    assert made.env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    argv = start(spec, media_hosts=("a.org", "b.org")).argv
    at = argv.index("--allowed-media-domains")
    assert argv[at + 1 : at + 3] == ["a.org", "b.org"]


@pytest.mark.parametrize("engine", [EngineName.VLLM, EngineName.SGLANG])
def test_each_start_has_a_key_that_no_argument_shows(tmp_path: Path, start: Start, engine: EngineName) -> None:
    sources = VLLM_NOW if engine is EngineName.VLLM else SGLANG_NOW
    folder = environment(tmp_path / "venv", engine.value, sources, "vllm")
    made = [start(model(engine, executable=str(folder))) for _ in range(2)]

    keys = [command.address.api_key for command in made]
    assert all(keys)
    assert keys[0] != keys[1]
    for command, key in zip(made, keys, strict=True):
        assert key
        assert not any(key in word for word in command.argv)
        assert key not in repr(command.address)


def test_sglang_reads_its_key_from_a_file_of_this_user_alone(tmp_path: Path, start: Start) -> None:
    folder = environment(tmp_path / "venv", "sglang", SGLANG_NOW)
    made = start(model(EngineName.SGLANG, executable=str(folder), context=4096), gpus=2)

    config = Path(value(made.argv, "--config"))
    assert config.suffix == ".yaml"
    assert config.read_text() == f'api-key: "{made.address.api_key}"\n'
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert made.argv[:3] == [f"{folder}/bin/python", "-m", "sglang.launch_server"]
    assert value(made.argv, "--host") == "127.0.0.1"
    assert made.address.url == f"http://127.0.0.1:{value(made.argv, '--port')}"
    assert (value(made.argv, "--tp-size"), value(made.argv, "--context-length")) == ("2", "4096")
    assert (value(made.argv, "--served-model-name"), value(made.argv, "--max-running-requests")) == ("m", "256")
    assert {"--enable-metrics", "--enable-cache-report", "--allowed-media-domains"} < {*made.argv}
    assert "--device" not in made.argv
    assert value(start(model(EngineName.SGLANG, executable=str(folder))).argv, "--device") == "cpu"


def test_options_that_an_older_version_lacks_are_left_out(tmp_path: Path, start: Start) -> None:
    folder = environment(tmp_path / "old", "vllm", VLLM_OLD, "vllm")
    made = start(model(EngineName.VLLM, executable=str(folder)))

    assert made.address.socket_path is None
    assert made.address.url == f"http://127.0.0.1:{value(made.argv, '--port')}"
    assert "--uds" not in made.argv
    assert "--allowed-media-domains" not in made.argv
    assert "--disable-log-requests" in made.argv
    sglang = environment(tmp_path / "sglang", "sglang", {"srt/server_args.py": ""})
    assert "--allowed-media-domains" not in start(model(EngineName.SGLANG, executable=str(sglang))).argv


def test_a_program_around_vllm_of_which_nothing_is_known_gets_a_port(tmp_path: Path, start: Start) -> None:
    wrapper = executable(tmp_path / "my-vllm")
    made = start(model(EngineName.VLLM, executable=str(wrapper)))

    assert made.argv[:2] == [str(wrapper), "serve"]
    assert (made.address.socket_path, "--uds" in made.argv) == (None, False)
    assert "--allowed-media-domains" in made.argv


@pytest.mark.parametrize(
    ("args", "option", "expected"),
    [
        (["--max-num-seqs", "64"], "--max-num-seqs", 64),
        (["--max-num-seqs=64"], "--max-num-seqs=64", 64),
        (["--max_num_seqs", "1k"], "--max_num_seqs", 1000),
        (["--max-num-seqs", "8", "--max-num-seqs", "16"], "--max-num-seqs", 16),
        ([], "--max-num-seqs", 256),
    ],
)
def test_the_users_number_of_sequences_beats_ours(
    vllm: str, start: Start, args: list[str], option: str, expected: int
) -> None:
    spec = model(EngineName.VLLM, executable=vllm, args=args)
    argv = start(spec).argv

    assert VllmEngine().slots(spec, 0) == expected
    assert option in argv
    assert sum("max-num-seqs" in word or "max_num_seqs" in word for word in argv) == max(1, len(args) // 2 or len(args))


def test_no_option_of_ours_stands_beside_one_of_the_users(vllm: str, start: Start) -> None:
    args = ["--no-enable-prefix-caching", "-tp", "2", "--max-model-len=100", "--enable-log-requests"]
    args += ["--allowed-media-domains", "own.org", "--served-model-name", "mine", "-O3"]
    argv = start(model(EngineName.VLLM, executable=vllm, args=args, context=50), gpus=2).argv

    assert argv[-len(args) :] == args
    ours = argv[: -len(args)]
    for option in ("prefix-caching", "tensor-parallel", "max-model-len", "log-requests", "media-domains", "served"):
        assert not any(option in word for word in ours), option


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        (EngineName.VLLM, ["--tensor-parallel-size", "4"]),
        (EngineName.VLLM, ["-tp=2", "-pp", "2"]),
        (EngineName.SGLANG, ["--tp", "4"]),
    ],
)
def test_arguments_that_need_more_gpus_than_a_worker_gets_are_refused(
    tmp_path: Path, engine: EngineName, args: list[str]
) -> None:
    folder = environment(tmp_path / "venv", engine.value, {"x.py": ""}, "vllm")
    spec = model(engine, executable=str(folder), args=args)
    with pytest.raises(UserError, match=r"need 4 GPUs per worker, and it gets 2"):
        engine_of(engine).check(spec, 2)
    engine_of(engine).check(spec, 4)


def test_vllm_is_found_by_its_folder_its_file_its_python_and_on_the_path(
    vllm: str, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "bin" / "vllm"
    link.parent.mkdir()
    link.symlink_to(f"{vllm}/bin/vllm")
    module = [f"{vllm}/bin/python", "-m", "vllm.entrypoints.cli.main"]
    for named, words in {vllm: [f"{vllm}/bin/vllm"], f"{vllm}/bin/vllm": [f"{vllm}/bin/vllm"],
                         f"{vllm}/bin/python": module, str(link): [str(link)]}.items():  # fmt: skip
        made = start(model(EngineName.VLLM, executable=named))
        assert made.argv[: len(words) + 1] == [*words, "serve"]
        assert made.address.socket_path, "what the version can do is found through all of them"
    monkeypatch.setenv("PATH", str(link.parent))
    assert start(model(EngineName.VLLM)).argv[0] == str(link)


@pytest.mark.parametrize("engine", [EngineName.VLLM, EngineName.SGLANG])
def test_an_engine_that_is_not_installed_is_named_with_the_fix(
    engine: EngineName, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="is not there") as caught:
        engine_of(engine).check(model(engine), 0)
    assert "--executable" in (caught.value.hint or "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "data").write_text("")
    for named in ("empty", "data", "missing"):
        with pytest.raises(UserError, match=named):
            engine_of(engine).check(model(engine, executable=str(tmp_path / named)), 0)


def test_xllamacpp_on_a_gpu_is_refused_and_on_the_cpu_is_not() -> None:
    engine = engine_of(EngineName.LLAMACPP)
    engine.check(model(EngineName.LLAMACPP), 0)
    with pytest.raises(UserError, match="no GPU backend") as caught:
        engine.check(model(EngineName.LLAMACPP), 1)
    assert "llama-server" in (caught.value.hint or "")
    assert "gpus = 0" in (caught.value.hint or "")


HELP = "--ctx-size --no-kv-unified --cache-ram --no-cache-prompt --no-webui --offline"


def llama_server(path: Path, text: str = HELP) -> str:
    return str(executable(path, f"#!/bin/sh\necho '{text}'\n"))


def gguf(path: Path) -> str:
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    return str(path)


def test_llama_server_gets_what_llamacpp_has_in_a_worker(tmp_path: Path, start: Start) -> None:
    named = llama_server(tmp_path / "llama-server")
    spec = model(EngineName.LLAMACPP, executable=named, context=1000, env={"A": "b"})
    made = start(spec, source=gguf(tmp_path / "m.gguf"), gpus=1, concurrency=3)

    assert made.argv[0] == named
    assert value(made.argv, "--host").endswith("/engine.sock")
    assert (value(made.argv, "--parallel"), value(made.argv, "--ctx-size")) == ("3", "3000")
    assert (value(made.argv, "--gpu-layers"), value(made.argv, "--cache-ram")) == ("999", "0")
    assert {"--metrics", "--no-kv-unified", "--no-cache-prompt", "--no-webui", "--offline"} < {*made.argv}
    assert (made.env, made.address.api_key) == ({"A": "b"}, None)
    cached = start(model(EngineName.LLAMACPP, executable=named, prompt_cache=True), source=str(tmp_path / "m.gguf"))
    assert ("--cache-prompt" in cached.argv, "--gpu-layers" in cached.argv) == (True, False)


def test_llama_server_takes_the_users_arguments_before_ours(tmp_path: Path, start: Start) -> None:
    args = ["-np", "2", "-c", "512", "-ngl", "10", "--kv-unified"]
    spec = model(EngineName.LLAMACPP, executable=llama_server(tmp_path / "llama-server"), args=args)
    argv = start(spec, source=gguf(tmp_path / "m.gguf"), gpus=1).argv

    assert argv[-len(args) :] == args
    assert not {"--parallel", "--ctx-size", "--gpu-layers", "--no-kv-unified"} & {*argv}
    assert engine_of(EngineName.LLAMACPP).slots(spec, 7) == 2


def test_llama_server_is_asked_what_it_can_do(tmp_path: Path, start: Start) -> None:
    old = llama_server(tmp_path / "old", "--ctx-size")
    argv = start(model(EngineName.LLAMACPP, executable=old), source=gguf(tmp_path / "m.gguf")).argv
    assert not {"--no-kv-unified", "--cache-ram", "--no-cache-prompt", "--no-webui", "--offline"} & {*argv}
    other = llama_server(tmp_path / "other", "hello")
    with pytest.raises(UserError, match="is no llama-server: hello"):
        start(model(EngineName.LLAMACPP, executable=other), source=str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [(Endpoint.EMBEDDINGS, {"--embeddings", "--pooling"}), (Endpoint.RERANK, {"--reranking"}), (Endpoint.CHAT, set())],
)
def test_llama_server_is_set_up_for_what_the_job_asks(
    tmp_path: Path, start: Start, endpoint: Endpoint, options: set[str]
) -> None:
    spec = model(EngineName.LLAMACPP, executable=llama_server(tmp_path / "llama-server"))
    argv = start(spec, source=gguf(tmp_path / "m.gguf"), endpoints=frozenset({endpoint})).argv

    assert {"--embeddings", "--pooling", "--reranking"} & {*argv} == options


VLLM_METRICS = """\
vllm:num_requests_running{engine="0",model_name="tiny"} 12.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:generation_tokens_total{engine="0",model_name="tiny"} 30.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 352.0
"""
SGLANG_METRICS = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 4.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_grammar_queue_reqs{model_name="m",tp_rank="0"} 9.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.31
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:generation_tokens_total{model_name="m"} 234.0
"""
LLAMA_METRICS = """\
llamacpp:requests_processing 3
llamacpp:requests_deferred 1
llamacpp:n_decode_total 41
"""


@pytest.mark.parametrize(
    ("engine", "metrics", "load", "tokens"),
    [
        (EngineName.VLLM, VLLM_METRICS, EngineLoad(12, 3, 0.5), 382),
        (EngineName.SGLANG, SGLANG_METRICS, EngineLoad(4, 2, 0.31), 1234),
        (EngineName.LLAMACPP, LLAMA_METRICS, EngineLoad(3, 1, None), 41),
        (EngineName.COMMAND, VLLM_METRICS, EngineLoad(12, 3, 0.5), 382),
        (EngineName.COMMAND, LLAMA_METRICS, EngineLoad(3, 1, None), None),
        (EngineName.ENDPOINT, SGLANG_METRICS, EngineLoad(4, 2, 0.31), None),
        (EngineName.VLLM, "", None, None),
    ],
)
def test_a_servers_metrics_tell_its_load_and_its_progress(
    engine: EngineName, metrics: str, load: EngineLoad | None, tokens: float | None
) -> None:
    assert engine_of(engine).load(metrics) == load
    assert engine_of(engine).tokens_made(metrics) == tokens


@pytest.mark.parametrize(
    ("metrics", "sample"),
    [
        (VLLM_METRICS, 'vllm:num_preemptions_total{engine="0"} 7.0'),
        (SGLANG_METRICS, "sglang:num_retracted_requests_total 7.0"),
    ],
)
def test_a_servers_metrics_tell_how_often_its_cache_was_too_small(metrics: str, sample: str) -> None:
    load = engine_of(EngineName.ENDPOINT).load(f"{metrics}{sample}\n")

    assert load is not None
    assert load.preemptions == 7


def test_python_servers_are_started_one_after_the_other() -> None:
    staggered = {name for name in EngineName if engine_of(name).staggers}
    assert staggered == {EngineName.VLLM, EngineName.SGLANG}


def test_what_is_shown_has_placeholders_and_writes_nothing(tmp_path: Path, start: Start, vllm: str) -> None:
    made = start(model(EngineName.VLLM, executable=vllm), shown=True)
    assert (value(made.argv, "--uds"), made.env["VLLM_API_KEY"]) == ("{socket}", "{api_key}")
    sglang = environment(tmp_path / "sglang", "sglang", SGLANG_NOW)
    made = start(model(EngineName.SGLANG, executable=str(sglang)), shown=True)
    assert (value(made.argv, "--port"), value(made.argv, "--config")) == ("{port}", "{config}")
    assert not list((tmp_path / "worker").iterdir())


def test_names_that_a_server_is_to_answer_to() -> None:
    entry = ModelEntry(engine=EngineName.VLLM, aliases=["gpt", "-x"])
    spec = ModelSpec("m", entry, "/models/m", frozenset({"m", "/models/m", "gpt", "stem"}), "m", frozenset(), {})
    assert spec.served_names() == ["m", "/models/m", "gpt", "stem"]
    served = spec.served_as(frozenset(spec.served_names()))
    assert served.model_name().fill == "m"
    assert served.model_name().keep == frozenset({"m", "/models/m", "gpt", "stem"})
    assert spec.served_as(frozenset({"m"})).model_name().keep == frozenset({"m"})
    assert json.dumps(SglangEngine().shape(spec, frozenset(), 5)) == '""'
