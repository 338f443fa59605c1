"""`freight models pull` refused, unreachable, without room, and what it shows, through the real command."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from freight.cli.pull import progress_line
from freight.store.hubcalls import PIECE_BYTES
from tests.faults.small_disk import small_disk
from tests.harness import ROOT, Box, finish
from tests.hub.pulls import BIG, NET, TOKEN, WEIGHTS, begun, go_on, pull, range_of, refused
from tests.hub.standin import SIGNATURE, Hub, Refusal, Seen, running_hub


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
