"""A real vLLM on the CPU whose processes are killed in turn: none outlives its server, and no record is lost."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

import psutil
import pytest

from freight.launchers.processes import marked
from tests.contract.test_vllm import ARGUMENTS, CHECKPOINT, MISSING, VARIABLES, VENV
from tests.faults.lookout import Lookout, Seen, noted
from tests.faults.moody import details
from tests.faults.services import Served, served
from tests.harness import Json, chat, code, content, model_toml, wait_until

ROUNDS: Final = 10 if os.environ.get("FREIGHT_BIG_TESTS") else 1
# In a round there are four kills, each once so many more records were answered.
ANSWERED: Final = 20
COUNT: Final = 150 * ROUNDS + 150
WINDOW: Final = 8
GONE_S: Final = 5
# A server that starts on a machine that may have little to give.
PATIENCE_S: Final = 300


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Vouch for a vLLM and a checkpoint."""
    assert (VENV / "bin" / "vllm").is_file(), MISSING
    assert (CHECKPOINT / "model.safetensors").is_file(), MISSING


class Vllm:
    """A service with one job on a real vLLM; each start of the server notes what is left of those before."""

    def __init__(self, service: Served) -> None:
        self.service = service
        token = f"f{uuid4().hex[:8]}"
        self._notes = service.folder / "notes"
        self._lookout = Lookout(service.config, service.data, token)
        self.loads = 0
        entry = {"source": str(CHECKPOINT), "executable": str(self._executable()), "context": 256, "gpus": 0}
        model = model_toml("tiny", engine="vllm", args=[*ARGUMENTS, "--max-num-seqs", str(WINDOW)], **entry)
        # What its processes call themselves, and what it is called: they are known whatever their environment says.
        variables = {**VARIABLES, "OMP_NUM_THREADS": "1", "VLLM_PROCESS_NAME_PREFIX": token}
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
        service.configure(f"{model}aliases = [{json.dumps(token)}]\n[models.tiny.env]\n{lines}")
        # The pool's table comes last. At the end of the job its server stays up, for the stop to end.
        service.config.write_text(service.config.read_text() + 'keep_warm = "10m"\n')

    def _executable(self) -> Path:
        """Return a file that stands for vLLM's, in the shape of an environment that has the real package."""
        environment = self.service.folder / "environment"
        (environment / "bin").mkdir(parents=True)
        (environment / "lib").symlink_to(VENV / "lib")
        look = self._lookout
        words = ["--config", look.config, "--data", look.data, "--token", look.token, "--notes", self._notes, "--"]
        start = [sys.executable, "-m", "tests.faults.lookout", *words, VENV / "bin" / "vllm"]
        file = environment / "bin" / "vllm"
        file.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, start))} "$@"\n')
        file.chmod(0o755)
        return file

    def servers(self) -> list[Seen]:
        """Return all processes of vLLM."""
        return self._lookout.servers()

    def api_server(self) -> int:
        """Return the process that listens."""
        [pid] = [one.pid for one in self.servers() if "--uds" in one.words]
        return pid

    def engine_core(self) -> int:
        """Return the process that computes."""
        [pid] = [one.pid for one in self.servers() if one.words[0].endswith("::EngineCore")]
        return pid

    def worker(self) -> int:
        """Return the worker."""
        [pid] = self.service.workers()
        return pid

    def starts(self) -> list[str]:
        """Return what each start of the server found of those before."""
        return noted(self._notes)

    def loaded(self) -> list[str]:
        """Return what the job's timeline says about loads that came to their end."""
        return details(self.service.client.job("real"), "model loaded")

    def answers_more(self) -> None:
        """Wait until the server has come up, if it has not, and answered some records; the job may not be over."""
        wait_until(lambda: len(self.loaded()) == self.loads, f"load {self.loads} is over", PATIENCE_S)
        before = self.service.client.job("real").done
        wait_until(lambda: self.service.client.job("real").done >= before + ANSWERED, "more are done", PATIENCE_S)
        assert self.service.state("real") == "RUNNING", "the job was too short for all kills"
        print(f"load {self.loads}: {before} records done before, vLLM is {[one.name for one in self.servers()]}")
        assert not self.unmarked()

    def unmarked(self) -> list[Seen]:
        """Return the processes of vLLM that nobody would find where there are no control groups."""
        [worker] = [row[0] for row in self.service.ask("SELECT id FROM worker WHERE ended_at IS NULL")]
        found = {process.pid for process in marked(worker)}
        return [one for one in self.servers() if one.pid not in found]

    def end(self) -> None:
        """End what a failed test left."""
        while left := self.servers():
            for one in left:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)


