"""`freight models pull`: what comes, and that it goes on where it was, through the real command."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from freight.store.hub import find_model
from freight.store.hubcalls import PIECE_BYTES
from tests.harness import Box, finish
from tests.hub.pulls import (
    BIG,
    NEEDED,
    NET,
    WEIGHTS,
    begun,
    go_on,
    names,
    part,
    pull,
    range_of,
    refused,
    repo_folder,
    start,
)
from tests.hub.standin import Hub


def test_whole_model_comes_without_what_it_does_not_need(box: Box, hub: Hub) -> None:
    finished = pull(box, hub)
    assert finished.status == 0, finished
    path = finished.stdout.removesuffix("\n")
    assert names(path) == NEEDED
    assert Path(path, WEIGHTS).read_bytes() == BIG
    assert hub.fetched() == {name: len(NET[name]) for name in NEEDED}
    assert finished.last_line() == "to use it: freight run FILE -o OUT --model org/net"
    assert find_model(box.folder / "data", "org/net", {}) == Path(path)
    [record] = json.loads((repo_folder(box) / "freight.json").read_bytes())
    assert (record["repo"], record["revision"], record["commit"]) == ("org/net", "main", Path(path).name)
    assert record["files"] == {name: len(NET[name]) for name in NEEDED}
    assert stat.S_IMODE((box.folder / "data").stat().st_mode) == 0o700


def test_second_pull_fetches_nothing_and_says_so(box: Box, hub: Hub) -> None:
    first = pull(box, hub)
    hub.sent.clear()
    second = pull(box, hub)
    assert (second.status, second.stdout) == (0, first.stdout)
    assert second.stderr.startswith("already here: org/net at commit ")
    assert not hub.fetched()


def test_file_comes_alone_also_by_a_pattern(box: Box, hub: Hub) -> None:
    for file in ("net-Q4_K_M.gguf", "*Q4_K_M*", "*q4_k_m*"):
        finished = pull(box, hub, f"org/net:{file}")
        assert finished.status == 0, finished
        path = Path(finished.stdout.removesuffix("\n"))
        assert path.name == "net-Q4_K_M.gguf"
        assert path.read_bytes() == NET["net-Q4_K_M.gguf"]
        assert find_model(box.folder / "data", f"org/net:{file}", {}) == path
    assert hub.fetched() == {"net-Q4_K_M.gguf": 5000}
    assert find_model(box.folder / "data", "org/net", {}) is None


def test_parts_of_a_split_file_come_together(box: Box, hub: Hub) -> None:
    parts = {f"Q8/net-Q8-0000{n}-of-00003.gguf": bytes([n]) * 100 for n in (1, 2, 3)}
    hub.repo("org/split", {**parts, "net-Q4.gguf": b"4"})
    finished = pull(box, hub, "org/split:*Q8*")
    assert finished.status == 0, finished
    assert finished.stdout.endswith("/Q8/net-Q8-00001-of-00003.gguf\n")
    assert set(hub.fetched()) == set(parts)


def test_tag_and_commit_can_be_named_and_a_commit_needs_no_hub_again(box: Box, hub: Hub) -> None:
    old = hub.repos["org/net"].refs["main"]
    hub.repos["org/net"].refs["v1"] = old
    hub.repos["org/net"].commit({**NET, "config.json": b'{"new":1}'})
    for revision in ("v1", old):
        finished = pull(box, hub, "org/net", "--revision", revision)
        assert finished.status == 0, finished
        assert Path(finished.stdout.strip()).name == old
    seen = len(hub.requests)
    again = pull(box, hub, "org/net", "--revision", old)
    assert again.stderr.startswith("already here"), again
    assert len(hub.requests) == seen


def test_all_files_are_of_one_commit_though_main_moves_meanwhile(box: Box, hub: Hub) -> None:
    repo = hub.repos["org/net"]
    first = repo.refs["main"]
    moved = {**NET, "config.json": b'{"new":1}'}

    def move(_: str) -> None:
        if repo.refs["main"] == first:
            repo.commit(moved)

    hub.on_get = move
    path = Path(pull(box, hub).stdout.strip())
    assert path.name == first
    assert (path / "config.json").read_bytes() == b"{}"
    # The next pull takes what main is now, and of that only what is new.
    hub.sent.clear()
    path = Path(pull(box, hub).stdout.strip())
    assert path.name == repo.refs["main"] != first
    assert hub.fetched() == {"config.json": 9}
    assert find_model(box.folder / "data", "org/net", {}) == path


def test_other_programs_find_it_as_in_their_own_cache(box: Box, hub: Hub) -> None:
    path = pull(box, hub).stdout.strip()
    script = "from huggingface_hub import snapshot_download; print(snapshot_download('org/net'))"
    models = str(box.folder / "data" / "models")
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_CACHE": models, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == path


def test_content_that_two_files_share_is_fetched_once(box: Box, hub: Hub) -> None:
    hub.repo("org/twice", {"config.json": b"{}", "a.safetensors": BIG, "b.safetensors": BIG})
    assert pull(box, hub, "org/twice").status == 0
    assert sum(hub.fetched().values()) == len(BIG) + 2


# Going on.


def test_download_that_is_cut_off_goes_on_where_it_was(box: Box, hub: Hub) -> None:
    hub.cut_after[WEIGHTS] = [1_000_000, 700_000]
    finished = pull(box, hub)
    assert finished.status == 0, finished
    assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG
    assert hub.sent[WEIGHTS] < len(BIG) + 2 * PIECE_BYTES
    assert not hub.cut_after[WEIGHTS]


def test_killed_pull_is_gone_on_with_by_the_same_command(box: Box, hub: Hub) -> None:
    child = begun(box, hub)
    child.kill()
    child.communicate()
    go_on(hub)
    size = part(repo_folder(box)).stat().st_size
    assert size > 3 * PIECE_BYTES
    finished = pull(box, hub)
    assert finished.status == 0, finished
    assert "of them here" in finished.stderr
    assert range_of(hub) == f"bytes={size}-"
    assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG
    assert not list((repo_folder(box) / "blobs").glob("*.part"))


def test_ctrl_c_keeps_what_was_fetched_and_says_how_to_go_on(box: Box, hub: Hub) -> None:
    child = begun(box, hub)
    child.send_signal(signal.SIGINT)
    finished = finish(child)
    assert finished.status == 130, finished
    assert "interrupted: " in finished.stderr
    assert " of 3.0 MB are here" in finished.stderr
    assert finished.last_line() == "hint: the same command goes on with what is left"
    go_on(hub)
    assert part(repo_folder(box)).stat().st_size > 3 * PIECE_BYTES
    assert pull(box, hub).status == 0
    assert range_of(hub)


def test_second_pull_at_once_waits_for_the_first_and_each_byte_comes_once(box: Box, hub: Hub) -> None:
    first = begun(box, hub)
    second = start(box, hub)
    assert second.stderr is not None
    said = second.stderr.readline()
    assert said.startswith("waiting: org/net in ")
    assert f"in use by process {first.pid} " in said
    go_on(hub)
    ends = [finish(first), finish(second)]
    assert [end.status for end in ends] == [0, 0], ends
    assert ends[0].stdout == ends[1].stdout
    assert ends[1].stderr.startswith("already here"), ends[1]
    assert hub.fetched() == {name: len(NET[name]) for name in NEEDED}


def test_hub_that_takes_no_ranges_gives_the_whole_again(box: Box, hub: Hub) -> None:
    child = begun(box, hub)
    child.kill()
    child.communicate()
    go_on(hub)
    hub.ranges = False
    finished = pull(box, hub)
    assert finished.status == 0, finished
    assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG


def test_beginning_that_a_crash_damaged_is_fetched_again(box: Box, hub: Hub) -> None:
    child = begun(box, hub)
    child.kill()
    child.communicate()
    go_on(hub)
    beginning = part(repo_folder(box))
    beginning.write_bytes(bytes(beginning.stat().st_size))
    finished = pull(box, hub)
    assert finished.status == 0, finished
    assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG


def test_content_that_is_not_what_was_listed_is_not_kept(box: Box, hub: Hub) -> None:
    hub.spoil.add(WEIGHTS)
    assert "did not arrive as it was listed" in refused(pull(box, hub), 1)
    assert find_model(box.folder / "data", "org/net", {}) is None
    hub.spoil.clear()
    assert pull(box, hub).status == 0


def test_beginnings_of_files_that_the_model_no_longer_has_are_removed(box: Box, hub: Hub) -> None:
    child = begun(box, hub)
    child.kill()
    child.communicate()
    go_on(hub)
    hub.repos["org/net"].commit({**NET, WEIGHTS: BIG[::-1]})
    assert pull(box, hub).status == 0
    assert not list((repo_folder(box) / "blobs").glob("*.part"))


# What can go wrong.
