"""The NVIDIA GPUs of a machine, as nvidia-ml-py sees them through a stand-in for the driver's library."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from tests.harness import ROOT, Json, wait_until
from tests.nvml import Cards, card, instance
from tests.nvml.cards import DRIVER
from tests.nvml.probe import Probe, probe

MIB: Final = 1 << 20
CPU: Final = "cpu:0"
# What a call of the library returns when something went wrong.
UNKNOWN: Final = 999


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Cards, Probe]]:
    """Give a machine whose cards the tests change, and a process that looks at them."""
    cards = Cards(tmp_path_factory.mktemp("cards"))
    with probe({**os.environ, **cards.environment()}) as asking:
        yield cards, asking


@pytest.fixture
def cards(machine: tuple[Cards, Probe]) -> Cards:
    """Give the machine's cards."""
    machine[0].show(card("aaaa-1"), card("aaaa-2"), card("bbbb"))
    return machine[0]


@pytest.fixture
def asking(machine: tuple[Cards, Probe]) -> Probe:
    """Give the process that looks."""
    return machine[1]


def test_each_card_is_a_device_in_the_drivers_order_and_the_cpu_comes_last(cards: Cards, asking: Probe) -> None:
    cards.show(card("x", name="Big", total_mb=1000), card("y"))

    found = asking.ask()

    assert [device["id"] for device in found["devices"]] == ["GPU-x", "GPU-y", CPU]
    assert found["devices"][0] == {
        "id": "GPU-x", "kind": "nvidia", "name": "Big", "memory": 1000 * MIB, "index": 0,
    }  # fmt: skip
    assert found["devices"][1]["index"] == 1
    assert found["devices"][2] == {"id": CPU, "kind": "cpu", "name": "", "memory": None, "index": None}
    assert (found["troubles"], found["drivers"]) == ([], f"NVIDIA driver {DRIVER}")


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["aaaa-1"]),
        ("2,0", ["bbbb", "aaaa-1"]),
        (" 1 , 2 ", ["aaaa-2", "bbbb"]),
        ("0,7,1", ["aaaa-1"]),
        ("0,-1,1", ["aaaa-1"]),
        ("1,1", ["aaaa-2"]),
        ("99999999999999999999", []),
        ("GPU-b,GPU-aaaa-2", ["bbbb", "aaaa-2"]),
        ("GPU-aaaa,0", []),
        ("gpu-BBBB", ["bbbb"]),
        ("GPU-c", []),
        ("0,,1", ["aaaa-1"]),
    ],
)
def test_cuda_visible_devices_leaves_what_it_names_until_its_first_wrong_entry(
    cards: Cards, asking: Probe, limit: str, left: list[str]
) -> None:
    found = asking.ask(CUDA_VISIBLE_DEVICES=limit)

    assert [device["id"] for device in found["devices"]] == [*(f"GPU-{end}" for end in left), CPU]
    assert found["all"] == ["GPU-aaaa-1", "GPU-aaaa-2", "GPU-bbbb", CPU]


def test_a_uuid_that_begins_another_means_itself(cards: Cards, asking: Probe) -> None:
    cards.show(card("a1"), card("a"))

    assert asking.ids(CUDA_VISIBLE_DEVICES="GPU-a") == ["GPU-a", CPU]
    assert asking.ids(["GPU-a"]) == ["GPU-a"]


def test_declared_devices_keep_their_order_and_come_once(cards: Cards, asking: Probe) -> None:
    assert asking.ids(["cpu:1", "GPU-bbbb", "GPU-aaaa-1", "GPU-b", "cpu:1"]) == ["cpu:1", "GPU-bbbb", "GPU-aaaa-1"]
    assert asking.ask(["cpu:1"])["all"] == ["GPU-aaaa-1", "GPU-aaaa-2", "GPU-bbbb", "cpu:1"]


