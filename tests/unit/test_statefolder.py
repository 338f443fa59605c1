"""The state folder: whoever does not own it touches nothing in it."""

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from freight.control import statefolder
from freight.control.statefolder import INPUT_KEY, SAME, StateFolder
from freight.core.job import Event
from freight.errors import FreightError, OperationError, UserError
from freight.store.folder import OWNER_BEAT_S, FolderLock, Owner
from freight.store.processes import ProcessId

ELSEWHERE = ProcessId("another-host", "another-boot", 4711, 5)


def folder_at(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "out.jsonl", "out.jsonl")


def stream(content: bytes) -> int:
    """Return a descriptor from which the content can be read."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    return reader


def keep(state: StateFolder, content: bytes) -> Path:
    source = stream(content)
    try:
        return state.keep_stream(source, lambda: False)
    finally:
        os.close(source)


def add_job(state: StateFolder, kept: Path) -> None:
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()
    state.catalog.add("job", {SAME: {INPUT_KEY: digest}}, 1, None, 1.0)


def test_results_and_index_stay_until_all_answers_are_in_the_output_and_then_go_together(tmp_path: Path) -> None:
    state = folder_at(tmp_path)
    state.claim()
    state.open(fresh=False)
    add_job(state, keep(state, b"x"))
    state.open_results("job").close()
    (state.job_folder("job") / "index-0.0.9.npz").write_bytes(b"kept")
    (state.job_folder("job") / "1.log").write_bytes(b"stays")

    for event in (Event.ACCEPTED, Event.LAST_RECORD_DONE, Event.OUTPUT_WRITTEN):
        state.drop_results("job")
        assert state.has_results("job")
        assert list(state.path.rglob("*.npz"))
        row = state.job()
        assert row is not None
        state.catalog.happened(row, event, 2.0)
    state.drop_results("job")

    assert [path.name for path in state.job_folder("job").iterdir()] == ["1.log"]
    state.close()


def test_the_loser_of_a_race_for_a_new_folder_leaves_it_to_the_winner(tmp_path: Path) -> None:
    winner, loser = folder_at(tmp_path), folder_at(tmp_path)
    winner.claim()

    with pytest.raises(OperationError, match="in use by process"):
        loser.claim()
    loser.close()

    assert not winner.lock.is_gone()
    winner.open(fresh=False)
    add_job(winner, keep(winner, b"x"))
    winner.close()
    again = folder_at(tmp_path)
    again.claim()
    again.open(fresh=False)
    assert again.job() is not None
    again.close()


def test_whoever_made_the_folder_and_came_second_to_the_lock_leaves_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, owner = folder_at(tmp_path), folder_at(tmp_path)

    class Late(FolderLock):
        """A lock that is taken only after the other has taken it."""

        def take(self, what: str, wait: Callable[[float], None] = time.sleep) -> None:
            monkeypatch.setattr(statefolder, "FolderLock", FolderLock)
            owner.claim()
            super().take(what, wait)

    monkeypatch.setattr(statefolder, "FolderLock", Late)
    with pytest.raises(OperationError):
        maker.claim()
    maker.close()

    assert not owner.lock.is_gone()
    owner.open(fresh=False)
    assert owner.catalog.jobs() == []
    owner.close()


@pytest.mark.parametrize("refused_by", ["another's files", "another run"])
def test_a_refused_run_removes_nothing(tmp_path: Path, refused_by: str) -> None:
    first = folder_at(tmp_path)
    names = ("input_data.csv", "input-1.jsonl", "input.new", "input.partial", "runtime")
    if refused_by == "another run":
        first.claim()
    else:
        first.path.mkdir()
    for name in names:
        (first.path / name).write_text(name)

    second = folder_at(tmp_path)
    with pytest.raises(FreightError) as refused:
        second.claim()
    second.close()

    assert isinstance(refused.value, OperationError if refused_by == "another run" else UserError)
    assert {name: (first.path / name).read_text() for name in names} == {name: name for name in names}


def test_a_run_that_comes_to_nothing_keeps_the_streams_of_the_folders_job_and_no_others(tmp_path: Path) -> None:
    first = folder_at(tmp_path)
    first.claim()
    first.open(fresh=False)
    kept = keep(first, b"one")
    add_job(first, kept)
    first.close()

    for content in (None, b"another"):
        other = folder_at(tmp_path)
        other.claim()
        other.open(fresh=False)
        if content is not None:
            assert keep(other, content) != kept
        other.close()
        assert [path.name for path in first.path.glob("input*")] == [kept.name]

    again = folder_at(tmp_path)
    again.claim()
    again.open(fresh=False)
    assert keep(again, b"") == kept
    again.close()
    assert kept.read_bytes() == b"one"


@pytest.mark.parametrize("emptied", [True, False])
def test_results_without_a_catalog_are_not_swept_but_refused(tmp_path: Path, emptied: bool) -> None:
    state = folder_at(tmp_path)
    state.claim()
    state.open(fresh=False)
    state.open_results("job").close()
    add_job(state, keep(state, b"x"))
    state.close()
    if emptied:
        os.truncate(state.path / "catalog.db", 0)
    else:
        (state.path / "catalog.db").unlink()

    again = folder_at(tmp_path)
    again.claim()
    with pytest.raises(OperationError, match="no catalog") as refused:
        again.open(fresh=False)
    assert "--fresh" in str(refused.value.hint)
    again.close()
    assert again.has_results("job")

    fresh = folder_at(tmp_path)
    fresh.claim()
    fresh.open(fresh=True)
    assert (fresh.job(), fresh.has_results("job")) == (None, False)
    fresh.close()


@pytest.fixture
def owner_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FolderLock, Path]:
    """A folder that is owned where flock is refused, and the file that says so."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = FolderLock(tmp_path)
    lock.take("the folder", lambda seconds: None)
    return lock, tmp_path / "owner"


def test_an_owner_that_beats_and_finds_another_is_lost_and_leaves_the_others_claim(
    owner_file: tuple[FolderLock, Path],
) -> None:
    lock, file = owner_file
    lock.beat()
    assert not lock.is_lost
    theirs = msgspec.json.encode(Owner(ELSEWHERE, beat=7))
    file.write_bytes(theirs)

    lock.beat()

    assert lock.is_lost
    assert file.read_bytes() == theirs
    lock.release()
    assert file.read_bytes() == theirs


def test_an_owner_whose_claim_was_removed_is_lost_and_claims_nothing_again(owner_file: tuple[FolderLock, Path]) -> None:
    lock, file = owner_file
    file.unlink()

    lock.beat()

    assert lock.is_lost
    assert not file.exists()
    lock.release()


def test_an_owner_that_finds_itself_alive_lets_go_when_it_is_released(owner_file: tuple[FolderLock, Path]) -> None:
    lock, file = owner_file
    began = time.monotonic()

    lock.release()

    assert not file.exists()
    assert time.monotonic() - began < OWNER_BEAT_S
