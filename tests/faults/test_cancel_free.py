"""A running job that is cancelled: its device is another's as soon as the job shows CANCELLED."""

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from freight.core.device import Holder
from freight.launchers.locks import lock_device, lock_folder
from tests.faults.runs import records
from tests.faults.services import Served, served
from tests.harness import wait_until

TIMES: Final = 10
# From the cancel to the device's being free.
PATIENCE_S: Final = 10


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A service whose model takes its time with each record."""
    with served(tmp_path_factory.mktemp("cancel")) as service:
        service.own_engine("--latency", "600")
        service.write("in.jsonl", records(5))
        service.serve()
        yield service


@pytest.mark.parametrize("time", range(TIMES))
def test_device_of_a_cancelled_job_is_free_when_the_job_shows_it(time: int, service: Served) -> None:
    name = f"job-{time}"
    service.submit("in.jsonl", name)
    service.wait_state(name, "RUNNING")
    wait_until(lambda: len(service.received()) >= 5 * (time + 1), "its records are under way")
    service.client.cancel(name)
    wait_until(lambda: service.state(name) == "CANCELLED", "it is cancelled", PATIENCE_S)
    # At once, without another look: what is cancelled holds nothing.
    held = lock_device(service.device, lock_folder())
    assert not isinstance(held, Holder), held
    os.close(held)
    assert not service.workers()
    assert not service.engines()
    [device] = service.client.devices()
    assert (device.state, device.holder, device.job) == ("free", "", None)
    shown = json.loads(service.freight("ps", "--json").stdout)
    assert (shown["jobs"], shown["workers"]) == ([], [])


def test_run_that_is_interrupted_leaves_its_device_free(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        service.own_engine("--latency", "600")
        service.write("in.jsonl", records(5))
        child = service.start("run", "in.jsonl", "-o", "out.jsonl", "--model", "mine")
        wait_until(service.received, "its records are under way")
        os.killpg(child.pid, signal.SIGINT)
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130
        assert service.is_device_free()
        assert not service.processes()
