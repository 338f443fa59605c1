"""Finding models that were fetched before, without a network."""

import json
from pathlib import Path

import pytest

from freight.store.hub import Pull, find_model, is_commit, models_folder, note_pull, read_pulls, repo_folder

A, B = "a" * 40, "b" * 40


class Cache:
    """A repository's folder in a hub cache, as the hub's library lays it out."""

    def __init__(self, folder: Path, repo: str = "org/net") -> None:
        self.folder = repo_folder(folder, repo)

    def put(self, commit: str, *names: str, main: bool = True, text: str = "x") -> Path:
        """Add files to a commit, as links to contents."""
        snapshot = self.folder / "snapshots" / commit
        for name in names:
            blob = self.folder / "blobs" / f"{commit[:4]}{name.replace('/', '-')}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(text)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(blob)
        if main:
            (self.folder / "refs").mkdir(exist_ok=True)
            (self.folder / "refs" / "main").write_text(commit)
        return snapshot

    def note(self, commit: str, *names: str, file: str = "") -> None:
        """Record a pull."""
        note_pull(self.folder, Pull("org/net", file, "main", commit, dict.fromkeys(names, 1), "2026-01-01T00:00:00Z"))


@pytest.fixture
def own(tmp_path: Path) -> Cache:
    """Freight's own cache."""
    return Cache(models_folder(tmp_path / "data"))


@pytest.fixture
def users(tmp_path: Path) -> Cache:
    """The user's cache."""
    return Cache(tmp_path / "hf" / "hub")


def find(tmp_path: Path, hub_id: str = "org/net", **environment: str) -> Path | None:
    return find_model(tmp_path / "data", hub_id, environment or {"HF_HOME": str(tmp_path / "hf")})


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path, "no name") is None
    assert find(tmp_path, "org/net:*.gguf") is None


def test_latest_pull_is_found_and_one_that_lost_a_file_is_not(tmp_path: Path, own: Cache) -> None:
    first, second = own.put(A, "config.json", "model.safetensors"), own.put(B, "config.json", "model.safetensors")
    own.note(A, "config.json", "model.safetensors")
    own.note(B, "config.json", "model.safetensors")
    assert find(tmp_path) == second
    (own.folder / "blobs" / "bbbbmodel.safetensors").unlink()
    assert find(tmp_path) == first
    (own.folder / "blobs" / "aaaamodel.safetensors").write_text("longer")
    assert find(tmp_path) is None


def test_pull_that_was_not_finished_is_not_found(tmp_path: Path, own: Cache) -> None:
    own.put(A, "config.json", "model.safetensors")
    assert find(tmp_path) is None


def test_file_is_found_in_what_was_pulled_for_it_and_in_more(tmp_path: Path, own: Cache) -> None:
    snapshot = own.put(A, "net-Q4.gguf", "q/net-Q8-00001-of-00002.gguf", "q/net-Q8-00002-of-00002.gguf")
    own.note(A, "net-Q4.gguf", file="*Q4*")
    own.note(A, "q/net-Q8-00001-of-00002.gguf", "q/net-Q8-00002-of-00002.gguf", file="*Q8*")
    for typed in ("*Q4*", "net-Q4.gguf", "*q4.gguf"):
        assert find(tmp_path, f"org/net:{typed}") == snapshot / "net-Q4.gguf"
    assert find(tmp_path, "org/net:*Q8*") == snapshot / "q/net-Q8-00001-of-00002.gguf"
    assert find(tmp_path, "org/net:*Q5*") is None
    # A file is not the model.
    assert find(tmp_path) is None


def test_same_pull_again_takes_the_place_of_the_first(own: Cache) -> None:
    own.put(A, "a")
    own.note(A, "a", file="a")
    own.note(B, "b")
    own.note(A, "a", file="a")
    assert [(pull.commit, pull.file) for pull in read_pulls(own.folder)] == [(A, "a"), (B, "")]


def test_damaged_record_counts_as_none(tmp_path: Path, own: Cache) -> None:
    own.put(A, "config.json", "model.safetensors")
    own.note(A, "config.json", "model.safetensors")
    (own.folder / "freight.json").write_text("[{")
    assert read_pulls(own.folder) == []
    assert find(tmp_path) is None


def test_own_pull_comes_before_the_users_cache(tmp_path: Path, own: Cache, users: Cache) -> None:
    theirs = users.put(B, "config.json", "model.safetensors")
    assert find(tmp_path) == theirs
    ours = own.put(A, "config.json", "model.safetensors")
    own.note(A, "config.json", "model.safetensors")
    assert find(tmp_path) == ours


def test_users_cache_is_found_as_its_library_finds_it(tmp_path: Path) -> None:
    hub = str(tmp_path / "elsewhere")
    snapshot = Cache(tmp_path / "elsewhere").put(A, "config.json", "model.safetensors")
    assert find(tmp_path, HF_HUB_CACHE=hub) == snapshot
    assert find(tmp_path, HUGGINGFACE_HUB_CACHE=hub) == snapshot
    in_home = Cache(tmp_path / "cache" / "huggingface" / "hub").put(A, "config.json", "model.safetensors")
    assert find(tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) == in_home


def test_commit_of_main_comes_first(tmp_path: Path, users: Cache) -> None:
    old = users.put(A, "config.json", "model.safetensors")
    users.put(B, "config.json", "model.safetensors", main=False)
    assert find(tmp_path) == old


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors"])
def test_snapshot_of_the_user_that_is_not_whole_is_not_found(tmp_path: Path, users: Cache, missing: str) -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    users.put(A, *(name for name in names if name != missing))
    assert find(tmp_path) is None
    users.put(A, missing)
    assert find(tmp_path) is not None


def test_link_without_its_content_does_not_count(tmp_path: Path, users: Cache) -> None:
    snapshot = users.put(A, "config.json", "model.safetensors")
    (snapshot / "model.safetensors").resolve().unlink()
    assert find(tmp_path) is None


def test_index_of_the_weights_says_what_is_missing(tmp_path: Path, users: Cache) -> None:
    snapshot = users.put(A, "config.json", "one.safetensors")
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find(tmp_path) is None
    users.put(A, "two.safetensors")
    assert find(tmp_path) == snapshot


def test_listing_of_the_library_says_what_is_missing(tmp_path: Path, users: Cache) -> None:
    snapshot = users.put(A, "config.json", "model.safetensors")
    files = {name: {} for name in ("config.json", "model.safetensors", "tokenizer.json")}
    listing = {"format_version": 1, "files": files}
    (users.folder / "trees").mkdir()
    (users.folder / "trees" / f"{A}.json").write_text(json.dumps(listing))
    assert find(tmp_path) is None
    users.put(A, "tokenizer.json")
    assert find(tmp_path) == snapshot


def test_file_is_found_in_the_users_cache_with_all_its_parts(tmp_path: Path, users: Cache) -> None:
    snapshot = users.put(A, "net-Q4.gguf", "net-Q8-00001-of-00002.gguf")
    assert find(tmp_path, "org/net:net-Q4.gguf") == snapshot / "net-Q4.gguf"
    assert find(tmp_path, "org/net:*Q8*") is None
    users.put(A, "net-Q8-00002-of-00002.gguf")
    assert find(tmp_path, "org/net:*Q8*") == snapshot / "net-Q8-00001-of-00002.gguf"


def test_commit_is_told_from_a_branch() -> None:
    assert is_commit(A)
    assert not any(map(is_commit, ("main", A[:39], A.upper())))
