"""`freight gpus` and what `freight doctor` says of GPUs: cards of a stand-in library, the real command above it."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from freight import __version__
from freight.core.device import Holder
from freight.core.view import API_VERSION
from freight.launchers.locks import lock_device, lock_folder
from tests.harness import Box, Finished, Json
from tests.httpserver import Reply, http_server
from tests.nvml import Card, Cards, card
from tests.service import ServiceBox

_number = itertools.count()
# What a device has in JSON.
FIELDS: Final = {"id", "kind", "name", "index", "memory", "memory_used", "state", "holder", "pid", "job"}


def own_card(**fields: Any) -> Card:
    """Return a card of this test's own: locks are for the whole host."""
    return card(f"{os.getpid():x}-{time.monotonic_ns():x}-{next(_number)}", **fields)


class Machine:
    """A box on a machine with two cards, all of which its pool has."""

    def __init__(self, box: Box, folder: Path) -> None:
        self.box = box
        box.config.write_text("")
        self.one, self.two = own_card(), own_card()
        self.cards = Cards(folder / "cards", self.one, self.two)

    def declare(self, *devices: str) -> None:
        """Let the pool have these devices alone."""
        self.box.config.write_text(f"[pools.local]\ndevices = {json.dumps(devices)}\n")

    def freight(self, *arguments: str, **variables: str) -> Finished:
        """Run a command there."""
        return self.box.freight(*arguments, **self.cards.environment(), **variables)

    def states(self, **variables: str) -> dict[str, Json]:
        """Return what `freight gpus --json` says of each device."""
        done = self.freight("gpus", "--json", **variables)
        assert done.status == 0, done.stderr
        return {device["id"]: device for device in json.loads(done.stdout)["devices"]}

    def line(self, uuid: str, **variables: str) -> str:
        """Return a device's line of the table."""
        done = self.freight("gpus", **variables)
        assert done.status == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if uuid in line)


@pytest.fixture
def machine(box: Box, tmp_path: Path) -> Machine:
    """Give a box with two cards."""
    return Machine(box, tmp_path)


