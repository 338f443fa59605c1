"""The machinery of the cases: what each input must come to, and runs of all of them, a few at a time."""

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cases.gen import MAKERS
from tests.harness import CASES, Box, Engine, Finished, Json, code, content

BIG = bool(os.environ.get("FREIGHT_BIG_TESTS"))
AT_ONCE = 3


def input_of(name: str, folder: Path, most: int | None = None) -> Path:
    """Return the path of an input: one of the files, or one that is generated into `folder` (`most` lines of it)."""
    if name not in MAKERS:
        return CASES / "inputs" / name
    path = folder / f"{name}.jsonl"
    with path.open("w") as file:
        for number, line in enumerate(MAKERS[name](), start=1):
            file.write(line + "\n")
            if number == most:
                break
    return path


def bodies(path: Path) -> dict[str, bytes]:
    """Return the bytes of each record's body by its custom_id, as they stand in the file.

    Bodies are the last member of the records that this is used for.
    """
    found: dict[str, bytes] = {}
    for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        text = line.strip(b" \t\r")
        if text:
            found[json.loads(text)["custom_id"]] = text[text.index(b'"body":') + len(b'"body":') : -1]
    return found


@dataclass(frozen=True)
class Case:
    """What `freight run` makes of one input.

    `refused`: what the refusal says, for a file that is refused at its start. Else `records` counts the result
    lines, `bad` are intake codes by line number, `failed` other codes by custom_id; all other records are
    answered. `also` looks closer.
    """

    number: int
    file: str
    records: int = 0
    refused: tuple[str, ...] = ()
    bad: dict[int, str] = field(default_factory=dict[int, str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    also: "Callable[[Ran], None] | None" = None
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])


class Ran:
    """A case that was run: leniently, and with --strict where it has bad lines."""

    def __init__(self, case: Case, folder: Path, engine: Engine) -> None:
        folder.mkdir()
        self.case = case
        self.engine = engine
        self.box = Box(folder)
        self.input = input_of(case.file, folder)
        self.done = self.run("out.jsonl", *case.options)
        self.strict = self.run("strict.jsonl", "--strict", *case.options) if case.bad else None

    def run(self, output: str, *options: str, file: Path | None = None) -> Finished:
        """Run the input, or another file, through the engine."""
        return self.box.freight(
            "run", str(file or self.input), "-o", output, "--model", self.engine.url, *options, **self.case.env
        )

    @cached_property
    def results(self) -> list[Json]:
        """The result lines."""
        return self.box.results()

    @cached_property
    def by_id(self) -> dict[str, Json]:
        """The result lines by custom_id; those without one are left out."""
        return {line["custom_id"]: line for line in self.results if line["custom_id"] is not None}

    @cached_property
    def received(self) -> list[tuple[str, bytes]]:
        """What the engine has received so far, of this case and others."""
        return self.engine.received()

    def sent(self, body: bytes) -> int:
        """Return how often the engine received exactly this body."""
        return sum(received == body for _, received in self.received)

    def body(self, custom_id: str) -> bytes:
        """Return the bytes of a record's body."""
        return bodies(self.input)[custom_id]

    def content(self, custom_id: str) -> str:
        """Return the text that a record was answered with."""
        return content(self.by_id[custom_id])

    def check(self) -> None:
        """Assert what the table says."""
        if self.case.refused:
            self._check_refusal()
        else:
            self._check_results()
        if self.strict is not None:
            check_refused(self.box, self.strict, "strict.jsonl")
            for line, name in self.case.bad.items():
                assert f"{self.input}, line {line}: {name}: " in self.strict.stderr
        if self.case.also is not None:
            self.case.also(self)

    def _check_refusal(self) -> None:
        check_refused(self.box, self.done, "out.jsonl")
        assert str(self.input) in self.done.stderr
        for text in self.case.refused:
            assert text in self.done.stderr

    def _check_results(self) -> None:
        case = self.case
        assert self.done.status == 0, self.done.stderr
        assert self.done.stdout == ""
        assert len(self.results) == case.records
        assert [line["id"].rpartition("-")[2] for line in self.results] == [str(i) for i in range(case.records)]
        errors = [line for line in self.results if line["error"]]
        assert {line["error"]["line"]: code(line) for line in errors if "line" in line["error"]} == case.bad
        assert {line["custom_id"]: code(line) for line in errors if "line" not in line["error"]} == case.failed
        for line in self.results:
            assert line["error"] or line["response"]["status_code"] == 200
        count = len(case.bad) + len(case.failed)
        closing = f"{count} of {case.records} failed: "
        assert self.done.last_line().startswith(closing) if count else "failed" not in self.done.stderr


def check_refused(box: Box, done: Finished, output: str) -> None:
    """Assert that a run was refused as users see it, and has left nothing behind."""
    assert done.status == 2, done.stderr
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert done.last_line().startswith("hint: ")
    assert not (box.folder / output).exists()
    assert not (box.folder / f"{output}.freight").exists()


class Runs:
    """Runs of cases, started together and looked at one by one."""

    def __init__(self, cases: Iterable[Case], folder: Path, engine: Engine) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._ran: dict[int, Future[Ran]] = {
            case.number: self._pool.submit(Ran, case, folder / str(case.number), engine) for case in cases
        }

    def __getitem__(self, number: int) -> Ran:
        return self._ran[number].result()

    def close(self) -> None:
        """Wait for those that run; what has not begun does not."""
        self._pool.shutdown(cancel_futures=True)


def selected(items: Iterable[Any], cases: Iterable[Case]) -> list[Case]:
    """Return the cases that collected tests ask for."""
    numbers = {item.callspec.params.get("number") for item in items if hasattr(item, "callspec")}
    return [case for case in cases if case.number in numbers]
