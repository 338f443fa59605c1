"""AMD's GPUs, as the package amdsmi tells of them. No release of it works without its driver: a module stands in."""

import json
import os
from pathlib import Path
from typing import Final

import pytest

from tests.harness import Json
from tests.nvml import Cards, card
from tests.nvml.probe import AMD_DRIVER, probe

CPU: Final = "cpu:0"

# The calls of amdsmi that are used, with the shapes of its reference; the cards are in a file beside it.
AMDSMI: Final = """
import json, pathlib

class AmdSmiException(Exception):
    pass

def _card(handle):
    cards = json.loads(pathlib.Path(__file__).with_name("amd.json").read_text())
    if cards[handle].get("broken"):
        raise AmdSmiException("AMDSMI_STATUS_BUSY")
    return cards[handle]

def amdsmi_init():
    if pathlib.Path(__file__).with_name("no-driver").exists():
        raise AmdSmiException("AMDSMI_STATUS_DRIVER_NOT_LOADED")

def amdsmi_get_processor_handles():
    return list(range(len(json.loads(pathlib.Path(__file__).with_name("amd.json").read_text()))))

def amdsmi_get_gpu_device_uuid(handle):
    return _card(handle)["uuid"]

def amdsmi_get_gpu_enumeration_info(handle):
    return {"hip_id": _card(handle).get("hip_id", "N/A"), "hip_uuid": _card(handle).get("hip_uuid", "N/A")}

def amdsmi_get_gpu_asic_info(handle):
    return {"market_name": "AMD Instinct MI300X"}

def amdsmi_get_gpu_vram_usage(handle):
    return {"vram_total": 196592, "vram_used": _card(handle).get("used", 283)}

def amdsmi_get_gpu_process_list(handle):
    return [
        {"pid": pid, "name": "python", "memory_usage": {"gtt_mem": 0, "cpu_mem": 9, "vram_mem": memory}}
        for pid, memory in _card(handle).get("pids", ())
    ]
"""
TWO: Final = [
    {"uuid": "0aff74a1-0000-1000-8000-000000000000", "hip_uuid": "GPU-00a1", "hip_id": 1},
    {"uuid": "0bff74a1-0000-1000-8000-000000000000", "hip_uuid": "GPU-00b2", "hip_id": 0},
]


def asked(folder: Path, cards: list[Json], declared: list[str] | None = None, **environment: str) -> Json:
    """Return what is found with these cards; the variables limit them."""
    (folder / "amdsmi.py").write_text(AMDSMI)
    (folder / "amd.json").write_text(json.dumps(cards))
    if "LD_LIBRARY_PATH" not in environment:
        (folder / "libnvidia-ml.so.1").write_text("none")
    paths = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder), AMD_DRIVER: str(folder)}
    with probe({**os.environ, **paths, **environment}) as asking:
        return asking.ask(declared, **environment)


def ids(found: Json) -> list[str]:
    """Return the ids of the devices that may be used."""
    return [device["id"] for device in found["devices"]]


def test_cards_are_devices_in_hips_order(tmp_path: Path) -> None:
    found = asked(tmp_path, [{**TWO[0], "pids": [(os.getpid(), 5), (1, 0)]}, TWO[1]])

    assert ids(found) == ["GPU-00b2", "GPU-00a1", CPU]
    assert found["devices"][1] == {
        "id": "GPU-00a1", "kind": "amd", "name": "AMD Instinct MI300X", "memory": 196592 << 20, "index": 1,
    }  # fmt: skip
    usage = found["usage"]["GPU-00a1"]
    assert usage["memory_used"] == 283 << 20
    assert [holder["pid"] for holder in usage["holders"]] == [os.getpid()]
    assert found["environments"]["GPU-00a1"] == {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}
    # An empty text would mean no limit.
    assert found["environments"][CPU] == {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["GPU-00a1"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, ["GPU-00b2", "GPU-00a1"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["GPU-00b2"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00a1"}, ["GPU-00a1"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["GPU-00a1"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ],
)
def test_variables_limit_what_may_be_used(tmp_path: Path, limits: dict[str, str], left: list[str]) -> None:
    assert ids(asked(tmp_path, TWO, **limits)) == [*left, CPU]


def test_a_workers_numbers_count_within_what_the_runtime_leaves(tmp_path: Path) -> None:
    found = asked(tmp_path, TWO, ROCR_VISIBLE_DEVICES="1")

    assert found["environments"]["GPU-00a1"]["HIP_VISIBLE_DEVICES"] == "0"


def test_a_declared_card_that_a_variable_hides_is_refused_with_its_name(tmp_path: Path) -> None:
    refused = asked(tmp_path, TWO, ["GPU-00b2"], HIP_VISIBLE_DEVICES="1")

    assert "GPU-00b2, which HIP_VISIBLE_DEVICES=1 hides" in refused["error"]


def test_a_card_that_cannot_be_read_is_not_offered(tmp_path: Path) -> None:
    found = asked(tmp_path, [TWO[0], {"broken": True}])

    assert ids(found) == ["GPU-00a1", CPU]
    assert found["troubles"][-1][0] == "AMD GPU 1 cannot be read: AMDSMI_STATUS_BUSY"
    # HIP goes on counting it.
    assert found["environment"]["HIP_VISIBLE_DEVICES"] == "1"


def test_without_hips_own_names_the_drivers_are_taken(tmp_path: Path) -> None:
    found = asked(tmp_path, [{"uuid": "0aff74a1"}, {"uuid": "0bff74a1"}])

    assert ids(found) == ["0aff74a1", "0bff74a1", CPU]
    assert found["environment"]["HIP_VISIBLE_DEVICES"] == "0,1"


def test_a_driver_that_is_not_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "no-driver").touch()

    found = asked(tmp_path, TWO)

    assert (ids(found), found["environment"]) == ([CPU], {})
    assert ["DRIVER_NOT_LOADED" in what for what, _ in found["troubles"]].count(True) == 1


def test_a_package_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "package" / "amdsmi").mkdir(parents=True)
    (tmp_path / "package" / "amdsmi" / "__init__.py").write_text("raise KeyError('ROCM_PATH')")
    with probe({**os.environ, "PYTHONPATH": str(tmp_path / "package"), AMD_DRIVER: str(tmp_path)}) as asking:
        found = asking.ask()

    assert ids(found) == [CPU]
    assert "the package amdsmi cannot be imported" in found["troubles"][-1][0]


def test_a_card_that_does_not_say_has_no_known_memory(tmp_path: Path) -> None:
    found = asked(tmp_path, [{**TWO[0], "used": "N/A"}])

    assert found["usage"]["GPU-00a1"]["memory_used"] is None


def test_a_package_without_a_driver_is_left_alone(tmp_path: Path) -> None:
    found = asked(tmp_path, TWO, **{AMD_DRIVER: str(tmp_path / "none")})

    assert (ids(found), found["troubles"][1:]) == ([CPU], [])


def test_cards_of_both_makers_are_kept_apart(tmp_path: Path) -> None:
    cards = Cards(tmp_path / "nvidia", card("aaaa"))

    found = asked(tmp_path, TWO, **cards.environment())

    assert ids(found) == ["GPU-aaaa", "GPU-00b2", "GPU-00a1", CPU]
    environments = found["environments"]
    assert environments["GPU-aaaa"]["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa"
    assert environments["GPU-aaaa"]["HIP_VISIBLE_DEVICES"] == "-1"
    assert environments["GPU-00a1"]["CUDA_VISIBLE_DEVICES"] == ""
    assert environments["GPU-00a1"]["HIP_VISIBLE_DEVICES"] == "1"
