"""A real systemd that runs the service: its restart leaves workers and their models alone, and its stop can be cleared.

A user's manager is booted for each test, with control groups and a runtime folder of its own.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from freight.launchers.cgroup import Group, own_folder
from tests.faults.runs import records
from tests.faults.services import Served, served
from tests.harness import wait_until
from tests.unit.test_cgroup import can_have_groups

COUNT = 300
BOOT_S = 20
# Its own view of the control groups, and of whether the machine runs systemd; nothing of it is seen outside.
BOOT = """\
set -e
echo 0 > "$1/cgroup.procs"
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /run/systemd
mount -t tmpfs none /run/systemd
mkdir /run/systemd/system
exec /lib/systemd/systemd --user --unit=base.target
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not can_have_groups(), reason="only root, with control groups of its own, can boot a systemd"
)


class Systemd:
    """A user's manager that runs, in control groups below `top`; `runtime` is its folder for sockets."""

    def __init__(self, top: Path, runtime: Path, units: Path) -> None:
        self._top = top
        self._runtime = runtime
        self._units = units
        self._manager: subprocess.Popen[bytes] | None = None

    def boot(self, log: Path) -> None:
        """Boot it."""
        (self._units / "base.target").write_text("[Unit]\nDescription=Base\nDefaultDependencies=no\n")
        own = self._top / "user@0.service"
        own.mkdir(parents=True)
        with log.open("wb") as said:
            self._manager = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", BOOT, "sh", str(own)],
                env={**self._environment(), "SYSTEMD_UNIT_PATH": str(self._units), "SYSTEMD_LOG_TARGET": "console"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        socket = self._runtime / "systemd" / "private"
        wait_until(lambda: socket.exists() or not self.runs(), f"systemd answers; it said {log.read_text()}", BOOT_S)
        assert self.runs(), log.read_text()

    def runs(self) -> bool:
        """Return whether it runs."""
        return self._manager is not None and self._manager.poll() is None

    def ctl(self, *words: str) -> str:
        """Run `systemctl --user WORDS` and return what it says."""
        command = ["systemctl", "--user", "--no-pager", *words]
        done = subprocess.run(
            command, env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done
        return done.stdout

    def scopes(self) -> list[str]:
        """Return the names of the scopes that workers have."""
        listed = self.ctl("list-units", "--plain", "--no-legend", "--type=scope", "freight-worker-*")
        return [line.split()[0] for line in listed.splitlines()]

    def inside(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command that sees the machine as this systemd's services do."""
        assert self._manager is not None
        words = ["nsenter", f"--mount=/proc/{self._manager.pid}/ns/mnt", *command]
        return subprocess.run(
            words, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    def service(self, name: str, box: Served, *extra: str) -> None:
        """Write the unit of a service that runs `freight serve` for a box."""
        kept = ("FREIGHT_", "PYTHON", "PATH", "TMPDIR", "HOME")
        variables = {key: value for key, value in box.environment().items() if key.startswith(kept)}
        lines = [
            "[Unit]", "DefaultDependencies=no", "[Service]",
            f"ExecStart={shlex.quote(sys.executable)} -m freight serve", f"WorkingDirectory={box.folder}",
            *(f'Environment="{key}={value}"' for key, value in variables.items()),
            f"StandardOutput=append:{box.log}", f"StandardError=append:{box.log}", *extra,
        ]  # fmt: skip
        (self._units / f"{name}.service").write_text("\n".join(lines) + "\n")

    def end(self) -> None:
        """End it and all that it runs."""
        group = Group(self._top)
        group.kill()
        if self._manager is not None:
            self._manager.wait(10)
        wait_until(group.remove, "its control groups are gone", 10)

    def _environment(self) -> dict[str, str]:
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("DBUS_", "SYSTEMD_"))}
        return {**plain, "XDG_RUNTIME_DIR": str(self._runtime)}


@contextmanager
def booted(folder: Path) -> Generator[Systemd]:
    """A systemd, for as long as the block takes."""
    own = own_folder()
    assert own is not None
    (folder / "units").mkdir()
    # Not below the test's folder: the paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="sd") as runtime:
        systemd = Systemd(own / f"systemd-{uuid4().hex[:12]}", Path(runtime), folder / "units")
        try:
            systemd.boot(folder / "systemd.log")
            yield systemd
        finally:
            systemd.end()


def at_work(service: Served, systemd: Systemd) -> int:
    """Have systemd run the service, with a job that is at work; return the worker's pid."""
    service.own_engine("--latency", "0.1")
    service.write("in.jsonl", records(COUNT))
    systemd.service("freight", service)
    systemd.ctl("start", "freight.service")
    wait_until(service.answers, "the service answers")
    service.submit("in.jsonl", "job", concurrency=8)
    wait_until(lambda: len(service.received()) > COUNT // 10, "the engine is at work")
    [worker] = service.workers()
    return worker


def test_restart_by_systemd_keeps_the_worker_and_its_model(tmp_path: Path) -> None:
    with served(tmp_path) as service, booted(tmp_path) as systemd:
        worker = at_work(service, systemd)
        before = service.client.version().pid
        assert len(systemd.scopes()) == 1
        systemd.ctl("restart", "freight.service")
        service.disconnect()
        wait_until(service.answers, "the next service answers")
        assert service.client.version().pid != before
        assert service.workers() == [worker]
        service.completes("job", COUNT)
        assert service.starts() == 1
        assert sorted(service.received()) == list(range(COUNT))
        assert service.freight("stop").status == 0
        wait_until(lambda: not systemd.scopes(), "the scope is gone")
        service.nothing_left()


def test_workers_that_a_stop_by_systemd_left_are_ended_by_freight_stop(tmp_path: Path) -> None:
    with served(tmp_path) as service, booted(tmp_path) as systemd:
        worker = at_work(service, systemd)
        systemd.ctl("stop", "freight.service")
        service.disconnect()
        assert service.workers() == [worker]
        stopped = systemd.inside(sys.executable, "-m", "freight", "stop", **service.environment())
        assert stopped.returncode == 0, stopped
        assert "ended a worker that was left" in stopped.stderr
        wait_until(lambda: not systemd.scopes(), "the scope is gone")
        assert not service.processes()
        assert not list(service.runtime.iterdir())
        assert service.is_device_free()
