"""What a worker takes of a machine, and what is refused because no machine has it."""

from pathlib import Path
from typing import Final

import pytest

from freight.control.placing import check_place, gpus_of, need_of
from freight.core.device import Device, DeviceKind
from freight.core.model import EngineName, ModelEntry, ModelSpec
from freight.errors import UserError

CPU: Final = Device("cpu:0", DeviceKind.CPU)
GPUS: Final = tuple(Device(f"GPU-{name}", DeviceKind.NVIDIA, index=index) for index, name in enumerate("abcd"))
BOX: Final = (*GPUS[:2], CPU)


def model(gpus: int | None = None, engine: EngineName = EngineName.COMMAND, source: str = "") -> ModelSpec:
    """Return a model whose entry asks for so many GPUs."""
    command = ["serve", "{port}"] if engine is EngineName.COMMAND else []
    entry = ModelEntry(engine=engine, source=source, command=command, gpus=gpus)
    return ModelSpec("m", entry, "m", None, None, frozenset(), {})


LAB: Final = model(engine=EngineName.ENDPOINT, source="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("entry", "asked", "devices", "takes"),
    [
        (None, None, BOX, 1),
        (None, None, (CPU,), 0),
        (None, None, GPUS, 1),
        (2, None, BOX, 2),
        (0, None, BOX, 0),
        (2, 1, BOX, 1),
        (2, 0, BOX, 0),
        (0, 2, BOX, 2),
        (None, 2, BOX, 2),
        (None, 0, (CPU,), 0),
        (1, None, BOX, 1),
    ],
)
def test_a_worker_takes_what_is_asked_for_else_what_its_model_says_else_a_gpu_where_there_is_one(
    entry: int | None, asked: int | None, devices: tuple[Device, ...], takes: int
) -> None:
    assert gpus_of(model(entry), asked, devices) == takes
    assert check_place("the job", model(entry), asked, devices) == takes


@pytest.mark.parametrize(
    ("entry", "asked", "devices", "says", "fix"),
    [
        (None, 3, BOX, "the job asks for 3 GPUs per worker; the largest machine here has 2", "use --gpus 2"),
        (5, None, GPUS, "the job asks for 5 GPUs per worker; the largest machine here has 4", "use --gpus 4"),
        (None, 1, (CPU,), "this machine's pool has CPU devices only", "leave out --gpus"),
        (1, None, (CPU,), "this machine's pool has CPU devices only", "gpus = 0"),
        (0, None, GPUS, "model m runs on the CPU, and pools.local.devices names GPUs only", '"cpu:0"'),
        (2, 0, GPUS, "model m runs on the CPU", '"cpu:0"'),
    ],
)
def test_what_no_machine_has_is_refused_with_what_there_is(
    entry: int | None, asked: int | None, devices: tuple[Device, ...], says: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_place("the job", model(entry), asked, devices)
    assert says in caught.value.message
    assert fix in (caught.value.hint or "")


def test_a_server_that_runs_already_takes_no_device_and_refuses_to_be_asked() -> None:
    assert gpus_of(LAB, None, BOX) == check_place("the job", LAB, None, BOX) == 0
    assert need_of(LAB, 0).store == ""
    # That it shall have none is no wish that could not be met.
    assert check_place("the job", LAB, 0, BOX) == 0
    with pytest.raises(UserError, match="--gpus 1 has no effect"):
        check_place("the job", LAB, 1, BOX)


def test_what_is_loaded_from_one_file_system_is_known_to_be(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    stores = {need_of(model(source=str(path)), 1).store for path in (tmp_path, tmp_path / "one")}
    assert stores == {str(tmp_path.stat().st_dev)}
    assert need_of(model(source=str(tmp_path / "none")), 1).store == ""
    assert need_of(model(), 2).gpus == 2


@pytest.mark.parametrize(("gpus", "devices"), [(0, 1), (1, 1), (3, 3)])
def test_a_worker_takes_whole_devices(gpus: int, devices: int) -> None:
    need = need_of(model(), gpus)
    assert need.devices == devices
    assert not need.staggers
