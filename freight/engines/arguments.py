"""Options on a server's command line: which the user gave, and ours beside them without any given twice."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

_SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def name_of(word: str, aliases: Mapping[str, str]) -> str | None:
    """Return the option that a word names, in one spelling: without value, underscores or "no-"; None for a value.

    `aliases` are other spellings, each with the one to use.
    """
    if not re.match(r"--?[A-Za-z]", word):
        return None
    name = word.split("=", 1)[0].split(".", 1)[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    name = aliases.get(name, name)
    return "--" + name.removeprefix("--no-") if name.startswith("--no-") else name


def given(args: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the options among the words, each with its last value ("" without one): `--flag v` and `--flag=v`."""
    found: dict[str, str] = {}
    for index, word in enumerate(args):
        name = name_of(word, aliases)
        if name is None:
            continue
        _, is_joined, value = word.partition("=")
        if not is_joined and index + 1 < len(args) and name_of(args[index + 1], aliases) is None:
            value = args[index + 1]
        found[name] = value
    return found


def joined(ours: Sequence[Sequence[str]], args: Sequence[str], aliases: Mapping[str, str]) -> list[str]:
    """Return our options (each with its values) that the user did not give, and then the user's own words."""
    theirs = given(args, aliases)
    kept = [word for option in ours if name_of(option[0], aliases) not in theirs for word in option]
    return [*kept, *args]


def whole_number(text: str) -> int | None:
    """Return the number that a server would read from a value such as 512, 8k or 8K; None when it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        return None
    return int(float(match.group(1)) * _SUFFIXES.get(match.group(2), 1))
