"""Names of models on a hub, and which of a repository's files a model needs."""

import pytest

from freight.core.hubfiles import HubId, choose, missing_parts, parse_hub_id
from freight.errors import UserError


def chosen(names: str, file: str = "") -> str:
    return " ".join(choose(HubId("org/net", file), names.split()))


@pytest.mark.parametrize(
    ("typed", "repo", "file"),
    [
        ("Qwen/Qwen3-4B-GGUF:*Q4_K_M*", "Qwen/Qwen3-4B-GGUF", "*Q4_K_M*"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", ""),
        ("a/b:x/y:z.gguf", "a/b", "x/y:z.gguf"),
    ],
)
def test_name_has_a_repository_and_perhaps_a_file(typed: str, repo: str, file: str) -> None:
    assert parse_hub_id(typed) == HubId(repo, file)
    assert str(parse_hub_id(typed)) == typed


@pytest.mark.parametrize(
    "typed", ["", "net", "a/", "/b", "a/b/c", "a/b:", "./b", "a/..", "a/b--c", "a b/c", "a/b\n", "-a/b"]
)
def test_what_is_no_name_is_refused(typed: str) -> None:
    with pytest.raises(UserError):
        parse_hub_id(typed)


@pytest.mark.parametrize(
    ("names", "needed"),
    [
        # The weights once: safetensors before .bin, and not in formats of other programs.
        (
            "config.json model.safetensors pytorch_model.bin tf_model.h5 flax_model.msgpack model.onnx net.gguf",
            "config.json model.safetensors",
        ),
        (
            "config.json m-00001-of-00002.safetensors m-00002-of-00002.safetensors model.safetensors.index.json "
            "pytorch_model.bin.index.json consolidated.safetensors",
            "config.json m-00001-of-00002.safetensors m-00002-of-00002.safetensors model.safetensors.index.json",
        ),
        ("config.json pytorch_model.bin training_args.bin optimizer.bin", "config.json pytorch_model.bin"),
        ("params.json consolidated.safetensors tekken.json", "consolidated.safetensors params.json tekken.json"),
        # Tokenizer, templates and code; no pictures and no history.
        (
            "README.md .gitattributes LICENSE logo.png config.json model.safetensors tokenizer.model merges.txt "
            "chat_template.jinja modeling_net.py net.tiktoken",
            "chat_template.jinja config.json merges.txt model.safetensors modeling_net.py net.tiktoken tokenizer.model",
        ),
        # Parts of the model lie in folders; copies do too.
        (
            "config.json model.safetensors 1_Pooling/config.json 2_Dense/model.safetensors 2_Dense/pytorch_model.bin "
            "original/consolidated.safetensors onnx/config.json metal/model.bin checkpoint-10/model.safetensors",
            "1_Pooling/config.json 2_Dense/model.safetensors config.json model.safetensors",
        ),
    ],
)
def test_whole_model_is_what_an_engine_reads(names: str, needed: str) -> None:
    assert chosen(names) == needed


def test_file_is_found_by_name_by_pattern_and_whatever_the_case() -> None:
    names = "a.gguf b/c-Q4_K_M.gguf b/c-Q4_K_M.gguf.md5 config.json"
    assert chosen(names, "a.gguf") == "a.gguf"
    assert chosen(names, "*Q4_K_M*") == "b/c-Q4_K_M.gguf"
    assert chosen(names, "*q4_k_m*") == "b/c-Q4_K_M.gguf"
    assert chosen(names, "config*") == "config.json"


def test_set_of_files_comes_whole_by_any_of_its_names() -> None:
    names = "x-Q4-00002-of-00002.gguf x-Q4-00001-of-00002.gguf x-Q8-00001-of-00002.gguf x-Q8-00002-of-00002.gguf"
    both = "x-Q4-00001-of-00002.gguf x-Q4-00002-of-00002.gguf"
    assert chosen(names, "*Q4*") == both
    assert chosen(names, "x-Q4-00002-of-00002.gguf") == both
    assert chosen(names, "*Q4-00002*") == both


@pytest.mark.parametrize(
    ("names", "file", "words", "hint"),
    [
        ("a-Q4.gguf b-Q4.gguf", "*Q4*", "2 files", "a-Q4.gguf, b-Q4.gguf"),
        ("a-Q4.gguf b.txt", "Q4", "no file 'Q4'", "these have it in their names: a-Q4.gguf"),
        ("a-Q4.gguf b.txt", "*Q8*", "no file '*Q8*'", "it has: a-Q4.gguf"),
        ("a.gguf b.gguf", "", "GGUF files alone", "org/net:FILE: a.gguf, b.gguf"),
        ("README.md model.pth", "", "no weights", "README.md, model.pth"),
        ("", "", "no weights", "no files"),
        (" ".join(f"{n:02d}.txt" for n in range(11)), "x", "no file 'x'", "07.txt, and 3 more"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_there_is(names: str, file: str, words: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        chosen(names, file)
    assert words in refused.value.message
    assert hint in (refused.value.hint or "")


def test_missing_parts_follow_from_the_names() -> None:
    assert missing_parts(["a-00001-of-00003.gguf", "a-00003-of-00003.gguf", "b.gguf"]) == ["a-00002-of-00003.gguf"]
    assert missing_parts(["a-00001-of-00001.gguf", "config.json"]) == []
