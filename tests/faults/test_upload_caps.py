"""Uploads on TCP that are larger than they may be: refused, however they are sent, and nothing of them is left."""

from collections.abc import Generator

import pytest

from bench.pouring import pour
from tests.contract.town import Town, town

CAP = 1_000_000
SENT = 20_000_000
# What may have been on its way when the answer came: what sockets hold.
ON_ITS_WAY = 12_000_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town"), f"[limits]\nfile_bytes = {CAP}\n") as made:
        yield made


def kept(place: Town) -> set[tuple[str, int]]:
    """Return the files in which inputs lie, and their sizes."""
    folders = [place.box.data / name for name in ("uploads", "files", "batch")]
    return {(str(path), path.stat().st_size) for at in folders for path in at.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", ["/api/uploads", "/v1/files"])
@pytest.mark.parametrize("chunked", [True, False], ids=["in chunks", "with its length"])
def test_upload_over_the_cap_is_refused_and_leaves_nothing(shared: Town, path: str, chunked: bool) -> None:
    before = kept(shared)
    form = path == "/v1/files"
    answer = pour(shared.url, path, shared.tokens["alice"], SENT, chunked=chunked, form=form)
    assert answer.status == 413
    assert b"limits.file_bytes" in answer.body and b"too_large" in answer.body
    assert answer.taken < ON_ITS_WAY
    assert kept(shared) == before
    # One of the very size is taken.
    fits = pour(shared.url, path, shared.tokens["alice"], CAP, chunked=chunked, form=form)
    assert fits.status in (200, 201), fits.body
    assert sum(size for _, size in kept(shared)) == sum(size for _, size in before) + CAP