@pytest.mark.parametrize(
    ("declared", "limit", "says"),
    [
        (["GPU-zzzz"], None, "names GPU-zzzz; this machine has GPU-aaaa-1, GPU-aaaa-2, GPU-bbbb"),
        (["cpu:0", "cpu:x"], None, "names cpu:x;"),
        (["0"], None, "names 0;"),
        ([""], None, "names ;"),
        (["GPU-aaaa"], None, "names GPU-aaaa, which fits GPU-aaaa-1, GPU-aaaa-2"),
        (["GPU-bbbb"], "0", "names GPU-bbbb, which CUDA_VISIBLE_DEVICES=0 hides; it leaves GPU-aaaa-1"),
        (["GPU-bbbb"], "", "names GPU-bbbb, which CUDA_VISIBLE_DEVICES= hides; it leaves no GPU"),
        ([], None, "is empty"),
    ],
)
def test_a_declared_device_that_is_not_there_is_named_with_what_there_is(
    cards: Cards, asking: Probe, declared: list[str], limit: str | None, says: str
) -> None:
    refused = asking.ask(declared, **({} if limit is None else {"CUDA_VISIBLE_DEVICES": limit}))

    assert says in refused["error"]
    assert "pools.local.devices" in refused["error"]
    assert refused["hint"]


def test_a_worker_sees_exactly_its_devices(cards: Cards, asking: Probe) -> None:
    found = asking.ask()

    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found["environments"]["GPU-bbbb"] == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb", **order}
    assert found["environments"][CPU] == {"CUDA_VISIBLE_DEVICES": "", **order}
    assert found["environment"] == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa-1,GPU-aaaa-2,GPU-bbbb", **order}
    assert asking.ask([CPU], CUDA_VISIBLE_DEVICES="")["environment"]["CUDA_VISIBLE_DEVICES"] == ""


def test_what_is_on_a_card_is_read_anew_each_time(cards: Cards, asking: Probe) -> None:
    asking.ask()
    cards.change("GPU-bbbb", used_mb=500)
    assert asking.again()["usage"]["GPU-bbbb"] == {"memory_used": 500 * MIB, "holders": []}

    with subprocess.Popen([sys.executable, "-c", "input()", "a" * 500], stdin=subprocess.PIPE) as child:
        cards.change("GPU-bbbb", processes={child.pid: 1000})
        usage = asking.again()["usage"]
        child.kill()
    [holder] = usage["GPU-bbbb"]["holders"]
    assert usage["GPU-bbbb"]["memory_used"] == 1500 * MIB
    assert holder["pid"] == child.pid
    assert "python" in holder["what"]
    assert len(holder["what"]) < 200
    assert usage["GPU-aaaa-1"]["holders"] == []
    assert usage[CPU] is None
    # It has ended, and so the driver does not show it any more.
    assert asking.again()["usage"]["GPU-bbbb"] == {"memory_used": 500 * MIB, "holders": []}


def test_a_command_that_occupies_cards_is_on_those_it_was_given_while_it_lives(cards: Cards, asking: Probe) -> None:
    command = [sys.executable, "-m", "tests.nvml.occupy", "700", "--", "sleep", "600"]
    variables = {**os.environ, **cards.environment(), "CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa-2"}
    with subprocess.Popen(command, cwd=ROOT, env=variables) as child:
        wait_until(lambda: asking.ask()["usage"]["GPU-bbbb"]["holders"], "the command is on its card")
        usage = asking.again()["usage"]
        child.kill()
    assert [holder["pid"] for holder in usage["GPU-aaaa-2"]["holders"]] == [child.pid]
    assert usage["GPU-bbbb"]["memory_used"] == 704 * MIB
    assert usage["GPU-aaaa-1"]["holders"] == []
    assert asking.again()["usage"]["GPU-bbbb"] == {"memory_used": 4 * MIB, "holders": []}


