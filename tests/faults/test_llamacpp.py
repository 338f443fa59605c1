"""The real llama.cpp with a worker killed in the middle of a job."""

import json
import os
import signal
from pathlib import Path
from typing import Final

from tests.faults.moody import details, places_of_starts
from tests.faults.services import served
from tests.harness import code, parse_lines, wait_until
from tests.service import SMALL

COUNT: Final = 200
PATIENCE_S: Final = 120


def test_records_of_a_killed_worker_are_answered_by_the_others_once_and_in_order(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        devices = [f"{service.device}0", f"{service.device}1"]
        service.config.write_text(f"[pools.local]\ndevices = {json.dumps(devices)}\n")
        # Without a chat template, which would be most of what the model has to read.
        bodies = [{"prompt": f"{index}, {index + 1},", "max_tokens": 3, "temperature": 0} for index in range(COUNT)]
        given = [{"custom_id": f"r{n}", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
        service.write("in.jsonl", given)
        # On one core each server has one thread. Those of several would wait for each other most of the time, where
        # there are no more cores than one server has threads.
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        try:
            service.serve()
        finally:
            os.sched_setaffinity(0, cores)
        service.submit("in.jsonl", "real", SMALL, workers=2)
        wait_until(lambda: len(details(service.client.job("real"), "model loaded")) == 2, "both are up")
        wait_until(lambda: service.client.job("real").done >= COUNT // 3, "a good part is done", PATIENCE_S)
        killed = service.workers()[0]
        assert len(service.workers()) == 2
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: service.state("real") not in ("STARTING", "RUNNING"), "it has ended", PATIENCE_S)
        job = service.wait_state("real", "COMPLETED")
        assert (job.done, job.failed) == (COUNT, 0)
        service.client.save_results("real", service.folder / "out.jsonl")
        results = parse_lines((service.folder / "out.jsonl").read_bytes())
        assert [line["custom_id"] for line in results] == [f"r{index}" for index in range(COUNT)]
        assert [code(line) for line in results] == [None] * COUNT
        assert all(line["response"]["body"]["choices"][0]["text"] for line in results)
        assert {json.loads(place)[0] for place in places_of_starts(service.data / "catalog.db")} == set(devices)
