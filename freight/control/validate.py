"""Every problem of an input file, found without running anything."""

import tempfile
from pathlib import Path

import msgspec

from freight.config import Config
from freight.control.inputs import InputFile, inspect, keep_stream, open_input
from freight.control.intake import Limits, Problem, scan
from freight.core.jsonbytes import text_of, without_lone_surrogates
from freight.core.record import Rules
from freight.errors import UserError


class Flaw(msgspec.Struct, frozen=True):
    """One problem. `line` is None for one of the whole file; `column` counts characters from 1."""

    line: int | None
    column: int | None
    code: str
    message: str
    custom_id: str | None


class Validation(msgspec.Struct, frozen=True):
    """What is wrong with a file. `records` counts its lines that are not blank."""

    file: str
    records: int
    problems: list[Flaw]


def report(file: str, config: Config) -> Validation:
    """Return every problem of a file, by line; raise UserError for one that cannot be read at all."""
    with tempfile.TemporaryDirectory(prefix="freight-") as folder:
        kept = Path(folder) / "input.jsonl"

        def keep(stream: int) -> Path:
            keep_stream(stream, kept)
            return kept

        source = open_input(file, keep)
        try:
            return _report(source, config)
        finally:
            source.close()


def _report(source: InputFile, config: Config) -> Validation:
    limit = config["limits.record_bytes"]
    found: list[Problem] = []
    hosts = frozenset(host.lower() for host in config["media.hosts"])
    index = scan(source, Rules(None, hosts), Limits(limit, None, config["limits.file_bytes"]), found.extend)
    flaws = [_flaw(problem) for problem in sorted(found, key=lambda problem: problem.number)]
    try:
        inspect(source, limit)
    except UserError as error:
        # What `run` refuses as a whole is said first, unless a line below says it already.
        if not any(flaw.code == "invalid_json" for flaw in flaws) or "JSONL" in error.message:
            flaws.insert(0, Flaw(None, None, "refused", error.message, None))
    return Validation(source.shown, index.records, flaws)


def _flaw(problem: Problem) -> Flaw:
    rejection = problem.rejection
    token = rejection.custom_id
    # Written with U+FFFD for a surrogate alone, which JSON output cannot hold.
    custom_id = text_of(without_lone_surrogates(token)) if token and token[:1] == b'"' else None
    return Flaw(problem.number, rejection.column, rejection.code, rejection.message, custom_id)
