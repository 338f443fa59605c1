"""Files as the OpenAI API has them: their ids and shapes, and the lines of a batch's output and error files."""

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from freight.core import jsonbytes
from freight.core.job import Totals

# The API by which a job came whose results are such files.
OPENAI: Final = "openai"
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
MOST_FILENAME: Final = 255
# How long a file may be asked to last, in seconds: an hour to thirty days.
EXPIRY_S: Final = (3600, 2_592_000)
RANDOM_BYTES: Final = 10
_INPUT: Final = re.compile(r"file-([0-9a-f]{12})[0-9a-f]{20}")
_RESULT: Final = re.compile(r"file-(?:out|err)-([0-9a-f]{8})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{12})")


class Part(StrEnum):
    """Which of a batch's two files: the records that were answered, or those that were not."""

    OUTPUT = "output"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    """A file, as the OpenAI API shows it. Times are whole seconds of the clock of day."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList:
    """A page of files; `last_id` is where the next begins."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDeleted:
    """A file that is no more."""

    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


def input_id(at_ms: int, random: bytes) -> str:
    """Return the id of a new file: when it was made (milliseconds) and RANDOM_BYTES by which nobody guesses it."""
    return f"file-{at_ms:012x}{random.hex()}"


def made_at(file: str) -> float | None:
    """Return when an input was made, as its id says, so that a list can go on after one that was deleted.

    None for what is no input's id.
    """
    found = _INPUT.fullmatch(file)
    return None if found is None else int(found[1], 16) / 1000


def result_id(job: str, part: Part) -> str:
    """Return the id of a job's output or error file."""
    return f"file-{'out' if part is Part.OUTPUT else 'err'}-{job.replace('-', '')}"


def job_of(file: str) -> str | None:
    """Return the job whose output or error file has such an id, None for other ids."""
    found = _RESULT.fullmatch(file)
    return None if found is None else "-".join(found.groups())


def result_name(job: str, part: Part) -> str:
    """Return the name that a job's output or error file is shown under."""
    return f"batch_{job.replace('-', '')}_{part}.jsonl"


def parts_of(records: int | None, outcome: dict[str, Any] | None) -> tuple[Part, ...]:
    """Return which files a job that has ended has to give; none where its input was refused."""
    if records is None:
        return ()
    counts = Totals(**{key: value for key, value in (outcome or {}).items() if key in Totals.__dataclass_fields__})
    answered = counts.done - counts.failed
    return (*((Part.OUTPUT,) if answered > 0 else ()), *((Part.ERROR,) if answered < records else ()))


def shown_name(name: str) -> str:
    """Return a file's name for showing: no path, nothing that changes how a line reads, 255 characters at most."""
    base = re.split(r"[/\\]", name)[-1]
    kept = "".join(character for character in base if unicodedata.category(character)[0] != "C").strip()
    return kept[:MOST_FILENAME] or "file"


def error_tail(tail: bytes) -> bytes:
    """Return what follows the id in a failed record's line, as an error file has it.

    Where the engine answered, its answer says what is wrong, and `error` is null; not a byte of the answer changes.
    """
    text = b"{" + tail
    found = {member.key: member for member in jsonbytes.members(text)}
    response, error = found["response"], found["error"]
    if text[response.start : response.end] == b"null":
        return tail
    return text[1 : error.start] + b"null" + text[error.end :]