@contextmanager
def vllm(folder: Path) -> Generator[Vllm]:
    """A service whose job has just begun to be answered by vLLM."""
    with served(folder) as service:
        ours = Vllm(service)
        service.write("in.jsonl", [record(index) for index in range(COUNT)])
        service.serve()
        service.submit("in.jsonl", "real", "tiny", concurrency=WINDOW)
        try:
            yield ours
        finally:
            # Before what is left is looked for: a worker would start the next.
            service.end()
            ours.end()


def record(index: int) -> Json:
    """Return a record of the job."""
    return chat(f"r{index}", f"Count from {index}.", max_tokens=4, temperature=0)


def kill(ours: Vllm, victim: Callable[[], int]) -> None:
    """Kill one of the processes; another load must follow, at whose start nothing of the old server is left."""
    ours.answers_more()
    before = {one.pid for one in ours.servers()}
    os.kill(victim(), signal.SIGKILL)
    ours.loads += 1
    wait_until(lambda: len(ours.starts()) == ours.loads, "the next server starts")
    assert ours.starts()[-1] == ""
    assert not before & {one.pid for one in ours.servers()}
    states = [child.status() for child in psutil.Process(ours.worker()).children()]
    assert psutil.STATUS_ZOMBIE not in states, "a worker that lives on keeps no dead ones"


def kill_service(ours: Vllm) -> None:
    """Kill the control plane and start another; it must go on with the worker and the server that there are."""
    ours.answers_more()
    before = (ours.worker(), ours.api_server(), ours.engine_core())
    ours.service.kill()
    ours.service.serve()
    ours.answers_more()
    assert (ours.worker(), ours.api_server(), ours.engine_core()) == before
    assert len(ours.starts()) == ours.loads


def test_vllm_killed_piece_by_piece_leaves_no_process_and_answers_every_record_once(tmp_path: Path) -> None:
    with vllm(tmp_path) as ours:
        service = ours.service
        ours.loads = 1
        for number in range(ROUNDS):
            print(f"round {number}")
            kill(ours, ours.api_server)
            kill(ours, ours.worker)
            kill(ours, ours.engine_core)
            kill_service(ours)
        wait_until(lambda: service.state("real") not in ("QUEUED", "STARTING", "RUNNING"), "it has ended", PATIENCE_S)
        job = service.wait_state("real", "COMPLETED")
        assert (job.done, job.failed) == (COUNT, 0)
        service.client.save_results("real", service.folder / "out.jsonl")
        check_results(service.results("out.jsonl"))
        # It is warm: what the stop has to end is all there.
        assert ours.engine_core()
        assert service.freight("stop").status == 0
        wait_until(lambda: not ours.servers(), "nothing of vLLM is left", GONE_S)
        assert service.is_device_free()
        # The first load, and one after each kill but the control plane's.
        assert ours.loads == 3 * ROUNDS + 1
        assert ours.starts() == [""] * ours.loads
        assert len(details(job, "model loaded")) == ours.loads


def check_results(results: list[Json]) -> None:
    """Assert that there is one answer to each record, in order."""
    assert [line["custom_id"] for line in results] == [f"r{index}" for index in range(COUNT)]
    assert [code(line) for line in results] == [None] * COUNT
    assert all(content(line) for line in results)