def test_a_process_of_another_user_is_named_with_its_user(cards: Cards, asking: Probe) -> None:
    command = [sys.executable, "-c", "import os; os.setuid(65534); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        cards.change("GPU-aaaa-1", processes={child.pid: 10})
        [holder] = asking.ask()["usage"]["GPU-aaaa-1"]["holders"]
        child.kill()
    assert holder["what"].startswith("user nobody: python")


def test_many_processes_on_a_card_are_all_seen(cards: Cards, asking: Probe) -> None:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(20)]
    try:
        cards.change("GPU-bbbb", processes={child.pid: 10 for child in children})
        holders = asking.ask()["usage"]["GPU-bbbb"]["holders"]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [holder["pid"] for holder in holders] == [child.pid for child in children]


def test_a_card_that_is_lost_is_not_offered_and_keeps_its_number(cards: Cards, asking: Probe) -> None:
    cards.change("GPU-aaaa-1", flags=("lost",))

    found = asking.ask()

    assert [device["id"] for device in found["devices"]] == ["GPU-aaaa-2", "GPU-bbbb", CPU]
    assert found["devices"][0]["index"] == 1
    [[what, fix]] = found["troubles"]
    assert what == "GPU 0 cannot be read: GPU is lost"
    assert "restart" in fix
    assert asking.ids(CUDA_VISIBLE_DEVICES="0,1") == ["GPU-aaaa-2", CPU]
    assert "GPU 0 cannot be read" in asking.ask(["GPU-aaaa-1"])["error"]


def test_a_card_that_is_lost_later_counts_as_full_and_held(cards: Cards, asking: Probe) -> None:
    asking.ask()
    cards.change("GPU-bbbb", flags=("lost",))

    usage = asking.again()["usage"]["GPU-bbbb"]

    assert usage["memory_used"] == 81_559 * MIB
    assert usage["holders"] == [{"pid": 0, "what": "its driver cannot read it: GPU is lost"}]
    cards.change("GPU-bbbb", flags=())
    assert asking.again()["usage"]["GPU-bbbb"]["holders"] == []
    # The same where it is gone altogether.
    cards.show(card("aaaa-1"), card("aaaa-2"))
    assert asking.again()["usage"]["GPU-bbbb"]["holders"]


def test_a_card_that_this_user_may_not_open_has_no_number(cards: Cards, asking: Probe) -> None:
    cards.change("GPU-aaaa-1", flags=("denied",))

    found = asking.ask(CUDA_VISIBLE_DEVICES="0")

    assert [device["id"] for device in found["devices"]] == ["GPU-aaaa-2", CPU]
    assert "Insufficient Permissions" in found["troubles"][0][0]
    assert "/dev/nvidia*" in found["troubles"][0][1]


def test_what_a_card_does_not_say_is_not_known(cards: Cards, asking: Probe) -> None:
    cards.show(card("x", flags=("nomemory", "noprocesses", "nomig")))

    found = asking.ask()

    assert found["devices"][0]["memory"] is None
    assert found["usage"]["GPU-x"] == {"memory_used": None, "holders": []}
    assert found["troubles"] == []


def test_the_instances_of_a_card_in_mig_mode_are_devices_and_the_card_is_none(cards: Cards, asking: Probe) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        one, two = instance("11", processes={child.pid: 900}), instance("12", used_mb=30)
        cards.show(card("aaaa", instances=(one, two)), card("bbbb"))
        found = asking.ask()
        child.kill()

    assert [device["id"] for device in found["devices"]] == ["MIG-11", "MIG-12", "GPU-bbbb", CPU]
    assert found["devices"][0]["memory"] == 9_856 * MIB
    assert [device["index"] for device in found["devices"]] == [None, None, 1, None]
    assert [len(found["usage"][name]["holders"]) for name in ("MIG-11", "MIG-12", "GPU-bbbb")] == [1, 0, 0]
    assert found["environments"]["MIG-12"]["CUDA_VISIBLE_DEVICES"] == "MIG-12"
    assert asking.ids(CUDA_VISIBLE_DEVICES="MIG-12,1") == ["MIG-12", "GPU-bbbb", CPU]
    assert asking.ids(CUDA_VISIBLE_DEVICES="0") == ["MIG-11", "MIG-12", CPU]
    assert asking.ids(["MIG-11"]) == ["MIG-11"]
    assert "this machine has MIG-11" in asking.ask(["GPU-aaaa"])["error"]


