"""The service's own life: started by need or by hand, one to a folder, stopped cleanly."""

import json
import os
import re
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.scenario import side_by_side
from tests.harness import Box, finish, model_toml, wait_until
from tests.service import Endpoint, ServiceBox, chats, endpoint, service_box


def service_pids(box: ServiceBox) -> list[int]:
    """Return the services that run in a box."""
    return [process.pid for process in box.processes() if "serve" in process.cmdline()]


@side_by_side
def test_first_batch_command_starts_a_service_and_says_so_in_one_line(folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        box.write("in.jsonl", chats("a"))
        first = box.batch("submit", "in.jsonl", "--model", end.url, "--name", "one")
        assert (first.status, first.stdout) == (0, "one\n")
        [pid] = service_pids(box)
        started = [line for line in first.stderr.splitlines() if "started a Freight service" in line]
        assert started == [
            f"started a Freight service in the background (pid {pid}, data {box.data}; stop it with: freight stop)"
        ]
        second = box.batch("wait", "one")
        assert (second.status, "started" in second.stderr) == (0, False)
        assert service_pids(box) == [pid]
        # It outlives the command, holds no folder of the user's, and is no child of the terminal's.
        assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
        assert os.getsid(pid) == pid
        log = box.data / "serve.log"
        assert f"serving on {box.socket} (pid {pid}" in log.read_text()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (log, box.socket)] == [0o600, 0o600]


@side_by_side
def test_commands_that_come_together_start_one_service(folder: Path) -> None:
    with service_box(folder / "own") as box, ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: box.batch("list"), range(4)))
        assert [each.status for each in done] == [0] * 4
        assert sum("started a Freight service" in each.stderr for each in done) == 1
        assert len(service_pids(box)) == 1


def test_no_start_exits_5_and_starts_none(box: Box) -> None:
    box.write("in.jsonl", chats("a"))
    for arguments in (
        ("batch", "submit", "in.jsonl", "--model", "smollm2-135m", "--no-start"),
        ("batch", "wait", "any", "--no-start"),
        ("ps",),
    ):
        done = box.freight(*arguments)
        assert (done.status, done.stdout) == (5, "")
        assert re.fullmatch("error: no Freight service answers at .+\nhint: .+\n", done.stderr)
        assert not box.processes()


@side_by_side
def test_serve_in_the_foreground_ends_by_ctrl_c_with_its_jobs_kept(folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        serving = box.start("serve")
        assert serving.stderr is not None
        assert serving.stderr.readline() == f"serving on {box.socket} (pid {serving.pid}, data {box.data})\n"
        box.put("kept", chats("a", "hold"), end.url)
        box.until("kept", lambda job: job.done == 1 and job.in_flight, "one is done")
        os.killpg(serving.pid, signal.SIGINT)
        done = finish(serving)
        assert (done.status, done.stdout) == (0, "")
        assert not box.processes()
        assert not box.socket.exists()
        end.let_go.set()
        assert box.freight("serve", "--background").status == 0
        assert box.ended("kept").done == 2
        assert end.seen["a"] == 1


@side_by_side
def test_terminated_service_ends_as_cleanly(folder: Path) -> None:
    with service_box(folder / "own") as box:
        serving = box.start("serve")
        wait_until(box.is_served, "it answers")
        serving.send_signal(signal.SIGTERM)
        assert finish(serving).status == 0
        assert not box.processes()


def test_background_returns_once_it_answers_and_a_second_is_refused(service: ServiceBox) -> None:
    [pid] = service_pids(service)
    for arguments in (("serve", "--background"), ("serve",)):
        done = service.freight(*arguments)
        assert (done.status, done.stdout) == (1, "")
        assert f"error: the data folder {service.data} is in use by process {pid}" in done.stderr
        assert "freight stop" in done.last_line()
    assert service_pids(service) == [pid]
    assert service.is_served()


def test_service_opens_no_port(service: ServiceBox, end: Endpoint) -> None:
    service.put("going", chats("hold"), end.url)
    service.until("going", lambda job: job.in_flight, "it runs")
    sockets = [each for process in service.processes() for each in process.net_connections("inet")]
    assert [each for each in sockets if each.status == "LISTEN"] == []


def test_configuration_is_read_anew_for_each_submission(service: ServiceBox, end: Endpoint) -> None:
    before = service.config.read_text()
    service.write("in.jsonl", chats("a"))
    assert service.batch("submit", "in.jsonl", "--model", "newcomer").status == 2
    try:
        service.configure(model_toml("newcomer", engine="endpoint", source=end.url))
        assert service.batch("submit", "in.jsonl", "--model", "newcomer", "--name", "late").status == 0
        assert service.ended("late").state == "COMPLETED"
        # A file that became wrong is an error of the next command, and does not disturb the service.
        service.config.write_text("retention = 7000 years\n")
        wrong = service.batch("submit", "in.jsonl", "--model", "newcomer")
        assert (wrong.status, str(service.config) in wrong.stderr) == (2, True)
        assert service.is_served()
    finally:
        service.config.write_text(before)


@side_by_side
def test_setting_that_is_wrong_keeps_the_service_from_starting_and_says_why(folder: Path) -> None:
    box = ServiceBox(folder / "own")
    box.configure("retention = 7\nnonsense = 1\n")
    for arguments in (("serve",), ("serve", "--background"), ("batch", "list")):
        done = box.freight(*arguments)
        assert done.status == 2
        assert "unknown key nonsense" in done.stderr
        assert done.last_line().startswith("hint: ")
    assert not box.processes()


def test_doctor_tells_of_the_service_that_runs(service: ServiceBox, end: Endpoint) -> None:
    service.put("going", chats("hold"), end.url)
    done = service.freight("doctor")
    [pid] = service_pids(service)
    assert done.status == 0
    assert re.search(rf"ok   service: running \(pid {pid}, Freight .+, 1 unfinished jobs?\)\n", done.stdout)


@side_by_side
def test_data_folder_with_a_long_path_serves_as_well(folder: Path) -> None:
    with service_box(folder / ("long-" * 20) / ("path-" * 20)) as box, endpoint() as end:
        box.write("in.jsonl", chats("a"))
        assert box.batch("submit", "in.jsonl", "--model", end.url, "--name", "far", "--wait").status == 0
        assert json.loads(box.batch("list", "--json").stdout)[0]["name"] == "far"
