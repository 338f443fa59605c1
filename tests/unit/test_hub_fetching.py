"""Fetching files of a hub: what is told before any is asked for."""

from pathlib import Path

import pytest

from freight.errors import OperationError
from freight.store.fetching import Fetching, size_words
from freight.store.hubcalls import HubFile


def test_file_too_large_for_one_answer_is_refused_with_the_way_round(tmp_path: Path) -> None:
    huge = HubFile("net.gguf", 60_000_000_000, "a" * 64, "a" * 64)
    shown: list[int] = []
    with pytest.raises(OperationError) as refused:
        Fetching(tmp_path, "org/net", "b" * 40, [huge]).run(shown.append)
    assert "60.0 GB" in refused.value.message
    assert "hf download org/net net.gguf" in (refused.value.hint or "")
    assert not any(shown)


def test_what_is_here_is_counted_before_anything_is_asked(tmp_path: Path) -> None:
    files = [HubFile(f"{digest}.bin", 100, digest * 64) for digest in "abcd"]
    (tmp_path / "blobs").mkdir()
    for name, size in ((f"{'a' * 64}", 100), (f"{'b' * 64}.part", 30), (f"{'c' * 64}.part", 130)):
        (tmp_path / "blobs" / name).write_bytes(bytes(size))
    fetching = Fetching(tmp_path, "org/net", "b" * 40, files)
    # A beginning that is longer than the file is none.
    assert (fetching.total, fetching.here, fetching.left) == (400, 130, 270)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (15_249_000_000, "15.2 GB"), (2 * 10**12, "2000.0 GB")],
)
def test_sizes_are_said_in_words(count: int, words: str) -> None:
    assert size_words(count) == words
