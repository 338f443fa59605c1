"""Whether a client's answers are the right ones: no time counts before they are."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.simengine.prompt import expected_content


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many records were answered rightly, and what else was there."""

    right: int
    wrong: int
    missing: int
    again: int
    in_order: bool

    def problem(self) -> str | None:
        """Return what is wrong with the answers that there are, if anything; None where some are only missing."""
        if self.wrong:
            return f"{self.wrong} answers are not the record's"
        return f"{self.again} records have several answers" if self.again else None


class Expected:
    """The answers that a file's records must get."""

    def __init__(self, path: Path) -> None:
        """Work out every answer of a batch file, as an engine with a profile gives it."""
        self._places: dict[str, int] = {}
        self._answers: list[int] = []
        with path.open("rb") as file:
            for place, raw in enumerate(file):
                line = json.loads(raw)
                self._places[line["custom_id"]] = place
                # A hash: a million answers need not be kept whole.
                self._answers.append(hash(expected_content(line["url"], json.dumps(line["body"]).encode())))

    def __len__(self) -> int:
        """Return how many records there are."""
        return len(self._answers)

    def check(self, answers: Iterable[tuple[str, str | None]]) -> Verdict:
        """Return how a client did; an answer of None is an error, and as good as none."""
        seen = bytearray(len(self._answers))
        right = wrong = again = 0
        in_order, last = True, -1
        for custom_id, content in answers:
            if content is None:
                continue
            place = self._places.get(custom_id)
            if place is None or hash(content) != self._answers[place]:
                wrong += 1
                continue
            again += seen[place]
            right += not seen[place]
            seen[place] = 1
            in_order = in_order and place > last
            last = place
        return Verdict(right, wrong, len(self._answers) - right, again, in_order)


def batch_answers(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the custom_id and the answer of each line of a results file in OpenAI's shape."""
    with path.open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            body = (line.get("response") or {}).get("body") or {}
            is_good = line.get("error") is None and "choices" in body
            yield line["custom_id"], body["choices"][0]["message"]["content"] if is_good else None