@contextmanager
def sleeping() -> Generator["subprocess.Popen[bytes]"]:
    """Run a process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()", "train.py"], stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def test_table_shows_each_card_its_memory_and_that_it_is_free(machine: Machine) -> None:
    machine.cards.change(machine.two.uuid, used_mb=20_000, total_mb=40_000, name="NVIDIA A100")

    done = machine.freight("gpus")

    heading, *rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert heading == "GPU DEVICE NAME MEMORY STATE"
    assert rows[0] == f"0 {machine.one.uuid} NVIDIA H100 80GB HBM3 0.0/85.5 GB free"
    assert rows[1] == f"1 {machine.two.uuid} NVIDIA A100 21.0/41.9 GB free"
    assert rows[2].startswith("- cpu:0 - - ")
    assert (done.status, done.stderr) == (0, "")


def test_json_has_all_that_is_known(machine: Machine) -> None:
    found = machine.states()

    assert list(found) == [machine.one.uuid, machine.two.uuid, "cpu:0"]
    assert {frozenset(device) for device in found.values()} == {frozenset(FIELDS)}
    assert found[machine.two.uuid] == {
        "id": machine.two.uuid, "kind": "nvidia", "name": machine.two.name, "index": 1, "memory": 81_559 << 20,
        "memory_used": 4 << 20, "state": "free", "holder": "", "pid": None, "job": None,
    }  # fmt: skip


def test_card_that_a_stranger_computes_on_is_held_by_that_process(machine: Machine) -> None:
    with sleeping() as child:
        machine.cards.change(machine.two.uuid, processes={child.pid: 60_000})
        found = machine.states()[machine.two.uuid]
        line = machine.line(machine.two.uuid)

    assert (found["state"], found["pid"]) == ("held", child.pid)
    assert found["memory_used"] == 60_004 << 20
    assert "train.py" in found["holder"]
    assert f"62.9/85.5 GB  held by process {child.pid} (user " in line


def test_card_that_another_freight_holds_is_held_by_it(machine: Machine) -> None:
    held = lock_device(machine.one.uuid, lock_folder())
    assert not isinstance(held, Holder)
    try:
        found = machine.states()
    finally:
        os.close(held)

    assert (found[machine.one.uuid]["state"], found[machine.one.uuid]["pid"]) == ("held", os.getpid())
    assert found[machine.two.uuid]["state"] == "free"
    assert machine.states()[machine.one.uuid]["state"] == "free"


def test_cards_that_freight_may_not_use_are_shown_as_such(machine: Machine) -> None:
    assert machine.line(machine.one.uuid, CUDA_VISIBLE_DEVICES="1").endswith("free (Freight may not use it)")
    assert machine.line(machine.two.uuid, CUDA_VISIBLE_DEVICES="1").endswith(" free")
    machine.declare(machine.one.uuid)
    assert machine.line(machine.one.uuid).endswith(" free")
    assert machine.line(machine.two.uuid).endswith("free (Freight may not use it)")


def test_card_that_cannot_be_read_is_told_beside_the_table(machine: Machine) -> None:
    machine.cards.change(machine.one.uuid, flags=("lost",))

    done = machine.freight("gpus")

    assert machine.one.uuid not in done.stdout
    assert machine.two.uuid in done.stdout
    assert done.stderr.startswith("note: GPU 0 cannot be read: GPU is lost; ")
    assert done.status == 0


def test_configuration_that_names_no_card_of_this_machine_still_shows_what_there_is(machine: Machine) -> None:
    machine.declare("GPU-elsewhere")

    done = machine.freight("gpus")

    assert machine.one.uuid in done.stdout
    assert done.status == 2
    assert f"error: pools.local.devices names GPU-elsewhere; this machine has {machine.one.uuid}" in done.stderr


def test_machine_without_a_card_says_so(machine: Machine) -> None:
    machine.cards.show()

    done = machine.freight("gpus")

    assert [line.split()[1] for line in done.stdout.splitlines()] == ["DEVICE", "cpu:0"]
    assert done.stderr == "note: no GPU found (NVIDIA driver 570.124.06); the CPU is used\n"


def test_release_and_a_service_that_is_named_need_a_service(machine: Machine) -> None:
    for command in (("gpus", "release", "0"), ("gpus", "--server", "http://127.0.0.1:9")):
        done = machine.freight(*command)
        assert (done.status, done.stdout) == (5, "")
        assert done.stderr.startswith("error: ")
    assert machine.freight("gpus", "--json", "release", "0").status == 2


def test_doctor_lists_each_device_and_who_holds_it(machine: Machine) -> None:
    with sleeping() as child:
        machine.cards.change(machine.two.uuid, processes={child.pid: 60_000})
        said = machine.freight("doctor").stdout

    about = "NVIDIA H100 80GB HBM3"
    assert f"ok   device: {machine.one.uuid} (GPU 0, {about}, 0.0 of 85.5 GB in use), free\n" in said
    held = (
        f"ok   device: {machine.two.uuid} (GPU 1, {about}, 62.9 of 85.5 GB in use), held by process {child.pid} (user "
    )
    assert held in said
    assert "GPUs" not in said


def test_doctor_names_cards_that_are_not_used(machine: Machine) -> None:
    hidden = machine.freight("doctor", CUDA_VISIBLE_DEVICES="0").stdout
    assert f"ok   GPUs: not used, because the environment hides them: {machine.two.uuid}\n" in hidden
    machine.declare(machine.two.uuid)
    said = machine.freight("doctor").stdout
    assert f"ok   GPUs: not used, because pools.local.devices does not name them: {machine.one.uuid}\n" in said


def test_doctor_fails_for_a_card_that_is_lost_unless_only_cpus_are_wanted(machine: Machine) -> None:
    machine.cards.change(machine.one.uuid, flags=("lost",))
    done = machine.freight("doctor")
    assert "FAIL GPUs: GPU 0 cannot be read: GPU is lost\n     see the kernel's log" in done.stdout
    assert done.status == 1

    machine.declare(machine.box.device)
    assert "ok   GPUs: GPU 0 cannot be read: GPU is lost" in machine.freight("doctor").stdout


@pytest.mark.parametrize(
    ("code", "says", "fix"), [(9, "the driver is not loaded", "modprobe"), (18, "different versions", "restart")]
)
def test_doctor_says_plainly_what_is_wrong_with_the_driver(machine: Machine, code: int, says: str, fix: str) -> None:
    machine.cards.show(machine.one, failing={"nvmlInitWithFlags": code})

    done = machine.freight("doctor")

    [number] = [n for n, line in enumerate(done.stdout.splitlines()) if line.startswith("FAIL GPUs: ")]
    assert says in done.stdout.splitlines()[number]
    assert fix in done.stdout.splitlines()[number + 1]


def test_doctor_is_content_with_a_machine_without_a_card(machine: Machine) -> None:
    machine.cards.show()

    assert "ok   GPUs: none found (NVIDIA driver 570.124.06); the CPU is used\n" in machine.freight("doctor").stdout


def test_doctor_names_a_declared_card_that_is_not_there(machine: Machine) -> None:
    machine.declare("GPU-elsewhere")

    assert "FAIL device: pools.local.devices names GPU-elsewhere; " in machine.freight("doctor").stdout


def status(ident: str, index: int | None, state: str = "free", **fields: Any) -> Json:
    """Return a device as a service shows it."""
    memory = None if index is None else 80_000_000_000
    given = {"id": ident, "kind": "cpu" if index is None else "nvidia", "name": "", "index": index, "memory": memory}
    return {**given, "memory_used": memory, "state": state, "holder": "", "pid": None, "job": None, **fields}


DEVICES: Final = [
    status("GPU-aaaa", 0, "leased", job="nightly", holder="job nightly", pid=77),
    status("GPU-aabb", 1, "leased", holder="small, warm"),
    status("GPU-cccc", 2, "held", holder="user bob: train.py", pid=4711),
    status("GPU-dddd", 3, "quarantined", holder="process 12 of the worker there does not end", pid=12),
    status("GPU-eeee", 4, "held", holder="its driver cannot read it: GPU is lost", pid=0),
    status("cpu:0", None),
]


@contextmanager
def service_that_says(released: Reply) -> Generator[str]:
    """Run a server that shows DEVICES, and answers what is to be released so."""
    version = {"version": __version__, "api_version": API_VERSION, "pid": 1, "data_folder": "/nowhere"}
    answers = {"/api/version": version, "/api/devices": {"devices": DEVICES}}

    def get(path: str) -> Reply:
        return Reply(200, json.dumps(answers[path.partition("?")[0]]).encode())

    with http_server(get, lambda body: released) as url:
        yield url


RELEASED: Final = Reply(200, json.dumps({"devices": DEVICES}).encode())


def test_service_is_asked_where_one_runs(box: Box) -> None:
    with service_that_says(RELEASED) as url:
        done = box.freight("gpus", "--server", url)
        as_json = box.freight("gpus", "--json", FREIGHT_SERVER=url)

    states = [line.split("GB  ")[-1].strip() for line in done.stdout.splitlines()[1:6]]
    assert states == [
        "leased by job nightly",
        "leased: small, warm",
        "held by process 4711 (user bob: train.py)",
        "quarantined: process 12 of the worker there does not end; free it by hand: freight gpus release GPU-dddd",
        "held: its driver cannot read it: GPU is lost",
    ]
    assert "?/80.0 GB" in done.stdout.splitlines()[5]
    assert json.loads(as_json.stdout) == {"devices": DEVICES}


@pytest.mark.parametrize("named", ["GPU-dddd", "GPU-d", "gpu-D", "3", "GPU 3", "gpu3"])
def test_release_takes_an_id_its_beginning_or_a_number(box: Box, named: str) -> None:
    with service_that_says(RELEASED) as url:
        done = box.freight("gpus", "release", named, "--server", url)

    assert (done.status, done.stdout, done.stderr) == (0, "", "GPU-dddd: released\n")


@pytest.mark.parametrize(
    ("named", "says"),
    [("GPU-aa", "fits several devices: GPU-aaaa, GPU-aabb"), ("9", "no device 9"), ("x", "no device x")],
)
def test_release_of_no_device_or_several_is_refused(box: Box, named: str, says: str) -> None:
    with service_that_says(RELEASED) as url:
        done = box.freight("gpus", "release", named, "--server", url)

    assert done.status == 2
    assert says in done.stderr
    assert "GPU-aaaa" in done.stderr


def test_release_of_a_device_that_is_not_quarantined_is_refused(service: ServiceBox) -> None:
    done = service.freight("gpus", "release", service.device)

    assert done.status == 1
    assert service.device in done.stderr


def test_running_service_shows_its_devices(service: ServiceBox) -> None:
    done = service.freight("gpus", "--json")

    [device] = json.loads(done.stdout)["devices"]
    assert (device["id"], device["kind"], device["state"]) == (service.device, "cpu", "free")
    assert set(device) == FIELDS
