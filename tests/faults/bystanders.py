"""Processes of somebody else's that look much like ours: whatever ends ours must leave them alone."""

import os
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

from freight.launchers.cgroup import make_group
from freight.launchers.processes import MARKER
from tests.harness import wait_until


@contextmanager
def foreign(name: str, **variables: str) -> Generator[subprocess.Popen[bytes]]:
    """A process of somebody else's that looks much like one of ours; it must live for as long as the block takes."""
    child = subprocess.Popen([name, "600"], executable="/bin/sleep", env={**os.environ, **variables})
    try:
        yield child
        assert child.poll() is None, f"{name} was ended"
    finally:
        child.kill()
        child.wait()


@contextmanager
def bystanders(worker: str, token: str) -> Generator[None]:
    """Processes that only look as if they were the worker's; they must live for as long as the block takes."""
    with ExitStack() as stack:
        for name, variables in (
            (f"{token}x", {MARKER: f"{worker}x"}),
            (f"freight.worker --worker {worker}", {MARKER: uuid4().hex[:12]}),
            (f"{MARKER}={worker}", {"NOTE": f"{MARKER}={worker}"}),
            ("sleep", {f"X{MARKER}": worker}),
        ):
            stack.enter_context(foreign(name, **variables))
        stack.enter_context(_another_group(f"{worker}x"))
        yield


@contextmanager
def _another_group(worker: str) -> Generator[None]:
    """A process in the control group of another worker, where groups are to be had."""
    group = make_group(worker)
    if group is None:
        yield
        return
    try:
        with foreign("sleep") as other:
            group.add(other.pid)
            yield
            assert group.pids() == [other.pid]
    finally:
        wait_until(group.remove, "the other group is gone", 10)