def test_a_card_in_mig_mode_without_instances_is_told(cards: Cards, asking: Probe) -> None:
    cards.show(card("aaaa", flags=("mig",)), card("bbbb"))

    found = asking.ask()

    assert [device["id"] for device in found["devices"]] == ["GPU-bbbb", CPU]
    assert found["troubles"][0][0] == "GPU 0 (GPU-aaaa) is in MIG mode and has no instances"


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount_v2", "nvmlDeviceGetName", "nvmlDeviceGetMigMode"])
def test_a_call_that_fails_in_any_way_is_told_and_no_bug(cards: Cards, asking: Probe, call: str) -> None:
    cards.show(card("aaaa"), failing={call: UNKNOWN})

    found = asking.ask()

    assert [device["id"] for device in found["devices"]] == [CPU]
    assert "Unknown Error" in found["troubles"][0][0]


def test_a_machine_whose_cards_are_gone_has_its_cpu(cards: Cards, asking: Probe) -> None:
    cards.show()

    found = asking.ask()

    assert ([device["id"] for device in found["devices"]], found["environment"]) == ([CPU], {})


def asked(environment: dict[str, str], folder: Path) -> Json:
    """Return what a new process finds with another library."""
    with probe({**os.environ, **environment, "LD_LIBRARY_PATH": str(folder)}) as asking:
        return asking.ask()


def test_an_old_driver_without_the_newer_calls_will_do(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        cards = Cards(tmp_path, card("aaaa", used_mb=10, processes={child.pid: 90}), old=True)
        found = asked(cards.environment(), tmp_path)
        child.kill()

    usage = found["usage"]["GPU-aaaa"]
    assert [holder["pid"] for holder in usage["holders"]] == [child.pid]
    # Old drivers count what they keep for themselves.
    assert usage["memory_used"] == (100 + 300) * MIB
    assert found["troubles"] == []


@pytest.mark.parametrize(
    ("code", "says", "fix"),
    [
        (9, "driver is not loaded", "modprobe"),
        (18, "different versions", "restart"),
        (4, "may not use the NVIDIA driver", "/dev/nvidia*"),
        (13, "too old", "update"),
        (UNKNOWN, "Unknown Error", "nvidia-smi"),
    ],
)
def test_a_library_that_does_not_start_is_told_in_plain_words(tmp_path: Path, code: int, says: str, fix: str) -> None:
    cards = Cards(tmp_path)
    cards.show(card("aaaa"), failing={"nvmlInitWithFlags": code})

    found = asked(cards.environment(), tmp_path)

    assert ([device["id"] for device in found["devices"]], found["environment"]) == ([CPU], {})
    [[what, hint]] = found["troubles"]
    assert says in what
    assert fix in hint


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("of another machine")

    found = asked({}, tmp_path)

    assert [device["id"] for device in found["devices"]] == [CPU]
    assert found["troubles"][0][0].startswith("the NVIDIA library cannot be loaded")


def test_a_driver_whose_library_is_missing_is_told(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module")
    script = (
        "import sys, pathlib, freight.launchers.nvidia as nvidia\n"
        "nvidia.LIBRARY, nvidia.DRIVER = 'libnvidia-ml.so.none', pathlib.Path(sys.argv[1])\n"
        "cards = nvidia.NvidiaCards()\n"
        "print(cards.devices, cards.driver, [trouble.what for trouble in cards.troubles], cards.environment([]))\n"
    )

    def said(driver: Path) -> str:
        return subprocess.run([sys.executable, "-c", script, str(driver)], check=True, text=True, stdout=-1).stdout

    assert "the NVIDIA driver is loaded, and its library" in said(version)
    assert said(tmp_path / "none") == "() no NVIDIA driver library [] {}\n"
