"""Under systemd: which processes belong to a service, and the words that give their workers scopes of their own."""

import logging
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from freight.launchers import cgroup, systemd
from freight.launchers.systemd import Service, own_service, scope_path, scope_prefix, service_of

SYSTEM = "0::/system.slice/freight.service\n"
USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/freight.service\n"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A stand-in for systemd-run that says yes; what it was asked is in the file."""
    stand_in(tmp_path, 'printf "%s\\n" "$*" >> "$0.asked"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    systemd._can_scope.cache_clear()
    yield tmp_path / "systemd-run.asked"
    systemd._can_scope.cache_clear()


def stand_in(folder: Path, script: str) -> None:
    program = folder / "systemd-run"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str) -> None:
    """Have this process be a member of these groups, with cgroup v2 mounted in a folder of the test's."""
    (tmp_path / "cgroup").write_text(membership)
    mount = tmp_path / "mount"
    (mount / membership.strip().rpartition(":")[2][1:]).mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(
        f"29 23 0:26 / /hidden rw - cgroup2 cgroup2 rw\n30 23 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"
    )
    monkeypatch.setattr(systemd, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "_MOUNTS", tmp_path / "mountinfo")


@pytest.mark.parametrize(
    ("membership", "unit", "slice_name", "user"),
    [
        (SYSTEM, "/system.slice/freight.service", "system.slice", False),
        ("0::/freight.service\n", "/freight.service", "-.slice", False),
        ("0::/a.slice/a-b.slice/freight.service/part\n", "/a.slice/a-b.slice/freight.service", "a-b.slice", False),
        (USER, USER[3:-1], "app.slice", True),
        ("0::/x/user@0.service/freight.service\n", "/x/user@0.service/freight.service", "-.slice", True),
        # Hybrid and older layouts: the hierarchy named systemd tells.
        (
            "4:memory:/x\n1:name=systemd:/system.slice/f.service\n0::/\n",
            "/system.slice/f.service",
            "system.slice",
            False,
        ),
    ],
)
def test_process_of_a_service_knows_it(membership: str, unit: str, slice_name: str, user: bool) -> None:
    service = service_of(membership)
    assert service is not None
    assert (str(service.path), service.slice, service.user) == (unit, slice_name, user)


@pytest.mark.parametrize(
    "membership",
    [
        "0::/\n",
        "",
        "4:memory:/system.slice/a.service\n0::/\n",
        "0::/user.slice/user-1000.slice/session-2.scope\n",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-1.scope\n",
        "0::/user.slice/user-1000.slice/user@1000.service/init.scope\n",
        "0::/system.slice/docker-0123.scope\n",
        "0::/user.slice/user-1000.slice/user@1000.service\n",
    ],
)
def test_process_of_a_session_or_a_container_belongs_to_no_service(membership: str) -> None:
    assert service_of(membership) is None


def test_outside_of_systemd_the_command_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    belongs(monkeypatch, tmp_path, "0::/user.slice/user-1000.slice/session-2.scope\n")
    monkeypatch.setenv("INVOCATION_ID", "0123456789abcdef0123456789abcdef")
    assert scope_prefix("w1") == []
    assert scope_path("w1") is None
    monkeypatch.setattr(systemd, "_MEMBERSHIP", tmp_path / "absent")
    assert own_service() is None


@pytest.mark.parametrize(("membership", "kind"), [(SYSTEM, "--system"), (USER, "--user")])
def test_worker_of_a_service_gets_a_scope_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Path, membership: str, kind: str
) -> None:
    belongs(monkeypatch, tmp_path, membership)
    service = service_of(membership)
    assert isinstance(service, Service)
    prefix = scope_prefix("0a1b2c")
    assert prefix[:3] == ["systemd-run", "--scope", kind]
    assert prefix[-1] == "--"
    assert {"--unit=freight-worker-0a1b2c", f"--slice={service.slice}", "--property=Delegate=yes"} <= set(prefix)
    beside = tmp_path / "mount" / service.path.parent.relative_to("/")
    assert scope_path("0a1b2c") == beside / "freight-worker-0a1b2c.scope"
    scope_prefix("another")
    # Asked once, not for each worker.
    assert asked.read_text() == f"--scope {kind} --quiet --collect --no-ask-password -- true\n"


def test_service_that_may_have_no_scopes_says_so_once_and_starts_workers_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    belongs(monkeypatch, tmp_path, SYSTEM)
    stand_in(tmp_path, "echo 'Failed to start transient scope unit: Access denied' >&2; exit 1")
    with caplog.at_level(logging.WARNING):
        assert scope_prefix("w1") == []
        assert scope_prefix("w2") == []
    assert not asked.exists()
    [said] = caplog.messages
    assert "Access denied" in said
    assert "workers will end when this service is stopped or restarted" in said


def test_service_without_systemd_run_starts_workers_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Path
) -> None:
    belongs(monkeypatch, tmp_path, SYSTEM)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert scope_prefix("w1") == []
    assert not asked.exists()


@pytest.mark.parametrize("worker", ["", "a b", "a/b", "--user", "a@b"])
def test_worker_that_cannot_name_a_unit_is_refused(worker: str) -> None:
    with pytest.raises(ValueError, match="no control group"):
        scope_prefix(worker)
