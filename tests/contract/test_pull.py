"""`freight models pull`, through the real command, from a stand-in for the hub on loopback."""

import hashlib
import json
import os
import pty
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from freight.cli.pull import progress_line
from freight.store.hub import find_model
from freight.store.hubcalls import PIECE_BYTES
from tests.faults.small_disk import small_disk
from tests.harness import ROOT, Box, Finished, finish, wait_until
from tests.hub.standin import SIGNATURE, Hub, Refusal, Seen, running_hub

BIG: Final = random.Random(4).randbytes(3_000_000)
WEIGHTS: Final = "model.safetensors"
NET: Final = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model":{}}',
    "chat_template.jinja": b"{{ messages }}",
    WEIGHTS: BIG,
    "pytorch_model.bin": BIG[::-1],
    "README.md": b"about",
    "onnx/model.onnx": b"x" * 1000,
    "original/model.safetensors": b"y" * 1000,
    "flax_model.msgpack": b"z" * 1000,
    "net-Q4_K_M.gguf": b"g" * 5000,
}
NEEDED: Final = {"config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS}
TOKEN: Final = "hf_averysecretword"


@pytest.fixture
def hub() -> Generator[Hub]:
    """A hub with one model."""
    with running_hub() as running:
        running.repo("org/net", dict(NET))
        yield running


def pull(box: Box, hub: Hub, model: str = "org/net", *options: str, **extra: str) -> Finished:
    return finish(start(box, hub, model, *options, **extra))


def start(box: Box, hub: Hub, model: str = "org/net", *options: str, **extra: str) -> subprocess.Popen[str]:
    own = {"HF_HOME": str(box.folder / "hf"), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "HF_ENDPOINT": hub.url}
    return box.start("models", "pull", model, *options, **{**own, **extra})


def repo_folder(box: Box) -> Path:
    return box.folder / "data" / "models" / "models--org--net"


def part(folder: Path) -> Path:
    """Return the beginning of the weights that are on their way."""
    return folder / "blobs" / f"{hashlib.sha256(BIG).hexdigest()}.part"


def names(path: str) -> set[str]:
    return {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()}


def refused(finished: Finished, status: int) -> str:
    """Check that a command failed with an error and a hint, and return both."""
    assert (finished.status, finished.stdout) == (status, ""), finished
    lines = finished.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"], finished
    return "\n".join(lines[-2:])


def range_of(hub: Hub, name: str = WEIGHTS) -> str:
    """Return the Range of the last request for a file; "" where there was none."""
    return [seen for seen in hub.requests if seen.path.endswith(name)][-1].headers.get("Range", "")


# What is fetched, and where it is.


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


def begun(box: Box, hub: Hub, **extra: str) -> subprocess.Popen[str]:
    """Start a pull that stops in the middle of its weights, with all before that on disk."""
    hub.pause_at[WEIGHTS] = 4 * PIECE_BYTES
    child = start(box, hub, **extra)
    folder = repo_folder(box) if "FREIGHT_DATA" not in extra else Path(extra["FREIGHT_DATA"], "models/models--org--net")
    on_its_way = part(folder)
    wait_until(lambda: on_its_way.exists() and on_its_way.stat().st_size > 3 * PIECE_BYTES, "it is half-way")
    return child


def go_on(hub: Hub) -> None:
    hub.pause_at.clear()
    hub.go_on.set()


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


def test_model_that_is_not_there_is_refused(box: Box, hub: Hub) -> None:
    said = refused(pull(box, hub, "org/none"), 2)
    assert f"there is no model org/none at {hub.url}" in said
    assert "HF_TOKEN" in said
    assert not (box.folder / "data").exists()


def test_wrong_names_are_refused_before_anything_is_asked(box: Box, hub: Hub) -> None:
    for name in ("net", "org/", "org/net/x", "https://example.com/org/net", "../etc", "o--g/net", "org/net:"):
        assert "ORG/NAME" in refused(pull(box, hub, name), 2)
    assert not hub.requests


def test_revision_that_is_not_there_is_refused(box: Box, hub: Hub) -> None:
    assert "no branch, tag or commit 'v9'" in refused(pull(box, hub, "org/net", "--revision", "v9"), 2)


def test_file_that_is_not_there_is_refused_with_those_there_are(box: Box, hub: Hub) -> None:
    said = refused(pull(box, hub, "org/net:*Q8*"), 2)
    assert "org/net has no file '*Q8*'" in said
    assert "net-Q4_K_M.gguf" in said
    assert "net-Q4_K_M.gguf" in refused(pull(box, hub, "org/net:Q4_K_M"), 2)


def test_pattern_for_several_files_is_refused_with_their_names(box: Box, hub: Hub) -> None:
    hub.repo("org/many", {"a-Q4.gguf": b"1", "b-Q4.gguf": b"2"})
    assert "a-Q4.gguf, b-Q4.gguf" in refused(pull(box, hub, "org/many:*Q4*"), 2)
    assert "as GGUF files alone" in refused(pull(box, hub, "org/many"), 2)


def test_gated_model_says_where_to_ask_and_opens_with_the_token(box: Box, hub: Hub) -> None:
    hub.repos["org/net"].gated_to = TOKEN
    for token in ("", "hf_other"):
        said = refused(pull(box, hub, HF_TOKEN=token), 1)
        assert "org/net is gated" in said
        assert f"{hub.url}/org/net" in said
        assert "HF_TOKEN" in said
    finished = pull(box, hub, HF_TOKEN=TOKEN)
    assert finished.status == 0, finished


def test_token_is_never_shown_and_never_kept(box: Box, hub: Hub) -> None:
    hub.repos["org/net"].private_to = TOKEN
    ends = [
        pull(box, hub, HF_TOKEN=TOKEN, HF_DEBUG="1"),
        pull(box, hub, "org/none", HF_TOKEN=TOKEN, HF_DEBUG="1"),
        pull(box, hub, HF_TOKEN=f"{TOKEN}\nx"),
        pull(box, hub, HF_TOKEN=f"{TOKEN}ü"),
    ]
    hub.refuse_all(Refusal(401, message="Invalid credentials in Authorization header"))
    ends.append(pull(box, hub, HF_TOKEN=TOKEN))
    hub.refuse_all(Refusal(503))
    ends.append(pull(box, hub, HF_TOKEN=TOKEN))
    assert [end.status for end in ends] == [0, 2, 2, 2, 1, 1], ends
    assert "refuses the token" in ends[4].stderr
    for end in ends:
        assert TOKEN not in end.stdout + end.stderr
    for path in box.folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_server_of_the_large_files_gets_no_token_and_its_signed_address_is_never_shown(box: Box, hub: Hub) -> None:
    hub.repos["org/net"].private_to = TOKEN
    with running_hub() as large:
        large.repo("org/net", dict(NET))
        hub.large_files_at = large.url
        large.refuse_all(Refusal(503))
        failed = pull(box, hub, HF_TOKEN=TOKEN)
        assert "answers 503" in refused(failed, 1)
        large.refuse = lambda seen: None
        large.cut_after[WEIGHTS] = [1_000_000]
        finished = pull(box, hub, HF_TOKEN=TOKEN)
        assert finished.status == 0, finished
        assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG
        assert large.sent[WEIGHTS] < len(BIG) + PIECE_BYTES
        assert all(SIGNATURE in seen.path for seen in large.requests)
        assert not any("authorization" in map(str.lower, seen.headers) for seen in large.requests)
    assert SIGNATURE not in failed.stderr + finished.stderr


def test_hub_that_is_not_reached_is_named_with_the_setting(box: Box, hub: Hub) -> None:
    said = refused(pull(box, hub, HF_ENDPOINT="http://me:secret@127.0.0.1:9"), 1)
    assert "cannot reach the hub at http://127.0.0.1:9: " in said
    assert "HF_ENDPOINT" in said
    assert "secret" not in said


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9", "http://[x", "hub", "ftp://127.0.0.1", "http://h:x"])
def test_setting_that_is_no_address_is_refused(box: Box, hub: Hub, endpoint: str) -> None:
    assert "HF_ENDPOINT is no address" in refused(pull(box, hub, HF_ENDPOINT=endpoint), 2)


def test_what_is_no_hub_is_said_to_be_none(box: Box, hub: Hub) -> None:
    hub.refuse = lambda seen: Refusal(200)
    assert "is no model hub" in refused(pull(box, hub), 1)


def test_offline_setting_is_named_and_what_is_here_already_still_serves(box: Box, hub: Hub) -> None:
    said = refused(pull(box, hub, HF_HUB_OFFLINE="1"), 1)
    assert "HF_HUB_OFFLINE" in said
    assert not hub.requests
    first = pull(box, hub)
    for extra in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        finished = pull(box, hub, **extra)
        assert (finished.status, finished.stdout) == (0, first.stdout), finished
        assert finished.stderr.startswith("note: ")
        assert "already here" in finished.stderr


def test_busy_hub_is_waited_for_a_while(box: Box, hub: Hub) -> None:
    left = [Refusal(503), Refusal(429), Refusal(500)]

    def refuse(seen: Seen) -> Refusal | None:
        return left.pop() if left and seen.path.endswith(WEIGHTS) else None

    hub.refuse = refuse
    finished = pull(box, hub)
    assert finished.status == 0, finished
    assert not left


@pytest.mark.parametrize(("status", "words"), [(429, "too many requests"), (503, "answers 503"), (403, "the token")])
def test_hub_that_refuses_is_quoted(box: Box, hub: Hub, status: int, words: str) -> None:
    hub.refuse_all(Refusal(status))
    assert words in refused(pull(box, hub), 1)


def test_hub_that_goes_away_half_way_leaves_what_came(box: Box, hub: Hub) -> None:
    hub.cut_after[WEIGHTS] = [4 * PIECE_BYTES, *[0] * 20]
    said = refused(pull(box, hub), 1)
    assert "of 3.0 MB are here" in said
    assert "the same command goes on" in said
    hub.cut_after.clear()
    assert pull(box, hub).status == 0
    assert range_of(hub)


def test_hub_does_not_choose_where_files_go(box: Box, hub: Hub) -> None:
    for name in ("../../../evil.json", "/evil.json", "a//b.json"):
        hub.repo("org/evil", {"model.safetensors": b"1", name: b"{}"})
        assert "is no model hub" in refused(pull(box, hub, "org/evil"), 1)
    assert not list(box.folder.rglob("evil.json"))


def test_disk_without_room_is_said_before_the_start(box: Box, hub: Hub, tmp_path: Path) -> None:
    with small_disk(tmp_path, "2m") as disk:
        said = refused(pull(box, hub, FREIGHT_DATA=str(disk.path / "data")), 1)
        assert "org/net needs 3.0 MB more" in said
        assert "2.1 MB free" in said
        assert not hub.fetched()


def test_disk_that_fills_up_meanwhile_leaves_what_came(box: Box, hub: Hub, tmp_path: Path) -> None:
    with small_disk(tmp_path, "6m") as disk:
        data = str(disk.path / "data")
        child = begun(box, hub, FREIGHT_DATA=data)
        disk.fill()
        go_on(hub)
        said = refused(finish(child), 1)
        assert "is full" in said
        assert "the same command goes on" in said
        disk.free()
        finished = pull(box, hub, FREIGHT_DATA=data)
        assert finished.status == 0, finished
        assert range_of(hub)
        assert Path(finished.stdout.strip(), WEIGHTS).read_bytes() == BIG


def test_folder_that_cannot_be_written_to_is_said(box: Box, hub: Hub, tmp_path: Path) -> None:
    with small_disk(tmp_path, writable=False) as disk:
        assert "FREIGHT_DATA" in refused(pull(box, hub, FREIGHT_DATA=str(disk.path / "data")), 2)


# How it looks.


def test_terminal_sees_a_bar_that_counts_bytes(box: Box, hub: Hub) -> None:
    hub.pause_at[WEIGHTS] = 4 * PIECE_BYTES
    ours, theirs = pty.openpty()
    own = {"HF_HOME": str(box.folder / "hf"), "HF_ENDPOINT": hub.url, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen(
        [sys.executable, "-m", "freight", "models", "pull", "org/net"],
        env=box.environment(**own),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while b"1.0/3.0 MB" not in shown:
        shown += os.read(ours, 4096)
    go_on(hub)
    try:
        while os.read(ours, 4096):
            pass
    except OSError:
        pass  # The other end is closed.
    os.close(ours)
    assert child.wait(60) == 0


def test_progress_elsewhere_is_one_line() -> None:
    line = progress_line("org/net", 3_100_000_000, 15_200_000_000, 100e6)
    assert line == "org/net: 3.1 GB of 15.2 GB (20%), 100.0 MB/s, 2m01s left"
    assert progress_line("org/net", 0, 0, 0) == "org/net: 0 bytes of 0 bytes, 0 bytes/s"


def test_help_does_not_wait_for_the_hub_library(box: Box) -> None:
    script = "import sys, freight.cli.main, freight.cli.models; print('huggingface_hub' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=box.environment(), capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
    assert "--revision" in box.freight("models", "pull", "--help").stdout


def test_settings_of_the_library_that_have_no_effect_are_not_talked_about(box: Box, hub: Hub) -> None:
    finished = pull(box, hub, HF_HUB_ENABLE_HF_TRANSFER="1", HF_HUB_DISABLE_XET="0")
    assert finished.status == 0, finished
    assert len(finished.stderr.splitlines()) == 3, finished


def test_hub_learns_nothing_but_who_asks_for_what(box: Box, hub: Hub) -> None:
    pull(box, hub)
    for seen in hub.requests:
        assert seen.path.startswith(("/api/models/org/net/", "/org/net/resolve/")), seen
        agent = seen.headers["user-agent" if "user-agent" in seen.headers else "User-Agent"]
        assert agent.startswith("freight/")
        assert "torch" not in agent and "agent/" not in agent
