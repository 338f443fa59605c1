"""The facility's words and names."""

import pytest

from freight.core.facility import STATUSES, file_names, folder_name, shown_time, states_with
from freight.core.job import State

ID = "f8fa8efd-1111-476d-a0a0-111111111111"


def test_every_state_has_a_status_and_every_status_its_states() -> None:
    assert set(STATUSES) == set(State)
    assert {state for status in STATUSES.values() for state in states_with(status)} == set(State)
    assert states_with("cancelled") == (State.CANCELLING, State.CANCELLED)
    assert states_with("done") == ()


def test_time_is_written_as_in_the_facilitys_lists() -> None:
    assert shown_time(1740076798.049584) == "2025-02-20 18:39:58.049584+00:00"
    assert shown_time(1740076798.0) == "2025-02-20 18:39:58.000000+00:00"


NAMES = {
    "plain": ("/data/chunk_a.jsonl", "llama", f"chunk_a_llama_{ID}", "chunk_a_20250220T183958Z"),
    "model with a slash": ("/d/a.jsonl", "meta-llama/Llama-3", f"a_meta-llama--Llama-3_{ID}", "a_20250220T183958Z"),
    "no ending": ("/d/input", "m", f"input_m_{ID}", "input_20250220T183958Z"),
    "several endings": ("/d/a.b.jsonl", "m", f"a.b_m_{ID}", "a.b_20250220T183958Z"),
    "hidden": ("/d/.jsonl", "m", f".jsonl_m_{ID}", ".jsonl_20250220T183958Z"),
    "dots": ("/d/a.jsonl", "..", f"a_.._{ID}", "a_20250220T183958Z"),
    "control characters": ("/d/a.jsonl", "m\0\n", f"a_m___{ID}", "a_20250220T183958Z"),
}


@pytest.mark.parametrize(("path", "model", "folder", "start"), NAMES.values(), ids=NAMES)
def test_files_are_called_by_the_input_the_model_and_the_batch(path: str, model: str, folder: str, start: str) -> None:
    assert folder_name(path, model, ID) == folder
    assert file_names(path, 1740076798.5) == (f"{start}.results.jsonl", f"{start}.progress.json")


@pytest.mark.parametrize("letter", ["x", "é", "漢"])
def test_long_names_are_cut_between_letters_so_that_a_file_can_have_them(letter: str) -> None:
    folder = folder_name(f"/d/{letter * 80}.jsonl", letter * 300, ID)
    names = (folder, *file_names(f"/d/{letter * 80}.jsonl", 1740076798.0))
    assert all(len(name.encode()) <= 255 for name in names)
    assert folder.endswith(ID)
