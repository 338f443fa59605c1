"""The index of a run's input is kept for the run to go on by, as long as it says what is asked."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from freight import __version__
from freight.control.inputs import InputFile
from freight.control.intake import Index, Limits, Wishes, scan
from freight.control.keptindex import drop_index, keep_index, kept_index
from freight.core.record import Rules


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """An index with an order of its own."""
    bodies = [{"messages": ["AB"[n % 2] * 300 + str(n)]} for n in range(12)]
    path = tmp_path / "in"
    path.write_text("\n".join(json.dumps({"custom_id": str(n), "body": body}) for n, body in enumerate(bodies)))
    file = InputFile(path, "in")
    index = scan(file, Rules(), Limits(10_000), lambda problems: None, wishes=Wishes(order=True))
    file.close()
    assert len(index.order) == 12
    return index


def test_an_index_is_found_again_for_the_same_file_alone(tmp_path: Path, index: Index) -> None:
    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is None
    keep_index(tmp_path, index, ordered=True)

    found = kept_index(tmp_path, index.sha256, ordered=True, strict=True)
    assert found is not None
    assert found.order.tolist() == index.order.tolist()
    assert kept_index(tmp_path, "0" * 64, ordered=True, strict=False) is None


def test_an_order_is_left_out_where_none_is_wanted_and_an_index_without_one_is_not_taken_for_it(
    tmp_path: Path, index: Index
) -> None:
    keep_index(tmp_path, index, ordered=True)
    found = kept_index(tmp_path, index.sha256, ordered=False, strict=False)
    assert found is not None
    assert (found.records, len(found.order), len(found.shared)) == (12, 0, 0)

    keep_index(tmp_path, found, ordered=False)
    # It took the place of the other.
    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is None
    assert kept_index(tmp_path, index.sha256, ordered=False, strict=False) is not None


def test_an_input_with_bad_lines_is_read_again_to_tell_of_them(tmp_path: Path, index: Index) -> None:
    endpoints = index.endpoints.copy()
    endpoints[3] = 0
    keep_index(tmp_path, replace(index, endpoints=endpoints), ordered=True)

    assert kept_index(tmp_path, index.sha256, ordered=True, strict=True) is None
    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is not None


def test_an_index_that_cannot_be_kept_or_read_is_none(tmp_path: Path, index: Index) -> None:
    keep_index(tmp_path / "missing", index, ordered=True)
    keep_index(tmp_path, index, ordered=True)
    [kept] = tmp_path.glob("*.npz")
    kept.write_bytes(numpy.arange(100).tobytes())

    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is None


def test_an_index_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path, index: Index) -> None:
    keep_index(tmp_path, index, ordered=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
    try:
        with pytest.raises(OSError):
            index.save(tmp_path / "to-see-that-it-fails")
        keep_index(tmp_path, index, ordered=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert {path.name for path in tmp_path.iterdir()} == {"in", "to-see-that-it-fails"}


def test_an_index_of_another_release_is_not_trusted_and_goes_when_one_is_kept(tmp_path: Path, index: Index) -> None:
    index.save(tmp_path / "index.npz")
    index.save(tmp_path / "index-0.0.9.npz")
    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is None

    keep_index(tmp_path, index, ordered=True)
    assert kept_index(tmp_path, index.sha256, ordered=True, strict=False) is not None
    assert [path.name for path in tmp_path.glob("*.npz")] == [f"index-{__version__}.npz"]


def test_all_that_is_kept_is_dropped_together(tmp_path: Path, index: Index) -> None:
    keep_index(tmp_path, index, ordered=False)
    index.save(tmp_path / "index-0.0.9.npz")

    drop_index(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["in"]
