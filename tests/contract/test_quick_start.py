"""What a run does not import: a small file is done in less time than much of that takes."""

from typing import Final

from tests.harness import Box, Engine, chat, imports

# By module: most of a package may be needed, and one costly part of it not.
NEEDLESS: Final = (
    "fastapi", "starlette", "pydantic", "httpx", "huggingface_hub", "joserfc", "jinja2", "prometheus_client", "rich",
    "numpy.ma", "freight.core.view", "freight.core.openaibatch", "freight.control.service", "freight.store.fetching",
)  # fmt: skip
OF_THE_CONTROL_PLANE: Final = ("numpy", "apsw", "uvicorn", "click", "platformdirs", "freight.control", "freight.config")


def test_a_run_imports_nothing_that_it_never_needs(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat("a")])
    done, names = imports(box, "freight", "run", str(box.folder / "in.jsonl"), "-o", "out.jsonl", "--model", sim.url)

    assert done.status == 0
    assert "1 of 1 records answered" in done.stderr
    assert "freight.control.embedded" in names
    assert names.isdisjoint(NEEDLESS), names & set(NEEDLESS)


def test_a_worker_imports_nothing_of_the_control_plane(box: Box) -> None:
    done, names = imports(box, "freight.worker", "--help")

    assert done.status == 0
    assert "freight.worker.agent" in names
    unwanted = {*NEEDLESS, *OF_THE_CONTROL_PLANE}
    assert names.isdisjoint(unwanted), names & unwanted
